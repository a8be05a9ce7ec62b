//! Transfers the ranks of a lost node to another node, in three steps: the relay fences the ranks'
//! incarnations on the lost node, then everything that is known of their recorded nondeterminism
//! and last determinants goes to the agent that takes the ranks, piece by piece, then that agent
//! starts the ranks (`node_failover`).
//!
//! In: two copies of each record. The relay has what came ahead of messages, and writes its copy
//! into a file that it shares with this agent; the agent has what came ahead of printed lines and
//! PMI requests. A record only ever grows, so the longer copy holds everything from which a visible
//! effect follows. Both copies hold whole batches only: no other process has seen an effect of a
//! batch that the node had sent in part when it was lost, and such a part may end within an entry.
//! Out: [`RecordingUpdate`] messages.
//!
//! A node whose connection has ended may be alive: the transfer begins when no rank of the node can
//! still perform an effect on a file that this agent has allowed. Ranks that had ended count as
//! ended until the launcher has heard that they are executed again: none of them starts before
//! ([`RestartPermission`]), because the job may end until then.
//!
//! What may never happen: an incarnation replays less than what a visible effect follows from, or a
//! part of an entry; more than one piece beyond [`BACKLOG_BYTES_MAX`] waits here for the other
//! agent.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::rank_recording::PIECE_BYTES;
use super::relay::{FencedRecording, RelayProcess};
use super::replicated_rank_state::ReplicatedRankStates;
use super::replicated_recording::ReplicatedRecording;
use crate::control::rank_state::RecordingUpdate;
use crate::control::{Message, Node};
use crate::control_stream::{BACKLOG_BYTES_MAX, ControlStream};

/// Time after which the agent repeats a fence order: a relay drops what it prints while no one
/// reads its output.
const FENCE_RETRY_AFTER: Duration = Duration::from_secs(2);

/// A transfer in progress.
pub struct StateTransfer {
    /// The plan of the lost node with its ranks.
    pub lost: Node,
    /// Indices, among the agents below, of the lost node (`from`) and of the node that takes its
    /// ranks (`to`).
    pub from: usize,
    pub to: usize,
    /// Ranks that are not transferred yet.
    remaining: VecDeque<u32>,
    /// All ranks of the transfer.
    pub ranks: Vec<u32>,
    stage: TransferStage,
    /// Time before which a rank on the lost node may still perform an effect.
    effects_end: Option<Instant>,
    /// The relay has a copy of the records; else it has none, and fences nothing: nothing leaves
    /// the lost node that this agent has not answered for.
    logged_by_relay: bool,
    /// Ranks of the transfer that had ended, and whether they may start.
    pub again: Vec<u32>,
    pub permission: RestartPermission,
}

/// Whether ranks that had ended may be executed again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RestartPermission {
    Unasked,
    /// The launcher is asked. An answer does not come if the job is ending.
    Asked,
    /// The launcher waits for the ranks to end again.
    Given,
}

enum TransferStage {
    Fence,
    Fencing(Instant),
    /// The record of the first remaining rank is sent up to this position; `None`: nothing of the
    /// record is sent yet.
    Sending(FencedRecording, Option<u64>),
    /// As above, where no relay has a copy; before that, the deliveries of the rank are sent up to
    /// this byte; `None`: nothing of them is sent yet.
    SendingDeliveries(Option<u64>),
}

/// What one step of a transfer has led to.
pub enum TransferOutcome {
    /// The transfer waits for the relay, for the other agent, or for the end of effects.
    Waiting,
    Advanced,
    /// The other agent has received the records of all ranks.
    Complete,
}

impl StateTransfer {
    pub fn new(
        lost: Node,
        (from, to): (usize, usize),
        (ranks, again): (Vec<u32>, Vec<u32>),
        effects_end: Option<Instant>,
        logged_by_relay: bool,
    ) -> StateTransfer {
        let permission = match again.is_empty() {
            true => RestartPermission::Given,
            false => RestartPermission::Unasked,
        };
        StateTransfer {
            lost,
            from,
            to,
            remaining: ranks.iter().copied().collect(),
            ranks,
            stage: TransferStage::Fence,
            effects_end,
            logged_by_relay,
            again,
            permission,
        }
    }

    /// Time at which the transfer can begin, if a rank of the lost node may still perform an
    /// effect.
    pub fn begins_at(&self) -> Option<Instant> {
        self.effects_end.filter(|end| Instant::now() < *end)
    }

