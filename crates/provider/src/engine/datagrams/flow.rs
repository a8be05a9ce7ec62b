//! What is known of one path of datagrams: whether it works, how large its datagrams may be, whether it has fallen silent.
//!
//! What enters: probes' answers, whatever else arrives, what was sent, the time. What leaves: probes to be sent, and
//! judgements. All of it is found out with probes of the driver's own, which the peer answers whenever it looks at its network:
//! frames of the protocol may be confirmed by another path, and a probe's size is its own.
//!
//! | state | what it means | ends when |
//! |---|---|---|
//! | Trying | no frames go by it; probed with growing pauses | a probe is answered: Up |
//! | Up | frames go by it | silent for half of the patience: Doubted |
//! | Doubted | frames go by others, if there are any | anything is heard: Up; silent for the whole patience, while the peer is heard by others: Trying |
//!
//! What may never happen: a path is given up because its peer computes and looks at nothing.

use std::collections::VecDeque;

use landbridge_proto::path::mtu::{BASE_BYTES, PROBE_NANOS_MAX, PathMtu};
use landbridge_proto::path::rtt::RoundTrip;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use landbridge_proto::wire::datagram::{PROBE_BYTES, Probe};

/// First pause between probes of a path that is not up; doubled each time.
const TRIAL_NANOS_MIN: u64 = 20 * MILLISECOND;
/// Between small probes of a path on which something is awaited and nothing heard. Doubled each time while it is doubted.
const QUIET_NANOS: u64 = 20 * MILLISECOND;
/// And at most: a peer may compute for long.
const QUIET_NANOS_MAX: u64 = SECOND;
/// A path in use shows so often that its large datagrams still pass.
const PROOF_NANOS: u64 = SECOND;
/// Round trips beyond the patience, in which an answer may be on its way.
const ROUND_TRIPS: u64 = 4;
/// A probe that a later one has overtaken by so much is lost: a quarter of a round trip, and this.
const OVERTAKEN_NANOS: u64 = MILLISECOND;

/// Probes without an answer that are remembered: those of the longest round trip, and of a peer that computes the last.
const REMEMBERED_MAX: usize = 16;

/// See the module head.
pub struct Flow {
    state: State,
    size_max: usize,
    mtu: PathMtu,
    round_trip: RoundTrip,
    /// Number of the last probe.
    number: u64,
    /// The probe of a size that is under way.
    sized: Option<Sized>,
    /// Others without an answer, with the time when they left, the oldest first.
    small: VecDeque<(u64, Time)>,
    /// A small one is to go out behind a sized one.
    wants_small: bool,
    /// When the next trial, or the next small probe, may leave, and the pause after it.
    next: Time,
    pause: u64,
    /// When the size was last shown to pass or tried.
    proved: Time,
    /// Since when something has been sent and nothing has been heard.
    awaits: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Trying,
    Up,
    Doubted,
}

/// A probe that shows whether its size passes.
#[derive(Clone, Copy, Debug)]
struct Sized {
    probe: Probe,
    sent: Time,
    /// A small one that left later has been answered.
    overtaken: Option<Time>,
    /// Of a size in use, to see whether it still passes; else of a new one.
    is_proof: bool,
}

/// What an answer has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    Nothing,
    /// The path works.
    Opened,
    /// Datagrams may have another size.
    Resized,
}

/// What silence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Fine,
    /// Frames should rather go by others.
    Doubt,
    /// It is given up, and tried anew.
    Lost,
}

impl Flow {
    /// A path of which nothing is known but that there is somebody at its other end.
    pub fn new(now: Time, size_max: usize) -> Self {
        Self {
            state: State::Trying,
            size_max,
            mtu: PathMtu::new(size_max),
            round_trip: RoundTrip::new(),
            number: 0,
            sized: None,
            small: VecDeque::new(),
            wants_small: false,
            next: now,
            pause: TRIAL_NANOS_MIN,
            proved: now,
            awaits: None,
        }
    }

    /// Whether frames go by it.
    pub fn is_open(&self) -> bool {
        self.state != State::Trying
    }

    /// Whether frames should rather go by others.
    pub fn is_doubted(&self) -> bool {
        self.state == State::Doubted
    }

