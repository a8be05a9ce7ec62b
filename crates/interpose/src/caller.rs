//! Origin of a call: the program, or a library of the network below the program.
//!
//! Network transports measure time for themselves, against the processor's time stamp counter and
//! in loops that end when enough time has passed, so they read clocks a different number of times
//! in each incarnation. Nothing of these reads reaches the program, so they must not be recorded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use libc::size_t;

use crate::kernel_calls::kernel;

/// Beginnings of the file names of transport libraries: this project's provider, libfabric, and
/// what MPI libraries load.
const TRANSPORTS: [&[u8]; 12] = [
    b"liblandbridge",
    b"libfabric.so",
    b"libucs.so",
    b"libucm.so",
    b"libuct.so",
    b"libucp.so",
    b"libpsm2.so",
    b"libpsm3",
    b"libpsm_infinipath",
    b"libibverbs.so",
    b"librdmacm.so",
    b"libefa.so",
];

/// Beginnings of the file names of MPI libraries and the libraries that they load, whose
/// connections are part of the job.
const MPI: [&[u8]; 18] = [
    b"libmpi.",
    b"libmpi_cxx.",
    b"libmpi_mpifh.",
    b"libmpi_shm",
    b"libmpi_usempi",
    b"libmpi_abi.",
    b"libmpi_ilp64.",
    b"libmpich",
    b"libmpicxx.",
    b"libmpifort.",
    b"libpmi.",
    b"libpmi2.",
    b"libpmix.",
    b"libpmpi.",
    b"libhwloc.",
    b"libopen-pal.",
    b"libopen-rte.",
    b"libprrte.",
];

/// Beginnings of the file names of the C library. Its functions that use sockets are replaced
/// (`exports`), or ask the system's services: names of hosts and users.
const C_LIBRARY: [&[u8]; 7] =
    [b"libc.", b"libc-2.", b"libresolv", b"libnss_", b"libpthread", b"ld-linux", b"ld-2."];

/// Libraries that have read clocks, in the order of their first read. The recorded thread alone
/// uses the table.
static KNOWN: [KnownLibrary; KNOWN_MAX] = [const { KnownLibrary::none() }; KNOWN_MAX];
/// Size of [`KNOWN`]; further libraries are looked up at each of their reads.
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

/// Whether the code at an address belongs to the program, or to a library that is no transport. For
/// the recorded thread.
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

/// Whether the code at an address belongs to a transport library, for any thread.
pub fn belongs_to_transport(address: usize) -> bool {
    library_of(address).is_transport
}

/// Whether the code at an address belongs to the MPI library or a transport library, for any
/// thread.
pub fn belongs_to_mpi_or_transport(address: usize) -> bool {
    let found = library_of(address);
    found.is_transport || found.is_mpi
}

/// Call sites in the libraries of the network, the MPI library and the C library that have used
/// sockets. 0: free. A site is one word, so threads may write the table at the same time.
static NETWORK_CALLS: [AtomicUsize; NETWORK_CALLS_MAX] =
    [const { AtomicUsize::new(0) }; NETWORK_CALLS_MAX];
/// Size of [`NETWORK_CALLS`]; later sites replace earlier ones.
const NETWORK_CALLS_MAX: usize = 32;

/// Whether the code at an address belongs to the C library or to a module of it that looks up names
/// (nsswitch.conf(5)), for any thread.
pub fn belongs_to_c_library(address: usize) -> bool {
    library_of(address).is_c_library
}

/// Whether the call at this address is known not to be the program's.
#[inline]
pub fn is_known_network_call(address: usize) -> bool {
    NETWORK_CALLS.iter().any(|site| site.load(Relaxed) == address)
}

/// Remembers that the call at this address is not the program's.
#[cold]
pub fn remember_network_call(address: usize) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NETWORK_CALLS[NEXT.fetch_add(1, Relaxed) % NETWORK_CALLS_MAX].store(address, Relaxed);
}

/// Whether the code at an address belongs to the program, that is, neither to the C library nor to
/// libraries of the network. The answer comes from `maps` in proc(5), because the handler of system
/// calls may not wait for the loader's lock.
pub fn is_program_in_maps(address: usize) -> bool {
    let mut mappings = MappingReader::new(address);
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let path = c"/proc/self/maps".as_ptr().addr() as u64;
    let file = kernel(libc::SYS_openat, [crate::kernel_calls::HERE, path, flags, 0, 0, 0]);
    let Ok(file) = u64::try_from(file) else { return true };
    let mut room = [0_u8; 4096];
    let place = room.as_mut_ptr().addr() as u64;
    loop {
        let length = kernel(libc::SYS_read, [file, place, room.len() as u64, 0, 0, 0]);
        let length = usize::try_from(length).unwrap_or(0);
        if length == 0 || room[..length].iter().any(|byte| mappings.take(*byte)) {
            break;
        }
    }
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let name = mappings.found();
    ![&TRANSPORTS[..], &MPI, &C_LIBRARY].into_iter().flatten().any(|start| name.starts_with(start))
}

/// Reads lines of `maps` (proc(5)) byte by byte, up to the mapping that contains an address.
struct MappingReader {
    address: usize,
    /// First address of the mapping, and the end of the mapping.
    bounds: [usize; 2],
    /// Number of bounds that are read completely.
    known: usize,
    /// Beginning of the last component of the path.
    name: [u8; 32],
    length: usize,
    is_found: bool,
}

