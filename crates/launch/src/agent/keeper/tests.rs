//! Each state by itself, with the time told by hand.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::super::rank::LocalRank;
use super::line::{Heard, Line};
use super::*;
use crate::checkpoint::claim;
use crate::checkpoint::criu::Ends;

fn keeper(state: State) -> Keeper {
    let wish = Wish::sample(1, Path::new("/"));
    Keeper { state, ..Keeper::new(wish, 2, 0, (0, 1)) }
}

#[test]
fn the_images_of_a_node_are_not_taken_at_once() {
    let wish = Wish::sample(8, Path::new("/"));
    let began = Instant::now();
    let due = |turn| Keeper::new(wish.clone(), 2, 0, (turn, 4)).due - began;
    let dues: Vec<u64> = (0..4).map(|turn| due(turn).as_secs()).collect();
    assert_eq!(dues, [5, 6, 7, 8]);
}

#[test]
fn an_image_that_is_wanted_is_taken_at_once_or_next() {
    let now = Instant::now();
    let mut resting = keeper(State::Resting);
    resting.failures = FAILURES_MAX;
    resting.want(Asker::User, now);
    assert!(resting.next_time() == Some(now) && resting.is_awaited);
    let mut sealing = keeper(State::Resting);
    sealing.want(Asker::Relay, now);
    sealing.is_wanted = true;
    sealing.rest();
    assert!(sealing.due <= Instant::now() && !sealing.is_awaited);
    sealing.rest();
    assert!(sealing.due > Instant::now());
    let mut asking = keeper(State::Asking { since: now });
    let due = asking.due;
    asking.want(Asker::User, now);
    assert!(asking.due == due && asking.is_awaited);
}

#[test]
fn a_line_says_a_word_or_nothing_or_is_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let line = Line { socket: ours.into(), ends: Ends::default() };
    assert_eq!(line.read(), Heard::Nothing);
    let word: Vec<u8> = [7_u64, 8, 9, 10].iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::io::write(&theirs, &word).unwrap();
    assert_eq!(line.read(), Heard::Word([7, 8, 9, 10]));
    drop(theirs);
    // A process that another test starts has it for the moment before it becomes its program.
    let until = Instant::now() + Duration::from_secs(5);
    while line.read() == Heard::Nothing && Instant::now() < until {}
    assert_eq!(line.read(), Heard::Closed);
}

#[test]
fn who_has_ended_is_not_waited_for() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let state = State::Asking { since: Instant::now() };
    let mut rank = LocalRank::vacant(2, None, None);
    rank.keeper = Some(keeper(state));
    rank.line = Some(Line { socket: ours.into(), ends: Ends::default() });
    drop(theirs);
    assert!(rank.line().is_none() && rank.image_time().is_none());
    rank.ending = None;
    assert!(rank.line().is_some() && rank.image_time().is_some());
    rank.keeper = Some(keeper(State::CutOff { since: Instant::now(), is_told: true }));
    assert!(rank.line().is_none() && rank.image_time().is_none());
}

#[test]
fn a_rank_that_does_not_answer_is_told_of_once() {
    let since = Instant::now();
    let mut asking = keeper(State::Asking { since });
    assert_eq!(asking.next_time(), Some(since + ANSWER_MAX));
    assert!(asking.silence(since).is_none());
    assert!(asking.silence(since + ANSWER_MAX).is_some());
    assert!(asking.silence(since + 2 * ANSWER_MAX).is_none());
    asking.state = State::Asking { since };
    assert!(asking.silence(since + 3 * ANSWER_MAX).is_none());
    assert_eq!(asking.next_time(), None);
    let mut cut = keeper(State::CutOff { since, is_told: false });
    assert!(cut.silence(since).is_none() && cut.next_time().is_some());
    assert!(cut.silence(since + END_SEEN).is_some() && cut.next_time().is_none());
    assert!(cut.silence(since + END_SEEN).is_none());
}

#[test]
fn an_image_that_takes_too_long_is_ended() {
    let _alone = sys::children();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let (began, criu) = (Instant::now(), child.id());
    let (folder, about) = ("/nowhere".into(), About::default());
    let taking = Taking { criu, ended: None, is_late: false, folder, about, began };
    let mut taking = keeper(State::Taking(taking));
    taking.end_late(began);
    assert!(taking.next_time().is_some_and(|time| time <= Instant::now() + GLANCE));
    assert!(child.try_wait().unwrap().is_none());
    taking.end_late(began + TAKING_MAX);
    assert!(!child.wait().unwrap().success());
    assert_eq!(taking.next_time(), None);
}

