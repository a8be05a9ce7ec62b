//! What the recorded thread has open: which descriptor is which file, and where the program stands in it.
//!
//! In: opens, duplicates, closes, results of reads and writes. Out: the file behind a descriptor. A file counts as *real* while its
//! descriptors are open on it; during replay they may be placeholders, because the file may have been renamed, replaced or
//! removed since ([`OpenFile::is_real`]).
//!
//! What may never happen: memory is allocated; two files share one place.

use libc::c_int;

use crate::working_directory::WorkingDirectory;

/// Descriptors that are looked after; programs with more cannot be restarted.
pub const DESCRIPTORS: usize = 4096;
/// Files open at the same time.
pub const OPENS: usize = 1024;
/// As the kernel's `PATH_MAX`.
pub const PATH_BYTES: usize = 4096;
/// Locked ranges of one file.
pub const LOCKS: usize = 8;
/// Files whose last append is remembered.
const ENDS: usize = 64;

/// Of a descriptor that is not looked after. (A table of zeros takes no room in the library's file.)
const NONE: u16 = 0;

/// What lies behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FileKind {
    /// Nothing that is looked after.
    Other = 0,
    /// A file of a file system.
    File = 1,
    Directory = 2,
    /// A device that gives random numbers.
    Random = 3,
    /// A file whose content the kernel makes up as it is read (proc, sysfs).
    Virtual = 4,
}

