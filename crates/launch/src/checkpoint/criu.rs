//! Runs the program CRIU: takes an image of a running process, and restores a process from an
//! image.
//!
//! An image cannot hold descriptors whose other ends other processes hold (the pipes and sockets to
//! the agent). The agent names these descriptors by their inodes when CRIU takes the image, and
//! passes other descriptors under the same names when CRIU restores a process.
//!
//! CRIU 4.1.1 has these rules: one half of a pair of Unix sockets must be declared (`--external
//! unix[INODE]`), pipes need not be; both are passed with `--inherit-fd`, sockets as
//! `socket:[INODE]`. A restored process has its old process id, so the old process must have been
//! reaped. With `--restore-sibling`, which requires `--restore-detached`, the restored process
//! becomes a child of the process that has started CRIU.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use landbridge_proto::setting::CRIU;
use serde::{Deserialize, Serialize};

use crate::sibling;
use crate::sys;

/// Inodes of the descriptors of a process whose other ends its agent holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalInodes {
    pub stdin: Option<u64>,
    pub stdout: u64,
    pub stderr: u64,
    pub pmi: u64,
    pub control: u64,
}

/// Descriptors that a restored process gets in place of [`ExternalInodes`].
pub struct InheritedFds {
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub pmi: OwnedFd,
    pub control: OwnedFd,
}

impl InheritedFds {
    /// The inodes of these descriptors.
    pub fn inodes(&self) -> io::Result<ExternalInodes> {
        Ok(ExternalInodes {
            stdin: self.stdin.as_ref().map(inode).transpose()?,
            stdout: inode(&self.stdout)?,
            stderr: inode(&self.stderr)?,
            pmi: inode(&self.pmi)?,
            control: inode(&self.control)?,
        })
    }
}

/// Oldest usable major version: older ones refuse the vDSO of Linux 6.16 and later.
const VERSION_MIN: u32 = 4;

/// Part of the line of CRIU that names the capabilities that are missing.
const MISSING_PRIVILEGE: &str = "needs to have";

pub const DUMP_LOG: &str = "dump.log";
pub const RESTORE_LOG: &str = "restore.log";

/// Where `make criu` installs CRIU, below the checkout.
const FETCHED: &str = "build/tools/criu/criu";

/// Path of CRIU. `said`: the setting. The default name stands for the first `criu` in PATH; if that
/// is missing or too old, for the one that `make criu` has installed in the checkout of this
/// launcher.
pub fn find(said: &Path) -> PathBuf {
    find_with(said, sibling::checkout().map(|root| root.join(FETCHED)))
}

fn find_with(said: &Path, fetched: Option<PathBuf>) -> PathBuf {
    let fetched = fetched.filter(|tool| said == Path::new(CRIU.default) && tool.is_file());
    match fetched {
        Some(tool) if check(said).is_err() => tool,
        _ => said.to_path_buf(),
    }
}

pub fn inode(fd: &impl AsFd) -> io::Result<u64> {
    Ok(File::from(fd.as_fd().try_clone_to_owned()?).metadata()?.ino())
}

/// Starts to take an image of `pid` and its descendants.
pub fn dump(tool: &Path, pid: u32, inodes: &ExternalInodes, folder: &Path) -> Result<Child> {
    let mut command = quiet(tool);
    command
        .args(["dump", "--leave-running", "--tree", &pid.to_string(), "--images-dir"])
        .arg(folder);
    command.args(["--log-file", DUMP_LOG, "-v1", "--manage-cgroups=ignore"]).args(rights());
    for socket in [inodes.pmi, inodes.control] {
        command.args(["--external", &format!("unix[{socket}]")]);
    }
    command.spawn().with_context(|| cannot_run(tool))
}

