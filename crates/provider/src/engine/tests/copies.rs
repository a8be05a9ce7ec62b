//! Tests of the copies that are retained for retransmission, and of their bound.

use super::datagrams::Pair;
use super::*;

/// During this number of polls nothing happens that needs the peer.
const LOOKS: usize = 200;

#[test]
fn without_room_for_copies_what_is_injected_waits_until_the_peer_has_the_rest() {
    let mut pair = Pair::join(|party| party.engine.connections.data.buffers.retain = 0);
    let mut bytes = [7u8; 100];
    let payload = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    let plain = SendRequest { payload: &payload, ..empty_message(pair.number) };
    let injected = SendRequest { inject: true, notify: false, ..plain };
    // No copy is retained for the peer yet.
    pair.one.engine.send(&injected).unwrap();
    for _ in 0..LOOKS {
        assert_eq!(pair.one.engine.send(&injected), Err(Errno::EAGAIN));
    }
    until(|| pair.turn() && pair.one.engine.send(&injected).is_ok());
}

#[test]
fn without_room_for_copies_a_send_ends_when_the_peer_has_it() {
    let mut pair = Pair::join(|party| party.engine.connections.data.buffers.retain = 0);
    let mut bytes = [7u8; 100];
    let payload = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    let plain = SendRequest { payload: &payload, ..empty_message(pair.number) };
    pair.one.engine.send(&plain).unwrap();
    for _ in 0..LOOKS {
        pair.one.engine.progress();
        assert_eq!(pair.one.next(), None);
    }
    until(|| pair.turn() && pair.one.next() == Some(Ok(())));
    pair.one.engine.connections.data.buffers.retain = 1 << 20;
    pair.one.engine.send(&plain).unwrap();
    assert_eq!(pair.one.next(), Some(Ok(())), "its copy stands in for it");
}
