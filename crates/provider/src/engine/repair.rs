//! Paths that broke, and how they come back.
//!
//! When a path is lost, frames go on by another if there is one; what it may have lost goes again (the protocol sees to
//! that). All the same it is dialled again, at once and then with longer and longer pauses. When no path is left by which
//! anything gets through, the peer is *cut off* ([`Engine::is_cut_off`]): its operations wait, quietly, up to the
//! `peer_timeout`; only then, or when whoever answers in its place says that nobody is there, it is given up.
//!
//! What may never happen: a peer that is cut off is waited for without end, whatever paths still stand.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::Peer;

use super::Engine;
use super::handshake::Carrier;
use super::links::{Link, RELAY_PATH};
use super::neighbours::{Out, Route};
use crate::log;

/// First pause between two attempts; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// So many rounds of attempts that were all refused in a row show that nobody is there. (One may be a door that is full.)
const REFUSALS_MAX: u32 = 4;
/// So many when somebody answered who did not seem to belong to the job: what was said may have been damaged on its way,
/// and a hello has no other checksum than its proof.
pub(super) const DENIALS_MAX: u32 = 10;
/// A connection that has stood for so long was not made at the same time as another one between the same two: that one
/// has been made because this one is broken.
const TWIN_AGE_MAX: Duration = Duration::from_secs(2);

/// Attempts to have a path again.
pub struct Repair {
    /// Since when the peer is cut off, if it is.
    cut: Option<Instant>,
    next: Instant,
    pause: Duration,
    /// Rounds in a row in which every way was refused, since it is cut off.
    refusals: u32,
    /// Some way of this round was not refused, but led nowhere.
    has_hope: bool,
    /// On some way of this round somebody answered who did not seem to belong to the job.
    is_spoilt: bool,
    /// A path has been lost, and not only fallen silent.
    pub has_lost: bool,
}

impl Repair {
    /// The pause after the attempt that is under way.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    fn new(has_lost: bool) -> Self {
        let next = Instant::now();
        let (has_hope, is_spoilt) = (false, false);
        Self { cut: None, next, pause: PAUSE_MIN, refusals: 0, has_hope, is_spoilt, has_lost }
    }
}

impl Link {
    /// Whether anything gets through by it, as far as is known: it is no line that is doubted, and no connection that has
    /// been silent for so long that another is tried beside it.
    pub(super) fn works(&self) -> bool {
        match &self.carrier {
            Carrier::Datagram(line) => line.is_open() && !line.is_doubted(),
            _ => !self.is_suspect,
        }
    }
}

/// Whether it is the network that is in the way, and may be there again.
pub(super) fn is_away(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(error.kind(), HostUnreachable | NetworkDown | NetworkUnreachable | TimedOut)
}

/// Whether somebody was there, and the hello went wrong: another may go right.
pub(super) fn is_spoilt(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionReset, UnexpectedEof};
    is_denied(error) || matches!(error.kind(), ConnectionReset | UnexpectedEof)
}

/// Whether who is there does not seem to belong to the job.
pub(super) fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

impl Engine {
    /// The path of `peer` over link `id`, which joined the addresses `ends`, is lost, for a reason that need not be final. It is
    /// to be had again, unless there is another connection between the same addresses.
    #[cold]
    pub(super) fn lose_route(
        &mut self,
        peer: Peer,
        id: usize,
        ends: Option<(IpAddr, IpAddr)>,
        error: &io::Error,
    ) {
        let address = self.core.address(peer);
        let neighbour = &mut self.neighbours[peer.0 as usize];
        let Some(place) = neighbour.routes.iter().position(|route| route.link == id) else {
            return;
        };
        let lost = neighbour.routes.remove(place);
        let other = neighbour.routes.last().map(|route| route.link);
        match other {
            Some(link) => neighbour.out = Out::Up(link),
            None => neighbour.out = Out::Cut,
        }
        let goes_on = if other.is_some() { "goes on by another" } else { "is made anew" };
        log!(Warn, "a path to {address} is lost and {goes_on}: {error}");
        self.core.close_path(peer, lost.path);
        self.share_work(peer);
        self.drain_actions();
        let is_rail = self.rail_lost(peer, ends, id);
        let is_needed = self.twin(peer, ends).is_none() && !is_rail;
        // Datagrams alone do not show that a peer has died.
        if is_needed || !self.has_connection(peer) {
            self.begin_repair(peer, true);
        }
    }

