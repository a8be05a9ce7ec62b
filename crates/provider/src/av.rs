//! The address vector: peers' names, indexed by the small numbers (`fi_addr_t`) that operations
//! use.
//!
//! A number keeps its meaning for the life of the vector. Removing a name never moves another name,
//! and a removed number is not reused, so an engine may cache data by number. Inserting a name
//! twice returns the same number, and the name then needs two removals.

use std::collections::BTreeMap;

use crate::abi::{Errno, FiAddr};
use crate::sync::SpinLock;

/// Storage for a name in bytes. A Landbridge address fills all of them; zeros follow a
/// `sockaddr_in` (16 bytes).
pub const NAME_BYTES: usize = 48;

pub type AvName = [u8; NAME_BYTES];

#[derive(Default)]
pub struct Av {
    table: SpinLock<AvTable>,
}

#[derive(Default)]
struct AvTable {
    entries: Vec<Option<AvEntry>>,
    by_name: BTreeMap<AvName, FiAddr>,
}

struct AvEntry {
    name: AvName,
    /// Number of insertions that have not been removed.
    holders: usize,
}

impl Av {
    /// Allocates memory for `count` names at once; the vector grows on demand.
    pub fn with_capacity(count: usize) -> Av {
        /// Largest number of names for which memory is allocated at once.
        const RESERVE_MAX: usize = 65_536;
        let count = count.min(RESERVE_MAX);
        Av {
            table: SpinLock::new(AvTable {
                entries: Vec::with_capacity(count),
                by_name: BTreeMap::new(),
            }),
        }
    }

    pub fn insert(&self, name: AvName) -> FiAddr {
        let mut table = self.table.lock();
        if let Some(&known) = table.by_name.get(&name) {
            if let Some(entry) = &mut table.entries[known as usize] {
                entry.holders += 1;
            }
            return known;
        }
        let number = table.entries.len() as FiAddr;
        table.entries.push(Some(AvEntry { name, holders: 1 }));
        table.by_name.insert(name, number);
        number
    }

    pub fn remove(&self, number: FiAddr) -> Result<(), Errno> {
        let mut table = self.table.lock();
        let slot = usize::try_from(number).ok().and_then(|i| table.entries.get_mut(i));
        let entry = slot.ok_or(Errno::EINVAL)?;
        let held = entry.as_mut().ok_or(Errno::EINVAL)?;
        held.holders -= 1;
        if held.holders == 0 {
            let name = held.name;
            *entry = None;
            table.by_name.remove(&name);
        }
        Ok(())
    }

    /// The name with this number.
    pub fn name_of(&self, number: FiAddr) -> Option<AvName> {
        let table = self.table.lock();
        let index = usize::try_from(number).ok()?;
        table.entries.get(index)?.as_ref().map(|entry| entry.name)
    }

    /// The number of a name.
    pub fn addr_of(&self, name: &AvName) -> Option<FiAddr> {
        self.table.lock().by_name.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_order_of_insertion() {
        let av = Av::with_capacity(0);
        assert!((0..100).all(|i| av.insert(name(i)) == i as u64));
        assert_eq!(av.name_of(42), Some(name(42)));
        assert_eq!(av.addr_of(&name(42)), Some(42));
        assert_eq!(av.name_of(100), None);
        assert_eq!(av.name_of(u64::MAX), None);
    }

    #[test]
    fn a_name_inserted_twice_has_one_number_and_two_holders() {
        let av = Av::default();
        assert_eq!((av.insert(name(1)), av.insert(name(1))), (0, 0));
        av.remove(0).unwrap();
        assert_eq!(av.addr_of(&name(1)), Some(0));
        av.remove(0).unwrap();
        assert_eq!(av.addr_of(&name(1)), None);
        assert_eq!(av.remove(0), Err(Errno::EINVAL));
    }

    #[test]
    fn removal_moves_nothing_and_no_number_returns() {
        let av = Av::default();
        (0..3).for_each(|i| assert_eq!(av.insert(name(i)), i as u64));
        av.remove(1).unwrap();
        assert_eq!(av.name_of(2), Some(name(2)));
        assert_eq!(av.insert(name(9)), 3);
        assert_eq!(av.insert(name(1)), 4);
    }

    fn name(i: u8) -> AvName {
        [i; NAME_BYTES]
    }
}
