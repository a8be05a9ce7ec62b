//! The engine of one libfabric endpoint: joins the pure protocol (`landbridge_proto::endpoint`) to
//! links.
//!
//! What enters: requests from the libfabric functions, and frames from the network whenever the MPI
//! library polls. What leaves: completions to the [`Sink`], and frames. The engine starts no
//! thread: all work happens inside calls of the MPI library, under the endpoint's lock.
//!
//! The modules in order; each uses only those before it. Most modules from `data_path` on contain
//! methods of [`DataPath`], [`Connections`] and [`Engine`], which join the types of the modules
//! before them:
//!
//! | module | does |
//! |---|---|
//! | `event_token` | tokens of the epoll set |
//! | `path_settings` | settings of paths |
//! | `identity` | job, rank and node of this process |
//! | `local_endpoint` | listeners of the endpoint, and its names |
//! | `candidates` | the ways by which a peer may be reached |
//! | `rails` | further addresses of peers |
//! | `reconnect` | when a broken path is dialled again, and when a peer is given up |
//! | `request` | requests from the libfabric functions |
//! | `memory` | application memory and owned copies |
//! | `receive_buffers` | what has arrived and waits |
//! | `departed_peers` | receives that wait for a peer that has left |
//! | `integrity` | checksums of frames that cross a network |
//! | `sent_nondeterminism` | the nondeterminism record, for a relay on another node |
//! | `recording` | the recording of message delivery, and its replay |
//! | `recorded_uplink` | what a recorded process and its relay say about recording |
//! | `udp_path` | one end of a UDP path |
//! | `carrier` | what transports the frames of a link |
//! | `handshake` | one hello, step by step |
//! | `connector` | hellos under way, queued dials, paused listeners |
//! | `links` | links to peers |
//! | `link_table` | all links, and which of them are polled |
//! | `path_statistics` | statistics of one path |
//! | `known_regions` | registered memory of another process of the node |
//! | `peer_state` | state of each peer |
//! | `peer_table` | all peers, with names and numbers |
//! | `path_manager` | which links are the paths of which peer |
//! | `path_report` | statistics of all paths |
//! | `application` | registered memory and completions |
//! | `payload_placement` | where the bytes of an arriving payload belong |
//! | `pending_peers` | peers to be given up once a link has been read |
//! | `datagrams` | sockets and tokens of UDP paths |
//! | `log_pieces` | in which pieces long messages are appended to logs |
//! | `bursts` | small frames that leave together |
//! | `data_path` | what sending and receiving need |
//! | `direct_access` | remote memory that is accessed without its process |
//! | `datagram_transfer` | frames of UDP paths |
//! | `serve` | actions of the protocol: bytes moved, remote memory accessed |
//! | `uplink` | state of the connection to the relay |
//! | `liveness` | what follows from the silence of a connection |
//! | `connections` | connections to peers and to the relay |
//! | `relay_attachment` | dials of the relay, its loss, its return |
//! | `liveness_actions` | the regular check of connections for silence |
//! | `dialling` | dials of peers, and the outcome of hellos |
//! | `repair` | repair of broken paths |
//! | `link_failure` | the end of links and of peers |
//! | `datagram_events` | events of UDP sockets, and checks of UDP paths |
//! | `receive` | incoming frames |
//! | `transmit` | outgoing frames |
//! | `log_carriage` | the endpoint that carries logs to and from other nodes |
//! | `remote_transfer`, `log_transport` | frames of logs to and from other nodes |
//! | `transport_polls` | when the transport is polled |
//! | `quiesce` | preparing the process for a checkpoint |
//! | `recorded_polls` | polls of a recorded process |
//! | `wait` | polling and parking |
//! | `peeks` | probes for any source, and messages that the MPI library delivers itself |
//!
//! Only opening and closing wait for the network, for a bounded time: opening for the relay,
//! closing for peers to receive what was sent.
//!
//! What may never happen: any other request waits for the network; a frame is read before its
//! link's hello has ended; a link of one peer keeps another peer from progress.

