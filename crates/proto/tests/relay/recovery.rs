//! Endpoints that are killed and restarted.

use landbridge_proto::limit::KIND_HEADER_BYTES_MAX;
use landbridge_proto::route::byte_queue::CHUNK_BYTES;
use landbridge_proto::wire::kind_header::KindHeader;

use super::*;

/// A relay whose endpoints 0 and 1 are attached.
pub(super) fn recovering() -> (Relay, [LinkId; 2]) {
    recovering_within(LOGS_IN_MEMORY)
}

/// A relay with these bounds of its message logs, whose endpoints 0 and 1 are attached.
pub(super) fn recovering_within(room: LogLimits) -> (Relay, [LinkId; 2]) {
    let mut relay = home();
    relay.enable_recovery_within(room);
    let links = [0, 1].map(|index| relay.attach(rank(index), 0).unwrap());
    links.iter().for_each(|link| assert_eq!(written(&mut relay, *link), [opening(0)]));
    (relay, links)
}

/// The first frame of each replay, which carries the number of frames that the endpoint has sent.
pub(super) fn opening(sent: u32) -> (Kind, u64, u32) {
    (Kind::ReplayStart, 0, sent)
}

#[test]
fn a_new_start_is_given_the_same_and_what_it_sends_again_goes_nowhere() {
    let (mut relay, [zero, one]) = recovering();
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    feed(&mut relay, one, determinant(rank(1), 7, 1, 0));
    feed(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, one).len(), 1);
    assert_eq!(written(&mut relay, zero).len(), 1);
    relay.suspend(one);
    // A frame for the suspended endpoint arrives.
    feed(&mut relay, zero, frame(rank(0), rank(1), 10, 10));
    let one = relay.attach(rank(1), 1).unwrap();
    let given = written(&mut relay, one);
    let kind = Kind::Ack;
    assert_eq!(given, [opening(1), (Kind::Determinant, 7, 1), (kind, 0, 0), (kind, 10, 0)]);
    feed(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, zero), [], "it has that");
    feed(&mut relay, one, frame(rank(1), rank(0), 5, 5));
    assert_eq!(written(&mut relay, zero).len(), 1);
}

#[test]
fn one_that_does_something_else_is_stopped_and_nobody_is_given_it() {
    let (mut relay, [zero, one]) = recovering();
    feed(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    assert_eq!(written(&mut relay, zero).len(), 1);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let stop = feed(&mut relay, one, frame(rank(1), rank(0), 0, 6));
    assert!(matches!(stop, Stop::Broken(_)), "{stop:?}");
    assert_eq!(written(&mut relay, zero), []);
}

/// A message with a tag.
pub(super) fn tagged(target: Address, tag: u64, text: &[u8]) -> Vec<u8> {
    let mut head = [0; KIND_HEADER_BYTES_MAX];
    let size = KindHeader::Message { tag, data: 0, long: None }.emit(&mut head);
    emit(empty(Kind::Tagged, rank(1), target), &[&head[..size], text].concat())
}

/// The divergence that is reported if an incarnation sends `second` in place of `first`, after a
/// frame that it repeats.
fn divergence_of(first: Vec<u8>, second: Vec<u8>) -> Divergence {
    let (mut relay, [zero, one]) = recovering();
    relay.set_reconnect_timeout(1);
    feed(&mut relay, one, frame(rank(1), rank(0), 0, 5));
    feed(&mut relay, one, first);
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 9));
    relay.suspend(one);
    let one = relay.attach(rank(1), 3).unwrap();
    written(&mut relay, one);
    feed(&mut relay, zero, frame(rank(0), rank(1), 9, 9));
    assert_eq!(feed(&mut relay, one, frame(rank(1), rank(0), 0, 5)), Stop::Partial);
    assert!(matches!(feed(&mut relay, one, second), Stop::Broken(_)));
    let report = [(Kind::Divergence, 0, 1)];
    assert_eq!(written(&mut relay, one), report, "it hears which frame, and nothing else");
    let Some(LogEvent::Diverged(divergence)) = relay.recovery_mut().poll_log_event() else {
        panic!("nothing is said")
    };
    let event = relay.recovery_mut().poll_log_event();
    assert!(matches!(event, Some(LogEvent::Unrecoverable(who, _)) if who == rank(1)));
    assert_eq!((divergence.who, divergence.incarnation, divergence.frame), (rank(1), 3, 1));
    divergence
}

