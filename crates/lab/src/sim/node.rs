//! A simulated process: an endpoint and the state of its driver.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use landbridge_proto::endpoint::{Config, Endpoint, Memory, PathProperties, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::Header;

use super::datagrams::LossyNetwork;
use super::memory::Piece;
use super::pipe::Pipe;
use super::random::Random;
use super::remote::Region;
use super::{Violation, require};

/// A process.
pub struct Node {
    pub endpoint: Endpoint<Piece>,
    pub config: Config,
    /// The peer numbers that the process uses for other processes, once assigned.
    pub peers: Vec<Option<Peer>>,
    /// Path properties, by process and number of the path.
    pub paths: Vec<Vec<PathProperties>>,
    pub region: Region,
    pub stores: BTreeMap<u32, UnexpectedPayload>,
    /// Frames that arrived out of order, by sender and first byte.
    pub early: BTreeMap<(usize, u64), EarlyFrame>,
    pub scratch: Vec<Vec<u8>>,
    /// Copies of bytes that may be retransmitted, by slot. `copies_max` is the number of copied
    /// bytes from which on no further copies are made.
    pub copies: BTreeMap<u32, Piece>,
    pub copies_max: u64,
    /// Pending reads of other processes' memory.
    pub pulls: VecDeque<Pull>,
    /// Requests of peers that have not been answered.
    pub read_requests: VecDeque<ReadRequest>,
    /// Peers with frames to send, and the paths that may have capacity.
    pub ready: BTreeSet<(usize, usize)>,
}

/// The payload of an unexpected message.
pub struct UnexpectedPayload {
    pub from: usize,
    pub size: u64,
    pub bytes: Vec<u8>,
}

/// A frame that arrived out of order.
pub struct EarlyFrame {
    pub header: Header,
    pub bytes: Vec<u8>,
}

/// A pending read of another process's memory.
pub struct Pull {
    pub from: usize,
    pub recv: u32,
    pub address: u64,
    pub memory: Piece,
    pub at: u64,
    pub length: u64,
}

/// A read request that has not been answered.
pub struct ReadRequest {
    pub to: usize,
    pub op: u32,
    pub key: u64,
    pub offset: u64,
    pub length: u64,
}

impl Node {
    pub fn new(
        config: Config,
        paths: Vec<Vec<PathProperties>>,
        region: Region,
        copies_max: u64,
    ) -> Self {
        Self {
            endpoint: Endpoint::new(config),
            config,
            peers: vec![None; paths.len()],
            scratch: vec![Vec::new(); paths.len()],
            paths,
            region,
            copies: BTreeMap::new(),
            copies_max,
            stores: BTreeMap::new(),
            early: BTreeMap::new(),
            pulls: VecDeque::new(),
            read_requests: VecDeque::new(),
            ready: BTreeSet::new(),
        }
    }

    /// Total bytes of copies.
    pub fn copied_bytes(&self) -> u64 {
        self.copies.values().map(|piece| piece.size()).sum()
    }

    pub fn index_of(&self, peer: Peer) -> usize {
        // `World::peer` has assigned every peer's number.
        self.peers.iter().position(|&other| other == Some(peer)).expect("a numbered peer")
    }

    pub fn take_store(&mut self, store: u32) -> Result<Vec<u8>, Violation> {
        let Some(UnexpectedPayload { bytes, size, .. }) = self.stores.remove(&store) else {
            return Err(Violation(format!("store {store} is filled from twice")));
        };
        require!(bytes.len() as u64 == size, "store {store} is used before it is filled");
        Ok(bytes)
    }
}

/// A random configuration of a process.
pub fn random_config(address: Address, eager_window: u32, random: &mut Random) -> Config {
    Config {
        address,
        eager_window,
        min_multi_recv: random.pick(&[0, 1, 50, 1_000]),
        operations_max: random.pick(&[3, 10, 1_000]),
    }
}

/// Random properties of a path, sometimes those of a path through relays.
pub fn random_path(random: &mut Random, largest: u64) -> PathProperties {
    // Bounds the number of frames of one message, so that a run ends in time.
    let least = largest / 200;
    if random.percent(20) {
        return PathProperties::RELAY;
    }
    PathProperties {
        payload_max: random.pick(&[1, 7, 64, 1_000, 8_192, 1 << 20]).max(least as u32),
        eager_max: random.pick(&[0, 1, 50, 500, 8_192, 1 << 20]),
        first_piece: random.pick(&[0, 1, 30, 400, 8_192]),
        pull: random.percent(40),
        window: random.pick(&[1, 2, 100, 1_000, 10_000, 1 << 20]).max(least),
        ahead: random.percent(50),
        lossless: random.percent(30),
        checked: random.percent(50),
        copy_max: random.pick(&[0, 0, 10, 1_000, 1 << 20]),
        spare: random.percent(20),
        silent_loss: false,
        datagram: None,
        reorders: random.percent(20),
    }
}

/// A pipe with a random capacity, small or large, or a network of datagrams.
pub fn random_pipe(path: &PathProperties, random: &mut Random) -> Pipe {
    let capacity = random.pick(&[100, 200, 1_000, 10_000, 200_000]);
    let mut pipe = Pipe::new(capacity, random.percent(60));
    pipe.network = path.datagram.map(|_| LossyNetwork::random(random));
    pipe
}
