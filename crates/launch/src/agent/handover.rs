//! Ranks of a node that is lost are handed over to another one: first the relay takes nothing more of their starts there, then all
//! that is known of their records of clocks and last intakes goes to the agent that takes them, piece by piece, then they are
//! started (`spares`).
//!
//! Two know of a record: the relay has what came in front of messages, the agent here what came in front of printed lines and
//! questions. It is only ever added to, so the longer of the two is all that anybody has seen something of. The relay writes what
//! it has into a file that it shares with this agent. Both have whole batches only: of one that the node was telling when it was
//! lost nobody has seen anything that follows, and where it breaks off may be in the middle of an entry.
//!
//! What may never happen: a start is told less than what somebody has seen follows from, or a part of an entry; more than a piece
//! waits here.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Agent;
use super::clocks::PIECE_BYTES;
use super::wards::Memory;
use crate::control::moved::Known;
use crate::control::{Message, Node};
use crate::link::BACKLOG_BYTES_MAX;

/// A relay drops what it says when nobody reads that: it is asked again.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the relay has of the record of a rank of which it takes nothing more: it lies in the file that both have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fenced {
    pub rank: u32,
    pub first: u64,
    pub bytes: u64,
    pub polls: u64,
    pub is_full: bool,
}

/// One that is under way.
pub struct Handover {
    /// As it was.
    pub lost: Node,
    /// Places of the agents below, of the node that is lost and of the one that takes its ranks.
    pub from: usize,
    pub to: usize,
    /// Those that are not handed over yet,
    left: VecDeque<u32>,
    /// and all.
    pub ranks: Vec<u32>,
    stage: Stage,
}

enum Stage {
    Ask,
    Asked(Instant),
    /// The record of the first one has been told up to here; nothing of it yet.
    Tell(Fenced, Option<u64>),
}

impl Handover {
    pub fn new(lost: Node, from: usize, to: usize, ranks: Vec<u32>) -> Handover {
        Handover { lost, from, to, left: ranks.iter().copied().collect(), ranks, stage: Stage::Ask }
    }

    /// To another node, from the beginning: the one that was to take the ranks is lost as well.
    pub fn turn_to(&mut self, to: usize) {
        (self.to, self.stage) = (to, Stage::Ask);
        self.left = self.ranks.iter().copied().collect();
    }
}

/// The next piece of what is known of a record, behind `at`, and where it ends; `None` behind the last one.
fn piece(
    fenced: &Fenced,
    memory: &Memory,
    file: &File,
    at: Option<u64>,
) -> Result<Option<(Known, u64)>> {
    let (here, there) = (memory.end(), fenced.first + fenced.bytes);
    let end = here.max(there);
    let (from, rest) = match at {
        Some(at) if at >= end => return Ok(None),
        Some(at) => (at, Known { rank: fenced.rank, ..Known::default() }),
        None => {
            // What lies before either was in front of an image.
            let base = memory.first.max(fenced.first);
            (base, Known { base, ..memory.rest(fenced.rank) })
        }
    };
    let to = end.min(from + PIECE_BYTES);
    let reads = if there >= here && from >= fenced.first {
        let mut bytes = vec![0; (to - from) as usize];
        file.read_exact_at(&mut bytes, from - fenced.first).context("the relay's file")?;
        bytes
    } else {
        let range = from - memory.first..to.min(here) - memory.first;
        memory.reads[range.start as usize..range.end as usize].to_vec()
    };
    let polls = rest.polls.max(fenced.polls);
    let is_full = rest.is_full || fenced.is_full;
    // The rest goes with the first one.
    let next = from + reads.len() as u64;
    Ok(Some((Known { from, reads, polls, is_full, goes_on: next < end, ..rest }, next)))
}

