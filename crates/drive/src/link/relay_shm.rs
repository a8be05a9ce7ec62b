//! A relay's end of the shared memory with an endpoint of its node: the same calls as a
//! [`super::socket::Socket`], over rings that hold whole frames.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use super::shm::{FRAME_BYTES_MAX, ShmLink};
use super::socket::{SocketRead, SocketWrite};

/// The most slices into which a queue cuts one frame: its chunks, and one more at each end.
const SLICES_MAX: usize = FRAME_BYTES_MAX / landbridge_proto::route::byte_queue::CHUNK_BYTES + 3;

// A relay can pass any frame that it accepts to an endpoint of its node.
const _: () = assert!(landbridge_proto::relay::FRAME_BYTES_MAX <= FRAME_BYTES_MAX);

/// A relay's end of shared memory: see the module documentation.
#[derive(Debug)]
pub struct RelayShmLink(pub ShmLink);

impl RelayShmLink {
    /// The descriptor to wait on while parked.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Whether a frame has arrived, or something that is no frame.
    pub fn has_input(&mut self) -> bool {
        !matches!(self.0.peek(), Ok(None))
    }

    /// Reads as many frames as have arrived and fit.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, `UnexpectedEof` if the endpoint has ended; otherwise the link
    /// is broken.
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

    /// Writes as many whole frames of `slices` as the ring has space for; `lengths` are the frames'
    /// lengths.
    ///
    /// # Errors
    /// If a frame does not fit any ring, or if the link is broken.
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

    /// Sends one frame. The announcement, the first eight bytes of a frame, must be contiguous.
    fn send(&mut self, parts: &[IoSlice<'_>]) -> bool {
        if parts[0].len() >= 8 {
            return self.0.send(&parts[0], &parts[1..]);
        }
        let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.0.send(&whole, &[])
    }
}
