//! Tests of small frames that follow each other over TCP.

use super::*;
use crate::parking::SharedEngine;

/// An endpoint with a connection to a peer, and the other end of the connection. Nothing is under
/// way.
fn linked_to_socket() -> (Party, FiAddr, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut far = listener.accept().unwrap().0;
    far.set_nonblocking(true).unwrap();
    let mut party = Party::open();
    let number = party.av.insert(name_at(listener.local_addr().unwrap(), 1));
    let peer = party.engine.connections.data.peer_of(number).unwrap();
    let carrier = Carrier::Stream(Box::new(StreamLink::new(near.into()).unwrap()));
    party.engine.connections.link_up(Some(peer), carrier, 1, false).unwrap();
    party.engine.progress();
    arrived(&mut far);
    (party, number, far)
}

/// The number of bytes that have arrived.
fn arrived(far: &mut TcpStream) -> usize {
    let mut room = [0; 4096];
    let mut bytes = 0;
    while let Ok(more) = far.read(&mut room) {
        assert_ne!(more, 0, "the connection has ended");
        bytes += more;
    }
    bytes
}

fn bytes_until(far: &mut TcpStream, wanted: usize) {
    let mut bytes = 0;
    until(|| {
        bytes += arrived(far);
        bytes >= wanted
    });
    assert_eq!(bytes, wanted);
}

#[test]
fn the_first_of_several_messages_leaves_at_once_and_the_others_with_the_next_poll() {
    let (mut party, number, mut far) = linked_to_socket();
    party.send(number).unwrap();
    let mut frame = 0;
    until(|| {
        frame = arrived(&mut far);
        frame > 0
    });
    assert!(!party.engine.has_gathered(), "a lone message does not wait");
    for _ in 0..2 {
        party.send(number).unwrap();
    }
    assert!(party.engine.has_gathered());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(arrived(&mut far), 0, "they wait for each other");
    party.engine.progress();
    bytes_until(&mut far, 2 * frame);
    assert!(!party.engine.has_gathered());
    party.send(number).unwrap();
    bytes_until(&mut far, frame);
}

#[test]
fn what_waits_leaves_although_the_program_never_calls_again() {
    let (mut party, number, mut far) = linked_to_socket();
    party.send(number).unwrap();
    let mut frame = 0;
    until(|| {
        frame = arrived(&mut far);
        frame > 0
    });
    let port = SharedEngine::new(party.engine);
    for round in 0..3 {
        port.with(|engine| {
            for _ in 0..10 {
                engine.send(&empty_message(number)).unwrap();
            }
        });
        bytes_until(&mut far, 10 * frame);
        // The background thread sleeps in the meantime.
        std::thread::sleep(Duration::from_millis(20 * round));
    }
}
