//! Restores a rank whose process has ended from the rank's checkpoint images, while the agent's
//! loop keeps serving everything else.
//!
//! | state | the restore stays in this state until |
//! |---|---|
//! | `AwaitingSeal` | the thread that writes the last image to the disk has ended |
//! | `Finding` | a thread has found the images that another node has taken |
//! | `Unpacking` | a thread has killed older processes and unpacked (or fetched) an image |
//! | `Restoring` | CRIU has restored a process from the image, or was killed at its time limit |
//! | `CleaningUp` | a thread has killed what failed attempts have left |
//!
//! In: the ended incarnation of the rank with its images, ends of processes, the time. Out: a
//! process that is restored from the newest usable image, or the report that no image is usable. A
//! torn image is deleted. If CRIU cannot restore a whole image (no memory at the moment, process id
//! taken), the restore tries that image once more and then the next older image, the oldest one for
//! some seconds; the whole image stays on the disk for a later restore.
//!
//! What may never happen: two attempts run as the same incarnation of the rank, because a process
//! that the first attempt has left may still write to the rank's record; a process of a failed
//! attempt runs at the same time as the rank; the restore waits without bound for an object store
//! or a file system that does not answer.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::checkpoint_scheduler::{CheckpointScheduler, pending_signals};
use super::image_logs::MovedRanks;
use super::rank::LocalRank;
use crate::checkpoint::checkpoint_image::{CheckpointImage, UnpackedImage};
use crate::checkpoint::criu;
use crate::checkpoint::object_store::ObjectStore;
use crate::control::rank_state::CheckpointLocation;
use crate::ending::Ending;
use crate::sys;

/// Attempts to restore from one image, and from the last one that is left: a process id that
/// another process has for a moment is free soon.
const ATTEMPTS_PER_IMAGE: u32 = 2;
const ATTEMPTS_OF_LAST_IMAGE: u32 = 6;
/// Pause before the second attempt with an image; it doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest time that CRIU may take for one restore.
const RESTORE_MAX: Duration = Duration::from_secs(60);
/// The longest time that a whole restore may take: half the time for which a relay waits for a rank
/// that its launcher has started.
const RESTORE_TOTAL_MAX: Duration = Duration::from_secs(300);
/// The longest wait for the end of processes of an earlier incarnation after SIGKILL.
const KILL_WAIT_MAX: Duration = Duration::from_secs(1);
/// Pause between two checks whether a thread has finished.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A restore in progress; the states are in the module head.
pub struct Restore {
    pub cause: RestartCause,
    deadline: Instant,
    /// Images that are not tried yet, newest first.
    remaining: VecDeque<CheckpointImage>,
    /// Process ids of incarnations and of restore attempts of this rank so far.
    pids: Vec<u32>,
    /// The rank comes from another node, with others, and senders keep messages.
    moved: Option<Arc<MovedRanks>>,
    /// The number of the only image that may be used.
    only_image: Option<u64>,
    step: RestoreStep,
}

/// Why another incarnation of a rank begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestartCause {
    /// How the last one has ended, in words for the user.
    Ended(String),
    /// Another rank of its recovery unit has ended.
    OfUnit,
    /// The rank comes from another node, as the launcher reports.
    Moved,
}

impl RestartCause {
    /// What the user reads of a restart: from the image of this number, or from the start of the
    /// program. `None`: another line says it.
    pub fn text(&self, number: u32, node: &str, outcome: &Result<Option<u64>>) -> Option<String> {
        Some(match (outcome, self) {
            (Ok(None), RestartCause::Ended(how)) => format!("rank {number} {how}: restarted"),
            (Ok(Some(image)), RestartCause::Ended(how)) => {
                format!("rank {number} {how}: restarted from checkpoint {image}")
            }
            (Err(error), RestartCause::Ended(how)) => {
                format!("rank {number} {how} and cannot be restarted: {error:#}")
            }
            (Ok(_), RestartCause::OfUnit) | (Ok(None), RestartCause::Moved) => return None,
            (Err(error), RestartCause::OfUnit) => format!(
                "rank {number} is to begin again with the others of its node (recover_unit=node), \
                 and cannot be restarted: {error:#}"
            ),
            (Ok(Some(image)), RestartCause::Moved) => {
                format!("rank {number} is restored from checkpoint {image} on {node}")
            }
            (Err(error), RestartCause::Moved) => {
                format!("rank {number} cannot be started on {node}: {error:#}")
            }
        })
    }

