//! What is said of ranks that go on on another node when theirs is lost.
//!
//! The agent of a relay's host keeps what a rank of an agent below has said to its process manager, and what it was answered
//! ([`RankUpdate`]): when that agent is lost, another one is given it with the ranks ([`Adoption`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::output_log::OutputLog;
use crate::pmi::kvs::Delta;
use crate::restart::IncarnationRecord;

/// Comes in front of what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankUpdate {
    /// The rank asks this, for the first time.
    PmiRequest { rank: u32, question: String },
    /// Its oldest question that is open is answered so.
    PmiReply { rank: u32, answer: String },
    /// These images of it are where others find them, oldest first; those that were told before count no more.
    Checkpoints { rank: u32, images: Vec<CheckpointLocation> },
    /// It cannot be restarted on its node, which is no fault of its own: may it go on on another one?
    Unstartable { rank: u32, why: String },
    /// What it has printed on standard error from this byte on were last words: they count no more.
    LastWords { rank: u32, from: u64 },
    /// A process of it has ended, and there is another one.
    IncarnationEnded { rank: u32, incarnation: IncarnationRecord },
}

/// An image of a rank, for whoever takes over the rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointLocation {
    /// Under the folder of the job's images, or its name in the store.
    pub path: String,
    /// The SHA-256 of its manifest.
    pub tag: String,
}

/// What of a rank's record of clocks and last determinants is news. It is that of one moment or a little later, so that its parts go
/// together: what it has taken in is not older than how often it has looked for messages, and that not older than what it has
/// read. Much comes in several pieces, which cut entries of the record, so that only all of them together may be told to a new start:
/// a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordingUpdate {
    pub rank: u32,
    /// From this byte of its record of clocks on.
    pub from: u64,
    pub reads: Vec<u8>,
    /// Before this place of it nothing is needed any more.
    pub base: u64,
    /// There is no more room in it.
    pub is_full: bool,
    /// How often it has looked for messages.
    pub polls: u64,
    /// Polls, frames and time of each determinant, from this number on.
    pub first_determinant: u64,
    pub determinants: Vec<[u64; 3]>,
    /// The head's part about files ([`landbridge_proto::nondeterminism::FILES_AT`]); empty: as it was.
    pub files: Vec<u8>,
    /// More of the same batch follows: what was read goes on where this piece ends, and nothing of it counts before that is there.
    pub continues: bool,
}

impl RecordingUpdate {
    /// Behind what was read.
    pub fn end(&self) -> u64 {
        self.from + self.reads.len() as u64
    }

    /// This and the next piece of the same batch.
    pub fn joined(mut self, next: RecordingUpdate) -> RecordingUpdate {
        self.reads.extend_from_slice(&next.reads);
        self.base = self.base.max(next.base);
        self.is_full |= next.is_full;
        self.polls = self.polls.max(next.polls);
        if !next.determinants.is_empty() {
            (self.first_determinant, self.determinants) =
                (next.first_determinant, next.determinants);
        }
        if !next.files.is_empty() {
            self.files = next.files;
        }
        self.continues = next.continues;
        self
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    pub question: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

impl Exchange {
    pub fn bytes(&self) -> usize {
        self.question.len() + self.answer.as_ref().map_or(0, String::len)
    }
}

/// A rank as another agent takes it over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferredRank {
    pub rank: u32,
    /// How often it has been restarted, this time counted.
    pub restarts: u32,
    /// And how often on another node.
    pub moves: u32,
    /// What it has printed on standard output and error.
    pub outputs: [OutputLog; 2],
    pub exchanges: Vec<Exchange>,
    /// Its images that can be found from elsewhere, oldest first.
    #[serde(default)]
    pub images: Vec<CheckpointLocation>,
    /// All processes that it has had, and how long ago the first one began.
    #[serde(default)]
    pub incarnations: Vec<IncarnationRecord>,
    pub age: Duration,
}

/// To the agent that takes ranks over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adoption {
    /// All of them have reached the barrier at hand, and that was told.
    pub has_reached: bool,
    /// Every key that is known.
    pub keys: Delta,
    pub ranks: Vec<TransferredRank>,
}

/// Ranks of one node of a cluster are on another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    pub cluster: u32,
    pub from: String,
    pub to: String,
}

/// The nodes of a cluster that may still take the ranks of another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spares {
    pub names: Vec<String>,
}

impl Moved {
    /// Carries the ranks over in this part of the plan.
    pub fn apply(&self, top: &mut super::Node) {
        let mut ranks = (0, 0);
        for node in top.children.iter_mut().filter(|node| node.name == self.from) {
            ranks = (node.first_rank, std::mem::take(&mut node.rank_count));
        }
        for node in top.children.iter_mut().filter(|node| node.name == self.to) {
            (node.first_rank, node.rank_count) = ranks;
        }
    }
}
