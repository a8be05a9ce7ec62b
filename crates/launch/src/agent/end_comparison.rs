//! Before the end of a moved rank is reported, what it has sent again is compared with what ranks
//! of other nodes got before it moved.
//!
//! A rank whose node was lost sends its logs again from another node. As long as it and the
//! receiver take part, they compare ([`landbridge_proto::log::transfer`]), or their agents do while
//! it does nothing ([`super::frame_carrier`]). Left are logs to ranks that have ended, which have
//! acted on what they had got, and logs into which the moved rank writes nothing this time. For
//! these, this agent asks the agents of the receivers for digests.
//!
//! In: the file with the logs of this node's ranks, answers of other agents. Out: questions, and
//! whether the end of a rank may be reported. What may never happen: a rank that has sent something
//! else than before, or of which that is not known, ends as if it had not; an end waits for an
//! answer longer than [`WAIT_MAX`].

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use landbridge_proto::log::agent_transfer::{Verification, VerifiedLog};

use super::log_comparison::{
    arrived_digest, digest_of, is_compared, refuse_unless_other_part, sends_otherwise,
};
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::{FrameTransfer, FrameTransferStep, Message};

/// Time after which a question is repeated. A digest of a large log takes seconds.
const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// Longest time between two answers. If the node of a receiver is lost, nothing answers before its
/// rank begins again on another one.
const WAIT_MAX: Duration = Duration::from_secs(600);
/// Time after which the user reads for whom the end of a rank waits.
const NOTE_AFTER: Duration = Duration::from_secs(10);
/// Questions without an answer at most: all of them go through the launcher.
const QUESTIONS_MAX: usize = 64;
/// Ranks that a line names at most.
const NAMED_MAX: usize = 8;

/// The comparisons of the moved ranks of this node that have ended.
pub struct EndComparisons {
    logs: Rc<NodeLogs>,
    /// By rank.
    comparisons: BTreeMap<u32, Comparison>,
}

struct Comparison {
    /// When the user reads that the end waits.
    note_at: Option<Instant>,
    /// When the job ends if nothing is answered.
    until: Instant,
    /// By rank of another node: the log to it.
    open: BTreeMap<u32, OpenLog>,
}

/// A log that is not compared yet.
struct OpenLog {
    verified: VerifiedLog,
    /// When the question that has no answer yet was asked.
    asked: Option<Instant>,
}

impl OpenLog {
    /// When the next question is due, if it is not due at once.
    fn asks_at(&self) -> Option<Instant> {
        self.asked.map(|asked| asked + REPEAT_AFTER)
    }

    fn is_due(&self, now: Instant) -> bool {
        self.asks_at().is_none_or(|at| now >= at)
    }
}

impl EndComparisons {
    pub fn new(logs: Rc<NodeLogs>) -> EndComparisons {
        EndComparisons { logs, comparisons: BTreeMap::new() }
    }

    /// When something is due; `None`: nothing is compared.
    pub fn next_time(&self, now: Instant) -> Option<Instant> {
        let open = self.comparisons.values().filter(|comparison| !comparison.open.is_empty());
        let times = open.clone().flat_map(|it| it.note_at.into_iter().chain([it.until]));
        let logs = || open.clone().flat_map(|it| it.open.values());
        let is_full = logs().filter(|log| !log.is_due(now)).count() >= QUESTIONS_MAX;
        let asks_at = |log: &OpenLog| log.asks_at().unwrap_or(now).max(now);
        // Others have their turn once answers have come, or are late.
        let asks = logs().map(asks_at).filter(|at| !is_full || *at > now);
        times.chain(asks).min()
    }

    /// Whether all that a rank of this node has sent, which has ended, was compared that has to be.
    /// Begins with it at the first call. If no answer comes, the job ends.
    pub fn is_compared(&mut self, rank: u32, now: Instant, parent: &mut ParentAgent) -> bool {
        if !self.logs.has_moved(rank) {
            return true;
        }
        let logs = &self.logs;
        let comparison = self.comparisons.entry(rank).or_insert_with(|| Comparison {
            note_at: Some(now + NOTE_AFTER),
            until: now + WAIT_MAX,
            open: logs_to_compare(logs, rank, parent),
        });
        if comparison.open.is_empty() {
            return true;
        }
        let names = || named(comparison.open.keys());
        if now >= comparison.until {
            parent.fail(format!(
                "rank {rank} has ended after it moved, and nothing answers for the ranks with \
                 whose messages its own were to be compared: {}",
                names()
            ));
            comparison.open.clear();
            return true;
        }
        if comparison.note_at.take_if(|at| now >= *at).is_some() {
            parent.note(format!(
                "rank {rank} has ended after it moved; what it has sent again is still to be \
                 compared with what these ranks got: {}",
                names()
            ));
        }
        false
    }

