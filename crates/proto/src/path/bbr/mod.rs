//! BBR: the window and the rate follow the measured rate and round trip of the path, not its
//! losses.
//!
//! Two numbers describe a path: the highest rate at which it delivers, and its round trip without
//! queues. Their product fills the path without a queue. Both cannot be measured at once, because a
//! higher rate is found only by sending more, and a shorter round trip only by sending less. So
//! there are states, each with gains for the rate and for the window, in hundredths of the measured
//! values:
//!
//! | state | rate | window | until | then |
//! |---|---|---|---|---|
//! | Startup | 289 | 289 | the rate grows no more, or far too much is lost | Drain |
//! | Drain | 35 | 289 | the queue of Startup is empty | Cruise |
//! | Up | 125 | 200 | a round trip is over | Down |
//! | Down | 75 | 200 | the queue of Up is empty, or four round trips are over | Cruise |
//! | Cruise | 100 | 200 | six round trips are over | Up |
//! | ProbeRtt | 100 | 50 | a fifth of a second | Cruise, or Startup if never left |
//!
//! Any state gives way to ProbeRtt when the shortest round trip has not been measured for ten
//! seconds. A flow with pauses never enters ProbeRtt: the first round trip after a pause is one
//! without a queue.
//!
//! The rate is measured once in each round trip: the bytes delivered in the round trip, over the
//! time that sending them or acknowledging them took, whichever was longer, so that
//! acknowledgements that come in a bunch do not simulate a fast path. Both times run from one
//! acknowledgement to another. What comes after a pause is not measured with the round trip before
//! its first acknowledgement, unless it is so short that there is no other measurement. The
//! greatest rate of twelve rounds counts. Rounds in which the application had too little to send,
//! or did not poll when it could have sent, do not count, unless they show a higher rate. Such
//! rounds do not end Startup either, unless the path has delivered more slowly than it was given
//! bytes.
//!
//! Loss alone changes nothing, up to a bound. If more than an eighth of a round is lost, the path
//! does not hold the window, and the window is limited to less than before, then raised step by
//! step. This is the first version of BBR with a simple form of the bound of the second version.
//! The second version's bound of a fiftieth would give up the very paths for which BBR is chosen
//! here.

mod state;
#[cfg(test)]
mod tests;

pub use state::BbrState;

use state::TransitionInputs;

use super::pacer::BATCH_BYTES_MAX;
use super::rtt::SAMPLE_NANOS_MAX;
use super::time::{MILLISECOND, SECOND, Time, bytes_in, percent_of, rate_of};
use super::window::{Acked, WINDOW_BYTES_MAX, initial_window, minimum_window};

/// The rounds for which a measured rate counts. This is more than from one Up to the next, so that
/// one of the rounds has always tried more than the measured rate.
const RATE_ROUNDS: usize = 12;

/// Startup ends after this many rounds in which the rate grew by less than a quarter.
const FULL_ROUNDS: u32 = 3;
const FULL_PERCENT: u64 = 125;

/// The time for which the shortest round trip is valid, in nanoseconds.
const RTT_NANOS_MAX: u64 = 10 * SECOND;
/// The time for which little is in flight to measure the round trip again, in nanoseconds: long
/// enough for flows that share a queue to do so together.
const PROBE_RTT_NANOS: u64 = 200 * MILLISECOND;
const PROBE_RTT_PERCENT: u64 = 50;

/// The rate relative to the measured rate, in percent: less than 100, so that a queue is emptied
/// rather than kept.
const MARGIN_PERCENT: u64 = 99;

/// The inverse of the loss rate of a round that is too high. A random loss of one in twenty must
/// not be too high, even in a round with some bad luck. The loss rate of a sender that is a quarter
/// too fast is too high.
const LOSS_PART_MAX: u64 = 8;
/// After a pause, acknowledgements spaced more closely than this say more about the process that
/// reads them than about the path.
const SPACING_NANOS_MIN: u64 = MILLISECOND;

