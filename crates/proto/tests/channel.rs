//! The smallest cases of faults that simulator and fuzzer found in channels with several paths.

mod common;

use std::collections::BTreeMap;

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    Action, CompletionKind, CompletionLevel, Config, Endpoint, Failure, Message,
    OperationCompletion, PathProperties, PayloadDestination, Peer, Posting, REASSEMBLED, Remote,
    Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::limit::KIND_HEADER_BYTES_MAX;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;

use common::Room;

/// A path that may lose frames, and that cuts frames of more than ten bytes.
const PIECES: PathProperties = PathProperties {
    payload_max: 10,
    eager_max: 10,
    first_piece: 10,
    pull: false,
    window: 100,
    ahead: true,
    lossless: false,
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
    b.deliver(ONE, newer);
    b.deliver(TWO, older);
    a.deliver(ONE, b.next(ONE).unwrap());
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
        b.deliver(ONE, a.next(ONE).unwrap());
        b.channel_mut(PEER).suspect_path(ONE, true);
        let ack = b.next(TWO).unwrap();
        a.close_path(PEER, ONE);
        if is_asked {
            // The fate of this frame does not matter.
            assert_eq!(a.next(TWO).unwrap().kind(), Kind::StatusRequest);
        }
        a.deliver(TWO, ack);
        a.send(message(6, CompletionLevel::TransmitComplete)).unwrap();
        assert_eq!(a.next(TWO).expect("the next message").kind(), Kind::Tagged);
    }
}

