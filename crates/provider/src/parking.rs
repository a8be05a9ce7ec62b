//! How a thread of the program sleeps until one of the process's engines has something to do.
//!
//! What enters: the engine whose poll was in vain, locked, and what its thread's patience advises. What leaves: the
//! thread, after it has yielded or slept for a bounded time.
//!
//! A library with several endpoints polls them in turn, all from one loop: whoever slept in one of them would be deaf to
//! the others. So a thread sleeps at once in all engines that it drives (was the last to poll), and those that nobody does.
//! It holds their locks meanwhile. Another thread that wants one rings a bell of the process, and for a moment
//! nobody parks.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::engine::{Engine, PARK_MILLIS, timespec};
use crate::interposer::UnrecordedCalls;
use crate::poll_policy::{Advice, PollPolicy};
use crate::stack::{Stack, Top};
use crate::sync::{Sleep, SpinLock};
use crate::threads;

/// One enabled endpoint's engine behind its lock, shared by the endpoint (which posts) and by the queues and counters bound
/// to it (which drive it when they are read).
pub struct SharedEngine {
    engine: SpinLock<Engine>,
    /// What it works on, if that is not the stack of whoever calls.
    top: Option<Top>,
    /// And the memory of that.
    _stack: Option<Stack>,
}

impl SharedEngine {
    /// `stack`: for an engine that must leave nothing on that of the program.
    pub fn new(engine: Engine, mut stack: Option<Stack>) -> Arc<Self> {
        let top = stack.as_mut().map(Stack::top);
        let port = Arc::new(Self { engine: SpinLock::new(engine), top, _stack: stack });
        register(&port);
        port
    }

    /// Has the engine do something.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> R {
        let mut engine = self.engine.lock();
        self.work(&mut engine, work)
    }

    /// The same if nobody else is in it.
    #[inline]
    pub fn try_with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut engine = self.engine.try_lock()?;
        Some(self.work(&mut engine, work))
    }

    #[inline]
    fn work<R>(&self, engine: &mut Engine, work: impl FnOnce(&mut Engine) -> R) -> R {
        match self.top {
            None => work(engine),
            // SAFETY: the stack lives as long as the port, and is that of whoever holds the engine's lock.
            Some(top) => unsafe {
                let _own = UnrecordedCalls::begin();
                top.run(|| {
                    threads::note_call();
                    work(engine)
                })
            },
        }
    }

    /// Drains the engine and ends its use: from here on nobody gets its lock. (Another thread may hold the port for a moment
    /// longer, and must not touch memory that the program has back.)
    pub fn close(&self) {
        let mut engine = self.engine.lock();
        engine.close();
        unregister(self, &engine);
        PollPolicy::of_this_thread(|policy| policy.forget(engine.descriptor().as_raw_fd()));
        std::mem::forget(engine);
    }
}

// SAFETY: an engine holds pointers to the program's buffers, which belong to no thread; it is only
// reached through its lock.
unsafe impl Sync for SharedEngine {}
// SAFETY: as above.
unsafe impl Send for SharedEngine {}

/// All ports of the process.
static SHARED_ENGINES: SpinLock<Vec<Weak<SharedEngine>>> = SpinLock::new(Vec::new());
/// What a thread sleeps on where there are several: the descriptor of each engine, and the bell. `None`: no
/// descriptor was left for it, and each engine is slept in alone.
static PROCESS_EPOLL: OnceLock<Option<OwnedFd>> = OnceLock::new();
/// Events taken at once; which they are does not matter.
const EVENTS: usize = 4;

/// From now on whoever parks is woken for this port too.
fn register(port: &Arc<SharedEngine>) {
    if let Some(process_epoll) = PROCESS_EPOLL.get_or_init(open) {
        let engine = port.engine.lock();
        // An engine that cannot be watched is late by one nap at most.
        let _ =
            epoll::add(process_epoll, engine.descriptor(), EventData::new_u64(0), EventFlags::IN);
    }
    SHARED_ENGINES.lock().push(Arc::downgrade(port));
}

/// Undoes [`register`] for the port of this engine.
fn unregister(port: &SharedEngine, engine: &Engine) {
    if let Some(Some(process_epoll)) = PROCESS_EPOLL.get() {
        let _ = epoll::delete(process_epoll, engine.descriptor());
    }
    SHARED_ENGINES.lock().retain(|known| known.as_ptr() != std::ptr::from_ref(port));
}

fn open() -> Option<OwnedFd> {
    let fd = epoll::create(CreateFlags::CLOEXEC).ok()?;
    // Away from the numbers that programs see.
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, 512).unwrap_or(fd);
    let wakeup_fd = Sleep::wakeup_fd()?;
    epoll::add(&fd, wakeup_fd, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).ok()?;
    Some(fd)
}

/// Does as advised after a poll of `engine` in vain.
#[inline]
pub fn follow_advice(engine: &mut Engine, advice: Advice) {
    match advice {
        Advice::GoOn => (),
        Advice::Yield => {
            std::thread::yield_now();
            engine.note_advice_taken(advice, 0);
        }
        Advice::Park => park(engine, PARK_MILLIS),
    }
}

/// For a thread that has nothing else to do: parks at once if there is nothing.
pub fn wait(engine: &mut Engine, millis: i32) {
    if engine.poll() == 0 {
        park(engine, millis);
    }
}

/// Sleeps until something arrives or a full ring has room, in any engine that this thread drives, at most `millis`;
/// takes it in.
fn park(engine: &mut Engine, millis: i32) {
    let me = PollPolicy::of_this_thread(|policy| policy.token()).unwrap_or(0);
    let ports: Vec<_> = SHARED_ENGINES.lock().iter().filter_map(Weak::upgrade).collect();
    // This engine's own lock is held: that it is passed over here is right.
    let free = ports.iter().filter_map(|port| port.engine.try_lock());
    let mut others: Vec<_> = free.filter(|engine| engine.is_driven_by(me)).collect();
    let mut all: Vec<&mut Engine> = others.iter_mut().map(|other| &mut **other).collect();
    match PROCESS_EPOLL.get() {
        Some(Some(process_epoll)) if !all.is_empty() => {
            all.push(engine);
            sleep_in_all(process_epoll, &mut all, millis);
        }
        _ => {
            let events = engine.park(millis);
            engine.note_advice_taken(Advice::Park, events);
        }
    }
    if Sleep::is_contended() {
        PollPolicy::of_this_thread(PollPolicy::note_contended);
    }
}

fn sleep_in_all(process_epoll: &OwnedFd, engines: &mut [&mut Engine], millis: i32) {
    if engines.iter_mut().all(|engine| engine.prepare_park())
        && let Some(_sleep) = Sleep::begin()
    {
        let naps = engines.iter().map(|engine| engine.nap_nanos(millis));
        let timeout = timespec(naps.min().unwrap_or(0));
        let nothing = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let _ = epoll::wait(process_epoll, &mut [nothing; EVENTS][..], Some(&timeout));
    }
    // The kernel wakes one of those that sleep here.
    Sleep::pass_wakeup_on();
    for engine in engines {
        engine.unpark();
        let events = engine.poll_epoll(0) + engine.poll();
        engine.note_advice_taken(Advice::Park, events);
    }
}
