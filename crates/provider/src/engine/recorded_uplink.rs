//! What a recorded process and its relay say to each other about recording and replay.
//!
//! What enters: determinants to be recorded, and log frames of the relay. What leaves: determinants
//! and entries of the nondeterminism record for the relay, the determinants that replay executes,
//! and the end of this process where recording cannot continue. [`RecordedUplink`] borrows the
//! state of recording and the link to the relay for one such exchange. With `recover_log=sender`
//! there is no relay: determinants are written beside the message logs of the node, and read there.
//!
//! What may never happen: a recorded process continues without its relay; a determinant reaches the
//! relay behind a frame that may depend on it.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::link::node_log::{NodeLogs, OtherFrame};
use landbridge_drive::link::recorded::RecordedLink;
use landbridge_drive::link::shm::ShmLink;
use landbridge_proto::id::{Address, EXIT_UNRECOVERABLE, EXIT_UPLINK_LOST};
use landbridge_proto::relay::Divergence;
use landbridge_proto::replay::Determinant;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};

use super::identity::Identity;
use super::local_endpoint::LocalEndpoint;
use super::recording::Recording;
use super::sent_nondeterminism::SentNondeterminism;
use crate::{host, interposer, log, threads};

/// Longest time that the relay may take to begin sending the log for replay.
pub const REPLAY_TIME_MAX: Duration = Duration::from_secs(30);

/// Longest time that a relay may take to read the last frames of this process.
const FINISH_TIME_MAX: Duration = Duration::from_secs(10);

/// Ends this process, of which a frame cannot go into its log.
#[cold]
pub fn end_at_logs(recording: &Option<Recording>, own: &LocalEndpoint, error: io::Error) -> ! {
    let other = error.get_ref().and_then(|inner| inner.downcast_ref::<OtherFrame>());
    let Some((other, recording)) = other.zip(recording.as_ref()) else {
        end_process(&error.to_string());
    };
    let (frame, incarnation) = (recording.standing(0).sent, own.introduction.incarnation);
    let what = recording.divergence(frame);
    match Divergence::between((own.address, incarnation, frame), &other.was, &other.is) {
        Some(both) => end_process(&format!("{what}: {both}")),
        None => end_process(&what),
    }
}

/// The link that carries frames to and from the relay.
pub enum RecordedCarrier<'a> {
    Ring(&'a mut ShmLink),
    Stream(&'a mut RecordedLink),
    /// The logs of this node, which need no relay.
    Logs(&'a mut NodeLogs),
}

impl RecordedCarrier<'_> {
    fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        match self {
            RecordedCarrier::Ring(ring) => ring.peek(),
            RecordedCarrier::Stream(stream) => stream.peek(),
            RecordedCarrier::Logs(_) => Ok(None),
        }
    }

    fn consume(&mut self) {
        match self {
            RecordedCarrier::Ring(ring) => ring.consume(),
            RecordedCarrier::Stream(stream) => stream.consume(),
            RecordedCarrier::Logs(_) => (),
        }
    }

    /// Whether the relay has not closed the connection. A stream always returns true: reading the
    /// stream reports its end.
    fn is_open(&mut self) -> bool {
        match self {
            RecordedCarrier::Ring(ring) => ring.drain_doorbell(),
            RecordedCarrier::Stream(_) | RecordedCarrier::Logs(_) => true,
        }
    }
}

/// The state of recording, and the link to the relay while there is one.
pub struct RecordedUplink<'a> {
    pub recording: &'a mut Recording,
    pub carrier: Option<RecordedCarrier<'a>>,
    /// The address of this endpoint.
    pub own: Address,
    pub identity: &'static Identity,
}

