//! The engines that a completion queue or counter drives when it is read.

use std::sync::Arc;

use crate::parking::{self, SharedEngine};
use crate::sync::{Sleep, SpinLock};

/// The engines that a queue or counter drives.
pub struct EngineSet {
    list: SpinLock<Vec<Arc<SharedEngine>>>,
}

impl EngineSet {
    pub const fn new() -> EngineSet {
        EngineSet { list: SpinLock::new(Vec::new()) }
    }

    /// Adds an engine, once.
    pub fn add(&self, port: &Arc<SharedEngine>) {
        let mut list = self.list.lock();
        if !list.iter().any(|known| Arc::ptr_eq(known, port)) {
            list.push(Arc::clone(port));
        }
    }

    /// Removes an engine. After the return no thread drives the engine through this list.
    pub fn remove(&self, port: &Arc<SharedEngine>) {
        self.list.lock().retain(|known| !Arc::ptr_eq(known, port));
    }

    /// Lets every engine make progress. An engine that another thread uses is skipped: the other
    /// thread makes the progress already.
    ///
    /// A thread that waits for a lock goes first: otherwise a polling thread would take the lock
    /// again before the waiting thread has seen it free.
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

    /// Lets every engine make progress for a program that reads a counter of its one-sided
    /// operations. The program waits only if such an operation is in flight.
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

    /// Parks in one engine, and in all other engines of this thread, for at most `slice_ms`
    /// milliseconds. False: the set is empty.
    pub fn wait(&self, slice_ms: i32) -> bool {
        // The list is copied so that a wait does not keep other threads from driving the engines.
        let ports = self.list.lock().clone();
        for port in &ports {
            if Sleep::is_contended() {
                break;
            }
            if port.try_with(|engine| parking::wait(engine, slice_ms)).is_some() {
                return true;
            }
        }
        // Other threads use all engines, and make the progress.
        std::thread::yield_now();
        !ports.is_empty()
    }

    /// Waits until no engine executes a call: every lookup that an engine made before has been
    /// used. Peers that access registered memory by themselves learn that a region is gone.
    pub fn fence(&self) {
        for port in self.list.lock().iter() {
            port.with(|engine| engine.note_removed_regions());
        }
    }
}

impl Default for EngineSet {
    fn default() -> Self {
        EngineSet::new()
    }
}
