//! Tests of two engines of one process that communicate with each other.

mod acting;
mod beside;
mod bursts;
mod closing;
mod copies;
mod datagrams;
mod direct_access;
mod measure;
mod peeks;
mod pending_connections;
mod reconnects;
mod recovery;
mod violations;

use std::io::{Read, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::time::{Duration, Instant};

use landbridge_drive::link::stream::StreamLink;
use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use landbridge_proto::wire::hello::Introduction;
use landbridge_proto::wire::kind_header::{AdvertisedAddress, KindHeader};
use landbridge_proto::wire::name::Name;

use super::carrier::Carrier;
use super::links::Link;
use super::peer_state::SendState;
use super::request::{Iov, PeekRequest};
use super::*;
use crate::abi::{self, CqTaggedEntry, FiAddr};
use crate::queue::{EntryFormat, Queue};

/// Far more time than two idle engines need; a loaded machine may need a lot.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn what_is_sent_to_a_peer_that_has_left_is_done_at_once() {
    let (mut one, other, number) = linked();
    leave(other, &mut one);
    one.send(number).unwrap();
    assert_eq!(one.next(), Some(Ok(())), "taken in by nobody, as a moment earlier");
    one.write(number).unwrap();
    assert_eq!(one.next(), Some(Err(Errno(libc::ECONNRESET))), "its memory is gone");
}

#[test]
fn peeking_alone_finds_a_message_in_the_end() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let number = one.av.insert(other.name());
    one.engine.send(&SendRequest { tag: Some(7), ..empty_message(number) }).unwrap();
    until(|| {
        one.engine.progress();
        // Open MPI probes in this way: a peek, and then its answer, without another poll of the
        // network.
        other.peek(7).unwrap();
        other.next().expect("an answer to each peek").is_ok()
    });
}

#[test]
fn one_that_polls_rarely_accepts_connections_all_the_same() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let number = one.av.insert(other.name());
    one.send(number).unwrap();
    // The polls are far apart; a hello takes few of them.
    let polls = (0..30).take_while(|_| {
        let moment = Instant::now();
        while moment.elapsed() < Duration::from_millis(5) {
            one.engine.progress();
        }
        other.engine.progress();
        !other.is_linked()
    });
    assert!(polls.count() < 20, "nobody opens");
}

#[test]
fn what_is_injected_arrives_although_its_sender_never_calls_again() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let number = one.av.insert(other.name());
    let injected =
        SendRequest { inject: true, notify: false, tag: Some(7), ..empty_message(number) };
    let mut refusals = 0;
    until(|| {
        let taken = one.engine.send(&injected);
        assert!(matches!(taken, Ok(()) | Err(Errno::EAGAIN)));
        refusals += taken.is_err() as u32;
        other.engine.progress();
        taken.is_ok()
    });
    assert!(refusals > 0, "there was no way yet");
    until(|| {
        other.peek(7).unwrap();
        other.next().expect("an answer to each peek").is_ok()
    });
}

#[test]
fn an_address_means_one_endpoint_only() {
    let mut party = Party::open();
    let own = party.engine.connections.data.own.introduction;
    let first = Introduction { address: Address::new(5, 0), cookie: 1, ..own };
    let second = Introduction { cookie: 2, ..first };
    let peer = party.engine.connections.peer_introduced(&first).unwrap();
    assert!(party.engine.connections.data.peers[peer].recognise(&first).is_ok());
    assert!(
        party.engine.connections.data.peers[peer].recognise(&first).is_ok(),
        "it may connect again"
    );
    let peer = party.engine.connections.peer_introduced(&second).unwrap();
    assert!(party.engine.connections.data.peers[peer].recognise(&second).is_err());
}

