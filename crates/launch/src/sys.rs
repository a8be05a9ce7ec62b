//! System calls of this program beyond reading and writing: signals as a descriptor, orphaned
//! processes, and ending every descendant process of a job. The crate's unsafe code is in this
//! module and in `spawn` (between fork and exec).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::ending::Ending;

/// A set of signals that the process reads from a descriptor (signalfd(2)) instead of handling
/// them.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in this thread, and collects the blocked signals. The caller has to call
    /// this function before any other thread starts. SIGHUP stays ignored if the parent process had
    /// SIGHUP ignored, as nohup(1) does.
    pub fn block(signals: &[i32]) -> Result<Signals> {
        let is_wanted = |signal: &i32| *signal != libc::SIGHUP || !is_ignored(*signal);
        let signals: Vec<i32> = signals.iter().copied().filter(is_wanted).collect();
        let set = signal_set(&signals);
        // SAFETY: `set` is an initialised signal set; the call does not return the old mask.
        let result = unsafe { libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        check(result).context("cannot block signals")?;
        // SAFETY: `set` is an initialised signal set; the call returns a new descriptor, or -1.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        check(fd).context("cannot open a signal descriptor")?;
        // SAFETY: `fd` is open and belongs to no one else.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next pending signal, without waiting.
    pub fn poll_signal(&mut self) -> Option<i32> {
        const SIZE: usize = size_of::<libc::signalfd_siginfo>();
        let mut bytes = [0; SIZE];
        let count = rustix::io::read(&self.0, &mut bytes).ok()?;
        // The signal's number is the first field of the record.
        let number = bytes.first_chunk::<4>().filter(|_| count == SIZE)?;
        Some(u32::from_ne_bytes(*number).cast_signed())
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Restores the default disposition of SIGPIPE for a command that only prints: the command ends
/// without a message, as `ls` does, when the reader of its output closes the pipe.
pub fn end_without_reader() {
    // SAFETY: the call sets the default disposition; no handler of this program is involved.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero record is a valid place for sigaction to fill; nothing is changed.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: an all-zero set is a valid place for sigemptyset to fill; numbers are constants.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a child a clean signal mask, and has the kernel send `signal` to the child when the
/// process `parent` dies. The function runs between fork and exec and is async-signal-safe.
pub fn prepare_child(parent: u32, signal: i32) -> io::Result<()> {
    let none = signal_set(&[]);
    // SAFETY: plain system calls on local values.
    unsafe {
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        check(libc::prctl(libc::PR_SET_PDEATHSIG, signal))?;
        // The parent may have died before the prctl call: then the kernel would never send the
        // signal.
        if libc::getppid().cast_unsigned() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
    }
    Ok(())
}

/// Gives a child a session of its own; the function runs between fork and exec. Ctrl-C at the
/// terminal then reaches the launcher alone, and a kernel that shares the processor by session
/// treats every rank as a separate job, as under other launchers.
pub fn own_session() -> io::Result<()> {
    // SAFETY: a plain system call; a process fresh from fork leads no group, so it cannot fail.
    check(unsafe { libc::setsid() })
}

/// Continues as another child of the parent with process id `pid` (clone(2), `set_tid`); the
/// function runs between fork and exec. The calling process ends with code 0. The call fails if the
/// id is in use, and for processes that may not restore checkpoints (capabilities(7),
/// CAP_CHECKPOINT_RESTORE). The function is async-signal-safe.
pub fn become_process(pid: u32) -> io::Result<()> {
    let wanted = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: all zeroes are valid arguments: no stack, no descriptors.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = libc::CLONE_PARENT as u64;
    arguments.set_tid = (&raw const wanted).addr() as u64;
    arguments.set_tid_size = 1;
    let size = size_of::<libc::clone_args>();
    // SAFETY: `arguments` and `wanted` live until the call returns; without CLONE_VM the new
    // process has memory of its own, as after fork.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size) } {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: `_exit` ends the process and runs no code of the process.
        _ => unsafe { libc::_exit(0) },
    }
}

/// Switches off address space randomisation, so that a child has the same addresses at every start
/// (personality(2)). The function runs between fork and exec.
pub fn fix_addresses() -> io::Result<()> {
    // SAFETY: a plain system call.
    check(unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) })
}

/// Lets `fd` stay open over exec. The function runs between fork and exec.
pub fn keep_over_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: changes one flag of a descriptor of this process.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) })
}

