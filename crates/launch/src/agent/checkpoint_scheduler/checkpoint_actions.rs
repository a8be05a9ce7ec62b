//! What an agent does about the checkpoint images of its ranks in each round of its loop: the agent
//! carries out what [`CheckpointScheduler`] decides, and notes results to the user.
//!
//! What may never happen: a rank has quiesced, and the agent does not let it resume.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::super::image_service::ImageService;
use super::super::input;
use super::super::parent_agent::ParentAgent;
use super::super::pmi_replay::PmiReplay;
use super::super::rank::LocalRank;
use super::super::relay::RelayService;
use super::disk_tasks::{self, ImageFolder, SealedImage};
use super::quiesce_socket::{QuiesceReply, QuiesceSocket};
use super::unrestorable::unrestorable;
use super::{CheckpointScheduler, CheckpointState, DUMP_MAX, Dump, FAILURES_MAX, FIRST_POLL_RETRY};
use crate::checkpoint::checkpoint_image::{ImageHeader, ReplayPosition};
use crate::checkpoint::criu;
use crate::control::Message;
use crate::control::rank_state::RankUpdate;
use crate::ending::Ending;
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
        if let Some(scheduler) = &mut self.rank.scheduler {
            scheduler.failures += 1;
            if scheduler.failures >= FAILURES_MAX {
                text += "; no more are tried";
            }
            scheduler.schedule_next();
            scheduler.state = CheckpointState::Idle;
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
            .and_then(CheckpointScheduler::new_locations);
        if let Some(images) = images {
            let update = RankUpdate::Checkpoints { rank: rank.rank, images };
            self.parent.update_rank(update);
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
        // Before its first poll the rank does not know yet from which request on it must quiesce.
        let has_begun = rank.poll_counts().is_none_or(|polls| polls.present > 0);
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(CheckpointStep::Nothing) };
        let read = || rank.recording.as_ref().map_or(0, |recording| recording.recorded());
        if !scheduler.is_due(read, Instant::now()) {
            return Ok(CheckpointStep::Nothing);
        }
        if !has_begun {
            scheduler.due = Instant::now() + FIRST_POLL_RETRY;
            return Ok(CheckpointStep::Nothing);
        }
        let refusal = rank.recording.as_ref().and_then(|recording| recording.refusal());
        let skipped = match (refusal, scheduler.child) {
            (Some(why), _) => Some(scheduler.skip_useless(&why)),
            (None, Some(child)) if scheduler.is_child_alive(rank.pid) => {
                Some(scheduler.wait_for_child(child))
            }
            _ => None,
        };
        if let Some(notice) = skipped {
            self.report_skipped(notice);
            return Ok(CheckpointStep::Nothing);
        }
        if scheduler.kept.removals.is_full() {
            bail!("older ones are not gone yet: their disk does not answer");
        }
        Ok(CheckpointStep::Due)
    }

    /// Requests an image of the rank, if there is space for it. `taken`: the bytes of all images of
    /// this node.
    pub fn request(&mut self, taken: u64) {
        if !self.has_space(taken) {
            return;
        }
        if let (Some(scheduler), Some(recording)) =
            (self.rank.scheduler.as_mut(), &self.rank.recording)
        {
            scheduler.number += 1;
            recording.request_checkpoint(scheduler.number);
            scheduler.state = CheckpointState::Requested { since: Instant::now() };
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
        let outcome = match &mut scheduler.state {
            CheckpointState::Idle if is_replaying => Ok(()),
            CheckpointState::Idle => return self.check_due(),
            CheckpointState::Requested { .. } => return self.handle_quiesce_reply(),
            CheckpointState::Preparing { thread, began, .. } => {
                let is_over = thread.is_finished() || began.elapsed() >= DUMP_MAX;
                if is_over { self.end_preparing() } else { Ok(()) }
            }
            CheckpointState::Dumping(Dump { ended: Some(_), .. }) => self.seal_checkpoint(),
            // The rank was killed meanwhile. The end of its process is not reported while CRIU
            // holds its threads, and CRIU waits for these threads.
            CheckpointState::Dumping(_) if sys::is_over(rank.pid) => {
                scheduler.end_incarnation();
                Ok(())
            }
            CheckpointState::Dumping(_) => {
                scheduler.end_late(Instant::now());
                Ok(())
            }
            CheckpointState::Sealing { thread } if thread.is_finished() => {
                let CheckpointState::Sealing { thread } =
                    std::mem::replace(&mut scheduler.state, CheckpointState::Idle)
                else {
                    return Ok(CheckpointStep::Nothing);
                };
                let unreachable = scheduler.finish(thread)?;
                if let (true, Some(image)) = (
                    std::mem::take(&mut scheduler.notices.is_user_waiting),
                    scheduler.kept.images.back(),
                ) {
                    let (number, bytes) = (image.header.number, paths::bytes(image.bytes()));
                    let text =
                        format!("checkpoint {number} of rank {} is there: {bytes}", rank.rank);
                    self.parent.note(text);
                }
                self.images.report_unreachable(&unreachable, self.parent);
                Ok(())
            }
            CheckpointState::Uploading { thread, .. } if thread.is_finished() => {
                if let Some((number, uploaded)) = scheduler.finish_upload() {
                    let number = format!("checkpoint {number} of rank {}", rank.rank);
                    let unreachable = uploaded.as_deref().unwrap_or(&[]);
                    self.images.report_unreachable(unreachable, self.parent);
                    self.images.report_store_state(&number, uploaded.map(drop), self.parent);
                }
                Ok(())
            }
            CheckpointState::Sealing { .. }
            | CheckpointState::Uploading { .. }
            | CheckpointState::Disconnected { .. } => Ok(()),
        };
        outcome.map(|()| CheckpointStep::Nothing)
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
                let has_made_semaphores =
                    rank.recording.as_ref().is_some_and(|it| it.has_made_semaphores());
                if let Some(what) = unrestorable(rank.pid, has_made_semaphores) {
                    self.resume_with_open(what)?;
                    return Ok(CheckpointStep::Nothing);
                }
                return Ok(CheckpointStep::Quiesced(word));
            }
            QuiesceReply::Nothing => (),
            QuiesceReply::Closed => {
                rank.quiesce_socket = None;
                if let Some(scheduler) = rank.scheduler.as_mut() {
                    scheduler.state =
                        CheckpointState::Disconnected { since: Instant::now(), is_reported: false };
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

    /// Lets the rank resume without an image, because it has this open.
    fn resume_with_open(&mut self, what: &str) -> Result<()> {
        self.resume()?;
        let scheduler = self.rank.scheduler.as_mut();
        let notice = scheduler.and_then(|scheduler| scheduler.wait_for_close(what));
        self.report_skipped(notice);
        Ok(())
    }

    /// Whether the images of this node stay within `checkpoint_space` with one more; if not, the
    /// user is notified once until there is space again.
    fn has_space(&mut self, taken: u64) -> bool {
        // An image takes as much as the process until it is compressed.
        let more = sys::resident_bytes(self.rank.pid);
        let rank = &mut *self.rank;
        let Some(scheduler) = rank.scheduler.as_mut() else { return false };
        let has_room = taken + more <= scheduler.config.space;
        if !has_room {
            scheduler.schedule_next();
        }
        if !has_room && !scheduler.notices.is_full_reported {
            let text = format!(
                "rank {} has no checkpoint: it may take {}, and those of this node take {} of {} \
                 (checkpoint_space)",
                rank.rank,
                paths::bytes(more),
                paths::bytes(taken),
                paths::bytes(scheduler.config.space)
            );
            self.parent.note(text);
        }
        scheduler.notices.is_full_reported = !has_room;
        has_room
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
        if number != scheduler.number {
            bail!("it speaks of checkpoint {number}, and {} was wanted", scheduler.number);
        }
        let replay = rank.replay.as_ref().context("it does not come back")?;
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
        let (folder, pid, inodes) = (scheduler.folder.clone(), rank.pid, quiesce_socket.inodes);
        scheduler.expected = sys::resident_bytes(pid);
        let thread =
            disk_tasks::start("prepare", move || ImageFolder::prepare(&folder, number, pid))?;
        let header = ImageHeader { number, pid, replay_position, inodes, shared: Vec::new() };
        scheduler.state = CheckpointState::Preparing { thread, header, began: Instant::now() };
        Ok(())
    }

    /// Ends the preparation of the folder. The rank waits whatever the outcome.
    fn end_preparing(&mut self) -> Result<()> {
        let outcome = self.begin_dump();
        if outcome.is_err() {
            self.resume()?;
        }
        outcome
    }

    /// Starts CRIU, once the folder of the image is ready.
    fn begin_dump(&mut self) -> Result<()> {
        let Some(scheduler) = self.rank.scheduler.as_mut() else { return Ok(()) };
        let (thread, header, began) =
            match std::mem::replace(&mut scheduler.state, CheckpointState::Idle) {
                CheckpointState::Preparing { thread, header, began } if thread.is_finished() => {
                    (thread, header, began)
                }
                late => {
                    scheduler.state = late;
                    scheduler.end_incarnation();
                    bail!("there was no folder for it after {} s", DUMP_MAX.as_secs());
                }
            };
        let image_folder = thread.join().unwrap_or_else(|_| bail!("there is no folder for it"))?;
        let criu = match criu::dump(
            &scheduler.config.tool,
            header.pid,
            &header.inodes,
            &image_folder.folder,
        ) {
            Ok(criu) => criu.id(),
            Err(error) => {
                scheduler.kept.removals.add(scheduler.expected, move || image_folder.remove());
                return Err(error);
            }
        };
        let ImageFolder { folder, shared } = image_folder;
        let header = ImageHeader { shared, ..header };
        let (ended, is_late) = (None, false);
        scheduler.state =
            CheckpointState::Dumping(Dump { criu, ended, is_late, folder, header, began });
        Ok(())
    }

    /// CRIU has ended: lets the rank resume, and starts to write the image to the disk.
    fn seal_checkpoint(&mut self) -> Result<()> {
        self.resume()?;
        let rank = &mut *self.rank;
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(()) };
        let CheckpointState::Dumping(dump) =
            std::mem::replace(&mut scheduler.state, CheckpointState::Idle)
        else {
            return Ok(());
        };
        let Dump { ended, is_late, folder, header, began, .. } = dump;
        if ended != Some(Ending::Exited(0)) {
            let copies = if is_late { 0 } else { sys::copies(rank.pid) };
            let thread = disk_tasks::start("seal", move || {
                disk_tasks::dump_failure(&folder, is_late, copies)
            })?;
            scheduler.state = CheckpointState::Sealing { thread };
            return Ok(());
        }
        let text = format!(
            "checkpoint {} of rank {}: it stood still for {} ms",
            header.number,
            rank.rank,
            began.elapsed().as_millis()
        );
        let config = scheduler.config.clone();
        let thread =
            disk_tasks::start("seal", move || SealedImage::seal(&folder, header, &config))?;
        scheduler.state = CheckpointState::Sealing { thread };
        if self.parent.assignment.as_ref().is_some_and(|own| own.job.verbose) {
            self.parent.note(text);
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        let rank = &mut *self.rank;
        let incarnation = rank.replay.as_ref().map_or(0, PmiReplay::incarnation);
        let Some(scheduler) = &mut rank.scheduler else { return Ok(()) };
        let (number, kept) = (scheduler.number, scheduler.trim_position());
        if let Some(oldest) = scheduler.oldest() {
            rank.streams.input.trim(oldest.read);
            rank.recording.iter().for_each(|recording| recording.trim(oldest.recording_bytes));
        }
        rank.resume(number, incarnation, kept)
    }
}

impl LocalRank {
    /// Lets the rank's process resume, with the descriptors of its record and its statistics page.
    pub fn resume(&self, number: u64, incarnation: u32, kept: u64) -> Result<()> {
        let (Some(quiesce_socket), Some(recording)) = (&self.quiesce_socket, &self.recording)
        else {
            return Ok(());
        };
        let record = recording.fd();
        let statistics_page =
            self.statistics_page.as_ref().map(|statistics_page| statistics_page.fd());
        let files: Vec<BorrowedFd> = [record].into_iter().chain(statistics_page).collect();
        quiesce_socket.resume(number, incarnation, kept, &files)
    }

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
        let rests = matches!(scheduler.state, CheckpointState::Idle);
        scheduler.next_time().filter(|_| !(rests && self.is_replaying()))
    }

    /// The quiesce socket for the poll set, while the rank is asked to quiesce.
    pub fn quiesce_fd(&self) -> Option<BorrowedFd<'_>> {
        let is_requested = |scheduler: &CheckpointScheduler| {
            matches!(scheduler.state, CheckpointState::Requested { .. }) && self.ending.is_none()
        };
        let is_requested = self.scheduler.as_ref().is_some_and(is_requested);
        self.quiesce_socket
            .as_ref()
            .filter(|_| is_requested)
            .map(|quiesce_socket| quiesce_socket.socket.as_fd())
    }
}
