//! Images that ranks want because their logs have become long.
//!
//! In: words of the ranks, by which they ask. Out: of which ranks images are wanted. What may never
//! happen: a wish is lost while memory is short.

use std::collections::BTreeSet;

use landbridge_proto::log::layout::{IMAGES_WANTED_AT, control_at};
use rustix::io::{pread, pwrite};

use super::NodeLogs;

impl NodeLogs {
    /// The ranks of which images are wanted, so that logs can be released that have become long.
    pub fn take_image_wishes(&self) -> BTreeSet<u32> {
        let mut ranks = BTreeSet::new();
        for rank in self.local.borrow().iter() {
            let at = control_at(*rank as usize) + IMAGES_WANTED_AT as u64;
            let mut word = [0; 8];
            let is_read = pread(&self.files.memory, &mut word, at).is_ok();
            let wanted = u64::from_ne_bytes(word);
            if is_read && wanted > 0 && pwrite(&self.files.memory, &[0; 8], at).is_ok() {
                ranks.insert(*rank);
                ranks.extend(wanted.checked_sub(2).and_then(|peer| u32::try_from(peer).ok()));
            }
        }
        ranks
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::DISK_MAX_AT;

    use super::super::tests::logs;
    use super::*;

    #[test]
    fn a_rank_whose_logs_are_long_wants_images_of_itself_and_of_another_one() {
        let logs = logs(0..4);
        let want = |rank: usize, word: u64| {
            let at = control_at(rank) + IMAGES_WANTED_AT as u64;
            pwrite(&logs.files.memory, &word.to_ne_bytes(), at).unwrap();
        };
        want(1, 1);
        want(2, 2 + 3);
        assert_eq!(logs.take_image_wishes(), [1, 2, 3].into());
        assert_eq!(logs.take_image_wishes(), [].into());
        // A rank with a disk has reasons of its own.
        want(1, 1);
        pwrite(&logs.files.memory, &1000_u64.to_ne_bytes(), DISK_MAX_AT).unwrap();
        assert_eq!(logs.take_image_wishes(), [1].into());
    }
}
