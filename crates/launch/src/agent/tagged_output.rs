//! Separates lines of the project's own libraries and of libfabric from the program's output on a
//! rank's standard error.
//!
//! In: pieces of the stream, cut anywhere. Out: the same bytes in the same order, in parts of the
//! program and parts of a library. A line of the project's libraries begins with a tag
//! ([`LINE_TAG`]); a line of libfabric's log begins with known text
//! (`libfabric:4711:1763916573:…`). A library writes each line with one call, so no bytes of the
//! program stand within the line; libfabric's lines stand at the beginning of a line. Both kinds of
//! lines hold process ids and times, so they differ between incarnations that print the same
//! otherwise.
//!
//! What may never happen: a byte of the program is lost, or is held back after the process has
//! ended.

use landbridge_proto::id::{EXIT_LINE, LINE_TAG};

/// Length beyond which an incomplete library line is given out.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// Beginning of a line of libfabric's log; a process id and a time follow, each with a colon after
/// it.
const LOG_START: &[u8] = b"libfabric:";

/// Splits one stream; the module head has the rules.
#[derive(Debug)]
pub struct TaggedOutput {
    /// The beginning of a tag or of a library line that is not complete yet.
    held: Vec<u8>,
    /// The next byte begins a line.
    is_line_start: bool,
}

impl Default for TaggedOutput {
    fn default() -> TaggedOutput {
        TaggedOutput::new(true)
    }
}

/// One part of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    Program(Vec<u8>),
    /// A line of a library, without the tag byte.
    OfLibrary(Vec<u8>),
    /// The tagged notice that the process cannot continue and ends.
    FatalNotice,
}

/// Whether bytes begin with a library line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Likeness {
    None,
    /// The following bytes decide.
    Open,
    Library,
}

impl TaggedOutput {
    pub fn new(is_line_start: bool) -> TaggedOutput {
        TaggedOutput { held: Vec::new(), is_line_start }
    }

    /// Splits the next bytes of the stream.
    pub fn split(&mut self, bytes: &[u8]) -> Vec<Part> {
        let mut rest = std::mem::take(&mut self.held);
        rest.extend_from_slice(bytes);
        let mut parts = Vec::new();
        while let Some((at, likeness)) = find_library(&rest, self.is_line_start) {
            let own = rest.split_off(at);
            self.add_program(&mut parts, std::mem::replace(&mut rest, own));
            let end = rest.iter().position(|&byte| byte == b'\n').map(|end| end + 1);
            let is_whole =
                likeness == Likeness::Library && (end.is_some() || rest.len() > LINE_BYTES_MAX);
            if !is_whole {
                self.held = rest;
                return parts;
            }
            let others = rest.split_off(end.unwrap_or(rest.len()));
            parts.push(own_part(&std::mem::replace(&mut rest, others)));
        }
        self.add_program(&mut parts, rest);
        parts
    }

    /// Gives out the held bytes, because the stream has ended.
    pub fn end(&mut self) -> Option<Part> {
        let held = std::mem::take(&mut self.held);
        match likeness(&held, self.is_line_start) {
            Likeness::Library => Some(own_part(&held)),
            _ => {
                let mut parts = Vec::new();
                self.add_program(&mut parts, held);
                parts.pop()
            }
        }
    }

    fn add_program(&mut self, parts: &mut Vec<Part>, bytes: Vec<u8>) {
        if let Some(last) = bytes.last() {
            self.is_line_start = *last == b'\n';
            parts.push(Part::Program(bytes));
        }
    }
}

/// Position of the first library line, or of a possible beginning of a library line at the end of
/// `bytes`.
fn find_library(bytes: &[u8], is_line_start: bool) -> Option<(usize, Likeness)> {
    let firsts = [LINE_TAG.as_bytes()[0], LOG_START[0]];
    let places = bytes.iter().enumerate().filter(|(_, byte)| firsts.contains(byte));
    let starts_line = |at: usize| match at {
        0 => is_line_start,
        _ => bytes[at - 1] == b'\n',
    };
    let likenesses = places.map(|(at, _)| (at, likeness(&bytes[at..], starts_line(at))));
    likenesses.into_iter().find(|(_, likeness)| *likeness != Likeness::None)
}

