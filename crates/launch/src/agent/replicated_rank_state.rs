//! Replicated rank state: what an agent keeps of the ranks of the agents below it, so that these
//! ranks can be restarted on another node. The state holds the PMI requests of a rank with the
//! answers, what the rank has printed, and how often the rank has been restarted.
//!
//! In: updates of the agents below, in their order. Out: a [`TransferredRank`] for each rank that
//! moves. The module does no I/O. Everything that other processes have seen of a rank came after
//! the updates that are kept here.
//!
//! A PMI request may be open when its node is lost. A rank sends one request at a time, so the
//! index of a request in the record is its number, whichever incarnation sends it.
//!
//! | request | answered by | after a move |
//! |---|---|---|
//! | `init`, `get_…`, `get`, `finalize` | the rank's agent | same answer |
//! | `put` | the rank's agent | [`TransferredRank::unreleased_puts`] until a barrier |
//! | `barrier_in` | all agents | [`Adoption::has_reached`]; if released: answered here |
//! | block of a spawn, not the last | no agent | [`TransferredRank::unanswered_requests`] |
//! | last block of a spawn, names | the launcher | once: [`ReplicatedRankStates::admit`] |
//! | `abort` | no agent | the job ends |
//!
//! The rank's agent answers `init`, `get_…`, `get` and `finalize` from what every agent knows. The
//! agent records answers of the launcher on their way down
//! ([`ReplicatedRankStates::handle_answer`]).
//!
//! What may never happen: the launcher receives the same request twice; an answer goes to another
//! request; a part of a rank's record that ends within an entry counts.
//!
//! [`Adoption::has_reached`]: crate::control::rank_state::Adoption::has_reached

use std::collections::BTreeMap;
use std::time::Instant;

use landbridge_proto::id::INCARNATIONS_PER_NODE;

use super::pmi_replay::EXCHANGED_BYTES_MAX;
use super::replicated_recording::ReplicatedRecording;
use crate::control::Stream;
use crate::control::rank_state::{Exchange, RankUpdate, RecordingUpdate, TransferredRank};
use crate::ending::Ending;
use crate::output_log::OutputLog;
use crate::pmi::server::{Stage, barrier_out};
use crate::pmi::wire::{PmiCommand, is_answered_later};
use crate::restart::{IncarnationRecord, ProgressPoint};

/// State of the ranks of agents below, by rank; the module head has the rules.
#[derive(Debug, Default)]
pub struct ReplicatedRankStates {
    ranks: BTreeMap<u32, ReplicatedRankState>,
}

#[derive(Debug, Default)]
struct ReplicatedRankState {
    state: TransferredRank,
    /// Number of leading exchanges up to the last one that was forwarded to the launcher.
    forwarded: usize,
    /// Bytes of all requests and answers of the rank.
    exchanged_bytes: usize,
    /// When the rank's first process began, and when the present process began.
    began: Option<[Instant; 2]>,
    recording: ReplicatedRecording,
    /// Updates that count once those of all ranks of the node have arrived.
    cut: Vec<RecordingUpdate>,
    /// The rank could not be started on a node, and has moved to another one.
    has_moved_before: bool,
    /// How the rank has ended; it may be executed again where others need what it has sent.
    ending: Option<Ending>,
    /// How it had ended before it was executed again.
    ended_before: Option<Ending>,
}

impl ReplicatedRankStates {
    fn entry(&mut self, rank: u32) -> &mut ReplicatedRankState {
        self.ranks.entry(rank).or_default()
    }

    pub fn handle_update(&mut self, update: RankUpdate) {
        match update {
            RankUpdate::PmiRequest { rank, question } => self.entry(rank).ask(question),
            // An answer of the launcher is recorded already, and no other request is open then.
            RankUpdate::PmiReply { rank, answer } => {
                if let Some(number) = self.entry(rank).unanswered() {
                    self.entry(rank).answer(number, answer);
                }
            }
            RankUpdate::Checkpoints { rank, images } => self.entry(rank).state.images = images,
            RankUpdate::IncarnationEnded { rank, incarnation, last_words } => {
                let state = &mut self.entry(rank).state;
                state.incarnations.push(incarnation);
                state.last_words = last_words;
            }
            RankUpdate::LastWords { rank, from } => {
                let state = &mut self.entry(rank).state;
                state.outputs[1].cut(from);
                state.last_words = None;
            }
            // The agent handles this message itself.
            RankUpdate::Unstartable { .. } => {}
        }
    }

