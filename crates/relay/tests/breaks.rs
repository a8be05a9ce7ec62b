//! Tests of links that break and come back: which frames wait, which are lost, and which endpoints
//! are notified.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Authority, KEY, Plan, Rank, RelayProcess, command, introduction, pattern, say_hello};
use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::Kind;

#[test]
fn a_rank_whose_connection_breaks_comes_back_and_its_peers_hear_of_it() {
    let (mut zero, mut one) = RelayProcess::pair();
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    here.send(5, 0, b"first");
    assert_eq!(there.receive().1, b"first");
    drop(there);
    one.wait_for("rank 5 at");
    here.send(5, 5, b"second");
    let mut there = Rank::attach(&one, 5);
    assert_eq!(there.receive().1, b"second");
    // The relay of this rank cannot know whether the first frame was read.
    let (header, _) = here.receive();
    assert_eq!((header.kind, header.source), (Kind::Lost, Address::new(5, 0)));
    there.send(1, 0, b"back");
    assert_eq!(here.receive().1, b"back");

    // In the opposite case, the rank comes back before its relay has detected the break.
    let again = Rank::attach_as(&zero, introduction(1));
    zero.wait_for("it reconnects");
    here = again.unwrap();
    assert_eq!(there.receive().0.kind, Kind::Lost);
    there.send(1, 4, b"once more");
    assert_eq!(
        here.receive_frame().1,
        b"once more",
        "after what was said and may not have arrived"
    );
    assert_eq!((zero.counter("unreachable"), one.counter("unreachable")), (0, 0));
}

#[test]
fn a_rank_that_stays_away_becomes_unreachable_when_the_user_says() {
    let (zero, mut one) = RelayProcess::pair_with(&[("LANDBRIDGE_PEER_TIMEOUT", "700ms")]);
    let (mut here, there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    here.send(5, 0, b"?");
    one.wait_for_counter("frames", |frames| frames == 1);
    drop(there);
    one.wait_for("is away");
    let start = Instant::now();
    let (header, _) = here.receive();
    assert_eq!((header.kind, header.source), (Kind::Unreachable, Address::new(5, 0)));
    assert!((500..10_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
}

#[test]
fn a_process_of_the_relays_node_is_gone_when_its_connection_ends() {
    let name = format!("landbridge-breaks-{}", std::process::id());
    let mut relay = RelayProcess::start(&Plan::alone(4).line(&format!("unix = \"@{name}\"")));
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    say_hello(&mut stream, introduction(1), KEY).unwrap();
    let near = ShmLink::dial(stream.into(), Mapper::ANYWHERE).unwrap();
    let mut far = Rank::attach(&relay, 2);
    far.send(1, 0, b"are you there?");
    relay.wait_for_counter("frames", |frames| frames == 1);
    drop(near);
    relay.wait_for("rank 1 at");
    // The rank has not sent Goodbye, so it is unknown whether it has read the frame.
    let (header, _) = far.receive();
    assert_eq!((header.kind, header.source), (Kind::Unreachable, Address::new(1, 0)));
}

#[test]
fn many_streams_share_the_load_and_one_that_breaks_comes_back() {
    const STREAMS: u64 = 4;
    const FRAMES: u64 = 3_000;
    let authority = Authority::new();
    let mut zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let wires = Wires::to(zero.relays.unwrap());
    let plan = Plan::new(1, &authority).peer(0, wires.address);
    let variables = [("LANDBRIDGE_WAN_STREAMS", "4")];
    let mut one = RelayProcess::start_with(&plan, command(&variables));
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == STREAMS);
    }
    let (sender, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    let mut reports = Rank { address: sender.address, stream: sender.stream.try_clone().unwrap() };
    let body = pattern(0, 30_000);
    let expected = body.clone();
    let mut arrived = BTreeSet::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut sender = sender;
            (0..FRAMES).for_each(|number| sender.send(5, number, &body));
        });
        // Two breaks happen in the middle; then the missing frames are requested.
        let mut breaks = 0;
        while breaks < 2 {
            let (header, body) = there.receive();
            assert!(body == expected && arrived.insert(header.sequence));
            if arrived.len() as u64 == (breaks + 1) * FRAMES / 4 {
                wires.cut(breaks as usize);
                breaks += 1;
            }
        }
        there.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut byte = [0; 1];
        while there.stream.peek(&mut byte).is_ok() {
            let (header, body) = there.receive();
            assert!(body == expected && arrived.insert(header.sequence));
        }
    });
    assert!(wires.all_have_carried(FRAMES as usize * 30_000 / 20), "{:?}", wires.carried());
    for relay in [&mut zero, &mut one] {
        relay.wait_for_counter("streams", |streams| streams == STREAMS);
        assert_eq!(relay.counter("breaks"), 2);
    }
    let of_streams = |line: &&String| line.contains(": stream ") && line.contains("others go on");
    assert_eq!(zero.log.iter().filter(of_streams).count(), 2, "{:#?}", zero.log);
    // Frames may be missing only if their loss was reported.
    let (header, _) = reports.receive();
    assert_eq!((header.kind, header.source), (Kind::Lost, Address::new(5, 0)));
    assert!(arrived.len() as u64 > FRAMES / 2, "{} of {FRAMES}", arrived.len());
    reports.send(5, FRAMES, b"on it goes");
    there.stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    assert_eq!(there.receive_frame().1, b"on it goes");
}

