//! Tests of remote memory that is accessed without its process.

use super::*;
use crate::counter::Counter;
use crate::mr::Region;

const KEY: u64 = 77;
const BOTH: u64 = abi::REMOTE_READ | abi::REMOTE_WRITE;

fn register(party: &Party, key: u64, bytes: &mut [u8], access: u64) {
    let base = bytes.as_mut_ptr().expose_provenance();
    let region = Region { base, len: bytes.len(), access };
    party.engine.connections.data.application.mr.insert(key, region).unwrap();
}

fn access(party: &mut Party, target: FiAddr, kind: RmaKind, offset: u64, bytes: &mut [u8]) {
    let local = [Iov { base: bytes.as_mut_ptr(), len: bytes.len() }];
    let remote = RemoteIov { offset, len: bytes.len(), key: KEY };
    let (data, inject, notify, context) = (None, false, true, 2);
    let request = RmaRequest { kind, target, local: &local, remote, data, context, inject, notify };
    party.engine.rma(&request).unwrap();
}

/// Whether the access is complete although the target does nothing.
fn is_at_once(party: &mut Party) -> bool {
    let done = party.next();
    assert!(matches!(done, None | Some(Ok(()))));
    done.is_some()
}

#[test]
fn a_target_that_never_calls_is_written_and_read() {
    let (mut one, other, number) = linked();
    let mut window = *b"0123456789";
    register(&other, KEY, &mut window, BOTH);
    access(&mut one, number, RmaKind::Write, 3, &mut b"abc".clone());
    assert!(is_at_once(&mut one));
    let mut seen = [0; 5];
    access(&mut one, number, RmaKind::Read, 2, &mut seen);
    assert!(is_at_once(&mut one));
    assert_eq!((&seen, &window), (b"2abc6", b"012abc6789"));
}

#[test]
fn what_is_not_allowed_is_left_to_the_target() {
    let (mut one, mut other, number) = linked();
    let mut window = [0; 16];
    register(&other, KEY, &mut window, abi::REMOTE_READ);
    let wrong = [(RmaKind::Write, 0, 8), (RmaKind::Read, 10, 8), (RmaKind::Read, u64::MAX, 1)];
    for (kind, offset, len) in wrong {
        access(&mut one, number, kind, offset, &mut vec![1; len]);
        let mut outcome = None;
        until(|| {
            other.engine.progress();
            one.engine.progress();
            outcome = one.next();
            outcome.is_some()
        });
        assert!(matches!(outcome, Some(Err(_))), "{kind:?} of {len} bytes at {offset}");
    }
    assert_eq!(window, [0; 16]);
}

#[test]
fn a_region_that_was_removed_is_not_touched_any_more() {
    let (mut one, mut other, number) = linked();
    let (mut first, mut second) = ([0u8; 8], [0u8; 8]);
    register(&other, KEY, &mut first, BOTH);
    access(&mut one, number, RmaKind::Write, 0, &mut [1; 8]);
    assert!(is_at_once(&mut one));
    other.engine.connections.data.application.mr.remove(KEY);
    register(&other, KEY, &mut second, BOTH);
    other.engine.note_removed_regions();
    access(&mut one, number, RmaKind::Write, 0, &mut [2; 8]);
    assert!(is_at_once(&mut one));
    assert_eq!((first, second), ([1; 8], [2; 8]));
}

#[test]
fn a_target_that_counts_accesses_executes_them_itself() {
    let (mut one, mut other) = (
        Party::open(),
        Party::open_with(|mut setup| {
            setup.sink.counters.remote_write = Some(Arc::new(Counter::default()));
            setup
        }),
    );
    let number = one.av.insert(other.name());
    one.send(number).unwrap();
    until(|| {
        other.engine.progress();
        one.engine.progress();
        other.is_linked() && one.is_linked() && one.next().is_some()
    });
    let mut window = [0; 8];
    register(&other, KEY, &mut window, BOTH);
    access(&mut one, number, RmaKind::Write, 0, &mut [5; 8]);
    assert!(!is_at_once(&mut one));
    until(|| {
        other.engine.progress();
        one.engine.progress();
        one.next().is_some()
    });
    assert_eq!(window, [5; 8]);
}
