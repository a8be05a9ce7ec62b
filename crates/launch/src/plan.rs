//! Decides which ranks run on which host, and which relay dials which. The module is pure: a
//! [`Topology`] and the user's wishes enter, a [`Plan`] leaves.
//!
//! Ranks fill the hosts in the order of the topology, so every host and every cluster holds one
//! contiguous block of ranks. Clusters without ranks take no part in the job.

use crate::control::Node;
use crate::ps::paths::counted;
use crate::topology::{Cluster, Host, HostAccess, Topology};

/// Address of the ranks of a job that runs on one host.
const LOOPBACK: &str = "127.0.0.1";

/// What the user has asked for.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    /// Number of ranks; `None` stands for the number of slots.
    pub ranks: Option<u32>,
    pub ranks_per_node: Option<u32>,
    pub ranks_per_cluster: Option<u32>,
    /// Lost nodes can be replaced, so hosts that are kept free get an agent.
    pub recovers: bool,
    /// Number of further hosts of each cluster, the last ones, that are kept free.
    pub spares: u32,
    /// At least one host of each cluster is kept free that can be.
    pub moves_ranks: bool,
}

impl Wishes {
    /// The option by which hosts are kept free, if there is one.
    pub fn spares_option(&self) -> Option<String> {
        match self.spares {
            0 => self.moves_ranks.then(|| "--recover=node".to_string()),
            spares => Some(format!("--spares {spares}")),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub size: u32,
    /// The top agent of each cluster that takes part, in order.
    pub nodes: Vec<Node>,
    pub relays: Vec<RelayPlan>,
    /// Clusters in the order in which their relays start.
    pub relay_order: Vec<usize>,
    /// Value of `PMI_process_mapping`.
    pub mapping: String,
}

impl Plan {
    /// Number of processes that the hosts of the job have slots for, and at least the number of
    /// ranks.
    pub fn universe(&self) -> u32 {
        let hosts = self.nodes.iter().flat_map(Node::hosts).filter(|node| !node.is_spare);
        let slots = hosts.map(|node| node.slots);
        slots.fold(0, u32::saturating_add).max(self.size)
    }

    /// Whether the plan keeps a host free for the ranks of a lost host.
    pub fn has_spares(&self) -> bool {
        self.nodes.iter().flat_map(Node::hosts).any(|node| node.is_spare)
    }
}

/// The relay of one cluster of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPlan {
    pub listen: String,
    pub unix: String,
    pub wan_listen: Option<String>,
    /// Address at which ranks reach a relay that listens on every address.
    pub host_address: String,
    pub dials: Vec<Dial>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dial {
    pub cluster: usize,
    /// `HOST:PORT`; port 0 stands for the port that the other relay reports.
    pub address: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanError {
    NoRanks,
    OnlySpares { option: String },
    TooManyRanks { wanted: u32, slots: u32 },
    NoRelay { cluster: String },
    BothOutboundOnly { one: String, other: String },
    DialCycle,
}

impl std::fmt::Display for PlanError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PlanError::NoRanks => write!(f, "there is no rank to start; ask for some with -n"),
            PlanError::OnlySpares { option } => write!(
                f,
                "{option} keeps every host with slots free, so there is no rank to start; \
                 ask for fewer spare hosts, or name more hosts"
            ),
            PlanError::TooManyRanks { wanted, slots } => write!(
                f,
                "{wanted} ranks do not fit into {}; give the hosts more slots, or say \
                 how many ranks each node takes with --ranks-per-node (and each cluster, with \
                 --ranks-per-cluster)",
                counted((*slots).into(), "slot")
            ),
            PlanError::NoRelay { cluster } => write!(
                f,
                "cluster {cluster} has no [cluster.relay], and a job over several clusters needs \
                 one in each: only relays talk between clusters"
            ),
            PlanError::BothOutboundOnly { one, other } => write!(
                f,
                "neither the relay of {one} nor that of {other} has a wan_listen, so neither can \
                 dial the other; open one port at one of the two sites and name it there"
            ),
            PlanError::DialCycle => write!(
                f,
                "the [[link]]s make every relay wait for another one to start; drop one of them"
            ),
        }
    }
}

