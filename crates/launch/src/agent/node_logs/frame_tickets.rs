//! Tickets of ranks whose frames wait until another node knows what the frames depend on.
//!
//! In: tickets that ranks of this node draw for frames to other nodes, and the newest ticket for
//! which another node has the copies. Out: the ticket that waits for a copy; ranks whose frames may
//! leave. What may never happen: a ticket counts as answered for which no copy is elsewhere.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use anyhow::Result;
use landbridge_proto::log::layout::{STABLE_ASKED_AT, STABLE_AT, STABLE_WANTED_AT, control_at};

use crate::agent::log_region::LogFiles;

/// The tickets for frames to other nodes.
pub struct FrameTickets {
    files: Rc<LogFiles>,
    /// The last ticket that was read, and the last one that was answered.
    tickets: Cell<(u64, u64)>,
}

impl FrameTickets {
    /// No ticket was drawn.
    pub fn new(files: Rc<LogFiles>) -> FrameTickets {
        FrameTickets { files, tickets: Cell::default() }
    }

    /// The newest ticket of ranks whose frames wait until another node knows what they depend on,
    /// if there is a new one.
    pub fn take_new_ticket(&self) -> Option<u64> {
        let (read, answered) = self.tickets.get();
        let wanted = self.files.word(STABLE_WANTED_AT);
        self.tickets.set((wanted.max(read), answered));
        (wanted > read).then_some(wanted)
    }

    /// Lets the frames leave this node for which tickets up to this one were drawn. Returns the
    /// ranks among `local` that wait for that.
    pub(super) fn answer(&self, ticket: u64, local: &BTreeSet<u32>) -> Result<Vec<u32>> {
        let (read, answered) = self.tickets.get();
        self.files.write_release(STABLE_AT, ticket)?;
        self.tickets.set((read, ticket));
        let waits = |rank: &u32| {
            let asked = self.files.word(control_at(*rank as usize) + STABLE_ASKED_AT as u64);
            asked > answered && asked <= ticket
        };
        Ok(local.iter().copied().filter(waits).collect())
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::FILE_BYTES;
    use rustix::io::pwrite;

    use super::*;
    use crate::agent::log_file;

    #[test]
    fn each_ticket_is_taken_once_and_ranks_wait_for_their_own() {
        let (file, _) = log_file::create(FILE_BYTES).unwrap();
        let tickets = FrameTickets::new(Rc::new(LogFiles::new(file, None)));
        let write = |at: u64, ticket: u64| {
            pwrite(&tickets.files.memory, &ticket.to_ne_bytes(), at).unwrap();
        };
        assert_eq!(tickets.take_new_ticket(), None);
        for (rank, ticket) in [(0, 3), (1, 4), (2, 5), (7, 4)] {
            write(control_at(rank) + STABLE_ASKED_AT as u64, ticket);
        }
        write(STABLE_WANTED_AT, 5);
        assert_eq!((tickets.take_new_ticket(), tickets.take_new_ticket()), (Some(5), None));
        let local = [0, 1, 2].into();
        assert_eq!(tickets.answer(4, &local).unwrap(), [0, 1]);
        assert_eq!(tickets.files.word(STABLE_AT), 4);
        assert_eq!(tickets.answer(5, &local).unwrap(), [2], "the others were woken before");
    }
}
