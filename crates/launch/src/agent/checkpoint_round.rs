//! What an agent does about the checkpoint images of its ranks in each round of its loop: the agent
//! carries out what [`CheckpointScheduler`] decides, and notes results to the user.
//!
//! What may never happen: a rank has quiesced, and the agent does not let it resume.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::checkpoint_scheduler::{
    CheckpointScheduler, QuiesceReply, QuiesceSocket, SchedulerStep, pending_signals, unrestorable,
};
use super::image_service::ImageService;
use super::input;
use super::parent_agent::ParentAgent;
use super::pmi_replay::PmiReplay;
use super::rank::LocalRank;
use super::relay::RelayService;
use crate::checkpoint::checkpoint_image::{ImageHeader, ReplayPosition};
use crate::control::Message;
use crate::control::rank_state::RankUpdate;
use crate::ps::paths;
use crate::sys;

/// What a rank's checkpoint needs next from the agent's loop.
pub enum CheckpointStep {
    Nothing,
    /// An image is due: the loop counts the bytes of all images of this node.
    Due,
    /// The rank has quiesced at this position: the loop reads everything that the rank has said,
    /// and prepares the image.
    Quiesced([u64; 4]),
}

/// What one rank's checkpoint touches in one round of the agent's loop.
pub struct CheckpointRound<'a> {
    pub rank: &'a mut LocalRank,
    pub images: &'a mut ImageService,
    pub relay: &'a mut RelayService,
    pub parent: &'a mut ParentAgent,
}

