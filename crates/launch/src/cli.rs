//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Parser)]
#[command(
    name = "landbridge",
    version,
    about = "Runs stock MPI programs over several clusters as one job",
    after_help = "Start with `landbridge doctor`, then `landbridge run -n 2 ./program`."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Start an MPI program on this machine, on hosts, or over clusters
    Run(Box<RunArguments>),
    /// Print settings with which an MPI library's own launcher uses the provider
    Env(EnvArguments),
    /// Check this machine: MPI libraries, provider, privileges, limits
    Doctor(DoctorArguments),
    /// The relay daemon (runs landbridge-relay)
    #[command(disable_help_flag = true)]
    Relay(Passed),
    /// Clusters out of network namespaces (runs landbridge-lab)
    #[command(disable_help_flag = true)]
    Lab(Passed),
    /// The agent of one host; started by `landbridge run`
    #[command(hide = true)]
    Agent,
    /// Asks one libfabric what it finds; started by `landbridge doctor`
    #[command(hide = true)]
    DoctorProbe { library: PathBuf },
    /// One of two test processes; started by `landbridge doctor`
    #[command(hide = true)]
    DoctorPeer { library: PathBuf },
}

const RUN_EXAMPLES: &str = "\
Examples:
  landbridge run -n 8 ./a.out                      8 ranks on this machine
  landbridge run -n 8 --clusters 2 ./a.out         two clusters of 4, joined by relays, on it
  landbridge run -n 4 -l python3 heat.py           label every line with its rank
  landbridge run --hosts n1:4,n2:4 ./a.out         two hosts of one cluster, over ssh
  landbridge run --topology grid.toml ./a.out      clusters and relays as the file says
  landbridge run --topology grid.toml -n 2 --ranks-per-cluster 1 ./pingpong

Ranks fill the hosts in order. The job's exit code is that of the first rank that fails, 128 + N
if it was killed by signal N, 124 after --timeout. Ctrl-C ends every rank on every host; a second
one does so at once.";

#[derive(Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArguments {
    /// Number of ranks; default: as many as the hosts have slots
    #[arg(short = 'n', long = "np", value_name = "N")]
    pub ranks: Option<u32>,
    /// Cut this machine into N clusters joined by relays
    #[arg(long, value_name = "N", conflicts_with_all = ["topology", "hosts", "hostfile"])]
    pub clusters: Option<u32>,
    /// Clusters, hosts and relays; default: the file that LANDBRIDGE_TOPOLOGY names
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "hostfile"])]
    pub topology: Option<PathBuf>,
    /// Hosts of one cluster, with the ranks each takes
    #[arg(long, visible_alias = "host", value_name = "HOST[:N],…", value_delimiter = ',')]
    pub hosts: Vec<String>,
    /// The same from a file: a line for each host, `HOST`, `HOST:N` or `HOST slots=N`
    #[arg(long, visible_alias = "machinefile", value_name = "FILE", conflicts_with = "hosts")]
    pub hostfile: Option<PathBuf>,
    /// Ranks on each node, in place of its slots
    #[arg(long, visible_alias = "ppn", value_name = "N")]
    pub ranks_per_node: Option<u32>,
    /// Ranks in each cluster at most
    #[arg(long, value_name = "N")]
    pub ranks_per_cluster: Option<u32>,
    /// Set a variable for every rank, or with NAME alone pass ours on
    #[arg(short = 'x', long = "env", value_name = "NAME[=VALUE]")]
    pub environment: Vec<String>,
    /// Directory in which ranks start; default: this one
    #[arg(long, visible_alias = "wd", value_name = "DIR")]
    pub wdir: Option<PathBuf>,
    /// Put the rank in front of every line it prints
    #[arg(short = 'l', long)]
    pub label: bool,
    /// End the job after this many seconds, with exit code 124
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
    /// Write the relays' logs to this file
    #[arg(long, value_name = "FILE")]
    pub relay_log: Option<PathBuf>,
    /// Tell what is started where, and what relays log
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Use another libfabric provider, for comparison
    #[arg(long, hide = true, value_name = "NAME")]
    pub provider: Option<String>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    #[arg(value_name = "PROGRAM")]
    pub program: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Library {
    Mpich,
    Openmpi,
    Impi,
}

#[derive(Args)]
#[command(after_help = "Example:\n  eval \"$(landbridge env --mpi openmpi)\"\n  \
                        mpirun -n 4 ./a.out")]
pub struct EnvArguments {
    /// The MPI library whose launcher will be used
    #[arg(long)]
    pub mpi: Library,
    /// Number of processes, for launchers that do not tell it (srun)
    #[arg(short = 'n', long = "np", value_name = "N")]
    pub ranks: Option<u32>,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  landbridge doctor\n  \
                        landbridge doctor --in build/venv/mpich     an MPI library not along PATH\n  \
                        landbridge doctor --relay gateway:7711      can its port be reached?\n\n\
                        It changes nothing. Exit code 1: something will not work.")]
pub struct DoctorArguments {
    /// Also look for MPI libraries in this directory (a virtual environment, an installation)
    #[arg(long = "in", value_name = "DIR")]
    pub directories: Vec<PathBuf>,
    /// Also check that a relay answers at this address
    #[arg(long, value_name = "HOST:PORT")]
    pub relay: Vec<String>,
}

#[derive(Args)]
pub struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<std::ffi::OsString>,
}
