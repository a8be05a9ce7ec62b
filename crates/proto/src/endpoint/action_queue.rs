//! The actions that the driver has not yet performed, in the order in which they arose.
//!
//! What enters: bytes to move, memory to access, completions. What leaves: the oldest action. What
//! may never happen: an action overtakes another one, or is lost.

use alloc::collections::VecDeque;

use super::driver_interface::{Action, OperationCompletion};

/// The actions that wait for the driver.
pub(super) struct ActionQueue<M> {
    queue: VecDeque<Action<M>>,
}

impl<M> ActionQueue<M> {
    pub fn new() -> Self {
        Self { queue: VecDeque::new() }
    }

    #[inline]
    pub fn push(&mut self, action: Action<M>) {
        self.queue.push_back(action);
    }

    /// Queues the report of a completion.
    #[inline]
    pub fn complete(&mut self, done: OperationCompletion) {
        self.push(Action::Complete(done));
    }

    #[inline]
    pub fn pop(&mut self) -> Option<Action<M>> {
        self.queue.pop_front()
    }
}
