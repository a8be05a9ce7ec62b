//! Finds which MPI library a program uses, without running the program.
//!
//! A program is an ELF file (this module follows the needed libraries as the dynamic linker does),
//! a script (its interpreter decides), or Python (the library that mpi4py would load decides). For
//! a wrapper such as `strace ./a.out`, the first argument decides that uses MPI or is an MPI
//! library.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::elf::{Elf, Search};
use super::{Environment, find_program, variable};

use crate::local_transport::LocalTransport;

/// Libraries that are followed before giving up: real programs have some dozens at most.
const LIBRARIES_MAX: usize = 200;
/// Longest chain of scripts whose interpreters are scripts.
const INTERPRETERS_MAX: u32 = 4;
/// Arguments of a wrapper that are examined.
const ARGUMENTS_MAX: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Mpich,
    /// An MPICH that is built without libfabric.
    MpichWithoutOfi,
    OpenMpi,
    Intel,
}

impl Family {
    pub fn name(self) -> &'static str {
        match self {
            Family::Mpich => "MPICH",
            Family::MpichWithoutOfi => "MPICH without libfabric",
            Family::OpenMpi => "Open MPI",
            Family::Intel => "Intel MPI",
        }
    }

    /// Whether this library carries the messages inside a node itself. Intel MPI identifies the
    /// node by the host name; MPICH asks its process manager.
    pub fn carries_local_messages(self, transport: LocalTransport) -> bool {
        match transport {
            LocalTransport::Own => false,
            LocalTransport::LibraryByPlan => self == Family::Mpich,
            LocalTransport::Library => true,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetectedLibrary {
    pub family: Family,
    pub library: PathBuf,
    /// The dynamic linker would not find the library: LD_LIBRARY_PATH has to name its directory.
    pub needs_path: bool,
}

/// The environment of a program, as far as it decides which library is loaded.
pub struct Detector<'a> {
    environment: &'a Environment,
    wdir: &'a str,
    search: Search,
}

impl<'a> Detector<'a> {
    pub fn new(environment: &'a Environment, wdir: &'a str) -> Detector<'a> {
        let search = Search::new(variable(environment, "LD_LIBRARY_PATH"));
        Detector { environment, wdir, search }
    }

    /// The MPI library of a program with these arguments; `None`: no MPI library was found.
    pub fn library(&self, program: &Path, arguments: &[String]) -> Option<DetectedLibrary> {
        let path = self.variable("PATH");
        self.library_of_program(program, 0).or_else(|| {
            arguments.iter().take(ARGUMENTS_MAX).find_map(|argument| {
                self.library_named(argument).or_else(|| {
                    let program = find_program(argument, self.wdir, path).ok()?;
                    self.library_of_program(&program, 0)
                })
            })
        })
    }

    /// The library of an argument that is itself an MPI library, for a program that loads the
    /// library by this name (as the doctor's test processes do). Libraries that this library loads
    /// lie in the same directory, which no run path names.
    fn library_named(&self, argument: &str) -> Option<DetectedLibrary> {
        let path = Path::new(self.wdir).join(argument);
        let name = path.file_name()?.to_str()?;
        let is_library = name.starts_with("lib") && name.contains(".so");
        let found = is_library.then(|| library_file(&path)).flatten()?;
        Some(DetectedLibrary { needs_path: true, ..found })
    }

    fn variable(&self, name: &str) -> &OsStr {
        variable(self.environment, name)
    }

    /// The library that this program uses, whatever its arguments are.
    pub fn library_of_program(&self, program: &Path, depth: u32) -> Option<DetectedLibrary> {
        if is_python(program) {
            return self.library_of_python(program);
        }
        if let Some(elf) = Elf::read(program) {
            return self.library_of_elf(program, elf);
        }
        let interpreter = interpreter(program, self.wdir, self.variable("PATH"))?;
        if depth < INTERPRETERS_MAX {
            self.library_of_program(&interpreter, depth + 1)
        } else {
            None
        }
    }

    // --- ELF

    fn library_of_elf(&self, file: &Path, elf: Elf) -> Option<DetectedLibrary> {
        let mut seen = BTreeSet::new();
        let mut pending = vec![elf];
        while let Some(elf) = pending.pop() {
            for name in &elf.needed {
                if !seen.insert(name.clone()) || seen.len() > LIBRARIES_MAX {
                    continue;
                }
                let Some(path) = self.search.find(name, Some(&elf)) else {
                    if let Some(found) = library_beside(file, name) {
                        return Some(found);
                    }
                    continue;
                };
                let Some(library) = Elf::read(&path) else { continue };
                if let Some(family) = family(&library) {
                    return Some(DetectedLibrary { family, library: path, needs_path: false });
                }
                pending.push(library);
            }
        }
        None
    }

    // --- Python

    fn library_of_python(&self, python: &Path) -> Option<DetectedLibrary> {
        let named = self.variable("MPI4PY_LIBMPI");
        if !named.is_empty() {
            return std::env::split_paths(named).find_map(|path| library_file(&path));
        }
        let prefixes = python_prefixes(python, self.variable("HOME"));
        // An mpi4py that is linked against one library names this library itself.
        for module in prefixes.iter().flat_map(|prefix| linked_modules(prefix)) {
            if let Some(found) = Elf::read(&module).and_then(|e| self.library_of_elf(&module, e)) {
                return Some(found);
            }
        }
        let libraries = prefixes.iter().filter(|prefix| *prefix != Path::new("/usr"));
        libraries
            .map(|prefix| prefix.join("lib"))
            .find_map(|directory| library_in(&directory))
            .or_else(|| {
                LIBRARY_NAMES.iter().find_map(|name| library_file(&self.search.find(name, None)?))
            })
    }
}

