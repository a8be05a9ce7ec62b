//! The smallest cases of faults that simulator and fuzzer found in channels with several paths.

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    Action, CompletionKind, CompletionLevel, Failure, OperationCompletion, PathProperties,
    PayloadDestination,
};
use landbridge_proto::wire::frame::Kind;
use landbridge_proto::wire::kind_header::KindHeader;
use landbridge_testbed::endpoint::{
    Frame, PEER, PairEnd, REMOTE, SizedMemory, TICKET, message, posting,
};

/// A path that may lose frames, and that cuts frames of more than ten bytes.
const PIECES: PathProperties = PathProperties {
    payload_max: 10,
    eager_max: 10,
    first_piece: 10,
    pull: false,
    window: 100,
    ahead: true,
    lossless: false,
    unbounded: false,
    spare: false,
    silent_loss: false,
    datagram: None,
    reorders: false,
    checked: false,
    copy_max: 100,
};

#[test]
fn an_older_ask_that_comes_later_is_not_the_one_that_is_answered() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    let older = a.next(TWO).unwrap();
    // The older status request is still in flight when its path breaks for the sender.
    a.channel_mut(PEER).open_path(ONE, PIECES);
    a.close_path(PEER, TWO);
    let newer = a.next(ONE).unwrap();
    assert_eq!((ask(&older), ask(&newer)), (Some(1), Some(2)));
    b.deliver(ONE, &newer);
    b.deliver(TWO, &older);
    a.deliver(ONE, &b.next(ONE).unwrap());
    let again = a.next(ONE).expect("the message goes again");
    assert_eq!(again.kind(), Kind::Tagged);
}

/// Small messages ask for no acknowledgement. What stayed behind would stay for ever if the sender
/// waited for an answer to them.
#[test]
fn what_waits_for_several_paths_leaves_without_an_answer() {
    const MANY: usize = 9;
    let (mut a, _) = pair();
    for _ in 0..MANY {
        a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    }
    let mut left = [0; 2];
    while a.next_busy().is_some() {
        for (path, left) in [ONE, TWO].into_iter().zip(&mut left) {
            *left += std::iter::from_fn(|| a.next(path)).count();
        }
    }
    assert_eq!(left.iter().sum::<usize>(), MANY, "{left:?}");
    assert!(left.iter().all(|&left| left > 0), "{left:?}");
}

#[test]
fn a_sender_is_free_again_when_all_it_sent_is_acknowledged_before_its_ask_is_answered() {
    for is_asked in [false, true] {
        let (mut a, mut b) = pair();
        a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
        b.deliver(ONE, &a.next(ONE).unwrap());
        b.channel_mut(PEER).suspect_path(ONE, true);
        let ack = b.next(TWO).unwrap();
        a.close_path(PEER, ONE);
        if is_asked {
            // The fate of this frame does not matter.
            assert_eq!(a.next(TWO).unwrap().kind(), Kind::StatusRequest);
        }
        a.deliver(TWO, &ack);
        a.send(message(6, CompletionLevel::TransmitComplete)).unwrap();
        assert_eq!(a.next(TWO).expect("the next message").kind(), Kind::Tagged);
    }
}

