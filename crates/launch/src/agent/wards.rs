//! What an agent keeps of the ranks of the agents below it, so that they can go on elsewhere: what they have said to their process
//! manager with the answers, what they have printed, how often they have been started.
//!
//! Pure. What the agents below say enters, in their order; a [`Moving`] for each rank leaves. All that others have seen of a rank
//! came after what is kept here.
//!
//! Questions, and what becomes of them when the node is lost before the answer is there. A rank asks one at a time, so the place of
//! a question in its record is its number, whichever start asks it.
//!
//! | question | who answers | then |
//! |---|---|---|
//! | `init`, `get_…`, `get`, `finalize` | the rank's agent, of what every agent knows | the next agent answers the same |
//! | `put` | the rank's agent | put there ([`Moving::fresh`]), unless a barrier has carried it up |
//! | `barrier_in` | all | the next agent knows who has come ([`Adoption::has_reached`]); one that is over is answered here |
//! | a block of a spawn, not the last | nobody | the next agent takes it up again ([`Moving::begun`]) |
//! | a spawn, names | the launcher | asked once ([`Wards::passes`]); its answer is taken down on its way ([`Wards::handle_answer`]) |
//! | `abort` | nobody | the job ends |
//!
//! What may never happen: the launcher is asked again what it was asked; an answer goes to another question; of a rank's record
//! counts what ends in the middle of an entry.
//!
//! [`Adoption::has_reached`]: crate::control::moved::Adoption::has_reached

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use landbridge_proto::recent::RECENT_MAX;

use super::again::{EXCHANGED_BYTES_MAX, STARTS_PER_NODE};
use crate::control::moved::{Exchange, Known, Moving, Talk};
use crate::control::{Ending, Stream};
use crate::output_log::OutputLog;
use crate::pmi::server::{Stage, barrier_out};
use crate::pmi::wire::{Command, is_answered_later};
use crate::restart::{Life, Place};

/// See the module head.
#[derive(Debug, Default)]
pub struct Wards {
    ranks: BTreeMap<u32, Ward>,
}

#[derive(Debug, Default)]
struct Ward {
    kept: Moving,
    /// So many of its questions have been seen on their way to the launcher, or were there before such a one.
    passed: usize,
    /// All that it has asked and heard.
    exchanged_bytes: usize,
    /// When its first process began, and the present one.
    began: Option<[Instant; 2]>,
    memory: Memory,
    /// It could not be started on a node, and has gone to another one.
    has_fled: bool,
    /// It has ended for good.
    has_ended: bool,
}

/// What its node has said of its record of clocks and last intakes.
#[derive(Debug, Default)]
pub struct Memory {
    /// From this place in its record on.
    pub first: u64,
    pub reads: Vec<u8>,
    pub polls: u64,
    pub is_full: bool,
    /// The last of them, from this number on.
    pub first_intake: u64,
    pub intakes: VecDeque<[u64; 3]>,
    /// The head's part about files.
    pub files: Vec<u8>,
    /// Pieces of a batch that has not come to its end: if its node is lost before that, nobody is told any of them. Nobody has seen
    /// anything that follows from them either, for that comes behind the batch.
    pub begun: Option<Box<Known>>,
}

impl Memory {
    fn take(&mut self, mut known: Known) {
        // What is known comes again from whoever hands the rank over, and need not be kept twice.
        let again = self.end().saturating_sub(known.from).min(known.reads.len() as u64);
        known.reads.drain(..again as usize);
        known.from += again;
        if let Some(begun) = self.begun.take_if(|begun| begun.end() == known.from) {
            known = begun.joined(known);
        }
        if known.goes_on {
            self.begun = Some(Box::new(known));
        } else {
            self.begun = None;
            self.take_whole(known);
        }
    }

    fn take_whole(&mut self, known: Known) {
        if known.base > self.end() {
            // What came between nobody needs any more.
            (self.first, self.reads) = (known.base, Vec::new());
        }
        let useless = known.base.saturating_sub(self.first);
        self.reads.drain(..useless as usize);
        self.first += useless;
        // Batches come in order.
        if let Some(at) = self.end().checked_sub(known.from) {
            self.reads.extend_from_slice(known.reads.get(at as usize..).unwrap_or(&[]));
        }
        self.polls = self.polls.max(known.polls);
        self.is_full |= known.is_full;
        if !known.files.is_empty() {
            self.files = known.files;
        }
        for (number, intake) in (known.first_intake..).zip(known.intakes) {
            let next = self.first_intake + self.intakes.len() as u64;
            if number > next {
                // What came between was too much, and has long arrived at the relay.
                (self.first_intake, self.intakes) = (number, VecDeque::new());
            }
            if number >= next {
                self.intakes.push_back(intake);
            }
        }
        let excess = self.intakes.len().saturating_sub(RECENT_MAX);
        self.intakes.drain(..excess);
        self.first_intake += excess as u64;
    }

