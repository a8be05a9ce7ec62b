//! What a process has that CRIU restores as something else, without an error.
//!
//! An image does not contain the flag EFD_SEMAPHORE of eventfd(2): after a restore, a read takes
//! the whole count instead of 1. The kernel shows the flag since Linux 6.5; on an older one every
//! eventfd counts, once the process has made one with that flag. Nor does an image contain the
//! protection keys of a process (pkeys(7)), so that what they protect could be written, and its
//! restrictions by landlock(7) and PR_SET_MDWE. A periodic timerfd whose expirations the process
//! has not read would be disarmed by a restore.
//!
//! In: the process, which stands still, and what its record says. Out: what it has or uses, as the
//! user reads it. What may never happen: such a process gets an image.

use std::fs;
use std::path::Path;

use landbridge_proto::nondeterminism::{UNSAVED_KEYS, UNSAVED_RESTRICTIONS, UNSAVED_SEMAPHORE};

/// What the process has or uses that no image restores. `unsaved`: what its record says of that.
pub fn unrestorable(pid: u32, unsaved: u64) -> Option<&'static str> {
    if unsaved & UNSAVED_KEYS != 0 {
        return Some("uses protection keys (pkey_alloc)");
    }
    if unsaved & UNSAVED_RESTRICTIONS != 0 {
        return Some("has restricted itself (landlock, PR_SET_MDWE)");
    }
    let has_made_semaphores = unsaved & UNSAVED_SEMAPHORE != 0;
    let folder = Path::new("/proc").join(pid.to_string());
    let open = fs::read_dir(folder.join("fd")).ok()?;
    open.flatten().find_map(|entry| {
        let number = entry.file_name();
        let target = fs::read_link(folder.join("fd").join(&number)).ok()?;
        let information = || fs::read_to_string(folder.join("fdinfo").join(&number)).ok();
        match target.to_str()? {
            "anon_inode:[eventfd]" => shows_semaphore(&information()?)
                .unwrap_or(has_made_semaphores)
                .then_some("has an eventfd with EFD_SEMAPHORE open"),
            "anon_inode:[timerfd]" => shows_unread_period(&information()?)
                .then_some("has a periodic timerfd whose expirations it has not read"),
            _ => None,
        }
    })
}

/// Whether a text of proc_pid_fdinfo(5) is that of a periodic timer that the kernel arms again only
/// when its expirations are read.
fn shows_unread_period(text: &str) -> bool {
    let is_zero = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value.map(|value| value.trim() == "(0, 0)")
    };
    is_zero("it_value:") == Some(true) && is_zero("it_interval:") == Some(false)
}

/// Whether a text of proc_pid_fdinfo(5) is that of a semaphore. `None`: the kernel does not say.
fn shows_semaphore(text: &str) -> Option<bool> {
    let flag = text.lines().find_map(|line| line.strip_prefix("eventfd-semaphore:"))?;
    Some(flag.trim() != "0")
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    fn eventfd(flags: i32) -> OwnedFd {
        // SAFETY: a new descriptor, which belongs to the result.
        unsafe { OwnedFd::from_raw_fd(libc::eventfd(5, flags | libc::EFD_CLOEXEC)) }
    }

    #[test]
    fn only_an_eventfd_that_is_a_semaphore_prevents_an_image() {
        let own = std::process::id();
        let _plain = eventfd(0);
        assert_eq!(unrestorable(own, 0), None);
        let semaphore = eventfd(libc::EFD_SEMAPHORE);
        let text = "has an eventfd with EFD_SEMAPHORE open";
        assert_eq!(unrestorable(own, UNSAVED_SEMAPHORE), Some(text));
        drop(semaphore);
        assert_eq!(unrestorable(own, 0), None);
        assert_eq!(unrestorable(own, UNSAVED_KEYS), Some("uses protection keys (pkey_alloc)"));
        let restricted = Some("has restricted itself (landlock, PR_SET_MDWE)");
        assert_eq!(unrestorable(own, UNSAVED_RESTRICTIONS), restricted);
    }

    #[test]
    fn a_periodic_timer_is_read_before_an_image() {
        // SAFETY: a new descriptor, which belongs to `timer`.
        let timer = unsafe { OwnedFd::from_raw_fd(libc::timerfd_create(libc::CLOCK_MONOTONIC, 0)) };
        let text = || {
            let path = format!("/proc/self/fdinfo/{}", timer.as_raw_fd());
            fs::read_to_string(path).unwrap()
        };
        let arm = |interval| {
            let first = libc::timespec { tv_sec: 0, tv_nsec: 1 };
            let again = libc::timespec { tv_sec: interval, tv_nsec: 0 };
            let times = libc::itimerspec { it_interval: again, it_value: first };
            // SAFETY: a timer of this test.
            unsafe { libc::timerfd_settime(timer.as_raw_fd(), 0, &times, std::ptr::null_mut()) };
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        assert!(!shows_unread_period(&text()), "it is not armed");
        arm(0);
        assert!(!shows_unread_period(&text()), "it expires once");
        arm(60);
        assert!(shows_unread_period(&text()), "{}", text());
        let mut count = [0; 8];
        rustix::io::read(&timer, &mut count).unwrap();
        assert!(!shows_unread_period(&text()), "{}", text());
    }

    #[test]
    fn older_kernels_do_not_say_what_an_eventfd_is() {
        assert_eq!(shows_semaphore("pos:\t0\neventfd-count:    5\neventfd-id: 2\n"), None);
        assert_eq!(shows_semaphore("eventfd-id: 2\neventfd-semaphore: 1\n"), Some(true));
        assert_eq!(shows_semaphore("eventfd-semaphore: 0\n"), Some(false));
    }
}
