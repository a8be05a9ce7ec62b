//! The connections of the engine: each has a slot, and those past their hello are links of the
//! relay.
//!
//! What enters: transports that were accepted or dialled, and links that the relay has assigned.
//! What leaves: slots whose links are ready to be served, and connections to close.
//!
//! What may never happen: an event of an earlier connection reaches a later one in the same slot.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::ops::{Index, IndexMut};
use std::os::fd::OwnedFd;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::STREAMS_MAX;
use landbridge_proto::route::routing_table::LinkId;

use super::pending_connection::PendingConnection;
use super::transport::Transport;
use super::udp_upgrade::TAKES_OVER;
use crate::link::relay_shm::RelayShmLink;
use crate::link::shm::{Mapper, ShmLink};

/// The key of a connection, which differs from those of later connections in the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionKey {
    pub slot: usize,
    pub generation: u32,
}

pub struct Connection {
    pub generation: u32,
    pub transport: Option<Transport>,
    pub phase: Phase,
    pub remote: Remote,
    /// The beginning of a frame, or frames that wait for capacity of their outputs.
    pub unparsed: Box<[u8]>,
    pub is_queued: bool,
    pub is_writable: bool,
    pub is_paused: bool,
    pub input: InputState,
    /// The connection was written to, so it is monitored until the other side has acknowledged
    /// this.
    pub is_watched: bool,
    /// Since when each check saw something in flight; kept for streams to other relays.
    pub unacked_since_millis: Option<u64>,
    /// The time at which another stream replaced this stream to another relay.
    pub retired_millis: Option<u64>,
}

/// What the other side still sends. A later state is never left for an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InputState {
    Open,
    /// The other side has closed the connection: no event will report the end of the stream again.
    Ending,
    /// The connection has been read to the end that the other side has made.
    Ended,
}

pub enum Phase {
    Free,
    Pending(Box<PendingConnection>),
    Endpoint { link: LinkId, address: Address },
    Peer { link: LinkId, cluster: ClusterId, stream: RelayStream },
    Doctor,
}

/// One of the streams to a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayStream {
    /// The number of the stream, as the dialler numbers it.
    pub number: u32,
    pub is_dialled: bool,
}

pub enum Remote {
    Ip(SocketAddr),
    Udp(SocketAddr),
    Process(i32),
}

/// All connections, by slot.
#[derive(Default)]
pub struct ConnectionTable {
    connections: Vec<Connection>,
    free: Vec<usize>,
    /// The slot of each link's connection, by the relay's link number.
    slots: Vec<Option<usize>>,
    /// The slots of the connections to serve.
    ready: VecDeque<usize>,
    /// The connections to close, each with the reason.
    closing: Vec<(ConnectionKey, String)>,
    /// The streams that another stream has replaced.
    pub retired: Vec<ConnectionKey>,
}

impl Index<usize> for ConnectionTable {
    type Output = Connection;

    fn index(&self, slot: usize) -> &Connection {
        &self.connections[slot]
    }
}

impl IndexMut<usize> for ConnectionTable {
    fn index_mut(&mut self, slot: usize) -> &mut Connection {
        &mut self.connections[slot]
    }
}

