//! Copies from one descriptor to another within the kernel.
//!
//! In: a `sendfile` or `copy_file_range` of the program ([`KernelCopy`]). Out: the result, noted in
//! the record; for a copy to a pipe or a socket with a digest of the copied bytes. Replay copies
//! the same bytes to a pipe again, for the reader of the pipe, which is a child of this process or
//! its node agent. A copy to a recorded file is an effect, which replay does not repeat.

use std::cell::Cell;

use landbridge_proto::nondeterminism::{FileCall, PRECONDITION_WORDS};
use libc::c_long;

use crate::change_times::{is_local, mark_open};
use crate::file_content::content_of;
use crate::file_identity::FileKind;
use crate::file_metadata::identity_of;
use crate::kernel_calls::{error, kernel};
use crate::messages::Path;
use crate::restart_refusals::abort_replay;
use crate::session::{CallDescription, EffectOutcome, Session, call_of};
use crate::signal_mask::interruptible;
use crate::written_bytes::{written_between, written_mark};

/// A copy within the kernel. An offset is a pointer of the program's, or 0: the copy uses the
/// position of the open file.
#[derive(Clone, Copy)]
pub struct KernelCopy {
    number: c_long,
    arguments: [u64; 6],
    from: u64,
    from_offset: u64,
    to: u64,
    to_offset: u64,
}

/// Bytes that one call copies at most (`MAX_RW_COUNT` of the kernel).
const KERNEL_COPY_MAX: u64 = 0x7fff_f000;

impl KernelCopy {
    /// The copy that a `sendfile` or `copy_file_range` with these arguments asks for.
    pub fn of(number: c_long, arguments: [u64; 6]) -> KernelCopy {
        let [a, b, c, d, ..] = arguments;
        let (from, from_offset, to, to_offset) = match number {
            libc::SYS_sendfile => (b as u32 as u64, c, a, 0),
            _ => (a, b, c as u32 as u64, d),
        };
        KernelCopy { number, arguments, from, from_offset, to, to_offset }
    }

    fn length(&self) -> u64 {
        self.arguments[self.length_at()]
    }

    fn with_length(mut self, length: u64) -> KernelCopy {
        self.arguments[self.length_at()] = length;
        self
    }

    /// Number of the argument that is the length.
    fn length_at(&self) -> usize {
        if self.number == libc::SYS_sendfile { 3 } else { 4 }
    }

    fn perform(&self) -> i64 {
        kernel(self.number, self.arguments)
    }
}

