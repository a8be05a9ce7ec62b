//! Frames that are longer than a datagram.

use super::*;

/// A request that takes three datagrams.
const LONG_REQUEST: AtomicRequest = AtomicRequest {
    op: 0,
    operation: 1,
    datatype: 1,
    fetch: false,
    compare: false,
    length: 2_500,
    key: 1,
    offset: 0,
};

#[test]
fn what_fits_into_no_datagram_goes_in_pieces_from_the_start() {
    let (mut a, mut b) = pair(DATAGRAMS);
    a.atomic(PEER, LONG_REQUEST, SizedMemory(2_500), None, TICKET).unwrap();
    let frames = a.next_all(ONE);
    assert_eq!(frames.len(), 3);
    assert!(frames.iter().all(|frame| frame.kind() == Kind::Fragment && frame.size <= 1_000));
    let pieces: u64 = frames.iter().map(|frame| frame.size).sum();
    assert_eq!(pieces, 32 + 2_500);
    for frame in &frames {
        b.begin_frame(ONE, frame);
        b.end_frame(ONE);
    }
    assert_eq!(b.channel(PEER).next_reassembled(), Some(0));
}

#[test]
fn an_answer_in_pieces_leaves_what_was_asked_with_alone() {
    let (mut a, mut b) = pair(PathProperties { copy_max: 0, ..DATAGRAMS });
    let request = AtomicRequest {
        op: 0,
        operation: 1,
        datatype: 1,
        fetch: true,
        compare: false,
        length: 900,
        key: 1,
        offset: 0,
    };
    a.atomic(PEER, request, SizedMemory(900), Some(SizedMemory(900)), TICKET).unwrap();
    b.deliver(ONE, &a.next(ONE).unwrap());
    let Some(Action::Atomic { request, .. }) = b.next_action() else { panic!("no request") };
    // By now no datagram can hold the answer: it is sent in pieces, which acknowledge nothing.
    b.channel_mut(PEER)
        .set_path(ONE, PathProperties { payload_max: 500, eager_max: 500, ..DATAGRAMS });
    b.channel_mut(PEER).answer(request.op, SizedMemory(900));
    let pieces = b.next_all(ONE);
    let kinds: Vec<Kind> = pieces.iter().map(Frame::kind).collect();
    assert_eq!(kinds, [Kind::Fragment; 2]);
    pieces.iter().for_each(|piece| _ = a.deliver(ONE, piece));
    assert_eq!(a.done(), [], "the question may have to go again, out of the caller's memory");
    settle(&mut a, &mut b);
    assert_eq!(a.done().len(), 1);
}

#[test]
fn nothing_too_long_leaves_whatever_else_is_to_be_done() {
    let (mut a, _) = pair(DATAGRAMS);
    for end in [ONE, TWO] {
        a.channel_mut(PEER).open_path(end, DATAGRAMS);
    }
    a.send(message(5)).unwrap();
    let path = if a.poll_transmit(PEER, ONE).is_some() { ONE } else { TWO };
    a.next(path).unwrap();
    let wake = a.schedule().next_wake().unwrap();
    a.handle_time(wake);
    // A status request is due by the one path; overlong frames are sent by the other.
    for _ in 0..3 {
        a.atomic(PEER, LONG_REQUEST, SizedMemory(2_500), None, TICKET).unwrap();
    }
    let other = if path == ONE { TWO } else { ONE };
    while let Some(frame) = a.next(other) {
        assert_eq!((frame.kind(), frame.size <= 1_000), (Kind::Fragment, true));
    }
}

#[test]
fn what_goes_again_is_cut_for_smaller_datagrams() {
    let (mut a, mut b) = pair(DATAGRAMS);
    let first = {
        a.send(message(1_000)).unwrap();
        a.next(ONE).unwrap()
    };
    a.channel_mut(PEER).set_path(ONE, PathProperties { payload_max: 400, ..DATAGRAMS });
    let wake = a.schedule().next_wake().unwrap();
    a.handle_time(wake);
    b.deliver(ONE, &a.next(ONE).unwrap());
    a.set_time(wake.after(MILLISECOND));
    a.deliver(ONE, &b.next(ONE).unwrap());
    let mut pieces = 0;
    while let Some(piece) = a.next(ONE) {
        assert_eq!((piece.kind(), piece.size <= 400), (Kind::Fragment, true));
        pieces += piece.size;
    }
    assert_eq!(pieces, first.size + 16);
}
