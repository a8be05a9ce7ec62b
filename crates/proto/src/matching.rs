//! Matching: which receive takes which arrival.
//!
//! Two queues in order of posting and of arrival. An entry carries what is compared, so a search is one pass over
//! contiguous memory. What may never happen: two messages of one sender that match the same receive
//! are taken in another order than they were sent (libfabric's FI_ORDER_SAS, MPI's non-overtaking rule).

use alloc::collections::VecDeque;

/// Stands for "any source".
pub const ANY: u32 = u32::MAX;

/// Receives that wait for a message.
#[derive(Default)]
pub struct PostedQueue {
    queue: VecDeque<MatchCriteria>,
}

/// Messages that wait for a receive.
#[derive(Default)]
pub struct UnexpectedQueue {
    queue: VecDeque<Envelope>,
}

/// What a receive accepts.
#[derive(Clone, Copy, Debug)]
pub struct MatchCriteria {
    /// The tag.
    pub tag: u64,
    /// Bits of the tag that do not matter.
    pub ignore: u64,
    /// The only sender accepted, or [`ANY`].
    pub source: u32,
    /// Number of the receive.
    pub id: u32,
}

/// What a message carries.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// The tag.
    pub tag: u64,
    /// The sender.
    pub source: u32,
    /// Number of the message.
    pub id: u32,
}

impl MatchCriteria {
    #[inline]
    fn accepts(&self, tag: u64, source: u32) -> bool {
        (self.tag ^ tag) & !self.ignore == 0 && (self.source == ANY || self.source == source)
    }
}

impl PostedQueue {
    /// Queues a receive behind those that wait.
    #[inline]
    pub fn push(&mut self, criteria: MatchCriteria) {
        self.queue.push_back(criteria);
    }

    /// The oldest receive that accepts a message. It stays queued.
    #[inline]
    pub fn find(&self, tag: u64, source: u32) -> Option<usize> {
        self.queue.iter().position(|criteria| criteria.accepts(tag, source))
    }

    /// Number of the receive at `place`.
    #[inline]
    pub fn id(&self, place: usize) -> u32 {
        self.queue[place].id
    }

    /// Takes the receive at `place` out.
    #[inline]
    pub fn take(&mut self, place: usize) -> u32 {
        if place == 0 {
            // Checked by the caller: `place` came from `find`.
            return self.queue.pop_front().expect("a place in the queue").id;
        }
        self.queue.remove(place).expect("a place in the queue").id
    }

    /// Takes receive `id` out if it waits.
    pub fn remove(&mut self, id: u32) -> bool {
        let place = self.queue.iter().position(|criteria| criteria.id == id);
        place.map(|place| self.take(place)).is_some()
    }

    /// Every receive that waits, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &MatchCriteria> {
        self.queue.iter()
    }
}

impl UnexpectedQueue {
    /// Queues a message behind those that wait.
    #[inline]
    pub fn push(&mut self, arrival: Envelope) {
        self.queue.push_back(arrival);
    }

    /// The oldest message that `criteria` accepts. It stays queued.
    #[inline]
    pub fn find(&self, criteria: &MatchCriteria) -> Option<u32> {
        self.queue
            .iter()
            .find(|arrival| criteria.accepts(arrival.tag, arrival.source))
            .map(|arrival| arrival.id)
    }

    /// Takes message `id` out if it waits.
    pub fn remove(&mut self, id: u32) -> bool {
        let place = self.queue.iter().position(|arrival| arrival.id == id);
        place.and_then(|place| self.queue.remove(place)).is_some()
    }

    /// Takes the oldest message that `criteria` accepts.
    #[inline]
    pub fn take(&mut self, criteria: &MatchCriteria) -> Option<u32> {
        if self.queue.is_empty() {
            return None;
        }
        let place =
            self.queue.iter().position(|arrival| criteria.accepts(arrival.tag, arrival.source))?;
        self.queue.remove(place).map(|arrival| arrival.id)
    }

    /// Messages that wait.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// True if none waits.
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
