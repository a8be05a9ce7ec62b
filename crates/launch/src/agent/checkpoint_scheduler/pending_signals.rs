//! Signals that an image may hold.
//!
//! An image holds the signals that are pending while it is taken, and whether the process is
//! stopped (SIGSTOP). A process that is restored from it would be ended, or stop, by them once
//! more. A signal with a handler is no matter: the restored process handles it as the first one
//! did.
//!
//! In: the process, as soon as CRIU has let go of it, and which signals its program blocks. Out:
//! whether its image may hold such a signal. What may never happen: such an image is kept.

use std::fs;

use crate::sys;

/// Signals that neither end nor stop a process by default (signal(7)); all others do.
const HARMLESS: u64 =
    bit(libc::SIGCHLD) | bit(libc::SIGURG) | bit(libc::SIGWINCH) | bit(libc::SIGCONT);
/// Signals that stop a process by default.
const STOPS: u64 =
    bit(libc::SIGSTOP) | bit(libc::SIGTSTP) | bit(libc::SIGTTIN) | bit(libc::SIGTTOU);
/// Flags of a process in proc_pid_stat(5): it exits, writes its core, was ended by a signal.
const DYING: u64 = 0x4 | 0x200 | 0x400;

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Whether a signal stops or ends the process, has done so, or will do so once the process blocks
/// only what its program blocks. `None`: what it blocks now.
pub fn ends_or_stops(pid: u32, blocked: Option<u64>) -> bool {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}"));
    let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else { return true };
    is_dying_or_stopped(&stat) || pending_of_default(&status, blocked) & !HARMLESS != 0
}

/// Lets a restored process go on that its image would have stop: a stop is of a process, and ends
/// with it. Without a stop nothing is sent, because the process may have a handler for SIGCONT.
pub fn continue_stopped(pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    if sys::state(pid) == Some('T') || pending_of_default(&status, None) & STOPS != 0 {
        sys::kill(pid, libc::SIGCONT);
    }
}

fn is_dying_or_stopped(stat: &str) -> bool {
    // The state follows the program's name, which may hold any characters.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return true };
    let mut fields = rest.split(' ');
    let is_stopped = matches!(fields.next(), None | Some("T" | "t" | "Z" | "X"));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    is_stopped || flags.is_none_or(|flags| flags & DYING != 0)
}

/// Pending signals of a text of proc_pid_status(5) that are not blocked, ignored or handled.
/// `blocked`: instead of those that the text calls blocked.
fn pending_of_default(status: &str, blocked: Option<u64>) -> u64 {
    let set = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        value.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0)
    };
    let blocked = blocked.unwrap_or_else(|| set("SigBlk:"));
    (set("SigPnd:") | set("ShdPnd:")) & !(blocked | set("SigIgn:") | set("SigCgt:"))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    fn wait_for(is_there: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_there() {
            assert!(Instant::now() < deadline, "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_process_that_is_stopped_goes_on_and_one_that_has_ended_is_seen() {
        let mut child = sleeper();
        let pid = child.id();
        wait_for(|| sys::state(pid) == Some('S'));
        assert!(!ends_or_stops(pid, None));
        continue_stopped(pid);
        sys::kill(pid, libc::SIGSTOP);
        wait_for(|| sys::state(pid) == Some('T'));
        assert!(ends_or_stops(pid, None));
        continue_stopped(pid);
        wait_for(|| sys::state(pid) == Some('S'));
        sys::kill(pid, libc::SIGTERM);
        wait_for(|| sys::is_over(pid));
        assert!(ends_or_stops(pid, None), "not reaped yet");
        child.wait().unwrap();
        assert!(ends_or_stops(pid, None), "nobody");
    }

    #[test]
    fn pending_signals_count_that_nothing_handles() {
        let status = |pending: u64, shared: u64, blocked: u64, ignored: u64, caught: u64| {
            format!(
                "Name:\tx\nSigQ:\t0/9\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\n\
                 SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
            )
        };
        let (term, alarm) = (bit(libc::SIGTERM), bit(libc::SIGALRM));
        let counted = |status: String| pending_of_default(&status, None);
        assert_eq!(counted(status(0, 0, 0, 0, 0)), 0);
        assert_eq!(counted(status(term, alarm, 0, 0, 0)), term | alarm);
        assert_eq!(counted(status(0, term, term, 0, alarm)), 0);
        assert_eq!(counted(status(term | alarm, 0, 0, term, alarm)), 0);
        // Who stands still for an image blocks all signals, and its program this one or none.
        let quiesced = status(0, term | alarm, !0, alarm, 0);
        assert_eq!(pending_of_default(&quiesced, Some(0)), term);
        assert_eq!(pending_of_default(&quiesced, Some(term)), 0);
    }

    #[test]
    fn a_process_that_dies_is_seen_while_its_core_is_written() {
        let stat = |state: char, flags: u64| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 99 0");
        assert!(!is_dying_or_stopped(&stat('S', 0x40_0000)));
        assert!(is_dying_or_stopped(&stat('T', 0x40_0000)));
        assert!(is_dying_or_stopped(&stat('D', 0x40_0200)));
        assert!(is_dying_or_stopped(&stat('R', 0x40_0404)));
        assert!(is_dying_or_stopped(""));
    }
}
