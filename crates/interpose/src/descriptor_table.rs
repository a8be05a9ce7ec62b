//! Open files of the recorded thread: which descriptor is which file, and at which position the
//! program is.
//!
//! In: opens, duplicates, closes, results of reads and writes. Out: the file behind a descriptor. A
//! file is *real* while its descriptors are open on it. During replay the descriptors may be
//! placeholders, because the file may have been renamed, replaced or removed since
//! ([`OpenFile::is_real`]).
//!
//! What may never happen: the table allocates memory; two files share one entry.

use crate::changed_files::ChangedFiles;
use crate::file_identity::FileIdentity;
use crate::mapped_files::MappedFiles;
use crate::open_file::OpenFile;
use crate::working_directory::WorkingDirectory;

/// Number of descriptors in the table; a program with a higher descriptor cannot be restarted.
pub const DESCRIPTORS: usize = 4096;
/// Largest number of files open at the same time.
pub const OPENS: usize = 1024;
/// Number of files whose last append is remembered.
const ENDS: usize = 64;

/// Slot of a descriptor without an entry. (A table of zeros takes no space in the library's file.)
const NONE: u16 = 0;

/// Table of the descriptors and open files of the recorded thread.
pub struct DescriptorTable {
    slots: [u16; DESCRIPTORS],
    pub opens: [OpenFile; OPENS],
    /// Directory to which relative names refer.
    pub working_directory: WorkingDirectory,
    pub mapped_files: MappedFiles,
    pub changed_files: ChangedFiles,
    /// Index of the open file whose position is not restored, because it shows what an interrupted
    /// append has done.
    pub kept_offset: Option<usize>,
    ends: [AppendEnd; ENDS],
    /// Index of the entry of `ends` that is replaced next.
    oldest: usize,
}

/// File size after the last append of this process to a file, also after the process has closed
/// that file.
#[derive(Clone, Copy)]
struct AppendEnd {
    file: FileIdentity,
    end: i64,
}

impl DescriptorTable {
    pub const EMPTY: DescriptorTable = DescriptorTable {
        slots: [NONE; DESCRIPTORS],
        opens: [OpenFile::FREE; OPENS],
        working_directory: WorkingDirectory {
            open: OpenFile::FREE,
            is_elsewhere: false,
            has_left: false,
        },
        mapped_files: MappedFiles::EMPTY,
        changed_files: ChangedFiles::EMPTY,
        kept_offset: None,
        ends: [AppendEnd { file: FileIdentity::NONE, end: 0 }; ENDS],
        oldest: 0,
    };

    /// File size after this process's last append to the file; 0: no append is remembered.
    pub fn end_of(&self, identity: &FileIdentity) -> i64 {
        self.ends.iter().find(|it| it.file.is_same_file(identity)).map_or(0, |it| it.end)
    }

    /// Notes the file size after an append; the oldest of `ENDS` entries is replaced.
    pub fn note_end(&mut self, identity: &FileIdentity, end: i64) {
        let known = self.ends.iter().position(|it| it.file.is_same_file(identity));
        let at = known.unwrap_or(self.oldest);
        if known.is_none() {
            self.oldest = (self.oldest + 1) % ENDS;
        }
        self.ends[at] = AppendEnd { file: *identity, end };
    }

    /// The open file behind a descriptor.
    #[inline]
    pub fn get(&mut self, descriptor: u64) -> Option<&mut OpenFile> {
        let index = self.index(descriptor)?;
        self.opens.get_mut(index)
    }

    /// Index of the open file behind a descriptor. Two descriptors with the same index share one
    /// open file.
    pub fn index(&self, descriptor: u64) -> Option<usize> {
        let place = *self.slots.get(descriptor as u32 as usize)?;
        usize::from(place).checked_sub(1)
    }

    /// Adds an open file under this descriptor. `None`: the table is full.
    pub fn insert(&mut self, descriptor: i64) -> Option<&mut OpenFile> {
        self.remove(descriptor as u64);
        let place = self.slots.get_mut(usize::try_from(descriptor).ok()?)?;
        let free = self.opens.iter().position(|open| open.uses == 0)?;
        *place = free as u16 + 1;
        let open = &mut self.opens[free];
        open.begin();
        Some(open)
    }

