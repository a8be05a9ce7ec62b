//! Tests of BBR with rounds, messages and bunches of acknowledgements that are fed in by hand.

use super::super::time::nanos_for;
use super::*;

const MTU: u64 = 1000;
const RTT: u64 = 10 * MILLISECOND;

/// A round of a sender that sends a window at a time, at most what the path carries. All bytes
/// arrive a round trip later, except `lost` bytes. The round is over when the next one begins.
fn round(bbr: &mut Bbr, now: &mut Time, carried: u64, lost: u64, is_app_limited: bool) {
    flight(bbr, now, carried, lost, is_app_limited, 0);
}

/// A round in which `others` bytes are in flight all the time.
fn flight(
    bbr: &mut Bbr,
    now: &mut Time,
    carried: u64,
    lost: u64,
    is_app_limited: bool,
    others: u64,
) {
    let delivered_at_send = bbr.delivered_bytes();
    let sent_at = *now;
    let window = bbr.window_bytes().min(carried);
    bbr.handle_sent(sent_at, window, window + others, false);
    *now = now.after(RTT);
    let bytes = window - lost.min(window);
    let rtt_nanos = Some(RTT);
    bbr.handle_lost(*now, lost, sent_at);
    let acked = Acked { bytes, sent_at, delivered_at_send, rtt_nanos, is_app_limited };
    bbr.handle_acked(*now, acked);
}

fn cruising() -> (Bbr, Time) {
    let (mut bbr, mut now) = (Bbr::new(MTU), Time(SECOND));
    for _ in 0..20 {
        round(&mut bbr, &mut now, 1_000_000, 0, false);
    }
    assert!(bbr.full.is_full);
    (bbr, now)
}

#[test]
fn a_path_is_found_and_startup_ends() {
    let mut bbr = Bbr::new(MTU);
    assert_eq!((bbr.window_bytes(), bbr.rate_bytes_per_second()), (10_000, None));
    let mut now = Time(SECOND);
    round(&mut bbr, &mut now, 1_000_000, 0, false);
    assert!(bbr.window_bytes() >= 20_000);
    let (bbr, _) = cruising();
    // A million bytes in ten milliseconds.
    assert_eq!((bbr.rate.value(), bbr.bdp()), (100_000_000, 1_000_000));
    assert_eq!(bbr.window_bytes(), 2_000_000 + 3 * BATCH_BYTES_MAX + bbr.extra_acked.value());
}

#[test]
fn a_rate_is_forgotten_after_some_rounds_but_not_for_want_of_work() {
    let (bbr, now) = cruising();
    for (is_app_limited, rate) in [(true, 100_000_000), (false, 50_000_000)] {
        let (mut bbr, mut now) = (bbr.clone(), now);
        for _ in 0..=RATE_ROUNDS {
            round(&mut bbr, &mut now, 500_000, 0, is_app_limited);
        }
        assert_eq!(bbr.rate.value(), rate);
    }
}

#[test]
fn random_loss_bounds_nothing_and_much_loss_does_until_it_ends() {
    let (mut bbr, mut now) = cruising();
    for _ in 0..50 {
        round(&mut bbr, &mut now, 1_000_000, 60_000, false);
        assert_eq!(bbr.bound, None);
    }
    round(&mut bbr, &mut now, 1_000_000, 200_000, false);
    round(&mut bbr, &mut now, 1_000_000, 0, false);
    // The window falls to what fills the path without a queue, at the rate of the bytes that were
    // not lost.
    assert_eq!(bbr.window_bytes(), 940_000);
    for _ in 0..80 {
        round(&mut bbr, &mut now, 1_000_000, 0, false);
    }
    assert_eq!(bbr.bound, None);
}

#[test]
fn an_old_round_trip_is_measured_again_with_little_under_way() {
    let (mut bbr, mut now) = cruising();
    bbr.rtt = Some(MinRtt { nanos: RTT / 2, seen_at: now, is_due: false });
    let mut probed = 0;
    for _ in 0..1100 {
        // Something is always in flight.
        flight(&mut bbr, &mut now, 1_000_000, 0, false, MTU);
        if bbr.state() == BbrState::ProbeRtt {
            assert!(bbr.window_bytes() <= bbr.bdp());
            probed += 1;
        }
    }
    // ProbeRtt follows ten seconds later, for a fifth of a second.
    assert!((20..25).contains(&probed), "{probed} rounds");
    assert_eq!(bbr.rtt.map(|rtt| rtt.nanos), Some(RTT));
}

#[test]
fn a_pause_shows_the_round_trip_without_a_probe() {
    let (mut bbr, mut now) = cruising();
    bbr.rtt = Some(MinRtt { nanos: RTT / 2, seen_at: now, is_due: false });
    now = now.after(3600 * SECOND);
    round(&mut bbr, &mut now, 1_000_000, 0, false);
    assert_ne!(bbr.state(), BbrState::ProbeRtt);
    assert_eq!(bbr.rtt.map(|rtt| rtt.nanos), Some(RTT));
    assert_eq!(bbr.rate.value(), 100_000_000);
}

