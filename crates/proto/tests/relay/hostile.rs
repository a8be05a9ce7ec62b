//! An endpoint that sends arbitrary frames under a random seed: every receiver can parse the frames
//! that the relay forwards, and a refused frame ends only the connection of its sender.

use landbridge_proto::limit::KIND_HEADER_BYTES_MAX;
use landbridge_proto::wire::kind_header::KindHeader;

use super::*;

const SEEDS: u64 = 4_000;
/// Frames of one connection, unless the relay refuses one before.
const FRAMES: usize = 30;

/// A frame of rank 1 that is valid with some probability.
fn lie(chance: &mut Chance, is_checked: bool) -> Vec<u8> {
    let mut kind = Kind::ALL[chance.below(Kind::ALL.len())];
    // A kind that no endpoint sends to another is refused, whatever else the frame contains.
    if !kind.is_between_endpoints() && chance.percent(80) {
        kind = Kind::Ack;
    }
    let mut flags = chance.below(1 + usize::from(flag::ALL)) as u8;
    if chance.percent(80) {
        flags = if is_checked { flags | flag::CHECKED } else { flags & !flag::CHECKED };
    }
    let head = KindHeader::size(kind, flags);
    let length = match chance.below(10) {
        0 => chance.below(head + 1),
        1 | 2 => chance.below(2 * KIND_HEADER_BYTES_MAX),
        3 | 4 => head + chance.below(300),
        _ => head,
    };
    let mut bytes = frame(rank(1), rank(chance.below(6) as u32), 0, length);
    (bytes[4], bytes[5]) = (kind as u8, flags);
    for byte in &mut bytes[HEADER_BYTES..] {
        *byte = if chance.percent(50) { 0 } else { chance.below(256) as u8 };
    }
    bytes[7] = framing_crc(&bytes);
    if bytes.len() >= HEADER_BYTES + head {
        let check = sum(&[&bytes[..36], &bytes[HEADER_BYTES..HEADER_BYTES + head]].concat());
        bytes[36..40].copy_from_slice(&check.to_le_bytes());
    }
    if chance.percent(10) {
        let at = chance.below(bytes.len());
        bytes[at] ^= 1 << chance.below(8);
    }
    bytes
}

/// Number of frames of rank 1 that wait for `link`. The reader must be able to parse every waiting
/// frame without ending its connection.
fn readable(relay: &mut Relay, link: LinkId, is_checked: bool, seed: u64) -> usize {
    let bytes = write_all(relay, link);
    let (mut whole, mut count) = (0, 0);
    for (header, frame) in frames(&bytes) {
        whole += frame.len();
        if header.source != Address::ANONYMOUS && !header.kind.reports_undeliverable() {
            assert!([rank(1), rank(3)].contains(&header.source), "seed {seed}: {header:?}");
            let head = KindHeader::size(header.kind, header.flags);
            let body = &frame[HEADER_BYTES..];
            let is_readable = header.payload(head).is_ok()
                && KindHeader::parse(header.kind, header.flags, body).is_ok()
                && (!is_checked || header.verify(&frame[..HEADER_BYTES + head], sum).is_ok());
            assert!(is_readable, "seed {seed}: passed on, and nobody can read it: {header:?}");
            count += usize::from(header.source == rank(1));
        }
    }
    assert_eq!(whole, bytes.len(), "seed {seed}: not only whole frames");
    count
}

#[test]
fn whatever_a_liar_sends_its_receivers_can_read_what_is_passed_on_and_live() {
    let (mut passed, mut refused) = (0, 0);
    for seed in 0..SEEDS {
        let mut chance = Chance(seed);
        let is_checked = seed % 2 == 1;
        let mut relay = home();
        if is_checked {
            relay.set_check(sum);
        }
        let [liar, two, three] = [1, 2, 3].map(|it| relay.attach(rank(it), 0).unwrap());
        let peer = relay.peer(ClusterId(1)).unwrap();
        let stream = relay.connect(peer, 1).unwrap().stream;
        for _ in 0..FRAMES {
            let stop = feed(&mut relay, liar, lie(&mut chance, is_checked));
            for link in [two, three, stream] {
                passed += readable(&mut relay, link, is_checked, seed);
            }
            if let Stop::Broken(_) = stop {
                refused += 1;
                assert_eq!(relay.counters().malformed, 1, "seed {seed}");
                break;
            }
        }
        // Whatever rank 1 sent, the other ranks are attached, and receive each other's frames.
        let mut honest = frame(rank(3), rank(2), 0, 24);
        (honest[4], honest[5]) = (Kind::Tagged as u8, flag::CHECKED);
        honest[7] = framing_crc(&honest);
        let check = sum(&honest[..HEADER_BYTES + 16]);
        honest[36..40].copy_from_slice(&check.to_le_bytes());
        assert_eq!(feed(&mut relay, three, honest), Stop::Partial, "seed {seed}");
        let heard = output(&mut relay, two);
        assert!(heard.contains(&(Kind::Tagged, rank(3))), "seed {seed}: {heard:?}");
    }
    assert!(passed > refused && refused > SEEDS as usize / 2, "{passed} passed, {refused} refused");
}
