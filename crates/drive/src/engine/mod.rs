//! Engines: ways to move the bytes of one relay.
//!
//! All engines share the state machine ([`landbridge_proto::relay`]), the setup, and how they speak
//! to the program around them; they differ in how they wait and in what runs at the same time.

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

/// What a relay is to do.
pub struct Setup {
    /// Whoever belongs to another job is refused.
    pub job: JobId,
    /// Whoever does not know it is refused.
    pub key: JobKey,
    /// The relay's own cluster.
    pub own: ClusterId,
    /// The processes of each cluster of the job.
    pub clusters: Vec<ClusterRange>,
    /// Where endpoints of the own cluster attach.
    pub ranks: TcpListener,
    /// Where endpoints of the own node attach.
    pub unix: Option<UnixListener>,
    /// Where other relays connect.
    pub relays: Option<TcpListener>,
    /// What to show to other relays. Needed for `relays` and `peers`.
    pub identity: Option<Identity>,
    /// The relays to connect to.
    pub peers: Vec<Peer>,
    /// Descriptors of the program: [`EngineHost::handle_control`] is called when one is readable.
    pub controls: Vec<OwnedFd>,
    /// How long frames wait for an endpoint whose link has broken.
    pub peer_timeout: Duration,
    /// Streams to each relay that this one connects to.
    pub wan_streams: usize,
    /// Whether links to other relays are made over UDP where that gets through, and how fast they send.
    pub wan_udp: Option<Congestion>,
    /// Longest pause before a relay is dialled again.
    pub redial_max: Duration,
    /// Endpoints that were killed may come back: what is kept for them.
    pub recover: Option<RecoveryConfig>,
    /// How frames of endpoints are checked.
    pub integrity: Checksum,
    /// How long to spin before sleeping; `None`: as long as it pays on this machine.
    pub spin: Option<Duration>,
}

/// What is kept for endpoints that may come back.
pub struct RecoveryConfig {
    /// Bytes of memory for it.
    pub memory: u64,
    /// Where the rest goes, if anywhere.
    pub disk: Option<Disk>,
    /// Given to an endpoint since its last image that much, another one is due.
    pub checkpoint_log_bytes: u64,
    /// Endpoints of other nodes may be started on third ones: what they have read of clocks and chance is kept, and written here
    /// when one of them is fenced.
    pub nondeterminism_file: Option<File>,
}

/// What is kept of the reads of an endpoint that has been fenced, and lies at the beginning of the file for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencedRecord {
    /// Where it begins in the endpoint's record,
    pub first: u64,
    /// and how much it is.
    pub bytes: u64,
    /// How often it has looked for messages.
    pub polls: u64,
    /// There is no more room in its record.
    pub is_full: bool,
}

/// A relay to connect to.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its cluster.
    pub cluster: ClusterId,
    /// Where it listens: addresses to try in turn.
    pub addresses: Vec<SocketAddr>,
}

/// The program around an engine.
pub trait EngineHost {
    /// One line for the log.
    fn log(&mut self, line: fmt::Arguments<'_>);

    /// One line that the user should read.
    fn warn(&mut self, line: fmt::Arguments<'_>);

    /// What somebody wanted to know: see [`ControlAction::Query`].
    fn handle_log_reply(&mut self, reply: &LogReply);

    /// Somebody wants nothing more to be taken of starts of an endpoint before this one. Asked for after each control that was
    /// readable, until there is none.
    fn poll_fence(&mut self) -> Option<(Address, u32)> {
        None
    }

    /// Nothing is; and what is known of its reads.
    fn handle_fenced(&mut self, _who: Address, _fenced: &FencedRecord) {}

    /// So much was given to an endpoint since its last image that another would be good.
    fn handle_checkpoint_due(&mut self, _who: Address) {}

    /// Nothing is kept of an endpoint any more.
    fn handle_log_abandoned(&mut self, _who: Address) {}

    /// Of an endpoint of which too much was given to be kept all is kept again, from where it stands for an image.
    fn handle_log_resumed(&mut self, _who: Address) {}

    /// The link to the relay of `cluster`, at the other end of which is `remote`, is up, or there is none
    /// for this reason. Of attempts that fail for the same reason only the first is told.
    fn handle_link(&mut self, cluster: ClusterId, remote: &dyn fmt::Display, state: LinkState<'_>);

    /// The control with this index is readable.
    fn handle_control(
        &mut self,
        index: usize,
        control: &OwnedFd,
        report: &EngineReport,
    ) -> ControlAction;
}

/// See [`EngineHost::handle_link`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState<'a> {
    /// Frames pass both ways.
    Up,
    /// It was up and has broken.
    Down(&'a str),
    /// An attempt to make it has failed.
    Unreachable(&'a str),
}

/// Whether an engine goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlAction {
    /// It does.
    Continue,
    /// It ends.
    Stop,
    /// It goes on, and says what it keeps of its endpoints.
    Query(LogQuery),
}

/// What of that somebody wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogQuery {
    /// How much it is, of endpoints from this one on: as many as fit into an answer.
    All(Address),
    /// So many determinants of this endpoint, and their frames.
    One {
        /// Whose.
        address: Address,
        /// The first of them.
        from: u64,
        /// How many.
        count: u64,
    },
}

/// The answer to an [`LogQuery`].
#[derive(Clone, Debug)]
pub enum LogReply {
    /// Of each endpoint, and where there are more.
    All(Vec<LogStatus>, Option<Address>),
    /// Of one, if anything is kept of it.
    One(Option<LogExcerpt>),
}

/// What an engine has done so far, and what it holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineReport {
    /// Frames and bytes.
    pub relay: Counters,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused, for any reason.
    pub refused: u64,
    /// Links that got through the hello.
    pub attached: u64,
    /// Links now.
    pub links: usize,
    /// Connections still in their hello.
    pub pending: usize,
    /// Streams to other relays, of those.
    pub streams: usize,
    /// Bytes in queues.
    pub queued_bytes: usize,
    /// Bytes kept for endpoints that may come back: in memory,
    pub log_bytes: u64,
    /// and on the disk.
    pub disk_bytes: u64,
    /// Streams to other relays that broke.
    pub breaks: u64,
    /// Calls to the kernel.
    pub waits: u64,
    /// See `waits`.
    pub reads: u64,
    /// See `waits`.
    pub writes: u64,
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EngineReport { relay, .. } = self;
        write!(
            f,
            "frames={} bytes={} unreachable={} lost={} reports_dropped={} malformed={} pauses={} \
             lost_bytes={} delivered_frames={} determinant_bytes={} nondeterminism_bytes={} \
             log_bytes={} disk_bytes={} read_back_bytes={} disk_waits={} accepted={} refused={} attached={} links={} streams={} pending={} \
             queued_bytes={} breaks={} waits={} reads={} writes={}",
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

/// A way to run a relay.
pub trait Engine {
    /// Runs until [`EngineHost::handle_control`] says stop.
    ///
    /// # Errors
    /// If the system refuses what the engine cannot do without.
    fn run(setup: Setup, host: &mut dyn EngineHost) -> io::Result<EngineReport>;
}
