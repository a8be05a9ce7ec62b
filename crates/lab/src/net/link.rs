//! One direction of one link: the fate of a packet between the sending and the receiving device.
//!
//! In: the size of a packet and the time at which the packet is offered. Out: the times of arrival
//! (none for a dropped packet, two for a duplicated packet), and whether the packet arrives
//! corrupted. The link never sees the packet's bytes and has no clock. The random fate of the n-th
//! packet of a link depends only on the seed; only the queue depends on the time at which the
//! packet is offered.
//!
//! A packet passes, in this order: the bounded queue (tail drop), serialisation at the link's rate,
//! random faults (loss, corruption, duplication), and the delay. A randomly lost packet has still
//! used the link's capacity. Jitter lengthens the delay but never reorders packets; only `reorder`
//! does, by delaying a packet by `reorder_by`.

use std::collections::VecDeque;

use super::units::{Rate, Share, Size, Span};

/// Nanoseconds since the lab's clock began.
pub type Nanos = u64;

/// Bytes of the queue of a link whose file gives no queue, unless the delay needs a larger queue
/// (see `Shape::queue_or_default`).
const QUEUE_BYTES_MIN: u64 = 512 * 1024;

/// Delay of a reordered packet if the file gives none: a few packets at 100 Mbit/s.
const REORDER_BY_DEFAULT: Span = Span::from_micros(1_000);

/// The properties of one direction of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Bytes of IP packets, headers included, per time; `None` for a rate without a limit.
    pub rate: Option<Rate>,
    /// One-way delay, added after the serialisation of the packet.
    pub delay: Span,
    /// Additional random delay, uniform from 0 to this value.
    pub jitter: Span,
    pub loss: Share,
    pub duplicate: Share,
    pub reorder: Share,
    /// Additional delay of a reordered packet.
    pub reorder_by: Span,
    pub corrupt: Share,
    /// Whether corruption keeps IP, TCP and UDP checksums valid, so that only an end-to-end check
    /// can detect the corruption.
    pub repair_checksums: bool,
    /// Capacity of the queue; `None` for the default of `queue_or_default`.
    pub queue: Option<Size>,
    /// Largest IP packet in bytes. Larger packets are dropped without a notice, as in a tunnel
    /// whose ICMP messages a firewall drops; `None` for no limit.
    pub mtu: Option<u32>,
    /// The link drops every packet.
    pub down: bool,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            rate: None,
            delay: Span::default(),
            jitter: Span::default(),
            loss: Share::default(),
            duplicate: Share::default(),
            reorder: Share::default(),
            reorder_by: REORDER_BY_DEFAULT,
            corrupt: Share::default(),
            repair_checksums: false,
            queue: None,
            mtu: None,
            down: false,
        }
    }
}

impl Shape {
    /// The queue's capacity in bytes. Default: the bytes that the link carries in one round trip,
    /// which lets one TCP connection fill the link, but at least eight of the largest packets.
    pub fn queue_or_default(&self) -> u64 {
        let round_trip = 2 * self.delay.nanos;
        let in_flight = self.rate.map_or(u64::MAX, |rate| rate.bytes_in(round_trip));
        self.queue.map_or(in_flight.max(QUEUE_BYTES_MIN), |queue| queue.bytes)
    }

    /// Whether random faults or the size limit apply to each packet separately, so that packets
    /// joined by segmentation offload must be cut.
    pub fn is_per_packet(&self) -> bool {
        let chances = [self.loss, self.duplicate, self.reorder, self.corrupt];
        self.mtu.is_some() || chances.iter().any(|share| share.fraction > 0.0)
    }
}

/// The arrival of a packet: its time and its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    pub at: Nanos,
    /// Time at which the packet's first byte arrives; the next link may begin to send the packet
    /// from then on.
    pub began: Nanos,
    /// Random number that selects the corrupted bits; `None` for an intact packet.
    pub corruption: Option<u64>,
    /// The packet has been delayed so that later packets overtake it.
    pub reordered: bool,
}

impl Arrival {
    /// Whether the packet is intact and in order.
    pub fn is_plain(&self) -> bool {
        self.corruption.is_none() && !self.reordered
    }
}

/// The fate of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Arrives(Arrival),
    ArrivesTwice(Arrival, Arrival),
    Lost,
    /// The queue was full.
    Overflowed,
    /// The packet is larger than the link's MTU.
    Oversized,
    /// The link is down.
    Cut,
}

