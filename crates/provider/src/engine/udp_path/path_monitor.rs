//! State of one UDP path: whether the path works, how large its datagrams may be, whether the peer
//! is silent on it.
//!
//! What enters: answers to probes, other received datagrams, what was sent, the time. What leaves:
//! probes to be sent, and state changes. The monitor uses probes of the driver, which the peer
//! answers whenever it polls. Frames of the protocol would not do: they may be confirmed by another
//! path, and have other sizes.
//!
//! | state | meaning | ends when |
//! |---|---|---|
//! | Validating | no frames use the path; probes with growing pauses | a probe is answered: Up |
//! | Up | frames use the path | silent for half of `suspect_after`: Suspected |
//! | Suspected | frames use other paths | something arrives: Up; silent too long: Validating |
//!
//! A suspected path is silent too long after the whole `suspect_after`, if the peer was received by
//! other paths meanwhile.
//!
//! What may never happen: a path is given up because its peer computes and does not poll.

use std::collections::VecDeque;

use landbridge_proto::path::mtu::{BASE_BYTES, PROBE_NANOS_MAX, PathMtu};
use landbridge_proto::path::rtt::RttEstimator;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use landbridge_proto::wire::datagram::{PROBE_BYTES, PathProbe};

/// First pause between probes of a path in validation; each further pause is twice as long.
const VALIDATION_NANOS_MIN: u64 = 20 * MILLISECOND;
/// Pause between small probes while an answer is awaited and nothing arrives. The pause doubles
/// with each probe of a suspected path.
const PROBE_TIMEOUT_NANOS: u64 = 20 * MILLISECOND;
/// Longest pause between small probes of a suspected path: a peer may compute for long.
const PROBE_TIMEOUT_NANOS_MAX: u64 = SECOND;
/// Interval at which a path in use verifies that its large datagrams still pass.
const SIZE_RECHECK_NANOS: u64 = SECOND;
/// Number of round trips added to each limit, in which an answer may be under way.
const ROUND_TRIPS: u64 = 4;
/// A probe is lost when an answer to a later probe arrived this time, plus a quarter of a round
/// trip, ago.
const REORDERING_NANOS: u64 = MILLISECOND;

/// Maximum number of remembered unanswered probes: enough for the longest round trip; for a peer
/// that computes, the newest probes.
const UNANSWERED_PROBES_MAX: usize = 16;

/// State of one UDP path.
pub struct PathMonitor {
    state: MonitorState,
    size_max: usize,
    mtu: PathMtu,
    round_trip: RttEstimator,
    /// Number of the last probe.
    number: u64,
    /// The size probe in flight.
    size_probe: Option<SizeProbe>,
    /// Other unanswered probes, with their sending times, the oldest first.
    small: VecDeque<(u64, Time)>,
    /// A small probe is due behind a size probe.
    wants_small: bool,
    /// Time of the next validation probe, or of the next small probe.
    next: Time,
    /// Pause after the next probe, in nanoseconds.
    pause: u64,
    /// Time when the datagram size was last verified or probed.
    size_checked: Time,
    /// Time since when something was sent and nothing has been received.
    unanswered_since: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MonitorState {
    Validating,
    Up,
    Suspected,
}

/// A probe that shows whether its size passes.
#[derive(Clone, Copy, Debug)]
struct SizeProbe {
    probe: PathProbe,
    sent: Time,
    /// Time when a small probe that was sent later was answered.
    overtaken: Option<Time>,
    /// The probe verifies the size in use; otherwise the probe tries a larger size.
    is_recheck: bool,
}

/// Effect of an answer or a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChange {
    Nothing,
    /// The path works.
    Opened,
    /// The size of datagrams has changed.
    Resized,
}

/// Verdict on the silence of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathHealth {
    Alive,
    /// Frames should use other paths.
    Suspected,
    /// The path is closed, and path validation begins again.
    Lost,
}

