//! The order of images that full message logs want before the next ones are due.
//!
//! In: ranks of which images are wanted, and the bytes that an image of each would release. Out:
//! requests, first of the image that releases most. As many ranks stand still at once as there are
//! processors, because CRIU computes. What may never happen: a wanted image is never requested
//! because another rank does not stop for its own.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::checkpoint_scheduler::{CheckpointRequester, POLL_INTERVAL};
use super::rank_supervisor::RankSupervisor;

/// A rank that has not stopped for its image after this time lets others go first.
const STOP_PATIENCE: Duration = Duration::from_millis(100);

/// Images that full logs want and that are not requested yet: by rank, the bytes that the image
/// would release.
#[derive(Default)]
pub struct WantedImages(BTreeMap<u32, u64>);

impl WantedImages {
    /// Adds images; what is known of earlier wishes for the same ranks is replaced.
    pub fn add(&mut self, wishes: BTreeMap<u32, u64>) {
        self.0.extend(wishes);
    }

    /// Takes at most this many ranks, in the order in which their images are to be requested.
    fn take(&mut self, most: usize) -> Vec<u32> {
        let mut ranks: Vec<u32> = self.0.keys().copied().collect();
        ranks.sort_by_key(|rank| Reverse(self.0[rank]));
        ranks.truncate(most);
        self.0.retain(|rank, _| !ranks.contains(rank));
        ranks
    }

    /// When to look again whether an image can be requested.
    pub fn next_time(&self) -> Option<Instant> {
        (!self.0.is_empty()).then(|| Instant::now() + POLL_INTERVAL)
    }

    /// Requests the wanted images that can be taken now. Ranks that begin again together have their
    /// images together.
    pub fn request(&mut self, supervisor: &mut RankSupervisor) {
        if self.0.is_empty() {
            return;
        }
        let (now, mut stopping) = (Instant::now(), 0);
        for rank in supervisor.running() {
            let Some(scheduler) = &rank.scheduler else { continue };
            // The image in progress is the wanted one.
            if scheduler.is_stopping() {
                self.0.remove(&rank.rank);
            }
            stopping += usize::from(scheduler.takes_processor(STOP_PATIENCE, now));
        }
        let processors = available_parallelism().map_or(1, usize::from);
        let most = match supervisor.unit {
            Some(_) => usize::MAX,
            None => processors.saturating_sub(stopping),
        };
        for rank in self.take(most) {
            supervisor.request_checkpoints(Some(rank), CheckpointRequester::FullLog);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_that_releases_most_comes_first() {
        let mut wanted = WantedImages::default();
        wanted.add([(0, 100), (1, 7_000), (2, 0), (3, 90_000)].into());
        assert!(wanted.take(0).is_empty());
        assert_eq!(wanted.take(1), [3]);
        // Rank 0 has gone on, and what it needs has grown.
        wanted.add([(0, 8_000), (4, 7_500)].into());
        assert_eq!(wanted.take(2), [0, 4]);
        assert!(wanted.next_time().is_some());
        assert_eq!(wanted.take(usize::MAX), [1, 2], "also one that releases nothing yet");
        assert!(wanted.take(usize::MAX).is_empty());
        assert!(wanted.next_time().is_none());
    }
}
