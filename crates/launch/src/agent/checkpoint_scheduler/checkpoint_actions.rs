//! What an agent does about the checkpoint images of its ranks in each round of its loop: the agent
//! carries out what [`CheckpointScheduler`] decides, and notes results to the user.
//!
//! What may never happen: a rank has quiesced, and the agent does not let it resume.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::super::pmi_replay::PmiReplay;
use super::super::rank::LocalRank;
use super::super::relay::RelayProcess;
use super::super::{Agent, Phase, input};
use super::disk_tasks::{self, ImageFolder, SealedImage};
use super::quiesce_socket::{QuiesceReply, QuiesceSocket};
use super::unrestorable::unrestorable;
use super::{
    CheckpointRequester, CheckpointScheduler, CheckpointState, DUMP_MAX, Dump, FAILURES_MAX,
    FIRST_POLL_RETRY,
};
use crate::checkpoint::checkpoint_image::{ImageHeader, ReplayPosition};
use crate::checkpoint::criu;
use crate::control::rank_state::RankUpdate;
use crate::control::{Ending, Message};
use crate::ps::paths;
use crate::sys;

impl Agent {
    pub(in super::super) fn note_criu(&mut self, pid: u32, ending: Ending) -> bool {
        let mut schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        schedulers.any(|scheduler| scheduler.note_exit(pid, ending))
    }

    /// Advances the checkpoint scheduler of each rank.
    pub(in super::super) fn advance_checkpoints(&mut self) {
        for index in 0..self.ranks.len() {
            if self.course.phase != Phase::Working {
                return;
            }
            if self.ranks[index].scheduler.is_none() || self.ranks[index].ending.is_some() {
                continue;
            }
            let outcome = self.advance_checkpoint(index);
            self.report_overdue(index);
            self.report_checkpoint(index);
            if let Err(error) = outcome {
                let rank = &mut self.ranks[index];
                let mut text = format!("rank {} has no checkpoint: {error:#}", rank.rank);
                if let Some(scheduler) = &mut rank.scheduler {
                    scheduler.failures += 1;
                    if scheduler.failures >= FAILURES_MAX {
                        text += "; no more are tried";
                    }
                    scheduler.schedule_next();
                    scheduler.state = CheckpointState::Idle;
                }
                self.parent.note(text);
            }
        }
    }

