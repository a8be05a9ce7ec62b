//! Calls on the content of open files: reads, writes, changes of position, listings of directories
//! and synchronization.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record. For
//! splice(2) and ioctl(2) on a file a restart is forbidden, and io_uring and Linux's asynchronous
//! I/O are refused, because their effects cannot be recorded.
//!
//! What may never happen: replay writes to a file.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{FileCall, PRECONDITION_WORDS};
use libc::c_long;

use crate::appends::{appended, offset_of};
use crate::change_times::{UNSURE, is_local, mark_open};
use crate::file_content::{is_there, is_unwritten, is_within_page};
use crate::file_identity::FileKind;
use crate::file_metadata::{identity_of, is_installed};
use crate::io_vectors::{IoVectorRoom, IoVectors};
use crate::kernel_calls::{bytes, error, kernel};
use crate::messages::Path;
use crate::restart_refusals::{self, abort_replay};
use crate::session::{self, CallDescription, EffectOutcome, Session, call_of};
use crate::watched;
use crate::written_bytes::{written_between, written_mark};

/// First byte of a recorded read: the content follows, or a digest of the content follows.
const CONTENT: u8 = 0;
const DIGEST: u8 = 1;
/// Largest size in bytes of a user's file whose reads are recorded with content.
const SMALL_BYTES: i64 = 16 << 20;
/// Value of `append_end` for a file to which others append as well.
const SHARED: i64 = -1;
/// Position of a write that the kernel appends.
const AT_END: u64 = session::AT_END as u64;
/// Flag of `pwritev2`: append, whatever the flags of the descriptor.
const RWF_APPEND: u64 = 0x10;
/// Flag of `pwritev2`: write at the given or the current position, whatever the flags of the
/// descriptor.
const RWF_NOAPPEND: u64 = 0x20;

impl Session {
    /// Forbids a restart if the process uses a file by a descriptor that it was not seen to open,
    /// such as one received over a socket (unix(7), `SCM_RIGHTS`): no later incarnation could open
    /// the file again.
    pub fn look_for_passed(&mut self, descriptor: u64) {
        if self.table.index(descriptor).is_none()
            && !crate::restart_refusals::is_restart_forbidden()
        {
            watched::with_file(descriptor, |_, path| {
                let path = Path(path);
                crate::restart_refusals::forbid_restart(format_args!(
                    "it uses {path} by a descriptor that it did not open"
                ));
            });
        }
    }

