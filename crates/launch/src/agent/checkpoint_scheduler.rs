//! The images of one rank (checkpoints): when one is taken, and which one the rank goes on from when it was killed.
//!
//! | it | until |
//! |---|---|
//! | rests | it is time for another image; then the rank is asked for it, by a word in its record of clocks |
//! | asks | the rank says where it stands, and does nothing from then on; once it is told that this takes long |
//! | prepares | a thread has made the folder for it |
//! | takes | CRIU is done, or was ended because it was not; then the rank is told to go on |
//! | seals | a thread has written all of it to the disk |
//! | sends | another one has put it into the object store, if there is one; it counts already |
//! | is cut off | the process ends: it has closed its end of the line, so nothing can be asked of it |
//!
//! In: the time, the rank's word, the ends of processes. Out: images, the newest [`KEPT_IMAGES`] of them. A rank that is killed goes
//! on from the newest that is whole. Of one that repeats what was before none is taken.
//!
//! Where other nodes may take over the rank, an image *counts* only once it is where they find it: in the store, or in a folder that
//! all of them see. Until then nothing that led there is dropped.
//!
//! What may never happen: a rank waits for longer than its image takes; an image counts before it is sealed, or while nobody has it
//! but this node, if that can be lost; the agent waits for the disk on which images lie (`disk_tasks`).

mod checkpoint_actions;
mod disk_tasks;
mod quiesce_socket;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use landbridge_proto::nondeterminism::NONDETERMINISM_BYTES;

use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::{CheckpointImage, ImageHeader, ReplayPosition};
use crate::checkpoint::object_store::ObjectStore;
use crate::control::Ending;
use crate::control::rank_state::CheckpointLocation;
use crate::sys;
use disk_tasks::{BackgroundRemovals, ImageFolder, SealedImage};
pub use quiesce_socket::QuiesceSocket;

/// Images of a rank that are kept: if the newest is torn there is another.
const KEPT_IMAGES: usize = 2;
/// Between two glances at a folder that is being made, while the rank stands still.
const FOLDER_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Between two glances at one that is being taken or sealed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Between two looks whether a rank has begun to look for messages.
const FIRST_POLL_RETRY: Duration = Duration::from_millis(100);
/// One that has ended waits so long for its last image.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(2);
/// For so long CRIU may take an image, during which the rank stands still; then it is ended.
const DUMP_MAX: Duration = Duration::from_secs(60);
/// After so long it is told that a rank has not come to a place where its image can be taken.
const QUIESCE_WARN_AFTER: Duration = Duration::from_secs(60);
/// A rank that has closed its end of the line has as a rule ended, which is seen within this time.
const EXIT_SEEN_WITHIN: Duration = Duration::from_secs(1);
/// Failures in a row after which no more images are taken.
const FAILURES_MAX: u32 = 3;
/// Bytes that a rank may read of clocks and chance before its next image is due, whatever the time: the record is cut at the older of two
/// images, and must hold what comes until the one after them is whole.
const READ_BYTES_MAX: u64 = NONDETERMINISM_BYTES as u64 / 8;
/// Between two looks at how much that is.
const READ_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// So long it is looked whether the nodes that may take over ranks have said in the store that they reach it.
const REACHABILITY_WAIT_MAX: Duration = Duration::from_secs(2);

/// A thread that puts an image into the store; which nodes that may need it there cannot get it.
type UploadThread = JoinHandle<Result<Vec<u32>>>;

