//! Tests with networks that drop everything for a while: no error and no end of a connection, only
//! silence.
//!
//! The tests need to create a network namespace and to use `nft` in it. Where this is not allowed,
//! they print so and end.

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{PATIENCE, Plan, Rank, RelayProcess};
use landbridge_proto::wire::frame::Kind;

/// The length of a cut in seconds: longer than a stream may be silent.
/// `LANDBRIDGE_TEST_CUT_SECONDS` makes it longer.
const CUT_SECONDS: u64 = 7;
/// The length of a cut in seconds after which a dial over UDP must get through. A dial begins after
/// four seconds at the earliest, and sends its last datagram 2.1 s later.
const CUT_SECONDS_UDP: u64 = 5;
/// The time in which both relays must detect the cut: four seconds of silence, checked every
/// second.
const NOTICED: Duration = Duration::from_secs(8);
/// The time in which the link must be back: the longest pause between attempts, and attempts that
/// wait for their answer.
const BACK: Duration = Duration::from_secs(12);

#[test]
fn a_cut_is_noticed_soon_and_healed_without_anybody_unreachable() {
    notice_and_heal(CUT_SECONDS, &[("LANDBRIDGE_WAN_STREAMS", "3")]);
}

#[test]
fn a_cut_is_noticed_as_soon_and_healed_over_udp() {
    let variables = [("LANDBRIDGE_WAN_STREAMS", "3"), ("LANDBRIDGE_WAN_UDP", "on")];
    assert!(notice_and_heal(CUT_SECONDS_UDP, &variables).contains("/udp"));
}

#[test]
fn that_udp_was_cut_off_with_all_the_rest_does_not_count() {
    // The cut is detected after some five seconds; UDP is tried for four seconds, TCP after that.
    let line =
        notice_and_heal(11, &[("LANDBRIDGE_WAN_STREAMS", "3"), ("LANDBRIDGE_WAN_UDP", "on")]);
    assert!(line.contains("/udp"), "{line}");
}

/// Cuts the network and heals it. Returns the log line that reports that the link is back.
fn notice_and_heal(cut_seconds: u64, variables: &[(&str, &str)]) -> String {
    if let Err(why) = own_network() {
        println!("skipped: {why}");
        return "/udp".into();
    }
    let (mut zero, mut one) = RelayProcess::pair_with(variables);
    zero.wait_for_counter("streams", |streams| streams == 3);
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let mut sent = send(&mut here, 0, Duration::from_millis(200));

    cut(zero.relays.unwrap().port());
    let start = Instant::now();
    let seconds = std::env::var("LANDBRIDGE_TEST_CUT_SECONDS").ok();
    let seconds = seconds.map_or(cut_seconds, |text| text.parse().unwrap());
    sent = send(&mut here, sent, Duration::from_secs(1));
    for relay in [&mut zero, &mut one] {
        relay.wait_for("the link to the relay");
        println!("noticed after {:?}", start.elapsed());
    }
    assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
    while start.elapsed() < Duration::from_secs(seconds) {
        sent = send(&mut here, sent, Duration::from_millis(100));
    }
    heal();
    let healed = Instant::now();
    let back = one.wait_for("linked to the relay of cluster 0");
    println!("back {:?} after the cut, which lasted {:?}", healed.elapsed(), healed - start);
    assert!(healed.elapsed() < BACK, "{:?}", healed.elapsed());
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == 3);
        assert_eq!((relay.counter("unreachable"), relay.counter("breaks")), (0, 3));
    }

    here.send(5, sent, b"end");
    let mut arrived = BTreeSet::new();
    while !arrived.contains(&sent) {
        arrived.insert(there.receive_frame().0.sequence);
    }
    let missing = sent as usize + 1 - arrived.len();
    println!("{missing} of {sent} frames are missing");
    assert!(missing > 0, "what was under way is lost");
    assert!(zero.counter("lost") > 0, "and its source is notified");
    back
}

#[test]
fn a_rank_that_is_cut_off_is_noticed_and_taken_back() {
    if let Err(why) = own_network() {
        println!("skipped: {why}");
        return;
    }
    let mut relay = RelayProcess::start(&Plan::alone(4));
    let (mut one, mut two) = (Rank::attach(&relay, 1), Rank::attach(&relay, 2));
    one.send(2, 0, b"before");
    assert_eq!(two.receive().1, b"before");
    cut(two.stream.local_addr().unwrap().port());
    one.send(2, 1, b"lost");
    let line = relay.wait_for("rank 2 at");
    assert!(line.contains("is away: nothing has arrived from it for"), "{line}");
    one.send(2, 2, b"waits");
    relay.wait_for_counter("frames", |frames| frames == 3);
    let mut two = Rank::attach(&relay, 2);
    assert_eq!(two.receive().1, b"waits");
    let (header, _) = one.receive();
    assert_eq!((header.kind, header.source), (Kind::Lost, two.address));
}

/// Drops everything from and to a port.
fn cut(port: u16) {
    let port = port.to_string();
    nft(&["add", "table", "inet", "cut"]);
    nft(&["add", "chain", "inet", "cut", "wire", "{ type filter hook input priority 0; }"]);
    for (protocol, side) in [("tcp", "sport"), ("tcp", "dport"), ("udp", "sport"), ("udp", "dport")]
    {
        nft(&["add", "rule", "inet", "cut", "wire", protocol, side, &port, "drop"]);
    }
}

fn heal() {
    nft(&["delete", "table", "inet", "cut"]);
}

/// Sends small frames, one every ten milliseconds. Returns the number of the next frame.
fn send(rank: &mut Rank, first: u64, duration: Duration) -> u64 {
    let (start, mut number) = (Instant::now(), first);
    while start.elapsed() < duration {
        rank.send(5, number, b"tick");
        number += 1;
        std::thread::sleep(Duration::from_millis(10));
    }
    number
}

/// Gives this thread, and the processes that it starts, a network namespace of their own.
fn own_network() -> Result<(), String> {
    // SAFETY: unshare has no memory effects, and the namespace concerns this thread only.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(format!("no network namespace: {}", std::io::Error::last_os_error()));
    }
    run(Command::new("ip").args(["link", "set", "lo", "up"]))?;
    run(Command::new("nft").args(["list", "ruleset"]))
}

fn nft(arguments: &[&str]) {
    run(Command::new("nft").args(arguments)).unwrap();
}

fn run(command: &mut Command) -> Result<(), String> {
    let start = Instant::now();
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    assert!(start.elapsed() < PATIENCE);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
