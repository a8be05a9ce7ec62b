//! What an agent keeps of the ranks of the agents below it, so that they can go on elsewhere: what they have said to their process
//! manager with the answers, what they have printed, how often they have been started.
//!
//! Pure. What the agents below say enters, in their order; a [`TransferredRank`] for each rank leaves. All that others have seen of a rank
//! came after what is kept here.
//!
//! Questions, and what becomes of them when the node is lost before the answer is there. A rank asks one at a time, so the place of
//! a question in its record is its number, whichever start asks it.
//!
//! | question | who answers | then |
//! |---|---|---|
//! | `init`, `get_…`, `get`, `finalize` | the rank's agent, of what every agent knows | the next agent answers the same |
//! | `put` | the rank's agent | put there ([`TransferredRank::unreleased_puts`]), unless a barrier has carried it up |
//! | `barrier_in` | all | the next agent knows who has come ([`Adoption::has_reached`]); one that is over is answered here |
//! | a block of a spawn, not the last | nobody | the next agent takes it up again ([`TransferredRank::unanswered_requests`]) |
//! | a spawn, names | the launcher | asked once ([`ReplicatedRankStates::admit`]); its answer is taken down on its way ([`ReplicatedRankStates::handle_answer`]) |
//! | `abort` | nobody | the job ends |
//!
//! What may never happen: the launcher is asked again what it was asked; an answer goes to another question; of a rank's record
//! counts what ends in the middle of an entry.
//!
//! [`Adoption::has_reached`]: crate::control::rank_state::Adoption::has_reached

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use landbridge_proto::recent_determinants::RECENT_DETERMINANTS_MAX;

use super::pmi_replay::{EXCHANGED_BYTES_MAX, INCARNATIONS_PER_NODE};
use crate::control::rank_state::{Exchange, RankUpdate, RecordingUpdate, TransferredRank};
use crate::control::{Ending, Stream};
use crate::output_log::OutputLog;
use crate::pmi::server::{Stage, barrier_out};
use crate::pmi::wire::{PmiCommand, is_answered_later};
use crate::restart::{IncarnationRecord, ProgressPoint};

/// See the module head.
#[derive(Debug, Default)]
pub struct ReplicatedRankStates {
    ranks: BTreeMap<u32, ReplicatedRankState>,
}

#[derive(Debug, Default)]
struct ReplicatedRankState {
    state: TransferredRank,
    /// So many of its questions have been seen on their way to the launcher, or were there before such a one.
    forwarded: usize,
    /// All that it has asked and heard.
    exchanged_bytes: usize,
    /// When its first process began, and the present one.
    began: Option<[Instant; 2]>,
    recording: ReplicatedRecording,
    /// It could not be started on a node, and has gone to another one.
    has_moved_before: bool,
    /// It has ended for good.
    has_ended: bool,
}

/// What its node has said of its record of clocks and last determinants.
#[derive(Debug, Default)]
pub struct ReplicatedRecording {
    /// From this place in its record on.
    pub first: u64,
    pub reads: Vec<u8>,
    pub polls: u64,
    pub is_full: bool,
    /// The last of them, from this number on.
    pub first_determinant: u64,
    pub determinants: VecDeque<[u64; 3]>,
    /// The head's part about files.
    pub files: Vec<u8>,
    /// Pieces of a batch that has not come to its end: if its node is lost before that, nobody is told any of them. Nobody has seen
    /// anything that follows from them either, for that comes behind the batch.
    pub partial: Option<Box<RecordingUpdate>>,
}

impl ReplicatedRecording {
    fn apply(&mut self, mut update: RecordingUpdate) {
        // What is known comes again from whoever hands the rank over, and need not be kept twice.
        let repeated = self.end().saturating_sub(update.from).min(update.reads.len() as u64);
        update.reads.drain(..repeated as usize);
        update.from += repeated;
        if let Some(partial) = self.partial.take_if(|partial| partial.end() == update.from) {
            update = partial.joined(update);
        }
        if update.continues {
            self.partial = Some(Box::new(update));
        } else {
            self.partial = None;
            self.apply_batch(update);
        }
    }

