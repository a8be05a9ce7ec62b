//! The channels to all peers, and the schedule that says which of them has something to do.
//!
//! What enters: addresses of peers, and the time. What leaves: numbers of peers, and channels. What
//! may never happen: a peer gets another number, or two channels lead to one address.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use super::action_queue::ActionQueue;
use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::driver_interface::{Memory, Peer};
use super::schedule::PeerSchedule;
use crate::id::Address;

/// The channels of one endpoint, by number of the peer.
pub(super) struct ChannelTable<M> {
    channels: Vec<Channel<M>>,
    by_address: BTreeMap<Address, Peer>,
    pub schedule: PeerSchedule,
}

impl<M> Index<Peer> for ChannelTable<M> {
    type Output = Channel<M>;

    #[inline]
    fn index(&self, peer: Peer) -> &Channel<M> {
        &self.channels[peer.0 as usize]
    }
}

impl<M> IndexMut<Peer> for ChannelTable<M> {
    #[inline]
    fn index_mut(&mut self, peer: Peer) -> &mut Channel<M> {
        &mut self.channels[peer.0 as usize]
    }
}

impl<M: Memory> ChannelTable<M> {
    pub fn new() -> Self {
        Self { channels: Vec::new(), by_address: BTreeMap::new(), schedule: PeerSchedule::new() }
    }

    pub fn len(&self) -> usize {
        self.channels.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Channel<M>> {
        self.channels.iter()
    }

    /// Whether there is a channel to `address`.
    pub fn has(&self, address: Address) -> bool {
        self.by_address.contains_key(&address)
    }

    /// The number of the peer at `address`, with a new channel of `eager_window` bytes if there is
    /// none. Each call for an anonymous peer creates a channel.
    pub fn peer(&mut self, address: Address, eager_window: u32) -> Peer {
        if let Some(&peer) = self.by_address.get(&address) {
            return peer;
        }
        let peer = Peer(self.channels.len() as u32);
        self.channels.push(Channel::new(peer, address, eager_window));
        if address != Address::ANONYMOUS {
            self.by_address.insert(address, peer);
        }
        peer
    }

    /// The channel to `peer`, with the queues in which its changes appear.
    #[inline]
    pub fn on<'a>(&'a mut self, peer: Peer, actions: &'a mut ActionQueue<M>) -> ChannelMut<'a, M> {
        let channel = &mut self.channels[peer.0 as usize];
        ChannelMut { channel, schedule: &mut self.schedule, actions }
    }

    /// The next peer with frames to send.
    #[inline]
    pub fn next_busy(&mut self) -> Option<Peer> {
        let peer = self.schedule.next_busy()?;
        self[peer].entry.handle_taken();
        Some(peer)
    }

    /// Schedules the acknowledgements that waited for an answer of the application.
    #[inline]
    pub fn flush_deferred_acks(&mut self) {
        while let Some(peer) = self.schedule.next_deferred() {
            let channel = &mut self.channels[peer.0 as usize];
            if channel.owed_ack.is_wanted && channel.end.failed.is_none() {
                channel.owed_ack.piggybacked = 0;
                self.schedule.mark_busy(&mut channel.entry);
            }
        }
    }

    /// Does what is due on every channel whose time has come.
    #[cold]
    pub fn handle_wakes(&mut self) {
        let now = self.schedule.now();
        for peer in self.schedule.take_due() {
            let channel = &mut self.channels[peer.0 as usize];
            channel.entry.handle_wake();
            if channel.end.failed.is_some() || !channel.paths.has_senders() {
                continue;
            }
            channel.handle_time(now);
            if let Some(due) = channel.due() {
                self.schedule.arm(&mut channel.entry, due);
            }
            // The channel's pacer may let more be sent.
            self.schedule.mark_busy(&mut channel.entry);
        }
    }
}
