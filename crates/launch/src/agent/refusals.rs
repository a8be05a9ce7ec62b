//! Reasons why a rank whose process has ended cannot be replayed. The agent itself detects one
//! reason while the rank runs: the dynamic linker does not load the interposer into the program.
//!
//! What may never happen: a rank is restarted whose effects on files nothing has recorded.

use anyhow::{Result, bail};

use super::parent_agent::ParentAgent;
use super::pmi_replay::{EXCHANGED_BYTES_MAX, PmiReplay};
use super::rank::LocalRank;
use super::rank_recording::RankRecording;
use crate::limits;
use crate::mpi::ProgramPlan;

pub(super) fn asked_too_much(rank: u32) -> String {
    let most = EXCHANGED_BYTES_MAX >> 20;
    format!(
        "rank {rank} has exchanged more than {most} MiB with its process manager: if it is killed \
         it cannot be restarted"
    )
}

/// Fails if the rank cannot be replayed.
pub(super) fn check_replayable(rank: &LocalRank) -> Result<()> {
    if rank.recording.as_ref().is_some_and(|recording| recording.is_full()) {
        bail!("its nondeterminism record is full");
    }
    if let Some(why) = rank.recording.as_ref().and_then(|recording| recording.refusal()) {
        bail!("{why}");
    }
    if rank.replay.as_ref().is_some_and(PmiReplay::has_asked_too_much) {
        bail!("its PMI requests take more than is kept");
    }
    Ok(())
}

/// Fails if the interposer is not loaded into the program that a later incarnation of the rank
/// would start. (Another node may have another program under the same name.)
pub(super) fn check_program(rank: &LocalRank, plan: &ProgramPlan) -> Result<()> {
    match rank.recording.as_ref().zip(unseen_text(plan)) {
        Some((recording, why)) if recording.forbid_restart(&why) => bail!("{why}"),
        _ => Ok(()),
    }
}

fn unseen_text(plan: &ProgramPlan) -> Option<String> {
    let program = plan.program.display();
    plan.unrecorded.map(|why| format!("what {program} does with files is not seen ({why})"))
}

/// Forbids the restart of a rank that is about to start this program, if the interposer is not
/// loaded into the program.
pub(super) fn forbid_unseen(
    rank: u32,
    recording: Option<&RankRecording>,
    plan: &ProgramPlan,
    parent: &mut ParentAgent,
) {
    if let Some((recording, reason)) = recording.zip(unseen_text(plan)) {
        forbid_restart(rank, recording, &reason, parent);
    }
}

fn forbid_restart(
    rank: u32,
    recording: &RankRecording,
    reason: &str,
    parent: &mut ParentAgent,
) -> bool {
    let is_new = recording.forbid_restart(reason);
    if is_new {
        let text =
            format!("rank {rank}: {reason}: if this process is killed it cannot be restarted");
        parent.note(limits::advise(text));
    }
    is_new
}

impl LocalRank {
    /// Handles a sign of life of a rank in whose process the interposer should be loaded by now.
    /// Nothing has recorded what the process has done so far if the interposer is not loaded.
    pub fn check_attached(&self, parent: &mut ParentAgent) {
        let (Some(recording), Some(replay)) = (&self.recording, &self.replay) else { return };
        if recording.is_attached(replay.incarnation()) {
            return;
        }
        let (number, restarts) = (self.rank, replay.restarts);
        let reason = "nothing has recorded what it does with files: \
                      liblandbridge_interpose.so was not loaded";
        let is_new = forbid_restart(number, recording, reason, parent);
        if is_new && restarts > 0 {
            // The incarnation has not replayed, so it has repeated effects.
            parent.fail(format!("rank {number}, incarnation {restarts}: {reason}"));
        }
    }
}
