//! Names that may lead to something else in a later incarnation.
//!
//! A file may be older than the job and its name may not: another rank changes a symbolic link, or
//! exchanges a directory. In: a name that an unrecorded process or thread uses, and the time at
//! which the job began. Out: what has changed since then, of the links and directories on the way
//! and of that to which the name leads.
//!
//! Files that ranks create change the times of their directory as well, both to the same value. A
//! directory that was moved itself has a later time of status change than of modification, until
//! something is created in it: from then on the only trace is that the directory above has changed.
//! The directories above the working directory of the process are not compared: the process is in
//! them.
//!
//! What may never happen: a changed symbolic link is passed over.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::file_identity::{FileIdentity, PATH_BYTES};
use crate::file_metadata::{self, mode_and_identity_at};
use crate::kernel_calls::{HERE, kernel, text};

/// What has changed since the job began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// A symbolic link, or a directory that was moved.
    Component,
    /// The file to which the name leads. It has had this name since the job began.
    Target,
    /// The file to which the name leads, and the directory in which it is: the name may be new.
    Appeared,
    /// The name leads to nothing, and the directory in which it ends has changed.
    Absent,
}

/// What a call asks of that to which a name leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Which file it is. Names in a directory are compared on their own.
    Name,
    /// What the name itself is, as [`Asked::Attributes`]: the last link is not followed.
    Itself,
    /// Which file it is, its rights, and its times, size and number of links as every look at a
    /// file asks for them: of a directory whose times change in every run they do not count.
    Attributes,
    /// These times, or the number of links, and nothing else (statx(2)).
    Times,
    /// The time of the last access, which changes alone.
    AccessTime,
}

/// Number of symbolic links after which the kernel gives up (path_resolution(7)).
const LINKS_MAX: usize = 40;
/// Number of directories above the working directory that are compared.
const LEVELS_MAX: usize = 64;
/// Number of the root directory of the kernel's file systems.
const ROOT_INODE: u64 = 1;

/// A name whose links are followed one by one.
struct NameWalk {
    directory: u64,
    path: [u8; PATH_BYTES],
    length: usize,
    since: i64,
    asked: Asked,
    is_replay: bool,
}

enum WalkStep {
    /// A symbolic link is in these bytes of the path.
    Link(usize, usize),
    End(Option<NameChange>),
}

/// What has changed, since the time `since`, of that to which a name leads. The last link is
/// followed as well, unless it is asked itself. In a replay a directory counts as exchanged where
/// it may be: if an earlier incarnation used the name before the exchange, nothing showed that at
/// the time.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn change_of(
    (directory, path): (u64, u64),
    since: i64,
    asked: Asked,
    is_replay: bool,
) -> Option<NameChange> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let (path, length) = ([0; PATH_BYTES], name.len());
    let mut walk = NameWalk { directory, path, length, since, asked, is_replay };
    walk.path[..PATH_BYTES - 1].get_mut(..name.len())?.copy_from_slice(name);
    for _ in 0..=LINKS_MAX {
        match walk.walk() {
            WalkStep::End(change) => return change,
            // A name that becomes too long is not examined further.
            WalkStep::Link(start, end) => match walk.follow(start, end) {
                Some(()) => (),
                None => return Some(NameChange::Component),
            },
        }
    }
    None
}

impl NameWalk {
    /// Examines the components from the first one on, up to a symbolic link.
    fn walk(&mut self) -> WalkStep {
        let mut end = 0;
        let mut above = None;
        loop {
            let rest = &self.path[end..self.length];
            let start = end + rest.iter().take_while(|byte| **byte == b'/').count();
            let rest = &self.path[start..self.length];
            if rest.is_empty() {
                return WalkStep::End(None);
            }
            end = start + rest.iter().take_while(|byte| **byte != b'/').count();
            let is_last = self.path[end..self.length].iter().all(|byte| *byte == b'/');
            let separator = std::mem::take(&mut self.path[end]);
            let step = self.examine(start..end, is_last, &mut above);
            self.path[end] = separator;
            if let Some(step) = step {
                return step;
            }
        }
    }

