//! Paths between simulated processes that break, are suspected, and are reopened; and processes
//! that lose each other finally.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::PathProperties;

use super::Violation;
use super::model::LOST;
use super::node::{PATHS_MAX, random_pipe};
use super::world::World;

impl World {
    /// Breaks a random path, if the path may break.
    pub fn break_random_path(&mut self) -> Result<(), Violation> {
        let count = self.nodes.len();
        let (a, b) = (self.random.index(count), self.random.index(count));
        let path_id = self.random.index(PATHS_MAX);
        let is_there = path_id < self.pipes[a][b].len() && a != b;
        if is_there && !self.nodes[a].paths[b][path_id].lossless {
            self.break_path(a, b, path_id)?;
        }
        Ok(())
    }

    /// Lets one side of a random path suspect the path or end its suspicion, whatever the state of
    /// the path.
    pub fn suspect_random_path(&mut self) -> Result<(), Violation> {
        let count = self.nodes.len();
        let (from, to) = (self.random.index(count), self.random.index(count));
        let path_id = self.random.index(PATHS_MAX);
        let is_there = path_id < self.pipes[from][to].len() && from != to;
        if !is_there || self.nodes[from].paths[to][path_id].lossless || self.model.failed[from][to]
        {
            return Ok(());
        }
        let is_suspected = self.random.percent(50);
        self.set_suspected(from, to, path_id, is_suspected)
    }

    /// Sets whether `from` suspects a path.
    pub fn set_suspected(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        is_suspected: bool,
    ) -> Result<(), Violation> {
        let (peer, path) = (self.peer(from, to), PathId(path_id as u8));
        self.log_step(|| format!("{from} suspects path {path_id} to {to}: {is_suspected}"));
        if is_suspected && self.pipes[from][to][path_id].pending_write.is_some() {
            // The sender may free the memory of the frame as soon as the frame has arrived by
            // another path.
            self.pipes[from][to][path_id].own_pending_write(&mut self.arena)?;
            self.nodes[from].endpoint.handle_flushed(peer, path);
        }
        self.nodes[from].endpoint.channel_mut(peer).suspect_path(path, is_suspected);
        self.counts.count("paths suspected");
        self.drain(from)
    }

    pub fn break_path(&mut self, a: usize, b: usize, path_id: usize) -> Result<(), Violation> {
        let is_lost = self.model.failed[a][b] || self.model.failed[b][a];
        if is_lost
            || self.broken.contains(&(a, b, path_id))
            || self.broken.contains(&(b, a, path_id))
        {
            return Ok(());
        }
        self.counts.count("paths broken");
        self.log_step(|| format!("path {path_id} between {a} and {b} breaks"));
        for (from, to) in [(a, b), (b, a)] {
            if self.random.percent(50) {
                // Bytes that had arrived can still be read.
                while !self.broken.contains(&(a, b, path_id)) && self.read(from, to, path_id)? {}
            }
        }
        if self.broken.contains(&(a, b, path_id)) || self.broken.contains(&(b, a, path_id)) {
            return Ok(());
        }
        self.broken.push((a, b, path_id));
        for (from, to) in [(a, b), (b, a)] {
            let path = self.nodes[from].paths[to][path_id];
            self.pipes[from][to][path_id] = random_pipe(&path, &mut self.random);
            self.pipes[from][to][path_id].cut();
        }
        for (node, other) in [(a, b), (b, a)] {
            let peer = self.peer(node, other);
            self.nodes[node].endpoint.close_path(peer, PathId(path_id as u8));
            self.drain(node)?;
        }
        Ok(())
    }

    /// Notifies `node` of the loss of `other`.
    pub fn lose_peer(&mut self, node: usize, other: usize) -> Result<(), Violation> {
        self.log_step(|| format!("{node} loses {other}"));
        let peer = self.peer(node, other);
        let unfinished = self.channels[other][node].lose();
        for path_id in 0..self.pipes[node][other].len() {
            self.pipes[node][other][path_id].cut();
            let pipe = &mut self.pipes[other][node][path_id];
            pipe.bytes.clear();
            pipe.network = None;
            pipe.cut();
        }
        self.model.fail(node, other, &unfinished);
        let state = &mut self.nodes[node];
        state.pulls.retain(|pull| pull.from != other);
        // The driver answers the requests of a lost peer nevertheless: the endpoint must tolerate
        // the answers.
        state.endpoint.fail(peer, LOST);
        self.counts.count("peers lost");
        self.drain(node)?;
        self.model.check_failed(node, other)
    }

    /// Makes a path of `from` a spare path, or ends this.
    pub fn set_spare(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        spare: bool,
    ) -> Result<(), Violation> {
        self.log_step(|| format!("{from} has path {path_id} to {to} as a spare one: {spare}"));
        let path = &mut self.nodes[from].paths[to][path_id];
        *path = PathProperties { spare, ..*path };
        let path = *path;
        let peer = self.peer(from, to);
        self.nodes[from].endpoint.channel_mut(peer).set_path(PathId(path_id as u8), path);
        self.drain(from)
    }
}
