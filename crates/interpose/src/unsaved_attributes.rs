//! Attributes of this process that CRIU does not save in a checkpoint image: memory that is empty
//! in children (madvise(2), `MADV_WIPEONFORK`), the processors on which threads may run
//! (sched_setaffinity(2)), personality(2), and of the main thread the memory policy
//! (set_mempolicy(2)), the priority for disks (ioprio_set(2)), the slack of timers and the policy
//! for failing memory (prctl(2)); and that all future memory is locked (mlockall(2)).
//!
//! In: calls that set them; the moment before an image is taken, and the moment after a process was
//! restored from it. Out: the same attributes as before. What may never happen: a restored process
//! continues, without a report, with other attributes than before.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::{c_int, c_long};

use crate::kernel_calls::{error, kernel};
use crate::{processes, watched};

/// Argument of ioprio_set(2): a thread, by its id.
const IOPRIO_WHO_PROCESS: u64 = 1;

/// Largest number of ranges that are marked again.
const RANGES_MAX: usize = 64;

/// Whether the program has marked memory.
static HAS_MARKED: AtomicBool = AtomicBool::new(false);
/// The first and the last address of each marked range when the last image was taken.
static RANGES: [[AtomicU64; 2]; RANGES_MAX] =
    [const { [const { AtomicU64::new(0) }; 2] }; RANGES_MAX];
static RANGE_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Slack of the timers in nanoseconds when the last image was taken.
static TIMER_SLACK: AtomicU64 = AtomicU64::new(0);

/// Largest number of threads, beside the main thread, that have processors of their own.
const PINNED_THREADS_MAX: usize = 256;
/// Words of a set of processors: 1,024 processors.
const SET_WORDS: usize = 16;

/// A set of processors, a bit for each.
type ProcessorSet = [u64; SET_WORDS];

/// Whether the program has chosen processors.
static HAS_PINNED: AtomicBool = AtomicBool::new(false);
/// Processors of the main thread before the program has chosen any. Threads that have these get
/// those of the agent that restores them, which may be on another node.
static FIRST: [AtomicU64; SET_WORDS] = [const { AtomicU64::new(0) }; SET_WORDS];
/// Thread ids (0: the main thread), and the processors of these threads, when the last image was
/// taken.
static PINNED: [PinnedThread; 1 + PINNED_THREADS_MAX] =
    [const { PinnedThread::none() }; 1 + PINNED_THREADS_MAX];
static PINNED_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Priority of the main thread for disks when the last image was taken; 0: it has not set one.
static DISK_PRIORITY: AtomicU64 = AtomicU64::new(0);

/// What the kernel does to the main thread when memory fails (prctl(2), PR_MCE_KILL), when the last
/// image was taken.
static MEMORY_FAULT_POLICY: AtomicU64 = AtomicU64::new(DEFAULT_POLICY);
const DEFAULT_POLICY: u64 = libc::PR_MCE_KILL_DEFAULT as u64;

/// The execution domain (personality(2)) when the last image was taken.
static PERSONA: AtomicU64 = AtomicU64::new(0);
const ASK_FOR_PERSONA: u64 = 0xffff_ffff;

/// Memory policy of the main thread (set_mempolicy(2)) when the last image was taken: mode (0: the
/// default), and nodes.
static MEMORY_POLICY: AtomicU64 = AtomicU64::new(0);
static MEMORY_NODES: [AtomicU64; SET_WORDS] = [const { AtomicU64::new(0) }; SET_WORDS];
/// Memory nodes that the interposer tracks (set_mempolicy(2)).
const NODES_MAX: u64 = 64 * SET_WORDS as u64;

/// Whether the program has made a timerfd.
static HAS_TIMERS: AtomicBool = AtomicBool::new(false);

/// Flags of the last mlockall(2) that locks future memory; 0: it is not locked.
static FUTURE_LOCKED: AtomicU64 = AtomicU64::new(0);

struct PinnedThread {
    id: AtomicU64,
    processors: [AtomicU64; SET_WORDS],
}

impl PinnedThread {
    const fn none() -> PinnedThread {
        PinnedThread { id: AtomicU64::new(0), processors: [const { AtomicU64::new(0) }; SET_WORDS] }
    }
}

