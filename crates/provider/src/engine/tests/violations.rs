//! Tests of frames on the uplink that contradict the protocol.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_proto::wire::frame::{CHECKSUM_AT, Kind, flag};

use super::*;

/// The indices of two peers that the relay reaches.
const LIAR: u32 = 7;
const HONEST: u32 = 8;

/// The first frame of a peer, without a payload.
fn frame(of: u32, kind: Kind, head: KindHeader, own: Address, sum: Checksum) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES + 48];
    let size = head.emit(&mut bytes[HEADER_BYTES..]);
    bytes.truncate(HEADER_BYTES + size);
    let header = Header {
        kind,
        flags: if sum == Checksum::Off { 0 } else { flag::CHECKED },
        hops: 0,
        length: size as u32,
        source: Address::new(of, 0),
        target: own,
        sequence: 0,
        delivered: 0,
        credit: 0,
    };
    header.emit(&mut bytes);
    let check = sum.of(&bytes);
    bytes[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    bytes[6] = 2;
    bytes
}

#[test]
fn a_peer_that_breaks_the_protocol_on_the_uplink_is_given_up_alone() {
    for sum in [Checksum::Crc32c, Checksum::Off] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = ShmLink::dial(ours.into(), Mapper::ANYWHERE).unwrap();
        let memory = ShmLink::receive_memory(theirs.as_fd()).unwrap();
        let mut relay = ShmLink::accept(theirs.into(), memory, Mapper::ANYWHERE).unwrap();
        let mut party = Party::open();
        let link = Link { sum, ..Link::new(Carrier::Shm(Box::new(ours)), None) };
        let id = party.attach_relay(link);
        let own = party.engine.connections.data.own.address;
        party.receive(&[]);
        let grant = KindHeader::Grant { send: 99, recv: 1, limit: 1 };
        let message = KindHeader::Message { tag: 0, data: 0, long: None };
        let lie = frame(LIAR, Kind::Grant, grant, own, sum);
        // The liar does not notice at once that it was given up.
        assert!(relay.send(&lie, &[]) && relay.send(&lie, &[]));
        assert!(relay.send(&frame(HONEST, Kind::Message, message, own, sum), &[]));
        party.engine.progress();
        let engine = &mut party.engine.connections.data;
        let [liar, honest] = [LIAR, HONEST]
            .map(|index| engine.peers.addressed(&mut engine.core, Address::new(index, 0)));
        let failed = [liar, honest].map(|peer| engine.core.channel(peer).failed());
        match sum {
            // Without a checksum nobody knows who has made the frame.
            Checksum::Off => {
                assert_eq!((failed, engine.links[id].is_some()), ([None; 2], false));
                assert_eq!(party.next(), None);
            }
            _ => {
                let expected = [Some(libc::ECONNRESET), None];
                assert_eq!((failed, engine.links[id].is_some()), (expected, true));
                assert_eq!(party.next(), Some(Ok(())), "the message of the other peer");
            }
        }
    }
}
