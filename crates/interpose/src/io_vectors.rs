//! Buffers that a call reads or writes, as a list of `struct iovec` (readv(2)).
//!
//! In: arguments of such a call. Out: the list, and digests of what the buffers hold. The list is
//! copied, because a read may overwrite it. What may never happen: memory behind the list is used.

use std::mem::MaybeUninit;

use libc::{c_long, iovec};

use crate::kernel_calls::bytes;

/// Largest number of buffers in one call: the kernel's `UIO_MAXIOV`.
pub const IO_VECTORS_MAX: usize = 1024;

/// Place for a list. It is not initialized: to clear it costs as much as a small write.
pub struct IoVectorRoom(MaybeUninit<[iovec; IO_VECTORS_MAX]>);

/// The buffers of one call.
#[derive(Clone, Copy)]
pub struct IoVectors<'a>(&'a [iovec]);

impl IoVectorRoom {
    #[inline]
    pub const fn new() -> IoVectorRoom {
        IoVectorRoom(MaybeUninit::uninit())
    }

    /// Copies a list, of which entries beyond the largest number are left out.
    ///
    /// # Safety
    /// The list is valid.
    unsafe fn copy_of(&mut self, list: *const iovec, count: usize) -> &mut [iovec] {
        let count = count.min(IO_VECTORS_MAX);
        let room = self.0.as_mut_ptr().cast::<iovec>();
        // SAFETY: the caller's promise; the room is large enough, and is initialized up to `count`.
        unsafe {
            list.cast::<u8>().copy_to_nonoverlapping(room.cast(), count * size_of::<iovec>());
            std::slice::from_raw_parts_mut(room, count)
        }
    }
}

impl<'a> IoVectors<'a> {
    /// Buffers of a call that has one buffer, or a list of them.
    ///
    /// # Safety
    /// The arguments are those of a read or write call.
    pub unsafe fn of(
        room: &'a mut IoVectorRoom,
        number: c_long,
        pointer: u64,
        length: u64,
    ) -> IoVectors<'a> {
        let has_list = matches!(
            number,
            libc::SYS_readv
                | libc::SYS_preadv
                | libc::SYS_preadv2
                | libc::SYS_writev
                | libc::SYS_pwritev
                | libc::SYS_pwritev2
        );
        let one = iovec { iov_base: pointer as *mut _, iov_len: length as usize };
        // SAFETY: the caller's promise.
        IoVectors(unsafe {
            match has_list {
                true => room.copy_of(pointer as *const iovec, length as usize),
                false => room.copy_of(&raw const one, 1),
            }
        })
    }

    /// Arguments for the kernel: address of the list, and number of entries.
    pub fn list(&self) -> (u64, u64) {
        (self.0.as_ptr().addr() as u64, self.0.len() as u64)
    }

    /// The buffers of the first `length` bytes; the others become empty.
    pub fn limited<'b>(&self, room: &'b mut IoVectorRoom, mut length: usize) -> IoVectors<'b> {
        // SAFETY: a valid list.
        let limited = unsafe { room.copy_of(self.0.as_ptr(), self.0.len()) };
        for piece in &mut *limited {
            piece.iov_len = piece.iov_len.min(length);
            length -= piece.iov_len;
        }
        IoVectors(limited)
    }

    pub fn length(&self) -> usize {
        self.0.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.iov_len))
    }

    /// The first `length` bytes, as slices.
    ///
    /// # Safety
    /// The memory is valid, and no other code uses it meanwhile.
    pub unsafe fn first(&self, mut length: usize) -> impl Iterator<Item = &'static mut [u8]> {
        self.0.iter().map_while(move |piece| {
            let now = piece.iov_len.min(length);
            length -= now;
            // SAFETY: the caller's promise.
            let memory = unsafe { bytes(piece.iov_base.addr() as u64, now) };
            (now > 0 || piece.iov_len == 0).then_some(memory)
        })
    }

    /// A digest of the first `length` bytes, which depends on their division into buffers.
    ///
    /// # Safety
    /// The memory is valid.
    pub unsafe fn digest(&self, length: usize) -> u64 {
        // SAFETY: the caller's promise.
        let mut pieces = unsafe { self.first(length) };
        if self.0.len() == 1 {
            return pieces.next().map_or(0, |piece| landbridge_proto::digest::digest(piece));
        }
        pieces
            .fold(0, |sum: u64, piece| sum.rotate_left(7) ^ landbridge_proto::digest::digest(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_cuts_off_the_last_buffers() {
        let text = *b"abcdefgh";
        let piece = |at: usize, length| iovec {
            iov_base: text[at..].as_ptr().cast_mut().cast(),
            iov_len: length,
        };
        let list = [piece(0, 3), piece(3, 0), piece(3, 5)];
        let (mut room, mut other) = (IoVectorRoom::new(), IoVectorRoom::new());
        let start = list.as_ptr().addr() as u64;
        // SAFETY: the list and its memory are on this stack.
        let all = unsafe { IoVectors::of(&mut room, libc::SYS_readv, start, 3) };
        assert_eq!(all.length(), 8);
        for (limit, lengths) in [(0, [0, 0, 0]), (2, [2, 0, 0]), (4, [3, 0, 1]), (8, [3, 0, 5])] {
            let limited = all.limited(&mut other, limit);
            assert_eq!(limited.length(), limit);
            assert_eq!(limited.0.iter().map(|it| it.iov_len).collect::<Vec<_>>(), lengths);
        }
        // SAFETY: as above.
        let (pieces, digests) = unsafe {
            let pieces: Vec<&[u8]> = all.first(4).map(|it| &*it).collect();
            (pieces, [3, 4].map(|length| all.digest(length)))
        };
        assert_eq!(pieces, [&b"abc"[..], b"", b"d"]);
        assert_ne!(digests[0], digests[1]);
        // SAFETY: as above.
        let one = unsafe { IoVectors::of(&mut other, libc::SYS_read, start, 3) };
        assert_eq!((one.length(), one.list().1), (3, 1));
    }
}
