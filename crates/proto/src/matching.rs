//! Matching of posted receives with arriving messages.
//!
//! Two queues, in order of posting and of arrival. An entry carries everything that is compared, so
//! a search is one pass over contiguous memory. What may never happen: two messages of one sender
//! that match the same receive are matched in another order than they were sent (libfabric's
//! FI_ORDER_SAS, MPI's non-overtaking rule).

use alloc::collections::VecDeque;

/// Source of a receive that accepts any sender.
pub const ANY: u32 = u32::MAX;

/// Posted receives that wait for a message.
#[derive(Default)]
pub struct PostedQueue {
    queue: VecDeque<MatchCriteria>,
}

/// Unexpected messages that wait for a receive.
#[derive(Default)]
pub struct UnexpectedQueue {
    queue: VecDeque<Envelope>,
}

/// Criteria of a posted receive.
#[derive(Clone, Copy, Debug)]
pub struct MatchCriteria {
    /// Tag that a message must carry.
    pub tag: u64,
    /// Bits of the tag that are not compared.
    pub ignore: u64,
    /// The only sender accepted, or [`ANY`].
    pub source: u32,
    /// Id of the receive.
    pub id: u32,
}

/// Envelope of an arrived message.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// Tag of the message.
    pub tag: u64,
    /// Sender of the message.
    pub source: u32,
    /// Id of the message.
    pub id: u32,
}

impl MatchCriteria {
    #[inline]
    fn accepts(&self, tag: u64, source: u32) -> bool {
        (self.tag ^ tag) & !self.ignore == 0 && (self.source == ANY || self.source == source)
    }
}

impl PostedQueue {
    /// Appends a receive to the queue.
    #[inline]
    pub fn push(&mut self, criteria: MatchCriteria) {
        self.queue.push_back(criteria);
    }

    /// Index of the oldest receive that accepts a message. The receive stays queued.
    #[inline]
    pub fn find(&self, tag: u64, source: u32) -> Option<usize> {
        self.queue.iter().position(|criteria| criteria.accepts(tag, source))
    }

    /// Id of the receive at index `place`.
    #[inline]
    pub fn id(&self, place: usize) -> u32 {
        self.queue[place].id
    }

    /// Removes the receive at index `place` and returns its id.
    #[inline]
    pub fn take(&mut self, place: usize) -> u32 {
        if place == 0 {
            // The index came from `find`, so the entry exists.
            return self.queue.pop_front().expect("a place in the queue").id;
        }
        self.queue.remove(place).expect("a place in the queue").id
    }

    /// Removes receive `id`. Returns false if it is not queued.
    pub fn remove(&mut self, id: u32) -> bool {
        let place = self.queue.iter().position(|criteria| criteria.id == id);
        place.map(|place| self.take(place)).is_some()
    }

    /// All queued receives, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &MatchCriteria> {
        self.queue.iter()
    }
}

impl UnexpectedQueue {
    /// Appends a message to the queue.
    #[inline]
    pub fn push(&mut self, arrival: Envelope) {
        self.queue.push_back(arrival);
    }

    /// Id of the oldest message that `criteria` accept. The message stays queued.
    #[inline]
    pub fn find(&self, criteria: &MatchCriteria) -> Option<u32> {
        self.queue
            .iter()
            .find(|arrival| criteria.accepts(arrival.tag, arrival.source))
            .map(|arrival| arrival.id)
    }

    /// Removes message `id`. Returns false if it is not queued.
    pub fn remove(&mut self, id: u32) -> bool {
        let place = self.queue.iter().position(|arrival| arrival.id == id);
        place.and_then(|place| self.queue.remove(place)).is_some()
    }

    /// Removes the oldest message that `criteria` accept and returns its id.
    #[inline]
    pub fn take(&mut self, criteria: &MatchCriteria) -> Option<u32> {
        if self.queue.is_empty() {
            return None;
        }
        let place =
            self.queue.iter().position(|arrival| criteria.accepts(arrival.tag, arrival.source))?;
        self.queue.remove(place).map(|arrival| arrival.id)
    }

    /// Number of queued messages.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether no message is queued.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_match_wins() {
        let mut wanted = PostedQueue::default();
        for (id, source) in [(0, 5), (1, ANY), (2, 6)] {
            wanted.push(MatchCriteria { tag: 8, ignore: 1, source, id });
        }
        let place = wanted.find(9, 6).unwrap();
        assert_eq!((wanted.id(place), wanted.take(place)), (1, 1));
        assert_eq!(wanted.find(9, 7), None);
        assert!(wanted.remove(2) && !wanted.remove(2));
        assert_eq!(wanted.find(10, 5), None);
        assert_eq!(wanted.iter().count(), 1);
    }

    #[test]
    fn arrivals_of_one_sender_keep_their_order() {
        let mut arrived = UnexpectedQueue::default();
        for (id, source) in [(0, 1), (1, 2), (2, 1)] {
            arrived.push(Envelope { tag: 3, source, id });
        }
        let from_one = MatchCriteria { tag: 3, ignore: 0, source: 1, id: 0 };
        assert_eq!(arrived.find(&from_one), Some(0));
        assert_eq!(arrived.take(&from_one), Some(0));
        assert_eq!(arrived.take(&from_one), Some(2));
        assert_eq!(arrived.take(&from_one), None);
        assert_eq!((arrived.len(), arrived.remove(1), arrived.is_empty()), (1, true, true));
    }
}
