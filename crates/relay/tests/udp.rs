//! Tests of relays that are linked over UDP.

mod common;

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Authority, PATIENCE, Plan, Rank, RelayProcess, command, pattern};
use landbridge_drive::link::quic::{CONNECTIONS_MAX, Congestion, QuicHub, QuicLink, WindowPool};
use landbridge_drive::link::tls::Identity;
use landbridge_proto::id::ClusterId;

const UDP: (&str, &str) = ("LANDBRIDGE_WAN_UDP", "on");

/// A number of pending connections that exceeds what a relay accepts without address validation.
const CROWD: usize = 100;
/// The bytes that a pending connection with a valid certificate may cost; without one, there is no
/// stream.
const PENDING_CONNECTION_BYTES_MAX: u64 = 100 << 10;
const _: () = assert!(CROWD < CONNECTIONS_MAX);

fn are_connected(zero: &RelayProcess, one: &RelayProcess) {
    let (mut here, mut there) = (Rank::attach(zero, 1), Rank::attach(one, 5));
    for number in 0..200 {
        let body = pattern(number, 1 + 150 * number as usize);
        here.send(5, number, &body);
        there.send(1, number, &body);
    }
    for number in 0..200 {
        for rank in [&mut here, &mut there] {
            let (header, body) = rank.receive_frame();
            assert_eq!(header.sequence, number);
            assert_eq!(body, pattern(number, 1 + 150 * number as usize));
        }
    }
}

#[test]
fn frames_pass_both_ways() {
    for variables in [vec![UDP], vec![UDP, ("LANDBRIDGE_CONGESTION", "cubic")]] {
        let (mut zero, mut one) = RelayProcess::pair_with(&variables);
        for relay in [&zero, &one] {
            assert!(relay.log.last().unwrap().ends_with("/udp"), "{:?}", relay.log);
        }
        assert!(one.events(1)[0].ends_with("/udp is=up"));
        are_connected(&zero, &one);
        assert_eq!((zero.counter("breaks"), one.counter("breaks")), (0, 0));
    }
}

#[test]
fn streams_are_as_many_as_the_user_says_and_share_a_long_message() {
    let (mut zero, mut one) = RelayProcess::pair_with(&[UDP, ("LANDBRIDGE_WAN_STREAMS", "3")]);
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == 3);
    }
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let body = pattern(0, 30_000);
    std::thread::scope(|scope| {
        let body = &body;
        scope.spawn(move || (0..2_000).for_each(|number| here.send(5, number, body)));
        let mut sequences: Vec<u64> = (0..2_000)
            .map(|_| {
                let (header, arrived) = there.receive_frame();
                assert!(arrived == *body);
                header.sequence
            })
            .collect();
        sequences.sort_unstable();
        assert_eq!(sequences, (0..2_000).collect::<Vec<_>>());
    });
}

#[test]
fn a_relay_that_ends_sends_what_it_has_taken_and_says_that_it_has_ended() {
    let (zero, mut one) = RelayProcess::pair_with(&[UDP]);
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let body = pattern(0, 30_000);
    for number in 0..100 {
        here.send(5, number, &body);
    }
    let mut zero = zero;
    zero.wait_for_counter("frames", |frames| frames == 100);
    zero.signal(libc::SIGTERM);
    assert_eq!(zero.wait(), Some(0));
    for number in 0..100 {
        assert_eq!(there.receive_frame().0.sequence, number);
    }
    let start = Instant::now();
    let line = one.wait_for("is down");
    assert!(line.contains("as when its process ends"), "{line}");
    assert!(start.elapsed() < Duration::from_secs(2), "it was said, not found out");
}

#[test]
fn where_udp_is_not_answered_tcp_is_used() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let plan = Plan::new(1, &authority).peer(0, zero.relays.unwrap());
    let mut one = RelayProcess::start_with(&plan, command(&[UDP]));
    let start = Instant::now();
    let line = one.wait_for("over UDP");
    assert!(
        line.contains("nothing has arrived from it") && line.contains("TCP is tried"),
        "{line}"
    );
    let line = one.wait_for("linked to the relay of cluster 0");
    assert!(!line.contains("udp") && start.elapsed() < Duration::from_secs(10), "{line}");
    zero.wait_for("linked to the relay of cluster 1");
    are_connected(&zero, &one);
}

