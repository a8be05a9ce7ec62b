//! Tests of lost paths, and of the paths that replace them.

use std::os::fd::OwnedFd;

use landbridge_drive::checksum::Checksum;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::PathProperties;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};

use super::*;

/// A connection to a port at this address, and its other end.
fn connection(ip: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((ip, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

fn link_up(party: &mut Party, peer: Peer, socket: TcpStream) -> usize {
    let carrier = Carrier::Stream(Box::new(StreamLink::new(socket.into()).unwrap()));
    party.engine.connections.link_up(Some(peer), carrier, 1, false).unwrap()
}

/// An endpoint with a connection to a peer, at whose address no process listens at the moment.
fn linked() -> (Party, Peer, usize, OwnedFd, TcpStream) {
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&taken, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = SocketAddr::try_from(getsockname(&taken).unwrap()).unwrap();
    let mut party = Party::open();
    let number = party.av.insert(name_at(address, 1));
    let peer = party.engine.connections.data.peer_of(number).unwrap();
    let (near, far) = connection("127.0.0.1");
    let id = link_up(&mut party, peer, near);
    (party, peer, id, taken, far)
}

fn has_repair(party: &Party, peer: Peer) -> bool {
    party.engine.connections.data.peers[peer].reconnect.is_some()
}

#[test]
fn a_further_address_that_comes_back_first_does_not_stand_in_for_the_main_one() {
    let (mut party, peer, main, taken, _far) = linked();
    let (near, far) = connection("127.0.0.2");
    party.engine.connections.data.peers.rails.add(
        peer,
        near.peer_addr().unwrap(),
        false,
        Instant::now(),
    );
    let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    party.engine.connections.link_down(main, &reset);
    assert!(has_repair(&party, peer));
    let rail = link_up(&mut party, peer, near);
    assert_eq!(party.engine.connections.data.peers[peer].send_state, SendState::Up(rail));

    // A process listens at the address again.
    listen(&taken, 8).unwrap();
    let listener = TcpListener::from(taken);
    listener.set_nonblocking(true).unwrap();
    until(|| {
        party.engine.progress();
        listener.accept().is_ok()
    });
    let (near, _far) = connection("127.0.0.1");
    link_up(&mut party, peer, near);
    assert!(!has_repair(&party, peer));
    drop(far);
}

#[test]
fn a_path_that_is_heard_again_does_not_stand_in_for_one_that_was_lost() {
    for is_lost in [false, true] {
        let (mut party, peer, main, _taken, _far) = linked();
        let (near, _far) = connection("127.0.0.3");
        let silent = link_up(&mut party, peer, near);
        party.engine.connections.data.links[silent].as_mut().unwrap().health.is_unresponsive = true;
        party.engine.connections.begin_reconnect(peer, false);
        if is_lost {
            let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
            party.engine.connections.link_down(main, &reset);
        }
        party.engine.connections.data.paths().clear_suspicion(silent);
        assert_eq!(has_repair(&party, peer), is_lost);
    }
}

/// A whole message of five bytes with checksums.
fn message_frame() -> Vec<u8> {
    let mut other = Party::open();
    let number = other.av.insert(name_at(SocketAddr::from(([127, 0, 0, 1], 9)), 1));
    let mut bytes = [7; 5];
    let iov = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    let message = endpoint::Message { memory: Bytes::borrow(&iov), ..other.message_to(number) };
    let (peer, path) = (other.engine.connections.data.peer_of(number).unwrap(), PathId(1));
    let core = &mut other.engine.connections.data.core;
    core.send(message).unwrap();
    core.channel_mut(peer)
        .open_path(path, PathProperties { checked: true, ..PathProperties::RELAY });
    let mut frame = core.poll_transmit(peer, path).unwrap();
    let payload = frame.payload;
    // SAFETY: the memory is in this stack frame.
    unsafe { integrity::fill_in(Checksum::Crc32c, &mut frame, payload) };
    [frame.front(), &bytes[..]].concat()
}

/// The corrupt frame is also counted when it arrives in parts, and when its path is closed and
/// dialled again.
#[test]
fn what_arrives_corrupt_over_tcp_is_counted_for_its_path() {
    let (mut party, peer, id, _taken, mut far) = linked();
    party.engine.connections.data.links[id].as_mut().unwrap().sum = Checksum::Crc32c;
    let path_of =
        |party: &Party| party.engine.connections.data.path_report().paths_of(peer)[0].clone();
    assert_eq!((path_of(&party).what, path_of(&party).corrupt), ("tcp", 0));
    let mut frame = message_frame();
    let last = frame.len() - 1;
    frame[last] ^= 1;
    far.write_all(&frame).unwrap();
    until(|| party.engine.connections.read_stream(id) > 0);
    assert_eq!(path_of(&party).corrupt, 1);

    far.write_all(&frame[..last]).unwrap();
    until(|| party.engine.connections.read_stream(id) > 0);
    far.write_all(&frame[last..]).unwrap();
    until(|| party.engine.connections.read_stream(id) > 0);
    assert_eq!(path_of(&party).corrupt, 2);

    frame[8] ^= 1;
    far.write_all(&frame).unwrap();
    until(|| party.engine.connections.read_stream(id) > 0);
    let path = path_of(&party);
    assert_eq!((path.corrupt, path.losses, path.state), (3, 1, path_statistics::PathState::Down));
}

/// The sender of a lossless path has nothing to send again.
#[test]
fn what_arrives_corrupt_by_a_lossless_path_ends_the_path() {
    let (mut party, peer, id, _taken, mut far) = linked();
    let link = party.engine.connections.data.links[id].as_mut().unwrap();
    link.sum = Checksum::Crc32c;
    let properties = PathProperties { checked: true, lossless: true, ..PathProperties::RELAY };
    let path = link.path;
    party.engine.connections.data.core.channel_mut(peer).set_path(path, properties);
    let mut frame = message_frame();
    let last = frame.len() - 1;
    frame[last] ^= 1;
    far.write_all(&frame).unwrap();
    until(|| party.engine.connections.read_stream(id) > 0);
    let found = party.engine.connections.data.path_report().paths_of(peer)[0].clone();
    assert_eq!((found.corrupt, found.losses), (1, 1));
    assert_eq!(found.state, path_statistics::PathState::Down);
}
