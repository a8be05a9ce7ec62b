//! Tests of [`super`].

use std::os::fd::AsRawFd;

use landbridge_proto::nondeterminism::{NondeterminismRecord, RandomSource, RecordHead};

use super::*;
use crate::ending::Ending;

fn recording() -> RankRecording {
    RankRecording::for_test(None).unwrap()
}

#[test]
fn a_recording_is_full_once_its_head_says_so() {
    let recording = recording();
    assert!(!recording.is_full());
    rustix::io::pwrite(&recording.memory, &1_u64.to_ne_bytes(), FULL_AT as u64).unwrap();
    assert!(recording.is_full());
}

/// Writes a word of the record's head as the rank does.
fn put(recording: &RankRecording, at: usize, number: u64) {
    rustix::io::pwrite(&recording.memory, &number.to_ne_bytes(), at as u64).unwrap();
}

fn read(recording: &RankRecording, from: u64, bytes: &[u8]) {
    rustix::io::pwrite(&recording.memory, bytes, RECORD_HEAD_BYTES as u64 + from).unwrap();
    put(recording, RECORDED_AT, from + bytes.len() as u64);
}

fn take_in(recording: &RankRecording, number: u64) {
    let words = [number + 1, 2, number].map(u64::to_ne_bytes);
    rustix::io::pwrite(&recording.memory, words.as_flattened(), determinant_at(number) as u64)
        .unwrap();
    put(recording, DETERMINANT_COUNT_AT, number + 1);
}

#[test]
fn updates_are_sent_once_and_applied_to_the_recording_of_the_next_incarnation() {
    let (one, other) = (recording(), recording());
    assert_eq!(one.updates(3, |_| Default::default()), []);
    read(&one, 0, b"abc");
    take_in(&one, 0);
    put(&one, POLLS_AT, 7);
    let updates = one.updates(3, |_| Default::default());
    let [update] = &updates[..] else { panic!("{updates:?}") };
    assert_eq!((update.rank, update.from, &update.reads[..]), (3, 0, &b"abc"[..]));
    assert!(!update.continues);
    assert_eq!(
        (update.polls, update.first_determinant, &update.determinants[..]),
        (7, 0, &[[1, 2, 0]][..])
    );
    assert_eq!(one.updates(3, |_| Default::default()), []);
    other.apply(update).unwrap();
    // More than one piece of entries, and more determinants than the ring holds.
    let many = vec![5; 2 * PIECE_BYTES as usize + 1];
    read(&one, 3, &many);
    (1..RECENT_DETERMINANTS_MAX as u64 + 20).for_each(|number| take_in(&one, number));
    let updates = one.updates(3, |_| Default::default());
    let go_on: Vec<bool> = updates.iter().map(|update| update.continues).collect();
    assert_eq!(go_on, [true, true, false], "the last one ends where an entry does");
    assert_eq!(
        updates[0].first_determinant, 21,
        "the first of them are gone, and one may be just now"
    );
    updates.iter().for_each(|update| other.apply(update).unwrap());
    let all = [&b"abc"[..], &many].concat();
    assert!(other.entries(0, all.len() as u64) == all);
    assert_eq!(other.poll_counts(), PollCounts { furthest: 7, present: 0, taken: 0 });
    assert_eq!(other.words(DETERMINANT_COUNT_AT), Some([RECENT_DETERMINANTS_MAX as u64 + 20]));
    assert_eq!(other.words(determinant_at(500)), Some([501, 2, 500]));
    assert_eq!(other.updates(3, |_| Default::default()), [], "it came from there");
    // An effect on a file is under way.
    put(&one, FILES_AT + 8, 77);
    let updates = one.updates(3, |_| Default::default());
    assert_eq!(updates.len(), 1);
    assert_eq!(updates[0].files.len(), FILES_WORDS * 8);
    other.apply(&updates[0]).unwrap();
    assert_eq!(other.words(FILES_AT), Some([0, 77]));
    assert_eq!(other.words(LAST_WRITTEN_AT), Some([UNKNOWN_WRITTEN]));
    assert_eq!(
        (one.updates(3, |_| Default::default()), other.updates(3, |_| Default::default())),
        (Vec::new(), Vec::new())
    );
    take_in(&other, RECENT_DETERMINANTS_MAX as u64 + 20);
    assert_eq!(
        other.updates(3, |_| Default::default())[0].determinants,
        [[RECENT_DETERMINANTS_MAX as u64 + 21, 2, RECENT_DETERMINANTS_MAX as u64 + 20]]
    );
}

#[test]
fn a_full_recording_is_full_on_the_next_node_as_well() {
    let (one, other) = (recording(), recording());
    put(&one, FULL_AT, 1);
    one.updates(3, |_| Default::default()).iter().for_each(|update| other.apply(update).unwrap());
    assert!(other.is_full());
    let beyond = RecordingUpdate {
        from: NONDETERMINISM_BYTES as u64,
        reads: vec![1],
        ..RecordingUpdate::default()
    };
    assert!(other.apply(&beyond).is_err());
}

