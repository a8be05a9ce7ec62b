//! Work in the folder of checkpoint images, done by threads: the folder may lie on a file system
//! that does not answer for an unbounded time, and the agent must send its keepalives meanwhile.
//!
//! In: folders, processes that stand still. Out: a folder for an image, a sealed image, deleted
//! folders. The bytes of a folder count as used until the folder is deleted.
//!
//! What may never happen: [`REMOVALS_MAX`] threads of a rank wait for the disk to delete something,
//! and another image of the rank is begun.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result, bail};

use super::super::image_logs::LogsToCopy;
use super::DUMP_MAX;
use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::{self, CheckpointImage, ImageHeader};
use crate::checkpoint::criu::{self, DUMP_LOG};

/// Deletions in progress at which no further image of the rank is begun.
const REMOVALS_MAX: usize = 8;

pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work)
}

/// The folder into which an image is to be taken.
pub struct ImageFolder {
    pub folder: PathBuf,
    /// Paths of files in `/dev/shm` that are copied into the folder.
    pub shared: Vec<String>,
}

impl ImageFolder {
    /// Makes the folder for image `number` of this process, which stands still. `logs`: what else
    /// the image is to hold.
    pub fn prepare(
        rank: &Path,
        (number, pid): (u64, u32),
        logs: Option<LogsToCopy>,
    ) -> Result<ImageFolder> {
        let folder = checkpoint_image::begin(rank, number)?;
        let logs = logs.map_or(Ok(()), |logs| logs.write(&folder));
        match logs.and_then(|()| checkpoint_image::copy_shared(pid, &folder)) {
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

/// A whole image.
pub struct SealedImage {
    pub image: CheckpointImage,
    /// Nodes that may need the image and do not see its folder.
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

/// The reason why CRIU has taken no image; deletes what CRIU has left. `copies`: children of the
/// process that were forked and run no program of their own.
pub fn dump_failure(folder: &Path, is_late: bool, copies: usize) -> Result<SealedImage> {
    let why = criu::last_error(&folder.join(DUMP_LOG));
    let _ = std::fs::remove_dir_all(folder);
    match copies {
        _ if is_late => bail!("CRIU had not finished it after {} s", DUMP_MAX.as_secs()),
        0 => bail!("CRIU could not take it: {why}"),
        _ => bail!(
            "CRIU could not take it: {why}; {copies} of its children were forked and run no \
             program of their own: they hold its connections, which no checkpoint can hold"
        ),
    }
}

/// Deletions in progress, each with the most bytes that it frees.
#[derive(Default)]
pub struct BackgroundRemovals(Vec<(JoinHandle<()>, u64)>);

impl BackgroundRemovals {
    /// Starts a deletion. If no thread can be started, the files stay until the job ends.
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

    /// Waits until all deletions are done; returns whether there were any.
    pub fn wait(self) -> bool {
        let was_any = !self.0.is_empty();
        self.0.into_iter().for_each(|(thread, _)| drop(thread.join()));
        was_any
    }
}