impl std::error::Error for PlanError {}

/// Makes the plan of a job. `agent` is the path of `landbridge` on hosts that do not name their
/// own; `job` is the id of the job.
pub fn plan(
    topology: &Topology,
    wishes: &Wishes,
    agent: &str,
    job: &str,
) -> Result<Plan, PlanError> {
    let spares = spares(topology, wishes);
    let slots = slots(topology, wishes, &spares);
    let counts = place(&slots, &spares, wishes)?;
    let used: Vec<usize> =
        (0..topology.clusters.len()).filter(|&c| counts[c].iter().any(|&n| n > 0)).collect();
    let mut first_rank = 0;
    let mut nodes = Vec::new();
    for (number, &index) in used.iter().enumerate() {
        let cluster = &topology.clusters[index];
        let unix = cluster.relay.as_ref().map(|_| unix_name(job, number));
        let (counts, slots, spares) = (&counts[index], &slots[index], &spares[index]);
        let recovers = wishes.recovers;
        let layout =
            ClusterLayout { cluster, number, counts, slots, spares, recovers, agent, unix };
        nodes.push(layout.tree(&mut first_rank));
    }
    if is_one_host(&nodes) {
        // Hosts outside of the job need not reach the ranks of a job on one host.
        nodes.iter_mut().for_each(|node| node.address = Some(LOOPBACK.into()));
    }
    crate::local::count_machine_ranks(&mut nodes);
    let (relays, relay_order) = plan_relays(topology, &used, job)?;
    let mut blocks: Vec<_> =
        nodes.iter().flat_map(Node::hosts).filter(|n| n.rank_count > 0).collect();
    blocks.sort_unstable_by_key(|node| node.first_rank);
    let mapping = mapping(blocks.iter().enumerate().map(|(id, node)| (id, node.rank_count)));
    Ok(Plan { size: first_rank, nodes, relays, relay_order, mapping })
}

/// Whether all agents of a job run on the same host: they have one name, and the same command
/// starts them.
fn is_one_host(nodes: &[Node]) -> bool {
    let mut hosts = nodes.iter().flat_map(Node::hosts);
    let Some(first) = hosts.next() else { return false };
    hosts.all(|host| host.name == first.name && host.spawn == first.spawn)
}

fn unix_name(job: &str, cluster: usize) -> String {
    format!("@landbridge-{job}-relay-{cluster}")
}

// --- ranks onto hosts

/// The number of ranks of each host of each cluster.
fn place(
    slots: &[Vec<u32>],
    spares: &[Vec<bool>],
    wishes: &Wishes,
) -> Result<Vec<Vec<u32>>, PlanError> {
    let used = |(slots, spares): (&Vec<u32>, &Vec<bool>)| -> Vec<u32> {
        slots
            .iter()
            .zip(spares)
            .map(|(&slots, &is_spare)| if is_spare { 0 } else { slots })
            .collect()
    };
    let slots: Vec<Vec<u32>> = slots.iter().zip(spares).map(used).collect();
    let total = slots.iter().flatten().fold(0u32, |sum, &slots| sum.saturating_add(slots));
    let wanted = wishes.ranks.unwrap_or(total);
    if wanted == 0 {
        let may_be_spare = wishes.ranks.is_none() && wishes.recovers;
        return Err(match wishes.spares_option().filter(|_| may_be_spare) {
            Some(option) => PlanError::OnlySpares { option },
            None => PlanError::NoRanks,
        });
    }
    let per_cluster = wishes.ranks_per_cluster.unwrap_or(u32::MAX);
    let mut left = wanted;
    let mut counts = Vec::new();
    for cluster in &slots {
        let mut left_here = left.min(per_cluster);
        let mut taken = Vec::new();
        for &slots in cluster {
            taken.push(slots.min(left_here));
            left_here -= slots.min(left_here);
        }
        left -= taken.iter().sum::<u32>();
        counts.push(taken);
    }
    // Without -n, a limit per cluster only reduces the number of ranks.
    if left > 0 && wishes.ranks.is_some() {
        return Err(PlanError::TooManyRanks { wanted, slots: wanted - left });
    }
    Ok(counts)
}

