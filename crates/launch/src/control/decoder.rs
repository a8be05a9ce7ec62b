//! Decodes the bytes of a control stream into messages. What may never happen: a frame over
//! [`FRAME_BYTES_MAX`] is waited for.

use super::{FRAME_BYTES_MAX, FrameError, LENGTH_BYTES, Message};

/// Splits the bytes of a control stream into messages.
#[derive(Default)]
pub struct Decoder {
    pending: Vec<u8>,
    taken: usize,
}

impl Decoder {
    pub fn handle_bytes(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.taken);
        self.taken = 0;
        self.pending.extend_from_slice(bytes);
    }

    pub fn poll_message(&mut self) -> Result<Option<Message>, FrameError> {
        let bytes = &self.pending[self.taken..];
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = Message::parse(body).ok_or(FrameError::Malformed)?;
        self.taken += LENGTH_BYTES + length;
        Ok(Some(message))
    }
}
