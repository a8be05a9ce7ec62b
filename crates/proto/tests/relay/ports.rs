//! Every state of a relay's ports, under every event.
//!
//! Rank 1 is attached all the time, and receives the reports about the frames that it sends. Frames
//! that it sent before the event have been written if their receiver was connected.

use super::*;

/// The incarnation of rank 2, or of the other relay, that has been connected.
const INCARNATION: u32 = 3;

/// State of rank 2 before the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    /// No frame has named the rank.
    Unknown,
    /// The rank has never attached, and a frame waits.
    Awaited,
    /// The rank is attached, and has received a frame.
    Attached,
    /// The rank is attached, has received a frame, and has sent Goodbye.
    Leaving,
    /// The link of the rank has broken after this frame.
    Broken,
    /// The rank was attached and has been detached.
    Gone,
}

/// State after the event: where the relay routes frames for rank 2, and whether it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteState {
    Unknown,
    Waited,
    Up,
    Left,
}

#[derive(Clone, Copy, Debug)]
enum RankEvent {
    /// An incarnation of rank 2 attaches.
    Attach(u32),
    Frame,
    /// The link of rank 2 breaks.
    Suspend,
    /// Rank 2 detaches for good.
    Detach,
    /// This number of milliseconds has passed.
    Time(u64),
}

/// State after the event, frames that rank 1 receives, and frames that rank 2 receives; `None`: the
/// event cannot happen, or is refused.
type Outcome = Option<(RouteState, &'static [Kind], &'static [Kind])>;

#[test]
fn a_rank_in_every_state_under_every_event() {
    use RankEvent::{Attach, Detach, Frame, Suspend, Time};
    use RouteState::{Left, Unknown, Up, Waited};
    const UNREACHABLE: &[Kind] = &[Kind::Unreachable];
    const LOST: &[Kind] = &[Kind::Lost];
    const GETS: &[Kind] = &[Kind::Ack];
    let is = |stands| -> Outcome { Some((stands, &[], &[])) };
    let notified: Outcome = Some((Left, UNREACHABLE, &[]));
    let rows: [(RankEvent, [Outcome; 6]); 9] = [
        // Columns: `Unknown`, `Awaited`, `Attached`, `Leaving`, `Broken`, `Gone`.
        (Attach(INCARNATION - 1), [is(Up), Some((Up, &[], GETS)), None, None, None, is(Up)]),
        (
            Attach(INCARNATION),
            [is(Up), Some((Up, &[], GETS)), None, None, Some((Up, LOST, &[])), is(Up)],
        ),
        (
            // The waiting frames are for an earlier incarnation.
            Attach(INCARNATION + 1),
            [is(Up), Some((Up, &[], GETS)), None, None, Some((Up, UNREACHABLE, &[])), is(Up)],
        ),
        (
            Frame,
            [
                is(Waited),
                is(Waited),
                Some((Up, &[], GETS)),
                Some((Up, &[], GETS)),
                is(Waited),
                notified,
            ],
        ),
        (Suspend, [None, None, is(Waited), None, None, None]),
        // An endpoint that has sent Goodbye has received all frames that it needs.
        (Detach, [None, notified, notified, is(Left), notified, None]),
        (Time(ATTACH_MILLIS_MAX), [is(Unknown), is(Waited), is(Up), is(Up), is(Waited), is(Left)]),
        (
            Time(ATTACH_MILLIS_MAX + 1),
            [is(Unknown), notified, is(Up), is(Up), is(Waited), is(Left)],
        ),
        (
            Time(ENDPOINT_RECONNECT_MILLIS_MAX + 1),
            [is(Unknown), notified, is(Up), is(Up), notified, is(Left)],
        ),
    ];
    let states =
        [Rank::Unknown, Rank::Awaited, Rank::Attached, Rank::Leaving, Rank::Broken, Rank::Gone];
    for (event, expected) in rows {
        for (state, expected) in states.into_iter().zip(expected) {
            assert_eq!(rank_after(state, event), expected, "{state:?} under {event:?}");
        }
    }
}

