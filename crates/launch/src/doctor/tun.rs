//! Checks whether `landbridge lab` works for this user: namespaces, mounts inside these namespaces,
//! and network interfaces made through /dev/net/tun. A child that ends at once tries each of them.

use std::ffi::CStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::Finding;
use super::quiet;

const DEVICE: &CStr = c"/dev/net/tun";
/// The ioctl number from linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

/// Tries the namespaces, with and without an interface, and returns the finding.
pub fn check() -> Finding {
    let text = "namespaces and /dev/net/tun: `landbridge lab` works";
    match (attempt(false), attempt(true)) {
        (_, Ok(())) => Finding::good(text),
        (Err(error), _) => refused(&error),
        (Ok(()), Err(error)) => no_device(&error),
    }
}

fn refused(error: &io::Error) -> Finding {
    Finding::notice(
        format!("no namespaces for this user ({error}): `landbridge lab` does not work"),
        "run it as root, in a container with --privileged; or, as root: \
         sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1, and on Ubuntu \
         kernel.apparmor_restrict_unprivileged_userns=0; `landbridge run --clusters 2` needs none",
    )
}

fn no_device(error: &io::Error) -> Finding {
    let advice = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "as root: chmod 666 /dev/net/tun (it lets nobody into networks that are not his own)"
        }
        _ => "as root: modprobe tun; a container needs --device /dev/net/tun",
    };
    Finding::notice(
        format!("no /dev/net/tun for this user ({error}): `landbridge lab` does not work"),
        format!("{advice}; `landbridge run --clusters 2` needs none"),
    )
}

/// Performs the first steps of a lab in a child; with `device`, the child also makes an interface.
fn attempt(device: bool) -> io::Result<()> {
    // SAFETY: these calls only return ids.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let maps = [
        (c"/proc/self/setgroups", "deny".to_string()),
        (c"/proc/self/uid_map", format!("0 {uid} 1")),
        (c"/proc/self/gid_map", format!("0 {gid} 1")),
    ];
    let mut command = quiet(Command::new("true"));
    // SAFETY: the closure only makes system calls on values that were made before the fork.
    unsafe {
        command.pre_exec(move || {
            enter(&maps)?;
            if device { make_interface() } else { Ok(()) }
        });
    }
    command.status().map(drop)
}

/// Enters new namespaces. The function is async-signal-safe.
fn enter(maps: &[(&CStr, String)]) -> io::Result<()> {
    // SAFETY: these system calls take only flags and C strings.
    unsafe {
        if libc::unshare(libc::CLONE_NEWPID) != 0 {
            check_code(libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID))?;
            maps.iter().try_for_each(|(path, text)| write(path, text.as_bytes()))?;
        }
        let flags =
            libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
        check_code(libc::unshare(flags))?;
        let (none, private) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
        check_code(libc::mount(none, c"/".as_ptr(), none, private, none.cast()))?;
        let shared = (c"lab".as_ptr(), c"/dev/shm".as_ptr(), c"tmpfs".as_ptr());
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        check_code(libc::mount(shared.0, shared.1, shared.2, flags, none.cast()))
    }
}

/// Writes `text` to the file at `path`. The function is async-signal-safe.
fn write(path: &CStr, text: &[u8]) -> io::Result<()> {
    // SAFETY: `path` is a C string and `text` a valid slice; the descriptor is closed when the
    // child ends.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        check_code(fd)?;
        check_code(if libc::write(fd, text.as_ptr().cast(), text.len()) < 0 { -1 } else { 0 })
    }
}

/// Makes an interface; the kernel removes the interface when the descriptor is closed at the
/// child's exec. The function is async-signal-safe.
fn make_interface() -> io::Result<()> {
    // SAFETY: an ifreq is plain data; the request lives during the call.
    unsafe {
        let fd = libc::open(DEVICE.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        check_code(fd)?;
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
        check_code(libc::ioctl(fd, TUNSETIFF, &raw mut request))
    }
}

fn check_code(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::Grade;
    use super::*;

    #[test]
    fn what_is_missing_is_reported_with_its_reason() {
        for (code, advice) in [(libc::EACCES, "chmod 666"), (libc::ENOENT, "modprobe tun")] {
            let finding = no_device(&io::Error::from_raw_os_error(code));
            assert_eq!(finding.grade, Grade::Notice);
            assert!(finding.advice.as_ref().is_some_and(|text| text.contains(advice)));
        }
        assert!(refused(&io::Error::from_raw_os_error(libc::EPERM)).text.contains("not permitted"));
    }

    #[test]
    fn a_lab_that_works_needs_namespaces_that_work() {
        let (without, with) = (attempt(false), attempt(true));
        assert!(without.is_ok() || with.is_err(), "{without:?} {with:?}");
    }
}
