//! `landbridge ps`: the running jobs that this user has started on this machine, and their ranks.
//!
//! Each `landbridge run` answers for its own job (`status_socket`) with the reports of its agents
//! (`rank_table`). This command queries all launchers, removes files of launchers that have ended,
//! and prints a table or JSON. Process ids of a job that was started in another pid namespace of
//! the same kernel, such as a lab, are translated to the namespace of this command.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `paths` | the paths of a job's ranks |
//! | `log_status` | the message logs of a job |
//! | `rank_table` | process, incarnation and state of each rank |
//! | `status_socket` | the socket on which a launcher answers |
//! | `checkpoint` | `landbridge checkpoint` |
//! | `log` | `landbridge log` |

pub mod checkpoint;
pub mod log;
pub mod log_status;
pub mod paths;
pub mod rank_table;
pub mod status_socket;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::DirEntry;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::cli::PsArguments;
use crate::sys;
use status_socket::{JobStatus, StatusQuery};

/// Time that a launcher has to answer; a launcher that takes longer is stopped or overloaded.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two attempts to connect to a launcher whose listening queue is full.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum age of a socket whose name begins with a dot: a launcher renames its socket sooner.
const UNREADY_MAX: Duration = Duration::from_secs(60);
/// Bytes of an answer at most; the answer for a job of 100 000 ranks takes a third of this bound.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Bytes of an answer that one read takes at most.
const PIECE_BYTES: usize = 64 * 1024;

/// Runs the command and returns its exit code.
pub fn run(arguments: &PsArguments) -> Result<i32> {
    let wanted = arguments.wanted();
    let question = if arguments.paths { StatusQuery::Paths } else { StatusQuery::Ranks };
    let answers = ask_all(&status_socket::directory(), wanted, question)?;
    let is_unanswered = !answers.unanswered.is_empty();
    let jobs = match wanted {
        "" => answers.report_unanswered(),
        _ => answers.answered(&format!(
            "no job whose name begins with {wanted} is run by this user from here"
        ))?,
    };
    let text = match (arguments.json, jobs.is_empty()) {
        (true, _) => serde_json::to_string_pretty(&jobs)? + "\n",
        (false, true) => {
            if !is_unanswered {
                eprintln!("landbridge: this user runs no job from this machine");
            }
            String::new()
        }
        (false, false) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let tables = jobs.iter().map(|status| match &status.paths {
                Some(paths) => {
                    let name = |process| name(status, process);
                    let text = paths.text(arguments.all, name);
                    head(status, now.as_secs()) + &text + why_no_paths(status, paths)
                }
                None => table(status, now.as_secs()),
            });
            tables.collect::<Vec<_>>().join("\n")
        }
    };
    print(&text)
}

fn print(text: &str) -> Result<i32> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader of the output may close the pipe early.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(0),
        result => Ok(result.map(|()| 0)?),
    }
}

/// The answers of launchers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct JobAnswers {
    /// The status of each job, the oldest first.
    pub jobs: Vec<JobStatus>,
    /// One line for each job whose launcher has not answered; such a job may still run.
    pub unanswered: Vec<String>,
}

impl JobAnswers {
    /// Prints the lines about launchers that have not answered, and returns the jobs.
    fn report_unanswered(self) -> Vec<JobStatus> {
        self.unanswered.iter().for_each(|line| eprintln!("landbridge: {line}"));
        self.jobs
    }

    /// Prints the lines about launchers that have not answered, and returns the jobs; at least one
    /// job must have answered. `nobody` is the error text if there is no such job.
    fn answered(self, nobody: &str) -> Result<Vec<JobStatus>> {
        match (self.jobs.is_empty(), self.unanswered.is_empty()) {
            (true, true) => bail!("{nobody}"),
            (true, false) => bail!("{}", self.unanswered.join("\n")),
            (false, _) => Ok(self.report_unanswered()),
        }
    }
}

