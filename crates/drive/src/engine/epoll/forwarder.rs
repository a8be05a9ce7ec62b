//! Moves bytes between links and the relay's state machine.
//!
//! What enters: links that have something to read or can be written again. What leaves: every frame
//! that its output takes; connections that have ended or have broken the protocol are scheduled to
//! be closed.
//!
//! Memory: see the documentation of [`super`].

use std::io;

use landbridge_proto::id::Address;
use landbridge_proto::relay::{FRAME_BYTES_MAX, Relay, Stop};
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::Malformed;

use super::CLOSED;
use super::connection::{ConnectionKey, ConnectionTable, InputState, Phase};
use super::protocol_violations::ProtocolViolations;
use super::teardown::text;
use super::transport::Transport;
use super::waiting::Waiter;
use crate::sys;

/// The bytes read at once: as much as a socket's buffer commonly holds, and at least four frames,
/// so that little of what is read is the beginning of a frame that must be moved.
const READ_BYTES: usize = 256 << 10;
/// The unparsed bytes of all links above which links read in steps of [`READ_STEP_BYTES`].
const UNPARSED_BYTES_MAX: usize = 64 << 20;
/// The bytes of a small read, which completes any frame, also the longest in a ring.
const READ_STEP_BYTES: usize = 2 * FRAME_BYTES_MAX;

const _: () = assert!(READ_BYTES >= 2 * READ_STEP_BYTES);

/// The links, and the state machine between them.
pub struct Forwarder {
    pub relay: Relay,
    pub connections: ConnectionTable,
    pub waiter: Waiter,
    pub violations: ProtocolViolations,
    /// Endpoints that have broken the protocol, for the user, each with what was wrong.
    pub refused: Vec<(Address, Malformed)>,
    /// Connections that were written to and are not monitored yet.
    pub watched: Vec<ConnectionKey>,
    /// Something has been written to another relay since the monitor looked.
    pub wrote_to_relay: bool,
    pub counts: IoCounts,
    /// The buffer into which the link that is being served reads.
    buffer: Box<[u8]>,
    /// The unparsed bytes that all links keep.
    unparsed_bytes: usize,
}

/// System calls on links.
#[derive(Clone, Copy, Debug, Default)]
pub struct IoCounts {
    pub reads: u64,
    pub writes: u64,
}

impl Forwarder {
    pub fn new(relay: Relay, waiter: Waiter) -> Self {
        Self {
            relay,
            connections: ConnectionTable::default(),
            waiter,
            violations: ProtocolViolations::default(),
            refused: Vec::new(),
            watched: Vec::new(),
            wrote_to_relay: false,
            counts: IoCounts::default(),
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            unparsed_bytes: 0,
        }
    }

    /// Bytes that links have brought and no output has.
    pub fn queued_bytes(&self) -> usize {
        self.relay.queued_bytes() + self.unparsed_bytes
    }

    /// Forgets the unparsed bytes of a connection that has ended.
    pub fn drop_unparsed(&mut self, bytes: usize) {
        self.unparsed_bytes -= bytes;
    }

    /// Writes again to rings that were full.
    pub fn retry_blocked(&mut self) {
        if !self.waiter.has_blocked() {
            return;
        }
        for slot in self.waiter.take_blocked() {
            self.connections[slot].is_writable = true;
            if let Some(link) = self.connections[slot].link() {
                self.flush(link, &[]);
            }
        }
        self.drain(&[]);
    }

