//! How the replay to one endpoint goes on.
//!
//! | state | segment read | link disconnected |
//! |---|---|---|
//! | Complete | Complete | Complete |
//! | Queued | Queued | Complete |
//! | Direct | Direct | Complete |
//! | AwaitsDisk | Queued | Complete |
//! | Unreadable | Unreadable | Complete |
//!
//! Besides, the message log sets the state ([`ReplayEvent::Continue`]) after each piece of the
//! replay.

/// What the relay does next for an endpoint under replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ReplayState {
    /// More frames follow, through the queue of the port.
    Queued,
    /// More frames follow, which the link writes straight out of the log segments.
    Direct,
    /// More frames follow, and the disk has still to read the next segment.
    AwaitsDisk,
    #[default]
    Complete,
    /// The rest of the log cannot be read. The next piece of the replay ends in an error.
    Unreadable,
}

/// Event of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayEvent {
    /// The log has given out frames, and the replay goes on in this way.
    Continue(ReplayState),
    /// The disk has read a segment of the log.
    SegmentRead,
    /// The incarnation that receives the replay has disconnected, or the log has been discarded.
    Stop,
}

impl ReplayState {
    pub fn after(self, event: ReplayEvent) -> Self {
        match (self, event) {
            (_, ReplayEvent::Continue(next)) => next,
            (Self::AwaitsDisk, ReplayEvent::SegmentRead) => Self::Queued,
            (_, ReplayEvent::SegmentRead) => self,
            (_, ReplayEvent::Stop) => Self::Complete,
        }
    }

    /// Whether the endpoint has still to receive frames from its log.
    #[inline]
    pub fn is_incomplete(self) -> bool {
        self != Self::Complete
    }

    /// Whether the next piece goes into the queue of the port as soon as there is capacity.
    #[inline]
    pub fn takes_pieces(self) -> bool {
        matches!(self, Self::Queued | Self::Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ReplayState::*;

    const STATES: [ReplayState; 5] = [Complete, Queued, Direct, AwaitsDisk, Unreadable];

    /// State; the state after a segment was read; whether the replay is incomplete; whether its
    /// next piece goes into the queue.
    const TABLE: [(ReplayState, ReplayState, bool, bool); 5] = [
        (Complete, Complete, false, false),
        (Queued, Queued, true, true),
        (Direct, Direct, true, false),
        (AwaitsDisk, Queued, true, false),
        (Unreadable, Unreadable, true, true),
    ];

    #[test]
    fn every_state_of_a_replay_goes_where_the_table_says() {
        assert_eq!(TABLE.map(|(state, ..)| state), STATES);
        for (state, read, is_incomplete, takes_pieces) in TABLE {
            assert_eq!(state.after(ReplayEvent::SegmentRead), read, "{state:?}");
            assert_eq!(state.after(ReplayEvent::Stop), Complete, "{state:?}");
            for next in STATES {
                assert_eq!(state.after(ReplayEvent::Continue(next)), next, "{state:?}");
            }
            assert_eq!(state.is_incomplete(), is_incomplete, "{state:?}");
            assert_eq!(state.takes_pieces(), takes_pieces, "{state:?}");
        }
    }
}
