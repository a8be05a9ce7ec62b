//! The state tables of a channel's two sides, whole: every state under every event.

use landbridge_proto::channel::{Inflow, Kept, Outflow, PathId, Retained, Standing, State};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::Kind;
use landbridge_proto::wire::head::Head;

const OWN: PathId = PathId(0);
const OTHER: PathId = PathId(1);
const THIRD: PathId = PathId(2);

/// What can happen to bytes 10..20, which path `OWN` carried, behind bytes 0..10 by path `THIRD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// All below 15 is confirmed.
    DeliveredInPart,
    /// All below 20 is confirmed.
    Delivered,
    /// A report names them.
    Arrived,
    /// A report names some of them.
    ArrivedInPart,
    /// The peer asks for them again.
    Spoilt,
    /// The peer asks for one of them again.
    SpoiltInPart,
    /// Their path breaks.
    Break,
    /// Another path breaks.
    BreakOfAnother,
    /// What must go again goes by path `OTHER`.
    SentAgain,
}

#[test]
fn a_range_that_was_sent_in_every_state_under_every_event() {
    use State::*;
    let rows = [
        // From Flying, from Lost, from Arrived; none: it is forgotten.
        (Event::DeliveredInPart, [Some(Flying), Some(Lost), Some(Arrived)]),
        (Event::Delivered, [None, None, None]),
        (Event::Arrived, [Some(Arrived), Some(Arrived), Some(Arrived)]),
        (Event::ArrivedInPart, [Some(Flying), Some(Lost), Some(Arrived)]),
        (Event::Spoilt, [Some(Lost), Some(Lost), Some(Arrived)]),
        (Event::SpoiltInPart, [Some(Lost), Some(Lost), Some(Arrived)]),
        (Event::Break, [Some(Lost), Some(Lost), Some(Arrived)]),
        (Event::BreakOfAnother, [Some(Flying), Some(Lost), Some(Arrived)]),
        (Event::SentAgain, [Some(Flying), Some(Flying), Some(Arrived)]),
    ];
    for (event, expected) in rows {
        for (state, expected) in [Flying, Lost, Arrived].into_iter().zip(expected) {
            let mut out = in_state(state);
            happen(&mut out, event);
            let goes_by = if (state, event) == (Lost, Event::SentAgain) { OTHER } else { OWN };
            assert_eq!(state_of(out, goes_by), expected, "{state:?} under {event:?}");
        }
    }
}

fn in_state(state: State) -> Outflow<()> {
    let mut out = Outflow::default();
    out.retain(sent(0, THIRD));
    out.retain(sent(10, OWN));
    match state {
        State::Flying => (),
        State::Lost => out.handle_spoilt(10, 20, |_| ()),
        State::Arrived => out.handle_arrived(10, 20, |_| ()),
    }
    out
}

fn happen(out: &mut Outflow<()>, event: Event) {
    match event {
        Event::DeliveredInPart => assert!(out.handle_delivered(15, |_| ())),
        Event::Delivered => assert!(out.handle_delivered(20, |_| ())),
        Event::Arrived => out.handle_arrived(10, 20, |_| ()),
        Event::ArrivedInPart => out.handle_arrived(10, 19, |_| ()),
        Event::Spoilt => out.handle_spoilt(10, 20, |_| ()),
        Event::SpoiltInPart => out.handle_spoilt(19, 25, |_| ()),
        Event::Break => out.handle_break(OWN),
        Event::BreakOfAnother => out.handle_break(OTHER),
        Event::SentAgain => out.sent_again(OTHER, 0),
    }
}

/// The state of bytes 10..20, by what becomes of them; `path`: which has them if they fly.
fn state_of(mut out: Outflow<()>, path: PathId) -> Option<State> {
    let first = out.delivered() == 0;
    match out.retained() - usize::from(first) {
        0 => {
            assert!(!out.has_lost() && out.next_lost(100).is_none());
            return None;
        }
        count => assert_eq!(count, 1),
    }
    if out.has_lost() {
        assert_eq!(out.next_lost(100).map(|range| (range.start, range.length)), Some((10, 10)));
        assert_eq!(out.first_lost().map(|range| range.start), Some(10));
        return Some(State::Lost);
    }
    assert!(out.next_lost(100).is_none());
    out.handle_break(path);
    Some(if out.has_lost() { State::Flying } else { State::Arrived })
}

fn sent(start: u64, path: PathId) -> Retained<()> {
    Retained {
        start,
        length: 10,
        offset: 0,
        whole: 10,
        // Without a head, so that numbers are those of the payload.
        kind: Kind::Ack,
        flags: 0,
        head: Head::Empty,
        memory: None,
        at: 0,
        path,
        was_spoilt: false,
        state: State::Flying,
        sent_at: Time(0),
        order: 0,
    }
}

/// Who waits for an answer, and what may end that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hush {
    /// No answer is awaited.
    Calm,
    /// That to ask 2, which has not left.
    Asking,
    /// That to ask 2.
    Asked,
}