    fn apply_batch(&mut self, update: RecordingUpdate) {
        if update.base > self.end() {
            // What came between nobody needs any more.
            (self.first, self.reads) = (update.base, Vec::new());
        }
        let useless = update.base.saturating_sub(self.first);
        self.reads.drain(..useless as usize);
        self.first += useless;
        // Batches come in order.
        if let Some(at) = self.end().checked_sub(update.from) {
            self.reads.extend_from_slice(update.reads.get(at as usize..).unwrap_or(&[]));
        }
        self.polls = self.polls.max(update.polls);
        self.is_full |= update.is_full;
        if !update.files.is_empty() {
            self.files = update.files;
        }
        for (number, determinant) in (update.first_determinant..).zip(update.determinants) {
            let next = self.first_determinant + self.determinants.len() as u64;
            if number > next {
                // What came between was too much, and has long arrived at the relay.
                (self.first_determinant, self.determinants) = (number, VecDeque::new());
            }
            if number >= next {
                self.determinants.push_back(determinant);
            }
        }
        let excess = self.determinants.len().saturating_sub(RECENT_DETERMINANTS_MAX);
        self.determinants.drain(..excess);
        self.first_determinant += excess as u64;
    }

    /// Behind what is known of its record.
    pub fn end(&self) -> u64 {
        self.first + self.reads.len() as u64
    }

    /// All but what was read.
    pub fn rest(&self, rank: u32) -> RecordingUpdate {
        let determinants = self.determinants.iter().copied().collect();
        let (&ReplicatedRecording { is_full, polls, first_determinant, .. }, files) =
            (self, self.files.clone());
        RecordingUpdate {
            rank,
            is_full,
            polls,
            first_determinant,
            determinants,
            files,
            ..RecordingUpdate::default()
        }
    }
}

impl ReplicatedRankStates {
    fn entry(&mut self, rank: u32) -> &mut ReplicatedRankState {
        self.ranks.entry(rank).or_default()
    }

    pub fn handle_update(&mut self, update: RankUpdate) {
        match update {
            RankUpdate::PmiRequest { rank, question } => self.entry(rank).ask(question),
            // That of the launcher is known already, and nothing else is open then.
            RankUpdate::PmiReply { rank, answer } => {
                if let Some(number) = self.entry(rank).unanswered() {
                    self.entry(rank).answer(number, answer);
                }
            }
            RankUpdate::Checkpoints { rank, images } => self.entry(rank).state.images = images,
            RankUpdate::IncarnationEnded { rank, incarnation } => {
                self.entry(rank).state.incarnations.push(incarnation)
            }
            RankUpdate::LastWords { rank, from } => {
                self.entry(rank).state.outputs[1].cut(from);
            }
            // Something is to be done about it.
            RankUpdate::Unstartable { .. } => {}
        }
    }

    /// A question of it comes by that only the launcher can answer. Whether that is to have it: what a lost node has asked there is
    /// answered by what comes of that.
    pub fn admit(&mut self, rank: u32) -> bool {
        let replica = self.entry(rank);
        if replica.state.exchanges.is_empty() {
            // Nothing is kept of it.
            return true;
        }
        let number = replica.unanswered().map_or(0, |number| number + 1);
        let is_new = number > replica.forwarded;
        replica.forwarded = replica.forwarded.max(number);
        is_new
    }

    /// The launcher's answer comes by. The rank may be on no node just now.
    pub fn handle_answer(&mut self, rank: u32, answer: &str) {
        let Some(replica) = self.ranks.get_mut(&rank) else { return };
        if let Some(number) = replica.unanswered().filter(|number| replica.forwarded == number + 1)
        {
            replica.answer(number, answer.to_string());
        }
    }

