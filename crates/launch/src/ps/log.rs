//! `landbridge log`: what relays keep of the ranks of running jobs, so that these can come back.
//!
//! Asked in the way of `landbridge ps`: launchers ask their agents, and these their relays.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

use super::desk::{self, Account, Question};
use super::{ask_all, head, name, print, short};
use crate::cli::{LogArguments, LogCommand};

/// Spawned ranks that are named to somebody who has asked for one that is not there.
const NAMED_MAX: usize = 8;

/// Runs the command; its exit code.
pub fn run(arguments: &LogArguments) -> Result<i32> {
    let wanted = arguments.job.as_deref().unwrap_or_default();
    let (accounts, question) = match &arguments.command {
        None => (ask(wanted, Question::Log)?, Question::Log),
        Some(LogCommand::Show { rank, from, count }) => {
            let found = ask(wanted, Question::Roll)?;
            let [account] = &found[..] else {
                bail!("there are {} such jobs: say which with --job", found.len());
            };
            let rank = process_of(account, rank)?;
            let question = Question::Story { rank, from: *from, count: *count };
            (ask(&account.job, question)?, question)
        }
    };
    if arguments.json {
        return print(&(serde_json::to_string_pretty(&accounts)? + "\n"));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let texts = accounts.iter().map(|account| text(account, question, now.as_secs()));
    print(&texts.collect::<Vec<_>>().join("\n"))
}

fn ask(wanted: &str, question: Question) -> Result<Vec<Account>> {
    let answers = ask_all(&desk::directory(), wanted, question)?;
    answers.heard("this user runs no such job from this machine")
}

/// The number in the job of a rank that people call so.
fn process_of(account: &Account, rank: &str) -> Result<u32> {
    match account.ranks.iter().find(|line| line.rank == rank) {
        Some(line) => Ok(line.process),
        None => {
            bail!("job {} has no rank {rank}: {}", short(&account.job), ranks_of(account))
        }
    }
}

/// Which ranks a job has.
fn ranks_of(account: &Account) -> String {
    let names = account.ranks.iter().map(|line| line.rank.as_str());
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

fn text(account: &Account, question: Question, now: u64) -> String {
    let name = |process| name(account, process);
    let record = account.record.clone().unwrap_or_default();
    let body = match question {
        Question::Story { .. } => record.story(|process| format!("rank {}", name(process))),
        _ => record.table(name),
    };
    head(account, now) + &body
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ranks: &[&str]) -> Account {
        let line = |(process, rank): (usize, &&str)| {
            format!(
                r#"{{"rank": "{rank}", "process": {process}, "pid": 7, "node": "n", "cluster": "c",
                    "incarnation": 0, "state": "running", "ending": null}}"#
            )
        };
        let lines: Vec<String> = ranks.iter().enumerate().map(line).collect();
        let text = format!(
            r#"{{"job": "0123456789abcdef", "launcher": 7, "program": "./a", "began": 0, "recover": true,
                "restarts": 0, "ranks": [{}]}}"#,
            lines.join(",")
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_rank_that_is_not_there_is_told_with_those_that_are() {
        let said = |account: &Account, rank| process_of(account, rank).unwrap_err().to_string();
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
