//! The smallest cases of the faults that the simulator has found in the endpoint, and the table of
//! a receive's states.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, CompletionKind, CompletionLevel, Failure, Fault, OperationCompletion,
    PathProperties, PayloadDestination, Peek, Posting, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::limit::{FRAME_BODY_BYTES_MAX, KIND_HEADER_BYTES_MAX};
use landbridge_proto::wire::frame::{Header, Kind, flag};
use landbridge_proto::wire::kind_header::{KindHeader, Long};
use landbridge_testbed::endpoint::{
    Frame, PEER, PairEnd, REFUSED, REMOTE, SizedMemory, TICKET, message, posting,
};

const WINDOW: u32 = 1_000;
const PIECES: PathProperties = PathProperties {
    payload_max: 10,
    eager_max: 10,
    first_piece: 10,
    pull: false,
    window: 100,
    ahead: false,
    lossless: true,
    unbounded: false,
    checked: false,
    copy_max: 0,
    spare: false,
    silent_loss: false,
    datagram: None,
    reorders: false,
};

#[test]
fn a_frame_sent_while_a_payload_arrives_does_not_spend_the_acknowledgement() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.begin_frame(PATH, &a.next(PATH).unwrap());
    // Another frame leaves between header and payload.
    b.send(message(1, CompletionLevel::TransmitComplete)).unwrap();
    a.deliver(PATH, &b.next(PATH).unwrap());
    b.end_frame(PATH);
    let ack = b.next(PATH).expect("an acknowledgement");
    a.deliver(PATH, &ack);
    assert_eq!(a.done().iter().filter(|done| done.kind == CompletionKind::TaggedSend).count(), 1);
}

#[test]
fn a_frame_without_bytes_that_comes_late_by_another_path_is_no_gap() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.deliver(PATH, &a.next(PATH).unwrap());
    let late = b.next(PATH).expect("an acknowledgement");
    assert_eq!((late.kind(), late.header.length), (Kind::Ack, 0));
    // The path changes: what is sent after the acknowledgement overtakes it, and is still arriving
    // when the acknowledgement arrives.
    b.send(message(7, CompletionLevel::TransmitComplete)).unwrap();
    a.begin_frame(PATH, &b.next(PATH).unwrap());
    a.deliver(PathId(1), &late);
    a.end_frame(PATH);
    a.messages_mut().recv(posting(7));
    let done = a.done();
    assert_eq!(done.len(), 2, "{done:?}");
    assert!(done.iter().all(|done| done.error.is_none()));
    assert_eq!(done.last().unwrap().length, 7);
}

#[test]
fn where_waiting_is_dear_a_long_message_goes_on_without_a_grant() {
    for (size, is_posted) in [(200, true), (200, false), (5_000, true), (5_000, false)] {
        let (mut a, mut b) = pair();
        let path = PathProperties {
            payload_max: 100,
            eager_max: 100,
            first_piece: 100,
            ahead: true,
            ..PIECES
        };
        a.channel_mut(PEER).set_path(PATH, path);
        if is_posted {
            b.messages_mut().recv(posting(size));
        }
        a.send(message(size, CompletionLevel::DeliveryComplete)).unwrap();
        // Nothing comes back meanwhile.
        let mut unasked = 0;
        while let Some(frame) = a.next(PATH) {
            unasked += frame.size;
            b.deliver(PATH, &frame);
        }
        // Half of the credit that is left behind the first piece.
        let ahead = (WINDOW as u64 - 100) / 2;
        assert_eq!(unasked, size.min(100 + ahead));
        if !is_posted {
            b.messages_mut().recv(posting(size));
        }
        while let Some(frame) = b.next(PATH) {
            a.deliver(PATH, &frame);
            while let Some(frame) = a.next(PATH) {
                b.deliver(PATH, &frame);
            }
        }
        let (sent, received) = (a.done(), b.done());
        assert_eq!((sent.len(), received.len()), (1, 1), "{size} {is_posted}");
        assert_eq!((received[0].length, received[0].error), (size, None));
        assert!(a.is_idle() && b.is_idle());
    }
}

#[test]
fn a_peer_that_only_asks_is_given_up() {
    let (_, mut b) = pair();
    let head = KindHeader::Read { op: 0, key: 1, offset: 0, length: 8 };
    let size = KindHeader::size(Kind::Read, 0) as u64;
    let asked = (0..=(1 << 18)).find(|&count| {
        let heard = hear(&mut b, count * size, Kind::Read, head, 0);
        if heard.is_ok() {
            b.handle_payload(PEER, PATH);
            b.channel_mut(PEER).serve(0, SizedMemory(8));
            while b.poll_action().is_some() {}
        }
        heard.is_err()
    });
    assert_eq!(asked, Some(1 << 18));
}

