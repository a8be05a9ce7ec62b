//! Brings a rank whose process has ended back from its images, while its agent goes on with everything else.
//!
//! | it | until |
//! |---|---|
//! | waits | the image that was being written is whole |
//! | finds | a thread has found the images that another node has taken |
//! | lays out | one has made room for the process, and laid out the next image, fetched if need be |
//! | makes | CRIU has made a process of it, or was ended because it had not |
//! | clears | a thread has ended what failed attempts have left |
//!
//! In: what the last start has left, with its images; ends of processes; the time. Out: a process of the newest image that serves,
//! or nothing. An image that is torn is deleted. One that is whole and of which no process can be made (there is no memory just now,
//! its process id is taken) is tried once more, then the one before; it stays, and may serve the next time.
//!
//! What may never happen: two attempts are the same start of the rank, for what is left of the first may have taken its
//! record; a process of a failed attempt goes on beside the rank; a store or a file system that does not answer is waited for
//! without an end.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::keeper::Keeper;
use super::rank::LocalRank;
use super::{Agent, Phase};
use crate::checkpoint::Wish;
use crate::checkpoint::criu;
use crate::checkpoint::remote::Remote;
use crate::checkpoint::store::{Image, Layout};
use crate::control::moved::Whereabouts;
use crate::control::{Ending, Message};
use crate::sys;

/// Attempts at an image.
const TRIALS: u32 = 2;
/// For so long CRIU may work at one.
const RESTORE_MAX: Duration = Duration::from_secs(60);
/// And all of it may take so long: half of what a relay waits for one that has been started.
const ALL_MAX: Duration = Duration::from_secs(300);
/// So long it may take until the processes of an earlier start are gone, which are killed.
const ROOM_MAX: Duration = Duration::from_secs(1);
/// Between two glances at a thread.
const GLANCE: Duration = Duration::from_millis(5);

/// See the module head.
pub struct Revival {
    /// How the last start has ended, as the user reads it; of a rank that comes from another node that was said.
    how: Option<String>,
    deadline: Instant,
    /// Newest first.
    left: VecDeque<Image>,
    /// Of what was started of the rank until now.
    pids: Vec<u32>,
    step: Step,
}

enum Step {
    /// Decides what is next.
    Next,
    Waiting,
    Finding(JoinHandle<Vec<Result<Image>>>),
    LayingOut {
        image: Box<Image>,
        trial: u32,
        thread: JoinHandle<Result<Layout>>,
    },
    Making(Box<Making>),
    Clearing(JoinHandle<bool>),
}

/// CRIU is at work.
struct Making {
    image: Image,
    trial: u32,
    layout: Layout,
    rank: LocalRank,
    criu: u32,
    began: Instant,
    limit: Duration,
    ended: Option<Ending>,
    is_late: bool,
    /// The process that it has made has ended already.
    early: Option<Ending>,
}

/// What has come of it.
pub enum Outcome {
    Busy,
    /// The next start of the rank, which has ended so if it has; the number of its image.
    Back(Box<LocalRank>, u64, Option<Ending>),
    /// There is none that serves.
    Nothing,
}

/// What is said to the user, and the processes that have nothing to do with the rank.
pub struct Around<'a> {
    pub spared: &'a [u32],
    pub tell: &'a mut dyn FnMut(String),
}

impl Revival {
    /// `told`: images that another node has taken, oldest first.
    pub fn begin(old: &mut LocalRank, how: Option<String>, told: &[Whereabouts]) -> Revival {
        let deadline = Instant::now() + ALL_MAX;
        let mut step = Step::Waiting;
        if let Some(keeper) = old.keeper.as_mut().filter(|keeper| !keeper.is_sealing()) {
            keeper.end_life();
        }
        if let Some(keeper) = old.keeper.as_ref().filter(|_| !told.is_empty()) {
            let (wish, told) = (keeper.wish().clone(), told.to_vec());
            step = in_thread(move || find_all(&told, &wish, deadline))
                .map_or(Step::Next, Step::Finding);
        }
        // What the last start had started holds numbers of processes that are in its images as well.
        let pids = Vec::from_iter((old.pid > 0).then_some(old.pid));
        Revival { how, deadline, left: VecDeque::new(), pids, step }
    }

