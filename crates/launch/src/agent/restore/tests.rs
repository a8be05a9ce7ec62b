//! Tests of [`super`].

use crate::checkpoint::CheckpointConfig;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::super::pmi_replay::PmiReplay;
use super::super::rank::SharedMemory;
use super::*;
use crate::checkpoint::checkpoint_image::{ImageHeader, begin, seal_as_it_is};
use crate::checkpoint::manifest_authenticator::ManifestAuthenticator;

#[test]
fn what_was_not_to_be_had_just_now_may_be_whole() {
    let error = |kind| anyhow::Error::from(io::Error::from(kind)).context("an image");
    assert!(is_transient(&error(io::ErrorKind::StorageFull)));
    assert!(!is_transient(&error(io::ErrorKind::NotFound)));
    assert!(!is_transient(&anyhow::anyhow!("its checksum is another one")));
}

/// A folder with a program that the test runs instead of CRIU.
struct FakeCriu(PathBuf, #[expect(dead_code)] std::sync::MutexGuard<'static, ()>);

impl FakeCriu {
    fn new(name: &str, program: &str) -> FakeCriu {
        let alone = sys::children();
        let name = format!("landbridge-revive-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let tool = folder.join("criu");
        let program = format!("#!/bin/sh\ncd {}\n{program}\n", folder.display());
        fs::write(&tool, program).unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o700)).unwrap();
        FakeCriu(folder, alone)
    }

    /// A rank that has ended, with images 1 and 2.
    fn rank(&self) -> (LocalRank, Vec<CheckpointImage>) {
        let config =
            CheckpointConfig { tool: self.0.join("criu"), ..CheckpointConfig::sample(1, &self.0) };
        let mut scheduler = CheckpointScheduler::new(config, 2, 0, (0, 1));
        let images: Vec<_> = [1, 2].map(|number| image(&self.0, number)).into();
        images.iter().for_each(|image| scheduler.add(image.clone()));
        (ended(scheduler), images)
    }

    /// The images for which the program was called, in order.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.0.join("calls")).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }
}

