//! Counters of a relay, for its log and its tests. Nothing depends on them.

/// Counters of a relay since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to an output.
    pub frames: u64,
    /// Bytes of the frames given to an output, headers included.
    pub bytes: u64,
    /// Unreachable reports to sources: the target of a frame cannot be reached.
    pub unreachable: u64,
    /// Lost reports to sources: frames of the source have been lost.
    pub lost: u64,
    /// Reports dropped because too many were pending.
    pub reports_dropped: u64,
    /// Links closed because of a malformed frame.
    pub malformed: u64,
    /// How often an input had to wait for an output.
    pub pauses: u64,
    /// Bytes in flight to peer relays when a stream broke: these bytes may have been lost.
    pub lost_bytes: u64,
    /// Frames delivered by endpoints that may be restarted, as their determinants report.
    pub delivered_frames: u64,
    /// Bytes of the determinants that the relay has logged.
    pub determinant_bytes: u64,
    /// Bytes of recorded nondeterminism that the relay keeps copies of.
    pub nondeterminism_bytes: u64,
    /// Bytes of message logs that were read back from the disk.
    pub read_back_bytes: u64,
    /// How often an input had to wait for the disk.
    pub disk_waits: u64,
}
