//! Metadata of files as the kernel reports it: kind, identity, canonical path.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use libc::{c_int, mode_t};

use crate::file_identity::{FileIdentity, FileKind, PATH_BYTES};
use crate::file_status::status;
use crate::kernel_calls::{kernel, text};
use crate::processes::{each_number_in, has_ended};

/// Kind and identity of what is open at a descriptor.
pub fn identity_of(descriptor: u64) -> Option<(FileKind, FileIdentity)> {
    asked((descriptor, c"".as_ptr().addr() as u64), libc::AT_EMPTY_PATH)
}

/// Kind and identity of what a path names; a symbolic link is not followed.
pub fn identity_at(place: (u64, u64)) -> Option<(FileKind, FileIdentity)> {
    asked(place, libc::AT_SYMLINK_NOFOLLOW)
}

/// Kind and identity of what a path names, or of the descriptor of the directory if the path is
/// empty or 0; a symbolic link is followed.
pub fn identity_behind((directory, path): (u64, u64)) -> Option<(FileKind, FileIdentity)> {
    if path == 0 {
        return identity_of(directory);
    }
    asked((directory, path), libc::AT_EMPTY_PATH)
}

/// The directory in which a path names something, and its identity: every change of a name changes
/// the time of its last status change. `look` gets its path. 0: there is no such directory.
///
/// # Safety
/// The path is 0 or a C string.
pub unsafe fn directory_changed(
    (directory, path): (u64, u64),
    look: impl FnOnce((u64, u64), &FileIdentity) -> u64,
) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let name = &name[..name.len() - name.iter().rev().take_while(|byte| **byte == b'/').count()];
    let above = name.iter().rposition(|byte| *byte == b'/').map_or(&b"."[..], |at| &name[..=at]);
    let mut folder = [0; PATH_BYTES];
    if above.len() >= PATH_BYTES {
        return 0;
    }
    folder[..above.len()].copy_from_slice(above);
    let folder = (directory, folder.as_ptr().addr() as u64);
    identity_behind(folder).map_or(0, |(_, now)| look(folder, &now))
}

/// Mode of what is open at a descriptor.
pub fn mode_of(descriptor: u64) -> Option<mode_t> {
    const EMPTY: &std::ffi::CStr = c"";
    let place = (descriptor, EMPTY.as_ptr().addr() as u64);
    status(place, libc::AT_EMPTY_PATH).map(|status| status.mode)
}

/// Mode and identity of what a path names; a symbolic link is not followed.
pub fn mode_and_identity_at(place: (u64, u64)) -> Option<(mode_t, FileIdentity)> {
    status(place, libc::AT_SYMLINK_NOFOLLOW).map(|status| (status.mode, status.identity))
}

fn asked(place: (u64, u64), flags: c_int) -> Option<(FileKind, FileIdentity)> {
    let status = status(place, flags)?;
    Some((kind_of(status.mode, status.special_device), status.identity))
}

fn kind_of(mode: mode_t, device: libc::dev_t) -> FileKind {
    // random(4): /dev/random and /dev/urandom.
    let is_random = libc::major(device) == 1 && matches!(libc::minor(device), 8 | 9);
    match mode & libc::S_IFMT {
        libc::S_IFREG => FileKind::File,
        libc::S_IFDIR => FileKind::Directory,
        libc::S_IFCHR if is_random => FileKind::Random,
        _ => FileKind::Other,
    }
}

/// Whether a descriptor is that of a named pipe, a block device or a terminal. A replay must not
/// repeat writes to these, and they are not recorded.
pub fn passes_on(descriptor: u64) -> bool {
    let mut about = MaybeUninit::<libc::stat>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    let is_there = kernel(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]) == 0;
    // SAFETY: all zeros are a value, and the kernel has written another.
    is_there && is_passage(&unsafe { about.assume_init() })
}

/// Whether a path names a named pipe, a block device or a terminal; a symbolic link is followed.
pub fn passes_on_at((directory, path): (u64, u64)) -> bool {
    let mut about = MaybeUninit::<libc::stat>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    let is_there = kernel(libc::SYS_newfstatat, [directory, path, room, 0, 0, 0]) == 0;
    // SAFETY: all zeros are a value, and the kernel has written another.
    is_there && is_passage(&unsafe { about.assume_init() })
}

