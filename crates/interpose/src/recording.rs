//! Whether this process is recorded, by which thread, and the record of this process.
//!
//! In: the environment that the node agent sets, with the record's descriptor (`LANDBRIDGE_RECORD`,
//! open across exec) and the rank's incarnation. The first process that registers in the record is
//! the recorded process of that incarnation. A process stays recorded when it executes another
//! program. Out: a guard of the record for one recorded call at a time.
//!
//! What may never happen: a process that the recorded process starts counts as recorded.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{
    NONDETERMINISM_BYTES, NondeterminismRecord, RECORD_HEAD_BYTES, RecordHead, RecordPosition,
};
use landbridge_proto::recent_determinants::RECENT_DETERMINANTS_AT;

use crate::kernel_calls::kernel;
use crate::messages::warn;
use crate::record_head::{self, is_owner, is_record};
use crate::record_lock::{self, RecordGuard, lock_for_call};
use crate::session::Session;
use crate::{
    deadlines, dispatch, held_files, new_processes, origin, processes, recorded_pipes,
    restart_refusals, signal_mask, thread_gate, trap, unsaved_attributes,
};

/// Environment variables that the node agent sets.
const RECORD_VARIABLE: &CStr = c"LANDBRIDGE_RECORD";
const INCARNATION_VARIABLE: &CStr = c"LANDBRIDGE_INCARNATION";
/// Environment variable of programs that a rank has started: the number of the record's descriptor
/// in the rank.
const ABOVE_VARIABLE: &CStr = c"LANDBRIDGE_RECORD_ABOVE";
/// Environment variable: a descriptor of the pipe that the node agent reads as this process's
/// standard error, whatever the program does with descriptor 2.
const STDERR_VARIABLE: &CStr = c"LANDBRIDGE_STDERR";
/// Environment variable: "0" turns off the recording of file calls.
const FILES_VARIABLE: &CStr = c"LANDBRIDGE_RECORD_FILES";
/// Nanoseconds that the clock of a file server may lag.
const SLACK_NANOS: i64 = 2_000_000_000;
const PRELOAD_VARIABLE: &CStr = c"LD_PRELOAD";

static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);
/// Replay position of the process while the record is unmapped for a checkpoint. The owner alone
/// uses it.
/// Time of the next attempt to quiesce, by [`millis`]. Each one may take 50 ms.
static NEXT_TRY: AtomicU64 = AtomicU64::new(0);
const BETWEEN_TRIES_MILLIS: u64 = 500;
/// The program's signal mask, while all signals are blocked for an image.
static MASK: AtomicU64 = AtomicU64::new(0);
static QUIESCED_POSITION: QuiescedPosition = QuiescedPosition(UnsafeCell::new(None));

struct QuiescedPosition(UnsafeCell<Option<RecordPosition>>);

// SAFETY: the recorded thread alone uses `QUIESCED_POSITION`.
unsafe impl Sync for QuiescedPosition {}

/// Outcome of [`resume`], with the state of the descriptor that the caller has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// The record could not be mapped again, and the process cannot continue.
    Failed = 0,
    /// The record is mapped again; the caller may close the descriptor.
    Resumed = 1,
    /// The record is mapped again; the descriptor stays open and belongs to this process from now
    /// on.
    DescriptorKept = 2,
}

/// Exclusive access to the record, if a read by code at address `from` is recorded. A read may be
/// the first thing that this library sees of a process.
#[inline]
pub fn lock(from: usize) -> Option<RecordGuard> {
    if record_head::owner().is_null() && !IS_INITIALIZED.load(Relaxed) {
        initialize();
    }
    record_lock::lock(from)
}

