//! Every combination of what decides where a log goes on, in a region of three sizes: what is
//! chosen is free, what is discarded was read, and nothing is discarded that need not be.

use alloc::vec::Vec;
use std::cell::Cell;

use super::*;
use crate::log::segment::SEGMENT_BYTES_MAX;

const FRAME: usize = 60 << 10;
const MIB: usize = 1 << 20;

/// The words of a log, and a disk.
struct World {
    released: u64,
    read: u64,
    discarded: Cell<u64>,
    disk_has_room: bool,
}

impl Releases for World {
    fn released(&self) -> u64 {
        self.released
    }

    fn read(&self) -> u64 {
        self.read
    }

    fn discarded(&self) -> u64 {
        self.discarded.get()
    }

    fn discard(&self, wanted: u64) -> u64 {
        if wanted > self.discarded.get() && wanted <= self.read {
            self.discarded.set(wanted);
        }
        self.discarded.get()
    }
}

/// A log that is full to the end of its segment, and the positions at the end of each segment.
struct Log {
    chain: SegmentChain,
    region: usize,
    ends: Vec<(LogSegment, u64)>,
}

impl Log {
    /// A log with so many bytes of frames: in memory, and behind that on disk.
    fn new(region: usize, bytes: usize, on_disk: bool) -> Log {
        let chain = SegmentChain::new(region);
        let mut log = Log { chain, region, ends: Vec::new() };
        loop {
            while log.chain.cursor().has_room(FRAME) {
                log.chain.pass(FRAME);
            }
            if log.chain.cursor().position() as usize >= bytes {
                return log;
            }
            let memory = log.chain.new_segment(FRAME);
            let disk = || log.chain.segment_on_disk(FRAME, 0).map(|(segment, _)| segment);
            let next = if on_disk { memory.or_else(disk) } else { memory };
            let Some(next) = next else { return log };
            log.ends.push((log.chain.cursor().segment(), log.chain.cursor().position()));
            log.chain.jump(next);
        }
    }

    fn has_untouched_memory(&self) -> bool {
        self.chain.new_segment(FRAME).is_some()
    }

    /// Whether the segment holds nothing that is needed from this position on.
    fn is_free(&self, segment: LogSegment, needed: u64) -> bool {
        let overlaps = |it: &LogSegment| it.start() < segment.end() && segment.start() < it.end();
        let mut used = self.ends.iter().filter(|(it, _)| overlaps(it));
        !overlaps(&self.chain.cursor().segment()) && used.all(|(_, end)| *end < needed)
    }

    fn is_on_disk(&self, segment: LogSegment) -> bool {
        segment.is_on_disk(self.region)
    }
}

const BOTH: [bool; 2] = [false, true];

/// Every memory share that differs in its effect.
fn shares() -> Vec<MemoryShare> {
    let mut shares = Vec::new();
    for (fill, excess) in [
        (MemoryFill::Little, 0),
        (MemoryFill::Some, 0),
        (MemoryFill::Full, 0),
        (MemoryFill::Full, 3 * SEGMENT_BYTES_MAX),
    ] {
        for fair_bytes in [0, 1 << 30] {
            for may_become_fair in BOTH {
                shares.push(MemoryShare { fill, excess, fair_bytes, may_become_fair });
            }
        }
    }
    shares
}

fn demands() -> Vec<Demand> {
    let mut demands = Vec::new();
    for memory in shares() {
        for has_disk in BOTH {
            for is_all_or_nothing in BOTH {
                for is_soon_released in BOTH {
                    let bytes = FRAME;
                    demands.push(Demand {
                        bytes,
                        memory,
                        has_disk,
                        is_all_or_nothing,
                        is_soon_released,
                    });
                }
            }
        }
    }
    demands
}

/// Asks for a segment, and checks what is chosen.
fn check(log: &mut Log, demand: &Demand, world: &World) -> Option<LogSegment> {
    let before = world.discarded.get();
    let had_memory = log.has_untouched_memory();
    let has_region = log.chain.segment_on_disk(FRAME, 0).is_some();
    let had_disk = demand.has_disk && world.disk_has_room && has_region;
    let to = log.chain.next_segment(demand, world, |segment| {
        assert!(demand.has_disk && segment.bytes_of_disk());
        world.disk_has_room
    });
    let now = world.discarded.get();
    let what = std::format!("{demand:?}: {before} to {now}, {to:?}");
    assert!(now == before || now <= world.read, "{what}");
    let may_discard = !had_disk && (demand.memory.is_full() || !had_memory);
    assert!(now == before || may_discard, "discards too early: {what}");
    let Some(to) = to else {
        let mut large = log.ends.iter().filter(|(it, _)| it.end() - it.start() > FRAME);
        let oldest = large.next().map(|(_, end)| *end);
        let has_free = oldest.is_some_and(|end| end < world.released.max(before));
        let is_read = oldest.is_some_and(|end| end < world.read);
        assert!(!had_memory && !had_disk && !has_free && !is_read, "finds nothing: {what}");
        return None;
    };
    assert!(log.is_free(to, world.released.max(now)), "holds what is needed: {what}");
    assert!(to.end() - to.start() >= FRAME + 64, "too small: {what}");
    assert!(demand.has_disk || !log.is_on_disk(to), "no disk: {what}");
    Some(to)
}