#[test]
fn a_dialler_of_very_many_still_answers() {
    const MANY: u64 = 300;
    let (mut one, mut other) = (Party::open(), Party::open());
    // The listener accepts connections, and never answers.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    for unique in 0..MANY {
        let number = one.av.insert(name_at(mute.local_addr().unwrap(), unique));
        one.send(number).unwrap();
    }
    let number = other.av.insert(one.name());
    other.send(number).unwrap();
    until(|| {
        one.engine.progress();
        other.engine.progress();
        other.is_linked() && one.is_linked()
    });
    drop(mute);
    let mut failed = 0;
    until(|| {
        one.engine.progress();
        failed += std::iter::from_fn(|| one.next()).filter(Result::is_err).count();
        failed == MANY as usize
    });
}

#[test]
fn who_answers_in_the_place_of_another_gets_nothing() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let name = Name::parse(&other.name()).unwrap();
    // Another endpoint had the same socket address before, for example a process of an earlier job.
    let earlier = Name { unique: name.unique ^ 1, ..name }.emit();
    let number = one.av.insert(earlier);
    one.send(number).unwrap();
    let mut outcome = None;
    until(|| {
        other.engine.progress();
        one.engine.progress();
        outcome = one.next();
        outcome.is_some()
    });
    assert_eq!(outcome, Some(Err(Errno(libc::EHOSTUNREACH))));
}

#[test]
fn a_peer_with_less_room_is_sent_less() {
    const ROOM: u32 = 100;
    let (mut one, mut other) = (Party::open(), Party::open());
    // The peer comes from a larger world, whose processes give each other less eager credit.
    other.engine.connections.data.own.introduction.eager_window = ROOM;
    other.engine.connections.data.core = Endpoint::new(Config {
        address: other.engine.connections.data.own.address,
        eager_window: ROOM,
        min_multi_recv: 64,
        operations_max: OPERATIONS_MAX,
    });
    let number = one.av.insert(other.name());
    let (mut sent, mut received) = ([7u8; 5_000], [0u8; 5_000]);
    let iov = |bytes: &mut [u8]| [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    one.engine.send(&SendRequest { payload: &iov(&mut sent), ..empty_message(number) }).unwrap();
    until(|| {
        one.engine.progress();
        other.engine.progress();
        other.is_linked() && one.is_linked()
    });
    other.receive(&iov(&mut received));
    let mut outcome = None;
    until(|| {
        one.engine.progress();
        other.engine.progress();
        outcome = other.next();
        outcome.is_some()
    });
    assert_eq!((outcome, received), (Some(Ok(())), sent));
}

#[test]
fn without_a_name_for_shared_memory_tcp_is_left() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let SocketAddr::V4(bind) = free else { panic!("an IPv4 address") };
    let name = local_endpoint::unix_name(Identity::current().unwrap(), false, 0, bind.port());
    let squatter = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let _squatter = std::os::unix::net::UnixListener::bind_addr(&squatter).unwrap();
    let party = Party::open_with(|setup| Setup { own_format: false, bind: Some(bind), ..setup });
    assert_eq!(
        local_endpoint::sockaddr_parts(&party.engine.connections.data.own.name),
        (*bind.ip(), bind.port())
    );
}

