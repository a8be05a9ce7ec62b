//! The images of one rank (checkpoints): when one is taken, and which one the rank goes on from when it was killed.
//!
//! | it | until |
//! |---|---|
//! | rests | it is time for another image; then the rank is asked for it, by a word in its record of clocks |
//! | asks | the rank says where it stands, and does nothing from then on; once it is told that this takes long |
//! | takes | CRIU is done, or was ended because it was not; then the rank is told to go on |
//! | seals | a thread has written all of it to the disk |
//! | sends | another one has put it into the object store, if there is one; it counts already |
//! | is cut off | the process ends: it has closed its end of the line, so nothing can be asked of it |
//!
//! In: the time, the rank's word, the ends of processes. Out: images, the newest [`KEPT`] of them. A rank that is killed goes
//! on from the newest that is whole. Of one that repeats what was before none is taken.
//!
//! What may never happen: a rank waits for longer than its image takes; an image counts before it is sealed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::rank::LocalRank;
use super::{Agent, Phase, input};
use crate::checkpoint::Wish;
use crate::checkpoint::criu::{self, DUMP_LOG, Ends};
use crate::checkpoint::remote::Remote;
use crate::checkpoint::store::{self, About, Image, Standing};
use crate::control::{Ending, Message};
use crate::ps::paths;
use crate::sys;

/// Images of a rank that are kept: if the newest is torn there is another.
const KEPT: usize = 2;
/// Between two glances at one that is being sealed.
const GLANCE: Duration = Duration::from_millis(20);
/// For so long CRIU may take an image, during which the rank stands still; then it is ended.
const TAKING_MAX: Duration = Duration::from_secs(60);
/// After so long it is told that a rank has not come to a place where its image can be taken.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// A rank that has closed its end of the line has as a rule ended, which is seen within this time.
const END_SEEN: Duration = Duration::from_secs(1);
/// Failures in a row after which no more images are taken.
const FAILURES_MAX: u32 = 3;

/// See the module head.
pub struct Keeper {
    wish: Wish,
    /// Of this rank.
    folder: PathBuf,
    due: Instant,
    /// Images that were asked for.
    number: u64,
    state: State,
    /// Whole ones, oldest first.
    images: VecDeque<Image>,
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
    Taking(Taking),
    Sealing { thread: JoinHandle<Result<Image>> },
    Sending { thread: JoinHandle<Result<()>>, remote: Remote, number: u64 },
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

/// The agent's end of the socket on which a rank says that its image can be taken, and its other ends.
pub struct Line {
    pub socket: OwnedFd,
    pub ends: Ends,
}

/// What a rank says on its line.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Nothing,
    /// The number of the image, and where it stands.
    Word([u64; 4]),
    /// And it never will.
    Closed,
}

impl Line {
    fn read(&self) -> Heard {
        let mut word = [0; 32];
        // It is written at once, and a pair of Unix sockets hands on whole.
        match rustix::net::recv(&self.socket, &mut word, RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == word.len() => Heard::Word(std::array::from_fn(|at| {
                u64::from_le_bytes(word[8 * at..8 * at + 8].try_into().unwrap_or_default())
            })),
            Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
            Ok(_) | Err(_) => Heard::Closed,
        }
    }

