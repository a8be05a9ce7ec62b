//! Tests of the record: incarnations replay the record from its beginning and from checkpoint
//! images while the ring of entries is reused many times.

use std::format;
use std::vec;

use super::*;

const MONOTONIC: Clock = Clock::of(1).unwrap();
const CPU: Clock = Clock::of(2).unwrap();
const REAL: Clock = Clock::of(0).unwrap();

fn never() -> i64 {
    panic!("it is on record")
}

fn draw(into: &mut [u8]) -> i64 {
    into.fill(7);
    into.len() as i64
}

#[test]
fn a_new_incarnation_replays_the_record_and_then_reads_the_system() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 400]);
    assert!(head.begin(1, 100));
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let times = [i64::MAX, 5, 5, i64::MIN, -3, 1_700_000_000_000_000_000];
    for time in times {
        assert_eq!(record.clock(REAL, || time), Ok(time));
    }
    let mut drawn = [0; 24];
    assert_eq!(record.bytes(RandomSource::Random, &mut drawn, draw), Ok(24));
    assert_eq!(record.bytes(RandomSource::Random, &mut drawn, |_| -11), Ok(-11));
    assert_eq!(record.clock(Clock::TIME, || 3), Ok(3));
    for start in 2..4 {
        assert!(head.begin(start, 100 + start));
        assert!(!head.begin(start, 0), "another program of the same process");
        assert!(!head.begin(start - 1, 0), "a child, which has an earlier incarnation's number");
        assert_eq!(head.owner.load(Relaxed), 100 + start);
        for time in times {
            assert_eq!(record.clock(REAL, never), Ok(time));
        }
        let mut again = [0; 24];
        assert_eq!(record.bytes(RandomSource::Random, &mut again, |_| never()), Ok(24));
        assert_eq!(again, [7; 24]);
        assert_eq!(record.bytes(RandomSource::Random, &mut again, |_| never()), Ok(-11));
        assert_eq!(record.clock(Clock::TIME, never), Ok(3));
    }
    assert_eq!(record.clock(REAL, || 9), Ok(9), "it has come to where the first one was");
    head.begin(4, 0);
    times.iter().for_each(|time| assert_eq!(record.clock(REAL, never), Ok(*time)));
}

#[test]
fn a_read_that_is_never_continued_leaves_the_process_live() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 400]);
    head.begin(1, 7);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    record.clock(REAL, || 5).unwrap();
    // The signal came when the entry was recorded, and not consumed yet.
    head.recorded.store(head.recorded.load(Relaxed) + 2, Relaxed);
    assert!(head.is_replaying());
    head.skip_interrupted_read();
    record.refresh();
    assert!(!head.is_replaying());
    assert_eq!(record.clock(REAL, || 9), Ok(9));
}

#[test]
fn a_read_of_which_not_all_is_on_record_is_answered_by_nobody() {
    let (head, mut entries) = (RecordHead::default(), vec![0; 400]);
    head.begin(1, 7);
    let mut record = NondeterminismRecord::new(&head, &mut entries);
    let mut drawn = [0; 40];
    record.clock(REAL, || 1_700_000_000_000_000_000).unwrap();
    let first = head.position().consumed();
    record.bytes(RandomSource::Random, &mut drawn, draw).unwrap();
    let second = head.position().consumed();
    let kept = record.entries.to_vec();
    // A copy on another node may end at any byte `known` of the record; zeros follow there, or the
    // entries of an earlier lap.
    for (known, rest) in (1..=second).flat_map(|known| [(known, 0), (known, 1)]) {
        let mut entries = vec![rest; 400];
        entries[..known as usize].copy_from_slice(&kept[..known as usize]);
        head.recorded.store(known, Relaxed);
        assert!(head.begin(2 * known + u64::from(rest), 7));
        let mut record = NondeterminismRecord::new(&head, &mut entries);
        let time = record.clock(REAL, never);
        if known < first {
            assert!(
                matches!(time, Err(RecordError::Diverged { read: 1, .. })),
                "{known}: {time:?}"
            );
            assert_eq!(head.position().consumed(), 0, "nothing was replayed");
            continue;
        }
        assert_eq!(time, Ok(1_700_000_000_000_000_000));
        let mut again = [9; 40];
        let outcome = record.bytes(RandomSource::Random, &mut again, draw);
        if known == first || known == second {
            assert_eq!((outcome, again), (Ok(40), [7; 40]), "{known}");
            continue;
        }
        let Err(RecordError::Diverged { read: 2, before, .. }) = outcome else {
            panic!("{known}: {outcome:?}")
        };
        assert!(known < second - 40 || before == ReadRequest::Truncated, "{known}: {before}");
        assert_eq!((again, head.position().consumed()), ([9; 40], first), "nothing was replayed");
    }
}