fn is_passage(about: &libc::stat) -> bool {
    // Linux's list of devices: serial lines and consoles, pseudoterminals, USB lines; the kernel's
    // log.
    let is_terminal = match (libc::major(about.st_rdev), libc::minor(about.st_rdev)) {
        (1, minor) => minor == 11,
        (major, _) => matches!(major, 4 | 5 | 136..=143 | 166 | 188 | 204),
    };
    match about.st_mode & libc::S_IFMT {
        libc::S_IFIFO | libc::S_IFBLK => true,
        libc::S_IFCHR => is_terminal,
        _ => false,
    }
}

/// Identity of the directory that contains, or would contain, what a path names. `None`: there is
/// no such directory.
///
/// # Safety
/// The path is a C string.
pub unsafe fn directory_of(place: (u64, u64)) -> Option<FileIdentity> {
    let mut path = [0; PATH_BYTES];
    // SAFETY: the caller's promise.
    unsafe { directory_path(place, &mut path) }?;
    identity_at((crate::kernel_calls::HERE, path.as_ptr().addr() as u64))
        .map(|(_, identity)| identity)
}

/// Kind of the file system of the directory that contains, or would contain, what a path names
/// (`f_type` of statfs(2)). `None`: there is no such directory.
///
/// # Safety
/// The path is a C string.
pub unsafe fn file_system_of(place: (u64, u64)) -> Option<i64> {
    let mut path = [0; PATH_BYTES];
    // SAFETY: the caller's promise.
    unsafe { directory_path(place, &mut path) }?;
    let mut about = MaybeUninit::<libc::statfs>::zeroed();
    let (name, room) = (path.as_ptr().addr() as u64, about.as_mut_ptr().addr() as u64);
    let is_there = kernel(libc::SYS_statfs, [name, room, 0, 0, 0, 0]) == 0;
    // SAFETY: all zeros are a value, and the kernel has written another.
    is_there.then(|| unsafe { about.assume_init() }.f_type)
}

/// Writes the canonical path of the directory of what a path names into `into`, with a zero after
/// it.
///
/// # Safety
/// The path is a C string.
unsafe fn directory_path(place: (u64, u64), into: &mut [u8; PATH_BYTES]) -> Option<()> {
    // SAFETY: the caller's promise.
    let length = unsafe { path_of_name(place, into) };
    let slash = into[..length].iter().rposition(|byte| *byte == b'/')?;
    into[slash.max(1)] = 0;
    Some(())
}

/// Another descriptor of the same file, open for reading.
pub fn open_to_read(descriptor: u64) -> Option<u64> {
    let name = link_of(descriptor);
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let here = libc::AT_FDCWD as u32 as u64;
    let name = name.text().as_ptr().addr() as u64;
    let found = kernel(libc::SYS_openat, [here, name, flags, 0, 0, 0]);
    u64::try_from(found).ok()
}

/// Writes the kernel's path of what is open at a descriptor into `into`; returns the path's length
/// in bytes.
pub fn path_of(descriptor: u64, into: &mut [u8; PATH_BYTES]) -> usize {
    let name = link_of(descriptor);
    let room = into.as_mut_ptr().addr() as u64;
    let name = name.text().as_ptr().addr() as u64;
    let length = kernel(libc::SYS_readlink, [name, room, PATH_BYTES as u64 - 1, 0, 0, 0]);
    usize::try_from(length).unwrap_or(0)
}

/// Path of a descriptor's link in proc(5).
pub fn link_of(descriptor: u64) -> Name {
    Name::new(&[b"/proc/self/fd/", Digits::of(descriptor as u32 as u64).text()])
}

/// Path of the file in proc(5) that names the call in which a thread of this process waits.
pub fn call_path(thread: u64) -> Name {
    Name::new(&[b"/proc/self/task/", Digits::of(thread).text(), b"/syscall"])
}

/// Path of the file in proc(5) that describes what is open at a descriptor.
pub fn information_path(descriptor: u64) -> Name {
    Name::new(&[b"/proc/self/fdinfo/", Digits::of(descriptor as u32 as u64).text()])
}

