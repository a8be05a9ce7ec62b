//! The files that this process has changed and not removed, by the file system that holds them.
//!
//! A rank of a lost node replays on another node and repeats none of its effects on files: what it
//! has written must be visible there. In: files that the program opens for writing, and changes of
//! their names. Out, when a replay on another node is over: the path of a file on a file system
//! that this node does not share with the lost one.
//!
//! A file that is missing proves nothing, because other ranks may have removed or replaced it. So
//! one file of a file system that is there proves that the file system is shared. Without such a
//! file, the directory must be on the same device, or, on another kernel, on a file system of a
//! kind that nodes share.
//!
//! What may never happen: a rank continues on another node while the first part of what it has
//! written is on the lost node alone.

use crate::file_identity::{FileIdentity, PATH_BYTES};
use crate::file_metadata::{directory_of, file_system_of, identity_at};
use crate::kernel_calls::HERE;
use crate::origin;

/// Largest number of file systems, and of files of each.
pub const FILE_SYSTEMS: usize = 8;
const FILES: usize = 8;

/// Kinds of file systems whose files all nodes see, by their number in statfs(2): NFS, SMB (three
/// numbers), AFS (two), Lustre, GPFS, Ceph, BeeGFS, OrangeFS, PanFS, 9P, GFS2, OCFS2, StorNext.
const SHARED_KINDS: [i64; 16] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x5346_414f,
    0x6b41_4653,
    0x0bd0_0bd0,
    0x4750_4653,
    0x00c3_6400,
    0x1983_0326,
    0x2003_0528,
    0xaad7_aaea,
    0x0102_1997,
    0x0116_1970,
    0x7461_636f,
    0xbeef_dead,
];

/// See the head of the module.
pub struct ChangedFiles {
    file_systems: [FileSystem; FILE_SYSTEMS],
    /// Files on more file systems than [`FILE_SYSTEMS`] were changed.
    pub has_more: bool,
}

/// One file system, by its device number when its first file was changed.
struct FileSystem {
    device: u64,
    files: [ChangedFile; FILES],
    /// More files than [`FILES`] were changed and not removed; these are not in `files`.
    has_more: bool,
    /// The file that was changed last.
    last: usize,
}

struct ChangedFile {
    inode: u64,
    /// Time of birth, as [`FileIdentity::born`].
    born: i64,
    /// 0: no file.
    length: u16,
    path: [u8; PATH_BYTES],
}

impl ChangedFiles {
    pub const EMPTY: ChangedFiles = ChangedFiles {
        file_systems: [const {
            FileSystem {
                device: 0,
                files: [const { ChangedFile::FREE }; FILES],
                has_more: false,
                last: 0,
            }
        }; FILE_SYSTEMS],
        has_more: false,
    };

    /// Notes that the program has a file open for writing.
    pub fn note(&mut self, identity: &FileIdentity, path: &[u8]) {
        if path.is_empty() || path.len() >= PATH_BYTES {
            return;
        }
        let known = self.file_systems.iter().position(|it| it.device == identity.device);
        let at = known.or_else(|| self.file_systems.iter().position(|it| it.device == 0));
        match at {
            Some(at) => self.file_systems[at].note(identity, path),
            None => self.has_more = true,
        }
    }

    /// Follows the removal of a file.
    pub fn remove(&mut self, path: &[u8]) {
        self.files().filter(|file| file.path() == path).for_each(|file| file.length = 0);
    }

    /// Follows the renaming of a file or directory, which replaces what had the new name.
    pub fn rename(&mut self, old: &[u8], new: &[u8]) {
        self.remove(new);
        self.replace_prefix(old, new);
    }

    /// Follows the exchange of two names.
    pub fn exchange(&mut self, one: &[u8], other: &[u8]) {
        // No path of the kernel's begins like this.
        let between: &[u8] = b"\0";
        self.replace_prefix(one, between);
        self.replace_prefix(other, one);
        self.replace_prefix(between, other);
    }

    fn replace_prefix(&mut self, old: &[u8], new: &[u8]) {
        for file in self.files() {
            let is_it = file.path().strip_prefix(old);
            let Some(rest) = is_it.filter(|rest| rest.is_empty() || rest[0] == b'/') else {
                continue;
            };
            let mut path = [0; PATH_BYTES];
            let length = new.len() + rest.len();
            if length < PATH_BYTES {
                path[..new.len()].copy_from_slice(new);
                path[new.len()..length].copy_from_slice(rest);
                file.take(&path[..length]);
            }
        }
    }

    /// Path of a file on a file system that this node does not share with the node on which the
    /// file was changed.
    pub fn left_behind(&self) -> Option<&[u8]> {
        let not_shared = self.file_systems.iter().find(|it| it.is_in_use() && !it.is_shared());
        not_shared.map(|it| it.files[it.last].last_path())
    }

    fn files(&mut self) -> impl Iterator<Item = &mut ChangedFile> {
        let files = self.file_systems.iter_mut().flat_map(|it| &mut it.files);
        files.filter(|file| file.length > 0)
    }
}

