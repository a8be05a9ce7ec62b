//! Process groups as one agent sees them: the job's first processes and those that ranks spawn. For
//! each there is a process manager of its own, as long as processes of it live here or below.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::again::{Again, Asked, EXCHANGED_BYTES_MAX};
use super::board::Board;
use super::clocks::Clocks;
use super::keeper::Keeper;
use super::rank::{LocalRank, Start};
use super::revive::Revival;
use super::spares::OfThisNode;
use super::{Agent, Phase};
use crate::cleanup;
use crate::control::moved::Talk;
use crate::control::order::{Block, Order};
use crate::control::{Assignment, Ending, Job, Message, Node};
use crate::limits;
use crate::mpi;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{Event, Facts, Server};
use crate::pmi::wire::{Input, block_text, is_answered_later};
use crate::restart::{self, Decision, Limits, Why};
use crate::sys;

/// How often it is told how far ranks are on their way back.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

pub(super) struct Group {
    pub server: Server,
    /// Processes here and below that have not ended.
    living: u32,
    /// It was not started in whole: nobody is told about what is left of it.
    revoked: bool,
}

impl Group {
    /// The job's first processes.
    pub fn first(job: &Job, node: &Node) -> Group {
        let facts = Facts {
            group: 0,
            kvsname: job.kvsname.clone(),
            universe: job.universe,
            mapping: job.mapping.clone(),
        };
        let ranks = node.first_rank..node.first_rank + node.rank_count;
        let ranks = ranks.map(|rank| (rank, job.application(rank).0));
        // Spare nodes take no part until they have ranks.
        let below = node.children.iter().enumerate().filter(|(_, child)| child.total_ranks() > 0);
        let server = Server::new(facts, ranks, below.map(|(index, _)| index), &Delta::new());
        Group { server, living: node.total_ranks(), revoked: false }
    }

    /// Ranks of a node that is lost.
    pub fn adopted(server: Server, living: u32) -> Group {
        Group { server, living, revoked: false }
    }

    fn spawned(job: &Job, node: &Node, order: &Order, children: &[usize]) -> Group {
        let facts = Facts {
            group: order.group,
            kvsname: order.kvsname.clone(),
            universe: job.universe,
            mapping: order.mapping.clone(),
        };
        let ranks = |block: &Block| {
            let appnum = block.appnum;
            block.indices().map(move |index| (index, appnum))
        };
        let own = order.on(node).flat_map(ranks);
        let server = Server::new(facts, own, children.iter().copied(), &order.keys);
        let living = order.below(node).map(|block| block.count).sum();
        Group { server, living, revoked: false }
    }

    pub fn handle_ended(&mut self, rank: u32) {
        self.living = self.living.saturating_sub(1);
        self.server.handle_ended(rank);
    }
}

/// A rank runs as well without.
pub(super) fn new_board() -> Option<Rc<Board>> {
    Board::new().ok().map(Rc::new)
}

/// Whether ranks that are killed are to be started anew.
pub(super) fn recovers(job: &Job) -> bool {
    mpi::recovers(&job.environment)
}

/// Which process a rank has now.
pub(super) fn alive(rank: &LocalRank, is_back: bool) -> Message {
    let again = rank.again.as_ref();
    let start = again.map_or(0, |again| again.starts);
    let percent = again.and_then(|again| again.percent(rank.looks()));
    Message::Alive { group: rank.group, rank: rank.rank, pid: rank.pid, start, is_back, percent }
}

fn asked_too_much(rank: u32) -> String {
    let most = EXCHANGED_BYTES_MAX >> 20;
    format!(
        "rank {rank} has asked its process manager more than {most} MiB, with the answers: if it is killed it cannot be started anew"
    )
}

impl Agent {
    // --- starting and ending them

