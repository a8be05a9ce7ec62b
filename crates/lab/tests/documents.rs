//! Documents that repeat facts of the code: tables of `docs/WIRE.md` and `docs/LIMITS.md` are
//! compared with the constants that they describe, messages and log lines with the strings in the
//! code, and links with existing files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use landbridge_proto::setting::{Reader, SETTINGS, Scope, Setting};
use landbridge_proto::wire::frame::{HEADER_BYTES, Kind, flag};
use landbridge_proto::wire::kind_header::KindHeader;
use landbridge_proto::wire::{datagram, hello, name};
use landbridge_proto::{limit, relay};

#[path = "documents/limits.rs"]
mod limits;
#[path = "documents/messages.rs"]
mod messages;

#[test]
fn the_table_of_kinds_is_that_of_the_code() {
    let text = read("docs/WIRE.md");
    let rows = rows(&text, "## Kinds and their heads (checked)");
    let written: Vec<_> = rows.iter().map(|row| row[..5].join(" ")).collect();
    let wanted: Vec<_> = Kind::ALL
        .iter()
        .map(|&kind| {
            let (short, long) = (KindHeader::size(kind, 0), KindHeader::size(kind, flag::LONG));
            let numbered = if kind.is_numbered() { "yes" } else { "no" };
            format!("{} {kind:?} {short} {long} {numbered}", kind as u8)
        })
        .collect();
    assert_eq!(written, wanted);
}

/// The fields of each head follow each other without a gap, and fill the head. (Tables that count
/// from the beginning of the frame header have another first column, and kinds without a kind
/// header have the fields of their payload.)
#[test]
fn the_fields_of_each_head_fill_it() {
    let text = read("docs/WIRE.md");
    let introduction = hello::CLOSE_BYTES - 32;
    let fixed = [
        ("## The frame header", HEADER_BYTES),
        ("### Open", hello::OPEN_BYTES),
        ("### Reply", hello::REPLY_BYTES),
        ("### Close", hello::CLOSE_BYTES),
        ("### Introduction", introduction),
    ];
    for (heading, size) in fixed {
        assert_eq!(end_of_fields(&text, heading), Some(size), "{heading}");
    }
    let mut checked = 0;
    for kind in Kind::ALL {
        let sizes = [0, flag::LONG].map(|flags| KindHeader::size(kind, flags));
        let heading = format!("### {kind:?} ({})", kind as u8);
        let Some(end) = end_of_fields(&text, &heading).filter(|_| sizes != [0, 0]) else {
            continue;
        };
        assert_eq!(Some(&end), sizes.iter().max(), "{heading}");
        checked += 1;
    }
    assert!(checked > 15, "only {checked} kinds have a table");
}

/// Bytes of all fields in the table of offsets under a heading. `None`: there is no such table.
fn end_of_fields(text: &str, heading: &str) -> Option<usize> {
    let (_, below) =
        text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("{heading}"));
    let section = below.split("\n#").next().unwrap_or_default();
    let (_, table) = section.split_once("| offset | bytes |")?;
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|')).map(cells);
    let mut end = 0;
    for row in rows {
        let Some((offset, bytes)) = row[0].parse::<usize>().ok().zip(row[1].parse::<usize>().ok())
        else {
            // Fields of the frame header, and those of a length that depends on others.
            return None;
        };
        assert_eq!(offset, end, "{heading}: {row:?}");
        end += bytes;
    }
    Some(end)
}

#[test]
fn the_table_of_flags_is_that_of_the_code() {
    let text = read("docs/WIRE.md");
    let rows = rows(&text, "Flags (checked):");
    let written: Vec<_> = rows.iter().map(|row| row[..2].join(" ")).collect();
    let flags = [
        (flag::CQ_DATA, "CQ_DATA"),
        (flag::LONG, "LONG"),
        (flag::WANT_ACK, "WANT_ACK"),
        (flag::TRUNCATED, "TRUNCATED"),
        (flag::CHECKED, "CHECKED"),
    ];
    assert_eq!(flags.iter().fold(0, |all, (bit, _)| all | bit), flag::ALL);
    let wanted: Vec<_> = flags.iter().map(|(bit, name)| format!("{bit} {name}")).collect();
    assert_eq!(written, wanted);
}

