//! The connector: hellos under way, the queue of dials, and paused listeners.
//!
//! What enters: sockets that this process has dialled or accepted, and events at them. What leaves:
//! ended hellos ([`EndedHello`]), each with an established link or the reason of its failure, and
//! log lines about refused connections. Any process on the network may connect to the port of an
//! endpoint: a pending connection holds one of [`PENDING_CONNECTIONS_MAX`] slots and a descriptor,
//! for as long as a hello may take. Refusals for the same reason share one log line a second, so
//! that repeated connections cannot fill the log.
//!
//! What may never happen: a hello takes the slot of a hello whose socket is still open; a listener
//! stays paused after the last pending connection has ended.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::epoll;

use landbridge_drive::link::shm::Mapper;
use landbridge_drive::refusals::Refusals;
use landbridge_drive::sys::now_millis;
use landbridge_proto::endpoint::Peer;

use super::event_token::{EventToken, watch};
use super::handshake::{EstablishedLink, Handshake};
use super::identity::Identity;
use super::local_endpoint::LocalEndpoint;
use crate::arena;
use crate::log;

/// Maximum number of dials under way; further peers wait for their turn. A peer's listener has
/// slots for twice as many pending connections, so that two dialling processes find free slots.
const DIALS_MAX: usize = 128;

/// Maximum number of accepted connections whose hello is under way; further connections wait in the
/// listening queue. Dials of this process do not count: all processes may dial each other at once,
/// and some of them have to answer.
const PENDING_CONNECTIONS_MAX: usize = 256;

/// The purpose of a hello.
#[derive(Clone, Copy)]
pub enum HelloPurpose {
    Peer(Peer),
    /// A further address of a peer that has a link already.
    Rail(Peer, SocketAddr),
    Relay,
    Accepted,
}

/// A hello that has ended, and its outcome.
pub struct EndedHello {
    pub purpose: HelloPurpose,
    /// Address of the other side of a network connection.
    pub remote: Option<SocketAddr>,
    pub outcome: io::Result<EstablishedLink>,
}

/// A hello under way, and its purpose.
struct Hello {
    handshake: Handshake,
    purpose: HelloPurpose,
}

/// All hellos under way, and what waits for them.
pub struct Connector {
    identity: &'static Identity,
    /// Number of hellos under way and paused listeners, which need regular checks.
    open: usize,
    slots: Vec<Option<Hello>>,
    /// Number of hellos on accepted connections.
    pending: usize,
    /// Number of hellos that this process has dialled, including dials to the relay.
    dials: usize,
    /// Peers to be dialled when another dial has ended.
    waiting: VecDeque<Peer>,
    /// Whether the TCP listener and the Unix listener are paused.
    paused_listeners: [bool; 2],
    /// A log line has reported that a listener is paused for want of descriptors.
    has_warned: bool,
    /// Refused connections of other processes, for the log.
    refusals: Refusals,
}

impl Connector {
    pub fn new(identity: &'static Identity) -> Self {
        Self {
            identity,
            open: 0,
            slots: Vec::new(),
            pending: 0,
            dials: 0,
            waiting: VecDeque::new(),
            paused_listeners: [false; 2],
            has_warned: false,
            refusals: Refusals::default(),
        }
    }