/// A relay, whose connection all peers share, reports in the same way that one peer cannot be
/// reached.
#[test]
fn memory_that_was_given_back_is_not_sent() {
    let mut party = Party::open();
    let (id, mut far_end) = party.link_to_relay();
    let number = party.av.insert(name_at(far_end.local_addr().unwrap(), 1));
    let peer = party.engine.connections.data.peer_of(number).unwrap();
    party.engine.connections.data.paths().use_link(peer, id);
    let mut bytes = vec![0xAB; 1 << 20];
    let payload = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    party.engine.send(&SendRequest { payload: &payload, ..empty_message(number) }).unwrap();
    let is_holding =
        |party: &Party| match &party.engine.connections.data.links[id].as_ref().unwrap().carrier {
            Carrier::Stream(stream) => stream.is_holding(),
            _ => false,
        };
    // The connection buffers less than a message; after a short read it sends a frame in part.
    let (mut seen, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    until(|| {
        party.engine.progress();
        let is_full = is_holding(&party);
        if !is_full && let Ok(count) = far_end.read(&mut buffer[..5_000]) {
            seen.extend_from_slice(&buffer[..count]);
        }
        is_full
    });
    party.engine.connections.fail_peer(peer, libc::EHOSTUNREACH);
    assert_eq!(party.next(), Some(Err(Errno(libc::EHOSTUNREACH))));
    bytes.fill(0xCD);
    until(|| {
        party.engine.progress();
        let was_holding = is_holding(&party);
        if let Ok(count) = far_end.read(&mut buffer) {
            seen.extend_from_slice(&buffer[..count]);
            return false;
        }
        !was_holding
    });
    let mut rest = &seen[..];
    while !rest.is_empty() {
        let header = Header::parse(rest).unwrap();
        let (frame, more) = rest.split_at(HEADER_BYTES + header.length as usize);
        let payload = &frame[HEADER_BYTES + KindHeader::size(header.kind, header.flags)..];
        assert!(payload.iter().all(|&byte| byte == 0xAB));
        rest = more;
    }
}

/// A payload of the peer is arriving on the relay's link, which has a lower number than a link to
/// the peer alone.
#[test]
fn a_peer_that_fails_during_its_payload_keeps_no_other_link() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let (id, mut far_end) = one.link_to_relay();
    let (direct, _far_end) = one.link_to_relay();
    let number = other.av.insert(far_end.local_addr().map(|at| name_at(at, 1)).unwrap());
    let bytes = [7; 1000];
    let sent = [Iov { base: bytes.as_ptr().cast_mut(), len: bytes.len() }];
    let message =
        endpoint::Message { memory: Bytes::borrow(&sent), tag: None, ..other.message_to(number) };
    other.engine.connections.data.core.send(message).unwrap();
    let peer = other.engine.connections.data.peer_of(number).unwrap();
    let properties = landbridge_proto::endpoint::PathProperties::RELAY;
    other.engine.connections.data.core.channel_mut(peer).open_path(links::RELAY_PATH, properties);
    let frame = other.engine.connections.data.core.poll_transmit(peer, links::RELAY_PATH).unwrap();
    let whole = [frame.front(), &bytes[..]].concat();
    let (first, rest) = whole.split_at(whole.len() - 500);
    let mut received = [0; 1000];
    let memory = [Iov { base: received.as_mut_ptr(), len: received.len() }];
    far_end.write_all(first).unwrap();
    until(|| one.engine.connections.read_stream(id) > 0);
    let (peer, _) = one.engine.connections.data.links[id].as_ref().unwrap().inside.unwrap();
    one.engine.connections.data.links[direct].as_mut().unwrap().peer = Some(peer);
    for _ in 0..2 {
        one.engine.connections.data.core.messages_mut().recv(Posting {
            source: Some(peer),
            memory: Bytes::borrow(&memory),
            tag: None,
            ticket: Ticket { context: 4, notify: true },
            multi: false,
        });
    }
    one.engine.connections.fail_peer(peer, libc::EHOSTUNREACH);
    assert!(one.engine.connections.data.links[direct].is_none());
    assert_eq!(one.next(), None, "the payload is still arriving");
    far_end.write_all(rest).unwrap();
    until(|| one.engine.connections.read_stream(id) > 0);
    assert_eq!(one.next(), Some(Ok(())));
    assert_eq!(one.next(), Some(Err(Errno(libc::EHOSTUNREACH))));
    assert_eq!(received, bytes);
}

/// A frame is summed before it is offered to the link, and every further message makes the engine
/// offer the frame again.
#[test]
fn what_has_no_room_is_offered_to_nobody_until_there_is() {
    let mut party = Party::open();
    let (id, far_end) = party.link_to_relay();
    let number = party.av.insert(name_at(far_end.local_addr().unwrap(), 1));
    let peer = party.engine.connections.data.peer_of(number).unwrap();
    party.engine.connections.data.paths().use_link(peer, id);
    let mut bytes = vec![0xAB; 64 << 10];
    let payload = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    let message = SendRequest { payload: &payload, ..empty_message(number) };
    for _ in 0..200 {
        party.engine.send(&message).unwrap();
    }
    let link = party.engine.connections.data.links[id].as_ref().unwrap();
    assert!(link.is_full());
    assert_eq!(link.blocked, [peer], "noted once");
    party.engine.connections.fail_peer(peer, libc::EHOSTUNREACH);
}

