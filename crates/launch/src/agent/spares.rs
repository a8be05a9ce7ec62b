//! A node below is lost, and its ranks go on on a spare one; and the other side of that, an agent that is given ranks.
//!
//! What may never happen: ranks of one node are started on two; a rank that has ended is started again.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use landbridge_proto::setting::{PEER_TIMEOUT, Value};

use super::again::Again;
use super::clocks::Clocks;
use super::groups::{Group, new_board};
use super::input::KEPT_BYTES_MAX;
use super::keeper::Keeper;
use super::rank::LocalRank;
use super::revive::Revival;
use super::{Agent, Phase};
use crate::control::moved::{Adoption, Moved, Moving};
use crate::control::{ALIVE_INTERVAL, Assignment, LOST_AFTER, Message};
use crate::mpi;
use crate::pmi::server::{Facts, Server};
use crate::spare::{self, Spare};
use crate::sys;

/// What the user reads of a node that is lost.
fn told(lost: &str, why: &str, moving: &[Moving], to: &str) -> String {
    let numbers: Vec<String> = moving.iter().map(|one| one.rank.to_string()).collect();
    let (ranks, are) = if moving.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
    format!(
        "node {lost} is lost ({why}): {ranks} {} {are} started anew on {to}",
        numbers.join(", ")
    )
}

impl Agent {
    /// Whether ranks may be started on another node.
    pub(super) fn may_move(&self) -> bool {
        self.assignment.as_ref().is_some_and(|own| mpi::recovers(&own.job.environment))
    }

    /// Whether the agent above keeps what is needed to start our ranks elsewhere.
    pub(super) fn is_ward(&self) -> bool {
        let is_below = |own: &Assignment| own.node.relay_unix.is_none();
        self.may_move() && self.assignment.as_ref().is_some_and(is_below)
    }

    /// Tells the agent above that we are there.
    pub(super) fn show_life(&mut self) {
        if self.is_ward() && self.shown_at.elapsed() >= ALIVE_INTERVAL {
            self.shown_at = Instant::now();
            self.parent.send(&Message::Ping);
        }
    }

    /// Agents below of which nothing has been heard for long are lost, if there is a spare node for their ranks; otherwise they
    /// are waited for. Whoever could not listen cannot tell.
    pub(super) fn look_for_the_lost(&mut self) {
        if !self.is_running() || !self.has_room() {
            return;
        }
        let patience = self.node_patience();
        for index in 0..self.children.len() {
            let child = &self.children[index];
            let is_silent = !child.done && child.process.link.heard_at().elapsed() > patience;
            if is_silent && self.choose_spare(child.node.rank_count).is_some() {
                let seconds = patience.as_secs();
                self.lose_child(index, &format!("nothing has been heard of it for {seconds} s"));
            }
        }
    }

    /// How long an agent below may be silent: as long as any path may be, for whatever is moved begins anew.
    fn node_patience(&self) -> Duration {
        let variable = PEER_TIMEOUT.variable();
        let environment = self.assignment.as_ref().map(|own| &own.job.environment);
        let said = environment.into_iter().flatten().find(|(name, _)| *name == variable);
        let text = said.map_or(PEER_TIMEOUT.default, |(_, text)| text);
        match PEER_TIMEOUT.parse(text) {
            Ok(Value::Time(time)) => time.max(LOST_AFTER),
            _ => LOST_AFTER,
        }
    }

    /// Ranks have been started, and one that is lost may go on.
    pub(super) fn is_running(&self) -> bool {
        self.phase == Phase::Working && !self.relay_address.is_empty() && self.may_move()
    }

