//! How an agent ends what it has started: SIGTERM to every process that grew out of its ranks,
//! SIGKILL to those still there after a grace, and then, when nothing of the job is left, the relay,
//! the shared memory of killed ranks, and itself. Agents below do the same at the same time.
//!
//! A rank that calls for the end of the job (MPI_Abort) is stopped until then: MPI libraries return from that call, and the
//! launcher looks for a better cause for a while before it ends the job. It is stopped and not ended, for the end of a rank is itself
//! a report that explains others.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Agent;
use super::checkpoint_scheduler::CheckpointScheduler;
use super::rank::LocalRank;
use crate::cleanup;
use crate::control::Message;
use crate::sys;
use crate::watch::is_library_code;

/// Time for ranks to end by themselves after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Time for agents below to follow; they have the same grace and a network between.
const CHILD_GRACE: Duration = Duration::from_secs(6);
/// The relay ends at its stdin's end; after this long it is killed.
const RELAY_GRACE: Duration = Duration::from_secs(1);
/// An object store that has not removed images within this time keeps them.
const REMOVAL_MAX: Duration = Duration::from_secs(3);

/// How far the end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Working,
    /// SIGTERM is sent; at the instant, SIGKILL follows.
    Ending(Instant),
    /// SIGKILL is sent; agents below have until the instant.
    Killing(Instant),
}

impl Agent {
    pub(super) fn begin_end(&mut self, at_once: bool) {
        if self.phase == Phase::Working {
            self.phase = Phase::Ending(Instant::now() + TERM_GRACE);
            self.signal_ranks(libc::SIGTERM);
            self.end_children(at_once);
        }
        if at_once {
            self.kill_ranks();
            self.end_children(true);
        }
    }

    /// This rank has called for the end of the job: neither it nor, if that was the program's own doing, any other one here does or
    /// prints anything more. With an error of the library one of the others may be the cause, and is yet to say so.
    pub(super) fn stop_aborting(&self, aborting: u32, code: i32) {
        let stands = |rank: &&LocalRank| rank.rank == aborting || !is_library_code(code);
        for rank in self.ranks.iter().filter(|rank| rank.ending.is_none()).filter(stands) {
            sys::kill_group(rank.pid, libc::SIGSTOP);
        }
    }

    /// Nobody is above any more, or nobody who knows of this agent.
    pub(super) fn end_orphaned(&mut self) {
        self.is_orphaned |= self.phase == Phase::Working;
        self.begin_end(false);
    }

    fn end_children(&mut self, at_once: bool) {
        for child in &mut self.children {
            child.process.stream.send(&Message::End { at_once });
            // It has started nothing yet: its connection can just go.
            if !child.process.stream.has_answered() {
                child.kill(libc::SIGTERM);
            }
            if self.parent.at_end() {
                child.process.stream.flush();
                child.process.stream.close_output();
            }
        }
    }

    fn signal_ranks(&self, signal: i32) {
        for rank in self.ranks.iter().filter(|rank| rank.ending.is_none()) {
            sys::kill_group(rank.pid, signal);
            // Who is stopped takes it in only then.
            sys::kill_group(rank.pid, libc::SIGCONT);
        }
        for pid in sys::descendants(&self.own_processes()) {
            sys::kill(pid, signal);
        }
    }

    fn kill_ranks(&mut self) {
        if !matches!(self.phase, Phase::Killing(_)) {
            self.phase = Phase::Killing(Instant::now() + CHILD_GRACE);
        }
        self.signal_ranks(libc::SIGKILL);
    }

    /// The relay and the agents below: they end in their own way.
    pub(super) fn own_processes(&self) -> Vec<u32> {
        let relay = self.relay.iter().map(|relay| relay.pid);
        let children = self.children.iter().filter(|child| !child.is_reaped);
        relay.chain(children.map(|child| child.process.pid)).collect()
    }

    pub(super) fn advance_end(&mut self) {
        let now = Instant::now();
        match self.phase {
            Phase::Working => return,
            Phase::Ending(deadline) if now >= deadline => self.kill_ranks(),
            Phase::Killing(deadline) if now >= deadline => self.abandon_children(),
            _ => {}
        }
        // Later than that, something hangs in the kernel: it will not keep us.
        let given_up = matches!(self.phase, Phase::Killing(deadline) if now >= deadline);
        let ranks_gone = self.ranks.iter().all(|rank| rank.reported);
        let children_gone = self.children.iter().all(|child| child.done);
        let all_gone = ranks_gone && children_gone;
        if self.done || !(given_up || all_gone) {
            return;
        }
        // Ranks are gone: what is left of them has no one to finish for.
        if !given_up && !sys::descendants(&self.own_processes()).is_empty() {
            return self.signal_ranks(libc::SIGKILL);
        }
        self.finish();
    }

    fn abandon_children(&mut self) {
        for child in self.children.iter_mut().filter(|child| !child.done) {
            child.kill(libc::SIGKILL);
            child.done = true;
        }
    }

    fn finish(&mut self) {
        if let Some(relay) = &mut self.relay {
            relay.end(RELAY_GRACE);
            for message in relay.read(true) {
                self.parent.send(&message);
            }
        }
        self.groups.keys().for_each(|&group| self.remove_files(group));
        // Whoever has taken its ranks over needs their images; what nobody claims goes all the same.
        let may_be_needed = self.is_orphaned && self.may_move();
        let schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        let end = |scheduler: &mut CheckpointScheduler| match may_be_needed {
            true => scheduler.leave_images(),
            false => scheduler.remove_all(),
        };
        let mut removals: Vec<_> = schedulers.filter_map(end).collect();
        removals.extend(self.end_announcing());
        let deadline = Instant::now() + REMOVAL_MAX;
        while Instant::now() < deadline && !removals.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Agents that were lost have left theirs.
        let is_over = !self.is_orphaned;
        self.lease.take().into_iter().for_each(|lease| lease.end(is_over));
        if self.assignment.is_some() {
            cleanup::remove_stale_intel_files(self.started_at);
        }
        self.children.iter_mut().for_each(|child| child.process.stream.close_output());
        self.done = true;
        self.parent.send(&Message::Done);
    }
}