#[test]
fn the_answer_to_an_atomic_is_one_frame_whatever_the_path_likes() {
    let (mut a, mut b) = pair();
    let request = AtomicRequest {
        op: 0,
        operation: 2,
        datatype: 1,
        fetch: true,
        compare: false,
        length: 64,
        key: 1,
        offset: 0,
    };
    a.atomic(PEER, request, SizedMemory(64), Some(SizedMemory(64)), TICKET).unwrap();
    b.deliver(PATH, &a.next(PATH).unwrap());
    let Some(Action::Atomic { request, .. }) = b.next_action() else { panic!("no request") };
    b.channel_mut(PEER).answer(request.op, SizedMemory(64));
    let Frame { header, .. } = b.next(PATH).unwrap();
    assert_eq!((header.kind, header.length), (Kind::AtomicReply, 8 + 64));
}

#[test]
fn a_refused_write_is_announced_to_nobody() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(5), Some(7), TICKET).unwrap();
    b.refuse_write(PATH, &a.next(PATH).unwrap());
    assert_eq!(b.done(), []);
}

#[test]
fn no_refusal_acknowledges_the_bytes_of_another() {
    let (mut a, mut b) = pair();
    for _ in 0..2 {
        a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
        b.refuse_write(PATH, &a.next(PATH).unwrap());
    }
    while let Some(frame) = b.next(PATH) {
        a.deliver(PATH, &frame);
    }
    assert_eq!(a.errors(), [Some(Failure::Errno(REFUSED)); 2]);
}

#[test]
fn one_refusal_that_waits_is_for_all_pieces_of_a_write() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(200), None, TICKET).unwrap();
    let pieces = a.next_all(PATH);
    assert!(pieces.len() > 5, "{} pieces", pieces.len());
    pieces.iter().for_each(|piece| b.refuse_write(PATH, piece));
    assert_eq!(b.channel(PEER).usage().queue, 1);
    a.deliver(PATH, &b.next(PATH).unwrap());
    assert_eq!(a.done()[0].error, Some(Failure::Errno(REFUSED)));
    let rest = b.next(PATH).map(|frame| (frame.kind(), frame.header.delivered));
    assert!(rest.is_none_or(|(kind, _)| kind != Kind::Refused), "{rest:?}");
}

#[test]
fn a_refused_write_keeps_its_memory_until_the_path_has_let_go_of_it() {
    let (mut a, mut b) = pair();
    a.write(REMOTE, SizedMemory(25), None, TICKET).unwrap();
    b.refuse_write(PATH, &a.next(PATH).unwrap());
    // The second piece is half sent when the refusal of the first arrives.
    assert!(a.poll_transmit(PEER, PATH).is_some());
    a.transmitted(PEER, PATH, false, None);
    a.deliver(PATH, &b.next(PATH).unwrap());
    assert_eq!(a.done(), []);
    a.handle_flushed(PEER, PATH);
    assert_eq!(a.done()[0].error, Some(Failure::Errno(REFUSED)));
    assert!(a.next(PATH).is_none(), "pieces of a refused write");
}

#[test]
fn what_waits_for_one_peer_fails_with_it_multi_receives_too() {
    let (mut a, _) = pair();
    let posting = Posting { multi: true, tag: None, source: Some(PEER), ..posting(100) };
    a.messages_mut().recv(posting);
    a.fail(PEER, 103);
    let posting = Posting { multi: true, tag: None, source: Some(PEER), ..self::posting(100) };
    a.messages_mut().recv(posting);
    let done = a.done();
    let failed =
        |done: &OperationCompletion| done.released && done.error == Some(Failure::Errno(103));
    assert!(done.len() == 2 && done.iter().all(failed), "{done:?}");
    assert!(a.is_idle());
}

#[test]
fn a_claim_of_a_message_whose_sender_died_half_way_fails() {
    let (mut a, mut b) = pair();
    for context in [1, 2] {
        a.send(message(5, CompletionLevel::TransmitComplete)).unwrap();
        b.begin_frame(PATH, &a.next(PATH).unwrap());
        if context == 1 {
            b.end_frame(PATH);
        }
        b.messages_mut().peek(Peek {
            source: None,
            tag: 1,
            ignore: 0,
            context,
            claim: true,
            discard: false,
        });
    }
    assert_eq!(b.done().len(), 2);
    b.fail(PEER, 103);
    for context in [1, 2] {
        let ticket = Ticket { context, notify: true };
        assert!(b.messages_mut().claim(Posting { ticket, ..posting(10) }));
    }
    assert_eq!(b.errors(), [None, Some(Failure::Errno(103))]);
    assert!(b.is_idle());
}

