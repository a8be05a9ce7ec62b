//! Copies of the recorded nondeterminism of endpoints on other nodes.

use landbridge_proto::wire::nondeterminism_frame::{NondeterminismFrame, emit};

use super::recovery::opening;
use super::*;

/// A relay with endpoint 1, which keeps a copy of the endpoint's record and reports that.
fn keeping() -> (Relay, LinkId) {
    let mut relay = home();
    relay.enable_recovery_within(LOGS_IN_MEMORY);
    let one = attach(&mut relay, 0);
    assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 0, 0), opening(0)]);
    (relay, one)
}

fn attach(relay: &mut Relay, start: u32) -> LinkId {
    relay.recovery_mut().keep_nondeterminism_of(rank(1));
    relay.attach(rank(1), start).unwrap()
}

fn reads(from: u64, polls: u64, bytes: &[u8]) -> Vec<u8> {
    frame(
        NondeterminismFrame::Append { from, bytes, is_full: false, has_more: false },
        polls,
        bytes,
    )
}

/// A piece of a batch that continues.
fn piece(from: u64, polls: u64, bytes: &[u8]) -> Vec<u8> {
    frame(NondeterminismFrame::Append { from, bytes, is_full: false, has_more: true }, polls, bytes)
}

fn cut(place: u64) -> Vec<u8> {
    frame(NondeterminismFrame::Trim(place), 1, &[])
}

fn frame(said: NondeterminismFrame, polls: u64, bytes: &[u8]) -> Vec<u8> {
    let (header, check) = emit(said, polls, rank(1));
    let mut frame = vec![0; HEADER_BYTES];
    header.emit(&mut frame);
    frame.extend(check.into_iter().flatten());
    frame.extend_from_slice(bytes);
    frame
}

/// The log of endpoint 1 exceeds its bound, and is discarded.
fn discard_log(relay: &mut Relay, one: LinkId) {
    relay.recovery_mut().set_memory(0);
    assert_eq!(feed(relay, one, determinant(rank(1), 1, 1, 0)), Stop::Partial);
    let event = relay.recovery_mut().poll_log_event();
    assert!(matches!(event, Some(LogEvent::Unrecoverable(who, _)) if who == rank(1)));
    relay.recovery_mut().set_memory(LOGS_IN_MEMORY.memory);
}

fn kept(relay: &Relay) -> (Vec<u8>, u64) {
    let kept = relay.recovery().nondeterminism_of(rank(1)).unwrap();
    (kept.bytes, kept.polls)
}

#[test]
fn what_was_read_is_kept_in_order_and_once_no_matter_who_sends_it_again() {
    let (mut relay, one) = keeping();
    assert_eq!(feed(&mut relay, one, reads(0, 3, b"abc")), Stop::Partial);
    assert_eq!(feed(&mut relay, one, reads(3, 5, b"def")), Stop::Partial);
    relay.suspend(one);
    let one = attach(&mut relay, 1);
    assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 6, 0), opening(0)]);
    // The restarted incarnation has polled less often, and repeats some bytes.
    assert_eq!(feed(&mut relay, one, reads(2, 4, b"cd")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abcdef".to_vec(), 5));
    assert_eq!(feed(&mut relay, one, reads(4, 9, b"efgh")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abcdefgh".to_vec(), 9));
    assert_eq!(relay.counters().nondeterminism_bytes, 8);
}

#[test]
fn gaps_and_other_clocks_than_before_are_refused() {
    for (from, bytes) in [(4, &b"x"[..]), (1, b"bX"), (0, b"X"), (u64::MAX, b"x")] {
        let (mut relay, one) = keeping();
        feed(&mut relay, one, reads(0, 3, b"abc"));
        let stop = feed(&mut relay, one, reads(from, 4, bytes));
        assert!(matches!(stop, Stop::Broken(_)), "{from}: {stop:?}");
        assert_eq!(kept(&relay), (b"abc".to_vec(), 3));
    }
    let mut relay = home();
    relay.enable_recovery_within(LOGS_IN_MEMORY);
    let one = relay.attach(rank(1), 0).unwrap();
    assert_eq!(written(&mut relay, one), [opening(0)]);
    let stop = feed(&mut relay, one, reads(0, 1, b"a"));
    assert!(matches!(stop, Stop::Broken(_)), "nobody has asked: {stop:?}");
}

#[test]
fn who_is_fenced_does_not_come_back_and_a_later_start_does() {
    let (mut relay, one) = keeping();
    feed(&mut relay, one, reads(0, 3, b"abc"));
    relay.suspend(one);
    relay.fence(rank(1), 10_000);
    assert!(relay.attach(rank(1), 7).is_err());
    let one = attach(&mut relay, 10_001);
    assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 3, 0), opening(0)]);
    // Endpoint 0 has never attached.
    relay.fence(rank(0), 10_000);
    assert!(relay.attach(rank(0), 0).is_err());
    relay.attach(rank(0), 10_001).unwrap();
    // A fence never moves back, and endpoints of other clusters are not fenced.
    relay.fence(rank(0), 5);
    relay.fence(rank(RANKS_PER_CLUSTER), 5);
}

