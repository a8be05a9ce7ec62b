//! The checkpoint images of one rank: when the scheduler takes an image, and from which image the
//! rank is restored after its process was killed.
//!
//! | state | the scheduler stays in this state until |
//! |---|---|
//! | `Idle` | an image is due; then a word in the rank's record asks the rank to quiesce |
//! | `Requested` | the rank has quiesced and reports its position; a delay is reported once |
//! | `Preparing` | a thread has made the folder of the image |
//! | `Dumping` | CRIU has ended or was killed at its time limit; then the rank resumes |
//! | `Sealing` | a thread has written the whole image to the disk |
//! | `Uploading` | a thread has put the image into the object store, if there is one |
//! | `Disconnected` | the process ends: it has closed its end of the quiesce socket |
//!
//! In: the time, the rank's reports, the ends of processes. Out: images, of which the scheduler
//! keeps the newest ([`KeptImages`]). A killed rank is restored from the newest whole image. No
//! image is taken of a rank that replays, that must not be restarted, or that has a living child
//! whose system calls are dispatched.
//!
//! Where other nodes may take over the rank, an image is *usable* only once these nodes can get the
//! image: from the object store, or from a folder that all of them see. Until then the log that
//! leads to the image stays.
//!
//! What may never happen: a rank stands still for longer than its image takes; an image is usable
//! before the image is sealed, or while only this node has the image and this node may be lost; the
//! agent waits for the disk on which images lie (`disk_tasks`).
//!
//! | module | does |
//! |---|---|
//! | `quiesce_socket` | the agent's end of a rank's socket |
//! | `unrestorable` | what CRIU restores as something else |
//! | `pending_signals` | signals that an image may hold |
//! | `disk_tasks` | work in the folder of images, by threads |
//! | `kept_images` | the images that exist, and where others see them |
//! | `scheduler_step` | the steps of an image in progress |

mod disk_tasks;
mod kept_images;
pub mod pending_signals;
mod quiesce_socket;
mod scheduler_step;
mod unrestorable;

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use landbridge_proto::nondeterminism::NONDETERMINISM_BYTES;

use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::{CheckpointImage, ImageHeader};
use crate::checkpoint::object_store::ObjectStore;
use crate::ending::Ending;
use crate::sys;
use disk_tasks::{ImageFolder, SealedImage};
use kept_images::KeptImages;
pub use quiesce_socket::{QuiesceReply, QuiesceSocket};
pub use scheduler_step::SchedulerStep;
pub use unrestorable::unrestorable;

/// Pause between two checks whether the folder of an image is ready, while the rank stands still.
const FOLDER_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Pause between two checks whether an image is taken, sealed or uploaded.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Pause between two checks whether a rank has begun to poll for messages.
const FIRST_POLL_RETRY: Duration = Duration::from_millis(100);
/// The longest wait for the last image of a rank whose process has ended.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(2);
/// The longest time that CRIU may take for an image, during which the rank stands still; then CRIU
/// is killed.
const DUMP_MAX: Duration = Duration::from_secs(60);
/// Pause between two checks whether the child that prevents an image has ended.
const CHILD_RETRY: Duration = Duration::from_millis(500);
/// Time after which the user reads that a rank has not come to a point where it can quiesce.
const QUIESCE_WARN_AFTER: Duration = Duration::from_secs(60);
/// A rank that has closed its end of the quiesce socket has usually ended, and the agent sees the
/// end within this time.
const EXIT_SEEN_WITHIN: Duration = Duration::from_secs(1);
/// Failures in a row after which the scheduler takes no more images.
const FAILURES_MAX: u32 = 3;
/// Bytes of clocks and random numbers that a rank may read before its next image is due, whatever
/// the time: the record is trimmed at the older of two images, and must hold what the rank reads
/// until the image after these two is whole.
const READ_BYTES_MAX: u64 = NONDETERMINISM_BYTES as u64 / 8;
/// Pause between two checks how many bytes a rank has read.
const READ_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// The longest check whether the nodes that may take over ranks have announced in the object store
/// that they reach it.
const REACHABILITY_WAIT_MAX: Duration = Duration::from_secs(2);

/// A thread that puts an image into the object store; its result is the nodes that may need the
/// image and cannot get the image from there.
type UploadThread = JoinHandle<Result<Vec<u32>>>;

