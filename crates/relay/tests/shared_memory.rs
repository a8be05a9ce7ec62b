//! Tests with ranks on the relay's node: their frames move through shared memory, and waiting for
//! them costs nothing.

mod common;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use common::{Authority, KEY, PATIENCE, Plan, RelayProcess, command};
use common::{frame, introduction, pattern, say_hello};
use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::id::Address;
use landbridge_proto::limit::RELAY_PAYLOAD_BYTES_MAX;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use landbridge_proto::wire::hello::{Introduction, LogPosition};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A time that is longer than a relay needs to read what it has capacity for.
const SETTLED: Duration = Duration::from_millis(300);
const BODY_BYTES: usize = 16 << 10;
/// The times that a relay may wake in a second in which nothing can move: hardly more than it is
/// asked for its counters.
const IDLE_WAITS_MAX: u64 = 50;

#[test]
fn a_relay_sleeps_while_nothing_can_move() {
    let (mut relay, name) = start("still");
    let (mut sender, mut reader) = (attach(&name, 1), attach(&name, 2));
    let sent = send_until_full(&mut sender, message);
    assert!(relay.counter("pauses") > 0, "the sender's ring is full since the relay takes no more");

    let before = relay.counter("waits");
    std::thread::sleep(Duration::from_secs(1));
    let waits = relay.counter("waits") - before;
    assert!(waits < IDLE_WAITS_MAX, "{waits} waits in a second");

    receive(&mut reader, 0..sent);
    // The flow of frames continues.
    assert!(sender.send(&message(sent), &[]));
    receive(&mut reader, sent..sent + 1);
}

/// A process opens another connection, as it does for a checkpoint, while its relay holds frames
/// that it has read from the process.
#[test]
fn all_that_is_left_in_a_ring_is_taken_in_before_its_process_comes_back() {
    let authority = Authority::new();
    let name = format!("landbridge-near-heard-{}", std::process::id());
    let recovering = || command(&[("LANDBRIDGE_RECOVER", "on")]);
    let near = Plan::new(0, &authority).line(&format!("unix = \"@{name}\"")).wan();
    let mut here = RelayProcess::start_with(&near, recovering());
    let far = Plan::new(1, &authority).peer(0, here.relays.unwrap());
    let mut there = RelayProcess::start_with(&far, recovering());
    there.wait_for("linked to the relay of cluster 0");
    there.signal(libc::SIGSTOP);

    let (mut first, mut second) = (attach(&name, 1), attach(&name, 2));
    send_until_full(&mut first, |number| far_message(1, number));
    // Nothing that was read from this process can move on: other frames wait already.
    let sent = send_until_full(&mut second, |number| far_message(2, number));
    let standing = LogPosition { sent, ..LogPosition::default() };
    let mut again = attach_as(&name, Introduction { log_position: standing, ..introduction(2) });
    let deadline = Instant::now() + PATIENCE;
    while again.peek().unwrap().is_none() {
        assert!(Instant::now() < deadline && again.drain_doorbell(), "{:#?}", here.log);
        std::thread::sleep(Duration::from_millis(1));
    }
    there.signal(libc::SIGCONT);
    here.cut_lifeline();
}

/// A message of full size, to a process of the other cluster.
fn far_message(source: u32, number: u64) -> Vec<u8> {
    let body = pattern(number, RELAY_PAYLOAD_BYTES_MAX);
    frame(Address::new(source, 0), Address::new(5, 0), number, &body)
}

/// A relay with a listener for its node.
fn start(what: &str) -> (RelayProcess, String) {
    let name = format!("landbridge-near-{what}-{}", std::process::id());
    let plan = Plan::alone(4).line(&format!("unix = \"@{name}\"")).line("spin_micros = 0");
    (RelayProcess::start(&plan), name)
}

fn attach(name: &str, index: u32) -> ShmLink {
    attach_as(name, introduction(index))
}

fn attach_as(name: &str, own: Introduction) -> ShmLink {
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    say_hello(&mut stream, own, KEY).unwrap();
    ShmLink::dial(stream.into(), Mapper::ANYWHERE).unwrap()
}

fn message(number: u64) -> Vec<u8> {
    frame(Address::new(1, 0), Address::new(2, 0), number, &pattern(number, BODY_BYTES))
}

/// Sends until relay and rings hold all that they can. Returns the number of messages.
fn send_until_full(sender: &mut ShmLink, message: impl Fn(u64) -> Vec<u8>) -> u64 {
    let (mut sent, mut full_since) = (0, Instant::now());
    while full_since.elapsed() < SETTLED {
        if sender.send(&message(sent), &[]) {
            (sent, full_since) = (sent + 1, Instant::now());
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    sent
}

fn receive(reader: &mut ShmLink, numbers: std::ops::Range<u64>) {
    for number in numbers {
        while reader.peek().unwrap().is_none() {
            sleep(reader);
        }
        let bytes = reader.peek().unwrap().unwrap();
        assert_eq!(Header::parse(bytes).unwrap().sequence, number);
        assert_eq!(bytes[HEADER_BYTES..], pattern(number, BODY_BYTES));
        reader.consume();
    }
}

/// Sleeps until the doorbell rings.
fn sleep(link: &mut ShmLink) {
    if link.prepare_park() {
        let mut fds = [PollFd::from_borrowed_fd(link.fd(), PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "nobody rang");
    }
    assert!(link.drain_doorbell(), "the connection to the relay has ended");
    link.unpark();
}