#[test]
fn one_of_which_there_was_too_much_goes_on_where_it_stands() {
    let (mut relay, one) = keeping();
    feed(&mut relay, one, reads(0, 3, b"abc"));
    discard_log(&mut relay, one);
    assert_eq!(feed(&mut relay, one, reads(3, 4, b"d")), Stop::Partial, "it goes on");
    assert_eq!(feed(&mut relay, one, cut(2)), Stop::Partial);
    assert_eq!(relay.recovery().kept_bytes().0, 0);
    relay.suspend(one);
    let standing = LogPosition { determinants: 0, taken: 0, sent: 9, kept: 0 };
    let one = relay.attach_at(rank(1), 0, standing).unwrap();
    assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 4, 0), opening(0)]);
    assert_eq!(feed(&mut relay, one, reads(4, 8, b"xyz")), Stop::Partial);
    assert_eq!(feed(&mut relay, one, reads(7, 9, b"!")), Stop::Partial);
    let kept = relay.recovery().nondeterminism_of(rank(1)).unwrap();
    assert_eq!((kept.first, &kept.bytes[..]), (4, &b"xyz!"[..]));
    assert_eq!(relay.recovery().kept_bytes().0, 4);
}

#[test]
fn what_lies_before_the_oldest_image_is_dropped() {
    let (mut relay, one) = keeping();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7) as u8).collect();
    for (number, piece) in bytes.chunks(10_000).enumerate() {
        feed(&mut relay, one, reads(10_000 * number as u64, 3, piece));
    }
    let held = |relay: &Relay| relay.recovery().kept_bytes().0;
    assert_eq!(held(&relay), 3_000_000);
    assert_eq!(feed(&mut relay, one, cut(2_500_001)), Stop::Partial);
    assert!(held(&relay) < 1_600_000, "a block is kept whole: {}", held(&relay));
    let all = |relay: &Relay| relay.recovery().nondeterminism_of(rank(1)).unwrap();
    assert_eq!(all(&relay).first, 2_500_001);
    assert!(all(&relay).bytes == bytes[2_500_001..]);
    // An incarnation from an older checkpoint image does not repeat bytes that were trimmed.
    feed(&mut relay, one, cut(5));
    assert_eq!(
        feed(&mut relay, one, reads(2_499_000, 3, &bytes[2_499_000..2_501_000])),
        Stop::Partial
    );
    let stop = feed(&mut relay, one, reads(2_500_000, 3, &[1; 2_000]));
    assert!(matches!(stop, Stop::Broken(_)), "{stop:?}");
    // The copy is trimmed beyond its end: the bytes in between were read, but never arrive.
    let (mut relay, one) = keeping();
    feed(&mut relay, one, reads(0, 3, b"abc"));
    assert_eq!(feed(&mut relay, one, cut(70)), Stop::Partial);
    assert_eq!(feed(&mut relay, one, reads(70, 4, b"z")), Stop::Partial);
    assert_eq!((all(&relay).first, all(&relay).bytes, held(&relay)), (70, b"z".to_vec(), 1));
}

#[test]
fn bytes_that_were_changed_on_the_way_are_refused() {
    let (mut relay, one) = keeping();
    let mut changed = reads(0, 3, b"abc");
    *changed.last_mut().unwrap() ^= 1;
    let stop = feed(&mut relay, one, changed);
    assert!(matches!(stop, Stop::Broken(_)), "{stop:?}");
    assert_eq!(kept(&relay), (b"".to_vec(), 0));
}

#[test]
fn only_whole_batches_are_given_out() {
    let (mut relay, one) = keeping();
    let pieces = [
        (piece(0, 3, b"ab"), (b"".to_vec(), 0)),
        (piece(2, 4, b"cd"), (b"".to_vec(), 0)),
        (reads(4, 5, b"e"), (b"abcde".to_vec(), 5)),
        (piece(5, 9, b"fg"), (b"abcde".to_vec(), 5)),
        // The record is full from now on, and contains nothing more.
        (
            frame(
                NondeterminismFrame::Append { from: 7, bytes: b"", is_full: true, has_more: false },
                10,
                b"",
            ),
            (b"abcdefg".to_vec(), 10),
        ),
    ];
    for (frame, expected) in pieces {
        assert!(!relay.recovery().nondeterminism_of(rank(1)).unwrap().is_full);
        assert_eq!(feed(&mut relay, one, frame), Stop::Partial);
        assert_eq!(kept(&relay), expected);
    }
    assert!(relay.recovery().nondeterminism_of(rank(1)).unwrap().is_full);
}