/// Whether a signal has stopped the process `pid`, or a debugger traces the process.
pub fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// Whether the process `pid` has ended, reaped or not.
pub fn is_over(pid: u32) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// The state letter of the process `pid` in proc_pid_stat(5); `None` if there is no such process.
pub fn state(pid: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state follows the program's name, which may hold any characters.
    text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// Sets close-on-exec on every descriptor but the three standard streams, so that no child inherits
/// a descriptor that this process inherited from its parent. CRIU cannot take a checkpoint of a
/// process that has an open file of another mount namespace.
pub fn keep_inherited() {
    let all_but_standard: (libc::c_uint, libc::c_uint) = (3, libc::c_uint::MAX);
    // SAFETY: the call changes a flag of descriptors and touches no memory. Kernels before 5.11
    // refuse the call, and then the descriptors stay inherited.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            all_but_standard.0,
            all_but_standard.1,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}

/// Raises the soft limit of open files of this process to the hard limit: an agent needs six
/// descriptors for each rank. The soft limit that ranks get stays unchanged, because some programs
/// use the limit as the size of a table.
pub fn raise_open_files() {
    let limits = getrlimit(Resource::Nofile);
    let _ = RANK_OPEN_FILES.set(limits);
    let raised = Rlimit { current: limits.maximum, ..limits };
    // If the call fails, a job with few ranks still runs.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// The limit of open files that a rank gets; `None` leaves this process's own limit.
pub fn rank_open_files() -> Option<Rlimit> {
    RANK_OPEN_FILES.get().copied()
}

static RANK_OPEN_FILES: OnceLock<Rlimit> = OnceLock::new();

/// Makes this process the parent of orphaned descendants, in place of init.
pub fn adopt_orphans() -> Result<()> {
    // SAFETY: a flag of this process.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) })
        .context("cannot become the reaper of this job's processes")
}

/// Any child that has ended, if there is one. The child stays a zombie until [`reap`].
pub fn ended_child() -> Option<u32> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: an all-zero record is a valid place for waitid to fill; for a child that has ended,
    // the record holds a process id.
    let pid = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        if libc::waitid(libc::P_ALL, 0, &mut info, flags) < 0 {
            return None;
        }
        info.si_pid()
    };
    u32::try_from(pid).ok().filter(|&pid| pid > 0)
}

/// Reaps any child that has ended; `None` if no child has ended.
pub fn reap_any() -> Option<(u32, Ending)> {
    wait_for(-1).map(|it| (it.pid, it.ending))
}

/// A child that has ended.
pub struct Reaped {
    pub pid: u32,
    pub ending: Ending,
    /// The kernel has written a core of the child (core(5)).
    pub has_dumped: bool,
}

/// Reaps the child `pid` if the child has ended.
pub fn reap(pid: u32) -> Option<Reaped> {
    wait_for(i32::try_from(pid).ok()?)
}

/// Waits without a limit for the end of a child that is about to end, and reaps the child.
pub fn bury(pid: u32) {
    let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else {
        return;
    };
    let _ = rustix::io::retry_on_intr(|| {
        rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
    });
}

/// Starts a child that ends at once, and waits until it has ended; the caller buries it.
pub fn child_that_ends() -> Option<u32> {
    // SAFETY: the child makes one system call.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let child = u32::try_from(child).ok()?;
    let mut about = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let how = libc::WEXITED | libc::WNOWAIT;
    // SAFETY: the structure is a place for what the kernel says.
    while unsafe { libc::waitid(libc::P_PID, child, about.as_mut_ptr(), how) } != 0 {
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return None;
        }
    }
    Some(child)
}