    /// Handles a read. `None`: the descriptor is not that of a recorded file.
    ///
    /// # Safety
    /// The arguments are those of a read, as `IoVectors::of` takes them.
    pub unsafe fn read(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, pointer, length, ..] = arguments;
        let open = self.table.get(descriptor)?;
        if open.kind == FileKind::Directory {
            return Some(self.fail_on_directory(number, arguments));
        }
        let mut room = IoVectorRoom::new();
        // SAFETY: the caller's promise.
        let pieces = unsafe { IoVectors::of(&mut room, number, pointer, length) };
        let position = position(number, arguments);
        let at = position.unwrap_or(open.offset);
        let wanted = pieces.length() as u64;
        let call = call_of(number, [descriptor, at as u64, wanted, 0, 0], &[]);
        let result = if self.is_live() {
            let result = kernel(number, arguments);
            // SAFETY: the kernel has just written this many bytes there.
            unsafe { self.note_read(descriptor, call, &pieces, result) };
            result
        } else {
            // SAFETY: the program's buffers, into which it reads.
            unsafe { self.replay_read(descriptor, call, &pieces, at) }
        };
        if let Some(open) = self.table.get(descriptor).filter(|_| position.is_none()) {
            open.offset += result.max(0);
        }
        Some(result)
    }

    unsafe fn note_read(
        &mut self,
        descriptor: u64,
        call: FileCall,
        pieces: &IoVectors<'_>,
        result: i64,
    ) {
        let Some(length) = usize::try_from(result).ok().filter(|length| *length > 0) else {
            return self.note(call, result, &[]);
        };
        let keeps = self.records_content(descriptor, length);
        // SAFETY: the caller's promise.
        unsafe {
            if !keeps {
                let digest = pieces.digest(length).to_le_bytes();
                return self.note(call, result, &[&[DIGEST], &digest]);
            }
            const AT_ONCE: usize = 64;
            let mut list: [&[u8]; AT_ONCE] = [&[]; AT_ONCE];
            list[0] = &[CONTENT];
            let mut count = 1;
            for piece in pieces.first(length) {
                if count == AT_ONCE {
                    self.forbid_restart(format_args!(
                        "it reads into more than {AT_ONCE} pieces at once"
                    ));
                    break;
                }
                list[count] = piece;
                count += 1;
            }
            self.note(call, result, &list[..count]);
        }
    }

    /// Whether the bytes just read are recorded with content, because the file may differ at
    /// replay.
    fn records_content(&mut self, descriptor: u64, length: usize) -> bool {
        let Some(open) = self.table.get(descriptor) else { return true };
        if !open.may_be_read_again() {
            return true;
        }
        let before = open.identity;
        let is_small = before.size <= SMALL_BYTES
            && !is_installed(descriptor, open.path(), &before, self.guard.since());
        if is_small && self.may_record_content(length) {
            return true;
        }
        let has_changed =
            identity_of(descriptor).is_none_or(|(_, now)| !now.is_same_state(&before));
        if let Some(open) = self.table.get(descriptor).filter(|_| has_changed) {
            open.is_recorded = true;
        }
        has_changed
    }

    /// Answers a read during replay from the record, or from the file. Another digest ends the
    /// process.
    unsafe fn replay_read(
        &mut self,
        descriptor: u64,
        call: FileCall,
        pieces: &IoVectors<'_>,
        at: i64,
    ) -> i64 {
        let path = self.table.path_of(descriptor);
        let about = CallDescription::Bytes {
            what: "read",
            path,
            offset: at,
            length: pieces.length() as u64,
        };
        let recalled = self.guard.record().replay_call(call);
        let (result, kept) =
            recalled.unwrap_or_else(|error| abort_replay(format_args!("{about}: {error}")));
        let Some((form, mut kept)) = kept.split_first() else { return result };
        let length = result.max(0) as usize;
        if *form == CONTENT {
            // SAFETY: the program's buffers.
            for piece in unsafe { pieces.first(length) } {
                let now = piece.len().min(kept.len());
                piece[..now].copy_from_slice(&kept[..now]);
                kept = &kept[now..];
            }
            return result;
        }
        let before = u64::from_le_bytes(kept.try_into().unwrap_or_default());
        let index = self.table.index(descriptor);
        index.into_iter().for_each(|index| self.table.reopen_file(index));
        // What is behind the bytes of before stays as it is.
        let mut room = IoVectorRoom::new();
        let before_end = pieces.limited(&mut room, length);
        let (list, count) = before_end.list();
        let found = kernel(libc::SYS_preadv, [descriptor, list, count, at as u64, 0, 0]);
        // SAFETY: the kernel has written there.
        let now = unsafe { pieces.digest(found.clamp(0, result) as usize) };
        if found < result || now != before {
            abort_replay(format_args!(
                "{about} gave {found} bytes of digest {now:016x}, and before {result} of \
                 {before:016x}: the file has changed"
            ));
        }
        result
    }

    /// Handles a read or write of a directory, which fails; a placeholder would not.
    fn fail_on_directory(&mut self, number: c_long, arguments: [u64; 6]) -> i64 {
        let call = call_of(number, [arguments[0], 0, 0, 0, 0], &[]);
        if self.is_live() {
            return self.observe(call, || kernel(number, arguments), |_| [&[], &[]]);
        }
        let about = CallDescription::Path("use", self.table.path_of(arguments[0]));
        self.replay(call, about, &mut [])
    }

    /// Reports a write to a file of the kernel (proc(5)): a replay takes the result from the
    /// record, and the new process would lack what the write has changed.
    fn check_virtual_write(&mut self, descriptor: u64) {
        if self.table.get(descriptor).is_some_and(|open| open.kind == FileKind::Virtual) {
            let path = Path(self.table.path_of(descriptor));
            restart_refusals::forbid_restart(format_args!(
                "it writes {path}, which a restarted process would not write again"
            ));
        }
    }

    /// Handles a write. `None`: the descriptor is not that of a recorded file.
    ///
    /// # Safety
    /// The arguments are those of a write, as `IoVectors::of` takes them.
    pub unsafe fn write(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, pointer, length, ..] = arguments;
        self.check_virtual_write(descriptor);
        let open = self.table.get(descriptor)?;
        match open.kind {
            FileKind::File => (),
            FileKind::Directory => return Some(self.fail_on_directory(number, arguments)),
            _ => return None,
        }
        let mut room = IoVectorRoom::new();
        // SAFETY: the caller's promise.
        let pieces = unsafe { IoVectors::of(&mut room, number, pointer, length) };
        let flags = if number == libc::SYS_pwritev2 { arguments[5] } else { 0 };
        let appends = open.appends() && flags & RWF_NOAPPEND == 0 || flags & RWF_APPEND != 0;
        let position = position(number, arguments);
        let at = if appends { AT_END } else { position.unwrap_or(open.offset) as u64 };
        let path = self.table.path_of(descriptor);
        let wanted = pieces.length() as u64;
        if appends {
            self.hold_for_append(descriptor, position.is_none());
        }
        let about =
            CallDescription::Bytes { what: "write", path, offset: at as i64, length: wanted };
        let call = call_of(number, [descriptor, at, wanted, 0, 0], &[]);
        // SAFETY: the program's buffers.
        let digest = unsafe { pieces.digest(pieces.length()) };
        let (result, end) = if self.is_live() {
            let place = (at != AT_END).then_some(at);
            let moves = position.is_none();
            let offset_tells = moves && appends && self.offset_tells(descriptor);
            let offset = if appends { offset_of(descriptor) } else { 0 };
            let writing = PendingWrite {
                number,
                arguments,
                descriptor,
                place,
                moves,
                offset,
                offset_tells,
                digest,
                about,
            };
            // SAFETY: the caller's promise.
            unsafe { self.perform_write(call, &pieces, &writing) }
        } else {
            self.replay_write(call, digest, about)
        };
        let open = self.table.get(descriptor)?;
        if position.is_none() && result > 0 {
            open.offset = if appends { end as i64 } else { open.offset + result };
        }
        if appends {
            open.append_end = if open.is_shared_append { SHARED } else { end as i64 };
            let (identity, end) = (open.identity, open.append_end);
            self.table.note_end(&identity, end);
        }
        Some(result)
    }

    unsafe fn perform_write(
        &mut self,
        call: FileCall,
        pieces: &IoVectors<'_>,
        writing: &PendingWrite<'_>,
    ) -> (i64, u64) {
        let descriptor = writing.descriptor;
        let state = || identity_of(descriptor).map(|(_, now)| now).unwrap_or_default();
        let appends = writing.place.is_none();
        // An append needs the size that the file server has.
        let before = match appends {
            true => state(),
            false => crate::file_status::with_cached_attributes(state),
        };
        let is_shared = appends && self.is_shared_append(descriptor, before.size);
        let precondition = |earlier: Option<[u64; PRECONDITION_WORDS]>| {
            // What was appended in part is truncated away by now, and `before` still has it.
            let count = || if is_local(descriptor, &before) { written_mark() } else { 0 };
            if let Some(mut earlier) = earlier.filter(|_| appends) {
                earlier[2] = count();
                return earlier;
            }
            let changed = mark_open(descriptor, before);
            let is_whole =
                is_within_page(writing.place.unwrap_or(before.size as u64), pieces.length() as u64);
            let is_simple = match appends {
                true => is_whole && !is_shared,
                false => is_whole && changed != UNSURE,
            };
            let written = if is_simple { 0 } else { count() };
            let (size, is_shared) = (before.size as u64, u64::from(is_shared));
            [size, is_shared, written, 0, changed, 0, 0, writing.offset]
        };
        let at_end = self.written_at_end();
        // SAFETY: the caller's promise.
        let outcome = |before: [u64; PRECONDITION_WORDS]| unsafe {
            let (outcome, at) = match writing.place {
                Some(at) => (written(descriptor, at, pieces, before, at_end), at),
                None => {
                    let done = written_between(before[2], at_end);
                    let tells = writing.offset_tells;
                    (appended(descriptor, pieces, before, (done, tells)), before[0])
                }
            };
            let is_behind = writing.moves && !writing.offset_tells;
            if let (EffectOutcome::Performed(length), true) = (&outcome, is_behind) {
                // The incarnation that wrote had moved a position that died with it.
                let end = at.saturating_add_signed(*length);
                kernel(libc::SYS_lseek, [descriptor, end, libc::SEEK_SET as u64, 0, 0, 0]);
            }
            outcome
        };
        let perform = || kernel(writing.number, writing.arguments);
        let result = self.effect(call, writing.about, precondition, outcome, perform);
        let end = match (appends, writing.moves) {
            (true, true) => offset_of(descriptor),
            (true, false) => state().size as u64,
            (false, _) => 0,
        };
        self.note(call, result, &[&writing.digest.to_le_bytes(), &end.to_le_bytes()]);
        (result, end)
    }

    /// Answers a write during replay, and writes nothing. Another digest ends the process.
    fn replay_write(&mut self, call: FileCall, now: u64, about: CallDescription<'_>) -> (i64, u64) {
        let (mut before, mut end) = ([0; 8], [0; 8]);
        let result = self.replay(call, about, &mut [&mut before, &mut end]);
        let before = u64::from_le_bytes(before);
        if now != before {
            abort_replay(format_args!(
                "{about} has the digest {now:016x}, and it wrote {before:016x} there before"
            ));
        }
        (result, u64::from_le_bytes(end))
    }

    pub fn seek(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, offset, whence, ..] = arguments;
        self.table.get(descriptor)?;
        let call = call_of(libc::SYS_lseek, [descriptor, offset, whence, 0, 0], &[]);
        let result = if self.is_live() {
            self.observe(call, || kernel(libc::SYS_lseek, arguments), |_| [&[], &[]])
        } else {
            self.replay_on(call, "seek", descriptor, &mut [])
        };
        if let Some(open) = self.table.get(descriptor).filter(|_| result >= 0) {
            (open.offset, open.has_listed_all) = (result, false);
        }
        Some(result)
    }

    /// Handles a listing of a directory.
    ///
    /// # Safety
    /// The arguments are those of `getdents64`.
    pub unsafe fn list(
        &mut self,
        number: c_long,
        descriptor: u64,
        into: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        self.table.get(descriptor)?;
        let call = call_of(number, [descriptor, arguments[2], 0, 0, 0], &[]);
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, arguments[2] as usize) };
        let result = if self.is_live() {
            let result = kernel(number, arguments);
            self.note(call, result, &[&room[..result.max(0) as usize]]);
            result
        } else {
            self.replay_on(call, "listing", descriptor, &mut [&mut room[..]])
        };
        if let Some(open) = self.table.get(descriptor) {
            open.has_listed_all = result == 0;
            open.offset = last_offset(&room[..result.max(0) as usize]).unwrap_or(open.offset);
        }
        Some(result)
    }

    /// Handles a call that puts a file on disk or advises the kernel.
    pub fn synchronize(
        &mut self,
        number: c_long,
        descriptor: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        self.table.get(descriptor)?;
        let call = call_of(number, [descriptor, 0, 0, 0, 0], &[]);
        if self.is_live() {
            return Some(self.observe(call, || kernel(number, arguments), |_| [&[], &[]]));
        }
        Some(self.replay_on(call, "synchronization", descriptor, &mut []))
    }

    pub fn splice(&mut self, from: u64, to: u64) -> Option<i64> {
        let index = self.table.index(from).or(self.table.index(to))?;
        let path = Path(self.table.by_index(index).path());
        crate::restart_refusals::forbid_restart(format_args!("it uses splice(2) on {path}"));
        None
    }

    pub fn device_control(&mut self, descriptor: u64, request: u64) -> Option<i64> {
        let open = self.table.get(descriptor)?;
        if shares_blocks(request) {
            let path = Path(open.path());
            crate::restart_refusals::forbid_restart(format_args!(
                "it has {path} share the blocks of another file"
            ));
        } else if matches!(open.kind, FileKind::File | FileKind::Directory)
            && !asks_for_a_terminal(request)
        {
            let path = Path(open.path());
            crate::restart_refusals::forbid_restart(format_args!(
                "it uses ioctl(2) {request:#x} on {path}, which is not recorded"
            ));
        }
        None
    }

    /// Refuses io_uring and Linux's asynchronous I/O: requests in these rings make no system call
    /// that could be recorded.
    pub fn no_rings(&mut self) -> Option<i64> {
        static IS_SAID: AtomicBool = AtomicBool::new(false);
        if !IS_SAID.swap(true, Relaxed) {
            crate::messages::warn(format_args!(
                "io_uring and Linux's asynchronous I/O cannot be recorded: calls of them fail \
                 with ENOSYS, as on a system that has none"
            ));
        }
        Some(error(libc::ENOSYS))
    }
}

