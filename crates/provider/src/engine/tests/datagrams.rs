//! Tests of two engines with a connection and a UDP path between them.

use std::net::UdpSocket;

use landbridge_proto::path::congestion;
use landbridge_proto::wire::datagram::{PROBE_BYTES, PathProbe, TOKEN_BYTES};

use super::super::datagrams::Datagrams;
use super::*;

/// Both parties, and the second party's number in the first party's address vector.
pub(super) struct Pair {
    pub one: Party,
    pub other: Party,
    pub number: FiAddr,
}

impl Pair {
    /// Joins the parties by TCP over the loopback, with a UDP path that is open on both sides.
    fn open() -> Self {
        let mut pair = Self::join(|party| {
            let sum = party.engine.connections.data.identity.settings.integrity;
            let datagrams = Datagrams::new(congestion::CongestionAlgorithm::Cubic, sum);
            party.engine.connections.data.datagrams = Some(Box::new(datagrams));
        });
        until(|| {
            pair.turn()
                && pair.one.engine.connections.data.links.has_udp_paths()
                && pair.other.engine.connections.data.links.has_udp_paths()
        });
        pair
    }

    /// Joins the parties by TCP over the loopback, after `prepare` has changed them.
    pub fn join(prepare: fn(&mut Party)) -> Self {
        let (mut one, mut other) = (Party::open(), Party::open());
        [&mut one, &mut other].into_iter().for_each(prepare);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        let number = one.av.insert(other.name());
        let back = other.av.insert(one.name());
        for (party, number, socket) in [(&mut one, number, ours), (&mut other, back, theirs)] {
            let peer = party.engine.connections.data.peer_of(number).unwrap();
            let carrier = Carrier::Stream(Box::new(StreamLink::new(socket.into()).unwrap()));
            party.engine.connections.link_up(Some(peer), carrier, 1, number == back).unwrap();
        }
        Pair { one, other, number }
    }

    pub fn turn(&mut self) -> bool {
        self.one.engine.progress();
        self.other.engine.progress();
        true
    }

