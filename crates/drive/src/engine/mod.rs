//! Engines: ways to move the bytes of one relay.
//!
//! All engines share the state machine ([`landbridge_proto::relay`]), the setup, and the interface
//! to the program around them. Engines differ in how they wait and in what runs at the same time.
//!
//! | module | does |
//! |---|---|
//! | `disk` | logs on disk, by a thread |
//! | `segment_pool` | memory for logs, prepared by a thread |
//! | `epoll` | the single-threaded engine |

pub mod disk;
pub mod epoll;
pub mod segment_pool;

use std::fmt;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::relay::{Counters, LogExcerpt, LogStatus};
use landbridge_proto::route::routing_table::ClusterRange;

use crate::checksum::Checksum;
use crate::link::quic::Congestion;
use crate::link::tls::Identity;
use disk::Disk;

/// The setup of a relay. It has many fields because it is the relay's whole configuration: the
/// program fills it once, and each part of the engine takes its own fields out.
pub struct Setup {
    /// The job; connections of another job are refused.
    pub job: JobId,
    /// The job's key; connections without proof of the key are refused.
    pub key: JobKey,
    /// The relay's own cluster.
    pub own: ClusterId,
    /// The processes of each cluster of the job.
    pub clusters: Vec<ClusterRange>,
    /// The listener at which endpoints of the relay's own cluster attach.
    pub ranks: TcpListener,
    /// The listener at which endpoints of the relay's own node attach.
    pub unix: Option<UnixListener>,
    /// The listener at which other relays connect.
    pub relays: Option<TcpListener>,
    /// The TLS identity that the relay shows to other relays. Needed for `relays` and `peers`.
    pub identity: Option<Identity>,
    /// The relays to connect to.
    pub peers: Vec<Peer>,
    /// Descriptors of the program: the engine calls [`EngineHost::handle_control`] when one is
    /// readable.
    pub controls: Vec<OwnedFd>,
    /// How long frames wait for an endpoint whose link has broken.
    pub peer_timeout: Duration,
    /// The number of streams to each relay that this relay connects to.
    pub wan_streams: usize,
    /// The congestion control of links to other relays over UDP, which are used where UDP works;
    /// `None` to use TCP only.
    pub wan_udp: Option<Congestion>,
    /// The longest pause before a relay is dialled again.
    pub redial_max: Duration,
    /// The message log for endpoints that may be restarted after they were killed; `None` to keep
    /// no log.
    pub recover: Option<RecoveryConfig>,
    /// How frames of endpoints are checked.
    pub integrity: Checksum,
    /// How long to spin before sleeping; `None` to spin as long as it pays on this machine.
    pub spin: Option<Duration>,
}

/// The settings of the message log, which is kept for endpoints that may be restarted.
pub struct RecoveryConfig {
    /// The bytes of memory for the message log.
    pub memory: u64,
    /// The disk for what exceeds the memory, if there is one.
    pub disk: Option<Disk>,
    /// The bytes delivered to an endpoint since its last checkpoint after which another checkpoint
    /// is due.
    pub checkpoint_log_bytes: u64,
    /// The file for recorded nondeterminism, if endpoints of other nodes may be restarted on third
    /// nodes: the relay keeps what these endpoints have read of clocks and random numbers, and
    /// writes it here when one of them is fenced.
    pub nondeterminism_file: Option<File>,
}

/// The recorded nondeterminism that the relay keeps of a fenced endpoint, and that lies at the
/// beginning of the file for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencedRecord {
    /// The position of the first byte in the endpoint's record.
    pub first: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// How often the endpoint has polled for messages.
    pub polls: u64,
    /// The endpoint's record has reached its maximum size.
    pub is_full: bool,
}

/// A relay to connect to.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The relay's cluster.
    pub cluster: ClusterId,
    /// The addresses at which the relay listens, to be tried in turn.
    pub addresses: Vec<SocketAddr>,
}

