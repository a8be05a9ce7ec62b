//! Process groups that ranks spawn: the host and the index of each new process, and the state of
//! each group. The module is pure: requests enter, a [`SpawnOrder`] for the agents leaves.
//!
//! Indices of spawned processes follow the indices of the job's first processes. Each cluster owns
//! [`reserve`] such indices, so relays know from the start which cluster an index belongs to. No
//! index is used twice. Hosts are filled from the position of the last rank on, each with as many
//! processes as the host has slots, in a cycle; more processes than slots are no error. Info keys
//! can choose other hosts: see `docs/ARCHITECTURE.md`.

use std::collections::BTreeMap;
use std::path::Path;

use landbridge_proto::id::Address;
use landbridge_proto::log::layout::LOGGED_PROCESSES_MAX;
use landbridge_proto::route::routing_table::SPAWNED_MAX;

use crate::control::rank_state::Moved;
use crate::control::spawn_order::{self, Application, Block, SpawnOrder, Task};
use crate::control::{Job, Node};
use crate::pmi::spawn::{Request, SpawnCommand};
use crate::{mpi, plan};

/// Processes in one group at most: as many as a cluster can have in total.
const GROUP_MAX: u64 = SPAWNED_MAX as u64;

pub struct Groups {
    kvsname: String,
    applications: Vec<Application>,
    hosts: Vec<GroupHost>,
    /// The host of the next process, unless the host has filled its slots in this cycle.
    cursor: Cursor,
    /// Index of the first spawned process of cluster 0.
    first_index: u32,
    reserve: u32,
    /// Number of indices used, for each cluster.
    used: Vec<u32>,
    last_group: u32,
    groups: BTreeMap<u32, SpawnedGroup>,
    /// Blocks of spawned ranks, by first index.
    placed: BTreeMap<u32, PlacedRanks>,
}

#[derive(Debug, Clone)]
struct GroupHost {
    cluster: u32,
    cluster_name: String,
    name: String,
    slots: u32,
}

#[derive(Debug, Clone, Copy)]
struct Cursor {
    host: usize,
    /// Processes that the host has taken in this cycle.
    taken: u32,
}

/// The origin of a spawn request: the rank, and the cluster whose agent has forwarded the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawningRank {
    pub cluster: usize,
    pub rank: u32,
}

struct SpawnedGroup {
    spawner: SpawningRank,
    /// Hosts that have not reported yet whether they have started their processes.
    unanswered: usize,
    problem: Option<String>,
    size: u32,
    ended: u32,
}

struct PlacedRanks {
    group: u32,
    first_rank: u32,
    count: u32,
    host: usize,
}

/// The state of a spawn order.
#[derive(Debug, PartialEq, Eq)]
pub enum SpawnOutcome {
    Waiting,
    /// All processes of the group run; `spawner` waits for its answer.
    Running {
        spawner: SpawningRank,
    },
    /// The group failed: `spawner` waits for its answer, and every agent has to end the processes
    /// that were started.
    Failed {
        spawner: SpawningRank,
        problem: String,
        indices: Vec<u32>,
    },
}

/// Number of indices that processes of a job may have. `settings`: the job's environment.
pub fn indices(settings: &[(String, String)]) -> u32 {
    match mpi::senders_keep_logs(settings) {
        true => LOGGED_PROCESSES_MAX as u32,
        false => Address::INDEX_MAX + 1,
    }
}

/// Number of indices for spawned processes that each cluster owns behind the first `size` of all
/// [`indices`].
pub fn reserve(size: u32, clusters: usize, indices: u32) -> u32 {
    let room = u64::from(indices).saturating_sub(u64::from(size));
    let share = room / clusters.max(1) as u64;
    u32::try_from(share).unwrap_or(u32::MAX).min(SPAWNED_MAX)
}

impl Groups {
    /// Makes the state of a job without spawned groups. `nodes` holds the top agent of each
    /// cluster.
    pub fn new(job: &Job, nodes: &[Node]) -> Groups {
        let hosts = nodes.iter().flat_map(Node::hosts).filter(|node| !node.is_spare);
        let mut all: Vec<&Node> = hosts.collect();
        all.sort_by_key(|node| (node.cluster, node.first_rank));
        all.retain(|node| node.slots > 0);
        let last = all.iter().rposition(|node| node.rank_count > 0).unwrap_or(0);
        let taken = all.get(last).map_or(0, |node| node.rank_count);
        Groups {
            kvsname: job.kvsname.clone(),
            applications: job.applications.clone(),
            hosts: all.into_iter().map(GroupHost::new).collect(),
            cursor: Cursor { host: last, taken },
            first_index: job.size,
            reserve: reserve(job.size, nodes.len(), indices(&job.environment)),
            used: vec![0; nodes.len()],
            last_group: 0,
            groups: BTreeMap::new(),
            placed: BTreeMap::new(),
        }
    }

