//! Polling, spinning and parking of one engine.
//!
//! A poll looks at every ring, and asks epoll for kernel events as often as this pays. The thread's
//! [`PollPolicy`] advises what to do after a poll without result. This module contains how an
//! engine *parks*: the engine announces in its rings that its thread will sleep, and withdraws the
//! announcement afterwards. The sleep itself is in `parking`, where a thread sleeps in all engines
//! that it drives.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventFlags};

use crate::cpu_placement;
use crate::log;
use crate::poll_policy::{Advice, PollContext, PollPolicy};
use crate::statistics_page::StatisticsSlot;
use crate::sync::Sleep;
use crate::tick_clock::Clock;

use super::Engine;
use super::carrier::Carrier;
use super::data_path::DataPath;
use super::event_token::EventToken;
use super::identity::Identity;
use super::recording::Recording;

/// Polls that are no further apart than this come from a loop that does nothing else. MPICH yields
/// the processor between its polls, a system call that takes longer than many looks at a ring.
const TIGHT_GAP_MICROS: u64 = 2;
/// Time that one poll in such a tight loop keeps looking.
const LOOP_SPIN_MICROS: u64 = 2;
/// A look that took longer than this was preempted: another thread wants the processor.
const PREEMPTED_MICROS: u64 = 200;
/// Time during which the processor counts as shared after a preemption.
const OVERSUBSCRIBED_MICROS: u64 = 50_000;
/// Longest sleep of one poll: other work of the MPI library's loop is delayed by at most this time.
pub const PARK_MILLIS: i32 = 1;
/// Number of polls between two epoll calls while the endpoint uses rings only.
const POLLS_PER_EPOLL: u32 = 256;
/// Longest time between two epoll calls: a connection may be pending for a program that polls
/// rarely.
const EPOLL_GAP_MICROS: u64 = 1_000;
/// Number of polls between two epoll calls while one stream is read directly.
const POLLS_PER_EPOLL_HOT: u32 = 16;
/// Time between two checks of hellos for a timeout.
const HELLO_GAP: Duration = Duration::from_millis(100);
/// Events taken from epoll by one call.
const EVENTS: usize = 64;
/// Token of the eventfd that wakes sleeping threads. The event only ends a sleep; no data has
/// arrived.
const NO_LINK: usize = u32::MAX as usize;

/// Time until which the processors of this process count as shared, in ticks of the clock.
static OVERSUBSCRIBED_UNTIL: AtomicU64 = AtomicU64::new(0);

/// State of an engine's polls: when the engine looked last, and at which links.
pub struct PollState {
    pub(super) clock: Clock,
    /// Every process of the node has a processor of its own, as far as is known.
    has_room: bool,
    /// The thread may wait for a message that the MPI library carries; see [`Identity`].
    library_carries_local: bool,
    /// Epoll watches the eventfd that wakes sleeping threads.
    is_wakeup_watched: bool,
    /// Token of the thread that polled last; 0 before the first poll.
    driver: usize,
    /// The program has done something other than polling since the last poll: it has posted an
    /// operation, or has read a counter while no one-sided operation was in flight.
    has_posted: bool,
    /// The last poll was of a program that waits for nothing, so the next poll returns at once.
    returns_at_once: bool,
    /// The thread has slept or yielded since the last poll, so the next poll measures itself.
    has_rested: bool,
    /// The last event of the thread came through this engine, so another look may pay.
    is_most_recent: bool,
    last_poll: u64,
    /// Time of the last epoll call, in ticks of the clock.
    last_epoll: u64,
    polls: u32,
    hellos_checked: Instant,
}

impl PollState {
    pub fn new(identity: &Identity) -> Self {
        let processes = identity.node_sharing.processes.unwrap_or(identity.size);
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let clock = Clock::get();
        Self {
            clock,
            has_room: processes <= processors,
            library_carries_local: identity.node_sharing.library_carries_local,
            is_wakeup_watched: false,
            driver: 0,
            has_posted: false,
            returns_at_once: false,
            has_rested: false,
            is_most_recent: true,
            last_poll: 0,
            last_epoll: 0,
            polls: 0,
            hellos_checked: Instant::now(),
        }
    }

    /// The time for the protocol.
    pub fn time(&self) -> Time {
        Time(self.clock.nanos())
    }

