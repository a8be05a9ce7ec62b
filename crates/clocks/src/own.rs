//! Whether this process is recorded, by which thread, and its record.
//!
//! The agent says where the record is (`LANDBRIDGE_CLOCKS`, a descriptor that stays open over exec) and which start of
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

use landbridge_proto::clocks::{CLOCKS_BYTES, HEAD_BYTES, Head, Place, Polls, Record};
use landbridge_proto::recent::RECENT_AT;

use crate::answer::{inform, say};
use crate::session::Session;
use crate::{caller, held, observe, trap};

/// Names of variables, from the agent.
const RECORD: &CStr = c"LANDBRIDGE_CLOCKS";
const START: &CStr = c"LANDBRIDGE_INCARNATION";
/// In programs that a rank has started: the number of the record's descriptor in the rank.
const ABOVE: &CStr = c"LANDBRIDGE_CLOCKS_ABOVE";
/// "0": nobody wants to know what is done with files.
const FILES: &CStr = c"LANDBRIDGE_WATCH_FILES";
/// Clocks of file servers may be behind by so much.
const SLACK_NANOS: i64 = 2_000_000_000;
const PRELOAD: &CStr = c"LD_PRELOAD";
/// How the name of this library begins.
pub const LIBRARY: &[u8] = b"liblandbridge_clocks";

/// Where the thread stands that is recorded, in a page that a child finds empty, whatever way it was made. Null: nobody is.
static OWNER: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());
static HAS_LOOKED: AtomicBool = AtomicBool::new(false);
/// A read is being answered: one that interrupts it (in a handler of a signal) is not recorded.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// For whom it is. It is written before [`OWNER`] and used by the owner alone.
static MINE: Mine = Mine(UnsafeCell::new(MaybeUninit::uninit()));
/// It was said that another thread reads as well.
static IS_OTHER_TOLD: AtomicBool = AtomicBool::new(false);
static HEAD: AtomicPtr<Head> = AtomicPtr::new(null_mut());
/// The descriptor of the record, which stays open for programs that this process becomes.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// How far the process has come, while it is without its record. Used by the owner alone.
static ASIDE: Aside = Aside(UnsafeCell::new(None));

struct Aside(UnsafeCell<Option<Place>>);

// SAFETY: see `ASIDE`.
unsafe impl Sync for Aside {}

struct Mine(UnsafeCell<MaybeUninit<Record<'static>>>);

// SAFETY: see `MINE`; `IS_BUSY` keeps the owner's own interruptions out.
unsafe impl Sync for Mine {}

/// What has become of the descriptor with which a process takes hold of its record again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Return {
    /// There is no way back.
    None = 0,
    /// It is not needed any more.
    Done = 1,
    /// It stays open: from now on it is the process's own.
    Kept = 2,
}

/// The record, for the time of one answer.
pub struct Turn(());

impl Turn {
    #[inline]
    pub fn record(&mut self) -> &mut Record<'static> {
        // SAFETY: there is one turn at a time, and only after the record was written (`turn`).
        unsafe { (*MINE.0.get()).assume_init_mut() }
    }

    /// When the first incarnation began, in nanoseconds since 1970.
    pub fn since(&mut self) -> i64 {
        self.record().files().since.load(Relaxed) as i64
    }
}

impl Drop for Turn {
    #[inline]
    fn drop(&mut self) {
        IS_BUSY.store(false, Relaxed);
    }
}

/// The record, if a read that comes from there belongs into it.
#[inline]
pub fn turn(from: usize) -> Option<Turn> {
    let mut owner = OWNER.load(Acquire);
    if owner.is_null() {
        if HAS_LOOKED.load(Relaxed) {
            return None;
        }
        look();
        owner = OWNER.load(Acquire);
        if owner.is_null() {
            return None;
        }
    }
    // SAFETY: the page stays.
    let recorded = unsafe { (*owner).load(Relaxed) };
    if recorded != this_thread() {
        note_other_thread(recorded, from);
        return None;
    }
    if IS_BUSY.load(Relaxed) {
        return None;
    }
    IS_BUSY.store(true, Relaxed);
    let mut turn = Turn(());
    (caller::is_program(from) && !turn.record().is_full()).then_some(turn)
}

/// A thread that is not recorded reads; of a process that is, `recorded` is not 0. The user hears of the first such read of the
/// program, while the process may come back.
#[inline]
fn note_other_thread(recorded: usize, from: usize) {
    if recorded != 0 && !IS_OTHER_TOLD.load(Relaxed) {
        tell_other_thread(from);
    }
}

#[cold]
fn tell_other_thread(from: usize) {
    if caller::belongs_to_transport(from) || IS_OTHER_TOLD.swap(true, Relaxed) {
        return;
    }
    inform(format_args!(
        "a thread reads clocks or random numbers that are not recorded, for it is not the one that begins the program. \
         If this process is killed and the thread's next answers decide what is sent or printed, the difference ends \
         the job"
    ));
}

/// The record, if a system call of this thread belongs into it.
#[inline]
pub fn turn_of_calls() -> Option<Turn> {
    if !is_owner() || IS_BUSY.swap(true, Relaxed) {
        return None;
    }
    let mut turn = Turn(());
    (!turn.record().is_full()).then_some(turn)
}

