//! Message logs beyond their memory bound: the test decides when the disk writes and reads.

use landbridge_testbed::relay::Disk;

use super::recovery::recovering_within;
use super::*;

const SEGMENT: usize = 40 << 10;
/// More memory than segments that are not full may take in any case.
const MEMORY: u64 = 1 << 20;
const LENGTH: usize = 10_000;
const FRAME: usize = HEADER_BYTES + LENGTH;
/// Bytes of the digest that the log of the sender keeps for each sent frame.
const SENT: usize = 12;
/// Bytes of a frame and its digest.
const KEPT: usize = FRAME + SENT;

/// A relay with endpoints 0 and 1, of which 0 sends and 1 reads, and its disk.
struct Rig {
    relay: Relay,
    zero: LinkId,
    one: LinkId,
    sent: u64,
    disk: Disk,
}

impl Rig {
    fn new(disk: Option<u64>) -> Self {
        Self::with(LogLimits { memory: MEMORY, disk, segment: SEGMENT })
    }

    fn with(room: LogLimits) -> Self {
        let (relay, [zero, one]) = recovering_within(room);
        Self { relay, zero, one, sent: 0, disk: Disk::default() }
    }

    /// Sends one more frame to endpoint 1.
    fn send(&mut self) -> Stop {
        let stop =
            feed(&mut self.relay, self.zero, frame(rank(0), rank(1), self.sent * 10_000, LENGTH));
        self.sent += (stop == Stop::Partial) as u64;
        let _ = written(&mut self.relay, self.one);
        stop
    }

    /// Sends `count` frames to endpoint 1, while the disk serves all requests.
    fn send_many(&mut self, count: u64) {
        for _ in 0..count {
            assert_eq!(self.send(), Stop::Partial);
            while self.work(true) {}
        }
    }

    /// Serves the next disk request. Returns false if there is none.
    fn work(&mut self, is_well: bool) -> bool {
        self.disk.collect(&mut self.relay);
        self.disk.serve(&mut self.relay, 0, is_well).unwrap().is_some()
    }

    /// Endpoint 1 is killed, and its next incarnation attaches.
    fn kill(&mut self, start: u32) -> Result<(), &'static str> {
        self.relay.suspend(self.one);
        self.one = self.relay.attach(rank(1), start)?;
        Ok(())
    }

    /// Replays to endpoint 1 and returns the number of frames, which must equal the original ones.
    /// The disk works only when nothing else can be done.
    fn replayed(&mut self, is_well: bool) -> u64 {
        let (mut count, mut idle) = (0, 0);
        loop {
            idle += 1;
            assert!(idle < 100_000, "it never ends");
            let bytes = write_all(&mut self.relay, self.one);
            for (_, now) in frames(&bytes).filter(|(header, _)| header.kind == Kind::Ack) {
                let mut expected = frame(rank(0), rank(1), count * 10_000, LENGTH);
                expected[6] = 1;
                assert!(now == expected, "frame {count}");
                count += 1;
            }
            let has_replayed = self.relay.recovery().has_replay_work() && self.relay.replay_next();
            if bytes.is_empty() && !has_replayed && !self.work(is_well) {
                return count;
            }
        }
    }
}

#[test]
fn what_there_is_no_memory_for_goes_to_the_disk_and_is_replayed_from_there() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.send_many(1_000);
    let (memory, disk) = rig.relay.recovery().kept_bytes();
    assert!(memory <= MEMORY && disk > 8 << 20 && disk == rig.disk.bytes(), "{memory} {disk}");
    assert_eq!(memory + disk, 1_000 * KEPT as u64);
    assert_eq!(rig.relay.counters().disk_waits, 0);
    for start in 1..4 {
        rig.kill(start).unwrap();
        if start == 2 {
            // The incarnation is killed during its replay; the segment that was being read arrives
            // after the next incarnation has attached.
            let _ = written(&mut rig.relay, rig.one);
            rig.relay.replay_next();
            continue;
        }
        assert_eq!(rig.replayed(true), 1_000);
        let read = rig.relay.counters().read_back_bytes;
        assert!(read >= disk, "{read} of {disk}");
        let held = rig.relay.recovery().kept_bytes().0;
        assert!(held <= MEMORY, "{held}");
    }
    // The last incarnation continues with new frames.
    rig.send_many(100);
    rig.kill(5).unwrap();
    assert_eq!(rig.replayed(true), 1_100);
}

