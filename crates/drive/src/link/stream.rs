//! Frames over a byte stream, to and from memory that belongs to the caller.
//!
//! Bytes move from the caller's memory to the socket and from the socket to their destination
//! without an intermediate copy. Only headers, heads and small payloads that arrived together with
//! them are copied out of a staging buffer, which all streams of a process share.
//!
//! The link *holds* a frame of which the socket takes only a part: it remembers the rest, and sends
//! nothing else before the rest. What may never happen: bytes of two frames mix; the memory of a
//! held frame is read after [`StreamLink::copy_held`] was called for it.
//!
//! Small frames that follow each other may be *gathered* ([`StreamLink::gather`]): they are copied
//! behind each other, and one system call sends them all. They leave before every later frame.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The most pieces of memory in one system call.
pub const PIECES_MAX: usize = 8;

/// A piece of memory that stays valid by the caller's promise.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The start address.
    pub base: *mut u8,
    /// The length in bytes.
    pub len: usize,
}

/// The outcome of sending a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The socket has taken the whole frame.
    All,
    /// The link holds the rest of the frame: see [`StreamLink::flush`].
    Held,
    /// The socket has taken nothing of the frame.
    Busy,
}

/// One side of a stream.
pub struct StreamLink {
    socket: OwnedFd,
    held: Option<PartialFrame>,
    /// Frames that have not left yet, one behind the other. Empty while a frame is held.
    gathered: Vec<u8>,
    /// The destination of the payload that is arriving; empty between frames.
    target: Vec<Piece>,
    /// The bytes of the arriving payload that are skipped, after `target`.
    skip: usize,
    /// The start of a frame whose head has not all arrived.
    rest: Vec<u8>,
    /// The bytes read ahead between payloads: many while frames are small; few while frames are
    /// large, because their payload would otherwise be copied once more.
    read_ahead: usize,
}

/// The unsent rest of a frame.
struct PartialFrame {
    front: Vec<u8>,
    pieces: Vec<Piece>,
    owned: Vec<u8>,
}

// SAFETY: the pieces point to memory that is valid by the caller's promise, on whatever thread.
unsafe impl Send for StreamLink {}

impl StreamLink {
    /// Creates a stream over a connected socket, which becomes non-blocking.
    ///
    /// # Errors
    /// The errors of ioctl(2).
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket,
            held: None,
            gathered: Vec::new(),
            target: Vec::new(),
            skip: 0,
            rest: Vec::new(),
            read_ahead: usize::MAX,
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a frame: `front` (header and head), then `payload`.
    ///
    /// # Safety
    /// The payload's memory stays valid until the frame has left: with [`Sent::All`] the frame has
    /// left; otherwise until [`Self::flush`] returns true or [`Self::copy_held`] is called.
    ///
    /// # Errors
    /// If the stream is broken.
    #[inline]
    pub unsafe fn send(&mut self, front: &[u8], payload: &[Piece]) -> io::Result<Sent> {
        if self.held.is_some() || !self.send_gathered()? {
            return Ok(Sent::Busy);
        }
        let size = front.len() + payload.iter().map(|piece| piece.len).sum::<usize>();
        // SAFETY: the caller's promise.
        let written = unsafe { write(&self.socket, front, payload) }?;
        if written == size {
            return Ok(Sent::All);
        }
        if written == 0 {
            return Ok(Sent::Busy);
        }
        self.hold(front, payload, written);
        Ok(Sent::Held)
    }

    /// Whether a frame of this many bytes, with header and head, can be gathered now.
    #[inline]
    pub fn can_gather(&self, bytes: usize) -> bool {
        bytes <= GATHER_BYTES_MAX
            && self.held.is_none()
            && self.gathered.len() + bytes <= BURST_BYTES_MAX
    }