/// The checkpoint scheduler of one rank; the states are in the module head.
///
/// Most of the methods are one step of one state each, and all of them change the state: a type for
/// each group of states would have to hand over the images, the counts and what is due.
pub struct CheckpointScheduler {
    config: CheckpointConfig,
    /// Folder of this rank's images.
    folder: PathBuf,
    due: Instant,
    /// When to check next how many bytes the rank has read.
    next_read_check: Instant,
    /// Number of the newest image that was requested or taken over from another node; 0: none.
    number: u64,
    state: CheckpointState,
    pub images: KeptImages,
    /// Bytes that the image in progress is expected to take.
    expected: u64,
    failures: u32,
    notices: UserNotifications,
    /// Another image is to follow as soon as the present one is done.
    is_wanted: bool,
    /// The process id of a child of the rank that has prevented the last image.
    child: Option<u32>,
}

/// What was reported to the user, and what the user waits for.
#[derive(Default)]
struct UserNotifications {
    /// The user was notified that the rank takes long to quiesce.
    is_slow_reported: bool,
    /// The number of the newest image that was reported to the launcher; 0: none.
    reported: u64,
    /// The user was notified that the disk has no space for the rank's images.
    is_full_reported: bool,
    /// The user has requested an image and is to be notified of the next one.
    is_user_waiting: bool,
    /// The user was notified that a child of the rank prevents images.
    is_child_reported: bool,
    /// The user was notified that something that the rank has open prevents images.
    is_unrestorable_reported: bool,
}

/// Source of a request for an image before the next image is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointRequester {
    User,
    /// What keeps the message log of the rank.
    FullLog,
}

enum CheckpointState {
    Idle,
    Requested { since: Instant },
    Preparing { thread: JoinHandle<Result<ImageFolder>>, header: ImageHeader, began: Instant },
    Dumping(Dump),
    Sealing { thread: JoinHandle<Result<SealedImage>> },
    Uploading { thread: UploadThread, object_store: ObjectStore, number: u64 },
    Disconnected { since: Instant, is_reported: bool },
}

struct Dump {
    criu: u32,
    ended: Option<Ending>,
    /// CRIU was killed because it has reached its time limit.
    is_late: bool,
    folder: PathBuf,
    header: ImageHeader,
    began: Instant,
}

impl CheckpointScheduler {
    /// Makes the scheduler of `rank`. `turn`: index of this rank among the restartable ranks of
    /// this node, and the number of these ranks; their first images are spread evenly over the
    /// second half of the first interval. `moves`: how many nodes the rank has lost. The number is
    /// part of the folder name, because a node that only seems to be lost must not share the
    /// folder.
    pub fn new(
        config: CheckpointConfig,
        rank: u32,
        moves: u32,
        turn: (u32, u32),
    ) -> CheckpointScheduler {
        let name = match moves {
            0 => format!("rank-{rank}"),
            _ => format!("rank-{rank}.{moves}"),
        };
        let folder = config.job_folder.join(name);
        let half = config.every / 2;
        let due = Instant::now() + half + half.mul_f64(f64::from(turn.0 + 1) / f64::from(turn.1));
        let mut images = KeptImages::new(config.object_store.clone());
        images.whole_round = config.in_rounds.then_some(0);
        CheckpointScheduler {
            config,
            folder,
            due,
            next_read_check: Instant::now() + READ_CHECK_INTERVAL,
            number: 0,
            state: CheckpointState::Idle,
            images,
            expected: 0,
            failures: 0,
            is_wanted: false,
            child: None,
            notices: UserNotifications::default(),
        }
    }

    /// Requests an image before the next one is due. A requested image for which the rank has not
    /// resumed yet serves this request as well.
    pub fn request(&mut self, asker: CheckpointRequester, now: Instant) {
        self.notices.is_user_waiting |= asker == CheckpointRequester::User;
        if asker == CheckpointRequester::FullLog && self.failures > 0 {
            // A log that goes on growing asks again and again: the next image comes in its turn.
            return;
        }
        // The user may know better why images have failed, so the next image is tried.
        self.failures = self.failures.min(FAILURES_MAX - 1);
        match self.state {
            CheckpointState::Idle => self.due = now,
            CheckpointState::Sealing { .. } | CheckpointState::Uploading { .. } => {
                self.is_wanted = true
            }
            CheckpointState::Requested { .. }
            | CheckpointState::Preparing { .. }
            | CheckpointState::Dumping(_)
            | CheckpointState::Disconnected { .. } => (),
        }
    }