/// Notes a system call that sets an attribute.
pub fn note(number: c_long, arguments: [u64; 6]) {
    match number {
        libc::SYS_madvise if arguments[2] as c_int == libc::MADV_WIPEONFORK => {
            HAS_MARKED.store(true, Relaxed);
        }
        libc::SYS_sched_setaffinity if !HAS_PINNED.swap(true, Relaxed) => {
            let first = processors_of(0).unwrap_or_default();
            FIRST.iter().zip(first).for_each(|(place, word)| place.store(word, Relaxed));
        }
        libc::SYS_timerfd_create => HAS_TIMERS.store(true, Relaxed),
        libc::SYS_mlockall => {
            // The program's own call follows; to lock again what is locked makes no difference.
            let is_future = arguments[0] as c_int & libc::MCL_FUTURE != 0
                && kernel(libc::SYS_mlockall, [arguments[0], 0, 0, 0, 0, 0]) == 0;
            FUTURE_LOCKED.store(if is_future { arguments[0] } else { 0 }, Relaxed);
        }
        libc::SYS_munlockall => FUTURE_LOCKED.store(0, Relaxed),
        _ => (),
    }
}

/// Remembers the attributes before an image of this process is taken. False: there are too many
/// marked ranges, and no image can be taken.
pub fn remember() -> bool {
    if HAS_TIMERS.load(Relaxed) {
        arm_expired_timers();
    }
    let slack = kernel(libc::SYS_prctl, [libc::PR_GET_TIMERSLACK as u64, 0, 0, 0, 0, 0]);
    TIMER_SLACK.store(u64::try_from(slack).unwrap_or(0), Relaxed);
    let policy = kernel(libc::SYS_prctl, [libc::PR_MCE_KILL_GET as u64, 0, 0, 0, 0, 0]);
    MEMORY_FAULT_POLICY.store(u64::try_from(policy).unwrap_or(DEFAULT_POLICY), Relaxed);
    let persona = kernel(libc::SYS_personality, [ASK_FOR_PERSONA, 0, 0, 0, 0, 0]);
    PERSONA.store(u64::try_from(persona).unwrap_or(0), Relaxed);
    remember_memory_policy();
    let priority = kernel(libc::SYS_ioprio_get, [IOPRIO_WHO_PROCESS, 0, 0, 0, 0, 0]);
    DISK_PRIORITY.store(u64::try_from(priority).unwrap_or(0), Relaxed);
    (!HAS_MARKED.load(Relaxed) || remember_ranges())
        && (!HAS_PINNED.load(Relaxed) || remember_processors())
}

/// Makes the kernel arm periodic timers that have expired and were not read: the question how long
/// a timer has to run does that, and keeps the expirations. An image would lack their time.
fn arm_expired_timers() {
    let mut times = [0_u64; 4];
    let room = times.as_mut_ptr().addr() as u64;
    processes::each_number_in(c"/proc/self/fd", |descriptor| {
        // Of another descriptor the kernel says EINVAL.
        kernel(libc::SYS_timerfd_gettime, [descriptor, room, 0, 0, 0, 0]);
    });
}

/// On a system without NUMA there is no such call, and nothing to remember.
fn remember_memory_policy() {
    let (mut mode, mut nodes) = (0_i32, [0_u64; SET_WORDS]);
    let (place, room) = ((&raw mut mode).addr() as u64, nodes.as_mut_ptr().addr() as u64);
    let result = kernel(libc::SYS_get_mempolicy, [place, room, NODES_MAX, 0, 0, 0]);
    MEMORY_POLICY.store(if result == 0 { mode as u64 } else { 0 }, Relaxed);
    MEMORY_NODES.iter().zip(nodes).for_each(|(place, word)| place.store(word, Relaxed));
}

fn restore_memory_policy() {
    let mode = MEMORY_POLICY.load(Relaxed);
    let nodes: [u64; SET_WORDS] = std::array::from_fn(|at| MEMORY_NODES[at].load(Relaxed));
    if mode != 0 {
        let room = nodes.as_ptr().addr() as u64;
        kernel(libc::SYS_set_mempolicy, [mode, room, NODES_MAX, 0, 0, 0]);
    }
}

