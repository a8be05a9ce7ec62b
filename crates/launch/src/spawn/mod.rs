//! Starts an agent on a host, over any kind of connection.
//!
//! The trait [`Spawn`] turns the agent's command on a host into a command to run here, whose stdin
//! and stdout are those of the agent. All secrets go through this stdin, never into an argument
//! list. The command's stderr is for the user to read: see [`command_stderr`].
//!
//! | module | does |
//! |---|---|
//! | `command_stderr` | standard error of a command that leads to a host |
//! | `local` | a host on which this machine can run programs |
//! | `ssh` | a host behind ssh |
//! | `agent_failure` | the text about an agent that has ended |

pub mod agent_failure;
mod command_stderr;
pub mod local;
pub mod ssh;

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::control_stream::ControlStream;
use crate::sys;
use command_stderr::CommandStderr;

/// A method of starting programs on a host.
pub trait Spawn {
    /// The local command that runs `agent` on the host with the name `host`.
    fn command(&self, host: &str, agent: &[String]) -> Vec<String>;
}

/// An agent that this process has started.
pub struct AgentProcess {
    pub stream: ControlStream,
    pub pid: u32,
    stderr: CommandStderr,
}

/// Runs a command made by [`Spawn::command`] in a process group of its own, so that Ctrl-C at the
/// terminal reaches the launcher alone.
pub fn start(command: &[String]) -> Result<AgentProcess> {
    let (program, arguments) = command.split_first().context("an empty command for a host")?;
    let mut process = Command::new(program);
    process.args(arguments).process_group(0);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let parent = std::process::id();
    // The signal is not SIGKILL, because an agent whose parent has died still has to end the
    // processes that it has started.
    // SAFETY: `prepare_child` only makes async-signal-safe calls.
    unsafe { process.pre_exec(move || sys::prepare_child(parent, libc::SIGTERM)) };
    let mut child = process.spawn().with_context(|| format!("cannot run {program}"))?;
    // All three streams were requested as pipes above.
    let input = OwnedFd::from(child.stdout.take().expect("stdout is a pipe"));
    let output = OwnedFd::from(child.stdin.take().expect("stdin is a pipe"));
    let stderr = CommandStderr::listen(child.stderr.take().expect("stderr is a pipe"))?;
    Ok(AgentProcess { stream: ControlStream::to_agent(input, output)?, pid: child.id(), stderr })
}