#[test]
fn a_lost_peer_gets_nothing() {
    let (mut a, _) = pair();
    a.fail(PEER, 103);
    a.channel_mut(PEER).serve(1, SizedMemory(5));
    a.channel_mut(PEER).refuse(1, 13);
    a.channel_mut(PEER).goodbye();
    assert!(a.next(PATH).is_none() && a.is_drained());
}

#[test]
fn a_message_that_waits_to_be_asked_for_has_not_been_sent() {
    let (mut a, mut b) = pair();
    a.send(message(50, CompletionLevel::TransmitComplete)).unwrap();
    b.deliver(PATH, &a.next(PATH).unwrap());
    a.channel_mut(PEER).goodbye();
    b.deliver(PATH, &a.next(PATH).unwrap());
    assert!(b.channel(PEER).has_left() && !a.is_flushed(), "40 bytes wait for a receive");
    b.messages_mut().recv(posting(50));
    while !a.is_flushed() {
        while let Some(frame) = b.next(PATH) {
            a.deliver(PATH, &frame);
        }
        b.deliver(PATH, &a.next(PATH).expect("the rest goes out behind the goodbye"));
    }
    assert_eq!(b.done().iter().map(|done| (done.length, done.error)).next(), Some((50, None)));
}

#[test]
fn nobody_waits_for_a_peer_that_has_left_to_ask_for_a_message() {
    let (mut a, mut b) = pair();
    a.send(message(50, CompletionLevel::TransmitComplete)).unwrap();
    a.next(PATH).unwrap();
    b.channel_mut(PEER).goodbye();
    a.deliver(PATH, &b.next(PATH).unwrap());
    assert!(a.next(PATH).is_some() && a.is_flushed());
}

#[test]
fn a_message_to_a_peer_that_has_left_counts_as_sent() {
    let (mut a, mut b) = pair();
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    a.next(PATH).unwrap();
    b.channel_mut(PEER).goodbye();
    a.deliver(PATH, &b.next(PATH).unwrap());
    a.write(REMOTE, SizedMemory(5), None, TICKET).unwrap();
    a.fail(PEER, 104);
    a.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    let outcomes: Vec<_> = a.done().iter().map(|done| (done.kind, done.error)).collect();
    let lost = Some(Failure::Errno(104));
    let expected = [
        (CompletionKind::TaggedSend, None),
        (CompletionKind::Write, lost),
        (CompletionKind::TaggedSend, None),
    ];
    assert_eq!(outcomes, expected);
}

#[test]
fn goodbye_is_said_once_and_who_says_it_twice_breaks_the_protocol() {
    let (mut a, mut b) = pair();
    a.channel_mut(PEER).goodbye();
    a.channel_mut(PEER).goodbye();
    b.deliver(PATH, &a.next(PATH).unwrap());
    assert!(a.next(PATH).is_none() && b.channel(PEER).has_left());
    assert!(hear(&mut b, 8, Kind::Goodbye, KindHeader::Goodbye, 0).is_err());
}

#[test]
fn what_begins_or_ends_at_a_relay_is_no_frame_of_a_peer() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_between_endpoints()) {
        let (_, mut b) = pair();
        assert!(hear(&mut b, 0, kind, KindHeader::Empty, 0).is_err(), "{kind:?}");
        assert!(hear(&mut b, 0, Kind::Ack, KindHeader::Empty, 0).is_ok());
    }
}

#[test]
fn who_breaks_the_protocol_has_not_left_in_good_order() {
    let (mut a, mut b) = pair();
    b.messages_mut().recv(Posting { source: Some(PEER), ..posting(5) });
    a.channel_mut(PEER).goodbye();
    b.deliver(PATH, &a.next(PATH).unwrap());
    assert_eq!(b.awaited_departed_peers().collect::<Vec<_>>(), [PEER]);
    assert!(hear(&mut b, 8, Kind::Goodbye, KindHeader::Goodbye, 0).is_err());
    b.channel_mut(PEER).revoke_goodbye();
    b.fail(PEER, 104);
    b.send(message(5, CompletionLevel::DeliveryComplete)).unwrap();
    b.messages_mut().recv(Posting { source: Some(PEER), ..posting(5) });
    let lost = Some(Failure::Errno(104));
    assert_eq!(b.errors(), [lost, lost, lost]);
    assert_eq!(b.awaited_departed_peers().count(), 0);
}

#[test]
fn eager_bytes_beyond_the_window_are_a_fault() {
    let (_, mut b) = pair();
    let head = KindHeader::Message { tag: 1, data: 0, long: None };
    assert!(hear(&mut b, 0, Kind::Tagged, head, WINDOW).is_ok());
    b.handle_payload(PEER, PATH);
    assert!(hear(&mut b, WINDOW as u64 + 16, Kind::Tagged, head, 1).is_err());
}

