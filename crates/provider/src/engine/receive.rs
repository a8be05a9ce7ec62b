//! Incoming frames: the protocol gets a frame's header and kind header, and returns the destination
//! of the payload; the engine writes the payload there directly.

use std::io;

use landbridge_drive::checksum::Checksum;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{Fault, PayloadDestination, Peer, REASSEMBLED};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind as FrameKind};
use landbridge_proto::wire::kind_header::KindHeader;

use super::carrier::Carrier;
use super::connections::Connections;
use super::data_path::DataPath;
use super::integrity;
use super::links::{Link, RELAY_PATH};
use super::payload_placement::PayloadPlacement;
use crate::log;

/// Reads of one stream before other streams get their turn.
const READS_PER_TURN: usize = 8;
impl Connections {
    /// Receives what has arrived in the ring of link `id`; returns the number of frames.
    #[inline]
    pub(super) fn poll_ring(&mut self, id: usize) -> usize {
        let Some(link) = self.data.links[id].as_mut() else {
            return 0;
        };
        // The usual case is kept short: the ring is empty.
        let is_empty = match &mut link.carrier {
            Carrier::Shm(ring) => matches!(ring.peek(), Ok(None)),
            Carrier::Recorded(stream) => matches!(stream.peek(), Ok(None)),
            Carrier::Logs(logs) => matches!(logs.peek(), Ok(None)),
            _ => false,
        };
        if is_empty {
            return 0;
        }
        self.read_ring(id)
    }

    pub(super) fn read_ring(&mut self, id: usize) -> usize {
        let Some(mut link) = self.data.links[id].take() else {
            return 0;
        };
        let mut frames = 0;
        let mut bytes = 0;
        let outcome = self.data.read_frames(&mut link, &mut frames, &mut bytes);
        self.data.links[id] = Some(link);
        if let Some(replay) = &mut self.data.recording {
            replay.note_taken(bytes);
        }
        if !self.data.pending.is_empty() {
            self.handle_pending();
        }
        if let Err(error) = outcome {
            self.link_down(id, &error);
        }
        frames
    }

    /// Reads what has arrived on stream `id`; returns the number of reads that brought something.
    pub(super) fn read_stream(&mut self, id: usize) -> usize {
        let Some(mut link) = self.data.links.get_mut(id).and_then(Option::take) else {
            return 0;
        };
        let mut stage = std::mem::take(&mut self.data.buffers.stage);
        let mut reads = 0;
        let outcome = self.data.read_turn(&mut link, &mut stage, &mut reads);
        self.data.buffers.stage = stage;
        self.data.links[id] = Some(link);
        if !self.data.pending.is_empty() {
            self.handle_pending();
        }
        self.data.open_udp_paths();
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
            Err(error) => self.link_down(id, &error),
            Ok(()) => (),
        }
        reads
    }
}

impl DataPath {
    fn read_frames(
        &mut self,
        link: &mut Link,
        frames: &mut usize,
        bytes: &mut u64,
    ) -> io::Result<()> {
        let (peer, path, sum) = (link.peer, link.path, link.sum);
        while *frames < self.links.frames_per_turn {
            let frame = match &mut link.carrier {
                Carrier::Shm(ring) => ring.peek()?,
                Carrier::Recorded(stream) => stream.peek()?,
                Carrier::Logs(logs) => logs.peek()?,
                _ => None,
            };
            let Some(frame) = frame else { break };
            *bytes += frame.len() as u64;
            self.take_frame(peer, path, sum, frame)?;
            match &mut link.carrier {
                Carrier::Shm(ring) => ring.consume(),
                Carrier::Recorded(stream) => stream.consume(),
                Carrier::Logs(logs) => logs.consume(),
                _ => (),
            }
            *frames += 1;
        }
        Ok(())
    }