/// Whether an ioctl(2) asks for a terminal, or concerns the descriptor alone (ioctl_tty(2)).
fn asks_for_a_terminal(request: u64) -> bool {
    let of_descriptor = [libc::FIOCLEX, libc::FIONCLEX, libc::FIONBIO];
    let of_terminal = [libc::TCGETS, libc::TIOCGWINSZ, libc::TIOCGPGRP, TCGETS2];
    of_descriptor.contains(&request) || of_terminal.contains(&request)
}

const TCGETS2: u64 = 0x802c_542a;

/// Whether an ioctl(2) shares blocks between files: `FICLONE` and `FICLONERANGE`
/// (ioctl_ficlone(2)).
pub fn shares_blocks(request: u64) -> bool {
    matches!(request as u32, 0x4004_9409 | 0x4020_940d)
}

/// Arguments of a write that is performed.
struct PendingWrite<'a> {
    number: c_long,
    arguments: [u64; 6],
    descriptor: u64,
    /// Position of the write; `None` for an append.
    place: Option<u64>,
    /// The write moves the position of the open file.
    moves: bool,
    /// Position of the open file before an append, which need not be the file's end.
    offset: u64,
    /// The position shows what an interrupted append has done.
    offset_tells: bool,
    digest: u64,
    about: CallDescription<'a>,
}

