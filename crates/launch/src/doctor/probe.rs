//! `landbridge doctor-probe LIBFABRIC`: loads one libfabric and prints its version and the
//! providers that it offers, one line each. The probe runs in a process of its own, because a
//! loaded library cannot be unloaded safely.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use anyhow::Result;

use super::dynamic::DynamicLibrary;

/// The beginning of libfabric's `struct fi_info`, which is the same in every version since 1.0.
#[repr(C)]
struct Info {
    next: *const Info,
    caps: u64,
    mode: u64,
    addr_format: u32,
    src_addrlen: usize,
    dest_addrlen: usize,
    /// Pointers to two addresses, a handle, and the attributes of transmit, receive, endpoint and
    /// domain.
    pointers: [*const c_void; 7],
    fabric_attr: *const FabricAttr,
}

/// The beginning of libfabric's `struct fi_fabric_attr`.
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

/// Seconds that a libfabric has to answer; a longer call hangs in the initialisation of some
/// provider.
pub const PATIENCE_SECONDS: u32 = 20;

pub fn run(path: &Path) -> Result<()> {
    // SAFETY: the call touches no memory. SIGALRM ends a process that neither handles nor ignores
    // the signal.
    unsafe { libc::alarm(PATIENCE_SECONDS) };
    let library = DynamicLibrary::open(path, libc::RTLD_LOCAL)?;
    // SAFETY: these are the signatures of libfabric's interface for these names.
    let (version, getinfo) = unsafe {
        (library.function::<Version>(c"fi_version")?, library.function::<Getinfo>(c"fi_getinfo")?)
    };
    // SAFETY: fi_version takes no arguments and returns a number.
    let version = unsafe { version() };
    println!("version {}.{}", version >> 16, version & 0xffff);
    let mut info = std::ptr::null();
    let none = std::ptr::null();
    // SAFETY: the call passes no node, service or hints; the result is written to `info`.
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

/// The names of the providers in the list, each name once.
fn names(mut info: *const Info) -> Vec<String> {
    let mut names = Vec::new();
    // SAFETY: libfabric returns a list that ends with a null pointer. Each entry has a fabric
    // attribute, whose names are C strings or null. The list is never freed, because the process
    // ends.
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