    pub(super) fn start_own_ranks(&mut self, assignment: &Assignment) -> Result<()> {
        let Assignment { job, node } = assignment;
        if node.rank_count == 0 {
            // What others see of it tells them that it sees their images.
            self.spare_wish = if node.is_spare { self.wish(job, node) } else { None };
            self.begin_signing(job, node);
            return Ok(());
        }
        cleanup::remove_forgotten_mpich_files();
        let plans = self.plans(job, node)?;
        let wish = self.wish(job, node);
        let ships = job.has_spares && node.relay_unix.is_none();
        for rank in node.first_rank..node.first_rank + node.rank_count {
            let clocks = if recovers(job) { Clocks::new(job, ships)? } else { None };
            let clocks = clocks.map(Rc::new);
            let (appnum, task) = job.application(rank);
            let start = Start {
                clocks,
                board: new_board(),
                group: 0,
                index: rank,
                rank,
                size: job.size,
                task,
                plan: &plans[&appnum],
                neighbours: None,
                incarnation: recovers(job).then_some(0),
                has_images: wish.is_some(),
                pid: None,
            };
            let keeper = wish.clone().filter(|_| start.clocks.is_some() && start.has_images);
            self.start_rank(job, node, &start)?;
            if let Some(local) = self.ranks.last_mut() {
                let turn = (rank - node.first_rank, node.rank_count);
                local.keeper = keeper.map(|wish| Keeper::new(wish, rank, 0, turn));
            }
        }
        Ok(())
    }

    /// A rank has ended: starts it anew if it is to come back. Nobody else hears of it.
    pub(super) fn start_again(&mut self, index: usize, ending: Ending) -> bool {
        if self.phase != Phase::Working || self.ranks[index].again.is_none() {
            return false;
        }
        // All that it has said, to whomever, is part of where it was.
        self.handle_pmi(index);
        self.drain_servers();
        self.handle_output(index);
        if !self.is_to_come_back(index, ending) {
            return false;
        }
        // Whatever it has started would do its part twice.
        sys::kill_group(self.ranks[index].pid, libc::SIGKILL);
        // It may have been killed before it had given its shared memory's name back: its next start takes the same one.
        self.remove_files_of(index);
        let is_cut_off = self.ranks[index].again.as_ref().is_some_and(Again::was_cut_off);
        let how = match ending {
            _ if is_cut_off => "was cut off from its relay".to_string(),
            Ending::Killed(signal) => format!("was killed by {}", sys::signal_name(signal)),
            Ending::Exited(code) => format!("ended with exit code {code} before MPI_Finalize"),
        };
        let outcome = match self.begin_anew(index) {
            Ok(()) if self.ranks[index].keeper.is_some() => {
                let rank = &mut self.ranks[index];
                rank.revival = Some(Revival::begin(rank, Some(how), &[]));
                return true;
            }
            Ok(()) => self.begin_with_program(index).map(|()| None),
            Err(error) => Err(error),
        };
        self.tell_start(index, Some(&how), outcome)
    }

    /// Tells the user of a new start, from an image of this number or with the program. Whether there is one. `how`: the last one
    /// has ended; of a rank that has come from another node that was said.
    pub(super) fn tell_start(
        &mut self,
        index: usize,
        how: Option<&str>,
        outcome: Result<Option<u64>>,
    ) -> bool {
        let number = self.ranks[index].rank;
        let node = self.assignment.as_ref().map_or("?", |own| &own.node.name).to_string();
        let text = match (&outcome, how) {
            (Ok(None), Some(how)) => format!("rank {number} {how}: started anew"),
            (Ok(Some(image)), Some(how)) => {
                format!("rank {number} {how}: started anew from checkpoint {image}")
            }
            (Err(error), how) if self.may_ask_for_another_node(error) => {
                let why = match how {
                    Some(how) => {
                        format!("rank {number} {how} and cannot be started anew there: {error:#}")
                    }
                    None => format!("on node {node}: rank {number} cannot be started: {error:#}"),
                };
                self.ask_for_another_node(number, why);
                return true;
            }
            (Err(error), Some(how)) => {
                format!("rank {number} {how} and cannot be started anew: {error:#}")
            }
            (Ok(None), None) => return true,
            (Ok(Some(image)), None) => {
                format!("rank {number} goes on from checkpoint {image} on {node}")
            }
            (Err(error), None) => {
                format!("rank {number} cannot be started on {node}: {error:#}")
            }
        };
        self.parent.send(&Message::Note { text: limits::advise(text) });
        outcome.is_ok()
    }