/// Starts to restore a process from an image as a child of this process; the restored process runs
/// once CRIU has ended with exit code 0. On failure parts of the process may exist all the same.
/// The calling thread must live as long as the restored process, because the child ends with its
/// parent's thread.
pub fn restore(
    tool: &Path,
    folder: &Path,
    inodes: &ExternalInodes,
    inherited: &InheritedFds,
) -> Result<Child> {
    let mut command = quiet(tool);
    command
        .args(["restore", "--restore-detached", "--restore-sibling", "--images-dir"])
        .arg(folder);
    command.args(["--log-file", RESTORE_LOG, "-v1", "--manage-cgroups=ignore"]).args(rights());
    let mut inherit = |fd: BorrowedFd<'_>, kind: &str, inode: u64| {
        command.args(["--inherit-fd", &format!("fd[{}]:{kind}:[{inode}]", sys::raw(&fd))]);
    };
    inherit(inherited.stdout.as_fd(), "pipe", inodes.stdout);
    inherit(inherited.stderr.as_fd(), "pipe", inodes.stderr);
    inherit(inherited.pmi.as_fd(), "socket", inodes.pmi);
    inherit(inherited.control.as_fd(), "socket", inodes.control);
    if let (Some(stdin), Some(inode)) = (&inherited.stdin, inodes.stdin) {
        inherit(stdin.as_fd(), "pipe", inode);
    }
    let all = [&inherited.stdout, &inherited.stderr, &inherited.pmi, &inherited.control];
    let numbers: Vec<_> = all.into_iter().chain(&inherited.stdin).map(sys::raw).collect();
    // The restored process keeps the place at which CRIU's own mappings began, and new mappings
    // of the program are to lie where they lay before.
    // SAFETY: the closure makes only async-signal-safe calls.
    unsafe {
        command.pre_exec(move || {
            sys::fix_addresses()?;
            numbers.iter().try_for_each(|fd| sys::keep_over_exec(*fd))
        });
    }
    command.spawn().with_context(|| cannot_run(tool))
}

/// Why a restore from this folder has failed, by CRIU's log.
pub fn restore_error(folder: &Path) -> anyhow::Error {
    let why = last_error(&folder.join(RESTORE_LOG));
    anyhow::anyhow!("CRIU could not make a process of it: {why}")
}

/// Checks whether CRIU can be run and is of a usable version.
pub fn check(tool: &Path) -> Result<()> {
    let output = quiet(tool).arg("--version").stdout(Stdio::piped()).output();
    let output = output.with_context(|| cannot_run(tool))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("Version: "));
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match (version, major) {
        (_, Some(VERSION_MIN..)) => Ok(()),
        (Some(version), _) => {
            bail!("{} is CRIU {version}, and {VERSION_MIN} is needed", tool.display())
        }
        _ => bail!("{} does not say that it is CRIU", tool.display()),
    }
}

/// Checks whether this user has the privileges for CRIU and whether the kernel supports CRIU, by
/// `criu check`.
pub fn works(tool: &Path) -> Result<()> {
    let mut command = quiet(tool);
    command.arg("check").args(rights()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = command.output().with_context(|| cannot_run(tool))?;
    if output.status.success() {
        if !rustix::process::geteuid().is_root() {
            let read = |path| std::fs::read_to_string(path).unwrap_or_default();
            check_bounding_set(&read("/proc/self/status"), &read("/proc/sys/kernel/cap_last_cap"))?;
        }
        return Ok(());
    }
    // CRIU writes errors to standard error, but the privileges that are missing to standard output.
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    Err(refusal(&said.join("\n")))
}

/// Checks whether a user other than root can restore processes, which `criu check` does not do: a
/// restored process drops the capabilities that its bounding set lacks, which needs SETPCAP even if
/// its parent's set lacks them already. `status` is the text of `/proc/self/status`;
/// `last_capability` holds the number of the kernel's last capability.
fn check_bounding_set(status: &str, last_capability: &str) -> Result<()> {
    const SETPCAP: u64 = 1 << 8;
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let last = last_capability.trim().parse::<u32>().ok().filter(|last| *last < 63);
    let (Some(effective), Some(bounding), Some(last)) = (set("CapEff:"), set("CapBnd:"), last)
    else {
        return Ok(());
    };
    let all = (1 << (last + 1)) - 1;
    if bounding & all != all && effective & SETPCAP == 0 {
        bail!(
            "CRIU needs root, or also the capability SETPCAP, where the bounding set of \
             capabilities is not full (as in a container)"
        );
    }
    Ok(())
}

/// The reason in the output of a `criu check` that has failed.
fn refusal(said: &str) -> anyhow::Error {
    if said.contains(MISSING_PRIVILEGE) {
        return anyhow::anyhow!(
            "CRIU needs root, or the capabilities CHECKPOINT_RESTORE and SYS_PTRACE"
        );
    }
    let lines = || said.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let word = lines().find(|line| line.contains("Error")).or_else(|| lines().next());
    anyhow::anyhow!("CRIU cannot work here: {}", word.unwrap_or("it does not say why"))
}

/// The first error in a log of CRIU.
pub fn last_error(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    // CRIU always logs an error if it may not raise its limit of open files, and continues.
    let errors = text.lines().filter(|line| line.contains("Error") && !line.contains("rlimit"));
    // The first error is the cause.
    let word = errors.map(|line| line.split_once("Error ").map_or(line, |(_, rest)| rest)).next();
    word.map_or_else(|| format!("its log, {}, says nothing of it", log.display()), str::to_string)
}

/// The option without which CRIU refuses a user who is not root but has the capabilities.
fn rights() -> &'static [&'static str] {
    if rustix::process::geteuid().is_root() { &[] } else { &["--unprivileged"] }
}

