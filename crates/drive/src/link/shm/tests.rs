//! Tests of rings between two ends in one process, and with a peer that writes arbitrary values.

use super::*;
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use proptest::collection::vec;
use proptest::prelude::*;
use std::os::unix::net::UnixStream;

#[test]
fn frames_of_all_sizes_arrive_whole_in_order_over_many_laps() {
    let (mut a, mut b) = pair();
    let mut sent = 0u64;
    let mut seen = 0u64;
    while seen < 1_000 {
        while sent < seen + 40 && a.send(&front(sent), &[IoSlice::new(&payload(sent))]) {
            sent += 1;
        }
        assert!(sent > seen, "the ring takes at least one frame");
        let frame = b.peek().unwrap().unwrap();
        let header = Header::parse(frame).unwrap();
        assert_eq!(header.sequence, seen);
        assert_eq!(&frame[HEADER_BYTES..], payload(seen));
        b.consume();
        seen += 1;
    }
}

#[test]
fn a_full_ring_says_so_and_recovers() {
    let (mut a, mut b) = pair();
    let mut sent = 0;
    while a.send(&front(sent), &[IoSlice::new(&payload(sent))]) {
        sent += 1;
    }
    for _ in 0..sent {
        assert!(b.peek().unwrap().is_some());
        b.consume();
    }
    assert!(b.peek().unwrap().is_none());
    assert!(a.send(&front(0), &[]));
}

#[test]
fn an_empty_ring_takes_the_longest_frame_wherever_it_stands() {
    let (mut a, mut b) = pair();
    let longest = vec![7; FRAME_BYTES_MAX - HEADER_BYTES];
    let mut header = front(0);
    header[..4].copy_from_slice(&(longest.len() as u32).to_le_bytes());
    for small in 0..2 * SHORT_LAP_BYTES / SLOT {
        for _ in 0..small {
            assert!(a.send(&front(0), &[]));
            b.peek().unwrap().unwrap();
            b.consume();
        }
        assert!(a.send(&header, &[IoSlice::new(&longest)]), "after {small} small frames");
        assert_eq!(b.peek().unwrap().unwrap().len(), FRAME_BYTES_MAX);
        b.consume();
    }
}

#[test]
fn a_sleeper_is_rung_once_and_the_end_is_noticed() {
    let (mut a, mut b) = pair();
    assert!(b.prepare_park());
    assert!(a.send(&front(1), &[]) && a.send(&front(2), &[]));
    let mut bell = [0u8; 8];
    assert_eq!(recv(&b.socket, &mut bell[..], RecvFlags::DONTWAIT).unwrap().1, 1);
    assert!(!b.prepare_park(), "frames wait");
    assert!(b.drain_doorbell());
    drop(a);
    assert!(!b.drain_doorbell());
    assert!(b.peek().unwrap().is_some(), "what was written is still there");
}

#[test]
fn a_writer_that_waits_for_room_is_rung_before_the_ring_is_empty() {
    for size in [0, 1, SLOT, RING_BYTES / 16, FRAME_BYTES_MAX - HEADER_BYTES - SLOT] {
        let (mut a, mut b) = pair();
        let mut header = front(0);
        header[..4].copy_from_slice(&(size as u32).to_le_bytes());
        let payload = vec![1; size];
        let send = |a: &mut ShmLink| a.send(&header, &[IoSlice::new(&payload)]);
        for _ in 0..20 {
            while send(&mut a) {}
            assert!(a.prepare_park(), "the ring is full");
            let mut read = 0;
            while !doorbell_rang(&a) {
                assert!(b.peek().unwrap().is_some(), "read to the end without a bell");
                b.consume();
                read += 1;
            }
            assert!(read > 0 && send(&mut a));
            a.unpark();
        }
        while b.peek().unwrap().is_some() {
            b.consume();
        }
        assert!(!doorbell_rang(&a), "nobody waits any more");
    }
}

#[test]
fn room_that_is_there_already_lets_nobody_sleep_but_tells_so_once() {
    let (mut a, mut b) = pair();
    fill(&mut a);
    while b.peek().unwrap().is_some() {
        b.consume();
    }
    assert!(!a.prepare_wait_for_room(), "there is room");
    assert!(a.prepare_park(), "it has been notified");
    a.unpark();
}

fn doorbell_rang(link: &ShmLink) -> bool {
    recv(&link.socket, &mut [0u8; 8][..], RecvFlags::DONTWAIT).is_ok()
}

#[test]
fn a_sleeping_writer_never_misses_room_nor_a_sleeping_reader_a_frame() {
    const FRAMES: u64 = 5_000;
    let (mut a, mut b) = pair();
    let reader = std::thread::spawn(move || {
        for number in 0..FRAMES {
            while b.peek().unwrap().is_none() {
                sleep(&mut b);
            }
            assert_eq!(Header::parse(b.peek().unwrap().unwrap()).unwrap().sequence, number);
            b.consume();
        }
    });
    for number in 0..FRAMES {
        while !a.send(&front(number), &[IoSlice::new(&payload(number))]) {
            sleep(&mut a);
        }
    }
    reader.join().unwrap();
}

/// Sleeps until the doorbell rings. On a machine that has not stopped, a minute means that the
/// doorbell was missed.
fn sleep(link: &mut ShmLink) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    if link.prepare_park() {
        let mut fds = [PollFd::from_borrowed_fd(link.fd(), PollFlags::IN)];
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&minute)), Ok(1), "nobody rang");
    }
    link.drain_doorbell();
    link.unpark();
}