#[test]
fn a_timeout_stops_and_an_answer_tells_why() {
    let (bbr, now) = cruising();
    let window = bbr.window_bytes();
    for (sent_at, expected) in [(now, window), (now.after(1), 4 * MTU)] {
        let mut bbr = bbr.clone();
        bbr.handle_timeout(now);
        bbr.handle_timeout(now.after(5));
        assert_eq!(bbr.window_bytes(), 2 * MTU);
        let (bytes, rtt_nanos, delivered_at_send) = (1, None, 0);
        let answer = Acked { bytes, sent_at, delivered_at_send, rtt_nanos, is_app_limited: false };
        bbr.handle_acked(now.after(RTT), answer);
        assert!(bbr.window_bytes().abs_diff(expected) <= MTU);
    }
}

#[test]
fn acknowledgements_in_a_bunch_do_not_feign_a_fast_path() {
    let mut bbr = Bbr::new(MTU);
    let mut acks = std::vec::Vec::new();
    // One datagram leaves each millisecond; acknowledgements come in bunches of twenty.
    for step in 0..400u64 {
        let now = Time(step * MILLISECOND);
        bbr.handle_sent(now, MTU, bbr.in_flight + MTU, false);
        acks.push((now, bbr.delivered_bytes()));
        if step % 20 == 19 {
            for (sent_at, delivered_at_send) in acks.drain(..) {
                let rtt_nanos = Some(now.nanos_since(sent_at));
                let acked = Acked {
                    bytes: MTU,
                    sent_at,
                    delivered_at_send,
                    rtt_nanos,
                    is_app_limited: false,
                };
                bbr.handle_acked(now, acked);
            }
        }
    }
    let rate = bbr.rate.value();
    assert!((900_000..=1_100_000).contains(&rate), "{rate}");
}

/// Flights end within a bunch, and all that is acknowledged behind the end of a round came with the
/// round.
#[test]
fn what_is_left_of_a_bunch_is_no_round_that_took_no_time() {
    let (mut bbr, mut now) = (Bbr::new(MTU), Time(SECOND));
    for _ in 0..40 {
        // The flight has two parts, the second sent behind the first part's acknowledgements; then
        // nothing is in flight.
        let mut flying = std::vec::Vec::new();
        for (wait, count) in [(0, 20), (RTT, 20)] {
            now = now.after(wait);
            for (sent_at, delivered_at_send) in flying.drain(..) {
                answer(&mut bbr, now, sent_at, delivered_at_send);
            }
            for _ in 0..count {
                bbr.handle_sent(now, MTU, bbr.in_flight + MTU, false);
                flying.push((now, bbr.delivered_bytes()));
                now = now.after(MILLISECOND / 10);
            }
        }
        now = now.after(RTT);
        for (sent_at, delivered_at_send) in flying.drain(..) {
            answer(&mut bbr, now, sent_at, delivered_at_send);
        }
    }
    // Twenty datagrams leave in each ten milliseconds and a little more.
    let rate = bbr.rate.value();
    assert!((1_000_000..=2_000_000).contains(&rate), "{rate}");
}

fn answer(bbr: &mut Bbr, now: Time, sent_at: Time, delivered_at_send: u64) {
    let rtt_nanos = Some(now.nanos_since(sent_at));
    let is_app_limited = false;
    let acked = Acked { bytes: MTU, sent_at, delivered_at_send, rtt_nanos, is_app_limited };
    bbr.handle_acked(now, acked);
}

/// A message of `datagrams` datagrams, sent at rate `sent` with nothing in flight before. The path
/// carries them at rate `carried`, and each arrives by itself. Every message ends because there is
/// nothing more to send.
fn message(bbr: &mut Bbr, now: &mut Time, datagrams: u64, sent: u64, carried: u64) {
    let start = *now;
    let delivered_at_send = bbr.delivered_bytes();
    for number in 0..datagrams {
        let at = start.after(nanos_for(number * MTU, sent));
        bbr.handle_sent(at, MTU, (number + 1) * MTU, false);
    }
    for number in 0..datagrams {
        let sent_at = start.after(nanos_for(number * MTU, sent));
        *now = start.after(RTT + nanos_for(number * MTU, sent.min(carried)));
        let is_app_limited = number + 1 == datagrams;
        let rtt_nanos = Some(now.nanos_since(sent_at));
        let acked = Acked { bytes: MTU, sent_at, delivered_at_send, rtt_nanos, is_app_limited };
        bbr.handle_acked(*now, acked);
    }
    *now = now.after(RTT);
}

#[test]
fn the_way_to_the_first_answer_does_not_make_messages_slow() {
    let (mut bbr, mut now) = (Bbr::new(MTU), Time(SECOND));
    for _ in 0..2 {
        message(&mut bbr, &mut now, 500, 100_000_000, 100_000_000);
    }
    // Five milliseconds of sending follow ten milliseconds of waiting.
    let rate = bbr.rate.value();
    assert!((99_000_000..=101_000_000).contains(&rate), "{rate}");
}

#[test]
fn messages_end_startup_only_if_the_path_holds_them_up() {
    for (carried, is_full) in [(100_000_000, false), (50_000_000, true)] {
        let (mut bbr, mut now) = (Bbr::new(MTU), Time(SECOND));
        (0..20).for_each(|_| message(&mut bbr, &mut now, 500, 100_000_000, carried));
        assert_eq!(bbr.full.is_full, is_full);
    }
}