/// In a round with fewer lost datagrams than this, the loss rate says nothing.
const LOSS_DATAGRAMS_MIN: u64 = 8;
/// After too much loss, the window is bounded to this percentage of what got through; each Up then
/// raises the bound by the second percentage.
const BOUND_PERCENT: u64 = 85;
const BOUND_GROWTH_PERCENT: u64 = 125;

/// The datagrams that may be in flight in any case: BBR acts on rounds, and a round ends when a
/// datagram is sent behind others.
const WINDOW_DATAGRAMS: u64 = 4;

/// The batches for which the window has an allowance: those in the sender's kernel and the
/// receiver's kernel, and one between.
const BATCHES: u64 = 3;
const BATCH_NANOS: u64 = MILLISECOND;

/// Receivers that compute acknowledge late and in bunches. The window grows for at most this much
/// time of their silence, in nanoseconds: bytes that they do not read wait in a buffer of the
/// receiver's kernel.
const EXTRA_ACKED_NANOS_MAX: u64 = 20 * MILLISECOND;

/// The BBR window and rate of one path.
#[derive(Clone, Debug)]
pub struct Bbr {
    mtu: u64,
    state: BbrState,
    delivered: u64,
    in_flight: u64,
    round: BbrRound,
    /// A round has ended since the last state transition was decided.
    is_round_over: bool,
    /// The measured rates in bytes per second.
    rate: MaxFilter,
    /// The bytes that were acknowledged in a bunch, beyond what the rate explains.
    extra_acked: MaxFilter,
    ack_aggregation: AckAggregation,
    full: FullPipe,
    rtt: Option<MinRtt>,
    probe: RttProbe,
    window: u64,
    /// The bound of the window after too much loss, in bytes.
    bound: Option<u64>,
    /// The time of a timeout, as long as nothing has been acknowledged since.
    stopped_at: Option<Time>,
}

/// The current round. It ends with the acknowledgement of something sent after its start.
#[derive(Clone, Copy, Debug, Default)]
struct BbrRound {
    /// The acknowledgement of a datagram that was sent when at least this many bytes were delivered
    /// ends the round.
    end: u64,
    /// The bytes acknowledged in the round.
    bytes: u64,
    /// The time at which the round started, if nothing was in flight then.
    flight_at: Option<Time>,
    /// The sample of the round before, and whether it counts. Acknowledgements that arrive at the
    /// same time as its last one still extend it.
    before: Option<(RateSample, bool)>,
    /// All bytes delivered at the acknowledgement from which the rate is measured, and the time of
    /// this acknowledgement.
    delivered: u64,
    started_at: Time,
    /// The time at which the last of the bytes acknowledged at that time had been sent.
    sent_at: Time,
    /// The time of the last acknowledgement in the round, and the time at which its bytes had been
    /// sent.
    acked_at: Time,
    acked_sent_at: Time,
    lost: u64,
    in_flight_max: u64,
    is_app_limited: bool,
}

/// The bytes from one acknowledgement to another, and how long sending and acknowledging them took.
#[derive(Clone, Copy, Debug)]
struct RateSample {
    bytes: u64,
    sent_nanos: u64,
    acked_nanos: u64,
}

impl RateSample {
    fn rate(self) -> u64 {
        rate_of(self.bytes, self.acked_nanos.max(self.sent_nanos))
    }

    /// Whether the bytes arrived more slowly than they were sent, so that the sample shows the rate
    /// of the path.
    fn is_held_up(self) -> bool {
        self.acked_nanos >= percent_of(self.sent_nanos, FULL_PERCENT)
    }
}

impl BbrRound {
    fn spacing(&self, delivered: u64) -> Option<RateSample> {
        let bytes = delivered.saturating_sub(self.delivered);
        let sent_nanos = self.acked_sent_at.nanos_since(self.sent_at);
        let acked_nanos = self.acked_at.nanos_since(self.started_at);
        let nanos = acked_nanos.max(sent_nanos);
        let is_long = nanos >= SPACING_NANOS_MIN || (nanos > 0 && self.flight_at.is_none());
        (is_long && bytes > 0).then_some(RateSample { bytes, sent_nanos, acked_nanos })
    }

