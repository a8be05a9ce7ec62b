//! Tests of one relay in small cases, and of two relays with their ranks under a random seed.

mod discarded_logs;
mod disk;
mod hostile;
mod nondeterminism;
mod ports;
mod recovery;
mod world;

use std::collections::BTreeSet;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::limit::{HOPS_MAX, RELAY_PAYLOAD_BYTES_MAX};
use landbridge_proto::relay::*;
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind, flag, pair_check};
use landbridge_proto::wire::framing_crc::framing_crc;
use landbridge_proto::wire::hello::LogPosition;
use landbridge_testbed::relay::{
    LOGS_IN_MEMORY, determinant, emit, empty, feed, frame, frames, goodbye, keepalive, rank, read,
    waiting, write_all, write_frames,
};
use world::World;

const RANKS_PER_CLUSTER: u32 = 4;
const BUFFER_BYTES: usize = 256 << 10;

#[test]
fn every_frame_arrives_once_and_in_order() {
    for seed in 1..=6 {
        let mut world = World::new(seed);
        for _ in 0..3_000 {
            world.send_something();
            world.step();
        }
        world.settle();
        let sent: u64 = world.sent.values().sum();
        assert_eq!(sent, world.counts().values().sum::<u64>(), "seed {seed}");
        assert!(sent > 1_000 && world.unreachable.is_empty() && world.reported_losses.is_empty());
    }
}

/// Bound of the queues towards endpoints in tests that fill these queues.
const SMALL_BOUND: usize = 8 << 20;

#[test]
fn memory_stays_bounded_when_nobody_reads_and_all_arrives_when_they_do() {
    for seed in 1..=2 {
        let mut world = World::new(seed);
        world.stall(true);
        for _ in 0..15_000 {
            world.send_something();
            world.step();
        }
        assert!(world.pair.relays.iter().all(|relay| relay.counters().pauses > 0), "seed {seed}");
        world.stall(false);
        world.settle();
        assert_eq!(world.sent, world.counts(), "seed {seed}");
    }
}

#[test]
fn whatever_breaks_nothing_is_lost_silently() {
    let (mut whole, mut notified) = (0, 0);
    for seed in 1..=16 {
        let mut world = World::with_streams(seed, 1 + seed as usize % 4);
        for round in 0..2_000 {
            world.send_something();
            world.step();
            match world.chance.below(60) {
                0 => world.break_stream(),
                1 => world.break_endpoint(),
                2..=6 => world.mend_something(),
                7 => world.pass_time(round * 10),
                _ => (),
            }
        }
        world.mend_all();
        world.settle();
        for (channel, accepted) in &world.accepted {
            let arrived = world.arrived.entry(*channel).or_default();
            let missing = accepted.iter().filter(|(sequence, _)| !arrived.contains(sequence));
            let last = missing.map(|(_, step)| *step).max();
            let heard = world.reported_losses.get(channel).copied();
            assert!(last <= heard, "seed {seed}: {channel:?} has a silent hole");
            whole += last.is_none() as u32;
            notified += last.is_some() as u32;
        }
        assert!(world.unreachable.is_empty(), "seed {seed}: nobody has left");
        assert_eq!(
            world.pair.relays.iter().map(|relay| relay.counters().reports_dropped).max(),
            Some(0)
        );
    }
    assert!(whole > 0 && notified > 0, "both outcomes must occur: {whole} {notified}");
}

#[test]
fn an_idle_link_may_break_without_anybody_noticing() {
    let mut world = World::with_streams(5, 2);
    for round in 1..=5 {
        (0..200).for_each(|_| world.send_something());
        world.settle();
        world.pass_time(round * KEEPALIVE_MILLIS);
        world.settle();
        world.break_stream();
        world.break_stream();
        world.mend_all();
    }
    world.settle();
    assert_eq!(world.sent, world.counts());
    assert!(world.reported_losses.is_empty() && world.unreachable.is_empty());
    assert!(world.pair.relays.iter().all(|relay| relay.counters().lost_bytes == 0));
}

