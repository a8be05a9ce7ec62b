//! Settings that can be set from outside: one row per setting, and how its text is parsed.
//!
//! A row is data: name, default, unit, description, readers. The launcher finds the text of a
//! setting on its command line, in the environment or in a file, and passes the text on in the
//! variable `LANDBRIDGE_<NAME>`; processes and relays read this variable and nothing else. All
//! programs parse with [`Setting::parse`], so a text that the launcher accepts is accepted
//! everywhere.
//!
//! | module | does |
//! |---|---|
//! | `value` | values, parsed from texts |
//! | `parse` | parsers of texts, and their errors |
//! | `table` | the rows of all settings |

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

mod parse;
mod table;
mod value;

pub use table::*;
pub use value::{Network, Value};

/// Row of one setting.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name in lower case, as in a settings file.
    pub name: &'static str,
    /// The text that holds if the user sets none. A phrase where [`Scope`] is not `Job`.
    pub default: &'static str,
    /// What to write, for a reader: unit, words and bounds.
    pub unit: &'static str,
    /// How the text is parsed, and within which bounds.
    pub kind: SettingKind,
    /// Who may set the setting.
    pub scope: Scope,
    /// Programs that act on the setting.
    pub readers: &'static [Reader],
    /// Effect of the setting, in sentences for the user.
    pub description: &'static str,
}

/// How the text of a setting is parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// A whole number and `us`, `ms`, `s`, `min` or `h`; the bounds are in microseconds.
    Time {
        /// Least value, in microseconds.
        min_us: u64,
        /// Greatest value, in microseconds.
        max_us: u64,
    },
    /// A whole number of bytes, or of `KiB`, `MiB` or `GiB`.
    Size {
        /// Least value, in bytes.
        min: u64,
        /// Greatest value, in bytes.
        max: u64,
    },
    /// A decimal number.
    Count {
        /// Least value.
        min: u64,
        /// Greatest value.
        max: u64,
    },
    /// `on` or `off`.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// At least one of these words, separated by commas.
    Choices(&'static [&'static str]),
    /// IP addresses and prefixes, separated by commas; the list may be empty. `auto` means every
    /// address.
    Networks,
    /// The absolute path of a folder, or one of these words. A word that ends with a slash stands
    /// for every text that begins with this word.
    Folder(&'static [&'static str]),
    /// Any text; the program that reads the setting checks the text.
    Text,
}

/// Who may set a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The user, for the whole job: by flag, environment or file.
    Job,
    /// The user, for the launcher alone: by environment or a flag of its own.
    Launcher,
    /// The launcher, for each process, because one value for all processes would be wrong for most.
    /// Without the launcher, the program that starts the process.
    Process,
}

/// A kind of program that acts on a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The provider, in each process.
    Process,
    /// The relays.
    Relay,
    /// The launcher, `landbridge`.
    Launcher,
}

impl SettingKind {
    /// The value of `text`; options of the command line that are no settings are parsed so too.
    ///
    /// # Errors
    /// If `text` is not valid: the error says what to correct.
    pub fn parse(self, text: &str) -> Result<Value, String> {
        parse::parse(self, text.trim())
    }
}

impl Setting {
    /// Name of the setting's environment variable.
    pub fn variable(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.to_ascii_uppercase())
    }

    /// The value of `text`.
    ///
    /// # Errors
    /// If `text` is not valid: the error says what to correct, and does not name the setting.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        self.kind.parse(text)
    }

    /// Whether `reader` acts on the setting.
    pub fn is_for(&self, reader: Reader) -> bool {
        self.readers.contains(&reader)
    }
}

impl fmt::Display for Reader {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Reader::Process => "processes",
            Reader::Relay => "relays",
            Reader::Launcher => "launcher",
        })
    }
}

/// Prefix of the name of every environment variable.
pub const VARIABLE_PREFIX: &str = "LANDBRIDGE_";