impl PathMonitor {
    /// A path in validation, on which nothing has been measured.
    pub fn new(now: Time, size_max: usize) -> Self {
        Self {
            state: MonitorState::Validating,
            size_max,
            mtu: PathMtu::new(size_max),
            round_trip: RttEstimator::new(),
            number: 0,
            size_probe: None,
            small: VecDeque::new(),
            wants_small: false,
            next: now,
            pause: VALIDATION_NANOS_MIN,
            size_checked: now,
            unanswered_since: None,
        }
    }

    /// Whether frames may use the path.
    pub fn is_open(&self) -> bool {
        self.state != MonitorState::Validating
    }

    /// Whether frames should use other paths.
    pub fn is_suspected(&self) -> bool {
        self.state == MonitorState::Suspected
    }

    /// Current size of a datagram in bytes, token included.
    pub fn size(&self) -> usize {
        self.mtu.current_bytes()
    }

    /// Records that something was sent at `now`. If nothing arrives in return, a probe tests the
    /// path.
    #[inline]
    pub fn note_sent(&mut self, now: Time) {
        self.unanswered_since.get_or_insert(now);
    }

    /// Makes silence of an open path count from `now`, because no other path shows whether the peer
    /// is alive.
    pub fn expect_answer(&mut self, now: Time) {
        if self.is_open() {
            self.unanswered_since.get_or_insert(now);
        }
    }

    /// Records a reception that shows that the peer receives something, too. Returns true if the
    /// path was suspected.
    #[inline]
    pub fn handle_received(&mut self) -> bool {
        self.unanswered_since = None;
        let was_suspected = self.state == MonitorState::Suspected;
        if was_suspected {
            (self.state, self.pause) = (MonitorState::Up, PROBE_TIMEOUT_NANOS);
        }
        was_suspected
    }

    /// Records a probe of the peer, which shows that the peer polls and that its datagrams arrive.
    /// A path in validation is probed at once.
    pub fn handle_peer_probe(&mut self, now: Time) {
        if self.state == MonitorState::Validating {
            (self.next, self.pause) = (self.next.min(now), VALIDATION_NANOS_MIN);
        }
    }

    /// Makes the next probe due at once, because the peer has advertised its address again.
    pub fn probe_now(&mut self, now: Time) {
        (self.next, self.pause) = (now, VALIDATION_NANOS_MIN);
    }

    /// Makes a check of the datagram size due at once, because datagrams may have become too large.
    pub fn recheck_size(&mut self) {
        self.size_checked = Time(0);
    }

    /// The next probe that is due, if any; the probe then counts as sent. `pause_max`: longest
    /// pause between validation probes, in nanoseconds.
    pub fn due_probe(&mut self, now: Time, pause_max: u64) -> Option<PathProbe> {
        if std::mem::take(&mut self.wants_small) {
            return Some(self.small_probe(now));
        }
        match self.state {
            MonitorState::Validating => self.validation_probe(now, pause_max),
            MonitorState::Up | MonitorState::Suspected => self.maintenance_probe(now),
        }
    }

    fn validation_probe(&mut self, now: Time, pause_max: u64) -> Option<PathProbe> {
        if now < self.next {
            return None;
        }
        self.next = now.after(self.pause);
        self.pause = (self.pause * 2).min(pause_max);
        Some(self.timed_probe(now, BASE_BYTES))
    }

    fn maintenance_probe(&mut self, now: Time) -> Option<PathProbe> {
        let usual =
            PROBE_TIMEOUT_NANOS.saturating_add(self.round_trip.smoothed_nanos().unwrap_or(0));
        if self.unanswered_since.is_some_and(|since| now.nanos_since(since) >= usual)
            && now >= self.next
        {
            self.next = now.after(self.pause);
            if self.state == MonitorState::Suspected {
                self.pause = (self.pause * 2).min(PROBE_TIMEOUT_NANOS_MAX);
            }
            return Some(self.small_probe(now));
        }
        self.next_size_probe(now)
    }

