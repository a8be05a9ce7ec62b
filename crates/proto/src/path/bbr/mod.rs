//! BBR: the window and the rate follow what the path was measured to do, not what it loses.
//!
//! Two numbers describe a path: the rate at which it delivers at most, and its round trip without
//! queues. Their product is what fills it without a queue. Both cannot be seen at once, for more has
//! to be sent to find a higher rate and less to find a shorter round trip; so there are states, each
//! with the gains at which bytes leave and may be under way, in hundredths of what was measured:
//!
//! | state | rate | window | until | then |
//! |---|---|---|---|---|
//! | Startup | 289 | 289 | the rate grows no more, or far too much is lost | Drain |
//! | Drain | 35 | 289 | the queue of Startup is gone | Cruise |
//! | Up | 125 | 200 | a round trip is over | Down |
//! | Down | 75 | 200 | the queue of Up is gone, or four round trips are over | Cruise |
//! | Cruise | 100 | 200 | six round trips are over | Up |
//! | ProbeRtt | 100 | 50 | a fifth of a second | Cruise, or Startup if never left |
//!
//! Any state gives way to ProbeRtt when the shortest round trip has not been seen for ten seconds. A
//! program that pauses now and then never gets there: the first round trip after a pause shows it.
//!
//! The rate is measured once in each round trip: the bytes delivered in it, over the time it took to
//! send them or to acknowledge them, whichever was longer, so that acknowledgements that come in a
//! bunch do not feign a fast path. Both are taken from what was acknowledged at one moment to what was
//! at another: what comes behind a pause is not measured by the round trip before its first
//! acknowledgement, unless it is so short that there is nothing else. The greatest of twelve rounds counts. Rounds in which
//! the program had too little to send, or was away when it might have sent, do not count, unless they show more; nor do
//! they end Startup, unless the path has delivered more slowly than it was given.
//!
//! Loss alone changes nothing, up to a bound: if more than an eighth of a round is lost, there is no
//! room for the window, and it is held below what it was, to be let out step by step. This is the
//! first version of BBR with a simple form of the bound of the second, whose bound of a fiftieth
//! would give up the very paths for which BBR is chosen here.

mod state;
#[cfg(test)]
mod tests;

pub use state::BbrState;

use state::TransitionInputs;

use super::congestion::{Acked, WINDOW_BYTES_MAX, initial_window, minimum_window};
use super::pacer::BATCH_BYTES_MAX;
use super::rtt::SAMPLE_NANOS_MAX;
use super::time::{MILLISECOND, SECOND, Time, bytes_in, percent_of, rate_of};

/// Rounds for which a measured rate counts; more than from one Up to the next, so that there is
/// always one that tried more than it had.
const RATE_ROUNDS: usize = 12;

/// Startup ends after so many rounds that brought less than a quarter more.
const FULL_ROUNDS: u32 = 3;
const FULL_PERCENT: u64 = 125;

/// For how long the shortest round trip is believed.
const RTT_NANOS_MAX: u64 = 10 * SECOND;
/// How long little is under way to see it again: for flows that share a queue to do so together.
const PROBE_RTT_NANOS: u64 = 200 * MILLISECOND;
const PROBE_RTT_PERCENT: u64 = 50;

/// Rate below what was measured, so that a queue is emptied rather than kept.
const MARGIN_PERCENT: u64 = 99;

/// One in so many parts of a round lost is too much. Random loss of one in twenty must not be, even
/// in a round with some bad luck; a sender that is a quarter too fast is.
const LOSS_PART_MAX: u64 = 8;
/// Behind a pause, a shorter time between acknowledgements says more about who reads them than about the path.
const SPACING_NANOS_MIN: u64 = MILLISECOND;

/// In a round with fewer losses than this a part says nothing.
const LOSS_DATAGRAMS_MIN: u64 = 8;
/// How much of what got through in spite of too much loss may be under way, and how this bound grows
/// in each Up thereafter.
const BOUND_PERCENT: u64 = 85;
const BOUND_GROWTH_PERCENT: u64 = 125;

/// Datagrams that may be under way in any case: BBR acts on rounds, which end when one is sent
/// behind others.
const WINDOW_DATAGRAMS: u64 = 4;

/// Batches that wait in the sender's kernel and the receiver's, and one between.
const BATCHES: u64 = 3;
const BATCH_NANOS: u64 = MILLISECOND;