    /// The rate with the round trip before the first acknowledgement included, which never exceeds
    /// the rate of the path. 0 if the round did not start with nothing in flight.
    fn flight_rate(&self) -> u64 {
        self.flight_at.map_or(0, |start| rate_of(self.bytes, self.acked_at.nanos_since(start)))
    }
}

/// Whether the rate has stopped growing.
#[derive(Clone, Copy, Debug, Default)]
struct FullPipe {
    rate: u64,
    rounds: u32,
    is_full: bool,
}

#[derive(Clone, Copy, Debug)]
struct MinRtt {
    nanos: u64,
    seen_at: Time,
    /// The next round trip is one without a queue of this flow: it counts as the shortest, whatever
    /// its length.
    is_due: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct RttProbe {
    until: Option<Time>,
    shortest: Option<u64>,
}

/// The bytes acknowledged since a time at which they were not ahead of the rate.
#[derive(Clone, Copy, Debug, Default)]
struct AckAggregation {
    since: Time,
    bytes: u64,
}

impl Bbr {
    /// The state of a new path with datagrams of `mtu_bytes` bytes.
    pub fn new(mtu_bytes: u64) -> Bbr {
        let mtu = mtu_bytes.max(1);
        Bbr {
            mtu,
            state: BbrState::Startup,
            delivered: 0,
            in_flight: 0,
            round: BbrRound::default(),
            is_round_over: false,
            rate: MaxFilter::default(),
            extra_acked: MaxFilter::default(),
            ack_aggregation: AckAggregation::default(),
            full: FullPipe::default(),
            rtt: None,
            probe: RttProbe::default(),
            window: initial_window(mtu),
            bound: None,
            stopped_at: None,
        }
    }

    /// Sets the size of datagrams from now on.
    pub fn set_mtu(&mut self, mtu_bytes: u64) {
        self.mtu = mtu_bytes.max(1);
    }

    /// Records that `bytes` bytes have left; `in_flight` bytes are in flight with them. `was_held`
    /// is defined at [`super::congestion::Congestion::handle_sent`].
    pub fn handle_sent(&mut self, now: Time, bytes: u64, in_flight: u64, was_held: bool) {
        self.in_flight = in_flight;
        if in_flight <= bytes {
            if let Some(rtt) = &mut self.rtt {
                rtt.is_due |= now.nanos_since(rtt.seen_at) > RTT_NANOS_MAX / 2;
            }
            if !was_held {
                self.start_flight(now);
            }
        }
        self.round.in_flight_max = self.round.in_flight_max.max(in_flight);
    }

    /// Records that bytes have arrived.
    pub fn handle_acked(&mut self, now: Time, acked: Acked) {
        self.delivered = self.delivered.saturating_add(acked.bytes);
        self.in_flight = self.in_flight.saturating_sub(acked.bytes);
        self.round.is_app_limited |= acked.is_app_limited;
        self.end_timeout(acked.sent_at);
        if now.nanos_since(acked.sent_at) >= SAMPLE_NANOS_MAX {
            return self.resume(now);
        }
        self.measure_extra_acked(now, acked.bytes);
        let is_stale = self.measure_rtt(now, acked.rtt_nanos);
        let is_first = self.round.bytes == 0;
        self.round.bytes = self.round.bytes.saturating_add(acked.bytes);
        (self.round.acked_at, self.round.acked_sent_at) = (now, acked.sent_at);
        if acked.delivered_at_send >= self.round.end {
            let shown = self.end_round();
            self.start_round(self.delivered);
            self.round.before = shown;
            self.measure_from(now, acked.sent_at);
        } else if is_first && self.round.flight_at.is_some() || now == self.round.started_at {
            self.extend_before(acked);
            self.measure_from(now, acked.sent_at);
        }
        self.enter_next(now, is_stale);
        self.grow(acked.bytes);
    }