    /// Examines the component in these bytes, after which the path has a zero now. `above`: the
    /// directory that contains it, if that is known; on return the component. `None`: the walk goes
    /// on.
    fn examine(
        &self,
        part: Range<usize>,
        is_last: bool,
        above: &mut Option<FileIdentity>,
    ) -> Option<WalkStep> {
        let Some((mode, found)) = mode_and_identity_at(self.place()) else {
            let change = self.has_changed_above(*above).then_some(NameChange::Absent);
            return Some(WalkStep::End(change));
        };
        let above = above.replace(found);
        let has_changed = self.has_changed(&found);
        match mode & libc::S_IFMT {
            libc::S_IFLNK if is_last && self.asked == Asked::Itself => {
                Some(WalkStep::End(has_changed.then_some(NameChange::Target)))
            }
            libc::S_IFLNK if has_changed => Some(WalkStep::End(Some(NameChange::Component))),
            libc::S_IFLNK => Some(WalkStep::Link(part.start, part.end)),
            libc::S_IFDIR if found.inode == ROOT_INODE && self.is_of_kernel() => {
                Some(WalkStep::End(None))
            }
            libc::S_IFDIR if has_changed => {
                let change = self.change_of_directory((mode, &found), part, is_last, above)?;
                let is_asked = is_last && self.asks_for_times();
                let counts = is_asked || !is_above_working_directory(&found);
                counts.then_some(WalkStep::End(Some(change)))
            }
            _ => {
                let was_read = || self.asked == Asked::AccessTime && self.was_accessed();
                let matters = is_last && (has_changed || was_read());
                let change = match has_changed && self.has_changed_above(above) {
                    true => NameChange::Appeared,
                    false => NameChange::Target,
                };
                matters.then_some(WalkStep::End(Some(change)))
            }
        }
    }

    /// What has changed of the directory in these bytes of the path, whose times have.
    fn change_of_directory(
        &self,
        (mode, found): (libc::mode_t, &FileIdentity),
        part: Range<usize>,
        is_last: bool,
        above: Option<FileIdentity>,
    ) -> Option<NameChange> {
        // The times of `/tmp` change in every run, by processes outside the job.
        let is_asked = match self.asked {
            Asked::Name => false,
            Asked::Attributes | Asked::Itself => mode & libc::S_ISVTX == 0,
            Asked::Times | Asked::AccessTime => true,
        };
        match is_last && (is_asked || self.is_new()) {
            _ if self.was_moved(found) => Some(NameChange::Component),
            true if self.is_new() => Some(NameChange::Appeared),
            true => Some(NameChange::Target),
            false => {
                let may_be = self.may_be_exchanged(&self.path[part], above);
                may_be.then_some(NameChange::Component)
            }
        }
    }

    /// Whether the directory at the end of the path was moved, or its rights were changed. The
    /// kernel sets its two times one after the other, so a look in between finds two as well.
    fn was_moved(&self, found: &FileIdentity) -> bool {
        const LOOKS_MAX: usize = 5;
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let mut found = *found;
        for _ in 0..LOOKS_MAX {
            if found.changed <= found.modified {
                return false;
            }
            kernel(libc::SYS_nanosleep, [(&raw const pause).addr() as u64, 0, 0, 0, 0, 0]);
            let Some((_, now)) = mode_and_identity_at(self.place()) else { return true };
            found = now;
        }
        found.changed > found.modified
    }

    fn asks_for_times(&self) -> bool {
        matches!(self.asked, Asked::Times | Asked::AccessTime)
    }

    /// Whether the end of the path has been read since the job began.
    fn was_accessed(&self) -> bool {
        self.about(libc::STATX_ATIME).is_some_and(|about| {
            let (seconds, rest) = (about.stx_atime.tv_sec, about.stx_atime.tv_nsec);
            crate::file_status::nanoseconds(seconds, rest.into()) >= self.since
        })
    }

    fn place(&self) -> (u64, u64) {
        (self.directory, self.path.as_ptr().addr() as u64)
    }

    fn has_changed(&self, identity: &FileIdentity) -> bool {
        identity.modified.max(identity.changed) >= self.since
    }

    /// Whether the directory that contains the component has changed. `None`: the component is the
    /// first one.
    fn has_changed_above(&self, above: Option<FileIdentity>) -> bool {
        let first = || match self.path[0] {
            b'/' => file_metadata::identity_at((HERE, c"/".as_ptr().addr() as u64)),
            _ => file_metadata::identity_of(self.directory),
        };
        let above = above.or_else(|| first().map(|(_, identity)| identity));
        above.is_some_and(|above| self.has_changed(&above))
    }

