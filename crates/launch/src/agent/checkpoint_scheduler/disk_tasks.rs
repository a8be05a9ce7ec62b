//! What is done in the folder of images, by threads: that may lie on a file system of which nobody answers for as long as it likes,
//! and the agent has to show all the while that it is there.
//!
//! In: folders, processes that stand still. Out: a folder for an image, an image that is sealed, nothing at all where something was to
//! go. What goes counts until it is gone.
//!
//! What may never happen: more than [`REMOVALS_MAX`] threads of a rank wait for the disk to remove something, and another image of it is
//! begun.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result, bail};

use super::DUMP_MAX;
use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::{self, CheckpointImage, ImageHeader};
use crate::checkpoint::criu::{self, DUMP_LOG};

/// As long as so much of a rank's images is not gone that should be, none is begun.
const REMOVALS_MAX: usize = 8;

pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work)
}

/// Where an image is to be taken.
pub struct ImageFolder {
    pub folder: PathBuf,
    /// Files in `/dev/shm` that lie there as well.
    pub shared: Vec<String>,
}

impl ImageFolder {
    /// For image `number` of this process, which stands still.
    pub fn prepare(rank: &Path, number: u64, pid: u32) -> Result<ImageFolder> {
        let folder = checkpoint_image::begin(rank, number)?;
        match checkpoint_image::copy_shared(pid, &folder) {
            Ok(shared) => Ok(ImageFolder { folder, shared }),
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
pub struct SealedImage {
    pub image: CheckpointImage,
    /// Nodes that may need it and do not see it where it lies.
    pub unreachable: Vec<u32>,
}

impl SealedImage {
    pub fn seal(
        folder: &Path,
        header: ImageHeader,
        config: &CheckpointConfig,
    ) -> Result<SealedImage> {
        let authenticator = config.authenticator.as_ref().context("the job has no key")?;
        let image = checkpoint_image::seal(folder, header, config.level, authenticator);
        let image = image.context("it could not be written")?;
        Ok(SealedImage { image, unreachable: config.unreachable_spares() })
    }
}

/// Why CRIU has taken no image there; what it has left goes. `copies`: children of the process that run no program of their own.
pub fn dump_failure(folder: &Path, is_late: bool, copies: usize) -> Result<SealedImage> {
    let why = criu::last_error(&folder.join(DUMP_LOG));
    let _ = std::fs::remove_dir_all(folder);
    match copies {
        _ if is_late => bail!("CRIU was not done with it after {} s", DUMP_MAX.as_secs()),
        0 => bail!("CRIU could not take it: {why}"),
        _ => bail!(
            "CRIU could not take it: {why}; {copies} of its children were forked and run no program of their own: they hold \
             its connections, which no image can have"
        ),
    }
}

/// What goes, with the bytes that it takes at most.
#[derive(Default)]
pub struct BackgroundRemovals(Vec<(JoinHandle<()>, u64)>);

impl BackgroundRemovals {
    /// Without a thread for it, it stays until the job ends.
    pub fn add(&mut self, bytes: u64, work: impl FnOnce() + Send + 'static) {
        self.0.retain(|(thread, _)| !thread.is_finished());
        self.0.extend(start("remove", work).ok().map(|thread| (thread, bytes)));
    }

    fn unfinished(&self) -> impl Iterator<Item = u64> {
        self.0.iter().filter(|(thread, _)| !thread.is_finished()).map(|(_, bytes)| *bytes)
    }

    pub fn bytes(&self) -> u64 {
        self.unfinished().sum()
    }

    pub fn is_full(&self) -> bool {
        self.unfinished().count() >= REMOVALS_MAX
    }

    /// Until all of it is gone. Whether there was anything.
    pub fn wait(self) -> bool {
        let was_any = !self.0.is_empty();
        self.0.into_iter().for_each(|(thread, _)| drop(thread.join()));
        was_any
    }
}