#[test]
fn frames_are_spread_over_all_streams_and_pass_one_that_is_jammed() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    let peer = relay.peer(ClusterId(1)).unwrap();
    let streams = [1, 1, 1].map(|incarnation| relay.connect(peer, incarnation).unwrap().stream);
    let mut bytes = [0usize; 3];
    for number in 0..60 {
        feed(&mut relay, one, frame(rank(1), rank(5), number, 1_000));
        // The second stream takes 500 bytes of one frame, and nothing more.
        let first = relay.ports().writer(peer, 0).unwrap();
        let at = streams.iter().position(|stream| *stream == first).unwrap();
        let (writer, room) = match (at, bytes[1]) {
            (1, 0) => (1, 500),
            (1, _) => (2, usize::MAX),
            _ => (at, usize::MAX),
        };
        let size = relay.frame_lengths(streams[writer]).sum::<usize>().min(room);
        relay.handle_sent(streams[writer], size, &[]);
        bytes[writer] += size;
    }
    assert_eq!((bytes[1], relay.has_output(streams[0])), (500, false));
    assert!(bytes[0] > 10_000 && bytes[2] > 10_000, "{bytes:?}");
    // The rest of the frame that the stream has begun belongs to this stream.
    assert_eq!(relay.frame_lengths(streams[1]).collect::<Vec<_>>(), [HEADER_BYTES + 500]);
    relay.disconnect(streams[1]);
    assert_eq!(output(&mut relay, one), [(Kind::Lost, rank(5))], "the others are there");
}

/// Retires a stream, as when a blocked path works again and is better than its replacement.
#[test]
fn a_stream_that_is_retired_finishes_its_frame_and_nothing_is_lost() {
    let mut relay = home();
    let here = relay.attach(rank(0), 1).unwrap();
    let peer = relay.peer(ClusterId(1)).unwrap();
    let old = relay.connect(peer, 7).unwrap().stream;
    let far = rank(RANKS_PER_CLUSTER);
    feed(&mut relay, here, frame(rank(0), far, 0, 100));
    // Half of a frame has left when the new stream connects.
    let whole: usize = waiting(&relay, old);
    relay.handle_sent(old, whole / 2, &[]);
    let new = relay.connect(peer, 7).unwrap();
    assert!(!new.is_first);
    relay.retire(old);
    feed(&mut relay, here, frame(rank(0), far, 100, 100));
    let rest: usize = waiting(&relay, old);
    assert_eq!(rest, whole - whole / 2, "the rest of its own");
    assert_eq!(
        (relay.ports().streams(peer), relay.ports().writer(peer, 0)),
        (&[new.stream][..], Some(new.stream))
    );
    assert_eq!(write_all(&mut relay, old).len(), rest);
    assert_eq!(write_all(&mut relay, new.stream).len(), whole);
    assert!(!relay.ports().is_acknowledged(old), "nobody has said that it has arrived");
    let mut bytes = keepalive(whole as u64);
    // Frames in flight to this relay still arrive on the retired stream.
    bytes.extend(frame(far, rank(0), 0, 100));
    feed(&mut relay, old, bytes);
    assert_eq!(output(&mut relay, here).len(), 1);
    assert!(relay.ports().is_acknowledged(old));
    relay.disconnect(old);
    assert!(relay.ports().is_up(peer));
    assert_eq!((relay.counters().lost, relay.counters().lost_bytes), (0, 0));
}

