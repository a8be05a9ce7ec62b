//! What an agent does about the images of its ranks, in each turn of its loop: what [`Keeper`] decides is carried out, and the user
//! hears of it.
//!
//! What may never happen: a rank waits, and nobody tells it to go on.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::super::again::Again;
use super::super::rank::LocalRank;
use super::super::relay::RelayProcess;
use super::super::{Agent, Phase, input};
use super::aside::{self, Place, Sealed};
use super::line::{Heard, Line};
use super::{Asker, FAILURES_MAX, Keeper, NOT_BEGUN, State, TAKING_MAX, Taking};
use crate::checkpoint::criu;
use crate::checkpoint::store::{About, Standing};
use crate::control::moved::Talk;
use crate::control::{Ending, Message};
use crate::ps::paths;
use crate::sys;

impl Agent {
    pub(in super::super) fn note_criu(&mut self, pid: u32, ending: Ending) -> bool {
        let mut keepers = self.ranks.iter_mut().filter_map(|rank| rank.keeper.as_mut());
        keepers.any(|keeper| keeper.note_end(pid, ending))
    }

    /// Takes images of ranks for which it is time.
    pub(in super::super) fn advance_images(&mut self) {
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
        let is_ward = self.is_ward();
        let rank = &mut self.ranks[index];
        let images = rank.keeper.as_mut().filter(|_| is_ward).and_then(Keeper::whereabouts);
        if let Some(images) = images {
            let talk = Talk::Images { rank: rank.rank, images };
            self.parent.send(&Message::Talk(Box::new(talk)));
        }
        if let Some((number, bytes)) = rank.keeper.as_mut().and_then(Keeper::news) {
            let rank = rank.rank;
            self.parent.send(&Message::Image { rank, number, bytes });
            self.tell_begun_anew(rank, number);
        }
    }

    /// The relay may have begun the records of ranks anew: of those that are here, and whose image is whole by now, the user hears
    /// at once.
    pub(in super::super) fn look_for_begun_anew(&mut self) {
        let Some(begun) = self.relay.as_ref().map(|relay| relay.begun_anew.clone()) else { return };
        for rank in begun {
            let keeper = self.ranks.iter().find(|it| it.rank == rank);
            let keeper = keeper.and_then(|it| it.keeper.as_ref());
            let whole = keeper.filter(|it| !it.is_busy()).map_or(0, |it| it.told);
            self.tell_begun_anew(rank, whole);
        }
    }

    /// The newest image of the rank has this number. If too much had been given to the rank to be kept, its record has begun
    /// anew as it stood for that; it counts now that there is an image.
    pub(in super::super) fn tell_begun_anew(&mut self, rank: u32, number: u64) {
        let has_begun = |relay: &mut RelayProcess| relay.begun_anew.remove(&rank);
        if number > 0 && self.relay.as_mut().is_some_and(has_begun) {
            let text = format!(
                "of rank {rank} everything is kept from its last checkpoint on: it can come back again"
            );
            self.parent.send(&Message::Note { text });
        }
    }

    fn tell_silence(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let said = rank.keeper.as_mut().and_then(|keeper| keeper.silence(Instant::now()));
        if let Some(said) = said {
            self.parent.send(&Message::Note { text: format!("rank {} {said}", rank.rank) });
        }
    }

