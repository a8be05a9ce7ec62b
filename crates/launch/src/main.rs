//! `landbridge`: starts MPI programs over several clusters as one job.
//!
//! The launcher ([`run`]) is the root of a tree of agents ([`agent`]), one on each host, that start
//! the ranks and are their process manager ([`pmi`]). The pure module [`plan`] decides from a
//! [`topology`] what runs where; the pure module [`watch`] decides what ends a job. No process that
//! an agent has started may outlive the agent, and no agent outlives its connection to the
//! launcher.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | does |
//! |---|---|
//! | `ending` | how a process ended |
//! | `sys` | system calls |
//! | `cli` | the command line |
//! | `ps` | status of jobs |
//! | `pmi` | process management interface: servers, key-value spaces, spawns |
//! | `restart` | whether an ended rank comes back |
//! | `sibling` | files beside this program |
//! | `output_log` | what a rank has printed, compared in a replay |
//! | `local_transport` | who carries messages inside a node |
//! | `control` | messages between launcher and agents |
//! | `mpi` | MPI libraries: which one a program uses, and its environment |
//! | `control_stream` | their streams |
//! | `spawn` | how an agent is started |
//! | `agent_state` | life of an agent, as who started it sees it |
//! | `agent_startup` | waits until agents answer |
//! | `cleanup` | files of killed MPI processes in `/dev/shm` |
//! | `spare` | which spare host is taken |
//! | `limits` | limits of the system, and advice |
//! | `memory_limit` | memory that processes of this host may use |
//! | `folder` | folders that nobody else may change |
//! | `checkpoint` | checkpoint images and where they lie |
//! | `watch` | what ends a job, and who caused it |
//! | `topology` | topology files |
//! | `settings` | settings and where their values come from |
//! | `agent` | the agent of a host |
//! | `own_lines` | lines of the launcher itself between those of the ranks |
//! | `allocation` | allocations of batch systems |
//! | `applications` | several programs in one job |
//! | `env` | `landbridge env` |
//! | `doctor` | `landbridge doctor` |
//! | `local` | chooses who carries messages inside a node |
//! | `message_logs` | chooses who logs messages under `--recover` |
//! | `plan` | what runs where |
//! | `groups` | process groups of a job |
//! | `hosts` | hosts of the command line |
//! | `relay_links` | links between relays, for the user |
//! | `relays` | relays of a job |
//! | `ui` | output of ranks and the status line |
//! | `run` | a job from start to end |
//! | `start` | `landbridge run` |

mod agent;
mod agent_startup;
mod agent_state;
mod allocation;
mod applications;
mod checkpoint;
mod cleanup;
mod cli;
mod control;
mod control_stream;
mod doctor;
mod ending;
mod env;
mod folder;
mod groups;
mod hosts;
mod limits;
mod local;
mod local_transport;
mod memory_limit;
mod message_logs;
mod mpi;
mod output_log;
mod own_lines;
mod plan;
mod pmi;
mod ps;
mod relay_links;
mod relays;
mod restart;
mod run;
mod settings;
mod sibling;
mod spare;
mod spawn;
mod start;
mod sys;
mod topology;
mod ui;
mod watch;

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};

use cli::{Cli, Command};

fn main() -> ExitCode {
    match dispatch(Cli::of_command_line().command) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Err(error) => {
            eprint!("{}", own_lines::own_lines(&limits::advise(format!("{error:#}"))));
            ExitCode::from(1)
        }
    }
}

fn dispatch(command: Command) -> Result<i32> {
    if let Command::Env(_)
    | Command::Settings(_)
    | Command::Doctor(_)
    | Command::Ps(_)
    | Command::Log(_)
    | Command::Checkpoint(_) = command
    {
        sys::end_without_reader();
    }
    match command {
        Command::Run(arguments) => start::run(*arguments),
        Command::Agent => agent::main().map(|()| 0),
        Command::Relay(passed) => become_sibling("landbridge-relay", &passed.arguments),
        Command::Lab(passed) => become_sibling("landbridge-lab", &passed.arguments),
        Command::Env(arguments) => env::run(&arguments).map(|()| 0),
        Command::Settings(arguments) => settings::show::run(&arguments).map(|()| 0),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Log(arguments) => ps::log::run(&arguments),
        Command::Checkpoint(arguments) => ps::checkpoint::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::DoctorPeer { library, pairs } => doctor::peer::run(&library, pairs).map(|()| 0),
        Command::DoctorProbe { library } => doctor::probe::run(&library).map(|()| 0),
    }
}

/// Replaces this process with another Landbridge program (exec).
fn become_sibling(name: &str, arguments: &[std::ffi::OsString]) -> Result<i32> {
    let path = sibling::path(name)?;
    let error = std::process::Command::new(&path).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", path.display()))
}