    /// Why another node has to start the rank.
    pub fn cannot_here(&self, number: u32, node: &str, error: &anyhow::Error) -> String {
        match self {
            RestartCause::Ended(how) => {
                format!("rank {number} {how} and cannot be restarted there: {error:#}")
            }
            _ => format!("on node {node}: rank {number} cannot be started: {error:#}"),
        }
    }
}

/// Where the images of a rank are.
pub enum ImageSource {
    /// This image is to be used, and no other one.
    One(Box<CheckpointImage>),
    /// On this node.
    Own,
    /// Images that another node has taken, oldest first.
    Located(Vec<CheckpointLocation>),
    /// The images of all ranks of a lost node, of which some are chosen.
    Chosen(Arc<MovedRanks>),
}

enum RestoreStep {
    /// Decides which image to try next.
    Choosing,
    AwaitingSeal,
    Finding(JoinHandle<Vec<Result<CheckpointImage>>>),
    Unpacking {
        image: Box<CheckpointImage>,
        attempt: u32,
        thread: JoinHandle<Result<UnpackedImage>>,
    },
    Restoring(Box<RunningCriu>),
    CleaningUp(JoinHandle<bool>),
}

/// CRIU is restoring a process.
struct RunningCriu {
    image: CheckpointImage,
    attempt: u32,
    unpacked: UnpackedImage,
    rank: LocalRank,
    criu: u32,
    began: Instant,
    limit: Duration,
    ended: Option<Ending>,
    is_late: bool,
    /// How the restored process has ended, if it has ended before CRIU.
    early: Option<Ending>,
}

/// Result of one [`Restore::advance`].
pub enum RestoreOutcome {
    Busy,
    /// The next incarnation of the rank, the number of its image, and how the restored process has
    /// ended if it has ended already.
    Restored(Box<LocalRank>, u64, Option<Ending>),
    /// No image of the rank is usable.
    NoUsableImage,
}

/// What a restore needs of its agent: `report` sends a text to the user; `unrelated` are the
/// process ids that do not belong to the rank and must not be killed.
pub struct RestoreContext<'a> {
    pub unrelated: &'a [u32],
    pub report: &'a mut dyn FnMut(String),
}

impl Restore {
    /// Begins the restore of `old`.
    pub fn begin(old: &mut LocalRank, cause: RestartCause, images: ImageSource) -> Restore {
        let deadline = Instant::now() + RESTORE_TOTAL_MAX;
        let mut step = RestoreStep::AwaitingSeal;
        if let Some(scheduler) = old.scheduler.as_mut().filter(|scheduler| !scheduler.is_sealing())
        {
            scheduler.end_incarnation();
        }
        let config = old.scheduler.as_ref().map(|scheduler| scheduler.config().clone());
        let (mut moved, mut only_image, mut remaining) = (None, None, VecDeque::new());
        match (images, config) {
            (ImageSource::One(image), _) => {
                only_image = Some(image.header.number);
                remaining.push_back(*image);
                step = RestoreStep::Choosing;
            }
            (ImageSource::Located(locations), Some(config)) if !locations.is_empty() => {
                step = in_thread(move || config.locate(&locations, deadline))
                    .map_or(RestoreStep::Choosing, RestoreStep::Finding);
            }
            (ImageSource::Chosen(ranks), _) => {
                let (rank, theirs) = (old.rank, ranks.clone());
                step = in_thread(move || theirs.image_of(rank, deadline))
                    .map_or(RestoreStep::Choosing, RestoreStep::Finding);
                moved = Some(ranks);
            }
            _ => (),
        }
        // A process that the last incarnation has started may hold a process id that the rank's
        // images need.
        let pids = Vec::from_iter((old.pid > 0).then_some(old.pid));
        Restore { cause, deadline, remaining, pids, moved, only_image, step }
    }

