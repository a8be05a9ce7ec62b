//! The disk of a relay's message logs. The test decides when it serves which request.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::relay::{DiskRequest, Relay, SegmentId};

/// Pending requests and stored segments.
#[derive(Default)]
pub struct Disk {
    /// Requests, oldest first.
    pub requests: VecDeque<DiskRequest>,
    segments: BTreeMap<SegmentId, Vec<u8>>,
}

/// Which request a disk has served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// A segment was written.
    Write,
    /// A segment was read.
    Read,
    /// A segment was deleted.
    Delete,
}

impl Disk {
    /// Collects the requests of the relay.
    pub fn collect(&mut self, relay: &mut Relay) {
        self.requests.extend(std::iter::from_fn(|| relay.recovery_mut().poll_disk_request()));
    }

    /// Serves the request `number` of [`Disk::requests`]; a write or read fails unless `is_well`.
    /// Returns `None` if there is no such request.
    ///
    /// # Errors
    /// If the relay requests what no disk can do.
    pub fn serve(
        &mut self,
        relay: &mut Relay,
        number: usize,
        is_well: bool,
    ) -> Result<Option<Served>, String> {
        let Some(request) = self.requests.remove(number) else { return Ok(None) };
        Ok(Some(match request {
            DiskRequest::Write(id, bytes) => {
                if is_well && self.segments.insert(id, bytes.to_vec()).is_some() {
                    return Err("a segment is written twice".into());
                }
                drop(bytes);
                relay.handle_written(id, is_well);
                Served::Write
            }
            DiskRequest::Read(id, length, mut into) => {
                if !into.is_empty() || into.capacity() < length {
                    return Err("a segment does not fit into its buffer".into());
                }
                let Some(segment) = self.segments.get(&id) else {
                    return Err("a segment is read that is not on the disk".into());
                };
                into.extend(segment);
                if into.len() != length {
                    return Err(format!("{length} bytes are requested, of {}", into.len()));
                }
                relay.handle_read(id, Some(into).filter(|_| is_well));
                Served::Read
            }
            DiskRequest::Delete(id) => {
                if self.segments.remove(&id).is_none() {
                    return Err("a segment is deleted twice".into());
                }
                Served::Delete
            }
        }))
    }

    /// Bytes of all stored segments.
    pub fn bytes(&self) -> u64 {
        self.segments.values().map(|segment| segment.len() as u64).sum()
    }

    /// Whether no segment is stored.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}
