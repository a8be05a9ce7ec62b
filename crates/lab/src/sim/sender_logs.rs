//! Simulated processes that crash and replay from the logs of their senders, under a seed.
//!
//! One to three nodes have a memory file each, and two to five processes run on them. The logs are
//! those of the provider ([`landbridge_drive::link::node_log`]), in real memory; agents, transports
//! and programs are simulated. Programs ([`process`]) send each other messages of all sizes, and
//! live polls deliver as many frames as chance has it. Any process may be killed behind any of its
//! actions, or between two stores of one, together with others, and while it replays. Transports
//! between nodes end at any moment and lose what is under way.
//!
//! Images of processes are taken at random times. A new incarnation then begins with the newest
//! image or the one before, and the agents release what the older ones of both sides cover.
//!
//! Some processes have so little memory that they discard logs that an incarnation may need. Such
//! an incarnation must refuse to begin, which ends the job.
//!
//! In some runs whole nodes are lost, with their files. A keeper gets deliveries and polls from the
//! agents. It is the launcher, or the agent of a relay's host, and never lost here: with it the job
//! ends (docs/RECOVERY-INSIDE.md, "What may be lost"). All processes of a lost node begin again on
//! another one, with their programs or with images that the keeper knows, and no other process may
//! have seen what they do not do again. The lost ones may go on for a while, and what they still
//! send to others that know of the new ones counts nowhere. If an image cannot be read, those that
//! are left may not fit together, which ends the job.
//!
//! In others the processes of a node are a recovery unit: if one is killed, all are ended and begin
//! again, with their programs or a round of images.
//!
//! What may never happen: a new incarnation sees other events, or the same events in another order,
//! than the one before, or sends other frames; a message is lost, duplicated, changed or overtaken
//! by a later message of its source.
//!
//! | module | holds |
//! |---|---|
//! | `node` | the memory file of a node, and its agent |
//! | `carrier` | frames that the agents carry between nodes |
//! | `network` | transports, and messages between them |
//! | `memory` | what the logs take where there is little memory |
//! | `torn` | what a kill between two stores leaves behind |
//! | `process` | a process that may be killed |
//! | `fenced` | nodes that are lost and go on living for a while |
//! | `losses` | nodes that are lost, and what a keeper has of them |
//! | `units` | processes of a node that begin again together |

mod carrier;
mod fenced;
mod losses;
mod memory;
mod network;
mod node;
mod process;
mod torn;
mod units;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::log::contact::Contact;

use super::random::Random;
use super::{EventCounts, Violation, require};
use carrier::CarriedFrames;
use losses::{ImageNotice, KeptImage, NodeLosses};
use memory::{UnreadBytes, check_memory};
use network::{Network, Transport, TransportName};
use node::SimulatedNode;
use process::{Chance, LoggedProcess, LoggedTask, ProcessImage, ReceivedMessage, StepEnd};
use units::UnitRounds;

/// Steps of a run at most.
const STEPS_MAX: usize = 400_000;
/// Images of a process that are kept at most.
const IMAGES_MAX: usize = 2;
/// Memory for the logs of a process, in bytes: enough; so little that logs inside a unit use small
/// segments again; and so little that most logs are discarded.
const LOG_MEMORY: u64 = 1 << 30;
const SMALL_LOG_MEMORY: u64 = 60_000;
const TIGHT_LOG_MEMORY: u64 = 40_000;

/// A fault that the simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFault {
    /// A delivery is not noted.
    UnnotedDelivery,
    /// Logs are released although the receiver's images need them.
    ReleasedTooFar,
    /// Frames leave a node before the keeper knows what they depend on.
    LeavesAtOnce,
    /// The keeper gets the processes of a node one by one, and not all at one moment.
    SplitCut,
    /// The keeper knows an image before it knows what the image depends on.
    ImageBeforeCut,
    /// Agents carry frames before the keeper knows what they depend on.
    CarriedBeforeCut,
    /// Logs inside of a recovery unit are written over while its images are taken.
    UnitKeepsNothing,
    /// A process of a recovery unit begins again with an older round of images than the others.
    MixedRounds,
    /// Processes take messages of a transport on a lost node for those of the newest one.
    TakesFromTheFenced,
    /// A frame is announced before all of it is there.
    AnnouncedTooEarly,
}