    /// The number of the image of a round that may be used alone.
    pub fn only_image(&self) -> Option<u64> {
        self.only_image
    }

    /// When to call [`Restore::advance`] again if no process ends before.
    pub fn next_time(&self) -> Instant {
        match &self.step {
            RestoreStep::Restoring(it) if it.ended.is_none() && !it.is_late => it.began + it.limit,
            RestoreStep::Restoring(it) if it.ended.is_none() => Instant::now() + KILL_WAIT_MAX,
            _ => Instant::now() + POLL_INTERVAL,
        }
    }

    /// Notes that `pid` has ended; returns whether `pid` is this restore's CRIU or the process that
    /// CRIU has restored.
    pub fn note_exit(&mut self, pid: u32, ending: Ending) -> bool {
        let RestoreStep::Restoring(it) = &mut self.step else { return false };
        let place = match pid {
            _ if pid == it.criu => &mut it.ended,
            _ if pid == it.rank.pid => &mut it.early,
            _ => return false,
        };
        *place = Some(ending);
        true
    }

    /// Process id of CRIU while CRIU runs.
    pub fn criu(&self) -> Option<u32> {
        match &self.step {
            RestoreStep::Restoring(it) if it.ended.is_none() => Some(it.criu),
            _ => None,
        }
    }

    /// Gives the restore up when the job ends: kills CRIU if CRIU runs.
    pub fn stop(self) {
        if let Some(criu) = self.criu() {
            sys::kill(criu, libc::SIGKILL);
        }
    }

    /// Advances the restore as far as is possible without waiting.
    pub fn advance(&mut self, old: &mut LocalRank, context: &mut RestoreContext) -> RestoreOutcome {
        loop {
            let is_late = Instant::now() >= self.deadline;
            match std::mem::replace(&mut self.step, RestoreStep::Choosing) {
                RestoreStep::AwaitingSeal
                    if old.scheduler.as_ref().is_some_and(CheckpointScheduler::is_sealing)
                        && !is_late =>
                {
                    self.step = RestoreStep::AwaitingSeal;
                    return RestoreOutcome::Busy;
                }
                RestoreStep::AwaitingSeal => {
                    old.scheduler.iter_mut().for_each(CheckpointScheduler::end_incarnation);
                    self.remaining
                        .extend(old.scheduler.iter().flat_map(|it| it.images.newest_first()));
                }
                RestoreStep::Finding(thread) if thread.is_finished() || is_late => {
                    self.take_located(old, thread, context);
                }
                RestoreStep::Unpacking { image, attempt, thread }
                    if thread.is_finished() || is_late =>
                {
                    self.begin_criu(old, (*image, attempt), thread, context);
                }
                RestoreStep::Restoring(it) if it.ended.is_some() => {
                    if let Some(restored) = self.finish_criu(old, *it, context) {
                        return restored;
                    }
                }
                RestoreStep::CleaningUp(thread) if thread.is_finished() => {
                    return RestoreOutcome::NoUsableImage;
                }
                RestoreStep::Choosing => match self.remaining.pop_front() {
                    Some(image) if !is_late => self.unpack(old, image, 1, None, context),
                    // If the clean-up thread cannot be started, the next round tries again.
                    _ => {
                        self.step = self
                            .clean_up(context)
                            .map_or(RestoreStep::Choosing, RestoreStep::CleaningUp)
                    }
                },
                mut other => {
                    if let RestoreStep::Restoring(it) = &mut other {
                        it.end_late();
                    }
                    self.step = other;
                    return RestoreOutcome::Busy;
                }
            }
        }
    }

