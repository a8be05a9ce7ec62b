//! How large a datagram a path carries, found by probing (RFC 8899). Sizes are UDP payload bytes.
//!
//! A path starts at a size that every network carries. The owner asks for a size to probe, sends a
//! datagram of this size without data, and reports whether it arrived. The search probes the usual
//! sizes first, then halves the rest. A size counts as too large when several probes of it were
//! lost, because a single probe may have been lost for any reason. After the search comes a pause,
//! then another search, because routes change.
//!
//! Lost payload shows that a route has become worse: if several large datagrams in a row are lost
//! and none arrives, the size falls back to the base at once. A path that is dead altogether looks
//! the same; there the small size does no harm.
//!
//! | phase | size passes, or fails | own host refuses | payload lost in a row | its time has come |
//! |---|---|---|---|---|
//! | Searching | Searching, at last SearchComplete | same; BlackHole if in use | BlackHole | |
//! | SearchComplete | | BlackHole if in use | BlackHole | Searching |
//! | BlackHole | | | | Searching |

use super::time::{SECOND, Time};

/// The payload that every path carries (RFC 8899 for UDP). It fits IPv6's smallest packet of 1280
/// bytes.
pub const BASE_BYTES: usize = 1200;

/// The largest UDP payload over IPv4.
pub const LIMIT_BYTES: usize = 65_507;

/// The sizes that are common: tunnels over Ethernet, IPv6 and IPv4 over Ethernet, both over jumbo
/// frames of 9000 bytes, and the loopback.
const USUAL_BYTES: [usize; 6] = [1400, 1452, 1472, 8952, 8972, LIMIT_BYTES];

/// A search ends when it could gain less than this: two hundredths of a usual datagram.
const GRAIN_BYTES: usize = 32;

/// The lost probes of one size that show that the size does not pass (RFC 8899 has 3). On a path
/// that loses one datagram in twenty, one search in some thousand gives a wrong result, until the
/// next search.
const PROBES_MAX: u32 = 3;

/// The time after which a probe without a report counts as lost, in nanoseconds. RFC 8899 asks for
/// more than a second, and recommends fifteen, for senders without loss detection. The loss
/// detection of this project nearly always reports the loss earlier.
pub const PROBE_NANOS_MAX: u64 = 2 * SECOND;

/// The pause after a search, in nanoseconds (RFC 8899: ten minutes).
pub const SEARCH_PAUSE_NANOS: u64 = 600 * SECOND;

/// The first pause after large datagrams stopped arriving, in nanoseconds. Each further time in a
/// row doubles the pause, up to the pause after a search. A cut cable is repaired soon; a route
/// that has become narrow should not be probed for ever.
pub const BLACK_HOLE_NANOS: u64 = 5 * SECOND;

/// The number of large datagrams lost in a row, without an arrival, after which they count as not
/// passing any more. A queue that overflows rarely drops this many without letting one pass.
pub const BLACK_HOLE_LOSSES: u32 = 10;

/// The phase of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MtuPhase {
    /// The search probes larger sizes.
    Searching,
    /// The search has ended; the next search begins at the given time.
    SearchComplete(Time),
    /// Large datagrams were lost in a row; only the base size is used until the given time.
    BlackHole(Time),
}

/// The search for the largest datagram of one path.
#[derive(Clone, Debug)]
pub struct PathMtu {
    phase: MtuPhase,
    /// The largest size known to pass.
    current: usize,
    /// The smallest size known not to pass, or one more than the largest size allowed.
    too_large: usize,
    largest: usize,
    probe: Option<MtuProbe>,
    /// The lost probes of the size that is being probed.
    probes_lost: u32,
    /// The large payload datagrams lost since one arrived.
    payload_lost: u32,
    /// The number of times in a row that large datagrams stopped arriving.
    black_holes: u32,
}

#[derive(Clone, Copy, Debug)]
struct MtuProbe {
    bytes: usize,
    sent_at: Time,
}

