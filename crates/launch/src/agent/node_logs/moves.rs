//! What the logs of this node need beyond a usual job where ranks may move to another node, or have
//! moved to this one.
//!
//! In: images of ranks of all nodes, ranks that come from a lost node. Out: what an image is to
//! hold of the logs, what agents of other nodes are to know of images, releases. What may never
//! happen: a log is released while a thread copies it, or beyond what the images of both sides
//! cover on which other nodes may count.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use landbridge_proto::log::counts::LogCounts;
use landbridge_proto::log::image_logs::LogStarts;
use landbridge_proto::log::layout::{MOVED_AT, begins_at, control_at, discarded_at, release_at};
use landbridge_proto::log::release::{LogPositions, LogRelease};
use landbridge_proto::log::segment::LogCursor;
use rustix::io::pwrite;

use super::NodeLogs;
use crate::agent::image_logs::{LogsToCopy, MovedRanks, WHOLE_BYTES_MAX};
use crate::checkpoint::CheckpointConfig;
use crate::control::LogImages;
use crate::control::rank_state::TransferredRank;

/// What is kept for ranks that may move to another node, or have moved to this one.
#[derive(Default)]
pub struct MoveState {
    /// Ranks of this node may move: no relay is here.
    ranks_may_move: bool,
    /// By rank, also of other nodes: the number of the newest image on which others may count, and
    /// what it covers.
    newest: BTreeMap<u32, (u64, LogPositions)>,
    /// From where on logs are copied: what is released, or is to be as soon as no thread copies it.
    starts: LogStarts,
    /// Held by threads that have begun to copy logs since the last release.
    copying: Arc<()>,
    /// Releases that wait for threads which had begun before, the oldest first.
    deferred: VecDeque<DeferredRelease>,
    /// By rank of this node: the numbers of the images that other nodes know.
    announced: BTreeMap<u32, (u64, Option<u64>)>,
    /// By rank: the image with which it has begun here.
    from_elsewhere: BTreeMap<u32, ImageFromElsewhere>,
}

/// An image that was taken on another node.
struct ImageFromElsewhere {
    number: u64,
    /// By receiver: up to where the rank had sent its log.
    sent: BTreeMap<u32, u64>,
}

/// Beyond so many deferred releases, the newest ones wait together.
const DEFERRED_MAX: usize = 16;

/// Logs that are released once threads have ended which copy what is before.
struct DeferredRelease {
    /// Held by these threads.
    copying: Vec<Arc<()>>,
    /// By pair of processes, the position.
    released: BTreeMap<(usize, usize), u64>,
}

impl DeferredRelease {
    fn is_due(&self) -> bool {
        self.copying.iter().all(|copying| Arc::strong_count(copying) == 1)
    }

    /// Has this release wait for a later one.
    fn join(&mut self, later: DeferredRelease) {
        self.copying.retain(|copying| Arc::strong_count(copying) > 1);
        self.copying.extend(later.copying);
        self.released.extend(later.released);
    }
}

impl MoveState {
    /// Nothing is known. `ranks_may_move`: those of this node.
    pub fn new(ranks_may_move: bool) -> MoveState {
        MoveState { ranks_may_move, ..MoveState::default() }
    }

    fn defer(&mut self, release: DeferredRelease) {
        let is_full = self.deferred.len() >= DEFERRED_MAX;
        match self.deferred.back_mut() {
            Some(last) if is_full => last.join(release),
            _ => self.deferred.push_back(release),
        }
    }
}

impl NodeLogs {
    /// What the image of a rank that stands still is to hold of its logs, which have come to
    /// `positions`; `None`: ranks do not move.
    pub(super) fn logs_to_copy(
        &self,
        rank: u32,
        positions: LogPositions,
    ) -> Result<Option<LogsToCopy>> {
        let Some(moves) = &self.for_moves else { return Ok(None) };
        let moves = moves.borrow();
        if !moves.ranks_may_move {
            return Ok(None);
        }
        let of_peer = |peer: &usize| {
            let (_, newest) = moves.newest.get(&(*peer as u32))?;
            newest.pairs.get(&(rank as usize)).map(|pair| (*peer, *pair))
        };
        Ok(Some(LogsToCopy {
            files: self.files.try_clone()?,
            rank,
            newest: positions.pairs.keys().filter_map(of_peer).collect(),
            positions,
            starts: moves.starts.clone(),
            whole_bytes_max: WHOLE_BYTES_MAX,
            must_be_whole: false,
            _copying: moves.copying.clone(),
        }))
    }

    /// Releases logs of this node: at once, or when no thread copies what is released.
    pub(super) fn release_logs(&self, released: Vec<LogRelease>) -> Result<()> {
        let pairs = released.iter().map(|release| ((release.from, release.to), release.position));
        let released = pairs.collect();
        let due = match &self.for_moves {
            Some(moves) => self.releases_due(&mut moves.borrow_mut(), released),
            None => released,
        };
        for ((from, to), position) in due {
            self.files.write_release(release_at(from, to), position)?;
        }
        Ok(())
    }