#[test]
fn signs_of_life_acknowledge_what_has_been_taken_in() {
    let (mut here, mut there) = (home(), relay(1));
    let (one, five) = (here.attach(rank(1), 0).unwrap(), there.attach(rank(5), 0).unwrap());
    let peers = [here.peer(ClusterId(1)).unwrap(), there.peer(ClusterId(0)).unwrap()];
    let to = here.connect(peers[0], 1).unwrap().stream;
    let from = there.connect(peers[1], 1).unwrap().stream;
    for round in 1..=3 {
        feed(&mut here, one, frame(rank(1), rank(5), round, 10));
        feed(&mut there, from, write_all(&mut here, to));
        assert_eq!(output(&mut there, five), [(Kind::Ack, rank(1))]);
        there.handle_time(round * KEEPALIVE_MILLIS);
        let keepalive = write_all(&mut there, from);
        assert_eq!(keepalive.len(), HEADER_BYTES, "one each second");
        feed(&mut here, to, keepalive);
        there.handle_time(round * KEEPALIVE_MILLIS + KEEPALIVE_MILLIS / 2);
        assert!(!there.has_output(from));
    }
    here.disconnect(to);
    assert_eq!(here.counters().lost_bytes, 0);
    let again = here.connect(peers[0], 1).unwrap();
    assert_eq!((again.is_first, again.lossy_channels), (true, 0));

    // Another incarnation of the peer relay may have lost the frames that it had received.
    here.disconnect(again.stream);
    assert_eq!(here.connect(peers[0], 2).unwrap().lossy_channels, 1);
    assert_eq!(output(&mut here, one), [(Kind::Lost, rank(5))]);
    assert!(here.connect(peers[0], 3).is_err(), "two starts at once");

    // A stream acknowledges many bytes without waiting for the next keepalive.
    let stream = here.ports().streams(peers[0])[0];
    while !there.has_output(from) {
        feed(&mut here, one, frame(rank(1), rank(5), 0, 30_000));
        feed(&mut there, from, write_all(&mut here, stream));
        assert!(output(&mut there, five).len() == 1);
    }
    let header = Header::parse(&write_all(&mut there, from)).unwrap();
    assert!((KEEPALIVE_BYTES..2 * KEEPALIVE_BYTES).contains(&header.delivered), "{header:?}");

    assert!(matches!(feed(&mut here, stream, keepalive(u64::MAX)), Stop::Broken(_)));
}

#[test]
fn a_relay_takes_no_more_streams_than_allowed() {
    let mut relay = home();
    let peer = relay.peer(ClusterId(1)).unwrap();
    for _ in 0..STREAMS_MAX {
        relay.connect(peer, 1).unwrap();
    }
    assert!(relay.connect(peer, 1).is_err());
    relay.disconnect(relay.ports().streams(peer)[7]);
    assert!(!relay.connect(peer, 1).unwrap().is_first);
}

#[test]
fn an_endpoint_that_comes_back_gets_what_has_waited_and_its_sources_hear_what_has_not() {
    let mut relay = home();
    relay.set_endpoint_queue_bytes_max(QUEUE_BYTES_MIN);
    let links = [1, 2, 3].map(|n| relay.attach(rank(n), 7).unwrap());
    feed(&mut relay, links[0], frame(rank(1), rank(2), 0, 10));
    assert_eq!(output(&mut relay, links[1]).len(), 1, "written, and nobody knows whether read");
    relay.suspend(links[1]);
    assert!(relay.ports().may_reconnect(links[1]) && relay.incarnation(rank(2)).is_none());
    feed(&mut relay, links[2], frame(rank(3), rank(2), 0, 10));
    assert_eq!(output(&mut relay, links[0]), [], "there is nothing to be done yet");

    assert!(relay.attach(rank(2), 6).is_err(), "an earlier start of it");
    assert_eq!(relay.attach(rank(2), 7), Ok(links[1]));
    assert_eq!(output(&mut relay, links[1]), [(Kind::Ack, rank(3))]);
    assert_eq!(output(&mut relay, links[0]), [(Kind::Lost, rank(2))]);
    assert_eq!(output(&mut relay, links[2]), []);

    // While the endpoint is disconnected no input waits for capacity: frames beyond the bound are
    // lost.
    relay.suspend(links[1]);
    for number in 0..10 {
        assert_eq!(
            feed(&mut relay, links[0], frame(rank(1), rank(2), number, 30_000)),
            Stop::Partial
        );
    }
    assert!(relay.queued_bytes() < 2 * QUEUE_BYTES_MIN);
    relay.attach(rank(2), 7).unwrap();
    assert!((1..10).contains(&output(&mut relay, links[1]).len()));
    assert_eq!(output(&mut relay, links[0]), [(Kind::Lost, rank(2))]);
}

