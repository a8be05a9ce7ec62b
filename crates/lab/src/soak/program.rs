//! The programs of a soak, and the checks of their output.
//!
//! The programs know nothing of Landbridge or of the lab: a benchmark from the wheels, and Python
//! scripts that are compiled into this program. So a soak needs no source tree, only the virtual
//! environments with the MPI library. The programs of `punish` repeat their actions when they get
//! the same messages, times and random numbers; the benchmark among them depends much on the time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::{fs, io};

use anyhow::bail;
use landbridge_proto::setting::{RECOVER_CLOCKS, Value};

const HEAT: &str = include_str!("../../../../examples/heat.py");
const SUMS: &str = include_str!("sums.py");
const WILDCARDS: &str = include_str!("wildcards.py");
const RING: &str = include_str!("../../../../tests/system/programs/ring.py");
const FILES: &str = include_str!("../../../../tests/system/programs/random_files.py");

/// Patterns of Intel's benchmark: two ranks, neighbours, and all ranks.
const BENCHMARKS: [&str; 5] = ["PingPong", "Exchange", "Bcast", "Allreduce", "Alltoall"];
/// Sizes up to 1 MiB, at most 20 repetitions and 0.1 seconds for each.
const BENCHMARK_BOUNDS: [&str; 6] = ["-msglog", "0:20", "-iter", "20", "-time", "0.1"];
/// Seconds of a round of messages, and the size of a plate whose computation takes about as long
/// across a WAN of 5 ms.
const SUMS_BOUNDS: [&str; 2] = ["--seconds", "8"];
const HEAT_BOUNDS: [&str; 4] = ["--size", "128", "--steps", "400"];
/// Arguments of the programs under `punish`: some seconds each on one machine.
const PUNISHED_BENCHMARK: [&str; 6] = ["-msglog", "0:12", "-iter", "1000", "-time", "0.2"];
const PUNISHED_SUMS: [&str; 4] = ["--turns", "25", "--largest", "70000"];
const PUNISHED_HEAT: [&str; 4] = ["--size", "128", "--steps", "1500"];
const PUNISHED_RING: [&str; 2] = ["--rounds", "600"];
const PUNISHED_WILDCARDS: [&str; 2] = ["--rounds", "300"];
const PUNISHED_FILES: [&str; 2] = ["--plans", "250"];
/// Variable in which a lab passes its topology to `landbridge run`.
const TOPOLOGY: &str = "LANDBRIDGE_TOPOLOGY";
/// Name of the file with the output of a program.
pub const OUTPUT: &str = "output";

/// A program of a soak.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Program {
    Imb,
    Sums,
    /// [`Program::Sums`] over UDP.
    Udp,
    Heat,
    /// Numbers that pass around a ring and are summed; the program prints all of them.
    Ring,
    /// Messages received with wildcards, in any order.
    Wildcards,
    /// Random programs of file calls, whose results are known.
    Files,
}

/// Kind of disturbance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultMode {
    /// The network fails.
    Soak,
    /// Ranks are killed.
    Punish,
}

/// Tools and options for running programs.
pub struct Tools {
    pub landbridge: PathBuf,
    /// Directory with the virtual environments `mpich` and `impi`.
    pub venvs: PathBuf,
    /// Directory that the soak has to itself.
    pub dir: PathBuf,
    pub ranks: usize,
    pub mode: FaultMode,
    /// Options of `landbridge run` besides the number of ranks.
    pub run_options: Vec<String>,
    pub placement: Placement,
}

/// Hosts of the lab on which programs run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// The host of the lab's command.
    One,
    /// All hosts of the lab.
    Hosts,
    /// The gateways of the lab, on which the relays run.
    Gateways,
}

impl FaultMode {
    /// The programs of this mode.
    pub fn programs(self) -> &'static [Program] {
        match self {
            FaultMode::Soak => &[Program::Imb, Program::Sums, Program::Udp, Program::Heat],
            FaultMode::Punish => &[
                Program::Imb,
                Program::Heat,
                Program::Sums,
                Program::Udp,
                Program::Ring,
                Program::Wildcards,
                Program::Files,
            ],
        }
    }
}