#[test]
fn an_acknowledgement_that_overtakes_a_refusal_waits_for_it() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    b.refuse_write(ONE, &a.next(ONE).unwrap());
    let refusal = b.next(ONE).unwrap();
    // With this message, the acknowledgement takes the other path.
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    b.deliver(TWO, &a.next(TWO).unwrap());
    assert_eq!(a.errors(), [None]);
    let ack = b.next(TWO).unwrap();
    assert_eq!((refusal.kind(), ack.kind()), (Kind::Refused, Kind::Ack));
    assert!(ack.header.delivered > 0);
    a.deliver(TWO, &ack);
    assert_eq!(a.errors(), []);
    a.deliver(ONE, &refusal);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_write_that_is_refused_while_its_path_holds_it_waits_once() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(3000), None, TICKET).unwrap();
    let frame = Frame::new(a.poll_transmit(PEER, ONE).unwrap().front());
    a.transmitted(PEER, ONE, false, None);
    b.refuse_write(ONE, &frame);
    a.deliver(TWO, &b.next(TWO).unwrap());
    a.handle_flushed(PEER, ONE);
    assert_eq!((a.channel(PEER).usage().awaiting, a.errors()), (1, vec![]));
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_frame_sent_again_acknowledges_nothing_that_a_refusal_is_about() {
    let (mut a, mut b) = pair();
    b.close_path(PEER, TWO);
    b.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    let lost = b.next(ONE).unwrap();
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    b.refuse_write(ONE, &a.next(ONE).unwrap());
    assert_eq!(b.next(ONE).unwrap().kind(), Kind::Refused);
    // Both frames are lost; the first retransmission has a number from before the refusal.
    b.channel_mut(PEER).open_path(TWO, PIECES);
    b.close_path(PEER, ONE);
    a.close_path(PEER, ONE);
    let again = loop {
        let frame = b.next(TWO).unwrap();
        if frame.kind() == Kind::Tagged {
            break frame;
        }
        a.deliver(TWO, &frame);
        a.next(TWO).iter().for_each(|frame| _ = b.deliver(TWO, frame));
    };
    assert_eq!(again.header.sequence, lost.header.sequence);
    a.deliver(TWO, &again);
    assert_eq!(a.errors(), []);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn who_may_not_acknowledge_yet_says_all_the_same_what_need_not_come_again() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    b.refuse_write(ONE, &a.next(ONE).unwrap());
    a.close_path(PEER, ONE);
    let ask = a.next(TWO).unwrap();
    assert_eq!(ask.kind(), Kind::StatusRequest);
    b.deliver(TWO, &ask);
    let report = b.next(TWO).unwrap();
    let head = KindHeader::parse(report.kind(), 0, &report.head);
    let Ok(KindHeader::StatusReply { ranges, .. }) = head else { panic!("{:?}", report.header) };
    assert_eq!(report.header.delivered, 0, "the refusal has not left");
    assert!(ranges.contains(&(0, 37)), "{ranges:?}");
    a.deliver(TWO, &report);
    assert!(a.next(TWO).is_none_or(|frame| !frame.kind().is_numbered()), "it would go for ever");
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_signal_before_a_refusal_acknowledges_nothing_that_the_refusal_is_about() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    let write = a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    b.refuse_write(ONE, &write);
    b.deliver(TWO, &a.next(TWO).unwrap());
    // The answer to the status request overtakes the refusal, which has not left.
    let report = b.next(TWO).unwrap();
    assert_eq!((report.kind(), report.header.delivered), (Kind::StatusReply, 0));
    a.deliver(TWO, &report);
    assert_eq!(a.errors(), []);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn who_may_not_acknowledge_before_a_refusal_that_has_to_wait_says_nothing() {
    let (mut a, mut b) = pair();
    b.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    b.next(ONE).unwrap();
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    b.refuse_write(ONE, &a.next(TWO).unwrap());
    // Until its status request is answered, the endpoint sends nothing new, refusals included.
    b.close_path(PEER, ONE);
    let ask = b.next(TWO).unwrap();
    assert_eq!(ask.kind(), Kind::StatusRequest);
    assert!(b.next(TWO).is_none());
    a.close_path(PEER, ONE);
    a.deliver(TWO, &ask);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_payload_that_comes_again_by_another_path_belongs_to_that_alone() {
    let (mut a, mut b) = pair();
    b.messages_mut().recv(posting(5));
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    let frame = a.next(ONE).unwrap();
    let place = b.begin_frame(ONE, &frame);
    assert_eq!(discarded(&mut b), []);
    assert_eq!(b.begin_frame(TWO, &frame), place);
    assert_eq!(discarded(&mut b), [ONE]);
    // The first copy turns out to be corrupt, which has no effect: nothing need be retransmitted.
    b.corrupt_frame(ONE);
    assert!(b.next(ONE).is_none());
    b.end_frame(TWO);
    assert_eq!(b.done().len(), 1);
}

#[test]
fn what_is_kept_comes_by_one_path_at_a_time() {
    let (mut a, mut b) = pair();
    let [first, second] = two_messages(&mut a);
    assert!(matches!(b.begin_frame(ONE, &second), PayloadDestination::OutOfOrder { .. }));
    assert!(matches!(b.begin_frame(TWO, &second), PayloadDestination::OutOfOrder { .. }));
    assert_eq!(discarded(&mut b), [ONE]);
    b.corrupt_frame(ONE);
    b.end_frame(TWO);
    assert_eq!(b.channel(PEER).next_reassembled(), None);
    b.begin_frame(ONE, &first);
    b.end_frame(ONE);
    assert_eq!(b.channel(PEER).next_reassembled(), Some(second.header.sequence));
}

#[test]
fn what_is_taken_in_is_not_kept_any_more_though_it_is_still_arriving() {
    let (mut a, mut b) = pair();
    let [first, second] = two_messages(&mut a);
    assert!(matches!(b.begin_frame(ONE, &second), PayloadDestination::OutOfOrder { .. }));
    b.begin_frame(TWO, &first);
    b.end_frame(TWO);
    assert!(matches!(b.begin_frame(TWO, &second), PayloadDestination::NewUnexpected { .. }));
    b.end_frame(TWO);
    let actions: Vec<_> = b.actions();
    let place = |wanted: fn(&Action<SizedMemory>) -> bool| actions.iter().position(wanted);
    let divert = place(|action| matches!(action, Action::DiscardPayload { path: ONE, .. }));
    let release = place(|action| matches!(action, Action::Release { .. }));
    assert!(divert.is_some() && divert < release, "{actions:?}");
    b.end_frame(ONE);
    assert_eq!(b.channel(PEER).next_reassembled(), None);
}

#[test]
fn an_operation_is_not_done_while_another_path_holds_a_piece_of_it() {
    for breaks in [false, true] {
        let (mut a, _) = pair();
        a.send(message(20, CompletionLevel::TransmitComplete)).unwrap();
        let copy = Some(SizedMemory(10));
        assert!(a.poll_transmit(PEER, ONE).unwrap().wants_copy);
        a.transmitted(PEER, ONE, false, copy.clone());
        assert!(a.poll_transmit(PEER, TWO).is_some());
        a.transmitted(PEER, TWO, true, copy);
        assert_eq!(a.done(), [], "path one still reads the first half");
        if breaks {
            a.close_path(PEER, ONE);
        } else {
            a.handle_flushed(PEER, ONE);
        }
        assert_eq!(a.done().len(), 1);
    }
}

#[test]
fn a_refused_operation_is_not_done_while_another_path_holds_a_piece_of_it() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(20), None, TICKET).unwrap();
    let first = a.next(ONE).unwrap();
    assert!(a.poll_transmit(PEER, TWO).is_some());
    a.transmitted(PEER, TWO, false, Some(SizedMemory(10)));
    b.refuse_write(ONE, &first);
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert_eq!(a.done(), [], "path two still reads the second half");
    a.handle_flushed(PEER, TWO);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn an_acknowledgement_that_is_lost_with_a_corrupt_frame_is_said_again() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, &a.next(ONE).unwrap());
    b.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    let corrupt = b.next(ONE).unwrap();
    assert!(corrupt.header.delivered > 0);
    assert!(b.next(ONE).is_none(), "the message has acknowledged what there was to acknowledge");
    assert!(a.channel_mut(PEER).handle_corrupt_frame(&corrupt.header));
    settle_by(ONE, &mut a, &mut b);
    let sent = |done: &&OperationCompletion| done.kind == CompletionKind::TaggedSend;
    assert_eq!(a.done().iter().filter(sent).count(), 1);
}