impl PathMtu {
    /// Starts a search at the base size. The search never probes more than `largest_bytes`, which
    /// the host's own interface and buffers allow.
    pub fn new(largest_bytes: usize) -> PathMtu {
        let largest = largest_bytes.clamp(BASE_BYTES, LIMIT_BYTES);
        PathMtu {
            phase: MtuPhase::Searching,
            current: BASE_BYTES,
            too_large: largest + 1,
            largest,
            probe: None,
            probes_lost: 0,
            payload_lost: 0,
            black_holes: 0,
        }
    }

    /// The payload bytes that a datagram may have now.
    pub fn current_bytes(&self) -> usize {
        self.current
    }

    /// The phase of the search.
    pub fn phase(&self) -> MtuPhase {
        self.phase
    }

    /// The size of a probe that must be sent now, if any; the probe then counts as sent. At most
    /// one probe is in flight.
    pub fn probe_size(&mut self, now: Time) -> Option<usize> {
        self.expire(now);
        if self.probe.is_some() || self.phase != MtuPhase::Searching {
            return None;
        }
        let Some(bytes) = self.next_size() else {
            self.phase = MtuPhase::SearchComplete(now.after(SEARCH_PAUSE_NANOS));
            return None;
        };
        self.probe = Some(MtuProbe { bytes, sent_at: now });
        Some(bytes)
    }

    /// Records that a probe arrived: its size may be used from now on.
    pub fn handle_probe_acked(&mut self, now: Time, bytes: usize) {
        if !self.takes(bytes) {
            return;
        }
        self.current = self.current.max(bytes);
        self.too_large = self.too_large.max(self.current + 1);
        self.settle(now);
    }

    /// Records that a probe was lost. After [`PROBE_NANOS_MAX`], a probe counts as lost in any
    /// case.
    pub fn handle_probe_lost(&mut self, now: Time, bytes: usize) {
        if !self.takes(bytes) {
            return;
        }
        self.probes_lost += 1;
        if self.probes_lost >= PROBES_MAX {
            self.too_large = bytes;
            self.settle(now);
        }
    }

    /// Records that the host itself refused to send a probe or payload of this size (`EMSGSIZE`).
    pub fn handle_too_large(&mut self, now: Time, bytes: usize) {
        self.probe = self.probe.filter(|probe| probe.bytes < bytes);
        if bytes <= self.current {
            self.enter_black_hole(now);
        }
        self.too_large = self.too_large.min(bytes.max(BASE_BYTES + 1));
        if self.phase == MtuPhase::Searching {
            self.settle(now);
        }
    }

    /// Records that payload in a datagram of this size arrived.
    pub fn handle_acked(&mut self, bytes: usize) {
        if bytes > BASE_BYTES {
            self.payload_lost = 0;
            self.black_holes = 0;
        }
    }

    /// Records that payload in a datagram of this size was lost. Returns true if the size has
    /// fallen back to the base because of this loss.
    pub fn handle_lost(&mut self, now: Time, bytes: usize) -> bool {
        if bytes <= BASE_BYTES || bytes > self.current {
            return false;
        }
        self.payload_lost += 1;
        let is_swallowed = self.payload_lost >= BLACK_HOLE_LOSSES;
        if is_swallowed {
            self.enter_black_hole(now);
        }
        is_swallowed
    }

    /// The time at which [`PathMtu::probe_size`] may return a size again; `None` means at once.
    pub fn next_at(&self) -> Option<Time> {
        match (self.phase, self.probe) {
            (_, Some(probe)) => Some(probe.sent_at.after(PROBE_NANOS_MAX)),
            (MtuPhase::Searching, None) => None,
            (MtuPhase::SearchComplete(until) | MtuPhase::BlackHole(until), None) => Some(until),
        }
    }