#[test]
fn a_torn_batch_is_forgotten_when_its_node_is_lost() {
    for has_come_again in [false, true] {
        let (mut relay, mut one) = keeping();
        feed(&mut relay, one, reads(0, 3, b"abc"));
        feed(&mut relay, one, piece(3, 9, &[5; 10_000]));
        feed(&mut relay, one, piece(10_003, 9, &[5; 10_000]));
        relay.suspend(one);
        if has_come_again {
            // The endpoint was killed on the same node before: its next incarnation sends the
            // record again from the end of the last whole batch.
            one = attach(&mut relay, 1);
            assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 3, 0), opening(0)]);
            assert_eq!(relay.recovery().kept_bytes().0, 3);
            feed(&mut relay, one, piece(3, 4, &[5; 5_000]));
            relay.suspend(one);
        }
        relay.fence(rank(1), 10_000);
        assert_eq!(kept(&relay), (b"abc".to_vec(), 3));
        assert_eq!(relay.recovery().kept_bytes().0, 3);
        // The new incarnation continues with other bytes after the last whole batch.
        let one = attach(&mut relay, 10_001);
        assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 3, 0), opening(0)]);
        assert_eq!(feed(&mut relay, one, piece(3, 5, b"other")), Stop::Partial);
        assert_eq!(feed(&mut relay, one, reads(8, 6, b" clocks")), Stop::Partial);
        assert_eq!(kept(&relay), (b"abcother clocks".to_vec(), 6));
        // A second fence does not affect the incarnation that is attached now.
        assert_eq!(feed(&mut relay, one, piece(15, 7, b" and")), Stop::Partial);
        relay.fence(rank(1), 10_000);
        assert_eq!(feed(&mut relay, one, reads(19, 7, b" more")), Stop::Partial);
        assert_eq!(kept(&relay), (b"abcother clocks and more".to_vec(), 7));
    }
}

#[test]
fn what_repeats_whole_batches_makes_no_part_of_one_whole() {
    let (mut relay, one) = keeping();
    feed(&mut relay, one, reads(0, 3, b"abc"));
    feed(&mut relay, one, piece(3, 5, b"de"));
    assert_eq!(feed(&mut relay, one, reads(1, 4, b"bc")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abc".to_vec(), 4));
    assert_eq!(feed(&mut relay, one, reads(3, 6, b"def")), Stop::Partial);
    assert_eq!(kept(&relay), (b"abcdef".to_vec(), 6));
}

#[test]
fn a_torn_batch_that_was_cut_or_too_much_goes_on() {
    let (mut relay, one) = keeping();
    feed(&mut relay, one, reads(0, 3, b"abc"));
    // The oldest checkpoint image lies within the batch.
    feed(&mut relay, one, piece(3, 4, b"defgh"));
    assert_eq!(feed(&mut relay, one, cut(5)), Stop::Partial);
    let all = |relay: &Relay| relay.recovery().nondeterminism_of(rank(1)).unwrap();
    assert_eq!((all(&relay).first, all(&relay).bytes), (5, b"".to_vec()));
    assert_eq!(feed(&mut relay, one, piece(8, 5, b"ij")), Stop::Partial);
    assert_eq!(feed(&mut relay, one, reads(10, 6, b"k")), Stop::Partial);
    assert_eq!((all(&relay).first, all(&relay).bytes), (5, b"fghijk".to_vec()));
    // The log exceeds its bound in the middle of a batch.
    feed(&mut relay, one, piece(11, 6, b"lm"));
    discard_log(&mut relay, one);
    assert_eq!((all(&relay).first, all(&relay).bytes), (11, b"".to_vec()));
    assert_eq!(feed(&mut relay, one, piece(13, 7, b"no")), Stop::Partial);
    assert_eq!((all(&relay).first, all(&relay).polls), (11, 6));
    let (mut other, two) = keeping();
    feed(&mut other, two, piece(0, 1, b"abc"));
    discard_log(&mut other, two);
    assert_eq!(feed(&mut other, two, reads(3, 2, b"d")), Stop::Partial);
    assert_eq!((all(&other).first, all(&other).polls), (4, 2), "it has ended");
    // Logging restarts at a checkpoint image before the dropped bytes.
    relay.suspend(one);
    let standing = LogPosition { determinants: 0, taken: 0, sent: 9, kept: 0 };
    let one = relay.attach_at(rank(1), 0, standing).unwrap();
    assert_eq!(written(&mut relay, one), [(Kind::NondeterminismState, 11, 0), opening(0)]);
    assert_eq!(feed(&mut relay, one, reads(11, 8, b"lmno")), Stop::Partial);
    assert_eq!((all(&relay).first, all(&relay).bytes), (11, b"lmno".to_vec()));
    assert_eq!(relay.recovery().kept_bytes().0, 4);
}