/// Names that mpi4py tries in each directory, in this order.
const LIBRARY_NAMES: [&str; 3] = ["libmpi.so", "libmpi.so.12", "libmpi.so.40"];

/// The MPI library in a directory.
pub fn library_in(directory: &Path) -> Option<DetectedLibrary> {
    LIBRARY_NAMES.iter().find_map(|name| library_file(&directory.join(name)))
}

/// The MPI library that this file is, if the file is one.
pub fn library_file(path: &Path) -> Option<DetectedLibrary> {
    let family = family(&Elf::read(path)?)?;
    Some(DetectedLibrary { family, library: path.to_path_buf(), needs_path: false })
}

/// A library that the dynamic linker does not find, in `../lib` of the program, where a Python
/// environment that was not activated has its libraries.
fn library_beside(file: &Path, name: &str) -> Option<DetectedLibrary> {
    let path = file.parent()?.parent()?.join("lib").join(name);
    let found = library_file(&path)?;
    Some(DetectedLibrary { needs_path: true, ..found })
}

/// The family of an MPI library; `None` for other libraries, such as language bindings.
fn family(library: &Elf) -> Option<Family> {
    if !library.defines("MPI_Init") {
        return None;
    }
    if library.defines("ompi_mpi_comm_world") {
        return Some(Family::OpenMpi);
    }
    if library.defines("I_MPI_Check_image_status") {
        return Some(Family::Intel);
    }
    let ofi = library.needs("libfabric.so") || library.defines("fi_getinfo");
    if library.needs("libucp.so") && !ofi {
        return Some(Family::MpichWithoutOfi);
    }
    Some(Family::Mpich)
}

fn is_python(program: &Path) -> bool {
    let name = program.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let version = name.strip_prefix("python");
    let plain = version.is_some_and(|v| v.chars().all(|c| c.is_ascii_digit() || c == '.'));
    // A shim of a version manager is a shell script under the same name.
    plain && Elf::read(program).is_some()
}

/// Prefixes under which this Python looks for packages: its virtual environment, the user's own
/// packages, its base installation.
fn python_prefixes(python: &Path, home: &OsStr) -> Vec<PathBuf> {
    let mut prefixes = Vec::new();
    let own = python.parent().and_then(Path::parent);
    let in_environment = own.is_some_and(|prefix| prefix.join("pyvenv.cfg").is_file());
    prefixes.extend(own.map(Path::to_path_buf));
    if !in_environment {
        prefixes.push(Path::new(home).join(".local"));
        let base = python.canonicalize().ok();
        let base = base.as_deref().and_then(Path::parent).and_then(Path::parent);
        prefixes.extend(base.map(Path::to_path_buf));
    }
    prefixes
}