    fn report_checkpoint(&mut self, index: usize) {
        let is_replicated = self.parent.is_replicated();
        let rank = &mut self.ranks[index];
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
            self.report_recoverable_again(rank, number);
        }
    }

    /// Checks ranks whose log the relay has restarted at an image: the user reads at once of ranks
    /// on this node whose image is whole by now.
    pub(in super::super) fn check_recoverable_again(&mut self) {
        let Some(recoverable) = self.relay.process.as_ref().map(|relay| relay.recoverable.clone())
        else {
            return;
        };
        for rank in recoverable {
            let scheduler = self.ranks.iter().find(|it| it.rank == rank);
            let scheduler = scheduler.and_then(|it| it.scheduler.as_ref());
            let whole = scheduler.filter(|it| !it.is_busy()).map_or(0, |it| it.notices.reported);
            self.report_recoverable_again(rank, whole);
        }
    }

    /// Reports that the rank can be restarted again, if the relay had dropped the rank's log for
    /// lack of space and has restarted the log at the rank's newest image. `number`: the number of
    /// that image, or 0: without a whole image nothing is reported.
    pub(in super::super) fn report_recoverable_again(&mut self, rank: u32, number: u64) {
        let has_begun = |relay: &mut RelayProcess| relay.recoverable.remove(&rank);
        if number > 0 && self.relay.process.as_mut().is_some_and(has_begun) {
            let text = format!(
                "of rank {rank} everything is kept from its last checkpoint on: it can come back again"
            );
            self.parent.note(text);
        }
    }

    fn report_overdue(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let said =
            rank.scheduler.as_mut().and_then(|scheduler| scheduler.overdue_notice(Instant::now()));
        if let Some(said) = said {
            self.parent.note(format!("rank {} {said}", rank.rank));
        }
    }

    /// Requests an image of the rank if one is due.
    fn request_checkpoint(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        // Before its first poll the rank does not know yet from which request on it must quiesce.
        let has_begun = rank.poll_counts().is_none_or(|polls| polls.present > 0);
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(()) };
        let read = || rank.recording.as_ref().map_or(0, |recording| recording.recorded());
        if !scheduler.is_due(read, Instant::now()) {
            return Ok(());
        }
        if !has_begun {
            scheduler.due = Instant::now() + FIRST_POLL_RETRY;
            return Ok(());
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
            self.report_skipped(index, notice);
            return Ok(());
        }
        if scheduler.kept.removals.is_full() {
            bail!("older ones are not gone yet: their disk does not answer");
        }
        if !self.has_room_for_checkpoint(index) {
            return Ok(());
        }
        let rank = &mut self.ranks[index];
        if let (Some(scheduler), Some(recording)) = (rank.scheduler.as_mut(), &rank.recording) {
            scheduler.number += 1;
            recording.request_checkpoint(scheduler.number);
            scheduler.state = CheckpointState::Requested { since: Instant::now() };
        }
        Ok(())
    }

    fn report_skipped(&mut self, index: usize, notice: Option<String>) {
        if let Some(notice) = notice {
            let text = format!("rank {} {notice}", self.ranks[index].rank);
            self.parent.note(text);
        }
    }

    fn advance_checkpoint(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let is_replaying = rank.is_replaying();
        let Some(scheduler) = rank.scheduler.as_mut() else { return Ok(()) };
        match &mut scheduler.state {
            CheckpointState::Idle if is_replaying => Ok(()),
            CheckpointState::Idle => self.request_checkpoint(index),
            CheckpointState::Requested { .. } => self.handle_quiesce_reply(index),
            CheckpointState::Preparing { thread, began, .. } => {
                let is_over = thread.is_finished() || began.elapsed() >= DUMP_MAX;
                if is_over { self.end_preparing(index) } else { Ok(()) }
            }
            CheckpointState::Dumping(Dump { ended: Some(_), .. }) => self.seal_checkpoint(index),
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
                    return Ok(());
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
                self.report_unreachable(&unreachable);
                Ok(())
            }
            CheckpointState::Uploading { thread, .. } if thread.is_finished() => {
                if let Some((number, uploaded)) = scheduler.finish_upload() {
                    let number = format!("checkpoint {number} of rank {}", rank.rank);
                    self.report_unreachable(uploaded.as_deref().unwrap_or(&[]));
                    self.report_store_state(&number, uploaded.map(drop));
                }
                Ok(())
            }
            CheckpointState::Sealing { .. }
            | CheckpointState::Uploading { .. }
            | CheckpointState::Disconnected { .. } => Ok(()),
        }
    }

    /// Reads the answer of a rank that was asked to quiesce.
    fn handle_quiesce_reply(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        match rank.quiesce_socket.as_ref().map_or(QuiesceReply::Closed, QuiesceSocket::read) {
            QuiesceReply::Quiesced(word) => {
                if let Some(child) = rank.observed_child() {
                    return self.resume_beside_child(index, child);
                }
                let has_made_semaphores =
                    rank.recording.as_ref().is_some_and(|it| it.has_made_semaphores());
                if let Some(what) = unrestorable(rank.pid, has_made_semaphores) {
                    return self.resume_with_open(index, what);
                }
                let outcome = self.prepare_checkpoint(index, word);
                // The rank waits whatever the outcome.
                if outcome.is_err() {
                    self.resume(index)?;
                }
                return outcome;
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
        Ok(())
    }

    /// Lets the rank resume without an image, because this child of the rank lives.
    fn resume_beside_child(&mut self, index: usize, child: u32) -> Result<()> {
        self.resume(index)?;
        let scheduler = self.ranks[index].scheduler.as_mut();
        let notice = scheduler.and_then(|scheduler| scheduler.wait_for_child(child));
        self.report_skipped(index, notice);
        Ok(())
    }

    /// Lets the rank resume without an image, because it has this open.
    fn resume_with_open(&mut self, index: usize, what: &str) -> Result<()> {
        self.resume(index)?;
        let scheduler = self.ranks[index].scheduler.as_mut();
        let notice = scheduler.and_then(|scheduler| scheduler.wait_for_close(what));
        self.report_skipped(index, notice);
        Ok(())
    }

    /// Notes to the user once when the object store refuses images, and once when the object store
    /// takes images again.
    fn report_store_state(&mut self, name: &str, uploaded: Result<()>) {
        let was_gone = std::mem::replace(&mut self.images.is_store_gone, uploaded.is_err());
        let text = match uploaded {
            Err(error) if !was_gone => format!(
                "{name} is on its node alone: the store has not taken it: {error:#}; more of them are not told"
            ),
            Ok(()) if was_gone => format!("the store takes checkpoints again: {name} is there"),
            _ => return,
        };
        self.parent.note(text);
    }

    /// Requests images of this rank, or of all ranks here and below, before the next images are
    /// due.
    pub(in super::super) fn request_checkpoints(
        &mut self,
        rank: Option<u32>,
        asker: CheckpointRequester,
    ) {
        let is_it = |it: &&mut LocalRank| rank.is_none_or(|rank| rank == it.rank);
        for it in self.ranks.iter_mut().filter(is_it) {
            if let Some(scheduler) = it.scheduler.as_mut().filter(|_| it.ending.is_none()) {
                scheduler.request(asker, Instant::now());
            }
        }
        for child in &mut self.children {
            child.process.stream.send(&Message::TakeCheckpoints { rank });
        }
    }

    /// Whether the images of this node stay within `checkpoint_space` with one more; if not, the
    /// user is notified once until there is space again.
    fn has_room_for_checkpoint(&mut self, index: usize) -> bool {
        let sizes = |rank: &LocalRank| sys::resident_bytes(rank.pid);
        let taken: u64 = self
            .ranks
            .iter()
            .filter_map(|rank| rank.scheduler.as_ref().map(CheckpointScheduler::bytes))
            .sum();
        // An image takes as much as the process until it is compressed.
        let more = sizes(&self.ranks[index]);
        let rank = &mut self.ranks[index];
        let Some(scheduler) = rank.scheduler.as_mut() else { return false };
        let has_room = taken + more <= scheduler.config.space;
        if !has_room {
            scheduler.schedule_next();
        }
        if !has_room && !scheduler.notices.is_full_reported {
            let text = format!(
                "rank {} has no checkpoint: it may take {}, and those of this node take {} of {} (checkpoint_space)",
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

    /// The rank stands still: reads all PMI lines and output of the rank, and starts to make a
    /// folder for the image.
    fn prepare_checkpoint(&mut self, index: usize, word: [u64; 4]) -> Result<()> {
        self.handle_pmi(index);
        self.drain_servers();
        self.read_all_output(index);
        let rank = &mut self.ranks[index];
        let (Some(scheduler), Some(quiesce_socket)) =
            (rank.scheduler.as_mut(), rank.quiesce_socket.as_ref())
        else {
            return Ok(());
        };
        let [number, determinants, sent, polls] = word;
        if number != scheduler.number {
            bail!("it speaks of checkpoint {number}, and {} was wanted", scheduler.number);
        }
        let replay = rank.replay.as_ref().context("it does not come back")?;
        let (asked, stage, printed) = replay.position();
        let unread = quiesce_socket.inodes.stdin.map_or(0, |pipe| input::unread(rank.pid, pipe));
        let read = rank.input.given().saturating_sub(unread);
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
    fn end_preparing(&mut self, index: usize) -> Result<()> {
        let outcome = self.begin_dump(index);
        if outcome.is_err() {
            self.resume(index)?;
        }
        outcome
    }

    /// Starts CRIU, once the folder of the image is ready.
    fn begin_dump(&mut self, index: usize) -> Result<()> {
        let Some(scheduler) = self.ranks[index].scheduler.as_mut() else { return Ok(()) };
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
    fn seal_checkpoint(&mut self, index: usize) -> Result<()> {
        self.resume(index)?;
        let rank = &mut self.ranks[index];
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

    fn resume(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let incarnation = rank.replay.as_ref().map_or(0, PmiReplay::incarnation);
        let Some(scheduler) = &mut rank.scheduler else { return Ok(()) };
        let (number, kept) = (scheduler.number, scheduler.trim_position());
        if let Some(oldest) = scheduler.oldest() {
            rank.input.trim(oldest.read);
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
