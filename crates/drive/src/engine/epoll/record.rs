//! What a relay keeps for its processes, beyond its memory: orders go to the disk, and what becomes of them comes back.

use std::fs::File;
use std::os::unix::fs::FileExt;

use landbridge_proto::relay::{ReadsKept, Remark, Room, SEGMENT_BYTES};

use super::*;
use crate::engine::disk::{Disk, Done};
use crate::engine::stock::Stock;
use crate::engine::{Exhibit, Fenced, Inquiry, Recover};

/// The token of the disk's bell.
pub const BELL: u64 = wan::HUB_BASE - 1;

/// Endpoints of which is told at once what is kept: the lines about them fit into a pipe.
const SHOWN_MAX: usize = 100;

/// How long inputs may wait for a disk that does nothing before the user hears of it.
const STUCK_MILLIS: u64 = 5_000;

/// See the module head.
#[derive(Default)]
pub struct Record {
    disk: Option<Disk>,
    /// From when something is kept that takes whole segments. Where there can be no thread it is never there.
    stock: Option<Stock>,
    has_stock: bool,
    /// Since when inputs have been waiting and the disk has done nothing, as far as it has been looked at.
    still_since_millis: Option<u64>,
    is_stuck: bool,
    has_failed: bool,
    /// For what fenced endpoints have read of clocks.
    handover: Option<File>,
}

impl Record {
    /// What the relay is to keep, if anything.
    pub fn new(epoll: &OwnedFd, relay: &mut Relay, wanted: Option<Recover>) -> io::Result<Self> {
        let Some(Recover { memory, disk, image_bytes, handover }) = wanted else {
            return Ok(Self::default());
        };
        let bytes = disk.as_ref().map(Disk::bytes_max);
        relay.set_recovering_within(Room { memory, disk: bytes, segment: SEGMENT_BYTES });
        relay.set_image_bytes(image_bytes);
        if let Some(disk) = &disk {
            epoll::add(epoll, disk.bell(), EventData::new_u64(BELL), EventFlags::IN)?;
        }
        Ok(Self { disk, handover, ..Self::default() })
    }

    /// Whether endpoints of other nodes may be started on third ones.
    pub fn keeps_reads(&self) -> bool {
        self.handover.is_some()
    }
}

