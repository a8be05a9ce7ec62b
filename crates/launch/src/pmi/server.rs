//! PMI-1 as one agent of the tree serves it.
//!
//! In: lines of the agent's own ranks, and messages of the agents next to it. Out:
//! [`ServerEvent`]s. A barrier costs each edge of the tree exactly one message up (with every new
//! key below) and one message down (with every new key of the group), however many keys there are.
//! No `get` leaves the node, because every agent has every key after a barrier.
//!
//! An agent has one server for each process group that it takes part in: the job's first processes
//! are group 0, and each spawn makes another group, with keys and barriers of its own. Ranks are
//! named by their process index, which is unique in the job.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::kvs::{Delta, Kvs};
use super::spawn::{self, Request, SpawnCollector, SpawnProgress};
use super::wire::{self, KEY_MAX, KVSNAME_MAX, PmiCommand, Reply, VALUE_MAX};

/// The description of a process group, for replies that do not depend on the rank.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Number of the group; 0: the job's first processes.
    pub group: u32,
    /// Name of the key-value space, unique for every group of every job: MPICH names shared memory
    /// after it.
    pub kvsname: String,
    /// Number of slots, MPI_UNIVERSE_SIZE, if some are free; else 0.
    pub universe: u32,
    /// Value of `PMI_process_mapping`.
    pub mapping: String,
}

/// How far a rank has come with its process manager.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// The rank has sent nothing: perhaps it is not an MPI program.
    #[default]
    Silent,
    /// The rank is between `init` and `finalize`.
    Joined,
    Finalized,
}

impl Stage {
    /// The stage of a rank at this stage after the rank has sent this line.
    pub fn after(self, line: &str) -> Stage {
        match PmiCommand::parse(line).as_ref().map(|command| command.name.as_str()) {
            Some("init") => Stage::Joined,
            Some("finalize") => Stage::Finalized,
            _ => self,
        }
    }
}