mod application;
mod bursts;
mod candidates;
mod carrier;
mod connections;
mod connector;
mod data_path;
mod datagram_events;
mod datagram_transfer;
mod datagrams;
mod departed_peers;
mod dialling;
mod direct_access;
mod event_token;
mod handshake;
mod identity;
mod integrity;
mod known_regions;
mod link_failure;
mod link_table;
mod links;
mod liveness;
mod liveness_actions;
mod local_endpoint;
mod log_carriage;
mod log_pieces;
mod log_transport;
mod memory;
mod path_manager;
mod path_report;
mod path_settings;
mod path_statistics;
mod payload_placement;
mod peeks;
mod peer_state;
mod peer_table;
mod pending_peers;
mod quiesce;
mod rails;
mod receive;
mod receive_buffers;
mod reconnect;
mod recorded_polls;
mod recorded_uplink;
mod recording;
mod relay_attachment;
mod remote_transfer;
mod repair;
pub mod request;
mod sent_nondeterminism;
mod serve;
#[cfg(test)]
mod tests;
mod transmit;
mod transport_polls;
mod udp_path;
mod uplink;
mod wait;

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::{Duration, Instant};

use landbridge_drive::refusals::QUIET_MILLIS;
use landbridge_drive::sys::now_millis;
use landbridge_proto::endpoint::{self, Config, Endpoint, Peer, Posting, Ticket};
use landbridge_proto::id::Address;

use crate::abi::Errno;
use crate::atomic::AtomicKind;
use crate::av::Av;
use crate::mr;
use crate::poll_policy::Advice;
use crate::sink::Sink;
use crate::statistics_page::StatisticsSlot;
use crate::{interposer, log};

use application::Application;
use bursts::Bursts;
use connections::Connections;
use connector::Connector;
use data_path::DataPath;
use datagrams::Datagrams;
use identity::Identity;
use link_table::LinkTable;
use liveness::LivenessCheck;
use local_endpoint::LocalEndpoint;
use log_pieces::LogPieces;
use memory::{Bytes, copied_bytes};
pub use peeks::library_repeats_peeks;
use peer_table::PeerTable;
use pending_peers::PendingPeers;
use receive_buffers::ReceiveBuffers;
use recorded_uplink::RecordedUplink;
use request::{
    AtomicRequest, ClaimRequest, CompletionLevel, RecvRequest, RemoteIov, RmaKind, RmaRequest,
    SendRequest,
};
use transport_polls::OtherNodes;
use uplink::Uplink;
use wait::PollState;
pub use wait::{PARK_MILLIS, timespec};

/// Whose messages an endpoint carries.
pub enum EndpointRole {
    /// Messages of the program.
    Program,
    /// Parts of message logs: the endpoint has this address, and is not recorded.
    Transport(Address),
}

