//! A link model for tests of congestion control: a queue before a link of fixed rate, a delay, and
//! losses drawn from a seed. Senders always have data to send, take three later arrivals for a
//! loss, and have their own pacer and timer. They wake up a little late, as processes do: without
//! this, flows stay in step, and the same flow always finds the queue full.

use alloc::collections::{BinaryHeap, VecDeque};
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::congestion::{Congestion, CongestionAlgorithm};
use super::pacer::{BATCH_BYTES_MAX, Pacer};
use super::rtt::RttEstimator;
use super::time::{MICROSECOND, Time, nanos_for};
use super::window::Acked;

pub(super) const PACKET_BYTES: u64 = 1472;

/// The most nanoseconds by which a sender wakes up late.
const LATE_NANOS_MAX: u64 = 100 * MICROSECOND;

/// The number of later arrivals after which a packet counts as lost.
const REORDER_MAX: u64 = 3;

#[derive(Clone, Debug)]
pub(super) struct ModelLink {
    /// The rate in bytes per second.
    pub rate: u64,
    /// The round trip without queue, in nanoseconds.
    pub rtt_nanos: u64,
    pub queue_bytes: u64,
    /// The packets of a thousand that are lost behind the queue.
    pub loss_per_mille: u64,
    /// The times between which nothing arrives.
    pub cut: [Time; 2],
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ModelFlow {
    pub kind: CongestionAlgorithm,
    pub start: Time,
    /// The receiver acknowledges at multiples of this time only; 0 acknowledges every packet.
    pub report_nanos: u64,
}

/// Runs flows over one link. Returns, for each flow, the bytes that were acknowledged between two
/// times.
pub(super) fn run(
    link: &ModelLink,
    flows: &[ModelFlow],
    from: Time,
    to: Time,
    seed: u64,
) -> Vec<u64> {
    let mut model = Model {
        link: link.clone(),
        free_at: Time(0),
        random: seed,
        events: BinaryHeap::new(),
        senders: flows.iter().map(Sender::new).collect(),
    };
    for (index, flow) in flows.iter().enumerate() {
        model.events.push(Reverse((flow.start, index, ModelEvent::Wake)));
    }
    while let Some(Reverse((now, index, event))) = model.events.pop() {
        if now > to {
            break;
        }
        model.step(now, index, event, now >= from);
    }
    model.senders.iter().map(|sender| sender.acked_bytes).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ModelEvent {
    Ack(u64),
    Wake,
    Timer,
}

struct Model {
    link: ModelLink,
    free_at: Time,
    random: u64,
    events: BinaryHeap<Reverse<(Time, usize, ModelEvent)>>,
    senders: Vec<Sender>,
}

struct Sender {
    flow: ModelFlow,
    congestion: Congestion,
    pacer: Pacer,
    rtt: RttEstimator,
    next: u64,
    packets: VecDeque<Packet>,
    in_flight: u64,
    acked_bytes: u64,
    is_waiting: bool,
    timer_at: Option<Time>,
    deadline: Time,
}

struct Packet {
    number: u64,
    sent_at: Time,
    delivered_at_send: u64,
    is_acked: bool,
}

impl Model {
    fn step(&mut self, now: Time, index: usize, event: ModelEvent, counts: bool) {
        let sender = &mut self.senders[index];
        match event {
            ModelEvent::Ack(number) => sender.handle_ack(now, number, counts),
            ModelEvent::Wake => sender.is_waiting = false,
            ModelEvent::Timer => {
                sender.timer_at = None;
                sender.handle_timer(now);
            }
        }
        self.send(now, index);
        self.arm(index);
    }

    fn send(&mut self, now: Time, index: usize) {
        loop {
            let sender = &mut self.senders[index];
            if sender.in_flight + PACKET_BYTES > sender.congestion.window_bytes() {
                return;
            }
            let delay = sender.pacer.delay_nanos(now, PACKET_BYTES);
            if delay > 0 {
                if !sender.is_waiting {
                    sender.is_waiting = true;
                    let late = self.draw(LATE_NANOS_MAX);
                    self.events.push(Reverse((now.after(delay + late), index, ModelEvent::Wake)));
                }
                return;
            }
            let number = sender.packet(now);
            if let Some(at) = self.carry(now) {
                let at = self.senders[index].report_at(at);
                self.events.push(Reverse((at, index, ModelEvent::Ack(number))));
            }
        }
    }

    /// The time at which the acknowledgement of a packet is back; `None` if the packet is lost.
    fn carry(&mut self, now: Time) -> Option<Time> {
        let waiting = self.free_at.nanos_since(now);
        let packet_nanos = nanos_for(PACKET_BYTES, self.link.rate);
        if waiting + packet_nanos > nanos_for(self.link.queue_bytes, self.link.rate) {
            return None;
        }
        self.free_at = now.after(waiting + packet_nanos);
        let is_lost = self.draw(1000) < self.link.loss_per_mille;
        let is_cut = self.link.cut[0] <= now && now < self.link.cut[1];
        (!is_lost && !is_cut).then(|| self.free_at.after(self.link.rtt_nanos))
    }

    fn draw(&mut self, bound: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.random >> 33) % bound
    }

    fn arm(&mut self, index: usize) {
        let sender = &mut self.senders[index];
        if sender.timer_at.is_none() && sender.in_flight > 0 {
            sender.timer_at = Some(sender.deadline);
            self.events.push(Reverse((sender.deadline, index, ModelEvent::Timer)));
        }
    }
}

impl Sender {
    fn new(flow: &ModelFlow) -> Sender {
        Sender {
            flow: *flow,
            congestion: Congestion::new(flow.kind, PACKET_BYTES),
            pacer: Pacer::new(BATCH_BYTES_MAX),
            rtt: RttEstimator::new(),
            next: 0,
            packets: VecDeque::new(),
            in_flight: 0,
            acked_bytes: 0,
            is_waiting: false,
            timer_at: None,
            deadline: Time(0),
        }
    }