impl Program {
    const ALL: [Program; 7] = [
        Program::Imb,
        Program::Sums,
        Program::Udp,
        Program::Heat,
        Program::Ring,
        Program::Wildcards,
        Program::Files,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Program::Imb => "imb",
            Program::Sums => "sums",
            Program::Udp => "udp",
            Program::Heat => "heat",
            Program::Ring => "ring",
            Program::Wildcards => "wildcards",
            Program::Files => "files",
        }
    }

    /// Command that runs the program by `landbridge run`.
    pub fn command(self, tools: &Tools) -> Command {
        let mut command = Command::new(&tools.landbridge);
        command.args(["run", "-n", &tools.ranks.to_string()]).args(&tools.run_options);
        match tools.placement {
            Placement::One => _ = command.env_remove(TOPOLOGY),
            Placement::Hosts => (),
            Placement::Gateways => _ = command.env(TOPOLOGY, tools.dir.join("gateways.toml")),
        }
        if self == Program::Udp {
            command.args(["--set", "udp=on", "--set", "log=info"]);
        }
        command.arg("--").arg(self.needs(&tools.venvs));
        match self {
            Program::Imb => {
                let bounds = tools.either(&BENCHMARK_BOUNDS, &PUNISHED_BENCHMARK);
                command.args(BENCHMARKS).args(bounds);
                command.args(["-npmin", &tools.ranks.to_string()]);
                // The benchmark comes with Intel MPI, which has the same binary interface as MPICH.
                command.env("LD_LIBRARY_PATH", tools.venvs.join("mpich/lib"));
                // If its time is over before it has measured anything, the benchmark sends memory
                // that it has never written. A fixed content of fresh memory keeps replays equal;
                // otherwise the memory has bytes of files that were read before.
                command.env("MALLOC_PERTURB_", "255");
            }
            Program::Sums | Program::Udp => {
                // Under `punish` the amount of work must not depend on the time.
                let is_soak = tools.mode == FaultMode::Soak;
                let bounds = if is_soak { &SUMS_BOUNDS[..] } else { &PUNISHED_SUMS };
                command.arg(tools.dir.join("sums.py")).args(bounds);
            }
            Program::Heat => {
                let bounds = tools.either(&HEAT_BOUNDS, &PUNISHED_HEAT);
                command.arg(tools.dir.join("heat.py")).args(bounds);
                command.arg("--check").arg("--picture").arg(self.result(&tools.dir));
            }
            Program::Ring => {
                command.arg(tools.dir.join("ring.py")).args(PUNISHED_RING);
            }
            Program::Wildcards => {
                command.arg(tools.dir.join("wildcards.py")).args(PUNISHED_WILDCARDS);
            }
            Program::Files => {
                command.arg(tools.dir.join("random_files.py")).arg(self.folder(&tools.dir));
                command.args(PUNISHED_FILES);
            }
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("OPENBLAS_NUM_THREADS", "1");
        if tools.mode == FaultMode::Soak || !records_nondeterminism() {
            // Seed of Python's hashes, which determine the order of its sets.
            command.env("PYTHONHASHSEED", "0");
        }
        command.env("TMPDIR", &tools.dir);
        command
    }

    /// Checks the output of a run that ended with exit code 0. `Err`: what is wrong.
    pub fn judge(self, output: &str) -> Result<(), String> {
        match self {
            Program::Imb => {
                let is_done = |name: &&str| output.contains(&format!("# Benchmarking {name}"));
                let missing: Vec<&str> =
                    BENCHMARKS.into_iter().filter(|name| !is_done(name)).collect();
                let is_over = output.contains("# All processes entering MPI_Finalize");
                match (missing.is_empty(), is_over) {
                    (true, true) => Ok(()),
                    (false, _) => Err(format!("no table of {}", missing.join(", "))),
                    (true, false) => Err("it did not reach its end".to_owned()),
                }
            }
            Program::Sums | Program::Udp if output.contains("\ndone: 0\n") => {
                Err("it compared nothing".to_owned())
            }
            // At its end a process names the paths that its messages have taken.
            Program::Udp if output.contains("\ndone: ") && !output.contains(": udp ") => {
                Err("no message went over UDP".to_owned())
            }
            Program::Sums | Program::Udp if output.contains("\ndone: ") => Ok(()),
            Program::Sums | Program::Udp => Err("it did not reach its end".to_owned()),
            Program::Heat if output.contains("identical to the serial run") => Ok(()),
            Program::Heat => Err("its answer is not that of a serial run".to_owned()),
            // The output is compared with that of the undisturbed run.
            Program::Ring => Ok(()),
            Program::Files if output.contains("\nwrong: plan ") => {
                Err("an answer is not that of the model".to_owned())
            }
            Program::Files if output.contains(" calls, wrong 0, ") => Ok(()),
            Program::Files => Err("it did not reach its end".to_owned()),
            Program::Wildcards => check_delivery_order(output),
        }
    }

    /// The last line of a job that was killed within a call whose effect is unknown: either the
    /// call or another rank has created the file or name. Such a refusal is rare and no failure;
    /// the job reports it and ends with an exit code other than 0.
    pub fn refusal(self, output: &str) -> Option<String> {
        let is_refusal = |line: &&str| {
            let within = ["killed within its open", "killed within its change of a name"];
            line.starts_with("landbridge")
                && within.iter().any(|what| line.contains(what))
                && line.contains("cannot be known")
        };
        let is_right = self == Program::Files && !output.contains("\nwrong: plan ");
        output.lines().find(is_refusal).filter(|_| is_right).map(str::to_owned)
    }

    /// Bytes of the output that must be equal in every run; `None`: no output is compared.
    pub fn outcome(self, dir: &Path) -> Option<Vec<u8>> {
        match self {
            Program::Ring | Program::Files => {
                let output = fs::read_to_string(dir.join(OUTPUT)).ok()?;
                let own = output.lines().filter(|line| !line.starts_with("landbridge"));
                let mut lines: Vec<&str> = own.collect();
                lines.sort_unstable();
                Some(lines.join("\n").into_bytes())
            }
            _ => fs::read(self.result(dir)).ok(),
        }
    }

    /// Path of the result file that some programs write.
    pub fn result(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.result", self.name()))
    }

    /// Path of the directory in which the program creates files.
    fn folder(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.folder", self.name()))
    }

    /// Removes the files of an earlier run.
    pub fn prepare(self, dir: &Path) -> io::Result<()> {
        let _ = fs::remove_file(self.result(dir));
        let _ = fs::remove_dir_all(self.folder(dir));
        fs::create_dir(self.folder(dir))
    }

    /// Path of the file that the program needs.
    fn needs(self, venvs: &Path) -> PathBuf {
        venvs.join(if self == Program::Imb { "impi/bin/IMB-MPI1" } else { "mpich/bin/python" })
    }
}