    fn remove_files_of(&self, index: usize) {
        let rank = &self.ranks[index];
        if let Some(group) = self.groups.get(&rank.group) {
            cleanup::remove_mpich_files(group.server.kvsname(), |it| it == rank.group_rank);
        }
    }

    /// What the rule says; the user hears why a rank is given up.
    fn is_to_come_back(&mut self, index: usize, ending: Ending) -> bool {
        let is_ward = self.is_ward();
        let limits = self.assignment.as_ref().map_or(Limits::default(), |own| own.job.limits);
        let rank = &mut self.ranks[index];
        let looks = rank.looks();
        let Some(again) = rank.again.as_mut().filter(|again| !again.has_aborted) else {
            return false;
        };
        let lives = again.end(ending, looks, Instant::now());
        match restart::decide(lives, limits) {
            Decision::StartAnew => {
                if let (true, Some(life)) = (is_ward, lives.last()) {
                    let talk = Talk::Ended { rank: rank.rank, life: *life };
                    self.parent.send(&Message::Talk(Box::new(talk)));
                }
                true
            }
            Decision::Over => {
                self.check_output(index);
                false
            }
            Decision::GiveUp(why) => {
                let text = restart::told(rank.rank, lives, limits, &why);
                if matches!(why, Why::CannotGoOn | Why::CutOff) {
                    rank.ending = Some(Ending::Exited(1));
                }
                self.parent.send(&Message::Note { text });
                false
            }
        }
    }

    /// Another start of the rank begins, if one can.
    fn begin_anew(&mut self, index: usize) -> Result<()> {
        let old = &mut self.ranks[index];
        if old.clocks.as_ref().is_some_and(|clocks| clocks.is_full()) {
            bail!("its record of clocks and chance is full");
        }
        if let Some(why) = old.clocks.as_ref().and_then(|clocks| clocks.refusal()) {
            bail!("{why}");
        }
        if old.again.as_ref().is_some_and(Again::has_asked_too_much) {
            bail!("it has asked its process manager more than is kept");
        }
        // What its children may still print belongs to no incarnation.
        old.close_output();
        let looks = old.clocks.as_ref().map(|clocks| clocks.rest());
        old.again.iter_mut().for_each(|again| again.begin(looks, Instant::now()));
        Ok(())
    }

    /// The new start of the rank is one of the program, for there is no image of it that serves.
    pub(super) fn begin_with_program(&mut self, index: usize) -> Result<()> {
        let old = &self.ranks[index];
        let may_begin = old.keeper.as_ref().is_none_or(Keeper::may_begin)
            && old.clocks.as_ref().is_none_or(|clocks| clocks.may_begin());
        if !may_begin {
            bail!(
                "none of its checkpoints can be used, and what it did before them is not kept any more"
            );
        }
        if !old.input.has(0) {
            bail!("more of standard input had been given to it than is kept");
        }
        // What was put back with an image that did not serve is in the way as well.
        self.remove_files_of(index);
        let assignment = self.assignment.as_ref().context("there is no job")?;
        let Assignment { job, node } = assignment;
        let (_, task) = job.application(self.ranks[index].rank);
        let plan = mpi::prepare(task, job).map_err(OfThisNode::error)?;
        let old = &mut self.ranks[index];
        let again = old.again.as_ref().context("it does not come back")?;
        let start = Start {
            clocks: old.clocks.clone(),
            board: old.board.clone(),
            has_images: old.keeper.is_some(),
            pid: Some(old.pid).filter(|pid| *pid > 0),
            group: 0,
            index: old.rank,
            rank: old.group_rank,
            size: job.size,
            task,
            plan: &plan,
            neighbours: None,
            incarnation: Some(again.incarnation()),
        };
        let rank = LocalRank::start(job, node, &self.relay_address, &start);
        let mut rank = rank.map_err(OfThisNode::error)?;
        rank.again = old.again.take();
        rank.keeper = old.keeper.take();
        rank.inherit_input(old, 0);
        self.put_in_place(index, rank);
        Ok(())
    }