    fn take_located(
        &mut self,
        old: &mut LocalRank,
        thread: JoinHandle<Vec<Result<CheckpointImage>>>,
        context: &mut RestoreContext,
    ) {
        let found = if thread.is_finished() { thread.join().ok() } else { None };
        let late = || vec![Err(anyhow::anyhow!("they were not found in time"))];
        for outcome in found.unwrap_or_else(late) {
            match outcome {
                Ok(image) => {
                    old.scheduler.iter_mut().for_each(|scheduler| scheduler.add(image.clone()))
                }
                Err(error) => {
                    let rank = old.rank;
                    (context.report)(format!(
                        "a checkpoint of rank {rank} that the lost node has taken cannot be read \
                         here: {error:#}"
                    ));
                }
            }
        }
        self.remaining.extend(old.scheduler.iter().flat_map(|it| it.images.newest_first()));
        old.scheduler.iter_mut().for_each(|it| it.images.note_moved(old.rank));
        if let (Some(moved), Some(node_logs)) = (&self.moved, &old.shared.node_logs) {
            node_logs.note_moved(moved);
            if moved.had_images(old.rank) {
                old.scheduler.iter_mut().for_each(|it| it.images.note_trimmed());
            }
        }
    }

    /// Starts a thread that kills older processes of the rank and unpacks this image.
    fn unpack(
        &mut self,
        old: &LocalRank,
        image: CheckpointImage,
        attempt: u32,
        unpacked: Option<UnpackedImage>,
        context: &mut RestoreContext,
    ) {
        if !self.pids.contains(&image.header.pid) {
            self.pids.push(image.header.pid);
        }
        let (pids, unrelated, deadline) =
            (self.pids.clone(), context.unrelated.to_vec(), self.deadline);
        let object_store = old
            .scheduler
            .as_ref()
            .and_then(|it| it.config().object_store.as_ref())
            .map(ObjectStore::fresh);
        let theirs = image.clone();
        let pause = match attempt {
            1 => Duration::ZERO,
            later => FIRST_PAUSE * (1 << (later - 2)),
        };
        let thread = in_thread(move || {
            pids.iter().for_each(|&pid| _ = sys::end_session(pid, &unrelated, KILL_WAIT_MAX));
            std::thread::sleep(pause);
            match unpacked {
                Some(unpacked) => Ok(unpacked),
                None => theirs
                    .unpack()
                    .or_else(|error| unpack_from_store(&theirs, object_store, deadline, error)),
            }
        });
        if let Some(thread) = thread {
            self.step = RestoreStep::Unpacking { image: Box::new(image), attempt, thread };
        }
    }

    /// Starts a thread that kills the processes that failed attempts have left.
    fn clean_up(&self, context: &mut RestoreContext) -> Option<JoinHandle<bool>> {
        let (pids, unrelated) = (self.pids.clone(), context.unrelated.to_vec());
        in_thread(move || pids.iter().all(|&pid| sys::end_session(pid, &unrelated, KILL_WAIT_MAX)))
    }

    /// Starts CRIU on the unpacked image.
    fn begin_criu(
        &mut self,
        old: &mut LocalRank,
        (image, attempt): (CheckpointImage, u32),
        thread: JoinHandle<Result<UnpackedImage>>,
        context: &mut RestoreContext,
    ) {
        let unpacked = match thread.is_finished() {
            true => thread.join().unwrap_or_else(|_| bail!("it could not be unpacked")),
            false => Err(anyhow::anyhow!(
                "it could not be read within {} s",
                RESTORE_TOTAL_MAX.as_secs()
            )),
        };
        let number = image.header.number;
        let unpacked = match unpacked {
            Ok(unpacked) => unpacked,
            Err(error) => {
                // An image that comes too late, or that a transient error has hidden, may be whole
                // and stays.
                if Instant::now() < self.deadline && !is_transient(&error) {
                    old.scheduler
                        .iter_mut()
                        .for_each(|scheduler| scheduler.images.drop_image(number));
                }
                return (context.report)(format!(
                    "{} cannot be used: {error:#}",
                    name(old, number)
                ));
            }
        };
        let began = Instant::now();
        let limit = RESTORE_MAX.min(self.deadline.saturating_duration_since(began));
        match old.begin_restore(&image, &unpacked) {
            Ok((rank, criu)) => {
                let (ended, is_late, early) = (None, false, None);
                let running = RunningCriu {
                    image,
                    attempt,
                    unpacked,
                    rank,
                    criu,
                    began,
                    limit,
                    ended,
                    is_late,
                    early,
                };
                self.step = RestoreStep::Restoring(Box::new(running));
            }
            Err(error) => self.fail(old, image, attempt, unpacked, (error, false), context),
        }
    }