    /// A probe of a larger size, or of the size in use if a check is due. A small probe follows the
    /// size probe.
    fn next_size_probe(&mut self, now: Time) -> Option<PathProbe> {
        if self.size_probe.is_some() || self.state == MonitorState::Suspected {
            return None;
        }
        let (size, is_recheck) = match self.mtu.probe_size(now) {
            Some(size) => (size, false),
            None if self.wants_recheck(now) => (self.mtu.current_bytes(), true),
            None => return None,
        };
        self.size_checked = now;
        let probe = self.probe(size);
        self.size_probe = Some(SizeProbe { probe, sent: now, overtaken: None, is_recheck });
        self.wants_small = true;
        Some(probe)
    }

    fn wants_recheck(&self, now: Time) -> bool {
        let is_large = self.mtu.current_bytes() > BASE_BYTES;
        is_large
            && self.unanswered_since.is_some()
            && now.nanos_since(self.size_checked) >= SIZE_RECHECK_NANOS
    }

    fn small_probe(&mut self, now: Time) -> PathProbe {
        self.unanswered_since.get_or_insert(now);
        self.timed_probe(now, PROBE_BYTES)
    }

    fn timed_probe(&mut self, now: Time, size: usize) -> PathProbe {
        let probe = self.probe(size);
        if self.small.len() == UNANSWERED_PROBES_MAX {
            self.small.pop_front();
        }
        self.small.push_back((probe.number, now));
        probe
    }

    fn probe(&mut self, size: usize) -> PathProbe {
        self.number += 1;
        PathProbe { size: size as u32, number: self.number }
    }

    /// Handles the answer to a probe.
    pub fn handle_answer(&mut self, now: Time, answer: PathProbe) -> PathChange {
        let place = self.small.iter().position(|&(number, _)| number == answer.number);
        if let Some((number, sent)) = place.and_then(|place| self.small.remove(place)) {
            self.round_trip.handle_sample(now, now.nanos_since(sent));
            if let Some(size_probe) =
                self.size_probe.as_mut().filter(|size_probe| size_probe.probe.number < number)
            {
                size_probe.overtaken.get_or_insert(now);
            }
            if self.state == MonitorState::Validating {
                (self.state, self.pause, self.next) = (MonitorState::Up, PROBE_TIMEOUT_NANOS, now);
                return PathChange::Opened;
            }
        }
        let Some(size_probe) =
            self.size_probe.take_if(|size_probe| size_probe.probe.number == answer.number)
        else {
            return PathChange::Nothing;
        };
        let (before, size) = (self.mtu.current_bytes(), size_probe.probe.size as usize);
        self.size_checked = now;
        if size_probe.is_recheck {
            self.mtu.handle_acked(size);
        } else {
            self.mtu.handle_probe_acked(now, size);
        }
        if self.mtu.current_bytes() == before { PathChange::Nothing } else { PathChange::Resized }
    }

    /// Declares the size probe lost if it was overtaken or has timed out.
    pub fn expire(&mut self, now: Time) -> PathChange {
        let reordering = self.round_trip.smoothed_nanos().unwrap_or(0) / 4 + REORDERING_NANOS;
        let is_lost = |size_probe: &mut SizeProbe| {
            size_probe.overtaken.is_some_and(|at| now.nanos_since(at) >= reordering)
                || now.nanos_since(size_probe.sent) >= PROBE_NANOS_MAX
        };
        let Some(size_probe) = self.size_probe.take_if(is_lost) else {
            return PathChange::Nothing;
        };
        let (before, size) = (self.mtu.current_bytes(), size_probe.probe.size as usize);
        if !size_probe.is_recheck {
            self.mtu.handle_probe_lost(now, size);
        } else if size_probe.overtaken.is_some() {
            // Smaller datagrams pass: the size is checked once more, at once.
            self.mtu.handle_lost(now, size);
            self.size_checked = Time(0);
        }
        if self.mtu.current_bytes() == before { PathChange::Nothing } else { PathChange::Resized }
    }

