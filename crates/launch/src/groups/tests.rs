//! Tests of the placement of spawned processes, and of the indices that they get.

use super::*;
use crate::local_transport::LocalTransport;

fn node(cluster: u32, name: &str, first_rank: u32, rank_count: u32, slots: u32) -> Node {
    Node {
        cluster,
        cluster_name: format!("c{cluster}"),
        name: name.into(),
        address: None,
        first_rank,
        rank_count,
        slots,
        machine_ranks: 0,
        is_spare: false,
        spares: Vec::new(),
        relay_unix: None,
        remote: false,
        spawn: Vec::new(),
        children: Vec::new(),
    }
}

fn job(size: u32) -> Job {
    let task = Task {
        program: "p".into(),
        arguments: Vec::new(),
        wdir: "/home".into(),
        search: String::new(),
        environment: Vec::new(),
    };
    Job {
        id: String::new(),
        key: String::new(),
        size,
        universe: size,
        kvsname: "kvs".into(),
        mapping: String::new(),
        applications: vec![Application { ranks: size, task }],
        provider: None,
        environment: Vec::new(),
        verbose: false,
        limits: Default::default(),
        has_spares: false,
        local: LocalTransport::Library,
    }
}

/// Cluster 0: a gateway, n1 with 2 of 3 slots taken, n2 with 1 of 1. Cluster 1: n1 with 2 of 2.
fn groups() -> Groups {
    let mut top = node(0, "gw", 5, 0, 0);
    top.children = vec![node(0, "n1", 0, 2, 3), node(0, "n2", 2, 1, 1)];
    Groups::new(&job(5), &[top, node(1, "n1", 3, 2, 2)])
}

fn command(count: u32, info: &[(&str, &str)]) -> SpawnCommand {
    let info = info.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    SpawnCommand { program: "w".into(), arguments: Vec::new(), count, info: info.collect() }
}

fn request(commands: &[SpawnCommand]) -> Request {
    Request { commands: commands.to_vec(), keys: Vec::new() }
}

const SPAWNER: SpawningRank = SpawningRank { cluster: 0, rank: 2 };

/// `(cluster, node, first rank, first index, count)` of each block.
fn blocks(order: &SpawnOrder) -> Vec<(u32, &str, u32, u32, u32)> {
    let block = |b: &'_ Block| (b.cluster, b.first_rank, b.first_index, b.count);
    let parts = order.blocks.iter().map(|b| (block(b), b.node.as_str()));
    parts.map(|((cluster, rank, index, count), node)| (cluster, node, rank, index, count)).collect()
}

const FAR: u32 = 5 + SPAWNED_MAX;

#[test]
fn hosts_are_filled_on_from_the_last_rank() {
    let mut groups = groups();
    let order = groups.order(SPAWNER, &request(&[command(1, &[])])).unwrap();
    assert_eq!(blocks(&order), [(0, "n1", 0, 5, 1)]);
    assert_eq!(order.mapping, "(vector,(0,1,1))");
    let order = groups.order(SPAWNER, &request(&[command(4, &[]), command(3, &[])])).unwrap();
    let expected =
        [(0, "n1", 0, 6, 2), (0, "n2", 2, 8, 1), (1, "n1", 3, FAR, 1), (1, "n1", 4, FAR + 1, 1)];
    assert_eq!(blocks(&order)[..4], expected);
    assert_eq!(blocks(&order)[4..], [(0, "n1", 5, 9, 2)]);
    assert_eq!(order.mapping, "(vector,(0,1,2),(1,2,1),(2,1,1),(0,1,2))");
    assert_eq!((order.group, order.size, order.kvsname.as_str()), (2, 7, "kvs_2"));
    assert_eq!(order.blocks[3].appnum, 1);
}

