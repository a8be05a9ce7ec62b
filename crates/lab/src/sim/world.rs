//! The simulated world: processes, pipes between processes, and the driver that moves bytes and
//! performs the actions of endpoints.
//!
//! What enters: the choices of the [schedule](super::schedule) (which bytes move next, which path
//! fails) and of the [applications](super::commands). What leaves: violations. What may never
//! happen: an endpoint requests something that its driver cannot do.
//! [`DrivenEndpoint`](landbridge_testbed::endpoint::DrivenEndpoint) finds most such requests.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, CompletionKind, OperationCompletion, Peer,
};
use landbridge_proto::id::Address;
use landbridge_proto::path::time::Time;
use landbridge_testbed::endpoint::{ByteStore, REFUSED};

use super::channel_record::ChannelRecord;
use super::memory::{Arena, Piece};
use super::model::{Model, PendingOperation};
use super::node::{Node, PATHS_MAX, Pull, ReadRequest, random_config, random_pipes};
use super::pipe::Pipe;
use super::random::Random;
use super::remote::{self, CompletionContext, Region};
use super::{EventCounts, Violation, require};

/// The state of one simulation run.
pub struct World {
    pub random: Random,
    pub nodes: Vec<Node>,
    /// Pipes by sender, receiver and number of the path: `[from][to][path]`.
    pub pipes: Vec<Vec<Vec<Pipe>>>,
    /// Broken paths that can be reopened: the two processes and the number of the path.
    pub broken: Vec<(usize, usize, usize)>,
    /// Paths by which nothing arrives although no process is notified, by direction and number of
    /// the path: `[from][to][path]`.
    pub blackholed: Vec<Vec<[bool; PATHS_MAX]>>,
    pub arena: Arena,
    pub model: Model,
    pub counts: EventCounts,
    /// What is known of each channel: `[from][to]`.
    pub channels: Vec<Vec<ChannelRecord>>,
    pub rates: Rates,
    pub now: Time,
    /// Whether a frame has vanished without a notification of its sender.
    pub has_silent_loss: bool,
    /// Number of steps so far.
    pub steps: usize,
    trace: bool,
}

/// How often a run injects faults, and how large its messages are.
#[derive(Clone, Copy)]
pub struct Rates {
    pull_failure_percent: u64,
    /// Payloads that are corrupted in transit, in percent.
    pub corrupt_percent: u64,
    /// Steps in which a path breaks, per thousand.
    pub break_permille: u64,
    /// Frames that vanish on paths with silent loss, per thousand.
    pub silent_loss_permille: u64,
    /// Commands before which a single-path period begins, in percent.
    pub single_path_percent: u64,
    /// Size of the largest message in bytes.
    pub largest: u64,
}

/// Sizes among which a run's largest message is chosen. Large sizes are rare, because large
/// messages take time and find few more errors.
const SIZES: [u64; 9] = [10, 200, 200, 2_000, 2_000, 2_000, 20_000, 20_000, 300_000];

impl World {
    pub fn new(seed: u64, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let count = random.pick(&[2, 2, 2, 3, 3, 4, 5, 6]);
        let mut arena = Arena::default();
        let window = random.pick(&[2, 16, 100, 1_000, 5_000, 60_000]);
        let largest = random.pick(&SIZES);
        let has_anonymous = random.percent(10);
        let mut nodes: Vec<Node> = (0..count)
            .map(|index| {
                let anonymous = has_anonymous && index == 0;
                let address =
                    if anonymous { Address::ANONYMOUS } else { Address::new(index as u32 * 7, 0) };
                let paths = vec![Vec::new(); count];
                let copies_max = random.pick(&[0, 500, 20_000, u64::MAX, u64::MAX]);
                let config = random_config(address, window, &mut random);
                Node::new(config, paths, Region::new(index, &mut arena), copies_max)
            })
            .collect();
        let pipes = random_pipes(&mut nodes, &mut random, largest);
        let pull_failure_percent = random.pick(&[0, 0, 20, 100]);
        let (corrupt_percent, break_permille) =
            (random.pick(&[0, 0, 1, 10]), random.pick(&[0, 0, 2, 20]));
        let silent_loss_permille = random.pick(&[0, 5, 50, 100]);
        let single_path_percent = random.pick(&[0, 0, 0, 2, 10]);
        let rates = Rates {
            pull_failure_percent,
            corrupt_percent,
            break_permille,
            silent_loss_permille,
            single_path_percent,
            largest,
        };
        Self {
            random,
            nodes,
            pipes,
            broken: Vec::new(),
            blackholed: vec![vec![[false; PATHS_MAX]; count]; count],
            arena,
            model: Model::new(count),
            counts: EventCounts::default(),
            channels: vec![vec![ChannelRecord::default(); count]; count],
            rates,
            now: Time(0),
            has_silent_loss: silent_loss_permille > 0,
            steps: 0,
            trace,
        }
    }

