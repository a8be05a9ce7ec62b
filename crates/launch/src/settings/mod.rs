//! The settings of a job: for each row of [`landbridge_proto::setting`], all given values, their
//! sources, and the value in force.
//!
//! A flag overrides a variable, a variable overrides the settings file, and the file overrides the
//! default. Texts enter and are parsed; an invalid text never reaches a process. Values that the
//! user has set leave as variables, for ranks and relays.
//!
//! | module | does |
//! |---|---|
//! | `file` | location and content of the settings file |
//! | `show` | `landbridge settings` |

mod file;
pub mod show;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use landbridge_proto::setting::{self, Reader, SETTINGS, Scope, Setting, Value};

use crate::cli::SettingOptions;
use file::{File, FileCandidates};

/// One row of the table with the value in force for this job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    pub row: &'static Setting,
    pub text: String,
    pub source: SettingSource,
}

impl InForce {
    fn is_set_by_user(&self) -> bool {
        !matches!(self.source, SettingSource::Default | SettingSource::Launcher)
    }
}

/// The source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    Default,
    /// The value that `landbridge run` sets if the user sets none.
    Launcher,
    File {
        path: PathBuf,
        line: usize,
    },
    Environment,
    /// An option: `--set`, `-x`, or an option for this setting alone.
    Flag(&'static str),
}

/// A value from an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flag {
    option: &'static str,
    row: &'static Setting,
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Settings {
    /// Every row with the scope of a job, in the order of the table.
    pub rows: Vec<InForce>,
    /// The settings file that was read, if any.
    pub file: Option<PathBuf>,
}

impl Settings {
    /// Finds the settings in the options, in this process's environment, and in the settings file.
    /// `exported` holds variables that an option sets for ranks; `topology` is the job's topology
    /// file.
    pub fn find(
        options: &SettingOptions,
        exported: &[(String, String)],
        topology: Option<&Path>,
    ) -> Result<Settings> {
        Settings::find_with(options, Vec::new(), exported, topology)
    }

    /// Finds the settings as [`Settings::find`] does. `special` holds the values of options that
    /// each set one setting.
    pub fn find_with(
        options: &SettingOptions,
        special: Vec<Flag>,
        exported: &[(String, String)],
        topology: Option<&Path>,
    ) -> Result<Settings> {
        let own = |name: &str| std::env::var_os(name);
        let file = FileCandidates::new(options.file.as_deref(), topology, own).read()?;
        let mut flags = exported.iter().filter_map(Flag::exported).collect::<Result<Vec<_>>>()?;
        for words in &options.set {
            flags.push(Flag::set(words)?);
        }
        flags.extend(special);
        Settings::resolve(&flags, own, file)
    }

    fn resolve(
        flags: &[Flag],
        environment: impl Fn(&str) -> Option<OsString>,
        file: Option<File>,
    ) -> Result<Settings> {
        let mut rows = Vec::new();
        for row in SETTINGS.iter().copied().filter(|row| row.scope == Scope::Job) {
            let (text, source) = said(row, flags, &environment, file.as_ref())?;
            // An empty text stands for the default.
            let text = if text.is_empty() { row.default.to_string() } else { text };
            rows.push(InForce { row, text, source });
        }
        Ok(Settings { rows, file: file.map(|file| file.path) })
    }

    /// The values that the user has set, as variables for ranks and relays; a switch becomes `on`
    /// or `off` in any spelling.
    pub fn variables(&self) -> impl Iterator<Item = (String, String)> {
        self.rows.iter().filter(|it| it.is_set_by_user()).map(|it| {
            let switch = it.row.parse(&it.text).ok().and_then(|value| value.is_on());
            let text = switch.map_or(&*it.text, |is_on| if is_on { "on" } else { "off" });
            (it.row.variable(), text.to_string())
        })
    }

    /// Time that an unreachable peer is waited for (`peer_timeout`).
    pub fn peer_timeout(&self) -> Duration {
        self.value(&setting::PEER_TIMEOUT).and_then(|value| value.duration()).unwrap_or_default()
    }

    /// Whether an option, a variable or the settings file sets this row.
    pub fn is_set_by_user(&self, row: &Setting) -> bool {
        self.rows.iter().any(|it| it.row == row && it.is_set_by_user())
    }

    /// Whether killed ranks are restarted (`recover`).
    pub fn recovers(&self) -> bool {
        self.value(&setting::RECOVER).and_then(|value| value.is_on()).unwrap_or_default()
    }

    /// Whether checkpoints are wanted although nondeterminism is not recorded
    /// (`recover_clocks=off`), so that no checkpoint can be taken.
    pub fn lacks_clocks_for_images(&self) -> bool {
        self.takes_checkpoints() && !self.records_clocks()
    }

    /// Whether nondeterminism is recorded (`recover_clocks`).
    pub fn records_clocks(&self) -> bool {
        self.value(&setting::RECOVER_CLOCKS).and_then(|value| value.is_on()) != Some(false)
    }

    /// Whether checkpoints are wanted.
    pub fn takes_checkpoints(&self) -> bool {
        let every = self.value(&setting::CHECKPOINT).and_then(|value| value.duration());
        self.recovers() && !every.unwrap_or_default().is_zero()
    }

    /// The value in force for a row of the job.
    pub fn text(&self, row: &Setting) -> &str {
        self.rows.iter().find(|it| it.row == row).map_or(row.default, |it| &it.text)
    }

    fn value(&self, row: &Setting) -> Option<Value> {
        let found = self.rows.iter().find(|it| it.row == row)?;
        row.parse(&found.text).ok()
    }

