//! The steps of an image in progress: what the scheduler does without the rank, and what it lets
//! the agent do.
//!
//! In: the time, ended threads and processes. Out: [`SchedulerStep`], one for each round of the
//! agent's loop.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::super::image_logs::LogsToCopy;
use super::disk_tasks::{self, ImageFolder, SealedImage};
use super::{CheckpointScheduler, CheckpointState, DUMP_MAX, Dump, FAILURES_MAX, FIRST_POLL_RETRY};
use crate::checkpoint::checkpoint_image::ImageHeader;
use crate::checkpoint::criu;
use crate::ending::Ending;
use crate::sys;

/// What a scheduler lets the agent do in one round of its loop.
pub enum SchedulerStep {
    Nothing,
    /// The agent checks whether an image is due.
    CheckDue,
    /// The agent reads whether the rank has quiesced.
    ReadReply,
    /// The agent starts CRIU, because the folder of the image is ready or late.
    BeginDump,
    /// The agent lets the rank resume, and the image be sealed.
    Seal,
    /// An image is whole.
    Sealed {
        /// Nodes that may need the image and cannot read its folder.
        unreachable: Vec<u32>,
        /// Number and bytes of the image, if the user has requested it.
        requested: Option<(u64, u64)>,
    },
    /// The upload of the image of this number has ended; its result is the nodes that may need the
    /// image and cannot get it.
    Uploaded(u64, Result<Vec<u32>>),
}

impl CheckpointScheduler {
    /// Advances as far as is possible without the rank of this process id.
    pub fn step(&mut self, pid: u32, is_replaying: bool) -> Result<SchedulerStep> {
        Ok(match &mut self.state {
            CheckpointState::Idle if is_replaying => SchedulerStep::Nothing,
            CheckpointState::Idle => SchedulerStep::CheckDue,
            CheckpointState::Requested { .. } => SchedulerStep::ReadReply,
            CheckpointState::Preparing { thread, began, .. } => {
                let is_over = thread.is_finished() || began.elapsed() >= DUMP_MAX;
                if is_over { SchedulerStep::BeginDump } else { SchedulerStep::Nothing }
            }
            CheckpointState::Dumping(Dump { ended: Some(_), .. }) => SchedulerStep::Seal,
            // The rank was killed meanwhile. The end of its process is not reported while CRIU
            // holds its threads, and CRIU waits for these threads.
            CheckpointState::Dumping(_) if sys::is_over(pid) => {
                self.end_incarnation();
                SchedulerStep::Nothing
            }
            CheckpointState::Dumping(_) => {
                self.end_late(Instant::now());
                SchedulerStep::Nothing
            }
            CheckpointState::Sealing { thread } if thread.is_finished() => {
                return self.finish_sealing();
            }
            CheckpointState::Uploading { thread, .. } if thread.is_finished() => {
                self.finish_upload().map_or(SchedulerStep::Nothing, |(number, uploaded)| {
                    SchedulerStep::Uploaded(number, uploaded)
                })
            }
            CheckpointState::Sealing { .. }
            | CheckpointState::Uploading { .. }
            | CheckpointState::Disconnected { .. } => SchedulerStep::Nothing,
        })
    }

    /// Kills CRIU after [`DUMP_MAX`], because the rank stands still until CRIU has ended.
    pub(super) fn end_late(&mut self, now: Instant) {
        if let CheckpointState::Dumping(it) = &mut self.state
            && it.ended.is_none()
            && !it.is_late
            && now >= it.began + DUMP_MAX
        {
            it.is_late = true;
            sys::kill(it.criu, libc::SIGKILL);
        }
    }

    fn finish_sealing(&mut self) -> Result<SchedulerStep> {
        let CheckpointState::Sealing { thread } =
            std::mem::replace(&mut self.state, CheckpointState::Idle)
        else {
            return Ok(SchedulerStep::Nothing);
        };
        let unreachable = self.finish(thread)?;
        let is_requested = std::mem::take(&mut self.notices.is_user_waiting);
        let newest = self.images.newest().filter(|_| is_requested);
        let requested = newest.map(|image| (image.header.number, image.bytes()));
        Ok(SchedulerStep::Sealed { unreachable, requested })
    }

    /// Notes that an image has failed; returns whether no more images are tried.
    pub fn note_failure(&mut self) -> bool {
        self.failures += 1;
        self.schedule_next();
        self.state = CheckpointState::Idle;
        self.failures >= FAILURES_MAX
    }

