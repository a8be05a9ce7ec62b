//! The routing table of one relay: process index → cluster → attached link or peer relay.
//!
//! What enters: the job's map of clusters (fixed), and which link serves which endpoint or peer
//! relay (changing). What leaves: a [`Route`] for every address. What may never happen: a lookup
//! costs more with more processes.
//!
//! The indices of processes that are spawned while the job runs follow the indices of all clusters:
//! each cluster owns a fixed number of them, in the order of the clusters. So a relay knows from
//! the beginning where each spawned process belongs, and needs no notification of a new process.

use alloc::vec::Vec;

use crate::id::{Address, ClusterId};

/// The number of a link of a relay, assigned by the relay. A number is used again after its link
/// has closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// The most processes that can be spawned in one cluster in the life of a job: an index is never
/// used again, and a relay has 24 bytes for each index that has been used.
pub const SPAWNED_MAX: u32 = 1 << 16;

/// The processes of one cluster: `count` indices from `first`, and indices for spawned processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterRange {
    /// The lowest process index of the cluster.
    pub first: u32,
    /// The number of processes with which the job begins in the cluster.
    pub count: u32,
    /// The number of indices that the cluster owns behind those of all clusters, for processes
    /// spawned later; at most [`SPAWNED_MAX`].
    pub spawned: u32,
}

/// Where a frame for an address goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The frame goes to this link: an attached endpoint or a peer relay.
    Link(LinkId),
    /// The target process belongs to this cluster, but the endpoint has not attached yet.
    NotAttached,
    /// The endpoint was attached and has left.
    Detached,
    /// No cluster of the job has such a process, or no relay leads there.
    NoRoute,
}

/// The routing table of one relay: see the module documentation.
#[derive(Debug)]
pub struct RoutingTable {
    own: ClusterId,
    clusters: Vec<ClusterRange>,
    /// One above the highest index in `clusters`, where the indices of spawned processes begin.
    end: u32,
    peers: Vec<Option<LinkId>>,
    /// The endpoints of each process of the relay's own cluster, nearly always one. Spawned
    /// processes follow, as far as they have attached.
    attached: Vec<Vec<(u8, Attachment)>>,
}

#[derive(Clone, Copy, Debug)]
enum Attachment {
    Attached(LinkId),
    Detached,
}

impl RoutingTable {
    /// Creates a table with nothing attached. `clusters[n]` is the range of cluster `n`.
    ///
    /// # Errors
    /// If `own` is not among the clusters, a range exceeds [`Address::INDEX_MAX`], two ranges
    /// overlap, or a cluster has more than [`SPAWNED_MAX`] indices for spawned processes.
    pub fn new(own: ClusterId, clusters: Vec<ClusterRange>) -> Result<Self, &'static str> {
        let Some(home) = clusters.get(own.0 as usize) else {
            return Err("the relay's own cluster is not among the clusters");
        };
        let mut sorted: Vec<ClusterRange> =
            clusters.iter().copied().filter(|r| r.count > 0).collect();
        sorted.sort_unstable_by_key(|range| range.first);
        let end = |range: &ClusterRange| range.first as u64 + range.count as u64;
        if sorted.windows(2).any(|pair| end(&pair[0]) > pair[1].first as u64) {
            return Err("the process ranges of two clusters overlap");
        }
        if clusters.iter().any(|range| range.spawned > SPAWNED_MAX) {
            return Err("a cluster has too many indices for spawned processes");
        }
        let spawned: u64 = clusters.iter().map(|range| range.spawned as u64).sum();
        let last = sorted.last().map_or(0, end);
        if last + spawned > Address::INDEX_MAX as u64 + 1 {
            return Err("a process index is out of range");
        }
        let mut attached = Vec::new();
        attached.resize_with(home.count as usize, Vec::new);
        let peers = alloc::vec![None; clusters.len()];
        Ok(Self { own, clusters, end: last as u32, peers, attached })
    }

    /// The relay's own cluster.
    pub fn own(&self) -> ClusterId {
        self.own
    }

    /// The number of clusters of the job.
    pub fn cluster_count(&self) -> usize {
        self.clusters.len()
    }

    /// The processes with which the job begins.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.clusters.iter().flat_map(|range| range.first..range.first.saturating_add(range.count))
    }

    /// The cluster of a process.
    #[inline]
    pub fn cluster_of(&self, address: Address) -> Option<ClusterId> {
        let index = address.index();
        // A job has few clusters, so a scan beats a search tree.
        match self.clusters.iter().position(|range| range.contains(index)) {
            Some(at) => Some(ClusterId(at as u16)),
            None => Some(self.spawned(index)?.0),
        }
    }

    /// The cluster of a spawned process, and its number among the processes spawned there.
    fn spawned(&self, index: u32) -> Option<(ClusterId, u32)> {
        let mut number = index.checked_sub(self.end)?;
        for (at, range) in self.clusters.iter().enumerate() {
            if number < range.spawned {
                return Some((ClusterId(at as u16), number));
            }
            number -= range.spawned;
        }
        None
    }

    /// Where a frame for `target` goes.
    #[inline]
    pub fn route(&self, target: Address) -> Route {
        match self.cluster_of(target) {
            None => Route::NoRoute,
            Some(cluster) if cluster == self.own => self.route_home(target),
            Some(cluster) => match self.peers[cluster.0 as usize] {
                Some(link) => Route::Link(link),
                None => Route::NoRoute,
            },
        }
    }

    #[inline]
    fn route_home(&self, target: Address) -> Route {
        let Some(endpoints) = self.attached.get(self.slot(target)) else {
            return Route::NotAttached;
        };
        match endpoints.iter().find(|(endpoint, _)| *endpoint == target.endpoint()) {
            Some((_, Attachment::Attached(link))) => Route::Link(*link),
            Some((_, Attachment::Detached)) => Route::Detached,
            None => Route::NotAttached,
        }
    }

    /// Routes frames for cluster `cluster` to `link`.
    ///
    /// # Panics
    /// If there is no such cluster.
    pub fn set_peer(&mut self, cluster: ClusterId, link: LinkId) {
        self.peers[cluster.0 as usize] = Some(link);
    }

    /// The link to the relay of `cluster`.
    pub fn peer(&self, cluster: ClusterId) -> Option<LinkId> {
        *self.peers.get(cluster.0 as usize)?
    }

    /// Routes frames for `address` to `link`, or with `None` to nobody, because the endpoint has
    /// left.
    ///
    /// # Panics
    /// If `address` is not in the relay's own cluster.
    pub fn set_endpoint(&mut self, address: Address, link: Option<LinkId>) {
        let attachment = link.map_or(Attachment::Detached, Attachment::Attached);
        let slot = self.slot(address);
        if slot >= self.attached.len() {
            self.attached.resize_with(slot + 1, Vec::new);
        }
        let endpoints = &mut self.attached[slot];
        match endpoints.iter_mut().find(|(endpoint, _)| *endpoint == address.endpoint()) {
            Some(entry) => entry.1 = attachment,
            None => endpoints.push((address.endpoint(), attachment)),
        }
    }

    /// The index in `attached` of a process of the relay's own cluster.
    fn slot(&self, address: Address) -> usize {
        let home = &self.clusters[self.own.0 as usize];
        let index = address.index();
        if home.contains(index) {
            return (index - home.first) as usize;
        }
        let (cluster, number) = self.spawned(index).expect("callers know its cluster");
        assert!(cluster == self.own, "process {index} belongs to another cluster");
        home.count as usize + number as usize
    }
}

