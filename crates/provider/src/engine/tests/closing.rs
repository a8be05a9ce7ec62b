//! Tests of what closing waits for, and of the statistics of paths.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::wire::frame::Kind;

use super::*;

/// The index of a peer that the relay reaches.
const PEER: u32 = 7;

/// The peer's confirmation of all bytes below `delivered`.
fn confirmation(own: Address, delivered: u64) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    let empty = Header {
        kind: Kind::Ack,
        flags: 0,
        hops: 1,
        length: 0,
        source: Address::new(PEER, 0),
        target: own,
        sequence: 0,
        delivered,
        credit: 0,
    };
    empty.emit(&mut bytes);
    bytes
}

/// A relay may lose what it has accepted when the network behind it breaks, and a process that has
/// ended retransmits nothing.
#[test]
fn closing_waits_until_what_a_relay_in_shared_memory_has_taken_has_arrived() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ours = ShmLink::dial(ours.into(), Mapper::ANYWHERE).unwrap();
    let memory = ShmLink::receive_memory(theirs.as_fd()).unwrap();
    let mut relay = ShmLink::accept(theirs.into(), memory, Mapper::ANYWHERE).unwrap();
    let mut party = Party::open();
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 9));
    let name =
        Name { address: Address::new(PEER, 0), ..Name::parse(&name_at(nowhere, 1)).unwrap() };
    let number = party.av.insert(name.emit());
    let id = party.attach_relay(Link::new(Carrier::Shm(Box::new(ours)), None));
    let engine = &mut party.engine;
    let peer = engine.connections.data.peer_of(number).unwrap();
    engine.connections.data.paths().use_link(peer, id);
    let own = engine.connections.data.own.address;
    party.send(number).unwrap();
    let closing = std::thread::spawn(move || {
        party.engine.close();
        party.engine.connections.data.path_report().paths_of(peer)
    });
    let (mut seen, mut bytes) = (Vec::new(), 0);
    until(|| {
        while let Some(frame) = relay.peek().unwrap() {
            let header = Header::parse(frame).unwrap();
            bytes = bytes.max(header.sequence + u64::from(header.length));
            seen.push(header.kind);
            relay.consume();
        }
        seen.contains(&Kind::Goodbye)
    });
    // Longer than the endpoint waits for the confirmation of its Goodbye alone.
    std::thread::sleep(DRAIN_TIME_MAX + Duration::from_millis(300));
    assert!(!closing.is_finished(), "nobody has confirmed {seen:?}");
    assert!(relay.send(&confirmation(own, bytes), &[]));
    until(|| closing.is_finished());
    let paths = closing.join().unwrap();
    assert_eq!(paths.iter().map(|path| path.what).collect::<Vec<_>>(), ["relay"]);
    assert_eq!(paths[0].state, path_statistics::PathState::Up);
}