    /// Whether nothing gets through to `peer` any more, as far as is known.
    pub(super) fn is_cut_off(&self, peer: Peer) -> bool {
        let routes = &self.neighbours[peer.0 as usize].routes;
        // A link that is in use just now is not in its place.
        !routes.iter().any(|route| self.links[route.link].as_ref().is_none_or(|link| link.works()))
    }

    /// Whether `peer` has a path that is no line of datagrams.
    fn has_connection(&self, peer: Peer) -> bool {
        let is_line = |link: &Link| link.socket().is_some();
        let routes = &self.neighbours[peer.0 as usize].routes;
        routes.iter().any(|route| !self.links[route.link].as_deref().is_some_and(is_line))
    }

    /// Since when `peer`, of which a path is to be had again, is cut off, if it is.
    fn cut_since(&mut self, peer: Peer) -> Option<Instant> {
        let is_cut = self.is_cut_off(peer);
        let repair = self.neighbours[peer.0 as usize].repair.as_mut()?;
        match repair.cut {
            _ if !is_cut => repair.cut = None,
            Some(_) => (),
            // Only now does a refusal say much, and there is reason for haste.
            None => {
                let cut = Some(Instant::now());
                let Repair { has_hope, is_spoilt, has_lost, .. } = *repair;
                *repair = Repair { cut, has_hope, is_spoilt, ..Repair::new(has_lost) };
            }
        }
        repair.cut
    }

    /// The relay does not lead to `peer`, at least not now.
    pub(super) fn drop_relay_route(&mut self, peer: Peer) {
        let routes = &self.neighbours[peer.0 as usize].routes;
        let through_relay = routes.iter().find(|route| route.path == RELAY_PATH);
        if let Some(Route { link, path }) = through_relay.copied() {
            self.leave_relay_link(peer, link, path);
            let why =
                io::Error::new(io::ErrorKind::NetworkUnreachable, "the relay cannot reach it");
            self.lose_route(peer, link, None, &why);
        }
    }

