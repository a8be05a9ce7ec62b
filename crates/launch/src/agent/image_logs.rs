//! What checkpoint images hold of the message logs of this node's ranks, and with which images
//! ranks of a lost node begin here ([`landbridge_proto::log::image_logs`]).
//!
//! In: the file of this node's logs, a rank that stands still for its image; images that another
//! node has taken. Out: a file in the folder of the image; images that fit together, and in the
//! file of this node what they hold of the logs.
//!
//! What may never happen: an image is said to be whole that has not all of its logs; two ranks of a
//! lost node begin with images that do not fit together.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use landbridge_proto::log::image_logs::{
    BegunLog, ImageLogs, LogStarts, NodeFile, UnfitImages, choose_images, lay_frames,
};
use landbridge_proto::log::layout::{begins_at, discarded_at, log_at};
use landbridge_proto::log::release::{LogPositions, PairPositions};
use landbridge_proto::log::segment::LogCursor;
use landbridge_proto::log::walk::ReadLog;
use rustix::io::{pread, pwrite};

use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::CheckpointImage;
use crate::checkpoint::object_store::ObjectStore;
use crate::control::rank_state::CheckpointLocation;

/// The name of the file in the folder of an image.
const FILE_NAME: &str = "message-logs";
/// How often the logs are read that other ranks write meanwhile.
const ATTEMPTS: u32 = 5;

/// What the image of a rank that stands still is to hold of its logs. As long as this lives,
/// nothing of the node's logs is released.
pub struct LogsToCopy {
    pub file: OwnedFd,
    pub rank: u32,
    pub positions: LogPositions,
    /// By rank: how far its logs to and from this rank had come in its newest image.
    pub newest: BTreeMap<usize, PairPositions>,
    pub starts: LogStarts,
    /// Counts those that live.
    pub _copying: Arc<()>,
}

impl LogsToCopy {
    /// Writes the file into the folder of the image.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE_NAME);
        for _ in 0..ATTEMPTS {
            let mut to = File::create(&path)?;
            if self.try_write(&mut to).is_some() {
                return Ok(());
            }
        }
        bail!("its message logs cannot be read")
    }

    /// `None`: a word was being written, or the file cannot be written.
    fn try_write(&self, to: &mut File) -> Option<()> {
        let newest = |peer: usize| self.newest.get(&peer).copied().unwrap_or_default();
        let (image, cursors) =
            ImageLogs::measure(self.rank as usize, self.positions.clone(), self, newest)?;
        to.write_all(&image.emit()).ok()?;
        image.copy(&cursors, self, |bytes| to.write_all(bytes).ok())
    }
}

impl NodeFile<LogRegion> for LogsToCopy {
    fn log(&self, (from, to): (usize, usize)) -> LogRegion {
        LogRegion { file: self.file.try_clone().ok(), start: log_at(from, to) }
    }

    fn start(&self, pair: (usize, usize)) -> LogCursor {
        self.starts.start(pair)
    }

    fn is_discarded(&self, (from, to): (usize, usize), position: u64) -> bool {
        let mut word = [0; 8];
        let read = pread(&self.file, &mut word, discarded_at(from, to));
        read != Ok(word.len()) || u64::from_ne_bytes(word) > position
    }
}

/// The region of a log in the file of this node.
pub struct LogRegion {
    pub file: Option<OwnedFd>,
    pub start: u64,
}

impl ReadLog for LogRegion {
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let wanted = bytes.len();
        let read = pread(self.file.as_ref()?, bytes, self.start + at as u64).ok()?;
        (read == wanted).then_some(())
    }
}

/// The ranks of a lost node that begin here, and their images. The images are chosen once for all
/// of them, by the first thread that asks.
pub struct MovedRanks {
    /// The file of this node's logs.
    pub file: OwnedFd,
    pub ranks: Vec<(u32, Vec<CheckpointLocation>)>,
    pub config: CheckpointConfig,
    pub chosen: OnceLock<Result<ChosenImages, String>>,
    /// The agent has noted what was chosen.
    pub is_noted: AtomicBool,
}

/// Images that fit together.
#[derive(Default)]
pub struct ChosenImages {
    /// By rank; others begin with their program.
    pub images: BTreeMap<u32, (CheckpointImage, LogPositions)>,
    /// The logs that do not begin at 0.
    pub logs: Vec<BegunLog>,
    /// Images that cannot be read, and why.
    unreadable: Vec<(u32, String)>,
}

impl MovedRanks {
    /// The image with which a rank begins; none: its program. An error that is of this rank: one of
    /// its images cannot be read, or no images fit together.
    pub fn image_of(&self, rank: u32, deadline: Instant) -> Vec<Result<CheckpointImage>> {
        let chosen =
            self.chosen.get_or_init(|| self.choose(deadline).map_err(|error| format!("{error:#}")));
        match chosen {
            Ok(chosen) => {
                let unreadable = chosen.unreadable.iter().filter(|(of, _)| *of == rank);
                let errors = unreadable.map(|(_, why)| Err(anyhow!(why.clone())));
                let image = chosen.images.get(&rank).map(|(image, _)| Ok(image.clone()));
                errors.chain(image).collect()
            }
            Err(why) => vec![Err(anyhow!(why.clone()))],
        }
    }