#[test]
fn what_the_oldest_image_covers_takes_no_memory_and_is_not_sent() {
    let (one, other) = (recording(), recording());
    let used =
        |recording: &RankRecording| rustix::fs::fstat(&recording.memory).unwrap().st_blocks * 512;
    let (piece, room) = (vec![3; 1 << 20], RECORD_ENTRIES_BYTES as u64);
    let mut end = 0;
    let mut replicated = Vec::new();
    // Writes almost twice as many entries as the record holds.
    for round in 0..2 * room / piece.len() as u64 - 1 {
        let offset = (end % room) as usize;
        let (now, later) = piece.split_at(piece.len().min(room as usize - offset));
        one.write(RECORD_HEAD_BYTES + offset, now).unwrap();
        one.write(RECORD_HEAD_BYTES, later).unwrap();
        end += piece.len() as u64;
        put(&one, RECORDED_AT, end);
        replicated.extend(one.updates(1, |_| Default::default()));
        if round > 3 {
            one.trim(end - 3 * piece.len() as u64);
        }
    }
    assert!(used(&one) < 5 << 20, "{}", used(&one));
    assert!(!one.can_replay_from_start() && other.can_replay_from_start());
    one.trim(0);
    one.trim(u64::MAX);
    replicated.extend(one.updates(1, |_| Default::default()));
    assert_eq!(replicated.last().unwrap().base, end - 3 * piece.len() as u64);
    let last = replicated.split_off(replicated.len() - 5);
    other.apply(&RecordingUpdate { base: last[0].from, ..last[0].clone() }).unwrap();
    last[1..].iter().for_each(|update| other.apply(update).unwrap());
    assert!(
        other.entries(end - 3, end) == [3; 3]
            && other.updates(1, |_| Default::default()).is_empty()
    );
    assert_eq!(other.words(BASE_AT), Some([end - 3 * piece.len() as u64]));
}

#[test]
fn trims_of_less_than_a_page_release_memory_as_well() {
    let recording = recording();
    let used = || rustix::fs::fstat(&recording.memory).unwrap().st_blocks * 512;
    for round in 0..4_000 {
        read(&recording, 100 * round, &[1; 100]);
        recording.trim((100 * round).saturating_sub(500));
    }
    assert!(used() <= 3 * 4096, "{}", used());
    // The newest entries may lie in the same page as the oldest needed entries, and in front of
    // them.
    let (base, all) = (399_400, RECORD_ENTRIES_BYTES as u64);
    assert_eq!(recording.words(BASE_AT), Some([base]));
    let newest = base + all - 10;
    recording.write(RECORD_HEAD_BYTES + (newest % all) as usize, b"newest").unwrap();
    put(&recording, RECORDED_AT, newest + 6);
    recording.trim(base + 8192);
    assert_eq!(recording.entries(newest, newest + 6), b"newest");
}

/// What a process with this record mapped writes: random bytes in pieces of one mebibyte, until
/// it has written one and a half times what the record holds.
fn write_much(
    head: &RecordHead,
    record: &mut NondeterminismRecord,
    buffer: &mut [u8],
) -> Option<()> {
    const AHEAD_MAX: u64 = 64 << 20;
    while head.extent().end < 3 * RECORD_ENTRIES_BYTES as u64 / 2 {
        while head.extent().end - head.extent().base > AHEAD_MAX {
            std::thread::yield_now();
        }
        let number = (head.extent().end >> 20) as u8;
        let draw = |into: &mut [u8]| {
            into.fill(number);
            into.len() as i64
        };
        record.bytes(RandomSource::Random, buffer, draw).ok()?;
    }
    Some(())
}