/// False: too many threads have processors of their own.
fn remember_processors() -> bool {
    let first: ProcessorSet = std::array::from_fn(|at| FIRST[at].load(Relaxed));
    let mut count = 0;
    let mut remember = |id| {
        let Some(set) = processors_of(id).filter(|set| *set != first) else { return };
        if let Some(thread) = PINNED.get(count) {
            thread.id.store(id, Relaxed);
            thread.processors.iter().zip(set).for_each(|(place, word)| place.store(word, Relaxed));
        }
        count += 1;
    };
    remember(0);
    processes::each_other_thread(|_, thread| remember(thread));
    PINNED_COUNT.store(count.min(PINNED.len()), Relaxed);
    count <= PINNED.len()
}

/// Another node may lack the processors; the threads then run where they can.
fn restore_processors() {
    for thread in &PINNED[..PINNED_COUNT.load(Relaxed)] {
        let set: ProcessorSet = std::array::from_fn(|at| thread.processors[at].load(Relaxed));
        let (room, bytes) = (set.as_ptr().addr() as u64, size_of_val(&set) as u64);
        kernel(libc::SYS_sched_setaffinity, [thread.id.load(Relaxed), bytes, room, 0, 0, 0]);
    }
}

/// Processors on which a thread may run; id 0: this thread.
fn processors_of(id: u64) -> Option<ProcessorSet> {
    let mut set = [0; SET_WORDS];
    let (room, bytes) = (set.as_mut_ptr().addr() as u64, size_of_val(&set) as u64);
    let length = kernel(libc::SYS_sched_getaffinity, [id, bytes, room, 0, 0, 0]);
    (length > 0).then_some(set)
}

/// False: there are too many ranges, or the kernel does not name them.
fn remember_ranges() -> bool {
    let (mut present, mut count) = (None, 0);
    let is_read = processes::each_line(c"/proc/self/smaps", |line| {
        if let Some(range) = range_of(line) {
            present = Some(range);
        } else if is_marked(line) {
            let room = RANGES.get(count).zip(present);
            for (place, address) in
                room.into_iter().flat_map(|(room, range)| room.iter().zip(range))
            {
                place.store(address, Relaxed);
            }
            count += 1;
        }
    });
    RANGE_COUNT.store(count.min(RANGES_MAX), Relaxed);
    is_read && count <= RANGES_MAX
}

/// The addresses at the beginning of a line of smaps (proc(5)) that describes a mapping.
fn range_of(line: &[u8]) -> Option<[u64; 2]> {
    let word = std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
    let (start, end) = word.split_once('-')?;
    Some([u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?])
}

/// Whether a line of smaps has the flags of a mapping that is marked.
fn is_marked(line: &[u8]) -> bool {
    let flags = line.strip_prefix(b"VmFlags:").unwrap_or_default();
    flags.split(|byte| *byte == b' ').any(|flag| flag == b"wf")
}