    /// Says the time to the protocol, where it matters.
    #[inline]
    pub(super) fn note_time(&self, data: &mut DataPath) {
        if data.peers.has_several || data.core.schedule().needs_time() {
            data.core.set_time(self.time());
        }
    }

    /// Whether no other thread wants this processor, as far as is known.
    #[inline]
    fn has_own_processor(&self) -> bool {
        self.has_room && self.clock.now() >= OVERSUBSCRIBED_UNTIL.load(Ordering::Relaxed)
    }

    /// Whether a poll without result looks again before it returns. Where the library carries
    /// messages too, the library looks for them next.
    #[inline]
    fn looks_again(&self) -> bool {
        !self.library_carries_local && self.has_own_processor()
    }

    /// Whether the last epoll call is longer ago than [`EPOLL_GAP_MICROS`].
    #[inline]
    pub(super) fn is_epoll_overdue(&self, now: u64) -> bool {
        now > self.last_epoll + EPOLL_GAP_MICROS * self.clock.ticks_per_micro
    }

    /// Records that the program has posted an operation.
    #[inline]
    pub fn note_posted(&mut self) {
        self.has_posted = true;
    }

    /// When this poll began, if the thread has rested before.
    #[inline]
    fn begin_measured(&mut self) -> Option<u64> {
        std::mem::take(&mut self.has_rested).then(|| self.clock.now())
    }

    /// The load at the end of a poll that began at `begin`.
    #[inline]
    fn poll_context(&mut self, waits_for_relay: bool, begin: Option<u64>) -> PollContext {
        PollContext {
            has_own_processor: self.has_own_processor(),
            waits_for_relay,
            library_carries_local: self.library_carries_local,
            has_posted: std::mem::take(&mut self.has_posted),
            poll_ticks: begin.map_or(0, |begin| self.last_poll.wrapping_sub(begin)),
        }
    }

    /// Moves this thread, which shares its processor, to another processor if there are enough.
    #[cold]
    fn move_to_own_cpu(&self, placement_index: Option<u32>) {
        if let (true, Some(index)) = (self.has_room, placement_index)
            && cpu_placement::move_thread_to(index)
        {
            log!(Debug, "moved to a processor of its own");
        }
    }

    /// Adds the eventfd that wakes sleeping threads to the engine's epoll set.
    fn watch_wakeup(&mut self, epoll: &OwnedFd) {
        if !self.is_wakeup_watched
            && let Some(wakeup_fd) = Sleep::wakeup_fd()
        {
            let data = epoll::EventData::new_u64(EventToken::Link(NO_LINK).number());
            let flags = EventFlags::IN | EventFlags::ET;
            self.is_wakeup_watched = epoll::add(epoll, wakeup_fd, data, flags).is_ok();
        }
    }

    /// Records that another process preempted a spin of this thread.
    #[cold]
    fn note_oversubscribed(&self) {
        let until = self.clock.now() + OVERSUBSCRIBED_MICROS * self.clock.ticks_per_micro;
        OVERSUBSCRIBED_UNTIL.store(until, Ordering::Relaxed);
    }
}

impl Engine {
    /// Does all work that is possible now. Returns what the calling thread should do before it
    /// polls again: a loop that waits for long should yield the processor to the process that it
    /// waits for.
    #[inline]
    pub fn progress(&mut self) -> Advice {
        if self.is_recorded() {
            return self.progress_recorded();
        }
        let begin = self.poll_state.begin_measured();
        self.connections.data.core.flush_deferred_acks();
        self.poll_state.note_time(&mut self.connections.data);
        let returns_at_once = std::mem::take(&mut self.poll_state.returns_at_once);
        let mut events = self.poll_once();
        if events == 0 && !returns_at_once && self.poll_state.looks_again() {
            events = self.spin_once_more();
        }
        let now = self.poll_state.clock.now();
        self.poll_state.last_poll = now;
        events += self.poll_epoll_if_due(now);
        let around = self.poll_state.poll_context(self.connections.uplink.is_up(), begin);
        let me = self.connections.data.own.epoll.as_raw_fd();
        let advised = PollPolicy::of_this_thread(|policy| {
            self.poll_state.driver = policy.token();
            if events > 0 {
                policy.note_event(now, me);
                self.poll_state.is_most_recent = true;
                return (Advice::GoOn, policy.should_move());
            }
            self.poll_state.is_most_recent = policy.is_most_recent(me);
            (policy.note_nothing(now, around), policy.should_move())
        });
        let (advice, should_move) = advised.unwrap_or((Advice::GoOn, false));
        if should_move {
            self.poll_state
                .move_to_own_cpu(self.connections.data.identity.node_sharing.placement_index);
        }
        advice
    }

