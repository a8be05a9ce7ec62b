//! CRIU, as a program: takes an image of a process while that goes on, and makes a process of one.
//!
//! The image's descriptors whose other ends are held elsewhere (the pipes and sockets to the agent) cannot be in it. They are
//! named by their inodes when it is taken, and other ones are handed in under these names when a process is made of it.
//!
//! What CRIU 4.1.1 is particular about: half of a pair of Unix sockets must be declared (`--external unix[INODE]`), pipes need
//! not be; both are handed in with `--inherit-fd`, sockets as `socket:[INODE]`. A restored process has the process id that it had,
//! so it must have been waited for before. It becomes a child of whoever has started CRIU with `--restore-sibling`, which
//! goes with `--restore-detached` only.

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

/// The other ends of what a process has open towards its agent, by the kernel's numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalInodes {
    pub stdin: Option<u64>,
    pub stdout: u64,
    pub stderr: u64,
    pub pmi: u64,
    pub control: u64,
}

/// Descriptors to be handed in for [`ExternalInodes`].
pub struct InheritedFds {
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub pmi: OwnedFd,
    pub control: OwnedFd,
}

impl InheritedFds {
    /// How the kernel numbers them.
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

/// Older ones refuse the vDSO of kernels from 6.16 on.
const VERSION_MIN: u32 = 4;

pub const DUMP_LOG: &str = "dump.log";
pub const RESTORE_LOG: &str = "restore.log";

/// Where `make criu` puts CRIU, below the checkout.
const FETCHED: &str = "build/tools/criu/criu";

/// The program that takes images. `said`: the setting. The default name stands for the first
/// `criu` in the PATH; where that one is missing or too old, for the one that `make criu` has put
/// into the checkout of this launcher.
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

/// Begins to take an image of `pid` and all that it has started.
pub fn dump(tool: &Path, pid: u32, inodes: &ExternalInodes, folder: &Path) -> Result<Child> {
    let mut command = quiet(tool);
    command
        .args(["dump", "--leave-running", "--tree", &pid.to_string(), "--images-dir"])
        .arg(folder);
    command.args(["--log-file", DUMP_LOG, "-v1", "--manage-cgroups=ignore"]);
    for socket in [inodes.pmi, inodes.control] {
        command.args(["--external", &format!("unix[{socket}]")]);
    }
    command.spawn().with_context(|| cannot_run(tool))
}

/// Begins to make a child of this process of an image: it runs once CRIU has ended well. If that fails there may be something of it
/// all the same. To be called by a thread that lives as long as the process: with its parent's thread ends the child.
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
    command.args(["--log-file", RESTORE_LOG, "-v1", "--manage-cgroups=ignore"]);
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
    // SAFETY: only async-signal-safe calls.
    unsafe {
        command.pre_exec(move || numbers.iter().try_for_each(|fd| sys::keep_over_exec(*fd)));
    }
    command.spawn().with_context(|| cannot_run(tool))
}

/// Why it could not.
pub fn restore_error(folder: &Path) -> anyhow::Error {
    let why = last_error(&folder.join(RESTORE_LOG));
    anyhow::anyhow!("CRIU could not make a process of it: {why}")
}

/// Whether it can be run at all.
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

/// Whether the kernel lets it do its work, by its own word.
pub fn works(tool: &Path) -> Result<()> {
    let output = quiet(tool).arg("check").stderr(Stdio::piped()).output();
    let output = output.with_context(|| cannot_run(tool))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let word =
        text.lines().rev().find(|line| line.contains("Error")).unwrap_or("it does not say why");
    bail!("CRIU cannot work here: {word}")
}

/// What CRIU's log says last of errors.
pub fn last_error(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    // It always says that it may not raise its limit of files, where it may not, and goes on.
    let errors = text.lines().filter(|line| line.contains("Error") && !line.contains("rlimit"));
    // The first one is the cause.
    let word = errors.map(|line| line.split_once("Error ").map_or(line, |(_, rest)| rest)).next();
    word.map_or_else(|| format!("its log, {}, says nothing of it", log.display()), str::to_string)
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
        "CRIU cannot be run as {} (install it, `make criu` in a checkout, or say where it is: --set criu=FILE)",
        tool.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

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
        // A tool that the user names is taken, whether it is there or not.
        let named = Path::new("/nowhere/criu");
        assert_eq!(find_with(named, Some(fetched)), named);
        assert_eq!(find_with(default, Some(folder.join("missing"))), default);
        assert_eq!(find_with(default, None), default);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