    /// When to look at it again, if no process ends before.
    pub fn next_time(&self) -> Instant {
        match &self.step {
            Step::Making(it) if it.ended.is_none() && !it.is_late => it.began + it.limit,
            Step::Making(it) if it.ended.is_none() => Instant::now() + ROOM_MAX,
            _ => Instant::now() + GLANCE,
        }
    }

    /// CRIU has ended, or what it has made, if that was this process.
    pub fn note_end(&mut self, pid: u32, ending: Ending) -> bool {
        let Step::Making(it) = &mut self.step else { return false };
        let place = match pid {
            _ if pid == it.criu => &mut it.ended,
            _ if pid == it.rank.pid => &mut it.early,
            _ => return false,
        };
        *place = Some(ending);
        true
    }

    /// CRIU, while it is at work.
    fn criu(&self) -> Option<u32> {
        match &self.step {
            Step::Making(it) if it.ended.is_none() => Some(it.criu),
            _ => None,
        }
    }

    /// Nobody comes back any more.
    pub fn stop(self) {
        if let Some(criu) = self.criu() {
            sys::kill(criu, libc::SIGKILL);
        }
    }

    /// Goes on as far as that is possible without waiting.
    pub fn advance(&mut self, old: &mut LocalRank, around: &mut Around) -> Outcome {
        loop {
            let is_late = Instant::now() >= self.deadline;
            match std::mem::replace(&mut self.step, Step::Next) {
                Step::Waiting
                    if old.keeper.as_ref().is_some_and(Keeper::is_sealing) && !is_late =>
                {
                    self.step = Step::Waiting;
                    return Outcome::Busy;
                }
                Step::Waiting => {
                    old.keeper.iter_mut().for_each(Keeper::end_life);
                    self.left.extend(old.keeper.iter().flat_map(Keeper::newest_first));
                }
                Step::Finding(thread) if thread.is_finished() || is_late => {
                    self.take_found(old, thread, around);
                }
                Step::LayingOut { image, trial, thread } if thread.is_finished() || is_late => {
                    self.make(old, (*image, trial), thread, around);
                }
                Step::Making(it) if it.ended.is_some() => {
                    if let Some(back) = self.judge(old, *it, around) {
                        return back;
                    }
                }
                Step::Clearing(thread) if thread.is_finished() => return Outcome::Nothing,
                Step::Next => match self.left.pop_front() {
                    Some(image) if !is_late => self.lay_out(old, image, 1, None, around),
                    // Without a thread for it, later.
                    _ => self.step = self.clear(around).map_or(Step::Next, Step::Clearing),
                },
                mut other => {
                    if let Step::Making(it) = &mut other {
                        it.end_late();
                    }
                    self.step = other;
                    return Outcome::Busy;
                }
            }
        }
    }

    fn take_found(
        &mut self,
        old: &mut LocalRank,
        thread: JoinHandle<Vec<Result<Image>>>,
        around: &mut Around,
    ) {
        let found = if thread.is_finished() { thread.join().ok() } else { None };
        let late = || vec![Err(anyhow::anyhow!("they were not found in time"))];
        for outcome in found.unwrap_or_else(late) {
            match outcome {
                Ok(image) => old.keeper.iter_mut().for_each(|keeper| keeper.add(image.clone())),
                Err(error) => {
                    let rank = old.rank;
                    (around.tell)(format!(
                        "a checkpoint of rank {rank} that the lost node has taken cannot be had here: {error:#}"
                    ));
                }
            }
        }
        self.left.extend(old.keeper.iter().flat_map(Keeper::newest_first));
    }

