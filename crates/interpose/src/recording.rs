//! Whether this process is recorded, by which thread, and its record.
//!
//! The agent says where the record is (`LANDBRIDGE_RECORD`, a descriptor that stays open over exec) and which start of
//! the rank this is. The first process that gets to say so in the record is that start: it remains so when it executes
//! another program, and nobody that it starts ever is.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Release;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::Acquire, Ordering::Relaxed,
};

use landbridge_proto::nondeterminism::{
    NONDETERMINISM_BYTES, NondeterminismRecord, Polls, RECORD_HEAD_BYTES, RecordHead,
    RecordPosition,
};
use landbridge_proto::recent_determinants::RECENT_DETERMINANTS_AT;

use crate::libc_wrappers::{info, warn};
use crate::session::Session;
use crate::{caller, held_files, observe, trap};

/// Names of variables, from the agent.
const RECORD_VARIABLE: &CStr = c"LANDBRIDGE_RECORD";
const INCARNATION_VARIABLE: &CStr = c"LANDBRIDGE_INCARNATION";
/// In programs that a rank has started: the number of the record's descriptor in the rank.
const ABOVE_VARIABLE: &CStr = c"LANDBRIDGE_RECORD_ABOVE";
/// "0": nobody wants to know what is done with files.
const FILES_VARIABLE: &CStr = c"LANDBRIDGE_RECORD_FILES";
/// Clocks of file servers may be behind by so much.
const SLACK_NANOS: i64 = 2_000_000_000;
const PRELOAD_VARIABLE: &CStr = c"LD_PRELOAD";
/// How the name of this library begins.
pub const LIBRARY: &[u8] = b"liblandbridge_interpose";

/// Where the thread stands that is recorded, in a page that a child finds empty, whatever way it was made. Null: nobody is.
static OWNER: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());
static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);
/// A read is being answered: one that interrupts it (in a handler of a signal) is not recorded.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// For whom it is. It is written before [`OWNER`] and used by the owner alone.
static RECORD_CELL: RecordCell = RecordCell(UnsafeCell::new(MaybeUninit::uninit()));
/// It was said that another thread reads as well.
static IS_OTHER_REPORTED: AtomicBool = AtomicBool::new(false);
static HEAD: AtomicPtr<RecordHead> = AtomicPtr::new(null_mut());
/// The descriptor of the record, which stays open for programs that this process becomes.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// How far the process has come, while it is without its record. Used by the owner alone.
static QUIESCED_POSITION: QuiescedPosition = QuiescedPosition(UnsafeCell::new(None));

struct QuiescedPosition(UnsafeCell<Option<RecordPosition>>);

// SAFETY: see `QUIESCED_POSITION`.
unsafe impl Sync for QuiescedPosition {}

struct RecordCell(UnsafeCell<MaybeUninit<NondeterminismRecord<'static>>>);

// SAFETY: see `RECORD_CELL`; `IS_BUSY` keeps the owner's own interruptions out.
unsafe impl Sync for RecordCell {}

/// What has become of the descriptor with which a process takes hold of its record again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// There is no way back.
    Failed = 0,
    /// It is not needed any more.
    Resumed = 1,
    /// It stays open: from now on it is the process's own.
    DescriptorKept = 2,
}

/// The record, for the time of one answer.
pub struct RecordGuard(());

impl RecordGuard {
    #[inline]
    pub fn record(&mut self) -> &mut NondeterminismRecord<'static> {
        // SAFETY: there is one turn at a time, and only after the record was written (`lock`).
        unsafe { (*RECORD_CELL.0.get()).assume_init_mut() }
    }

    /// When the first incarnation began, in nanoseconds since 1970.
    pub fn since(&mut self) -> i64 {
        self.record().files().since.load(Relaxed) as i64
    }
}

impl Drop for RecordGuard {
    #[inline]
    fn drop(&mut self) {
        IS_BUSY.store(false, Relaxed);
    }
}

/// The record, if a read that comes from there belongs into it.
#[inline]
pub fn lock(from: usize) -> Option<RecordGuard> {
    let mut owner = OWNER.load(Acquire);
    if owner.is_null() {
        if IS_INITIALIZED.load(Relaxed) {
            return None;
        }
        initialize();
        owner = OWNER.load(Acquire);
        if owner.is_null() {
            return None;
        }
    }
    // SAFETY: the page stays.
    let recorded = unsafe { (*owner).load(Relaxed) };
    if trap::is_in_handler(trap::stack_pointer()) {
        return None;
    }
    if recorded != this_thread() {
        note_other_thread(recorded, from);
        return None;
    }
    if IS_BUSY.load(Relaxed) {
        return None;
    }
    IS_BUSY.store(true, Relaxed);
    let mut guard = RecordGuard(());
    (caller::is_program(from) && !guard.record().is_full()).then_some(guard)
}

