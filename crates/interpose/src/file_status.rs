//! What the kernel reports of a file: mode, device, inode, size, and times.
//!
//! In: a descriptor of a directory, and a path. Out: the status, by statx(2) or, where a sandbox
//! denies that, by stat(2) without the time of birth. On a network file system the caller chooses
//! whether the status is fresh or the one that this node has.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use libc::{c_int, mode_t};

use crate::file_identity::FileIdentity;
use crate::kernel_calls::{error, kernel};

const SECOND: i64 = 1_000_000_000;

/// Flag of statx(2) for all looks at attributes now. On a network file system the cache may be
/// old, and a fresh answer may wait until written data has left.
static SYNC: AtomicI32 = AtomicI32::new(libc::AT_STATX_SYNC_AS_STAT);

/// Runs `look` with attributes as the file server has them.
pub fn with_fresh_attributes<R>(look: impl FnOnce() -> R) -> R {
    with_sync(libc::AT_STATX_FORCE_SYNC, look)
}

/// Runs `look` with attributes as this node has them, without a wait for the file server.
pub fn with_cached_attributes<R>(look: impl FnOnce() -> R) -> R {
    with_sync(libc::AT_STATX_DONT_SYNC, look)
}

/// The recorded thread alone looks at attributes this way, within one session at a time.
fn with_sync<R>(flag: c_int, look: impl FnOnce() -> R) -> R {
    let before = SYNC.swap(flag, Relaxed);
    let result = look();
    SYNC.store(before, Relaxed);
    result
}

/// What the kernel reports of a file.
pub struct FileStatus {
    pub mode: mode_t,
    /// Number of the device that a special file stands for.
    pub special_device: libc::dev_t,
    pub identity: FileIdentity,
}

/// Status by statx(2), which alone returns the time of birth. A sandbox may know only the older
/// stat(2), and deny statx(2).
pub fn status((directory, path): (u64, u64), flags: c_int) -> Option<FileStatus> {
    let mut about = MaybeUninit::<libc::statx>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    let wanted = u64::from(libc::STATX_BASIC_STATS | libc::STATX_BTIME);
    let all_flags = (flags | SYNC.load(Relaxed)) as u64;
    let result = kernel(libc::SYS_statx, [directory, path, all_flags, wanted, room, 0]);
    if result == error(libc::ENOSYS) || result == error(libc::EPERM) {
        return status_without_birth((directory, path), flags);
    }
    if result != 0 {
        return None;
    }
    // SAFETY: all zeros are a value, and the kernel has written another.
    let about = unsafe { about.assume_init() };
    let time = |time: libc::statx_timestamp| nanoseconds(time.tv_sec, time.tv_nsec.into());
    let mode = mode_t::from(about.stx_mode);
    // An overlay, whose device has the major number 0, gives a directory another time of birth once
    // something in it is changed. File systems with such a device use no inode twice.
    let is_reliable = mode & libc::S_IFMT != libc::S_IFDIR || about.stx_dev_major != 0;
    let has_birth = about.stx_mask & libc::STATX_BTIME != 0 && is_reliable;
    let identity = FileIdentity {
        device: libc::makedev(about.stx_dev_major, about.stx_dev_minor),
        inode: about.stx_ino,
        size: about.stx_size as i64,
        modified: time(about.stx_mtime),
        changed: time(about.stx_ctime),
        born: if has_birth { time(about.stx_btime) } else { 0 },
    };
    let special_device = libc::makedev(about.stx_rdev_major, about.stx_rdev_minor);
    Some(FileStatus { mode, special_device, identity })
}

pub fn status_without_birth((directory, path): (u64, u64), flags: c_int) -> Option<FileStatus> {
    let mut about = MaybeUninit::<libc::stat>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    if kernel(libc::SYS_newfstatat, [directory, path, room, flags as u64, 0, 0]) != 0 {
        return None;
    }
    // SAFETY: all zeros are a value, and the kernel has written another.
    let about = unsafe { about.assume_init() };
    let identity = FileIdentity {
        device: about.st_dev,
        inode: about.st_ino,
        size: about.st_size,
        modified: nanoseconds(about.st_mtime, about.st_mtime_nsec),
        changed: nanoseconds(about.st_ctime, about.st_ctime_nsec),
        born: 0,
    };
    Some(FileStatus { mode: about.st_mode, special_device: about.st_rdev, identity })
}

/// Nanoseconds since 1970; times before 1677 or after 2262 become the nearest of these.
pub fn nanoseconds(seconds: i64, rest: i64) -> i64 {
    seconds.saturating_mul(SECOND).saturating_add(rest)
}