/// Gives the attributes to a process that was restored from the image.
pub fn restore() {
    for [start, end] in &RANGES[..RANGE_COUNT.load(Relaxed)] {
        let (start, end) = (start.load(Relaxed), end.load(Relaxed));
        let advice = libc::MADV_WIPEONFORK as u64;
        let result = kernel(libc::SYS_madvise, [start, end - start, advice, 0, 0, 0]);
        // Another thread may have unmapped a part since.
        if result != 0 && result != error(libc::ENOMEM) {
            watched::forbid_restart_of(format_args!(
                "its memory (MADV_WIPEONFORK) cannot be marked again"
            ));
        }
    }
    let slack = TIMER_SLACK.load(Relaxed);
    if slack != 0 {
        kernel(libc::SYS_prctl, [libc::PR_SET_TIMERSLACK as u64, slack, 0, 0, 0, 0]);
    }
    kernel(libc::SYS_personality, [PERSONA.load(Relaxed), 0, 0, 0, 0, 0]);
    restore_memory_policy();
    let policy = MEMORY_FAULT_POLICY.load(Relaxed);
    if policy != DEFAULT_POLICY {
        let set = libc::PR_MCE_KILL_SET as u64;
        kernel(libc::SYS_prctl, [libc::PR_MCE_KILL as u64, set, policy, 0, 0, 0]);
    }
    let priority = DISK_PRIORITY.load(Relaxed);
    if priority != 0 {
        kernel(libc::SYS_ioprio_set, [IOPRIO_WHO_PROCESS, 0, priority, 0, 0, 0]);
    }
    if HAS_PINNED.load(Relaxed) {
        restore_processors();
    }
    let locked = FUTURE_LOCKED.load(Relaxed) & !(libc::MCL_CURRENT as u64);
    if locked != 0 {
        kernel(libc::SYS_mlockall, [locked, 0, 0, 0, 0, 0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::raw;
    use crate::trampoline;

    /// The tests use the same statics.
    static ATTRIBUTES: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// The test takes the attributes away, as CRIU does.
    #[test]
    fn marked_memory_and_timer_slack_come_back() {
        const BYTES: u64 = 8192;
        let _alone = ATTRIBUTES.lock();
        assert!(trampoline::open(&crate::thread_gate::GATE).is_some());
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let call = |number, arguments| {
            // SAFETY: memory of this test, and an attribute of this thread.
            unsafe { raw(number, arguments) }
        };
        let memory = call(libc::SYS_mmap, [0, BYTES, 3, flags, !0, 0]) as u64;
        let marked = || {
            let (mut present, mut found) = ([0; 2], false);
            processes::each_line(c"/proc/self/smaps", |line| {
                present = range_of(line).unwrap_or(present);
                found |= is_marked(line) && (present[0]..present[1]).contains(&memory);
            });
            found
        };
        let advise = |advice: i32| {
            let arguments = [memory, BYTES, advice as u64, 0, 0, 0];
            note(libc::SYS_madvise, arguments);
            assert_eq!(call(libc::SYS_madvise, arguments), 0);
        };
        let slack =
            |operation: i32, value| call(libc::SYS_prctl, [operation as u64, value, 0, 0, 0, 0]);
        advise(libc::MADV_WIPEONFORK);
        slack(libc::PR_SET_TIMERSLACK, 77_000);
        assert!(remember());
        advise(libc::MADV_KEEPONFORK);
        slack(libc::PR_SET_TIMERSLACK, 50_000);
        assert!(!marked());
        restore();
        assert!(marked());
        assert_eq!(slack(libc::PR_GET_TIMERSLACK, 0), 77_000);
        call(libc::SYS_munmap, [memory, BYTES, 0, 0, 0, 0]);
    }

    #[test]
    fn an_expired_periodic_timer_is_armed_again() {
        assert!(trampoline::open(&crate::thread_gate::GATE).is_some());
        let timer = kernel(libc::SYS_timerfd_create, [libc::CLOCK_MONOTONIC as u64, 0, 0, 0, 0, 0]);
        let times = [60_u64, 0, 0, 1];
        let room = times.as_ptr().addr() as u64;
        assert_eq!(kernel(libc::SYS_timerfd_settime, [timer as u64, 0, room, 0, 0, 0]), 0);
        std::thread::sleep(std::time::Duration::from_millis(20));
        let text = || std::fs::read_to_string(format!("/proc/self/fdinfo/{timer}")).unwrap();
        assert!(text().contains("it_value: (0, 0)"), "{}", text());
        arm_expired_timers();
        assert!(!text().contains("it_value: (0, 0)") && text().contains("ticks: 1"), "{}", text());
        kernel(libc::SYS_close, [timer as u64, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn processors_and_the_priority_for_disks_come_back() {
        const IDLE: u64 = 3 << 13;
        let _alone = ATTRIBUTES.lock();
        assert!(trampoline::open(&crate::thread_gate::GATE).is_some());
        let call = |number, arguments| {
            // SAFETY: attributes of this thread.
            unsafe { raw(number, arguments) }
        };
        let before = processors_of(0).unwrap();
        let bytes = size_of_val(&before) as u64;
        let pin = |set: &ProcessorSet| {
            let arguments = [0, bytes, set.as_ptr().addr() as u64, 0, 0, 0];
            note(libc::SYS_sched_setaffinity, arguments);
            assert_eq!(call(libc::SYS_sched_setaffinity, arguments), 0);
        };
        let mut first = [0; SET_WORDS];
        first[0] = 1 << before[0].trailing_zeros();
        pin(&first);
        call(libc::SYS_ioprio_set, [IOPRIO_WHO_PROCESS, 0, IDLE, 0, 0, 0]);
        assert!(remember());
        pin(&before);
        call(libc::SYS_ioprio_set, [IOPRIO_WHO_PROCESS, 0, 2 << 13, 0, 0, 0]);
        restore();
        assert_eq!(processors_of(0).unwrap(), first);
        assert_eq!(call(libc::SYS_ioprio_get, [IOPRIO_WHO_PROCESS, 0, 0, 0, 0, 0]) as u64, IDLE);
    }
}