#[test]
fn the_table_of_versions_is_that_of_the_code() {
    let text = read("docs/WIRE.md");
    for row in rows(&text, "## Versions (checked)") {
        let place: Vec<_> = row[2].split('`').collect();
        let [_, constant, _, path, _] = place[..] else { panic!("no constant and file: {row:?}") };
        let code = read(path);
        let line = code.lines().find(|line| line.contains(&format!("const {constant}: ")));
        let (_, value) = line.and_then(|line| line.split_once(" = ")).expect(constant);
        let numbers: String = value.replace(", ", ".");
        let number = numbers.trim_matches(|letter: char| !letter.is_ascii_digit());
        assert_eq!(row[1], number, "{constant}");
    }
}

#[test]
fn the_table_of_sizes_is_that_of_the_code() {
    let text = read("docs/WIRE.md");
    let rows = rows(&text, "## Sizes (checked)");
    let written: Vec<_> = rows.iter().map(|row| row.join(" ")).collect();
    let wanted = [
        ("HEADER_BYTES", HEADER_BYTES),
        ("KIND_HEADER_BYTES_MAX", limit::KIND_HEADER_BYTES_MAX),
        ("FRAME_BODY_BYTES_MAX", limit::FRAME_BODY_BYTES_MAX),
        ("CHECKSUM_BYTES", limit::CHECKSUM_BYTES),
        ("RELAY_PAYLOAD_BYTES_MAX", limit::RELAY_PAYLOAD_BYTES_MAX),
        ("OPEN_BYTES", hello::OPEN_BYTES),
        ("REPLY_BYTES", hello::REPLY_BYTES),
        ("CLOSE_BYTES", hello::CLOSE_BYTES),
        ("NAME_BYTES", name::NAME_BYTES),
        ("TOKEN_BYTES", datagram::TOKEN_BYTES),
        ("PROBE_BYTES", datagram::PROBE_BYTES),
        ("ATOMIC_BYTES_MAX", limit::ATOMIC_BYTES_MAX),
    ]
    .map(|(name, size)| format!("{name} {size}"));
    assert_eq!(written, wanted);
    let frame = HEADER_BYTES + limit::KIND_HEADER_BYTES_MAX + limit::RELAY_PAYLOAD_BYTES_MAX;
    assert_eq!(relay::FRAME_BYTES_MAX, frame);
}

/// Each table lists the keys of one `…Entry` of the topology file, in the same order.
#[test]
fn the_keys_of_a_topology_are_those_of_the_code() {
    let text = read("docs/TOPOLOGY.md");
    let source = read("crates/launch/src/topology.rs");
    for (heading, entry) in [
        ("## [[cluster]] (checked)", "ClusterEntry"),
        ("## [cluster.relay] (checked)", "RelayEntry"),
        ("## [[cluster.host]] (checked)", "HostEntry"),
        ("## [[link]] (checked)", "LinkEntry"),
    ] {
        let written: Vec<_> =
            rows(&text, heading).iter().map(|row| unquoted(&row[0]).to_owned()).collect();
        let body = source.split(&format!("struct {entry} {{")).nth(1).expect(entry);
        let fields = body.split('}').next().unwrap_or("").lines().map(str::trim);
        let fields = fields.filter(|line| !line.starts_with("#["));
        let wanted: Vec<_> =
            fields.filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect();
        assert_eq!(written, wanted, "{heading}");
    }
}

#[test]
fn the_errors_of_a_topology_are_those_of_the_code() {
    let text = read("docs/TOPOLOGY.md");
    let files = ["topology", "plan"].map(|file| read(&format!("crates/launch/src/{file}.rs")));
    // A message may continue in the next line of the source.
    let words = files.concat().replace("\\\n", " ").replace("\\\"", "\"");
    let source = words.split_whitespace().collect::<Vec<_>>().join(" ");
    for row in rows(&text, "## What may go wrong (checked)") {
        assert!(source.contains(&row[0]), "no error says {:?}", row[0]);
    }
}

