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
//! In: the time, the rank's word, the ends of processes. Out: images, the newest [`KEPT`] of them. A rank that is killed goes
//! on from the newest that is whole. Of one that repeats what was before none is taken.
//!
//! Where other nodes may take over the rank, an image *counts* only once it is where they find it: in the store, or in a folder that
//! all of them see. Until then nothing that led there is dropped.
//!
//! What may never happen: a rank waits for longer than its image takes; an image counts before it is sealed, or while nobody has it
//! but this node, if that can be lost; the agent waits for the disk on which images lie (`aside`).

mod aside;
mod line;
mod turns;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use landbridge_proto::clocks::CLOCKS_BYTES;

use crate::checkpoint::Wish;
use crate::checkpoint::remote::Remote;
use crate::checkpoint::store::{About, Image, Standing};
use crate::control::Ending;
use crate::control::moved::Whereabouts;
use crate::sys;
use aside::{Aside, Place, Sealed};
pub use line::Line;

/// Images of a rank that are kept: if the newest is torn there is another.
const KEPT: usize = 2;
/// Between two glances at a folder that is being made, while the rank stands still.
const SHORT_GLANCE: Duration = Duration::from_millis(1);
/// Between two glances at one that is being taken or sealed.
const GLANCE: Duration = Duration::from_millis(20);
/// Between two looks whether a rank has begun to look for messages.
const NOT_BEGUN: Duration = Duration::from_millis(100);
/// One that has ended waits so long for its last image.
const SEALED_WITHIN: Duration = Duration::from_secs(2);
/// For so long CRIU may take an image, during which the rank stands still; then it is ended.
const TAKING_MAX: Duration = Duration::from_secs(60);
/// After so long it is told that a rank has not come to a place where its image can be taken.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// A rank that has closed its end of the line has as a rule ended, which is seen within this time.
const END_SEEN: Duration = Duration::from_secs(1);
/// Failures in a row after which no more images are taken.
const FAILURES_MAX: u32 = 3;
/// Bytes that a rank may read of clocks and chance before its next image is due, whatever the time: the record is cut at the older of two
/// images, and must hold what comes until the one after them is whole.
const READ_MAX: u64 = CLOCKS_BYTES as u64 / 8;
/// Between two looks at how much that is.
const READS_GLANCE: Duration = Duration::from_millis(250);
/// So long it is looked whether the nodes that may take over ranks have said in the store that they reach it.
const SIGNS_MAX: Duration = Duration::from_secs(2);

/// A thread that puts an image into the store; which nodes that may need it there cannot get it.
type Sender = JoinHandle<Result<Vec<u32>>>;

/// See the module head.
pub struct Keeper {
    wish: Wish,
    /// Of this rank.
    folder: PathBuf,
    due: Instant,
    /// When it is looked how much the rank has read of clocks.
    glance: Instant,
    /// Images that were asked for.
    number: u64,
    state: State,
    /// Whole ones, oldest first.
    images: VecDeque<Image>,
    /// The numbers of those that do not count yet, and which nodes cannot get them that may need them.
    alone: BTreeMap<u64, Vec<u32>>,
    /// Of those that do, what the agent above has been told.
    shown: Vec<Whereabouts>,
    /// It was putting an image into the store, and is to end.
    stopped: Option<Sender>,
    /// Bytes that the image that is being taken may take.
    expected: u64,
    /// What goes.
    aside: Aside,
    failures: u32,
    /// Before so many intakes nothing is kept of the rank any more.
    promised: u64,
    /// It was told that the rank takes long to answer,
    is_slow_told: bool,
    /// The number of the newest image of which the launcher knows; 0: none.
    told: u64,
    /// and that there is no room for its images.
    is_full_told: bool,
    /// The user wants to hear of the next image.
    is_awaited: bool,
    /// One more is wanted as soon as this is done.
    is_wanted: bool,
}