fn wait_for(pid: i32) -> Option<Reaped> {
    let mut status = 0;
    // SAFETY: `status` is a place for one int.
    let pid = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
    let pid = u32::try_from(pid).ok().filter(|&pid| pid > 0)?;
    let ending = if libc::WIFSIGNALED(status) {
        Ending::Killed(libc::WTERMSIG(status))
    } else {
        Ending::Exited(libc::WEXITSTATUS(status))
    };
    Some(Reaped { pid, ending, has_dumped: libc::WIFSIGNALED(status) && libc::WCOREDUMP(status) })
}

pub fn kill(pid: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(pid) {
        // SAFETY: the call sends a signal; the error for a process that does not exist any more is
        // ignored.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Sends `signal` to the process group led by `pid`. False: there is no such group.
pub fn kill_group(pid: u32, signal: i32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| {
        // SAFETY: the call sends a signal and touches no memory.
        unsafe { libc::kill(-pid, signal) == 0 }
    })
}

/// Kills the process group led by `pid`, and waits for at most `limit` until none of its processes
/// is left, not even as a zombie that is a child of this process: then the number is free as a
/// process id.
pub fn end_group(pid: u32, limit: Duration) {
    let deadline = Instant::now() + limit;
    // SAFETY: the call reaps a child and touches no memory.
    let reap = || unsafe { libc::waitpid(-(pid as i32), std::ptr::null_mut(), libc::WNOHANG) > 0 };
    while kill_group(pid, libc::SIGKILL) && Instant::now() < deadline {
        while reap() {}
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every living descendant of this process, except the processes `spared` and their descendants.
pub fn descendants(spared: &[u32]) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (pid, parent) in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let mut found = Vec::new();
    let mut pending = vec![std::process::id()];
    while let Some(parent) = pending.pop() {
        for &pid in children.get(&parent).into_iter().flatten() {
            if !spared.contains(&pid) {
                found.push(pid);
                pending.push(pid);
            }
        }
    }
    found
}

/// The number of children of process `pid` that run the same program as `pid`: these children have
/// not called exec, so every descriptor of `pid` is open in them as well.
pub fn copies(pid: u32) -> usize {
    let exe = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own = exe(pid);
    let children = processes().filter(|&(_, parent)| parent == pid);
    children.filter(|&(child, _)| own.is_some() && exe(child) == own).count()
}

/// A child of process `pid` that has not ended, if there is one.
pub fn living_child(pid: u32) -> Option<u32> {
    processes()
        .filter(|&(_, parent)| parent == pid)
        .map(|(child, _)| child)
        .find(|&it| !is_over(it))
}

/// Whether process `pid` has not ended and is a child of process `parent`.
pub fn is_living_child(pid: u32, parent: u32) -> bool {
    processes().any(|found| found == (pid, parent)) && !is_over(pid)
}

/// Kills every descendant of this process that is in the session which `leader` began, or below a
/// process of that session. The function waits until no such process is left, not even as a zombie,
/// for at most `limit`; then the number `leader` is free as a process id. The processes `spared`
/// and their descendants are left alone. Returns false if some processes of the session are still
/// there.
pub fn end_session(leader: u32, spared: &[u32], limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let members = session(leader, spared);
        if members.is_empty() {
            return true;
        }
        for pid in members {
            kill(pid, libc::SIGKILL);
            // This process is the parent of the processes whose own parents have ended.
            reap(pid);
        }
        if Instant::now() >= deadline {
            return session(leader, spared).is_empty();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The processes of a session as [`end_session`] defines them, zombies included.
fn session(leader: u32, spared: &[u32]) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<Process>> = BTreeMap::new();
    for process in all_processes() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut pending = vec![(std::process::id(), false)];
    while let Some((parent, is_in)) = pending.pop() {
        let below = children.get(&parent).into_iter().flatten();
        for process in below.filter(|process| !spared.contains(&process.pid)) {
            let is_in = is_in || process.session == leader || process.pid == leader;
            found.extend(is_in.then_some(process.pid));
            pending.push((process.pid, is_in));
        }
    }
    found
}

/// Process ids with their parents, without zombies.
fn processes() -> impl Iterator<Item = (u32, u32)> {
    let living = all_processes().into_iter().filter(|process| !process.is_zombie);
    living.map(|process| (process.pid, process.parent))
}

struct Process {
    pid: u32,
    parent: u32,
    session: u32,
    is_zombie: bool,
}

fn all_processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The program's name in parentheses may hold any characters, even parentheses.
            let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
            let is_zombie = fields.next()? == "Z";
            let parent = fields.next()?.parse().ok()?;
            let session = fields.nth(1)?.parse().ok()?;
            Some(Process { pid, parent, session, is_zombie })
        })
        .collect()
}

pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    name.to_string()
}

/// Process id and user id of the peer of a Unix socket (SO_PEERCRED); the process id is 0 if the
/// peer is not visible in this pid namespace. The function does not use rustix, whose type cannot
/// represent process id 0.
pub fn peer(stream: &impl AsFd) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to `peer`; both live during the call.
    check(unsafe {
        libc::getsockopt(
            raw(stream),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    })?;
    Ok((peer.pid.cast_unsigned(), peer.uid))
}

/// Resident memory of a process without files, in bytes; 0 if there is no such process any more.
pub fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = |place| text.split(' ').nth(place).and_then(|pages| pages.parse::<u64>().ok());
    let private = pages(1).unwrap_or_default().saturating_sub(pages(2).unwrap_or_default());
    private * rustix::param::page_size() as u64
}

/// The effective user id of this process, inside its user namespace.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The effective user id of this process, as seen outside of its user namespace, if there is one.
pub fn user_outside() -> u32 {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    outside(&map, user())
}

/// Translates `user` by the lines of an id map (first id inside, first id outside, count).
fn outside(map: &str, user: u32) -> u32 {
    let find = |line: &str| {
        let numbers: Vec<u32> = line.split_whitespace().flat_map(str::parse).collect();
        let [inside, outside, count] = numbers[..] else { return None };
        let place = user.checked_sub(inside).filter(|&place| place < count)?;
        outside.checked_add(place)
    };
    map.lines().find_map(find).unwrap_or(user)
}

/// Waits until a descriptor is ready or until `timeout` has passed; `None` waits without a limit.
pub fn wait(fds: &mut [rustix::event::PollFd<'_>], timeout: Option<Duration>) {
    // A time that does not fit into a timespec is so long that no timeout has the same effect.
    let timeout = timeout.and_then(|timeout| rustix::event::Timespec::try_from(timeout).ok());
    // After an interrupted or failed wait the caller looks at every descriptor again.
    let _ = rustix::event::poll(fds, timeout.as_ref());
}

/// A string of `digits` hexadecimal digits from the kernel's random numbers.
pub fn random_hex(digits: usize) -> Result<String> {
    let mut bytes = vec![0; digits / 2];
    let mut filled = 0;
    while filled < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags).context("no randomness")?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Duplicates the descriptor to a number of 500 or more, which programs seldom reach, with
/// close-on-exec. A descriptor that a rank inherits must not have a number that the first
/// incarnation of the rank gave to a file.
pub fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    const LOWEST: RawFd = 500;
    rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST).unwrap_or(fd)
}

pub fn raw(fd: &impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}

