//! The soak: runs one program at a time and injects faults, until the time is up.
//!
//! One thread. It sleeps until the injector has work, the program has ended or is overdue, or a
//! signal arrives. Each program first runs once undisturbed: a failure of that run is not caused by
//! faults. When the time is up, the last program runs to its end without further faults.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use super::program::{OUTPUT, Program, Tools};
use super::tally::Tally;
use crate::net::signal::{self, Signals};

/// Time that a program has to end after SIGTERM: less than a lab allows its command.
const GRACE: Duration = Duration::from_secs(7);
/// Number of output lines that are shown of a failed program.
const TAIL_LINES: usize = 25;
/// Number of shown lines about incarnations of a rank.
const RESTARTS_SHOWN: usize = 3;
/// Number of shown lines that only one of two results has.
const DIFFERENCES_SHOWN: usize = 5;
const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Options of a soak.
pub struct SoakOptions {
    pub tools: Tools,
    pub programs: Vec<Program>,
    pub time: Duration,
    /// Largest duration of one run of a program.
    pub limit: Duration,
    /// The command line that repeats this soak.
    pub rerun_command: String,
}

/// Source of faults. All times are relative to the begin of the first disturbed program.
pub trait FaultInjector {
    /// Time at which the injector has work; `None`: never.
    fn next_time(&mut self) -> Option<Duration>;
    /// Performs the work that is due.
    fn act(&mut self, now: Duration, context: &mut SoakContext);
    /// Ends all faults, after the last program has ended.
    fn end(&mut self);
}

/// Two fault injectors; the first acts first.
pub struct CombinedInjector<A, B>(pub A, pub B);

impl<A: FaultInjector, B: FaultInjector> FaultInjector for CombinedInjector<A, B> {
    fn next_time(&mut self) -> Option<Duration> {
        self.0.next_time().into_iter().chain(self.1.next_time()).min()
    }

    fn act(&mut self, now: Duration, context: &mut SoakContext) {
        self.0.act(now, context);
        self.1.act(now, context);
    }

    fn end(&mut self) {
        self.0.end();
        self.1.end();
    }
}

/// Running program and counts, for fault injectors.
pub struct SoakContext {
    /// Process id of `landbridge run`.
    pub program: u32,
    pub tally: Tally,
    began: Instant,
    time: Duration,
}

impl SoakContext {
    pub fn log_line(&self, what: &str) {
        let (now, all) = (self.began.elapsed().as_secs_f64(), self.time.as_secs());
        println!("[{now:7.1} of {all} s] {what}");
    }
}

/// A running soak.
pub struct Soak<'a, T> {
    options: &'a SoakOptions,
    signals: Signals,
    injector: T,
    context: SoakContext,
    /// Outcomes of the undisturbed runs.
    results: Vec<(Program, Option<Vec<u8>>)>,
}

/// Why the soak no longer waits for a program.
enum RunEnd {
    Exited(ExitStatus),
    Overdue,
    /// A signal asks the soak to end.
    Signalled,
}

/// Result of one run.
enum RunOutcome {
    /// The run ended right, after this time, with a remark about restarts.
    Right(Duration, String),
    /// The job has ended with the line of a refusal, which a kill may cause.
    Refused(String),
    Wrong(String, String),
    Signalled,
}