impl LogFault {
    /// Nodes are lost in runs with this fault.
    fn loses_nodes(self) -> bool {
        let on_one_node =
            [LogFault::UnnotedDelivery, LogFault::ReleasedTooFar, LogFault::AnnouncedTooEarly];
        !on_one_node.contains(&self) && !self.has_units()
    }

    /// Processes of a node begin again together in runs with this fault.
    fn has_units(self) -> bool {
        matches!(self, LogFault::UnitKeepsNothing | LogFault::MixedRounds)
    }
}

/// One rank, over all of its incarnations.
struct LoggedRank {
    task: LoggedTask,
    node: usize,
    running: Option<(LoggedProcess, Transport)>,
    /// Polls that incarnations have made.
    polls: u64,
    /// Events that the furthest incarnation has seen.
    events: Vec<ReceivedMessage>,
    /// The newest images, oldest first.
    images: Vec<ProcessImage>,
    images_taken: u64,
    /// Something was released, so no incarnation begins with the program.
    has_released: bool,
    /// The images that the keeper knows, oldest first.
    kept_images: Vec<KeptImage>,
    /// How often it has moved to another node.
    moves: u32,
    /// What readers of its logs did not have at most.
    most_unread: UnreadBytes,
    /// What the keeper knows: deliveries, and polls.
    kept: (Vec<u8>, u64),
}

/// What is on the way from agents to those of other nodes.
#[derive(Default)]
struct AgentTraffic {
    /// Node, process, contact.
    contacts: Vec<(usize, usize, Contact)>,
    frames: Vec<CarriedFrames>,
    images: Vec<ImageNotice>,
}

/// How often something happens, in a thousand steps of a process.
struct EventRates {
    kills: u64,
    images: u64,
    replaced_transports: u64,
}

impl EventRates {
    fn new(random: &mut Random, planted: Option<LogFault>, has_units: bool) -> EventRates {
        let (kills, images) = match planted {
            Some(LogFault::LeavesAtOnce | LogFault::SplitCut | LogFault::CarriedBeforeCut) => {
                (20, 0)
            }
            Some(_) => (20, 50),
            // A round is whole only if all processes of a node live long enough.
            None if has_units => (random.pick(&[1, 5]), random.pick(&[0, 50, 200])),
            None => (random.pick(&[1, 5, 20, 100]), random.pick(&[0, 1, 10, 30])),
        };
        EventRates { kills, images, replaced_transports: random.pick(&[0, 1, 10]) }
    }
}

struct LogWorld {
    random: Random,
    nodes: Vec<SimulatedNode>,
    ranks: Vec<LoggedRank>,
    network: Network,
    between_agents: AgentTraffic,
    losses: NodeLosses,
    units: UnitRounds,
    bytes_max: u64,
    rates: EventRates,
    kills_left: u32,
    planted: Option<LogFault>,
    /// A killed process cannot be restarted, so the job has ended.
    has_ended: bool,
    counts: EventCounts,
    trace: bool,
}

/// Runs one seed.
pub fn run(seed: u64, trace: bool) -> Result<EventCounts, Violation> {
    run_with(seed, trace, None)
}

/// Runs one seed with this fault.
fn run_with(seed: u64, trace: bool, planted: Option<LogFault>) -> Result<EventCounts, Violation> {
    let mut world = LogWorld::new(seed, trace, planted).map_err(|error| failed(&error))?;
    for _ in 0..STEPS_MAX {
        if world.has_ended {
            world.counts.count("jobs ended by too little memory");
            return Ok(world.counts);
        }
        if world.is_done() {
            return Ok(world.counts);
        }
        world.step()?;
    }
    let states = world.ranks.iter().map(|rank| match &rank.running {
        Some((process, transport)) => process.state(rank.polls) + &transport.state(&process.logs),
        None => "killed".to_string(),
    });
    Err(Violation(format!("the programs never end: {}", states.collect::<Vec<_>>().join("; "))))
}

