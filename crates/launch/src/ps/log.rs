//! `landbridge log`: the message logs that relays hold for the ranks of running jobs.
//!
//! The command queries launchers as `landbridge ps` does; launchers query their agents, and agents
//! query their relays.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

use super::log_status::NOTHING_KEPT;
use super::status_socket::{self, JobStatus, StatusQuery};
use super::{ask_all, head, name, print, short};
use crate::cli::{LogArguments, LogCommand};

/// Spawned ranks that an error text lists at most when the user has asked for a rank that does not
/// exist.
const NAMED_MAX: usize = 8;

/// Runs the command and returns its exit code.
pub fn run(arguments: &LogArguments) -> Result<i32> {
    let wanted = arguments.job.as_deref().unwrap_or_default();
    let (jobs, question) = match &arguments.command {
        None => (ask(wanted, StatusQuery::Log)?, StatusQuery::Log),
        Some(LogCommand::Show { rank, from, count }) => {
            let found = ask(wanted, StatusQuery::Ranks)?;
            let status = the_job_with_a_log(&found)?;
            let rank = process_of(status, rank)?;
            let question = StatusQuery::Deliveries { rank, from: *from, count: *count };
            (ask(&status.job, question)?, question)
        }
    };
    if arguments.json {
        return print(&(serde_json::to_string_pretty(&jobs)? + "\n"));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let texts = jobs.iter().map(|status| text(status, question, now.as_secs()));
    print(&texts.collect::<Vec<_>>().join("\n"))
}

fn ask(wanted: &str, question: StatusQuery) -> Result<Vec<JobStatus>> {
    let answers = ask_all(&status_socket::directory(), wanted, question)?;
    answers.answered("this user runs no such job from this machine")
}

/// The only one of these jobs whose messages are logged.
fn the_job_with_a_log(jobs: &[JobStatus]) -> Result<&JobStatus> {
    let logged: Vec<&JobStatus> = jobs.iter().filter(|status| status.recover).collect();
    let line = |status: &&JobStatus| format!("  {}  {}", short(&status.job), status.program);
    match (&logged[..], jobs) {
        ([only], _) => Ok(only),
        ([], [only]) => bail!("job {}: {}", short(&only.job), NOTHING_KEPT),
        ([], _) => bail!("none of these {} jobs runs with --recover", jobs.len()),
        _ => bail!(
            "{} jobs run with --recover: say which with --job\n{}",
            logged.len(),
            logged.iter().map(line).collect::<Vec<_>>().join("\n")
        ),
    }
}

/// The number, in the job, of the rank with this name.
fn process_of(status: &JobStatus, rank: &str) -> Result<u32> {
    match status.ranks.iter().find(|line| line.rank == rank) {
        Some(line) => Ok(line.process),
        None => {
            bail!("job {} has no rank {rank}: {}", short(&status.job), ranks_of(status))
        }
    }
}

/// The ranks of a job, for an error text.
fn ranks_of(status: &JobStatus) -> String {
    let names = status.ranks.iter().map(|line| line.rank.as_str());
    let (spawned, own): (Vec<&str>, Vec<&str>) = names.partition(|name| name.contains(':'));
    let own = match own[..] {
        [] => "the job has none yet".to_string(),
        [only] => format!("the job has rank {only} alone"),
        [first, .., last] => format!("the job has ranks {first} to {last}"),
    };
    let (named, more) = spawned.split_at(spawned.len().min(NAMED_MAX));
    match (named, more) {
        ([], _) => own,
        (_, []) => format!("{own}, and spawned ones: {}", named.join(", ")),
        _ => format!("{own}, and spawned ones: {} and {} more", named.join(", "), more.len()),
    }
}

fn text(status: &JobStatus, question: StatusQuery, now: u64) -> String {
    let name = |process| name(status, process);
    let log_status = status.log_status.clone().unwrap_or_default();
    let body = match question {
        StatusQuery::Deliveries { .. } => {
            log_status.deliveries_text(|process| format!("rank {}", name(process)))
        }
        _ => log_status.table(name),
    };
    head(status, now) + &body
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ranks: &[&str]) -> JobStatus {
        let line = |(process, rank): (usize, &&str)| {
            format!(
                r#"{{"rank": "{rank}", "process": {process}, "pid": 7, "node": "n", "cluster": "c",
                    "incarnation": 0, "state": "running", "ending": null}}"#
            )
        };
        let lines: Vec<String> = ranks.iter().enumerate().map(line).collect();
        let text = format!(
            r#"{{"job": "0123456789abcdef", "launcher": 7, "program": "./a", "began": 0,
                "recover": true, "restarts": 0, "ranks": [{}]}}"#,
            lines.join(",")
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn only_jobs_with_a_log_are_asked_about_it() {
        let logged = job(&["0"]);
        let without = JobStatus { recover: false, job: "fedc".into(), ..logged.clone() };
        let said = |jobs: &[JobStatus]| the_job_with_a_log(jobs).unwrap_err().to_string();
        assert_eq!(the_job_with_a_log(&[without.clone(), logged.clone()]).unwrap(), &logged);
        let line = "job fedc: its ranks have no message logs (it runs without --recover)";
        assert_eq!(said(std::slice::from_ref(&without)), line);
        let line = "none of these 2 jobs runs with --recover";
        assert_eq!(said(&[without.clone(), without.clone()]), line);
        let other =
            JobStatus { job: "89abcdef01".into(), program: "./b x".into(), ..logged.clone() };
        let line =
            "2 jobs run with --recover: say which with --job\n  01234567  ./a\n  89abcdef  ./b x";
        assert_eq!(said(&[logged, without, other]), line);
    }

    #[test]
    fn a_missing_rank_is_reported_with_those_that_exist() {
        let said = |status: &JobStatus, rank| process_of(status, rank).unwrap_err().to_string();
        let four = job(&["0", "1", "2", "3"]);
        assert_eq!(process_of(&four, "3").unwrap(), 3);
        assert_eq!(said(&four, "99"), "job 01234567 has no rank 99: the job has ranks 0 to 3");
        assert!(said(&job(&["0"]), "1").ends_with("the job has rank 0 alone"));
        let spawned = job(&["0", "1", "1:0", "1:1"]);
        assert_eq!(process_of(&spawned, "1:1").unwrap(), 3);
        assert!(said(&spawned, "3").ends_with("ranks 0 to 1, and spawned ones: 1:0, 1:1"));
        let many: Vec<String> = (0..10).map(|rank| format!("1:{rank}")).collect();
        let many =
            job(&[&["0"], &many.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat());
        assert!(said(&many, "1").ends_with("1:7 and 2 more"));
    }
}