    /// Makes room for a process of this image, and lays it out.
    fn lay_out(
        &mut self,
        old: &LocalRank,
        image: Image,
        trial: u32,
        layout: Option<Layout>,
        around: &mut Around,
    ) {
        if !self.pids.contains(&image.about.pid) {
            self.pids.push(image.about.pid);
        }
        let (pids, spared, deadline) = (self.pids.clone(), around.spared.to_vec(), self.deadline);
        let remote = old.keeper.as_ref().and_then(Keeper::remote);
        let theirs = image.clone();
        let thread = in_thread(move || {
            pids.iter().for_each(|&pid| _ = sys::end_session(pid, &spared, ROOM_MAX));
            match layout {
                Some(layout) => Ok(layout),
                None => theirs.lay_out().or_else(|error| fetched(&theirs, remote, deadline, error)),
            }
        });
        if let Some(thread) = thread {
            self.step = Step::LayingOut { image: Box::new(image), trial, thread };
        }
    }

    /// What is left of failed attempts ends.
    fn clear(&self, around: &mut Around) -> Option<JoinHandle<bool>> {
        let (pids, spared) = (self.pids.clone(), around.spared.to_vec());
        in_thread(move || pids.iter().all(|&pid| sys::end_session(pid, &spared, ROOM_MAX)))
    }

    /// CRIU begins with what was laid out.
    fn make(
        &mut self,
        old: &mut LocalRank,
        (image, trial): (Image, u32),
        thread: JoinHandle<Result<Layout>>,
        around: &mut Around,
    ) {
        let laid = match thread.is_finished() {
            true => thread.join().unwrap_or_else(|_| bail!("it could not be laid out")),
            false => Err(anyhow::anyhow!("it could not be had in {} s", ALL_MAX.as_secs())),
        };
        let number = image.about.number;
        let layout = match laid {
            Ok(layout) => layout,
            Err(error) => {
                // Who comes too late may be whole, and who could not be had just now.
                if Instant::now() < self.deadline && !is_passing(&error) {
                    old.keeper.iter_mut().for_each(|keeper| keeper.drop_image(number));
                }
                return (around.tell)(format!("{} cannot be used: {error:#}", name(old, number)));
            }
        };
        let began = Instant::now();
        let limit = RESTORE_MAX.min(self.deadline.saturating_duration_since(began));
        match old.begin_restore(&image, &layout) {
            Ok((rank, criu)) => {
                let (ended, is_late, early) = (None, false, None);
                let making = Making {
                    image,
                    trial,
                    layout,
                    rank,
                    criu,
                    began,
                    limit,
                    ended,
                    is_late,
                    early,
                };
                self.step = Step::Making(Box::new(making));
            }
            Err(error) => self.fail(old, image, trial, layout, (error, false), around),
        }
    }

    /// CRIU has ended.
    fn judge(&mut self, old: &mut LocalRank, it: Making, around: &mut Around) -> Option<Outcome> {
        let Making { image, trial, layout, rank, limit, ended, is_late, early, .. } = it;
        if ended == Some(Ending::Exited(0)) {
            let number = image.about.number;
            let rank = rank.take_over(old, &image.about.standing);
            return Some(Outcome::Back(Box::new(rank), number, early));
        }
        let error = match is_late {
            true => anyhow::anyhow!("CRIU was not done with it after {:.1} s", limit.as_secs_f64()),
            false => criu::restore_error(&layout.folder),
        };
        self.fail(old, image, trial, layout, (error, is_late), around);
        None
    }

    /// No process could be made of an image. What has taken so long would do so again.
    fn fail(
        &mut self,
        old: &mut LocalRank,
        image: Image,
        trial: u32,
        layout: Layout,
        (error, is_late): (anyhow::Error, bool),
        around: &mut Around,
    ) {
        old.again.iter_mut().for_each(|again| again.try_anew());
        old.clocks.iter().for_each(|clocks| _ = clocks.rest());
        let name = name(old, image.about.number);
        if trial < TRIALS && !is_late {
            (around.tell)(format!("{name} is tried once more: {error:#}"));
            return self.lay_out(old, image, trial + 1, Some(layout), around);
        }
        (around.tell)(format!("{name} cannot be used: {error:#}"));
    }
}

impl Making {
    fn end_late(&mut self) {
        if !self.is_late && self.began.elapsed() >= self.limit {
            self.is_late = true;
            sys::kill(self.criu, libc::SIGKILL);
        }
    }
}