impl CheckpointRound<'_> {
    /// Reports the outcome of this round.
    pub fn end(&mut self, outcome: Result<()>) {
        self.report_overdue();
        self.report_checkpoint();
        let Err(error) = outcome else { return };
        let mut text = format!("rank {} has no checkpoint: {error:#}", self.rank.rank);
        let scheduler = self.rank.scheduler.as_mut();
        if scheduler.is_some_and(CheckpointScheduler::note_failure) {
            text += "; no more are tried";
        }
        self.parent.note(text);
    }

    fn report_checkpoint(&mut self) {
        let is_replicated = self.parent.is_replicated();
        let rank = &mut *self.rank;
        let images = rank
            .scheduler
            .as_mut()
            .filter(|_| is_replicated)
            .and_then(|scheduler| scheduler.images.new_locations());
        if let Some(images) = images {
            // What an image depends on is known above before the image is.
            rank.send_recording_updates(self.parent);
            let update = RankUpdate::Checkpoints { rank: rank.rank, images };
            self.parent.update_rank(update);
        }
        let usable = rank.scheduler.as_ref().and_then(|it| it.images.usable_numbers());
        if let (Some(numbers), Some(node_logs)) = (usable, &rank.shared.node_logs)
            && let Some(images) = node_logs.new_images(rank.rank, numbers)
        {
            self.parent.send(&Message::LogImages(Box::new(images)));
        }
        if let Some((number, bytes)) =
            rank.scheduler.as_mut().and_then(CheckpointScheduler::unreported_image)
        {
            let rank = rank.rank;
            self.parent.send(&Message::Checkpoint { rank, number, bytes });
            self.relay.report_recoverable_again(rank, number, self.parent);
        }
    }

    fn report_overdue(&mut self) {
        let rank = &mut *self.rank;
        let said =
            rank.scheduler.as_mut().and_then(|scheduler| scheduler.overdue_notice(Instant::now()));
        if let Some(said) = said {
            self.parent.note(format!("rank {} {said}", rank.rank));
        }
    }

    /// Whether an image of the rank is due and may be requested.
    fn check_due(&mut self) -> Result<CheckpointStep> {
        let rank = &mut *self.rank;
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(CheckpointStep::Nothing) };
        let read = || rank.recording.as_ref().map_or(0, |recording| recording.recorded());
        if !scheduler.is_due(read, Instant::now()) {
            return Ok(CheckpointStep::Nothing);
        }
        Ok(if self.is_possible()? { CheckpointStep::Due } else { CheckpointStep::Nothing })
    }

    /// Whether an image of the rank, which is due, can be taken now; if not, it is due later.
    pub fn is_possible(&mut self) -> Result<bool> {
        let rank = &mut *self.rank;
        // Before its first poll the rank does not know yet from which request on it must quiesce.
        let has_begun = rank.poll_counts().is_none_or(|polls| polls.present > 0);
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(false) };
        if !has_begun {
            scheduler.wait_for_first_poll();
            return Ok(false);
        }
        let refusal = rank.recording.as_ref().and_then(|recording| recording.refusal());
        let skipped = match refusal {
            Some(why) => Some(scheduler.skip_useless(&why)),
            None => {
                let child = scheduler.preventing_child(rank.pid);
                child.map(|child| scheduler.wait_for_child(child))
            }
        };
        if let Some(notice) = skipped {
            self.report_skipped(notice);
            return Ok(false);
        }
        if scheduler.is_disk_stuck() {
            bail!("older ones are not gone yet: their disk does not answer");
        }
        Ok(true)
    }

    /// Requests an image of the rank, if there is space for it. `taken`: the bytes of all images of
    /// this node.
    pub fn request(&mut self, taken: u64) {
        if self.has_space(taken) {
            self.begin_request(None);
        }
    }

    /// Requests an image of the rank, which is to belong to this round.
    pub fn begin_request(&mut self, round: Option<u64>) {
        if let (Some(scheduler), Some(recording)) =
            (self.rank.scheduler.as_mut(), &self.rank.recording)
        {
            recording.request_checkpoint(scheduler.begin_request(round));
        }
    }

    fn report_skipped(&mut self, notice: Option<String>) {
        if let Some(notice) = notice {
            let text = format!("rank {} {notice}", self.rank.rank);
            self.parent.note(text);
        }
    }

    /// Advances the checkpoint as far as is possible without the agent's loop.
    pub fn advance(&mut self) -> Result<CheckpointStep> {
        let rank = &mut *self.rank;
        let is_replaying = rank.is_replaying();
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(CheckpointStep::Nothing) };
        match scheduler.step(rank.pid, is_replaying)? {
            SchedulerStep::Nothing => (),
            SchedulerStep::CheckDue => return self.check_due(),
            SchedulerStep::ReadReply => return self.handle_quiesce_reply(),
            SchedulerStep::BeginDump => self.end_preparing()?,
            SchedulerStep::Seal => self.seal_checkpoint()?,
            SchedulerStep::Sealed { unreachable, requested } => {
                if let Some((number, bytes)) = requested {
                    let (rank, bytes) = (rank.rank, paths::bytes(bytes));
                    self.parent
                        .note(format!("checkpoint {number} of rank {rank} is there: {bytes}"));
                }
                self.images.report_unreachable(&unreachable, self.parent);
            }
            SchedulerStep::Uploaded(number, uploaded) => {
                let number = format!("checkpoint {number} of rank {}", rank.rank);
                let unreachable = uploaded.as_deref().unwrap_or(&[]);
                self.images.report_unreachable(unreachable, self.parent);
                self.images.report_store_state(&number, uploaded.map(drop), self.parent);
            }
        }
        Ok(CheckpointStep::Nothing)
    }

    /// Reads the answer of a rank that was asked to quiesce.
    fn handle_quiesce_reply(&mut self) -> Result<CheckpointStep> {
        let rank = &mut *self.rank;
        match rank.quiesce_socket.as_ref().map_or(QuiesceReply::Closed, QuiesceSocket::read) {
            QuiesceReply::Quiesced(word) => {
                if let Some(child) = rank.observed_child() {
                    self.resume_beside_child(child)?;
                    return Ok(CheckpointStep::Nothing);
                }
                let unsaved = rank.recording.as_ref().map_or(0, |it| it.unsaved());
                if let Some(what) = unrestorable(rank.pid, unsaved) {
                    self.resume_without_image(what)?;
                    return Ok(CheckpointStep::Nothing);
                }
                return Ok(CheckpointStep::Quiesced(word));
            }
            QuiesceReply::Nothing => (),
            QuiesceReply::Closed => {
                rank.quiesce_socket = None;
                if let Some(scheduler) = rank.scheduler.as_mut() {
                    scheduler.note_disconnect();
                }
            }
        }
        Ok(CheckpointStep::Nothing)
    }

    /// Lets the rank resume without an image, because this child of the rank lives.
    fn resume_beside_child(&mut self, child: u32) -> Result<()> {
        self.resume()?;
        let scheduler = self.rank.scheduler.as_mut();
        let notice = scheduler.and_then(|scheduler| scheduler.wait_for_child(child));
        self.report_skipped(notice);
        Ok(())
    }

    /// Lets the rank resume without an image, because it has or uses this.
    fn resume_without_image(&mut self, what: &str) -> Result<()> {
        self.resume()?;
        let scheduler = self.rank.scheduler.as_mut();
        let notice = scheduler.and_then(|scheduler| scheduler.wait_for_close(what));
        self.report_skipped(notice);
        Ok(())
    }

    /// Whether the images of this node stay within `checkpoint_space` with one more; if not, the
    /// user is notified once until there is space again.
    pub fn has_space(&mut self, taken: u64) -> bool {
        // An image takes as much as the process until it is compressed.
        let more = sys::resident_bytes(self.rank.pid);
        let rank = &mut *self.rank;
        let Some(scheduler) = rank.scheduler.as_mut() else { return false };
        let (has_space, is_to_be_reported) = scheduler.check_space(taken + more);
        if is_to_be_reported {
            let text = format!(
                "rank {} has no checkpoint: it may take {}, and those of this node take {} of {} \
                 (checkpoint_space)",
                rank.rank,
                paths::bytes(more),
                paths::bytes(taken),
                paths::bytes(scheduler.config().space)
            );
            self.parent.note(text);
        }
        has_space
    }

    /// Prepares the image of a rank that has quiesced at this position, after the agent's loop has
    /// read all PMI lines and output of the rank.
    pub fn prepare(&mut self, position: [u64; 4]) -> Result<()> {
        let outcome = self.begin_preparing(position);
        // The rank waits whatever the outcome.
        if outcome.is_err() {
            self.resume()?;
        }
        outcome
    }

    /// Starts to make a folder for the image.
    fn begin_preparing(&mut self, position: [u64; 4]) -> Result<()> {
        let rank = &mut *self.rank;
        let (Some(scheduler), Some(quiesce_socket)) =
            (rank.scheduler.as_mut(), rank.quiesce_socket.as_ref())
        else {
            return Ok(());
        };
        let [number, determinants, sent, polls] = position;
        if number != scheduler.number() {
            bail!("it answers for checkpoint {number}, and {} was asked for", scheduler.number());
        }
        let replay = rank.replay.as_ref().context("it cannot be restarted")?;
        let (asked, stage, printed) = replay.position();
        let unread = quiesce_socket.inodes.stdin.map_or(0, |pipe| input::unread(rank.pid, pipe));
        let read = rank.streams.input.given().saturating_sub(unread);
        let recording_bytes = rank.recording.as_ref().map_or(0, |recording| recording.replayed());
        let replay_position = ReplayPosition {
            determinants,
            sent,
            polls,
            asked,
            stage,
            printed,
            read,
            recording_bytes,
        };
        let logs = match &rank.shared.node_logs {
            Some(node_logs) => node_logs.note_image(rank.rank, number)?,
            None => None,
        };
        let (pid, inodes) = (rank.pid, quiesce_socket.inodes);
        let header = ImageHeader { number, pid, replay_position, inodes, shared: Vec::new() };
        scheduler.begin_preparing(header, logs)
    }

    /// Ends the preparation of the folder. The rank waits whatever the outcome.
    fn end_preparing(&mut self) -> Result<()> {
        let scheduler = self.rank.scheduler.as_mut();
        let outcome = scheduler.map_or(Ok(()), CheckpointScheduler::begin_dump);
        if outcome.is_err() {
            self.resume()?;
        }
        outcome
    }

    /// CRIU has ended: lets the rank resume, and starts to write the image to the disk. A timer may
    /// have expired while the image was taken.
    fn seal_checkpoint(&mut self) -> Result<()> {
        let blocked = self.rank.recording.as_ref().map(|recording| recording.image_mask());
        if pending_signals::ends_or_stops(self.rank.pid, blocked) {
            // It is tried again, unless the rank has ended.
            if let Some(scheduler) = &mut self.rank.scheduler {
                scheduler.end_incarnation();
                scheduler.postpone();
            }
            return self.resume();
        }
        if let Some(what) = unrestorable(self.rank.pid, 0) {
            self.rank.scheduler.iter_mut().for_each(CheckpointScheduler::end_incarnation);
            return self.resume_without_image(what);
        }
        self.resume()?;
        let rank = &mut *self.rank;
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(()) };
        if let Some((number, stood_still)) = scheduler.seal(rank.pid)?
            && self.parent.assignment.as_ref().is_some_and(|own| own.job.verbose)
        {
            let (rank, millis) = (rank.rank, stood_still.as_millis());
            let text =
                format!("checkpoint {number} of rank {rank}: it stood still for {millis} ms");
            self.parent.note(text);
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        let rank = &mut *self.rank;
        let incarnation = rank.replay.as_ref().map_or(0, PmiReplay::incarnation);
        let Some(scheduler) = &mut rank.scheduler else { return Ok(()) };
        let (number, kept) = (scheduler.number(), scheduler.images.trim_position());
        let mut released = Ok(());
        if let Some(oldest) = scheduler.images.oldest() {
            let covered = &oldest.replay_position;
            rank.streams.input.trim(covered.read);
            rank.recording.iter().for_each(|recording| recording.trim(covered.recording_bytes));
            if let Some(node_logs) = &rank.shared.node_logs {
                released = node_logs.release(rank.rank, oldest.number);
            }
        }
        // The rank goes on whatever has become of its logs.
        rank.resume(number, incarnation, kept)?;
        released
    }
}

