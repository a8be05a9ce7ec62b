//! A rank waits before it changes a file until another node knows what it has recorded (`ships` of the record's head): whoever
//! takes the rank over when this node is lost then knows of every change that it may have made.
//!
//! In: requests of ranks, on a socket of each ([`Held::ships`]), and acknowledgements of the agent above. Out: the news of the record with
//! a [`Message::Ship`] behind it, and the answer to the rank.
//!
//! What may never happen: a rank is answered before the agent above has said that it knows.
//!
//! [`Held::ships`]: super::held::Held::ships

use std::rc::Rc;

use super::Agent;
use super::clocks::Clocks;
use super::held::Waiting;
use crate::control::Message;

/// Requests of ranks that are not acknowledged yet, in the order of their numbers.
#[derive(Default)]
pub(super) struct Ships {
    last: u32,
    under_way: Vec<(u32, Rc<Clocks>, Waiting)>,
}

impl Ships {
    /// The number of a request that has just been passed on.
    fn add(&mut self, clocks: Rc<Clocks>, waiting: Waiting) -> u32 {
        self.last = self.last.wrapping_add(1);
        self.under_way.push((self.last, clocks, waiting));
        self.last
    }

    /// This one is acknowledged.
    fn end(&mut self, serial: u32) {
        if let Some(place) = self.under_way.iter().position(|(number, ..)| *number == serial) {
            let (_, clocks, waiting) = self.under_way.remove(place);
            answer(&clocks, &waiting);
        }
    }
}

fn answer(clocks: &Clocks, waiting: &Waiting) {
    clocks.held().into_iter().for_each(|held| held.answer(waiting));
}

impl Agent {
    /// A rank asks that what it has recorded be known above.
    pub(super) fn handle_ship(&mut self, index: usize) {
        let Some(clocks) = self.ranks[index].clocks.clone() else { return };
        let is_kept_above = self.is_ward() && self.has_spares();
        // A rank has one thread that does this, and asks again after seconds.
        let Some(waiting) = clocks.held().and_then(|held| held.next_waiting()) else { return };
        if !is_kept_above {
            return answer(&clocks, &waiting);
        }
        let rank = self.ranks[index].rank;
        self.tell_known(index);
        let serial = self.ships.add(clocks, waiting);
        self.parent.send(&Message::Ship { rank, serial });
    }

    pub(super) fn handle_shipped(&mut self, serial: u32) {
        self.ships.end(serial);
    }
}
