//! Endpoints that are killed and come back.

use super::*;
use crate::relay::history::Histories;

/// A relay of one cluster whose endpoints 0 and 1 are attached.
fn recovering() -> (Relay, [LinkId; 2]) {
    let mut relay = Relay::new(ClusterId(0), clusters(), 0).unwrap();
    relay.set_recovering();
    let links = [0, 1].map(|index| relay.attach(rank(index), 0).unwrap());
    links.iter().for_each(|link| assert_eq!(written(&mut relay, *link), [INTAKES_END]));
    (relay, links)
}

/// What an endpoint is told of its intakes last, if it has sent nothing.
const INTAKES_END: (Kind, u64, u32) = (Kind::Intake, 0, 0);

fn send(relay: &mut Relay, from: LinkId, mut bytes: Vec<u8>) -> Stop {
    let taken = relay.handle_input(from, &mut bytes);
    while let Some(link) = relay.poll_flush() {
        relay.keep(link, &bytes);
    }
    taken.stop
}

fn intake(source: Address, polls: u64, frames: u32, micros: u64) -> Vec<u8> {
    let header = notice::empty(Kind::Intake, source, Address::ANONYMOUS);
    let mut bytes = vec![0; HEADER_BYTES];
    Header { sequence: polls, credit: frames, delivered: micros, ..header }.emit(&mut bytes);
    bytes
}

/// Takes what waits for an endpoint: of each frame its kind, number and credit (of the end of intakes: what was sent).
fn written(relay: &mut Relay, link: LinkId) -> Vec<(Kind, u64, u32)> {
    let bytes: Vec<u8> = relay.slices(link, &[]).flatten().copied().collect();
    relay.handle_sent(link, bytes.len(), &[]);
    let mut frames = Vec::new();
    let mut rest = &bytes[..];
    while let Ok(header) = Header::parse(rest) {
        let is_end = header.kind == Kind::Intake && header.sequence == 0;
        let last = if is_end { header.delivered as u32 } else { header.credit };
        frames.push((header.kind, header.sequence, last));
        rest = &rest[HEADER_BYTES + header.length as usize..];
    }
    frames
}

#[test]
fn a_new_start_is_given_the_same_and_what_it_sends_again_goes_nowhere() {
    let (mut relay, [zero, one]) = recovering();
    send(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    send(&mut relay, one, intake(rank(1), 7, 1, 0));
    send(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, one).len(), 1);
    assert_eq!(written(&mut relay, zero).len(), 1);
    relay.suspend(one);
    // Meanwhile somebody sends it something.
    send(&mut relay, zero, frame(rank(0), rank(1), 10, 10));
    let one = relay.attach(rank(1), 1).unwrap();
    let given = written(&mut relay, one);
    let kind = Kind::Message;
    let end = (Kind::Intake, 0, 1);
    assert_eq!(given, [(Kind::Intake, 7, 1), end, (kind, 0, 0), (kind, 10, 0)]);
    send(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, zero), [], "it has that");
    send(&mut relay, one, frame(rank(1), rank(0), 5, 5));
    assert_eq!(written(&mut relay, zero).len(), 1);
}

#[test]
fn whoever_does_something_else_is_stopped_and_nobody_is_given_it() {
    let (mut relay, [zero, one]) = recovering();
    send(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, zero).len(), 1);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let stop = send(&mut relay, one, frame(rank(1), rank(0), 0, 6));
    assert!(matches!(stop, Stop::Broken(_)), "{stop:?}");
    assert_eq!(written(&mut relay, zero), []);
}

#[test]
fn a_history_that_grows_too_long_is_given_up_and_the_job_goes_on() {
    let (mut relay, [zero, one]) = recovering();
    relay.histories = Some(Histories::new(500));
    for n in 0..10 {
        send(&mut relay, zero, frame(rank(0), rank(1), n * 100, 100));
    }
    assert_eq!(written(&mut relay, one).len(), 10);
    relay.suspend(one);
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("cannot come back"));
}

