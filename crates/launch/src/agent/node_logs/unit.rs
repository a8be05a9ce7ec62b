//! The logs between ranks of this node that begin again together (`recover_unit=node`,
//! [`landbridge_proto::log::unit`]).
//!
//! In: a round of images, one of each rank. Out: what each image is to hold of these logs. What may
//! never happen: an image counts as whole although a log that it needs was written over.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use landbridge_proto::log::layout::UNIT_KEEPS_AT;
use landbridge_proto::log::release::LogPositions;
use landbridge_proto::log::unit::UnitCursors;
use rustix::io::pwrite;

use super::NodeLogs;
use crate::agent::image_logs::LogsToCopy;
use crate::agent::log_region::LogFiles;

/// What is kept for ranks that begin again together.
pub struct UnitLogs {
    pub ranks: Range<u32>,
    /// Where the ranks were in their logs that have stood still in the round in progress.
    round: RefCell<BTreeMap<usize, UnitCursors>>,
}

impl UnitLogs {
    /// No round was begun.
    pub fn new(ranks: Range<u32>) -> UnitLogs {
        UnitLogs { ranks, round: RefCell::default() }
    }

    /// What the image of a rank that stands still is to hold of its logs to and from the others.
    pub fn logs_to_copy(
        &self,
        files: LogFiles,
        rank: u32,
        (mut positions, cursors): (LogPositions, UnitCursors),
    ) -> LogsToCopy {
        let round = &mut *self.round.borrow_mut();
        positions.pairs.retain(|peer, _| cursors.pairs.contains_key(peer));
        let starts = cursors.starts(rank as usize, round);
        round.insert(rank as usize, cursors);
        LogsToCopy {
            files,
            rank,
            positions,
            newest: BTreeMap::new(),
            starts,
            whole_bytes_max: u64::MAX,
            must_be_whole: true,
            _copying: Arc::default(),
        }
    }
}

/// Begins a round of images: until its end, nothing is written over that was read.
pub fn begin_round(logs: &NodeLogs) -> Result<()> {
    logs.unit.iter().for_each(|unit| unit.round.borrow_mut().clear());
    pwrite(&logs.files.memory, &1_u64.to_ne_bytes(), UNIT_KEEPS_AT)?;
    Ok(())
}

/// Ends a round of images: all are taken, or it is given up.
pub fn end_round(logs: &NodeLogs) -> Result<()> {
    pwrite(&logs.files.memory, &0_u64.to_ne_bytes(), UNIT_KEEPS_AT)?;
    Ok(())
}
