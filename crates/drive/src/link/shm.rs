//! Frames between two processes of one node, through shared memory.
//!
//! A link is two rings in one memory file, one for each direction. The dialling side makes the file
//! and passes it over the Unix socket of the hello. The socket stays open. It carries wake-ups, one
//! byte each and only for a side that sleeps: for a frame, or for space in a ring that was full.
//! The end of the socket reports the end of the other process. Nothing has a name in a file system,
//! so no process leaves anything behind, however it ends.
//!
//! A ring holds whole frames at multiples of [`SLOT`] bytes. The first eight bytes of a frame's
//! header (its length and kind, never zero) are written last and announce the frame; the eight
//! bytes after the last frame are always zero. So the reader polls one word, and a small frame
//! travels in the same cache line as its announcement.
//!
//! What may never happen: a frame is seen before it is whole; a writer overtakes the reader; a side
//! sleeps while a frame waits for it; a word that the other side could have written is used before
//! it was checked.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};

/// Frames start at multiples of this many bytes: a cache line.
const SLOT: usize = 64;

/// The cache lines that are fetched ahead: a small frame may take two.
#[cfg(target_arch = "x86_64")]
const AHEAD_SLOTS: usize = 3;

/// The size of one ring in bytes: some thirty frames of [`FRAME_BYTES_MAX`], and small enough that
/// both rings of a pair stay in a core's second-level cache.
const RING_BYTES: usize = 256 << 10;

/// A writer that finds the ring empty wraps after this many bytes. Messages that wait for each
/// other then use a few pages, which stay in the first-level caches, and the rest of the ring is
/// never touched.
const SHORT_LAP_BYTES: usize = 8 << 10;

/// The longest frame that a ring takes, header included, in bytes.
pub const FRAME_BYTES_MAX: usize = RING_BYTES / 8;

/// A reader checks for a writer that waits for space each time that it has freed this many bytes:
/// enough to be worth waking the writer, and so rarely that the fence costs nothing noticeable.
const ROOM_BYTES: usize = RING_BYTES / 4;

/// The size of the memory file in bytes: a page of control words, then the rings.
const FILE_BYTES: usize = CONTROL_BYTES + 2 * RING_BYTES;
const CONTROL_BYTES: usize = 4096;

/// The first word at the offset where a ring wraps before its end.
const WRAP: u64 = u64::MAX;

