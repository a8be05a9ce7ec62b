//! Rules of the source tree that no compiler checks: which crate may use which, which module of a
//! folder may use which (`tidy/module_order.rs`), how long a function and how large a type may be
//! (`tidy/type_sizes.rs`), which words are replaced by others (`tidy/words.rs`), and what may not
//! stand anywhere.
//!
//! The files are read as text. That is enough because rustfmt has formatted them: a function ends
//! at the first closing brace that is indented as its first line.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/module_order.rs"]
mod module_order;
#[path = "tidy/type_sizes.rs"]
mod type_sizes;
#[path = "tidy/words.rs"]
mod words;

/// Crate, and what it may use of ours (proto <- drive <- {provider, relay}, proto <- launch, proto
/// <- interpose, {proto, drive, testbed} <- lab). No arrow leads back, except that the tests of any
/// crate may use [`TESTBED`].
const MAY_USE: [(&str, &[&str]); 8] = [
    ("proto", &[]),
    (TESTBED, &["proto"]),
    ("drive", &["proto"]),
    ("interpose", &["proto"]),
    ("provider", &["drive", "proto"]),
    ("relay", &["drive", "proto"]),
    ("launch", &["proto"]),
    ("lab", &["drive", "proto", TESTBED]),
];

/// Harnesses for tests.
const TESTBED: &str = "testbed";

/// What `proto` takes from elsewhere: arithmetic only, nothing that could reach the world.
const PROTO_MAY_LINK: [&str; 3] = ["hmac", "sha2", "xxhash-rust"];

const FILE_LINES_MAX: usize = 700;

/// Lines of more than so many columns, and how many there still are. The number may not grow; a
/// change that lowers it writes the new number here.
const COLUMNS_MAX: usize = 100;
const WIDE_LINES: usize = 4;

const FUNCTION_LINES_MAX: usize = 70;
/// Functions that may be longer: dispatchers, one arm for each case.
const DISPATCHERS: [(&str, &str); 1] = [("crates/interpose/src/syscalls.rs", "handle")];

