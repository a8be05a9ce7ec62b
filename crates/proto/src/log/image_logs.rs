//! What checkpoint images hold of logs, so that processes of a lost node can begin with their
//! images on another node.
//!
//! The logs between processes of a node are lost with the node, and their images are taken at
//! different moments. So the image of a process holds an *excerpt* of each of its logs, in both
//! directions: all that was sent there since the newest image of the process on the other side (or
//! since the beginning if that has none), and what it has not received yet; or, if that is little,
//! all that is kept. Of two images the later one holds what one side has sent and the other one has
//! not received, and also what one side sends again although the other one has received it, which
//! is compared.
//!
//! ```text
//! log of A to B:  ──────[ B has received this in its image … A has sent this in its image ]───
//!                        needed: the later of both images has it
//! ```
//!
//! The excerpts lie in a file of the image: [`ImageLogs::emit`], then the frames of each excerpt,
//! with their padding.
//!
//! What enters: the file of a node's logs; the excerpts of images. What leaves: bytes for an image;
//! which images fit together, and the beginning of each log for the file of another node. What may
//! never happen: a process begins with an image that needs what no image holds.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::layout::{LOGGED_PROCESSES_MAX, REGION_BYTES};
use super::release::{LogPositions, PairPositions};
use super::segment::{LogCursor, SLOT_BYTES, SegmentChain};
use super::walk::{ReadLog, Walk};
use crate::wire::frame::HEADER_BYTES;

/// The first word of a file with excerpts.
const MAGIC: u64 = u64::from_le_bytes(*b"LBlogs01");
/// Bytes that are copied at once.
const COPIED_BYTES: usize = 1 << 20;

/// A part of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The position of its first frame.
    pub start: u64,
    /// The position behind its last frame.
    pub end: u64,
}

impl Excerpt {
    /// Bytes of its frames, with their padding.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Measures what a log holds from `start` on. `cursor`: of a place at `start` or before. The
    /// writer may run. `None`: no frame ends at `start`, or a word was being written.
    pub fn measure(
        log: &impl ReadLog,
        (from, to): (usize, usize),
        mut cursor: LogCursor,
        start: u64,
    ) -> Option<(Excerpt, LogCursor)> {
        let mut walk = Walk::new(log, REGION_BYTES);
        walk.pass_to(&mut cursor, start)?;
        let begin = cursor;
        while walk.pass(&mut cursor)?.is_some() {}
        Some((Excerpt { from, to, start, end: cursor.position() }, begin))
    }

    /// Copies the frames, which lie from `cursor` on. `None`: they are not what was measured,
    /// because a word was being written then, or the writer has used their places again.
    pub fn copy(
        &self,
        log: &impl ReadLog,
        mut cursor: LogCursor,
        mut take: impl FnMut(&[u8]) -> Option<()>,
    ) -> Option<()> {
        let mut walk = Walk::new(log, REGION_BYTES);
        walk.check_segments();
        let mut bytes = Vec::new();
        while cursor.position() < self.end {
            // Frames that lie one behind the other.
            let position = cursor.position();
            let at = walk.pass(&mut cursor)??;
            let behind = |cursor: &LogCursor| at + (cursor.position() - position) as usize;
            while cursor.position() < self.end && behind(&cursor) - at < COPIED_BYTES {
                let before = cursor;
                if walk.pass(&mut cursor)?? != behind(&before) {
                    cursor = before;
                    break;
                }
            }
            bytes.resize(behind(&cursor) - at, 0);
            log.read(at, &mut bytes)?;
            take(&bytes)?;
        }
        (cursor.position() == self.end).then_some(())
    }
}

/// The file of a node's logs, of each of which an agent knows a place to begin with.
pub trait NodeFile<L: ReadLog> {
    /// The region of a log, named by its sender and its receiver.
    fn log(&self, pair: (usize, usize)) -> L;

    /// A place of the log before which nothing is needed. `None`: none is known, because the log
    /// was discarded.
    fn start(&self, pair: (usize, usize)) -> Option<LogCursor>;

    /// Whether the log was discarded beyond this position, because memory was full.
    fn is_discarded(&self, pair: (usize, usize), position: u64) -> bool;
}

/// Places of logs before which nothing is needed: those up to which the agent has released them, or
/// their beginnings.
/// None of a log that was discarded: its frames cannot be followed any more.
#[derive(Clone, Debug, Default)]
pub struct LogStarts(BTreeMap<(usize, usize), Option<LogCursor>>);

