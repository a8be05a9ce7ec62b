//! The status socket of a running job: a Unix socket with the job's name, in a directory of this
//! user.
//!
//! A client sends a [`StatusQuery`] and gets a [`JobStatus`] as JSON, up to the end of the stream.
//! No client can block the launcher, in whose loop this module runs: every descriptor is
//! non-blocking, at most [`CLIENTS_MAX`] clients are served at once, each for at most
//! [`CLIENT_TIME`]. Only the user who runs the job gets an answer: the directory's mode keeps other
//! users out, and the socket checks the user of each client as well.
//!
//! The directory does not depend on the environment, so that every terminal finds the same
//! directory; its name contains the user id outside of any user namespace. The socket file of a
//! killed launcher stays until a `landbridge ps` finds that the file has no listener.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};

use super::log_status::LogStatus;
use super::paths::Paths;
use super::rank_table::RankRow;
use crate::sys;

/// Bytes of a request at most; every query is shorter.
const REQUEST_BYTES_MAX: usize = 72;
/// Clients that are served at the same time; further clients wait in the listening queue.
const CLIENTS_MAX: usize = 8;
/// Time that a client has to send its query and to take its answer.
const CLIENT_TIME: Duration = Duration::from_secs(5);

/// A query of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusQuery {
    /// The state of the ranks.
    Ranks,
    /// The state of the ranks and of their paths.
    Paths,
    /// The message log of each rank.
    Log,
    /// `count` determinants of a rank, from number `from` on.
    Deliveries { rank: u32, from: u64, count: u64 },
    /// The state of the ranks; and a checkpoint of one rank, or of all ranks, is taken now.
    Checkpoint { rank: Option<u32> },
}

impl StatusQuery {
    /// The request line of the query.
    pub fn line(self) -> String {
        match self {
            StatusQuery::Ranks => "ranks 1\n".to_string(),
            StatusQuery::Paths => "paths 1\n".to_string(),
            StatusQuery::Log => "log 1\n".to_string(),
            StatusQuery::Deliveries { rank, from, count } => {
                format!("deliveries 1 {rank} {from} {count}\n")
            }
            StatusQuery::Checkpoint { rank: None } => "checkpoint 1 all\n".to_string(),
            StatusQuery::Checkpoint { rank: Some(rank) } => format!("checkpoint 1 {rank}\n"),
        }
    }

    /// Parses a request line.
    fn parse(line: &[u8]) -> Option<StatusQuery> {
        let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["ranks", "1"] => Some(StatusQuery::Ranks),
            ["paths", "1"] => Some(StatusQuery::Paths),
            ["log", "1"] => Some(StatusQuery::Log),
            ["checkpoint", "1", "all"] => Some(StatusQuery::Checkpoint { rank: None }),
            ["checkpoint", "1", rank] => {
                Some(StatusQuery::Checkpoint { rank: Some(rank.parse().ok()?) })
            }
            ["deliveries", "1", rank, from, count] => Some(StatusQuery::Deliveries {
                rank: rank.parse().ok()?,
                from: from.parse().ok()?,
                count: count.parse().ok()?,
            }),
            _ => None,
        }
    }

    /// Whether further bytes may complete these bytes to a request line.
    fn may_begin(bytes: &[u8]) -> bool {
        const STARTS: [&[u8]; 5] =
            [b"ranks 1", b"paths 1", b"log 1", b"deliveries 1", b"checkpoint 1"];
        let begins = |start: &&[u8]| start.starts_with(bytes) || bytes.starts_with(start);
        bytes.len() <= REQUEST_BYTES_MAX && STARTS.iter().any(begins) && !bytes.contains(&b'\n')
    }
}

/// The answer to a query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: String,
    /// The process id of `landbridge run`.
    pub launcher: u32,
    /// The program and its arguments, shortened to one line.
    pub program: String,
    /// Start of the job in seconds since 1970.
    pub began: u64,
    /// Whether killed ranks are restarted.
    pub recover: bool,
    /// Whether checkpoints of ranks are taken.
    #[serde(default)]
    pub checkpoints: bool,
    /// Whether the MPI library, and not the provider, carries messages between ranks of one node.
    #[serde(default)]
    pub local_by_library: bool,
    /// Restarts of all ranks since the job began.
    pub restarts: u64,
    pub ranks: Vec<RankRow>,
    /// The paths of the ranks, only in the answer to [`StatusQuery::Paths`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Paths>,
    /// The message logs, only in the answers to queries about message logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_status: Option<LogStatus>,
}

/// The socket of a job, with the clients that are being served.
#[derive(Default)]
pub struct StatusSocket {
    listener: Option<UnixListener>,
    path: PathBuf,
    clients: Vec<StatusClient>,
}

