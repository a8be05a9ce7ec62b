//! Messages between the launcher and its agents, and their bytes.
//!
//! An agent is started over some connection (a local pipe, ssh, a host's own command prefix) and
//! talks over the stdin and stdout of that connection. It first prints [`BANNER`], so that noise
//! a login shell prints before it is recognised and skipped. From then on both sides send frames:
//! length (4 bytes, little endian, of what follows), kind (1 byte), body. A length over
//! [`FRAME_BYTES_MAX`] is refused before any memory is taken. Nothing in here does I/O.

mod body;
mod decoder;
mod kind;
pub mod rank_state;
pub mod spawn_order;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::local::LocalTransport;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{NameRequest, Stage};
use crate::pmi::spawn::Request;
use crate::ps::paths::Paths;
use crate::restart::RestartLimits;
use body::{BodyReader, BodyWriter};
pub use decoder::Decoder;
use rank_state::{Adoption, Moved, RankUpdate, RecordingUpdate, Spares};
use spawn_order::{Application, SpawnOrder, Task};

/// Bumped with every change of a message: launcher and agents must be of one version.
pub const VERSION: u32 = 12;
/// First line of an agent.
pub const BANNER: &str = "\nlandbridge-agent ";
/// The largest message is a barrier's keys: 100 000 ranks of 160 bytes each still fit.
pub const FRAME_BYTES_MAX: usize = 64 * 1024 * 1024;
/// An agent hears from the one above at least this often,
pub const PING_INTERVAL: Duration = Duration::from_secs(20);
/// and an agent behind a network gives up on a job it has heard nothing of for this long.
pub const SILENCE_MAX: Duration = Duration::from_secs(120);
const _: () = assert!(SILENCE_MAX.as_secs() > 3 * PING_INTERVAL.as_secs());
/// Where ranks may be started on another node, an agent says that it is there so often,
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(4);
/// and is lost when nothing has been heard of it for this long.
pub const LOST_AFTER: Duration = Duration::from_secs(20);
const _: () = assert!(LOST_AFTER.as_secs() > 3 * ALIVE_INTERVAL.as_secs());
/// Output and stdin travel in pieces of at most this size, so that no piece delays a barrier.
pub const PIECE_BYTES_MAX: usize = 16 * 1024;

/// What is the same for every rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// 32 hex digits.
    pub id: String,
    /// 64 hex digits; never in an argument list.
    pub key: String,
    /// Its first processes; those spawned later are not counted.
    pub size: u32,
    /// Slots of its hosts, and at least `size`.
    pub universe: u32,
    pub kvsname: String,
    /// Value of `PMI_process_mapping`.
    pub mapping: String,
    /// Its programs, in the order of their ranks.
    pub applications: Vec<Application>,
    /// Another libfabric provider that the user wants to compare with.
    #[serde(default)]
    pub provider: Option<String>,
    /// Takes precedence over what the agent itself finds in its environment.
    pub environment: Vec<(String, String)>,
    pub verbose: bool,
    /// Of restarts, where ranks that are killed come back.
    pub limits: RestartLimits,
    /// There are nodes that take the ranks of one that is lost.
    pub has_spares: bool,
    /// Who carries the messages between ranks of a node.
    #[serde(default)]
    pub local: LocalTransport,
}

impl Job {
    /// The application number of a rank, and what it runs.
    pub fn application(&self, rank: u32) -> (u32, &Task) {
        spawn_order::application(&self.applications, rank)
    }
}

/// One agent and the agents below it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub cluster: u32,
    pub cluster_name: String,
    pub name: String,
    /// Address of this host inside its cluster.
    pub address: Option<String>,
    pub first_rank: u32,
    pub rank_count: u32,
    /// Processes for which it has room; 0: it takes none that are spawned.
    pub slots: u32,
    /// It takes the ranks of another one that is lost.
    pub is_spare: bool,
    /// The other nodes that may take its ranks.
    #[serde(default)]
    pub spares: Vec<String>,
    /// Ways to the relay besides TCP, for the ranks of the relay's own host.
    pub relay_unix: Option<String>,
    /// A network lies between this agent and the one above, which may break without a word.
    pub remote: bool,
    /// Command that starts this agent, run by the agent above. Empty for the top one.
    pub spawn: Vec<String>,
    pub children: Vec<Node>,
}

