//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use landbridge_proto::setting::{SettingKind, nearest_of};

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

impl Cli {
    /// Parses the command line of this process; ends the process if the command line is not valid.
    pub fn of_command_line() -> Cli {
        Cli::parse_from(with_long_np(std::env::args_os().collect()))
    }
}

/// Turns `-np N`, an option of other launchers that would be `-n p` here, into `--np N`. The
/// options end at the name of the program: the program's own arguments stay unchanged.
fn with_long_np(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let name = arguments.get(1).and_then(|name| name.to_str()).unwrap_or_default();
    let cli = Cli::command();
    let Some(command) = ["run", "env"].iter().find(|&&known| known == name) else {
        return arguments;
    };
    let Some(command) = cli.find_subcommand(command) else { return arguments };
    write_np_long(&mut arguments[2..], command);
    arguments
}

/// Turns `-np` into `--np` among the options of one command; `arguments` begins behind the
/// command's name.
fn write_np_long(arguments: &mut [OsString], command: &clap::Command) {
    let mut index = 0;
    while let Some(word) = arguments.get(index).and_then(|word| word.to_str()) {
        if !word.starts_with('-') || word == "-" || word == "--" {
            break;
        }
        if word == "-np" {
            arguments[index] = "--np".into();
            index += 2;
        } else {
            index += if takes_next(command, word) { 2 } else { 1 };
        }
    }
}

/// Whether the value of an option is the next word. `word` is a long option, or a word with one or
/// several short options, of which the last counts.
fn takes_next(command: &clap::Command, word: &str) -> bool {
    let has_value = |argument: &clap::Arg| argument.get_action().takes_values();
    if let Some(long) = word.strip_prefix("--") {
        let is_it = |argument: &&clap::Arg| {
            argument.get_long() == Some(long)
                || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&long))
        };
        return command.get_arguments().find(is_it).is_some_and(has_value);
    }
    let short = |letter| {
        let is_it = |argument: &&clap::Arg| argument.get_short() == Some(letter);
        command.get_arguments().find(is_it).is_some_and(has_value)
    };
    // The first short option that takes a value takes the rest of the word as its value, if the
    // rest is not empty.
    let valued = word[1..].char_indices().find(|&(_, letter)| short(letter));
    valued.is_some_and(|(at, letter)| 1 + at + letter.len_utf8() == word.len())
}

/// Parses `--timeout`: whole seconds, at least 1.
fn seconds(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("a job needs at least 1 second; without --timeout it has any time".into()),
        Ok(seconds) => Ok(seconds),
        Err(_) => Err("give whole seconds, such as 90".into()),
    }
}

/// Parses `--max-restarts-within`, a time as in settings; the value is in seconds, rounded up.
fn span(text: &str) -> Result<u64, String> {
    let span = SettingKind::Time { min_us: 1_000_000, max_us: u64::MAX }.parse(text)?;
    let span = span.duration().unwrap_or_default();
    Ok(span.as_secs() + u64::from(span.subsec_nanos() > 0))
}

#[derive(Subcommand)]
pub enum Command {
    /// Start an MPI program on this machine, on hosts, or on several clusters
    Run(Box<RunArguments>),
    /// List the running jobs that were started on this machine, with the process of each rank
    Ps(PsArguments),
    /// Show the message logs of the ranks of running jobs
    Log(LogArguments),
    /// Take a checkpoint of each rank of a running job now
    Checkpoint(CheckpointArguments),
    /// Print the environment with which an MPI library's own launcher uses the provider
    Env(EnvArguments),
    /// List all settings, their values in force, and where each value comes from
    Settings(SettingsArguments),
    /// Check this machine: MPI libraries, provider, privileges, limits
    Doctor(DoctorArguments),
    /// Run the relay daemon (landbridge-relay)
    #[command(disable_help_flag = true)]
    Relay(PassedArguments),
    /// Build clusters of network namespaces (runs landbridge-lab)
    #[command(disable_help_flag = true)]
    Lab(PassedArguments),
    /// Run the agent of one host; `landbridge run` starts it
    #[command(hide = true)]
    Agent,
    /// Ask one libfabric which providers it finds; `landbridge doctor` starts it
    #[command(hide = true)]
    DoctorProbe { library: PathBuf },
    /// Run one of two test processes; `landbridge doctor` starts it
    #[command(hide = true)]
    DoctorPeer {
        #[arg(long)]
        pairs: bool,
        library: PathBuf,
    },
}