impl LogStarts {
    /// A log begins at this position in the file of this node.
    pub fn begin(&mut self, pair: (usize, usize), position: u64) {
        self.0.insert(pair, Some(LogCursor::beginning(position)));
    }

    /// A place of a log; `None`: none is known.
    pub fn put(&mut self, pair: (usize, usize), start: Option<LogCursor>) {
        self.0.insert(pair, start);
    }

    /// The place of a log.
    pub fn start(&self, pair: (usize, usize)) -> Option<LogCursor> {
        self.0.get(&pair).copied().unwrap_or(Some(LogCursor::START))
    }

    /// A log is about to be released up to this position. `discarded`: up to where it was
    /// discarded, which is asked once the log was read.
    pub fn advance(
        &mut self,
        log: &impl ReadLog,
        pair: (usize, usize),
        position: u64,
        discarded: impl FnOnce() -> u64,
    ) {
        let start = self.start(pair);
        let next = start.and_then(|start| {
            let mut cursor = start;
            Walk::new(log, REGION_BYTES).pass_to(&mut cursor, position)?;
            (discarded() <= start.position()).then_some(cursor)
        });
        self.0.insert(pair, next);
    }
}

/// What an image holds of the logs of its process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageLogs {
    /// How far the logs had come.
    pub positions: LogPositions,
    /// The excerpts, in the order of their frames in the file.
    pub excerpts: Vec<Excerpt>,
}

impl ImageLogs {
    /// The bytes before the frames.
    pub fn emit(&self) -> Vec<u8> {
        let positions: Vec<u64> = self.positions.words().collect();
        let head = [MAGIC, positions.len() as u64, self.excerpts.len() as u64];
        let excerpts = self.excerpts.iter();
        let excerpts = excerpts.flat_map(|it| [it.from as u64, it.to as u64, it.start, it.end]);
        let words = head.into_iter().chain(positions).chain(excerpts);
        words.flat_map(u64::to_le_bytes).collect()
    }

    /// Reads the bytes before the frames; returns also where in the file the frames of each excerpt
    /// lie, and their end. `None`: these are none.
    pub fn parse(bytes: &[u8]) -> Option<(ImageLogs, Vec<u64>)> {
        let word = |place: usize| {
            let bytes = bytes.get(place.checked_mul(8)?..)?.first_chunk()?;
            Some(u64::from_le_bytes(*bytes))
        };
        let [magic, count, excerpts] = [word(0)?, word(1)?, word(2)?];
        let limit = |count: u64, most: usize| usize::try_from(count).ok().filter(|it| *it <= most);
        let count = limit(count, 2 + 3 * LOGGED_PROCESSES_MAX).filter(|_| magic == MAGIC)?;
        let excerpt_count = limit(excerpts, 2 * LOGGED_PROCESSES_MAX)?;
        word(2 + count)?;
        let positions = LogPositions::from_words(|place| word(3 + place).unwrap_or(u64::MAX))?;
        let mut ends = Vec::from([8 * (3 + count + 4 * excerpt_count) as u64]);
        let mut excerpts = Vec::new();
        for number in 0..excerpt_count {
            let at = 3 + count + 4 * number;
            let process = |place| limit(word(place)?, LOGGED_PROCESSES_MAX - 1);
            let (from, to) = (process(at)?, process(at + 1)?);
            let excerpt = Excerpt { from, to, start: word(at + 2)?, end: word(at + 3)? };
            ends.push(ends.last()?.checked_add(excerpt.end.checked_sub(excerpt.start)?)?);
            excerpts.push(excerpt);
        }
        Some((ImageLogs { positions, excerpts }, ends))
    }

    /// Measures the excerpts for an image of `process`, whose logs have come to `positions`;
    /// returns also where each begins. `newest`: how far the logs between a process and this one
    /// had come in the newest image of that process. If all that is kept of the logs takes at most
    /// `whole_bytes_max` bytes, the excerpts are all of that: then older images fit, too. A log of
    /// which something was discarded has no excerpt. `None`: a word was being written.
    pub fn measure<L: ReadLog>(
        process: usize,
        positions: LogPositions,
        logs: &impl NodeFile<L>,
        newest: impl Fn(usize) -> PairPositions,
        whole_bytes_max: u64,
    ) -> Option<(ImageLogs, Vec<LogCursor>)> {
        let all = |_| PairPositions::default();
        let whole = ImageLogs::measure_from(process, positions.clone(), logs, all)?;
        let bytes: u64 = whole.0.excerpts.iter().map(Excerpt::bytes).sum();
        match bytes <= whole_bytes_max {
            true => Some(whole),
            false => ImageLogs::measure_from(process, positions, logs, newest),
        }
    }

