//! What this process tells the agents about logs between nodes, and frames that the agents have
//! carried while their sender did nothing ([`landbridge_proto::log::agent_transfer`]).
//!
//! What enters: how far logs between nodes have come, and the mailbox of this process. What leaves:
//! words in the file, and the frames of the mailbox. What may never happen: the agent reads at a
//! place that is used again, and does not notice.

use std::sync::atomic::{Ordering, fence};

use landbridge_proto::log::layout::{
    IS_BEING_WRITTEN, MAIL_BYTES_AT, MAIL_BYTES_MAX, MAIL_FRAMES_AT, MAIL_FROM_AT, MAIL_MOVES_AT,
    MAIL_NUMBER_AT, MAIL_POSITION_AT, MAIL_TAKEN_AT, arrived_at, confirmed_at, mailbox_at,
};
use landbridge_proto::log::segment::LogCursor;

use super::NodeLogs;
use super::window::Mapped;

/// Frames that the agents have carried.
pub struct Mail {
    number: u64,
    /// The process that has sent the frames.
    pub from: usize,
    /// How often it had moved to another node.
    pub moves: u32,
    /// The position of the first frame in its log.
    pub position: u64,
    /// The frames, each with its padding.
    pub frames: Vec<u8>,
}

impl Mail {
    /// Whether the frames can be taken when their log has arrived up to `arrived`. Of a process
    /// that has moved, frames of the lost node may have arrived since the agents have compared what
    /// is there.
    pub fn is_next(&self, arrived: u64) -> bool {
        self.position == arrived || self.moves == 0 && self.position < arrived
    }
}

/// The frames in the mailbox of this process, if it has not taken them before.
pub fn mail(logs: &NodeLogs) -> Option<Mail> {
    let head = &logs.open.head;
    let mailbox = mailbox_at(logs.open.owner.process) as usize;
    let word = |at: u64| head.word(mailbox + at as usize).load(Ordering::Acquire);
    let taken = word(MAIL_TAKEN_AT);
    let number = head.release(mailbox + MAIL_NUMBER_AT as usize, taken);
    if number == taken {
        return None;
    }
    let bytes = (word(MAIL_BYTES_AT) as usize).min(MAIL_BYTES_MAX);
    Some(Mail {
        number,
        from: word(MAIL_FROM_AT) as usize,
        moves: word(MAIL_MOVES_AT) as u32,
        position: word(MAIL_POSITION_AT),
        frames: head.announced(mailbox + MAIL_FRAMES_AT as usize, bytes).to_vec(),
    })
}

/// Empties the mailbox, of which the log has the frames now, and lets the agent know.
pub fn note_mail_taken(logs: &NodeLogs, mail: &Mail) {
    let at = mailbox_at(logs.open.owner.process) + MAIL_TAKEN_AT;
    logs.open.head.word(at as usize).store(mail.number, Ordering::Release);
    logs.ring_agent();
}

/// A process of another node has the log from `own` to it up to this cursor. What lies before may
/// be used again from now on.
pub(super) fn note_confirmed(head: &Mapped, own: usize, to: usize, cursor: &LogCursor) {
    let at = confirmed_at(own, to) as usize;
    let [position, place, segment] = cursor.words();
    let before = head.word(at).load(Ordering::Acquire);
    // At the beginning of the log, too, the segment says that the log goes to the other process.
    let is_known = position > 0 || head.word(at + 16).load(Ordering::Acquire) != 0;
    if before != IS_BEING_WRITTEN && before >= position && is_known {
        return;
    }
    head.word(at).store(IS_BEING_WRITTEN, Ordering::Release);
    fence(Ordering::SeqCst);
    head.word(at + 8).store(place, Ordering::Release);
    head.word(at + 16).store(segment, Ordering::Release);
    head.word(at).store(position, Ordering::Release);
}

/// Finishes the words, as an incarnation begins: the earlier one may have been killed as it wrote
/// them, and agents carry nothing as long as they are half written. `known`: what the incarnation
/// knows of the other process; nothing, as long as what was sent again is not compared.
pub(super) fn mend_confirmed(head: &Mapped, own: usize, to: usize, known: Option<&LogCursor>) {
    let at = confirmed_at(own, to) as usize;
    if head.word(at).load(Ordering::Acquire) != IS_BEING_WRITTEN {
        return;
    }
    match known {
        Some(cursor) => note_confirmed(head, own, to, cursor),
        None => {
            [at + 8, at + 16, at].iter().for_each(|at| head.word(*at).store(0, Ordering::Release))
        }
    }
}

/// The log from a process of another node has arrived up to this position.
pub(super) fn note_arrived(head: &Mapped, from: usize, own: usize, position: u64) {
    head.word(arrived_at(from, own) as usize).store(position, Ordering::Release);
}