/// Who wants an image before it is time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    User,
    Relay,
}

enum State {
    Resting,
    Asking { since: Instant },
    Preparing { thread: JoinHandle<Result<Place>>, about: About, began: Instant },
    Taking(Taking),
    Sealing { thread: JoinHandle<Result<Sealed>> },
    Sending { thread: Sender, remote: Remote, number: u64 },
    CutOff { since: Instant, is_told: bool },
}

struct Taking {
    criu: u32,
    ended: Option<Ending>,
    /// It was ended for that.
    is_late: bool,
    folder: PathBuf,
    about: About,
    began: Instant,
}

impl Keeper {
    /// `turn`: of so many ranks of this node it is the one of this number. Their images come one after the other, from half of
    /// the first interval on. `moves`: how many nodes the rank has lost; some that is not lost after all must not have the same
    /// folder.
    pub fn new(wish: Wish, rank: u32, moves: u32, turn: (u32, u32)) -> Keeper {
        let name = match moves {
            0 => format!("rank-{rank}"),
            _ => format!("rank-{rank}.{moves}"),
        };
        let folder = wish.place.join(name);
        let half = wish.every / 2;
        let due = Instant::now() + half + half.mul_f64(f64::from(turn.0 + 1) / f64::from(turn.1));
        let (images, failures) = (VecDeque::new(), 0);
        let state = State::Resting;
        Keeper {
            wish,
            folder,
            due,
            glance: Instant::now() + READS_GLANCE,
            number: 0,
            state,
            images,
            alone: BTreeMap::new(),
            shown: Vec::new(),
            stopped: None,
            expected: 0,
            aside: Aside::default(),
            failures,
            promised: 0,
            is_slow_told: false,
            is_full_told: false,
            is_awaited: false,
            is_wanted: false,
            told: 0,
        }
    }

    /// An image is wanted before it is time. One that the rank has not stopped for yet is as good.
    fn want(&mut self, asker: Asker, now: Instant) {
        self.is_awaited |= asker == Asker::User;
        // The user may know better why it has failed.
        self.failures = self.failures.min(FAILURES_MAX - 1);
        match self.state {
            State::Resting => self.due = now,
            State::Sealing { .. } | State::Sending { .. } => self.is_wanted = true,
            State::Asking { .. }
            | State::Preparing { .. }
            | State::Taking(_)
            | State::CutOff { .. } => (),
        }
    }

    /// When the next one is due, as one is done or cannot be had.
    fn rest(&mut self) {
        let wait =
            if std::mem::take(&mut self.is_wanted) { Duration::ZERO } else { self.wish.every };
        self.due = Instant::now() + wait;
    }

    /// Bytes that its images take, with one that is being taken and those that are not gone yet.
    fn bytes(&self) -> u64 {
        let sealed: u64 = self.images.iter().map(Image::bytes).sum();
        let being_taken = if self.is_busy() { self.expected } else { 0 };
        sealed + being_taken + self.aside.bytes()
    }

    pub fn newest_first(&self) -> Vec<Image> {
        self.images.iter().rev().cloned().collect()
    }

    /// Another node has taken this image, and it counts: the newest of those that are known.
    pub fn add(&mut self, image: Image) {
        self.number = self.number.max(image.about.number);
        self.images.push_back(image);
    }

    pub fn wish(&self) -> &Wish {
        &self.wish
    }

    /// Whether an image is being written that will count.
    pub fn is_sealing(&self) -> bool {
        matches!(&self.state, State::Sealing { thread } if !thread.is_finished())
    }

    /// Whether an image is being taken, or written.
    fn is_busy(&self) -> bool {
        matches!(self.state, State::Preparing { .. } | State::Taking(_) | State::Sealing { .. })
    }

    /// Those that count.
    fn counted(&self) -> impl DoubleEndedIterator<Item = &Image> {
        self.images.iter().filter(|image| !self.alone.contains_key(&image.about.number))
    }

