//! Reports to the sources of frames that do not arrive.

use super::*;
use crate::wire::frame::pair_check;
use recent_channels::FrameClass;

impl Relay {
    /// Records losses on the way to the other side of `link`. The sources are notified when the
    /// other side is reconnected ([`Relay::report_losses`]), or given up
    /// ([`Relay::abandon_queue`]).
    pub(super) fn record_loss(&mut self, link: LinkId, entries: BTreeSet<ChannelKey>) {
        let port = self.port_mut(link);
        let missed = entries.into_iter().filter(|entry| !port.record_loss(*entry)).count();
        self.counters.reports_dropped += missed as u64;
    }

    /// Notifies the sources of lost frames, because frames pass again: the sources request the
    /// receiver's status. Reports that were lost are sent again.
    pub(super) fn report_losses(&mut self, link: LinkId) {
        for (source, target) in core::mem::take(&mut self.port_mut(link).lossy_channels) {
            self.notify(source, target, Kind::Lost);
        }
        self.schedule_reports(link);
    }

    /// Gives up everything that waits for `link` or was lost there: the sources receive
    /// Unreachable.
    pub(super) fn abandon_queue(&mut self, link: LinkId) {
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        for (source, target) in port.discard(pool) {
            self.notify(source, target, Kind::Unreachable);
        }
    }

    /// Reports to the source of a frame that its target cannot be reached.
    pub(super) fn report_unreachable(&mut self, header: &Header) {
        // No report is made about the loss of a report.
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

    /// Puts pending reports into the queues of their outputs, as far as these have capacity.
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

    /// Puts the reports that are pending at `link` into its queue. Reports beyond its capacity, or
    /// for a disconnected link, stay pending.
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
            // An endpoint under replay receives the report from its log, in its turn.
            if !port.is_replaying {
                port.push_frame(pool, &bytes, &header);
            }
            if let (Some(logs), PortKind::Endpoint(address)) = (&mut *logs, port.kind) {
                // An endpoint that cannot be restarted has received the report all the same, from
                // its queue.
                let _ = logs.append(address, &bytes);
            }
        }
        self.touch(link);
    }
}

/// A header of a frame without a body.
pub(super) fn empty(kind: Kind, source: Address, target: Address) -> Header {
    let sequence = if kind.reports_undeliverable() { pair_check(source, target) } else { 0 };
    Header { length: 0, kind, flags: 0, hops: 0, source, target, sequence, delivered: 0, credit: 0 }
}
