//! One harness for relays: frames, the turns of a driver, a disk, and two relays with the far ends
//! of all their links.
//!
//! What enters: bytes that the far end of a link has sent. What leaves: bytes that a relay has
//! written. What may never happen: the harness does to a relay what no driver can do; so it uses
//! the public interface alone, and drains the relay after each input.
//!
//! | module | holds |
//! |---|---|
//! | `disk` | segments of message logs, and pending requests |
//! | `relay_pair` | two relays, their ranks, and the streams between them |

mod disk;
mod relay_pair;

pub use disk::{Disk, Served};
pub use relay_pair::{FarEnd, RelayPair};

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{
    Consumed, LogLimits, MESSAGE_LOGS_BYTES_MAX, Relay, SEGMENT_BYTES, Stop,
};
use landbridge_proto::route::routing_table::{ClusterRange, LinkId};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};

/// Bounds of message logs that stay in memory, which no test fills.
pub const LOGS_IN_MEMORY: LogLimits =
    LogLimits { memory: MESSAGE_LOGS_BYTES_MAX, disk: None, segment: SEGMENT_BYTES };

/// The relay of cluster `own` of two clusters, each of `ranks` ranks.
pub fn relay(own: u16, ranks: u32, now_millis: u64) -> Relay {
    let clusters = [0, ranks].map(|first| ClusterRange { first, count: ranks, spawned: 0 });
    // The two ranges contradict nothing.
    Relay::new(ClusterId(own), clusters.to_vec(), now_millis).unwrap()
}

/// The first endpoint of the rank `index`.
pub fn rank(index: u32) -> Address {
    Address::new(index, 0)
}

// ---- frames ------------------------------------------------------------------------------

/// The header of a frame without a body.
pub fn empty(kind: Kind, source: Address, target: Address) -> Header {
    let (length, flags, hops, sequence, delivered, credit) = (0, 0, 0, 0, 0, 0);
    Header { length, kind, flags, hops, source, target, sequence, delivered, credit }
}

/// The bytes of a frame with this body.
pub fn emit(header: Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    Header { length: body.len() as u32, ..header }.emit(&mut bytes);
    bytes.extend_from_slice(body);
    bytes
}

/// A frame of a kind without a kind header, so that any length is valid. The body repeats
/// `sequence`, counted up.
pub fn frame(source: Address, target: Address, sequence: u64, length: usize) -> Vec<u8> {
    let body: Vec<u8> = (sequence..sequence + length as u64).map(|n| n as u8).collect();
    emit(Header { sequence, ..empty(Kind::Ack, source, target) }, &body)
}

/// The determinant of `source` that `frames` frames were delivered at the poll number `polls`
/// since the determinant before, after `micros` microseconds.
pub fn determinant(source: Address, polls: u64, frames: u32, micros: u64) -> Vec<u8> {
    let header = empty(Kind::Determinant, source, Address::ANONYMOUS);
    emit(Header { sequence: polls, credit: frames, delivered: micros, ..header }, &[])
}

/// A frame with which `source` says goodbye to `target`.
pub fn goodbye(source: Address, target: Address) -> Vec<u8> {
    emit(empty(Kind::Goodbye, source, target), &[0; 8])
}

/// A keepalive of a peer relay that has received `delivered` bytes.
pub fn keepalive(delivered: u64) -> Vec<u8> {
    let nobody = Address::ANONYMOUS;
    emit(Header { delivered, ..empty(Kind::Keepalive, nobody, nobody) }, &[])
}

/// The whole frames at the front of `bytes`: header, and all bytes of the frame.
pub fn frames(mut bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || {
        let header = Header::parse(bytes).ok()?;
        let (frame, rest) = bytes.split_at_checked(HEADER_BYTES + header.length as usize)?;
        bytes = rest;
        Some((header, frame))
    })
}

// ---- turns of a driver -------------------------------------------------------------------

/// Hands `input` to the relay and removes what the relay has handled. Nothing is written: frames
/// for other links wait there.
pub fn read(relay: &mut Relay, from: LinkId, input: &mut Vec<u8>) -> Consumed {
    let consumed = relay.handle_input(from, input);
    flush(relay, input, |_, _| ());
    input.drain(..consumed.bytes);
    consumed
}

/// Hands `bytes` to the relay, as [`read`] does, and drops what the relay does not handle. Returns
/// why the relay stopped there.
pub fn feed(relay: &mut Relay, from: LinkId, mut bytes: Vec<u8>) -> Stop {
    read(relay, from, &mut bytes).stop
}

/// Drains the relay after an input whose buffer was `buffer`: each link that has something new to
/// write may `write`, and what it leaves is kept.
pub fn flush(relay: &mut Relay, buffer: &[u8], mut write: impl FnMut(&mut Relay, LinkId)) {
    while let Some(output) = relay.poll_flush() {
        for number in 0..relay.ports().writer_count(output) {
            if let Some(writer) = relay.ports().writer(output, number) {
                write(relay, writer);
            }
        }
        relay.keep(output, buffer);
    }
}

/// Writes what waits for `link` to `to`, which holds at most `capacity` bytes. Returns whether
/// bytes remained because `to` was full.
pub fn write(
    relay: &mut Relay,
    link: LinkId,
    buffer: &[u8],
    to: &mut Vec<u8>,
    capacity: usize,
) -> bool {
    loop {
        let before = to.len();
        let mut is_full = false;
        for slice in relay.slices(link, buffer) {
            let left = capacity.saturating_sub(to.len());
            to.extend(&slice[..slice.len().min(left)]);
            is_full = slice.len() > left;
            if is_full {
                break;
            }
        }
        let written = to.len() - before;
        relay.handle_sent(link, written, buffer);
        if is_full || written == 0 || !relay.has_output(link) {
            return is_full;
        }
    }
}

/// Bytes that wait for `link`.
pub fn waiting(relay: &Relay, link: LinkId) -> usize {
    relay.slices(link, &[]).map(<[u8]>::len).sum()
}

/// Writes once what waits for `link`, pending reports included: the bytes.
pub fn write_all(relay: &mut Relay, link: LinkId) -> Vec<u8> {
    flush(relay, &[], |_, _| ());
    let bytes: Vec<u8> = relay.slices(link, &[]).flatten().copied().collect();
    relay.handle_sent(link, bytes.len(), &[]);
    bytes
}

/// Writes once what waits for `link`, pending reports included: the headers of the frames, all of
/// which must be whole.
pub fn write_frames(relay: &mut Relay, link: LinkId) -> Vec<Header> {
    let bytes = write_all(relay, link);
    let headers: Vec<Header> = frames(&bytes).map(|(header, _)| header).collect();
    let whole = headers.iter().map(|header| HEADER_BYTES + header.length as usize).sum();
    assert_eq!(bytes.len(), whole, "not only whole frames: {headers:?}");
    headers
}
