//! How an agent ends what it has started: it sends SIGTERM to every process that descends from its
//! ranks, and SIGKILL after a grace period to those that still run. When nothing of the job is
//! left, the agent ends the relay, removes the shared memory of killed ranks, and ends itself.
//! Agents below do the same at the same time.

use std::time::{Duration, Instant};

use super::Agent;
use super::checkpoint_scheduler::CheckpointScheduler;
use super::course::Phase;
use super::image_service::ImageRemovals;
use super::parent_agent::ParentAgent;
use crate::checkpoint::CheckpointConfig;
use crate::cleanup;
use crate::control::Message;
use crate::sys;

/// Time for ranks to end by themselves after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Time for agents below to end after SIGKILL: they have the same grace period and a network in
/// between.
const CHILD_GRACE: Duration = Duration::from_secs(12);
/// Time for the relay to end after the end of its stdin; then the relay is killed.
const RELAY_GRACE: Duration = Duration::from_secs(1);
/// A file system or an object store that has not deleted images within this time keeps them.
const REMOVAL_MAX: Duration = Duration::from_secs(9);

impl Agent {
    pub(super) fn begin_end(&mut self, at_once: bool) {
        if self.course.phase == Phase::Working {
            self.course.phase = Phase::Ending(Instant::now() + TERM_GRACE);
            report_who_waits(self);
            self.signal_ranks(libc::SIGTERM);
            self.children.end(at_once, self.parent.stream.at_end());
        }
        if at_once {
            self.kill_ranks();
            self.children.end(true, self.parent.stream.at_end());
        }
    }

    /// Ends the ranks because the stream to the agent above has ended.
    pub(super) fn end_orphaned(&mut self) {
        self.course.is_orphaned |= self.course.phase == Phase::Working;
        self.begin_end(false);
    }

    fn signal_ranks(&self, signal: i32) {
        for rank in self.supervisor.running() {
            sys::kill_group(rank.pid, signal);
            // A stopped process handles a signal only after SIGCONT.
            sys::kill_group(rank.pid, libc::SIGCONT);
        }
        for pid in sys::descendants(&self.own_processes()) {
            sys::kill(pid, signal);
        }
    }

    fn kill_ranks(&mut self) {
        if !matches!(self.course.phase, Phase::Killing(_)) {
            self.course.phase = Phase::Killing(Instant::now() + CHILD_GRACE);
        }
        self.signal_ranks(libc::SIGKILL);
    }

    /// Process ids of the relay and of the agents below, which end in their own way.
    pub(super) fn own_processes(&self) -> Vec<u32> {
        let relay = self.relay.process.iter().map(|relay| relay.pid);
        relay.chain(self.children.pids()).collect()
    }

    pub(super) fn advance_end(&mut self) {
        let now = Instant::now();
        match self.course.phase {
            Phase::Working => return,
            Phase::Ending(deadline) if now >= deadline => self.kill_ranks(),
            Phase::Killing(deadline) if now >= deadline => self.children.abandon(),
            _ => {}
        }
        // A process that still runs after that hangs in the kernel; the agent does not wait for it.
        let given_up = matches!(self.course.phase, Phase::Killing(deadline) if now >= deadline);
        let ranks_gone = self.supervisor.ranks.iter().all(|rank| rank.reported.is_some());
        let children_gone = self.children.all.iter().all(|child| child.state().is_over());
        let all_gone = ranks_gone && children_gone;
        if (ranks_gone || given_up) && !self.course.done && self.images.removals.is_none() {
            let may_be_needed = self.course.is_orphaned && self.parent.may_move_ranks();
            begin_removals(self, may_be_needed);
        }
        if self.course.done || !(given_up || all_gone) {
            return;
        }
        // All ranks have ended: processes that they have started have no purpose any more.
        if !given_up && !sys::descendants(&self.own_processes()).is_empty() {
            return self.signal_ranks(libc::SIGKILL);
        }
        self.finish();
    }

    fn finish(&mut self) {
        if let Some(relay) = &mut self.relay.process {
            relay.end(RELAY_GRACE);
            for message in relay.read(true) {
                self.parent.send(&message);
            }
        }
        self.processes.remove_all_files(&self.supervisor.ranks);
        let removals = self.images.removals.take();
        if !removals.is_none_or(ImageRemovals::wait) {
            note_kept_images(&mut self.parent);
        }
        // Agents of lost nodes have left their lease files.
        let is_over = !self.course.is_orphaned;
        self.images.lease.take().into_iter().for_each(|lease| lease.end(is_over));
        if self.parent.assignment.is_some() {
            cleanup::remove_stale_intel_files(self.course.started_at);
        }
        self.children.close_output();
        self.course.done = true;
        self.parent.send(&Message::Done);
    }
}

/// Lets the ends of ranks be reported that were to begin again: now they do not.
fn report_who_waits(agent: &mut Agent) {
    let supervisor = &agent.supervisor;
    for (index, rank) in supervisor.ranks.iter().enumerate() {
        let waits = rank.ending.is_some() && rank.reported.is_none();
        let is_known = agent.course.unreported.contains(&index);
        if waits && !is_known && !supervisor.is_restoring(rank.rank) {
            agent.course.unreported.push(index);
        }
    }
}

/// Begins to delete the images of this node's ranks, while the agents below end. An agent that has
/// taken over ranks of this node may need their images; images without a valid lease are deleted
/// anyway.
fn begin_removals(agent: &mut Agent, may_be_needed: bool) {
    let ranks = agent.supervisor.ranks.iter_mut();
    let schedulers = ranks.filter_map(|rank| rank.scheduler.as_mut());
    let end = |scheduler: &mut CheckpointScheduler| match may_be_needed {
        true => scheduler.leave_images(),
        false => scheduler.remove_all(),
    };
    agent.images.removals = Some(ImageRemovals {
        images: schedulers.filter_map(end).collect(),
        announcement: agent.images.end_announcing(agent.parent.assignment.as_deref()),
        deadline: Instant::now() + REMOVAL_MAX,
    });
}

/// Tells the user that images were not deleted: their place did not answer in time, or refused it.
fn note_kept_images(parent: &mut ParentAgent) {
    let Some(own) = parent.assignment.as_ref() else { return };
    let config = CheckpointConfig::find(&own.job.environment);
    let store = config.as_ref().and_then(|config| config.object_store_url.clone());
    let folder = config.map(|config| config.folder.display().to_string());
    parent.note(format!(
        "checkpoints of node {} may be left in {}, folder {}: not all of them could be deleted as \
         the job ended",
        own.node.name,
        store.or(folder).unwrap_or_default(),
        own.job.id
    ));
}