#[test]
fn a_hushed_sender_in_every_state_under_every_event() {
    use Hush::*;
    type Happen = fn(&mut Outflow<()>);
    // What happens; then for each state before, whether it is hushed and which ask must leave.
    type Row = (&'static str, Happen, [(bool, Option<u64>); 3]);
    let (free, waits) = ((false, None), (true, None));
    let rows: [Row; 7] = [
        ("nothing", |_| (), [free, (true, Some(2)), waits]),
        ("an old answer", |out| out.handle_answer(1), [free, (true, Some(2)), waits]),
        ("an answer to no ask", |out| out.handle_answer(0), [free, (true, Some(2)), waits]),
        ("the right answer", |out| out.handle_answer(2), [free, free, free]),
        ("all delivered", |out| assert!(out.handle_delivered(20, |_| ())), [free, free, free]),
        (
            "some delivered",
            |out| assert!(out.handle_delivered(10, |_| ())),
            [free, (true, Some(2)), waits],
        ),
        ("a new break", Outflow::ask, [(true, Some(3)); 3]),
    ];
    for (what, happen, expected) in rows {
        for (state, expected) in [Calm, Asking, Asked].into_iter().zip(expected) {
            let mut out = hushed(state);
            happen(&mut out);
            assert_eq!((out.is_hushed(), out.due_ask()), expected, "{state:?} under {what}");
        }
    }
}

fn hushed(state: Hush) -> Outflow<()> {
    let mut out = Outflow::default();
    out.retain(sent(0, OWN));
    out.retain(sent(10, OWN));
    out.ask();
    out.asked();
    out.ask();
    if state != Hush::Asking {
        out.asked();
    }
    if state == Hush::Calm {
        out.handle_answer(2);
    }
    out
}

/// What is here of the bytes behind 10, of which all below have been taken in.
#[derive(Clone, Copy, Debug)]
enum Here {
    Nothing,
    /// Bytes 20..30, a frame behind a gap.
    Behind,
    /// Bytes 10..14 of frame 10..20.
    Front,
    /// Bytes 14..20 of frame 10..20.
    Back,
    /// All of frame 10..20, in fragments.
    Whole,
}

#[test]
fn a_frame_or_fragment_stands_as_what_is_here_says() {
    use Standing::*;
    let rows = [
        // Bytes that come; then how they stand when nothing is here, what is behind, the front, the back, the whole.
        (0..10, [Ok(Known); 5]),
        (2..5, [Ok(Known); 5]),
        (10..20, [Ok(Next), Ok(Next), Ok(Next), Ok(Next), Ok(Known)]),
        (10..14, [Ok(Next), Ok(Next), Ok(Known), Ok(Next), Ok(Known)]),
        (14..20, [Ok(Early), Ok(Early), Ok(Early), Ok(Known), Ok(Known)]),
        (13..20, [Ok(Early), Ok(Early), Ok(Early), Ok(Early), Ok(Known)]),
        (20..30, [Ok(Early), Ok(Known), Ok(Early), Ok(Early), Ok(Early)]),
        (22..25, [Ok(Early), Ok(Known), Ok(Early), Ok(Early), Ok(Early)]),
        (30..40, [Ok(Early); 5]),
        // No frame reaches from what has been taken in to what has not.
        (5..15, [Err(()); 5]),
    ];
    for (range, expected) in rows {
        let heres = [Here::Nothing, Here::Behind, Here::Front, Here::Back, Here::Whole];
        for (here, mut expected) in heres.into_iter().zip(expected) {
            if matches!(here, Here::Whole) && range == (5..15) {
                // All of it is here, so nothing need be done.
                expected = Ok(Known);
            }
            let found = inflow(here).standing(&range).map_err(drop);
            assert_eq!(found, expected, "{range:?} with {here:?}");
        }
    }
}

#[test]
fn a_kept_frame_has_its_turn_when_all_of_it_and_before_it_is_here() {
    let turn = |inflow: &Inflow| inflow.next_kept().map(|(first, _)| first);
    for (here, before, after) in [
        (Here::Nothing, None, None),
        (Here::Behind, None, Some(20)),
        (Here::Front, None, None),
        (Here::Back, None, None),
        (Here::Whole, Some(10), None),
    ] {
        let mut inflow = inflow(here);
        assert_eq!(turn(&inflow), before, "{here:?}");
        inflow.release(10);
        inflow.take_in(10);
        assert_eq!(turn(&inflow), after, "{here:?} when 10..20 has been taken in");
        assert_eq!((inflow.taken(), inflow.has(&(0..20))), (20, true));
    }
}

fn inflow(here: Here) -> Inflow {
    let mut inflow = Inflow::default();
    inflow.take_in(10);
    let (behind, front, back) = (20..30, 10..14, 14..20);
    let (frame, first, second) = match here {
        Here::Nothing => return inflow,
        Here::Behind => (20, behind, None),
        Here::Front => (10, front, None),
        Here::Back => (10, back, None),
        Here::Whole => (10, back, Some(front)),
    };
    for range in [Some(first), second].into_iter().flatten() {
        assert_eq!(inflow.keep(frame, Kept::new(Kind::Data, 0, 10)), Ok(true));
        inflow.handle_kept(frame, range);
    }
    inflow
}
