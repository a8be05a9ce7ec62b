//! Connections on which nothing has been heard for too long.
//!
//! The kernel knows when it last heard the other end of a TCP connection, and it answers for a
//! process that computes or is stopped. So a stream between relays is broken if something is in
//! flight on it and nothing is heard of its other end. The time after which this is certain enough
//! depends on the stream's own round trip ([`stream_timeout_millis`]). A stream on which nothing is
//! in flight carries a keepalive every second, and is closed when several have not arrived. A
//! connection to a rank is silent when there is nothing to send, so it is checked only while
//! something is in flight to the rank.
//!
//! What may never happen: a relay is taken for dead because it is stopped, or because this relay
//! was stopped.

use landbridge_proto::relay::Relay;

use super::TICK_MILLIS;
use super::connection::{ConnectionKey, ConnectionTable, Phase};
use super::forwarder::Forwarder;
use crate::sys::{self, TcpInfo};

/// A stream to another relay that is silent for this long is broken, whatever is in flight, unless
/// its own timeout is longer: four keepalives, or the answers to them, are missing. This is also
/// the timeout of a stream whose round trip is not known.
const STREAM_IDLE_MILLIS_MAX: u64 = 4_000;
/// With something in flight, a stream may be silent for this many retransmission timeouts of TCP
/// (RFC 6298). TCP has retransmitted three times by then.
const STREAM_RTOS: u64 = 8;
/// The smallest retransmission timeout that counts: the kernel waits no less before it retransmits.
const RTO_MILLIS_MIN: u64 = 200;
/// The longest silence of a stream: no link has a round trip that needs more.
const STREAM_TIMEOUT_MILLIS_MAX: u64 = 30_000;
/// A rank that acknowledges nothing for this long is unreachable: the kernel has retransmitted some
/// five times.
const RANK_TIMEOUT_MILLIS: u64 = 10_000;
/// The interval of the checks.
const CHECK_MILLIS: u64 = 1_000;
/// The interval of the checks while something is in flight between relays.
const CHECK_MILLIS_SHORT: u64 = 100;
/// If the clock has not been read for this long, this process has been stopped.
const STALL_MILLIS: u64 = 2_000;
/// After a stop, no connection is judged for this long, so that every peer can be heard again.
const GRACE_MILLIS: u64 = 3_000;

/// If the clock is read this late, data that has arrived may lie unread, so silence is measured
/// from now on.
const LATE_MILLIS: u64 = 300;

/// The monitor of silent connections: see the module documentation.
#[derive(Default)]
pub struct LivenessMonitor {
    watched: Vec<ConnectionKey>,
    next_check_millis: u64,
    /// Something is in flight to another relay.
    has_in_flight: bool,
    late_millis: u64,
    grace_until_millis: u64,
}

impl LivenessMonitor {
    pub fn watch(&mut self, key: ConnectionKey) {
        self.watched.push(key);
    }

