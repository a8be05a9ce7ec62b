//! The user's settings, as the launcher passes them on in the environment: see
//! [`landbridge_proto::setting`]. An empty variable counts as not set.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::quic::Congestion;
use landbridge_proto::setting::{
    CHECKPOINT_LOG, CONGESTION, INTEGRITY, PEER_TIMEOUT, RECOVER, RECOVER_DIR, RECOVER_DISK,
    RECOVER_LOG, RECOVER_MEMORY, REDIAL_MAX, Setting, Value, WAN_STREAMS, WAN_UDP,
};

/// The default of `recover_dir`.
const NOWHERE: &str = "off";

/// The user's settings: see the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long frames wait for an endpoint whose link has broken.
    pub peer_timeout: Duration,
    /// The parallel streams to each relay that this relay dials.
    pub wan_streams: usize,
    /// The longest pause before a relay is dialled again.
    pub redial_max: Duration,
    /// The congestion control of links to relays over UDP; `None` if UDP is off.
    pub wan_udp: Option<Congestion>,
    /// Whether killed processes may be restarted, from message logs of this relay.
    pub recover: bool,
    /// The bytes of memory for the message log.
    pub recover_memory: u64,
    /// The directory for the part of the message log that exceeds the memory.
    pub recover_dir: Option<PathBuf>,
    /// The most bytes of the message log on the disk.
    pub recover_disk: u64,
    /// The bytes delivered to a process after which its next checkpoint is due; 0 if no number of
    /// bytes makes a checkpoint due.
    pub checkpoint_log: u64,
    /// How frames of processes are checked.
    pub integrity: Checksum,
}

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// The text names the invalid variable and the values to write.
    pub fn from_environment() -> Result<Self> {
        Self::from(|variable| env::var(variable).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |row: &Setting| -> Result<Value> {
            let name = row.variable();
            let text = variable(&name).filter(|text| !text.is_empty());
            let parsed = row.parse(text.as_deref().unwrap_or(row.default));
            parsed.map_err(|why| anyhow!("{name}: {why}"))
        };
        let size = |row| read(row)?.number().context("a size");
        read(&RECOVER_DIR)?;
        let directory = variable(&RECOVER_DIR.variable());
        let directory = directory.filter(|text| !text.is_empty() && text != NOWHERE);
        let time = |row| read(row)?.duration().context("a time");
        let word = |row| read(row)?.word().context("a word");
        let congestion = match word(&CONGESTION)? {
            "cubic" => Congestion::Cubic,
            _ => Congestion::Bbr,
        };
        // With logs of the senders a relay carries messages, and keeps none.
        let logs_here = word(&RECOVER_LOG)? != "sender";
        let recover = read(&RECOVER)?.is_on().context("a switch")? && logs_here;
        Ok(Self {
            peer_timeout: time(&PEER_TIMEOUT)?,
            wan_streams: read(&WAN_STREAMS)?.number().context("a number")? as usize,
            redial_max: time(&REDIAL_MAX)?,
            wan_udp: (word(&WAN_UDP)? == "on").then_some(congestion),
            recover,
            recover_memory: size(&RECOVER_MEMORY)?,
            recover_dir: directory.map(PathBuf::from),
            recover_disk: size(&RECOVER_DISK)?,
            checkpoint_log: size(&CHECKPOINT_LOG)?,
            integrity: Checksum::of_job(word(&INTEGRITY)?, recover),
        })
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::relay::MESSAGE_LOGS_BYTES_MAX;

    use super::*;

    #[test]
    fn what_is_not_set_is_as_by_default() {
        let settings = Settings::from(|_| None).unwrap();
        let (peer_timeout, redial_max) = (Duration::from_secs(60), Duration::from_secs(2));
        let expected = Settings {
            peer_timeout,
            wan_streams: 1,
            redial_max,
            wan_udp: None,
            recover: false,
            recover_memory: MESSAGE_LOGS_BYTES_MAX,
            recover_dir: None,
            recover_disk: 64 << 30,
            checkpoint_log: 1 << 30,
            integrity: Checksum::Crc32c,
        };
        assert_eq!(settings, expected);
        assert_eq!(Settings::from(|_| Some(String::new())).unwrap(), settings);
    }

    #[test]
    fn what_is_set_is_read_or_refused_by_name() {
        let set = |name: &'static str, text: &'static str| {
            Settings::from(move |variable| (variable == name).then(|| text.to_string()))
        };
        let settings = set("LANDBRIDGE_PEER_TIMEOUT", "5s").unwrap();
        assert_eq!(settings.peer_timeout, Duration::from_secs(5));
        assert_eq!(set("LANDBRIDGE_RECOVER_MEMORY", "64MiB").unwrap().recover_memory, 64 << 20);
        let directory = set("LANDBRIDGE_RECOVER_DIR", "/scratch/me").unwrap().recover_dir;
        assert_eq!(directory, Some(PathBuf::from("/scratch/me")));
        assert_eq!(set("LANDBRIDGE_RECOVER_DIR", "off").unwrap().recover_dir, None);
        assert!(set("LANDBRIDGE_RECOVER_DIR", "scratch").is_err());
        assert_eq!(set("LANDBRIDGE_WAN_STREAMS", "64").unwrap().wan_streams, 64);
        assert_eq!(set("LANDBRIDGE_WAN_UDP", "on").unwrap().wan_udp, Some(Congestion::Bbr));
        assert_eq!(set("LANDBRIDGE_CONGESTION", "cubic").unwrap().wan_udp, None);
        let error = set("LANDBRIDGE_WAN_STREAMS", "65").unwrap_err();
        assert!(error.to_string().starts_with("LANDBRIDGE_WAN_STREAMS: "), "{error}");
    }
}