/// Counters of a link since the link was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub packets: u64,
    pub bytes: u64,
    pub lost: u64,
    pub overflowed: u64,
    pub oversized: u64,
    pub cut: u64,
    pub duplicated: u64,
    pub reordered: u64,
    pub corrupted: u64,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Link {
    shape: Shape,
    queue_bytes_max: u64,
    seed: u64,
    /// Packets offered so far; together with the seed this number determines each packet's random
    /// draws.
    offered: u64,
    /// Time at which the link will have serialised every accepted packet.
    wire_free: Nanos,
    /// Earliest arrival of the next packet in order.
    last_arrival: Nanos,
    /// Packets that have not been serialised: the time at which they will be, and their size.
    waiting: VecDeque<(Nanos, u64)>,
    waiting_bytes: u64,
    counts: Counts,
}

impl Link {
    pub fn new(shape: Shape, seed: u64) -> Link {
        Link {
            queue_bytes_max: shape.queue_or_default(),
            shape,
            seed,
            offered: 0,
            wire_free: 0,
            last_arrival: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            counts: Counts::default(),
        }
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Changes the link for packets offered from now on. Packets under way keep their times.
    pub fn reshape(&mut self, shape: Shape) {
        self.queue_bytes_max = shape.queue_or_default();
        self.shape = shape;
    }

    /// Whether the queue has capacity for `bytes` now. An empty queue accepts a packet of any size.
    pub fn has_room(&mut self, now: Nanos, bytes: u64) -> bool {
        self.retire(now);
        self.waiting.is_empty() || self.waiting_bytes + bytes <= self.queue_bytes_max
    }

    /// Offers a packet of `bytes` bytes, which has arrived completely at `now` and whose first byte
    /// arrived at `began` <= `now`.
    pub fn handle_packet(&mut self, now: Nanos, began: Nanos, bytes: u64) -> Fate {
        let draws = PacketDraws { seed: self.seed, packet: self.offered };
        self.offered += 1;
        if self.shape.down {
            self.counts.cut += 1;
            return Fate::Cut;
        }
        if self.shape.mtu.is_some_and(|mtu| bytes > u64::from(mtu)) {
            self.counts.oversized += 1;
            return Fate::Oversized;
        }
        if !self.has_room(now, bytes) {
            self.counts.overflowed += 1;
            return Fate::Overflowed;
        }
        let (first, sent) = self.serialise(now, began, bytes);
        self.counts.packets += 1;
        self.counts.bytes += bytes;
        if draws.happens(ChanceEvent::Loss, self.shape.loss) {
            self.counts.lost += 1;
            return Fate::Lost;
        }
        self.arrive(first, sent, draws)
    }

    /// Serialises the packet; returns the times at which its first byte and its last byte leave.
    fn serialise(&mut self, now: Nanos, began: Nanos, bytes: u64) -> (Nanos, Nanos) {
        let Some(rate) = self.shape.rate else { return (now, now) };
        let first = self.wire_free.max(began);
        let sent = (first + rate.serialisation_nanos(bytes)).max(now);
        self.wire_free = sent;
        self.waiting.push_back((sent, bytes));
        self.waiting_bytes += bytes;
        (first, sent)
    }

    fn arrive(&mut self, first: Nanos, sent: Nanos, draws: PacketDraws) -> Fate {
        let delay =
            self.shape.delay.nanos + draws.within(ChanceEvent::Jitter, self.shape.jitter.nanos);
        let in_turn = (sent + delay).max(self.last_arrival);
        let corruption = draws
            .happens(ChanceEvent::Corrupt, self.shape.corrupt)
            .then(|| draws.draw(ChanceEvent::CorruptBits));
        self.counts.corrupted += u64::from(corruption.is_some());
        let began = in_turn - (sent - first);
        let mut arrival = Arrival { at: in_turn, began, corruption, reordered: false };
        if draws.happens(ChanceEvent::Reorder, self.shape.reorder) {
            arrival.reordered = true;
            arrival.at += self.shape.reorder_by.nanos;
            arrival.began += self.shape.reorder_by.nanos;
            self.counts.reordered += 1;
        } else {
            self.last_arrival = in_turn;
        }
        if draws.happens(ChanceEvent::Duplicate, self.shape.duplicate) {
            self.counts.duplicated += 1;
            return Fate::ArrivesTwice(arrival, Arrival { corruption: None, ..arrival });
        }
        Fate::Arrives(arrival)
    }

    /// Removes packets from the queue that have been serialised by `now`.
    fn retire(&mut self, now: Nanos) {
        while let Some(&(sent, bytes)) = self.waiting.front() {
            if sent > now {
                break;
            }
            self.waiting.pop_front();
            self.waiting_bytes -= bytes;
        }
    }
}

/// A seed for one direction of one link, from the lab's seed and the direction's name.
pub fn seed_of(lab_seed: u64, direction: &str) -> u64 {
    direction.bytes().fold(mix(lab_seed), |seed, byte| mix(seed ^ u64::from(byte)))
}

/// The random draws of one packet. Each event has a draw of its own, so that a change of one
/// probability of a link does not change other events.
#[derive(Clone, Copy)]
struct PacketDraws {
    seed: u64,
    packet: u64,
}

#[derive(Clone, Copy)]
enum ChanceEvent {
    Loss,
    Jitter,
    Corrupt,
    CorruptBits,
    Reorder,
    Duplicate,
}

/// Draws reserved per packet; the number is larger than the number of `ChanceEvent`s, so that a new
/// event changes no earlier packet's fate.
const DRAWS_PER_PACKET: u64 = 16;
const _: () = assert!((ChanceEvent::Duplicate as u64) < DRAWS_PER_PACKET);

impl PacketDraws {
    fn draw(self, event: ChanceEvent) -> u64 {
        let index = self.packet.wrapping_mul(DRAWS_PER_PACKET).wrapping_add(event as u64);
        mix(self.seed.wrapping_add(index.wrapping_mul(GOLDEN)))
    }

