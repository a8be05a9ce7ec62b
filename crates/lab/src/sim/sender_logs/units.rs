//! Recovery units: the processes of a node are ended, and begin again, together.
//!
//! What enters: kills, and the wish for images. What leaves: rounds of images, one of each process
//! of a node; processes that begin again with a round, or with their programs. What may never
//! happen: a process begins with an image of another round than the others, unless that fault is
//! planted.

use std::collections::BTreeMap;

use landbridge_proto::log::image_logs::{ImageLogs, choose_images};
use landbridge_proto::log::unit::UnitCursors;

use super::losses::KeptImage;
use super::{IMAGES_MAX, LogFault, LogWorld, Violation, failed};

/// Images of the processes of a node, taken one after the other.
#[derive(Clone, Default)]
pub struct ImageRound {
    number: u64,
    images: BTreeMap<usize, KeptImage>,
    /// Where the processes were that have stood still.
    cursors: BTreeMap<usize, UnitCursors>,
}

/// The rounds of the nodes, in runs with units.
#[derive(Default)]
pub struct UnitRounds {
    /// Processes of a node begin again together in this run.
    pub may_be: bool,
    /// By node: the round in progress.
    present: BTreeMap<usize, ImageRound>,
    /// By node: whole rounds, oldest first.
    whole: BTreeMap<usize, Vec<ImageRound>>,
    /// Rounds that were begun.
    begun: u64,
}

impl UnitRounds {
    /// No round was begun. `may_be`: processes of a node begin again together.
    pub fn new(may_be: bool) -> UnitRounds {
        UnitRounds { may_be, ..UnitRounds::default() }
    }
}

impl LogWorld {
    /// Whether the process takes an image: one of the round in progress, or of one that begins.
    /// `is_wanted`: an image is due.
    pub(super) fn joins_round(&mut self, rank: usize, is_wanted: bool) -> Result<bool, Violation> {
        let node = self.ranks[rank].node;
        if let Some(round) = self.units.present.get(&node) {
            let is_missing = !round.images.contains_key(&rank);
            if self.random.below(1_000) < 2 {
                // Some process has no image this time.
                self.counts.count("rounds given up");
                self.end_round(node)?;
                return Ok(false);
            }
            return Ok(is_missing && self.random.percent(50));
        }
        if is_wanted {
            self.units.begun += 1;
            let round = ImageRound { number: self.units.begun, ..ImageRound::default() };
            self.units.present.insert(node, round);
            let keeps = self.planted != Some(LogFault::UnitKeepsNothing);
            self.nodes[node].set_keeps(keeps).map_err(|error| failed(&error))?;
        }
        Ok(is_wanted)
    }

    fn end_round(&mut self, node: usize) -> Result<(), Violation> {
        self.units.present.remove(&node);
        self.nodes[node].set_keeps(false).map_err(|error| failed(&error))
    }

    /// Takes the image of a process for the round of its node, and ends the round once all are
    /// there.
    pub(super) fn take_image_of_round(&mut self, rank: usize) -> Result<(), Violation> {
        let node = self.ranks[rank].node;
        let Some((process, transport)) = self.ranks[rank].running.take() else { return Ok(()) };
        let Some(round) = self.units.present.get_mut(&node) else { return Ok(()) };
        let (number, its) = (round.number, &mut self.nodes[node]);
        let taken = process.take_image(number, its.file());
        let (process, image) = taken.map_err(|error| failed(&error))?;
        its.note_image(rank, number).map_err(|error| failed(&error))?;
        let cursors = its.unit_cursors(rank).map_err(|error| failed(&error))?;
        round.cursors.insert(rank, cursors);
        match its.unit_image_logs((rank, number), &round.cursors) {
            Ok(Some((logs, frames))) => {
                round.images.insert(rank, KeptImage { image, logs, frames });
                self.counts.count("images of rounds taken");
            }
            Ok(None) => {
                self.counts.count("rounds that little memory has ended");
                self.end_round(node)?;
            }
            // What the image needs was written over.
            Err(_) if self.planted == Some(LogFault::UnitKeepsNothing) => self.end_round(node)?,
            Err(error) => return Err(failed(&error)),
        }
        self.lose_messages(&transport);
        self.log_step(|| format!("image of {rank} in round {number} of node {node}"));
        self.open_transport(rank, process)?;
        let count = self.local(node).len();
        if self.units.present.get(&node).is_some_and(|round| round.images.len() == count) {
            self.complete_round(node)?;
        }
        Ok(())
    }

