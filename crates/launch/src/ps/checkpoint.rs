//! `landbridge checkpoint`: takes checkpoints of ranks of running jobs before the next regular
//! checkpoint.
//!
//! The command queries launchers as `landbridge ps` does. Launchers pass the request on to their
//! agents, and answer before the checkpoints are complete.

use anyhow::{Result, bail};

use super::status_socket::{self, JobStatus, StatusQuery};
use super::{ask_all, print};
use crate::cli::CheckpointArguments;

/// Runs the command and returns its exit code.
pub fn run(arguments: &CheckpointArguments) -> Result<i32> {
    let wanted = arguments.job.as_deref().unwrap_or_default();
    let question = StatusQuery::Checkpoint { rank: arguments.rank };
    let answers = ask_all(&status_socket::directory(), wanted, question)?;
    let jobs = answers.answered("this user runs no such job from this machine")?;
    let described: Vec<String> =
        jobs.iter().filter_map(|it| described(it, arguments.rank)).collect();
    if described.is_empty() {
        bail!("{}", why_not(&jobs, arguments.rank));
    }
    print(&described.concat())
}

fn described(status: &JobStatus, rank: Option<u32>) -> Option<String> {
    let has_it = |rank: u32| status.ranks.iter().any(|line| line.process == rank);
    let who = match rank {
        None => "all ranks are".to_string(),
        Some(rank) if has_it(rank) => format!("rank {rank} is"),
        Some(_) => return None,
    };
    let text = format!("job {}: {who} asked for an image\n", &status.job);
    status.checkpoints.then_some(text)
}

fn why_not(jobs: &[JobStatus], rank: Option<u32>) -> String {
    let Some(rank) = rank.filter(|_| jobs.iter().any(|status| status.checkpoints)) else {
        return "no images are taken of it: it was started without --recover and --checkpoint"
            .into();
    };
    format!("it has no rank {rank}")
}
