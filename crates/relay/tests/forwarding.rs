//! Tests of frames through real relay processes.

mod common;

use std::io::Write;
use std::time::Duration;

use common::{Authority, PATIENCE, Plan, Rank, RelayProcess, frame, introduction, pattern};
use landbridge_proto::id::Address;
use landbridge_proto::limit::RELAY_PAYLOAD_BYTES_MAX;
use landbridge_proto::relay::ENDPOINT_QUEUE_BYTES_MAX;
use landbridge_proto::wire::frame::Kind;

#[test]
fn two_ranks_of_one_cluster_exchange_frames() {
    let relay = RelayProcess::start(&Plan::alone(4));
    let (mut one, mut two) = (Rank::attach(&relay, 1), Rank::attach(&relay, 2));
    ping_pong(&mut one, &mut two, 1);
}

#[test]
fn two_ranks_of_two_clusters_exchange_frames() {
    let (zero, one) = RelayProcess::pair();
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    ping_pong(&mut here, &mut there, 2);
}

#[test]
fn a_frame_waits_for_its_target_to_attach() {
    let (zero, one) = RelayProcess::pair();
    let mut here = Rank::attach(&zero, 0);
    here.send(4, 0, b"early");
    let mut there = Rank::attach(&one, 4);
    assert_eq!(there.receive().1, b"early");
}

#[test]
fn frames_wait_for_the_other_relay_to_start() {
    let authority = Authority::new();
    let zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let mut here = Rank::attach(&zero, 0);
    here.send(4, 0, b"early");
    let one = RelayProcess::start(&Plan::new(1, &authority).peer(0, zero.relays.unwrap()));
    let mut there = Rank::attach(&one, 4);
    assert_eq!(there.receive().1, b"early");
    there.send(0, 0, b"late");
    assert_eq!(here.receive().1, b"late");
}

#[test]
fn many_megabytes_cross_two_relays_both_ways_at_once() {
    const FRAMES: u64 = 300;
    let (zero, one) = RelayProcess::pair();
    let ranks = [Rank::attach(&zero, 0), Rank::attach(&one, 4)];
    let threads = ranks.map(|rank| {
        let (mut writer, mut reader) =
            (Rank { address: rank.address, stream: rank.stream.try_clone().unwrap() }, rank);
        let target = 4 - writer.address.index();
        let sender = std::thread::spawn(move || {
            let mut sequence = 0;
            for n in 0..FRAMES {
                let length = (n as usize * 7919) % (RELAY_PAYLOAD_BYTES_MAX + 1);
                writer.send(target, sequence, &pattern(sequence, length));
                sequence += length as u64;
            }
        });
        let receiver = std::thread::spawn(move || {
            let mut sequence = 0;
            for _ in 0..FRAMES {
                let (header, body) = reader.receive();
                assert_eq!(header.sequence, sequence);
                assert!(body == pattern(sequence, body.len()), "bytes have changed");
                sequence += body.len() as u64;
            }
        });
        [sender, receiver]
    });
    threads.into_iter().flatten().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_rank_that_does_not_read_holds_up_nobody_and_fills_no_memory() {
    let (zero, mut one) = RelayProcess::pair();
    let mut sleeper = Rank::attach(&one, 4);
    let mut reader = Rank::attach(&one, 5);
    let mut neighbour = Rank::attach(&one, 6);
    let mut flooder = Rank::attach(&zero, 0);
    let mut other = Rank::attach(&one, 7);
    let memory = one.memory_bytes();

    let mut stream = flooder.stream.try_clone().unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let body = pattern(0, RELAY_PAYLOAD_BYTES_MAX);
    let flood = frame(flooder.address, sleeper.address, 0, &body);
    let (mut whole, mut part) = (0usize, 0usize);
    'flood: loop {
        while part < flood.len() {
            match stream.write(&flood[part..]) {
                Ok(bytes) => part += bytes,
                Err(_) => break 'flood,
            }
        }
        (whole, part) = (whole + 1, 0);
        assert!(
            whole * flood.len() < 2 * ENDPOINT_QUEUE_BYTES_MAX,
            "nothing holds the sender back"
        );
    }
    one.wait_for_counter("pauses", |pauses| pauses > 0);
    let grown = one.memory_bytes().saturating_sub(memory);
    // The bound is the rank's queue, and the overhead of queues and buffers.
    let bound = ENDPOINT_QUEUE_BYTES_MAX + (8 << 20);
    assert!((grown as usize) < bound, "{grown} bytes for one rank that does not read");

    // Other ranks at the relay of the sleeping rank go on.
    for round in 0..100u64 {
        neighbour.send(7, round * 5, b"hello");
        assert_eq!(other.receive().1, b"hello");
    }
    // The sleeping rank wakes, and misses nothing.
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let rest = flood[part..].to_vec();
    let writer = std::thread::spawn(move || stream.write_all(&rest).unwrap());
    for _ in 0..=whole {
        assert!(sleeper.receive().1 == body);
    }
    writer.join().unwrap();
    flooder.send(5, 0, b"also");
    assert_eq!(reader.receive().1, b"also");
}