impl LogSegment {
    fn bytes_of_disk(self) -> bool {
        self.end() - self.start() == SEGMENT_BYTES_MAX
    }
}

#[test]
fn every_combination_chooses_what_is_free() {
    let mut counts = [0; 4];
    for (region, bytes) in [(8 * MIB, 64 * MIB), (64 * MIB, 12 * MIB), (64 * MIB, 100 * MIB)] {
        for on_disk in BOTH {
            let end = Log::new(region, bytes, on_disk).chain.cursor().position();
            let places = [0, end / 4, end / 2, end];
            for demand in demands().iter().filter(|it| it.has_disk || !on_disk) {
                for (released, read) in places.iter().flat_map(|it| places.map(|read| (*it, read)))
                {
                    for discarded in places.into_iter().filter(|it| *it <= read) {
                        for disk_has_room in BOTH {
                            let mut log = Log::new(region, bytes, on_disk);
                            let discarded = Cell::new(discarded);
                            let world = World { released, read, discarded, disk_has_room };
                            let to = check(&mut log, demand, &world);
                            let kind = to.map_or(0, |it| 1 + usize::from(log.is_on_disk(it)));
                            counts[kind] += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(counts[..3].iter().all(|count| *count > 100), "{counts:?}");
}

fn full_memory(excess: usize) -> MemoryShare {
    MemoryShare { fill: MemoryFill::Full, excess, fair_bytes: 0, may_become_fair: false }
}

fn demand(memory: MemoryShare, has_disk: bool) -> Demand {
    let (is_all_or_nothing, is_soon_released) = (false, false);
    Demand { bytes: FRAME, memory, has_disk, is_all_or_nothing, is_soon_released }
}

fn all_read(log: &Log) -> World {
    let read = log.chain.cursor().position();
    World { released: 0, read, discarded: Cell::new(0), disk_has_room: true }
}

#[test]
fn full_memory_gives_up_the_oldest_segment_and_no_more() {
    let mut log = Log::new(64 * MIB, 12 * MIB, false);
    let world = all_read(&log);
    let to = check(&mut log, &demand(full_memory(0), false), &world).unwrap();
    let (oldest, end) = *log.ends.iter().find(|(it, _)| it.end() - it.start() > FRAME).unwrap();
    assert_eq!((to, world.discarded.get()), (oldest, end + 1));
}

#[test]
fn what_is_beyond_the_bound_is_given_up_with_it() {
    let mut log = Log::new(64 * MIB, 24 * MIB, false);
    let world = all_read(&log);
    check(&mut log, &demand(full_memory(6 * MIB), false), &world).unwrap();
    let freed = log.ends.iter().filter(|(_, end)| *end < world.discarded.get());
    let freed: usize = freed.map(|(it, _)| it.end() - it.start()).sum();
    assert!((6 * MIB..=9 * MIB).contains(&freed), "{freed} bytes");
}

#[test]
fn the_disk_comes_before_anything_is_given_up() {
    let mut log = Log::new(64 * MIB, 12 * MIB, false);
    let world = all_read(&log);
    let to = check(&mut log, &demand(full_memory(0), true), &world).unwrap();
    assert!(log.is_on_disk(to));
    assert_eq!(world.discarded.get(), 0);
}

#[test]
fn without_images_all_that_was_read_is_given_up() {
    let mut log = Log::new(64 * MIB, 12 * MIB, false);
    let world = all_read(&log);
    let demand = Demand { is_all_or_nothing: true, ..demand(full_memory(0), false) };
    let to = check(&mut log, &demand, &world).unwrap();
    assert_eq!(world.discarded.get(), world.read);
    let large = log.ends.iter().map(|(it, _)| it.end() - it.start());
    assert_eq!(Some(to.end() - to.start()), large.filter(|bytes| *bytes > LARGE_BYTES).min());
}

#[test]
fn a_log_that_has_less_than_its_part_takes_more_although_memory_is_full() {
    let mut log = Log::new(64 * MIB, MIB, false);
    let world = all_read(&log);
    let memory = MemoryShare { fair_bytes: 8 * MIB, may_become_fair: true, ..full_memory(0) };
    let to = check(&mut log, &demand(memory, false), &world).unwrap();
    assert!(to.start() >= MIB, "{to:?}");
    assert_eq!(world.discarded.get(), 0);
}
