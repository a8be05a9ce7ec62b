//! Something of each of some processes.
//!
//! What enters: numbers of processes below [`LOGGED_PROCESSES_MAX`], and what belongs to them. What
//! leaves: the same, by the process's number or by the place at which it was put in. What may never
//! happen: a place changes.

use landbridge_proto::log::layout::LOGGED_PROCESSES_MAX;

/// No place.
const NOWHERE: u16 = u16::MAX;

pub(super) struct ByProcess<T> {
    all: Vec<(usize, T)>,
    /// By process.
    places: Box<[u16; LOGGED_PROCESSES_MAX]>,
}

impl<T> Default for ByProcess<T> {
    fn default() -> ByProcess<T> {
        ByProcess { all: Vec::new(), places: Box::new([NOWHERE; LOGGED_PROCESSES_MAX]) }
    }
}

impl<T> ByProcess<T> {
    /// Adds a process that is not there, and returns its place.
    pub fn insert(&mut self, process: usize, value: T) -> usize {
        assert!(self.place(process).is_none(), "a process has one place");
        let place = self.all.len();
        self.places[process] = place as u16;
        self.all.push((process, value));
        place
    }

    #[inline]
    pub fn place(&self, process: usize) -> Option<usize> {
        let place = *self.places.get(process)?;
        (place != NOWHERE).then_some(place.into())
    }

    #[inline]
    pub fn contains(&self, process: usize) -> bool {
        self.place(process).is_some()
    }

    #[inline]
    pub fn get(&self, process: usize) -> Option<&T> {
        self.place(process).map(|place| &self.all[place].1)
    }

    #[inline]
    pub fn get_mut(&mut self, process: usize) -> Option<&mut T> {
        self.place(process).map(|place| &mut self.all[place].1)
    }

    /// The process at a place.
    #[inline]
    pub fn process_at(&self, place: usize) -> usize {
        self.all[place].0
    }

    #[inline]
    pub fn at(&self, place: usize) -> &T {
        &self.all[place].1
    }

    #[inline]
    pub fn at_mut(&mut self, place: usize) -> &mut T {
        &mut self.all[place].1
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// All, in the order of their places.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.all.iter().map(|(process, value)| (*process, value))
    }

    /// All, in the order of their places.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.all.iter_mut().map(|(process, value)| (*process, value))
    }

    /// All, in the order of their places.
    pub fn into_iter(self) -> impl Iterator<Item = (usize, T)> {
        self.all.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_is_found_by_its_process_and_by_its_place() {
        let mut some = ByProcess::default();
        assert_eq!([some.insert(9, "nine"), some.insert(2, "two")], [0, 1]);
        assert_eq!(
            [some.get(2), some.get(9), some.get(3), some.get(9999)],
            [Some(&"two"), Some(&"nine"), None, None]
        );
        assert_eq!((some.process_at(1), some.at(0), some.len()), (2, &"nine", 2));
        assert_eq!(some.into_iter().collect::<Vec<_>>(), [(9, "nine"), (2, "two")]);
    }
}