/// The row of the setting `name`.
pub fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().copied().find(|row| row.name == name)
}

/// The row of the setting with this environment variable.
pub fn find_by_variable(variable: &str) -> Option<&'static Setting> {
    SETTINGS.iter().copied().find(|row| row.variable() == variable)
}

/// The row whose name is most similar to `name`, unless no name is similar. Upper case, hyphens and
/// a leading `LANDBRIDGE_` do not count.
pub fn nearest(name: &str) -> Option<&'static Setting> {
    let lower = name.to_ascii_lowercase().replace('-', "_");
    let name = lower.strip_prefix("landbridge_").unwrap_or(&lower);
    nearest_of(name, SETTINGS.iter().copied(), |row| row.name)
}

/// The item whose name is most similar to `name`, unless no name is similar: a third of the letters
/// may be wrong, but at least one and at most three.
pub fn nearest_of<T>(
    name: &str,
    items: impl Iterator<Item = T>,
    name_of: impl Fn(&T) -> &str,
) -> Option<T> {
    let allowed = (name.len() / 3).clamp(1, 3);
    let far = |item: &T| distance(name_of(item), name);
    items.min_by_key(far).filter(|item| far(item) <= allowed)
}

/// Number of letters to insert, remove or replace to turn one word into the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_full_and_has_a_name_of_its_own() {
        for (i, row) in SETTINGS.iter().enumerate() {
            assert!(!row.unit.is_empty() && !row.readers.is_empty(), "{}", row.name);
            assert!(
                row.description.ends_with('.') && !row.description.contains('|'),
                "{}",
                row.name
            );
            assert!(row.name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase()), "{}", row.name);
            assert!(SETTINGS[i + 1..].iter().all(|other| other.name != row.name), "{}", row.name);
            assert_eq!(find_by_variable(&row.variable()), Some(*row));
        }
    }

    #[test]
    fn every_default_can_be_read() {
        for row in SETTINGS.iter().filter(|row| row.scope == Scope::Job) {
            assert!(row.parse(row.default).is_ok(), "{}: {:?}", row.name, row.parse(row.default));
        }
    }

    #[test]
    fn units_name_every_word() {
        for row in SETTINGS {
            let (SettingKind::Choice(words) | SettingKind::Choices(words)) = row.kind else {
                continue;
            };
            assert!(words.iter().all(|word| row.unit.contains(word)), "{}: {}", row.name, row.unit);
        }
    }

    #[test]
    fn units_name_the_bounds() {
        for row in SETTINGS.iter().filter(|row| row.scope == Scope::Job) {
            let Some((least, most)) = row.unit.rsplit_once(" to ") else { continue };
            let least = least.rsplit(' ').next().unwrap_or("");
            let value = |text: &str| match row.parse(text) {
                Ok(Value::Time(time)) => time.as_micros() as u64,
                Ok(Value::Number(number)) => number,
                other => panic!("{}: {text}: {other:?}", row.name),
            };
            let (SettingKind::Time { min_us: min, max_us: max }
            | SettingKind::Size { min, max }
            | SettingKind::Count { min, max }) = row.kind
            else {
                panic!("{} has no bounds", row.name)
            };
            assert_eq!((value(least), value(most)), (min, max), "{}", row.name);
        }
    }

    #[test]
    fn a_name_that_is_nearly_one_is_recognised() {
        let rows = [
            ("peer_timout", Some("peer_timeout")),
            ("peer-timeout", Some("peer_timeout")),
            ("LANDBRIDGE_PEER_TIMEOUT", Some("peer_timeout")),
            ("peertimeout", Some("peer_timeout")),
            ("rail", Some("rails")),
            ("udb", Some("udp")),
            ("integrty_shm", Some("integrity_shm")),
            ("colour", None),
            ("test_mark", None),
            ("x", None),
            ("", None),
        ];
        for (name, expected) in rows {
            assert_eq!(nearest(name).map(|row| row.name), expected, "{name}");
        }
    }
}
