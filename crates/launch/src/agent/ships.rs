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
use super::held::{Held, Waiting};
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

    /// The rank with this record has ended for good: nobody waits for the answers.
    fn forget(&mut self, clocks: &Rc<Clocks>) {
        self.under_way.retain(|(_, other, _)| !Rc::ptr_eq(other, clocks));
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

    /// The rank has ended, and is not started anew: nobody comes for what is held for it, or waits for an answer.
    pub(super) fn let_go_of(&mut self, index: usize) {
        let Some(clocks) = &self.ranks[index].clocks else { return };
        clocks.held().into_iter().for_each(Held::clear);
        self.ships.forget(clocks);
    }

    pub(super) fn handle_shipped(&mut self, serial: u32) {
        self.ships.end(serial);
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use landbridge_proto::clocks::{HELD_SHIP, HELD_WORD_BYTES, SHIP_SUFFIX, held_name};

    use super::*;

    /// A rank that waits for this number.
    fn ask(ships: &mut Ships, clocks: &Rc<Clocks>) -> (u32, UnixDatagram) {
        let held = clocks.held().unwrap();
        let own = format!("landbridge-ships-{}-{}", std::process::id(), ships.last);
        let rank = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(own).unwrap()).unwrap();
        let to = [&held_name(held.bits())[..], SHIP_SUFFIX.as_bytes()].concat();
        let mut word = [0; HELD_WORD_BYTES];
        word[..8].copy_from_slice(&HELD_SHIP.to_ne_bytes());
        rank.send_to_addr(&word, &SocketAddr::from_abstract_name(to).unwrap()).unwrap();
        rank.set_nonblocking(true).unwrap();
        (ships.add(clocks.clone(), held.next_waiting().unwrap()), rank)
    }

    #[test]
    fn who_has_ended_waits_for_no_answer_and_others_have_theirs() {
        let clocks =
            [(); 2].map(|()| Rc::new(Clocks::for_test(Some(Held::new().unwrap())).unwrap()));
        let mut ships = Ships::default();
        let asked = [0, 1, 0].map(|which| ask(&mut ships, &clocks[which]));
        ships.forget(&clocks[0]);
        assert_eq!(Rc::strong_count(&clocks[0]), 1, "nothing of it is kept");
        let mut bytes = [0; HELD_WORD_BYTES];
        for ((serial, rank), has_answer) in asked.iter().zip([false, true, false]) {
            ships.end(*serial);
            assert_eq!(rank.recv(&mut bytes).is_ok(), has_answer, "{serial}");
        }
        assert!(ships.under_way.is_empty());
    }
}
