//! Congestion control: how many bytes may be in flight on a path, and how fast they may leave. One
//! interface serves both algorithms.
//!
//! The owner of the path reports every transmission, every acknowledgement, every loss and every
//! timeout, and sends while the bytes in flight are less than the window. One report is about bytes
//! that were sent together; several datagrams sent at the same time may be reported as one. For
//! every transmission the owner keeps the time of sending and the value of
//! [`Congestion::delivered_bytes`] at that time, and passes both with the acknowledgement.
//!
//! Neither algorithm may ever stop a path for good: the window holds at least two datagrams, and
//! the rate is never zero.

use super::bbr::Bbr;
use super::cubic::Cubic;
use super::rtt::SAMPLE_NANOS_MAX;
use super::time::Time;
use super::window::Acked;

/// The congestion control algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionAlgorithm {
    /// CUBIC: the window grows until something is lost. Fair to TCP, and right where loss means
    /// congestion.
    Cubic,
    /// BBR: measures rate and delay. Right where bytes are lost without congestion.
    Bbr,
}

/// The congestion control of one path.
#[derive(Clone, Debug)]
pub enum Congestion {
    /// The state of [`CongestionAlgorithm::Cubic`].
    Cubic(Cubic),
    /// The state of [`CongestionAlgorithm::Bbr`].
    Bbr(Bbr),
}

impl Congestion {
    /// The congestion control of a path that has just opened, with datagrams of `mtu_bytes` bytes.
    pub fn new(kind: CongestionAlgorithm, mtu_bytes: u64) -> Congestion {
        match kind {
            CongestionAlgorithm::Cubic => Congestion::Cubic(Cubic::new(mtu_bytes)),
            CongestionAlgorithm::Bbr => Congestion::Bbr(Bbr::new(mtu_bytes)),
        }
    }

    /// Sets the size of datagrams from now on.
    pub fn set_mtu(&mut self, mtu_bytes: u64) {
        match self {
            Congestion::Cubic(cubic) => cubic.set_mtu(mtu_bytes),
            Congestion::Bbr(bbr) => bbr.set_mtu(mtu_bytes),
        }
    }

    /// Records that `bytes` bytes have left; `in_flight` bytes are in flight with them. `was_held`
    /// says that the window or the rate held these bytes back before: if nothing was in flight
    /// then, the application did have data to send.
    pub fn handle_sent(&mut self, now: Time, bytes: u64, in_flight: u64, was_held: bool) {
        match self {
            Congestion::Cubic(_) => {}
            Congestion::Bbr(bbr) => bbr.handle_sent(now, bytes, in_flight, was_held),
        }
    }

    /// Records that bytes have arrived. A round trip that is longer than any path has one is
    /// ignored: one side was computing or stopped, which says nothing about the path.
    pub fn handle_acked(&mut self, now: Time, acked: Acked) {
        let rtt_nanos = acked.rtt_nanos.filter(|nanos| *nanos < SAMPLE_NANOS_MAX);
        let acked = Acked { rtt_nanos, ..acked };
        match self {
            Congestion::Cubic(cubic) => cubic.handle_acked(now, acked),
            Congestion::Bbr(bbr) => bbr.handle_acked(now, acked),
        }
    }

    /// Records that bytes sent at `sent_at` are lost: bytes sent after them have arrived.
    pub fn handle_lost(&mut self, now: Time, bytes: u64, sent_at: Time) {
        match self {
            Congestion::Cubic(cubic) => cubic.handle_lost(now, bytes, sent_at),
            Congestion::Bbr(bbr) => bbr.handle_lost(now, bytes, sent_at),
        }
    }

    /// Records that no acknowledgement has come within the timeout
    /// ([`super::rtt::RttEstimator::timeout_nanos`]). Little is sent until one comes. If the first
    /// acknowledgement then is for bytes sent before the timeout, the peer was only busy, and the
    /// earlier state is restored.
    pub fn handle_timeout(&mut self, now: Time) {
        match self {
            Congestion::Cubic(cubic) => cubic.handle_timeout(now),
            Congestion::Bbr(bbr) => bbr.handle_timeout(now),
        }
    }

    /// The window: bytes that may be in flight.
    pub fn window_bytes(&self) -> u64 {
        match self {
            Congestion::Cubic(cubic) => cubic.window_bytes(),
            Congestion::Bbr(bbr) => bbr.window_bytes(),
        }
    }

    /// The rate at which bytes may leave, for [`super::pacer::Pacer::set_rate`]. `None` until a
    /// round trip has been measured, which lets everything leave.
    pub fn rate_bytes_per_second(&self) -> Option<u64> {
        match self {
            Congestion::Cubic(cubic) => cubic.rate_bytes_per_second(),
            Congestion::Bbr(bbr) => bbr.rate_bytes_per_second(),
        }
    }

