//! The connection to this cluster's relay.
//!
//! The engine attaches to the relay when the endpoint opens, because peers in other clusters may
//! send first. Peers that only the relay reaches wait for the connection. When the connection is
//! lost, the engine dials the relay again. When the engine gives up the relay, it also gives up
//! these peers.

use std::io;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::{Address, EXIT_UPLINK_LOST};
use landbridge_proto::wire::frame::Header;

use super::Engine;
use super::connector::HelloPurpose;
use super::identity::RelayAddress;
use super::links::Link;
use super::local_endpoint::{dial_tcp, dial_unix};
use super::peer_state::SendState;
use super::reconnect::{DENIALS_MAX, is_denied, is_handshake_failure, is_network_down};
use super::replay::{REPLAY_TIME_MAX, RecordedCarrier, is_divergence_report};
use crate::log;

/// Longest time that opening an endpoint waits for the relay, so that the endpoint is attached when
/// peers send first.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest time that a recorded endpoint waits for the relay: such an endpoint can do nothing
/// without the relay, whose machine may be very busy.
const RECORDED_TIME_MAX: Duration = Duration::from_secs(30);

/// Longest time that a relay may take to read the last frames of this process.
const FINISH_TIME_MAX: Duration = Duration::from_secs(10);

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

    /// Number of frames that arrived corrupt and whose sender is unknown; `None` if there were
    /// none.
    pub fn corrupt(&self) -> Option<u64> {
        Some(self.corrupt).filter(|&corrupt| corrupt > 0)
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

    /// Whether no attempt to attach is under way.
    fn is_settled(&self) -> bool {
        !matches!(self.state, RelayState::Dialling | RelayState::Reconnecting)
    }
}

impl Engine {
    /// Attaches to the relay before this endpoint sends through it: peers in other clusters may
    /// send first.
    pub(super) fn attach(&mut self) {
        let identity = self.identity;
        let is_wanted = identity.paths.relay && !identity.relays.is_empty();
        if !is_wanted || self.own.address == Address::ANONYMOUS {
            return;
        }
        if let Err(error) = self.dial_relay()
            && self.uplink.reconnect.is_none()
        {
            return log!(Warn, "relay: {error}");
        }
        let time_max = match self.is_recorded() {
            true if self.has_local_relay() => RECORDED_TIME_MAX,
            true => RECORDED_TIME_MAX.max(identity.peer_timeout),
            false => ATTACH_TIME_MAX,
        };
        let deadline = Instant::now() + time_max;
        while !self.uplink.is_settled() && Instant::now() < deadline {
            self.check_relay();
            self.poll_epoll(10);
        }
        if self.is_recorded() {
            if !self.uplink.is_up() {
                let problem = self.uplink.problem.take();
                let problem = problem.unwrap_or(format!("it has not answered for {time_max:?}"));
                self.end_relay_lost(&format!("its relay cannot be reached: {problem}"));
            }
            if let Err(error) = self.begin_replay() {
                let why = format!("its relay has not taken it back: {error}");
                // The relay itself ends the connection in good order.
                match error.kind() {
                    io::ErrorKind::Other => self.end_process(&why),
                    _ => self.end_relay_lost(&why),
                }
            }
        }
        if !self.uplink.is_settled() {
            log!(
                Warn,
                "the relay does not answer yet; until it does, other clusters are out of reach"
            );
        }
    }

    /// Whether the relay is on this node.
    fn has_local_relay(&self) -> bool {
        self.identity.relays.iter().any(|way| matches!(way, RelayAddress::Unix(_)))
    }

    /// Ends this process because the connection to the relay is lost. A relay on this node loses
    /// nothing unless the relay itself ends, so the job ends ([`Engine::end_process`]). A network
    /// breaks and recovers, so with a relay on another node the next incarnation continues from the
    /// relay's log.
    #[cold]
    pub(super) fn end_relay_lost(&mut self, why: &str) -> ! {
        self.end_if_refused();
        let why = &self.replay.as_ref().map_or(why.to_string(), |replay| replay.at_position(why));
        match self.has_local_relay() {
            true => self.end_process(why),
            false => {
                self.end_with(EXIT_UPLINK_LOST, &format!("this process has lost its relay: {why}"))
            }
        }
    }

    /// Waits until a relay on another node has read everything, before this process ends.
    pub(super) fn finish_recording(&mut self) {
        if let Err(error) = self.finish_stream(FINISH_TIME_MAX) {
            log!(Info, "the relay has not confirmed the end: {error}");
        }
    }

    /// Ends the stream to a relay on another node, once the relay has read all of it. Ends this
    /// process if the relay reports that a frame differs from the frame of an earlier incarnation.
    fn finish_stream(&mut self, time_max: Duration) -> io::Result<()> {
        let Some(RecordedCarrier::Stream(stream)) = self.recorded_carrier() else { return Ok(()) };
        let mut refused = None;
        let outcome = stream.finish(time_max, |frame| refused = refused.or(diverged_frame(frame)));
        match refused {
            Some(frame) => self.end_diverged(frame),
            None => outcome,
        }
    }

    /// Ends the stream to a relay on another node before a checkpoint, so that the relay knows the
    /// position of the restored process. A ring to a relay on this node loses nothing.
    pub(super) fn finish_for_checkpoint(&mut self) {
        let time_max = REPLAY_TIME_MAX.max(self.identity.peer_timeout);
        if let Err(error) = self.finish_stream(time_max) {
            self.end_relay_lost(&format!(
                "its relay has not confirmed what it was sent before an image: {error}"
            ));
        }
    }

