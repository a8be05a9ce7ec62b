//! The queues and counters that are bound to an endpoint.
//!
//! What enters: objects that the program binds before it enables the endpoint. What leaves: the
//! [`Sink`] of the endpoint's engine, and the sets of engines that reads of these objects drive.

use std::sync::Arc;

use super::cntr::CompletionCounter;
use super::cq::CompletionQueue;
use crate::engine_set::EngineSet;
use crate::sink::{Counters, Sink};

#[derive(Clone, Default)]
pub struct BoundObjects {
    pub transmit: Option<Arc<CompletionQueue>>,
    pub receive: Option<Arc<CompletionQueue>>,
    pub send_counter: Option<Arc<CompletionCounter>>,
    pub recv_counter: Option<Arc<CompletionCounter>>,
    pub read_counter: Option<Arc<CompletionCounter>>,
    pub write_counter: Option<Arc<CompletionCounter>>,
    pub remote_write_counter: Option<Arc<CompletionCounter>>,
}

impl BoundObjects {
    /// Where the endpoint's engine reports completions.
    pub fn sink(&self) -> Sink {
        let queue = |cq: &CompletionQueue| Arc::clone(&cq.queue);
        let counter = |cntr: &CompletionCounter| Arc::clone(&cntr.counter);
        Sink {
            transmit: self.transmit.as_deref().map(queue),
            receive: self.receive.as_deref().map(queue),
            counters: Counters {
                send: self.send_counter.as_deref().map(counter),
                recv: self.recv_counter.as_deref().map(counter),
                read: self.read_counter.as_deref().map(counter),
                write: self.write_counter.as_deref().map(counter),
                remote_write: self.remote_write_counter.as_deref().map(counter),
            },
        }
    }

    /// Calls `action` for each engine set that is driven when a bound queue or counter is read.
    pub fn each_engine_set(&self, mut action: impl FnMut(&EngineSet)) {
        let queues = [&self.transmit, &self.receive];
        queues.into_iter().flatten().for_each(|cq| action(&cq.engines));
        let counters = [
            &self.send_counter,
            &self.recv_counter,
            &self.read_counter,
            &self.write_counter,
            &self.remote_write_counter,
        ];
        counters.into_iter().flatten().for_each(|cntr| action(&cntr.engines));
    }
}
