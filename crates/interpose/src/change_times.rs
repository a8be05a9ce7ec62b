//! Whether the time of a file's last status change shows each later change.
//!
//! A kernel before Linux 6.13, and many a file system since, notes changes by a clock with steps of
//! 1 to 10 ms (a *tick*): a change within the tick of the one before leaves the time as it is. A
//! file server notes them by a clock of its own, and some file systems have steps of seconds. In:
//! the state of a file that a call is about to change. Out: the time of the last change, or
//! [`UNSURE`] where a change right now could leave it as it is.
//!
//! What may never happen: an effect that has happened counts as not performed because the times are
//! equal.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use libc::{c_int, c_long};

use crate::file_identity::FileIdentity;
use crate::kernel_calls::{HERE, kernel, text};

/// Stands for a time that would not show a later change. No file has this time.
pub const UNSURE: u64 = u64::MAX;

const SECOND: i64 = 1_000_000_000;
/// Longest tick of a kernel, in nanoseconds (`CONFIG_HZ=100`).
const TICK_MAX: i64 = 10_000_000;
/// Largest number of ticks for which [`settled`] waits.
const TICKS_WAITED: u32 = 20;
/// Age of a change, in nanoseconds, from which on no clock gives another change the same time: file
/// servers whose clock differs by less, and file systems with steps of 2 s (FAT).
const AGE_MIN: i64 = 10 * SECOND;

/// Kinds of file systems (`f_type` of statfs(2)) by the clock of this kernel's ticks: ext4, XFS,
/// Btrfs; tmpfs, overlay, ramfs, F2FS, ZFS, bcachefs. The number of tmpfs is also that of the file
/// systems of devices and of a node without disk, whose times are coarse.
const LOCAL_KINDS: [c_long; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x794c_7630,
    0x8584_58f6,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
];
/// Number of the first of these whose times have finer steps where that matters (multigrain
/// timestamps), and the Linux version since which they do.
const PRECISE_KINDS: usize = 3;
const PRECISE_SINCE: (u32, u32) = (6, 13);

/// How a file system notes the time of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum ChangeClock {
    /// No two changes have the same time, if the time was asked in between.
    Precise = 1,
    /// By the ticks of this kernel.
    Ticks = 2,
    /// By the clock of a server, or in unknown steps.
    Other = 3,
}

impl ChangeClock {
    /// Whether a change from now on gets another time than `changed`. `tick` looks for the
    /// time of this kernel's last tick, a system call.
    fn shows_next(self, changed: i64, tick: impl FnOnce() -> i64) -> bool {
        match self {
            ChangeClock::Precise if changed % SECOND != 0 => true,
            // Since Linux 6.13 a time may lie between two ticks: that of the last precise time
            // which any file system has given, and all changes until the next tick may get it.
            ChangeClock::Ticks if changed % SECOND != 0 => changed < tick(),
            _ => tick().saturating_sub(changed) >= AGE_MIN,
        }
    }
}

/// The time of the last change of an open file, or [`UNSURE`].
pub fn mark_open(descriptor: u64, file: FileIdentity) -> u64 {
    mark(&file, || kind_of(descriptor))
}

/// The time of the last change of what a path names, or [`UNSURE`]. `flags`: `O_NOFOLLOW` for the
/// state of a symbolic link itself.
pub fn mark_at(place: (u64, u64), flags: c_int, file: &FileIdentity) -> u64 {
    mark(file, || kind_at(place, flags))
}

/// Whether this kernel alone performs the writes to an open file, so that its count of written
/// bytes is exact: a file server may get a part of a write that is not counted.
pub fn is_local(descriptor: u64, file: &FileIdentity) -> bool {
    clock_of(file.device, || kind_of(descriptor)) != ChangeClock::Other
}

/// `kind` is asked for the kind of the file system once for each device.
fn mark(file: &FileIdentity, kind: impl FnOnce() -> Option<c_long>) -> u64 {
    match clock_of(file.device, kind).shows_next(file.changed, last_tick) {
        true => file.changed as u64,
        false => UNSURE,
    }
}