    /// Does all work that is possible for a program that reads a counter of one-sided operations.
    /// Returns false while such an operation is in flight: the program may wait for this operation,
    /// and the caller must use [`Self::progress`] instead. MPICH reads its counter whenever it
    /// completes the operations on a window, also operations on the process's own part of the
    /// window, which MPICH does not pass to the provider.
    pub fn progress_for_counter(&mut self) -> bool {
        if self.connections.data.application.one_sided > 0 {
            return false;
        }
        if self.is_recorded() {
            self.poll_recorded();
        } else {
            self.poll_state.note_time(&mut self.connections.data);
            self.poll();
        }
        (self.poll_state.has_posted, self.poll_state.returns_at_once) = (true, true);
        true
    }

    #[cold]
    fn progress_recorded(&mut self) -> Advice {
        let begin = self.poll_state.begin_measured();
        let events = self.poll_recorded();
        let now = self.poll_state.clock.now();
        self.poll_state.last_poll = now;
        if self.connections.data.recording.as_ref().is_some_and(Recording::is_replaying) {
            // The polls that deliver something have waited for it; the others found nothing before.
            return Advice::GoOn;
        }
        // Logs of the node need no relay: what is awaited is there as soon as its sender has run.
        let waits_for_relay = !self.connections.data.identity.has_node_logs();
        let around = self.poll_state.poll_context(waits_for_relay, begin);
        let me = self.connections.data.own.epoll.as_raw_fd();
        let advice = PollPolicy::of_this_thread(|policy| {
            self.poll_state.driver = policy.token();
            if events > 0 {
                policy.note_event(now, me);
                return Advice::GoOn;
            }
            policy.note_nothing(now, around)
        });
        advice.unwrap_or(Advice::GoOn)
    }

    /// Looks for a few microseconds more before the poll returns without result, in a tight loop of
    /// a program that has a processor of its own.
    #[inline]
    fn spin_once_more(&mut self) -> usize {
        let clock = self.poll_state.clock;
        let start = clock.now();
        if clock.micros(start.wrapping_sub(self.poll_state.last_poll)) > TIGHT_GAP_MICROS
            || !self.poll_state.is_most_recent
            || self.connections.uplink.is_up()
        {
            return 0;
        }
        loop {
            for _ in 0..4 {
                std::hint::spin_loop();
                let events = self.poll_once();
                if events > 0 {
                    return events;
                }
            }
            let looked = clock.micros(clock.now().wrapping_sub(start));
            if looked >= LOOP_SPIN_MICROS {
                if looked > PREEMPTED_MICROS {
                    self.poll_state.note_oversubscribed();
                }
                return 0;
            }
        }
    }

    /// As [`Self::spin_once_more`], for a recorded process whose messages lie in logs of its node:
    /// whether a frame arrives on link `id` meanwhile. What a poll of such a process finds is its
    /// delivery, however long the poll has looked. Frames of other nodes come by the transport, so
    /// a process that waits for one returns at once, and polls the transport again.
    pub(super) fn spin_for_frame(&mut self, id: usize) -> bool {
        let clock = self.poll_state.clock;
        let start = clock.now();
        if clock.micros(start.wrapping_sub(self.poll_state.last_poll)) > TIGHT_GAP_MICROS
            || std::mem::take(&mut self.poll_state.returns_at_once)
            || !self.poll_state.looks_again()
            || !self.connections.data.identity.has_node_logs()
            || self.connections.data.links.awaits_other_node(id)
        {
            return false;
        }
        loop {
            for _ in 0..16 {
                std::hint::spin_loop();
                if self.connections.data.links.has_frame(id) {
                    return true;
                }
            }
            let looked = clock.micros(clock.now().wrapping_sub(start));
            if looked >= LOOP_SPIN_MICROS {
                if looked > PREEMPTED_MICROS {
                    self.poll_state.note_oversubscribed();
                }
                return false;
            }
        }
    }

    /// Receives what has arrived; returns the number of events handled. A recorded process receives
    /// nothing here.
    pub fn poll(&mut self) -> usize {
        if self.is_recorded() {
            self.connections.flush();
            self.other_nodes.progress(&mut self.connections);
            return 0;
        }
        self.connections.data.core.flush_deferred_acks();
        self.poll_once() + self.poll_epoll_if_due(self.poll_state.clock.now())
    }