/// Writes the canonical path of what a path names into `into`; returns the length in bytes, 0 if
/// nothing has that name.
pub fn path_at(place: (u64, u64), into: &mut [u8; PATH_BYTES]) -> usize {
    path_with(place, libc::O_NOFOLLOW, into)
}

/// Writes the canonical path of the file to which a path leads, also through a last symbolic link,
/// into `into`; returns the length in bytes, 0 if there is no such file.
pub fn path_behind(place: (u64, u64), into: &mut [u8; PATH_BYTES]) -> usize {
    path_with(place, 0, into)
}

fn path_with((directory, path): (u64, u64), more: i32, into: &mut [u8; PATH_BYTES]) -> usize {
    let flags = (libc::O_PATH | libc::O_CLOEXEC | more) as u64;
    let found = kernel(libc::SYS_openat, [directory, path, flags, 0, 0, 0]);
    if found < 0 {
        return 0;
    }
    let length = path_of(found as u64, into);
    kernel(libc::SYS_close, [found as u64, 0, 0, 0, 0, 0]);
    length
}

/// Writes the canonical path that a name has or had into `into`: the path of its directory, and the
/// last component. Returns the length in bytes, 0 if there is no such directory.
///
/// # Safety
/// The path is a C string.
pub unsafe fn path_of_name((directory, path): (u64, u64), into: &mut [u8; PATH_BYTES]) -> usize {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let name = &name[..name.len() - name.iter().rev().take_while(|byte| **byte == b'/').count()];
    let slash = name.iter().rposition(|byte| *byte == b'/');
    let (above, last) = slash.map_or((&b"."[..], name), |at| (&name[..=at], &name[at + 1..]));
    let mut folder = [0; PATH_BYTES];
    if last.is_empty() || above.len() >= PATH_BYTES {
        return 0;
    }
    folder[..above.len()].copy_from_slice(above);
    let length = path_at((directory, folder.as_ptr().addr() as u64), into);
    let start = if into[..length].ends_with(b"/") { length } else { length + 1 };
    if length == 0 || start + last.len() >= PATH_BYTES {
        return 0;
    }
    into[start - 1] = b'/';
    into[start..start + last.len()].copy_from_slice(last);
    start + last.len()
}

/// Whether a descriptor of another process is the same open file as a descriptor of this process
/// (open(2), "open file description"). Where kcmp(2) is not allowed, two descriptors of one file
/// count as the same. Where the descriptors of the other process cannot be listed, every file
/// counts as shared. A process that has ended shares nothing: what its children read moves no
/// position of its next incarnation.
pub fn shares_open_file(descriptor: u64, process: u64) -> bool {
    const KCMP_FILE: u64 = 0;
    let Some((_, here)) = identity_of(descriptor) else { return false };
    let own = kernel(libc::SYS_getpid, [0; 6]) as u64;
    let folder = Name::new(&[b"/proc/", Digits::of(process).text(), b"/fd"]);
    let mut is_shared = false;
    let is_listed = each_number_in(folder.text(), |number| {
        let link = Name::new(&[folder.bytes(), b"/", Digits::of(number).text()]);
        let place = link.text().as_ptr().addr() as u64;
        let found = asked((crate::kernel_calls::HERE, place), 0);
        let is_file = |(_, there): (FileKind, FileIdentity)| {
            (there.device, there.inode) == (here.device, here.inode)
        };
        if found.is_some_and(is_file) {
            let same = kernel(libc::SYS_kcmp, [process, own, KCMP_FILE, number, descriptor, 0]);
            is_shared |= same <= 0;
        }
    });
    is_shared || !is_listed && !has_ended(process)
}

/// A path of at most 63 bytes, built without allocation.
pub struct Name {
    bytes: [u8; NAME_BYTES],
    length: usize,
}

const NAME_BYTES: usize = 64;

