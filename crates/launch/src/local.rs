//! Chooses the transport between ranks of one node (setting `local`): the shared memory of the MPI
//! library itself, with which ranks of a node can also share windows, or our provider.
//!
//! In: the setting, the plan, and the cores of this machine. Out: one answer for the whole job
//! ([`LocalTransport`]), because all ranks must agree on the set of ranks that share a node.
//!
//! What may never happen: messages that `--recover` must record bypass the provider, or ranks of
//! different clusters take each other for ranks of the same node.

use anyhow::{Result, bail};

use crate::control::Node;
use crate::local_transport::LocalTransport;

/// The settings of the job that decide about the transport.
#[derive(Debug, Clone, Copy)]
pub struct LocalWishes<'a> {
    /// The text of the setting `local`.
    pub local: &'a str,
    /// Whether the user has set `paths`. The setting holds only for messages that the provider
    /// carries.
    pub sets_paths: bool,
    /// Whether messages are recorded.
    pub records: bool,
}

/// Chooses the transport. `cores` is the number of cores of this machine that the job may use.
pub fn choose(wishes: LocalWishes<'_>, clusters: &[Node], cores: u32) -> Result<LocalTransport> {
    let LocalWishes { local, sets_paths, records } = wishes;
    let library = if shares_a_machine(clusters) {
        LocalTransport::LibraryByPlan
    } else {
        LocalTransport::Library
    };
    match local {
        "library" if records => bail!(
            "--recover needs local=own: nothing is recorded of messages that an MPI library \
             carries itself; leave local=library out, or start without --recover"
        ),
        "library" => Ok(library),
        "auto" if !records && !sets_paths && has_a_core_each(clusters, cores) => Ok(library),
        _ => Ok(LocalTransport::Own),
    }
}

/// Writes to each node how many ranks its machine has ([`Node::machine_ranks`]).
pub fn count_machine_ranks(clusters: &mut [Node]) {
    let here = clusters.iter().filter(|cluster| !cluster.remote).map(ranks_of_machine);
    let here = here.fold(0, u32::saturating_add);
    for cluster in clusters {
        let ranks = if cluster.remote { ranks_of_machine(cluster) } else { here };
        write_machine_ranks(cluster, ranks);
    }
}

/// Ranks of this node and of the nodes below that are on its machine.
fn ranks_of_machine(node: &Node) -> u32 {
    let below = node.children.iter().filter(|child| !child.remote).map(ranks_of_machine);
    below.fold(node.rank_count, u32::saturating_add)
}

fn write_machine_ranks(node: &mut Node, ranks: u32) {
    node.machine_ranks = ranks;
    for child in &mut node.children {
        let ranks = if child.remote { ranks_of_machine(child) } else { ranks };
        write_machine_ranks(child, ranks);
    }
}

/// Whether at least two clusters have ranks on this machine.
fn shares_a_machine(clusters: &[Node]) -> bool {
    let is_here = |cluster: &&Node| !cluster.remote && cluster.total_ranks() > 0;
    clusters.iter().filter(is_here).count() > 1
}

/// Whether each rank has a core of its own. MPI libraries wait for each other without sleeping, so
/// ranks that share a core delay each other. Every slot of another host is taken to have a core.
fn has_a_core_each(clusters: &[Node], cores: u32) -> bool {
    let mut here = 0u32;
    let has_slots = clusters.iter().all(|cluster| has_slots_elsewhere(cluster, true, &mut here));
    has_slots && here <= cores
}