    /// Whether the rank has had images, so that it does not begin with its program.
    pub fn had_images(&self, rank: u32) -> bool {
        self.ranks.iter().any(|(of, locations)| *of == rank && !locations.is_empty())
    }

    fn choose(&self, deadline: Instant) -> Result<ChosenImages> {
        let mut chosen = ChosenImages::default();
        let mut candidates: BTreeMap<usize, Vec<ReadImage>> = BTreeMap::new();
        for (rank, locations) in &self.ranks {
            let all = candidates.entry(*rank as usize).or_default();
            let found = locate_images(locations, &self.config, deadline);
            for outcome in found.into_iter().rev() {
                let read = outcome.and_then(|image| ReadImage::read(image, &self.config, deadline));
                match read {
                    Ok(image) => all.push(image),
                    Err(error) => chosen.unreadable.push((*rank, format!("{error:#}"))),
                }
            }
            if all.is_empty() && !locations.is_empty() {
                bail!("none of the checkpoints of rank {rank} can be read");
            }
        }
        let logs = |all: &Vec<ReadImage>| all.iter().map(|image| image.logs.clone()).collect();
        let logs = candidates.iter().map(|(rank, all)| (*rank, logs(all))).collect();
        let choice = choose_images(&logs).map_err(|UnfitImages { from, to }| {
            anyhow!(
                "the checkpoints of ranks {from} and {to} that can be read do not hold all of \
                 their messages"
            )
        })?;
        let image = |rank: usize| candidates.get(&rank)?.get(*choice.images.get(&rank)?);
        for log in &choice.logs {
            let frames = match log.frames {
                Some((rank, number)) => {
                    image(rank).map(|image| image.frames(number)).transpose()?
                }
                None => None,
            };
            self.lay(log, &frames.unwrap_or_default())?;
        }
        for rank in choice.images.keys() {
            if let Some(ReadImage { image, logs, .. }) = image(*rank) {
                let positions = logs.positions.clone();
                chosen.images.insert(*rank as u32, (image.clone(), positions));
            }
        }
        chosen.logs = choice.logs;
        Ok(chosen)
    }

    /// Begins a log with these frames.
    fn lay(&self, log: &BegunLog, frames: &[u8]) -> Result<()> {
        let start = log_at(log.from, log.to);
        let write = |at: usize, bytes: &[u8]| {
            let mut done = 0;
            while done < bytes.len() {
                done += pwrite(&self.file, &bytes[done..], start + (at + done) as u64).ok()?;
            }
            Some(())
        };
        lay_frames(frames, log.begins, write).context("no memory for its message logs")?;
        pwrite(&self.file, &log.begins.to_ne_bytes(), begins_at(log.from, log.to))?;
        Ok(())
    }
}

/// An image, and what it holds of the logs of its rank.
struct ReadImage {
    image: CheckpointImage,
    logs: ImageLogs,
    /// Where the frames of each excerpt lie in the file, and their end.
    ends: Vec<u64>,
    bytes: Vec<u8>,
}

impl ReadImage {
    fn read(
        image: CheckpointImage,
        config: &CheckpointConfig,
        deadline: Instant,
    ) -> Result<ReadImage> {
        let bytes = image.read_file(FILE_NAME).or_else(|error| match &config.object_store {
            Some(object_store) => {
                object_store.fresh().get(&image, deadline)?;
                image.read_file(FILE_NAME)
            }
            None => Err(error),
        })?;
        let (logs, ends) = ImageLogs::parse(&bytes).context("its message logs are damaged")?;
        anyhow::ensure!(ends.last() == Some(&(bytes.len() as u64)), "its message logs are damaged");
        Ok(ReadImage { image, logs, ends, bytes })
    }

    fn frames(&self, number: usize) -> Result<Vec<u8>> {
        let ends = self.ends.get(number).zip(self.ends.get(number + 1));
        let frames = ends.and_then(|(from, to)| self.bytes.get(*from as usize..*to as usize));
        Ok(frames.context("its message logs are damaged")?.to_vec())
    }
}

/// Finds the images that another node has taken, in a folder that this node sees as well or in the
/// object store.
pub fn locate_images(
    locations: &[CheckpointLocation],
    config: &CheckpointConfig,
    deadline: Instant,
) -> Vec<Result<CheckpointImage>> {
    let object_store = config.object_store.as_ref().map(ObjectStore::fresh);
    let find = |one: &CheckpointLocation| {
        let authenticator = config.authenticator.as_ref().context("the job has no key")?;
        let folder: PathBuf = config.job_folder.join(&one.path);
        CheckpointImage::find(folder.clone(), &one.tag, authenticator).or_else(|error| {
            match &object_store {
                Some(object_store) => object_store.find(folder, &one.tag, authenticator, deadline),
                None => Err(error),
            }
        })
    };
    locations.iter().map(|one| find(one).with_context(|| one.path.clone())).collect()
}
