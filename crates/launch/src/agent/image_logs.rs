//! What checkpoint images hold of the message logs of this node's ranks, and with which images
//! ranks of a lost node, or of this one, begin here ([`landbridge_proto::log::image_logs`]).
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
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use landbridge_proto::log::image_logs::{
    BegunLog, ImageChoice, ImageLogs, LogStarts, NodeFile, UnfitImages, choose_images, lay_frames,
};
use landbridge_proto::log::layout::{ROLLBACKS_AT, UNIT_KEEPS_AT, begins_at, discarded_at, log_at};
use landbridge_proto::log::release::{LogPositions, PairPositions};
use landbridge_proto::log::segment::LogCursor;
use landbridge_proto::log::unit::emptied_log;
use rustix::io::{pread, pwrite};

use super::log_region::{LogFiles, LogRegion};
use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::checkpoint_image::CheckpointImage;
use crate::control::rank_state::CheckpointLocation;

/// The name of the file in the folder of an image.
const FILE_NAME: &str = "message-logs";
/// All that is kept of the logs of a rank goes into its image if it takes at most so many bytes.
pub const WHOLE_BYTES_MAX: u64 = 64 << 20;
/// How often the logs are read that other ranks write meanwhile.
const ATTEMPTS: u32 = 5;

/// What the image of a rank that stands still is to hold of its logs. As long as this lives,
/// nothing of the node's logs is released.
pub struct LogsToCopy {
    pub files: LogFiles,
    pub rank: u32,
    pub positions: LogPositions,
    /// By rank: how far its logs to and from this rank had come in its newest image.
    pub newest: BTreeMap<usize, PairPositions>,
    pub starts: LogStarts,
    /// All that is kept of the logs goes into the image if it takes at most so many bytes.
    pub whole_bytes_max: u64,
    /// An image is of no use if a log of known start was discarded.
    pub must_be_whole: bool,
    /// Counts those that live.
    pub _copying: Arc<()>,
}

impl LogsToCopy {
    /// Writes the file into the folder of the image.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE_NAME);
        for _ in 0..ATTEMPTS {
            let mut to = File::create(&path)?;
            let Some(image) = self.try_write(&mut to) else { continue };
            match image.missing(&self.starts).filter(|_| self.must_be_whole) {
                Some((from, to)) => bail!(
                    "messages of rank {from} to rank {to} were discarded while the ranks of this \
                     node had their images taken, because recover_memory is full"
                ),
                None => return Ok(()),
            }
        }
        bail!("its message logs cannot be read")
    }

    /// `None`: a word was being written, or the file cannot be written.
    fn try_write(&self, to: &mut File) -> Option<ImageLogs> {
        let newest = |peer: usize| self.newest.get(&peer).copied().unwrap_or_default();
        let (image, cursors) = ImageLogs::measure(
            self.rank as usize,
            self.positions.clone(),
            self,
            newest,
            self.whole_bytes_max,
        )?;
        to.write_all(&image.emit()).ok()?;
        image.copy(&cursors, self, |bytes| to.write_all(bytes).ok())?;
        Some(image)
    }
}

impl NodeFile<LogRegion> for LogsToCopy {
    fn log(&self, (from, to): (usize, usize)) -> LogRegion {
        self.files.region((from, to))
    }

    fn start(&self, pair: (usize, usize)) -> Option<LogCursor> {
        self.starts.start(pair)
    }

    fn is_discarded(&self, (from, to): (usize, usize), position: u64) -> bool {
        let mut word = [0; 8];
        let read = pread(&self.files.memory, &mut word, discarded_at(from, to));
        read != Ok(word.len()) || u64::from_ne_bytes(word) > position
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
        // Older images are read only if they are needed.
        let fitting = self.fitting(1, deadline).or_else(|_| self.fitting(usize::MAX, deadline));
        let Fitting { candidates, choice, unreadable } = fitting?;
        let mut chosen = ChosenImages { unreadable, ..ChosenImages::default() };
        let mut images = Vec::new();
        for (rank, number) in &choice.images {
            let Some(read) = candidates.get(rank).and_then(|all| all.get(*number)) else {
                continue;
            };
            images.push((*rank, read));
            let positions = read.logs.positions.clone();
            chosen.images.insert(*rank as u32, (read.image.clone(), positions));
        }
        lay_all(&self.file, &choice.logs, &images, &self.config, deadline)?;
        chosen.logs = choice.logs;
        Ok(chosen)
    }

