//! Tests of each state of the checkpoint scheduler, with times set by the test.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::quiesce_socket::{QuiesceReply, QuiesceSocket};
use super::*;
use crate::checkpoint::checkpoint_image::ReplayPosition;
use crate::checkpoint::criu::ExternalInodes;
use crate::checkpoint::lease;

fn scheduler(state: CheckpointState) -> CheckpointScheduler {
    let config = CheckpointConfig::sample(1, Path::new("/"));
    CheckpointScheduler { state, ..CheckpointScheduler::new(config, 2, 0, (0, 1)) }
}

#[test]
fn the_images_of_a_node_are_not_taken_at_once() {
    let config = CheckpointConfig::sample(8, Path::new("/"));
    let began = Instant::now();
    let due = |turn| CheckpointScheduler::new(config.clone(), 2, 0, (turn, 4)).due - began;
    let dues: Vec<u64> = (0..4).map(|turn| due(turn).as_secs()).collect();
    assert_eq!(dues, [5, 6, 7, 8]);
}

#[test]
fn an_image_that_is_wanted_is_taken_at_once_or_next() {
    let now = Instant::now();
    let mut idle = scheduler(CheckpointState::Idle);
    idle.failures = FAILURES_MAX;
    idle.request(CheckpointRequester::User, now);
    assert!(idle.next_time(false) == Some(now) && idle.notices.is_user_waiting);
    let mut sealing = scheduler(CheckpointState::Idle);
    sealing.request(CheckpointRequester::FullLog, now);
    sealing.is_wanted = true;
    sealing.schedule_next();
    assert!(sealing.due <= Instant::now() && !sealing.notices.is_user_waiting);
    sealing.schedule_next();
    assert!(sealing.due > Instant::now());
    let mut requested = scheduler(CheckpointState::Requested { since: now });
    let due = requested.due;
    requested.request(CheckpointRequester::User, now);
    assert!(requested.due == due && requested.notices.is_user_waiting);
}

#[test]
fn a_quiesce_socket_has_a_reply_or_none_or_is_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let quiesce_socket = QuiesceSocket { socket: ours.into(), inodes: ExternalInodes::default() };
    assert_eq!(quiesce_socket.read(), QuiesceReply::Nothing);
    let word: Vec<u8> = [7_u64, 8, 9, 10].iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::io::write(&theirs, &word).unwrap();
    assert_eq!(quiesce_socket.read(), QuiesceReply::Quiesced([7, 8, 9, 10]));
    drop(theirs);
    // A process that another test starts holds the other end until it executes its program.
    let until = Instant::now() + Duration::from_secs(5);
    while quiesce_socket.read() == QuiesceReply::Nothing && Instant::now() < until {}
    assert_eq!(quiesce_socket.read(), QuiesceReply::Closed);
}

#[test]
fn a_rank_that_does_not_quiesce_is_reported_once() {
    let since = Instant::now();
    let mut requested = scheduler(CheckpointState::Requested { since });
    assert_eq!(requested.next_time(false), Some(since + QUIESCE_WARN_AFTER));
    assert!(requested.overdue_notice(since).is_none());
    assert!(requested.overdue_notice(since + QUIESCE_WARN_AFTER).is_some());
    assert!(requested.overdue_notice(since + 2 * QUIESCE_WARN_AFTER).is_none());
    requested.state = CheckpointState::Requested { since };
    assert!(requested.overdue_notice(since + 3 * QUIESCE_WARN_AFTER).is_none());
    assert_eq!(requested.next_time(false), None);
    let mut cut = scheduler(CheckpointState::Disconnected { since, is_reported: false });
    assert!(cut.overdue_notice(since).is_none() && cut.next_time(false).is_some());
    assert!(
        cut.overdue_notice(since + EXIT_SEEN_WITHIN).is_some() && cut.next_time(false).is_none()
    );
    assert!(cut.overdue_notice(since + EXIT_SEEN_WITHIN).is_none());
}

#[test]
fn a_living_child_prevents_images_and_is_reported_once() {
    let mut waiting = scheduler(CheckpointState::Requested { since: Instant::now() });
    let notice = waiting.wait_for_child(7).unwrap();
    assert!(notice.contains("(process 7)"), "{notice}");
    let is_soon = |due: Instant| due > Instant::now() && due <= Instant::now() + CHILD_RETRY;
    assert!(matches!(waiting.state, CheckpointState::Idle) && is_soon(waiting.due));
    assert_eq!((waiting.wait_for_child(7), waiting.failures), (None, 0));
    waiting.request(CheckpointRequester::User, Instant::now());
    assert!(waiting.wait_for_child(8).is_some() && waiting.wait_for_child(8).is_none());
}