    /// The agent of a node below is gone, or counts as gone: its ranks go on elsewhere.
    pub(super) fn lose_child(&mut self, index: usize, why: &str) {
        let child = &mut self.children[index];
        (child.done, child.is_lost) = (true, true);
        // If it is there after all, the end of this stream ends it, and its ranks.
        child.process.link.close_output();
        sys::kill(child.process.pid, libc::SIGKILL);
        let lost = child.node.clone();
        let released = self.groups.get(&0).map_or(0, |group| group.server.released());
        let ranks = lost.first_rank..lost.first_rank + lost.rank_count;
        let moving = self.wards.release(ranks, released);
        if moving.is_empty() {
            let what = if lost.is_spare { "spare node" } else { "node" };
            let text = format!("{what} {} is lost ({why}): no rank is there", lost.name);
            return self.parent.send(&Message::Note { text });
        }
        let Some(to) = self.choose_spare(moving.len() as u32) else {
            let text =
                format!("node {} is lost ({why}), and there is no spare node left", lost.name);
            return self.fail(text);
        };
        let name = self.children[to].node.name.clone();
        self.parent.send(&Message::Note { text: told(&lost.name, why, &moving, &name) });
        let moved = Moved { cluster: lost.cluster, from: lost.name, to: name };
        let first = self.children[index].node.first_rank;
        let count = std::mem::take(&mut self.children[index].node.rank_count);
        let node = &mut self.children[to].node;
        (node.first_rank, node.rank_count) = (first, count);
        let (has_reached, keys) = match self.groups.get_mut(&0) {
            Some(group) => (group.server.hand_over(index, to), group.server.keys()),
            None => (false, Vec::new()),
        };
        self.parent.send(&Message::Moved(Box::new(moved)));
        let has_first = moving.iter().any(|one| one.rank == 0);
        let adoption = Adoption { has_reached, keys, ranks: moving };
        let link = &mut self.children[to].process.link;
        link.send(&Message::Adopt(Box::new(adoption)));
        if has_first {
            match self.passed.repeat() {
                Some(again) => again.iter().for_each(|message| link.send(message)),
                None => self.fail(format!(
                    "rank 0 cannot go on on another node: it was given more than {} MiB of standard input, and no more of it is kept",
                    KEPT_BYTES_MAX >> 20
                )),
            }
        }
    }

    fn choose_spare(&self, ranks: u32) -> Option<usize> {
        let is_free = |child: &super::Child| {
            child.node.is_spare && child.node.rank_count == 0 && child.ready && !child.done
        };
        let all = self.children.iter().enumerate().filter(|(_, child)| is_free(child));
        let spares: Vec<Spare> =
            all.map(|(place, child)| Spare { place, slots: child.node.slots }).collect();
        spare::choose(&spares, ranks).map(|spare| spare.place)
    }

    // --- on the spare node

    pub(super) fn handle_adoption(&mut self, adoption: &Adoption) {
        let Some(assignment) = self.assignment.take() else { return };
        if self.phase == Phase::Working
            && let Err(error) = self.adopt(&assignment, adoption)
        {
            self.fail(format!("on node {}: {error:#}", assignment.node.name));
        }
        self.assignment = Some(assignment);
        // The answers that they wait for: all of them are there to hear them.
        for one in &adoption.ranks {
            for question in one.open() {
                if let Some(group) = self.groups.get_mut(&0) {
                    group.server.handle_line(one.rank, question);
                }
            }
        }
        self.drain_servers();
    }

    fn adopt(&mut self, assignment: &Assignment, adoption: &Adoption) -> Result<()> {
        let job = &assignment.job;
        let facts = Facts {
            group: 0,
            kvsname: job.kvsname.clone(),
            universe: job.universe,
            mapping: job.mapping.clone(),
        };
        let fresh = adoption.ranks.iter().flat_map(|one| one.fresh());
        let ranks = adoption.ranks.iter().map(|one| (one.rank, 0));
        let mut server = Server::new(facts, ranks, [], &adoption.keys);
        server.take_up(fresh, adoption.has_reached);
        self.groups.insert(0, Group::adopted(server, adoption.ranks.len() as u32));
        let count = adoption.ranks.len() as u32;
        for (turn, one) in adoption.ranks.iter().enumerate() {
            let again = Again::adopted(one, Instant::now());
            let clocks = Clocks::new(job)?.map(Rc::new);
            let wish = self.spare_wish.clone().filter(|_| clocks.is_some());
            let turn = (turn as u32, count);
            let mut rank = LocalRank::vacant(one.rank, clocks, new_board());
            rank.keeper = wish.map(|wish| Keeper::new(wish, &job.id, one.rank, one.moves, turn));
            rank.again = Some(again);
            // It goes on, from an image or with the program, once the agent looks at it next.
            rank.revival = Some(Revival::begin(&mut rank, None, &one.images));
            self.ranks.push(rank);
        }
        Ok(())
    }
}
