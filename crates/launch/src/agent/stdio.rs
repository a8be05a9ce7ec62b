//! Standard streams of ranks: forwards what ranks print to the agent above, and writes standard
//! input to rank 0.
//!
//! What may never happen: output is sent to the agent above before the recorded nondeterminism from
//! which the output follows (`node_failover`).

use super::input::STDIN_RETAINED_BYTES_MAX;
use super::parent_agent::ParentAgent;
use super::pmi_replay::{PmiReplay, PrintOutcome};
use super::rank::LocalRank;
use crate::control::rank_state::RankUpdate;
use crate::control::{Message, Stream};
use crate::ending::Ending;
use crate::sys;

impl LocalRank {
    /// Forwards what the rank has printed.
    pub fn handle_output(&mut self, parent: &mut ParentAgent) {
        // The pipes of an ended rank are emptied: only an orphan of the rank can still write there.
        let has_ended = self.ending.is_some() && self.reported.is_none();
        self.forward_output(has_ended, parent);
    }

    /// Forwards what is in the pipes. `everything`: the rank has ended or stands still, so the
    /// pipes are emptied.
    pub fn forward_output(&mut self, everything: bool, parent: &mut ParentAgent) {
        let rank = self.rank;
        let Some(mut replay) = self.replay.take() else {
            return self.streams.read_output(everything, |stream, bytes| {
                parent.send(&Message::Output { rank, stream, bytes, own: 0 });
            });
        };
        let mut prints = Vec::new();
        let recording = self.recording.clone();
        let polls = || recording.as_ref().map(|recording| recording.poll_counts());
        self.streams.read_output(everything, |stream, bytes| {
            let came = replay.print(stream, &bytes, polls());
            prints.extend(came.into_iter().map(|print| (stream, print)));
        });
        if everything {
            let last = replay.end_print(polls());
            prints.extend(last.map(|print| (Stream::Stderr, print)));
        }
        self.replay = Some(replay);
        if !prints.is_empty() {
            self.send_recording_updates(parent);
        }
        prints.into_iter().for_each(|(stream, print)| self.forward_print(stream, print, parent));
    }

    fn forward_print(&mut self, stream: Stream, print: PrintOutcome, parent: &mut ParentAgent) {
        let rank = self.rank;
        let (bytes, is_own) = match print {
            PrintOutcome::New(bytes) => (bytes, false),
            PrintOutcome::OfLibrary(bytes) => (bytes, true),
            PrintOutcome::ReplacesLastWords { new, from, gone } => {
                report_last_words(rank, from, gone, parent);
                (new, false)
            }
            PrintOutcome::Diverged(text) => {
                // The rank has diverged, so everything that it does from now on may be wrong.
                self.replay.iter_mut().for_each(PmiReplay::abort);
                if self.ending.is_none() {
                    sys::kill_group(self.pid, libc::SIGKILL);
                }
                return parent.fail(format!("rank {rank} {text}"));
            }
        };
        let own = if is_own { 0 } else { bytes.len() as u32 };
        parent.send(&Message::Output { rank, stream, bytes, own });
    }

    /// For a rank that has ended regularly: fails the job if the rank has not printed all that
    /// earlier incarnations printed, or has not asked all that they asked.
    pub fn check_repeated(&self, ending: Ending, parent: &mut ParentAgent) {
        let Some(replay) = &self.replay else { return };
        let is_well = ending == Ending::Exited(0);
        let missing = || replay.missing_requests().filter(|_| is_well);
        if let Some(text) = replay.missing_output().or_else(missing) {
            parent.fail(format!("rank {} {text}", self.rank));
        }
    }

    /// Writes as much standard input to the rank as its pipe takes now.
    pub fn write_input(&mut self, parent: &mut ParentAgent) {
        if self.is_restoring {
            return;
        }
        let bytes = self.streams.input.write();
        if bytes > 0 {
            parent.send(&Message::StdinTaken { bytes });
        }
        if self.streams.input.take_loss() {
            parent.note(format!(
                "rank {} has been given more than {} MiB of standard input, and only the last \
                 part is kept: if this rank is killed, it can be restarted only from a recent \
                 checkpoint",
                self.rank,
                STDIN_RETAINED_BYTES_MAX >> 20
            ));
        }
    }
}

fn report_last_words(rank: u32, from: u64, gone: u64, parent: &mut ParentAgent) {
    if parent.is_replicated() {
        parent.update_rank(RankUpdate::LastWords { rank, from });
    }
    parent.note(format!(
        "rank {rank} does not print again the last {gone} bytes that it printed on standard error \
         before it ended by an error: they count as its last words"
    ));
}
