//! Tests of [`Channel::prefers`], which chooses the path for the next piece when there are several,
//! and of what follows from this choice.

use std::vec::Vec;

use super::channel::Channel;
use super::driver_interface::Peer;
use super::path_state::{PathProperties, PathState};
use crate::channel::PathId;
use crate::id::Address;
use crate::path::time::{MILLISECOND, SECOND, Time, nanos_for};

/// A rail: its rate in bytes per second, and its round trip in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Rail(u64, u64);

const GIGABIT: u64 = 125_000_000;
const PIECE: u64 = 64 << 10;

#[test]
fn each_piece_goes_by_the_path_that_has_it_there_first() {
    let mut channel = channel(&[Rail(GIGABIT, MILLISECOND), Rail(GIGABIT, MILLISECOND)]);
    // Much is left, so each path takes a piece as long as the other path would not finish the whole
    // rest sooner.
    assert_eq!(takers(&channel, PIECE, 100 * PIECE), [0, 1]);
    // One path is busy with ten pieces: the last piece is for the other path, and so are the last
    // four.
    load(&mut channel, 0, 10 * PIECE);
    assert_eq!(takers(&channel, PIECE, PIECE), [1]);
    assert_eq!(takers(&channel, PIECE, 4 * PIECE), [1]);
    // With more left, both paths take a piece.
    assert_eq!(takers(&channel, PIECE, 12 * PIECE), [0, 1]);
}

#[test]
fn a_small_message_takes_the_quickest_path_alone() {
    // The second path is ten times as fast and has a longer round trip.
    let channel = channel(&[Rail(GIGABIT, MILLISECOND), Rail(10 * GIGABIT, 10 * MILLISECOND)]);
    assert_eq!(takers(&channel, 100, 100), [0]);
    assert_eq!(takers(&channel, PIECE, PIECE), [0]);
    // The first path would finish a megabyte in 8.5 ms, the second in 5.8 ms.
    assert_eq!(takers(&channel, 1 << 20, 1 << 20), [1]);
}

#[test]
fn somebody_always_takes_what_is_next() {
    let mut random = 7_u64;
    let mut draw = |end: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    for _ in 0..2_000 {
        let rails: Vec<Rail> = (0..2 + draw(3))
            .map(|_| Rail(1_000_000 << draw(11), draw(100) * MILLISECOND))
            .collect();
        let mut channel = channel(&rails);
        for path in 0..rails.len() {
            load(&mut channel, path, draw(20) * PIECE);
        }
        let piece = 1 + draw(PIECE);
        let rest = piece + draw(100) * PIECE;
        assert!(!takers(&channel, piece, rest).is_empty(), "{rails:?}: {piece} of {rest}");
    }
}

#[test]
fn spare_and_suspected_paths_take_nothing_and_hold_nobody_up() {
    let mut channel = channel(&[Rail(GIGABIT, MILLISECOND); 3]);
    channel.paths[0].path.spare = true;
    channel.paths[1].is_suspected = true;
    channel.paths.count_senders();
    load(&mut channel, 2, 100 * PIECE);
    // Only the third path sends, so the other paths do not count, however quick they are.
    assert!(channel.paths.prefers(PathId(2), PIECE, PIECE));
    assert!(!channel.paths.sends_by(PathId(0)) && !channel.paths.sends_by(PathId(1)));
}

#[test]
fn a_slow_path_never_makes_the_whole_slower() {
    for (near, far) in [
        (Rail(GIGABIT, MILLISECOND), Rail(GIGABIT / 100, MILLISECOND)),
        (Rail(GIGABIT, MILLISECOND), Rail(GIGABIT, 200 * MILLISECOND)),
        (Rail(GIGABIT, MILLISECOND), Rail(GIGABIT / 3, 20 * MILLISECOND)),
        (Rail(10 * GIGABIT, MILLISECOND / 10), Rail(GIGABIT / 10, 50 * MILLISECOND)),
    ] {
        for bytes in [1, 1_000, PIECE, 10 * PIECE, 100 * PIECE, 1_000 * PIECE] {
            let alone = transfer(&[near], bytes);
            for rails in [[near, far], [far, near]] {
                let both = transfer(&rails, bytes);
                assert!(both <= alone, "{rails:?}: {bytes} bytes in {both} ns instead of {alone}");
            }
        }
    }
}