    /// Decides where the processes run that `spawner` requests.
    ///
    /// # Errors
    /// Returns the reason why the group cannot be made. The state is then unchanged.
    pub fn order(
        &mut self,
        spawner: SpawningRank,
        request: &Request,
    ) -> Result<SpawnOrder, String> {
        let count = request.count();
        if count == 0 || count > GROUP_MAX {
            return Err(format!("{count} processes at once; 1 to {GROUP_MAX} can be"));
        }
        let (mut cursor, mut used) = (self.cursor, self.used.clone());
        let mut blocks = Vec::new();
        let mut first_rank = 0;
        for (appnum, command) in (0..).zip(&request.commands) {
            for (host, count) in self.place(command, &mut cursor)? {
                let first_index = self.take_indices(&mut used, host, count)?;
                let GroupHost { cluster, name, .. } = &self.hosts[host];
                let (cluster, node) = (*cluster, name.clone());
                blocks
                    .push((host, Block { cluster, node, appnum, first_rank, first_index, count }));
                first_rank += count;
            }
        }
        (self.cursor, self.used) = (cursor, used);
        self.last_group += 1;
        let order = SpawnOrder {
            group: self.last_group,
            kvsname: format!("{}_{}", self.kvsname, self.last_group),
            mapping: mapping(&blocks),
            size: first_rank,
            keys: request.keys.clone(),
            tasks: request.commands.iter().map(|command| self.task(spawner, command)).collect(),
            blocks: blocks.iter().map(|(_, block)| block.clone()).collect(),
        };
        self.remember(spawner, &order, &blocks);
        Ok(order)
    }