/// Whether the ranks of every remote host fit into the slots of the host. `is_above_here` says that
/// the parent agent is on this machine. The function adds the ranks on this machine to `here`.
fn has_slots_elsewhere(node: &Node, is_above_here: bool, here: &mut u32) -> bool {
    let is_here = is_above_here && !node.remote;
    if is_here {
        *here = here.saturating_add(node.rank_count);
    }
    let fits = is_here || node.rank_count <= node.slots;
    fits && node.children.iter().all(|child| has_slots_elsewhere(child, is_here, here))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(local: &str) -> LocalWishes<'_> {
        LocalWishes { local, sets_paths: false, records: false }
    }

    fn node(rank_count: u32, slots: u32, remote: bool, children: Vec<Node>) -> Node {
        Node { rank_count, slots, remote, children, ..Node::default() }
    }

    #[test]
    fn each_rank_has_a_core_or_our_provider_carries_everything() {
        let auto = |clusters: &[Node], cores| choose(wishes("auto"), clusters, cores).unwrap();
        let here = |ranks| node(ranks, ranks, false, Vec::new());
        assert_eq!(auto(&[here(2)], 2), LocalTransport::Library);
        assert_eq!(auto(&[here(3)], 2), LocalTransport::Own);
        // Together the ranks are too many for the cores.
        assert_eq!(auto(&[here(2), here(2)], 3), LocalTransport::Own);
        assert_eq!(auto(&[here(2), here(2)], 4), LocalTransport::LibraryByPlan);
        let elsewhere = |ranks, slots| node(ranks, slots, true, Vec::new());
        assert_eq!(auto(&[elsewhere(8, 8)], 2), LocalTransport::Library);
        assert_eq!(auto(&[elsewhere(9, 8)], 2), LocalTransport::Own);
        let with_children = node(1, 1, false, vec![elsewhere(8, 8), here(1)]);
        assert_eq!(auto(std::slice::from_ref(&with_children), 2), LocalTransport::Library);
        assert_eq!(auto(&[with_children], 1), LocalTransport::Own);
        // A local host below another host is not on this machine.
        assert_eq!(
            auto(&[node(0, 4, true, vec![node(4, 4, false, Vec::new())])], 1),
            LocalTransport::Library
        );
    }

    #[test]
    fn ranks_are_counted_by_machine() {
        let here = |ranks, children| node(ranks, ranks, false, children);
        let elsewhere = |ranks, children| node(ranks, ranks, true, children);
        let mut clusters = [
            here(2, vec![elsewhere(8, Vec::new()), here(1, Vec::new())]),
            here(4, Vec::new()),
            elsewhere(16, vec![here(3, Vec::new())]),
        ];
        count_machine_ranks(&mut clusters);
        let counted =
            |node: &Node| node.hosts().iter().map(|n| n.machine_ranks).collect::<Vec<_>>();
        assert_eq!(counted(&clusters[0]), [7, 8, 7]);
        assert_eq!(counted(&clusters[1]), [7]);
        assert_eq!(counted(&clusters[2]), [19, 19]);
    }

    #[test]
    fn what_is_recorded_goes_through_our_provider() {
        let here = [node(1, 1, false, Vec::new())];
        let recorded = |local| LocalWishes { records: true, ..wishes(local) };
        assert_eq!(choose(recorded("auto"), &here, 8).unwrap(), LocalTransport::Own);
        assert_eq!(choose(wishes("own"), &here, 8).unwrap(), LocalTransport::Own);
        let why = choose(recorded("library"), &here, 8).unwrap_err().to_string();
        assert!(why.contains("--recover needs local=own"), "{why}");
        assert_eq!(choose(wishes("library"), &here, 0).unwrap(), LocalTransport::Library);
    }

    #[test]
    fn who_chooses_paths_gets_them_on_one_node_as_well() {
        let here = [node(2, 2, false, Vec::new())];
        let with_paths = |local| LocalWishes { sets_paths: true, ..wishes(local) };
        assert_eq!(choose(wishes("auto"), &here, 8).unwrap(), LocalTransport::Library);
        assert_eq!(choose(with_paths("auto"), &here, 8).unwrap(), LocalTransport::Own);
        assert_eq!(choose(with_paths("library"), &here, 8).unwrap(), LocalTransport::Library);
    }
}