impl LogWorld {
    fn new(seed: u64, trace: bool, planted: Option<LogFault>) -> io::Result<LogWorld> {
        // Doorbells have names in the system, which other runs must not have at the same time.
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let mut random = Random::new(seed);
        let is_lossy = planted.is_some_and(LogFault::loses_nodes);
        let node_count = if is_lossy { 2 } else { random.pick(&[1, 1, 2, 3]) };
        let count = if is_lossy { 5 } else { random.within(2..=5) as usize };
        let bytes_max = random.pick(&[10, 500, 3_000, 20_000]);
        let each = random.pick(&[3, 20, 60]).min(400_000 / bytes_max);
        let (bytes_max, each) = if planted.is_some() { (3_000, 60) } else { (bytes_max, each) };
        let rank = |index: usize| LoggedRank {
            task: LoggedTask { index, count, each, bytes_max, seed, planted },
            node: index % node_count,
            running: None,
            polls: 0,
            events: Vec::new(),
            images: Vec::new(),
            images_taken: 0,
            has_released: false,
            kept_images: Vec::new(),
            moves: 0,
            most_unread: UnreadBytes::new(),
            kept: (Vec::new(), 0),
        };
        let ranks: Vec<LoggedRank> = (0..count).map(rank).collect();
        let is_moving = is_lossy || planted.is_none() && seed % 4 == 1;
        let moving: Vec<usize> = if is_moving { (0..count).collect() } else { Vec::new() };
        let waits = is_moving && planted != Some(LogFault::LeavesAtOnce);
        let node = |number: usize| {
            let local = ranks.iter().filter(|rank| rank.node == number);
            let local = local.map(|rank| rank.task.index).collect::<Vec<_>>();
            SimulatedNode::new(job_name(run, number), (&local, &moving), waits)
        };
        let has_units = planted.map_or(seed % 4 == 2, LogFault::has_units);
        let log_memory = log_memory(seed, planted, has_units);
        let mut world = LogWorld {
            nodes: (0..node_count).map(node).collect::<io::Result<_>>()?,
            ranks,
            network: Network::default(),
            between_agents: AgentTraffic::default(),
            losses: NodeLosses {
                cuts: Vec::new(),
                may_be: is_moving,
                // What was discarded is in no image.
                has_torn: log_memory < LOG_MEMORY,
                whole_bytes_max: random.pick(&[0, 10_000]),
                left: if is_moving { random.pick(&[1, 2, 5]) } else { 0 },
                nodes_made: node_count,
                run,
                fenced: Vec::new(),
            },
            units: UnitRounds::new(has_units),
            bytes_max: log_memory,
            rates: EventRates::new(&mut random, planted, has_units),
            kills_left: if planted.is_some() { 30 } else { random.pick(&[1, 3, 10, 30]) },
            planted,
            has_ended: false,
            random,
            counts: EventCounts::default(),
            trace,
        };
        prepare_nodes(&mut world, is_moving)?;
        Ok(world)
    }

