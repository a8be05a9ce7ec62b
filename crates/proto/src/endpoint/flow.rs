//! One path of datagrams: how much may be under way, how fast it may leave, what of it is lost, and when to ask.
//!
//! Enters: what leaves by the path, what of it is confirmed, the time. Leaves: whether more may leave now, what is lost,
//! when to look again. The parts know nothing of each other: [`Flight`] knows what is under way, [`Congestion`] how much
//! may be, [`Pacer`] how fast, [`Probe`] how long to wait for an answer.
//!
//! What may never happen: nothing is under way, and nothing may leave for good; payload is sent again because the peer is
//! silent.

use alloc::collections::VecDeque;

use super::holdings::Flying;
use crate::channel::flight::{Flight, Sending};
use crate::channel::probe::Probe;
use crate::limit::{CHECK_BYTES, HEAD_BYTES_MAX};
use crate::path::congestion::{Acked, Congestion, Kind};
use crate::path::mtu::BASE_BYTES;
use crate::path::pacer::{BATCH_BYTES_MAX, Pacer};
use crate::path::rtt::RoundTrip;
use crate::path::time::{MILLISECOND, Time};
use crate::wire::frame::HEADER_BYTES;

/// The peer confirms at the latest so long after something has arrived.
pub(super) const CONFIRM_NANOS: u64 = MILLISECOND;

/// Asks that may be under way: each comes twice as late as the one before, so these are enough for hours.
const ASKS_MAX: usize = 16;

/// See the module head.
#[derive(Debug)]
pub(super) struct Flow {
    pub kind: Kind,
    /// Bytes of the largest datagram.
    datagram: u64,
    flight: Flight,
    congestion: Congestion,
    pacer: Pacer,
    probe: Probe,
    /// Asks that have left and are not answered: number, and order.
    asks: VecDeque<(u64, u64)>,
    /// The latest of those that were confirmed since [`Flow::settle`].
    news: Option<(u64, Sending)>,
    /// What was sent from here on has not met a bound yet.
    run: u64,
    /// More may leave now.
    is_open: bool,
    /// More may leave then, as far as the pacer is concerned.
    open_at: Option<Time>,
    /// What leaves next has been there before, and could not.
    is_held: bool,
    /// We were away when more might have left: the next to leave says less than the path can do.
    is_behind: bool,
    /// Large datagrams lost since one arrived.
    large_lost: u32,
}

impl Flow {
    pub fn new(kind: Kind, payload_max: u32) -> Self {
        let datagram = datagram_bytes(payload_max);
        Self {
            kind,
            datagram,
            flight: Flight::default(),
            congestion: Congestion::new(kind, datagram),
            pacer: Pacer::new(BATCH_BYTES_MAX),
            probe: Probe::default(),
            asks: VecDeque::new(),
            news: None,
            run: 1,
            is_open: true,
            open_at: None,
            is_held: false,
            is_behind: false,
            large_lost: 0,
        }
    }

    /// See [`super::PathUse::large_lost`].
    pub fn large_lost(&self) -> u32 {
        self.large_lost
    }

    /// What is under way, as far as it is known here.
    pub fn flying(&self) -> Flying {
        Flying {
            counted: self.flight.bytes(),
            kept: 0,
            notes: self.flight.notes(),
            asks: self.asks.len(),
            window: self.congestion.window_bytes(),
            datagram: self.datagram,
        }
    }

    /// Datagrams have another size from now on.
    pub fn set_payload_max(&mut self, payload_max: u32) {
        let datagram = datagram_bytes(payload_max);
        if datagram != self.datagram {
            self.datagram = datagram;
            self.congestion.set_mtu(datagram);
        }
    }

    /// Finds out whether one more datagram may leave now, for [`Flow::is_open`]. `wants`: there is one.
    pub fn look(&mut self, now: Time, wants: bool) {
        let under_way = self.flight.bytes();
        let has_room =
            under_way == 0 || under_way + self.datagram <= self.congestion.window_bytes();
        self.pacer.handle_time(now);
        self.is_behind |= self.pacer.is_behind(now);
        // Cubic's rate is more than its window needs; it would only lose what it sends at once.
        let awaits = wants && has_room && self.kind == Kind::Bbr;
        self.pacer.set_awaited(now, awaits);
        let is_paced = self.pacer.delay_nanos(now, self.datagram) > 0;
        self.is_open = has_room && !is_paced;
        self.is_held = wants && (self.is_held || !self.is_open);
        self.open_at = None;
        if wants && !self.is_open {
            self.run = self.flight.next();
            if has_room {
                // Half a burst at once: a driver that sleeps in between wakes up for more than one datagram.
                let bytes = (self.pacer.capacity() / 2).max(self.datagram);
                self.open_at = Some(now.after(self.pacer.delay_nanos(now, bytes).max(1)));
            }
        }
    }

    /// See [`Flow::look`].
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// More might have left, but there is nothing.
    pub fn handle_dry(&mut self) {
        if self.is_open {
            self.flight.mark_limited(self.run);
            self.run = self.flight.next();
        }
    }

    /// A frame of `payload` bytes, from byte `start` of the channel on, has left. Says its order.
    pub fn handle_sent(&mut self, now: Time, start: u64, payload: u64, is_again: bool) -> u64 {
        let bytes = payload + HEADER_BYTES as u64;
        let order = self.flight.send(Sending {
            start,
            bytes,
            sent_at: now,
            delivered: self.congestion.delivered_bytes(),
            is_again,
            is_limited: core::mem::take(&mut self.is_behind),
            is_over: false,
        });
        let was_held = core::mem::take(&mut self.is_held);
        self.congestion.handle_sent(now, bytes, self.flight.bytes(), was_held);
        self.pacer.handle_sent(now, bytes);
        self.probe.start(now);
        order
    }