impl FileSystem {
    fn note(&mut self, identity: &FileIdentity, path: &[u8]) {
        self.device = identity.device;
        let known = self.files.iter().position(|file| file.path() == path);
        let free = self.files.iter().position(|file| file.length == 0);
        let at = known.or(free).unwrap_or_else(|| {
            // The oldest file makes room, and counts as changed for ever.
            self.has_more = true;
            (self.last + 1) % FILES
        });
        (self.files[at].inode, self.files[at].born) = (identity.inode, identity.born);
        self.files[at].take(path);
        self.last = at;
    }

    /// Whether a file of this file system was changed and not removed.
    fn is_in_use(&self) -> bool {
        self.device != 0 && (self.has_more || self.files.iter().any(|file| file.length > 0))
    }

    fn is_shared(&self) -> bool {
        let mut files = self.files.iter().filter(|file| file.length > 0);
        files.any(|file| file.is_there(self.device))
            || self.files[self.last].is_reachable(self.device)
    }
}

impl ChangedFile {
    const FREE: ChangedFile = ChangedFile { inode: 0, born: 0, length: 0, path: [0; PATH_BYTES] };

    fn path(&self) -> &[u8] {
        &self.path[..self.length.into()]
    }

    /// The path, also of a file that was removed.
    fn last_path(&self) -> &[u8] {
        self.path.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    fn take(&mut self, path: &[u8]) {
        self.path[..path.len()].copy_from_slice(path);
        self.path[path.len()] = 0;
        self.length = path.len() as u16;
    }

    fn place(&self) -> (u64, u64) {
        (HERE, self.path.as_ptr().addr() as u64)
    }

    /// Whether this very file is there. Between two kernels the inode alone proves nothing: disks
    /// that were copied or filled alike have the same inodes.
    fn is_there(&self, device: u64) -> bool {
        let wanted =
            FileIdentity { device, inode: self.inode, born: self.born, ..FileIdentity::NONE };
        let found = identity_at(self.place()).map(|(_, found)| found);
        let is_proof =
            |found: FileIdentity| !origin::is_other_kernel() || self.born != 0 && found.born != 0;
        found.is_some_and(|found| found.is_same_file(&wanted) && is_proof(found))
    }

    /// Whether the file's directory is on the file system on which the file was changed. The path
    /// of a removed file is still in its place.
    fn is_reachable(&self, device: u64) -> bool {
        if origin::is_other_kernel() {
            // SAFETY: the path ends with a zero.
            let kind = unsafe { file_system_of(self.place()) };
            return kind.is_some_and(|kind| SHARED_KINDS.contains(&kind));
        }
        // SAFETY: the path ends with a zero.
        unsafe { directory_of(self.place()) }.is_some_and(|found| found.device == device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(device: u64, inode: u64) -> FileIdentity {
        FileIdentity { device, inode, ..FileIdentity::default() }
    }

    fn new() -> Box<ChangedFiles> {
        Box::new(ChangedFiles::EMPTY)
    }

    fn paths(changed: &mut ChangedFiles) -> Vec<String> {
        changed.files().map(|file| String::from_utf8_lossy(file.path()).into_owned()).collect()
    }

    #[test]
    fn files_are_followed_until_they_are_removed() {
        let mut changed = new();
        changed.note(&on(1, 1), b"/a/one");
        changed.note(&on(1, 1), b"/a/one");
        changed.note(&on(2, 2), b"/b/two");
        assert_eq!(paths(&mut changed), ["/a/one", "/b/two"]);
        changed.rename(b"/a", b"/c");
        changed.rename(b"/b/tw", b"/no");
        assert_eq!(paths(&mut changed), ["/c/one", "/b/two"]);
        changed.rename(b"/c/one", b"/b/two");
        assert_eq!(paths(&mut changed), ["/b/two"]);
        changed.remove(b"/b/two");
        assert!(!changed.file_systems.iter().any(FileSystem::is_in_use));
        for number in 0..=FILES {
            changed.note(&on(1, 1), format!("/a/{number}").as_bytes());
        }
        for number in 0..=FILES {
            changed.remove(format!("/a/{number}").as_bytes());
        }
        assert!(changed.file_systems[0].is_in_use(), "one was forgotten");
        (1..=FILE_SYSTEMS as u64).for_each(|device| changed.note(&on(device, 1), b"/x"));
        assert!(!changed.has_more);
        changed.note(&on(99, 1), b"/x");
        assert!(changed.has_more);
    }

    #[test]
    fn a_file_system_is_shared_if_a_file_or_the_directory_is_there() {
        let folder = std::env::temp_dir().join(format!("lb-changed-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).into_os_string().into_encoded_bytes();
        std::fs::write(folder.join("there"), "").unwrap();
        let name = std::ffi::CString::new(path("there")).unwrap();
        let (_, identity) = identity_at((HERE, name.as_ptr().addr() as u64)).unwrap();
        let left = |device, inode, name| {
            let mut changed = new();
            changed.note(&on(device, inode), &path(name));
            changed.left_behind().is_some()
        };
        assert!(!left(identity.device, identity.inode, "there"));
        assert!(!left(identity.device, identity.inode, "removed by another rank"));
        assert!(!left(identity.device, identity.inode + 1, "there"), "replaced by another rank");
        assert!(left(identity.device + 1, identity.inode, "there"), "of another file system");
        assert!(left(identity.device, identity.inode, "no directory/file"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