    /// Asks the agents of other ranks what is due.
    pub fn advance(&mut self, now: Instant, parent: &mut ParentAgent) {
        let waiting = |it: &Comparison| it.open.values().filter(|log| !log.is_due(now)).count();
        let waiting: usize = self.comparisons.values().map(waiting).sum();
        let mut room = QUESTIONS_MAX.saturating_sub(waiting);
        for (from, comparison) in &mut self.comparisons {
            let due = comparison.open.iter_mut().filter(|(_, log)| log.is_due(now));
            for (to, log) in due.take(room) {
                log.asked = Some(now);
                room -= 1;
                let digest_from = Some(log.verified.position());
                let step = FrameTransferStep::Ask { digest_from, has_ended: true };
                let (from, to) = (*from, *to);
                parent.send(&Message::FrameTransfer(Box::new(FrameTransfer { from, to, step })));
            }
        }
    }

    /// Handles an answer of an agent.
    ///
    /// # Errors
    /// The rank has sent something else than before it moved, or that cannot be known.
    pub fn handle(&mut self, transfer: &FrameTransfer, now: Instant) -> Result<AnswerUse> {
        let (from, to) = (transfer.from, transfer.to);
        let Some(comparison) = self.comparisons.get_mut(&from) else {
            return Ok(AnswerUse::Nothing);
        };
        let Some(log) = comparison.open.get_mut(&to) else { return Ok(AnswerUse::Nothing) };
        let (position, digest) = match &transfer.step {
            FrameTransferStep::Arrived { position, digest } => (position, digest),
            FrameTransferStep::NotYet => {
                comparison.until = now + WAIT_MAX;
                return Ok(AnswerUse::Awaited);
            }
            _ => return Ok(AnswerUse::Nothing),
        };
        comparison.until = now + WAIT_MAX;
        let part = (log.verified.position(), *position);
        let logs = &self.logs;
        let sent = || digest_of(logs, (from, to), part);
        match log.verified.verify(*position, digest.as_ref().and_then(arrived_digest), sent) {
            Verification::Same => {
                comparison.open.remove(&to);
                Ok(AnswerUse::Compared(part.0.max(*position)))
            }
            // The rank sends nothing more, so a later answer says the same.
            Verification::Unknown => {
                refuse_unless_other_part(logs, (from, to), part, digest.as_ref())?;
                log.asked = None;
                Ok(AnswerUse::Awaited)
            }
            Verification::Other => bail!(sends_otherwise(from, to)),
        }
    }
}

/// What the answer of an agent was good for.
#[derive(Debug, PartialEq, Eq)]
pub enum AnswerUse {
    /// Not awaited here.
    Nothing,
    /// Awaited, but about another part, or that nothing is known yet.
    Awaited,
    /// The log is compared up to this position, which is all that its receiver has.
    Compared(u64),
}

/// The logs of a moved rank to ranks of other nodes that nobody has compared yet. A spawned process
/// whose group could not be started as a whole is known, and nobody answers for it.
fn logs_to_compare(logs: &NodeLogs, rank: u32, parent: &ParentAgent) -> BTreeMap<u32, OpenLog> {
    let size = parent.assignment.as_ref().map_or(u32::MAX, |own| own.job.size);
    let targets = logs.targets(rank);
    let is_meant = |to: &u32| *to < size || targets.contains(to);
    let peers = logs.known_elsewhere().filter(is_meant).filter(|to| !is_compared(logs, rank, *to));
    let open = |to| {
        let verified = VerifiedLog::new(logs.sent_before(rank, to));
        (to, OpenLog { verified, asked: None })
    };
    peers.map(open).collect()
}