#[test]
fn an_acknowledgement_that_overtakes_a_refusal_waits_for_it() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, Room(5), None, TICKET).unwrap();
    b.refuse_write(a.next(ONE).unwrap());
    let refusal = b.next(ONE).unwrap();
    // With this message, the acknowledgement takes the other path.
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    b.deliver(TWO, a.next(TWO).unwrap());
    assert_eq!(a.errors(), [None]);
    let ack = b.next(TWO).unwrap();
    assert_eq!((refusal.kind(), ack.kind()), (Kind::Refused, Kind::Ack));
    assert!(ack.header.delivered > 0);
    a.deliver(TWO, ack);
    assert_eq!(a.errors(), []);
    a.deliver(ONE, refusal);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_write_that_is_refused_while_its_path_holds_it_waits_once() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, Room(3000), None, TICKET).unwrap();
    let front = a.poll_transmit(PEER, ONE).unwrap().front().to_vec();
    a.transmitted(PEER, ONE, false, None);
    let header = Header::parse(&front).unwrap();
    b.refuse_write(Frame { header, head: front[HEADER_BYTES..].to_vec() });
    a.deliver(TWO, b.next(TWO).unwrap());
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
    a.write(REMOTE, Room(5), None, TICKET).unwrap();
    b.refuse_write(a.next(ONE).unwrap());
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
        a.deliver(TWO, frame);
        a.next(TWO).into_iter().for_each(|frame| b.deliver(TWO, frame));
    };
    assert_eq!(again.header.sequence, lost.header.sequence);
    a.deliver(TWO, again);
    assert_eq!(a.errors(), []);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn who_may_not_acknowledge_yet_says_all_the_same_what_need_not_come_again() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, Room(5), None, TICKET).unwrap();
    b.refuse_write(a.next(ONE).unwrap());
    a.close_path(PEER, ONE);
    let ask = a.next(TWO).unwrap();
    assert_eq!(ask.kind(), Kind::StatusRequest);
    b.deliver(TWO, ask);
    let report = b.next(TWO).unwrap();
    let head = KindHeader::parse(report.kind(), 0, &report.head);
    let Ok(KindHeader::StatusReply { ranges, .. }) = head else { panic!("{:?}", report.header) };
    assert_eq!(report.header.delivered, 0, "the refusal has not left");
    assert!(ranges.contains(&(0, 37)), "{ranges:?}");
    a.deliver(TWO, report);
    assert!(a.next(TWO).is_none_or(|frame| !frame.kind().is_numbered()), "it would go for ever");
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_signal_before_a_refusal_acknowledges_nothing_that_the_refusal_is_about() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, Room(5), None, TICKET).unwrap();
    let write = a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    b.refuse_write(write);
    b.deliver(TWO, a.next(TWO).unwrap());
    // The answer to the status request overtakes the refusal, which has not left.
    let report = b.next(TWO).unwrap();
    assert_eq!((report.kind(), report.header.delivered), (Kind::StatusReply, 0));
    a.deliver(TWO, report);
    assert_eq!(a.errors(), []);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn who_may_not_acknowledge_before_a_refusal_that_has_to_wait_says_nothing() {
    let (mut a, mut b) = pair();
    b.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    b.next(ONE).unwrap();
    a.write(REMOTE, Room(5), None, TICKET).unwrap();
    b.refuse_write(a.next(TWO).unwrap());
    // Until its status request is answered, the endpoint sends nothing new, refusals included.
    b.close_path(PEER, ONE);
    let ask = b.next(TWO).unwrap();
    assert_eq!(ask.kind(), Kind::StatusRequest);
    assert!(b.next(TWO).is_none());
    a.close_path(PEER, ONE);
    a.deliver(TWO, ask);
    settle(&mut a, &mut b);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn a_payload_that_comes_again_by_another_path_belongs_to_that_alone() {
    let (mut a, mut b) = pair();
    b.messages_mut().recv(posting(5));
    a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
    let frame = a.next(ONE).unwrap();
    let place = b.hear(ONE, &frame);
    assert_eq!(discarded(&mut b), []);
    assert_eq!(b.hear(TWO, &frame), place);
    assert_eq!(discarded(&mut b), [ONE]);
    // The first copy turns out to be corrupt, which has no effect: nothing need be retransmitted.
    assert!(b.channel_mut(PEER).handle_corrupt(ONE));
    assert!(b.next(ONE).is_none());
    b.handle_payload(PEER, TWO);
    assert_eq!(b.done().len(), 1);
}

#[test]
fn what_is_kept_comes_by_one_path_at_a_time() {
    let (mut a, mut b) = pair();
    let [first, second] = two_messages(&mut a);
    assert!(matches!(b.hear(ONE, &second), PayloadDestination::OutOfOrder { .. }));
    assert!(matches!(b.hear(TWO, &second), PayloadDestination::OutOfOrder { .. }));
    assert_eq!(discarded(&mut b), [ONE]);
    assert!(b.channel_mut(PEER).handle_corrupt(ONE));
    b.handle_payload(PEER, TWO);
    assert_eq!(b.channel(PEER).next_reassembled(), None);
    b.deliver(ONE, first);
    assert_eq!(b.channel(PEER).next_reassembled(), Some(second.header.sequence));
}

#[test]
fn what_is_taken_in_is_not_kept_any_more_though_it_is_still_arriving() {
    let (mut a, mut b) = pair();
    let [first, second] = two_messages(&mut a);
    assert!(matches!(b.hear(ONE, &second), PayloadDestination::OutOfOrder { .. }));
    b.deliver(TWO, first);
    assert!(matches!(b.hear(TWO, &second), PayloadDestination::NewUnexpected { .. }));
    b.handle_payload(PEER, TWO);
    let actions: Vec<_> = std::iter::from_fn(|| b.poll_action()).collect();
    let place = |wanted: fn(&Action<Room>) -> bool| actions.iter().position(wanted);
    let divert = place(|action| matches!(action, Action::DiscardPayload { path: ONE, .. }));
    let release = place(|action| matches!(action, Action::Release { .. }));
    assert!(divert.is_some() && divert < release, "{actions:?}");
    b.handle_payload(PEER, ONE);
    assert_eq!(b.channel(PEER).next_reassembled(), None);
}

#[test]
fn an_operation_is_not_done_while_another_path_holds_a_piece_of_it() {
    for breaks in [false, true] {
        let (mut a, _) = pair();
        a.send(message(20, CompletionLevel::TransmitComplete)).unwrap();
        let copy = Some(Room(10));
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
    a.write(REMOTE, Room(20), None, TICKET).unwrap();
    let first = a.next(ONE).unwrap();
    assert!(a.poll_transmit(PEER, TWO).is_some());
    a.transmitted(PEER, TWO, false, Some(Room(10)));
    b.refuse_write(first);
    a.deliver(ONE, b.next(ONE).unwrap());
    assert_eq!(a.done(), [], "path two still reads the second half");
    a.handle_flushed(PEER, TWO);
    assert_eq!(a.errors(), [Some(Failure::Errno(13))]);
}

#[test]
fn an_acknowledgement_that_is_lost_with_a_corrupt_frame_is_said_again() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, a.next(ONE).unwrap());
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
    b.deliver(THREE, a.next(THREE).unwrap());
    // The endpoint does not know yet that path two is broken, and suspects the path that is left.
    b.channel_mut(PEER).suspect_path(THREE, true);
    assert_eq!(b.next(TWO).unwrap().kind(), Kind::StatusReply);
    b.close_path(PEER, ONE);
    b.close_path(PEER, TWO);
    a.deliver(THREE, b.next(THREE).expect("the answer again"));
    assert_eq!(a.next(THREE).expect("the message again").kind(), Kind::Tagged);
}

