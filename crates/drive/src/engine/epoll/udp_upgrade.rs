//! How a stream to another relay that uses TCP, because UDP did not get through, returns to UDP.
//!
//! A working stream over TCP is kept. Meanwhile UDP is dialled at longer and longer intervals. Once
//! a dial succeeds, the second connection takes over the number of the first: frames leave by the
//! second connection, and the first is *retired*. The retired stream finishes the frame that it has
//! begun, still delivers what arrives by it, and is closed when both sides have acknowledged
//! everything. So nothing is lost, and no status request is needed.
//!
//! What may never happen: a working stream is closed before another one has replaced it.

use std::net::SocketAddr;

use landbridge_proto::relay::STREAMS_MAX;

use super::*;

/// A bit in the `cookie` of a dialler's hello, next to the number of the stream: the older stream
/// of this number works, and must be retired.
pub const TAKES_OVER: u64 = 1 << 32;

/// The first pause before UDP is dialled again for a stream over TCP. The pause doubles with each
/// failure.
const UPGRADE_MILLIS_MIN: u64 = 5_000;
/// The longest pause between UDP dials for a stream over TCP.
const UPGRADE_MILLIS_MAX: u64 = 600_000;
/// The shortest time for which a retired stream stays open: both sides have reported three times
/// what they have received.
const RETIRED_MILLIS_MIN: u64 = 3_500;
/// The longest time for which a retired stream stays open: what it has not carried by then counts
/// as lost.
const RETIRED_MILLIS_MAX: u64 = 10_000;

const _: () = assert!(STREAMS_MAX as u64 <= TAKES_OVER);

/// The schedule of UDP dials for a stream over TCP.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UdpUpgrade {
    /// The time and the address of the next attempt.
    due: Option<(u64, SocketAddr)>,
    pause_millis: u64,
    attempt: Option<SocketAddr>,
}

impl UdpUpgrade {
    /// Records that the stream is up: over TCP to this address, where UDP is wanted, or over UDP.
    pub fn note_up(&mut self, over_tcp: Option<SocketAddr>, now_millis: u64) {
        let pause_millis = self.pause_millis.max(UPGRADE_MILLIS_MIN);
        match over_tcp {
            Some(to) => {
                let due = Some((now_millis + pause_millis, to));
                *self = Self { due, pause_millis, attempt: None };
            }
            None => *self = Self::default(),
        }
    }

    /// Records that the stream is down: a dial from now on replaces no stream.
    pub fn note_break(&mut self) {
        (self.due, self.attempt) = (None, None);
    }

    /// The address of the attempt that is due, if one is. The attempt counts as begun.
    pub fn begin(&mut self, now_millis: u64) -> Option<SocketAddr> {
        let (_, to) = self.due.take_if(|(due, _)| *due <= now_millis)?;
        self.attempt = Some(to);
        Some(to)
    }

    /// Records that the attempt has failed. Returns false if no attempt had begun.
    pub fn note_failure(&mut self, now_millis: u64) -> bool {
        let Some(to) = self.attempt.take() else { return false };
        self.pause_millis = (2 * self.pause_millis).clamp(UPGRADE_MILLIS_MIN, UPGRADE_MILLIS_MAX);
        self.due = Some((now_millis + self.pause_millis, to));
        true
    }
}

impl EventLoop<'_> {
    /// Dials over UDP, where this is due, for streams that are up over TCP.
    pub(super) fn upgrade_to_udp(&mut self, now_millis: u64) {
        for index in 0..self.dials.0.len() {
            let dial = &mut self.dials.0[index];
            if !dial.udp_backoff.allows_udp(now_millis) {
                continue;
            }
            let Some(to) = dial.udp_upgrade.begin(now_millis) else { continue };
            let (cluster, stream) = (dial.peer.cluster, dial.stream);
            if !self.dial_over_udp((cluster, stream), to, now_millis, true) {
                self.dials.0[index].udp_upgrade.note_failure(now_millis);
            }
        }
    }
}

impl Forwarder {
    /// Retires these streams in favour of another one.
    pub fn retire(&mut self, streams: Vec<LinkId>) {
        let now = sys::now_millis();
        for stream in streams {
            self.relay.retire(stream);
            let Some(slot) = self.connections.slot_of(stream) else { continue };
            self.connections[slot].retired_millis = Some(now);
            self.connections.retired.push(self.connections.key(slot));
            // The stream may have waited for space with the rest of a frame.
            self.flush(stream, &[]);
        }
    }

    /// Closes the retired streams that have acknowledged everything or have reached the longest
    /// time.
    pub fn close_retired(&mut self, now_millis: u64) {
        for key in std::mem::take(&mut self.connections.retired) {
            let Some(connection) = self.connections.find(key) else { continue };
            let (Some(since), Some(link)) = (connection.retired_millis, connection.link()) else {
                continue;
            };
            let age = now_millis.saturating_sub(since);
            let is_done = age >= RETIRED_MILLIS_MIN && self.relay.ports().is_acknowledged(link);
            match is_done || age >= RETIRED_MILLIS_MAX {
                true => {
                    self.connections.schedule_close(key.slot, "another has taken its place".into());
                }
                false => self.connections.retired.push(key),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_is_tried_behind_tcp_at_longer_and_longer_intervals() {
        let to: SocketAddr = "127.0.0.1:7711".parse().unwrap();
        let (mut upgrade, mut now) = (UdpUpgrade::default(), 7);
        assert_eq!(upgrade.begin(u64::MAX), None, "there is no stream");
        upgrade.note_up(Some(to), now);
        let mut expected = UPGRADE_MILLIS_MIN;
        for _ in 0..12 {
            assert_eq!(upgrade.begin(now + expected - 1), None);
            now += expected;
            assert_eq!((upgrade.begin(now), upgrade.attempt.is_some()), (Some(to), true));
            assert_eq!(upgrade.begin(u64::MAX), None, "one at a time");
            assert!(upgrade.note_failure(now) && !upgrade.note_failure(now));
            expected = (2 * expected).min(UPGRADE_MILLIS_MAX);
        }
        assert_eq!(expected, UPGRADE_MILLIS_MAX);
        upgrade.note_up(None, now);
        assert_eq!(upgrade, UdpUpgrade::default(), "it has got through");
    }

    #[test]
    fn what_is_under_way_as_the_stream_breaks_takes_nobodys_place() {
        let mut upgrade = UdpUpgrade::default();
        upgrade.note_up(Some("127.0.0.1:7711".parse().unwrap()), 0);
        upgrade.begin(UPGRADE_MILLIS_MIN).unwrap();
        upgrade.note_break();
        assert!(upgrade.attempt.is_none() && !upgrade.note_failure(UPGRADE_MILLIS_MIN));
        assert_eq!(upgrade.begin(u64::MAX), None);
    }
}