    /// Handles the report that a datagram of this size was refused on its way.
    pub fn handle_too_large(&mut self, now: Time, size: usize) -> PathChange {
        let before = self.mtu.current_bytes();
        self.size_probe.take_if(|size_probe| size_probe.probe.size as usize >= size);
        self.mtu.handle_too_large(now, size);
        if self.mtu.current_bytes() == before { PathChange::Nothing } else { PathChange::Resized }
    }

    /// Suspects the path because the peer avoids it. Returns true if the suspicion is new.
    pub fn suspect(&mut self, now: Time) -> bool {
        let is_new = self.state == MonitorState::Up;
        if is_new {
            (self.state, self.next) = (MonitorState::Suspected, now);
            self.unanswered_since.get_or_insert(now);
        }
        is_new
    }

    /// Restarts the count of silence after a gap between polls of this process: datagrams may have
    /// waited unread.
    pub fn handle_poll_gap(&mut self, now: Time) {
        self.unanswered_since = self.unanswered_since.map(|_| now);
    }

    /// Judges the silence of the path. `suspect_after`: longest silence in nanoseconds;
    /// `elsewhere`: time of the last reception from the peer by another path.
    pub fn assess(&mut self, now: Time, suspect_after: u64, elsewhere: Time) -> PathHealth {
        let Some(since) = self.unanswered_since.filter(|_| self.is_open()) else {
            return PathHealth::Alive;
        };
        let slack = self.round_trip.smoothed_nanos().unwrap_or(0).saturating_mul(ROUND_TRIPS);
        let unanswered = now.nanos_since(since);
        // A peer that sent something so much later has also polled, and had probes to answer.
        let is_awake = elsewhere.nanos_since(since) > suspect_after / 2 + slack;
        if unanswered > suspect_after + slack && is_awake && self.state == MonitorState::Suspected {
            self.close(now);
            return PathHealth::Lost;
        }
        if unanswered > suspect_after / 2 + slack && self.state == MonitorState::Up {
            self.state = MonitorState::Suspected;
            return PathHealth::Suspected;
        }
        PathHealth::Alive
    }