#[test]
fn where_udp_works_for_a_moment_only_tcp_is_used() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start_with(&Plan::new(0, &authority).wan(), command(&[UDP]));
    let gate = Gate::to(zero.relays.unwrap());
    let plan = Plan::new(1, &authority).peer(0, gate.address);
    let mut one = RelayProcess::start_with(&plan, command(&[UDP]));
    let mut wait_until_linked = |one: &mut RelayProcess| {
        zero.wait_for("linked to the relay of cluster 1");
        one.wait_for("linked to the relay of cluster 0").contains("/udp")
    };
    for _ in 0..3 {
        assert!(wait_until_linked(&mut one));
        gate.is_shut.store(true, Ordering::Relaxed);
        one.wait_for("is down: nothing has arrived from it over UDP");
        gate.is_shut.store(false, Ordering::Relaxed);
    }
    one.wait_for("breaks again and again over UDP; TCP is used for the next 60 s");
    assert!(!wait_until_linked(&mut one), "UDP again");
    are_connected(&zero, &one);
}

#[test]
fn a_stream_goes_back_to_udp_when_that_gets_through_and_nothing_is_lost() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start_with(&Plan::new(0, &authority).wan(), command(&[UDP]));
    let gate = Gate::to(zero.relays.unwrap());
    gate.is_shut.store(true, Ordering::Relaxed);
    let plan = Plan::new(1, &authority).peer(0, gate.address);
    let variables = [UDP, ("LANDBRIDGE_WAN_STREAMS", "2")];
    let mut one = RelayProcess::start_with(&plan, command(&variables));
    let line = one.wait_for("linked to the relay of cluster 0");
    assert!(!line.contains("/udp"), "{line}");
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == 2);
    }
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let is_done = AtomicBool::new(false);
    let (mut numbers, mut arrived) = ([0; 2], [0; 2]);
    std::thread::scope(|scope| {
        // Frames move in both directions all the while.
        let clone =
            |rank: &Rank| Rank { address: rank.address, stream: rank.stream.try_clone().unwrap() };
        let talk = |mut rank: Rank, to: u32, is_done: &AtomicBool| {
            let (start, mut number) = (Instant::now(), 0);
            while !is_done.load(Ordering::Relaxed) && start.elapsed() < 2 * PATIENCE {
                rank.send(to, number, &pattern(number, 2_000));
                number += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            number
        };
        let (one_way, other_way) = (clone(&here), clone(&there));
        let is_done = &is_done;
        let talkers = [
            scope.spawn(move || talk(one_way, 5, is_done)),
            scope.spawn(move || talk(other_way, 1, is_done)),
        ];
        scope.spawn(|| {
            gate.is_shut.store(false, Ordering::Relaxed);
            // Waits until the old streams have been closed, and for a while after this.
            for _ in 0..2 {
                one.wait_for("was replaced");
            }
            std::thread::sleep(Duration::from_secs(1));
            is_done.store(true, Ordering::Relaxed);
        });
        numbers = talkers.map(|talker| talker.join().unwrap());
    });
    for (index, rank) in [&mut there, &mut here].into_iter().enumerate() {
        let mut seen = vec![false; numbers[index] as usize];
        while arrived[index] < numbers[index] {
            let (header, body) = rank.receive_frame();
            assert!(body == pattern(header.sequence, 2_000));
            assert!(!std::mem::replace(&mut seen[header.sequence as usize], true));
            arrived[index] += 1;
        }
    }
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == 2);
        let counters = ["breaks", "lost", "lost_bytes", "unreachable"];
        assert_eq!(counters.map(|name| relay.counter(name)), [0; 4]);
    }
    assert!(one.events(3).last().unwrap().ends_with("/udp is=up"));
}

#[test]
fn a_port_that_is_taken_for_udp_leaves_tcp() {
    let authority = Authority::new();
    // The port is free for TCP, as it has just been.
    let taken = both_at_one_port().1;
    let plan =
        Plan::new(0, &authority).line(&format!("wan_listen = \"{}\"", taken.local_addr().unwrap()));
    let mut zero = RelayProcess::start_with(&plan, command(&[UDP]));
    zero.wait_for("other relays use TCP");
    let plan = Plan::new(1, &authority).peer(0, zero.relays.unwrap());
    let mut one = RelayProcess::start(&plan);
    one.wait_for("linked to the relay of cluster 0");
}

