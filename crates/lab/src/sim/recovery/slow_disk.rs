//! The disk of a relay's message log: it performs requests at random times.

use landbridge_proto::relay::{DiskRequest, FRAME_BYTES_MAX, LogEvent, LogLimits, Relay};
use landbridge_testbed::relay::{Disk, Served};

use super::super::random::Random;
use super::super::{EventCounts, Violation, require};

/// A disk that performs requests at random times.
#[derive(Default)]
pub struct SlowDisk {
    disk: Disk,
    /// Calls of `work` in which the disk performs a request, in percent.
    percent: u64,
}

impl SlowDisk {
    /// A disk, and the limits of its relay's message log; some relays have no disk.
    pub fn new(random: &mut Random) -> (Self, Option<LogLimits>) {
        let percent = random.pick(&[0, 2, 20, 100]);
        let room = LogLimits { memory: 100_000, disk: Some(1 << 40), segment: FRAME_BYTES_MAX };
        let room = Some(room).filter(|_| percent > 0 && random.percent(75));
        (Self { percent, ..Self::default() }, room)
    }

    /// Limits with too little memory for the log, and without a disk.
    pub fn tight_room(seed: u64) -> LogLimits {
        let memory = 1_000 << (seed / 3 % 8);
        LogLimits { memory, disk: None, segment: FRAME_BYTES_MAX }
    }

    /// The relay's next report that a process cannot be restarted, or can be again. Returns a
    /// violation if the relay gives up a process although `has_tight_memory` is false.
    pub fn poll_log_event(
        relay: &mut Relay,
        has_tight_memory: bool,
    ) -> Result<Option<LogEvent>, Violation> {
        let remark = relay.recovery_mut().poll_log_event();
        let (memory, disk) = relay.recovery().kept_bytes();
        require!(
            remark.is_none() || has_tight_memory,
            "{remark:?}, with {memory} bytes in memory, {disk} on the disk"
        );
        Ok(remark)
    }

    /// Performs the next request, at random.
    pub fn work(
        &mut self,
        relay: &mut Relay,
        random: &mut Random,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        self.disk.collect(relay);
        require!(relay.recovery_mut().poll_failed_replay().is_none(), "what is kept is of no use");
        let requests = &self.disk.requests;
        if requests.is_empty() || !random.percent(self.percent) {
            return Ok(());
        }
        let is_read = |request: &DiskRequest| matches!(request, DiskRequest::Read(..));
        let number = requests.iter().position(is_read).unwrap_or(0);
        match self.disk.serve(relay, number, true).map_err(Violation)? {
            Some(Served::Write) => counts.count("segments written"),
            Some(Served::Read) => counts.count("segments read back"),
            Some(Served::Delete) | None => (),
        }
        Ok(())
    }
}
