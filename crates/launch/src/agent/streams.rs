//! What ranks print, and what rank 0 reads: to the agent above, and from it.
//!
//! What may never happen: something that was printed is on its way before what it follows from (`spares`).

use super::Agent;
use super::input::KEPT_BYTES_MAX;
use crate::control::{Message, Stream};

impl Agent {
    pub(super) fn handle_output(&mut self, index: usize) {
        // A dead rank's pipe is emptied: nobody but an orphan can fill it any more.
        let rank = &self.ranks[index];
        let has_ended = rank.ending.is_some() && !rank.reported;
        self.show_output(index, has_ended, has_ended);
    }

    /// All that is in the pipes of a rank that stands still.
    pub(super) fn read_all_output(&mut self, index: usize) {
        self.show_output(index, true, false);
    }

    fn show_output(&mut self, index: usize, everything: bool, has_ended: bool) {
        let rank = &mut self.ranks[index];
        let number = rank.rank;
        let mut shown = Vec::new();
        let mut again = rank.again.take();
        let mut show = |stream, bytes: Vec<u8>, own: u64| {
            if !bytes.is_empty() {
                shown.push(Message::Output { rank: number, stream, bytes, own: own as u32 });
            }
        };
        rank.read_output(everything, |stream, bytes| match &mut again {
            Some(again) => {
                let before = again.printed();
                let shown = again.print(stream, bytes);
                show(stream, shown, again.printed() - before);
            }
            None => show(stream, bytes, 0),
        });
        if let (Some(again), true) = (&mut again, has_ended) {
            let before = again.printed();
            let shown = again.end_of_print();
            show(Stream::Stderr, shown, again.printed() - before);
        }
        rank.again = again;
        if !shown.is_empty() {
            self.tell_known(index);
        }
        shown.iter().for_each(|message| self.parent.send(message));
    }

    pub(super) fn deliver_stdin(&mut self, bytes: Vec<u8>) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.passed.pass(&bytes);
            return child.process.link.send(&Message::Stdin { bytes });
        }
        if let Some(index) = self.ranks.iter().position(|rank| rank.rank == 0) {
            self.ranks[index].input.queue(&bytes);
            self.write_rank_input(index);
        }
    }

    pub(super) fn deliver_stdin_end(&mut self) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.passed.end();
            return child.process.link.send(&Message::StdinEnd);
        }
        if let Some(index) = self.ranks.iter().position(|rank| rank.rank == 0) {
            self.ranks[index].input.end();
            self.write_rank_input(index);
        }
    }

    /// Gives a rank what it takes of its standard input.
    pub(super) fn write_rank_input(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        if rank.revival.is_some() {
            // Its next start takes it.
            return;
        }
        let bytes = rank.input.write();
        if bytes > 0 {
            self.parent.send(&Message::StdinTaken { bytes });
        }
        if rank.input.take_loss() {
            let text = format!(
                "rank {} has been given more than {} MiB of standard input, and no more of it is kept: if this rank is killed it \
                 comes back only from a checkpoint that is young enough",
                rank.rank,
                KEPT_BYTES_MAX >> 20
            );
            self.parent.send(&Message::Note { text });
        }
    }
}
