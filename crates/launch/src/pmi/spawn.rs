//! Parses a rank's spawn of processes: one `mcmd=spawn` block for each command, each with lines
//! `key=value`. In: the blocks, one after the other, to [`SpawnCollector`]. Out: a whole
//! [`Request`], or the reason why the request is refused.
//!
//! A rank gets one answer to all its blocks, so an error in one of them is reported only after the
//! last. What may never happen: the collector trusts a number of a rank before that many lines have
//! arrived.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::kvs::Delta;
use super::wire::Reply;

/// Most commands of one MPI_Comm_spawn_multiple.
pub const COMMANDS_MAX: u32 = 4096;
/// Most bytes of all blocks of one request, and thereby of the unfinished request of each rank.
pub const REQUEST_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Processes that a rank wants to start, as one group with its own MPI_COMM_WORLD.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub commands: Vec<SpawnCommand>,
    /// Keys that the new group finds in its key-value space.
    pub keys: Delta,
}

/// One command of a request. Its index in the list is its application number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnCommand {
    pub program: String,
    pub arguments: Vec<String>,
    pub count: u32,
    /// The keys and values of the command's MPI_Info.
    pub info: Vec<(String, String)>,
}

impl Request {
    /// Number of processes of the request. The sum cannot overflow: counts are 32-bit and limited
    /// to [`COMMANDS_MAX`].
    pub fn count(&self) -> u64 {
        self.commands.iter().map(|command| u64::from(command.count)).sum()
    }
}

impl SpawnCommand {
    /// The value of a key of the command's info.
    pub fn info(&self, key: &str) -> Option<&str> {
        self.info.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }
}

/// The answer line to the rank. MPICH handles only whole groups: if one process could not be
/// started, MPI_Comm_spawn fails.
pub fn answer(started: bool) -> String {
    let reply = Reply::new("spawn_result");
    match started {
        true => reply.with("rc", 0).line(),
        false => reply.with("rc", -1).with("errmsg", "spawn_failed").line(),
    }
}

/// The state of a request after a block.
#[derive(Debug, PartialEq, Eq)]
pub enum SpawnProgress {
    /// More blocks follow.
    Unfinished,
    Whole(Request),
    /// The request is refused, for this reason.
    Refused(String),
}

/// Collects the blocks of one rank.
#[derive(Default)]
pub struct SpawnCollector {
    commands: Vec<SpawnCommand>,
    keys: Delta,
    /// Blocks of the present request that have arrived.
    seen: u32,
    bytes: usize,
    problem: Option<String>,
}

impl SpawnCollector {
    /// Takes the lines of a block, without its first and last line.
    pub fn handle_block(&mut self, lines: &[String]) -> SpawnProgress {
        self.seen += 1;
        let total = match self.position(lines) {
            Ok(total) => total,
            Err(problem) => return self.refuse(problem),
        };
        if self.problem.is_none() {
            self.bytes += lines.iter().map(String::len).sum::<usize>();
            self.problem = self.take(lines).err();
        }
        if self.seen < total {
            return SpawnProgress::Unfinished;
        }
        let whole = std::mem::take(self);
        match whole.problem {
            Some(problem) => SpawnProgress::Refused(problem),
            None => SpawnProgress::Whole(Request { commands: whole.commands, keys: whole.keys }),
        }
    }

    /// Number of blocks of the request. Fails if this block is not the next one.
    fn position(&self, lines: &[String]) -> Result<u32, String> {
        let block = SpawnBlock::read(lines);
        let total = block.number("totspawns")?;
        let position = block.number("spawnssofar")?;
        if total > COMMANDS_MAX {
            return Err(format!("{total} commands at once; {COMMANDS_MAX} are the limit"));
        }
        if position != self.seen || position > total {
            return Err(format!("command {position} of {total} came as number {}", self.seen));
        }
        Ok(total)
    }

    fn refuse(&mut self, problem: String) -> SpawnProgress {
        *self = SpawnCollector::default();
        SpawnProgress::Refused(problem)
    }

    fn take(&mut self, lines: &[String]) -> Result<(), String> {
        if self.bytes > REQUEST_BYTES_MAX {
            return Err(format!("the commands are longer than {REQUEST_BYTES_MAX} bytes"));
        }
        if let Some(line) = lines.iter().find(|line| !line.contains('=')) {
            return Err(format!("{line:?} is no key and value: PMI carries no line breaks"));
        }
        let block = SpawnBlock::read(lines);
        let program = block.text("execname")?.to_string();
        if program.is_empty() {
            return Err("a command without a program".to_string());
        }
        let count = block.number("nprocs")?;
        let arguments = block.list("argcnt", |n| format!("arg{}", n + 1))?;
        let info = block.pairs("info_num", "info")?;
        self.keys.extend(block.pairs("preput_num", "preput")?);
        self.commands.push(SpawnCommand { program, arguments, count, info });
        Ok(())
    }
}

