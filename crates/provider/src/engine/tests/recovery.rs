//! Tests of a recorded process and its next incarnation: both deliver the same frames at the same
//! polls, whatever the clock shows.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::path::time::{MICROSECOND, SECOND, Time};
use landbridge_proto::wire::frame::Kind;

use super::super::recording::Recording;
use super::*;

/// Longer than the protocol waits before it sends a status request for a frame.
const LONG_MICROS: u64 = 5 * SECOND / MICROSECOND;

/// An engine whose relay is this test, and the number of a peer that the relay reaches.
struct Recorded {
    party: Party,
    relay: ShmLink,
    number: FiAddr,
}

impl Recorded {
    /// Lets the real clock appear to have advanced by so much more.
    fn pass_time(&mut self, micros: u64) {
        let Engine { connections, poll_state, .. } = &mut self.party.engine;
        let real = poll_state.time();
        let recording = connections.data.recording.as_mut().unwrap();
        let lag = recording.lag(real) + micros;
        recording.resume_clock(Time(real.0 - lag * MICROSECOND));
    }

    fn start() -> Recorded {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = ShmLink::dial(ours.into(), Mapper::ANYWHERE).unwrap();
        let memory = ShmLink::receive_memory(theirs.as_fd()).unwrap();
        let relay = ShmLink::accept(theirs.into(), memory, Mapper::ANYWHERE).unwrap();
        let mut party = Party::open();
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 9));
        let number = party.av.insert(name_at(nowhere, 1));
        party.engine.connections.data.recording =
            Some(Recording::new(party.engine.poll_state.time()));
        let id = party.attach_relay(Link::new(Carrier::Shm(Box::new(ours)), None));
        let engine = &mut party.engine;
        let peer = engine.connections.data.peer_of(number).unwrap();
        engine.connections.data.paths().use_link(peer, id);
        Recorded { party, relay, number }
    }

    /// The next incarnation, after an incarnation that has recorded `determinants` and sent `sent`
    /// other frames.
    fn start_again(determinants: &[Vec<u8>], sent: u64) -> Recorded {
        let mut again = Recorded::start();
        let determinant = Header::parse(&determinants[0]).unwrap();
        let mut opening = [0; HEADER_BYTES];
        let credit = determinants.len() as u32;
        let kind = Kind::ReplayStart;
        Header { kind, sequence: 0, credit, delivered: sent, ..determinant }.emit(&mut opening);
        assert!(again.relay.send(&opening, &[]));
        for determinant in determinants {
            assert!(again.relay.send(determinant, &[]));
        }
        again.party.engine.connections.recorded_uplink().unwrap().begin_replay().unwrap();
        again
    }

    fn poll(&mut self, times: u32) {
        for _ in 0..times {
            self.party.engine.progress();
        }
    }

    /// The frames that the process has sent since the last call.
    fn sent(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while let Some(frame) = self.relay.peek().unwrap() {
            frames.push(frame.to_vec());
            self.relay.consume();
        }
        frames
    }
}

fn kinds(frames: &[Vec<u8>]) -> Vec<Kind> {
    frames.iter().map(|frame| Header::parse(frame).unwrap().kind).collect()
}

#[test]
fn what_was_asked_because_of_the_time_alone_is_asked_again_at_the_same_poll() {
    let mut first = Recorded::start();
    first.party.send(first.number).unwrap();
    first.poll(3);
    let before = first.sent();
    assert_eq!(kinds(&before), [Kind::Message], "no determinant of polls in vain");
    first.pass_time(LONG_MICROS);
    first.poll(3);
    let asked = first.sent();
    assert_eq!(
        kinds(&asked),
        [Kind::Determinant, Kind::StatusRequest],
        "the determinant precedes what follows"
    );
    let determinant = Header::parse(&asked[0]).unwrap();
    assert_eq!((determinant.sequence, determinant.credit), (4, 0));
    assert!(determinant.delivered >= LONG_MICROS);

    let mut second = Recorded::start_again(&asked[..1], 2);
    second.party.send(second.number).unwrap();
    second.poll(3);
    assert_eq!(second.sent(), before);
    assert!(second.party.engine.connections.data.recording.as_ref().unwrap().is_replaying());
    second.poll(1);
    assert_eq!(second.sent(), asked[1..], "without a moment's wait");
    assert!(!second.party.engine.connections.data.recording.as_ref().unwrap().is_replaying());
    // The second incarnation continues as the first would have.
    second.pass_time(LONG_MICROS);
    second.poll(1);
    assert_eq!(second.sent().len(), 0, "the second question waits twice as long");
    second.pass_time(LONG_MICROS);
    second.poll(1);
    assert_eq!(kinds(&second.sent()), [Kind::Determinant, Kind::StatusRequest]);
}

#[test]
fn who_is_not_taken_back_says_where_to_read_why() {
    let Recorded { mut party, relay, .. } = Recorded::start();
    drop(relay);
    let error =
        party.engine.connections.recorded_uplink().unwrap().begin_replay().unwrap_err().to_string();
    assert!(error.contains("--relay-log"), "{error}");
}
