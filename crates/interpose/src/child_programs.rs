//! Programs that a rank starts: whether this library will be loaded into them and observe them
//! (`observe`).
//!
//! In: the file and the environment of an `exec`, before the `exec` happens. The call is a system
//! call of an observed process, or `posix_spawn`, whose child shares the memory of its parent until
//! it executes the program, so that its system calls are not dispatched. Out: one report that the
//! rank cannot be restarted, if the program would not load this library: the program is linked
//! statically or for another C library, runs as another user, or has an environment that does not
//! name the library (ld.so(8)).

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use libc::{pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

use crate::changed_names::NameChange;
use crate::kernel_calls::{HERE, kernel, text};
use crate::messages::Path;
use crate::watched::{self, CHANGED, CHANGED_COMPONENT, change_of, forbid_restart_of};
use crate::{dispatch, real_libc, record_head, spawn_actions};

type CStringList = *const *mut c_char;

/// Largest number of nested scripts: a file whose `#!` names another file that begins with `#!`.
const SCRIPTS_MAX: usize = 4;
/// Bytes at the start of a program that are searched for its headers; headers further back are
/// ignored.
const START_BYTES: usize = 4096;
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// Reason why this library would not observe a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnobservedReason {
    Static,
    OtherLibrary,
    OtherUser,
    Environment,
    Directory,
}

impl fmt::Display for UnobservedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UnobservedReason::Static => "it is linked statically",
            UnobservedReason::OtherLibrary => "it is made for another C library",
            UnobservedReason::OtherUser => "it runs as another user or with file capabilities",
            UnobservedReason::Environment => "LD_PRELOAD is taken out of its environment",
            UnobservedReason::Directory => "its name begins in a directory that it enters first",
        })
    }
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawn`.
pub unsafe extern "C" fn posix_spawn(
    process: *mut pid_t,
    path: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    words: CStringList,
    environment: CStringList,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        spawn_actions::check(actions);
        check_start(path, environment);
        real_libc::posix_spawn(process, path, actions, attributes, words, environment)
    }
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawnp`.
pub unsafe extern "C" fn posix_spawnp(
    process: *mut pid_t,
    name: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    words: CStringList,
    environment: CStringList,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        spawn_actions::check(actions);
        check_exec_in_path(name, environment);
        real_libc::posix_spawnp(process, name, actions, attributes, words, environment)
    }
}

/// Whether this library observes a program that inherits the environment of this process.
pub fn own_environment_loads_interposer() -> bool {
    unsafe extern "C" {
        static environ: CStringList;
    }
    // SAFETY: the C library's variable, which no thread changes meanwhile.
    unsafe { loads_interposer(environ) }
}

/// Forbids a restart if this file, executed with this environment, would not be observed.
///
/// # Safety
/// The arguments are those of `execve`.
pub unsafe fn check_exec(path: *const c_char, environment: CStringList) {
    if !dispatch::is_installed() || !watched::is_watched() || path.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let unseen = unsafe { unobserved_reason(CStr::from_ptr(path), environment) };
    if let Some(why) = unseen {
        // SAFETY: the caller's promise.
        unsafe { report_unobserved(path, why) };
    }
}

/// # Safety
/// The path is a C string.
unsafe fn report_unobserved(path: *const c_char, why: UnobservedReason) {
    // SAFETY: the caller's promise.
    let name = Path(unsafe { text(path.addr() as u64) });
    watched::forbid_restart_of(format_args!("it starts {name}, which cannot be observed ({why})"));
}

/// Forbids a restart if this file, which a child that is not observed yet executes, would not be
/// observed, or has changed since the job began.
///
/// # Safety
/// The arguments are those of `execve`.
unsafe fn check_start(path: *const c_char, environment: CStringList) {
    // SAFETY: the caller's promise.
    unsafe {
        check_exec(path, environment);
        if dispatch::is_installed() && watched::is_watched() && !path.is_null() {
            let is_relative = !text(path.addr() as u64).starts_with(b"/");
            if is_relative && spawn_actions::may_enter_directory() {
                report_unobserved(path, UnobservedReason::Directory);
            }
            before_start(path);
        }
    }
}

