//! Tests of one server alone, and of a whole tree of servers with its messages counted.

use super::*;

fn config(universe: u32) -> ServerConfig {
    ServerConfig {
        group: 0,
        kvsname: "kvs_test".into(),
        universe,
        mapping: "(vector,(0,1,4))".into(),
    }
}

/// A server without keys or agents below.
fn alone(ranks: &[(u32, u32)]) -> Server {
    Server::new(config(2), ranks.iter().copied(), [], &Delta::new())
}

fn replies(server: &mut Server, rank: u32, line: &str) -> Vec<String> {
    server.handle_line(rank, line);
    let mut lines = Vec::new();
    while let Some(event) = server.poll_event() {
        match event {
            ServerEvent::Reply { line, .. } => lines.push(line),
            other => panic!("not a reply: {other:?}"),
        }
    }
    lines
}

#[test]
fn the_sequence_of_mpich_is_answered() {
    let mut server = alone(&[(0, 0), (1, 3)]);
    let table = [
        (
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n",
        ),
        ("cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"),
        ("cmd=get_appnum", "cmd=appnum rc=0 appnum=0\n"),
        ("cmd=get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=kvs_test\n"),
        ("cmd=get_universe_size", "cmd=universe_size rc=0 size=2\n"),
        (
            "cmd=get kvsname=kvs_test key=PMI_process_mapping",
            "cmd=get_result rc=0 msg=success value=(vector,(0,1,4))\n",
        ),
        (
            "cmd=get kvsname=kvs_test key=PMI_hwloc_xmlfile",
            "cmd=get_result rc=-1 msg=key_not_found value=unknown\n",
        ),
        ("cmd=put kvsname=kvs_test key=a value=00[4]", "cmd=put_result rc=0 msg=success\n"),
        ("cmd=get kvsname=kvs_test key=a", "cmd=get_result rc=0 msg=success value=00[4]\n"),
        ("cmd=wonder", "cmd=wonder rc=-1 msg=unknown_command\n"),
        ("cmd=finalize", "cmd=finalize_ack rc=0\n"),
    ];
    for (line, reply) in table {
        assert_eq!(replies(&mut server, 0, line), [reply], "{line}");
    }
    let mut full = Server::new(config(0), [(0, 0)], [], &Delta::new());
    let absent = "cmd=universe_size rc=0 size=-1\n";
    assert_eq!(replies(&mut full, 0, "cmd=get_universe_size"), [absent]);
    assert_eq!(replies(&mut server, 1, "cmd=get_appnum"), ["cmd=appnum rc=0 appnum=3\n"]);
    assert_eq!(server.stage(0), Stage::Finalized);
    assert_eq!(server.stage(1), Stage::Silent);
}

#[test]
fn abort_keeps_its_code_and_text() {
    let mut server = alone(&[(0, 0)]);
    server.handle_line(0, "cmd=abort exitcode=7 message=out of cheese");
    let abort = ServerEvent::Abort { rank: 0, code: 7, message: "out of cheese".into() };
    assert_eq!(server.poll_event(), Some(abort));
}

#[test]
fn a_spawn_goes_to_the_root_and_nonsense_is_answered_at_once() {
    let mut server = alone(&[(0, 0)]);
    let block = |count: &str| {
        let lines = ["execname=a", "totspawns=1", "spawnssofar=1", count];
        lines.map(str::to_string)
    };
    server.handle_block(0, &block("nprocs=3"));
    let Some(ServerEvent::Spawn { rank: 0, request }) = server.poll_event() else {
        panic!("no spawn")
    };
    assert_eq!((request.commands[0].program.as_str(), request.count()), ("a", 3));
    server.handle_block(0, &block("nprocs=many"));
    let line = "cmd=spawn_result rc=-1 errmsg=spawn_failed\n".to_string();
    assert_eq!(server.poll_event(), Some(ServerEvent::Reply { rank: 0, line }));
    assert!(matches!(server.poll_event(), Some(ServerEvent::SpawnRefused { rank: 0, .. })));
}

