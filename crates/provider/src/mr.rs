//! Registered memory: what peers may access by key.
//!
//! The caller chooses the keys, which may be any 64-bit numbers; a peer's address is an offset from
//! the start of the region. A range outside of a region, or an access for which the region was not
//! registered, never becomes a pointer.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::abi::{self, Errno};
use crate::sync::SpinLock;

#[derive(Default)]
pub struct MrTable {
    regions: SpinLock<BTreeMap<u64, Region>>,
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
                Ok(())
            }
        }
    }

    pub fn remove(&self, key: u64) {
        self.regions.lock().remove(&key);
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
    fn the_whole_address_space_can_be_one_region() {
        let table = MrTable::default();
        table.insert(3, Region { base: 0, len: usize::MAX, access: BOTH }).unwrap();
        let address = 0x7fff_1234_5678;
        assert_eq!(table.resolve(3, address, 8, BOTH).unwrap() as u64, address);
    }
}
