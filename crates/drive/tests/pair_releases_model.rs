//! A reader that begins again while the writer discards, in every order of their steps that the
//! memory model allows: what the reader begins with is never discarded.

use std::sync::atomic::Ordering;

use landbridge_drive::link::node_log::pair_releases::{PairWords, begin_reading, discard};
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

/// Where the earlier incarnation of the reader has come to, and where the next one begins.
const EARLIER: u64 = 100;
const AGAIN: u64 = 40;

#[test]
fn a_reader_that_begins_again_and_a_writer_see_each_other() {
    every_order(true);
}

/// Without the fences both go on: the model can tell.
#[test]
#[should_panic(expected = "is discarded")]
fn the_model_finds_missing_fences() {
    every_order(false);
}

fn every_order(is_fenced: bool) {
    Builder::new().check(move || {
        let words = Arc::new(Model::new(is_fenced));
        let writer = words.clone();
        let writer = thread::spawn(move || {
            let (before, consumed) = (writer.load_discarded(), writer.load_consumed());
            if consumed > before && discard(&*writer, before, consumed) { consumed } else { before }
        });
        let begins = begin_reading(&*words, AGAIN);
        let discarded = writer.join().unwrap();
        assert!(!begins || discarded <= AGAIN, "what the reader needs is discarded");
    });
}

struct Model {
    consumed: AtomicU64,
    discarded: AtomicU64,
    is_fenced: bool,
}

impl Model {
    fn new(is_fenced: bool) -> Model {
        let (consumed, discarded) = (AtomicU64::new(EARLIER), AtomicU64::new(0));
        Model { consumed, discarded, is_fenced }
    }
}

impl PairWords for Model {
    fn load_consumed(&self) -> u64 {
        self.consumed.load(Ordering::Acquire)
    }

    fn store_consumed(&self, position: u64) {
        self.consumed.store(position, Ordering::Release);
    }

    fn load_discarded(&self) -> u64 {
        self.discarded.load(Ordering::Acquire)
    }

    fn store_discarded(&self, position: u64) {
        self.discarded.store(position, Ordering::Release);
    }

    fn fence(&self) {
        if self.is_fenced {
            fence(Ordering::SeqCst);
        }
    }
}