    /// All bytes acknowledged so far, which the owner keeps with every transmission.
    pub fn delivered_bytes(&self) -> u64 {
        match self {
            Congestion::Cubic(cubic) => cubic.delivered_bytes(),
            Congestion::Bbr(bbr) => bbr.delivered_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::{ModelFlow, ModelLink, run};
    use super::super::time::{MILLISECOND, SECOND};
    use super::super::window::WINDOW_BYTES_MAX;
    use super::*;

    const GIGABIT: u64 = 125_000_000;

    /// A link of 1 Gbit/s with a queue of its bandwidth-delay product.
    fn gigabit(rtt_millis: u64, loss_per_mille: u64) -> ModelLink {
        let queue_bytes = GIGABIT / 1000 * rtt_millis;
        let (rate, rtt_nanos) = (GIGABIT, rtt_millis * MILLISECOND);
        ModelLink { rate, rtt_nanos, queue_bytes, loss_per_mille, cut: [Time(0); 2] }
    }

    /// The percentage of a link's rate that a single flow used from the beginning to the end.
    fn percent_used(link: &ModelLink, kind: CongestionAlgorithm, seconds: u64) -> u64 {
        let flows = [ModelFlow { kind, start: Time(0), report_nanos: 0 }];
        let bytes = run(link, &flows, Time(0), Time(seconds * SECOND), 7);
        let percent = bytes[0] * 100 / (link.rate * seconds);
        let (micros, loss) = (link.rtt_nanos / 1000, link.loss_per_mille);
        std::println!("{kind:?}, {micros} us, {loss}/1000 lost: {percent} %");
        percent
    }

    #[test]
    fn cubic_fills_a_clean_link() {
        assert!(percent_used(&gigabit(10, 0), CongestionAlgorithm::Cubic, 5) >= 90);
    }

    #[test]
    fn bbr_fills_a_clean_link() {
        assert!(percent_used(&gigabit(1, 0), CongestionAlgorithm::Bbr, 2) >= 90);
        assert!(percent_used(&gigabit(10, 0), CongestionAlgorithm::Bbr, 5) >= 90);
        assert!(percent_used(&gigabit(50, 0), CongestionAlgorithm::Bbr, 10) >= 90);
    }

    #[test]
    fn both_fill_a_local_network() {
        let near =
            ModelLink { rtt_nanos: MILLISECOND / 10, queue_bytes: 256 << 10, ..gigabit(1, 0) };
        let fast = ModelLink { rate: 10 * GIGABIT, queue_bytes: 2 << 20, ..near.clone() };
        for kind in [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr] {
            assert!(percent_used(&near, kind, 1) >= 90);
            assert!(percent_used(&fast, kind, 1) >= 90);
        }
    }

    #[test]
    fn bbr_holds_its_rate_under_random_loss() {
        assert!(percent_used(&gigabit(10, 10), CongestionAlgorithm::Bbr, 5) >= 80);
        assert!(percent_used(&gigabit(10, 50), CongestionAlgorithm::Bbr, 5) >= 80);
        assert!(percent_used(&gigabit(50, 10), CongestionAlgorithm::Bbr, 10) >= 80);
        assert!(percent_used(&gigabit(50, 50), CongestionAlgorithm::Bbr, 10) >= 60);
    }

    #[test]
    fn cubic_yields_to_loss_as_it_must() {
        let percent = percent_used(&gigabit(10, 10), CongestionAlgorithm::Cubic, 5);
        assert!((1..=10).contains(&percent));
    }

    /// A link of 100 Mbit/s and 10 ms.
    fn shared(queue_millis: u64) -> ModelLink {
        let rate = GIGABIT / 10;
        let queue_bytes = rate / 1000 * queue_millis;
        ModelLink { rate, queue_bytes, ..gigabit(10, 0) }
    }

    /// Jain's fairness index of two flows in percent; the second flow begins a second later.
    fn jain_percent(link: &ModelLink, kinds: [CongestionAlgorithm; 2], seconds: [u64; 2]) -> u64 {
        let flow = |kind, start| ModelFlow { kind, start: Time(start), report_nanos: 0 };
        let flows = [flow(kinds[0], 0), flow(kinds[1], SECOND)];
        let [from, to] = seconds.map(|seconds| Time(seconds * SECOND));
        let bytes = run(link, &flows, from, to, 7);
        let sum = u128::from(bytes[0] + bytes[1]);
        let squares: u128 = bytes.iter().map(|bytes| u128::from(*bytes).pow(2)).sum();
        let percent = (sum * sum * 100 / (2 * squares)) as u64;
        let used = sum * 100 / u128::from(link.rate * (seconds[1] - seconds[0]));
        let queue = link.queue_bytes;
        std::println!("{kinds:?}, queue {queue}: {bytes:?}, {used} % used, Jain {percent} %");
        assert!(used >= 85);
        percent
    }

    #[test]
    fn flows_of_a_kind_share() {
        for queue_millis in [4, 10] {
            assert!(
                jain_percent(&shared(queue_millis), [CongestionAlgorithm::Cubic; 2], [10, 30])
                    >= 90
            );
        }
        // A queue of this length overflows only every few seconds, and chance decides which flow
        // loses then.
        assert!(jain_percent(&shared(40), [CongestionAlgorithm::Cubic; 2], [20, 60]) >= 80);
        for queue_millis in [4, 10, 40] {
            assert!(
                jain_percent(&shared(queue_millis), [CongestionAlgorithm::Bbr; 2], [10, 30]) >= 90
            );
        }
    }

    /// BBR takes more than its share where the queue is short, which is a known property. The bound
    /// is half, the worst case.
    #[test]
    fn neither_kind_starves_the_other() {
        for (queue_millis, percent) in [(4, 55), (10, 65), (40, 80)] {
            for kinds in [
                [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr],
                [CongestionAlgorithm::Bbr, CongestionAlgorithm::Cubic],
            ] {
                assert!(jain_percent(&shared(queue_millis), kinds, [10, 30]) >= percent);
            }
        }
    }

    #[test]
    fn a_cut_line_is_used_again_when_it_heals() {
        for kind in [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr] {
            let cut = [Time(SECOND), Time(3 * SECOND)];
            let link = ModelLink { cut, ..gigabit(10, 0) };
            let flows = [ModelFlow { kind, start: Time(0), report_nanos: 0 }];
            let bytes = run(&link, &flows, Time(5 * SECOND), Time(7 * SECOND), 7);
            let percent = bytes[0] * 100 / (2 * GIGABIT);
            std::println!("{kind:?} from two seconds after a cut of two: {percent} %");
            assert!(percent >= 80);
        }
    }

    #[test]
    fn reports_in_bunches_cost_little() {
        let link = ModelLink { queue_bytes: GIGABIT / 100, ..gigabit(1, 0) };
        for kind in [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr] {
            let flows = [ModelFlow { kind, start: Time(0), report_nanos: 2 * MILLISECOND }];
            let bytes = run(&link, &flows, Time(0), Time(2 * SECOND), 7);
            std::println!("{kind:?} in bunches: {} %", bytes[0] * 100 / (2 * GIGABIT));
            assert!(bytes[0] >= 2 * GIGABIT / 100 * 80);
        }
    }

    #[test]
    fn shallow_queues_are_survived() {
        for kind in [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr] {
            let link = ModelLink { queue_bytes: 64 << 10, ..gigabit(10, 0) };
            let percent = percent_used(&link, kind, 5);
            assert!(percent >= 50, "{kind:?}");
        }
    }

    /// In any order of events, with any times and sizes, the smallest window remains and nothing
    /// panics.
    #[test]
    fn no_input_stops_a_path() {
        let mut random = 1u64;
        let mut draw = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % bound
        };
        let values = [0, 1, 1472, MILLISECOND, SECOND, 3600 * SECOND, u64::MAX - 1, u64::MAX];
        for kind in [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr] {
            for _ in 0..200 {
                let mtu = [0, 1, 1472, 65_507, u64::MAX][draw(5) as usize];
                let mut path = Congestion::new(kind, mtu);
                for _ in 0..200 {
                    let [now, bytes, sent_at, delivered_at_send, rtt] =
                        core::array::from_fn(|_| values[draw(8) as usize]);
                    let (now, sent_at) = (Time(now), Time(sent_at));
                    let rtt_nanos = (draw(2) == 0).then_some(rtt);
                    let is_app_limited = draw(2) == 0;
                    match draw(5) {
                        0 => path.handle_sent(now, bytes, delivered_at_send, draw(2) == 0),
                        1 => path.handle_lost(now, bytes, sent_at),
                        2 => path.handle_timeout(now),
                        3 => path.set_mtu(bytes),
                        _ => path.handle_acked(
                            now,
                            Acked { bytes, sent_at, delivered_at_send, rtt_nanos, is_app_limited },
                        ),
                    }
                    assert!((2..=WINDOW_BYTES_MAX).contains(&path.window_bytes()), "{path:?}");
                    assert_ne!(path.rate_bytes_per_second(), Some(0));
                }
            }
        }
    }
}
