//! The relay daemon of this agent's cluster, as a child process.
//!
//! In: lines that the relay prints on stdout and stderr. Out: messages for the launcher, and lines
//! to the relay's stdin: the configuration first, then queries and orders. The open stdin is the
//! relay's lifeline: the relay ends when its stdin is closed.
//!
//! What may never happen: the agent waits for a relay that reads or prints nothing; a relay stops
//! because the agent does not read its log.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use landbridge_proto::setting::{RECOVER, RECOVER_DIR, Value};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::log_region::setting;
use super::parent_agent::ParentAgent;

use crate::control::Message;
use crate::control_stream::set_nonblocking;
use crate::ending::Ending;
use crate::folder;
use crate::settings;
use crate::sys;

/// Lines of the relay's log that the user reads when the relay dies.
const LAST_LINES: usize = 10;
/// Longest line of a relay's log, in bytes. A longer one is cut.
const LINE_BYTES_MAX: usize = 16 * 1024;
const READY: &str = "landbridge-relay: ready ";
const LINK: &str = "landbridge-relay: link ";
const WARNS: &str = "landbridge-relay: warns: ";
const LOG: &str = "landbridge-relay: log ";
/// Part of the line about a rank whose connection to the relay has ended.
const RANK_IS_AWAY: &str = " is away: ";
const CHECKPOINT_DUE: &str = "landbridge-relay: checkpoint-due process=";
const RECOVERABLE: &str = "landbridge-relay: recoverable process=";
const UNRECOVERABLE: &str = "landbridge-relay: unrecoverable process=";
const FENCED: &str = "landbridge-relay: fenced ";
/// Most unsent bytes for a relay that reads nothing; a further query is not sent.
const UNSENT_BYTES_MAX: usize = 64 * 1024;
/// Most bytes of a relay's answer to one query; the rest of the answer is dropped.
const LOG_STATUS_BYTES_MAX: usize = 16 * 1024 * 1024;

pub struct RelayProcess {
    pub pid: u32,
    pub ended: bool,
    cluster: String,
    lifeline: Option<ChildStdin>,
    /// Bytes for the relay's stdin that the pipe has not taken yet.
    unsent: VecDeque<u8>,
    stdout: Lines,
    stderr: Lines,
    last_lines: VecDeque<String>,
    /// Log lines that were dropped since the last forwarded log line.
    left_out: u64,
    log_query: Option<RunningLogQuery>,
    /// Processes whose log the relay has restarted at their checkpoint image, and which are not
    /// reported yet.
    pub recoverable: BTreeSet<u32>,
    /// Memory file into which the relay writes the recorded nondeterminism of fenced ranks; only if
    /// ranks may move.
    transfer_file: Option<File>,
    fenced: Option<FencedRecording>,
}

/// What the relay has of the record of a fenced rank: the entries lie in the file that the relay
/// shares with this agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FencedRecording {
    pub rank: u32,
    pub first: u64,
    pub bytes: u64,
    pub polls: u64,
    pub is_full: bool,
}

/// A query that the relay has received, and the lines of its answer so far.
struct RunningLogQuery {
    serial: u32,
    lines: String,
}

impl RelayProcess {
    /// Starts the relay with this configuration. `variables`: environment variables of the job,
    /// which hold the relay's settings; all else comes from the agent's own environment.
    /// `may_move_ranks`: ranks of a lost node may be restarted on another node.
    pub fn start(
        config: &str,
        cluster: &str,
        variables: &[(String, String)],
        may_move_ranks: bool,
    ) -> Result<RelayProcess> {
        let program = crate::sibling::path("landbridge-relay")?;
        if let Some(path) = log_folder(variables) {
            folder::check(&path).context("recover_dir")?;
        }
        let mut command = Command::new(&program);
        command.args(["--config", "-"]).envs(settings::for_relays(variables));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let transfer_file = may_move_ranks.then(new_transfer_file).transpose()?;
        let shared = transfer_file.as_ref().map(sys::raw);
        if let Some(number) = shared {
            command.env("LANDBRIDGE_STATE_TRANSFER", number.to_string());
        }
        let parent = std::process::id();
        // SAFETY: the closure makes only async-signal-safe calls.
        unsafe {
            command.pre_exec(move || {
                sys::prepare_child(parent, libc::SIGKILL)?;
                shared.map_or(Ok(()), sys::keep_over_exec)?;
                sys::own_session()
            });
        }
        let mut child =
            command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
        // All three streams were requested as pipes above, so `take` cannot fail.
        let mut lifeline = child.stdin.take().expect("stdin is a pipe");
        let stdout = OwnedFd::from(child.stdout.take().expect("stdout is a pipe"));
        let stderr = OwnedFd::from(child.stderr.take().expect("stderr is a pipe"));
        lifeline
            .write_all(format!("{}\n---\n", config.trim_end()).as_bytes())
            .context("it did not take its configuration")?;
        // A relay that is too busy to read a query must not block the agent.
        set_nonblocking(&lifeline)?;
        Ok(RelayProcess {
            pid: child.id(),
            ended: false,
            cluster: cluster.to_string(),
            lifeline: Some(lifeline),
            unsent: VecDeque::new(),
            stdout: Lines::new(stdout)?,
            stderr: Lines::new(stderr)?,
            last_lines: VecDeque::new(),
            left_out: 0,
            log_query: None,
            recoverable: BTreeSet::new(),
            transfer_file,
            fenced: None,
        })
    }