#[test]
fn both_versions_of_a_frame_are_named_with_tag_and_place() {
    let divergence =
        divergence_of(tagged(rank(0), 0x77, b"the same"), tagged(rank(0), 0x77, b"the sume"));
    let (is, was) = (*b"ume\0\0\0\0\0", *b"ame\0\0\0\0\0");
    assert_eq!(divergence.difference, Some(FrameDifference::Payload { at: 5, is, was }));
    assert!(std::format!("{divergence}").ends_with(
        "from byte 5 on: [75, 6d, 65, 00, 00, 00, 00, 00], and was [61, 6d, 65, 00, 00, 00, 00, 00]"
    ));
    let versions = [divergence.was, divergence.is];
    assert!(versions.iter().all(|it| (it.tag, it.length) == (Some(0x77), 24)));
    assert_ne!(divergence.was.digest, divergence.is.digest);
    let divergence =
        divergence_of(tagged(rank(0), 0x77, b"short"), tagged(rank(0), 0x78, b"short"));
    assert_eq!(divergence.difference, Some(FrameDifference::Front));
    assert_eq!((divergence.was.tag, divergence.is.tag), (Some(0x77), Some(0x78)));
    let said = divergence.to_string();
    let words =
        ["incarnation 3 of rank 1 ", "frame 1: Tagged to rank 0, 21 bytes, tag 0x78", "tag 0x77"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

#[test]
fn of_a_frame_to_another_cluster_kind_length_and_target_are_named() {
    let (far, here) = (rank(RANKS_PER_CLUSTER), rank(0));
    let divergence = divergence_of(tagged(far, 7, b"abc"), tagged(here, 7, b"abcd"));
    assert_eq!((divergence.was.kind, divergence.was.target), (Some(Kind::Tagged), far));
    assert_eq!(
        (divergence.was.length, divergence.was.tag, divergence.difference),
        (19, None, None)
    );
    assert_eq!(
        (divergence.is.target, divergence.is.length, divergence.is.tag),
        (here, 20, Some(7))
    );
}

#[test]
fn a_history_that_grows_too_long_is_given_up_and_the_job_goes_on() {
    let (mut relay, [zero, one]) = recovering_within(LogLimits { memory: 500, ..LOGS_IN_MEMORY });
    for n in 0..10 {
        feed(&mut relay, zero, frame(rank(0), rank(1), n * 100, 100));
    }
    assert_eq!(written(&mut relay, one).len(), 10);
    relay.suspend(one);
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("cannot be restarted"));
}

#[test]
fn time_that_went_on_without_a_frame_goes_on_again() {
    let (mut relay, [_, one]) = recovering();
    for (polls, frames, micros) in [(3, 0, 4_000_000), (1, 2, 17)] {
        let stop = feed(&mut relay, one, determinant(rank(1), polls, frames, micros));
        assert_eq!(stop, Stop::Partial);
    }
    let stop = feed(&mut relay, one, determinant(rank(1), 9, 0, 0));
    assert!(matches!(stop, Stop::Broken(_)), "nothing has come to pass: {stop:?}");
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let replayed = write_frames(&mut relay, one).into_iter();
    let replayed: Vec<_> = replayed.map(|it| (it.sequence, it.credit, it.delivered)).collect();
    assert_eq!(replayed, [(0, 2, 0), (3, 0, 4_000_000), (1, 2, 17)]);
}

/// A relay of cluster 0 with endpoint 1, and a stream to the relay of cluster 1.
pub(super) fn with_a_peer() -> (Relay, LinkId, LinkId) {
    let mut relay = home();
    relay.enable_recovery_within(LOGS_IN_MEMORY);
    let one = relay.attach(rank(1), 0).unwrap();
    written(&mut relay, one);
    let peer = relay.peer(ClusterId(1)).unwrap();
    let stream = relay.connect(peer, 7).unwrap().stream;
    (relay, one, stream)
}

#[test]
fn what_was_lost_between_relays_while_an_endpoint_was_away_is_reported_to_its_next_start() {
    let (mut relay, one, stream) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    feed(&mut relay, one, frame(rank(1), far, 0, 10));
    assert_eq!(written(&mut relay, stream).len(), 1);
    relay.suspend(one);
    relay.disconnect(stream);
    let peer = relay.peer(ClusterId(1)).unwrap();
    relay.connect(peer, 7).unwrap();
    assert_eq!(relay.poll_flush(), Some(peer));
    assert_eq!(relay.poll_flush(), None);
    for start in 1..3 {
        let one = relay.attach(rank(1), start).unwrap();
        assert_eq!(
            written(&mut relay, one),
            [opening(1), (Kind::Lost, pair_check(far, rank(1)), 0)]
        );
        relay.suspend(one);
    }
}

#[test]
fn one_that_waits_for_one_that_never_comes_back_is_notified() {
    let (mut relay, one, stream) = with_a_peer();
    let (zero, far) = (relay.attach(rank(0), 0).unwrap(), rank(RANKS_PER_CLUSTER));
    written(&mut relay, zero);
    // The endpoint receives the first frame before it is killed, and the second waits for its
    // restart.
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    assert_eq!(written(&mut relay, one).len(), 1);
    relay.suspend(one);
    feed(&mut relay, stream, frame(far, rank(1), 0, 10));
    relay.handle_time(RESTART_MILLIS_MAX);
    assert_eq!(
        (written(&mut relay, zero), written(&mut relay, stream).len()),
        (vec![], 1),
        "a sign"
    );
    relay.handle_time(RESTART_MILLIS_MAX + 1);
    let unreachable = |by: Address| (Kind::Unreachable, pair_check(rank(1), by), 0);
    assert_eq!(written(&mut relay, zero), [unreachable(rank(0))]);
    assert_eq!(written(&mut relay, stream), [unreachable(far)]);
    assert!(relay.attach(rank(1), 1).unwrap_err().contains("unreachable for too long"));
}

#[test]
fn nobody_hears_of_one_that_was_away_and_has_come_back() {
    let (mut relay, one, stream) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    feed(&mut relay, stream, frame(far, rank(1), 0, 10));
    written(&mut relay, one);
    relay.suspend(one);
    feed(&mut relay, stream, frame(far, rank(1), 10, 10));
    let one = relay.attach(rank(1), 1).unwrap();
    assert_eq!(written(&mut relay, one).len(), 3);
    assert_eq!(written(&mut relay, stream), []);
}

#[test]
fn what_a_killed_one_has_still_said_passes_an_output_that_is_full() {
    let (mut relay, one, _) = with_a_peer();
    let far = rank(RANKS_PER_CLUSTER);
    while feed(&mut relay, one, frame(rank(1), far, 0, 30_000)) != Stop::Full {}
    relay.begin_drain(one);
    assert_eq!(feed(&mut relay, one, frame(rank(1), far, 0, 30_000)), Stop::Partial);
    assert_eq!(feed(&mut relay, one, determinant(rank(1), 5, 1, 0)), Stop::Partial);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    assert_eq!(written(&mut relay, one)[1], (Kind::Determinant, 5, 1));
}

/// Endpoint 1 receives and delivers 400 frames of 30,000 bytes, each with a determinant of its own
/// and three determinants without frames in between. Returns the frames that a replay must send,
/// without the opening.
pub(super) fn much(relay: &mut Relay, [zero, one]: [LinkId; 2]) -> Vec<(Kind, u64, u32)> {
    let mut expected = Vec::new();
    for n in 0..400_u64 {
        let sequence = n * 30_000;
        feed(relay, zero, frame(rank(0), rank(1), sequence, 30_000));
        for polls in 1..=3 {
            feed(relay, one, determinant(rank(1), polls, 0, 1_000));
            expected.push((Kind::Determinant, polls, 0));
        }
        feed(relay, one, determinant(rank(1), n + 4, 1, 0));
        expected.extend([(Kind::Determinant, n + 4, 1), (Kind::Ack, sequence, 0)]);
    }
    while !written(relay, one).is_empty() {}
    expected
}

/// Replays to endpoint 1 piece by piece, calling `between` between the pieces.
pub(super) fn replayed(
    relay: &mut Relay,
    one: LinkId,
    between: impl FnMut(&mut Relay),
) -> Vec<(Kind, u64, u32)> {
    rest(relay, one, REPLAY_BYTES_MAX + 2 * FRAME_BYTES_MAX + CHUNK_BYTES, between)
}

/// Replays to endpoint 1 as `replayed` does; no more than `most` bytes may wait at a time.
pub(super) fn rest(
    relay: &mut Relay,
    one: LinkId,
    most: usize,
    mut between: impl FnMut(&mut Relay),
) -> Vec<(Kind, u64, u32)> {
    let mut replayed = Vec::new();
    loop {
        let waiting = relay.queued_bytes();
        assert!(waiting <= most, "{waiting} bytes wait");
        let piece = written(relay, one);
        between(relay);
        if piece.is_empty() && !relay.recovery().has_replay_work() {
            return replayed;
        }
        replayed.extend(piece);
        relay.replay_next();
    }
}

#[test]
fn what_was_is_replayed_in_pieces_and_others_are_served_in_between() {
    let (mut relay, [zero, one]) = recovering();
    let mut expected = much(&mut relay, [zero, one]);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let (two, three) = (relay.attach(rank(2), 0).unwrap(), relay.attach(rank(3), 0).unwrap());
    assert_eq!((written(&mut relay, two), written(&mut relay, three).len()), (vec![opening(0)], 1));
    let mut rounds = 0;
    let given = replayed(&mut relay, one, |relay| {
        rounds += 1;
        feed(relay, two, frame(rank(2), rank(3), rounds, 10));
        assert_eq!(written(relay, three), [(Kind::Ack, rounds, 0)]);
        if rounds == 2 {
            // A new frame for the endpoint under replay arrives, and follows in its turn.
            feed(relay, zero, frame(rank(0), rank(1), 400 * 30_000, 50));
        }
    });
    assert!(rounds > 30, "{rounds}");
    expected.insert(0, opening(0));
    expected.push((Kind::Ack, 400 * 30_000, 0));
    assert_eq!(given.len(), expected.len());
    assert_eq!(given, expected);
    // After the replay the endpoint receives new frames at once.
    feed(&mut relay, zero, frame(rank(0), rank(1), 400 * 30_000 + 50, 50));
    assert_eq!(written(&mut relay, one).len(), 1);
    assert_eq!(relay.queued_bytes(), 0);
}

#[test]
fn one_that_is_killed_during_its_replay_gets_all_of_it_again() {
    let (mut relay, [zero, one]) = recovering();
    let expected = much(&mut relay, [zero, one]);
    let mut link = one;
    for start in 1..4 {
        relay.suspend(link);
        feed(&mut relay, zero, frame(rank(0), rank(1), 400 * 30_000 + start * 10, 10));
        link = relay.attach(rank(1), start as u32).unwrap();
        let piece = written(&mut relay, link);
        assert_eq!((piece[0], piece[1]), (opening(0), expected[0]));
        assert!(piece.len() < expected.len() / 10);
        assert!(relay.replay_next() && relay.queued_bytes() > 0);
    }
    let rest = replayed(&mut relay, link, |_| ());
    assert_eq!(rest.last(), Some(&(Kind::Ack, 400 * 30_000 + 30, 0)));
    // The endpoint detaches during its replay, and no other endpoint receives the replay in its
    // place.
    relay.suspend(link);
    let one = relay.attach(rank(1), 4).unwrap();
    relay.detach(one);
    let two = relay.attach(rank(2), 0).unwrap();
    assert_eq!(written(&mut relay, two), [opening(0)]);
    assert!(!relay.replay_next());
}

#[test]
fn one_that_falls_behind_replays_out_of_what_is_kept_and_little_waits_for_it_besides() {
    let (mut relay, [zero, one]) = recovering();
    let message = |n: u64| (Kind::Ack, n * 30_000, 0);
    for n in 0..100 {
        feed(&mut relay, zero, frame(rank(0), rank(1), n * 30_000, 30_000));
        assert_eq!(relay.queued_bytes(), 0, "it waits where it is kept");
    }
    let given = replayed(&mut relay, one, |_| ());
    assert_eq!(given, Vec::from_iter((0..100).map(message)));
    // After the backlog the endpoint receives new frames at once.
    feed(&mut relay, zero, frame(rank(0), rank(1), 100 * 30_000, 30_000));
    assert_eq!(written(&mut relay, one), [message(100)]);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    let given = replayed(&mut relay, one, |_| ());
    assert_eq!((given[0], given[1..].len()), (opening(0), 101));
}

#[test]
fn one_that_is_given_up_before_it_has_done_anything_begins_again_with_its_first_image() {
    let (mut relay, [zero, one]) = recovering();
    relay.recovery_mut().set_memory(0);
    relay.suspend(one);
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 50));
    relay.recovery_mut().set_memory(1 << 20);
    let one = relay.attach_at(rank(1), 0, LogPosition::default()).unwrap();
    assert_eq!(written(&mut relay, one)[0], opening(0));
}

