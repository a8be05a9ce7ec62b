//! One open file description of the recorded thread.
//!
//! In: what its opens, writes and locks have done. Out: position, identity and path of the file.
//! What may never happen: a path that is cut off.

use libc::c_int;

use crate::file_identity::{FileIdentity, FileKind, PATH_BYTES};
use crate::locked_ranges::LockedRanges;

/// One open file description; its descriptors share the position.
///
/// The fields are what a kernel keeps of an open file, and what this project adds to it. They stay
/// in one flat entry of a static table, because the interposer allocates no memory.
pub struct OpenFile {
    /// Number of descriptors; 0: the entry is free.
    pub uses: u32,
    pub kind: FileKind,
    /// Flags of `open`, with later changes by `fcntl`.
    pub flags: c_int,
    /// Identity of the file when it was opened.
    pub identity: FileIdentity,
    pub offset: i64,
    /// File size after this process's last append; 0: the process has appended nothing.
    pub append_end: i64,
    /// True if another process appends to the file as well.
    pub is_shared_append: bool,
    /// True while the descriptors are open on the file; false while they are placeholders.
    pub is_real: bool,
    /// True while the agent holds the file for a checkpoint of this process.
    pub is_quiesced: bool,
    /// True if reads of the file are recorded with their content.
    pub is_recorded: bool,
    /// True if the last listing of the directory gave no more names.
    pub has_listed_all: bool,
    /// True once the file has lost its name.
    pub is_removed: bool,
    /// Number under which the agent holds the file; 0: the agent does not hold it.
    pub held: u64,
    /// True if the agent has given the open file back, with the position that an earlier
    /// incarnation has left.
    pub is_returned: bool,
    /// Operation of `flock`; 0: the file is not locked.
    pub lock: c_int,
    /// Ranges locked by `fcntl`.
    pub ranges: LockedRanges,
    /// True if the ranges are locked for the process (`F_SETLK`), false if for this open file.
    pub has_process_locks: bool,
    /// True if this library has opened the file for range locks of the process.
    pub is_lock_holder: bool,
    length: u16,
    path: [u8; PATH_BYTES],
}

impl OpenFile {
    pub const FREE: OpenFile = OpenFile {
        uses: 0,
        kind: FileKind::Other,
        flags: 0,
        identity: FileIdentity::NONE,
        offset: 0,
        append_end: 0,
        is_shared_append: false,
        is_real: false,
        is_quiesced: false,
        is_recorded: false,
        has_listed_all: false,
        is_removed: false,
        held: 0,
        is_returned: false,
        lock: 0,
        ranges: LockedRanges::NONE,
        has_process_locks: false,
        is_lock_holder: false,
        length: 0,
        path: [0; PATH_BYTES],
    };

    /// Begins the entry of another open file, with one descriptor.
    pub fn begin(&mut self) {
        // The path is overwritten when it is set, so the old bytes need no clearing.
        (self.uses, self.length, self.path[0]) = (1, 0, 0);
        (self.kind, self.flags, self.offset) = (FileKind::Other, 0, 0);
        (self.identity, self.append_end) = (FileIdentity::default(), 0);
        (self.is_shared_append, self.is_real, self.is_quiesced) = (false, true, false);
        (self.is_recorded, self.is_removed, self.held) = (false, false, 0);
        (self.is_returned, self.is_lock_holder, self.has_listed_all) = (false, false, false);
        (self.lock, self.ranges, self.has_process_locks) = (0, LockedRanges::NONE, false);
    }

    pub fn path(&self) -> &[u8] {
        &self.path[..self.length.into()]
    }

    /// Address of the path, which ends with a zero.
    pub fn path_pointer(&self) -> *const u8 {
        self.path.as_ptr()
    }

    /// Sets the path. A path of [`PATH_BYTES`] or more is dropped: the file then cannot be
    /// reopened.
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
        self.lock != 0 || !self.ranges.is_empty()
    }
}