    /// Tells whoever reads it to go on, as start `start` of the rank.
    pub fn send_on(&self, number: u64, start: u32, kept: u64, files: &[BorrowedFd]) -> Result<()> {
        let mut word = [0; 24];
        for (place, value) in word.chunks_exact_mut(8).zip([number, start.into(), kept]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(files));
        let word = [std::io::IoSlice::new(&word)];
        rustix::net::sendmsg(&self.socket, &word, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Keeper {
    /// `turn`: of so many ranks of this node it is the one of this number. Their images come one after the other, from half of
    /// the first interval on.
    pub fn new(wish: Wish, job: &str, rank: u32, turn: (u32, u32)) -> Keeper {
        let folder = wish.folder.join(job).join(format!("rank-{rank}"));
        let half = wish.every / 2;
        let due = Instant::now() + half + half.mul_f64(f64::from(turn.0 + 1) / f64::from(turn.1));
        let (images, failures) = (VecDeque::new(), 0);
        let state = State::Resting;
        Keeper {
            wish,
            folder,
            due,
            number: 0,
            state,
            images,
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
            State::Asking { .. } | State::Taking(_) | State::CutOff { .. } => (),
        }
    }

    /// When the next one is due, as one is done or cannot be had.
    fn rest(&mut self) {
        let wait =
            if std::mem::take(&mut self.is_wanted) { Duration::ZERO } else { self.wish.every };
        self.due = Instant::now() + wait;
    }

    /// Bytes that its images take, with one that is being taken of a process of this size.
    fn bytes(&self, process: u64) -> u64 {
        let sealed: u64 = self.images.iter().map(Image::bytes).sum();
        match &self.state {
            State::Taking(_) | State::Sealing { .. } => sealed + process,
            _ => sealed,
        }
    }

    pub fn newest_first(&self) -> Vec<Image> {
        self.images.iter().rev().cloned().collect()
    }

    #[cfg(test)]
    pub fn add(&mut self, image: Image) {
        self.images.push_back(image);
    }

    /// The image of this number is torn.
    pub fn drop_image(&mut self, number: u64) {
        let is_it = |image: &Image| image.about.number == number;
        let torn: Vec<Image> = self.images.iter().filter(|image| is_it(image)).cloned().collect();
        torn.iter().for_each(Image::remove);
        self.forget_remotely(torn, None);
        self.images.retain(|image| !is_it(image));
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
        let oldest = self.images.front().filter(|_| self.images.len() >= KEPT);
        oldest.map(|image| &image.about.standing)
    }

    /// Whether a start that begins with the program could be brought to where the rank was.
    pub fn may_begin(&self) -> bool {
        self.promised == 0
    }

    /// The rank's process has ended. An image that is being sealed counts.
    pub fn end_life(&mut self) {
        match std::mem::replace(&mut self.state, State::Resting) {
            // Should it have failed, there is none, and the one before is used.
            State::Sealing { thread } => drop(self.finish(thread)),
            State::Taking(Taking { criu, folder, ended, .. }) => {
                if ended.is_none() {
                    sys::kill(criu, libc::SIGKILL);
                }
                let _ = std::fs::remove_dir_all(folder);
            }
            // It is on this node.
            State::Sending { remote, .. } => remote.stop(),
            State::Resting | State::Asking { .. } | State::CutOff { .. } => (),
        }
        self.due = Instant::now() + self.wish.every;
    }

    /// Nobody comes back any more. In the store they go as well, by a thread that may be left to itself after a while.
    pub fn remove_all(&mut self) -> Option<JoinHandle<()>> {
        self.end_life();
        let mut sending = None;
        if let State::Sending { thread, remote, .. } =
            std::mem::replace(&mut self.state, State::Resting)
        {
            remote.stop();
            sending = Some(thread);
        }
        let images = std::mem::take(&mut self.images).into();
        let removal = self.forget_remotely(images, sending);
        let _ = std::fs::remove_dir_all(&self.folder);
        // That of the job, if this was the last.
        self.folder.parent().map(std::fs::remove_dir);
        removal
    }

    /// Removes images from the store, once this thread has ended.
    fn forget_remotely(
        &self,
        images: Vec<Image>,
        sending: Option<JoinHandle<Result<()>>>,
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
        let put = move || sender.put(&image);
        let thread = std::thread::Builder::new().name("send".into()).spawn(put)?;
        self.state = State::Sending { thread, remote, number };
        Ok(())
    }

    /// What the user is to hear of the store, if that has not taken the image.
    fn finish_sending(&mut self) -> Option<String> {
        let State::Sending { thread, number, .. } =
            std::mem::replace(&mut self.state, State::Resting)
        else {
            return None;
        };
        let sent = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        let error = sent.err()?;
        Some(format!(
            "checkpoint {number} is on its node alone: the store has not taken it: {error:#}"
        ))
    }

    /// The store, for whoever needs what a node has lost.
    pub fn remote(&self) -> Option<Remote> {
        self.wish.remote.as_ref().map(Remote::anew)
    }

    fn finish(&mut self, thread: JoinHandle<Result<Image>>) -> Result<()> {
        self.rest();
        // A thread that panics is a fault of ours, and no reason to end the job.
        let sealed = thread.join().unwrap_or_else(|_| bail!("it could not be written"));
        self.images.push_back(sealed.context("it could not be written")?);
        self.failures = 0;
        while self.images.len() > KEPT {
            let old = self.images.pop_front();
            old.iter().for_each(Image::remove);
            self.forget_remotely(old.into_iter().collect(), None);
        }
        self.send()
    }

    /// When something is to be done of which no descriptor tells.
    fn next_time(&self) -> Option<Instant> {
        match &self.state {
            State::Resting => (self.failures < FAILURES_MAX).then_some(self.due),
            State::Asking { since } => (!self.is_slow_told).then(|| *since + ANSWER_MAX),
            State::Taking(it) => (!it.is_late).then(|| it.began + TAKING_MAX),
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
        is_new.then(|| (number, newest.map_or(0, |image| size(&image.folder))))
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

impl Agent {
    pub(super) fn note_criu(&mut self, pid: u32, ending: Ending) -> bool {
        let mut keepers = self.ranks.iter_mut().filter_map(|rank| rank.keeper.as_mut());
        keepers.any(|keeper| keeper.note_end(pid, ending))
    }

    /// Takes images of ranks for which it is time.
    pub(super) fn advance_images(&mut self) {
        for index in 0..self.ranks.len() {
            if self.phase != Phase::Working {
                return;
            }
            if self.ranks[index].keeper.is_none() || self.ranks[index].ending.is_some() {
                continue;
            }
            let outcome = self.advance_image(index);
            self.tell_silence(index);
            self.tell_image(index);
            if let Err(error) = outcome {
                let rank = &mut self.ranks[index];
                let mut text = format!("rank {} has no checkpoint: {error:#}", rank.rank);
                if let Some(keeper) = &mut rank.keeper {
                    keeper.failures += 1;
                    if keeper.failures >= FAILURES_MAX {
                        text += "; no more are tried";
                    }
                    keeper.rest();
                    keeper.state = State::Resting;
                }
                self.parent.send(&Message::Note { text });
            }
        }
    }

    fn tell_image(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        if let Some((number, bytes)) = rank.keeper.as_mut().and_then(Keeper::news) {
            self.parent.send(&Message::Image { rank: rank.rank, number, bytes });
        }
    }

    fn tell_silence(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let said = rank.keeper.as_mut().and_then(|keeper| keeper.silence(Instant::now()));
        if let Some(said) = said {
            self.parent.send(&Message::Note { text: format!("rank {} {said}", rank.rank) });
        }
    }

    fn advance_image(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let is_away = rank.is_away();
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        match &mut keeper.state {
            State::Resting => {
                let is_due = keeper.failures < FAILURES_MAX && Instant::now() >= keeper.due;
                if !is_due || is_away || !self.has_room_for_image(index) {
                    return Ok(());
                }
                let rank = &mut self.ranks[index];
                if let (Some(keeper), Some(clocks)) = (rank.keeper.as_mut(), &rank.clocks) {
                    keeper.number += 1;
                    clocks.want_image(keeper.number);
                    keeper.state = State::Asking { since: Instant::now() };
                }
                Ok(())
            }
            State::Asking { .. } => match rank.line.as_ref().map_or(Heard::Closed, Line::read) {
                Heard::Word(word) => {
                    let outcome = self.take_image(index, word);
                    // Whatever has become of it, the rank waits.
                    if outcome.is_err() {
                        self.send_on(index)?;
                    }
                    outcome
                }
                Heard::Nothing => Ok(()),
                Heard::Closed => {
                    rank.line = None;
                    keeper.state = State::CutOff { since: Instant::now(), is_told: false };
                    Ok(())
                }
            },
            State::Taking(Taking { ended: Some(_), .. }) => self.seal_image(index),
            State::Taking(_) => {
                keeper.end_late(Instant::now());
                Ok(())
            }
            State::Sealing { thread } if thread.is_finished() => {
                let State::Sealing { thread } =
                    std::mem::replace(&mut keeper.state, State::Resting)
                else {
                    return Ok(());
                };
                keeper.finish(thread)?;
                if let (true, Some(image)) =
                    (std::mem::take(&mut keeper.is_awaited), keeper.images.back())
                {
                    let (number, bytes) = (image.about.number, paths::bytes(image.bytes()));
                    let text =
                        format!("checkpoint {number} of rank {} is there: {bytes}", rank.rank);
                    self.parent.send(&Message::Note { text });
                }
                Ok(())
            }
            State::Sending { thread, .. } if thread.is_finished() => {
                if let Some(text) = keeper.finish_sending() {
                    let text = format!("of rank {} {text}", rank.rank);
                    self.parent.send(&Message::Note { text });
                }
                Ok(())
            }
            State::Sealing { .. } | State::Sending { .. } | State::CutOff { .. } => Ok(()),
        }
    }

    /// Images of these ranks are wanted before it is time.
    pub(super) fn want_images(&mut self, rank: Option<u32>, asker: Asker) {
        let is_it = |it: &&mut LocalRank| rank.is_none_or(|rank| rank == it.rank);
        for it in self.ranks.iter_mut().filter(is_it) {
            if let Some(keeper) = it.keeper.as_mut().filter(|_| it.ending.is_none()) {
                keeper.want(asker, Instant::now());
            }
        }
        for child in &mut self.children {
            child.process.link.send(&Message::TakeImages { rank });
        }
    }

    /// Whether the images of this node may take so much more; if not it is said, until there was room again.
    fn has_room_for_image(&mut self, index: usize) -> bool {
        let sizes = |rank: &LocalRank| sys::resident_bytes(rank.pid);
        let taken: u64 = self
            .ranks
            .iter()
            .filter_map(|rank| rank.keeper.as_ref().map(|keeper| keeper.bytes(sizes(rank))))
            .sum();
        // As large as the process until it is compressed.
        let more = sizes(&self.ranks[index]);
        let rank = &mut self.ranks[index];
        let Some(keeper) = rank.keeper.as_mut() else { return false };
        let has_room = taken + more <= keeper.wish.space;
        if !has_room {
            keeper.rest();
        }
        if !has_room && !keeper.is_full_told {
            let text = format!(
                "rank {} has no checkpoint: it may take {}, and those of this node take {} of {} (checkpoint_space)",
                rank.rank,
                paths::bytes(more),
                paths::bytes(taken),
                paths::bytes(keeper.wish.space)
            );
            self.parent.send(&Message::Note { text });
        }
        keeper.is_full_told = !has_room;
        has_room
    }

    /// The rank stands still: all that it has said is taken note of, and CRIU begins.
    fn take_image(&mut self, index: usize, word: [u64; 4]) -> Result<()> {
        self.handle_pmi(index);
        self.drain_servers();
        self.handle_output(index);
        self.read_all(index);
        let rank = &mut self.ranks[index];
        let (Some(keeper), Some(line)) = (rank.keeper.as_mut(), rank.line.as_ref()) else {
            return Ok(());
        };
        let [number, intakes, sent, looks] = word;
        if number != keeper.number {
            bail!("it speaks of checkpoint {number}, and {} was wanted", keeper.number);
        }
        let again = rank.again.as_ref().context("it does not come back")?;
        let (asked, stage, printed) = again.standing();
        let unread = line.ends.stdin.map_or(0, |pipe| input::unread(rank.pid, pipe));
        let read = rank.input.given().saturating_sub(unread);
        let standing = Standing { intakes, sent, looks, asked, stage, printed, read };
        let folder = store::begin(&keeper.folder, number)?;
        let shared = store::copy_shared(rank.pid, &folder)?;
        let criu = criu::dump(&keeper.wish.tool, rank.pid, &line.ends, &folder)?.id();
        let about = About { number, pid: rank.pid, standing, ends: line.ends, shared };
        let (ended, is_late, began) = (None, false, Instant::now());
        keeper.state = State::Taking(Taking { criu, ended, is_late, folder, about, began });
        Ok(())
    }

    /// CRIU has done with the rank, which goes on.
    fn seal_image(&mut self, index: usize) -> Result<()> {
        self.send_on(index)?;
        let rank = &mut self.ranks[index];
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        let State::Taking(taking) = std::mem::replace(&mut keeper.state, State::Resting) else {
            return Ok(());
        };
        let Taking { ended, is_late, folder, about, began, .. } = taking;
        if ended != Some(Ending::Exited(0)) {
            let why = criu::last_words(&folder.join(DUMP_LOG));
            let _ = std::fs::remove_dir_all(folder);
            if is_late {
                bail!("CRIU was not done with it after {} s", TAKING_MAX.as_secs());
            }
            bail!("CRIU could not take it: {why}");
        }
        let text = format!(
            "checkpoint {} of rank {}: it stood still for {} ms",
            about.number,
            rank.rank,
            began.elapsed().as_millis()
        );
        let level = keeper.wish.level;
        let seal = move || store::seal(&folder, about, level);
        let thread = std::thread::Builder::new().name("seal".into()).spawn(seal)?;
        keeper.state = State::Sealing { thread };
        if self.assignment.as_ref().is_some_and(|own| own.job.verbose) {
            self.parent.send(&Message::Note { text });
        }
        Ok(())
    }

    fn send_on(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let start = rank.again.as_ref().map_or(0, |again| again.starts);
        let Some(keeper) = &mut rank.keeper else { return Ok(()) };
        let (number, kept) = (keeper.number, keeper.promise());
        rank.input.forget(keeper.oldest().map_or(0, |oldest| oldest.read));
        rank.send_on(number, start, kept)
    }

    /// All that is in the rank's pipes.
    fn read_all(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let number = rank.rank;
        let mut again = rank.again.take();
        let parent = &mut self.parent;
        rank.read_output(true, |stream, bytes| {
            let bytes = match &mut again {
                Some(again) => again.print(stream, bytes),
                None => bytes,
            };
            if !bytes.is_empty() {
                parent.send(&Message::Output { rank: number, stream, bytes, own: 0 });
            }
        });
        rank.again = again;
    }
}

/// Bytes of the files in a folder.
fn size(folder: &Path) -> u64 {
    let Ok(files) = std::fs::read_dir(folder) else { return 0 };
    files.flatten().filter_map(|file| file.metadata().ok()).map(|about| about.len()).sum()
}

impl LocalRank {
    /// Tells the process to go on, with its record and its board.
    pub fn send_on(&self, number: u64, start: u32, kept: u64) -> Result<()> {
        let (Some(line), Some(clocks)) = (&self.line, &self.clocks) else { return Ok(()) };
        let record = clocks.record();
        let board = self.board.as_ref().map(|board| board.fd());
        let files: Vec<BorrowedFd> = [record].into_iter().chain(board).collect();
        line.send_on(number, start, kept, &files)
    }

    /// When something is to be done for an image of it. Of one that has ended, or repeats what was before, none is begun.
    pub fn image_time(&self) -> Option<Instant> {
        let keeper = self.keeper.as_ref().filter(|_| self.ending.is_none())?;
        let rests = matches!(keeper.state, State::Resting);
        keeper.next_time().filter(|_| !(rests && self.is_away()))
    }

    /// What the poll set needs to know of its line.
    pub fn line(&self) -> Option<BorrowedFd<'_>> {
        let is_asking =
            |keeper: &Keeper| matches!(keeper.state, State::Asking { .. }) && self.ending.is_none();
        let is_asking = self.keeper.as_ref().is_some_and(is_asking);
        self.line.as_ref().filter(|_| is_asking).map(|line| line.socket.as_fd())
    }
}

#[cfg(test)]
mod tests;