    /// Makes `to` another descriptor of the open file at `from`. False: `to` is beyond the table.
    pub fn duplicate(&mut self, from: u64, to: i64) -> bool {
        let Some(index) = self.index(from) else { return true };
        if self.index(to as u64) == Some(index) {
            return true;
        }
        self.remove(to as u64);
        let Some(place) = usize::try_from(to).ok().and_then(|to| self.slots.get_mut(to)) else {
            return false;
        };
        *place = index as u16 + 1;
        self.opens[index].uses += 1;
        true
    }

    /// Removes a descriptor that is closed.
    pub fn remove(&mut self, descriptor: u64) {
        let Some(index) = self.index(descriptor) else { return };
        self.slots[descriptor as u32 as usize] = NONE;
        self.opens[index].uses -= 1;
    }

    /// Number of descriptors of an open file.
    pub fn uses(&self, index: usize) -> u32 {
        self.opens[index].uses
    }

    /// All open files, with their indices.
    pub fn opens(&mut self) -> impl Iterator<Item = (usize, &mut OpenFile)> {
        self.opens.iter_mut().enumerate().filter(|(_, open)| open.uses > 0)
    }

    /// The descriptors of one open file.
    pub fn descriptors(&self, index: usize) -> impl Iterator<Item = u64> {
        let all = self.slots.iter().enumerate();
        all.filter(move |(_, place)| usize::from(**place) == index + 1).map(|(at, _)| at as u64)
    }

    pub fn by_index(&mut self, index: usize) -> &mut OpenFile {
        &mut self.opens[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Box<DescriptorTable> {
        // The table is allocated on the heap at once, because it is too large for a test's stack.
        // SAFETY: all zeros are an empty table: numbers, and options that are `None`.
        unsafe { Box::<DescriptorTable>::new_zeroed().assume_init() }
    }

    #[test]
    fn duplicates_share_one_position_until_the_last_is_closed() {
        let mut table = table();
        table.insert(3).unwrap().rename(b"/a");
        assert!(table.duplicate(3, 7) && table.duplicate(7, 7) && table.duplicate(9, 1));
        table.get(7).unwrap().offset = 5;
        assert_eq!(table.get(3).unwrap().offset, 5);
        table.remove(3);
        assert!(table.get(3).is_none());
        assert_eq!(table.get(7).unwrap().path(), b"/a");
        assert_eq!(table.opens().count(), 1);
        [7, 8, u64::MAX].into_iter().for_each(|descriptor| table.remove(descriptor));
        assert_eq!(table.opens().count(), 0);
    }

    #[test]
    fn a_descriptor_that_is_opened_again_is_another_file() {
        let mut table = table();
        table.insert(3).unwrap().rename(b"/a");
        table.insert(3).unwrap().rename(b"/b");
        assert_eq!(table.get(3).unwrap().path(), b"/b");
        assert_eq!(table.opens().count(), 1);
        assert!(table.insert(DESCRIPTORS as i64).is_none() && table.insert(-9).is_none());
        assert!(table.get(u64::MAX).is_none());
        assert!(!table.duplicate(3, DESCRIPTORS as i64));
    }

    #[test]
    fn the_end_of_an_append_outlives_its_descriptor_until_many_others_came() {
        let mut table = table();
        let file = |inode| FileIdentity { device: 1, inode, ..FileIdentity::default() };
        assert_eq!(table.end_of(&file(1)), 0);
        table.note_end(&file(1), 5);
        table.note_end(&file(1), 9);
        assert_eq!(table.end_of(&file(1)), 9);
        (2..=ENDS as u64).for_each(|inode| table.note_end(&file(inode), 1));
        assert_eq!(table.end_of(&file(1)), 9);
        table.note_end(&file(1000), 1);
        assert_eq!((table.end_of(&file(1)), table.end_of(&file(2))), (0, 1));
    }

    #[test]
    fn a_file_with_the_inode_of_a_removed_one_is_another() {
        let file = |born| FileIdentity { device: 1, inode: 2, born, ..FileIdentity::default() };
        assert!(file(5).is_same_file(&file(5)) && !file(5).is_same_file(&file(6)));
        assert!(file(5).is_same_file(&file(0)) && file(0).is_same_file(&file(5)), "not known");
    }

    #[test]
    fn there_is_a_bound() {
        let mut table = table();
        (0..OPENS).for_each(|at| assert!(table.insert(at as i64).is_some()));
        assert!(table.insert(OPENS as i64).is_none());
        table.remove(17);
        assert!(table.insert(OPENS as i64).is_some());
    }
}
