//! Losses on the way to the other side of one port, and the reports that wait for it.
//!
//! What enters: the channels of lost frames, and reports to be sent to the other side. What leaves:
//! the channels whose sources are notified once frames pass again, and the reports one by one. What
//! may never happen: a loss within [`PENDING_REPORTS_MAX`] is forgotten.

use alloc::collections::{BTreeMap, BTreeSet};

use super::recent_channels::{ChannelKey, FrameClass};
use crate::id::Address;
use crate::wire::frame::Kind;

/// Most reports that may be pending for one port: 2 MiB. Reports beyond this bound are dropped and
/// counted; a source without a report detects the loss by itself, later.
pub(super) const PENDING_REPORTS_MAX: usize = 1 << 16;

/// Reports: target of the report, and endpoint that the report is about.
pub(super) type PendingReports = BTreeMap<(Address, Address), Kind>;

/// Losses of one port: see the module head.
#[derive(Debug, Default)]
pub(super) struct LossRecord {
    /// Reports to be sent here.
    reports: PendingReports,
    /// Channels that have lost frames here while the other side is disconnected.
    lossy: BTreeSet<(Address, Address)>,
    /// Channels of a peer relay whose frames went by streams that have broken.
    past: BTreeSet<(Address, Address)>,
}

impl LossRecord {
    /// Records the loss of a frame or report on its way to the other side. Its source, or the
    /// target of the report, is notified once the other side is reconnected. Returns false if too
    /// many losses are pending.
    pub fn record(&mut self, entry: ChannelKey) -> bool {
        let pair = (entry.source, entry.target);
        match entry.class {
            FrameClass::Forwarded => {
                let has_room = self.lossy.len() < PENDING_REPORTS_MAX;
                (has_room && self.lossy.insert(pair)) || self.lossy.contains(&pair)
            }
            FrameClass::LossReport => self.add_report(entry.target, entry.source, Kind::Lost),
            FrameClass::UnreachableReport => {
                self.add_report(entry.target, entry.source, Kind::Unreachable)
            }
        }
    }

    /// Adds channels that have lost frames, without a bound.
    pub fn add_lossy(&mut self, channels: impl IntoIterator<Item = (Address, Address)>) {
        self.lossy.extend(channels);
    }

    /// Number of channels whose sources are to be notified.
    pub fn lossy_count(&self) -> usize {
        self.lossy.len()
    }

    /// Takes the channels whose sources are to be notified.
    pub fn take_lossy(&mut self) -> BTreeSet<(Address, Address)> {
        core::mem::take(&mut self.lossy)
    }

    /// Remembers channels of a stream that has broken, up to the bound.
    pub fn remember_past(&mut self, channels: impl Iterator<Item = (Address, Address)>) {
        let room = PENDING_REPORTS_MAX.saturating_sub(self.past.len());
        self.past.extend(channels.take(room));
    }

    /// Counts the frames of past streams as lost: the incarnation of the peer relay that received
    /// them has ended.
    pub fn lose_past(&mut self) {
        self.lossy.append(&mut self.past);
    }

    pub fn forget_past(&mut self) {
        self.past.clear();
    }

    /// Adds a report for `to` about `about` to the reports to be sent here. Returns false if too
    /// many are pending.
    pub fn add_report(&mut self, to: Address, about: Address, kind: Kind) -> bool {
        let has_room =
            self.reports.len() < PENDING_REPORTS_MAX || self.reports.contains_key(&(to, about));
        if has_room {
            self.reports.insert((to, about), kind);
        }
        has_room
    }

    pub fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }

    /// The next report to send: its target, the endpoint that it is about, and its kind.
    pub fn pop_report(&mut self) -> Option<(Address, Address, Kind)> {
        self.reports.pop_first().map(|((to, about), kind)| (to, about, kind))
    }

    pub fn take_reports(&mut self) -> PendingReports {
        core::mem::take(&mut self.reports)
    }

    pub fn restore_reports(&mut self, reports: PendingReports) {
        self.reports = reports;
    }
}