/// The functions that map shared memory: a provider keeps the mapping inside its own arena.
#[derive(Clone, Copy)]
pub struct Mapper {
    /// Maps a file of the given size, readable and writable.
    pub map: fn(BorrowedFd<'_>, usize) -> io::Result<NonNull<u8>>,
    /// Unmaps what `map` has mapped.
    pub unmap: fn(NonNull<u8>, usize),
}

impl Mapper {
    /// Maps at any address.
    pub const ANYWHERE: Mapper = Mapper { map: map_anywhere, unmap: unmap_anywhere };
}

/// One side of a link.
pub struct ShmLink {
    socket: OwnedFd,
    memory: NonNull<u8>,
    mapper: Mapper,
    /// The control words and the ring that this side writes.
    out: ShmRing,
    /// The control words and the ring that this side reads.
    into: ShmRing,
    /// The bytes ever written and, as far as known, read by the other side.
    written: u64,
    freed: u64,
    /// The bytes that the last frame without space needed; 0 if there was space.
    needed_bytes: usize,
    /// The bytes ever read, and their number when this side last checked for a waiting writer.
    read: u64,
    room_reported: u64,
    /// The size of the frame that [`Self::peek`] returned.
    shown: usize,
    /// The other side claims to have read bytes that were never written. [`Self::peek`] reports
    /// this.
    is_broken: bool,
}

#[derive(Clone, Copy)]
struct ShmRing {
    control: NonNull<RingControl>,
    ring: NonNull<u8>,
}

/// The control words of one ring. Each word is on its own cache line, so that one side's stores do
/// not disturb what the other side polls.
#[repr(C, align(128))]
struct RingControl {
    /// The bytes that the reader has freed.
    read: AtomicU64,
    _line: [u64; 15],
    /// Not 0: the reader sleeps, or is about to.
    parked: AtomicU32,
    _another_line: [u32; 15],
    /// Not 0: the writer found the ring full and sleeps, or is about to.
    wants_room: AtomicU32,
    /// The writer's close code plus 1; 0 if there is none.
    close_code: AtomicU64,
}

const _: () = {
    // A frame and what is skipped before it take less than two of the longest frames. So a ring
    // without space for a frame holds more than a reader reads until it checks for a waiting
    // writer, wherever it checked last.
    let most = 2 * FRAME_BYTES_MAX;
    assert!(ROOM_BYTES + most < RING_BYTES - most - SLOT);
    assert!(2 * size_of::<RingControl>() <= CONTROL_BYTES);
    assert!(RING_BYTES.is_power_of_two() && FRAME_BYTES_MAX.is_multiple_of(SLOT));
};

// SAFETY: the pointers lead to memory shared by design; all access goes through `&mut self`.
unsafe impl Send for ShmLink {}

impl ShmLink {
    /// Makes the memory of a new link and passes it over `socket`, right after the hello.
    ///
    /// # Errors
    /// If memory is short, or the other side has closed the socket.
    pub fn dial(socket: OwnedFd, mapper: Mapper) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("landbridge-link", flags)?;
        rustix::fs::ftruncate(&file, FILE_BYTES as u64)?;
        // A peer that shrinks the file would kill this process with SIGBUS.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let link = Self::new(socket, &file, mapper, 0)?;

        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&link.socket, &[IoSlice::new(b"M")], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(link)
    }