    /// Bytes that a datagram may have, token included.
    pub fn size(&self) -> usize {
        self.mtu.current_bytes()
    }

    /// Something is on its way: if nothing comes back, a probe shows whether anything can.
    #[inline]
    pub fn note_sent(&mut self, now: Time) {
        self.awaits.get_or_insert(now);
    }

    /// Nothing else shows whether the peer is still there: it is to answer, or the silence counts.
    pub fn question(&mut self, now: Time) {
        if self.is_open() {
            self.awaits.get_or_insert(now);
        }
    }

    /// Something has arrived by it that the peer would not send if it heard nothing. True if that ends a doubt.
    #[inline]
    pub fn handle_heard(&mut self) -> bool {
        self.awaits = None;
        let was_doubted = self.state == State::Doubted;
        if was_doubted {
            (self.state, self.pause) = (State::Up, QUIET_NANOS);
        }
        was_doubted
    }

    /// The peer probes: it is awake, and its datagrams get through.
    pub fn handle_probed(&mut self, now: Time) {
        if self.state == State::Trying {
            (self.next, self.pause) = (self.next.min(now), TRIAL_NANOS_MIN);
        }
    }

    /// There may be news of the way there: it is tried at once.
    pub fn shake(&mut self, now: Time) {
        (self.next, self.pause) = (now, TRIAL_NANOS_MIN);
    }

    /// Its datagrams may have become too large: that is found out now.
    pub fn shake_size(&mut self) {
        self.proved = Time(0);
    }

    /// The next probe that is to be sent now, if any; it then counts as sent. `pause_max`: between trials.
    pub fn due_probe(&mut self, now: Time, pause_max: u64) -> Option<Probe> {
        if std::mem::take(&mut self.wants_small) {
            return Some(self.small_probe(now));
        }
        match self.state {
            State::Trying => self.trial(now, pause_max),
            State::Up | State::Doubted => self.upkeep(now),
        }
    }

    fn trial(&mut self, now: Time, pause_max: u64) -> Option<Probe> {
        if now < self.next {
            return None;
        }
        self.next = now.after(self.pause);
        self.pause = (self.pause * 2).min(pause_max);
        Some(self.timed_probe(now, BASE_BYTES))
    }

    fn upkeep(&mut self, now: Time) -> Option<Probe> {
        let usual = QUIET_NANOS.saturating_add(self.round_trip.smoothed_nanos().unwrap_or(0));
        if self.awaits.is_some_and(|since| now.nanos_since(since) >= usual) && now >= self.next {
            self.next = now.after(self.pause);
            if self.state == State::Doubted {
                self.pause = (self.pause * 2).min(QUIET_NANOS_MAX);
            }
            return Some(self.small_probe(now));
        }
        self.sized_probe(now)
    }

    /// A probe of a size that is not known to pass, or of the one in use, with a small one behind it.
    fn sized_probe(&mut self, now: Time) -> Option<Probe> {
        if self.sized.is_some() || self.state == State::Doubted {
            return None;
        }
        let (size, is_proof) = match self.mtu.probe_size(now) {
            Some(size) => (size, false),
            None if self.wants_proof(now) => (self.mtu.current_bytes(), true),
            None => return None,
        };
        self.proved = now;
        let probe = self.probe(size);
        self.sized = Some(Sized { probe, sent: now, overtaken: None, is_proof });
        self.wants_small = true;
        Some(probe)
    }

    fn wants_proof(&self, now: Time) -> bool {
        let is_large = self.mtu.current_bytes() > BASE_BYTES;
        is_large && self.awaits.is_some() && now.nanos_since(self.proved) >= PROOF_NANOS
    }

    fn small_probe(&mut self, now: Time) -> Probe {
        self.awaits.get_or_insert(now);
        self.timed_probe(now, PROBE_BYTES)
    }

    fn timed_probe(&mut self, now: Time, size: usize) -> Probe {
        let probe = self.probe(size);
        if self.small.len() == REMEMBERED_MAX {
            self.small.pop_front();
        }
        self.small.push_back((probe.number, now));
        probe
    }

