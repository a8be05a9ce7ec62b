//! Tests of the replay of PMI requests and output.

use super::*;
use crate::output_log::OutputLog;

const INIT: &str = "cmd=init pmi_version=1 pmi_subversion=1\n";

fn polls(furthest: u64, present: u64) -> Option<PollCounts> {
    Some(PollCounts { furthest, present, taken: 0 })
}

#[test]
fn the_same_questions_get_the_same_answers() {
    let mut replay = PmiReplay::new(Instant::now());
    assert_eq!(replay.ask("a"), RequestReplay::New);
    assert!(replay.answer("1"));
    assert_eq!(replay.ask("b"), RequestReplay::New);
    replay.begin(None, Instant::now());
    assert_eq!(replay.ask("a"), RequestReplay::Answered("1".into()));
    assert!(!replay.answer("2"), "it has not come so far");
    assert_eq!(replay.ask("b"), RequestReplay::Answered("2".into()));
    assert_eq!(replay.ask("c"), RequestReplay::New);
    replay.begin(None, Instant::now());
    assert_eq!(replay.ask("x"), RequestReplay::Diverged { before: "a".into() });
}

#[test]
fn what_is_asked_without_end_is_not_kept() {
    let mut replay = PmiReplay::new(Instant::now());
    let long = "x".repeat(EXCHANGED_BYTES_MAX / 2);
    assert_eq!(replay.ask(&long), RequestReplay::New);
    assert!(replay.answer(&long) && !replay.has_asked_too_much());
    let ranks = TransferredRank {
        exchanges: replay.requests.exchanges.clone(),
        ..TransferredRank::default()
    };
    assert_eq!(replay.ask("a"), RequestReplay::New);
    assert!(replay.answer("1") && replay.has_asked_too_much());
    assert_eq!((replay.requests.exchanges.len(), replay.requests.asked), (0, 2));
    let mut adopted = PmiReplay::adopted(&ranks, None, Instant::now());
    assert_eq!(adopted.ask(&long), RequestReplay::Answered(long));
    adopted.ask("a");
    assert!(adopted.has_asked_too_much(), "counted on all nodes");
}

#[test]
fn replay_ends_when_all_is_asked_printed_and_polled_again() {
    let mut replay = PmiReplay::new(Instant::now());
    assert!(!replay.take_replayed(polls(9, 9)), "it has never been away");
    replay.ask("a");
    replay.print(Stream::Stdout, b"abc", polls(9, 9));
    replay.print(Stream::Stderr, b"x", polls(9, 9));
    assert_eq!(replay.percent(polls(9, 9)), None);
    replay.begin(polls(200, 200), Instant::now());
    assert_eq!(replay.percent(polls(200, 0)), None, "it has not begun");
    replay.print(Stream::Stdout, b"abc", polls(200, 50));
    replay.ask("a");
    assert!(!replay.take_replayed(polls(200, 86)));
    assert_eq!((replay.percent(polls(200, 86)), replay.percent(None)), (Some(43), None));
    replay.print(Stream::Stderr, b"x", polls(200, 86));
    assert!(!replay.take_replayed(polls(200, 199)) && replay.is_replaying());
    assert!(replay.take_replayed(polls(200, 200)) && !replay.take_replayed(polls(200, 200)));
    assert_eq!(replay.percent(polls(201, 201)), None);
    replay.begin(None, Instant::now());
    replay.ask("a");
    replay.print(Stream::Stdout, b"abc", None);
    assert!(!replay.take_replayed(None));
    replay.print(Stream::Stderr, b"x", None);
    assert!(replay.take_replayed(None), "where nobody counts looks");
}

#[test]
fn every_incarnation_is_recorded_with_its_progress() {
    let now = Instant::now();
    let later = |seconds| now + Duration::from_secs(seconds);
    let mut replay = PmiReplay::new(now);
    replay.ask(INIT);
    replay.print(Stream::Stdout, b"abc", None);
    let killed = Ending::Killed(9);
    assert_eq!(replay.end(killed, polls(5, 5), later(2)).len(), 1);
    replay.begin(polls(5, 5), later(3));
    replay.print(Stream::Stderr, b"x\x1elandbridge cannot go on\n", polls(5, 5));
    let incarnations = replay.end(Ending::Exited(3), polls(5, 4), later(7));
    let point = |asked, printed, polls| ProgressPoint { asked, printed, polls };
    assert_eq!(incarnations[0].point, point(1, 3, 5));
    let [began, lasted] = [3, 4].map(Duration::from_secs);
    let known = &incarnations[1];
    assert_eq!((known.began, known.lasted, known.ending), (began, lasted, Ending::Exited(3)));
    assert_eq!((known.stage, known.point), (Stage::Silent, point(0, 1, 4)));
    assert!(known.has_fatal_notice && !known.has_gone_back);
}

