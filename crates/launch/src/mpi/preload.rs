//! Whether the dynamic linker loads the interposer into a program: the linker must be that of the C
//! library for which the interposer is built, and the program must run as the user of the agent
//! (ld.so(8), "LD_PRELOAD"). For a script the interpreter decides.
//!
//! The interposer examines the programs that a rank executes later (`child_programs`).

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf::FileHeader64;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind};

/// Longest chain of scripts whose interpreters are scripts; the kernel runs no longer one.
const SCRIPTS_MAX: u32 = 5;
const SET_USER_ID: u32 = 0o4000;
/// The group bit counts only together with the group's right to execute.
const SET_GROUP_ID: u32 = 0o2010;

/// Why the interposer is not loaded into this program; `None`: the interposer is loaded, or the
/// file cannot be examined.
pub fn obstacle(program: &Path) -> Option<&'static str> {
    let mut program = program.to_owned();
    for _ in 0..SCRIPTS_MAX {
        match interpreter(&program) {
            Some(interpreter) => program = interpreter,
            None => return of_program(&program),
        }
    }
    None
}

/// The word after `#!`.
fn interpreter(script: &Path) -> Option<PathBuf> {
    const LINE_BYTES_MAX: u64 = 256;
    let mut start = Vec::new();
    std::fs::File::open(script).ok()?.take(LINE_BYTES_MAX).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line).into_owned();
    line.split_ascii_whitespace().next().map(PathBuf::from)
}

fn of_program(program: &Path) -> Option<&'static str> {
    let data = std::fs::read(program).ok()?;
    let linker = match FileKind::parse(&*data).ok()? {
        FileKind::Elf64 => linker_of(&data),
        FileKind::Elf32 => return Some("it is made for another C library"),
        _ => return None,
    };
    match linker {
        // The linker itself may be executed, with the program as its argument.
        None if is_linker(program.canonicalize().ok()?.file_name()?.as_encoded_bytes()) => None,
        None => Some("it is linked statically"),
        Some(name) if !is_linker(&name) => Some("it is made for another C library"),
        Some(_) => {
            runs_as_another(program).then_some("it runs as another user or with file capabilities")
        }
    }
}

/// File name of the dynamic linker that a program names.
fn linker_of(data: &[u8]) -> Option<Vec<u8>> {
    let file = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = file.endian().ok()?;
    let headers = file.program_headers(endian, data).ok()?;
    let path = headers.iter().find_map(|header| header.interpreter(endian, data).ok()?)?;
    path.rsplit(|&byte| byte == b'/').next().map(<[u8]>::to_vec)
}

fn is_linker(name: &[u8]) -> bool {
    name.starts_with(b"ld-linux")
}

/// Whether the kernel gives the program another user, group or more rights than the agent has.
fn runs_as_another(program: &Path) -> bool {
    let Ok(about) = program.metadata() else { return false };
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    let has_all = |bits: u32| about.mode() & bits == bits;
    let has_capabilities = || {
        let mut value = [0_u8; 64];
        rustix::fs::getxattr(program, "security.capability", &mut value[..]).is_ok_and(|it| it > 0)
    };
    has_all(SET_USER_ID) && about.uid() != user.as_raw()
        || has_all(SET_GROUP_ID) && about.gid() != group.as_raw()
        || !user.is_root() && has_capabilities()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_loads_the_interposer_is_distinguished() {
        assert_eq!(obstacle(&std::env::current_exe().unwrap()), None);
        assert_eq!(obstacle(Path::new("/bin/sh")), None);
        assert_eq!(obstacle(Path::new("/etc/passwd")), None);
        assert_eq!(obstacle(Path::new("/no/such")), None);
        let linker = Path::new("/lib64/ld-linux-x86-64.so.2");
        if !linker.exists() {
            return;
        }
        assert_eq!(obstacle(linker), None, "it is given the program as an argument");
        let folder = std::env::temp_dir().join(format!("lb-preload-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // A copy under another name stands for a static program: neither names a linker.
        let (program, script) = (folder.join("static"), folder.join("script"));
        std::fs::copy(linker, &program).unwrap();
        std::fs::write(&script, format!("#! {} -x\n", program.display())).unwrap();
        assert_eq!(obstacle(&program), Some("it is linked statically"));
        assert_eq!(obstacle(&script), Some("it is linked statically"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