/// Determines whether this process is recorded. The only thread makes the first call, when the
/// program is loaded.
#[cold]
pub fn initialize() {
    if IS_INITIALIZED.swap(true, Relaxed) {
        return;
    }
    crate::messages::write_lines_to(number(STDERR_VARIABLE));
    if let Some(above) = number(ABOVE_VARIABLE) {
        return observe_below(above as c_int);
    }
    let Some(descriptor) = number(RECORD_VARIABLE) else { return };
    let descriptor = descriptor as c_int;
    let start = number(INCARNATION_VARIABLE);
    let Some(start) = start.filter(|_| is_record(descriptor)) else {
        // The parent of this program has closed the descriptor or removed the other variable, so
        // this process is not the recorded one.
        return observe_below(descriptor);
    };
    let Some(head) = map(descriptor) else {
        warn_no_memory();
        return go_on_unrecorded(descriptor, start);
    };
    // SAFETY: the memory file is a record, and stays mapped.
    let first = unsafe { head.cast::<RecordHead>().as_ref() };
    let Some(first) = first else { return };
    // SAFETY: a plain system call.
    let me = unsafe { libc::getpid() } as u64;
    if !first.begin(start + 1, me) && first.owner.load(Relaxed) != me {
        // SAFETY: no other code has a reference to the mapping.
        unsafe { libc::syscall(libc::SYS_munmap, head, NONDETERMINISM_BYTES) };
        return observe_from(descriptor);
    }
    let Some(owner) = owner_page(head) else {
        warn(format_args!("clocks are not recorded: this Linux is too old (before 4.14)"));
        if records_files() {
            restart_refusals::forbid_restart_in(first, format_args!("{UNRECORDED}"));
        }
        return;
    };
    // SAFETY: the mapping has this many bytes, and no other process uses them while this process is
    // the owner.
    unsafe {
        let entries = head.cast::<u8>().add(RECORD_HEAD_BYTES);
        let entries =
            std::slice::from_raw_parts_mut(entries, RECENT_DETERMINANTS_AT - RECORD_HEAD_BYTES);
        record_lock::set(NondeterminismRecord::new(first, entries));
    }
    record_head::set(descriptor, head.cast(), owner);
    held_files::begin_program(first.position().consumed());
    record_calls(first);
}

/// Why a process without a record cannot be restarted.
const UNRECORDED: &str = "nothing can record what it does with files";

fn records_files() -> bool {
    number(FILES_VARIABLE) != Some(0)
}

/// Forbids a restart of this process, which cannot map its record. A later incarnation would
/// repeat effects instead of replaying them, so that incarnation ends.
#[cold]
fn go_on_unrecorded(descriptor: c_int, start: u64) {
    if !records_files() {
        return;
    }
    // The head is a page.
    match map_with(RECORD_HEAD_BYTES, libc::MAP_SHARED, descriptor) {
        Some(head) if start == 0 => {
            // SAFETY: the memory file is a record, and the mapping stays.
            restart_refusals::forbid_restart_in(
                unsafe { &*head.cast::<RecordHead>() },
                format_args!("{UNRECORDED}"),
            );
        }
        _ => crate::restart_refusals::abort_replay(format_args!("{UNRECORDED} here")),
    }
}

/// Observes the file calls of this program, which a recorded process has started and which has
/// inherited the record's descriptor.
fn observe_from(descriptor: c_int) {
    if !records_files() {
        return forget();
    }
    if !(trap::install_handler() && new_processes::begin_child(descriptor)) {
        forbid_from_child(descriptor);
        return forget();
    }
    // SAFETY: the only thread changes the variables.
    unsafe {
        let said = libc::getenv(RECORD_VARIABLE.as_ptr());
        if !said.is_null() {
            // The program sees no record variable, so it is not recorded. Programs that it starts
            // find the record by the other variable.
            libc::setenv(ABOVE_VARIABLE.as_ptr(), said, 1);
            libc::unsetenv(RECORD_VARIABLE.as_ptr());
        }
    }
}

/// Forbids a restart of the rank that has started this program, which cannot be observed.
#[cold]
fn forbid_from_child(descriptor: c_int) {
    let Some(head) = map_with(RECORD_HEAD_BYTES, libc::MAP_SHARED, descriptor) else {
        crate::restart_refusals::abort_replay(format_args!("there is no memory at all"));
    };
    // SAFETY: the memory file is a record, and the mapping stays.
    let head = unsafe { &*head.cast::<RecordHead>() };
    restart_refusals::forbid_restart_in(
        head,
        format_args!("there is no memory to watch its children"),
    );
}

