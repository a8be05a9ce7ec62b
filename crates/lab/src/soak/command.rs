//! The subcommand `soak`.
//!
//! Outside a lab, the subcommand starts a lab whose command is this program with `--inside`. The
//! program with `--inside` finds the lab around it and runs the soak.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;

use super::fault::{FaultKind, FaultLocations};
use super::network_faults::NetworkFaults;
use super::program::{FaultMode, Placement, Program, Tools};
use super::run::{Soak, SoakOptions};
use super::schedule::FaultSchedule;
use super::tally::Tally;
use crate::net::file;
use crate::net::namespace::LAB_DIR;
use crate::net::plan::Plan;
use crate::net::run::{self, LabRun};

/// Lab description for a soak without `--lab`.
pub const DEFAULT_LAB: &str = include_str!("../../../../labs/two-rails.toml");

const EXIT_FAILED: u8 = 1;
pub(super) const EXIT_USAGE: u8 = 2;
/// Exit code after SIGINT, as shells count: 128 and the signal's number.
const EXIT_INTERRUPTED: u8 = 130;

/// Arguments of `landbridge lab soak`.
#[derive(Args)]
pub struct SoakArguments {
    /// Minutes during which faults happen; the last program then runs to its end
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Seed of the random schedule; default: a new seed in each run, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// Lab file (TOML); default: that of labs/two-rails.toml
    #[arg(long, value_name = "FILE")]
    lab: Option<PathBuf>,
    /// Kinds of faults: loss1, loss5, corrupt, reorder, duplicate, interface, slow, wan-cut,
    /// relay-stop, or `none`; default: all
    #[arg(long, value_delimiter = ',', value_name = "KIND,…")]
    faults: Vec<String>,
    /// Programs to run: imb, sums, udp, heat; default: all
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    program: Vec<Program>,
    /// Limit in seconds of one run of a program
    #[arg(long, default_value_t = 150.0, value_name = "SECONDS")]
    limit: f64,
    /// Directory with the virtual environments mpich and impi; default: build/venv in the current
    /// directory, or the one of the build directory of this program
    #[arg(long, value_name = "DIR")]
    venvs: Option<PathBuf>,
    /// Print the schedule of faults and exit
    #[arg(long)]
    schedule: bool,
    /// Run inside the lab that this subcommand has started
    #[arg(long, hide = true)]
    inside: bool,
}

