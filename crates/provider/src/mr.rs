//! Registered memory: what peers may access by key.
//!
//! The caller chooses the keys, which may be any 64-bit numbers; a peer's address is an offset from
//! the start of the region. A range outside of a region, or an access for which the region was not
//! registered, never becomes a pointer.
//!
//! Processes of the same node may read which regions there are ([`PublishedTable`]), and access
//! their bytes without this process (process_vm_readv(2)).

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::abi::{self, Errno};
use crate::sync::SpinLock;

#[derive(Default)]
pub struct MrTable {
    regions: SpinLock<BTreeMap<u64, Region>>,
    published: PublishedTable,
}

#[derive(Clone, Copy)]
pub struct Region {
    /// Start address of the region. A base of 0 with `len` `usize::MAX` is the whole address space;
    /// offsets are then addresses (dynamic windows).
    pub base: usize,
    pub len: usize,
    /// Allowed accesses: `abi::REMOTE_READ`, `abi::REMOTE_WRITE` and the local accesses.
    pub access: u64,
}

impl MrTable {
    /// Adds a region. Returns `ENOKEY` if the key is in use.
    pub fn insert(&self, key: u64, region: Region) -> Result<(), Errno> {
        match self.regions.lock().entry(key) {
            Entry::Occupied(_) => Err(Errno::ENOKEY),
            Entry::Vacant(vacant) => {
                vacant.insert(region);
                self.published.add(key, &region);
                Ok(())
            }
        }
    }

    pub fn remove(&self, key: u64) {
        let mut regions = self.regions.lock();
        if regions.remove(&key).is_some() {
            self.published.remove(key);
        }
    }

    /// What other processes of the node may read.
    pub fn published(&self) -> &PublishedTable {
        &self.published
    }

    /// The address of `len` bytes at `offset` of region `key`, if the region contains all of them
    /// and was registered for every kind of `access` (`abi::REMOTE_READ | abi::REMOTE_WRITE`).
    ///
    /// The pointer is valid until the region is removed. A region is removed only while no engine
    /// of the domain executes a call, so the pointer is valid for the rest of the caller's call.
    pub fn resolve(
        &self,
        key: u64,
        offset: u64,
        len: usize,
        access: u64,
    ) -> Result<*mut u8, Errno> {
        let region = *self.regions.lock().get(&key).ok_or(Errno::ENOKEY)?;
        if region.access & access != access {
            return Err(Errno::EACCES);
        }
        let offset = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let end = offset.checked_add(len).ok_or(Errno::EINVAL)?;
        if end > region.len {
            return Err(Errno::EINVAL);
        }
        let address = region.base.checked_add(offset).ok_or(Errno::EINVAL)?;
        Ok(std::ptr::with_exposed_provenance_mut(address))
    }
}

/// Regions that are published at most. Windows are few; what is beyond is accessed by messages.
pub const PUBLISHED_MAX: usize = 64;

/// A region as another process reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PublishedRegion {
    pub key: u64,
    pub base: u64,
    pub len: u64,
    /// `abi::REMOTE_READ` and `abi::REMOTE_WRITE`, as far as they are allowed; 0: a free place.
    pub access: u64,
}

impl PublishedRegion {
    pub const FREE: PublishedRegion = PublishedRegion { key: 0, base: 0, len: 0, access: 0 };

    /// The address of `len` bytes at `offset`, if the region contains all of them and allows the
    /// access.
    pub fn resolve(&self, offset: u64, len: u64, access: u64) -> Option<u64> {
        let end = offset.checked_add(len)?;
        let is_allowed = self.access & access == access && end <= self.len;
        is_allowed.then(|| self.base.checked_add(offset))?
    }
}

/// The regions of a process, in memory that other processes of its node may read while they change.
#[repr(C)]
pub struct PublishedTable {
    /// Odd while the table changes: a reader that finds an odd number, or another one at the end
    /// than at the beginning, knows nothing.
    version: AtomicU64,
    /// The number of regions that were removed, and one. A reader may use what it knows as long as
    /// this number is the same.
    removals: AtomicU64,
    /// Only the holder of the table's lock writes.
    regions: UnsafeCell<[PublishedRegion; PUBLISHED_MAX]>,
}

// SAFETY: `regions` is written under the lock of [`MrTable`], and read by other processes only.
unsafe impl Sync for PublishedTable {}

impl Default for PublishedTable {
    fn default() -> Self {
        PublishedTable {
            version: AtomicU64::new(0),
            removals: AtomicU64::new(1),
            regions: UnsafeCell::new([PublishedRegion::FREE; PUBLISHED_MAX]),
        }
    }
}