impl Name {
    fn new(parts: &[&[u8]]) -> Self {
        let (mut bytes, mut length) = ([0; NAME_BYTES], 0);
        for part in parts {
            // A path that does not fit is cut off and names nothing; the last byte stays zero.
            let now = part.len().min(NAME_BYTES - 1 - length);
            bytes[length..length + now].copy_from_slice(&part[..now]);
            length += now;
        }
        Self { bytes, length }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    pub fn text(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

/// A number in decimal digits.
struct Digits {
    text: [u8; 20],
    start: usize,
}

impl Digits {
    fn of(mut number: u64) -> Self {
        let mut digits = Digits { text: [b'0'; 20], start: 20 };
        while number > 0 || digits.start == 20 {
            digits.start -= 1;
            digits.text[digits.start] = b'0' + (number % 10) as u8;
            number /= 10;
        }
        digits
    }

    fn text(&self) -> &[u8] {
        &self.text[self.start..]
    }
}

/// The part of a path after the process's own directory in proc(5). `None`: the path is elsewhere.
pub fn in_own_proc_directory(path: &[u8]) -> Option<&[u8]> {
    let rest = path.strip_prefix(b"/proc/")?;
    if let Some(rest) = rest.strip_prefix(b"self/") {
        return Some(rest);
    }
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = rest[..digits]
        .iter()
        .fold(0, |sum: i64, digit| sum.wrapping_mul(10).wrapping_add(i64::from(digit - b'0')));
    let is_own = digits > 0 && number == kernel(libc::SYS_getpid, [0; 6]);
    is_own.then(|| rest[digits..].strip_prefix(b"/")).flatten()
}

/// Whether files with this path are not recorded: shared memory that the network's libraries create
/// in each incarnation, and the list of the process's own threads, whose ids differ between
/// incarnations.
pub fn is_exempt(path: &[u8]) -> bool {
    if in_own_proc_directory(path).is_some_and(|rest| rest.starts_with(b"task")) {
        return true;
    }
    // Python's shared memory has names that begin with `psm_`.
    const OURS: [&[u8]; 6] = [
        b"/dev/shm/mpich",
        b"/dev/shm/ucx",
        b"/dev/shm/psm2_shm",
        b"/dev/shm/psm3_shm",
        b"/memfd:",
        b"/dev/infiniband",
    ];
    OURS.iter().any(|start| path.starts_with(start)) || is_log_file(path)
}

/// Whether this is the file without a name into which the agent lets message logs go on
/// (`recover_dir`): the system shows the name that it had.
fn is_log_file(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    name.starts_with(b".landbridge-logs-") && name.ends_with(b" (deleted)")
}

/// Whether a name, as a program writes it, may lead out of the directory with which it begins: by
/// `..`, or by a link of proc(5) or of `/dev` to an open file or a directory.
pub fn may_lead_out(name: &[u8]) -> bool {
    const LINKS: [&[u8]; 9] =
        [b"..", b"cwd", b"root", b"exe", b"fd", b"map_files", b"stdin", b"stdout", b"stderr"];
    name.split(|byte| *byte == b'/').any(|part| LINKS.contains(&part))
}

/// Whether the kernel generates the content of the file as it is read (proc, sysfs).
pub fn is_virtual(path: &[u8]) -> bool {
    path.starts_with(b"/proc/") || path.starts_with(b"/sys/")
}

/// Whether an open file belongs to an installed program. No process writes such files while the job
/// runs, and they are too large to record with content. `since` is the time at which the job began.
pub fn is_installed(descriptor: u64, path: &[u8], identity: &FileIdentity, since: i64) -> bool {
    has_name_of_module(path) && is_older(identity, since)
        || is_installed_library(descriptor, path, identity, since)
}

/// Whether an open file is a shared library, or another file of the system: the installed files
/// that programs map. A file that has changed since the job began is none, wherever it is: some
/// sites have the folders of their users below `/usr`.
pub fn is_installed_library(
    descriptor: u64,
    path: &[u8],
    identity: &FileIdentity,
    since: i64,
) -> bool {
    let is_library = || has_name_of_library(path) && begins_as_library(descriptor);
    is_older(identity, since) && (is_of_system(path) || is_library())
}

fn is_older(identity: &FileIdentity, since: i64) -> bool {
    identity.modified.max(identity.changed) < since
}

fn is_of_system(path: &[u8]) -> bool {
    const FOLDERS: [&[u8]; 5] = [b"/usr/", b"/lib/", b"/lib64/", b"/lib32/", b"/etc/"];
    FOLDERS.iter().any(|folder| path.starts_with(folder))
}

fn has_name_of_library(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    name.ends_with(b".so") || name.windows(4).any(|part| part == b".so.")
}

fn has_name_of_module(path: &[u8]) -> bool {
    path.ends_with(b".py") || path.ends_with(b".pyc")
}

/// Whether a file begins as a shared library does (elf(5)), whatever its name is.
fn begins_as_library(descriptor: u64) -> bool {
    const ELF: [u8; 4] = [0x7f, b'E', b'L', b'F'];
    let Some(file) = open_to_read(descriptor) else { return false };
    let mut found = [0_u8; 4];
    let room = found.as_mut_ptr().addr() as u64;
    kernel(libc::SYS_pread64, [file, room, found.len() as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    found == ELF
}

/// Whether a name, as a program writes it, is that of a file that is not recorded.
pub fn is_exempt_name(name: &[u8]) -> bool {
    is_exempt(name) && !may_lead_out(name)
}

/// Whether a path names a file that is not recorded, without resolving the directory.
///
/// # Safety
/// The path is a C string.
pub unsafe fn is_exempt_at((directory, path): (u64, u64)) -> bool {
    let _ = directory;
    // SAFETY: the caller's promise.
    is_exempt_name(unsafe { crate::kernel_calls::text(path) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_calls::HERE;

    #[test]
    fn installed_files_are_distinguished_from_a_users_own() {
        let folder = std::env::temp_dir().join(format!("lb-installed-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let is_installed = |name: &str, content: &[u8], age: i64, is_mapped: bool| {
            let path = folder.join(name);
            std::fs::write(&path, content).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file) as u64;
            let identity = identity_of(descriptor).unwrap().1;
            let judge = if is_mapped { is_installed_library } else { is_installed };
            judge(
                descriptor,
                path.as_os_str().as_encoded_bytes(),
                &identity,
                identity.changed + age,
            )
        };
        for name in ["x.so.6", "b.so", "x.so"] {
            assert!(is_installed(name, b"\x7fELF....", 1, false));
            assert!(is_installed(name, b"\x7fELF....", 1, true));
            assert!(!is_installed(name, b"\x7fELF....", 0, false), "changed as the job ran");
            assert!(!is_installed(name, b"\x7fEL", 1, false), "a user's data");
        }
        assert!(is_installed("m.pyc", b"x", 1, false) && is_installed("m.py", b"", 1, false));
        assert!(!is_installed("m.py", b"", 0, false) && !is_installed("m.py", b"", 1, true));
        for name in ["input.dat", "so", "x.sox"] {
            assert!(!is_installed(name, b"\x7fELF....", 1, false));
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(is_of_system(b"/usr/share/x.py") && is_of_system(b"/lib64/a"));
        assert!(!is_of_system(b"/home/a/input.dat"));
    }

    #[test]
    fn a_file_of_the_system_that_has_changed_is_a_users() {
        let file = FileIdentity { modified: 5, changed: 5, ..FileIdentity::NONE };
        let is_installed = |name: &[u8], since| is_installed_library(u64::MAX, name, &file, since);
        for name in [&b"/usr/share/x"[..], b"/lib64/x", b"/etc/x"] {
            assert!(is_installed(name, 6) && !is_installed(name, 5), "{}", name.escape_ascii());
        }
        assert!(!is_installed(b"/library/x", 6));
    }

    #[test]
    fn a_descriptor_shares_its_position_with_its_copies_alone() {
        // SAFETY: this test opens the descriptors.
        let [one, copy, other] = unsafe {
            let open = || libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let one = open();
            [one, libc::dup(one), open()].map(|it| u64::try_from(it).unwrap())
        };
        let own = u64::from(std::process::id());
        assert!(shares_open_file(one, own) && shares_open_file(copy, own));
        let mut child = std::process::Command::new("sleep");
        // SAFETY: the closure runs in the child, which keeps this one descriptor across exec.
        unsafe {
            use std::os::unix::process::CommandExt;
            child.arg("9").pre_exec(move || {
                libc::fcntl(copy as i32, libc::F_SETFD, 0);
                Ok(())
            });
        }
        let mut child = child.spawn().unwrap();
        assert!(shares_open_file(one, child.id().into()), "it has a copy");
        let is_allowed = kernel(libc::SYS_kcmp, [own, own, 0, one, copy, 0]) >= 0;
        assert!(!is_allowed || !shares_open_file(other, child.id().into()), "it has none");
        assert!(!has_ended(child.id().into()));
        child.kill().unwrap();
        let process = child.id().into();
        while !has_ended(process) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(!shares_open_file(one, process), "nobody has waited for it");
        child.wait().unwrap();
        assert!(has_ended(process));
        assert!(!shares_open_file(one, process), "it has ended");
        for descriptor in [one, copy, other] {
            // SAFETY: this test has opened the descriptor.
            unsafe { libc::close(descriptor as i32) };
        }
        assert_eq!(Digits::of(0).text(), b"0");
        assert_eq!(Digits::of(u64::MAX).text(), u64::MAX.to_string().as_bytes());
    }

    #[test]
    fn a_file_that_replaces_another_has_another_identity() {
        let path = std::env::temp_dir().join(format!("lb-born-{}", std::process::id()));
        let born = |text: &str| {
            let file = std::fs::File::create_new(&path).unwrap();
            std::fs::write(&path, text).unwrap();
            let found = identity_of(std::os::fd::AsRawFd::as_raw_fd(&file) as u64).unwrap().1;
            let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
            let named = (HERE, name.as_ptr().addr() as u64);
            assert_eq!(identity_at(named), Some((FileKind::File, found)));
            let older = crate::file_status::status_without_birth(named, 0).unwrap().identity;
            assert_eq!(FileIdentity { born: older.born, ..found }, older);
            std::fs::remove_file(&path).unwrap();
            found
        };
        let one = born("one");
        std::thread::sleep(std::time::Duration::from_millis(20));
        let other = born("other");
        let differs = !one.is_same_file(&other);
        assert!(differs || one.born == 0, "{one:?} {other:?}");
    }

    #[test]
    fn the_kernel_names_what_is_open() {
        let mut path = [0; PATH_BYTES];
        let length = path_at((HERE, c"/dev/null".as_ptr().addr() as u64), &mut path);
        assert_eq!(&path[..length], b"/dev/null");
        assert_eq!(path_at((HERE, c"/no/such".as_ptr().addr() as u64), &mut path), 0);
        for (name, whole) in [
            (c"/dev/null", &b"/dev/null"[..]),
            (c"/usr/../usr/bin/gone//", b"/usr/bin/gone"),
            (c"/gone", b"/gone"),
            (c"/no/such", b""),
            (c"/", b""),
        ] {
            let place = (HERE, name.as_ptr().addr() as u64);
            // SAFETY: a C string.
            let length = unsafe { path_of_name(place, &mut path) };
            assert_eq!(&path[..length], whole, "{name:?}");
        }
        let (kind, one) = identity_at((HERE, c"/usr".as_ptr().addr() as u64)).unwrap();
        assert_eq!(kind, FileKind::Directory);
        assert!(one.inode > 0 && one.changed > 1_000_000_000);
        assert_eq!(in_own_proc_directory(b"/proc/self/task/1"), Some(&b"task/1"[..]));
        let own = format!("/proc/{}/maps", std::process::id());
        assert_eq!(in_own_proc_directory(own.as_bytes()), Some(&b"maps"[..]));
        assert!(
            in_own_proc_directory(b"/proc/1/maps").is_none()
                && in_own_proc_directory(b"/proc/stat").is_none()
        );
        assert!(is_exempt(b"/proc/self/task") && !is_exempt(b"/proc/self/stat"));
        assert!(is_exempt(b"/var/tmp/.landbridge-logs-0f1e (deleted)"));
        assert!(!is_exempt(b"/var/tmp/.landbridge-logs-0f1e"), "it has a name");
        assert!(!is_exempt(b"/var/tmp/.landbridge-logs-1 (deleted)/x"));
        assert!(is_exempt(b"/dev/shm/psm2_shm.1") && !is_exempt(b"/dev/shm/psm_5b1f"), "Python");
        assert!(is_exempt_name(b"/proc/self/task/7/comm") && is_exempt_name(b"/dev/shm/mpich-1"));
        for name in ["/proc/self/task/7/cwd/f", "/dev/shm/mpich-1/../f", "/proc/self/task/7/fd/3"] {
            assert!(!is_exempt_name(name.as_bytes()), "{name}");
        }
        let (kind, _) = identity_at((HERE, c"/dev/urandom".as_ptr().addr() as u64)).unwrap();
        assert_eq!(kind, FileKind::Random);
    }
}
