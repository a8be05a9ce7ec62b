//! The part of the message logs that exceeds the relay's memory: orders go to the disk, and their
//! results come back.

use std::fs::File;
use std::os::unix::fs::FileExt;

use landbridge_proto::relay::{KeptNondeterminism, LogEvent, LogLimits, SEGMENT_BYTES};

use super::*;
use crate::engine::disk::{Disk, DiskCompletion};
use crate::engine::segment_pool::SegmentPool;
use crate::engine::{FencedRecord, LogQuery, LogReply, RecoveryConfig};

/// The epoll token of the disk's event descriptor.
pub const DISK_TOKEN: u64 = udp_hubs::HUB_BASE - 1;

/// The most endpoints in one reply to a log query, so that the lines about them fit into a pipe.
const REPLY_ENDPOINTS_MAX: usize = 100;

/// How long inputs may wait for a disk that does nothing before the user is warned.
const DISK_STALL_MILLIS: u64 = 5_000;

/// The disk, the segment pool and their state: see the module documentation.
#[derive(Default)]
pub struct LogStorage {
    disk: Option<Disk>,
    /// The pool of touched segments, which exists once the log needs whole segments. It is missing
    /// where no thread can be started.
    segment_pool: Option<SegmentPool>,
    has_pool: bool,
    /// The time since which inputs have been waiting while the disk has done nothing.
    stalled_since_millis: Option<u64>,
    is_stalled: bool,
    has_failed: bool,
    /// The file for the recorded nondeterminism of fenced endpoints.
    nondeterminism_file: Option<File>,
}

impl LogStorage {
    /// Sets up what the relay must keep, if anything.
    pub fn new(
        epoll: &OwnedFd,
        relay: &mut Relay,
        wanted: Option<RecoveryConfig>,
    ) -> io::Result<Self> {
        let Some(RecoveryConfig { memory, disk, checkpoint_log_bytes, nondeterminism_file }) =
            wanted
        else {
            return Ok(Self::default());
        };
        let bytes = disk.as_ref().map(Disk::bytes_max);
        relay.enable_recovery_within(LogLimits { memory, disk: bytes, segment: SEGMENT_BYTES });
        relay.recovery_mut().set_checkpoint_log_bytes(checkpoint_log_bytes);
        if let Some(disk) = &disk {
            epoll::add(
                epoll,
                disk.completion_fd(),
                EventData::new_u64(DISK_TOKEN),
                EventFlags::IN,
            )?;
        }
        Ok(Self { disk, nondeterminism_file, ..Self::default() })
    }

    /// Whether endpoints of other nodes may be restarted on third nodes.
    pub fn keeps_nondeterminism(&self) -> bool {
        self.nondeterminism_file.is_some()
    }

    /// Processes what the disk has completed.
    pub fn handle_disk(&mut self, relay: &mut Relay, host: &mut dyn EngineHost) {
        let Some(disk) = &self.disk else { return };
        for done in disk.take_completions() {
            match done {
                DiskCompletion::Written(id, result) => {
                    if let (Err(error), false) = (&result, self.has_failed) {
                        self.has_failed = true;
                        host.warn(format_args!(
                            "recover_dir cannot be written: {error}; message logs have only \
                             memory from now on (recover_memory), and a rank whose log does not \
                             fit there cannot be restarted before its next checkpoint (without \
                             checkpoints: at all)"
                        ));
                    }
                    relay.handle_written(id, result.is_ok());
                }
                DiskCompletion::Read(id, result) => {
                    if let Err(error) = &result {
                        host.warn(format_args!("recover_dir cannot be read: {error}"));
                    }
                    relay.handle_read(id, result.ok());
                }
            }
        }
        self.stalled_since_millis = None;
        if std::mem::take(&mut self.is_stalled) {
            host.warn(format_args!("recover_dir can be written again: the job goes on"));
        }
    }