    /// Whether the directory of this name at the end of the path may be another than when the job
    /// began: a rename also changes the times of the directory above. No rename replaces a mount
    /// point.
    fn may_be_exchanged(&self, name: &[u8], above: Option<FileIdentity>) -> bool {
        self.is_replay
            && !matches!(name, b"." | b"..")
            && self.has_changed_above(above)
            && !self.is_mount_point()
    }

    /// False also if the kernel does not tell (before Linux 5.8).
    fn is_mount_point(&self) -> bool {
        self.about(0)
            .is_some_and(|about| about.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0)
    }

    /// Puts the content of the symbolic link at these bytes of the path in their place. `None`: the
    /// path is too long, or the link is gone.
    fn follow(&mut self, start: usize, end: usize) -> Option<()> {
        let mut path = [0_u8; PATH_BYTES];
        let separator = std::mem::take(&mut self.path[end]);
        let (directory, name) = self.place();
        let room = path.as_mut_ptr().addr() as u64;
        let length =
            kernel(libc::SYS_readlinkat, [directory, name, room, PATH_BYTES as u64 - 1, 0, 0]);
        self.path[end] = separator;
        let length = usize::try_from(length).ok()?;
        let start = if path[0] == b'/' { 0 } else { start };
        path.copy_within(..length, start.min(PATH_BYTES - length));
        path[..start].copy_from_slice(&self.path[..start]);
        let rest = end..self.length;
        let whole = start + length + rest.len();
        if whole >= PATH_BYTES {
            return None;
        }
        path[start + length..whole].copy_from_slice(&self.path[rest]);
        path[whole..].fill(0);
        (self.path, self.length) = (path, whole);
        Some(())
    }

    /// Whether the directory of the path was created since the job began, as far as the file system
    /// says.
    fn is_new(&self) -> bool {
        self.about(libc::STATX_BTIME).is_some_and(|about| {
            let (seconds, rest) = (about.stx_btime.tv_sec, about.stx_btime.tv_nsec);
            let born = crate::file_status::nanoseconds(seconds, rest.into());
            about.stx_mask & libc::STATX_BTIME != 0 && born >= self.since
        })
    }

    /// What statx(2) says of the end of the path.
    fn about(&self, wanted: u32) -> Option<libc::statx> {
        let mut about = MaybeUninit::<libc::statx>::zeroed();
        let (directory, path) = self.place();
        let room = about.as_mut_ptr().addr() as u64;
        let flags = libc::AT_SYMLINK_NOFOLLOW as u64;
        let result = kernel(libc::SYS_statx, [directory, path, flags, wanted.into(), room, 0]);
        // SAFETY: all zeros are a value, and the kernel has written another.
        (result == 0).then(|| unsafe { about.assume_init() })
    }

    /// Whether the kernel makes up the content of the directory (proc(5), sysfs(5)).
    #[cold]
    fn is_of_kernel(&self) -> bool {
        let (directory, path) = self.place();
        let mut about = MaybeUninit::<libc::statfs>::zeroed();
        let room = about.as_mut_ptr().addr() as u64;
        let result = if directory == HERE || self.path[0] == b'/' {
            kernel(libc::SYS_statfs, [path, room, 0, 0, 0, 0])
        } else {
            let flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
            let found = kernel(libc::SYS_openat, [directory, path, flags, 0, 0, 0]);
            let Ok(found) = u64::try_from(found) else { return false };
            let result = kernel(libc::SYS_fstatfs, [found, room, 0, 0, 0, 0]);
            kernel(libc::SYS_close, [found, 0, 0, 0, 0, 0]);
            result
        };
        // SAFETY: all zeros are a value, and the kernel has written another.
        let kind = unsafe { about.assume_init() }.f_type;
        result == 0 && matches!(kind, libc::PROC_SUPER_MAGIC | libc::SYSFS_MAGIC)
    }
}

