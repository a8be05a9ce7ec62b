//! Tests that a relay's memory does not grow with incomplete frames of its links.

mod common;

use std::io::Write;

use common::{Plan, Rank, RelayProcess, frame, pattern};
use landbridge_proto::id::Address;
use landbridge_proto::relay::FRAME_BYTES_MAX;

const RANKS: u32 = 100;
/// The frames that a rank sends whole: more than a relay reads at once.
const FRAMES: u64 = 40;
const BODY_BYTES: usize = 16 << 10;

#[test]
fn links_in_the_middle_of_a_frame_cost_no_more_than_that_frame() {
    let mut relay = RelayProcess::start(&Plan::alone(RANKS + 1));
    let mut reader = attach(&relay, RANKS);
    let mut ranks: Vec<Rank> = (0..RANKS).map(|index| attach(&relay, index)).collect();
    let before = relay.memory_bytes();
    for rank in &mut ranks {
        let target = Address::new(RANKS, 0);
        let mut bytes = Vec::new();
        for number in 0..FRAMES {
            bytes.extend(frame(rank.address, target, number, &pattern(number, BODY_BYTES)));
        }
        let last = frame(rank.address, target, FRAMES, &pattern(FRAMES, BODY_BYTES));
        bytes.extend(&last[..last.len() / 2]);
        // The bytes are written and read at the same time, so that the relay finds much to read.
        std::thread::scope(|scope| {
            scope.spawn(|| rank.stream.write_all(&bytes).unwrap());
            (0..FRAMES).for_each(|_| drop(reader.receive()));
        });
    }
    let queued = relay.counter("queued_bytes") as usize;
    assert!(queued >= RANKS as usize * BODY_BYTES / 2, "kept and not counted: {queued}");
    let grown = relay.memory_bytes().saturating_sub(before) as usize;
    assert!(grown < RANKS as usize * FRAME_BYTES_MAX + (4 << 20), "{} KiB", grown >> 10);
}

fn attach(relay: &RelayProcess, index: u32) -> Rank {
    let own = common::introduction(index);
    let cluster = landbridge_proto::id::ClusterId(0);
    Rank::attach_as(relay, landbridge_proto::wire::hello::Introduction { cluster, ..own }).unwrap()
}