#[test]
fn a_group_knows_the_keys_it_was_given_and_waits_only_for_those_who_take_part() {
    let keys = vec![("PARENT".to_string(), "port".to_string())];
    let config = ServerConfig { group: 7, ..config(1) };
    let mut server = Server::new(config, [(70, 0)], [2], &keys);
    let reply = "cmd=get_result rc=0 msg=success value=port\n";
    assert_eq!(replies(&mut server, 70, "cmd=get kvsname=k key=PARENT"), [reply]);
    assert!(replies(&mut server, 70, "cmd=barrier_in").is_empty());
    server.handle_barrier_up(2, Delta::new());
    assert_eq!(server.poll_event(), Some(ServerEvent::BarrierUp { group: 7, delta: Delta::new() }));
    assert_eq!(server.children().collect::<Vec<_>>(), [2]);
}

#[test]
fn published_names_are_found_once() {
    let mut names = Names::default();
    let lookup = || NameRequest::Lookup { service: "s".into() };
    let publish = || NameRequest::Publish { service: "s".into(), port: "p".into() };
    assert!(names.handle_request(lookup()).contains("rc=1"));
    assert_eq!(names.handle_request(publish()), "cmd=publish_result info=ok rc=0\n");
    assert!(names.handle_request(publish()).contains("rc=1"));
    assert_eq!(names.handle_request(lookup()), "cmd=lookup_result info=ok rc=0 port=p\n");
}

/// A tree of root, clusters, nodes and ranks; each cluster agent has ranks of its own too.
struct Tree {
    root: Server,
    clusters: Vec<Server>,
    nodes: Vec<Vec<Server>>,
    /// Messages over the edges between root and clusters; `node_messages`: between clusters and
    /// nodes.
    site_messages: usize,
    node_messages: usize,
    released: usize,
}

const RANKS_PER_AGENT: u32 = 4;

impl Tree {
    fn new(cluster_count: usize, node_count: usize) -> Tree {
        let mut next_rank = 0;
        let mut ranks = || {
            next_rank += RANKS_PER_AGENT;
            (next_rank - RANKS_PER_AGENT..next_rank).map(|rank| (rank, 0))
        };
        let mut server = |children| Server::new(config(0), ranks(), 0..children, &Delta::new());
        let mut tree = Tree {
            root: Server::new(config(0), [], 0..cluster_count, &Delta::new()),
            clusters: Vec::new(),
            nodes: Vec::new(),
            site_messages: 0,
            node_messages: 0,
            released: 0,
        };
        for _ in 0..cluster_count {
            tree.clusters.push(server(node_count));
            tree.nodes.push((0..node_count).map(|_| server(0)).collect());
        }
        tree
    }

    fn agents(&mut self) -> impl Iterator<Item = &mut Server> {
        self.clusters.iter_mut().chain(self.nodes.iter_mut().flatten())
    }

    fn say_all(&mut self, line: impl Fn(u32) -> String) {
        for agent in self.agents() {
            let ranks: Vec<u32> = agent.ranks.keys().copied().collect();
            for rank in ranks {
                agent.handle_line(rank, &line(rank));
            }
        }
        while self.step() {}
    }

    /// Delivers all pending events; returns whether there were any.
    fn step(&mut self) -> bool {
        let mut moved = false;
        for cluster in 0..self.clusters.len() {
            for node in 0..self.nodes[cluster].len() {
                while let Some(event) = self.nodes[cluster][node].poll_event() {
                    moved = true;
                    match event {
                        ServerEvent::BarrierUp { delta, .. } => {
                            self.node_messages += 1;
                            self.clusters[cluster].handle_barrier_up(node, delta);
                        }
                        other => self.count_reply(other),
                    }
                }
            }
            while let Some(event) = self.clusters[cluster].poll_event() {
                moved = true;
                match event {
                    ServerEvent::BarrierUp { delta, .. } => {
                        self.site_messages += 1;
                        self.root.handle_barrier_up(cluster, delta);
                    }
                    ServerEvent::BarrierDown { delta, .. } => {
                        for node in &mut self.nodes[cluster] {
                            self.node_messages += 1;
                            node.handle_barrier_down(delta.clone());
                        }
                    }
                    other => self.count_reply(other),
                }
            }
        }
        while let Some(event) = self.root.poll_event() {
            moved = true;
            match event {
                ServerEvent::BarrierUp { delta, .. } => self.root.handle_barrier_down(delta),
                ServerEvent::BarrierDown { delta, .. } => {
                    for cluster in &mut self.clusters {
                        self.site_messages += 1;
                        cluster.handle_barrier_down(delta.clone());
                    }
                }
                other => panic!("the root has no ranks: {other:?}"),
            }
        }
        moved
    }