impl Session {
    /// Handles a copy.
    ///
    /// # Safety
    /// The copy is that of a system call of the program.
    pub unsafe fn copy(&mut self, copy: KernelCopy) -> Option<i64> {
        let KernelCopy { from, from_offset, to, to_offset, .. } = copy;
        let is_file = self.table.get(to).is_some_and(|open| open.kind == FileKind::File);
        if !is_file {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_out(copy) };
        }
        // SAFETY: the caller's promise.
        let positions =
            unsafe { [self.copy_position(from, from_offset), self.copy_position(to, to_offset)] };
        let words = [to, from, copy.length(), positions[0] as u64, positions[1] as u64];
        let call = call_of(copy.number, words, &[]);
        let about = CallDescription::Path("copy within the kernel", self.table.path_of(to));
        let result = if self.is_live() {
            // SAFETY: the caller's promise.
            unsafe { self.perform_copy(call, copy, positions, about) }
        } else {
            let mut before = [0; 8];
            let result = self.replay(call, about, &mut [&mut before]);
            // SAFETY: the caller's promise.
            unsafe { self.compare_source(copy, result, u64::from_le_bytes(before)) };
            for offset in [from_offset, to_offset].into_iter().filter(|offset| *offset != 0) {
                // SAFETY: the program's offset, which the kernel would have advanced.
                unsafe { *(offset as *mut i64) += result.max(0) };
            }
            if from_offset == 0 && self.table.index(from).is_none() {
                // A file in memory, say: the process has filled it again.
                let forward = [from, result.max(0) as u64, libc::SEEK_CUR as u64, 0, 0, 0];
                kernel(libc::SYS_lseek, forward);
            }
            result
        };
        // Two descriptors of one open file have one position.
        let of_one = from_offset == 0 && self.table.index(from) == self.table.index(to);
        let moved = [(from, from_offset == 0), (to, to_offset == 0 && !of_one)];
        for (descriptor, _) in moved.into_iter().filter(|(_, moves)| *moves) {
            if let Some(open) = self.table.get(descriptor) {
                open.offset += result.max(0);
            }
        }
        Some(result)
    }

    /// Ends the process if a source that is not recorded, such as a file in memory which the
    /// process has filled again, has other bytes than those that were copied.
    ///
    /// # Safety
    /// The copy is that of a system call of the program.
    unsafe fn compare_source(&mut self, copy: KernelCopy, result: i64, before: u64) {
        if self.table.index(copy.from).is_some() || result <= 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let given = unsafe { (copy.from_offset as *const i64).as_ref() }.copied();
        let at = given.unwrap_or_else(|| position_of(copy.from));
        let about = CallDescription::Path("copy", self.table.path_of(copy.to));
        check_content(copy.from, at, result, before, about);
    }

    /// Performs a copy to a recorded file, or finds what an interrupted copy has done.
    ///
    /// # Safety
    /// The copy is that of a system call of the program.
    unsafe fn perform_copy(
        &mut self,
        call: FileCall,
        copy: KernelCopy,
        positions: [i64; 2],
        about: CallDescription<'_>,
    ) -> i64 {
        let KernelCopy { from, from_offset, to, to_offset, .. } = copy;
        let is_recorded = self.table.index(from).is_some();
        // A file in memory is another one in each incarnation, which fills it again.
        let of_both = |look: fn(u64) -> u64| [if is_recorded { look(from) } else { 0 }, look(to)];
        let state = || of_both(|file| identity_of(file).map_or(0, |(_, now)| now.changed as u64));
        let precondition = |_| {
            let [from, to] =
                of_both(|file| identity_of(file).map_or(0, |(_, now)| mark_open(file, now)));
            let is_counted = identity_of(copy.to).is_some_and(|(_, now)| is_local(copy.to, &now));
            [from, to, if is_counted { written_mark() } else { 0 }, 0, 0, 0, 0, 0]
        };
        let source_at = match is_recorded || from_offset != 0 {
            true => positions[0],
            false => position_of(from),
        };
        let places = [(from, source_at as u64), (to, positions[1] as u64)];
        let (at_end, is_behind) = (self.written_at_end(), Cell::new(false));
        let outcome = |before: [u64; PRECONDITION_WORDS]| {
            let length = copy.length() as usize;
            let times = [[before[0], before[1]], state()];
            let copied = written_between(before[2], at_end);
            let outcome = outcome_of_copy(copied, times, places, length);
            is_behind.set(matches!(outcome, EffectOutcome::Performed(_)));
            outcome
        };
        let result = self.effect(call, about, precondition, outcome, || copy.perform());
        if is_behind.get() {
            // The incarnation that copied had moved positions that died with it.
            for ((descriptor, at), offset) in places.into_iter().zip([from_offset, to_offset]) {
                // SAFETY: 0, or the program's offset, which the kernel would have advanced.
                match unsafe { (offset as *mut i64).as_mut() } {
                    Some(offset) => *offset += result,
                    None => move_to(descriptor, at.saturating_add_signed(result)),
                }
            }
        }
        let copied = (!is_recorded && result > 0)
            .then(|| content_of(from, source_at as u64, result as usize))
            .flatten();
        self.note(call, result, &[&copied.unwrap_or_default().1.to_le_bytes()]);
        result
    }

    /// Position of a copy in the file at a descriptor: the number at the pointer `offset`, or
    /// the position of the open file.
    ///
    /// # Safety
    /// `offset` is 0 or a pointer of the program's.
    unsafe fn copy_position(&mut self, descriptor: u64, offset: u64) -> i64 {
        // SAFETY: the caller's promise.
        let given = unsafe { (offset as *const i64).as_ref() }.copied();
        given.unwrap_or_else(|| self.table.get(descriptor).map_or(0, |open| open.offset))
    }

    /// Handles a copy from a file to a pipe or a socket.
    ///
    /// # Safety
    /// The copy is that of a system call of the program.
    unsafe fn copy_out(&mut self, copy: KernelCopy) -> Option<i64> {
        let KernelCopy { from, from_offset, .. } = copy;
        let index = self.table.index(from)?;
        if self.table.by_index(index).kind != FileKind::File {
            let path = Path(self.table.by_index(index).path());
            crate::restart_refusals::forbid_restart(format_args!(
                "it copies {path} within the kernel"
            ));
            return None;
        }
        // SAFETY: the caller's promise.
        let at = unsafe { self.copy_position(from, from_offset) };
        let call = call_of(copy.number, [from, at as u64, copy.length(), 0, 0], &[]);
        let result = if self.is_live() {
            self.perform_copy_out(call, copy, at)
        } else {
            let mut before = [0; 8];
            let about = CallDescription::Path("copy", self.table.path_of(from));
            let result = self.replay(call, about, &mut [&mut before]);
            if result > 0 {
                self.table.reopen_file(index);
                check_content(from, at, result, u64::from_le_bytes(before), about);
                repeat_copy(copy, at, result);
            }
            result
        };
        if from_offset == 0 {
            self.table.by_index(index).offset += result.max(0);
        }
        Some(result)
    }

    fn perform_copy_out(&mut self, call: FileCall, copy: KernelCopy, at: i64) -> i64 {
        let from = copy.from;
        let before = identity_of(from);
        let result = self.guard.while_released(|| interruptible(|| copy.perform()));
        let copied = content_of(from, at as u64, result.max(0) as usize);
        if identity_of(from) != before || copied.is_none() {
            let path = Path(self.table.path_of(from));
            crate::restart_refusals::forbid_restart(format_args!(
                "it copies {path} within the kernel, which is changed meanwhile or cannot be read \
                 again"
            ));
        }
        let (_, digest) = copied.unwrap_or_default();
        self.note(call, result, &[&digest.to_le_bytes()]);
        result
    }
}

