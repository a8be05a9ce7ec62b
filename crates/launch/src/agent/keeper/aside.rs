//! What is done in the folder of images, by threads: that may lie on a file system of which nobody answers for as long as it likes,
//! and the agent has to show all the while that it is there.
//!
//! In: folders, processes that stand still. Out: a folder for an image, an image that is sealed, nothing at all where something was to
//! go. What goes counts until it is gone.
//!
//! What may never happen: more than [`GOING_MAX`] threads of a rank wait for the disk to remove something, and another image of it is
//! begun.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result, bail};

use super::TAKING_MAX;
use crate::checkpoint::Wish;
use crate::checkpoint::criu::{self, DUMP_LOG};
use crate::checkpoint::store::{self, About, Image};

/// As long as so much of a rank's images is not gone that should be, none is begun.
const GOING_MAX: usize = 8;

pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work)
}

/// Where an image is to be taken.
pub struct Place {
    pub folder: PathBuf,
    /// Files in `/dev/shm` that lie there as well.
    pub shared: Vec<String>,
}

impl Place {
    /// For image `number` of this process, which stands still.
    pub fn prepare(rank: &Path, number: u64, pid: u32) -> Result<Place> {
        let folder = store::begin(rank, number)?;
        match store::copy_shared(pid, &folder) {
            Ok(shared) => Ok(Place { folder, shared }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(folder);
                Err(error)
            }
        }
    }

    pub fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// An image that is whole.
pub struct Sealed {
    pub image: Image,
    /// Nodes that may need it and do not see it where it lies.
    pub blind: Vec<u32>,
}

impl Sealed {
    pub fn seal(folder: &Path, about: About, wish: &Wish) -> Result<Sealed> {
        let prover = wish.prover.as_ref().context("the job has no key")?;
        let image = store::seal(folder, about, wish.level, prover);
        let image = image.context("it could not be written")?;
        Ok(Sealed { image, blind: wish.blind() })
    }
}

/// Why CRIU has taken no image there; what it has left goes. `copies`: children of the process that run no program of their own.
pub fn failure(folder: &Path, is_late: bool, copies: usize) -> Result<Sealed> {
    let why = criu::last_words(&folder.join(DUMP_LOG));
    let _ = std::fs::remove_dir_all(folder);
    match copies {
        _ if is_late => bail!("CRIU was not done with it after {} s", TAKING_MAX.as_secs()),
        0 => bail!("CRIU could not take it: {why}"),
        _ => bail!(
            "CRIU could not take it: {why}; {copies} of its children were forked and run no program of their own: they hold \
             its connections, which no image can have"
        ),
    }
}

/// What goes, with the bytes that it takes at most.
#[derive(Default)]
pub struct Aside(Vec<(JoinHandle<()>, u64)>);

impl Aside {
    /// Without a thread for it, it stays until the job ends.
    pub fn go(&mut self, bytes: u64, work: impl FnOnce() + Send + 'static) {
        self.0.retain(|(thread, _)| !thread.is_finished());
        self.0.extend(start("remove", work).ok().map(|thread| (thread, bytes)));
    }

    fn going(&self) -> impl Iterator<Item = u64> {
        self.0.iter().filter(|(thread, _)| !thread.is_finished()).map(|(_, bytes)| *bytes)
    }

    pub fn bytes(&self) -> u64 {
        self.going().sum()
    }

    pub fn is_full(&self) -> bool {
        self.going().count() >= GOING_MAX
    }

    /// Until all of it is gone. Whether there was anything.
    pub fn wait(self) -> bool {
        let was_any = !self.0.is_empty();
        self.0.into_iter().for_each(|(thread, _)| drop(thread.join()));
        was_any
    }
}