const RUN_EXAMPLES: &str = "\
Examples:
  landbridge run -n 8 ./a.out                  8 ranks on this machine
  landbridge run -n 8 --clusters 2 ./a.out     two clusters of 4, with relays
  landbridge run -n 4 -l python3 heat.py       label every line with its rank
  landbridge run --hosts n1:4,n2:4 ./a.out     two hosts of a cluster, by ssh
  landbridge run --topology grid.toml ./a.out  clusters and relays of the file
  landbridge run --topology grid.toml -n 2 --ranks-per-cluster 1 ./pingpong
  landbridge run -n 4 --set peer_timeout=10min ./a.out
                                               see `landbridge settings`
  landbridge run -n 4 --recover ./a.out        a rank that is killed comes back
  landbridge run --topology grid.toml --recover=node ./a.out
                                               so do the ranks of a lost node
  landbridge run -n 1 ./master : -n 3 ./worker two programs, ranks 0 and 1 to 3

Behind a `:` go -n, -x and --wdir of another program, which hold for that one
alone; what stands before the first program holds for all.

Ranks fill the hosts in order. The job's exit code is that of the first rank
that fails, 128 + N if it was killed by signal N, 124 after --timeout, and 1
after an MPI_Abort with a code that is no exit code. A rank that fails ends the
job; if it has come through MPI_Finalize, as a Python program does after an
exception, the others have 10 s to end by themselves. Ctrl-C ends every rank on
every host; a second one does so at once.";

// One of the fields for each option of `landbridge run`.
#[derive(Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArguments {
    /// Number of ranks; default: the slots of all hosts that are named (none: -n is needed)
    #[arg(short = 'n', long = "np", value_name = "N")]
    pub ranks: Option<u32>,
    /// Divide this machine into N clusters that relays connect
    #[arg(long, value_name = "N", conflicts_with_all = ["topology", "hosts", "hostfile"])]
    pub clusters: Option<u32>,
    /// Topology file with clusters, hosts and relays; default: the file that LANDBRIDGE_TOPOLOGY
    /// names
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "hostfile"])]
    pub topology: Option<PathBuf>,
    /// Hosts of a single cluster, with the number of ranks for each
    #[arg(long, visible_alias = "host", value_name = "HOST[:N],…", value_delimiter = ',')]
    pub hosts: Vec<String>,
    /// File with the hosts of a single cluster, one host a line: `HOST`, `HOST:N` or `HOST slots=N`
    #[arg(long, visible_alias = "machinefile", value_name = "FILE", conflicts_with = "hosts")]
    pub hostfile: Option<PathBuf>,
    /// Number of ranks on each node, in place of the node's slots
    #[arg(long, visible_alias = "ppn", value_name = "N")]
    pub ranks_per_node: Option<u32>,
    /// Maximum number of ranks in each cluster
    #[arg(long, value_name = "N")]
    pub ranks_per_cluster: Option<u32>,
    /// Set a variable for every rank; NAME alone passes on the launcher's value
    #[arg(short = 'x', long = "env", value_name = "NAME[=VALUE]")]
    pub environment: Vec<String>,
    #[command(flatten)]
    pub settings: SettingOptions,
    /// Directory in which ranks start; default: the current directory
    #[arg(long, visible_alias = "wd", value_name = "DIR")]
    pub wdir: Option<PathBuf>,
    /// Print the rank in front of every line that the rank prints
    #[arg(short = 'l', long)]
    pub label: bool,
    /// End the job after this many seconds, with exit code 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<u64>,
    /// Restart killed ranks, which replay from the message log (MPICH only; see docs/RECOVERY.md);
    /// `--recover=node`: also the ranks of lost nodes, as with `--spares 1`
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "process")]
    pub recover: Option<Restarted>,
    /// With --recover: keep the last N hosts of each cluster free, for the ranks of a lost node
    #[arg(long, value_name = "N")]
    pub spares: Option<u32>,
    /// With --recover: take a checkpoint of each rank at this interval, such as 30s or 10min (needs
    /// CRIU); a killed rank restarts from its newest checkpoint
    #[arg(long, value_name = "TIME")]
    pub checkpoint: Option<String>,
    /// With --recover: end the job when a rank needs more than N restarts [20] within
    /// --max-restarts-within
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// With --recover: time within which --max-restarts counts, such as 90s, 10min or 1h [10min]
    #[arg(long, value_name = "TIME", value_parser = span)]
    pub max_restarts_within: Option<u64>,
    /// Write the relays' logs to this file
    #[arg(long, value_name = "FILE")]
    pub relay_log: Option<PathBuf>,
    /// Print what is started on which host, and what relays log
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Use another libfabric provider, for comparison
    #[arg(long, hide = true, value_name = "NAME")]
    pub provider: Option<String>,
    /// Program and its arguments; a `:` begins each further program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    #[arg(value_name = "PROGRAM")]
    pub program: Vec<String>,
}