impl RecordedUplink<'_> {
    /// Receives from the relay how many determinants and sent frames of earlier incarnations the
    /// log holds.
    pub fn begin_replay(&mut self) -> io::Result<()> {
        if let Some(RecordedCarrier::Logs(logs)) = &self.carrier {
            let earlier = logs.earlier();
            self.recording.begin_from_logs(earlier.deliveries, earlier.sent);
            return Ok(());
        }
        let deadline = Instant::now() + REPLAY_TIME_MAX;
        let other = io::Error::other;
        const CLOSED: &str = "it has closed the connection at once; its log (--relay-log) says why";
        let mut nondeterminism_sent = None;
        let header = loop {
            match self.receive_determinant() {
                Ok(Some(header)) if header.kind == Kind::NondeterminismState => {
                    nondeterminism_sent = Some(SentNondeterminism::before(header.sequence));
                    continue;
                }
                Ok(Some(header)) => break header,
                Ok(None) => (),
                Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(other(CLOSED));
                }
                Err(error) => return Err(error),
            }
            if !self.is_open() {
                return Err(other(CLOSED));
            }
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "it does not say what was before",
                ));
            }
            std::thread::yield_now();
        };
        if header.kind != Kind::ReplayStart {
            let why = "it does not begin with how much there was before";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let is_local = matches!(self.carrier, Some(RecordedCarrier::Ring(_)));
        let local_count = if is_local { 0 } else { interposer::determinant_count() };
        self.recording.begin_from_relay(&header, nondeterminism_sent, local_count)
    }

    /// Reads the next frame of the log from the relay, if the frame has arrived.
    fn receive_determinant(&mut self) -> io::Result<Option<Header>> {
        let Some(carrier) = &mut self.carrier else { return Ok(None) };
        let Some(frame) = carrier.peek()? else { return Ok(None) };
        // The frame may have been corrupted on the network.
        let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let header = Header::parse(frame).map_err(|malformed| bad(malformed.0))?;
        let is_from_relay =
            header.kind == Kind::Determinant || !header.kind.may_come_from_endpoint();
        if !header.kind.is_about_log() || !is_from_relay {
            return Err(bad("the relay says something else than what was before"));
        }
        carrier.consume();
        Ok(Some(header))
    }

    fn is_open(&mut self) -> bool {
        self.carrier.as_mut().is_some_and(RecordedCarrier::is_open)
    }

    /// Waits until the determinant of the next poll is known.
    #[cold]
    pub fn await_determinant(&mut self) {
        if !self.recording.awaits_relay() {
            let number = self.recording.next_number();
            let determinant = match &mut self.carrier {
                Some(RecordedCarrier::Logs(logs)) => {
                    logs.next_delivery().unwrap_or_else(|error| end_process(&error.to_string()))
                }
                _ => interposer::determinant(number),
            };
            // It existed when this incarnation began, and replay records none here.
            let Some([polls, frames, micros]) = determinant else {
                end_process("its record ends before the polls that it counts")
            };
            let frames = frames as u32;
            return self.recording.take_local_determinant(Determinant { polls, frames, micros });
        }
        let header = loop {
            match self.receive_determinant() {
                Ok(Some(header)) if header.kind == Kind::Divergence => {
                    self.end_diverged(header.delivered)
                }
                Ok(Some(header)) if header.kind == Kind::Determinant => break header,
                Ok(Some(_)) => self.end_relay_lost("the relay begins the replay again"),
                Ok(None) => self.wait_for_relay(),
                Err(error) => self.end_relay_lost(&error.to_string()),
            }
        };
        match Determinant::of(&header) {
            Ok(determinant) => self.recording.take_determinant(determinant),
            Err(bad) => self.end_relay_lost(bad.0),
        }
    }

    /// Yields while the relay has to act before this process can continue. Ends this process if the
    /// relay has closed the connection.
    pub fn wait_for_relay(&mut self) {
        if !self.is_open() {
            self.end_relay_lost("its relay has closed the connection");
        }
        std::thread::yield_now();
    }

    /// Records a poll that delivered frames or advanced the clock, and sends the determinant to the
    /// relay before any frame that may depend on the poll.
    pub fn record_determinant(&mut self, frames: u32, micros: u64) {
        if frames == 0 && micros == 0 {
            return;
        }
        let (number, determinant) = self.recording.note_determinant(frames, micros);
        if let Some(RecordedCarrier::Logs(logs)) = &mut self.carrier {
            return logs.note_delivery(determinant.polls, micros);
        }
        if let Some(RecordedCarrier::Stream(_)) = self.carrier {
            interposer::note_determinant(number, [determinant.polls, frames.into(), micros]);
        }
        self.send_determinant(determinant);
    }

    pub fn send_determinant(&mut self, determinant: Determinant) {
        let header = Header {
            length: 0,
            kind: Kind::Determinant,
            flags: 0,
            hops: 0,
            source: self.own,
            target: Address::ANONYMOUS,
            sequence: determinant.polls,
            delivered: determinant.micros,
            credit: determinant.frames,
        };
        let mut bytes = [0; HEADER_BYTES];
        header.emit(&mut bytes);
        loop {
            match self.send(&bytes) {
                Ok(true) => return,
                Ok(false) => self.wait_for_relay(),
                Err(error) => self.end_relay_lost(&error.to_string()),
            }
        }
    }

    /// Sends `bytes` to the relay, behind new entries of the nondeterminism record. Returns false
    /// if the ring is full.
    fn send(&mut self, bytes: &[u8]) -> io::Result<bool> {
        match &mut self.carrier {
            Some(RecordedCarrier::Ring(ring)) => Ok(ring.send(bytes, &[])),
            Some(RecordedCarrier::Stream(stream)) => {
                self.recording.send_nondeterminism(self.own, stream)?;
                stream.send(bytes, &[]).map(|()| true)
            }
            Some(RecordedCarrier::Logs(_)) | None => Ok(true),
        }
    }

    /// Sends all new entries of the nondeterminism record to a relay on another node, so that the
    /// checkpoint can be restored on any node.
    pub fn send_nondeterminism(&mut self) {
        if let Some(RecordedCarrier::Stream(stream)) = &mut self.carrier
            && let Err(error) = self.recording.send_nondeterminism(self.own, stream)
        {
            self.end_relay_lost(&error.to_string());
        }
    }

    /// Waits until a relay on another node has read everything, before this process ends.
    pub fn finish(&mut self) {
        if let Err(error) = self.finish_stream(FINISH_TIME_MAX) {
            log!(Info, "the relay has not confirmed the end: {error}");
        }
    }

    /// Ends the stream to a relay on another node before a checkpoint, so that the relay knows the
    /// position of the restored process. A ring to a relay on this node loses nothing.
    pub fn finish_for_checkpoint(&mut self, time_max: Duration) {
        if let Err(error) = self.finish_stream(time_max) {
            self.end_relay_lost(&format!(
                "its relay has not confirmed what it was sent before an image: {error}"
            ));
        }
    }

    /// Ends the stream to a relay on another node, once the relay has read all of it. Ends this
    /// process if the relay reports that a frame differs from the frame of an earlier incarnation.
    ///
    /// # Errors
    /// The relay has not read everything in time, or the connection is lost.
    fn finish_stream(&mut self, time_max: Duration) -> io::Result<()> {
        let Some(RecordedCarrier::Stream(stream)) = &mut self.carrier else { return Ok(()) };
        let mut refused = None;
        let outcome = stream.finish(time_max, |frame| refused = refused.or(diverged_frame(frame)));
        match refused {
            Some(frame) => self.end_diverged(frame),
            None => outcome,
        }
    }

    /// Ends the process if the relay has closed the connection because a sent frame differs from
    /// the frame of an earlier incarnation. The relay's report is then the last frame on the
    /// connection.
    #[cold]
    pub fn end_if_refused(&mut self) {
        if let Some(RecordedCarrier::Ring(ring)) = &mut self.carrier
            && let Some(frame) = ring.close_code()
        {
            self.end_diverged(frame);
        }
        while let Some(carrier) = &mut self.carrier {
            let Ok(Some(frame)) = carrier.peek() else { return };
            let Ok(header) = Header::parse(frame) else { return };
            if header.kind == Kind::Divergence {
                self.end_diverged(header.delivered);
            }
            carrier.consume();
        }
    }

    /// Ends this process because the connection to the relay is lost. A relay on this node loses
    /// nothing unless the relay itself ends, so the job ends ([`end_process`]). A network breaks
    /// and recovers, so with a relay on another node the next incarnation continues from the
    /// relay's log.
    #[cold]
    pub fn end_relay_lost(&mut self, why: &str) -> ! {
        self.end_if_refused();
        let why = &self.recording.at_position(why);
        match self.identity.has_local_relay() {
            true => end_process(why),
            false => end_with(EXIT_UPLINK_LOST, &format!("this process has lost its relay: {why}")),
        }
    }

    #[cold]
    fn end_diverged(&self, frame: u64) -> ! {
        end_process(&self.recording.divergence(frame))
    }
}