#[test]
fn one_that_is_always_behind_is_given_up_when_there_is_no_memory_and_still_hears_everything() {
    let (mut relay, [zero, one]) = recovering();
    let mut given = Vec::new();
    for n in 0..200 {
        if n == 100 {
            relay.recovery_mut().set_memory(0);
        }
        // Two frames arrive at a time; the endpoint takes one piece of the waiting frames now and
        // then.
        let mut both = frame(rank(0), rank(1), 2 * n * 30_000, 30_000);
        both.extend(frame(rank(0), rank(1), (2 * n + 1) * 30_000, 30_000));
        feed(&mut relay, zero, both);
        if n % 10 == 0 {
            given.extend(written(&mut relay, one));
            relay.replay_next();
        }
        let kept = relay.recovery().kept_bytes().0;
        assert!(n < 101 || kept < 100_000, "{kept} bytes are kept of one that cannot be restarted");
    }
    given.extend(rest(&mut relay, one, usize::MAX, |_| ()));
    let message = |n: u64| (Kind::Ack, n * 30_000, 0);
    assert_eq!(given, Vec::from_iter((0..400).map(message)));
}

#[test]
fn one_that_has_sent_something_to_one_that_was_behind_hears_when_it_never_comes_back() {
    for is_replaying in [false, true] {
        let (mut relay, one, stream) = with_a_peer();
        let (zero, far) = (relay.attach(rank(0), 0).unwrap(), rank(RANKS_PER_CLUSTER));
        written(&mut relay, zero);
        for n in 0..20 {
            feed(&mut relay, zero, frame(rank(0), rank(1), n * 30_000, 30_000));
        }
        feed(&mut relay, stream, frame(far, rank(1), 0, 10));
        if is_replaying {
            replayed(&mut relay, one, |_| ());
        }
        relay.suspend(one);
        relay.handle_time(RESTART_MILLIS_MAX + 1);
        let unreachable = |by: Address| (Kind::Unreachable, pair_check(rank(1), by), 0);
        assert_eq!(written(&mut relay, zero), [unreachable(rank(0))]);
        let heard = written(&mut relay, stream);
        assert!(heard.contains(&unreachable(far)), "{heard:?}");
    }
}

