//! The output log of all incarnations of a rank on one stream, and the comparison of a new
//! incarnation with the log. The module is pure.
//!
//! In: bytes of the stream, in pieces of any size. Out: the bytes that no incarnation has printed
//! before, or the [`Divergence`] of the present incarnation.
//!
//! The log holds at least the last [`TEXT_BYTES`] as text and a digest at its end. In front of the
//! text the log holds a [`Position`] every few KiB, with a digest of all bytes up to the position.
//! So the comparison always finds a difference before it gives out the first new byte: inside the
//! text byte by byte, in front of the text at the next position.
//!
//! An incarnation that a signal or an error ends may print last words (a traceback) that the next
//! incarnation does not print. The log is then cut back to the start of the last words
//! ([`OutputLog::cut`]), as far back as text is held.
//!
//! What may never happen: bytes of an incarnation that differs are given out; memory grows with the
//! size of the output.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes at the end of the stream that the log holds as text.
pub const TEXT_BYTES: usize = 64 << 10;
/// Bytes from one position to the next, as long as there are few positions.
const SPACING_BYTES: u64 = 16 << 10;
/// Positions at most; with more, every second position is dropped.
const POSITIONS_MAX: usize = 4096;
/// Bytes of text that move to another node together with a rank.
const MOVED_TEXT_BYTES: usize = 4 << 10;
/// Positions in the text that move to another node together with a rank.
const MOVED_POSITIONS_MAX: usize = 256;
/// Bytes of the incarnation's present line that are held for an error message.
const LINE_BYTES_MAX: usize = 4 << 10;
/// Bytes of a line that an error message shows, in front of a difference and from the difference
/// on.
const SHOWN_BEFORE: usize = 80;
const SHOWN_BEHIND: usize = 120;

/// A position in a stream, with a digest (FNV-1a, 64 bits) of all bytes before the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub bytes: u64,
    /// Lines that end before the position.
    pub lines: u64,
    #[serde(with = "signed")]
    pub digest: u64,
}

/// Serialises a digest as a signed number, because TOML documents have no unsigned 64-bit numbers.
mod signed {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i64(number.cast_signed())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        Ok(i64::deserialize(from)?.cast_unsigned())
    }
}

const DIGEST_OF_NOTHING: u64 = 0xcbf2_9ce4_8422_2325;
const DIGEST_FACTOR: u64 = 0x0000_0100_0000_01b3;
/// The inverse of `DIGEST_FACTOR` modulo 2^64, with which digests can be undone byte by byte.
const DIGEST_INVERSE: u64 = 0xce96_5057_aff6_957b;
const _: () = assert!(DIGEST_FACTOR.wrapping_mul(DIGEST_INVERSE) == 1);

impl Default for Position {
    fn default() -> Position {
        Position { bytes: 0, lines: 0, digest: DIGEST_OF_NOTHING }
    }
}

impl Position {
    fn advance(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        for &byte in bytes {
            self.lines += u64::from(byte == b'\n');
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(DIGEST_FACTOR);
        }
    }

    /// Moves back to the position where `bytes` began; `bytes` end at the present position.
    fn go_back(&mut self, bytes: &[u8]) {
        self.bytes -= bytes.len() as u64;
        for &byte in bytes.iter().rev() {
            self.lines -= u64::from(byte == b'\n');
            self.digest = self.digest.wrapping_mul(DIGEST_INVERSE) ^ u64::from(byte);
        }
    }
}

/// How an incarnation differs from earlier incarnations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Divergence {
    /// Line `line`, counted from 1, differs.
    Line { line: u64, now: String, before: String },
    /// A byte in lines `first` to `last` differs; the text of these lines is not held any more.
    Lines { first: u64, last: u64, bytes: u64, now: u64, before: u64 },
    /// The incarnation prints more than earlier incarnations printed, from this line on.
    More { line: u64, now: String },
    /// The incarnation has ended, and has not printed everything that earlier incarnations printed.
    Less { now: Position, before: Position },
}

