//! The memory file of this node's message logs.
//!
//! In: the rights of this user. Out: a file without a name in memory, of huge pages where the
//! kernel has them and this user may make a file system in memory, by an own user namespace if
//! need be. What may never happen: the file has another path than a memory file, because the
//! interposer of a rank records the files of a program, and would take it for one of these.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, SealFlags, ftruncate, openat, unlinkat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// The file, `bytes` long, and whether it has huge pages.
pub fn create(bytes: u64) -> Result<(OwnedFd, bool)> {
    let made = with_huge_pages().or_else(|_| with_huge_pages_in_namespace());
    let has_huge_pages = made.is_ok();
    let file = made.or_else(|_| memory_file())?;
    // Beyond the limit the system would end this process.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes) {
        bail!(
            "message logs need a memory file without a limit of its size: raise the limit \
             (ulimit -f unlimited), or use recover_log=relay"
        );
    }
    ftruncate(&file, bytes).context("no memory file for message logs")?;
    if !has_huge_pages {
        // A rank that shrinks the file would kill others with SIGBUS.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
    }
    Ok((file, has_huge_pages))
}

fn memory_file() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(rustix::fs::memfd_create("landbridge-logs", flags)?)
}

/// A file on a file system in memory of its own, which nobody else sees and which vanishes with the
/// file. New pages of 2 MiB take a tenth of the time of as much in pages of 4 KiB, which is all
/// that the kernel gives to memory files by default. Kernels before 5.2 refuse, and users who may
/// not mount. The function is async-signal-safe.
fn with_huge_pages() -> io::Result<OwnedFd> {
    /// The name by which the interposer knows a memory file.
    const NAME: &CStr = c"memfd:landbridge-logs";
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Pages are huge where a rank asks for them.
    fsconfig_set_string(&context, c"huge", c"advise")?;
    // No limit but `recover_memory`.
    fsconfig_set_string(&context, c"size", c"0")?;
    fsconfig_create(&context)?;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(&mount, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    unlinkat(&mount, NAME, AtFlags::empty())?;
    Ok(file)
}

/// A file as of [`with_huge_pages`], for users who may not mount: a child in a user namespace of
/// its own makes it.
fn with_huge_pages_in_namespace() -> io::Result<OwnedFd> {
    let (own, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let maps = [
        (c"/proc/self/setgroups", "deny".to_string()),
        (c"/proc/self/uid_map", format!("0 {} 1", user.as_raw())),
        (c"/proc/self/gid_map", format!("0 {} 1", group.as_raw())),
    ];
    let mut child = Command::new("true");
    child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: the closure only makes system calls on values that were made before the fork.
    unsafe {
        child.pre_exec(move || {
            enter_user_namespace(&maps)?;
            send(theirs.as_fd(), with_huge_pages()?.as_fd())
        });
    }
    child.status()?;
    receive(own.as_fd())
}

/// Becomes root of a new user namespace. The function is async-signal-safe.
fn enter_user_namespace(maps: &[(&CStr, String)]) -> io::Result<()> {
    // SAFETY: the only thread of this process, and no descriptors are unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)? };
    for (path, text) in maps {
        let file = rustix::fs::open(*path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&file, text.as_bytes())?;
    }
    Ok(())
}

fn send(socket: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(socket, &[io::IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The child has ended, so the file is here or never comes.
fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let room = &mut [io::IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    recvmsg(socket, room, &mut ancillary, flags)?;
    let mut files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    files.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_file_has_the_path_of_a_memory_file() {
        let files = [memory_file(), with_huge_pages(), with_huge_pages_in_namespace()];
        let mut count = 0;
        // Containers and some systems forbid the others.
        for file in files.into_iter().flatten() {
            let path = format!("/proc/self/fd/{}", crate::sys::raw(&file));
            let path = std::fs::read_link(path).unwrap();
            assert_eq!(path.to_str(), Some("/memfd:landbridge-logs (deleted)"));
            ftruncate(&file, 1 << 40).unwrap();
            rustix::io::pwrite(&file, &[7], 1 << 39).unwrap();
            assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks, 8, "one page");
            count += 1;
        }
        assert!(count > 0);
        let (file, _) = create(8192).unwrap();
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 8192);
    }
}