/// A request that only the root of the tree can answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameRequest {
    Publish { service: String, port: String },
    Unpublish { service: String },
    Lookup { service: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerEvent {
    /// Write this line to the rank.
    Reply { rank: u32, line: String },
    /// All ranks of the group here and below have reached the barrier: send one message to the
    /// agent above.
    BarrierUp { group: u32, delta: Delta },
    /// The barrier is over: send one message to each agent below that takes part.
    BarrierDown { group: u32, delta: Delta },
    /// The rank has called MPI_Abort.
    Abort { rank: u32, code: i32, message: String },
    /// A name request for the root of the tree.
    Name { rank: u32, request: NameRequest },
    /// A spawn for the root of the tree: the rank waits for the answer.
    Spawn { rank: u32, request: Request },
    /// The rank has received the answer that its spawn failed; the user is to read the reason.
    SpawnRefused { rank: u32, problem: String },
}

#[derive(Default)]
struct ServedRank {
    stage: Stage,
    in_barrier: bool,
    /// Application number of the rank: the index of its command in a spawn.
    appnum: u32,
    spawning: SpawnCollector,
}

pub struct Server {
    config: ServerConfig,
    kvs: Kvs,
    ranks: BTreeMap<u32, ServedRank>,
    /// Agents below that take part, and whether each has reached the barrier.
    children: BTreeMap<usize, bool>,
    /// The barrier message to the agent above is sent, and the release has not arrived.
    waiting_for_release: bool,
    /// Number of barriers that are over.
    released: u32,
    /// A rank here or below that has ended outside a barrier, and will never enter another barrier.
    ended: Option<u32>,
    events: VecDeque<ServerEvent>,
}

impl Server {
    /// The root's server of a group in which `clusters` take part. The root runs no ranks of the
    /// group.
    pub fn of_root(group: u32, clusters: impl IntoIterator<Item = usize>) -> Server {
        let config =
            ServerConfig { group, kvsname: String::new(), universe: 0, mapping: String::new() };
        Server::new(config, [], clusters, &Delta::new())
    }

    /// Makes a server. `ranks`: process index and application number of each rank of the agent.
    /// `keys`: keys that are known from the beginning.
    pub fn new(
        config: ServerConfig,
        ranks: impl IntoIterator<Item = (u32, u32)>,
        children: impl IntoIterator<Item = usize>,
        keys: &Delta,
    ) -> Server {
        let ranks = ranks
            .into_iter()
            .map(|(rank, appnum)| (rank, ServedRank { appnum, ..ServedRank::default() }));
        let mut kvs = Kvs::default();
        kvs.merge(keys);
        kvs.merge(&vec![("PMI_process_mapping".to_string(), config.mapping.clone())]);
        Server {
            config,
            kvs,
            ranks: ranks.collect(),
            children: children.into_iter().map(|child| (child, false)).collect(),
            waiting_for_release: false,
            released: 0,
            ended: None,
            events: VecDeque::new(),
        }
    }

    /// Takes over the ranks of another agent. `fresh`: keys that these ranks have put and no
    /// barrier has carried up yet. `has_reached`: all of these ranks have reached the present
    /// barrier, and the agent above has received the message.
    pub fn adopt_state(
        &mut self,
        fresh: impl Iterator<Item = (String, String)>,
        has_reached: bool,
    ) {
        fresh.for_each(|(key, value)| self.kvs.put(&key, &value));
        self.waiting_for_release = has_reached;
    }

    /// Notes that agent `to` below has taken over the ranks of agent `from`. Returns whether `from`
    /// had reached the present barrier with all its ranks.
    pub fn reassign(&mut self, from: usize, to: usize) -> bool {
        let has_reached = self.children.remove(&from).unwrap_or_default();
        self.children.insert(to, has_reached);
        has_reached
    }

    /// Every key that is known here.
    pub fn keys(&self) -> Delta {
        self.kvs.all()
    }

    /// Number of barriers that are over.
    pub fn released(&self) -> u32 {
        self.released
    }

    pub fn kvsname(&self) -> &str {
        &self.config.kvsname
    }

    /// The agents below that take part.
    pub fn children(&self) -> impl Iterator<Item = usize> {
        self.children.keys().copied()
    }

    pub fn stage(&self, rank: u32) -> Stage {
        self.ranks.get(&rank).map_or(Stage::Silent, |local| local.stage)
    }

    /// Whether this rank waits for others in a barrier.
    pub fn is_waiting(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|local| local.in_barrier)
    }

    fn someone_waits(&self) -> bool {
        self.ranks.values().any(|local| local.in_barrier)
            || self.children.values().any(|&reached| reached)
    }

    /// A rank that has ended while others wait for it in a barrier, as far as this agent knows.
    pub fn stuck(&self) -> Option<u32> {
        self.ended.filter(|_| self.someone_waits())
    }

    /// Notes that a rank here or below has ended.
    pub fn handle_ended(&mut self, rank: u32) {
        if !self.ranks.get(&rank).is_some_and(|local| local.in_barrier) {
            self.ended.get_or_insert(rank);
        }
    }

    /// Handles a line of one of this agent's own ranks.
    pub fn handle_line(&mut self, rank: u32, line: &str) {
        let Some(command) = PmiCommand::parse(line) else {
            return self
                .reply(rank, Reply::new("error").with("rc", -1).with("msg", "not_a_command"));
        };
        match command.name.as_str() {
            "init" => self.handle_init(rank),
            "get_maxes" => self.reply(
                rank,
                Reply::new("maxes")
                    .with("rc", 0)
                    .with("kvsname_max", KVSNAME_MAX)
                    .with("keylen_max", KEY_MAX)
                    .with("vallen_max", VALUE_MAX),
            ),
            "get_appnum" => {
                let appnum = self.ranks.get(&rank).map_or(0, |local| local.appnum);
                self.reply(rank, Reply::new("appnum").with("rc", 0).with("appnum", appnum));
            }
            "get_my_kvsname" => {
                let name = self.config.kvsname.clone();
                self.reply(rank, Reply::new("my_kvsname").with("rc", 0).with("kvsname", name));
            }
            "get_universe_size" => {
                // Programs take a universe that is full as a reason to spawn nothing, though processes
                // can be spawned there. A negative size makes the attribute absent, as Hydra does.
                let size = match self.config.universe {
                    0 => -1,
                    slots => i64::from(slots),
                };
                self.reply(rank, Reply::new("universe_size").with("rc", 0).with("size", size));
            }
            "put" => self.handle_put(rank, &command),
            "get" => self.handle_get(rank, &command),
            "barrier_in" => self.handle_barrier(rank),
            "finalize" => self.handle_finalize(rank),
            "abort" => self.handle_abort(rank, &command, line),
            "publish_name" | "unpublish_name" | "lookup_name" => self.handle_name(rank, &command),
            other => {
                let reply = Reply::new(other).with("rc", -1).with("msg", "unknown_command");
                self.reply(rank, reply);
            }
        }
    }

    /// Handles a line of one of this agent's own ranks, or a block as [`wire::block_text`] writes
    /// it.
    pub fn handle_question(&mut self, rank: u32, text: &str) {
        match wire::block_lines(text) {
            Some(lines) => self.handle_block(rank, &lines),
            None => self.handle_line(rank, text),
        }
    }

    /// Handles a block of one of this agent's own ranks: a command of a spawn.
    pub fn handle_block(&mut self, rank: u32, lines: &[String]) {
        let Some(local) = self.ranks.get_mut(&rank) else { return };
        match local.spawning.handle_block(lines) {
            SpawnProgress::Unfinished => {}
            SpawnProgress::Whole(request) => {
                self.events.push_back(ServerEvent::Spawn { rank, request })
            }
            SpawnProgress::Refused(problem) => {
                self.events.push_back(ServerEvent::Reply { rank, line: spawn::answer(false) });
                self.events.push_back(ServerEvent::SpawnRefused { rank, problem });
            }
        }
    }

    /// Notes that an agent below has reached the barrier with all its ranks.
    pub fn handle_barrier_up(&mut self, child: usize, delta: Delta) {
        self.children.insert(child, true);
        self.kvs.add_fresh(delta);
        self.check_barrier();
    }

    /// Releases the barrier; `delta` holds every key that is new since the last barrier.
    pub fn handle_barrier_down(&mut self, delta: Delta) {
        self.waiting_for_release = false;
        self.released += 1;
        self.kvs.merge(&delta);
        self.children.values_mut().for_each(|reached| *reached = false);
        for (&rank, local) in &mut self.ranks {
            if std::mem::take(&mut local.in_barrier) {
                self.events.push_back(ServerEvent::Reply { rank, line: barrier_out() });
            }
        }
        if !self.children.is_empty() {
            self.events.push_back(ServerEvent::BarrierDown { group: self.config.group, delta });
        }
    }

    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    fn reply(&mut self, rank: u32, reply: Reply) {
        self.events.push_back(ServerEvent::Reply { rank, line: reply.line() });
    }

    fn set_stage(&mut self, rank: u32, stage: Stage) {
        if let Some(local) = self.ranks.get_mut(&rank) {
            local.stage = stage;
        }
    }

    fn handle_init(&mut self, rank: u32) {
        self.set_stage(rank, Stage::Joined);
        let reply = Reply::new("response_to_init").with("rc", 0);
        self.reply(rank, reply.with("pmi_version", 1).with("pmi_subversion", 1));
    }

    fn handle_put(&mut self, rank: u32, command: &PmiCommand) {
        let (Some(key), Some(value)) = (command.argument("key"), command.argument("value")) else {
            let reply = Reply::new("put_result").with("rc", -1).with("msg", "key_or_value_missing");
            return self.reply(rank, reply);
        };
        self.kvs.put(key, value);
        self.reply(rank, Reply::new("put_result").with("rc", 0).with("msg", "success"));
    }

    fn handle_get(&mut self, rank: u32, command: &PmiCommand) {
        let reply = Reply::new("get_result");
        let reply = match command.argument("key").and_then(|key| self.kvs.value(key)) {
            Some(value) => reply.with("rc", 0).with("msg", "success").with("value", value),
            None => reply.with("rc", -1).with("msg", "key_not_found").with("value", "unknown"),
        };
        self.reply(rank, reply);
    }

    fn handle_barrier(&mut self, rank: u32) {
        if let Some(local) = self.ranks.get_mut(&rank) {
            local.in_barrier = true;
        }
        self.check_barrier();
    }

    fn handle_finalize(&mut self, rank: u32) {
        self.set_stage(rank, Stage::Finalized);
        self.reply(rank, Reply::new("finalize_ack").with("rc", 0));
    }

    fn handle_abort(&mut self, rank: u32, command: &PmiCommand, line: &str) {
        let code = command.argument("exitcode").and_then(|code| code.parse().ok()).unwrap_or(1);
        let message = line.split_once("message=").map_or("", |(_, message)| message).to_string();
        self.events.push_back(ServerEvent::Abort { rank, code, message });
    }

    fn handle_name(&mut self, rank: u32, command: &PmiCommand) {
        let service = command.argument("service").unwrap_or("").to_string();
        let request = match command.name.as_str() {
            "publish_name" => {
                let port = command.argument("port").unwrap_or("").to_string();
                NameRequest::Publish { service, port }
            }
            "unpublish_name" => NameRequest::Unpublish { service },
            _ => NameRequest::Lookup { service },
        };
        self.events.push_back(ServerEvent::Name { rank, request });
    }

    fn check_barrier(&mut self) {
        let all_ranks = self.ranks.values().all(|local| local.in_barrier);
        let all_children = self.children.values().all(|&reached| reached);
        if all_ranks && all_children && !self.waiting_for_release {
            self.waiting_for_release = true;
            let delta = self.kvs.take_fresh();
            self.events.push_back(ServerEvent::BarrierUp { group: self.config.group, delta });
        }
    }
}