impl LocalRank {
    /// A living child of the rank whose system calls are dispatched. The caller has the rank stand
    /// still, so the rank starts no other child meanwhile.
    fn observed_child(&self) -> Option<u32> {
        let held_files = self.recording.as_ref().and_then(|recording| recording.held_files());
        held_files.and_then(|_| sys::living_child(self.pid))
    }

    /// When the checkpoint scheduler of the rank has to act; `None` for an ended rank, and for an
    /// idle scheduler while the rank replays.
    pub fn checkpoint_time(&self) -> Option<Instant> {
        let scheduler = self.scheduler.as_ref().filter(|_| self.ending.is_none())?;
        scheduler.next_time(self.is_replaying())
    }

    /// The quiesce socket for the poll set, while the rank is asked to quiesce.
    pub fn quiesce_fd(&self) -> Option<BorrowedFd<'_>> {
        let scheduler = self.scheduler.as_ref().filter(|_| self.ending.is_none());
        let is_requested = scheduler.is_some_and(CheckpointScheduler::is_requested);
        self.quiesce_socket
            .as_ref()
            .filter(|_| is_requested)
            .map(|quiesce_socket| quiesce_socket.socket.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::time::Duration;

    use super::super::rank::SharedMemory;
    use super::*;
    use crate::checkpoint::CheckpointConfig;
    use crate::checkpoint::criu::ExternalInodes;

    #[test]
    fn who_has_ended_is_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let config = CheckpointConfig::sample(1, Path::new("/"));
        let mut scheduler = CheckpointScheduler::new(config, 2, 0, (0, 1));
        scheduler.begin_request(None);
        let mut rank = LocalRank::vacant(2, None, SharedMemory::default());
        rank.scheduler = Some(scheduler);
        rank.quiesce_socket =
            Some(QuiesceSocket { socket: ours.into(), inodes: ExternalInodes::default() });
        drop(theirs);
        assert!(rank.quiesce_fd().is_none() && rank.checkpoint_time().is_none());
        rank.ending = None;
        assert!(rank.quiesce_fd().is_some() && rank.checkpoint_time().is_some());
        let scheduler = rank.scheduler.as_mut().unwrap();
        scheduler.note_disconnect();
        assert!(scheduler.overdue_notice(Instant::now() + Duration::from_secs(60)).is_some());
        assert!(rank.quiesce_fd().is_none() && rank.checkpoint_time().is_none());
    }
}
