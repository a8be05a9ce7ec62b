//! Finds MPI libraries on this machine, the libfabric that each library uses, and whether that
//! libfabric loads our provider. A separate process tests each libfabric: a libfabric that crashes
//! ends only the test.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Finding, own_name, probe};
use crate::mpi::detect::{DetectedLibrary, Family, library_in};
use crate::mpi::elf::{Elf, Search};
use crate::mpi::{PROVIDER, own_libfabric};
use crate::sibling;
use crate::spawn::ssh::quote;

/// Programs whose location says where an MPI library is installed.
const LAUNCHERS: [&str; 4] = ["mpiexec", "mpirun", "mpichversion", "ompi_info"];
/// Directories in which distributions install MPI libraries, in addition to the usual directories.
const SYSTEM_DIRECTORIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib64/openmpi/lib",
    "/usr/lib64/mpich/lib",
    "/usr/local/lib",
];

pub fn check(libraries: &[DetectedLibrary]) -> Vec<Finding> {
    if libraries.is_empty() {
        let advice = "python3 -m venv mpi && mpi/bin/pip install mpich==5.0.2 mpi4py\n\
                      then run `landbridge doctor --in mpi`";
        return vec![Finding::notice("no MPI library was found", advice)];
    }
    libraries.iter().map(check_library).collect()
}

fn check_library(found: &DetectedLibrary) -> Finding {
    let name = format!("{} {}", found.family.name(), found.library.display());
    if found.family == Family::MpichWithoutOfi {
        let advice = "it can load no provider; `pip install mpich` brings an MPICH that can";
        return Finding::bad(name, advice);
    }
    let Some(libfabric) = libfabric_of(found) else {
        let advice = "install one: apt install libfabric1";
        return Finding::bad(format!("{name}: no libfabric.so.1 for it"), advice);
    };
    let place = libfabric.display();
    let Ok(directory) = sibling::provider_directory() else {
        return Finding::notice(format!("{name}, {place}"), "not tried: the provider is missing");
    };
    match ask(&libfabric, &directory) {
        Ok(answer) if answer.loads => {
            let how = how_to_start(found.family);
            let version = answer.version;
            Finding::good(format!("{name}: libfabric {version} loads the provider; {how}"))
        }
        Ok(answer) => Finding::bad(
            format!("{name}: libfabric {} ({place}) does not load the provider", answer.version),
            format!(
                "see why: FI_LOG_LEVEL=debug FI_PROVIDER_PATH={} {} doctor-probe {}",
                quote(&directory.display().to_string()),
                own_name(),
                quote(&place.to_string()),
            ),
        ),
        Err(error) => Finding::bad(format!("{name}: {place}: {error}"), "is it a whole library?"),
    }
}

fn how_to_start(family: Family) -> &'static str {
    match family {
        Family::OpenMpi => "start with `landbridge env --mpi openmpi` and mpirun",
        _ => "start with `landbridge run`",
    }
}

// --- finding them

/// Directory below the project's checkout into which the project fetches MPI libraries.
const FETCHED: &str = "build/venv";

/// Findings for directories that the user named and that hold no MPI library.
pub fn check_named(named: &[PathBuf]) -> Vec<Finding> {
    let empty = |root: &&PathBuf| below(root).iter().all(|place| library_at(place).is_none());
    named.iter().filter(empty).map(|root| complaint(root)).collect()
}

fn complaint(root: &Path) -> Finding {
    let place = root.display();
    if !root.is_dir() {
        return Finding::bad(
            format!("--in {place}: there is no such directory"),
            "look for a typo",
        );
    }
    let text =
        format!("--in {place}: no MPI library there, in its lib, or in directories below it");
    Finding::bad(text, "name the virtual environment, or the PREFIX that MPI was installed to")
}