/// A thread that is not recorded reads; of a process that is, `recorded` is not 0. The user hears of the first such read of the
/// program, while the process may come back.
#[inline]
fn note_other_thread(recorded: usize, from: usize) {
    if recorded != 0 && !IS_OTHER_REPORTED.load(Relaxed) {
        report_other_thread(from);
    }
}

#[cold]
fn report_other_thread(from: usize) {
    if caller::belongs_to_transport(from) || IS_OTHER_REPORTED.swap(true, Relaxed) {
        return;
    }
    info(format_args!(
        "a thread reads clocks or random numbers that are not recorded, for it is not the one that begins the program. \
         If this process is killed and the thread's next answers decide what is sent or printed, the difference ends \
         the job"
    ));
}

/// The record, if a system call of this thread belongs into it.
#[inline]
pub fn lock_for_call() -> Option<RecordGuard> {
    if !is_owner() || IS_BUSY.swap(true, Relaxed) {
        return None;
    }
    let mut guard = RecordGuard(());
    (!guard.record().is_full()).then_some(guard)
}

/// From now on this process cannot be restarted, which is said once, with the reason.
#[cold]
pub fn forbid_restart(reason: fmt::Arguments<'_>) {
    if let Some(head) = head() {
        forbid_restart_in(head, reason);
    }
}

/// Whether it was said that this process cannot be restarted.
pub fn is_restart_forbidden() -> bool {
    head().is_none_or(|head| head.files.is_restart_forbidden())
}

/// The same as [`forbid_restart`], for the process that has this record.
#[cold]
pub fn forbid_restart_in(head: &RecordHead, reason: fmt::Arguments<'_>) {
    let mut text = crate::libc_wrappers::MessageBuffer::new();
    let _ = text.write_fmt(reason);
    if head.is_replaying() {
        return end_replay(head, reason);
    }
    if head.files.forbid_restart(text.bytes()) {
        warn(format_args!("{reason}: if this process is killed it cannot be restarted"));
        if head.has_durable_effects() {
            held_files::make_durable(head);
        }
    }
}

/// What cannot be replayed was done while the process replays: what it learns from that may be something else than before, so it
/// does not go on. (An incarnation that had been seen to do so would not have been restarted.)
#[cold]
fn end_replay(head: &RecordHead, reason: fmt::Arguments<'_>) {
    if self::head().is_some() {
        crate::libc_wrappers::abort_replay(format_args!("{reason}, and cannot be replayed"));
    }
    let mut text = crate::libc_wrappers::MessageBuffer::new();
    let _ = write!(text, "{reason}, and cannot be replayed");
    head.files.forbid_restart(text.bytes());
    let rank = head.owner.load(Relaxed);
    crate::session::kernel(libc::SYS_kill, [rank, libc::SIGKILL as u64, 0, 0, 0, 0]);
}

/// Whether a process is this one, or one that it has started, by itself or by a child.
pub fn is_own_process(process: c_int) -> bool {
    const BELOW_MAX: usize = 8;
    // By the trampoline: this is asked within the handler of system calls.
    let own = crate::session::kernel(libc::SYS_getpid, [0; 6]) as u32;
    let mut at = u32::try_from(process).unwrap_or(0);
    for _ in 0..BELOW_MAX {
        if at <= 1 {
            return false;
        }
        if at == own || is_own_thread(at) {
            return true;
        }
        at = parent_of(at);
    }
    false
}

fn is_own_thread(thread: u32) -> bool {
    let own = crate::session::kernel(libc::SYS_getpid, [0; 6]) as u64;
    crate::session::kernel(libc::SYS_tgkill, [own, thread.into(), 0, 0, 0, 0]) == 0
}

/// The head of the record, if this process is recorded.
pub fn head() -> Option<&'static RecordHead> {
    let owner = OWNER.load(Acquire);
    // SAFETY: null, or a page that stays, and is empty in a child.
    let is_recorded = unsafe { owner.as_ref() }.is_some_and(|owner| owner.load(Relaxed) != 0);
    // SAFETY: null, or the head of the record, which stays mapped in the process that has it.
    unsafe { HEAD.load(Acquire).as_ref() }.filter(|_| is_recorded)
}

