//! `landbridge doctor`: checks this machine and reports what is there, what is missing, and what to
//! do. Each check returns [`Finding`]s; no check changes anything.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `dynamic` | libraries opened by their path |
//! | `environment` | variables that choose another transport |
//! | `probe` | one libfabric, loaded in a process of its own |
//! | `libraries` | MPI libraries, and the libfabric of each |
//! | `pairs` | paths between the hosts of a topology |
//! | `paths` | which paths work between two processes |
//! | `peer` | one of these two processes |
//! | `relay` | whether a relay answers |
//! | `settings` | settings without their default value, invalid settings |
//! | `tun` | whether labs work for this user |
//! | `system` | permissions and limits of the kernel |

mod dynamic;
mod environment;
mod libraries;
mod pairs;
mod paths;
pub mod peer;
pub mod probe;
mod relay;
mod settings;
mod system;
mod tun;

use std::process::{Command, Stdio};

use anyhow::Result;

use landbridge_proto::setting::CRIU;

use crate::cli::DoctorArguments;
use crate::settings::Settings;
use crate::sibling;
use crate::spawn::ssh::quote;
use crate::topology::topology_file;

/// The effect of a finding on running jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grade {
    Good,
    /// The checked part works, but slowly or only in part.
    Notice,
    /// Something will not work.
    Bad,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    grade: Grade,
    text: String,
    /// What the user can do about the finding, if anything.
    advice: Option<String>,
}

impl Finding {
    fn good(text: impl Into<String>) -> Finding {
        Finding { grade: Grade::Good, text: text.into(), advice: None }
    }

    fn notice(text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { grade: Grade::Notice, text: text.into(), advice: Some(advice.into()) }
    }

    fn bad(text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { grade: Grade::Bad, text: text.into(), advice: Some(advice.into()) }
    }

    /// The finding as a notice instead of an error, because something else works in its place.
    fn less_bad(self) -> Finding {
        let grade = if self.grade == Grade::Bad { Grade::Notice } else { self.grade };
        Finding { grade, ..self }
    }
}

/// Prints all findings and returns exit code 1 if something will not work.
pub fn run(arguments: &DoctorArguments) -> Result<i32> {
    let found = libraries::find(&arguments.directories);
    let said = arguments.settings.words();
    if arguments.pairs {
        let pairs = pairs::check(&found, arguments.topology.as_deref(), said);
        return Ok(print_findings([("Paths between hosts", pairs)]));
    }
    let topology = topology_file(None);
    let settings = Settings::find(&arguments.settings, &[], topology.as_deref());
    let criu = settings.as_ref().map_or(CRIU.default, |settings| settings.text(&CRIU));
    let mut mpi_libraries = libraries::check_named(&arguments.directories);
    mpi_libraries.extend(libraries::check(&found));
    let chapters = [
        ("Landbridge", files()),
        ("MPI libraries", mpi_libraries),
        ("This machine", system::check(criu.as_ref())),
        ("Settings", settings::check(&settings)),
        ("Environment", environment::check()),
        ("Paths between two processes", paths::check(&found, &said)),
        ("Relays", relay::check(&arguments.relay)),
    ];
    Ok(print_findings(chapters))
}

fn print_findings(chapters: impl IntoIterator<Item = (&'static str, Vec<Finding>)>) -> i32 {
    let mut worst = 0;
    for (title, findings) in chapters {
        if findings.is_empty() {
            continue;
        }
        println!("{title}");
        for finding in findings {
            worst |= i32::from(finding.grade == Grade::Bad);
            print(&finding);
        }
    }
    worst
}

fn print(finding: &Finding) {
    let mark = match finding.grade {
        Grade::Good => "ok",
        Grade::Notice => "--",
        Grade::Bad => "!!",
    };
    println!("  {mark}  {}", finding.text.replace('\n', "\n      "));
    for line in finding.advice.iter().flat_map(|advice| advice.lines()) {
        println!("      -> {line}");
    }
}

/// Checks that the provider and the programs of this installation exist.
fn files() -> Vec<Finding> {
    let mut findings = Vec::new();
    match sibling::provider_directory() {
        Ok(directory) => {
            findings.push(Finding::good(format!("provider in {}", directory.display())));
        }
        Err(error) => findings.push(Finding::bad(error.to_string(), "make build")),
    }
    match sibling::path("landbridge-relay") {
        Ok(path) => findings.push(Finding::good(format!("relay {}", path.display()))),
        Err(error) => findings.push(Finding::bad(error.to_string(), "make build")),
    }
    findings
}

/// The path of this program, quoted for a shell.
fn own_name() -> String {
    let name = |path: std::path::PathBuf| quote(&path.display().to_string());
    std::env::current_exe().map_or_else(|_| "landbridge".to_string(), name)
}

/// Prints the name of a check that takes a while to standard error.
fn progress(what: &str) {
    eprintln!("landbridge doctor: {what}");
}

/// Makes a command read nothing and print nothing.
fn quiet(mut command: Command) -> Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}
