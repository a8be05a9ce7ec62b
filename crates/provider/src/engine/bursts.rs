//! Bursts: small frames that a program sends over one stream without a poll in between leave with
//! one system call.
//!
//! What enters: frames that are about to be sent, and the beginning of each poll. What leaves:
//! whether a frame waits for others, and the streams with frames that wait. The first frame since a
//! poll leaves at once, so a lone message is never delayed. Those that follow wait until the next
//! poll, and at the latest until the background thread sends them ([`crate::background`]).
//!
//! What may never happen: a frame waits while the thread that polls sleeps.

pub struct Bursts {
    /// Whether frames may wait: something must send them if the program does not poll.
    is_on: bool,
    /// Number of polls so far, and one.
    round: u64,
    /// Streams with frames that wait; a stream that has ended meanwhile may be among them.
    waiting: Vec<usize>,
}

impl Bursts {
    pub fn new(is_on: bool) -> Bursts {
        Bursts { is_on, round: 1, waiting: Vec::new() }
    }

    /// A poll begins.
    #[inline]
    pub fn begin_round(&mut self) {
        self.round = self.round.wrapping_add(1);
    }

    /// The number of the present round, for a link that sends a frame in it.
    #[inline]
    pub fn round(&self) -> u64 {
        self.round
    }

    /// Whether a frame may wait for others on a link that has sent its last frame in this round.
    #[inline]
    pub fn may_wait(&self, last_round: u64) -> bool {
        last_round == self.round && self.is_on
    }

    /// Frames of link `id` wait.
    #[inline]
    pub fn note_waiting(&mut self, id: usize) {
        if self.waiting.last() != Some(&id) {
            self.waiting.push(id);
        }
    }

    #[inline]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next link whose frames are to be sent.
    #[inline]
    pub fn take_waiting(&mut self) -> Option<usize> {
        self.waiting.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_follows_a_frame_of_the_same_link_since_the_last_poll_waits() {
        let mut bursts = Bursts::new(true);
        assert!(!bursts.may_wait(0), "nothing was sent on this link");
        let sent = bursts.round();
        assert!(bursts.may_wait(sent));
        bursts.begin_round();
        assert!(!bursts.may_wait(sent), "there was a poll");
        assert!(bursts.may_wait(bursts.round()));
        let off = Bursts::new(false);
        assert!(!off.may_wait(off.round()));
    }

    #[test]
    fn each_link_with_waiting_frames_is_taken() {
        let mut bursts = Bursts::new(true);
        for id in [3, 3, 5, 3] {
            bursts.note_waiting(id);
        }
        let mut taken = Vec::new();
        while let Some(id) = bursts.take_waiting() {
            taken.push(id);
        }
        assert!(taken.contains(&3) && taken.contains(&5) && taken.len() <= 3);
        assert!(!bursts.has_waiting());
    }
}