impl PublishedTable {
    /// The number of regions that were removed, and one.
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::SeqCst)
    }

    /// Where other processes read the table.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    fn add(&self, key: u64, region: &Region) {
        let access = region.access & (abi::REMOTE_READ | abi::REMOTE_WRITE);
        let (base, len) = (region.base as u64, region.len as u64);
        self.change(|regions| {
            if let Some(place) = regions.iter_mut().find(|region| region.access == 0) {
                *place = PublishedRegion { key, base, len, access };
            }
        });
    }

    fn remove(&self, key: u64) {
        self.change(|regions| {
            for region in regions.iter_mut().filter(|region| region.key == key) {
                *region = PublishedRegion::FREE;
            }
        });
        self.removals.fetch_add(1, Ordering::SeqCst);
    }

    fn change(&self, change: impl FnOnce(&mut [PublishedRegion; PUBLISHED_MAX])) {
        self.version.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // SAFETY: the caller holds the lock of the table's owner, and nothing in this process reads
        // the array otherwise.
        change(unsafe { &mut *self.regions.get() });
        fence(Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }
}

/// The accesses of a registration; a request of 0 means all accesses.
pub fn access_of(requested: u64) -> u64 {
    if requested == 0 {
        return abi::SEND
            | abi::RECV
            | abi::READ
            | abi::WRITE
            | abi::REMOTE_READ
            | abi::REMOTE_WRITE;
    }
    requested
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: u64 = abi::REMOTE_READ | abi::REMOTE_WRITE;

    #[test]
    fn only_what_lies_inside_is_reached() {
        let table = MrTable::default();
        table.insert(u64::MAX - 1, Region { base: 0x1000, len: 64, access: BOTH }).unwrap();
        let at = |offset, len| table.resolve(u64::MAX - 1, offset, len, BOTH).map(|p| p as usize);
        assert_eq!(at(0, 64), Ok(0x1000));
        assert_eq!(at(64, 0), Ok(0x1040));
        assert_eq!(at(60, 5), Err(Errno::EINVAL));
        assert_eq!(at(u64::MAX, 1), Err(Errno::EINVAL));
        assert_eq!(at(1, usize::MAX), Err(Errno::EINVAL));
    }

    #[test]
    fn access_is_as_registered() {
        let table = MrTable::default();
        table.insert(7, Region { base: 0x1000, len: 64, access: abi::REMOTE_READ }).unwrap();
        assert!(table.resolve(7, 0, 8, abi::REMOTE_READ).is_ok());
        assert_eq!(table.resolve(7, 0, 8, abi::REMOTE_WRITE), Err(Errno::EACCES));
        assert_eq!(table.resolve(7, 0, 8, BOTH), Err(Errno::EACCES));
    }

    #[test]
    fn a_key_is_held_by_one_region_at_a_time() {
        let table = MrTable::default();
        let region = Region { base: 0x1000, len: 8, access: BOTH };
        table.insert(1 << 63 | 0x1f0, region).unwrap();
        assert_eq!(table.insert(1 << 63 | 0x1f0, region), Err(Errno::ENOKEY));
        table.remove(1 << 63 | 0x1f0);
        assert_eq!(table.resolve(1 << 63 | 0x1f0, 0, 1, BOTH), Err(Errno::ENOKEY));
        table.insert(1 << 63 | 0x1f0, region).unwrap();
    }

    #[test]
    fn a_published_region_is_as_narrow_as_the_registered_one() {
        let region = PublishedRegion { key: 1, base: 0x1000, len: 64, access: abi::REMOTE_READ };
        assert_eq!(region.resolve(8, 56, abi::REMOTE_READ), Some(0x1008));
        assert_eq!(region.resolve(8, 57, abi::REMOTE_READ), None);
        assert_eq!(region.resolve(u64::MAX, 2, abi::REMOTE_READ), None);
        assert_eq!(region.resolve(0, 8, abi::REMOTE_WRITE), None);
        assert_eq!(PublishedRegion::FREE.resolve(0, 0, abi::REMOTE_READ), None);
    }

    #[test]
    fn what_was_removed_is_not_published_any_more_and_what_is_too_much_never_is() {
        let table = MrTable::default();
        // SAFETY: nothing else uses the table.
        let keys = || unsafe { (*table.published.regions.get()).map(|it| (it.access > 0, it.key)) };
        for key in 0..=PUBLISHED_MAX as u64 {
            table.insert(key, Region { base: 0x1000, len: 8, access: BOTH }).unwrap();
        }
        assert!(keys().iter().all(|(is_used, key)| *is_used && *key < PUBLISHED_MAX as u64));
        assert_eq!(table.published.removals(), 1);
        table.remove(5);
        table.remove(5);
        assert_eq!(table.published.removals(), 2, "it was removed once");
        assert!(!keys().contains(&(true, 5)));
        assert_eq!(table.published.version.load(Ordering::SeqCst) % 2, 0);
    }

    #[test]
    fn the_whole_address_space_can_be_one_region() {
        let table = MrTable::default();
        table.insert(3, Region { base: 0, len: usize::MAX, access: BOTH }).unwrap();
        let address = 0x7fff_1234_5678;
        assert_eq!(table.resolve(3, address, 8, BOTH).unwrap() as u64, address);
    }
}