/// Extension modules of an mpi4py that was built for one library. An mpi4py that supports several
/// libraries has one file for each, and these are not listed.
fn linked_modules(prefix: &Path) -> Vec<PathBuf> {
    let mut modules = Vec::new();
    for package in directories_in(&prefix.join("lib"), "python3") {
        for packages in ["site-packages", "dist-packages"] {
            let directory = package.join(packages).join("mpi4py");
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            let linked = |name: &str| name.starts_with("MPI.cpython") && name.ends_with(".so");
            let files = entries.map(|entry| entry.path());
            modules.extend(files.filter(|path| {
                path.file_name().is_some_and(|name| linked(&name.to_string_lossy()))
            }));
        }
    }
    modules
}

fn directories_in(directory: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let entries = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    entries.map(|entry| entry.path()).collect()
}

/// The interpreter that the first line of a script names.
fn interpreter(script: &Path, wdir: &str, path: &OsStr) -> Option<PathBuf> {
    use std::io::Read;
    let mut start = Vec::new();
    std::fs::File::open(script).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_ascii_whitespace();
    let program = words.next()?;
    if Path::new(program).file_name()? != "env" {
        return Some(PathBuf::from(program));
    }
    let name = words.find(|word| !word.starts_with('-') && !word.contains('='))?;
    find_program(name, wdir, path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let directory =
            std::env::temp_dir().join(format!("lb-detect-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn a_program_without_mpi_has_none() {
        let environment = Environment::from([("PATH".into(), "/bin:/usr/bin".into())]);
        let detector = Detector::new(&environment, "/");
        assert_eq!(detector.library(Path::new("/bin/sh"), &["-c".to_string()]), None);
    }

    #[test]
    fn a_library_that_is_named_counts_for_a_program_that_loads_it() {
        let venv = concat!(env!("CARGO_MANIFEST_DIR"), "/../../build/venv");
        let library = format!("{venv}/mpich/lib/libmpi.so.12");
        if !Path::new(&library).is_file() {
            return;
        }
        let environment = Environment::new();
        let detector = Detector::new(&environment, "/");
        let library_of =
            |argument: &str| detector.library(Path::new("/bin/sh"), &[argument.to_string()]);
        let found = library_of(&library).unwrap();
        assert_eq!((found.family, found.needs_path), (Family::Mpich, true));
        assert_eq!(library_of("/bin/libmpi.so.12"), None);
    }

    #[test]
    fn interpreters_are_read_from_scripts() {
        let directory = scratch("scripts");
        let script = directory.join("script");
        let rows = [
            ("#!/bin/sh -e\n", Some("/bin/sh")),
            ("#! /usr/bin/env -S A=b sh -x\n", Some("/bin/sh")),
            ("#!/usr/bin/env no-such-program\n", None),
            ("echo\n", None),
        ];
        for (text, expected) in rows {
            std::fs::write(&script, text).unwrap();
            let found = interpreter(&script, "/", OsStr::new("/bin"));
            assert_eq!(found, expected.map(PathBuf::from), "{text}");
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn shims_are_not_python() {
        let directory = scratch("shims");
        let shim = directory.join("python3");
        std::fs::write(&shim, "#!/bin/sh\n").unwrap();
        assert!(!is_python(&shim));
        assert!(!is_python(Path::new("/bin/sh")));
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_virtual_environment_shuts_others_out() {
        let directory = scratch("venv");
        std::fs::write(directory.join("pyvenv.cfg"), "").unwrap();
        let python = directory.join("bin/python");
        assert_eq!(
            python_prefixes(&python, OsStr::new("/home/ann")),
            std::slice::from_ref(&directory)
        );
        std::fs::remove_file(directory.join("pyvenv.cfg")).unwrap();
        let expected = [directory.clone(), PathBuf::from("/home/ann/.local")];
        assert_eq!(python_prefixes(&python, OsStr::new("/home/ann")), expected);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn who_looks_at_the_name_of_the_host_does_not_join_clusters_on_one() {
        assert!(Family::Intel.carries_local_messages(LocalTransport::Library));
        assert!(!Family::Intel.carries_local_messages(LocalTransport::LibraryByPlan));
        assert!(Family::Mpich.carries_local_messages(LocalTransport::LibraryByPlan));
        assert!(!Family::Mpich.carries_local_messages(LocalTransport::Own));
    }
}
