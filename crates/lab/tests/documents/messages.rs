//! Messages: `docs/messages.toml` is compared with the string literals of the code, and the tables
//! of `docs/TROUBLESHOOTING.md` are made from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{check_or_write, read, root, with_table};

const MESSAGES: &str = "docs/messages.toml";

/// Heading of a component in the document, its name in `from`, and the crates whose string literals
/// its messages are made of. `proto` has the texts of errors and of settings, which all print.
const COMPONENTS: [(&str, &str, &[&str]); 4] = [
    ("## Launcher", "launcher", &["launch", "proto"]),
    ("## Relay", "relay", &["relay", "drive", "proto"]),
    ("## Provider", "provider", &["provider", "drive", "proto"]),
    ("## Interposer", "interposer", &["interpose", "proto"]),
];

/// Sources whose texts need no row, by the beginnings of their paths in `crates/`: what they print
/// explains itself, or has a document of its own.
const WITHOUT_ROWS: [&str; 12] = [
    // Texts of --help.
    "launch/src/cli.rs",
    // Advice below each finding of `landbridge doctor`.
    "launch/src/doctor/",
    // The script that `landbridge env` prints.
    "launch/src/env.rs",
    // Cells and lines of tables.
    "launch/src/ps/log_status.rs",
    "launch/src/ps/paths.rs",
    "launch/src/run/status_line.rs",
    "launch/src/settings/show.rs",
    // docs/SETTINGS.md is made from these texts.
    "proto/src/setting/table.rs",
    // Texts of libfabric's error numbers, and tests of the binary layout.
    "provider/src/abi/",
    // Assembler.
    "provider/src/atomic.rs",
    // Reasons in log lines for developers (debug).
    "provider/src/info.rs",
    // Names of keys in the hello.
    "proto/src/wire/hello.rs",
];

/// Texts that are no messages: what other programs print, what the launcher looks for in the output
/// of ranks, parts of commands, names of things inside of messages, assembler, texts of --help, and
/// what the compiler says.
const NO_MESSAGES: [&str; 23] = [
    "Connection reset by peer",
    "MPICH without libfabric",
    "OFI poll failed",
    "[rsp",
    "landbridge env --mpi",
    "of spawned group",
    "the connection to rank",
    "the relay cannot reach rank",
    "| landbridge-relay --config -",
    // The rest of the relay's --help.
    "It prints one line when it is ready",
    "logs its counters; SIGTERM and SIGINT end it",
    "input after --config -",
    "Host key verification failed",
    "No route to host",
    "No such file or directory",
    "landbridge checkpoint manifest",
    "needs to have",
    "| paste -sd,)",
    "change of a name",
    "change of flags",
    "change of size or attributes",
    "look at a",
    "the interposer is written for x86-64",
];

/// Number of words in a row, without a variable part between them, from which on a text needs a
/// row in the list.
const PROSE_WORDS_MIN: usize = 3;

#[derive(Debug)]
struct Message {
    text: String,
    /// Number of the component in [`COMPONENTS`].
    component: usize,
    means: String,
    action: String,
    code: Vec<String>,
}

impl Message {
    /// Entries are ordered by component, then by text without the signs in front of its first word
    /// and without the difference of upper and lower case.
    fn order(&self) -> (usize, String) {
        (self.component, self.text.trim_start_matches(['"', '`', '-', ';', ' ']).to_lowercase())
    }
}