    /// Restarts the transfer to another node, because the node that was to take the ranks is lost
    /// as well.
    pub fn redirect(&mut self, to: usize) {
        (self.to, self.stage) = (to, TransferStage::Fence);
        self.remaining = self.ranks.iter().copied().collect();
    }

    /// Advances the transfer by one step, with the relay and the stream to the agent that takes the
    /// ranks.
    pub fn advance(
        &mut self,
        replicas: &mut ReplicatedRankStates,
        relay: &mut RelayProcess,
        stream: &mut ControlStream,
    ) -> Result<TransferOutcome> {
        if self.begins_at().is_some() {
            return Ok(TransferOutcome::Waiting);
        }
        let Some(&rank) = self.remaining.front() else { return Ok(TransferOutcome::Complete) };
        match &mut self.stage {
            TransferStage::Fencing(at) if at.elapsed() < FENCE_RETRY_AFTER => {
                let Some(fenced) = relay.take_fenced(rank) else {
                    return Ok(TransferOutcome::Waiting);
                };
                self.stage = TransferStage::Sending(fenced, None);
            }
            TransferStage::Fence if !self.logged_by_relay => {
                replicas.drop_partial_batch(rank);
                self.stage = TransferStage::SendingDeliveries(None);
            }
            TransferStage::SendingDeliveries(_) if stream.backlog_bytes() >= BACKLOG_BYTES_MAX => {
                return Ok(TransferOutcome::Waiting);
            }
            TransferStage::SendingDeliveries(at) => {
                let Some(update) = next_deliveries(replicas, rank, at) else {
                    let first = replicas.recording(rank).map_or(0, |recording| recording.first);
                    let nothing = FencedRecording { rank, first, ..FencedRecording::default() };
                    self.stage = TransferStage::Sending(nothing, None);
                    return Ok(TransferOutcome::Advanced);
                };
                stream.send(&Message::RecordingUpdate(Box::new(update)));
            }
            TransferStage::Fence | TransferStage::Fencing(_) => {
                // This drops a partial batch of another lost node to which the rank was transferred
                // as well.
                replicas.drop_partial_batch(rank);
                relay.fence(rank, replicas.next_first_incarnation(rank));
                self.stage = TransferStage::Fencing(Instant::now());
            }
            TransferStage::Sending(..) if stream.backlog_bytes() >= BACKLOG_BYTES_MAX => {
                return Ok(TransferOutcome::Waiting);
            }
            TransferStage::Sending(fenced, at) => {
                let nothing = ReplicatedRecording::default();
                let recording = replicas.recording(rank).unwrap_or(&nothing);
                match next_update(fenced, recording, relay.transfer_file()?, *at)? {
                    Some((update, next)) => {
                        // The agent that takes the rank sends only what comes after this piece.
                        replicas.handle_recording_update(update.clone());
                        stream.send(&Message::RecordingUpdate(Box::new(update)));
                        *at = Some(next);
                    }
                    None => {
                        self.remaining.pop_front();
                        self.stage = TransferStage::Fence;
                    }
                }
            }
        }
        Ok(TransferOutcome::Advanced)
    }
}

/// The next piece of the deliveries of a rank from byte `at` on (`None`: from the first one that is
/// needed), which becomes the byte where the piece ends; `None` after the last piece.
fn next_deliveries(
    replicas: &ReplicatedRankStates,
    rank: u32,
    at: &mut Option<u64>,
) -> Option<RecordingUpdate> {
    let nothing = ReplicatedRecording::default();
    let recording = replicas.recording(rank).unwrap_or(&nothing);
    let deliveries_base = recording.first_delivery;
    let deliveries_from = at.unwrap_or(deliveries_base);
    let deliveries = recording.deliveries(deliveries_from, PIECE_BYTES as usize);
    let is_over = deliveries.is_empty() && at.is_some();
    *at = Some(deliveries_from + deliveries.len() as u64);
    (!is_over).then(|| RecordingUpdate {
        rank,
        deliveries_base,
        deliveries_from,
        deliveries,
        ..Default::default()
    })
}