#[test]
fn an_answer_that_is_lost_with_a_path_the_asker_has_given_up_is_said_again() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).open_path(THREE, PIECES);
    b.channel_mut(PEER).open_path(THREE, PIECES);
    a.close_path(PEER, TWO);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    b.deliver(THREE, &a.next(THREE).unwrap());
    // The endpoint does not know yet that path two is broken, and suspects the path that is left.
    b.channel_mut(PEER).suspect_path(THREE, true);
    assert_eq!(b.next(TWO).unwrap().kind(), Kind::StatusReply);
    b.close_path(PEER, ONE);
    b.close_path(PEER, TWO);
    a.deliver(THREE, &b.next(THREE).expect("the answer again"));
    assert_eq!(a.next(THREE).expect("the message again").kind(), Kind::Tagged);
}

#[test]
fn a_payload_that_was_diverted_to_a_path_that_breaks_is_asked_for_again() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    let older = a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    b.deliver(TWO, &a.next(TWO).unwrap());
    a.deliver(TWO, &b.next(TWO).unwrap());
    let again = a.next(TWO).unwrap();
    b.begin_frame(TWO, &again);
    // What path one carried before it broke can still be read, but not to the end of the frame.
    b.begin_frame(ONE, &older);
    assert_eq!(discarded(&mut b), [TWO]);
    b.end_frame(TWO);
    b.close_path(PEER, ONE);
    settle(&mut a, &mut b);
    assert_eq!(a.done().len(), 1);
}

