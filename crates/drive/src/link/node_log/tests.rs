//! Tests of the logs of processes of one node, and what tests of several nodes need.

use std::collections::VecDeque;

use landbridge_proto::log::layout::{
    CUT_AT, CUT_IS_OVER, DISK_MAX_AT, DISK_TAKEN_AT, FILE_BYTES, HUGE_PAGES_AT, IMAGES_WANTED_AT,
    IN_UNIT, IS_LOCAL, LOCAL_AT, LOG_BYTES, NO_CUTS, NO_IMAGES_AT, NOTHING_WAITS, STABLE_AT,
    UNIT_KEEPS_AT, control_at, discarded_at, release_at, report_at,
};
use landbridge_proto::log::release::LogPositions;
use landbridge_proto::log::unit::emptied_log;
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::*;

/// The memory file of a node, with the part of the agent.
pub(super) struct Node {
    pub file: OwnedFd,
    /// The disk file, if there is one.
    pub disk: Option<OwnedFd>,
    job: String,
    processes: usize,
}

impl Node {
    /// All processes are on this node.
    pub fn new(name: &str, processes: usize) -> Node {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, FILE_BYTES).unwrap();
        let job = format!("test-{name}-{}", std::process::id());
        let node = Node { file, disk: None, job, processes };
        node.answer_tickets(NOTHING_WAITS);
        node.set_local(&(0..processes).collect::<Vec<_>>());
        node
    }

    /// These processes are on this node, and no others.
    pub fn set_local(&self, local: &[usize]) {
        for process in 0..self.processes {
            let word = if local.contains(&process) { IS_LOCAL } else { 0 };
            self.write(control_at(process) + LOCAL_AT as u64, word);
        }
    }

    /// These processes begin again together.
    fn set_unit(&self, unit: &[usize]) {
        unit.iter().for_each(|process| self.write(control_at(*process) + LOCAL_AT as u64, IN_UNIT));
    }

    /// No process of the unit runs: they begin again with their programs.
    fn roll_back(&self, unit: &[usize]) {
        for from in unit {
            for to in unit.iter().filter(|to| *to != from) {
                emptied_log((*from, *to), 0).iter().for_each(|(at, word)| self.write(*at, *word));
            }
        }
        self.write(ROLLBACKS_AT, 1);
    }

    /// The files, for processes.
    pub fn files(&self) -> LogFiles<'_> {
        LogFiles { memory: self.file.as_fd(), disk: self.disk.as_ref().map(AsFd::as_fd) }
    }

    pub fn write(&self, at: u64, word: u64) {
        rustix::io::pwrite(&self.file, &word.to_ne_bytes(), at).unwrap();
    }

    pub fn read(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        rustix::io::pread(&self.file, &mut word, at).unwrap();
        u64::from_ne_bytes(word)
    }

    pub fn begin(&self, process: usize, bytes_max: u64) -> NodeLogs {
        let job = self.job.as_bytes();
        let closed = ClosedLogs::new(process, job, bytes_max, 4).unwrap();
        closed.open(self.files()).unwrap()
    }

    /// Why an incarnation of a process cannot begin; `None`: it can.
    fn refusal(&self, process: usize) -> Option<String> {
        let closed = ClosedLogs::new(process, self.job.as_bytes(), 1 << 30, 4).unwrap();
        closed.open(self.files()).err().map(|error| error.to_string())
    }

    pub fn release(&self, from: usize, to: usize, position: u64) {
        self.write_twice(release_at(from, to), position);
    }

    /// Frames may leave the node for which tickets up to this one were drawn.
    pub fn answer_tickets(&self, ticket: u64) {
        self.write_twice(STABLE_AT, ticket);
    }

    fn write_twice(&self, at: u64, position: u64) {
        [at, at + 8].iter().for_each(|at| self.write(*at, position));
    }

    pub fn report(&self, process: usize) -> LogPositions {
        let at = report_at(process);
        let positions = LogPositions::from_words(|place| {
            let mut word = [0; 8];
            rustix::io::pread(&self.file, &mut word, at + 8 * place as u64).unwrap();
            u64::from_ne_bytes(word)
        });
        positions.unwrap()
    }
}