fn likeness(bytes: &[u8], is_line_start: bool) -> Likeness {
    let mark = LINE_TAG.as_bytes();
    if bytes.starts_with(mark) {
        return Likeness::Library;
    }
    if !bytes.is_empty() && mark.starts_with(bytes) {
        return Likeness::Open;
    }
    if !is_line_start || bytes.is_empty() {
        return Likeness::None;
    }
    if LOG_START.starts_with(bytes) {
        return Likeness::Open;
    }
    let Some(mut rest) = bytes.strip_prefix(LOG_START) else { return Likeness::None };
    for _ in 0..2 {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        match rest.get(digits) {
            None => return Likeness::Open,
            Some(b':') if digits > 0 => rest = &rest[digits + 1..],
            Some(_) => return Likeness::None,
        }
    }
    Likeness::Library
}

/// The part that a library line makes. `line`: from the tag on.
fn own_part(line: &[u8]) -> Part {
    match line.strip_prefix(LINE_TAG.as_bytes()) {
        Some(rest) if rest.trim_ascii_end() == EXIT_LINE.as_bytes() => Part::FatalNotice,
        // The tag is one invisible byte and the name of the project; only the byte is removed.
        Some(_) => Part::OfLibrary(line[1..].to_vec()),
        None => Part::OfLibrary(line.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        b"one\x1elandbridge[7]: Warn: x\ntwo \x1e\x1eland 3\n\x1elandbridge cannot go on\nfour";

    fn program(bytes: &[u8]) -> Part {
        Part::Program(bytes.to_vec())
    }

    #[test]
    fn tagged_lines_are_separated_from_the_programs_wherever_the_stream_is_cut() {
        let own = || Part::OfLibrary(b"landbridge[7]: Warn: x\n".to_vec());
        let expected = [
            program(b"one"),
            own(),
            program(b"two \x1e\x1eland 3\n"),
            Part::FatalNotice,
            program(b"four"),
        ];
        assert_eq!(TaggedOutput::default().split(STREAM), expected);
        for cut in 0..STREAM.len() {
            let mut marked = TaggedOutput::default();
            let (front, back) = STREAM.split_at(cut);
            let mut parts = marked.split(front);
            parts.extend(marked.split(back));
            assert_eq!(marked.end(), None);
            let of = |wanted: fn(&Part) -> bool| parts.iter().filter(|part| wanted(part)).count();
            assert_eq!(of(|part| *part == Part::FatalNotice), 1, "cut at {cut}");
            assert_eq!(of(|part| matches!(part, Part::OfLibrary(_))), 1, "cut at {cut}");
            let programs = parts.iter().filter_map(|part| match part {
                Part::Program(bytes) => Some(&bytes[..]),
                _ => None,
            });
            let all: Vec<u8> = programs.flatten().copied().collect();
            assert_eq!(all, b"onetwo \x1e\x1eland 3\nfour", "cut at {cut}");
        }
    }

    #[test]
    fn lines_of_libfabrics_log_are_separated_from_the_programs_wherever_the_stream_is_cut() {
        const LOG: &[u8] = b"libfabric:4711:1763916573::core:core:fi_getinfo_():1<info> x\n";
        let stream = [b"lib\nlibfabric: 3\n", LOG, b"a libfabric:1:2:\nlibfabric:1:\nend"].concat();
        let expected = [
            program(b"lib\nlibfabric: 3\n"),
            Part::OfLibrary(LOG.to_vec()),
            program(b"a libfabric:1:2:\nlibfabric:1:\nend"),
        ];
        assert_eq!(TaggedOutput::default().split(&stream), expected);
        for cut in 0..stream.len() {
            let mut marked = TaggedOutput::default();
            let mut parts = marked.split(&stream[..cut]);
            parts.extend(marked.split(&stream[cut..]));
            assert_eq!(marked.end(), None, "cut at {cut}");
            let own = parts.iter().filter(|part| **part == Part::OfLibrary(LOG.to_vec())).count();
            assert_eq!(own, 1, "cut at {cut}");
        }
        let mut marked = TaggedOutput::default();
        assert_eq!(marked.split(b"libfabric:4"), []);
        assert_eq!(marked.end(), Some(program(b"libfabric:4")));
    }

    #[test]
    fn what_is_held_at_the_end_is_given_out() {
        let mut marked = TaggedOutput::default();
        assert_eq!(marked.split(b"a\x1elandb"), [program(b"a")]);
        assert_eq!(marked.end(), Some(program(b"\x1elandb")));
        assert_eq!(marked.split(b"\x1elandbridge[1]: Wa"), []);
        assert_eq!(marked.end(), Some(Part::OfLibrary(b"landbridge[1]: Wa".to_vec())));
        assert_eq!(marked.end(), None);
        let long = [LINE_TAG.as_bytes(), &vec![b'x'; LINE_BYTES_MAX]].concat();
        assert_eq!(marked.split(&long).len(), 1, "nothing is held for ever");
    }
}
