//! Tests with streams of incarnations that repeat earlier output, and with streams that diverge.

use super::*;

fn replay(before: &[u8]) -> OutputReplay {
    let mut replay = OutputReplay::adopted(OutputLog::default());
    assert_eq!(replay.print(before).unwrap().new, before);
    replay.begin_at(Position::default());
    replay
}

fn lines(count: usize) -> Vec<u8> {
    (0..count).flat_map(|line| format!("line {line}\n").into_bytes()).collect()
}

#[test]
fn what_is_printed_again_is_not_new_however_it_is_cut_into_pieces() {
    let before = lines(40_000);
    for piece in [1, 7, 4096, 16 << 10, before.len()] {
        let mut replay = replay(&before[..before.len() - 3]);
        let mut new = Vec::new();
        for bytes in before.chunks(piece) {
            new.extend(replay.print(bytes).unwrap().new);
        }
        assert_eq!(new, &before[before.len() - 3..], "{piece}");
        assert_eq!(replay.log().end().lines, 40_000);
        assert!(!replay.is_behind() && replay.end().is_ok());
    }
}

#[test]
fn another_byte_is_found_wherever_it_is_and_nothing_new_is_given_out() {
    let before = lines(40_000);
    let mut after = before.clone();
    after.extend_from_slice(b"more\n");
    for at in [0, 5, 8, 100_000, before.len() - TEXT_BYTES - 9, before.len() - 9, before.len() - 1]
    {
        let mut other = after.clone();
        other[at] ^= 1;
        let mut replay = replay(&before);
        let mut outcome = Ok(());
        for bytes in other.chunks(1000) {
            match replay.print(bytes) {
                Ok(printed) => assert!(printed.new.is_empty(), "{at}"),
                Err(divergence) => {
                    outcome = Err(divergence);
                    break;
                }
            }
        }
        let line = before[..at].iter().filter(|byte| **byte == b'\n').count() as u64 + 1;
        match outcome.unwrap_err() {
            Divergence::Line { line: found, now, before } => {
                assert!(at > before.len().saturating_sub(TEXT_BYTES), "{at}");
                assert!(found == line && now != before, "{found} {line} {now} {before}");
            }
            Divergence::Lines { first, last, now, before, .. } => {
                assert!((first..=last).contains(&line) && now != before, "{first} {line} {last}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn both_lines_are_named() {
    let mut other = replay(b"one\nx = 0.25 here\nthree\n");
    assert!(other.print(b"one\nx = 0.").unwrap().new.is_empty());
    let divergence = other.print(b"31 here\nthree\n").unwrap_err();
    let expected = r#"line 2 is "x = 0.31 here", and was "x = 0.25 here""#;
    assert_eq!(divergence.to_string(), expected);
    let binary = replay(b"\x00\xff\x01").print(b"\x00\xff\x02").unwrap_err();
    assert_eq!(
        binary.to_string(),
        "line 1 is \"\\0\u{fffd}\\u{2}\", and was \"\\0\u{fffd}\\u{1}\""
    );
    let long = [b"a".repeat(9000), b"b\n".to_vec()].concat();
    let mut other = long.clone();
    other[9000] = b'c';
    let divergence = replay(&long).print(&other).unwrap_err().to_string();
    let dots = "a".repeat(SHOWN_BEFORE);
    assert_eq!(divergence, format!("line 1 is \"…{dots}c\", and was \"…{dots}b\""));
}

#[test]
fn memory_is_bounded_and_differences_are_found_all_the_same() {
    let mut replay = OutputReplay::adopted(OutputLog::default());
    let piece = vec![b'x'; 1 << 20];
    let pieces = 2 * SPACING_BYTES as usize * POSITIONS_MAX / piece.len() + 3;
    for _ in 0..pieces {
        replay.print(&piece).unwrap();
    }
    assert!(replay.log.positions.len() <= POSITIONS_MAX && replay.log.spacing > SPACING_BYTES);
    assert!(replay.log.text.len() <= 2 * TEXT_BYTES + piece.len());
    replay.begin_at(Position::default());
    let mut other = piece.clone();
    other[3] = b'y';
    replay.print(&piece).unwrap();
    assert!(matches!(replay.print(&other), Err(Divergence::Lines { .. })));
}

#[test]
fn an_incarnation_goes_on_from_a_position_in_the_midst_of_a_line() {
    let before = lines(30_000);
    for at in [3, 12_345, before.len() - 5] {
        let mut first = OutputReplay::adopted(OutputLog::default());
        first.print(&before[..at]).unwrap();
        let image = first.at();
        first.print(&before[at..]).unwrap();
        let mut same = first.clone();
        same.begin_at(image);
        let rest = [&before[at..], b"new\n"].concat();
        assert_eq!(same.print(&rest).unwrap().new, b"new\n");
        let mut other = first;
        other.begin_at(image);
        let mut changed = rest.clone();
        changed[1] ^= 1;
        assert!(other.print(&changed).is_err(), "{at}");
    }
}

#[test]
fn what_moves_to_another_node_is_small_and_finds_the_same_differences() {
    let mut before = lines(200_000);
    before.extend_from_slice(b"\x00\xfe\xff\"'\\ half");
    let log = replay(&before).log().for_move();
    let text = toml::to_string(&log).unwrap();
    assert!(text.len() < 64 << 10, "{}", text.len());
    let log: OutputLog = toml::from_str(&text).unwrap();
    for at in [0, 1_000_000, before.len() - 6000, before.len() - 1] {
        let mut other = [&before[..], b" a line\n"].concat();
        let mut replay = OutputReplay::adopted(log.clone());
        assert_eq!(replay.print(&other).unwrap().new, b" a line\n");
        other[at] ^= 4;
        let mut replay = OutputReplay::adopted(log.clone());
        assert!(replay.print(&other).is_err(), "{at}");
    }
}

#[test]
fn last_words_need_not_come_again() {
    let mut replay = OutputReplay::adopted(OutputLog::default());
    replay.print(b"one\ntwo\nTraceback:\n  here\n").unwrap();
    replay.set_last_words(4);
    replay.begin_at(Position::default());
    assert!(replay.print(b"one\ntwo\nT").unwrap().new.is_empty());
    let printed = replay.print(b"hree\n").unwrap();
    assert_eq!((&printed.new[..], printed.cut), (&b"Three\n"[..], Some((8, 26))));
    assert_eq!((replay.at(), replay.log().end()), (replay.log().end(), replay.at()));
    // From then on the new text is the recorded output.
    replay.begin_at(Position::default());
    assert_eq!(replay.print(b"one\ntwo\nThree\nfour\n").unwrap().new, b"four\n");
    // The output before the last words must be repeated.
    replay.set_last_words(14);
    replay.begin_at(Position::default());
    assert!(replay.clone().print(b"one\ntwo\nthree\n").is_err());
    assert!(replay.end().is_err());
    replay.print(b"one\ntwo\nThree\n").unwrap();
    assert!(replay.end().is_ok());
}

/// The agent takes output for a sign that the interposer is loaded: a process that was restored
/// from an image gives none before it prints.
#[test]
fn an_incarnation_from_an_image_has_printed_nothing_yet() {
    let mut replay = replay(b"one\ntwo\n");
    assert!(!replay.has_printed());
    replay.print(b"one\n").unwrap();
    assert!(replay.has_printed());
    replay.begin_at(replay.at());
    assert!(!replay.has_printed() && replay.at().bytes == 4);
    replay.print(b"t").unwrap();
    assert!(replay.has_printed());
}

#[test]
fn one_that_ends_has_printed_all_of_it() {
    let mut replay = replay(b"one\ntwo\n");
    replay.print(b"one\n").unwrap();
    let expected = "it ended after 4 bytes (1 lines), and there were 8 bytes (2 lines)";
    assert_eq!(replay.end().unwrap_err().to_string(), expected);
    replay.print(b"two\n").unwrap();
    let new = replay.print(b"three\n").unwrap().new;
    let expected = r#"line 3 is "three", and there was nothing in its place"#;
    assert_eq!(replay.more(&new).to_string(), expected);
}

#[test]
fn a_log_is_cut_where_its_text_is_held() {
    let before = lines(40_000);
    let mut log = OutputLog::default();
    log.append(&before);
    assert!(!log.clone().cut(5), "that is not held any more");
    for back in [0, 1, 9, TEXT_BYTES] {
        let (mut cut, mut same) = (log.clone(), OutputLog::default());
        let at = before.len() - back;
        assert!(cut.cut(at as u64));
        same.append(&before[..at]);
        assert_eq!((cut.end, &cut.positions), (same.end, &same.positions), "{back}");
    }
}