impl ConnectionTable {
    pub fn find(&mut self, key: ConnectionKey) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(key.slot)?;
        (connection.generation == key.generation).then_some(connection)
    }

    pub fn key(&self, slot: usize) -> ConnectionKey {
        ConnectionKey { slot, generation: self.connections[slot].generation }
    }

    /// The slot of the connection that carries `link`.
    pub fn slot_of(&self, link: LinkId) -> Option<usize> {
        self.slots.get(link.0 as usize).copied().flatten()
    }

    /// A slot for a new connection.
    pub fn take_free(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.connections.push(Connection::free());
            self.connections.len() - 1
        })
    }

    /// Gives back the slot of a connection that has ended.
    pub fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// Records that the connection in `slot` carries `link` from now on.
    pub fn bind(&mut self, link: LinkId, slot: usize) {
        let number = link.0 as usize;
        if self.slots.len() <= number {
            self.slots.resize(number + 1, None);
        }
        self.slots[number] = Some(slot);
    }

    /// Records that `link` has no connection any more.
    pub fn unbind(&mut self, link: LinkId) {
        self.slots[link.0 as usize] = None;
    }

    /// Lets the connection be served in this round or the next one.
    pub fn enqueue(&mut self, slot: usize) {
        let connection = &mut self.connections[slot];
        if !connection.is_queued {
            connection.is_queued = true;
            self.ready.push_back(slot);
        }
    }

    pub fn ready_count(&self) -> usize {
        self.ready.len()
    }

    /// The next slot to serve.
    pub fn next_ready(&mut self) -> Option<usize> {
        let slot = self.ready.pop_front()?;
        self.connections[slot].is_queued = false;
        Some(slot)
    }

    pub fn schedule_close(&mut self, slot: usize, why: String) {
        self.closing.push((self.key(slot), why));
    }

    /// The next connection to close, and why.
    pub fn next_to_close(&mut self) -> Option<(usize, String)> {
        while let Some((key, why)) = self.closing.pop() {
            if self.find(key).is_some() {
                return Some((key.slot, why));
            }
        }
        None
    }

    /// Whether nothing is to be served or closed.
    pub fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.closing.is_empty()
    }

    /// Links and streams to other relays that are open.
    pub fn counts(&self) -> (usize, usize) {
        let streams = self.connections.iter().filter(|it| it.is_relay_stream()).count();
        (self.slots.iter().flatten().count(), streams)
    }
}

impl Connection {
    pub fn free() -> Self {
        Self {
            generation: 0,
            transport: None,
            phase: Phase::Free,
            remote: Remote::Process(0),
            unparsed: Box::default(),
            is_queued: false,
            is_writable: true,
            is_paused: false,
            input: InputState::Open,
            is_watched: false,
            unacked_since_millis: None,
            retired_millis: None,
        }
    }

    /// Notes that the input has come as far as `state`.
    pub fn note_input(&mut self, state: InputState) {
        self.input = self.input.max(state);
    }

    /// Replaces the Unix socket of a rank by the memory that the rank shares.
    pub fn share_memory(&mut self, memory: OwnedFd) -> Result<(), String> {
        let socket = match self.transport.take() {
            Some(Transport::Plain(socket)) => socket,
            _ => return Err("it shares memory over something else than a Unix socket".into()),
        };
        let link = ShmLink::accept(socket.0, memory, Mapper::ANYWHERE)
            .map_err(|error| format!("it does not share memory ({error})"))?;
        self.transport = Some(Transport::Shm(Box::new(RelayShmLink(link))));
        Ok(())
    }

    pub fn link(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => Some(link),
            _ => None,
        }
    }

    /// Whether this is a stream to another relay of which the kernel knows when it last
    /// received something.
    pub fn is_tcp_stream(&self) -> bool {
        self.is_relay_stream() && matches!(self.transport, Some(Transport::Tls(_)))
    }

    pub fn relay_stream(&self) -> Option<RelayStream> {
        match self.phase {
            Phase::Peer { stream, .. } => Some(stream),
            _ => None,
        }
    }

    pub fn is_relay_stream(&self) -> bool {
        matches!(self.phase, Phase::Peer { .. })
    }
}

impl RelayStream {
    /// The stream of another relay's dial, and whether it replaces an older one, from the cookie.
    pub fn parse(cookie: u64) -> Result<(Self, bool), String> {
        let number = cookie & !TAKES_OVER;
        match number < STREAMS_MAX as u64 {
            true => Ok((Self { number: number as u32, is_dialled: false }, number != cookie)),
            false => Err(format!("it opens a stream of number {number}")),
        }
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remote::Ip(address) => address.fmt(f),
            Remote::Udp(address) => write!(f, "{address}/udp"),
            Remote::Process(0) => write!(f, "a process of this node"),
            Remote::Process(pid) => write!(f, "process {pid} of this node"),
        }
    }
}