    /// Reads so many of the newest images of each rank, and chooses those that fit together.
    ///
    /// # Errors
    /// None fit, or none of a rank can be read.
    fn fitting(&self, images_max: usize, deadline: Instant) -> Result<Fitting> {
        let (mut candidates, mut unreadable) = (BTreeMap::new(), Vec::new());
        for (rank, locations) in &self.ranks {
            let all: &mut Vec<ReadImage> = candidates.entry(*rank as usize).or_default();
            let newest = &locations[locations.len().saturating_sub(images_max)..];
            let found = self.config.locate(newest, deadline);
            for outcome in found.into_iter().rev() {
                let read = outcome.and_then(|image| ReadImage::read(image, &self.config, deadline));
                match read {
                    Ok(image) => all.push(image),
                    Err(error) => unreadable.push((*rank, format!("{error:#}"))),
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
        Ok(Fitting { candidates, choice, unreadable })
    }
}

/// Empties the logs between these ranks, of which none runs, so that they begin again.
fn empty_logs(files: &LogFiles, ranks: &[u32]) -> Result<()> {
    let file = &files.memory;
    files.empty_disk(ranks)?;
    for from in ranks {
        for to in ranks.iter().filter(|to| *to != from) {
            for (at, word) in emptied_log((*from as usize, *to as usize), 0) {
                pwrite(file, &word.to_ne_bytes(), at)?;
            }
        }
    }
    let mut word = [0; 8];
    pread(file, &mut word, ROLLBACKS_AT)?;
    let rollbacks = u64::from_ne_bytes(word) + 1;
    pwrite(file, &rollbacks.to_ne_bytes(), ROLLBACKS_AT)?;
    pwrite(file, &0_u64.to_ne_bytes(), UNIT_KEEPS_AT)?;
    Ok(())
}

/// Begins a log with these frames in the file of this node.
fn lay(file: &OwnedFd, log: &BegunLog, frames: &[u8]) -> Result<()> {
    let start = log_at(log.from, log.to);
    let write = |at: usize, bytes: &[u8]| {
        let mut done = 0;
        while done < bytes.len() {
            done += pwrite(file, &bytes[done..], start + (at + done) as u64).ok()?;
        }
        Some(())
    };
    lay_frames(frames, log.begins, write).context("no memory for its message logs")?;
    pwrite(file, &log.begins.to_ne_bytes(), begins_at(log.from, log.to))?;
    Ok(())
}

/// Lays what images hold of the logs of their ranks.
fn lay_all(
    file: &OwnedFd,
    logs: &[BegunLog],
    images: &[(usize, &ReadImage)],
    config: &CheckpointConfig,
    deadline: Instant,
) -> Result<()> {
    for log in logs.iter().filter(|log| log.frames.is_none()) {
        lay(file, log, &[])?;
    }
    for (rank, read) in images {
        // The excerpts of one image are in memory at once.
        let bytes = read_logs(&read.image, config, deadline)?;
        for log in logs {
            if let Some((_, excerpt)) = log.frames.filter(|(of, _)| of == rank) {
                lay(file, log, read.frames(&bytes, excerpt)?)?;
            }
        }
    }
    Ok(())
}

/// Rounds of images with which ranks of this node can begin again together.
pub struct RoundsToLay {
    /// The files of this node's logs.
    pub files: LogFiles,
    pub ranks: Vec<u32>,
    /// Number, and the image of each rank; the newest round first.
    pub rounds: Vec<(u64, Vec<CheckpointImage>)>,
    pub config: Option<CheckpointConfig>,
}

impl RoundsToLay {
    /// Empties the logs between the ranks, none of which runs, and lays what the newest usable
    /// round holds of them. Returns its place; none: the ranks begin with their programs. Notes why
    /// others cannot be used.
    pub fn lay(&self, deadline: Instant, notes: &mut Vec<String>) -> Result<Option<usize>> {
        for (place, (number, images)) in self.rounds.iter().enumerate() {
            empty_logs(&self.files, &self.ranks)?;
            match self.lay_round(images, deadline) {
                Ok(()) => return Ok(Some(place)),
                Err(error) => notes.push(format!("round {number} of images: {error:#}")),
            }
        }
        empty_logs(&self.files, &self.ranks).map(|()| None)
    }

    fn lay_round(&self, images: &[CheckpointImage], deadline: Instant) -> Result<()> {
        let config = self.config.as_ref().context("no images are taken")?;
        let read = |image: &CheckpointImage| ReadImage::read(image.clone(), config, deadline);
        let read = images.iter().map(read).collect::<Result<Vec<_>>>()?;
        let ranks = || self.ranks.iter().map(|rank| *rank as usize);
        let logs = ranks().zip(&read).map(|(rank, read)| (rank, vec![read.logs.clone()]));
        let choice = choose_images(&logs.collect()).map_err(|UnfitImages { from, to }| {
            anyhow!("the images of ranks {from} and {to} do not hold all of their messages")
        })?;
        let images: Vec<_> = ranks().zip(&read).collect();
        lay_all(&self.files.memory, &choice.logs, &images, config, deadline)
    }
}

/// Images of all ranks, and which of them fit together.
struct Fitting {
    candidates: BTreeMap<usize, Vec<ReadImage>>,
    choice: ImageChoice,
    unreadable: Vec<(u32, String)>,
}

/// An image, and what it holds of the logs of its rank.
struct ReadImage {
    image: CheckpointImage,
    logs: ImageLogs,
    /// Where the frames of each excerpt lie in the file, and their end.
    ends: Vec<u64>,
}

impl ReadImage {
    fn read(
        image: CheckpointImage,
        config: &CheckpointConfig,
        deadline: Instant,
    ) -> Result<ReadImage> {
        let bytes = read_logs(&image, config, deadline)?;
        let (logs, ends) = ImageLogs::parse(&bytes).context("its message logs are damaged")?;
        anyhow::ensure!(ends.last() == Some(&(bytes.len() as u64)), "its message logs are damaged");
        Ok(ReadImage { image, logs, ends })
    }

    /// The frames of an excerpt. `bytes`: the file.
    fn frames<'a>(&self, bytes: &'a [u8], number: usize) -> Result<&'a [u8]> {
        let ends = self.ends.get(number).zip(self.ends.get(number + 1));
        let frames = ends.and_then(|(from, to)| bytes.get(*from as usize..*to as usize));
        frames.context("its message logs are damaged")
    }
}

/// What an image holds of the logs of its rank; it may be in the object store alone.
fn read_logs(
    image: &CheckpointImage,
    config: &CheckpointConfig,
    deadline: Instant,
) -> Result<Vec<u8>> {
    image.read_file(FILE_NAME).or_else(|error| match &config.object_store {
        Some(object_store) => {
            object_store.fresh().get(image, deadline)?;
            image.read_file(FILE_NAME)
        }
        None => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::FILE_BYTES;

    use super::*;

    fn file() -> OwnedFd {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, FILE_BYTES).unwrap();
        file
    }

    fn lay(file: &OwnedFd, (from, to): (usize, usize), frames: &[u8]) {
        let start = log_at(from, to);
        let write = |at: usize, bytes: &[u8]| pwrite(file, bytes, start + at as u64).ok().map(drop);
        lay_frames(frames, 0, write).unwrap();
    }

    /// Frames of 64 bytes.
    fn frames(count: u8) -> Vec<u8> {
        let frame = |number: u8| {
            let mut frame = [number; 64];
            frame[..8].copy_from_slice(&[8, 0, 0, 0, 7, 0, 0, 0]);
            frame
        };
        (0..count).flat_map(frame).collect()
    }

    #[test]
    fn logs_go_into_an_image_and_from_there_into_the_file_of_another_node() {
        let (here, there) = (file(), file());
        lay(&here, (3, 5), &frames(100));
        lay(&here, (5, 3), &frames(50));
        let pair = PairPositions { sent: 100 * 64, received: 40 * 64 };
        let logs = LogsToCopy {
            files: LogFiles::new(here.try_clone().unwrap(), None),
            rank: 3,
            positions: LogPositions { pairs: [(5, pair)].into(), deliveries: 7 },
            newest: [(5, PairPositions { sent: 45 * 64, received: 90 * 64 })].into(),
            starts: LogStarts::default(),
            whole_bytes_max: WHOLE_BYTES_MAX,
            must_be_whole: false,
            _copying: Arc::default(),
        };
        let folder = std::env::temp_dir().join(format!("landbridge-logs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        logs.write(&folder).unwrap();
        let bytes = std::fs::read(folder.join(FILE_NAME)).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let (image, ends) = ImageLogs::parse(&bytes).unwrap();
        let whole: Vec<_> = image.excerpts.iter().map(|it| (it.start, it.end)).collect();
        assert_eq!(whole, [(0, 100 * 64), (0, 50 * 64)], "it is little");
        let newest = |peer: usize| logs.newest[&peer];
        let measured = ImageLogs::measure(3, logs.positions.clone(), &logs, newest, 0);
        let (image, _) = measured.unwrap();
        assert_eq!(image.positions, logs.positions);
        let parts: Vec<_> = image.excerpts.iter().map(|it| (it.from, it.start, it.end)).collect();
        // What rank 3 has not received yet belongs to it, too.
        assert_eq!(parts, [(3, 90 * 64, 100 * 64), (5, 40 * 64, 50 * 64)]);
        assert_eq!(ends.last(), Some(&(bytes.len() as u64)));
        let moved = MovedRanks {
            file: there.try_clone().unwrap(),
            ranks: vec![(3, Vec::new())],
            config: CheckpointConfig::sample(1, Path::new("/")),
            chosen: OnceLock::new(),
            is_noted: AtomicBool::new(false),
        };
        let frames_of_last = &bytes[ends[1] as usize + 40 * 64..ends[2] as usize];
        let log = BegunLog { from: 5, to: 3, begins: 40 * 64, frames: Some((3, 1)) };
        super::lay(&there, &log, frames_of_last).unwrap();
        let mut word = [0; 8];
        pread(&there, &mut word, begins_at(5, 3)).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 40 * 64);
        let mut found = vec![0; 640];
        pread(&there, &mut found, log_at(5, 3)).unwrap();
        assert_eq!(found, frames(50)[40 * 64..]);
        assert!(super::lay(&there, &log, &frames_of_last[..600]).is_err(), "a part of a frame");
        // Nobody has images: all begin with their program.
        let chosen = moved.image_of(3, Instant::now());
        assert!(chosen.is_empty() && !moved.had_images(3));
    }

    #[test]
    fn a_log_that_was_discarded_is_in_no_image() {
        let here = file();
        lay(&here, (3, 5), &frames(10));
        pwrite(&here, &320_u64.to_ne_bytes(), discarded_at(3, 5)).unwrap();
        let logs = LogsToCopy {
            files: LogFiles::new(here, None),
            rank: 3,
            positions: LogPositions {
                pairs: [(5, PairPositions::default())].into(),
                deliveries: 0,
            },
            newest: BTreeMap::new(),
            starts: LogStarts::default(),
            whole_bytes_max: WHOLE_BYTES_MAX,
            must_be_whole: false,
            _copying: Arc::default(),
        };
        assert!(logs.is_discarded((3, 5), 256) && !logs.is_discarded((3, 5), 320));
        let newest = |_| PairPositions::default();
        let measured = ImageLogs::measure(3, logs.positions.clone(), &logs, newest, 0).unwrap().0;
        assert_eq!(measured.excerpts.iter().map(|it| it.from).collect::<Vec<_>>(), [5]);
        // Ranks that begin again together have no older image of one of them.
        let folder = std::env::temp_dir().join(format!("landbridge-part-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        logs.write(&folder).unwrap();
        let mut starts = LogStarts::default();
        [(3, 5), (5, 3)].iter().for_each(|pair| starts.begin(*pair, 0));
        let logs = LogsToCopy { starts, must_be_whole: true, ..logs };
        let error = logs.write(&folder).unwrap_err().to_string();
        assert!(error.contains("rank 3 to rank 5 were discarded"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
