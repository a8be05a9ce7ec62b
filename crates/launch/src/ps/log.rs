//! `landbridge log`: what relays keep of the ranks of running jobs, so that these can come back.
//!
//! Asked in the way of `landbridge ps`: launchers ask their agents, and these their relays.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

use super::desk::{self, Account, Question};
use super::{accounts, head, name, print};
use crate::cli::{LogArguments, LogCommand};

/// Runs the command; its exit code.
pub fn run(arguments: &LogArguments) -> Result<i32> {
    let question = match arguments.command {
        None => Question::Log,
        Some(LogCommand::Show { rank, from, count }) => Question::Story { rank, from, count },
    };
    let wanted = arguments.job.as_deref().unwrap_or_default();
    let accounts = accounts(&desk::directory(), wanted, question)?;
    if accounts.is_empty() {
        bail!("this user runs no such job from this machine");
    }
    if question != Question::Log && accounts.len() > 1 {
        bail!("there are {} such jobs: say which with --job", accounts.len());
    }
    if arguments.json {
        return print(&(serde_json::to_string_pretty(&accounts)? + "\n"));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let texts = accounts.iter().map(|account| text(account, question, now.as_secs()));
    print(&texts.collect::<Vec<_>>().join("\n"))
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