    /// Whether it has asked and heard more than is kept, so that it cannot go on elsewhere.
    pub fn has_asked_too_much(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|replica| replica.exchanged_bytes > EXCHANGED_BYTES_MAX)
    }

    /// All that these have asked and heard, in bytes.
    pub fn exchanged_bytes(&self, ranks: &[u32]) -> usize {
        ranks
            .iter()
            .filter_map(|rank| self.ranks.get(rank))
            .map(|replica| replica.exchanged_bytes)
            .sum()
    }

    /// It has printed this, which is new.
    pub fn handle_print(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        self.entry(rank).state.outputs[usize::from(stream == Stream::Stderr)].append(bytes);
    }

    pub fn handle_incarnation(&mut self, rank: u32, incarnation: u32, now: Instant) {
        let replica = self.entry(rank);
        let [_, present] = replica.began.get_or_insert([now; 2]);
        if incarnation > replica.state.restarts {
            (replica.state.restarts, *present) = (incarnation, now);
        }
    }

    /// It cannot be started where it is. Whether that has been so before.
    pub fn handle_unstartable(&mut self, rank: u32) -> bool {
        std::mem::replace(&mut self.entry(rank).has_moved_before, true)
    }

    pub fn handle_recording_update(&mut self, update: RecordingUpdate) {
        self.entry(update.rank).recording.apply(update);
    }

    /// The node of the rank is lost: the end of a batch that has begun will not come.
    pub fn drop_partial_batch(&mut self, rank: u32) {
        if let Some(replica) = self.ranks.get_mut(&rank) {
            replica.recording.partial = None;
        }
    }

    /// What is known of its record.
    pub fn recording(&self, rank: u32) -> Option<&ReplicatedRecording> {
        self.ranks.get(&rank).map(|replica| &replica.recording)
    }

    /// Those of these ranks that have not ended.
    pub fn living(&self, ranks: std::ops::Range<u32>) -> Vec<u32> {
        let has_ended = |rank: &u32| self.ranks.get(rank).is_some_and(|replica| replica.has_ended);
        ranks.filter(|rank| !has_ended(rank)).collect()
    }

    /// Starts of it that are not on the node that it moves to next have lower numbers than this.
    pub fn next_first_incarnation(&self, rank: u32) -> u32 {
        let moves = self.ranks.get(&rank).map_or(0, |replica| replica.state.moves);
        (moves + 1) * INCARNATIONS_PER_NODE
    }

    pub fn handle_end(&mut self, rank: u32) {
        self.entry(rank).has_ended = true;
    }

    /// Those of these ranks that have not ended move. `released`: barriers that are over.
    pub fn transfer(
        &mut self,
        ranks: impl IntoIterator<Item = u32>,
        released: u32,
        now: Instant,
    ) -> Vec<TransferredRank> {
        let mut transferred = Vec::new();
        for rank in ranks {
            let replica = self.entry(rank);
            if replica.has_ended {
                continue;
            }
            let [first, present] = *replica.began.get_or_insert([now; 2]);
            let state = &mut replica.state;
            state.incarnations.push(lost_with_its_node(state, [first, present], now));
            (state.age, replica.began) = (now - first, Some([first, now]));
            (state.rank, state.restarts, state.moves) = (rank, state.restarts + 1, state.moves + 1);
            answer_released_barriers(&mut state.exchanges, released);
            let outputs = state.outputs.each_ref().map(OutputLog::for_move);
            transferred.push(TransferredRank { outputs, ..state.clone() });
        }
        transferred
    }
}

impl ReplicatedRankState {
    /// Its question that has no answer yet.
    fn unanswered(&self) -> Option<usize> {
        self.state.exchanges.iter().position(|exchange| exchange.answer.is_none())
    }

    fn ask(&mut self, question: String) {
        if self.has_room(question.len()) {
            self.state.exchanges.push(Exchange { question, answer: None });
        }
    }

    fn answer(&mut self, number: usize, answer: String) {
        if self.has_room(answer.len()) {
            self.state.exchanges[number].answer = Some(answer);
        }
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        self.exchanged_bytes += bytes;
        let has_room = self.exchanged_bytes <= EXCHANGED_BYTES_MAX;
        if !has_room {
            self.state.exchanges = Vec::new();
        }
        has_room
    }
}

