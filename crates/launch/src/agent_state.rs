//! The life of an agent, as the process that has started it sees it.
//!
//! | state | it is ready | it ends | it is lost |
//! |---|---|---|---|
//! | Starting | Ready | Failed | Lost |
//! | Ready | Ready | Done | Lost |
//! | Failed | Failed | Failed | Failed |
//! | Done | Done | Done | Done |
//! | Lost | Lost | Lost | Lost |
//!
//! What an agent does that has failed, is done or is lost is of no interest any more: it never
//! becomes ready.

/// State of an agent: see the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentState {
    /// The agent has not reported yet that it and all agents below it are ready.
    Starting,
    Ready,
    /// The agent has ended before it was ready.
    Failed,
    /// The agent has ended, and its processes have, too.
    Done,
    /// The node of the agent counts as lost, and its ranks move to another one.
    Lost,
}

/// Event in the life of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentEvent {
    Ready,
    End,
    Lose,
}

impl AgentState {
    pub fn after(self, event: AgentEvent) -> Self {
        match (self, event) {
            (Self::Starting | Self::Ready, AgentEvent::Ready) => Self::Ready,
            (Self::Starting | Self::Ready, AgentEvent::Lose) => Self::Lost,
            (Self::Starting, AgentEvent::End) => Self::Failed,
            (Self::Ready, AgentEvent::End) => Self::Done,
            (Self::Failed | Self::Done | Self::Lost, _) => self,
        }
    }

    /// Whether it has reported that it is ready, even if it has ended or was lost since.
    pub fn was_ready(self) -> bool {
        matches!(self, Self::Ready | Self::Done | Self::Lost)
    }

    /// Whether nothing more is expected of it.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Failed | Self::Done | Self::Lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AgentState::*;

    /// State, whether it was ready, whether it is over, and the state after each of `EVENTS`.
    const TABLE: [(AgentState, bool, bool, [AgentState; 3]); 5] = [
        (Starting, false, false, [Ready, Failed, Lost]),
        (Ready, true, false, [Ready, Done, Lost]),
        (Failed, false, true, [Failed, Failed, Failed]),
        (Done, true, true, [Done, Done, Done]),
        (Lost, true, true, [Lost, Lost, Lost]),
    ];

    const EVENTS: [AgentEvent; 3] = [AgentEvent::Ready, AgentEvent::End, AgentEvent::Lose];

    #[test]
    fn every_state_of_an_agent_goes_where_the_table_says() {
        for (state, was_ready, is_over, row) in TABLE {
            assert_eq!((state.was_ready(), state.is_over()), (was_ready, is_over), "{state:?}");
            for (event, next) in EVENTS.into_iter().zip(row) {
                assert_eq!(state.after(event), next, "{state:?} after {event:?}");
            }
        }
    }
}
