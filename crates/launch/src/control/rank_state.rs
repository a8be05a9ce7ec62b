//! Messages about ranks that move to another node when their node is lost.
//!
//! The agent of a relay's host keeps what a rank of an agent below has asked its process manager,
//! and what the process manager has replied ([`RankUpdate`]). When the agent below is lost, another
//! agent receives this state with the ranks ([`Adoption`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::output_log::OutputLog;
use crate::pmi::kvs::Delta;
use crate::restart::IncarnationRecord;

/// An update about a rank for the agent above, sent ahead of everything that follows from the
/// update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankUpdate {
    /// The rank sends this PMI request for the first time.
    PmiRequest { rank: u32, question: String },
    /// The process manager replies this to the rank's oldest open PMI request.
    PmiReply { rank: u32, answer: String },
    /// Other nodes can get these images of the rank, oldest first; images of earlier messages are
    /// not usable any more.
    Checkpoints { rank: u32, images: Vec<CheckpointLocation> },
    /// The rank cannot be restarted on its node, for a reason that lies with the node: the agent
    /// above may move the rank.
    Unstartable { rank: u32, why: String },
    /// The bytes of the rank's standard error from position `from` on were last words of an ended
    /// incarnation and do not count.
    LastWords { rank: u32, from: u64 },
    /// A process of the rank has ended, and another incarnation follows. `last_words`: byte of the
    /// rank's standard error from which on the next incarnation need not repeat it.
    IncarnationEnded { rank: u32, incarnation: IncarnationRecord, last_words: Option<u64> },
}

/// Where another node finds a checkpoint image of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointLocation {
    /// Path below the folder of the job's images; also the image's name in the object store.
    pub path: String,
    /// HMAC-SHA256 of the image's manifest under the key of the job, in 64 hexadecimal digits.
    pub tag: String,
}

/// What is new in a rank's recorded nondeterminism and last determinants. The parts are read at one
/// moment or shortly after each other, so that they fit together: determinants are not older than
/// the poll count, and the poll count is not older than the bytes read. A long update goes in
/// several pieces, which cut entries of the record. The pieces are one batch, and an incarnation
/// may replay the batch only once all pieces have arrived.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingUpdate {
    pub rank: u32,
    /// Position of `reads` in the record of nondeterminism, in bytes.
    pub from: u64,
    #[serde(with = "serde_bytes")]
    pub reads: Vec<u8>,
    /// Entries before this position of the record are not needed any more.
    pub base: u64,
    /// The record has no space left.
    pub is_full: bool,
    /// How often the rank has polled for messages.
    pub polls: u64,
    /// Number of the first determinant in `determinants`; each one is polls, frames and time.
    pub first_determinant: u64,
    pub determinants: Vec<[u64; 3]>,
    /// The part of the record's head about files ([`landbridge_proto::nondeterminism::FILES_AT`]);
    /// empty: unchanged.
    #[serde(with = "serde_bytes")]
    pub files: Vec<u8>,
    /// More pieces of the same batch follow: the next piece's `reads` begin where this piece ends,
    /// and no piece counts before the last one has arrived.
    pub continues: bool,
    /// Deliveries before this byte are not needed any more.
    pub deliveries_base: u64,
    /// Position of `deliveries` in what the rank has delivered from logs of senders, in bytes.
    pub deliveries_from: u64,
    #[serde(with = "serde_bytes")]
    pub deliveries: Vec<u8>,
    /// Counts only with the updates of the other ranks of its node, up to [`Message::CutEnd`].
    ///
    /// [`Message::CutEnd`]: super::Message::CutEnd
    pub is_in_cut: bool,
}

impl RecordingUpdate {
    /// Position of the record where `reads` end.
    pub fn end(&self) -> u64 {
        self.from + self.reads.len() as u64
    }

    /// Joins this piece with the next piece of the same batch.
    pub fn joined(mut self, next: RecordingUpdate) -> RecordingUpdate {
        self.reads.extend_from_slice(&next.reads);
        self.base = self.base.max(next.base);
        self.deliveries_base = self.deliveries_base.max(next.deliveries_base);
        self.is_full |= next.is_full;
        self.polls = self.polls.max(next.polls);
        if !next.determinants.is_empty() {
            (self.first_determinant, self.determinants) =
                (next.first_determinant, next.determinants);
        }
        if !next.files.is_empty() {
            self.files = next.files;
        }
        match self.deliveries.is_empty() {
            true => {
                (self.deliveries_from, self.deliveries) = (next.deliveries_from, next.deliveries)
            }
            false => self.deliveries.extend_from_slice(&next.deliveries),
        }
        self.continues = next.continues;
        self
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    pub question: String,
    pub answer: Option<String>,
}

impl Exchange {
    pub fn bytes(&self) -> usize {
        self.question.len() + self.answer.as_ref().map_or(0, String::len)
    }
}

/// The state of a rank for the agent that takes the rank over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferredRank {
    pub rank: u32,
    /// How often the rank has been restarted, including this restart.
    pub restarts: u32,
    /// How often the rank has been restarted on another node.
    pub moves: u32,
    /// What the rank has printed on standard output and standard error.
    pub outputs: [OutputLog; 2],
    /// Byte of standard error from which on it may hold last words of an ended process, which the
    /// next one need not repeat.
    #[serde(default)]
    pub last_words: Option<u64>,
    pub exchanges: Vec<Exchange>,
    /// Images of the rank that other nodes can get, oldest first.
    #[serde(default)]
    pub images: Vec<CheckpointLocation>,
    /// All ended processes of the rank, oldest first.
    #[serde(default)]
    pub incarnations: Vec<IncarnationRecord>,
    /// How long ago the rank's first process began.
    pub age: Duration,
}

/// What an agent needs to take ranks over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adoption {
    /// All of these ranks have reached the present barrier, and the agent above has received their
    /// barrier message.
    pub has_reached: bool,
    /// All keys of the key-value space that are known.
    pub keys: Delta,
    pub ranks: Vec<TransferredRank>,
}

/// The ranks of node `from` of a cluster run on node `to` from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    pub cluster: u32,
    pub from: String,
    pub to: String,
}

/// The nodes of a cluster that may still take over the ranks of another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spares {
    pub names: Vec<String>,
}

impl Moved {
    /// Moves the ranks from one node to the other in this part of the plan.
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
