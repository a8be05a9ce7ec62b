//! The engine of one libfabric endpoint: joins the pure protocol (`landbridge_proto::endpoint`) to
//! links.
//!
//! What enters: requests from the libfabric functions, and frames from the network whenever the MPI
//! library polls. What leaves: completions to the [`Sink`], and frames. The engine starts no
//! thread: all work happens inside calls of the MPI library, under the endpoint's lock.
//!
//! | file | does |
//! |---|---|
//! | `request` | requests from the libfabric functions |
//! | `identity` | job, rank, node and settings of this process |
//! | `memory` | application memory and owned copies |
//! | `local_endpoint` | listeners of the endpoint, and its names |
//! | `peer_state`, `peer_table` | state of each peer, names and numbers |
//! | `dialling` | path candidates of each peer, and dials |
//! | `pending_connections` | connections of other processes before their hello |
//! | `handshake` | one hello, step by step |
//! | `uplink` | the connection to the relay |
//! | `links`, `link_table` | links to peers, and their end |
//! | `transmit` | outgoing frames |
//! | `receive`, `receive_buffers` | incoming frames, and what waits |
//! | `serve` | actions of the protocol: bytes moved, remote memory accessed |
//! | `integrity` | checksums of frames that cross a network |
//! | `reconnect` | repair of broken paths |
//! | `replay` | determinants of message delivery, and their replay |
//! | `sent_nondeterminism` | the nondeterminism record, for a relay on another node |
//! | `quiesce` | preparing the process for a checkpoint |
//! | `peeks` | probes for any source, and messages that the MPI library delivers itself |
//! | `departed_peers` | receives that wait for a peer that has left |
//! | `rails` | several interfaces as several paths |
//! | `datagrams` | UDP paths |
//! | `path_statistics` | statistics of the paths |
//! | `liveness` | connections without confirmations |
//! | `wait` | polling and parking |
//!
//! Only opening and closing wait for the network, for a bounded time: opening for the relay,
//! closing for peers to receive what was sent.
//!
//! What may never happen: any other request waits for the network; a frame is read before its
//! link's hello has ended; a link of one peer keeps another peer from progress.

mod datagrams;
mod departed_peers;
mod dialling;
mod handshake;
mod identity;
mod integrity;
mod link_table;
mod links;
mod liveness;
mod local_endpoint;
mod memory;
mod path_statistics;
mod peeks;
mod peer_state;
mod peer_table;
mod pending_connections;
mod quiesce;
mod rails;
mod receive;
mod receive_buffers;
mod reconnect;
mod replay;
pub mod request;
mod sent_nondeterminism;
mod serve;
#[cfg(test)]
mod tests;
mod transmit;
mod uplink;
mod wait;

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::{Duration, Instant};

use landbridge_drive::refusals::QUIET_MILLIS;
use landbridge_drive::sys::now_millis;
use landbridge_proto::endpoint::{self, Config, Endpoint, Peer, Posting, Ticket};

use crate::abi::{self, Errno, FiAddr};
use crate::av::Av;
use crate::mr;
use crate::poll_policy::Advice;
use crate::sink::Sink;
use crate::statistics_page::StatisticsSlot;
use crate::{interposer, log};

use datagrams::Datagrams;
use identity::Identity;
use link_table::LinkTable;
use local_endpoint::LocalEndpoint;
use memory::{Bytes, copied_bytes};
pub use peeks::library_repeats_peeks;
use peer_table::PeerTable;
use receive_buffers::ReceiveBuffers;
use request::{
    AtomicKind, AtomicRequest, ClaimRequest, CompletionLevel, Iov, RecvRequest, RemoteIov, RmaKind,
    RmaRequest, SendRequest,
};
use uplink::Uplink;
use wait::PollState;
pub use wait::{PARK_MILLIS, timespec};

/// Arguments for opening an endpoint.
pub struct Setup {
    pub domain_mr: Arc<mr::MrTable>,
    pub av: Arc<Av>,
    pub sink: Sink,
    /// The endpoint's name is a Landbridge address; otherwise the name is a `sockaddr_in`.
    pub own_format: bool,
    /// Address at which the endpoint accepts connections, if the program has set one.
    pub bind: Option<SocketAddrV4>,
    pub min_multi_recv: usize,
    /// FI_SOURCE: completions of receives carry the sender's address-vector number.
    pub source_wanted: bool,
}