/// Sealed in a folder of its own, one after the other.
fn add_images(keeper: &mut Keeper, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let folder = keeper.folder.join(number.to_string());
        let standing = Standing { intakes: 10 * number, ..Standing::default() };
        let mut image = Image::default();
        image.folder = folder;
        image.about = About { number, standing, ..About::default() };
        keeper.finish(is_sealed(keeper, image)).unwrap();
    }
}

fn is_sealed(keeper: &Keeper, image: Image) -> JoinHandle<Result<Sealed>> {
    let wish = keeper.wish.clone();
    std::thread::spawn(move || Ok(Sealed { image, blind: wish.blind() }))
}

fn numbers(keeper: &Keeper) -> Vec<u64> {
    keeper.images.iter().map(|image| image.about.number).collect()
}

#[test]
fn an_image_counts_once_other_nodes_find_it() {
    let folder = std::env::temp_dir().join(format!("landbridge-keeper-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let sign = claim::place(&folder, "job", 9);
    let wish = Wish { spares: vec![9], ..Wish::sample(1, &folder) };
    let mut keeper = Keeper::new(wish, 2, 0, (0, 1));
    add_images(&mut keeper, 1..=3);
    // Nobody sees them: nothing may be dropped, and nobody is sent there.
    assert!(keeper.alone[&3] == [9] && keeper.may_begin());
    assert_eq!((keeper.promise(), keeper.whereabouts(), numbers(&keeper)), (0, None, vec![2, 3]));
    std::fs::write(&sign, "").unwrap();
    add_images(&mut keeper, 4..=4);
    assert_eq!((keeper.promise(), numbers(&keeper)), (0, vec![3, 4]));
    let places = |keeper: &mut Keeper| {
        let all = keeper.whereabouts().unwrap_or_default().into_iter();
        all.map(|one| one.place).collect::<Vec<_>>()
    };
    assert_eq!(places(&mut keeper), ["rank-2/4"]);
    add_images(&mut keeper, 5..=5);
    assert_eq!(places(&mut keeper), ["rank-2/4", "rank-2/5"]);
    assert_eq!((keeper.whereabouts(), keeper.promise()), (None, 40));
    // Those that count stay beside younger ones that do not.
    std::fs::remove_file(&sign).unwrap();
    add_images(&mut keeper, 6..=8);
    assert_eq!(
        (numbers(&keeper), keeper.promise(), keeper.whereabouts()),
        (vec![4, 5, 7, 8], 40, None)
    );
    keeper.drop_image(5);
    assert_eq!((places(&mut keeper), keeper.promise()), (vec!["rank-2/4".to_string()], 40));
    // Nobody is left who might need them.
    keeper.set_spares(&[]);
    assert_eq!((numbers(&keeper), keeper.promise()), (vec![7, 8], 70));
    assert_eq!(places(&mut keeper), ["rank-2/7", "rank-2/8"]);
    add_images(&mut keeper, 9..=10);
    assert_eq!((numbers(&keeper), keeper.promise()), (vec![9, 10], 90));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn an_image_in_the_store_counts_once_all_who_live_and_may_need_it_can_get_it() {
    let variable = |name: &str| match name {
        // Nobody listens there.
        "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:9".to_string()),
        "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("x".to_string()),
        _ => None,
    };
    let remote = Some(Remote::new("s3://images", false, variable).unwrap());
    let wish = Wish { spares: vec![8, 9], remote, ..Wish::sample(1, Path::new("/")) };
    let mut keeper = Keeper::new(wish, 2, 0, (0, 1));
    let send = |keeper: &mut Keeper, number: u64, blind: &[u32]| {
        let mut image = Image::default();
        image.about.number = number;
        image.about.standing.intakes = 10 * number;
        keeper.finish(is_sealed(keeper, image)).unwrap();
        let State::Sending { remote, number, .. } =
            std::mem::replace(&mut keeper.state, State::Resting)
        else {
            panic!("it is sent");
        };
        let blind = blind.to_vec();
        let thread = std::thread::spawn(|| Ok(blind));
        keeper.state = State::Sending { thread, remote, number };
        keeper.finish_sending().unwrap().1.unwrap();
    };
    for number in 1..=3 {
        send(&mut keeper, number, &[9]);
    }
    assert_eq!((keeper.promise(), keeper.whereabouts(), numbers(&keeper)), (0, None, vec![2, 3]));
    // The one that could not is lost.
    keeper.set_spares(&[8]);
    assert_eq!((keeper.promise(), numbers(&keeper)), (20, vec![2, 3]));
    for number in 4..=5 {
        send(&mut keeper, number, &[9]);
    }
    assert_eq!((keeper.promise(), numbers(&keeper)), (40, vec![4, 5]));
    send(&mut keeper, 6, &[8]);
    assert_eq!((keeper.promise(), numbers(&keeper)), (40, vec![4, 5, 6]));
    // One that is not in the store yet counts once nobody might need it there.
    let mut image = Image::default();
    image.about.number = 7;
    keeper.finish(is_sealed(&keeper, image)).unwrap();
    keeper.set_spares(&[8]);
    assert_eq!(numbers(&keeper), [4, 5, 6, 7]);
    keeper.set_spares(&[]);
    assert_eq!(numbers(&keeper), [6, 7]);
    keeper.end_life();
}

#[test]
fn images_of_each_node_have_a_folder_of_their_own() {
    let at = |moves| Keeper::new(Wish::sample(1, Path::new("/")), 2, moves, (0, 1)).folder;
    assert_eq!([at(0), at(1)], [PathBuf::from("/job/rank-2"), PathBuf::from("/job/rank-2.1")]);
}

/// What goes has gone.
fn wait_for_room(keeper: &Keeper) {
    let until = Instant::now() + Duration::from_secs(20);
    while keeper.bytes() > 0 {
        assert!(Instant::now() < until, "{} bytes are left", keeper.bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn who_has_ended_does_not_wait_for_a_disk_that_does_not_answer() {
    let folder = std::env::temp_dir().join(format!("landbridge-late-{}", std::process::id()));
    let mut keeper = keeper(State::Resting);
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let mut image = Image::default();
    image.folder.clone_from(&folder);
    let thread = std::thread::spawn(move || {
        let _ = disk.recv();
        std::fs::create_dir(&image.folder).unwrap();
        Ok(Sealed { image, blind: Vec::new() })
    });
    (keeper.state, keeper.expected) = (State::Sealing { thread }, 7);
    let began = Instant::now();
    keeper.end_life();
    assert!(began.elapsed() < 5 * SEALED_WITHIN && matches!(keeper.state, State::Resting));
    assert!(keeper.images.is_empty());
    // It takes room all the same, and goes once it is there.
    assert_eq!(keeper.bytes(), 7);
    drop(answer);
    wait_for_room(&keeper);
    assert!(!folder.exists());
}

#[test]
fn nobody_waits_until_something_is_gone() {
    let mut keeper = keeper(State::Resting);
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let disk = std::sync::Arc::new(std::sync::Mutex::new(disk));
    while !keeper.aside.is_full() {
        let disk = disk.clone();
        keeper.aside.go(10, move || _ = disk.lock().unwrap().recv());
    }
    assert_eq!(keeper.bytes(), 80, "until it is gone it takes room");
    drop(answer);
    wait_for_room(&keeper);
    assert!(!keeper.aside.is_full());
}

#[test]
fn a_rank_does_not_stand_still_for_a_folder_that_does_not_come() {
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let folder = std::env::temp_dir().join(format!("landbridge-place-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let place = Place { folder: folder.clone(), shared: Vec::new() };
    let thread = std::thread::spawn(move || {
        let _ = disk.recv();
        Ok(place)
    });
    let (about, began) = (About::default(), Instant::now());
    let mut keeper = keeper(State::Preparing { thread, about, began });
    keeper.expected = 7;
    assert!(keeper.is_busy() && keeper.bytes() == 7);
    assert!(keeper.next_time().is_some_and(|time| time <= Instant::now() + SHORT_GLANCE));
    let began = Instant::now();
    keeper.end_life();
    assert!(began.elapsed() < SEALED_WITHIN && !keeper.is_busy() && keeper.bytes() == 7);
    drop(answer);
    wait_for_room(&keeper);
    assert!(!folder.exists());
}

#[test]
fn who_reads_much_of_clocks_gets_its_image_sooner() {
    let mut keeper = keeper(State::Resting);
    let now = keeper.glance;
    keeper.due = now + Duration::from_secs(600);
    assert_eq!(keeper.next_time(), Some(now));
    assert!(!keeper.is_due(|| READ_MAX, now), "not so much yet");
    assert!(!keeper.is_due(|| READ_MAX + 1, now), "nobody looks all the time");
    add_images(&mut keeper, 1..=1);
    keeper.images[0].about.standing.clocks = 1000;
    keeper.due = now + Duration::from_secs(600);
    assert!(!keeper.is_due(|| READ_MAX + 1000, now + READS_GLANCE), "since its last image");
    assert!(keeper.is_due(|| READ_MAX + 1001, now + 2 * READS_GLANCE));
    keeper.failures = FAILURES_MAX;
    assert!(!keeper.is_due(|| u64::MAX, now + 9 * READS_GLANCE));
}
