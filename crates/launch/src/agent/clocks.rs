//! What a rank that may be started anew reads of clocks and chance: a memory file that outlives the rank, and the library
//! that fills it and reads it again (`crates/clocks`), loaded in front of the rank's own.
//!
//! Where the rank may go on on another node, what is new in that file goes to the agent above ([`Clocks::news`]), in front of what
//! the rank has printed or asked since; and there it is laid into the file of its next start ([`Clocks::lay`]).

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use landbridge_proto::clocks::{
    BASE_AT, CLOCKS_BYTES, FILES_AT, FILES_WORDS, FULL_AT, HEAD_BYTES, HELD_AT, POLLS_AT,
    RECORDED_AT, REFUSAL_AT, REFUSAL_BYTES, SHIPS_AT, TAKEN_AT, WANTED_AT,
};
use landbridge_proto::recent::{COUNT_AT, ENTRIES_BYTES, RECENT_MAX, place_of};
use landbridge_proto::setting::{RECOVER_CLOCKS, RECOVER_FILES, Setting, Value};
use rustix::fs::{FallocateFlags, MemfdFlags};

use super::again::Looks;
use super::held::Held;
use super::rank::same_length;
use crate::control::Job;
use crate::control::moved::Known;
use crate::mpi::{self, Environment};
use crate::sibling;
use crate::sys;

/// The library; cargo gives it this name.
const LIBRARY: &str = "liblandbridge_clocks.so";

/// Most of a record that is told at once.
pub const PIECE_BYTES: u64 = 1 << 20;

/// The record of one rank, for all its starts.
pub struct Clocks {
    record: OwnedFd,
    library: PathBuf,
    /// Whether what the rank does with files is recorded as well.
    with_files: bool,
    /// Open files that outlive it; empty if nobody wants that.
    held: Option<Held>,
    told: Cell<Told>,
    /// The head's part about files, as it was told last.
    told_files: RefCell<Vec<u8>>,
}

/// What of a record the agent above knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Told {
    reads: u64,
    intakes: u64,
    polls: u64,
    is_full: bool,
    /// What lies before this place is needed no more.
    base: u64,
}

