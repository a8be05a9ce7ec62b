//! Limits: the tables of `docs/LIMITS.md` are compared with the constants, settings and flags that
//! they describe.

use std::collections::BTreeMap;

use landbridge_proto::setting::SETTINGS;

use super::messages::sources_of_crate;
use super::{check_or_write, read, root, rows, unquoted, with_table};

const DOCUMENT: &str = "docs/LIMITS.md";

/// Crates whose bounds are in the tables: the lab and the testbed are never shipped.
const CRATES: [&str; 6] = ["proto", "drive", "provider", "relay", "launch", "interpose"];
/// Settings have a document of their own, and libfabric's numbers are no bounds.
const OTHERS: [&str; 3] = ["proto/src/setting", "provider/src/abi", "provider/src/param.rs"];
/// Files of which every constant is in the table.
const COMPLETE_FILES: [&str; 4] = [
    "proto/src/limit.rs",
    "proto/src/channel/mod.rs",
    "proto/src/relay/bounds.rs",
    "provider/src/engine/reconnect.rs",
];

/// Each row names a constant, the file that defines it, and its value as written in that file. With
/// `LANDBRIDGE_WRITE_LIMITS=1` the test first writes the values to the document.
#[test]
fn the_tables_of_bounds_are_those_of_the_code() {
    let mut text = read(DOCUMENT);
    let mut count = 0;
    for heading in headings(&text, "## For engineers") {
        let mut table = "| bound | file | value | why |\n|---|---|---|---|\n".to_owned();
        for row in rows(&text, &heading) {
            let [name, file, _, why] = &row[..] else { panic!("not four cells: {row:?}") };
            let value = constant(file, unquoted(name));
            let value = value.unwrap_or_else(|| panic!("{file} has no constant {name}"));
            table += &format!("| {name} | {file} | {value} | {why} |\n");
            count += 1;
        }
        text = with_table(&text, &heading, &table);
    }
    assert!(count > 200, "{count} bounds");
    check_or_write(DOCUMENT, &text, "LANDBRIDGE_WRITE_LIMITS");
}