    /// Where others find the newest images, oldest first, if that is not what was said last.
    fn whereabouts(&mut self) -> Option<Vec<Whereabouts>> {
        let mut all: Vec<Whereabouts> =
            self.counted().rev().take(KEPT).map(Image::whereabouts).collect();
        all.reverse();
        let is_new = all != self.shown;
        self.shown.clone_from(&all);
        is_new.then_some(all)
    }

    /// The image of this number is torn.
    pub fn drop_image(&mut self, number: u64) {
        let is_it = |image: &Image| image.about.number == number;
        let torn: Vec<Image> = self.images.iter().filter(|image| is_it(image)).cloned().collect();
        self.discard(torn);
        self.images.retain(|image| !is_it(image));
        self.alone.remove(&number);
    }

    /// CRIU, if it takes an image.
    pub fn criu(&self) -> Option<u32> {
        match &self.state {
            State::Taking(it) if it.ended.is_none() => Some(it.criu),
            _ => None,
        }
    }

    pub fn tool(&self) -> PathBuf {
        self.wish.tool.clone()
    }

    /// No start of the rank will ever stand before this many intakes: older images are gone.
    pub fn promise(&mut self) -> u64 {
        let kept = self.oldest().map_or(0, |oldest| oldest.intakes);
        self.promised = self.promised.max(kept);
        self.promised
    }

    /// Where it stood in the oldest image, if there are enough of them; with fewer it may have to begin with the program.
    fn oldest(&self) -> Option<&Standing> {
        self.counted().rev().nth(KEPT - 1).map(|image| &image.about.standing)
    }