    /// Records that bytes are lost.
    pub fn handle_lost(&mut self, _now: Time, bytes: u64, _sent_at: Time) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
        self.round.lost = self.round.lost.saturating_add(bytes);
    }

    /// Records that no acknowledgement came within the timeout.
    pub fn handle_timeout(&mut self, now: Time) {
        self.stopped_at.get_or_insert(now);
    }

    /// The window: bytes that may be in flight.
    pub fn window_bytes(&self) -> u64 {
        if self.stopped_at.is_some() {
            return minimum_window(self.mtu);
        }
        let window = match self.state {
            BbrState::ProbeRtt => self.window.min(self.probe_window()),
            _ => self.window,
        };
        window.min(self.bound.unwrap_or(WINDOW_BYTES_MAX)).max(self.least())
    }

    /// The rate at which bytes may leave; `None` until a round trip has been measured.
    pub fn rate_bytes_per_second(&self) -> Option<u64> {
        let rtt = self.rtt?;
        let measured = self.rate.value();
        let rate = if measured > 0 {
            percent_of(measured, MARGIN_PERCENT)
        } else {
            rate_of(initial_window(self.mtu), rtt.nanos)
        };
        Some(percent_of(rate, self.state.rate_percent()).max(1))
    }

    /// All bytes acknowledged so far.
    pub fn delivered_bytes(&self) -> u64 {
        self.delivered
    }

    /// The current state.
    pub fn state(&self) -> BbrState {
        self.state
    }

    /// Starts a round when nothing was in flight. Bytes acknowledged before form a round of their
    /// own; the idle time until now is part of no round.
    fn start_flight(&mut self, now: Time) {
        if self.round.bytes > 0 {
            self.end_round();
        }
        // Only what is sent after the first acknowledgement can end the round, or the round would
        // be a single datagram.
        self.start_round(self.delivered.saturating_add(1));
        self.round.flight_at = Some(now);
        self.ack_aggregation = AckAggregation { since: now, bytes: 0 };
    }

    /// Restarts the measurement after one side was computing or stopped. A rate that included this
    /// time would not be that of the path: the rate is measured again with what is sent from now
    /// on.
    fn resume(&mut self, now: Time) {
        self.start_round(self.delivered.saturating_add(1));
        self.measure_from(now, now);
        self.ack_aggregation = AckAggregation { since: now, bytes: 0 };
    }

    fn start_round(&mut self, end: u64) {
        let in_flight_max = self.in_flight;
        self.round = BbrRound { end, in_flight_max, ..BbrRound::default() };
    }

    /// Measures the rate from now on.
    fn measure_from(&mut self, now: Time, sent_at: Time) {
        let round = &mut self.round;
        (round.delivered, round.started_at, round.sent_at) = (self.delivered, now, sent_at);
    }

    /// Adds what is acknowledged at the time at which a round begins to the round before, in whose
    /// time it came. In the new round it would have taken no time, and would simulate a fast path.
    fn extend_before(&mut self, acked: Acked) {
        let since = self.round.sent_at;
        let Some((spacing, counts)) = &mut self.round.before else { return };
        spacing.bytes = spacing.bytes.saturating_add(acked.bytes);
        spacing.sent_nanos = spacing.sent_nanos.saturating_add(acked.sent_at.nanos_since(since));
        let rate = spacing.rate();
        if *counts || rate > self.rate.value() {
            self.rate.raise(rate);
        }
    }

    /// Ends the round. Returns its sample and whether the sample counts.
    fn end_round(&mut self) -> Option<(RateSample, bool)> {
        let round = self.round;
        let spacing = round.spacing(self.delivered);
        let rate = spacing.map_or(0, RateSample::rate).max(round.flight_rate());
        let counts = rate > 0 && (!round.is_app_limited || rate >= self.rate.value());
        if counts {
            self.rate.push(rate);
            self.extra_acked.push(0);
        }
        if rate > 0 && (!round.is_app_limited || spacing.is_some_and(RateSample::is_held_up)) {
            self.check_full_pipe();
        }
        self.check_loss_bound(round.bytes, round.lost);
        self.is_round_over = true;
        spacing.map(|spacing| (spacing, counts))
    }