/// Queries the launcher of every job whose id begins with `wanted`. The function removes socket
/// files that have no listener. Other files of the directory, such as the user's key, stay.
pub fn ask_all(directory: &Path, wanted: &str, question: StatusQuery) -> Result<JobAnswers> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(JobAnswers::default()),
        Err(error) => return Err(error).context("cannot look for jobs"),
    };
    status_socket::check(directory)?;
    let mut asked = Vec::new();
    let is_socket = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_socket());
    for path in entries.flatten().filter(is_socket).map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with('.') {
            remove_unready(&path);
        } else if name.starts_with(wanted) {
            asked.push((name.to_string(), path));
        }
    }
    // One thread queries each launcher, so a stopped launcher does not delay the answers of others.
    let heard: Vec<_> = std::thread::scope(|scope| {
        let ask = |(name, path): (String, PathBuf)| {
            scope.spawn(move || (name, ask(&path, question, PATIENCE)))
        };
        let asked: Vec<_> = asked.into_iter().map(ask).collect();
        asked.into_iter().filter_map(|asking| asking.join().ok()).collect()
    });
    let mut answers = JobAnswers::default();
    for (name, answer) in heard {
        match answer {
            Ok(status) => answers.jobs.extend(status),
            Err(error) => answers.unanswered.push(format!("job {}: {error:#}", short(&name))),
        }
    }
    answers.jobs.sort_by(|a, b| (a.began, &a.job).cmp(&(b.began, &b.job)));
    answers.unanswered.sort();
    Ok(answers)
}

/// The first 8 characters of a job's id, which tables show.
fn short(job: &str) -> &str {
    job.get(..8).unwrap_or(job)
}

/// Removes the socket file, whose name begins with a dot, of a launcher that was killed before it
/// was ready.
fn remove_unready(path: &Path) {
    let age = path.metadata().and_then(|about| about.modified()).ok();
    let age = age.and_then(|since| SystemTime::now().duration_since(since).ok());
    if age.is_some_and(|age| age > UNREADY_MAX) {
        let _ = std::fs::remove_file(path);
    }
}

/// The answer of a launcher within `patience`; `None` if the launcher has ended.
fn ask(path: &Path, question: StatusQuery, patience: Duration) -> Result<Option<JobStatus>> {
    let deadline = Instant::now() + patience;
    let Some(mut stream) = connect(path, deadline)? else { return Ok(None) };
    let (launcher, user) = sys::peer(&stream)?;
    if user != sys::user() {
        bail!("another user answers for it");
    }
    // A new connection takes this many bytes without blocking.
    let asked = stream.write_all(question.line().as_bytes());
    let answer = match asked.and_then(|()| read_answer(stream, deadline)) {
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            bail!("{}", why_unanswered(launcher, patience));
        }
        // The launcher ended before it answered.
        Err(error)
            if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
        {
            return Ok(None);
        }
        answer => answer.context("its launcher does not answer")?,
    };
    let mut status: JobStatus = match serde_json::from_slice(&answer) {
        Ok(status) => status,
        // The launcher ended before it answered, or within its answer.
        Err(error) if error.is_eof() => return Ok(None),
        Err(error) => return Err(error).context("its launcher is of another version"),
    };
    translate_pids(&mut status, launcher);
    Ok(Some(status))
}

/// The error text for a launcher that has not answered within `patience`; process id 0 stands for a
/// launcher that is not visible in this pid namespace.
fn why_unanswered(launcher: u32, patience: Duration) -> String {
    let seconds = patience.as_secs_f64();
    match launcher {
        0 => format!("its launcher does not answer: nothing for {seconds} s"),
        pid if is_stopped(pid) => format!(
            "its launcher does not answer: process {pid} is stopped (Ctrl-Z, SIGSTOP), and goes on \
             after kill -CONT {pid}"
        ),
        pid => format!(
            "its launcher does not answer: nothing for {seconds} s of process {pid}, which may \
             have much to do"
        ),
    }
}

/// Whether a signal has stopped a process, or a debugger traces the process.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the program's name, which may hold any characters.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// Connects to a launcher; `None` if the launcher has ended.
fn connect(path: &Path, deadline: Instant) -> Result<Option<UnixStream>> {
    loop {
        match sys::connect_at_once(path) {
            Ok(stream) => return Ok(Some(stream)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(path);
                return Ok(None);
            }
            // The launcher's listening queue is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    bail!("its launcher does not answer: too many have asked it before");
                }
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(error).context("it cannot be reached"),
        }
    }
}