    /// Drops what is not needed any more: the newest ones stay, and the newest of those that count.
    fn drop_surplus(&mut self) {
        let newest = self.images.iter().rev().take(KEPT);
        let needed = newest.chain(self.counted().rev().take(KEPT));
        let needed: BTreeSet<u64> = needed.map(|image| image.about.number).collect();
        let all = std::mem::take(&mut self.images);
        let (kept, old): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|image| needed.contains(&image.about.number));
        self.images = kept.into();
        self.alone.retain(|number, _| needed.contains(number));
        self.discard(old);
    }

    /// These images go, here and in the store.
    fn discard(&mut self, images: Vec<Image>) {
        if images.is_empty() {
            return;
        }
        let here = images.clone();
        let bytes = images.iter().map(Image::bytes).sum();
        self.aside.go(bytes, move || here.iter().for_each(Image::remove));
        self.forget_remotely(images, None);
    }

    /// Whether a start that begins with the program could be brought to where the rank was.
    pub fn may_begin(&self) -> bool {
        self.promised == 0
    }

    /// The rank's process has ended. An image that is being sealed counts.
    pub fn end_life(&mut self) {
        match std::mem::replace(&mut self.state, State::Resting) {
            // Should it have failed, there is none, and the one before is used.
            State::Sealing { thread } if is_done_within(&thread, SEALED_WITHIN) => {
                drop(self.finish(thread));
            }
            // By a disk that does not answer. Nobody will know of that image: it goes as soon as it is there.
            State::Sealing { thread } => self.aside.go(self.expected, move || {
                if let Ok(Ok(sealed)) = thread.join() {
                    sealed.image.remove();
                }
            }),
            State::Preparing { thread, .. } => self.aside.go(self.expected, move || {
                if let Ok(Ok(place)) = thread.join() {
                    place.remove();
                }
            }),
            State::Taking(Taking { criu, folder, ended, .. }) => {
                if ended.is_none() {
                    sys::kill(criu, libc::SIGKILL);
                }
                self.aside.go(self.expected, move || drop(std::fs::remove_dir_all(folder)));
            }
            // It is on this node.
            State::Sending { thread, remote, .. } => {
                remote.stop();
                self.stopped = Some(thread);
            }
            State::Resting | State::Asking { .. } | State::CutOff { .. } => (),
        }
        self.due = Instant::now() + self.wish.every;
    }

    /// What there is stays where it is.
    pub fn leave_all(&mut self) -> Option<JoinHandle<()>> {
        self.end_life();
        self.end_life();
        None
    }

    /// Nobody comes back any more. They go, in the store as well, by a thread that may be left to itself after a while.
    pub fn remove_all(&mut self) -> Option<JoinHandle<()>> {
        self.end_life();
        // What was sealed just now may be on its way as well.
        self.end_life();
        let images: Vec<Image> = std::mem::take(&mut self.images).into();
        // Those that were taken over lie where the other node has put them.
        let folders = images.iter().filter_map(|image| image.folder.parent().map(PathBuf::from));
        let folders: BTreeSet<PathBuf> = folders.chain([self.folder.clone()]).collect();
        let (job, aside) = (self.wish.folder_of_job(), std::mem::take(&mut self.aside));
        let sending = self.stopped.take();
        let removal = self.forget_remotely(images, sending);
        let remove = move || {
            let all = || folders.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
            all();
            if aside.wait() {
                all();
            }
            // That of the job, if this was the last.
            let _ = std::fs::remove_dir(job);
            removal.map(JoinHandle::join);
        };
        aside::start("remove", remove).ok()
    }

    /// Removes images from the store, once this thread has ended.
    fn forget_remotely(
        &self,
        images: Vec<Image>,
        sending: Option<Sender>,
    ) -> Option<JoinHandle<()>> {
        let remote = self.wish.remote.as_ref()?.anew();
        let remove = move || {
            sending.map(JoinHandle::join);
            images.iter().for_each(|image| remote.remove(image));
        };
        std::thread::Builder::new().name("remove".into()).spawn(remove).ok()
    }

    /// Puts the newest image into the store, if there is one.
    fn send(&mut self) -> Result<()> {
        let (Some(remote), Some(image)) = (&self.wish.remote, self.images.back().cloned()) else {
            return Ok(());
        };
        let (remote, number) = (remote.anew(), image.about.number);
        let sender = remote.clone();
        let (job, spares) = (self.wish.job.clone(), self.wish.spares.clone());
        let put = move || {
            sender.put(&image)?;
            Ok(sender.blind(&job, &spares, Instant::now() + SIGNS_MAX))
        };
        let thread = std::thread::Builder::new().name("send".into()).spawn(put)?;
        self.state = State::Sending { thread, remote, number };
        Ok(())
    }

    /// What has become of the image that was put into the store, with its number. It counts if all who may need it there can get
    /// it; the others are returned.
    fn finish_sending(&mut self) -> Option<(u64, Result<Vec<u32>>)> {
        let State::Sending { thread, number, .. } =
            std::mem::replace(&mut self.state, State::Resting)
        else {
            return None;
        };
        let sent = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let (Ok(blind), Some(known)) = (&sent, self.alone.get_mut(&number)) {
            known.clone_from(blind);
            self.count_anew();
        }
        Some((number, sent))
    }

    /// These nodes may take over its rank from now on, and no others: some are lost, or have taken other ranks.
    pub fn set_spares(&mut self, spares: &[u32]) {
        self.wish.spares = spares.to_vec();
        self.count_anew();
    }

    /// Images count that all nodes can get which may take over the rank. Those that are lost do not matter.
    fn count_anew(&mut self) {
        let spares = &self.wish.spares;
        self.alone.retain(|_, blind| spares.iter().any(|spare| blind.contains(spare)));
        self.drop_surplus();
    }

    /// The store, for whoever needs what a node has lost.
    pub fn remote(&self) -> Option<Remote> {
        self.wish.remote.as_ref().map(Remote::anew)
    }

    /// An image is sealed. Which nodes that may need it cannot get at it in its folder.
    fn finish(&mut self, thread: JoinHandle<Result<Sealed>>) -> Result<Vec<u32>> {
        self.rest();
        // A thread that panics is a fault of ours, and no reason to end the job.
        let sealed = thread.join().unwrap_or_else(|_| bail!("it could not be written"));
        let Sealed { image, mut blind } = sealed?;
        blind.retain(|spare| self.wish.spares.contains(spare));
        // Nobody else has it before it is in the store.
        let is_to_be_sent = self.wish.remote.is_some();
        let alone = if is_to_be_sent { self.wish.spares.clone() } else { blind.clone() };
        if !alone.is_empty() {
            self.alone.insert(image.about.number, alone);
        }
        self.images.push_back(image);
        self.failures = 0;
        self.drop_surplus();
        self.send()?;
        Ok(if is_to_be_sent { Vec::new() } else { blind })
    }

    /// Whether an image is due: it is time, or the rank has `read` so much of clocks and chance.
    fn is_due(&mut self, read: impl FnOnce() -> u64, now: Instant) -> bool {
        if self.failures >= FAILURES_MAX {
            return false;
        }
        if now >= self.glance {
            self.glance = now + READS_GLANCE;
            let newest = self.images.back().map_or(0, |image| image.about.standing.clocks);
            if read().saturating_sub(newest) > READ_MAX {
                self.due = self.due.min(now);
            }
        }
        now >= self.due
    }

    /// When something is to be done of which no descriptor tells.
    fn next_time(&self) -> Option<Instant> {
        match &self.state {
            State::Resting => (self.failures < FAILURES_MAX).then(|| self.due.min(self.glance)),
            State::Asking { since } => (!self.is_slow_told).then(|| *since + ANSWER_MAX),
            State::Preparing { .. } => Some(Instant::now() + SHORT_GLANCE),
            State::Taking(it) => (!it.is_late).then(|| Instant::now() + GLANCE),
            State::Sealing { .. } | State::Sending { .. } => Some(Instant::now() + GLANCE),
            State::CutOff { since, is_told } => (!is_told).then(|| *since + END_SEEN),
        }
    }

    /// Ends CRIU if it has taken too long: the rank waits for it.
    fn end_late(&mut self, now: Instant) {
        if let State::Taking(it) = &mut self.state
            && it.ended.is_none()
            && !it.is_late
            && now >= it.began + TAKING_MAX
        {
            it.is_late = true;
            sys::kill(it.criu, libc::SIGKILL);
        }
    }

    /// What the user is to hear of a rank that does not answer, once.
    fn silence(&mut self, now: Instant) -> Option<String> {
        match &mut self.state {
            State::Asking { since } if !self.is_slow_told && now >= *since + ANSWER_MAX => {
                self.is_slow_told = true;
                Some(format!(
                    "has been asked for checkpoint {} {} s ago and has not stopped for it: that is done at a call of MPI \
                     that looks for messages, in the thread that began the program; it is waited for",
                    self.number,
                    ANSWER_MAX.as_secs()
                ))
            }
            State::CutOff { since, is_told } if !*is_told && now >= *since + END_SEEN => {
                *is_told = true;
                Some("has no checkpoint: it has closed the descriptor on which it is asked; no more are tried".into())
            }
            _ => None,
        }
    }

    /// The number of the newest image and its bytes, if the launcher does not know of it; 0: there is none.
    fn news(&mut self) -> Option<(u64, u64)> {
        let newest = self.images.back();
        let number = newest.map_or(0, |image| image.about.number);
        let is_new = std::mem::replace(&mut self.told, number) != number;
        is_new.then(|| (number, newest.map_or(0, Image::bytes)))
    }

    /// CRIU has ended, if that was this process.
    pub fn note_end(&mut self, pid: u32, ending: Ending) -> bool {
        match &mut self.state {
            State::Taking(it) if it.criu == pid => {
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
        std::thread::sleep(GLANCE / 4);
    }
    thread.is_finished()
}

#[cfg(test)]
mod tests;