    pub fn outputs(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.stdout, &self.stderr]
            .into_iter()
            .filter_map(|lines| lines.fd.as_ref())
            .map(AsFd::as_fd)
    }

    /// Reads what the relay has printed since the last call, as messages for the launcher. The
    /// agent calls this function in any case, because a relay that waits for a reader of its log
    /// forwards no frames. Without `room`, log lines are dropped and counted.
    pub fn read(&mut self, room: bool) -> Vec<Message> {
        let mut messages = Vec::new();
        for line in self.stdout.read() {
            if let Some(line) = line.strip_prefix(LOG) {
                messages.extend(self.take_answer_line(line));
                continue;
            }
            if self.note_log_event(&line) {
                continue;
            }
            if let Some(rest) = line.strip_prefix(FENCED) {
                self.fenced = parse_fenced(rest);
                continue;
            }
            let warning = || parse_warning(&line, &self.cluster);
            let checkpoint_due = || {
                let rank = line.strip_prefix(CHECKPOINT_DUE)?.parse().ok()?;
                Some(Message::TakeCheckpoints { rank: Some(rank) })
            };
            match parse_ready(&line)
                .or_else(|| parse_link(&line))
                .or_else(warning)
                .or_else(checkpoint_due)
            {
                Some(message) => messages.push(message),
                None => messages.extend(self.log(line, room)),
            }
        }
        for line in self.stderr.read() {
            messages.extend(self.log(line, room));
        }
        messages
    }

    /// Notes a line about a process whose log has restarted at an image, or cannot be replayed any
    /// more; returns whether `line` is such a line.
    fn note_log_event(&mut self, line: &str) -> bool {
        let number = |start| line.strip_prefix(start).and_then(|rest| rest.parse::<u32>().ok());
        if let Some(process) = number(UNRECOVERABLE) {
            self.recoverable.remove(&process);
        }
        self.recoverable.extend(number(RECOVERABLE));
        number(UNRECOVERABLE).or_else(|| number(RECOVERABLE)).is_some()
    }

    /// Queries what the relay keeps in the logs of its processes. A query replaces the one before:
    /// a late answer to the earlier query has another serial and is ignored. Returns false if the
    /// relay cannot be queried.
    pub fn query_log(&mut self, serial: u32, question: &str) -> bool {
        self.log_query = Some(RunningLogQuery { serial, lines: String::new() });
        self.ask(serial, question)
    }

    /// Sends a query, which is so short that a pipe takes the whole line or nothing.
    fn ask(&mut self, serial: u32, question: &str) -> bool {
        self.send_line(&format!("log {serial} {question}\n"))
    }

    /// Orders the relay to refuse incarnations of the rank before this one; afterwards
    /// [`RelayProcess::take_fenced`] gives what the relay has recorded of the rank.
    pub fn fence(&mut self, rank: u32, incarnation: u32) {
        self.fenced = None;
        self.send_line(&format!("fence {rank} {incarnation}\n"));
    }

    pub fn take_fenced(&mut self, rank: u32) -> Option<FencedRecording> {
        self.fenced.take_if(|fenced| fenced.rank == rank)
    }

    /// The memory file in which the relay puts the recorded nondeterminism of the last fenced rank.
    pub fn transfer_file(&self) -> Result<&File> {
        self.transfer_file.as_ref().context("the relay was not started for ranks that may move")
    }

    /// Queues a line for the relay's stdin. Returns false if the stdin is closed or
    /// [`UNSENT_BYTES_MAX`] is reached.
    fn send_line(&mut self, line: &str) -> bool {
        let has_room = self.lifeline.is_some() && self.unsent.len() < UNSENT_BYTES_MAX;
        if has_room {
            self.unsent.extend(line.as_bytes());
            self.flush();
        }
        has_room
    }

    /// Writes as many unsent bytes as the pipe takes now.
    pub fn flush(&mut self) {
        while let (Some(lifeline), false) = (&self.lifeline, self.unsent.is_empty()) {
            match rustix::io::write(lifeline, self.unsent.as_slices().0) {
                Ok(written) => drop(self.unsent.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The agent notices the end of the relay by SIGCHLD.
                Err(_) => self.unsent.clear(),
            }
        }
    }

    /// The relay's stdin, to poll for writing, if there are unsent bytes.
    pub fn wants_write(&self) -> Option<BorrowedFd<'_>> {
        self.lifeline.as_ref().filter(|_| !self.unsent.is_empty()).map(AsFd::as_fd)
    }

    /// Takes a line of an answer, which begins with the serial of its query. The last line of a
    /// part may say that another part follows.
    fn take_answer_line(&mut self, line: &str) -> Option<Message> {
        let (number, line) = line.split_once(' ')?;
        let log_query = self.log_query.as_mut().filter(|it| number.parse() == Ok(it.serial))?;
        let serial = log_query.serial;
        let Some(next) = line.strip_prefix("end ") else {
            if log_query.lines.len() + line.len() < LOG_STATUS_BYTES_MAX {
                log_query.lines.push_str(line);
                log_query.lines.push('\n');
            }
            return None;
        };
        if next != "-" && self.ask(serial, &format!("all {next}")) {
            return None;
        }
        let RunningLogQuery { lines, .. } = self.log_query.take()?;
        Some(Message::LogStatus { serial, lines })
    }

    fn log(&mut self, line: String, room: bool) -> Vec<Message> {
        let mut messages = Vec::new();
        if !room {
            self.left_out += 1;
        } else if self.left_out > 0 {
            let (cluster, count) = (&self.cluster, std::mem::take(&mut self.left_out));
            let text = format!("relay {cluster}: {count} lines of its log are left out here");
            messages.push(Message::RelayLog { text });
        }
        if self.last_lines.len() == LAST_LINES {
            self.last_lines.pop_front();
        }
        let text = format!("relay {}: {}", self.cluster, without_name(&line));
        self.last_lines.push_back(line);
        messages.extend(room.then_some(Message::RelayLog { text }));
        messages
    }

    /// What the user reads when the relay has ended before the job.
    pub fn failure(&mut self, ending: Ending) -> String {
        self.read(false);
        let how = match ending {
            Ending::Exited(code) => format!("exited with code {code}"),
            Ending::Killed(signal) => {
                format!("was killed by signal {signal} ({})", sys::signal_name(signal))
            }
        };
        let mut text = format!("the relay of cluster {} {how}", self.cluster);
        // Ranks leave a relay whenever they end or are killed, which is no cause of its own end.
        for line in self.last_lines.iter().filter(|line| !line.contains(RANK_IS_AWAY)) {
            text.push_str("\n  ");
            text.push_str(line);
        }
        text
    }

    /// Ends the relay: closes its stdin, and kills the relay if it still runs after `grace`.
    pub fn end(&mut self, grace: Duration) {
        self.lifeline = None;
        let deadline = Instant::now() + grace;
        while !self.ended && Instant::now() < deadline {
            // Everything else of this agent has ended, so the only child to reap is the relay.
            self.ended |= sys::reap(self.pid).is_some();
            std::thread::sleep(Duration::from_millis(5));
        }
        if !self.ended {
            sys::kill(self.pid, libc::SIGKILL);
        }
    }
}