fn position_of(descriptor: u64) -> i64 {
    kernel(libc::SYS_lseek, [descriptor, 0, libc::SEEK_CUR as u64, 0, 0, 0])
}

fn move_to(descriptor: u64, at: u64) {
    kernel(libc::SYS_lseek, [descriptor, at, libc::SEEK_SET as u64, 0, 0, 0]);
}

/// Whether a copy has happened during which the last incarnation was killed, and how much of it.
/// `copied`: the bytes that it copied, where the kernel has counted them. `before` and `now`: the
/// times at which source and target were changed last, or [`crate::change_times::UNSURE`]; other
/// processes may have changed both since. `places`: descriptor and position of both. A copy within
/// one file changes its own source, so its content shows nothing.
fn outcome_of_copy(
    copied: Option<u64>,
    [before, now]: [[u64; 2]; 2],
    [from, to]: [(u64, u64); 2],
    length: usize,
) -> EffectOutcome {
    match copied {
        Some(0) => return EffectOutcome::NotPerformed,
        // A kill has cut the copy off, unless the source ended there: nothing shows what others
        // have written since where the rest belongs.
        Some(copied) => {
            let whole = (length as u64).min(KERNEL_COPY_MAX);
            let has_ended = || {
                let size = identity_of(from.0).map_or(0, |(_, source)| source.size as u64);
                before[0] == now[0] && from.1 + copied >= size
            };
            return match copied >= whole || has_ended() {
                true => EffectOutcome::Performed(copied.min(whole) as i64),
                false => EffectOutcome::Unknown,
            };
        }
        None if before == now => return EffectOutcome::NotPerformed,
        None => (),
    }
    let source = content_of(from.0, from.1, length).filter(|_| before[0] == now[0]);
    match source {
        Some((bytes, _)) if content_of(to.0, to.1, bytes as usize) == source => {
            EffectOutcome::Performed(bytes as i64)
        }
        _ => EffectOutcome::Unknown,
    }
}

/// Ends the process if the file does not have the bytes that an earlier incarnation copied.
fn check_content(from: u64, at: i64, result: i64, before: u64, about: CallDescription<'_>) {
    let (found, now) = content_of(from, at as u64, result as usize).unwrap_or_default();
    if now != before {
        abort_replay(format_args!(
            "{about} gave {found} bytes of digest {now:016x}, and before {result} of \
             {before:016x}: the file has changed"
        ));
    }
}

