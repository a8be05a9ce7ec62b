//! Settings of this process: the rows of [`landbridge_proto::setting`] that processes read, each
//! from its variable `LANDBRIDGE_<NAME>`.
//!
//! The provider runs inside other programs, so it opens no settings file: the launcher reads the
//! file and passes its content on as variables. An empty variable counts as not set.
//!
//! ```text
//! let wait: Duration = param::PEER_TIMEOUT.duration()?;   // the default if it is not set
//! let index: Option<u64> = param::INDEX.number()?;        // rows without a default value
//! ```

use std::env;
use std::time::Duration;

use landbridge_proto::setting::{self, Network, Setting, Value};

/// A row of the settings, and its variable in this process's environment. Every error says what to
/// correct.
#[derive(Debug, Clone, Copy)]
pub struct Knob(&'static Setting);

pub const LOG: Knob = Knob(&setting::LOG);
pub const PATHS: Knob = Knob(&setting::PATHS);
/// Values: `auto`, `own` or `library`. The launcher writes what holds for this process.
pub const LOCAL: Knob = Knob(&setting::LOCAL);
/// Values: `off` or `on`.
pub const UDP: Knob = Knob(&setting::UDP);
/// Values: `cubic` or `bbr`.
pub const CONGESTION: Knob = Knob(&setting::CONGESTION);
/// Networks that hold the local addresses for direct paths; by default every address.
pub const RAILS: Knob = Knob(&setting::RAILS);
/// Networks that hold no local addresses for direct paths; by default none.
pub const RAILS_EXCLUDE: Knob = Knob(&setting::RAILS_EXCLUDE);
/// A duration.
pub const PEER_TIMEOUT: Knob = Knob(&setting::PEER_TIMEOUT);
/// A duration.
pub const SUSPECT_AFTER: Knob = Knob(&setting::SUSPECT_AFTER);
/// A duration.
pub const REDIAL_MAX: Knob = Knob(&setting::REDIAL_MAX);
/// Values: `crc32c`, `sum` or `off`.
pub const INTEGRITY: Knob = Knob(&setting::INTEGRITY);
/// A switch.
pub const INTEGRITY_SHM: Knob = Knob(&setting::INTEGRITY_SHM);
/// A switch.
pub const OWN_CORE: Knob = Knob(&setting::OWN_CORE);
/// A number of bytes.
pub const RETAIN: Knob = Knob(&setting::RETAIN);
/// A number of bytes.
pub const COPY_MAX: Knob = Knob(&setting::COPY_MAX);

pub const JOB: Knob = Knob(&setting::JOB);
pub const KEY: Knob = Knob(&setting::KEY);
pub const INDEX: Knob = Knob(&setting::INDEX);
pub const SIZE: Knob = Knob(&setting::SIZE);
pub const RECOVER: Knob = Knob(&setting::RECOVER);
pub const RECOVER_MEMORY: Knob = Knob(&setting::RECOVER_MEMORY);
pub const RECOVER_CLOCKS: Knob = Knob(&setting::RECOVER_CLOCKS);
pub const INCARNATION: Knob = Knob(&setting::INCARNATION);
pub const CLUSTER: Knob = Knob(&setting::CLUSTER);
pub const NODE: Knob = Knob(&setting::NODE);
pub const NODE_SIZE: Knob = Knob(&setting::NODE_SIZE);
pub const ADDRESS: Knob = Knob(&setting::ADDRESS);
pub const RELAY: Knob = Knob(&setting::RELAY);
pub const STATISTICS_PAGE: Knob = Knob(&setting::STATISTICS_PAGE);
pub const NODE_LOGS: Knob = Knob(&setting::NODE_LOGS);
pub const NODE_LOGS_DISK: Knob = Knob(&setting::NODE_LOGS_DISK);
pub const QUIESCE_SOCKET: Knob = Knob(&setting::QUIESCE_SOCKET);

impl Knob {
    pub fn variable(self) -> String {
        self.0.variable()
    }

    /// The text, if the variable is set and not empty. Bytes that are not UTF-8 count as not set.
    pub fn text(self) -> Option<String> {
        env::var(self.variable()).ok().filter(|value| !value.is_empty())
    }

    /// The number of a row without a default value; `None` if the variable is not set.
    pub fn number(self) -> Result<Option<u64>, String> {
        let Some(text) = self.text() else { return Ok(None) };
        self.read(Some(&text))?.number().map(Some).ok_or_else(|| self.other_kind())
    }

    /// The value of a row that holds a duration.
    pub fn duration(self) -> Result<Duration, String> {
        self.value()?.duration().ok_or_else(|| self.other_kind())
    }

    /// The value of a row that holds a number of bytes.
    pub fn bytes(self) -> Result<u64, String> {
        self.value()?.number().ok_or_else(|| self.other_kind())
    }

    /// The value of a row that holds a switch.
    pub fn is_on(self) -> Result<bool, String> {
        self.value()?.is_on().ok_or_else(|| self.other_kind())
    }

    /// The value of a row that holds one of its words.
    pub fn word(self) -> Result<&'static str, String> {
        self.value()?.word().ok_or_else(|| self.other_kind())
    }

    /// The values of a row that holds several words, in the order of the row.
    pub fn words(self) -> Result<Vec<&'static str>, String> {
        self.value()?.words().ok_or_else(|| self.other_kind())
    }

    /// The value of a row that holds a list of addresses and prefixes.
    pub fn networks(self) -> Result<Vec<Network>, String> {
        self.value()?.networks().ok_or_else(|| self.other_kind())
    }

    fn value(self) -> Result<Value, String> {
        self.read(self.text().as_deref())
    }

    fn read(self, text: Option<&str>) -> Result<Value, String> {
        let text = text.unwrap_or(self.0.default);
        self.0.parse(text).map_err(|error| format!("{}: {error}", self.variable()))
    }

    /// The error for code that asks for another kind of value than the row holds.
    fn other_kind(self) -> String {
        format!("{} is of another kind than was asked for: {}", self.0.name, self.0.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// None of the variables is set where tests run; the default of each row is text.
    #[test]
    fn what_is_not_set_has_its_default() {
        assert_eq!(PEER_TIMEOUT.duration(), Ok(Duration::from_secs(60)));
        assert_eq!(SUSPECT_AFTER.duration(), Ok(Duration::from_millis(100)));
        assert_eq!(REDIAL_MAX.duration(), Ok(Duration::from_secs(2)));
        assert_eq!((RETAIN.bytes(), COPY_MAX.bytes()), (Ok(64 * MIB), Ok(16 << 10)));
        assert_eq!((INTEGRITY.word(), INTEGRITY_SHM.is_on()), (Ok("crc32c"), Ok(false)));
        assert_eq!((UDP.word(), CONGESTION.word()), (Ok("off"), Ok("bbr")));
        assert_eq!(PATHS.words().map(|paths| paths.len()), Ok(3));
        assert_eq!(RAILS.networks().map(|networks| networks.len()), Ok(2));
        assert_eq!(RAILS_EXCLUDE.networks().map(|networks| networks.len()), Ok(0));
        assert_eq!((INDEX.number(), JOB.text()), (Ok(None), None));
    }

    #[test]
    fn an_error_names_the_variable() {
        let error = PEER_TIMEOUT.read(Some("60")).unwrap_err();
        assert_eq!(error, "LANDBRIDGE_PEER_TIMEOUT: \"60\" has no unit: write 60s or 60ms");
        let error = INDEX.read(Some("one")).unwrap_err();
        assert!(error.starts_with("LANDBRIDGE_INDEX: \"one\" is no number"), "{error}");
        assert!(PEER_TIMEOUT.word().unwrap_err().contains("another kind"));
    }

    /// The engine could not read a row without a constant in this module.
    #[test]
    fn every_row_for_processes_is_here() {
        let here = [
            LOG,
            PATHS,
            LOCAL,
            UDP,
            CONGESTION,
            RAILS,
            RAILS_EXCLUDE,
            PEER_TIMEOUT,
            SUSPECT_AFTER,
            REDIAL_MAX,
            INTEGRITY,
            INTEGRITY_SHM,
            OWN_CORE,
            RETAIN,
            COPY_MAX,
            RECOVER,
            RECOVER_MEMORY,
            RECOVER_CLOCKS,
            JOB,
            KEY,
            INDEX,
            SIZE,
            INCARNATION,
            CLUSTER,
            NODE,
            NODE_SIZE,
            ADDRESS,
            RELAY,
            STATISTICS_PAGE,
            NODE_LOGS,
            NODE_LOGS_DISK,
            QUIESCE_SOCKET,
        ];
        let is_here = |row: &Setting| here.iter().any(|knob| knob.0.name == row.name);
        for row in setting::SETTINGS {
            assert_eq!(is_here(row), row.is_for(setting::Reader::Process), "{}", row.name);
        }
    }
}