    /// Applies the time: a probe without a report counts as lost, and a pause ends.
    fn expire(&mut self, now: Time) {
        self.forget_future(now);
        if let Some(probe) = self.probe
            && now.nanos_since(probe.sent_at) >= PROBE_NANOS_MAX
        {
            self.handle_probe_lost(now, probe.bytes);
        }
        if let MtuPhase::SearchComplete(until) | MtuPhase::BlackHole(until) = self.phase
            && now >= until
        {
            self.phase = MtuPhase::Searching;
            self.too_large = self.largest + 1;
            self.probes_lost = 0;
        }
    }

    /// Limits all recorded times, so that after a clock has jumped back nothing waits for the clock
    /// to catch up.
    fn forget_future(&mut self, now: Time) {
        if let Some(probe) = &mut self.probe {
            probe.sent_at = probe.sent_at.min(now);
        }
        if let MtuPhase::SearchComplete(until) | MtuPhase::BlackHole(until) = &mut self.phase {
            *until = (*until).min(now.after(SEARCH_PAUSE_NANOS));
        }
    }

    /// Whether `bytes` is the size of the probe in flight, which then counts as answered. Probes
    /// from before a fallback mean nothing any more.
    fn takes(&mut self, bytes: usize) -> bool {
        let is_ours = self.probe.is_some_and(|probe| probe.bytes == bytes);
        if is_ours {
            self.probe = None;
        }
        is_ours && self.phase == MtuPhase::Searching
    }

    /// Continues after a size has been decided: with the next size, or with a pause.
    fn settle(&mut self, now: Time) {
        self.probes_lost = 0;
        if self.next_size().is_none() {
            self.phase = MtuPhase::SearchComplete(now.after(SEARCH_PAUSE_NANOS));
        }
    }

    fn enter_black_hole(&mut self, now: Time) {
        let wait = (BLACK_HOLE_NANOS << self.black_holes.min(16)).min(SEARCH_PAUSE_NANOS);
        self.phase = MtuPhase::BlackHole(now.after(wait));
        self.black_holes = self.black_holes.saturating_add(1);
        self.current = BASE_BYTES;
        self.probe = None;
        self.probes_lost = 0;
        self.payload_lost = 0;
    }

    /// The size to probe next, between what passes and what does not.
    fn next_size(&self) -> Option<usize> {
        let (low, high) = (self.current, self.too_large);
        let is_between = |bytes: &usize| *bytes > low && *bytes < high;
        if let Some(usual) = USUAL_BYTES.into_iter().find(is_between) {
            return Some(usual);
        }
        if high - low <= GRAIN_BYTES {
            // The last few bytes are worth a probe only up to the host's own limit, where nothing
            // was refused.
            return (high == self.largest + 1 && low < self.largest).then_some(self.largest);
        }
        if high == self.largest + 1 {
            return Some(self.largest);
        }
        if USUAL_BYTES.contains(&low) {
            // A usual size that passes is nearly always exact; one more probe ends the search.
            return Some(low + GRAIN_BYTES);
        }
        Some(low + (high - low) / 2)
    }
}

