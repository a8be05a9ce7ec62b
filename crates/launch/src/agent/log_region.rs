//! The files with the message logs of this node's ranks: one in memory and, with `recover_dir`, one
//! on disk, where logs go on when memory is full.
//!
//! In: `recover_dir`, and the rights of this user. Out: files, and the bytes of each log in them.
//! What may never happen: another user can open the disk file, or it outlives the job: its name is
//! removed as soon as the file is made.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use landbridge_proto::log::layout::{
    DISK_TAKEN_AT, LOG_BYTES, LOGGED_PROCESSES_MAX, RELEASE_BYTES, SET_BYTES, disk_part_at, log_at,
};
use landbridge_proto::log::walk::ReadLog;
use landbridge_proto::setting::{RECOVER_DIR, RECOVER_DISK, Setting, Value};
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fstat, ftruncate};
use rustix::io::{pread, pwrite};
use rustix::process::{Resource, getrlimit};

use crate::{folder, sys};

/// Parts of the disk file at most: each log of a job can have one.
const PARTS_MAX: u64 = (LOGGED_PROCESSES_MAX * LOGGED_PROCESSES_MAX) as u64;
/// Bytes of a block, as the system counts them.
const BLOCK_BYTES: u64 = 512;

/// The files of this node's message logs.
pub struct LogFiles {
    pub memory: OwnedFd,
    pub disk: Option<OwnedFd>,
    /// The disk has given back something else than was written.
    is_corrupt: Cell<bool>,
}

impl LogFiles {
    pub fn new(memory: OwnedFd, disk: Option<OwnedFd>) -> LogFiles {
        LogFiles { memory, disk, is_corrupt: Cell::new(false) }
    }

    /// Other descriptors of the same files.
    pub fn try_clone(&self) -> Result<LogFiles> {
        let disk = self.disk.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(LogFiles::new(self.memory.try_clone()?, disk))
    }

    /// Notes how a region was read that its writer has not used again meanwhile.
    pub fn note_read(&self, region: &LogRegion) {
        self.is_corrupt.set(self.is_corrupt.get() || region.is_corrupt.get());
    }

    /// Whether the disk has given back something else than was written: messages that a rank may
    /// need cannot be read. True once.
    pub fn take_corrupt(&self) -> bool {
        self.is_corrupt.take()
    }

    /// The descriptors, in the order in which a rank gets them when it resumes.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.memory.as_fd()].into_iter().chain(self.disk.iter().map(AsFd::as_fd))
    }

    /// A word of the memory file, which is there.
    pub fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        let _ = pread(&self.memory, &mut word, at);
        u64::from_ne_bytes(word)
    }

    /// The processes of a set, of which this is the place in the memory file.
    pub fn process_set(&self, at: u64) -> Vec<u32> {
        let words =
            (0..SET_BYTES as u32 / 8).map(|place| (place, self.word(at + u64::from(place) * 8)));
        let processes = words.flat_map(|(place, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| place * 64 + bit)
        });
        processes.collect()
    }

    /// Writes a position twice ([`RELEASE_BYTES`]).
    pub fn write_release(&self, at: u64, position: u64) -> Result<()> {
        for at in [at, at + RELEASE_BYTES as u64 / 2] {
            pwrite(&self.memory, &position.to_ne_bytes(), at)?;
        }
        Ok(())
    }

    /// The region of the log of one process to another.
    pub fn region(&self, (from, to): (usize, usize)) -> LogRegion {
        let disk = self.disk.as_ref().and_then(|disk| disk.try_clone().ok());
        let disk = disk.zip(self.disk_start(from, to));
        let memory = self.memory.try_clone().ok();
        LogRegion { memory, start: log_at(from, to), disk, is_corrupt: Cell::new(false) }
    }

    fn disk_start(&self, from: usize, to: usize) -> Option<u64> {
        let mut word = [0; 8];
        let read = pread(&self.memory, &mut word, disk_part_at(from, to));
        let part = u64::from_ne_bytes(word).checked_sub(1).filter(|_| read == Ok(word.len()))?;
        part.checked_mul(LOG_BYTES as u64)
    }

    /// Gives the disk back that the logs between these processes take, none of which runs.
    pub fn empty_disk(&self, processes: &[u32]) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        for from in processes {
            for to in processes.iter().filter(|to| *to != from) {
                if let Some(start) = self.disk_start(*from as usize, *to as usize) {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    // A file system that cannot do that keeps the space, which is used again.
                    let _ = fallocate(disk, flags, start, LOG_BYTES as u64);
                }
            }
        }
        let taken = fstat(disk)?.st_blocks.unsigned_abs() * BLOCK_BYTES;
        pwrite(&self.memory, &taken.to_ne_bytes(), DISK_TAKEN_AT)?;
        Ok(())
    }
}

/// The region of a log in the files of a node.
pub struct LogRegion {
    memory: Option<OwnedFd>,
    start: u64,
    /// The disk file, and where the part of the log begins there.
    disk: Option<(OwnedFd, u64)>,
    /// A segment on disk was not what was written, or was being used again.
    is_corrupt: Cell<bool>,
}

