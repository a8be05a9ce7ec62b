//! Paths with silent loss: what is retransmitted, when, and which status requests are sent. The
//! tests set the time by hand.

mod pieces;

use std::num::NonZeroU64;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{Action, AtomicRequest, CompletionLevel, Message, PathProperties};
use landbridge_proto::path::congestion;
use landbridge_proto::path::time::{MICROSECOND, MILLISECOND, SECOND, Time};
use landbridge_proto::wire::frame::{Kind, flag};
use landbridge_proto::wire::kind_header::{AdvertisedAddress, KindHeader};
use landbridge_testbed::endpoint::{Frame, PEER, PairEnd, REMOTE, SizedMemory, TICKET, posting};

const DATAGRAMS: PathProperties = PathProperties {
    payload_max: 1_000,
    eager_max: 1_000,
    first_piece: 1_000,
    pull: false,
    window: 1 << 20,
    ahead: true,
    lossless: false,
    unbounded: false,
    spare: false,
    reorders: false,
    silent_loss: true,
    datagram: Some(congestion::CongestionAlgorithm::Cubic),
    checked: false,
    copy_max: 1_000,
};
const STREAM: PathProperties = PathProperties { silent_loss: false, datagram: None, ..DATAGRAMS };

#[test]
fn what_vanishes_behind_a_relay_is_asked_after_and_goes_again() {
    let (mut a, mut b) = pair(PathProperties::RELAY);
    a.send(message(5)).unwrap();
    a.next(ONE).unwrap();
    while a.next_busy().is_some() {}
    // Nobody reports the loss.
    assert_eq!(a.schedule().next_wake(), Some(at(4_000)));
    a.handle_time(at(3_999));
    assert_eq!(a.next_busy(), None);
    a.handle_time(at(4_000));
    assert_eq!(a.next_busy(), Some(PEER));
    let ask = a.next(ONE).unwrap();
    assert_eq!(
        (ask.kind(), a.next(ONE).is_none()),
        (Kind::StatusRequest, true),
        "no payload on suspicion"
    );
    b.deliver(ONE, &ask);
    a.deliver(ONE, &b.next(ONE).unwrap());
    let again = a.next(ONE).unwrap();
    b.deliver(ONE, &again);
    settle(&mut a, &mut b);
    assert_eq!((a.done().len(), a.is_drained()), (1, true));
    let wake = a.schedule().next_wake().unwrap();
    a.handle_time(wake);
    assert_eq!(a.schedule().next_wake(), None, "there is nothing more to wait for");
}

/// A relay has taken the frame, and nobody retransmits it once its source has ended.
#[test]
fn what_a_relay_may_yet_lose_is_not_safe_before_it_is_acknowledged() {
    let (mut a, mut b) = pair(PathProperties::RELAY);
    a.send(message(5)).unwrap();
    let lost = a.next(ONE).unwrap();
    a.channel_mut(PEER).goodbye();
    let goodbye = a.next(ONE).unwrap();
    assert_eq!((a.is_flushed(), a.is_safe(), a.is_goodbye_acknowledged()), (true, false, false));
    // The relay reports a loss: the message was lost.
    a.channel_mut(PEER).presume_path_lost(ONE);
    b.deliver(ONE, &a.next(ONE).unwrap());
    a.deliver(ONE, &b.next(ONE).unwrap());
    let again = a.next_all(ONE);
    let kinds: Vec<Kind> = again.iter().map(Frame::kind).collect();
    assert_eq!(kinds[..2], [lost.kind(), goodbye.kind()]);
    assert!(a.is_flushed() && !a.is_safe());
    again.iter().for_each(|frame| _ = b.deliver(ONE, frame));
    settle(&mut a, &mut b);
    assert!(a.is_safe() && a.is_goodbye_acknowledged());
}

