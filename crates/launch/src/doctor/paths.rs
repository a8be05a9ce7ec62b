//! Checks which paths work between two processes: one job of two test processes for each path, with
//! the first MPI library that `landbridge run` can start and with which all paths work.
//!
//! What may never happen: a row is good although other paths, or the MPI library itself, carried
//! the messages of its job. So the provider's log must say that it sent bytes over the path.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use super::{Finding, Grade, own_name, progress};
use crate::mpi::detect::{DetectedLibrary, Family};
use crate::own_lines::last_message;
use crate::sibling;
use crate::spawn::ssh::quote;

/// Timeout of a job in seconds; a longer job hangs.
const TIMEOUT_S: &str = "30";

/// A path, and how a job shows that the path works.
struct TestedPath {
    /// The name of the path in the setting `paths`.
    name: &'static str,
    /// The name of the path in the provider's log.
    logged_name: &'static str,
    /// Options that restrict a job to the path. With `local=own` the provider, and not the MPI
    /// library, carries the messages.
    options: &'static [&'static str],
}

const PATHS: [TestedPath; 3] = [
    TestedPath {
        name: "shm",
        logged_name: "shared memory",
        options: &["-n", "2", "--set", "local=own", "--set", "paths=shm"],
    },
    TestedPath {
        name: "tcp",
        logged_name: "tcp",
        options: &["-n", "2", "--set", "local=own", "--set", "udp=off", "--set", "paths=tcp"],
    },
    TestedPath {
        name: "relay",
        logged_name: "relay",
        options: &["-n", "2", "--clusters", "2", "--set", "local=own", "--set", "paths=relay"],
    },
];

/// Options with which ranks log at their end what each path has carried.
const LOG_PATHS: [&str; 2] = ["--set", "log=info"];
/// The part of a line of the provider's log that says the level of these lines.
const INFO: &str = ": Info: ";

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
        let try_path = |path: &TestedPath| {
            // The last option wins, so the path's own options follow the user's options.
            let options = path.options.iter().map(|word| word.to_string());
            let arguments: Vec<String> = said.iter().cloned().chain(options).collect();
            check_path(path, &arguments, library)
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

fn check_path(path: &TestedPath, arguments: &[String], library: &DetectedLibrary) -> Finding {
    let name = path.name;
    progress(&format!("trying {name} between two processes (up to {TIMEOUT_S} s)"));
    match measure(path, arguments, library) {
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
        "see why: {unset}{own} run -v {arguments} -x FI_LOG_LEVEL=info{debug} {own} doctor-peer \
         {library}"
    )
}

fn measure(
    path: &TestedPath,
    arguments: &[String],
    library: &DetectedLibrary,
) -> Result<(String, String), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let words = [OsStr::new("doctor-peer"), library.library.as_os_str()];
    let mut command = Command::new(&program);
    command.args(["run", "--timeout", TIMEOUT_S]).args(arguments).args(LOG_PATHS);
    command.arg(&program).args(words);
    for name in NOT_OURS {
        command.env_remove(name);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let log = String::from_utf8_lossy(&output.stderr);
    match words[..] {
        ["latency_us", latency, "bandwidth_mb_s", bandwidth] if output.status.success() => {
            match log.lines().any(|line| has_carried(line, path.logged_name)) {
                true => Ok((latency.to_string(), bandwidth.to_string())),
                false => Err("the provider carried nothing over this path".to_string()),
            }
        }
        _ => {
            let trouble: Vec<&str> = log.lines().filter(|line| !line.contains(INFO)).collect();
            Err(last_message(&trouble.join("\n")).unwrap_or_else(|| "no answer".to_string()))
        }
    }
}

/// Whether this line of the provider's log says that a rank has sent bytes over the path with this
/// name: `landbridge[7]: Info: rank 1: tcp 10.0.0.1 to 10.0.0.2: 64 bytes sent, 9 MB/s`.
fn has_carried(line: &str, logged_name: &str) -> bool {
    let statistics = line.split_once(INFO).and_then(|(_, text)| text.strip_prefix("rank "));
    let path = statistics.and_then(|text| text.split_once(": ")).map(|(_, path)| path);
    let Some((path, bytes)) = path
        .and_then(|path| path.split_once(" bytes sent"))
        .and_then(|(path, _)| path.rsplit_once(": "))
    else {
        return false;
    };
    let name = path
        .split_once(" to ")
        .map_or(path, |(ends, _)| ends.rsplit_once(' ').map_or(ends, |(name, _)| name));
    name == logged_name && bytes.parse::<u64>().is_ok_and(|bytes| bytes > 0)
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
    fn every_path_is_that_of_the_provider() {
        for path in &PATHS {
            let paths = format!("paths={}", path.name);
            assert!(path.options.contains(&"local=own"), "{}", path.name);
            assert!(path.options.contains(&paths.as_str()), "{}", path.name);
        }
    }

    #[test]
    fn a_path_works_only_if_the_provider_has_sent_bytes_over_it() {
        let lines = [
            ("shared memory", "rank 1: shared memory: 1053120 bytes sent"),
            ("tcp", "rank 0: tcp ::1 to ::1: 64 bytes sent, 4681 MB/s, confirmed after 62 us"),
            ("tcp", "rank 0: tcp: 64 bytes sent, 4681 MB/s"),
            ("relay", "rank 0: relay: 64 bytes sent, 571 MB/s"),
        ];
        for (name, text) in lines {
            let line = format!("landbridge[7]: Info: {text}");
            assert!(has_carried(&line, name), "{line}");
            assert!(!has_carried(&line, "udp"), "{line}");
        }
        assert!(!has_carried("landbridge[7]: Info: rank 1: tcp: 0 bytes sent", "tcp"));
        assert!(!has_carried("landbridge[7]: Info: rank 1 (process 18295): tcp", "tcp"));
        assert!(!has_carried("latency_us 1.1 bandwidth_mb_s 613", "tcp"));
    }

    #[test]
    fn the_way_to_see_why_makes_intel_mpi_say_what_it_has_not_found() {
        let options = PATHS[0].options.iter().map(|word| word.to_string());
        let options: Vec<String> =
            ["--set".to_string(), "log=x y".into()].into_iter().chain(options).collect();
        let words = see_why(&options, &library(Family::Intel));
        assert!(
            words.contains(
                " run -v --set 'log=x y' -n 2 --set local=own --set paths=shm -x \
                            FI_LOG_LEVEL=info -x I_MPI_DEBUG=5 "
            ),
            "{words}"
        );
        assert!(words.ends_with(" doctor-peer /mpi/Intel.so"), "{words}");
        assert!(!see_why(&options, &library(Family::Mpich)).contains("I_MPI"));
    }
}