#[test]
fn an_endpoint_that_stays_away_or_is_started_again_is_given_up() {
    let mut relay = home();
    relay.set_reconnect_timeout(2_000);
    let one = relay.attach(rank(1), 0).unwrap();
    for later in [false, true] {
        let two = relay.attach(rank(2), 1).unwrap();
        feed(&mut relay, one, frame(rank(1), rank(2), 0, 10));
        output(&mut relay, two);
        relay.suspend(two);
        relay.handle_time(2_000);
        assert_eq!(output(&mut relay, one), []);
        match later {
            false => drop(relay.attach(rank(2), 2).unwrap()),
            true => relay.handle_time(4_001),
        }
        assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(2))], "{later}");
        if !later {
            relay.detach(relay.incarnation(rank(2)).unwrap().0);
        }
    }
}

#[test]
fn who_has_taken_leave_does_not_come_back_and_nobody_is_alarmed() {
    let mut relay = home();
    let [one, two] = [1, 2].map(|n| relay.attach(rank(n), 0).unwrap());
    feed(&mut relay, one, frame(rank(1), rank(2), 0, 10));
    output(&mut relay, two);
    feed(&mut relay, two, goodbye(rank(2), rank(1)));
    assert!(!relay.ports().may_reconnect(two) && relay.ports().may_reconnect(one));
    relay.detach(two);
    assert_eq!(output(&mut relay, one), [(Kind::Goodbye, rank(2))]);
}

#[test]
fn notices_wait_for_room_and_survive_breaks() {
    let mut relay = home();
    relay.set_endpoint_queue_bytes_max(QUEUE_BYTES_MIN);
    let [one, two] = [1, 2].map(|n| relay.attach(rank(n), 0).unwrap());
    // So many frames wait for the first endpoint that no further reports fit.
    while waiting(&relay, one) < QUEUE_BYTES_MIN {
        feed(&mut relay, two, frame(rank(2), rank(1), 0, 30_000));
    }
    for number in 10..5_000 {
        feed(&mut relay, one, frame(rank(1), rank(number), 0, 0));
    }
    let mut notified = BTreeSet::new();
    let mut is_broken = false;
    while notified.len() < 4_990 {
        let notices = output(&mut relay, one);
        assert!(!notices.is_empty(), "{} of 4990", notified.len());
        if !is_broken && notices.iter().any(|(kind, _)| *kind == Kind::Unreachable) {
            // All written reports are lost.
            is_broken = true;
            relay.suspend(one);
            relay.attach(rank(1), 0).unwrap();
            continue;
        }
        notified
            .extend(notices.iter().filter(|(kind, _)| *kind == Kind::Unreachable).map(|it| it.1));
    }
    assert_eq!(relay.counters().reports_dropped, 0);
}