    fn packet(&mut self, now: Time) -> u64 {
        let number = self.next;
        self.next += 1;
        if self.in_flight == 0 {
            self.deadline = now.after(self.rtt.timeout_nanos());
        }
        self.in_flight += PACKET_BYTES;
        let delivered_at_send = self.congestion.delivered_bytes();
        self.packets.push_back(Packet { number, sent_at: now, delivered_at_send, is_acked: false });
        self.congestion.handle_sent(now, PACKET_BYTES, self.in_flight, number > 0);
        self.pacer.handle_sent(now, PACKET_BYTES);
        number
    }

    fn handle_ack(&mut self, now: Time, number: u64, counts: bool) {
        let Some(first) = self.packets.front().map(|packet| packet.number) else { return };
        let Some(at) = number.checked_sub(first) else { return };
        let packet = &mut self.packets[at as usize];
        packet.is_acked = true;
        let rtt_nanos = now.nanos_since(packet.sent_at);
        let acked = Acked {
            bytes: PACKET_BYTES,
            sent_at: packet.sent_at,
            delivered_at_send: packet.delivered_at_send,
            rtt_nanos: Some(rtt_nanos),
            is_app_limited: false,
        };
        self.in_flight -= PACKET_BYTES;
        self.acked_bytes += if counts { PACKET_BYTES } else { 0 };
        self.rtt.handle_sample(now, rtt_nanos);
        self.congestion.handle_acked(now, acked);
        self.deadline = now.after(self.rtt.timeout_nanos());
        self.drop_old(now, number);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
    }

    fn drop_old(&mut self, now: Time, acked: u64) {
        while let Some(packet) = self.packets.front() {
            if !packet.is_acked {
                if packet.number + REORDER_MAX > acked {
                    return;
                }
                self.in_flight -= PACKET_BYTES;
                self.congestion.handle_lost(now, PACKET_BYTES, packet.sent_at);
            }
            self.packets.pop_front();
        }
    }

    fn handle_timer(&mut self, now: Time) {
        if self.in_flight == 0 || now < self.deadline {
            return;
        }
        self.rtt.handle_timeout();
        self.congestion.handle_timeout(now);
        self.drop_old(now, u64::MAX);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
    }

    fn report_at(&self, at: Time) -> Time {
        match self.flow.report_nanos {
            0 => at,
            span => Time(at.0.div_ceil(span) * span),
        }
    }
}