    /// Lets the image that is due wait until the rank may have begun to poll.
    pub fn wait_for_first_poll(&mut self) {
        self.due = Instant::now() + FIRST_POLL_RETRY;
    }

    /// The child that has prevented the last image and prevents the next one as well.
    pub fn preventing_child(&self, rank: u32) -> Option<u32> {
        self.child.filter(|child| sys::is_living_child(*child, rank))
    }

    /// Whether the disk does not answer: too many threads wait for it to delete images.
    pub fn is_disk_stuck(&self) -> bool {
        self.images.removals.is_full()
    }

    /// Whether the images of this node may take `bytes`. If not, the next image is due later. The
    /// second value: the user is to be notified, once until there is space again.
    pub fn check_space(&mut self, bytes: u64) -> (bool, bool) {
        let has_space = bytes <= self.config.space;
        if !has_space {
            self.schedule_next();
        }
        let was_reported = std::mem::replace(&mut self.notices.is_full_reported, !has_space);
        (has_space, !has_space && !was_reported)
    }

    /// Notes that the rank is asked to quiesce for an image; returns the number of the image.
    /// `round`: the number of the round to which the image belongs, if it belongs to one.
    pub fn begin_request(&mut self, round: Option<u64>) -> u64 {
        self.number = round.unwrap_or(self.number + 1);
        self.state = CheckpointState::Requested { since: Instant::now() };
        self.number
    }

    /// Notes that the rank has closed its end of the quiesce socket.
    pub fn note_disconnect(&mut self) {
        self.state = CheckpointState::Disconnected { since: Instant::now(), is_reported: false };
    }

    /// Starts to make a folder for the image of a rank that has quiesced. `logs`: what else the
    /// image is to hold.
    pub fn begin_preparing(&mut self, header: ImageHeader, logs: Option<LogsToCopy>) -> Result<()> {
        let (folder, number, pid) = (self.folder.clone(), header.number, header.pid);
        self.expected = sys::resident_bytes(pid);
        let thread = disk_tasks::start("prepare", move || {
            ImageFolder::prepare(&folder, (number, pid), logs)
        })?;
        self.state = CheckpointState::Preparing { thread, header, began: Instant::now() };
        Ok(())
    }

    /// Starts CRIU, once the folder of the image is ready.
    pub fn begin_dump(&mut self) -> Result<()> {
        let (thread, header, began) =
            match std::mem::replace(&mut self.state, CheckpointState::Idle) {
                CheckpointState::Preparing { thread, header, began } if thread.is_finished() => {
                    (thread, header, began)
                }
                late => {
                    self.state = late;
                    self.end_incarnation();
                    bail!("there was no folder for it after {} s", DUMP_MAX.as_secs());
                }
            };
        let image_folder = thread.join().unwrap_or_else(|_| bail!("there is no folder for it"))?;
        let criu =
            match criu::dump(&self.config.tool, header.pid, &header.inodes, &image_folder.folder) {
                Ok(criu) => criu.id(),
                Err(error) => {
                    self.images.removals.add(self.expected, move || image_folder.remove());
                    return Err(error);
                }
            };
        let ImageFolder { folder, shared } = image_folder;
        let header = ImageHeader { shared, ..header };
        let (ended, is_late) = (None, false);
        self.state = CheckpointState::Dumping(Dump { criu, ended, is_late, folder, header, began });
        Ok(())
    }

    /// Starts to write the image to the disk, after CRIU has ended and the rank of process id `pid`
    /// has resumed. Returns the number of the image and the time that the rank stood still; `None`
    /// if there is no image.
    pub fn seal(&mut self, pid: u32) -> Result<Option<(u64, Duration)>> {
        let CheckpointState::Dumping(dump) =
            std::mem::replace(&mut self.state, CheckpointState::Idle)
        else {
            return Ok(None);
        };
        let Dump { ended, is_late, folder, header, began, .. } = dump;
        if ended != Some(Ending::Exited(0)) {
            let copies = if is_late { 0 } else { sys::copies(pid) };
            let thread = disk_tasks::start("seal", move || {
                disk_tasks::dump_failure(&folder, is_late, copies)
            })?;
            self.state = CheckpointState::Sealing { thread };
            return Ok(None);
        }
        let sealed = (header.number, began.elapsed());
        let config = self.config.clone();
        let thread =
            disk_tasks::start("seal", move || SealedImage::seal(&folder, header, &config))?;
        self.state = CheckpointState::Sealing { thread };
        Ok(Some(sealed))
    }
}
