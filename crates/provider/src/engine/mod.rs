//! The engine behind one libfabric endpoint: it joins the pure protocol (`landbridge_proto::endpoint`) to links.
//!
//! What enters: requests of the libfabric face, and the network whenever the MPI library polls. What
//! leaves: completions to the [`Sink`], and frames. It starts no thread: everything happens inside
//! calls of the MPI library, under the endpoint's lock.
//!
//! | file | does |
//! |---|---|
//! | `request` | what the face asks |
//! | `identity` | who this process is |
//! | `memory` | where bytes lie |
//! | `local_endpoint` | sockets, and the names they go by |
//! | `peer_state` | who the others are |
//! | `dialling` | the way to each, and hellos |
//! | `handshake` | one hello, step by step |
//! | `uplink` | the connection to the relay |
//! | `links` | what leads to peers, and its end |
//! | `transmit` | frames out |
//! | `receive` | frames in |
//! | `serve` | what the protocol wants done: bytes moved, remote memory touched |
//! | `integrity` | checks of what goes over a network |
//! | `reconnect` | paths that broke, and how they come back |
//! | `replay` | what is taken in, so that it can be done again |
//! | `quiesce` | a process of which an image is taken |
//! | `peeks` | probes for any source, and messages that the MPI library delivers itself |
//! | `departed_peers` | receives that wait for who has left |
//! | `rails` | several interfaces as several paths |
//! | `datagrams` | paths over UDP |
//! | `liveness` | paths that have fallen silent |
//! | `wait` | polling and parking |
//!
//! Only opening and closing wait for the network, for a bounded time: opening for the relay, closing for peers to take
//! what was sent.
//!
//! What may never happen: any other request waits for the network; a frame's bytes are touched before its
//! link's hello has ended; a link of one peer keeps another from progress.

mod datagrams;
mod departed_peers;
mod dialling;
mod handshake;
mod identity;
mod integrity;
mod links;
mod liveness;
mod local_endpoint;
mod memory;
mod path_statistics;
mod peeks;
mod peer_state;
mod pending_connections;
mod quiesce;
mod rails;
mod receive;
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

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
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
use links::Link;
use local_endpoint::LocalEndpoint;
use memory::{Bytes, copied_bytes};
pub use peeks::library_repeats_peeks;
use peer_state::PeerState;
use request::{
    AtomicKind, AtomicRequest, ClaimRequest, CompletionLevel, Iov, RecvRequest, RemoteIov, RmaKind,
    RmaRequest, SendRequest,
};
use uplink::Uplink;
use wait::PollState;
pub use wait::{PARK_MILLIS, timespec};

/// What an endpoint is opened with.
pub struct Setup {
    pub domain_mr: Arc<mr::MrTable>,
    pub av: Arc<Av>,
    pub sink: Sink,
    /// The endpoint's name is a Landbridge address; otherwise a `sockaddr_in`.
    pub own_format: bool,
    /// Where to accept connections, if the program has said so.
    pub bind: Option<SocketAddrV4>,
    pub min_multi_recv: usize,
    /// FI_SOURCE: completions of receives carry the sender's number.
    pub source_wanted: bool,
}

/// Operations in flight towards all peers of an endpoint; beyond it the face says EAGAIN. Far more than MPI libraries
/// post without polling, and at some 200 bytes each still little memory.
const OPERATIONS_MAX: usize = 1 << 16;

/// How long closing waits for living peers to take what was sent. The program believes it sent, and what nobody has
/// taken ends with us: so longer than a peer computes without polling.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(600);
/// After this long the user is told what closing waits for.
const FLUSH_TIME_USUAL: Duration = Duration::from_secs(10);
/// How long closing then waits for peers to confirm it, where that matters.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(1);

/// Bytes read from a stream at once, for all streams of the endpoint together.
const STAGE_BYTES: usize = 64 << 10;