    fn log_step(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{}", what());
        }
    }

    fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.running.as_ref().is_some_and(|(it, _)| it.is_done()))
    }

    fn step(&mut self) -> Result<(), Violation> {
        let rank = self.random.index(self.ranks.len());
        match self.ranks[rank].running.is_some() {
            false if self.random.percent(20) => self.start(rank)?,
            false => (),
            true => self.work(rank)?,
        }
        if !self.network.is_empty() && self.random.percent(70) {
            self.deliver_message()?;
        }
        if !self.between_agents.contacts.is_empty() && self.random.percent(30) {
            self.deliver_contact()?;
        }
        if self.random.percent(20) {
            self.carry()?;
        }
        if !self.between_agents.images.is_empty() && self.random.percent(20) {
            self.deliver_image_notice()?;
        }
        let node = self.random.index(self.nodes.len());
        if self.random.percent(20) {
            self.cut(node)?;
        }
        if self.random.percent(20) {
            self.deliver_cut(node)?;
        }
        if self.losses.left > 0 && self.random.below(1_000) < 2 {
            self.lose_node(node)?;
        }
        if !self.losses.fenced.is_empty() && self.random.percent(50) {
            self.work_fenced()?;
        }
        Ok(())
    }

    /// The agents carry what some process lacks of the log of a process of another node; or what
    /// they have carried arrives, some of it late, some of it twice.
    fn carry(&mut self) -> Result<(), Violation> {
        let [from, to] = [0; 2].map(|_| self.random.index(self.ranks.len()));
        let [sender, receiver] = [from, to].map(|rank| self.ranks[rank].node);
        if self.random.percent(50) && sender != receiver {
            let is_late = self.random.percent(20);
            let ends = ((&self.nodes[sender], from), (&self.nodes[receiver], to));
            let missing = carrier::missing_frames(ends.0, ends.1, is_late);
            let missing = missing.map_err(|error| failed(&error))?;
            match missing {
                Some(carried)
                    if self.losses.may_be && self.planted != Some(LogFault::CarriedBeforeCut) =>
                {
                    self.carry_after_cut(sender, carried)?;
                }
                missing => self.between_agents.frames.extend(missing),
            }
        }
        if !self.between_agents.frames.is_empty() && self.random.percent(50) {
            let place = self.random.index(self.between_agents.frames.len());
            let node = self.ranks[self.between_agents.frames[place].to].node;
            let carried = &self.between_agents.frames[place];
            let is_put = carrier::put_into_mailbox(&mut self.nodes[node], carried);
            if is_put.map_err(|error| failed(&error))? {
                self.counts.count("frames carried by agents");
            }
            if self.random.percent(80) {
                self.between_agents.frames.swap_remove(place);
            }
        }
        Ok(())
    }

    // --- processes

    fn start(&mut self, rank: usize) -> Result<(), Violation> {
        let image = self.newest_image(rank);
        let it = &self.ranks[rank];
        let node = &self.nodes[it.node];
        let process = match &image {
            Some(image) => LoggedProcess::restore(image, node.file()),
            None => LoggedProcess::begin(it.task, &node.job, self.bytes_max, node.file()),
        };
        self.log_step(|| format!("{rank} begins with image {:?}", image.map(|it| it.number)));
        let moves = it.moves;
        let process = match process {
            Ok(mut process) => {
                if moves > 0 || self.units.may_be {
                    process.awaits_frames();
                }
                process
            }
            Err(error) if is_discarded(&error) && self.bytes_max < LOG_MEMORY => {
                self.has_ended = true;
                return Ok(());
            }
            Err(error) => return Err(failed(&error)),
        };
        self.open_transport(rank, process)
    }

    /// The image with which the next incarnation begins: the newest, or the one before if the
    /// newest is torn; `None` for a start with the program.
    fn newest_image(&mut self, rank: usize) -> Option<ProcessImage> {
        let it = &mut self.ranks[rank];
        if self.units.may_be {
            return it.images.last().cloned();
        }
        let is_kept = !it.kept_images.is_empty();
        if !it.has_released && !is_kept && self.random.percent(10) {
            // An older image is of no use any more, and must not be released from.
            it.images.clear();
            return None;
        }
        if it.images.len() == IMAGES_MAX && self.random.percent(20) {
            let torn = it.images.pop().map(|image| image.number);
            it.kept_images.retain(|kept| Some(kept.image.number) != torn);
            self.losses.has_torn |= is_kept;
            self.counts.count("images torn");
        }
        let image = it.images.last()?;
        self.counts.count("restores from an image");
        Some(image.clone())
    }

    /// Opens the transport of a process, which its agent makes known to other nodes.
    fn open_transport(&mut self, rank: usize, process: LoggedProcess) -> Result<(), Violation> {
        let it = &mut self.ranks[rank];
        let transport = Transport::open(rank, it.moves, &process.logs);
        it.running = Some((process, transport));
        let contact = self.nodes[it.node].contact(rank).map_err(|error| failed(&error))?;
        let Some(contact) = contact else {
            return Err(Violation(format!("{rank} has no contact")));
        };
        let others = (0..self.nodes.len()).filter(|node| *node != it.node);
        self.between_agents.contacts.extend(others.map(|node| (node, rank, contact)));
        Ok(())
    }

    fn work(&mut self, rank: usize) -> Result<(), Violation> {
        let is_killed = self.kills_left > 0 && self.random.below(1_000) < self.rates.kills;
        let torn = if is_killed { self.draw_torn_append() } else { None };
        let file = self.nodes[self.ranks[rank].node].file();
        let chance = Chance {
            frames_max: self.random.pick(&[0, 1, 1, 2, 10]),
            micros: self.random.pick(&[0, 0, 0, 1, 500]),
            dies_after: is_killed.then(|| self.random.below(6) + 1),
            torn: torn.map(|torn| (file, torn)),
        };
        let it = &mut self.ranks[rank];
        let Some((process, transport)) = &mut it.running else { return Ok(()) };
        let known = it.events.len();
        let end = process.step(&chance, it.polls)?;
        if end != (StepEnd::Killed { is_noted: false }) {
            let seen = process.events();
            let both = known.min(seen.len());
            require!(it.events[..both] == seen[..both], "{rank} sees something else");
            it.events.extend_from_slice(&seen[both..]);
        }
        let is_again = process.is_replaying(it.polls);
        it.polls = it.polls.max(process.polls());
        if is_killed {
            let is_between = end == StepEnd::Killed { is_noted: false };
            return self.kill(rank, is_between, is_again);
        }
        let progress = transport.progress(&mut process.logs, &mut self.network);
        if progress.as_ref().is_err_and(|why| self.losses.is_unfit(why)) {
            self.counts.count("jobs ended by images that do not fit together");
            self.has_ended = true;
            return Ok(());
        }
        progress?;
        let has_discarded = process.logs.take_discard_notice().is_some();
        check_memory(self, rank)?;
        if has_discarded {
            self.counts.count("logs discarded");
        }
        if self.random.below(1_000) < self.rates.replaced_transports {
            self.replace_transport(rank)?;
        }
        let wants_image = self.nodes[self.ranks[rank].node].take_image_wish(rank);
        let wants_image = wants_image.map_err(|error| failed(&error))? && self.random.percent(30);
        let is_due = wants_image || self.random.below(1_000) < self.rates.images;
        if is_again {
            return Ok(());
        }
        if self.units.may_be {
            return match self.joins_round(rank, is_due)? {
                true => self.take_image_of_round(rank),
                false => Ok(()),
            };
        }
        if is_due { self.take_image(rank) } else { Ok(()) }
    }

    fn kill(&mut self, rank: usize, is_between: bool, is_again: bool) -> Result<(), Violation> {
        self.kills_left -= 1;
        self.counts.count("processes killed");
        if is_between {
            self.counts.count("processes killed before their delivery was noted");
        }
        if is_again {
            self.counts.count("processes killed during replay");
        }
        let Some((process, transport)) = self.ranks[rank].running.take() else { return Ok(()) };
        self.counts.add_some("deliveries replayed", process.replayed);
        self.counts.add_some("appends torn by a kill", process.has_torn_append.into());
        self.tear_words((rank, &process.logs), is_between).map_err(|error| failed(&error))?;
        self.lose_messages(&transport);
        self.log_step(|| format!("{rank} is killed"));
        match self.units.may_be {
            true => self.roll_back(self.ranks[rank].node),
            false => Ok(()),
        }
    }

    fn take_image(&mut self, rank: usize) -> Result<(), Violation> {
        let it = &mut self.ranks[rank];
        let Some((process, transport)) = it.running.take() else { return Ok(()) };
        let node = &mut self.nodes[it.node];
        it.images_taken += 1;
        let number = it.images_taken;
        let taken = process.take_image(number, node.file());
        let (process, image) = taken.map_err(|error| failed(&error))?;
        node.note_image(rank, number).map_err(|error| failed(&error))?;
        let whole_max = self.losses.whole_bytes_max;
        let logs = self.losses.may_be.then(|| node.image_logs(rank, number, whole_max)).transpose();
        let logs = logs.map_err(|error| failed(&error))?;
        if let Some((logs, _)) = &logs {
            // Its own agent knows before the keeper does.
            node.add_image(rank, number, logs.positions.clone());
        }
        let kept = logs.map(|(logs, frames)| KeptImage { image: image.clone(), logs, frames });
        it.images.push(image);
        self.counts.count("images taken");
        if it.images.len() > IMAGES_MAX {
            it.images.remove(0);
        }
        if it.images.len() == IMAGES_MAX {
            let is_too_far = self.planted == Some(LogFault::ReleasedTooFar);
            let oldest = it.images[0].number;
            let released =
                node.release(rank, oldest, is_too_far).map_err(|error| failed(&error))?;
            it.has_released = true;
            self.counts.add_some("logs released", released as u64);
        }
        self.lose_messages(&transport);
        self.log_step(|| format!("image {number} of {rank}"));
        match kept {
            Some(kept) if self.planted == Some(LogFault::ImageBeforeCut) => {
                self.keep_image(rank, kept);
            }
            Some(kept) => {
                let own = self.ranks[rank].node;
                self.send_cut(own, 0, &self.local(own), Some((rank, kept)))?;
            }
            None => (),
        }
        self.open_transport(rank, process)
    }

    // --- transports

    fn replace_transport(&mut self, rank: usize) -> Result<(), Violation> {
        let Some((process, transport)) = self.ranks[rank].running.take() else { return Ok(()) };
        self.counts.count("transports replaced");
        self.lose_messages(&transport);
        self.open_transport(rank, process)
    }

    fn lose_messages(&mut self, ended: &Transport) {
        self.lose_messages_of(ended.name());
    }

    fn lose_messages_of(&mut self, ended: TransportName) {
        let lost = self.network.lose(ended, &mut self.random);
        self.counts.add_some("messages lost with their transport", lost as u64);
    }

    fn deliver_message(&mut self) -> Result<(), Violation> {
        let Some((to, mut message)) = self.network.take_any(&mut self.random) else {
            return Ok(());
        };
        let receiver = self.ranks[to.0].running.as_mut();
        let Some((process, transport)) = receiver.filter(|(_, it)| it.name() == to) else {
            return self.deliver_to_fenced(to, &message);
        };
        if let Some(newest) = transport.fencing_generation(&message) {
            self.counts.count("messages of lost nodes that count nowhere");
            if self.planted == Some(LogFault::TakesFromTheFenced) {
                message.disguise(newest);
            }
        }
        let handled = transport.handle(&message, &mut process.logs);
        if handled.as_ref().is_err_and(|why| self.losses.is_unfit(why)) {
            self.counts.count("jobs ended by images that do not fit together");
            self.has_ended = true;
            return Ok(());
        }
        let bytes = handled?;
        self.counts.add_some("bytes between nodes", bytes as u64);
        Ok(())
    }

    /// Contacts of one process arrive in any order.
    fn deliver_contact(&mut self) -> Result<(), Violation> {
        let place = self.random.index(self.between_agents.contacts.len());
        let (node, process, contact) = self.between_agents.contacts.swap_remove(place);
        self.nodes[node].note_contact(process, &contact).map_err(|error| failed(&error))
    }
}