impl<T: FaultInjector> Soak<'_, T> {
    /// Runs all programs and counts in `tally`. Returns the tally, and whether a signal ended the
    /// soak early.
    pub fn run(options: &SoakOptions, injector: T, tally: Tally) -> anyhow::Result<(Tally, bool)> {
        let signals = Signals::take(&[&ENDING[..], &[libc::SIGCHLD]].concat())?;
        options.tools.unpack().context("cannot write the programs")?;
        let mut soak = Soak {
            options,
            signals,
            injector,
            context: SoakContext { program: 0, tally, began: Instant::now(), time: options.time },
            results: Vec::new(),
        };
        let is_signalled = soak.try_undisturbed()? || soak.disturb()?;
        soak.injector.end();
        Ok((soak.context.tally, is_signalled))
    }

    /// Runs each program once without faults. True: a signal arrived.
    fn try_undisturbed(&mut self) -> anyhow::Result<bool> {
        for program in self.options.programs.clone() {
            match self.run_program(program, None)? {
                RunOutcome::Signalled => return Ok(true),
                RunOutcome::Right(took, _) => {
                    println!("undisturbed: {} ended right in {}", program.name(), seconds(took));
                    let result = program.outcome(&self.options.tools.dir);
                    self.results.push((program, result));
                }
                RunOutcome::Refused(why) => {
                    let name = program.name();
                    self.context.tally.failed(program, format!("{name}, undisturbed: {why}"));
                }
                RunOutcome::Wrong(why, output) => {
                    let name = program.name();
                    println!("undisturbed: {name} FAILED: {why}\n{}", tail(&output));
                    self.context.tally.failed(program, format!("{name}, undisturbed: {why}"));
                }
            }
        }
        Ok(false)
    }

    /// Runs the programs in turn with faults. True: a signal arrived.
    fn disturb(&mut self) -> anyhow::Result<bool> {
        self.context.began = Instant::now();
        let programs: Vec<Program> = self.results.iter().map(|(program, _)| *program).collect();
        let mut turns = programs.iter().copied().cycle();
        for number in 1.. {
            let Some(program) = turns.next().filter(|_| self.is_time_left()) else { break };
            match self.run_program(program, Some(number))? {
                RunOutcome::Signalled => return Ok(true),
                RunOutcome::Right(took, note) => {
                    let (name, took_s) = (program.name(), seconds(took));
                    self.context
                        .log_line(&format!("run {number}: {name} ended right in {took_s}{note}"));
                    self.context.tally.right(program, took);
                }
                RunOutcome::Refused(why) => {
                    let name = program.name();
                    self.context.log_line(&format!("run {number}: {name} was refused: {why}"));
                    self.context.tally.refused(program);
                }
                RunOutcome::Wrong(why, output) => {
                    let what = format!("run {number}: {}: {why}", program.name());
                    let shown = tail(&output);
                    self.context.log_line(&format!("{what}\n{shown}"));
                    let rerun_command = &self.options.rerun_command;
                    let failure = format!("{what}\n        rerun: {rerun_command}\n{shown}");
                    self.context.tally.failed(program, failure);
                }
            }
        }
        Ok(false)
    }

    /// Runs a program to its end; faults are injected only if the run has a number.
    fn run_program(&mut self, program: Program, number: Option<u32>) -> anyhow::Result<RunOutcome> {
        let tools = &self.options.tools;
        program.prepare(&tools.dir).context("cannot make a folder for the program")?;
        let log = tools.dir.join(OUTPUT);
        let output = File::create(&log)?;
        let mut command = program.command(tools);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // A process group of its own, so that the program and its children end together and Ctrl-C
        // reaches only the soak.
        command.process_group(0);
        // SAFETY: the closure only makes a system call with a value of its own.
        unsafe { command.pre_exec(signal::restore_in_child) };
        let started = Instant::now();
        let mut child = command.spawn().context("cannot start landbridge")?;
        self.context.program = child.id();
        let end = self.wait(&mut child, started, number.is_some())?;
        let took = started.elapsed();
        let output = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let verdict = match end {
            RunEnd::Signalled => return Ok(RunOutcome::Signalled),
            RunEnd::Exited(status) if !status.success() && program.refusal(&output).is_some() => {
                return Ok(RunOutcome::Refused(program.refusal(&output).unwrap_or_default()));
            }
            RunEnd::Overdue => Err(format!("still running after {}", seconds(took))),
            RunEnd::Exited(status) if status.success() => program.judge(&output),
            RunEnd::Exited(status) => {
                Err(format!("{} after {}", describe_status(status), seconds(took)))
            }
        };
        let verdict = verdict.and_then(|()| self.compare(program));
        Ok(match verdict {
            Ok(()) => RunOutcome::Right(took, restarts(&output)),
            Err(why) => RunOutcome::Wrong(why, output),
        })
    }

    /// Whether the outcome of the program equals that of its undisturbed run.
    fn compare(&self, program: Program) -> Result<(), String> {
        let Some((_, Some(wanted))) = self.results.iter().find(|(of, _)| *of == program) else {
            return Ok(());
        };
        let found = program.outcome(&self.options.tools.dir).unwrap_or_default();
        if found == *wanted {
            return Ok(());
        }
        Err(format!("its result DIFFERS from the first one{}", differing_lines(wanted, &found)))
    }

    fn wait(
        &mut self,
        child: &mut Child,
        started: Instant,
        is_disturbed: bool,
    ) -> anyhow::Result<RunEnd> {
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(RunEnd::Exited(status));
            }
            if started.elapsed() >= self.options.limit {
                end_group(child)?;
                return Ok(RunEnd::Overdue);
            }
            let mut pause = self.options.limit.saturating_sub(started.elapsed());
            if is_disturbed {
                let began = self.context.began;
                self.injector.act(began.elapsed(), &mut self.context);
                let next = self.injector.next_time();
                let until = |next: Duration| next.saturating_sub(began.elapsed());
                pause = next.map_or(pause, |next| pause.min(until(next)));
            }
            if self.sleep(pause)? {
                end_group(child)?;
                return Ok(RunEnd::Signalled);
            }
        }
    }

    /// Sleeps until a signal arrives or `pause` is over. True: the signal asks the soak to end.
    fn sleep(&self, pause: Duration) -> anyhow::Result<bool> {
        let pause =
            Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
        match poll(&mut [PollFd::new(&self.signals, PollFlags::IN)], Some(&pause)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut is_end = false;
        while let Some(received) = self.signals.poll_signal() {
            is_end |= ENDING.contains(&received.number);
        }
        Ok(is_end)
    }

    fn is_time_left(&self) -> bool {
        self.context.began.elapsed() < self.options.time
    }
}