    /// Evaluates how CRIU has ended.
    fn finish_criu(
        &mut self,
        old: &mut LocalRank,
        it: RunningCriu,
        context: &mut RestoreContext,
    ) -> Option<RestoreOutcome> {
        let RunningCriu { image, attempt, unpacked, rank, limit, ended, is_late, early, .. } = it;
        if ended == Some(Ending::Exited(0)) {
            let number = image.header.number;
            pending_signals::continue_stopped(rank.pid);
            let rank = rank.take_over(old, &image.header.replay_position);
            return Some(RestoreOutcome::Restored(Box::new(rank), number, early));
        }
        let error = match is_late {
            true => anyhow::anyhow!("CRIU had not finished it after {:.1} s", limit.as_secs_f64()),
            false => criu::restore_error(&unpacked.folder),
        };
        self.fail(old, image, attempt, unpacked, (error, is_late), context);
        None
    }

    /// Handles a failed attempt to restore from an image: the same image is tried again, unless
    /// CRIU has reached its time limit, which another attempt would reach again.
    fn fail(
        &mut self,
        old: &mut LocalRank,
        image: CheckpointImage,
        attempt: u32,
        unpacked: UnpackedImage,
        (error, is_late): (anyhow::Error, bool),
        context: &mut RestoreContext,
    ) {
        old.replay.iter_mut().for_each(|replay| replay.next_incarnation());
        old.recording.iter().for_each(|recording| _ = recording.end_incarnation());
        let name = name(old, image.header.number);
        // An image of a round is not the last one: the agent chooses an older round.
        let attempts = match self.remaining.is_empty() && self.only_image.is_none() {
            true => ATTEMPTS_OF_LAST_IMAGE,
            false => ATTEMPTS_PER_IMAGE,
        };
        if attempt < attempts && !is_late {
            (context.report)(format!("{name} is tried once more: {error:#}"));
            return self.unpack(old, image, attempt + 1, Some(unpacked), context);
        }
        (context.report)(format!("{name} cannot be used: {error:#}"));
    }
}

impl RunningCriu {
    fn end_late(&mut self) {
        if !self.is_late && self.began.elapsed() >= self.limit {
            self.is_late = true;
            sys::kill(self.criu, libc::SIGKILL);
        }
    }
}

fn name(rank: &LocalRank, number: u64) -> String {
    format!("checkpoint {number} of rank {}", rank.rank)
}

fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<JoinHandle<T>> {
    std::thread::Builder::new().name("restore".into()).spawn(work).ok()
}

/// Whether the image may be whole in spite of this error: the disk was full, or the object store
/// did not answer.
fn is_transient(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
    error.chain().any(|cause| match cause.downcast_ref::<io::Error>() {
        Some(cause) => !matches!(cause.kind(), InvalidData | NotFound | UnexpectedEof),
        None => cause.is::<ureq::Error>(),
    })
}

/// Unpacks the object store's copy of an image that this node has lost or holds with a checksum
/// mismatch.
fn unpack_from_store(
    image: &CheckpointImage,
    object_store: Option<ObjectStore>,
    deadline: Instant,
    error: anyhow::Error,
) -> Result<UnpackedImage> {
    let Some(object_store) = object_store else { return Err(error) };
    let outcome = object_store.get(image, deadline).and_then(|()| image.unpack());
    outcome.with_context(|| format!("{error:#}, and the store does not help"))
}

#[cfg(test)]
mod tests;
