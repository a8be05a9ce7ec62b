//! The complete state tables of a channel's two sides: every state under every event.

use landbridge_proto::channel::{
    ArrivalOrder, BufferedFrame, PathId, ReassemblyBuffer, RetainedFrame, RetainedState,
    RetransmitBuffer,
};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::Kind;
use landbridge_proto::wire::kind_header::KindHeader;

const OWN: PathId = PathId(0);
const OTHER: PathId = PathId(1);
const THIRD: PathId = PathId(2);

/// The events that can affect bytes 10..20, which path `OWN` carried, behind bytes 0..10 on path
/// `THIRD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// All bytes below 15 are acknowledged.
    AckedInPart,
    /// All bytes below 20 are acknowledged.
    Acked,
    /// A report names the bytes.
    Sacked,
    /// A report names some of the bytes.
    SackedInPart,
    /// The peer reports the bytes as corrupt.
    Corrupt,
    /// The peer reports one of the bytes as corrupt.
    CorruptInPart,
    /// The path of the bytes breaks.
    Break,
    /// Another path breaks.
    BreakOfAnother,
    /// What must be retransmitted is sent by path `OTHER`.
    Retransmitted,
}

#[test]
fn a_range_that_was_sent_in_every_state_under_every_event() {
    use RetainedState::*;
    let rows = [
        // The next state from InFlight, from Lost, from Sacked; `None` if the range is forgotten.
        (Event::AckedInPart, [Some(InFlight), Some(Lost), Some(Sacked)]),
        (Event::Acked, [None, None, None]),
        (Event::Sacked, [Some(Sacked), Some(Sacked), Some(Sacked)]),
        (Event::SackedInPart, [Some(InFlight), Some(Lost), Some(Sacked)]),
        (Event::Corrupt, [Some(Lost), Some(Lost), Some(Sacked)]),
        (Event::CorruptInPart, [Some(Lost), Some(Lost), Some(Sacked)]),
        (Event::Break, [Some(Lost), Some(Lost), Some(Sacked)]),
        (Event::BreakOfAnother, [Some(InFlight), Some(Lost), Some(Sacked)]),
        (Event::Retransmitted, [Some(InFlight), Some(InFlight), Some(Sacked)]),
    ];
    for (event, expected) in rows {
        for (state, expected) in [InFlight, Lost, Sacked].into_iter().zip(expected) {
            let mut out = in_state(state);
            happen(&mut out, event);
            let goes_by = if (state, event) == (Lost, Event::Retransmitted) { OTHER } else { OWN };
            assert_eq!(state_of(out, goes_by), expected, "{state:?} under {event:?}");
        }
    }
}

fn in_state(state: RetainedState) -> RetransmitBuffer<()> {
    let mut out = RetransmitBuffer::default();
    out.retain(sent(0, THIRD));
    out.retain(sent(10, OWN));
    match state {
        RetainedState::InFlight => (),
        RetainedState::Lost => out.handle_corrupt(10, 20, |_| ()),
        RetainedState::Sacked => out.handle_arrived(10, 20, |_| ()),
    }
    out
}

fn happen(out: &mut RetransmitBuffer<()>, event: Event) {
    match event {
        Event::AckedInPart => assert!(out.handle_delivered(15, |_| ())),
        Event::Acked => assert!(out.handle_delivered(20, |_| ())),
        Event::Sacked => out.handle_arrived(10, 20, |_| ()),
        Event::SackedInPart => out.handle_arrived(10, 19, |_| ()),
        Event::Corrupt => out.handle_corrupt(10, 20, |_| ()),
        Event::CorruptInPart => out.handle_corrupt(19, 25, |_| ()),
        Event::Break => out.handle_break(OWN),
        Event::BreakOfAnother => out.handle_break(OTHER),
        Event::Retransmitted => out.mark_retransmitted(OTHER, 0),
    }
}

/// The state of bytes 10..20, seen from their further fate. `path` is the path that carries them if
/// they are in flight.
fn state_of(mut out: RetransmitBuffer<()>, path: PathId) -> Option<RetainedState> {
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
        return Some(RetainedState::Lost);
    }
    assert!(out.next_lost(100).is_none());
    out.handle_break(path);
    Some(if out.has_lost() { RetainedState::InFlight } else { RetainedState::Sacked })
}

fn sent(start: u64, path: PathId) -> RetainedFrame<()> {
    RetainedFrame {
        start,
        length: 10,
        offset: 0,
        whole: 10,
        // The frames have no head, so that byte numbers are those of the payload.
        kind: Kind::Ack,
        flags: 0,
        head: KindHeader::Empty,
        memory: None,
        at: 0,
        path,
        was_corrupt: false,
        state: RetainedState::InFlight,
        sent_at: Time(0),
        order: 0,
    }
}

/// Whether a sender waits for an answer to a status request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatusWait {
    /// No answer is awaited.
    Idle,
    /// The answer to status request 2 is awaited, which has not left.
    Requesting,
    /// The answer to status request 2 is awaited.
    Requested,
}