/// Ends this process, and thereby the job. A recorded process cannot continue without recording:
/// its deliveries and sends would be missing in the log, and a restart might diverge.
#[cold]
pub fn end_process(why: &str) -> ! {
    end_with(EXIT_UNRECOVERABLE, &format!("this process cannot go on: {why}{}", threads::reason()))
}

#[cold]
fn end_with(code: i32, why: &str) -> ! {
    log!(Warn, "{why}");
    host::report_forced_exit();
    // SAFETY: ends the process at once; no code of the process runs afterwards.
    unsafe { libc::_exit(code) }
}

/// The number of the frame that differs from the frame of an earlier incarnation, if `frame`
/// reports one.
fn diverged_frame(frame: &[u8]) -> Option<u64> {
    let header = Header::parse(frame).ok()?;
    (header.kind == Kind::Divergence).then_some(header.delivered)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::wire::frame::{HEADER_BYTES, Kind};

    use super::*;

    #[test]
    fn a_refusal_is_distinguished_from_other_frames() {
        let (source, target) = (Address::new(0, 0), Address::new(0, 1));
        let header = |kind, sequence| Header {
            length: 0,
            kind,
            flags: 0,
            hops: 0,
            source,
            target,
            sequence,
            delivered: 9,
            credit: 0,
        };
        let said = |kind, sequence| {
            let mut bytes = [0; HEADER_BYTES];
            header(kind, sequence).emit(&mut bytes);
            diverged_frame(&bytes)
        };
        assert_eq!(said(Kind::Divergence, 0), Some(9));
        assert_eq!(
            [
                said(Kind::Determinant, 0),
                said(Kind::Determinant, 1),
                said(Kind::Data, 0),
                diverged_frame(&[7; 9])
            ],
            [None; 4]
        );
    }
}