#[test]
fn traits_no_frame_can_have_are_cut() {
    let (mut a, _) = pair();
    let huge = PathProperties { payload_max: u32::MAX, eager_max: u32::MAX, window: 0, ..PIECES };
    a.channel_mut(PEER).set_path(PATH, huge);
    a.send(message(2 << 20, CompletionLevel::TransmitComplete)).unwrap();
    let Frame { header, .. } = a.next(PATH).unwrap();
    assert!(header.flags & flag::LONG != 0);
    let bound = FRAME_BODY_BYTES_MAX as u32;
    assert!(a.channel(PEER).path().payload_max < bound && a.channel(PEER).path().window > 0);
}

/// The states of a receive that a peer's frames may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No receive has the number.
    Unknown,
    /// The receive waits for a message.
    Posted,
    /// The first piece is arriving.
    First,
    /// The rest was granted, up to 100 bytes beyond the 10 that have arrived.
    Granted,
    /// The rest is being pulled.
    Pulling,
    /// The receive has matched a message of another peer.
    Foreign,
}

/// The effect of a Data frame on a receive in each state: every pair of state and piece.
#[test]
fn data_is_taken_only_where_it_was_granted() {
    use State::*;
    // The offset and the bytes of the piece.
    let pieces = [(10, 1), (10, 100), (10, 101), (10, 0), (0, 10), (11, 5), (u64::MAX, 2)];
    for state in [Unknown, Posted, First, Granted, Pulling, Foreign] {
        for (offset, bytes) in pieces {
            let is_granted = state == Granted && offset == 10 && (1..=100).contains(&bytes);
            let (mut b, sequence) = in_state(state);
            let outcome =
                hear(&mut b, sequence, Kind::Data, KindHeader::Data { recv: 0, offset }, bytes);
            if state == First {
                // By another path, the piece may arrive before the first piece has ended; then it
                // is buffered.
                assert!(
                    matches!(outcome, Ok(PayloadDestination::OutOfOrder { .. })),
                    "{outcome:?}"
                );
                continue;
            }
            assert_eq!(outcome.is_ok(), is_granted, "{state:?} {offset}+{bytes}: {outcome:?}");
            if let Ok(place) = outcome {
                let (_, at, take) = b.place_memory(place).unwrap();
                assert_eq!((at, take), (offset, bytes as u64));
            }
        }
    }
}

/// An endpoint whose receive number 0, of 500 bytes, is in `state`, and the sequence number that
/// its peer has reached.
fn in_state(state: State) -> (PairEnd, u64) {
    let (_, mut b) = pair();
    let pull = state == State::Pulling;
    b.channel_mut(PEER).set_path(PATH, PathProperties { pull, ..PIECES });
    if state != State::Unknown {
        b.messages_mut().recv(posting(500));
    }
    if matches!(state, State::Unknown | State::Posted) {
        return (b, 0);
    }
    let from = if state == State::Foreign { b.peer(Address::new(9, 0)) } else { PEER };
    let memory = if pull { 4096 } else { 0 };
    let long = Some(Long { total: 500, send: 0, memory, ahead: 0 });
    let head = KindHeader::Message { tag: 1, data: 0, long };
    let first = frame(0, Kind::Tagged, flag::LONG, head, 10);
    let place = b.place(from, PATH, &first).unwrap();
    b.begin((from, PATH), &first, place, None).unwrap();
    if state != State::First {
        b.end((from, PATH)).unwrap();
    }
    let is_pulled = matches!(b.next_action(), Some(Action::Pull { .. }));
    assert_eq!(is_pulled, pull);
    (b, if from == PEER { first.header.length as u64 } else { 0 })
}

/// The only path.
const PATH: PathId = PathId(0);

fn pair() -> (PairEnd, PairEnd) {
    landbridge_testbed::endpoint::pair((WINDOW, 100), &[(PATH, PIECES)])
}

fn frame(sequence: u64, kind: Kind, flags: u8, head: KindHeader, payload: u32) -> Frame {
    let mut bytes = [0; KIND_HEADER_BYTES_MAX];
    let size = head.emit(&mut bytes);
    let header = Header {
        length: size as u32 + payload,
        kind,
        flags,
        hops: 0,
        source: Address::new(0, 0),
        target: Address::new(1, 0),
        sequence,
        delivered: 0,
        credit: 0,
    };
    Frame { header, head: bytes[..size].to_vec(), payload: Vec::new(), size: payload as u64 }
}

/// Passes header and head of a frame to an endpoint; its payload is still to come.
fn hear(
    end: &mut PairEnd,
    sequence: u64,
    kind: Kind,
    head: KindHeader,
    payload: u32,
) -> Result<PayloadDestination, Fault> {
    let Frame { header, head, .. } = frame(sequence, kind, 0, head, payload);
    end.handle_frame(PEER, PATH, &header, &head)
}