/// Which hosts of each cluster are kept free: hosts that the topology marks as spare, and the last
/// further hosts that the user asks for.
fn spares(topology: &Topology, wishes: &Wishes) -> Vec<Vec<bool>> {
    let of = |cluster: &Cluster| {
        let mut is_spare: Vec<bool> = cluster.hosts.iter().map(|host| host.is_spare).collect();
        let is_needed = wishes.moves_ranks && !is_spare.contains(&true);
        let wanted = wishes.spares.max(u32::from(is_needed));
        let mut left = if wishes.recovers { wanted } else { 0 };
        for (index, is_it) in is_spare.iter_mut().enumerate().rev() {
            if left > 0 && !*is_it && index != cluster.top_host() {
                (*is_it, left) = (true, left - 1);
            }
        }
        is_spare
    };
    topology.clusters.iter().map(of).collect()
}

/// The slots of each host; hosts without slots in the topology get even shares of the remaining
/// ranks.
fn slots(topology: &Topology, wishes: &Wishes, spares: &[Vec<bool>]) -> Vec<Vec<u32>> {
    let known = |host: &Host| match (host.slots, wishes.ranks_per_node) {
        (Some(0), _) => Some(0),
        (_, Some(ranks)) => Some(ranks),
        (slots, None) => slots,
    };
    let flags = spares.iter().flatten();
    let all = topology.clusters.iter().flat_map(|cluster| &cluster.hosts).zip(flags);
    let hosts = || all.clone().filter(|(_, is_spare)| !**is_spare).map(|(host, _)| host);
    let fixed: u32 = hosts().filter_map(known).fold(0, u32::saturating_add);
    let sharers = hosts().filter(|host| known(host).is_none()).count() as u32;
    let rest = wishes.ranks.unwrap_or(sharers).saturating_sub(fixed);
    let share = rest.div_ceil(sharers.max(1));
    let slots =
        |cluster: &Cluster| cluster.hosts.iter().map(|host| known(host).unwrap_or(share)).collect();
    topology.clusters.iter().map(slots).collect()
}

/// One cluster's part of the plan.
struct ClusterLayout<'a> {
    cluster: &'a Cluster,
    number: usize,
    counts: &'a [u32],
    slots: &'a [u32],
    /// Which hosts are kept free.
    spares: &'a [bool],
    recovers: bool,
    agent: &'a str,
    unix: Option<String>,
}

impl ClusterLayout<'_> {
    fn tree(&self, first_rank: &mut u32) -> Node {
        let mut top = None;
        let mut children = Vec::new();
        for (index, host) in self.cluster.hosts.iter().enumerate() {
            let node = self.node(host, *first_rank, self.counts[index], index);
            *first_rank += self.counts[index];
            if index == self.cluster.top_host() {
                top = Some(node);
            } else if node.rank_count > 0 || node.is_spare {
                children.push(node);
            }
        }
        // `top_host` is an index into the hosts that this loop has visited.
        let mut top = top.expect("the top host is one of the cluster's hosts");
        let spares: Vec<String> =
            children.iter().filter(|node| node.is_spare).map(|node| node.name.clone()).collect();
        for node in &mut children {
            // A node is no spare node of itself.
            node.spares = spares.iter().filter(|name| **name != node.name).cloned().collect();
        }
        top.children = children;
        top
    }

    fn node(&self, host: &Host, first_rank: u32, rank_count: u32, index: usize) -> Node {
        let program = self.cluster.landbridge.as_deref().unwrap_or(self.agent);
        let on_top = index == self.cluster.top_host();
        Node {
            cluster: self.number as u32,
            cluster_name: self.cluster.name.clone(),
            name: host.name.clone(),
            address: host.address.clone(),
            first_rank,
            rank_count,
            slots: self.slots[index],
            machine_ranks: 0,
            is_spare: self.recovers && self.spares[index],
            spares: Vec::new(),
            relay_unix: self.unix.clone().filter(|_| on_top),
            remote: matches!(host.access, HostAccess::Ssh(_)),
            spawn: host.spawn_command(&[program.to_string(), "agent".to_string()]),
            children: Vec::new(),
        }
    }
}

