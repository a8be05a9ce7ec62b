//! Placement and relays of small topologies.

use super::*;
use crate::topology::{Relay, TopologyLink};

fn host(name: &str, slots: u32) -> Host {
    let access = HostAccess::Local(Default::default());
    Host {
        name: name.into(),
        login: None,
        address: None,
        slots: Some(slots),
        is_spare: false,
        access,
    }
}

fn cluster(name: &str, slots: &[u32], accepts: bool) -> Cluster {
    let hosts = slots.iter().enumerate().map(|(i, &slots)| host(&format!("{name}{i}"), slots));
    let relay = Relay {
        host: slots.len() - 1,
        listen: "10.0.0.1:0".into(),
        wan_listen: accepts.then(|| format!("192.0.2.1:{}", 7000 + slots.len())),
        public: None,
    };
    Cluster { name: name.into(), relay: Some(relay), hosts: hosts.collect(), landbridge: None }
}

fn grid(accepts: &[bool]) -> Topology {
    let names = ["a", "b", "c", "d"];
    let clusters =
        accepts.iter().zip(names).map(|(&accepts, name)| cluster(name, &[2, 2, 0], accepts));
    Topology { clusters: clusters.collect(), links: Vec::new() }
}

fn ranks(wanted: u32) -> Wishes {
    Wishes { ranks: Some(wanted), ..Wishes::default() }
}

fn blocks(plan: &Plan) -> Vec<(String, u32, u32)> {
    let mut blocks = Vec::new();
    for top in &plan.nodes {
        for node in std::iter::once(top).chain(&top.children) {
            blocks.push((node.name.clone(), node.first_rank, node.rank_count));
        }
    }
    blocks
}

fn make(topology: &Topology, wishes: &Wishes) -> Result<Plan, PlanError> {
    plan(topology, wishes, "/bin/landbridge", "JOB")
}

#[test]
fn ranks_fill_slots_in_order_below_the_relays_host() {
    let plan = make(&grid(&[true, true]), &Wishes::default()).unwrap();
    assert_eq!(plan.size, 8);
    let expected =
        [("a2", 4, 0), ("a0", 0, 2), ("a1", 2, 2), ("b2", 8, 0), ("b0", 4, 2), ("b1", 6, 2)];
    let expected: Vec<_> = expected.map(|(n, f, c)| (n.to_string(), f, c)).into();
    assert_eq!(blocks(&plan), expected);
    assert_eq!(plan.mapping, "(vector,(0,4,2))");
    assert_eq!(plan.nodes[1].relay_unix.as_deref(), Some("@landbridge-JOB-relay-1"));
    assert_eq!(plan.nodes[1].children[0].relay_unix, None);
}

#[test]
fn clusters_without_ranks_take_no_part() {
    let plan = make(&grid(&[true, true]), &ranks(3)).unwrap();
    assert_eq!(plan.nodes.len(), 1);
    assert_eq!(plan.mapping, "(vector,(0,1,2),(1,1,1))");
    assert!(plan.relays[0].dials.is_empty());
}

#[test]
fn limits_per_cluster_and_node_hold() {
    let wishes = Wishes { ranks_per_cluster: Some(1), ..ranks(2) };
    let plan = make(&grid(&[true, true]), &wishes).unwrap();
    assert_eq!((plan.nodes.len(), plan.size), (2, 2));
    let wishes = Wishes { ranks_per_node: Some(1), ..Wishes::default() };
    assert_eq!(make(&grid(&[true, true]), &wishes).unwrap().mapping, "(vector,(0,4,1))");
    let wishes = Wishes { ranks_per_cluster: Some(3), ..Wishes::default() };
    assert_eq!(make(&grid(&[true, true]), &wishes).unwrap().size, 6);
}

#[test]
fn too_many_ranks_are_refused() {
    let error = make(&grid(&[true, true]), &ranks(9)).unwrap_err();
    assert_eq!(error, PlanError::TooManyRanks { wanted: 9, slots: 8 });
    assert_eq!(make(&grid(&[true]), &ranks(0)).unwrap_err(), PlanError::NoRanks);
}

#[test]
fn hosts_without_slots_share_evenly() {
    let mut topology = grid(&[true]);
    topology.clusters[0].relay = None;
    topology.clusters[0].hosts.truncate(2);
    topology.clusters[0].hosts[1].slots = None;
    assert_eq!(make(&topology, &ranks(5)).unwrap().mapping, "(vector,(0,1,2),(1,1,3))");
    topology.clusters[0].hosts[0].slots = None;
    assert_eq!(make(&topology, &ranks(5)).unwrap().mapping, "(vector,(0,1,3),(1,1,2))");
    assert_eq!(make(&topology, &Wishes::default()).unwrap().size, 2);
}

/// For each combination of sites that accept connections: which relay dials which, and the start
/// order.
#[test]
fn the_whole_table_of_who_dials() {
    let dials = |accepts: &[bool]| {
        let plan = make(&grid(accepts), &Wishes::default()).unwrap();
        let dials = plan.relays.iter().map(|r| r.dials.iter().map(|d| d.cluster).collect());
        (dials.collect::<Vec<Vec<usize>>>(), plan.relay_order)
    };
    assert_eq!(dials(&[true, true]), (vec![vec![], vec![0]], vec![0, 1]));
    assert_eq!(dials(&[true, false]), (vec![vec![], vec![0]], vec![0, 1]));
    assert_eq!(dials(&[false, true]), (vec![vec![1], vec![]], vec![1, 0]));
    let three = vec![vec![1, 2], vec![], vec![1]];
    assert_eq!(dials(&[false, true, true]), (three, vec![1, 2, 0]));
    let error = make(&grid(&[true, false, false]), &Wishes::default()).unwrap_err();
    assert!(error.to_string().contains("that of c"), "{error}");
    assert!(matches!(error, PlanError::BothOutboundOnly { .. }));
}