impl FileKind {
    pub fn of(byte: u8) -> Option<FileKind> {
        let all = [
            FileKind::File,
            FileKind::Directory,
            FileKind::Random,
            FileKind::Virtual,
            FileKind::Other,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What tells a file from others, and one state of its content from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
    pub size: i64,
    /// Nanoseconds since 1970.
    pub modified: i64,
    pub changed: i64,
}

/// An open file, as one call has opened it; its descriptors share the position.
pub struct OpenFile {
    uses: u32,
    pub kind: FileKind,
    /// As given to `open`, and changed since.
    pub flags: c_int,
    /// When it was opened.
    pub identity: FileIdentity,
    pub offset: i64,
    /// Where its own last append ended; 0: there was none.
    pub append_end: i64,
    /// Somebody else appends to it as well.
    pub is_shared_append: bool,
    /// Its descriptors are open on it.
    pub is_real: bool,
    /// The agent has it while an image of the process is taken.
    pub is_quiesced: bool,
    /// What is read of it is recorded with its content.
    pub is_recorded: bool,
    /// Its name is gone.
    pub is_removed: bool,
    /// The number under which the agent holds it; 0: it does not.
    pub held: u64,
    /// `flock`: 0 if it is not locked.
    pub lock: c_int,
    /// Start and length of ranges locked by `fcntl`.
    pub ranges: [Option<(i64, i64)>; LOCKS],
    length: u16,
    path: [u8; PATH_BYTES],
}

impl OpenFile {
    pub const FREE: OpenFile = OpenFile {
        uses: 0,
        kind: FileKind::Other,
        flags: 0,
        identity: FileIdentity { device: 0, inode: 0, size: 0, modified: 0, changed: 0 },
        offset: 0,
        append_end: 0,
        is_shared_append: false,
        is_real: false,
        is_quiesced: false,
        is_recorded: false,
        is_removed: false,
        held: 0,
        lock: 0,
        ranges: [None; LOCKS],
        length: 0,
        path: [0; PATH_BYTES],
    };

    pub fn path(&self) -> &[u8] {
        &self.path[..self.length.into()]
    }

    /// With a zero behind it.
    pub fn path_pointer(&self) -> *const u8 {
        self.path.as_ptr()
    }

    /// Its name from now on. A longer one is not kept: the file then cannot be opened again.
    pub fn rename(&mut self, path: &[u8]) {
        let length = if path.len() < PATH_BYTES { path.len() } else { 0 };
        self.path[..length].copy_from_slice(&path[..length]);
        self.path[length] = 0;
        self.length = length as u16;
    }

    pub fn may_write(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    pub fn appends(&self) -> bool {
        self.flags & libc::O_APPEND != 0
    }

    pub fn is_locked(&self) -> bool {
        self.lock != 0 || self.ranges.iter().any(Option::is_some)
    }
}

/// See the module head.
pub struct DescriptorTable {
    slots: [u16; DESCRIPTORS],
    pub opens: [OpenFile; OPENS],
    /// Where relative names begin.
    pub working_directory: WorkingDirectory,
    ends: [AppendEnd; ENDS],
    /// The next of them to be forgotten.
    oldest: usize,
}

/// Where the last append of this process to a file ended, also when it has closed that file since.
#[derive(Clone, Copy)]
struct AppendEnd {
    file: (u64, u64),
    end: i64,
}

impl DescriptorTable {
    pub const EMPTY: DescriptorTable = DescriptorTable {
        slots: [NONE; DESCRIPTORS],
        opens: [OpenFile::FREE; OPENS],
        working_directory: WorkingDirectory { open: OpenFile::FREE, is_elsewhere: false },
        ends: [AppendEnd { file: (0, 0), end: 0 }; ENDS],
        oldest: 0,
    };

    /// Where this process has last ended an append to the file; 0: it has appended nothing, as far as is remembered.
    pub fn end_of(&self, identity: &FileIdentity) -> i64 {
        let file = (identity.device, identity.inode);
        self.ends.iter().find(|it| it.file == file).map_or(0, |it| it.end)
    }

    /// It ends there.
    pub fn note_end(&mut self, identity: &FileIdentity, end: i64) {
        let file = (identity.device, identity.inode);
        let known = self.ends.iter().position(|it| it.file == file);
        let at = known.unwrap_or(self.oldest);
        if known.is_none() {
            self.oldest = (self.oldest + 1) % ENDS;
        }
        self.ends[at] = AppendEnd { file, end };
    }

    /// The file behind a descriptor.
    #[inline]
    pub fn get(&mut self, descriptor: u64) -> Option<&mut OpenFile> {
        let index = self.index(descriptor)?;
        self.opens.get_mut(index)
    }

    /// Whether two descriptors share one open file.
    pub fn index(&self, descriptor: u64) -> Option<usize> {
        let place = *self.slots.get(descriptor as u32 as usize)?;
        usize::from(place).checked_sub(1)
    }

    /// A file is open under this descriptor. `None`: there is no room.
    pub fn insert(&mut self, descriptor: i64) -> Option<&mut OpenFile> {
        self.remove(descriptor as u64);
        let place = self.slots.get_mut(usize::try_from(descriptor).ok()?)?;
        let free = self.opens.iter().position(|open| open.uses == 0)?;
        *place = free as u16 + 1;
        let open = &mut self.opens[free];
        // The path is written over, and need not be cleared.
        (open.uses, open.length, open.path[0]) = (1, 0, 0);
        (open.kind, open.flags, open.offset) = (FileKind::Other, 0, 0);
        (open.identity, open.append_end) = (FileIdentity::default(), 0);
        (open.is_shared_append, open.is_real, open.is_quiesced) = (false, true, false);
        (open.is_recorded, open.is_removed, open.held) = (false, false, 0);
        (open.lock, open.ranges) = (0, [None; LOCKS]);
        Some(open)
    }

    /// `to` is another name of what is open under `from`. False: there is no room for it.
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

    /// The descriptor is closed.
    pub fn remove(&mut self, descriptor: u64) {
        let Some(index) = self.index(descriptor) else { return };
        self.slots[descriptor as u32 as usize] = NONE;
        self.opens[index].uses -= 1;
    }

    /// How many descriptors an open file has.
    pub fn uses(&self, index: usize) -> u32 {
        self.opens[index].uses
    }

    /// OpenFile files, with their numbers.
    pub fn opens(&mut self) -> impl Iterator<Item = (usize, &mut OpenFile)> {
        self.opens.iter_mut().enumerate().filter(|(_, open)| open.uses > 0)
    }

    /// The descriptors of one of them.
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
        // On the heap at once: it is too large for a test's stack. All zeros are an empty table.
        // SAFETY: numbers, and options of which zeros are none.
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
    fn there_is_a_bound() {
        let mut table = table();
        (0..OPENS).for_each(|at| assert!(table.insert(at as i64).is_some()));
        assert!(table.insert(OPENS as i64).is_none());
        table.remove(17);
        assert!(table.insert(OPENS as i64).is_some());
    }
}
