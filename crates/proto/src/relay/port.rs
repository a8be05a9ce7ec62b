//! One link of a relay: who is at its other end, what waits for it, and who waits to send to it.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::id::{Address, ClusterId};
use crate::relay::{ATTACH_MILLIS_MAX, PEER_AWAY_MILLIS_MAX};
use crate::route::queue::{Pool, Queue};
use crate::route::table::LinkId;
use crate::wire::frame::Header;

/// Runs of frames of one channel that a port remembers after it has sent them, so that a break can
/// be reported exactly: about 1 MiB per peer relay.
const JOURNAL_ENTRIES_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Party {
    Endpoint(Address),
    Peer(ClusterId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Up {
        incarnation: u32,
    },
    /// Not connected; what waits for it is given up some time after `since`.
    Away {
        since: u64,
    },
    /// Given up: nothing may wait for it.
    Lost,
}

/// A whole frame in the buffer of the input that is being handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub at: usize,
    pub length: usize,
}

/// A frame that waits.
#[derive(Clone, Copy, Debug)]
struct Note {
    length: u32,
    source: Address,
    target: Address,
}

/// Frames of one channel that were sent one after the other, the last one ending at `end`.
#[derive(Clone, Copy, Debug)]
struct Run {
    end: u64,
    source: Address,
    target: Address,
}

#[derive(Debug)]
pub(super) struct Port {
    pub party: Party,
    pub state: State,
    /// Start of the peer relay that was connected last.
    pub incarnation: u32,
    /// Bytes of whole frames taken in.
    pub received: u64,
    pub queue: Queue,
    /// Frames of the current buffer, adjacent ones joined.
    pub pieces: Vec<Piece>,
    /// All frames that wait, those of the queue before those of the pieces.
    notes: VecDeque<Note>,
    pieces_bytes: usize,
    /// Bytes of the first frame that have been sent.
    begun: usize,
    sent: u64,
    journal: VecDeque<Run>,
    /// Inputs that wait for room, in order.
    pub line: VecDeque<LinkId>,
    pub waits_for: Option<LinkId>,
    pub in_flush: bool,
    pub in_resume: bool,
}

impl Port {
    pub fn new(party: Party, state: State) -> Self {
        Self {
            party,
            state,
            incarnation: 0,
            received: 0,
            queue: Queue::default(),
            pieces: Vec::new(),
            notes: VecDeque::new(),
            pieces_bytes: 0,
            begun: 0,
            sent: 0,
            journal: VecDeque::new(),
            line: VecDeque::new(),
            waits_for: None,
            in_flush: false,
            in_resume: false,
        }
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    pub fn is_late(&self, now_millis: u64) -> bool {
        let State::Away { since } = self.state else { return false };
        let patience = match self.party {
            Party::Endpoint(_) => ATTACH_MILLIS_MAX,
            Party::Peer(_) => PEER_AWAY_MILLIS_MAX,
        };
        now_millis.saturating_sub(since) > patience
    }

    /// Memory that what waits for this port takes, notes included.
    #[inline]
    pub fn waiting_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes + self.notes.len() * size_of::<Note>()
    }

    /// A frame of the current buffer goes out here.
    #[inline]
    pub fn take(&mut self, piece: Piece, header: &Header) {
        self.note(piece.length, header);
        self.pieces_bytes += piece.length;
        match self.pieces.last_mut() {
            Some(last) if last.at + last.length == piece.at => last.length += piece.length,
            _ => self.pieces.push(piece),
        }
    }

    /// A frame made here goes out after all that waits. Only while there are no pieces.
    pub fn push_notice(&mut self, pool: &mut Pool, bytes: &[u8], header: &Header) {
        debug_assert!(self.pieces.is_empty(), "pieces would be overtaken");
        self.note(bytes.len(), header);
        self.queue.push(pool, bytes);
    }

    #[inline]
    fn note(&mut self, length: usize, header: &Header) {
        let note = Note { length: length as u32, source: header.source, target: header.target };
        self.notes.push_back(note);
    }

