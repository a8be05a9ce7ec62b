//! Decides when a broken path is dialled again, and when a peer is given up.
//!
//! When a path is lost, frames continue on another path if there is one, and the protocol
//! retransmits what the lost path may have lost. The engine dials the lost path again, at once and
//! then with growing pauses. When no path is left that delivers anything, the peer is *unreachable*
//! (`PathManager::is_unreachable`). Operations for an unreachable peer wait, without an error, for
//! up to `peer_timeout`. The peer is given up after this time, or earlier when its addresses refuse
//! every connection. The functions in `repair` execute what is decided here.
//!
//! A reconnect proceeds in rounds, and each round tries every candidate. The answers of the
//! candidates and the time decide:
//!
//! | what happens | while the peer is unreachable | otherwise |
//! |---|---|---|
//! | a candidate is refused | the round counts as refused, if all candidates are | |
//! | the other side denies that we are of the job | as refused; more rounds are allowed | |
//! | a candidate fails for another reason | the count of refused rounds returns to zero | |
//! | a round was refused | retry after a pause; the last refusal fails the peer | retry later |
//! | the peer becomes unreachable | pauses and refusals count from zero | |
//! | `peer_timeout` has passed since | the peer is given up | |
//!
//! What may never happen: operations wait without end for an unreachable peer, whatever paths are
//! open.

use std::io;
use std::time::{Duration, Instant};

/// First pause between two attempts; each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Number of consecutive refused rounds after which the peer counts as ended. A single refusal may
/// come from a full listener.
const REFUSALS_MAX: u32 = 4;
/// Number of consecutive refused rounds after which the peer counts as ended, if an answer denied
/// that this process belongs to the job. The hello may have been corrupted on the network: its
/// proof is its only checksum.
pub const DENIALS_MAX: u32 = 10;

/// State of the attempts to reopen a path of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconnect {
    /// Time since when the peer is unreachable; `None` if the peer is reachable.
    unreachable_since: Option<Instant>,
    next: Instant,
    pause: Duration,
    /// Consecutive rounds in which every candidate was refused since the peer became unreachable.
    refusals: u32,
    /// Some candidate of this round failed for another reason than a refusal.
    has_unrefused: bool,
    /// An answer in this round denied that this process belongs to the job.
    is_denied: bool,
    /// A path was lost, and not only suspected.
    pub has_lost: bool,
}

impl Reconnect {
    /// The pause after the current attempt.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Whether the next round is due.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    pub fn new(has_lost: bool, now: Instant) -> Self {
        let (has_unrefused, is_denied) = (false, false);
        Self {
            unreachable_since: None,
            next: now,
            pause: PAUSE_MIN,
            refusals: 0,
            has_unrefused,
            is_denied,
            has_lost,
        }
    }

    /// Begins a round, in which every candidate is tried once more.
    pub fn begin_round(&mut self) {
        (self.has_unrefused, self.is_denied) = (false, false);
    }

    /// Records that a candidate has failed.
    pub fn note(&mut self, error: &io::Error) {
        // No listener is at this address, or the listener belongs to another process.
        let is_refused =
            matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::AddrInUse);
        self.has_unrefused |= !is_refused && !is_denied(error);
        self.is_denied |= is_denied(error);
    }

    /// Records whether the peer is unreachable now. Returns the time since when the peer is
    /// unreachable.
    pub fn note_unreachable(&mut self, is_unreachable: bool, now: Instant) -> Option<Instant> {
        match self.unreachable_since {
            _ if !is_unreachable => self.unreachable_since = None,
            Some(_) => (),
            // Refusals count, and pauses are short, only from the moment when the peer becomes
            // unreachable.
            None => {
                let Reconnect { has_unrefused, is_denied, has_lost, .. } = *self;
                let fresh = Reconnect::new(has_lost, now);
                *self =
                    Reconnect { unreachable_since: Some(now), has_unrefused, is_denied, ..fresh };
            }
        }
        self.unreachable_since
    }

    /// Ends a round in which no candidate reached the peer. Returns true if the peer counts as
    /// ended, and no further round is due.
    pub fn end_round(&mut self, pause_max: Duration, now: Instant) -> bool {
        let is_refused = self.unreachable_since.is_some() && !self.has_unrefused;
        self.refusals = if is_refused { self.refusals + 1 } else { 0 };
        let refusals_max = if self.is_denied { DENIALS_MAX } else { REFUSALS_MAX };
        if self.refusals >= refusals_max {
            return true;
        }
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(pause_max);
        false
    }
}

/// Whether the error is a failure of the network, which may recover.
pub fn is_network_down(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(error.kind(), HostUnreachable | NetworkDown | NetworkUnreachable | TimedOut)
}

/// Whether a process answered, and the hello failed: another attempt may succeed.
pub fn is_handshake_failure(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionReset, UnexpectedEof};
    is_denied(error) || matches!(error.kind(), ConnectionReset | UnexpectedEof)
}

