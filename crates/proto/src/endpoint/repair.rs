//! What one channel does about losses and corrupt bytes: control frames of the peer, and requests
//! for retransmission.
//!
//! What enters: control frames, and payload whose checksum does not match. What leaves: bytes
//! marked for retransmission, and control frames that wait to be sent.
//!
//! What may never happen: more than [`CORRUPT_RANGES_MAX`] ranges wait for retransmission; a
//! control frame changes bytes that were never sent.

use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::driver_interface::{Action, Fault, Memory};
use crate::channel::PathId;
use crate::wire::frame::{Header, Kind, flag};
use crate::wire::kind_header::KindHeader;

/// The most corrupt ranges that may wait for retransmission. A path that corrupts more would
/// deliver little.
const CORRUPT_RANGES_MAX: usize = 64;

impl<M: Memory> ChannelMut<'_, M> {
    /// Processes a control frame.
    pub(super) fn handle_control(
        &mut self,
        path: PathId,
        header: &Header,
        head: &KindHeader,
    ) -> Result<(), Fault> {
        let (channel, now) = (&mut *self.channel, self.schedule.now());
        let sent = channel.out.next();
        let is_sane = |start: u64, end: u64| start < end && end <= sent;
        match *head {
            KindHeader::AddressAdvertisement(address) => {
                let peer = channel.entry.peer;
                self.actions.push(Action::AddressAdvertisement { peer, address });
                return Ok(());
            }
            // An older status request may arrive later, by a slower path.
            KindHeader::StatusRequest { number } => {
                // The answer takes the path of the request: a peer measures paths of datagrams by
                // the answer, and with several paths the answer shows that the path works.
                channel.repairs.owe_sack(number, Some(path));
                // The peer may not have received the reports of corrupt ranges either.
                channel.repairs.repeat_corrupt();
            }
            KindHeader::Sack { ranges } | KindHeader::StatusReply { ranges, .. } => {
                for (start, bytes) in ranges {
                    let end = start.saturating_add(bytes as u64);
                    let Channel { out, paths, .. } = &mut *channel;
                    if is_sane(start, end) {
                        out.handle_arrived(start, end, |frame| {
                            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                                state.handle_acknowledged(now, frame);
                            }
                        });
                    }
                }
                if let KindHeader::StatusReply { number, .. } = *head {
                    channel.handle_status_reply(now, number);
                }
                self.process_flow_acks();
            }
            KindHeader::Nack { start, end } if is_sane(start, end) => {
                let Channel { out, paths, .. } = &mut *channel;
                out.handle_corrupt(start, end, |frame| {
                    if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                        state.handle_lost(frame);
                    }
                });
            }
            KindHeader::Empty if header.kind == Kind::Ack => {
                if header.flags & flag::WANT_ACK != 0 {
                    // The request for an acknowledgement may have overtaken the bytes that it is
                    // about.
                    channel.owed_ack.wanted_at = channel.owed_ack.wanted_at.max(header.sequence);
                    channel.owed_ack.is_wanted |= channel.into.delivered() >= header.sequence;
                }
                self.schedule_ack();
                return Ok(());
            }
            KindHeader::Empty => {
                return Err(Fault("a frame that endpoints do not send each other"));
            }
            _ => return Err(Fault("a control frame about bytes that were never sent")),
        }
        self.mark_busy();
        Ok(())
    }

    /// Records that the payload that was arriving by `path` is corrupt, and requests its
    /// retransmission. Returns false if too many ranges are corrupt: the driver should close the
    /// path.
    pub fn handle_corrupt(&mut self, path: PathId) -> bool {
        let channel = &mut *self.channel;
        let mut range = None;
        if let Some(place) =
            channel.arrivals.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        {
            let out_of_order = channel.arrivals.out_of_order.swap_remove(place);
            range = Some((out_of_order.start, out_of_order.end));
        } else if let Some(arriving) = &mut channel.arrivals.current
            && arriving.path == Some(path)
        {
            arriving.path = None;
            range = Some((arriving.frame.start, arriving.frame.start + arriving.frame.whole));
        }
        range.is_none_or(|(start, end)| self.request_retransmission(start, end))
    }

    /// Records that a frame has arrived whose header is intact and whose payload is corrupt, and
    /// requests its retransmission. The driver has not passed the frame to
    /// [`Endpoint::handle_frame`](super::Endpoint::handle_frame). Returns false if too many ranges
    /// are corrupt: the driver should close the path.
    pub fn handle_corrupt_frame(&mut self, header: &Header) -> bool {
        let head_size = KindHeader::size(header.kind, header.flags);
        let numbered_head = if header.kind == Kind::Fragment { 0 } else { head_size as u64 };
        match header.payload(head_size) {
            Ok((payload, _)) if header.kind.is_numbered() => {
                let end = header.sequence.saturating_add(numbered_head + payload);
                self.request_retransmission(header.sequence, end)
            }
            _ => true,
        }
    }

    /// Requests the retransmission of bytes `start..end`. If [`CORRUPT_RANGES_MAX`] ranges wait
    /// already, the last of them is extended to include these bytes.
    #[cold]
    pub(super) fn must_request_retransmission(&mut self, start: u64, end: u64) {
        if self.request_retransmission(start, end) {
            return;
        }
        if let Some(last) = self.channel.repairs.corrupt.last_mut() {
            *last = (last.0.min(start), last.1.max(end), false);
        }
        self.mark_busy();
    }

    fn request_retransmission(&mut self, start: u64, end: u64) -> bool {
        let Channel { repairs, into, .. } = &mut *self.channel;
        let corrupt = &mut repairs.corrupt;
        corrupt.retain(|&(start, end, _)| !into.has(&(start..end)));
        if into.has(&(start..end)) {
            return true;
        }
        // A range that is corrupt once more takes its own place.
        corrupt.retain(|&(other, _, _)| other != start);
        if corrupt.len() >= CORRUPT_RANGES_MAX {
            return false;
        }
        corrupt.push((start, end, false));
        self.mark_busy();
        true
    }
}
