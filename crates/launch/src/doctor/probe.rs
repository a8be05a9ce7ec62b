//! `landbridge doctor-probe LIBFABRIC`: loads one libfabric and prints its version and the
//! providers it offers, one line each. A process of its own, because a library once loaded cannot
//! be taken back.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use anyhow::Result;

use super::dynamic::DynamicLibrary;

/// The beginning of libfabric's `struct fi_info`, the same in every version since 1.0.
#[repr(C)]
struct Info {
    next: *const Info,
    caps: u64,
    mode: u64,
    addr_format: u32,
    src_addrlen: usize,
    dest_addrlen: usize,
    /// Two addresses, a handle, and the attributes of transmit, receive, endpoint and domain.
    pointers: [*const c_void; 7],
    fabric_attr: *const FabricAttr,
}

/// The beginning of `struct fi_fabric_attr`.
#[repr(C)]
struct FabricAttr {
    fabric: *const c_void,
    name: *const c_char,
    prov_name: *const c_char,
}

type Version = unsafe extern "C" fn() -> u32;
type Getinfo = unsafe extern "C" fn(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    info: *mut *const Info,
) -> c_int;

/// A libfabric that has not answered by then hangs, in some provider's initialisation.
pub const PATIENCE_SECONDS: u32 = 20;

pub fn run(path: &Path) -> Result<()> {
    // SAFETY: no memory is involved. SIGALRM ends a process that does nothing about it.
    unsafe { libc::alarm(PATIENCE_SECONDS) };
    let library = DynamicLibrary::open(path, libc::RTLD_LOCAL)?;
    // SAFETY: these are the signatures of libfabric's interface under these names.
    let (version, getinfo) = unsafe {
        (library.function::<Version>(c"fi_version")?, library.function::<Getinfo>(c"fi_getinfo")?)
    };
    // SAFETY: takes nothing, gives a number.
    let version = unsafe { version() };
    println!("version {}.{}", version >> 16, version & 0xffff);
    let mut info = std::ptr::null();
    let none = std::ptr::null();
    // SAFETY: no node, service or hints; the result goes into `info`.
    let code = unsafe { getinfo(version, none, none, 0, std::ptr::null(), &mut info) };
    if code != 0 {
        println!("error {code}");
        return Ok(());
    }
    for name in names(info) {
        println!("provider {name}");
    }
    Ok(())
}

/// Names of the providers in the list, each once.
fn names(mut info: *const Info) -> Vec<String> {
    let mut names = Vec::new();
    // SAFETY: libfabric gives a list that ends with a null pointer, each with a fabric attribute
    // whose names are C strings or null. It is never freed here: the process ends.
    unsafe {
        while let Some(entry) = info.as_ref() {
            if let Some(fabric) = entry.fabric_attr.as_ref()
                && !fabric.prov_name.is_null()
            {
                names.push(CStr::from_ptr(fabric.prov_name).to_string_lossy().into_owned());
            }
            info = entry.next;
        }
    }
    names.dedup();
    names
}
