//! Who runs where. Pure: options and hosts enter, the tree of agents leaves.

use crate::control::Node;

/// One host that takes ranks.
pub fn local(host: &str, size: u32, spawn: Vec<String>) -> Vec<Node> {
    vec![Node {
        cluster: 0,
        cluster_name: "local".to_string(),
        name: host.to_string(),
        address: None,
        first_rank: 0,
        rank_count: size,
        relay_unix: None,
        spawn,
        children: Vec::new(),
    }]
}