    pub(super) fn put_in_place(&mut self, index: usize, rank: LocalRank) {
        self.exits.watch(rank.pid);
        self.parent.send(&alive(&rank, false));
        self.ranks[index] = rank;
        self.write_rank_input(index);
    }

    /// Tells of ranks that have been started anew how far they have come, and once that they are where they were.
    pub(super) fn report_returned(&mut self) {
        let is_time = self.progress_told.elapsed() >= PROGRESS_INTERVAL;
        let mut is_told = false;
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_away()) {
            let looks = rank.looks();
            if rank.again.as_mut().is_some_and(|again| again.returns(looks)) {
                self.parent.send(&alive(rank, true));
            } else if is_time {
                is_told = true;
                self.parent.send(&alive(rank, false));
            }
        }
        if is_told {
            self.progress_told = Instant::now();
            self.end_hanging();
        }
    }

    /// Ends new starts that hang on their way back, so that there is another one. One that somebody has stopped is waited for.
    fn end_hanging(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_away()) {
            let looks = rank.looks();
            let still = rank.again.as_mut().and_then(|again| again.hangs(looks, Instant::now()));
            let Some(still) = still.filter(|_| !sys::is_stopped(rank.pid)) else { continue };
            let (number, seconds) = (rank.rank, still.as_secs());
            let text = format!(
                "rank {number} has come no further for {seconds} s on its way back: it is ended, and started anew"
            );
            self.parent.send(&Message::Note { text });
            sys::kill_group(rank.pid, libc::SIGKILL);
        }
    }

    /// What a rank says to its process manager: a line, or a block ([`block_text`]).
    fn handle_question(&mut self, index: usize, line: &str) {
        let is_ward = self.is_ward();
        let rank = &mut self.ranks[index];
        let number = rank.rank;
        let had_room = rank.again.as_ref().is_some_and(|again| !again.has_asked_too_much());
        let asked = rank.again.as_mut().map_or(Asked::New, |again| again.ask(line));
        if had_room && rank.again.as_ref().is_some_and(Again::has_asked_too_much) {
            self.parent.send(&Message::Note { text: asked_too_much(number) });
        }
        match asked {
            Asked::New => {
                if is_ward && rank.again.is_some() {
                    self.tell_known(index);
                    let talk = Talk::Asked { rank: number, question: line.to_string() };
                    self.parent.send(&Message::Talk(Box::new(talk)));
                }
                if let Some(group) = self.groups.get_mut(&self.ranks[index].group) {
                    group.server.handle_question(number, line);
                }
                if is_answered_later(line) {
                    self.reply(number, "");
                }
            }
            Asked::Known(answer) => {
                if let Some(pmi) = &mut rank.pmi {
                    pmi.send(&answer);
                }
            }
            Asked::Awaited => (),
            Asked::Other { before } => {
                let again = rank.again.as_ref();
                let (start, asked) = again.map_or((0, 0), |it| (it.starts, it.standing().0));
                self.fail(format!(
                    "start {start} of rank {number} does not repeat what was done before: as question {asked} it asked its \
                     process manager {line:?}, before {before:?}"
                ));
            }
        }
    }

    fn start_rank(&mut self, job: &Job, node: &Node, start: &Start) -> Result<()> {
        let rank = LocalRank::start(job, node, &self.relay_address, start)?;
        self.exits.watch(rank.pid);
        self.parent.send(&alive(&rank, true));
        self.ranks.push(rank);
        Ok(())
    }

    /// Starts the part of a new group that is here, and hands the order on to those below.
    pub(super) fn handle_order(&mut self, order: Order) {
        let Some(assignment) = self.assignment.take() else { return };
        if self.phase == Phase::Working {
            self.refuse_for_the_lost(&order);
            let children = self.hand_on(&order);
            let group = Group::spawned(&assignment.job, &assignment.node, &order, &children);
            self.groups.insert(order.group, group);
            if order.on(&assignment.node).next().is_some() {
                let problem = match self.start_group(&assignment, &order) {
                    Ok(()) => String::new(),
                    Err(error) => format!("on node {}: {error:#}", assignment.node.name),
                };
                self.parent.send(&Message::Started { group: order.group, problem });
            }
        }
        self.assignment = Some(assignment);
    }

    /// The launcher does not know yet that a node is lost, and wants processes there.
    fn refuse_for_the_lost(&mut self, order: &Order) {
        let lost = self.children.iter().filter(|child| child.is_lost);
        for child in lost.filter(|child| order.below(&child.node).next().is_some()) {
            let problem = format!("node {} is lost", child.node.name);
            self.parent.send(&Message::Started { group: order.group, problem });
        }
    }

    /// The agents below that take part.
    fn hand_on(&mut self, order: &Order) -> Vec<usize> {
        let mut children = Vec::new();
        let all = self.children.iter_mut().enumerate();
        for (index, child) in all.filter(|(_, child)| !child.is_lost) {
            let blocks = order.below(&child.node).map(|block| (order.group, block.indices()));
            let before = child.spawned.len();
            child.spawned.extend(blocks);
            if child.spawned.len() > before {
                child.process.link.send(&Message::Order(Box::new(order.clone())));
                children.push(index);
            }
        }
        children
    }

    fn start_group(&mut self, assignment: &Assignment, order: &Order) -> Result<()> {
        let Assignment { job, node } = assignment;
        let plans = order.on(node).map(|block| {
            let task = &order.tasks[block.appnum as usize];
            Ok((block, task, self.plan(task, job, node)?))
        });
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let own: u32 = plans.iter().map(|(block, ..)| block.count).sum();
        let living = self.ranks.iter().filter(|rank| rank.ending.is_none()).count() as u32;
        for (block, task, plan) in plans {
            for (number, index) in block.indices().enumerate() {
                let start = Start {
                    group: order.group,
                    index,
                    rank: block.first_rank + number as u32,
                    size: order.size,
                    task,
                    plan: &plan,
                    neighbours: Some(living + own),
                    incarnation: None,
                    clocks: None,
                    board: new_board(),
                    has_images: false,
                    pid: None,
                };
                self.start_rank(job, node, &start)?;
            }
        }
        Ok(())
    }

    /// Ends what has been started of a group that did not come up in whole.
    pub(super) fn revoke(&mut self, number: u32) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        group.revoked = true;
        for child in group.server.children() {
            self.children[child].process.link.send(&Message::Revoke { group: number });
        }
        let own = self.ranks.iter().filter(|rank| rank.group == number && rank.ending.is_none());
        own.for_each(|rank| sys::kill_group(rank.pid, libc::SIGKILL));
    }

    /// Forgets groups of which nothing is left here or below: a job may spawn for a long time.
    pub(super) fn retire_groups(&mut self) {
        let ranks = &self.ranks;
        let is_over = |number: u32, group: &Group| {
            let own = || ranks.iter().filter(|rank| rank.group == number);
            number != 0 && (group.revoked || group.living == 0) && own().all(|rank| rank.reported)
        };
        let over: Vec<u32> = self
            .groups
            .iter()
            .filter(|&(&number, group)| is_over(number, group))
            .map(|(&number, _)| number)
            .collect();
        for number in over {
            self.remove_files(number);
            self.groups.remove(&number);
            self.ranks.retain(|rank| rank.group != number);
            for child in &mut self.children {
                child.spawned.retain(|&(group, _)| group != number);
            }
        }
    }

    /// What killed ranks of a group have left in shared memory.
    pub(super) fn remove_files(&self, number: u32) {
        let Some(group) = self.groups.get(&number) else { return };
        let own =
            |rank| self.ranks.iter().any(|local| local.group == number && local.group_rank == rank);
        cleanup::remove_mpich_files(group.server.kvsname(), own);
    }

    pub(super) fn report_ending(&mut self, number: u32, rank: u32, ending: Ending) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        // The server knows what any start of it has said, and the rank itself what the last one has.
        let local = self.ranks.iter().find(|local| (local.group, local.rank) == (number, rank));
        let again = local.and_then(|local| local.again.as_ref());
        let stage = again.map_or_else(|| group.server.stage(rank), Again::stage);
        group.handle_ended(rank);
        if !group.revoked {
            self.parent.send(&Message::Exited { group: number, rank, ending, stage });
        }
    }

    pub(super) fn report_stuck(&mut self) {
        let mut groups = self.groups.values().filter(|group| !group.revoked);
        let stuck = groups.find_map(|group| group.server.stuck());
        if let (Some(rank), false) = (stuck, self.stuck_sent) {
            self.stuck_sent = true;
            self.parent.send(&Message::Stuck { rank });
        }
    }

    // --- being their process manager

    pub(super) fn handle_pmi(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let Some(pmi) = &mut rank.pmi else { return };
        let number = rank.rank;
        let mut lines_of = Vec::new();
        match pmi.read() {
            Ok(inputs) => {
                for input in inputs {
                    match input {
                        Input::Line(line) => lines_of.push(line),
                        Input::Block(lines) => lines_of.push(block_text(&lines)),
                    }
                }
            }
            Err(error) => {
                rank.pmi = None;
                self.fail(format!(
                    "rank {number} spoke no PMI-1 to its process manager: {error:?}"
                ));
                return;
            }
        }
        for line in lines_of {
            self.handle_contact(index, &line);
            self.handle_question(index, &line);
        }
        if let Some(pmi) = &mut self.ranks[index].pmi {
            pmi.flush();
            if pmi.at_end() {
                self.ranks[index].pmi = None;
            }
        }
    }

    pub(super) fn drain_servers(&mut self) {
        loop {
            let mut groups = self.groups.values_mut();
            match groups.find_map(|group| group.server.poll_event()) {
                Some(event) => self.handle_event(event),
                None => return,
            }
        }
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::Reply { rank, line } => self.reply(rank, &line),
            Event::BarrierUp { group, delta } => {
                self.parent.send(&Message::BarrierUp { group, delta });
            }
            Event::BarrierDown { group, delta } => self.pass_down(group, delta),
            Event::Abort { rank, code, message } => {
                // It wants the job to end, and must not come back.
                let aborting = self.ranks.iter_mut().find(|local| local.rank == rank);
                let again = aborting.and_then(|local| local.again.as_mut());
                again.into_iter().for_each(Again::abort);
                self.hold(rank, code);
                self.parent.send(&Message::Abort { rank, code, message });
            }
            Event::Name { rank, request } => self.parent.send(&Message::Name { rank, request }),
            Event::Spawn { rank, request } => {
                self.parent.send(&Message::Spawn { rank, request: Box::new(request) });
            }
            Event::SpawnRefused { rank, problem } => {
                let text = format!("rank {rank} cannot spawn: {problem}");
                self.parent.send(&Message::Note { text });
            }
        }
    }

    pub(super) fn handle_barrier_down(&mut self, group: u32, delta: Delta) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.server.handle_barrier_down(delta);
        }
    }

    fn pass_down(&mut self, number: u32, delta: Delta) {
        let Some(group) = self.groups.get(&number) else { return };
        let message = Message::BarrierDown { group: number, delta };
        for child in group.server.children() {
            self.children[child].process.link.send(&message);
        }
    }

    pub(super) fn reply(&mut self, rank: u32, line: &str) {
        let is_ward = self.is_ward();
        let Some(local) = self.ranks.iter_mut().find(|local| local.rank == rank) else { return };
        if is_ward && local.again.is_some() {
            let talk = Talk::Heard { rank, answer: line.to_string() };
            self.parent.send(&Message::Talk(Box::new(talk)));
        }
        if local.again.as_mut().is_some_and(|again| !again.answer(line)) {
            return;
        }
        if let Some(pmi) = &mut local.pmi {
            pmi.send(line);
        }
    }

    pub(super) fn deliver_answer(&mut self, rank: u32, line: String) {
        // Its node may be lost: then the next one knows it with the rest.
        self.wards.handle_answer(rank, &line);
        match self.children.iter_mut().find(|child| child.holds(rank)) {
            Some(child) => child.process.link.send(&Message::Answer { rank, line }),
            None => self.reply(rank, &line),
        }
    }
}