impl Drop for FakeCriu {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Larger than any process id.
const NOBODY: u32 = 1 << 23;

fn ended(scheduler: CheckpointScheduler) -> LocalRank {
    let mut rank = LocalRank::vacant(2, None, SharedMemory::default());
    (rank.pid, rank.replay) = (NOBODY, Some(PmiReplay::new(Instant::now())));
    rank.scheduler = Some(scheduler);
    rank
}

/// Runs a restore of `old` to its end, as the agent does.
fn run_restore(old: &mut LocalRank, mut report: impl FnMut(String)) -> Option<(LocalRank, u64)> {
    let mut restore = Restore::begin(old, RestartCause::Moved, ImageSource::Own);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut context = RestoreContext { unrelated: &[], report: &mut report };
        match restore.advance(old, &mut context) {
            RestoreOutcome::Busy => (),
            RestoreOutcome::Restored(rank, number, _) => return Some((*rank, number)),
            RestoreOutcome::NoUsableImage => return None,
        }
        assert!(Instant::now() < deadline && restore.next_time() < deadline + RESTORE_TOTAL_MAX);
        if let Some(sys::Reaped { pid, ending, .. }) = restore.criu().and_then(sys::reap) {
            assert!(restore.note_exit(pid, ending));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn image(folder: &Path, number: u64) -> CheckpointImage {
    let folder = begin(&folder.join("job/rank-2"), number).unwrap();
    fs::write(folder.join("pages-1.img"), number.to_string()).unwrap();
    let header = ImageHeader { number, pid: NOBODY, ..ImageHeader::default() };
    seal_as_it_is(&folder, header, 0, &ManifestAuthenticator::sample(1)).unwrap()
}

/// Shell lines that append the image number of this call to the file `calls`.
const NOTE: &str =
    r#"for word; do case $word in */rank-2/*) echo ${word##*/} >> calls; esac; done"#;

#[test]
fn what_cannot_be_restored_is_tried_again_and_stays() {
    let place = FakeCriu::new("fails", &format!("{NOTE}\nexit 1"));
    let (mut rank, images) = place.rank();
    let mut notes = Vec::new();
    assert!(run_restore(&mut rank, |text| notes.push(text)).is_none());
    // The process id of the last one may be free soon.
    assert_eq!(place.calls(), ["2", "2", "1", "1", "1", "1", "1", "1"]);
    images.iter().for_each(|image| drop(image.unpack().unwrap()));
    // Each attempt takes an incarnation number, and the next incarnation takes another one.
    assert_eq!(rank.replay.as_ref().unwrap().restarts, 8);
    assert_eq!(notes.len(), 8);
    // The next restore finds both images.
    assert!(run_restore(&mut rank, |_| ()).is_none());
    assert_eq!(place.calls().len(), 16);
}

#[test]
fn the_second_attempt_may_succeed() {
    let place = FakeCriu::new("second", &format!("{NOTE}\n[ $(wc -l < calls) -eq 2 ]"));
    let (mut rank, _) = place.rank();
    let (revived, number) = run_restore(&mut rank, |_| ()).unwrap();
    assert_eq!((number, revived.pid), (2, NOBODY));
    assert_eq!(revived.replay.as_ref().unwrap().restarts, 1);
    assert_eq!(revived.scheduler.unwrap().images.newest_first().len(), 2);
}

#[test]
fn the_last_image_is_tried_for_some_seconds() {
    let place = FakeCriu::new("last", &format!("{NOTE}\n[ $(wc -l < calls) -eq 7 ]"));
    let (mut rank, _) = place.rank();
    let begin = Instant::now();
    let (revived, number) = run_restore(&mut rank, |_| ()).unwrap();
    assert_eq!((number, revived.replay.as_ref().unwrap().restarts), (1, 6));
    assert!(begin.elapsed() > Duration::from_secs(1));
}

#[test]
fn what_is_torn_is_deleted_and_nobody_tries_it() {
    let place = FakeCriu::new("torn", NOTE);
    let (mut rank, images) = place.rank();
    fs::write(images[1].folder.join("pages-1.img"), "x").unwrap();
    let (revived, number) = run_restore(&mut rank, |_| ()).unwrap();
    assert_eq!((number, place.calls()), (1, vec!["1".to_string()]));
    assert!(!images[1].folder.exists());
    assert_eq!(revived.scheduler.unwrap().images.newest_first(), images[..1]);
}

#[test]
fn processes_of_earlier_incarnations_are_killed_before_an_attempt() {
    let place = FakeCriu::new("leaves", &format!("{NOTE}\nexit 1"));
    let (mut rank, _) = place.rank();
    // The child ends and stays a zombie, so its process id is not free.
    #[expect(clippy::zombie_processes)]
    let child = std::process::Command::new("true").spawn().unwrap();
    rank.pid = child.id();
    run_restore(&mut rank, |_| ());
    assert!(!Path::new(&format!("/proc/{}", child.id())).exists());
}

#[test]
fn what_does_not_answer_is_not_waited_for() {
    let place = FakeCriu::new("late", "exec sleep 60");
    let (mut rank, _) = place.rank();
    let mut notes = Vec::new();
    let mut report = |text| notes.push(text);
    let mut restore = Restore::begin(&mut rank, RestartCause::Moved, ImageSource::Own);
    // An object store that does not answer.
    let image = rank.scheduler.as_ref().unwrap().images.newest_first().remove(0);
    let (hold, wait) = std::sync::mpsc::channel::<()>();
    let thread = in_thread(move || wait.recv().map_err(Into::into).and_then(|()| bail!("no")));
    let (image, thread) = (Box::new(image), thread.unwrap());
    restore.step = RestoreStep::Unpacking { image, attempt: 1, thread };
    let mut context = RestoreContext { unrelated: &[], report: &mut report };
    assert!(matches!(restore.advance(&mut rank, &mut context), RestoreOutcome::Busy));
    restore.deadline = Instant::now();
    while !matches!(restore.advance(&mut rank, &mut context), RestoreOutcome::NoUsableImage) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(notes[0].contains("could not be read within"), "{notes:?}");
    assert_eq!(rank.scheduler.unwrap().images.newest_first().len(), 2, "they may be whole");
    drop(hold);
}

#[test]
fn images_of_another_node_are_located_and_missing_ones_reported() {
    let place = FakeCriu::new("found", NOTE);
    let (rank, images) = place.rank();
    drop(rank);
    let config =
        CheckpointConfig { tool: place.0.join("criu"), ..CheckpointConfig::sample(1, &place.0) };
    let mut rank = ended(CheckpointScheduler::new(config, 2, 1, (0, 1)));
    let mut known: Vec<CheckpointLocation> = images.iter().map(CheckpointImage::location).collect();
    fs::remove_dir_all(&images[1].folder).unwrap();
    known[1].path = "rank-2/2".into();
    let mut notes = Vec::new();
    let mut report = |text| notes.push(text);
    let mut restore = Restore::begin(&mut rank, RestartCause::Moved, ImageSource::Located(known));
    let mut context = RestoreContext { unrelated: &[], report: &mut report };
    loop {
        match restore.advance(&mut rank, &mut context) {
            RestoreOutcome::Restored(_, number, _) => break assert_eq!(number, 1),
            RestoreOutcome::NoUsableImage => panic!("the older one is there"),
            RestoreOutcome::Busy => (),
        }
        if let Some(sys::Reaped { pid, ending, .. }) = restore.criu().and_then(sys::reap) {
            restore.note_exit(pid, ending);
        }
    }
    assert!(notes.len() == 1 && notes[0].contains("rank-2/2"), "{notes:?}");
}
