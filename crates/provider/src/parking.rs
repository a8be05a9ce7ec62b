//! Sleeping of program threads until an engine of the process has work.
//!
//! What enters: the locked engine whose poll had no result, and the advice of the thread's
//! [`PollPolicy`]. What leaves: the thread, after it has yielded or slept for a bounded time.
//!
//! A library with several endpoints polls the endpoints in turn, from one loop. A thread that slept
//! in only one engine would miss the events of the others. So a thread sleeps in all engines that
//! it drives (was the last to poll) and in all engines that no thread drives, and holds the locks
//! of these engines meanwhile. Another thread that wants such a lock writes to an eventfd of the
//! process, and for a moment no thread parks.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::abi::Errno;
use crate::engine::{Engine, PARK_MILLIS, Setup, timespec};
use crate::interposer::UnrecordedCalls;
use crate::poll_policy::{Advice, PollPolicy};
use crate::stack::{Stack, Top};
use crate::sync::{Sleep, SpinLock};
use crate::threads;

/// The engine of an enabled endpoint behind its lock. The endpoint posts operations to the engine;
/// the queues and counters bound to the endpoint drive the engine when they are read.
pub struct SharedEngine {
    engine: SpinLock<Engine>,
    /// Top of the engine's own stack; `None` if the engine works on the caller's stack.
    top: Option<Top>,
    /// The memory of the engine's own stack.
    _stack: Option<Stack>,
}

impl SharedEngine {
    /// Opens an engine, on a stack of its own: the engine of a recorded process leaves nothing on
    /// the program's stack, neither what it holds nor where it lies.
    ///
    /// # Errors
    /// Those of [`Engine::open`].
    pub fn open(setup: Setup) -> Result<Arc<Self>, Errno> {
        threads::make_thread_local_memory();
        let mut place = Arc::<Self>::new_uninit();
        let mut stack = Stack::new();
        // The address stays the same when the engine becomes the stack's owner.
        let top = stack.top();
        let mut stack = Some(stack);
        let work = || {
            let engine = Engine::open(setup)?;
            let is_recorded = engine.is_recorded();
            let own = if is_recorded { stack.take() } else { None };
            let top = is_recorded.then_some(top);
            let target = Arc::get_mut(&mut place).expect("nobody else has it yet");
            target.write(Self { engine: SpinLock::new(engine), top, _stack: own });
            Ok(())
        };
        // SAFETY: the stack lives in `stack`, or in the opened engine, and nothing else uses it.
        unsafe {
            let _own = UnrecordedCalls::begin();
            top.run(work)?;
        }
        // SAFETY: it was written just now.
        let port = unsafe { place.assume_init() };
        port.with(|engine| register(&port, engine));
        Ok(port)
    }

    /// An engine on the caller's stack.
    #[cfg(test)]
    pub fn new(engine: Engine) -> Arc<Self> {
        let port = Arc::new(Self { engine: SpinLock::new(engine), top: None, _stack: None });
        port.with(|engine| register(&port, engine));
        port
    }

    /// Locks the engine, and calls `work` with it.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> R {
        let mut engine = self.engine.lock();
        self.work(&mut engine, work)
    }

    /// Calls `work` with the engine unless another thread holds the lock.
    #[inline]
    pub fn try_with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut engine = self.engine.try_lock()?;
        Some(self.work(&mut engine, work))
    }

    #[inline]
    fn work<R>(&self, engine: &mut Engine, work: impl FnOnce(&mut Engine) -> R) -> R {
        match self.top {
            None => work(engine),
            // SAFETY: the stack lives as long as `self`, and only the holder of the engine's lock
            // uses it.
            Some(top) => unsafe {
                let _own = UnrecordedCalls::begin();
                let errno = *libc::__errno_location();
                let result = top.run(|| {
                    threads::note_call();
                    work(engine)
                });
                // What a call of the network has left there would depend on the network.
                *libc::__errno_location() = errno;
                result
            },
        }
    }

    /// Closes the engine and keeps its lock for ever, so that no thread can use the engine any
    /// more. Another thread may hold a reference for a moment longer, and must not touch memory
    /// that belongs to the program again. An engine that closes may still have to reach peers: it
    /// makes paths, and draws random numbers for that, which are not the program's.
    pub fn close(&self) {
        let mut engine = self.engine.lock();
        self.work(&mut engine, |engine| {
            engine.close();
            unregister(self, engine);
        });
        PollPolicy::of_this_thread(|policy| policy.forget(engine.descriptor().as_raw_fd()));
        std::mem::forget(engine);
    }
}

// SAFETY: an engine holds pointers to the program's buffers, which belong to no thread, and is only
// reached through its lock.
unsafe impl Sync for SharedEngine {}
// SAFETY: an engine's pointers belong to no thread, and its lock guards every use.
unsafe impl Send for SharedEngine {}

/// All engines of the process.
static SHARED_ENGINES: SpinLock<Vec<Weak<SharedEngine>>> = SpinLock::new(Vec::new());
/// Epoll set in which a thread with several engines sleeps: the descriptor of each engine, and the
/// eventfd. `None`: no descriptor was available, and a thread sleeps in one engine only.
static PROCESS_EPOLL: OnceLock<Option<OwnedFd>> = OnceLock::new();
/// Events taken by one epoll call; the events are only counted as a wake-up.
const EVENTS: usize = 4;

/// Makes a sleeping thread wake for events of this engine, too.
fn register(port: &Arc<SharedEngine>, engine: &Engine) {
    if let Some(process_epoll) = PROCESS_EPOLL.get_or_init(open) {
        // A thread notices an engine that epoll cannot watch at most one sleep later.
        let _ =
            epoll::add(process_epoll, engine.descriptor(), EventData::new_u64(0), EventFlags::IN);
    }
    SHARED_ENGINES.lock().push(Arc::downgrade(port));
}

/// Undoes [`register`] for this engine.
fn unregister(port: &SharedEngine, engine: &Engine) {
    if let Some(Some(process_epoll)) = PROCESS_EPOLL.get() {
        let _ = epoll::delete(process_epoll, engine.descriptor());
    }
    SHARED_ENGINES.lock().retain(|known| known.as_ptr() != std::ptr::from_ref(port));
}

fn open() -> Option<OwnedFd> {
    let fd = epoll::create(CreateFlags::CLOEXEC).ok()?;
    // Numbers from 512 on do not change the numbers that programs see.
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, 512).unwrap_or(fd);
    let wakeup_fd = Sleep::wakeup_fd()?;
    epoll::add(&fd, wakeup_fd, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).ok()?;
    Some(fd)
}

/// Follows the advice after a poll of `engine` without result.
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

/// Parks a thread that has nothing else to do, unless a poll finds work.
pub fn wait(engine: &mut Engine, millis: i32) {
    if engine.poll() == 0 {
        park(engine, millis);
    }
}

/// Sleeps until something arrives or a full ring has free space, in any engine that this thread
/// drives, for at most `millis` milliseconds; then handles the events.
fn park(engine: &mut Engine, millis: i32) {
    let me = PollPolicy::of_this_thread(|policy| policy.token()).unwrap_or(0);
    let ports: Vec<_> = SHARED_ENGINES.lock().iter().filter_map(Weak::upgrade).collect();
    // The lock of `engine` itself is held, so this search rightly skips `engine`.
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
    // The kernel wakes only one of the threads that sleep here.
    Sleep::pass_wakeup_on();
    for engine in engines {
        engine.unpark();
        let events = engine.poll_epoll(0) + engine.poll();
        engine.note_advice_taken(Advice::Park, events);
    }
}