#[test]
fn one_that_replays_hears_all_of_it_though_it_may_not_come_back_again() {
    let (mut relay, [zero, one]) = recovering();
    let expected = much(&mut relay, [zero, one]);
    relay.suspend(one);
    let one = relay.attach(rank(1), 1).unwrap();
    relay.recovery_mut().set_memory(0);
    feed(&mut relay, zero, frame(rank(0), rank(1), 400 * 30_000, 50));
    let given = replayed(&mut relay, one, |_| ());
    assert_eq!(given.len(), expected.len() + 2);
    feed(&mut relay, zero, frame(rank(0), rank(1), 400 * 30_000 + 50, 50));
    assert_eq!(written(&mut relay, one).len(), 1);
    relay.suspend(one);
    assert!(relay.attach(rank(1), 2).unwrap_err().contains("cannot be restarted"));
}

#[test]
fn who_takes_leave_and_then_breaks_the_protocol_has_not_left() {
    let (mut relay, [zero, one]) = recovering();
    feed(&mut relay, one, goodbye(rank(1), rank(0)));
    assert!(!relay.ports().may_reconnect(one));
    // A frame in the name of another endpoint.
    let stop = feed(&mut relay, one, frame(rank(2), rank(0), 8, 10));
    assert!(matches!(stop, Stop::Broken(_)) && relay.ports().may_reconnect(one));
    assert_eq!(written(&mut relay, zero).len(), 1);
}