/// Observes this program by a record's descriptor that the program lacks and an ancestor may still
/// have open, up to eight generations above.
fn observe_below(number: c_int) {
    const ABOVE_MAX: usize = 8;
    if is_record(number) {
        return observe_from(number);
    }
    let mut parent = std::process::id();
    for _ in 0..ABOVE_MAX {
        parent = processes::parent_of(parent);
        if parent <= 1 {
            break;
        }
        let mut path = crate::messages::MessageBuffer::new();
        let _ = write!(path, "/proc/{parent}/fd/{number}\0");
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: a C string, and descriptors that this function has opened.
        unsafe {
            let found = libc::open(path.bytes().as_ptr().cast(), flags);
            if found >= 0 {
                if is_record(found) {
                    observe_from(found);
                    libc::close(found);
                    return;
                }
                libc::close(found);
            }
        }
    }
    forget();
}

/// Begins the recording of this thread's system calls.
fn record_calls(head: &RecordHead) {
    if !records_files() {
        return;
    }
    if head.files.since.load(Relaxed) == 0 {
        let now = crate::real_libc::now(libc::CLOCK_REALTIME) - SLACK_NANOS;
        head.files.since.store(now as u64, Relaxed);
    }
    origin::compare(head);
    check_first_directory(head);
    if !trap::install() {
        restart_refusals::forbid_restart(format_args!(
            "this system cannot show what it does with files (Linux 5.11 on x86-64 can; if that \
             does not matter: --set recover_files=off)"
        ));
        return;
    }
    recorded_pipes::note_begin();
    if let Some(guard) = lock_for_call() {
        let mut session = Session::new(guard);
        session.record_names();
        session.adopt();
    }
}

fn warn_no_memory() {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain system call that fills in a local value.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    let wanted = NONDETERMINISM_BYTES >> 20;
    match limit.rlim_cur {
        libc::RLIM_INFINITY => warn(format_args!(
            "clocks are not recorded: there is no memory for it ({wanted} MiB of address space)"
        )),
        most => warn(format_args!(
            "clocks are not recorded: there is no room for {wanted} MiB in the {} MiB of address \
             space that this process may have: raise that limit (ulimit -v)",
            most >> 20
        )),
    }
}

/// Ends an incarnation that begins in another directory than the first one: its relative names lead
/// elsewhere. A program that another program of this incarnation has executed may begin anywhere.
fn check_first_directory(head: &RecordHead) {
    if head.extent().end > 0 || origin::is_other_node() {
        return;
    }
    let here = crate::working_directory::here().map(|here| [here.inode, here.born as u64]);
    if here.is_some_and(|here| !head.note_directory(here)) {
        restart_refusals::abort_replay(format_args!(
            "the directory in which it began is another one by now"
        ));
    }
}

/// Unmaps the record and closes its descriptor, so that a checkpoint image of this process contains
/// no part of the record. Until [`resume`], clock reads go to the system unrecorded. False: this
/// process has no record.
pub fn quiesce() -> bool {
    let head = record_head::place();
    // SAFETY: null, or the head of the record, which is mapped.
    let Some(present) = (unsafe { head.as_ref() }) else { return false };
    let now = millis();
    if now < NEXT_TRY.load(Relaxed) || !record_lock::exclude() {
        return false;
    }
    // A handler of the program would wait at the gate for this thread.
    let mask = signal_mask::block_all();
    let stands = !dispatch::is_installed() || thread_gate::close(Session::has_open);
    let is_remembered = stands && unsaved_attributes::remember();
    if !is_remembered || records_files() && !while_excluded(Session::quiesce) {
        thread_gate::open();
        record_lock::readmit();
        signal_mask::unblock(mask);
        NEXT_TRY.store(now + BETWEEN_TRIES_MILLIS, Relaxed);
        return false;
    }
    dispatch::suspend_dispatch();
    // Until the process resumes a handler would find placeholders, and nothing would see what it
    // does.
    MASK.store(mask, Relaxed);
    present.note_image_mask(mask);
    let place = present.position();
    deadlines::note_image();
    recorded_pipes::note_image();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: every recorded call is excluded, and the record's addresses stay reserved.
    unsafe {
        *QUIESCED_POSITION.0.get() = Some(place);
        map_at(head.cast(), libc::PROT_NONE, flags, -1);
        let descriptor = record_head::descriptor();
        if is_record(descriptor) {
            libc::close(descriptor);
        } else {
            record_head::forget_descriptor();
        }
    }
    true
}