fn named<'a>(ranks: impl ExactSizeIterator<Item = &'a u32>) -> String {
    let more = ranks.len().saturating_sub(NAMED_MAX);
    let mut names: Vec<_> = ranks.take(NAMED_MAX).map(u32::to_string).collect();
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use landbridge_proto::log::contact::Contact;

    use super::super::node_logs::tests::logs;
    use super::*;
    use crate::control::LogDigest;
    use crate::control_stream::ControlStream;

    /// Rank 0 has moved here and has ended, ranks 5 and 6 are on other nodes.
    struct Scene {
        comparisons: EndComparisons,
        parent: ParentAgent,
        above: ControlStream,
        began: Instant,
    }

    impl Scene {
        fn new() -> Scene {
            let logs = logs(0..0);
            logs.add_moved(0, 1).unwrap();
            let contact = |generation| Contact { generation, name: [3; 48] }.emit();
            logs.note_contact(5, &contact(3)).unwrap();
            logs.note_contact(6, &Contact::ended(0).emit()).unwrap();
            let (theirs, ours) = UnixStream::pair().unwrap();
            let stream = |it: UnixStream| (it.try_clone().unwrap().into(), it.into());
            let ((input, output), (own_input, own_output)) = (stream(theirs), stream(ours));
            Scene {
                comparisons: EndComparisons::new(Rc::new(logs)),
                parent: ParentAgent::new(ControlStream::to_parent(own_input, own_output).unwrap()),
                above: ControlStream::to_agent(input, output).unwrap(),
                began: Instant::now(),
            }
        }

        fn is_compared(&mut self, after: Duration) -> bool {
            self.comparisons.is_compared(0, self.began + after, &mut self.parent)
        }

        /// The ranks about which questions are asked.
        fn asked(&mut self, after: Duration) -> Vec<u32> {
            self.comparisons.advance(self.began + after, &mut self.parent);
            let questions = self.said().into_iter().filter_map(|message| match message {
                Message::FrameTransfer(transfer) => {
                    let ask = FrameTransferStep::Ask { digest_from: Some(0), has_ended: true };
                    assert_eq!((transfer.from, &transfer.step), (0, &ask));
                    Some(transfer.to)
                }
                _ => None,
            });
            questions.collect()
        }

        fn said(&mut self) -> Vec<Message> {
            self.parent.stream.flush();
            let _ = self.above.fill();
            std::iter::from_fn(|| self.above.poll_message().unwrap()).collect()
        }

        fn answer(
            &mut self,
            to: u32,
            position: u64,
            digest: (u64, Option<u64>),
        ) -> Result<AnswerUse> {
            let digest = Some(LogDigest { from: digest.0, digest: digest.1 });
            let step = FrameTransferStep::Arrived { position, digest };
            self.comparisons.handle(&FrameTransfer { from: 0, to, step }, self.began)
        }
    }

    #[test]
    fn an_end_is_reported_once_all_have_what_was_sent() {
        let mut scene = Scene::new();
        assert!(!scene.is_compared(Duration::ZERO));
        assert_eq!(scene.asked(Duration::ZERO), [5, 6]);
        assert_eq!(scene.asked(REPEAT_AFTER / 2), [] as [u32; 0]);
        assert_eq!(scene.answer(5, 0, (0, None)).unwrap(), AnswerUse::Compared(0));
        assert_eq!(scene.answer(5, 0, (0, None)).unwrap(), AnswerUse::Nothing, "twice");
        assert_eq!(scene.asked(REPEAT_AFTER), [6]);
        assert!(!scene.is_compared(REPEAT_AFTER));
        assert_eq!(scene.answer(6, 0, (0, None)).unwrap(), AnswerUse::Compared(0));
        assert!(scene.is_compared(REPEAT_AFTER));
        assert_eq!(scene.comparisons.next_time(scene.began), None);
    }

    /// One that has sent nothing, so it has sent something else.
    #[test]
    fn what_others_have_is_to_be_sent_again() {
        let error = |digest| {
            let mut scene = Scene::new();
            scene.is_compared(Duration::ZERO);
            let other_part = scene.answer(6, 64, (32, Some(7))).unwrap();
            assert_eq!(other_part, AnswerUse::Awaited);
            scene.answer(6, 64, (0, digest)).unwrap_err().to_string()
        };
        assert!(error(Some(7)).contains("is not what it sent before it moved"));
        assert!(error(None).contains("cannot be compared"), "its receiver does not keep it");
    }

    #[test]
    fn an_end_that_nobody_answers_for_ends_the_job() {
        let mut scene = Scene::new();
        assert!(!scene.is_compared(Duration::ZERO) && scene.said().is_empty());
        assert!(!scene.is_compared(NOTE_AFTER) && !scene.is_compared(2 * NOTE_AFTER));
        let said = scene.said();
        let [Message::Note { text }] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("is still to be compared with what these ranks got: 5, 6"));
        scene.is_compared(WAIT_MAX);
        let said = scene.said();
        let [Message::Failed { text }] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("rank 0 has ended after it moved, and nothing answers"), "{text}");
    }

    #[test]
    fn a_line_names_some_ranks_and_counts_the_others() {
        let ranks: Vec<u32> = (0..10).collect();
        assert_eq!(named(ranks[..2].iter()), "0, 1");
        assert_eq!(named(ranks.iter()), "0, 1, 2, 3, 4, 5, 6, 7, and 2 more");
    }
}