/// The PMI process mapping `(vector,(first node,nodes,ranks per node),…)`, from blocks `(node,
/// ranks)` in rank order.
pub fn mapping(blocks: impl Iterator<Item = (usize, u32)>) -> String {
    let mut runs: Vec<(usize, usize, u32)> = Vec::new();
    for (id, count) in blocks {
        match runs.last_mut() {
            Some((first, 1, ranks)) if *first == id => *ranks += count,
            Some((first, nodes, ranks)) if *first + *nodes == id && *ranks == count => *nodes += 1,
            _ => runs.push((id, 1, count)),
        }
    }
    let runs: Vec<String> =
        runs.iter().map(|(id, n, ranks)| format!("({id},{n},{ranks})")).collect();
    format!("(vector,{})", runs.join(","))
}

// --- relays

fn plan_relays(
    topology: &Topology,
    used: &[usize],
    job: &str,
) -> Result<(Vec<RelayPlan>, Vec<usize>), PlanError> {
    if used.len() == 1 && topology.clusters[used[0]].relay.is_none() {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut relays = Vec::new();
    for (number, &index) in used.iter().enumerate() {
        relays.push(relay_plan(&topology.clusters[index], number, job)?);
    }
    for one in 0..used.len() {
        for other in one + 1..used.len() {
            let (from, dial) = dial(topology, used, one, other)?;
            relays[from].dials.push(dial);
        }
    }
    let order = start_order(&relays)?;
    Ok((relays, order))
}

fn relay_plan(cluster: &Cluster, number: usize, job: &str) -> Result<RelayPlan, PlanError> {
    let Some(relay) = &cluster.relay else {
        return Err(PlanError::NoRelay { cluster: cluster.name.clone() });
    };
    let host = &cluster.hosts[relay.host];
    Ok(RelayPlan {
        listen: relay.listen.clone(),
        unix: unix_name(job, number),
        wan_listen: relay.wan_listen.clone(),
        host_address: host.address.clone().unwrap_or_else(|| host.name.clone()),
        dials: Vec::new(),
    })
}

/// Which of two clusters (numbers of the plan) dials the other, and at which address.
fn dial(
    topology: &Topology,
    used: &[usize],
    one: usize,
    other: usize,
) -> Result<(usize, Dial), PlanError> {
    let pairs = [(one, other), (other, one)];
    for (from, to) in pairs {
        let matches =
            |link: &&crate::topology::TopologyLink| (link.from, link.to) == (used[from], used[to]);
        if let Some(link) = topology.links.iter().find(matches) {
            // The topology has been checked: the relay of `to` accepts connections.
            let address = link.address.clone().or(dial_address(&topology.clusters[used[to]]));
            return Ok((from, Dial { cluster: to, address: address.unwrap_or_default() }));
        }
    }
    // Where both relays accept connections, the later cluster dials the earlier one.
    for (to, from) in pairs {
        if let Some(address) = dial_address(&topology.clusters[used[to]]) {
            return Ok((from, Dial { cluster: to, address }));
        }
    }
    Err(PlanError::BothOutboundOnly {
        one: topology.clusters[used[one]].name.clone(),
        other: topology.clusters[used[other]].name.clone(),
    })
}

fn dial_address(cluster: &Cluster) -> Option<String> {
    let relay = cluster.relay.as_ref()?;
    let wan_listen = relay.wan_listen.as_ref()?;
    Some(relay.public.as_ref().unwrap_or(wan_listen).clone())
}

/// The start order of relays: a relay starts before the relays that dial it.
fn start_order(relays: &[RelayPlan]) -> Result<Vec<usize>, PlanError> {
    let mut order: Vec<usize> = Vec::new();
    while order.len() < relays.len() {
        let ready = |&relay: &usize| {
            !order.contains(&relay)
                && relays[relay].dials.iter().all(|d| order.contains(&d.cluster))
        };
        let Some(next) = (0..relays.len()).find(ready) else { return Err(PlanError::DialCycle) };
        order.push(next);
    }
    Ok(order)
}

#[cfg(test)]
mod tests;