    /// Rows whose value is not the default.
    pub fn changed(&self) -> impl Iterator<Item = &InForce> {
        self.rows.iter().filter(|it| match it.row.parse(&it.text) {
            // Only the reader of a text setting can interpret the value, so the texts are compared.
            Ok(Value::Text) => it.text != it.row.default,
            value => value != it.row.parse(it.row.default),
        })
    }
}

/// The text for a row, and the source of the text. Every given text is checked, even a text that
/// another source overrides: an error is reported at once, and not when the other source is
/// removed.
fn said(
    row: &'static Setting,
    flags: &[Flag],
    environment: &impl Fn(&str) -> Option<OsString>,
    file: Option<&File>,
) -> Result<(String, SettingSource)> {
    let variable = row.variable();
    let own = environment(&variable).and_then(|text| text.into_string().ok());
    if let Some(text) = own.as_ref().filter(|text| !text.is_empty()) {
        check(row, text, &variable)?;
    }
    if let Some(flag) = flags.iter().rev().find(|flag| flag.row == row) {
        return Ok((flag.text.clone(), SettingSource::Flag(flag.option)));
    }
    if let Some(text) = own.as_ref().filter(|text| !text.is_empty()) {
        return Ok((text.clone(), SettingSource::Environment));
    }
    if let Some((text, source)) = file.and_then(|file| file.entry(row)) {
        return Ok((text, source));
    }
    // A variable that is set, even to an empty text, is left alone, as in `mpi::set_provider`.
    let is_quiet = environment("FI_LOG_LEVEL").is_none_or(|level| level.is_empty());
    if *row == setting::LOG && own.is_none() && is_quiet {
        return Ok(("warn".to_string(), SettingSource::Launcher));
    }
    Ok((row.default.to_string(), SettingSource::Default))
}

impl Flag {
    /// Parses `--set NAME=VALUE`.
    fn set(words: &str) -> Result<Flag> {
        let Some((name, text)) = words.split_once('=') else {
            bail!("--set {words}: write NAME=VALUE; `landbridge settings` lists the names");
        };
        let row = known(name.trim()).map_err(|error| anyhow::anyhow!("--set {words}: {error}"))?;
        Flag::new("--set", row, text)
    }

    /// Parses `-x LANDBRIDGE_NAME=VALUE`; `None` if the variable is no setting of the job.
    fn exported((variable, text): &(String, String)) -> Option<Result<Flag>> {
        let row = setting::find_by_variable(variable).filter(|row| row.scope == Scope::Job)?;
        Some(Flag::new("-x", row, text))
    }

    /// The value of an option that sets only this setting.
    pub fn special(option: &'static str, row: &'static Setting, text: &str) -> Result<Flag> {
        let text = text.trim().to_string();
        check(row, &text, option)?;
        Ok(Flag { option, row, text })
    }

    fn new(option: &'static str, row: &'static Setting, text: &str) -> Result<Flag> {
        let text = text.trim().to_string();
        if !text.is_empty() {
            check(row, &text, &format!("{option}: {}", row.name))?;
        }
        Ok(Flag { option, row, text })
    }
}

/// Checks a text. `place` names the source of the text in the error.
fn check(row: &Setting, text: &str, place: &str) -> Result<()> {
    match row.parse(text) {
        Ok(_) => Ok(()),
        Err(error) => bail!("{place}: {error}"),
    }
}

/// The job's row of this name; the error names the setting that was probably meant, or the program
/// that reads the setting.
fn known(name: &str) -> Result<&'static Setting, String> {
    match setting::find(name) {
        Some(row) if row.scope == Scope::Job => Ok(row),
        Some(row) if row.scope == Scope::Launcher => Err(format!(
            "{name} is for the launcher alone: give --{name} FILE, or set {}",
            row.variable()
        )),
        Some(_) => Err(format!("{name} is what the launcher tells each process, by itself")),
        None => Err(match setting::nearest(name).filter(|row| row.scope == Scope::Job) {
            Some(row) => format!("there is no setting {name:?}; {} is meant?", row.name),
            None => format!("there is no setting {name:?}; `landbridge settings` lists them all"),
        }),
    }
}

/// Variables in this process's environment that are no setting but resemble one: each variable's
/// name with the correct name.
pub fn misspelt() -> Vec<(String, String)> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names
        .filter_map(|name| Some((right_name(&name)?, name)))
        .map(|(right, is)| (is, right))
        .collect()
}

fn right_name(variable: &str) -> Option<String> {
    let name = variable.strip_prefix(setting::VARIABLE_PREFIX)?;
    if setting::find_by_variable(variable).is_some() {
        return None;
    }
    setting::nearest(name).map(Setting::variable)
}

/// The variables of a job that its relays read.
pub fn for_relays(environment: &[(String, String)]) -> impl Iterator<Item = (&String, &String)> {
    let is_read = |name: &str| {
        setting::find_by_variable(name)
            .is_some_and(|row| row.scope == Scope::Job && row.is_for(Reader::Relay))
    };
    environment.iter().filter(move |(name, _)| is_read(name)).map(|(name, text)| (name, text))
}

impl fmt::Display for SettingSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingSource::Default => out.write_str("default"),
            SettingSource::Launcher => out.write_str("landbridge run"),
            SettingSource::File { path, line } => write!(out, "{}, line {line}", path.display()),
            SettingSource::Environment => out.write_str("environment"),
            SettingSource::Flag(option) => out.write_str(option),
        }
    }
}

#[cfg(test)]
mod tests;