    /// Receives the memory that the other side has made. `WouldBlock` means that it has not
    /// arrived: call again.
    ///
    /// # Errors
    /// If the other side closes the socket, or sends something else than one descriptor.
    pub fn receive_memory(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags)?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no memory came with it"))
    }

    /// Creates the accepting side of a link, with the memory from [`Self::receive_memory`].
    ///
    /// # Errors
    /// If the memory is not a sealed file of the right size.
    pub fn accept(socket: OwnedFd, file: OwnedFd, mapper: Mapper) -> io::Result<Self> {
        let is_sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        let size = rustix::fs::fstat(&file)?.st_size;
        if !is_sealed || size != FILE_BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not the memory of a link"));
        }
        Self::new(socket, &file, mapper, 1)
    }

    fn new(socket: OwnedFd, file: &OwnedFd, mapper: Mapper, side: usize) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let memory = (mapper.map)(file.as_fd(), FILE_BYTES)?;
        let half = |index: usize| ShmRing {
            // SAFETY: the control words of both rings lie inside the FILE_BYTES just mapped.
            control: unsafe { memory.cast::<RingControl>().add(index) },
            // SAFETY: both rings lie inside the FILE_BYTES just mapped.
            ring: unsafe { memory.add(CONTROL_BYTES + index * RING_BYTES) },
        };
        Ok(Self {
            socket,
            memory,
            mapper,
            out: half(side),
            into: half(1 - side),
            written: 0,
            freed: 0,
            needed_bytes: 0,
            read: 0,
            room_reported: 0,
            shown: 0,
            is_broken: false,
        })
    }

    /// Writes one frame (`front` is its header and head), and wakes the other side if it sleeps.
    /// Returns false if the ring has no space, or if the link is broken, which [`Self::peek`] then
    /// reports.
    ///
    /// # Panics
    /// If the frame is longer than [`FRAME_BYTES_MAX`], or `front` is shorter than the
    /// announcement.
    #[inline]
    pub fn send(&mut self, front: &[u8], payload: &[IoSlice<'_>]) -> bool {
        let size = front.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        assert!(size <= FRAME_BYTES_MAX && front.len() >= 8, "a frame of {size} bytes for a ring");
        let span = size.next_multiple_of(SLOT);
        let Some(at) = self.reserve(span) else {
            return false;
        };
        // SAFETY: `reserve` found `span` bytes at `at`, and a slot behind them, which only this
        // side accesses.
        unsafe {
            let start = self.out.ring.add(at);
            let mut to = copy_front(&front[8..], start.add(8));
            for piece in payload {
                to.copy_from_nonoverlapping(NonNull::from(&piece[..]).cast(), piece.len());
                to = to.add(piece.len());
            }
            let next = (at + span) & (RING_BYTES - 1);
            word(self.out.ring, next).store(0, Ordering::Relaxed);
            let announcement = u64::from_le_bytes(front[..8].try_into().unwrap_or_default());
            word(self.out.ring, at).store(announcement, Ordering::Release);
        }
        self.written += span as u64;
        self.wake();
        self.own_next_lines();
        true
    }

    /// Prefetches for writing the cache lines that the next small frame and the zero slot behind it
    /// need, while nobody waits. The reader's cache holds these lines since the last lap, and the
    /// next announcement cannot become visible before this side owns them.
    #[inline]
    fn own_next_lines(&self) {
        #[cfg(target_arch = "x86_64")]
        for slot in 1..=AHEAD_SLOTS {
            let at = (self.written as usize + slot * SLOT) & (RING_BYTES - 1);
            // SAFETY: a hint about memory inside the ring.
            unsafe {
                let line = self.out.ring.add(at).as_ptr().cast::<i8>();
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(line);
            }
        }
    }

    /// The offset for a frame of `span` bytes, if the ring has space for the frame and the zero
    /// slot behind it.
    #[inline]
    fn reserve(&mut self, span: usize) -> Option<usize> {
        let at = self.written as usize & (RING_BYTES - 1);
        let to_end = RING_BYTES - at;
        // An early wrap needs a frame that fits before `at`: the reader will never free more than
        // the whole ring.
        let is_early = at >= SHORT_LAP_BYTES.max(span + SLOT);
        let starts_over = span > to_end || (is_early && self.is_all_read());
        let skip = if starts_over { to_end } else { 0 };
        let needed = skip + span + SLOT;
        if !self.has_room(needed) {
            self.needed_bytes = needed;
            return None;
        }
        self.needed_bytes = 0;
        if skip == 0 {
            return Some(at);
        }
        // SAFETY: the rest of the ring and its first slot are free, as the check above found.
        unsafe {
            word(self.out.ring, 0).store(0, Ordering::Relaxed);
            word(self.out.ring, at).store(WRAP, Ordering::Release);
        }
        self.written += skip as u64;
        Some(0)
    }

    /// Whether the reader has freed everything.
    #[inline]
    fn is_all_read(&mut self) -> bool {
        self.refresh_freed();
        self.freed == self.written
    }

    #[inline]
    fn has_room(&mut self, bytes: usize) -> bool {
        if self.unread() + bytes <= RING_BYTES {
            return true;
        }
        self.refresh_freed();
        self.unread() + bytes <= RING_BYTES && !self.is_broken
    }

    /// The bytes in the ring: at most [`RING_BYTES`], since `freed` has been checked.
    #[inline]
    fn unread(&self) -> usize {
        (self.written - self.freed) as usize
    }

    /// Reads what the reader has freed: never less than before, never more than was written. Any
    /// other value marks the link broken.
    #[inline]
    fn refresh_freed(&mut self) {
        // SAFETY: the control words live as long as the mapping.
        let read = unsafe { self.out.control.as_ref() }.read.load(Ordering::Acquire);
        if (self.freed..=self.written).contains(&read) {
            self.freed = read;
        } else {
            self.is_broken = true;
        }
    }

    /// Rings the other side's doorbell if it sleeps.
    #[inline]
    fn wake(&self) {
        // SAFETY: the control words live as long as the mapping.
        self.ring_doorbell_if(&unsafe { self.out.control.as_ref() }.parked);
    }

    /// Rings the other side's doorbell if it sleeps until the ring has space.
    #[cold]
    fn notify_room(&mut self) {
        self.room_reported = self.read;
        // SAFETY: the control words live as long as the mapping.
        self.ring_doorbell_if(&unsafe { self.into.control.as_ref() }.wants_room);
    }

    #[inline]
    fn ring_doorbell_if(&self, sleeps: &AtomicU32) {
        // The fence pairs with the fence in `prepare_park`: either this side sees that the other
        // one sleeps, or the other side sees what this side did.
        fence(Ordering::SeqCst);
        if sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0 {
            // A full socket buffer means that the doorbell has been rung often enough.
            let _ = send(&self.socket, b"!", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    /// The next frame, whole and contiguous, if one has arrived. The frame stays until
    /// [`Self::consume`].
    ///
    /// # Errors
    /// If the other side announces an impossible frame: the caller must close the link.
    #[inline]
    pub fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        let mut at = self.read as usize & (RING_BYTES - 1);
        // SAFETY: `at` is a multiple of SLOT inside the ring.
        let mut first = unsafe { word(self.into.ring, at) }.load(Ordering::Acquire);
        if first == 0 {
            return self.check().map(|()| None);
        }
        if first == WRAP {
            self.read += (RING_BYTES - at) as u64;
            at = 0;
            // SAFETY: offset 0 is a multiple of SLOT inside the ring.
            first = unsafe { word(self.into.ring, 0) }.load(Ordering::Acquire);
            if first == 0 {
                return Ok(None);
            }
        }
        let size = landbridge_proto::wire::frame::HEADER_BYTES + (first as u32) as usize;
        if size > FRAME_BYTES_MAX || at + size > RING_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame longer than its ring"));
        }
        self.shown = size;
        // SAFETY: the frame lies inside the ring, and its writer does not change it until it is
        // consumed.
        Ok(Some(unsafe { std::slice::from_raw_parts(self.into.ring.add(at).as_ptr(), size) }))
    }

    /// Checks the link.
    ///
    /// # Errors
    /// If the other side is known to have written an impossible value: the caller must close the
    /// link.
    #[inline]
    pub fn check(&self) -> io::Result<()> {
        if self.is_broken {
            let why = "the other side says it has read what was never written";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(())
    }

    /// Returns the space of the frame that [`Self::peek`] returned to the writer.
    #[inline]
    pub fn consume(&mut self) {
        self.read += self.shown.next_multiple_of(SLOT) as u64;
        self.shown = 0;
        // SAFETY: the control words live as long as the mapping.
        unsafe { self.into.control.as_ref() }.read.store(self.read, Ordering::Release);
        if self.read - self.room_reported >= ROOM_BYTES as u64 {
            self.notify_room();
        }
    }

    /// Announces that this side will sleep on [`Self::fd`] until a frame arrives, or until there is
    /// space for the frame that found none. Returns false if this has happened already: the caller
    /// must not sleep.
    pub fn prepare_park(&mut self) -> bool {
        // SAFETY: the control words live as long as the mapping.
        unsafe { self.into.control.as_ref() }.parked.store(1, Ordering::Relaxed);
        let may_sleep = self.prepare_wait_for_room() && matches!(self.peek(), Ok(None));
        if !may_sleep {
            self.unpark();
        }
        may_sleep
    }

    /// Announces that this side will sleep until there is space for the frame that found none, for
    /// a side that reads no frames for now. Returns false if there is space already: the caller
    /// must not sleep.
    pub fn prepare_wait_for_room(&mut self) -> bool {
        if self.needed_bytes > 0 {
            // SAFETY: the control words live as long as the mapping.
            unsafe { self.out.control.as_ref() }.wants_room.store(1, Ordering::Relaxed);
        }
        // The fence pairs with the fence in `ring_doorbell_if`.
        fence(Ordering::SeqCst);
        if self.needed_bytes > 0 && self.has_room(self.needed_bytes) {
            // The space is reported once: the frame may not be wanted any more.
            self.needed_bytes = 0;
            self.unpark();
            return false;
        }
        true
    }

    /// Records that this side is awake.
    pub fn unpark(&mut self) {
        // SAFETY: the control words live as long as the mapping.
        let (into, out) = unsafe { (self.into.control.as_ref(), self.out.control.as_ref()) };
        into.parked.store(0, Ordering::Relaxed);
        if out.wants_room.load(Ordering::Relaxed) != 0 {
            out.wants_room.store(0, Ordering::Relaxed);
        }
    }

    /// The bytes that this side has ever written to its ring.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Sets a close code for the other side, which the other side finds after this process has
    /// ended, however full the ring is.
    pub fn set_close_code(&mut self, number: u64) {
        // SAFETY: the control words live as long as the mapping.
        unsafe { self.out.control.as_ref() }
            .close_code
            .store(number.wrapping_add(1), Ordering::Release);
    }

    /// The close code of the other side, if it has set one. The caller must check that the value is
    /// plausible.
    pub fn close_code(&self) -> Option<u64> {
        // SAFETY: the control words live as long as the mapping.
        unsafe { self.into.control.as_ref() }.close_code.load(Ordering::Acquire).checked_sub(1)
    }

    /// The descriptor that becomes readable when the doorbell rings or the other side ends.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads and discards the doorbell's bytes. Returns false if the other side has ended (frames
    /// that it wrote may still be in the ring).
    pub fn drain_doorbell(&mut self) -> bool {
        let mut bytes = [0u8; 64];
        loop {
            match recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return false,
                Ok((_, got)) if got == bytes.len() => (),
                Ok(_) => return true,
                Err(rustix::io::Errno::INTR) => (),
                Err(error) => return error == rustix::io::Errno::AGAIN,
            }
        }
    }

    /// The other side's process id in this side's PID namespace.
    ///
    /// # Errors
    /// If the other process has no id in this namespace.
    pub fn peer_pid(&self) -> io::Result<i32> {
        match crate::sys::peer_pid(&self.socket) {
            0 => Err(io::ErrorKind::NotFound.into()),
            pid => Ok(pid),
        }
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        (self.mapper.unmap)(self.memory, FILE_BYTES);
    }
}

impl std::fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShmLink(fd {})", self.socket.as_raw_fd())
    }
}