    pub fn needs_clock(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Whether the checks must follow each other at the short interval.
    pub fn has_in_flight(&self) -> bool {
        self.has_in_flight
    }

    /// Records that something has been written to another relay.
    pub fn note_in_flight(&mut self) {
        (self.has_in_flight, self.next_check_millis) = (true, 0);
    }

    /// Records that the clock is read. `planned_millis`: when it should have been, by
    /// [`super::TICK_MILLIS`]; `wait_millis_max`: how long the last wait for events could be, if it
    /// had an end.
    pub fn note_tick(
        &mut self,
        now_millis: u64,
        planned_millis: u64,
        wait_millis_max: Option<u64>,
    ) {
        self.late_millis = late_millis(now_millis, planned_millis, wait_millis_max);
        if self.late_millis > STALL_MILLIS {
            self.grace_until_millis = now_millis + GRACE_MILLIS;
        }
    }

    /// Whether this process has been stopped a short time ago.
    pub fn is_after_stall(&self, now_millis: u64) -> bool {
        now_millis < self.grace_until_millis
    }

    /// Closes connections that have been silent for too long.
    pub fn close_unresponsive(&mut self, forwarder: &mut Forwarder, now_millis: u64) {
        if now_millis < self.next_check_millis || self.is_after_stall(now_millis) {
            return;
        }
        self.has_in_flight = false;
        let rank_millis = rank_timeout_millis(&forwarder.relay);
        for key in std::mem::take(&mut self.watched) {
            if self.check(&mut forwarder.connections, key, rank_millis, now_millis) {
                self.watch(key);
            }
        }
        let gap = if self.has_in_flight { CHECK_MILLIS_SHORT } else { CHECK_MILLIS };
        self.next_check_millis = now_millis + gap;
    }

    /// Checks a connection. Returns false if the connection need not be checked any more.
    fn check(
        &mut self,
        connections: &mut ConnectionTable,
        key: ConnectionKey,
        rank_millis: u64,
        now_millis: u64,
    ) -> bool {
        let is_late = self.late_millis > LATE_MILLIS;
        let Some(connection) = connections.find(key) else { return false };
        let Some(transport) = &connection.transport else { return false };
        // QUIC detects silence itself.
        let Some(fd) = transport.fd() else { return false };
        let Some(tcp_info) = sys::tcp_info(fd) else { return false };
        let is_under_way = tcp_info.has_unacked || tcp_info.has_unsent;
        let unacked = unacked(connection.unacked_since_millis, is_under_way, is_late, now_millis);
        connection.unacked_since_millis = unacked.map(|(since, _)| since);
        let is_broken = match connection.phase {
            Phase::Peer { .. } => {
                let unacked_millis = unacked.map(|(_, idle_millis)| idle_millis);
                self.has_in_flight |= is_under_way;
                is_stream_unresponsive(&tcp_info, unacked_millis, connection.is_paused)
            }
            _ if !tcp_info.has_unacked => {
                connection.is_watched = false;
                return false;
            }
            // The rank may have been quiet, and the bytes in flight may have left just now.
            _ => unacked.is_some_and(|(_, millis)| millis.min(tcp_info.idle_millis) > rank_millis),
        };
        if !is_broken {
            return true;
        }
        let seconds = tcp_info.idle_millis as f64 / 1e3;
        connections
            .schedule_close(key.slot, format!("nothing has arrived from it for {seconds:.1} s"));
        false
    }
}

/// By how much the clock is read later than the last wait explains. What arrives wakes this
/// process, so after a long wait nothing lies unread.
fn late_millis(now_millis: u64, planned_millis: u64, wait_millis_max: Option<u64>) -> u64 {
    let longer = wait_millis_max.map(|millis| millis.saturating_sub(TICK_MILLIS));
    longer.map_or(0, |longer| now_millis.saturating_sub(planned_millis + longer))
}

/// How long a rank may acknowledge nothing. A recorded rank ends when it is declared unreachable,
/// and must repeat all that it did, so it has as long as a peer that no path reaches.
fn rank_timeout_millis(relay: &Relay) -> u64 {
    match relay.is_recovery_enabled() {
        true => relay.reconnect_timeout_millis().max(RANK_TIMEOUT_MILLIS),
        false => RANK_TIMEOUT_MILLIS,
    }
}

/// The time since which something has been in flight, and for how long, if something is. `before`
/// is the earlier value of this time. Bytes that were written in this round may have left after the
/// round's clock was read.
fn unacked(
    before: Option<u64>,
    is_under_way: bool,
    is_late: bool,
    now_millis: u64,
) -> Option<(u64, u64)> {
    let since = before.filter(|_| !is_late).unwrap_or(now_millis);
    is_under_way.then(|| (since, now_millis.saturating_sub(since)))
}

/// Whether a stream between relays has been silent for too long. `unacked_millis` is how long
/// something has been in flight. `is_paused`: while this side reads nothing, the other side may be
/// unable to send anything, but its kernel answers.
fn is_stream_unresponsive(
    tcp_info: &TcpInfo,
    unacked_millis: Option<u64>,
    is_paused: bool,
) -> bool {
    let timeout = stream_timeout_millis(tcp_info.round_trip_micros, tcp_info.variation_micros);
    let silent_millis = unacked_millis.map(|awaited| awaited.min(tcp_info.idle_millis));
    let signs_millis = timeout.max(STREAM_IDLE_MILLIS_MAX);
    silent_millis.is_some_and(|silent| silent > timeout)
        || (!is_paused && tcp_info.idle_millis > signs_millis)
}

/// How long a stream to another relay may be silent while something is in flight, from its round
/// trip and the variation.
fn stream_timeout_millis(round_trip_micros: u32, variation_micros: u32) -> u64 {
    if round_trip_micros == 0 {
        return STREAM_IDLE_MILLIS_MAX;
    }
    // The retransmission timeout of RFC 6298, section 2.3.
    let rto_micros = u64::from(round_trip_micros) + 4 * u64::from(variation_micros);
    let rto_millis = (rto_micros / 1_000).max(RTO_MILLIS_MIN);
    (STREAM_RTOS * rto_millis).min(STREAM_TIMEOUT_MILLIS_MAX)
}

const _: () = assert!(LATE_MILLIS > 2 * CHECK_MILLIS_SHORT);

#[cfg(test)]
mod tests {
    use super::super::IDLE_TICK_MILLIS;
    use super::*;