#[test]
fn links_turn_the_direction_and_name_the_address() {
    let mut topology = grid(&[true, true]);
    topology.links = vec![TopologyLink { from: 0, to: 1, address: Some("nat:1".into()) }];
    let plan = make(&topology, &Wishes::default()).unwrap();
    assert_eq!(plan.relays[0].dials, [Dial { cluster: 1, address: "nat:1".into() }]);
    assert_eq!(plan.relay_order, [1, 0]);
}

#[test]
fn links_in_a_circle_are_refused() {
    let mut topology = grid(&[true, true, true]);
    let link = |from, to| TopologyLink { from, to, address: None };
    topology.links = vec![link(0, 1), link(1, 2), link(2, 0)];
    assert_eq!(make(&topology, &Wishes::default()).unwrap_err(), PlanError::DialCycle);
}

#[test]
fn several_clusters_need_relays() {
    let mut topology = grid(&[true, true]);
    topology.clusters[1].relay = None;
    let error = make(&topology, &Wishes::default()).unwrap_err();
    assert_eq!(error, PlanError::NoRelay { cluster: "b".into() });
    topology.clusters.remove(0);
    assert!(make(&topology, &Wishes::default()).unwrap().relays.is_empty());
}

#[test]
fn spare_hosts_have_an_agent_and_no_ranks() {
    let mut topology = grid(&[true, true]);
    topology.clusters[0].hosts[0].is_spare = true;
    let recovers = Wishes { recovers: true, ..Wishes::default() };
    let spares = |plan: &Plan| -> Vec<String> {
        let hosts = plan.nodes.iter().flat_map(Node::hosts);
        hosts.filter(|node| node.is_spare).map(|node| node.name.clone()).collect()
    };
    let plan = make(&topology, &recovers).unwrap();
    let expected =
        [("a2", 2, 0), ("a0", 0, 0), ("a1", 0, 2), ("b2", 6, 0), ("b0", 2, 2), ("b1", 4, 2)];
    let expected: Vec<_> = expected.map(|(n, f, c)| (n.to_string(), f, c)).into();
    assert_eq!(blocks(&plan), expected);
    assert_eq!((plan.size, plan.universe(), spares(&plan)), (6, 6, vec!["a0".to_string()]));
    let whose = |name: &str| {
        let mut nodes = plan.nodes.iter().flat_map(Node::hosts);
        nodes.find(|node| node.name == name).map(|node| node.spares.clone()).unwrap_or_default()
    };
    // The relay's node has no spare nodes, nor have nodes of another cluster.
    assert_eq!(whose("a1"), ["a0"]);
    assert!(["a0", "a2", "b0"].iter().all(|name| whose(name).is_empty()));
    // The last hosts that are not spare in the topology become spare; the relay's host never does.
    let two = Wishes { spares: 1, ..recovers.clone() };
    let plan = make(&topology, &two);
    assert!(plan.as_ref().is_ok_and(Plan::has_spares));
    assert_eq!(plan.map(|plan| (plan.size, spares(&plan))), Ok((2, vec!["b1".to_string()])));
    // Of a cluster with a spare host no other one is kept free, unless the user says how many.
    let any = Wishes { moves_ranks: true, ..recovers.clone() };
    let plan = make(&topology, &any).unwrap();
    assert_eq!((plan.size, spares(&plan)), (4, vec!["a0".to_string(), "b1".to_string()]));
    let many = Wishes { spares: 9, ..recovers };
    assert_eq!(make(&topology, &many), Err(PlanError::OnlySpares { option: "--spares 9".into() }));
    // Without recovery no node is replaced, so no host is kept free.
    let plan = make(&topology, &Wishes::default()).unwrap();
    assert_eq!((plan.size, spares(&plan), plan.has_spares()), (6, vec![], false));
    assert_eq!(blocks(&plan).len(), 5);
}

#[test]
fn ranks_of_a_job_of_one_host_are_called_at_its_loopback() {
    let addresses = |topology: &Topology| -> Vec<Option<String>> {
        let plan = make(topology, &ranks(2)).unwrap();
        plan.nodes.iter().flat_map(Node::hosts).map(|node| node.address.clone()).collect()
    };
    let loopback = Some("127.0.0.1".to_string());
    let cut = crate::hosts::cut("here", 2, 2).unwrap();
    assert_eq!(addresses(&cut), [loopback.clone(), loopback]);
    let two = Topology { clusters: vec![cluster("a", &[1, 1], true)], links: Vec::new() };
    assert_eq!(addresses(&two), [None, None]);
    // The same host name in another network namespace is another host.
    let mut apart = cut;
    let prefix = vec!["nsenter".to_string()];
    apart.clusters[1].hosts[0].access =
        HostAccess::Local(crate::spawn::local::LocalSpawn { prefix });
    assert_eq!(addresses(&apart), [None, None]);
}
