//! The replicated part of a rank's record: what an agent keeps of the recorded nondeterminism and
//! the deliveries of a rank of an agent below.
//!
//! In: updates of the rank's agent, in their order. Out: what the next incarnation of the rank on
//! another node replays. What may never happen: a batch counts of which a piece is missing.

use std::collections::VecDeque;

use landbridge_proto::recent_determinants::RECENT_DETERMINANTS_MAX;

use crate::control::rank_state::RecordingUpdate;

/// The replicated part of a rank's recorded nondeterminism and last determinants.
#[derive(Debug, Default)]
pub struct ReplicatedRecording {
    /// Position in the record where `reads` begin.
    pub first: u64,
    pub reads: Vec<u8>,
    pub polls: u64,
    pub is_full: bool,
    /// Number of the first determinant in `determinants`; the ring holds
    /// [`RECENT_DETERMINANTS_MAX`] at most.
    pub first_determinant: u64,
    pub determinants: VecDeque<[u64; 3]>,
    /// The part of the record's head about files.
    pub files: Vec<u8>,
    /// Pieces of a batch whose last piece has not arrived. If the node is lost before that, no
    /// incarnation replays any of these pieces; no other process has seen an effect that follows
    /// from them, because such effects are sent after the batch.
    pub partial: Option<Box<RecordingUpdate>>,
    /// What the rank has delivered from logs of senders, from this byte on.
    pub first_delivery: u64,
    pub deliveries: VecDeque<u8>,
}

impl ReplicatedRecording {
    /// Adds an update of the rank's agent.
    pub fn apply(&mut self, mut update: RecordingUpdate) {
        // The node that takes a rank over may repeat entries that are known here; repeated entries
        // are dropped.
        let repeated = self.end().saturating_sub(update.from).min(update.reads.len() as u64);
        update.reads.drain(..repeated as usize);
        update.from += repeated;
        if let Some(partial) = self.partial.take_if(|partial| partial.end() == update.from) {
            update = partial.joined(update);
        }
        if update.continues {
            self.partial = Some(Box::new(update));
        } else {
            self.partial = None;
            self.apply_batch(update);
        }
    }

    fn apply_batch(&mut self, update: RecordingUpdate) {
        if update.base > self.end() {
            // Entries between `end()` and the new base are not needed any more.
            (self.first, self.reads) = (update.base, Vec::new());
        }
        let useless = update.base.saturating_sub(self.first);
        self.reads.drain(..useless as usize);
        self.first += useless;
        // Batches arrive in order.
        if let Some(at) = self.end().checked_sub(update.from) {
            self.reads.extend_from_slice(update.reads.get(at as usize..).unwrap_or(&[]));
        }
        self.polls = self.polls.max(update.polls);
        self.is_full |= update.is_full;
        if !update.files.is_empty() {
            self.files = update.files;
        }
        if update.deliveries_base > self.deliveries_end() {
            (self.first_delivery, self.deliveries) = (update.deliveries_base, VecDeque::new());
        }
        let useless = update.deliveries_base.saturating_sub(self.first_delivery);
        self.deliveries.drain(..useless as usize);
        self.first_delivery += useless;
        if let Some(known) = self.deliveries_end().checked_sub(update.deliveries_from) {
            self.deliveries.extend(update.deliveries.get(known as usize..).unwrap_or(&[]));
        }
        for (number, determinant) in (update.first_determinant..).zip(update.determinants) {
            let next = self.first_determinant + self.determinants.len() as u64;
            if number > next {
                // The determinants in between were more than the ring holds, and the relay has
                // received them long ago.
                (self.first_determinant, self.determinants) = (number, VecDeque::new());
            }
            if number >= next {
                self.determinants.push_back(determinant);
            }
        }
        let excess = self.determinants.len().saturating_sub(RECENT_DETERMINANTS_MAX);
        self.determinants.drain(..excess);
        self.first_determinant += excess as u64;
    }

    /// Position of the record where `reads` end.
    pub fn end(&self) -> u64 {
        self.first + self.reads.len() as u64
    }

    fn deliveries_end(&self) -> u64 {
        self.first_delivery + self.deliveries.len() as u64
    }

    /// At most so many bytes of the deliveries, from this byte on.
    pub fn deliveries(&self, from: u64, bytes_max: usize) -> Vec<u8> {
        let skipped = from.saturating_sub(self.first_delivery) as usize;
        self.deliveries.iter().skip(skipped).take(bytes_max).copied().collect()
    }

    /// Everything but `reads`, as an update.
    pub fn rest(&self, rank: u32) -> RecordingUpdate {
        let determinants = self.determinants.iter().copied().collect();
        let (&ReplicatedRecording { is_full, polls, first_determinant, .. }, files) =
            (self, self.files.clone());
        RecordingUpdate {
            rank,
            is_full,
            polls,
            first_determinant,
            determinants,
            files,
            ..RecordingUpdate::default()
        }
    }
}
