//! The connection to this cluster's relay.
//!
//! The engine attaches to the relay when the endpoint opens, because peers in other clusters may
//! send first. Peers that only the relay reaches wait for the connection. When the connection is
//! lost, the engine dials the relay again. When the engine gives up the relay, it also gives up
//! these peers.

use std::io;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;

use super::Engine;
use super::carrier::Carrier;
use super::connections::Connections;
use super::connector::HelloPurpose;
use super::identity::{Identity, RelayAddress};
use super::links::Link;
use super::local_endpoint::{dial_tcp, dial_unix};
use super::peer_state::SendState;
use super::reconnect::{DENIALS_MAX, is_denied, is_handshake_failure, is_network_down};
use super::recorded_uplink::{RecordedCarrier, RecordedUplink, end_process};
use crate::log;

/// Longest time that opening an endpoint waits for the relay, so that the endpoint is attached when
/// peers send first.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest time that a recorded endpoint waits for the relay: such an endpoint can do nothing
/// without the relay, whose machine may be very busy.
const RECORDED_TIME_MAX: Duration = Duration::from_secs(30);

/// State of the connection to this cluster's relay.
#[derive(Default)]
pub struct Uplink {
    state: RelayState,
    /// Index of the next address of the relay to dial.
    next_candidate: usize,
    /// State of the attempts to attach again, after the connection was lost.
    reconnect: Option<RelayReconnect>,
    /// Number of headers that arrived corrupt.
    corrupt: u64,
    /// The error of the last attempt to reach the relay.
    problem: Option<String>,
}

/// Attempts to attach to the relay again.
struct RelayReconnect {
    since: Instant,
    next: Instant,
    pause: Duration,
    /// Consecutive attempts in which the answer denied that this process belongs to the job.
    denials: u32,
}

/// First pause between two attempts; each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(20);

#[derive(Default, PartialEq, Eq)]
enum RelayState {
    #[default]
    Unknown,
    Dialling,
    Up(usize),
    /// The connection is lost, and the next attempt has not begun.
    Reconnecting,
    Closed,
}

impl Uplink {
    /// The link to the relay, while the uplink is up.
    pub fn link(&self) -> Option<usize> {
        match self.state {
            RelayState::Up(id) => Some(id),
            _ => None,
        }
    }

    /// Logs how many frames arrived corrupt whose sender is unknown.
    pub fn log_corrupt(&self) {
        if self.corrupt > 0 {
            log!(Info, "the relay: {} frames of unknown senders arrived corrupt", self.corrupt);
        }
    }

    /// Whether the uplink is in use.
    pub fn is_up(&self) -> bool {
        matches!(self.state, RelayState::Up(_))
    }

    /// Makes the next attempt begin with the first address of the relay.
    pub fn reset(&mut self) {
        (self.state, self.next_candidate, self.reconnect, self.problem) =
            (RelayState::Unknown, 0, None, None);
    }

    /// Whether the connection to the relay is lost, and attempts to attach continue.
    pub fn is_reconnecting(&self) -> bool {
        self.reconnect.is_some()
    }

    /// Whether no attempt to attach is under way.
    fn is_settled(&self) -> bool {
        !matches!(self.state, RelayState::Dialling | RelayState::Reconnecting)
    }