    /// Calls epoll if the last call is too long ago, whatever the number of polls since.
    #[inline]
    fn poll_epoll_if_due(&mut self, now: u64) -> usize {
        if !self.poll_state.is_epoll_overdue(now) {
            return 0;
        }
        let events = self.poll_epoll(0);
        self.connections.flush();
        events
    }

    #[inline]
    fn poll_once(&mut self) -> usize {
        if self.is_recorded() {
            self.connections.flush();
            return 0;
        }
        let mut events = 0;
        if self.connections.data.core.schedule().needs_time() {
            self.connections.data.handle_time();
        }
        for index in 0..self.connections.data.links.rings.len() {
            if let Some(&id) = self.connections.data.links.rings.get(index) {
                events += self.connections.poll_ring(id);
            }
        }
        self.poll_state.polls = self.poll_state.polls.wrapping_add(1);
        if let Some(id) = self.connections.data.links.hot_stream {
            events += self.connections.read_stream(id);
        }
        let every =
            match (self.connections.data.links.streams, self.connections.data.links.hot_stream) {
                (0, _) => POLLS_PER_EPOLL,
                (_, Some(_)) => POLLS_PER_EPOLL_HOT,
                _ => 1,
            };
        if self.connections.connector.is_busy() || self.poll_state.polls.is_multiple_of(every) {
            events += self.poll_epoll(0);
        }
        if self.connections.data.links.full_rings.is_empty() {
            self.connections.flush();
            return events;
        }
        let written = self.connections.data.links.written_to_rings();
        self.connections.data.links.retry_full_rings(&mut self.connections.data.core);
        self.connections.flush();
        // A sent frame is as good a reason to go on as a received frame.
        events + usize::from(self.connections.data.links.written_to_rings() != written)
    }

    /// Handles the kernel's events, and waits up to `nanos` nanoseconds for the first of them.
    pub fn poll_epoll(&mut self, nanos: u64) -> usize {
        let timeout = timespec(nanos);
        let empty = epoll::Event { flags: EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut buffer = [empty; EVENTS];
        let result = epoll::wait(&self.connections.data.own.epoll, &mut buffer[..], Some(&timeout));
        self.poll_state.last_epoll = self.poll_state.clock.now();
        let Ok(count) = result else { return 0 };
        let mut wakeups = 0;
        for event in &buffer[..count] {
            let (flags, data) = (event.flags, event.data);
            match EventToken::of(data.u64()) {
                EventToken::Link(NO_LINK) => wakeups += 1,
                token => self.handle_event(token, flags),
            }
        }
        if (self.connections.connector.is_busy()
            || self.connections.connector.has_unlogged_refusals())
            && self.poll_state.hellos_checked.elapsed() > HELLO_GAP
        {
            self.poll_state.hellos_checked = Instant::now();
            self.connections.check_hellos();
        }
        if !self.connections.data.peers.reconnects.is_empty()
            || self.connections.uplink.is_reconnecting()
        {
            self.connections.check_reconnects();
            self.connections.check_relay();
        }
        self.connections.check_liveness();
        if self
            .connections
            .data
            .links
            .statistics_slot
            .as_ref()
            .is_some_and(StatisticsSlot::is_requested)
        {
            let text = self.connections.data.path_report().page_text();
            if let Some(slot) = &mut self.connections.data.links.statistics_slot {
                slot.write(&text);
            }
        }
        self.receives
            .departed
            .check(&self.connections.data.core, self.connections.data.own.address);
        if self.connections.data.peers.rails.has_waiting() {
            self.connections.check_rails();
        }
        count - wakeups
    }

    fn handle_event(&mut self, token: EventToken, flags: EventFlags) {
        match token {
            EventToken::Listener => self.connections.accept_pending(false),
            EventToken::UnixListener => self.connections.accept_pending(true),
            EventToken::Hello(id) => self.connections.handle_hello(id),
            EventToken::Link(id) => self.handle_link_event(id, flags),
            EventToken::Datagrams(socket) => {
                self.connections.handle_datagram_event(socket, flags);
            }
            // Each poll polls the transport.
            EventToken::Transport => (),
        }
    }

    fn handle_link_event(&mut self, id: usize, flags: EventFlags) {
        let Some(link) = self.connections.data.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        if let Carrier::Shm(ring) = &mut link.carrier {
            if !ring.drain_doorbell() {
                // A recorded process receives frames at polls only.
                while !self.is_recorded() && self.connections.poll_ring(id) > 0 {}
                self.connections.link_down(id, &std::io::ErrorKind::UnexpectedEof.into());
            }
            return;
        }
        if let Carrier::Logs(logs) = &mut link.carrier {
            return logs.drain_doorbell();
        }
        if let Carrier::Recorded(_) = &link.carrier {
            // Received bytes wait for the next poll. The end of the connection is handled here,
            // since no other code sees it while replay is under way.
            if flags.intersects(EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP) {
                self.connections.link_down(id, &std::io::ErrorKind::UnexpectedEof.into());
            }
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.connections.handle_writable(id);
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR)
            && self.connections.read_stream(id) > 0
        {
            let poll_state = &self.poll_state;
            self.connections
                .data
                .links
                .note_read(&self.connections.data.own.epoll, id, || poll_state.has_own_processor());
        }
    }
}

impl DataPath {
    /// Runs protocol timers that are due.
    #[inline]
    pub(super) fn handle_time(&mut self) {
        let now = Time(self.clock.nanos());
        self.core.set_time(now);
        self.do_what_is_due(now);
    }