#[test]
fn an_image_goes_on_where_it_was_taken() {
    let (head, mut entries) = (RecordHead::default(), vec![0; 1000]);
    assert!(head.begin(1, 7));
    let clock = Clock::of(1).unwrap();
    let mut first = NondeterminismRecord::new(&head, &mut entries);
    first.clock(clock, || 100).unwrap();
    let place = head.position();
    assert_eq!(first.clock(clock, || 250).unwrap(), 250);
    head.polls.present.store(9, Relaxed);
    assert!(!head.resume(1, 7, &place), "it has the record");
    assert!(head.resume(2, 8, &place));
    assert_eq!((head.position(), head.is_of(2)), (place.clone(), true));
    let mut again = NondeterminismRecord::new(&head, &mut entries);
    assert_eq!(again.clock(clock, never).unwrap(), 250);
    // The clock of the restored process starts at 3, below the last recorded value of 250.
    assert_eq!(again.clock(clock, || 3).unwrap(), 250);
    assert_eq!(again.clock(clock, || 5).unwrap(), 252);
    let beyond = RecordPosition { consumed: 1000, ..place };
    assert!(!head.resume(3, 9, &beyond) && head.is_of(2));
}

#[test]
fn who_reads_something_else_gets_nothing() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 200]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    record.clock(REAL, || 1).unwrap();
    record.clock(MONOTONIC, || 2).unwrap();
    record.bytes(RandomSource::Entropy, &mut [0; 9], draw).unwrap();
    head.begin(2, 0);
    record.clock(REAL, never).unwrap();
    let now = ReadRequest::Bytes(RandomSource::Random, 4);
    let before = ReadRequest::Clock(MONOTONIC);
    let problem = record.bytes(RandomSource::Random, &mut [0; 4], |_| never()).unwrap_err();
    assert_eq!(problem, RecordError::Diverged { read: 2, now, before });
    let text = "its read 2 of clocks and random numbers is getrandom of 4 bytes, and was \
                clock_gettime of CLOCK_MONOTONIC";
    assert_eq!(format!("{problem}"), text);
    record.clock(MONOTONIC, never).unwrap();
    let other = record.bytes(RandomSource::Entropy, &mut [0; 8], |_| never()).unwrap_err();
    assert!(
        format!("{other}").ends_with("is getentropy of 8 bytes, and was getentropy of 9 bytes")
    );
}

#[test]
fn what_was_not_whole_when_it_was_killed_was_replayed_to_nobody() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 200]);
    head.begin(1, 0);
    NondeterminismRecord::new(&head, &mut bytes).clock(REAL, || 1 << 40).unwrap();
    let recorded = head.recorded.load(Relaxed);
    NondeterminismRecord::new(&head, &mut bytes)
        .bytes(RandomSource::Random, &mut [0; 50], draw)
        .unwrap();
    head.recorded.store(recorded, Relaxed);
    head.begin(2, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    record.clock(REAL, never).unwrap();
    assert_eq!(record.clock(CPU, || 77), Ok(77));
}

#[test]
fn bytes_that_are_no_entry_are_replayed_to_nobody() {
    for first in 0..=255 {
        let (head, mut bytes) = (RecordHead::default(), vec![first; 30]);
        head.begin(1, 0);
        head.recorded.store(30, Relaxed);
        let mut record = NondeterminismRecord::new(&head, &mut bytes);
        let is_replayed = record.clock(REAL, never).is_ok();
        assert_eq!(is_replayed, first == 0, "{first}");
        assert!(record.bytes(RandomSource::Arc4, &mut [0; 900], |_| never()).is_err());
    }
}

#[test]
fn clocks_of_the_process_go_on_where_they_were() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 200]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    record.clock(CPU, || 1000).unwrap();
    record.clock(REAL, || 1000).unwrap();
    head.begin(2, 0);
    record.clock(CPU, never).unwrap();
    record.clock(REAL, never).unwrap();
    assert_eq!(record.clock(CPU, || 40), Ok(1000));
    assert_eq!(record.clock(CPU, || 45), Ok(1005));
    assert_eq!(record.clock(REAL, || 40), Ok(40), "somebody has put it back");
}

