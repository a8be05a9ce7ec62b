//! `landbridge doctor-probe LIBFABRIC`: loads one libfabric and prints its version and the
//! providers it offers, one line each. A process of its own, because a library once loaded cannot
//! be taken back.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

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

pub fn run(path: &Path) -> Result<()> {
    let library = open(path)?;
    // SAFETY: these are the signatures of libfabric's interface under these names.
    let (version, getinfo) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Version>(symbol(library, c"fi_version")?),
            std::mem::transmute::<*mut c_void, Getinfo>(symbol(library, c"fi_getinfo")?),
        )
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

fn open(path: &Path) -> Result<*mut c_void> {
    let name = CString::new(path.as_os_str().as_bytes()).context("not a file name")?;
    // SAFETY: a C string; the library's initialisers are the reason this is a process of its own.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: after a failed dlopen there is a message, valid until the next call.
        let error = unsafe { CStr::from_ptr(libc::dlerror()) };
        bail!("cannot load it: {}", error.to_string_lossy());
    }
    Ok(library)
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        bail!("it has no {}", name.to_string_lossy());
    }
    Ok(address)
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
