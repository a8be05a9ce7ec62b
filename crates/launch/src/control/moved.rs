//! What is said of ranks that go on on another node when theirs is lost.
//!
//! The agent of a relay's host keeps what a rank of an agent below has said to its process manager, and what it was answered
//! ([`Talk`]): when that agent is lost, another one is given it with the ranks ([`Adoption`]).

use serde::{Deserialize, Serialize};

use crate::pmi::kvs::Delta;

/// Comes in front of what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Talk {
    /// The rank asks this, for the first time.
    Asked { rank: u32, question: String },
    /// Its oldest question that is open is answered so.
    Heard { rank: u32, answer: String },
    /// These images of it are where others find them, oldest first; those that were told before count no more.
    Images { rank: u32, images: Vec<Whereabouts> },
}

/// An image of a rank, for whoever takes over the rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    /// Under the folder of the job's images, or its name in the store.
    pub place: String,
    /// The SHA-256 of its manifest.
    pub sum: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    pub question: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// A rank as another agent takes it over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    pub rank: u32,
    /// How often it has been started anew, this time counted.
    pub starts: u32,
    /// And how often on another node.
    pub moves: u32,
    /// Bytes that it has printed on standard output and error.
    pub printed: [u64; 2],
    pub exchanges: Vec<Exchange>,
    /// Its images that can be found from elsewhere, oldest first.
    #[serde(default)]
    pub images: Vec<Whereabouts>,
}

/// To the agent that takes ranks over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adoption {
    /// All of them have reached the barrier at hand, and that was told.
    pub has_reached: bool,
    /// Every key that is known.
    pub keys: Delta,
    pub ranks: Vec<Moving>,
}

/// Ranks of one node of a cluster are on another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    pub cluster: u32,
    pub from: String,
    pub to: String,
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
