//! The registered memory of another process of the node, as far as this process has looked.
//!
//! In: the peer's process, and the number of regions that it has removed so far. Out: addresses in
//! the peer's memory. What may never happen: an address in a region that was removed before the
//! number was read; an address in another process that has got the peer's process id.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;

use super::memory::ReadableProcess;
use crate::mr::{PUBLISHED_MAX, PublishedRegion};

/// Lookups of a key that the peer has not published until its table is read again.
const PAUSE_LOOKUPS: u32 = 64;

/// A range of a peer's registered memory, and the accesses (`abi::REMOTE_READ`,
/// `abi::REMOTE_WRITE`).
#[derive(Clone, Copy, Debug)]
pub struct WantedRange {
    pub key: u64,
    pub offset: u64,
    pub len: u64,
    pub access: u64,
}

pub struct KnownRegions {
    pid: i32,
    /// Refers to the process, which keeps its id as long as the descriptor is not readable.
    process: OwnedFd,
    /// When the process was found alive last, in microseconds of any clock.
    alive_at: u64,
    /// The address of the peer's table.
    table: u64,
    /// The number of removed regions for which `regions` holds.
    removals: u64,
    regions: Vec<PublishedRegion>,
    /// Lookups without result that are left until the table is read again.
    pause: u32,
}

/// A process may be gone for this long before it is noticed. No system hands out all process ids,
/// and so this one again, in less.
const ALIVE_MICROS: u64 = 1_000;

/// The peer's table, as it was read.
#[repr(C)]
struct TableImage {
    version: u64,
    removals: u64,
    regions: [PublishedRegion; PUBLISHED_MAX],
    version_behind: u64,
}

impl KnownRegions {
    /// # Errors
    /// The process has ended, or the system cannot refer to it (before Linux 5.3).
    pub fn new(peer: ReadableProcess) -> io::Result<KnownRegions> {
        let pid = Pid::from_raw(peer.pid).ok_or(io::ErrorKind::NotFound)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        // Read behind the call above: so the descriptor refers to the peer, and to nobody who has
        // got its id.
        let cookie = peer.cookie().ok_or(io::ErrorKind::NotFound)?;
        // Numbers from 512 on do not change the numbers that programs see.
        let process = rustix::io::fcntl_dupfd_cloexec(&process, 512).unwrap_or(process);
        Ok(KnownRegions {
            pid: peer.pid,
            process,
            alive_at: 0,
            table: cookie.regions,
            removals: 0,
            regions: Vec::new(),
            pause: 0,
        })
    }

    /// The process id, if the process was alive within the last [`ALIVE_MICROS`].
    #[inline]
    pub fn pid(&mut self, now_micros: u64) -> Option<i32> {
        if now_micros.saturating_sub(self.alive_at) >= ALIVE_MICROS || self.alive_at == 0 {
            if self.has_ended() {
                return None;
            }
            self.alive_at = now_micros.max(1);
        }
        Some(self.pid)
    }

    #[cold]
    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        !matches!(poll(&mut polled, Some(&at_once)), Ok(0))
    }

    /// The address of a range in the peer's memory, which has removed so many regions. `None`: the
    /// peer must be asked by a message.
    #[inline]
    pub fn address(&mut self, removals: u64, range: &WantedRange) -> Option<u64> {
        if self.removals == removals
            && let Some(region) = self.regions.iter().find(|region| region.key == range.key)
        {
            return region.resolve(range.offset, range.len, range.access);
        }
        self.look_up(removals, range)
    }

    #[cold]
    fn look_up(&mut self, removals: u64, range: &WantedRange) -> Option<u64> {
        if self.removals == removals && self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        self.regions.clear();
        (self.removals, self.pause) = (removals, PAUSE_LOOKUPS);
        let image = self.read()?;
        let is_whole = image.version.is_multiple_of(2) && image.version == image.version_behind;
        if !is_whole || image.removals != removals {
            // The table is changing: the next lookup reads it again.
            self.pause = 0;
            return None;
        }
        self.regions.extend(image.regions.iter().filter(|region| region.access != 0));
        let region = self.regions.iter().find(|region| region.key == range.key)?;
        region.resolve(range.offset, range.len, range.access)
    }

    fn read(&self) -> Option<Box<TableImage>> {
        let mut image = Box::new(TableImage {
            version: 1,
            removals: 0,
            regions: [PublishedRegion::FREE; PUBLISHED_MAX],
            version_behind: 0,
        });
        let bytes = size_of::<TableImage>();
        let local = libc::iovec { iov_base: (&raw mut *image).cast(), iov_len: bytes };
        let remote = |iov_len: usize| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(self.table as usize),
            iov_len,
        };
        // The version again, behind all that it is to hold for.
        let remote = [remote(bytes - size_of::<u64>()), remote(size_of::<u64>())];
        // SAFETY: the call writes to `image` only, for which all bytes are valid; the kernel checks
        // the other process's addresses.
        let got = unsafe { libc::process_vm_readv(self.pid, &local, 1, remote.as_ptr(), 2, 0) };
        (got == bytes as isize).then_some(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{REMOTE_READ, REMOTE_WRITE};
    use crate::mr::{MrTable, Region};

    const BOTH: u64 = REMOTE_READ | REMOTE_WRITE;

    /// Regions of this process, as another process would see them.
    fn known(table: &MrTable) -> KnownRegions {
        KnownRegions {
            pid: std::process::id() as i32,
            process: pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap(),
            alive_at: 0,
            table: table.published().address(),
            removals: 0,
            regions: Vec::new(),
            pause: 0,
        }
    }

    fn range(key: u64, offset: u64, len: u64) -> WantedRange {
        WantedRange { key, offset, len, access: BOTH }
    }

    #[test]
    fn a_region_is_known_until_one_is_removed() {
        let table = MrTable::default();
        let mut known = known(&table);
        table.insert(7, Region { base: 0x1000, len: 64, access: BOTH }).unwrap();
        let removals = table.published().removals();
        assert_eq!(known.address(removals, &range(7, 8, 56)), Some(0x1008));
        assert_eq!(known.address(removals, &range(7, 8, 57)), None);
        table.remove(7);
        table.insert(7, Region { base: 0x9000, len: 64, access: BOTH }).unwrap();
        let removals = table.published().removals();
        assert_eq!(known.address(removals, &range(7, 0, 1)), Some(0x9000));
        assert_eq!(known.address(removals - 1, &range(7, 0, 1)), None, "an old number");
    }

    #[test]
    fn a_key_that_is_not_published_is_looked_for_now_and_then() {
        let table = MrTable::default();
        let mut known = known(&table);
        assert_eq!(known.address(1, &range(9, 0, 1)), None);
        table.insert(9, Region { base: 0x1000, len: 64, access: BOTH }).unwrap();
        let tries = (0..=PAUSE_LOOKUPS).filter(|_| known.address(1, &range(9, 0, 1)).is_some());
        assert_eq!(tries.count(), 1);
        assert_eq!(known.address(1, &range(9, 0, 1)), Some(0x1000));
    }

    #[test]
    fn a_process_that_has_ended_has_no_id_any_more() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let mut known = known(&MrTable::default());
        known.process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(known.pid(5).is_some() && known.pid(500).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(known.pid(5 + ALIVE_MICROS).is_none());
    }
}