#[test]
fn crates_use_only_those_below_them() {
    let mut wrong = Vec::new();
    for (name, allowed) in MAY_USE {
        for (table, used) in dependencies(name) {
            let Some(ours) = used.strip_prefix("landbridge-") else { continue };
            let is_for_tests = ours == TESTBED && table == "dev-dependencies";
            if !is_for_tests && !allowed.contains(&ours) {
                wrong.push(format!("{name} has landbridge-{ours} in [{table}]"));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn every_crate_of_the_workspace_has_a_place_in_the_order() {
    let manifest = manifest(&root().join("Cargo.toml"));
    let members = manifest["workspace"]["members"].as_array().unwrap();
    let members: Vec<_> = members.iter().filter_map(|member| member.as_str()).collect();
    let known: Vec<_> = MAY_USE.iter().map(|(name, _)| format!("crates/{name}")).collect();
    assert_eq!(members, known);
}

#[test]
fn proto_can_reach_nothing() {
    let wrong: Vec<_> = dependencies("proto")
        .into_iter()
        .filter(|(table, used)| table == "dependencies" && !PROTO_MAY_LINK.contains(&used.as_str()))
        .map(|(_, used)| used)
        .collect();
    assert_none(&wrong);
    let head = read(&root().join("crates/proto/src/lib.rs"));
    for line in ["#![no_std]", "#![forbid(unsafe_code)]"] {
        assert!(head.lines().any(|found| found == line), "proto/src/lib.rs lacks {line}");
    }
}

#[test]
fn proto_gives_the_same_results_every_time() {
    assert_none(&occurrences("crates/proto/src", &["HashMap", "HashSet", "RandomState"], &[]));
}

#[test]
fn raw_object_pointers_stay_at_the_border() {
    let border = ["crates/provider/src/ffi/", "crates/provider/src/abi/"];
    let pointers = ["*mut Fid", "*const Fid", "*mut abi::Fid", "*const abi::Fid"];
    assert_none(&occurrences("crates/provider/src", &pointers, &border));
}

#[test]
fn nothing_is_left_for_later() {
    let macros = ["todo!", "unimplemented!", "dbg!"];
    assert_none(&occurrences("crates", &macros, &["crates/lab/tests/tidy.rs"]));
}

#[test]
fn every_file_says_first_what_it_is() {
    let wrong: Vec<_> = sources("crates")
        .into_iter()
        .filter(|source| !source.text.starts_with("//!"))
        .map(|source| source.path)
        .collect();
    assert_none(&wrong);
}

#[test]
fn type_names_are_unique_in_their_crate() {
    let mut places: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for source in sources("crates") {
        let Some((name, inside)) = source.path.split_once("/src/") else { continue };
        if inside.split('/').any(|part| part == "tests" || part == "tests.rs") {
            continue;
        }
        let code = source.code().take_while(|(_, line)| *line != "mod tests {");
        for (number, type_name) in code.filter_map(|(at, line)| Some((at, type_name(line)?))) {
            let place = format!("{inside}:{number}");
            places.entry((name.to_owned(), type_name.to_owned())).or_default().push(place);
        }
    }
    assert!(places.len() > 500, "only {} types were found", places.len());
    let twice = places.into_iter().filter(|(_, found)| found.len() > 1);
    let wrong = twice.map(|((name, what), found)| format!("{name}: {what}: {}", found.join(", ")));
    assert_none(&wrong.collect::<Vec<_>>());
}

#[test]
fn wide_lines_become_fewer() {
    let all = sources("crates");
    let lines = all.iter().flat_map(|source| source.text.lines());
    let count = lines.filter(|line| line.chars().count() > COLUMNS_MAX).count();
    assert_eq!(count, WIDE_LINES, "lines of more than {COLUMNS_MAX} columns");
}

#[test]
fn files_are_short() {
    let mut wrong = Vec::new();
    for source in sources("crates") {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX {
            wrong.push(format!("{}: {lines} lines", source.path));
        }
    }
    assert_none(&wrong);
}

#[test]
fn functions_are_short() {
    let mut wrong = Vec::new();
    let mut long: Vec<(String, String)> = Vec::new();
    for source in sources("crates") {
        for (name, line, length) in source.functions() {
            if length <= FUNCTION_LINES_MAX {
                continue;
            }
            if DISPATCHERS.contains(&(source.path.as_str(), name)) {
                long.push((source.path.clone(), name.to_owned()));
            } else {
                wrong.push(format!("{}:{line}: {name} has {length} lines", source.path));
            }
        }
    }
    for (path, name) in DISPATCHERS {
        if !long.contains(&(path.to_owned(), name.to_owned())) {
            wrong.push(format!("{path}: {name} need not be listed"));
        }
    }
    assert_none(&wrong);
}

#[test]
fn the_reader_of_functions_counts_right() {
    let text = "//! x\nfn one() {}\npub(super) unsafe fn two(\n    a: u8,\n) -> u8\n{\n    a\n}\n\
                impl X {\n    fn declared(\n        &self,\n    ) -> u8;\n    const fn three() {\n\
                        if x {\n        }\n    }\n}\n";
    let source = Source { path: String::new(), text: text.to_owned() };
    let lengths: Vec<_> = source.functions().collect();
    assert_eq!(lengths, [("one", 2, 1), ("two", 3, 6), ("declared", 10, 3), ("three", 13, 4)]);
}

/// A Rust file.
#[derive(Clone)]
struct Source {
    /// From the root of the repository.
    path: String,
    text: String,
}

impl Source {
    /// Lines, numbered from 1, without comments.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// Name, first line and number of lines of every function.
    fn functions(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let lines: Vec<&str> = self.text.lines().collect();
        let starts = (0..lines.len()).filter_map({
            let lines = lines.clone();
            move |at| Some((at, function_name(lines[at])?))
        });
        starts.map(move |(at, name)| (name, at + 1, function_end(&lines, at) - at + 1))
    }
}

/// The name of the type that a line declares.
fn type_name(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
    if !matches!(words.next()?, "struct" | "enum" | "union" | "trait") {
        return None;
    }
    words.next()?.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

fn function_name(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    loop {
        if let Some(name) = rest.strip_prefix("fn ") {
            return name.split(['(', '<']).next();
        }
        let (word, after) = rest.split_once(' ')?;
        let is_modifier = matches!(word, "pub" | "const" | "unsafe" | "async" | "extern" | "\"C\"");
        if !is_modifier && !word.starts_with("pub(") {
            return None;
        }
        rest = after;
    }
}

fn function_end(lines: &[&str], start: usize) -> usize {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let depth = indent(lines[start]);
    if lines[start].ends_with([';', '}']) {
        return start;
    }
    let is_end = |line: &str| {
        let text = line.trim_start();
        indent(line) == depth && (text == "}" || (text.starts_with(')') && text.ends_with(';')))
    };
    (start + 1..lines.len()).find(|&at| is_end(lines[at])).unwrap_or(lines.len() - 1)
}

/// Where one of `words` stands in code below `folder`, outside of `except`.
fn occurrences(folder: &str, words: &[&str], except: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources(folder) {
        if except.iter().any(|path| source.path.starts_with(path)) {
            continue;
        }
        for (number, line) in source.code() {
            for word in words.iter().filter(|word| line.contains(**word)) {
                found.push(format!("{}:{number}: {word}", source.path));
            }
        }
    }
    found
}

/// Every `.rs` file below a folder, in the order of their paths.
fn sources(folder: &str) -> Vec<Source> {
    files_of(folder, &["rs"])
}

/// The files below a folder with one of these extensions.
fn files_of(folder: &str, extensions: &[&str]) -> Vec<Source> {
    let mut files = BTreeMap::new();
    collect(&root().join(folder), extensions, &mut files);
    assert!(!files.is_empty(), "there is nothing in {folder}");
    files.into_iter().map(|(path, text)| Source { path, text }).collect()
}

fn collect(folder: &Path, extensions: &[&str], files: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, extensions, files);
        } else if path.extension().is_some_and(|found| extensions.iter().any(|it| found == *it)) {
            let relative = path.strip_prefix(root()).unwrap().display().to_string();
            files.insert(relative, read(&path));
        }
    }
}

/// Table and name of everything a crate depends on.
fn dependencies(name: &str) -> Vec<(String, String)> {
    let manifest = manifest(&root().join(format!("crates/{name}/Cargo.toml")));
    let tables = manifest.iter().filter(|(table, _)| table.ends_with("dependencies"));
    let mut found = Vec::new();
    for (table, entries) in tables {
        let entries = entries.as_table().unwrap();
        found.extend(entries.keys().map(|used| (table.clone(), used.clone())));
    }
    assert!(!found.is_empty(), "{name} depends on nothing: was its manifest read?");
    found
}

fn manifest(path: &Path) -> toml::Table {
    read(path).parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
