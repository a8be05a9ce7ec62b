//! What a rank prints on standard error, and in the midst of it what our own libraries say there.
//!
//! In: pieces of the stream, cut anywhere. Out: the same bytes in the same order, told apart by the mark that begins each line of
//! ours ([`LINE_MARK`]). A line of ours is written at once and as one, so nothing of the program's stands inside of it.
//!
//! What may never happen: a byte of the program is lost, or waits for longer than until the process has ended.

use landbridge_proto::id::{LAST_WORD, LINE_MARK};

/// A line of ours that is longer is shown as far as it has come.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// See the module head.
#[derive(Debug, Default)]
pub struct Marked {
    /// The beginning of a mark, or of a line of ours.
    held: Vec<u8>,
}

/// One part of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    Program(Vec<u8>),
    /// A line of ours, without the mark.
    Own(Vec<u8>),
    /// The process cannot go on, and ends.
    LastWord,
}

impl Marked {
    /// The next bytes have come.
    pub fn split(&mut self, bytes: &[u8]) -> Vec<Part> {
        let mark = LINE_MARK.as_bytes();
        let mut rest = std::mem::take(&mut self.held);
        rest.extend_from_slice(bytes);
        let mut parts = Vec::new();
        while let Some(at) = find_mark(&rest) {
            let own = rest.split_off(at);
            add_program(&mut parts, std::mem::replace(&mut rest, own));
            let end = rest.iter().position(|&byte| byte == b'\n').map(|end| end + 1);
            let is_whole =
                rest.len() >= mark.len() && (end.is_some() || rest.len() > LINE_BYTES_MAX);
            if !is_whole {
                self.held = rest;
                return parts;
            }
            let others = rest.split_off(end.unwrap_or(rest.len()));
            parts.push(own_part(&std::mem::replace(&mut rest, others)));
        }
        add_program(&mut parts, rest);
        parts
    }

    /// Nothing more comes.
    pub fn end(&mut self) -> Option<Part> {
        let held = std::mem::take(&mut self.held);
        match held.starts_with(LINE_MARK.as_bytes()) {
            true => Some(own_part(&held)),
            false => Some(Part::Program(held)).filter(|part| *part != Part::Program(Vec::new())),
        }
    }
}

/// Where a mark stands, or the beginning of one at the very end.
fn find_mark(bytes: &[u8]) -> Option<usize> {
    let mark = LINE_MARK.as_bytes();
    let places = bytes.iter().enumerate().filter(|(_, byte)| **byte == mark[0]);
    places.map(|(at, _)| at).find(|&at| {
        let here = &bytes[at..];
        mark.starts_with(&here[..here.len().min(mark.len())])
    })
}

fn add_program(parts: &mut Vec<Part>, bytes: Vec<u8>) {
    if !bytes.is_empty() {
        parts.push(Part::Program(bytes));
    }
}

/// `line`: from its mark on.
fn own_part(line: &[u8]) -> Part {
    match line.strip_prefix(LINE_MARK.as_bytes()) {
        Some(rest) if rest.trim_ascii_end() == LAST_WORD.as_bytes() => Part::LastWord,
        // The mark is one byte that nobody sees, and our name.
        _ => Part::Own(line[1..].to_vec()),
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
    fn lines_of_ours_are_told_from_the_programs_wherever_the_stream_is_cut() {
        let own = || Part::Own(b"landbridge[7]: Warn: x\n".to_vec());
        let expected = [
            program(b"one"),
            own(),
            program(b"two \x1e\x1eland 3\n"),
            Part::LastWord,
            program(b"four"),
        ];
        assert_eq!(Marked::default().split(STREAM), expected);
        for cut in 0..STREAM.len() {
            let mut marked = Marked::default();
            let (front, back) = STREAM.split_at(cut);
            let mut parts = marked.split(front);
            parts.extend(marked.split(back));
            assert_eq!(marked.end(), None);
            let of = |wanted: fn(&Part) -> bool| parts.iter().filter(|part| wanted(part)).count();
            assert_eq!(of(|part| *part == Part::LastWord), 1, "cut at {cut}");
            assert_eq!(of(|part| matches!(part, Part::Own(_))), 1, "cut at {cut}");
            let programs = parts.iter().filter_map(|part| match part {
                Part::Program(bytes) => Some(&bytes[..]),
                _ => None,
            });
            let all: Vec<u8> = programs.flatten().copied().collect();
            assert_eq!(all, b"onetwo \x1e\x1eland 3\nfour", "cut at {cut}");
        }
    }

    #[test]
    fn what_is_held_at_the_end_is_given_out() {
        let mut marked = Marked::default();
        assert_eq!(marked.split(b"a\x1elandb"), [program(b"a")]);
        assert_eq!(marked.end(), Some(program(b"\x1elandb")));
        assert_eq!(marked.split(b"\x1elandbridge[1]: Wa"), []);
        assert_eq!(marked.end(), Some(Part::Own(b"landbridge[1]: Wa".to_vec())));
        assert_eq!(marked.end(), None);
        let long = [LINE_MARK.as_bytes(), &vec![b'x'; LINE_BYTES_MAX]].concat();
        assert_eq!(marked.split(&long).len(), 1, "nothing is held for ever");
    }
}