#[test]
fn last_words_are_waited_for_only_while_somebody_listens() {
    let (mut a, mut b) = pair(PathProperties::RELAY);
    a.channel_mut(PEER).goodbye();
    a.next(ONE).unwrap();
    assert_eq!((a.is_safe(), a.is_goodbye_acknowledged()), (true, false));
    b.channel_mut(PEER).goodbye();
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert!(a.is_goodbye_acknowledged(), "it has left, too");
    // Bytes in a socket outlive their sender.
    let (mut a, _) = pair(STREAM);
    a.send(message(5)).unwrap();
    a.next(ONE).unwrap();
    a.channel_mut(PEER).goodbye();
    a.next(ONE).unwrap();
    assert!(a.is_goodbye_acknowledged() && !a.is_drained());
}

#[test]
fn who_computes_is_asked_less_and_less_often() {
    let (mut a, _) = pair(PathProperties::RELAY);
    a.send(message(5)).unwrap();
    a.next(ONE).unwrap();
    let mut waits = Vec::new();
    let mut before = 0;
    for _ in 0..7 {
        let wake = a.schedule().next_wake().unwrap();
        a.handle_time(wake);
        assert_eq!(a.next(ONE).unwrap().kind(), Kind::StatusRequest);
        assert!(a.next(ONE).is_none());
        waits.push((wake.0 - before) / SECOND);
        before = wake.0;
    }
    assert_eq!(waits, [4, 8, 16, 32, 64, 64, 64]);
}

#[test]
fn a_relay_that_delivers_is_not_asked() {
    let (mut a, mut b) = pair(PathProperties::RELAY);
    for second in 0..20 {
        a.handle_time(at(second * 1_000));
        a.send(message(5)).unwrap();
        for end in 0..2 {
            let (from, to) = if end == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            while let Some(frame) = from.next(ONE) {
                assert_ne!(frame.kind(), Kind::StatusRequest, "after {second} s");
                to.deliver(ONE, &frame);
            }
        }
    }
}

#[test]
fn a_corrupt_range_is_named_again_to_who_asks() {
    let (mut a, mut b) = pair(STREAM);
    a.channel_mut(PEER).open_path(TWO, PathProperties::RELAY);
    b.channel_mut(PEER).open_path(TWO, PathProperties::RELAY);
    a.send(message(5)).unwrap();
    b.deliver(TWO, &a.next(TWO).unwrap());
    a.send(message(5)).unwrap();
    let corrupt = a.next(ONE).or_else(|| a.next(TWO)).unwrap();
    assert!(b.channel_mut(PEER).handle_corrupt_frame(&corrupt.header));
    // The relay loses the Nack.
    assert_eq!(b.next(TWO).unwrap().kind(), Kind::Nack);
    a.handle_time(at(4_000));
    settle(&mut a, &mut b);
    assert!(a.is_drained());
}

#[test]
fn a_frame_that_is_corrupt_again_takes_no_further_place() {
    const RANGES: usize = 64;
    let (mut a, mut b) = pair(STREAM);
    let mut headers = Vec::new();
    for _ in 0..=RANGES {
        a.send(message(5)).unwrap();
        headers.push(a.next(ONE).unwrap().header);
    }
    let mut corrupt = |at: usize| b.channel_mut(PEER).handle_corrupt_frame(&headers[at]);
    assert!((0..RANGES).all(&mut corrupt));
    assert!((0..RANGES).all(&mut corrupt), "the same frames");
    assert!(!corrupt(RANGES), "one more");
}

#[test]
fn a_datagram_goes_again_when_three_later_ones_have_come() {
    let (mut a, mut b) = pair(DATAGRAMS);
    let frames = five(&mut a);
    b.deliver(ONE, &frames[0]);
    for frame in &frames[2..] {
        b.deliver(ONE, frame);
    }
    b.channel_mut(PEER).end_batch(ONE);
    a.set_time(at(1));
    let report = b.next(ONE).unwrap();
    assert_eq!(report.kind(), Kind::Sack);
    a.deliver(ONE, &report);
    let again = a.next(ONE).unwrap();
    assert_eq!(again.header.sequence, frames[1].header.sequence);
    assert!(a.next(ONE).is_none(), "nothing but what is lost");
    b.deliver(ONE, &again);
    settle(&mut a, &mut b);
    assert!(a.is_drained());
}

