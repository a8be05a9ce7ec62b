//! The settings of a job: what has been said about each row of [`landbridge_proto::setting`], by whom,
//! and what therefore holds.
//!
//! A flag goes before a variable, a variable before the settings file, the file before the default.
//! Texts enter and are read; a text that cannot be read never gets to a process. What was said leaves
//! as variables, for ranks and relays.

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

/// One row, and what holds for this job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    pub row: &'static Setting,
    pub text: String,
    pub source: SettingSource,
}

/// Who has said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    Default,
    /// What `landbridge run` does where nobody says anything.
    Launcher,
    File {
        path: PathBuf,
        line: usize,
    },
    Environment,
    /// The option: `--set`, `-x`, or one that is for this setting alone.
    Flag(&'static str),
}

/// What an option says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flag {
    option: &'static str,
    row: &'static Setting,
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Settings {
    /// Every row of the job, in the order of the table.
    pub rows: Vec<InForce>,
    /// The settings file that was read.
    pub file: Option<PathBuf>,
}

impl Settings {
    /// From the options, this process's environment, and the settings file. `exported`: variables
    /// that an option sets for ranks. `topology`: the file the job is described in.
    pub fn find(
        options: &SettingOptions,
        exported: &[(String, String)],
        topology: Option<&Path>,
    ) -> Result<Settings> {
        Settings::find_with(options, Vec::new(), exported, topology)
    }

    /// The same. `special`: what options say that are for one setting each.
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
            // An empty text asks for the default.
            let text = if text.is_empty() { row.default.to_string() } else { text };
            rows.push(InForce { row, text, source });
        }
        Ok(Settings { rows, file: file.map(|file| file.path) })
    }

    /// What somebody has said, as variables for whoever reads them; a switch as `on` or `off`, however it was spelt.
    pub fn variables(&self) -> impl Iterator<Item = (String, String)> {
        let is_said =
            |it: &&InForce| !matches!(it.source, SettingSource::Default | SettingSource::Launcher);
        self.rows.iter().filter(is_said).map(|it| {
            let switch = it.row.parse(&it.text).ok().and_then(|value| value.is_on());
            let text = switch.map_or(&*it.text, |is_on| if is_on { "on" } else { "off" });
            (it.row.variable(), text.to_string())
        })
    }

    /// How long what cannot be reached is waited for.
    pub fn peer_timeout(&self) -> Duration {
        self.value(&setting::PEER_TIMEOUT).and_then(|value| value.duration()).unwrap_or_default()
    }

    /// Whether ranks that are killed are to be restarted.
    pub fn recovers(&self) -> bool {
        self.value(&setting::RECOVER).and_then(|value| value.is_on()).unwrap_or_default()
    }

    /// Whether images of ranks are wanted and cannot be asked for.
    pub fn lacks_clocks_for_images(&self) -> bool {
        let every = self.value(&setting::CHECKPOINT).and_then(|value| value.duration());
        let clocks = self.value(&setting::RECOVER_CLOCKS).and_then(|value| value.is_on());
        self.recovers() && !every.unwrap_or_default().is_zero() && clocks == Some(false)
    }

    /// What holds for a row of the job.
    pub fn text(&self, row: &Setting) -> &str {
        self.rows.iter().find(|it| it.row == row).map_or(row.default, |it| &it.text)
    }

    fn value(&self, row: &Setting) -> Option<Value> {
        let found = self.rows.iter().find(|it| it.row == row)?;
        row.parse(&found.text).ok()
    }

    /// Those that do not have their default value.
    pub fn changed(&self) -> impl Iterator<Item = &InForce> {
        self.rows.iter().filter(|it| match it.row.parse(&it.text) {
            // Of which only its reader knows what it stands for.
            Ok(Value::Text) => it.text != it.row.default,
            value => value != it.row.parse(it.row.default),
        })
    }
}

/// The text for a row, and who says it. Every text that was said is read, also one that another goes
/// before: what is wrong is wrong today and not on the day the other one is taken away.
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
    // As `mpi::set_provider` has it: a variable that is there, be it empty, is left alone.
    let is_quiet = environment("FI_LOG_LEVEL").is_none_or(|level| level.is_empty());
    if *row == setting::LOG && own.is_none() && is_quiet {
        return Ok(("warn".to_string(), SettingSource::Launcher));
    }
    Ok((row.default.to_string(), SettingSource::Default))
}

impl Flag {
    /// `--set NAME=VALUE`.
    fn set(words: &str) -> Result<Flag> {
        let Some((name, text)) = words.split_once('=') else {
            bail!("--set {words}: write NAME=VALUE; `landbridge settings` lists the names");
        };
        let row = known(name.trim()).map_err(|error| anyhow::anyhow!("--set {words}: {error}"))?;
        Flag::new("--set", row, text)
    }

    /// `-x LANDBRIDGE_NAME=VALUE`; `None` if the variable is no setting of the job.
    fn exported((variable, text): &(String, String)) -> Option<Result<Flag>> {
        let row = setting::find_by_variable(variable).filter(|row| row.scope == Scope::Job)?;
        Some(Flag::new("-x", row, text))
    }

    /// An option that is for this setting alone.
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

/// `place`: where the text was found.
fn check(row: &Setting, text: &str, place: &str) -> Result<()> {
    match row.parse(text) {
        Ok(_) => Ok(()),
        Err(error) => bail!("{place}: {error}"),
    }
}

/// The row of the job with this name; the error says which name was meant, or who says such things.
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

/// Variables in our environment that are no setting but look like one misspelt, with the right name.
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

/// Those of a job's variables that its relays read.
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
