//! How the ranks of a recovery unit begin again together, with their programs or from one round of
//! images ([`landbridge_proto::log::unit`]).
//!
//! | state | the unit stays in this state until |
//! |---|---|
//! | running | a process of it has ended that is to be restarted |
//! | ending | all other processes of it are ended, and images that were being written are there |
//! | laying | a thread has laid what a round of images holds of the logs between the ranks |
//!
//! Then each rank is restored or started, also one that has ended before: others may need again
//! what it has sent. Such a rank counts as ended no more.
//!
//! In: ends of processes, images. Out: processes that begin again; rounds of images. What may never
//! happen: a process of the unit runs while logs between its ranks are emptied; ranks begin again
//! with images of different rounds.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::checkpoint_scheduler::CheckpointScheduler;
use super::image_logs::RoundsToLay;
use super::node_logs::unit::{begin_round as keep_logs, end_round as keep_no_logs};
use super::parent_agent::ParentAgent;
use super::process_manager::ProcessManager;
use super::rank::LocalRank;
use super::rank_supervisor::RankSupervisor;
use super::recovery_unit::LaidRound;
use super::restore::{ImageSource, RestartCause, Restore};
use crate::checkpoint::checkpoint_image::CheckpointImage;
use crate::control::Message;
use crate::sys;

/// The longest wait for images that are being written when the unit begins again.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(2);
/// The longest time in which the images of a round may be read.
const LAY_MAX: Duration = Duration::from_secs(120);

/// The indices of the ranks of the unit.
pub fn ranks(supervisor: &RankSupervisor) -> Vec<usize> {
    let Some(unit) = &supervisor.unit else { return Vec::new() };
    let of_unit = |rank: &LocalRank| rank.group == 0 && unit.has(rank.rank);
    (0..supervisor.ranks.len()).filter(|index| of_unit(&supervisor.ranks[*index])).collect()
}

// --- rounds of images

/// Whether an image of the rank can be requested for a round.
pub fn is_ready(rank: &LocalRank) -> bool {
    let is_idle = rank.scheduler.as_ref().is_some_and(CheckpointScheduler::is_idle);
    rank.ending.is_none() && is_idle && !rank.is_replaying()
}

/// Lets the round wait that is due.
pub fn postpone(supervisor: &mut RankSupervisor) {
    for index in ranks(supervisor) {
        supervisor.ranks[index].scheduler.iter_mut().for_each(CheckpointScheduler::postpone);
    }
}

/// Begins a round of images; returns its number.
pub fn begin_round(supervisor: &mut RankSupervisor) -> Result<u64> {
    supervisor.node_logs().map_or(Ok(()), keep_logs)?;
    let Some(unit) = &mut supervisor.unit else { return Ok(0) };
    unit.newest_round += 1;
    unit.round = Some(unit.newest_round);
    Ok(unit.newest_round)
}

/// Ends the round in progress, if its images are there, or one of them will not be.
pub fn advance_round(supervisor: &mut RankSupervisor, parent: &mut ParentAgent) {
    let Some(number) = supervisor.unit.as_ref().and_then(|unit| unit.round) else { return };
    let all = ranks(supervisor);
    let scheduler = |index: &usize| supervisor.ranks[*index].scheduler.as_ref();
    // A rank that has ended meanwhile does nothing more for its image.
    let living = all.iter().filter(|index| supervisor.ranks[**index].ending.is_none());
    if living.clone().filter_map(scheduler).any(CheckpointScheduler::is_stopping) {
        return;
    }
    // The ranks go on, and what the images need of the logs is copied.
    if let Some(Err(error)) = supervisor.node_logs().map(keep_no_logs) {
        parent.note(format!("the logs of this node stay longer than they must: {error:#}"));
    }
    let living = all.iter().filter(|index| supervisor.ranks[**index].ending.is_none());
    if living.filter_map(scheduler).any(|scheduler| !scheduler.is_idle()) {
        return;
    }
    let has_image = |scheduler: &CheckpointScheduler| scheduler.images.has(number);
    let is_whole = all.iter().all(|index| scheduler(index).is_some_and(has_image));
    for index in all {
        let scheduler = supervisor.ranks[index].scheduler.iter_mut();
        scheduler.for_each(|scheduler| scheduler.images.end_round(number, is_whole));
    }
    supervisor.unit.iter_mut().for_each(|unit| unit.round = None);
}

