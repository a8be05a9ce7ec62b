//! An agent that reads how far two processes have come, one of which delivers a frame of the other,
//! in every order of their steps that the memory model allows: what it reads fits together.

use std::sync::atomic::Ordering;

use landbridge_drive::link::node_log::stability::{CutWord, await_cut};
use landbridge_proto::log::layout::{CUT_IS_OVER, IS_CUTTING};
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

#[test]
fn a_cut_has_what_a_delivery_follows_from() {
    every_order(true);
}

/// Processes that deliver while the agent reads: the model can tell.
#[test]
#[should_panic(expected = "follows from nothing that was read")]
fn the_model_finds_a_delivery_within_a_cut() {
    every_order(false);
}

fn every_order(waits: bool) {
    Builder::new().check(move || {
        let words = Arc::new(Model::default());
        let sender = words.clone();
        let sender = thread::spawn(move || {
            sender.note(&sender.of_sender, waits);
            sender.frame.store(1, Ordering::Release);
        });
        let receiver = words.clone();
        let receiver = thread::spawn(move || {
            if receiver.frame.load(Ordering::Acquire) == 1 {
                receiver.note(&receiver.of_receiver, waits);
            }
        });
        words.cut.store(IS_CUTTING, Ordering::Release);
        fence(Ordering::SeqCst);
        let of_sender = words.of_sender.load(Ordering::Acquire);
        let of_receiver = words.of_receiver.load(Ordering::Acquire);
        words.cut.store(CUT_IS_OVER, Ordering::Release);
        sender.join().unwrap();
        receiver.join().unwrap();
        assert!(of_receiver <= of_sender, "a delivery follows from nothing that was read");
    });
}

struct Model {
    cut: AtomicU64,
    /// What the sender had delivered before it sent the frame, and whether the frame is there.
    of_sender: AtomicU64,
    frame: AtomicU64,
    of_receiver: AtomicU64,
}

impl Default for Model {
    fn default() -> Model {
        let zero = || AtomicU64::new(0);
        Model {
            cut: AtomicU64::new(CUT_IS_OVER),
            of_sender: zero(),
            frame: zero(),
            of_receiver: zero(),
        }
    }
}

impl Model {
    /// Notes a delivery.
    fn note(&self, deliveries: &AtomicU64, waits: bool) {
        if waits {
            await_cut(self);
        }
        deliveries.store(1, Ordering::Release);
    }
}

impl CutWord for Model {
    fn load(&self) -> u64 {
        self.cut.load(Ordering::Acquire)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn pause(&self) {
        thread::yield_now();
    }
}