    /// Closes the path; validation begins again.
    pub fn close(&mut self, now: Time) {
        let fresh = PathMonitor::new(now, self.size_max);
        *self = PathMonitor { number: self.number, next: now.after(VALIDATION_NANOS_MIN), ..fresh };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: u64 = 2 * SECOND;
    const PATIENCE: u64 = 100 * MILLISECOND;
    /// Round trip time of the simulated path.
    const ROUND_TRIP: u64 = MILLISECOND;

    /// A path, and a network that carries datagrams of up to `limit` bytes.
    struct Trial {
        monitor: PathMonitor,
        now: Time,
        limit: usize,
        sizes: Vec<usize>,
    }

    impl Trial {
        fn new(limit: usize) -> Self {
            let monitor = PathMonitor::new(Time(0), 9000);
            Self { monitor, now: Time(0), limit, sizes: Vec::new() }
        }

        /// Sends the probes that are due, and answers those that pass.
        fn turn(&mut self) -> Vec<PathChange> {
            let mut sent = Vec::new();
            while let Some(probe) = self.monitor.due_probe(self.now, PAUSE_MAX) {
                self.sizes.push(probe.size as usize);
                sent.push(probe);
            }
            self.now = self.now.after(ROUND_TRIP);
            let mut change = Vec::new();
            for probe in sent.into_iter().filter(|probe| probe.size as usize <= self.limit) {
                self.monitor.handle_received();
                change.push(self.monitor.handle_answer(self.now, probe));
            }
            self.now = self.now.after(20 * MILLISECOND);
            change.push(self.monitor.expire(self.now));
            change.retain(|&change| change != PathChange::Nothing);
            change
        }

        fn opened(limit: usize) -> Self {
            let mut trial = Self::new(limit);
            assert_eq!(trial.turn(), [PathChange::Opened]);
            trial
        }

        fn settled(limit: usize) -> Self {
            let mut trial = Self::opened(limit);
            (0..40).for_each(|_| drop(trial.turn()));
            assert_eq!(trial.monitor.size(), limit);
            trial.sizes.clear();
            trial
        }

        fn assess(&mut self, after: u64, elsewhere: Time) -> PathHealth {
            self.now = self.now.after(after);
            self.monitor.assess(self.now, PATIENCE, elsewhere)
        }
    }

    #[test]
    fn a_path_opens_with_its_first_answer_and_finds_its_size() {
        let mut trial = Trial::opened(1472);
        assert_eq!(trial.sizes, [BASE_BYTES]);
        let resized =
            (0..40).flat_map(|_| trial.turn()).filter(|&change| change == PathChange::Resized);
        assert_eq!(resized.count(), 3, "1400, 1452, 1472");
        assert_eq!(trial.monitor.size(), 1472);
    }

    #[test]
    fn where_nothing_gets_through_trials_become_rare() {
        let mut trial = Trial::new(0);
        while trial.now < Time(60 * SECOND) {
            assert_eq!(trial.turn(), []);
        }
        assert!(!trial.monitor.is_open());
        assert!((30..50).contains(&trial.sizes.len()), "{} trials", trial.sizes.len());
        trial.monitor.handle_peer_probe(trial.now);
        assert!(trial.monitor.due_probe(trial.now, PAUSE_MAX).is_some(), "the peer is awake");
    }

    #[test]
    fn a_late_answer_to_an_early_probe_opens_it() {
        let mut monitor = PathMonitor::new(Time(0), 1472);
        let first = monitor.due_probe(Time(0), PAUSE_MAX).unwrap();
        assert!(monitor.due_probe(Time(50 * MILLISECOND), PAUSE_MAX).is_some());
        assert_eq!(monitor.handle_answer(Time(100 * MILLISECOND), first), PathChange::Opened);
    }

    #[test]
    fn who_awaits_nothing_sends_no_probes_and_suspects_nothing() {
        let mut trial = Trial::settled(1472);
        (0..100).for_each(|_| drop(trial.turn()));
        assert_eq!(trial.sizes, []);
        assert_eq!(trial.assess(60 * SECOND, trial.now.after(60 * SECOND)), PathHealth::Alive);
    }

    #[test]
    fn silence_is_suspected_and_ends_with_anything_that_is_heard() {
        let mut trial = Trial::settled(1472);
        trial.monitor.note_sent(trial.now);
        assert_eq!(trial.assess(PATIENCE / 3, Time(0)), PathHealth::Alive);
        assert_eq!(trial.assess(PATIENCE / 2, Time(0)), PathHealth::Suspected);
        assert!(trial.monitor.is_suspected() && trial.monitor.is_open());
        assert!(trial.monitor.handle_received() && !trial.monitor.is_suspected());
    }

    #[test]
    fn a_peer_that_computes_is_waited_for() {
        let mut trial = Trial::settled(1472);
        trial.monitor.note_sent(trial.now);
        let heard = trial.now.after(PATIENCE / 4);
        assert_eq!(trial.assess(PATIENCE, heard), PathHealth::Suspected);
        assert_eq!(trial.assess(100 * SECOND, heard), PathHealth::Alive);
        assert!(trial.monitor.is_open());
        trial.limit = 0;
        while trial.now < Time(200 * SECOND) {
            trial.turn();
        }
        assert!(trial.sizes.len() < 150, "{} probes", trial.sizes.len());
    }

    #[test]
    fn a_peer_that_is_heard_elsewhere_loses_the_path() {
        let mut trial = Trial::settled(1472);
        trial.monitor.note_sent(trial.now);
        assert_eq!(trial.assess(PATIENCE, Time(0)), PathHealth::Suspected);
        let heard = trial.now;
        assert_eq!(trial.assess(PATIENCE, heard), PathHealth::Lost);
        assert!(!trial.monitor.is_open() && trial.monitor.size() == BASE_BYTES);
        let opened = (0..3).flat_map(|_| trial.turn()).any(|change| change == PathChange::Opened);
        assert!(opened, "and is tried again");
    }

    #[test]
    fn nobody_is_blamed_for_our_own_absence() {
        let mut trial = Trial::settled(1472);
        trial.monitor.note_sent(trial.now);
        trial.now = trial.now.after(10 * SECOND);
        trial.monitor.handle_poll_gap(trial.now);
        assert_eq!(trial.assess(PATIENCE / 3, trial.now), PathHealth::Alive);
    }

    #[test]
    fn a_route_that_swallows_large_datagrams_is_noticed_while_in_use() {
        let mut trial = Trial::settled(1472);
        trial.limit = BASE_BYTES;
        let start = trial.now;
        while trial.monitor.size() > BASE_BYTES {
            trial.monitor.note_sent(trial.now);
            trial.turn();
            assert!(trial.now.nanos_since(start) < 5 * SECOND, "{:?}", trial.sizes);
        }
    }

    #[test]
    fn what_this_host_refuses_ends_the_search() {
        let mut trial = Trial::opened(9000);
        let probe = trial.monitor.due_probe(trial.now, PAUSE_MAX).unwrap();
        let size = probe.size as usize;
        assert_eq!(trial.monitor.handle_too_large(trial.now, size), PathChange::Nothing);
        (0..20).for_each(|_| drop(trial.turn()));
        assert!(trial.monitor.size() < size);
    }

    /// Events for a path that has been silent since `SINCE`.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        Heard,
        Probed,
        Answered,
        AnsweredUnasked,
        Bypassed,
        Questioned,
        Absent,
        Shaken,
        Closed,
        /// The path is judged this many nanoseconds after something was sent; the second value is
        /// the time, counted from the same moment, of the last reception by another path.
        Judged(u64, u64),
    }