/// The keys of one block. Of two lines with the same key the first one counts.
struct SpawnBlock<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> SpawnBlock<'a> {
    fn read(lines: &'a [String]) -> SpawnBlock<'a> {
        let pairs = lines.iter().rev().filter_map(|line| line.split_once('='));
        SpawnBlock(pairs.collect())
    }

    fn text(&self, key: &str) -> Result<&'a str, String> {
        self.0.get(key).copied().ok_or_else(|| format!("{key} is missing"))
    }

    fn number(&self, key: &str) -> Result<u32, String> {
        let text = self.text(key)?;
        text.parse().map_err(|_| format!("{key}={text} is not a number that can be"))
    }

    /// As many values as the value of `count_key` says; none if `count_key` is missing.
    fn list(&self, count_key: &str, key: impl Fn(u32) -> String) -> Result<Vec<String>, String> {
        let count = if self.0.contains_key(count_key) { self.number(count_key)? } else { 0 };
        if count as usize > self.0.len() {
            return Err(format!("{count_key}={count}, and only {} lines", self.0.len()));
        }
        (0..count).map(|n| self.text(&key(n)).map(str::to_string)).collect()
    }

    fn pairs(&self, count_key: &str, name: &str) -> Result<Vec<(String, String)>, String> {
        let keys = self.list(count_key, |n| format!("{name}_key_{n}"))?;
        let values = self.list(count_key, |n| format!("{name}_val_{n}"))?;
        Ok(keys.into_iter().zip(values).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block as MPICH writes it.
    fn block(place: u32, total: u32, more: &[&str]) -> Vec<String> {
        let mut lines = vec![
            "nprocs=2".to_string(),
            "execname=/bin/worker".to_string(),
            format!("totspawns={total}"),
            format!("spawnssofar={place}"),
        ];
        lines.extend(more.iter().map(|line| line.to_string()));
        lines
    }

    const FIRST: [&str; 9] = [
        "argcnt=2",
        "arg1=a b=c\\",
        "arg2=",
        "preput_num=1",
        "preput_key_0=PARENT_ROOT_PORT_NAME",
        "preput_val_0=tag#0$connentry#0a$",
        "info_num=1",
        "info_key_0=wdir",
        "info_val_0=/tmp",
    ];

    fn problem(lines: &[String]) -> String {
        match SpawnCollector::default().handle_block(lines) {
            SpawnProgress::Refused(problem) => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn blocks_become_one_request() {
        let mut gatherer = SpawnCollector::default();
        for _ in 0..2 {
            assert_eq!(gatherer.handle_block(&block(1, 2, &FIRST)), SpawnProgress::Unfinished);
            let SpawnProgress::Whole(request) = gatherer.handle_block(&block(2, 2, &["argcnt=0"]))
            else {
                panic!("not whole");
            };
            assert_eq!(request.count(), 4);
            let port = ("PARENT_ROOT_PORT_NAME".to_string(), "tag#0$connentry#0a$".to_string());
            assert_eq!(request.keys, [port]);
            assert_eq!(request.commands[0].arguments, ["a b=c\\", ""]);
            assert_eq!(request.commands[0].info, [("wdir".to_string(), "/tmp".to_string())]);
            assert!(request.commands[1].info.is_empty());
        }
    }

    #[test]
    fn absurd_numbers_are_refused_with_the_reason() {
        let replaced = |from: &str, to: &str| {
            let lines = block(1, 1, &FIRST);
            lines.iter().map(|line| line.replace(from, to)).collect::<Vec<_>>()
        };
        for (from, to, reason) in [
            ("nprocs=2", "nprocs=-1", "nprocs=-1"),
            ("nprocs=2", "nprocs=99999999999", "nprocs=99999999999"),
            ("nprocs=2", "x=", "nprocs is missing"),
            ("execname=/bin/worker", "execname=", "without a program"),
            ("totspawns=1", "totspawns=4000000000", "4096 are the limit"),
            ("totspawns=1", "totspawns=0", "command 1 of 0"),
            ("spawnssofar=1", "spawnssofar=2", "came as number 1"),
            ("argcnt=2", "argcnt=4000000000", "argcnt=4000000000"),
            ("argcnt=2", "argcnt=3", "arg3 is missing"),
            ("preput_num=1", "preput_num=5", "preput_key_1 is missing"),
            ("info_val_0", "info_val_1", "info_val_0 is missing"),
            ("arg2=", "second line", "no line breaks"),
        ] {
            let problem = problem(&replaced(from, to));
            assert!(problem.contains(reason), "{to}: {problem}");
        }
    }

    #[test]
    fn a_fault_is_reported_after_the_last_block() {
        let mut gatherer = SpawnCollector::default();
        let lines = block(1, 3, &["argcnt=7"]);
        assert_eq!(gatherer.handle_block(&lines), SpawnProgress::Unfinished);
        assert_eq!(gatherer.handle_block(&block(2, 3, &[])), SpawnProgress::Unfinished);
        let last = gatherer.handle_block(&block(3, 3, &[]));
        assert!(matches!(last, SpawnProgress::Refused(problem) if problem.contains("argcnt=7")));
        assert!(matches!(gatherer.handle_block(&block(1, 1, &[])), SpawnProgress::Whole(_)));
    }

    #[test]
    fn an_endless_request_is_refused() {
        let mut gatherer = SpawnCollector::default();
        let long = format!("arg1={}", "x".repeat(60_000));
        let blocks = 1 + (REQUEST_BYTES_MAX / long.len()) as u32;
        for place in 1..=blocks {
            gatherer.handle_block(&block(place, blocks + 1, &["argcnt=1", &long]));
        }
        assert!(gatherer.commands.len() < blocks as usize);
        let last = gatherer.handle_block(&block(blocks + 1, blocks + 1, &[]));
        assert!(matches!(last, SpawnProgress::Refused(problem) if problem.contains("longer than")));
    }
}
