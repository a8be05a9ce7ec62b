//! The ports of a relay, by link number.
//!
//! What enters: links that open and close, and the events of their lives. What leaves: the port of
//! a link, and what a driver may ask about a link. What may never happen: a closed link has a port;
//! the count of disconnected ports, by which the driver decides whether time matters, is wrong.

use alloc::vec::Vec;

use super::port::{Port, PortKind};
use super::port_state::{PortEvent, PortState};
use crate::route::routing_table::LinkId;

/// The ports of a relay: see the module head.
#[derive(Debug, Default)]
pub struct Ports {
    all: Vec<Option<Port>>,
    free: Vec<LinkId>,
    /// Number of disconnected ports.
    disconnected: usize,
    /// Number of streams to peer relays.
    streams: usize,
}

impl Ports {
    pub(super) fn open(&mut self, kind: PortKind, state: PortState) -> LinkId {
        let port = Port::new(kind, state);
        self.disconnected += usize::from(state.is_disconnected());
        self.streams += usize::from(matches!(kind, PortKind::Stream { .. }));
        if let Some(link) = self.free.pop() {
            self.all[link.0 as usize] = Some(port);
            return link;
        }
        self.all.push(Some(port));
        LinkId(self.all.len() as u32 - 1)
    }

    /// Closes a link, whose number another link may use next.
    pub(super) fn close(&mut self, link: LinkId) -> Option<Port> {
        let port = self.all[link.0 as usize].take()?;
        self.disconnected -= usize::from(port.state().is_disconnected());
        self.streams -= usize::from(matches!(port.kind, PortKind::Stream { .. }));
        self.free.push(link);
        Some(port)
    }

    #[inline]
    pub(super) fn get(&self, link: LinkId) -> &Port {
        // A driver that names a closed link has lost track of its links.
        self.find(link).expect("the link is open")
    }

    #[inline]
    pub(super) fn get_mut(&mut self, link: LinkId) -> &mut Port {
        // As in `get`: a driver that names a closed link has lost track of its links.
        self.find_mut(link).expect("the link is open")
    }

    /// The port of a link that may have been closed.
    #[inline]
    pub(super) fn find(&self, link: LinkId) -> Option<&Port> {
        self.all.get(link.0 as usize)?.as_ref()
    }

    /// The port of a link that may have been closed.
    #[inline]
    pub(super) fn find_mut(&mut self, link: LinkId) -> Option<&mut Port> {
        self.all.get_mut(link.0 as usize)?.as_mut()
    }

    /// Every link number that was ever used, of open and closed links.
    pub(super) fn numbers(&self) -> impl Iterator<Item = LinkId> + use<> {
        (0..self.all.len() as u32).map(LinkId)
    }

    pub(super) fn handle_event(&mut self, link: LinkId, event: PortEvent) {
        let port = self.get_mut(link);
        let before = port.state().is_disconnected();
        port.handle_event(event);
        let after = port.state().is_disconnected();
        self.disconnected -= usize::from(before);
        self.disconnected += usize::from(after);
    }

    /// The port whose frames `link` writes. A retired stream writes only the rest of its own frame.
    #[inline]
    pub(super) fn output_of(&self, link: LinkId) -> LinkId {
        let port = self.get(link);
        match port.kind {
            PortKind::Stream { peer, .. } if port.state() != PortState::Retired => peer,
            _ => link,
        }
    }

    // ---- questions of the driver ---------------------------------------------------------

    /// Whether frames wait whose time limit must be checked: call [`super::Relay::handle_time`]
    /// once a second.
    pub fn needs_time(&self) -> bool {
        self.disconnected > 0
    }

    /// Whether there are streams to peer relays, which send keepalives regularly.
    pub fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// Whether the output is connected, so that it may write.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.find(link).is_some_and(Port::is_up)
    }

    /// Number of links that write the frames waiting for `link`: the number of streams for the port
    /// of a peer relay, and 1 for any other link.
    pub fn writer_count(&self, link: LinkId) -> usize {
        let port = self.get(link);
        match port.kind {
            PortKind::Peer(_) => port.streams.links().len(),
            _ => 1,
        }
    }

    /// The links that write the frames waiting for `link`, by `number` from 0. The streams of a
    /// peer relay take turns in being the first.
    pub fn writer(&self, link: LinkId, number: usize) -> Option<LinkId> {
        let port = self.get(link);
        match port.kind {
            PortKind::Peer(_) => port.streams.writer(number),
            _ => Some(link),
        }
    }

    /// Links of the streams to the peer relay of `link`.
    pub fn streams(&self, link: LinkId) -> &[LinkId] {
        self.get(link).streams.links()
    }

    /// Incarnation of the peer relay that the streams of `link` lead to, if a stream was ever
    /// connected.
    pub fn peer_incarnation(&self, link: LinkId) -> Option<u32> {
        self.get(link).incarnation
    }

    /// Whether an endpoint whose link has ended may attach again: it has sent no Goodbye.
    pub fn may_reconnect(&self, link: LinkId) -> bool {
        !self.get(link).has_said_goodbye
    }

    /// Whether the peer relay has acknowledged everything that was written to `stream`.
    pub fn is_acknowledged(&self, stream: LinkId) -> bool {
        let writer = &self.get(stream).writer;
        writer.rest.is_empty() && writer.recent_channels.unacknowledged_bytes() == 0
    }

    /// The number of the diverged frame of the endpoint at `link`, if a divergence ended its input.
    /// The relay reports this number to the endpoint as well, but the link may have no capacity for
    /// the report.
    pub fn diverged_frame(&self, link: LinkId) -> Option<u64> {
        self.get(link).diverged_frame
    }
}