#[test]
fn a_replay_without_progress_hangs_and_one_that_polls_does_not() {
    let now = Instant::now();
    let later = |seconds| now + Duration::from_secs(seconds);
    let mut replay = PmiReplay::new(now);
    assert_eq!(replay.hangs(polls(5, 5), later(1_000)), None, "it has never been away");
    replay.end(Ending::Killed(9), polls(5, 5), later(10));
    replay.begin(polls(5, 5), later(10));
    assert_eq!(replay.hangs(polls(5, 0), later(70)), None);
    assert_eq!(replay.hangs(polls(5, 1), later(75)), None);
    assert_eq!(replay.hangs(polls(5, 1), later(135)), None);
    assert_eq!(replay.hangs(polls(5, 1), later(136)), Some(Duration::from_secs(61)));
    assert_eq!(replay.hangs(None, later(300)), None, "nobody knows");
}

#[test]
fn a_slow_replay_does_not_hang() {
    let now = Instant::now();
    let later = |seconds| now + Duration::from_secs(seconds);
    let mut replay = PmiReplay::new(now);
    replay.begin(polls(9, 9), now);
    // Many frames arrive at one poll, because the relay reads them from a slow disk.
    for step in 1..100 {
        let polls = Some(PollCounts { furthest: 9, present: 4, taken: step });
        assert_eq!(replay.hangs(polls, later(50 * step)), None);
    }
    let polls = Some(PollCounts { furthest: 9, present: 4, taken: 99 });
    assert_eq!(replay.hangs(polls, later(5_010)), None);
    assert!(replay.hangs(polls, later(5_011)).is_some(), "nothing has come for long");
}

#[test]
fn a_new_incarnation_begins_at_the_first_pmi_request() {
    let mut replay = PmiReplay::new(Instant::now());
    replay.ask(INIT);
    assert_eq!(replay.stage(), Stage::Joined);
    replay.ask("cmd=finalize\n");
    assert_eq!(replay.stage(), Stage::Finalized);
    replay.begin(None, Instant::now());
    assert_eq!(replay.stage(), Stage::Silent);
    replay.ask(INIT);
    replay.ask("cmd=get key=finalize\n");
    assert_eq!(replay.stage(), Stage::Joined);
}

fn new(bytes: &[u8]) -> Vec<PrintOutcome> {
    vec![PrintOutcome::New(bytes.to_vec())]
}

#[test]
fn nothing_is_printed_twice() {
    let mut replay = PmiReplay::new(Instant::now());
    assert_eq!(replay.print(Stream::Stdout, b"abc", None), new(b"abc"));
    replay.begin(None, Instant::now());
    assert_eq!(replay.print(Stream::Stdout, b"ab", None), []);
    assert_eq!(replay.print(Stream::Stdout, b"cde", None), new(b"de"));
    assert_eq!(replay.print(Stream::Stderr, b"f", None), new(b"f"));
}

#[test]
fn who_ends_before_all_was_asked_again_does_not_end_well() {
    let mut replay = PmiReplay::new(Instant::now());
    for request in ["a", "b"] {
        replay.ask(request);
        replay.answer("1");
    }
    assert_eq!(replay.missing_requests(), None);
    replay.begin(None, Instant::now());
    assert!(replay.missing_requests().unwrap().contains("it ended after 0 of 2 PMI requests"));
    replay.ask("a");
    assert!(replay.missing_requests().unwrap().contains("1 of 2"));
    replay.ask("b");
    assert_eq!(replay.missing_requests(), None);
}

/// The text for the user.
fn diverged(prints: &[PrintOutcome]) -> &str {
    let [PrintOutcome::Diverged(text)] = prints else { panic!("{prints:?}") };
    text
}

#[test]
fn another_line_ends_it_and_nothing_more_is_shown() {
    let mut replay = PmiReplay::new(Instant::now());
    replay.print(Stream::Stdout, b"one\nx = 1\n", polls(5, 5));
    replay.begin(polls(5, 5), Instant::now());
    let prints = replay.print(Stream::Stdout, b"one\nx = 2\nthree\n", polls(5, 3));
    let expected = "does not repeat in incarnation 1 what was printed before: on standard \
                    output line 2 is \"x = 2\", and was \"x = 1\"";
    assert_eq!(diverged(&prints), expected);
    assert_eq!(replay.print(Stream::Stdout, b"four\n", polls(9, 9)), []);
    let own = replay.print(Stream::Stderr, b"x\n\x1elandbridge[1]: x\n", polls(9, 9));
    assert_eq!(own, [PrintOutcome::OfLibrary(b"landbridge[1]: x\n".to_vec())]);
}