    fn measure_from<L: ReadLog>(
        process: usize,
        positions: LogPositions,
        logs: &impl NodeFile<L>,
        from: impl Fn(usize) -> PairPositions,
    ) -> Option<(ImageLogs, Vec<LogCursor>)> {
        let mut image = ImageLogs { positions, excerpts: Vec::new() };
        let mut cursors = Vec::new();
        for (peer, own) in image.positions.pairs.clone() {
            let PairPositions { sent, received } = from(peer);
            // What has arrived and was not received yet may have been released at its sender's.
            let sent = sent.min(own.received);
            // From what is confirmed on, what was sent again is compared.
            let received = received.min(own.sent);
            for (pair, start) in [((process, peer), received), ((peer, process), sent)] {
                let Some(cursor) = logs.start(pair) else { continue };
                let start = start.max(cursor.position());
                // The way to the excerpt must be there, too.
                if logs.is_discarded(pair, cursor.position()) {
                    continue;
                }
                let (excerpt, cursor) = Excerpt::measure(&logs.log(pair), pair, cursor, start)?;
                image.excerpts.push(excerpt);
                cursors.push(cursor);
            }
        }
        Some((image, cursors))
    }

    /// Copies the frames of the excerpts that were measured. `None`: they are not what was
    /// measured.
    pub fn copy<L: ReadLog>(
        &self,
        cursors: &[LogCursor],
        logs: &impl NodeFile<L>,
        mut take: impl FnMut(&[u8]) -> Option<()>,
    ) -> Option<()> {
        for (excerpt, cursor) in self.excerpts.iter().zip(cursors) {
            let pair = (excerpt.from, excerpt.to);
            excerpt.copy(&logs.log(pair), *cursor, &mut take)?;
            let start = logs.start(pair).map_or(0, |start| start.position());
            if logs.is_discarded(pair, start) {
                return None;
            }
        }
        Some(())
    }

    /// A log that has a place in `starts`, and of which there is no excerpt because it was
    /// discarded.
    pub fn missing(&self, starts: &LogStarts) -> Option<(usize, usize)> {
        let known = starts.0.iter().filter(|(_, start)| start.is_some());
        let mut pairs = known.map(|(pair, _)| *pair);
        pairs.find(|(from, to)| self.excerpt(*from, *to).is_none())
    }

    fn excerpt(&self, from: usize, to: usize) -> Option<(usize, Excerpt)> {
        let mut all = self.excerpts.iter().copied().enumerate();
        all.find(|(_, excerpt)| (excerpt.from, excerpt.to) == (from, to))
    }
}

/// Where an incarnation finds the beginning of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BegunLog {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The position at which the log begins.
    pub begins: u64,
    /// The process whose image has frames of the log, and the number of the excerpt. `None`: the
    /// log is empty.
    pub frames: Option<(usize, usize)>,
}

/// Images that fit together, and what is needed of their logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageChoice {
    /// By process: the number of its image among those that were given. A process without an image
    /// begins with its program.
    pub images: BTreeMap<usize, usize>,
    /// The logs of the processes that do not begin at 0.
    pub logs: Vec<BegunLog>,
}

/// No images of two processes fit together: what the first has sent, and the second has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnfitImages {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
}

/// Chooses images of the processes of a lost node, as new ones as possible. `images`: by process,
/// what its images hold, the newest first; none: it begins with its program.
///
/// # Errors
/// None fit together.
pub fn choose_images(images: &BTreeMap<usize, Vec<ImageLogs>>) -> Result<ImageChoice, UnfitImages> {
    let mut chosen: BTreeMap<usize, usize> = BTreeMap::new();
    for (process, all) in images {
        if !all.is_empty() {
            chosen.insert(*process, 0);
        }
    }
    loop {
        let choice = Chosen { images, chosen: &chosen };
        let unfit = match choice.logs() {
            Ok(logs) => return Ok(ImageChoice { images: chosen, logs }),
            Err(unfit) => unfit,
        };
        // The later image of both counts on a newer one of the other side, which cannot be had.
        let later = choice.later(&unfit).ok_or(unfit)?;
        *chosen.entry(later).or_default() += 1;
    }
}