impl Clocks {
    /// For a rank of this job; `None` if nobody wants it.
    /// `ships`: the rank may go on on another node.
    pub fn new(job: &Job, ships: bool) -> Result<Option<Clocks>> {
        let is_off = |setting: &Setting| {
            let variable = setting.variable();
            let said = job.environment.iter().find(|(name, _)| *name == variable);
            said.is_some_and(|(_, text)| setting.parse(text) == Ok(Value::Switch(false)))
        };
        if is_off(&RECOVER_CLOCKS) {
            return Ok(None);
        }
        let with_files = !is_off(&RECOVER_FILES);
        let library = sibling::path(LIBRARY)?;
        if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" \t:".contains(byte)) {
            bail!(
                "{} cannot be loaded in front of a program: there is a blank or a colon in its path (without it: \
                 --set recover_clocks=off)",
                library.display()
            );
        }
        let record = record().context("no memory file")?;
        let held = if with_files { Some(Held::new()?) } else { None };
        let (told, told_files) = (Cell::default(), RefCell::default());
        let clocks = Clocks { record, library, with_files, held, told, told_files };
        clocks.write(SHIPS_AT, &u64::from(ships).to_ne_bytes()).context("no memory file")?;
        let bits = clocks.held().map_or([0; 2], Held::bits).map(u64::to_ne_bytes);
        clocks.write(HELD_AT, bits.as_flattened()).context("no memory file")?;
        Ok(Some(clocks))
    }

    /// Nobody has written it yet.
    #[cfg(test)]
    pub fn for_test(held: Option<Held>) -> rustix::io::Result<Clocks> {
        let (record, library) = (record()?, "/opt/clocks.so".into());
        let (told, told_files) = (Cell::default(), RefCell::default());
        Ok(Clocks { record, library, with_files: true, held, told, told_files })
    }

    /// Open files that outlive the rank's processes.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }

    pub fn record(&self) -> BorrowedFd<'_> {
        self.record.as_fd()
    }

    /// Whether it had no room for something that the rank was told, so that another start cannot be.
    pub fn is_full(&self) -> bool {
        self.words(FULL_AT) != Some([0])
    }

    /// Why another incarnation would go wrong, if it would: what the rank did to files cannot be replayed.
    pub fn refusal(&self) -> Option<String> {
        let [length] = self.words(REFUSAL_AT)?;
        // An incarnation that was killed as it wrote the reason leaves a length beyond every text.
        let length = usize::try_from(length).ok()?.min(REFUSAL_BYTES);
        let text = self.bytes(REFUSAL_AT + size_of::<u64>(), length);
        (length > 0).then(|| String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }

    /// Bytes that have ever been recorded.
    pub fn recorded(&self) -> u64 {
        self.words(RECORDED_AT).map_or(0, |[recorded]| recorded)
    }

    /// How often the rank has looked for messages.
    pub fn looks(&self) -> Looks {
        let [furthest, present] = self.words(POLLS_AT).unwrap_or_default();
        let [taken] = self.words(TAKEN_AT).unwrap_or_default();
        Looks { furthest, present, taken }
    }

    /// Its process has ended, and there is no other one yet.
    pub fn rest(&self) -> Looks {
        let _ = rustix::io::pwrite(&self.record, &0_u64.to_ne_bytes(), POLLS_AT as u64 + 8);
        self.looks()
    }

    /// Whether a start that begins with the program can be told all that the first one was.
    pub fn may_begin(&self) -> bool {
        self.words(BASE_AT) == Some([0])
    }

    /// Asks the rank to make way for its image of this number.
    pub fn want_image(&self, number: u64) {
        let _ = rustix::io::pwrite(&self.record, &number.to_ne_bytes(), WANTED_AT as u64);
    }

    /// How many bytes of it the present start has been told.
    pub fn told(&self) -> u64 {
        let [_, told] = self.words(RECORDED_AT).unwrap_or_default();
        told
    }

    /// Whether a start may go on that was told so many bytes, here or on another node: what came after them is all here.
    pub fn check_place(&self, told: u64) -> Result<()> {
        let [base] = self.words(BASE_AT).unwrap_or([u64::MAX]);
        let [recorded] = self.words(RECORDED_AT).unwrap_or_default();
        if told < base {
            bail!("what it read of clocks after that is not kept any more");
        }
        if told > recorded {
            bail!("what it had read of clocks until then is not known here");
        }
        Ok(())
    }

    /// What has come since the last time, in this order: the rank may go on meanwhile, and each part must not be older than the one
    /// before (see [`Known`]). It is one batch, which ends where an entry of the record ends, since the rank counts what it has recorded
    /// by entries.
    pub fn news(&self, rank: u32) -> Vec<Known> {
        let told = self.told.get();
        let number = |at: usize| self.words::<1>(at).map_or(0, |[number]| number);
        // An effect that is announced there follows all that is read below.
        let files = self.files();
        let files = if *self.told_files.borrow() == files { Vec::new() } else { files };
        let reads = number(RECORDED_AT);
        let is_full = self.is_full();
        let polls = number(POLLS_AT);
        let intakes = number(COUNT_AT);
        let base = number(BASE_AT);
        let now = Told { reads, intakes, polls, is_full, base };
        if now == told && files.is_empty() {
            return Vec::new();
        }
        self.told.set(now);
        if !files.is_empty() {
            self.told_files.replace(files.clone());
        }
        let (first_intake, intakes) = self.intakes(told.intakes, intakes);
        let rest =
            Known { rank, is_full, polls, base, first_intake, intakes, files, ..Known::default() };
        let mut news = Vec::new();
        // Nobody needs to know what was cut meanwhile.
        let mut from = told.reads.max(base);
        loop {
            let to = reads.min(from + PIECE_BYTES);
            let bytes = self.entries(from, to);
            // What goes with the first piece holds for all, from the last one on.
            let rest =
                if news.is_empty() { rest.clone() } else { Known { rank, ..Known::default() } };
            news.push(Known { from, reads: bytes, goes_on: to < reads, ..rest });
            from = to;
            if from == reads {
                return news;
            }
        }
    }

    /// The head's part about files. An effect is there whole or not at all: its place is written last, and cleared first.
    fn files(&self) -> Vec<u8> {
        const PLACE: usize = 1;
        let Some(mut words) = self.words::<FILES_WORDS>(FILES_AT) else { return Vec::new() };
        let place = self.words::<1>(FILES_AT + PLACE * size_of::<u64>());
        if place != Some([words[PLACE]]) {
            words[PLACE] = 0;
        }
        let length = usize::try_from(words[FILES_WORDS - 1]).unwrap_or(REFUSAL_BYTES);
        let text = self.bytes(REFUSAL_AT + size_of::<u64>(), length.min(REFUSAL_BYTES));
        let files: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).chain(text).collect();
        // Nothing has been said about any.
        if files.iter().all(|byte| *byte == 0) { Vec::new() } else { files }
    }

    /// Intakes from one number to another, and which is the first of them that is still there.
    fn intakes(&self, from: u64, to: u64) -> (u64, Vec<[u64; 3]>) {
        let first = from.max(to.saturating_sub(RECENT_MAX as u64));
        let mut bytes = Vec::new();
        let mut number = first;
        while number < to {
            let count = (to - number).min(left_of_ring(number));
            bytes.extend(self.bytes(place_of(number), count as usize * INTAKE_BYTES));
            number += count;
        }
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let intakes: Vec<u64> = words.collect();
        let intakes = intakes.as_chunks::<3>().0;
        // Meanwhile others may have taken the place of the oldest.
        let last = self.words::<1>(COUNT_AT).map_or(0, |[count]| count);
        let valid = (last + 1).saturating_sub(RECENT_MAX as u64).clamp(first, to);
        (valid, intakes.get((valid - first) as usize..).unwrap_or_default().to_vec())
    }

    /// What is known of the rank, before it has its first start here, which comes behind the last piece. The agent above need not be
    /// told that.
    pub fn lay(&self, known: &Known) -> rustix::io::Result<()> {
        let mut told = self.told.get();
        told.reads = told.reads.max(known.end());
        told.intakes = told.intakes.max(known.first_intake + known.intakes.len() as u64);
        told.polls = told.polls.max(known.polls);
        told.is_full |= known.is_full;
        told.base = told.base.max(known.base);
        if told.reads.saturating_sub(told.base) > ENTRIES_BYTES as u64 {
            return Err(rustix::io::Errno::FBIG);
        }
        self.lay_entries(known.from, &known.reads)?;
        self.lay_intakes(known.first_intake, &known.intakes)?;
        if !known.files.is_empty() {
            self.write(FILES_AT, &known.files)?;
            self.told_files.replace(known.files.clone());
        }
        let words = [
            (RECORDED_AT, told.reads),
            (COUNT_AT, told.intakes),
            (POLLS_AT, told.polls),
            (FULL_AT, u64::from(told.is_full)),
            (BASE_AT, told.base),
        ];
        for (at, number) in words {
            self.write(at, &number.to_ne_bytes())?;
        }
        self.told.set(told);
        Ok(())
    }

    fn lay_entries(&self, mut at: u64, mut left: &[u8]) -> rustix::io::Result<()> {
        while !left.is_empty() {
            let offset = at as usize % ENTRIES_BYTES;
            let (now, later) = left.split_at(left.len().min(ENTRIES_BYTES - offset));
            self.write(HEAD_BYTES + offset, now)?;
            (at, left) = (at + now.len() as u64, later);
        }
        Ok(())
    }

    fn lay_intakes(&self, mut number: u64, mut left: &[[u64; 3]]) -> rustix::io::Result<()> {
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(left_of_ring(number) as usize));
            let words = now.as_flattened().iter();
            let bytes: Vec<u8> = words.flat_map(|word| word.to_ne_bytes()).collect();
            self.write(place_of(number), &bytes)?;
            (number, left) = (number + now.len() as u64, later);
        }
        Ok(())
    }

    fn write(&self, at: usize, mut bytes: &[u8]) -> rustix::io::Result<()> {
        let end = at + bytes.len();
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(&self.record, bytes, (end - bytes.len()) as u64)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// No start of the rank will stand before this place any more: the room is used again. The rank stands still.
    pub fn cut(&self, place: u64) {
        let [base] = self.words(BASE_AT).unwrap_or([u64::MAX]);
        let [recorded] = self.words(RECORDED_AT).unwrap_or_default();
        if place <= base || place > recorded {
            return;
        }
        // First the memory, which is not needed, then the word that lets the rank write there.
        self.give_back(base, place, recorded);
        let _ = self.write(BASE_AT, &place.to_ne_bytes());
    }

    /// Whole pages from one place to another take no memory any more.
    fn give_back(&self, from: u64, to: u64, recorded: u64) {
        const PAGE: u64 = HEAD_BYTES as u64;
        const ALL: u64 = ENTRIES_BYTES as u64;
        let page = from / PAGE * PAGE;
        // Of the first one nothing is needed either, unless it begins with the newest entries.
        let mut from = if recorded <= page + ALL { page } else { page + PAGE };
        let to = to / PAGE * PAGE;
        while from < to {
            let offset = from % ALL;
            let count = (to - from).min(ALL - offset);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.record, flags, PAGE + offset, count);
            from += count;
        }
    }

    /// What was read from one place to another.
    fn entries(&self, mut from: u64, to: u64) -> Vec<u8> {
        let mut all = Vec::new();
        while from < to {
            let offset = from as usize % ENTRIES_BYTES;
            let count = ((to - from) as usize).min(ENTRIES_BYTES - offset);
            all.extend(self.bytes(HEAD_BYTES + offset, count));
            from += count as u64;
        }
        all
    }

    fn bytes(&self, at: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let mut filled = 0;
        while filled < count {
            match rustix::io::pread(&self.record, &mut bytes[filled..], (at + filled) as u64) {
                Ok(read) if read > 0 => filled += read,
                _ => break,
            }
        }
        bytes.truncate(filled);
        bytes
    }

    fn words<const N: usize>(&self, at: usize) -> Option<[u64; N]> {
        let mut bytes = [[0; 8]; N];
        let room = bytes.as_flattened_mut();
        let wanted = room.len();
        let read = rustix::io::pread(&self.record, room, at as u64);
        (read == Ok(wanted)).then(|| bytes.map(u64::from_ne_bytes))
    }

    /// What the rank's environment says about it. `environment`: all else.
    pub fn variables(&self, environment: &Environment) -> [(&'static str, std::ffi::OsString); 3] {
        let mut libraries = self.library.clone().into_os_string();
        let others = mpi::variable(environment, "LD_PRELOAD");
        if !others.is_empty() {
            libraries.push(":");
            libraries.push(others);
        }
        let record = same_length(sys::raw(&self.record));
        let files = if self.with_files { "1" } else { "0" };
        [
            ("LD_PRELOAD", libraries),
            ("LANDBRIDGE_CLOCKS", record.into()),
            ("LANDBRIDGE_WATCH_FILES", files.into()),
        ]
    }
}