fn rank_after(state: Rank, event: RankEvent) -> Outcome {
    let (mut relay, one) = with_rank(state);
    let link = |relay: &Relay| relay.endpoint(rank(2));
    match event {
        RankEvent::Attach(start) => {
            relay.attach(rank(2), start).ok()?;
        }
        RankEvent::Frame => {
            feed(&mut relay, one, frame(rank(1), rank(2), 10, 10));
        }
        // A driver suspends only attached endpoints that may attach again.
        RankEvent::Suspend if state == Rank::Attached => relay.suspend(link(&relay)?),
        RankEvent::Suspend => return None,
        RankEvent::Detach => relay.detach(link(&relay)?),
        RankEvent::Time(millis) => relay.handle_time(millis),
    }
    let is_up = link(&relay).is_some_and(|link| relay.ports().is_up(link));
    // The other relay is connected, so the relay waits for nobody but rank 2.
    assert_eq!(relay.ports().needs_time(), link(&relay).is_some() && !is_up);
    let heard = kinds(output(&mut relay, one));
    let gets = match link(&relay) {
        Some(link) if is_up => kinds(output(&mut relay, link)),
        _ => &[],
    };
    let stands = match link(&relay) {
        Some(_) if is_up => RouteState::Up,
        Some(_) => RouteState::Waited,
        None if is_refused(&mut relay, one, rank(2)) => RouteState::Left,
        None => RouteState::Unknown,
    };
    Some((stands, heard, gets))
}

/// Whether the source of a new frame for `target` hears at once that `target` is unreachable.
fn is_refused(relay: &mut Relay, one: LinkId, target: Address) -> bool {
    feed(relay, one, frame(rank(1), target, 20, 10));
    output(relay, one).contains(&(Kind::Unreachable, target))
}

fn with_rank(state: Rank) -> (Relay, LinkId) {
    let mut relay = home();
    let peer = relay.peer(ClusterId(1)).unwrap();
    relay.connect(peer, 1).unwrap();
    let one = relay.attach(rank(1), 0).unwrap();
    if state == Rank::Unknown {
        return (relay, one);
    }
    let first = frame(rank(1), rank(2), 0, 10);
    if state == Rank::Awaited {
        feed(&mut relay, one, first);
        return (relay, one);
    }
    let two = relay.attach(rank(2), INCARNATION).unwrap();
    feed(&mut relay, one, first);
    assert_eq!(output(&mut relay, two), [(Kind::Ack, rank(1))]);
    match state {
        Rank::Leaving => {
            feed(&mut relay, two, goodbye(rank(2), rank(1)));
        }
        Rank::Broken => relay.suspend(two),
        Rank::Gone => relay.detach(two),
        _ => (),
    }
    output(&mut relay, one);
    (relay, one)
}

/// State of the relay of the other cluster before the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Other {
    /// The other relay has never been connected.
    Never,
    /// One stream to the other relay is connected, and a frame was written to it.
    Joined,
    /// The stream has broken.
    Broken,
    /// The stream has broken after the other relay acknowledged the frame.
    BrokenAtRest,
    /// The other relay has been disconnected for too long.
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum OtherEvent {
    /// A stream to an incarnation of the other relay connects.
    Connect(u32),
    /// The existing stream disconnects.
    Disconnect,
    Frame,
    Time(u64),
}

/// State after the event, and frames that rank 1 receives; `None`: the event cannot happen, or is
/// refused.
type OtherOutcome = Option<(&'static str, &'static [Kind])>;