impl Agent {
    /// Goes on with the first of those that are under way.
    pub(super) fn advance_handovers(&mut self) {
        while self.is_running() && !self.handovers.is_empty() {
            match self.advance_handover() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    return self.fail(format!("ranks cannot go on on another node: {error:#}"));
                }
            }
        }
    }

    /// False: it waits for somebody.
    fn advance_handover(&mut self) -> Result<bool> {
        let Self { handovers, relay, wards, children, .. } = self;
        let (Some(handover), Some(relay)) = (handovers.first_mut(), relay) else {
            return Ok(false);
        };
        let Some(&rank) = handover.left.front() else {
            let handover = self.handovers.remove(0);
            self.move_ranks(handover);
            return Ok(true);
        };
        let link = &mut children[handover.to].process.link;
        match &mut handover.stage {
            Stage::Asked(at) if at.elapsed() < PATIENCE => {
                let Some(fenced) = relay.take_fenced(rank) else { return Ok(false) };
                handover.stage = Stage::Tell(fenced, None);
            }
            Stage::Ask | Stage::Asked(_) => {
                // Also what was handed over to another node that is lost as well.
                wards.drop_torn(rank);
                relay.fence(rank, wards.next_first_start(rank));
                handover.stage = Stage::Asked(Instant::now());
            }
            Stage::Tell(..) if link.backlog_bytes() >= BACKLOG_BYTES_MAX => return Ok(false),
            Stage::Tell(fenced, at) => {
                let nothing = Memory::default();
                let memory = wards.memory(rank).unwrap_or(&nothing);
                match piece(fenced, memory, relay.handover()?, *at)? {
                    Some((known, next)) => {
                        // Whoever takes the rank over says only what comes after that.
                        wards.handle_known(known.clone());
                        link.send(&Message::Known(Box::new(known)));
                        *at = Some(next);
                    }
                    None => {
                        handover.left.pop_front();
                        handover.stage = Stage::Ask;
                    }
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wards::Wards;
    use super::*;

    /// All pieces, put together.
    fn told(fenced: &Fenced, memory: &Memory, file: &File) -> (Known, usize) {
        let mut all = Known::default();
        let (mut at, mut count) = (None, 0);
        while let Some((known, next)) = piece(fenced, memory, file, at).unwrap() {
            let base = if count == 0 { known.base } else { all.base };
            assert_eq!(known.from, base + all.reads.len() as u64);
            let reads = [all.reads, known.reads].concat();
            let polls = all.polls.max(known.polls);
            let is_full = all.is_full || known.is_full;
            let rest = if count == 0 {
                (known.first_intake, known.intakes)
            } else {
                (all.first_intake, all.intakes)
            };
            assert_eq!(known.goes_on, piece(fenced, memory, file, Some(next)).unwrap().is_some());
            all = Known {
                goes_on: false,
                rank: known.rank,
                base,
                from: base,
                reads,
                is_full,
                polls,
                first_intake: rest.0,
                intakes: rest.1,
                files: if count == 0 { known.files } else { all.files },
            };
            (at, count) = (Some(next), count + 1);
        }
        (all, count)
    }

    #[test]
    fn the_longer_of_two_records_is_handed_over_with_the_later_looks() {
        let file =
            File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::empty()).unwrap());
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES + 5).map(|at| (at * 7) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let memory = |length: usize| Memory {
            first: 0,
            reads: bytes[..length].to_vec(),
            polls: 8,
            is_full: false,
            first_intake: 3,
            intakes: [[1, 2, 3]].into(),
            files: vec![4; 80],
            begun: None,
        };
        for (here, there, polls) in
            [(0, 0, 9), (5, 3, 7), (3, 5, 9), (9, 9, 8), (4, bytes.len(), 1), (bytes.len(), 4, 11)]
        {
            let fenced =
                Fenced { rank: 2, first: 0, bytes: there as u64, polls, is_full: here == 9 };
            let (known, count) = told(&fenced, &memory(here), &file);
            assert!(known.reads == bytes[..here.max(there)], "{here} {there}");
            assert_eq!((known.rank, known.polls, known.is_full), (2, polls.max(8), here == 9));
            assert_eq!((known.first_intake, &known.intakes[..]), (3, &[[1, 2, 3]][..]));
            assert_eq!(count, here.max(there).div_ceil(PIECE_BYTES as usize).max(1));
            // What the next node will say goes on behind that.
            let mut wards = Wards::default();
            wards.handle_known(Known {
                rank: 2,
                reads: bytes[..here].to_vec(),
                ..Known::default()
            });
            let mut at = None;
            while let Some((piece, next)) =
                piece(&fenced, wards.memory(2).unwrap(), &file, at).unwrap()
            {
                wards.handle_known(piece);
                at = Some(next);
            }
            let from = here.max(there) as u64;
            wards.handle_known(Known { rank: 2, from, reads: vec![77], ..Known::default() });
            assert_eq!(wards.memory(2).unwrap().reads.len() as u64, from + 1);
        }
    }

    #[test]
    fn what_was_cut_is_handed_over_by_nobody() {
        let flags = rustix::fs::MemfdFlags::empty();
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.write_all_at(b"fghi", 0).unwrap();
        let fenced = Fenced { rank: 2, first: 5, bytes: 4, polls: 1, is_full: false };
        let memory =
            |first, reads: &[u8]| Memory { first, reads: reads.to_vec(), ..Memory::default() };
        // The agent's knows more at its beginning, at its end, or the same; it ends before the relay's begins, or knows nothing.
        let rows: [(Memory, u64, &[u8]); 6] = [
            (memory(2, b"cdefg"), 5, b"fghi"),
            (memory(7, b"hij"), 7, b"hij"),
            (memory(7, b"hi"), 7, b"hi"),
            (memory(2, b"cde"), 5, b"fghi"),
            (memory(2, b"cd"), 5, b"fghi"),
            (memory(0, b""), 5, b"fghi"),
        ];
        for (memory, base, reads) in rows {
            let (told, _) = told(&fenced, &memory, &file);
            assert_eq!((told.base, &told.reads[..]), (base, reads), "{memory:?}");
        }
        // It has begun anew, and nothing was read since.
        let begun = Fenced { bytes: 0, ..fenced };
        let (all, count) = told(&begun, &memory(2, b"cd"), &file);
        assert_eq!((all.base, &all.reads[..], count), (5, &b""[..], 1));
        // Nobody knows anything.
        let nothing = told(&Fenced::default(), &Memory::default(), &file);
        assert_eq!(nothing, (Known::default(), 1));
    }

    #[test]
    fn what_a_lost_node_has_not_told_to_its_end_is_handed_over_by_nobody() {
        let flags = rustix::fs::MemfdFlags::empty();
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.write_all_at(b"abcd", 0).unwrap();
        let fenced = Fenced { rank: 2, first: 0, bytes: 4, polls: 5, is_full: false };
        let mut wards = Wards::default();
        let piece_of = |from, reads: &[u8], goes_on| {
            let (rank, reads) = (2, reads.to_vec());
            Known { rank, from, reads, goes_on, ..Known::default() }
        };
        wards.handle_known(Known { polls: 3, files: vec![1], ..piece_of(0, b"ab", false) });
        let torn = Known { polls: 9, files: vec![2], is_full: true, ..piece_of(2, b"cdefg", true) };
        wards.handle_known(torn);
        // What the agent knows ends further on, but within an entry.
        let all = told(&fenced, wards.memory(2).unwrap(), &file).0;
        assert_eq!((&all.reads[..], all.polls, all.is_full), (&b"abcd"[..], 5, false));
        assert_eq!(all.files, [1], "the effect that was announced there has not happened");
        // What is kept of it then is what was handed over.
        wards.drop_torn(2);
        let mut at = None;
        while let Some((known, next)) = piece(&fenced, wards.memory(2).unwrap(), &file, at).unwrap()
        {
            wards.handle_known(known);
            at = Some(next);
        }
        let memory = wards.memory(2).unwrap();
        assert_eq!((&memory.reads[..], memory.polls, memory.is_full), (&b"abcd"[..], 5, false));
        wards.handle_known(piece_of(4, b"other", false));
        assert_eq!(wards.memory(2).unwrap().reads, b"abcdother");
    }
}
