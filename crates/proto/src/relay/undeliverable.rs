//! What sources of frames are told when these do not arrive.

use super::*;
use crate::wire::frame::pair_check;
use recent_channels::FrameClass;

impl Relay {
    /// Notes what has been lost on the way to the other side of `link`. Its sources hear when that is
    /// back ([`Relay::report_losses`]), or given up ([`Relay::abandon_queue`]).
    pub(super) fn record_loss(&mut self, link: LinkId, entries: BTreeSet<ChannelKey>) {
        let port = self.port_mut(link);
        let missed = entries.into_iter().filter(|entry| !port.record_loss(*entry)).count();
        self.counters.reports_dropped += missed as u64;
    }

    /// Frames pass again: the sources of those that were lost are to ask what has arrived, and notices
    /// that were lost go out once more.
    pub(super) fn report_losses(&mut self, link: LinkId) {
        for (source, target) in core::mem::take(&mut self.port_mut(link).lossy_channels) {
            self.notify(source, target, Kind::Lost);
        }
        self.schedule_reports(link);
    }

    /// Everything that waits for `link`, or was lost there, becomes unreachable.
    pub(super) fn abandon_queue(&mut self, link: LinkId) {
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        for (source, target) in port.discard(pool) {
            self.notify(source, target, Kind::Unreachable);
        }
    }

    /// Tells the source of a frame that its target cannot be reached.
    pub(super) fn report_unreachable(&mut self, header: &Header) {
        // Nobody is told about what relays say.
        if FrameClass::of(header.kind) == FrameClass::Forwarded {
            self.notify(header.source, header.target, Kind::Unreachable);
        }
    }

    fn notify(&mut self, source: Address, target: Address, kind: Kind) {
        match kind {
            Kind::Lost => self.counters.lost += 1,
            _ => self.counters.unreachable += 1,
        }
        self.reports.insert((source, target), kind);
    }

    /// Puts notices that are due into the queues of their outputs, as far as these have room.
    pub(super) fn queue_reports(&mut self) {
        for ((to, about), kind) in core::mem::take(&mut self.reports) {
            let Route::Link(link) = self.table.route(to) else { continue };
            let port = self.port_mut(link);
            if port.state == PortState::Abandoned || !port.add_report(to, about, kind) {
                self.counters.reports_dropped += 1;
                continue;
            }
            self.schedule_reports(link);
        }
        while let Some(link) = self.ports_with_reports.pop_front() {
            self.queue_pending_reports(link);
        }
    }

    fn schedule_reports(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if !port.in_report_queue && !port.pending_reports.is_empty() {
            port.in_report_queue = true;
            self.ports_with_reports.push_back(link);
        }
    }

    /// What finds no room, or comes while nobody is there, stays owed.
    fn queue_pending_reports(&mut self, link: LinkId) {
        let Some(Some(port)) = self.ports.get_mut(link.0 as usize) else { return };
        port.in_report_queue = false;
        if !port.is_up() || port.pending_reports.is_empty() {
            return;
        }
        let bound = self.bound(link);
        let Self { ports, pool, logs, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        while port.waiting_bytes() <= bound {
            let Some(((to, about), kind)) = port.pending_reports.pop_first() else { break };
            let header = empty(kind, about, to);
            let mut bytes = [0; HEADER_BYTES];
            header.emit(&mut bytes);
            // Who is being told what was hears this in its turn.
            if !port.is_replaying {
                port.push_frame(pool, &bytes, &header);
            }
            if let (Some(logs), PortKind::Endpoint(address)) = (&mut *logs, port.kind) {
                // To one that may not come back it has been given all the same.
                let _ = logs.append(address, &bytes);
            }
        }
        self.touch(link);
    }
}

/// A frame that is nothing but its header.
pub(super) fn empty(kind: Kind, source: Address, target: Address) -> Header {
    let sequence = if kind.reports_undeliverable() { pair_check(source, target) } else { 0 };
    Header { length: 0, kind, flags: 0, hops: 0, source, target, sequence, delivered: 0, credit: 0 }
}
