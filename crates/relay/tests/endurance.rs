//! Tests of links that break, of links over shared memory, and of very many links.

mod common;

use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use common::{
    Authority, KEY, PATIENCE, Plan, Rank, RelayProcess, frame, introduction, pattern, say_hello,
};
use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::id::Address;
use landbridge_proto::limit::RELAY_PAYLOAD_BYTES_MAX;
use landbridge_proto::relay::ENDPOINT_QUEUE_BYTES_MAX;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};

const IDLE_LINKS: u32 = 2_000;
/// The bytes that a relay may spend on a rank that does nothing.
const IDLE_LINK_BYTES_MAX: u64 = 16 << 10;

#[test]
fn an_idle_link_between_relays_breaks_and_frames_wait() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let (wire, cut) = cuttable(zero.relays.unwrap());
    let mut one = RelayProcess::start(&Plan::new(1, &authority).peer(0, wire));
    one.wait_for("linked to the relay of cluster 0");
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    for round in 0..3u64 {
        here.send(5, round * 4, b"ping");
        assert_eq!(there.receive_frame().1, b"ping");
        cut.send(()).unwrap();
        one.wait_for("is down");
        zero.wait_for("is down");
        there.send(1, round * 4, b"pong");
        // Endpoints whose frames may have been lost are notified; here no frame has been lost.
        let (header, body) = here.receive_frame();
        assert_eq!((header.kind, &body[..]), (Kind::Ack, &b"pong"[..]));
    }
    assert_eq!((zero.counter("breaks"), one.counter("breaks")), (3, 3));
}

/// The number of frames of the largest size that exceed a rank's queue at its relay, together with
/// what sockets and rings hold.
const FLOOD_FRAMES: u64 =
    (ENDPOINT_QUEUE_BYTES_MAX + (24 << 20)) as u64 / RELAY_PAYLOAD_BYTES_MAX as u64;

#[test]
fn a_busy_link_between_relays_breaks_and_every_hole_is_reported() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let (wire, cut) = cuttable(zero.relays.unwrap());
    let mut one = RelayProcess::start(&Plan::new(1, &authority).peer(0, wire));
    one.wait_for("linked to the relay of cluster 0");
    let (sender, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let mut notices = Rank { address: sender.address, stream: sender.stream.try_clone().unwrap() };

    // Much is in flight, since nobody reads, when the link is cut.
    let flood = std::thread::spawn(move || {
        let mut sender = sender;
        let mut sequence = 0;
        let body = pattern(0, RELAY_PAYLOAD_BYTES_MAX);
        for _ in 0..FLOOD_FRAMES {
            sender.send(5, sequence, &body);
            sequence += body.len() as u64;
        }
        sender
    });
    one.wait_for_counter("pauses", |pauses| pauses > 0);
    cut.send(()).unwrap();
    zero.wait_for("is down");

    // What arrives is whole and in order. What is missing was in flight, or exceeded the queue
    // while the other relay was unreachable.
    let end = FLOOD_FRAMES * RELAY_PAYLOAD_BYTES_MAX as u64;
    let reader = std::thread::spawn(move || {
        let (mut holes, mut expected) = (0, 0);
        while expected <= end {
            let (header, body) = there.receive();
            assert!(header.sequence >= expected && body == pattern(0, RELAY_PAYLOAD_BYTES_MAX));
            holes += (header.sequence > expected) as u32;
            expected = header.sequence + body.len() as u64;
        }
        holes
    });
    one.wait_for("is down");
    let line = zero.wait_for("linked to the relay of cluster 1 at");
    assert!(line.contains("may have been lost in the break"), "{line}");
    let (header, _) = notices.receive();
    assert_eq!((header.kind, header.source), (Kind::Lost, Address::new(5, 0)));
    drop(flood.join().unwrap());
    notices.send(5, end, &pattern(0, RELAY_PAYLOAD_BYTES_MAX));
    let holes = reader.join().unwrap();
    assert!((1..=2).contains(&holes), "{holes} holes");
}

#[test]
fn a_relay_that_is_not_there_yet_is_complained_of_once_and_found() {
    let authority = Authority::new();
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut one = RelayProcess::start(&Plan::new(1, &authority).peer(0, address));
    let line = one.wait_for("cannot reach the relay of cluster 0");
    assert!(line.contains(&format!("at {address}: Connection refused")), "{line}");
    // Several attempts follow.
    one.wait_for_counter("refused", |refused| refused >= 4);
    let wan_listen = format!("wan_listen = \"{address}\"");
    let zero = RelayProcess::start(&Plan::new(0, &authority).line(&wan_listen));
    one.wait_for("linked to the relay of cluster 0");
    let complaints = one.log.iter().filter(|line| line.contains("cannot reach"));
    assert_eq!(complaints.count(), 1, "{:#?}", one.log);
    let events = one.events(2);
    assert!(
        events[0].ends_with("is=unreachable why=Connection refused (os error 111)"),
        "{events:?}"
    );
    assert_eq!(events[1], format!("landbridge-relay: link cluster=0 at={address} is=up"));
    drop(zero);
    assert!(one.events(1)[0].contains(" is=down why="));
}

#[test]
fn a_relay_that_is_started_again_is_linked_again() {
    let authority = Authority::new();
    let mut zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let plan = Plan::new(1, &authority).peer(0, zero.relays.unwrap());
    let first = RelayProcess::start(&plan);
    let mut here = Rank::attach(&zero, 1);
    {
        let mut there = Rank::attach(&first, 5);
        here.send(5, 0, b"one");
        assert_eq!(there.receive().1, b"one");
    }
    drop(first);
    zero.wait_for("is down");
    let second = RelayProcess::start(&plan);
    // The frames that the first relay held count as lost, and the source of the channel is
    // notified.
    assert_eq!(here.receive().0.kind, Kind::Lost);
    let mut there = Rank::attach(&second, 5);
    there.send(1, 0, b"two");
    assert_eq!(here.receive().1, b"two");
}