#[test]
fn info_keys_choose_hosts_directory_and_path() {
    let mut groups = groups();
    let info =
        [("host", "n1"), ("cluster", "c1"), ("wdir", "sub"), ("path", "/opt"), ("soft", "1")];
    let order = groups.order(SPAWNER, &request(&[command(3, &info)])).unwrap();
    assert_eq!(blocks(&order), [(1, "n1", 0, FAR, 3)]);
    assert_eq!(
        (order.tasks[0].wdir.as_str(), order.tasks[0].search.as_str()),
        ("/home/sub", "/opt")
    );
    let order = groups.order(SPAWNER, &request(&[command(3, &[("host", "n2, n1")])])).unwrap();
    assert_eq!(blocks(&order), [(0, "n1", 0, 5, 3)]);
    let problem = groups.order(SPAWNER, &request(&[command(1, &[("host", "gw")])])).unwrap_err();
    assert!(problem.contains("n1 of c0, n2 of c0, n1 of c1"), "{problem}");
}

#[test]
fn limits_hold_and_a_refusal_changes_nothing() {
    let mut groups = groups();
    for count in [0, SPAWNED_MAX + 1, u32::MAX] {
        let problem = groups.order(SPAWNER, &request(&[command(count, &[])])).unwrap_err();
        assert!(problem.contains("65536"), "{problem}");
    }
    let far = |count| request(&[command(count, &[("cluster", "c1")])]);
    groups.order(SPAWNER, &far(SPAWNED_MAX - 1)).unwrap();
    let problem = groups.order(SPAWNER, &far(2)).unwrap_err();
    assert!(problem.contains("cluster c1"), "{problem}");
    let order = groups.order(SPAWNER, &far(1)).unwrap();
    assert_eq!(order.blocks[0].first_index, FAR + SPAWNED_MAX - 1);
    assert_eq!(order.group, 2);
    let all = indices(&[]);
    assert_eq!(reserve(Address::INDEX_MAX - 7, 4, all), 2);
    assert_eq!(reserve(Address::INDEX_MAX + 1, 1, all), 0);
    let logged = ["RECOVER", "RECOVER_LOG"].map(|name| format!("LANDBRIDGE_{name}"));
    let settings = logged.into_iter().zip(["on".into(), "sender".into()]).collect::<Vec<_>>();
    assert_eq!(reserve(24, 2, indices(&settings)), 500);
}

#[test]
fn a_group_runs_when_all_hosts_have_said_so() {
    let mut groups = groups();
    groups.order(SPAWNER, &request(&[command(4, &[])])).unwrap();
    assert_eq!(groups.name(6).as_deref(), Some("1:1"));
    assert_eq!(groups.place_of(8).unwrap().1, "n2");
    assert_eq!((groups.name(4), groups.name(9)), (None, None));
    assert_eq!(groups.handle_started(1, String::new()), SpawnOutcome::Waiting);
    assert_eq!(groups.handle_started(1, String::new()), SpawnOutcome::Running { spawner: SPAWNER });
    assert_eq!([1, 1, 1, 1].map(|group| groups.handle_exit(group)), [false, false, false, true]);
    assert!(!groups.is_known(1));
    assert!(groups.name(6).is_some(), "the report of its end still needs it");
}

#[test]
fn a_group_of_which_a_part_fails_is_forgotten() {
    let mut groups = groups();
    groups.order(SPAWNER, &request(&[command(4, &[])])).unwrap();
    assert_eq!(groups.handle_started(1, "no".into()), SpawnOutcome::Waiting);
    let indices = vec![5, 6, 7, 8];
    let failed = SpawnOutcome::Failed { spawner: SPAWNER, problem: "no".into(), indices };
    assert_eq!(groups.handle_started(1, String::new()), failed);
    assert!(!groups.is_known(1));
    assert_eq!(groups.handle_started(1, String::new()), SpawnOutcome::Waiting);
}

#[test]
fn what_is_spawned_follows_ranks_to_another_node() {
    let mut groups = groups();
    let moved = |cluster| Moved { cluster, from: "n1".into(), to: "n3".into() };
    groups.handle_moved(&moved(0));
    let order = groups.order(SPAWNER, &request(&[command(5, &[])])).unwrap();
    let nodes: Vec<_> = order.blocks.iter().map(|b| (b.cluster, b.node.as_str())).collect();
    assert_eq!(nodes, [(0, "n3"), (0, "n2"), (1, "n1")]);
}