    /// Adds releases, and returns those that need not wait. A thread that begins to copy from now
    /// on does so behind them, so they wait only for those that have begun: always some thread
    /// copies where full logs want images.
    fn releases_due(
        &self,
        moves: &mut MoveState,
        mut released: BTreeMap<(usize, usize), u64>,
    ) -> BTreeMap<(usize, usize), u64> {
        let local = self.local.borrow();
        let is_here = |process: usize| local.contains(&(process as u32));
        released.retain(|(from, to), _| is_here(*from) || is_here(*to));
        for (pair, position) in &released {
            let discarded = || self.word(discarded_at(pair.0, pair.1));
            moves.starts.advance(&self.files.region(*pair), *pair, *position, discarded);
        }
        if !released.is_empty() {
            let copying = vec![std::mem::take(&mut moves.copying)];
            moves.defer(DeferredRelease { copying, released });
        }
        let mut due = BTreeMap::new();
        while moves.deferred.front().is_some_and(DeferredRelease::is_due) {
            let released = moves.deferred.pop_front().map(|release| release.released);
            due.extend(released.unwrap_or_default());
        }
        due
    }

    /// Releases what had to wait for a thread that copied logs.
    pub fn release_deferred(&self) {
        let has_deferred = |moves: &RefCell<MoveState>| !moves.borrow().deferred.is_empty();
        if self.for_moves.as_ref().is_some_and(has_deferred) {
            // The next image of a rank tries again.
            let _ = self.release_logs(Vec::new());
        }
    }

    /// Whether an image was taken on another node: this file has of the logs what that holds, at
    /// other places, and nothing of it is released as long as the image may be needed.
    pub(super) fn is_from_elsewhere(&self, rank: u32, number: u64) -> bool {
        let moves = self.for_moves.as_ref();
        let number_of = |moves: &RefCell<MoveState>| {
            moves.borrow().from_elsewhere.get(&rank).map(|image| image.number)
        };
        moves.and_then(number_of) == Some(number)
    }

    /// What other nodes are to know of the images of a rank of this node; `numbers`: of the newest
    /// one and of the oldest one that are kept. `None`: they know it, or do not need it.
    pub fn new_images(&self, rank: u32, numbers: (u64, Option<u64>)) -> Option<LogImages> {
        let moves = &mut *self.for_moves.as_ref()?.borrow_mut();
        if moves.announced.get(&rank) == Some(&numbers) {
            return None;
        }
        let state = self.state.borrow();
        let covered = |number| state.images.get(&(rank, number)).map(|(positions, _)| positions);
        let newest = covered(numbers.0)?;
        let oldest = numbers.1.and_then(covered);
        moves.announced.insert(rank, numbers);
        moves.newest.insert(rank, (numbers.0, newest.clone()));
        let words = |positions: &LogPositions| positions.words().collect();
        let (newest, oldest) = (words(newest), oldest.map_or(Vec::new(), words));
        Some(LogImages { rank, number: numbers.0, newest, oldest })
    }

    /// Notes images of a rank of another node, and releases what they cover.
    pub fn note_other_images(&self, images: &LogImages) -> Result<()> {
        let Some(moves) = &self.for_moves else { return Ok(()) };
        let LogImages { rank, number, .. } = *images;
        let known = moves.borrow().newest.get(&rank).map_or(0, |(number, _)| *number);
        // A lower number: newer ones cannot be read.
        if self.is_local(rank) || number == known {
            return Ok(());
        }
        let parse = |words: &[u64]| {
            let word = |place: usize| words.get(place).copied().unwrap_or(u64::MAX);
            LogPositions::from_words(word).context("its logs are not as they were")
        };
        moves.borrow_mut().newest.insert(rank, (number, parse(&images.newest)?));
        if images.oldest.is_empty() {
            return Ok(());
        }
        let oldest = parse(&images.oldest)?;
        let released = self.state.borrow_mut().releases.advance(rank as usize, oldest);
        self.release_logs(released)
    }

    /// Adds a rank of this node that has moved so often, before it starts.
    pub fn add_moved(&self, rank: u32, moves: u32) -> Result<()> {
        self.add(rank..rank + 1)?;
        let moves = u64::from(moves).to_ne_bytes();
        pwrite(&self.files.memory, &moves, control_at(rank as usize) + MOVED_AT as u64)?;
        Ok(())
    }

    /// How often a rank of this node has moved to another one.
    pub fn moves(&self, rank: u32) -> u32 {
        self.word(control_at(rank as usize) + MOVED_AT as u64) as u32
    }

    /// Whether a rank of this node was on another one before.
    pub fn has_moved(&self, rank: u32) -> bool {
        self.moves(rank) > 0
    }

