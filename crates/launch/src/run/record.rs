//! Relays are asked what they keep of their processes.

use std::time::{Duration, Instant};

use crate::control::Message;
use crate::ps::desk::Question;
use crate::ps::record::Record;

/// Relays that have not answered after this long are not waited for.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// Who asks for something else as well is answered without after this long.
const BRIEF: Duration = Duration::from_millis(300);
/// What they have said is told to whoever else asks the same within this time.
const AGE_MAX: Duration = Duration::from_millis(500);

/// See the module head.
#[derive(Default)]
pub struct Inquiry {
    serial: u32,
    asked: Option<Question>,
    /// Of agents that have not answered.
    awaited: usize,
    /// By when they are waited for, while they are; then until when it counts.
    until: Option<Instant>,
    /// By when those wait who want to know something else as well.
    brief_until: Option<Instant>,
    record: Record,
}

impl Inquiry {
    /// Whether nothing is asked just now.
    pub fn is_idle(&self) -> bool {
        self.until.is_none()
    }

    pub fn next_time(&self) -> Option<Instant> {
        self.until.into_iter().chain(self.brief_until).min()
    }

    /// Whether who wants to know this beside something else may wait for it: it is being asked, or will be.
    pub fn is_near(&self, question: Question) -> bool {
        self.is_idle() || (self.brief_until.is_some() && self.asked == Some(question))
    }

    /// What to send to the agents that may have a relay.
    pub fn begin(&mut self, question: Question, agents: usize, now: Instant) -> Message {
        let serial = self.serial.wrapping_add(1).max(1);
        let (asked, record) = (Some(question), Record::default());
        let (until, brief_until) = (Some(now + PATIENCE), Some(now + BRIEF));
        *self = Inquiry { serial, asked, awaited: agents, until, brief_until, record };
        let question = match question {
            Question::Story { rank, from, count } => format!("one {rank} {from} {count}"),
            _ => "all 0".to_string(),
        };
        Message::Inquire { serial, question }
    }

    pub fn take_in(&mut self, serial: u32, lines: &str, now: Instant) {
        if serial != self.serial || self.awaited == 0 {
            return;
        }
        self.record.take_in(lines);
        self.awaited -= 1;
        if self.awaited == 0 {
            (self.until, self.brief_until) = (Some(now + AGE_MAX), None);
        }
    }

    pub fn pass_time(&mut self, now: Instant) {
        self.brief_until = self.brief_until.filter(|until| *until > now);
        if self.until.is_some_and(|until| until <= now) {
            self.record.relays_missing = std::mem::take(&mut self.awaited) as u32;
            self.until = (self.record.relays_missing > 0).then_some(now + AGE_MAX);
        }
    }

    /// What is known, if that is fresh, and this was asked.
    pub fn found(&self, question: Question) -> Option<&Record> {
        let is_it = self.awaited == 0 && self.until.is_some() && self.asked == Some(question);
        is_it.then_some(&self.record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inquiry_ends_when_all_have_answered_or_had_their_time() {
        let (mut inquiry, now) = (Inquiry::default(), Instant::now());
        let story = Question::Story { rank: 3, from: 4, count: 5 };
        let message = inquiry.begin(story, 2, now);
        let question = "one 3 4 5".to_string();
        assert_eq!(message, Message::Inquire { serial: 1, question });
        inquiry.take_in(1, "", now);
        inquiry.take_in(7, "", now);
        assert_eq!(inquiry.found(story), None, "one is missing");
        inquiry.take_in(1, "", now);
        assert!(inquiry.found(story).is_some() && inquiry.found(Question::Log).is_none());
        inquiry.pass_time(now + AGE_MAX);
        assert!(inquiry.found(story).is_none() && inquiry.is_idle(), "it is old");
        assert!(inquiry.is_near(Question::Log));
        inquiry.begin(Question::Log, 2, now);
        inquiry.take_in(2, "", now);
        assert!(inquiry.is_near(Question::Log) && !inquiry.is_near(story));
        inquiry.pass_time(now + BRIEF);
        assert!(!inquiry.is_near(Question::Log), "that is not waited for");
        inquiry.pass_time(now + PATIENCE);
        let missing = inquiry.found(Question::Log).map(|record| record.relays_missing);
        assert_eq!(missing, Some(1));
        inquiry.pass_time(now + PATIENCE + AGE_MAX);
        assert!(inquiry.is_idle());
    }
}