/// The state of an open file, by `look`, at a time from which on each change gives the file another
/// time: waits for a tick if need be. A file that does not stop changing, and one whose clock has
/// longer steps and that has changed just now, get the time [`UNSURE`] and count as changed later
/// on.
pub fn settled(descriptor: u64, look: impl Fn() -> FileIdentity) -> FileIdentity {
    let mut now = look();
    for _ in 0..TICKS_WAITED {
        if mark_open(descriptor, now) != UNSURE {
            return now;
        }
        let wait = libc::timespec { tv_sec: 0, tv_nsec: TICK_MAX };
        kernel(libc::SYS_nanosleep, [(&raw const wait).addr() as u64, 0, 0, 0, 0, 0]);
        now = look();
    }
    FileIdentity { changed: UNSURE as i64, ..now }
}

/// Kind of the file system of an open file (`f_type` of statfs(2)).
pub fn kind_of(descriptor: u64) -> Option<c_long> {
    let mut about = MaybeUninit::<libc::statfs>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    let is_known = kernel(libc::SYS_fstatfs, [descriptor, room, 0, 0, 0, 0]) == 0;
    // SAFETY: all zeros are a value, and the kernel has written another.
    is_known.then(|| unsafe { about.assume_init() }.f_type)
}

/// Kind of the file system of what a path names, or of the descriptor of the directory if the path
/// is empty or 0.
fn kind_at((directory, path): (u64, u64), flags: c_int) -> Option<c_long> {
    // SAFETY: a path of this crate's callers.
    if unsafe { text(path) }.is_empty() {
        return kind_of(directory);
    }
    let flags = (libc::O_PATH | libc::O_CLOEXEC | flags) as u64;
    let found = kernel(libc::SYS_openat, [directory, path, flags, 0, 0, 0]);
    let found = u64::try_from(found).ok()?;
    let kind = kind_of(found);
    kernel(libc::SYS_close, [found, 0, 0, 0, 0, 0]);
    kind
}

/// Forgets all devices, for a process that goes on under another kernel.
pub fn forget_devices() {
    KNOWN.iter().for_each(|(_, clock)| clock.store(0, Relaxed));
}

/// Devices whose clock is known, and the clock. The recorded thread alone uses them.
static KNOWN: [(AtomicU64, AtomicU8); 8] = [const { (AtomicU64::new(0), AtomicU8::new(0)) }; 8];

fn clock_of(device: u64, kind: impl FnOnce() -> Option<c_long>) -> ChangeClock {
    let known = |clock: u8| {
        let all = [ChangeClock::Precise, ChangeClock::Ticks, ChangeClock::Other];
        all.into_iter().find(|it| *it as u8 == clock)
    };
    let found = KNOWN.iter().find(|(it, _)| it.load(Relaxed) == device);
    if let Some(clock) = found.and_then(|(_, clock)| known(clock.load(Relaxed))) {
        return clock;
    }
    let Some(kind) = kind() else { return ChangeClock::Other };
    let is_tmpfs = kind == libc::TMPFS_MAGIC && !is_of_system(device);
    let clock = match is_precise_kernel() {
        true if is_tmpfs => ChangeClock::Precise,
        is_precise => clock_of_kind(kind, is_precise),
    };
    let (free, its_clock) =
        KNOWN.iter().find(|(_, clock)| clock.load(Relaxed) == 0).unwrap_or(&KNOWN[0]);
    its_clock.store(clock as u8, Relaxed);
    free.store(device, Relaxed);
    clock
}

/// Whether a device is that of `/dev` or of the root, which may have the number of tmpfs and coarse
/// times (devtmpfs, and the root of a node without disk).
fn is_of_system(device: u64) -> bool {
    let device_of = |path: &std::ffi::CStr| {
        let place = (HERE, path.as_ptr().addr() as u64);
        crate::file_status::status(place, 0).map(|found| found.identity.device)
    };
    [c"/dev", c"/"].into_iter().any(|path| device_of(path) == Some(device))
}

fn clock_of_kind(kind: c_long, is_precise_kernel: bool) -> ChangeClock {
    match LOCAL_KINDS.iter().position(|it| *it == kind) {
        Some(at) if at < PRECISE_KINDS && is_precise_kernel => ChangeClock::Precise,
        Some(_) => ChangeClock::Ticks,
        None => ChangeClock::Other,
    }
}

fn is_precise_kernel() -> bool {
    kernel_version() >= PRECISE_SINCE
}

/// Version of this kernel, such as 6 and 1.
pub fn kernel_version() -> (u32, u32) {
    let mut about = MaybeUninit::<libc::utsname>::zeroed();
    kernel(libc::SYS_uname, [about.as_mut_ptr().addr() as u64, 0, 0, 0, 0, 0]);
    // SAFETY: all zeros are a value, and the kernel has written another.
    let release = unsafe { about.assume_init() }.release.map(|byte| byte as u8);
    version_of(&release)
}