/// An intake in the record.
const INTAKE_BYTES: usize = 3 * size_of::<u64>();

/// Intakes from this number on that lie one behind the other.
fn left_of_ring(number: u64) -> u64 {
    RECENT_MAX as u64 - number % RECENT_MAX as u64
}

/// All zeros, of which only what is written takes memory.
fn record() -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("landbridge-clocks", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, CLOCKS_BYTES as u64)?;
    Ok(sys::out_of_the_way(file))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use landbridge_proto::clocks::{Head, Record, Source};

    use super::*;
    use crate::control::Ending;

    fn clocks() -> Clocks {
        Clocks::for_test(None).unwrap()
    }

    #[test]
    fn a_record_is_full_once_it_says_so() {
        let clocks = clocks();
        assert!(!clocks.is_full());
        rustix::io::pwrite(&clocks.record, &1_u64.to_ne_bytes(), FULL_AT as u64).unwrap();
        assert!(clocks.is_full());
    }

    /// As the rank does it.
    fn put(clocks: &Clocks, at: usize, number: u64) {
        rustix::io::pwrite(&clocks.record, &number.to_ne_bytes(), at as u64).unwrap();
    }

    fn read(clocks: &Clocks, from: u64, bytes: &[u8]) {
        rustix::io::pwrite(&clocks.record, bytes, HEAD_BYTES as u64 + from).unwrap();
        put(clocks, RECORDED_AT, from + bytes.len() as u64);
    }

    fn take_in(clocks: &Clocks, number: u64) {
        let words = [number + 1, 2, number].map(u64::to_ne_bytes);
        rustix::io::pwrite(&clocks.record, words.as_flattened(), place_of(number) as u64).unwrap();
        put(clocks, COUNT_AT, number + 1);
    }

    #[test]
    fn what_is_new_is_told_once_and_laid_into_the_record_of_the_next_start() {
        let (one, other) = (clocks(), clocks());
        assert_eq!(one.news(3), []);
        read(&one, 0, b"abc");
        take_in(&one, 0);
        put(&one, POLLS_AT, 7);
        let news = one.news(3);
        let [known] = &news[..] else { panic!("{news:?}") };
        assert_eq!((known.rank, known.from, &known.reads[..]), (3, 0, &b"abc"[..]));
        assert!(!known.goes_on);
        assert_eq!((known.polls, known.first_intake, &known.intakes[..]), (7, 0, &[[1, 2, 0]][..]));
        assert_eq!(one.news(3), []);
        other.lay(known).unwrap();
        // Much of both.
        let many = vec![5; 2 * PIECE_BYTES as usize + 1];
        read(&one, 3, &many);
        (1..RECENT_MAX as u64 + 20).for_each(|number| take_in(&one, number));
        let news = one.news(3);
        let go_on: Vec<bool> = news.iter().map(|known| known.goes_on).collect();
        assert_eq!(go_on, [true, true, false], "the last one ends where an entry does");
        assert_eq!(news[0].first_intake, 21, "the first of them are gone, and one may be just now");
        news.iter().for_each(|known| other.lay(known).unwrap());
        let all = [&b"abc"[..], &many].concat();
        assert!(other.entries(0, all.len() as u64) == all);
        assert_eq!(other.looks(), Looks { furthest: 7, present: 0, taken: 0 });
        assert_eq!(other.words(COUNT_AT), Some([RECENT_MAX as u64 + 20]));
        assert_eq!(other.words(place_of(500)), Some([501, 2, 500]));
        assert_eq!(other.news(3), [], "it came from there");
        // An effect that is under way.
        put(&one, FILES_AT + 8, 77);
        let news = one.news(3);
        assert_eq!(news.len(), 1);
        assert_eq!(news[0].files.len(), FILES_WORDS * 8);
        other.lay(&news[0]).unwrap();
        assert_eq!(other.words(FILES_AT), Some([0, 77]));
        assert_eq!((one.news(3), other.news(3)), (Vec::new(), Vec::new()));
        take_in(&other, RECENT_MAX as u64 + 20);
        assert_eq!(other.news(3)[0].intakes, [[RECENT_MAX as u64 + 21, 2, RECENT_MAX as u64 + 20]]);
    }

    #[test]
    fn a_record_that_is_full_is_so_on_the_next_node_as_well() {
        let (one, other) = (clocks(), clocks());
        put(&one, FULL_AT, 1);
        one.news(3).iter().for_each(|known| other.lay(known).unwrap());
        assert!(other.is_full());
        let beyond = Known { from: CLOCKS_BYTES as u64, reads: vec![1], ..Known::default() };
        assert!(other.lay(&beyond).is_err());
    }

    #[test]
    fn what_lies_before_the_oldest_image_takes_no_memory_and_is_not_told() {
        let (one, other) = (clocks(), clocks());
        let used = |clocks: &Clocks| rustix::fs::fstat(&clocks.record).unwrap().st_blocks * 512;
        let (piece, room) = (vec![3; 1 << 20], ENTRIES_BYTES as u64);
        let mut end = 0;
        let mut told = Vec::new();
        // Almost twice the room.
        for round in 0..2 * room / piece.len() as u64 - 1 {
            let offset = (end % room) as usize;
            let (now, later) = piece.split_at(piece.len().min(room as usize - offset));
            one.write(HEAD_BYTES + offset, now).unwrap();
            one.write(HEAD_BYTES, later).unwrap();
            end += piece.len() as u64;
            put(&one, RECORDED_AT, end);
            told.extend(one.news(1));
            if round > 3 {
                one.cut(end - 3 * piece.len() as u64);
            }
        }
        assert!(used(&one) < 5 << 20, "{}", used(&one));
        assert!(!one.may_begin() && other.may_begin());
        one.cut(0);
        one.cut(u64::MAX);
        told.extend(one.news(1));
        assert_eq!(told.last().unwrap().base, end - 3 * piece.len() as u64);
        let last = told.split_off(told.len() - 5);
        other.lay(&Known { base: last[0].from, ..last[0].clone() }).unwrap();
        last[1..].iter().for_each(|known| other.lay(known).unwrap());
        assert!(other.entries(end - 3, end) == [3; 3] && other.news(1).is_empty());
        assert_eq!(other.words(BASE_AT), Some([end - 3 * piece.len() as u64]));
    }

    #[test]
    fn cuts_of_less_than_a_page_give_memory_back_as_well() {
        let clocks = clocks();
        let used = || rustix::fs::fstat(&clocks.record).unwrap().st_blocks * 512;
        for round in 0..4_000 {
            read(&clocks, 100 * round, &[1; 100]);
            clocks.cut((100 * round).saturating_sub(500));
        }
        assert!(used() <= 3 * 4096, "{}", used());
        // The newest entries may lie in front of what is needed first, in the same page.
        let (base, all) = (399_400, ENTRIES_BYTES as u64);
        assert_eq!(clocks.words(BASE_AT), Some([base]));
        let newest = base + all - 10;
        clocks.write(HEAD_BYTES + (newest % all) as usize, b"newest").unwrap();
        put(&clocks, RECORDED_AT, newest + 6);
        clocks.cut(base + 8192);
        assert_eq!(clocks.entries(newest, newest + 6), b"newest");
    }

    /// What a process writes that has this record mapped: a mebibyte of chance at a time, until it has filled all the room half
    /// as often again.
    fn write_much(head: &Head, record: &mut Record, buffer: &mut [u8]) -> Option<()> {
        const AHEAD_MAX: u64 = 64 << 20;
        while head.extent().end < 3 * ENTRIES_BYTES as u64 / 2 {
            while head.extent().end - head.extent().base > AHEAD_MAX {
                std::thread::yield_now();
            }
            let number = (head.extent().end >> 20) as u8;
            let draw = |into: &mut [u8]| {
                into.fill(number);
                into.len() as i64
            };
            record.bytes(Source::Random, buffer, draw).ok()?;
        }
        Some(())
    }

    #[test]
    fn a_record_is_cut_while_another_process_writes_it() {
        let _alone = sys::children();
        let clocks = clocks();
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let mut buffer = vec![0; 1 << 20];
        // SAFETY: the file has so many bytes, and the mapping stays; of the entries only the child has a slice, or, when it has
        // ended, this one. The child does nothing that takes memory, and leaves at once.
        let (head, room, child) = unsafe {
            let fd = clocks.record.as_raw_fd();
            let start = libc::mmap(std::ptr::null_mut(), CLOCKS_BYTES, protection, flags, fd, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let head = &*start.cast::<Head>();
            head.begin(1, 0);
            let room = (start.cast::<u8>().add(HEAD_BYTES), ENTRIES_BYTES);
            let child = libc::fork();
            if child == 0 {
                let entries = std::slice::from_raw_parts_mut(room.0, room.1);
                let mut record = Record::new(head, entries);
                let outcome = write_much(head, &mut record, &mut buffer);
                libc::_exit(i32::from(outcome.is_none()));
            }
            (head, room, child as u32)
        };
        let mut images = [head.place(), head.place()];
        let mut ended = None;
        while ended.is_none() {
            ended = sys::reap(child);
            if clocks.told() > images[1].told() + (9 << 20) {
                let newer = std::mem::replace(&mut images[1], head.place());
                images[0] = newer;
                clocks.cut(images[0].told());
            }
            std::thread::yield_now();
        }
        assert_eq!(ended.map(|(_, ending)| ending), Some(Ending::Exited(0)));
        let used = rustix::fs::fstat(&clocks.record).unwrap().st_blocks * 512;
        assert!(used < 70 << 20, "{used}");
        // SAFETY: see above.
        let entries = unsafe { std::slice::from_raw_parts_mut(room.0, room.1) };
        let mut record = Record::new(head, entries);
        let end = clocks.told();
        for (start, image) in images.iter().enumerate() {
            clocks.check_place(image.told()).unwrap();
            assert!(head.resume(start as u64 + 2, 0, image));
            let mut count = 0;
            while clocks.told() < end {
                let number = (clocks.told() >> 20) as u8;
                let told = record.bytes(Source::Random, &mut buffer, |_| -1);
                assert_eq!(told, Ok(1 << 20));
                assert!(buffer.iter().all(|byte| *byte == number), "{count}");
                count += 1;
            }
            // Of the newer one on there may be nothing.
            assert!(count >= 9 * (1 - start), "{count}");
        }
    }

    #[test]
    fn looks_are_read_where_the_provider_counts_them() {
        let clocks = clocks();
        assert_eq!(clocks.looks(), Looks::default());
        for (at, number) in [(POLLS_AT, 43_u64), (POLLS_AT + 8, 12)] {
            rustix::io::pwrite(&clocks.record, &number.to_ne_bytes(), at as u64).unwrap();
        }
        assert_eq!(clocks.looks(), Looks { furthest: 43, present: 12, taken: 0 });
        assert_eq!(clocks.rest(), Looks { furthest: 43, present: 0, taken: 0 });
    }

    #[test]
    fn nobody_goes_on_where_the_record_does_not_reach() {
        let clocks = clocks();
        read(&clocks, 0, &[1; 50]);
        clocks.check_place(50).unwrap();
        let error = clocks.check_place(51).unwrap_err().to_string();
        assert!(error.contains("is not known here"), "{error}");
        clocks.cut(20);
        clocks.check_place(20).unwrap();
        let error = clocks.check_place(19).unwrap_err().to_string();
        assert!(error.contains("is not kept any more"), "{error}");
        assert_eq!(clocks.words(RECORDED_AT), Some([50, 0]), "asking changes nothing");
    }

    #[test]
    fn what_the_user_loads_in_front_stays() {
        let mut environment = Environment::new();
        let libraries = |environment: &Environment| clocks().variables(environment)[0].1.clone();
        assert_eq!(libraries(&environment), "/opt/clocks.so");
        environment.insert("LD_PRELOAD".into(), "/x.so:/y.so".into());
        assert_eq!(libraries(&environment), "/opt/clocks.so:/x.so:/y.so");
    }
}
