//! The states of BBR, their gains, and the transitions between them. Nothing here measures
//! anything.

/// The smallest gain at which the rate doubles in each round, in percent: 2 / ln 2.
const STARTUP_PERCENT: u64 = 289;
/// The inverse of the Startup gain, in percent: the queue that Startup built in a round empties in
/// one round.
const DRAIN_PERCENT: u64 = 35;

/// The most rounds of Down, if others keep the queue full or the shortest round trip is no longer
/// true. Down must last long enough to empty the queue, or the first flow on a path keeps all of
/// the rate.
const DOWN_ROUNDS: u8 = 4;

/// The rounds of Cruise between Down and Up.
const CRUISE_ROUNDS: u8 = 6;

/// The most rounds from one Up to the next.
pub(super) const CYCLE_ROUNDS: usize = 1 + DOWN_ROUNDS as usize + CRUISE_ROUNDS as usize;

/// The state of BBR; see the table in [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BbrState {
    /// Searches for the rate by doubling it.
    Startup,
    /// Empties the queue of Startup.
    Drain,
    /// Sends more than the measured rate.
    Up,
    /// Sends less than the measured rate, until the queue of Up is empty; counts its rounds.
    Down(u8),
    /// Sends at the measured rate; counts its rounds.
    Cruise(u8),
    /// Keeps little in flight, to measure the round trip without queue.
    ProbeRtt,
}

/// The inputs that decide the next state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransitionInputs {
    /// A round trip is over.
    pub is_round: bool,
    /// The rate has stopped growing.
    pub is_full: bool,
    /// No more is in flight than the path holds without queue.
    pub is_drained: bool,
    /// The shortest round trip is too old to be valid.
    pub is_stale: bool,
    /// Little has been in flight for long enough.
    pub is_probed: bool,
}

impl BbrState {
    pub(super) fn next(self, inputs: TransitionInputs) -> BbrState {
        match self {
            BbrState::ProbeRtt if inputs.is_probed && inputs.is_full => BbrState::Cruise(0),
            BbrState::ProbeRtt if inputs.is_probed => BbrState::Startup,
            BbrState::ProbeRtt => BbrState::ProbeRtt,
            _ if inputs.is_stale => BbrState::ProbeRtt,
            BbrState::Startup if inputs.is_full => BbrState::Drain,
            BbrState::Drain if inputs.is_drained => BbrState::Cruise(0),
            BbrState::Up if inputs.is_round => BbrState::Down(0),
            BbrState::Down(_) if inputs.is_drained => BbrState::Cruise(0),
            BbrState::Down(rounds) if inputs.is_round && rounds + 1 >= DOWN_ROUNDS => {
                BbrState::Cruise(0)
            }
            BbrState::Down(rounds) if inputs.is_round => BbrState::Down(rounds + 1),
            BbrState::Cruise(rounds) if inputs.is_round && rounds + 1 >= CRUISE_ROUNDS => {
                BbrState::Up
            }
            BbrState::Cruise(rounds) if inputs.is_round => BbrState::Cruise(rounds + 1),
            same => same,
        }
    }

    pub(super) fn rate_percent(self) -> u64 {
        match self {
            BbrState::Startup => STARTUP_PERCENT,
            BbrState::Drain => DRAIN_PERCENT,
            BbrState::Up => 125,
            BbrState::Down(_) => 75,
            BbrState::Cruise(_) | BbrState::ProbeRtt => 100,
        }
    }

    pub(super) fn window_percent(self) -> u64 {
        match self {
            BbrState::Startup | BbrState::Drain => STARTUP_PERCENT,
            BbrState::Up | BbrState::Down(_) | BbrState::Cruise(_) | BbrState::ProbeRtt => 200,
        }
    }
}

