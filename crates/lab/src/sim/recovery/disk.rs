//! The disk of a relay's record: it does what it is told when chance says so.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::relay::{FRAME_BYTES_MAX, Order, Relay, Remark, Room, SegmentId};

use super::super::random::Random;
use super::super::{Tally, Violation, require};

/// See the module head.
#[derive(Default)]
pub struct Disk {
    orders: VecDeque<Order>,
    files: BTreeMap<SegmentId, Vec<u8>>,
    /// Of a hundred looks, at how many it does something.
    percent: u64,
}

impl Disk {
    /// With what its relay may keep; half of the relays have none.
    pub fn new(random: &mut Random) -> (Self, Option<Room>) {
        let percent = random.pick(&[0, 2, 20, 100]);
        let room = Room { memory: 100_000, disk: Some(1 << 40), segment: FRAME_BYTES_MAX };
        let room = Some(room).filter(|_| percent > 0 && random.percent(75));
        (Self { percent, ..Self::default() }, room)
    }

    /// Memory for which what is kept is too much, and no disk.
    pub fn tight(seed: u64) -> Room {
        let memory = 1_000 << (seed / 3 % 8);
        Room { memory, disk: None, segment: FRAME_BYTES_MAX }
    }

    /// Whoever can come back no longer, or can again: it is none of those if `is_tight` does not say so.
    pub fn hear(relay: &mut Relay, is_tight: bool) -> Result<Option<Remark>, Violation> {
        let remark = relay.poll_remark();
        let (memory, disk) = relay.kept_bytes();
        require!(
            remark.is_none() || is_tight,
            "{remark:?}, with {memory} bytes in memory, {disk} on the disk"
        );
        Ok(remark)
    }

    /// Chance may let it do the next thing.
    pub fn work(
        &mut self,
        relay: &mut Relay,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<(), Violation> {
        while let Some(order) = relay.poll_order() {
            self.orders.push_back(order);
        }
        require!(relay.poll_stranded().is_none(), "what is kept is of no use");
        if self.orders.is_empty() || !random.percent(self.percent) {
            return Ok(());
        }
        let is_read = |order: &Order| matches!(order, Order::Read(..));
        let at = self.orders.iter().position(is_read).unwrap_or(0);
        match self.orders.remove(at) {
            None => (),
            Some(Order::Write(id, bytes)) => {
                tally.count("segments written");
                self.files.insert(id, bytes.to_vec());
                drop(bytes);
                relay.handle_written(id, true);
            }
            Some(Order::Read(id, length, mut into)) => {
                tally.count("segments read back");
                let Some(file) = self.files.get(&id) else {
                    return Err(Violation("a segment is read that is not on the disk".into()));
                };
                into.extend(file);
                require!(into.len() == length, "{length} bytes are asked for, of {}", into.len());
                relay.handle_read(id, Some(into));
            }
            Some(Order::Forget(id)) => {
                require!(self.files.remove(&id).is_some(), "a segment is forgotten twice");
            }
        }
        Ok(())
    }
}