#[test]
fn a_payload_that_was_diverted_to_a_path_that_breaks_is_asked_for_again() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    let older = a.next(ONE).unwrap();
    a.close_path(PEER, ONE);
    b.deliver(TWO, a.next(TWO).unwrap());
    a.deliver(TWO, b.next(TWO).unwrap());
    let again = a.next(TWO).unwrap();
    b.hear(TWO, &again);
    // What path one carried before it broke can still be read, but not to the end of the frame.
    b.hear(ONE, &older);
    assert_eq!(discarded(&mut b), [TWO]);
    b.handle_payload(PEER, TWO);
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
    b.deliver(TWO, a.next(TWO).unwrap());
    a.deliver(TWO, b.next(TWO).unwrap());
    let [_, again] = [a.next(TWO).unwrap(), a.next(TWO).unwrap()];
    b.hear(TWO, &again);
    b.hear(ONE, &older);
    assert_eq!(discarded(&mut b), [TWO]);
    b.handle_payload(PEER, TWO);
    b.close_path(PEER, ONE);
    b.deliver(TWO, first);
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
    a.deliver(ONE, b.next(ONE).unwrap());
    a.channel_mut(PEER).set_path(TWO, PathProperties { payload_max: 4, ..PIECES });
    let [piece, next] = [a.next(TWO).unwrap(), a.next(TWO).unwrap()];
    b.hear(TWO, &piece);
    // An old copy of the whole frame arrives between two pieces of it.
    b.hear(ONE, &whole);
    assert_eq!(discarded(&mut b), [TWO]);
    b.handle_payload(PEER, TWO);
    b.hear(TWO, &next);
    assert_eq!(discarded(&mut b), [ONE]);
    b.handle_payload(PEER, ONE);
    b.handle_payload(PEER, TWO);
    b.deliver(TWO, first);
    settle(&mut a, &mut b);
    assert_eq!(b.channel(PEER).next_reassembled(), Some(whole.header.sequence));
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
        b.deliver(alive, a.next(alive).expect("a question"));
        assert!(b.next(dead).is_none(), "the answer would be lost");
        a.deliver(alive, b.next(alive).expect("an answer"));
        assert!(a.next(dead).is_none());
        b.deliver(alive, a.next(alive).expect("the message goes again"));
        assert!(b.next(dead).is_none(), "the acknowledgement would be lost");
        a.deliver(alive, b.next(alive).expect("an acknowledgement"));
        assert_eq!(a.errors(), [None]);
    }
}

#[test]
fn a_path_that_was_doubted_carries_again_as_soon_as_it_has_healed() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    assert!(a.next(ONE).is_none());
    settle(&mut a, &mut b);
    a.channel_mut(PEER).suspect_path(ONE, false);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, a.next(ONE).expect("a message"));
    settle_by(ONE, &mut a, &mut b);
    assert_eq!(a.errors(), [None; 2]);
}

#[test]
fn the_last_path_is_used_though_it_is_doubted() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).suspect_path(ONE, true);
    a.close_path(PEER, TWO);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(ONE, a.next(ONE).expect("something goes out"));
}