/// From now on this process cannot be restarted, which is said once, with the reason.
#[cold]
pub fn refuse(reason: fmt::Arguments<'_>) {
    if let Some(head) = head() {
        refuse_in(head, reason);
    }
}

/// Whether it was said that this process cannot be restarted.
pub fn is_refused() -> bool {
    head().is_none_or(|head| head.files.is_refused())
}

/// The same as [`refuse`], for the process that has this record.
#[cold]
pub fn refuse_in(head: &Head, reason: fmt::Arguments<'_>) {
    let mut text = crate::answer::Line::new();
    let _ = text.write_fmt(reason);
    if head.files.refuse(text.bytes()) {
        say(format_args!("{reason}: if this process is killed it cannot be restarted"));
        if head.ships() {
            held::ship(head);
        }
    }
}

/// The head of the record, if this process is recorded.
pub fn head() -> Option<&'static Head> {
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
pub fn look() {
    if HAS_LOOKED.swap(true, Relaxed) {
        return;
    }
    if let Some(above) = number(ABOVE) {
        return observe_below(above as c_int);
    }
    let Some((descriptor, start)) = number(RECORD).zip(number(START)) else { return };
    let descriptor = descriptor as c_int;
    if !is_record(descriptor) {
        // Whoever started this program has closed it: it is not the one that is recorded.
        return observe_below(descriptor);
    }
    let Some(head) = map(descriptor) else {
        say_no_memory();
        return;
    };
    // SAFETY: the memory file is a record, and stays mapped.
    let first = unsafe { head.cast::<Head>().as_ref() };
    let Some(first) = first else { return };
    // SAFETY: plain system call.
    let me = unsafe { libc::getpid() } as u64;
    if !first.begin(start + 1, me) && first.owner.load(Relaxed) != me {
        // SAFETY: nobody has been given the mapping.
        unsafe { libc::syscall(libc::SYS_munmap, head, CLOCKS_BYTES) };
        return observe_from(descriptor);
    }
    let Some(owner) = owner_page(head) else {
        say(format_args!("clocks are not recorded: this Linux is too old (before 4.14)"));
        return;
    };
    // SAFETY: the mapping has so many bytes; nobody else has them while this process is the owner.
    unsafe {
        let entries = head.cast::<u8>().add(HEAD_BYTES);
        let entries = std::slice::from_raw_parts_mut(entries, RECENT_AT - HEAD_BYTES);
        (*MINE.0.get()).write(Record::new(first, entries));
        (*owner).store(this_thread(), Relaxed);
    }
    DESCRIPTOR.store(descriptor, Relaxed);
    HEAD.store(head.cast(), Release);
    OWNER.store(owner, Release);
    watch_calls(first);
}

