//! `landbridge checkpoint`: takes checkpoints of ranks of running jobs before the next regular
//! checkpoint.
//!
//! The command queries launchers as `landbridge ps` does. Launchers pass the request on to their
//! agents, and answer before the checkpoints are complete.

use anyhow::{Result, bail};

use super::status_socket::{self, JobStatus, StatusQuery};
use super::{ask_all, print, short};
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
    let text = format!("job {}: {who} asked for a checkpoint\n", short(&status.job));
    status.checkpoints.then_some(text)
}

/// Why none of these jobs takes a checkpoint: one line for each job.
fn why_not(jobs: &[JobStatus], rank: Option<u32>) -> String {
    let line = |status: &JobStatus| {
        let job = short(&status.job);
        match rank.filter(|_| status.checkpoints) {
            Some(rank) => format!("job {job} has no rank {rank}"),
            None => format!(
                "job {job} takes no checkpoints: it was started without {}",
                if status.recover { "--checkpoint" } else { "--recover and --checkpoint" }
            ),
        }
    };
    jobs.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(recover: bool, checkpoints: bool) -> JobStatus {
        let text = format!(
            r#"{{"job": "0123456789abcdef", "launcher": 7, "program": "./a", "began": 0,
                "recover": {recover}, "checkpoints": {checkpoints}, "restarts": 0, "ranks": []}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_job_that_takes_no_checkpoint_says_what_it_lacks() {
        let started = "job 01234567 takes no checkpoints: it was started without";
        let lines = [
            (false, format!("{started} --recover and --checkpoint")),
            (true, format!("{started} --checkpoint")),
        ];
        for (recover, line) in &lines {
            assert_eq!(why_not(&[job(*recover, false)], None), *line);
            assert_eq!(why_not(&[job(*recover, false)], Some(2)), *line);
        }
        assert_eq!(why_not(&[job(true, true)], Some(2)), "job 01234567 has no rank 2");
        let both = why_not(&[job(true, true), job(true, false)], Some(2));
        assert_eq!(both, format!("job 01234567 has no rank 2\n{}", lines[1].1));
        let text = described(&job(true, true), None).unwrap();
        assert_eq!(text, "job 01234567: all ranks are asked for a checkpoint\n");
        assert_eq!(described(&job(true, true), Some(2)), None);
    }
}