    pub fn serve_link(&mut self, slot: usize, link: LinkId) {
        let kept = self.connections[slot].unparsed.len();
        let room = match self.unparsed_bytes > UNPARSED_BYTES_MAX {
            true => (kept + READ_STEP_BYTES).min(READ_BYTES),
            false => READ_BYTES,
        };
        let connection = &mut self.connections[slot];
        let Some(transport) = &mut connection.transport else { return };
        let mut buffer = std::mem::take(&mut self.buffer);
        self.counts.reads += 1;
        match transport.read(&mut buffer[kept..room]) {
            Ok(read) if read.bytes > 0 => {
                let again = read.more || connection.input != InputState::Open;
                self.process(slot, link, &mut buffer, kept + read.bytes);
                if again && !self.connections[slot].is_paused {
                    self.connections.enqueue(slot);
                }
            }
            Ok(read) => match read.more {
                true => self.connections.enqueue(slot),
                false => {
                    connection.note_input(InputState::Ended);
                    self.connections.schedule_close(slot, CLOSED.into());
                }
            },
            // A part of a TLS record has arrived, and the end of the stream follows it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if connection.input != InputState::Open {
                    self.connections.enqueue(slot);
                }
            }
            Err(error) => {
                if error.kind() == io::ErrorKind::ConnectionReset {
                    connection.note_input(InputState::Ended);
                }
                self.connections.schedule_close(slot, text(&error));
            }
        }
        self.buffer = buffer;
    }

    /// Forwards the frames in `buffer[..filled]`, of which the connection has kept the first bytes,
    /// writes the outputs that they touch, and keeps the rest. Returns false if the frames break
    /// the protocol.
    pub fn process(&mut self, slot: usize, link: LinkId, buffer: &mut [u8], filled: usize) -> bool {
        let kept = std::mem::take(&mut self.connections[slot].unparsed);
        buffer[..kept.len()].copy_from_slice(&kept);
        self.unparsed_bytes -= kept.len();
        let taken = self.relay.handle_input(link, &mut buffer[..filled]);
        self.drain(buffer);
        if taken.bytes > 0 {
            self.note_valid(slot);
        }
        let connection = &mut self.connections[slot];
        connection.is_paused = taken.stop == Stop::Full;
        if let Stop::Broken(malformed) = taken.stop {
            self.post_refused_frame(slot, link);
            self.note_violation(slot, malformed);
            self.connections.schedule_close(slot, malformed.to_string());
            return false;
        }
        connection.unparsed = buffer[taken.bytes..filled].into();
        self.unparsed_bytes += filled - taken.bytes;
        true
    }

    /// Processes all that an ended process has left in its link, whatever the outputs' capacity.
    pub fn drain_input(&mut self, slot: usize, link: LinkId) {
        self.relay.begin_drain(link);
        // The buffer has space for a whole frame after the bytes that the connection keeps.
        let mut buffer = vec![0; READ_BYTES + READ_STEP_BYTES];
        loop {
            let kept = self.connections[slot].unparsed.len();
            let Some(transport) = &mut self.connections[slot].transport else { return };
            let read = transport.read(&mut buffer[kept..]);
            let (bytes, more) = read.map_or((0, false), |read| (read.bytes, read.more));
            if !self.process(slot, link, &mut buffer, kept + bytes) || (bytes == 0 && !more) {
                return;
            }
        }
    }

    /// Writes every output that has something new, and keeps what the outputs do not take.
    pub fn drain(&mut self, buffer: &[u8]) {
        while let Some(output) = self.relay.poll_flush() {
            self.flush(output, buffer);
            self.relay.keep(output, buffer);
        }
    }

    /// Writes what waits for `link`, over as many streams as take something.
    pub fn flush(&mut self, link: LinkId, buffer: &[u8]) {
        for number in 0..self.relay.ports().writer_count(link) {
            let Some(writer) = self.relay.ports().writer(link, number) else { return };
            self.write(writer, buffer);
            if !self.relay.has_output(link) {
                return;
            }
        }
    }

    pub fn write(&mut self, link: LinkId, buffer: &[u8]) {
        let Some(slot) = self.connections.slot_of(link) else { return };
        let connection = &mut self.connections[slot];
        let is_tcp_stream = connection.is_tcp_stream();
        let Some(transport) = &mut connection.transport else { return };
        if !connection.is_watched && !matches!(transport, Transport::Shm(_)) {
            connection.is_watched = true;
            self.watched.push(ConnectionKey { slot, generation: connection.generation });
        }
        if connection.unacked_since_millis.is_none() && is_tcp_stream {
            connection.unacked_since_millis = Some(sys::now_millis());
            self.wrote_to_relay = true;
        }
        while connection.is_writable {
            self.counts.writes += 1;
            let lengths = self.relay.frame_lengths(link);
            match transport.write(self.relay.slices(link, buffer), lengths) {
                Ok(written) => {
                    self.relay.handle_sent(link, written.bytes, buffer);
                    connection.is_writable = !written.blocked;
                    if written.bytes == 0 || !self.relay.has_output(link) {
                        break;
                    }
                }
                Err(_) => {
                    // The other side has closed, but what it has sent before must still be read.
                    // The end of this input closes the link.
                    connection.is_writable = false;
                    connection.note_input(InputState::Ending);
                    self.connections.enqueue(slot);
                    return;
                }
            }
        }
        if !connection.is_writable {
            self.waiter.note_blocked(slot, connection);
        }
    }

    /// Resumes inputs whose outputs have capacity again.
    pub fn resume(&mut self) {
        while let Some(link) = self.relay.poll_resume() {
            let Some(slot) = self.connections.slot_of(link) else { continue };
            self.connections[slot].is_paused = false;
            let kept = self.connections[slot].unparsed.len();
            if kept > 0 {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.process(slot, link, &mut buffer, kept);
                self.buffer = buffer;
            }
            if !self.connections[slot].is_paused {
                self.connections.enqueue(slot);
                self.waiter.note_resumed(slot, &self.connections[slot]);
            }
        }
    }

    /// Replays the next piece of the log to restarted processes.
    pub fn send_replay(&mut self) {
        if self.relay.recovery().has_replay_work() && self.relay.replay_next() {
            self.drain(&[]);
        }
    }

    /// Posts the number of a frame that diverged from the one that an earlier incarnation sent.
    fn post_refused_frame(&mut self, slot: usize, link: LinkId) {
        let refused = self.relay.ports().diverged_frame(link);
        let transport = &mut self.connections[slot].transport;
        if let (Some(frame), Some(Transport::Shm(shm))) = (refused, transport) {
            shm.0.set_close_code(frame);
        }
    }

    /// Records that the connection has brought a valid frame.
    #[inline]
    fn note_valid(&mut self, slot: usize) {
        if !self.violations.is_empty()
            && let Phase::Endpoint { address, .. } = self.connections[slot].phase
        {
            self.violations.reset(address);
        }
    }

    /// Records that the connection has brought an invalid frame.
    fn note_violation(&mut self, slot: usize, malformed: Malformed) {
        let connection = &self.connections[slot];
        let Phase::Endpoint { address, .. } = connection.phase else { return };
        let is_shm = matches!(connection.transport, Some(Transport::Shm(_)));
        if !self.relay.is_recovery_enabled() && self.violations.note(address, is_shm) {
            self.refused.push((address, malformed));
        }
    }
}
