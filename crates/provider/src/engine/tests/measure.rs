//! Measures the cost of a message in one thread, without effects of a scheduler or a second
//! processor.

use super::*;

/// Messages of up to this many bytes are injected, as MPI libraries do.
const INJECT_MAX: usize = 4 << 10;

/// `LANDBRIDGE_PATHS` selects the path between the engines. Under callgrind the test shows where
/// the instructions are spent. The command is:
///
/// ```text
/// cargo test --release -p landbridge-provider --lib measure_messages -- --ignored --nocapture
/// ```
#[test]
#[ignore = "a measurement"]
fn measure_messages_there_and_back() {
    let (mut one, mut other) = (Party::open(), Party::open());
    let (to_other, to_one) = (one.av.insert(other.name()), other.av.insert(one.name()));
    one.send(to_other).unwrap();
    until(|| {
        one.engine.progress();
        other.engine.progress();
        one.is_linked() && other.is_linked()
    });
    for size in [8, 1 << 10, 16 << 10] {
        let (mut from, mut to) = (vec![1u8; size], vec![0u8; size]);
        let mut best = f64::MAX;
        let rounds = 2_000;
        for _ in 0..50 {
            let begun = Instant::now();
            for _ in 0..rounds {
                pass(&mut one, to_other, &mut from, &mut other, &mut to);
                pass(&mut other, to_one, &mut from, &mut one, &mut to);
            }
            best = best.min(begun.elapsed().as_nanos() as f64 / rounds as f64 / 2.0);
        }
        println!("{size:6} bytes: {best:8.1} ns");
    }
}

fn pass(sender: &mut Party, to: FiAddr, from: &mut [u8], receiver: &mut Party, into: &mut [u8]) {
    let room = [Iov { base: into.as_mut_ptr(), len: into.len() }];
    receiver
        .engine
        .recv(&RecvRequest {
            source: abi::ADDR_UNSPEC,
            payload: &room,
            tag: Some((5, 0)),
            context: 4,
            notify: true,
            multi: false,
        })
        .unwrap();
    let payload = [Iov { base: from.as_mut_ptr(), len: from.len() }];
    let inject = payload[0].len < INJECT_MAX;
    let message =
        SendRequest { tag: Some(5), payload: &payload, inject, notify: false, ..empty_message(to) };
    sender.engine.send(&message).unwrap();
    loop {
        receiver.engine.progress();
        sender.engine.progress();
        if receiver.next().is_some() {
            break;
        }
    }
}
