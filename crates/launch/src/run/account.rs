//! What the launcher says about its ranks: where one runs, and to `landbridge ps` how all of them go.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::foot::Standing;
use super::record::Inquiry;
use super::{Child, Launcher, Phase};
use crate::checkpoint::Wish;
use crate::control::order::Task;
use crate::control::{Job, Message, Node};
use crate::groups::Groups;
use crate::ps::desk::{self, Account, Desk, Question};
use crate::ps::paths::{self, Paths};
use crate::ps::record::Record;
use crate::ps::roll::Place;

/// Characters of the program and its arguments that are told.
const PROGRAM_CHARS_MAX: usize = 200;

/// Agents that have not answered after this long are not waited for.
const LOOK_TIME: Duration = Duration::from_millis(1_500);
/// What they have said is told to whoever else asks within this time.
const LOOK_AGE_MAX: Duration = Duration::from_millis(500);
/// So often the line at the foot of a terminal is brought up to date, and relays are asked for it what they keep:
const FOOT_INTERVAL: Duration = Duration::from_secs(2);
/// more seldom by once that time for each so many ranks, for each of which there is a line in the answer.
const FOOT_RANKS: u32 = 1024;

/// What stays the same of an [`Account`], and who is asked for it.
pub(super) struct Counter {
    desk: Desk,
    fixed: Account,
    look: Look,
    inquiry: Inquiry,
    /// When the line at the foot of the terminal is due again, while there is one.
    foot_due: Option<Instant>,
    foot_interval: Duration,
    /// What relays have said last that they keep.
    kept: Option<(u64, u64)>,
}

/// Agents are asked how the paths of their ranks are.
#[derive(Default)]
struct Look {
    serial: u32,
    /// Of agents that have not answered.
    awaited: usize,
    /// By when they are waited for, while they are; then until when it counts.
    until: Option<Instant>,
    paths: Paths,
}

impl Look {
    fn begin(&mut self, agents: usize, now: Instant) -> Message {
        let serial = self.serial.wrapping_add(1).max(1);
        *self = Look { serial, awaited: agents, until: Some(now + LOOK_TIME), ..Look::default() };
        Message::Look { serial, rows_max: paths::rows_for(agents) }
    }

    fn take_in(&mut self, serial: u32, paths: Paths, now: Instant) {
        if serial != self.serial || self.awaited == 0 {
            return;
        }
        self.paths.merge(paths);
        self.awaited -= 1;
        if self.awaited == 0 {
            self.end(now);
        }
    }

    /// Nobody is waited for any more.
    fn end(&mut self, now: Instant) {
        self.paths.hosts_missing = std::mem::take(&mut self.awaited) as u32;
        self.paths.cut(paths::ROWS_MAX);
        self.until = Some(now + LOOK_AGE_MAX);
    }

    fn pass_time(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            match self.awaited {
                0 => self.until = None,
                _ => self.end(now),
            }
        }
    }

    /// What is known, if that is fresh.
    fn found(&self) -> Option<&Paths> {
        (self.awaited == 0 && self.until.is_some()).then_some(&self.paths)
    }
}

fn recovers(job: &Job) -> bool {
    let is_it = |(name, value): &(String, String)| name == "LANDBRIDGE_RECOVER" && value == "on";
    job.environment.iter().any(is_it)
}

impl Counter {
    /// A job runs as well when nobody can ask; `say` hears of it.
    pub fn open(job: &Job, mut say: impl FnMut(&str)) -> Counter {
        let desk = Desk::open(&desk::directory(), &job.id).unwrap_or_else(|error| {
            say(&format!("`landbridge ps` will not show this job: {error:#}"));
            Desk::default()
        });
        let line = |task: &Task| {
            let words = std::iter::once(&task.program).chain(&task.arguments);
            words.map(String::as_str).collect::<Vec<_>>().join(" ")
        };
        let lines: Vec<String> = job.applications.iter().map(|it| line(&it.task)).collect();
        let fixed = Account {
            job: job.id.clone(),
            launcher: std::process::id(),
            program: lines.join(" : ").chars().take(PROGRAM_CHARS_MAX).collect(),
            began: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            recover: recovers(job),
            checkpoints: Wish::find(&job.environment).is_some_and(|_| recovers(job)),
            restarts: 0,
            ranks: Vec::new(),
            paths: None,
            record: None,
        };
        let (look, inquiry) = (Look::default(), Inquiry::default());
        let foot_interval = FOOT_INTERVAL * (1 + job.size / FOOT_RANKS);
        Counter { desk, fixed, look, inquiry, foot_due: None, foot_interval, kept: None }
    }

