//! Tests of peers with several known addresses, and of the addresses that the engine dials.

use std::net::Ipv4Addr;

use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};

use super::super::candidates::PathCandidate;
use super::*;

/// A listener with a full queue, which neither answers nor refuses connections, as an interface
/// that leads nowhere.
struct Hole {
    address: SocketAddr,
    _open: (std::os::fd::OwnedFd, TcpStream),
}

impl Hole {
    fn at(ip: [u8; 4]) -> Hole {
        let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddr::from((ip, 0))).unwrap();
        listen(&listener, 0).unwrap();
        let address = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
        Hole { address, _open: (listener, TcpStream::connect(address).unwrap()) }
    }
}

/// A peer on another node with first address `address`, and a further address with the same port.
fn peer_at(party: &mut Party, address: SocketAddr, further: [u8; 4]) -> FiAddr {
    let name = Name::parse(&name_at(address, 1)).unwrap();
    let mut name = Name { node: 1, ..name };
    name.further[0] = further;
    party.av.insert(name.emit())
}

#[test]
fn a_peer_whose_first_address_leads_nowhere_is_called_at_a_further_one() {
    let hole = Hole::at([127, 0, 0, 4]);
    let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 5), hole.address.port())).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut party = Party::open();
    let number = peer_at(&mut party, hole.address, [127, 0, 0, 5]);
    let began = Instant::now();
    party.send(number).unwrap();
    until(|| {
        party.engine.progress();
        listener.accept().is_ok()
    });
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
}

#[test]
fn one_that_refuses_at_its_first_address_is_gone_though_a_further_one_is_silent() {
    let hole = Hole::at([127, 0, 0, 6]);
    let mut party = Party::open();
    let number = peer_at(
        &mut party,
        SocketAddr::from(([127, 0, 0, 7], hole.address.port())),
        [127, 0, 0, 6],
    );
    party.send(number).unwrap();
    let mut outcome = None;
    until(|| {
        party.engine.progress();
        outcome = party.next();
        outcome.is_some()
    });
    assert_eq!(outcome, Some(Err(Errno(libc::ECONNRESET))));
}

#[test]
fn an_address_that_both_nodes_have_is_not_called() {
    let mut party = Party::open();
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = own.local_addr().unwrap();
    for ours in party.engine.connections.data.identity.rails.clone() {
        let IpAddr::V4(ip) = ours else { continue };
        let number = peer_at(&mut party, address, ip.octets());
        let peer = party.engine.connections.data.peer_of(number).unwrap();
        let candidates = party.engine.connections.data.paths().candidates(peer);
        let ours = SocketAddr::new(ours, address.port());
        let is_ours = |it: &PathCandidate| matches!(it, PathCandidate::Further(to) if *to == ours);
        assert!(!candidates.iter().any(is_ours), "{candidates:?}");
    }
}