/// Milliseconds of the kernel's clock.
fn millis() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let room = (&raw mut now).addr() as u64;
    kernel(libc::SYS_clock_gettime, [libc::CLOCK_MONOTONIC_COARSE as u64, room, 0, 0, 0, 0]);
    now.tv_sec as u64 * 1_000 + now.tv_nsec as u64 / 1_000_000
}

/// Notes that this process has repeated every poll of earlier incarnations. False: the caller asks
/// again at its next poll, because recorded calls are left, or one is in progress.
pub fn confirm_live() -> bool {
    !is_owner() || lock_for_call().is_some_and(|guard| Session::new(guard).confirm_live())
}

/// Runs `work` on the descriptor table, in the thread that has already excluded all others.
fn while_excluded<R>(work: impl FnOnce(&mut Session) -> R) -> R {
    record_lock::while_excluded(|guard| work(&mut Session::new(guard)))
}

/// Maps the record behind `descriptor` again. The record is that of this process, or in a restored
/// process the record of the process from which the checkpoint image was taken. `incarnation`
/// counts from 0. The descriptor stays open if it has the number at which programs executed by this
/// process look for the record, and which was free meanwhile.
pub fn resume(descriptor: c_int, incarnation: u64) -> ResumeOutcome {
    let head = record_head::place();
    let was_same;
    // SAFETY: this thread alone uses the record, and the addresses of the mapping are reserved for
    // it.
    unsafe {
        let Some(place) = (*QUIESCED_POSITION.0.get()).take() else { return ResumeOutcome::Failed };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let is_back = is_record(descriptor)
            && map_at(head.cast(), protection, flags, descriptor)
            && libc::syscall(libc::SYS_madvise, head, NONDETERMINISM_BYTES, libc::MADV_DONTFORK)
                == 0
            && empty_in_children(record_head::owner().cast());
        if !is_back || !place_descriptor(descriptor, record_head::descriptor()) {
            return ResumeOutcome::Failed;
        }
        // The same incarnation finds its complete record.
        let present = &*head;
        let is_same = present.is_of(incarnation + 1);
        was_same = is_same;
        if !is_same && !present.resume(incarnation + 1, libc::getpid() as u64, &place) {
            return ResumeOutcome::Failed;
        }
        record_lock::refresh();
        if !is_same {
            deadlines::note_restore();
            recorded_pipes::note_restore();
            unsaved_attributes::restore();
        }
        match is_same {
            true if records_files() => while_excluded(|session| session.table.resume()),
            true => (),
            false => while_excluded(Session::restart_replay),
        }
    }
    record_lock::readmit();
    if records_files() {
        dispatch::resume_dispatch(!was_same);
    }
    thread_gate::open();
    signal_mask::unblock(MASK.load(Relaxed));
    if descriptor == record_head::descriptor() {
        ResumeOutcome::DescriptorKept
    } else {
        ResumeOutcome::Resumed
    }
}

/// Opens the record under `number` as well, without close-on-exec; for a negative `number` nothing
/// is done. False: a system call has failed.
///
/// # Safety
/// No other code uses what is open under `number`.
unsafe fn place_descriptor(descriptor: c_int, number: c_int) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            ..0 => true,
            // dup2(2) of a descriptor to itself would leave the close-on-exec flag set.
            same if same == descriptor => libc::fcntl(same, libc::F_SETFD, 0) == 0,
            other => libc::dup2(descriptor, other) >= 0,
        }
    }
}