#[test]
fn no_input_is_starved_at_a_busy_output() {
    let mut relay = home();
    let inputs: Vec<LinkId> = (1..4).map(|n| relay.attach(rank(n), 0).unwrap()).collect();
    let output = relay.attach(rank(0), 0).unwrap();
    let mut shares = [0usize; 3];
    let mut rests: Vec<Vec<u8>> = vec![Vec::new(); 3];
    let mut paused = [false; 3];
    let mut sequence = 0;
    while sequence < 3_000 {
        // A greedy driver always serves the first input first.
        for n in 0..3 {
            if !paused[n] {
                for _ in 0..8 {
                    rests[n].extend(frame(rank(n as u32 + 1), rank(0), sequence, 30_000));
                    sequence += 1;
                }
                paused[n] = hand_over(&mut relay, inputs[n], &mut rests[n], &mut shares[n]);
            }
        }
        while waiting(&relay, output) > 100_000 {
            relay.handle_sent(output, 50_000, &[]);
        }
        while let Some(input) = relay.poll_resume() {
            let n = inputs.iter().position(|link| *link == input).unwrap();
            paused[n] = hand_over(&mut relay, input, &mut rests[n], &mut shares[n]);
        }
    }
    let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
    assert!(*most < 2 * least, "{shares:?}");

    fn hand_over(relay: &mut Relay, from: LinkId, rest: &mut Vec<u8>, share: &mut usize) -> bool {
        let consumed = read(relay, from, rest);
        *share += consumed.bytes;
        consumed.stop == Stop::Full
    }
}

#[test]
fn who_waits_for_an_endpoint_that_never_comes_is_notified() {
    let mut relay = home();
    let link = relay.attach(rank(1), 0).unwrap();
    feed(&mut relay, link, frame(rank(1), rank(2), 0, 10));
    feed(&mut relay, link, frame(rank(1), rank(2), 10, 10));
    assert_eq!(output(&mut relay, link), []);
    relay.handle_time(ATTACH_MILLIS_MAX + 1);
    assert_eq!(output(&mut relay, link), [(Kind::Unreachable, rank(2))]);
    assert_eq!(relay.queued_bytes(), 0);

    // The endpoint attaches after the time limit.
    let late = relay.attach(rank(2), 0).unwrap();
    feed(&mut relay, link, frame(rank(1), rank(2), 20, 10));
    assert_eq!(output(&mut relay, late), [(Kind::Ack, rank(1))]);
}

/// Rank 1 sends more frames to rank 2 than its queue may hold, and waits.
fn fill(relay: &mut Relay, one: LinkId) {
    relay.set_endpoint_queue_bytes_max(SMALL_BOUND);
    let mut bytes = Vec::new();
    while bytes.len() < 2 * SMALL_BOUND {
        bytes.extend(frame(rank(1), rank(2), 0, 30_000));
    }
    assert_eq!(feed(relay, one, bytes), Stop::Full);
}

#[test]
fn who_waits_for_an_endpoint_that_leaves_is_notified_and_goes_on() {
    let mut relay = home();
    let (one, two) = (relay.attach(rank(1), 0).unwrap(), relay.attach(rank(2), 0).unwrap());
    fill(&mut relay, one);
    assert_eq!(relay.poll_resume(), None);
    relay.detach(two);
    assert_eq!(relay.poll_resume(), Some(one));
    assert_eq!(relay.queued_bytes(), 0);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(2))]);
    assert_eq!(feed(&mut relay, one, frame(rank(1), rank(2), 0, 9)), Stop::Partial);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(2))]);
}

#[test]
fn who_may_go_on_does_so_though_its_output_leaves_first() {
    let mut relay = home();
    let (one, two) = (relay.attach(rank(1), 0).unwrap(), relay.attach(rank(2), 0).unwrap());
    fill(&mut relay, one);
    write_all(&mut relay, two);
    relay.detach(two);
    assert_eq!((relay.poll_resume(), relay.poll_resume()), (Some(one), None));
}

#[test]
fn a_peer_that_stays_away_is_given_up_and_taken_back() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    feed(&mut relay, one, frame(rank(1), rank(5), 0, 10));
    relay.handle_time(PEER_RECONNECT_MILLIS_MAX + 1);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(5))]);
    feed(&mut relay, one, frame(rank(1), rank(5), 10, 10));
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(5))]);
    let peer = relay.peer(ClusterId(1)).unwrap();
    let new_stream = relay.connect(peer, 7).unwrap();
    assert_eq!((new_stream.is_first, new_stream.lossy_channels), (true, 0));
    feed(&mut relay, one, frame(rank(1), rank(5), 20, 10));
    assert_eq!(output(&mut relay, new_stream.stream), [(Kind::Ack, rank(1))]);
}