#[test]
fn a_relay_that_is_stopped_for_a_while_loses_nothing() {
    let (mut zero, mut one) = RelayProcess::pair_with(&[("LANDBRIDGE_WAN_STREAMS", "2")]);
    zero.wait_for_counter("streams", |streams| streams == 2);
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    one.signal(libc::SIGSTOP);
    let stopped = Instant::now();
    let mut sequence = 0;
    while stopped.elapsed() < Duration::from_secs(5) {
        here.send(5, sequence, b"tick");
        sequence += 4;
        std::thread::sleep(Duration::from_millis(10));
    }
    one.signal(libc::SIGCONT);
    let mut arrived = BTreeSet::new();
    while (arrived.len() as u64) < sequence / 4 {
        assert!(arrived.insert(there.receive_frame().0.sequence));
    }
    assert_eq!((zero.counter("breaks"), one.counter("breaks")), (0, 0));
    assert_eq!((zero.counter("lost"), one.counter("lost")), (0, 0));
    assert_eq!((zero.counter("refused"), one.counter("refused")), (0, 0));
}

// ---- helpers -----------------------------------------------------------------------------

/// A port that leads to another, and the connections through it.
struct Wires {
    address: SocketAddr,
    all: Arc<Mutex<Vec<Wire>>>,
}

struct Wire {
    ends: [TcpStream; 2],
    carried: Arc<Mutex<usize>>,
}

impl Wires {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let all = Arc::new(Mutex::new(Vec::new()));
        let wires = all.clone();
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(target).unwrap());
                let carried = Arc::new(Mutex::new(0));
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let carried = carried.clone();
                    std::thread::spawn(move || copy(from, to, &carried));
                }
                wires.lock().unwrap().push(Wire { ends: [near, far], carried });
            }
        });
        Self { address, all }
    }

    fn cut(&self, number: usize) {
        for end in &self.all.lock().unwrap()[number].ends {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn carried(&self) -> Vec<usize> {
        self.all.lock().unwrap().iter().map(|wire| *wire.carried.lock().unwrap()).collect()
    }

    /// Whether the first four connections have carried `bytes` bytes each.
    fn all_have_carried(&self, bytes: usize) -> bool {
        self.carried().iter().take(4).all(|carried| *carried >= bytes)
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, carried: &Mutex<usize>) {
    let mut buffer = [0; 65536];
    while let Ok(bytes) = from.read(&mut buffer) {
        if bytes == 0 || to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
        *carried.lock().unwrap() += bytes;
    }
    let _ = to.shutdown(Shutdown::Both);
}
