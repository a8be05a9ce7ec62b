//! Several programs in one job: `landbridge run -n 1 ./master : -n 3 ./worker`. Options in front of
//! the first program hold for all programs; options behind a `:` hold only for the program there.
//! Ranks are numbered across all programs, in the order of the programs, whose numbers are
//! MPI_APPNUM.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cli::{ApplicationArguments, RunArguments};
use crate::control::spawn_order::{Application, Task};

/// The word that separates two programs.
const SEPARATOR: &str = ":";
/// Prefix of the variables of settings. Settings hold for a job, not for one of its programs.
const SETTINGS: &str = "LANDBRIDGE_";

const ONLY: &str =
    "behind a `:` go only -n, -x and --wdir; other options stand before the first program";

/// The programs behind the first one, each with its number of ranks.
pub struct Others {
    /// Number of ranks of the first program, if there are other programs.
    first_ranks: Option<u32>,
    others: Vec<(u32, ApplicationArguments)>,
}

/// Removes the programs behind the first one from the command line, and sets the number of ranks on
/// the command line to the sum over all programs.
pub fn split(arguments: &mut RunArguments) -> Result<Others> {
    let words = std::mem::take(&mut arguments.program);
    let mut parts = words.split(|word| word == SEPARATOR);
    arguments.program = parts.next().unwrap_or_default().to_vec();
    check_program(&arguments.program)?;
    let others = parts.map(read).collect::<Result<Vec<_>>>()?;
    if others.is_empty() {
        return Ok(Others { first_ranks: None, others });
    }
    let name = arguments.program[0].as_str();
    let first = arguments.ranks.with_context(|| lacks_ranks(name))?;
    let all = others.iter().try_fold(first, |sum, (ranks, _)| sum.checked_add(*ranks));
    arguments.ranks = Some(all.context("more ranks than can be counted")?);
    Ok(Others { first_ranks: Some(first), others })
}

fn lacks_ranks(program: &str) -> String {
    format!("say how many ranks run {program}: each of several programs needs its own -n")
}

fn read(words: &[String]) -> Result<(u32, ApplicationArguments)> {
    if words.is_empty() {
        bail!("there is no program behind a `{SEPARATOR}`, which separates the programs of a job");
    }
    let arguments = ApplicationArguments::read(words).map_err(|error| {
        let line = error.to_string().lines().next().unwrap_or_default().to_string();
        let line = line.trim_start_matches("error: ").to_string();
        anyhow::anyhow!("behind `{SEPARATOR}`: {line} ({ONLY})")
    })?;
    check_program(&arguments.program).map_err(|error| anyhow::anyhow!("{error} ({ONLY})"))?;
    let ranks = arguments.ranks.with_context(|| lacks_ranks(&arguments.program[0]))?;
    if let Some(word) = arguments.environment.iter().find(|word| word.starts_with(SETTINGS)) {
        bail!(
            "-x {word} behind `{SEPARATOR}`: settings hold for the whole job; write it before the \
             first program"
        );
    }
    Ok((ranks, arguments))
}

impl Others {
    /// All programs of the job. `size` is the number of ranks of the job.
    pub fn applications(&self, arguments: &RunArguments, size: u32) -> Result<Vec<Application>> {
        let current = std::env::current_dir().context("this directory does not exist any more")?;
        let all = arguments.wdir.as_ref().map_or(current.clone(), |wdir| current.join(wdir));
        let mut common = exported(&arguments.environment)?;
        common.retain(|(name, _)| !name.starts_with(SETTINGS));
        let first = task(&arguments.program, &all, common.clone())?;
        let ranks = self.first_ranks.unwrap_or(size);
        let mut applications = vec![Application { ranks, task: first }];
        for (ranks, own) in &self.others {
            let wdir = own.wdir.as_ref().map_or(all.clone(), |wdir| current.join(wdir));
            let environment = [common.clone(), exported(&own.environment)?].concat();
            let task = task(&own.program, &wdir, environment)?;
            applications.push(Application { ranks: *ranks, task });
        }
        Ok(applications)
    }
}

fn task(words: &[String], wdir: &Path, environment: Vec<(String, String)>) -> Result<Task> {
    let (program, arguments) = words.split_first().context("no program to run")?;
    Ok(Task {
        program: program.clone(),
        arguments: arguments.to_vec(),
        wdir: wdir.display().to_string(),
        search: String::new(),
        environment,
    })
}

