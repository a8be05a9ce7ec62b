//! Waits for pipes whose reads are recorded (`recorded_pipes`), and for programs that the program
//! has started.
//!
//! What is ready first depends on other processes, and so does whether something is ready at all
//! when the program asks. So the answers of poll(2), select(2) and epoll_wait(2) are recorded where
//! such a pipe is among what the program waits for. A replay takes them without a wait: the read
//! that follows waits. Of the end of a started program a replay waits for the end itself, and
//! compares how it ended.
//!
//! In: such calls of the recorded thread. Out: their results, noted in the record or taken from it.
//! What may never happen: a replay goes on with another exit code than before.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use landbridge_proto::nondeterminism::FileCall;
use libc::{c_int, c_long};

use crate::descriptor_table::DESCRIPTORS;
use crate::kernel_calls::{bytes, error, kernel};
use crate::recorded_pipes::{is_recorded, knows_any};
use crate::restart_refusals::abort_replay;
use crate::session::{CallDescription, Session, call_of};
use crate::signal_mask::interruptible;

/// Descriptors of epoll(7) instances to which a recorded pipe was added, a bit for each.
static EPOLLS: [AtomicU64; DESCRIPTORS / 64] = [const { AtomicU64::new(0) }; DESCRIPTORS / 64];

/// Bytes of `struct epoll_event`, and of a set of descriptors for each 64 of them (select(2)).
const EVENT_BYTES: usize = 12;
const SET_WORD: usize = 8;

impl Session {
    /// Handles a wait until a descriptor is ready. `None`: nothing that is recorded is waited for.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn wait_until_ready(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        // SAFETY: the caller's promise.
        if !unsafe { waits_for_pipe(number, arguments) } {
            return None;
        }
        let call = call_of(number, [count_of(number, arguments), 0, 0, 0, 0], &[]);
        // SAFETY: the program's memory, into which the kernel writes.
        let [first, second, third, fourth] = unsafe { answers(number, arguments) };
        let is_of_events = matches!(number, libc::SYS_epoll_wait | libc::SYS_epoll_pwait);
        if !self.is_live() {
            let about = CallDescription::Path("wait", b"a pipe");
            return Some(self.replay(call, about, &mut [first, second, third, fourth]));
        }
        let perform = || kernel(number, arguments);
        let result = self.guard.while_released(|| interruptible(perform));
        let events = if is_of_events { result.max(0) as usize * EVENT_BYTES } else { first.len() };
        self.note(call, result, &[&first[..events.min(first.len())], second, third, fourth]);
        Some(result)
    }

    /// Notes that a descriptor is added to an epoll(7) instance. The call itself is let through.
    pub fn note_epoll(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [instance, command, descriptor, ..] = arguments;
        let is_added = command != libc::EPOLL_CTL_DEL as u64 && is_recorded(descriptor);
        if is_added && let Some((word, bit)) = epoll_bit(instance) {
            word.fetch_or(bit, Relaxed);
        }
        None
    }

    /// Handles `wait4`.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn wait_for_end(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [child, status, options, usage, ..] = arguments;
        let found = Cell::new(0_u32);
        let place = found.as_ptr().addr() as u64;
        let call = call_of(libc::SYS_wait4, [options, 0, 0, 0, 0], &[]);
        let perform = |options| kernel(libc::SYS_wait4, [child, place, options, usage, 0, 0]);
        let result = self.recorded_end(call, options, perform, || found.get());
        // SAFETY: the program's place for the status, or null.
        let status = unsafe { (status as *mut u32).as_mut() };
        if let Some(status) = status.filter(|_| result > 0) {
            *status = found.get();
        }
        Some(result)
    }

    /// Handles `waitid`.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn wait_for_change(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [kind, child, about, options, usage, _] = arguments;
        // SAFETY: all zeros are a value.
        let found: Cell<libc::siginfo_t> = Cell::new(unsafe { std::mem::zeroed() });
        let place = found.as_ptr().addr() as u64;
        let call = call_of(libc::SYS_waitid, [kind, options, 0, 0, 0], &[]);
        let perform = |options| {
            let result = kernel(libc::SYS_waitid, [kind, child, place, options, usage, 0]);
            // SAFETY: the kernel has filled the structure, or it is zero.
            if result == 0 { i64::from(unsafe { found.get().si_pid() }) } else { result }
        };
        // SAFETY: as above.
        let state =
            || (found.get().si_code as u32) << 16 ^ unsafe { found.get().si_status() } as u32;
        let result = self.recorded_end(call, options, perform, state);
        // SAFETY: the program's structure, or null.
        let about = unsafe { (about as *mut libc::siginfo_t).as_mut() };
        if let Some(about) = about.filter(|_| result >= 0) {
            *about = found.get();
        }
        Some(result.min(0))
    }

    /// Result of a wait for the end of a child: a process id, 0 (none has ended) or an error.
    /// `state`: how the child has ended.
    fn recorded_end(
        &mut self,
        call: FileCall,
        options: u64,
        perform: impl Fn(u64) -> i64,
        state: impl Fn() -> u32,
    ) -> i64 {
        if self.is_live() {
            let result = self.guard.while_released(|| interruptible(|| perform(options)));
            // A process id is another one in each incarnation.
            self.note(call, result.min(1), &[&state().to_le_bytes()]);
            return result;
        }
        let mut before = [0; 4];
        let about = CallDescription::Path("wait", b"a program that it has started");
        let recorded = self.replay(call, about, &mut [&mut before]);
        if recorded <= 0 {
            return recorded;
        }
        loop {
            let blocking = options & !(libc::WNOHANG as u64);
            let result = self.guard.while_released(|| interruptible(|| perform(blocking)));
            let (now, before) = (state(), u32::from_le_bytes(before));
            match result {
                interrupted if interrupted == error(libc::EINTR) => (),
                1.. if now == before => return result,
                _ => abort_replay(format_args!(
                    "a program that it has started ended otherwise than before (wait: {result}, \
                     status {now:#x}, and before {before:#x})"
                )),
            }
        }
    }
}