/// Through a relay, frames arrive from peers that this endpoint has not dialled.
#[test]
fn a_peer_that_was_only_heard_receives_goodbye() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let (id, mut far_end) = one.link_to_relay();
    let number = other.av.insert(name_at(far_end.local_addr().unwrap(), 1));
    let message = other.message_to(number);
    other.engine.connections.data.core.send(message).unwrap();
    let peer = other.engine.connections.data.peer_of(number).unwrap();
    other
        .engine
        .connections
        .data
        .core
        .channel_mut(peer)
        .open_path(links::RELAY_PATH, landbridge_proto::endpoint::PathProperties::RELAY);
    let frame = other
        .engine
        .connections
        .data
        .core
        .poll_transmit(peer, links::RELAY_PATH)
        .unwrap()
        .front()
        .to_vec();
    assert!(one.engine.connections.data.peers.active(&one.engine.connections.data.core).is_empty());
    far_end.write_all(&frame).unwrap();
    until(|| one.engine.connections.read_stream(id) > 0);
    let heard = one.engine.connections.data.peers.active(&one.engine.connections.data.core);
    assert_eq!(heard.len(), 1);
    assert_eq!(one.engine.connections.data.peers[heard[0]].send_state, SendState::Unknown);
}

/// The program may intend to cancel the receive, and a peer that has left does not make a receive
/// fail.
#[test]
fn what_is_to_come_from_a_peer_that_has_left_is_waited_for() {
    let (mut one, other, number) = linked();
    one.receive_from(number, &[]);
    leave(other, &mut one);
    one.receive_from(number, &[]);
    one.engine.progress();
    assert_eq!(one.next(), None);
}

/// The answer of a listener may have been corrupted on the network: a hello has no checksum.
#[test]
fn one_that_answers_strangely_is_called_again_but_not_for_ever() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut party = Party::open();
    let number = party.av.insert(name_at(listener.local_addr().unwrap(), 1));
    party.send(number).unwrap();
    let (mut calls, mut outcome) = (0, None);
    until(|| {
        party.engine.progress();
        if let Ok((mut caller, _)) = listener.accept() {
            calls += 1;
            assert!(caller.write_all(&[b'x'; 500]).is_ok());
        }
        outcome = party.next();
        outcome.is_some()
    });
    assert_eq!((calls, outcome), (reconnect::DENIALS_MAX, Some(Err(Errno(libc::ECONNRESET)))));
}

/// The side that has lost a connection to a further address may be the only side that has noticed
/// the loss, whichever side has dialled.
#[test]
fn a_lost_rail_is_tried_by_the_side_that_has_noticed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (own_ip, address) = (IpAddr::from([127, 0, 0, 2]), listener.local_addr().unwrap());
    let port = address.port();
    let IpAddr::V4(ip) = address.ip() else { panic!("an IPv4 address") };
    let has_called = |party: &mut Party| {
        party.engine.poll_epoll(0);
        listener.accept().is_ok()
    };
    let mut parties = [Party::open(), Party::open()];
    parties.sort_by_key(Party::name);
    let [smaller, mut larger] = parties;
    let number = larger.av.insert(smaller.name());
    let peer = larger.engine.connections.data.peer_of(number).unwrap();
    let ip = ip.to_ipv6_mapped().octets();
    larger
        .engine
        .connections
        .data
        .handle_advertisement(peer, &AdvertisedAddress { ip, port, token: None });
    larger.engine.connections.handle_pending();
    assert!(!has_called(&mut larger), "the peer dials");
    assert!(
        !larger.engine.connections.data.peers.rails.handle_lost(peer, Some((own_ip, own_ip)), 7),
        "no rail"
    );
    assert!(larger.engine.connections.data.peers.rails.handle_lost(
        peer,
        Some((own_ip, address.ip())),
        7
    ));
    until(|| has_called(&mut larger));
}

