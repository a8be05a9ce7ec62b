//! The command `landbridge-lab`, which users start as `landbridge lab`.

use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use landbridge_lab::net::run::{self, EXIT_LAB_FAILED, Inherited, LabRun};
use landbridge_lab::net::{control, file, namespace::Machine, probe};
use landbridge_lab::sim::command::Simulate;
use landbridge_lab::soak::command::SoakArguments;
use landbridge_lab::soak::punish::PunishArguments;

#[derive(Parser)]
#[command(
    name = "landbridge lab",
    bin_name = "landbridge lab",
    version,
    about = "Clusters out of network namespaces on one machine, joined by emulated links"
)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Build the clusters of FILE, run COMMAND on the first host of the first site, and remove the
    /// clusters
    #[command(after_long_help = RUN_HELP)]
    Run {
        /// Lab file (TOML), for example labs/two-sites.toml
        file: PathBuf,
        /// Name of the running lab, for `landbridge lab link`; default: the name in FILE
        #[arg(long)]
        name: Option<String>,
        /// Command to run, with its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Check FILE and print the hosts and links that it describes
    #[command(after_help = "Example:\n  landbridge lab check labs/two-sites.toml")]
    Check {
        /// Lab file (TOML), for example labs/two-sites.toml
        file: PathBuf,
    },
    /// Run COMMAND on a host of the lab that surrounds this shell
    #[command(after_help = ON_HELP)]
    On {
        /// Name of the host: north-1, north-2 … of a site `north`, north-gw for its gateway;
        /// `landbridge lab check FILE` prints the names
        host: String,
        /// Command to run on the host, with its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Show or change the links of a running lab
    #[command(after_long_help = LINK_HELP)]
    Link(LinkArguments),
    /// Take an interface of a host down or up in a running lab; the interface's routes return with
    /// it
    #[command(after_help = INTERFACE_HELP)]
    Interface {
        /// Name of the lab; inside a lab, `.` means the surrounding lab
        lab: String,
        /// Name of the host or gateway, as `landbridge lab check FILE` prints it
        host: String,
        /// Name of the interface: lan0 on the first rail, lan1 on the second …; wan0 of a gateway
        device: String,
        /// New state of the interface: up or down
        state: String,
    },
    /// Stop the relay of a site (SIGSTOP) or continue it (SIGCONT) in a running lab
    #[command(after_help = RELAY_HELP)]
    Relay {
        /// Name of the lab; inside a lab, `.` means the surrounding lab
        lab: String,
        /// Name of the site
        site: String,
        /// Action: stop or continue
        state: String,
    },
    /// Measure the network between two hosts (start `probe serve` on one of them)
    #[command(after_help = PROBE_HELP)]
    Probe {
        #[command(subcommand)]
        probe: Probe,
    },
    /// Run MPI programs repeatedly while the network of a lab fails at random
    #[command(after_long_help = SOAK_HELP)]
    Soak(SoakArguments),
    /// Run MPI programs repeatedly while their ranks are killed at random
    #[command(after_long_help = PUNISH_HELP)]
    Punish(PunishArguments),
    /// Run simulated endpoints against each other under seeds, and check their results
    #[command(after_help = SIMULATE_HELP)]
    Simulate(Simulate),
    #[command(hide = true)]
    Inside {
        #[arg(long)]
        file: PathBuf,
        #[arg(long)]
        name: Option<String>,
        #[arg(long)]
        lifeline: i32,
        #[arg(long)]
        control: i32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

// One of the fields for each option of `landbridge lab link`.
#[derive(Args)]
struct LinkArguments {
    /// Name of the lab; inside a lab, `.` means the surrounding lab
    lab: String,
    /// Link: `north-south` for both directions, `north>south` for one, `north-LAN1` for all of a
    /// rail; without a link, all links are shown with their counters
    link: Option<String>,
    /// Drop all packets of the link, including packets under way
    #[arg(long, conflicts_with = "up")]
    down: bool,
    /// Reset the link to the lab file before other changes
    #[arg(long)]
    restore: bool,
    /// Undo --down
    #[arg(long)]
    up: bool,
    /// Rate, such as `100Mbit/s`, or `unlimited`
    #[arg(long)]
    rate: Option<String>,
    /// One-way delay, such as `5ms`
    #[arg(long)]
    delay: Option<String>,
    /// Maximum additional delay of each packet, such as `1ms`; packets stay in order
    #[arg(long)]
    jitter: Option<String>,
    /// Share of packets that are lost, such as `5%`
    #[arg(long)]
    loss: Option<String>,
    /// Share of packets that arrive twice, such as `5%`
    #[arg(long)]
    duplicate: Option<String>,
    /// Share of packets that are delayed behind later packets, such as `5%`
    #[arg(long)]
    reorder: Option<String>,
    /// Delay of reordered packets, such as `1ms`
    #[arg(long)]
    reorder_by: Option<String>,
    /// Share of packets in which one to three bits are changed, such as `5%`
    #[arg(long)]
    corrupt: Option<String>,
    /// Keep the checksums of corrupted packets valid: true or false
    #[arg(long)]
    repair_checksums: Option<bool>,
    /// Capacity of the queue in front of the link, such as `512KiB`
    #[arg(long)]
    queue: Option<String>,
    /// Largest IP packet in bytes, such as `1280`, or `none`; larger packets are dropped without a
    /// notice
    #[arg(long)]
    mtu: Option<String>,
}

#[derive(Subcommand)]
enum Probe {
    /// Answer the other probes until killed
    #[command(after_help = "Example:\n  landbridge lab on south-1 -- landbridge lab probe serve")]
    Serve {
        /// UDP and TCP port to listen on
        #[arg(long, default_value_t = PROBE_PORT)]
        port: u16,
    },
    /// Measure round trips of small UDP datagrams
    #[command(after_help = "Example:\n  landbridge lab probe delay south-1")]
    Delay {
        /// Address of `probe serve`: HOST, HOST:PORT, IP or IP:PORT (IPv4); default port 7799
        server: String,
        /// Number of round trips
        #[arg(long, default_value_t = 20)]
        count: u32,
    },
    /// Measure the throughput of one TCP connection
    #[command(after_help = "Example:\n  landbridge lab probe rate south-1 --seconds 10")]
    Rate {
        /// Address of `probe serve`: HOST, HOST:PORT, IP or IP:PORT (IPv4); default port 7799
        server: String,
        /// Duration of the transfer in seconds
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Print the numbers of the UDP datagrams that came back, in order of arrival
    #[command(after_help = "Example:\n  landbridge lab probe loss south-1 --count 1000")]
    Loss {
        /// Address of `probe serve`: HOST, HOST:PORT, IP or IP:PORT (IPv4); default port 7799
        server: String,
        /// Number of datagrams, one each millisecond
        #[arg(long, default_value_t = 100)]
        count: u32,
        /// Size of each datagram in bytes
        #[arg(long, default_value_t = 100)]
        bytes: usize,
    },
    /// Count UDP datagrams that came back, came back changed, twice, or out of order
    #[command(after_help = "Example:\n  landbridge lab probe echoes south-1 --count 1000")]
    Echoes {
        /// Address of `probe serve`: HOST, HOST:PORT, IP or IP:PORT (IPv4); default port 7799
        server: String,
        /// Number of datagrams, one each millisecond
        #[arg(long, default_value_t = 100)]
        count: u32,
        /// Size of each datagram in bytes
        #[arg(long, default_value_t = 1000)]
        bytes: usize,
    },
    /// Check whether a TCP connection can be made
    #[command(after_help = "Example:\n  landbridge lab probe connect south-1:7799")]
    Connect {
        /// Address to connect to: HOST, HOST:PORT, IP or IP:PORT (IPv4); default port 7799
        server: String,
        /// Timeout of the connection attempt in seconds
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
    },
}

const PROBE_PORT: u16 = 7799;

const RUN_HELP: &str = "\
Examples:
  landbridge lab run labs/two-sites.toml -- landbridge run -n 4 \\
      --ranks-per-node 1 ./ring
  landbridge lab run labs/grid5000.toml -- bash
  landbridge lab run labs/two-sites.toml -- landbridge lab on south-gw -- \\
      ip address

The command finds LANDBRIDGE_TOPOLOGY set to a topology of the lab, so
`landbridge run` in it needs no --topology. Its exit code becomes that of this
program; 125 means that the lab could not be built, 2 that the file or the
command line is wrong. Without root, namespaces are made where user namespaces
are allowed.

How a lab file is written: see labs/two-sites.toml, which explains every key.";

const ON_HELP: &str = "\
Example, in a shell of `landbridge lab run labs/two-sites.toml -- bash`:
  landbridge lab on south-1 -- ip address";

const PROBE_HELP: &str = "\
Example:
  landbridge lab run labs/two-sites-routed.toml -- bash
  landbridge lab on south-1 -- landbridge lab probe serve &
  landbridge lab probe delay south-1";

const INTERFACE_HELP: &str = "\
Example:
  landbridge lab interface two-rails near-1 lan1 down
                                as `ip link set lan1 down` on near-1";

const RELAY_HELP: &str = "\
Example:
  landbridge lab relay two-sites north stop
                                as `kill -STOP` of the relay of north";

const SOAK_HELP: &str = "\
Examples:
  landbridge lab soak                         half an hour of everything
  landbridge lab soak --minutes 3 --seed 7
  landbridge lab soak --faults interface,loss5 --program heat \\
      --lab labs/two-rails.toml
  landbridge lab soak --minutes 3 --seed 7 --schedule
                                              what would fail, and when

The lab has two clusters; the hosts of the first have two network interfaces
each. Every program runs once undisturbed and then in turns, one rank on each
host. The exit code is 0 only if every run ended right: exit code 0, every
message what was sent, and the heat equation's answer, bit for bit, that of a
serial run and of the undisturbed one. The same seed makes the same faults at
the same times.";

const PUNISH_HELP: &str = "\
Examples:
  landbridge lab punish                       three minutes of everything
  landbridge lab punish --minutes 60 --mean 10 --seed 7
  landbridge lab punish --program wildcards --mean 1
  landbridge lab punish --checkpoint 5        killed ranks go on from images
  landbridge lab punish --faults all --limit 300
                                              the network between two clusters
                                              fails meanwhile
  landbridge lab punish --seed 7 --schedule   who would be killed, and when

Every program runs once undisturbed and then in turns under `landbridge run
--recover`, four ranks on one host, while ranks are killed with SIGKILL: one,
two, all of them, or the one again that is just coming back. The exit code is 0
only if every run ended right: exit code 0, and the result, bit for bit, that
of the undisturbed run; where it depends on the order in which messages come,
one history that all ranks have seen alike. The same seed kills at the same
times.";

const SIMULATE_HELP: &str = "\
Examples:
  landbridge lab simulate                     10,000 honest seeds
  landbridge lab simulate --seeds 0..1000000 --jobs 8
  landbridge lab simulate --seeds 4711..4712 --trace
                                              every step of one seed
  landbridge lab simulate --hostile --seeds 0..5000
                                              one peer sends arbitrary frames
  landbridge lab simulate --recovery --seeds 0..600
                                              killed processes, logs of relays
  landbridge lab simulate --sender-logs --seeds 0..4000
                                              killed processes, logs of senders

A seed that finds a violation is printed with the command that repeats it. The
exit code is 0 if no seed has found one, else 1.";

const LINK_HELP: &str = "\
Examples:
  landbridge lab link two-sites               all links and what they have done
  landbridge lab link two-sites north-south --down
                                              cut the link
  landbridge lab link two-sites north-south --up
  landbridge lab link two-sites 'north>south' --loss 5%
                                              lose packets in one direction
  landbridge lab link two-rails near-LAN1 --loss 5%
                                              lose packets on the second rail
  landbridge lab link two-rails near-2-LAN1 --down
                                              pull the cable of one host
  landbridge lab link two-rails near-LAN1 --restore";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match act(arguments.action) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("landbridge lab: {error:#}");
            ExitCode::from(EXIT_LAB_FAILED)
        }
    }
}

/// Restores the default disposition of SIGPIPE for commands that only print: such a command ends
/// without a message, as `ls` does, when the reader of its output closes the pipe. Commands that
/// build a lab keep running, because they have to remove the lab.
fn end_without_reader(action: &Action) {
    use Action::{Check, Interface, Link, On, Relay, Simulate};
    if matches!(
        action,
        Check { .. } | On { .. } | Link(_) | Interface { .. } | Relay { .. } | Simulate(_)
    ) {
        // SAFETY: the call sets the default disposition; no handler of this program is involved.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
}

fn act(action: Action) -> anyhow::Result<u8> {
    end_without_reader(&action);
    match action {
        Action::Run { file, name, command } => match file::load(&file) {
            Ok(_) => run::run_lab(&LabRun { file, name, command }),
            Err(error) => Ok(wrong_file(&error)),
        },
        Action::Inside { file, name, lifeline, control, command } => {
            run::inside(&LabRun { file, name, command }, &Inherited { lifeline, control })
        }
        Action::Check { file } => match file::load(&file) {
            Ok(plan) => {
                print!("{plan}");
                Ok(0)
            }
            Err(error) => Ok(wrong_file(&error)),
        },
        Action::On { host, command } => on_host(&host, &command),
        Action::Link(arguments) => link(&arguments),
        Action::Interface { lab, host, device, state } => {
            ask(&lab, &format!("interface {host} {device} {state}"))
        }
        Action::Relay { lab, site, state } => ask(&lab, &format!("relay {site} {state}")),
        Action::Soak(soaking) => soaking.execute(),
        Action::Punish(punishing) => punishing.execute(),
        Action::Simulate(simulate) => Ok(simulate.execute()),
        Action::Probe { probe } => run_probe(probe),
    }
}

fn wrong_file(error: &anyhow::Error) -> u8 {
    const EXIT_USAGE: u8 = 2;
    eprintln!("landbridge lab: {error:#}");
    EXIT_USAGE
}

fn on_host(host: &str, command: &[OsString]) -> anyhow::Result<u8> {
    if !control::is_inside_any() {
        bail!(
            "`landbridge lab on` works inside a running lab; `landbridge lab run FILE -- bash` \
             starts a shell in one"
        );
    }
    let machine =
        Machine::open(host).context("`landbridge lab check FILE` prints a lab's hosts")?;
    machine.enter()?;
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    Err(error).with_context(|| format!("cannot run `{}`", command[0].to_string_lossy()))
}

/// Sends a request to a lab and prints the answer; `.` stands for the surrounding lab.
fn ask(lab: &str, request: &str) -> anyhow::Result<u8> {
    let answer = control::request(Some(lab).filter(|&name| name != "."), request)?;
    println!("{}", answer.trim_end());
    Ok(0)
}

fn link(arguments: &LinkArguments) -> anyhow::Result<u8> {
    let changes = arguments.changes();
    let request = match &arguments.link {
        Some(link) if !changes.is_empty() => format!("set {link} {}", changes.join(" ")),
        Some(_) => bail!("what about this link? See `landbridge lab link --help`"),
        None if !changes.is_empty() => {
            bail!("which link? See `landbridge lab link {}`", arguments.lab)
        }
        None => "show".to_owned(),
    };
    ask(&arguments.lab, &request)
}

impl LinkArguments {
    fn changes(&self) -> Vec<String> {
        let repair = self.repair_checksums.map(|repair| repair.to_string());
        let values = [
            ("rate", &self.rate),
            ("delay", &self.delay),
            ("jitter", &self.jitter),
            ("loss", &self.loss),
            ("duplicate", &self.duplicate),
            ("reorder", &self.reorder),
            ("reorder_by", &self.reorder_by),
            ("corrupt", &self.corrupt),
            ("repair_checksums", &repair),
            ("queue", &self.queue),
            ("mtu", &self.mtu),
        ];
        // Spaces separate the words of a request, so `5 ms` is sent as `5ms`.
        let without_spaces = |text: &str| text.split_whitespace().collect::<String>();
        let given = values
            .iter()
            .filter_map(|(key, value)| Some(format!("{key}={}", without_spaces(value.as_ref()?))));
        let switches = [("down", self.down), ("up", self.up)];
        let switched = switches.iter().filter(|(_, on)| *on).map(|(key, _)| (*key).to_owned());
        let restored = self.restore.then(|| "restore".to_owned());
        restored.into_iter().chain(given).chain(switched).collect()
    }
}

/// Time between two datagrams of a probe.
const PACE: Duration = Duration::from_millis(1);

fn run_probe(probe: Probe) -> anyhow::Result<u8> {
    match probe {
        Probe::Serve { port } => probe::serve(port)?,
        Probe::Delay { server, count } => {
            let times = probe::round_trips(address(&server)?, count)?;
            let micros = |time: Option<&Duration>| time.map_or(0, Duration::as_micros);
            let (least, median, most) = (times.first(), times.get(times.len() / 2), times.last());
            println!(
                "answers={}/{count} min_us={} median_us={} max_us={}",
                times.len(),
                micros(least),
                micros(median),
                micros(most)
            );
        }
        Probe::Rate { server, seconds } => {
            let rate = probe::rate(address(&server)?, Duration::from_secs_f64(seconds))?;
            println!("mbit_per_s={:.1}", rate / 1e6);
        }
        Probe::Echoes { server, count, bytes } => {
            let found = probe::echoes(address(&server)?, count, bytes, PACE)?;
            println!(
                "received={}/{count} corrupted={} duplicated={} reordered={}",
                found.received, found.corrupted, found.duplicated, found.reordered
            );
        }
        Probe::Loss { server, count, bytes } => {
            let seen = probe::survivors(address(&server)?, count, bytes, PACE)?;
            let words: Vec<String> = seen.iter().map(u32::to_string).collect();
            println!("{}", words.join(" "));
        }
        Probe::Connect { server, seconds } => {
            let result = probe::connect(address(&server)?, Duration::from_secs_f64(seconds));
            if let Err(error) = result {
                println!("refused: {error}");
                return Ok(1);
            }
            println!("connected");
        }
    }
    Ok(0)
}

/// Resolves `HOST` or `HOST:PORT` to an IPv4 address.
fn address(text: &str) -> anyhow::Result<SocketAddr> {
    let with_port =
        if text.contains(':') { text.to_owned() } else { format!("{text}:{PROBE_PORT}") };
    let mut found =
        with_port.to_socket_addrs().with_context(|| format!("`{text}` is no address"))?;
    found.find(SocketAddr::is_ipv4).with_context(|| format!("`{text}` has no IPv4 address"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_argument_is_explained() {
        let mut silent = Vec::new();
        collect_silent(&Arguments::command(), &mut silent);
        assert!(silent.is_empty(), "without a help: {}", silent.join(", "));
    }

    /// Of a command and of those below it: names and helps. Hidden commands are not for users.
    fn helps(command: clap::Command, name: &str, found: &mut Vec<(String, String)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            helps(below.clone(), &format!("{name} {}", below.get_name()), found);
        }
        if name != "landbridge lab" {
            found.push((name.to_owned(), command.clone().render_long_help().to_string()));
        }
    }

    #[test]
    fn the_help_of_every_command_has_an_example() {
        let mut found = Vec::new();
        helps(Arguments::command(), "landbridge lab", &mut found);
        assert!(found.len() > 12, "{found:?}");
        for (name, help) in found {
            let is_example = |line: &str| line.starts_with("  ") && line.contains(&name);
            assert!(help.lines().any(is_example), "{name} --help has no example");
        }
    }

    /// Width of most terminals, less a margin: clap breaks longer lines at this width, and the rest
    /// of each broken line gets a line of its own.
    const COLUMNS: usize = 79;

    #[test]
    fn no_line_of_a_text_below_the_options_is_broken() {
        let mut commands = vec![Arguments::command()];
        while let Some(command) = commands.pop() {
            let texts = [command.get_after_help(), command.get_after_long_help()];
            for text in texts.into_iter().flatten().map(ToString::to_string) {
                let line = text.lines().find(|line| line.chars().count() > COLUMNS);
                assert_eq!(line, None, "{}", command.get_name());
            }
            commands.extend(command.get_subcommands().cloned());
        }
    }

    fn collect_silent(command: &clap::Command, silent: &mut Vec<String>) {
        let arguments = command.get_arguments().filter(|argument| argument.get_help().is_none());
        silent.extend(arguments.map(|arg| format!("{} {}", command.get_name(), arg.get_id())));
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            collect_silent(inner, silent);
        }
    }
}