/// The state that an image of a process holds, in the place of the one that is running. It opens
/// at other addresses: another test may have taken those of the closed one.
pub(super) fn copy(closed: &ClosedLogs) -> ClosedLogs {
    closed.clone().elsewhere()
}

/// Header and payload of a frame.
fn frame(payload: &[u8]) -> Vec<u8> {
    let mut front = vec![7; HEADER_BYTES];
    front[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    front
}

pub(super) fn send(logs: &mut NodeLogs, to: usize, payload: &[u8]) -> io::Result<()> {
    logs.send(to, &frame(payload), &[IoSlice::new(payload)])
}

pub(super) fn receive(logs: &mut NodeLogs) -> Option<Vec<u8>> {
    let payload = logs.peek().unwrap().map(|frame| frame[HEADER_BYTES..].to_vec());
    logs.consume();
    payload
}

#[test]
fn the_next_incarnation_receives_and_sends_the_same_again() {
    let node = Node::new("again", 3);
    let begin = |process| node.begin(process, 1 << 30);
    let (mut zero, mut one, mut two) = (begin(0), begin(1), begin(2));
    send(&mut one, 0, b"first of one").unwrap();
    send(&mut two, 0, b"first of two").unwrap();
    let mut seen = vec![receive(&mut zero).unwrap(), receive(&mut zero).unwrap()];
    zero.note_delivery(4, 10);
    send(&mut one, 0, &[9; 5000]).unwrap();
    seen.push(receive(&mut zero).unwrap());
    zero.note_delivery(1, 0);
    send(&mut zero, 2, b"answer").unwrap();
    send(&mut two, 0, b"not delivered before the kill").unwrap();

    drop(zero);
    let mut zero = begin(0);
    assert_eq!(zero.earlier(), EarlierCounts { deliveries: 2, sent: 1 });
    assert_eq!(receive(&mut zero), None, "before the poll is known");
    assert_eq!(zero.next_delivery().unwrap(), Some([4, 2, 10]));
    let mut again = vec![receive(&mut zero).unwrap(), receive(&mut zero).unwrap()];
    assert_eq!(receive(&mut zero), None, "before its poll");
    assert_eq!(zero.next_delivery().unwrap(), Some([1, 1, 0]));
    again.push(receive(&mut zero).unwrap());
    assert_eq!(again, seen);
    assert_eq!(zero.next_delivery().unwrap(), None);
    send(&mut zero, 2, b"answer").unwrap();
    assert_eq!(receive(&mut zero).unwrap(), b"not delivered before the kill");
    send(&mut zero, 2, b"more").unwrap();
    assert_eq!([receive(&mut two).unwrap(), receive(&mut two).unwrap()], [&b"answer"[..], b"more"]);
    assert_eq!(receive(&mut two), None);
}

#[test]
fn who_sends_to_others_than_before_is_found_out() {
    let node = Node::new("others", 3);
    let mut zero = node.begin(0, 1 << 30);
    send(&mut zero, 1, b"one").unwrap();
    send(&mut zero, 1, b"two").unwrap();
    drop(zero);
    let mut zero = node.begin(0, 1 << 30);
    assert!(is_behind(&zero));
    send(&mut zero, 1, b"one").unwrap();
    let error = send(&mut zero, 2, b"two").unwrap_err();
    assert!(error.to_string().contains("is not what it sent there before"), "{error}");
    assert_eq!(receive(&mut node.begin(2, 1 << 30)), None, "nobody gets it");
    let mut zero = node.begin(0, 1 << 30);
    send(&mut zero, 1, b"one").unwrap();
    send(&mut zero, 1, b"two").unwrap();
    assert!(!is_behind(&zero));
    send(&mut zero, 2, b"three").unwrap();
}

/// A process that was spawned while the job runs, with a number far beyond.
#[test]
fn a_process_that_comes_later_is_read_also_in_replay() {
    let node = Node::new("later", 1000);
    let mut zero = node.begin(0, 1 << 30);
    assert_eq!(receive(&mut zero), None);
    let mut late = node.begin(990, 1 << 30);
    send(&mut late, 0, b"here").unwrap();
    assert!(!zero.prepare_park(), "a frame waits");
    assert_eq!(receive(&mut zero).unwrap(), b"here");
    zero.note_delivery(3, 0);
    send(&mut zero, 990, b"welcome").unwrap();
    send(&mut late, 0, b"not delivered").unwrap();
    drop(zero);
    let mut zero = node.begin(0, 1 << 30);
    assert_eq!((zero.next_delivery().unwrap(), zero.earlier().sent), (Some([3, 1, 0]), 1));
    assert_eq!(receive(&mut zero).unwrap(), b"here");
    assert_eq!(zero.next_delivery().unwrap(), None);
    assert!(send(&mut zero, 990, b"another").is_err());
    assert_eq!(receive(&mut zero).unwrap(), b"not delivered");
    assert_eq!(receive(&mut late).unwrap(), b"welcome");
    let error = send(&mut late, LOGGED_PROCESSES_MAX, b"").unwrap_err();
    assert!(error.to_string().contains("use recover_log=relay"), "{error}");
}

#[test]
fn pairs_that_never_speak_take_no_memory() {
    let node = Node::new("silent", 1000);
    let blocks = || rustix::fs::fstat(&node.file).unwrap().st_blocks;
    let mut all: Vec<NodeLogs> = (0..40).map(|process| node.begin(process, 1 << 30)).collect();
    send(&mut all[3], 8, b"first").unwrap();
    all.iter_mut().for_each(|logs| drop(receive(logs)));
    let before = blocks();
    all.iter_mut().for_each(|logs| drop(receive(logs)));
    send(&mut all[3], 8, b"second").unwrap();
    assert_eq!(blocks(), before);
    send(&mut all[3], 9, b"another pair").unwrap();
    assert!(blocks() <= before + 16, "a page of the log, and of control words");
}

#[test]
fn frames_that_were_taken_at_a_poll_that_was_not_noted_come_again() {
    let node = Node::new("unnoted", 2);
    let (mut zero, mut one) = (node.begin(0, 1 << 30), node.begin(1, 1 << 30));
    send(&mut one, 0, b"a").unwrap();
    receive(&mut zero);
    drop(zero);
    let mut zero = node.begin(0, 1 << 30);
    assert_eq!((zero.earlier().deliveries, receive(&mut zero)), (0, Some(b"a".to_vec())));
}

#[test]
fn another_frame_than_before_is_refused() {
    let node = Node::new("other", 2);
    let begin = || node.begin(0, 1 << 30);
    send(&mut begin(), 1, b"one").unwrap();
    let error = send(&mut begin(), 1, b"two").unwrap_err();
    let other = error.downcast::<OtherFrame>().unwrap();
    assert_eq!(other.was, [&frame(b"one")[..], b"one"].concat());
    assert_eq!(other.is, [&frame(b"two")[..], b"two"].concat());
    assert!(send(&mut begin(), 1, b"one longer").is_err());
    assert!(send(&mut begin(), 1, b"one").is_ok());
}

/// Both sides are closed and restored again and again, while the agent releases what both older
/// images cover: nothing is lost, and memory is used again.
#[test]
fn images_release_memory_and_hold_what_is_needed() {
    let node = Node::new("images", 2);
    let mut zero = node.begin(0, 8 << 20);
    let mut one = node.begin(1, 8 << 20);
    // The kept images of process 1, oldest first: its logs, what they cover, frames received.
    let mut images: VecDeque<(ClosedLogs, u64, u32)> = VecDeque::new();
    let payload = |number: u32| vec![number as u8; 1000 + number as usize % 5000];
    for number in 0..6000 {
        send(&mut zero, 1, &payload(number)).unwrap();
        assert_eq!(receive(&mut one).unwrap(), payload(number));
        one.note_delivery(1, 0);
        if number % 100 != 99 {
            continue;
        }
        let closed = one.close();
        let covered = node.report(1).pairs[&0].received;
        assert_eq!(covered, closed.readers[0].1.position());
        images.push_back((copy(&closed), covered, number + 1));
        if images.len() > 2 {
            images.pop_front();
            node.release(0, 1, images[0].1);
        }
        one = copy(&closed).open(node.file.as_fd()).unwrap();
        if number % 300 == 299 {
            drop(one);
            let (image, _, received) = &images[0];
            one = copy(image).open(node.file.as_fd()).unwrap();
            for again in *received..=number {
                assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
                assert_eq!(receive(&mut one).unwrap(), payload(again));
            }
            assert_eq!(one.next_delivery().unwrap(), None);
        }
    }
}

/// Process 0 sends a message to process 1, which delivers it.
pub(super) fn exchange(zero: &mut NodeLogs, one: &mut NodeLogs, number: u32) {
    send(zero, 1, &[number as u8; 1000]).unwrap();
    assert_eq!(receive(one).unwrap(), [number as u8; 1000]);
    one.note_delivery(1, 0);
}

fn mebibytes(node: &Node) -> i64 {
    mebibytes_of(&node.file)
}

pub(super) fn mebibytes_of(file: &OwnedFd) -> i64 {
    rustix::fs::fstat(file).unwrap().st_blocks / 2048
}

/// Where no image releases anything, logs are given up as far as they were read, and who needs them
/// is not started again.
#[test]
fn full_memory_costs_restarts_and_nothing_else() {
    let node = Node::new("bounded", 2);
    let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
    let mut noticed = None;
    for number in 0..40_000_u32 {
        exchange(&mut zero, &mut one, number);
        noticed = noticed.or(zero.take_discard_notice());
    }
    assert_eq!(noticed, Some(1));
    assert!(mebibytes(&node) < 8, "{} MiB", mebibytes(&node));
    drop((zero, one));
    for process in [0, 1] {
        let closed = ClosedLogs::new(process, node.job.as_bytes(), 2 << 20, 4).unwrap();
        let error = closed.open(node.file.as_fd()).map(drop).unwrap_err();
        assert!(error.to_string().contains("not kept any more"), "{process}: {error}");
    }
}

/// Deliveries without frames, as of a clock, are in no log: they alone fill the memory.
#[test]
fn deliveries_are_bounded_too_unless_the_agent_reads_them_at_any_time() {
    const DELIVERIES: u64 = 3_000_000;
    const DISK: u64 = 64 << 20;
    let taken = |cuts: u64, disk_taken: u64| {
        let node = Node::new(&format!("deliveries-{cuts}-{disk_taken}"), 2);
        node.write(CUT_AT, cuts);
        node.write(DISK_MAX_AT, DISK);
        node.write(DISK_TAKEN_AT, disk_taken);
        let mut zero = node.begin(0, 4 << 20);
        (0..DELIVERIES).for_each(|number| zero.note_delivery(1, number % 100 + 1));
        (mebibytes(&node), zero.take_discard_notice(), node)
    };
    // Deliveries are read, or logs go on on disk: all frames that an incarnation needs are there.
    for (cuts, disk_taken) in [(CUT_IS_OVER, DISK), (NO_CUTS, 0)] {
        let (all, noticed, node) = taken(cuts, disk_taken);
        assert_eq!((noticed, all > 8), (None, true), "{all} MiB");
        assert_eq!(zero_control(&node, IMAGES_WANTED_AT), 1, "images can shorten them");
        assert_eq!(node.refusal(0), None);
    }
    let (bounded, noticed, node) = taken(NO_CUTS, DISK);
    assert_eq!((noticed, bounded <= 5), (Some(0), true), "{bounded} MiB");
    let refusal = node.refusal(0).unwrap();
    assert!(refusal.contains("not kept any more"), "{refusal}");
}

/// An incarnation opens its logs while the agent writes what is released: more seems to be kept
/// than the ring holds, and what it has yet to replay lies in places of what is older.
#[test]
fn what_is_yet_to_be_replayed_is_not_given_back() {
    const DELIVERIES: u64 = 100_000;
    const BEGIN: u64 = (1 << 30) + (10 << 20);
    for is_still_written in [false, true] {
        let node = Node::new(&format!("yet-to-be-replayed-{is_still_written}"), 2);
        let released = control_at(0) + DELIVERIES_RELEASED_AT as u64;
        node.write_twice(released, BEGIN - (1 << 20));
        let mut image = ClosedLogs::new(0, node.job.as_bytes(), 4 << 20, 4).unwrap();
        image.deliveries.position = BEGIN;
        let mut zero = copy(&image).open(node.files()).unwrap();
        (0..DELIVERIES).for_each(|number| zero.note_delivery(1, number + 1));
        drop(zero);
        node.write(released, BEGIN - (2 << 20));
        let mut zero = image.open(node.files()).unwrap();
        assert_eq!(zero.next_delivery().unwrap(), Some([1, 0, 1]));
        if !is_still_written {
            node.write(released, BEGIN - (1 << 20));
        }
        zero.check_memory();
        for number in 1..DELIVERIES {
            assert_eq!(zero.next_delivery().unwrap(), Some([1, 0, number + 1]));
        }
        assert_eq!(zero.next_delivery().unwrap(), None);
        assert_eq!(zero.take_discard_notice(), is_still_written.then_some(0));
    }
}

/// Huge pages are not prepared, wherever an incarnation begins.
#[test]
fn an_incarnation_appends_behind_huge_pages_that_it_has_not_prepared() {
    let node = Node::new("huge", 2);
    node.write(HUGE_PAGES_AT, 1);
    let mut zero = node.begin(0, 1 << 30);
    for number in 0..3_000_u32 {
        send(&mut zero, 1, &[number as u8; 1000]).unwrap();
    }
    drop(zero);
    let (mut zero, mut one) = (node.begin(0, 1 << 30), node.begin(1, 1 << 30));
    for number in 0..9_000_u32 {
        send(&mut zero, 1, &[number as u8; 1000]).unwrap();
    }
    for number in 0..9_000_u32 {
        assert_eq!(receive(&mut one).unwrap(), [number as u8; 1000]);
    }
}

/// Memory that was needed because a reader was far behind is given back once it has caught up.
#[test]
fn who_is_far_behind_takes_memory_until_it_has_read_that() {
    let node = Node::new("behind", 2);
    let (mut zero, mut one) = (node.begin(0, 4 << 20), node.begin(1, 1 << 30));
    for number in 0..30_000_u32 {
        send(&mut zero, 1, &[number as u8; 1000]).unwrap();
    }
    assert!(mebibytes(&node) > 28, "{} MiB", mebibytes(&node));
    for number in 0..30_000_u32 {
        assert_eq!(receive(&mut one).unwrap(), [number as u8; 1000]);
    }
    for number in 0..6_000 {
        exchange(&mut zero, &mut one, number);
    }
    assert!(mebibytes(&node) < 10, "{} MiB", mebibytes(&node));
}

/// A log that begins when memory is full gets its part of it, from those that have more.
#[test]
fn a_log_that_begins_late_is_kept_as_well() {
    let node = Node::new("late", 3);
    let mut zero = node.begin(0, 8 << 20);
    let [mut one, mut two] = [1, 2].map(|process| node.begin(process, 1 << 30));
    for number in 0..20_000 {
        exchange(&mut zero, &mut one, number);
    }
    for number in 0..1_500_u32 {
        exchange(&mut zero, &mut one, number);
        send(&mut zero, 2, &[number as u8; 1000]).unwrap();
        assert_eq!(receive(&mut two).unwrap(), [number as u8; 1000]);
    }
    assert!(mebibytes(&node) < 16, "{} MiB", mebibytes(&node));
    drop(two);
    let mut two = node.begin(2, 1 << 30);
    for number in 0..1_500_u32 {
        assert_eq!(receive(&mut two).unwrap(), [number as u8; 1000]);
    }
}

/// Several logs that begin late are kept, although one that has most of the memory never goes on.
#[test]
fn a_log_that_does_nothing_leaves_its_memory_to_others() {
    let node = Node::new("idle", 5);
    let mut zero = node.begin(0, 32 << 20);
    let payload = [3; 16_000];
    let exchange_mebibytes = |zero: &mut NodeLogs, process: usize, mebibytes: usize| {
        let mut other = node.begin(process, 1 << 30);
        for _ in 0..mebibytes << 6 {
            send(zero, process, &payload).unwrap();
            assert_eq!(receive(&mut other).unwrap(), payload);
        }
    };
    exchange_mebibytes(&mut zero, 1, 34);
    exchange_mebibytes(&mut zero, 2, 8);
    exchange_mebibytes(&mut zero, 3, 5);
    exchange_mebibytes(&mut zero, 4, 3);
    assert!(mebibytes(&node) < 36, "{} MiB", mebibytes(&node));
    let mut four = node.begin(4, 1 << 30);
    for _ in 0..3 << 6 {
        assert_eq!(receive(&mut four).unwrap(), payload);
    }
}

/// Where no images are taken, a log that was discarded is of no use: then the memory that was read
/// last is used again, and not all of it in turn.
#[test]
fn without_images_what_was_read_last_is_used_again() {
    let node = Node::new("no-images", 2);
    node.write(NO_IMAGES_AT, 1);
    let (mut zero, mut one) = (node.begin(0, 16 << 20), node.begin(1, 1 << 30));
    for number in 0..40_000 {
        exchange(&mut zero, &mut one, number);
    }
    let closed = one.close();
    let kept = node.report(1).pairs[&0].received - node.read(discarded_at(0, 1));
    assert!(kept < 4 << 20, "{kept} bytes");
    let mut one = copy(&closed).open(node.file.as_fd()).unwrap();
    for number in 0..100 {
        exchange(&mut zero, &mut one, number);
    }
}

/// Full memory discards the oldest segment, and no more: it keeps most of what follows an image.
#[test]
fn an_image_that_was_taken_since_is_enough() {
    let node = Node::new("since", 2);
    let (mut zero, mut one) = (node.begin(0, 8 << 20), node.begin(1, 1 << 30));
    let mut image = None;
    for number in 0..20_000_u32 {
        exchange(&mut zero, &mut one, number);
        if number == 17_000 {
            let closed = one.close();
            one = copy(&closed).open(node.file.as_fd()).unwrap();
            image = Some(closed);
        }
    }
    drop(one);
    let mut one = copy(&image.unwrap()).open(node.file.as_fd()).unwrap();
    for number in 17_001..20_000_u32 {
        assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
        assert_eq!(receive(&mut one).unwrap(), [number as u8; 1000]);
    }
    assert_eq!(receive(&mut one), None);
}

#[test]
fn released_memory_is_given_back_before_anything_is_discarded() {
    let node = Node::new("given-back", 3);
    let mut zero = node.begin(0, 7 << 20);
    let [mut one, mut two] = [1, 2].map(|process| node.begin(process, 1 << 30));
    for number in 0..2000 {
        exchange(&mut zero, &mut one, number);
    }
    let closed = zero.close();
    node.release(0, 1, node.report(0).pairs[&1].sent);
    let mut zero = closed.elsewhere().open(node.file.as_fd()).unwrap();
    for number in 0..2000_u32 {
        send(&mut zero, 2, &[number as u8; 1000]).unwrap();
        assert_eq!(receive(&mut two).unwrap(), [number as u8; 1000]);
    }
    assert_eq!(zero.take_discard_notice(), None);
    assert!(mebibytes(&node) < 10, "{} MiB", mebibytes(&node));
}

/// Inside of a recovery unit a log is used again as soon as it was read.
#[test]
fn what_was_read_is_used_again_unless_images_are_taken() {
    let node = Node::new("unit-memory", 3);
    node.set_unit(&[0, 1]);
    let [mut zero, mut one, mut two] = [0, 1, 2].map(|process| node.begin(process, 1 << 30));
    for number in 0..40_000 {
        exchange(&mut zero, &mut one, number);
    }
    assert!(mebibytes(&node) < 4, "{} MiB", mebibytes(&node));
    node.write(UNIT_KEEPS_AT, 1);
    for number in 0..8_000 {
        exchange(&mut zero, &mut one, number);
    }
    let kept = mebibytes(&node);
    assert!(kept >= 8, "{kept} MiB");
    node.write(UNIT_KEEPS_AT, 0);
    for number in 0..40_000 {
        exchange(&mut zero, &mut one, number);
    }
    assert!(mebibytes(&node) < kept + 2, "{} MiB", mebibytes(&node));
    for _ in 0..8_000 {
        send(&mut zero, 2, &[2; 1000]).unwrap();
        assert_eq!(receive(&mut two).unwrap(), [2; 1000]);
    }
    assert!(mebibytes(&node) >= kept + 8, "process 2 begins again alone");
}

#[test]
fn a_unit_that_begins_again_produces_its_frames_once_more() {
    let node = Node::new("unit-again", 3);
    node.set_unit(&[0, 1]);
    let begin = |process| node.begin(process, 1 << 30);
    let (mut zero, mut one, mut two) = (begin(0), begin(1), begin(2));
    send(&mut zero, 1, b"question").unwrap();
    assert_eq!(receive(&mut one).unwrap(), b"question");
    one.note_delivery(1, 0);
    send(&mut one, 0, b"answer").unwrap();
    send(&mut one, 2, b"to the outside").unwrap();
    assert_eq!(receive(&mut two).unwrap(), b"to the outside");
    drop((zero, one));
    node.roll_back(&[0, 1]);
    let (mut zero, mut one) = (begin(0), begin(1));
    assert_eq!([zero.earlier().sent, one.earlier().sent], [1, 2]);
    assert!(is_behind(&zero) && is_behind(&one));
    assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
    assert_eq!(receive(&mut one), None, "it is to be sent again first");
    // What nobody outside has seen may be another one.
    send(&mut zero, 1, b"other question").unwrap();
    assert!(!is_behind(&zero));
    assert_eq!(receive(&mut one).unwrap(), b"other question");
    send(&mut one, 0, b"answer").unwrap();
    assert!(is_behind(&one));
    let error = send(&mut one, 2, b"another").unwrap_err();
    assert!(error.to_string().contains("is not what it sent there before"), "{error}");
    send(&mut one, 2, b"to the outside").unwrap();
    assert!(!is_behind(&one));
    assert_eq!(receive(&mut zero).unwrap(), b"answer");
    assert_eq!(receive(&mut two), None);
    send(&mut one, 0, b"more").unwrap();
    assert_eq!(receive(&mut zero).unwrap(), b"more");
}

/// A reader that begins again before anything was given up gets everything, however full it is.
#[test]
fn what_an_incarnation_reads_is_not_discarded() {
    let node = Node::new("reads", 2);
    let (mut zero, mut one) = (node.begin(0, 4 << 20), node.begin(1, 1 << 30));
    let payload = |number: u32| vec![number as u8; 1000];
    for number in 0..3000 {
        exchange(&mut zero, &mut one, number);
    }
    drop(one);
    let mut one = node.begin(1, 1 << 30);
    for number in 3000..9000 {
        send(&mut zero, 1, &payload(number)).unwrap();
    }
    assert_eq!(zero.take_discard_notice(), None);
    for number in 0..9000 {
        if number < 3000 {
            assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
        }
        assert_eq!(receive(&mut one).unwrap(), payload(number));
    }
}

#[test]
fn images_are_asked_for_before_memory_is_full() {
    let node = Node::new("asks", 3);
    let mut zero = node.begin(0, 8 << 20);
    let wanted = || zero_control(&node, IMAGES_WANTED_AT);
    send(&mut zero, 1, b"little").unwrap();
    assert_eq!(wanted(), 0);
    // A disk helps none whose logs have no part of its file.
    node.write(DISK_MAX_AT, 1000);
    for _ in 0..2500 {
        send(&mut zero, 2, &[1; 2000]).unwrap();
    }
    assert_eq!(wanted(), 4);
    // Logs can go on on disk as long as there is much room.
    let mut node = Node::new("asks-with-disk", 3);
    let disk = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&disk, 8 * LOG_BYTES as u64).unwrap();
    node.disk = Some(disk);
    let mut zero = node.begin(0, 8 << 20);
    let wanted = || zero_control(&node, IMAGES_WANTED_AT);
    node.write(DISK_MAX_AT, 1000);
    for (disk_taken, expected) in [(499, 0), (500, 4)] {
        node.write(DISK_TAKEN_AT, disk_taken);
        for _ in 0..2500 {
            send(&mut zero, 2, &[1; 2000]).unwrap();
        }
        assert_eq!(wanted(), expected, "of process 2 as well, {disk_taken} bytes on disk");
    }
}

