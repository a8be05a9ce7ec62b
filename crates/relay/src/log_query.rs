//! Queries about a relay's message logs, from the process that started the relay: a query is a line
//! on the relay's standard input, and the answer is lines on its standard output.
//!
//! ```text
//! log 7 all 0             the log status of each endpoint, from this one on
//! log 8 one 3 100 20      of process 3: 20 determinants from number 100 on, and their frames
//! fence 3 10000           refuses all incarnations of process 3 before this one
//! ```
//!
//! Each line of an answer is a JSON object behind `log ` and the number of the query. The asking
//! process chooses the number, so a late answer cannot be mistaken for another one. The last line
//! is `end`, with the endpoint from which on to ask for more, or `-`. A fence is answered by a line
//! of its own, which says how much of the process's recorded nondeterminism (clocks and random
//! numbers) lies in the file for it.

use std::fmt::Write as _;

use landbridge_drive::engine::{FencedRecord, LogQuery, LogReply};
use landbridge_proto::id::Address;
use landbridge_proto::relay::{DeterminantStatus, LogStatus, ShownFrame};

/// Parses a query and its number.
pub fn parse(line: &str) -> Option<(u32, LogQuery)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (serial, inquiry) = match words[..] {
        ["log", serial, "all", first] => (serial, LogQuery::All(Address(first.parse().ok()?))),
        ["log", serial, "one", index, from, count] => {
            let index = index.parse().ok().filter(|index| *index <= Address::INDEX_MAX)?;
            let address = Address::new(index, 0);
            let (from, count) = (from.parse().ok()?, count.parse().ok()?);
            (serial, LogQuery::One { address, from, count })
        }
        _ => return None,
    };
    Some((serial.parse().ok()?, inquiry))
}

/// The endpoint to fence, and the first incarnation that is not refused.
fn parse_fence(line: &str) -> Option<(Address, u32)> {
    let (index, incarnation) = line.strip_prefix("fence ")?.split_once(' ')?;
    let index = index.parse().ok().filter(|index| *index <= Address::INDEX_MAX)?;
    Some((Address::new(index, 0), incarnation.parse().ok()?))
}

/// The line that answers a fence.
pub fn fenced(who: Address, fenced: &FencedRecord) -> String {
    let FencedRecord { first, bytes, polls, is_full } = *fenced;
    let full = u8::from(is_full);
    format!("fenced process={} first={first} bytes={bytes} polls={polls} full={full}", who.index())
}

/// All fences in the whole lines of `said`.
pub fn fences(said: &[u8]) -> Vec<(Address, u32)> {
    let end = said.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    String::from_utf8_lossy(&said[..end]).lines().filter_map(parse_fence).collect()
}

/// The last query in the whole lines of `said`, and the incomplete line behind them. A process that
/// asks again no longer waits for the answer to its previous query.
pub fn newest(said: &[u8]) -> (Option<(u32, LogQuery)>, &[u8]) {
    let end = said.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    let (whole, rest) = said.split_at(end);
    let text = String::from_utf8_lossy(whole);
    (text.lines().rev().find_map(parse), rest)
}

/// The lines of the answer to query `serial`.
pub fn lines(serial: u32, exhibit: &LogReply) -> Vec<String> {
    let mut lines = Vec::new();
    let mut next = None;
    match exhibit {
        LogReply::All(holdings, more) => {
            lines.extend(holdings.iter().map(log_status_json));
            next = *more;
        }
        LogReply::One(None) => (),
        LogReply::One(Some(excerpt)) => {
            lines.extend(excerpt.determinants.iter().map(determinant_json));
            lines.extend(excerpt.frames.iter().map(frame_json));
        }
    }
    let next = next.map_or_else(|| "-".to_string(), |address| address.0.to_string());
    lines.push(format!("end {next}"));
    lines.iter_mut().for_each(|line| *line = format!("{serial} {line}"));
    lines
}

/// A JSON object of numbers under their names; nothing in it needs to be escaped.
fn object(fields: &[(&str, u64)], rest: &str) -> String {
    let mut text = String::from("{");
    for (name, number) in fields {
        let _ = write!(text, "\"{name}\":{number},");
    }
    text.push_str(rest);
    let length = text.trim_end_matches(',').len();
    text.truncate(length);
    text + "}"
}