    /// Behind what is known of its record.
    pub fn end(&self) -> u64 {
        self.first + self.reads.len() as u64
    }

    /// All but what was read.
    pub fn rest(&self, rank: u32) -> Known {
        let intakes = self.intakes.iter().copied().collect();
        let (&Memory { is_full, polls, first_intake, .. }, files) = (self, self.files.clone());
        Known { rank, is_full, polls, first_intake, intakes, files, ..Known::default() }
    }
}

impl Wards {
    fn of(&mut self, rank: u32) -> &mut Ward {
        self.ranks.entry(rank).or_default()
    }

    pub fn handle_talk(&mut self, talk: Talk) {
        match talk {
            Talk::Asked { rank, question } => self.of(rank).ask(question),
            // That of the launcher is known already, and nothing else is open then.
            Talk::Heard { rank, answer } => {
                if let Some(place) = self.of(rank).open() {
                    self.of(rank).answer(place, answer);
                }
            }
            Talk::Images { rank, images } => self.of(rank).kept.images = images,
            Talk::Ended { rank, life } => self.of(rank).kept.lives.push(life),
            Talk::LastWords { rank, from } => {
                self.of(rank).kept.outputs[1].cut(from);
            }
            // Something is to be done about it.
            Talk::Unstartable { .. } => {}
        }
    }

    /// A question of it comes by that only the launcher can answer. Whether that is to have it: what a lost node has asked there is
    /// answered by what comes of that.
    pub fn passes(&mut self, rank: u32) -> bool {
        let ward = self.of(rank);
        if ward.kept.exchanges.is_empty() {
            // Nothing is kept of it.
            return true;
        }
        let number = ward.open().map_or(0, |place| place + 1);
        let is_new = number > ward.passed;
        ward.passed = ward.passed.max(number);
        is_new
    }

    /// The launcher's answer comes by. The rank may be on no node just now.
    pub fn handle_answer(&mut self, rank: u32, answer: &str) {
        let Some(ward) = self.ranks.get_mut(&rank) else { return };
        if let Some(place) = ward.open().filter(|place| ward.passed == place + 1) {
            ward.answer(place, answer.to_string());
        }
    }

    /// Whether it has asked and heard more than is kept, so that it cannot go on elsewhere.
    pub fn has_asked_too_much(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|ward| ward.exchanged_bytes > EXCHANGED_BYTES_MAX)
    }

    /// All that these have asked and heard, in bytes.
    pub fn exchanged_bytes(&self, ranks: &[u32]) -> usize {
        ranks.iter().filter_map(|rank| self.ranks.get(rank)).map(|ward| ward.exchanged_bytes).sum()
    }

    /// It has printed this, which is new.
    pub fn handle_print(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        self.of(rank).kept.outputs[usize::from(stream == Stream::Stderr)].append(bytes);
    }

    pub fn handle_start(&mut self, rank: u32, start: u32, now: Instant) {
        let ward = self.of(rank);
        let [_, present] = ward.began.get_or_insert([now; 2]);
        if start > ward.kept.starts {
            (ward.kept.starts, *present) = (start, now);
        }
    }

    /// It cannot be started where it is. Whether that has been so before.
    pub fn handle_unstartable(&mut self, rank: u32) -> bool {
        std::mem::replace(&mut self.of(rank).has_fled, true)
    }

    pub fn handle_known(&mut self, known: Known) {
        self.of(known.rank).memory.take(known);
    }

    /// The node of the rank is lost: the end of a batch that has begun will not come.
    pub fn drop_torn(&mut self, rank: u32) {
        if let Some(ward) = self.ranks.get_mut(&rank) {
            ward.memory.begun = None;
        }
    }

    /// What is known of its record.
    pub fn memory(&self, rank: u32) -> Option<&Memory> {
        self.ranks.get(&rank).map(|ward| &ward.memory)
    }

    /// Those of these ranks that have not ended.
    pub fn living(&self, ranks: std::ops::Range<u32>) -> Vec<u32> {
        let has_ended = |rank: &u32| self.ranks.get(rank).is_some_and(|ward| ward.has_ended);
        ranks.filter(|rank| !has_ended(rank)).collect()
    }

    /// Starts of it that are not on the node that it moves to next have lower numbers than this.
    pub fn next_first_start(&self, rank: u32) -> u32 {
        let moves = self.ranks.get(&rank).map_or(0, |ward| ward.kept.moves);
        (moves + 1) * STARTS_PER_NODE
    }

    pub fn handle_end(&mut self, rank: u32) {
        self.of(rank).has_ended = true;
    }

    /// Those of these ranks that have not ended move. `released`: barriers that are over.
    pub fn release(
        &mut self,
        ranks: impl IntoIterator<Item = u32>,
        released: u32,
        now: Instant,
    ) -> Vec<Moving> {
        let mut moving = Vec::new();
        for rank in ranks {
            let ward = self.of(rank);
            if ward.has_ended {
                continue;
            }
            let [first, present] = *ward.began.get_or_insert([now; 2]);
            let kept = &mut ward.kept;
            kept.lives.push(lost_with_its_node(kept, [first, present], now));
            (kept.age, ward.began) = (now - first, Some([first, now]));
            (kept.rank, kept.starts, kept.moves) = (rank, kept.starts + 1, kept.moves + 1);
            settle(&mut kept.exchanges, released);
            let outputs = kept.outputs.each_ref().map(OutputLog::for_move);
            moving.push(Moving { outputs, ..kept.clone() });
        }
        moving
    }
}

