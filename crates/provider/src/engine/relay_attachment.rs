//! Attaches the endpoint to this cluster's relay.
//!
//! The engine attaches to the relay when the endpoint opens, because peers in other clusters may
//! send first. Peers that only the relay reaches wait for the connection. When the connection is
//! lost, the engine dials the relay again. When the engine gives up the relay, it also gives up
//! these peers.
//!
//! With `recover_log=sender` the message logs of the node take the relay's place, and there is no
//! connection that could be lost.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use landbridge_drive::link::node_log::{ClosedLogs, LogFiles};
use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;
use landbridge_proto::log::layout::LOGGED_PROCESSES_MAX;
use landbridge_proto::path::time::MILLISECOND;

use super::Engine;
use super::carrier::Carrier;
use super::connections::Connections;
use super::connector::HelloPurpose;
use super::identity::RelayAddress;
use super::links::Link;
use super::local_endpoint::{dial_tcp, dial_unix};
use super::peer_state::SendState;
use super::reconnect::is_network_down;
use super::recorded_uplink::{RecordedCarrier, RecordedUplink, end_process};
use super::uplink::{RelayCheck, RelayState};
use crate::log;

/// Longest time that opening an endpoint waits for the relay, so that the endpoint is attached when
/// peers send first.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest time that a recorded endpoint waits for the relay: such an endpoint can do nothing
/// without the relay, whose machine may be very busy.
const RECORDED_TIME_MAX: Duration = Duration::from_secs(30);

impl Engine {
    /// Attaches to the relay before this endpoint sends through it: peers in other clusters may
    /// send first.
    pub(super) fn attach(&mut self) {
        let identity = self.connections.data.identity;
        if identity.has_node_logs() {
            self.connections.open_node_logs();
            return self.other_nodes.open(&mut self.connections);
        }
        let is_wanted = identity.settings.kinds.relay && !identity.relays.is_empty();
        if !is_wanted || self.connections.data.own.address == Address::ANONYMOUS {
            return;
        }
        if let Err(error) = self.connections.dial_relay()
            && !self.connections.uplink.is_reconnecting()
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
            self.poll_epoll(10 * MILLISECOND);
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
                let why = format!("its relay has not attached it again: {error}");
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
    /// Opens the logs of this node, which stand in for the relay, from their beginning.
    pub(super) fn open_node_logs(&mut self) {
        let identity = self.data.identity;
        let files = identity.take_node_logs();
        if files.is_empty() {
            end_process("it opens a second endpoint: use recover_log=relay");
        }
        let (own, size) = (self.data.own.address.index(), identity.size);
        let job = identity.job.to_hex();
        let here = identity.node_sharing.processes.unwrap_or(size).max(1);
        let bytes_max = identity.settings.recover_memory / u64::from(here);
        match ClosedLogs::new(own as usize, &job, bytes_max, LOGGED_PROCESSES_MAX) {
            Ok(closed) => self.attach_to_logs(closed, &files),
            Err(error) => end_process(&format!("the logs of its node cannot be opened: {error}")),
        }
    }

    /// Opens the logs of this node where they were closed.
    /// `files`: those of the logs are the last ones.
    pub(super) fn attach_to_logs(&mut self, closed: ClosedLogs, files: &[OwnedFd]) {
        let attached = LogFiles::find(files)
            .and_then(|files| closed.open(files))
            .and_then(|logs| self.link_up(None, Carrier::Logs(Box::new(logs)), 0, false));
        if let Err(error) = attached {
            end_process(&format!("the logs of its node cannot be opened: {error}"));
        }
        let begun = self.recorded_uplink().map(|mut recorded| recorded.begin_replay());
        assert!(matches!(begun, Some(Ok(()))), "logs of a process that is not recorded");
    }

    /// The exchange with the relay about recording, if this process is recorded.
    pub(super) fn recorded_uplink(&mut self) -> Option<RecordedUplink<'_>> {
        let recording = self.data.recording.as_mut()?;
        let link = self.uplink.link().and_then(|id| self.data.links[id].as_mut());
        let carrier = link.and_then(|link| match &mut link.carrier {
            Carrier::Shm(ring) => Some(RecordedCarrier::Ring(ring)),
            Carrier::Recorded(stream) => Some(RecordedCarrier::Stream(stream)),
            Carrier::Logs(logs) => Some(RecordedCarrier::Logs(logs)),
            _ => None,
        });
        Some(RecordedUplink {
            recording,
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
            RelayState::Closed => {
                return Err(io::Error::other("the connection to the relay has ended"));
            }
            RelayState::Unknown => match self.dial_relay() {
                Err(error) if !self.uplink.is_reconnecting() => return Err(error),
                _ => (),
            },
            RelayState::Dialling | RelayState::Reconnecting => (),
        }
        Ok(())
    }

    /// Link `id` leads to the relay: peers that wait for the relay continue.
    pub(super) fn relay_up(&mut self, id: usize) {
        self.uplink.note_up(id);
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
        if let Carrier::Logs(_) = link.carrier {
            end_process("its message logs hold what cannot be there");
        }
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
        self.uplink.close();
        for peer in self.data.peers.all() {
            if self.data.peers[peer].send_state == SendState::AwaitRelay {
                self.fail_peer(peer, libc::EHOSTUNREACH);
            }
        }
    }
}