    fn check_full_pipe(&mut self) {
        let rate = self.rate.value();
        if rate >= percent_of(self.full.rate, FULL_PERCENT) {
            self.full = FullPipe { rate, rounds: 0, ..self.full };
        } else {
            self.full.rounds = self.full.rounds.saturating_add(1);
            self.full.is_full |= self.full.rounds >= FULL_ROUNDS;
        }
    }

    fn check_loss_bound(&mut self, delivered: u64, lost: u64) {
        let is_much = lost >= LOSS_DATAGRAMS_MIN.saturating_mul(self.mtu)
            && lost > lost.saturating_add(delivered) / LOSS_PART_MAX;
        if is_much {
            // A little less than what got through leaves capacity to other flows, but what fills
            // the path without a queue causes no loss.
            let held = self.round.in_flight_max.min(self.bound.unwrap_or(u64::MAX)).min(delivered);
            let bound = percent_of(held, BOUND_PERCENT).max(self.bdp());
            self.bound = Some(bound.max(self.least()));
            self.full.is_full = true;
        }
    }

    /// Records a measured round trip. Returns whether the shortest round trip has become too old.
    fn measure_rtt(&mut self, now: Time, rtt_nanos: Option<u64>) -> bool {
        if let (Some(rtt), BbrState::ProbeRtt) = (rtt_nanos, self.state) {
            self.probe.shortest = Some(self.probe.shortest.map_or(rtt, |least| least.min(rtt)));
        }
        let is_due = self.rtt.is_some_and(|rtt| rtt.is_due);
        let is_shortest = |nanos: &u64| is_due || self.rtt.is_none_or(|rtt| *nanos <= rtt.nanos);
        if let Some(nanos) = rtt_nanos.filter(is_shortest) {
            self.rtt = Some(MinRtt { nanos: nanos.max(1), seen_at: now, is_due: false });
        }
        let Some(rtt) = &mut self.rtt else { return false };
        // A clock that jumped back must not make the shortest round trip young for ever.
        rtt.seen_at = rtt.seen_at.min(now);
        !is_due && now.nanos_since(rtt.seen_at) > RTT_NANOS_MAX
    }

    fn measure_extra_acked(&mut self, now: Time, bytes: u64) {
        let rate = self.rate.value();
        let expected = bytes_in(now.nanos_since(self.ack_aggregation.since), rate);
        if self.ack_aggregation.bytes <= expected || now < self.ack_aggregation.since {
            self.ack_aggregation = AckAggregation { since: now, bytes };
        } else {
            self.ack_aggregation.bytes = self.ack_aggregation.bytes.saturating_add(bytes);
        }
        let expected = bytes_in(now.nanos_since(self.ack_aggregation.since), rate);
        let ahead = self.ack_aggregation.bytes.saturating_sub(expected);
        self.extra_acked.raise(ahead.min(bytes_in(EXTRA_ACKED_NANOS_MAX, rate)));
    }

    fn enter_next(&mut self, now: Time, is_stale: bool) {
        let inputs = TransitionInputs {
            is_round: core::mem::take(&mut self.is_round_over),
            is_full: self.full.is_full,
            is_drained: self.in_flight <= self.bdp(),
            is_stale,
            is_probed: self.state == BbrState::ProbeRtt && self.is_probed(now),
        };
        let next = self.state.next(inputs);
        if next == self.state {
            return;
        }
        match (self.state, next) {
            (BbrState::ProbeRtt, _) => self.take_probed(now),
            (_, BbrState::ProbeRtt) => self.probe = RttProbe::default(),
            (_, BbrState::Up) => self.raise_bound(),
            _ => {}
        }
        self.state = next;
    }

