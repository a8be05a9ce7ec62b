//! The life of a lab: two processes of this program around the user's command.
//!
//! The *monitor* is the process that the user started. The monitor stays in its namespaces, starts
//! the *init* of a new PID namespace, passes signals on, and returns the command's exit code. The
//! init makes the lab, carries its packets, runs the command on the first host, and reaps orphaned
//! processes. When the init ends, the kernel kills every process in the lab; namespaces,
//! interfaces, mounts and sockets vanish with the last process. The kernel kills the init when the
//! monitor dies, for any reason. So no process outlives the monitor, and there is no clean-up code
//! that could fail to run.
//!
//! A signal that a process sends to the monitor is passed to the command, which then has `GRACE` to
//! end. A signal from the terminal has reached the command already and is not passed on; three of
//! them within `IMPATIENCE` end everything.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use super::build::{Machines, build};
use super::control;
use super::emulator::Emulator;
use super::file;
use super::namespace::{self, LAB_DIR};
use super::plan::Plan;
use super::pump::Pump;
use super::signal::{self, Signals};
use super::topology;
use super::tun;

/// Exit code for a failure of the lab itself, as `env` and container runtimes use it; programs
/// seldom return this code.
pub const EXIT_LAB_FAILED: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// Time that the command has to end after a signal: the launcher ends a job on all sites within 5
/// s.
const GRACE: Duration = Duration::from_secs(10);

/// Time within which a user presses Ctrl-C three times to end everything.
const IMPATIENCE: Duration = Duration::from_secs(2);
const IMPATIENT_COUNT: usize = 3;

const FORWARDED: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The arguments of `run`.
pub struct LabRun {
    pub file: PathBuf,
    /// Name of the lab in place of the name in the file.
    pub name: Option<String>,
    pub command: Vec<OsString>,
}

/// Descriptors that the init gets from the monitor.
pub struct Inherited {
    /// Descriptor that reads end-of-file when the monitor has died.
    pub lifeline: RawFd,
    /// Listening socket for `landbridge lab link` from outside.
    pub control: RawFd,
}

/// Runs the monitor: builds the lab, runs the command in the lab, and returns the exit code.
pub fn run_lab(run: &LabRun) -> anyhow::Result<u8> {
    let plan = load(run)?;
    namespace::check_tools()?;
    tun::check_available()?;
    let control = control::listen_outside(&plan.name)?;
    let signals = Signals::take(&[&FORWARDED[..], &[libc::SIGCHLD]].concat())?;
    let (lifeline, _kept_open) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    namespace::prepare_pid_namespace()?;
    let mut init = start_init(run, lifeline, control)?;
    loop {
        poll(&mut [PollFd::new(&signals, PollFlags::IN)], None).or_else(ignore_interruption)?;
        while let Some(received) = signals.poll_signal() {
            if FORWARDED.contains(&received.number) && !received.from_terminal {
                send(init.id() as i32, received.number);
            }
        }
        if let Some(status) = init.try_wait()? {
            return Ok(exit_code(status));
        }
    }
}

fn load(run: &LabRun) -> anyhow::Result<Plan> {
    let mut plan = file::load(&run.file)?;
    if let Some(name) = &run.name {
        if !file::is_name(name) {
            bail!("--name is made of letters, digits and dashes, 60 at most");
        }
        plan.name.clone_from(name);
    }
    Ok(plan)
}

/// Starts this program again as the init of the PID namespace.
fn start_init(run: &LabRun, lifeline: OwnedFd, control: UnixListener) -> anyhow::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("landbridge-lab").arg("inside").arg("--file").arg(&run.file);
    if let Some(name) = &run.name {
        command.arg("--name").arg(name);
    }
    command.arg("--lifeline").arg(lifeline.as_raw_fd().to_string());
    command.arg("--control").arg(control.as_raw_fd().to_string());
    command.arg("--").args(&run.command);
    let passed = [lifeline.as_raw_fd(), control.as_raw_fd()];
    // SAFETY: the closure only makes system calls with values that it owns; it allocates nothing
    // and takes no lock.
    unsafe {
        command.pre_exec(move || {
            signal::restore_in_child()?;
            passed.iter().try_for_each(|&fd| set_close_on_exec(fd, false))
        });
    }
    command.spawn().context("cannot start the lab's init process")
}

