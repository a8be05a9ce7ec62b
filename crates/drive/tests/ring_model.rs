//! Both ends of a ring in a small memory, in every order of their steps that the memory model
//! allows with at most [`PREEMPTIONS`] preemptions: frames arrive whole and in order, and no side
//! sleeps for ever.
//!
//! The ring has [`SLOTS`] slots, and every frame takes one. A lost wake-up is a deadlock, which the
//! model reports.

use std::sync::atomic::Ordering;

use landbridge_drive::link::shm::ring::{
    RingMemory, RingReader, RingWriter, SLOT, SharedWord, prepare_park, prepare_wait_for_room,
    unpark,
};
use loom::model::Builder;
use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// More find nothing new here and take many times as long.
const PREEMPTIONS: usize = 2;
const SLOTS: usize = 4;
/// Length of a frame after its header in bytes.
const LENGTH: u64 = 8;

#[test]
fn a_sleeping_reader_misses_no_frame() {
    every_order(|| {
        let (mut writer, mut reader) = ends();
        let other = thread::spawn(move || (1..=2).for_each(|number| writer.send(number)));
        (1..=2).for_each(|number| reader.receive(number));
        other.join().unwrap();
    });
}

#[test]
fn a_sleeping_writer_misses_no_room_over_a_lap() {
    every_order(|| {
        let (mut writer, mut reader) = ends();
        // The ring is full but for the zero slot.
        (1..SLOTS as u64).for_each(|number| writer.send(number));
        let other = thread::spawn(move || writer.send(SLOTS as u64));
        (1..=SLOTS as u64).for_each(|number| reader.receive(number));
        other.join().unwrap();
    });
}

#[test]
fn a_ring_that_wraps_early_loses_nothing() {
    every_order(|| {
        let (mut writer, mut reader) = ends();
        let begun = (Model::SHORT_LAP_BYTES / SLOT) as u64;
        (1..=begun).for_each(|number| writer.send(number));
        (1..begun).for_each(|number| reader.receive(number));
        let other = thread::spawn(move || writer.send(begun + 1));
        (begun..=begun + 1).for_each(|number| reader.receive(number));
        other.join().unwrap();
    });
}

/// A ring without the fence between a side's announcement and its last look loses wake-ups: the
/// model can tell.
#[test]
#[should_panic(expected = "deadlock")]
fn the_model_finds_a_lost_wake_up() {
    every_order(|| {
        let (mut writer, mut reader) = ends();
        writer.out.memory.is_fenced = false;
        reader.into.memory.is_fenced = false;
        reader.out.memory.is_fenced = false;
        let other = thread::spawn(move || writer.send(1));
        reader.receive(1);
        other.join().unwrap();
    });
}

fn every_order(steps: impl Fn() + Sync + Send + 'static) {
    let mut model = Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.max_branches = 10_000;
    model.check(steps);
}

/// One side: it writes one ring and reads the other.
struct Side {
    out: RingWriter<Model>,
    into: RingReader<Model>,
    own: Arc<Doorbell>,
    other: Arc<Doorbell>,
}

fn ends() -> (Side, Side) {
    let [there, back] = [Model::new(), Model::new()];
    let [first, second] = [Arc::new(Doorbell::default()), Arc::new(Doorbell::default())];
    let side = |out: &Model, into: &Model, own: &Arc<Doorbell>, other: &Arc<Doorbell>| Side {
        out: RingWriter::new(out.clone()),
        into: RingReader::new(into.clone()),
        own: own.clone(),
        other: other.clone(),
    };
    (side(&there, &back, &first, &second), side(&back, &there, &second, &first))
}

impl Side {
    fn send(&mut self, number: u64) {
        let at = loop {
            if let Some(at) = self.out.reserve(SLOT) {
                break at;
            }
            if prepare_wait_for_room(&mut self.into, &mut self.out) {
                self.own.wait();
                unpark(&mut self.into, &mut self.out);
            }
        };
        self.out.memory.word(at + 8).store(number, Ordering::Relaxed);
        self.out.announce(at, SLOT, number << 32 | LENGTH);
        if self.out.must_wake_reader() {
            self.other.ring();
        }
    }

    fn receive(&mut self, number: u64) {
        let (at, _) = loop {
            if let Some(found) = self.into.peek().unwrap() {
                break found;
            }
            if prepare_park(&mut self.into, &mut self.out) {
                self.own.wait();
                unpark(&mut self.into, &mut self.out);
            }
        };
        let found = self.into.memory.word(at + 8).load(Ordering::Relaxed);
        assert_eq!(found, number, "a frame was seen before it was whole, or out of order");
        if self.into.consume() {
            self.other.ring();
        }
    }
}

/// The socket of a side: a byte that was sent stays until the side has woken up.
#[derive(Default)]
struct Doorbell {
    has_rung: Mutex<bool>,
    condition: Condvar,
}

impl Doorbell {
    fn ring(&self) {
        *self.has_rung.lock().unwrap() = true;
        self.condition.notify_one();
    }

    fn wait(&self) {
        let mut has_rung = self.has_rung.lock().unwrap();
        while !*has_rung {
            has_rung = self.condition.wait(has_rung).unwrap();
        }
        *has_rung = false;
    }
}

#[derive(Clone)]
struct Model {
    shared: Arc<Shared>,
    is_fenced: bool,
}

struct Shared {
    /// The first two words of each slot.
    words: Vec<[ModelWord; 2]>,
    freed: ModelWord,
    parked: ModelWord,
    wants_room: ModelWord,
}

struct ModelWord(AtomicU64);

impl Model {
    fn new() -> Self {
        let word = || ModelWord(AtomicU64::new(0));
        let words = (0..SLOTS).map(|_| [word(), word()]).collect();
        let shared = Shared { words, freed: word(), parked: word(), wants_room: word() };
        Model { shared: Arc::new(shared), is_fenced: true }
    }
}

impl RingMemory for Model {
    type Word = ModelWord;
    type Flag = ModelWord;

    const RING_BYTES: usize = SLOTS * SLOT;
    const FRAME_BYTES_MAX: usize = SLOT;
    const SHORT_LAP_BYTES: usize = 2 * SLOT;
    const ROOM_BYTES: usize = SLOT;

    fn word(&self, at: usize) -> &ModelWord {
        &self.shared.words[at / SLOT][at % SLOT / 8]
    }

    fn freed(&self) -> &ModelWord {
        &self.shared.freed
    }

    fn parked(&self) -> &ModelWord {
        &self.shared.parked
    }

    fn wants_room(&self) -> &ModelWord {
        &self.shared.wants_room
    }

    fn fence(&self) {
        if self.is_fenced {
            fence(Ordering::SeqCst);
        }
    }
}

impl SharedWord for ModelWord {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
    }
}