/// The program around an engine.
pub trait EngineHost {
    /// Writes one line to the log.
    fn log(&mut self, line: fmt::Arguments<'_>);

    /// Writes one line that the user should read.
    fn warn(&mut self, line: fmt::Arguments<'_>);

    /// Receives the answer to a [`ControlAction::Query`].
    fn handle_log_reply(&mut self, reply: &LogReply);

    /// The next endpoint to fence, and an incarnation: the relay must accept nothing more of
    /// earlier incarnations of the endpoint. The engine calls this function after each readable
    /// control, until it returns `None`.
    fn poll_fence(&mut self) -> Option<(Address, u32)> {
        None
    }

    /// Reports that `_who` is fenced, and what the relay keeps of its recorded nondeterminism.
    fn handle_fenced(&mut self, _who: Address, _fenced: &FencedRecord) {}

    /// Reports that so many bytes were delivered to endpoint `_who` since its last checkpoint that
    /// another one is due.
    fn handle_checkpoint_due(&mut self, _who: Address) {}

    /// Reports that the relay no longer keeps a message log of endpoint `_who`.
    fn handle_log_abandoned(&mut self, _who: Address) {}

    /// Reports that the relay keeps a complete message log of endpoint `_who` again, from the log
    /// position of a checkpoint on, after the log had exceeded its bound.
    fn handle_log_resumed(&mut self, _who: Address) {}

    /// Reports that the link to the relay of `cluster`, with `remote` at the other end, is up, or
    /// why it is down. Of attempts that fail for the same reason, only the first is reported.
    fn handle_link(&mut self, cluster: ClusterId, remote: &dyn fmt::Display, state: LinkState<'_>);

    /// Handles the readable control with this index.
    fn handle_control(
        &mut self,
        index: usize,
        control: &OwnedFd,
        report: &EngineReport,
    ) -> ControlAction;
}

/// The state of a link to another relay: see [`EngineHost::handle_link`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState<'a> {
    /// Frames pass in both directions.
    Up,
    /// The link was up and has broken, for this reason.
    Down(&'a str),
    /// An attempt to open the link has failed, for this reason.
    Unreachable(&'a str),
}

/// What an engine does after a control was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlAction {
    /// The engine goes on.
    Continue,
    /// The engine ends.
    Stop,
    /// The engine goes on, and reports on the message logs of its endpoints.
    Query(LogQuery),
}

/// A query about the message logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogQuery {
    /// The size of the log of each endpoint from this address on: as many endpoints as fit into an
    /// answer.
    All(Address),
    /// Determinants of one endpoint, and their frames.
    One {
        /// The address of the endpoint.
        address: Address,
        /// The number of the first determinant.
        from: u64,
        /// The number of determinants.
        count: u64,
    },
}

/// The answer to a [`LogQuery`].
#[derive(Clone, Debug)]
pub enum LogReply {
    /// The log status of each endpoint, and the next endpoint if there are more.
    All(Vec<LogStatus>, Option<Address>),
    /// The determinants of one endpoint, if a log of it is kept.
    One(Option<LogExcerpt>),
}

/// The counters of an engine, and what the engine holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineReport {
    /// The counters of the relay's state machine.
    pub relay: Counters,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused, for any reason.
    pub refused: u64,
    /// Links that completed the hello.
    pub attached: u64,
    /// Links at present.
    pub links: usize,
    /// Connections whose hello is not complete.
    pub pending: usize,
    /// Of the links at present, the streams to other relays.
    pub streams: usize,
    /// Bytes in queues.
    pub queued_bytes: usize,
    /// Bytes of message logs in memory.
    pub log_bytes: u64,
    /// Bytes of message logs on the disk.
    pub disk_bytes: u64,
    /// Streams to other relays that broke.
    pub breaks: u64,
    /// System calls that waited for events.
    pub waits: u64,
    /// System calls that read.
    pub reads: u64,
    /// System calls that wrote.
    pub writes: u64,
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EngineReport { relay, .. } = self;
        write!(
            f,
            "frames={} bytes={} unreachable={} lost={} reports_dropped={} malformed={} pauses={} \
             lost_bytes={} delivered_frames={} determinant_bytes={} nondeterminism_bytes={} \
             log_bytes={} disk_bytes={} read_back_bytes={} disk_waits={} accepted={} refused={} \
             attached={} links={} streams={} pending={} queued_bytes={} breaks={} waits={} \
             reads={} writes={}",
            relay.frames,
            relay.bytes,
            relay.unreachable,
            relay.lost,
            relay.reports_dropped,
            relay.malformed,
            relay.pauses,
            relay.lost_bytes,
            relay.delivered_frames,
            relay.determinant_bytes,
            relay.nondeterminism_bytes,
            self.log_bytes,
            self.disk_bytes,
            relay.read_back_bytes,
            relay.disk_waits,
            self.accepted,
            self.refused,
            self.attached,
            self.links,
            self.streams,
            self.pending,
            self.queued_bytes,
            self.breaks,
            self.waits,
            self.reads,
            self.writes
        )
    }
}

/// An engine: a way to run a relay.
pub trait Engine {
    /// Runs until [`EngineHost::handle_control`] returns [`ControlAction::Stop`].
    ///
    /// # Errors
    /// If the system refuses something that the engine cannot do without.
    fn run(setup: Setup, host: &mut dyn EngineHost) -> io::Result<EngineReport>;
}