pub struct Engine {
    identity: &'static Identity,
    own: LocalEndpoint,
    av: Arc<Av>,
    mr: Arc<mr::MrTable>,
    sink: Sink,
    source_wanted: bool,
    core: Endpoint<Bytes>,
    /// By the numbers the protocol gives peers.
    peer_states: Vec<PeerState>,
    by_name: BTreeMap<local_endpoint::NameBytes, Peer>,
    /// Peers by address-vector number; `u32::MAX` is unknown.
    by_number: Vec<u32>,
    uplink: Uplink,
    links: Vec<Option<Box<Link>>>,
    /// Links through shared memory, polled in turn.
    rings: Vec<usize>,
    /// Rings that were full when somebody wanted to send.
    full_rings: Vec<usize>,
    streams: usize,
    /// The stream that is read directly; epoll does not watch it.
    hot_stream: Option<usize>,
    hellos: dialling::Hellos,
    /// Hellos under way and doors at rest: there is something to look after.
    hellos_open: usize,
    epoll: OwnedFd,
    /// Peers to be failed, and why, once the link that is being read is in its place again.
    failed_peers: Vec<(Peer, i32)>,
    /// Frames that came early, by the number of their first byte: head and payload, as far as they are there.
    early: BTreeMap<(Peer, u64), Box<[u8]>>,
    liveness: liveness::LivenessCheck,
    peeks: peeks::Peeks,
    departed_peers: departed_peers::DepartedPeers,
    /// Some peer has several paths: the protocol wants to know the time.
    has_several: bool,
    /// Paths over UDP, if they are wanted.
    datagrams: Option<Box<datagrams::Datagrams>>,
    /// Further addresses of peers.
    rails: Vec<rails::Rail>,
    /// Peers of which a path is to be had again.
    reconnects: Vec<Peer>,
    /// Peers to which the relay leads no longer, as above.
    dropped: Vec<Peer>,
    /// Unexpected payload, by place of the number the protocol gives it.
    stores: Vec<Option<Box<[u8]>>>,
    stage: Vec<u8>,
    /// One-sided operations of this process that are in flight.
    one_sided: usize,
    /// What is taken in is recorded.
    replay: Option<replay::Replay>,
    /// Of one ring, before others get their turn.
    frames_per_turn: usize,
    /// Operands of the atomic operation at hand.
    scratch: Vec<u8>,
    /// Bytes in copies beyond which nothing more is copied.
    retain: u64,
    /// Where it is said how the paths are.
    statistics_slot: Option<StatisticsSlot>,
    poll_state: PollState,
}

// SAFETY: the raw pointers in it are the application's memory, valid until completion in whatever thread drives.
unsafe impl Send for Engine {}

impl Engine {
    pub fn open(setup: Setup) -> Result<Engine, Errno> {
        let identity = Identity::current().map_err(|why| {
            log!(Warn, "{why}");
            Errno::EINVAL
        })?;
        let (own, epoll) =
            LocalEndpoint::open(identity, setup.own_format, setup.bind).map_err(|error| {
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
            av: setup.av,
            mr: setup.domain_mr,
            sink: setup.sink,
            source_wanted: setup.source_wanted,
            core,
            peer_states: Vec::new(),
            by_name: BTreeMap::new(),
            by_number: Vec::new(),
            uplink: Uplink::default(),
            links: Vec::new(),
            rings: Vec::new(),
            full_rings: Vec::new(),
            streams: 0,
            hot_stream: None,
            hellos: dialling::Hellos::default(),
            hellos_open: 0,
            epoll,
            failed_peers: Vec::new(),
            early: BTreeMap::new(),
            liveness: liveness::LivenessCheck::new(),
            peeks: peeks::Peeks::default(),
            departed_peers: departed_peers::DepartedPeers::new(),
            has_several: false,
            datagrams: identity.datagrams.map(|kind| Box::new(Datagrams::new(kind))),
            rails: Vec::new(),
            reconnects: Vec::new(),
            dropped: Vec::new(),
            stores: Vec::new(),
            stage: vec![0; STAGE_BYTES],
            one_sided: 0,
            replay: None,
            frames_per_turn: receive::FRAMES_PER_TURN,
            scratch: Vec::new(),
            retain: identity.retain,
            statistics_slot: StatisticsSlot::take(),
            poll_state: PollState::new(identity.local_size.unwrap_or(identity.size)),
        };
        let start = engine.poll_state.time();
        engine.replay = identity.recovers.then(|| replay::Replay::new(start));
        engine.attach();
        if engine.is_recorded() && !engine.uplink.is_up() {
            log!(Warn, "no relay on this node, and nothing can be recorded without");
            return Err(Errno::EIO);
        }
        if let Some(why) = interposer::missing_reason().filter(|_| engine.is_recorded()) {
            log!(Warn, "clocks and chance are not recorded: {why}; a restart may go another way");
        }
        Ok(engine)
    }

    /// The endpoint's address: 48 bytes, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        self.own.name()
    }

