//! Tests of the segments of a log, with a region of words in place of memory.

use std::collections::BTreeMap;

use super::*;

const REGION: usize = 64 << 20;

/// A region of words, and what a writer and a reader do with it.
#[derive(Default)]
struct Memory(BTreeMap<usize, (u64, u64)>);

impl Memory {
    fn word(&self, at: usize) -> u64 {
        self.0.get(&at).map_or(0, |(word, _)| *word)
    }

    /// Appends a frame as a writer does, and returns whether it was there already.
    fn append(
        &mut self,
        chain: &mut SegmentChain,
        bytes: usize,
        value: u64,
        released: u64,
    ) -> bool {
        loop {
            let cursor = *chain.cursor();
            match cursor.read(self.word(cursor.at()), REGION).unwrap() {
                Announcement::Jump(to) => chain.jump(to),
                Announcement::Frame(there) => {
                    assert_eq!((there, self.0[&cursor.at()].1), (bytes, value));
                    chain.pass(bytes);
                    return true;
                }
                Announcement::Nothing if !cursor.has_room(bytes) => {
                    let to = chain.released_segment(bytes, released);
                    let to = to.or_else(|| chain.new_segment(bytes)).expect("room");
                    self.0.insert(to.start(), (0, 0));
                    self.0.insert(cursor.at(), (to.announcement(), 0));
                    chain.jump(to);
                }
                Announcement::Nothing => {
                    self.0.insert(cursor.behind(bytes), (0, 0));
                    self.0.insert(cursor.at(), ((bytes - HEADER_BYTES) as u64 | 7 << 32, value));
                    chain.pass(bytes);
                    return false;
                }
            }
        }
    }

    fn receive(&self, cursor: &mut LogCursor) -> Option<(usize, u64)> {
        loop {
            match cursor.read(self.word(cursor.at()), REGION).unwrap() {
                Announcement::Nothing => return None,
                Announcement::Jump(to) => cursor.jump(to),
                Announcement::Frame(bytes) => {
                    let value = self.0[&cursor.at()].1;
                    cursor.pass(bytes);
                    return Some((bytes, value));
                }
            }
        }
    }
}

/// Pseudo-random numbers, for lengths and moments.
fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize
}

fn length(state: &mut u64) -> usize {
    HEADER_BYTES
        + match random(state) % 4 {
            0 => 0,
            1 => random(state) % 64,
            2 => random(state) % 8192,
            _ => random(state) % (60 << 10),
        }
}

#[test]
fn a_silent_log_takes_a_page_and_a_busy_one_large_segments() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    assert_eq!(chain.touched(), SEGMENT_BYTES_MIN);
    let mut sizes = std::vec![SEGMENT_BYTES_MIN];
    while chain.touched() < 8 << 20 {
        memory.append(&mut chain, 1000, 1, 0);
        let segment = chain.cursor().segment();
        if sizes.last() != Some(&segment.bytes) {
            sizes.push(segment.bytes);
        }
    }
    assert_eq!(sizes, [12, 13, 14, 15, 16, 17, 18, 19, 20, 21].map(|bits| 1 << bits));
}

#[test]
fn the_largest_segments_are_huge_pages() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    while chain.touched() < 16 << 20 {
        memory.append(&mut chain, 50_000, 1, 0);
        let LogSegment { start, bytes } = chain.cursor().segment();
        assert!(bytes < SEGMENT_BYTES_MAX || start % SEGMENT_BYTES_MAX == 0, "{start}");
    }
}

#[test]
fn released_segments_are_used_again_the_newest_first() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    let mut read = LogCursor::START;
    for number in 0..100_000 {
        memory.append(&mut chain, 4000, number, read.position());
        assert_eq!(memory.receive(&mut read), Some((4000, number)));
    }
    assert!(chain.touched() <= 32 << 10, "{} bytes", chain.touched());
}

