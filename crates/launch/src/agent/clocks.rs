//! What a rank that may be started anew reads of clocks and chance: a memory file that outlives the rank, and the library
//! that fills it and reads it again (`crates/clocks`), loaded in front of the rank's own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use landbridge_proto::clocks::{CLOCKS_BYTES, FULL_AT, POLLS_AT, RECORDED_AT, WANTED_AT};
use landbridge_proto::setting::{RECOVER_CLOCKS, Value};
use rustix::fs::MemfdFlags;

use super::again::Looks;
use crate::control::Job;
use crate::mpi::{self, Environment};
use crate::sibling;
use crate::sys;

/// The library; cargo gives it this name.
const LIBRARY: &str = "liblandbridge_clocks.so";

/// The record of one rank, for all its starts.
pub struct Clocks {
    record: OwnedFd,
    library: PathBuf,
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
        Ok(Some(Clocks { record: record().context("no memory file")?, library }))
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
        Looks { furthest, present }
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
        // The same length for every start, as the descriptor is the same.
        let record = sys::raw(&self.record).to_string();
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
        Clocks { record: record().unwrap(), library: "/opt/clocks.so".into() }
    }

    #[test]
    fn a_record_is_full_once_it_says_so() {
        let clocks = clocks();
        assert!(!clocks.is_full());
        rustix::io::pwrite(&clocks.record, &1_u64.to_ne_bytes(), FULL_AT as u64).unwrap();
        assert!(clocks.is_full());
    }

    #[test]
    fn looks_are_read_where_the_provider_counts_them() {
        let clocks = clocks();
        assert_eq!(clocks.looks(), Looks::default());
        for (at, number) in [(POLLS_AT, 43_u64), (POLLS_AT + 8, 12)] {
            rustix::io::pwrite(&clocks.record, &number.to_ne_bytes(), at as u64).unwrap();
        }
        assert_eq!(clocks.looks(), Looks { furthest: 43, present: 12 });
        assert_eq!(clocks.rest(), Looks { furthest: 43, present: 0 });
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
