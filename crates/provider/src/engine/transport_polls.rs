//! When the transport of a recorded process is polled: at each poll of the program, and behind
//! everything that the program posts.
//!
//! What enters: polls and posts. What leaves: frames to other nodes, and the end of this process
//! where its logs cannot go on. What may never happen: a frame waits although its receiver can be
//! reached.

use std::io;
use std::time::Instant;

use landbridge_drive::link::node_log::{self, NodeLogs};
use landbridge_proto::id::INCARNATIONS_PER_NODE;
use landbridge_proto::log::contact::Contact;
use rustix::event::epoll::EventFlags;

use super::carrier::Carrier;
use super::connections::Connections;
use super::event_token::{EventToken, watch};
use super::log_transport::LogTransport;
use super::recorded_uplink::end_process;
use super::{Engine, FLUSH_TIME_USUAL, PARK_MILLIS};
use crate::log;

impl Connections {
    /// The logs of this process, if it keeps logs.
    #[inline]
    fn node_logs(&mut self) -> Option<&mut NodeLogs> {
        let link = self.data.links[self.uplink.link()?].as_mut()?;
        match &mut link.carrier {
            Carrier::Logs(logs) => Some(logs),
            _ => None,
        }
    }
}

/// What the user knows of what was discarded because memory was full.
#[derive(Default)]
struct WarnedOfFullMemory {
    /// Deliveries of this process.
    of_deliveries: bool,
    /// A log of this process and another one, which cannot be restarted either.
    of_log: bool,
}

impl WarnedOfFullMemory {
    /// Notes what was discarded; returns whether the user is to read that.
    fn note(&mut self, are_deliveries: bool) -> bool {
        let warned = if are_deliveries { &mut self.of_deliveries } else { &mut self.of_log };
        !std::mem::replace(warned, true)
    }
}

/// The transport to other nodes, if this process keeps logs and exchanges something with other
/// nodes.
#[derive(Default)]
pub struct OtherNodes {
    transport: Option<Box<LogTransport>>,
    /// This process keeps logs.
    has_logs: bool,
    warned: WarnedOfFullMemory,
    /// An incarnation of this process on this node has delivered everything and said that it has
    /// ended.
    has_ended: bool,
}

impl OtherNodes {
    /// Opens the transport, if there are other nodes.
    pub fn open(&mut self, connections: &mut Connections) {
        let (own, size) = (connections.data.own.address, connections.data.identity.size);
        let ended = Contact::ended(moves(connections));
        let Some(logs) = connections.node_logs() else { return };
        self.has_logs = true;
        self.has_ended = logs.generation(own.index() as usize) == ended.generation;
        if self.has_ended {
            // An earlier incarnation may have been killed before its agent knew.
            logs.write_contact(&ended);
            logs.ring_agent();
        }
        // Of the ranks with which it has begun; or of any, if it was spawned.
        if (0..size as usize).any(|process| !logs.is_local(process)) {
            self.open_transport(connections);
        }
    }

    /// Opens the transport once another node is known.
    #[inline]
    fn open_if_needed(&mut self, connections: &mut Connections) {
        let own = connections.data.own.address.index() as usize;
        let Some(logs) = connections.node_logs() else { return };
        if let Some(peer) = logs.take_discard_notice() {
            self.warn(own, peer);
        }
        if self.transport.is_none() && (logs.remote_count() > 0 || logs.contacts_changed() != 0) {
            self.open_transport(connections);
        }
    }

    /// `peer`: see [`NodeLogs::take_discard_notice`].
    #[cold]
    fn warn(&mut self, own: usize, peer: usize) {
        if !self.warned.note(peer == own) {
            return;
        }
        if peer == own {
            log!(
                Warn,
                "memory for message logs is full (recover_memory): this process cannot be \
                 restarted before its next checkpoint"
            );
        } else {
            log!(
                Warn,
                "memory for message logs is full (recover_memory): this process and process {peer} \
                 cannot be restarted before their next checkpoints"
            );
        }
    }

