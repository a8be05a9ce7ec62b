//! Where a running job is asked how it goes: a Unix socket named after the job, in a directory of this user's own.
//!
//! A client says a [`StatusQuery`] and gets an [`JobStatus`] as JSON, up to the end of the stream. Nothing it does can hold up the
//! launcher, in whose loop this runs: every descriptor is non-blocking, at most [`CLIENTS_MAX`] are served at once, each
//! for [`CLIENT_TIME`] at most. Only the user who runs the job is answered: nobody else can come near the socket, and
//! who comes is looked at nevertheless.
//!
//! The directory does not depend on the environment, so that every terminal finds the same one; and it is named after
//! the user as the world outside of a lab knows it. The file of a launcher that was killed stays until somebody
//! finds that nobody listens there (`landbridge ps`).

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

/// Longer than any question.
const REQUEST_BYTES_MAX: usize = 72;
/// Clients that are served at the same time; others wait to be let in.
const CLIENTS_MAX: usize = 8;
/// A client that has not asked, or not taken its answer, after this long is left.
const CLIENT_TIME: Duration = Duration::from_secs(5);

/// What somebody wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusQuery {
    /// How the ranks are.
    Ranks,
    /// And their paths.
    Paths,
    /// What relays keep of each.
    Log,
    /// So many determinants of this rank, beginning with this one.
    Deliveries { rank: u32, from: u64, count: u64 },
    /// How the ranks are; and take an image of this one, or of all, now.
    Checkpoint { rank: Option<u32> },
}

impl StatusQuery {
    /// The line in which it is asked.
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

    /// Reads such a line.
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

    /// Whether these bytes may become one.
    fn may_begin(bytes: &[u8]) -> bool {
        const STARTS: [&[u8]; 5] =
            [b"ranks 1", b"paths 1", b"log 1", b"deliveries 1", b"checkpoint 1"];
        let begins = |start: &&[u8]| start.starts_with(bytes) || bytes.starts_with(start);
        bytes.len() <= REQUEST_BYTES_MAX && STARTS.iter().any(begins) && !bytes.contains(&b'\n')
    }
}

/// What there is to say about a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: String,
    /// The process of `landbridge run`.
    pub launcher: u32,
    /// The program with its arguments, as far as they fit into a line.
    pub program: String,
    /// Seconds since 1970.
    pub began: u64,
    /// Whether ranks that are killed come back.
    pub recover: bool,
    /// Whether images of ranks are taken.
    #[serde(default)]
    pub checkpoints: bool,
    /// New starts since the job began.
    pub restarts: u64,
    pub ranks: Vec<RankRow>,
    /// Only if that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Paths>,
    /// The same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_status: Option<LogStatus>,
}

/// See the module head.
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
    /// What is still to be sent, once it has asked.
    answer: Option<Vec<u8>>,
    sent: usize,
    until: Instant,
    is_over: bool,
}

impl StatusSocket {
    /// Listens for questions about a job.
    pub fn open(directory: &Path, job: &str) -> Result<StatusSocket> {
        make(directory)?;
        let path = directory.join(job);
        // Who finds a name at which nobody listens removes it: it gets its name when somebody does.
        let unready = directory.join(format!(".{job}"));
        let listener = UnixListener::bind(&unready)
            .and_then(|listener| std::fs::rename(&unready, &path).map(|()| listener))
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        listener.set_nonblocking(true)?;
        Ok(StatusSocket { listener: Some(listener), path, clients: Vec::new() })
    }

    /// What to wait for.
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

    /// When a client's time is over.
    pub fn next_time(&self) -> Option<Instant> {
        self.clients.iter().map(|client| client.until).min()
    }

    /// Does what can be done now.
    ///
    /// `status` answers a question, or not yet.
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

    /// Nothing may come behind the question but the end.
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

/// Where the jobs of this user are asked.
pub fn directory() -> PathBuf {
    PathBuf::from(format!("/tmp/landbridge-{}", sys::user_outside()))
}

/// Makes such a directory, if it is not there.
pub fn make(directory: &Path) -> Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", directory.display()))
        }
        _ => check(directory),
    }
}

/// Anybody may make things in /tmp: what is not a directory of our own has been laid there by somebody else.
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