/// Another program of the same job, behind a `:` on the command line.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub struct ApplicationArguments {
    /// Number of ranks of this program
    #[arg(short = 'n', long = "np", value_name = "N")]
    pub ranks: Option<u32>,
    /// Set a variable for the ranks of this program
    #[arg(short = 'x', long = "env", value_name = "NAME[=VALUE]")]
    pub environment: Vec<String>,
    /// Directory in which the ranks of this program start
    #[arg(long, visible_alias = "wd", value_name = "DIR")]
    pub wdir: Option<PathBuf>,
    /// Program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    #[arg(value_name = "PROGRAM")]
    pub program: Vec<String>,
}

impl RunArguments {
    /// The option of `landbridge run` whose name is most similar to this word, if one is similar.
    pub fn nearest_option(word: &str) -> Option<String> {
        let command = RunArguments::augment_args(clap::Command::new("run"));
        let names = command.get_arguments().filter_map(|option| option.get_long());
        let name = word.trim_start_matches('-').split('=').next().unwrap_or_default();
        let is_word = name.len() > 2;
        let nearest = nearest_of(name, names, |option: &&str| option);
        nearest.filter(|_| is_word).map(str::to_owned)
    }
}

impl ApplicationArguments {
    /// Parses the words between two `:` of the command line.
    pub fn read(words: &[String]) -> Result<ApplicationArguments, clap::Error> {
        let mut words: Vec<OsString> = words.iter().map(OsString::from).collect();
        write_np_long(&mut words, &ApplicationArguments::command());
        ApplicationArguments::try_parse_from(words)
    }
}

/// Options that choose settings.
#[derive(Args)]
pub struct SettingOptions {
    /// Settings file; default: the file that LANDBRIDGE_SETTINGS names, else landbridge.toml in the
    /// directory of the topology file, else landbridge/settings.toml in XDG_CONFIG_HOME (~/.config)
    #[arg(long = "settings", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Set a setting for this job; overrides environment variables and the settings file;
    /// `landbridge settings` lists all settings
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
}

impl SettingOptions {
    /// The options as words for the command line of another Landbridge process.
    pub fn words(&self) -> Vec<String> {
        let file =
            self.file.iter().map(|file| ["--settings".to_string(), file.display().to_string()]);
        let set = self.set.iter().map(|words| ["--set".to_string(), words.clone()]);
        file.chain(set).flatten().collect()
    }
}

#[derive(Args)]
#[command(after_help = "A flag goes before a variable (LANDBRIDGE_NAME), a variable before the\n\
                        settings file.\n\nExamples:\n  landbridge settings\n  \
                        landbridge settings --topology grid.toml --json")]