#[test]
fn what_is_kept_and_was_diverted_to_a_path_that_breaks_is_asked_for_again() {
    let (mut a, mut b) = pair();
    a.close_path(PEER, TWO);
    let [first, older] = two_messages(&mut a);
    a.channel_mut(PEER).open_path(TWO, PIECES);
    a.close_path(PEER, ONE);
    b.deliver(TWO, &a.next(TWO).unwrap());
    a.deliver(TWO, &b.next(TWO).unwrap());
    let [_, again] = [a.next(TWO).unwrap(), a.next(TWO).unwrap()];
    b.begin_frame(TWO, &again);
    b.begin_frame(ONE, &older);
    assert_eq!(discarded(&mut b), [TWO]);
    b.end_frame(TWO);
    b.close_path(PEER, ONE);
    b.deliver(TWO, &first);
    settle(&mut a, &mut b);
    b.channel_mut(PEER).goodbye();
    a.channel_mut(PEER).goodbye();
    settle(&mut a, &mut b);
    assert!(a.is_drained());
}

#[test]
fn what_is_diverted_to_a_frame_that_is_diverted_too_is_asked_for_again() {
    let (mut a, mut b) = pair();
    let [first, whole] = two_messages(&mut a);
    assert!(b.channel_mut(PEER).handle_corrupt_frame(&whole.header));
    a.deliver(ONE, &b.next(ONE).unwrap());
    a.channel_mut(PEER).set_path(TWO, PathProperties { payload_max: 4, ..PIECES });
    let [piece, next] = [a.next(TWO).unwrap(), a.next(TWO).unwrap()];
    b.begin_frame(TWO, &piece);
    // An old copy of the whole frame arrives between two pieces of it.
    b.begin_frame(ONE, &whole);
    assert_eq!(discarded(&mut b), [TWO]);
    b.end_frame(TWO);
    b.begin_frame(TWO, &next);
    assert_eq!(discarded(&mut b), [ONE]);
    b.end_frame(ONE);
    b.end_frame(TWO);
    b.deliver(TWO, &first);
    settle(&mut a, &mut b);
    [5, 6].into_iter().for_each(|bytes| b.messages_mut().recv(posting(bytes)));
    assert_eq!(b.errors(), [None; 2], "both messages have arrived");
}

/// The driver had polled this path before, and the other path leaves the message to it: nobody
/// would have polled it again.
#[test]
fn a_path_that_is_spare_no_longer_is_asked_for_what_waits() {
    let (mut a, _) = pair();
    a.channel_mut(PEER).set_path(TWO, PathProperties { spare: true, ..PIECES });
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    a.next(ONE).unwrap();
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    while a.next_busy().is_some() {}
    assert!(a.next(TWO).is_none(), "it is spare");
    a.channel_mut(PEER).set_path(TWO, PIECES);
    assert!(a.next(ONE).is_none(), "the other would have it there sooner");
    assert_eq!(a.next_busy(), Some(PEER));
    assert_eq!(a.next(TWO).unwrap().kind(), Kind::Tagged);
}

