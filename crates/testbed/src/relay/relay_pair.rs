//! Two relays, their ranks, and the streams between them.
//!
//! What enters: bytes that a rank has sent ([`FarEnd::input`]), and events of links. What leaves:
//! bytes that a relay has written to a rank ([`FarEnd::output`]); bytes for the other relay enter
//! that relay. What may never happen: a relay reads on a link that it has paused.

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{Relay, Stop};
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::hello::LogPosition;

use super::write;

/// Two relays: see the module head. A *side* is 0 or 1. The *ports* of a side are its ranks and
/// then its streams, which have the same ports on both sides.
pub struct RelayPair {
    /// The relays of clusters 0 and 1.
    pub relays: [Relay; 2],
    /// The far ends of the ports of each side.
    pub ends: [Vec<FarEnd>; 2],
    ranks: usize,
}

/// The far end of a link.
#[derive(Clone, Debug, Default)]
pub struct FarEnd {
    /// `None`: no link is connected.
    pub link: Option<LinkId>,
    /// Bytes that the far end has sent and the relay has not handled.
    pub input: Vec<u8>,
    /// The relay handles no input until it resumes the link.
    pub is_paused: bool,
    /// Bytes that the relay has written to a rank and the rank has not read.
    pub output: Vec<u8>,
    /// Bytes at most that the relay has written and the far end has not read.
    pub capacity: usize,
    /// The last write ended because the far end was full.
    pub is_full: bool,
    /// The relay writes nothing to the far end.
    pub is_stalled: bool,
}

impl FarEnd {
    /// Whether a link is connected, and the relay has not paused it.
    pub fn may_be_read(&self) -> bool {
        self.link.is_some() && !self.is_paused
    }
}

impl RelayPair {
    /// Two relays of clusters of `ranks` ranks each, with up to `streams` streams. Nothing is
    /// connected.
    pub fn new(relays: [Relay; 2], ranks: usize, streams: usize) -> Self {
        let ends = vec![FarEnd::default(); ranks + streams];
        Self { relays, ends: [ends.clone(), ends], ranks }
    }

    /// Number of ports of each side.
    pub fn ports(&self) -> usize {
        self.ends[0].len()
    }

    fn port_of(&self, side: usize, link: LinkId) -> Option<usize> {
        self.ends[side].iter().position(|end| end.link == Some(link))
    }

    // ---- links -------------------------------------------------------------------------

