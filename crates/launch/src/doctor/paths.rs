//! Checks which paths work between two processes: one job of two test processes for each path, with
//! the first MPI library that `landbridge run` can start and with which all paths work.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use super::{Finding, Grade, last_words, own_name, progress};
use crate::mpi::detect::{DetectedLibrary, Family};
use crate::sibling;
use crate::spawn::ssh::quote;

/// Timeout of a job in seconds; a longer job hangs.
const TIMEOUT_S: &str = "30";

/// Names of the paths, with the options that restrict a job to the path.
const PATHS: [(&str, &[&str]); 3] = [
    ("shm", &["-n", "2", "--set", "paths=shm"]),
    ("tcp", &["-n", "2", "--set", "paths=tcp"]),
    ("relay", &["-n", "2", "--clusters", "2", "--set", "paths=relay"]),
];

/// Variables that are removed for the test jobs, so that neither a topology nor a provider from
/// this shell changes the path.
const NOT_OURS: [&str; 2] = ["LANDBRIDGE_TOPOLOGY", "FI_PROVIDER"];

/// Runs the check. `said` holds the options that set settings.
pub fn check(libraries: &[DetectedLibrary], said: &[String]) -> Vec<Finding> {
    let starts = |found: &&DetectedLibrary| matches!(found.family, Family::Mpich | Family::Intel);
    let mut usable = libraries.iter().filter(starts).peekable();
    if usable.peek().is_none() {
        let text = "not tried: no MPI library was found that `landbridge run` can start";
        let advice = "name the place of an MPICH or Intel MPI: landbridge doctor --in DIR";
        return vec![Finding::notice(text, advice)];
    }
    if sibling::provider_directory().is_err() {
        return vec![Finding::notice("not tried: the provider is missing", "make build")];
    }
    first_that_works(usable, |library| {
        let try_path = |(name, options): &(&str, &[&str])| {
            // The last option wins, so the path's own options follow the user's options.
            let options = options.iter().map(|word| word.to_string());
            let arguments: Vec<String> = said.iter().cloned().chain(options).collect();
            check_path(name, &arguments, library)
        };
        PATHS.iter().map(try_path).collect()
    })
}

/// The findings of the first library with which all paths work. Bad findings of earlier libraries
/// become notices then, because no job needs these libraries; without such a library, all bad
/// findings stay bad.
fn first_that_works<'a>(
    libraries: impl Iterator<Item = &'a DetectedLibrary>,
    mut attempt: impl FnMut(&DetectedLibrary) -> Vec<Finding>,
) -> Vec<Finding> {
    let mut earlier: Vec<Finding> = Vec::new();
    for library in libraries {
        let name = format!("with {} {}", library.family.name(), library.library.display());
        let found = attempt(library);
        if found.iter().all(|it| it.grade == Grade::Good) {
            let earlier = earlier.into_iter().map(Finding::less_bad);
            return earlier.chain([Finding::good(name)]).chain(found).collect();
        }
        let with_name = |it: Finding| Finding { text: format!("{name}: {}", it.text), ..it };
        earlier.extend(found.into_iter().map(with_name));
    }
    earlier
}

fn check_path(name: &str, arguments: &[String], library: &DetectedLibrary) -> Finding {
    progress(&format!("trying {name} between two processes (up to {TIMEOUT_S} s)"));
    match measure(arguments, library) {
        Ok((latency, bandwidth)) => {
            Finding::good(format!("{name}: 8 B in {latency} us, 1 MiB at {bandwidth} MB/s"))
        }
        Err(error) => Finding::bad(format!("{name}: {error}"), see_why(arguments, library)),
    }
}

