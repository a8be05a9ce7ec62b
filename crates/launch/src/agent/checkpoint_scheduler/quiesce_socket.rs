//! The agent's end of the socket on which a rank says that its image can be taken, and is told to go on.
//!
//! In: what the rank says (`provider/src/engine/quiesce.rs` has the words). Out: the word to go on, with its record and its board.
//! What may never happen: half a word is taken for one.

use std::os::fd::{BorrowedFd, OwnedFd};

use anyhow::Result;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::checkpoint::criu::ExternalInodes;

/// The agent's end of the socket on which a rank says that its image can be taken, and its other ends.
pub struct QuiesceSocket {
    pub socket: OwnedFd,
    pub inodes: ExternalInodes,
}

/// What a rank says on its line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum QuiesceReply {
    Nothing,
    /// The number of the image, and where it stands.
    Quiesced([u64; 4]),
    /// And it never will.
    Closed,
}

impl QuiesceSocket {
    pub(super) fn read(&self) -> QuiesceReply {
        let mut word = [0; 32];
        // It is written at once, and a pair of Unix sockets hands on whole.
        match rustix::net::recv(&self.socket, &mut word, RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == word.len() => {
                QuiesceReply::Quiesced(std::array::from_fn(|at| {
                    u64::from_le_bytes(word[8 * at..8 * at + 8].try_into().unwrap_or_default())
                }))
            }
            Err(Errno::AGAIN | Errno::INTR) => QuiesceReply::Nothing,
            Ok(_) | Err(_) => QuiesceReply::Closed,
        }
    }

    /// Tells whoever reads it to go on, as start `incarnation` of the rank.
    pub fn resume(
        &self,
        number: u64,
        incarnation: u32,
        kept: u64,
        files: &[BorrowedFd],
    ) -> Result<()> {
        let mut word = [0; 24];
        for (place, value) in word.chunks_exact_mut(8).zip([number, incarnation.into(), kept]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(files));
        let word = [std::io::IoSlice::new(&word)];
        rustix::net::sendmsg(&self.socket, &word, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