/// Whether a directory is the working directory, or contains it. Beyond [`LEVELS_MAX`] levels a
/// directory counts as outside.
#[cold]
fn is_above_working_directory(directory: &FileIdentity) -> bool {
    const UP: &[u8; 3] = b"../";
    let mut path = [0; UP.len() * LEVELS_MAX + 2];
    path[0] = b'.';
    let mut below = None;
    for level in 0..=LEVELS_MAX {
        let place = (HERE, path.as_ptr().addr() as u64);
        let Some((_, found)) = file_metadata::identity_at(place) else { return false };
        let found = (found.device, found.inode);
        if found == (directory.device, directory.inode) {
            return true;
        }
        // The root contains itself.
        if below.replace(found) == Some(found) || level == LEVELS_MAX {
            return false;
        }
        path[UP.len() * level..][..UP.len()].copy_from_slice(UP);
    }
    false
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::{Path, PathBuf};
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::change_times::last_tick;

    struct Folder(PathBuf);

    impl Folder {
        /// A folder with old files and directories, and the time after them. The folder above it
        /// stays as it is: the one above that is changed by other tests.
        fn new(name: &str) -> (Folder, i64) {
            let above = std::env::temp_dir().join(format!("lb-way-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&above);
            let place = above.join("within");
            fs::create_dir_all(place.join("old/sub")).unwrap();
            fs::write(place.join("old/sub/file"), "").unwrap();
            fs::write(place.join("old/file"), "").unwrap();
            symlink("old", place.join("link")).unwrap();
            symlink(place.join("link/sub"), place.join("far")).unwrap();
            // Times of files advance by ticks, which a virtual machine under load gets late. A
            // precise time may be later than the tick after it.
            let ticks_later = || {
                for _ in 0..3 {
                    let before = last_tick();
                    while last_tick() == before {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                last_tick()
            };
            let since = ticks_later();
            ticks_later();
            (Folder(place), since)
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.parent().unwrap());
        }
    }

    fn change(path: &Path, since: i64) -> Option<NameChange> {
        change_for(path, since, Asked::Name)
    }

    fn change_for(path: &Path, since: i64, asked: Asked) -> Option<NameChange> {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a C string.
        unsafe { change_of((HERE, path.as_ptr().addr() as u64), since, asked, true) }
    }

    #[test]
    fn links_and_moved_directories_on_the_way_are_found() {
        let (folder, since) = Folder::new("links");
        let change = |name| change(&folder.at(name), since);
        for name in ["old/file", "link/file", "far/file", "link", "far/", "old//sub/../file"] {
            assert_eq!(change(name), None, "{name}");
        }
        fs::write(folder.at("old/new"), "").unwrap();
        for name in ["old/file", "far/file", "link", "old"] {
            assert_eq!(change(name), None, "{name}, whose directory has got a file");
        }
        assert_eq!(change("old/new"), Some(NameChange::Appeared));
        assert_eq!(change("link/new"), Some(NameChange::Appeared));
        fs::rename(folder.at("old"), folder.at("older")).unwrap();
        assert_eq!(change("older/file"), Some(NameChange::Component));
        assert_eq!(change("link/file"), Some(NameChange::Absent), "a link to nothing");
        fs::remove_file(folder.at("link")).unwrap();
        symlink("older", folder.at("link")).unwrap();
        assert_eq!(change("link/file"), Some(NameChange::Component));
        assert_eq!(change("far/file"), Some(NameChange::Component), "the second of two links");
    }

    #[test]
    fn directories_that_are_new_or_missing_are_found() {
        let (folder, since) = Folder::new("new");
        let change = |name| change(&folder.at(name), since);
        assert_eq!(change("old/sub/missing"), None);
        assert_eq!(change("old/sub/missing/more"), None);
        fs::create_dir(folder.at("old/made")).unwrap();
        assert_eq!(change("old/made"), Some(NameChange::Appeared));
        fs::write(folder.at("old/sub/file"), "other").unwrap();
        assert_eq!(change("old/sub/file"), Some(NameChange::Target), "its name is old");
        assert_eq!(change("old/missing"), Some(NameChange::Absent));
        assert_eq!(change("old/missing/more"), Some(NameChange::Absent));
        let others = fs::Permissions::from_mode(0o700);
        fs::set_permissions(folder.at("old/sub"), others).unwrap();
        assert_eq!(change("old/sub/file"), Some(NameChange::Component));
    }

    /// A directory that was exchanged has the same two times as one that got a file, once something
    /// was created in it.
    #[test]
    fn an_exchanged_directory_in_which_something_was_created_is_found() {
        let (folder, since) = Folder::new("exchanged");
        let change = |name| change(&folder.at(name), since);
        fs::write(folder.at("old/sub/new"), "").unwrap();
        assert_eq!(change("old/sub/file"), None, "only the directory itself has changed");
        fs::rename(folder.at("old/sub"), folder.at("old/before")).unwrap();
        fs::rename(folder.at("old/before"), folder.at("old/sub")).unwrap();
        fs::write(folder.at("old/sub/newer"), "").unwrap();
        assert_eq!(change("old/sub/file"), Some(NameChange::Component));
        assert_eq!(change("old/sub/"), Some(NameChange::Component));
        assert_eq!(change("old/sub/../file"), Some(NameChange::Component));
        assert_eq!(change("old/file"), None, "what is beside it");
    }

    #[test]
    fn a_directory_in_which_somebody_creates_files_is_not_taken_for_a_moved_one() {
        let (folder, since) = Folder::new("busy");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    fs::write(folder.at("old/sub/new"), "").unwrap();
                    fs::remove_file(folder.at("old/sub/new")).unwrap();
                }
            });
            let looks = (0..20_000).map(|_| change(&folder.at("old/sub/file"), since));
            let wrong = looks.filter(Option::is_some).count();
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(wrong, 0);
        });
    }

    #[test]
    fn the_times_of_a_directory_are_compared_where_they_are_learned() {
        let (folder, since) = Folder::new("times");
        let change = |name| change_for(&folder.at(name), since, Asked::Attributes);
        for name in ["old", "old/sub", "old/file", "link"] {
            assert_eq!(change(name), None, "{name}");
        }
        fs::write(folder.at("old/new"), "").unwrap();
        assert_eq!(change("old"), Some(NameChange::Target));
        assert_eq!(change("link/"), Some(NameChange::Target), "by a link");
        assert_eq!(change("old/sub"), None, "whose directory has got a file");
        assert_eq!(change("old/file"), None);
        fs::write(folder.at("old/sub/file"), "other").unwrap();
        symlink("old/sub/file", folder.at("another")).unwrap();
        assert_ne!(change("far/file"), None);
        let itself = |name| change_for(&folder.at(name), since, Asked::Itself);
        assert_eq!((itself("far"), itself("link")), (None, None), "the links are old");
        assert_eq!(itself("another"), Some(NameChange::Target));
        assert_ne!(itself("far/file"), None, "links on the way count");
    }

    #[test]
    fn times_that_are_asked_for_alone_count_everywhere() {
        let (folder, since) = Folder::new("alone");
        let change = |name, asked| change_for(&folder.at(name), since, asked);
        fs::set_permissions(folder.at("old"), fs::Permissions::from_mode(0o1777)).unwrap();
        fs::write(folder.at("old/new"), "").unwrap();
        assert_eq!(change("old", Asked::Attributes), None, "a directory like /tmp");
        assert_eq!(change("old", Asked::Times), Some(NameChange::Target));
        assert_eq!(change("old/file", Asked::AccessTime), None);
        // A file system may not note reads (noatime).
        let file = fs::File::open(folder.at("old/file")).unwrap();
        let now = SystemTime::now();
        file.set_times(fs::FileTimes::new().set_accessed(now)).unwrap();
        assert_ne!(change("old/file", Asked::AccessTime), None);
    }

    #[test]
    fn what_the_kernel_makes_up_and_the_working_directory_are_not_compared() {
        let here = std::env::current_dir().unwrap();
        for name in ["/", ".", "/proc/self/status", here.to_str().unwrap()] {
            assert_eq!(change(Path::new(name), 0), None, "{name}");
        }
        // SAFETY: no path.
        assert_eq!(unsafe { change_of((HERE, 0), 0, Asked::Name, true) }, None);
        let long = "a/".repeat(PATH_BYTES);
        assert_eq!(change(Path::new(&long), 0), None);
        let (folder, since) = Folder::new("loop");
        symlink("/proc/self", folder.at("kernel")).unwrap();
        assert_eq!(change(&folder.at("kernel/status"), since), Some(NameChange::Component));
        // The times of the link in proc(5) are those of its first use.
        assert_eq!(change(Path::new("/proc/self/status"), since), None);
        symlink("round", folder.at("round")).unwrap();
        assert_eq!(change(&folder.at("round/file"), i64::MAX), None);
    }
}