#[test]
fn links_that_lie_are_closed() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    let peer = relay.peer(ClusterId(1)).unwrap();
    let peer = relay.connect(peer, 1).unwrap().stream;
    let mut oversize = frame(rank(1), rank(2), 0, 0);
    oversize[..4].copy_from_slice(&(RELAY_PAYLOAD_BYTES_MAX as u32 + 49).to_le_bytes());
    let mut unreachable = frame(rank(1), rank(2), 0, 0);
    unreachable[4] = Kind::Unreachable as u8;
    let mut lost = frame(rank(1), rank(2), 0, 0);
    lost[4] = Kind::Lost as u8;
    let mut travelled = frame(rank(1), rank(2), 0, 0);
    travelled[6] = HOPS_MAX;
    for bytes in [&mut unreachable, &mut lost] {
        bytes[16..24].copy_from_slice(&pair_check(rank(1), rank(2)).to_le_bytes());
    }
    for bytes in [&mut oversize, &mut unreachable, &mut lost] {
        bytes[7] = framing_crc(bytes);
    }
    for (link, bytes) in [
        (one, frame(rank(2), rank(1), 0, 1)),
        (one, frame(Address::new(1, 1), rank(2), 0, 1)),
        (one, vec![0xff; HEADER_BYTES]),
        (one, oversize),
        (one, unreachable),
        (one, lost),
        (one, travelled),
        (peer, frame(rank(2), rank(1), 0, 1)),
        (peer, frame(rank(5), rank(6), 0, 1)),
    ] {
        assert!(matches!(feed(&mut relay, link, bytes), Stop::Broken(_)));
    }
    assert_eq!(relay.counters().malformed, 9);
    let mut looping = frame(rank(5), rank(1), 0, 1);
    looping[6] = HOPS_MAX;
    feed(&mut relay, peer, looping);
    assert_eq!(output(&mut relay, peer), [(Kind::Unreachable, rank(1))]);
}

#[test]
fn only_members_of_the_cluster_attach_and_only_once() {
    let mut relay = home();
    let link = relay.attach(rank(1), 3).unwrap();
    assert_eq!(relay.incarnation(rank(1)), Some((link, 3)));
    for address in [rank(1), rank(5), rank(8), Address::ANONYMOUS] {
        assert!(relay.attach(address, 4).is_err(), "{address:?}");
    }
    relay.detach(link);
    assert_eq!(relay.incarnation(rank(1)), None);
    assert!(relay.attach(rank(1), 4).is_ok());
}

// ---- helpers -----------------------------------------------------------------------------

fn relay(own: u16) -> Relay {
    landbridge_testbed::relay::relay(own, RANKS_PER_CLUSTER, 0)
}

fn home() -> Relay {
    relay(0)
}