    /// The next address of the relay that this process may dial. A recorded process prefers a relay
    /// on its own node: the ring outlives the process, and costs less than TCP.
    fn next_address(&mut self, identity: &'static Identity) -> Option<&'static RelayAddress> {
        loop {
            let address = identity.relays.get(self.next_candidate)?;
            self.next_candidate += 1;
            match address {
                RelayAddress::Unix(_) if !identity.settings.kinds.shm => (),
                RelayAddress::Tcp(_) if identity.recovers && identity.has_local_relay() => (),
                _ => return Some(address),
            }
        }
    }

    /// Waits for the network: the relay is dialled again and again.
    fn await_network(&mut self) -> &mut RelayReconnect {
        let now = Instant::now();
        self.state = RelayState::Reconnecting;
        self.reconnect.get_or_insert(RelayReconnect::new(now, now + PAUSE_MIN))
    }

    /// Begins to attach again, with an attempt that is due now.
    fn reattach_at_once(&mut self) {
        let now = Instant::now();
        self.reconnect = Some(RelayReconnect::new(now, now));
        self.state = RelayState::Reconnecting;
    }

    /// What is to be done now to attach again; an attempt that is due counts as begun.
    fn check(&mut self, identity: &Identity) -> RelayCheck {
        let Some(reconnect) = &mut self.reconnect else {
            return RelayCheck::Nothing;
        };
        if reconnect.since.elapsed() > identity.settings.peer_timeout {
            return RelayCheck::GiveUp;
        }
        if self.state != RelayState::Reconnecting || Instant::now() < reconnect.next {
            return RelayCheck::Nothing;
        }
        reconnect.next = Instant::now() + reconnect.pause;
        reconnect.pause = (reconnect.pause * 2).min(identity.settings.redial_max);
        self.next_candidate = 0;
        RelayCheck::Dial
    }

    /// Records that an attempt to reach the relay has failed, and no address is left to try.
    /// Returns false if the relay is to be given up.
    pub fn goes_on_after(&mut self, error: &io::Error) -> bool {
        self.problem = Some(error.to_string());
        if self.reconnect.is_none() && !is_network_down(error) && !is_handshake_failure(error) {
            return false;
        }
        let reconnect = self.await_network();
        reconnect.denials = if is_denied(error) { reconnect.denials + 1 } else { 0 };
        reconnect.denials < DENIALS_MAX
    }
}

/// What is to be done to attach again.
enum RelayCheck {
    Nothing,
    /// Dial the relay, from its first address on.
    Dial,
    /// The relay has been out of reach for too long.
    GiveUp,
}

impl RelayReconnect {
    fn new(since: Instant, next: Instant) -> Self {
        Self { since, next, pause: PAUSE_MIN, denials: 0 }
    }
}

impl Engine {
    /// Attaches to the relay before this endpoint sends through it: peers in other clusters may
    /// send first.
    pub(super) fn attach(&mut self) {
        let identity = self.connections.data.identity;
        let is_wanted = identity.settings.kinds.relay && !identity.relays.is_empty();
        if !is_wanted || self.connections.data.own.address == Address::ANONYMOUS {
            return;
        }
        if let Err(error) = self.connections.dial_relay()
            && self.connections.uplink.reconnect.is_none()
        {
            return log!(Warn, "relay: {error}");
        }
        let time_max = match self.is_recorded() {
            true if identity.has_local_relay() => RECORDED_TIME_MAX,
            true => RECORDED_TIME_MAX.max(identity.settings.peer_timeout),
            false => ATTACH_TIME_MAX,
        };
        let deadline = Instant::now() + time_max;
        while !self.connections.uplink.is_settled() && Instant::now() < deadline {
            self.connections.check_relay();
            self.poll_epoll(10);
        }
        let problem = (self.is_recorded() && !self.connections.uplink.is_up()).then(|| {
            let problem = self.connections.uplink.problem.take();
            problem.unwrap_or(format!("it has not answered for {time_max:?}"))
        });
        if let Some(mut recorded) = self.connections.recorded_uplink() {
            if let Some(problem) = problem {
                recorded.end_relay_lost(&format!("its relay cannot be reached: {problem}"));
            }
            if let Err(error) = recorded.begin_replay() {
                let why = format!("its relay has not taken it back: {error}");
                // The relay itself ends the connection in good order.
                match error.kind() {
                    io::ErrorKind::Other => end_process(&why),
                    _ => recorded.end_relay_lost(&why),
                }
            }
        }
        if !self.connections.uplink.is_settled() {
            log!(
                Warn,
                "the relay does not answer yet; until it does, other clusters are out of reach"
            );
        }
    }
}

impl Connections {
    /// The exchange with the relay about recording, if this process is recorded.
    pub(super) fn recorded_uplink(&mut self) -> Option<RecordedUplink<'_>> {
        let replay = self.data.replay.as_mut()?;
        let link = self.uplink.link().and_then(|id| self.data.links[id].as_mut());
        let carrier = link.and_then(|link| match &mut link.carrier {
            Carrier::Shm(ring) => Some(RecordedCarrier::Ring(ring)),
            Carrier::Recorded(stream) => Some(RecordedCarrier::Stream(stream)),
            _ => None,
        });
        Some(RecordedUplink {
            replay,
            carrier,
            own: self.data.own.address,
            identity: self.data.identity,
        })
    }