#[test]
fn without_room_the_truth_is_read_and_the_record_is_at_its_end() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 64]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    assert_eq!(record.bytes(RandomSource::Random, &mut [0; 90], draw), Err(RecordError::Full(90)));
    assert!(record.is_full());
    let (head, mut bytes) = (RecordHead::default(), vec![0; 64]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let replayed = (0..).find(|&n| record.clock(MONOTONIC, || 60 * n) != Ok(60 * n)).unwrap();
    assert_eq!(record.clock(MONOTONIC, || 5000), Err(RecordError::Full(5000)));
    assert!((25..=30).contains(&replayed), "two bytes each: {replayed}");
}

/// Clock reads and random reads of all sizes, some of which do not fit before the end of the ring.
fn read_much(
    record: &mut NondeterminismRecord,
    from: u64,
    count: u64,
) -> vec::Vec<(i64, vec::Vec<u8>)> {
    let one = |record: &mut NondeterminismRecord, number: u64| {
        let time = record.clock(REAL, || number.pow(3) as i64).unwrap();
        let mut drawn = vec![0; number as usize % 37];
        let fresh = |into: &mut [u8]| {
            into.fill(number as u8);
            into.len() as i64
        };
        record.bytes(RandomSource::Random, &mut drawn, fresh).unwrap();
        (time, drawn)
    };
    (from..from + count).map(|number| one(record, number)).collect()
}

#[test]
fn room_is_used_again_behind_the_oldest_image_and_no_sooner() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 700]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let (mut place, mut replayed) = (head.position(), vec![]);
    for round in 0..200 {
        // Two checkpoint images exist: `base` stands at the older one, and both must replay
        // everything after their positions.
        let before = core::mem::replace(&mut place, head.position());
        head.base.store(before.consumed, Relaxed);
        let last = core::mem::replace(&mut replayed, read_much(&mut record, round * 7, 7));
        assert!(!record.is_full(), "{round}");
        let start = 2 * round + 2;
        for (number, place) in [(start, &before), (start + 1, &place)] {
            assert!(head.resume(number, 0, place));
            let mut again = NondeterminismRecord::new(&head, record.entries);
            if number == start && round > 0 {
                assert!(read_much(&mut again, round * 7 - 7, 7) == last, "{round}");
            }
            assert!(read_much(&mut again, round * 7, 7) == replayed, "{round}");
        }
    }
    assert!(head.recorded.load(Relaxed) > 20 * 700);
    let gone = RecordPosition { consumed: 5, ..place };
    assert!(!head.resume(1_000, 0, &gone), "nobody goes on from there");
    while !record.is_full() {
        let _ = record.clock(REAL, || 1 << 60);
        let _ = record.clock(REAL, || 1);
    }
    let kept = head.recorded.load(Relaxed) - head.base.load(Relaxed);
    assert!((650..=700).contains(&kept), "{kept}");
}

#[test]
fn nothing_is_reported_that_has_stood_where_there_is_something_else_now() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 700]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    read_much(&mut record, 0, 9);
    let place = head.position();
    read_much(&mut record, 9, 2);
    head.base.store(place.consumed, Relaxed);
    // This incarnation starts at the beginning of the program.
    assert!(head.begin(2, 0));
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let (now, before) = (ReadRequest::Clock(REAL), ReadRequest::Unknown);
    let other = |now| RecordError::Diverged { read: 1, now, before };
    assert_eq!(record.clock(REAL, never), Err(other(now)));
    let now = ReadRequest::Bytes(RandomSource::Random, 1);
    assert_eq!(record.bytes(RandomSource::Random, &mut [0], |_| never()), Err(other(now)));
    assert!(head.resume(3, 0, &place));
    assert_eq!(read_much(&mut record, 9, 2).len(), 2);
}

