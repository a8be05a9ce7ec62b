//! Relays that talk to each other over UDP.

mod common;

use common::{Rank, RelayProcess, pattern};
use landbridge_proto::wire::frame::Kind;

const UDP: (&str, &str) = ("LANDBRIDGE_WAN_UDP", "on");

#[test]
fn frames_pass_both_ways() {
    let (mut zero, mut one) = RelayProcess::pair_with(&[UDP]);
    for relay in [&zero, &one] {
        assert!(relay.log.iter().any(|line| line.contains("/udp")), "{:?}", relay.log);
    }
    let (mut here, mut there) = (Rank::attach(&zero, 1), Rank::attach(&one, 5));
    for number in 0..200 {
        let body = pattern(number, 1 + 150 * number as usize);
        here.send(5, number, &body);
        there.send(1, number, &body);
    }
    for number in 0..200 {
        for rank in [&mut here, &mut there] {
            let (header, body) = rank.receive_frame();
            assert_eq!((header.kind, header.sequence), (Kind::Data, number));
            assert_eq!(body, pattern(number, 1 + 150 * number as usize));
        }
    }
    zero.wait_for_counter("lanes", |lanes| lanes == 1);
    one.wait_for_counter("breaks", |breaks| breaks == 0);
}
