//! Frames that the agents of two simulated nodes carry, whatever the transports do meanwhile.
//!
//! What enters: the files of both nodes. What leaves: frames, in the mailbox of their receiver.
//! What may never happen: a mailbox is written that its process has not emptied.

use std::io;

use landbridge_proto::log::agent_transfer::{
    ArrivedDigest, Verification, VerifiedLog, frames_behind,
};
use landbridge_proto::log::contact::Contact;
use landbridge_proto::log::frames_digest::digest_of_part;
use landbridge_proto::log::image_logs::NodeFile;
use landbridge_proto::log::layout::{
    IS_BEING_WRITTEN, MAIL_BYTES_AT, MAIL_FRAMES_AT, MAIL_FROM_AT, MAIL_MOVES_AT, MAIL_NUMBER_AT,
    MAIL_POSITION_AT, MAIL_TAKEN_AT, REGION_BYTES, arrived_at, begins_at, confirmed_at, log_at,
    mailbox_at,
};
use landbridge_proto::log::segment::LogCursor;
use landbridge_proto::log::walk::ReadLog;
use rustix::io::{pread, pwrite};

use super::node::SimulatedNode;

/// Frames on their way from one process to another.
#[derive(Clone)]
pub struct CarriedFrames {
    pub from: usize,
    pub to: usize,
    moves: u32,
    position: u64,
    frames: Vec<u8>,
}

/// What a process lacks of the log of a process of another node, as the agents of both see it.
/// `is_late`: the receiver's agent has answered long ago.
pub fn missing_frames(
    (sender, from): (&SimulatedNode, usize),
    (receiver, to): (&SimulatedNode, usize),
    is_late: bool,
) -> io::Result<Option<CarriedFrames>> {
    let at = confirmed_at(from, to);
    let words = [sender.word(at)?, sender.word(at + 8)?, sender.word(at + 16)?];
    if words[0] == IS_BEING_WRITTEN {
        return Ok(None);
    }
    let arrived = receiver.word(arrived_at(from, to))?;
    let is_compared = words[2] != 0 || !sender.has_moved(from)?;
    if !is_compared && !have_the_same((sender, from), (receiver, to), arrived)? {
        return Ok(None);
    }
    let is_late = is_late && is_compared;
    let is_behind = arrived < words[0];
    let cursor = match words[0] {
        0 if words[2] == 0 => Some(LogCursor::beginning(sender.word(begins_at(from, to))?)),
        // The receiver has moved, or the answer is late.
        _ if is_behind && !is_late => sender.start((from, to)),
        _ => LogCursor::from_words(words, REGION_BYTES),
    };
    let position = if is_late { words[0] } else { arrived };
    let log = LogBytes { node: sender, start: log_at(from, to) };
    // What was discarded may have been written over.
    let is_kept = |begin: &LogCursor| !sender.is_discarded((from, to), begin.position());
    let frames = cursor
        .filter(is_kept)
        .and_then(|mut cursor| frames_behind(&log, &mut cursor, position, REGION_BYTES))
        .filter(|frames| !frames.is_empty());
    let generation = sender.contact(from)?.map_or(0, |contact| contact.generation);
    let moves = Contact::moves(generation);
    Ok(frames.map(|frames| CarriedFrames { from, to, moves, position, frames }))
}

/// Whether what a process has sent again, which has moved, is what the receiver has of its log. No:
/// there is less, or one side does not keep all of it.
fn have_the_same(
    (sender, from): (&SimulatedNode, usize),
    (receiver, to): (&SimulatedNode, usize),
    arrived: u64,
) -> io::Result<bool> {
    let mut verified = VerifiedLog::new(sender.sent_before(from, to)?);
    let part = (verified.position(), arrived);
    let digest = |node: &SimulatedNode| {
        let start = node.start((from, to)).filter(|_| part.0 < part.1)?;
        let log = LogBytes { node, start: log_at(from, to) };
        let is_kept = !node.is_discarded((from, to), start.position());
        digest_of_part(&log, start, part).filter(|_| is_kept)
    };
    let there = digest(receiver).map(|digest| ArrivedDigest { from: part.0, digest });
    match verified.verify(arrived, there, || digest(sender)) {
        Verification::Same => Ok(true),
        Verification::Unknown => Ok(false),
        Verification::Other => {
            Err(io::Error::other(format!("{to} has other frames than {from} sends again")))
        }
    }
}

/// Puts frames into the mailbox of their receiver, unless it is full. Returns whether it has.
pub fn put_into_mailbox(node: &mut SimulatedNode, carried: &CarriedFrames) -> io::Result<bool> {
    let mailbox = mailbox_at(carried.to);
    let taken = node.word(mailbox + MAIL_TAKEN_AT)?;
    if node.word(mailbox + MAIL_NUMBER_AT)? != taken {
        return Ok(false);
    }
    pwrite(node.file(), &carried.frames, mailbox + MAIL_FRAMES_AT)?;
    for (at, word) in [
        (MAIL_FROM_AT, carried.from as u64),
        (MAIL_MOVES_AT, u64::from(carried.moves)),
        (MAIL_POSITION_AT, carried.position),
        (MAIL_BYTES_AT, carried.frames.len() as u64),
    ] {
        pwrite(node.file(), &word.to_ne_bytes(), mailbox + at)?;
    }
    node.write_release(mailbox + MAIL_NUMBER_AT, taken + 1)?;
    node.note_change()?;
    Ok(true)
}

/// The region of a log in the file of a node.
struct LogBytes<'a> {
    node: &'a SimulatedNode,
    start: u64,
}

impl ReadLog for LogBytes<'_> {
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let wanted = bytes.len();
        (pread(self.node.file(), bytes, self.start + at as u64).ok()? == wanted).then_some(())
    }
}
