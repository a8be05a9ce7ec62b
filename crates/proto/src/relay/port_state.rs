//! The life of a port: whether its other side is connected, and what its frames may do.
//!
//! | state | connect | begin drain | retire | disconnect | give up |
//! |---|---|---|---|---|---|
//! | Up | Up | Draining | Retired | Disconnected | Abandoned |
//! | Draining | Up | Draining | Draining | Disconnected | Abandoned |
//! | Retired | Up | Retired | Retired | Disconnected | Abandoned |
//! | Disconnected | Up | Disconnected | Disconnected | Disconnected | Abandoned |
//! | Abandoned | Up | Abandoned | Abandoned | Disconnected | Abandoned |
//!
//! Endpoints are never retired, and streams never drain. The port of a peer relay is connected as
//! long as one of its streams is.

/// State of a port: see the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortState {
    Up,
    /// Up, and the frames of this input pass full outputs: see [`super::Relay::begin_drain`].
    Draining,
    /// Up, and another stream has replaced this stream: it finishes the frame that it has begun,
    /// and takes no further frame.
    Retired,
    /// Not connected since `since` (in milliseconds); some time later the relay gives up the frames
    /// that wait here.
    Disconnected {
        since: u64,
    },
    /// Given up: no frame may wait here.
    Abandoned,
}

/// Event in the life of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortEvent {
    Connect,
    BeginDrain,
    Retire,
    /// The other side has disconnected at this time, in milliseconds.
    Disconnect(u64),
    GiveUp,
}

impl PortState {
    pub fn after(self, event: PortEvent) -> Self {
        match (self, event) {
            (_, PortEvent::Connect) => Self::Up,
            (_, PortEvent::Disconnect(since)) => Self::Disconnected { since },
            (_, PortEvent::GiveUp) => Self::Abandoned,
            (Self::Up, PortEvent::BeginDrain) => Self::Draining,
            (Self::Up, PortEvent::Retire) => Self::Retired,
            (_, PortEvent::BeginDrain | PortEvent::Retire) => self,
        }
    }

    /// Whether the other side is connected.
    #[inline]
    pub fn is_up(self) -> bool {
        matches!(self, Self::Up | Self::Draining | Self::Retired)
    }

    #[inline]
    pub fn is_disconnected(self) -> bool {
        matches!(self, Self::Disconnected { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PortState::*;

    const OLD: PortState = Disconnected { since: 3 };
    const NEW: PortState = Disconnected { since: 7 };

    /// State, whether it counts as connected, and the state after each event of `EVENTS`.
    const TABLE: [(PortState, bool, [PortState; 5]); 5] = [
        (Up, true, [Up, Draining, Retired, NEW, Abandoned]),
        (Draining, true, [Up, Draining, Draining, NEW, Abandoned]),
        (Retired, true, [Up, Retired, Retired, NEW, Abandoned]),
        (OLD, false, [Up, OLD, OLD, NEW, Abandoned]),
        (Abandoned, false, [Up, Abandoned, Abandoned, NEW, Abandoned]),
    ];

    const EVENTS: [PortEvent; 5] = [
        PortEvent::Connect,
        PortEvent::BeginDrain,
        PortEvent::Retire,
        PortEvent::Disconnect(7),
        PortEvent::GiveUp,
    ];

    #[test]
    fn every_state_of_a_port_goes_where_the_table_says() {
        for (state, is_up, row) in TABLE {
            assert_eq!(state.is_up(), is_up, "{state:?}");
            assert_eq!(state.is_disconnected(), state == OLD, "{state:?}");
            for (event, next) in EVENTS.into_iter().zip(row) {
                assert_eq!(state.after(event), next, "{state:?} after {event:?}");
            }
        }
    }
}