/// Images of processes.
struct Chosen<'a> {
    images: &'a BTreeMap<usize, Vec<ImageLogs>>,
    chosen: &'a BTreeMap<usize, usize>,
}

impl Chosen<'_> {
    fn image(&self, process: usize) -> Option<&ImageLogs> {
        self.images.get(&process)?.get(*self.chosen.get(&process)?)
    }

    /// All logs between these processes, and between them and others.
    fn logs(&self) -> Result<Vec<BegunLog>, UnfitImages> {
        let mut logs = Vec::new();
        for process in self.images.keys().copied() {
            let peers = self.image(process).map(|image| image.positions.pairs.keys());
            for peer in peers.into_iter().flatten().copied() {
                if !self.images.contains_key(&peer) {
                    logs.push(self.log_with_other_node(process, (process, peer))?);
                    logs.push(self.log_with_other_node(process, (peer, process))?);
                } else if process < peer || self.image(peer).is_none_or(|it| !it.knows(process)) {
                    logs.push(self.log_of_node(process, peer)?);
                    logs.push(self.log_of_node(peer, process)?);
                }
            }
        }
        logs.retain(|log| log.begins > 0 || log.frames.is_some());
        Ok(logs)
    }

    /// The log between a process and one of another node, which sends what is missing, or is sent
    /// it.
    fn log_with_other_node(
        &self,
        process: usize,
        (from, to): (usize, usize),
    ) -> Result<BegunLog, UnfitImages> {
        let excerpt = self.image(process).and_then(|image| image.excerpt(from, to));
        let (number, excerpt) = excerpt.ok_or(UnfitImages { from, to })?;
        let frames = (excerpt.bytes() > 0).then_some((process, number));
        Ok(BegunLog { from, to, begins: excerpt.start, frames })
    }

    /// The log between two processes of the lost node.
    fn log_of_node(&self, from: usize, to: usize) -> Result<BegunLog, UnfitImages> {
        let pair = |process, peer| {
            let image: Option<&ImageLogs> = self.image(process);
            image.and_then(|image| image.positions.pairs.get(&peer)).copied().unwrap_or_default()
        };
        let (sent, received) = (pair(from, to).sent, pair(to, from).received);
        let (start, end) = (sent.min(received), sent.max(received));
        for process in [from, to] {
            let excerpt = self.image(process).and_then(|image| image.excerpt(from, to));
            if let Some((number, excerpt)) = excerpt
                && (excerpt.start..=excerpt.end).contains(&start)
                && end <= excerpt.end
            {
                let frames = (excerpt.bytes() > 0).then_some((process, number));
                return Ok(BegunLog { from, to, begins: excerpt.start, frames });
            }
        }
        match start == end {
            true => Ok(BegunLog { from, to, begins: start, frames: None }),
            false => Err(UnfitImages { from, to }),
        }
    }

    /// The one of two processes that has to begin with an older image.
    fn later(&self, unfit: &UnfitImages) -> Option<usize> {
        let has_older = |process: &usize| {
            let number = self.chosen.get(process);
            let all = self.images.get(process);
            number.zip(all).is_some_and(|(number, all)| number + 1 < all.len())
        };
        let UnfitImages { from, to } = *unfit;
        let begins = |process: usize| {
            let image = self.image(process)?;
            image.excerpt(from, to).map(|(_, excerpt)| excerpt.start)
        };
        // The later image holds what came last.
        let mut both = [from, to];
        both.sort_by_key(|process| core::cmp::Reverse(begins(*process)));
        both.into_iter().find(has_older)
    }
}

impl ImageLogs {
    fn knows(&self, process: usize) -> bool {
        self.positions.pairs.contains_key(&process)
    }
}