/// The name of an endpoint on another node, which peers dial at `address`, without a process.
fn name_at(address: SocketAddr, unique: u64) -> crate::av::AvName {
    let SocketAddr::V4(address) = address else { panic!("an IPv4 address") };
    let ip = address.ip().to_ipv6_mapped().octets();
    let (cluster, port) = (ClusterId(0), address.port());
    let further = Default::default();
    Name { address: Address::ANONYMOUS, unique, cluster, node: 1, ip, further, port }.emit()
}

/// An engine with the objects that it needs.
struct Party {
    av: Arc<Av>,
    queue: Arc<Queue>,
    engine: Engine,
}

impl Party {
    /// Takes `link` for the connection to the relay.
    fn attach_relay(&mut self, link: Link) -> usize {
        let connections = &mut self.engine.connections;
        let id = connections.data.links.len();
        connections.data.links.push(Some(Box::new(link)));
        connections.data.links.rings.push(id);
        connections.relay_up(id);
        id
    }

    fn open() -> Party {
        Party::open_with(|setup| setup)
    }

    fn open_with(change: impl FnOnce(Setup) -> Setup) -> Party {
        let (av, queue) = (Arc::new(Av::default()), Arc::new(Queue::new(EntryFormat::Tagged, 0)));
        let both = || Some(Arc::clone(&queue));
        let sink = Sink { transmit: both(), receive: both(), ..Sink::default() };
        let setup = Setup {
            role: EndpointRole::Program,
            domain_mr: Arc::default(),
            av: Arc::clone(&av),
            sink,
            own_format: true,
            bind: None,
            min_multi_recv: 64,
            source_wanted: false,
        };
        Party { av, queue, engine: Engine::open(change(setup)).unwrap() }
    }

    fn name(&self) -> crate::av::AvName {
        self.engine.name().try_into().unwrap()
    }

    fn is_linked(&self) -> bool {
        self.engine
            .connections
            .data
            .peers
            .iter()
            .any(|peer_state| matches!(peer_state.send_state, SendState::Up(_)))
    }

    fn send(&mut self, target: FiAddr) -> Result<(), Errno> {
        self.engine.send(&empty_message(target))
    }

    fn peek(&mut self, tag: u64) -> Result<(), Errno> {
        self.engine.peek(&any_source(tag))
    }

    fn message_to(&mut self, number: FiAddr) -> endpoint::Message<Bytes> {
        endpoint::Message {
            peer: self.engine.connections.data.peer_of(number).unwrap(),
            memory: Bytes::borrow(&[]),
            tag: Some(1),
            data: None,
            ticket: Ticket { context: 1, notify: false },
            level: endpoint::CompletionLevel::TransmitComplete,
        }
    }

    /// A connection with small buffers to the relay, and its other end.
    fn link_to_relay(&mut self) -> (usize, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 1 << 16).unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1 << 16).unwrap();
        let (far_end, _) = listener.accept().unwrap();
        far_end.set_nonblocking(true).unwrap();
        let carrier = Carrier::Stream(Box::new(StreamLink::new(ours.into()).unwrap()));
        let engine = &mut self.engine;
        let id = engine.connections.data.links.len();
        engine.connections.data.links.push(Some(Box::new(Link::new(carrier, None))));
        engine.connections.data.links[id]
            .as_ref()
            .unwrap()
            .watch(&engine.connections.data.own.epoll, id)
            .unwrap();
        engine.connections.data.links.streams += 1;
        (id, far_end)
    }

    fn receive(&mut self, payload: &[Iov]) {
        self.receive_from(abi::ADDR_UNSPEC, payload);
    }

    fn receive_from(&mut self, source: FiAddr, payload: &[Iov]) {
        let request =
            RecvRequest { source, payload, tag: None, context: 4, notify: true, multi: false };
        self.engine.recv(&request).unwrap();
    }

    fn write(&mut self, target: FiAddr) -> Result<(), Errno> {
        self.engine.rma(&RmaRequest {
            kind: RmaKind::Write,
            target,
            local: &[],
            remote: RemoteIov { offset: 0, len: 0, key: 1 },
            data: None,
            context: 2,
            inject: false,
            notify: true,
        })
    }

    /// The next completion, without a poll of the network.
    fn next(&self) -> Option<Result<(), Errno>> {
        self.next_flags().map(|flags| flags.map(drop))
    }

    /// The flags of the next completion, without a poll of the network.
    fn next_flags(&self) -> Option<Result<u64, Errno>> {
        let mut entry = MaybeUninit::<CqTaggedEntry>::uninit();
        // SAFETY: the buffer holds the one requested entry.
        let read = unsafe { self.queue.read(entry.as_mut_ptr().cast(), 1, std::ptr::null_mut()) };
        match read {
            // SAFETY: the entry was written.
            Ok(_) => Some(Ok(unsafe { entry.assume_init() }.flags)),
            Err(Errno::EAVAIL) => self.queue.read_error().map(|error| Err(Errno(error.err))),
            Err(_) => None,
        }
    }
}