    /// Runs protocol timers that are due at `now`.
    #[inline]
    pub(super) fn do_what_is_due(&mut self, now: Time) {
        if self.core.schedule().next_wake().is_some_and(|at| at <= now) {
            self.core.handle_time(now);
            self.drain_actions();
        }
    }
}

impl Engine {
    /// Sleeps until something arrives for this engine, a full ring has free space, or another
    /// thread wants the engine, for at most `millis` milliseconds. Returns the number of events
    /// handled after the sleep.
    pub fn park(&mut self, millis: i32) -> usize {
        let mut events = 0;
        if self.prepare_park() {
            self.poll_state.watch_wakeup(&self.connections.data.own.epoll);
            if let Some(_sleep) = Sleep::begin() {
                events = self.poll_epoll(self.nap_nanos(millis));
            }
        }
        self.unpark();
        events + self.poll_once()
    }

    /// Records that the thread has followed the advice; a sleep that brought `events` counts as a
    /// poll.
    pub fn note_advice_taken(&mut self, advice: Advice, events: usize) {
        let (now, me) = (self.poll_state.clock.now(), self.connections.data.own.epoll.as_raw_fd());
        self.poll_state.has_rested = true;
        PollPolicy::of_this_thread(|policy| {
            policy.note_advice_taken(advice, now);
            if events > 0 {
                policy.note_event(now, me);
            }
        });
    }

    /// Nanoseconds until a timer of this engine is due, at most `millis` milliseconds.
    pub fn nap_nanos(&self, millis: i32) -> u64 {
        let most = millis as u64 * MILLISECOND;
        let most = self.other_nodes.nap_nanos(millis).unwrap_or(most);
        let Some(wake) = self.connections.data.core.schedule().next_wake() else { return most };
        let real = self.poll_state.time();
        let now =
            self.connections.data.recording.as_ref().map_or(real, |replay| replay.caught_up(real));
        wake.nanos_since(now).min(most)
    }

    /// Announces in every ring that the thread will sleep until the engine's descriptor is
    /// readable. Returns false if there is work already. In both cases [`Self::unpark`] must
    /// follow.
    pub fn prepare_park(&mut self) -> bool {
        self.connections.data.links.clear_hot_stream(&self.connections.data.own.epoll);
        self.other_nodes.engine().is_none_or(Engine::prepare_park)
            && self.connections.data.links.prepare_park()
    }

    /// Withdraws the announcement of [`Self::prepare_park`].
    pub fn unpark(&mut self) {
        self.connections.data.links.unpark();
        self.other_nodes.engine().into_iter().for_each(Engine::unpark);
    }

    /// Whether no thread other than the thread with this token drives the engine.
    pub fn is_driven_by(&self, token: usize) -> bool {
        self.poll_state.driver == token || self.poll_state.driver == 0
    }

    /// The descriptor that becomes readable when a parked engine has work.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.connections.data.own.epoll.as_fd()
    }
}

/// A time span as the kernel takes it.
pub fn timespec(nanos: u64) -> Timespec {
    Timespec { tv_sec: (nanos / SECOND) as i64, tv_nsec: (nanos % SECOND) as i64 }
}
