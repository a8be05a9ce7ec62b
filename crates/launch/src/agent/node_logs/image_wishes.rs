//! Images that ranks want because their logs have become long.
//!
//! In: words of the ranks; what is released, read, and covered by images. Out: of which ranks
//! images are wanted, and what the image of each would release. What may never happen: a rank that
//! needs memory asks, and nobody looks at its wish.

use std::collections::{BTreeMap, BTreeSet};

use landbridge_proto::log::layout::{
    DELIVERIES_END_AT, IMAGES_WANTED_AT, IS_BEING_WRITTEN, SOURCES_AT, TARGETS_AT, confirmed_at,
    consumed_at, control_at, release_at,
};
use landbridge_proto::log::release::{LogCover, LogPositions};
use rustix::io::{pread, pwrite};

use super::NodeLogs;

impl NodeLogs {
    /// The ranks of which images are wanted, so that logs can be released that have become long,
    /// and the bytes that an image of each would release. `has_images`: whether images of a process
    /// are taken.
    pub(super) fn take_image_wishes(&self, has_images: impl Fn(u32) -> bool) -> BTreeMap<u32, u64> {
        let ranks = self.take_wanted();
        ranks.into_iter().map(|rank| (rank, self.released_by_image(rank, &has_images))).collect()
    }