    /// Dials the next address of the relay.
    pub(super) fn dial_relay(&mut self) -> io::Result<()> {
        let identity = self.identity;
        let mut may_come = false;
        while let Some(way) = identity.relays.get(self.uplink.next_candidate) {
            self.uplink.next_candidate += 1;
            let (socket, is_unix) = match way {
                RelayAddress::Unix(_) if !identity.paths.shm => continue,
                RelayAddress::Unix(name) => (dial_unix(name), true),
                // A recorded process prefers a relay on its own node: the ring outlives the
                // process, and costs less than TCP.
                RelayAddress::Tcp(_) if identity.recovers && self.has_local_relay() => continue,
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
            self.await_network();
        }
        Err(io::Error::other("no relay answers"))
    }

    /// Waits for the network: the relay is dialled again and again.
    fn await_network(&mut self) -> &mut RelayReconnect {
        let now = Instant::now();
        self.uplink.state = RelayState::Reconnecting;
        let fresh =
            RelayReconnect { since: now, next: now + PAUSE_MIN, pause: PAUSE_MIN, denials: 0 };
        self.uplink.reconnect.get_or_insert(fresh)
    }

    /// Sends to `peer` through the relay, once the relay is attached.
    pub(super) fn await_relay(&mut self, peer: Peer) -> io::Result<()> {
        // The state is set before the dial, since the relay may answer at once.
        self.peers[peer].set_send_state(SendState::AwaitRelay);
        match self.uplink.state {
            RelayState::Up(id) => {
                self.paths().use_link(peer, id);
                self.paths().restripe(peer);
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
        for peer in self.peers.all() {
            if self.peers[peer].send_state == SendState::AwaitRelay {
                self.paths().use_link(peer, id);
            }
        }
    }

    /// Handles the loss of link `id` to the relay: the relay is dialled again, and peers without
    /// another path wait for the relay.
    pub(super) fn relay_lost(&mut self, id: usize, link: &Link, is_corrupt: bool) {
        self.uplink.corrupt += u64::from(is_corrupt);
        if self.is_recorded() {
            self.end_relay_lost("its relay has closed the connection");
        }
        self.paths().remove_relay_paths(id, link);
        self.drain_actions();
        let now = Instant::now();
        self.uplink.reconnect =
            Some(RelayReconnect { since: now, next: now, pause: PAUSE_MIN, denials: 0 });
        self.uplink.state = RelayState::Reconnecting;
        self.check_relay();
    }

    /// Whether the connection to the relay is lost, and attempts to attach continue.
    pub(super) fn is_relay_reconnecting(&self) -> bool {
        self.uplink.reconnect.is_some()
    }

    /// Dials the relay again when the next attempt is due, and gives the relay up after
    /// `peer_timeout`.
    #[cold]
    pub(super) fn check_relay(&mut self) {
        let Some(reconnect) = &mut self.uplink.reconnect else {
            return;
        };
        if reconnect.since.elapsed() > self.identity.peer_timeout {
            log!(Warn, "the relay could not be reached for {:?}", self.identity.peer_timeout);
            return self.give_up_relay();
        }
        if self.uplink.state != RelayState::Reconnecting || Instant::now() < reconnect.next {
            return;
        }
        reconnect.next = Instant::now() + reconnect.pause;
        reconnect.pause = (reconnect.pause * 2).min(self.identity.redial_max);
        self.uplink.next_candidate = 0;
        if let Err(error) = self.dial_relay() {
            log!(Info, "relay: {error}");
            self.uplink.state = RelayState::Reconnecting;
        }
    }

    /// Records that an attempt to reach the relay has failed, and no address is left to try.
    pub(super) fn relay_refused(&mut self, error: &io::Error) {
        self.uplink.problem = Some(error.to_string());
        if self.uplink.reconnect.is_none()
            && !is_network_down(error)
            && !is_handshake_failure(error)
        {
            return self.give_up_relay();
        }
        let reconnect = self.await_network();
        reconnect.denials = if is_denied(error) { reconnect.denials + 1 } else { 0 };
        if reconnect.denials >= DENIALS_MAX {
            self.give_up_relay();
        }
    }

    /// Gives up the relay, and all peers that wait for it.
    fn give_up_relay(&mut self) {
        self.uplink.reconnect = None;
        self.uplink.state = RelayState::Closed;
        for peer in self.peers.all() {
            if self.peers[peer].send_state == SendState::AwaitRelay {
                self.fail_peer(peer, libc::EHOSTUNREACH);
            }
        }
    }
}

/// The number of the frame that differs from the frame of an earlier incarnation, if `frame`
/// reports one.
fn diverged_frame(frame: &[u8]) -> Option<u64> {
    Header::parse(frame).ok().filter(is_divergence_report).map(|header| header.delivered)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::wire::frame::{HEADER_BYTES, Kind};

    use super::*;

    #[test]
    fn a_refusal_is_distinguished_from_other_frames() {
        let (source, target) = (Address::new(0, 0), Address::new(0, 1));
        let header = |kind, sequence| Header {
            length: 0,
            kind,
            flags: 0,
            hops: 0,
            source,
            target,
            sequence,
            delivered: 9,
            credit: 0,
        };
        let said = |kind, sequence| {
            let mut bytes = [0; HEADER_BYTES];
            header(kind, sequence).emit(&mut bytes);
            diverged_frame(&bytes)
        };
        assert_eq!(said(Kind::Determinant, 0), Some(9));
        assert_eq!(
            [said(Kind::Determinant, 1), said(Kind::Data, 0), diverged_frame(&[7; 9])],
            [None; 3]
        );
    }
}