#[test]
fn one_that_is_overtaken_has_nine_eighths_of_a_round_trip() {
    let (mut a, mut b) = pair(DATAGRAMS);
    let frames = five(&mut a);
    frames.iter().take(3).for_each(|frame| _ = b.deliver(ONE, frame));
    b.deliver(ONE, &frames[4]);
    a.set_time(at(80));
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert!(a.next(ONE).is_none(), "it may only be late");
    assert_eq!(a.schedule().next_wake(), Some(at(90)));
    a.handle_time(at(90));
    assert_eq!(a.next(ONE).unwrap().header.sequence, frames[3].header.sequence);
}

#[test]
fn after_a_silence_a_question_goes_and_no_payload() {
    let (mut a, mut b) = pair(DATAGRAMS);
    let frames = five(&mut a);
    let wake = a.schedule().next_wake().unwrap();
    // No round trip has been measured yet.
    assert_eq!(wake, at(201));
    a.handle_time(wake);
    assert_eq!(a.next_busy(), Some(PEER));
    let ask = a.next(ONE).unwrap();
    assert_eq!((ask.kind(), a.next(ONE).is_none()), (Kind::StatusRequest, true));
    let second = a.schedule().next_wake().unwrap();
    assert_eq!(second.0 - wake.0, 402 * MILLISECOND, "twice as long");
    // All frames are lost, which the answer shows.
    a.set_time(at(300));
    b.deliver(ONE, &ask);
    a.deliver(ONE, &b.next(ONE).unwrap());
    let again = a.next(ONE).unwrap();
    assert_eq!(again.header.sequence, frames[0].header.sequence);
}

#[test]
fn all_that_a_busy_peer_has_taken_in_does_not_go_again() {
    let (mut a, mut b) = pair(DATAGRAMS);
    let frames = five(&mut a);
    let mut asks = Vec::new();
    for _ in 0..4 {
        let wake = a.schedule().next_wake().unwrap();
        a.handle_time(wake);
        asks.push(a.next(ONE).unwrap());
    }
    frames.iter().chain(&asks).for_each(|frame| _ = b.deliver(ONE, frame));
    b.channel_mut(PEER).end_batch(ONE);
    a.set_time(at(10_000));
    while let Some(frame) = b.next(ONE) {
        a.deliver(ONE, &frame);
    }
    assert!(a.next(ONE).is_none() && a.is_drained());
}

#[test]
fn two_full_datagrams_are_acknowledged_at_once_and_less_after_a_moment() {
    let (mut a, mut b) = pair(DATAGRAMS);
    a.send(Message { level: CompletionLevel::TransmitComplete, ..message(5) }).unwrap();
    b.set_time(at(10));
    b.deliver(ONE, &a.next(ONE).unwrap());
    b.channel_mut(PEER).end_batch(ONE);
    assert!(b.next(ONE).is_none());
    assert_eq!(b.schedule().next_wake(), Some(at(11)));
    b.handle_time(at(11));
    assert_eq!((b.next_busy(), b.next(ONE).unwrap().kind()), (Some(PEER), Kind::Ack));
    for _ in 0..2 {
        a.send(Message { level: CompletionLevel::TransmitComplete, ..message(1_000) }).unwrap();
        b.deliver(ONE, &a.next(ONE).unwrap());
    }
    b.channel_mut(PEER).end_batch(ONE);
    assert_eq!(b.next(ONE).unwrap().kind(), Kind::Ack);
}

#[test]
fn without_room_for_copies_a_message_is_done_when_it_has_arrived() {
    let (mut a, mut b) = pair(STREAM);
    let short = || Message { level: CompletionLevel::TransmitComplete, ..message(500) };
    a.send(short()).unwrap();
    let copied = a.next(ONE).unwrap();
    assert_eq!(a.done().len(), 1, "its copy stands in for it");
    a.channel_mut(PEER).set_copying(false);
    a.send(short()).unwrap();
    let frame = a.poll_transmit(PEER, ONE).unwrap();
    assert!(!frame.wants_copy);
    let kept = a.next(ONE).unwrap();
    assert!(a.done().is_empty() && a.channel(PEER).retains());
    assert!(kept.header.flags & flag::WANT_ACK != 0, "nobody else would ask");
    b.deliver(ONE, &copied);
    b.deliver(ONE, &kept);
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert_eq!((a.done().len(), a.channel(PEER).retains()), (1, false));
}