/// Ends a program and its children with SIGTERM, and after [`GRACE`] with SIGKILL.
fn end_group(child: &mut Child) -> anyhow::Result<()> {
    const LOOK_AGAIN: Duration = Duration::from_millis(20);
    let group = Pid::from_child(child);
    let began = Instant::now();
    let _ = kill_process_group(group, Signal::TERM);
    while child.try_wait()?.is_none() {
        if began.elapsed() > GRACE {
            let _ = kill_process_group(group, Signal::KILL);
            child.wait()?;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// Whether a line such as `MPIC_Wait(91)......: ` names a function of a call stack and contains
/// nothing else.
fn is_call_stack_line(line: &str) -> bool {
    if line.starts_with("landbridge") {
        return false;
    }
    let rest = line.split_once(')').map(|(_, rest)| rest.trim_start_matches('.'));
    rest.is_some_and(|rest| rest.starts_with(':')) && !line.contains("poll failed")
}

/// The first lines that only one of two results has. Empty if a result is no text.
fn differing_lines(wanted: &[u8], found: &[u8]) -> String {
    let (Ok(wanted), Ok(found)) = (str::from_utf8(wanted), str::from_utf8(found)) else {
        return String::new();
    };
    let mut counts = BTreeMap::<&str, i64>::new();
    wanted.lines().for_each(|line| *counts.entry(line).or_default() -= 1);
    found.lines().for_each(|line| *counts.entry(line).or_default() += 1);
    let differ = counts.iter().filter(|(_, count)| **count != 0).take(DIFFERENCES_SHOWN);
    differ.map(|(line, count)| format!("; {count:+} times `{line}`")).collect()
}

/// Numbers of restarts and of restarts from checkpoints, as text.
fn restarts(output: &str) -> String {
    // With `log=info` the restarted processes print lines, too.
    let lines = || output.lines().filter(|line| !line.contains(": Info: "));
    let count = |what| lines().filter(|line| line.contains(what)).count();
    match (count(": restarted"), count(": restarted from checkpoint")) {
        (0, _) => String::new(),
        (starts, 0) => format!(", restarts: {starts}"),
        (starts, images) => format!(", restarts: {starts}, {images} of them from checkpoints"),
    }
}

fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(number)) => format!("killed by signal {number}"),
        (None, None) => "ended strangely".to_owned(),
    }
}

pub(super) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// The last lines of a program's output, without the call stacks of the MPI library. Of the lines
/// about incarnations of a lost rank only the last ones are shown, after what led to the loss.
fn tail(output: &str) -> String {
    let is_start = |line: &&str| line.starts_with("landbridge:   incarnation ");
    let lines: Vec<&str> =
        output.trim_end().lines().filter(|line| !is_call_stack_line(line)).collect();
    let mut earlier =
        lines.iter().filter(|line| is_start(line)).count().saturating_sub(RESTARTS_SHOWN);
    let is_shown = |line: &&&str| {
        let is_earlier = is_start(line) && earlier > 0;
        earlier -= is_earlier as usize;
        !is_earlier
    };
    let lines: Vec<&str> = lines.iter().filter(is_shown).copied().collect();
    let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    shown.iter().map(|line| format!("    | {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_are_counted() {
        let one = "landbridge: rank 1 was killed by SIGKILL: restarted\n";
        let image = "landbridge: rank 1 was killed by SIGKILL: restarted from checkpoint 3\n";
        assert_eq!((restarts("x"), restarts(one)), (String::new(), ", restarts: 1".to_string()));
        let own = "landbridge[7]: Info: restarted: 12 polls are replayed\n";
        let both = format!("{one}{image}{own}{one}");
        assert_eq!(restarts(&both), ", restarts: 3, 1 of them from checkpoints");
    }

    #[test]
    fn lines_that_only_one_result_has_are_shown() {
        assert_eq!(differing_lines(b"a\nb\nc", b"a\nc\nc"), "; -1 times `b`; +1 times `c`");
        assert_eq!(differing_lines(b"a\nb", b"\xff"), "");
    }

    #[test]
    fn call_stacks_do_not_hide_what_matters() {
        let output = "wrong: rank 1: 3 of 100\nMPIC_Wait(91)......: \nMPID_Barrier(165).: \n\
                      MPIDI_OFI_handle_cq_error(593): OFI poll failed (No route to host)\n\
                      Abort(3) on node 2: see above\nlandbridge: rank 1 ended (1)\n\
                      landbridge: rank 1 is given up (SIGKILL): so often\n";
        let kept = tail(output);
        assert_eq!(kept.lines().count(), 5, "{kept}");
        assert!(kept.starts_with("    | wrong: rank 1") && !kept.contains("MPIC_Wait"), "{kept}");
        let starts: String =
            (0..40).map(|n| format!("landbridge:   incarnation {n}: after 1 s\n")).collect();
        let kept = tail(&format!("why\n{starts}end\n"));
        assert!(
            kept.starts_with("    | why\n    | landbridge:   incarnation 37")
                && kept.ends_with("| end"),
            "{kept}"
        );
    }
}