#[test]
fn a_recording_is_trimmed_while_another_process_writes_it() {
    let _alone = sys::children();
    let recording = recording();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let mut buffer = vec![0; 1 << 20];
    // SAFETY: the file has so many bytes, and the mapping stays; only the child has a slice of
    // the entries, and after the end of the child only this process. The child makes no call
    // that takes memory, and leaves at once.
    let (head, room, child) = unsafe {
        let fd = recording.memory.as_raw_fd();
        let start =
            libc::mmap(std::ptr::null_mut(), NONDETERMINISM_BYTES, protection, flags, fd, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let head = &*start.cast::<RecordHead>();
        head.begin(1, 0);
        let room = (start.cast::<u8>().add(RECORD_HEAD_BYTES), RECORD_ENTRIES_BYTES);
        let child = libc::fork();
        if child == 0 {
            let entries = std::slice::from_raw_parts_mut(room.0, room.1);
            let mut record = NondeterminismRecord::new(head, entries);
            let outcome = write_much(head, &mut record, &mut buffer);
            libc::_exit(i32::from(outcome.is_none()));
        }
        (head, room, child as u32)
    };
    let mut images = [head.position(), head.position()];
    let mut ended = None;
    while ended.is_none() {
        ended = sys::reap(child);
        if recording.replayed() > images[1].consumed() + (9 << 20) {
            let newer = std::mem::replace(&mut images[1], head.position());
            images[0] = newer;
            recording.trim(images[0].consumed());
        }
        std::thread::yield_now();
    }
    assert_eq!(ended.map(|it| it.ending), Some(Ending::Exited(0)));
    let used = rustix::fs::fstat(&recording.memory).unwrap().st_blocks * 512;
    assert!(used < 70 << 20, "{used}");
    // SAFETY: the mapping stays, and the child, which had the other slice, has ended.
    let entries = unsafe { std::slice::from_raw_parts_mut(room.0, room.1) };
    let mut record = NondeterminismRecord::new(head, entries);
    let end = recording.replayed();
    for (start, image) in images.iter().enumerate() {
        recording.check_position(image.consumed()).unwrap();
        assert!(head.resume(start as u64 + 2, 0, image));
        let mut count = 0;
        while recording.replayed() < end {
            let number = (recording.replayed() >> 20) as u8;
            let replicated = record.bytes(RandomSource::Random, &mut buffer, |_| -1);
            assert_eq!(replicated, Ok(1 << 20));
            assert!(buffer.iter().all(|byte| *byte == number), "{count}");
            count += 1;
        }
        // The record may hold nothing that is newer than the newer image.
        assert!(count >= 9 * (1 - start), "{count}");
    }
}

#[test]
fn polls_are_read_where_the_provider_counts_them() {
    let recording = recording();
    assert_eq!(recording.poll_counts(), PollCounts::default());
    for (at, number) in [(POLLS_AT, 43_u64), (POLLS_AT + 8, 12)] {
        rustix::io::pwrite(&recording.memory, &number.to_ne_bytes(), at as u64).unwrap();
    }
    assert_eq!(recording.poll_counts(), PollCounts { furthest: 43, present: 12, taken: 0 });
    assert_eq!(recording.end_incarnation(), PollCounts { furthest: 43, present: 0, taken: 0 });
}

#[test]
fn the_process_that_announced_an_effect_alone_tells_what_it_had_written() {
    let recording = recording();
    recording.note_written(Some(7));
    assert_eq!(recording.words(LAST_WRITTEN_AT), Some([8]));
    recording.note_written(Some(2));
    assert_eq!(recording.words(LAST_WRITTEN_AT), Some([8]), "this one has announced nothing");
    // The next process announces an effect.
    put(&recording, LAST_WRITTEN_AT, 0);
    recording.note_written(None);
    recording.note_written(Some(3));
    assert_eq!(recording.words(LAST_WRITTEN_AT), Some([UNKNOWN_WRITTEN]));
    // The end of a process that nobody has counted.
    put(&recording, LAST_WRITTEN_AT, 0);
    recording.end_incarnation();
    recording.note_written(Some(3));
    assert_eq!(recording.words(LAST_WRITTEN_AT), Some([UNKNOWN_WRITTEN]));
}

#[test]
fn nothing_is_restored_where_the_recording_does_not_reach() {
    let recording = recording();
    read(&recording, 0, &[1; 50]);
    recording.check_position(50).unwrap();
    let error = recording.check_position(51).unwrap_err().to_string();
    assert!(error.contains("is not on this node"), "{error}");
    recording.trim(20);
    recording.check_position(20).unwrap();
    let error = recording.check_position(19).unwrap_err().to_string();
    assert!(error.contains("after that is released"), "{error}");
    assert_eq!(recording.words(RECORDED_AT), Some([50, 0]), "asking changes nothing");
}

#[test]
fn what_the_user_loads_in_front_stays() {
    let mut environment = Environment::new();
    let libraries = |environment: &Environment| recording().variables(environment)[0].1.clone();
    assert_eq!(libraries(&environment), "/opt/clocks.so");
    environment.insert("LD_PRELOAD".into(), "/x.so:/y.so".into());
    assert_eq!(libraries(&environment), "/opt/clocks.so:/x.so:/y.so");
}

#[test]
fn the_agent_forbids_a_restart_once_and_only_where_file_calls_are_recorded() {
    let (recording, without_files) = (self::recording(), self::recording());
    let without_files = RankRecording { with_files: false, ..without_files };
    assert!(recording.forbid_restart("it is linked statically"));
    assert_eq!(recording.refusal().as_deref(), Some("it is linked statically"));
    assert!(!recording.forbid_restart("another reason"), "the first reason stands");
    assert_eq!(recording.refusal().as_deref(), Some("it is linked statically"));
    assert!(!without_files.forbid_restart("it is linked statically"));
    assert_eq!(without_files.refusal(), None);
    // Another node learns the reason.
    let updates = recording.updates(0, |_| Default::default());
    let other = self::recording();
    updates.iter().for_each(|update| other.apply(update).unwrap());
    assert_eq!(other.refusal().as_deref(), Some("it is linked statically"));
}

#[test]
fn an_incarnation_is_attached_once_the_interposer_owns_the_record() {
    let recording = self::recording();
    assert!(!recording.is_attached(0));
    put(&recording, INCARNATION_AT, 1);
    assert!(recording.is_attached(0) && !recording.is_attached(1));
}
