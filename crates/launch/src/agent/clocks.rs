//! What a rank that may be started anew reads of clocks and chance: a memory file that outlives the rank, and the library
//! that fills it and reads it again (`crates/clocks`), loaded in front of the rank's own.
//!
//! Where the rank may go on on another node, what is new in that file goes to the agent above ([`Clocks::news`]), in front of what
//! the rank has printed or asked since; and there it is laid into the file of its next start ([`Clocks::lay`]).

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use landbridge_proto::clocks::{
    CLOCKS_BYTES, FULL_AT, HEAD_BYTES, POLLS_AT, RECORDED_AT, TAKEN_AT, WANTED_AT,
};
use landbridge_proto::recent::{COUNT_AT, RECENT_AT, RECENT_MAX, place_of};
use landbridge_proto::setting::{RECOVER_CLOCKS, Value};
use rustix::fs::MemfdFlags;

use super::again::Looks;
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
    told: Cell<Told>,
}

/// What of a record the agent above knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Told {
    reads: u64,
    intakes: u64,
    polls: u64,
    is_full: bool,
}

impl Clocks {
    /// For a rank of this job; `None` if nobody wants it.
    pub fn new(job: &Job) -> Result<Option<Clocks>> {
        let variable = RECOVER_CLOCKS.variable();
        let said = job.environment.iter().find(|(name, _)| *name == variable);
        if said.is_some_and(|(_, text)| RECOVER_CLOCKS.parse(text) == Ok(Value::Switch(false))) {
            return Ok(None);
        }
        let library = sibling::path(LIBRARY)?;
        if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" \t:".contains(byte)) {
            bail!(
                "{} cannot be loaded in front of a program: there is a blank or a colon in its path (without it: \
                 --set recover_clocks=off)",
                library.display()
            );
        }
        let record = record().context("no memory file")?;
        Ok(Some(Clocks { record, library, told: Cell::default() }))
    }

    pub fn record(&self) -> BorrowedFd<'_> {
        self.record.as_fd()
    }

    /// Whether it had no room for something that the rank was told, so that another start cannot be.
    pub fn is_full(&self) -> bool {
        self.words(FULL_AT) != Some([0])
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

    /// Asks the rank to make way for its image of this number.
    pub fn want_image(&self, number: u64) {
        let _ = rustix::io::pwrite(&self.record, &number.to_ne_bytes(), WANTED_AT as u64);
    }

    /// How many bytes of it the present start has been told.
    pub fn told(&self) -> u64 {
        let [_, told] = self.words(RECORDED_AT).unwrap_or_default();
        told
    }

    /// A start goes on that was told so many bytes on another node. What is missing of them here nobody will ask for.
    pub fn cover(&self, told: u64) {
        let [recorded] = self.words(RECORDED_AT).unwrap_or([u64::MAX]);
        if recorded < told {
            let _ = rustix::io::pwrite(&self.record, &told.to_ne_bytes(), RECORDED_AT as u64);
        }
    }

    /// What has come since the last time, in this order: the rank may go on meanwhile, and each part must not be older than the one
    /// before (see [`Known`]).
    pub fn news(&self, rank: u32) -> Vec<Known> {
        let told = self.told.get();
        let number = |at: usize| self.words::<1>(at).map_or(0, |[number]| number);
        let reads = number(RECORDED_AT);
        let is_full = self.is_full();
        let polls = number(POLLS_AT);
        let intakes = number(COUNT_AT);
        let now = Told { reads, intakes, polls, is_full };
        if now == told {
            return Vec::new();
        }
        self.told.set(now);
        let (first_intake, intakes) = self.intakes(told.intakes, intakes);
        let rest = Known { rank, is_full, polls, first_intake, intakes, ..Known::default() };
        let mut news = Vec::new();
        let mut from = told.reads;
        loop {
            let to = reads.min(from + PIECE_BYTES);
            let bytes = self.bytes(HEAD_BYTES + from as usize, (to - from) as usize);
            // What goes with the first piece holds for all.
            let rest =
                if news.is_empty() { rest.clone() } else { Known { rank, ..Known::default() } };
            news.push(Known { from, reads: bytes, ..rest });
            from = to;
            if from == reads {
                return news;
            }
        }
    }

    /// Intakes from one number to another, and which is the first of them that is still there.
    fn intakes(&self, from: u64, to: u64) -> (u64, Vec<[u64; 3]>) {
        let first = from.max(to.saturating_sub(RECENT_MAX as u64));
        let read = |number| self.words(place_of(number)).unwrap_or_default();
        let intakes: Vec<[u64; 3]> = (first..to).map(read).collect();
        // Meanwhile others may have taken the place of the oldest.
        let last = self.words::<1>(COUNT_AT).map_or(0, |[count]| count);
        let valid = (last + 1).saturating_sub(RECENT_MAX as u64).clamp(first, to);
        (valid, intakes[(valid - first) as usize..].to_vec())
    }

    /// What is known of the rank, before it has its first start here. The agent above need not be told that.
    pub fn lay(&self, known: &Known) -> rustix::io::Result<()> {
        let mut told = self.told.get();
        self.write(HEAD_BYTES + known.from as usize, &known.reads)?;
        for (number, intake) in (known.first_intake..).zip(&known.intakes) {
            self.write(place_of(number), intake.map(u64::to_ne_bytes).as_flattened())?;
        }
        told.reads = told.reads.max(known.from + known.reads.len() as u64);
        told.intakes = told.intakes.max(known.first_intake + known.intakes.len() as u64);
        told.polls = told.polls.max(known.polls);
        told.is_full |= known.is_full;
        let full = u64::from(told.is_full);
        let words = [(RECORDED_AT, told.reads), (COUNT_AT, told.intakes)];
        for (at, number) in words.into_iter().chain([(POLLS_AT, told.polls), (FULL_AT, full)]) {
            self.write(at, &number.to_ne_bytes())?;
        }
        self.told.set(told);
        Ok(())
    }

    fn write(&self, at: usize, mut bytes: &[u8]) -> rustix::io::Result<()> {
        let end = at + bytes.len();
        if end > if at < RECENT_AT { RECENT_AT } else { CLOCKS_BYTES } {
            return Err(rustix::io::Errno::FBIG);
        }
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(&self.record, bytes, (end - bytes.len()) as u64)?;
            bytes = &bytes[written..];
        }
        Ok(())
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
    pub fn variables(&self, environment: &Environment) -> [(&'static str, std::ffi::OsString); 2] {
        let mut libraries = self.library.clone().into_os_string();
        let others = mpi::variable(environment, "LD_PRELOAD");
        if !others.is_empty() {
            libraries.push(":");
            libraries.push(others);
        }
        let record = same_length(sys::raw(&self.record));
        [("LD_PRELOAD", libraries), ("LANDBRIDGE_CLOCKS", record.into())]
    }
}

/// All zeros, of which only what is written takes memory.
fn record() -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("landbridge-clocks", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, CLOCKS_BYTES as u64)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks() -> Clocks {
        let (record, library) = (record().unwrap(), "/opt/clocks.so".into());
        Clocks { record, library, told: Cell::default() }
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
        assert_eq!((known.polls, known.first_intake, &known.intakes[..]), (7, 0, &[[1, 2, 0]][..]));
        assert_eq!(one.news(3), []);
        other.lay(known).unwrap();
        // Much of both.
        let many = vec![5; 2 * PIECE_BYTES as usize + 1];
        read(&one, 3, &many);
        (1..RECENT_MAX as u64 + 20).for_each(|number| take_in(&one, number));
        let news = one.news(3);
        assert_eq!(news.len(), 3);
        assert_eq!(news[0].first_intake, 21, "the first of them are gone, and one may be just now");
        news.iter().for_each(|known| other.lay(known).unwrap());
        assert_eq!(other.bytes(HEAD_BYTES, many.len() + 3), [&b"abc"[..], &many].concat());
        assert_eq!(other.looks(), Looks { furthest: 7, present: 0, taken: 0 });
        assert_eq!(other.words(COUNT_AT), Some([RECENT_MAX as u64 + 20]));
        assert_eq!(other.words(place_of(500)), Some([501, 2, 500]));
        assert_eq!(other.news(3), [], "it came from there");
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
    fn what_was_told_on_another_node_counts_as_recorded() {
        let clocks = clocks();
        clocks.cover(70);
        assert_eq!((clocks.words(RECORDED_AT), clocks.told()), (Some([70, 0]), 0));
        clocks.cover(30);
        assert_eq!(clocks.words(RECORDED_AT), Some([70]));
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