impl fmt::Display for Divergence {
    /// Writes the difference; the text follows the name of the stream.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Divergence::Line { line, now, before } => {
                write!(out, "line {line} is {now:?}, and was {before:?}")
            }
            Divergence::Lines { first, last, bytes, now, before } => write!(
                out,
                "something in lines {first} to {last} is another text: the digest of its first \
                 {bytes} bytes is {now:016x}, and was {before:016x}"
            ),
            Divergence::More { line, now } => {
                write!(out, "line {line} is {now:?}, and there was nothing in its place")
            }
            Divergence::Less { now, before } => write!(
                out,
                "it ended after {} bytes ({} lines), and there were {} bytes ({} lines)",
                now.bytes, now.lines, before.bytes, before.lines
            ),
        }
    }
}

/// The output of all incarnations on one stream: text at the end, digests in front of the text. The
/// module head describes the layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputLog {
    end: Position,
    /// Positions in front of the end, ascending.
    positions: Vec<Position>,
    /// Positions are at multiples of this number of bytes.
    spacing: u64,
    /// The last bytes in front of the end.
    #[serde(with = "text")]
    text: Vec<u8>,
}

impl Default for OutputLog {
    fn default() -> OutputLog {
        OutputLog {
            end: Position::default(),
            positions: Vec::new(),
            spacing: SPACING_BYTES,
            text: Vec::new(),
        }
    }
}

impl OutputLog {
    pub fn end(&self) -> Position {
        self.end
    }

    pub fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.spacing - self.end.bytes % self.spacing;
            let (now, later) = bytes.split_at(bytes.len().min(room as usize));
            self.end.advance(now);
            self.text.extend_from_slice(now);
            if self.end.bytes.is_multiple_of(self.spacing) {
                self.positions.push(self.end);
            }
            bytes = later;
        }
        thin(&mut self.positions, &mut self.spacing, POSITIONS_MAX);
        // The text is not trimmed at each append, because trimming moves the remaining bytes.
        if self.text.len() > 2 * TEXT_BYTES {
            self.text.drain(..self.text.len() - TEXT_BYTES);
        }
    }

    /// Forgets all bytes from position `bytes` on. Returns false if the text from there on is not
    /// held any more.
    pub fn cut(&mut self, bytes: u64) -> bool {
        let held = self.end.bytes - self.text.len() as u64;
        if !(held..=self.end.bytes).contains(&bytes) {
            return false;
        }
        let forgotten = self.text.split_off((bytes - held) as usize);
        self.end.go_back(&forgotten);
        self.positions.retain(|position| position.bytes <= bytes);
        true
    }

    /// Moves the end of the log to `at`; the bytes before `at` are known only by their digest.
    fn skip_to(&mut self, at: Position) {
        (self.end, self.text) = (at, Vec::new());
    }

    /// The part of the log that another node needs: the last 4 KiB of text and 256 positions.
    pub fn for_move(&self) -> OutputLog {
        let mut moved = self.clone();
        thin(&mut moved.positions, &mut moved.spacing, MOVED_POSITIONS_MAX);
        moved.text.drain(..moved.text.len().saturating_sub(MOVED_TEXT_BYTES));
        moved
    }

    /// The first position behind `bytes` at which a digest is known.
    fn next_position(&self, bytes: u64) -> Position {
        let at = self.positions.partition_point(|position| position.bytes <= bytes);
        self.positions.get(at).copied().unwrap_or(self.end)
    }

    /// The last position at or before `bytes` at which a digest is known.
    fn previous_position(&self, bytes: u64) -> Position {
        let at = self.positions.partition_point(|position| position.bytes <= bytes);
        at.checked_sub(1).map_or(Position::default(), |at| self.positions[at])
    }

    /// The text from position `bytes` on, if the log holds the text.
    fn text_from(&self, bytes: u64) -> Option<&[u8]> {
        let held = self.end.bytes - self.text.len() as u64;
        self.text.get(usize::try_from(bytes.checked_sub(held)?).ok()?..)
    }

    /// The number of leading bytes of `bytes`, which stand at position `at`, that do not differ
    /// from the text held.
    fn alike(&self, at: u64, bytes: &[u8]) -> usize {
        let held = self.end.bytes - self.text.len() as u64;
        let unknown = (held.saturating_sub(at) as usize).min(bytes.len());
        let Some(text) = self.text_from(at + unknown as u64) else { return bytes.len() };
        let pairs = text.iter().zip(&bytes[unknown..]);
        unknown + pairs.take_while(|(before, now)| before == now).count()
    }
}

