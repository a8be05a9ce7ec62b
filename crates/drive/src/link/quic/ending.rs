//! How connections of a hub end: one alone, and all when a relay ends.
//!
//! What may never happen: a stranger that has gone keeps a place from others, or a relay that ends waits for one hub after
//! the other.

use std::cell::RefMut;
use std::time::{Duration, Instant};

use quinn_proto::{ConnectionHandle, EndpointEvent, VarInt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Hub, LINES_CALM_MAX, News, QuicHub};

impl QuicHub {
    /// Ends all connections of these hubs, after what was written has arrived or `patience` has passed.
    pub fn wind_up<'a>(hubs: impl IntoIterator<Item = &'a Self>, patience: Duration) {
        let mut hubs: Vec<_> = hubs.into_iter().map(|hub| hub.0.borrow_mut()).collect();
        let deadline = Instant::now() + patience;
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
            (0..hub.lines.len()).for_each(|index| hub.release(index, now));
            hub.transmit(now);
        }
    }
}

impl Hub {
    /// Nobody holds the line any more.
    pub(super) fn release(&mut self, index: usize, now: Instant) {
        if let Some(line) = &mut self.lines[index] {
            line.is_held = false;
            (line.token, line.news) = (None, News::default());
            line.connection.close(now, VarInt::from_u32(0), bytes::Bytes::new());
            self.touch(index);
        }
    }

    /// A connection that has ended is kept for a while, for the other side to ask what has become of it. It is the other side
    /// that says how long its confirmations take, and so how long that is: with many of them, strangers whose
    /// certificate has not been seen are told once, if at all.
    pub(super) fn forget_if_over(&mut self, index: usize) {
        let Some(line) = &self.lines[index] else { return };
        let is_crowded = self.lines_count > LINES_CALM_MAX;
        let has_been_told = !line.is_touched;
        let is_over = line.is_drained || (is_crowded && !line.is_connected && has_been_told);
        if line.is_held || !is_over {
            return;
        }
        if let Some(at) = line.timer {
            self.timers.remove(&(at, index));
        }
        self.lines[index] = None;
        self.lines_count -= 1;
        self.endpoint.handle_event(ConnectionHandle(index), EndpointEvent::drained());
    }

    /// Whether somebody has still more to send than one turn allows.
    pub(super) fn is_busy(&self) -> bool {
        !self.touched.is_empty() && !self.socket.is_blocked()
    }

    /// Nothing more will be written.
    fn finish(&mut self) {
        for index in 0..self.lines.len() {
            if let Some(line) = &mut self.lines[index] {
                line.finish();
                self.touch(index);
            }
        }
    }

    /// Whether something that was written may still arrive.
    fn is_waiting(&mut self) -> bool {
        self.lines.iter_mut().flatten().any(|line| line.is_waiting())
    }
}

/// Until a datagram comes, or there is room again; at least a millisecond.
fn wait_for(hubs: &[RefMut<'_, Hub>], time: Duration) {
    let time = time.max(Duration::from_millis(1));
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let room =
        |hub: &Hub| if hub.socket.is_blocked() { PollFlags::OUT } else { PollFlags::empty() };
    let fds =
        hubs.iter().map(|hub| PollFd::from_borrowed_fd(hub.socket.fd(), PollFlags::IN | room(hub)));
    let _ = poll(&mut fds.collect::<Vec<_>>(), Some(&time));
}
