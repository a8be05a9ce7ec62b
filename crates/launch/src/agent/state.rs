//! What an agent holds, in the parts that change together.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::thread::JoinHandle;

use anyhow::Result;

use super::durable_effects::DurableEffects;
use super::end::Phase;
use super::rank_recording::RankRecording;
use super::replicated_rank_state::ReplicatedRankStates;
use super::state_transfer::StateTransfer;
use crate::agent_startup::AgentStartup;
use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::lease::Lease;

/// Ranks that move to another node when theirs is lost.
#[derive(Default)]
pub(super) struct NodeFailover {
    /// State of the ranks of agents below, if these ranks may move to another node.
    pub replicas: ReplicatedRankStates,
    /// Moves in progress of ranks of lost nodes below.
    pub transfers: Vec<StateTransfer>,
    /// Ranks whose effects on files wait until the agent above has their record.
    pub effects: DurableEffects,
    /// Recorded nondeterminism of ranks that this node is to take over, by rank.
    pub received_recordings: BTreeMap<u32, Rc<RankRecording>>,
}

/// Where checkpoint images of ranks are kept, and which other nodes see them.
#[derive(Default)]
pub(super) struct ImageService {
    /// Names of the nodes that may take over ranks of this node.
    pub spares: Vec<String>,
    /// Lease on the folder of checkpoint images.
    pub lease: Option<Lease>,
    /// The checkpoint configuration for ranks that may move to this node.
    pub spare_config: Option<CheckpointConfig>,
    /// Thread in which a spare node announces in the object store that it reaches the object store.
    pub announcing: Option<JoinHandle<Result<()>>>,
    /// The object store has refused the last image.
    pub is_store_gone: bool,
    /// The agent has reported that other nodes do not see the images of this node.
    pub is_reachability_reported: bool,
}

/// How far the job is, as this agent sees it.
pub(super) struct Course {
    /// When the agent began.
    pub started_at: std::time::SystemTime,
    pub phase: Phase,
    /// Indices in `ranks` of ranks that have ended in this pass, in the order of their ends.
    pub unreported: Vec<usize>,
    pub startup: Option<AgentStartup>,
    pub ready_sent: bool,
    pub done: bool,
    /// The stream to the parent has ended or timed out before the end of the job: the ranks may
    /// go on on another node.
    pub is_orphaned: bool,
}

impl Course {
    pub fn new() -> Course {
        Course {
            started_at: std::time::SystemTime::now(),
            phase: Phase::Working,
            unreported: Vec::new(),
            startup: None,
            ready_sent: false,
            done: false,
            is_orphaned: false,
        }
    }
}