    pub fn log_step(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{}", what());
        }
    }

    /// The peer number that node `index` uses for `other`.
    pub fn peer(&mut self, index: usize, other: usize) -> Peer {
        if let Some(peer) = self.nodes[index].peers[other] {
            return peer;
        }
        let address = self.nodes[other].config.address;
        let node = &mut self.nodes[index];
        let peer = node.endpoint.peer(address);
        node.peers[other] = Some(peer);
        for path_id in 0..node.paths[other].len() {
            let is_broken = |&(a, b, l): &(usize, usize, usize)| {
                l == path_id && ((a, b) == (index, other) || (b, a) == (index, other))
            };
            if !self.broken.iter().any(is_broken) {
                let path = node.paths[other][path_id];
                node.endpoint.channel_mut(peer).open_path(PathId(path_id as u8), path);
            }
        }
        peer
    }

    /// Performs the actions that the endpoint of `node` requests, in the order that the drain rule
    /// demands.
    pub fn drain(&mut self, node: usize) -> Result<(), Violation> {
        let mut atomics = Vec::new();
        while let Some(action) = self.nodes[node].endpoint.poll_action() {
            self.act(node, action, &mut atomics)?;
        }
        for (from, request) in atomics {
            self.perform_atomic(node, from, request)?;
        }
        while let Some(peer) = self.nodes[node].endpoint.next_busy() {
            let other = self.nodes[node].index_of(peer);
            let path_count = self.pipes[node][other].len();
            self.nodes[node].ready.extend((0..path_count).map(|path_id| (other, path_id)));
        }
        Ok(())
    }

    fn act(
        &mut self,
        index: usize,
        action: Action<Piece>,
        atomics: &mut Vec<(usize, AtomicRequest)>,
    ) -> Result<(), Violation> {
        self.log_step(|| format!("  {index}: {action:?}"));
        let node = &mut self.nodes[index];
        node.endpoint.perform(&action, &mut self.arena)?;
        match action {
            Action::Complete(done) => return self.finish(index, done),
            Action::Pull { peer, recv, address, memory, at, length } => {
                let from = node.index_of(peer);
                node.pulls.push_back(Pull { from, recv, address, memory, at, length });
            }
            Action::Serve { peer, op, key, offset, length } => {
                let to = node.index_of(peer);
                node.read_requests.push_back(ReadRequest { to, op, key, offset, length });
            }
            Action::DiscardPayload { .. } => self.counts.count("payloads diverted"),
            Action::AddressAdvertisement { .. } => {
                return Err(Violation(
                    "an advertised address, which no simulated endpoint has".into(),
                ));
            }
            Action::Atomic { peer, request } => atomics.push((node.index_of(peer), request)),
            Action::CopyUnexpected { .. }
            | Action::DropUnexpected { .. }
            | Action::Release { .. } => (),
        }
        Ok(())
    }

    fn finish(&mut self, node: usize, done: OperationCompletion) -> Result<(), Violation> {
        let source = done.source.map(|peer| self.nodes[node].index_of(peer));
        if done.kind == CompletionKind::RemoteWrite {
            return self.finish_remote_write(node, source, &done);
        }
        let context = done.ticket.context;
        let ticket = self.model.operations.get(&context);
        require!(ticket.is_none_or(|ticket| ticket.node() == node), "{done:?} of another process");
        let Some(PendingOperation::Remote(ticket)) = ticket else {
            return self.model.finish(&done, source, &mut self.arena, &mut self.counts);
        };
        let surroundings = CompletionContext {
            target: self.nodes[ticket.to].region.piece,
            is_lost: self.model.failed[node][ticket.to],
            writes_with_data: &self.model.writes_with_data,
            arena: &self.arena,
        };
        ticket.finish(&done, context, &surroundings, &mut self.counts)?;
        self.arena.free(ticket.piece)?;
        if let Some(result) = ticket.result {
            self.arena.free(result)?;
        }
        self.model.operations.remove(&context);
        Ok(())
    }

    fn finish_remote_write(
        &mut self,
        node: usize,
        source: Option<usize>,
        done: &OperationCompletion,
    ) -> Result<(), Violation> {
        let write = done.data.and_then(|data| self.model.writes_with_data.get_mut(data as usize));
        let Some(write) = write else {
            return Err(Violation(format!("{done:?} without a write")));
        };
        write.times += 1;
        require!(write.times == 1, "{done:?} twice");
        require!(!write.is_refused, "{done:?} of a write that was refused");
        require!(write.to == node && Some(write.from) == source, "{done:?} from elsewhere");
        Ok(())
    }

    fn perform_atomic(
        &mut self,
        index: usize,
        from: usize,
        request: AtomicRequest,
    ) -> Result<(), Violation> {
        let peer = self.peer(index, from);
        let node = &mut self.nodes[index];
        let operands = node.endpoint.take_operands(peer);
        match node.region.resolve(request.key, request.offset, request.length as u64) {
            None => node.endpoint.channel_mut(peer).refuse(request.op, REFUSED),
            Some(at) => {
                let piece = node.region.piece;
                let old = remote::perform(&request, &operands, piece, at, &mut self.arena)?;
                if request.fetch {
                    let memory = self.arena.keep(old, false);
                    node.endpoint.channel_mut(peer).answer(request.op, memory);
                }
            }
        }
        self.drain(index)
    }

    /// Answers the oldest read request at node `index`; returns false if there is none.
    pub fn serve(&mut self, index: usize) -> Result<bool, Violation> {
        let Some(ReadRequest { to, op, key, offset, length }) =
            self.nodes[index].read_requests.pop_front()
        else {
            return Ok(false);
        };
        let peer = self.peer(index, to);
        let region = &self.nodes[index].region;
        match region.resolve(key, offset, length) {
            None => self.nodes[index].endpoint.channel_mut(peer).refuse(op, REFUSED),
            Some(at) => {
                let memory = self.arena.copy(&region.piece, at, length)?;
                self.nodes[index].endpoint.channel_mut(peer).serve(op, memory);
            }
        }
        self.drain(index)?;
        Ok(true)
    }

    /// Performs the oldest pull at node `index`; returns false if there is none.
    pub fn pull(&mut self, index: usize) -> Result<bool, Violation> {
        let Some(pull) = self.nodes[index].pulls.pop_front() else {
            return Ok(false);
        };
        // A sender that has given this node up has its memory back, so the driver must not read the
        // memory any more.
        let is_gone = self.model.failed[pull.from][index];
        let outcome = if is_gone || self.random.percent(self.rates.pull_failure_percent) {
            self.counts.count("pulls that failed");
            Err(())
        } else {
            self.counts.count("pulls");
            let bytes = self.arena.read_address(pull.address, pull.length)?.to_vec();
            self.arena.write(&pull.memory, pull.at, &bytes)?;
            Ok(())
        };
        self.nodes[index].endpoint.messages_mut().handle_pulled(pull.recv, outcome);
        self.drain(index)?;
        Ok(true)
    }
}