#[test]
fn copies_that_are_wanted_back_are_asked_about_once() {
    let (mut a, mut b) = pair(STREAM);
    a.send(Message { level: CompletionLevel::TransmitComplete, ..message(500) }).unwrap();
    b.deliver(ONE, &a.next(ONE).unwrap());
    assert!(b.next(ONE).is_none() && a.channel(PEER).retains(), "nobody asks");
    a.channel_mut(PEER).solicit_ack();
    b.deliver(ONE, &a.next(ONE).unwrap());
    a.channel_mut(PEER).solicit_ack();
    assert!(a.next(ONE).is_none(), "once");
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert!(!a.channel(PEER).retains());
}

/// A reader need not wait for the acknowledgement of its answer before the region is closed.
#[test]
fn what_is_read_here_is_copied_in_any_case() {
    let (mut a, mut b) = pair(STREAM);
    a.read(REMOTE, SizedMemory(10), TICKET).unwrap();
    b.deliver(ONE, &a.next(ONE).unwrap());
    let Some(Action::Serve { op, length, .. }) = b.next_action() else { panic!("a read") };
    b.channel_mut(PEER).set_copying(false);
    b.channel_mut(PEER).serve(op, SizedMemory(length));
    assert!(b.poll_transmit(PEER, ONE).unwrap().wants_copy);
}

/// The path from the peer to this side works, and the path back does not: it was never opened on
/// this side.
#[test]
fn what_comes_by_a_path_that_only_the_peer_uses_is_acknowledged_at_once() {
    let (mut a, mut b) = pair(PathProperties { spare: true, ..STREAM });
    a.channel_mut(PEER).open_path(TWO, DATAGRAMS);
    a.send(Message { level: CompletionLevel::TransmitComplete, ..message(5) }).unwrap();
    b.deliver(TWO, &a.next(TWO).unwrap());
    while b.next_busy().is_some() {}
    b.channel_mut(PEER).end_batch(TWO);
    assert_eq!(b.next_busy(), Some(PEER), "nothing waits where nobody tells the time");
    a.deliver(ONE, &b.next(ONE).unwrap());
    settle(&mut a, &mut b);
    assert!(a.is_drained());
}

#[test]
fn one_report_after_another_tells_of_every_gap() {
    let (mut a, mut b) = pair(DATAGRAMS);
    a.channel_mut(PEER).set_path(ONE, PathProperties { payload_max: 5, eager_max: 5, ..DATAGRAMS });
    for _ in 0..20 {
        a.send(message(5)).unwrap();
    }
    let frames = a.next_all(ONE);
    let odd: Vec<&Frame> = frames.iter().skip(1).step_by(2).collect();
    assert!(odd.len() >= 5, "{}", frames.len());
    odd.iter().for_each(|frame| _ = b.deliver(ONE, frame));
    b.channel_mut(PEER).end_batch(ONE);
    let mut named = Vec::new();
    while let Some(report) = b.next(ONE) {
        let KindHeader::Sack { ranges, .. } = report.kind_header() else {
            panic!("{:?}", report.header)
        };
        named.extend(ranges.into_iter().map(|(start, _)| start));
    }
    for frame in odd {
        assert!(named.contains(&frame.header.sequence), "{named:?}");
    }
}

#[test]
fn no_more_leaves_than_the_window_has_room_for() {
    let (mut a, mut b) = pair(DATAGRAMS);
    a.send(message(1 << 19)).unwrap();
    let frames = a.next_all(ONE);
    assert!((5..20).contains(&frames.len()), "{}", frames.len());
    // More frames leave when these are acknowledged, and the endpoint names the peer as busy by
    // itself.
    a.set_time(at(5));
    while a.next_busy().is_some() {}
    frames.iter().for_each(|frame| _ = b.deliver(ONE, frame));
    b.channel_mut(PEER).end_batch(ONE);
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert_eq!(a.next_busy(), Some(PEER));
    assert!(a.next(ONE).is_some());
}