/// Receivers that compute acknowledge late and in bunches. For so much time of their silence the
/// window grows, not more: what they do not take waits in a buffer that is not ours.
const EXTRA_ACKED_NANOS_MAX: u64 = 20 * MILLISECOND;

/// One path's window and rate after BBR.
#[derive(Clone, Debug)]
pub struct Bbr {
    mtu: u64,
    state: BbrState,
    delivered: u64,
    in_flight: u64,
    round: BbrRound,
    /// One has ended since the state was last decided on.
    is_round_over: bool,
    /// Bytes per second.
    rate: MaxFilter,
    /// Bytes that were acknowledged in a bunch, ahead of the rate.
    extra_acked: MaxFilter,
    ack_aggregation: AckAggregation,
    full: FullPipe,
    rtt: Option<MinRtt>,
    /// The next round trip is one without a queue of ours: it counts as the shortest, whatever it is.
    is_rtt_due: bool,
    probe: RttProbe,
    window: u64,
    /// Below this the window is held after too much loss.
    bound: Option<u64>,
    /// A time-out since which nothing has been acknowledged.
    stopped_at: Option<Time>,
}

/// The round under way: it ends with the acknowledgement of something sent after its start.
#[derive(Clone, Copy, Debug, Default)]
struct BbrRound {
    /// Something sent when so much was delivered ends it.
    end: u64,
    /// Acknowledged in it.
    bytes: u64,
    /// When it started, if nothing was under way then.
    flight_at: Option<Time>,
    /// What the round before has shown, and whether that counts: its last acknowledgement may go on.
    before: Option<(RateSample, bool)>,
    /// From this acknowledgement on the rate is measured: all delivered then, and at what moment.
    delivered: u64,
    started_at: Time,
    /// When the last of what was acknowledged at that moment had been sent.
    sent_at: Time,
    /// The last acknowledgement in it, and when what it is for had been sent.
    acked_at: Time,
    acked_sent_at: Time,
    lost: u64,
    in_flight_max: u64,
    is_app_limited: bool,
}

/// Bytes from one acknowledgement to another, and how long it took to send and to acknowledge them.
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

    /// They arrived more slowly than they were sent: the path has shown what it carries.
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

    /// The rate with the round trip before the first acknowledgement: never more than what the path carries. 0 if it did not
    /// start with nothing under way.
    fn flight_rate(&self) -> u64 {
        self.flight_at.map_or(0, |start| rate_of(self.bytes, self.acked_at.nanos_since(start)))
    }
}

/// Whether the rate has stopped to grow.
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
}

#[derive(Clone, Copy, Debug, Default)]
struct RttProbe {
    until: Option<Time>,
    shortest: Option<u64>,
}

/// Bytes acknowledged since a moment at which they were not ahead of the rate.
#[derive(Clone, Copy, Debug, Default)]
struct AckAggregation {
    since: Time,
    bytes: u64,
}

