//! What an agent keeps of the ranks of the agents below it, so that they can go on elsewhere: what they have said to their process
//! manager with the answers, how much they have printed, how often they have been started.
//!
//! Pure. What the agents below say enters, in their order; a [`Moving`] for each rank leaves. All that others have seen of a rank
//! came after what is kept here.

use std::collections::BTreeMap;

use crate::control::Stream;
use crate::control::moved::{Exchange, Moving, Talk};
use crate::pmi::server::barrier_out;
use crate::pmi::wire::Command;

/// See the module head.
#[derive(Debug, Default)]
pub struct Wards {
    ranks: BTreeMap<u32, Ward>,
}

#[derive(Debug, Default)]
struct Ward {
    kept: Moving,
    /// It has ended for good.
    has_ended: bool,
}

impl Wards {
    fn of(&mut self, rank: u32) -> &mut Ward {
        self.ranks.entry(rank).or_default()
    }

    pub fn handle_talk(&mut self, talk: Talk) {
        match talk {
            Talk::Asked { rank, question } => {
                self.of(rank).kept.exchanges.push(Exchange { question, answer: None });
            }
            Talk::Heard { rank, answer } => {
                let mut exchanges = self.of(rank).kept.exchanges.iter_mut();
                if let Some(open) = exchanges.find(|exchange| exchange.answer.is_none()) {
                    open.answer = Some(answer);
                }
            }
            Talk::Images { rank, images } => self.of(rank).kept.images = images,
        }
    }

    /// It has printed so many bytes more.
    pub fn handle_print(&mut self, rank: u32, stream: Stream, bytes: u32) {
        self.of(rank).kept.printed[usize::from(stream == Stream::Stderr)] += u64::from(bytes);
    }

    pub fn handle_start(&mut self, rank: u32, start: u32) {
        let kept = &mut self.of(rank).kept;
        kept.starts = kept.starts.max(start);
    }

    pub fn handle_end(&mut self, rank: u32) {
        self.of(rank).has_ended = true;
    }

    /// Those of these ranks that have not ended move. `released`: barriers that are over.
    pub fn release(&mut self, ranks: std::ops::Range<u32>, released: u32) -> Vec<Moving> {
        let mut moving = Vec::new();
        for rank in ranks {
            let ward = self.of(rank);
            if ward.has_ended {
                continue;
            }
            let kept = &mut ward.kept;
            (kept.rank, kept.starts, kept.moves) = (rank, kept.starts + 1, kept.moves + 1);
            settle(&mut kept.exchanges, released);
            moving.push(kept.clone());
        }
        moving
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

    /// What it has asked and heard no answer to.
    pub fn open(&self) -> impl Iterator<Item = &str> {
        let open = self.exchanges.iter().filter(|exchange| exchange.answer.is_none());
        open.map(|exchange| exchange.question.as_str())
    }
}

#[cfg(test)]
mod tests {
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
        wards.handle_print(4, Stream::Stderr, 3);
        wards.handle_print(4, Stream::Stderr, 4);
        wards.handle_start(4, 2);
        let image = |place: &str| Whereabouts { place: place.into(), sum: "5a".into() };
        for places in [&["rank-4/1"][..], &["rank-4/1", "rank-4/2"]] {
            let images = places.iter().map(|place| image(place)).collect();
            wards.handle_talk(Talk::Images { rank: 4, images });
        }
        wards.handle_end(5);
        let moving = wards.release(4..6, 0);
        let [one] = &moving[..] else { panic!("{moving:?}") };
        assert_eq!((one.rank, one.starts, one.moves, one.printed), (4, 3, 1, [0, 7]));
        assert_eq!(one.fresh(), [("a".to_string(), "1".to_string())]);
        assert!(one.open().eq([BARRIER]));
        assert_eq!(one.images, [image("rank-4/1"), image("rank-4/2")]);
        // The barrier was over, and nobody has heard that its rank knew.
        let again = &wards.release(4..5, 1)[0];
        assert_eq!((again.starts, again.moves, again.open().count()), (4, 2, 0));
        assert_eq!(again.exchanges[1].answer.as_deref(), Some(&barrier_out()[..]));
        assert!(again.fresh().is_empty(), "everybody has it");
    }
}