    /// The relay's link, which goes on for others, touches no memory for `peer` any more: what it holds of a frame is
    /// copied, and what is arriving goes nowhere.
    fn leave_relay_link(&mut self, peer: Peer, id: usize, path: PathId) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        if link.inside.is_some_and(|(from, _)| from == peer) {
            link.divert();
        }
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            stream.own_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
    }

    pub(super) fn begin_repair(&mut self, peer: Peer, has_lost: bool) {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        if let Some(repair) = &mut neighbour.repair {
            repair.has_lost |= has_lost;
            return;
        }
        neighbour.repair = Some(Repair::new(has_lost));
        let is_dialling = neighbour.is_dialling;
        if !self.repairs.contains(&peer) {
            self.repairs.push(peer);
        }
        if !is_dialling {
            self.redial(peer);
        }
    }

    fn redial(&mut self, peer: Peer) {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        neighbour.ways = None;
        if let Some(repair) = &mut neighbour.repair {
            (repair.has_hope, repair.is_spoilt) = (false, false);
        }
        self.question_lines(peer);
        self.dial(peer);
    }

    /// An attempt to reach `peer` has failed.
    pub(super) fn note_attempt(&mut self, peer: Peer, error: &io::Error) {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        let is_beside = neighbour.is_beside;
        let may_come = is_away(error) || is_spoilt(error);
        if neighbour.repair.is_none() && may_come && neighbour.routes.is_empty() {
            // The network fails before there has been any path: that is waited for as at any other time.
            neighbour.repair = Some(Repair::new(true));
            self.repairs.push(peer);
        }
        let Some(repair) = &mut self.neighbours[peer.0 as usize].repair else {
            return;
        };
        if is_beside {
            // Nobody need ever have been there.
            return;
        }
        // Nobody is there, or somebody else.
        let is_refused =
            matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::AddrInUse);
        repair.has_hope |= !is_refused && !is_denied(error);
        repair.is_spoilt |= is_denied(error);
    }

    /// No way to `peer` has led to it this time.
    pub(super) fn repair_later(&mut self, peer: Peer) {
        let (address, redial_max) = (self.core.address(peer), self.identity.redial_max);
        let is_cut = self.cut_since(peer).is_some();
        let neighbour = &mut self.neighbours[peer.0 as usize];
        let Some(repair) = &mut neighbour.repair else {
            return;
        };
        let is_refused = is_cut && !repair.has_hope;
        repair.refusals = if is_refused { repair.refusals + 1 } else { 0 };
        let refusals_max = if repair.is_spoilt { DENIALS_MAX } else { REFUSALS_MAX };
        if repair.refusals >= refusals_max {
            log!(Warn, "the connection to {address} is lost, and nobody answers there");
            return self.fail_peer(peer, libc::ECONNRESET);
        }
        repair.next = Instant::now() + repair.pause;
        repair.pause = (repair.pause * 2).min(redial_max);
        self.set_out(peer, Out::Cut);
    }

    /// Looks after the paths that are to be had again. To be called every few milliseconds while there are any.
    #[cold]
    pub(super) fn check_repairs(&mut self) {
        let now = Instant::now();
        for peer in std::mem::take(&mut self.repairs) {
            let cut = self.cut_since(peer);
            let neighbour = &self.neighbours[peer.0 as usize];
            let Some(repair) = &neighbour.repair else {
                continue;
            };
            let (address, patience) = (self.core.address(peer), self.identity.peer_timeout);
            if cut.is_some() && self.core.has_left(peer) {
                // Its goodbye came later than the end of its connection.
                log!(Debug, "{address} has left");
                self.fail_peer(peer, libc::ECONNRESET);
                continue;
            }
            if cut.is_some_and(|cut| cut.elapsed() > patience) {
                log!(Warn, "{address} could not be reached for {patience:?}: it is given up");
                self.fail_peer(peer, libc::ETIMEDOUT);
                continue;
            }
            let is_due = !neighbour.is_dialling && now >= repair.next;
            self.repairs.push(peer);
            if is_due {
                self.redial(peer);
            }
        }
    }

    /// Connection `new` of a peer has come up. Others between the same addresses are broken, though this side may not have
    /// noticed, if the same side has dialled them (it dials again when it has lost one), or have stood for long, or are
    /// suspected. Whether one is left that need not be.
    pub(super) fn drop_broken_twins(&mut self, peer: Peer, new: usize) -> bool {
        let Some(link) = self.links[new].as_ref() else {
            return false;
        };
        let (ends, is_theirs) = (link.ends, link.is_theirs);
        let routes = self.neighbours[peer.0 as usize].routes.clone();
        let mut has_twin = false;
        for old in routes.into_iter().map(|route| route.link).filter(|&link| link != new) {
            let is_twin = |link: &&Link| link.ends == ends && link.socket().is_none();
            let Some(link) = self.links[old].as_deref().filter(is_twin) else {
                continue;
            };
            let is_old = is_theirs && link.since.elapsed() >= TWIN_AGE_MAX;
            if ends.is_none() || !(link.is_theirs == is_theirs || link.is_suspect || is_old) {
                has_twin |= ends.is_some();
                continue;
            }
            let why = io::Error::new(io::ErrorKind::ConnectionReset, "another has been made");
            self.close_link(old);
            self.lose_route(peer, old, ends, &why);
        }
        has_twin
    }
}