impl SoakArguments {
    /// Runs the subcommand. Returns 0 if every program ended right, 1 if a program did not, 2 if
    /// the arguments are wrong, 130 if a signal ended the run.
    pub fn execute(&self) -> anyhow::Result<u8> {
        let checked = self.check();
        let (plan, kinds) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                eprintln!("landbridge lab soak: {error:#}");
                return Ok(EXIT_USAGE);
            }
        };
        let seed = self.seed.unwrap_or_else(new_seed);
        let schedule = FaultSchedule::new(seed, &kinds, &FaultLocations::of(&plan));
        if self.schedule {
            self.print(seed, schedule);
            return Ok(0);
        }
        if self.inside { self.soak(seed, &plan, schedule) } else { self.enter(seed) }
    }

    fn check(&self) -> anyhow::Result<(Plan, Vec<FaultKind>)> {
        let plan = match &self.lab {
            Some(path) => file::load(path)?,
            None => file::parse(DEFAULT_LAB, "soak")
                .map_err(|error| anyhow::anyhow!("{}", error.message))?,
        };
        let kinds = match &self.faults[..] {
            [] => FaultKind::ALL.to_vec(),
            [none] if none == "none" => Vec::new(),
            names => names
                .iter()
                .map(|name| name.parse().map_err(anyhow::Error::msg))
                .collect::<anyhow::Result<Vec<FaultKind>>>()?,
        };
        let places = FaultLocations::of(&plan);
        let impossible = kinds.iter().find(|kind| kind.specs(&places).is_empty());
        if let (Some(kind), false) = (impossible, self.faults.is_empty()) {
            bail!("`{}` can strike nowhere in this lab", kind.name());
        }
        for (name, value) in [("minutes", self.minutes), ("limit", self.limit)] {
            check_time(name, value)?;
        }
        if !self.schedule {
            self.tools(&plan)?.check(&self.programs())?;
        }
        Ok((plan, kinds))
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    fn programs(&self) -> Vec<Program> {
        chosen(&self.program, FaultMode::Soak)
    }

    fn tools(&self, plan: &Plan) -> anyhow::Result<Tools> {
        let (landbridge, venvs) = programs_and_venvs(self.venvs.as_deref())?;
        Ok(Tools {
            landbridge,
            venvs,
            dir: Path::new(LAB_DIR).join("soak"),
            ranks: plan.sites.iter().map(|site| site.hosts.len()).sum(),
            mode: FaultMode::Soak,
            run_options: ["--ranks-per-node", "1"].map(String::from).to_vec(),
            placement: Placement::Hosts,
        })
    }

    fn print(&self, seed: u64, schedule: FaultSchedule) {
        println!("seed {seed}");
        for fault in schedule.take_while(|fault| fault.from < self.time()) {
            let [from, until] = [fault.from, fault.until].map(|time| time.as_secs_f64());
            let (place, what) = (&fault.spec.location, fault.spec.kind.what());
            let number = fault.number;
            let line = format!("{number:4} {from:8.1} s to {until:8.1} s  {place}: {what}");
            if writeln!(std::io::stdout(), "{line}").is_err() {
                // The reader of the output has closed the pipe.
                return;
            }
        }
    }

    /// Starts a lab around a soak with this seed.
    fn enter(&self, seed: u64) -> anyhow::Result<u8> {
        enter("soak", self.lab.as_deref(), DEFAULT_LAB, self.arguments(seed))
    }

    /// The command-line arguments that repeat this soak with this seed.
    fn arguments(&self, seed: u64) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--seed".into(), seed.to_string().into()];
        let mut add = |name: &str, value: OsString| words.extend([name.into(), value]);
        add("--minutes", self.minutes.to_string().into());
        add("--limit", self.limit.to_string().into());
        if !self.faults.is_empty() {
            add("--faults", self.faults.join(",").into());
        }
        if !self.program.is_empty() {
            let names: Vec<&str> = self.program.iter().map(|program| program.name()).collect();
            add("--program", names.join(",").into());
        }
        for (name, path) in [("--lab", &self.lab), ("--venvs", &self.venvs)] {
            if let Some(path) = path {
                add(name, path.into());
            }
        }
        words
    }

    fn soak(&self, seed: u64, plan: &Plan, schedule: FaultSchedule) -> anyhow::Result<u8> {
        let replay = rerun_command("soak", &self.arguments(seed));
        let lab = std::env::var("LANDBRIDGE_LAB").unwrap_or_default();
        println!("soak: {replay}\nsoak: `landbridge lab link {lab}` shows the links meanwhile");
        let options = SoakOptions {
            tools: self.tools(plan)?,
            programs: self.programs(),
            time: self.time(),
            limit: Duration::from_secs_f64(self.limit),
            rerun_command: replay,
        };
        let tally = Tally::new(FaultKind::ALL.map(|kind| (kind.name(), kind.what())));
        let network_faults = NetworkFaults::new(schedule, self.time());
        let (tally, is_interrupted) = Soak::run(&options, network_faults, tally)?;
        Ok(conclude("soak", seed, &tally, is_interrupted))
    }
}

// --- functions that `punish` uses as well

/// The requested programs, or all programs of this mode.
pub(super) fn chosen(programs: &[Program], mode: FaultMode) -> Vec<Program> {
    if programs.is_empty() { mode.programs().to_vec() } else { programs.to_vec() }
}