#[test]
fn the_topology_in_the_readme_is_the_example() {
    let example: toml::Table = read("examples/two-clusters.toml").parse().unwrap();
    let readme = read("README.md");
    let blocks = readme.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let found: Vec<toml::Table> = blocks.map(|block| block.parse().unwrap()).collect();
    assert_eq!(found, [example]);
}

/// With `LANDBRIDGE_WRITE_SETTINGS=1` the test first writes the tables to the document.
#[test]
fn the_tables_of_settings_are_those_of_the_code() {
    let path = "docs/SETTINGS.md";
    let mut text = read(path);
    for (scope, heading) in SETTINGS_HEADINGS {
        text = with_table(&text, heading, &settings_table(scope));
    }
    check_or_write(path, &text, "LANDBRIDGE_WRITE_SETTINGS");
}

/// Each row begins as the line does in a log; `…` stands for text that varies.
#[test]
fn the_lines_that_a_user_sees_are_those_of_the_code() {
    let mut files =
        vec!["crates/launch/src/relay_links.rs".into(), "crates/launch/src/watch.rs".into()];
    files.push("crates/launch/src/agent/pmi_replay.rs".into());
    files.push("crates/launch/src/agent/rank_supervisor.rs".into());
    files.push("crates/launch/src/agent/process_manager.rs".into());
    files.push("crates/launch/src/agent/refusals.rs".into());
    files.push("crates/launch/src/agent/relay.rs".into());
    files.push("crates/launch/src/agent/state_transfer.rs".into());
    files.push("crates/launch/src/agent/checkpoint_scheduler.rs".into());
    files.push("crates/launch/src/agent/checkpoint_scheduler/scheduler_step.rs".into());
    files.push("crates/launch/src/agent/checkpoint_round.rs".into());
    files.push("crates/launch/src/agent/image_service.rs".into());
    files.push("crates/launch/src/agent/restore.rs".into());
    files.push("crates/launch/src/agent/node_failover.rs".into());
    files.push("crates/launch/src/agent/stdio.rs".into());
    files.push("crates/launch/src/folder.rs".into());
    files.push("crates/launch/src/restart.rs".into());
    files.push("crates/launch/src/start.rs".into());
    files.push("crates/launch/src/run.rs".into());
    files.push("crates/proto/src/relay/divergence.rs".into());
    files.push("crates/drive/src/engine/epoll/liveness.rs".into());
    files.push("crates/drive/src/engine/epoll/log_storage.rs".into());
    files.push("crates/proto/src/relay/message_logs.rs".into());
    files.push("crates/proto/src/wire/frame.rs".into());
    files.push("crates/relay/src/main.rs".into());
    files.push("crates/provider/src/threads.rs".into());
    files.push("crates/proto/src/nondeterminism.rs".into());
    files.push("crates/proto/src/replay.rs".into());
    for folder in ["crates/interpose/src", "crates/provider/src/engine"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(Result::unwrap);
        let sources = entries.filter(|entry| entry.file_type().unwrap().is_file());
        files.extend(sources.map(|it| format!("{folder}/{}", it.file_name().display())));
    }
    files.extend(
        ["launch/src/mpi", "launch/src/agent", "drive/src/engine/epoll"]
            .map(|it| format!("crates/{it}/mod.rs")),
    );
    // A text may continue in the next line of the source.
    let source: String = files.iter().map(|file| read(file).replace("\\\n", " ")).collect();
    let source = source.split_whitespace().collect::<Vec<_>>().join(" ");
    let documents = ["docs/NETWORK.md", "docs/RECOVERY.md", "docs/RECOVERY-INSIDE.md"].map(read);
    for row in documents.iter().flat_map(|text| rows(text, "## What is seen (checked)")) {
        for part in unquoted(&row[0]).split('…').map(str::trim) {
            assert!(source.contains(part), "no line says {part:?}");
        }
    }
}

