//! What endpoints on other nodes read of clocks.

use super::recovery::{opening, send, written};
use super::*;
use crate::relay::history::TOO_MUCH;

/// A relay with endpoint 1, of which reads are kept, and how that is told.
fn keeping() -> (Relay, LinkId) {
    let mut relay = Relay::new(ClusterId(0), clusters(), 0).unwrap();
    relay.set_recovering();
    let one = attach(&mut relay, 0);
    assert_eq!(written(&mut relay, one), [(Kind::Clocks, 0, 0), opening(0)]);
    (relay, one)
}

fn attach(relay: &mut Relay, start: u32) -> LinkId {
    relay.keep_reads_of(rank(1));
    relay.attach(rank(1), start).unwrap()
}

fn reads(from: u64, polls: u64, bytes: &[u8]) -> Vec<u8> {
    let header = notice::empty(Kind::Clocks, rank(1), Address::ANONYMOUS);
    let length = bytes.len() as u32;
    let mut frame = vec![0; HEADER_BYTES];
    Header { length, sequence: from, delivered: polls, ..header }.emit(&mut frame);
    frame.extend_from_slice(bytes);
    frame
}

fn kept(relay: &Relay) -> (Vec<u8>, u64) {
    let kept = relay.reads_of(rank(1)).unwrap();
    (kept.bytes, kept.polls)
}

#[test]
fn what_was_read_is_kept_in_order_and_once_whoever_sends_it_again() {
    let (mut relay, one) = keeping();
    assert_eq!(send(&mut relay, one, reads(0, 3, b"abc")), Stop::Partial);
    assert_eq!(send(&mut relay, one, reads(3, 5, b"def")), Stop::Partial);
    relay.suspend(one);
    let one = attach(&mut relay, 1);
    assert_eq!(written(&mut relay, one), [(Kind::Clocks, 6, 0), opening(0)]);
    // It has not looked so often yet, and repeats some of it.
    assert_eq!(send(&mut relay, one, reads(2, 4, b"cd")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abcdef".to_vec(), 5));
    assert_eq!(send(&mut relay, one, reads(4, 9, b"efgh")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abcdefgh".to_vec(), 9));
    assert_eq!(relay.counters().read_bytes, 8);
}

#[test]
fn gaps_and_other_clocks_than_before_are_refused() {
    for (from, bytes) in [(4, &b"x"[..]), (1, b"bX"), (0, b"X"), (u64::MAX, b"x")] {
        let (mut relay, one) = keeping();
        send(&mut relay, one, reads(0, 3, b"abc"));
        let stop = send(&mut relay, one, reads(from, 4, bytes));
        assert!(matches!(stop, Stop::Broken(_)), "{from}: {stop:?}");
        assert_eq!(kept(&relay), (b"abc".to_vec(), 3));
    }
    let mut relay = Relay::new(ClusterId(0), clusters(), 0).unwrap();
    relay.set_recovering();
    let one = relay.attach(rank(1), 0).unwrap();
    assert_eq!(written(&mut relay, one), [opening(0)]);
    let stop = send(&mut relay, one, reads(0, 1, b"a"));
    assert!(matches!(stop, Stop::Broken(_)), "nobody has asked: {stop:?}");
}

#[test]
fn who_is_fenced_does_not_come_back_and_a_later_start_does() {
    let (mut relay, one) = keeping();
    send(&mut relay, one, reads(0, 3, b"abc"));
    relay.suspend(one);
    relay.fence(rank(1), 10_000);
    assert!(relay.attach(rank(1), 7).is_err());
    let one = attach(&mut relay, 10_001);
    assert_eq!(written(&mut relay, one), [(Kind::Clocks, 3, 0), opening(0)]);
    // One that has never been here.
    relay.fence(rank(0), 10_000);
    assert!(relay.attach(rank(0), 0).is_err());
    relay.attach(rank(0), 10_001).unwrap();
    // Nobody is fenced twice, and nobody elsewhere.
    relay.fence(rank(0), 5);
    relay.fence(rank(RANKS_PER_CLUSTER), 5);
}

#[test]
fn one_of_which_there_was_too_much_says_where_it_goes_on() {
    let (mut relay, one) = keeping();
    send(&mut relay, one, reads(0, 3, b"abc"));
    relay.histories.as_mut().unwrap().give_up(rank(1), TOO_MUCH);
    assert_eq!(send(&mut relay, one, reads(3, 4, b"d")), Stop::Partial, "it goes on");
    relay.suspend(one);
    let standing = Standing { intakes: 0, taken: 0, sent: 9, kept: 0 };
    let one = relay.attach_at(rank(1), 0, standing).unwrap();
    assert_eq!(written(&mut relay, one), [(Kind::Clocks, 0, 0), opening(0)]);
    assert_eq!(send(&mut relay, one, reads(77, 8, b"xyz")), Stop::Partial);
    assert_eq!(send(&mut relay, one, reads(80, 9, b"!")), Stop::Partial);
    let kept = relay.reads_of(rank(1)).unwrap();
    assert_eq!((kept.first, &kept.bytes[..]), (77, &b"xyz!"[..]));
}
