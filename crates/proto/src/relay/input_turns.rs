//! Inputs that wait for capacity of an output, and the order in which they resume.
//!
//! Inputs of one output resume in the order in which they began to wait, each for at most one
//! buffer; outputs take turns as well. What enters: inputs whose next frame finds its output full,
//! and outputs that have capacity again or have disconnected. What leaves: the inputs that may
//! resume ([`InputTurns::poll_resume`]). What may never happen: an input waits although its output
//! has capacity or is disconnected.

use alloc::collections::VecDeque;

use super::link_queue::LinkQueue;
use super::ports::Ports;
use super::queue_memory::QueueMemory;
use crate::route::routing_table::LinkId;

/// Inputs that wait: see the module head. The inputs of each output are in its port.
#[derive(Debug, Default)]
pub(super) struct InputTurns {
    /// Outputs that may have capacity for one of their waiting inputs.
    outputs: LinkQueue,
    /// Inputs that need not wait any longer, since their output has disconnected.
    released: VecDeque<LinkId>,
    /// The input that resumes now, and the output that it waited for.
    current: Option<(LinkId, LinkId)>,
}

impl InputTurns {
    /// Whether `from` resumes now, and waited for `to`.
    #[inline]
    pub fn is_turn(&self, from: LinkId, to: LinkId) -> bool {
        self.current == Some((from, to))
    }

    /// Lets `from` wait for `to`.
    pub fn enqueue(&mut self, ports: &mut Ports, memory: &QueueMemory, from: LinkId, to: LinkId) {
        ports.get_mut(from).waits_for = Some(to);
        ports.get_mut(to).waiting_inputs.push_back(from);
        // The output may be idle already, and then nothing else would resume its waiting inputs.
        let port = ports.get(to);
        if port.output.waiting_bytes() < memory.bound(port) {
            self.outputs.push(to);
        }
    }

    /// Removes `link` from the inputs that wait for its output.
    pub fn dequeue(&mut self, ports: &mut Ports, link: LinkId) {
        if let Some(output) = ports.get_mut(link).waits_for.take() {
            ports.get_mut(output).waiting_inputs.retain(|waiter| *waiter != link);
        }
    }

    /// Handles that an output has written: if half of its `bound` is free, inputs may resume.
    #[inline]
    pub fn handle_sent(&mut self, ports: &Ports, output: LinkId, bound: usize) {
        let port = ports.get(output);
        if !port.waiting_inputs.is_empty() && port.output.waiting_bytes() <= bound / 2 {
            self.outputs.push(output);
        }
    }

    /// Lets the inputs that wait for `link` resume, if its state allows.
    pub fn release(&mut self, ports: &mut Ports, link: LinkId) {
        let port = ports.get_mut(link);
        if port.is_up() {
            if !port.waiting_inputs.is_empty() {
                self.outputs.push(link);
            }
            return;
        }
        // A disconnected port makes no input wait: the next frame of each input is queued, dropped
        // as lost, or reported as unreachable.
        for waiter in core::mem::take(&mut port.waiting_inputs) {
            ports.get_mut(waiter).waits_for = None;
            self.released.push_back(waiter);
        }
    }

    /// Lets inputs resume that waited for no output.
    pub fn resume_all(&mut self, inputs: impl Iterator<Item = LinkId>) {
        self.released.extend(inputs);
    }

    pub fn handle_closed(&mut self, link: LinkId) {
        self.outputs.handle_closed(link);
    }

    /// The next input that may resume.
    pub fn poll_resume(&mut self, ports: &mut Ports, memory: &QueueMemory) -> Option<LinkId> {
        self.current = None;
        while let Some(input) = self.released.pop_front() {
            // The input may have disconnected, or wait for another output by now.
            if ports.find(input).is_some_and(|port| port.waits_for.is_none()) {
                return Some(input);
            }
        }
        while let Some(output) = self.outputs.front() {
            let Some(input) = next_waiting_input(ports, memory, output) else {
                self.outputs.pop();
                continue;
            };
            self.outputs.rotate();
            self.current = Some((input, output));
            ports.get_mut(input).waits_for = None;
            return Some(input);
        }
        None
    }
}

/// The next input that waits for `output`, if the output has capacity. The output may have
/// disconnected since it was put into the list.
fn next_waiting_input(ports: &mut Ports, memory: &QueueMemory, output: LinkId) -> Option<LinkId> {
    let port = ports.find_mut(output)?;
    match port.output.waiting_bytes() < memory.bound(port) {
        true => port.waiting_inputs.pop_front(),
        false => None,
    }
}
