//! What a soak runs, and how it is told that it ended right.
//!
//! None of these programs knows of Landbridge or of the lab: a benchmark from the wheels and two
//! Python scripts, which are part of this program so that a soak needs no checkout beside the
//! virtual environments with the MPI library.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::{fs, io};

use anyhow::bail;

const HEAT: &str = include_str!("../../../../examples/heat.py");
const SUMS: &str = include_str!("sums.py");

/// Patterns of Intel's benchmark: two ranks, neighbours, all of them, and the two in one.
const BENCHMARKS: [&str; 5] = ["PingPong", "Exchange", "Bcast", "Allreduce", "Alltoall"];
/// Sizes up to 1 MiB; repetitions and seconds for each at most.
const BENCHMARK_BOUNDS: [&str; 6] = ["-msglog", "0:20", "-iter", "20", "-time", "0.1"];
/// Seconds of a round of messages, and a plate that takes about as long across a WAN of 5 ms.
const SUMS_BOUNDS: [&str; 2] = ["--seconds", "8"];
const HEAT_BOUNDS: [&str; 4] = ["--size", "128", "--steps", "400"];

/// A program that is run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Program {
    Imb,
    Sums,
    /// [`Program::Sums`] over UDP.
    Udp,
    Heat,
}

/// What programs are run with.
pub struct Tools {
    pub landbridge: PathBuf,
    /// A folder with the virtual environments `mpich` and `impi`.
    pub venvs: PathBuf,
    /// A folder of the soak's own.
    pub dir: PathBuf,
    /// One on each host.
    pub ranks: usize,
}

impl Program {
    pub const ALL: [Program; 4] = [Program::Imb, Program::Sums, Program::Udp, Program::Heat];

    /// As the command line writes it.
    pub fn name(self) -> &'static str {
        match self {
            Program::Imb => "imb",
            Program::Sums => "sums",
            Program::Udp => "udp",
            Program::Heat => "heat",
        }
    }

    /// `landbridge run` of it, one rank on each host.
    pub fn command(self, tools: &Tools) -> Command {
        let mut command = Command::new(&tools.landbridge);
        command.args(["run", "-n", &tools.ranks.to_string(), "--ranks-per-node", "1"]);
        if self == Program::Udp {
            command.args(["--set", "udp=on"]);
        }
        command.arg("--").arg(self.needs(&tools.venvs));
        match self {
            Program::Imb => {
                command.args(BENCHMARKS).args(BENCHMARK_BOUNDS);
                command.args(["-npmin", &tools.ranks.to_string()]);
                // It comes with Intel MPI, and both libraries have the same binary interface.
                command.env("LD_LIBRARY_PATH", tools.venvs.join("mpich/lib"));
            }
            Program::Sums | Program::Udp => {
                command.arg(tools.dir.join("sums.py")).args(SUMS_BOUNDS);
            }
            Program::Heat => {
                command.arg(tools.dir.join("heat.py")).args(HEAT_BOUNDS);
                command.arg("--check").arg("--picture").arg(self.result(&tools.dir));
            }
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("OPENBLAS_NUM_THREADS", "1");
        command.env("TMPDIR", &tools.dir);
        command
    }

    /// Whether a run that ended with exit code 0 did what it should; the words say what is wrong.
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
            Program::Sums | Program::Udp if output.contains("\ndone: ") => Ok(()),
            Program::Sums | Program::Udp => Err("it did not reach its end".to_owned()),
            Program::Heat if output.contains("identical to the serial run") => Ok(()),
            Program::Heat => Err("its answer is not that of a serial run".to_owned()),
        }
    }

    /// The file that every run must write alike, bit for bit.
    pub fn result(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.result", self.name()))
    }

    /// The file without which it cannot run.
    fn needs(self, venvs: &Path) -> PathBuf {
        venvs.join(if self == Program::Imb { "impi/bin/IMB-MPI1" } else { "mpich/bin/python" })
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
    /// Says what is missing for these programs, and how to get it.
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

    /// Makes the folder with the scripts in it.
    pub fn unpack(&self) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        fs::write(self.dir.join("heat.py"), HEAT)?;
        fs::write(self.dir.join("sums.py"), SUMS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_says_too_little_has_failed() {
        for program in Program::ALL {
            assert_eq!(program.name().parse(), Ok(program));
            assert!(program.judge("").is_err());
        }
        let mut text: String =
            BENCHMARKS.iter().map(|name| format!("# Benchmarking {name} \n")).collect();
        let error = Program::Imb.judge(&text).unwrap_err();
        assert!(error.contains("its end"), "{error}");
        text += "# All processes entering MPI_Finalize";
        assert_eq!(Program::Imb.judge(&text), Ok(()));
        let error = Program::Imb.judge(&text.replace("Bcast", "Bcost")).unwrap_err();
        assert_eq!(error, "no table of Bcast");
        assert_eq!(Program::Sums.judge("started\ndone: 12\n"), Ok(()));
        assert!(Program::Heat.judge("heat: answer DIFFERS from the serial run").is_err());
    }
}