    /// Dials the next address of the relay.
    pub(super) fn dial_relay(&mut self) -> io::Result<()> {
        let mut may_come = false;
        while let Some(way) = self.uplink.next_address(self.data.identity) {
            let (socket, is_unix) = match way {
                RelayAddress::Unix(name) => (dial_unix(name), true),
                RelayAddress::Tcp(address) => (dial_tcp(*address), false),
            };
            // The state is set before the hello, which may end within the call.
            self.uplink.state = RelayState::Dialling;
            let started = socket
                .and_then(|socket| self.start_handshake(socket, is_unix, HelloPurpose::Relay));
            match started {
                Ok(()) => return Ok(()),
                Err(error) => {
                    may_come |= is_network_down(&error);
                    log!(Info, "relay {way:?}: {error}");
                    self.uplink.problem = Some(error.to_string());
                }
            }
        }
        self.uplink.state = RelayState::Closed;
        if may_come {
            self.uplink.await_network();
        }
        Err(io::Error::other("no relay answers"))
    }

    /// Sends to `peer` through the relay, once the relay is attached.
    pub(super) fn await_relay(&mut self, peer: Peer) -> io::Result<()> {
        // The state is set before the dial, since the relay may answer at once.
        self.data.peers[peer].set_send_state(SendState::AwaitRelay);
        match self.uplink.state {
            RelayState::Up(id) => {
                self.data.paths().use_link(peer, id);
                self.data.paths().restripe(peer);
            }
            RelayState::Closed => return Err(io::Error::other("the relay is gone")),
            RelayState::Unknown => match self.dial_relay() {
                Err(error) if self.uplink.reconnect.is_none() => return Err(error),
                _ => (),
            },
            RelayState::Dialling | RelayState::Reconnecting => (),
        }
        Ok(())
    }

    /// Link `id` leads to the relay: peers that wait for the relay continue.
    pub(super) fn relay_up(&mut self, id: usize) {
        self.uplink.state = RelayState::Up(id);
        self.uplink.reconnect = None;
        for peer in self.data.peers.all() {
            if self.data.peers[peer].send_state == SendState::AwaitRelay {
                self.data.paths().use_link(peer, id);
            }
        }
    }

    /// Handles the loss of link `id` to the relay: the relay is dialled again, and peers without
    /// another path wait for the relay.
    pub(super) fn relay_lost(&mut self, id: usize, link: &Link, is_corrupt: bool) {
        self.uplink.corrupt += u64::from(is_corrupt);
        if let Some(mut recorded) = self.recorded_uplink() {
            recorded.end_relay_lost("its relay has closed the connection");
        }
        self.data.paths().remove_relay_paths(id, link);
        self.data.drain_actions();
        self.uplink.reattach_at_once();
        self.check_relay();
    }

    /// Dials the relay again when the next attempt is due, and gives the relay up after
    /// `peer_timeout`.
    #[cold]
    pub(super) fn check_relay(&mut self) {
        match self.uplink.check(self.data.identity) {
            RelayCheck::Nothing => (),
            RelayCheck::GiveUp => {
                log!(
                    Warn,
                    "the relay could not be reached for {:?}",
                    self.data.identity.settings.peer_timeout
                );
                self.give_up_relay();
            }
            RelayCheck::Dial => {
                if let Err(error) = self.dial_relay() {
                    log!(Info, "relay: {error}");
                    self.uplink.state = RelayState::Reconnecting;
                }
            }
        }
    }

    /// Gives up the relay, and all peers that wait for it.
    pub(super) fn give_up_relay(&mut self) {
        self.uplink.reconnect = None;
        self.uplink.state = RelayState::Closed;
        for peer in self.data.peers.all() {
            if self.data.peers[peer].send_state == SendState::AwaitRelay {
                self.fail_peer(peer, libc::EHOSTUNREACH);
            }
        }
    }
}