    #[test]
    fn a_stream_is_given_as_long_as_its_round_trips_say() {
        const MILLI: u32 = 1_000;
        let rows = [
            // Round trip and variation, in milliseconds; the expected timeout.
            ((0, 0), STREAM_IDLE_MILLIS_MAX),
            ((1, 0), 1_600),
            ((20, 5), 1_600),
            ((100, 10), 1_600),
            ((100, 50), 2_400),
            ((250, 20), 2_640),
            ((600, 50), 6_400),
            ((3_000, 1_000), STREAM_TIMEOUT_MILLIS_MAX),
        ];
        for ((round_trip, variation), expected) in rows {
            let timeout = stream_timeout_millis(round_trip * MILLI, variation * MILLI);
            assert_eq!(timeout, expected, "{round_trip} ms, {variation} ms");
        }
        assert_eq!(stream_timeout_millis(u32::MAX, u32::MAX), STREAM_TIMEOUT_MILLIS_MAX);
    }

    #[test]
    fn a_clock_that_waits_long_because_nothing_happens_is_not_late() {
        let rows = [
            // When the clock is read, if 1,000 ms were planned; the longest wait; how late it is.
            (1_000, Some(TICK_MILLIS), 0),
            (1_350, Some(TICK_MILLIS), 350),
            (1_350, Some(IDLE_TICK_MILLIS), 0),
            (1_000 + IDLE_TICK_MILLIS, Some(IDLE_TICK_MILLIS), TICK_MILLIS),
            (5_000, Some(IDLE_TICK_MILLIS), 3_100),
            (90_000, None, 0),
        ];
        for (now, wait, expected) in rows {
            assert_eq!(late_millis(now, 1_000, wait), expected, "{now} {wait:?}");
        }
        assert!(late_millis(1_000 + IDLE_TICK_MILLIS, 1_000, Some(IDLE_TICK_MILLIS)) < LATE_MILLIS);
    }

    #[test]
    fn what_is_awaited_is_so_since_it_was_written_be_that_after_the_clock_was_looked_at() {
        assert_eq!(unacked(Some(40), true, false, 100), Some((40, 60)));
        assert_eq!(unacked(Some(101), true, false, 100), Some((101, 0)), "a moment ago");
        assert_eq!(unacked(None, true, false, 100), Some((100, 0)));
        assert_eq!(unacked(Some(40), true, true, 100), Some((100, 0)), "what came may lie unread");
        assert_eq!(unacked(Some(40), false, false, 100), None);
    }

    #[test]
    fn silence_counts_from_when_something_is_under_way() {
        let silent = |idle_millis, round_trip_millis: u32| TcpInfo {
            idle_millis,
            unacked_millis: idle_millis,
            confirmed_bytes: 0,
            has_unacked: true,
            has_unsent: false,
            is_zero_window: false,
            unanswered_probes: 0,
            round_trip_micros: round_trip_millis * 1_000,
            variation_micros: 0,
            bytes_per_second: 0,
        };
        let rows = [
            // Silent time and round trip; time in flight; paused; whether the stream is broken.
            (900, 50, None, false, false),
            (3_900, 50, None, false, false),
            (4_100, 50, None, false, true),
            // A side that reads nothing hears nothing, but the other kernel answers.
            (4_100, 50, None, true, false),
            (4_100, 50, Some(1_700), true, true),
            // The last answer came long ago, and the latest bytes have just left.
            (2_000, 50, Some(0), false, false),
            (2_000, 50, Some(1_600), false, false),
            (2_000, 50, Some(1_601), false, true),
            // Bytes that were sent long ago are answered now and then.
            (1_000, 50, Some(9_000), false, false),
            (2_000, 600, Some(2_000), false, false),
            // A link so long that four seconds mean little.
            (4_700, 600, Some(4_700), false, false),
            (4_900, 600, Some(4_900), false, true),
        ];
        for (idle_millis, round_trip, awaited, is_paused, expected) in rows {
            let is_broken =
                is_stream_unresponsive(&silent(idle_millis, round_trip), awaited, is_paused);
            assert_eq!(is_broken, expected, "{idle_millis} {round_trip} {awaited:?} {is_paused}");
        }
    }
}