/// # Safety
/// The addresses belong to the record, and no code reads or writes them meanwhile.
unsafe fn map_at(place: *mut c_void, protection: c_int, flags: c_int, descriptor: c_int) -> bool {
    // SAFETY: the caller's promise.
    let found = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            place,
            NONDETERMINISM_BYTES,
            protection,
            flags,
            descriptor,
            0_usize,
        )
    };
    found == place as i64
}

/// Removes the variables of the interposer from the environment of a process that is not recorded,
/// so that its children are not recorded either.
fn forget() {
    // SAFETY: the only thread changes the variables.
    unsafe {
        libc::unsetenv(RECORD_VARIABLE.as_ptr());
        let list = libc::getenv(PRELOAD_VARIABLE.as_ptr());
        if list.is_null() || libc::strstr(list, c"liblandbridge_interpose".as_ptr()).is_null() {
            return;
        }
        // This library is the first in the list; the others are the user's.
        match libc::strchr(list, c_int::from(b':')) {
            rest if rest.is_null() => _ = libc::unsetenv(PRELOAD_VARIABLE.as_ptr()),
            rest => _ = libc::memmove(list.cast(), rest.add(1).cast(), libc::strlen(rest)),
        }
    }
}

fn number(name: &CStr) -> Option<u64> {
    // SAFETY: the string lives until the variable changes.
    unsafe {
        let text: *mut c_char = libc::getenv(name.as_ptr());
        if text.is_null() {
            return None;
        }
        CStr::from_ptr(text).to_str().ok()?.parse().ok()
    }
}

fn map(descriptor: c_int) -> Option<*mut c_void> {
    map_with(NONDETERMINISM_BYTES, libc::MAP_SHARED | libc::MAP_NORESERVE, descriptor)
}

/// Maps a page for the identity of the recorded thread ([`record_head::set`]), and excludes the
/// page and the record at `record` from the memory of children.
fn owner_page(record: *mut c_void) -> Option<*mut AtomicUsize> {
    let page = map_with(RECORD_HEAD_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    // SAFETY: advice about two mappings of this library.
    let is_taken = unsafe {
        empty_in_children(page)
            && libc::syscall(libc::SYS_madvise, record, NONDETERMINISM_BYTES, libc::MADV_DONTFORK)
                == 0
    };
    is_taken.then_some(page.cast())
}

/// Makes the page of [`owner_page`] empty in children. A checkpoint image does not contain this
/// advice, and a child that takes itself for the recorded process uses a record that it does not
/// have.
///
/// # Safety
/// The page belongs to this library.
unsafe fn empty_in_children(page: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_madvise, page, RECORD_HEAD_BYTES, libc::MADV_WIPEONFORK) == 0 }
}

/// Maps memory by the system call itself, because another library may be replacing the C library's
/// function at this moment (UCX does, and reads the time meanwhile).
fn map_with(bytes: usize, flags: c_int, descriptor: c_int) -> Option<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses free addresses.
    let found = unsafe {
        libc::syscall(libc::SYS_mmap, 0_usize, bytes, protection, flags, descriptor, 0_usize)
    };
    (found > 0).then_some(found as *mut c_void)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_open_where_it_was_and_stays_so_over_exec() {
        // SAFETY: this test has opened the descriptors.
        unsafe {
            let file = || libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let (one, other) = (file(), file());
            let flags = |fd| libc::fcntl(fd, libc::F_GETFD);
            assert!(place_descriptor(one, -1));
            assert_eq!(flags(one), libc::FD_CLOEXEC);
            assert!(place_descriptor(one, one));
            assert_eq!(flags(one), 0);
            assert!(place_descriptor(one, other));
            assert_eq!(flags(other), 0);
            libc::close(one);
            assert!(!place_descriptor(one, one) && !place_descriptor(one, other), "it is closed");
            libc::close(other);
        }
    }
}