    #[cold]
    fn open_transport(&mut self, connections: &mut Connections) {
        let (own, moves) = (connections.data.own.address, moves(connections));
        let Some(logs) = connections.node_logs().filter(|_| !self.has_ended) else { return };
        let opened = LogTransport::open(logs, own, moves).and_then(|opened| {
            self.transport = Some(Box::new(opened));
            self.watch(connections)
        });
        opened.unwrap_or_else(|error| {
            end_process(&format!("it cannot send to other nodes: {error}"))
        });
    }

    /// Lets the endpoint of the program wake for the transport.
    fn watch(&mut self, connections: &Connections) -> io::Result<()> {
        let Some(engine) = self.engine() else { return Ok(()) };
        let epoll = &connections.data.own.epoll;
        watch(epoll, engine.descriptor(), EventToken::Transport, EventFlags::IN)
    }

    /// Closes the transport at once. What is under way is sent again by the next one.
    pub fn close(&mut self) {
        self.transport = None;
    }

    /// Receives frames of other nodes, and sends frames to them.
    #[inline]
    pub fn progress(&mut self, connections: &mut Connections) {
        if !self.has_logs {
            return;
        }
        self.open_if_needed(connections);
        let Some(transport) = &mut self.transport else { return };
        let Some(logs) = connections.node_logs() else { return };
        let generation = transport.generation();
        transport.progress(logs).unwrap_or_else(|error| end_transport(&error));
        if transport.generation() != generation {
            self.watch(connections).unwrap_or_else(|error| end_transport(&error));
        }
    }

    /// Sends all frames that can be sent. Those of a long message leave for another node while
    /// further ones are appended to the log, unless frames wait until another node knows what they
    /// depend on: then one wait is enough for all.
    #[inline]
    pub fn flush(&mut self, connections: &mut Connections) {
        if self.transport.is_none() {
            return connections.flush();
        }
        if connections.node_logs().is_some_and(|logs| node_log::leave_at_once(logs)) {
            connections.data.pieces.begin();
        }
        loop {
            connections.flush();
            self.send(connections);
            if !connections.data.pieces.continues() {
                return;
            }
        }
    }

    /// Sends the frames that were appended to logs to other nodes.
    #[inline]
    pub fn send(&mut self, connections: &mut Connections) {
        let Some(transport) = &mut self.transport else { return };
        let Some(logs) = connections.node_logs() else { return };
        transport.send(logs).unwrap_or_else(|error| end_transport(&error));
    }

    /// Waits until every process of another node has what was sent to it, however long that takes,
    /// since nobody else sends it when this process has ended.
    pub fn finish(&mut self, connections: &mut Connections) {
        if connections.node_logs().is_some_and(|logs| node_log::is_behind(logs)) {
            end_process("it ends before it has sent what it sent before");
        }
        let start = Instant::now();
        let mut has_warned = false;
        loop {
            self.progress(connections);
            let Some(transport) = &mut self.transport else { return };
            let Some(logs) = connections.node_logs() else { return };
            let delivered = transport.is_delivered(logs);
            if delivered.unwrap_or_else(|error| end_transport(&error)) {
                break transport.end(logs);
            }
            if !has_warned && start.elapsed() > FLUSH_TIME_USUAL {
                has_warned = true;
                log!(Warn, "closing waits until a peer has received what was sent to it");
            }
            transport.engine().park(PARK_MILLIS);
        }
        self.has_ended = true;
        self.close();
    }

    /// Nanoseconds until a timer of the transport is due, at most `millis` milliseconds.
    pub fn nap_nanos(&self, millis: i32) -> Option<u64> {
        self.transport.as_ref().map(|transport| transport.nap_nanos(millis))
    }

    /// The engine of the transport.
    pub fn engine(&mut self) -> Option<&mut Engine> {
        self.transport.as_mut().map(|transport| transport.engine())
    }
}

/// How often this process has moved to another node.
fn moves(connections: &Connections) -> u32 {
    connections.data.own.introduction.incarnation / INCARNATIONS_PER_NODE
}

#[cold]
fn end_transport(error: &io::Error) -> ! {
    end_process(&format!("its messages to other nodes cannot go on: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process is concerned as well.
    #[test]
    fn a_log_that_is_discarded_after_deliveries_is_reported_and_each_once() {
        let mut warned = WarnedOfFullMemory::default();
        let noted = [true, false, true, false].map(|are_deliveries| warned.note(are_deliveries));
        assert_eq!(noted, [true, true, false, false]);
    }
}