/// Each kind of call on files has a test case, which is refused if the table says so; and each case
/// of `files.py` has a row in the table.
#[test]
fn every_kind_of_call_on_files_has_its_case() {
    let document = read("docs/RECOVERY-INSIDE.md");
    let single = call_cases(&read("tests/system/calls.py"));
    let mut tabled = BTreeMap::new();
    for row in rows(&document, "### Calls on files (checked)") {
        let is_refused = row[1].starts_with("refused");
        assert!(is_refused != row[2].is_empty(), "{row:?}: what is refused is said, and only that");
        assert!(!row[3].is_empty(), "{row:?}: no case");
        for case in row[3].split('`').skip(1).step_by(2) {
            if let Some(name) = case.strip_prefix("calls.py ") {
                assert_eq!(single.get(name), Some(&is_refused), "calls.py: {name}");
                continue;
            }
            let earlier = tabled.insert(case.to_owned(), is_refused);
            assert_eq!(earlier, None, "{case} is there twice");
        }
    }
    assert_eq!(tabled, file_cases(&read("tests/system/files.py")));
}

/// The names in the tables `CHANNELS` and `CHANGES` of the driver and of its other cases, and
/// whether the cases are refused.
fn call_cases(driver: &str) -> BTreeMap<String, bool> {
    let mut cases = BTreeMap::new();
    for table in ["CHANNELS = {", "CHANGES = {", "KILLED = {"] {
        let lines = driver.lines().skip_while(|line| *line != table).skip(1);
        for line in lines.take_while(|line| *line != "}") {
            let entry = line.trim().strip_prefix('"').and_then(|rest| rest.split_once("\": "));
            let Some((name, reason)) = entry else { panic!("not an entry: {line}") };
            cases.insert(name.to_owned(), !reason.starts_with("\"\""));
        }
        assert!(!cases.is_empty(), "{table}");
    }
    let others = driver.split("    case = \"").skip(1).filter_map(|rest| rest.split_once('"'));
    cases.extend(others.map(|(name, _)| (name.to_owned(), false)));
    cases
}

/// The names in the table `ROWS` of the driver, and whether the cases are refused.
fn file_cases(driver: &str) -> BTreeMap<String, bool> {
    let table = driver.lines().skip_while(|line| *line != "ROWS = [");
    let mut cases = BTreeMap::new();
    for line in table.skip(1).take_while(|line| *line != "]") {
        if line.trim_start().starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split('"').collect();
        let [_, _program, _, names, rest, ..] = words[..] else { panic!("not a row: {line}") };
        let is_refused = rest.contains("REFUSED");
        cases.extend(names.split(' ').map(|name| (name.to_owned(), is_refused)));
    }
    cases
}

#[test]
fn links_lead_somewhere() {
    // `make bench` and `tests/fabtests.py` make these documents.
    let generated = ["docs/BENCHMARKS.md", "docs/CONFORMANCE.md"];
    let documents = [
        "README.md",
        "CHANGELOG.md",
        "docs/ARCHITECTURE.md",
        "docs/WIRE.md",
        "docs/HACKING.md",
        "docs/LIMITS.md",
        "docs/LAB.md",
        "docs/NETWORK.md",
        "docs/RECOVERY.md",
        "docs/RECOVERY-INSIDE.md",
        "docs/GUIDE.md",
        "docs/TROUBLESHOOTING.md",
        "docs/TOPOLOGY.md",
        "docs/SETTINGS.md",
    ];
    for document in documents {
        let folder = Path::new(document).parent().unwrap();
        let text = read(document);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("https://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => PathBuf::from(document),
                _ => folder.join(path),
            };
            let is_made = generated.iter().any(|path| target == Path::new(path));
            let is_there = root().join(&target).exists();
            assert!(is_there || is_made, "{document}: {link}");
            if is_there && !anchor.is_empty() {
                let text = fs::read_to_string(root().join(&target)).unwrap();
                assert!(headings(&text).any(|it| slug(it) == anchor), "{document}: {link}");
            }
        }
    }
}