#[test]
fn who_has_no_certificate_of_the_job_is_refused() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    let mut zero = RelayProcess::start_with(&Plan::new(0, &authority).wan(), command(&[UDP]));
    let relay_addr = zero.relays.unwrap();

    // The other relay trusts this authority, and is not trusted.
    let mut plan = Plan::new(1, &foreign).peer(0, relay_addr);
    plan.text = plan.text.replace(&foreign.pem(), &authority.pem());
    let mut strange = RelayProcess::start_with(&plan, command(&[UDP]));
    let line = zero.wait_for("/udp: ");
    assert!(line.contains("refused") && line.contains("QUIC: "), "{line}");
    strange.wait_for("over UDP: QUIC: ");
    drop(strange);

    // A valid certificate, but not that of another relay.
    for (cluster, why) in [(0, "of no other cluster"), (7, "of no relay of this job")] {
        let crowd = Crowd::new(&authority, cluster, relay_addr, 1);
        zero.wait_for(why);
        drop(crowd);
    }
    assert_eq!(zero.counter("attached"), 0);
    let plan = Plan::new(1, &authority).peer(0, relay_addr);
    let mut one = RelayProcess::start_with(&plan, command(&[UDP]));
    one.wait_for("linked to the relay of cluster 0");
    are_connected(&zero, &one);
}

#[test]
fn garbage_and_a_crowd_of_pending_connections_disturb_nobody() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start_with(&Plan::new(0, &authority).wan(), command(&[UDP]));
    let relay_addr = zero.relays.unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let shout = |rounds: u64| {
        for number in 0..rounds {
            let mut bytes = pattern(number * 77, 1 + (number as usize * 37) % 1400);
            // Every kind of first byte: long headers and short ones, versions known and unknown.
            bytes[0] = number as u8;
            if number % 3 == 0 && bytes.len() > 5 {
                bytes[1..5].copy_from_slice(&[0, 0, 0, 1]);
            }
            socket.send_to(&bytes, relay_addr).unwrap();
        }
    };
    shout(2_000);
    let memory = zero.memory_bytes();
    let crowd = Crowd::new(&authority, 1, relay_addr, CROWD);
    let each = zero.memory_bytes().saturating_sub(memory) / CROWD as u64;
    println!("each of a crowd costs {each} bytes");
    assert!(each < PENDING_CONNECTION_BYTES_MAX, "{each} bytes");
    let plan = Plan::new(1, &authority).peer(0, relay_addr);
    let mut one = RelayProcess::start_with(&plan, command(&[UDP]));
    let line = one.wait_for("linked to the relay of cluster 0");
    assert!(line.contains("/udp"), "{line}");
    shout(2_000);
    are_connected(&zero, &one);
    drop(crowd);
    zero.wait_for_counter("pending", |pending| pending == 0);
    assert_eq!(zero.counter("breaks"), 0);
}

/// Connections that show a certificate of the job, and then send nothing more.
struct Crowd {
    hub: QuicHub,
    links: Vec<QuicLink>,
}

impl Crowd {
    /// Opens the connections and completes all handshakes.
    fn new(authority: &Authority, cluster: u16, relay_addr: SocketAddr, count: usize) -> Self {
        let (certificate, key) = authority.issue(cluster);
        let identity = Identity::new(&authority.pem(), &certificate, &key).unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let hub =
            QuicHub::bind(any, &identity, Congestion::Bbr, false, &WindowPool::default()).unwrap();
        let dial = |_| hub.dial(ClusterId(0), relay_addr, Instant::now()).unwrap();
        let mut crowd = Self { links: (0..count).map(dial).collect(), hub };
        let start = Instant::now();
        while !crowd.links.iter().all(QuicLink::is_ready) {
            assert!(start.elapsed() < PATIENCE, "not everybody gets in");
            crowd.turn();
        }
        for link in &crowd.links {
            // A stream exists once something is in it.
            link.write(std::iter::once(&b"L"[..])).unwrap();
        }
        crowd.turn();
        crowd
    }

