//! Numbered slots for operations in flight.
//!
//! An id names one operation, and no other one until the slot has been used 256 times: it holds the
//! slot index (24 bits) and the generation of that slot (8 bits). So a stale id finds nothing
//! instead of another operation.

use alloc::vec::Vec;

/// Values in slots, found by id.
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    generation: u8,
    value: Option<T>,
}

const SLOT_BITS: u32 = 24;
/// Most entries of a slab.
const SLOTS_MAX: usize = 1 << SLOT_BITS;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Number of values held.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether the slab holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inserts `value` and returns its id.
    ///
    /// # Panics
    /// If the slab holds 2^24 values: the users of this type have far lower bounds.
    #[inline]
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return number(index, slot.generation);
        }
        let index = self.slots.len();
        assert!(index < SLOTS_MAX, "a slab is full");
        self.slots.push(Slot { generation: 0, value: Some(value) });
        index as u32
    }

    /// The value of `id`, if the slab still holds it.
    #[inline]
    pub fn at(&self, id: u32) -> Option<&T> {
        let slot = self.slots.get(index(id))?;
        if slot.generation == generation(id) { slot.value.as_ref() } else { None }
    }

    /// The value of `id` for changes, if the slab still holds it.
    #[inline]
    pub fn at_mut(&mut self, id: u32) -> Option<&mut T> {
        let slot = self.slots.get_mut(index(id))?;
        if slot.generation == generation(id) { slot.value.as_mut() } else { None }
    }

    /// Removes the value of `id` and returns it.
    #[inline]
    pub fn remove(&mut self, id: u32) -> Option<T> {
        let value = self.held(id)?.value.take()?;
        self.release(id);
        Some(value)
    }

    /// Drops the value of `id` in its slot, because moving a large value is expensive.
    #[inline]
    pub fn discard(&mut self, id: u32) {
        if let Some(slot) = self.held(id)
            && slot.value.is_some()
        {
            slot.value = None;
            self.release(id);
        }
    }

    #[inline]
    fn held(&mut self, id: u32) -> Option<&mut Slot<T>> {
        self.slots.get_mut(index(id)).filter(|slot| slot.generation == generation(id))
    }

    /// Frees the slot of `id`, which is empty now, under its next generation.
    #[inline]
    fn release(&mut self, id: u32) {
        let slot = &mut self.slots[index(id)];
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index(id) as u32);
    }

    /// The ids of all values, in order of their slots.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.value.is_some())
            .map(|(index, slot)| number(index as u32, slot.generation))
    }
}

fn number(index: u32, generation: u8) -> u32 {
    (generation as u32) << SLOT_BITS | index
}

fn index(id: u32) -> usize {
    (id & (SLOTS_MAX as u32 - 1)) as usize
}

fn generation(id: u32) -> u8 {
    (id >> SLOT_BITS) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_number_finds_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert("first");
        assert_eq!(slab.remove(first), Some("first"));
        let second = slab.insert("second");
        assert_ne!(first, second);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.at(first), None);
        assert_eq!(slab.at(second), Some(&"second"));
        assert_eq!((slab.len(), slab.ids().next()), (1, Some(second)));
        slab.discard(first);
        assert_eq!(slab.at(second), Some(&"second"));
        slab.discard(second);
        slab.discard(second);
        assert_eq!((slab.at(second), slab.len()), (None, 0));
        assert_ne!(slab.insert("third"), second);
    }
}