/// The record's descriptor.
pub fn descriptor() -> c_int {
    DESCRIPTOR.load(Relaxed)
}

/// Where polls are counted, if this process is recorded. A child has its parent's memory, but for the record.
pub fn polls() -> Option<&'static Polls> {
    head().map(|head| &head.polls)
}

/// Finds out whether this process is recorded. The first call is made when the program is loaded, by its only thread.
#[cold]
pub fn initialize() {
    if IS_INITIALIZED.swap(true, Relaxed) {
        return;
    }
    if let Some(above) = number(ABOVE_VARIABLE) {
        return observe_below(above as c_int);
    }
    let Some((descriptor, start)) = number(RECORD_VARIABLE).zip(number(INCARNATION_VARIABLE))
    else {
        return;
    };
    let descriptor = descriptor as c_int;
    if !is_record(descriptor) {
        // Whoever started this program has closed it: it is not the one that is recorded.
        return observe_below(descriptor);
    }
    let Some(head) = map(descriptor) else {
        warn_no_memory();
        return;
    };
    // SAFETY: the memory file is a record, and stays mapped.
    let first = unsafe { head.cast::<RecordHead>().as_ref() };
    let Some(first) = first else { return };
    // SAFETY: plain system call.
    let me = unsafe { libc::getpid() } as u64;
    if !first.begin(start + 1, me) && first.owner.load(Relaxed) != me {
        // SAFETY: nobody has been given the mapping.
        unsafe { libc::syscall(libc::SYS_munmap, head, NONDETERMINISM_BYTES) };
        return observe_from(descriptor);
    }
    let Some(owner) = owner_page(head) else {
        warn(format_args!("clocks are not recorded: this Linux is too old (before 4.14)"));
        return;
    };
    // SAFETY: the mapping has so many bytes; nobody else has them while this process is the owner.
    unsafe {
        let entries = head.cast::<u8>().add(RECORD_HEAD_BYTES);
        let entries =
            std::slice::from_raw_parts_mut(entries, RECENT_DETERMINANTS_AT - RECORD_HEAD_BYTES);
        (*RECORD_CELL.0.get()).write(NondeterminismRecord::new(first, entries));
        (*owner).store(this_thread(), Relaxed);
    }
    DESCRIPTOR.store(descriptor, Relaxed);
    HEAD.store(head.cast(), Release);
    OWNER.store(owner, Release);
    record_calls(first);
}

/// A program that a recorded process has started, with the record's descriptor: its effects on files are seen.
fn observe_from(descriptor: c_int) {
    if number(FILES_VARIABLE) == Some(0) || !observe::begin_child(descriptor) {
        return forget();
    }
    // SAFETY: the variables are changed by the only thread.
    unsafe {
        let said = libc::getenv(RECORD_VARIABLE.as_ptr());
        if !said.is_null() {
            // It has none, which is to be seen; what it starts in turn finds the record nevertheless.
            libc::setenv(ABOVE_VARIABLE.as_ptr(), said, 1);
            libc::unsetenv(RECORD_VARIABLE.as_ptr());
        }
    }
}