    /// Hands orders to the disk and memory to the relay, and reports the log events that the user
    /// or the launcher must know.
    pub fn service(&mut self, forwarder: &mut Forwarder, host: &mut dyn EngineHost) {
        let Forwarder { relay, connections, .. } = forwarder;
        for _ in 0..relay.recovery().wanted_segment_buffers() {
            if !std::mem::replace(&mut self.has_pool, true) {
                self.segment_pool = SegmentPool::open().ok();
            }
            let Some(segment) = self.segment_pool.as_mut().and_then(SegmentPool::take) else {
                break;
            };
            relay.recovery_mut().add_segment_buffer(segment);
        }
        let pool = &mut self.segment_pool;
        while let Some(segment) = relay.recovery_mut().poll_surplus_buffer() {
            if let Some(pool) = pool {
                pool.put(segment);
            }
        }
        if let Some(pool) = pool {
            pool.shrink_to(relay.recovery().unused_bytes());
        }
        while let (Some(disk), Some(order)) = (&self.disk, relay.recovery_mut().poll_disk_request())
        {
            disk.submit(order);
        }
        while let Some(remark) = relay.recovery_mut().poll_log_event() {
            match remark {
                LogEvent::Unrecoverable(who, why) => {
                    host.warn(format_args!("{who}: {why}"));
                    host.handle_log_abandoned(who);
                }
                LogEvent::Diverged(apart) => host.warn(format_args!("{apart}")),
                LogEvent::CheckpointDue(who) => host.handle_checkpoint_due(who),
                LogEvent::Recoverable(who) => host.handle_log_resumed(who),
                LogEvent::DiskFull => host.warn(format_args!(
                    "message logs have filled recover_disk: new entries stay in memory \
                     (recover_memory), and a rank whose log does not fit there cannot be \
                     restarted before its next checkpoint (without checkpoints: at all)"
                )),
            }
        }
        while let Some((link, why)) = relay.recovery_mut().poll_failed_replay() {
            if let Some(slot) = connections.slot_of(link) {
                connections.schedule_close(slot, why.into());
            }
        }
    }

    /// Warns the user if inputs have been waiting for the disk for long.
    pub fn check_disk(&mut self, relay: &Relay, host: &mut dyn EngineHost, now_millis: u64) {
        if !relay.recovery().waits_for_disk() {
            self.stalled_since_millis = None;
            return;
        }
        let since = *self.stalled_since_millis.get_or_insert(now_millis);
        if now_millis.saturating_sub(since) > DISK_STALL_MILLIS
            && !std::mem::replace(&mut self.is_stalled, true)
        {
            host.warn(format_args!(
                "recover_dir has accepted no write for {} s, and the memory for message logs is \
                 full: the job waits for the disk",
                DISK_STALL_MILLIS / 1_000
            ));
        }
    }
}

impl EventLoop<'_> {
    /// Fences `who`: processes what an attached incarnation up to `incarnation` has sent, ends its
    /// connection, and accepts nothing more of incarnations before `incarnation`. The host receives
    /// the endpoint's recorded nondeterminism.
    fn fence(&mut self, who: Address, incarnation: u32) {
        if let Some((link, older)) = self.forwarder.relay.incarnation(who)
            && older <= incarnation
            && let Some(slot) = self.forwarder.connections.slot_of(link)
        {
            self.forwarder.drain_input(slot, link);
            self.suspend(slot, "its node is lost");
        }
        self.forwarder.relay.fence(who, incarnation);
        let kept = self.forwarder.relay.recovery().nondeterminism_of(who).unwrap_or_default();
        let KeptNondeterminism { first, bytes, polls, mut is_full } = kept;
        let mut length = bytes.len() as u64;
        if let Some(Err(error)) =
            self.log_storage.nondeterminism_file.as_ref().map(|file| file.write_all_at(&bytes, 0))
        {
            self.host.warn(format_args!(
                "the nondeterminism record of {who} cannot be transferred: {error}"
            ));
            // The record counts as incomplete.
            (length, is_full) = (0, true);
        }
        let bytes = length;
        self.host.handle_fenced(who, &FencedRecord { first, bytes, polls, is_full });
    }

    /// Performs what the host has asked for, and answers its query.
    pub(super) fn perform(&mut self, next: ControlAction) -> ControlAction {
        while let Some((who, incarnation)) = self.host.poll_fence() {
            self.fence(who, incarnation);
        }
        let ControlAction::Query(query) = next else { return next };
        let reply = match query {
            LogQuery::All(first) => {
                let mut holdings = self.forwarder.relay.recovery().log_statuses(first);
                let some = holdings.by_ref().take(REPLY_ENDPOINTS_MAX).collect();
                LogReply::All(some, holdings.next().map(|holding| holding.address))
            }
            LogQuery::One { address, from, count } => {
                LogReply::One(self.forwarder.relay.recovery().log_excerpt(address, from, count))
            }
        };
        self.host.handle_log_reply(&reply);
        ControlAction::Continue
    }
}