#[test]
fn a_child_that_has_ended_prevents_no_image() {
    let _alone = sys::children();
    let (mut waiting, own) = (scheduler(CheckpointState::Idle), std::process::id());
    assert!(waiting.preventing_child(own).is_none());
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    waiting.wait_for_child(child.id());
    assert!(
        waiting.preventing_child(own).is_some() && waiting.preventing_child(child.id()).is_none()
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(waiting.preventing_child(own).is_none());
}

#[test]
fn no_image_is_taken_of_a_rank_that_must_not_be_restarted() {
    let mut idle = scheduler(CheckpointState::Idle);
    idle.due = Instant::now();
    assert_eq!(idle.skip_useless("it maps F"), None);
    assert!(idle.due > Instant::now() && idle.failures == 0);
    idle.request(CheckpointRequester::User, Instant::now());
    assert!(idle.skip_useless("it maps F").is_some_and(|notice| notice.ends_with(": it maps F")));
    assert_eq!(idle.skip_useless("it maps F"), None);
}

#[test]
fn an_image_that_takes_too_long_is_ended() {
    let _alone = sys::children();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let (began, criu) = (Instant::now(), child.id());
    let (folder, header) = ("/nowhere".into(), ImageHeader::default());
    let dump = Dump { criu, ended: None, is_late: false, folder, header, began };
    let mut dump = scheduler(CheckpointState::Dumping(dump));
    dump.end_late(began);
    assert!(dump.next_time(false).is_some_and(|time| time <= Instant::now() + POLL_INTERVAL));
    assert!(child.try_wait().unwrap().is_none());
    dump.end_late(began + DUMP_MAX);
    assert!(!child.wait().unwrap().success());
    assert_eq!(dump.next_time(false), None);
}

/// Adds images with these numbers, each sealed in a folder of its own.
fn add_images(scheduler: &mut CheckpointScheduler, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let folder = scheduler.folder.join(number.to_string());
        let replay_position =
            ReplayPosition { determinants: 10 * number, ..ReplayPosition::default() };
        let mut image = CheckpointImage::default();
        image.folder = folder;
        image.header = ImageHeader { number, replay_position, ..ImageHeader::default() };
        scheduler.finish(is_sealed(scheduler, image)).unwrap();
    }
}

fn is_sealed(
    scheduler: &CheckpointScheduler,
    image: CheckpointImage,
) -> JoinHandle<Result<SealedImage>> {
    let config = scheduler.config.clone();
    std::thread::spawn(move || Ok(SealedImage { image, unreachable: config.unreachable_spares() }))
}

fn numbers(scheduler: &CheckpointScheduler) -> Vec<u64> {
    scheduler.images.images.iter().map(|image| image.header.number).collect()
}