/// The cluster's relay, as the agent of its host serves it.
#[derive(Default)]
pub struct RelayService {
    /// The relay, if it runs on this node.
    pub process: Option<RelayProcess>,
    /// `HOST:PORT` of the cluster's relay, empty without one.
    pub address: String,
}

impl RelayService {
    pub fn start(&mut self, config: &str, parent: &mut ParentAgent) {
        let assignment = parent.assignment.as_ref();
        let cluster = assignment.map_or("?", |own| own.node.cluster_name.as_str());
        let variables = assignment.map_or(&[][..], |own| &own.job.environment);
        let may_move_ranks = parent.may_move_ranks() && parent.has_spares();
        match RelayProcess::start(config, cluster, variables, may_move_ranks) {
            Ok(relay) => self.process = Some(relay),
            Err(error) => {
                let text = format!("cannot start the relay of {cluster}: {error:#}");
                parent.fail(text);
            }
        }
    }

    /// Passes a log query to the relay; without a relay, or if the relay takes no query, the answer
    /// is empty.
    pub fn query_log(&mut self, serial: u32, question: &str, parent: &mut ParentAgent) {
        if !self.process.as_mut().is_some_and(|relay| relay.query_log(serial, question)) {
            parent.send(&Message::LogStatus { serial, lines: String::new() });
        }
    }

