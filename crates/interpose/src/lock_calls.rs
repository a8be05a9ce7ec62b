//! Recorded calls that lock files: flock(2), and ranges by fcntl(2).
//!
//! A lock of the process (`F_SETLK`) is taken as a lock of an open file, which outlives the process
//! if the agent holds that open file (`range_locks`).
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record.
//! What may never happen: a lock that the program has not released is released, or the reverse.

use landbridge_proto::nondeterminism::FileCall;
use libc::{c_int, flock};

use crate::file_metadata::identity_of;
use crate::kernel_calls::{bytes, error, kernel};
use crate::range_locks;
use crate::restart_refusals::abort_replay;
use crate::session::{Session, call_of};
use crate::signal_mask::interruptible;

impl Session {
    /// Handles `fcntl` with a command that takes or releases a range lock.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn lock_range(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, command, range, ..] = arguments;
        // SAFETY: the caller's promise.
        let asked = unsafe { (range as *const flock).read_unaligned() };
        let kind = asked.l_type as u16 as u64 | (asked.l_whence as u16 as u64) << 16;
        let words = [descriptor, kind, asked.l_start as u64, asked.l_len as u64, 0];
        let call = call_of(libc::SYS_fcntl, words, &[]);
        let open = self.table.get(descriptor)?;
        let (flags, offset) = (open.flags, open.offset);
        let is_of_process = matches!(command as c_int, libc::F_SETLK | libc::F_SETLKW);
        let known = if is_of_process { self.known_holder(descriptor) } else { Some(descriptor) };
        let is_live = self.is_live();
        let wanted = match may_lock(flags, &asked) {
            true => absolute(&asked, offset, is_of_process),
            false => Err(error(libc::EBADF)),
        };
        let releases_nothing = known.is_none() && i32::from(asked.l_type) == libc::F_UNLCK;
        let Some(wanted) = wanted.ok().filter(|_| !releases_nothing) else {
            // The kernel, which has no lock of this process, finds the same error, or none.
            return Some(self.ask_kernel(call, arguments, wanted.err()));
        };
        let (result, holder) = if is_live {
            let extra = if known.is_none() { self.open_holder(descriptor) } else { None };
            let holder = extra.or(known).unwrap_or(descriptor);
            self.table.index(holder).into_iter().for_each(|index| self.hold(index));
            let waits = matches!(command as c_int, libc::F_SETLKW | libc::F_OFD_SETLKW);
            let would_mix = self.would_mix(holder, is_of_process);
            let take = |waits| match would_mix {
                true => error(libc::ENOLCK),
                false => lock_now(holder, wanted, waits),
            };
            let has_extra = [u8::from(extra.is_some())];
            (self.take_lock(call, waits, &[&has_extra], take), holder)
        } else {
            let mut has_extra = [0];
            let result = self.replay_on(call, "lock", descriptor, &mut [&mut has_extra]);
            let extra = if has_extra == [1] { self.replay_holder(descriptor) } else { None };
            if has_extra == [1] && extra.is_none() {
                abort_replay(format_args!(
                    "it has too many files open, and cannot open one for a lock again"
                ));
            }
            let holder = extra.or(known).unwrap_or(descriptor);
            if extra.is_none() {
                self.table.index(holder).into_iter().for_each(|index| self.hold_again(index));
            }
            (result, holder)
        };
        if let Some(open) = self.table.get(holder).filter(|_| result == 0) {
            open.ranges.note(&asked, offset);
            open.has_process_locks = is_of_process && !open.ranges.is_empty();
            range_locks::note_lock();
        }
        Some(result)
    }

    /// Handles a lock that changes nothing: the result is `known`, or that of the kernel.
    fn ask_kernel(&mut self, call: FileCall, arguments: [u64; 6], known: Option<i64>) -> i64 {
        let descriptor = arguments[0];
        let perform = || known.unwrap_or_else(|| kernel(libc::SYS_fcntl, arguments));
        match self.was_live() {
            true => self.observe(call, perform, |_| [&[], &[]]),
            false => self.replay_on(call, "lock", descriptor, &mut []),
        }
    }

    /// Whether an open file would hold locks of the process and its own ones, which would not
    /// conflict with each other: it is the program's, and the process may not open the file for the
    /// locks alone.
    fn would_mix(&mut self, holder: u64, is_of_process: bool) -> bool {
        let Some(open) = self.table.get(holder) else { return false };
        !open.ranges.is_empty() && open.has_process_locks != is_of_process
    }

    /// Handles `fcntl` with a command that asks for the range locks of others.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn ask_for_lock(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, command, argument, ..] = arguments;
        let open = self.table.get(descriptor)?;
        let (offset, is_path) = (open.offset, open.flags & libc::O_PATH != 0);
        let call = call_of(libc::SYS_fcntl, [descriptor, command, 0, 0, 0], &[]);
        // SAFETY: the caller's promise.
        let into = unsafe { bytes(argument, size_of::<flock>()) };
        if !self.is_live() {
            return Some(self.replay_on(call, "lock", descriptor, &mut [into]));
        }
        let is_of_process = command as c_int == libc::F_GETLK;
        let holder = if is_of_process { self.known_holder(descriptor) } else { None };
        // SAFETY: the caller's promise.
        let asked = unsafe { (argument as *const flock).read_unaligned() };
        let holder = holder.unwrap_or(descriptor);
        // A lock of an open file may ask for a lock that unlocks (fcntl(2)).
        let wanted = match i32::from(asked.l_type) {
            _ if is_path => Err(error(libc::EBADF)),
            libc::F_UNLCK if is_of_process => Err(error(libc::EINVAL)),
            _ => absolute(&asked, offset, is_of_process),
        };
        let mut found = wanted.unwrap_or(asked);
        let room = (&raw mut found).addr() as u64;
        let ask = [holder, libc::F_OFD_GETLK as u64, room, 0, 0, 0];
        let result = wanted.map_or_else(|error| error, |_| kernel(libc::SYS_fcntl, ask));
        if result == 0 {
            let is_free = i32::from(found.l_type) == libc::F_UNLCK;
            let found = if is_free { flock { l_type: found.l_type, ..asked } } else { found };
            // SAFETY: the caller's promise.
            unsafe { (argument as *mut flock).write_unaligned(found) };
        }
        self.note(call, result, &[into]);
        Some(result)
    }

    /// Handles `flock`. `None`: the call is let through.
    pub fn lock(&mut self, descriptor: u64, operation: u64) -> Option<i64> {
        if self.table.get(descriptor).is_none() {
            let is_there = identity_of(descriptor).is_some();
            is_there.then(|| self.forbid_restart(format_args!("it locks a device or a pipe")))?;
            return None;
        }
        let call = call_of(libc::SYS_flock, [descriptor, operation, 0, 0, 0], &[]);
        self.table.index(descriptor).into_iter().for_each(|index| self.hold(index));
        let result = if self.is_live() {
            let at_once = operation | libc::LOCK_NB as u64;
            self.take_lock(call, operation != at_once, &[], |waits| {
                let operation = if waits { operation } else { at_once };
                kernel(libc::SYS_flock, [descriptor, operation, 0, 0, 0, 0])
            })
        } else {
            self.replay_on(call, "lock", descriptor, &mut [])
        };
        let open = self.table.get(descriptor).filter(|_| result == 0);
        if let Some(open) = open {
            let kind = operation as c_int & !libc::LOCK_NB;
            open.lock = if kind == libc::LOCK_UN { 0 } else { kind };
        }
        Some(result)
    }

    /// Takes a lock and notes the result, with these pieces. `take` asks for the lock, and waits
    /// for the lock if its argument is true. Signals may interrupt the wait.
    fn take_lock(
        &mut self,
        call: FileCall,
        waits: bool,
        pieces: &[&[u8]],
        take: impl Fn(bool) -> i64,
    ) -> i64 {
        let mut result = take(false);
        if waits && (result == error(libc::EAGAIN) || result == error(libc::EACCES)) {
            result = self.guard.while_released(|| interruptible(|| take(true)));
        }
        self.note(call, result, pieces);
        result
    }
}