    /// The images of a round are there: what the images of the oldest kept round cover is released.
    fn complete_round(&mut self, node: usize) -> Result<(), Violation> {
        let Some(round) = self.units.present.get(&node).cloned() else { return Ok(()) };
        self.end_round(node)?;
        self.counts.count("rounds of images");
        let whole = self.units.whole.entry(node).or_default();
        whole.push(round);
        if whole.len() > IMAGES_MAX {
            whole.remove(0);
        }
        if whole.len() == IMAGES_MAX {
            let oldest = whole[0].number;
            for rank in self.local(node) {
                let released = self.nodes[node].release(rank, oldest, false);
                released.map_err(|error| failed(&error))?;
                self.ranks[rank].has_released = true;
            }
        }
        Ok(())
    }

    /// Ends all processes of a node, and lets them begin again: with the newest round, with the
    /// one before if an image of the newest is torn, or with their programs.
    pub(super) fn roll_back(&mut self, node: usize) -> Result<(), Violation> {
        let local = self.local(node);
        for rank in local.iter().copied() {
            if let Some((process, transport)) = self.ranks[rank].running.take() {
                self.counts.add_some("deliveries replayed", process.replayed);
                self.counts.count("processes ended with another one");
                self.lose_messages(&transport);
            }
        }
        self.end_round(node)?;
        self.counts.count("units begun again");
        let has_released = self.ranks[local[0]].has_released;
        let whole = self.units.whole.entry(node).or_default();
        if whole.len() == IMAGES_MAX && self.random.percent(20) {
            whole.pop();
            self.counts.count("rounds torn");
        }
        if !has_released && self.random.percent(10) {
            whole.clear();
        }
        let before = whole.len().checked_sub(2).map(|place| whole[place].clone());
        let round = whole.last().cloned();
        self.nodes[node].begin_unit_again(&local).map_err(|error| failed(&error))?;
        let Some(mut round) = round else {
            self.log_step(|| format!("node {node} begins again with its programs"));
            local.iter().for_each(|rank| self.ranks[*rank].images.clear());
            return Ok(());
        };
        self.log_step(|| format!("node {node} begins again with round {}", round.number));
        if self.planted == Some(LogFault::MixedRounds)
            && let Some(older) = before.and_then(|mut round| round.images.remove(&local[0]))
        {
            round.images.insert(local[0], older);
        }
        self.counts.count("units begun again with a round of images");
        self.lay_round(node, &round)?;
        for (rank, kept) in round.images {
            self.ranks[rank].images = vec![kept.image];
        }
        Ok(())
    }

    /// Lays what the images of a round hold of the logs between their processes.
    fn lay_round(&mut self, node: usize, round: &ImageRound) -> Result<(), Violation> {
        let logs = round.images.iter().map(|(rank, kept)| (*rank, vec![kept.logs.clone()]));
        let choice = choose_images(&logs.collect());
        let choice =
            choice.map_err(|unfit| Violation(format!("a round does not fit: {unfit:?}")))?;
        for log in &choice.logs {
            let frames = log.frames.and_then(|(rank, number)| {
                let kept = round.images.get(&rank)?;
                let ends = ImageLogs::parse(&kept.logs.emit())?.1;
                let place = |end: u64| (end - ends[0]) as usize;
                kept.frames.get(place(ends[number])..place(ends[number + 1]))
            });
            let pair = (log.from, log.to);
            let begun = self.nodes[node].begin_log(pair, log.begins, frames.unwrap_or(&[]));
            begun.map_err(|error| failed(&error))?;
        }
        Ok(())
    }
}