/// Position of a call that passes its position as an argument.
fn position(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let says = matches!(
        number,
        libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
    );
    let at = arguments[3] as i64;
    let is_current = at == -1 && matches!(number, libc::SYS_preadv2 | libc::SYS_pwritev2);
    (says && !is_current).then_some(at)
}

/// Whether a write has happened during which the last incarnation was killed. `before`: mark of the
/// bytes that the thread had written, and of the last change of the file. Content alone proves
/// little: another process may have answered the write, or taken away what was written. A part of a
/// write is completed only where nobody can have written since: beyond the end of the file, and
/// where it has a hole.
///
/// # Safety
/// The memory of `pieces` is valid.
unsafe fn written(
    descriptor: u64,
    at: u64,
    pieces: &IoVectors<'_>,
    before: [u64; PRECONDITION_WORDS],
    written_at_end: Option<u64>,
) -> EffectOutcome {
    let [_, _, written_mark, _, changed, ..] = before;
    let Some((_, now)) = identity_of(descriptor) else { return EffectOutcome::Unknown };
    if now.changed as u64 == changed {
        return EffectOutcome::NotPerformed;
    }
    let wanted = pieces.length();
    // SAFETY: the caller's promise.
    let is_ours = |length| unsafe { is_there(descriptor, at, pieces, length) };
    match written_between(written_mark, written_at_end) {
        Some(done) if done >= wanted as u64 => EffectOutcome::Performed(wanted as i64),
        Some(0) => EffectOutcome::NotPerformed,
        Some(done) => {
            let rest = at + done..at + wanted as u64;
            match is_unwritten(descriptor, now.size as u64, rest) && is_ours(done as usize) {
                true => EffectOutcome::NotPerformed,
                false => EffectOutcome::Unknown,
            }
        }
        None if is_ours(wanted) => EffectOutcome::Performed(wanted as i64),
        _ => EffectOutcome::Unknown,
    }
}

/// Directory position after the last of these entries (`struct linux_dirent64`).
fn last_offset(mut entries: &[u8]) -> Option<i64> {
    let mut last = None;
    while let Some((offset, length)) = entries.get(8..16).zip(entries.get(16..18)) {
        last = offset.try_into().ok().map(i64::from_le_bytes);
        let length = u16::from_le_bytes(length.try_into().ok()?);
        entries = entries.get(usize::from(length).max(18)..)?;
    }
    last
}
