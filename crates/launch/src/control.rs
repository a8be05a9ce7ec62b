//! Messages between the launcher and its agents, and their encoding.
//!
//! An agent is started over some connection (a local pipe, ssh, a host's own command prefix) and
//! uses the stdin and stdout of the connection. The agent first prints [`BANNER`], so that the
//! parent can recognise and skip text that a login shell prints before the banner. From then on
//! both sides send frames: length of the body (4 bytes, little endian), and the body, which is one
//! [`Message`] in the encoding of postcard. A length over [`FRAME_BYTES_MAX`] is refused before any
//! memory is allocated. The module does no I/O.
//!
//! | module | does |
//! |---|---|
//! | `rank_state` | ranks that move to another node |
//! | `spawn_order` | processes that a rank spawns |
//! | `decoder` | bytes to messages |

mod decoder;
pub mod rank_state;
pub mod spawn_order;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ending::Ending;
use crate::local_transport::LocalTransport;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{NameRequest, Stage};
use crate::pmi::spawn::Request;
use crate::ps::paths::Paths;
use crate::restart::RestartLimits;
pub use decoder::Decoder;
use rank_state::{Adoption, Moved, RankUpdate, RecordingUpdate, Spares};
use spawn_order::{Application, SpawnOrder, Task};

/// Version of the messages, incremented with every change of a message: launcher and agents must
/// have the same version.
pub const VERSION: u32 = 23;
/// Beginning of the first line of an agent; the version follows.
pub const BANNER: &str = "\nlandbridge-agent ";
/// Bytes of a frame at most. The largest message holds the keys of a barrier: 100 000 ranks of 160
/// bytes each fit.
pub const FRAME_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum interval at which the parent sends messages to an agent.
pub const PING_INTERVAL: Duration = Duration::from_secs(20);
/// Time without a message from the parent after which an agent behind a network gives up the job.
pub const SILENCE_MAX: Duration = Duration::from_secs(120);
const _: () = assert!(SILENCE_MAX.as_secs() > 3 * PING_INTERVAL.as_secs());
/// Interval at which an agent sends [`Message::Ping`] where ranks may be restarted on another node.
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(4);
/// Time without a message from an agent after which the agent is lost.
pub const LOST_AFTER: Duration = Duration::from_secs(20);
const _: () = assert!(LOST_AFTER.as_secs() > 3 * ALIVE_INTERVAL.as_secs());
/// Bytes of a frame's length field; the length does not count the field itself.
pub const LENGTH_BYTES: usize = 4;
/// Bytes of a piece of output or stdin at most, so that no piece delays a barrier.
pub const PIECE_BYTES_MAX: usize = 16 * 1024;

/// Properties of a job that are the same for every rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The job's id, 32 hex digits.
    pub id: String,
    /// The job's key, 64 hex digits; the key is never in an argument list.
    pub key: String,
    /// Number of the job's first processes, without processes that are spawned later.
    pub size: u32,
    /// Number of slots of the job's hosts, and at least `size`.
    pub universe: u32,
    pub kvsname: String,
    /// Value of `PMI_process_mapping`.
    pub mapping: String,
    /// The programs of the job, in the order of their ranks.
    pub applications: Vec<Application>,
    /// Another libfabric provider that the user wants to compare with ours.
    #[serde(default)]
    pub provider: Option<String>,
    /// Variables of ranks, which override variables from the agent's own environment.
    pub environment: Vec<(String, String)>,
    pub verbose: bool,
    /// Limits on restarts, where killed ranks are restarted.
    pub limits: RestartLimits,
    /// Whether there are nodes that can take the ranks of a lost node.
    pub has_spares: bool,
    /// The transport between ranks of a node.
    #[serde(default)]
    pub local: LocalTransport,
}

impl Job {
    /// The application number of a rank, and the program that the rank runs.
    pub fn application(&self, rank: u32) -> (u32, &Task) {
        spawn_order::application(&self.applications, rank)
    }
}

/// One agent and its child agents.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub cluster: u32,
    pub cluster_name: String,
    pub name: String,
    /// Address of this host inside its cluster.
    pub address: Option<String>,
    pub first_rank: u32,
    pub rank_count: u32,
    /// Number of processes that the host can take; with 0 the host takes no spawned processes.
    pub slots: u32,
    /// Ranks on this node's machine, on which local nodes of other clusters may be as well.
    #[serde(default)]
    pub machine_ranks: u32,
    /// Whether the node takes the ranks of a lost node.
    pub is_spare: bool,
    /// The other nodes that may take this node's ranks.
    #[serde(default)]
    pub spares: Vec<String>,
    /// Name of the relay's Unix socket, which ranks on the relay's own host can use in place of
    /// TCP.
    pub relay_unix: Option<String>,
    /// Whether a network lies between this agent and its parent, so that the connection may break
    /// without a notification.
    pub remote: bool,
    /// Command with which the parent starts this agent; empty for the top agent of a cluster.
    pub spawn: Vec<String>,
    pub children: Vec<Node>,
}

