//! Repairs broken paths, and decides when a peer is given up.
//!
//! When a path is lost, frames continue on another path if there is one, and the protocol
//! retransmits what the lost path may have lost. The engine dials the lost path again, at once and
//! then with growing pauses. When no path is left that delivers anything, the peer is *unreachable*
//! ([`Engine::is_unreachable`]). Operations for an unreachable peer wait, without an error, for up
//! to `peer_timeout`. The peer is given up after this time, or earlier when its addresses refuse
//! every connection.
//!
//! A reconnect proceeds in rounds, and each round tries every candidate. The answers of the
//! candidates and the time decide:
//!
//! | what happens | while the peer is unreachable | otherwise |
//! |---|---|---|
//! | a candidate is refused | the round counts as refused, if all candidates are | |
//! | the other side denies that we are of the job | as refused; more rounds are allowed | |
//! | a candidate fails for another reason | the count of refused rounds returns to zero | |
//! | a round was refused | retry after a pause; the last refusal fails the peer | retry later |
//! | the peer becomes unreachable | pauses and refusals count from zero | |
//! | `peer_timeout` has passed since | the peer is given up | |
//!
//! What may never happen: operations wait without end for an unreachable peer, whatever paths are
//! open.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::Peer;

use super::Engine;
use super::handshake::Carrier;
use super::links::{Link, RELAY_PATH};
use super::peer_state::{OpenPath, SendState};
use crate::log;

/// First pause between two attempts; each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Number of consecutive refused rounds after which the peer counts as ended. A single refusal may
/// come from a full listener.
const REFUSALS_MAX: u32 = 4;
/// Number of consecutive refused rounds after which the peer counts as ended, if an answer denied
/// that this process belongs to the job. The hello may have been corrupted on the network: its
/// proof is its only checksum.
pub(super) const DENIALS_MAX: u32 = 10;
/// Age from which on an open connection is not the result of a simultaneous dial. A newer
/// connection between the same two addresses then shows that the older connection is broken.
const DUPLICATE_AGE_MAX: Duration = Duration::from_secs(2);

/// State of the attempts to reopen a path of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconnect {
    /// Time since when the peer is unreachable; `None` if the peer is reachable.
    unreachable_since: Option<Instant>,
    next: Instant,
    pause: Duration,
    /// Consecutive rounds in which every candidate was refused since the peer became unreachable.
    refusals: u32,
    /// Some candidate of this round failed for another reason than a refusal.
    has_unrefused: bool,
    /// An answer in this round denied that this process belongs to the job.
    is_denied: bool,
    /// A path was lost, and not only suspected.
    pub has_lost: bool,
}

impl Reconnect {
    /// The pause after the current attempt.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    fn new(has_lost: bool, now: Instant) -> Self {
        let (has_unrefused, is_denied) = (false, false);
        Self {
            unreachable_since: None,
            next: now,
            pause: PAUSE_MIN,
            refusals: 0,
            has_unrefused,
            is_denied,
            has_lost,
        }
    }

    /// Begins a round, in which every candidate is tried once more.
    fn begin_round(&mut self) {
        (self.has_unrefused, self.is_denied) = (false, false);
    }

    /// Records that a candidate has failed.
    fn note(&mut self, error: &io::Error) {
        // No listener is at this address, or the listener belongs to another process.
        let is_refused =
            matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::AddrInUse);
        self.has_unrefused |= !is_refused && !is_denied(error);
        self.is_denied |= is_denied(error);
    }

    /// Records whether the peer is unreachable now. Returns the time since when the peer is
    /// unreachable.
    fn note_unreachable(&mut self, is_unreachable: bool, now: Instant) -> Option<Instant> {
        match self.unreachable_since {
            _ if !is_unreachable => self.unreachable_since = None,
            Some(_) => (),
            // Refusals count, and pauses are short, only from the moment when the peer becomes
            // unreachable.
            None => {
                let Reconnect { has_unrefused, is_denied, has_lost, .. } = *self;
                let fresh = Reconnect::new(has_lost, now);
                *self =
                    Reconnect { unreachable_since: Some(now), has_unrefused, is_denied, ..fresh };
            }
        }
        self.unreachable_since
    }

    /// Ends a round in which no candidate reached the peer. Returns true if the peer counts as
    /// ended, and no further round is due.
    fn end_round(&mut self, pause_max: Duration, now: Instant) -> bool {
        let is_refused = self.unreachable_since.is_some() && !self.has_unrefused;
        self.refusals = if is_refused { self.refusals + 1 } else { 0 };
        let refusals_max = if self.is_denied { DENIALS_MAX } else { REFUSALS_MAX };
        if self.refusals >= refusals_max {
            return true;
        }
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(pause_max);
        false
    }
}