#[test]
fn memory_that_was_given_back_is_used_again_and_counted() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    let mut read = LogCursor::START;
    for number in 0..300 {
        memory.append(&mut chain, 4000, number, 0);
        memory.receive(&mut read);
    }
    let touched = chain.touched();
    assert_eq!((chain.taken(), chain.needed(0)), (touched, touched));
    let given_back = chain.give_back(read.position(), 1);
    assert_eq!(given_back.len(), 1, "no more than is wanted");
    assert_eq!(chain.taken(), touched - given_back[0].bytes);
    let others = chain.give_back(read.position(), touched);
    let given_back: usize = given_back.iter().chain(&others).map(|it| it.bytes).sum();
    assert!(given_back >= touched / 2, "{given_back} of {touched}");
    assert_eq!((chain.taken(), chain.touched()), (touched - given_back, touched));
    assert_eq!(chain.needed(read.position()), chain.taken());
    assert_eq!(chain.give_back(read.position(), touched), []);
    for number in 300..600 {
        memory.append(&mut chain, 4000, number, read.position());
        assert_eq!(memory.receive(&mut read), Some((4000, number)));
    }
    assert_eq!(chain.touched(), touched, "no new segment");
    assert!(chain.taken() > touched - given_back);
}

#[test]
fn a_log_goes_on_on_disk_and_comes_back_to_memory() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    let mut read = LogCursor::START;
    let on_disk = |memory: &mut Memory, chain: &mut SegmentChain, released| {
        while chain.cursor().has_room(4000) {
            memory.append(chain, 4000, 1, released);
        }
        let (to, takes_disk) = chain.segment_on_disk(4000, released).unwrap();
        assert!(to.is_on_disk(REGION) && to.bytes == SEGMENT_BYTES_MAX);
        memory.0.insert(to.start(), (0, 0));
        memory.0.insert(chain.cursor().at(), (to.announcement(), 0));
        chain.jump(to);
        takes_disk
    };
    for _ in 0..3 {
        assert!(!on_disk(&mut memory, &mut chain, 0), "new ones");
    }
    memory.append(&mut chain, 4000, 1, 0);
    assert_eq!((chain.taken(), chain.taken_on_disk()), (SEGMENT_BYTES_MIN, 6 << 20));
    assert_eq!(chain.needed(0), SEGMENT_BYTES_MIN + (6 << 20));
    while memory.receive(&mut read).is_some() {}
    let before = chain.clone();
    assert!(on_disk(&mut memory, &mut chain, read.position()), "one that takes disk");
    assert_eq!(chain.taken_on_disk(), 6 << 20);
    // The next incarnation follows the jumps, and knows the same segments.
    let mut again = before;
    while again.cursor().position() < chain.cursor().position() {
        memory.append(&mut again, 4000, 1, 0);
    }
    assert_eq!(again.taken_on_disk(), 6 << 20);
    memory.append(&mut chain, 4000, 1, 0);
    while memory.receive(&mut read).is_some() {}
    let given_back = chain.give_back(read.position(), REGION);
    assert_eq!(given_back.iter().filter(|it| it.is_on_disk(REGION)).count(), 2);
    assert_eq!((chain.taken(), chain.taken_on_disk()), (0, 2 << 20));
    assert!(!on_disk(&mut memory, &mut chain, read.position()), "it was given back");
    while chain.cursor().has_room(4000) {
        memory.append(&mut chain, 4000, 1, 0);
    }
    memory.append(&mut chain, 1000, 1, read.position());
    assert!(!chain.cursor().segment().is_on_disk(REGION), "memory, as soon as there is some");
    let mut full = SegmentChain::new(8 << 20);
    full.touched_on_disk = 2 << 20;
    assert!(full.segment_on_disk(100, 0).is_some());
    full.touched_on_disk = 4 << 20;
    assert!(full.segment_on_disk(100, 0).is_none() && chain.segment_on_disk(3 << 20, 0).is_none());
}