#[test]
fn who_writes_to_nobody_is_notified() {
    let (zero, one) = RelayProcess::pair();
    let mut here = Rank::attach(&zero, 0);
    let mut there = Rank::attach(&one, 4);
    here.send(99, 0, b"?");
    let (header, body) = here.receive();
    assert_eq!((header.kind, header.source), (Kind::Unreachable, Address::new(99, 0)));
    assert!(body.is_empty());
    let mut one = one;
    there.say_goodbye(0);
    assert_eq!(here.receive().0.kind, Kind::Goodbye);
    drop(there);
    one.wait_for("rank 4 at");
    here.send(4, 0, b"?");
    let (header, _) = here.receive();
    assert_eq!((header.kind, header.source), (Kind::Unreachable, Address::new(4, 0)));
}

#[test]
fn a_newer_incarnation_takes_the_place_of_an_older_one() {
    let mut relay = RelayProcess::start(&Plan::alone(4));
    let mut old = Rank::attach(&relay, 1);
    let mut older = introduction(1);
    older.incarnation = 0;
    let older = Rank::attach_as(&relay, older);
    relay.wait_for("attached already");
    drop(older);
    let mut newer = introduction(1);
    newer.incarnation = 2;
    let mut new = Rank::attach_as(&relay, newer).unwrap();
    relay.wait_for("it has been restarted");
    new.send(1, 0, b"me");
    assert_eq!(new.receive().1, b"me");
    assert_eq!(std::io::Read::read(&mut old.stream, &mut [0; 8]).unwrap(), 0);
}

#[test]
fn signals_and_the_lifeline_end_a_relay_cleanly() {
    for signal in [Some(libc::SIGTERM), Some(libc::SIGINT), None] {
        let mut relay = RelayProcess::start(&Plan::alone(1));
        match signal {
            Some(signal) => relay.signal(signal),
            None => relay.cut_lifeline(),
        }
        assert_eq!(relay.wait(), Some(0));
        relay.wait_for("ended; it has passed on 0 frames");
    }
}

fn ping_pong(one: &mut Rank, two: &mut Rank, hops: u8) {
    let (a, b) = (one.address.index(), two.address.index());
    let mut sequence = 0;
    for length in [0, 1, 100, 5_000, RELAY_PAYLOAD_BYTES_MAX] {
        let body = pattern(sequence, length);
        one.send(b, sequence, &body);
        let (header, got) = two.receive();
        assert_eq!((header.hops, header.sequence, header.source), (hops, sequence, one.address));
        assert!(got == body);
        two.send(a, sequence, &got);
        assert!(one.receive().1 == body);
        sequence += length as u64;
    }
}