/// The log to process 1 has had more memory than that to process 2, and nobody needs what it has.
#[test]
fn images_are_asked_for_of_who_reads_what_is_not_released() {
    let node = Node::new("needs", 3);
    let mut zero = node.begin(0, 8 << 20);
    let wanted = || zero_control(&node, IMAGES_WANTED_AT);
    for _ in 0..3700 {
        send(&mut zero, 1, &[1; 2000]).unwrap();
    }
    assert_eq!(wanted(), 3, "of process 1 as well");
    node.release(0, 1, 3700 * 2000);
    node.write(control_at(0) + IMAGES_WANTED_AT as u64, 0);
    for _ in 0..3000 {
        send(&mut zero, 2, &[2; 2000]).unwrap();
    }
    assert_eq!(wanted(), 4, "of process 2 as well");
}

/// A control word of process 0.
fn zero_control(node: &Node, at: usize) -> u64 {
    let mut word = [0; 8];
    rustix::io::pread(&node.file, &mut word, control_at(0) + at as u64).unwrap();
    u64::from_ne_bytes(word)
}

#[test]
fn who_sleeps_is_woken() {
    let node = Node::new("bell", 2);
    let (mut zero, mut one) = (node.begin(0, 1 << 30), node.begin(1, 1 << 30));
    let rings = |logs: &NodeLogs| {
        let fd = logs.fd();
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 1
    };
    send(&mut zero, 1, b"nobody sleeps").unwrap();
    assert!(!rings(&one) && !one.prepare_park(), "a frame waits");
    receive(&mut one);
    assert!(one.prepare_park());
    send(&mut zero, 1, b"wake").unwrap();
    assert!(rings(&one));
    one.unpark();
    one.drain_doorbell();
    assert!(!rings(&one) && receive(&mut one).is_some());
    // A child of the process has the socket still.
    let held = one.fd().try_clone_to_owned().unwrap();
    drop(one);
    let mut one = node.begin(1, 1 << 30);
    assert!(receive(&mut one).is_some() && receive(&mut one).is_some() && one.prepare_park());
    send(&mut zero, 1, b"wake again").unwrap();
    assert!(rings(&one));
    drop(held);
}