#[test]
fn the_goodbye_of_an_incarnation_is_not_that_of_the_next_one() {
    let (mut relay, [_, one]) = recovering();
    feed(&mut relay, one, goodbye(rank(1), rank(0)));
    relay.suspend(one);
    assert_eq!(relay.attach(rank(1), 1), Ok(one));
    assert!(relay.ports().may_reconnect(one), "it has sent none yet");
}

#[test]
fn frames_about_a_log_are_refused_by_a_relay_without_one() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_about_log()) {
        let header = Header::parse(&determinant(rank(1), 1, 1, 1)).unwrap();
        let bytes = emit(Header { kind, ..header }, &[]);
        assert!(matches!(feed(&mut relay, one, bytes), Stop::Broken(_)), "{kind:?}");
    }
}

#[test]
fn only_a_relay_says_how_a_replay_goes_and_no_relay_says_so_to_another() {
    let (mut relay, [zero, one]) = recovering();
    let peer = relay.peer(ClusterId(1)).unwrap();
    let stream = relay.connect(peer, 1).unwrap().stream;
    let far = rank(RANKS_PER_CLUSTER);
    let of = |kind: Kind, source: Address, target: Address| {
        emit(Header { sequence: 1, credit: 1, ..empty(kind, source, target) }, &[])
    };
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_forwarded()) {
        let stop = feed(&mut relay, stream, of(kind, far, rank(0)));
        assert!(matches!(stop, Stop::Broken(_)), "from a relay: {kind:?}");
        if !kind.may_come_from_endpoint() {
            let stop = feed(&mut relay, one, of(kind, rank(1), rank(0)));
            assert!(matches!(stop, Stop::Broken(_)), "from an endpoint: {kind:?}");
        }
    }
    let nobody = Address::ANONYMOUS;
    assert_eq!(feed(&mut relay, stream, of(Kind::Keepalive, nobody, nobody)), Stop::Partial);
    let long = emit(empty(Kind::Keepalive, nobody, nobody), &[0]);
    assert!(matches!(feed(&mut relay, stream, long), Stop::Broken(_)));
    assert_eq!(written(&mut relay, zero), []);
}