/// How its last process has ended: that it was killed is as good as known.
fn lost_with_its_node(
    state: &TransferredRank,
    [first, present]: [Instant; 2],
    now: Instant,
) -> IncarnationRecord {
    let questions = state.exchanges.iter().map(|exchange| exchange.question.as_str());
    let printed = state.outputs.iter().map(|output| output.end().bytes).sum();
    let point = ProgressPoint { asked: state.exchanges.len(), printed, polls: 0 };
    IncarnationRecord {
        began: present - first,
        lasted: now - present,
        ending: Ending::Killed(libc::SIGKILL),
        stage: questions.fold(Stage::Silent, Stage::after),
        has_fatal_notice: false,
        point,
    }
}

/// Of a barrier that is over the answer may have been lost with the node.
fn answer_released_barriers(exchanges: &mut [Exchange], released: u32) {
    let barriers =
        exchanges.iter_mut().filter(|exchange| is_command(&exchange.question, "barrier_in"));
    for exchange in barriers.take(released as usize) {
        exchange.answer.get_or_insert_with(barrier_out);
    }
}

fn is_command(question: &str, name: &str) -> bool {
    PmiCommand::parse(question).is_some_and(|command| command.name == name)
}

impl TransferredRank {
    /// What it has put since the last barrier that is over for it: nobody else may have that.
    pub fn unreleased_puts(&self) -> Vec<(String, String)> {
        let is_over = |exchange: &Exchange| {
            exchange.answer.is_some() && is_command(&exchange.question, "barrier_in")
        };
        let since = self.exchanges.iter().rposition(is_over).map_or(0, |number| number + 1);
        let answered = self.exchanges[since..].iter().filter(|exchange| exchange.answer.is_some());
        let commands = answered.filter_map(|exchange| PmiCommand::parse(&exchange.question));
        let puts = commands.filter(|command| command.name == "put");
        puts.filter_map(|put| Some((put.argument("key")?.into(), put.argument("value")?.into())))
            .collect()
    }

