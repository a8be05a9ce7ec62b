//! The ports that a completion queue or counter drives when it is read.

use std::sync::Arc;

use crate::parking::{self, SharedEngine};
use crate::sync::{Sleep, SpinLock};

/// The ports a queue or counter drives.
pub struct EngineSet {
    list: SpinLock<Vec<Arc<SharedEngine>>>,
}

impl EngineSet {
    pub const fn new() -> EngineSet {
        EngineSet { list: SpinLock::new(Vec::new()) }
    }

    /// Adds a port, once.
    pub fn add(&self, port: &Arc<SharedEngine>) {
        let mut list = self.list.lock();
        if !list.iter().any(|known| Arc::ptr_eq(known, port)) {
            list.push(Arc::clone(port));
        }
    }

    /// When this returns, nobody drives the port through this list any more.
    pub fn remove(&self, port: &Arc<SharedEngine>) {
        self.list.lock().retain(|known| !Arc::ptr_eq(known, port));
    }

    /// Lets every engine work. One that another thread is in is passed over: that thread is making
    /// the progress already.
    ///
    /// Where a thread waits for a lock, it comes first: whoever polls would take the lock again before the other
    /// has seen it free.
    #[inline]
    pub fn progress(&self) {
        if Sleep::is_contended() {
            return std::thread::yield_now();
        }
        let Some(list) = self.list.try_lock() else { return };
        for port in list.iter() {
            port.try_with(|engine| {
                let advice = engine.progress();
                parking::follow_advice(engine, advice);
            });
        }
    }

    /// The same for a program that reads a counter of its one-sided operations, and waits only if one is in flight.
    pub fn progress_for_counter(&self) {
        if Sleep::is_contended() {
            return std::thread::yield_now();
        }
        let Some(list) = self.list.try_lock() else { return };
        for port in list.iter() {
            port.try_with(|engine| {
                if !engine.progress_for_counter() {
                    let advice = engine.progress();
                    parking::follow_advice(engine, advice);
                }
            });
        }
    }

    /// Parks in one of the engines, and all others of this thread, for at most `slice_ms`. False: there is no engine to park
    /// in.
    pub fn wait(&self, slice_ms: i32) -> bool {
        // The list is copied so that a wait does not keep others from driving.
        let ports = self.list.lock().clone();
        for port in &ports {
            if Sleep::is_contended() {
                break;
            }
            if port.try_with(|engine| parking::wait(engine, slice_ms)).is_some() {
                return true;
            }
        }
        // Other threads are in all of them, and make the progress.
        std::thread::yield_now();
        !ports.is_empty()
    }

    /// Waits until no engine is in the middle of a step: whatever it had looked up before is done
    /// with.
    pub fn fence(&self) {
        for port in self.list.lock().iter() {
            port.with(|_| ());
        }
    }
}

impl Default for EngineSet {
    fn default() -> Self {
        EngineSet::new()
    }
}