    /// Takes the wishes of all ranks of this node. If a rank changes its word between the read and
    /// the store, its wish for another rank's image is lost; it asks again with its next segment.
    fn take_wanted(&self) -> BTreeSet<u32> {
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

    /// Bytes of logs and deliveries that the next image of a rank releases.
    fn released_by_image(&self, rank: u32, has_images: &impl Fn(u32) -> bool) -> u64 {
        let control = control_at(rank as usize);
        let log = |other: u32, is_sender: bool| {
            let (from, to) = if is_sender { (rank, other) } else { (other, rank) };
            let pair = (from as usize, to as usize);
            let covered = |of: u32, by: u32, sends: bool| {
                let covered = self.of_newest_image(of, |image| image.pair(by as usize));
                if sends { covered.sent } else { covered.received }
            };
            let is_remote = !self.is_local(other);
            let cover = LogCover {
                released: self.word(release_at(pair.0, pair.1)),
                read: self.read_by_receiver(pair, is_sender && is_remote),
                own: covered(rank, other, is_sender),
                other: match is_remote {
                    // With spare nodes: as if the image of the other rank were there.
                    true => Some(u64::MAX),
                    false => has_images(other).then(|| covered(other, rank, !is_sender)),
                },
            };
            cover.released_by_image()
        };
        let set = |at: usize| self.files.process_set(control + at as u64).into_iter();
        let sent = set(TARGETS_AT).map(|to| log(to, true));
        let received = set(SOURCES_AT).map(|from| log(from, false));
        let end = self.word(control + DELIVERIES_END_AT as u64);
        let deliveries = end.saturating_sub(self.of_newest_image(rank, |image| image.deliveries));
        deliveries + sent.chain(received).sum::<u64>()
    }

    /// Up to where the receiver of a log is known to have it.
    fn read_by_receiver(&self, (from, to): (usize, usize), is_receiver_remote: bool) -> u64 {
        match is_receiver_remote {
            true => Some(self.word(confirmed_at(from, to))).filter(|at| *at != IS_BEING_WRITTEN),
            false => Some(self.word(consumed_at(from, to))),
        }
        .unwrap_or(0)
    }

    /// Part of what the newest image of a rank covers, which may be in progress; the default value,
    /// if there is no image.
    fn of_newest_image<T: Default>(&self, rank: u32, read: impl Fn(&LogPositions) -> T) -> T {
        let state = self.state.borrow();
        let mut images = state.images.range((rank, 0)..=(rank, u64::MAX));
        images.next_back().map(|(_, (positions, _))| read(positions)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::contact::agent_bell;
    use landbridge_proto::log::layout::{AGENT_BELL_AT, DISK_MAX_AT};
    use landbridge_proto::log::release::PairPositions;
    use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix, recv, sendto};

    use super::super::tests::logs;
    use super::*;

    fn write(logs: &NodeLogs, at: u64, word: u64) {
        pwrite(&logs.files.memory, &word.to_ne_bytes(), at).unwrap();
    }

    fn want(logs: &NodeLogs, rank: usize, word: u64) {
        write(logs, control_at(rank) + IMAGES_WANTED_AT as u64, word);
    }

    fn wishes(logs: &NodeLogs) -> BTreeMap<u32, u64> {
        logs.take_image_wishes(|rank| rank < 4)
    }

    fn wanted(logs: &NodeLogs) -> Vec<u32> {
        wishes(logs).into_keys().collect()
    }

    #[test]
    fn a_rank_whose_logs_are_long_wants_images_of_itself_and_of_another_one() {
        let logs = logs(0..4);
        want(&logs, 1, 1);
        want(&logs, 2, 2 + 3);
        assert_eq!(wanted(&logs), [1, 2, 3]);
        assert!(wanted(&logs).is_empty());
        // A rank with a disk has reasons of its own.
        want(&logs, 1, 1);
        write(&logs, DISK_MAX_AT, 1000);
        assert_eq!(wanted(&logs), [1]);
    }

    #[test]
    fn a_wish_that_comes_while_others_are_handled_wakes_the_agent_again() {
        let logs = logs(0..2);
        let name = agent_bell(b"test", logs.word(AGENT_BELL_AT));
        let bell = SocketAddrUnix::new_abstract_name(&name).unwrap();
        let want_and_ring = |rank: usize| {
            want(&logs, rank, 1);
            sendto(logs.contacts.bell(), b"!", SendFlags::DONTWAIT, &bell).unwrap();
        };
        let is_ringing = || {
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            recv(logs.contacts.bell(), &mut [0; 8][..], flags).is_ok()
        };
        read(&logs, (0, 1), 10_000);
        want_and_ring(0);
        let meanwhile = |rank| {
            want_and_ring(rank as usize);
            true
        };
        assert_eq!(logs.take_news(meanwhile).wishes, [(0, 5_000)].into());
        assert!(is_ringing());
        assert_eq!(logs.take_news(|_| true).wishes, [(1, 5_000)].into());
        assert!(!is_ringing());
    }

    /// The receiver of a log has it up to here.
    fn read(logs: &NodeLogs, (from, to): (usize, usize), position: u64) {
        let bit = |at: u64, other: usize| {
            let at = at + other as u64 / 64 * 8;
            write(logs, at, logs.word(at) | 1 << (other % 64));
        };
        bit(control_at(from) + TARGETS_AT as u64, to);
        bit(control_at(to) + SOURCES_AT as u64, from);
        write(logs, consumed_at(from, to), position);
    }

    fn note_image(logs: &NodeLogs, rank: u32, pairs: &[(usize, u64, u64)], deliveries: u64) {
        let pair = |&(other, sent, received)| (other, PairPositions { sent, received });
        let positions = LogPositions { pairs: pairs.iter().map(pair).collect(), deliveries };
        let covered = (positions, logs.counts(rank));
        logs.state.borrow_mut().images.insert((rank, 1), covered);
    }

    #[test]
    fn it_is_known_what_an_image_of_each_rank_would_release() {
        let logs = logs(0..5);
        let want_all = || (0..4).for_each(|rank| want(&logs, rank, 1));
        read(&logs, (0, 1), 10_000);
        read(&logs, (2, 3), 4_000);
        // Ranks 4 and 70 are a spawned one, and one of another node.
        read(&logs, (4, 1), 900_000);
        read(&logs, (2, 70), 0);
        write(&logs, confirmed_at(2, 70), 300);
        write(&logs, control_at(3) + DELIVERIES_END_AT as u64, 70);
        want_all();
        let half = [(0, 5_000), (1, 5_000), (2, 2_000 + 300), (3, 2_000 + 70)];
        assert_eq!(wishes(&logs), half.into());
        // The image of rank 3 covers what it has received: that of rank 2 releases all of it.
        note_image(&logs, 3, &[(2, 0, 4_000)], 70);
        want_all();
        assert_eq!(wishes(&logs), [(0, 5_000), (1, 5_000), (2, 4_300), (3, 0)].into());
        for at in [release_at(0, 1), release_at(0, 1) + 8] {
            write(&logs, at, 9_000);
        }
        want_all();
        assert_eq!(wishes(&logs), [(0, 500), (1, 500), (2, 4_300), (3, 0)].into());
    }
}
