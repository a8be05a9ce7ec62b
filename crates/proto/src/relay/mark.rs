//! Places in a process's history where a start of it has stood: its beginning, and wherever an image of it was taken.
//!
//! In: how often it has taken something in, how many bytes these frames had, and how many frames it has sent
//! ([`Standing`]). Out: where what came after that begins, in each of the lists that are kept ([`Mark`]). What has a number of
//! bytes is found by that. Intakes have not: those between two places are read once, when the later one is first asked for.

use alloc::vec::Vec;

use super::history::DIGEST_BYTES;
use super::intakes::Intakes;
use super::store::{Cursor, Store};
use crate::wire::hello::Standing;

/// Of those that are remembered, the later ones are: images of a process are few, and taken one after the other.
const MARKS_MAX: usize = 64;

/// What somebody is told who says that it stands where it cannot.
const NOWHERE: &str = "it stands where it has never been";

/// See the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    pub standing: Standing,
    pub intakes: Cursor,
    pub given: Cursor,
    pub sent: Cursor,
}

/// Where intakes begin, after so many: in order.
#[derive(Debug, Default)]
pub(super) struct Marks(Vec<(u64, Cursor)>);

impl Marks {
    /// Where `standing` is in these lists.
    pub fn find(
        &mut self,
        standing: Standing,
        intakes: &Intakes,
        given: &Store,
        sent: &Store,
    ) -> Result<Mark, &'static str> {
        let given = given.at(standing.taken).ok_or(NOWHERE)?;
        let digests = standing.sent.checked_mul(DIGEST_BYTES as u64).ok_or(NOWHERE)?;
        let sent = sent.at(digests).ok_or(NOWHERE)?;
        if standing.intakes > intakes.count().into() {
            return Err(NOWHERE);
        }
        let place = self.0.partition_point(|(count, _)| *count <= standing.intakes);
        let before = place.checked_sub(1).map(|place| self.0[place]);
        let (count, mut cursor) = before.unwrap_or_default();
        for _ in count..standing.intakes {
            intakes.read(&mut cursor).ok_or(NOWHERE)?;
        }
        if count < standing.intakes {
            self.0.insert(place, (standing.intakes, cursor));
            if self.0.len() > MARKS_MAX {
                self.0.remove(0);
            }
        }
        Ok(Mark { standing, intakes: cursor, given, sent })
    }
}