/// Version of a kernel by its release, such as `6.1.0-44-amd64`.
fn version_of(release: &[u8]) -> (u32, u32) {
    let mut numbers = release.split(|byte| !byte.is_ascii_digit()).map(|digits| {
        digits
            .iter()
            .fold(0_u32, |all, digit| all.saturating_mul(10).saturating_add((digit - b'0').into()))
    });
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Time of this kernel's last tick, in nanoseconds since 1970.
pub fn last_tick() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let room = (&raw mut now).addr() as u64;
    kernel(libc::SYS_clock_gettime, [libc::CLOCK_REALTIME_COARSE as u64, room, 0, 0, 0, 0]);
    crate::file_status::nanoseconds(now.tv_sec, now.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_unsure_within_its_tick() {
        let tick = 1_000 * SECOND + 4_000_000;
        for (clock, changed, shows) in [
            (ChangeClock::Precise, tick, true),
            (ChangeClock::Ticks, tick, false),
            (ChangeClock::Ticks, tick - 4_000_001, true),
            (ChangeClock::Ticks, tick + 1, false),
            (ChangeClock::Other, tick - SECOND, false),
            (ChangeClock::Other, tick + SECOND, false),
            (ChangeClock::Other, tick - AGE_MIN, true),
            // A file system with steps of seconds.
            (ChangeClock::Precise, 1_000 * SECOND, false),
            (ChangeClock::Ticks, 1_000 * SECOND, false),
            (ChangeClock::Ticks, 980 * SECOND, true),
        ] {
            assert_eq!(clock.shows_next(changed, || tick), shows, "{clock:?} {changed}");
        }
    }

    #[test]
    fn the_clock_follows_from_kernel_and_file_system() {
        assert!(version_of(b"6.13.0-rc1\0\0") >= PRECISE_SINCE);
        assert!(version_of(b"10.0.1") >= PRECISE_SINCE);
        assert!(version_of(b"6.1.0-44-amd64\0") < PRECISE_SINCE);
        assert!(version_of(b"5.15.0") < PRECISE_SINCE);
        assert_eq!(clock_of_kind(0xef53, true), ChangeClock::Precise);
        assert_eq!(clock_of_kind(0xef53, false), ChangeClock::Ticks);
        assert_eq!(clock_of_kind(0x8584_58f6, true), ChangeClock::Ticks, "ramfs");
        assert_eq!(clock_of_kind(0x0102_1994, true), ChangeClock::Ticks, "devtmpfs");
        assert_eq!(clock_of_kind(0x6969, true), ChangeClock::Other, "NFS");
    }

    /// Held by a test that uses the table of devices.
    static DEVICES: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn a_file_that_does_not_stop_changing_counts_as_changed() {
        let _alone = DEVICES.lock();
        forget_devices();
        let nothing = u64::MAX;
        assert_eq!(clock_of(60, || Some(0x8584_58f6)), ChangeClock::Ticks, "ramfs");
        assert_eq!(clock_of(61, || Some(0x6969)), ChangeClock::Other, "NFS");
        let state = |device, changed| FileIdentity { device, changed, ..FileIdentity::NONE };
        let recent = last_tick();
        assert_eq!(settled(nothing, || state(60, recent)).changed, recent, "it stands still");
        assert_eq!(settled(nothing, || state(61, last_tick())).changed as u64, UNSURE);
        let served = settled(nothing, || state(61, recent)).changed;
        assert_eq!(served as u64, UNSURE, "steps of seconds");
    }

    #[test]
    fn a_device_is_asked_once() {
        let _alone = DEVICES.lock();
        let of_device = |device, kind: Option<c_long>| {
            let asked = std::cell::Cell::new(false);
            let clock = clock_of(device, || {
                asked.set(true);
                kind
            });
            (clock, asked.get())
        };
        assert_eq!(of_device(71, None), (ChangeClock::Other, true));
        assert_eq!(of_device(71, Some(0x8584_58f6)), (ChangeClock::Ticks, true));
        assert_eq!(of_device(71, None), (ChangeClock::Ticks, false));
        for device in 80..90 {
            assert_eq!(of_device(device, Some(0x6969)), (ChangeClock::Other, true));
        }
    }
}
