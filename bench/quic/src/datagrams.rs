//! Messages over QUIC datagrams (RFC 9221), repaired above QUIC: what Landbridge's direct paths would see if they left
//! packets, encryption and congestion control to quinn and kept their own order and repair.
//!
//! A message is cut into pieces, one for each datagram. The receiver asks for the pieces that are missing: three pieces
//! behind a gap, or after silence. The last piece of a message needs no acknowledgement, since the answer to the message
//! is one. What may never happen: a message is complete before each of its pieces has been placed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use quinn::{Connection, SendDatagramError};

/// Kind, number of the message, number of the piece, and bytes of the whole message.
const HEAD_BYTES: usize = 1 + 4 + 4 + 4;
const PIECE: u8 = 1;
/// A list of piece numbers of a message, which are missing.
const REQUEST: u8 = 2;
const REQUESTED_MAX: usize = 256;
/// Pieces that may overtake another one before it counts as lost (RFC 9002, 6.1.1).
const REORDERED_MAX: usize = 3;

/// One end of the exchange. The ends send in turns: message 0 from the client, 1 from the server, and so on.
pub struct Exchange {
    connection: Connection,
    piece_bytes: usize,
    next: u32,
    /// The message sent last, from which pieces are repeated.
    sent: Vec<u8>,
    sent_number: u32,
}

/// A message that is being received.
struct Arriving {
    number: u32,
    has_size: bool,
    /// For each piece: whether it has arrived, and when it was asked for.
    pieces: Vec<(bool, Option<Instant>)>,
    left: usize,
    highest: usize,
    /// All pieces below this one have arrived.
    complete_below: usize,
}

impl Exchange {
    pub fn new(connection: Connection) -> Result<Self> {
        // The path MTU grows later; pieces of one size keep their numbers.
        let Some(bytes) = connection.max_datagram_size() else { bail!("the peer takes no datagrams") };
        let piece_bytes = bytes.min(1150) - HEAD_BYTES;
        Ok(Self { connection, piece_bytes, next: 0, sent: Vec::new(), sent_number: u32::MAX })
    }

    /// Sends a message. Returns as soon as quinn has taken all of it.
    pub async fn give(&mut self, bytes: &[u8]) -> Result<()> {
        self.sent.clear();
        self.sent.extend_from_slice(bytes);
        self.sent_number = self.next;
        self.next += 1;
        for piece in 0..bytes.len().div_ceil(self.piece_bytes) {
            let datagram = self.piece(piece);
            let sending = self.connection.clone();
            let mut sending = std::pin::pin!(sending.send_datagram_wait(datagram.into()));
            loop {
                tokio::select! {
                    biased;
                    taken = &mut sending => { taken?; break }
                    // The peer asks for pieces while later ones still wait here.
                    datagram = self.connection.read_datagram() => self.answer(&datagram?)?,
                }
            }
        }
        Ok(())
    }