/// The word at `at`.
///
/// # Safety
/// `at` is a multiple of [`SLOT`] inside the ring, and the result does not outlive the mapping.
#[inline]
unsafe fn word<'a>(ring: NonNull<u8>, at: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise; rings are page aligned.
    unsafe { ring.add(at).cast::<AtomicU64>().as_ref() }
}

fn map_anywhere(file: BorrowedFd<'_>, size: usize) -> io::Result<NonNull<u8>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping of this process's own file replaces no memory.
    let memory =
        unsafe { mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file, 0)? };
    NonNull::new(memory.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn unmap_anywhere(memory: NonNull<u8>, size: usize) {
    // SAFETY: `memory` came from `map_anywhere` with this size and is used no more.
    let _ = unsafe { rustix::mm::munmap(memory.as_ptr().cast(), size) };
}

/// Copies bytes that were written just now, word by word as they were written: wider loads would
/// have to wait until the stores have reached the cache. Returns the end of the copy.
///
/// # Safety
/// `to` is aligned to words and has space for the copy, and only this side accesses this space.
#[inline]
unsafe fn copy_front(front: &[u8], to: NonNull<u8>) -> NonNull<u8> {
    let (words, rest) = front.as_chunks::<8>();
    for (place, bytes) in words.iter().enumerate() {
        // SAFETY: the caller's promise. (The compiler would turn plain stores into one call that
        // copies in pieces as wide as possible.)
        unsafe { word(to, 8 * place) }.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let end = to.add(8 * words.len());
        if !rest.is_empty() {
            end.copy_from_nonoverlapping(NonNull::from(rest).cast(), rest.len());
        }
        end.add(rest.len())
    }
}

#[cfg(test)]
mod tests;