/// Copies the bytes that an earlier incarnation copied, however often the kernel stops in between.
fn repeat_copy(copy: KernelCopy, at: i64, result: i64) {
    kernel(libc::SYS_lseek, [copy.from, at as u64, libc::SEEK_SET as u64, 0, 0, 0]);
    let mut left = result;
    while left > 0 {
        match copy.with_length(left as u64).perform() {
            copied @ 1.. => left -= copied,
            full if full == error(libc::EAGAIN) => wait_for_space(copy.to),
            problem => abort_replay(format_args!(
                "a copy of {result} bytes within the kernel, which it made before, fails now \
                 ({problem})"
            )),
        }
    }
}

/// Waits until a full pipe has space, because its reader has read.
fn wait_for_space(pipe: u64) {
    let mut what = libc::pollfd { fd: pipe as i32, events: libc::POLLOUT, revents: 0 };
    kernel(libc::SYS_poll, [(&raw mut what).addr() as u64, 1, -1_i64 as u64, 0, 0, 0]);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_copy_is_repeated_whole_although_the_pipe_is_full() {
        let mut file = std::fs::File::from(memory_file());
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let to = writer.as_raw_fd();
        // SAFETY: the descriptor is that of the pipe.
        assert_eq!(unsafe { libc::fcntl(to, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let reading = std::thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).map(|_| all).unwrap()
        });
        let from = file.as_raw_fd() as u64;
        let copy = KernelCopy::of(libc::SYS_sendfile, [to as u64, from, 0, 9, 0, 0]);
        repeat_copy(copy, 7, 250_000);
        drop(writer);
        assert!(reading.join().unwrap() == bytes[7..250_007]);
    }

    #[test]
    fn an_interrupted_copy_has_happened_if_its_bytes_are_there() {
        let [source, target] = [b"....source", b"..source.."].map(|bytes| {
            let mut file = std::fs::File::from(memory_file());
            file.write_all(bytes).unwrap();
            file
        });
        let outcome = |before, now, at: [u64; 2]| {
            let descriptors = [&source, &target].map(|file| file.as_raw_fd() as u64);
            let places = [(descriptors[0], at[0]), (descriptors[1], at[1])];
            outcome_of_copy(None, [before, now], places, 6)
        };
        let is_performed =
            |now, at| matches!(outcome([0, 1], now, at), EffectOutcome::Performed(6));
        let is_unknown = |now, at| matches!(outcome([0, 1], now, at), EffectOutcome::Unknown);
        assert!(matches!(outcome([0, 1], [0, 1], [4, 2]), EffectOutcome::NotPerformed));
        assert!(is_performed([0, 2], [4, 2]));
        assert!(is_unknown([0, 2], [4, 3]), "others have written there");
        assert!(is_unknown([3, 2], [4, 2]), "the source has changed");
        // The source ends early, and so did the copy.
        let short = outcome([0, 1], [0, 2], [8, 6]);
        assert!(matches!(short, EffectOutcome::Performed(2)));
        let source = source.as_raw_fd() as u64;
        let counted = |copied, times, at| {
            outcome_of_copy(Some(copied), [[0, 1], times], [(source, at), (0, 0)], 6)
        };
        assert!(matches!(counted(0, [5, 6], 0), EffectOutcome::NotPerformed));
        assert!(matches!(counted(6, [5, 6], 0), EffectOutcome::Performed(6)));
        assert!(matches!(counted(4, [0, 6], 0), EffectOutcome::Unknown), "cut off");
        assert!(matches!(counted(4, [0, 6], 6), EffectOutcome::Performed(4)), "at its end");
        assert!(matches!(counted(4, [5, 6], 6), EffectOutcome::Unknown), "it may have had more");
    }

    fn memory_file() -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: a name, and a new descriptor that nothing else owns.
        unsafe {
            let found = libc::memfd_create(c"copies".as_ptr(), 0);
            assert!(found >= 0);
            std::os::fd::OwnedFd::from_raw_fd(found)
        }
    }
}