/// Lays frames, each with its padding, into the region of a log that begins at `begins`, in which
/// there may be older ones.
/// `write`: writes bytes at a place of the region. `None`: these are not frames, they are more than
/// fit, or they cannot be written.
pub fn lay_frames(
    frames: &[u8],
    begins: u64,
    mut write: impl FnMut(usize, &[u8]) -> Option<()>,
) -> Option<()> {
    let mut chain = SegmentChain::beginning(REGION_BYTES, LogCursor::beginning(begins));
    let (mut at, mut written) = (0, 0);
    while at < frames.len() {
        let length = frames.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))?;
        let bytes = HEADER_BYTES + length as usize;
        let padded = bytes.next_multiple_of(SLOT_BYTES);
        frames.get(at..at + padded)?;
        if !chain.cursor().has_room(bytes) {
            let end = chain.cursor().at();
            write(end - (at - written), &frames[written..at])?;
            written = at;
            let next = chain.new_segment(bytes)?;
            write(end, &next.announcement().to_le_bytes())?;
            chain.jump(next);
        }
        chain.pass(bytes);
        at += padded;
    }
    let end = chain.cursor().at();
    write(end - (at - written), &frames[written..])?;
    write(end, &[0; 8])
}

#[cfg(test)]
mod tests {
    use core::cell::RefCell;
    use std::vec;

    use super::*;
    /// A frame of this many bytes behind its header, with its padding.
    fn frame(bytes: usize, value: u8) -> Vec<u8> {
        let mut frame = vec![value; (HEADER_BYTES + bytes).next_multiple_of(SLOT_BYTES)];
        frame[..8].copy_from_slice(&(bytes as u64 | 7 << 32).to_le_bytes());
        frame
    }

    struct Region(RefCell<Vec<u8>>);