pub struct SettingsArguments {
    /// Topology file whose directory is searched for a settings file
    #[arg(long, value_name = "FILE")]
    pub topology: Option<PathBuf>,
    #[command(flatten)]
    pub settings: SettingOptions,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const PS_HELP: &str = "\
Examples:
  landbridge ps                   every job of this user, with its ranks
  landbridge ps 3f2a              the job whose name begins so
  landbridge ps --json            the same for programs
  landbridge ps --paths 3f2a      how the paths between its ranks are
  kill -9 $(landbridge ps 3f2a --json | jq '.[0].ranks[2].pid')
                                  under --recover rank 2 of that job comes back

The state of a rank is `starting`, `running`, `restarting` (it was killed, and
has not begun to replay), `replaying` (with its share of what it replays), or
`ended` with the reason. The incarnation says how often it has been restarted.
A process id is that on the rank's node; jobs in a lab of this machine are seen
from outside, too, with the numbers that their processes have there.

With --paths each rank is asked for its paths: what each has sent, how much of
that again, frames that arrived corrupt, how often it was lost, its round trip
and its rate as far as they were measured; rows are those with trouble first. A
path is `up`, `spare` (it carries only what no other can), `suspected` (nothing
is heard on it), `probing` (UDP, not shown to work yet) or `down`. A rank that
computes does not answer; what it said before is marked.";

#[derive(Args)]
#[command(after_help = PS_HELP)]
pub struct PsArguments {
    /// Show only jobs whose names begin with JOB
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// Another form of JOB, which `landbridge log` and `landbridge checkpoint` take too
    #[arg(long = "job", value_name = "JOB", conflicts_with = "job")]
    job_option: Option<String>,
    /// Show the paths between ranks: sums over all paths, and the most informative paths
    #[arg(long)]
    pub paths: bool,
    /// With --paths: show every known path, up to 4096
    #[arg(long, requires = "paths")]
    pub all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl PsArguments {
    /// The beginning of the names of the wanted jobs; empty for all jobs.
    pub fn wanted(&self) -> &str {
        self.job.as_ref().or(self.job_option.as_ref()).map_or("", String::as_str)
    }
}

const LOG_HELP: &str = "\
Examples:
  landbridge log                  of each rank, how much is kept and where
  landbridge log show 2 --from 100 --count 5
                                  what rank 2 took in, and when
  landbridge log --json | jq '.[0].log_status'

Of each rank: `frames` that it was given and their bytes, in memory and on disk
(`recover_dir`); frames that it has sent. A determinant is the record of one
poll that delivered frames, or at which a timer of the protocol was due: which
frames, and at which poll. `determinants` is their number, and `bytes/frame`
what they take for each delivered frame.
`nondeterminism` is the size of the record of the rank's clocks, random numbers
and calls on files, if the relay is on another node; else it is `-`. `polls` is
how often the rank had looked for messages by then. A rank that is killed is
given these frames and records again, at the same polls.";

#[derive(Args)]
#[command(after_help = LOG_HELP)]
pub struct LogArguments {
    #[command(subcommand)]
    pub command: Option<LogCommand>,
    /// Show only jobs whose names begin with JOB
    #[arg(long, value_name = "JOB", global = true)]
    pub job: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

const CHECKPOINT_HELP: &str = "\
Examples:
  landbridge checkpoint           of all ranks of all jobs of this user that
                                  take checkpoints
  landbridge checkpoint --job 3f2a --rank 2
  kill -USR1 PID                  the same as the first, of `landbridge run`
                                  with this process id

Ranks are asked for their checkpoints. Each is taken as its rank comes to a
place where that can be done; the terminal of `landbridge run` says when it is
there. The job runs with --recover and --checkpoint TIME; 24h is as good as
never.";

#[derive(Args)]
#[command(after_help = CHECKPOINT_HELP)]
pub struct CheckpointArguments {
    /// Take checkpoints only in jobs whose names begin with JOB
    #[arg(long, value_name = "JOB")]
    pub job: Option<String>,
    /// Take a checkpoint of rank N only
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,
}

#[derive(Debug, Clone, Subcommand)]
pub enum LogCommand {
    /// Print the determinants of a rank: which frames the rank received, and at which poll
    #[command(after_help = "Example:\n  landbridge log show 2 --from 100 --count 5")]
    Show {
        /// Rank, as `landbridge ps` names it
        rank: String,
        /// Number of the first determinant to print
        #[arg(long, value_name = "N", default_value_t = 0)]
        from: u64,
        /// Number of determinants to print, at most 100
        #[arg(long, value_name = "N", default_value_t = 20)]
        count: u64,
    },
}

/// What `--recover` restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Restarted {
    /// Ranks that are killed
    Process,
    /// Also the ranks of lost nodes
    Node,
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
    /// MPI library whose own launcher starts the job
    #[arg(long)]
    pub mpi: Library,
    /// Number of processes; default: what the library's launcher says (OMPI_COMM_WORLD_SIZE,
    /// PMI_SIZE or SLURM_STEP_NUM_TASKS), else 1
    #[arg(short = 'n', long = "np", value_name = "N")]
    pub ranks: Option<u32>,
    #[command(flatten)]
    pub settings: SettingOptions,
}

const DOCTOR_HELP: &str = "\
Examples:
  landbridge doctor
  landbridge doctor --in build/venv/mpich   an MPI library not along PATH
  landbridge doctor --relay gateway:7711    can its port be reached?
  landbridge doctor --set criu=/opt/criu    as `landbridge run` would take it
  landbridge doctor --pairs --topology grid.toml
                                            which paths join its hosts, and how
                                            fast?

It changes nothing. Exit code 1: something will not work.";

#[derive(Args)]
#[command(after_help = DOCTOR_HELP)]
pub struct DoctorArguments {
    /// Search this directory for MPI libraries, too (a virtual environment, an installation)
    #[arg(long = "in", value_name = "DIR")]
    pub directories: Vec<PathBuf>,
    /// Check that a relay answers at this address, too
    #[arg(long, value_name = "HOST:PORT")]
    pub relay: Vec<String>,
    /// Check only the paths between all hosts of the topology, with one test process on each host
    #[arg(long)]
    pub pairs: bool,
    /// With --pairs: topology file with the hosts; default: the file that LANDBRIDGE_TOPOLOGY names
    #[arg(long, value_name = "FILE", requires = "pairs")]
    pub topology: Option<PathBuf>,
    #[command(flatten)]
    pub settings: SettingOptions,
}

#[derive(Args)]
pub struct PassedArguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<std::ffi::OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn np_is_an_option_of_ours_and_not_of_the_program() {
        let rewritten = |line: &str| {
            let words = line.split(' ').map(OsString::from).collect();
            let words = with_long_np(words).into_iter().map(|word| word.into_string().unwrap());
            words.collect::<Vec<_>>().join(" ")
        };
        let rows = [
            ("lb run -np 4 ./a", "lb run --np 4 ./a"),
            (
                "lb run -l --clusters 2 -x A=b -np 4 ./a -np 5",
                "lb run -l --clusters 2 -x A=b --np 4 ./a -np 5",
            ),
            ("lb run --ppn 2 -lx A -np 4 ./a", "lb run --ppn 2 -lx A --np 4 ./a"),
            ("lb run --clusters=2 -xA -np 4 ./a", "lb run --clusters=2 -xA --np 4 ./a"),
            ("lb run -x -np ./a -np 4", "lb run -x -np ./a -np 4"),
            ("lb run -n 2 ./a -np 4", "lb run -n 2 ./a -np 4"),
            ("lb run -n 2 -- -np 4", "lb run -n 2 -- -np 4"),
            ("lb lab run f -- a -np 4", "lb lab run f -- a -np 4"),
            ("lb env --mpi mpich -np 4", "lb env --mpi mpich --np 4"),
        ];
        for (line, expected) in rows {
            assert_eq!(rewritten(line), expected);
        }
        let words = with_long_np(["lb", "run", "-np", "4", "./a", "-np"].map(Into::into).to_vec());
        let Command::Run(run) = Cli::try_parse_from(words).ok().unwrap().command else { panic!() };
        assert_eq!((run.ranks, run.program), (Some(4), vec!["./a".into(), "-np".into()]));
    }

