//! How connections of a hub end: a single one, and all of them when a relay ends.
//!
//! What may never happen: an ended connection of an unauthenticated peer keeps capacity from
//! others, or an ending relay waits for one hub after the other.

use std::cell::RefMut;
use std::time::{Duration, Instant};

use quinn_proto::{ConnectionHandle, EndpointEvent, VarInt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CONNECTIONS_UNVALIDATED_MAX, Hub, QuicEvents, QuicHub};

impl QuicHub {
    /// Ends all connections of these hubs, once everything written has arrived or `time_max` has
    /// passed.
    pub fn shut_down<'a>(hubs: impl IntoIterator<Item = &'a Self>, time_max: Duration) {
        let mut hubs: Vec<_> = hubs.into_iter().map(|hub| hub.0.borrow_mut()).collect();
        let deadline = Instant::now() + time_max;
        hubs.iter_mut().for_each(|hub| hub.finish());
        loop {
            let now = Instant::now();
            for hub in &mut hubs {
                hub.receive(now);
                hub.collect(now);
                hub.transmit(now);
            }
            let is_waiting = hubs.iter_mut().any(|hub| hub.is_waiting());
            if now >= deadline || !is_waiting {
                break;
            }
            let wakes = hubs.iter().filter_map(|hub| match hub.is_busy() {
                true => Some(now),
                false => hub.timers.first().map(|(at, _)| *at),
            });
            let wake = wakes.chain([deadline]).min().unwrap_or(deadline);
            wait_for(&hubs, wake.saturating_duration_since(now));
        }
        for hub in &mut hubs {
            let now = Instant::now();
            (0..hub.connections.len()).for_each(|index| hub.release(index, now));
            hub.transmit(now);
        }
    }
}

impl Hub {
    /// Records that no link holds the connection any more.
    pub(super) fn release(&mut self, index: usize, now: Instant) {
        if let Some(quic) = &mut self.connections[index] {
            quic.is_held = false;
            (quic.token, quic.events) = (None, QuicEvents::default());
            quic.connection.close(now, VarInt::from_u32(0), bytes::Bytes::new());
            self.touch(index);
        }
    }

    /// Forgets a connection that has ended. A connection is kept for a while, so that the other
    /// side can ask for its state. The other side decides how long, because it reports the delay of
    /// its acknowledgements. With more than [`CONNECTIONS_UNVALIDATED_MAX`] connections, a peer
    /// whose certificate has not been checked is notified at most once, and its connection is
    /// forgotten at once.
    pub(super) fn forget_if_over(&mut self, index: usize) {
        let Some(quic) = &self.connections[index] else { return };
        let is_crowded = self.connections_count > CONNECTIONS_UNVALIDATED_MAX;
        let has_sent_close = !quic.is_touched;
        let is_over = quic.is_drained || (is_crowded && !quic.is_connected && has_sent_close);
        if quic.is_held || !is_over {
            return;
        }
        if let Some(at) = quic.timer {
            self.timers.remove(&(at, index));
        }
        self.connections[index] = None;
        self.connections_count -= 1;
        self.endpoint.handle_event(ConnectionHandle(index), EndpointEvent::drained());
    }

    /// Whether a connection has more to send than one turn allows.
    pub(super) fn is_busy(&self) -> bool {
        !self.touched.is_empty() && !self.socket.is_blocked()
    }

    /// Finishes all streams: nothing more will be written.
    fn finish(&mut self) {
        for index in 0..self.connections.len() {
            if let Some(quic) = &mut self.connections[index] {
                quic.finish();
                self.touch(index);
            }
        }
    }

    /// Whether something that was written may still arrive.
    fn is_waiting(&mut self) -> bool {
        self.connections.iter_mut().flatten().any(|quic| quic.is_waiting())
    }
}

/// Waits until a datagram arrives or a blocked socket has space again; at least a millisecond.
fn wait_for(hubs: &[RefMut<'_, Hub>], time: Duration) {
    let time = time.max(Duration::from_millis(1));
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let room =
        |hub: &Hub| if hub.socket.is_blocked() { PollFlags::OUT } else { PollFlags::empty() };
    let fds =
        hubs.iter().map(|hub| PollFd::from_borrowed_fd(hub.socket.fd(), PollFlags::IN | room(hub)));
    let _ = poll(&mut fds.collect::<Vec<_>>(), Some(&time));
}
