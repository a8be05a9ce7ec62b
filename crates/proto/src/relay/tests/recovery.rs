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

fn intake(source: Address, polls: u64, frames: u32) -> Vec<u8> {
    let header = notice::empty(Kind::Intake, source, Address::ANONYMOUS);
    let mut bytes = vec![0; HEADER_BYTES];
    Header { sequence: polls, credit: frames, ..header }.emit(&mut bytes);
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
    send(&mut relay, one, intake(rank(1), 7, 1));
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
