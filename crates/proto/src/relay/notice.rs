//! What sources of frames are told when these do not arrive.

use super::*;
use crate::wire::frame::seal;
use record::Class;

impl Relay {
    /// Notes what has been lost on the way to the other side of `link`. Its sources hear when that is
    /// back ([`Relay::tell_losses`]), or given up ([`Relay::give_up_queue`]).
    pub(super) fn lose(&mut self, link: LinkId, entries: BTreeSet<Entry>) {
        let port = self.port_mut(link);
        let missed = entries.into_iter().filter(|entry| !port.lose(*entry)).count();
        self.counters.notices_dropped += missed as u64;
    }

    /// Frames pass again: the sources of those that were lost are to ask what has arrived, and notices
    /// that were lost go out once more.
    pub(super) fn tell_losses(&mut self, link: LinkId) {
        for (source, target) in core::mem::take(&mut self.port_mut(link).lost) {
            self.notify(source, target, Kind::Lost);
        }
        self.note_owing(link);
    }

    /// Everything that waits for `link`, or was lost there, becomes unreachable.
    pub(super) fn give_up_queue(&mut self, link: LinkId) {
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        for (source, target) in port.discard(pool) {
            self.notify(source, target, Kind::Unreachable);
        }
    }

    /// Tells the source of a frame that its target cannot be reached.
    pub(super) fn turn_back(&mut self, header: &Header) {
        // Nobody is told about what relays say.
        if Class::of(header.kind) == Class::Frame {
            self.notify(header.source, header.target, Kind::Unreachable);
        }
    }

    fn notify(&mut self, source: Address, target: Address, kind: Kind) {
        match kind {
            Kind::Lost => self.counters.lost += 1,
            _ => self.counters.unreachable += 1,
        }
        self.notices.insert((source, target), kind);
    }

    /// Puts notices that are due into the queues of their outputs, as far as these have room.
    pub(super) fn queue_notices(&mut self) {
        for ((to, about), kind) in core::mem::take(&mut self.notices) {
            let Route::Link(link) = self.table.route(to) else { continue };
            let port = self.port_mut(link);
            if port.state == State::Lost || !port.owe(to, about, kind) {
                self.counters.notices_dropped += 1;
                continue;
            }
            self.note_owing(link);
        }
        while let Some(link) = self.owing.pop_front() {
            self.queue_owed(link);
        }
    }

    fn note_owing(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if !port.in_owing && !port.owed.is_empty() {
            port.in_owing = true;
            self.owing.push_back(link);
        }
    }

    /// What finds no room, or comes while nobody is there, stays owed.
    fn queue_owed(&mut self, link: LinkId) {
        let Some(Some(port)) = self.ports.get_mut(link.0 as usize) else { return };
        port.in_owing = false;
        if !port.is_up() || port.owed.is_empty() {
            return;
        }
        let bound = self.bound(link);
        let Self { ports, pool, histories, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        while port.waiting_bytes() <= bound {
            let Some(((to, about), kind)) = port.owed.pop_first() else { break };
            let header = empty(kind, about, to);
            let mut bytes = [0; HEADER_BYTES];
            header.emit(&mut bytes);
            // Who is being told what was hears this in its turn.
            if !port.is_told {
                port.push_notice(pool, &bytes, &header);
            }
            if let (Some(histories), Party::Endpoint(address)) = (&mut *histories, port.party) {
                // To one that may not come back it has been given all the same.
                let _ = histories.give(address, &bytes);
            }
        }
        self.touch(link);
    }
}

/// A frame that is nothing but its header.
pub(super) fn empty(kind: Kind, source: Address, target: Address) -> Header {
    let sequence = if kind.is_notice() { seal(source, target) } else { 0 };
    Header { length: 0, kind, flags: 0, hops: 0, source, target, sequence, delivered: 0, credit: 0 }
}
