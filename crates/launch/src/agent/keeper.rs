//! The images of one rank (checkpoints): when one is taken, and which one the rank goes on from when it was killed.
//!
//! | it | until |
//! |---|---|
//! | rests | it is time for another image; then the rank is asked for it, by a word in its record of clocks |
//! | asks | the rank says where it stands, and does nothing from then on |
//! | takes | CRIU is done; then the rank is told to go on |
//! | seals | a thread has written all of it to the disk |
//!
//! In: the time, the rank's word, the ends of processes. Out: images, the newest [`KEPT`] of them. A rank that is killed goes
//! on from the newest that is whole. Of one that repeats what was before none is taken.
//!
//! What may never happen: a rank waits for longer than its image takes; an image counts before it is sealed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::rank::LocalRank;
use super::{Agent, Phase};
use crate::checkpoint::Wish;
use crate::checkpoint::criu::{self, DUMP_LOG, Ends};
use crate::checkpoint::store::{self, About, Image, Standing};
use crate::control::{Ending, Message};
use crate::sys;

/// Images of a rank that are kept: if the newest is torn there is another.
const KEPT: usize = 2;
/// Between two glances at one that is being sealed.
const GLANCE: Duration = Duration::from_millis(20);
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
}

enum State {
    Resting,
    Asking,
    Taking { criu: u32, ended: Option<Ending>, folder: PathBuf, about: About, began: Instant },
    Sealing { thread: JoinHandle<Result<Image>> },
}

/// The agent's end of the socket on which a rank says that its image can be taken, and its other ends.
pub struct Line {
    pub socket: OwnedFd,
    pub ends: Ends,
}