/// Reads the stream up to its end, at most [`ANSWER_BYTES_MAX`].
fn read_answer(mut stream: UnixStream, deadline: Instant) -> std::io::Result<Vec<u8>> {
    stream.set_nonblocking(false)?;
    let mut answer = Vec::new();
    let mut piece = [0; PIECE_BYTES];
    while answer.len() < ANSWER_BYTES_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Err(std::io::Error::other("its answer is longer than answers may be"))
}

/// Translates process ids into this pid namespace. `launcher` is the process id of the launcher, or
/// 0 if the launcher is not visible here.
fn translate_pids(status: &mut JobStatus, launcher: u32) {
    let space = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let theirs = space(&launcher.to_string());
    if theirs.is_some() && theirs == space("self") {
        return;
    }
    let seen = theirs.map(|theirs| pids_in_namespace(&theirs)).unwrap_or_default();
    status.launcher = launcher;
    for line in &mut status.ranks {
        line.pid = line.pid.and_then(|pid| seen.get(&pid).copied());
    }
}

/// Maps the process ids inside a pid namespace to the process ids here.
fn pids_in_namespace(space: &Path) -> BTreeMap<u32, u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return BTreeMap::new() };
    let numbers = entries.flatten().filter_map(|entry| {
        let here: u32 = entry.file_name().to_str()?.parse().ok()?;
        let is_it = std::fs::read_link(entry.path().join("ns/pid")).ok()? == space;
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let there = innermost_pid(&status).filter(|_| is_it)?;
        Some((there, here))
    });
    numbers.collect()
}

/// The last process id in the `NSpid` line of `/proc/PID/status`.
fn innermost_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The name of a process: `1:0` is rank 0 of the first spawned group.
fn name(status: &JobStatus, process: u32) -> String {
    let place = status.ranks.binary_search_by_key(&process, |line| line.process);
    place.map_or_else(|_| format!("({process})"), |place| status.ranks[place].rank.clone())
}

/// The line above the ranks of a job.
fn head(status: &JobStatus, now: u64) -> String {
    let JobStatus { job, launcher, program, began, recover, restarts, .. } = status;
    let seconds = now.saturating_sub(*began);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let mut text = format!(
        "job {}  {program}  launcher {}  {hours}:{minutes:02}:{:02}",
        short(job),
        shown(Some(*launcher).filter(|&pid| pid > 0)),
        seconds % 60
    );
    if *recover {
        let _ = write!(text, "  --recover, restarts: {restarts}");
    }
    text.push('\n');
    text
}

/// The line below the paths of a job that says why there are none.
fn why_no_paths(status: &JobStatus, paths: &paths::Paths) -> &'static str {
    match status.local_by_library && paths.sums.is_empty() {
        true => {
            "  the MPI library carries the messages of ranks on one node (local=library); --set \
             local=own shows them\n"
        }
        false => "",
    }
}

/// A table for users. A column without any value is left out.
fn table(status: &JobStatus, now: u64) -> String {
    let ranks = &status.ranks;
    let row = |line: &rank_table::RankRow| {
        let state = match (&line.ending, line.percent) {
            (Some(ending), _) => format!("{} ({ending})", line.state.words()),
            (None, Some(percent)) => format!("{} {percent} %", line.state.words()),
            (None, None) => line.state.words().to_string(),
        };
        let (node, cluster) = (line.node.clone(), line.cluster.clone());
        [line.rank.clone(), shown(line.pid), node, cluster, line.incarnation.to_string(), state]
    };
    let names = ["rank", "pid", "node", "cluster", "incarnation", "state"].map(String::from);
    let mut rows: Vec<Vec<String>> = vec![names.into()];
    rows.extend(ranks.iter().map(|line| row(line).into()));
    let mut add = |name: &str, cell: &dyn Fn(&rank_table::RankRow) -> Option<String>| {
        let cells: Vec<Option<String>> = ranks.iter().map(cell).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_string()));
            let column = std::iter::once(name.to_string()).chain(cells);
            rows.iter_mut().zip(column).for_each(|(row, cell)| row.push(cell));
        }
    };
    add("logged", &|line| line.logged_bytes.map(paths::bytes));
    add("newest checkpoint", &|line| {
        let image = line.image?;
        Some(format!("{}, {} s old, {}", image.number, image.age_s, paths::bytes(image.bytes)))
    });
    let mut text = head(status, now);
    paths::write_table(&mut text, &rows);
    text
}