fn thin(positions: &mut Vec<Position>, spacing: &mut u64, most: usize) {
    while positions.len() > most {
        *spacing *= 2;
        positions.retain(|position| position.bytes.is_multiple_of(*spacing));
    }
}

/// Serialises bytes as characters of the same numbers, so that a document can hold the bytes.
mod text {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&bytes.iter().map(|&byte| char::from(byte)).collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        Ok(text.chars().map(|letter| letter as u8).collect())
    }
}

/// One stream of a rank: the log, and the position of the present incarnation in the log.
#[derive(Debug, Clone)]
pub struct OutputReplay {
    log: OutputLog,
    at: Position,
    /// Bytes before the first one that the present incarnation prints.
    begun: u64,
    /// The line that the present incarnation is printing, or the end of that line.
    line: Vec<u8>,
    line_is_whole: bool,
    /// Position from which on the log may hold last words, which the next incarnation need not
    /// repeat.
    last_words: Option<u64>,
}

/// The result of comparing a piece of output with the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// Bytes that no incarnation has printed before.
    pub new: Vec<u8>,
    /// Last words that were not repeated: the log was cut back to the first position from the
    /// second.
    pub cut: Option<(u64, u64)>,
}

impl Default for OutputReplay {
    fn default() -> OutputReplay {
        OutputReplay::adopted(OutputLog::default())
    }
}

impl OutputReplay {
    pub fn adopted(log: OutputLog) -> OutputReplay {
        let (at, line) = (Position::default(), Vec::new());
        OutputReplay { log, at, begun: 0, line, line_is_whole: true, last_words: None }
    }

    pub fn log(&self) -> &OutputLog {
        &self.log
    }

    /// The position of the present incarnation.
    pub fn at(&self) -> Position {
        self.at
    }

    /// Whether the present incarnation has printed anything.
    pub fn has_printed(&self) -> bool {
        self.at.bytes > self.begun
    }

    /// Whether the next byte begins a line.
    pub fn is_line_start(&self) -> bool {
        self.line_is_whole && self.line.is_empty()
    }

    pub fn is_behind(&self) -> bool {
        self.at.bytes < self.log.end.bytes
    }

    /// Begins a new incarnation, at the start of the program or at the position of a checkpoint.
    pub fn begin_at(&mut self, at: Position) {
        if at.bytes > self.log.end.bytes {
            self.log.skip_to(at);
        }
        (self.at, self.begun, self.line) = (at, at.bytes, Vec::new());
        let last = self.log.text_from(at.bytes.saturating_sub(1)).and_then(<[u8]>::first);
        let is_line_start = last == Some(&b'\n');
        self.line_is_whole = at.bytes == 0 || is_line_start;
    }

    /// Records that a new incarnation need not repeat the bytes of the log from position `from` on.
    pub fn set_last_words(&mut self, from: u64) {
        self.last_words = (from < self.log.end.bytes).then_some(from);
    }

    /// Position from which on a new incarnation need not repeat the log, if it may hold last words.
    pub fn last_words(&self) -> Option<u64> {
        self.last_words
    }