    impl ReadLog for Region {
        fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
            bytes.copy_from_slice(self.0.borrow().get(at..at + bytes.len())?);
            Some(())
        }
    }

    #[test]
    fn frames_are_laid_as_a_log_and_copied_from_it() {
        const BEGINS: u64 = 6400;
        let region = Region(RefCell::new(vec![0; 64 << 20]));
        let frames: Vec<Vec<u8>> = (0..1500_usize)
            .map(|number| frame(number * 37 % 3000 + number % 7 * 8000, number as u8))
            .collect();
        region.0.borrow_mut().fill(0xff);
        let laid = lay_frames(&frames.concat(), BEGINS, |at, bytes| {
            region.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            Some(())
        });
        laid.unwrap();
        let begin = LogCursor::beginning(BEGINS);
        let skipped: usize = frames[..100].iter().map(Vec::len).sum();
        for (skipped, rest) in [(0, &frames[..]), (skipped, &frames[100..])] {
            let start = BEGINS + skipped as u64;
            let (excerpt, cursor) = Excerpt::measure(&region, (1, 2), begin, start).unwrap();
            let mut copied = Vec::new();
            let take = |bytes: &[u8]| {
                copied.extend_from_slice(bytes);
                Some(())
            };
            excerpt.copy(&region, cursor, take).unwrap();
            assert!(copied == rest.concat());
            assert_eq!(excerpt.bytes(), copied.len() as u64);
        }
        assert!(Excerpt::measure(&region, (1, 2), begin, BEGINS + 1).is_none(), "within a frame");
        let torn = &frames[0][..frames[0].len() - 1];
        assert!(lay_frames(torn, 0, |_, _| Some(())).is_none());
        let is_empty =
            |at, bytes: &[u8]| (at == 0 && bytes.iter().all(|byte| *byte == 0)).then_some(());
        assert!(lay_frames(&[], 64, is_empty).is_some());
    }

    #[test]
    fn the_head_is_read_as_it_was_written_and_nothing_else_is() {
        let pair = PairPositions { sent: 640, received: 64 };
        let positions = LogPositions { pairs: [(3, pair)].into(), deliveries: 99 };
        let excerpts = vec![
            Excerpt { from: 0, to: 3, start: 64, end: 640 },
            Excerpt { from: 3, to: 0, start: 0, end: 64 },
        ];
        let logs = ImageLogs { positions, excerpts };
        let bytes = logs.emit();
        let length = bytes.len() as u64;
        let ends = vec![length, length + 576, length + 640];
        assert_eq!(ImageLogs::parse(&bytes), Some((logs, ends)));
        for end in 0..bytes.len() {
            assert_eq!(ImageLogs::parse(&bytes[..end]), None, "{end} bytes");
        }
        for (word, value) in [(0, 1), (1, 1 << 40), (2, 1 << 40), (8, 2000), (10, u64::MAX)] {
            let mut bytes = bytes.clone();
            bytes[8 * word..8 * word + 8].copy_from_slice(&u64::to_le_bytes(value));
            assert_eq!(ImageLogs::parse(&bytes), None, "word {word}");
        }
    }

    /// Processes of a node and one of another node, which send, receive and have images taken.
    struct Node {
        /// By sender and receiver: what was sent, and what of it was received.
        logs: BTreeMap<(usize, usize), (u64, u64)>,
        images: BTreeMap<usize, Vec<ImageLogs>>,
    }

    impl Node {
        fn newest(&self, process: usize) -> LogPositions {
            let image = self.images.get(&process).and_then(|all| all.first());
            image.map(|image| image.positions.clone()).unwrap_or_default()
        }

        fn take_image(&mut self, process: usize, count: usize) {
            let mut image = ImageLogs::default();
            for peer in (0..count).filter(|peer| *peer != process) {
                let sent = self.logs[&(process, peer)].0;
                let received = self.logs[&(peer, process)].1;
                image.positions.pairs.insert(peer, PairPositions { sent, received });
                let before = self.newest(peer).pairs.get(&process).copied().unwrap_or_default();
                for (from, to, start) in
                    [(process, peer, before.received), (peer, process, before.sent.min(received))]
                {
                    let end = self.logs[&(from, to)].0;
                    image.excerpts.push(Excerpt { from, to, start, end });
                }
            }
            let all = self.images.entry(process).or_default();
            all.insert(0, image);
            all.truncate(2);
        }
    }

    fn check(
        images: &BTreeMap<usize, Vec<ImageLogs>>,
        choice: &ImageChoice,
        count: usize,
    ) -> Result<(), &'static str> {
        let image = |process: usize| Some(&images[&process][*choice.images.get(&process)?]);
        let pair = |process, peer: usize| {
            let pairs = image(process).map(|image| &image.positions.pairs);
            pairs.and_then(|pairs| pairs.get(&peer)).copied().unwrap_or_default()
        };
        for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            if from == to || !images.contains_key(&from) || !images.contains_key(&to) {
                continue;
            }
            let (sent, received) = (pair(from, to).sent, pair(to, from).received);
            let log = choice.logs.iter().find(|log| (log.from, log.to) == (from, to));
            let begins = log.map_or(0, |log| log.begins);
            let frames = log.and_then(|log| log.frames);
            let excerpt =
                frames.and_then(|(process, number)| image(process).map(|it| it.excerpts[number]));
            let end = excerpt.map_or(begins, |excerpt| excerpt.end);
            if begins > sent.min(received) || end < sent.max(received) {
                return Err("something is missing");
            }
            if excerpt.is_some_and(|it| (it.from, it.to, it.start) != (from, to, begins)) {
                return Err("another log");
            }
        }
        Ok(())
    }

    #[test]
    fn the_newest_images_fit_together_and_older_ones_if_they_do() {
        let (mut older, mut unfit) = (0, 0);
        for seed in 0..300_u64 {
            let mut state = seed;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as usize % below
            };
            let count = 4;
            let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
            let logs = pairs.map(|pair| (pair, (0, 0))).collect();
            let mut node = Node { logs, images: BTreeMap::new() };
            (0..count - 1).for_each(|process| drop(node.images.insert(process, Vec::new())));
            for _ in 0..200 {
                let (one, other) = (random(count), random(count));
                let log = node.logs.get_mut(&(one, other)).unwrap();
                match random(10) {
                    _ if one == other => (),
                    0 => node.take_image(one, count),
                    1..6 => log.0 += 64,
                    _ => log.1 = (log.1 + 64).min(log.0),
                }
            }
            // The last process is of another node.
            node.images.remove(&(count - 1));
            let choice = choose_images(&node.images).unwrap();
            assert!(choice.images.values().all(|number| *number == 0), "seed {seed}");
            assert_eq!(check(&node.images, &choice, count), Ok(()), "seed {seed}");
            // Some image cannot be read.
            let damaged = random(count - 1);
            let Some(all) = node.images.get_mut(&damaged).filter(|all| all.len() == 2) else {
                continue;
            };
            all.remove(0);
            match choose_images(&node.images) {
                Ok(choice) => {
                    older += 1;
                    assert_eq!(check(&node.images, &choice, count), Ok(()), "seed {seed}");
                }
                Err(_) => unfit += 1,
            }
        }
        assert!(older > 20 && unfit > 20, "{older} and {unfit}");
    }
}
