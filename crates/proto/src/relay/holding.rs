//! What a relay keeps of endpoints that may come back, for whoever looks for trouble.
//!
//! Nothing enters, and nothing is changed. What leaves is bounded, however much there is.

use alloc::vec::Vec;

use super::archive::Shown;
use super::history::History;
use super::reads::Reads;
use super::*;

/// Intakes that are read over to come to the first that is shown: they are read one by one, and others wait meanwhile.
const SKIPPED_MAX: u64 = 1 << 22;
/// Intakes that are shown at once,
const MOMENTS_MAX: u64 = 100;
/// and frames.
const FRAMES_MAX: u64 = 200;

/// What is kept of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Whose it is.
    pub address: Address,
    /// Why nothing is kept of it any more.
    pub given_up: Option<&'static str>,
    /// Frames that it was given,
    pub frames: u64,
    /// their bytes,
    pub bytes: u64,
    /// and those of them that are not in memory.
    pub disk_bytes: u64,
    /// Frames that it has sent,
    pub sent: u64,
    /// and what is kept of them.
    pub sent_bytes: u64,
    /// What is kept of what it has read of clocks, if it is on another node.
    pub read_bytes: u64,
    /// How often it has taken something in, or let its time go on,
    pub intakes: u64,
    /// and what the record of that takes.
    pub intake_bytes: u64,
    /// Frames that it has taken in.
    pub taken_in: u64,
    /// How often it had looked for messages when it did so last.
    pub polls: u64,
    /// Whether its present start is being told what was.
    pub is_told: bool,
}

/// One intake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Its number.
    pub number: u64,
    /// At which poll since the endpoint began,
    pub polls: u64,
    /// and after how much time of its own.
    pub micros: u64,
    /// How many frames it has taken in,
    pub frames: u32,
    /// and the number of the first of them.
    pub first_frame: u64,
}

/// A piece of what is kept of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// Intakes, in order.
    pub moments: Vec<Moment>,
    /// Frames that these have taken in; behind the last intake those that nobody has taken in yet.
    pub frames: Vec<Shown>,
}

impl Holding {
    fn of(address: Address, history: &History) -> Self {
        Self {
            address,
            given_up: history.given_up,
            frames: history.given.frame_count(),
            bytes: history.given.len(),
            disk_bytes: history.given.away_bytes(),
            sent: history.sent_count,
            sent_bytes: history.sent.len(),
            read_bytes: history.reads.as_ref().map_or(0, Reads::bytes),
            intakes: history.intakes.count(),
            intake_bytes: history.intakes.bytes(),
            taken_in: history.intakes.frames(),
            polls: history.intakes.polls(),
            is_told: history.is_told(),
        }
    }
}

impl Relay {
    /// What is kept of each endpoint from `first` on.
    pub fn holdings(&self, first: Address) -> impl Iterator<Item = Holding> {
        let histories = self.histories.iter();
        histories.flat_map(move |it| it.all.range(first..)).map(|(who, it)| Holding::of(*who, it))
    }

    /// So many intakes of an endpoint, beginning with this one, and their frames, as far as they are shown at once. `None`:
    /// nothing is kept of it, or there are too many before.
    pub fn excerpt(&self, address: Address, from: u64, count: u64) -> Option<Excerpt> {
        let history = self.histories.as_ref()?.all.get(&address)?;
        let end = history.intakes.count();
        let from = from.min(end);
        // What led to the oldest image is not kept any more.
        let start = history.intakes.start();
        let from = from.max(start.number);
        if history.given_up.is_some() || from - start.number > SKIPPED_MAX {
            return None;
        }
        let mut cursor = start.cursor;
        let (mut polls, mut micros, mut first_frame) = (start.polls, start.micros, start.frames);
        let mut moments = Vec::new();
        for number in start.number..end.min(from.saturating_add(count.min(MOMENTS_MAX))) {
            let intake = history.intakes.read(&mut cursor)?;
            polls = intake.polls.saturating_add(polls);
            micros = intake.micros.saturating_add(micros);
            if number >= from {
                moments.push(Moment { number, polls, micros, frames: intake.frames, first_frame });
            }
            first_frame += intake.frames as u64;
        }
        let start = moments.first().map_or(first_frame, |moment| moment.first_frame);
        // Behind the last one comes what waits.
        let last = if moments.is_empty() { start.saturating_add(count) } else { first_frame };
        let frames = history.given.show(start..last.min(start.saturating_add(FRAMES_MAX)));
        Some(Excerpt { moments, frames })
    }
}