    /// Sets when the next image is due, after an image is done or has failed.
    fn schedule_next(&mut self) {
        let wait =
            if std::mem::take(&mut self.is_wanted) { Duration::ZERO } else { self.config.every };
        self.due = Instant::now() + wait;
    }

    /// Bytes that the rank's images take, including an image in progress and images that are being
    /// deleted.
    pub fn bytes(&self) -> u64 {
        let being_taken = if self.is_busy() { self.expected } else { 0 };
        self.images.bytes() + being_taken
    }

    /// Adds a usable image that another node has taken and that is newer than all known images.
    pub fn add(&mut self, image: CheckpointImage) {
        self.number = self.number.max(image.header.number);
        self.images.add(image, Vec::new());
    }

    pub fn config(&self) -> &CheckpointConfig {
        &self.config
    }

    /// Number of the newest image that was requested or taken over from another node; 0: none.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether the rank is asked to quiesce.
    pub fn is_requested(&self) -> bool {
        matches!(self.state, CheckpointState::Requested { .. })
    }

    /// Whether a thread is writing an image to the disk.
    pub fn is_sealing(&self) -> bool {
        matches!(&self.state, CheckpointState::Sealing { thread } if !thread.is_finished())
    }

    /// Whether an image is being taken or written.
    fn is_busy(&self) -> bool {
        matches!(
            self.state,
            CheckpointState::Preparing { .. }
                | CheckpointState::Dumping(_)
                | CheckpointState::Sealing { .. }
        )
    }

    /// Whether the rank stands still for an image, or is to.
    pub fn is_stopping(&self) -> bool {
        matches!(
            self.state,
            CheckpointState::Requested { .. }
                | CheckpointState::Preparing { .. }
                | CheckpointState::Dumping(_)
        )
    }

    /// Whether an image of the rank is being taken, or the rank was asked to stop for it at most
    /// this long ago.
    pub fn takes_processor(&self, patience: Duration, now: Instant) -> bool {
        match self.state {
            CheckpointState::Requested { since } => now < since + patience,
            _ => self.is_stopping(),
        }
    }