    /// Copies a frame behind those that leave together, at the next [`Self::send_gathered`] or
    /// before the next frame that is sent.
    ///
    /// # Safety
    /// The payload's memory is valid during the call.
    #[inline]
    pub unsafe fn gather(&mut self, front: &[u8], payload: &[Piece]) {
        debug_assert!(self.held.is_none());
        self.gathered.extend_from_slice(front);
        for piece in payload {
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.len) };
            self.gathered.extend_from_slice(bytes);
        }
    }

    /// Sends the gathered frames. Returns false if the socket has not taken all of them: then the
    /// link holds the rest.
    ///
    /// # Errors
    /// If the stream is broken.
    #[inline]
    pub fn send_gathered(&mut self) -> io::Result<bool> {
        if self.gathered.is_empty() {
            return Ok(self.held.is_none());
        }
        // SAFETY: there are no pieces.
        let written = unsafe { write(&self.socket, &self.gathered, &[]) }?;
        if written < self.gathered.len() {
            let front = self.gathered.split_off(written);
            self.held = Some(PartialFrame { front, pieces: Vec::new(), owned: Vec::new() });
        }
        self.gathered.clear();
        Ok(self.held.is_none())
    }

    #[cold]
    fn hold(&mut self, front: &[u8], payload: &[Piece], written: usize) {
        let in_front = written.min(front.len());
        let pieces = advance(payload, written - in_front);
        self.held =
            Some(PartialFrame { front: front[in_front..].to_vec(), pieces, owned: Vec::new() });
    }

    /// Whether the link holds a frame.
    pub fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// Sends more of the held frame. Returns true if no frame is held any more.
    ///
    /// # Errors
    /// If the stream is broken.
    pub fn flush(&mut self) -> io::Result<bool> {
        let Some(held) = self.held.as_mut() else {
            return Ok(true);
        };
        // SAFETY: the promise given to `send` still stands, or the pieces lie in `owned`.
        let written = unsafe { write(&self.socket, &held.front, &held.pieces) }?;
        let in_front = written.min(held.front.len());
        held.front.drain(..in_front);
        held.pieces = advance(&held.pieces, written - in_front);
        if held.front.is_empty() && held.pieces.is_empty() {
            self.held = None;
        }
        Ok(self.held.is_none())
    }

    /// Copies the rest of the held frame, so that the caller's memory is no longer needed.
    pub fn copy_held(&mut self) {
        let Some(held) = self.held.as_mut() else {
            return;
        };
        let mut owned = Vec::with_capacity(held.pieces.iter().map(|piece| piece.len).sum());
        for piece in &held.pieces {
            // SAFETY: the promise given to `send` still stands.
            owned.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
        }
        held.owned = owned;
        held.pieces = vec![Piece { base: held.owned.as_mut_ptr(), len: held.owned.len() }];
        held.pieces.retain(|piece| piece.len > 0);
    }

    /// Reads once: first the missing bytes of the arriving payload, then up to `stage` bytes of
    /// what follows. The bytes kept by [`Self::keep`] come first in `stage`.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived, `UnexpectedEof` at the end, and the errors of
    /// recvmsg(2).
    #[inline]
    pub fn read(&mut self, stage: &mut [u8]) -> io::Result<StreamRead> {
        let kept = self.rest.len();
        stage[..kept].copy_from_slice(&self.rest);
        self.rest.clear();
        match self.receive(stage, kept) {
            Ok(read) => Ok(read),
            Err(error) => {
                self.rest.extend_from_slice(&stage[..kept]);
                Err(error)
            }
        }
    }

    #[inline]
    fn receive(&mut self, stage: &mut [u8], kept: usize) -> io::Result<StreamRead> {
        let is_inside = self.is_inside();
        if !is_inside {
            let end = stage.len().min(self.read_ahead.max(kept + READ_AHEAD_BYTES));
            let asked = end - kept;
            let got = self.receive_plainly(&mut stage[kept..end])?;
            self.read_ahead = usize::MAX;
            return Ok(StreamRead {
                start: 0,
                end: kept + got,
                ended: false,
                drained: got < asked,
            });
        }
        let mut vector = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        let mut count = 0;
        let mut wanted = 0;
        for piece in self.target.iter().take(PIECES_MAX - 1) {
            vector[count] = libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len };
            wanted += piece.len;
            count += 1;
        }
        // While a payload is arriving, little more than the next header is read with it, so that
        // the next payload can again move straight to its destination.
        let ahead = READ_AHEAD_BYTES.min(stage.len());
        let room = if self.target.len() < PIECES_MAX { &mut stage[kept..ahead] } else { &mut [] };
        vector[count] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let asked = wanted + room.len();

        // SAFETY: an all-zero msghdr is a valid one.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vector.as_mut_ptr();
        message.msg_iovlen = count + 1;
        // SAFETY: the vector describes the stage, and memory that is valid by the callers' promise.
        let got =
            unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let got = got as usize;
        let placed = got.min(wanted);
        if placed > 0 {
            self.target = advance(&self.target, placed);
        }
        let mut staged = kept + got - placed;
        let mut start = 0;
        if self.target.is_empty() && self.skip > 0 {
            start = self.skip.min(staged);
            self.skip -= start;
        }
        staged = staged.max(start);
        let ended = !self.is_inside();
        Ok(StreamRead { start, end: staged, ended, drained: got < asked })
    }

    /// Reads into the stage only, the usual case, with the cheaper of the two system calls.
    #[inline]
    fn receive_plainly(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let fd = self.socket.as_raw_fd();
        // SAFETY: writes at most `room.len()` bytes to `room`.
        let got =
            unsafe { libc::recv(fd, room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT) };
        match got {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => Ok(got as usize),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Directs the payload of the current frame to `target`, and skips `skip` bytes after it. Takes
    /// the payload bytes that are already in `staged`, and returns their number. The payload is
    /// complete if [`Self::is_inside`] is false then.
    ///
    /// # Safety
    /// The target's memory stays valid, and nobody else uses it, until the payload is complete or
    /// the stream is dropped.
    #[inline]
    pub unsafe fn begin(&mut self, target: &[Piece], skip: usize, staged: &[u8]) -> usize {
        let mut used = 0;
        let mut pieces = target.iter();
        for piece in pieces.by_ref() {
            let here = piece.len.min(staged.len() - used);
            // SAFETY: the caller's promise; the stage is memory of this process.
            unsafe { staged[used..].as_ptr().copy_to_nonoverlapping(piece.base, here) };
            used += here;
            if here < piece.len {
                // SAFETY: the piece continues `here` bytes further on.
                let base = unsafe { piece.base.add(here) };
                self.target.push(Piece { base, len: piece.len - here });
                break;
            }
        }
        self.target.extend(pieces.filter(|piece| piece.len > 0));
        let skipped = if self.target.is_empty() { skip.min(staged.len() - used) } else { 0 };
        self.skip = skip - skipped;
        if target.iter().map(|piece| piece.len).sum::<usize>() > BULK_BYTES {
            self.read_ahead = READ_AHEAD_BYTES;
        }
        used + skipped
    }

    /// Whether a payload is arriving.
    #[inline]
    pub fn is_inside(&self) -> bool {
        !self.target.is_empty() || self.skip > 0
    }

    /// Sets the most unsent bytes that the socket holds before it takes no more. This is a hint;
    /// without it, the socket holds more.
    pub fn set_unsent_max(&self, bytes: u32) {
        let (value, size) = (&raw const bytes, size_of::<u32>() as libc::socklen_t);
        // SAFETY: the option's value is one u32.
        let _ = unsafe {
            let fd = self.socket.as_raw_fd();
            libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, value.cast(), size)
        };
    }

    /// The bytes of the arriving payload that are still to come, without the skipped ones.
    #[inline]
    pub fn payload_left(&self) -> usize {
        self.target.iter().map(|piece| piece.len).sum()
    }

    /// Skips the rest of the arriving payload: its memory belongs to somebody else from now on.
    pub fn discard_rest(&mut self) {
        self.skip += self.payload_left();
        self.target.clear();
    }

    /// Keeps the start of a frame whose head has not all arrived, for the next [`Self::read`].
    #[inline]
    pub fn keep(&mut self, start: &[u8]) {
        self.rest.extend_from_slice(start);
    }
}