struct StatusClient {
    stream: UnixStream,
    asked: Vec<u8>,
    question: Option<StatusQuery>,
    /// The answer, once the query has been received and answered.
    answer: Option<Vec<u8>>,
    sent: usize,
    until: Instant,
    is_over: bool,
}

impl StatusSocket {
    /// Opens the socket of a job in `directory`.
    pub fn open(directory: &Path, job: &str) -> Result<StatusSocket> {
        make(directory)?;
        let path = directory.join(job);
        // Commands remove a socket file that has no listener, so the file gets its final name only
        // after the socket listens.
        let unready = directory.join(format!(".{job}"));
        let listener = UnixListener::bind(&unready)
            .and_then(|listener| std::fs::rename(&unready, &path).map(|()| listener))
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        listener.set_nonblocking(true)?;
        Ok(StatusSocket { listener: Some(listener), path, clients: Vec::new() })
    }

    /// Descriptors with the events to wait for, for poll(2).
    pub fn descriptors(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let has_room = self.clients.len() < CLIENTS_MAX;
        let listener = self.listener.iter().filter(move |_| has_room);
        let listener = listener.map(|listener| (listener.as_fd(), PollFlags::IN));
        let clients = self.clients.iter().map(|client| {
            let flags = if client.answer.is_some() { PollFlags::OUT } else { PollFlags::IN };
            (client.stream.as_fd(), flags)
        });
        listener.chain(clients)
    }

    /// The next deadline of a client.
    pub fn next_time(&self) -> Option<Instant> {
        self.clients.iter().map(|client| client.until).min()
    }

    /// Accepts clients, reads queries and writes answers, as far as possible without blocking.
    ///
    /// `status` returns the answer to a query, or `None` if the answer is not known yet.
    pub fn serve(&mut self, now: Instant, status: impl Fn(StatusQuery) -> Option<JobStatus>) {
        while let (Some(listener), true) = (&self.listener, self.clients.len() < CLIENTS_MAX) {
            let Ok((stream, _)) = listener.accept() else { break };
            let is_own = sys::peer(&stream).is_ok_and(|(_, user)| user == sys::user());
            if is_own && stream.set_nonblocking(true).is_ok() {
                self.clients.push(StatusClient::new(stream, now + CLIENT_TIME));
            }
        }
        for client in &mut self.clients {
            client.read();
            client.prepare_answer(&status);
            client.write();
        }
        self.clients.retain(|client| !client.is_over && client.until > now);
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl StatusClient {
    fn new(stream: UnixStream, until: Instant) -> StatusClient {
        let (asked, question, answer) = (Vec::new(), None, None);
        StatusClient { stream, asked, question, answer, sent: 0, until, is_over: false }
    }

    /// Reads the query. Any bytes behind the query except the end of the stream make the query
    /// invalid.
    fn read(&mut self) {
        let mut buffer = [0; REQUEST_BYTES_MAX + 1];
        while self.answer.is_none() && !self.is_over {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.is_over = true,
                Ok(count) => self.asked.extend(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.is_over = true,
            }
            self.question = StatusQuery::parse(&self.asked);
            self.is_over |= self.question.is_none() && !StatusQuery::may_begin(&self.asked);
        }
    }

    fn prepare_answer(&mut self, status: impl Fn(StatusQuery) -> Option<JobStatus>) {
        if let (Some(question), None, false) = (self.question, &self.answer, self.is_over)
            && let Some(status) = status(question)
        {
            self.answer = Some(serde_json::to_vec(&status).unwrap_or_default());
        }
    }

    fn write(&mut self) {
        let Some(answer) = &self.answer else { return };
        while self.sent < answer.len() {
            match self.stream.write(&answer[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => break,
            }
        }
        self.is_over = true;
    }
}

/// The directory of the status sockets of this user.
pub fn directory() -> PathBuf {
    PathBuf::from(format!("/tmp/landbridge-{}", sys::user_outside()))
}

/// Makes the directory with mode 0700 if it does not exist, and checks the directory.
pub fn make(directory: &Path) -> Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", directory.display()))
        }
        _ => check(directory),
    }
}

/// Checks that the directory belongs to this user and that no other user can open it: any user may
/// create entries in /tmp.
pub fn check(directory: &Path) -> Result<()> {
    let it = std::fs::symlink_metadata(directory)
        .with_context(|| format!("cannot look at {}", directory.display()))?;
    if !it.is_dir() || it.uid() != sys::user() || it.mode() & 0o077 != 0 {
        bail!("{} is not a directory that only this user can open", directory.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