#[test]
fn an_answer_takes_the_way_of_the_question() {
    for (dead, alive) in [(ONE, TWO), (TWO, ONE)] {
        let (mut a, mut b) = pair();
        a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
        // The message was given to a path that is dead, and only this side has noticed.
        assert!(a.next(dead).is_some());
        a.channel_mut(PEER).suspect_path(dead, true);
        assert!(a.next(dead).is_none());
        b.deliver(alive, &a.next(alive).expect("a question"));
        assert!(b.next(dead).is_none(), "the answer would be lost");
        a.deliver(alive, &b.next(alive).expect("an answer"));
        assert!(a.next(dead).is_none());
        b.deliver(alive, &a.next(alive).expect("the message goes again"));
        assert!(b.next(dead).is_none(), "the acknowledgement would be lost");
        a.deliver(alive, &b.next(alive).expect("an acknowledgement"));
        assert_eq!(a.errors(), [None]);
    }
}

#[test]
fn a_path_that_was_suspected_carries_again_as_soon_as_it_has_healed() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    assert!(a.next(ONE).is_none());
    settle(&mut a, &mut b);
    a.channel_mut(PEER).suspect_path(ONE, false);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, &a.next(ONE).expect("a message"));
    settle_by(ONE, &mut a, &mut b);
    assert_eq!(a.errors(), [None; 2]);
}

#[test]
fn the_last_path_is_used_though_it_is_suspected() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    a.close_path(PEER, TWO);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, &a.next(ONE).expect("something goes out"));
}

#[test]
fn what_a_suspected_path_took_for_want_of_another_goes_again_when_there_is_one() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    [&mut a, &mut b].into_iter().for_each(|it| it.close_path(PEER, TWO));
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    // This frame never arrives.
    a.next(ONE).expect("something goes out");
    [&mut a, &mut b].into_iter().for_each(|it| it.channel_mut(PEER).open_path(TWO, PIECES));
    settle_by(TWO, &mut a, &mut b);
    assert_eq!(a.errors(), [None]);
}

#[test]
fn what_a_suspected_path_has_taken_in_part_is_done_when_it_has_come_by_another() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    [&mut a, &mut b].into_iter().for_each(|it| it.close_path(PEER, TWO));
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    // The rest of the frame never leaves, and nobody reports this.
    let lets_go = a.poll_transmit(PEER, ONE).expect("something goes out").must_release_memory;
    a.transmitted(PEER, ONE, lets_go, None);
    [&mut a, &mut b].into_iter().for_each(|it| it.channel_mut(PEER).open_path(TWO, PIECES));
    settle_by(TWO, &mut a, &mut b);
    assert_eq!(a.errors(), [None]);
}

#[test]
fn what_came_early_and_found_no_room_is_asked_for_when_its_turn_comes() {
    const MANY: usize = REORDER_WINDOW_FRAMES_MAX + 100;
    let (mut a, mut b) = pair();
    for end in [&mut a, &mut b] {
        end.close_path(PEER, TWO);
    }
    let mut frames = Vec::new();
    for number in 0..MANY {
        a.send(message(if number == 0 { 5 } else { 0 }, CompletionLevel::TransmitComplete))
            .unwrap();
        frames.push(a.next(ONE).unwrap());
        a.done();
    }
    // The path loses nothing, but the first frame arrives corrupt: all frames behind it are early.
    assert!(b.channel_mut(PEER).handle_corrupt_frame(&frames[0].header));
    frames.iter().skip(1).for_each(|frame| _ = b.deliver(ONE, frame));
    for _ in 0..MANY {
        b.next(ONE).iter().for_each(|frame| _ = a.deliver(ONE, frame));
        a.next(ONE).iter().for_each(|frame| _ = b.deliver(ONE, frame));
        b.done();
    }
    a.channel_mut(PEER).goodbye();
    settle_by(ONE, &mut a, &mut b);
    assert!(a.is_drained());
}

