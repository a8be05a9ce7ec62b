//! What a process has delivered: written while it runs, and read by its next incarnation.
//!
//! The deliveries lie in a ring of bytes ([`landbridge_proto::log::delivery`]); a control word says
//! how many bytes were ever written, and is written last. Another one, of the agent, says up to
//! where they are released, because no incarnation begins before that. The process discards
//! deliveries where memory is full. Who releases or discards deliveries gives back their memory.
//!
//! What may never happen: a delivery counts before it is whole; the memory of a delivery is given
//! back that an incarnation replays.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use landbridge_proto::log::delivery::{Delivery, Run};
use landbridge_proto::log::layout::DELIVERIES_BYTES;

use super::open_logs::DeliveryWords;
use super::window::Mapped;

/// Bytes of the ring that are kept when it is full.
pub(super) const KEPT_BYTES: u64 = (DELIVERIES_BYTES - DELIVERIES_BYTES / 8) as u64;
const PAGE_BYTES: u64 = 4096;

/// How far the deliveries of a process have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeliveryCursor {
    /// Bytes before.
    pub position: u64,
    /// Deliveries before.
    pub number: u64,
}

pub(super) struct Deliveries {
    ring: Mapped,
    pub cursor: DeliveryCursor,
    /// Bytes that are released, or given up, for all that is known.
    released: u64,
    /// Bytes that were there when this incarnation began.
    replayed_end: u64,
    /// What is left of the delivery that is replayed, the last run first.
    replayed: Vec<Run>,
    /// What this poll has delivered so far.
    pending: Delivery,
    encoded: Vec<u8>,
}

impl Deliveries {
    /// The deliveries in `ring`, from `cursor` on. `kept_from`: the byte from which on they are
    /// kept. `end`: the control word.
    pub fn new(
        mut ring: Mapped,
        cursor: DeliveryCursor,
        kept_from: u64,
        end: &AtomicU64,
    ) -> Deliveries {
        // What was released before takes no memory.
        ring.begin_preparing(cursor.position as usize % DELIVERIES_BYTES);
        Deliveries {
            ring,
            cursor,
            released: kept_from,
            replayed_end: end.load(Ordering::Acquire),
            replayed: Vec::new(),
            pending: Delivery::default(),
            encoded: Vec::with_capacity(64),
        }
    }

    /// Number of deliveries from the beginning of the process to the last one of an earlier
    /// incarnation.
    pub fn count(&self) -> io::Result<u64> {
        let mut cursor = self.cursor;
        while cursor.position < self.replayed_end {
            self.read(&mut cursor)?;
        }
        Ok(cursor.number)
    }

    fn read(&self, cursor: &mut DeliveryCursor) -> io::Result<Delivery> {
        let next = || {
            let byte = (cursor.position < self.replayed_end).then(|| {
                let at = cursor.position as usize % DELIVERIES_BYTES;
                self.ring.announced(at, 1)[0]
            });
            cursor.position += 1;
            byte
        };
        let delivery = Delivery::parse(next).map_err(|_| {
            const WHY: &str = "what it has delivered is not recorded in a way that can be read";
            io::Error::new(io::ErrorKind::InvalidData, WHY)
        })?;
        cursor.number += 1;
        Ok(delivery)
    }

    /// Begins to replay the next delivery of an earlier incarnation, if there is one.
    pub fn begin_replayed(&mut self) -> io::Result<Option<[u64; 3]>> {
        if self.cursor.position >= self.replayed_end {
            return Ok(None);
        }
        let mut cursor = self.cursor;
        let delivery = self.read(&mut cursor)?;
        self.cursor = cursor;
        let numbers = [delivery.polls, delivery.frames().into(), delivery.micros];
        self.replayed = delivery.runs;
        self.replayed.reverse();
        Ok(Some(numbers))
    }

    /// Whether this incarnation delivers what an earlier one has delivered.
    #[inline]
    pub fn is_replaying(&self) -> bool {
        !self.replayed.is_empty() || self.cursor.position < self.replayed_end
    }

    /// The process whose frame the replay delivers next.
    pub fn replayed_source(&self) -> Option<usize> {
        self.replayed.last().map(|run| run.source as usize)
    }

    /// Notes that a frame of this process was delivered.
    #[inline]
    pub fn note_frame(&mut self, source: usize) {
        match self.replayed.last_mut() {
            None => self.pending.add(source as u32),
            Some(run) if run.frames > 1 => run.frames -= 1,
            Some(_) => drop(self.replayed.pop()),
        }
    }

    /// Notes up to where the agent has released the deliveries; `released` gets what was known.
    pub fn note_release(&mut self, released: impl Fn(u64) -> u64) {
        self.released = self.released.max(released(self.released));
    }

    /// Bytes that were not released when this was looked at last.
    pub fn bytes(&self) -> u64 {
        self.cursor.position - self.released
    }

    /// Gives up the oldest deliveries but for this many bytes: no incarnation can replay them then.
    #[cold]
    pub fn shorten(&mut self, bytes_left: u64, words: &DeliveryWords<'_>) {
        self.discard(self.cursor.position.saturating_sub(bytes_left), words);
    }

    /// Gives up the oldest deliveries, up to this byte, and their memory. The agent, which gives
    /// back pages behind that, sees this, or is seen.
    #[cold]
    fn discard(&mut self, discarded: u64, words: &DeliveryWords<'_>) {
        words.discarded.store(discarded, Ordering::Release);
        fence(Ordering::SeqCst);
        while words.punched.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
        self.give_back(self.released, discarded);
        self.released = discarded;
    }

    /// Gives back the memory of these deliveries, in whole pages.
    fn give_back(&mut self, from: u64, to: u64) {
        let ring = DELIVERIES_BYTES as u64;
        // What is older was written over, also by what this incarnation has yet to replay.
        let end = self.cursor.position.max(self.replayed_end);
        let first = from.max(end.saturating_sub(ring)).next_multiple_of(PAGE_BYTES);
        let behind = to / PAGE_BYTES * PAGE_BYTES;
        if first < behind {
            let (start, bytes) = ((first % ring) as usize, (behind - first) as usize);
            let in_lap = bytes.min(DELIVERIES_BYTES - start);
            self.ring.give_back(start, start + in_lap);
            self.ring.give_back(0, bytes - in_lap);
        }
    }

    /// Writes the delivery of this poll; returns the number of its frames.
    #[inline]
    pub fn write(&mut self, polls: u64, micros: u64, words: &DeliveryWords<'_>) -> u64 {
        (self.pending.polls, self.pending.micros) = (polls, micros);
        let frames = self.pending.frames().into();
        self.encoded.clear();
        self.pending.emit(&mut self.encoded);
        self.pending.runs.clear();
        let position = self.cursor.position;
        let next = position + self.encoded.len() as u64;
        if next - self.released > DELIVERIES_BYTES as u64 {
            self.discard(next - KEPT_BYTES, words);
        }
        let at = position as usize % DELIVERIES_BYTES;
        let (first, second) = self.encoded.split_at(self.encoded.len().min(DELIVERIES_BYTES - at));
        self.ring.prepare_ahead((at + first.len()).min(DELIVERIES_BYTES));
        self.ring.write(at, [first].into_iter());
        self.ring.write(0, [second].into_iter());
        (self.cursor.position, self.replayed_end) = (next, next);
        self.cursor.number += 1;
        words.end.store(next, Ordering::Release);
        frames
    }
}