fn name(rank: &LocalRank, number: u64) -> String {
    format!("checkpoint {number} of rank {}", rank.rank)
}

fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<JoinHandle<T>> {
    std::thread::Builder::new().name("revive".into()).spawn(work).ok()
}

/// Whether the image may be whole for all that: the disk was full, or the store did not answer.
fn is_passing(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
    error.chain().any(|cause| match cause.downcast_ref::<io::Error>() {
        Some(cause) => !matches!(cause.kind(), InvalidData | NotFound | UnexpectedEof),
        None => cause.is::<ureq::Error>(),
    })
}

/// What the node has lost, or what is damaged there, the store may have.
fn fetched(
    image: &Image,
    remote: Option<Remote>,
    deadline: Instant,
    error: anyhow::Error,
) -> Result<Layout> {
    let Some(remote) = remote else { return Err(error) };
    let outcome = remote.get(image, deadline).and_then(|()| image.lay_out());
    outcome.with_context(|| format!("{error:#}, and the store does not help"))
}

/// The images that another node has taken, in a folder that this one sees as well, or in the store.
fn find_all(told: &[Whereabouts], wish: &Wish, deadline: Instant) -> Vec<Result<Image>> {
    let remote = wish.remote.as_ref().map(Remote::anew);
    let find = |one: &Whereabouts| {
        let prover = wish.prover.as_ref().context("the job has no key")?;
        let folder: PathBuf = wish.place.join(&one.place);
        Image::find(folder.clone(), &one.sum, prover).or_else(|error| match &remote {
            Some(remote) => remote.find(folder, &one.sum, prover, deadline),
            None => Err(error),
        })
    };
    told.iter().map(|one| find(one).with_context(|| one.place.clone())).collect()
}

impl Agent {
    /// CRIU, or what it has made of an image, has ended.
    pub(super) fn note_return(&mut self, pid: u32, ending: Ending) -> bool {
        let mut revivals = self.ranks.iter_mut().filter_map(|rank| rank.revival.as_mut());
        revivals.any(|revival| revival.note_end(pid, ending))
    }

    /// Goes on with those who are brought back from their images.
    pub(super) fn advance_returns(&mut self) {
        for index in 0..self.ranks.len() {
            let Some(mut revival) = self.ranks[index].revival.take() else { continue };
            if self.phase != Phase::Working {
                revival.stop();
                self.unreported.push(index);
                continue;
            }
            let spared = self.spared();
            let (old, parent) = (&mut self.ranks[index], &mut self.parent);
            let mut tell = |text| parent.send(&Message::Note { text });
            let mut around = Around { spared: &spared, tell: &mut tell };
            match revival.advance(old, &mut around) {
                Outcome::Busy => self.ranks[index].revival = Some(revival),
                Outcome::Back(rank, image, early) => {
                    self.put_in_place(index, *rank);
                    self.tell_start(index, revival.how.as_deref(), Ok(Some(image)));
                    if let Some(ending) = early {
                        self.handle_ending(index, ending);
                    }
                }
                Outcome::Nothing => {
                    let outcome = self.begin_with_program(index).map(|()| None);
                    if !self.tell_start(index, revival.how.as_deref(), outcome) {
                        self.unreported.push(index);
                    }
                }
            }
        }
    }

    /// Processes that have nothing to do with a rank that has ended.
    fn spared(&self) -> Vec<u32> {
        let mut spared = self.own_processes();
        for rank in &self.ranks {
            spared.extend(rank.ending.is_none().then_some(rank.pid));
            spared.extend(rank.keeper.as_ref().and_then(Keeper::criu));
            spared.extend(rank.revival.as_ref().and_then(Revival::criu));
        }
        spared
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};

    use super::super::again::Again;
    use super::*;
    use crate::checkpoint::proof::Prover;
    use crate::checkpoint::store::{About, begin, seal_as_it_is};