/// A payload of more bytes than this is worth a system call of its own.
const BULK_BYTES: usize = 16 << 10;

/// The staged bytes read along with the end of a payload: a header and head, and a small payload.
const READ_AHEAD_BYTES: usize = 512;

/// The result of [`StreamLink::read`]: `stage[start..end]` are new frames.
#[derive(Clone, Copy, Debug)]
pub struct StreamRead {
    /// The index of the first staged byte.
    pub start: usize,
    /// The index after the last staged byte.
    pub end: usize,
    /// The payload that was arriving is complete.
    pub ended: bool,
    /// The socket had no more.
    pub drained: bool,
}

/// The `pieces` without their first `bytes` bytes.
fn advance(pieces: &[Piece], mut bytes: usize) -> Vec<Piece> {
    let mut rest = Vec::new();
    for piece in pieces {
        let here = bytes.min(piece.len);
        bytes -= here;
        if here < piece.len {
            // SAFETY: the pointer stays inside the piece.
            rest.push(Piece { base: unsafe { piece.base.add(here) }, len: piece.len - here });
        }
    }
    rest
}

/// Writes as much as the socket takes; 0 if it takes nothing.
///
/// # Safety
/// The pieces are valid memory.
#[inline]
unsafe fn write(socket: &OwnedFd, front: &[u8], pieces: &[Piece]) -> io::Result<usize> {
    let payload = pieces.iter().map(|piece| piece.len).sum::<usize>();
    if front.len() + payload <= GATHER_BYTES_MAX {
        // SAFETY: the caller's promise.
        return unsafe { write_gathered(socket, front, pieces) };
    }
    let mut vector = [IoSlice::new(&[]); PIECES_MAX + 1];
    vector[0] = IoSlice::new(front);
    let count = pieces.len().min(PIECES_MAX);
    for (slice, piece) in vector[1..].iter_mut().zip(pieces) {
        // SAFETY: the caller's promise.
        *slice = IoSlice::new(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
    }
    // SAFETY: an all-zero msghdr is a valid one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vector.as_mut_ptr().cast();
    message.msg_iovlen = count + 1;
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: IoSlice has the layout of iovec; the vector outlives the call.
        let written = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
        if let Some(written) = taken(written)? {
            return Ok(written);
        }
    }
}

