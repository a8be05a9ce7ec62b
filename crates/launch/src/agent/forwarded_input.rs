//! Standard input of a rank 0 that runs on a node below: keeps what was forwarded to the agent of
//! that node, so that after the loss of the node the rank's next incarnation on another node
//! receives all of it.
//!
//! In: the forwarded bytes, and how many bytes the rank has taken. Out: the messages to forward to
//! another node, and how many of the taken bytes are new to the launcher. The module does no I/O.
//!
//! What may never happen: another node receives other bytes than the first node.

use crate::control::{Message, PIECE_BYTES_MAX};

use super::input::STDIN_RETAINED_BYTES_MAX;

/// The standard input that was forwarded to a node below.
#[derive(Debug, Default)]
pub struct ForwardedInput {
    bytes: Vec<u8>,
    is_whole: bool,
    /// More was forwarded than [`STDIN_RETAINED_BYTES_MAX`], so nothing is kept.
    is_cut: bool,
    /// `taken`: bytes that were reported to the launcher as taken. `to_retake`: how many of these
    /// the rank has to take again.
    taken: u64,
    to_retake: u64,
}

impl ForwardedInput {
    pub fn forward(&mut self, bytes: &[u8]) {
        if self.bytes.len() + bytes.len() > STDIN_RETAINED_BYTES_MAX {
            (self.bytes, self.is_cut) = (Vec::new(), true);
        }
        if !self.is_cut {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// Notes the end of standard input.
    pub fn end(&mut self) {
        self.is_whole = true;
    }

    /// Notes that the rank has taken these bytes; returns how many of them are new to the launcher.
    pub fn take(&mut self, bytes: u32) -> u32 {
        let known = self.to_retake.min(u64::from(bytes));
        self.to_retake -= known;
        let news = bytes - known as u32;
        self.taken += u64::from(news);
        news
    }

    /// The messages for the rank's incarnation on another node; `None`: more bytes were forwarded
    /// than are kept.
    pub fn replay(&mut self) -> Option<Vec<Message>> {
        if self.is_cut {
            return None;
        }
        self.to_retake = self.taken;
        let pieces = self.bytes.chunks(PIECE_BYTES_MAX);
        let pieces = pieces.map(|piece| Message::Stdin { bytes: piece.to_vec() });
        Some(pieces.chain(self.is_whole.then_some(Message::StdinEnd)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_node_is_given_the_same_and_what_it_takes_again_is_no_news() {
        let mut forwarded = ForwardedInput::default();
        let text: Vec<u8> = (0..3 * PIECE_BYTES_MAX + 5).map(|at| at as u8).collect();
        forwarded.forward(&text[..100]);
        forwarded.forward(&text[100..]);
        assert_eq!(forwarded.take(70), 70);
        for is_whole in [false, true] {
            let to_retake = forwarded.replay().unwrap();
            let bytes = to_retake.iter().filter_map(|message| match message {
                Message::Stdin { bytes } => Some(&bytes[..]),
                _ => None,
            });
            assert_eq!(bytes.collect::<Vec<_>>().concat(), text);
            assert_eq!(to_retake.last() == Some(&Message::StdinEnd), is_whole);
            forwarded.end();
        }
        assert_eq!((forwarded.take(50), forwarded.take(50), forwarded.take(9)), (0, 30, 9));
        forwarded.forward(&vec![0; STDIN_RETAINED_BYTES_MAX]);
        assert!(forwarded.replay().is_none());
    }
}