/// The next piece of a record from position `at` on, and the position where the piece ends; `None`
/// after the last piece.
fn next_update(
    fenced: &FencedRecording,
    recording: &ReplicatedRecording,
    file: &File,
    at: Option<u64>,
) -> Result<Option<(RecordingUpdate, u64)>> {
    let (here, there) = (recording.end(), fenced.first + fenced.bytes);
    let end = here.max(there);
    let (from, rest) = match at {
        Some(at) if at >= end => return Ok(None),
        Some(at) => (at, RecordingUpdate { rank: fenced.rank, ..RecordingUpdate::default() }),
        None => {
            // Both copies are complete back to the oldest image, so only entries from the later
            // beginning on are needed.
            let base = recording.first.max(fenced.first);
            (base, RecordingUpdate { base, ..recording.rest(fenced.rank) })
        }
    };
    let to = end.min(from + PIECE_BYTES);
    let reads = if there >= here && from >= fenced.first {
        let mut bytes = vec![0; (to - from) as usize];
        file.read_exact_at(&mut bytes, from - fenced.first).context("the relay's file")?;
        bytes
    } else {
        let range = from - recording.first..to.min(here) - recording.first;
        recording.reads[range.start as usize..range.end as usize].to_vec()
    };
    let polls = rest.polls.max(fenced.polls);
    let is_full = rest.is_full || fenced.is_full;
    // The first piece carries the rest of the update.
    let next = from + reads.len() as u64;
    Ok(Some((RecordingUpdate { from, reads, polls, is_full, continues: next < end, ..rest }, next)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pieces of a record, joined, and their number.
    fn all_updates(
        fenced: &FencedRecording,
        recording: &ReplicatedRecording,
        file: &File,
    ) -> (RecordingUpdate, usize) {
        let mut all = RecordingUpdate::default();
        let (mut at, mut count) = (None, 0);
        while let Some((update, next)) = next_update(fenced, recording, file, at).unwrap() {
            let base = if count == 0 { update.base } else { all.base };
            assert_eq!(update.from, base + all.reads.len() as u64);
            let reads = [all.reads, update.reads].concat();
            let polls = all.polls.max(update.polls);
            let is_full = all.is_full || update.is_full;
            let rest = if count == 0 {
                (update.first_determinant, update.determinants)
            } else {
                (all.first_determinant, all.determinants)
            };
            assert_eq!(
                update.continues,
                next_update(fenced, recording, file, Some(next)).unwrap().is_some()
            );
            all = RecordingUpdate {
                continues: false,
                rank: update.rank,
                base,
                from: base,
                reads,
                is_full,
                polls,
                first_determinant: rest.0,
                determinants: rest.1,
                files: if count == 0 { update.files } else { all.files },
                ..RecordingUpdate::default()
            };
            (at, count) = (Some(next), count + 1);
        }
        (all, count)
    }

    #[test]
    fn a_transfer_begins_when_the_lost_node_performs_no_more_effects() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let begins_at = |end| {
            StateTransfer::new(Node::default(), (0, 1), (vec![0], vec![]), end, true).begins_at()
        };
        assert_eq!(begins_at(None), None);
        assert_eq!(begins_at(Some(now - second)), None);
        assert_eq!(begins_at(Some(now + 60 * second)), Some(now + 60 * second));
    }

    #[test]
    fn the_longer_of_two_recordings_is_transferred_with_the_later_polls() {
        let file =
            File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::empty()).unwrap());
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES + 5).map(|at| (at * 7) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let recording = |length: usize| ReplicatedRecording {
            first: 0,
            reads: bytes[..length].to_vec(),
            polls: 8,
            is_full: false,
            first_determinant: 3,
            determinants: [[1, 2, 3]].into(),
            files: vec![4; 80],
            ..ReplicatedRecording::default()
        };
        for (here, there, polls) in
            [(0, 0, 9), (5, 3, 7), (3, 5, 9), (9, 9, 8), (4, bytes.len(), 1), (bytes.len(), 4, 11)]
        {
            let fenced = FencedRecording {
                rank: 2,
                first: 0,
                bytes: there as u64,
                polls,
                is_full: here == 9,
            };
            let (update, count) = all_updates(&fenced, &recording(here), &file);
            assert!(update.reads == bytes[..here.max(there)], "{here} {there}");
            assert_eq!((update.rank, update.polls, update.is_full), (2, polls.max(8), here == 9));
            assert_eq!((update.first_determinant, &update.determinants[..]), (3, &[[1, 2, 3]][..]));
            assert_eq!(count, here.max(there).div_ceil(PIECE_BYTES as usize).max(1));
            // Updates of the next node continue where the transferred record ends.
            let mut replicas = ReplicatedRankStates::default();
            replicas.handle_recording_update(RecordingUpdate {
                rank: 2,
                reads: bytes[..here].to_vec(),
                ..RecordingUpdate::default()
            });
            let mut at = None;
            while let Some((next_update, next)) =
                next_update(&fenced, replicas.recording(2).unwrap(), &file, at).unwrap()
            {
                replicas.handle_recording_update(next_update);
                at = Some(next);
            }
            let from = here.max(there) as u64;
            replicas.handle_recording_update(RecordingUpdate {
                rank: 2,
                from,
                reads: vec![77],
                ..RecordingUpdate::default()
            });
            assert_eq!(replicas.recording(2).unwrap().reads.len() as u64, from + 1);
        }
    }

    #[test]
    fn what_was_trimmed_is_not_transferred() {
        let flags = rustix::fs::MemfdFlags::empty();
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.write_all_at(b"fghi", 0).unwrap();
        let fenced = FencedRecording { rank: 2, first: 5, bytes: 4, polls: 1, is_full: false };
        let recording = |first, reads: &[u8]| ReplicatedRecording {
            first,
            reads: reads.to_vec(),
            ..ReplicatedRecording::default()
        };
        // The agent's copy begins later, ends later, or ends at the same position; or the agent's
        // copy ends before the relay's copy begins; or the agent's copy is empty.
        let rows: [(ReplicatedRecording, u64, &[u8]); 6] = [
            (recording(2, b"cdefg"), 5, b"fghi"),
            (recording(7, b"hij"), 7, b"hij"),
            (recording(7, b"hi"), 7, b"hi"),
            (recording(2, b"cde"), 5, b"fghi"),
            (recording(2, b"cd"), 5, b"fghi"),
            (recording(0, b""), 5, b"fghi"),
        ];
        for (recording, base, reads) in rows {
            let (all_updates, _) = all_updates(&fenced, &recording, &file);
            assert_eq!((all_updates.base, &all_updates.reads[..]), (base, reads), "{recording:?}");
        }
        // The relay's copy was restarted at an image, and the rank has read nothing since.
        let begun = FencedRecording { bytes: 0, ..fenced };
        let (all, count) = all_updates(&begun, &recording(2, b"cd"), &file);
        assert_eq!((all.base, &all.reads[..], count), (5, &b""[..], 1));
        // Neither copy holds anything.
        let nothing =
            all_updates(&FencedRecording::default(), &ReplicatedRecording::default(), &file);
        assert_eq!(nothing, (RecordingUpdate::default(), 1));
    }

    #[test]
    fn a_partial_batch_of_a_lost_node_is_not_transferred() {
        let flags = rustix::fs::MemfdFlags::empty();
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.write_all_at(b"abcd", 0).unwrap();
        let fenced = FencedRecording { rank: 2, first: 0, bytes: 4, polls: 5, is_full: false };
        let mut replicas = ReplicatedRankStates::default();
        let piece_of = |from, reads: &[u8], continues| {
            let (rank, reads) = (2, reads.to_vec());
            RecordingUpdate { rank, from, reads, continues, ..RecordingUpdate::default() }
        };
        replicas.handle_recording_update(RecordingUpdate {
            polls: 3,
            files: vec![1],
            ..piece_of(0, b"ab", false)
        });
        let torn = RecordingUpdate {
            polls: 9,
            files: vec![2],
            is_full: true,
            ..piece_of(2, b"cdefg", true)
        };
        replicas.handle_recording_update(torn);
        // The agent's copy ends later, but within an entry.
        let all = all_updates(&fenced, replicas.recording(2).unwrap(), &file).0;
        assert_eq!((&all.reads[..], all.polls, all.is_full), (&b"abcd"[..], 5, false));
        assert_eq!(all.files, [1], "the effect that was announced there has not happened");
        // Afterwards the agent's copy is what was transferred.
        replicas.drop_partial_batch(2);
        let mut at = None;
        while let Some((update, next)) =
            next_update(&fenced, replicas.recording(2).unwrap(), &file, at).unwrap()
        {
            replicas.handle_recording_update(update);
            at = Some(next);
        }
        let recording = replicas.recording(2).unwrap();
        assert_eq!(
            (&recording.reads[..], recording.polls, recording.is_full),
            (&b"abcd"[..], 5, false)
        );
        replicas.handle_recording_update(piece_of(4, b"other", false));
        assert_eq!(replicas.recording(2).unwrap().reads, b"abcdother");
    }
}