#[test]
fn a_segment_whose_jump_was_not_read_is_not_released() {
    let (mut memory, mut chain) = (Memory::default(), SegmentChain::new(REGION));
    let mut read = LogCursor::START;
    while chain.cursor().has_room(1000) {
        memory.append(&mut chain, 1000, 5, 0);
    }
    while memory.receive(&mut read).is_some() {}
    // The reader has read all frames of the first segment, and has not followed its jump.
    assert_eq!(read.position(), chain.cursor().position());
    for number in 0..20 {
        memory.append(&mut chain, 1000, number, read.position());
    }
    assert_eq!(memory.receive(&mut read), Some((1000, 0)));
}

/// A writer and a reader that are restored from images again and again: each frame arrives once
/// and in order, and what an image needs is never written over.
#[test]
fn whatever_is_restored_finds_what_it_needs() {
    for seed in 0..200 {
        let mut state = seed;
        let mut memory = Memory::default();
        let mut chain = SegmentChain::new(REGION);
        let mut read = LogCursor::START;
        let (mut sent, mut received) = (Vec::new(), 0);
        // The two kept images of each side: the state, and how many frames were sent or read.
        let mut writers = [(chain.clone(), 0), (chain.clone(), 0)];
        let mut readers = [(read, 0), (read, 0)];
        let mut next = 0;
        for _ in 0..2000 {
            let released = writers[0].0.cursor().position().min(readers[0].0.position());
            match random(&mut state) % 40 {
                // No image is taken of a process that replays.
                0 if next == sent.len() => writers = [writers[1].clone(), (chain.clone(), next)],
                1 if received >= readers[1].1 => readers = [readers[1], (read, received)],
                2 => (chain, next) = writers[random(&mut state) % 2].clone(),
                3 => (read, received) = readers[random(&mut state) % 2],
                4..22 => {
                    if next == sent.len() {
                        sent.push((length(&mut state), random(&mut state) as u64));
                    }
                    let (bytes, value) = sent[next];
                    memory.append(&mut chain, bytes, value, released);
                    next += 1;
                }
                _ => {
                    if let Some(frame) = memory.receive(&mut read) {
                        assert_eq!(frame, sent[received], "seed {seed}");
                        received += 1;
                    }
                }
            }
        }
        while let Some(frame) = memory.receive(&mut read) {
            assert_eq!(frame, sent[received], "seed {seed}");
            received += 1;
        }
        assert_eq!(received, sent.len(), "seed {seed}");
    }
}

#[test]
fn a_log_that_begins_later_is_read_from_any_position_that_is_kept() {
    const BASE: u64 = 640_000;
    let mut memory = Memory::default();
    let begin = LogCursor::beginning(BASE).with_frames(7);
    let mut chain = SegmentChain::beginning(REGION, begin);
    let mut places = std::vec![BASE];
    for number in 0..500 {
        memory.append(&mut chain, 3000, number, 0);
        places.push(chain.cursor().position());
    }
    assert_eq!(chain.cursor().frames(), 507);
    assert!(chain.cursor_before(BASE - 1).is_none());
    assert!(chain.cursor_before(chain.cursor().position() + 1).is_none());
    let find = |chain: &SegmentChain, number: usize| {
        let mut cursor = chain.cursor_before(places[number])?;
        while cursor.position() < places[number] {
            memory.receive(&mut cursor).unwrap();
        }
        Some((cursor.position(), memory.receive(&mut cursor)))
    };
    for (number, place) in places[..500].iter().enumerate() {
        let found = (*place, Some((3000, number as u64)));
        assert_eq!(find(&chain, number), Some(found));
    }
    chain.needed(places[400]);
    assert!(find(&chain, 10).is_none() && find(&chain, 400).is_some());
}

#[test]
fn impossible_words_are_refused() {
    let cursor = LogCursor::START;
    let jump = |start, bytes| LogSegment { start, bytes }.announcement();
    assert_eq!(
        cursor.read(jump(4096, 8192), REGION),
        Ok(Announcement::Jump(LogSegment { start: 4096, bytes: 8192 }))
    );
    for word in [jump(REGION, 4096), jump(0, 4 << 20), jump(0, 2048), 5000 | 7 << 32, u64::MAX] {
        assert_eq!(cursor.read(word, REGION), Err(MalformedLog), "{word:x}");
    }
}
