//! The launcher's standard input, which rank 0 reads.
//!
//! What enters: bytes of the launcher's stdin, and how many of them rank 0 has taken. What leaves:
//! messages for the agent of rank 0. At most [`WINDOW_BYTES`] are under way.

use rustix::io::Errno;

use crate::control::{Message, PIECE_BYTES_MAX};

/// Upper bound of the bytes of stdin that are under way to rank 0.
const WINDOW_BYTES: u32 = 64 * 1024;

pub(super) struct ForwardedStdin {
    is_open: bool,
    /// Bytes that may be sent before rank 0 takes some.
    window: u32,
}

impl ForwardedStdin {
    pub fn new() -> ForwardedStdin {
        ForwardedStdin { is_open: true, window: WINDOW_BYTES }
    }

    /// Whether input would be read now.
    pub fn wants_input(&self) -> bool {
        self.is_open && self.window > 0
    }

    /// Records that `rank` has ended. Rank 0 was the only reader.
    pub fn handle_exit(&mut self, rank: u32) {
        self.is_open &= rank != 0;
    }

    /// Stops reading: the launcher may not read the input of its terminal.
    pub fn close(&mut self) {
        self.is_open = false;
    }

    pub fn handle_taken(&mut self, bytes: u32) {
        self.window += bytes;
    }

    /// Reads some input. Returns the message for the agent of rank 0.
    pub fn read(&mut self) -> Option<Message> {
        let mut buffer = [0; PIECE_BYTES_MAX];
        let room = buffer.len().min(self.window as usize);
        let count = match rustix::io::read(rustix::stdio::stdin(), &mut buffer[..room]) {
            Err(Errno::INTR | Errno::AGAIN) => return None,
            Err(_) | Ok(0) => 0,
            Ok(count) => count,
        };
        self.window -= count as u32;
        self.is_open &= count > 0;
        Some(match count {
            0 => Message::StdinEnd,
            count => Message::Stdin { bytes: buffer[..count].to_vec() },
        })
    }
}