    /// What the monitor reports to its owner.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Says {
        Nothing,
        /// A suspicion begins (true) or ends (false).
        Suspicion(bool),
        Opened,
        Lost,
    }

    const SINCE: Time = Time(SECOND);

    #[test]
    fn a_line_in_every_state_under_every_event() {
        use Event::*;
        use MonitorState::{Suspected, Up, Validating};
        let quiet = Says::Nothing;
        let keeps = [(Validating, quiet), (Up, quiet), (Suspected, quiet)];
        let suspicions =
            [(Validating, quiet), (Suspected, Says::Suspicion(true)), (Suspected, quiet)];
        let (half, whole) = (PATIENCE / 2, PATIENCE);
        let rows = [
            (Heard, [(Validating, quiet), (Up, quiet), (Up, Says::Suspicion(false))]),
            (Probed, keeps),
            (Answered, [(Up, Says::Opened), (Up, quiet), (Suspected, quiet)]),
            (AnsweredUnasked, keeps),
            (Bypassed, suspicions),
            (Questioned, keeps),
            (Absent, keeps),
            (Shaken, keeps),
            (Closed, [(Validating, quiet); 3]),
            (Judged(half, 2 * whole), keeps),
            (Judged(half + 1, 0), suspicions),
            // A peer that had nothing to answer is not lost, however long its silence.
            (Judged(whole + 1, half), suspicions),
            (Judged(100 * whole, half), suspicions),
            (
                Judged(whole + 1, half + 1),
                [(Validating, quiet), (Suspected, Says::Suspicion(true)), (Validating, Says::Lost)],
            ),
            (Judged(whole, 2 * whole), suspicions),
        ];
        for (event, expected) in rows {
            for (state, expected) in [Validating, Up, Suspected].into_iter().zip(expected) {
                let mut monitor = PathMonitor { state, ..PathMonitor::new(Time(0), 1472) };
                let probe = monitor.small_probe(SINCE);
                let said = happen(&mut monitor, event, probe);
                assert_eq!((monitor.state, said), expected, "{state:?} under {event:?}");
                assert_eq!(monitor.is_open(), monitor.state != Validating);
            }
        }
    }

    fn happen(monitor: &mut PathMonitor, event: Event, probe: PathProbe) -> Says {
        let now = SINCE.after(PATIENCE / 4);
        let is_new = |is_new: bool, means: Says| if is_new { means } else { Says::Nothing };
        match event {
            Event::Heard => return is_new(monitor.handle_received(), Says::Suspicion(false)),
            Event::Bypassed => return is_new(monitor.suspect(now), Says::Suspicion(true)),
            Event::Answered => {
                return is_new(
                    monitor.handle_answer(now, probe) == PathChange::Opened,
                    Says::Opened,
                );
            }
            Event::AnsweredUnasked => {
                let unknown = PathProbe { number: probe.number + 1, ..probe };
                return is_new(
                    monitor.handle_answer(now, unknown) != PathChange::Nothing,
                    Says::Opened,
                );
            }
            Event::Judged(unanswered, elsewhere) => {
                return match monitor.assess(
                    SINCE.after(unanswered),
                    PATIENCE,
                    SINCE.after(elsewhere),
                ) {
                    PathHealth::Alive => Says::Nothing,
                    PathHealth::Suspected => Says::Suspicion(true),
                    PathHealth::Lost => Says::Lost,
                };
            }
            Event::Probed => monitor.handle_peer_probe(now),
            Event::Questioned => monitor.expect_answer(now),
            Event::Absent => monitor.handle_poll_gap(now),
            Event::Shaken => monitor.probe_now(now),
            Event::Closed => monitor.close(now),
        }
        Says::Nothing
    }

    #[test]
    fn the_next_probe_in_every_state_after_every_event() {
        let (now, later) = (SINCE, SINCE.after(SECOND));
        let due = |monitor: &mut PathMonitor, at: Time| {
            monitor.due_probe(at, PAUSE_MAX).map(|p| p.size as usize)
        };
        // Each row holds an event, and the probe that is due afterwards for a path in validation,
        // up and suspected. None of the paths awaits an answer, and their next probe is due a
        // second later.
        type Happen = fn(&mut PathMonitor, Time);
        let (base, small) = (Some(BASE_BYTES), Some(PROBE_BYTES));
        let rows: [(&str, Happen, [Option<usize>; 3]); 6] = [
            ("nothing", |_, _| (), [None; 3]),
            ("the peer probes", |monitor, now| monitor.handle_peer_probe(now), [base, None, None]),
            ("the way may be another", |monitor, now| monitor.probe_now(now), [base, None, None]),
            // The event is long ago, and its probe is due.
            ("something was sent", |monitor, _| monitor.note_sent(Time(0)), [None, None, None]),
            (
                "the same, and the way may be another",
                |monitor, now| {
                    monitor.note_sent(Time(0));
                    monitor.probe_now(now);
                },
                [base, small, small],
            ),
            (
                "the same, and we were away",
                |monitor, now| {
                    monitor.note_sent(Time(0));
                    monitor.probe_now(now);
                    monitor.handle_poll_gap(now);
                },
                [base, None, None],
            ),
        ];
        for (what, happen, expected) in rows {
            for (state, expected) in
                [MonitorState::Validating, MonitorState::Up, MonitorState::Suspected]
                    .into_iter()
                    .zip(expected)
            {
                let mut monitor = PathMonitor {
                    state,
                    next: later,
                    size_checked: now,
                    ..PathMonitor::new(Time(0), BASE_BYTES)
                };
                happen(&mut monitor, now);
                assert_eq!(due(&mut monitor, now), expected, "{state:?} when {what}");
            }
        }
    }
}