impl Ward {
    /// Its question that has no answer yet.
    fn open(&self) -> Option<usize> {
        self.kept.exchanges.iter().position(|exchange| exchange.answer.is_none())
    }

    fn ask(&mut self, question: String) {
        if self.has_room(question.len()) {
            self.kept.exchanges.push(Exchange { question, answer: None });
        }
    }

    fn answer(&mut self, place: usize, answer: String) {
        if self.has_room(answer.len()) {
            self.kept.exchanges[place].answer = Some(answer);
        }
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        self.exchanged_bytes += bytes;
        let has_room = self.exchanged_bytes <= EXCHANGED_BYTES_MAX;
        if !has_room {
            self.kept.exchanges = Vec::new();
        }
        has_room
    }
}

/// How its last process has ended: that it was killed is as good as known.
fn lost_with_its_node(kept: &Moving, [first, present]: [Instant; 2], now: Instant) -> Life {
    let questions = kept.exchanges.iter().map(|exchange| exchange.question.as_str());
    let printed = kept.outputs.iter().map(|output| output.end().bytes).sum();
    let place = Place { asked: kept.exchanges.len(), printed, looked: 0 };
    Life {
        began: present - first,
        lasted: now - present,
        ending: Ending::Killed(libc::SIGKILL),
        stage: questions.fold(Stage::Silent, Stage::after),
        has_last_word: false,
        place,
    }
}

/// Of a barrier that is over the answer may have been lost with the node.
fn settle(exchanges: &mut [Exchange], released: u32) {
    let barriers = exchanges.iter_mut().filter(|exchange| is(&exchange.question, "barrier_in"));
    for exchange in barriers.take(released as usize) {
        exchange.answer.get_or_insert_with(barrier_out);
    }
}

fn is(question: &str, name: &str) -> bool {
    Command::parse(question).is_some_and(|command| command.name == name)
}

impl Moving {
    /// What it has put since the last barrier that is over for it: nobody else may have that.
    pub fn fresh(&self) -> Vec<(String, String)> {
        let is_over =
            |exchange: &Exchange| exchange.answer.is_some() && is(&exchange.question, "barrier_in");
        let since = self.exchanges.iter().rposition(is_over).map_or(0, |place| place + 1);
        let answered = self.exchanges[since..].iter().filter(|exchange| exchange.answer.is_some());
        let commands = answered.filter_map(|exchange| Command::parse(&exchange.question));
        let puts = commands.filter(|command| command.name == "put");
        puts.filter_map(|put| Some((put.argument("key")?.into(), put.argument("value")?.into())))
            .collect()
    }