    /// Width of most terminals, less a margin: clap breaks longer lines at this width, and the rest
    /// of each broken line gets a line of its own.
    const COLUMNS: usize = 79;

    #[test]
    fn no_line_of_a_text_below_the_options_is_broken() {
        let mut commands = vec![Cli::command()];
        while let Some(command) = commands.pop() {
            let texts = [command.get_after_help(), command.get_after_long_help()];
            for text in texts.into_iter().flatten().map(ToString::to_string) {
                let line = text.lines().find(|line| line.chars().count() > COLUMNS);
                assert_eq!(line, None, "{}", command.get_name());
            }
            commands.extend(command.get_subcommands().cloned());
        }
    }

    /// Of a command, and of those below it: names, texts, and texts of options. Commands that only
    /// pass their arguments on, and those that are not for users, do not count.
    fn helps(command: clap::Command, name: &str, found: &mut Vec<(String, clap::Command)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            if !below.is_disable_help_flag_set() && below.get_name() != "help" {
                let name = format!("{name} {}", below.get_name());
                helps(below.clone(), &name, found);
            }
        }
        found.push((name.to_string(), command));
    }

    #[test]
    fn the_help_of_every_command_has_examples_and_a_text_of_its_own_for_each_option() {
        let mut found = Vec::new();
        helps(Cli::command(), "landbridge", &mut found);
        assert!(found.len() > 8, "{found:?}");
        for (name, mut command) in found {
            let help = command.render_help().to_string();
            let example = format!("  {name}");
            let has_example = help.lines().any(|line| line.starts_with(&example));
            // The first command that a new user types.
            let is_first = help.contains("`landbridge run -n 2 ./program`");
            let is_evaluated = help.contains(&format!("$({name}"));
            assert!(has_example || is_first || is_evaluated, "{name} --help has no example");
            let text = |text: Option<&clap::builder::StyledStr>| text.map(ToString::to_string);
            let about = text(command.get_about()).unwrap_or_default();
            assert!(!about.is_empty(), "{name} --help does not say what it does");
            let mut texts = vec![about];
            for argument in command.get_arguments() {
                let own = text(argument.get_help()).unwrap_or_default();
                let option = argument.get_id();
                assert!(!own.is_empty(), "{name}: {option} has no text");
                assert!(!own.ends_with(['.', ',', ';', ':']), "{name}: {option}: {own}");
                let other = texts.iter().find(|it| own.contains(*it) || it.contains(&own));
                assert_eq!(other, None, "{name}: {option} has the text of another option");
                texts.push(own);
            }
        }
    }

