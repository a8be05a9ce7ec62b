//! Reads what an ELF file needs and defines, and finds the libraries that the dynamic linker would
//! load.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{Dyn, ElfFile64};
use object::{Endianness, Object, ObjectSymbol};

/// The dynamic section of an ELF file and the symbols that the file defines.
pub struct Elf {
    pub needed: Vec<String>,
    /// Directories of RPATH and RUNPATH, with `$ORIGIN` replaced.
    run_path: Vec<PathBuf>,
    symbols: BTreeSet<String>,
}

impl Elf {
    /// Reads a file; `None` for a file that is no 64-bit ELF file, for example a linker script.
    pub fn read(path: &Path) -> Option<Elf> {
        let data = std::fs::read(path).ok()?;
        let file = ElfFile64::<Endianness>::parse(&*data).ok()?;
        let endian = file.endian();
        let sections = file.elf_section_table();
        let (entries, strings) = sections.dynamic(endian, &*data).ok()??;
        let strings = sections.strings(endian, &*data, strings).ok()?;
        let texts = |tag: u32| {
            let entries = entries.iter().filter(move |entry| entry.tag32(endian) == Some(tag));
            entries.filter_map(move |entry| {
                let text = entry.string(endian, strings).ok()?;
                String::from_utf8(text.to_vec()).ok()
            })
        };
        let origin = path.canonicalize().ok()?.parent()?.to_path_buf();
        let run_path = texts(elf::DT_RPATH).chain(texts(elf::DT_RUNPATH));
        let run_path = run_path.flat_map(|paths| split_run_path(&paths, &origin)).collect();
        let needed = texts(elf::DT_NEEDED).collect();
        let defined = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
        let symbols = defined.filter_map(|symbol| Some(symbol.name().ok()?.to_string())).collect();
        Some(Elf { needed, run_path, symbols })
    }

    pub fn defines(&self, symbol: &str) -> bool {
        self.symbols.contains(symbol)
    }

    pub fn needs(&self, start: &str) -> bool {
        self.needed.iter().any(|name| name.starts_with(start))
    }
}

fn split_run_path(paths: &str, origin: &Path) -> Vec<PathBuf> {
    let origin = origin.display().to_string();
    let fill = |path: &str| path.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
    paths.split(':').filter(|path| !path.is_empty()).map(|path| fill(path).into()).collect()
}

/// Directories that are searched for libraries in addition to a file's own run path.
pub struct Search {
    library_path: Vec<PathBuf>,
    system: Vec<PathBuf>,
}

impl Search {
    /// `library_path`: value of LD_LIBRARY_PATH.
    pub fn new(library_path: &OsStr) -> Search {
        let paths = std::env::split_paths(library_path);
        let paths = paths.filter(|path| !path.as_os_str().is_empty());
        Search { library_path: paths.collect(), system: system_directories() }
    }

    pub fn find(&self, name: &str, wanted_by: Option<&Elf>) -> Option<PathBuf> {
        if name.contains('/') {
            return Some(PathBuf::from(name)).filter(|path| path.is_file());
        }
        let own = wanted_by.map_or(&[][..], |elf| &elf.run_path);
        // The dynamic linker searches RPATH before LD_LIBRARY_PATH, and RUNPATH after it. The
        // result is the same unless both hold different MPI libraries.
        let directories = self.library_path.iter().chain(own).chain(&self.system);
        directories.map(|directory| directory.join(name)).find(|path| path.is_file())
    }
}

fn system_directories() -> Vec<PathBuf> {
    let mut directories = Vec::new();
    let entries = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|e| e == "conf")) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
        directories.extend(lines.map(PathBuf::from));
    }
    let usual = ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"];
    directories.extend(usual.iter().map(PathBuf::from));
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_binary_is_read_and_its_libraries_found() {
        let elf = Elf::read(&std::env::current_exe().unwrap()).unwrap();
        assert!(elf.needs("libc.so"), "{:?}", elf.needed);
        let libc = elf.needed.iter().find(|name| name.starts_with("libc.so")).unwrap();
        let path = Search::new(OsStr::new("")).find(libc, Some(&elf)).unwrap();
        assert!(Elf::read(&path).unwrap().defines("malloc"));
    }

    #[test]
    fn text_is_no_elf() {
        assert!(Elf::read(Path::new("/etc/passwd")).is_none());
    }

    #[test]
    fn origin_is_filled_in() {
        let paths = split_run_path("$ORIGIN:${ORIGIN}/../x:/y", Path::new("/a/b"));
        assert_eq!(paths, ["/a/b", "/a/b/../x", "/y"].map(PathBuf::from));
    }
}
