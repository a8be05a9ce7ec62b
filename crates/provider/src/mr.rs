//! Registered memory: what peers may reach by key.
//!
//! Keys are the caller's, any 64-bit number; a peer's address is an offset from the start of the
//! region. Nothing outside a registered range, or without the access it was registered for, is ever
//! turned into a pointer.

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
    /// May be 0 with `len` `usize::MAX`: the whole address space, offsets are addresses (dynamic
    /// windows).
    pub base: usize,
    pub len: usize,
    /// `abi::REMOTE_READ`, `abi::REMOTE_WRITE` and their local kin.
    pub access: u64,
}

impl MrTable {
    /// `ENOKEY`: the key is in use.
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

    /// Where `len` bytes at `offset` of region `key` lie, if all of them are in it and were
    /// registered for every kind of `access` (`abi::REMOTE_READ | abi::REMOTE_WRITE`).
    ///
    /// The pointer is good until the region is forgotten, which the caller's own step excludes: a region is only forgotten
    /// when no engine of the domain is in one.
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

/// What a registration asked for, completed: an empty wish means everything.
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