    /// The commands of `landbridge` that a page shows after `$`, with the lines that continue them.
    fn shown_commands(page: &str) -> Vec<String> {
        let joined = page.replace("\\\n", " ");
        let lines = joined.lines().filter_map(|line| line.trim().strip_prefix("$ "));
        lines
            .filter(|line| {
                line.split('/').any(|part| part.starts_with("landbridge "))
                    && !line.starts_with("scp ")
            })
            .map(str::to_owned)
            .collect()
    }

    /// Words of a command, as far as pages use the shell: blanks, quotes, comments. What stands
    /// within `$(...)` is not run.
    fn shell_words(line: &str) -> Vec<String> {
        let (mut words, mut is_quoted, mut depth) = (vec![String::new()], false, 0);
        for letter in line.chars() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                '"' if depth == 0 => is_quoted = !is_quoted,
                '#' if depth == 0 && !is_quoted => break,
                ' ' if depth == 0 && !is_quoted => words.push(String::new()),
                _ if depth == 0 => words.last_mut().unwrap().push(letter),
                _ => (),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn commands_on_the_pages_are_those_of_the_command_line() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let pages =
            std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let mut count = 0;
        for page in pages
            .chain([root.join("README.md")])
            .filter(|path| path.extension().is_some_and(|it| it == "md"))
        {
            for line in shown_commands(&std::fs::read_to_string(&page).unwrap()) {
                let words = shell_words(&line);
                let parsed =
                    Cli::try_parse_from(with_long_np(words.into_iter().map(Into::into).collect()));
                let error = parsed.err().filter(|error| error.exit_code() != 0);
                assert!(error.is_none(), "{}: {line}: {error:?}", page.display());
                count += 1;
            }
        }
        assert!(count >= 10, "only {count} commands");
    }

    #[test]
    fn doctor_hands_on_what_settings_are_said_to_be() {
        let words = ["lb", "doctor", "--set", "udp=on", "--settings", "s.toml"];
        let Command::Doctor(doctor) = Cli::try_parse_from(words).ok().unwrap().command else {
            panic!()
        };
        assert_eq!(doctor.settings.words(), ["--settings", "s.toml", "--set", "udp=on"]);
    }

    #[test]
    fn ps_takes_the_job_with_and_without_its_option() {
        let wanted = |line: &str| {
            let Command::Ps(ps) = Cli::try_parse_from(line.split(' ')).ok()?.command else {
                return None;
            };
            Some(ps.wanted().to_string())
        };
        assert_eq!(wanted("lb ps 3f2a").as_deref(), Some("3f2a"));
        assert_eq!(wanted("lb ps --paths --job 3f2a").as_deref(), Some("3f2a"));
        assert_eq!(wanted("lb ps").as_deref(), Some(""));
        assert_eq!(wanted("lb ps 3f2a --job 4e"), None);
    }

    #[test]
    fn a_span_has_a_unit() {
        assert_eq!(["90s", "10min", "2h"].map(span), [Ok(90), Ok(600), Ok(7200)]);
        assert_eq!(["1 min", "1500ms"].map(span), [Ok(60), Ok(2)]);
        for (wrong, advice) in [
            ("90", "\"90\" has no unit: write 90s"),
            ("min", "write a whole number and its unit"),
            ("0s", "0s is too little: at least 1s"),
            ("999ms", "999ms is too little: at least 1s"),
            ("1.5h", "write a whole number and its unit"),
            ("-1s", "write a whole number and its unit"),
            ("99999999999999999999h", "too large a number"),
            ("10m", "write a whole number and its unit"),
        ] {
            let error = span(wrong).unwrap_err();
            assert!(error.contains(advice), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_timeout_is_whole_seconds() {
        assert_eq!(seconds("90"), Ok(90));
        assert!(seconds("0").unwrap_err().contains("at least 1 second"));
        assert!(seconds("1.5").unwrap_err().contains("whole seconds"));
    }
}