    /// Sends a message of `bytes` bytes, and compares the received message.
    fn exchange(&mut self, bytes: usize) {
        let mut sent: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
        let mut received = vec![0; bytes];
        let iov = |bytes: &mut Vec<u8>| [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
        self.other.receive(&iov(&mut received));
        let payload = iov(&mut sent);
        let message = SendRequest { payload: &payload, ..empty_message(self.number) };
        self.one.engine.send(&message).unwrap();
        let mut done = (None, None);
        until(|| {
            self.turn();
            done = (done.0.or(self.one.next()), done.1.or(self.other.next()));
            done.0.is_some() && done.1.is_some()
        });
        assert_eq!(done, (Some(Ok(())), Some(Ok(()))));
        assert!(sent == received, "what arrives is what was sent");
    }

    /// Breaks the connection between the parties, on the first party's side.
    fn cut_connection(&mut self) {
        let engine = &mut self.one.engine;
        let is_stream = |link: &Option<Box<Link>>| link.as_ref().is_some_and(|it| it.is_stream());
        let id = engine.connections.data.links.iter().position(is_stream).expect("a connection");
        engine.connections.link_down(id, &std::io::ErrorKind::ConnectionReset.into());
    }

    /// Replaces the addresses of both parties by an address without a listener.
    fn hide_listeners(&mut self) {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for party in [&mut self.one, &mut self.other] {
            party.engine.connections.data.peers[Peer(0)].name = Some(name_at(closed, 1));
        }
    }

    /// Number of bytes that the first party has sent over UDP.
    fn bytes_over_udp(&mut self) -> u64 {
        let engine = &self.one.engine;
        let lines = engine.connections.data.peers[Peer(0)].open_paths.iter().filter(|open_path| {
            engine.connections.data.links[open_path.link]
                .as_ref()
                .is_some_and(|link| link.socket().is_some())
        });
        let done = lines.filter_map(|open_path| {
            engine.connections.data.core.channel(Peer(0)).path_statistics(open_path.path)
        });
        done.map(|done| done.bytes).sum()
    }
}

#[test]
fn messages_of_all_sizes_go_in_datagrams() {
    let mut pair = Pair::open();
    let sizes = [0, 1, 1_000, 5_000, 100_000, 3 << 20];
    sizes.iter().for_each(|&size| pair.exchange(size));
    let (carried, sent) = (pair.bytes_over_udp(), sizes.iter().sum::<usize>() as u64);
    assert!(carried > sent * 9 / 10, "{carried} of {sent} bytes over UDP");
}

/// Any process can send datagrams with any sender address.
#[test]
fn what_unknown_senders_send_is_dropped() {
    let mut pair = Pair::open();
    let (to, token) =
        pair.other.engine.connections.data.datagrams.as_ref().unwrap().advertised_for_tests();
    let unknown = UdpSocket::bind("127.0.0.1:0").unwrap();
    let guess = PathProbe { size: PROBE_BYTES as u32, number: 1 };
    let frame = [&token.to_le_bytes()[..], &[0xff; 100]].concat();
    let sent: [&[u8]; 4] =
        [&[], &token.to_le_bytes()[..TOKEN_BYTES - 1], &guess.emit(!token, false), &frame];
    for datagram in sent {
        unknown.send_to(datagram, to).unwrap();
    }
    let dropped =
        |pair: &Pair| pair.other.engine.connections.data.datagrams.as_ref().unwrap().dropped();
    until(|| pair.turn() && dropped(&pair).0 >= 2);
    unknown.set_nonblocking(true).unwrap();
    assert!(unknown.recv(&mut [0; 64]).is_err(), "nobody answers");
    pair.exchange(100_000);
    assert_eq!(dropped(&pair).1, 0);
}

/// The corrupt bits are those that no checksum of UDP has detected.
#[test]
fn corrupt_datagrams_of_a_peer_count_as_lost() {
    let mut pair = Pair::open();
    let junk: [&[u8]; 4] = [&[0xff; 60], &[1; 16], &[1; 40], &[7; 1400]];
    for bytes in junk {
        assert!(send_junk(&mut pair.one.engine, bytes));
    }
    until(|| {
        pair.turn()
            && pair.other.engine.connections.data.datagrams.as_ref().unwrap().dropped().1 >= 4
    });
    pair.exchange(100_000);
    assert!(pair.other.engine.connections.data.links.has_udp_paths());
}

/// No kernel confirms a datagram, so only silence shows that a process has ended.
#[test]
fn a_peer_that_dies_is_given_up_though_a_line_to_it_was_open() {
    let Pair { mut one, other, .. } = Pair::open();
    let start = Instant::now();
    drop(other);
    until(|| {
        one.engine.progress();
        one.engine.connections.data.peers[Peer(0)].send_state == SendState::Closed
    });
    assert!(start.elapsed() < Duration::from_secs(5), "after {:?}", start.elapsed());
    assert!(!one.engine.connections.data.links.has_udp_paths());
}

#[test]
fn closing_does_not_wait_for_a_peer_that_has_died() {
    let Pair { mut one, other, number } = Pair::open();
    one.send(number).unwrap();
    drop(other);
    let start = Instant::now();
    one.engine.close();
    assert!(start.elapsed() < Duration::from_secs(5), "after {:?}", start.elapsed());
}

#[test]
fn a_line_alone_carries_and_its_connection_is_dialled_all_the_same() {
    let mut pair = Pair::open();
    pair.hide_listeners();
    pair.cut_connection();
    pair.exchange(100_000);
    let start = Instant::now();
    until(|| pair.turn() && start.elapsed() > Duration::from_millis(800));
    let peer_state = &pair.one.engine.connections.data.peers[Peer(0)];
    assert!(peer_state.reconnect.is_some() && matches!(peer_state.send_state, SendState::Up(_)));
    pair.exchange(100_000);
}

#[test]
fn a_line_that_opens_is_used_whatever_is_being_dialled() {
    for out in
        [SendState::Reconnecting, SendState::Dialling, SendState::DialQueued, SendState::AwaitRelay]
    {
        let mut pair = Pair::open();
        pair.hide_listeners();
        fail_udp_path(&mut pair.one.engine);
        pair.cut_connection();
        pair.one.engine.connections.data.peers[Peer(0)].send_state = out;
        until(|| pair.turn() && pair.one.is_linked());
        assert!(pair.one.engine.connections.data.peers[Peer(0)].reconnect.is_some(), "{out:?}");
        pair.exchange(100_000);
    }
}

/// A peer may send by a UDP path before this side has validated the path.
#[test]
fn a_corrupt_datagram_by_a_path_in_validation_ends_nothing() {
    let mut pair = Pair::open();
    fail_udp_path(&mut pair.other.engine);
    assert!(send_junk(&mut pair.one.engine, &[0xff; 60]));
    until(|| {
        pair.other.engine.progress();
        pair.other.engine.connections.data.datagrams.as_ref().unwrap().dropped().1 >= 1
    });
    pair.exchange(100_000);
}

/// Sends `bytes` behind a valid token by the first UDP path; false if there is no UDP path.
fn send_junk(engine: &mut Engine, bytes: &[u8]) -> bool {
    let DataPath { links, datagrams, .. } = &mut engine.connections.data;
    let mut udp_paths = links.iter().flatten().filter_map(|link| match &link.carrier {
        Carrier::Datagram(udp_path) => Some(udp_path),
        _ => None,
    });
    let datagrams = datagrams.as_mut().unwrap();
    udp_paths.next().is_some_and(|udp_path| datagrams.send_junk_for_tests(udp_path, bytes))
}

/// Closes the first open UDP path, as if the path had failed.
fn fail_udp_path(engine: &mut Engine) {
    let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
    let mut links = engine.connections.data.links.iter().map(Option::as_deref);
    let id = links.position(|link| link.is_some_and(is_open)).expect("a UDP path");
    if let Some((_, udp_path)) = engine.connections.data.links.udp_path(id) {
        udp_path.close_for_tests();
    }
    engine.connections.close_udp_path(id, "a test");
}