#[test]
fn what_a_doubted_path_took_for_want_of_another_goes_again_when_there_is_one() {
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
fn what_a_doubted_path_has_taken_in_part_is_done_when_it_has_come_by_another() {
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
    let mut heads = BTreeMap::new();
    for number in 0..MANY {
        a.send(message(if number == 0 { 5 } else { 0 }, CompletionLevel::TransmitComplete))
            .unwrap();
        let frame = a.next(ONE).unwrap();
        heads.insert(frame.header.sequence, frame.head.clone());
        frames.push(frame);
        a.done();
    }
    // The path loses nothing, but the first frame arrives corrupt: all frames behind it are early.
    assert!(b.channel_mut(PEER).handle_corrupt_frame(&frames[0].header));
    frames.drain(..).skip(1).for_each(|frame| b.deliver(ONE, frame));
    for _ in 0..MANY {
        b.next(ONE).into_iter().for_each(|frame| a.deliver(ONE, frame));
        a.next(ONE).into_iter().for_each(|frame| b.deliver(ONE, frame));
        while let Some(kept) = b.channel(PEER).next_reassembled() {
            b.handle_reassembled(PEER, &heads[&kept]).unwrap();
            b.handle_payload(PEER, REASSEMBLED);
        }
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
    a.write(REMOTE, Room(3 * REORDER_WINDOW_BYTES_MAX / 2), None, TICKET).unwrap();
    while a.next(ONE).is_some() {}
    for end in [&mut a, &mut b] {
        end.close_path(PEER, ONE);
        end.channel_mut(PEER).open_path(TWO, MEBI);
        end.channel_mut(PEER).open_path(THREE, MEBI);
    }
    b.deliver(TWO, a.next(TWO).unwrap());
    a.deliver(TWO, b.next(TWO).unwrap());
    // The first frame takes one path; all others overtake it by another.
    let first = a.next(TWO).unwrap();
    let mut heads = BTreeMap::new();
    while let Some(frame) = a.next(THREE) {
        heads.insert(frame.header.sequence, frame.head.clone());
        b.deliver(THREE, frame);
    }
    b.deliver(TWO, first);
    for _ in 0..100 {
        while let Some(kept) = b.channel(PEER).next_reassembled() {
            b.handle_reassembled(PEER, &heads[&kept]).unwrap();
            b.handle_payload(PEER, REASSEMBLED);
        }
        b.next(TWO).into_iter().for_each(|frame| a.deliver(TWO, frame));
        a.next(TWO).into_iter().for_each(|frame| b.deliver(TWO, frame));
    }
    assert_eq!(a.errors(), [None]);
}

/// The peer in every test, and the paths to it.
const PEER: Peer = Peer(0);
const ONE: PathId = PathId(0);
const TWO: PathId = PathId(1);
const THREE: PathId = PathId(2);
const TICKET: Ticket = Ticket { context: 7, notify: true };
const REMOTE: Remote = Remote { peer: PEER, key: 1, offset: 0 };

fn pair() -> (Endpoint<Room>, Endpoint<Room>) {
    let endpoint = |index: u32| {
        let mut endpoint = Endpoint::new(Config {
            address: Address::new(index, 0),
            eager_window: 1_000,
            min_multi_recv: 10,
            operations_max: 100,
        });
        assert_eq!(endpoint.peer(Address::new(1 - index, 0)), PEER);
        endpoint.channel_mut(PEER).open_path(ONE, PIECES);
        endpoint.channel_mut(PEER).open_path(TWO, PIECES);
        endpoint
    };
    (endpoint(0), endpoint(1))
}

fn message(bytes: u64, level: CompletionLevel) -> Message<Room> {
    Message { peer: PEER, memory: Room(bytes), tag: Some(1), data: None, ticket: TICKET, level }
}

fn posting(bytes: u64) -> Posting<Room> {
    Posting { source: None, memory: Room(bytes), tag: Some((1, 0)), ticket: TICKET, multi: false }
}

/// Two messages, by whatever path, that have not been delivered.
fn two_messages(a: &mut Endpoint<Room>) -> [Frame; 2] {
    [5, 6].map(|bytes| {
        a.send(message(bytes, CompletionLevel::TransmitComplete)).unwrap();
        a.next(ONE).or_else(|| a.next(TWO)).unwrap()
    })
}

fn ask(frame: &Frame) -> Option<u64> {
    match frame.head() {
        KindHeader::StatusRequest { number } => Some(number),
        _ => None,
    }
}

/// Exchanges frames by path two until there are no more.
fn settle(a: &mut Endpoint<Room>, b: &mut Endpoint<Room>) {
    settle_by(TWO, a, b);
}

fn settle_by(path: PathId, a: &mut Endpoint<Room>, b: &mut Endpoint<Room>) {
    for _ in 0..100 {
        let (there, back) = (a.next(path), b.next(path));
        if there.is_none() && back.is_none() {
            return;
        }
        there.into_iter().for_each(|frame| b.deliver(path, frame));
        back.into_iter().for_each(|frame| a.deliver(path, frame));
    }
    panic!("they never come to rest");
}

/// The paths whose payload must be discarded.
fn discarded(endpoint: &mut Endpoint<Room>) -> Vec<PathId> {
    let actions = std::iter::from_fn(|| endpoint.poll_action());
    actions
        .filter_map(|action| match action {
            Action::DiscardPayload { path, .. } => Some(path),
            _ => None,
        })
        .collect()
}

/// A frame without its payload.
#[derive(Clone, Debug)]
struct Frame {
    header: Header,
    head: Vec<u8>,
}

impl Frame {
    fn kind(&self) -> Kind {
        self.header.kind
    }

    fn head(&self) -> KindHeader {
        KindHeader::parse(self.header.kind, self.header.flags, &self.head).unwrap()
    }
}

/// What a test does with an endpoint.
trait Drive {
    /// The next frame for a path, which takes the whole frame at once.
    fn next(&mut self, path: PathId) -> Option<Frame>;
    /// A frame arrives by a path; its payload is still to come.
    fn hear(&mut self, path: PathId, frame: &Frame) -> PayloadDestination;
    fn deliver(&mut self, path: PathId, frame: Frame);
    /// A write arrives by path one, and there is no such region.
    fn refuse_write(&mut self, frame: Frame);
    fn done(&mut self) -> Vec<OperationCompletion>;
    fn errors(&mut self) -> Vec<Option<Failure>>;
}

impl Drive for Endpoint<Room> {
    fn next(&mut self, path: PathId) -> Option<Frame> {
        let frame = self.poll_transmit(PEER, path)?;
        let front = frame.front().to_vec();
        let copy = frame.payload.filter(|_| frame.wants_copy).map(|(.., length)| Room(length));
        self.transmitted(PEER, path, true, copy);
        let header = Header::parse(&front).unwrap();
        Some(Frame { header, head: front[HEADER_BYTES..].to_vec() })
    }

    fn hear(&mut self, path: PathId, frame: &Frame) -> PayloadDestination {
        assert!(frame.head.len() <= KIND_HEADER_BYTES_MAX);
        self.handle_frame(PEER, path, &frame.header, &frame.head).unwrap()
    }

    fn deliver(&mut self, path: PathId, frame: Frame) {
        self.hear(path, &frame);
        self.handle_payload(PEER, path);
    }

    fn refuse_write(&mut self, frame: Frame) {
        let place = self.hear(ONE, &frame);
        let PayloadDestination::Region { op, .. } = place else { panic!("{place:?}") };
        self.channel_mut(PEER).refuse(op, 13);
        self.handle_payload(PEER, ONE);
    }

    /// The completions since the last call.
    fn done(&mut self) -> Vec<OperationCompletion> {
        let actions = std::iter::from_fn(|| self.poll_action());
        actions
            .filter_map(|action| match action {
                Action::Complete(done) => Some(done),
                _ => None,
            })
            .collect()
    }

    /// The outcomes of the operations that completed since the last call.
    fn errors(&mut self) -> Vec<Option<Failure>> {
        self.done().iter().map(|done| done.error).collect()
    }
}