    /// Whether nothing is being done about an image.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, CheckpointState::Idle) && self.failures < FAILURES_MAX
    }

    /// Lets the image that is due wait.
    pub fn postpone(&mut self) {
        self.due = Instant::now() + CHILD_RETRY;
    }

    /// Number of the newest image that was reported to the launcher, if no image is being taken or
    /// written; otherwise 0.
    pub fn whole_image(&self) -> u64 {
        if self.is_busy() { 0 } else { self.notices.reported }
    }

    /// Process id of CRIU while CRIU takes an image.
    pub fn criu(&self) -> Option<u32> {
        match &self.state {
            CheckpointState::Dumping(it) if it.ended.is_none() => Some(it.criu),
            _ => None,
        }
    }

    /// Handles the end of the rank's process. An image that is being sealed is kept if it is sealed
    /// within [`SEAL_WAIT_MAX`]; another image in progress is given up.
    pub fn end_incarnation(&mut self) {
        match std::mem::replace(&mut self.state, CheckpointState::Idle) {
            // If sealing has failed, the rank is restored from the image before.
            CheckpointState::Sealing { thread } if is_done_within(&thread, SEAL_WAIT_MAX) => {
                drop(self.finish(thread));
            }
            // The disk does not answer in time. No list names this image: a thread deletes the
            // image once it is written.
            CheckpointState::Sealing { thread } => {
                self.images.removals.add(self.expected, move || {
                    if let Ok(Ok(sealed)) = thread.join() {
                        sealed.image.remove();
                    }
                })
            }
            CheckpointState::Preparing { thread, .. } => {
                self.images.removals.add(self.expected, move || {
                    if let Ok(Ok(image_folder)) = thread.join() {
                        image_folder.remove();
                    }
                })
            }
            CheckpointState::Dumping(Dump { criu, folder, ended, .. }) => {
                if ended.is_none() {
                    sys::kill(criu, libc::SIGKILL);
                }
                self.images
                    .removals
                    .add(self.expected, move || drop(std::fs::remove_dir_all(folder)));
            }
            // The whole image is on this node.
            CheckpointState::Uploading { thread, object_store, .. } => {
                object_store.stop();
                self.images.stopped_upload = Some(thread);
            }
            CheckpointState::Idle
            | CheckpointState::Requested { .. }
            | CheckpointState::Disconnected { .. } => (),
        }
        self.due = Instant::now() + self.config.every;
    }

    /// Ends work in progress; all images stay where they are.
    pub fn leave_images(&mut self) -> Option<JoinHandle<bool>> {
        self.end_incarnation();
        self.end_incarnation();
        None
    }

    /// Deletes all images, in the object store as well, because the rank will not be restored any
    /// more. The caller may stop waiting for the returned thread after a while; it says whether
    /// nothing is left.
    pub fn remove_all(&mut self) -> Option<JoinHandle<bool>> {
        self.end_incarnation();
        // An image that the first call has sealed may be on its way to the object store.
        self.end_incarnation();
        self.images.remove_all(self.folder.clone(), self.config.job_folder_path())
    }

    /// Starts to put the newest image into the object store, if there is one.
    fn upload(&mut self) -> Result<()> {
        let (Some(object_store), Some(image)) =
            (&self.config.object_store, self.images.newest().cloned())
        else {
            return Ok(());
        };
        let (object_store, number) = (object_store.fresh(), image.header.number);
        let uploader = object_store.clone();
        let (job, spares) = (self.config.job.clone(), self.config.spares.clone());
        let put = move || {
            uploader.put(&image)?;
            Ok(uploader.unannounced_spares(&job, &spares, Instant::now() + REACHABILITY_WAIT_MAX))
        };
        let thread = std::thread::Builder::new().name("send".into()).spawn(put)?;
        self.state = CheckpointState::Uploading { thread, object_store, number };
        Ok(())
    }

    /// Takes the result of an ended upload, with the number of the image. The image is usable if
    /// all nodes that may need the image can get it; the other nodes are returned.
    fn finish_upload(&mut self) -> Option<(u64, Result<Vec<u32>>)> {
        let CheckpointState::Uploading { thread, number, .. } =
            std::mem::replace(&mut self.state, CheckpointState::Idle)
        else {
            return None;
        };
        let uploaded = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let Ok(unreachable) = &uploaded
            && self.images.set_unavailable(number, unreachable)
        {
            self.images.recount_usable(&self.config.spares);
        }
        Some((number, uploaded))
    }

    /// Sets the nodes that may take over the rank from now on. Earlier ones may be lost, or have
    /// taken over other ranks.
    pub fn set_spares(&mut self, spares: &[u32]) {
        self.config.spares = spares.to_vec();
        self.images.recount_usable(spares);
    }

    /// Takes over a sealed image. Returns the nodes that may need the image and cannot read its
    /// folder; none if the image goes to the object store.
    fn finish(&mut self, thread: JoinHandle<Result<SealedImage>>) -> Result<Vec<u32>> {
        self.schedule_next();
        // A panic of the thread is a bug of the launcher, and no reason to end the job.
        let sealed = thread.join().unwrap_or_else(|_| bail!("it could not be written"));
        let SealedImage { image, mut unreachable } = sealed?;
        unreachable.retain(|spare| self.config.spares.contains(spare));
        // No other node has the image before the upload has ended.
        let is_to_be_sent = self.config.object_store.is_some();
        let unavailable_to =
            if is_to_be_sent { self.config.spares.clone() } else { unreachable.clone() };
        self.images.add(image, unavailable_to);
        self.failures = 0;
        self.notices.is_unrestorable_reported = false;
        self.images.drop_surplus();
        self.upload()?;
        Ok(if is_to_be_sent { Vec::new() } else { unreachable })
    }

    /// Whether an image is due: the interval is over, or the rank has `read` more than
    /// [`READ_BYTES_MAX`] of clocks and random numbers since the newest image.
    pub fn is_due(&mut self, read: impl FnOnce() -> u64, now: Instant) -> bool {
        if self.failures >= FAILURES_MAX {
            return false;
        }
        if now >= self.next_read_check {
            self.next_read_check = now + READ_CHECK_INTERVAL;
            let newest = self
                .images
                .newest()
                .map_or(0, |image| image.header.replay_position.recording_bytes);
            if read().saturating_sub(newest) > READ_BYTES_MAX {
                self.due = self.due.min(now);
            }
        }
        now >= self.due
    }

    /// Notes that a living child of the rank prevents the image that is due; the next try follows
    /// when the child has ended. Returns what the user is to read: once, and for each image that
    /// the user has requested.
    ///
    /// CRIU makes system calls in each process of an image. In a child of a rank whose files are
    /// recorded these calls are dispatched, and that ends the child. A restored child would not be
    /// observed any more.
    pub fn wait_for_child(&mut self, child: u32) -> Option<String> {
        (self.child, self.state) = (Some(child), CheckpointState::Idle);
        self.due = Instant::now() + CHILD_RETRY;
        let is_reported = std::mem::replace(&mut self.notices.is_child_reported, true);
        (std::mem::take(&mut self.notices.is_user_waiting) || !is_reported).then(|| {
            format!("has no checkpoint while a program that it has started runs (process {child})")
        })
    }

    /// Notes that the rank has something open that no image restores. Returns what the user is to
    /// read: once, and for each image that the user has requested.
    pub fn wait_for_close(&mut self, what: &str) -> Option<String> {
        self.state = CheckpointState::Idle;
        self.schedule_next();
        let is_reported = std::mem::replace(&mut self.notices.is_unrestorable_reported, true);
        (std::mem::take(&mut self.notices.is_user_waiting) || !is_reported)
            .then(|| format!("has no checkpoint while it {what}"))
    }

    /// Notes that the rank must not be restarted for this reason, so that an image would be of no
    /// use. Returns what a user who has requested an image is to read.
    pub fn skip_useless(&mut self, why: &str) -> Option<String> {
        self.schedule_next();
        std::mem::take(&mut self.notices.is_user_waiting)
            .then(|| format!("has no checkpoint: it cannot be restarted: {why}"))
    }

    /// When the scheduler has to act without an event on a descriptor. An idle scheduler does
    /// nothing while the rank replays.
    pub fn next_time(&self, is_replaying: bool) -> Option<Instant> {
        match &self.state {
            CheckpointState::Idle if is_replaying => None,
            CheckpointState::Idle => {
                (self.failures < FAILURES_MAX).then(|| self.due.min(self.next_read_check))
            }
            CheckpointState::Requested { since } => {
                (!self.notices.is_slow_reported).then(|| *since + QUIESCE_WARN_AFTER)
            }
            CheckpointState::Preparing { .. } => Some(Instant::now() + FOLDER_POLL_INTERVAL),
            CheckpointState::Dumping(it) => (!it.is_late).then(|| Instant::now() + POLL_INTERVAL),
            CheckpointState::Sealing { .. } | CheckpointState::Uploading { .. } => {
                Some(Instant::now() + POLL_INTERVAL)
            }
            CheckpointState::Disconnected { since, is_reported } => {
                (!is_reported).then(|| *since + EXIT_SEEN_WITHIN)
            }
        }
    }

    /// What the user is to read of a rank that does not answer; each text is returned once.
    pub fn overdue_notice(&mut self, now: Instant) -> Option<String> {
        match &mut self.state {
            CheckpointState::Requested { since }
                if !self.notices.is_slow_reported && now >= *since + QUIESCE_WARN_AFTER =>
            {
                self.notices.is_slow_reported = true;
                Some(format!(
                    "has been asked for checkpoint {} {} s ago and has not stopped for it, which \
                     it does when its main thread calls MPI and MPI looks for messages; the \
                     launcher waits",
                    self.number,
                    QUIESCE_WARN_AFTER.as_secs()
                ))
            }
            CheckpointState::Disconnected { since, is_reported }
                if !*is_reported && now >= *since + EXIT_SEEN_WITHIN =>
            {
                *is_reported = true;
                Some(
                    "has no checkpoint: it has closed the descriptor on which it is asked; no \
                      more are tried"
                        .into(),
                )
            }
            _ => None,
        }
    }

    /// Number and bytes of the newest image, if the launcher does not know of it; number 0: there
    /// is no image any more.
    pub fn unreported_image(&mut self) -> Option<(u64, u64)> {
        let newest = self.images.newest();
        let number = newest.map_or(0, |image| image.header.number);
        let is_new = std::mem::replace(&mut self.notices.reported, number) != number;
        is_new.then(|| (number, newest.map_or(0, CheckpointImage::bytes)))
    }

    /// Notes that CRIU has ended; returns whether `pid` is this scheduler's CRIU.
    pub fn note_exit(&mut self, pid: u32, ending: Ending) -> bool {
        match &mut self.state {
            CheckpointState::Dumping(it) if it.criu == pid => {
                it.ended = Some(ending);
                true
            }
            _ => false,
        }
    }
}

/// Waits for the end of a thread for this time at most; returns whether the thread has ended.
fn is_done_within<T>(thread: &JoinHandle<T>, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL / 4);
    }
    thread.is_finished()
}

#[cfg(test)]
mod tests;