#[test]
fn a_line_too_many_or_too_few_ends_it_as_well() {
    let mut replay = PmiReplay::new(Instant::now());
    replay.print(Stream::Stdout, b"one\n", polls(5, 5));
    replay.begin(polls(5, 5), Instant::now());
    assert!(replay.missing_output().unwrap().contains("on standard output it ended after 0 bytes"));
    assert_eq!(replay.print(Stream::Stdout, b"one\n", polls(5, 2)), []);
    assert_eq!(replay.missing_output(), None);
    let prints = replay.print(Stream::Stdout, b"two\n", polls(5, 4));
    assert!(diverged(&prints).contains("line 2 is \"two\", and there was nothing"), "{prints:?}");
    // Output that a lost node has not reported may be new.
    let ranks = TransferredRank { restarts: 1, ..TransferredRank::default() };
    let mut adopted = PmiReplay::adopted(&ranks, polls(5, 5), Instant::now());
    assert_eq!(adopted.print(Stream::Stdout, b"one\n", polls(5, 2)), new(b"one\n"));
    adopted.take_replayed(polls(5, 5));
    adopted.begin(polls(5, 5), Instant::now());
    assert_eq!(adopted.print(Stream::Stdout, b"one\n", polls(5, 2)), []);
    diverged(&adopted.print(Stream::Stdout, b"two\n", polls(5, 2)));
}

#[test]
fn what_an_error_says_last_need_not_come_again() {
    let say = |ending, after| {
        let mut replay = PmiReplay::new(Instant::now());
        replay.print(Stream::Stderr, b"one\n", polls(3, 3));
        replay.print(Stream::Stderr, b"Traceback\n", polls(5, 5));
        replay.end(ending, polls(5, after), Instant::now());
        replay.begin(polls(5, 0), Instant::now());
        replay.print(Stream::Stderr, b"one\ntwo\n", polls(6, 5))
    };
    let other =
        || vec![PrintOutcome::ReplacesLastWords { new: b"two\n".to_vec(), from: 4, gone: 10 }];
    assert_eq!(say(Ending::Exited(1), 5), other());
    assert_eq!(say(Ending::Killed(libc::SIGSEGV), 5), other());
    // A rank that has moved to another node need not say it again either.
    let mut printed = OutputLog::default();
    printed.append(b"one\nTraceback\n");
    let moved = TransferredRank {
        outputs: [OutputLog::default(), printed],
        last_words: Some(4),
        ..TransferredRank::default()
    };
    let mut replay = PmiReplay::adopted(&moved, polls(5, 0), Instant::now());
    assert_eq!(replay.print(Stream::Stderr, b"one\ntwo\n", polls(6, 5)), other());
    // The process has polled after the text, or was killed without time for last words.
    for (ending, after) in [(Ending::Exited(1), 6), (Ending::Killed(libc::SIGKILL), 5)] {
        diverged(&say(ending, after));
    }
}

#[test]
fn what_our_libraries_say_is_always_shown_and_shifts_nothing() {
    let mut replay = PmiReplay::new(Instant::now());
    let said = |replay: &mut PmiReplay, bytes: &[u8]| {
        let prints = replay.print(Stream::Stderr, bytes, None);
        let bytes = prints.into_iter().map(|print| match print {
            PrintOutcome::New(bytes) | PrintOutcome::OfLibrary(bytes) => bytes,
            other => panic!("{other:?}"),
        });
        bytes.collect::<Vec<_>>().concat()
    };
    let line = |pid: &str| format!("landbridge[{pid}]: Info: x\n").into_bytes();
    let tagged = |pid: &str| [b"\x1e", &line(pid)[..]].concat();
    assert_eq!(
        said(&mut replay, &[b"one\n", &tagged("1")[..]].concat()),
        [b"one\n", &line("1")[..]].concat()
    );
    replay.begin(None, Instant::now());
    assert_eq!(said(&mut replay, &tagged("23")), line("23"));
    assert_eq!(said(&mut replay, &tagged("23")), line("23"), "one more than before");
    assert_eq!(said(&mut replay, b"one\ntwo\n"), b"two\n");
    assert_eq!(said(&mut replay, b"three\x1e"), b"three");
    assert_eq!(replay.end_print(None), new(b"\x1e").pop());
}