/// Runs the init: makes the lab and runs the command in the lab. The init reports to the monitor
/// only by its exit code.
pub fn inside(run: &LabRun, inherited: &Inherited) -> anyhow::Result<u8> {
    let lifeline = adopt(inherited)?;
    // Without this name, `ps` would show the process as `exe`, the name of the link by which it was
    // started.
    let _ = rustix::thread::set_name(c"landbridge-lab");
    let signals = Signals::take(&[&FORWARDED[..], &[libc::SIGCHLD]].concat())?;
    let plan = load(run)?;
    namespace::enter_lab(&plan.name, &topology::render_hosts_file(&plan))?;
    let topology_path = Path::new(LAB_DIR).join("topology.toml");
    std::fs::write(&topology_path, topology::render(&plan, Path::new(LAB_DIR)))?;

    let (emulator, ports) = Emulator::new(&plan);
    let (machines, devices) = build(&plan, &ports)?;
    let (pump, handle) = Pump::new(emulator, devices)?;
    thread::Builder::new().name("emulator".into()).spawn(move || {
        let error = pump.run();
        eprintln!("landbridge-lab: the link emulator has stopped: {error}");
        std::process::exit(i32::from(EXIT_LAB_FAILED));
    })?;
    // SAFETY: the monitor passed this descriptor to the init, and no other code in this process
    // uses the descriptor.
    let outside = unsafe { UnixListener::from_raw_fd(inherited.control) };
    control::serve(handle, &plan, outside, control::listen_inside()?)?;

    match start_command(run, &plan, &machines, &topology_path) {
        Ok(child) => supervise(child, &signals, &lifeline),
        Err(error) => {
            let program = run.command[0].to_string_lossy();
            eprintln!("landbridge-lab: cannot run `{program}`: {error}");
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            Ok(if is_missing { EXIT_NOT_FOUND } else { EXIT_NOT_EXECUTABLE })
        }
    }
}

/// Makes the init die with the monitor, and sets close-on-exec on inherited descriptors.
fn adopt(inherited: &Inherited) -> anyhow::Result<OwnedFd> {
    set_close_on_exec(inherited.lifeline, true)?;
    set_close_on_exec(inherited.control, true)?;
    // SAFETY: the prctl call takes numbers; the descriptor was passed to this process, and no other
    // code in this process uses the descriptor.
    let lifeline = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        OwnedFd::from_raw_fd(inherited.lifeline)
    };
    // The monitor may have died before the prctl call; then the other end of the pipe is closed
    // already.
    let mut fds = [PollFd::new(&lifeline, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut fds, Some(&at_once))? > 0 {
        bail!("the process that started this lab has gone");
    }
    Ok(lifeline)
}

fn start_command(
    run: &LabRun,
    plan: &Plan,
    machines: &Machines,
    topology_path: &Path,
) -> io::Result<Child> {
    let mut command = Command::new(&run.command[0]);
    command.args(&run.command[1..]);
    command.env("LANDBRIDGE_TOPOLOGY", topology_path);
    command.env("LANDBRIDGE_LAB", &plan.name);
    // The machine of the command is the first machine of the first site, which every plan has.
    let home = machines[0][0].try_clone()?;
    // SAFETY: the closure only makes system calls with descriptors that it owns.
    unsafe {
        command.pre_exec(move || {
            signal::restore_in_child()?;
            home.enter()
        });
    }
    command.spawn()
}

/// Waits for the command, reaps other children as an init must, and passes signals on.
fn supervise(child: Child, signals: &Signals, lifeline: &OwnedFd) -> anyhow::Result<u8> {
    let command = Pid::from_child(&child);
    let mut deadline: Option<Instant> = None;
    let mut terminal_signals: Vec<Instant> = Vec::new();
    loop {
        if let Some(code) = reap(command)? {
            return Ok(code);
        }
        let timeout = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let mut fds = [
            PollFd::new(signals, PollFlags::IN),
            PollFd::from_borrowed_fd(lifeline.as_fd(), PollFlags::IN),
        ];
        poll(&mut fds, timeout.as_ref()).or_else(ignore_interruption)?;
        if !fds[1].revents().is_empty() {
            // The monitor has died, so no process reads the result.
            return Ok(EXIT_LAB_FAILED);
        }
        while let Some(received) =
            signals.poll_signal().filter(|received| FORWARDED.contains(&received.number))
        {
            if received.from_terminal {
                terminal_signals.retain(|at| at.elapsed() < IMPATIENCE);
                terminal_signals.push(Instant::now());
            } else {
                send(command.as_raw_nonzero().get(), received.number);
                deadline.get_or_insert_with(|| Instant::now() + GRACE);
            }
        }
        let is_over = deadline.is_some_and(|at| at <= Instant::now());
        if is_over || terminal_signals.len() >= IMPATIENT_COUNT {
            eprintln!("landbridge-lab: the command does not end; killing it");
            return Ok(128 + libc::SIGKILL as u8);
        }
    }
}

/// Reaps ended processes; returns the command's exit code if the command is among them.
fn reap(command: Pid) -> anyhow::Result<Option<u8>> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == command => {
                return Ok(Some(exit_code(ExitStatus::from_raw(status.as_raw()))));
            }
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The exit code in the convention of shells: a signal is 128 plus its number.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|number| 128 + number));
    code.map_or(EXIT_LAB_FAILED, |code| code as u8)
}

fn send(pid: i32, number: i32) {
    if let (Some(pid), Some(signal)) = (Pid::from_raw(pid), Signal::from_named_raw(number)) {
        // The process may have ended meanwhile; this process holds its exit status, so the process
        // id is not in use again.
        let _ = kill_process(pid, signal);
    }
}

fn ignore_interruption(error: rustix::io::Errno) -> Result<usize, rustix::io::Errno> {
    if error == rustix::io::Errno::INTR { Ok(0) } else { Err(error) }
}

fn timespec(duration: Duration) -> Timespec {
    // A grace period fits into the type.
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

fn set_close_on_exec(fd: RawFd, close: bool) -> io::Result<()> {
    let flags = if close { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: the call takes numbers only.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
