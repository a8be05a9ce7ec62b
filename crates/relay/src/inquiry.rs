//! What a relay keeps of its processes, for whoever has started it: asked in a line on its standard input, and told in lines on
//! its standard output.
//!
//! ```text
//! log all 0             what is kept of each endpoint, from this one on
//! log one 3 100 20      of process 3: 20 intakes from number 100 on, and their frames
//! ```
//!
//! Each line of the answer is a JSON object behind `log `; the last one is `end`, with the endpoint from which on to ask for more, or
//! `-`.

use std::fmt::Write as _;

use landbridge_drive::engine::{Exhibit, Inquiry};
use landbridge_proto::id::Address;
use landbridge_proto::relay::{Holding, Moment, Shown};

/// Reads a question.
pub fn parse(line: &str) -> Option<Inquiry> {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["log", "all", first] => Some(Inquiry::All(Address(first.parse().ok()?))),
        ["log", "one", index, from, count] => {
            let index = index.parse().ok().filter(|index| *index <= Address::INDEX_MAX)?;
            let address = Address::new(index, 0);
            Some(Inquiry::One { address, from: from.parse().ok()?, count: count.parse().ok()? })
        }
        _ => None,
    }
}

/// The lines of an answer.
pub fn lines(exhibit: &Exhibit) -> Vec<String> {
    let mut lines = Vec::new();
    let mut next = None;
    match exhibit {
        Exhibit::All(holdings, more) => {
            lines.extend(holdings.iter().map(holding));
            next = *more;
        }
        Exhibit::One(None) => (),
        Exhibit::One(Some(excerpt)) => {
            lines.extend(excerpt.moments.iter().map(moment));
            lines.extend(excerpt.frames.iter().map(shown));
        }
    }
    let next = next.map_or_else(|| "-".to_string(), |address| address.0.to_string());
    lines.push(format!("end {next}"));
    lines
}

/// Numbers under their names; nothing in it needs to be escaped.
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

fn holding(it: &Holding) -> String {
    let fields = [
        ("process", u64::from(it.address.index())),
        ("endpoint", u64::from(it.address.0 & 0xff)),
        ("frames", it.frames),
        ("bytes", it.bytes),
        ("disk_bytes", it.disk_bytes),
        ("sent", it.sent),
        ("intakes", it.intakes),
        ("intake_bytes", it.intake_bytes),
        ("taken_in", it.taken_in),
        ("polls", it.polls),
    ];
    let problem = it.given_up.unwrap_or_default();
    object(&fields, &format!("\"is_told\":{},\"problem\":\"{problem}\"", it.is_told))
}

fn moment(it: &Moment) -> String {
    let fields = [
        ("intake", it.number),
        ("polls", it.polls),
        ("micros", it.micros),
        ("count", u64::from(it.frames)),
        ("first_frame", it.first_frame),
    ];
    object(&fields, "")
}

fn shown(it: &Shown) -> String {
    match it {
        Shown::Away(frames) => object(&[("away_from", frames.start), ("away_to", frames.end)], ""),
        Shown::Frame(number, header) => {
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
        assert_eq!(parse("log all 768"), Some(Inquiry::All(address)));
        let one = Inquiry::One { address, from: 100, count: 20 };
        assert_eq!(parse("log one 3 100 20"), Some(one));
        for line in [
            "",
            "log",
            "log all",
            "log all x",
            "log one 3 1",
            "log all 1 2",
            "log all 5000000000",
            "log one 16777215 0 1",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn answers_are_lines_of_json_and_an_end() {
        let moment = Moment { number: 2, polls: 12, micros: 51, frames: 1, first_frame: 7 };
        let excerpt = landbridge_proto::relay::Excerpt {
            moments: vec![moment],
            frames: vec![Shown::Away(7..9)],
        };
        let expected = [
            r#"{"intake":2,"polls":12,"micros":51,"count":1,"first_frame":7}"#,
            r#"{"away_from":7,"away_to":9}"#,
            "end -",
        ];
        assert_eq!(lines(&Exhibit::One(Some(excerpt))), expected);
        assert_eq!(lines(&Exhibit::One(None)), ["end -"]);
        assert_eq!(lines(&Exhibit::All(Vec::new(), Some(Address::new(9, 0)))), ["end 2304"]);
    }
}