/// Forbids a restart if the program of this name, looked up in PATH, would not be observed.
///
/// # Safety
/// The arguments are those of `execvpe`.
unsafe fn check_exec_in_path(name: *const c_char, environment: CStringList) {
    // SAFETY: the caller's promise; the variable lives until it changes.
    let (name_text, folders) = unsafe {
        let folders = libc::getenv(c"PATH".as_ptr());
        let folders = if folders.is_null() { c"/bin:/usr/bin" } else { CStr::from_ptr(folders) };
        (text(name.addr() as u64), folders.to_bytes())
    };
    if name_text.contains(&b'/') {
        // SAFETY: the caller's promise.
        return unsafe { check_start(name, environment) };
    }
    for folder in folders.split(|byte| *byte == b':') {
        let mut path = [0_u8; PATH_BYTES];
        let folder = if folder.is_empty() { b"." } else { folder };
        if folder.len() + name_text.len() + 2 > PATH_BYTES {
            continue;
        }
        path[..folder.len()].copy_from_slice(folder);
        path[folder.len()] = b'/';
        path[folder.len() + 1..][..name_text.len()].copy_from_slice(name_text);
        let place = path.as_ptr().addr() as u64;
        if kernel(libc::SYS_faccessat, [HERE, place, libc::X_OK as u64, 0, 0, 0]) == 0 {
            // SAFETY: the path ends with a zero of the array.
            return unsafe { check_start(path.as_ptr().cast(), environment) };
        }
    }
}

unsafe fn unobserved_reason(path: &CStr, environment: CStringList) -> Option<UnobservedReason> {
    let unseen = of_file(path, SCRIPTS_MAX);
    // SAFETY: the caller's promise.
    let is_named = || unsafe { loads_interposer(environment) };
    // A missing file, or one that is no program, is not executed.
    unseen.ok()?.or_else(|| (!is_named()).then_some(UnobservedReason::Environment))
}

/// Whether the environment preloads this library, and names the record.
unsafe fn loads_interposer(environment: CStringList) -> bool {
    let (mut has_library, mut has_record) = (false, false);
    let mut at = environment;
    // SAFETY: an array of C strings that ends with a null pointer.
    unsafe {
        while !at.is_null() && !(*at).is_null() {
            let word = CStr::from_ptr(*at).to_bytes();
            if let Some(list) = word.strip_prefix(b"LD_PRELOAD=") {
                has_library |= list
                    .windows(record_head::LIBRARY.len())
                    .any(|part| part == record_head::LIBRARY);
            }
            has_record |= word.starts_with(b"LANDBRIDGE_RECORD=")
                || word.starts_with(b"LANDBRIDGE_RECORD_ABOVE=");
            at = at.add(1);
        }
    }
    has_library && has_record
}

/// Examines a file that is to be executed. `Err`: the kernel does not execute the file.
fn of_file(path: &CStr, scripts: usize) -> Result<Option<UnobservedReason>, ()> {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let file = kernel(libc::SYS_openat, [HERE, path.as_ptr().addr() as u64, flags, 0, 0, 0]);
    let Ok(file) = u64::try_from(file) else {
        // A file may be executable and not readable.
        let is_there = file == -i64::from(libc::EACCES);
        return if is_there { Ok(None) } else { Err(()) };
    };
    let mut start = [0_u8; START_BYTES];
    let place = start.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_pread64, [file, place, START_BYTES as u64, 0, 0, 0]);
    let is_other_user = runs_as_another(file);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let start = &start[..usize::try_from(length).unwrap_or(0)];
    if let Some(line) = start.strip_prefix(b"#!") {
        let interpreter = interpreter(line);
        return match scripts {
            0 => Err(()),
            _ => interpreter.map_or(Err(()), |path| of_interpreter(path, scripts - 1)),
        };
    }
    let unseen = of_program(start)?;
    Ok(unseen.or(is_other_user.then_some(UnobservedReason::OtherUser)))
}