    /// Whether to forward a request of the rank that only the launcher can answer. False for a
    /// request that a lost node has forwarded before: the answer to that one serves this request.
    pub fn admit(&mut self, rank: u32) -> bool {
        let replica = self.entry(rank);
        if replica.state.exchanges.is_empty() {
            // No exchanges of the rank are kept.
            return true;
        }
        let number = replica.unanswered().map_or(0, |number| number + 1);
        let is_new = number > replica.forwarded;
        replica.forwarded = replica.forwarded.max(number);
        is_new
    }

    /// Records an answer of the launcher on its way down. The rank may run on no node at the
    /// moment.
    pub fn handle_answer(&mut self, rank: u32, answer: &str) {
        let Some(replica) = self.ranks.get_mut(&rank) else { return };
        if let Some(number) = replica.unanswered().filter(|number| replica.forwarded == number + 1)
        {
            replica.answer(number, answer.to_string());
        }
    }

    /// Whether the rank's requests and answers exceed [`EXCHANGED_BYTES_MAX`], so that the rank
    /// cannot move.
    pub fn has_asked_too_much(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|replica| replica.exchanged_bytes > EXCHANGED_BYTES_MAX)
    }

    /// Bytes of all requests and answers of these ranks.
    pub fn exchanged_bytes(&self, ranks: &[u32]) -> usize {
        ranks
            .iter()
            .filter_map(|rank| self.ranks.get(rank))
            .map(|replica| replica.exchanged_bytes)
            .sum()
    }

    /// Records new output of the rank.
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

    /// Notes that the rank cannot be started on its node; returns whether this has happened before.
    pub fn handle_unstartable(&mut self, rank: u32) -> bool {
        std::mem::replace(&mut self.entry(rank).has_moved_before, true)
    }

    pub fn handle_recording_update(&mut self, update: RecordingUpdate) {
        let replica = self.entry(update.rank);
        match update.is_in_cut {
            true => replica.cut.push(update),
            false => replica.recording.apply(update),
        }
    }

    /// All updates of a cut through the ranks of a node have arrived.
    pub fn handle_cut_end(&mut self, ranks: std::ops::Range<u32>) {
        for (_, replica) in self.ranks.range_mut(ranks) {
            for update in std::mem::take(&mut replica.cut) {
                replica.recording.apply(update);
            }
        }
    }

    /// Drops the pieces of a batch that will not be completed, because the rank's node is lost.
    pub fn drop_partial_batch(&mut self, rank: u32) {
        if let Some(replica) = self.ranks.get_mut(&rank) {
            replica.recording.partial = None;
            replica.cut = Vec::new();
        }
    }

    /// The replicated record of the rank.
    pub fn recording(&self, rank: u32) -> Option<&ReplicatedRecording> {
        self.ranks.get(&rank).map(|replica| &replica.recording)
    }

    /// Returns the given ranks without those that have ended.
    pub fn living(&self, ranks: std::ops::Range<u32>) -> Vec<u32> {
        ranks.filter(|rank| self.is_living(*rank)).collect()
    }

    fn has_ended(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|replica| replica.ending.is_some())
    }

    pub fn is_living(&self, rank: u32) -> bool {
        !self.has_ended(rank)
    }

    /// These ranks had ended, and are executed again.
    pub fn handle_again(&mut self, ranks: &[u32]) {
        for rank in ranks {
            self.entry(*rank).begin_again();
        }
    }

    /// The ranks among these that have ended.
    pub fn ended(&self, ranks: &[u32]) -> Vec<u32> {
        ranks.iter().copied().filter(|rank| self.has_ended(*rank)).collect()
    }

    /// Whether a rank has moved to another node and has not ended there.
    pub fn has_moved(&self) -> bool {
        self.ranks.values().any(|replica| replica.state.moves > 0 && replica.ending.is_none())
    }

    /// Lowest incarnation number that the rank's next node uses; earlier nodes of the rank use
    /// lower numbers only.
    pub fn next_first_incarnation(&self, rank: u32) -> u32 {
        let moves = self.ranks.get(&rank).map_or(0, |replica| replica.state.moves);
        (moves + 1) * INCARNATIONS_PER_NODE
    }

    /// Notes how a rank has ended; returns whether it had ended in another way before it was
    /// executed again.
    pub fn handle_end(&mut self, rank: u32, ending: Ending) -> bool {
        let replica = self.entry(rank);
        replica.ending = Some(ending);
        replica.ended_before.is_some_and(|before| before != ending)
    }

    /// State of these ranks for a move. `released`: number of barriers that are over. `with_ended`:
    /// also of those that have ended, which do not count as ended any more.
    pub fn transfer(
        &mut self,
        ranks: impl IntoIterator<Item = u32>,
        released: u32,
        with_ended: bool,
        now: Instant,
    ) -> Vec<TransferredRank> {
        let mut transferred = Vec::new();
        for rank in ranks {
            if self.has_ended(rank) && !with_ended {
                continue;
            }
            let replica = self.entry(rank);
            replica.begin_again();
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
    /// The rank runs again, if it had ended.
    fn begin_again(&mut self) {
        self.ended_before = self.ending.take().or(self.ended_before);
    }

    /// Number of the oldest request without an answer.
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

/// Record of the process that was lost with its node; the process counts as killed.
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
        has_gone_back: false,
        point,
    }
}

