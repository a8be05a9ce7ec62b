//! Libraries opened by their path, for the processes in which the doctor tries them out.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A library that stays open until the process ends.
pub struct DynamicLibrary(*mut c_void);

impl DynamicLibrary {
    /// `visibility`: RTLD_LOCAL or RTLD_GLOBAL. Runs the library's initialisers.
    pub fn open(path: &Path, visibility: c_int) -> Result<DynamicLibrary> {
        let name = CString::new(path.as_os_str().as_bytes()).context("not a file name")?;
        // SAFETY: a C string; initialisers of a library that someone wants to use anyway.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | visibility) };
        if library.is_null() {
            // SAFETY: after a failed dlopen there is a message, valid until the next call.
            let error = unsafe { CStr::from_ptr(libc::dlerror()) };
            bail!("cannot load it: {}", error.to_string_lossy());
        }
        Ok(DynamicLibrary(library))
    }

    /// The function of this name.
    ///
    /// # Safety
    ///
    /// `F` has to be a function pointer type with the signature the library gives that name.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: an open library and a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            bail!("it has no {}", name.to_string_lossy());
        }
        // SAFETY: not null, and of type `F` as the caller promises; sizes agree.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}
