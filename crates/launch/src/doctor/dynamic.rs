//! Libraries opened by their path, for the processes in which the doctor tests the libraries.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A library that stays open until the process ends.
pub struct DynamicLibrary(*mut c_void);

impl DynamicLibrary {
    /// Opens a library and runs its initialisers. `visibility` is RTLD_LOCAL or RTLD_GLOBAL.
    pub fn open(path: &Path, visibility: c_int) -> Result<DynamicLibrary> {
        let name = CString::new(path.as_os_str().as_bytes()).context("not a file name")?;
        // SAFETY: `name` is a C string; the initialisers run that any user of the library runs.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | visibility) };
        if library.is_null() {
            // SAFETY: after a failed dlopen, dlerror returns a message that is valid until the next
            // call.
            let error = unsafe { CStr::from_ptr(libc::dlerror()) };
            bail!("cannot load it: {}", error.to_string_lossy());
        }
        Ok(DynamicLibrary(library))
    }

    /// The function `name` of the library.
    ///
    /// # Safety
    ///
    /// `F` has to be a function pointer type with the signature that the library defines for
    /// `name`.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: `self.0` is an open library, and `name` is a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            bail!("it has no {}", name.to_string_lossy());
        }
        // SAFETY: `address` is not null and of type `F`, as the caller promises; the sizes are
        // equal.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}