/// See the module head.
pub struct CheckpointScheduler {
    config: CheckpointConfig,
    /// Of this rank.
    folder: PathBuf,
    due: Instant,
    /// When it is looked how much the rank has read of clocks.
    next_read_check: Instant,
    /// Images that were asked for.
    number: u64,
    state: CheckpointState,
    /// Whole ones, oldest first.
    images: VecDeque<CheckpointImage>,
    /// The numbers of those that do not count yet, and which nodes cannot get them that may need them.
    unavailable_to: BTreeMap<u64, Vec<u32>>,
    /// Of those that do, what the agent above has been told.
    reported_locations: Vec<CheckpointLocation>,
    /// It was putting an image into the store, and is to end.
    stopped_upload: Option<UploadThread>,
    /// Bytes that the image that is being taken may take.
    expected: u64,
    /// What goes.
    removals: BackgroundRemovals,
    failures: u32,
    /// Before so many determinants nothing is kept of the rank any more.
    trimmed_to: u64,
    /// It was told that the rank takes long to answer,
    is_slow_reported: bool,
    /// The number of the newest image of which the launcher knows; 0: none.
    reported: u64,
    /// and that there is no room for its images.
    is_full_reported: bool,
    /// The user wants to hear of the next image.
    is_user_waiting: bool,
    /// One more is wanted as soon as this is done.
    is_wanted: bool,
}

/// Who wants an image before it is time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointRequester {
    User,
    Relay,
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
    /// It was ended for that.
    is_late: bool,
    folder: PathBuf,
    header: ImageHeader,
    began: Instant,
}