/// A word in place of the program that begins with `-` is an unknown option.
pub fn check_program(words: &[String]) -> Result<()> {
    match words.first() {
        Some(name) if name.starts_with('-') => {
            let meant = RunArguments::nearest_option(name);
            let meant = meant.map_or(String::new(), |option| format!(" (--{option} is meant?)"));
            bail!(
                "there is no option {name}{meant}; `landbridge run --help` shows them (a program \
                 of this name is started as ./{name})"
            )
        }
        _ => Ok(()),
    }
}

/// The variables that `-x` sets.
pub fn exported(words: &[String]) -> Result<Vec<(String, String)>> {
    let own = |name: &str| std::env::var_os(name);
    words.iter().map(|setting| setting_of(setting, own)).collect()
}

/// A variable for the ranks: `NAME=VALUE`, or `NAME` with the launcher's own value.
fn setting_of(setting: &str, own: impl Fn(&str) -> Option<OsString>) -> Result<(String, String)> {
    match setting.split_once('=') {
        Some(("", _)) => bail!("-x {setting}: a variable needs a name"),
        Some((name, value)) => Ok((name.to_string(), value.to_string())),
        None => match own(setting).map(OsString::into_string) {
            Some(Ok(value)) => Ok((setting.to_string(), value)),
            Some(Err(_)) => bail!("-x {setting}: its value is not UTF-8 and cannot be handed on"),
            None => bail!("-x {setting}: it is not set here; write {setting}=VALUE"),
        },
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn run(line: &str) -> RunArguments {
        let words = ["lb", "run"].into_iter().chain(line.split(' '));
        let Command::Run(run) = Cli::try_parse_from(words).ok().unwrap().command else { panic!() };
        *run
    }

    #[test]
    fn programs_have_their_own_ranks_variables_and_directories() {
        let mut arguments =
            run("-n 2 -x A=1 --wdir / ./a -x : -np 3 -x A=2 ./b --wdir x : -n 1 --wd /tmp c");
        let others = split(&mut arguments).unwrap();
        assert_eq!((arguments.ranks, arguments.program.len()), (Some(6), 2));
        let found = others.applications(&arguments, 6).unwrap();
        let described = found.iter().map(|it| {
            let Task { program, arguments, wdir, environment, .. } = &it.task;
            let values = environment.iter().map(|(name, value)| format!("{name}={value}"));
            let values = values.collect::<Vec<_>>().join(",");
            format!("{} {program} {} {wdir} {values}", it.ranks, arguments.join(" "))
        });
        let expected = ["2 ./a -x / A=1", "3 ./b --wdir x / A=1,A=2", "1 c  /tmp A=1"];
        assert_eq!(described.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn one_program_has_all_ranks() {
        let mut arguments = run("-n 2 ./a ::");
        let others = split(&mut arguments).unwrap();
        let found = others.applications(&arguments, 5).unwrap();
        assert_eq!((found.len(), found[0].ranks, arguments.ranks), (1, 5, Some(2)));
    }

    #[test]
    fn mistakes_behind_a_separator_are_reported() {
        let rows = [
            ("./a : -n 1 ./b", "how many ranks run ./a"),
            ("-n 1 ./a : ./b", "how many ranks run ./b"),
            ("-n 1 ./a :", "no program behind"),
            ("-n 1 ./a : : ./b", "no program behind"),
            ("-n 1 ./a : -n 1", "required arguments"),
            ("-n 1 ./a : -n 1 --clusters 2 ./b", "stand before the first program"),
            ("-n 1 ./a : -n 1 -x LANDBRIDGE_UDP=on ./b", "settings hold for the whole job"),
            ("-n 4294967295 ./a : -n 1 ./b", "can be counted"),
            ("-n 2 --recovr ./a", "no option --recovr (--recover is meant?);"),
            ("--checkpont=5s -n 2 ./a", " (--checkpoint is meant?);"),
            ("--xyzzy ./a", "no option --xyzzy; `landbridge run --help`"),
            ("-q ./a", "no option -q; `landbridge run --help`"),
        ];
        for (line, expected) in rows {
            let error = split(&mut run(line)).err().unwrap().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn settings_are_read() {
        let own = |name: &str| match name {
            "SET" => Some(OsString::from("x")),
            "BYTES" => Some(std::os::unix::ffi::OsStringExt::from_vec(vec![0xff])),
            _ => None,
        };
        let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
        assert_eq!(setting_of("A=b=c", own).unwrap(), pair("A", "b=c"));
        assert_eq!(setting_of("SET", own).unwrap(), pair("SET", "x"));
        assert!(setting_of("UNSET", own).unwrap_err().to_string().contains("UNSET=VALUE"));
        assert!(setting_of("BYTES", own).unwrap_err().to_string().contains("not UTF-8"));
        assert!(setting_of("=x", own).is_err());
    }
}