#[test]
fn who_is_paced_is_named_again_when_more_may_leave() {
    let (mut a, mut b) = pair(DATAGRAMS);
    b.messages_mut().recv(posting(1 << 19));
    a.send(message(1 << 19)).unwrap();
    let mut now = at(0);
    for _ in 0..10 {
        while let Some(frame) = a.next(ONE) {
            b.deliver(ONE, &frame);
            b.channel_mut(PEER).end_batch(ONE);
        }
        now = now.after(10 * MILLISECOND);
        a.set_time(now);
        while let Some(frame) = b.next(ONE) {
            a.deliver(ONE, &frame);
        }
        while a.next_busy().is_some() {}
    }
    // A burst leaves first, and then one datagram after the other, though the window would allow
    // more.
    a.handle_time(now);
    while a.next_busy().is_some() {}
    let burst = a.next_all(ONE).len();
    let wake = a.schedule().next_wake().unwrap();
    assert!(burst > 2 && wake.0 < now.0 + 10 * MILLISECOND, "{burst} at {now:?}, then {wake:?}");
    a.handle_time(wake);
    assert_eq!(a.next_busy(), Some(PEER));
    let next = a.next(ONE);
    assert!(next.is_some(), "{burst} at {now:?}, then {wake:?}, {:?}", a.schedule().next_wake());
}

#[test]
fn a_report_goes_by_the_path_of_the_ask() {
    let (mut a, mut b) = pair(DATAGRAMS);
    for end in [&mut a, &mut b] {
        end.channel_mut(PEER).open_path(TWO, DATAGRAMS);
    }
    a.send(message(5)).unwrap();
    let path = if a.poll_transmit(PEER, ONE).is_some() { ONE } else { TWO };
    a.next(path).unwrap();
    let wake = a.schedule().next_wake().unwrap();
    a.handle_time(wake);
    let other = if path == ONE { TWO } else { ONE };
    assert!(a.next(other).is_none(), "the question is about the other path");
    b.deliver(path, &a.next(path).unwrap());
    assert!(b.next(other).is_none());
    assert_eq!(b.next(path).unwrap().kind(), Kind::StatusReply);
}

#[test]
fn a_report_goes_by_no_path_that_is_suspected() {
    for path in [DATAGRAMS, STREAM, PathProperties { reorders: true, ..PathProperties::RELAY }] {
        let (mut a, mut b) = pair(path);
        [&mut a, &mut b].into_iter().for_each(|it| it.channel_mut(PEER).open_path(TWO, path));
        a.send(message(5)).unwrap();
        a.next(ONE).or_else(|| a.next(TWO)).unwrap();
        a.channel_mut(PEER).presume_path_lost(ONE);
        let ask = a.next(ONE).unwrap();
        assert_eq!(ask.kind(), Kind::StatusRequest);
        // The other side receives by this path, and knows that it is not heard by it.
        b.channel_mut(PEER).suspect_path(ONE, true);
        b.deliver(ONE, &ask);
        assert!(b.next(ONE).is_none(), "{path:?}");
        assert_eq!(b.next(TWO).map(|answer| answer.kind()), Some(Kind::StatusReply), "{path:?}");
    }
}

#[test]
fn an_address_goes_by_no_datagram_while_there_is_another_path() {
    let (mut a, _) = pair(DATAGRAMS);
    a.channel_mut(PEER).open_path(TWO, PathProperties { spare: true, ..STREAM });
    a.channel_mut(PEER).advertise_address(AdvertisedAddress {
        ip: [1; 16],
        port: 7,
        token: NonZeroU64::new(1),
    });
    assert!(a.next(ONE).is_none());
    assert_eq!(a.next(TWO).unwrap().kind(), Kind::UdpAdvertisement);
    assert!(a.next(TWO).is_none());
    a.close_path(PEER, TWO);
    a.channel_mut(PEER).advertise_address(AdvertisedAddress {
        ip: [1; 16],
        port: 7,
        token: NonZeroU64::new(1),
    });
    assert_eq!(a.next(ONE).unwrap().kind(), Kind::UdpAdvertisement);
}