/// A reference is the path of a document, with the heading of a section in quotes behind a comma if
/// it is to a part of the document.
#[test]
fn references_of_code_to_documents_lead_somewhere() {
    let mut files = vec![root().join("Cargo.toml"), root().join("Makefile")];
    for folder in ["crates", "bench", "examples", "fuzz", "labs", "scripts", "tests"] {
        collect_texts(&root().join(folder), &mut files);
    }
    let (mut wrong, mut count) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        // A reference may go on behind the mark of the next line's comment.
        let marks = |word: &&str| !matches!(*word, "#" | "//" | "///" | "//!" | "\\");
        let words = text.split_whitespace().filter(marks).collect::<Vec<_>>().join(" ");
        for (at, _) in words.match_indices("docs/") {
            let rest = &words[at..];
            let is_of_path =
                |letter: char| letter.is_ascii_alphanumeric() || "-_/.".contains(letter);
            let end = rest.find(|letter| !is_of_path(letter)).unwrap_or(rest.len());
            let Some(end) = rest[..end].find(".md").map(|end| end + ".md".len()) else { continue };
            count += 1;
            let heading = rest[end..].strip_prefix(", \"").and_then(|rest| rest.split('"').next());
            let document = fs::read_to_string(root().join(&rest[..end]));
            let is_right = document.is_ok_and(|text| {
                heading.is_none_or(|wanted| headings(&text).any(|it| is_heading(it, wanted)))
            });
            if !is_right {
                wrong.push(format!("{}: {} {heading:?}", file.display(), &rest[..end]));
            }
        }
    }
    assert!(count > 20, "only {count} references were found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Documents that somebody reads from beginning to end, and their longest length in lines.
const LINES_MAX: [(&str, usize); 3] =
    [("README.md", 150), ("docs/RECOVERY.md", 200), ("docs/ARCHITECTURE.md", 350)];

#[test]
fn documents_for_a_first_reading_are_short() {
    for (document, bound) in LINES_MAX {
        let lines = read(document).lines().count();
        assert!(lines <= bound, "{document} has {lines} lines; at most {bound}");
    }
}

/// The last column of a table of costs names sections of the measurements.
#[test]
fn the_costs_of_recovery_name_sections_of_the_measurements() {
    let measurements = read("docs/BENCHMARKS.md");
    for row in rows(&read("docs/RECOVERY.md"), "## What it costs") {
        let [.., section] = &row[..] else { panic!("an empty row") };
        let is_it = |heading: &str| heading.split(": ").next() == Some(section);
        assert!(headings(&measurements).any(is_it), "BENCHMARKS.md has no section {section:?}");
    }
}

/// The headings of a document of Markdown, without those in blocks of code.
fn headings(text: &str) -> impl Iterator<Item = &str> {
    let outside = text.split("```").step_by(2).flat_map(str::lines);
    let heads = outside.filter(|line| line.trim_start_matches('#').starts_with(' '));
    heads.filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim())
}

/// Whether a heading is the `wanted` one; that a test checks its section need not be said.
fn is_heading(heading: &str, wanted: &str) -> bool {
    heading == wanted || heading.strip_suffix(" (checked)") == Some(wanted)
}

/// The anchor that a renderer of Markdown gives to a heading.
fn slug(heading: &str) -> String {
    let is_kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
    heading.to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-")
}

#[test]
fn headings_and_their_anchors_are_found() {
    let text =
        "# A\n```sh\n# no\n```\n#no\n## Files under `--recover`: cost\n### [[link]] (checked)\n";
    let found: Vec<_> = headings(text).collect();
    assert_eq!(found, ["A", "Files under `--recover`: cost", "[[link]] (checked)"]);
    let slugs: Vec<_> = found.iter().map(|heading| slug(heading)).collect();
    assert_eq!(slugs, ["a", "files-under---recover-cost", "link-checked"]);
    assert!(is_heading(found[2], "[[link]]") && !is_heading(found[2], "link"));
}

