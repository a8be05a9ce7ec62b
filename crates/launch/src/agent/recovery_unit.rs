//! The recovery unit of this node (`recover_unit=node`): which of its ranks begin again together,
//! and whether they do ([`landbridge_proto::log::unit`]). The steps are in `unit_rollback`.
//!
//! In: ranks that have ended. Out: whether the end of another one belongs to that. What may never
//! happen: the end of a process that the unit has ended counts as a failure of its rank.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::checkpoint::checkpoint_image::CheckpointImage;
use crate::ending::Ending;

/// Pause between two looks at a unit that begins again.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The ranks of this node that begin again together.
pub struct RecoveryUnit {
    ranks: Range<u32>,
    /// The number of the round of images in progress.
    pub round: Option<u64>,
    /// The number of the newest round that was begun.
    pub newest_round: u64,
    /// Rounds from which a rank could not be restored.
    pub unusable: BTreeSet<u64>,
    /// How ranks had ended that are executed again: they have to end in the same way.
    pub ended_before: BTreeMap<u32, Ending>,
    pub rollback: Option<Rollback>,
}

/// A unit that begins again.
pub struct Rollback {
    /// By rank, how those have ended because of which it does.
    pub causes: BTreeMap<u32, String>,
    /// Ranks whose processes were ended because of that.
    pub ended: BTreeSet<u32>,
    pub began: Instant,
    pub laying: Option<JoinHandle<LaidRound>>,
}

/// The result of a thread.
pub struct LaidRound {
    /// The round, and the image of each rank; none: the ranks begin with their programs.
    pub round: Result<Option<(u64, Vec<CheckpointImage>)>>,
    /// Why other rounds cannot be used.
    pub notes: Vec<String>,
}

impl RecoveryUnit {
    /// These ranks run, and have no images.
    pub fn new(ranks: Range<u32>) -> RecoveryUnit {
        RecoveryUnit {
            ranks,
            round: None,
            newest_round: 0,
            unusable: BTreeSet::new(),
            ended_before: BTreeMap::new(),
            rollback: None,
        }
    }

    /// Whether the rank is of this unit.
    pub fn has(&self, rank: u32) -> bool {
        self.ranks.contains(&rank)
    }

    /// Whether this unit, which begins again, has ended the process of the rank.
    pub fn has_ended(&self, rank: u32) -> bool {
        self.rollback.as_ref().is_some_and(|rollback| rollback.ended.contains(&rank))
    }

    /// Whether the rank had ended otherwise before it was executed again.
    pub fn had_ended_otherwise(&self, rank: u32, ending: Ending) -> bool {
        self.ended_before.get(&rank).is_some_and(|before| *before != ending)
    }

    /// A rank has ended in this way: the unit begins again.
    pub fn begin_again(&mut self, rank: u32, how: String) {
        let rollback = self.rollback.get_or_insert_with(|| Rollback {
            causes: BTreeMap::new(),
            ended: BTreeSet::new(),
            began: Instant::now(),
            laying: None,
        });
        rollback.causes.insert(rank, how);
        self.round = None;
    }

    /// When the unit has to act without the end of a process.
    pub fn next_time(&self) -> Option<Instant> {
        self.rollback.as_ref().map(|_| Instant::now() + POLL_INTERVAL)
    }
}