#[test]
fn what_little_memory_holds_never_goes_to_the_disk() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.send_many(MEMORY / 2 / KEPT as u64);
    assert_eq!(rig.relay.recovery().kept_bytes(), (rig.sent * KEPT as u64, 0));
}

#[test]
fn inputs_wait_for_a_slow_disk_and_for_nothing_else() {
    let mut rig = Rig::new(Some(1 << 30));
    while rig.send() == Stop::Partial {}
    let (memory, _) = rig.relay.recovery().kept_bytes();
    assert!((MEMORY - 2 * FRAME as u64..=MEMORY).contains(&memory), "{memory}");
    assert!(rig.relay.recovery().waits_for_disk() && rig.relay.poll_resume().is_none());
    // Frames that need no log space pass, and so do the last frames of a killed endpoint.
    let zero = rig.zero;
    rig.relay.begin_drain(zero);
    assert_eq!(rig.send(), Stop::Partial);
    rig.relay.suspend(zero);
    rig.zero = rig.relay.attach(rank(0), 1).unwrap();
    written(&mut rig.relay, rig.zero);
    for sequence in 0..rig.sent {
        // The next incarnation sends its earlier frames again.
        feed(&mut rig.relay, rig.zero, frame(rank(0), rank(1), sequence * 10_000, LENGTH));
    }
    assert_eq!(rig.send(), Stop::Full);
    while rig.relay.poll_resume().is_none() {
        assert!(rig.work(true), "it waits although nothing is under way");
    }
    assert_eq!(rig.send(), Stop::Partial);
    assert!(rig.relay.counters().disk_waits >= 2);
    // An endpoint that has detached waits for nothing.
    while rig.send() == Stop::Partial {}
    rig.relay.detach(rig.zero);
    assert!(!rig.relay.recovery().waits_for_disk());
}

#[test]
fn a_disk_that_fails_is_used_no_more_and_what_is_on_it_is_still_replayed() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.send_many(300);
    let on_disk = rig.relay.recovery().kept_bytes().1;
    assert!(on_disk > 0);
    while rig.disk.requests.is_empty() {
        rig.send();
        rig.disk.collect(&mut rig.relay);
    }
    assert!(rig.work(false));
    let before = rig.sent;
    rig.kill(1).unwrap();
    assert_eq!(rig.replayed(true), before, "in memory and on the disk");
    // The log can only grow in memory now: beyond the bound the endpoint cannot be restarted, and
    // continues to run.
    while rig.relay.recovery_mut().poll_log_event().is_none() {
        assert_eq!(rig.send(), Stop::Partial);
        rig.disk.collect(&mut rig.relay);
        assert!(!rig.disk.requests.iter().any(|order| matches!(order, DiskRequest::Write(..))));
    }
    let (digests, disk) = rig.relay.recovery().kept_bytes();
    assert!(digests <= SENT as u64 * rig.sent && disk == 0, "{digests} {disk}");
    while rig.work(true) {}
    assert!(rig.disk.is_empty(), "nothing is kept that nobody needs");
    assert_eq!(rig.send(), Stop::Partial);
    assert!(rig.kill(2).unwrap_err().contains("cannot be restarted"));
}

#[test]
fn a_disk_that_is_full_is_reported_once_and_what_comes_stays_in_memory() {
    let mut rig = Rig::new(Some(4 << 20));
    while rig.relay.recovery().kept_bytes().1 < (4 << 20) - SEGMENT as u64 {
        rig.send_many(1);
    }
    while rig.relay.recovery_mut().poll_log_event() != Some(LogEvent::DiskFull) {
        rig.send_many(1);
    }
    let before = rig.sent;
    rig.kill(1).unwrap();
    assert_eq!(rig.replayed(true), before);
    let why = loop {
        rig.send_many(1);
        if let Some(remark) = rig.relay.recovery_mut().poll_log_event() {
            break remark;
        }
    };
    assert!(matches!(why, LogEvent::Unrecoverable(who, _) if who == rank(1)), "{why:?}");
    while rig.work(true) {}
    assert!(rig.relay.recovery().kept_bytes().0 <= SENT as u64 * rig.sent && rig.disk.bytes() == 0);
}