#[test]
fn one_that_stands_in_the_middle_gets_the_replay_of_what_came_after() {
    let (mut relay, [zero, one]) = recovering();
    let size = frame(rank(0), rank(1), 0, 10).len() as u64;
    let mut places = Vec::new();
    for number in 0..6_u64 {
        let determinants = number.div_ceil(2);
        let taken = 2 * determinants * size;
        places.push(LogPosition { determinants, taken, sent: number / 2, kept: 0 });
        match number % 2 {
            0 => {
                feed(&mut relay, zero, frame(rank(0), rank(1), 20 * number, 10));
                feed(&mut relay, zero, frame(rank(0), rank(1), 20 * number + 10, 10));
                feed(&mut relay, one, determinant(rank(1), 7 + number, 2, 0));
            }
            _ => _ = feed(&mut relay, one, frame(rank(1), rank(0), 5 * number, 5)),
        }
    }
    written(&mut relay, zero);
    let everything = {
        relay.suspend(one);
        let one = relay.attach(rank(1), 1).unwrap();
        written(&mut relay, one)
    };
    assert_eq!(everything.len(), 1 + 3 * 3);
    for (start, place) in places.iter().chain(&places).enumerate() {
        let one = relay.endpoint(rank(1)).unwrap();
        relay.suspend(one);
        let one = relay.attach_at(rank(1), start as u32 + 1, *place).unwrap();
        let given = written(&mut relay, one);
        assert_eq!(given[0], opening(3 - place.sent as u32));
        assert_eq!(given[1..], everything[1 + 3 * place.determinants as usize..], "{place:?}");
        // The endpoint sends the remaining frames again, and no other endpoint receives them.
        for number in (1..6).step_by(2).skip(place.sent as usize) {
            let stop = feed(&mut relay, one, frame(rank(1), rank(0), 5 * number, 5));
            assert_eq!(stop, Stop::Partial);
        }
        assert_eq!(written(&mut relay, zero), []);
    }
}