/// Whole rounds of which each rank has its image, the newest first.
fn whole_rounds(supervisor: &RankSupervisor, unit: &[usize]) -> Vec<(u64, Vec<CheckpointImage>)> {
    let unusable = supervisor.unit.as_ref().map(|unit| &unit.unusable);
    let images = |index: &usize| {
        let scheduler = supervisor.ranks[*index].scheduler.as_ref();
        scheduler.map(|scheduler| &scheduler.images)
    };
    let Some(first) = unit.first().and_then(images) else { return Vec::new() };
    let of_round = |number: u64| {
        let all = unit.iter().map(|index| images(index)?.of_round(number).cloned());
        all.collect::<Option<Vec<_>>>().map(|all| (number, all))
    };
    let usable = |number: &u64| unusable.is_none_or(|unusable| !unusable.contains(number));
    first.rounds().into_iter().rev().filter(usable).filter_map(of_round).collect()
}

// --- beginning again

/// Advances a unit that begins again. Returns the indices of ranks that cannot.
pub fn advance(
    supervisor: &mut RankSupervisor,
    processes: &ProcessManager,
    relay: &str,
    parent: &mut ParentAgent,
) -> Vec<usize> {
    let Some(rollback) = supervisor.unit.as_mut().and_then(|unit| unit.rollback.as_mut()) else {
        return Vec::new();
    };
    match rollback.laying.take_if(|thread| thread.is_finished()) {
        Some(thread) => {
            let laid = thread.join().unwrap_or_else(|_| LaidRound {
                round: Err(anyhow!("a thread has failed")),
                notes: Vec::new(),
            });
            begin_all(supervisor, laid, processes, relay, parent)
        }
        None => {
            if rollback.laying.is_none() {
                end_all(supervisor, parent);
            }
            Vec::new()
        }
    }
}

/// Ends the processes of the unit, and begins to lay logs once none is left.
fn end_all(supervisor: &mut RankSupervisor, parent: &mut ParentAgent) {
    let all = ranks(supervisor);
    let Some(unit) = &mut supervisor.unit else { return };
    let Some(rollback) = &mut unit.rollback else { return };
    let is_late = rollback.began.elapsed() >= SEAL_WAIT_MAX;
    let mut is_waiting = false;
    for index in all.iter().copied() {
        let rank = &supervisor.ranks[index];
        // One that has ended by itself is a cause of its own.
        if rank.ending.is_none() && !sys::is_over(rank.pid) {
            rollback.ended.insert(rank.rank);
            sys::kill_group(rank.pid, libc::SIGKILL);
        }
        let is_sealing = rank.scheduler.as_ref().is_some_and(CheckpointScheduler::is_sealing);
        is_waiting |= rank.ending.is_none() || rank.is_restoring || is_sealing && !is_late;
    }
    if is_waiting {
        return;
    }
    for index in all.iter().copied() {
        let scheduler = supervisor.ranks[index].scheduler.iter_mut();
        scheduler.for_each(CheckpointScheduler::end_incarnation);
    }
    let thread = rounds_to_lay(supervisor, &all).and_then(|rounds| {
        let lay = move || lay(&rounds);
        Ok(std::thread::Builder::new().name("lay".into()).spawn(lay)?)
    });
    let Some(unit) = &mut supervisor.unit else { return };
    match thread {
        Ok(thread) => {
            if let Some(rollback) = &mut unit.rollback {
                rollback.laying = Some(thread);
            }
        }
        Err(error) => {
            unit.rollback = None;
            parent.fail(cannot_empty(&error));
        }
    }
}

fn rounds_to_lay(supervisor: &RankSupervisor, unit: &[usize]) -> Result<RoundsToLay> {
    let node_logs =
        supervisor.node_logs().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let config = unit.iter().find_map(|index| supervisor.ranks[*index].scheduler.as_ref());
    Ok(RoundsToLay {
        files: node_logs.files().try_clone()?,
        ranks: unit.iter().map(|index| supervisor.ranks[*index].rank).collect(),
        rounds: whole_rounds(supervisor, unit),
        config: config.map(|scheduler| scheduler.config().clone()),
    })
}