/// The same without the descriptor, which one of the processes above may still have.
fn observe_below(number: c_int) {
    const ABOVE_MAX: usize = 8;
    if is_record(number) {
        return observe_from(number);
    }
    let mut parent = std::process::id();
    for _ in 0..ABOVE_MAX {
        parent = parent_of(parent);
        if parent <= 1 {
            break;
        }
        let mut path = crate::libc_wrappers::MessageBuffer::new();
        let _ = write!(path, "/proc/{parent}/fd/{number}\0");
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: a string that ends; descriptors of our own.
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

/// The parent of a process; 0 if there is none. (proc(5): the fourth word of `stat`, behind a name in brackets.)
fn parent_of(process: u32) -> u32 {
    let mut path = crate::libc_wrappers::MessageBuffer::new();
    let _ = write!(path, "/proc/{process}/stat\0");
    let mut text = [0_u8; 512];
    let place = path.bytes().as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let kernel = crate::session::kernel_or_libc;
    let file = kernel(libc::SYS_openat, [crate::syscalls::HERE, place, flags, 0, 0, 0]) as u64;
    let room = text.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_read, [file, room, text.len() as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let length = usize::try_from(length).unwrap_or(0);
    let text = &text[..length];
    let behind = text.iter().rposition(|byte| *byte == b')').unwrap_or(0);
    let word = text[behind..].split(|byte| *byte == b' ').nth(2);
    word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok()).unwrap_or(0)
}

/// From now on the system calls of this thread are recorded.
fn record_calls(head: &RecordHead) {
    if number(FILES_VARIABLE) == Some(0) {
        return;
    }
    if head.files.since.load(Relaxed) == 0 {
        let now = crate::libc_wrappers::now(libc::CLOCK_REALTIME) - SLACK_NANOS;
        head.files.since.store(now as u64, Relaxed);
    }
    if !trap::install() {
        forbid_restart(format_args!(
            "this system cannot show what it does with files (Linux 5.11 on x86-64 can; if that does not matter: --set \
             recover_files=off)"
        ));
        return;
    }
    if let Some(guard) = lock_for_call() {
        Session::new(guard).adopt();
    }
}

fn warn_no_memory() {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain system call that fills in a value of ours.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    let wanted = NONDETERMINISM_BYTES >> 20;
    match limit.rlim_cur {
        libc::RLIM_INFINITY => warn(format_args!(
            "clocks are not recorded: there is no memory for it ({wanted} MiB of address space)"
        )),
        most => warn(format_args!(
            "clocks are not recorded: there is no room for {wanted} MiB in the {} MiB of address space \
             that this process may have: raise that limit (ulimit -v)",
            most >> 20
        )),
    }
}

/// Lets go of the record, so that an image can be taken of this process which is not one of its record as well: nothing is
/// mapped, no descriptor is open, and whoever reads a clock meanwhile asks the system. False: it has none.
pub fn quiesce() -> bool {
    let head = HEAD.load(Acquire);
    // SAFETY: null, or the head of the record, which is mapped.
    let Some(present) = (unsafe { head.as_ref() }) else { return false };
    if !is_owner() || IS_BUSY.swap(true, Relaxed) {
        return false;
    }
    let is_watched = number(FILES_VARIABLE) != Some(0);
    if is_watched && !while_locked(Session::quiesce) {
        IS_BUSY.store(false, Relaxed);
        return false;
    }
    trap::suspend_dispatch();
    let place = present.position();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `IS_BUSY` keeps everybody from the record, whose addresses stay taken.
    unsafe {
        *QUIESCED_POSITION.0.get() = Some(place);
        map_at(head.cast(), libc::PROT_NONE, flags, -1);
        let descriptor = DESCRIPTOR.load(Relaxed);
        if is_record(descriptor) {
            libc::close(descriptor);
        } else {
            DESCRIPTOR.store(-1, Relaxed);
        }
    }
    true
}

/// Work on what is open, by the thread that keeps everybody else out already.
fn while_locked<R>(work: impl FnOnce(&mut Session) -> R) -> R {
    let mut session = Session::new(RecordGuard(()));
    let result = work(&mut session);
    std::mem::forget(session);
    result
}

/// Takes hold of the record again, which is behind this descriptor, or that of the process of which this one was an image:
/// its start `start`, counted from 0. It is kept if it has the very number at which programs that this process becomes look
/// for it, which was free meanwhile.
pub fn resume(descriptor: c_int, incarnation: u64) -> ResumeOutcome {
    let head = HEAD.load(Acquire);
    let was_same;
    // SAFETY: this thread's alone, and the mapping's addresses are ours.
    unsafe {
        let Some(place) = (*QUIESCED_POSITION.0.get()).take() else { return ResumeOutcome::Failed };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let is_back = is_record(descriptor)
            && map_at(head.cast(), protection, flags, descriptor)
            && libc::syscall(libc::SYS_madvise, head, NONDETERMINISM_BYTES, libc::MADV_DONTFORK)
                == 0;
        if !is_back || !place_descriptor(descriptor, DESCRIPTOR.load(Relaxed)) {
            return ResumeOutcome::Failed;
        }
        // The same start has all of it there.
        let present = &*head;
        let is_same = present.is_of(incarnation + 1);
        was_same = is_same;
        if !is_same && !present.resume(incarnation + 1, libc::getpid() as u64, &place) {
            return ResumeOutcome::Failed;
        }
        (*RECORD_CELL.0.get()).assume_init_mut().refresh();
        match is_same {
            true if number(FILES_VARIABLE) != Some(0) => while_locked(Session::resume),
            true => (),
            false => Session::restart_replay(),
        }
    }
    IS_BUSY.store(false, Relaxed);
    if number(FILES_VARIABLE) != Some(0) {
        trap::resume_dispatch(!was_same);
    }
    if descriptor == DESCRIPTOR.load(Relaxed) {
        ResumeOutcome::DescriptorKept
    } else {
        ResumeOutcome::Resumed
    }
}

/// Has this file open under `number` as well, for programs too that this process becomes; below 0: that is not wanted.
///
/// # Safety
/// Whatever is open under `number` belongs to nobody else.
unsafe fn place_descriptor(descriptor: c_int, number: c_int) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            ..0 => true,
            // A copy at its own place keeps the flag that closes it over exec.
            same if same == descriptor => libc::fcntl(same, libc::F_SETFD, 0) == 0,
            other => libc::dup2(descriptor, other) >= 0,
        }
    }
}

