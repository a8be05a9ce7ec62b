//! What the transport of a recorded process knows of one process of another node.
//!
//! What enters: what was said to the other process. What leaves: what may be said to it next. What
//! may never happen: something is said before what it depends on.

use std::collections::BTreeMap;

use landbridge_proto::log::transfer::{LogTransfer, TransferKind};

use crate::abi::FiAddr;

/// Messages to one process that are under way at most: together 8 MiB.
pub const IN_FLIGHT_MAX: usize = 64;
/// Slot of a message that was copied.
pub const NO_SLOT: usize = IN_FLIGHT_MAX;

/// What one process has said, and what is under way to it.
pub struct RemoteTransfer {
    pub process: usize,
    pub transfer: LogTransfer,
    /// Number of the other transport in the address vector.
    pub number: Option<FiAddr>,
    /// The first generation of the other transport that this transport has met.
    pub first_generation: u32,
    /// How often something has ended what was under way: completions of earlier messages do not
    /// count.
    pub round: u32,
    /// The positions of messages under way; each message begins with its own.
    pub slots: Box<[u64; IN_FLIGHT_MAX]>,
    pub free_slots: Vec<usize>,
    /// This transport cannot reach the other one any more.
    pub is_lost: bool,
    /// Arrived bytes that the other process does not know of.
    pub unconfirmed: u64,
    /// Arrived messages that lie behind one that is still under way.
    pub early: BTreeMap<u64, Vec<u8>>,
    /// Up to where the agents have carried frames, which the other process may send as well.
    pub carried_end: u64,
    /// What remains to be said.
    pub owed: Option<TransferKind>,
    /// Before that: where this process has begun that has moved to this node.
    pub owes_began: bool,
    /// First: where the other process has begun that has moved?
    pub owes_question: bool,
}

impl RemoteTransfer {
    pub fn new(process: usize, transfer: LogTransfer) -> RemoteTransfer {
        RemoteTransfer {
            process,
            transfer,
            number: None,
            first_generation: 0,
            round: 0,
            slots: Box::new([0; IN_FLIGHT_MAX]),
            free_slots: (0..IN_FLIGHT_MAX).collect(),
            is_lost: false,
            unconfirmed: 0,
            early: BTreeMap::new(),
            carried_end: 0,
            owed: None,
            owes_began: false,
            owes_question: false,
        }
    }

    /// What may be said now.
    pub fn may_say(&self) -> Option<TransferKind> {
        match self.owed? {
            _ if self.owes_question => Some(TransferKind::AskBegan),
            _ if self.owes_began => Some(TransferKind::Began),
            TransferKind::Resume if !self.transfer.may_resume() => None,
            kind => Some(kind),
        }
    }

    pub fn note_said(&mut self, kind: TransferKind) {
        match kind {
            TransferKind::AskBegan => self.owes_question = false,
            TransferKind::Began => self.owes_began = false,
            _ => self.owed = None,
        }
        if matches!(kind, TransferKind::Resume | TransferKind::Received) {
            self.unconfirmed = 0;
        }
    }
}