impl MappingReader {
    fn new(address: usize) -> Self {
        Self { address, bounds: [0; 2], known: 0, name: [0; 32], length: 0, is_found: false }
    }

    /// Takes the next byte of the text. True: the line of the mapping is complete.
    fn take(&mut self, byte: u8) -> bool {
        match byte {
            b'\n' => {
                self.is_found = (self.bounds[0]..self.bounds[1]).contains(&self.address);
                if !self.is_found {
                    *self = Self::new(self.address);
                }
            }
            _ if self.known < self.bounds.len() => match (byte as char).to_digit(16) {
                Some(digit) => {
                    self.bounds[self.known] = self.bounds[self.known] << 4 | digit as usize;
                }
                None => self.known += 1,
            },
            b'/' => self.length = 0,
            _ if self.length < self.name.len() => {
                self.name[self.length] = byte;
                self.length += 1;
            }
            _ => (),
        }
        self.is_found
    }

    /// Beginning of the file name of the mapping; empty if no mapping contains the address.
    fn found(&self) -> &[u8] {
        if self.is_found { &self.name[..self.length] } else { &[] }
    }
}

fn library_of(address: usize) -> LibraryLookup {
    let mut found = LibraryLookup {
        address,
        begin: 0,
        bytes: 0,
        is_transport: false,
        is_mpi: false,
        is_c_library: false,
    };
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
        // Code outside every library was generated by the program; `bytes` is 0 then, and the entry
        // stays free.
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
    is_c_library: bool,
}

/// Notes the library in `found` if the address is in it.
unsafe extern "C" fn visit(
    library: *mut libc::dl_phdr_info,
    _: size_t,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the C library passes a description of a library, and this module's `LibraryLookup`.
    let (library, found) = unsafe { (&*library, &mut *found.cast::<LibraryLookup>()) };
    // SAFETY: the library has this many headers.
    let headers =
        unsafe { std::slice::from_raw_parts(library.dlpi_phdr, library.dlpi_phnum as usize) };
    let base = library.dlpi_addr as usize;
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
        let (begin, bytes) = (base + header.p_vaddr as usize, header.p_memsz as usize);
        if found.address.wrapping_sub(begin) < bytes {
            (found.begin, found.bytes) = (begin, bytes);
            // SAFETY: null or a C string.
            found.is_transport = unsafe { is_named(library.dlpi_name, &TRANSPORTS) };
            // SAFETY: null or a C string.
            found.is_mpi = unsafe { is_named(library.dlpi_name, &MPI) };
            // SAFETY: null or a C string.
            found.is_c_library = unsafe { is_named(library.dlpi_name, &C_LIBRARY) };
            return 1;
        }
    }
    0
}

/// # Safety
/// `path` is null or a C string.
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
    fn libraries_of_the_network_are_distinguished_from_others() {
        let is_it = |path: &CStr| unsafe { is_named(path.as_ptr(), &TRANSPORTS) };
        for path in [c"/opt/lib/mpich/libucs.so.0", c"libfabric.so.1", c"/b/liblandbridge-fi.so"] {
            assert!(is_it(path), "{path:?}");
        }
        for path in [c"/opt/libucs.so.0/libmpi.so.12", c"", c"/usr/lib/libpython3.so"] {
            assert!(!is_it(path), "{path:?}");
        }
    }

    #[test]
    fn code_of_the_c_library_and_of_the_network_is_found_in_the_mappings() {
        assert!(is_program_in_maps(is_named as *const () as usize));
        assert!(is_program_in_maps(8));
        assert!(!is_program_in_maps(libc::connect as *const () as usize));
        let text = b"7f00-7f10 r--p 00000000 08:01 1    /opt/a b/libm.so.6\n\
                     7f10-8000 r-xp 00000000 08:01 1    /opt/x/libmpi.so.12\n\
                     8000-8001 rw-p 0 0 0 \n";
        let name_at = |address| {
            let mut reader = MappingReader::new(address);
            text.iter().any(|byte| reader.take(*byte));
            String::from_utf8_lossy(reader.found()).trim().to_owned()
        };
        assert_eq!(name_at(0x7f0f), "libm.so.6");
        assert_eq!(name_at(0x7f10), "libmpi.so.12");
        assert!(name_at(0x8000).starts_with("rw-p"));
        assert_eq!(name_at(0x9000), "");
    }

    #[test]
    fn a_library_of_the_program_is_not_taken_for_one_of_mpi() {
        let is_it = |path: &CStr| unsafe { is_named(path.as_ptr(), &MPI) };
        for path in [c"libmpi.so.12", c"/x/libmpi_usempif08.so.40", c"libmpifort.so.12"] {
            assert!(is_it(path), "{path:?}");
        }
        for path in [c"libmpihelper.so", c"/x/libmpi_mine.so", c"libpmimic.so", c"libopen-mine.so"]
        {
            assert!(!is_it(path), "{path:?}");
        }
    }

    #[test]
    fn calls_of_the_network_are_remembered() {
        assert!(!is_known_network_call(7));
        remember_network_call(7);
        assert!(is_known_network_call(7));
    }

    #[test]
    fn one_that_is_in_no_library_is_the_program() {
        for _ in 0..2 * KNOWN_MAX {
            assert!(is_program(8));
            assert!(is_program(is_named as *const () as usize));
        }
        assert!(KNOWN[1].bytes.load(Relaxed) == 0);
    }
}
