//! Standard input of rank 0 that was passed on to the agent of its node, below: if that node is lost, the rank's next start on
//! another is given all of it again.
//!
//! Pure. In: what was passed on, and how much the rank has taken. Out: what is to be passed on again, and how much of what is taken
//! then is news to the launcher. What may never happen: another node is given other bytes than the first.

use crate::control::{Message, PIECE_BYTES_MAX};

use super::input::STDIN_RETAINED_BYTES_MAX;

/// See the module head.
#[derive(Debug, Default)]
pub struct ForwardedInput {
    bytes: Vec<u8>,
    is_whole: bool,
    /// There was more than may be kept.
    is_cut: bool,
    /// Bytes that the launcher knows to be taken, and of those how many are still to be taken again.
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

    /// No more comes.
    pub fn end(&mut self) {
        self.is_whole = true;
    }

    /// The rank has taken so many bytes more: how many of them are news.
    pub fn take(&mut self, bytes: u32) -> u32 {
        let known = self.to_retake.min(u64::from(bytes));
        self.to_retake -= known;
        let news = bytes - known as u32;
        self.taken += u64::from(news);
        news
    }

    /// The rank begins anew on another node: what that is to be told. `None`: it was too much to be kept.
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
