//! How a stream to another relay that went over TCP, because UDP did not get through, goes back to UDP.
//!
//! A stream over TCP that works is kept. Behind it UDP is dialled now and then, at longer and longer intervals; once that gets
//! through, a second connection stands beside the first and takes over its number: frames go out by the new one, and the
//! old one is *retired*. It finishes the frame that it has begun, still hands over what comes by it, and is closed when
//! both sides have said that they have all of it. So nothing is lost, and nobody has to ask.
//!
//! What may never happen: a stream that works is closed before another has taken its place.

use std::net::SocketAddr;

use landbridge_proto::relay::STREAMS_MAX;

use super::*;

/// Set in the `cookie` of a dialler's hello, beside the number of the stream: the older stream of that number is well, and makes
/// way.
pub const TAKES_OVER: u64 = 1 << 32;

/// UDP is tried again behind a link over TCP after so long; doubled each time that it does not get through,
const UPGRADE_MILLIS_MIN: u64 = 5_000;
/// up to this.
const UPGRADE_MILLIS_MAX: u64 = 600_000;
/// A stream that has been retired stands at least so long: both sides have said three times what they have taken in.
const RETIRED_MILLIS_MIN: u64 = 3_500;
/// And no longer than this: what it has not carried by then counts as lost, and is sent again.
const RETIRED_MILLIS_MAX: u64 = 10_000;

const _: () = assert!(STREAMS_MAX as u64 <= TAKES_OVER);

/// When UDP is dialled behind a stream over TCP.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UdpUpgrade {
    /// The next attempt, and where to.
    due: Option<(u64, SocketAddr)>,
    pause_millis: u64,
    attempt: Option<SocketAddr>,
}

impl UdpUpgrade {
    /// The stream is up: over TCP to this address, where UDP is wanted, or over UDP.
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

    /// The stream is down: whatever is dialled now is to take nobody's place.
    pub fn note_break(&mut self) {
        (self.due, self.attempt) = (None, None);
    }

    /// The attempt that is to be made now. It is under way from now on.
    pub fn begin(&mut self, now_millis: u64) -> Option<SocketAddr> {
        let (_, to) = self.due.take_if(|(due, _)| *due <= now_millis)?;
        self.attempt = Some(to);
        Some(to)
    }

    /// The attempt has failed. False: none was under way.
    pub fn note_failure(&mut self, now_millis: u64) -> bool {
        let Some(to) = self.attempt.take() else { return false };
        self.pause_millis = (2 * self.pause_millis).clamp(UPGRADE_MILLIS_MIN, UPGRADE_MILLIS_MAX);
        self.due = Some((now_millis + self.pause_millis, to));
        true
    }
}

impl EventLoop<'_> {
    /// Dials over UDP, where that is due, behind streams that stand.
    pub(super) fn upgrade_to_udp(&mut self, now_millis: u64) {
        for index in 0..self.dials.len() {
            let dial = &mut self.dials[index];
            if !dial.udp_backoff.allows_udp(now_millis) {
                continue;
            }
            let Some(to) = dial.udp_upgrade.begin(now_millis) else { continue };
            let (cluster, stream) = (dial.peer.cluster, dial.stream);
            if !self.dial_over_udp((cluster, stream), to, now_millis, true) {
                self.dials[index].udp_upgrade.note_failure(now_millis);
            }
        }
    }

    /// These streams make way for another.
    pub(super) fn retire(&mut self, streams: Vec<LinkId>) {
        let now = sys::now_millis();
        for stream in streams {
            self.relay.retire(stream);
            let Some(slot) = self.slots.get(stream.0 as usize).copied().flatten() else { continue };
            self.connections[slot].retired_millis = Some(now);
            self.retired.push(self.key(slot));
            // It may have waited for room with the rest of a frame.
            self.flush(stream, &[]);
        }
    }

    /// Closes those that have done their work.
    pub(super) fn close_retired(&mut self, now_millis: u64) {
        for key in std::mem::take(&mut self.retired) {
            let Some(connection) = self.find(key) else { continue };
            let (Some(since), Some(link)) = (connection.retired_millis, connection.link()) else {
                continue;
            };
            let age = now_millis.saturating_sub(since);
            let is_done = age >= RETIRED_MILLIS_MIN && self.relay.is_acknowledged(link);
            match is_done || age >= RETIRED_MILLIS_MAX {
                true => self.schedule_close(key.slot, "another has taken its place".into()),
                false => self.retired.push(key),
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