    fn probe(&mut self, size: usize) -> Probe {
        self.number += 1;
        Probe { size: size as u32, number: self.number }
    }

    /// A probe is answered.
    pub fn handle_answer(&mut self, now: Time, answer: Probe) -> News {
        let place = self.small.iter().position(|&(number, _)| number == answer.number);
        if let Some((number, sent)) = place.and_then(|place| self.small.remove(place)) {
            self.round_trip.handle_sample(now, now.nanos_since(sent));
            if let Some(sized) = self.sized.as_mut().filter(|sized| sized.probe.number < number) {
                sized.overtaken.get_or_insert(now);
            }
            if self.state == State::Trying {
                (self.state, self.pause, self.next) = (State::Up, QUIET_NANOS, now);
                return News::Opened;
            }
        }
        let Some(sized) = self.sized.take_if(|sized| sized.probe.number == answer.number) else {
            return News::Nothing;
        };
        let (before, size) = (self.mtu.current_bytes(), sized.probe.size as usize);
        self.proved = now;
        if sized.is_proof {
            self.mtu.handle_acked(size);
        } else {
            self.mtu.handle_probe_acked(now, size);
        }
        if self.mtu.current_bytes() == before { News::Nothing } else { News::Resized }
    }

    /// Lets time decide the fate of a sized probe.
    pub fn expire(&mut self, now: Time) -> News {
        let patience = self.round_trip.smoothed_nanos().unwrap_or(0) / 4 + OVERTAKEN_NANOS;
        let is_lost = |sized: &mut Sized| {
            sized.overtaken.is_some_and(|at| now.nanos_since(at) >= patience)
                || now.nanos_since(sized.sent) >= PROBE_NANOS_MAX
        };
        let Some(sized) = self.sized.take_if(is_lost) else {
            return News::Nothing;
        };
        let (before, size) = (self.mtu.current_bytes(), sized.probe.size as usize);
        if !sized.is_proof {
            self.mtu.handle_probe_lost(now, size);
        } else if sized.overtaken.is_some() {
            // Small ones pass: once more, at once.
            self.mtu.handle_lost(now, size);
            self.proved = Time(0);
        }
        if self.mtu.current_bytes() == before { News::Nothing } else { News::Resized }
    }

    /// A datagram of this size was refused on its way.
    pub fn handle_too_large(&mut self, now: Time, size: usize) -> News {
        let before = self.mtu.current_bytes();
        self.sized.take_if(|sized| sized.probe.size as usize >= size);
        self.mtu.handle_too_large(now, size);
        if self.mtu.current_bytes() == before { News::Nothing } else { News::Resized }
    }

    /// The peer goes round it. True if that is new.
    pub fn doubt(&mut self, now: Time) -> bool {
        let is_new = self.state == State::Up;
        if is_new {
            (self.state, self.next) = (State::Doubted, now);
            self.awaits.get_or_insert(now);
        }
        is_new
    }

    /// We have not looked for a while: what has come meanwhile may have been sent at any time, so silence counts from now on.
    pub fn handle_absence(&mut self, now: Time) {
        self.awaits = self.awaits.map(|_| now);
    }

    /// What the silence on it means. `patience`: how long it may last; `elsewhere`: when the peer was last heard by another path.
    pub fn judge(&mut self, now: Time, patience: u64, elsewhere: Time) -> Verdict {
        let Some(since) = self.awaits.filter(|_| self.is_open()) else {
            return Verdict::Fine;
        };
        let slack = self.round_trip.smoothed_nanos().unwrap_or(0).saturating_mul(ROUND_TRIPS);
        let silent = now.nanos_since(since);
        // So much later it had probes of ours to answer, too.
        let is_awake = elsewhere.nanos_since(since) > patience / 2 + slack;
        if silent > patience + slack && is_awake && self.state == State::Doubted {
            self.close(now);
            return Verdict::Lost;
        }
        if silent > patience / 2 + slack && self.state == State::Up {
            self.state = State::Doubted;
            return Verdict::Doubt;
        }
        Verdict::Fine
    }