    /// What it has asked and heard no answer to, and in front of that the blocks of a spawn whose last one is still to come.
    pub fn begun(&self) -> impl Iterator<Item = &Exchange> {
        let is_open = |exchange: &&Exchange| exchange.answer.is_none();
        let first = self.exchanges.iter().position(|exchange| is_open(&exchange));
        let (before, after) = self.exchanges.split_at(first.unwrap_or(self.exchanges.len()));
        let is_block = |exchange: &Exchange| is_answered_later(&exchange.question);
        let others = before.iter().rposition(|exchange| !is_block(exchange)).map_or(0, |at| at + 1);
        before[others..].iter().chain(after.iter().filter(is_open))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::control::moved::Whereabouts;

    const BARRIER: &str = "cmd=barrier_in\n";

    fn asked(rank: u32, question: &str) -> Talk {
        Talk::Asked { rank, question: question.to_string() }
    }

    fn heard(rank: u32, answer: &str) -> Talk {
        Talk::Heard { rank, answer: answer.to_string() }
    }

    #[test]
    fn who_moves_has_said_what_it_has_said() {
        let mut wards = Wards::default();
        wards.handle_talk(asked(4, "cmd=put kvsname=k key=a value=1\n"));
        wards.handle_talk(heard(4, "cmd=put_result rc=0\n"));
        wards.handle_talk(asked(4, BARRIER));
        for text in ["abc", "defgh"] {
            wards.handle_print(4, Stream::Stderr, text.as_bytes());
        }
        wards.handle_talk(Talk::LastWords { rank: 4, from: 7 });
        let now = Instant::now();
        wards.handle_start(4, 0, now);
        wards.handle_start(4, 2, now + Duration::from_secs(2));
        let image = |place: &str| Whereabouts { place: place.into(), sum: "5a".into() };
        for places in [&["rank-4/1"][..], &["rank-4/1", "rank-4/2"]] {
            let images = places.iter().map(|place| image(place)).collect();
            wards.handle_talk(Talk::Images { rank: 4, images });
        }
        wards.handle_end(5);
        assert_eq!(wards.living(4..7), [4, 6]);
        assert!(!wards.handle_unstartable(4) && wards.handle_unstartable(4), "once");
        assert_eq!(wards.next_first_start(4), STARTS_PER_NODE);
        let moving = wards.release(4..6, 0, now + Duration::from_secs(5));
        let [one] = &moving[..] else { panic!("{moving:?}") };
        let mut printed = OutputLog::default();
        printed.append(b"abcdefg");
        assert_eq!((one.rank, one.starts, one.moves), (4, 3, 1));
        assert_eq!(one.outputs, [OutputLog::default(), printed]);
        assert_eq!(one.age, Duration::from_secs(5));
        let life = one.lives[0];
        assert_eq!((life.began, life.lasted), (Duration::from_secs(2), Duration::from_secs(3)));
        assert_eq!((life.place.asked, life.place.printed), (2, 7));
        assert_eq!(one.fresh(), [("a".to_string(), "1".to_string())]);
        assert!(begun(one).eq([BARRIER]));
        assert_eq!(one.images, [image("rank-4/1"), image("rank-4/2")]);
        // The barrier was over, and nobody has heard that its rank knew.
        let again = wards.release(4..5, 1, now + Duration::from_secs(6)).remove(0);
        assert_eq!((again.lives.len(), wards.next_first_start(4)), (2, 3 * STARTS_PER_NODE));
        assert_eq!((again.starts, again.moves, again.begun().count()), (4, 2, 0));
        assert_eq!(again.exchanges[1].answer.as_deref(), Some(&barrier_out()[..]));
        assert!(again.fresh().is_empty(), "everybody has it");
    }

    /// Of a spawn of so many commands.
    fn block(place: u32, count: u32) -> String {
        let lines = [format!("totspawns={count}"), format!("spawnssofar={place}")];
        crate::pmi::wire::block_text(&lines)
    }

    /// What the next agent is to ask of itself.
    fn begun(moving: &Moving) -> impl Iterator<Item = &str> {
        moving.begun().map(|exchange| exchange.question.as_str())
    }

    fn lose(wards: &mut Wards) -> Moving {
        wards.release(4..5, 0, Instant::now()).remove(0)
    }

    #[test]
    fn the_launcher_is_asked_once_whichever_node_asks() {
        let mut wards = Wards::default();
        let spawn = block(1, 1);
        wards.handle_talk(asked(4, "cmd=get_maxes\n"));
        wards.handle_talk(heard(4, "cmd=maxes\n"));
        wards.handle_talk(asked(4, &spawn));
        assert!(wards.passes(4));
        for _ in 0..2 {
            // Lost, and the next node as well.
            assert!(begun(&lose(&mut wards)).eq([&spawn[..]]));
            assert!(!wards.passes(4));
        }
        wards.handle_answer(4, "cmd=spawn_result rc=0\n");
        // What was still on its way from there; and what the node has passed on.
        assert!(!wards.passes(4));
        wards.handle_talk(heard(4, "cmd=spawn_result rc=0\n"));
        wards.handle_talk(asked(4, "cmd=lookup_name service=a\n"));
        assert!(wards.passes(4) && !wards.passes(4));
        let moving = lose(&mut wards);
        assert_eq!(moving.exchanges[1].answer.as_deref(), Some("cmd=spawn_result rc=0\n"));
        assert!(begun(&moving).eq(["cmd=lookup_name service=a\n"]));
    }

    #[test]
    fn an_answer_that_comes_while_a_rank_is_on_no_node_is_kept() {
        let mut wards = Wards::default();
        wards.handle_talk(asked(4, "cmd=publish_name service=a port=b\n"));
        assert!(wards.passes(4));
        wards.handle_answer(4, "cmd=publish_result rc=0\n");
        let moving = lose(&mut wards);
        assert_eq!(moving.exchanges[0].answer.as_deref(), Some("cmd=publish_result rc=0\n"));
        assert_eq!(moving.begun().count(), 0);
    }

    #[test]
    fn a_question_that_was_lost_on_its_way_is_asked() {
        let mut wards = Wards::default();
        wards.handle_talk(asked(4, "cmd=lookup_name service=a\n"));
        assert_eq!(lose(&mut wards).begun().count(), 1);
        assert!(wards.passes(4));
    }

    #[test]
    fn an_answer_goes_to_no_other_question() {
        let mut wards = Wards::default();
        wards.handle_answer(4, "late\n");
        assert!(wards.passes(4), "of one that was spawned nothing is kept");
        wards.handle_talk(asked(4, BARRIER));
        wards.handle_answer(4, "late\n");
        assert!(begun(&lose(&mut wards)).eq([BARRIER]));
    }

    #[test]
    fn blocks_of_a_spawn_stay_together() {
        let mut wards = Wards::default();
        let [first, second, last] = [1, 2, 3].map(|place| block(place, 3));
        for block in [&first, &second] {
            wards.handle_talk(asked(4, BARRIER));
            wards.handle_talk(heard(4, "out\n"));
            wards.handle_talk(asked(4, block));
            assert!(begun(&lose(&mut wards)).eq([&block[..]]), "it was lost in front of that");
            wards.handle_talk(heard(4, ""));
            assert!(begun(&lose(&mut wards)).eq([&block[..]]));
        }
        wards.handle_talk(asked(4, &last));
        assert!(begun(&lose(&mut wards)).eq([&second[..], &last[..]]));
        assert!(wards.passes(4));
        wards.handle_answer(4, "cmd=spawn_result rc=0\n");
        assert_eq!(lose(&mut wards).begun().count(), 0);
    }

    #[test]
    fn who_asks_without_end_cannot_go_on_elsewhere() {
        let mut wards = Wards::default();
        let long = "x".repeat(EXCHANGED_BYTES_MAX / 2);
        wards.handle_talk(asked(4, &long));
        wards.handle_talk(heard(4, &long));
        assert!(!wards.has_asked_too_much(4) && !wards.has_asked_too_much(5));
        wards.handle_talk(asked(4, "x"));
        assert!(wards.has_asked_too_much(4) && wards.passes(4));
        assert_eq!(wards.exchanged_bytes(&[3, 4, 5]), EXCHANGED_BYTES_MAX + 1);
        assert!(lose(&mut wards).exchanges.is_empty());
    }

    #[test]
    fn what_is_known_of_a_record_goes_on_where_it_ended() {
        let mut wards = Wards::default();
        let known = |from, reads: &[u8], polls, first_intake, count: u64| Known {
            rank: 4,
            from,
            reads: reads.to_vec(),
            polls,
            first_intake,
            intakes: (first_intake..first_intake + count).map(|number| [1, number, 0]).collect(),
            ..Known::default()
        };
        wards.handle_known(known(0, b"abc", 5, 0, 3));
        wards.handle_known(known(3, b"def", 9, 3, 2));
        // It has been told what was known, and tells it.
        wards.handle_known(known(4, b"efg", 8, 2, 4));
        wards.handle_known(known(100, b"x", 8, 6, 0));
        let memory = wards.memory(4).unwrap();
        assert_eq!((&memory.reads[..], memory.polls), (&b"abcdefg"[..], 9));
        wards.handle_known(Known { base: 3, ..known(7, b"", 9, 6, 0) });
        let memory = wards.memory(4).unwrap();
        assert_eq!((memory.first, &memory.reads[..], memory.end()), (3, &b"defg"[..], 7));
        // Images were taken, and nothing was printed.
        wards.handle_known(Known { base: 20, ..known(20, b"uvw", 9, 6, 0) });
        let memory = wards.memory(4).unwrap();
        assert_eq!((memory.first, &memory.reads[..]), (20, &b"uvw"[..]));
        assert_eq!((memory.first_intake, memory.intakes.len()), (0, 6));
        // More has come than can be under way.
        wards.handle_known(known(7, b"", 10, 70_000, RECENT_MAX as u64 - 1));
        wards.handle_known(known(7, b"", 10, 70_000 + RECENT_MAX as u64 - 1, 3));
        let rest = wards.memory(4).unwrap().rest(4);
        assert_eq!((rest.first_intake, rest.intakes.len()), (70_002, RECENT_MAX));
        assert!((rest.first_intake..).zip(&rest.intakes).all(|(at, intake)| intake[1] == at));
    }

    #[test]
    fn a_batch_counts_when_its_last_piece_is_there() {
        let mut wards = Wards::default();
        let piece = |from, reads: &[u8], goes_on| Known {
            rank: 4,
            from,
            reads: reads.to_vec(),
            goes_on,
            ..Known::default()
        };
        wards.handle_known(Known { polls: 2, files: vec![1], ..piece(0, b"abc", false) });
        // The rest goes with the first piece.
        let first = Known {
            polls: 9,
            is_full: true,
            base: 2,
            intakes: vec![[1, 0, 0]],
            files: vec![2],
            ..piece(3, b"def", true)
        };
        let is_as_before = |wards: &Wards| {
            let memory = wards.memory(4).unwrap();
            assert_eq!((memory.first, &memory.reads[..], memory.end()), (0, &b"abc"[..], 3));
            let intakes = memory.intakes.len();
            assert_eq!((memory.polls, memory.is_full, intakes), (2, false, 0));
            assert_eq!((&memory.files[..], memory.rest(4).files), (&[1][..], vec![1]));
        };
        for _ in 0..2 {
            wards.handle_known(first.clone());
            wards.handle_known(piece(6, b"gh", true));
            is_as_before(&wards);
            // The node is lost, and who takes the rank tells it otherwise.
            wards.drop_torn(4);
            is_as_before(&wards);
        }
        // Even if nobody says that it is lost.
        wards.handle_known(first.clone());
        wards.handle_known(first);
        wards.handle_known(piece(6, b"GH", true));
        wards.handle_known(piece(8, b"I", false));
        let memory = wards.memory(4).unwrap();
        assert_eq!((memory.first, &memory.reads[..], memory.end()), (2, &b"cdefGHI"[..], 9));
        assert_eq!((memory.polls, memory.is_full, memory.intakes.len()), (9, true, 1));
        assert_eq!((&memory.files[..], memory.begun.is_none()), (&[2][..], true));
        // All or some of it comes again, in pieces.
        wards.handle_known(Known { base: 2, ..piece(2, b"cdef", true) });
        wards.handle_known(piece(6, b"GHIjk", true));
        assert_eq!(wards.memory(4).unwrap().end(), 9);
        assert_eq!(wards.memory(4).unwrap().begun.as_ref().unwrap().reads, b"jk");
        wards.handle_known(piece(11, b"", false));
        assert_eq!(wards.memory(4).unwrap().reads, b"cdefGHIjk");
        // The oldest image stands behind all that was known.
        wards.handle_known(Known { base: 20, ..piece(20, b"uv", true) });
        assert_eq!(wards.memory(4).unwrap().end(), 11);
        wards.handle_known(piece(22, b"w", false));
        let memory = wards.memory(4).unwrap();
        assert_eq!((memory.first, &memory.reads[..]), (20, &b"uvw"[..]));
    }
}