    /// An agent has said how the paths of its ranks are.
    pub fn handle_paths(&mut self, serial: u32, paths: Paths) {
        self.look.take_in(serial, paths, Instant::now());
    }

    /// An agent has said what its relay keeps.
    pub fn handle_record(&mut self, serial: u32, lines: &str) {
        self.inquiry.take_in(serial, lines, Instant::now());
        self.kept = self.inquiry.found(Question::Log).map(Record::kept).or(self.kept);
    }

    pub fn next_time(&self) -> Option<Instant> {
        let times = self.look.until.into_iter().chain(self.inquiry.next_time());
        times.chain(self.desk.next_time()).chain(self.foot_due).min()
    }

    /// Whether ranks that are killed come back.
    pub fn recovers(&self) -> bool {
        self.fixed.recover
    }

    /// Whether images of ranks are taken.
    pub fn has_images(&self) -> bool {
        self.fixed.checkpoints
    }

    pub fn desk(&self) -> &Desk {
        &self.desk
    }
}

impl Launcher {
    /// Answers those who ask.
    pub(super) fn serve(&mut self) {
        let (groups, children, roll) = (&self.groups, &self.children, &self.roll);
        let Counter { desk, fixed, look, inquiry, .. } = &mut self.counter;
        let now = Instant::now();
        look.pass_time(now);
        inquiry.pass_time(now);
        let (is_wanted, wanted) = (Cell::new(false), Cell::new(None));
        let mut images = Vec::new();
        let to_take = RefCell::new(&mut images);
        desk.serve(now, |question| {
            let (mut paths, mut record, mut kept) = (None, None, None);
            match question {
                Question::Roll if fixed.recover => {
                    kept = inquiry.found(Question::Log);
                    if kept.is_none() && inquiry.is_near(Question::Log) {
                        wanted.set(Some(Question::Log));
                        return None;
                    }
                }
                Question::Roll => (),
                // It is answered now, so this is once for each who asks.
                Question::Checkpoint { rank } => to_take.borrow_mut().push(rank),
                Question::Paths => {
                    is_wanted.set(true);
                    paths = Some(look.found()?.clone());
                }
                Question::Log | Question::Story { .. } => {
                    if let Some(found) = inquiry.found(question) {
                        record = Some(found.clone());
                    } else {
                        wanted.set(Some(question));
                        return None;
                    }
                }
            }
            Some(Account {
                restarts: roll.counts().restarts,
                ranks: roll.lines(
                    now,
                    |rank| whereabouts(groups, children, rank),
                    |rank| kept.and_then(|kept| kept.kept_of(rank)),
                ),
                paths,
                record,
                ..fixed.clone()
            })
        });
        if is_wanted.get() && look.until.is_none() {
            let agents = children.iter().map(|child| child.node.hosts().len()).sum();
            let message = look.begin(agents, now);
            self.send_to_all(&message);
        }
        if self.is_foot_due(now) {
            wanted.set(wanted.get().or(Some(Question::Log)));
            self.show_status();
        }
        for rank in images {
            self.take_images(rank);
        }
        let inquiry = &mut self.counter.inquiry;
        // Who asks something else is next when this has become old.
        if let (Some(question), true) = (wanted.get(), inquiry.is_idle()) {
            let message = inquiry.begin(question, self.children.len(), now);
            self.send_to_all(&message);
        }
    }