/// Maximum number of operations in flight towards all peers of an endpoint; beyond this number the
/// libfabric functions return EAGAIN. The bound is far more than MPI libraries post without
/// polling, and at some 200 bytes each operation costs little memory.
const OPERATIONS_MAX: usize = 1 << 16;

/// Longest time that closing waits for living peers to receive what was sent. The program believes
/// the data sent, and data that no peer has received is lost when this process ends. So the time is
/// longer than a peer computes without polling.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(600);
/// Time after which a log line reports what closing waits for.
const FLUSH_TIME_USUAL: Duration = Duration::from_secs(10);
/// Longest time that closing then waits for peers to confirm what they have received, where this
/// matters.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(1);

pub struct Engine {
    identity: &'static Identity,
    own: LocalEndpoint,
    application: Application,
    core: Endpoint<Bytes>,
    peers: PeerTable,
    uplink: Uplink,
    links: LinkTable,
    hellos: dialling::Hellos,
    pending: PendingPeers,
    buffers: ReceiveBuffers,
    receives: WatchedReceives,
    liveness: liveness::LivenessCheck,
    /// UDP paths, if the setting `udp` is on.
    datagrams: Option<Box<datagrams::Datagrams>>,
    /// State of recording and replay, if this process is recorded.
    replay: Option<replay::Replay>,
    poll_state: PollState,
}

/// What the application has given to the endpoint.
struct Application {
    mr: Arc<mr::MrTable>,
    sink: Sink,
    /// FI_SOURCE: completions of receives carry the sender's address-vector number.
    source_wanted: bool,
    /// One-sided operations of this process that are in flight.
    one_sided: usize,
}

/// Peers for which something is to be done once the link that is being read is back in its table.
#[derive(Default)]
struct PendingPeers {
    /// Peers to be failed, with the errno.
    failed: Vec<(Peer, i32)>,
    /// Peers that the relay cannot reach any more; their relay paths are closed.
    dropped: Vec<Peer>,
    /// Peers with a lost path that the engine reopens.
    reconnects: Vec<Peer>,
}

/// Receives and probes that need more than a message.
struct WatchedReceives {
    peeks: peeks::Peeks,
    departed: departed_peers::DepartedPeers,
}

// SAFETY: the raw pointers in the engine point to the application's memory, which is valid until
// completion, in whatever thread calls the engine.
unsafe impl Send for Engine {}