#[test]
fn what_cannot_be_read_back_is_replayed_to_nobody_and_its_endpoint_hears_why() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.send_many(1_000);
    rig.kill(1).unwrap();
    let replayed = rig.replayed(false);
    assert!(replayed < 100, "{replayed} frames were in memory in front of the first segment");
    let (link, why) = rig.relay.recovery_mut().poll_failed_replay().unwrap();
    assert!(link == rig.one && why.contains("came back corrupt"), "{why}");
    let event = rig.relay.recovery_mut().poll_log_event();
    assert!(matches!(event, Some(LogEvent::Unrecoverable(who, _)) if who == rank(1)));
    assert!(rig.kill(2).unwrap_err().contains("came back corrupt"));
}

#[test]
fn one_that_is_far_behind_goes_on_when_the_disk_cannot_be_read_and_is_sent_that_again() {
    let mut rig = Rig::new(Some(1 << 30));
    // Endpoint 1 takes no frames for a long time.
    for n in 0..1_000 {
        let frame = frame(rank(0), rank(1), n * 10_000, LENGTH);
        assert_eq!(feed(&mut rig.relay, rig.zero, frame), Stop::Partial);
        while rig.work(true) {}
    }
    assert!(rig.disk.bytes() > MEMORY);
    let replayed = rig.replayed(false);
    assert!((1..1_000).contains(&replayed), "{replayed}");
    assert!(rig.relay.recovery_mut().poll_failed_replay().is_none(), "it is still there");
    let event = rig.relay.recovery_mut().poll_log_event();
    assert!(matches!(event, Some(LogEvent::Unrecoverable(who, _)) if who == rank(1)));
    let lost = (Kind::Lost, pair_check(rank(1), rank(0)), 0);
    assert_eq!(written(&mut rig.relay, rig.zero), [lost], "who has sent it asks after it");
    for n in replayed..1_000 {
        feed(&mut rig.relay, rig.zero, frame(rank(0), rank(1), n * 10_000, LENGTH));
        assert_eq!(written(&mut rig.relay, rig.one), [(Kind::Ack, n * 10_000, 0)]);
    }
    assert!(rig.kill(1).unwrap_err().contains("came back corrupt"));
}

#[test]
fn what_is_kept_can_be_looked_at_wherever_it_lies() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.send_many(500);
    for (polls, frames, micros) in [(7, 1, 0), (3, 0, 50), (2, 20, 1)] {
        feed(&mut rig.relay, rig.one, determinant(rank(1), polls, frames, micros));
    }
    let all: Vec<LogStatus> = rig.relay.recovery().log_statuses(rank(0)).collect();
    let [zero, one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((zero.frames, zero.sent, zero.determinants, zero.disk_bytes), (0, 500, 0, 0));
    assert_eq!((one.frames, one.bytes, one.sent), (500, 500 * FRAME as u64, 0));
    assert_eq!(
        (one.determinants, one.delivered_frames, one.polls, one.is_replaying),
        (3, 21, 12, false)
    );
    assert_eq!(one.disk_bytes, rig.disk.bytes());
    assert_eq!(rig.relay.recovery().log_statuses(rank(1)).count(), 1);

    let shown = rig.relay.recovery().log_excerpt(rank(1), 0, 2).unwrap();
    let first = DeterminantStatus { number: 0, polls: 7, micros: 0, frames: 1, first_frame: 0 };
    let second = DeterminantStatus { number: 1, polls: 10, micros: 50, frames: 0, first_frame: 1 };
    assert_eq!(shown.determinants, [first, second]);
    // The first segments do not have the full size, and stay in memory.
    assert!(matches!(shown.frames[..], [ShownFrame::Frame(0, header)] if header.sequence == 0));
    let shown = rig.relay.recovery().log_excerpt(rank(1), 2, 9).unwrap();
    let third = DeterminantStatus { number: 2, polls: 12, micros: 51, frames: 20, first_frame: 1 };
    assert_eq!(shown.determinants, [third]);
    let mut next = 1;
    for shown in &shown.frames {
        match shown {
            ShownFrame::Frame(number, header) => {
                assert_eq!((*number, header.sequence), (next, next * 10_000));
                next += 1;
            }
            ShownFrame::OnDisk(range) => {
                assert_eq!(range.start, next);
                next = range.end;
            }
        }
    }
    assert_eq!(next, 21, "{shown:?}");
    assert!(shown.frames.iter().any(|it| matches!(it, ShownFrame::OnDisk(_))));
    // Frames that no incarnation has delivered yet.
    let waiting = rig.relay.recovery().log_excerpt(rank(1), 3, 5).unwrap();
    assert!(waiting.determinants.is_empty() && waiting.frames.len() <= 5);
    assert_eq!(rig.relay.recovery().log_excerpt(rank(3), 0, 1), None);
}