#[test]
fn paths_that_are_equal_share_what_is_long() {
    let rail = Rail(GIGABIT, MILLISECOND);
    let (one, two) = (transfer(&[rail], 1_000 * PIECE), transfer(&[rail; 2], 1_000 * PIECE));
    assert!(two * 195 <= one * 100, "{one} ns by one, {two} by two");
}

/// The time that a message takes, in nanoseconds. Each path with capacity for a piece is offered
/// one, and takes it or declines. (A socket holds two pieces that have not left.)
fn transfer(rails: &[Rail], bytes: u64) -> u64 {
    let mut channel = channel(rails);
    // For each piece: when it leaves, when it is acknowledged, its size.
    let mut sent: Vec<Vec<(Time, Time, u64)>> = rails.iter().map(|_| Vec::new()).collect();
    let (mut now, mut left, mut end) = (Time(10 * SECOND), bytes, Time(0));
    loop {
        let mut is_taken = false;
        for (number, &Rail(rate, round_trip)) in rails.iter().enumerate() {
            let unsent = sent[number].iter().filter(|&&(leaves, ..)| leaves > now).count();
            let piece = PIECE.min(left);
            let takes = channel.paths.prefers(PathId(number as u8), piece, left);
            if left == 0 || unsent >= 2 || (rails.len() > 1 && !takes) {
                continue;
            }
            let free = sent[number].last().map_or(now, |&(leaves, ..)| leaves.max(now));
            let leaves = free.after(nanos_for(piece, rate));
            end = end.max(leaves.after(round_trip / 2));
            sent[number].push((leaves, leaves.after(round_trip), piece));
            channel.paths[number].rate.handle_sent(piece);
            left -= piece;
            is_taken = true;
        }
        if is_taken {
            continue;
        }
        // No path takes a piece: the loop goes on when a piece has left or is acknowledged.
        let times =
            sent.iter().flatten().flat_map(|&(leaves, acknowledged, _)| [leaves, acknowledged]);
        let next = times.filter(|&at| at > now).min();
        let Some(next) = next else {
            assert_eq!(left, 0, "nobody takes what is left");
            return end.nanos_since(Time(10 * SECOND));
        };
        now = next;
        for (number, sent) in sent.iter_mut().enumerate() {
            let (done, open) = sent.iter().partition(|&&(_, acknowledged, _)| acknowledged <= now);
            *sent = open;
            let done: Vec<(Time, Time, u64)> = done;
            done.iter()
                .for_each(|&(_, at, piece)| channel.paths[number].rate.handle_delivered(at, piece));
        }
    }
}

/// The paths that take a piece of `bytes` bytes when `rest` bytes are left, the piece included.
fn takers(channel: &Channel<()>, bytes: u64, rest: u64) -> Vec<usize> {
    let paths = 0..channel.paths.len();
    paths.filter(|&path| channel.paths.prefers(PathId(path as u8), bytes, rest)).collect()
}

/// Puts `bytes` more bytes in flight on a path.
fn load(channel: &mut Channel<()>, path: usize, bytes: u64) {
    channel.paths[path].rate.handle_sent(bytes);
}

/// A channel over rails that have been measured and are idle.
fn channel(rails: &[Rail]) -> Channel<()> {
    let mut channel = Channel::new(Peer(0), Address::new(1, 0), 1 << 20);
    for &rail in rails {
        let (number, state) = (channel.paths.len(), measured(rail));
        channel.paths.open(PathId(number as u8), state.path);
        channel.paths[number] = state;
    }
    channel.paths.count_senders();
    channel
}

fn measured(Rail(bytes_per_second, round_trip): Rail) -> PathState {
    let mut state = PathState::new(PathProperties {
        reorders: false,
        silent_loss: false,
        ..PathProperties::RELAY
    });
    let mut now = Time(0);
    state.rate.handle_sent(100 * PIECE);
    for _ in 0..100 {
        now = now.after(nanos_for(PIECE, bytes_per_second));
        state.rate.handle_delivered(now, PIECE);
    }
    for _ in 0..100 {
        state.round_trip.handle_sample(now, round_trip.max(1));
    }
    let measured = state.rate.bytes_per_second();
    assert!(measured.abs_diff(bytes_per_second) <= bytes_per_second / 50, "{measured}");
    assert_eq!(state.rate.outstanding_bytes(), 0);
    state
}