/// Whether the process that answered denies that this process belongs to the job.
pub fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: Duration = Duration::from_millis(70);

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A candidate fails.
        Fails(io::ErrorKind),
        /// No path delivers frames any more.
        Cut,
        /// Some path delivers frames again.
        Open,
        BeginRound,
        EndRound,
    }

    /// `has_unrefused`, `is_denied`, refused rounds so far, pause and time to the next attempt in
    /// milliseconds; then the time since when the peer is unreachable. `None`: the peer is given
    /// up.
    type State = Option<((bool, bool, u32, u64, u64), Option<u64>)>;

    /// The current time, in milliseconds.
    const NOW: u64 = 1_000;

    #[test]
    fn a_repair_in_every_state_under_every_event() {
        // The states in order: another path is open; unreachable; unreachable after a failure that
        // was not a refusal; one refusal before the limit; the same number of refusals after a
        // denial; one denial before the limit.
        let (open, cut) = (None, Some(10));
        let states: [State; 6] = [
            Some(((false, false, 0, 40, 0), open)),
            Some(((false, false, 0, 40, 0), cut)),
            Some(((true, false, 2, 40, 0), cut)),
            Some(((false, false, REFUSALS_MAX - 1, 40, 0), cut)),
            Some(((false, true, REFUSALS_MAX - 1, 40, 0), cut)),
            Some(((false, true, DENIALS_MAX - 1, 40, 0), cut)),
        ];
        for (event, expected) in rows(states, cut) {
            for (state, expected) in states.into_iter().zip(expected) {
                assert_eq!(after(state, event), expected, "{state:?} under {event:?}");
            }
        }
    }

    /// Expected state after each event, for each of the states.
    fn rows(states: [State; 6], cut: Option<u64>) -> [(Event, [State; 6]); 9] {
        use Event::{BeginRound, Cut, EndRound, Fails, Open};
        use io::ErrorKind::{
            AddrInUse, ConnectionRefused, ConnectionReset, PermissionDenied, TimedOut,
        };
        let [left, lonely, hopeful, refused, denied, last] = states;
        let with = |state: State, hope, corrupt| {
            state.map(|((h, s, refusals, pause, next), cut)| {
                ((h || hope, s || corrupt, refusals, pause, next), cut)
            })
        };
        let each = |f: &dyn Fn(State) -> State| states.map(f);
        let no_more = |state: State| state.map(|(known, _)| (known, None));
        let fresh = Some(((false, false, 0, 20, 0), Some(NOW)));
        let again = |hope, corrupt, refusals, cut| Some(((hope, corrupt, refusals, 70, 40), cut));
        [
            (Fails(ConnectionRefused), states),
            (Fails(AddrInUse), states),
            (Fails(TimedOut), each(&|state| with(state, true, false))),
            (Fails(ConnectionReset), each(&|state| with(state, true, false))),
            (Fails(PermissionDenied), each(&|state| with(state, false, true))),
            (Cut, [fresh, lonely, hopeful, refused, denied, last]),
            (
                Open,
                [
                    left,
                    no_more(lonely),
                    no_more(hopeful),
                    no_more(refused),
                    no_more(denied),
                    no_more(last),
                ],
            ),
            (
                BeginRound,
                [
                    left,
                    lonely,
                    Some(((false, false, 2, 40, 0), cut)),
                    refused,
                    Some(((false, false, REFUSALS_MAX - 1, 40, 0), cut)),
                    Some(((false, false, DENIALS_MAX - 1, 40, 0), cut)),
                ],
            ),
            (
                EndRound,
                [
                    // Other paths are open, so the refusal does not count.
                    again(false, false, 0, None),
                    again(false, false, 1, cut),
                    again(true, false, 0, cut),
                    None,
                    again(false, true, REFUSALS_MAX, cut),
                    None,
                ],
            ),
        ]
    }

    fn after(state: State, event: Event) -> State {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let ((has_unrefused, is_denied, refusals, pause, next), cut) = state?;
        let pause = Duration::from_millis(pause);
        let (next, cut) = (at(NOW + next), cut.map(at));
        let mut reconnect = Reconnect {
            unreachable_since: cut,
            next,
            pause,
            refusals,
            has_unrefused,
            is_denied,
            has_lost: true,
        };
        match event {
            Event::Fails(kind) => reconnect.note(&kind.into()),
            Event::Cut => {
                reconnect.note_unreachable(true, at(NOW));
            }
            Event::Open => {
                reconnect.note_unreachable(false, at(NOW));
            }
            Event::BeginRound => reconnect.begin_round(),
            Event::EndRound => {
                if reconnect.end_round(PAUSE_MAX, at(NOW)) {
                    return None;
                }
            }
        }
        assert!(reconnect.has_lost, "nobody forgets why");
        let millis = |later: Instant, earlier: Instant| (later - earlier).as_millis() as u64;
        let Reconnect { refusals, has_unrefused, is_denied, .. } = reconnect;
        let pause = reconnect.pause.as_millis() as u64;
        let next = millis(reconnect.next, at(NOW));
        Some((
            (has_unrefused, is_denied, refusals, pause, next),
            reconnect.unreachable_since.map(|cut| millis(cut, start)),
        ))
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let start = Instant::now();
        let mut reconnect = Reconnect::new(true, start);
        let pauses = [0; 5].map(|_| {
            reconnect.begin_round();
            reconnect.note(&io::ErrorKind::TimedOut.into());
            assert!(!reconnect.end_round(PAUSE_MAX, start));
            (reconnect.next - start).as_millis()
        });
        assert_eq!(pauses, [20, 40, 70, 70, 70]);
    }
}