impl Node {
    /// Whether `rank` runs here or below.
    pub fn holds(&self, rank: u32) -> bool {
        let own = self.first_rank..self.first_rank + self.rank_count;
        own.contains(&rank) || self.children.iter().any(|child| child.holds(rank))
    }

    /// The first rank here and below.
    pub fn lowest_rank(&self) -> u32 {
        let below = self.children.iter().map(Node::lowest_rank);
        let own = if self.rank_count > 0 { self.first_rank } else { u32::MAX };
        below.fold(own, u32::min)
    }

    /// This host and those below it.
    pub fn hosts(&self) -> Vec<&Node> {
        std::iter::once(self).chain(self.children.iter().flat_map(Node::hosts)).collect()
    }

    /// Ranks here and below.
    pub fn total_ranks(&self) -> u32 {
        self.rank_count + self.children.iter().map(Node::total_ranks).sum::<u32>()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    pub job: Job,
    pub node: Node,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    Exited(i32),
    Killed(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// `rank` is the index of a process in the job, which for its first processes is their MPI rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    // Down the tree.
    Assign(Box<Assignment>),
    /// To the agent on the relay's host: the relay's configuration document.
    StartRelay {
        config: String,
    },
    /// Start the ranks. `relay`: `HOST:PORT` of the cluster's relay, empty without one.
    Start {
        relay: String,
    },
    BarrierDown {
        group: u32,
        delta: Delta,
    },
    /// The root's answer to a `Name` or `Spawn`: a PMI line.
    Answer {
        rank: u32,
        line: String,
    },
    /// Start the processes of a new group.
    SpawnOrder(Box<SpawnOrder>),
    /// A part of a group could not be started: end the rest, of which nobody is told.
    Revoke {
        group: u32,
    },
    Stdin {
        bytes: Vec<u8>,
    },
    StdinEnd,
    /// End the ranks: politely first, or at once.
    End {
        at_once: bool,
    },
    /// Start the ranks of an agent that is lost.
    Adopt(Box<Adoption>),
    /// The nodes of the cluster that may still take the ranks of another one, by their names.
    Spares(Spares),
    /// The agent above knows what was said of this rank before `MakeDurable` of this number.
    Durable {
        rank: u32,
        serial: u32,
    },
    /// Nothing to do: the agent above is still there, or the one below.
    Ping,
    /// Say how the paths of the ranks are, each agent for its own, with so many rows at most.
    QueryPaths {
        serial: u32,
        rows_max: u32,
    },
    /// Take an image of this rank, or of all, before it is time.
    TakeCheckpoints {
        rank: Option<u32>,
    },
    /// Ask the relay here, if there is one, what it keeps of its processes: `question` is the end of a line for it.
    QueryLog {
        serial: u32,
        question: String,
    },
    // Up the tree.
    /// This agent and all below it have their assignment.
    Ready,
    /// What the relay printed: where ranks and other relays reach it.
    RelayReady {
        ranks: String,
        relays: String,
    },
    /// What the relay says of its link to that of another cluster: `problem` is empty if it is up.
    RelayLink {
        cluster: u32,
        address: String,
        problem: String,
    },
    BarrierUp {
        group: u32,
        delta: Delta,
    },
    Name {
        rank: u32,
        request: NameRequest,
    },
    Spawn {
        rank: u32,
        request: Box<Request>,
    },
    /// One host of an order has started its processes, or none of them, with the reason.
    Started {
        group: u32,
        problem: String,
    },
    Abort {
        rank: u32,
        code: i32,
        message: String,
    },
    Output {
        rank: u32,
        stream: Stream,
        bytes: Vec<u8>,
        /// Of these, how many are the program's own, and not our libraries'.
        own: u32,
    },
    /// A rank talks to its process manager: for the agent above, which may have to start the rank elsewhere.
    RankUpdate(Box<RankUpdate>),
    /// What is known of a rank on its node alone: for the agent above; and from there to one that takes the rank over, before
    /// `Adopt`.
    RecordingUpdate(Box<RecordingUpdate>),
    /// What was said of this rank before is to be known above, which `Durable` of this number answers.
    MakeDurable {
        rank: u32,
        serial: u32,
    },
    /// Ranks are on another node from now on.
    Moved(Box<Moved>),
    /// Rank 0 has taken this many bytes of its stdin.
    StdinTaken {
        bytes: u32,
    },
    Exited {
        group: u32,
        rank: u32,
        ending: Ending,
        stage: Stage,
    },
    /// A rank has this process, its `incarnation`th that was restarted; whether it has come back to
    /// where the one before it was, and otherwise how much of the way it has gone, if that is known.
    Alive {
        group: u32,
        rank: u32,
        pid: u32,
        incarnation: u32,
        is_live: bool,
        percent: Option<u8>,
    },
    /// The newest image of a rank that is whole has this number and takes so much of the disk; number 0: there is none any more.
    Checkpoint {
        rank: u32,
        number: u64,
        bytes: u64,
    },
    /// A rank has ended while another one, which can never go on now, waits in a barrier.
    Stuck {
        rank: u32,
    },
    /// The job cannot go on; `text` is what the user reads.
    Failed {
        text: String,
    },
    /// For `-v`.
    Note {
        text: String,
    },
    /// What the user should read once, however many nodes say it.
    Advice {
        node: String,
        text: String,
    },
    /// A line of a relay's log.
    RelayLog {
        text: String,
    },
    /// The answer of one agent to a `QueryPaths`.
    Paths {
        serial: u32,
        paths: Box<Paths>,
    },
    /// What the relay has said to an `QueryLog`: lines of JSON. Nothing where there is none.
    LogStatus {
        serial: u32,
        lines: String,
    },
    /// Nothing of this agent, or of those below it, runs any more.
    Done,
}

/// In the place of a rank: all of them.
const ALL: u32 = u32::MAX;

/// Why bytes from the other side are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameError {
    TooLong(usize),
    Malformed(u8),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrameError::TooLong(bytes) => write!(f, "a control message of {bytes} bytes"),
            FrameError::Malformed(kind) => write!(f, "a malformed control message of kind {kind}"),
        }
    }
}

