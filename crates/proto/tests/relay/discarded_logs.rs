//! Tests of endpoints whose message logs exceeded the bound and were discarded, and of log
//! positions.

use super::recovery::*;
use super::*;

/// Endpoint 1 has received ten frames, which exceed the memory bound, has delivered six and sent
/// two.
fn discarded_log() -> (Relay, [LinkId; 2], LogPosition) {
    let (mut relay, [zero, one]) = recovering_within(LogLimits { memory: 500, ..LOGS_IN_MEMORY });
    for number in 0..10 {
        feed(&mut relay, zero, frame(rank(0), rank(1), number * 100, 100));
    }
    let event = relay.recovery_mut().poll_log_event();
    assert!(matches!(event, Some(LogEvent::Unrecoverable(who, _)) if who == rank(1)));
    feed(&mut relay, one, determinant(rank(1), 7, 6, 0));
    for at in [0, 5] {
        feed(&mut relay, one, frame(rank(1), rank(0), at, 5));
    }
    assert_eq!((written(&mut relay, one).len(), written(&mut relay, zero).len()), (10, 2));
    let taken = 6 * frame(rank(0), rank(1), 0, 100).len() as u64;
    (relay, [zero, one], LogPosition { determinants: 1, taken, sent: 2, kept: 0 })
}

#[test]
fn one_of_which_there_was_too_much_can_come_back_from_its_next_image_on() {
    let (mut relay, [zero, one], image) = discarded_log();
    // While endpoint 1 is suspended for its checkpoint another frame arrives, and reports for it
    // were in its ring.
    relay.suspend(one);
    feed(&mut relay, zero, frame(rank(0), rank(1), 1_000, 100));
    relay.recovery_mut().set_memory(1 << 20);
    let one = relay.attach_at(rank(1), 0, image).unwrap();
    assert_eq!(relay.recovery_mut().poll_log_event(), Some(LogEvent::Recoverable(rank(1))));
    // The frames that endpoint 1 had not delivered are lost, and their source is notified.
    assert_eq!(written(&mut relay, zero), [(Kind::Lost, pair_check(rank(1), rank(0)), 0)]);
    assert_eq!(written(&mut relay, one), [opening(0)]);
    feed(&mut relay, zero, frame(rank(0), rank(1), 600, 100));
    feed(&mut relay, one, determinant(rank(1), 3, 1, 0));
    feed(&mut relay, one, frame(rank(1), rank(0), 10, 5));
    assert_eq!((written(&mut relay, one).len(), written(&mut relay, zero).len()), (1, 1));
    relay.suspend(one);
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("before its checkpoints is released"));
    let one = relay.attach_at(rank(1), 1, image).unwrap();
    let replayed = [opening(1), (Kind::Determinant, 3, 1), (Kind::Ack, 600, 0)];
    assert_eq!(written(&mut relay, one), replayed);
    feed(&mut relay, one, frame(rank(1), rank(0), 10, 5));
    assert_eq!(written(&mut relay, zero), [], "it has that");
    // As usual, later checkpoints trim the log before them.
    let next = LogPosition { determinants: 2, sent: 3, taken: image.taken / 6 * 7, kept: 2 };
    relay.suspend(one);
    relay.attach_at(rank(1), 1, next).unwrap();
    assert!(relay.recovery_mut().poll_log_event().is_none());
}

#[test]
fn a_later_start_of_one_of_which_there_was_too_much_is_refused() {
    let (mut relay, [_, one], image) = discarded_log();
    relay.suspend(one);
    assert!(relay.attach_at(rank(1), 1, image).unwrap_err().contains("cannot be restarted"));
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("cannot be restarted"));
    // The incarnation that was attached before may attach again.
    relay.attach_at(rank(1), 0, image).unwrap();
}

#[test]
fn notices_that_one_of_which_there_was_too_much_has_not_taken_in_are_given_to_it_again() {
    for is_in_ring in [true, false] {
        let (mut relay, one, stream) = with_a_peer();
        let far = rank(RANKS_PER_CLUSTER);
        feed(&mut relay, one, frame(rank(1), far, 0, 10));
        assert_eq!(written(&mut relay, stream).len(), 1);
        relay.enable_recovery_within(LogLimits { memory: 0, ..LOGS_IN_MEMORY });
        feed(&mut relay, stream, frame(far, rank(1), 0, 10));
        assert_eq!(written(&mut relay, one).len(), 1);
        relay.disconnect(stream);
        let peer = relay.peer(ClusterId(1)).unwrap();
        relay.connect(peer, 7).unwrap();
        let lost = (Kind::Lost, pair_check(far, rank(1)), 0);
        if is_in_ring {
            assert_eq!(written(&mut relay, one), [lost]);
        }
        relay.suspend(one);
        relay.recovery_mut().set_memory(1 << 20);
        relay.attach_at(rank(1), 0, LogPosition { sent: 1, ..LogPosition::default() }).unwrap();
        assert_eq!(written(&mut relay, one), [opening(0), lost], "in the ring: {is_in_ring}");
    }
}

#[test]
fn one_that_was_sent_too_much_before_it_came_is_replayed_from_the_beginning() {
    let mut relay = home();
    relay.enable_recovery_within(LogLimits { memory: 0, ..LOGS_IN_MEMORY });
    let zero = relay.attach(rank(0), 0).unwrap();
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    relay.recovery_mut().set_memory(1 << 20);
    let one = relay.attach(rank(1), 0).unwrap();
    assert_eq!(written(&mut relay, one), [opening(0)]);
    assert_eq!(written(&mut relay, zero)[1..], [(Kind::Lost, pair_check(rank(1), rank(0)), 0)]);
}

#[test]
fn one_that_takes_all_at_once_goes_on_after_others_had_their_turn() {
    let (mut relay, [zero, one]) = recovering();
    for n in 0..100 {
        feed(&mut relay, zero, frame(rank(0), rank(1), n * 30_000, 30_000));
    }
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < 100 {
        turns.push(written(&mut relay, one).len());
        assert!(!relay.has_output(one), "its turn is over");
        while relay.poll_flush().is_some() {}
        assert!(
            relay.recovery().has_replay_work() || turns.len() == 12,
            "it is forgotten after {turns:?}"
        );
        relay.replay_next();
        assert!(relay.poll_flush() == Some(one) || turns.len() == 12);
    }
    assert_eq!(turns.len(), 12);
}