    /// Delivers a whole frame that has arrived by `path`.
    #[inline]
    pub(super) fn take_frame(
        &mut self,
        from: Option<Peer>,
        path: PathId,
        sum: Checksum,
        frame: &[u8],
    ) -> io::Result<()> {
        let header = integrity::parse(sum, frame)?;
        let body = frame
            .get(HEADER_BYTES..HEADER_BYTES + header.length as usize)
            .ok_or_else(|| fault("a frame is cut off"))?;
        let head_bytes = KindHeader::size(header.kind, header.flags);
        let (_, check) =
            header.payload(head_bytes).map_err(|bad| integrity::malformed(sum, bad))?;
        if sum != Checksum::Off && !matches!(header.kind, FrameKind::Unreachable | FrameKind::Lost)
        {
            integrity::verify_front(sum, &header, frame)?;
        }
        let Some(peer) = self.sender(from, &header)? else {
            return Ok(());
        };
        let payload = &body[head_bytes + check..];
        if check > 0
            && sum != Checksum::Off
            && sum.of(payload) != integrity::check_in(body, head_bytes)
        {
            return self.paths().note_corrupt(peer, path, &header);
        }
        let place = match self.core.handle_frame(peer, path, &header, body) {
            Ok(place) => place,
            Err(bad) => return self.handle_violation(from, peer, sum, bad),
        };
        match place {
            PayloadDestination::OutOfOrder { frame, whole, at } => {
                let head = &body[..head_bytes];
                self.buffers.keep_early(peer, (frame, whole, at), &header, head, payload);
            }
            _ => self.placement().put(peer, place, payload),
        }
        self.end_payload(peer, path);
        Ok(())
    }

    /// Handles a frame of `peer` that contradicts the protocol. On the uplink, the frame is
    /// discarded and only `peer` is given up: the other peers did nothing wrong. A link of one peer
    /// ends. So does the uplink if its frames have no checksums, since the source of the frame may
    /// have been changed on the way, and the uplink of a recorded process.
    ///
    /// # Errors
    /// The link must end.
    #[cold]
    fn handle_violation(
        &mut self,
        from: Option<Peer>,
        peer: Peer,
        sum: Checksum,
        bad: Fault,
    ) -> io::Result<()> {
        if from.is_some() || sum == Checksum::Off || self.recording.is_some() {
            return Err(fault(bad.0));
        }
        // A peer that was given up may not have noticed yet.
        if self.core.channel(peer).failed().is_none() {
            log!(Warn, "{}: {}", self.core.address(peer), bad.0);
            self.core.channel_mut(peer).revoke_goodbye();
            self.pending.fail(peer, libc::ECONNRESET);
        }
        Ok(())
    }

    /// Delivers early frames whose turn has come.
    #[cold]
    fn take_early(&mut self, peer: Peer) {
        while let Some(frame) = self.core.channel(peer).next_reassembled() {
            let Some(body) = self.buffers.early.remove(&(peer, frame)) else {
                return;
            };
            let (place, head) = match self.core.handle_reassembled(peer, &body) {
                Ok(taken) => taken,
                Err(bad) => {
                    log!(Warn, "{}: {}", self.core.address(peer), bad.0);
                    self.core.channel_mut(peer).revoke_goodbye();
                    return self.pending.fail(peer, libc::ECONNRESET);
                }
            };
            self.drain_actions();
            self.placement().put(peer, place, &body[head..]);
            self.core.handle_payload(peer, REASSEMBLED);
            self.drain_actions();
        }
    }

