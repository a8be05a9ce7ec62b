//! Delays an effect of a rank on a file until another node has the rank's record (`durable_effects`
//! of the record's head), so that the node that takes the rank over when this node is lost knows
//! every change that the rank may have made.
//!
//! In: requests of ranks, on a socket of each rank ([`HeldFiles::effects`]), and acknowledgements
//! of the agent above. Out: the updates of the record with a [`Message::MakeDurable`] after them,
//! and the answer to the rank.
//!
//! What may never happen: a rank gets its answer before the agent above has acknowledged the
//! record.
//!
//! [`HeldFiles::effects`]: super::held_files::HeldFiles::effects

use std::rc::Rc;

use super::held_files::{EffectRequest, HeldFiles};
use super::parent_agent::ParentAgent;
use super::rank::LocalRank;
use super::rank_recording::RankRecording;
use crate::control::Message;
use crate::ending::Ending;

/// Requests of ranks that the agent above has not acknowledged yet, in the order of their serials.
#[derive(Default)]
pub(super) struct DurableEffects {
    last: u32,
    pending: Vec<(u32, Rc<RankRecording>, EffectRequest)>,
}

impl DurableEffects {
    /// Stores a request that was just sent to the agent above; returns the request's serial.
    fn add(&mut self, recording: Rc<RankRecording>, request: EffectRequest) -> u32 {
        self.last = self.last.wrapping_add(1);
        self.pending.push((self.last, recording, request));
        self.last
    }

    /// Handles a rank's request that the agent above receive the rank's record; answers at once if
    /// no other node may take the rank over.
    pub fn handle_request(&mut self, rank: &LocalRank, parent: &mut ParentAgent) {
        let Some(recording) = rank.recording.clone() else { return };
        // One thread of a rank makes these requests, and repeats a request after seconds.
        let Some(request) = recording.held_files().and_then(|held| held.next_effect_request())
        else {
            return;
        };
        if !parent.is_replicated_for_spare() {
            return answer(&recording, &request);
        }
        rank.send_recording_updates(parent);
        let serial = self.add(recording, request);
        parent.send(&Message::MakeDurable { rank: rank.rank, serial });
    }

    /// Drops what is held for a rank that has ended and is not restarted. A failed rank keeps its
    /// locks until the agent ends: the job is ending, and no other rank may enter what these locks
    /// guard.
    pub fn release(&mut self, rank: &LocalRank) {
        let Some(recording) = &rank.recording else { return };
        if rank.ending == Some(Ending::Exited(0)) {
            recording.held_files().into_iter().for_each(HeldFiles::clear);
        }
        self.forget(recording);
    }

    /// Drops the requests of a rank that has ended for good, because no process waits for the
    /// answers.
    fn forget(&mut self, recording: &Rc<RankRecording>) {
        self.pending.retain(|(_, other, _)| !Rc::ptr_eq(other, recording));
    }

    /// Answers the request of this serial, which the agent above has acknowledged.
    pub fn end(&mut self, serial: u32) {
        if let Some(place) = self.pending.iter().position(|(number, ..)| *number == serial) {
            let (_, recording, request) = self.pending.remove(place);
            answer(&recording, &request);
        }
    }
}

fn answer(recording: &RankRecording, request: &EffectRequest) {
    recording.held_files().into_iter().for_each(|held| held.answer(request));
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use landbridge_proto::nondeterminism::{
        DURABLE_SUFFIX, HELD_MAKE_DURABLE, HELD_WORD_BYTES, held_name,
    };

    use super::*;

    /// Sends a request of a rank; returns its serial and the socket on which the rank waits.
    fn ask(effects: &mut DurableEffects, recording: &Rc<RankRecording>) -> (u32, UnixDatagram) {
        let held = recording.held_files().unwrap();
        let own = format!("landbridge-ships-{}-{}", std::process::id(), effects.last);
        let rank = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(own).unwrap()).unwrap();
        let to = [&held_name(held.bits())[..], DURABLE_SUFFIX.as_bytes()].concat();
        let mut word = [0; HELD_WORD_BYTES];
        word[..8].copy_from_slice(&HELD_MAKE_DURABLE.to_ne_bytes());
        rank.send_to_addr(&word, &SocketAddr::from_abstract_name(to).unwrap()).unwrap();
        rank.set_nonblocking(true).unwrap();
        (effects.add(recording.clone(), held.next_effect_request().unwrap()), rank)
    }

    #[test]
    fn requests_of_an_ended_rank_are_dropped_and_others_answered() {
        let recording = [(); 2]
            .map(|()| Rc::new(RankRecording::for_test(Some(HeldFiles::new().unwrap())).unwrap()));
        let mut effects = DurableEffects::default();
        let asked = [0, 1, 0].map(|which| ask(&mut effects, &recording[which]));
        effects.forget(&recording[0]);
        assert_eq!(Rc::strong_count(&recording[0]), 1, "nothing of it is kept");
        let mut bytes = [0; HELD_WORD_BYTES];
        for ((serial, rank), has_answer) in asked.iter().zip([false, true, false]) {
            effects.end(*serial);
            assert_eq!(rank.recv(&mut bytes).is_ok(), has_answer, "{serial}");
        }
        assert!(effects.pending.is_empty());
    }
}
