//! The state of the connection to this cluster's relay: which address is dialled next, and how long
//! the engine tries.

use std::io;
use std::time::{Duration, Instant};

use super::identity::{Identity, RelayAddress};
use super::reconnect::{DENIALS_MAX, is_denied, is_handshake_failure, is_network_down};
use crate::log;

/// State of the connection to this cluster's relay.
#[derive(Default)]
pub struct Uplink {
    pub(super) state: RelayState,
    /// Index of the next address of the relay to dial.
    next_candidate: usize,
    /// State of the attempts to attach again, after the connection was lost.
    reconnect: Option<RelayReconnect>,
    /// Number of headers that arrived corrupt.
    pub(super) corrupt: u64,
    /// The error of the last attempt to reach the relay.
    pub(super) problem: Option<String>,
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
pub enum RelayState {
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
    pub fn is_settled(&self) -> bool {
        !matches!(self.state, RelayState::Dialling | RelayState::Reconnecting)
    }

    /// The next address of the relay that this process may dial. A recorded process prefers a relay
    /// on its own node: the ring outlives the process, and costs less than TCP.
    pub fn next_address(&mut self, identity: &'static Identity) -> Option<&'static RelayAddress> {
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

    /// Notes that the relay has answered by link `id`.
    pub fn note_up(&mut self, id: usize) {
        (self.state, self.reconnect) = (RelayState::Up(id), None);
    }

    /// Gives the relay up.
    pub fn close(&mut self) {
        (self.state, self.reconnect) = (RelayState::Closed, None);
    }

    /// Waits for the network: the relay is dialled again and again.
    pub fn await_network(&mut self) {
        self.reconnecting();
    }

    fn reconnecting(&mut self) -> &mut RelayReconnect {
        let now = Instant::now();
        self.state = RelayState::Reconnecting;
        self.reconnect.get_or_insert(RelayReconnect::new(now, now + PAUSE_MIN))
    }

    /// Begins to attach again, with an attempt that is due now.
    pub fn reattach_at_once(&mut self) {
        let now = Instant::now();
        self.reconnect = Some(RelayReconnect::new(now, now));
        self.state = RelayState::Reconnecting;
    }

    /// What is to be done now to attach again; an attempt that is due counts as begun.
    pub fn check(&mut self, identity: &Identity) -> RelayCheck {
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
        let reconnect = self.reconnecting();
        reconnect.denials = if is_denied(error) { reconnect.denials + 1 } else { 0 };
        reconnect.denials < DENIALS_MAX
    }
}

/// What is to be done to attach again.
pub enum RelayCheck {
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