/// A topology of the lab with all ranks on the gateways, which usually have no slots.
fn on_gateways(topology: &str, ranks: usize) -> String {
    const NONE: &str = "slots = 0";
    let is_gateway = |line: &&str| line.trim() == NONE;
    let gateways = topology.lines().filter(is_gateway).count().max(1);
    let room = format!("slots = {}", ranks.div_ceil(gateways));
    let moved = topology.lines().map(|line| match line.trim() {
        NONE => room.as_str(),
        own if own.starts_with("slots = ") => NONE,
        _ => line,
    });
    moved.collect::<Vec<_>>().join("\n") + "\n"
}

/// Whether clocks and random numbers are recorded for the next incarnation of a rank: true unless
/// the user's settings turn the recording off.
fn records_nondeterminism() -> bool {
    let said = std::env::var(RECOVER_CLOCKS.variable()).unwrap_or_default();
    said.is_empty() || RECOVER_CLOCKS.parse(&said) != Ok(Value::Switch(false))
}

/// Checks that the messages that the receiver prints are those that the senders print: each
/// position exactly once, without a gap.
fn check_delivery_order(output: &str) -> Result<(), String> {
    let printed = |word: &str| {
        let lines = output.lines().filter_map(|line| line.strip_prefix(word)?.split_once(": "));
        let mut all: Vec<(u64, &str)> =
            lines.filter_map(|(place, what)| Some((place.parse().ok()?, what))).collect();
        all.sort_unstable();
        all
    };
    let (heard, places) = (printed("heard "), printed("place "));
    let is_whole = heard.iter().zip(0..).all(|((place, _), number)| *place == number);
    match (heard.is_empty(), is_whole, heard == places) {
        (true, ..) => Err("nothing was taken".to_owned()),
        (_, true, true) => Ok(()),
        (_, false, _) => Err("places are taken twice, or by nobody".to_owned()),
        (_, _, false) => {
            let differs = heard.iter().zip(&places).find(|(one, other)| one != other);
            Err(format!("the history is not one: {differs:?}"))
        }
    }
}

impl FromStr for Program {
    type Err = String;
    fn from_str(text: &str) -> Result<Program, String> {
        let names = Program::ALL.map(Program::name).join(", ");
        let found = Program::ALL.into_iter().find(|program| program.name() == text);
        found.ok_or_else(|| format!("there is no program `{text}`; there are {names}"))
    }
}