/// A program that a recorded process has started, with the record's descriptor: its effects on files are seen.
fn observe_from(descriptor: c_int) {
    if number(FILES) == Some(0) || !observe::begin_child(descriptor) {
        return forget();
    }
    // SAFETY: the variables are changed by the only thread.
    unsafe {
        let said = libc::getenv(RECORD.as_ptr());
        if !said.is_null() {
            // It has none, which is to be seen; what it starts in turn finds the record nevertheless.
            libc::setenv(ABOVE.as_ptr(), said, 1);
            libc::unsetenv(RECORD.as_ptr());
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
        let mut path = crate::answer::Line::new();
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
    let mut path = crate::answer::Line::new();
    let _ = write!(path, "/proc/{process}/stat\0");
    let mut text = [0_u8; 512];
    // SAFETY: a string that ends, and room for what is read.
    let length = unsafe {
        let file = libc::open(path.bytes().as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        usize::try_from(length).unwrap_or(0)
    };
    let text = &text[..length];
    let behind = text.iter().rposition(|byte| *byte == b')').unwrap_or(0);
    let word = text[behind..].split(|byte| *byte == b' ').nth(2);
    word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok()).unwrap_or(0)
}

/// From now on the system calls of this thread are recorded.
fn watch_calls(head: &Head) {
    if number(FILES) == Some(0) {
        return;
    }
    if head.files.since.load(Relaxed) == 0 {
        let now = crate::answer::now(libc::CLOCK_REALTIME) - SLACK_NANOS;
        head.files.since.store(now as u64, Relaxed);
    }
    if !trap::install() {
        refuse(format_args!(
            "this system cannot show what it does with files (Linux 5.11 on x86-64 can; if that does not matter: --set \
             recover_files=off)"
        ));
        return;
    }
    if let Some(turn) = turn_of_calls() {
        Session::new(turn).adopt();
    }
}

fn say_no_memory() {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain system call that fills in a value of ours.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    let wanted = CLOCKS_BYTES >> 20;
    match limit.rlim_cur {
        libc::RLIM_INFINITY => say(format_args!(
            "clocks are not recorded: there is no memory for it ({wanted} MiB of address space)"
        )),
        most => say(format_args!(
            "clocks are not recorded: there is no room for {wanted} MiB in the {} MiB of address space \
             that this process may have: raise that limit (ulimit -v)",
            most >> 20
        )),
    }
}

/// Lets go of the record, so that an image can be taken of this process which is not one of its record as well: nothing is
/// mapped, no descriptor is open, and whoever reads a clock meanwhile asks the system. False: it has none.
pub fn step_aside() -> bool {
    let head = HEAD.load(Acquire);
    // SAFETY: null, or the head of the record, which is mapped.
    let Some(present) = (unsafe { head.as_ref() }) else { return false };
    if !is_owner() || IS_BUSY.swap(true, Relaxed) {
        return false;
    }
    let is_watched = number(FILES) != Some(0);
    if is_watched && !without_turn(Session::quiesce) {
        IS_BUSY.store(false, Relaxed);
        return false;
    }
    trap::turn_off();
    let place = present.place();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `IS_BUSY` keeps everybody from the record, whose addresses stay taken.
    unsafe {
        *ASIDE.0.get() = Some(place);
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
fn without_turn<R>(work: impl FnOnce(&mut Session) -> R) -> R {
    let mut session = Session::new(Turn(()));
    let result = work(&mut session);
    std::mem::forget(session);
    result
}

/// Takes hold of the record again, which is behind this descriptor, or that of the process of which this one was an image:
/// its start `start`, counted from 0. It is kept if it has the very number at which programs that this process becomes look
/// for it, which was free meanwhile.
pub fn return_from_aside(descriptor: c_int, start: u64) -> Return {
    let head = HEAD.load(Acquire);
    let was_same;
    // SAFETY: this thread's alone, and the mapping's addresses are ours.
    unsafe {
        let Some(place) = (*ASIDE.0.get()).take() else { return Return::None };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let is_back = is_record(descriptor)
            && map_at(head.cast(), protection, flags, descriptor)
            && libc::syscall(libc::SYS_madvise, head, CLOCKS_BYTES, libc::MADV_DONTFORK) == 0;
        if !is_back || !put_at(descriptor, DESCRIPTOR.load(Relaxed)) {
            return Return::None;
        }
        // The same start has all of it there.
        let present = &*head;
        let is_same = present.is_of(start + 1);
        was_same = is_same;
        if !is_same && !present.resume(start + 1, libc::getpid() as u64, &place) {
            return Return::None;
        }
        (*MINE.0.get()).assume_init_mut().look_anew();
        match is_same {
            true if number(FILES) != Some(0) => without_turn(Session::resume),
            true => (),
            false => Session::replay_again(),
        }
    }
    IS_BUSY.store(false, Relaxed);
    if number(FILES) != Some(0) {
        trap::turn_on_aside(!was_same);
    }
    if descriptor == DESCRIPTOR.load(Relaxed) { Return::Kept } else { Return::Done }
}

/// Has this file open under `number` as well, for programs too that this process becomes; below 0: that is not wanted.
///
/// # Safety
/// Whatever is open under `number` belongs to nobody else.
unsafe fn put_at(descriptor: c_int, number: c_int) -> bool {
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
        libc::syscall(libc::SYS_mmap, place, CLOCKS_BYTES, protection, flags, descriptor, 0_usize)
    };
    found == place as i64
}

/// This process is none that is recorded: what it starts has not to do with that either.
fn forget() {
    // SAFETY: the variables are changed by the only thread.
    unsafe {
        libc::unsetenv(RECORD.as_ptr());
        let list = libc::getenv(PRELOAD.as_ptr());
        if list.is_null() || libc::strstr(list, c"liblandbridge_clocks".as_ptr()).is_null() {
            return;
        }
        // Ours is the first; others are the user's.
        match libc::strchr(list, c_int::from(b':')) {
            rest if rest.is_null() => _ = libc::unsetenv(PRELOAD.as_ptr()),
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

fn is_record(descriptor: c_int) -> bool {
    // SAFETY: a record of which all zeros are a value; the kernel refuses what is no descriptor.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        libc::fstat(descriptor, &mut about) == 0 && about.st_size == CLOCKS_BYTES as i64
    }
}

fn map(descriptor: c_int) -> Option<*mut c_void> {
    map_with(CLOCKS_BYTES, libc::MAP_SHARED | libc::MAP_NORESERVE, descriptor)
}

/// A page for [`OWNER`]; children have not what is at `record`, either.
fn owner_page(record: *mut c_void) -> Option<*mut AtomicUsize> {
    let page = map_with(HEAD_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    // SAFETY: advice about two mappings of ours.
    let is_taken = unsafe {
        libc::syscall(libc::SYS_madvise, page, HEAD_BYTES, libc::MADV_WIPEONFORK) == 0
            && libc::syscall(libc::SYS_madvise, record, CLOCKS_BYTES, libc::MADV_DONTFORK) == 0
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
            assert!(put_at(one, -1));
            assert_eq!(flags(one), libc::FD_CLOEXEC);
            assert!(put_at(one, one));
            assert_eq!(flags(one), 0);
            assert!(put_at(one, other));
            assert_eq!(flags(other), 0);
            libc::close(one);
            assert!(!put_at(one, one) && !put_at(one, other), "it is closed");
            libc::close(other);
        }
    }
}
