//! Places in a process's history where a start of it has stood: its beginning, and wherever an image of it was taken.
//!
//! In: how often it has taken something in, how many bytes these frames had, and how many frames it has sent
//! ([`Standing`]). Out: where what came after that begins, in each of the lists that are kept ([`Mark`]). What has a number of
//! bytes is found by that. Intakes have not: where they go on is remembered when somebody first stands there, as a rule behind
//! all that there have been until then.
//!
//! What lies before the oldest image of a process is dropped, as soon as that is said ([`Histories::trim`]). One of which there
//! was too much to be kept is recorded again from where it stands for an image ([`Histories::begin_anew`]): nothing before that
//! is needed to bring it back to there.
//!
//! What may never happen: somebody is told what came after another place than where it stands.

use alloc::vec::Vec;

use super::archive::{Archive, Place};
use super::diverged::SENT_BYTES;
use super::history::{Histories, History, TOO_MUCH};
use super::intakes::{Intakes, Spot};
use super::shelf::UNREADABLE;
use super::store::{Cursor, Store};
use crate::id::Address;
use crate::wire::hello::Standing;

/// Of those that are remembered, the later ones are: images of a process are few, and taken one after the other.
const MARKS_MAX: usize = 64;

/// What somebody is told who says that it stands where it cannot,
const NOWHERE: &str = "it stands where it has never been";
/// or cannot any more.
const DROPPED: &str = "what it did before its checkpoints is not kept any more";

/// See the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    pub standing: Standing,
    pub intakes: Cursor,
    pub given: Place,
    pub sent: Cursor,
}

/// Where intakes go on, for places in their order.
#[derive(Debug, Default)]
pub(super) struct Marks {
    all: Vec<(Standing, Spot)>,
}

impl Marks {
    /// Where `standing` is in these lists.
    pub fn find(
        &mut self,
        standing: Standing,
        intakes: &Intakes,
        given: &Archive,
        sent: &Store,
    ) -> Result<Mark, &'static str> {
        let start = intakes.start();
        if standing.intakes < start.number {
            return Err(DROPPED);
        }
        let given = given.at(standing.taken).ok_or(NOWHERE)?;
        let bytes = standing.sent.checked_mul(SENT_BYTES as u64).ok_or(NOWHERE)?;
        let sent = sent.at(bytes).ok_or(NOWHERE)?;
        let place = self.all.partition_point(|(known, _)| known.intakes <= standing.intakes);
        let before = place.checked_sub(1).map(|place| self.all[place].1);
        let known = before.unwrap_or(start);
        let spot = intakes.spot(known, standing.intakes).ok_or(NOWHERE)?;
        if known.number < standing.intakes || before.is_none() {
            self.all.insert(place, (standing, spot));
            if self.all.len() > MARKS_MAX {
                self.all.remove(0);
            }
        }
        Ok(Mark { standing, intakes: spot.cursor, given, sent })
    }

    /// The last place where somebody has stood.
    pub fn newest(&self) -> Standing {
        self.all.last().map_or(Standing::default(), |(standing, _)| *standing)
    }

    /// Nobody will stand before so many intakes any more: the place where they have been made, if somebody has stood there.
    fn keep_from(&mut self, intakes: u64) -> Option<(Standing, Spot)> {
        let found = self.all.iter().position(|(known, _)| known.intakes == intakes)?;
        self.all.drain(..found);
        self.all.first().copied()
    }
}

impl Histories {
    /// No start of the endpoint will ever stand before so many intakes: what led there is dropped.
    pub fn trim(&mut self, address: Address, intakes: u64) {
        let Self { all, bytes, shelf } = self;
        let Some(history) = all.get_mut(&address) else { return };
        let Some((standing, spot)) = history.marks.keep_from(intakes) else { return };
        let before = history.bytes();
        let sent = history.sent.at(standing.sent * SENT_BYTES as u64);
        let given = history.given.at(standing.taken);
        if let Some((given, sent)) = given.zip(sent) {
            let freed = history.given.trim(given, &mut shelf.spare);
            shelf.take_back(&freed);
            history.sent.trim(sent);
            history.intakes.trim(spot);
        }
        *bytes -= before - history.bytes();
    }

    /// An endpoint of which nothing is kept since there was too much of that, or what there was could not be read, stands here, as
    /// the same start of it as ever: from here on all of it is kept. False: it is none.
    pub fn begin_anew(&mut self, address: Address, standing: Standing) -> bool {
        let Some(history) = self.all.get_mut(&address) else { return false };
        if !matches!(history.given_up, Some(TOO_MUCH | UNREADABLE)) {
            return false;
        }
        let reads = history.reads.take();
        *history = History::behind(standing);
        history.reads = reads;
        self.shelf.note_begun_anew(address);
        true
    }
}