    /// Up to where a rank that has moved had sent its log to another one in the image with which it
    /// has begun here.
    pub fn sent_before(&self, rank: u32, to: u32) -> u64 {
        let of_image = |moves: &RefCell<MoveState>| {
            moves.borrow().from_elsewhere.get(&rank)?.sent.get(&to).copied()
        };
        // Without an image: all that is kept.
        let begins = || self.word(begins_at(rank as usize, to as usize));
        self.for_moves.as_ref().and_then(of_image).unwrap_or_else(begins)
    }

    /// A place of a log of this node up to which it is released.
    pub fn start(&self, pair: (usize, usize)) -> Option<LogCursor> {
        let moves = self.for_moves.as_ref();
        moves.map_or(Some(LogCursor::START), |moves| moves.borrow().starts.start(pair))
    }

    /// The ranks of a lost node that are to begin here, for threads that choose their images.
    pub fn moved_ranks(
        &self,
        ranks: &[TransferredRank],
        config: &CheckpointConfig,
    ) -> Result<Arc<MovedRanks>> {
        Ok(Arc::new(MovedRanks {
            file: self.files.memory.try_clone()?,
            ranks: ranks.iter().map(|one| (one.rank, one.images.clone())).collect(),
            config: config.clone(),
            chosen: OnceLock::new(),
            is_noted: AtomicBool::new(false),
        }))
    }

    /// Notes the images with which ranks of a lost node begin here, once.
    pub fn note_moved(&self, moved: &MovedRanks) {
        let (Some(Ok(chosen)), Some(moves)) = (moved.chosen.get(), &self.for_moves) else { return };
        if moved.is_noted.swap(true, Ordering::Relaxed) {
            return;
        }
        let moves = &mut *moves.borrow_mut();
        for (rank, (image, positions)) in &chosen.images {
            let number = image.header.number;
            let covered = (positions.clone(), LogCounts::default());
            self.state.borrow_mut().images.insert((*rank, number), covered);
            moves.newest.insert(*rank, (number, positions.clone()));
            let sent = positions.pairs.iter().map(|(to, pair)| (*to as u32, pair.sent)).collect();
            moves.from_elsewhere.insert(*rank, ImageFromElsewhere { number, sent });
        }
        for (rank, _) in &moved.ranks {
            // What is known of it was about the file of the lost node.
            self.state.borrow_mut().releases.begin_again(*rank as usize);
        }
        for log in &chosen.logs {
            moves.starts.begin((log.from, log.to), log.begins);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::logs;
    use super::*;

    fn logs_of_moving_ranks() -> NodeLogs {
        let mut logs = logs(0..2);
        logs.for_moves = Some(RefCell::new(MoveState::new(true)));
        logs
    }

    fn release(logs: &NodeLogs, position: u64) {
        logs.release_logs(vec![LogRelease { from: 0, to: 1, position }]).unwrap();
    }

    fn copy(logs: &NodeLogs) -> LogsToCopy {
        logs.logs_to_copy(0, LogPositions::default()).unwrap().unwrap()
    }

    /// Where full logs want images, a thread begins to copy before the last one has ended.
    #[test]
    fn a_release_waits_for_threads_that_copy_what_it_releases_and_for_no_later_ones() {
        let logs = logs_of_moving_ranks();
        let released = || {
            logs.release_deferred();
            logs.word(release_at(0, 1))
        };
        release(&logs, 100);
        assert_eq!(released(), 100, "nobody copies");
        let (first, other) = (copy(&logs), copy(&logs));
        release(&logs, 200);
        let second = copy(&logs);
        assert_eq!(released(), 100);
        release(&logs, 300);
        let third = copy(&logs);
        drop(second);
        assert_eq!(released(), 100, "those that began before the first release copy");
        drop((first, other));
        assert_eq!(released(), 300, "nobody who began before copies");
        release(&logs, 400);
        assert_eq!(released(), 300);
        drop(third);
        assert_eq!(released(), 400);
    }

    #[test]
    fn releases_that_wait_for_a_thread_without_end_are_bounded() {
        let logs = logs_of_moving_ranks();
        let endless = copy(&logs);
        let mut late = None;
        for position in 1..=10 * DEFERRED_MAX as u64 {
            late = Some(copy(&logs));
            release(&logs, position);
        }
        {
            let moves = logs.for_moves.as_ref().unwrap().borrow();
            let last = moves.deferred.back().unwrap();
            assert_eq!(moves.deferred.len(), DEFERRED_MAX);
            assert!(last.copying.len() <= 3 && last.released.len() == 1);
        }
        drop(endless);
        logs.release_deferred();
        assert_eq!(logs.word(release_at(0, 1)), DEFERRED_MAX as u64 - 1);
        drop(late);
        logs.release_deferred();
        assert_eq!(logs.word(release_at(0, 1)), 10 * DEFERRED_MAX as u64);
    }
}