#[test]
fn nobody_stands_where_it_has_never_been() {
    let (mut relay, [zero, one]) = recovering();
    feed(&mut relay, zero, frame(rank(0), rank(1), 0, 10));
    feed(&mut relay, one, determinant(rank(1), 7, 1, 0));
    let size = frame(rank(0), rank(1), 0, 10).len() as u64;
    let right = LogPosition { determinants: 1, taken: size, sent: 0, kept: 0 };
    relay.suspend(one);
    for wrong in [
        LogPosition { determinants: 2, ..right },
        LogPosition { taken: size + 1, ..right },
        LogPosition { sent: 1, ..right },
        LogPosition { sent: u64::MAX, ..right },
    ] {
        assert!(relay.attach_at(rank(1), 1, wrong).is_err(), "{wrong:?}");
    }
    relay.attach_at(rank(1), 1, right).unwrap();
    let never = LogPosition { determinants: 1, ..LogPosition::default() };
    let mut relay = home();
    relay.enable_recovery_within(LOGS_IN_MEMORY);
    assert!(relay.attach_at(rank(1), 1, never).is_err());
}

#[test]
fn what_came_before_the_oldest_image_is_dropped() {
    let (mut relay, [zero, one]) = recovering();
    let size = frame(rank(0), rank(1), 0, 3000).len() as u64;
    let mut link = one;
    let (mut kept_most, mut images) = (0, Vec::<LogPosition>::new());
    for round in 0..200_u64 {
        for number in 0..20 {
            feed(&mut relay, zero, frame(rank(0), rank(1), 20 * round + number, 3000));
            feed(&mut relay, link, determinant(rank(1), 7, 1, 0));
            feed(&mut relay, link, frame(rank(1), rank(0), 20 * round + number, 5));
        }
        written(&mut relay, link);
        written(&mut relay, zero);
        let done = 20 * (round + 1);
        let kept = images.iter().rev().nth(1).map_or(0, |image| image.determinants);
        let standing = LogPosition { determinants: done, taken: done * size, sent: done, kept };
        relay.suspend(link);
        link = relay.attach_at(rank(1), 0, standing).unwrap();
        assert_eq!(written(&mut relay, link), [opening(0)], "round {round}");
        images.push(standing);
        kept_most = kept_most.max(relay.recovery().kept_bytes().0);
    }
    // The frames of three rounds, and blocks or segments that are kept because of their last bytes.
    assert!(kept_most < 3 * 20 * size + (3 << 20), "{kept_most}");
    let shown = relay.recovery().log_excerpt(rank(1), 0, 3).unwrap();
    let numbers: Vec<_> = shown.determinants.iter().map(|it| (it.number, it.first_frame)).collect();
    assert_eq!(numbers, [(3960, 3960), (3961, 3961), (3962, 3962)]);
    assert_eq!((shown.determinants[0].polls, shown.frames.len()), (3961 * 7, 3));
    relay.suspend(link);
    assert!(relay.attach(rank(1), 1).is_err(), "there is no way from the beginning");
    let oldest = LogPosition { kept: 0, ..images[197] };
    let link = relay.attach_at(rank(1), 1, oldest).unwrap();
    let replayed = written(&mut relay, link);
    assert_eq!((replayed[0], replayed.len()), (opening(40), 1 + 2 * 40));
    assert_eq!(replayed[1..3], [(Kind::Determinant, 7, 1), (Kind::Ack, 20 * 198, 0)]);
}