    /// Somebody wants an image of a rank, or of all, now.
    pub(super) fn take_images(&mut self, rank: Option<u32>) {
        if !self.counter.has_images() {
            self.output
                .say("no checkpoints are taken of this job: it was started without --checkpoint");
        } else if self.phase == Phase::Running {
            self.send_to_all(&Message::TakeImages { rank });
        }
    }

    /// Whether it is time to bring the line at the foot of the terminal up to date, if there is one.
    fn is_foot_due(&mut self, now: Instant) -> bool {
        let has_foot = self.has_foot();
        let Counter { foot_due, foot_interval, .. } = &mut self.counter;
        let is_due = has_foot && foot_due.is_none_or(|due| due <= now);
        if is_due || !has_foot {
            *foot_due = has_foot.then(|| now + *foot_interval);
        }
        is_due
    }

    /// Whether somebody sees how things stand while ranks may come back.
    fn has_foot(&self) -> bool {
        self.counter.fixed.recover && self.phase == Phase::Running && self.output.is_terminal()
    }

    /// Says at the foot of the terminal how things stand, if ranks that are killed come back.
    pub(super) fn show_status(&mut self) {
        let now = Instant::now();
        let text = self.has_foot().then(|| {
            let (counts, coming_back) = (self.roll.counts(), self.roll.coming_back());
            let (kept, images) = (self.counter.kept, self.roll.ages(now));
            Standing { counts, coming_back, kept, images }.text()
        });
        self.output.set_status(text);
    }

    pub(super) fn place(&self, rank: u32) -> String {
        place(&self.groups, &self.children, rank)
    }

    /// A name for the node of a rank that no other node has.
    pub(super) fn node_of(&self, rank: u32) -> String {
        match whereabouts(&self.groups, &self.children, rank) {
            Place { node, .. } if node.is_empty() => String::new(),
            Place { node, cluster, .. } => format!("{cluster}/{node}"),
        }
    }
}

fn whereabouts(groups: &Groups, children: &[Child], rank: u32) -> Place {
    if let (Some(name), Some((_, node, cluster))) = (groups.name(rank), groups.place_of(rank)) {
        return Place { rank: name, node: node.to_string(), cluster: cluster.to_string() };
    }
    let node = children.iter().find_map(|child| find_node(&child.node, rank));
    let (node, cluster) =
        node.map_or_else(Default::default, |node| (node.name.clone(), node.cluster_name.clone()));
    Place { rank: rank.to_string(), node, cluster }
}

/// Where a rank runs, for the user.
pub(super) fn place(groups: &Groups, children: &[Child], rank: u32) -> String {
    let spawned = groups.place_of(rank).map(|(name, ..)| name);
    let Place { node, cluster, .. } = whereabouts(groups, children, rank);
    let name = spawned.unwrap_or_else(|| format!("rank {rank}"));
    match children.len() {
        _ if node.is_empty() => name,
        1 => format!("{name} on node {node}"),
        _ => format!("{name} on node {node} (cluster {cluster})"),
    }
}

fn find_node(node: &Node, rank: u32) -> Option<&Node> {
    let own = node.first_rank..node.first_rank + node.rank_count;
    if own.contains(&rank) {
        return Some(node);
    }
    node.children.iter().find_map(|child| find_node(child, rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_ends_when_all_have_answered_or_had_their_time() {
        let (mut look, now) = (Look::default(), Instant::now());
        let said = || Paths { ranks: 1, ..Paths::default() };
        look.begin(2, now);
        assert_eq!(look.found(), None);
        look.take_in(1, said(), now);
        look.take_in(7, said(), now);
        assert_eq!(look.found(), None, "one is missing");
        look.take_in(1, said(), now);
        assert_eq!(look.found().map(|paths| (paths.ranks, paths.hosts_missing)), Some((2, 0)));
        look.pass_time(now + LOOK_AGE_MAX);
        assert_eq!(look.found(), None, "it is old");
        look.begin(2, now);
        look.take_in(2, said(), now);
        look.pass_time(now + LOOK_TIME);
        assert_eq!(look.found().map(|paths| (paths.ranks, paths.hosts_missing)), Some((1, 1)));
    }
}