/// Adds the files below a folder in which people write references, but nothing that a build or a
/// fuzzer has made, and not this file, which has examples of references.
fn collect_texts(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_made =
            ["target", "corpus", "artifacts", "baseline"].iter().any(|it| path.ends_with(it));
        let is_text = path.extension().is_some_and(|it| it == "rs" || it == "py" || it == "toml");
        if path.is_dir() && !is_made {
            collect_texts(&path, files);
        } else if is_text && !path.ends_with("tests/documents.rs") {
            files.push(path);
        }
    }
}

#[test]
fn examples_are_toml() {
    let mut count = 0;
    for entry in fs::read_dir(root().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let text = fs::read_to_string(&path).unwrap();
            let table: toml::Table = text.parse().unwrap();
            assert!(table["cluster"].as_array().is_some_and(|clusters| !clusters.is_empty()));
            count += 1;
        }
    }
    assert!(count > 0, "there is no example of a cluster file");
}

const SETTINGS_HEADINGS: [(Scope, &str); 3] = [
    (Scope::Job, "## Settings of a job (checked)"),
    (Scope::Launcher, "## Settings of the launcher (checked)"),
    (Scope::Process, "## Variables of each process (checked)"),
];

/// Lines of the table of settings of one scope.
fn settings_table(scope: Scope) -> String {
    let mut table = String::new();
    let is_of_job = scope == Scope::Job;
    table += if is_of_job {
        "| setting | default | value | read by | meaning |\n|---|---|---|---|---|\n"
    } else {
        "| variable | default | value | meaning |\n|---|---|---|---|\n"
    };
    for row in SETTINGS.iter().filter(|row| row.scope == scope) {
        let Setting { unit, description, .. } = row;
        let line = if is_of_job {
            let default =
                if row.default.is_empty() { "none".into() } else { format!("`{}`", row.default) };
            let readers = row.readers.iter().map(Reader::to_string).collect::<Vec<_>>().join(", ");
            format!("| `{}` | {default} | {unit} | {readers} | {description} |\n", row.name)
        } else {
            format!("| `{}` | {} | {unit} | {description} |\n", row.variable(), row.default)
        };
        table += &line;
    }
    table
}

/// The text with `table` in place of the first table after the line `heading`.
fn with_table(text: &str, heading: &str, table: &str) -> String {
    let start = text.find(&format!("{heading}\n")).unwrap_or_else(|| panic!("no {heading:?}"));
    let from = start + text[start..].find("\n|").expect("a table follows its heading") + 1;
    let rest = text[from..].find("\n\n").map_or("\n", |end| &text[from + end..]);
    format!("{}{}{rest}", &text[..from], table.trim_end())
}

/// Compares a document with the text that it must have. If the variable is set, the text is written
/// first.
fn check_or_write(path: &str, text: &str, variable: &str) {
    if std::env::var_os(variable).is_some() {
        fs::write(root().join(path), text).unwrap();
    }
    let advice = format!("{variable}=1 cargo test -p landbridge-lab --test documents");
    assert!(read(path) == text, "{path} is stale; to write its tables: {advice}");
}

/// Cells of the first table after the line `heading`, without the two header lines.
fn rows(text: &str, heading: &str) -> Vec<Vec<String>> {
    let lines = text.lines().skip_while(|line| *line != heading);
    let table = lines.skip_while(|line| !line.starts_with('|'));
    let rows = table.take_while(|line| line.starts_with('|')).skip(2);
    let rows: Vec<Vec<String>> = rows.map(cells).collect();
    assert!(!rows.is_empty(), "there is no table under {heading:?}");
    rows
}

fn cells(line: &str) -> Vec<String> {
    line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

fn unquoted(cell: &str) -> &str {
    cell.trim_matches('`')
}

fn read(path: &str) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}