#[test]
fn messages_are_complete_sorted_and_unique() {
    let messages = messages();
    let mut wrong = Vec::new();
    for Message { text, means, action, code, .. } in &messages {
        for (name, value) in [("text", text), ("means", means), ("do", action)] {
            let is_one_line = !value.contains('\n') && value.trim() == value;
            if value.is_empty() || !is_one_line || value.contains('|') {
                wrong.push(format!("{text:?}: {name} is empty, of several lines, or has a |"));
            }
        }
        for (name, value) in [("means", means), ("do", action)] {
            if !value.ends_with('.') {
                wrong.push(format!("{text:?}: {name} is no sentence"));
            }
        }
        if !code.iter().any(|part| text.contains(part.as_str())) {
            wrong.push(format!("{text:?}: no part of `code` stands in it"));
        }
    }
    for pair in messages.windows(2) {
        let (first, second) = (&pair[0], &pair[1]);
        if (first.component, &first.text) == (second.component, &second.text) {
            wrong.push(format!("{:?} is there twice", first.text));
        } else if first.order() > second.order() {
            wrong.push(format!("{:?} stands before {:?}", first.text, second.text));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// A message that was changed or removed in the code is mended or removed in the table.
#[test]
fn messages_are_those_of_the_code() {
    let mut literals = BTreeMap::new();
    for name in COMPONENTS.iter().flat_map(|(.., crates)| *crates) {
        literals.entry(*name).or_insert_with(|| literals_of_crate(name));
    }
    let mut wrong = Vec::new();
    for message in messages() {
        let (_, component, crates) = COMPONENTS[message.component];
        for part in &message.code {
            let mut found = crates.iter().flat_map(|name| &literals[name]);
            if !found.any(|literal| literal.contains(part.as_str())) {
                wrong.push(format!("{component}, {:?}: no literal says {part:?}", message.text));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// A text that is new in the code gets a row in the table. Texts of fewer than [`PROSE_WORDS_MIN`]
/// words in a row, of assertions and of log lines for developers need none.
#[test]
fn printed_texts_have_a_row() {
    let messages = messages();
    let mut wrong = Vec::new();
    for name in COMPONENTS.iter().flat_map(|(.., crates)| *crates).collect::<BTreeSet<_>>() {
        let is_of_crate = |message: &&Message| COMPONENTS[message.component].2.contains(name);
        let rows: Vec<&Message> = messages.iter().filter(is_of_crate).collect();
        for (path, text) in sources_of_crate(name) {
            let path = path.strip_prefix(root().join("crates")).unwrap().display().to_string();
            if WITHOUT_ROWS.iter().any(|beginning| path.starts_with(beginning)) {
                continue;
            }
            let text = without_tests(&text);
            for (at, literal) in located_literals(text) {
                let is_known = |part: &&str| NO_MESSAGES.iter().any(|it| part.contains(it));
                let parts = prose(&literal).into_iter().filter(|part| !is_known(part));
                let missing: Vec<&str> = parts.filter(|part| !has_row(part, &rows)).collect();
                if !missing.is_empty() && !is_for_developers(&text[..at]) {
                    let line = text[..at].lines().count();
                    wrong.push(format!("{path}:{line}: {}", missing.join(" … ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "not in {MESSAGES}:\n{}", wrong.join("\n"));
}

/// The parts of a literal, between its variable parts and its ends of lines, that are prose.
fn prose(literal: &str) -> Vec<&str> {
    let is_word = |word: &&str| {
        let word = word.trim_matches(|letter: char| letter.is_ascii_punctuation());
        word.len() >= 2 && word.chars().all(|letter| letter.is_ascii_alphabetic())
    };
    let parts = literal.split(['{', '}', '\n']).map(without_edges);
    parts.filter(|part| part.split(' ').filter(is_word).count() >= PROSE_WORDS_MIN).collect()
}

/// The text without blanks and punctuation around it.
fn without_edges(text: &str) -> &str {
    text.trim_matches(|letter: char| letter.is_whitespace() || ";:,().`\"".contains(letter))
}

/// Whether a part of a text is in a row, or is for the greater part a text that a row sums up.
fn has_row(part: &str, rows: &[&Message]) -> bool {
    let is_summed_up = |code: &String| {
        let code = without_edges(code);
        part.contains(code) && code.len() * 10 >= part.len() * 6
    };
    rows.iter().any(|row| {
        row.text.contains(part)
            || row.code.iter().any(|code| code.contains(part) || is_summed_up(code))
    })
}

/// Whether the literal that follows is of an assertion, of a log line for developers, or of an
/// attribute.
fn is_for_developers(before: &str) -> bool {
    let is_end = |line: &str| line.ends_with([';', '{', '}']);
    let mut lines: Vec<&str> = before.lines().rev().collect();
    let end = lines.iter().skip(1).position(|line| is_end(line)).map_or(lines.len(), |at| at + 1);
    lines.truncate(end);
    lines.reverse();
    let words: String = lines.concat().split_whitespace().collect();
    let ends =
        ["expect(", "panic!(", "unreachable!(", "log!(Debug,", "log!(Trace,", "reason=", "ignore="];
    let asserts = ["assert!(", "assert_eq!(", "assert_ne!("];
    ends.iter().any(|end| words.ends_with(end)) || asserts.iter().any(|it| words.contains(it))
}

#[test]
fn texts_without_a_row_are_found() {
    let literal = "node {name}: it cannot be reached ({why})\n  ask {who} for help with it.";
    assert_eq!(prose(literal), ["it cannot be reached", "for help with it"]);
    assert!(prose("{a}: {b} MiB, at {c} of {d}").is_empty());
    let row = Message {
        text: "node NODE: it cannot be reached (REASON)".into(),
        component: 0,
        means: String::new(),
        action: String::new(),
        code: vec!["for help with".into()],
    };
    assert!(has_row("it cannot be reached", &[&row]) && has_row("for help with it", &[&row]));
    assert!(
        !has_row("it cannot be read", &[&row]) && !has_row("for help with all of that", &[&row])
    );
    assert!(is_for_developers("a();\nlog!(\n    Debug,\n    ") && is_for_developers("x.expect("));
    assert!(is_for_developers("{\n    assert!(a == b, "));
    assert!(!is_for_developers("assert!(a);\n    bail!(") && !is_for_developers("log!(Warn, "));
}

/// With `LANDBRIDGE_WRITE_MESSAGES=1` the test first writes the tables to the document.
#[test]
fn the_tables_of_messages_are_made_from_the_list() {
    let path = "docs/TROUBLESHOOTING.md";
    let messages = messages();
    let mut text = read(path);
    let headings: Vec<_> = text.lines().filter(|line| line.starts_with("## ")).collect();
    assert_eq!(headings, COMPONENTS.map(|(heading, ..)| heading));
    for (number, (heading, ..)) in COMPONENTS.into_iter().enumerate() {
        let mut table = "| message | meaning | what to do |\n|---|---|---|\n".to_owned();
        for message in messages.iter().filter(|message| message.component == number) {
            let Message { text, means, action, .. } = message;
            table += &format!("| {} | {means} | {action} |\n", in_code(text));
        }
        text = with_table(&text, heading, &table);
    }
    check_or_write(path, &text, "LANDBRIDGE_WRITE_MESSAGES");
}

fn messages() -> Vec<Message> {
    let list: toml::Table = read(MESSAGES).parse().unwrap();
    assert_eq!(list.keys().collect::<Vec<_>>(), ["message"], "{MESSAGES} holds messages alone");
    let entries = list["message"].as_array().unwrap();
    entries.iter().map(|entry| message(entry.as_table().unwrap())).collect()
}

fn message(entry: &toml::Table) -> Message {
    let mut keys: Vec<_> = entry.keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["code", "do", "from", "means", "text"], "keys of {entry:?}");
    let word = |key| match &entry[key] {
        toml::Value::String(text) => text.clone(),
        other => panic!("{key} is no text: {other}"),
    };
    let from = word("from");
    let component = COMPONENTS.iter().position(|(_, name, _)| *name == from);
    let parts = entry["code"].as_array().expect("code is a list");
    let code = parts.iter().map(|part| part.as_str().expect("code is a list of texts").to_owned());
    Message {
        text: word("text"),
        component: component.unwrap_or_else(|| panic!("no component {from:?}")),
        means: word("means"),
        action: word("do"),
        code: code.inspect(|part| assert!(!part.is_empty(), "{entry:?}")).collect(),
    }
}

/// The text as code of Markdown, between more backticks than it has in a row.
fn in_code(text: &str) -> String {
    match text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0) {
        0 => format!("`{text}`"),
        longest => {
            let fence = "`".repeat(longest + 1);
            format!("{fence} {text} {fence}")
        }
    }
}

/// String literals of the crate's sources, without those of its unit tests.
fn literals_of_crate(name: &str) -> Vec<String> {
    let sources = sources_of_crate(name);
    let found: Vec<_> =
        sources.iter().flat_map(|(_, source)| literals(without_tests(source))).collect();
    assert!(!found.is_empty(), "{name} has no string literal");
    found
}

/// The crate's sources with their paths, without files of unit tests.
pub fn sources_of_crate(name: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("crates").join(name).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let is_test = path.file_stem().is_some_and(|stem| stem == "tests");
            if path.is_dir() && !is_test {
                folders.push(path);
            } else if !is_test && path.extension().is_some_and(|extension| extension == "rs") {
                let text = source(&path);
                found.push((path, text));
            }
        }
    }
    found
}

fn source(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// A module of tests ends a file.
fn without_tests(source: &str) -> &str {
    let mut at = 0;
    for part in source.split_inclusive('\n') {
        let rest = &source[at + part.len()..];
        if part == "#[cfg(test)]\n" && rest.starts_with("mod ") {
            let line = rest.lines().next().unwrap_or("");
            if line.ends_with('{') {
                return &source[..at];
            }
        }
        at += part.len();
    }
    source
}

/// The values of all string literals of a Rust source.
fn literals(source: &str) -> Vec<String> {
    located_literals(source).into_iter().map(|(_, value)| value).collect()
}

/// Where the string literals of a Rust source begin, and their values.
fn located_literals(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut rest = source;
    let mut before = ' ';
    while let Some(first) = rest.chars().next() {
        let at = source.len() - rest.len();
        let is_in_word = before.is_alphanumeric() || before == '_';
        let prefix = rest.strip_prefix(['b', 'c']).unwrap_or(rest);
        if let Some(comment) = rest.strip_prefix("//") {
            rest = comment.find('\n').map_or("", |end| &comment[end..]);
        } else if let Some(comment) = rest.strip_prefix("/*") {
            rest = comment.find("*/").map_or("", |end| &comment[end + 2..]);
        } else if let Some(raw) = prefix.strip_prefix('r').filter(|_| !is_in_word)
            && let Some(text) = raw.trim_start_matches('#').strip_prefix('"')
        {
            let end = format!("\"{}", "#".repeat(raw.len() - text.len() - 1));
            let (value, after) = text.split_once(&end).expect("a raw literal ends");
            found.push((at, value.to_owned()));
            rest = after;
        } else if let Some(text) = rest.strip_prefix('"') {
            let (value, after) = literal(text);
            found.push((at, value));
            rest = after;
        } else if first == '\'' {
            rest = after_quote(&rest[1..]);
        } else {
            rest = &rest[first.len_utf8()..];
        }
        before = first;
    }
    found
}

/// The value of a literal after its first quote, and what follows the literal.
fn literal(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let end = rest.find(['"', '\\']).expect("a literal ends");
        value += &rest[..end];
        if rest[end..].starts_with('"') {
            return (value, &rest[end + 1..]);
        }
        let escape = &rest[end + 1..];
        let letter = escape.chars().next().expect("a letter follows a backslash");
        rest = &escape[letter.len_utf8()..];
        match letter {
            // The literal goes on at the first letter of the next line.
            '\n' => rest = rest.trim_start(),
            'n' => value.push('\n'),
            'r' => value.push('\r'),
            't' => value.push('\t'),
            '0' => value.push('\0'),
            'x' => {
                value.extend(u8::from_str_radix(&rest[..2], 16).map(char::from));
                rest = &rest[2..];
            }
            'u' => {
                let (digits, after) = rest[1..].split_once('}').expect("a brace ends the number");
                value.extend(u32::from_str_radix(digits, 16).ok().and_then(char::from_u32));
                rest = after;
            }
            other => value.push(other),
        }
    }
}

/// What follows a character literal, or the quote of a lifetime.
fn after_quote(text: &str) -> &str {
    let mut letters = text.chars();
    match letters.next() {
        Some('\\') => {
            // The letter after the backslash may be a quote.
            let end = text.char_indices().skip(2).find(|(_, letter)| *letter == '\'');
            end.map_or("", |(at, _)| &text[at + 1..])
        }
        Some(letter) if letters.next() == Some('\'') => &text[letter.len_utf8() + 1..],
        _ => text,
    }
}

#[test]
fn literals_are_found() {
    let source = r##"
        // "comment" 'x
        let first = "a \"quoted\" word, and \
                     a line\n"; /* "no" */
        let second = ('"', b'\'', '\u{22}', "\u{2026}\x41\\");
        fn f<'a>(r: &'a str) -> &'a str { r"raw\" }
        let third = br#"with "quotes""#; let r = c"C";
    "##;
    let wanted = ["a \"quoted\" word, and a line\n", "…A\\", "raw\\", "with \"quotes\"", "C"];
    assert_eq!(literals(source), wanted);
}