/// Memory for the logs of each process, in bytes.
fn log_memory(seed: u64, planted: Option<LogFault>, has_units: bool) -> u64 {
    match planted {
        Some(LogFault::UnitKeepsNothing) => SMALL_LOG_MEMORY,
        Some(_) => LOG_MEMORY,
        // A quarter of the runs that lose nodes, or have units, are among these.
        None if seed.is_multiple_of(4) || [5, 6].contains(&(seed % 16)) => TIGHT_LOG_MEMORY,
        None if has_units && seed.is_multiple_of(3) => SMALL_LOG_MEMORY,
        None => LOG_MEMORY,
    }
}

/// Writes what the agents know at the beginning. `is_moving`: nodes are lost.
fn prepare_nodes(world: &mut LogWorld, is_moving: bool) -> io::Result<()> {
    let has_units = world.units.may_be;
    let takes_images = world.rates.images > 0 || is_moving || has_units;
    for node in 0..world.nodes.len() {
        if has_units {
            world.nodes[node].set_unit(&world.local(node))?;
        }
        if !takes_images {
            world.nodes[node].set_without_images()?;
        }
    }
    world.counts.add_some("runs without images", (!takes_images).into());
    Ok(())
}

/// The name of the job on one of the nodes of a run.
fn job_name(run: u64, node: usize) -> String {
    format!("sim-{}-{run}-{node}", std::process::id())
}

/// Whether an incarnation refuses to begin because what it needs was discarded.
fn is_discarded(error: &io::Error) -> bool {
    error.to_string().contains("are not kept any more")
}

fn failed(error: &io::Error) -> Violation {
    Violation(format!("{error}"))
}

#[cfg(test)]
mod tests;
