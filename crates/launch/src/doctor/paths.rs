//! Which paths work between two processes: a job of two test processes for each path, with the
//! first MPI library of those found that `landbridge run` can start.

use std::process::{Command, Stdio};

use super::Finding;
use crate::mpi::detect::{Family, Found};
use crate::sibling;

/// A job that has not ended by then hangs.
const TIMEOUT_S: &str = "30";

/// What restricts a job to one path, and what to call it.
const PATHS: [(&str, &[&str]); 3] = [
    ("shm", &["-n", "2", "--set", "paths=shm"]),
    ("tcp", &["-n", "2", "--set", "paths=tcp"]),
    ("relay", &["-n", "2", "--clusters", "2", "--set", "paths=relay"]),
];

pub fn check(libraries: &[Found]) -> Vec<Finding> {
    let starts = |found: &&Found| matches!(found.family, Family::Mpich | Family::Intel);
    let Some(library) = libraries.iter().find(starts) else {
        let text = "not tried: no MPI library was found that `landbridge run` can start";
        let advice = "name the place of an MPICH or Intel MPI: landbridge doctor --in DIR";
        return vec![Finding::notice(text, advice)];
    };
    if sibling::provider_directory().is_err() {
        return vec![Finding::notice("not tried: the provider is missing", "make build")];
    }
    PATHS.iter().map(|(name, arguments)| check_path(name, arguments, library)).collect()
}

fn check_path(name: &str, arguments: &[&str], library: &Found) -> Finding {
    let advice = format!(
        "see why: landbridge run -v {} -x FI_LOG_LEVEL=info landbridge doctor-peer {}",
        arguments.join(" "),
        library.library.display()
    );
    match measure(arguments, library) {
        Ok((latency, bandwidth)) => {
            Finding::good(format!("{name}: 8 B in {latency} us, 1 MiB at {bandwidth} MB/s"))
        }
        Err(error) => Finding::bad(format!("{name}: {error}"), advice),
    }
}

fn measure(arguments: &[&str], library: &Found) -> Result<(String, String), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(&program)
        .args(["run", "--timeout", TIMEOUT_S])
        .args(arguments)
        .arg(&program)
        .arg("doctor-peer")
        .arg(&library.library)
        // The path is what is tried: not what this shell says about topologies or providers.
        .env_remove("LANDBRIDGE_TOPOLOGY")
        .env_remove("FI_PROVIDER")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    match words[..] {
        ["latency_us", latency, "bandwidth_mb_s", bandwidth] if output.status.success() => {
            Ok((latency.to_string(), bandwidth.to_string()))
        }
        _ => {
            let trouble = String::from_utf8_lossy(&output.stderr);
            Err(trouble.lines().last().unwrap_or("no answer").to_string())
        }
    }
}