    fn turn(&mut self) {
        self.hub.receive(Instant::now());
        self.hub.collect(Instant::now());
        self.hub.transmit(Instant::now());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_dialler_whose_address_changes_keeps_its_connection() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start_with(&Plan::new(0, &authority).wan(), command(&[UDP]));
    let translator = Translator::to(zero.relays.unwrap());
    let plan = Plan::new(1, &authority).peer(0, translator.address);
    let mut one = RelayProcess::start_with(&plan, command(&[UDP]));
    one.wait_for("linked to the relay of cluster 0");
    are_connected(&zero, &one);
    translator.change();
    let (zero_again, one_again) = (&zero, &one);
    let (mut here, mut there) = (Rank::attach(zero_again, 2), Rank::attach(one_again, 6));
    for number in 0..100 {
        here.send(6, number, b"there");
        there.send(2, number, b"here");
        assert_eq!(here.receive_frame().1, b"here");
        assert_eq!(there.receive_frame().1, b"there");
    }
    assert_eq!((zero.counter("breaks"), one.counter("breaks")), (0, 0));
}

/// Forwards datagrams from an address of its own, which may change (NAT).
struct Translator {
    address: SocketAddr,
    changes: Arc<AtomicUsize>,
}

impl Translator {
    fn to(relay_addr: SocketAddr) -> Self {
        let open = || {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let (front, backs) = (open(), [open(), open()]);
        let (address, changes) = (front.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::downgrade(&changes);
        std::thread::spawn(move || {
            let (mut inside, mut bytes) = (None, [0; 65_536]);
            while let Some(changes) = seen.upgrade() {
                let back = &backs[changes.load(Ordering::Relaxed)];
                while let Ok((size, from)) = front.recv_from(&mut bytes) {
                    inside = Some(from);
                    back.send_to(&bytes[..size], relay_addr).unwrap();
                }
                // Datagrams that still arrive at the old address are lost.
                while let Ok((size, _)) = back.recv_from(&mut bytes) {
                    front.send_to(&bytes[..size], inside.unwrap()).unwrap();
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        Self { address, changes }
    }

    fn change(&self) {
        self.changes.store(1, Ordering::Relaxed);
    }
}

/// A TCP listener and a UDP socket at one port. Other programs may have a port for one of the two.
fn both_at_one_port() -> (TcpListener, UdpSocket) {
    let try_one = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = UdpSocket::bind(listener.local_addr().unwrap()).ok()?;
        Some((listener, socket))
    };
    std::iter::repeat_with(try_one).flatten().next().unwrap()
}

/// Forwards TCP, and UDP while it is not shut.
struct Gate {
    address: SocketAddr,
    is_shut: Arc<AtomicBool>,
}

impl Gate {
    fn to(relay_addr: SocketAddr) -> Self {
        let (listener, front) = both_at_one_port();
        let address = listener.local_addr().unwrap();
        let back = UdpSocket::bind("127.0.0.1:0").unwrap();
        let is_shut = Arc::new(AtomicBool::new(false));
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(relay_addr).unwrap());
                for (mut from, mut to) in [(&near, &far), (&far, &near)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
            }
        });
        let seen = Arc::downgrade(&is_shut);
        front.set_nonblocking(true).unwrap();
        back.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let (mut inside, mut bytes) = (None, [0; 65_536]);
            while let Some(is_shut) = seen.upgrade() {
                let is_open = !is_shut.load(Ordering::Relaxed);
                while let Ok((size, from)) = front.recv_from(&mut bytes) {
                    inside = Some(from);
                    let _ = is_open.then(|| back.send_to(&bytes[..size], relay_addr).unwrap());
                }
                while let Ok((size, _)) = back.recv_from(&mut bytes) {
                    let to = inside.unwrap();
                    let _ = is_open.then(|| front.send_to(&bytes[..size], to).unwrap());
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        Self { address, is_shut }
    }
}

/// With TCP, an idle link has two keepalives each second, and the clock.
#[test]
fn an_idle_link_wakes_its_relays_seldom() {
    let waits = |variables: &[(&str, &str)]| {
        let (mut zero, one) = RelayProcess::pair_with(variables);
        // The search for the size of datagrams ends first.
        std::thread::sleep(Duration::from_secs(2));
        let before = zero.counter("waits");
        std::thread::sleep(Duration::from_secs(4));
        let waits = zero.counter("waits") - before;
        drop(one);
        waits
    };
    let (tcp, udp) = (waits(&[]), waits(&[UDP]));
    println!("in 4 s: {tcp} waits over TCP, {udp} over UDP");
    assert!(udp < 100, "{udp} waits");
}
