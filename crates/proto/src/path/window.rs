//! The window of a path, which both congestion control algorithms share: its bounds, and what they
//! learn of an acknowledgement.

use super::time::Time;

/// Datagrams that may be in flight in any case. With one datagram, every acknowledgement that waits
/// for a second datagram would stop the path.
pub const WINDOW_DATAGRAMS_MIN: u64 = 2;

/// Datagrams that may be in flight at first (RFC 6928), as long as they are of a usual size.
pub const WINDOW_DATAGRAMS_INITIAL: u64 = 10;

/// Bytes that may be in flight at first, where datagrams are larger.
pub const WINDOW_BYTES_INITIAL: u64 = 14_720;

/// The largest window in bytes: 10 Gbit/s over 800 ms.
pub const WINDOW_BYTES_MAX: u64 = 1 << 30;

/// The bytes of one transmission that the peer has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    /// The number of bytes.
    pub bytes: u64,
    /// The time of sending.
    pub sent_at: Time,
    /// The value of `Congestion::delivered_bytes` at the time of sending.
    pub delivered_at_send: u64,
    /// The round trip in nanoseconds, if the acknowledgement is a valid sample (see
    /// [`super::rtt`]).
    pub rtt_nanos: Option<u64>,
    /// There was nothing more to send at the time of sending, though more was allowed.
    pub is_app_limited: bool,
}

/// The window of a new path in bytes.
pub(super) fn initial_window(mtu_bytes: u64) -> u64 {
    let usual = WINDOW_DATAGRAMS_INITIAL.saturating_mul(mtu_bytes);
    usual.min(WINDOW_BYTES_INITIAL.max(minimum_window(mtu_bytes)))
}

/// The smallest window in bytes.
pub(super) fn minimum_window(mtu_bytes: u64) -> u64 {
    WINDOW_DATAGRAMS_MIN.saturating_mul(mtu_bytes).min(WINDOW_BYTES_MAX)
}