fn lay(rounds: &RoundsToLay) -> LaidRound {
    let mut notes = Vec::new();
    let laid = rounds.lay(Instant::now() + LAY_MAX, &mut notes);
    let round = laid.map(|place| place.map(|place| rounds.rounds[place].clone()));
    LaidRound { round, notes }
}

/// Begins all ranks again. Returns the indices of those that cannot.
fn begin_all(
    supervisor: &mut RankSupervisor,
    laid: LaidRound,
    processes: &ProcessManager,
    relay: &str,
    parent: &mut ParentAgent,
) -> Vec<usize> {
    laid.notes.into_iter().for_each(|note| parent.note(note));
    let all = ranks(supervisor);
    let rollback = supervisor.unit.as_mut().and_then(|unit| unit.rollback.take());
    let causes = rollback.map(|rollback| rollback.causes).unwrap_or_default();
    let round = match laid.round {
        Ok(round) => round,
        Err(error) => {
            parent.fail(cannot_empty(&error));
            return Vec::new();
        }
    };
    note_unit(supervisor, &all, &causes, parent);
    note_again(supervisor, &all, parent);
    let number = round.as_ref().map_or(0, |(number, _)| *number);
    for index in all.iter().copied() {
        let scheduler = supervisor.ranks[index].scheduler.iter_mut();
        scheduler.for_each(|scheduler| scheduler.images.break_rounds_after(number));
    }
    let mut failed = Vec::new();
    for (place, index) in all.into_iter().enumerate() {
        let rank = &supervisor.ranks[index];
        let number = rank.rank;
        let cause = causes.get(&number).cloned().map_or(RestartCause::OfUnit, RestartCause::Ended);
        let image = round.as_ref().map(|(_, images)| Box::new(images[place].clone()));
        let how = (cause, image.map(ImageSource::One));
        if !supervisor.begin_incarnation(index, how, processes, relay, parent) {
            if supervisor.unit.iter().any(|unit| unit.ended_before.contains_key(&number)) {
                parent.fail(ended_otherwise(number));
            }
            failed.push(index);
        }
    }
    failed
}

/// A rank that has ended does not come to the same end again: others wait for what it had sent.
pub fn ended_otherwise(rank: u32) -> String {
    format!("rank {rank} had ended, is needed again, and does not end as before")
}

fn cannot_empty(error: &anyhow::Error) -> String {
    format!("the logs of this node cannot be emptied: {error:#}")
}

/// Tells the launcher which of the ranks had ended: the job waits for them again.
fn note_again(supervisor: &mut RankSupervisor, all: &[usize], parent: &mut ParentAgent) {
    let mut ranks = Vec::new();
    for index in all {
        let rank = &mut supervisor.ranks[*index];
        if let (Some(unit), Some(ending)) = (&mut supervisor.unit, rank.reported.take()) {
            unit.ended_before.insert(rank.rank, ending);
            ranks.push(rank.rank);
        }
    }
    if !ranks.is_empty() {
        parent.send(&Message::Again { ranks });
    }
}

/// Notes which ranks begin again because of others.
fn note_unit(
    supervisor: &RankSupervisor,
    all: &[usize],
    causes: &BTreeMap<u32, String>,
    parent: &mut ParentAgent,
) {
    let others = all.iter().map(|index| supervisor.ranks[*index].rank);
    let others: Vec<String> =
        others.filter(|rank| !causes.contains_key(rank)).map(|rank| rank.to_string()).collect();
    if let (Some(cause), false) = (causes.keys().next(), others.is_empty()) {
        let node = parent.node_name().to_string();
        parent.note(format!(
            "ranks of {node} that begin again with rank {cause} (recover_unit=node): {}",
            others.join(", ")
        ));
    }
}

/// A rank of the unit cannot be restored from its image of the round: all begin again, from an
/// older round. False: the rank is of no unit, or does not begin with a round.
pub fn note_unusable(supervisor: &mut RankSupervisor, index: usize, restore: &Restore) -> bool {
    let rank = supervisor.ranks[index].rank;
    let Some(unit) = supervisor.unit.as_mut().filter(|unit| unit.has(rank)) else { return false };
    unit.unusable.extend(restore.only_image());
    match &restore.cause {
        RestartCause::Ended(how) => unit.begin_again(rank, how.clone()),
        _ => {
            let how = "could not be restored from its image".to_string();
            unit.begin_again(rank, how);
        }
    }
    true
}