const _: () = assert!(STARTUP_PERCENT * DRAIN_PERCENT >= 10_000);

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [BbrState; 14] = [
        BbrState::Startup,
        BbrState::Drain,
        BbrState::Up,
        BbrState::Down(0),
        BbrState::Down(1),
        BbrState::Down(2),
        BbrState::Down(3),
        BbrState::Cruise(0),
        BbrState::Cruise(1),
        BbrState::Cruise(2),
        BbrState::Cruise(3),
        BbrState::Cruise(4),
        BbrState::Cruise(5),
        BbrState::ProbeRtt,
    ];

    /// Columns: round over, full, drained, stale, probed; `-` = does not matter. TransitionInputs
    /// without a row are stale ones: they lead to ProbeRtt.
    const TABLE: [(BbrState, &str, BbrState); 33] = [
        (BbrState::Startup, "-0-0-", BbrState::Startup),
        (BbrState::Startup, "-1-0-", BbrState::Drain),
        (BbrState::Drain, "--00-", BbrState::Drain),
        (BbrState::Drain, "--10-", BbrState::Cruise(0)),
        (BbrState::Up, "0--0-", BbrState::Up),
        (BbrState::Up, "1--0-", BbrState::Down(0)),
        (BbrState::Down(0), "0-00-", BbrState::Down(0)),
        (BbrState::Down(0), "1-00-", BbrState::Down(1)),
        (BbrState::Down(0), "--10-", BbrState::Cruise(0)),
        (BbrState::Down(1), "0-00-", BbrState::Down(1)),
        (BbrState::Down(1), "1-00-", BbrState::Down(2)),
        (BbrState::Down(1), "--10-", BbrState::Cruise(0)),
        (BbrState::Down(2), "0-00-", BbrState::Down(2)),
        (BbrState::Down(2), "1-00-", BbrState::Down(3)),
        (BbrState::Down(2), "--10-", BbrState::Cruise(0)),
        (BbrState::Down(3), "0-00-", BbrState::Down(3)),
        (BbrState::Down(3), "1-00-", BbrState::Cruise(0)),
        (BbrState::Down(3), "--10-", BbrState::Cruise(0)),
        (BbrState::Cruise(0), "0--0-", BbrState::Cruise(0)),
        (BbrState::Cruise(0), "1--0-", BbrState::Cruise(1)),
        (BbrState::Cruise(1), "0--0-", BbrState::Cruise(1)),
        (BbrState::Cruise(1), "1--0-", BbrState::Cruise(2)),
        (BbrState::Cruise(2), "0--0-", BbrState::Cruise(2)),
        (BbrState::Cruise(2), "1--0-", BbrState::Cruise(3)),
        (BbrState::Cruise(3), "0--0-", BbrState::Cruise(3)),
        (BbrState::Cruise(3), "1--0-", BbrState::Cruise(4)),
        (BbrState::Cruise(4), "0--0-", BbrState::Cruise(4)),
        (BbrState::Cruise(4), "1--0-", BbrState::Cruise(5)),
        (BbrState::Cruise(5), "0--0-", BbrState::Cruise(5)),
        (BbrState::Cruise(5), "1--0-", BbrState::Up),
        (BbrState::ProbeRtt, "----0", BbrState::ProbeRtt),
        (BbrState::ProbeRtt, "-0--1", BbrState::Startup),
        (BbrState::ProbeRtt, "-1--1", BbrState::Cruise(0)),
    ];

    #[test]
    fn every_state_under_all_facts_has_one_row() {
        for state in STATES {
            for bits in 0..32u32 {
                let [is_round, is_full, is_drained, is_stale, is_probed] =
                    core::array::from_fn(|column| bits >> column & 1 == 1);
                let is_row = |row: &&(BbrState, &str, BbrState)| {
                    let mut cells = row.1.bytes().enumerate();
                    let fits = |(column, cell)| {
                        cell == b'-' || u32::from(cell - b'0') == bits >> column & 1
                    };
                    row.0 == state && cells.all(fits)
                };
                let mut rows = TABLE.iter().filter(is_row);
                let stale = (is_stale && state != BbrState::ProbeRtt).then_some(BbrState::ProbeRtt);
                let expected = rows.next().map(|row| row.2).or(stale);
                assert!(rows.next().is_none(), "{state:?} {bits:05b}");
                let inputs =
                    TransitionInputs { is_round, is_full, is_drained, is_stale, is_probed };
                assert_eq!(Some(state.next(inputs)), expected, "{state:?} {inputs:?}");
            }
        }
    }
}