/// Directories to search when the user has named a directory: `lib` in it, the directory itself,
/// and the same in each direct subdirectory, such as a virtual environment.
fn below(root: &Path) -> Vec<PathBuf> {
    let places = |root: &Path| [root.join("lib"), root.to_path_buf()];
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let mut children: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    children.retain(|path| path.is_dir());
    children.sort();
    let children = children.iter().flat_map(|child| places(child));
    places(root).into_iter().chain(children).collect()
}

fn library_at(directory: &Path) -> Option<DetectedLibrary> {
    library_in(directory).or_else(|| mpich_in(directory))
}

/// The MPI libraries of the checkout that this program was built in. The current directory may
/// belong to any user, so its libraries are loaded only if the user names the directory.
fn fetched() -> Option<PathBuf> {
    Some(sibling::checkout()?.join(FETCHED))
}

/// MPI libraries in the named directories, in the directories of the usual variables, and of the
/// distribution.
pub fn find(named: &[PathBuf]) -> Vec<DetectedLibrary> {
    let mut seen = BTreeSet::new();
    let mut libraries = Vec::new();
    for directory in directories(named) {
        let Some(found) = library_at(&directory) else { continue };
        if seen.insert(found.library.canonicalize().ok()) {
            libraries.push(found);
        }
    }
    libraries
}

/// The MPICH library under the file name that Debian gives it.
fn mpich_in(directory: &Path) -> Option<DetectedLibrary> {
    let library = directory.join("libmpich.so.12");
    let elf = Elf::read(&library)?;
    let ofi = elf.needs("libfabric.so") || elf.defines("fi_getinfo");
    let family = if ofi { Family::Mpich } else { Family::MpichWithoutOfi };
    Some(DetectedLibrary { family, library, needs_path: false })
}

fn directories(named: &[PathBuf]) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    directories.extend(named.iter().flat_map(|root| below(root)));
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "I_MPI_ROOT"] {
        directories.extend(std::env::var_os(name).map(|root| Path::new(&root).join("lib")));
    }
    directories.extend(paths("LD_LIBRARY_PATH"));
    for directory in paths("PATH") {
        if LAUNCHERS.iter().any(|name| directory.join(name).is_file()) {
            directories.extend(directory.parent().map(|prefix| prefix.join("lib")));
        }
    }
    directories.extend(fetched().iter().flat_map(|root| below(root)));
    directories.extend(SYSTEM_DIRECTORIES.iter().map(PathBuf::from));
    directories
}

fn paths(variable: &str) -> Vec<PathBuf> {
    let value = std::env::var_os(variable).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// The libfabric that this library would load: an own one of Intel MPI, else by the library's
/// search path, else the system's.
fn libfabric_of(found: &DetectedLibrary) -> Option<PathBuf> {
    const NAME: &str = "libfabric.so.1";
    let elf = Elf::read(&found.library)?;
    if found.family == Family::Intel
        && let Some(path) = own_libfabric(&found.library)
    {
        return Some(path);
    }
    let library_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    Search::new(&library_path).find(NAME, Some(&elf))
}

// --- asking them

struct LibfabricAnswer {
    version: String,
    loads: bool,
}

fn ask(libfabric: &Path, provider: &Path) -> Result<LibfabricAnswer, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .arg("doctor-probe")
        .arg(libfabric)
        .env("FI_PROVIDER_PATH", provider)
        .env("FI_PROVIDER", PROVIDER)
        .output()
        .map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.strip_prefix("version "));
    if output.status.signal() == Some(libc::SIGALRM) {
        return Err(format!("it has not answered after {} s", probe::PATIENCE_SECONDS));
    }
    let Some(version) = version else {
        let trouble = String::from_utf8_lossy(&output.stderr);
        let last = trouble.lines().last().unwrap_or("the probe died without a word");
        return Err(last.to_string());
    };
    let ours = format!("provider {PROVIDER}");
    let loads = text.lines().any(|line| line == ours);
    Ok(LibfabricAnswer { version: version.to_string(), loads })
}
