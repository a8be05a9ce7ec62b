//! Polling, spinning, parking.
//!
//! Libraries poll in a loop until something comes. As long as that may be soon, polling is answered at once; when
//! a loop has gone on without result for longer than a message takes, the processor is better given to whoever
//! will send it. Then a poll *parks*: it sleeps in the kernel, for a bounded time, until a frame,
//! a bell or a connection arrives.
//!
//! A program that computes between polls must never be put to sleep: only polls that follow each other without a gap
//! make a streak, and only a long streak parks.

use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};

use super::Engine;
use super::handshake::Carrier;
use super::peers::Token;

/// Polls further apart than this do not belong to one waiting loop.
const GAP: Duration = Duration::from_micros(20);
/// How long a poll may sleep: other work of the MPI library's own loop is delayed at most so long.
const PARK_MILLIS: i32 = 1;
/// Looks at the kernel's events happen every so many polls while only rings are in use.
const POLLS_PER_LOOK_RINGS: u32 = 256;
/// And while streams are.
const POLLS_PER_LOOK_STREAMS: u32 = 4;
/// Events taken from the kernel at once.
const EVENTS: usize = 64;

/// How a waiting loop is treated.
pub struct Idle {
    /// A streak shorter than this spins.
    spin: Duration,
    /// After that, the processor is yielded until the streak is this long; then the poll parks.
    yield_until: Duration,
    streak_since: Option<Instant>,
    last_poll: Instant,
    polls: u32,
    hellos_checked: Instant,
}

impl Idle {
    /// For a node on which `processes` share the processors.
    pub fn new(processes: u32) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let (spin, yield_until) = if processes <= processors {
            (Duration::from_millis(2), Duration::from_millis(2))
        } else {
            (Duration::from_micros(2), Duration::from_micros(50))
        };
        let now = Instant::now();
        Self {
            spin,
            yield_until,
            streak_since: None,
            last_poll: now,
            polls: 0,
            hellos_checked: now,
        }
    }
}

impl Engine {
    /// Does what can be done; the number of events handled. Sleeps briefly in a loop that waits for long.
    #[inline]
    pub fn progress(&mut self) -> usize {
        let events = self.poll();
        if events > 0 {
            self.idle.streak_since = None;
        } else {
            self.rest();
        }
        events
    }

    /// Parks until something arrives, at most `deadline_ms`.
    pub fn wait(&mut self, deadline_ms: i32) {
        if self.poll() == 0 {
            self.park(deadline_ms);
        }
    }

    #[inline]
    fn poll(&mut self) -> usize {
        let mut events = 0;
        for index in 0..self.rings.len() {
            if let Some(&id) = self.rings.get(index) {
                events += self.poll_ring(id);
            }
        }
        if let Some(id) = self.hot_stream {
            events += self.read_stream(id);
        }
        self.idle.polls = self.idle.polls.wrapping_add(1);
        if self.is_time_to_look(events) {
            events += self.look(0);
        }
        if !self.full_rings.is_empty() {
            self.retry_full_rings();
        }
        self.flush();
        events
    }

    #[inline]
    fn is_time_to_look(&self, events: usize) -> bool {
        if self.hellos_open > 0 {
            return true;
        }
        let every = match self.streams {
            0 => POLLS_PER_LOOK_RINGS,
            _ => POLLS_PER_LOOK_STREAMS,
        };
        let all_streams_are_hot = self.streams == 0 || (self.streams == 1 && self.hot_stream.is_some());
        self.idle.polls.is_multiple_of(every) && (events == 0 || all_streams_are_hot)
            || (events == 0 && self.streams > 1)
    }

    /// Takes what the kernel has to tell; waits for it up to `millis`.
    fn look(&mut self, millis: i64) -> usize {
        let timeout = rustix::event::Timespec {
            tv_sec: millis / 1000,
            tv_nsec: (millis % 1000) * 1_000_000,
        };
        let empty = epoll::Event { flags: EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut buffer = [empty; EVENTS];
        let Ok(count) = epoll::wait(&self.epoll, &mut buffer[..], Some(&timeout)) else {
            return 0;
        };
        for event in &buffer[..count] {
            let (flags, data) = (event.flags, event.data);
            self.handle_event(Token::of(data.u64()), flags);
        }
        if self.hellos_open > 0 && self.idle.hellos_checked.elapsed() > Duration::from_secs(1) {
            self.idle.hellos_checked = Instant::now();
            self.check_hellos();
        }
        count
    }

    fn handle_event(&mut self, token: Token, flags: EventFlags) {
        match token {
            Token::Listener => self.handle_door(false),
            Token::UnixListener => self.handle_door(true),
            Token::Hello(id) => self.handle_hello(id),
            Token::Link(id) => self.handle_link_event(id, flags),
        }
    }

    fn handle_link_event(&mut self, id: usize, flags: EventFlags) {
        let Some(link) = self.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        if let Carrier::Shm(ring) = &mut link.carrier {
            if !ring.drain_doorbell() {
                while self.poll_ring(id) > 0 {}
                self.link_down(id, &std::io::ErrorKind::UnexpectedEof.into());
            }
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.handle_writable(id);
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read_stream(id);
        }
    }

    /// Nothing has come: spins, yields or parks, depending on how long that has been so.
    fn rest(&mut self) {
        let now = Instant::now();
        let has_gap = now - self.idle.last_poll > GAP;
        self.idle.last_poll = now;
        let since = match self.idle.streak_since {
            Some(since) if !has_gap => since,
            _ => {
                self.idle.streak_since = Some(now);
                return;
            }
        };
        let streak = now - since;
        if streak < self.idle.spin {
            std::hint::spin_loop();
            return;
        }
        if streak < self.idle.yield_until {
            std::thread::yield_now();
        } else {
            self.park(PARK_MILLIS);
        }
        self.idle.last_poll = Instant::now();
    }

    /// Sleeps until something arrives, at most `millis`.
    fn park(&mut self, millis: i32) {
        if !self.full_rings.is_empty() {
            // Nobody rings when a ring has room again.
            return std::thread::yield_now();
        }
        let mut parked = 0;
        let mut may_sleep = true;
        for &id in &self.rings {
            let Some(Carrier::Shm(ring)) = self.links[id].as_mut().map(|link| &mut link.carrier)
            else {
                continue;
            };
            parked += 1;
            if !ring.prepare_park() {
                may_sleep = false;
                break;
            }
        }
        if may_sleep {
            self.look(millis as i64);
        }
        for &id in self.rings.iter().take(parked) {
            if let Some(Carrier::Shm(ring)) = self.links[id].as_mut().map(|link| &mut link.carrier) {
                ring.unpark();
            }
        }
    }
}
