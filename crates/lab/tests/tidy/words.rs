//! Words that have a better one, in code, comments and documents; and first words of a comment that
//! make the comment depend on the item above its own.

use super::{Source, assert_none, files_of, read, root, sources};

/// Words of a private language, and what to write instead.
const REPLACED_WORDS: [(&str, &str); 20] = [
    ("intake", "determinant"),
    ("intakes", "determinants"),
    ("ward", "replicated rank state"),
    ("wards", "replicated rank states"),
    ("spoilt", "corrupt"),
    ("errand", "control frame"),
    ("errands", "control frames"),
    ("lane", "stream"),
    ("lanes", "streams"),
    ("stranger", "pending connection"),
    ("strangers", "pending connections"),
    ("door", "listener"),
    ("doors", "listeners"),
    ("doubt", "suspicion"),
    ("doubted", "suspected"),
    ("doubts", "suspects"),
    ("anew", "restarted, or again"),
    ("whoever", "the process, rank or peer that"),
    ("telling", "replay"),
    ("told", "replayed, or notified"),
];

/// Extensions of the files of tests and scripts.
const SCRIPTS: [&str; 5] = ["py", "c", "h", "cpp", "f90"];

/// The file with the list.
const LIST: &str = "crates/lab/tests/tidy/words.rs";

/// With one of these the first sentence of a comment continues the comment of another item.
const FIRST_WORDS: [&str; 10] =
    ["The same", "Same", "Its", "It", "Such", "So", "Those", "That", "They", "Their"];

#[test]
fn words_that_have_a_better_one_do_not_come_back() {
    let mut wrong = Vec::new();
    let scripts =
        ["tests", "scripts", "bench", "examples"].map(|folder| files_of(folder, &SCRIPTS));
    let texts = [sources("crates"), documents(), scripts.concat()].concat();
    for source in texts.iter().filter(|source| source.path != LIST) {
        for (number, line) in source.text.lines().enumerate() {
            for word in words(line) {
                let found = REPLACED_WORDS.iter().find(|(replaced, _)| *replaced == word);
                let Some((_, better)) = found else { continue };
                wrong.push(format!("{}:{}: {word}: write {better}", source.path, number + 1));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn comments_of_an_item_do_not_continue_those_of_another() {
    let mut wrong = Vec::new();
    for source in sources("crates") {
        for (number, text) in first_lines(&source.text) {
            if let Some(word) = FIRST_WORDS.iter().find(|word| begins_with(text, word)) {
                wrong.push(format!("{}:{number}: begins with {word:?}: {text}", source.path));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn words_and_first_lines_are_found() {
    let found: Vec<_> = words("let openDoor = HTTPDoor::told_of(x2y, \"a door-bell\")").collect();
    let expected = "let open door http door told of x y a door bell";
    assert_eq!(found, expected.split(' ').collect::<Vec<_>>());
    let text = "/// One.\n/// It goes on.\nfn a() {}\n    /// It begins.\n//! Its\n//// It\n";
    assert_eq!(first_lines(text).collect::<Vec<_>>(), [(1, "One."), (4, "It begins.")]);
    assert!(begins_with("It begins.", "It") && begins_with("It, too", "It"));
    assert!(!begins_with("Item", "It"));
}

/// The documents that people write and read, and the list of messages.
fn documents() -> Vec<Source> {
    let folder = std::fs::read_dir(root().join("docs")).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let is_text = |name: &String| name.ends_with(".md") || name == "messages.toml";
    let mut paths: Vec<_> = names.filter(is_text).map(|name| format!("docs/{name}")).collect();
    paths.push("README.md".to_owned());
    assert!(paths.len() > 10, "only {paths:?} were found");
    paths.into_iter().map(|path| Source { text: read(&root().join(&path)), path }).collect()
}

/// The words of a line in lower case; the words inside `CamelCase` and `snake_case` count alone.
fn words(line: &str) -> impl Iterator<Item = String> {
    let letters: Vec<char> = line.chars().collect();
    let is_letter = |at: usize| letters.get(at).is_some_and(char::is_ascii_alphabetic);
    let is_upper = |at: usize| letters.get(at).is_some_and(char::is_ascii_uppercase);
    let is_lower = |at: usize| letters.get(at).is_some_and(char::is_ascii_lowercase);
    let mut found = vec![String::new()];
    for (at, letter) in letters.iter().enumerate().filter(|(at, _)| is_letter(*at)) {
        let is_start = at == 0 || !is_letter(at - 1);
        let is_hump = is_upper(at) && (at > 0 && is_lower(at - 1) || is_lower(at + 1));
        if is_start || is_hump {
            found.push(String::new());
        }
        found.last_mut().unwrap().push(letter.to_ascii_lowercase());
    }
    found.into_iter().filter(|word| !word.is_empty())
}

/// Number and text of the first line of each comment of an item.
fn first_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().map(|line| line.trim_start().strip_prefix("/// "));
    let mut before = None;
    lines.enumerate().filter_map(move |(index, line)| {
        let is_first = before.is_none();
        before = line;
        Some((index + 1, line.filter(|_| is_first)?))
    })
}

fn begins_with(text: &str, word: &str) -> bool {
    let rest = text.strip_prefix(word);
    rest.is_some_and(|rest| !rest.starts_with(|letter: char| letter.is_alphanumeric()))
}