impl Bbr {
    /// For a new path with datagrams of so many bytes.
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
            is_rtt_due: false,
            probe: RttProbe::default(),
            window: initial_window(mtu),
            bound: None,
            stopped_at: None,
        }
    }

    /// Datagrams have another size from now on.
    pub fn set_mtu(&mut self, mtu_bytes: u64) {
        self.mtu = mtu_bytes.max(1);
    }

    /// So many bytes left; `in_flight` are under way with them. `was_held`: see [`super::congestion::Congestion::handle_sent`].
    pub fn handle_sent(&mut self, now: Time, bytes: u64, in_flight: u64, was_held: bool) {
        self.in_flight = in_flight;
        if in_flight <= bytes {
            self.is_rtt_due |=
                self.rtt.is_some_and(|rtt| now.nanos_since(rtt.seen_at) > RTT_NANOS_MAX / 2);
            if !was_held {
                self.start_flight(now);
            }
        }
        self.round.in_flight_max = self.round.in_flight_max.max(in_flight);
    }

    /// Bytes have arrived.
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

    /// Bytes sent then are lost.
    pub fn handle_lost(&mut self, _now: Time, bytes: u64, _sent_at: Time) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
        self.round.lost = self.round.lost.saturating_add(bytes);
    }

    /// No answer came in time.
    pub fn handle_timeout(&mut self, now: Time) {
        self.stopped_at.get_or_insert(now);
    }

    /// Bytes that may be under way.
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

    /// How fast they may leave.
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

    /// What is done at present.
    pub fn state(&self) -> BbrState {
        self.state
    }

    /// Nothing was under way. What came before is a round, if it was anything; the time until now
    /// was idle and is part of none.
    fn start_flight(&mut self, now: Time) {
        if self.round.bytes > 0 {
            self.end_round();
        }
        // Only what is sent after the first acknowledgement can end it, or it would be one datagram.
        self.start_round(self.delivered.saturating_add(1));
        self.round.flight_at = Some(now);
        self.ack_aggregation = AckAggregation { since: now, bytes: 0 };
    }

    /// Somebody was away, computing or stopped. A rate with that time in it would be none of the path's: it is measured anew
    /// with what is sent from now on.
    fn resume(&mut self, now: Time) {
        self.start_round(self.delivered.saturating_add(1));
        self.measure_from(now, now);
        self.ack_aggregation = AckAggregation { since: now, bytes: 0 };
    }

    fn start_round(&mut self, end: u64) {
        let in_flight_max = self.in_flight;
        self.round = BbrRound { end, in_flight_max, ..BbrRound::default() };
    }

    /// The rate is measured from now on.
    fn measure_from(&mut self, now: Time, sent_at: Time) {
        let round = &mut self.round;
        (round.delivered, round.started_at, round.sent_at) = (self.delivered, now, sent_at);
    }

    /// What is acknowledged at the moment at which a round has begun came in the time of the one before. In this one it would
    /// have taken no time, and feign a fast path.
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

    /// Says what it has shown, and whether that counts.
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
            // A little less than what got through leaves room for others, but what fills the path
            // without a queue is no cause of loss.
            let held = self.round.in_flight_max.min(self.bound.unwrap_or(u64::MAX)).min(delivered);
            let bound = percent_of(held, BOUND_PERCENT).max(self.bdp());
            self.bound = Some(bound.max(self.least()));
            self.full.is_full = true;
        }
    }

    /// Returns whether the shortest round trip has become too old.
    fn measure_rtt(&mut self, now: Time, rtt_nanos: Option<u64>) -> bool {
        if let (Some(rtt), BbrState::ProbeRtt) = (rtt_nanos, self.state) {
            self.probe.shortest = Some(self.probe.shortest.map_or(rtt, |least| least.min(rtt)));
        }
        let is_due = self.is_rtt_due;
        let is_shortest = |nanos: &u64| is_due || self.rtt.is_none_or(|rtt| *nanos <= rtt.nanos);
        if let Some(nanos) = rtt_nanos.filter(is_shortest) {
            self.is_rtt_due = false;
            self.rtt = Some(MinRtt { nanos: nanos.max(1), seen_at: now });
        }
        let Some(rtt) = &mut self.rtt else { return false };
        // A clock that jumped back must not make it young for ever.
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

    /// Whether little has been under way for long enough; starts the clock once it is little.
    fn is_probed(&mut self, now: Time) -> bool {
        if self.probe.until.is_none() && self.in_flight <= self.probe_window() {
            self.probe.until = Some(now.after(PROBE_RTT_NANOS));
        }
        // A clock that jumped back must not keep it here.
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

    /// Lets the window out by a step; without a bound once that holds nothing back.
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

    /// The first answer after a time-out tells what it was.
    fn end_timeout(&mut self, sent_at: Time) {
        if let Some(stopped_at) = self.stopped_at.take()
            && sent_at > stopped_at
        {
            // Nothing sent before has arrived first: it is lost. The rate is known, the window
            // doubles up to it.
            self.window = minimum_window(self.mtu);
        }
    }

    /// What fills the path without a queue.
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
    /// A new round, with this value.
    fn push(&mut self, value: u64) {
        self.at = (self.at + 1) % RATE_ROUNDS;
        self.values[self.at] = value;
    }

    /// The value of the present round is no less than this.
    fn raise(&mut self, value: u64) {
        let present = &mut self.values[self.at];
        *present = value.max(*present);
    }

    fn value(&self) -> u64 {
        self.values.into_iter().max().unwrap_or(0)
    }
}

const _: () = {
    // From one Up to the next.
    assert!(state::CYCLE_ROUNDS <= RATE_ROUNDS);
};