/// Two parties, the first of which has sent the second a message, and the second party's number in
/// the first party's address vector.
fn linked() -> (Party, Party, FiAddr) {
    let (mut one, mut other) = (Party::open(), Party::open());
    let number = one.av.insert(other.name());
    one.send(number).unwrap();
    until(|| {
        other.engine.progress();
        one.engine.progress();
        other.is_linked() && one.is_linked()
    });
    assert_eq!(one.next(), Some(Ok(())));
    (one, other, number)
}

/// Closes `one` in good order, and waits until `other` has noticed.
fn leave(mut one: Party, other: &mut Party) {
    one.engine.close();
    drop(one);
    until(|| {
        other.engine.progress();
        other.engine.connections.data.peers[Peer(0)].send_state == SendState::Closed
    });
}

fn empty_message(target: FiAddr) -> SendRequest<'static> {
    SendRequest {
        target,
        payload: &[],
        tag: None,
        data: None,
        context: 1,
        inject: false,
        notify: true,
        level: CompletionLevel::Transmit,
    }
}

fn any_source(tag: u64) -> PeekRequest {
    PeekRequest {
        source: abi::ADDR_UNSPEC,
        tag,
        ignore: 0,
        context: 3,
        claim: false,
        discard: false,
        repeats: false,
    }
}

fn until(mut is_done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_done() {
        assert!(Instant::now() < deadline, "it takes too long");
    }
}

#[test]
fn a_thread_that_wants_an_endpoint_wakes_the_one_that_sleeps_in_it() {
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::engine_set::EngineSet;
    use crate::parking::SharedEngine;

    const TURNS: u32 = 20;
    let port = SharedEngine::new(Party::open().engine);
    let ports = EngineSet::new();
    ports.add(&port);
    let (is_done, start) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                ports.wait(1_000);
            }
        });
        for _ in 0..TURNS {
            // The other thread has enough time to sleep again.
            std::thread::sleep(Duration::from_millis(5));
            port.with(|_| ());
        }
        is_done.store(true, Ordering::Relaxed);
        port.with(|_| ());
    });
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_thread_that_sleeps_in_one_endpoint_hears_the_others_too() {
    use crate::parking::{self, SharedEngine};

    const NAP: Duration = Duration::from_secs(10);
    let (mut one, other) = (Party::open(), Party::open());
    let number = one.av.insert(other.name());
    let (idle, addressed) =
        (SharedEngine::new(Party::open().engine), SharedEngine::new(other.engine));
    // The link is up, and no frame is in flight.
    one.send(number).unwrap();
    until(|| {
        one.engine.progress();
        addressed.with(Engine::progress);
        one.is_linked() && one.next().is_some()
    });
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            one.send(number).unwrap();
        });
        // A library that polls its endpoints in turn reaches the idle endpoint in this way.
        idle.with(|engine| parking::wait(engine, NAP.as_millis() as i32));
    });
    assert!(start.elapsed() < NAP / 2, "woken after {:?}", start.elapsed());
}
