//! The connection to this cluster's relay.
//!
//! It is made when the endpoint opens, because peers in other clusters may speak first. Peers that only the relay
//! reaches wait for it. When it is lost it is made anew; when it is gone for good, so are they.

use std::io;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::{Address, EXIT_CUT_OFF};
use landbridge_proto::wire::frame::Header;

use super::Engine;
use super::doors::{dial_tcp, dial_unix};
use super::identity::RelayWay;
use super::links::Link;
use super::neighbours::Out;
use super::peers::Purpose;
use super::repair::{DENIALS_MAX, is_away, is_denied, is_spoilt};
use super::replay::{RECORD_TIME_MAX, Record, is_refusal};
use crate::log;

/// How long opening an endpoint waits for the relay, so that peers which speak first find us attached.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);

/// And where it is recorded, for then there is nothing to do without it: its machine may be very busy.
const RECORDED_TIME_MAX: Duration = Duration::from_secs(30);

/// How long a relay may take to read the last of what it was sent.
const FINISH_TIME_MAX: Duration = Duration::from_secs(10);

/// The connection to this cluster's relay.
#[derive(Default)]
pub struct Relay {
    state: RelayState,
    /// Of the ways to it.
    tried: usize,
    /// It has been lost, and is to be had again.
    cut: Option<Cut>,
    /// Headers that arrived spoilt.
    spoilt: u64,
    /// Why it was not reached last.
    problem: Option<String>,
}

/// Attempts to reach it again.
struct Cut {
    since: Instant,
    next: Instant,
    pause: Duration,
    /// In a row that were answered by somebody who did not seem to belong to the job.
    denials: u32,
}

/// First pause between two of them; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(20);

#[derive(Default, PartialEq, Eq)]
enum RelayState {
    #[default]
    Unknown,
    Dialling,
    Up(usize),
    /// Lost; between two attempts to have it again.
    Cut,
    Gone,
}

impl Relay {
    /// The link to it.
    pub fn link(&self) -> Option<usize> {
        match self.state {
            RelayState::Up(id) => Some(id),
            _ => None,
        }
    }

    /// Frames that arrived spoilt and of which nobody can say whose they were, if there were any.
    pub fn spoilt(&self) -> Option<u64> {
        Some(self.spoilt).filter(|&spoilt| spoilt > 0)
    }

    /// Whether it is in use.
    pub fn is_up(&self) -> bool {
        matches!(self.state, RelayState::Up(_))
    }

    /// It is to be dialled once more, from the first way on.
    pub fn begin_anew(&mut self) {
        (self.state, self.tried, self.cut, self.problem) = (RelayState::Unknown, 0, None, None);
    }

    /// Whether nothing is tried to have it.
    fn is_settled(&self) -> bool {
        !matches!(self.state, RelayState::Dialling | RelayState::Cut)
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
        if let Err(error) = self.dial_relay()
            && self.relay.cut.is_none()
        {
            return log!(Warn, "relay: {error}");
        }
        let patience = match self.is_recorded() {
            true if self.has_relay_here() => RECORDED_TIME_MAX,
            true => RECORDED_TIME_MAX.max(identity.peer_timeout),
            false => ATTACH_TIME_MAX,
        };
        let deadline = Instant::now() + patience;
        while !self.relay.is_settled() && Instant::now() < deadline {
            self.check_relay();
            self.look(10);
        }
        if self.is_recorded() {
            if !self.relay.is_up() {
                let problem = self.relay.problem.take();
                let problem = problem.unwrap_or(format!("it has not answered for {patience:?}"));
                self.end_cut_off(&format!("its relay cannot be reached: {problem}"));
            }
            if let Err(error) = self.learn_record() {
                let why = format!("its relay has not taken it back: {error}");
                // An end in good order is the relay's own.
                match error.kind() {
                    io::ErrorKind::Other => self.end_process(&why),
                    _ => self.end_cut_off(&why),
                }
            }
        }
        if !self.relay.is_settled() {
            log!(
                Warn,
                "the relay does not answer yet; until it does, other clusters are out of reach"
            );
        }
    }