impl Node {
    /// Whether `rank` runs on this node or on a node below.
    pub fn holds(&self, rank: u32) -> bool {
        let own = self.first_rank..self.first_rank + self.rank_count;
        own.contains(&rank) || self.children.iter().any(|child| child.holds(rank))
    }

    /// The lowest rank on this node and on all nodes below.
    pub fn lowest_rank(&self) -> u32 {
        let below = self.children.iter().map(Node::lowest_rank);
        let own = if self.rank_count > 0 { self.first_rank } else { u32::MAX };
        below.fold(own, u32::min)
    }

    /// This host and all hosts below.
    pub fn hosts(&self) -> Vec<&Node> {
        std::iter::once(self).chain(self.children.iter().flat_map(Node::hosts)).collect()
    }

    /// Number of ranks on this node and on all nodes below.
    pub fn total_ranks(&self) -> u32 {
        self.rank_count + self.children.iter().map(Node::total_ranks).sum::<u32>()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    pub job: Job,
    pub node: Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What an agent says to another one about the log of a rank to a rank of another node
/// ([`landbridge_proto::log::agent_transfer`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FrameTransfer {
    /// The rank whose log it is.
    pub from: u32,
    /// The rank that reads it.
    pub to: u32,
    pub step: FrameTransferStep,
}

/// How far the message logs of a rank had come in its images, which the nodes can get that may take
/// the rank over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogImages {
    pub rank: u32,
    /// Number of the newest image.
    pub number: u64,
    /// What it covers: the words of [`landbridge_proto::log::release::LogPositions`].
    pub newest: Vec<u64>,
    /// What the older of the two images covers that are kept; empty: there is one image.
    pub oldest: Vec<u64>,
}

/// A digest of what has arrived of a log, from a position on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogDigest {
    pub from: u64,
    /// `None`: nothing has arrived from there on, or it is not all kept, or no frame begins there.
    pub digest: Option<u64>,
}

/// See [`FrameTransfer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FrameTransferStep {
    /// To the reader's agent: up to where has the log arrived? `digest_from`: the answer is to hold
    /// a digest from this position on. `has_ended`: the sender sends nothing more, and the answer
    /// need not wait until frames would be taken that are carried.
    Ask { digest_from: Option<u64>, has_ended: bool },
    /// To the sender's agent, whose rank has ended: the reader begins again on this node, and what
    /// it has is not known yet.
    NotYet,
    /// To the sender's agent: the log has arrived up to this position; and frames that are carried
    /// would be taken, if the sender has not ended. `digest`: of what has arrived, if that was
    /// asked for.
    Arrived { position: u64, digest: Option<LogDigest> },
    /// To the reader's agent: frames from this position on, each with its padding. `moves`: how
    /// often their sender has moved to another node. `digest_from`: as in [`Self::Ask`], for the
    /// answer once the frames were taken.
    Frames {
        moves: u32,
        position: u64,
        digest_from: Option<u64>,
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
}

impl FrameTransfer {
    /// The rank to whose agent the message goes.
    pub fn target(&self) -> u32 {
        match self.step {
            FrameTransferStep::Arrived { .. } | FrameTransferStep::NotYet => self.from,
            FrameTransferStep::Ask { .. } | FrameTransferStep::Frames { .. } => self.to,
        }
    }
}