fn shown(pid: Option<u32>) -> String {
    pid.map_or("-".to_string(), |pid| pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::rank_table::{RankRow, RankState};
    use super::*;

    #[test]
    fn sockets_of_launchers_that_ended_are_removed_and_nothing_else_is() {
        let name = format!("landbridge-ps-kept-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let secret = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&directory, secret).unwrap();
        std::fs::write(directory.join("key"), "secret").unwrap();
        std::fs::write(directory.join("notes.txt"), "").unwrap();
        drop(std::os::unix::net::UnixListener::bind(directory.join("0123")).unwrap());
        let answers = ask_all(&directory, "", StatusQuery::Ranks).unwrap();
        assert!(answers.jobs.is_empty() && answers.unanswered.is_empty());
        let left = std::fs::read_dir(&directory).unwrap().flatten().map(|entry| entry.file_name());
        let mut left: Vec<_> = left.collect();
        left.sort();
        assert_eq!(left, ["key", "notes.txt"]);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    fn status() -> JobStatus {
        let line = |process: u32, state, percent, ending: Option<&str>| RankRow {
            rank: process.to_string(),
            process,
            pid: ending.is_none().then_some(4710 + process),
            node: "n1".into(),
            cluster: "here".into(),
            incarnation: process,
            state,
            percent,
            ending: ending.map(String::from),
            image: None,
            logged_bytes: None,
        };
        JobStatus {
            job: "0123456789abcdef".into(),
            launcher: std::process::id(),
            program: "./a.out x".into(),
            began: 1_000,
            recover: true,
            checkpoints: false,
            local_by_library: true,
            restarts: 2,
            ranks: vec![
                line(0, RankState::Running, None, None),
                line(1, RankState::Restarting, None, None),
                line(2, RankState::Ended, None, Some("exit code 0")),
                line(3, RankState::Replaying, Some(43), None),
            ],
            paths: None,
            log_status: None,
        }
    }

    #[test]
    fn the_table_says_where_each_rank_is_and_how_it_goes() {
        let launcher = std::process::id();
        let expected = format!(
            "job 01234567  ./a.out x  launcher {launcher}  1:01:01  --recover, restarts: 2\n\
             \x20 rank  pid   node  cluster  incarnation  state\n\
             \x20 0     4710  n1    here     0            running\n\
             \x20 1     4711  n1    here     1            restarting\n\
             \x20 2     -     n1    here     2            ended (exit code 0)\n\
             \x20 3     4713  n1    here     3            replaying 43 %\n"
        );
        assert_eq!(table(&status(), 1_000 + 3_661), expected);
        let mut more = status();
        more.ranks.truncate(2);
        more.ranks[0].logged_bytes = Some(1_500);
        more.ranks[1].image =
            Some(rank_table::NewestCheckpoint { number: 7, bytes: 60_000_000, age_s: 3 });
        let expected = "\x20 rank  pid   node  cluster  incarnation  state       logged   newest \
             checkpoint\n\
             \x20 0     4710  n1    here     0            running     1.50 kB  -\n\
             \x20 1     4711  n1    here     1            restarting  -        7, 3 s old, 60.0 \
             MB\n";
        let found = table(&more, 1_000);
        assert!(found.ends_with(expected), "{found}");
    }

    #[test]
    fn a_job_without_paths_says_who_carries_its_messages() {
        let by_library = status();
        let text = why_no_paths(&by_library, &paths::Paths::default());
        assert!(text.contains("(local=library); --set local=own shows them"), "{text}");
        let mut with_paths = paths::Paths::default();
        with_paths.add_statistics(0, "sum tcp 2 0 1500 0 0 0\n", false);
        assert_eq!(why_no_paths(&by_library, &with_paths), "");
        let by_provider = JobStatus { local_by_library: false, ..by_library };
        assert_eq!(why_no_paths(&by_provider, &paths::Paths::default()), "");
    }

    #[test]
    fn pids_that_cannot_be_seen_from_here_are_left_out() {
        let mut own = status();
        translate_pids(&mut own, std::process::id());
        assert_eq!(own, status());
        let mut others = status();
        translate_pids(&mut others, 0);
        assert!(others.ranks.iter().all(|line| line.pid.is_none()));
        assert_eq!(innermost_pid("Name:\tx\nNSpid:\t4711\t12\nNSpgid:\t1\n"), Some(12));
    }

    #[test]
    fn files_of_launchers_that_are_gone_are_removed() {
        let name = format!("landbridge-ps-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let status_socket = status_socket::StatusSocket::open(&directory, "there").unwrap();
        // This file is what a killed launcher leaves.
        drop(std::os::unix::net::UnixListener::bind(directory.join("gone")).unwrap());
        assert!(ask(&directory.join("gone"), StatusQuery::Ranks, PATIENCE).unwrap().is_none());
        assert!(!directory.join("gone").exists() && directory.join("there").exists());
        // One socket of a launcher that was killed before it was ready, and one of a launcher that
        // is starting.
        for (name, age) in [(".old", UNREADY_MAX * 2), (".new", Duration::ZERO)] {
            let path = directory.join(name);
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let changed = rustix::fs::Timespec { tv_sec: (now - age).as_secs() as i64, tv_nsec: 0 };
            let times = rustix::fs::Timestamps { last_access: changed, last_modification: changed };
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::utimensat(rustix::fs::CWD, &path, &times, flags).unwrap();
        }
        drop(status_socket);
        let found = ask_all(&directory, "nobody", StatusQuery::Ranks).unwrap();
        assert_eq!(found, JobAnswers::default());
        assert!(found.answered("no such job").unwrap_err().to_string().contains("no such job"));
        assert!(!directory.join(".old").exists() && directory.join(".new").exists());
        assert_eq!(ask_all(&directory, "", StatusQuery::Ranks).unwrap(), JobAnswers::default());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_launcher_that_is_stopped_is_waited_for_no_longer_than_that() {
        let name = format!("landbridge-ps-stopped-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        status_socket::make(&directory).unwrap();
        let path = directory.join("job");
        let _stopped = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let patience = Duration::from_millis(200);
        let mut held = Vec::new();
        let start = Instant::now();
        let error = ask(&path, StatusQuery::Ranks, patience).unwrap_err();
        assert!(format!("{error:#}").starts_with("its launcher does not answer"), "{error:#}");
        // The test fills the kernel's listening queue; from then on no client can connect.
        while let Ok(stream) = sys::connect_at_once(&path) {
            held.push(stream);
        }
        let error = ask(&path, StatusQuery::Ranks, patience).unwrap_err();
        assert!(format!("{error:#}").starts_with("its launcher does not answer"), "{error:#}");
        assert!(start.elapsed() > patience * 2 && start.elapsed() < Duration::from_secs(20));
        drop(held);
        let answers = ask_all(&directory, "jo", StatusQuery::Ranks).unwrap();
        let error = answers.answered("there is no such job").unwrap_err().to_string();
        assert!(error.starts_with("job job: its launcher does not answer: "), "{error}");
        assert!(!error.contains("no such job"), "{error}");
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_stopped_launcher_is_distinguished_from_a_busy_one() {
        let mut sleeper = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = sleeper.id();
        assert!(!why_unanswered(pid, PATIENCE).contains("is stopped"));
        let process = rustix::process::Pid::from_child(&sleeper);
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_stopped(pid) && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let said = why_unanswered(pid, PATIENCE);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert!(said.contains(&format!("process {pid} is stopped")), "{said}");
    }
}