/// The answer line to a rank whose barrier is over.
pub fn barrier_out() -> String {
    Reply::new("barrier_out").with("rc", 0).line()
}

/// The names that ranks have published, held by the root of the tree.
#[derive(Default)]
pub struct Names(BTreeMap<String, String>);

impl Names {
    /// Handles a name request; returns the reply line for the rank.
    pub fn handle_request(&mut self, request: NameRequest) -> String {
        let (command, result) = match request {
            NameRequest::Publish { service, port } => {
                ("publish_result", self.publish(service, port))
            }
            NameRequest::Unpublish { service } => {
                ("unpublish_result", self.0.remove(&service).map(|_| None))
            }
            NameRequest::Lookup { service } => {
                ("lookup_result", self.0.get(&service).cloned().map(Some))
            }
        };
        let reply = Reply::new(command);
        match result {
            Some(Some(port)) => reply.with("info", "ok").with("rc", 0).with("port", port).line(),
            Some(None) => reply.with("info", "ok").with("rc", 0).line(),
            None => reply.with("info", "no").with("rc", 1).with("msg", "name_not_usable").line(),
        }
    }

    fn publish(&mut self, service: String, port: String) -> Option<Option<String>> {
        if self.0.contains_key(&service) {
            return None;
        }
        self.0.insert(service, port);
        Some(None)
    }
}

#[cfg(test)]
mod tests;