    pub fn frame_lengths(&self) -> impl Iterator<Item = usize> {
        let begun = self.begun;
        let rest =
            move |(n, note): (usize, &Note)| note.length as usize - if n == 0 { begun } else { 0 };
        self.notes.iter().enumerate().map(rest)
    }

    /// Bytes sent over all connections, a begun frame included.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// `bytes` bytes have left: first from the queue, then from the pieces.
    pub fn sent_bytes(&mut self, pool: &mut Pool, bytes: usize) {
        let queued = bytes.min(self.queue.len());
        self.queue.pop(pool, queued);
        self.advance_pieces(bytes - queued);
        self.advance_notes(bytes);
    }

    fn advance_pieces(&mut self, mut bytes: usize) {
        self.pieces_bytes -= bytes;
        let whole = |piece: &&Piece| {
            let fits = piece.length <= bytes;
            bytes -= if fits { piece.length } else { 0 };
            fits
        };
        let gone = self.pieces.iter().take_while(whole).count();
        self.pieces.drain(..gone);
        if bytes > 0 {
            self.pieces[0].at += bytes;
            self.pieces[0].length -= bytes;
        }
    }

    #[inline]
    fn advance_notes(&mut self, bytes: usize) {
        self.begun += bytes;
        while let Some(note) = self.notes.front().copied() {
            if self.begun < note.length as usize {
                break;
            }
            self.notes.pop_front();
            self.begun -= note.length as usize;
            self.sent += note.length as u64;
            if let Party::Peer(_) = self.party {
                self.write_journal(note);
            }
        }
        if self.notes.is_empty() && self.notes.capacity() > NOTES_IDLE_MAX {
            self.notes = VecDeque::new();
        }
    }

    fn write_journal(&mut self, note: Note) {
        match self.journal.back_mut() {
            Some(run) if (run.source, run.target) == (note.source, note.target) => {
                run.end = self.sent;
            }
            _ => {
                if self.journal.len() == JOURNAL_ENTRIES_MAX {
                    self.journal.pop_front();
                }
                let run = Run { end: self.sent, source: note.source, target: note.target };
                self.journal.push_back(run);
            }
        }
    }

    /// Copies what is left of the pieces to the queue.
    pub fn keep(&mut self, pool: &mut Pool, buffer: &[u8]) {
        for piece in &self.pieces {
            self.queue.push(pool, &buffer[piece.at..piece.at + piece.length]);
        }
        self.pieces.clear();
        self.pieces_bytes = 0;
    }

    /// The connection is gone in the middle of a frame: the rest of it makes no sense to the next
    /// connection, so it counts as sent, and will be found missing.
    pub fn drop_begun_frame(&mut self, pool: &mut Pool) {
        if self.begun > 0 {
            let rest = self.notes[0].length as usize - self.begun;
            self.sent_bytes(pool, rest);
        }
    }

    /// The channels among the last `lost_bytes` bytes sent, each once. (Source, target.)
    pub fn holes(&self, lost_bytes: u64) -> BTreeSet<(Address, Address)> {
        let arrived = self.sent - lost_bytes;
        let missing = self.journal.iter().rev().take_while(|run| run.end > arrived);
        missing.map(|run| (run.source, run.target)).collect()
    }

    /// The next connection starts where the peer relay says it is.
    pub fn restart_stream(&mut self, received: u64) {
        self.sent = self.sent.min(received);
        self.journal = VecDeque::new();
    }

    /// Drops all that waits; gives the channels it belonged to.
    pub fn discard(&mut self, pool: &mut Pool) -> BTreeSet<(Address, Address)> {
        self.queue.pop(pool, self.queue.len());
        self.pieces = Vec::new();
        self.pieces_bytes = 0;
        self.begun = 0;
        core::mem::take(&mut self.notes).iter().map(|note| (note.source, note.target)).collect()
    }
}

/// Notes for which an idle port keeps room: a few, since most ports are idle.
const NOTES_IDLE_MAX: usize = 64;