    /// Checks ranks whose log the relay has restarted at an image: the user reads at once of ranks
    /// on this node whose image is whole by now. `whole`: the number of the newest such image of a
    /// rank, or 0.
    pub fn check_recoverable_again(
        &mut self,
        whole: impl Fn(u32) -> u64,
        parent: &mut ParentAgent,
    ) {
        let Some(recoverable) = self.process.as_ref().map(|relay| relay.recoverable.clone()) else {
            return;
        };
        for rank in recoverable {
            self.report_recoverable_again(rank, whole(rank), parent);
        }
    }

    /// Reports that the rank can be restarted again, if the relay had dropped the rank's log for
    /// lack of space and has restarted the log at the rank's newest image. `number`: the number of
    /// that image, or 0: without a whole image nothing is reported.
    pub fn report_recoverable_again(&mut self, rank: u32, number: u64, parent: &mut ParentAgent) {
        let has_begun = |relay: &mut RelayProcess| relay.recoverable.remove(&rank);
        if number > 0 && self.process.as_mut().is_some_and(has_begun) {
            parent.note(format!(
                "the message log of rank {rank} is whole again from its newest checkpoint on: it \
                 can be restarted"
            ));
        }
    }
}

/// Reads `ranks=IP:PORT relays=IP:PORT` of the line that a relay prints when it is ready.
fn parse_ready(line: &str) -> Option<Message> {
    let rest = line.strip_prefix(READY)?;
    let value = |key| rest.split(' ').find_map(|word| word.strip_prefix(key));
    let (ranks, relays) = (value("ranks=")?.to_string(), value("relays=")?.to_string());
    Some(Message::RelayReady { ranks, relays })
}

/// Reads `cluster=N at=IP:PORT is=up`, or `is=WORD why=REASON`, of the line that a relay prints
/// when a link to another relay has changed.
fn parse_link(line: &str) -> Option<Message> {
    let rest = line.strip_prefix(LINK)?;
    let (facts, problem) = rest.split_once(" why=").unwrap_or((rest, ""));
    let value = |key| facts.split(' ').find_map(|word| word.strip_prefix(key));
    if (value("is=")? == "up") != problem.is_empty() {
        return None;
    }
    let cluster = value("cluster=")?.parse().ok()?;
    let (address, problem) = (value("at=")?.to_string(), problem.to_string());
    Some(Message::RelayLink { cluster, address, problem })
}

/// Reads the text of a line that the relay prints as a warning for the user.
fn parse_warning(line: &str, cluster: &str) -> Option<Message> {
    let text = line.strip_prefix(WARNS)?;
    Some(Message::Note { text: format!("relay {cluster}: {text}") })
}

/// The folder for the log segments for which the relay has no memory; `None` if the setting has its
/// default.
fn log_folder(variables: &[(String, String)]) -> Option<PathBuf> {
    let recovers = RECOVER.parse(&setting(variables, &RECOVER)) == Ok(Value::Switch(true));
    let path = setting(variables, &RECOVER_DIR);
    (recovers && path != RECOVER_DIR.default).then(|| path.into())
}

fn new_transfer_file() -> Result<File> {
    let file = rustix::fs::memfd_create("landbridge-state-transfer", MemfdFlags::CLOEXEC);
    Ok(File::from(file.context("no memory file")?))
}

/// Reads `process=N first=N bytes=N polls=N full=0` or `full=1` of the line that a relay prints
/// after a fence.
fn parse_fenced(facts: &str) -> Option<FencedRecording> {
    let value = |key| -> Option<u64> {
        facts.split(' ').find_map(|word| word.strip_prefix(key))?.strip_prefix('=')?.parse().ok()
    };
    Some(FencedRecording {
        rank: u32::try_from(value("process")?).ok()?,
        first: value("first")?,
        bytes: value("bytes")?,
        polls: value("polls")?,
        is_full: value("full")? != 0,
    })
}