const _: () = {
    assert!(BASE_BYTES < USUAL_BYTES[0]);
    assert!(GRAIN_BYTES > 1);
};

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// Searches on a path that carries `limit` bytes. Returns the probed sizes.
    fn search(mtu: &mut PathMtu, now: Time, limit: usize) -> Vec<usize> {
        let mut tried = Vec::new();
        while let Some(bytes) = mtu.probe_size(now) {
            tried.push(bytes);
            assert!(tried.len() < 100, "{tried:?}");
            if bytes <= limit {
                mtu.handle_probe_acked(now, bytes);
            } else {
                mtu.handle_probe_lost(now, bytes);
            }
        }
        tried.dedup();
        tried
    }

    fn found(limit: usize) -> PathMtu {
        let mut mtu = PathMtu::new(LIMIT_BYTES);
        search(&mut mtu, Time(0), limit);
        mtu
    }

    #[test]
    fn usual_networks_take_few_probes() {
        for (limit, sizes) in [
            (1472, &[1400, 1452, 1472, 8952, 1504][..]),
            (8972, &[1400, 1452, 1472, 8952, 8972, 65_507, 9004]),
            (65_507, &[1400, 1452, 1472, 8952, 8972, 65_507]),
        ] {
            let mut mtu = PathMtu::new(LIMIT_BYTES);
            assert_eq!(search(&mut mtu, Time(0), limit), sizes);
            assert_eq!(mtu.current_bytes(), limit);
        }
    }

    #[test]
    fn any_limit_is_found_to_the_grain() {
        for limit in (BASE_BYTES..=LIMIT_BYTES).step_by(61) {
            let size = found(limit).current_bytes();
            assert!(size <= limit && size + GRAIN_BYTES > limit, "{size} of {limit}");
        }
    }

    #[test]
    fn the_own_limit_is_reached_and_never_passed() {
        for largest in [0, BASE_BYTES, 1210, 1300, 1472, 1480, 9000, LIMIT_BYTES, usize::MAX] {
            let mut mtu = PathMtu::new(largest);
            let tried = search(&mut mtu, Time(0), LIMIT_BYTES);
            let largest = largest.clamp(BASE_BYTES, LIMIT_BYTES);
            assert!(tried.iter().all(|bytes| *bytes <= largest), "{tried:?}");
            assert_eq!(mtu.current_bytes(), largest);
        }
    }

    #[test]
    fn one_lost_probe_proves_nothing() {
        let mut mtu = PathMtu::new(1472);
        for _ in 1..PROBES_MAX {
            assert_eq!(mtu.probe_size(Time(0)), Some(1400));
            assert_eq!(mtu.probe_size(Time(0)), None);
            mtu.handle_probe_lost(Time(0), 1400);
        }
        assert_eq!(mtu.probe_size(Time(0)), Some(1400));
        mtu.handle_probe_acked(Time(0), 1400);
        assert_eq!(mtu.current_bytes(), 1400);
    }

    #[test]
    fn a_probe_nobody_answers_for_is_lost_in_time() {
        let mut mtu = PathMtu::new(1400);
        let mut now = Time(0);
        for _ in 0..PROBES_MAX {
            assert_eq!(mtu.probe_size(now), Some(1400));
            assert_eq!(mtu.next_at(), Some(now.after(PROBE_NANOS_MAX)));
            now = now.after(PROBE_NANOS_MAX);
        }
        assert_eq!(mtu.probe_size(now), Some(1300));
    }

    #[test]
    fn a_rest_ends_and_finds_what_has_become_larger() {
        let mut mtu = found(1472);
        assert_eq!(mtu.phase(), MtuPhase::SearchComplete(Time(SEARCH_PAUSE_NANOS)));
        assert_eq!(mtu.probe_size(Time(SEARCH_PAUSE_NANOS - 1)), None);
        assert_eq!(mtu.next_at(), Some(Time(SEARCH_PAUSE_NANOS)));
        search(&mut mtu, Time(SEARCH_PAUSE_NANOS), 8972);
        assert_eq!(mtu.current_bytes(), 8972);
    }

    #[test]
    fn swallowed_payload_falls_back_and_each_time_waits_longer() {
        let mut mtu = found(8972);
        let mut now = Time(0);
        for wait in [5, 10, 20, 40, 80, 160, 320, 600, 600] {
            for lost in 1..=BLACK_HOLE_LOSSES {
                let size = mtu.current_bytes();
                assert_eq!(mtu.handle_lost(now, size), lost == BLACK_HOLE_LOSSES);
            }
            assert_eq!(mtu.current_bytes(), BASE_BYTES);
            let until = now.after(wait * SECOND);
            assert_eq!(mtu.phase(), MtuPhase::BlackHole(until));
            assert_eq!(mtu.probe_size(Time(until.0 - 1)), None);
            now = until;
            search(&mut mtu, now, 8972);
        }
    }

    #[test]
    fn losses_between_arrivals_and_of_small_ones_are_no_black_hole() {
        let mut mtu = found(1472);
        for _ in 0..1000 {
            for _ in 1..BLACK_HOLE_LOSSES {
                assert!(!mtu.handle_lost(Time(0), 1472));
            }
            assert!(!mtu.handle_lost(Time(0), BASE_BYTES));
            mtu.handle_acked(1472);
        }
        assert_eq!(mtu.current_bytes(), 1472);
    }

    #[test]
    fn what_the_own_host_refuses_is_not_tried_again() {
        let mut mtu = PathMtu::new(LIMIT_BYTES);
        while let Some(bytes) = mtu.probe_size(Time(0)) {
            if bytes > 1472 {
                mtu.handle_too_large(Time(0), bytes);
            } else {
                mtu.handle_probe_acked(Time(0), bytes);
            }
        }
        assert_eq!(mtu.current_bytes(), 1472);
        // The route's interface was made smaller: even a size that passed is refused.
        mtu.handle_too_large(Time(0), 1472);
        assert_eq!(mtu.current_bytes(), BASE_BYTES);
    }

    /// Every phase with every event: whether a search, a pause or a black hole follows.
    #[test]
    fn every_phase_and_every_event() {
        let search = PathMtu::new(8972);
        let rest = found(8972);
        let mut black_hole = found(8972);
        black_hole.enter_black_hole(Time(0));
        type Event = fn(&mut PathMtu);
        let events: [Event; 6] = [
            |mtu| mtu.handle_probe_acked(Time(1), 1400),
            |mtu| (0..3).for_each(|_| mtu.handle_probe_lost(Time(1), 1400)),
            |mtu| mtu.handle_too_large(Time(1), 8972),
            |mtu| (0..10).for_each(|_| _ = mtu.handle_lost(Time(1), mtu.current)),
            |mtu| _ = mtu.probe_size(Time(1)),
            |mtu| _ = mtu.probe_size(Time(SEARCH_PAUSE_NANOS)),
        ];
        let name = |mtu: &PathMtu| match mtu.phase {
            MtuPhase::Searching => 'S',
            MtuPhase::SearchComplete(_) => 'R',
            MtuPhase::BlackHole(_) => 'D',
        };
        for (start, expected) in [(search, "SSSSSS"), (rest, "RRDDRS"), (black_hole, "DDDDDS")] {
            let reached = events.map(|event| {
                let mut mtu = start.clone();
                event(&mut mtu);
                name(&mtu)
            });
            assert!(reached.into_iter().eq(expected.chars()), "{start:?}: {reached:?}");
        }
    }

    #[test]
    fn a_clock_that_jumps_back_does_not_stop_the_search() {
        let late = Time(1 << 60);
        let mut mtu = PathMtu::new(8972);
        assert_eq!(mtu.probe_size(late), Some(1400));
        assert_eq!(mtu.probe_size(Time(0)), None);
        assert_eq!(mtu.probe_size(Time(PROBE_NANOS_MAX)), Some(1400));
        mtu.handle_probe_acked(late, 1400);
        search(&mut mtu, late, 1472);
        assert_eq!(mtu.probe_size(Time(0)), None);
        assert_eq!(mtu.next_at(), Some(Time(SEARCH_PAUSE_NANOS)));
    }

    #[test]
    fn jumping_clocks_and_any_sizes_are_survived() {
        let mut mtu = PathMtu::new(LIMIT_BYTES);
        for now in [u64::MAX, 0, u64::MAX, 5, 0].into_iter().cycle().take(500) {
            let now = Time(now);
            for bytes in [0, 1, BASE_BYTES, 1400, mtu.current_bytes(), LIMIT_BYTES, usize::MAX] {
                mtu.handle_probe_lost(now, bytes);
                mtu.handle_probe_acked(now, bytes);
                mtu.handle_lost(now, bytes);
                mtu.handle_too_large(now, bytes);
                mtu.handle_acked(bytes);
                mtu.probe_size(now);
                mtu.next_at();
            }
            assert!((BASE_BYTES..=LIMIT_BYTES).contains(&mtu.current_bytes()));
        }
    }
}