impl Loop<'_> {
    /// The disk has done something.
    pub(super) fn handle_disk(&mut self) {
        let Some(disk) = &self.record.disk else { return };
        for done in disk.take_done() {
            match done {
                Done::Written(id, result) => {
                    if let (Err(error), false) = (&result, self.record.has_failed) {
                        self.record.has_failed = true;
                        self.watch.warn(format_args!(
                            "recover_dir cannot be written: {error}; what is kept for --recover has only memory from now on \
                             (recover_memory), and a process for which that is not enough can come back no longer"
                        ));
                    }
                    self.relay.handle_written(id, result.is_ok());
                }
                Done::Read(id, result) => {
                    if let Err(error) = &result {
                        self.watch.warn(format_args!("recover_dir cannot be read: {error}"));
                    }
                    self.relay.handle_read(id, result.ok());
                }
            }
        }
        self.record.still_since_millis = None;
        if std::mem::take(&mut self.record.is_stuck) {
            self.watch.warn(format_args!("recover_dir can be written again: the job goes on"));
        }
    }

    /// Hands orders to the disk and memory to the relay, and says what the user should know.
    pub(super) fn keep_record(&mut self) {
        for _ in 0..self.relay.wanted_segments() {
            if !std::mem::replace(&mut self.record.has_stock, true) {
                self.record.stock = Stock::open().ok();
            }
            let Some(segment) = self.record.stock.as_mut().and_then(Stock::take) else { break };
            self.relay.stock(segment);
        }
        let stock = &mut self.record.stock;
        while let Some(segment) = self.relay.poll_surplus() {
            if let Some(stock) = stock {
                stock.put(segment);
            }
        }
        if let Some(stock) = stock {
            stock.keep_within(self.relay.unused_bytes());
        }
        while let (Some(disk), Some(order)) = (&self.record.disk, self.relay.poll_order()) {
            disk.order(order);
        }
        while let Some(remark) = self.relay.poll_remark() {
            match remark {
                Remark::GivenUp(who, why) => {
                    self.watch.warn(format_args!("of {who} {why}"));
                    self.watch.handle_giving_up(who);
                }
                Remark::Diverged(apart) => self.watch.warn(format_args!("{apart}")),
                Remark::Grown(who) => self.watch.handle_growth(who),
                Remark::BegunAnew(who) => self.watch.handle_new_beginning(who),
                Remark::DiskFull => self.watch.warn(format_args!(
                    "what is kept for --recover has filled recover_disk: what comes now stays in memory (recover_memory), and \
                     a process for which that is not enough can come back no longer"
                )),
            }
        }
        while let Some((link, why)) = self.relay.poll_stranded() {
            if let Some(slot) = self.slots.get(link.0 as usize).copied().flatten() {
                self.doom(slot, why.into());
            }
        }
    }

    /// The input of `link` is broken. If that is for a frame that was another one before, the process gets to know which.
    pub(super) fn leave_word(&mut self, slot: usize, link: LinkId) {
        let refused = self.relay.refused_frame(link);
        let transport = &mut self.connections[slot].transport;
        if let (Some(frame), Some(Transport::Near(near))) = (refused, transport) {
            near.0.leave_word(frame);
        }
    }

    /// Nothing more of starts of `who` before this one is taken; what they have said is. What is known of its reads is handed over.
    fn fence(&mut self, who: Address, start: u32) {
        if let Some((link, older)) = self.relay.incarnation(who)
            && older <= start
            && let Some(slot) = self.slots.get(link.0 as usize).copied().flatten()
        {
            self.hear_out(slot, link);
            self.suspend(slot, "its node is lost");
        }
        self.relay.fence(who, start);
        let kept = self.relay.reads_of(who).unwrap_or_default();
        let ReadsKept { first, bytes, polls, mut is_full } = kept;
        let mut length = bytes.len() as u64;
        if let Some(Err(error)) =
            self.record.handover.as_ref().map(|file| file.write_all_at(&bytes, 0))
        {
            self.watch
                .warn(format_args!("what {who} has read of clocks cannot be handed over: {error}"));
            // As one of which not all is on record.
            (length, is_full) = (0, true);
        }
        let bytes = length;
        self.watch.handle_fenced(who, &Fenced { first, bytes, polls, is_full });
    }

    /// Does what has been asked for, and says what is kept.
    pub(super) fn show(&mut self, next: Next) -> Next {
        while let Some((who, start)) = self.watch.poll_fence() {
            self.fence(who, start);
        }
        let Next::Show(inquiry) = next else { return next };
        let exhibit = match inquiry {
            Inquiry::All(first) => {
                let mut holdings = self.relay.holdings(first);
                let some = holdings.by_ref().take(SHOWN_MAX).collect();
                Exhibit::All(some, holdings.next().map(|holding| holding.address))
            }
            Inquiry::One { address, from, count } => {
                Exhibit::One(self.relay.excerpt(address, from, count))
            }
        };
        self.watch.handle_exhibit(&exhibit);
        Next::GoOn
    }

    /// Whether inputs have been waiting for the disk for long.
    pub(super) fn look_at_disk(&mut self, now_millis: u64) {
        if !self.relay.waits_for_disk() {
            self.record.still_since_millis = None;
            return;
        }
        let since = *self.record.still_since_millis.get_or_insert(now_millis);
        if now_millis.saturating_sub(since) > STUCK_MILLIS
            && !std::mem::replace(&mut self.record.is_stuck, true)
        {
            self.watch.warn(format_args!(
                "recover_dir has taken nothing for {} s, and the memory for what is kept for --recover is full: the job waits for \
                 it",
                STUCK_MILLIS / 1_000
            ));
        }
    }
}