#[test]
fn what_no_receiver_can_read_ends_the_connection_of_its_sender_and_of_nobody_else() {
    let bad = |kind: Kind, flags: u8, length: usize| {
        let mut bytes = frame(rank(1), rank(2), 0, length);
        (bytes[4], bytes[5]) = (kind as u8, flags);
        bytes[7] = framing_crc(&bytes);
        bytes
    };
    let mut atomic = bad(Kind::Atomic, 0, 40);
    atomic[HEADER_BYTES + 24..HEADER_BYTES + 28].fill(0xff);
    let cases = [
        (bad(Kind::Tagged, 0, 15), "shorter than its head"),
        (bad(Kind::Tagged, flag::LONG, 39), "shorter than its head"),
        (bad(Kind::Goodbye, 0, 7), "shorter than its head"),
        (bad(Kind::Tagged, flag::CHECKED, 20), "a check without a payload"),
        (bad(Kind::Fragment, 0, 30), "a fragment of no frame"),
        (atomic, "an atomic operation is longer"),
    ];
    for (bytes, why) in cases {
        let mut relay = home();
        let links = [1, 2].map(|number| relay.attach(rank(number), 0).unwrap());
        let Stop::Broken(said) = feed(&mut relay, links[0], bytes.clone()) else {
            panic!("{why}: it is passed on");
        };
        assert!(said.0.contains(why), "{}", said.0);
        assert_eq!((output(&mut relay, links[1]), relay.counters().malformed), (vec![], 1));
        // A frame from another relay was checked by that relay.
        let peer = relay.peer(ClusterId(1)).unwrap();
        let stream = relay.connect(peer, 1).unwrap().stream;
        let mut far = bytes;
        far[8..12].copy_from_slice(&rank(5).0.to_le_bytes());
        assert_eq!(feed(&mut relay, stream, far), Stop::Partial);
    }
}

/// The sum of all bytes: enough to distinguish the frames of this test.
fn sum(front: &[u8]) -> u32 {
    front.iter().map(|&byte| u32::from(byte)).sum()
}

#[test]
fn a_frame_without_its_check_is_refused_where_the_job_has_checks() {
    let checked = || {
        let mut bytes = frame(rank(1), rank(2), 0, 24);
        (bytes[4], bytes[5]) = (Kind::Tagged as u8, flag::CHECKED);
        bytes[7] = framing_crc(&bytes);
        let check = sum(&bytes[..HEADER_BYTES + 16]);
        bytes[36..40].copy_from_slice(&check.to_le_bytes());
        bytes
    };
    let taken = |change: fn(&mut Vec<u8>)| {
        let mut relay = home();
        relay.set_check(sum);
        let links = [1, 2].map(|number| relay.attach(rank(number), 0).unwrap());
        let mut bytes = checked();
        change(&mut bytes);
        let stop = feed(&mut relay, links[0], bytes);
        assert_eq!(output(&mut relay, links[1]).len(), usize::from(stop == Stop::Partial));
        stop
    };
    let broken = |why| Stop::Broken(Malformed(why));
    assert_eq!(taken(|_| ()), Stop::Partial);
    // The receiver checks the checksum of the payload.
    assert_eq!(taken(|bytes| bytes[HEADER_BYTES + 20] ^= 1), Stop::Partial);
    let corrupt = broken("a frame's header arrived corrupt");
    assert_eq!(taken(|bytes| bytes[HEADER_BYTES] ^= 1), corrupt, "the tag");
    assert_eq!(taken(|bytes| bytes[16] ^= 1), corrupt, "its number");
    assert_eq!(taken(|bytes| bytes[36] ^= 1), corrupt, "the check");
    let without = taken(|bytes| {
        bytes[5] = 0;
        bytes[7] = framing_crc(bytes);
    });
    let why = "a frame without a check: is `integrity` the same for all processes?";
    assert_eq!(without, broken(why));
}

/// Writes what waits for a link: (kind, source) of each frame.
fn output(relay: &mut Relay, link: LinkId) -> Vec<(Kind, Address)> {
    write_frames(relay, link).iter().map(|header| (header.kind, header.source)).collect()
}

/// Writes what waits for a link: kind, number and credit of each frame; of a ReplayStart the number
/// of sent frames, and of a Divergence that of the frame that differs, instead of the credit.
fn written(relay: &mut Relay, link: LinkId) -> Vec<(Kind, u64, u32)> {
    let summary = |header: Header| match header.kind {
        Kind::ReplayStart | Kind::Divergence => {
            (header.kind, header.sequence, header.delivered as u32)
        }
        _ => (header.kind, header.sequence, header.credit),
    };
    write_frames(relay, link).into_iter().map(summary).collect()
}

/// A linear congruential generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}
