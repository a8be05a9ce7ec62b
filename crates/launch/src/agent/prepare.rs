//! What the ranks of this host run: each program of the job with its environment. Notes about a
//! program go to the user.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::parent_agent::ParentAgent;
use crate::control::spawn_order::Task;
use crate::control::{Job, Message, Node};
use crate::mpi::{self, ProgramPlan};

/// Plans of the programs that ranks of this host run, by application number.
pub(super) fn plans(
    job: &Job,
    node: &Node,
    parent: &mut ParentAgent,
) -> Result<BTreeMap<u32, ProgramPlan>> {
    let mut plans = BTreeMap::new();
    for rank in node.first_rank..node.first_rank + node.rank_count {
        let (appnum, task) = job.application(rank);
        if plans.contains_key(&appnum) {
            continue;
        }
        let plan = plan(task, job, node, parent)?;
        // Only the node with the first rank of a program reports its notes.
        if rank == 0 || job.application(rank - 1).0 != appnum {
            let lines = plan.warning.iter().chain(job.verbose.then_some(&plan.note));
            lines.for_each(|text| parent.note(text.clone()));
        }
        plans.insert(appnum, plan);
    }
    check_one_library(plans.values())?;
    Ok(plans)
}

/// The plan of one program.
pub(super) fn plan(
    task: &Task,
    job: &Job,
    node: &Node,
    parent: &mut ParentAgent,
) -> Result<ProgramPlan> {
    let plan = mpi::prepare(task, job)?;
    if let Some(text) = plan.advice.clone() {
        parent.send(&Message::Advice { node: node.name.clone(), text });
    }
    Ok(plan)
}

/// Checks that all programs use the same MPI library, because ranks of different MPI libraries
/// cannot communicate.
fn check_one_library<'a>(plans: impl Iterator<Item = &'a ProgramPlan>) -> Result<()> {
    let mut known: Option<&ProgramPlan> = None;
    for plan in plans.filter(|plan| plan.family.is_some()) {
        let first = *known.get_or_insert(plan);
        if let (Some(one), Some(other)) = (first.family, plan.family)
            && one != other
        {
            bail!(
                "{} uses {} and {} uses {}: the programs of a job need one MPI library",
                first.program.display(),
                one.name(),
                plan.program.display(),
                other.name()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpi::detect::Family;

    #[test]
    fn programs_of_two_libraries_are_no_job() {
        let plan = |family| ProgramPlan {
            program: "/a.out".into(),
            environment: Default::default(),
            note: String::new(),
            warning: None,
            advice: None,
            family,
            is_direct: true,
            leaves_local_to_library: false,
            is_ours: true,
            unrecorded: None,
        };
        let (mpich, intel) = (plan(Some(Family::Mpich)), plan(Some(Family::Intel)));
        assert!(check_one_library([&mpich, &plan(None), &mpich].into_iter()).is_ok());
        let error = check_one_library([&mpich, &plan(None), &intel].into_iter()).unwrap_err();
        assert!(error.to_string().contains("uses MPICH and /a.out uses Intel MPI"), "{error}");
    }
}