/// A constant is a bound if its name ends with MAX or MIN, or if it is a time.
#[test]
fn every_bound_is_in_the_table() {
    let listed = listed(&read(DOCUMENT));
    let mut wrong = Vec::new();
    for (path, text) in CRATES.iter().flat_map(|name| sources_of_crate(name)) {
        let file = path.strip_prefix(root().join("crates")).unwrap().to_str().unwrap();
        if OTHERS.iter().any(|other| file.starts_with(other)) {
            continue;
        }
        for line in text.lines() {
            let Some((name, kind)) = constant_of(line) else { continue };
            let is_bound = name.ends_with("_MAX")
                || name.ends_with("_MIN")
                || kind == "Duration"
                || COMPLETE_FILES.contains(&file);
            if is_bound && !listed.contains_key(&(file.to_owned(), name.to_owned())) {
                wrong.push(format!("{name} of {file} is missing"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Name and type of the constant of a module that a line begins.
fn constant_of(line: &str) -> Option<(&str, &str)> {
    let public = ["pub const ", "pub(super) const ", "pub(crate) const ", "const "];
    let rest = public.iter().find_map(|start| line.strip_prefix(start))?;
    let (name, rest) = rest.split_once(": ")?;
    let is_name = name != "_" && !name.starts_with("fn ");
    is_name.then(|| (name, rest.split(" =").next().unwrap_or(rest).trim()))
}

/// The limit begins with the value of the constant in the unit of its name, with the default of the
/// setting, or with the default of the flag.
#[test]
fn the_limits_for_users_are_those_of_the_code() {
    let text = read(DOCUMENT);
    let listed = listed(&text);
    let mut wrong = Vec::new();
    for row in headings(&text, "## For users").iter().flat_map(|heading| rows(&text, heading)) {
        let [_, limit, _, origin] = &row[..] else { panic!("not four cells: {row:?}") };
        let value = if let Some(name) = origin.strip_prefix("setting ") {
            let name = unquoted(name);
            let setting = SETTINGS.iter().find(|setting| setting.name == name);
            setting.unwrap_or_else(|| panic!("no setting {name}")).default.to_owned()
        } else if origin.starts_with("`--") {
            default_of_flag(unquoted(origin))
        } else {
            let (name, file) = origin.split_once(", ").expect("a constant, and its file");
            let name = unquoted(name);
            let key = (file.to_owned(), name.to_owned());
            assert!(listed.contains_key(&key), "{origin} is not in the tables for engineers");
            in_its_unit(name, &listed[&key], evaluated(file, &listed[&key]))
        };
        let rest = limit.strip_prefix(&value);
        if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([',', ';'])) {
            wrong.push(format!("{origin} is {value}, not {limit}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Headings of the tables of a part of the document.
fn headings(text: &str, part: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| *line != part).skip(1);
    let lines = lines.take_while(|line| !line.starts_with("## "));
    let found = lines.filter(|line| line.starts_with("### ") && line.ends_with("(checked)"));
    let found: Vec<_> = found.map(str::to_owned).collect();
    assert!(!found.is_empty(), "there is no table in {part:?}");
    found
}

/// Values of the tables for engineers, by file and name of the constant.
fn listed(text: &str) -> BTreeMap<(String, String), String> {
    let mut listed = BTreeMap::new();
    for row in headings(text, "## For engineers").iter().flat_map(|heading| rows(text, heading)) {
        let key = (row[1].clone(), unquoted(&row[0]).to_owned());
        assert!(listed.insert(key, row[2].clone()).is_none(), "{row:?} is there twice");
    }
    listed
}

/// The value of a constant as its file has it, on one line.
fn constant(file: &str, name: &str) -> Option<String> {
    let source = read(&format!("crates/{file}"));
    let (_, rest) = source.split_once(&format!("const {name}: "))?;
    let (_, rest) = rest.split_once('=')?;
    let (value, _) = rest.split_once(';')?;
    Some(value.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The default that the help of `landbridge run` has in brackets.
fn default_of_flag(flag: &str) -> String {
    let source = read("crates/launch/src/cli.rs");
    let field = format!("pub {}:", flag.trim_start_matches('-').replace('-', "_"));
    let (before, _) = source.split_once(&field).unwrap_or_else(|| panic!("no flag {flag}"));
    let help = before.lines().rev().take_while(|line| !line.trim().starts_with("pub "));
    let help = help.filter_map(|line| line.trim().strip_prefix("///"));
    let default = help.filter_map(|line| line.split_once('[')?.1.split_once(']')).next();
    default.unwrap_or_else(|| panic!("no default of {flag}")).0.to_owned()
}

/// A number with a unit, which the name or the value of its constant gives.
fn in_its_unit(name: &str, source: &str, value: u64) -> String {
    const SIZES: [(&str, u64); 6] = [
        ("EiB", 1 << 60),
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("bytes", 1),
    ];
    const TIMES: [(&str, u64); 4] = [("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1)];
    let in_units = |units: &[(&str, u64)], value: u64| {
        // One minute stands as 60 s, as in the settings.
        let fits = |size: u64| {
            value.is_multiple_of(size) && value / size >= if size == 60_000 { 2 } else { 1 }
        };
        let (unit, size) = units.iter().find(|(_, size)| fits(*size)).expect("some unit fits");
        format!("{} {unit}", value / size)
    };
    if name.contains("BYTES") || name.ends_with("_SIZE_MAX") || name == "SMALL_BYTES" {
        in_units(&SIZES, value)
    } else if source.contains("Duration::") || name.contains("MILLIS") {
        in_units(&TIMES, value)
    } else if name.ends_with("_S") {
        in_units(&TIMES, value * 1_000)
    } else {
        let digits = value.to_string();
        let parts = digits.as_bytes().rchunks(3).rev();
        parts.map(|part| str::from_utf8(part).unwrap()).collect::<Vec<_>>().join(",")
    }
}

/// The value of an expression of a constant: numbers, constants, and the operators of [`sum`] and
/// [`product`]; times in milliseconds.
fn evaluated(file: &str, source: &str) -> u64 {
    let spaced = ["(", ")", "<<", "*", "/", "+", "-"]
        .iter()
        .fold(source.to_owned(), |text, sign| text.replace(sign, &format!(" {sign} ")));
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let (value, rest) = shift(file, &words);
    assert!(rest.is_empty(), "{source} of {file}: {rest:?} is not understood");
    value
}

fn shift<'a>(file: &str, words: &'a [&'a str]) -> (u64, &'a [&'a str]) {
    let (mut value, mut rest) = sum(file, words);
    while let ["<<", more @ ..] = rest {
        let (by, after) = sum(file, more);
        (value, rest) = (value << by, after);
    }
    (value, rest)
}

fn sum<'a>(file: &str, words: &'a [&'a str]) -> (u64, &'a [&'a str]) {
    let (mut value, mut rest) = product(file, words);
    while let [sign @ ("+" | "-"), more @ ..] = rest {
        let (other, after) = product(file, more);
        (value, rest) = (if *sign == "+" { value + other } else { value - other }, after);
    }
    (value, rest)
}

fn product<'a>(file: &str, words: &'a [&'a str]) -> (u64, &'a [&'a str]) {
    let (mut value, mut rest) = term(file, words);
    while let [sign @ ("*" | "/"), more @ ..] = rest {
        let (other, after) = term(file, more);
        (value, rest) = (if *sign == "*" { value * other } else { value / other }, after);
    }
    (value, rest)
}

fn term<'a>(file: &str, words: &'a [&'a str]) -> (u64, &'a [&'a str]) {
    let [first, rest @ ..] = words else { panic!("{file}: an operand is missing") };
    let (value, rest) = match *first {
        "(" => match shift(file, rest) {
            (value, [")", rest @ ..]) => (value, rest),
            _ => panic!("{file}: a parenthesis is not closed"),
        },
        "Duration::from_secs" => {
            let (value, rest) = term(file, rest);
            (value * 1_000, rest)
        }
        "Duration::from_millis" => term(file, rest),
        word if word.starts_with(|letter: char| letter.is_ascii_digit()) => {
            let digits = word.replace('_', "");
            let number = digits
                .strip_prefix("0x")
                .map_or_else(|| digits.parse(), |digits| u64::from_str_radix(digits, 16));
            (number.unwrap_or_else(|_| panic!("{file}: {word} is no number")), rest)
        }
        word => {
            let homes = [file, "proto/src/limit.rs", "proto/src/wire/frame.rs"];
            let found = homes.iter().find_map(|home| Some((*home, constant(home, word)?)));
            let (home, value) = found.unwrap_or_else(|| panic!("{file}: {word} is not found"));
            (evaluated(home, &value), rest)
        }
    };
    // A conversion changes no value here.
    if let ["as", _, rest @ ..] = rest { (value, rest) } else { (value, rest) }
}

#[test]
fn values_are_evaluated() {
    for (source, wanted) in [
        ("1 << 20", 1 << 20),
        ("(32 << 10) - 128", 32_640),
        ("2 * (3 + 4) / 7", 2),
        ("0x00ff_fffe", 0xff_fffe),
        ("Duration::from_secs(24 * 3_600)", 86_400_000),
        ("(EAGER_TOTAL_BYTES + 4 * RELAY_WINDOW_BYTES) as usize", 80 << 20),
    ] {
        assert_eq!(evaluated("proto/src/limit.rs", source), wanted, "{source}");
    }
    assert_eq!(in_its_unit("A_BYTES", "", 24 << 20), "24 MiB");
    assert_eq!(in_its_unit("A_MILLIS", "", 60_000), "60 s");
    assert_eq!(in_its_unit("A_MAX", "", 1_048_576), "1,048,576");
}
