//! The agent's end of the quiesce socket of a rank: the rank reports there that its checkpoint
//! image can be taken, and the agent answers that the rank resumes.
//!
//! In: the rank's report (`provider/src/engine/quiesce.rs` has the format). Out: the resume
//! message, with the descriptors of the rank's record and statistics page.
//!
//! What may never happen: an incomplete report is taken for a report.

use std::os::fd::{BorrowedFd, OwnedFd};

use anyhow::Result;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::checkpoint::criu::ExternalInodes;

/// The agent's end of a rank's quiesce socket, and the inodes that CRIU must treat as external.
pub struct QuiesceSocket {
    pub socket: OwnedFd,
    pub inodes: ExternalInodes,
}

/// What a rank has reported on its quiesce socket.
#[derive(Debug, PartialEq, Eq)]
pub enum QuiesceReply {
    Nothing,
    /// The rank stands still: image number, determinants, frames sent, polls.
    Quiesced([u64; 4]),
    /// The rank has closed its end of the socket, and will not quiesce any more.
    Closed,
}

impl QuiesceSocket {
    pub fn read(&self) -> QuiesceReply {
        let mut word = [0; 32];
        // The rank writes a report with one call, and a pair of Unix sockets delivers it whole.
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

    /// Lets the process that waits on this socket resume as `incarnation` of the rank, after image
    /// `number`. Nothing before `kept` determinants is needed any more.
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
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let has_room = ancillary.push(SendAncillaryMessage::ScmRights(files));
        assert!(has_room, "a rank gets more descriptors than there is room for");
        let word = [std::io::IoSlice::new(&word)];
        rustix::net::sendmsg(&self.socket, &word, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
