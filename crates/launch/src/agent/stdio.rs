//! Standard streams of ranks: forwards what ranks print to the agent above, and delivers standard
//! input to rank 0.
//!
//! What may never happen: output is sent to the agent above before the recorded nondeterminism from
//! which the output follows (`node_failover`).

use super::Agent;
use super::input::STDIN_RETAINED_BYTES_MAX;
use super::pmi_replay::{PmiReplay, PrintOutcome};
use crate::control::rank_state::RankUpdate;
use crate::control::{Message, Stream};
use crate::sys;

impl Agent {
    pub(super) fn handle_output(&mut self, index: usize) {
        // The pipes of an ended rank are emptied: only an orphan of the rank can still write there.
        let rank = &self.ranks[index];
        let has_ended = rank.ending.is_some() && !rank.reported;
        self.forward_output(index, has_ended);
    }

    /// Forwards everything in the pipes of a rank that stands still.
    pub(super) fn read_all_output(&mut self, index: usize) {
        self.forward_output(index, true);
    }

    /// `everything`: the rank has ended or stands still, so the pipes are emptied.
    fn forward_output(&mut self, index: usize, everything: bool) {
        let rank = &mut self.ranks[index];
        let Some(mut replay) = rank.replay.take() else {
            let number = rank.rank;
            let parent = &mut self.parent;
            return rank.read_output(everything, |stream, bytes| {
                parent.send(&Message::Output { rank: number, stream, bytes, own: 0 });
            });
        };
        let mut prints = Vec::new();
        let recording = rank.recording.clone();
        let polls = || recording.as_ref().map(|recording| recording.poll_counts());
        rank.read_output(everything, |stream, bytes| {
            let came = replay.print(stream, &bytes, polls());
            prints.extend(came.into_iter().map(|print| (stream, print)));
        });
        if everything {
            let last = replay.end_print(polls());
            prints.extend(last.map(|print| (Stream::Stderr, print)));
        }
        rank.replay = Some(replay);
        if !prints.is_empty() {
            self.ranks[index].send_recording_updates(&mut self.parent);
        }
        prints.into_iter().for_each(|(stream, print)| self.forward_print(index, stream, print));
    }

    fn forward_print(&mut self, index: usize, stream: Stream, print: PrintOutcome) {
        let rank = self.ranks[index].rank;
        let (bytes, is_own) = match print {
            PrintOutcome::New(bytes) => (bytes, false),
            PrintOutcome::OfLibrary(bytes) => (bytes, true),
            PrintOutcome::ReplacesLastWords { new, from, gone } => {
                self.report_last_words(rank, from, gone);
                (new, false)
            }
            PrintOutcome::Diverged(text) => {
                // The rank has diverged, so everything that it does from now on may be wrong.
                let rank = &mut self.ranks[index];
                rank.replay.iter_mut().for_each(PmiReplay::abort);
                if rank.ending.is_none() {
                    sys::kill_group(rank.pid, libc::SIGKILL);
                }
                let text = format!("rank {} {text}", rank.rank);
                return self.parent.fail(text);
            }
        };
        let own = if is_own { 0 } else { bytes.len() as u32 };
        self.parent.send(&Message::Output { rank, stream, bytes, own });
    }

    fn report_last_words(&mut self, rank: u32, from: u64, gone: u64) {
        if self.parent.is_replicated() {
            self.parent.update_rank(RankUpdate::LastWords { rank, from });
        }
        let text = format!(
            "rank {rank} does not print again the last {gone} bytes that it printed on standard error before it ended by an \
             error: they count as its last words"
        );
        self.parent.note(text);
    }

    /// Records output of a rank of an agent below, if the rank may move to another node.
    pub(super) fn record_output(&mut self, rank: u32, stream: Stream, bytes: &[u8], own: u32) {
        if own > 0 && self.parent.may_move_ranks() && self.parent.has_spares() {
            self.failover.replicas.handle_print(rank, stream, bytes);
        }
    }

    /// For a rank that has ended regularly: fails the job if the rank has not printed all that
    /// earlier incarnations printed.
    pub(super) fn check_output(&mut self, index: usize) {
        let rank = &self.ranks[index];
        if let Some(text) = rank.replay.as_ref().and_then(PmiReplay::missing_output) {
            self.parent.fail(format!("rank {} {text}", rank.rank));
        }
    }

    pub(super) fn deliver_stdin(&mut self, bytes: Vec<u8>) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.forwarded_input.forward(&bytes);
            return child.process.stream.send(&Message::Stdin { bytes });
        }
        if let Some(index) = self.ranks.iter().position(|rank| rank.rank == 0) {
            self.ranks[index].input.queue(&bytes);
            self.write_rank_input(index);
        }
    }

    pub(super) fn deliver_stdin_end(&mut self) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.forwarded_input.end();
            return child.process.stream.send(&Message::StdinEnd);
        }
        if let Some(index) = self.ranks.iter().position(|rank| rank.rank == 0) {
            self.ranks[index].input.end();
            self.write_rank_input(index);
        }
    }

    /// Writes as much standard input to a rank as its pipe takes now.
    pub(super) fn write_rank_input(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        if rank.restore.is_some() {
            // The rank's next incarnation reads the input.
            return;
        }
        let bytes = rank.input.write();
        if bytes > 0 {
            self.parent.send(&Message::StdinTaken { bytes });
        }
        if rank.input.take_loss() {
            let text = format!(
                "rank {} has been given more than {} MiB of standard input, and no more of it is kept: if this rank is killed it \
                 comes back only from a checkpoint that is young enough",
                rank.rank,
                STDIN_RETAINED_BYTES_MAX >> 20
            );
            self.parent.note(text);
        }
    }
}
