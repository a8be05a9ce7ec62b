//! The launcher's order to start processes that a rank spawns. Every agent on the path to a host
//! that takes part receives the whole order, makes the group's process manager, and starts its own
//! part of the group.

use serde::{Deserialize, Serialize};

use super::Node;
use crate::pmi::kvs::Delta;

/// A program and how to run it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub program: String,
    pub arguments: Vec<String>,
    pub wdir: String,
    /// Directories, separated by colons, that are searched before PATH for a program without a
    /// slash; may be empty.
    pub search: String,
    /// Variables that the user has set with `-x` for this program: they take precedence over all
    /// other variables except the settings.
    #[serde(default)]
    pub environment: Vec<(String, String)>,
}

/// A program of a job's first processes. Its index in the list is its application number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Application {
    /// Number of ranks that run the program.
    pub ranks: u32,
    pub task: Task,
}

/// The application number and the program of a rank. A rank beyond the last program belongs to the
/// last program.
pub fn application(applications: &[Application], rank: u32) -> (u32, &Task) {
    let mut end = 0;
    let is_it = |application: &Application| {
        end += application.ranks;
        rank < end
    };
    let last = applications.len() - 1;
    let place = applications.iter().position(is_it).unwrap_or(last);
    (place as u32, &applications[place].task)
}

/// One process group to be started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpawnOrder {
    /// Number of the group in the job, from 1.
    pub group: u32,
    pub kvsname: String,
    /// Value of `PMI_process_mapping`.
    pub mapping: String,
    pub size: u32,
    /// Keys that the processes find in their key-value space.
    pub keys: Delta,
    /// Programs of the group, by application number.
    pub tasks: Vec<Task>,
    pub blocks: Vec<Block>,
}

/// Processes with consecutive ranks and indices on one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    pub cluster: u32,
    pub node: String,
    pub appnum: u32,
    pub first_rank: u32,
    pub first_index: u32,
    pub count: u32,
}

impl Block {
    pub fn is_on(&self, node: &Node) -> bool {
        self.cluster == node.cluster && self.node == node.name
    }

    /// Whether the block is on this host or on a host below it.
    pub fn is_below(&self, node: &Node) -> bool {
        self.is_on(node) || node.children.iter().any(|child| self.is_below(child))
    }

    /// Process indices of the block.
    pub fn indices(&self) -> std::ops::Range<u32> {
        self.first_index..self.first_index + self.count
    }
}

impl SpawnOrder {
    /// The blocks on a host itself.
    pub fn on<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Block> {
        self.blocks.iter().filter(|block| block.is_on(node))
    }

    /// The blocks on a host and on hosts below it.
    pub fn below<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Block> {
        self.blocks.iter().filter(|block| block.is_below(node))
    }
}