impl ClusterRange {
    #[inline]
    fn contains(&self, index: u32) -> bool {
        index.wrapping_sub(self.first) < self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_has_a_route() {
        let mut table = table();
        assert_eq!(table.route(Address::new(4, 0)), Route::NotAttached);
        table.set_endpoint(Address::new(4, 0), Some(LinkId(9)));
        assert_eq!(table.route(Address::new(4, 0)), Route::Link(LinkId(9)));
        assert_eq!(table.route(Address::new(4, 1)), Route::NotAttached);
        table.set_endpoint(Address::new(4, 0), None);
        assert_eq!(table.route(Address::new(4, 0)), Route::Detached);

        assert_eq!(table.route(Address::new(0, 0)), Route::NoRoute);
        table.set_peer(ClusterId(0), LinkId(1));
        assert_eq!(table.route(Address::new(3, 7)), Route::Link(LinkId(1)));
        assert_eq!(table.route(Address::new(10, 0)), Route::NoRoute);
        assert_eq!(table.route(Address::ANONYMOUS), Route::NoRoute);
    }

    #[test]
    fn maps_that_contradict_themselves_are_refused() {
        let range = |first, count| ClusterRange { first, count, spawned: 0 };
        let new = |own, ranges: &[ClusterRange]| {
            RoutingTable::new(ClusterId(own), ranges.to_vec()).is_ok()
        };
        assert!(new(1, &[range(4, 4), range(0, 4)]));
        assert!(!new(2, &[range(4, 4), range(0, 4)]));
        assert!(!new(0, &[range(3, 4), range(0, 4)]));
        assert!(!new(0, &[range(u32::MAX, 2)]));
        assert!(!new(0, &[range(Address::INDEX_MAX, 2)]));
        let room = |first, spawned| ClusterRange { first, count: 1, spawned };
        assert!(new(0, &[room(0, SPAWNED_MAX), room(1, SPAWNED_MAX)]));
        assert!(!new(0, &[room(0, SPAWNED_MAX + 1)]));
        assert!(new(0, &[room(Address::INDEX_MAX - 1, 1)]));
        assert!(!new(0, &[room(Address::INDEX_MAX - 1, 1), room(0, 1)]));
    }

    #[test]
    fn spawned_processes_have_indices_behind_all_others() {
        let ranges = [(4, 6, 2), (0, 4, 0), (10, 0, 3)];
        let ranges = ranges.map(|(first, count, spawned)| ClusterRange { first, count, spawned });
        let mut table = RoutingTable::new(ClusterId(0), ranges.to_vec()).unwrap();
        let cluster = |index| table.cluster_of(Address::new(index, 0)).map(|cluster| cluster.0);
        assert_eq!([9, 10, 11, 12, 14, 15].map(cluster), [0, 0, 0, 2, 2, u16::MAX].map(known));
        assert_eq!(table.route(Address::new(11, 0)), Route::NotAttached);
        table.set_endpoint(Address::new(11, 0), Some(LinkId(5)));
        assert_eq!(table.route(Address::new(11, 0)), Route::Link(LinkId(5)));
        assert_eq!(table.route(Address::new(10, 0)), Route::NotAttached);
        assert_eq!(table.route(Address::new(9, 0)), Route::NotAttached);
        table.set_peer(ClusterId(2), LinkId(6));
        assert_eq!(table.route(Address::new(12, 0)), Route::Link(LinkId(6)));
        assert_eq!(table.route(Address::new(15, 0)), Route::NoRoute);
    }

    fn known(cluster: u16) -> Option<u16> {
        (cluster != u16::MAX).then_some(cluster)
    }

    fn table() -> RoutingTable {
        let range = |first, count| ClusterRange { first, count, spawned: 0 };
        RoutingTable::new(ClusterId(1), alloc::vec![range(0, 4), range(4, 6)]).unwrap()
    }
}
