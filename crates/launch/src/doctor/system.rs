//! Checks permissions and limits of the kernel on this machine.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Resource, getrlimit};

use super::{Finding, quiet, tun};
use crate::checkpoint::criu;

/// Number of ranks on a node that a job should be able to have without reaching a limit.
const RANKS_TO_EXPECT: u64 = 64;
/// Descriptors that a rank may need: connections to peers, files, libraries.
const FILES_PER_RANK: u64 = 16;
/// Bytes of shared memory that a rank may need for its rings and its MPI library.
const SHARED_BYTES_PER_RANK: u64 = 4 << 20;

/// Runs the checks. `criu` is the program that takes checkpoints of ranks.
pub fn check(criu: &Path) -> Vec<Finding> {
    vec![
        check_cores(),
        check_shared_memory(),
        check_single_copy(),
        tun::check(),
        check_open_files(),
        check_locked_memory(),
        check_ssh(),
        check_criu(criu),
    ]
}

fn check_cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Finding::good(format!("{cores} cores for this process"))
}

fn check_shared_memory() -> Finding {
    let Ok(stat) = rustix::fs::statvfs("/dev/shm") else {
        let advice = "mount it: mount -t tmpfs tmpfs /dev/shm";
        return Finding::bad("no /dev/shm: no shared memory between ranks of a node", advice);
    };
    let free = stat.f_bavail * stat.f_frsize;
    let text = format!("/dev/shm: {} MiB free", free >> 20);
    if free < RANKS_TO_EXPECT * SHARED_BYTES_PER_RANK {
        let advice = "in a container, start it with --shm-size=1g; else remount it larger";
        return Finding::notice(text, advice);
    }
    Finding::good(text)
}

/// Whether one process may read the memory of a sibling process.
fn check_single_copy() -> Finding {
    let text = "single-copy between ranks of a node (process_vm_readv)";
    let advice = || {
        let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
        match scope.as_deref().map(str::trim) {
            Ok("0") | Err(_) => "a container needs the capability SYS_PTRACE for it; without it, \
                                 large messages on a node are copied twice"
                .to_string(),
            Ok(scope) => format!(
                "kernel.yama.ptrace_scope is {scope}; `sysctl kernel.yama.ptrace_scope=0` allows \
                 it; without it, large messages on a node are copied twice"
            ),
        }
    };
    match reads_sibling() {
        Some(true) => Finding::good(text),
        Some(false) => Finding::notice(format!("no {text}"), advice()),
        None => Finding::notice(format!("{text} could not be tried"), "run doctor again"),
    }
}

/// Starts two siblings: one sleeps, the other tries to read four bytes of the first one's memory.
fn reads_sibling() -> Option<bool> {
    let sleeper = Killed(quiet(Command::new("sleep")).arg("60").spawn().ok()?);
    let pid = i32::try_from(sleeper.0.id()).ok()?;
    let mut reader = quiet(Command::new("true"));
    // SAFETY: the closure only makes async-signal-safe calls on values that were made before the
    // fork.
    unsafe {
        reader.pre_exec(move || {
            let mut bytes = [0u8; 4];
            let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            // No process maps this address: EFAULT means that the access is allowed, EPERM that it
            // is not.
            let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(8), iov_len: 4 };
            libc::process_vm_readv(pid, &local, 1, &remote, 1, 0);
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EFAULT) { Ok(()) } else { Err(error) }
        });
    }
    match reader.status() {
        Ok(_) => Some(true),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Some(false),
        Err(_) => None,
    }
}

/// A child that is killed when its owner is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // A child that has ended by itself needs no signal.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn check_open_files() -> Finding {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let text = format!("open files: {}", number(limit));
    if limit < RANKS_TO_EXPECT * FILES_PER_RANK {
        return Finding::notice(text, "ulimit -n 65536, for jobs and relays with many ranks");
    }
    Finding::good(text)
}

fn check_locked_memory() -> Finding {
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let shown = if limit == u64::MAX { number(limit) } else { format!("{} KiB", limit >> 10) };
    Finding::good(format!("locked memory: {shown} (none is needed)"))
}

fn number(limit: u64) -> String {
    if limit == u64::MAX { "no limit".to_string() } else { limit.to_string() }
}

fn check_ssh() -> Finding {
    let output = Command::new("ssh").arg("-V").stdin(Stdio::null()).output();
    match output {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_string();
            Finding::good(format!("ssh: {text}"))
        }
        Err(_) => {
            Finding::notice("no ssh: jobs run on this machine only", "apt install openssh-client")
        }
    }
}

/// Whether checkpoints of ranks can be taken. CRIU itself checks whether the kernel supports it.
fn check_criu(said: &Path) -> Finding {
    let tool = &criu::find(said);
    let advice = "checkpoints of --recover need it (Debian 13's is new enough, in a checkout: make \
                  criu); without them a killed rank replays from the beginning of the program";
    if let Err(error) = criu::check(tool) {
        return Finding::notice(format!("no checkpoints: {error:#}"), advice);
    }
    match criu::works(tool) {
        Ok(()) => Finding::good(format!("CRIU ({}): ranks can have checkpoints", tool.display())),
        Err(error) => Finding::notice(
            format!("no checkpoints: {error:#}"),
            format!(
                "see why: {} check; without checkpoints a killed rank replays from the beginning \
                 of the program",
                tool.display()
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_child_may_be_read_by_a_sibling_or_not_but_the_question_is_answered() {
        assert!(reads_sibling().is_some());
    }
}