impl Link {
    /// Whether the link delivers frames, as far as is known: the link is neither a suspected UDP
    /// path nor a connection without confirmations for so long that another connection is dialled.
    pub(super) fn works(&self) -> bool {
        match &self.carrier {
            Carrier::Datagram(udp_path) => udp_path.is_open() && !udp_path.is_suspected(),
            _ => !self.is_unresponsive,
        }
    }
}

/// Whether the error is a failure of the network, which may recover.
pub(super) fn is_network_down(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(error.kind(), HostUnreachable | NetworkDown | NetworkUnreachable | TimedOut)
}

/// Whether a process answered, and the hello failed: another attempt may succeed.
pub(super) fn is_handshake_failure(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionReset, UnexpectedEof};
    is_denied(error) || matches!(error.kind(), ConnectionReset | UnexpectedEof)
}

/// Whether the process that answered denies that this process belongs to the job.
pub(super) fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

impl Engine {
    /// Closes the path of `peer` over link `id`, which joined the addresses `ends`, after an error
    /// that need not be final. The engine dials the path again, unless another connection joins the
    /// same addresses.
    #[cold]
    pub(super) fn lose_path(
        &mut self,
        peer: Peer,
        id: usize,
        ends: Option<(IpAddr, IpAddr)>,
        error: &io::Error,
    ) {
        let address = self.core.address(peer);
        let open_paths = &self.peers[peer].open_paths;
        let Some(place) = open_paths.iter().position(|open_path| open_path.link == id) else {
            return;
        };
        // The statistics of a closed link are final already.
        let path = open_paths[place].path;
        if let Some(link) = self.links[id].take() {
            self.finish_statistics(peer, path, &link, true);
            self.links[id] = Some(link);
        }
        let peer_state = &mut self.peers[peer];
        let lost = peer_state.open_paths.remove(place);
        let other = peer_state.open_paths.last().map(|open_path| open_path.link);
        match other {
            Some(link) => peer_state.send_state = SendState::Up(link),
            None => peer_state.send_state = SendState::Reconnecting,
        }
        let goes_on = if other.is_some() { "goes on by another" } else { "is made again" };
        log!(Warn, "a path to {address} is lost and {goes_on}: {error}");
        self.core.close_path(peer, lost.path);
        self.restripe(peer);
        self.drain_actions();
        let is_rail = self.rail_lost(peer, ends, id);
        let is_needed = self.duplicate_link(peer, ends).is_none() && !is_rail;
        // UDP paths alone do not show that a peer has ended.
        if is_needed || !self.has_connection(peer) {
            self.begin_reconnect(peer, true);
        }
    }

    /// Whether no path to `peer` delivers frames any more, as far as is known.
    pub(super) fn is_unreachable(&self, peer: Peer) -> bool {
        let open_paths = &self.peers[peer].open_paths;
        // A link in use has been taken out of `links`, and counts as working.
        !open_paths
            .iter()
            .any(|open_path| self.links[open_path.link].as_ref().is_none_or(|link| link.works()))
    }

    /// Whether `peer` has a path that is not a UDP path.
    fn has_connection(&self, peer: Peer) -> bool {
        let is_udp_path = |link: &Link| link.socket().is_some();
        let open_paths = &self.peers[peer].open_paths;
        open_paths
            .iter()
            .any(|open_path| !self.links[open_path.link].as_deref().is_some_and(is_udp_path))
    }