/// Whether this thread is the one that is recorded.
#[inline]
pub fn is_owner() -> bool {
    // SAFETY: null, or a page that stays.
    let owner = unsafe { OWNER.load(Acquire).as_ref() };
    owner.is_some_and(|owner| owner.load(Relaxed) == this_thread())
}

/// # Safety
/// The addresses of the record are there, and nobody reads or writes them meanwhile.
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

/// This process is none that is recorded: what it starts has not to do with that either.
fn forget() {
    // SAFETY: the variables are changed by the only thread.
    unsafe {
        libc::unsetenv(RECORD_VARIABLE.as_ptr());
        let list = libc::getenv(PRELOAD_VARIABLE.as_ptr());
        if list.is_null() || libc::strstr(list, c"liblandbridge_interpose".as_ptr()).is_null() {
            return;
        }
        // Ours is the first; others are the user's.
        match libc::strchr(list, c_int::from(b':')) {
            rest if rest.is_null() => _ = libc::unsetenv(PRELOAD_VARIABLE.as_ptr()),
            rest => _ = libc::memmove(list.cast(), rest.add(1).cast(), libc::strlen(rest)),
        }
    }
}

fn number(name: &CStr) -> Option<u64> {
    // SAFETY: a string that lives as long as nobody changes the variable.
    unsafe {
        let text: *mut c_char = libc::getenv(name.as_ptr());
        if text.is_null() {
            return None;
        }
        CStr::from_ptr(text).to_str().ok()?.parse().ok()
    }
}

/// Asked also within the handler of system calls, which makes none but by the trampoline.
pub fn is_record(descriptor: c_int) -> bool {
    // SAFETY: a structure of which all zeros are a value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    let (descriptor, room) = (descriptor as u32 as u64, (&raw mut about).addr() as u64);
    let found = crate::session::kernel_or_libc(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]);
    found == 0 && about.st_size == NONDETERMINISM_BYTES as i64
}

fn map(descriptor: c_int) -> Option<*mut c_void> {
    map_with(NONDETERMINISM_BYTES, libc::MAP_SHARED | libc::MAP_NORESERVE, descriptor)
}

/// A page for [`OWNER`]; children have not what is at `record`, either.
fn owner_page(record: *mut c_void) -> Option<*mut AtomicUsize> {
    let page = map_with(RECORD_HEAD_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    // SAFETY: advice about two mappings of ours.
    let is_taken = unsafe {
        libc::syscall(libc::SYS_madvise, page, RECORD_HEAD_BYTES, libc::MADV_WIPEONFORK) == 0
            && libc::syscall(libc::SYS_madvise, record, NONDETERMINISM_BYTES, libc::MADV_DONTFORK)
                == 0
    };
    is_taken.then_some(page.cast())
}

/// The system call itself: somebody may be just about to stand in front of the C library's function (UCX does, and reads
/// the time meanwhile).
fn map_with(bytes: usize, flags: c_int, descriptor: c_int) -> Option<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel finds a free place.
    let found = unsafe {
        libc::syscall(libc::SYS_mmap, 0_usize, bytes, protection, flags, descriptor, 0_usize)
    };
    (found > 0).then_some(found as *mut c_void)
}

/// What tells threads of a process apart, without a call.
#[inline]
fn this_thread() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of a thread's own block is its address.
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_open_where_it_was_and_stays_so_over_exec() {
        // SAFETY: descriptors of this test's own.
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