#[test]
fn other_memory_is_refused() {
    let (a, _b) = UnixStream::pair().unwrap();
    let file = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
    assert!(ShmLink::accept(a.into(), file, Mapper::ANYWHERE).is_err());
}

#[test]
fn nonsense_in_the_words_that_both_sides_share_breaks_the_link_and_nothing_else() {
    for value in [u64::MAX, u64::MAX - RING_BYTES as u64 + 1, 1 << 40, 2 * RING_BYTES as u64] {
        let (mut a, b) = pair();
        b.set_read_word(value);
        fill(&mut a);
        assert!(a.peek().is_err(), "more than was written ({value:#x})");
        assert!(!a.prepare_park(), "nobody sleeps on a broken link");
    }
    let (mut a, mut b) = pair();
    fill(&mut a);
    while b.peek().unwrap().is_some() {
        b.consume();
    }
    fill(&mut a);
    assert!(a.peek().is_ok());
    b.set_read_word(0);
    fill(&mut a);
    assert!(a.peek().is_err(), "less than before");
}

proptest! {
    /// Whatever a peer writes where it can, nothing here panics, and nothing is read outside the
    /// ring.
    #[test]
    fn a_hostile_peer_breaks_no_more_than_the_link(steps in vec(any::<(u8, u16, Word)>(), 0..400)) {
        let (mut mine, mut peer) = pair();
        for (step, place, Word(value)) in steps {
            let (head, body) = (front(u64::from(place)), payload(u64::from(place)));
            match step % 8 {
                0 => { mine.send(&head, &[IoSlice::new(&body)]); }
                1 => { mine.send(&front(0), &[]); }
                2 => if let Ok(Some(frame)) = mine.peek() {
                    prop_assert!((HEADER_BYTES..=FRAME_BYTES_MAX).contains(&frame.len()));
                    std::hint::black_box(frame.to_vec());
                    mine.consume();
                },
                3 => if mine.prepare_park() { mine.unpark() },
                4 => { mine.drain_doorbell(); }
                // The peer sometimes sends a valid frame,
                5 => { peer.send(&head, &[IoSlice::new(&body)]); }
                // and otherwise writes into the control words or the ring.
                6 => peer.scribble_control(place, value),
                _ => peer.scribble_ring(place, value),
            }
        }
    }
}

/// Values that are likely to cause faults.
#[derive(Clone, Copy, Debug)]
struct Word(u64);

impl Arbitrary for Word {
    type Parameters = ();
    type Strategy = BoxedStrategy<Word>;

    fn arbitrary_with((): ()) -> Self::Strategy {
        let near = |center: u64| {
            (0..256u64).prop_map(move |off| center.wrapping_add(off * 8).wrapping_sub(1024))
        };
        prop_oneof![
            any::<u64>(),
            near(0),
            near(RING_BYTES as u64),
            near(FRAME_BYTES_MAX as u64),
            near(u64::MAX),
            near(u64::MAX - RING_BYTES as u64),
        ]
        .prop_map(Word)
        .boxed()
    }
}

fn fill(link: &mut ShmLink) {
    while link.send(&front(3), &[IoSlice::new(&payload(3))]) {}
}

impl ShmLink {
    /// Sets the read counter like a peer that lies about what it has read.
    fn set_read_word(&self, value: u64) {
        self.into.memory.freed().store(value, Ordering::Release);
    }

    /// Overwrites any word of the two control blocks.
    fn scribble_control(&self, place: u16, value: u64) {
        self.scribble(place as usize % (2 * size_of::<RingControl>() / 8), value);
    }

    /// Overwrites the start of any slot of the ring that this side writes.
    fn scribble_ring(&self, place: u16, value: u64) {
        let at = place as usize % 64 * SLOT + (self.written() as usize & (RING_BYTES - 1));
        self.out.memory.word(at & (RING_BYTES - 1)).store(value, Ordering::Release);
    }

    fn scribble(&self, index: usize, value: u64) {
        // SAFETY: the index stays inside the page of control words.
        unsafe { self.memory.cast::<AtomicU64>().add(index).as_ref() }
            .store(value, Ordering::Release);
    }
}

fn pair() -> (ShmLink, ShmLink) {
    let (a, b) = UnixStream::pair().unwrap();
    let a = ShmLink::dial(a.into(), Mapper::ANYWHERE).unwrap();
    let memory = ShmLink::receive_memory(b.as_fd()).unwrap();
    (a, ShmLink::accept(b.into(), memory, Mapper::ANYWHERE).unwrap())
}

fn payload(number: u64) -> Vec<u8> {
    let size = (number * 7919) as usize % (FRAME_BYTES_MAX - HEADER_BYTES);
    (0..size).map(|i| (i as u64 * 31 + number) as u8).collect()
}

fn front(number: u64) -> [u8; HEADER_BYTES] {
    let header = Header {
        length: payload(number).len() as u32,
        kind: Kind::Data,
        flags: 0,
        hops: 0,
        source: Address(1),
        target: Address(2),
        sequence: number,
        delivered: 0,
        credit: 0,
    };
    let mut bytes = [0; HEADER_BYTES];
    header.emit(&mut bytes);
    bytes
}