    /// Time since when `peer` is unreachable; `None` if `peer` is reachable or has no reconnect
    /// under way.
    fn unreachable_since(&mut self, peer: Peer) -> Option<Instant> {
        let is_unreachable = self.is_unreachable(peer);
        let reconnect = self.peers[peer].reconnect.as_mut()?;
        reconnect.note_unreachable(is_unreachable, Instant::now())
    }

    /// Closes the path of `peer` through the relay, which cannot reach `peer` at the moment.
    pub(super) fn drop_relay_path(&mut self, peer: Peer) {
        let open_paths = &self.peers[peer].open_paths;
        let through_relay = open_paths.iter().find(|open_path| open_path.path == RELAY_PATH);
        if let Some(OpenPath { link, path }) = through_relay.copied() {
            self.leave_relay_link(peer, link, path);
            let why =
                io::Error::new(io::ErrorKind::NetworkUnreachable, "the relay cannot reach it");
            self.lose_path(peer, link, None, &why);
        }
    }

    /// Detaches `peer` from the relay's link, which other peers still use: the link copies what it
    /// holds of a frame for `peer`, and discards the rest of a payload that arrives from `peer`.
    fn leave_relay_link(&mut self, peer: Peer, id: usize, path: PathId) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        if link.inside.is_some_and(|(from, _)| from == peer) {
            link.discard_rest();
        }
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            stream.copy_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
    }

    pub(super) fn begin_reconnect(&mut self, peer: Peer, has_lost: bool) {
        let peer_state = &mut self.peers[peer];
        if let Some(reconnect) = &mut peer_state.reconnect {
            reconnect.has_lost |= has_lost;
            return;
        }
        peer_state.reconnect = Some(Reconnect::new(has_lost, Instant::now()));
        let is_dialling = peer_state.is_dialling;
        if !self.pending.reconnects.contains(&peer) {
            self.pending.reconnects.push(peer);
        }
        if !is_dialling {
            self.redial(peer);
        }
    }

    fn redial(&mut self, peer: Peer) {
        let peer_state = &mut self.peers[peer];
        peer_state.candidates = None;
        if let Some(reconnect) = &mut peer_state.reconnect {
            reconnect.begin_round();
        }
        self.probe_udp_paths(peer);
        self.dial(peer);
    }

    /// Records that an attempt to reach `peer` has failed.
    pub(super) fn note_attempt(&mut self, peer: Peer, error: &io::Error) {
        let peer_state = &mut self.peers[peer];
        let is_further_address = peer_state.is_further_address;
        let may_come = is_network_down(error) || is_handshake_failure(error);
        if peer_state.reconnect.is_none() && may_come && peer_state.open_paths.is_empty() {
            // The network fails before the first path to this peer was open. The engine waits for
            // the network as after the loss of a path.
            peer_state.reconnect = Some(Reconnect::new(true, Instant::now()));
            self.pending.reconnects.push(peer);
        }
        if is_further_address {
            // A further address may never have had a listener, so its failure says nothing about
            // the peer.
            return;
        }
        if let Some(reconnect) = &mut self.peers[peer].reconnect {
            reconnect.note(error);
        }
    }

    /// Ends a round in which no candidate reached `peer`, and schedules the next round.
    pub(super) fn reconnect_later(&mut self, peer: Peer) {
        let (address, redial_max) = (self.core.address(peer), self.identity.redial_max);
        self.unreachable_since(peer);
        let peer_state = &mut self.peers[peer];
        let Some(reconnect) = &mut peer_state.reconnect else {
            return;
        };
        if reconnect.end_round(redial_max, Instant::now()) {
            log!(Warn, "the connection to {address} is lost, and nobody answers there");
            return self.fail_peer(peer, libc::ECONNRESET);
        }
        self.set_send_state(peer, SendState::Reconnecting);
    }

    /// Continues all reconnects. The engine calls this every few milliseconds while there are any.
    #[cold]
    pub(super) fn check_reconnects(&mut self) {
        let now = Instant::now();
        for peer in std::mem::take(&mut self.pending.reconnects) {
            let unreachable_since = self.unreachable_since(peer);
            let peer_state = &self.peers[peer];
            let Some(reconnect) = &peer_state.reconnect else {
                continue;
            };
            let (address, peer_timeout) = (self.core.address(peer), self.identity.peer_timeout);
            if unreachable_since.is_some() && self.core.channel(peer).has_left() {
                // The peer's Goodbye arrived after the end of its connection.
                log!(Debug, "{address} has left");
                self.fail_peer(peer, libc::ECONNRESET);
                continue;
            }
            if unreachable_since.is_some_and(|since| since.elapsed() > peer_timeout) {
                log!(Warn, "{address} could not be reached for {peer_timeout:?}: it is given up");
                self.fail_peer(peer, libc::ETIMEDOUT);
                continue;
            }
            let is_due = !peer_state.is_dialling && now >= reconnect.next;
            self.pending.reconnects.push(peer);
            if is_due {
                self.redial(peer);
            }
        }
    }

    /// Closes older connections between the same addresses as the new connection `new` of `peer`.
    /// An older connection is broken, though this side may not have noticed, in three cases: the
    /// same side has dialled both connections (a side dials again only after a loss), the older
    /// connection has been open for [`DUPLICATE_AGE_MAX`], or the older connection is unresponsive.
    /// Returns whether an older connection remains.
    pub(super) fn drop_broken_duplicates(&mut self, peer: Peer, new: usize) -> bool {
        let Some(link) = self.links[new].as_ref() else {
            return false;
        };
        let (ends, is_accepted) = (link.ends, link.is_accepted);
        let open_paths = self.peers[peer].open_paths.clone();
        let mut has_duplicate = false;
        for old in
            open_paths.into_iter().map(|open_path| open_path.link).filter(|&link| link != new)
        {
            let is_duplicate = |link: &&Link| link.ends == ends && link.socket().is_none();
            let Some(link) = self.links[old].as_deref().filter(is_duplicate) else {
                continue;
            };
            let is_old = is_accepted && link.since.elapsed() >= DUPLICATE_AGE_MAX;
            if ends.is_none()
                || !(link.is_accepted == is_accepted || link.is_unresponsive || is_old)
            {
                has_duplicate |= ends.is_some();
                continue;
            }
            let why = io::Error::new(io::ErrorKind::ConnectionReset, "another has been made");
            if let Some(link) = self.close_link(old) {
                self.finish_statistics(peer, link.path, &link, true);
            }
            self.lose_path(peer, old, ends, &why);
        }
        has_duplicate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: Duration = Duration::from_millis(70);

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A candidate fails.
        Fails(io::ErrorKind),
        /// No path delivers frames any more.
        Cut,
        /// Some path delivers frames again.
        Open,
        BeginRound,
        EndRound,
    }

    /// `has_unrefused`, `is_denied`, refused rounds so far, pause and time to the next attempt in
    /// milliseconds; then the time since when the peer is unreachable. `None`: the peer is given
    /// up.
    type State = Option<((bool, bool, u32, u64, u64), Option<u64>)>;

    /// The current time, in milliseconds.
    const NOW: u64 = 1_000;

    #[test]
    fn a_repair_in_every_state_under_every_event() {
        // The states in order: another path is open; unreachable; unreachable after a failure that
        // was not a refusal; one refusal before the limit; the same number of refusals after a
        // denial; one denial before the limit.
        let (open, cut) = (None, Some(10));
        let states: [State; 6] = [
            Some(((false, false, 0, 40, 0), open)),
            Some(((false, false, 0, 40, 0), cut)),
            Some(((true, false, 2, 40, 0), cut)),
            Some(((false, false, REFUSALS_MAX - 1, 40, 0), cut)),
            Some(((false, true, REFUSALS_MAX - 1, 40, 0), cut)),
            Some(((false, true, DENIALS_MAX - 1, 40, 0), cut)),
        ];
        for (event, expected) in rows(states, cut) {
            for (state, expected) in states.into_iter().zip(expected) {
                assert_eq!(after(state, event), expected, "{state:?} under {event:?}");
            }
        }
    }

    /// Expected state after each event, for each of the states.
    fn rows(states: [State; 6], cut: Option<u64>) -> [(Event, [State; 6]); 9] {
        use Event::{BeginRound, Cut, EndRound, Fails, Open};
        use io::ErrorKind::{
            AddrInUse, ConnectionRefused, ConnectionReset, PermissionDenied, TimedOut,
        };
        let [left, lonely, hopeful, refused, denied, last] = states;
        let with = |state: State, hope, corrupt| {
            state.map(|((h, s, refusals, pause, next), cut)| {
                ((h || hope, s || corrupt, refusals, pause, next), cut)
            })
        };
        let each = |f: &dyn Fn(State) -> State| states.map(f);
        let no_more = |state: State| state.map(|(known, _)| (known, None));
        let fresh = Some(((false, false, 0, 20, 0), Some(NOW)));
        let again = |hope, corrupt, refusals, cut| Some(((hope, corrupt, refusals, 70, 40), cut));
        [
            (Fails(ConnectionRefused), states),
            (Fails(AddrInUse), states),
            (Fails(TimedOut), each(&|state| with(state, true, false))),
            (Fails(ConnectionReset), each(&|state| with(state, true, false))),
            (Fails(PermissionDenied), each(&|state| with(state, false, true))),
            (Cut, [fresh, lonely, hopeful, refused, denied, last]),
            (
                Open,
                [
                    left,
                    no_more(lonely),
                    no_more(hopeful),
                    no_more(refused),
                    no_more(denied),
                    no_more(last),
                ],
            ),
            (
                BeginRound,
                [
                    left,
                    lonely,
                    Some(((false, false, 2, 40, 0), cut)),
                    refused,
                    Some(((false, false, REFUSALS_MAX - 1, 40, 0), cut)),
                    Some(((false, false, DENIALS_MAX - 1, 40, 0), cut)),
                ],
            ),
            (
                EndRound,
                [
                    // Other paths are open, so the refusal does not count.
                    again(false, false, 0, None),
                    again(false, false, 1, cut),
                    again(true, false, 0, cut),
                    None,
                    again(false, true, REFUSALS_MAX, cut),
                    None,
                ],
            ),
        ]
    }

    fn after(state: State, event: Event) -> State {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let ((has_unrefused, is_denied, refusals, pause, next), cut) = state?;
        let pause = Duration::from_millis(pause);
        let (next, cut) = (at(NOW + next), cut.map(at));
        let mut reconnect = Reconnect {
            unreachable_since: cut,
            next,
            pause,
            refusals,
            has_unrefused,
            is_denied,
            has_lost: true,
        };
        match event {
            Event::Fails(kind) => reconnect.note(&kind.into()),
            Event::Cut => {
                reconnect.note_unreachable(true, at(NOW));
            }
            Event::Open => {
                reconnect.note_unreachable(false, at(NOW));
            }
            Event::BeginRound => reconnect.begin_round(),
            Event::EndRound => {
                if reconnect.end_round(PAUSE_MAX, at(NOW)) {
                    return None;
                }
            }
        }
        assert!(reconnect.has_lost, "nobody forgets why");
        let millis = |later: Instant, earlier: Instant| (later - earlier).as_millis() as u64;
        let Reconnect { refusals, has_unrefused, is_denied, .. } = reconnect;
        let pause = reconnect.pause.as_millis() as u64;
        let next = millis(reconnect.next, at(NOW));
        Some((
            (has_unrefused, is_denied, refusals, pause, next),
            reconnect.unreachable_since.map(|cut| millis(cut, start)),
        ))
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let start = Instant::now();
        let mut reconnect = Reconnect::new(true, start);
        let pauses = [0; 5].map(|_| {
            reconnect.begin_round();
            reconnect.note(&io::ErrorKind::TimedOut.into());
            assert!(!reconnect.end_round(PAUSE_MAX, start));
            (reconnect.next - start).as_millis()
        });
        assert_eq!(pauses, [20, 40, 70, 70, 70]);
    }
}
