//! The frames that wait for one output: first those of a queue of bytes, then those that lie as
//! *pieces* in the buffer of the input that is being handled.
//!
//! What enters: whole frames. What leaves: bytes in the same order, to the [`Writer`] of a link.
//! What may never happen: a frame overtakes another frame; a piece outlives its buffer (the owner
//! keeps or drops all pieces first).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::recent_channels::ChannelKey;
use super::writer::Writer;
use crate::route::byte_queue::{ByteQueue, ChunkPool};
use crate::wire::frame::Header;

/// Entries of `frames` for which an idle queue keeps memory: a few, since most ports are idle.
const FRAMES_IDLE_MAX: usize = 64;

/// A whole frame in the buffer of the input that is being handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub at: usize,
    pub length: usize,
}

/// Length and channel of a frame that waits.
#[derive(Clone, Copy, Debug)]
struct QueuedFrame {
    length: u32,
    entry: ChannelKey,
}

/// The frames that wait for one output: see the module head.
#[derive(Debug, Default)]
pub(super) struct OutputQueue {
    queue: ByteQueue,
    /// Frames in the current buffer; adjacent frames are joined to one piece.
    pieces: Vec<Piece>,
    pieces_bytes: usize,
    /// All frames that wait: the frames of the queue, then the frames of the pieces.
    frames: VecDeque<QueuedFrame>,
}

impl OutputQueue {
    /// Memory of the frames that wait for this port, in bytes, their entries in `frames`
    /// included.
    #[inline]
    pub fn waiting_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes + self.frames.len() * size_of::<QueuedFrame>()
    }

    #[inline]
    pub fn pieces_bytes(&self) -> usize {
        self.pieces_bytes
    }

    pub fn has_pieces(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Bytes of the frames that wait in this port rather than in the message log.
    #[inline]
    pub fn own_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes
    }

    /// Assigns a frame of the current buffer to this output.
    #[inline]
    pub fn take(&mut self, piece: Piece, header: &Header) {
        self.note_frame(piece.length, header);
        self.pieces_bytes += piece.length;
        match self.pieces.last_mut() {
            Some(last) if last.at + last.length == piece.at => last.length += piece.length,
            _ => self.pieces.push(piece),
        }
    }

    /// Appends a frame that comes from no input after all frames that wait. Only while there are no
    /// pieces.
    pub fn push_frame(&mut self, pool: &mut ChunkPool, bytes: &[u8], header: &Header) {
        debug_assert!(self.pieces.is_empty(), "pieces would be overtaken");
        self.note_frame(bytes.len(), header);
        self.queue.push(pool, bytes);
    }

    #[inline]
    fn note_frame(&mut self, length: usize, header: &Header) {
        self.frames.push_back(QueuedFrame { length: length as u32, entry: ChannelKey::of(header) });
    }

    pub fn frame_lengths(&self) -> impl Iterator<Item = usize> {
        self.frames.iter().map(|frame| frame.length as usize)
    }

    /// The bytes that wait, in order: those of the queue, then the pieces of `buffer`.
    pub fn slices<'a>(&'a self, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let pieces = self.pieces.iter().map(|piece| &buffer[piece.at..piece.at + piece.length]);
        self.queue.slices().chain(pieces)
    }

    /// Accounts for `bytes` bytes that `writer` has written: first from the queue, then from the
    /// pieces, which are in `buffer`. The rest of the last frame goes to the writer.
    pub fn send(&mut self, pool: &mut ChunkPool, buffer: &[u8], bytes: usize, writer: &mut Writer) {
        self.drop_front(pool, bytes);
        let mut left = bytes;
        while left > 0 {
            // The driver writes only bytes that `slices` returns, and every such frame is in
            // `frames`.
            let frame = self.frames.pop_front().expect("only what waits can be sent");
            let length = frame.length as usize;
            writer.recent_channels.add(length, frame.entry);
            if length > left {
                self.move_front(pool, buffer, length - left, writer);
            }
            left = left.saturating_sub(length);
        }
        if self.frames.is_empty() && self.frames.capacity() > FRAMES_IDLE_MAX {
            self.frames = VecDeque::new();
        }
    }

    /// Moves the first `bytes` bytes, which belong to one frame, to `writer`.
    fn move_front(
        &mut self,
        pool: &mut ChunkPool,
        buffer: &[u8],
        bytes: usize,
        writer: &mut Writer,
    ) {
        let mut left = bytes;
        for slice in self.queue.slices() {
            let size = slice.len().min(left);
            writer.rest.push(pool, &slice[..size]);
            left -= size;
        }
        if left > 0 {
            let at = self.pieces[0].at;
            writer.rest.push(pool, &buffer[at..at + left]);
        }
        self.drop_front(pool, bytes);
    }

    fn drop_front(&mut self, pool: &mut ChunkPool, bytes: usize) {
        let queued = bytes.min(self.queue.len());
        self.queue.pop(pool, queued);
        self.advance_pieces(bytes - queued);
    }

    fn advance_pieces(&mut self, mut bytes: usize) {
        self.pieces_bytes -= bytes;
        let whole = |piece: &&Piece| {
            let fits = piece.length <= bytes;
            bytes -= if fits { piece.length } else { 0 };
            fits
        };
        let gone = self.pieces.iter().take_while(whole).count();
        self.pieces.drain(..gone);
        if bytes > 0 {
            self.pieces[0].at += bytes;
            self.pieces[0].length -= bytes;
        }
    }

    /// Copies the rest of the pieces to the queue.
    pub fn keep(&mut self, pool: &mut ChunkPool, buffer: &[u8]) {
        for piece in &self.pieces {
            self.queue.push(pool, &buffer[piece.at..piece.at + piece.length]);
        }
        self.pieces.clear();
        self.pieces_bytes = 0;
    }

    /// Drops the rest of the pieces, which consists of whole frames: the message log holds these
    /// frames.
    pub fn drop_pieces(&mut self) {
        self.pieces.clear();
        let mut left = core::mem::take(&mut self.pieces_bytes);
        while left > 0 {
            // Each frame of the pieces has an entry in `frames`.
            left -= self.frames.pop_back().expect("a frame has a note").length as usize;
        }
    }

    /// Drops everything that waits; returns the channels of the dropped frames, in order.
    pub fn discard(&mut self, pool: &mut ChunkPool) -> Vec<ChannelKey> {
        self.queue.pop(pool, self.queue.len());
        self.pieces = Vec::new();
        self.pieces_bytes = 0;
        core::mem::take(&mut self.frames).into_iter().map(|frame| frame.entry).collect()
    }
}