impl Line {
    /// What the rank says: the number of the image, and where it stands.
    fn read(&self) -> Option<[u64; 4]> {
        let mut word = [0; 32];
        // It is written at once, and a pair of Unix sockets hands on whole.
        match rustix::net::recv(&self.socket, &mut word, rustix::net::RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == word.len() => Some(std::array::from_fn(|at| {
                u64::from_le_bytes(word[8 * at..8 * at + 8].try_into().unwrap_or_default())
            })),
            _ => None,
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
    pub fn new(wish: Wish, job: &str, rank: u32) -> Keeper {
        let folder = wish.folder.join(job).join(format!("rank-{rank}"));
        let due = Instant::now() + wish.every;
        let (images, failures) = (VecDeque::new(), 0);
        let state = State::Resting;
        Keeper { wish, folder, due, number: 0, state, images, failures, promised: 0 }
    }

    /// The newest image, if there is one.
    pub fn newest(&self) -> Option<&Image> {
        self.images.back()
    }

    /// It cannot be used.
    pub fn drop_newest(&mut self) {
        self.images.pop_back().iter().for_each(Image::remove);
    }

    pub fn tool(&self) -> PathBuf {
        self.wish.tool.clone()
    }

    /// No start of the rank will ever stand before this many intakes: older images are gone.
    pub fn promise(&mut self) -> u64 {
        // With fewer it may have to begin with the program.
        let oldest = self.images.front().filter(|_| self.images.len() >= KEPT);
        let kept = oldest.map_or(0, |image| image.about.standing.intakes);
        self.promised = self.promised.max(kept);
        self.promised
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
            State::Taking { criu, folder, ended, .. } => {
                if ended.is_none() {
                    sys::kill(criu, libc::SIGKILL);
                }
                let _ = std::fs::remove_dir_all(folder);
            }
            State::Resting | State::Asking => (),
        }
        self.due = Instant::now() + self.wish.every;
    }

    /// Nobody comes back any more.
    pub fn remove_all(&mut self) {
        self.end_life();
        let _ = std::fs::remove_dir_all(&self.folder);
        // That of the job, if this was the last.
        self.folder.parent().map(std::fs::remove_dir);
    }

    fn finish(&mut self, thread: JoinHandle<Result<Image>>) -> Result<()> {
        self.due = Instant::now() + self.wish.every;
        // A thread that panics is a fault of ours, and no reason to end the job.
        let sealed = thread.join().unwrap_or_else(|_| bail!("it could not be written"));
        self.images.push_back(sealed.context("it could not be written")?);
        self.failures = 0;
        while self.images.len() > KEPT {
            self.images.pop_front().iter().for_each(Image::remove);
        }
        Ok(())
    }

    /// When something is to be done of which no descriptor tells.
    pub fn next_time(&self) -> Option<Instant> {
        match self.state {
            State::Resting if self.failures < FAILURES_MAX => Some(self.due),
            State::Sealing { .. } => Some(Instant::now() + GLANCE),
            _ => None,
        }
    }

    /// CRIU has ended, if that was this process.
    pub fn note_end(&mut self, pid: u32, ending: Ending) -> bool {
        match &mut self.state {
            State::Taking { criu, ended, .. } if *criu == pid => {
                *ended = Some(ending);
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
            if let Err(error) = self.advance_image(index) {
                let rank = &mut self.ranks[index];
                let mut text = format!("rank {} has no checkpoint: {error:#}", rank.rank);
                if let Some(keeper) = &mut rank.keeper {
                    keeper.failures += 1;
                    if keeper.failures >= FAILURES_MAX {
                        text += "; no more are tried";
                    }
                    keeper.due = Instant::now() + keeper.wish.every;
                    keeper.state = State::Resting;
                }
                self.parent.send(&Message::Note { text });
            }
        }
    }

    fn advance_image(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let is_away = rank.is_away();
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        match &mut keeper.state {
            State::Resting => {
                let is_due = keeper.failures < FAILURES_MAX && Instant::now() >= keeper.due;
                if let (true, Some(clocks)) = (is_due && !is_away, &rank.clocks) {
                    keeper.number += 1;
                    clocks.want_image(keeper.number);
                    keeper.state = State::Asking;
                }
                Ok(())
            }
            State::Asking => match rank.line.as_ref().and_then(Line::read) {
                Some(word) => {
                    let outcome = self.take_image(index, word);
                    // Whatever has become of it, the rank waits.
                    if outcome.is_err() {
                        self.send_on(index)?;
                    }
                    outcome
                }
                None => Ok(()),
            },
            State::Taking { ended: Some(_), .. } => self.seal_image(index),
            State::Taking { .. } => Ok(()),
            State::Sealing { thread } if thread.is_finished() => {
                let State::Sealing { thread } =
                    std::mem::replace(&mut keeper.state, State::Resting)
                else {
                    return Ok(());
                };
                keeper.finish(thread)
            }
            State::Sealing { .. } => Ok(()),
        }
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
        let standing = Standing { intakes, sent, looks, asked, stage, printed };
        let folder = store::begin(&keeper.folder, number)?;
        let shared = store::copy_shared(rank.pid, &folder)?;
        let criu = criu::dump(&keeper.wish.tool, rank.pid, &line.ends, &folder)?.id();
        let about = About { number, pid: rank.pid, standing, ends: line.ends, shared };
        keeper.state = State::Taking { criu, ended: None, folder, about, began: Instant::now() };
        Ok(())
    }

    /// CRIU has done with the rank, which goes on.
    fn seal_image(&mut self, index: usize) -> Result<()> {
        self.send_on(index)?;
        let rank = &mut self.ranks[index];
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        let State::Taking { ended, folder, about, began, .. } =
            std::mem::replace(&mut keeper.state, State::Resting)
        else {
            return Ok(());
        };
        if ended != Some(Ending::Exited(0)) {
            let why = criu::last_words(&folder.join(DUMP_LOG));
            let _ = std::fs::remove_dir_all(folder);
            bail!("CRIU could not take it: {why}");
        }
        let text = format!(
            "checkpoint {} of rank {}: it stood still for {} ms",
            about.number,
            rank.rank,
            began.elapsed().as_millis()
        );
        let seal = move || store::seal(&folder, about);
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
                parent.send(&Message::Output { rank: number, stream, bytes });
            }
        });
        rank.again = again;
    }
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

    /// What the poll set needs to know of its line.
    pub fn line(&self) -> Option<BorrowedFd<'_>> {
        let is_asking = self.keeper.as_ref().is_some_and(|it| matches!(it.state, State::Asking));
        self.line.as_ref().filter(|_| is_asking).map(|line| line.socket.as_fd())
    }
}
