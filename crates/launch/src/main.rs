//! `landbridge`: starts MPI programs over several clusters as one job.

mod agent;
mod cleanup;
mod control;
mod link;
mod mpi;
mod plan;
mod pmi;
mod relays;
mod run;
mod sibling;
mod spawn;
mod sys;
mod ui;
mod watch;

use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "landbridge", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program on several ranks
    Run(RunArguments),
    /// The agent of one host; started by `landbridge run`
    #[command(hide = true)]
    Agent,
}

#[derive(clap::Args)]
struct RunArguments {
    /// Number of ranks
    #[arg(short = 'n', long = "np", value_name = "N")]
    ranks: u32,
    /// Label every line with its rank
    #[arg(short = 'l', long)]
    label: bool,
    #[arg(short = 'v', long)]
    verbose: bool,
    /// End the job after this many seconds
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Use another libfabric provider, for comparison
    #[arg(long, hide = true)]
    provider: Option<String>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

fn main() -> std::process::ExitCode {
    let result = match Cli::parse().command {
        Command::Run(arguments) => run(arguments),
        Command::Agent => agent::main().map(|()| 0),
    };
    match result {
        // Every exit code of a job is below 256: watch.rs sees to it.
        Ok(code) => std::process::ExitCode::from(code as u8),
        Err(error) => {
            eprintln!("landbridge: {error:#}");
            std::process::ExitCode::from(1)
        }
    }
}

fn run(arguments: RunArguments) -> Result<i32> {
    let id = sys::random_hex(32)?;
    let mut environment: Vec<(String, String)> = std::env::vars().collect();
    if let Some(provider) = arguments.provider {
        environment.push(("FI_PROVIDER".to_string(), provider));
    }
    let (program, rest) = arguments.program.split_first().context("no program")?;
    let job = control::Job {
        kvsname: format!("kvs_{id}"),
        key: sys::random_hex(64)?,
        id,
        size: arguments.ranks,
        mapping: format!("(vector,(0,1,{}))", arguments.ranks),
        program: program.clone(),
        arguments: rest.to_vec(),
        wdir: std::env::current_dir()?.display().to_string(),
        environment,
        verbose: arguments.verbose,
    };
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let agent = [std::env::current_exe()?.display().to_string(), "agent".to_string()];
    let command = spawn::Spawn::command(&spawn::local::Local::default(), &host, &agent);
    let nodes = plan::local(&host, job.size, command);
    let options = run::Options {
        label: arguments.label,
        verbose: arguments.verbose,
        timeout: arguments.timeout.map(Duration::from_secs),
        relay_log: None,
    };
    run::run(job, nodes, relays::Relays, options)
}
