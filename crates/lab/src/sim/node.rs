//! A simulated process: an endpoint that the harness of the tests drives, and what the rest of its
//! driver has to do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{Config, Memory, PathProperties, Peer};
use landbridge_proto::id::Address;
use landbridge_testbed::endpoint::{DrivenEndpoint, IncomingFrame};

use super::datagrams::{LossyNetwork, random_kind, with_datagrams};
use super::memory::{Arena, Piece};
use super::pipe::Pipe;
use super::random::Random;
use super::remote::Region;
use super::{Violation, require};

/// Paths between two processes at most.
pub const PATHS_MAX: usize = 3;

/// A process.
pub struct Node {
    pub endpoint: DrivenEndpoint<Piece>,
    pub config: Config,
    /// The peer numbers that the process uses for other processes, once assigned.
    pub peers: Vec<Option<Peer>>,
    /// Path properties, by process and number of the path.
    pub paths: Vec<Vec<PathProperties>>,
    pub region: Region,
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
            endpoint: DrivenEndpoint::new(config),
            config,
            peers: vec![None; paths.len()],
            paths,
            region,
            copies: BTreeMap::new(),
            copies_max,
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

    /// The frame whose payload is arriving from another process by a path.
    pub fn incoming(&self, from: usize, path_id: usize) -> Option<&IncomingFrame<Piece>> {
        self.endpoint.incoming(self.peers[from]?, PathId(path_id as u8))
    }

    // ---- copies ------------------------------------------------------------------------

    /// Drops copies of frames that no channel holds any more.
    pub fn reap(&mut self, arena: &mut Arena) -> Result<(), Violation> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let peers = self.peers.iter().flatten();
        let kept: BTreeSet<u32> = peers
            .flat_map(|&peer| self.endpoint.channel(peer).retained_memory())
            .map(|piece| piece.slot())
            .collect();
        let (kept, free) =
            std::mem::take(&mut self.copies).into_iter().partition(|copy| kept.contains(&copy.0));
        self.copies = kept;
        let free: BTreeMap<_, _> = free;
        for piece in free.into_values() {
            arena.free(piece)?;
        }
        Ok(())
    }

    /// Checks that a frame that leaves may be copied. Answers are copied in any case, because no
    /// operation holds their bytes.
    pub fn check_copy(&self, node: usize, is_answer: bool, bytes: u64) -> Result<(), Violation> {
        let (copied, most) = (self.copied_bytes(), self.copies_max);
        let has_room = copied < most || is_answer;
        require!(has_room, "{node} copies {bytes} bytes, and has {copied} of {most}");
        Ok(())
    }

    /// Keeps a copy of bytes that may be retransmitted.
    pub fn keep_copy(&mut self, copy: Piece) -> Piece {
        self.copies.insert(copy.slot(), copy);
        copy
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
        unbounded: random.percent(30),
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

/// Makes a pipe for each path between every two processes; both ends of a path are of one kind.
pub fn random_pipes(nodes: &mut [Node], random: &mut Random, largest: u64) -> Vec<Vec<Vec<Pipe>>> {
    let count = nodes.len();
    let mut pipes: Vec<Vec<Vec<Pipe>>> =
        (0..count).map(|_| (0..count).map(|_| Vec::new()).collect()).collect();
    for a in 0..count {
        for b in a..count {
            let path_count = if a == b { 1 } else { random.pick(&[1, 1, 1, 2, 3]) };
            for _ in 0..path_count {
                let lossless = a == b || random.percent(30);
                let silent_loss = !lossless && random.percent(30);
                let datagram = if a == b { None } else { random_kind(random) };
                for (from, to) in [(a, b), (b, a)] {
                    if from == a || a != b {
                        let path = random_path(random, largest);
                        let path = with_datagrams(
                            PathProperties { lossless, silent_loss, ..path },
                            datagram,
                        );
                        nodes[from].paths[to].push(path);
                        pipes[from][to].push(random_pipe(&path, random));
                    }
                    if a == b {
                        break;
                    }
                }
            }
        }
    }
    pipes
}