#[test]
fn an_image_counts_once_other_nodes_find_it() {
    let folder = std::env::temp_dir().join(format!("landbridge-keeper-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let sign = lease::lease_path(&folder, "job", 9);
    let config = CheckpointConfig { spares: vec![9], ..CheckpointConfig::sample(1, &folder) };
    let mut scheduler = CheckpointScheduler::new(config, 2, 0, (0, 1));
    add_images(&mut scheduler, 1..=3);
    // No other node sees the images: nothing may be trimmed, and no location is reported.
    assert!(scheduler.images.unavailable_to[&3] == [9] && scheduler.images.can_replay_from_start());
    assert_eq!(
        (scheduler.images.trim_position(), scheduler.images.new_locations(), numbers(&scheduler)),
        (0, None, vec![2, 3])
    );
    std::fs::write(&sign, "").unwrap();
    add_images(&mut scheduler, 4..=4);
    assert_eq!((scheduler.images.trim_position(), numbers(&scheduler)), (0, vec![3, 4]));
    let places = |scheduler: &mut CheckpointScheduler| {
        let all = scheduler.images.new_locations().unwrap_or_default().into_iter();
        all.map(|one| one.path).collect::<Vec<_>>()
    };
    assert_eq!(places(&mut scheduler), ["rank-2/4"]);
    add_images(&mut scheduler, 5..=5);
    assert_eq!(places(&mut scheduler), ["rank-2/4", "rank-2/5"]);
    assert_eq!((scheduler.images.new_locations(), scheduler.images.trim_position()), (None, 40));
    // Usable images stay next to newer images that are not usable.
    std::fs::remove_file(&sign).unwrap();
    add_images(&mut scheduler, 6..=8);
    assert_eq!(
        (numbers(&scheduler), scheduler.images.trim_position(), scheduler.images.new_locations()),
        (vec![4, 5, 7, 8], 40, None)
    );
    scheduler.images.drop_image(5);
    assert_eq!(
        (places(&mut scheduler), scheduler.images.trim_position()),
        (vec!["rank-2/4".to_string()], 40)
    );
    // No spare node is left that might need the images.
    scheduler.set_spares(&[]);
    assert_eq!((numbers(&scheduler), scheduler.images.trim_position()), (vec![7, 8], 70));
    assert_eq!(places(&mut scheduler), ["rank-2/7", "rank-2/8"]);
    add_images(&mut scheduler, 9..=10);
    assert_eq!((numbers(&scheduler), scheduler.images.trim_position()), (vec![9, 10], 90));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn an_image_of_a_round_counts_once_the_round_is_whole() {
    let mut scheduler = scheduler(CheckpointState::Idle);
    scheduler.images.whole_round = Some(0);
    let rounds = |images: &KeptImages| images.rounds().into_iter().collect::<Vec<_>>();
    add_images(&mut scheduler, 1..=2);
    let images = &mut scheduler.images;
    assert!(rounds(images).is_empty() && images.oldest().is_none() && images.has(2));
    images.end_round(1, true);
    images.end_round(2, true);
    assert_eq!((rounds(images), images.oldest().unwrap().number), (vec![1, 2], 1));
    // Another rank has no image in round 3, and the unit begins again with round 1.
    add_images(&mut scheduler, 3..=3);
    let images = &mut scheduler.images;
    images.end_round(3, false);
    assert!(images.of_round(3).is_none() && images.of_round(2).is_some());
    images.break_rounds_after(1);
    assert_eq!((rounds(images), images.oldest()), (vec![1], None));
    add_images(&mut scheduler, 4..=4);
    let images = &mut scheduler.images;
    images.end_round(4, true);
    assert_eq!((rounds(images), images.oldest().unwrap().number), (vec![1, 4], 1));
}

#[test]
fn a_rank_without_determinants_does_not_begin_again_once_its_images_count() {
    let config = CheckpointConfig::sample(1, &std::env::temp_dir());
    let mut scheduler = CheckpointScheduler::new(config, 2, 0, (0, 1));
    // The image of number 0 was taken after no determinant: the rank had only sent.
    add_images(&mut scheduler, 0..=0);
    assert_eq!(scheduler.images.trim_position(), 0);
    assert!(scheduler.images.can_replay_from_start());
    add_images(&mut scheduler, 1..=1);
    assert_eq!(scheduler.images.trim_position(), 0);
    assert!(!scheduler.images.can_replay_from_start());
}

#[test]
fn an_image_in_the_store_counts_once_all_who_live_and_may_need_it_can_get_it() {
    let variable = |name: &str| match name {
        // No server listens on this port.
        "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:9".to_string()),
        "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("x".to_string()),
        _ => None,
    };
    let object_store = Some(ObjectStore::new("s3://images", false, variable).unwrap());
    let config = CheckpointConfig {
        spares: vec![8, 9],
        object_store,
        ..CheckpointConfig::sample(1, Path::new("/"))
    };
    let mut scheduler = CheckpointScheduler::new(config, 2, 0, (0, 1));
    let send = |scheduler: &mut CheckpointScheduler, number: u64, unreachable: &[u32]| {
        let mut image = CheckpointImage::default();
        image.header.number = number;
        image.header.replay_position.determinants = 10 * number;
        scheduler.finish(is_sealed(scheduler, image)).unwrap();
        let CheckpointState::Uploading { object_store, number, .. } =
            std::mem::replace(&mut scheduler.state, CheckpointState::Idle)
        else {
            panic!("it is sent");
        };
        let unreachable = unreachable.to_vec();
        let thread = std::thread::spawn(|| Ok(unreachable));
        scheduler.state = CheckpointState::Uploading { thread, object_store, number };
        scheduler.finish_upload().unwrap().1.unwrap();
    };
    for number in 1..=3 {
        send(&mut scheduler, number, &[9]);
    }
    assert_eq!(
        (scheduler.images.trim_position(), scheduler.images.new_locations(), numbers(&scheduler)),
        (0, None, vec![2, 3])
    );
    // The spare node that could not get the images is lost.
    scheduler.set_spares(&[8]);
    assert_eq!((scheduler.images.trim_position(), numbers(&scheduler)), (20, vec![2, 3]));
    for number in 4..=5 {
        send(&mut scheduler, number, &[9]);
    }
    assert_eq!((scheduler.images.trim_position(), numbers(&scheduler)), (40, vec![4, 5]));
    send(&mut scheduler, 6, &[8]);
    assert_eq!((scheduler.images.trim_position(), numbers(&scheduler)), (40, vec![4, 5, 6]));
    // An image that is not in the object store yet is usable once no spare node might need it from
    // there.
    let mut image = CheckpointImage::default();
    image.header.number = 7;
    scheduler.finish(is_sealed(&scheduler, image)).unwrap();
    scheduler.set_spares(&[8]);
    assert_eq!(numbers(&scheduler), [4, 5, 6, 7]);
    scheduler.set_spares(&[]);
    assert_eq!(numbers(&scheduler), [6, 7]);
    scheduler.end_incarnation();
}

#[test]
fn images_of_each_node_have_a_folder_of_their_own() {
    let at = |moves| {
        CheckpointScheduler::new(CheckpointConfig::sample(1, Path::new("/")), 2, moves, (0, 1))
            .folder
    };
    assert_eq!([at(0), at(1)], [PathBuf::from("/job/rank-2"), PathBuf::from("/job/rank-2.1")]);
}

/// Waits until all deletions are done.
fn wait_for_room(scheduler: &CheckpointScheduler) {
    let until = Instant::now() + Duration::from_secs(20);
    while scheduler.bytes() > 0 {
        assert!(Instant::now() < until, "{} bytes are left", scheduler.bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn who_has_ended_does_not_wait_for_a_disk_that_does_not_answer() {
    let folder = std::env::temp_dir().join(format!("landbridge-late-{}", std::process::id()));
    let mut scheduler = scheduler(CheckpointState::Idle);
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let mut image = CheckpointImage::default();
    image.folder.clone_from(&folder);
    let thread = std::thread::spawn(move || {
        let _ = disk.recv();
        std::fs::create_dir(&image.folder).unwrap();
        Ok(SealedImage { image, unreachable: Vec::new() })
    });
    (scheduler.state, scheduler.expected) = (CheckpointState::Sealing { thread }, 7);
    let began = Instant::now();
    scheduler.end_incarnation();
    assert!(
        began.elapsed() < 5 * SEAL_WAIT_MAX && matches!(scheduler.state, CheckpointState::Idle)
    );
    assert!(scheduler.images.images.is_empty());
    // The image takes its bytes all the same, and is deleted once it is written.
    assert_eq!(scheduler.bytes(), 7);
    drop(answer);
    wait_for_room(&scheduler);
    assert!(!folder.exists());
}

#[test]
fn nobody_waits_until_something_is_gone() {
    let mut scheduler = scheduler(CheckpointState::Idle);
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let disk = std::sync::Arc::new(std::sync::Mutex::new(disk));
    while !scheduler.images.removals.is_full() {
        let disk = disk.clone();
        scheduler.images.removals.add(10, move || _ = disk.lock().unwrap().recv());
    }
    assert_eq!(scheduler.bytes(), 80, "until it is gone it takes room");
    drop(answer);
    wait_for_room(&scheduler);
    assert!(!scheduler.images.removals.is_full());
}

#[test]
fn a_rank_does_not_stand_still_for_a_folder_that_does_not_come() {
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let folder = std::env::temp_dir().join(format!("landbridge-place-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let place = ImageFolder { folder: folder.clone(), shared: Vec::new() };
    let thread = std::thread::spawn(move || {
        let _ = disk.recv();
        Ok(place)
    });
    let (header, began) = (ImageHeader::default(), Instant::now());
    let mut scheduler = scheduler(CheckpointState::Preparing { thread, header, began });
    scheduler.expected = 7;
    assert!(scheduler.is_busy() && scheduler.bytes() == 7);
    assert!(
        scheduler
            .next_time(false)
            .is_some_and(|time| time <= Instant::now() + FOLDER_POLL_INTERVAL)
    );
    let began = Instant::now();
    scheduler.end_incarnation();
    assert!(began.elapsed() < SEAL_WAIT_MAX && !scheduler.is_busy() && scheduler.bytes() == 7);
    drop(answer);
    wait_for_room(&scheduler);
    assert!(!folder.exists());
}

#[test]
fn a_rank_that_reads_much_nondeterminism_is_checkpointed_sooner() {
    let mut scheduler = scheduler(CheckpointState::Idle);
    let now = scheduler.next_read_check;
    scheduler.due = now + Duration::from_secs(600);
    assert_eq!(scheduler.next_time(false), Some(now));
    assert!(!scheduler.is_due(|| READ_BYTES_MAX, now), "not so much yet");
    assert!(!scheduler.is_due(|| READ_BYTES_MAX + 1, now), "nobody looks all the time");
    add_images(&mut scheduler, 1..=1);
    scheduler.images.images[0].header.replay_position.recording_bytes = 1000;
    scheduler.due = now + Duration::from_secs(600);
    assert!(
        !scheduler.is_due(|| READ_BYTES_MAX + 1000, now + READ_CHECK_INTERVAL),
        "since its last image"
    );
    assert!(scheduler.is_due(|| READ_BYTES_MAX + 1001, now + 2 * READ_CHECK_INTERVAL));
    scheduler.failures = FAILURES_MAX;
    assert!(!scheduler.is_due(|| u64::MAX, now + 9 * READ_CHECK_INTERVAL));
}
