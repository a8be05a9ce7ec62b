//! Memory of operations: handles to the application's memory or to copies of the engine, and reads
//! of another process's memory where these are allowed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use landbridge_drive::checksum::RunningChecksum;
use landbridge_drive::link::stream::{PIECES_MAX, Piece};
use landbridge_proto::endpoint::Memory;
use landbridge_proto::wire::hello::Introduction;

use super::local_endpoint::Cookie;
use super::request::Iov;

/// A handle to bytes. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub enum Bytes {
    /// One piece of the application's memory.
    One(Piece),
    /// Several pieces of the application's memory, and their size together.
    Many(Arc<[Piece]>, usize),
    /// A copy of the engine.
    Owned(Arc<Copied>),
}

/// A copy of the engine, which [`copied_bytes`] counts as long as a handle exists.
pub struct Copied(Box<[u8]>);

/// Bytes in copies of this process, over all endpoints.
static COPIED_BYTES: AtomicUsize = AtomicUsize::new(0);

impl Drop for Copied {
    fn drop(&mut self) {
        COPIED_BYTES.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

/// Number of bytes in copies of this process.
#[inline]
pub fn copied_bytes() -> u64 {
    COPIED_BYTES.load(Ordering::Relaxed) as u64
}

// SAFETY: the pieces belong to the application until their operation completes, whatever thread
// drives the engine.
unsafe impl Send for Bytes {}

/// Pieces of one payload for one system call, at most [`PIECES_MAX`]; further pieces need another
/// frame.
pub struct Pieces {
    list: [Piece; PIECES_MAX],
    count: usize,
}

impl Bytes {
    /// The memory that `iovs` describe.
    #[inline(always)]
    pub fn borrow(iovs: &[Iov]) -> Self {
        match iovs {
            [] => Bytes::One(Piece { base: std::ptr::null_mut(), len: 0 }),
            [one] => Bytes::One(Piece { base: one.base, len: one.len }),
            many => Self::borrow_many(many),
        }
    }

    /// The memory of a request: the caller's memory, or a copy if the caller may reuse the memory
    /// when the call returns. The copy exists from the beginning, because a peer may learn the
    /// address of the bytes before the bytes have left.
    #[inline]
    pub fn of_request(payload: &[Iov], inject: bool) -> Self {
        let memory = Self::borrow(payload);
        if inject {
            // SAFETY: the caller's memory is valid during the call, which is still on the stack.
            return unsafe { memory.to_owned() };
        }
        memory
    }

    #[cold]
    fn borrow_many(iovs: &[Iov]) -> Self {
        let pieces: Arc<[Piece]> =
            iovs.iter().map(|iov| Piece { base: iov.base, len: iov.len }).collect();
        let size = pieces.iter().map(|piece| piece.len).sum();
        Bytes::Many(pieces, size)
    }

    /// A handle that owns `bytes`.
    pub fn own(bytes: Vec<u8>) -> Self {
        COPIED_BYTES.fetch_add(bytes.len(), Ordering::Relaxed);
        Bytes::Owned(Arc::new(Copied(bytes.into())))
    }

    /// A copy of the bytes, in one piece.
    ///
    /// # Safety
    /// The memory is valid.
    pub unsafe fn to_owned(&self) -> Self {
        // SAFETY: the caller guarantees valid memory.
        Bytes::own(unsafe { self.copy() })
    }

    /// A handle to bytes `at..at + len` that outlives their operation: a new copy, or another
    /// handle of an existing copy. Updates `running` with the bytes.
    ///
    /// # Safety
    /// The memory is valid.
    pub unsafe fn keep(&self, at: u64, len: u64, running: &mut RunningChecksum) -> Self {
        if let (Bytes::Owned(bytes), 0) = (self, at)
            && bytes.0.len() as u64 == len
        {
            running.update(&bytes.0);
            return self.clone();
        }
        let mut copy = Vec::<u8>::with_capacity(len as usize);
        let mut end = copy.as_mut_ptr();
        for piece in self.range(at, len).as_slice() {
            // SAFETY: the caller guarantees valid memory; the pieces are `len` bytes together, for
            // which `copy` has capacity.
            unsafe {
                running.copy_raw(piece.base, end, piece.len);
                end = end.add(piece.len);
            }
        }
        // SAFETY: the bytes have been written.
        unsafe { copy.set_len(len as usize) };
        Bytes::own(copy)
    }

    /// Updates `running` with bytes `at..at + len`.
    ///
    /// # Safety
    /// The memory is valid.
    #[inline]
    pub unsafe fn sum(&self, at: u64, len: u64, running: &mut RunningChecksum) {
        for piece in self.range(at, len).as_slice() {
            // SAFETY: the caller guarantees valid memory.
            running.update(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
        }
    }

    /// A vector with all bytes.
    ///
    /// # Safety
    /// The memory is valid.
    pub unsafe fn copy(&self) -> Vec<u8> {
        let mut copy = Vec::with_capacity(self.size() as usize);
        for piece in self.range(0, self.size()).as_slice() {
            // SAFETY: the caller guarantees valid memory.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
        }
        copy
    }

    /// The pieces of bytes `at..at + len`.
    ///
    /// # Panics
    /// The range lies outside of the memory, or spans more pieces than an operation may have.
    #[inline]
    pub fn range(&self, at: u64, len: u64) -> Pieces {
        let (mut at, mut len) = (at as usize, len as usize);
        assert!(at + len <= self.size() as usize, "a range outside of its memory");
        let nothing = Piece { base: std::ptr::null_mut(), len: 0 };
        let mut pieces = Pieces { list: [nothing; PIECES_MAX], count: 0 };
        let one;
        let all: &[Piece] = match self {
            Bytes::One(piece) => std::slice::from_ref(piece),
            Bytes::Many(pieces, _) => pieces,
            Bytes::Owned(bytes) => {
                one = [Piece { base: bytes.0.as_ptr().cast_mut(), len: bytes.0.len() }];
                &one
            }
        };
        for piece in all {
            let skip = at.min(piece.len);
            at -= skip;
            let here = len.min(piece.len - skip);
            if here > 0 {
                assert!(pieces.count < PIECES_MAX, "more pieces than an operation may have");
                // SAFETY: `skip` bytes lie inside the piece.
                let base = unsafe { piece.base.add(skip) };
                pieces.list[pieces.count] = Piece { base, len: here };
                pieces.count += 1;
                len -= here;
            }
        }
        pieces
    }

    /// Copies `from` to the bytes from `at` on; stops at the end of either.
    ///
    /// # Safety
    /// The memory is valid, and nothing else uses it.
    #[inline]
    pub unsafe fn fill(&self, at: u64, from: &[u8]) {
        if let Bytes::One(piece) = self {
            let (at, len) = (at as usize, from.len().min(piece.len - at as usize));
            // SAFETY: the caller guarantees valid memory; the range lies inside the piece.
            return unsafe { from.as_ptr().copy_to_nonoverlapping(piece.base.add(at), len) };
        }
        let len = (from.len() as u64).min(self.size() - at);
        let mut done = 0;
        for piece in self.range(at, len).as_slice() {
            // SAFETY: the caller guarantees valid memory; the range is as long as the copied bytes.
            unsafe { from[done..].as_ptr().copy_to_nonoverlapping(piece.base, piece.len) };
            done += piece.len;
        }
    }
}

impl Memory for Bytes {
    #[inline]
    fn size(&self) -> u64 {
        match self {
            Bytes::One(piece) => piece.len as u64,
            Bytes::Many(_, size) => *size as u64,
            Bytes::Owned(bytes) => bytes.0.len() as u64,
        }
    }

    #[inline]
    fn address(&self) -> u64 {
        match self {
            Bytes::One(piece) => piece.base.expose_provenance() as u64,
            Bytes::Many(..) => 0,
            Bytes::Owned(bytes) => bytes.0.as_ptr().expose_provenance() as u64,
        }
    }
}

impl Pieces {
    #[inline]
    pub fn as_slice(&self) -> &[Piece] {
        &self.list[..self.count]
    }
}

/// A process of this node whose memory this process may read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadableProcess {
    pub pid: i32,
    cookie_address: u64,
    cookie: u64,
}

impl ReadableProcess {
    /// The process `pid`, which has introduced itself, if the cookie can be read there.
    pub fn find(pid: i32, introduction: &Introduction) -> Option<ReadableProcess> {
        let Introduction { cookie_address, cookie, .. } = *introduction;
        let process = ReadableProcess { pid, cookie_address, cookie };
        process.cookie().map(|_| process)
    }

    /// The cookie, if the process is still the one that has introduced itself.
    pub fn cookie(&self) -> Option<Cookie> {
        let mut seen = Cookie { value: 0, regions: 0 };
        let piece = Piece { base: (&raw mut seen).cast(), len: size_of::<Cookie>() };
        // SAFETY: the piece is a local variable, for which all bytes are valid.
        unsafe { read_process(self.pid, self.cookie_address, &[piece]) }.ok()?;
        (seen.value == self.cookie).then_some(seen)
    }
}

/// Reads another process's memory at `address` into `pieces`.
///
/// # Safety
/// The pieces are valid memory of this process.
pub unsafe fn read_process(pid: i32, mut address: u64, pieces: &[Piece]) -> io::Result<()> {
    for piece in pieces {
        let mut done = 0;
        while done < piece.len {
            // SAFETY: `done` bytes lie inside the piece.
            let base = unsafe { piece.base.add(done) };
            let local = libc::iovec { iov_base: base.cast(), iov_len: piece.len - done };
            let remote = libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
                iov_len: local.iov_len,
            };
            // SAFETY: the call writes only to `local`; the kernel checks the other process's
            // address.
            let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
            if got <= 0 {
                return Err(io::Error::last_os_error());
            }
            done += got as usize;
            address += got as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_fills_cross_pieces() {
        let (mut a, mut b) = ([0u8; 3], [0u8; 5]);
        let iov = |bytes: &mut [u8]| Iov { base: bytes.as_mut_ptr(), len: bytes.len() };
        let bytes = Bytes::borrow(&[iov(&mut a), iov(&mut b)]);
        // SAFETY: the arrays live in this function.
        unsafe { bytes.fill(2, &[1, 2, 3, 4]) };
        assert_eq!((a, b), ([0, 0, 1], [2, 3, 4, 0, 0]));
        // SAFETY: the arrays live in this function.
        assert_eq!(unsafe { bytes.copy() }, [0, 0, 1, 2, 3, 4, 0, 0]);
        assert_eq!(bytes.range(2, 2).as_slice().len(), 2);
        assert_eq!((bytes.size(), bytes.address()), (8, 0));
    }
}