impl Tools {
    /// Checks that the files for these programs exist. `Err`: which file is missing, and how to
    /// build it.
    pub fn check(&self, programs: &[Program]) -> anyhow::Result<()> {
        let needed = programs.iter().map(|program| program.needs(&self.venvs));
        for file in needed.chain([self.landbridge.clone()]) {
            if !file.exists() {
                bail!(
                    "{} is not there: `make build wheels` makes it (--venvs DIR: the folder with \
                     the environments `mpich` and `impi`; --program: what to run)",
                    file.display()
                );
            }
        }
        Ok(())
    }

    /// Creates the directory of the soak, with the scripts.
    pub fn unpack(&self) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        if self.placement == Placement::Gateways {
            let topology = fs::read_to_string(std::env::var_os(TOPOLOGY).unwrap_or_default())?;
            fs::write(self.dir.join("gateways.toml"), on_gateways(&topology, self.ranks))?;
        }
        fs::write(self.dir.join("heat.py"), HEAT)?;
        fs::write(self.dir.join("ring.py"), RING)?;
        fs::write(self.dir.join("wildcards.py"), WILDCARDS)?;
        fs::write(self.dir.join("random_files.py"), FILES)?;
        fs::write(self.dir.join("sums.py"), SUMS)
    }

    fn either<'a>(&self, soak: &'a [&'a str], punish: &'a [&'a str]) -> &'a [&'a str] {
        // Across a WAN the shorter arguments take long enough.
        match (self.mode, self.placement) {
            (FaultMode::Soak, _) | (FaultMode::Punish, Placement::Gateways) => soak,
            (FaultMode::Punish, _) => punish,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_take_what_hosts_had() {
        let lab = "[[host]]\nslots = 0\n[[host]]\nslots = 7\n[[host]]\nslots = 0\n";
        let moved = "[[host]]\nslots = 2\n[[host]]\nslots = 0\n[[host]]\nslots = 2\n";
        assert_eq!(on_gateways(lab, 3), moved);
    }

    #[test]
    fn delivery_order_must_agree_on_both_sides() {
        let one = "heard 0: rank 2 message 0\nplace 1: rank 1 message 0\nlandbridge: x\n\
                   place 0: rank 2 message 0\nheard 1: rank 1 message 0\n";
        assert_eq!(Program::Wildcards.judge(one), Ok(()));
        let other = one.replace("heard 1: rank 1 message 0", "heard 1: rank 1 message 1");
        assert!(Program::Wildcards.judge(&other).unwrap_err().contains("not one"));
        let twice = format!("{one}heard 1: rank 1 message 0\n");
        assert!(Program::Wildcards.judge(&twice).unwrap_err().contains("twice"));
        let gap = one.replace("1:", "2:");
        assert!(Program::Wildcards.judge(&gap).is_err());
    }

    #[test]
    fn a_program_that_says_too_little_has_failed() {
        for program in Program::ALL {
            assert_eq!(program.name().parse(), Ok(program));
            // The output of Ring is compared with the undisturbed run only.
            assert!(program == Program::Ring || program.judge("").is_err());
        }
        let mut text: String =
            BENCHMARKS.iter().map(|name| format!("# Benchmarking {name} \n")).collect();
        let error = Program::Imb.judge(&text).unwrap_err();
        assert!(error.contains("its end"), "{error}");
        text += "# All processes entering MPI_Finalize";
        assert_eq!(Program::Imb.judge(&text), Ok(()));
        let error = Program::Imb.judge(&text.replace("Bcast", "Bcost")).unwrap_err();
        assert_eq!(error, "no table of Bcast");
        let done = "started\ndone: 12\n";
        assert_eq!(Program::Sums.judge(done), Ok(()));
        assert!(Program::Udp.judge(done).unwrap_err().contains("over UDP"));
        let paths = format!("{done}landbridge: rank 1: udp a to b: 2000 bytes sent\n");
        assert_eq!(Program::Udp.judge(&paths), Ok(()));
        let files = "rank 0: 9 plans, 70 calls, wrong 0, digest 17\n";
        assert_eq!(Program::Files.judge(files), Ok(()));
        assert!(Program::Files.judge(&files.replace("wrong 0", "wrong 1")).is_err());
        let refused =
            "x\nlandbridge[7]: Warn: killed within its open of F: what it did cannot be known\n";
        assert!(
            Program::Files.refusal(refused).is_some() && Program::Heat.refusal(refused).is_none()
        );
        assert_eq!(Program::Files.refusal(&format!("{refused}\nwrong: plan 3\n")), None);
        assert_eq!(Program::Files.refusal("landbridge: exit code 1\n"), None);
        assert!(Program::Sums.judge("started\ndone: 0\n").unwrap_err().contains("nothing"));
        assert!(Program::Heat.judge("heat: answer DIFFERS from the serial run").is_err());
    }
}