    fn remember(&mut self, spawner: SpawningRank, order: &SpawnOrder, blocks: &[(usize, Block)]) {
        let mut hosts: Vec<usize> = blocks.iter().map(|&(host, _)| host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let unanswered = hosts.len();
        let group = SpawnedGroup { spawner, unanswered, problem: None, size: order.size, ended: 0 };
        self.groups.insert(order.group, group);
        for &(host, Block { first_rank, first_index, count, .. }) in blocks {
            let placed = PlacedRanks { group: order.group, first_rank, count, host };
            self.placed.insert(first_index, placed);
        }
    }

    /// Records that one host has started its processes, or why the host could not.
    pub fn handle_started(&mut self, number: u32, problem: String) -> SpawnOutcome {
        let Some(group) = self.groups.get_mut(&number) else { return SpawnOutcome::Waiting };
        if !problem.is_empty() {
            group.problem.get_or_insert(problem);
        }
        group.unanswered = group.unanswered.saturating_sub(1);
        if group.unanswered > 0 {
            return SpawnOutcome::Waiting;
        }
        let spawner = group.spawner;
        match group.problem.take() {
            None => SpawnOutcome::Running { spawner },
            Some(problem) => {
                self.groups.remove(&number);
                let of_group = self.placed.iter().filter(|(_, placed)| placed.group == number);
                let indices = of_group.flat_map(|(first, placed)| *first..first + placed.count);
                SpawnOutcome::Failed { spawner, problem, indices: indices.collect() }
            }
        }
    }

    /// Records that the ranks of one host have moved to another host, which also takes the
    /// processes spawned from now on.
    pub fn handle_moved(&mut self, moved: &Moved) {
        let is_it =
            |host: &&mut GroupHost| host.cluster == moved.cluster && host.name == moved.from;
        self.hosts.iter_mut().filter(is_it).for_each(|host| host.name.clone_from(&moved.to));
    }

    /// Whether the group exists and has neither failed nor ended.
    pub fn is_known(&self, group: u32) -> bool {
        self.groups.contains_key(&group)
    }

    /// Records the end of a process of the group; returns whether the process was the last one.
    pub fn handle_exit(&mut self, number: u32) -> bool {
        let Some(group) = self.groups.get_mut(&number) else { return false };
        group.ended += 1;
        let last = group.ended == group.size;
        if last {
            self.groups.remove(&number);
        }
        last
    }

    /// Group and rank of a spawned process: `1:0` is rank 0 of group 1.
    pub fn name(&self, index: u32) -> Option<String> {
        let (rank, placed) = self.find(index)?;
        Some(format!("{}:{rank}", placed.group))
    }

    /// Rank, node and cluster of a spawned process.
    pub fn place_of(&self, index: u32) -> Option<(String, &str, &str)> {
        let (rank, placed) = self.find(index)?;
        let host = &self.hosts[placed.host];
        let name = format!("rank {rank} of spawned group {}", placed.group);
        Some((name, &host.name, &host.cluster_name))
    }

    fn find(&self, index: u32) -> Option<(u32, &PlacedRanks)> {
        let (first, placed) = self.placed.range(..=index).next_back()?;
        let number = index - first;
        (number < placed.count).then_some((placed.first_rank + number, placed))
    }

    // --- where and what

    /// The program to spawn: it gets the directory and the variables of the program that spawns it.
    fn task(&self, spawner: SpawningRank, command: &SpawnCommand) -> Task {
        let (_, own) = spawn_order::application(&self.applications, spawner.rank);
        let info = |key| command.info(key).unwrap_or_default();
        let wdir = Path::new(&own.wdir).join(info("wdir"));
        let search = match info("path") {
            "" => own.search.clone(),
            path => path.to_string(),
        };
        Task {
            program: command.program.clone(),
            arguments: command.arguments.clone(),
            wdir: wdir.display().to_string(),
            search,
            environment: own.environment.clone(),
        }
    }

    /// The hosts and the number of processes of each, in rank order.
    fn place(
        &self,
        command: &SpawnCommand,
        cursor: &mut Cursor,
    ) -> Result<Vec<(usize, u32)>, String> {
        let hosts = self.allowed(command)?;
        if hosts.len() == self.hosts.len() {
            return Ok(self.fill(&hosts, command.count, cursor));
        }
        Ok(self.fill(&hosts, command.count, &mut Cursor { host: 0, taken: 0 }))
    }

    /// Fills `hosts` from the cursor on. `cursor.host` is an index into `hosts`.
    fn fill(&self, hosts: &[usize], count: u32, cursor: &mut Cursor) -> Vec<(usize, u32)> {
        let mut left = count;
        let mut blocks: Vec<(usize, u32)> = Vec::new();
        while left > 0 {
            let host = hosts[cursor.host];
            let room = self.hosts[host].slots.saturating_sub(cursor.taken);
            if room == 0 {
                *cursor = Cursor { host: (cursor.host + 1) % hosts.len(), taken: 0 };
                continue;
            }
            let taken = room.min(left);
            match blocks.last_mut() {
                // The cycle has returned to the only host.
                Some((last, count)) if *last == host => *count += taken,
                _ => blocks.push((host, taken)),
            }
            cursor.taken += taken;
            left -= taken;
        }
        blocks
    }

    /// The hosts that the info keys `host` and `cluster` allow.
    fn allowed(&self, command: &SpawnCommand) -> Result<Vec<usize>, String> {
        let hosts = command.info("host").or(command.info("hosts"));
        let clusters = command.info("cluster");
        let named = |list: Option<&str>, name: &str| {
            list.is_none_or(|list| list.split(',').any(|word| word.trim() == name))
        };
        let is_allowed =
            |host: &GroupHost| named(hosts, &host.name) && named(clusters, &host.cluster_name);
        let allowed: Vec<usize> =
            (0..self.hosts.len()).filter(|&host| is_allowed(&self.hosts[host])).collect();
        if allowed.is_empty() {
            let known: Vec<String> =
                self.hosts.iter().map(|h| format!("{} of {}", h.name, h.cluster_name)).collect();
            return Err(format!("no such host takes part; there are {}", known.join(", ")));
        }
        Ok(allowed)
    }

    fn take_indices(&self, used: &mut [u32], host: usize, count: u32) -> Result<u32, String> {
        let GroupHost { cluster, cluster_name, .. } = &self.hosts[host];
        let used = &mut used[*cluster as usize];
        if count > self.reserve - *used {
            let limit = self.reserve;
            return Err(format!(
                "cluster {cluster_name} would have had more than {limit} spawned processes, the \
                 limit in the life of a job"
            ));
        }
        let first = self.first_index + cluster * self.reserve + *used;
        *used += count;
        Ok(first)
    }
}

impl GroupHost {
    fn new(node: &Node) -> GroupHost {
        GroupHost {
            cluster: node.cluster,
            cluster_name: node.cluster_name.clone(),
            name: node.name.clone(),
            slots: node.slots,
        }
    }
}

/// The PMI process mapping of the blocks; nodes are numbered in order of appearance.
fn mapping(blocks: &[(usize, Block)]) -> String {
    let mut numbers = BTreeMap::new();
    let numbered = blocks.iter().map(|(host, block)| {
        let next = numbers.len();
        (*numbers.entry(*host).or_insert(next), block.count)
    });
    plan::mapping(numbered)
}

#[cfg(test)]
mod tests;