    /// Whether a hello is under way or a listener is paused.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.open > 0
    }

    /// Begins a hello on `socket`; returns the hello's number. `connect_time` limits the time for
    /// establishing a connection that is one of several attempts.
    ///
    /// # Errors
    /// Epoll cannot watch the socket.
    pub fn start(
        &mut self,
        own: &LocalEndpoint,
        socket: OwnedFd,
        is_unix: bool,
        purpose: HelloPurpose,
        connect_time: Option<Duration>,
    ) -> io::Result<usize> {
        let introduction = own.introduction;
        let handshake = match purpose {
            HelloPurpose::Accepted => Handshake::accept(socket, is_unix, introduction),
            HelloPurpose::Peer(_) | HelloPurpose::Rail(..) => {
                let dialled = Handshake::dial(socket, is_unix, self.identity, introduction);
                match connect_time {
                    Some(pause) => dialled.with_connect_time(pause),
                    None => dialled,
                }
            }
            HelloPurpose::Relay => {
                Handshake::dial_relay(socket, is_unix, self.identity, introduction)
            }
        };
        let id = self.free_slot();
        let mut interest = epoll::EventFlags::IN;
        if handshake.wants_write() {
            interest |= epoll::EventFlags::OUT;
        }
        watch(&own.epoll, handshake.fd(), EventToken::Hello(id), interest)?;
        self.slots[id] = Some(Hello { handshake, purpose });
        self.open += 1;
        *self.count(purpose) += 1;
        Ok(id)
    }

    /// Continues hello `id`. Returns the hello if it has ended, or has taken too long; its slot is
    /// free then, and paused listeners are watched again.
    pub fn advance(&mut self, own: &LocalEndpoint, id: usize) -> Option<EndedHello> {
        let mut hello = self.slots.get_mut(id).and_then(Option::take)?;
        let outcome = hello.handshake.advance(self.identity, MAPPER);
        if let Ok(None) = outcome
            && !hello.handshake.is_overdue()
        {
            if !hello.handshake.wants_write() {
                let flags = epoll::EventFlags::IN;
                let data = epoll::EventData::new_u64(EventToken::Hello(id).number());
                let _ = epoll::modify(&own.epoll, hello.handshake.fd(), data, flags);
            }
            self.slots[id] = Some(hello);
            return None;
        }
        let (purpose, remote) = self.close(own, hello);
        let overdue = || io::Error::new(io::ErrorKind::TimedOut, "the hello takes too long");
        let outcome = outcome.and_then(|established| established.ok_or_else(overdue));
        Some(EndedHello { purpose, remote, outcome })
    }

    /// Number of slots for hellos, in which [`Self::is_overdue`] looks.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Whether hello `id` has exceeded a time limit.
    pub fn is_overdue(&self, id: usize) -> bool {
        self.slots[id].as_ref().is_some_and(|hello| hello.handshake.is_overdue())
    }

    /// Accepts the next connection that waits at a listener. `None`: no connection waits, or the
    /// listener is paused because no connection can be accepted.
    pub fn accept(&mut self, own: &LocalEndpoint, is_unix: bool) -> Option<OwnedFd> {
        match own.accept(is_unix) {
            Ok(socket) => socket,
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    log!(
                        Warn,
                        "peers that connect have to wait: {error}; raise the limit of open files \
                         (ulimit -n)"
                    );
                }
                self.pause_listener(own, is_unix);
                None
            }
        }
    }

    /// Whether one more connection may be accepted.
    pub fn may_accept(&self) -> bool {
        self.pending < PENDING_CONNECTIONS_MAX
    }

    /// The first pending connection whose hello takes longer than it should.
    pub fn slow_pending(&self) -> Option<usize> {
        let is_slow = |hello: &Hello| {
            matches!(hello.purpose, HelloPurpose::Accepted) && hello.handshake.is_slow()
        };
        self.slots.iter().position(|slot| slot.as_ref().is_some_and(is_slow))
    }

    /// Closes pending connection `id`, if its hello is still under way, to free its slot.
    pub fn evict(&mut self, own: &LocalEndpoint, id: usize) {
        if let Some(hello) = self.slots[id].take() {
            let (_, remote) = self.close(own, hello);
            let why = "too many others wait for their hello";
            self.refuse(remote, &io::Error::other(why));
        }
    }

    /// Stops watching a listener while no connection can be accepted, so that waiting connections
    /// cause no load. The listener is watched again when a pending connection ends, or at the next
    /// regular check.
    pub fn pause_listener(&mut self, own: &LocalEndpoint, is_unix: bool) {
        let is_paused = &mut self.paused_listeners[is_unix as usize];
        if !*is_paused && own.set_watched(is_unix, false).is_ok() {
            *is_paused = true;
            self.open += 1;
        }
    }

    /// Watches paused listeners again.
    pub fn resume_listeners(&mut self, own: &LocalEndpoint) {
        for is_unix in [false, true] {
            let is_paused = &mut self.paused_listeners[is_unix as usize];
            if *is_paused && own.set_watched(is_unix, true).is_ok() {
                *is_paused = false;
                self.open -= 1;
            }
        }
    }

    /// Whether one more peer may be dialled.
    pub fn may_dial(&self) -> bool {
        self.dials < DIALS_MAX
    }

    /// Queues `peer` for a dial when another dial has ended, because too many dials are under way.
    pub fn queue_dial(&mut self, peer: Peer) {
        self.waiting.push_back(peer);
    }

    /// Takes the queue of peers to be dialled; [`Self::restore_queue`] must follow.
    pub fn take_queue(&mut self) -> VecDeque<Peer> {
        std::mem::take(&mut self.waiting)
    }

    /// Puts the rest of the queue back, in front of peers that were queued meanwhile.
    pub fn restore_queue(&mut self, mut waiting: VecDeque<Peer>) {
        waiting.append(&mut self.waiting);
        self.waiting = waiting;
    }

    /// Logs a refused connection with the reason, or counts the refusal if a recent log line has
    /// given the same reason.
    #[cold]
    pub fn refuse(&mut self, remote: Option<SocketAddr>, error: &io::Error) {
        if self.refusals.note(&error.to_string(), now_millis()) {
            let remote = remote.map_or("a process of this node".into(), |at| at.to_string());
            log!(Warn, "a connection of {remote} was refused: {error}");
        }
    }

    /// Whether counted refusals have not been logged yet.
    pub fn has_unlogged_refusals(&self) -> bool {
        self.refusals.needs_clock()
    }

    /// Logs how many connections were refused since the last log line for the same reason.
    #[cold]
    pub fn log_refusals(&mut self, now_millis: u64) {
        while let Some((count, why)) = self.refusals.poll(now_millis) {
            log!(Warn, "{count} more connections were refused: {why}");
        }
    }

    /// Closes what is left of a hello that was taken out of its slot. The hello's socket must be
    /// closed before another hello takes the slot.
    fn close(&mut self, own: &LocalEndpoint, hello: Hello) -> (HelloPurpose, Option<SocketAddr>) {
        let (purpose, remote) = (hello.purpose, hello.handshake.remote());
        drop(hello);
        self.open -= 1;
        *self.count(purpose) -= 1;
        self.resume_listeners(own);
        (purpose, remote)
    }

    /// A number that no hello has.
    fn free_slot(&mut self) -> usize {
        self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    fn count(&mut self, purpose: HelloPurpose) -> &mut usize {
        match purpose {
            HelloPurpose::Accepted => &mut self.pending,
            HelloPurpose::Peer(_) | HelloPurpose::Rail(..) | HelloPurpose::Relay => &mut self.dials,
        }
    }
}

/// Maps rings into the provider's range of addresses (`arena.rs`).
const MAPPER: Mapper = Mapper {
    map: |file, size| {
        arena::map_fd(file, size).map_err(|errno| io::Error::from_raw_os_error(errno.0))
    },
    // SAFETY: the link that has mapped the ring calls this once, when the link is dropped.
    unmap: |start, _| unsafe { arena::unmap(start) },
};