    /// Attaches a rank at this position of its log.
    ///
    /// # Errors
    /// As [`Relay::attach_at`].
    pub fn attach(
        &mut self,
        (side, port): (usize, usize),
        address: Address,
        incarnation: u32,
        position: LogPosition,
    ) -> Result<(), &'static str> {
        let link = self.relays[side].attach_at(address, incarnation, position)?;
        self.ends[side][port].link = Some(link);
        self.flush(side, &[]);
        Ok(())
    }

    /// Breaks the link of a rank. Bytes that the relay or the rank has not read are lost.
    pub fn suspend(&mut self, (side, port): (usize, usize)) {
        let Some(link) = self.clear(side, port) else { return };
        self.relays[side].suspend(link);
        self.flush(side, &[]);
    }

    /// Suspends a killed rank after the relay has handled the rest of its input. Returns why the
    /// relay stopped there.
    pub fn drain(&mut self, (side, port): (usize, usize)) -> Stop {
        let mut input = std::mem::take(&mut self.ends[side][port].input);
        let Some(link) = self.clear(side, port) else { return Stop::Partial };
        self.relays[side].begin_drain(link);
        let stop = self.relays[side].handle_input(link, &mut input).stop;
        self.flush(side, &input);
        self.relays[side].suspend(link);
        stop
    }

    /// Connects the relays by the stream of this port.
    ///
    /// # Errors
    /// As [`Relay::connect`].
    pub fn connect(&mut self, port: usize) -> Result<(), &'static str> {
        for (side, relay) in self.relays.iter_mut().enumerate() {
            let peer = relay.peer(ClusterId(1 - side as u16)).ok_or("there is no other relay")?;
            self.ends[side][port].link = Some(relay.connect(peer, 1)?.stream);
        }
        self.flush_both();
        Ok(())
    }

    /// Breaks the stream of this port, with all frames in flight.
    pub fn disconnect(&mut self, port: usize) {
        for side in 0..2 {
            if let Some(stream) = self.clear(side, port) {
                self.relays[side].disconnect(stream);
            }
        }
        self.flush_both();
    }

    /// Drops all bytes in flight on a link, which ends.
    fn clear(&mut self, side: usize, port: usize) -> Option<LinkId> {
        let end = &mut self.ends[side][port];
        let link = end.link.take()?;
        end.input.clear();
        end.output.clear();
        end.is_paused = false;
        Some(link)
    }

    /// Sets the time of both relays.
    pub fn handle_time(&mut self, millis: u64) {
        self.relays.iter_mut().for_each(|relay| relay.handle_time(millis));
    }

    // ---- turns of a driver -------------------------------------------------------------

    /// Lets a relay handle up to `most` bytes of a port's input, unless the link is paused. Returns
    /// the handled bytes, and why the relay stopped there; `None` if no link is connected.
    pub fn read(&mut self, side: usize, port: usize, most: usize) -> Option<(Vec<u8>, Stop)> {
        let end = &mut self.ends[side][port];
        let link = end.link.filter(|_| end.may_be_read())?;
        let mut bytes = std::mem::take(&mut end.input);
        let most = most.min(bytes.len());
        let consumed = self.relays[side].handle_input(link, &mut bytes[..most]);
        self.flush(side, &bytes);
        let end = &mut self.ends[side][port];
        end.input = bytes.split_off(consumed.bytes);
        end.is_paused = consumed.stop == Stop::Full;
        Some((bytes, consumed.stop))
    }

    /// The next port whose input may resume.
    pub fn poll_resume(&mut self, side: usize) -> Option<usize> {
        let port = loop {
            let link = self.relays[side].poll_resume()?;
            if let Some(port) = self.port_of(side, link) {
                break port;
            }
        };
        self.ends[side][port].is_paused = false;
        Some(port)
    }

    /// Drains a relay after an input whose buffer was `buffer`.
    pub fn flush(&mut self, side: usize, buffer: &[u8]) {
        let Self { relays, ends, ranks } = self;
        super::flush(&mut relays[side], buffer, |relay, link| {
            if let Some(port) = ends[side].iter().position(|end| end.link == Some(link)) {
                write_to(relay, ends, (side, port), port < *ranks, buffer);
            }
        });
    }

    fn flush_both(&mut self) {
        (0..2).for_each(|side| self.flush(side, &[]));
    }

    /// Writes what waits for a port, as far as its far end has capacity.
    pub fn write(&mut self, side: usize, port: usize) {
        let is_rank = port < self.ranks;
        write_to(&mut self.relays[side], &mut self.ends, (side, port), is_rank, &[]);
    }

    /// Writes at most `more` bytes to a port, of which at most `capacity` may wait at its far end.
    pub fn write_part(&mut self, side: usize, port: usize, more: usize, capacity: usize) {
        let far = if port < self.ranks {
            &self.ends[side][port].output
        } else {
            &self.ends[1 - side][port].input
        };
        self.ends[side][port].capacity = capacity.min(far.len() + more);
        self.write(side, port);
    }

    /// Whether no byte is under way, and no relay holds any.
    pub fn is_idle(&self) -> bool {
        let mut ends = self.ends.iter().flatten();
        ends.all(|end| end.input.is_empty() && end.output.is_empty())
            && self.relays.iter().all(|relay| relay.queued_bytes() == 0)
    }
}

/// Writes what waits for a port: to its rank, or to the same port of the other side.
fn write_to(
    relay: &mut Relay,
    [zero, one]: &mut [Vec<FarEnd>; 2],
    (side, port): (usize, usize),
    is_rank: bool,
    buffer: &[u8],
) {
    let (own, far) = if side == 0 { (zero, one) } else { (one, zero) };
    let end = &mut own[port];
    let Some(link) = end.link.filter(|_| !end.is_stalled) else { return };
    let to = if is_rank { &mut end.output } else { &mut far[port].input };
    end.is_full = write(relay, link, buffer, to, end.capacity);
}
