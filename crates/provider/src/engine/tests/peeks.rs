//! Tests of peeks for any source by a library that delivers its own messages itself, and of
//! messages to the same process.

use super::*;
use crate::engine::peeks::looks_first;

/// Two parties: the second one has received a message with tag 7, and its library repeats peeks.
fn with_message() -> (Party, Party) {
    let (mut one, other, number) = linked();
    one.engine.send(&SendRequest { tag: Some(7), ..empty_message(number) }).unwrap();
    one.engine.progress();
    (one, other)
}

fn peek(party: &mut Party) -> Result<(), Errno> {
    party.engine.peek(&PeekRequest { repeats: true, ..any_source(7) })
}

const NO_MESSAGE: Option<Result<(), Errno>> = Some(Err(Errno(libc::ENOMSG)));

#[test]
fn a_peek_is_answered_once_the_library_has_no_messages_of_its_own() {
    let (_one, mut other) = with_message();
    assert_eq!(peek(&mut other), Err(Errno::EAGAIN));
    assert_eq!(other.next(), None, "no answer yet");
    other.queue.note_read();
    assert_eq!(peek(&mut other), Ok(()));
    assert_eq!(other.next(), Some(Ok(())));
    assert_eq!(peek(&mut other), Err(Errno::EAGAIN), "each peek is one of its own");
}

#[test]
fn a_peek_finds_nothing_while_the_library_delivers_messages_of_its_own() {
    let (_one, mut other) = with_message();
    assert_eq!(peek(&mut other), Err(Errno::EAGAIN));
    assert_eq!(peek(&mut other), Ok(()), "the completion queue was not read");
    assert_eq!(other.next(), NO_MESSAGE);
    assert_eq!(peek(&mut other), Err(Errno::EAGAIN));
    other.queue.note_read();
    assert_eq!(peek(&mut other), Ok(()));
    assert_eq!(other.next(), Some(Ok(())));
}

#[test]
fn a_peek_that_finds_nothing_is_answered_at_once() {
    let mut party = Party::open();
    assert_eq!(peek(&mut party), Ok(()));
    assert_eq!(party.next(), NO_MESSAGE);
}

#[test]
fn another_peek_than_the_one_that_was_refused_is_refused_as_well() {
    let (_one, mut other) = with_message();
    assert_eq!(peek(&mut other), Err(Errno::EAGAIN));
    other.queue.note_read();
    let another = PeekRequest { repeats: true, context: 4, ..any_source(7) };
    assert_eq!(other.engine.peek(&another), Err(Errno::EAGAIN));
}

#[test]
fn a_message_to_oneself_is_there_before_what_a_peer_has_sent_meanwhile() {
    let (mut one, mut other, number) = linked();
    one.engine.send(&SendRequest { tag: Some(7), ..empty_message(number) }).unwrap();
    one.engine.progress();
    let myself = other.av.insert(other.name());
    let own = SendRequest { tag: Some(7), data: Some(1), notify: false, ..empty_message(myself) };
    other.engine.send(&own).unwrap();
    let any = RecvRequest {
        source: abi::ADDR_UNSPEC,
        payload: &[],
        tag: Some((7, 0)),
        context: 2,
        notify: true,
        multi: false,
    };
    other.engine.recv(&any).unwrap();
    other.engine.recv(&any).unwrap();
    let is_own = |flags: Option<Result<u64, Errno>>| {
        flags.map(|flags| flags.unwrap() & abi::REMOTE_CQ_DATA != 0)
    };
    assert_eq!(is_own(other.next_flags()), Some(true), "without a poll");
    assert_eq!(other.next_flags(), None);
    until(|| {
        other.engine.progress();
        is_own(other.next_flags()) == Some(false)
    });
}

#[test]
fn only_a_number_of_retries_with_progress_before_the_first_counts() {
    let counts = looks_first;
    assert!(counts("2147483393") && counts("257"));
    assert!(!counts("-1") && !counts("0") && !counts("1") && !counts("256") && !counts("x"));
}

#[test]
fn a_context_claims_one_message_at_a_time() {
    let (mut one, mut other, number) = linked();
    for _ in 0..2 {
        one.engine.send(&SendRequest { tag: Some(7), ..empty_message(number) }).unwrap();
    }
    one.engine.progress();
    let claiming = PeekRequest { claim: true, ..any_source(7) };
    assert_eq!(other.engine.peek(&claiming), Ok(()));
    assert_eq!(other.next(), Some(Ok(())));
    assert_eq!(other.engine.peek(&claiming), Err(Errno::EINVAL));
    assert_eq!(other.next(), None, "a refused peek is not answered");
    let context = claiming.context;
    let claim = ClaimRequest { payload: &[], context, notify: true, discard: false };
    assert_eq!(other.engine.claim(&claim), Ok(()));
    assert_eq!(other.next(), Some(Ok(())));
    assert_eq!(other.engine.peek(&claiming), Ok(()), "the second message is still there");
    assert_eq!(other.next(), Some(Ok(())));
    assert_eq!(other.engine.claim(&claim), Ok(()));
    assert_eq!(other.next(), Some(Ok(())));
}