    /// What it has asked and heard no answer to, and in front of that the blocks of a spawn whose last one is still to come.
    pub fn unanswered_requests(&self) -> impl Iterator<Item = &Exchange> {
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
    use crate::control::rank_state::CheckpointLocation;

    const BARRIER: &str = "cmd=barrier_in\n";

    fn asked(rank: u32, question: &str) -> RankUpdate {
        RankUpdate::PmiRequest { rank, question: question.to_string() }
    }

    fn heard(rank: u32, answer: &str) -> RankUpdate {
        RankUpdate::PmiReply { rank, answer: answer.to_string() }
    }

    #[test]
    fn a_transferred_rank_keeps_its_requests_and_output() {
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_update(asked(4, "cmd=put kvsname=k key=a value=1\n"));
        replicas.handle_update(heard(4, "cmd=put_result rc=0\n"));
        replicas.handle_update(asked(4, BARRIER));
        for text in ["abc", "defgh"] {
            replicas.handle_print(4, Stream::Stderr, text.as_bytes());
        }
        replicas.handle_update(RankUpdate::LastWords { rank: 4, from: 7 });
        let now = Instant::now();
        replicas.handle_incarnation(4, 0, now);
        replicas.handle_incarnation(4, 2, now + Duration::from_secs(2));
        let image = |path: &str| CheckpointLocation { path: path.into(), tag: "5a".into() };
        for places in [&["rank-4/1"][..], &["rank-4/1", "rank-4/2"]] {
            let images = places.iter().map(|number| image(number)).collect();
            replicas.handle_update(RankUpdate::Checkpoints { rank: 4, images });
        }
        replicas.handle_end(5);
        assert_eq!(replicas.living(4..7), [4, 6]);
        assert!(!replicas.handle_unstartable(4) && replicas.handle_unstartable(4), "once");
        assert_eq!(replicas.next_first_incarnation(4), INCARNATIONS_PER_NODE);
        let transferred = replicas.transfer(4..6, 0, now + Duration::from_secs(5));
        let [one] = &transferred[..] else { panic!("{transferred:?}") };
        let mut printed = OutputLog::default();
        printed.append(b"abcdefg");
        assert_eq!((one.rank, one.restarts, one.moves), (4, 3, 1));
        assert_eq!(one.outputs, [OutputLog::default(), printed]);
        assert_eq!(one.age, Duration::from_secs(5));
        let incarnation = one.incarnations[0];
        assert_eq!(
            (incarnation.began, incarnation.lasted),
            (Duration::from_secs(2), Duration::from_secs(3))
        );
        assert_eq!((incarnation.point.asked, incarnation.point.printed), (2, 7));
        assert_eq!(one.unreleased_puts(), [("a".to_string(), "1".to_string())]);
        assert!(unanswered_requests(one).eq([BARRIER]));
        assert_eq!(one.images, [image("rank-4/1"), image("rank-4/2")]);
        // The barrier was over, and nobody has heard that its rank knew.
        let again = replicas.transfer(4..5, 1, now + Duration::from_secs(6)).remove(0);
        assert_eq!(
            (again.incarnations.len(), replicas.next_first_incarnation(4)),
            (2, 3 * INCARNATIONS_PER_NODE)
        );
        assert_eq!((again.restarts, again.moves, again.unanswered_requests().count()), (4, 2, 0));
        assert_eq!(again.exchanges[1].answer.as_deref(), Some(&barrier_out()[..]));
        assert!(again.unreleased_puts().is_empty(), "everybody has it");
    }

    /// Of a spawn of so many commands.
    fn block(number: u32, count: u32) -> String {
        let lines = [format!("totspawns={count}"), format!("spawnssofar={number}")];
        crate::pmi::wire::block_text(&lines)
    }

    /// What the next agent is to ask of itself.
    fn unanswered_requests(transferred: &TransferredRank) -> impl Iterator<Item = &str> {
        transferred.unanswered_requests().map(|exchange| exchange.question.as_str())
    }

    fn lose(replicas: &mut ReplicatedRankStates) -> TransferredRank {
        replicas.transfer(4..5, 0, Instant::now()).remove(0)
    }

    #[test]
    fn the_launcher_is_asked_once_whichever_node_asks() {
        let mut replicas = ReplicatedRankStates::default();
        let spawn = block(1, 1);
        replicas.handle_update(asked(4, "cmd=get_maxes\n"));
        replicas.handle_update(heard(4, "cmd=maxes\n"));
        replicas.handle_update(asked(4, &spawn));
        assert!(replicas.admit(4));
        for _ in 0..2 {
            // Lost, and the next node as well.
            assert!(unanswered_requests(&lose(&mut replicas)).eq([&spawn[..]]));
            assert!(!replicas.admit(4));
        }
        replicas.handle_answer(4, "cmd=spawn_result rc=0\n");
        // What was still on its way from there; and what the node has passed on.
        assert!(!replicas.admit(4));
        replicas.handle_update(heard(4, "cmd=spawn_result rc=0\n"));
        replicas.handle_update(asked(4, "cmd=lookup_name service=a\n"));
        assert!(replicas.admit(4) && !replicas.admit(4));
        let transferred = lose(&mut replicas);
        assert_eq!(transferred.exchanges[1].answer.as_deref(), Some("cmd=spawn_result rc=0\n"));
        assert!(unanswered_requests(&transferred).eq(["cmd=lookup_name service=a\n"]));
    }

    #[test]
    fn an_answer_that_comes_while_a_rank_is_on_no_node_is_kept() {
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_update(asked(4, "cmd=publish_name service=a port=b\n"));
        assert!(replicas.admit(4));
        replicas.handle_answer(4, "cmd=publish_result rc=0\n");
        let transferred = lose(&mut replicas);
        assert_eq!(transferred.exchanges[0].answer.as_deref(), Some("cmd=publish_result rc=0\n"));
        assert_eq!(transferred.unanswered_requests().count(), 0);
    }

    #[test]
    fn a_question_that_was_lost_on_its_way_is_asked() {
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_update(asked(4, "cmd=lookup_name service=a\n"));
        assert_eq!(lose(&mut replicas).unanswered_requests().count(), 1);
        assert!(replicas.admit(4));
    }

    #[test]
    fn an_answer_goes_to_no_other_question() {
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_answer(4, "late\n");
        assert!(replicas.admit(4), "of one that was spawned nothing is kept");
        replicas.handle_update(asked(4, BARRIER));
        replicas.handle_answer(4, "late\n");
        assert!(unanswered_requests(&lose(&mut replicas)).eq([BARRIER]));
    }

    #[test]
    fn blocks_of_a_spawn_stay_together() {
        let mut replicas = ReplicatedRankStates::default();
        let [first, second, last] = [1, 2, 3].map(|number| block(number, 3));
        for block in [&first, &second] {
            replicas.handle_update(asked(4, BARRIER));
            replicas.handle_update(heard(4, "out\n"));
            replicas.handle_update(asked(4, block));
            assert!(
                unanswered_requests(&lose(&mut replicas)).eq([&block[..]]),
                "it was lost in front of that"
            );
            replicas.handle_update(heard(4, ""));
            assert!(unanswered_requests(&lose(&mut replicas)).eq([&block[..]]));
        }
        replicas.handle_update(asked(4, &last));
        assert!(unanswered_requests(&lose(&mut replicas)).eq([&second[..], &last[..]]));
        assert!(replicas.admit(4));
        replicas.handle_answer(4, "cmd=spawn_result rc=0\n");
        assert_eq!(lose(&mut replicas).unanswered_requests().count(), 0);
    }

    #[test]
    fn who_asks_without_end_cannot_go_on_elsewhere() {
        let mut replicas = ReplicatedRankStates::default();
        let long = "x".repeat(EXCHANGED_BYTES_MAX / 2);
        replicas.handle_update(asked(4, &long));
        replicas.handle_update(heard(4, &long));
        assert!(!replicas.has_asked_too_much(4) && !replicas.has_asked_too_much(5));
        replicas.handle_update(asked(4, "x"));
        assert!(replicas.has_asked_too_much(4) && replicas.admit(4));
        assert_eq!(replicas.exchanged_bytes(&[3, 4, 5]), EXCHANGED_BYTES_MAX + 1);
        assert!(lose(&mut replicas).exchanges.is_empty());
    }

    #[test]
    fn recording_updates_continue_where_the_last_one_ended() {
        let mut replicas = ReplicatedRankStates::default();
        let update = |from, reads: &[u8], polls, first_determinant, count: u64| RecordingUpdate {
            rank: 4,
            from,
            reads: reads.to_vec(),
            polls,
            first_determinant,
            determinants: (first_determinant..first_determinant + count)
                .map(|number| [1, number, 0])
                .collect(),
            ..RecordingUpdate::default()
        };
        replicas.handle_recording_update(update(0, b"abc", 5, 0, 3));
        replicas.handle_recording_update(update(3, b"def", 9, 3, 2));
        // It has been told what was known, and tells it.
        replicas.handle_recording_update(update(4, b"efg", 8, 2, 4));
        replicas.handle_recording_update(update(100, b"x", 8, 6, 0));
        let recording = replicas.recording(4).unwrap();
        assert_eq!((&recording.reads[..], recording.polls), (&b"abcdefg"[..], 9));
        replicas.handle_recording_update(RecordingUpdate { base: 3, ..update(7, b"", 9, 6, 0) });
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..], recording.end()), (3, &b"defg"[..], 7));
        // Images were taken, and nothing was printed.
        replicas
            .handle_recording_update(RecordingUpdate { base: 20, ..update(20, b"uvw", 9, 6, 0) });
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..]), (20, &b"uvw"[..]));
        assert_eq!((recording.first_determinant, recording.determinants.len()), (0, 6));
        // More has come than can be under way.
        replicas.handle_recording_update(update(
            7,
            b"",
            10,
            70_000,
            RECENT_DETERMINANTS_MAX as u64 - 1,
        ));
        replicas.handle_recording_update(update(
            7,
            b"",
            10,
            70_000 + RECENT_DETERMINANTS_MAX as u64 - 1,
            3,
        ));
        let rest = replicas.recording(4).unwrap().rest(4);
        assert_eq!(
            (rest.first_determinant, rest.determinants.len()),
            (70_002, RECENT_DETERMINANTS_MAX)
        );
        assert!(
            (rest.first_determinant..)
                .zip(&rest.determinants)
                .all(|(at, determinant)| determinant[1] == at)
        );
    }

    #[test]
    fn a_batch_counts_when_its_last_piece_has_arrived() {
        let mut replicas = ReplicatedRankStates::default();
        let piece = |from, reads: &[u8], continues| RecordingUpdate {
            rank: 4,
            from,
            reads: reads.to_vec(),
            continues,
            ..RecordingUpdate::default()
        };
        replicas.handle_recording_update(RecordingUpdate {
            polls: 2,
            files: vec![1],
            ..piece(0, b"abc", false)
        });
        // The rest goes with the first piece.
        let first = RecordingUpdate {
            polls: 9,
            is_full: true,
            base: 2,
            determinants: vec![[1, 0, 0]],
            files: vec![2],
            ..piece(3, b"def", true)
        };
        let is_as_before = |replicas: &ReplicatedRankStates| {
            let recording = replicas.recording(4).unwrap();
            assert_eq!(
                (recording.first, &recording.reads[..], recording.end()),
                (0, &b"abc"[..], 3)
            );
            let determinants = recording.determinants.len();
            assert_eq!((recording.polls, recording.is_full, determinants), (2, false, 0));
            assert_eq!((&recording.files[..], recording.rest(4).files), (&[1][..], vec![1]));
        };
        for _ in 0..2 {
            replicas.handle_recording_update(first.clone());
            replicas.handle_recording_update(piece(6, b"gh", true));
            is_as_before(&replicas);
            // The node is lost, and who takes the rank tells it otherwise.
            replicas.drop_partial_batch(4);
            is_as_before(&replicas);
        }
        // Even if nobody says that it is lost.
        replicas.handle_recording_update(first.clone());
        replicas.handle_recording_update(first);
        replicas.handle_recording_update(piece(6, b"GH", true));
        replicas.handle_recording_update(piece(8, b"I", false));
        let recording = replicas.recording(4).unwrap();
        assert_eq!(
            (recording.first, &recording.reads[..], recording.end()),
            (2, &b"cdefGHI"[..], 9)
        );
        assert_eq!(
            (recording.polls, recording.is_full, recording.determinants.len()),
            (9, true, 1)
        );
        assert_eq!((&recording.files[..], recording.partial.is_none()), (&[2][..], true));
        // All or some of it comes again, in pieces.
        replicas.handle_recording_update(RecordingUpdate { base: 2, ..piece(2, b"cdef", true) });
        replicas.handle_recording_update(piece(6, b"GHIjk", true));
        assert_eq!(replicas.recording(4).unwrap().end(), 9);
        assert_eq!(replicas.recording(4).unwrap().partial.as_ref().unwrap().reads, b"jk");
        replicas.handle_recording_update(piece(11, b"", false));
        assert_eq!(replicas.recording(4).unwrap().reads, b"cdefGHIjk");
        // The oldest image stands behind all that was known.
        replicas.handle_recording_update(RecordingUpdate { base: 20, ..piece(20, b"uv", true) });
        assert_eq!(replicas.recording(4).unwrap().end(), 11);
        replicas.handle_recording_update(piece(22, b"w", false));
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..]), (20, &b"uvw"[..]));
    }
}