    /// Whether the relay is on this node.
    fn has_relay_here(&self) -> bool {
        self.identity.relays.iter().any(|way| matches!(way, RelayWay::Unix(_)))
    }

    /// As [`Engine::end_process`], because the connection to the relay is gone. With one on this node nothing can be lost but
    /// the relay; a network breaks and heals, and a new start takes up what the relay has.
    #[cold]
    pub(super) fn end_cut_off(&mut self, why: &str) -> ! {
        self.hear_last_word();
        let why = &self.replay.as_ref().map_or(why.to_string(), |replay| replay.place(why));
        match self.has_relay_here() {
            true => self.end_process(why),
            false => self.end_with(EXIT_CUT_OFF, &format!("this process is cut off: {why}")),
        }
    }

    /// All that was sent to a relay on another node has arrived there before this process goes.
    pub(super) fn finish_record(&mut self) {
        if let Err(error) = self.finish_stream(FINISH_TIME_MAX) {
            log!(Info, "the relay has not confirmed the end: {error}");
        }
    }

    /// Ends the stream to a relay on another node, once that has all of it. What it has refused of it is the end of this process.
    fn finish_stream(&mut self, patience: Duration) -> io::Result<()> {
        let Some(Record::Stream(stream)) = self.relay_record() else { return Ok(()) };
        let mut refused = None;
        let outcome = stream.finish(patience, |frame| refused = refused.or(refusal(frame)));
        match refused {
            Some(frame) => self.end_refused(frame),
            None => outcome,
        }
    }

    /// The same for an image of this process: whoever is made of it stands where the relay knows of. Of a relay on this node
    /// nothing is lost.
    pub(super) fn finish_for_image(&mut self) {
        let patience = RECORD_TIME_MAX.max(self.identity.peer_timeout);
        if let Err(error) = self.finish_stream(patience) {
            self.end_cut_off(&format!(
                "its relay has not confirmed what it was sent before an image: {error}"
            ));
        }
    }

    /// Tries the next way to the relay.
    pub(super) fn dial_relay(&mut self) -> io::Result<()> {
        let identity = self.identity;
        let mut may_come = false;
        while let Some(way) = identity.relays.get(self.relay.tried) {
            self.relay.tried += 1;
            let (socket, is_unix) = match way {
                RelayWay::Unix(_) if !identity.paths.shm => continue,
                RelayWay::Unix(name) => (dial_unix(name), true),
                // What is kept on this node outlives this process, and costs less.
                RelayWay::Tcp(_) if identity.recovers && self.has_relay_here() => continue,
                RelayWay::Tcp(address) => (dial_tcp(*address), false),
            };
            // Before the hello: it may end within the call.
            self.relay.state = RelayState::Dialling;
            let greeted = socket.and_then(|socket| self.greet(socket, is_unix, Purpose::Relay));
            match greeted {
                Ok(()) => return Ok(()),
                Err(error) => {
                    may_come |= is_away(&error);
                    log!(Info, "relay {way:?}: {error}");
                    self.relay.problem = Some(error.to_string());
                }
            }
        }
        self.relay.state = RelayState::Gone;
        if may_come {
            self.await_network();
        }
        Err(io::Error::other("no relay answers"))
    }

    /// The network is away: the relay is dialled again and again.
    fn await_network(&mut self) -> &mut Cut {
        let now = Instant::now();
        self.relay.state = RelayState::Cut;
        let fresh = Cut { since: now, next: now + PAUSE_MIN, pause: PAUSE_MIN, denials: 0 };
        self.relay.cut.get_or_insert(fresh)
    }

    /// Sends to `peer` through the relay, once it is there.
    pub(super) fn await_relay(&mut self, peer: Peer) -> io::Result<()> {
        // Before anything is dialled: the relay may answer at once.
        self.set_out(peer, Out::AwaitRelay);
        match self.relay.state {
            RelayState::Up(id) => {
                self.use_link(peer, id);
                self.share_work(peer);
            }
            RelayState::Gone => return Err(io::Error::other("the relay is gone")),
            RelayState::Unknown => match self.dial_relay() {
                Err(error) if self.relay.cut.is_none() => return Err(error),
                _ => (),
            },
            RelayState::Dialling | RelayState::Cut => (),
        }
        Ok(())
    }

