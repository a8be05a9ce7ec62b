//! The endpoint by which the logs of a recorded process reach other nodes: an [`Engine`] of its
//! own, with buffers for what arrives.
//!
//! What enters: messages of the transport ([`super::log_transport`]). What leaves: completions, in
//! the queue. What may never happen: a buffer is freed while the engine may write to it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use landbridge_drive::link::node_log::{NodeLogs, TRANSFER_BYTES_MAX};
use landbridge_proto::id::Address;
use landbridge_proto::log::contact::Contact;
use landbridge_proto::log::transfer::{POSITION_BYTES, TransferHeader};

use super::request::{CompletionLevel, Iov, RecvRequest, SendRequest};
use super::{EndpointRole, Engine, PARK_MILLIS, Setup};
use crate::abi::{self, Errno, FiAddr};
use crate::av::Av;
use crate::mr::MrTable;
use crate::queue::{EntryFormat, Queue};
use crate::sink::{Counters, Sink};

/// Buffers for arriving messages.
const BUFFERS: usize = 4;
/// Bytes of a buffer: a message of the greatest length fits, and all buffers together fit the
/// processor's cache.
const BUFFER_BYTES: usize = 192 << 10;
const _: () = assert!(BUFFER_BYTES >= POSITION_BYTES + TRANSFER_BYTES_MAX);
/// Longest time that a transport waits at its end for others, whom the agents inform as well.
const LEAVE_TIME_MAX: Duration = Duration::from_millis(50);

/// The endpoint of a transport, with what it needs. The engine ends before the buffers.
pub(super) struct Carriage {
    pub engine: Box<Engine>,
    pub av: Arc<Av>,
    pub queue: Arc<Queue>,
    buffers: Vec<Box<[u8]>>,
}

impl Carriage {
    /// Opens an endpoint with the next generation of this process, and makes it known. `moves`: how
    /// often the process has moved to another node.
    ///
    /// # Errors
    /// There are no sockets, or the environment of this process is not one of the launcher.
    pub fn open(logs: &NodeLogs, process: u16, moves: u32) -> io::Result<(Carriage, u32)> {
        let before = logs.generation(usize::from(process));
        let generation = Contact::next_generation(before, moves).ok_or_else(|| {
            io::Error::other("it has opened more transports than can be numbered")
        })?;
        let queue = Arc::new(Queue::new(EntryFormat::Tagged, 0));
        let av = Arc::new(Av::with_capacity(0));
        let sink = Sink {
            transmit: Some(Arc::clone(&queue)),
            receive: Some(Arc::clone(&queue)),
            counters: Counters::default(),
        };
        let last = logs.contact(usize::from(process));
        let endpoint = Contact::next_endpoint(last.as_ref(), generation);
        let setup = Setup {
            role: EndpointRole::Transport(Address::new(process.into(), endpoint)),
            domain_mr: Arc::new(MrTable::default()),
            av: Arc::clone(&av),
            sink,
            own_format: true,
            bind: None,
            min_multi_recv: POSITION_BYTES + TRANSFER_BYTES_MAX,
            source_wanted: false,
        };
        let engine = Engine::open(setup).map_err(|error| io::Error::from_raw_os_error(error.0))?;
        let buffers = (0..BUFFERS).map(|_| vec![0; BUFFER_BYTES].into_boxed_slice()).collect();
        let mut carriage = Carriage { engine: Box::new(engine), av, queue, buffers };
        for buffer in 0..BUFFERS {
            carriage.post(buffer)?;
        }
        let name = carriage.engine.name().try_into().map_err(io::Error::other)?;
        logs.write_contact(&Contact { generation, name });
        logs.ring_agent();
        Ok((carriage, generation))
    }

    /// Does all work that is possible now. The thread waits elsewhere.
    pub fn poll(&mut self) {
        self.engine.poll_state.note_time(&mut self.engine.connections.data);
        self.engine.poll();
    }

    /// Why the endpoint has given up a peer, if it has.
    pub fn failure(&mut self, number: FiAddr) -> Option<i32> {
        let peer = self.engine.connections.data.peer_of(number).ok()?;
        self.engine.connections.data.core.channel(peer).failed()
    }

    /// Gives up a peer, and all that is under way to it.
    pub fn give_up(&mut self, number: FiAddr) {
        if let Ok(peer) = self.engine.connections.data.peer_of(number) {
            self.engine.connections.fail_peer(peer, libc::ECONNRESET);
        }
    }

    /// Says to all peers that nothing more comes, and waits for a moment until they know. Logs what
    /// the paths have carried.
    pub fn leave(&mut self) {
        let data = &mut self.engine.connections.data;
        data.path_report().log_paths();
        for peer in data.peers.active(&data.core) {
            data.core.channel_mut(peer).goodbye();
        }
        self.engine.connections.run_actions();
        let deadline = Instant::now() + LEAVE_TIME_MAX;
        while !self.engine.connections.data.core.is_drained() && Instant::now() < deadline {
            self.engine.park(PARK_MILLIS);
        }
    }

    pub fn send(
        &mut self,
        target: FiAddr,
        header: TransferHeader,
        payload: &[Iov],
        context: usize,
        inject: bool,
    ) -> Result<(), Errno> {
        self.engine.send(&SendRequest {
            target,
            payload,
            tag: None,
            data: Some(header.emit()),
            context,
            inject,
            notify: !inject,
            level: CompletionLevel::Transmit,
        })
    }

    /// Gives a buffer to the engine.
    pub fn post(&mut self, buffer: usize) -> io::Result<()> {
        let memory = &mut self.buffers[buffer];
        let payload = [Iov { base: memory.as_mut_ptr(), len: memory.len() }];
        let posted = self.engine.recv(&RecvRequest {
            source: abi::ADDR_UNSPEC,
            payload: &payload,
            tag: None,
            context: buffer,
            notify: true,
            multi: true,
        });
        posted.map_err(|error| io::Error::from_raw_os_error(error.0))
    }
}
