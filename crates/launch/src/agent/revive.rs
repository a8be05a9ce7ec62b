//! Brings a rank whose process has ended back from its images.
//!
//! In: what the last start has left, with its images. Out: a process of the newest image that serves. An image that is torn is
//! deleted. One that is whole and of which no process can be made (there is no memory just now, its process id is taken) is tried
//! once more, then the one before; it stays, and may serve the next time.
//!
//! What may never happen: two attempts are the same start of the rank, for what is left of the first may have taken its
//! record; a process of a failed attempt goes on beside the rank.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::keeper::Keeper;
use super::rank::LocalRank;
use crate::checkpoint::remote::Remote;
use crate::checkpoint::store::{Image, Layout};
use crate::sys;

/// Attempts at an image.
const TRIALS: u32 = 2;
/// For so long CRIU may work at one.
const RESTORE_MAX: Duration = Duration::from_secs(60);
/// And at all of them: the agent does nothing else meanwhile, and must not be taken for dead (`SILENCE_MAX`).
const ALL_MAX: Duration = Duration::from_secs(100);
/// So long it may take until the processes of an earlier start are gone, which are killed.
const ROOM_MAX: Duration = Duration::from_secs(1);

/// The rank's next start and the number of its image; `None` if there is none that serves. `spared`: processes that have nothing
/// to do with it. Each failure is told.
pub fn revive(
    old: &mut LocalRank,
    spared: &[u32],
    mut tell: impl FnMut(String),
) -> Option<(LocalRank, u64)> {
    old.keeper.as_mut()?.end_life();
    // What the last start had started holds numbers of processes that are in its images as well.
    sys::end_session(old.pid, spared, ROOM_MAX);
    let deadline = Instant::now() + ALL_MAX;
    let (tool, rank) = (old.keeper.as_ref()?.tool(), old.rank);
    for image in old.keeper.as_ref()?.newest_first() {
        let (number, pid) = (image.about.number, image.about.pid);
        let name = format!("checkpoint {number} of rank {rank}");
        let remote = old.keeper.as_ref().and_then(Keeper::remote);
        let layout = match image.lay_out().or_else(|error| fetched(&image, remote, deadline, error))
        {
            Ok(layout) => layout,
            Err(error) => {
                old.keeper.iter_mut().for_each(|keeper| keeper.drop_image(number));
                tell(format!("{name} cannot be used: {error:#}"));
                continue;
            }
        };
        for trial in 1..=TRIALS {
            let limit = RESTORE_MAX.min(deadline.saturating_duration_since(Instant::now()));
            let began = Instant::now();
            sys::end_session(pid, spared, ROOM_MAX);
            let error = match LocalRank::restore(old, &image, &layout, &tool, limit) {
                Ok(rank) => return Some((rank, number)),
                Err(error) => error,
            };
            sys::end_session(pid, spared, ROOM_MAX);
            old.again.iter_mut().for_each(|again| again.try_anew());
            old.clocks.iter().for_each(|clocks| _ = clocks.rest());
            // What has taken so long would do so again.
            if trial < TRIALS && began.elapsed() < limit {
                tell(format!("{name} is tried once more: {error:#}"));
                continue;
            }
            tell(format!("{name} cannot be used: {error:#}"));
            break;
        }
    }
    None
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::checkpoint::Wish;
    use crate::checkpoint::store::{About, begin, seal_as_it_is};

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
            let (tool, folder) = (self.0.join("criu"), self.0.clone());
            let wish = Wish { tool, folder, ..Wish::sample(1) };
            let mut keeper = Keeper::new(wish, "job", 2, (0, 1));
            let images: Vec<_> = [1, 2].map(|number| image(&self.0, number)).into();
            images.iter().for_each(|image| keeper.add(image.clone()));
            (LocalRank::ended(NOBODY, keeper), images)
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

    fn image(folder: &Path, number: u64) -> Image {
        let folder = begin(&folder.join("job/rank-2"), number).unwrap();
        fs::write(folder.join("pages-1.img"), number.to_string()).unwrap();
        seal_as_it_is(&folder, About { number, pid: NOBODY, ..About::default() }, 0).unwrap()
    }

    /// Puts down for which image it is called.
    const NOTE: &str =
        r#"for word; do case $word in */rank-2/*) echo ${word##*/} >> calls; esac; done"#;

    #[test]
    fn what_cannot_be_restored_is_tried_again_and_stays() {
        let place = Place::new("fails", &format!("{NOTE}\nexit 1"));
        let (mut rank, images) = place.rank();
        let mut told = Vec::new();
        assert!(revive(&mut rank, &[], |text| told.push(text)).is_none());
        assert_eq!(place.calls(), ["2", "2", "1", "1"]);
        images.iter().for_each(|image| drop(image.lay_out().unwrap()));
        // Each attempt was another start, and so is what comes now.
        assert_eq!(rank.again.as_ref().unwrap().starts, 4);
        assert_eq!(told.len(), 4);
        // The next time all of them are there.
        assert!(revive(&mut rank, &[], |_| ()).is_none());
        assert_eq!(place.calls().len(), 8);
    }

    #[test]
    fn the_second_attempt_may_succeed() {
        let place = Place::new("second", &format!("{NOTE}\n[ $(wc -l < calls) -eq 2 ]"));
        let (mut rank, _) = place.rank();
        let (revived, number) = revive(&mut rank, &[], |_| ()).unwrap();
        assert_eq!((number, revived.pid), (2, NOBODY));
        assert_eq!(revived.again.as_ref().unwrap().starts, 1);
        assert_eq!(revived.keeper.unwrap().newest_first().len(), 2);
    }

    #[test]
    fn what_is_torn_is_deleted_and_nobody_tries_it() {
        let place = Place::new("torn", NOTE);
        let (mut rank, images) = place.rank();
        fs::write(images[1].folder.join("pages-1.img"), "x").unwrap();
        let (revived, number) = revive(&mut rank, &[], |_| ()).unwrap();
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
        revive(&mut rank, &[], |_| ());
        assert!(!Path::new(&format!("/proc/{}", child.id())).exists());
    }
}
