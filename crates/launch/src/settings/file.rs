//! The settings file: its location and its contents. The launcher reads only the first existing
//! file; settings of several files are never mixed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use landbridge_proto::setting::{SETTINGS_FILE, Setting};
use toml::{Spanned, Value};

use super::{SettingSource, known};
use crate::topology::line_of;

/// Name of a settings file in the directory of the topology file.
const BESIDE_TOPOLOGY: &str = "landbridge.toml";
/// Path of the user's settings file below the user's configuration directory.
const OF_USER: &str = "landbridge/settings.toml";

/// Paths at which a settings file may exist.
#[derive(Debug, PartialEq, Eq)]
pub enum FileCandidates {
    /// The user has named this file; a missing file is an error.
    Named(PathBuf),
    /// The first existing file among these counts; no file is no error.
    Usual(Vec<PathBuf>),
}

impl FileCandidates {
    pub fn new(
        named: Option<&Path>,
        topology: Option<&Path>,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> FileCandidates {
        let variable = |name: &str| environment(name).filter(|text| !text.is_empty());
        let named = named.map(PathBuf::from);
        if let Some(file) = named.or_else(|| variable(&SETTINGS_FILE.variable()).map(Into::into)) {
            return FileCandidates::Named(file);
        }
        let beside = topology.map(|file| file.with_file_name(BESIDE_TOPOLOGY));
        let home = || Some(PathBuf::from(variable("HOME")?).join(".config"));
        // The XDG Base Directory Specification ignores a relative path.
        let of_user = variable("XDG_CONFIG_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let of_user = of_user.or_else(home).map(|directory| directory.join(OF_USER));
        FileCandidates::Usual(beside.into_iter().chain(of_user).collect())
    }

    pub fn read(self) -> Result<Option<File>> {
        let (places, must_be_there) = match self {
            FileCandidates::Named(file) => (vec![file], true),
            FileCandidates::Usual(files) => (files, false),
        };
        for path in places {
            let text = match std::fs::read_to_string(&path) {
                Ok(text) => text,
                Err(error) if is_absent(&error) && !must_be_there => continue,
                Err(error) => {
                    let what = format!("cannot read the settings file {}", path.display());
                    return Err(error).context(what);
                }
            };
            return File::parse(path, &text).map(Some);
        }
        Ok(None)
    }
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// A settings file whose contents have been checked.
#[derive(Debug)]
pub struct File {
    pub path: PathBuf,
    entries: Vec<FileSetting>,
}

#[derive(Debug)]
struct FileSetting {
    row: &'static Setting,
    text: String,
    line: usize,
}

impl File {
    pub fn parse(path: PathBuf, text: &str) -> Result<File> {
        let shown = path.display();
        let keys: BTreeMap<String, Spanned<Value>> = match toml::from_str(text) {
            Ok(keys) => keys,
            Err(error) => {
                let line = line_of(text, error.span().map_or(0, |span| span.start));
                bail!("{shown}: line {line}: {}", error.message().trim_end());
            }
        };
        let mut entries = Vec::new();
        for (name, value) in keys {
            let line = line_of(text, value.span().start);
            match entry(&name, value.into_inner()) {
                Ok((row, text)) => entries.push(FileSetting { row, text, line }),
                Err(error) => bail!("{shown}: line {line}: {error}"),
            }
        }
        Ok(File { path, entries })
    }

    /// The text and the source that the file gives for a row.
    pub fn entry(&self, row: &Setting) -> Option<(String, SettingSource)> {
        let entry = self.entries.iter().find(|entry| entry.row == row)?;
        let source = SettingSource::File { path: self.path.clone(), line: entry.line };
        Some((entry.text.clone(), source))
    }
}

fn entry(name: &str, value: Value) -> Result<(&'static Setting, String), String> {
    let row = known(name)?;
    let text = text(value).ok_or_else(|| format!("{name}: write it in quotes: {}", row.unit))?;
    let text = text.trim().to_string();
    if !text.is_empty() {
        row.parse(&text).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok((row, text))
}

/// The text of a value as an environment variable would hold it: lists with commas, `on` and `off`.
fn text(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Integer(number) => Some(number.to_string()),
        Value::Boolean(is_on) => Some(if is_on { "on" } else { "off" }.to_string()),
        Value::Array(items) => {
            let words = items.iter().map(Value::as_str).collect::<Option<Vec<_>>>()?;
            Some(words.join(","))
        }
        Value::Float(_) | Value::Datetime(_) | Value::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use landbridge_proto::setting;

    #[test]
    fn a_file_that_is_named_goes_before_the_usual_places() {
        let new = |named: Option<&str>, topology: Option<&str>, environment: &[(&str, &str)]| {
            let own = |name: &str| {
                let found = environment.iter().find(|(is, _)| *is == name);
                found.map(|(_, text)| OsString::from(text))
            };
            match FileCandidates::new(named.map(Path::new), topology.map(Path::new), own) {
                FileCandidates::Named(file) => format!("!{}", file.display()),
                FileCandidates::Usual(files) => files
                    .iter()
                    .map(|file| file.display().to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
            }
        };
        let home = ("HOME", "/h");
        let named = ("LANDBRIDGE_SETTINGS", "/v.toml");
        let rows: [(_, _, &[_], _); 9] = [
            (Some("f.toml"), Some("/t/grid.toml"), &[home, named], "!f.toml"),
            (None, Some("/t/grid.toml"), &[home, named], "!/v.toml"),
            (None, Some("/t/grid.toml"), &[("LANDBRIDGE_SETTINGS", "")], "/t/landbridge.toml"),
            (None, Some("grid.toml"), &[], "landbridge.toml"),
            (
                None,
                Some("/t/grid.toml"),
                &[home],
                "/t/landbridge.toml /h/.config/landbridge/settings.toml",
            ),
            (None, None, &[home, ("XDG_CONFIG_HOME", "/x")], "/x/landbridge/settings.toml"),
            (None, None, &[home, ("XDG_CONFIG_HOME", "x")], "/h/.config/landbridge/settings.toml"),
            (None, None, &[home, ("XDG_CONFIG_HOME", "")], "/h/.config/landbridge/settings.toml"),
            (None, None, &[], ""),
        ];
        for (named, topology, environment, expected) in rows {
            assert_eq!(new(named, topology, environment), expected, "{named:?} {topology:?}");
        }
    }

    #[test]
    fn only_a_file_that_is_named_must_be_there() {
        let nowhere = || PathBuf::from("/no/such/settings.toml");
        assert!(FileCandidates::Usual(vec![nowhere()]).read().unwrap().is_none());
        let error = format!("{:#}", FileCandidates::Named(nowhere()).read().unwrap_err());
        assert!(error.contains("cannot read the settings file /no/such/settings.toml"), "{error}");
        let is_empty =
            FileCandidates::Usual(vec![nowhere(), "/dev/null".into()]).read().unwrap().unwrap();
        assert_eq!(is_empty.path, Path::new("/dev/null"));
    }

    #[test]
    fn every_form_of_a_value_is_read() {
        let text = "# of this site\npeer_timeout = \"5 s\"\nwan_streams = 4\nretain = 1048576\n\
                    integrity_shm = true\nrails = [\"10.0.0.0/8\", \"fd00::/8\"]\nlog = \"\"\n";
        let file = File::parse("s.toml".into(), text).unwrap();
        let entry = |row| file.entry(row).map(|(text, source)| format!("{text} {source}"));
        let rows = [
            (&setting::PEER_TIMEOUT, "5 s s.toml, line 2"),
            (&setting::WAN_STREAMS, "4 s.toml, line 3"),
            (&setting::RETAIN, "1048576 s.toml, line 4"),
            (&setting::INTEGRITY_SHM, "on s.toml, line 5"),
            (&setting::RAILS, "10.0.0.0/8,fd00::/8 s.toml, line 6"),
            (&setting::LOG, " s.toml, line 7"),
        ];
        for (row, expected) in rows {
            assert_eq!(entry(row).as_deref(), Some(expected));
        }
        assert_eq!(entry(&setting::UDP), None);
    }

    #[test]
    fn the_example_in_the_document_is_right() {
        let document = include_str!("../../../../docs/SETTINGS.md");
        let example = document.split("```").find_map(|block| block.strip_prefix("toml\n")).unwrap();
        let file = File::parse("s.toml".into(), example).unwrap();
        assert_eq!(file.entries.len(), example.lines().count());
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let rows = [
            ("\npeer_timout = \"5s\"", "line 2: there is no setting \"peer_timout\"; peer_timeout"),
            ("colour = 1", "line 1: there is no setting \"colour\"; `landbridge settings` lists"),
            ("peer_timeout = 60", "line 1: peer_timeout: \"60\" has no unit: write 60s"),
            ("\n\nretain = \"64KB\"", "line 3: retain: \"64KB\" is no size"),
            ("suspect_after = 0.5", "line 1: suspect_after: write it in quotes: time"),
            ("rails = [10]", "line 1: rails: write it in quotes"),
            ("recover_dir = \"x/y\"", "line 1: recover_dir: \"x/y\" is not an absolute path"),
            ("[udp]\non = true", "line 1: udp: write it in quotes: off or on"),
            ("index = 3", "line 1: index is what the launcher tells each process"),
            (
                "topology = \"x\"",
                "line 1: topology is for the launcher alone: give --topology FILE",
            ),
            ("udp = \"on\"\nudp = \"off\"", "line 2: duplicate key"),
            ("udp", "line 1: "),
        ];
        for (text, expected) in rows {
            let error = File::parse("s.toml".into(), text).unwrap_err().to_string();
            assert!(error.starts_with("s.toml: ") && error.contains(expected), "{text:?}: {error}");
        }
    }
}