impl Message {
    /// What the user reads about a message that is longer than [`FRAME_BYTES_MAX`].
    pub fn description(&self) -> &'static str {
        match self {
            Message::Assign(_) => "the job's description (arguments, environment, hosts)",
            Message::BarrierUp { .. } | Message::BarrierDown { .. } => {
                "what ranks have put into the key-value space before a barrier"
            }
            Message::Spawn { .. } | Message::SpawnOrder(_) => {
                "a spawn, with its arguments and keys"
            }
            _ => "a message",
        }
    }

    /// Appends the frame of this message.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 5]);
        out[start + 4] = self.emit_body(&mut BodyWriter(out));
        let length = u32::try_from(out.len() - start - 4).unwrap_or(u32::MAX);
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn emit_body(&self, out: &mut BodyWriter) -> u8 {
        match self {
            Message::Assign(assignment) => {
                out.document(assignment);
                kind::ASSIGN
            }
            Message::StartRelay { config } => {
                out.text(config);
                kind::START_RELAY
            }
            Message::Start { relay } => {
                out.text(relay);
                kind::START
            }
            Message::BarrierDown { group, delta } => {
                out.number(*group);
                out.delta(delta);
                kind::BARRIER_DOWN
            }
            Message::Answer { rank, line } => {
                out.number(*rank);
                out.text(line);
                kind::ANSWER
            }
            Message::SpawnOrder(order) => {
                out.document(order);
                kind::SPAWN_ORDER
            }
            Message::Revoke { group } => {
                out.number(*group);
                kind::REVOKE
            }
            Message::Stdin { bytes } => {
                out.bytes(bytes);
                kind::STDIN
            }
            Message::StdinEnd => kind::STDIN_END,
            Message::End { at_once } => {
                out.number(u32::from(*at_once));
                kind::END
            }
            Message::Ping => kind::PING,
            Message::QueryPaths { serial, rows_max } => {
                out.number(*serial);
                out.number(*rows_max);
                kind::QUERY_PATHS
            }
            Message::MakeDurable { rank, serial } | Message::Durable { rank, serial } => {
                out.number(*rank);
                out.number(*serial);
                if matches!(self, Message::MakeDurable { .. }) {
                    kind::MAKE_DURABLE
                } else {
                    kind::DURABLE
                }
            }
            Message::TakeCheckpoints { rank } => {
                out.number(rank.unwrap_or(ALL));
                kind::TAKE_CHECKPOINTS
            }
            Message::Ready => kind::READY,
            Message::RelayReady { ranks, relays } => {
                out.text(ranks);
                out.text(relays);
                kind::RELAY_READY
            }
            Message::RelayLink { cluster, address, problem } => {
                out.number(*cluster);
                out.text(address);
                out.text(problem);
                kind::RELAY_LINK
            }
            Message::BarrierUp { group, delta } => {
                out.number(*group);
                out.delta(delta);
                kind::BARRIER_UP
            }
            Message::Name { rank, request } => {
                out.number(*rank);
                out.name_request(request);
                kind::NAME
            }
            Message::Spawn { rank, request } => {
                out.number(*rank);
                out.document(request);
                kind::SPAWN
            }
            Message::Started { group, problem } => {
                out.number(*group);
                out.text(problem);
                kind::STARTED
            }
            Message::Abort { rank, code, message } => {
                out.number(*rank);
                out.number(code.cast_unsigned());
                out.text(message);
                kind::ABORT
            }
            Message::Adopt(adoption) => {
                out.document(adoption);
                kind::ADOPT
            }
            Message::Spares(spares) => {
                out.document(spares);
                kind::SPARES
            }
            Message::RankUpdate(update) => {
                out.document(update);
                kind::RANK_UPDATE
            }
            Message::RecordingUpdate(update) => {
                out.recording_update(update);
                kind::RECORDING_UPDATE
            }
            Message::Moved(moved) => {
                out.document(moved);
                kind::MOVED
            }
            Message::Output { rank, stream, bytes, own } => {
                out.number(*rank);
                out.number(u32::from(*stream == Stream::Stderr));
                out.bytes(bytes);
                out.number(*own);
                kind::OUTPUT
            }
            Message::StdinTaken { bytes } => {
                out.number(*bytes);
                kind::STDIN_TAKEN
            }
            Message::Exited { group, rank, ending, stage } => {
                out.number(*group);
                out.number(*rank);
                out.ending(*ending);
                out.number(*stage as u32);
                kind::EXITED
            }
            Message::Alive { group, rank, pid, incarnation, is_live, percent } => {
                let numbers = [*group, *rank, *pid, *incarnation, u32::from(*is_live)];
                numbers.into_iter().for_each(|number| out.number(number));
                out.percent(*percent);
                kind::ALIVE
            }
            Message::Checkpoint { rank, number, bytes } => {
                out.number(*rank);
                out.long(*number);
                out.long(*bytes);
                kind::CHECKPOINT
            }
            Message::Stuck { rank } => {
                out.number(*rank);
                kind::STUCK
            }
            Message::Failed { text } => {
                out.text(text);
                kind::FAILED
            }
            Message::Note { text } => {
                out.text(text);
                kind::NOTE
            }
            Message::Advice { node, text } => {
                out.text(node);
                out.text(text);
                kind::ADVICE
            }
            Message::RelayLog { text } => {
                out.text(text);
                kind::RELAY_LOG
            }
            Message::Paths { serial, paths } => {
                out.number(*serial);
                out.document(paths);
                kind::PATHS
            }
            Message::QueryLog { serial, question: text } => {
                out.number(*serial);
                out.text(text);
                kind::QUERY_LOG
            }
            Message::LogStatus { serial, lines: text } => {
                out.number(*serial);
                out.text(text);
                kind::LOG_STATUS
            }
            Message::Done => kind::DONE,
        }
    }

    /// Reads the kind and body of one frame.
    fn parse(kind: u8, body: &[u8]) -> Option<Message> {
        let mut body = BodyReader(body);
        let message = match kind {
            kind::READY.. => Message::parse_up(kind, &mut body)?,
            kind::ASSIGN => Message::Assign(body.document()?),
            kind::START_RELAY => Message::StartRelay { config: body.text()? },
            kind::START => Message::Start { relay: body.text()? },
            kind::BARRIER_DOWN => {
                Message::BarrierDown { group: body.number()?, delta: body.delta()? }
            }
            kind::ANSWER => Message::Answer { rank: body.number()?, line: body.text()? },
            kind::SPAWN_ORDER => Message::SpawnOrder(body.document()?),
            kind::ADOPT => Message::Adopt(body.document()?),
            kind::SPARES => Message::Spares(*body.document()?),
            kind::REVOKE => Message::Revoke { group: body.number()? },
            kind::STDIN => Message::Stdin { bytes: body.bytes()?.to_vec() },
            kind::STDIN_END => Message::StdinEnd,
            kind::END => Message::End { at_once: body.number()? != 0 },
            kind::PING => Message::Ping,
            kind::QUERY_PATHS => {
                Message::QueryPaths { serial: body.number()?, rows_max: body.number()? }
            }
            kind::TAKE_CHECKPOINTS => {
                Message::TakeCheckpoints { rank: Some(body.number()?).filter(|rank| *rank != ALL) }
            }
            kind::DURABLE => Message::Durable { rank: body.number()?, serial: body.number()? },
            kind::QUERY_LOG => Message::QueryLog { serial: body.number()?, question: body.text()? },
            _ => return None,
        };
        body.is_empty().then_some(message)
    }

    /// One that goes up the tree.
    fn parse_up(kind: u8, body: &mut BodyReader) -> Option<Message> {
        Some(match kind {
            kind::RANK_UPDATE => Message::RankUpdate(body.document()?),
            kind::RECORDING_UPDATE => Message::RecordingUpdate(Box::new(body.recording_update()?)),
            kind::MAKE_DURABLE => {
                Message::MakeDurable { rank: body.number()?, serial: body.number()? }
            }
            kind::MOVED => Message::Moved(body.document()?),
            kind::READY => Message::Ready,
            kind::RELAY_READY => Message::RelayReady { ranks: body.text()?, relays: body.text()? },
            kind::RELAY_LINK => Message::RelayLink {
                cluster: body.number()?,
                address: body.text()?,
                problem: body.text()?,
            },
            kind::BARRIER_UP => Message::BarrierUp { group: body.number()?, delta: body.delta()? },
            kind::NAME => Message::Name { rank: body.number()?, request: body.name_request()? },
            kind::SPAWN => Message::Spawn { rank: body.number()?, request: body.document()? },
            kind::STARTED => Message::Started { group: body.number()?, problem: body.text()? },
            kind::ABORT => Message::Abort {
                rank: body.number()?,
                code: body.number()?.cast_signed(),
                message: body.text()?,
            },
            kind::OUTPUT => Message::Output {
                rank: body.number()?,
                stream: if body.number()? == 0 { Stream::Stdout } else { Stream::Stderr },
                bytes: body.bytes()?.to_vec(),
                own: body.number()?,
            },
            kind::STDIN_TAKEN => Message::StdinTaken { bytes: body.number()? },
            kind::EXITED => Message::Exited {
                group: body.number()?,
                rank: body.number()?,
                ending: body.ending()?,
                stage: body.stage()?,
            },
            kind::ALIVE => Message::Alive {
                group: body.number()?,
                rank: body.number()?,
                pid: body.number()?,
                incarnation: body.number()?,
                is_live: body.number()? != 0,
                percent: body.percent()?,
            },
            kind::CHECKPOINT => Message::Checkpoint {
                rank: body.number()?,
                number: body.long()?,
                bytes: body.long()?,
            },
            kind::STUCK => Message::Stuck { rank: body.number()? },
            kind::FAILED => Message::Failed { text: body.text()? },
            kind::NOTE => Message::Note { text: body.text()? },
            kind::ADVICE => Message::Advice { node: body.text()?, text: body.text()? },
            kind::RELAY_LOG => Message::RelayLog { text: body.text()? },
            kind::PATHS => Message::Paths { serial: body.number()?, paths: body.document()? },
            kind::LOG_STATUS => Message::LogStatus { serial: body.number()?, lines: body.text()? },
            kind::DONE => Message::Done,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