/// Connects to a Unix socket without waiting, or fails: where the listener accepts nothing, a
/// blocking connect would wait without a limit. The stream that is returned does not block either.
pub fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// A lock for tests that start processes: these tests run one after the other, because a test that
/// waits for any child would reap the children of other tests.
#[cfg(test)]
pub fn children() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    #[test]
    fn random_ids_differ() {
        let (one, other) = (random_hex(32).unwrap(), random_hex(32).unwrap());
        assert_eq!(one.len(), 32);
        assert_ne!(one, other);
    }

    #[test]
    fn who_has_ended_is_seen_to_before_it_is_reaped() {
        let _alone = children();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!is_over(child.id()) && !is_stopped(child.id()));
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_over(child.id()) {
            assert!(Instant::now() < deadline);
        }
        child.wait().unwrap();
        assert!(is_over(child.id()));
    }

    #[test]
    fn a_child_that_has_ended_is_no_living_child() {
        let _alone = children();
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(living_child(own).is_some());
        assert!(is_living_child(child.id(), own) && !is_living_child(child.id(), child.id()));
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_living_child(child.id(), own) {
            assert!(Instant::now() < deadline);
        }
        assert_ne!(living_child(own), Some(child.id()));
        child.wait().unwrap();
    }

    #[test]
    fn own_children_are_found_and_can_be_spared() {
        let _alone = children();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(descendants(&[]).contains(&child.id()));
        assert!(!descendants(&[child.id()]).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_session_ends_with_all_that_it_has_started_and_its_number_is_free() {
        use std::os::unix::process::CommandExt;
        let _alone = children();
        adopt_orphans().unwrap();
        // The script has one child in its own process group, and one child in another process group
        // whose parent has ended.
        let script = "sleep 60 & (set -m; sleep 60 &) ; exec sleep 60";
        let start = || {
            let mut command = std::process::Command::new("bash");
            command.arg("-c").arg(script);
            // SAFETY: a system call.
            unsafe { command.pre_exec(own_session) };
            command.spawn().unwrap().id()
        };
        let (ended, other) = (start(), start());
        let all_run = |leader| session(leader, &[]).len() >= 3;
        let deadline = Instant::now() + Duration::from_secs(60);
        while !all_run(ended) || !all_run(other) {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(end_session(ended, &[other], Duration::from_secs(60)));
        assert!(!Path::new(&format!("/proc/{ended}")).exists());
        assert!(all_run(other), "it has nothing to do with that");
        assert!(end_session(other, &[], Duration::from_secs(60)));
        assert!(end_session(other, &[], Duration::ZERO), "there is none of this number");
        let group = start();
        while !all_run(group) {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        end_group(group, Duration::from_secs(60));
        assert!(!kill_group(group, 0), "the group has ended");
        end_session(group, &[], Duration::from_secs(60));
        // SAFETY: as in `adopt_orphans`.
        check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0) }).unwrap();
    }

    #[test]
    fn a_child_has_the_id_that_was_wanted_while_others_make_processes() {
        let _alone = children();
        let mut first = Command::new("true").spawn().unwrap();
        let wanted = first.id();
        first.wait().unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Relaxed) {
                        Command::new("true").status().unwrap();
                    }
                });
            }
            let outcomes: Vec<_> = (0..50).map(|_| given_id(wanted)).collect();
            is_over.store(true, Relaxed);
            match &outcomes[0] {
                // Processes without the privilege to restore checkpoints may not choose a process
                // id.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                _ => assert!(outcomes.iter().all(|it| *it.as_ref().unwrap() == wanted)),
            }
        });
        assert_eq!(become_process(u32::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// The process id that a new process prints for itself, after `wanted` was requested for the
    /// process.
    fn given_id(wanted: u32) -> io::Result<u32> {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$"]).stdout(Stdio::piped());
        // SAFETY: `become_process` only makes async-signal-safe calls.
        unsafe { command.pre_exec(move || become_process(wanted)) };
        let between = command.spawn()?;
        bury(between.id());
        let mut said = String::new();
        between.stdout.unwrap().read_to_string(&mut said)?;
        bury(wanted);
        said.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    #[test]
    fn users_have_a_name_outside_of_their_namespace() {
        assert_eq!(outside("         0       1000          1\n", 0), 1000);
        assert_eq!(outside("0 0 4294967295\n", 1000), 1000);
        assert_eq!(outside("0 1000 1\n1 100000 10\n", 3), 100_002);
        assert_eq!(outside("", 7), 7);
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(signal_name(11), "SIGSEGV");
        assert_eq!(signal_name(64), "signal 64");
    }
}
