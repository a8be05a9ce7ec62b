//! Namespaces: made, bound to files inside the lab, and entered.
//!
//! A machine of the lab is a network namespace and a UTS namespace (its hostname). Both are
//! bind-mounted on files in the lab's directory. This directory is a tmpfs in the lab's own mount
//! namespace, so processes outside of the lab never see these mounts, and the mounts vanish with
//! the last process of the lab.

use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, bail};

use super::topology::namespace_dir;

/// Directory that is mounted again inside a lab, because files that programs leave there must
/// vanish with the lab.
const SHARED_MEMORY_DIR: &str = "/dev/shm";

/// The lab's directory as programs in the lab see it.
pub const LAB_DIR: &str = "/dev/shm/lab";

/// A resolver address without a server, which refuses at once: a name that is not in the lab's
/// hosts file must not delay a program by the seconds of a resolver timeout.
const RESOLVER: &str = "nameserver 127.0.0.1\n";

/// Handles of a machine's namespaces.
pub struct Machine {
    net: OwnedFd,
    uts: OwnedFd,
}

/// Advice for the case that the kernel refuses namespaces.
pub const NAMESPACES_REFUSED: &str = "\
    the kernel refuses namespaces to this user. Either run as root (in a container: with \
    --privileged), or allow unprivileged user namespaces: \
    `sudo sysctl user.max_user_namespaces=10000`; on Debian kernels before 5.10 also \
    `sudo sysctl kernel.unprivileged_userns_clone=1`; on Ubuntu 23.10 and later also \
    `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`";

/// Prepares the calling, single-threaded process so that its next child is the init of a new PID
/// namespace. If the process has no privilege to do so, it first enters a user namespace in which
/// this user is root.
pub fn prepare_pid_namespace() -> anyhow::Result<()> {
    if unshare(libc::CLONE_NEWPID).is_ok() {
        return Ok(());
    }
    // SAFETY: these calls only return the caller's ids.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID).context(NAMESPACES_REFUSED)?;
    fs::write("/proc/self/setgroups", "deny").context(NAMESPACES_REFUSED)?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).context(NAMESPACES_REFUSED)?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).context(NAMESPACES_REFUSED)
}

/// Gives the calling process, which is the init of its PID namespace, its own network, mounts,
/// hostname and System V IPC, and makes the lab's directory.
pub fn enter_lab(lab_name: &str, hosts_file: &str) -> anyhow::Result<()> {
    let flags = libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    unshare(flags).context(NAMESPACES_REFUSED)?;
    mount("none", "/", None, libc::MS_REC | libc::MS_PRIVATE).context(NAMESPACES_REFUSED)?;
    // Some containers forbid this mount. Programs then see the processes outside of the lab, which
    // does no harm: a lab finds its namespaces by file, not by process.
    let _ =
        mount("proc", "/proc", Some("proc"), libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC);
    mount("lab", SHARED_MEMORY_DIR, Some("tmpfs"), libc::MS_NOSUID | libc::MS_NODEV)
        .context("cannot mount a tmpfs on /dev/shm inside the lab")?;
    fs::create_dir_all(Path::new(LAB_DIR).join("ns"))?;
    for (name, text) in [("hosts", hosts_file), ("resolv.conf", RESOLVER)] {
        let path = Path::new(LAB_DIR).join(name);
        fs::write(&path, text)?;
        // The mount is only for convenience: without it programs cannot resolve names of machines.
        let _ = mount(&path, Path::new("/etc").join(name), None, libc::MS_BIND);
    }
    rustix::system::sethostname(lab_name.as_bytes())?;
    Ok(())
}

impl Machine {
    /// Makes the namespaces of a machine and their files.
    pub fn create(name: &str) -> anyhow::Result<Machine> {
        let dir = namespace_dir(Path::new(LAB_DIR), name);
        fs::create_dir_all(&dir)?;
        let made = on_own_thread(|| -> anyhow::Result<()> {
            unshare(libc::CLONE_NEWNET | libc::CLONE_NEWUTS)?;
            rustix::system::sethostname(name.as_bytes())?;
            for kind in ["net", "uts"] {
                let file = dir.join(kind);
                fs::write(&file, "")?;
                let own = PathBuf::from(format!("/proc/self/task/{}/ns/{kind}", thread_id()));
                mount(&own, &file, None, libc::MS_BIND)?;
            }
            Ok(())
        });
        made.with_context(|| format!("cannot make the namespaces of `{name}`"))?;
        Machine::open(name)
    }

    /// Opens an existing machine of the lab that contains the calling process.
    pub fn open(name: &str) -> anyhow::Result<Machine> {
        let dir = namespace_dir(Path::new(LAB_DIR), name);
        let open = |kind| -> anyhow::Result<OwnedFd> {
            let file = fs::File::open(dir.join(kind));
            let file = file.with_context(|| format!("no machine `{name}` in {}", dir.display()))?;
            Ok(file.into())
        };
        Ok(Machine { net: open("net")?, uts: open("uts")? })
    }

    /// A second handle of the same namespaces.
    pub fn try_clone(&self) -> io::Result<Machine> {
        Ok(Machine { net: self.net.try_clone()?, uts: self.uts.try_clone()? })
    }

    /// Runs `work` on a thread inside the machine. Processes that `work` starts are inside the
    /// machine, too.
    pub fn run<T: Send>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        on_own_thread(|| {
            self.enter()?;
            work()
        })
    }

    /// Device and inode of the network namespace, which identify it.
    pub fn network_id(&self) -> io::Result<(u64, u64)> {
        let found = rustix::fs::fstat(&self.net)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Moves the calling thread into the machine. The function is safe between fork and exec.
    pub fn enter(&self) -> io::Result<()> {
        for (fd, kind) in [(&self.net, libc::CLONE_NEWNET), (&self.uts, libc::CLONE_NEWUTS)] {
            // SAFETY: the call takes an open descriptor and a number.
            if unsafe { libc::setns(fd.as_raw_fd(), kind) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

/// Runs a program of the system with `input` on its standard input; its standard error becomes the
/// text of an error.
pub fn run_tool(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{program}`: {}", how_to_install(program)))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that stops reading prints the reason on its standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!(
            "`{program} {}` failed: {}\ninput was:\n{input}",
            arguments.join(" "),
            complaint.trim()
        );
    }
    Ok(())
}

/// Returns an error that names the first program that a lab needs and this machine lacks.
pub fn check_tools() -> anyhow::Result<()> {
    for program in ["ip", "nft", "nsenter"] {
        let found = std::env::var_os("PATH").is_some_and(|path| {
            std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
        });
        if !found {
            bail!("`{program}` is not in PATH: {}", how_to_install(program));
        }
    }
    Ok(())
}

fn how_to_install(program: &str) -> String {
    let package = match program {
        "ip" => "iproute2",
        "nft" => "nftables",
        "nsenter" => "util-linux",
        other => other,
    };
    format!("install it with `sudo apt install {package}` (or add /usr/sbin to PATH)")
}

fn on_own_thread<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the call takes a number and affects the calling thread only.
    if unsafe { libc::unshare(flags) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn mount(
    source: impl AsRef<Path>,
    target: impl AsRef<Path>,
    kind: Option<&str>,
    flags: libc::c_ulong,
) -> io::Result<()> {
    let source = CString::new(source.as_ref().as_os_str().as_bytes())?;
    let target = CString::new(target.as_ref().as_os_str().as_bytes())?;
    let kind = CString::new(kind.unwrap_or("none"))?;
    // SAFETY: the call takes three C strings that live during the call, a number, and no data.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