impl CheckpointScheduler {
    /// `turn`: of so many ranks of this node it is the one of this number. Their images come one after the other, from half of
    /// the first interval on. `moves`: how many nodes the rank has lost; some that is not lost after all must not have the same
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
        let (images, failures) = (VecDeque::new(), 0);
        let state = CheckpointState::Idle;
        CheckpointScheduler {
            config,
            folder,
            due,
            next_read_check: Instant::now() + READ_CHECK_INTERVAL,
            number: 0,
            state,
            images,
            unavailable_to: BTreeMap::new(),
            reported_locations: Vec::new(),
            stopped_upload: None,
            expected: 0,
            removals: BackgroundRemovals::default(),
            failures,
            trimmed_to: 0,
            is_slow_reported: false,
            is_full_reported: false,
            is_user_waiting: false,
            is_wanted: false,
            reported: 0,
        }
    }

    /// An image is wanted before it is time. One that the rank has not stopped for yet is as good.
    fn request(&mut self, asker: CheckpointRequester, now: Instant) {
        self.is_user_waiting |= asker == CheckpointRequester::User;
        // The user may know better why it has failed.
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

    /// When the next one is due, as one is done or cannot be had.
    fn schedule_next(&mut self) {
        let wait =
            if std::mem::take(&mut self.is_wanted) { Duration::ZERO } else { self.config.every };
        self.due = Instant::now() + wait;
    }

    /// Bytes that its images take, with one that is being taken and those that are not gone yet.
    fn bytes(&self) -> u64 {
        let sealed: u64 = self.images.iter().map(CheckpointImage::bytes).sum();
        let being_taken = if self.is_busy() { self.expected } else { 0 };
        sealed + being_taken + self.removals.bytes()
    }

    pub fn newest_first(&self) -> Vec<CheckpointImage> {
        self.images.iter().rev().cloned().collect()
    }

    /// Another node has taken this image, and it counts: the newest of those that are known.
    pub fn add(&mut self, image: CheckpointImage) {
        self.number = self.number.max(image.header.number);
        self.images.push_back(image);
    }

    pub fn config(&self) -> &CheckpointConfig {
        &self.config
    }

    /// Whether an image is being written that will count.
    pub fn is_sealing(&self) -> bool {
        matches!(&self.state, CheckpointState::Sealing { thread } if !thread.is_finished())
    }

    /// Whether an image is being taken, or written.
    fn is_busy(&self) -> bool {
        matches!(
            self.state,
            CheckpointState::Preparing { .. }
                | CheckpointState::Dumping(_)
                | CheckpointState::Sealing { .. }
        )
    }

    /// Those that count.
    fn usable(&self) -> impl DoubleEndedIterator<Item = &CheckpointImage> {
        self.images.iter().filter(|image| !self.unavailable_to.contains_key(&image.header.number))
    }

    /// Where others find the newest images, oldest first, if that is not what was said last.
    fn new_locations(&mut self) -> Option<Vec<CheckpointLocation>> {
        let mut all: Vec<CheckpointLocation> =
            self.usable().rev().take(KEPT_IMAGES).map(CheckpointImage::location).collect();
        all.reverse();
        let is_new = all != self.reported_locations;
        self.reported_locations.clone_from(&all);
        is_new.then_some(all)
    }

    /// The image of this number is torn.
    pub fn drop_image(&mut self, number: u64) {
        let is_it = |image: &CheckpointImage| image.header.number == number;
        let torn: Vec<CheckpointImage> =
            self.images.iter().filter(|image| is_it(image)).cloned().collect();
        self.discard(torn);
        self.images.retain(|image| !is_it(image));
        self.unavailable_to.remove(&number);
    }

    /// CRIU, if it takes an image.
    pub fn criu(&self) -> Option<u32> {
        match &self.state {
            CheckpointState::Dumping(it) if it.ended.is_none() => Some(it.criu),
            _ => None,
        }
    }

    pub fn tool(&self) -> PathBuf {
        self.config.tool.clone()
    }

    /// No start of the rank will ever stand before this many determinants: older images are gone.
    pub fn trim_position(&mut self) -> u64 {
        let kept = self.oldest().map_or(0, |oldest| oldest.determinants);
        self.trimmed_to = self.trimmed_to.max(kept);
        self.trimmed_to
    }

    /// Where it stood in the oldest image, if there are enough of them; with fewer it may have to begin with the program.
    fn oldest(&self) -> Option<&ReplayPosition> {
        self.usable().rev().nth(KEPT_IMAGES - 1).map(|image| &image.header.replay_position)
    }

    /// Drops what is not needed any more: the newest ones stay, and the newest of those that count.
    fn drop_surplus(&mut self) {
        let newest = self.images.iter().rev().take(KEPT_IMAGES);
        let needed = newest.chain(self.usable().rev().take(KEPT_IMAGES));
        let needed: BTreeSet<u64> = needed.map(|image| image.header.number).collect();
        let all = std::mem::take(&mut self.images);
        let (kept, old): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|image| needed.contains(&image.header.number));
        self.images = kept.into();
        self.unavailable_to.retain(|number, _| needed.contains(number));
        self.discard(old);
    }

    /// These images go, here and in the store.
    fn discard(&mut self, images: Vec<CheckpointImage>) {
        if images.is_empty() {
            return;
        }
        let here = images.clone();
        let bytes = images.iter().map(CheckpointImage::bytes).sum();
        self.removals.add(bytes, move || here.iter().for_each(CheckpointImage::remove));
        self.remove_from_store(images, None);
    }

    /// Whether a start that begins with the program could be brought to where the rank was.
    pub fn can_replay_from_start(&self) -> bool {
        self.trimmed_to == 0
    }

    /// The rank's process has ended. An image that is being sealed counts.
    pub fn end_incarnation(&mut self) {
        match std::mem::replace(&mut self.state, CheckpointState::Idle) {
            // Should it have failed, there is none, and the one before is used.
            CheckpointState::Sealing { thread } if is_done_within(&thread, SEAL_WAIT_MAX) => {
                drop(self.finish(thread));
            }
            // By a disk that does not answer. Nobody will know of that image: it goes as soon as it is there.
            CheckpointState::Sealing { thread } => self.removals.add(self.expected, move || {
                if let Ok(Ok(sealed)) = thread.join() {
                    sealed.image.remove();
                }
            }),
            CheckpointState::Preparing { thread, .. } => {
                self.removals.add(self.expected, move || {
                    if let Ok(Ok(image_folder)) = thread.join() {
                        image_folder.remove();
                    }
                })
            }
            CheckpointState::Dumping(Dump { criu, folder, ended, .. }) => {
                if ended.is_none() {
                    sys::kill(criu, libc::SIGKILL);
                }
                self.removals.add(self.expected, move || drop(std::fs::remove_dir_all(folder)));
            }
            // It is on this node.
            CheckpointState::Uploading { thread, object_store, .. } => {
                object_store.stop();
                self.stopped_upload = Some(thread);
            }
            CheckpointState::Idle
            | CheckpointState::Requested { .. }
            | CheckpointState::Disconnected { .. } => (),
        }
        self.due = Instant::now() + self.config.every;
    }

    /// What there is stays where it is.
    pub fn leave_images(&mut self) -> Option<JoinHandle<()>> {
        self.end_incarnation();
        self.end_incarnation();
        None
    }

    /// Nobody comes back any more. They go, in the store as well, by a thread that may be left to itself after a while.
    pub fn remove_all(&mut self) -> Option<JoinHandle<()>> {
        self.end_incarnation();
        // What was sealed just now may be on its way as well.
        self.end_incarnation();
        let images: Vec<CheckpointImage> = std::mem::take(&mut self.images).into();
        // Those that were taken over lie where the other node has put them.
        let folders = images.iter().filter_map(|image| image.folder.parent().map(PathBuf::from));
        let folders: BTreeSet<PathBuf> = folders.chain([self.folder.clone()]).collect();
        let (job, removals) = (self.config.job_folder_path(), std::mem::take(&mut self.removals));
        let sending = self.stopped_upload.take();
        let removal = self.remove_from_store(images, sending);
        let remove = move || {
            let all = || folders.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
            all();
            if removals.wait() {
                all();
            }
            // That of the job, if this was the last.
            let _ = std::fs::remove_dir(job);
            removal.map(JoinHandle::join);
        };
        disk_tasks::start("remove", remove).ok()
    }

    /// Removes images from the store, once this thread has ended.
    fn remove_from_store(
        &self,
        images: Vec<CheckpointImage>,
        sending: Option<UploadThread>,
    ) -> Option<JoinHandle<()>> {
        let object_store = self.config.object_store.as_ref()?.fresh();
        let remove = move || {
            sending.map(JoinHandle::join);
            images.iter().for_each(|image| object_store.remove(image));
        };
        std::thread::Builder::new().name("remove".into()).spawn(remove).ok()
    }

    /// Puts the newest image into the store, if there is one.
    fn upload(&mut self) -> Result<()> {
        let (Some(object_store), Some(image)) =
            (&self.config.object_store, self.images.back().cloned())
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

    /// What has become of the image that was put into the store, with its number. It counts if all who may need it there can get
    /// it; the others are returned.
    fn finish_upload(&mut self) -> Option<(u64, Result<Vec<u32>>)> {
        let CheckpointState::Uploading { thread, number, .. } =
            std::mem::replace(&mut self.state, CheckpointState::Idle)
        else {
            return None;
        };
        let uploaded = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let (Ok(unreachable), Some(known)) = (&uploaded, self.unavailable_to.get_mut(&number)) {
            known.clone_from(unreachable);
            self.recount_usable();
        }
        Some((number, uploaded))
    }

    /// These nodes may take over its rank from now on, and no others: some are lost, or have taken other ranks.
    pub fn set_spares(&mut self, spares: &[u32]) {
        self.config.spares = spares.to_vec();
        self.recount_usable();
    }

    /// Images count that all nodes can get which may take over the rank. Those that are lost do not matter.
    fn recount_usable(&mut self) {
        let spares = &self.config.spares;
        self.unavailable_to
            .retain(|_, unreachable| spares.iter().any(|spare| unreachable.contains(spare)));
        self.drop_surplus();
    }

    /// The store, for whoever needs what a node has lost.
    pub fn object_store(&self) -> Option<ObjectStore> {
        self.config.object_store.as_ref().map(ObjectStore::fresh)
    }

    /// An image is sealed. Which nodes that may need it cannot get at it in its folder.
    fn finish(&mut self, thread: JoinHandle<Result<SealedImage>>) -> Result<Vec<u32>> {
        self.schedule_next();
        // A thread that panics is a fault of ours, and no reason to end the job.
        let sealed = thread.join().unwrap_or_else(|_| bail!("it could not be written"));
        let SealedImage { image, mut unreachable } = sealed?;
        unreachable.retain(|spare| self.config.spares.contains(spare));
        // Nobody else has it before it is in the store.
        let is_to_be_sent = self.config.object_store.is_some();
        let unavailable_to =
            if is_to_be_sent { self.config.spares.clone() } else { unreachable.clone() };
        if !unavailable_to.is_empty() {
            self.unavailable_to.insert(image.header.number, unavailable_to);
        }
        self.images.push_back(image);
        self.failures = 0;
        self.drop_surplus();
        self.upload()?;
        Ok(if is_to_be_sent { Vec::new() } else { unreachable })
    }

    /// Whether an image is due: it is time, or the rank has `read` so much of clocks and chance.
    fn is_due(&mut self, read: impl FnOnce() -> u64, now: Instant) -> bool {
        if self.failures >= FAILURES_MAX {
            return false;
        }
        if now >= self.next_read_check {
            self.next_read_check = now + READ_CHECK_INTERVAL;
            let newest =
                self.images.back().map_or(0, |image| image.header.replay_position.recording_bytes);
            if read().saturating_sub(newest) > READ_BYTES_MAX {
                self.due = self.due.min(now);
            }
        }
        now >= self.due
    }

    /// When something is to be done of which no descriptor tells.
    fn next_time(&self) -> Option<Instant> {
        match &self.state {
            CheckpointState::Idle => {
                (self.failures < FAILURES_MAX).then(|| self.due.min(self.next_read_check))
            }
            CheckpointState::Requested { since } => {
                (!self.is_slow_reported).then(|| *since + QUIESCE_WARN_AFTER)
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

    /// Ends CRIU if it has taken too long: the rank waits for it.
    fn end_late(&mut self, now: Instant) {
        if let CheckpointState::Dumping(it) = &mut self.state
            && it.ended.is_none()
            && !it.is_late
            && now >= it.began + DUMP_MAX
        {
            it.is_late = true;
            sys::kill(it.criu, libc::SIGKILL);
        }
    }

    /// What the user is to hear of a rank that does not answer, once.
    fn overdue_notice(&mut self, now: Instant) -> Option<String> {
        match &mut self.state {
            CheckpointState::Requested { since }
                if !self.is_slow_reported && now >= *since + QUIESCE_WARN_AFTER =>
            {
                self.is_slow_reported = true;
                Some(format!(
                    "has been asked for checkpoint {} {} s ago and has not stopped for it: that is done at a call of MPI \
                     that looks for messages, in the thread that began the program; it is waited for",
                    self.number,
                    QUIESCE_WARN_AFTER.as_secs()
                ))
            }
            CheckpointState::Disconnected { since, is_reported }
                if !*is_reported && now >= *since + EXIT_SEEN_WITHIN =>
            {
                *is_reported = true;
                Some("has no checkpoint: it has closed the descriptor on which it is asked; no more are tried".into())
            }
            _ => None,
        }
    }

    /// The number of the newest image and its bytes, if the launcher does not know of it; 0: there is none.
    fn unreported_image(&mut self) -> Option<(u64, u64)> {
        let newest = self.images.back();
        let number = newest.map_or(0, |image| image.header.number);
        let is_new = std::mem::replace(&mut self.reported, number) != number;
        is_new.then(|| (number, newest.map_or(0, CheckpointImage::bytes)))
    }

    /// CRIU has ended, if that was this process.
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

/// Whether a thread ends within this time.
fn is_done_within<T>(thread: &JoinHandle<T>, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL / 4);
    }
    thread.is_finished()
}

#[cfg(test)]
mod tests;