    /// Compares bytes that the present incarnation prints with the log, and returns the new bytes.
    pub fn print(&mut self, bytes: &[u8]) -> Result<Replayed, Divergence> {
        let mut rest = bytes;
        while !rest.is_empty() && self.is_behind() {
            let check = self.log.next_position(self.at.bytes);
            let count = rest.len().min((check.bytes - self.at.bytes) as usize);
            let alike = self.log.alike(self.at.bytes, &rest[..count]);
            let (known, later) = rest.split_at(alike);
            self.advance(known);
            rest = later;
            if alike < count {
                return self.differ(rest);
            }
            if self.at.bytes == check.bytes && self.at.digest != check.digest {
                let previous = self.log.previous_position(check.bytes - 1);
                return Err(Divergence::Lines {
                    first: previous.lines + 1,
                    last: check.lines + 1,
                    bytes: check.bytes,
                    now: self.at.digest,
                    before: check.digest,
                });
            }
        }
        self.log.append(rest);
        self.advance(rest);
        Ok(Replayed { new: rest.to_vec(), cut: None })
    }

    /// Handles bytes that differ from the bytes printed here before.
    fn differ(&mut self, rest: &[u8]) -> Result<Replayed, Divergence> {
        let end = self.log.end.bytes;
        let line_start = self.at.bytes - self.line.len() as u64;
        if let Some(from) = self.last_words.filter(|from| *from <= self.at.bytes) {
            // A line that the last words interrupted is given out whole.
            let is_shown_whole = self.line_is_whole && line_start >= from;
            let back = if is_shown_whole { line_start } else { self.at.bytes };
            if self.log.cut(back) {
                let mut new =
                    self.line[self.line.len() - (self.at.bytes - back) as usize..].to_vec();
                new.extend_from_slice(rest);
                self.log.append(&new);
                self.advance(rest);
                self.last_words = None;
                return Ok(Replayed { new, cut: Some((back, end)) });
            }
        }
        let before = self.log.text_from(self.at.bytes).unwrap_or(&[]);
        let (now, before) = (self.shown(rest), self.shown(before));
        Err(Divergence::Line { line: self.at.lines + 1, now, before })
    }

    /// Checks that the present incarnation, which has ended by itself, has printed the whole log.
    pub fn end(&self) -> Result<(), Divergence> {
        let is_left_out =
            self.is_behind() && self.last_words.is_none_or(|from| self.at.bytes < from);
        let (now, before) = (self.at, self.log.end);
        if is_left_out { Err(Divergence::Less { now, before }) } else { Ok(()) }
    }

    /// The divergence of an incarnation that prints the new bytes `new` where no new bytes may be.
    pub fn more(&self, new: &[u8]) -> Divergence {
        let behind = self.log.end;
        let lines = new.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let now = String::from_utf8_lossy(first_line(new)).into_owned();
        Divergence::More { line: behind.lines - lines + 1, now }
    }

    /// The present line followed by `rest`, shortened to what an error message shows.
    fn shown(&self, rest: &[u8]) -> String {
        let is_cut = !self.line_is_whole || self.line.len() > SHOWN_BEFORE;
        let before = &self.line[self.line.len().saturating_sub(SHOWN_BEFORE)..];
        let shown = [before, first_line(rest)].concat();
        format!("{}{}", if is_cut { "…" } else { "" }, String::from_utf8_lossy(&shown))
    }

    fn advance(&mut self, bytes: &[u8]) {
        self.at.advance(bytes);
        let line_start = bytes.iter().rposition(|&byte| byte == b'\n').map(|end| end + 1);
        if let Some(start) = line_start {
            (self.line, self.line_is_whole) = (bytes[start..].to_vec(), true);
        } else {
            self.line.extend_from_slice(bytes);
        }
        let excess = self.line.len().saturating_sub(LINE_BYTES_MAX);
        if excess > 0 {
            self.line.drain(..excess);
            self.line_is_whole = false;
        }
    }
}

/// The first line of `bytes` without its line end, at most [`SHOWN_BEHIND`] bytes.
fn first_line(bytes: &[u8]) -> &[u8] {
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
    &line[..line.len().min(SHOWN_BEHIND)]
}

#[cfg(test)]
mod tests;