/// The word after `#!`.
fn interpreter(line: &[u8]) -> Option<&[u8]> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    line.split(|byte| *byte == b' ' || *byte == b'\t').find(|word| !word.is_empty())
}

fn of_interpreter(name: &[u8], scripts: usize) -> Result<Option<UnobservedReason>, ()> {
    let mut path = [0_u8; PATH_BYTES];
    path.get_mut(..name.len()).ok_or(())?.copy_from_slice(name);
    of_file(CStr::from_bytes_until_nul(&path).map_err(|_| ())?, scripts)
}

/// Whether the kernel gives the program another user or group than this process has (set-user-ID).
fn runs_as_another(file: u64) -> bool {
    // SAFETY: a structure for which all zeros are a valid value; the kernel writes exactly this
    // structure.
    let about = unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        kernel(libc::SYS_fstat, [file, (&raw mut about).addr() as u64, 0, 0, 0, 0]);
        about
    };
    let is = |bit: libc::mode_t| about.st_mode & bit != 0;
    let own = |number| kernel(number, [0; 6]) as u32;
    is(libc::S_ISUID) && about.st_uid != own(libc::SYS_getuid)
        || is(libc::S_ISGID) && is(libc::S_IXGRP) && about.st_gid != own(libc::SYS_getgid)
        || has_capabilities(file) && own(libc::SYS_getuid) != 0
}

/// Whether the file gives the program rights that its user lacks (capabilities(7), "File
/// capabilities"): in that case ld.so(8) ignores LD_PRELOAD.
fn has_capabilities(file: u64) -> bool {
    let name = c"security.capability".as_ptr().addr() as u64;
    kernel(libc::SYS_fgetxattr, [file, name, 0, 0, 0, 0]) > 0
}

/// Examines the start of an ELF file (elf(5)). `Err`: the file is no ELF program.
fn of_program(start: &[u8]) -> Result<Option<UnobservedReason>, ()> {
    const CLASS: usize = 4;
    const CLASS_64: u8 = 2;
    const HEADERS_AT: usize = 32;
    const HEADER_BYTES: usize = 56;
    const HEADERS: usize = 56;
    const KIND_INTERPRETER: u32 = 3;
    const OFFSET: usize = 8;
    const LENGTH: usize = 32;
    if !start.starts_with(b"\x7fELF") {
        return Err(());
    }
    if start.get(CLASS) != Some(&CLASS_64) {
        return Ok(Some(UnobservedReason::OtherLibrary));
    }
    let long = |at: usize| {
        let bytes = start.get(at..at + 8)?;
        usize::try_from(u64::from_ne_bytes(bytes.try_into().ok()?)).ok()
    };
    let headers = long(HEADERS_AT).unwrap_or(usize::MAX);
    let count = start.get(HEADERS..HEADERS + 2).map_or(0, |it| u16::from_ne_bytes([it[0], it[1]]));
    for number in 0..usize::from(count) {
        let Some(at) = headers.checked_add(number * HEADER_BYTES) else { break };
        let Some(kind) = start.get(at..at.saturating_add(4)) else { break };
        if kind != KIND_INTERPRETER.to_ne_bytes() {
            continue;
        }
        let place = long(at + OFFSET).zip(long(at + LENGTH));
        let name = place.and_then(|(at, length)| start.get(at..at.checked_add(length)?));
        let last = name.and_then(|name| name.rsplit(|byte| *byte == b'/').next());
        let is_ours = last.is_some_and(|last| last.starts_with(b"ld-linux"));
        return Ok((!is_ours).then_some(UnobservedReason::OtherLibrary));
    }
    Ok(Some(UnobservedReason::Static))
}