fn log_status_json(it: &LogStatus) -> String {
    let fields = [
        ("process", u64::from(it.address.index())),
        ("endpoint", u64::from(it.address.0 & 0xff)),
        ("frames", it.frames),
        ("bytes", it.bytes),
        ("disk_bytes", it.disk_bytes),
        ("sent", it.sent),
        ("sent_bytes", it.sent_bytes),
        ("nondeterminism_bytes", it.nondeterminism_bytes),
        ("determinants", it.determinants),
        ("determinant_bytes", it.determinant_bytes),
        ("delivered_frames", it.delivered_frames),
        ("polls", it.polls),
    ];
    let problem = it.discard_reason.unwrap_or_default();
    object(&fields, &format!("\"is_replaying\":{},\"problem\":\"{problem}\"", it.is_replaying))
}

fn determinant_json(it: &DeterminantStatus) -> String {
    let fields = [
        ("determinant", it.number),
        ("polls", it.polls),
        ("micros", it.micros),
        ("count", u64::from(it.frames)),
        ("first_frame", it.first_frame),
    ];
    object(&fields, "")
}

fn frame_json(it: &ShownFrame) -> String {
    match it {
        ShownFrame::OnDisk(frames) => {
            object(&[("on_disk_from", frames.start), ("on_disk_to", frames.end)], "")
        }
        ShownFrame::Frame(number, header) => {
            let fields = [
                ("frame", *number),
                ("source", u64::from(header.source.index())),
                ("sequence", header.sequence),
                ("length", u64::from(header.length)),
            ];
            object(&fields, &format!("\"kind\":\"{:?}\"", header.kind))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_read_and_everything_else_is_not() {
        let address = Address::new(3, 0);
        assert_eq!(parse("log 0 all 768"), Some((0, LogQuery::All(address))));
        let one = LogQuery::One { address, from: 100, count: 20 };
        assert_eq!(parse("log 7 one 3 100 20"), Some((7, one)));
        for line in [
            "",
            "log",
            "log all 0",
            "log 1 all",
            "log 1 all x",
            "log x all 1",
            "log 1 one 3 1",
            "log 1 all 1 2",
            "log 1 all 5000000000",
            "log 1 one 16777215 0 1",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn who_asks_again_before_the_answer_is_answered_once() {
        let all = |serial, first| Some((serial, LogQuery::All(Address(first))));
        assert_eq!(newest(b""), (None, &b""[..]));
        assert_eq!(newest(b"log 1 a"), (None, &b"log 1 a"[..]));
        assert_eq!(newest(b"log 1 all 0\n"), (all(1, 0), &b""[..]));
        assert_eq!(newest(b"log 1 all 0\nlog 2 all 5\nlog 3"), (all(2, 5), &b"log 3"[..]));
        assert_eq!(newest(b"log 1 all 0\nwhat\n"), (all(1, 0), &b""[..]));
    }

    #[test]
    fn all_who_are_to_be_fenced_are_and_what_is_known_of_them_is_reported() {
        let said = b"fence 3 10000\nlog 1 all 0\nfence 4 2\nfence x 1\nfence 5 9";
        let (three, four) = (Address::new(3, 0), Address::new(4, 0));
        assert_eq!(fences(said), [(three, 10_000), (four, 2)]);
        assert_eq!(newest(said).1, b"fence 5 9");
        let known = FencedRecord { first: 1, bytes: 2, polls: 3, is_full: true };
        assert_eq!(fenced(three, &known), "fenced process=3 first=1 bytes=2 polls=3 full=1");
    }

    #[test]
    fn answers_are_lines_of_json_and_an_end() {
        let moment =
            DeterminantStatus { number: 2, polls: 12, micros: 51, frames: 1, first_frame: 7 };
        let excerpt = landbridge_proto::relay::LogExcerpt {
            determinants: vec![moment],
            frames: vec![ShownFrame::OnDisk(7..9)],
        };
        let expected = [
            r#"4 {"determinant":2,"polls":12,"micros":51,"count":1,"first_frame":7}"#,
            r#"4 {"on_disk_from":7,"on_disk_to":9}"#,
            "4 end -",
        ];
        assert_eq!(lines(4, &LogReply::One(Some(excerpt))), expected);
        assert_eq!(lines(0, &LogReply::One(None)), ["0 end -"]);
        assert_eq!(lines(5, &LogReply::All(Vec::new(), Some(Address::new(9, 0)))), ["5 end 2304"]);
    }
}