    /// Receives the next message into `bytes`.
    pub async fn take(&mut self, bytes: &mut Vec<u8>) -> Result<()> {
        let mut arriving = Arriving::new(self.next);
        self.next += 1;
        bytes.clear();
        let mut heard = Instant::now();
        while arriving.left > 0 {
            let rtt = self.connection.rtt();
            let silence = rtt.mul_f64(1.5) + Duration::from_millis(1);
            match tokio::time::timeout(silence, self.connection.read_datagram()).await {
                Ok(datagram) => {
                    heard = Instant::now();
                    let datagram = datagram?;
                    if datagram.len() > HEAD_BYTES && datagram[0] == PIECE {
                        arriving.place(&datagram, bytes, self.piece_bytes)?;
                    } else {
                        self.answer(&datagram)?;
                    }
                    self.request(&arriving.lost(arriving.highest.saturating_sub(REORDERED_MAX), rtt), &arriving)?;
                }
                Err(_) if arriving.has_size => {
                    self.request(&arriving.lost(arriving.pieces.len(), rtt), &arriving)?;
                }
                // All of the peer's message may be lost, or all of the own message before it.
                Err(_) if heard.elapsed() > silence => self.repeat(0)?,
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn piece(&self, piece: usize) -> Vec<u8> {
        let from = piece * self.piece_bytes;
        let payload = &self.sent[from..self.sent.len().min(from + self.piece_bytes)];
        let mut datagram = head(PIECE, self.sent_number, piece as u32, self.sent.len() as u32);
        datagram.extend_from_slice(payload);
        datagram
    }

    fn repeat(&self, piece: usize) -> Result<()> {
        match piece * self.piece_bytes < self.sent.len() {
            true => queue(&self.connection, self.piece(piece)),
            false => Ok(()),
        }
    }

    /// Sends the pieces again for which the peer asks. Other datagrams here are late copies.
    fn answer(&self, datagram: &[u8]) -> Result<()> {
        if datagram.len() < HEAD_BYTES || datagram[0] != REQUEST || word(datagram, 1) != self.sent_number {
            return Ok(());
        }
        for at in (HEAD_BYTES..datagram.len()).step_by(4) {
            self.repeat(word(datagram, at) as usize)?;
        }
        Ok(())
    }

    fn request(&self, lost: &[u32], arriving: &Arriving) -> Result<()> {
        for lost in lost.chunks(REQUESTED_MAX) {
            let mut datagram = head(REQUEST, arriving.number, 0, 0);
            datagram.extend(lost.iter().flat_map(|piece| piece.to_le_bytes()));
            queue(&self.connection, datagram)?;
        }
        Ok(())
    }
}

impl Arriving {
    fn new(number: u32) -> Self {
        Self { number, has_size: false, pieces: vec![(false, None)], left: 1, highest: 0, complete_below: 0 }
    }

    fn place(&mut self, datagram: &[u8], bytes: &mut Vec<u8>, piece_bytes: usize) -> Result<()> {
        if word(datagram, 1) != self.number {
            return Ok(());
        }
        let (piece, size) = (word(datagram, 5) as usize, word(datagram, 9) as usize);
        if !self.has_size {
            bytes.resize(size, 0);
            self.left = size.div_ceil(piece_bytes);
            self.pieces = vec![(false, None); self.left];
            self.has_size = true;
        }
        let (from, payload) = (piece * piece_bytes, &datagram[HEAD_BYTES..]);
        if size != bytes.len() || from + payload.len() > size {
            bail!("piece {piece} lies outside of its message");
        }
        if !std::mem::replace(&mut self.pieces[piece].0, true) {
            bytes[from..from + payload.len()].copy_from_slice(payload);
            self.left -= 1;
            self.highest = self.highest.max(piece);
            while self.pieces.get(self.complete_below).is_some_and(|piece| piece.0) {
                self.complete_below += 1;
            }
        }
        Ok(())
    }

    /// Pieces below `end` that are missing, and were not asked for within the last round trip.
    fn lost(&mut self, end: usize, rtt: Duration) -> Vec<u32> {
        let (now, again) = (Instant::now(), rtt.mul_f64(1.25) + Duration::from_micros(200));
        let mut lost = Vec::new();
        for at in self.complete_below..end.min(self.pieces.len()) {
            let (has_arrived, asked) = &mut self.pieces[at];
            if !*has_arrived && asked.is_none_or(|asked| now - asked > again) {
                *asked = Some(now);
                lost.push(at as u32);
            }
        }
        lost
    }
}

/// Queues a datagram that does not wait. If quinn's queue is full the oldest datagram of it is lost, as on the link.
fn queue(connection: &Connection, datagram: Vec<u8>) -> Result<()> {
    match connection.send_datagram(datagram.into()) {
        Err(SendDatagramError::ConnectionLost(lost)) => Err(lost.into()),
        other => Ok(other?),
    }
}

fn head(kind: u8, message: u32, piece: u32, size: u32) -> Vec<u8> {
    let mut head = vec![kind];
    head.extend([message, piece, size].iter().flat_map(|word| word.to_le_bytes()));
    head
}

fn word(datagram: &[u8], at: usize) -> u32 {
    datagram.get(at..at + 4).map_or(u32::MAX, |word| u32::from_le_bytes(word.try_into().expect("four bytes")))
}