    /// No frames go by it; it is tried anew.
    pub fn close(&mut self, now: Time) {
        let fresh = Flow::new(now, self.size_max);
        *self = Flow { number: self.number, next: now.after(TRIAL_NANOS_MIN), ..fresh };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: u64 = 2 * SECOND;
    const PATIENCE: u64 = 100 * MILLISECOND;
    /// A round trip of the path that is tried.
    const ROUND_TRIP: u64 = MILLISECOND;

    /// A path, and a network that carries datagrams of up to so many bytes.
    struct Trial {
        flow: Flow,
        now: Time,
        limit: usize,
        sizes: Vec<usize>,
    }

    impl Trial {
        fn new(limit: usize) -> Self {
            let flow = Flow::new(Time(0), 9000);
            Self { flow, now: Time(0), limit, sizes: Vec::new() }
        }

        /// Sends what is due, and answers what gets through.
        fn turn(&mut self) -> Vec<News> {
            let mut sent = Vec::new();
            while let Some(probe) = self.flow.due_probe(self.now, PAUSE_MAX) {
                self.sizes.push(probe.size as usize);
                sent.push(probe);
            }
            self.now = self.now.after(ROUND_TRIP);
            let mut news = Vec::new();
            for probe in sent.into_iter().filter(|probe| probe.size as usize <= self.limit) {
                self.flow.handle_heard();
                news.push(self.flow.handle_answer(self.now, probe));
            }
            self.now = self.now.after(20 * MILLISECOND);
            news.push(self.flow.expire(self.now));
            news.retain(|&news| news != News::Nothing);
            news
        }

        fn opened(limit: usize) -> Self {
            let mut trial = Self::new(limit);
            assert_eq!(trial.turn(), [News::Opened]);
            trial
        }

        fn settled(limit: usize) -> Self {
            let mut trial = Self::opened(limit);
            (0..40).for_each(|_| drop(trial.turn()));
            assert_eq!(trial.flow.size(), limit);
            trial.sizes.clear();
            trial
        }

        fn judge(&mut self, after: u64, elsewhere: Time) -> Verdict {
            self.now = self.now.after(after);
            self.flow.judge(self.now, PATIENCE, elsewhere)
        }
    }

    #[test]
    fn a_path_opens_with_its_first_answer_and_finds_its_size() {
        let mut trial = Trial::opened(1472);
        assert_eq!(trial.sizes, [BASE_BYTES]);
        let resized = (0..40).flat_map(|_| trial.turn()).filter(|&news| news == News::Resized);
        assert_eq!(resized.count(), 3, "1400, 1452, 1472");
        assert_eq!(trial.flow.size(), 1472);
    }

    #[test]
    fn where_nothing_gets_through_trials_become_rare() {
        let mut trial = Trial::new(0);
        while trial.now < Time(60 * SECOND) {
            assert_eq!(trial.turn(), []);
        }
        assert!(!trial.flow.is_open());
        assert!((30..50).contains(&trial.sizes.len()), "{} trials", trial.sizes.len());
        trial.flow.handle_probed(trial.now);
        assert!(trial.flow.due_probe(trial.now, PAUSE_MAX).is_some(), "the peer is awake");
    }

    #[test]
    fn a_late_answer_to_an_early_probe_opens_it() {
        let mut flow = Flow::new(Time(0), 1472);
        let first = flow.due_probe(Time(0), PAUSE_MAX).unwrap();
        assert!(flow.due_probe(Time(50 * MILLISECOND), PAUSE_MAX).is_some());
        assert_eq!(flow.handle_answer(Time(100 * MILLISECOND), first), News::Opened);
    }

    #[test]
    fn who_awaits_nothing_sends_no_probes_and_doubts_nothing() {
        let mut trial = Trial::settled(1472);
        (0..100).for_each(|_| drop(trial.turn()));
        assert_eq!(trial.sizes, []);
        assert_eq!(trial.judge(60 * SECOND, trial.now.after(60 * SECOND)), Verdict::Fine);
    }

    #[test]
    fn silence_is_doubted_and_ends_with_anything_that_is_heard() {
        let mut trial = Trial::settled(1472);
        trial.flow.note_sent(trial.now);
        assert_eq!(trial.judge(PATIENCE / 3, Time(0)), Verdict::Fine);
        assert_eq!(trial.judge(PATIENCE / 2, Time(0)), Verdict::Doubt);
        assert!(trial.flow.is_doubted() && trial.flow.is_open());
        assert!(trial.flow.handle_heard() && !trial.flow.is_doubted());
    }

    #[test]
    fn a_peer_that_computes_is_waited_for() {
        let mut trial = Trial::settled(1472);
        trial.flow.note_sent(trial.now);
        let heard = trial.now.after(PATIENCE / 4);
        assert_eq!(trial.judge(PATIENCE, heard), Verdict::Doubt);
        assert_eq!(trial.judge(100 * SECOND, heard), Verdict::Fine);
        assert!(trial.flow.is_open());
        trial.limit = 0;
        while trial.now < Time(200 * SECOND) {
            trial.turn();
        }
        assert!(trial.sizes.len() < 150, "{} probes", trial.sizes.len());
    }

    #[test]
    fn a_peer_that_is_heard_elsewhere_loses_the_path() {
        let mut trial = Trial::settled(1472);
        trial.flow.note_sent(trial.now);
        assert_eq!(trial.judge(PATIENCE, Time(0)), Verdict::Doubt);
        let heard = trial.now;
        assert_eq!(trial.judge(PATIENCE, heard), Verdict::Lost);
        assert!(!trial.flow.is_open() && trial.flow.size() == BASE_BYTES);
        let opened = (0..3).flat_map(|_| trial.turn()).any(|news| news == News::Opened);
        assert!(opened, "and is tried anew");
    }

    #[test]
    fn nobody_is_blamed_for_our_own_absence() {
        let mut trial = Trial::settled(1472);
        trial.flow.note_sent(trial.now);
        trial.now = trial.now.after(10 * SECOND);
        trial.flow.handle_absence(trial.now);
        assert_eq!(trial.judge(PATIENCE / 3, trial.now), Verdict::Fine);
    }

    #[test]
    fn a_route_that_swallows_large_datagrams_is_noticed_while_in_use() {
        let mut trial = Trial::settled(1472);
        trial.limit = BASE_BYTES;
        let start = trial.now;
        while trial.flow.size() > BASE_BYTES {
            trial.flow.note_sent(trial.now);
            trial.turn();
            assert!(trial.now.nanos_since(start) < 5 * SECOND, "{:?}", trial.sizes);
        }
    }

    #[test]
    fn what_this_host_refuses_ends_the_search() {
        let mut trial = Trial::opened(9000);
        let probe = trial.flow.due_probe(trial.now, PAUSE_MAX).unwrap();
        let size = probe.size as usize;
        assert_eq!(trial.flow.handle_too_large(trial.now, size), News::Nothing);
        (0..20).for_each(|_| drop(trial.turn()));
        assert!(trial.flow.size() < size);
    }

    /// What can happen to a path that has been silent since `SINCE`, at `NOW`.
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
        /// So long after something was sent it is judged, and the peer was heard elsewhere so long after that.
        Judged(u64, u64),
    }