    /// An image of the rank is due, or will be.
    fn ask_for_image(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        // Before its first look it does not know yet from which request on images are asked for.
        let has_begun = rank.looks().is_none_or(|looks| looks.present > 0);
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        let read = || rank.clocks.as_ref().map_or(0, |clocks| clocks.recorded());
        if !keeper.is_due(read, Instant::now()) {
            return Ok(());
        }
        if !has_begun {
            keeper.due = Instant::now() + NOT_BEGUN;
            return Ok(());
        }
        if keeper.aside.is_full() {
            bail!("older ones are not gone yet: their disk does not answer");
        }
        if !self.has_room_for_image(index) {
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

    fn advance_image(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let is_away = rank.is_away();
        let Some(keeper) = rank.keeper.as_mut() else { return Ok(()) };
        match &mut keeper.state {
            State::Resting if is_away => Ok(()),
            State::Resting => self.ask_for_image(index),
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
            State::Preparing { thread, began, .. } => {
                let is_over = thread.is_finished() || began.elapsed() >= TAKING_MAX;
                if is_over { self.end_preparing(index) } else { Ok(()) }
            }
            State::Taking(Taking { ended: Some(_), .. }) => self.seal_image(index),
            // Killed meanwhile: of its threads that CRIU holds it gets no rid while that waits for them, and neither does anybody hear
            // of its end.
            State::Taking(_) if sys::is_over(rank.pid) => {
                keeper.end_life();
                Ok(())
            }
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
                let blind = keeper.finish(thread)?;
                if let (true, Some(image)) =
                    (std::mem::take(&mut keeper.is_awaited), keeper.images.back())
                {
                    let (number, bytes) = (image.about.number, paths::bytes(image.bytes()));
                    let text =
                        format!("checkpoint {number} of rank {} is there: {bytes}", rank.rank);
                    self.parent.send(&Message::Note { text });
                }
                self.tell_blind(&blind);
                Ok(())
            }
            State::Sending { thread, .. } if thread.is_finished() => {
                if let Some((number, sent)) = keeper.finish_sending() {
                    let number = format!("checkpoint {number} of rank {}", rank.rank);
                    self.tell_blind(sent.as_deref().unwrap_or(&[]));
                    self.tell_of_store(&number, sent.map(drop));
                }
                Ok(())
            }
            State::Sealing { .. } | State::Sending { .. } | State::CutOff { .. } => Ok(()),
        }
    }

    /// The user hears once when the store takes no images any more, and once when it does again.
    fn tell_of_store(&mut self, name: &str, sent: Result<()>) {
        let was_gone = std::mem::replace(&mut self.is_store_gone, sent.is_err());
        let text = match sent {
            Err(error) if !was_gone => format!(
                "{name} is on its node alone: the store has not taken it: {error:#}; more of them are not told"
            ),
            Ok(()) if was_gone => format!("the store takes checkpoints again: {name} is there"),
            _ => return,
        };
        self.parent.send(&Message::Note { text });
    }

    /// Images of these ranks are wanted before it is time.
    pub(in super::super) fn want_images(&mut self, rank: Option<u32>, asker: Asker) {
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
        let taken: u64 =
            self.ranks.iter().filter_map(|rank| rank.keeper.as_ref().map(Keeper::bytes)).sum();
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

    /// The rank stands still: all that it has said is taken note of, and a folder is made for its image.
    fn take_image(&mut self, index: usize, word: [u64; 4]) -> Result<()> {
        self.handle_pmi(index);
        self.drain_servers();
        self.read_all_output(index);
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
        let clocks = rank.clocks.as_ref().map_or(0, |clocks| clocks.told());
        let standing = Standing { intakes, sent, looks, asked, stage, printed, read, clocks };
        let (folder, pid, ends) = (keeper.folder.clone(), rank.pid, line.ends);
        keeper.expected = sys::resident_bytes(pid);
        let thread = aside::start("prepare", move || Place::prepare(&folder, number, pid))?;
        let about = About { number, pid, standing, ends, shared: Vec::new() };
        keeper.state = State::Preparing { thread, about, began: Instant::now() };
        Ok(())
    }

    /// Whatever has become of the folder, the rank waits.
    fn end_preparing(&mut self, index: usize) -> Result<()> {
        let outcome = self.begin_dump(index);
        if outcome.is_err() {
            self.send_on(index)?;
        }
        outcome
    }

    /// There is a folder for the image: CRIU begins.
    fn begin_dump(&mut self, index: usize) -> Result<()> {
        let Some(keeper) = self.ranks[index].keeper.as_mut() else { return Ok(()) };
        let (thread, about, began) = match std::mem::replace(&mut keeper.state, State::Resting) {
            State::Preparing { thread, about, began } if thread.is_finished() => {
                (thread, about, began)
            }
            late => {
                keeper.state = late;
                keeper.end_life();
                bail!("there was no folder for it after {} s", TAKING_MAX.as_secs());
            }
        };
        let place = thread.join().unwrap_or_else(|_| bail!("there is no folder for it"))?;
        let criu = match criu::dump(&keeper.wish.tool, about.pid, &about.ends, &place.folder) {
            Ok(criu) => criu.id(),
            Err(error) => {
                keeper.aside.go(keeper.expected, move || place.remove());
                return Err(error);
            }
        };
        let Place { folder, shared } = place;
        let about = About { shared, ..about };
        let (ended, is_late) = (None, false);
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
            let copies = if is_late { 0 } else { sys::copies(rank.pid) };
            let thread = aside::start("seal", move || aside::failure(&folder, is_late, copies))?;
            keeper.state = State::Sealing { thread };
            return Ok(());
        }
        let text = format!(
            "checkpoint {} of rank {}: it stood still for {} ms",
            about.number,
            rank.rank,
            began.elapsed().as_millis()
        );
        let wish = keeper.wish.clone();
        let thread = aside::start("seal", move || Sealed::seal(&folder, about, &wish))?;
        keeper.state = State::Sealing { thread };
        if self.assignment.as_ref().is_some_and(|own| own.job.verbose) {
            self.parent.send(&Message::Note { text });
        }
        Ok(())
    }

    fn send_on(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        let start = rank.again.as_ref().map_or(0, Again::incarnation);
        let Some(keeper) = &mut rank.keeper else { return Ok(()) };
        let (number, kept) = (keeper.number, keeper.promise());
        if let Some(oldest) = keeper.oldest() {
            rank.input.forget(oldest.read);
            rank.clocks.iter().for_each(|clocks| clocks.cut(oldest.clocks));
        }
        rank.send_on(number, start, kept)
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