/// A message between launcher and agents. `rank` is the index of a process in the job, which for
/// the job's first processes is their MPI rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Message {
    // Messages down the tree.
    Assign(Box<Assignment>),
    /// To the agent on the relay's host: the configuration document of the relay.
    StartRelay {
        config: String,
    },
    /// Start the ranks. `relay` is `HOST:PORT` of the cluster's relay, or empty without a relay.
    Start {
        relay: String,
    },
    BarrierDown {
        group: u32,
        delta: Delta,
    },
    /// The root's answer, a PMI line, to a `Name` or `Spawn`.
    Answer {
        rank: u32,
        line: String,
    },
    /// Start the processes of a new group.
    SpawnOrder(Box<SpawnOrder>),
    /// A part of a group could not be started: end the other processes of the group without a
    /// report of their exits.
    Revoke {
        group: u32,
    },
    Stdin {
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    StdinEnd,
    /// End the ranks: first by a signal that they can handle, or at once.
    End {
        at_once: bool,
    },
    /// Start the ranks of a lost agent.
    Adopt(Box<Adoption>),
    /// Names of the nodes of the cluster that can still take the ranks of another node.
    Spares(Spares),
    /// The parent has received every message about this rank that was sent before `MakeDurable`
    /// with this number.
    Durable {
        rank: u32,
        serial: u32,
    },
    /// The parent has received all updates before the [`Message::CutEnd`] with this ticket.
    Stable {
        ticket: u64,
    },
    /// No action: the sender, a parent or a child, is alive.
    Ping,
    /// Where a rank that keeps message logs can be reached by ranks of other nodes: from its agent
    /// to the launcher, and from there to all agents. The bytes are an entry of the nodes' files.
    LogContact {
        rank: u32,
        #[serde(with = "serde_bytes")]
        contact: Vec<u8>,
    },
    /// Ranks that had ended are executed again: from an agent to the launcher, which waits for them
    /// from then on, and says so with the same message, unless the job is ending.
    Again {
        ranks: Vec<u32>,
    },
    /// Message logs of ranks that had ended are lost with their node, and nobody writes them again:
    /// from an agent that could have moved the ranks to the launcher, and from there to all of
    /// them.
    LogsLost {
        ranks: Vec<u32>,
    },
    /// Which images of a rank other nodes may count on: from its agent to the launcher, and from
    /// there to all agents.
    LogImages(Box<LogImages>),
    /// What agents say about a log between ranks of two nodes: up to the launcher, and from there
    /// down to the agent of [`FrameTransfer::target`].
    FrameTransfer(Box<FrameTransfer>),
    /// Query of the paths of the ranks; each agent answers for its own ranks, with at most
    /// `rows_max` rows.
    QueryPaths {
        serial: u32,
        rows_max: u32,
    },
    /// Take a checkpoint of this rank, or of all ranks, before the next regular checkpoint.
    TakeCheckpoints {
        rank: Option<u32>,
    },
    /// Query for message logs, to the relay on this host, if there is one, or to all hosts if the
    /// senders keep messages; `question` is the end of the request line for a relay.
    QueryLog {
        serial: u32,
        question: String,
    },
    // Messages up the tree.
    /// This agent and all agents below have their assignments.
    Ready,
    /// The addresses, from the relay's output, at which ranks and other relays reach the relay.
    RelayReady {
        ranks: String,
        relays: String,
    },
    /// The relay's report about its link to the relay of another cluster; `problem` is empty if the
    /// link is up.
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
    /// One host of a spawn order has started all of its processes, or none, for the reason
    /// `problem`.
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
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        /// Number of these bytes that the program has printed, and not our libraries.
        own: u32,
    },
    /// A request of a rank to its process manager, for the parent, which may have to restart the
    /// rank elsewhere.
    RankUpdate(Box<RankUpdate>),
    /// Recorded state of a rank that exists only on its node, for the parent; the parent sends it
    /// on to an agent that takes the rank over, before `Adopt`.
    RecordingUpdate(Box<RecordingUpdate>),
    /// The updates of ranks of this agent since the last such message fit together, and count from
    /// now on. The parent answers a ticket other than 0 by `Stable`.
    CutEnd {
        ticket: u64,
    },
    /// The parent has to answer this message by `Durable` with the same number once it has received
    /// every earlier message about this rank.
    MakeDurable {
        rank: u32,
        serial: u32,
    },
    /// Ranks have moved to another node.
    Moved(Box<Moved>),
    /// Rank 0 has read this many bytes of its stdin.
    StdinTaken {
        bytes: u32,
    },
    Exited {
        group: u32,
        rank: u32,
        ending: Ending,
        stage: Stage,
    },
    /// A rank has process `pid`, which is its restart number `incarnation`. `is_live` says whether
    /// the process has completed its replay; if not, `percent` is the replayed share, if known.
    Alive {
        group: u32,
        rank: u32,
        pid: u32,
        incarnation: u32,
        is_live: bool,
        percent: Option<u8>,
    },
    /// Number and bytes of the newest complete checkpoint of a rank; number 0 means that the rank
    /// has no checkpoint any more.
    Checkpoint {
        rank: u32,
        number: u64,
        bytes: u64,
    },
    /// A rank has ended while another rank waits in a barrier that can never complete now.
    Stuck {
        rank: u32,
    },
    /// The job cannot go on; the user reads `text`.
    Failed {
        text: String,
    },
    /// A text for the user of `-v`.
    Note {
        text: String,
    },
    /// A text that the user reads once, however many nodes send it.
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
        #[serde(with = "as_json")]
        paths: Box<Paths>,
    },
    /// The answer of the relay or of one agent to a `QueryLog`: lines of JSON. `lines` is empty
    /// where the host has no relay.
    LogStatus {
        serial: u32,
        lines: String,
    },
    /// No process of this agent or of the agents below runs any more.
    Done,
}

/// Why bytes from the peer are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameError {
    TooLong(usize),
    Malformed,
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrameError::TooLong(bytes) => write!(f, "a control message of {bytes} bytes"),
            FrameError::Malformed => f.write_str("a malformed control message"),
        }
    }
}

impl Message {
    /// The words by which an error text names a message that is longer than [`FRAME_BYTES_MAX`].
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

    /// Appends the frame of this message to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; LENGTH_BYTES]);
        let frame = postcard::to_extend(self, std::mem::take(out));
        *out = frame.expect("a sequence or map of unknown length, which no message has");
        let length = u32::try_from(out.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
        out[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    }

    /// The message of a frame's body. `None`: the body is no message, or longer than one.
    fn parse(body: &[u8]) -> Option<Message> {
        let (message, rest) = postcard::take_from_bytes(body).ok()?;
        rest.is_empty().then_some(message)
    }
}

/// A field as text in JSON, for a structure whose fields JSON shows without their grouping.
mod as_json {
    use serde::de::{DeserializeOwned, Error as _};
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &impl Serialize, to: S) -> Result<S::Ok, S::Error> {
        serde_json::to_string(value).map_err(S::Error::custom)?.serialize(to)
    }

    pub fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        serde_json::from_str(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests;