    /// Whether little has been in flight for long enough. Starts the measurement of this time once
    /// little is in flight.
    fn is_probed(&mut self, now: Time) -> bool {
        if self.probe.until.is_none() && self.in_flight <= self.probe_window() {
            self.probe.until = Some(now.after(PROBE_RTT_NANOS));
        }
        // A clock that jumped back must not keep the flow in ProbeRtt.
        let latest = now.after(PROBE_RTT_NANOS);
        self.probe.until = self.probe.until.map(|until| until.min(latest));
        self.probe.until.is_some_and(|until| now >= until)
    }

    fn take_probed(&mut self, now: Time) {
        if let Some(rtt) = &mut self.rtt {
            rtt.nanos = self.probe.shortest.unwrap_or(rtt.nanos).max(1);
            rtt.seen_at = now;
        }
    }

    /// Raises the bound of the window by a step, and removes the bound once it exceeds the target
    /// window.
    fn raise_bound(&mut self) {
        let target = self.target();
        self.bound = self
            .bound
            .map(|bound| percent_of(bound, BOUND_GROWTH_PERCENT))
            .filter(|bound| *bound < target);
    }

    fn grow(&mut self, acked: u64) {
        let target = self.target();
        let grown = self.window.saturating_add(acked);
        self.window =
            if self.full.is_full { grown.min(target) } else { grown.min(target.max(self.window)) };
        self.window = self.window.clamp(self.least(), WINDOW_BYTES_MAX.max(self.least()));
    }

    /// Ends a timeout. The first acknowledgement after it shows whether the timeout was spurious.
    fn end_timeout(&mut self, sent_at: Time) {
        if let Some(stopped_at) = self.stopped_at.take()
            && sent_at > stopped_at
        {
            // Nothing sent before the timeout has arrived first, so it is lost. The rate is known;
            // the window doubles up to it.
            self.window = minimum_window(self.mtu);
        }
    }

    /// The bandwidth-delay product in bytes, which fills the path without a queue.
    fn bdp(&self) -> u64 {
        let Some(rtt) = self.rtt else { return 0 };
        bytes_in(rtt.nanos, self.rate.value())
    }

    fn target(&self) -> u64 {
        let rate = self.rate.value();
        if rate == 0 {
            return WINDOW_BYTES_MAX;
        }
        let least_batch = 2 * self.mtu.min(BATCH_BYTES_MAX);
        let batch = bytes_in(BATCH_NANOS, rate).min(BATCH_BYTES_MAX).max(least_batch);
        percent_of(self.bdp(), self.state.window_percent())
            .saturating_add(BATCHES * batch)
            .saturating_add(self.extra_acked.value())
    }

    fn probe_window(&self) -> u64 {
        percent_of(self.bdp(), PROBE_RTT_PERCENT).max(self.least())
    }

    fn least(&self) -> u64 {
        WINDOW_DATAGRAMS.saturating_mul(self.mtu).min(WINDOW_BYTES_MAX)
    }
}

/// The greatest value of the last [`RATE_ROUNDS`] rounds.
#[derive(Clone, Copy, Debug, Default)]
struct MaxFilter {
    values: [u64; RATE_ROUNDS],
    at: usize,
}

impl MaxFilter {
    /// Starts the next round with this value.
    fn push(&mut self, value: u64) {
        self.at = (self.at + 1) % RATE_ROUNDS;
        self.values[self.at] = value;
    }

    /// Raises the value of the current round to at least this value.
    fn raise(&mut self, value: u64) {
        let present = &mut self.values[self.at];
        *present = value.max(*present);
    }

    fn value(&self) -> u64 {
        self.values.into_iter().max().unwrap_or(0)
    }
}

const _: () = {
    // The rounds from one Up to the next fit into the filter.
    assert!(state::CYCLE_ROUNDS <= RATE_ROUNDS);
};