#[test]
fn of_whom_much_was_given_since_its_last_image_is_said_once_for_each_image() {
    let mut rig = Rig::new(Some(1 << 30));
    rig.relay.recovery_mut().set_checkpoint_log_bytes(500_000);
    rig.send_many(40);
    assert_eq!(rig.relay.recovery_mut().poll_log_event(), None);
    rig.send_many(100);
    let events: Vec<LogEvent> =
        std::iter::from_fn(|| rig.relay.recovery_mut().poll_log_event()).collect();
    assert_eq!(events, [LogEvent::CheckpointDue(rank(1))]);
    feed(&mut rig.relay, rig.one, determinant(rank(1), 7, 140, 0));
    rig.relay.suspend(rig.one);
    let standing = LogPosition { determinants: 1, taken: 140 * FRAME as u64, sent: 0, kept: 0 };
    rig.one = rig.relay.attach_at(rank(1), 0, standing).unwrap();
    rig.send_many(40);
    assert_eq!(rig.relay.recovery_mut().poll_log_event(), None);
    rig.send_many(30);
    assert_eq!(rig.relay.recovery_mut().poll_log_event(), Some(LogEvent::CheckpointDue(rank(1))));
}

#[test]
fn memory_that_is_not_needed_any_more_is_for_the_one_that_stocks_it() {
    const COUNT: u64 = 400;
    let full = (COUNT as usize * FRAME / SEGMENT) as u64;
    let memory = 2 * full * SEGMENT as u64;
    let mut rig = Rig::with(LogLimits { memory, disk: None, segment: SEGMENT });
    rig.send_many(COUNT);
    assert!(rig.relay.recovery_mut().poll_surplus_buffer().is_none(), "all of it is needed");
    let kept = rig.relay.recovery().kept_bytes().0;
    assert!(rig.relay.recovery().unused_bytes() <= memory - kept);
    feed(&mut rig.relay, rig.one, determinant(rank(1), 1, COUNT as u32, 0));
    let taken = COUNT * FRAME as u64;
    let standing = LogPosition { determinants: 1, taken, sent: 0, kept: 1 };
    rig.relay.suspend(rig.one);
    rig.one = rig.relay.attach_at(rank(1), 0, standing).unwrap();
    let surplus: Vec<_> =
        std::iter::from_fn(|| rig.relay.recovery_mut().poll_surplus_buffer()).collect();
    assert!(surplus.iter().all(|it| it.is_empty() && it.capacity() >= SEGMENT));
    assert!(surplus.len() as u64 + 40 > full, "{} of {full}", surplus.len());
    assert!(rig.relay.recovery().unused_bytes() + (40 * SEGMENT) as u64 > memory);
}

#[test]
fn one_that_is_far_behind_hears_everything_though_the_disk_is_full_and_so_is_the_memory() {
    let mut rig = Rig::new(Some(4 << 20));
    let mut sent = 0;
    // Frames are sent until the relay moves the backlog in memory into the queue of endpoint 1.
    while rig.relay.queued_bytes() == 0 {
        assert!(sent < 2_000);
        while rig.work(true) {}
        let frame = frame(rank(0), rank(1), sent * 10_000, LENGTH);
        assert_eq!(feed(&mut rig.relay, rig.zero, frame), Stop::Partial);
        sent += 1;
    }
    let (memory, disk) = rig.relay.recovery().kept_bytes();
    assert!(memory + FRAME as u64 > MEMORY && disk > 3 << 20, "{memory} {disk}");
    assert_eq!(rig.replayed(true), sent);
}