/// Completes barriers that are over: their answers may have been lost with the node.
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
    /// Keys that the rank has put since the last barrier that is over for it; other agents may not
    /// have these keys.
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

    /// Requests without an answer, and before them the blocks of a spawn whose last block is still
    /// missing.
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

    use landbridge_proto::recent_determinants::RECENT_DETERMINANTS_MAX;

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
    fn a_rank_that_has_ended_is_transferred_where_others_need_its_log() {
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_incarnation(4, 0, Instant::now());
        assert!(!replicas.handle_end(5, Ending::Exited(3)));
        let transfer = |with_ended: bool, replicas: &mut ReplicatedRankStates| {
            let all = replicas.transfer(4..6, 0, with_ended, Instant::now());
            all.iter().map(|one| one.rank).collect::<Vec<_>>()
        };
        assert!(!replicas.has_moved());
        assert_eq!(transfer(false, &mut replicas), [4]);
        assert_eq!(replicas.living(4..6), [4]);
        assert_eq!(transfer(true, &mut replicas), [4, 5]);
        assert_eq!(replicas.living(4..6), [4, 5]);
        assert!(!replicas.handle_end(5, Ending::Exited(3)), "as before");
        assert!(replicas.has_moved() && replicas.living(4..6) == [4]);
        replicas.handle_end(4, Ending::Exited(0));
        assert!(!replicas.has_moved(), "none that is left may need anything");
        replicas.handle_again(&[4]);
        replicas.handle_again(&[5]);
        assert_eq!(replicas.living(4..6), [4, 5]);
        assert!(replicas.handle_end(5, Ending::Exited(0)), "its first end counts");
    }

    #[test]
    fn a_transferred_rank_keeps_where_last_words_begin() {
        let now = Instant::now();
        let incarnation = lost_with_its_node(&TransferredRank::default(), [now; 2], now);
        let mut replicas = ReplicatedRankStates::default();
        replicas.handle_print(4, Stream::Stderr, b"one\nTraceback\n");
        let last_words = Some(4);
        replicas.handle_update(RankUpdate::IncarnationEnded { rank: 4, incarnation, last_words });
        let moved = replicas.transfer(4..5, 0, false, now).remove(0);
        assert_eq!(moved.last_words, last_words);
        // The next process has said something else in their place.
        replicas.handle_update(RankUpdate::LastWords { rank: 4, from: 4 });
        let moved = replicas.transfer(4..5, 0, false, now).remove(0);
        assert_eq!((moved.last_words, moved.outputs[1].end().bytes), (None, 4));
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
        replicas.handle_end(5, Ending::Exited(0));
        assert_eq!(replicas.living(4..7), [4, 6]);
        assert!(!replicas.handle_unstartable(4) && replicas.handle_unstartable(4), "once");
        assert_eq!(replicas.next_first_incarnation(4), INCARNATIONS_PER_NODE);
        let transferred = replicas.transfer(4..6, 0, false, now + Duration::from_secs(5));
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
        // The barrier was over, and no message says that the rank has received its release.
        let again = replicas.transfer(4..5, 1, false, now + Duration::from_secs(6)).remove(0);
        assert_eq!(
            (again.incarnations.len(), replicas.next_first_incarnation(4)),
            (2, 3 * INCARNATIONS_PER_NODE)
        );
        assert_eq!((again.restarts, again.moves, again.unanswered_requests().count()), (4, 2, 0));
        assert_eq!(again.exchanges[1].answer.as_deref(), Some(&barrier_out()[..]));
        assert!(again.unreleased_puts().is_empty(), "everybody has it");
    }

    /// Block `number` of a spawn of `count` commands.
    fn block(number: u32, count: u32) -> String {
        let lines = [format!("totspawns={count}"), format!("spawnssofar={number}")];
        crate::pmi::wire::block_text(&lines)
    }

    /// Requests that the next agent has to send to itself.
    fn unanswered_requests(transferred: &TransferredRank) -> impl Iterator<Item = &str> {
        transferred.unanswered_requests().map(|exchange| exchange.question.as_str())
    }

    fn lose(replicas: &mut ReplicatedRankStates) -> TransferredRank {
        replicas.transfer(4..5, 0, false, Instant::now()).remove(0)
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
            // The node is lost, and then the next node as well.
            assert!(unanswered_requests(&lose(&mut replicas)).eq([&spawn[..]]));
            assert!(!replicas.admit(4));
        }
        replicas.handle_answer(4, "cmd=spawn_result rc=0\n");
        // A repetition that was still on its way from the launcher, and the answer that the rank's
        // node has forwarded.
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
        // The next node received what was known, and repeats some of it.
        replicas.handle_recording_update(update(4, b"efg", 8, 2, 4));
        replicas.handle_recording_update(update(100, b"x", 8, 6, 0));
        let recording = replicas.recording(4).unwrap();
        assert_eq!((&recording.reads[..], recording.polls), (&b"abcdefg"[..], 9));
        replicas.handle_recording_update(RecordingUpdate { base: 3, ..update(7, b"", 9, 6, 0) });
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..], recording.end()), (3, &b"defg"[..], 7));
        // Images were taken meanwhile, and nothing was printed.
        replicas
            .handle_recording_update(RecordingUpdate { base: 20, ..update(20, b"uvw", 9, 6, 0) });
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..]), (20, &b"uvw"[..]));
        assert_eq!((recording.first_determinant, recording.determinants.len()), (0, 6));
        // More determinants than the ring holds.
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
        // The first piece carries the rest of the update.
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
            // The node is lost, and the node that takes the rank over sends another batch.
            replicas.drop_partial_batch(4);
            is_as_before(&replicas);
        }
        // A repeated batch replaces the partial batch even without `drop_partial_batch`.
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
        // Known entries are repeated in pieces, with new entries after them.
        replicas.handle_recording_update(RecordingUpdate { base: 2, ..piece(2, b"cdef", true) });
        replicas.handle_recording_update(piece(6, b"GHIjk", true));
        assert_eq!(replicas.recording(4).unwrap().end(), 9);
        assert_eq!(replicas.recording(4).unwrap().partial.as_ref().unwrap().reads, b"jk");
        replicas.handle_recording_update(piece(11, b"", false));
        assert_eq!(replicas.recording(4).unwrap().reads, b"cdefGHIjk");
        // The oldest image lies after all known entries.
        replicas.handle_recording_update(RecordingUpdate { base: 20, ..piece(20, b"uv", true) });
        assert_eq!(replicas.recording(4).unwrap().end(), 11);
        replicas.handle_recording_update(piece(22, b"w", false));
        let recording = replicas.recording(4).unwrap();
        assert_eq!((recording.first, &recording.reads[..]), (20, &b"uvw"[..]));
    }
}