impl ReadLog for LogRegion {
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let (file, at) = match at.checked_sub(LOG_BYTES) {
            Some(at) => self.disk.as_ref().map(|(file, start)| (file, start + at as u64))?,
            None => (self.memory.as_ref()?, self.start + at as u64),
        };
        (pread(file, &mut *bytes, at).ok()? == bytes.len()).then_some(())
    }

    fn note_corrupt(&self) {
        self.is_corrupt.set(true);
    }
}

/// The disk file for logs, and how many bytes they may take there. `None`: nothing is kept on disk.
/// `settings`: the job's environment.
///
/// # Errors
/// The directory is not there, another user could change it, or no file can be made there.
pub fn disk_file(settings: &[(String, String)]) -> Result<Option<(OwnedFd, u64)>> {
    let path = PathBuf::from(setting(settings, &RECOVER_DIR));
    let bytes_max = RECOVER_DISK.parse(&setting(settings, &RECOVER_DISK));
    let (true, Ok(Value::Number(bytes_max))) = (path.is_absolute(), bytes_max) else {
        return Ok(None);
    };
    folder::check(&path).context("recover_dir")?;
    let file = open_unnamed(&path)
        .with_context(|| format!("recover_dir: no file can be made in {}", path.display()))?;
    Ok(Some((sys::out_of_the_way(file), bytes_max)))
}

/// What a setting says in the environment of a job.
pub fn setting(settings: &[(String, String)], row: &Setting) -> String {
    let name = row.variable();
    let said = settings.iter().find(|(known, _)| *known == name);
    said.map_or(row.default, |(_, text)| text).to_string()
}

/// A file without a name, as long as the file system and the limits of this user allow.
fn open_unnamed(folder: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    // The system shows the name that it had, by which the interposer of a rank knows it.
    let path = folder.join(format!(".landbridge-logs-{}", sys::random_hex(16)?));
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    std::fs::remove_file(&path)?;
    // Beyond the limit the system would end this process.
    let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    let mut parts = PARTS_MAX.min(limit / LOG_BYTES as u64);
    while ftruncate(&file, parts * LOG_BYTES as u64).is_err() {
        parts /= 2;
        anyhow::ensure!(parts > 0, "it cannot be as long as a log");
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::FILE_BYTES;

    use super::*;

    fn files(folder: &Path) -> LogFiles {
        let memory = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, FILE_BYTES).unwrap();
        LogFiles::new(memory, Some(open_unnamed(folder).unwrap()))
    }

    #[test]
    fn each_half_of_a_region_is_read_from_its_file() {
        let files = files(&std::env::temp_dir());
        let disk = files.disk.as_ref().unwrap();
        pwrite(&files.memory, b"in memory", log_at(3, 5) + 4096).unwrap();
        let mut bytes = [0; 9];
        assert!(files.region((3, 5)).read(4096, &mut bytes).is_some() && &bytes == b"in memory");
        assert!(files.region((3, 5)).read(LOG_BYTES, &mut bytes).is_none(), "it has no part");
        pwrite(&files.memory, &2_u64.to_ne_bytes(), disk_part_at(3, 5)).unwrap();
        pwrite(disk, b"on disk -", LOG_BYTES as u64 + 640).unwrap();
        let region = files.region((3, 5));
        assert!(region.read(LOG_BYTES + 640, &mut bytes).is_some() && &bytes == b"on disk -");
        assert!(region.read(2 * LOG_BYTES - 3, &mut [0; 9]).is_some(), "the next part follows");
        files.empty_disk(&[3, 4, 5]).unwrap();
        assert!(region.read(LOG_BYTES + 640, &mut bytes).is_some() && bytes == [0; 9]);
        assert_eq!(fstat(disk).unwrap().st_blocks, 0);
        let copy = files.try_clone().unwrap();
        assert_eq!(copy.fds().count(), 2);
    }

    #[test]
    fn the_interposer_knows_the_file() {
        let file = open_unnamed(&std::env::temp_dir()).unwrap();
        let path = std::fs::read_link(format!("/proc/self/fd/{}", sys::raw(&file))).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(".landbridge-logs-") && name.ends_with(" (deleted)"), "{name}");
    }

    #[test]
    fn a_file_is_made_only_where_it_is_wanted_and_can_be_made() {
        let settings = |path: &str| {
            let rows = [(&RECOVER_DIR, path), (&RECOVER_DISK, "1GiB")];
            rows.map(|(row, text)| (row.variable(), text.to_string())).to_vec()
        };
        assert!(
            disk_file(&[]).unwrap().is_none() && disk_file(&settings("off")).unwrap().is_none()
        );
        let folder = std::env::temp_dir().join(format!("landbridge-disk-{}", std::process::id()));
        let error = disk_file(&settings(folder.to_str().unwrap())).unwrap_err();
        assert!(format!("{error:#}").contains("recover_dir: no file can be made in"), "{error:#}");
        std::fs::create_dir_all(&folder).unwrap();
        let (file, bytes_max) = disk_file(&settings(folder.to_str().unwrap())).unwrap().unwrap();
        assert_eq!(bytes_max, 1 << 30);
        assert!(fstat(&file).unwrap().st_size as u64 >= LOG_BYTES as u64);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "it has no name");
        std::fs::remove_dir(&folder).unwrap();
    }
}