#[test]
fn an_entry_that_ends_where_the_room_does_is_followed_by_one_at_its_beginning() {
    // The longest entry of a clock takes eleven bytes.
    const LONG: u64 = 11;
    let (head, mut bytes) = (RecordHead::default(), vec![0; 6 * LONG as usize]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let time = |number: u64| if number.is_multiple_of(2) { i64::MIN } else { 0 };
    let mut places = vec![];
    for number in 0..7 {
        places.push(head.position());
        if number == 6 {
            assert_eq!(
                record.clock(REAL, || 5),
                Err(RecordError::Full(5)),
                "the first is still needed"
            );
            head.is_full.store(0, Relaxed);
            head.base.store(places[1].consumed, Relaxed);
        }
        assert_eq!(record.clock(REAL, || time(number)), Ok(time(number)));
        assert_eq!(head.extent().end, (number + 1) * LONG);
    }
    assert!(head.resume(2, 0, &places[1]) && !head.resume(3, 0, &places[0]));
    (1..7).for_each(|number| assert_eq!(record.clock(REAL, never), Ok(time(number))));
}

#[test]
fn an_entry_for_which_there_is_room_only_at_both_ends_has_none() {
    // An entry of twenty random bytes takes 23 bytes, and its reservation 41.
    let (head, mut bytes) = (RecordHead::default(), vec![0; 64]);
    head.begin(1, 0);
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    let read =
        |record: &mut NondeterminismRecord| record.bytes(RandomSource::Random, &mut [0; 20], draw);
    assert_eq!((read(&mut record), read(&mut record)), (Ok(20), Ok(20)));
    for base in [0, 23] {
        head.is_full.store(0, Relaxed);
        head.base.store(base, Relaxed);
        assert_eq!(read(&mut record), Err(RecordError::Full(20)), "{base}");
    }
    head.is_full.store(0, Relaxed);
    head.base.store(46, Relaxed);
    let place = head.position();
    assert_eq!(read(&mut record), Ok(20));
    assert_eq!(head.extent().end, 64 + 23);
    assert!(head.resume(2, 0, &place));
    assert_eq!(record.bytes(RandomSource::Random, &mut [0; 20], |_| never()), Ok(20));
    assert_eq!(head.extent().end, 64 + 23);
}

/// Sets the flag when dropped, also by a panic.
struct Over<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn room_that_is_given_back_meanwhile_is_used_and_no_other() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 5_000]);
    head.begin(1, 0);
    // Positions of the two checkpoint images that exist.
    let images = std::sync::Mutex::new([head.position(), head.position()]);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                head.base.store(images.lock().unwrap()[0].consumed, Relaxed);
                std::thread::yield_now();
            }
        });
        let _over = Over(&is_over);
        let mut record = NondeterminismRecord::new(&head, &mut bytes);
        let mut replayed = vec![];
        for round in 0..1_000 {
            while head.extent().end - head.extent().base > 3_000 {
                std::thread::yield_now();
            }
            let image = head.position();
            replayed.push(read_much(&mut record, 7 * round, 7));
            let kept = images.lock().unwrap().clone();
            for (at, image) in kept.iter().enumerate() {
                assert!(head.resume(2 * round + at as u64 + 2, 0, image), "{round}");
                let first = (round + at as u64).saturating_sub(2);
                for again in first..=round {
                    let same = read_much(&mut record, 7 * again, 7);
                    assert!(same == replayed[again as usize], "{round} {again}");
                }
            }
            let [_, newer] = kept;
            *images.lock().unwrap() = [newer, image];
        }
    });
    assert!(head.extent().end > 20 * 5_000);
}

#[test]
fn an_interrupted_effect_is_seen_before_its_call_comes() {
    let (head, mut bytes) = (RecordHead::default(), vec![0; 200]);
    head.begin(1, 0);
    let (write, rename) = (FileCall { number: 1, digest: 7 }, FileCall { number: 82, digest: 9 });
    let mut record = NondeterminismRecord::new(&head, &mut bytes);
    record.announce(write, [0; PRECONDITION_WORDS]);
    record.note_call(write, 5, &[]).unwrap();
    assert!(!record.has_interrupted_effect(), "its result is recorded");
    record.announce(rename, [3; PRECONDITION_WORDS]);
    // Killed within the rename. Calls without entries come between the write and the rename.
    head.begin(2, 0);
    let mut again = NondeterminismRecord::new(&head, &mut bytes);
    assert!(!again.has_interrupted_effect(), "the write comes first");
    again.replay_call(write).unwrap();
    assert!(again.is_live() && again.has_interrupted_effect());
    assert!(again.interrupted(write).is_err(), "the rename was announced");
    assert_eq!(again.interrupted(rename), Ok(Some([3; PRECONDITION_WORDS])));
}