    /// What it tells its owner.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Says {
        Nothing,
        /// The doubt is over, or is new.
        Doubt(bool),
        Opened,
        Lost,
    }

    const SINCE: Time = Time(SECOND);

    #[test]
    fn a_line_in_every_state_under_every_event() {
        use Event::*;
        use State::{Doubted, Trying, Up};
        let quiet = Says::Nothing;
        let keeps = [(Trying, quiet), (Up, quiet), (Doubted, quiet)];
        let doubts = [(Trying, quiet), (Doubted, Says::Doubt(true)), (Doubted, quiet)];
        let (half, whole) = (PATIENCE / 2, PATIENCE);
        let rows = [
            (Heard, [(Trying, quiet), (Up, quiet), (Up, Says::Doubt(false))]),
            (Probed, keeps),
            (Answered, [(Up, Says::Opened), (Up, quiet), (Doubted, quiet)]),
            (AnsweredUnasked, keeps),
            (Bypassed, doubts),
            (Questioned, keeps),
            (Absent, keeps),
            (Shaken, keeps),
            (Closed, [(Trying, quiet); 3]),
            (Judged(half, 2 * whole), keeps),
            (Judged(half + 1, 0), doubts),
            // Not at once, however late it is: the peer must have had something to answer.
            (Judged(whole + 1, half), doubts),
            (Judged(100 * whole, half), doubts),
            (
                Judged(whole + 1, half + 1),
                [(Trying, quiet), (Doubted, Says::Doubt(true)), (Trying, Says::Lost)],
            ),
            (Judged(whole, 2 * whole), doubts),
        ];
        for (event, expected) in rows {
            for (state, expected) in [Trying, Up, Doubted].into_iter().zip(expected) {
                let mut flow = Flow { state, ..Flow::new(Time(0), 1472) };
                let probe = flow.small_probe(SINCE);
                let said = happen(&mut flow, event, probe);
                assert_eq!((flow.state, said), expected, "{state:?} under {event:?}");
                assert_eq!(flow.is_open(), flow.state != Trying);
            }
        }
    }

    fn happen(flow: &mut Flow, event: Event, probe: Probe) -> Says {
        let now = SINCE.after(PATIENCE / 4);
        let is_new = |is_new: bool, means: Says| if is_new { means } else { Says::Nothing };
        match event {
            Event::Heard => return is_new(flow.handle_heard(), Says::Doubt(false)),
            Event::Bypassed => return is_new(flow.doubt(now), Says::Doubt(true)),
            Event::Answered => {
                return is_new(flow.handle_answer(now, probe) == News::Opened, Says::Opened);
            }
            Event::AnsweredUnasked => {
                let strange = Probe { number: probe.number + 1, ..probe };
                return is_new(flow.handle_answer(now, strange) != News::Nothing, Says::Opened);
            }
            Event::Judged(silent, elsewhere) => {
                return match flow.judge(SINCE.after(silent), PATIENCE, SINCE.after(elsewhere)) {
                    Verdict::Fine => Says::Nothing,
                    Verdict::Doubt => Says::Doubt(true),
                    Verdict::Lost => Says::Lost,
                };
            }
            Event::Probed => flow.handle_probed(now),
            Event::Questioned => flow.question(now),
            Event::Absent => flow.handle_absence(now),
            Event::Shaken => flow.shake(now),
            Event::Closed => flow.close(now),
        }
        Says::Nothing
    }

    #[test]
    fn the_next_probe_in_every_state_after_every_event() {
        let (now, later) = (SINCE, SINCE.after(SECOND));
        let due =
            |flow: &mut Flow, at: Time| flow.due_probe(at, PAUSE_MAX).map(|p| p.size as usize);
        // What has happened; the probe that is due then, of a path that is tried, up, doubted. None of them had waited for
        // anything, and the next trial was a second away.
        type Happen = fn(&mut Flow, Time);
        let (base, small) = (Some(BASE_BYTES), Some(PROBE_BYTES));
        let rows: [(&str, Happen, [Option<usize>; 3]); 6] = [
            ("nothing", |_, _| (), [None; 3]),
            ("the peer probes", |flow, now| flow.handle_probed(now), [base, None, None]),
            ("the way may be another", |flow, now| flow.shake(now), [base, None, None]),
            // Long ago, and its time has come.
            ("something was sent", |flow, _| flow.note_sent(Time(0)), [None, None, None]),
            (
                "the same, and the way may be another",
                |flow, now| {
                    flow.note_sent(Time(0));
                    flow.shake(now);
                },
                [base, small, small],
            ),
            (
                "the same, and we were away",
                |flow, now| {
                    flow.note_sent(Time(0));
                    flow.shake(now);
                    flow.handle_absence(now);
                },
                [base, None, None],
            ),
        ];
        for (what, happen, expected) in rows {
            for (state, expected) in
                [State::Trying, State::Up, State::Doubted].into_iter().zip(expected)
            {
                let mut flow =
                    Flow { state, next: later, proved: now, ..Flow::new(Time(0), BASE_BYTES) };
                happen(&mut flow, now);
                assert_eq!(due(&mut flow, now), expected, "{state:?} when {what}");
            }
        }
    }
}