/// The size up to which frames are gathered in one buffer, in bytes: the copy is cheaper than the
/// kernel's work for a vector.
const GATHER_BYTES_MAX: usize = 1024;

/// The most bytes of frames that leave together.
const BURST_BYTES_MAX: usize = 32 << 10;

/// Writes front and pieces from one buffer.
///
/// # Safety
/// The pieces are valid memory, and are together with `front` at most [`GATHER_BYTES_MAX`] bytes.
#[inline]
unsafe fn write_gathered(socket: &OwnedFd, front: &[u8], pieces: &[Piece]) -> io::Result<usize> {
    let mut buffer = [std::mem::MaybeUninit::<u8>::uninit(); GATHER_BYTES_MAX];
    let base = buffer.as_mut_ptr().cast::<u8>();
    let mut filled = front.len();
    // SAFETY: the caller's promise: everything fits.
    unsafe {
        base.copy_from_nonoverlapping(front.as_ptr(), front.len());
        for piece in pieces {
            base.add(filled).copy_from_nonoverlapping(piece.base, piece.len);
            filled += piece.len;
        }
    }
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `filled` bytes have been written to the buffer.
        let written = unsafe { libc::send(socket.as_raw_fd(), base.cast(), filled, flags) };
        if let Some(written) = taken(written)? {
            return Ok(written);
        }
    }
}

