//! Who reads: the program, or a library that is part of the network below it.
//!
//! Transports measure for themselves, against the processor's own counter and in loops that end when enough time has passed:
//! they read another number of times at every start. Nothing of it reaches the program, so it need not be on record, and
//! must not be.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use libc::size_t;

/// How the file names of such libraries begin: our provider, its host, and what MPI libraries load beside it.
const TRANSPORTS: [&[u8]; 10] = [
    b"liblandbridge",
    b"libfabric.so",
    b"libucs.so",
    b"libucm.so",
    b"libuct.so",
    b"libucp.so",
    b"libpsm",
    b"libibverbs.so",
    b"librdmacm.so",
    b"libefa.so",
];

/// And MPI libraries with what they load, whose connections are part of the job.
const MPI: [&[u8]; 4] = [b"libmpi", b"libpmi", b"libhwloc", b"libopen-"];

/// Libraries that have read clocks, in the order in which they did. Used by one thread.
static KNOWN: [KnownLibrary; KNOWN_MAX] = [const { KnownLibrary::none() }; KNOWN_MAX];
/// More are looked up at each of their reads.
const KNOWN_MAX: usize = 32;

struct KnownLibrary {
    begin: AtomicUsize,
    bytes: AtomicUsize,
    is_transport: AtomicUsize,
}

impl KnownLibrary {
    const fn none() -> KnownLibrary {
        KnownLibrary {
            begin: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            is_transport: AtomicUsize::new(0),
        }
    }
}

/// Whether the program reads, or a library that works for it.
#[inline]
pub fn is_program(address: usize) -> bool {
    for known in &KNOWN {
        if address.wrapping_sub(known.begin.load(Relaxed)) < known.bytes.load(Relaxed) {
            return known.is_transport.load(Relaxed) == 0;
        }
        if known.bytes.load(Relaxed) == 0 {
            break;
        }
    }
    find(address)
}

/// Whether a library of the network below the program reads, for any thread.
pub fn belongs_to_transport(address: usize) -> bool {
    library_of(address).is_transport
}

/// Whether the MPI library calls, or a library below it, for any thread.
pub fn belongs_to_mpi_or_transport(address: usize) -> bool {
    let found = library_of(address);
    found.is_transport || found.is_mpi
}

fn library_of(address: usize) -> LibraryLookup {
    let mut found =
        LibraryLookup { address, begin: 0, bytes: 0, is_transport: false, is_mpi: false };
    // SAFETY: `visit` is called with `found` before this call returns.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

#[cold]
fn find(address: usize) -> bool {
    let found = library_of(address);
    if let Some(free) = KNOWN.iter().find(|known| known.bytes.load(Relaxed) == 0) {
        free.begin.store(found.begin, Relaxed);
        free.is_transport.store(usize::from(found.is_transport), Relaxed);
        // What belongs to no library was made by the program; `bytes` is 0 then, and the place stays free.
        free.bytes.store(found.bytes, Relaxed);
    }
    !found.is_transport
}

struct LibraryLookup {
    address: usize,
    begin: usize,
    bytes: usize,
    is_transport: bool,
    is_mpi: bool,
}

/// Looks whether the address is in this library.
unsafe extern "C" fn visit(
    library: *mut libc::dl_phdr_info,
    _: size_t,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the C library hands in a library's description, and our own `LibraryLookup`.
    let (library, found) = unsafe { (&*library, &mut *found.cast::<LibraryLookup>()) };
    // SAFETY: so many headers are there.
    let headers =
        unsafe { std::slice::from_raw_parts(library.dlpi_phdr, library.dlpi_phnum as usize) };
    let base = library.dlpi_addr as usize;
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
        let (begin, bytes) = (base + header.p_vaddr as usize, header.p_memsz as usize);
        if found.address.wrapping_sub(begin) < bytes {
            (found.begin, found.bytes) = (begin, bytes);
            // SAFETY: null or a string.
            found.is_transport = unsafe { is_named(library.dlpi_name, &TRANSPORTS) };
            // SAFETY: as above.
            found.is_mpi = unsafe { is_named(library.dlpi_name, &MPI) };
            return 1;
        }
    }
    0
}

/// # Safety
/// `path` is null or a string.
unsafe fn is_named(path: *const c_char, beginnings: &[&[u8]]) -> bool {
    if path.is_null() {
        return false;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    beginnings.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_the_network_are_told_from_others() {
        let is_it = |path: &CStr| unsafe { is_named(path.as_ptr(), &TRANSPORTS) };
        for path in [c"/opt/lib/mpich/libucs.so.0", c"libfabric.so.1", c"/b/liblandbridge-fi.so"] {
            assert!(is_it(path), "{path:?}");
        }
        for path in [c"/opt/libucs.so.0/libmpi.so.12", c"", c"/usr/lib/libpython3.so"] {
            assert!(!is_it(path), "{path:?}");
        }
    }

    #[test]
    fn whoever_is_in_no_library_is_the_program() {
        for _ in 0..2 * KNOWN_MAX {
            assert!(is_program(8));
            assert!(is_program(is_named as *const () as usize));
        }
        assert!(KNOWN[1].bytes.load(Relaxed) == 0);
    }
}
