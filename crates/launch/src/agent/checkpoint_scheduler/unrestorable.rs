//! What a process has that CRIU restores as something else, without an error.
//!
//! An image does not contain the flag EFD_SEMAPHORE of eventfd(2): after a restore, a read takes
//! the whole count instead of 1. The kernel shows the flag since Linux 6.5; on an older one every
//! eventfd counts, once the process has made one with that flag. Nor does an image contain the
//! protection keys of a process (pkeys(7)): what they protect could be written after a restore.
//!
//! In: the process, which stands still, and what its record says. Out: what it has or uses, as the
//! user reads it. What may never happen: such a process gets an image.

use std::fs;
use std::path::Path;

use landbridge_proto::nondeterminism::{UNSAVED_KEYS, UNSAVED_SEMAPHORE};

/// What the process has or uses that no image restores. `unsaved`: what its record says of that.
pub fn unrestorable(pid: u32, unsaved: u64) -> Option<&'static str> {
    if unsaved & UNSAVED_KEYS != 0 {
        return Some("uses protection keys (pkey_alloc)");
    }
    let has_made_semaphores = unsaved & UNSAVED_SEMAPHORE != 0;
    let folder = Path::new("/proc").join(pid.to_string());
    let open = fs::read_dir(folder.join("fd")).ok()?;
    let is_semaphore = |number: &std::ffi::OsStr| {
        let target = fs::read_link(folder.join("fd").join(number));
        let information = || fs::read_to_string(folder.join("fdinfo").join(number));
        target.is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
            && information().is_ok_and(|text| shows_semaphore(&text).unwrap_or(has_made_semaphores))
    };
    let has_semaphore = open.flatten().any(|entry| is_semaphore(&entry.file_name()));
    has_semaphore.then_some("has an eventfd with EFD_SEMAPHORE open")
}

/// Whether a text of proc_pid_fdinfo(5) is that of a semaphore. `None`: the kernel does not say.
fn shows_semaphore(text: &str) -> Option<bool> {
    let flag = text.lines().find_map(|line| line.strip_prefix("eventfd-semaphore:"))?;
    Some(flag.trim() != "0")
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

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
    }

    #[test]
    fn older_kernels_do_not_say_what_an_eventfd_is() {
        assert_eq!(shows_semaphore("pos:\t0\neventfd-count:    5\neventfd-id: 2\n"), None);
        assert_eq!(shows_semaphore("eventfd-id: 2\neventfd-semaphore: 1\n"), Some(true));
        assert_eq!(shows_semaphore("eventfd-semaphore: 0\n"), Some(false));
    }
}
