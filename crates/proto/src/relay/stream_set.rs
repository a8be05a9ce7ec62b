//! The streams to one peer relay, which take turns in being the first to write.

use alloc::vec::Vec;

use crate::route::routing_table::LinkId;

/// The streams to one peer relay: see the module head.
#[derive(Debug, Default)]
pub(super) struct StreamSet {
    links: Vec<LinkId>,
    /// Index of the stream that writes first.
    first: usize,
}

impl StreamSet {
    pub fn links(&self) -> &[LinkId] {
        &self.links
    }

    pub fn push(&mut self, stream: LinkId) {
        self.links.push(stream);
    }

    pub fn remove(&mut self, stream: LinkId) {
        self.links.retain(|other| *other != stream);
    }

    /// The stream that writes as number `number`, counted from the first one.
    pub fn writer(&self, number: usize) -> Option<LinkId> {
        if self.links.is_empty() {
            return None;
        }
        Some(self.links[(self.first + number) % self.links.len()])
    }

    /// Lets the stream after `stream` write first next time.
    pub fn advance(&mut self, stream: LinkId) {
        if let Some(at) = self.links.iter().position(|other| *other == stream) {
            self.first = (at + 1) % self.links.len();
        }
    }
}