    #[inline]
    pub fn send(&mut self, request: &SendRequest) -> Result<(), Errno> {
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

    /// What is injected counts as sent when the call returns, and the program may never call again: it is taken only when
    /// there is a way to the peer, which is made by asking often enough.
    #[inline]
    fn require_path(&mut self, peer: Peer, inject: bool) -> Result<(), Errno> {
        let has_path = |engine: &Self| {
            matches!(
                engine.peer_states[peer.0 as usize].send_state,
                peer_state::SendState::Up(_) | peer_state::SendState::Closed
            )
        };
        if !inject || has_path(self) {
            return Ok(());
        }
        self.core.mark_busy(peer);
        self.poll();
        if has_path(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// What is copied while the copies that are kept have reached their bound has to wait until some are confirmed. Not if
    /// none of them is for this peer: one that takes nothing must not keep others from progress.
    #[inline]
    fn require_copy_space(&mut self, peer: Peer, is_copied: bool) -> Result<(), Errno> {
        let has_room =
            |engine: &Self| copied_bytes() < engine.retain || !engine.core.retains_for(peer);
        if !is_copied || has_room(self) {
            return Ok(());
        }
        self.core.solicit_ack(peer);
        self.poll();
        if has_room(self) { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// After the protocol was given something to do: what it wants done now, and its frames. (An operation for a peer that
    /// is gone is done at once, and has no frame.)
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

    /// The memory of a request: the caller's, or a copy if the caller has it back when the call returns. (A copy from the
    /// start: a peer may be told where the bytes lie before they have left.)
    #[inline]
    fn memory(payload: &[Iov], inject: bool) -> Bytes {
        let memory = Bytes::borrow(payload);
        if inject {
            // SAFETY: the caller's memory is valid during its call, which is still on the stack.
            return unsafe { memory.to_owned() };
        }
        memory
    }

    pub fn recv(&mut self, request: &RecvRequest) -> Result<(), Errno> {
        let source = self.source_of(request.source)?;
        self.core.recv(Posting {
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
            self.core.claim_discard(ticket)
        } else {
            let memory = Bytes::borrow(request.payload);
            self.core.claim(Posting {
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
        self.one_sided += 1;
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
        // SAFETY: the caller's memory is valid during its call.
        let operands = unsafe {
            let mut bytes = Bytes::borrow(request.operand).copy();
            bytes.extend(Bytes::borrow(request.compare).copy());
            Bytes::own(bytes)
        };
        let result = wanted.fetch.then(|| Bytes::borrow(request.result));
        let ticket = Ticket { context: request.context, notify: request.notify };
        let started = self.core.atomic(peer, wanted, operands, result, ticket);
        started.map_err(|_| Errno::EAGAIN)?;
        self.one_sided += 1;
        self.submit();
        Ok(())
    }

    pub fn cancel(&mut self, context: usize) -> Result<(), Errno> {
        let found = self.core.cancel(context);
        self.drain_actions();
        if found { Ok(()) } else { Err(Errno::ENOENT) }
    }

    pub fn set_min_multi_recv(&mut self, bytes: usize) {
        self.core.set_min_multi_recv(bytes as u64);
    }

    /// Hands everything to the paths, and gives peers a moment to take it in.
    pub fn close(&mut self) {
        self.log_paths();
        self.replay.iter_mut().for_each(|replay| replay.is_closing = true);
        for peer in self.active_peers() {
            self.core.goodbye(peer);
        }
        // What a relay has taken may yet be lost between relays, and nobody sends it again when we are gone.
        self.progress_until(FLUSH_TIME_USUAL, Endpoint::is_safe);
        if !self.core.is_safe() {
            log!(Warn, "closing waits for a peer to take what it was sent");
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_safe);
        }
        if !self.core.is_safe() {
            log!(Warn, "closed although a peer does not take what it is sent");
        }
        if self.has_udp_paths() && !self.core.is_drained() {
            // What is in a datagram and is lost, nobody sends again when we are gone.
            self.progress_until(FLUSH_TIME_MAX, Endpoint::is_drained);
        }
        // What is in a ring outlives us; what is in a socket does unless the peer's own last words are left unread.
        if self.streams > 0 {
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