    /// Ask `number` has left.
    pub fn handle_asked(&mut self, now: Time, number: u64) {
        let order = self.flight.send(Sending {
            start: 0,
            bytes: 0,
            sent_at: now,
            delivered: self.congestion.delivered_bytes(),
            is_again: false,
            is_limited: true,
            is_over: false,
        });
        if self.asks.len() == ASKS_MAX {
            self.asks.pop_front();
        }
        self.asks.push_back((number, order));
        self.probe.start(now);
    }

    /// The datagram of that order has arrived. `shortest`: see [`Flight::confirm`].
    pub fn handle_confirmed(&mut self, now: Time, order: u64, round_trip: &RoundTrip) {
        let shortest = round_trip.minimum_nanos().unwrap_or(0);
        let Some(sending) = self.flight.confirm(order, now, shortest) else { return };
        if sending.is_again && now.nanos_since(sending.sent_at) < shortest {
            self.flight.handle_spurious();
        }
        let older = match self.news {
            Some((latest, _)) if latest > order => Some(sending),
            _ => self.news.replace((order, sending)).map(|(_, sending)| sending),
        };
        if let Some(sending) = older {
            self.acknowledge(now, &sending, None);
        }
    }

    /// Something that was given up for lost has arrived.
    pub fn handle_spurious(&mut self) {
        self.flight.handle_spurious();
    }

    /// Ask `number` is answered.
    pub fn handle_answer(&mut self, now: Time, number: u64, round_trip: &RoundTrip) {
        if let Some(place) = self.asks.iter().position(|&(ask, _)| ask == number) {
            let order = self.asks[place].1;
            self.asks.drain(..=place);
            self.handle_confirmed(now, order, round_trip);
            self.probe.handle_sign(now);
        }
    }

    /// All that has just come is told. False: nothing new has.
    pub fn settle(&mut self, now: Time, round_trip: &mut RoundTrip) -> bool {
        let Some((_, sending)) = self.news.take() else { return false };
        let sample = now.nanos_since(sending.sent_at);
        let sample = (!sending.is_again).then_some(sample);
        if let Some(sample) = sample {
            round_trip.handle_sample(now, sample);
        }
        self.acknowledge(now, &sending, sample);
        self.probe.handle_sign(now);
        self.rest();
        true
    }

    fn acknowledge(&mut self, now: Time, sending: &Sending, rtt_nanos: Option<u64>) {
        let acked = Acked {
            bytes: sending.bytes,
            sent_at: sending.sent_at,
            delivered_at_send: sending.delivered,
            rtt_nanos,
            is_app_limited: sending.is_limited,
        };
        if is_large(sending) {
            self.large_lost = 0;
        }
        self.congestion.handle_acked(now, acked);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
    }

    /// The next that is lost: its order, and its first byte if there is anything to send again.
    pub fn next_lost(&mut self, now: Time, round_trip: &RoundTrip) -> Option<(u64, Option<u64>)> {
        let (order, sending) = self.flight.next_lost(now, longest(round_trip))?;
        Some((order, self.lose(now, sending)))
    }

    /// Nothing will be heard of what is under way, nor of what has been asked: nobody waits for it any more.
    pub fn give_up(&mut self, now: Time) {
        while let Some((_, sending)) = self.flight.give_up() {
            self.lose(now, sending);
        }
        self.probe.stop();
    }

    fn lose(&mut self, now: Time, sending: Sending) -> Option<u64> {
        self.rest();
        if sending.bytes == 0 {
            return None;
        }
        self.large_lost = self.large_lost.saturating_add(is_large(&sending) as u32);
        self.congestion.handle_lost(now, sending.bytes, sending.sent_at);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
        Some(sending.start)
    }

    /// The datagram of that order is of no use, which says nothing about the path.
    pub fn forget(&mut self, order: u64) {
        self.flight.forget(order);
        self.rest();
    }

    fn rest(&mut self) {
        if self.flight.is_empty() {
            self.probe.stop();
        }
    }

    /// The time has come to look. True: the peer is to be asked.
    pub fn handle_time(&mut self, now: Time, round_trip: &RoundTrip) -> bool {
        self.open_at.take_if(|at| *at <= now);
        let due = self.probe.due(patience(round_trip));
        if due.is_none_or(|due| due > now) {
            return false;
        }
        self.probe.handle_timeout(now);
        self.congestion.handle_timeout(now);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
        true
    }

    /// When to look again.
    pub fn due(&self, round_trip: &RoundTrip) -> Option<Time> {
        let times = [
            self.probe.due(patience(round_trip)),
            self.flight.late_at(longest(round_trip)),
            self.open_at,
        ];
        times.into_iter().flatten().min()
    }
}

/// Bytes of a datagram, whatever its head.
fn datagram_bytes(payload_max: u32) -> u64 {
    payload_max as u64 + (HEADER_BYTES + HEAD_BYTES_MAX + CHECK_BYTES) as u64
}

fn is_large(sending: &Sending) -> bool {
    sending.bytes > BASE_BYTES as u64
}

/// How long an answer may take while nothing is wrong.
fn patience(round_trip: &RoundTrip) -> u64 {
    round_trip.patience_nanos().saturating_add(CONFIRM_NANOS)
}

/// The round trip that a late datagram is measured by (RFC 9002, section 6.1.2).
fn longest(round_trip: &RoundTrip) -> u64 {
    let (smoothed, latest) = (round_trip.smoothed_nanos(), round_trip.latest_nanos());
    smoothed.max(latest).unwrap_or(crate::path::rtt::TIMEOUT_NANOS_INITIAL)
}