#[test]
fn time_matters_only_where_something_is_lost_in_silence_or_chosen() {
    let (mut a, _) = pair(STREAM);
    assert!(!a.schedule().needs_time());
    a.channel_mut(PEER).open_path(TWO, STREAM);
    assert!(a.schedule().needs_time());
    a.close_path(PEER, TWO);
    assert!(!a.schedule().needs_time());
    a.send(message(5)).unwrap();
    a.next(ONE).unwrap();
    assert_eq!(a.schedule().next_wake(), None);
    a.channel_mut(PEER).set_path(ONE, DATAGRAMS);
    assert!(a.schedule().needs_time() && a.schedule().next_wake().is_some());
}

#[test]
fn large_datagrams_that_do_not_arrive_are_counted_until_one_does() {
    let large =
        PathProperties { payload_max: 2_000, eager_max: 2_000, copy_max: 2_000, ..DATAGRAMS };
    let (mut a, mut b) = pair(large);
    let lost = |a: &PairEnd| a.channel(PEER).path_statistics(ONE).unwrap().large_lost;
    for size in [2_000, 2_000, 5] {
        a.send(message(size)).unwrap();
        a.next(ONE).unwrap();
    }
    let wake = a.schedule().next_wake().unwrap();
    a.handle_time(wake);
    b.deliver(ONE, &a.next(ONE).unwrap());
    a.set_time(wake.after(100 * MICROSECOND));
    a.deliver(ONE, &b.next(ONE).unwrap());
    assert_eq!(lost(&a), 2);
    while let Some(again) = a.next(ONE) {
        b.deliver(ONE, &again);
    }
    b.channel_mut(PEER).end_batch(ONE);
    settle(&mut a, &mut b);
    assert_eq!((lost(&a), a.is_drained()), (0, true));
}

#[test]
fn a_peer_that_computed_for_long_slows_nothing_afterwards() {
    for kind in [congestion::CongestionAlgorithm::Cubic, congestion::CongestionAlgorithm::Bbr] {
        let (mut a, mut b) = pair(PathProperties { datagram: Some(kind), ..DATAGRAMS });
        a.send(message(1_000)).unwrap();
        let mut frames = vec![a.next(ONE).unwrap()];
        // Status requests become less and less frequent.
        while let Some(wake) = a.schedule().next_wake().filter(|wake| *wake < at(600_000)) {
            a.handle_time(wake);
            frames.extend(a.next_all(ONE));
        }
        let mut now = at(600_000);
        for _ in 0..20 {
            a.send(message(1_000)).unwrap();
        }
        let (mut done, mut millis) = (0, 0);
        while done < 21 {
            frames.drain(..).for_each(|frame| _ = b.deliver(ONE, &frame));
            b.channel_mut(PEER).end_batch(ONE);
            b.handle_time(now);
            a.set_time(now);
            while let Some(back) = b.next(ONE) {
                a.deliver(ONE, &back);
            }
            done += a.done().len();
            a.handle_time(now);
            frames.extend(a.next_all(ONE));
            (now, millis) = (now.after(MILLISECOND), millis + 1);
            assert!(millis < 2_000, "{kind:?}: {done} of 21 messages in {millis} ms");
        }
    }
}

/// The paths to the peer.
const ONE: PathId = PathId(0);
const TWO: PathId = PathId(1);

fn at(millis: u64) -> Time {
    Time(millis * MILLISECOND)
}

fn pair(path: PathProperties) -> (PairEnd, PairEnd) {
    let (mut a, mut b) = landbridge_testbed::endpoint::pair((1 << 20, 100), &[(ONE, path)]);
    [&mut a, &mut b].into_iter().for_each(|end| while end.next_busy().is_some() {});
    (a, b)
}

fn message(bytes: u64) -> Message<SizedMemory> {
    landbridge_testbed::endpoint::message(bytes, CompletionLevel::DeliveryComplete)
}

/// Sends five messages at time 0.
fn five(a: &mut PairEnd) -> Vec<Frame> {
    for _ in 0..5 {
        a.send(message(5)).unwrap();
    }
    let frames = a.next_all(ONE);
    assert_eq!(frames.len(), 5);
    while a.next_busy().is_some() {}
    frames
}

/// Exchanges frames by any path until there are no more.
fn settle(a: &mut PairEnd, b: &mut PairEnd) {
    landbridge_testbed::endpoint::settle(a, b, &[ONE, TWO]);
}