#[test]
fn another_relay_in_every_state_under_every_event() {
    use OtherEvent::{Connect, Disconnect, Frame, Time};
    const UNREACHABLE: &[Kind] = &[Kind::Unreachable];
    const LOST: &[Kind] = &[Kind::Lost];
    let is = |stands| -> OtherOutcome { Some((stands, &[])) };
    let rows: [(OtherEvent, [OtherOutcome; 5]); 6] = [
        // Columns: never connected, joined, broken, broken at rest, lost.
        (Connect(INCARNATION), [is("up"), is("up"), Some(("up", LOST)), is("up"), is("up")]),
        (
            // Frames that the earlier incarnation received may have been lost with it.
            Connect(INCARNATION + 1),
            [is("up"), None, Some(("up", LOST)), Some(("up", LOST)), is("up")],
        ),
        (Disconnect, [None, is("away"), None, None, None]),
        (Frame, [is("away"), is("up"), is("away"), is("away"), Some(("lost", UNREACHABLE))]),
        (
            Time(PEER_RECONNECT_MILLIS_MAX),
            [is("away"), is("up"), is("away"), is("away"), is("lost")],
        ),
        (
            Time(PEER_RECONNECT_MILLIS_MAX + 1),
            [is("lost"), is("up"), Some(("lost", UNREACHABLE)), is("lost"), is("lost")],
        ),
    ];
    let states = [Other::Never, Other::Joined, Other::Broken, Other::BrokenAtRest, Other::Lost];
    for (event, expected) in rows {
        for (state, expected) in states.into_iter().zip(expected) {
            assert_eq!(other_after(state, event), expected, "{state:?} under {event:?}");
        }
    }
}

fn other_after(state: Other, event: OtherEvent) -> OtherOutcome {
    let (mut relay, one, peer) = with_other(state);
    match event {
        OtherEvent::Connect(start) => {
            relay.connect(peer, start).ok()?;
        }
        OtherEvent::Disconnect => {
            let stream = *relay.ports().streams(peer).first()?;
            relay.disconnect(stream);
        }
        OtherEvent::Frame => {
            feed(&mut relay, one, frame(rank(1), rank(5), 10, 10));
        }
        OtherEvent::Time(millis) => relay.handle_time(millis),
    }
    assert_eq!(
        relay.ports().is_up(peer),
        !relay.ports().streams(peer).is_empty(),
        "up as long as a stream is"
    );
    let (is_up, needs_time) = (relay.ports().is_up(peer), relay.ports().needs_time());
    let heard = kinds(output(&mut relay, one));
    let stands = match is_refused(&mut relay, one, rank(5)) {
        _ if is_up => "up",
        true => "lost",
        false => "away",
    };
    assert_eq!(needs_time, stands == "away");
    Some((stands, heard))
}

fn with_other(state: Other) -> (Relay, LinkId, LinkId) {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    let peer = relay.peer(ClusterId(1)).unwrap();
    match state {
        Other::Never => return (relay, one, peer),
        Other::Lost => {
            relay.handle_time(PEER_RECONNECT_MILLIS_MAX + 1);
            return (relay, one, peer);
        }
        _ => (),
    }
    let stream = relay.connect(peer, INCARNATION).unwrap().stream;
    feed(&mut relay, one, frame(rank(1), rank(5), 0, 10));
    let written = write_all(&mut relay, stream).len() as u64;
    if state == Other::BrokenAtRest {
        assert_eq!(feed(&mut relay, stream, keepalive(written)), Stop::Partial);
    }
    if state != Other::Joined {
        relay.disconnect(stream);
    }
    assert_eq!(output(&mut relay, one), []);
    (relay, one, peer)
}

/// The kinds of the frames; a row of the tables has at most one frame.
fn kinds(frames: Vec<(Kind, Address)>) -> &'static [Kind] {
    let kinds: Vec<Kind> = frames.into_iter().map(|(kind, _)| kind).collect();
    match kinds[..] {
        [] => &[],
        [Kind::Ack] => &[Kind::Ack],
        [Kind::Lost] => &[Kind::Lost],
        [Kind::Unreachable] => &[Kind::Unreachable],
        _ => panic!("{kinds:?}"),
    }
}