#[test]
fn ranks_of_the_relays_node_use_shared_memory() {
    let name = format!("landbridge-near-{}", std::process::id());
    let relay = RelayProcess::start(&Plan::alone(4).line(&format!("unix = \"@{name}\"")));
    let mut near = attach_near(&name, 1);
    let mut far = Rank::attach(&relay, 2);
    let mut sequence = 0;
    for length in [0, 1, 100, 5_000, RELAY_PAYLOAD_BYTES_MAX] {
        let body = pattern(sequence, length);
        let bytes = frame(Address::new(1, 0), far.address, sequence, &body);
        send_near(&mut near, &bytes);
        assert!(far.receive().1 == body);
        far.send(1, sequence, &body);
        let (header, got) = receive_near(&mut near);
        assert_eq!((header.source, header.sequence, header.hops), (far.address, sequence, 1));
        assert!(got == body);
        sequence += length as u64;
    }
}

#[test]
fn a_full_ring_holds_back_and_loses_nothing() {
    // The frames have half the largest size on average.
    const FRAMES: u64 = 2 * FLOOD_FRAMES;
    let name = format!("landbridge-ring-{}", std::process::id());
    let mut relay = RelayProcess::start(&Plan::alone(4).line(&format!("unix = \"@{name}\"")));
    let (mut one, mut two) = (attach_near(&name, 1), attach_near(&name, 2));
    let sender = std::thread::spawn(move || {
        for n in 0..FRAMES {
            let length = (n as usize * 7919) % RELAY_PAYLOAD_BYTES_MAX;
            let body = pattern(n, length);
            send_near(&mut one, &frame(Address::new(1, 0), Address::new(2, 0), n, &body));
        }
        one
    });
    relay.wait_for_counter("pauses", |pauses| pauses > 0);
    for n in 0..FRAMES {
        let (header, body) = receive_near(&mut two);
        assert_eq!(header.sequence, n);
        assert!(body == pattern(n, body.len()));
    }
    drop(sender.join().unwrap());
    relay.wait_for("rank 1 at");
}

#[test]
fn two_thousand_idle_links_cost_little() {
    let mut relay = RelayProcess::start(&Plan::alone(IDLE_LINKS + 2));
    let (mut one, mut two) = (
        Rank::attach_as(&relay, own(IDLE_LINKS)).unwrap(),
        Rank::attach_as(&relay, own(IDLE_LINKS + 1)).unwrap(),
    );
    let before = relay.memory_bytes();
    let ranks: Vec<Rank> =
        (0..IDLE_LINKS).map(|index| Rank::attach_as(&relay, own(index)).unwrap()).collect();
    relay.wait_for_counter("links", |links| links == IDLE_LINKS as u64 + 2);
    let per_link = (relay.memory_bytes().saturating_sub(before)) / IDLE_LINKS as u64;
    println!("{per_link} bytes of memory per idle link");
    assert!(per_link <= IDLE_LINK_BYTES_MAX, "{per_link} bytes per idle link");

    // Each link has been used once, and still works.
    for mut rank in ranks.iter().map(|rank| rank.stream.try_clone().unwrap()) {
        rank.write_all(&[]).unwrap();
    }
    for rank in &ranks {
        let mut stream = rank.stream.try_clone().unwrap();
        stream.write_all(&frame(rank.address, one.address, 0, b"here")).unwrap();
        assert_eq!(one.receive().1, b"here");
    }
    let per_link = (relay.memory_bytes().saturating_sub(before)) / IDLE_LINKS as u64;
    println!("{per_link} bytes of memory per link that has been used");
    assert!(per_link <= IDLE_LINK_BYTES_MAX, "{per_link} bytes per idle link");
    one.send(IDLE_LINKS + 1, 0, b"hello");
    assert_eq!(two.receive().1, b"hello");

    fn own(index: u32) -> landbridge_proto::wire::hello::Introduction {
        let mut own = introduction(index);
        own.cluster = landbridge_proto::id::ClusterId(0);
        own
    }
}

// ---- helpers -----------------------------------------------------------------------------

/// A port that leads to `target`; each message on the channel cuts the current connection.
fn cuttable(target: SocketAddr) -> (SocketAddr, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (cut, cuts) = channel::<()>();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (near, far) = (stream.unwrap(), TcpStream::connect(target).unwrap());
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || copy(from, to));
            }
            if cuts.recv().is_err() {
                return;
            }
            for stream in [near, far] {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
        }
    });
    (address, cut)
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = [0; 65536];
    while let Ok(bytes) = from.read(&mut buffer) {
        if bytes == 0 || to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn attach_near(name: &str, index: u32) -> ShmLink {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    say_hello(&mut stream, introduction(index), KEY).unwrap();
    ShmLink::dial(stream.into(), Mapper::ANYWHERE).unwrap()
}

fn send_near(link: &mut ShmLink, bytes: &[u8]) {
    let deadline = Instant::now() + PATIENCE;
    let (head, body) = bytes.split_at(HEADER_BYTES);
    while !link.send(head, &[IoSlice::new(body)]) {
        assert!(Instant::now() < deadline, "the ring stays full");
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn receive_near(link: &mut ShmLink) -> (Header, Vec<u8>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(bytes) = link.peek().unwrap() {
            let (head, body) = bytes.split_at(HEADER_BYTES);
            let result = (Header::parse(head).unwrap(), body.to_vec());
            link.consume();
            return result;
        }
        assert!(Instant::now() < deadline, "nothing arrives");
        std::thread::sleep(Duration::from_micros(50));
    }
}