#[test]
fn time_that_went_on_without_a_frame_goes_on_again() {
    let (mut relay, [_, one]) = recovering();
    for (polls, frames, micros) in [(3, 0, 4_000_000), (1, 2, 17)] {
        let stop = send(&mut relay, one, intake(rank(1), polls, frames, micros));
        assert_eq!(stop, Stop::Partial);
    }
    let stop = send(&mut relay, one, intake(rank(1), 9, 0, 0));
    assert!(matches!(stop, Stop::Broken(_)), "nothing has come to pass: {stop:?}");
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let bytes: Vec<u8> = relay.slices(one, &[]).flatten().copied().collect();
    let told = bytes.chunks(HEADER_BYTES).map(|frame| Header::parse(frame).unwrap());
    let told: Vec<_> = told.map(|it| (it.sequence, it.credit, it.delivered)).collect();
    assert_eq!(told, [(3, 0, 4_000_000), (1, 2, 17), (0, 0, 0)]);
}

/// A relay of cluster 0 with endpoint 1, and a stream to the relay of cluster 1.
fn with_a_peer() -> (Relay, LinkId, LinkId) {
    let mut relay = Relay::new(ClusterId(0), clusters(), 0).unwrap();
    relay.set_recovering();
    let one = relay.attach(rank(1), 0).unwrap();
    written(&mut relay, one);
    let peer = relay.peer(ClusterId(1)).unwrap();
    let lane = relay.connect(peer, 7).unwrap().lane;
    (relay, one, lane)
}

#[test]
fn what_was_lost_between_relays_while_an_endpoint_was_away_is_told_to_its_next_start() {
    let (mut relay, one, lane) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    send(&mut relay, one, frame(rank(1), far, 0, 10));
    assert_eq!(written(&mut relay, lane).len(), 1);
    relay.suspend(one);
    relay.disconnect(lane);
    let peer = relay.peer(ClusterId(1)).unwrap();
    relay.connect(peer, 7).unwrap();
    assert_eq!(relay.poll_flush(), Some(peer));
    assert_eq!(relay.poll_flush(), None);
    for start in 1..3 {
        let one = relay.attach(rank(1), start).unwrap();
        while relay.poll_flush().is_some() {}
        let end = (Kind::Intake, 0, 1);
        assert_eq!(written(&mut relay, one), [end, (Kind::Lost, seal(far, rank(1)), 0)]);
        relay.suspend(one);
    }
}

#[test]
fn whoever_waits_for_one_that_never_comes_back_is_told() {
    let (mut relay, one, lane) = with_a_peer();
    let (zero, far) = (relay.attach(rank(0), 0).unwrap(), rank(RANKS_PER_CLUSTER));
    written(&mut relay, zero);
    // The first is given to it before it is killed, the second waits for it.
    send(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    assert_eq!(written(&mut relay, one).len(), 1);
    relay.suspend(one);
    send(&mut relay, lane, frame(far, rank(1), 0, 10));
    relay.handle_time(RETURN_MILLIS_MAX);
    while relay.poll_flush().is_some() {}
    assert_eq!((written(&mut relay, zero), written(&mut relay, lane).len()), (vec![], 1), "a sign");
    relay.handle_time(RETURN_MILLIS_MAX + 1);
    while relay.poll_flush().is_some() {}
    let unreachable = |by: Address| (Kind::Unreachable, seal(rank(1), by), 0);
    assert_eq!(written(&mut relay, zero), [unreachable(rank(0))]);
    assert_eq!(written(&mut relay, lane), [unreachable(far)]);
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("away for too long"));
}

#[test]
fn nobody_hears_of_one_that_was_away_and_has_come_back() {
    let (mut relay, one, lane) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    send(&mut relay, lane, frame(far, rank(1), 0, 10));
    written(&mut relay, one);
    relay.suspend(one);
    send(&mut relay, lane, frame(far, rank(1), 10, 10));
    let one = relay.attach(rank(1), 1).unwrap();
    while relay.poll_flush().is_some() {}
    assert_eq!(written(&mut relay, one).len(), 3);
    assert_eq!(written(&mut relay, lane), []);
}

#[test]
fn what_a_killed_one_has_still_said_passes_an_output_that_is_full() {
    let (mut relay, one, _) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    while send(&mut relay, one, frame(rank(1), far, 0, 30_000)) != Stop::Full {}
    relay.hear_out(one);
    assert_eq!(send(&mut relay, one, frame(rank(1), far, 0, 30_000)), Stop::Partial);
    assert_eq!(send(&mut relay, one, intake(rank(1), 5, 1, 0)), Stop::Partial);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    assert_eq!(written(&mut relay, one)[0], (Kind::Intake, 5, 1));
}
