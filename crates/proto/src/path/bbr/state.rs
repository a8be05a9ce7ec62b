//! What BBR does at present and what it does next: the states, their gains, and what leads from one
//! to the other. Nothing here measures anything.

/// The least gain at which the rate doubles in each round: 2 / ln 2.
const STARTUP_PERCENT: u64 = 289;
/// Its inverse: what Startup put into the queue in a round leaves in one.
const DRAIN_PERCENT: u64 = 35;

/// Most rounds of Down, if others keep the queue full or the shortest round trip is no longer true.
/// It must be possible to empty the queue, though, or whoever came first keeps all of the rate.
const DOWN_ROUNDS: u8 = 4;

/// Rounds of Cruise between Down and Up.
const CRUISE_ROUNDS: u8 = 6;

/// Most rounds from one Up to the next.
pub(super) const CYCLE_ROUNDS: usize = 1 + DOWN_ROUNDS as usize + CRUISE_ROUNDS as usize;

/// What is done at present; see the table in [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Looks for the rate, doubling it.
    Startup,
    /// Lets the queue of Startup run empty.
    Drain,
    /// Sends more than the path is known to carry.
    Up,
    /// Sends less, until the queue of Up is gone; counts its rounds.
    Down(u8),
    /// Sends what the path carries; counts its rounds.
    Cruise(u8),
    /// Has little under way, to see the round trip without queue.
    ProbeRtt,
}

/// What decides on the next state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    /// A round trip is over.
    pub is_round: bool,
    /// The rate has stopped to grow.
    pub is_full: bool,
    /// No more is under way than the path holds without queue.
    pub is_drained: bool,
    /// The shortest round trip is too old to be believed.
    pub is_stale: bool,
    /// Little has been under way for long enough.
    pub is_probed: bool,
}

impl State {
    pub(super) fn next(self, facts: Facts) -> State {
        match self {
            State::ProbeRtt if facts.is_probed && facts.is_full => State::Cruise(0),
            State::ProbeRtt if facts.is_probed => State::Startup,
            State::ProbeRtt => State::ProbeRtt,
            _ if facts.is_stale => State::ProbeRtt,
            State::Startup if facts.is_full => State::Drain,
            State::Drain if facts.is_drained => State::Cruise(0),
            State::Up if facts.is_round => State::Down(0),
            State::Down(_) if facts.is_drained => State::Cruise(0),
            State::Down(rounds) if facts.is_round && rounds + 1 >= DOWN_ROUNDS => State::Cruise(0),
            State::Down(rounds) if facts.is_round => State::Down(rounds + 1),
            State::Cruise(rounds) if facts.is_round && rounds + 1 >= CRUISE_ROUNDS => State::Up,
            State::Cruise(rounds) if facts.is_round => State::Cruise(rounds + 1),
            same => same,
        }
    }

    pub(super) fn rate_percent(self) -> u64 {
        match self {
            State::Startup => STARTUP_PERCENT,
            State::Drain => DRAIN_PERCENT,
            State::Up => 125,
            State::Down(_) => 75,
            State::Cruise(_) | State::ProbeRtt => 100,
        }
    }

    pub(super) fn window_percent(self) -> u64 {
        match self {
            State::Startup | State::Drain => STARTUP_PERCENT,
            State::Up | State::Down(_) | State::Cruise(_) | State::ProbeRtt => 200,
        }
    }
}

const _: () = assert!(STARTUP_PERCENT * DRAIN_PERCENT >= 10_000);

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 14] = [
        State::Startup,
        State::Drain,
        State::Up,
        State::Down(0),
        State::Down(1),
        State::Down(2),
        State::Down(3),
        State::Cruise(0),
        State::Cruise(1),
        State::Cruise(2),
        State::Cruise(3),
        State::Cruise(4),
        State::Cruise(5),
        State::ProbeRtt,
    ];

    /// Columns: round over, full, drained, stale, probed; `-` = does not matter. Facts
    /// without a row are stale ones: they lead to ProbeRtt.
    const TABLE: [(State, &str, State); 33] = [
        (State::Startup, "-0-0-", State::Startup),
        (State::Startup, "-1-0-", State::Drain),
        (State::Drain, "--00-", State::Drain),
        (State::Drain, "--10-", State::Cruise(0)),
        (State::Up, "0--0-", State::Up),
        (State::Up, "1--0-", State::Down(0)),
        (State::Down(0), "0-00-", State::Down(0)),
        (State::Down(0), "1-00-", State::Down(1)),
        (State::Down(0), "--10-", State::Cruise(0)),
        (State::Down(1), "0-00-", State::Down(1)),
        (State::Down(1), "1-00-", State::Down(2)),
        (State::Down(1), "--10-", State::Cruise(0)),
        (State::Down(2), "0-00-", State::Down(2)),
        (State::Down(2), "1-00-", State::Down(3)),
        (State::Down(2), "--10-", State::Cruise(0)),
        (State::Down(3), "0-00-", State::Down(3)),
        (State::Down(3), "1-00-", State::Cruise(0)),
        (State::Down(3), "--10-", State::Cruise(0)),
        (State::Cruise(0), "0--0-", State::Cruise(0)),
        (State::Cruise(0), "1--0-", State::Cruise(1)),
        (State::Cruise(1), "0--0-", State::Cruise(1)),
        (State::Cruise(1), "1--0-", State::Cruise(2)),
        (State::Cruise(2), "0--0-", State::Cruise(2)),
        (State::Cruise(2), "1--0-", State::Cruise(3)),
        (State::Cruise(3), "0--0-", State::Cruise(3)),
        (State::Cruise(3), "1--0-", State::Cruise(4)),
        (State::Cruise(4), "0--0-", State::Cruise(4)),
        (State::Cruise(4), "1--0-", State::Cruise(5)),
        (State::Cruise(5), "0--0-", State::Cruise(5)),
        (State::Cruise(5), "1--0-", State::Up),
        (State::ProbeRtt, "----0", State::ProbeRtt),
        (State::ProbeRtt, "-0--1", State::Startup),
        (State::ProbeRtt, "-1--1", State::Cruise(0)),
    ];

    #[test]
    fn every_state_under_all_facts_has_one_row() {
        for state in STATES {
            for bits in 0..32u32 {
                let [is_round, is_full, is_drained, is_stale, is_probed] =
                    core::array::from_fn(|column| bits >> column & 1 == 1);
                let is_row = |row: &&(State, &str, State)| {
                    let mut cells = row.1.bytes().enumerate();
                    let fits = |(column, cell)| {
                        cell == b'-' || u32::from(cell - b'0') == bits >> column & 1
                    };
                    row.0 == state && cells.all(fits)
                };
                let mut rows = TABLE.iter().filter(is_row);
                let stale = (is_stale && state != State::ProbeRtt).then_some(State::ProbeRtt);
                let expected = rows.next().map(|row| row.2).or(stale);
                assert!(rows.next().is_none(), "{state:?} {bits:05b}");
                let facts = Facts { is_round, is_full, is_drained, is_stale, is_probed };
                assert_eq!(Some(state.next(facts)), expected, "{state:?} {facts:?}");
            }
        }
    }
}