    fn count_reply(&mut self, event: ServerEvent) {
        let ServerEvent::Reply { line, .. } = event else { panic!("unexpected {event:?}") };
        self.released += usize::from(line.starts_with("cmd=barrier_out"));
    }
}

#[test]
fn a_barrier_costs_two_messages_per_edge_however_many_keys() {
    const CLUSTERS: usize = 4;
    const NODES: usize = 8;
    const PUTS_PER_RANK: usize = 30;
    let mut tree = Tree::new(CLUSTERS, NODES);
    let ranks = CLUSTERS * (NODES + 1) * RANKS_PER_AGENT as usize;
    for put in 0..PUTS_PER_RANK {
        tree.say_all(|rank| format!("cmd=put key=-allgather-{put}-{rank} value={rank:0>200}"));
    }
    assert_eq!((tree.site_messages, tree.node_messages), (0, 0));
    for barrier in 1..=3 {
        tree.say_all(|_| "cmd=barrier_in".to_string());
        assert_eq!(tree.released, barrier * ranks);
        assert_eq!(tree.site_messages, barrier * 2 * CLUSTERS);
        assert_eq!(tree.node_messages, barrier * 2 * CLUSTERS * NODES);
    }
    for agent in tree.agents() {
        for rank in 0..ranks {
            for put in 0..PUTS_PER_RANK {
                assert!(agent.kvs.value(&format!("-allgather-{put}-{rank}")).is_some());
            }
        }
    }
}

#[test]
fn no_one_leaves_a_barrier_before_the_last_has_come() {
    let mut tree = Tree::new(2, 1);
    let last = 2 * 2 * RANKS_PER_AGENT - 1;
    for agent in tree.agents() {
        let ranks: Vec<u32> = agent.ranks.keys().copied().filter(|&rank| rank != last).collect();
        for rank in ranks {
            agent.handle_line(rank, "cmd=barrier_in");
        }
    }
    while tree.step() {}
    assert_eq!(tree.released, 0);
    assert!(tree.root.someone_waits());
    tree.nodes[1][0].handle_line(last, "cmd=barrier_in");
    while tree.step() {}
    assert_eq!(tree.released, last as usize + 1);
    assert!(!tree.root.someone_waits());
}

/// Ranks of an agent below move to another agent: each barrier is reported once, and every key is
/// known there.
#[test]
fn another_agent_takes_ranks_over() {
    let key = |key: &str| (key.to_string(), "1".to_string());
    let mut above = Server::new(config(4), [], [3, 5], &vec![key("old")]);
    above.handle_barrier_up(3, vec![key("a")]);
    assert!(above.reassign(3, 7), "it had reached the barrier");
    let up = |server: &mut Server| match server.poll_event() {
        Some(ServerEvent::BarrierUp { delta, .. }) => Some(delta),
        None => None,
        other => panic!("{other:?}"),
    };
    let ranks = [(0, 0), (1, 0)];
    let mut taken = Server::new(config(4), ranks, [], &above.keys());
    taken.adopt_state([key("fresh")].into_iter(), true);
    ranks.iter().for_each(|&(rank, _)| taken.handle_line(rank, "cmd=barrier_in"));
    assert_eq!(up(&mut taken), None, "that is known above");
    above.handle_barrier_up(5, vec![]);
    assert_eq!(up(&mut above), Some(vec![key("a")]));
    above.handle_barrier_down(vec![key("a")]);
    assert_eq!(above.children().collect::<Vec<_>>(), [5, 7]);
    taken.handle_barrier_down(vec![key("a")]);
    let answers = std::iter::from_fn(|| taken.poll_event()).count();
    assert_eq!((answers, above.released()), (2, 1));
    let found = replies(&mut taken, 0, "cmd=get kvsname=kvs_test key=old");
    assert_eq!(found, ["cmd=get_result rc=0 msg=success value=1\n"]);
    assert!(!above.reassign(7, 8), "the next one is still to come");
    ranks.iter().for_each(|&(rank, _)| taken.handle_line(rank, "cmd=barrier_in"));
    assert_eq!(up(&mut taken), Some(vec![key("fresh")]));
}
