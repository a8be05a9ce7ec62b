//! A relay's end of shared memory with an endpoint of its node ("near deliver"): the same calls as
//! a [`super::socket::Socket`], over rings that hold whole frames.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use super::shm::{FRAME_BYTES_MAX, ShmLink};
use super::socket::{SocketRead, SocketWrite};

/// Most slices that one frame is cut into by a queue: its chunks, and one more at each end.
const SLICES_MAX: usize = FRAME_BYTES_MAX / landbridge_proto::route::byte_queue::CHUNK_BYTES + 3;

// Whatever a relay takes from elsewhere it can hand to an endpoint of its node.
const _: () = assert!(landbridge_proto::relay::FRAME_BYTES_MAX <= FRAME_BYTES_MAX);

/// See the module head.
#[derive(Debug)]
pub struct RelayShmLink(pub ShmLink);

impl RelayShmLink {
    /// The descriptor to wait on while parked.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Whether a frame has arrived (or something that is none).
    pub fn has_input(&mut self) -> bool {
        !matches!(self.0.peek(), Ok(None))
    }

    /// Takes as many frames as have arrived and fit.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, `UnexpectedEof` if the endpoint is gone, or the link is broken.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<SocketRead> {
        let mut bytes = 0;
        loop {
            match self.0.peek()? {
                None if bytes > 0 => return Ok(SocketRead { bytes, more: true }),
                None => return self.nothing(),
                Some(frame) if frame.len() > buffer.len() - bytes => {
                    return Ok(SocketRead { bytes, more: true });
                }
                Some(frame) => {
                    buffer[bytes..bytes + frame.len()].copy_from_slice(frame);
                    bytes += frame.len();
                }
            }
            self.0.consume();
        }
    }

    fn nothing(&mut self) -> io::Result<SocketRead> {
        let is_alive = self.0.drain_doorbell();
        match self.0.peek()? {
            Some(_) => Ok(SocketRead { bytes: 0, more: true }),
            None if is_alive => Err(io::ErrorKind::WouldBlock.into()),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes as many whole frames of `slices` as there is room for; `lengths` are the frames'.
    ///
    /// # Errors
    /// If a frame does not fit any ring, or the link is broken.
    pub fn write<'a>(
        &mut self,
        mut slices: impl Iterator<Item = &'a [u8]>,
        lengths: impl Iterator<Item = usize>,
    ) -> io::Result<SocketWrite> {
        let mut written = SocketWrite::default();
        let mut current: &[u8] = &[];
        for length in lengths {
            if length > FRAME_BYTES_MAX {
                let why = "a frame is longer than the shared memory of a link takes";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
            let mut parts = [IoSlice::new(&[]); SLICES_MAX];
            let (mut count, mut left) = (0, length);
            while left > 0 {
                if current.is_empty() {
                    match slices.next() {
                        Some(slice) => current = slice,
                        None => return Ok(written),
                    }
                }
                let (part, rest) = current.split_at(left.min(current.len()));
                (parts[count], current) = (IoSlice::new(part), rest);
                (count, left) = (count + 1, left - part.len());
            }
            if !self.send(&parts[..count]) {
                self.0.check()?;
                written.blocked = true;
                break;
            }
            written.bytes += length;
        }
        Ok(written)
    }

    /// The announcement, the first eight bytes of a frame, must lie in one piece.
    fn send(&mut self, parts: &[IoSlice<'_>]) -> bool {
        if parts[0].len() >= 8 {
            return self.0.send(&parts[0], &parts[1..]);
        }
        let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.0.send(&whole, &[])
    }
}
