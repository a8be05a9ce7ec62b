//! The driver's commands that concern one channel and no operation of this endpoint.
//!
//! What enters: settings of the channel, and requests to the peer. What leaves: a Goodbye in the
//! channel's queue, and acknowledgements that are owed. What may never happen: the peer gets
//! two Goodbyes.

use super::channel_mut::ChannelMut;
use super::driver_interface::Memory;
use super::operation::Item;
use super::path_state::PathProperties;
use crate::channel::PathId;
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::KindHeader;

impl<M: Memory> ChannelMut<'_, M> {
    /// Sets how many eager bytes the peer accepts from this endpoint, which may differ from what
    /// this endpoint accepts. The driver must call this before it sends anything to the peer; later
    /// it has no effect.
    pub fn set_eager_window(&mut self, bytes: u32) {
        self.channel.credit.set_window(bytes);
    }

    /// Sets whether payload to the peer that may have to be retransmitted may be copied. If not,
    /// the payload stays with the application until the peer has it, and only then is its operation
    /// done. (The answers to remote reads are copied in any case, because no operation holds their
    /// memory.) The driver must call this function before
    /// [`Endpoint::poll_transmit`](super::Endpoint::poll_transmit) and
    /// [`Endpoint::inject`](super::Endpoint::inject).
    #[inline]
    pub fn set_copying(&mut self, may_copy: bool) {
        self.channel.may_copy = may_copy;
    }

    /// Records that the peer has broken the protocol: its Goodbye counts for nothing, and its
    /// operations fail with it. The driver must call this function before
    /// [`Endpoint::fail`](super::Endpoint::fail).
    pub fn revoke_goodbye(&mut self) {
        self.channel.end.has_left = false;
    }

    /// Asks the peer to acknowledge what the retransmit buffer holds, once for each byte. The
    /// driver calls this function when memory is short and no other frame may ever ask for an
    /// acknowledgement.
    pub fn solicit_ack(&mut self) {
        let channel = &mut *self.channel;
        let sent = channel.out.next();
        if channel.out.retained() > 0 && channel.acknowledgements.solicited_end < sent {
            (channel.acknowledgements.solicited_end, channel.acknowledgements.is_solicited) =
                (sent, true);
            self.mark_busy();
        }
    }

    /// Sends Goodbye to the peer: this endpoint delivers nothing new, and asks the peer to
    /// acknowledge everything. Operations that were started before are still sent behind the
    /// Goodbye. Only the first call has an effect.
    pub fn goodbye(&mut self) {
        let channel = &mut *self.channel;
        let is_new = !core::mem::replace(&mut channel.end.has_said_goodbye, true);
        if is_new && channel.end.failed.is_none() {
            self.enqueue(Item::Control(Kind::Goodbye, flag::WANT_ACK, KindHeader::Empty));
        }
    }

    /// Records that the driver has passed in all that one receiving call has brought from the peer
    /// by `path`. The frames are acknowledged now if they fill two datagrams or leave a gap, and
    /// otherwise at most `ACK_DELAY_NANOS_MAX` later.
    pub fn end_batch(&mut self, path: PathId) {
        let now = self.schedule.now();
        let channel = &mut *self.channel;
        let full = match channel.paths.path_state(path).map(|state| state.path) {
            Some(PathProperties { datagram: Some(_), payload_max, .. }) => 2 * payload_max as u64,
            Some(_) => return,
            // Only the peer sends by this path, and the driver sets no time on account of the path,
            // so the acknowledgement must not wait.
            None => 0,
        };
        let unacknowledged = channel.into.delivered().saturating_sub(channel.owed_ack.acknowledged);
        if channel.end.failed.is_some() || unacknowledged == 0 {
            return;
        }
        if channel.into.has_out_of_order() {
            channel.repairs.owe_sack(0, None);
            self.mark_busy();
        } else if unacknowledged >= full {
            channel.owed_ack.is_wanted = true;
            self.schedule_ack();
        } else if channel.timers.delay_ack(now) {
            self.arm();
        }
    }
}
