//! Settings of paths: which are used, how their frames are checked, kept and retransmitted.
//!
//! What enters: settings from the environment. What leaves: values that do not change while the
//! process runs. What may never happen: a recorded process uses a direct path
//! beside the logs of its node.

use std::time::Duration;

use landbridge_drive::checksum::Checksum;
use landbridge_proto::path::congestion;
use landbridge_proto::setting::Network;

use crate::param;

pub struct PathSettings {
    pub kinds: PathKinds,
    /// Checksum of frames that cross a network.
    pub integrity: Checksum,
    /// Checksum of frames through shared memory.
    pub integrity_shm: Checksum,
    /// Longest time that operations wait for an unreachable peer.
    pub peer_timeout: Duration,
    /// Longest pause between attempts to reach a peer.
    pub redial_max: Duration,
    /// Longest time without confirmation for a path while another path works.
    pub suspect_after: Duration,
    /// Networks whose addresses may be used for direct paths.
    pub rail_networks: Vec<Network>,
    /// Messages of up to this many bytes are copied for retransmission.
    pub copy_max: u32,
    /// Bytes of retained copies beyond which nothing more is copied.
    pub retain: u64,
    /// Bytes of this node's memory for messages that senders keep.
    pub recover_memory: u64,
    /// Congestion control of direct UDP paths; `None` if UDP is off.
    pub datagrams: Option<congestion::CongestionAlgorithm>,
}

/// The kinds of paths that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathKinds {
    pub shm: bool,
    pub tcp: bool,
    pub relay: bool,
}

impl PathSettings {
    /// The settings in the environment. `recovers`: this process may be restarted after a failure.
    ///
    /// # Errors
    /// The text names a setting with an invalid value.
    pub fn read(recovers: bool) -> Result<Self, String> {
        // Relays recognise replayed frames by their checksums. A sum does not detect words
        // that have changed places, so a recorded job needs CRC32C.
        let integrity = Checksum::of_job(param::INTEGRITY.word()?, recovers);
        let recorded = PathKinds { shm: true, tcp: false, relay: true };
        Ok(Self {
            kinds: if recovers { recorded } else { kinds()? },
            integrity,
            integrity_shm: if param::INTEGRITY_SHM.is_on()? { integrity } else { Checksum::Off },
            peer_timeout: param::PEER_TIMEOUT.duration()?,
            redial_max: param::REDIAL_MAX.duration()?,
            suspect_after: param::SUSPECT_AFTER.duration()?,
            rail_networks: param::RAILS.networks()?,
            copy_max: u32::try_from(param::COPY_MAX.bytes()?).unwrap_or(u32::MAX),
            retain: param::RETAIN.bytes()?,
            recover_memory: param::RECOVER_MEMORY.bytes()?,
            datagrams: if recovers { None } else { datagrams()? },
        })
    }
}

fn kinds() -> Result<PathKinds, String> {
    let Some(text) = param::PATHS.text() else {
        return Ok(PathKinds { shm: true, tcp: true, relay: true });
    };
    let mut kinds = PathKinds { shm: false, tcp: false, relay: false };
    for name in text.split(',') {
        match name.trim() {
            "shm" => kinds.shm = true,
            "tcp" => kinds.tcp = true,
            "relay" => kinds.relay = true,
            other => return Err(format!("LANDBRIDGE_PATHS: {other} is none of shm, tcp, relay")),
        }
    }
    Ok(kinds)
}

fn datagrams() -> Result<Option<congestion::CongestionAlgorithm>, String> {
    let kind = match param::CONGESTION.word()? {
        "bbr" => congestion::CongestionAlgorithm::Bbr,
        _ => congestion::CongestionAlgorithm::Cubic,
    };
    Ok((param::UDP.word()? == "on").then_some(kind))
}