#[test]
fn what_goes_again_stays_within_what_the_peer_keeps() {
    const MEBI: PathProperties = PathProperties { payload_max: 1 << 20, copy_max: 0, ..PIECES };
    let (mut a, mut b) = pair();
    for end in [&mut a, &mut b] {
        end.close_path(PEER, TWO);
        end.channel_mut(PEER).set_path(ONE, MEBI);
    }
    a.write(REMOTE, SizedMemory(3 * REORDER_WINDOW_BYTES_MAX / 2), None, TICKET).unwrap();
    while a.next(ONE).is_some() {}
    for end in [&mut a, &mut b] {
        end.close_path(PEER, ONE);
        end.channel_mut(PEER).open_path(TWO, MEBI);
        end.channel_mut(PEER).open_path(THREE, MEBI);
    }
    b.deliver(TWO, &a.next(TWO).unwrap());
    a.deliver(TWO, &b.next(TWO).unwrap());
    // The first frame takes one path; all others overtake it by another.
    let first = a.next(TWO).unwrap();
    while let Some(frame) = a.next(THREE) {
        b.deliver(THREE, &frame);
    }
    b.deliver(TWO, &first);
    for _ in 0..100 {
        b.next(TWO).iter().for_each(|frame| _ = a.deliver(TWO, frame));
        a.next(TWO).iter().for_each(|frame| _ = b.deliver(TWO, frame));
    }
    assert_eq!(a.errors(), [None]);
}

#[test]
fn a_path_that_takes_everything_gets_what_the_peer_has_acknowledged_and_a_window_more() {
    const LOG: PathProperties =
        PathProperties { payload_max: 1 << 15, lossless: true, unbounded: true, ..PIECES };
    let (mut a, mut b) = pair();
    for end in [&mut a, &mut b] {
        end.close_path(PEER, TWO);
        end.channel_mut(PEER).set_path(ONE, LOG);
    }
    let total = 4 * REORDER_WINDOW_BYTES_MAX;
    a.write(REMOTE, SizedMemory(total), None, TICKET).unwrap();
    let mut rounds = 0;
    while !a.is_drained() {
        let frames: Vec<Frame> = std::iter::from_fn(|| a.next(ONE)).collect();
        let bytes = (frames.len() as u64) << 15;
        assert!(bytes <= REORDER_WINDOW_BYTES_MAX + (1 << 15), "{bytes} bytes at once");
        frames.iter().for_each(|frame| _ = b.deliver(ONE, frame));
        b.done();
        std::iter::from_fn(|| b.next(ONE)).for_each(|frame| _ = a.deliver(ONE, &frame));
        rounds += 1;
        assert!(rounds < 20, "it stands still");
    }
    assert!(rounds >= 4, "{rounds} rounds");
    assert_eq!((a.errors(), b.errors()), ([None].to_vec(), Vec::new()));
}

/// The paths to the peer.
const ONE: PathId = PathId(0);
const TWO: PathId = PathId(1);
const THREE: PathId = PathId(2);

fn pair() -> (PairEnd, PairEnd) {
    landbridge_testbed::endpoint::pair((1_000, 100), &[(ONE, PIECES), (TWO, PIECES)])
}

/// Two messages, by whatever path, that have not been delivered.
fn two_messages(a: &mut PairEnd) -> [Frame; 2] {
    [5, 6].map(|bytes| {
        a.send(message(bytes, CompletionLevel::TransmitComplete)).unwrap();
        a.next(ONE).or_else(|| a.next(TWO)).unwrap()
    })
}

fn ask(frame: &Frame) -> Option<u64> {
    match frame.kind_header() {
        KindHeader::StatusRequest { number } => Some(number),
        _ => None,
    }
}

/// Exchanges frames by path two until there are no more.
fn settle(a: &mut PairEnd, b: &mut PairEnd) {
    settle_by(TWO, a, b);
}

fn settle_by(path: PathId, a: &mut PairEnd, b: &mut PairEnd) {
    landbridge_testbed::endpoint::settle(a, b, &[path]);
}

/// The paths whose payload must be discarded.
fn discarded(endpoint: &mut PairEnd) -> Vec<PathId> {
    let actions = endpoint.actions().into_iter();
    actions
        .filter_map(|action| match action {
            Action::DiscardPayload { path, .. } => Some(path),
            _ => None,
        })
        .collect()
}