    /// Link `id` leads to the relay: peers that wait for it go on.
    pub(super) fn relay_up(&mut self, id: usize) {
        self.relay.state = RelayState::Up(id);
        self.relay.cut = None;
        for index in 0..self.neighbours.len() {
            if self.neighbours[index].out == Out::AwaitRelay {
                self.use_link(Peer(index as u32), id);
            }
        }
    }

    /// The connection to the relay, over link `id`, is lost: it is made anew, and peers that have no other path wait for it.
    pub(super) fn relay_lost(&mut self, id: usize, link: &Link, is_spoilt: bool) {
        self.relay.spoilt += u64::from(is_spoilt);
        if self.is_recorded() {
            self.end_cut_off("its relay has closed the connection");
        }
        for index in 0..self.neighbours.len() {
            let neighbour = &mut self.neighbours[index];
            let Some(place) = neighbour.routes.iter().position(|route| route.link == id) else {
                continue;
            };
            let lost = neighbour.routes[place];
            self.settle_account(Peer(index as u32), lost.path, link, true);
            let neighbour = &mut self.neighbours[index];
            neighbour.routes.remove(place);
            if neighbour.out == Out::Up(id) {
                neighbour.out =
                    neighbour.routes.last().map_or(Out::AwaitRelay, |r| Out::Up(r.link));
            }
            self.core.close_path(Peer(index as u32), lost.path);
            self.share_work(Peer(index as u32));
        }
        self.drain_actions();
        let now = Instant::now();
        self.relay.cut = Some(Cut { since: now, next: now, pause: PAUSE_MIN, denials: 0 });
        self.relay.state = RelayState::Cut;
        self.check_relay();
    }

    /// Whether the connection to the relay is to be had again.
    pub(super) fn is_relay_cut(&self) -> bool {
        self.relay.cut.is_some()
    }

    /// Dials the relay again when it is time, and gives it up when it has been away for too long.
    #[cold]
    pub(super) fn check_relay(&mut self) {
        let Some(cut) = &mut self.relay.cut else {
            return;
        };
        if cut.since.elapsed() > self.identity.peer_timeout {
            log!(Warn, "the relay could not be reached for {:?}", self.identity.peer_timeout);
            return self.relay_gone();
        }
        if self.relay.state != RelayState::Cut || Instant::now() < cut.next {
            return;
        }
        cut.next = Instant::now() + cut.pause;
        cut.pause = (cut.pause * 2).min(self.identity.redial_max);
        self.relay.tried = 0;
        if let Err(error) = self.dial_relay() {
            log!(Info, "relay: {error}");
            self.relay.state = RelayState::Cut;
        }
    }

    /// An attempt to reach the relay has failed, and there is no other way to it.
    pub(super) fn relay_refused(&mut self, error: &io::Error) {
        self.relay.problem = Some(error.to_string());
        if self.relay.cut.is_none() && !is_away(error) && !is_spoilt(error) {
            return self.relay_gone();
        }
        let cut = self.await_network();
        cut.denials = if is_denied(error) { cut.denials + 1 } else { 0 };
        if cut.denials >= DENIALS_MAX {
            self.relay_gone();
        }
    }

    /// Nothing more comes from or goes to the relay.
    fn relay_gone(&mut self) {
        self.relay.cut = None;
        self.relay.state = RelayState::Gone;
        for index in 0..self.neighbours.len() {
            if self.neighbours[index].out == Out::AwaitRelay {
                self.fail_peer(Peer(index as u32), libc::EHOSTUNREACH);
            }
        }
    }
}

/// Which frame this one from the relay says not to be what it was before.
fn refusal(frame: &[u8]) -> Option<u64> {
    Header::parse(frame).ok().filter(is_refusal).map(|header| header.delivered)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::wire::frame::{HEADER_BYTES, Kind};

    use super::*;

    #[test]
    fn a_refusal_is_told_from_other_frames() {
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
            refusal(&bytes)
        };
        assert_eq!(said(Kind::Intake, 0), Some(9));
        assert_eq!([said(Kind::Intake, 1), said(Kind::Data, 0), refusal(&[7; 9])], [None; 3]);
    }
}