#[test]
fn a_hushed_sender_in_every_state_under_every_event() {
    use StatusWait::*;
    type Happen = fn(&mut RetransmitBuffer<()>);
    // What happens; then, for each state before, whether `is_awaiting_status` holds, and which
    // status request must leave.
    type Row = (&'static str, Happen, [(bool, Option<u64>); 3]);
    let (free, waits) = ((false, None), (true, None));
    let rows: [Row; 7] = [
        ("nothing", |_| (), [free, (true, Some(2)), waits]),
        ("an old answer", |out| out.handle_status_reply(1), [free, (true, Some(2)), waits]),
        ("an answer to no ask", |out| out.handle_status_reply(0), [free, (true, Some(2)), waits]),
        ("the right answer", |out| out.handle_status_reply(2), [free, free, free]),
        ("all delivered", |out| assert!(out.handle_delivered(20, |_| ())), [free, free, free]),
        (
            "some delivered",
            |out| assert!(out.handle_delivered(10, |_| ())),
            [free, (true, Some(2)), waits],
        ),
        ("a new break", RetransmitBuffer::request_status, [(true, Some(3)); 3]),
    ];
    for (what, happen, expected) in rows {
        for (state, expected) in [Idle, Requesting, Requested].into_iter().zip(expected) {
            let mut out = awaiting_status(state);
            happen(&mut out);
            assert_eq!(
                (out.is_awaiting_status(), out.due_status_request()),
                expected,
                "{state:?} under {what}"
            );
        }
    }
}

fn awaiting_status(state: StatusWait) -> RetransmitBuffer<()> {
    let mut out = RetransmitBuffer::default();
    out.retain(sent(0, OWN));
    out.retain(sent(10, OWN));
    out.request_status();
    out.mark_status_request_sent();
    out.request_status();
    if state != StatusWait::Requesting {
        out.mark_status_request_sent();
    }
    if state == StatusWait::Idle {
        out.handle_status_reply(2);
    }
    out
}

/// What has arrived of the bytes from 10 on, when all bytes below have been delivered.
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
    use ArrivalOrder::*;
    let rows = [
        // The bytes that arrive; then their order when nothing has arrived, the frame behind, the
        // front, the back, the whole.
        (0..10, [Ok(Duplicate); 5]),
        (2..5, [Ok(Duplicate); 5]),
        (10..20, [Ok(InOrder), Ok(InOrder), Ok(InOrder), Ok(InOrder), Ok(Duplicate)]),
        (10..14, [Ok(InOrder), Ok(InOrder), Ok(Duplicate), Ok(InOrder), Ok(Duplicate)]),
        (14..20, [Ok(OutOfOrder), Ok(OutOfOrder), Ok(OutOfOrder), Ok(Duplicate), Ok(Duplicate)]),
        (13..20, [Ok(OutOfOrder), Ok(OutOfOrder), Ok(OutOfOrder), Ok(OutOfOrder), Ok(Duplicate)]),
        (20..30, [Ok(OutOfOrder), Ok(Duplicate), Ok(OutOfOrder), Ok(OutOfOrder), Ok(OutOfOrder)]),
        (22..25, [Ok(OutOfOrder), Ok(Duplicate), Ok(OutOfOrder), Ok(OutOfOrder), Ok(OutOfOrder)]),
        (30..40, [Ok(OutOfOrder); 5]),
        // No frame extends from delivered bytes to bytes that have not been delivered.
        (5..15, [Err(()); 5]),
    ];
    for (range, expected) in rows {
        let heres = [Here::Nothing, Here::Behind, Here::Front, Here::Back, Here::Whole];
        for (here, mut expected) in heres.into_iter().zip(expected) {
            if matches!(here, Here::Whole) && range == (5..15) {
                // All of the frame has arrived, so nothing need be done.
                expected = Ok(Duplicate);
            }
            let found = reassembly_buffer(here).arrival_order(&range).map_err(drop);
            assert_eq!(found, expected, "{range:?} with {here:?}");
        }
    }
}

#[test]
fn a_kept_frame_has_its_turn_when_all_of_it_and_before_it_is_here() {
    let turn = |reassembly_buffer: &ReassemblyBuffer| {
        reassembly_buffer.next_reassembled().map(|(first, _)| first)
    };
    for (here, before, after) in [
        (Here::Nothing, None, None),
        (Here::Behind, None, Some(20)),
        (Here::Front, None, None),
        (Here::Back, None, None),
        (Here::Whole, Some(10), None),
    ] {
        let mut reassembly_buffer = reassembly_buffer(here);
        assert_eq!(turn(&reassembly_buffer), before, "{here:?}");
        reassembly_buffer.release(10);
        reassembly_buffer.deliver(10);
        assert_eq!(turn(&reassembly_buffer), after, "{here:?} when 10..20 has been taken in");
        assert_eq!((reassembly_buffer.delivered(), reassembly_buffer.has(&(0..20))), (20, true));
    }
}

fn reassembly_buffer(here: Here) -> ReassemblyBuffer {
    let mut reassembly_buffer = ReassemblyBuffer::default();
    reassembly_buffer.deliver(10);
    let (behind, front, back) = (20..30, 10..14, 14..20);
    let (frame, first, second) = match here {
        Here::Nothing => return reassembly_buffer,
        Here::Behind => (20, behind, None),
        Here::Front => (10, front, None),
        Here::Back => (10, back, None),
        Here::Whole => (10, back, Some(front)),
    };
    for range in [Some(first), second].into_iter().flatten() {
        assert_eq!(
            reassembly_buffer.reserve(frame, BufferedFrame::new(Kind::Data, 0, 10)),
            Ok(true)
        );
        reassembly_buffer.handle_buffered(frame, range);
    }
    reassembly_buffer
}
