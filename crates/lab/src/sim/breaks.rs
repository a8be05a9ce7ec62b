//! Paths between simulated processes that break, are doubted, and come back; processes that lose each other for good.

use std::collections::BTreeMap;

use landbridge_proto::channel::PathId;

use super::Violation;
use super::lanes::LANES_MAX;
use super::model::LOST;
use super::node::random_link;
use super::world::World;

impl World {
    /// A path breaks, if there is one that may.
    pub fn break_some(&mut self) -> Result<(), Violation> {
        let count = self.nodes.len();
        let (a, b) = (self.random.index(count), self.random.index(count));
        let lane = self.random.index(LANES_MAX);
        let is_there = lane < self.links[a][b].len() && a != b;
        if is_there && !self.nodes[a].paths[b][lane].lossless {
            self.break_lane(a, b, lane)?;
        }
        Ok(())
    }

    /// One side of a path doubts it, or no longer, whatever is right.
    pub fn doubt_some(&mut self) -> Result<(), Violation> {
        let count = self.nodes.len();
        let (from, to) = (self.random.index(count), self.random.index(count));
        let lane = self.random.index(LANES_MAX);
        let is_there = lane < self.links[from][to].len() && from != to;
        if !is_there || self.nodes[from].paths[to][lane].lossless || self.model.failed[from][to] {
            return Ok(());
        }
        let is_doubted = self.random.percent(50);
        self.doubt(from, to, lane, is_doubted)
    }

    /// `from` doubts a path, or no longer.
    pub fn doubt(
        &mut self,
        from: usize,
        to: usize,
        lane: usize,
        is_doubted: bool,
    ) -> Result<(), Violation> {
        let (peer, path) = (self.peer(from, to), PathId(lane as u8));
        self.say(|| format!("{from} doubts path {lane} to {to}: {is_doubted}"));
        if is_doubted && self.links[from][to][lane].rest.is_some() {
            // Its memory may be given back as soon as the frame has come by another path.
            self.links[from][to][lane].own_rest(&mut self.arena)?;
            self.nodes[from].endpoint.handle_flushed(peer, path);
        }
        self.nodes[from].endpoint.doubt_path(peer, path, is_doubted);
        self.tally.count("paths doubted");
        self.drain(from)
    }

    pub fn break_lane(&mut self, a: usize, b: usize, lane: usize) -> Result<(), Violation> {
        let is_lost = self.model.failed[a][b] || self.model.failed[b][a];
        if is_lost || self.broken.contains(&(a, b, lane)) || self.broken.contains(&(b, a, lane)) {
            return Ok(());
        }
        self.tally.count("paths broken");
        self.say(|| format!("path {lane} between {a} and {b} breaks"));
        for (from, to) in [(a, b), (b, a)] {
            if self.random.percent(50) {
                // What had arrived can still be read.
                while !self.broken.contains(&(a, b, lane)) && self.read(from, to, lane)? {}
            }
        }
        if self.broken.contains(&(a, b, lane)) || self.broken.contains(&(b, a, lane)) {
            return Ok(());
        }
        self.broken.push((a, b, lane));
        for (from, to) in [(a, b), (b, a)] {
            let path = self.nodes[from].paths[to][lane];
            self.links[from][to][lane] = random_link(&path, &mut self.random);
            self.links[from][to][lane].cut();
        }
        for (node, other) in [(a, b), (b, a)] {
            let peer = self.peer(node, other);
            self.nodes[node].endpoint.close_path(peer, PathId(lane as u8));
            self.drain(node)?;
        }
        Ok(())
    }

    /// A broken path comes back; false if there is none that may.
    pub fn mend(&mut self) -> Result<bool, Violation> {
        if self.broken.is_empty() {
            return Ok(false);
        }
        let first = self.random.index(self.broken.len());
        let mut places = (first..self.broken.len()).chain(0..first);
        let may_come = |&place: &usize| {
            let (a, b, lane) = self.broken[place];
            self.may_mend(a, b, lane)
        };
        let Some(place) = places.find(may_come) else {
            return Ok(false);
        };
        let (a, b, lane) = self.broken.swap_remove(place);
        self.say(|| format!("path {lane} between {a} and {b} is back"));
        for (from, to) in [(a, b), (b, a)] {
            if !self.model.failed[from][to] && !self.model.failed[to][from] {
                let path = self.nodes[from].paths[to][lane];
                self.links[from][to][lane] = random_link(&path, &mut self.random);
            }
        }
        for (node, other) in [(a, b), (b, a)] {
            if self.model.failed[node][other] {
                continue;
            }
            let peer = self.peer(node, other);
            let path = self.nodes[node].paths[other][lane];
            self.nodes[node].endpoint.open_path(peer, PathId(lane as u8), path);
            self.drain(node)?;
        }
        Ok(true)
    }

    /// `node` learns that `other` is lost.
    pub fn lose(&mut self, node: usize, other: usize) -> Result<(), Violation> {
        self.say(|| format!("{node} loses {other}"));
        let peer = self.peer(node, other);
        let opened = self.opened[other][node].take().and_then(|(_, message)| message);
        let is_theirs = |&(from, to, _): &(usize, usize, u32)| (from, to) == (other, node);
        let (cut, ahead) =
            std::mem::take(&mut self.ahead).into_iter().partition(|(k, _)| is_theirs(k));
        self.ahead = ahead;
        let cut: BTreeMap<_, (usize, u64)> = cut;
        let unfinished: Vec<usize> = opened.into_iter().chain(cut.values().map(|c| c.0)).collect();
        for lane in 0..self.links[node][other].len() {
            self.links[node][other][lane].cut();
            let link = &mut self.links[other][node][lane];
            link.reading = None;
            link.pipe.clear();
            link.air = None;
            link.cut();
        }
        self.model.fail(node, other, &unfinished);
        let state = &mut self.nodes[node];
        state.pulls.retain(|pull| pull.from != other);
        state.early.retain(|&(from, _), _| from != other);
        // Requests are answered all the same: the endpoint must not mind.
        state.endpoint.fail(peer, LOST);
        self.tally.count("peers lost");
        self.drain(node)?;
        self.model.check_failed(node, other)
    }
}