fn quiet(tool: &Path) -> Command {
    let mut command = Command::new(tool);
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn cannot_run(tool: &Path) -> String {
    format!(
        "CRIU cannot be run as {} (install it, `make criu` in a checkout, or say where it is: \
         --set criu=FILE)",
        tool.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_criu_says_of_missing_privileges_is_understood() {
        let said = "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE \
                    capability: \nsetcap cap_checkpoint_restore+eip /usr/sbin/criu\n\n";
        let why = refusal(said).to_string();
        assert_eq!(why, "CRIU needs root, or the capabilities CHECKPOINT_RESTORE and SYS_PTRACE");
        let said =
            "Warn  (criu/kerndat.c:1195): no place\nError (criu/cr-check.c:9): no memfd\nbad\n";
        let why = refusal(said).to_string();
        assert_eq!(why, "CRIU cannot work here: Error (criu/cr-check.c:9): no memfd");
        assert_eq!(refusal("one\nlast\n\n").to_string(), "CRIU cannot work here: last");
        assert_eq!(refusal("\n").to_string(), "CRIU cannot work here: it does not say why");
    }

    #[test]
    fn a_user_who_cannot_restore_processes_takes_no_checkpoints() {
        let check = |effective: u64, bounding: u64| {
            let status = format!("CapEff:\t{effective:016x}\nCapBnd:\t{bounding:016x}\n");
            check_bounding_set(&status, "40\n").map_err(|error| error.to_string())
        };
        let (full, two): (u64, u64) = ((1 << 41) - 1, 1 << 40 | 1 << 19);
        assert_eq!(check(two, full), Ok(()));
        assert_eq!(check(two | 1 << 8, full & !(1 << 24)), Ok(()));
        let why = check(two, full & !(1 << 24)).unwrap_err();
        assert!(why.contains("also the capability SETPCAP"), "{why}");
        assert!(check_bounding_set("", "").is_ok(), "a kernel that says nothing is believed");
    }

    #[test]
    fn both_outputs_of_the_check_are_read() {
        let name = format!("lb-criu-check-{}", std::process::id());
        let tool = std::env::temp_dir().join(name);
        std::fs::write(&tool, "#!/bin/sh\necho CRIU needs to have more\nexit 1\n").unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        let why = works(&tool).unwrap_err().to_string();
        assert!(why.starts_with("CRIU needs root"), "{why}");
        std::fs::remove_file(tool).unwrap();
    }

    #[test]
    fn the_criu_of_the_checkout_stands_in_for_one_that_is_missing() {
        let name = format!("lb-criu-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let fetched = folder.join("criu");
        std::fs::write(&fetched, "#!/bin/sh\necho Version: 4.1.1\n").unwrap();
        std::fs::set_permissions(&fetched, std::fs::Permissions::from_mode(0o755)).unwrap();
        let default = Path::new(CRIU.default);
        if check(default).is_err() {
            assert_eq!(find_with(default, Some(fetched.clone())), fetched);
            assert!(check(&fetched).is_ok());
        }
        // A tool that the user names is used, whether it exists or not.
        let named = Path::new("/nowhere/criu");
        assert_eq!(find_with(named, Some(fetched)), named);
        assert_eq!(find_with(default, Some(folder.join("missing"))), default);
        assert_eq!(find_with(default, None), default);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