/// Reports a program started by this process that a later incarnation may find changed.
///
/// # Safety
/// The path is a C string.
unsafe fn before_start(path: *const c_char) {
    // SAFETY: the caller's promise.
    let (name, change) = unsafe {
        let place = path.addr() as u64;
        (Path(text(place)), change_of(HERE, place))
    };
    if let Some(change) = change {
        let more = if change == NameChange::Component { CHANGED_COMPONENT } else { CHANGED };
        forbid_restart_of(format_args!("it starts {name}{more}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(class: u8, interpreter: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[4] = class;
        bytes[32..40].copy_from_slice(&64_u64.to_ne_bytes());
        bytes[56..58].copy_from_slice(&2_u16.to_ne_bytes());
        bytes[64..68].copy_from_slice(&1_u32.to_ne_bytes());
        if let Some(name) = interpreter {
            bytes[120..124].copy_from_slice(&3_u32.to_ne_bytes());
            bytes[128..136].copy_from_slice(&256_u64.to_ne_bytes());
            bytes[152..160].copy_from_slice(&(name.len() as u64 + 1).to_ne_bytes());
            bytes[256..256 + name.len()].copy_from_slice(name);
        }
        bytes
    }

    #[test]
    fn programs_that_load_no_library_of_ours_are_distinguished() {
        let ours = elf(2, Some(b"/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(of_program(&ours), Ok(None));
        assert_eq!(of_program(&elf(2, None)), Ok(Some(UnobservedReason::Static)));
        let musl = elf(2, Some(b"/lib/ld-musl-x86_64.so.1"));
        assert_eq!(of_program(&musl), Ok(Some(UnobservedReason::OtherLibrary)));
        let narrow = elf(1, Some(b"/lib/ld-linux.so.2"));
        assert_eq!(of_program(&narrow), Ok(Some(UnobservedReason::OtherLibrary)));
        assert_eq!(of_program(b"text"), Err(()));
        // A truncated or invalid file causes no read beyond its end.
        for length in 0..ours.len() {
            let _ = of_program(&ours[..length]);
        }
        let mut wild = ours.clone();
        wild[32..40].copy_from_slice(&u64::MAX.to_ne_bytes());
        let _ = of_program(&wild);
        let mut wild = ours;
        wild[128..136].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(of_program(&wild), Ok(Some(UnobservedReason::OtherLibrary)));
    }

    #[test]
    fn a_script_is_what_its_first_line_names() {
        assert_eq!(interpreter(b" /bin/sh -e\necho"), Some(&b"/bin/sh"[..]));
        assert_eq!(interpreter(b"\n"), None);
        assert_eq!(of_file(c"/bin/sh", SCRIPTS_MAX), Ok(None));
        assert_eq!(of_file(c"/no/such", SCRIPTS_MAX), Err(()));
        let script = std::env::temp_dir().join(format!("landbridge-script-{}", std::process::id()));
        std::fs::write(&script, "#! /bin/sh\n").unwrap();
        let path = std::ffi::CString::new(script.to_str().unwrap()).unwrap();
        assert_eq!(of_file(&path, SCRIPTS_MAX), Ok(None));
        assert_eq!(of_file(&path, 0), Err(()));
        std::fs::remove_file(script).unwrap();
    }

    #[test]
    fn an_environment_without_the_library_is_reported() {
        let names = |words: &[&CStr]| {
            let mut list: Vec<*mut c_char> =
                words.iter().map(|it| it.as_ptr().cast_mut()).collect();
            list.push(std::ptr::null_mut());
            // SAFETY: C strings, and a null pointer after them.
            unsafe { loads_interposer(list.as_ptr()) }
        };
        let (library, record) =
            (c"LD_PRELOAD=/a/liblandbridge_interpose.so:/b.so", c"LANDBRIDGE_RECORD=5");
        assert!(names(&[c"A=1", library, record]));
        assert!(!names(&[record]) && !names(&[library]) && !names(&[]));
        assert!(!names(&[c"LD_PRELOAD=/b.so", record]));
    }
}
