//! Places in a process's history where a start of it has stood: its beginning, and wherever an image of it was taken.
//!
//! In: how often it has taken something in, and how many frames it has sent ([`Standing`]). Out: where what came after that
//! begins, in each of the lists that are kept ([`Mark`]). Lists have no index: what lies between two places is read once,
//! when the later one is first asked for, and never again.

use alloc::vec::Vec;

use super::history::DIGEST_BYTES;
use super::intakes::Intakes;
use super::store::{Cursor, Store};
use crate::wire::frame::{HEADER_BYTES, Header};
use crate::wire::hello::Standing;

/// Of those that are remembered, the later ones are.
const MARKS_MAX: usize = 64;

/// See the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    pub standing: Standing,
    pub intakes: Cursor,
    pub given: Cursor,
    pub sent: Cursor,
}

/// Marks in the order of their places.
#[derive(Debug, Default)]
pub(super) struct Marks(Vec<Mark>);

impl Marks {
    /// Where `standing` is in these lists.
    pub fn find(
        &mut self,
        standing: Standing,
        intakes: &Intakes,
        given: &Store,
        sent: &Store,
    ) -> Result<Mark, &'static str> {
        const NOWHERE: &str = "it stands where it has never been";
        let is_before = |mark: &&Mark| {
            mark.standing.intakes <= standing.intakes && mark.standing.sent <= standing.sent
        };
        let mut mark = self.0.iter().rev().find(is_before).copied().unwrap_or_default();
        for _ in mark.standing.intakes..standing.intakes {
            let intake = intakes.read(&mut mark.intakes).ok_or(NOWHERE)?;
            for _ in 0..intake.frames {
                pass_frame(given, &mut mark.given).ok_or(NOWHERE)?;
            }
        }
        let digests = (standing.sent - mark.standing.sent) * DIGEST_BYTES as u64;
        pass(sent, &mut mark.sent, digests).ok_or(NOWHERE)?;
        mark.standing = standing;
        self.note(mark);
        Ok(mark)
    }

    fn note(&mut self, mark: Mark) {
        let place = |mark: &Mark| (mark.standing.intakes, mark.standing.sent);
        if let Err(at) = self.0.binary_search_by_key(&place(&mark), place) {
            self.0.insert(at, mark);
            if self.0.len() > MARKS_MAX {
                self.0.remove(0);
            }
        }
    }
}

fn pass_frame(given: &Store, cursor: &mut Cursor) -> Option<()> {
    let header = Header::parse(&given.take::<HEADER_BYTES>(cursor)?).ok()?;
    pass(given, cursor, header.length.into())
}

/// Moves the cursor on by so many bytes, if they are there.
fn pass(store: &Store, cursor: &mut Cursor, bytes: u64) -> Option<()> {
    let mut left = bytes;
    while left > 0 {
        let passed = store.read(cursor, usize::try_from(left).unwrap_or(usize::MAX)).len();
        if passed == 0 {
            return None;
        }
        left -= passed as u64;
    }
    Some(())
}