/// Paths of `landbridge` and of the virtual environments.
pub(super) fn programs_and_venvs(given: Option<&Path>) -> anyhow::Result<(PathBuf, PathBuf)> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let bin = own.parent().unwrap_or(Path::new("."));
    let built = bin.join("../../build/venv");
    let here = Path::new("build/venv");
    let venvs = match given {
        Some(given) => given,
        None if built.exists() && !here.exists() => &built,
        None => here,
    };
    // Ranks run in other directories, so the path is absolute. Links in it belong to the
    // environments and stay.
    Ok((bin.join("landbridge"), std::path::absolute(venvs)?))
}

/// Starts this subcommand with `--inside` in a lab, described by a file or by `text`.
pub(super) fn enter(
    name: &str,
    lab: Option<&Path>,
    text: &str,
    words: Vec<OsString>,
) -> anyhow::Result<u8> {
    let (file, _kept_open) = match lab {
        Some(path) => (path.to_owned(), None),
        None => unnamed_file(text).map(|(path, fd)| (path, Some(fd)))?,
    };
    let mut command = vec![std::env::current_exe()?.into_os_string()];
    command.extend([name, "--inside"].map(OsString::from));
    command.extend(words);
    let lab_name = format!("{name}-{}", std::process::id());
    run::run_lab(&LabRun { file, name: Some(lab_name), command })
}

/// The command line that repeats this run.
pub(super) fn rerun_command(name: &str, words: &[OsString]) -> String {
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    format!("landbridge lab {name} {}", words.join(" "))
}

/// Prints the table and the verdict. Returns the exit code.
pub(super) fn conclude(name: &str, seed: u64, tally: &Tally, is_interrupted: bool) -> u8 {
    println!("\n{tally}");
    let verdict = match (tally.is_all_right(), tally.has_failures()) {
        (_, true) => "FAILED",
        (true, false) => "every program ended right",
        (false, false) => "no program has ended",
    };
    match is_interrupted {
        true => println!("{name}: interrupted; until then {verdict}; seed {seed}"),
        false => println!("{name}: {verdict}; seed {seed}"),
    }
    match (is_interrupted, tally.is_all_right()) {
        (true, _) => EXIT_INTERRUPTED,
        (false, true) => 0,
        (false, false) => EXIT_FAILED,
    }
}

/// Checks that a time is between 0 and one week; `name` is the option.
pub(super) fn check_time(name: &str, value: f64) -> anyhow::Result<()> {
    // Seconds of one week.
    if !(0.0..=604_800.0).contains(&value) {
        bail!("--{name} {value} is no time that one can wait");
    }
    Ok(())
}

pub(super) fn new_seed() -> u64 {
    const SHORT_ENOUGH_TO_TYPE: u64 = 1_000_000;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u64 % SHORT_ENOUGH_TO_TYPE
}

/// A file with this text and without a name, and the path by which this process and its children
/// read it.
fn unnamed_file(text: &str) -> anyhow::Result<(PathBuf, OwnedFd)> {
    let fd = rustix::fs::memfd_create("lab.toml", rustix::fs::MemfdFlags::empty())?;
    std::fs::File::from(fd.try_clone()?).write_all(text.as_bytes())?;
    Ok((PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())), fd))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct SoakCli {
        #[command(flatten)]
        soak: SoakArguments,
    }

    #[test]
    fn the_arguments_of_a_rerun_say_the_same() {
        let line = "x --minutes 0.5 --seed 9 --faults loss1,wan-cut --program heat --lab a.toml";
        let soak = SoakCli::parse_from(line.split(' ')).soak;
        let words = soak.arguments(9);
        let again =
            SoakCli::parse_from([OsString::from("x")].into_iter().chain(words.clone())).soak;
        assert_eq!(again.arguments(9), words);
        assert_eq!(again.seed, Some(9));
        assert_eq!(again.faults, ["loss1", "wan-cut"]);
        assert_eq!(again.time(), Duration::from_secs(30));
    }

    #[test]
    fn the_default_lab_can_fail_in_every_way() {
        let plan = file::parse(DEFAULT_LAB, "soak").unwrap();
        let places = FaultLocations::of(&plan);
        assert!(FaultKind::ALL.iter().all(|kind| !kind.specs(&places).is_empty()));
    }
}