/// A command line that repeats the job in a shell with verbose output.
fn see_why(arguments: &[String], library: &DetectedLibrary) -> String {
    let is_set = |name: &&&str| std::env::var_os(name).is_some();
    let unset: String = NOT_OURS.iter().filter(is_set).map(|name| format!("-u {name} ")).collect();
    let unset = if unset.is_empty() { unset } else { format!("env {unset}") };
    // Intel MPI names a libfabric that it has not found only at this debug level.
    let debug = if library.family == Family::Intel { " -x I_MPI_DEBUG=5" } else { "" };
    let arguments: Vec<String> = arguments.iter().map(|word| quote(word)).collect();
    let (own, arguments) = (own_name(), arguments.join(" "));
    let library = quote(&library.library.display().to_string());
    format!(
        "see why: {unset}{own} run -v {arguments} -x FI_LOG_LEVEL=info{debug} {own} doctor-peer {library}"
    )
}

fn measure(arguments: &[String], library: &DetectedLibrary) -> Result<(String, String), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let words = [OsStr::new("doctor-peer"), library.library.as_os_str()];
    let mut command = Command::new(&program);
    command.args(["run", "--timeout", TIMEOUT_S]).args(arguments).arg(&program).args(words);
    for name in NOT_OURS {
        command.env_remove(name);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    match words[..] {
        ["latency_us", latency, "bandwidth_mb_s", bandwidth] if output.status.success() => {
            Ok((latency.to_string(), bandwidth.to_string()))
        }
        _ => {
            let trouble = String::from_utf8_lossy(&output.stderr);
            Err(last_words(&trouble).unwrap_or_else(|| "no answer".to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(family: Family) -> DetectedLibrary {
        DetectedLibrary { family, library: format!("/mpi/{family:?}.so").into(), needs_path: false }
    }

    fn attempt(broken: Family) -> impl FnMut(&DetectedLibrary) -> Vec<Finding> {
        move |found| {
            let tcp = if found.family == broken {
                Finding::bad("tcp: no", "see why")
            } else {
                Finding::good("tcp: quick")
            };
            vec![Finding::good("shm: quick"), tcp]
        }
    }

    fn grades(findings: &[Finding]) -> Vec<(Grade, &str)> {
        findings.iter().map(|it| (it.grade, it.text.as_str())).collect()
    }

    #[test]
    fn a_library_that_does_not_work_stands_in_nobodys_way_while_another_does() {
        let both = [library(Family::Intel), library(Family::Mpich)];
        let mut tried = 0;
        let found = first_that_works(both.iter(), |it| {
            tried += 1;
            attempt(Family::OpenMpi)(it)
        });
        let intel = (Grade::Good, "with Intel MPI /mpi/Intel.so");
        let quick = [(Grade::Good, "shm: quick"), (Grade::Good, "tcp: quick")];
        assert_eq!((tried, grades(&found)), (1, vec![intel, quick[0], quick[1]]));

        let found = first_that_works(both.iter(), attempt(Family::Intel));
        let expected = vec![
            (Grade::Good, "with Intel MPI /mpi/Intel.so: shm: quick"),
            (Grade::Notice, "with Intel MPI /mpi/Intel.so: tcp: no"),
            (Grade::Good, "with MPICH /mpi/Mpich.so"),
            quick[0],
            quick[1],
        ];
        assert_eq!(grades(&found), expected);

        let found = first_that_works(both[..1].iter(), attempt(Family::Intel));
        assert_eq!(found[1].grade, Grade::Bad);
    }

    #[test]
    fn the_way_to_see_why_makes_intel_mpi_say_what_it_has_not_found() {
        let options = PATHS[0].1.iter().map(|word| word.to_string());
        let options: Vec<String> =
            ["--set".to_string(), "log=x y".into()].into_iter().chain(options).collect();
        let words = see_why(&options, &library(Family::Intel));
        assert!(
            words.contains(" run -v --set 'log=x y' -n 2 --set paths=shm -x FI_LOG_LEVEL=info -x I_MPI_DEBUG=5 "),
            "{words}"
        );
        assert!(words.ends_with(" doctor-peer /mpi/Intel.so"), "{words}");
        assert!(!see_why(&options, &library(Family::Mpich)).contains("I_MPI"));
    }
}