/// Whether an open file with these flags may take this lock (fcntl(2), EBADF).
fn may_lock(flags: c_int, asked: &flock) -> bool {
    match i32::from(asked.l_type) {
        _ if flags & libc::O_PATH != 0 => false,
        libc::F_RDLCK => flags & libc::O_ACCMODE != libc::O_WRONLY,
        libc::F_WRLCK => flags & libc::O_ACCMODE != libc::O_RDONLY,
        _ => true,
    }
}

/// The range as one of an open file, or an error. A position of the program becomes one from the
/// start of the file: the holder has another position.
fn absolute(asked: &flock, offset: i64, is_of_process: bool) -> Result<flock, i64> {
    let mut range = *asked;
    if is_of_process {
        range.l_pid = 0;
    }
    if is_of_process && i32::from(range.l_whence) == libc::SEEK_CUR {
        range.l_whence = libc::SEEK_SET as i16;
        range.l_start = range.l_start.checked_add(offset).ok_or(error(libc::EOVERFLOW))?;
    }
    Ok(range)
}

/// Takes or releases a lock of an open file.
fn lock_now(holder: u64, range: flock, waits: bool) -> i64 {
    let command = if waits { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK } as u64;
    kernel(libc::SYS_fcntl, [holder, command, (&raw const range).addr() as u64, 0, 0, 0])
}
