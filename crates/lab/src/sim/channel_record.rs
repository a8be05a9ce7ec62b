//! What is known of one channel, from one simulated process to another: which bytes have left,
//! which have been delivered, and which credit is left. The world holds one record for each two
//! processes.
//!
//! What enters: frames as they leave and as their destinations become known. What leaves:
//! violations of the protocol. What may never happen: a sender leaves out numbers, sends more eager
//! bytes than its credit allows, or two frames have a place at the same time.

use std::collections::BTreeMap;

use landbridge_proto::endpoint::PayloadDestination;
use landbridge_proto::wire::frame::Kind;
use landbridge_proto::wire::kind_header::KindHeader;
use landbridge_testbed::endpoint::Frame;

use super::model::Model;
use super::node::Node;
use super::{EventCounts, Violation, require};

/// Position of a frame's first byte, and the message that the frame starts.
type PlacedFrame = (u64, Option<usize>);

/// The record of one channel: see the module head.
#[derive(Clone, Default)]
pub struct ChannelRecord {
    /// Eager bytes that the sender has sent, as counted from frames. `eager_returned` counts those
    /// whose credit the receiver has returned.
    pub eager_sent: u32,
    pub eager_returned: u32,
    /// Next sequence number. Frames with smaller numbers are retransmissions.
    next_sequence: u64,
    /// Position up to which all bytes have been delivered. `frame_end` is the end of the frame that
    /// is being delivered.
    pub delivered_up_to: u64,
    frame_end: u64,
    /// The frame whose destination is known but whose bytes have not arrived, with the message that
    /// the frame starts.
    placed_frame: Option<PlacedFrame>,
    /// Messages with announced bytes that have not arrived, by number, with the end position of
    /// these bytes.
    ahead: BTreeMap<u32, (usize, u64)>,
}

impl ChannelRecord {
    /// Counts the eager bytes of a frame that is sent for the first time, and the bytes that it
    /// announces.
    pub fn spend(
        &mut self,
        (from, to): (usize, usize),
        frame: &Frame,
        sender: &Node,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let header = &frame.header;
        if !header.kind.is_numbered() {
            return Ok(());
        }
        let may_be_cut_up = sender.paths[to].iter().any(|path| path.datagram.is_some());
        if header.kind == Kind::Fragment || header.sequence < self.next_sequence {
            counts.count("frames retransmitted");
            if header.kind == Kind::Fragment {
                counts.count("fragments");
            }
            return Ok(());
        }
        // A frame that is too long for a datagram is numbered before it leaves in fragments, and
        // later frames may leave before it.
        require!(
            header.sequence == self.next_sequence || may_be_cut_up,
            "{from} leaves numbers out towards {to}: {header:?}"
        );
        self.next_sequence = header.sequence + frame.head.len() as u64 + frame.size;
        if let KindHeader::Message { long, .. } = frame.kind_header() {
            let ahead = long.map_or(0, |long| long.ahead);
            if ahead > 0 {
                counts.count("messages sent ahead");
            }
            self.eager_sent = self.eager_sent.wrapping_add(frame.size as u32 + ahead);
            let under_way = self.eager_sent.wrapping_sub(self.eager_returned);
            let window = sender.config.eager_window;
            require!(under_way <= window, "{from} sends {under_way} eager bytes to {to}");
        }
        Ok(())
    }

    /// Accounts for credit that the receiver has returned to the sender.
    pub fn handle_credit(&mut self, credit: u32) {
        if credit.wrapping_sub(self.eager_returned) < 1 << 31 {
            self.eager_returned = credit;
        }
    }

    /// Position of the frame that has a place and whose bytes have not arrived.
    pub fn placed(&self) -> Option<u64> {
        self.placed_frame.map(|(first, _)| first)
    }

    /// Records that the destination of a frame is known. The destination may have been known
    /// before.
    pub fn begin_frame(
        &mut self,
        (from, to): (usize, usize),
        frame: &Frame,
        place: PayloadDestination,
        model: &mut Model,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let header = &frame.header;
        let is_first = header.sequence == self.delivered_up_to;
        if !header.kind.is_numbered() || header.kind == Kind::Fragment || !is_first {
            return Ok(());
        }
        if let Some((sequence, _)) = self.placed_frame {
            require!(header.sequence == sequence, "two frames of {from} have a place at {to}");
            counts.count("places found twice");
            return Ok(());
        }
        let message = self.begin_message((from, to), frame, place, model)?;
        self.placed_frame = Some((header.sequence, message));
        self.frame_end = header.sequence + frame.head.len() as u64 + frame.size;
        Ok(())
    }

    fn begin_message(
        &mut self,
        (from, to): (usize, usize),
        frame: &Frame,
        place: PayloadDestination,
        model: &mut Model,
    ) -> Result<Option<usize>, Violation> {
        let payload = frame.size;
        let long = match frame.kind_header() {
            KindHeader::Message { long, .. } => long,
            KindHeader::Ahead { send, offset } => return Ok(self.go_on(send, offset + payload)),
            _ => return Ok(None),
        };
        let (tagged, is_long) = (frame.kind() == Kind::Tagged, long.is_some());
        let ahead = long.map_or(0, |long| long.ahead as u64);
        let (message, is_wanted) = model.arrive(to, from, tagged, payload + ahead, is_long)?;
        let is_right = match place {
            PayloadDestination::Receive { .. } => is_wanted,
            PayloadDestination::NewUnexpected { .. } => !is_wanted,
            _ => false,
        };
        require!(is_right, "message {message} goes to {place:?}, wanted: {is_wanted}");
        if let Some(long) = long.filter(|long| long.ahead > 0) {
            self.ahead.insert(long.send, (message, payload + ahead));
            return Ok(None);
        }
        Ok(Some(message))
    }

    /// Records that an announced fragment of message `send`, up to `end`, has begun to arrive;
    /// returns the message if the fragment is the last.
    fn go_on(&mut self, send: u32, end: u64) -> Option<usize> {
        let &(message, whole) = self.ahead.get(&send)?;
        let is_last = end == whole;
        if is_last {
            self.ahead.remove(&send);
        }
        is_last.then_some(message)
    }

    /// Records that all bytes of the placed frame have arrived.
    pub fn finish_placed_frame(&mut self, model: &mut Model) {
        self.delivered_up_to = self.frame_end;
        if let Some((_, Some(message))) = self.placed_frame.take() {
            model.messages[message].is_delivered = true;
        }
    }

    /// Handles that the receiver has lost the sender; returns the messages that have begun to
    /// arrive.
    pub fn lose(&mut self) -> Vec<usize> {
        let opened = self.placed_frame.take().and_then(|(_, message)| message);
        let cut = std::mem::take(&mut self.ahead);
        opened.into_iter().chain(cut.values().map(|(message, _)| *message)).collect()
    }
}