    /// What decides where an arriving payload belongs.
    #[inline(always)]
    fn placement(&mut self) -> PayloadPlacement<'_> {
        PayloadPlacement {
            core: &mut self.core,
            buffers: &mut self.buffers,
            application: &self.application,
        }
    }

    /// The sender of a frame; `None` if the frame needs no further treatment.
    #[inline(always)]
    fn sender(&mut self, from: Option<Peer>, header: &Header) -> io::Result<Option<Peer>> {
        if let Some(peer) = from {
            return Ok(Some(peer));
        }
        if header.target != self.own.address {
            return Err(fault("the relay delivers a frame for another process"));
        }
        if !header.kind.is_forwarded() {
            return Err(fault(match header.kind {
                FrameKind::Divergence => "the relay refuses what this process has sent",
                _ => "the relay sends a frame that only a replay or another relay receives",
            }));
        }
        if header.kind.reports_undeliverable() && !self.core.is_known(header.source) {
            // The target of a frame of this process was corrupted on the network before the relay.
            return Ok(None);
        }
        let peer = self.peers.addressed(&mut self.core, header.source);
        match header.kind {
            FrameKind::Unreachable => {
                self.pending.handle_unreachable(&self.core, &self.peers, peer)
            }
            FrameKind::Lost => self.core.channel_mut(peer).presume_path_lost(RELAY_PATH),
            _ => return Ok(Some(peer)),
        }
        Ok(None)
    }

    #[inline]
    fn end_payload(&mut self, peer: Peer, path: PathId) {
        self.core.handle_payload(peer, path);
        self.drain_actions();
        if self.core.channel(peer).next_reassembled().is_some() {
            self.take_early(peer);
        }
    }

    fn read_turn(
        &mut self,
        link: &mut Link,
        stage: &mut [u8],
        reads: &mut usize,
    ) -> io::Result<()> {
        while *reads < READS_PER_TURN {
            let Carrier::Stream(stream) = &mut link.carrier else {
                return Ok(());
            };
            let read = match stream.read(stage) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            *reads += 1;
            if self.datagrams.is_some() {
                link.last_received = Time(self.clock.nanos());
            }
            link.sum_arrived();
            if read.ended
                && let Some((peer, place)) = link.inside.take()
            {
                if place == PayloadDestination::Scratch {
                    std::mem::swap(&mut self.buffers.scratch, &mut link.scratch);
                }
                // The peer fails also if the payload is corrupt, which may end the link.
                if let Some(errno) = link.fail_after_payload.take() {
                    self.pending.fail(peer, errno);
                }
                if link.summing.take().is_none_or(|summing| summing.is_valid()) {
                    self.end_payload(peer, link.path);
                } else {
                    log!(Info, "{}: a payload arrived corrupt", self.core.address(peer));
                    self.peers[peer].count_corrupt(link.path);
                    if !self.core.channel_mut(peer).handle_corrupt(link.path) {
                        return Err(integrity::corrupt("too many payloads arrive corrupt"));
                    }
                }
            }
            self.take_staged(link, &stage[read.start..read.end])?;
            if read.drained {
                break;
            }
        }
        Ok(())
    }

    fn take_staged(&mut self, link: &mut Link, mut staged: &[u8]) -> io::Result<()> {
        while staged.len() >= HEADER_BYTES {
            let header = integrity::parse(link.sum, staged)?;
            let front = HEADER_BYTES + KindHeader::size(header.kind, header.flags);
            if staged.len() < front {
                break;
            }
            let whole = HEADER_BYTES + header.length as usize;
            if whole <= staged.len() {
                self.take_frame(link.peer, link.path, link.sum, &staged[..whole])?;
                staged = &staged[whole..];
                continue;
            }
            let head = &staged[HEADER_BYTES..front];
            let payload = header.payload(head.len());
            let (payload, check) = payload.map_err(|bad| integrity::malformed(link.sum, bad))?;
            if link.sum != Checksum::Off {
                integrity::verify_front(link.sum, &header, staged)?;
            }
            if staged.len() < front + check {
                break;
            }
            let Some(peer) = self.sender(link.peer, &header)? else {
                return Err(fault("a control frame with a payload"));
            };
            let place = match self.core.handle_frame(peer, link.path, &header, head) {
                Ok(place) => place,
                Err(bad) => {
                    self.handle_violation(link.peer, peer, link.sum, bad)?;
                    PayloadDestination::Discard
                }
            };
            self.drain_actions();
            let payload = payload as usize;
            let (mut target, mut skip) =
                self.placement().target(link, peer, place, (&header, head), payload);
            if check > 0 && link.sum != Checksum::Off && payload > skip {
                let expected = integrity::check_in(&staged[HEADER_BYTES..], head.len());
                link.begin_sum(expected, &mut target.pieces, &mut skip);
            }
            let front = front + check;
            if let Carrier::Stream(stream) = &mut link.carrier {
                // SAFETY: the protocol keeps the destination until the payload is complete or the
                // link is dropped.
                unsafe { stream.begin(target.as_slice(), skip, &staged[front..]) };
            }
            link.sum_arrived();
            link.inside = Some((peer, place));
            return Ok(());
        }
        if let Carrier::Stream(stream) = &mut link.carrier {
            stream.keep(staged);
        }
        Ok(())
    }
}

fn fault(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