impl EndpointRole {
    /// The identity of the endpoint's process, and the endpoint's address and unique number.
    fn identity(&self) -> Result<(&'static Identity, (Address, u64)), &'static str> {
        match *self {
            EndpointRole::Program => Identity::current().map(|own| (own, own.next_endpoint())),
            EndpointRole::Transport(address) => {
                Identity::of_transport().map(|own| (own, own.endpoint(address)))
            }
        }
    }
}

/// Arguments for opening an endpoint.
pub struct Setup {
    pub role: EndpointRole,
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

/// One libfabric endpoint, in three layers, each of which never calls the layer around it:
/// [`DataPath`] sends and receives; [`Connections`] lets links begin and end; the engine takes the
/// program's requests, polls, parks, replays and quiesces.
pub struct Engine {
    connections: Connections,
    receives: WatchedReceives,
    poll_state: PollState,
    other_nodes: OtherNodes,
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
        let (identity, endpoint) = setup.role.identity().map_err(|why| {
            log!(Warn, "{why}");
            Errno::EINVAL
        })?;
        let regions = setup.domain_mr.published().address();
        let own = LocalEndpoint::open(identity, endpoint, setup.own_format, setup.bind, regions);
        let own = own.map_err(|error| {
            log!(Warn, "no endpoint can be opened: {error}");
            Errno(error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let core = Endpoint::new(Config {
            address: own.address,
            eager_window: identity.eager_window(),
            min_multi_recv: setup.min_multi_recv as u64,
            operations_max: OPERATIONS_MAX,
        });
        let settings = &identity.settings;
        // Recorded processes have no background thread, and their transport polls by itself.
        let gathers = matches!(setup.role, EndpointRole::Program) && !identity.recovers;
        let poll_state = PollState::new(identity);
        let start = poll_state.time();
        let data = DataPath {
            identity,
            own,
            clock: poll_state.clock,
            application: Application {
                mr: setup.domain_mr,
                sink: setup.sink,
                source_wanted: setup.source_wanted,
                one_sided: 0,
            },
            core,
            peers: PeerTable::new(setup.av, setup.own_format),
            links: LinkTable::new(StatisticsSlot::take()),
            pending: PendingPeers::default(),
            buffers: ReceiveBuffers::new(identity.retain()),
            datagrams: settings
                .datagrams
                .map(|congestion| Box::new(Datagrams::new(congestion, settings.integrity))),
            recording: identity.recovers.then(|| recording::Recording::new(start)),
            pieces: LogPieces::default(),
            bursts: Bursts::new(gathers),
        };
        let connections = Connections {
            data,
            uplink: Uplink::default(),
            connector: Connector::new(identity),
            liveness: LivenessCheck::new(),
        };
        let mut engine = Engine {
            connections,
            receives: WatchedReceives {
                peeks: peeks::Peeks::default(),
                departed: departed_peers::DepartedPeers::new(),
            },
            poll_state,
            other_nodes: OtherNodes::default(),
        };
        engine.attach();
        if engine.is_recorded() && !engine.connections.uplink.is_up() {
            log!(Warn, "no relay on this node, and nothing can be recorded without");
            return Err(Errno::EIO);
        }
        if engine.is_recorded()
            && let Some((why, consequence)) = interposer::missing_reason()
        {
            log!(Warn, "clocks and random numbers are not recorded: {why}; {consequence}");
        }
        Ok(engine)
    }

    /// The endpoint's name: 48 bytes, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        self.connections.data.own.name()
    }

    #[inline]
    pub fn send(&mut self, request: &SendRequest) -> Result<(), Errno> {
        if let Some(queue) = &self.connections.data.application.sink.receive {
            queue.note_sent();
        }
        let peer = self.connections.data.peer_of(request.target)?;
        if request.inject && !request.notify && self.connections.data.inject_fast(peer, request) {
            self.poll_state.note_posted();
            self.other_nodes.send(&mut self.connections);
            return Ok(());
        }
        self.require_path(peer, request.inject)?;
        self.require_copy_space(peer, request.inject)?;
        let message = endpoint::Message {
            peer,
            memory: Bytes::of_request(request.payload, request.inject),
            tag: request.tag,
            data: request.data,
            ticket: Ticket { context: request.context, notify: request.notify },
            level: level(request.level),
        };
        self.connections.data.core.send(message).map_err(|_| Errno::EAGAIN)?;
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
                engine.connections.data.peers[peer].send_state,
                peer_state::SendState::Up(_) | peer_state::SendState::Closed
            )
        };
        if !inject || has_path(self) {
            return Ok(());
        }
        self.connections.data.core.channel_mut(peer).mark_busy();
        self.poll();
        if has_path(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// Refuses a request that needs a copy with EAGAIN while the retained copies have reached their
    /// bound, until peers confirm some of them. The first copy for a peer is always allowed: a peer
    /// that confirms nothing must not stop the requests for other peers.
    #[inline]
    fn require_copy_space(&mut self, peer: Peer, is_copied: bool) -> Result<(), Errno> {
        let has_room = |engine: &Self| {
            copied_bytes() < engine.connections.data.buffers.retain
                || !engine.connections.data.core.channel(peer).retains()
        };
        if !is_copied || has_room(self) {
            return Ok(());
        }
        self.connections.data.core.channel_mut(peer).solicit_ack();
        self.poll();
        if has_room(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// Executes the protocol's actions and sends its frames after a new operation. An operation for
    /// a lost peer completes at once, without a frame.
    #[inline]
    fn submit(&mut self) {
        self.poll_state.note_posted();
        self.connections.data.drain_actions();
        self.other_nodes.flush(&mut self.connections);
    }

    pub fn recv(&mut self, request: &RecvRequest) -> Result<(), Errno> {
        let source = self.connections.data.source_of(request.source)?;
        self.connections.data.core.messages_mut().recv(Posting {
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
            self.connections.data.core.messages_mut().claim_discard(ticket)
        } else {
            let memory = Bytes::borrow(request.payload);
            self.connections.data.core.messages_mut().claim(Posting {
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
        let peer = self.connections.data.peer_of(request.target)?;
        if self.connections.data.access_directly(peer, request) {
            self.poll_state.note_posted();
            return Ok(());
        }
        let RemoteIov { key, offset, .. } = request.remote;
        let remote = endpoint::Remote { peer, key, offset };
        let ticket = Ticket { context: request.context, notify: request.notify };
        self.require_path(peer, request.inject)?;
        self.require_copy_space(peer, request.inject)?;
        let memory = Bytes::of_request(request.local, request.inject);
        let started = match request.kind {
            RmaKind::Write => {
                self.connections.data.core.write(remote, memory, request.data, ticket)
            }
            RmaKind::Read => self.connections.data.core.read(remote, memory, ticket),
        };
        started.map_err(|_| Errno::EAGAIN)?;
        self.connections.data.application.one_sided += 1;
        self.submit();
        Ok(())
    }

    pub fn atomic(&mut self, request: &AtomicRequest) -> Result<(), Errno> {
        let peer = self.connections.data.peer_of(request.target)?;
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
        let started = self.connections.data.core.atomic(peer, wanted, operands, result, ticket);
        started.map_err(|_| Errno::EAGAIN)?;
        self.connections.data.application.one_sided += 1;
        self.submit();
        Ok(())
    }

    pub fn cancel(&mut self, context: usize) -> Result<(), Errno> {
        let found = self.connections.data.core.messages_mut().cancel(context);
        self.connections.data.drain_actions();
        if found { Ok(()) } else { Err(Errno::ENOENT) }
    }

    pub fn set_min_multi_recv(&mut self, bytes: usize) {
        self.connections.data.core.set_min_multi_recv(bytes as u64);
    }

    /// Sends everything, and waits a bounded time for peers to receive it.
    pub fn close(&mut self) {
        if let Some(datagrams) = &self.connections.data.datagrams {
            datagrams.log_dropped();
        }
        self.connections.uplink.log_corrupt();
        self.connections.data.path_report().log_paths();
        self.connections.data.recording.iter_mut().for_each(|replay| replay.is_closing = true);
        for peer in self.connections.data.peers.active(&self.connections.data.core) {
            self.connections.data.core.channel_mut(peer).goodbye();
        }
        // A relay may lose what it has accepted, and no process retransmits the data after this
        // process has ended.
        self.progress_until(FLUSH_TIME_USUAL, Endpoint::is_safe);
        if !self.connections.data.core.is_safe() {
            log!(Warn, "closing waits until a peer has received what was sent to it");
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_safe);
        }
        if !self.connections.data.core.is_safe() {
            log!(Warn, "closed although a peer has not received what was sent to it");
        }
        if self.connections.data.links.has_udp_paths() && !self.connections.data.core.is_drained() {
            // No process retransmits a lost datagram after this process has ended.
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_drained);
        }
        // Frames in a ring outlive this process. Bytes in a socket also do, unless the peer's
        // Goodbye is left unread.
        if self.connections.data.links.streams > 0 {
            self.progress_until(DRAIN_TIME_MAX, Endpoint::is_drained);
        } else {
            self.progress_until(DRAIN_TIME_MAX, Endpoint::is_goodbye_acknowledged);
        }
        self.connections.connector.log_refusals(now_millis() + QUIET_MILLIS);
        self.connections.recorded_uplink().iter_mut().for_each(RecordedUplink::finish);
        self.other_nodes.finish(&mut self.connections);
    }

    fn progress_until(&mut self, at_most: Duration, is_done: fn(&Endpoint<Bytes>) -> bool) {
        let deadline = Instant::now() + at_most;
        while !is_done(&self.connections.data.core) && Instant::now() < deadline {
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
