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

pub mod ring;

use ring::{RingFault, RingMemory, RingReader, RingWriter, SLOT};

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
    out: RingWriter<MappedRing>,
    into: RingReader<MappedRing>,
}

/// A ring in the memory of a link, which lives as long as the mapping.
struct MappedRing {
    control: NonNull<RingControl>,
    ring: NonNull<u8>,
}

impl MappedRing {
    #[inline]
    fn control(&self) -> &RingControl {
        // SAFETY: the control words live as long as the mapping.
        unsafe { self.control.as_ref() }
    }
}

impl RingMemory for MappedRing {
    type Word = AtomicU64;
    type Flag = AtomicU32;

    const RING_BYTES: usize = RING_BYTES;
    const FRAME_BYTES_MAX: usize = FRAME_BYTES_MAX;
    const SHORT_LAP_BYTES: usize = SHORT_LAP_BYTES;
    const ROOM_BYTES: usize = ROOM_BYTES;

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the ends of a ring ask for multiples of a word inside the ring.
        unsafe { word(self.ring, at) }
    }

    #[inline]
    fn freed(&self) -> &AtomicU64 {
        &self.control().read
    }

    #[inline]
    fn parked(&self) -> &AtomicU32 {
        &self.control().parked
    }

    #[inline]
    fn wants_room(&self) -> &AtomicU32 {
        &self.control().wants_room
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
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
    /// A number that the writer's side tells, and that changes rarely; 0 before the first.
    notice: AtomicU64,
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
        let half = |index: usize| MappedRing {
            // SAFETY: the control words of both rings lie inside the FILE_BYTES just mapped.
            control: unsafe { memory.cast::<RingControl>().add(index) },
            // SAFETY: both rings lie inside the FILE_BYTES just mapped.
            ring: unsafe { memory.add(CONTROL_BYTES + index * RING_BYTES) },
        };
        Ok(Self {
            socket,
            memory,
            mapper,
            out: RingWriter::new(half(side)),
            into: RingReader::new(half(1 - side)),
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
        let Some(at) = self.out.reserve(span) else {
            return false;
        };
        // SAFETY: `reserve` found `span` bytes at `at`, and a slot behind them, which only this
        // side accesses.
        unsafe {
            let start = self.out.memory.ring.add(at);
            let mut to = copy_front(&front[8..], start.add(8));
            for piece in payload {
                to.copy_from_nonoverlapping(NonNull::from(&piece[..]).cast(), piece.len());
                to = to.add(piece.len());
            }
        }
        let announcement = u64::from_le_bytes(front[..8].try_into().unwrap_or_default());
        self.out.announce(at, span, announcement);
        if self.out.must_wake_reader() {
            self.ring_doorbell();
        }
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
            let at = (self.out.written() as usize + slot * SLOT) & (RING_BYTES - 1);
            // SAFETY: a hint about memory inside the ring.
            unsafe {
                let line = self.out.memory.ring.add(at).as_ptr().cast::<i8>();
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(line);
            }
        }
    }

    #[cold]
    fn ring_doorbell(&self) {
        // A full socket buffer means that the doorbell has been rung often enough.
        let _ = send(&self.socket, b"!", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// The next frame, whole and contiguous, if one has arrived. The frame stays until
    /// [`Self::consume`].
    ///
    /// # Errors
    /// If the other side announces an impossible frame: the caller must close the link.
    #[inline]
    pub fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        match self.into.peek() {
            // SAFETY: the frame lies inside the ring, and its writer does not change it until it is
            // consumed.
            Ok(Some((at, size))) => Ok(Some(unsafe {
                std::slice::from_raw_parts(self.into.memory.ring.add(at).as_ptr(), size)
            })),
            Ok(None) => self.check().map(|()| None),
            Err(fault) => Err(broken(fault)),
        }
    }

    /// Checks the link.
    ///
    /// # Errors
    /// If the other side is known to have written an impossible value: the caller must close the
    /// link.
    #[inline]
    pub fn check(&self) -> io::Result<()> {
        self.out.fault().map_or(Ok(()), |fault| Err(broken(fault)))
    }

    /// Returns the space of the frame that [`Self::peek`] returned to the writer.
    #[inline]
    pub fn consume(&mut self) {
        if self.into.consume() {
            self.ring_doorbell();
        }
    }

    /// Announces that this side will sleep on [`Self::fd`] until a frame arrives, or until there is
    /// space for the frame that found none. Returns false if this has happened already: the caller
    /// must not sleep.
    pub fn prepare_park(&mut self) -> bool {
        ring::prepare_park(&mut self.into, &mut self.out)
    }

    /// Announces that this side will sleep until there is space for the frame that found none, for
    /// a side that reads no frames for now. Returns false if there is space already: the caller
    /// must not sleep.
    pub fn prepare_wait_for_room(&mut self) -> bool {
        ring::prepare_wait_for_room(&mut self.into, &mut self.out)
    }

    /// Records that this side is awake.
    pub fn unpark(&mut self) {
        ring::unpark(&mut self.into, &mut self.out);
    }

    /// The bytes that this side has ever written to its ring.
    pub fn written(&self) -> u64 {
        self.out.written()
    }

    /// Sets a close code for the other side, which the other side finds after this process has
    /// ended, however full the ring is.
    pub fn set_close_code(&mut self, number: u64) {
        let code = number.wrapping_add(1);
        self.out.memory.control().close_code.store(code, Ordering::Release);
    }

    /// The close code of the other side, if it has set one. The caller must check that the value is
    /// plausible.
    pub fn close_code(&self) -> Option<u64> {
        self.into.memory.control().close_code.load(Ordering::Acquire).checked_sub(1)
    }

    /// Tells the other side a number, in place of the one before, without waking it.
    pub fn set_notice(&self, number: u64) {
        self.out.memory.control().notice.store(number, Ordering::Release);
    }

    /// The number that the other side has told last; 0 if none. The other side may tell anything.
    #[inline]
    pub fn notice(&self) -> u64 {
        self.into.memory.control().notice.load(Ordering::Acquire)
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

fn broken(fault: RingFault) -> io::Error {
    let why = match fault {
        RingFault::FrameTooLong => "a frame longer than its ring",
        RingFault::FreedTooMuch => "the other side acknowledges bytes that were never written",
    };
    io::Error::new(io::ErrorKind::InvalidData, why)
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