    #[test]
    fn what_was_not_to_be_had_just_now_may_be_whole() {
        let error = |kind| anyhow::Error::from(io::Error::from(kind)).context("an image");
        assert!(is_passing(&error(io::ErrorKind::StorageFull)));
        assert!(!is_passing(&error(io::ErrorKind::NotFound)));
        assert!(!is_passing(&anyhow::anyhow!("its checksum is another one")));
    }

    /// A folder with a program in it that is run instead of CRIU.
    struct Place(PathBuf, #[expect(dead_code)] std::sync::MutexGuard<'static, ()>);

    impl Place {
        fn new(name: &str, program: &str) -> Place {
            let alone = sys::children();
            let name = format!("landbridge-revive-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir(&folder).unwrap();
            let tool = folder.join("criu");
            let program = format!("#!/bin/sh\ncd {}\n{program}\n", folder.display());
            fs::write(&tool, program).unwrap();
            fs::set_permissions(&tool, fs::Permissions::from_mode(0o700)).unwrap();
            Place(folder, alone)
        }

        /// A rank that has ended, with images 1 and 2.
        fn rank(&self) -> (LocalRank, Vec<Image>) {
            let wish = Wish { tool: self.0.join("criu"), ..Wish::sample(1, &self.0) };
            let mut keeper = Keeper::new(wish, 2, 0, (0, 1));
            let images: Vec<_> = [1, 2].map(|number| image(&self.0, number)).into();
            images.iter().for_each(|image| keeper.add(image.clone()));
            (ended(keeper), images)
        }

        /// What the program was called for.
        fn calls(&self) -> Vec<String> {
            let text = fs::read_to_string(self.0.join("calls")).unwrap_or_default();
            text.lines().map(str::to_string).collect()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Larger than any number of a process.
    const NOBODY: u32 = 1 << 23;

    fn ended(keeper: Keeper) -> LocalRank {
        let mut rank = LocalRank::vacant(2, None, None);
        (rank.pid, rank.again) = (NOBODY, Some(Again::new(Instant::now())));
        rank.keeper = Some(keeper);
        rank
    }

    /// Brings it back, or not, as its agent would.
    fn revive(old: &mut LocalRank, mut tell: impl FnMut(String)) -> Option<(LocalRank, u64)> {
        let mut revival = Revival::begin(old, None, &[]);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut around = Around { spared: &[], tell: &mut tell };
            match revival.advance(old, &mut around) {
                Outcome::Busy => (),
                Outcome::Back(rank, number, _) => return Some((*rank, number)),
                Outcome::Nothing => return None,
            }
            assert!(Instant::now() < deadline && revival.next_time() < deadline + ALL_MAX);
            if let Some((pid, ending)) = revival.criu().and_then(sys::reap) {
                assert!(revival.note_end(pid, ending));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn image(folder: &Path, number: u64) -> Image {
        let folder = begin(&folder.join("job/rank-2"), number).unwrap();
        fs::write(folder.join("pages-1.img"), number.to_string()).unwrap();
        let about = About { number, pid: NOBODY, ..About::default() };
        seal_as_it_is(&folder, about, 0, &Prover::sample(1)).unwrap()
    }

    /// Puts down for which image it is called.
    const NOTE: &str =
        r#"for word; do case $word in */rank-2/*) echo ${word##*/} >> calls; esac; done"#;

    #[test]
    fn what_cannot_be_restored_is_tried_again_and_stays() {
        let place = Place::new("fails", &format!("{NOTE}\nexit 1"));
        let (mut rank, images) = place.rank();
        let mut told = Vec::new();
        assert!(revive(&mut rank, |text| told.push(text)).is_none());
        assert_eq!(place.calls(), ["2", "2", "1", "1"]);
        images.iter().for_each(|image| drop(image.lay_out().unwrap()));
        // Each attempt was another start, and so is what comes now.
        assert_eq!(rank.again.as_ref().unwrap().starts, 4);
        assert_eq!(told.len(), 4);
        // The next time all of them are there.
        assert!(revive(&mut rank, |_| ()).is_none());
        assert_eq!(place.calls().len(), 8);
    }

    #[test]
    fn the_second_attempt_may_succeed() {
        let place = Place::new("second", &format!("{NOTE}\n[ $(wc -l < calls) -eq 2 ]"));
        let (mut rank, _) = place.rank();
        let (revived, number) = revive(&mut rank, |_| ()).unwrap();
        assert_eq!((number, revived.pid), (2, NOBODY));
        assert_eq!(revived.again.as_ref().unwrap().starts, 1);
        assert_eq!(revived.keeper.unwrap().newest_first().len(), 2);
    }

    #[test]
    fn what_is_torn_is_deleted_and_nobody_tries_it() {
        let place = Place::new("torn", NOTE);
        let (mut rank, images) = place.rank();
        fs::write(images[1].folder.join("pages-1.img"), "x").unwrap();
        let (revived, number) = revive(&mut rank, |_| ()).unwrap();
        assert_eq!((number, place.calls()), (1, vec!["1".to_string()]));
        assert!(!images[1].folder.exists());
        assert_eq!(revived.keeper.unwrap().newest_first(), images[..1]);
    }

    #[test]
    fn what_earlier_starts_have_left_goes_before_an_attempt() {
        let place = Place::new("leaves", &format!("{NOTE}\nexit 1"));
        let (mut rank, _) = place.rank();
        // It ends, and nobody waits for it: its number is not free.
        #[expect(clippy::zombie_processes)]
        let child = std::process::Command::new("true").spawn().unwrap();
        rank.pid = child.id();
        revive(&mut rank, |_| ());
        assert!(!Path::new(&format!("/proc/{}", child.id())).exists());
    }

    #[test]
    fn what_does_not_answer_is_not_waited_for() {
        let place = Place::new("late", "exec sleep 60");
        let (mut rank, _) = place.rank();
        let mut told = Vec::new();
        let mut tell = |text| told.push(text);
        let mut revival = Revival::begin(&mut rank, None, &[]);
        // A store that says nothing.
        let image = rank.keeper.as_ref().unwrap().newest_first().remove(0);
        let (hold, wait) = std::sync::mpsc::channel::<()>();
        let thread = in_thread(move || wait.recv().map_err(Into::into).and_then(|()| bail!("no")));
        let (image, thread) = (Box::new(image), thread.unwrap());
        revival.step = Step::LayingOut { image, trial: 1, thread };
        let mut around = Around { spared: &[], tell: &mut tell };
        assert!(matches!(revival.advance(&mut rank, &mut around), Outcome::Busy));
        revival.deadline = Instant::now();
        while !matches!(revival.advance(&mut rank, &mut around), Outcome::Nothing) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(told[0].contains("could not be had in"), "{told:?}");
        assert_eq!(rank.keeper.unwrap().newest_first().len(), 2, "they may be whole");
        drop(hold);
    }

    #[test]
    fn images_that_another_node_has_taken_are_found_and_others_are_told_of() {
        let place = Place::new("found", NOTE);
        let (rank, images) = place.rank();
        drop(rank);
        let wish = Wish { tool: place.0.join("criu"), ..Wish::sample(1, &place.0) };
        let mut rank = ended(Keeper::new(wish, 2, 1, (0, 1)));
        let mut known: Vec<Whereabouts> = images.iter().map(Image::whereabouts).collect();
        fs::remove_dir_all(&images[1].folder).unwrap();
        known[1].place = "rank-2/2".into();
        let mut told = Vec::new();
        let mut tell = |text| told.push(text);
        let mut revival = Revival::begin(&mut rank, None, &known);
        let mut around = Around { spared: &[], tell: &mut tell };
        loop {
            match revival.advance(&mut rank, &mut around) {
                Outcome::Back(_, number, _) => break assert_eq!(number, 1),
                Outcome::Nothing => panic!("the older one is there"),
                Outcome::Busy => (),
            }
            if let Some((pid, ending)) = revival.criu().and_then(sys::reap) {
                revival.note_end(pid, ending);
            }
        }
        assert!(told.len() == 1 && told[0].contains("rank-2/2"), "{told:?}");
    }
}
