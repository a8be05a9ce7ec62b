//! The connection to this cluster's relay.
//!
//! It is made when the endpoint opens, because peers in other clusters may speak first. Peers that only the relay
//! reaches wait for it; when it is gone for good, so are they.

use std::io;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;

use super::Engine;
use super::doors::{dial_tcp, dial_unix};
use super::identity::RelayWay;
use super::neighbours::Out;
use super::peers::Purpose;
use crate::log;

/// How long opening an endpoint waits for the relay, so that peers which speak first find us attached.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);

/// The connection to this cluster's relay.
#[derive(Default)]
pub struct Relay {
    state: RelayState,
    /// Of the ways to it.
    tried: usize,
}

#[derive(Default, PartialEq, Eq)]
enum RelayState {
    #[default]
    Unknown,
    Dialling,
    Up(usize),
    Gone,
}

impl Relay {
    /// Whether it is in use.
    pub fn is_up(&self) -> bool {
        matches!(self.state, RelayState::Up(_))
    }
}

impl Engine {
    /// Attaches to the relay before anybody sends through it: peers in other clusters may speak first.
    pub(super) fn attach(&mut self) {
        let identity = self.identity;
        let is_wanted = identity.paths.relay && !identity.relays.is_empty();
        if !is_wanted || self.own.address == Address::ANONYMOUS {
            return;
        }
        if let Err(error) = self.dial_relay() {
            return log!(Warn, "relay: {error}");
        }
        let deadline = Instant::now() + ATTACH_TIME_MAX;
        while self.relay.state == RelayState::Dialling && Instant::now() < deadline {
            self.look(10);
        }
        if self.relay.state == RelayState::Dialling {
            log!(
                Warn,
                "the relay does not answer yet; until it does, other clusters are out of reach"
            );
        }
    }

    /// Tries the next way to the relay.
    pub(super) fn dial_relay(&mut self) -> io::Result<()> {
        let identity = self.identity;
        while let Some(way) = identity.relays.get(self.relay.tried) {
            self.relay.tried += 1;
            let (socket, is_unix) = match way {
                RelayWay::Unix(_) if !identity.paths.shm => continue,
                RelayWay::Unix(name) => (dial_unix(name), true),
                RelayWay::Tcp(address) => (dial_tcp(*address), false),
            };
            // Before the hello: it may end within the call.
            self.relay.state = RelayState::Dialling;
            let greeted = socket.and_then(|socket| self.greet(socket, is_unix, Purpose::Relay));
            match greeted {
                Ok(()) => return Ok(()),
                Err(error) => log!(Info, "relay {way:?}: {error}"),
            }
        }
        self.relay.state = RelayState::Gone;
        Err(io::Error::other("no relay answers"))
    }

    /// Sends to `peer` through the relay, once it is there.
    pub(super) fn await_relay(&mut self, peer: Peer) -> io::Result<()> {
        // Before anything is dialled: the relay may answer at once.
        self.neighbours[peer.0 as usize].out = Out::AwaitRelay;
        match self.relay.state {
            RelayState::Up(id) => self.use_link(peer, id),
            RelayState::Gone => return Err(io::Error::other("the relay is gone")),
            RelayState::Unknown => self.dial_relay()?,
            RelayState::Dialling => (),
        }
        Ok(())
    }

    /// Link `id` leads to the relay: peers that wait for it go on.
    pub(super) fn relay_up(&mut self, id: usize) {
        self.relay.state = RelayState::Up(id);
        for index in 0..self.neighbours.len() {
            if self.neighbours[index].out == Out::AwaitRelay {
                self.use_link(Peer(index as u32), id);
            }
        }
    }

    /// Nothing more comes from or goes to the relay.
    pub(super) fn relay_gone(&mut self) {
        let was = std::mem::replace(&mut self.relay.state, RelayState::Gone);
        for index in 0..self.neighbours.len() {
            let out = self.neighbours[index].out;
            let lost = out == Out::AwaitRelay
                || matches!((&was, out), (RelayState::Up(relay), Out::Up(id)) if *relay == id);
            if lost {
                self.fail_peer(Peer(index as u32), libc::EHOSTUNREACH);
            }
        }
    }
}