impl Engine {
    pub fn open(setup: Setup) -> Result<Engine, Errno> {
        let identity = Identity::current().map_err(|why| {
            log!(Warn, "{why}");
            Errno::EINVAL
        })?;
        let own = LocalEndpoint::open(identity, setup.own_format, setup.bind).map_err(|error| {
            log!(Warn, "no endpoint can be opened: {error}");
            Errno(error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let core = Endpoint::new(Config {
            address: own.address,
            eager_window: identity.eager_window(),
            min_multi_recv: setup.min_multi_recv as u64,
            operations_max: OPERATIONS_MAX,
        });
        let mut engine = Engine {
            identity,
            own,
            application: Application {
                mr: setup.domain_mr,
                sink: setup.sink,
                source_wanted: setup.source_wanted,
                one_sided: 0,
            },
            core,
            peers: PeerTable::new(setup.av),
            uplink: Uplink::default(),
            links: LinkTable::new(StatisticsSlot::take()),
            hellos: dialling::Hellos::default(),
            pending: PendingPeers::default(),
            buffers: ReceiveBuffers::new(identity.retain),
            receives: WatchedReceives {
                peeks: peeks::Peeks::default(),
                departed: departed_peers::DepartedPeers::new(),
            },
            liveness: liveness::LivenessCheck::new(),
            datagrams: identity.datagrams.map(|kind| Box::new(Datagrams::new(kind))),
            replay: None,
            poll_state: PollState::new(identity),
        };
        let start = engine.poll_state.time();
        engine.replay = identity.recovers.then(|| replay::Replay::new(start));
        engine.attach();
        if engine.is_recorded() && !engine.uplink.is_up() {
            log!(Warn, "no relay on this node, and nothing can be recorded without");
            return Err(Errno::EIO);
        }
        if engine.is_recorded()
            && let Some((why, consequence)) = interposer::missing_reason()
        {
            log!(Warn, "clocks and chance are not recorded: {why}; {consequence}");
        }
        Ok(engine)
    }

    /// The endpoint's name: 48 bytes, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        self.own.name()
    }

    #[inline]
    pub fn send(&mut self, request: &SendRequest) -> Result<(), Errno> {
        if let Some(queue) = &self.application.sink.receive {
            queue.note_sent();
        }
        let peer = self.peer_of(request.target)?;
        if request.inject && !request.notify && self.inject_fast(peer, request) {
            self.note_posted();
            return Ok(());
        }
        self.require_path(peer, request.inject)?;
        self.require_copy_space(peer, request.inject)?;
        let message = endpoint::Message {
            peer,
            memory: Self::memory(request.payload, request.inject),
            tag: request.tag,
            data: request.data,
            ticket: Ticket { context: request.context, notify: request.notify },
            level: level(request.level),
        };
        self.core.send(message).map_err(|_| Errno::EAGAIN)?;
        self.submit();
        Ok(())
    }

    /// Refuses an injected request with EAGAIN until a path to the peer is open. An injected
    /// request counts as sent when the call returns, and the program may never call again. Repeated
    /// requests make the engine open the path.
    #[inline]
    fn require_path(&mut self, peer: Peer, inject: bool) -> Result<(), Errno> {
        let has_path = |engine: &Self| {
            matches!(
                engine.peers[peer].send_state,
                peer_state::SendState::Up(_) | peer_state::SendState::Closed
            )
        };
        if !inject || has_path(self) {
            return Ok(());
        }
        self.core.channel_mut(peer).mark_busy();
        self.poll();
        if has_path(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// Refuses a request that needs a copy with EAGAIN while the retained copies have reached their
    /// bound, until peers confirm some of them. The first copy for a peer is always allowed: a peer
    /// that confirms nothing must not stop the requests for other peers.
    #[inline]
    fn require_copy_space(&mut self, peer: Peer, is_copied: bool) -> Result<(), Errno> {
        let has_room = |engine: &Self| {
            copied_bytes() < engine.buffers.retain || !engine.core.channel(peer).retains()
        };
        if !is_copied || has_room(self) {
            return Ok(());
        }
        self.core.channel_mut(peer).solicit_ack();
        self.poll();
        if has_room(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// Executes the protocol's actions and sends its frames after a new operation. An operation for
    /// a lost peer completes at once, without a frame.
    #[inline]
    fn submit(&mut self) {
        self.note_posted();
        self.run_actions();
    }

    #[inline]
    fn run_actions(&mut self) {
        self.drain_actions();
        self.flush();
    }

    /// The memory of a request: the caller's memory, or a copy if the caller may reuse the memory
    /// when the call returns. The copy exists from the beginning, because a peer may learn the
    /// address of the bytes before the bytes have left.
    #[inline]
    fn memory(payload: &[Iov], inject: bool) -> Bytes {
        let memory = Bytes::borrow(payload);
        if inject {
            // SAFETY: the caller's memory is valid during the call, which is still on the stack.
            return unsafe { memory.to_owned() };
        }
        memory
    }

    pub fn recv(&mut self, request: &RecvRequest) -> Result<(), Errno> {
        let source = self.source_of(request.source)?;
        self.core.messages_mut().recv(Posting {
            source,
            memory: Bytes::borrow(request.payload),
            tag: request.tag,
            ticket: Ticket { context: request.context, notify: request.notify },
            multi: request.multi,
        });
        self.submit();
        Ok(())
    }

    pub fn claim(&mut self, request: &ClaimRequest) -> Result<(), Errno> {
        let ticket = Ticket { context: request.context, notify: request.notify };
        let found = if request.discard {
            self.core.messages_mut().claim_discard(ticket)
        } else {
            let memory = Bytes::borrow(request.payload);
            self.core.messages_mut().claim(Posting {
                source: None,
                memory,
                tag: Some((0, 0)),
                ticket,
                multi: false,
            })
        };
        self.submit();
        if found { Ok(()) } else { Err(Errno::EINVAL) }
    }

    pub fn rma(&mut self, request: &RmaRequest) -> Result<(), Errno> {
        let peer = self.peer_of(request.target)?;
        let RemoteIov { key, offset, .. } = request.remote;
        let remote = endpoint::Remote { peer, key, offset };
        let ticket = Ticket { context: request.context, notify: request.notify };
        self.require_path(peer, request.inject)?;
        self.require_copy_space(peer, request.inject)?;
        let memory = Self::memory(request.local, request.inject);
        let started = match request.kind {
            RmaKind::Write => self.core.write(remote, memory, request.data, ticket),
            RmaKind::Read => self.core.read(remote, memory, ticket),
        };
        started.map_err(|_| Errno::EAGAIN)?;
        self.application.one_sided += 1;
        self.submit();
        Ok(())
    }

    pub fn atomic(&mut self, request: &AtomicRequest) -> Result<(), Errno> {
        let peer = self.peer_of(request.target)?;
        let remote = request.remote;
        let wanted = endpoint::AtomicRequest {
            op: 0,
            operation: request.op as u8,
            datatype: request.datatype as u8,
            fetch: request.kind != AtomicKind::Update,
            compare: request.kind == AtomicKind::Compare,
            length: remote.len as u32,
            key: remote.key,
            offset: remote.offset,
        };
        self.require_path(peer, request.inject)?;
        self.require_copy_space(peer, true)?;
        // SAFETY: the caller's memory is valid during the call.
        let operands = unsafe {
            let mut bytes = Bytes::borrow(request.operand).copy();
            bytes.extend(Bytes::borrow(request.compare).copy());
            Bytes::own(bytes)
        };
        let result = wanted.fetch.then(|| Bytes::borrow(request.result));
        let ticket = Ticket { context: request.context, notify: request.notify };
        let started = self.core.atomic(peer, wanted, operands, result, ticket);
        started.map_err(|_| Errno::EAGAIN)?;
        self.application.one_sided += 1;
        self.submit();
        Ok(())
    }

    pub fn cancel(&mut self, context: usize) -> Result<(), Errno> {
        let found = self.core.messages_mut().cancel(context);
        self.drain_actions();
        if found { Ok(()) } else { Err(Errno::ENOENT) }
    }

    pub fn set_min_multi_recv(&mut self, bytes: usize) {
        self.core.set_min_multi_recv(bytes as u64);
    }

    /// Sends everything, and waits a bounded time for peers to receive it.
    pub fn close(&mut self) {
        self.log_paths();
        self.replay.iter_mut().for_each(|replay| replay.is_closing = true);
        for peer in self.active_peers() {
            self.core.channel_mut(peer).goodbye();
        }
        // A relay may lose what it has accepted, and no process retransmits the data after this
        // process has ended.
        self.progress_until(FLUSH_TIME_USUAL, Endpoint::is_safe);
        if !self.core.is_safe() {
            log!(Warn, "closing waits for a peer to take what it was sent");
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_safe);
        }
        if !self.core.is_safe() {
            log!(Warn, "closed although a peer does not take what it is sent");
        }
        if self.has_udp_paths() && !self.core.is_drained() {
            // No process retransmits a lost datagram after this process has ended.
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_drained);
        }
        // Frames in a ring outlive this process. Bytes in a socket also do, unless the peer's
        // Goodbye is left unread.
        if self.links.streams > 0 {
            self.progress_until(DRAIN_TIME_MAX, Endpoint::is_drained);
        } else {
            self.progress_until(DRAIN_TIME_MAX, Endpoint::is_goodbye_acknowledged);
        }
        self.log_refusals(now_millis() + QUIET_MILLIS);
        self.finish_recording();
    }

    fn progress_until(&mut self, at_most: Duration, is_done: fn(&Endpoint<Bytes>) -> bool) {
        let deadline = Instant::now() + at_most;
        while !is_done(&self.core) && Instant::now() < deadline {
            match self.progress() {
                Advice::GoOn => (),
                Advice::Yield => {
                    std::thread::yield_now();
                    self.note_advice_taken(Advice::Yield, 0);
                }
                Advice::Park => {
                    let events = self.park(PARK_MILLIS);
                    self.note_advice_taken(Advice::Park, events);
                }
            }
        }
    }

    #[inline]
    fn source_of(&mut self, number: FiAddr) -> Result<Option<Peer>, Errno> {
        if number == abi::ADDR_UNSPEC { Ok(None) } else { self.peer_of(number).map(Some) }
    }
}

#[inline]
fn level(level: CompletionLevel) -> endpoint::CompletionLevel {
    match level {
        CompletionLevel::Inject | CompletionLevel::Transmit => {
            endpoint::CompletionLevel::TransmitComplete
        }
        CompletionLevel::Delivery => endpoint::CompletionLevel::DeliveryComplete,
    }
}