/// A line of a relay's log without the program name in front, because the agent adds the name of
/// the cluster.
fn without_name(line: &str) -> &str {
    match line.strip_prefix("landbridge-relay").and_then(|rest| rest.split_once(": ")) {
        Some((number, text)) if !number.contains(' ') => text,
        _ => line,
    }
}

struct Lines {
    fd: Option<OwnedFd>,
    pending: Vec<u8>,
}

impl Lines {
    fn new(fd: OwnedFd) -> Result<Lines> {
        set_nonblocking(&fd)?;
        Ok(Lines { fd: Some(fd), pending: Vec::new() })
    }

    fn read(&mut self) -> Vec<String> {
        let mut buffer = [0; LINE_BYTES_MAX];
        while let Some(fd) = &self.fd {
            match rustix::io::read(fd, &mut buffer) {
                Ok(0) => self.fd = None,
                Ok(count) => self.pending.extend_from_slice(&buffer[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.fd = None,
            }
            if self.pending.len() > LINE_BYTES_MAX {
                break;
            }
        }
        self.take_lines()
    }

    fn take_lines(&mut self) -> Vec<String> {
        let at_end = self.fd.is_none() || self.pending.len() > LINE_BYTES_MAX;
        let whole = match self.pending.iter().rposition(|&byte| byte == b'\n') {
            Some(position) => position + 1,
            None if at_end => self.pending.len(),
            None => 0,
        };
        let bytes: Vec<u8> = self.pending.drain(..whole).collect();
        String::from_utf8_lossy(&bytes).lines().map(str::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A relay that prints nothing and has no process.
    fn idle_relay() -> RelayProcess {
        let empty = || Lines { fd: None, pending: Vec::new() };
        RelayProcess {
            pid: 0,
            ended: false,
            cluster: "c0".to_string(),
            lifeline: None,
            unsent: VecDeque::new(),
            transfer_file: None,
            fenced: None,
            stdout: empty(),
            stderr: empty(),
            last_lines: VecDeque::new(),
            left_out: 0,
            log_query: None,
            recoverable: BTreeSet::new(),
        }
    }

    #[test]
    fn a_log_nobody_takes_is_left_out_and_counted() {
        let mut relay = idle_relay();
        let mut say = |text: &str, room| {
            relay.stderr.pending.extend(text.bytes());
            let messages = relay.read(room).into_iter();
            messages.map(|message| format!("{message:?}")).collect::<Vec<_>>().join(" ")
        };
        assert!(say("one\n", true).contains("relay c0: one"));
        assert_eq!(say("two\nthree\n", false), "");
        let text = say("four\n", true);
        assert!(
            text.contains("2 lines of its log are left out") && text.contains("four"),
            "{text}"
        );
        assert!(!say("five\n", true).contains("left out"));
        let ready = say("landbridge-relay: ready ranks=a:1 relays=-\n", false);
        assert_eq!(ready, "", "only on stdout");
        assert_eq!(relay.last_lines.len(), 6);
    }

    #[test]
    fn the_end_of_a_relay_is_not_followed_by_ranks_that_have_left_it() {
        let mut relay = idle_relay();
        for line in [
            "rank 1 at 127.0.0.1:9 is away: it has closed the connection; frames for it wait",
            "linked to the relay of cluster 1 at 127.0.0.1:7",
        ] {
            relay.stderr.pending.extend(format!("landbridge-relay[0]: {line}\n").bytes());
        }
        let text = relay.failure(Ending::Killed(libc::SIGKILL));
        let expected = "the relay of cluster c0 was killed by signal 9 (SIGKILL)\n  \
                        landbridge-relay[0]: linked to the relay of cluster 1 at 127.0.0.1:7";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_grown_log_requests_a_checkpoint() {
        let mut relay = idle_relay();
        relay.stdout.pending.extend(b"landbridge-relay: checkpoint-due process=12\n");
        assert_eq!(relay.read(true), [Message::TakeCheckpoints { rank: Some(12) }]);
        relay.stdout.pending.extend(b"landbridge-relay: recoverable process=7\n");
        assert!(relay.read(true).is_empty() && relay.recoverable.contains(&7));
        relay.stdout.pending.extend(b"landbridge-relay: unrecoverable process=7\n");
        assert!(relay.read(true).is_empty() && relay.recoverable.is_empty());
    }

    #[test]
    fn the_state_of_a_fenced_rank_is_taken_once() {
        let mut relay = idle_relay();
        let line = b"landbridge-relay: fenced process=3 first=1 bytes=2 polls=4 full=0\n";
        relay.stdout.pending.extend(line);
        assert_eq!(relay.read(true), []);
        let expected = FencedRecording { rank: 3, first: 1, bytes: 2, polls: 4, is_full: false };
        assert_eq!((relay.take_fenced(2), relay.take_fenced(3)), (None, Some(expected)));
        relay.stdout.pending.extend(line);
        relay.read(true);
        relay.fence(3, 10_000);
        assert_eq!(relay.take_fenced(3), None, "that was the answer to another question");
    }

    #[test]
    fn a_relay_that_reads_nothing_blocks_nobody() {
        let mut relay = idle_relay();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::piped()).spawn().unwrap();
        relay.lifeline = child.stdin.take();
        set_nonblocking(relay.lifeline.as_ref().unwrap()).unwrap();
        let asked = (0..20_000).take_while(|serial| relay.query_log(*serial, "all 0")).count();
        assert!(asked > 5_000 && relay.unsent.len() >= UNSENT_BYTES_MAX, "{asked}");
        assert!(relay.wants_write().is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        relay.flush();
        assert!(relay.wants_write().is_none());
    }

    #[test]
    fn an_answer_of_several_parts_is_put_together() {
        let mut relay = idle_relay();
        let say = |relay: &mut RelayProcess, lines: &[&str]| {
            for line in lines {
                relay.stdout.pending.extend(format!("landbridge-relay: log {line}\n").bytes());
            }
            relay.read(true)
        };
        assert_eq!(say(&mut relay, &["7 {\"process\":0}"]), [], "nobody has asked");
        assert!(!relay.query_log(7, "all 0"), "it has no standard input any more");
        let answer =
            |serial, lines: &str| [Message::LogStatus { serial, lines: lines.to_string() }];
        assert_eq!(say(&mut relay, &["7 {}", "7 end -"]), answer(7, "{}\n"));
        assert_eq!(say(&mut relay, &["7 {}", "7 end -"]), [], "it is answered");
        relay.query_log(8, "all 0");
        assert_eq!(say(&mut relay, &["8 {\"process\":1}"]), []);
        // Another query is sent before the answer to this one is complete.
        relay.query_log(9, "one 3 4 5");
        let late = ["8 {\"process\":2}", "8 end -", "9 {}", "{}", "end -"];
        assert_eq!(say(&mut relay, &late), [], "what is late is the answer to nothing");
        assert_eq!(say(&mut relay, &["9 end -"]), answer(9, "{}\n"));
    }

    #[test]
    fn ready_line_is_read() {
        let line = "landbridge-relay: ready ranks=127.0.0.1:41 relays=-";
        let (ranks, relays) = ("127.0.0.1:41".to_string(), "-".to_string());
        assert_eq!(parse_ready(line), Some(Message::RelayReady { ranks, relays }));
        assert_eq!(parse_ready("landbridge-relay: starting"), None);
    }

    #[test]
    fn link_lines_are_read() {
        let link = |problem: &str| {
            let (address, problem) = ("192.0.2.1:7711".to_string(), problem.to_string());
            Some(Message::RelayLink { cluster: 3, address, problem })
        };
        let start = "landbridge-relay: link cluster=3 at=192.0.2.1:7711";
        let rows = [
            (" is=up", link("")),
            (" is=down why=it has closed the connection", link("it has closed the connection")),
            (" is=unreachable why=is=up", link("is=up")),
            (" is=down", None),
            ("", None),
        ];
        for (end, expected) in rows {
            assert_eq!(parse_link(&format!("{start}{end}")), expected, "{end}");
        }
    }

    #[test]
    fn what_the_user_should_know_is_said_with_the_name_of_the_relay() {
        let warning = parse_warning("landbridge-relay: warns: the disk is full", "c0");
        assert_eq!(warning, Some(Message::Note { text: "relay c0: the disk is full".to_string() }));
        assert_eq!(parse_warning("landbridge-relay: link cluster=0", "c0"), None);
    }

    #[test]
    fn a_line_of_the_log_has_one_name_in_front() {
        for (line, expected) in [
            ("landbridge-relay[0]: linked: now", "linked: now"),
            ("landbridge-relay: cannot listen", "cannot listen"),
            ("landbridge-relay is what: it is", "landbridge-relay is what: it is"),
            ("thread 'main' panicked", "thread 'main' panicked"),
        ] {
            assert_eq!(without_name(line), expected);
        }
    }
}