    fn happens(self, event: ChanceEvent, share: Share) -> bool {
        share.fraction > 0.0 && self.unit(event) < share.fraction
    }

    fn within(self, event: ChanceEvent, nanos: u64) -> u64 {
        if nanos == 0 { 0 } else { (self.unit(event) * nanos as f64) as u64 }
    }

    /// A random number, uniform from 0 to 1, 1 excluded: the top 53 bits fill a double exactly.
    fn unit(self, event: ChanceEvent) -> f64 {
        (self.draw(event) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// 2^64 divided by the golden ratio: multiples of this number are spread evenly over all 64-bit
/// numbers.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64: every input bit changes each output bit with a probability of one
/// half.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MBIT: u64 = 1_000_000;

    #[test]
    fn an_idle_link_delays_by_serialisation_and_delay_exactly() {
        let mut link = Link::new(shape_with_rate(100 * MBIT, 5_000_000), 1);
        // 1250 bytes at 100 Mbit/s take 100 us.
        assert_eq!(link.handle_packet(7, 7, 1250), arrives(7 + 100_000 + 5_000_000, 7 + 5_000_000));
    }

    #[test]
    fn a_link_without_rate_delays_only() {
        let shape = Shape { delay: Span { nanos: 42 }, ..Shape::default() };
        let mut link = Link::new(shape, 1);
        assert_eq!(link.handle_packet(10, 10, 60_000), arrives(52, 52));
        assert_eq!(link.handle_packet(10, 10, 60_000), arrives(52, 52));
    }

    #[test]
    fn rate_is_kept_when_more_is_offered() {
        let mut link = Link::new(shape_with_rate(68_054_155, 0), 1);
        let (mut now, mut bytes, mut last) = (0, 0, 0);
        while now < 1_000_000_000 {
            if let Fate::Arrives(arrival) = link.handle_packet(now, now, 1500) {
                bytes += 1500;
                last = arrival.at;
            }
            now += 50_000;
        }
        let rate = bytes as f64 * 8e9 / last as f64;
        assert!((rate / 68_054_155.0 - 1.0).abs() < 0.001, "{rate}");
        assert!(link.counts().overflowed > 0);
    }

    #[test]
    fn the_queue_is_bounded_and_drops_its_tail() {
        let queue = Some(Size { bytes: 10_000 });
        let mut link = Link::new(Shape { queue, ..shape_with_rate(MBIT, 0) }, 1);
        let fates: Vec<Fate> = (0..20).map(|_| link.handle_packet(0, 0, 1000)).collect();
        assert!(fates[..10].iter().all(|fate| matches!(fate, Fate::Arrives(_))));
        assert!(fates[10..].iter().all(|fate| *fate == Fate::Overflowed));
        // One packet takes 8 ms; then the queue has capacity for exactly one more.
        assert!(link.has_room(8_000_000, 1000));
        assert!(matches!(link.handle_packet(8_000_000, 8_000_000, 1000), Fate::Arrives(_)));
        assert_eq!(link.handle_packet(8_000_000, 8_000_000, 1000), Fate::Overflowed);
    }

    #[test]
    fn a_packet_larger_than_the_queue_passes_when_the_link_is_idle() {
        let queue = Some(Size { bytes: 1 });
        let mut link = Link::new(Shape { queue, ..shape_with_rate(MBIT, 0) }, 1);
        assert!(matches!(link.handle_packet(0, 0, 1000), Fate::Arrives(_)));
    }

    #[test]
    fn packets_above_the_mtu_vanish_before_they_take_time() {
        let shape = Shape { mtu: Some(1280), ..shape_with_rate(100 * MBIT, 0) };
        let mut link = Link::new(shape, 1);
        assert_eq!(link.handle_packet(0, 0, 1281), Fate::Oversized);
        assert_eq!(link.handle_packet(0, 0, 1280), arrives(102_400, 0));
        assert_eq!((link.counts().oversized, link.counts().packets), (1, 1));
    }

    #[test]
    fn a_packet_that_streams_in_streams_out() {
        let mut link = Link::new(shape_with_rate(100 * MBIT, 0), 1);
        // The packet's first byte came 100 us ago over an equally fast link, so the last byte
        // leaves now, not 100 us later.
        assert_eq!(link.handle_packet(100_000, 0, 1250), arrives(100_000, 0));
    }

    #[test]
    fn frequencies_are_as_asked() {
        let share = Share { fraction: 0.05 };
        let mut link = Link::new(
            Shape {
                loss: share,
                duplicate: share,
                reorder: share,
                corrupt: share,
                ..Shape::default()
            },
            11,
        );
        const PACKETS: u64 = 100_000;
        for now in 0..PACKETS {
            link.handle_packet(now, now, 100);
        }
        let counts = link.counts();
        // Five standard deviations of a binomial distribution with p = 0.05 are 345 packets.
        for (count, of) in [
            (counts.lost, PACKETS),
            (counts.corrupted, PACKETS - counts.lost),
            (counts.reordered, PACKETS - counts.lost),
            (counts.duplicated, PACKETS - counts.lost),
        ] {
            assert!((count as f64 - of as f64 * 0.05).abs() < 345.0, "{counts:?}");
        }
    }

    #[test]
    fn a_link_that_is_down_passes_nothing() {
        let mut link = Link::new(Shape { down: true, ..Shape::default() }, 1);
        assert_eq!(link.handle_packet(0, 0, 100), Fate::Cut);
        link.reshape(Shape::default());
        assert!(matches!(link.handle_packet(0, 0, 100), Fate::Arrives(_)));
    }

    #[test]
    fn directions_have_seeds_of_their_own() {
        assert_ne!(seed_of(1, "a>b"), seed_of(1, "b>a"));
        assert_ne!(seed_of(1, "a>b"), seed_of(2, "a>b"));
    }

    proptest! {
        #[test]
        fn same_seed_same_fates(
            seed: u64,
            packets in prop::collection::vec((0u64..1_000_000, 1u64..2000), 1..200),
        ) {
            let run = || {
                let mut link = Link::new(hostile_shape(), seed);
                let mut now = 0;
                let mut offer = |&(gap, bytes): &(u64, u64)| {
                    now += gap;
                    link.handle_packet(now, now, bytes)
                };
                packets.iter().map(&mut offer).collect::<Vec<Fate>>()
            };
            prop_assert_eq!(run(), run());
        }

        #[test]
        fn arrivals_keep_order_delay_and_rate(
            seed: u64,
            gaps in prop::collection::vec((0u64..300_000, 40u64..1500), 1..300),
        ) {
            let rate = Rate { bits_per_second: 50 * MBIT };
            let shape = Shape {
                jitter: Span { nanos: 2_000_000 },
                loss: Share { fraction: 0.1 },
                ..shape_with_rate(rate.bits_per_second, 3_000_000)
            };
            let mut link = Link::new(shape, seed);
            let (mut now, mut last) = (0, 0);
            for (gap, bytes) in gaps {
                now += gap;
                if let Fate::Arrives(arrival) = link.handle_packet(now, now, bytes) {
                    let earliest = now + 3_000_000 + rate.serialisation_nanos(bytes);
                    prop_assert!(arrival.at >= last, "overtaken");
                    prop_assert!(arrival.at >= earliest);
                    prop_assert!(arrival.began <= arrival.at);
                    last = arrival.at;
                }
            }
        }

        #[test]
        fn the_queue_never_holds_more_than_its_bound(
            gaps in prop::collection::vec((0u64..100_000, 1u64..9000), 1..300),
        ) {
            let queue = Some(Size { bytes: 20_000 });
            let mut link = Link::new(Shape { queue, ..shape_with_rate(20 * MBIT, 0) }, 1);
            let mut now = 0;
            for (gap, bytes) in gaps {
                now += gap;
                link.handle_packet(now, now, bytes);
                prop_assert!(link.waiting_bytes <= 20_000);
            }
        }
    }

    fn shape_with_rate(bits_per_second: u64, delay_nanos: u64) -> Shape {
        let rate = Some(Rate { bits_per_second });
        Shape { rate, delay: Span { nanos: delay_nanos }, ..Shape::default() }
    }

    fn hostile_shape() -> Shape {
        let share = Share { fraction: 0.2 };
        Shape {
            jitter: Span { nanos: 1_000_000 },
            loss: share,
            duplicate: share,
            reorder: share,
            corrupt: share,
            ..shape_with_rate(10 * MBIT, 1_000_000)
        }
    }

    fn arrives(at: Nanos, began: Nanos) -> Fate {
        Fate::Arrives(Arrival { at, began, corruption: None, reordered: false })
    }
}