/// Whether a recorded pipe is among what a call waits for.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn waits_for_pipe(number: c_long, arguments: [u64; 6]) -> bool {
    let [first, second, third, ..] = arguments;
    // A count that the kernel refuses, or a list longer than the descriptors that are tracked.
    let is_odd = !(1..=DESCRIPTORS as u64).contains(&(count_of(number, arguments) as u32 as u64));
    if is_odd || !knows_any() {
        return false;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            libc::SYS_poll | libc::SYS_ppoll => {
                let all = bytes(first, second as usize * size_of::<libc::pollfd>());
                let (_, all, _) = all.align_to::<libc::pollfd>();
                all.iter().any(|one| one.fd >= 0 && is_recorded(one.fd as u64))
            }
            libc::SYS_select | libc::SYS_pselect6 => {
                let count = (first as usize).min(DESCRIPTORS);
                let is_in = |set: &[u8], descriptor: usize| {
                    set.get(descriptor / 8).is_some_and(|byte| byte >> (descriptor % 8) & 1 == 1)
                };
                let sets = [second, third].map(|set| bytes(set, set_bytes(first)));
                (0..count).any(|descriptor| {
                    sets.iter().any(|set| is_in(set, descriptor)) && is_recorded(descriptor as u64)
                })
            }
            libc::SYS_epoll_wait | libc::SYS_epoll_pwait => {
                epoll_bit(first).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0)
            }
            _ => false,
        }
    }
}

/// Number of descriptors, or of events at most, which is the same in every incarnation.
fn count_of(number: c_long, arguments: [u64; 6]) -> u64 {
    match number {
        libc::SYS_poll | libc::SYS_ppoll => arguments[1],
        libc::SYS_select | libc::SYS_pselect6 => arguments[0],
        _ => arguments[2],
    }
}

/// Memory into which the kernel writes the answers of a call.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn answers(number: c_long, arguments: [u64; 6]) -> [&'static mut [u8]; 4] {
    let [first, second, third, fourth, fifth, _] = arguments;
    // The kernel writes how much of the time is left.
    const TIME_BYTES: usize = 16;
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            libc::SYS_poll | libc::SYS_ppoll => {
                let all = bytes(first, second as usize * size_of::<libc::pollfd>());
                let left = if number == libc::SYS_ppoll { third } else { 0 };
                [all, bytes(left, TIME_BYTES), &mut [], &mut []]
            }
            libc::SYS_select | libc::SYS_pselect6 => {
                let [a, b, c] = [second, third, fourth].map(|set| bytes(set, set_bytes(first)));
                [a, b, c, bytes(fifth, TIME_BYTES)]
            }
            _ => [bytes(second, third as c_int as usize * EVENT_BYTES), &mut [], &mut [], &mut []],
        }
    }
}

/// Bytes of a set of this many descriptors.
fn set_bytes(count: u64) -> usize {
    (count as usize).div_ceil(8 * SET_WORD) * SET_WORD
}

fn epoll_bit(instance: u64) -> Option<(&'static AtomicU64, u64)> {
    let word = EPOLLS.get(instance as usize / 64)?;
    Some((word, 1 << (instance % 64)))
}
