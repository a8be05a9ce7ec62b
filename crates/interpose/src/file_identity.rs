//! Which file something is, and in which state its content.
//!
//! In: what the kernel says of a file (stat(2), statx(2)). Out: whether two files are the same, in
//! the same state. What may never happen: a new file with the inode of a removed one counts as that
//! one, where the file system tells times of birth.

use crate::origin;

/// Largest length of a path in bytes, with its zero: the kernel's `PATH_MAX`.
pub const PATH_BYTES: usize = 4096;

/// Kind of the object behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FileKind {
    /// An object that is not recorded.
    Other = 0,
    /// A regular file.
    File = 1,
    Directory = 2,
    /// A device that returns random numbers.
    Random = 3,
    /// A file whose content the kernel generates as it is read (proc, sysfs).
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

/// Identity of a file, and of one state of its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
    pub size: i64,
    /// Times of the last modification and of the last status change, in nanoseconds since 1970.
    pub modified: i64,
    pub changed: i64,
    /// Time at which the file was created, in nanoseconds since 1970; 0: not known. A file system
    /// may give the inode of a removed file to a new one.
    pub born: i64,
}

impl FileIdentity {
    pub const NONE: FileIdentity =
        FileIdentity { device: 0, inode: 0, size: 0, modified: 0, changed: 0, born: 0 };

    /// Whether both are the same file. Each kernel numbers devices in its own way, so on another
    /// kernel than that of the first incarnation the device is not compared.
    pub fn is_same_file(&self, other: &FileIdentity) -> bool {
        let is_same_birth = self.born == other.born || self.born == 0 || other.born == 0;
        let is_same_device = self.device == other.device || origin::is_other_kernel();
        self.inode == other.inode && is_same_birth && is_same_device
    }

    /// Whether both are the same file with the same content, as far as its times show.
    pub fn is_same_state(&self, other: &FileIdentity) -> bool {
        let state = |it: &FileIdentity| (it.size, it.modified, it.changed);
        self.is_same_file(other) && state(self) == state(other)
    }
}

/// An identity as little-endian bytes.
pub fn bytes_of(identity: &FileIdentity) -> [u8; size_of::<FileIdentity>()] {
    let words = [
        identity.device,
        identity.inode,
        identity.size as u64,
        identity.modified as u64,
        identity.changed as u64,
        identity.born as u64,
    ];
    let mut bytes = [0; size_of::<FileIdentity>()];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// An identity from the bytes of [`bytes_of`].
pub fn identity_from(bytes: &[u8]) -> FileIdentity {
    let word = |at: usize| {
        bytes
            .get(8 * at..8 * at + 8)
            .map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
    };
    FileIdentity {
        device: word(0),
        inode: word(1),
        size: word(2) as i64,
        modified: word(3) as i64,
        changed: word(4) as i64,
        born: word(5) as i64,
    }
}