/// The bytes that a writing call took; `None` if it was interrupted, 0 if the socket is full.
fn taken(written: isize) -> io::Result<Option<usize>> {
    if written >= 0 {
        return Ok(Some(written as usize));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(Some(0)),
        io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_payload_goes_straight_to_its_place_and_the_next_frame_is_staged() {
        let (mut a, mut b) = pair();
        let mut payload: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
        let whole = Piece { base: payload.as_mut_ptr(), len: payload.len() };
        let mut into = vec![0u8; 60_000];
        let mut stage = vec![0u8; 4096];
        // SAFETY: `payload` and `into` outlive the links.
        let sent = unsafe { a.send(b"front", &[whole]) }.unwrap();
        let read = b.read(&mut stage).unwrap();
        assert_eq!(&stage[..5], b"front");
        let target = [Piece { base: into.as_mut_ptr(), len: into.len() }];
        // SAFETY: `into` outlives the links.
        let used = unsafe { b.begin(&target, 40_000, &stage[5..read.end]) };
        assert_eq!(used, read.end - 5);
        let mut is_sent = sent == Sent::All;
        let mut ended = false;
        while !ended {
            is_sent = is_sent || a.flush().unwrap();
            ended = b.read(&mut stage).is_ok_and(|read| read.ended);
        }
        assert!(is_sent && !b.is_inside());
        assert_eq!(into, payload[..60_000]);
        // SAFETY: no payload.
        unsafe { a.send(b"next", &[]) }.unwrap();
        b.keep(b"kept-");
        let read = b.read(&mut stage).unwrap();
        assert_eq!((&stage[read.start..read.end], read.drained), (&b"kept-next"[..], true));
        assert_eq!(b.read(&mut stage).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_held_frame_can_outlive_its_memory() {
        let (mut a, mut b) = pair();
        let mut payload = vec![7u8; 4 << 20];
        let whole = Piece { base: payload.as_mut_ptr(), len: payload.len() };
        // SAFETY: `copy_held` is called before the memory changes.
        assert_eq!(unsafe { a.send(b"f", &[whole]) }.unwrap(), Sent::Held);
        a.copy_held();
        payload.fill(0);
        // SAFETY: the link takes nothing while it holds a frame.
        assert_eq!(unsafe { a.send(b"g", &[]) }.unwrap(), Sent::Busy);
        let mut seen = 0;
        let mut stage = vec![0u8; 1 << 16];
        while seen < payload.len() + 1 {
            a.flush().unwrap();
            let Ok(read) = b.read(&mut stage) else { continue };
            assert!(stage[..read.end].iter().all(|&byte| byte == 7 || byte == b'f'));
            seen += read.end;
        }
        assert!(a.flush().unwrap() && !a.is_holding());
    }

    #[test]
    fn gathered_frames_leave_together_and_before_the_next_frame() {
        let (mut a, mut b) = pair();
        let mut payload = *b"payload";
        let piece = Piece { base: payload.as_mut_ptr(), len: payload.len() };
        let mut stage = vec![0u8; 4096];
        assert!(a.can_gather(8) && !a.can_gather(GATHER_BYTES_MAX + 1));
        // SAFETY: the memory is valid during the calls.
        unsafe {
            a.gather(b"one-", &[piece]);
            a.gather(b"-two-", &[]);
        }
        assert_eq!(b.read(&mut stage).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // SAFETY: no payload.
        assert_eq!(unsafe { a.send(b"three", &[]) }.unwrap(), Sent::All);
        let mut seen = Vec::new();
        while let Ok(read) = b.read(&mut stage) {
            seen.extend_from_slice(&stage[..read.end]);
        }
        assert_eq!(seen, b"one-payload-two-three");
        assert!(a.send_gathered().unwrap(), "there are none");
    }

    #[test]
    fn gathered_frames_that_the_socket_does_not_take_are_held() {
        let (mut a, mut b) = pair();
        let frame = [3u8; 1000];
        let mut frames = 0;
        while !a.is_holding() {
            while a.can_gather(frame.len()) {
                // SAFETY: no payload.
                unsafe { a.gather(&frame, &[]) };
                frames += 1;
            }
            assert_eq!(a.send_gathered().unwrap(), !a.is_holding());
        }
        assert!(!a.can_gather(1), "the rest comes first");
        let (mut seen, mut stage) = (0, vec![0u8; 1 << 16]);
        while seen < frames * frame.len() {
            a.flush().unwrap();
            let Ok(read) = b.read(&mut stage) else { continue };
            assert!(stage[..read.end].iter().all(|&byte| byte == 3));
            seen += read.end;
        }
        assert!(!a.is_holding() && a.can_gather(1));
    }

    fn pair() -> (StreamLink, StreamLink) {
        let (a, b) = UnixStream::pair().unwrap();
        (StreamLink::new(a.into()).unwrap(), StreamLink::new(b.into()).unwrap())
    }
}
