//! A digest of frames of a log, by which its sender, who has moved to another node and sends them
//! again, and its receiver find out whether both have the same.
//!
//! What enters: frames without their padding, one after the other. What leaves: a number that is
//! never 0, which says that frames are not kept. What may never happen: other frames, or the same
//! ones in another order, count as the same.

use super::image_logs::Excerpt;
use super::layout::REGION_BYTES;
use super::segment::{LogCursor, SLOT_BYTES};
use super::walk::{ReadLog, Walk};
use crate::digest::digest;
use crate::wire::frame::HEADER_BYTES;

/// The digest of the frames that were added.
#[derive(Clone, Copy, Debug)]
pub struct FramesDigest(u64);

impl FramesDigest {
    /// Of no frames. `end`: the position behind the last frame that will be added.
    pub fn new(end: u64) -> FramesDigest {
        FramesDigest(end)
    }

    /// Adds a frame, with its header and without its padding.
    pub fn add(&mut self, frame: &[u8]) {
        self.0 = digest([self.0, digest(frame)].map(u64::to_le_bytes).as_flattened());
    }

    /// The digest; never 0.
    pub fn value(self) -> u64 {
        self.0.max(1)
    }
}

/// The digest of the frames from position `began` to `end` of a log that is not mapped. `cursor`:
/// of a place at or before `began`, which the writer does not use again. `None`: no frame ends at
/// one of both positions, or the log cannot be read.
pub fn digest_of_part(
    log: &impl ReadLog,
    mut cursor: LogCursor,
    (began, end): (u64, u64),
) -> Option<u64> {
    Walk::new(log, REGION_BYTES).pass_to(&mut cursor, began)?;
    let part = Excerpt { from: 0, to: 0, start: began, end };
    let mut digest = FramesDigest::new(end);
    part.copy(log, cursor, |frames| {
        let mut rest = frames;
        while let Some(length) = rest.first_chunk::<4>() {
            let bytes = HEADER_BYTES + u32::from_le_bytes(*length) as usize;
            digest.add(rest.get(..bytes)?);
            rest = rest.get(bytes.next_multiple_of(SLOT_BYTES)..)?;
        }
        Some(())
    })?;
    Some(digest.value())
}

#[cfg(test)]
mod tests {
    use core::cell::RefCell;
    use std::vec;
    use std::vec::Vec;

    use super::super::image_logs::lay_frames;
    use super::*;

    struct Region(RefCell<Vec<u8>>);

    impl ReadLog for Region {
        fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
            bytes.copy_from_slice(self.0.borrow().get(at..at + bytes.len())?);
            Some(())
        }
    }

    /// A frame of this many bytes behind its header, with its padding.
    fn frame(bytes: usize, value: u8) -> Vec<u8> {
        let mut frame = vec![value; (HEADER_BYTES + bytes).next_multiple_of(SLOT_BYTES)];
        frame[..8].copy_from_slice(&(bytes as u64 | 7 << 32).to_le_bytes());
        frame
    }

    fn region(frames: &[Vec<u8>]) -> Region {
        let region = Region(RefCell::new(vec![0; 8 << 20]));
        let laid = lay_frames(&frames.concat(), 640, |at, bytes| {
            region.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            Some(())
        });
        laid.unwrap();
        region
    }

    #[test]
    fn the_digest_is_that_of_the_frames_one_by_one() {
        let frames: Vec<Vec<u8>> = (0..300).map(|it| frame(it * 97 % 9000, it as u8)).collect();
        let begin = LogCursor::beginning(640);
        let position = |count: usize| 640 + frames[..count].concat().len() as u64;
        let log = region(&frames);
        for (first, last) in [(0, 300), (0, 1), (100, 250), (299, 300)] {
            let mut wanted = FramesDigest::new(position(last));
            for frame in &frames[first..last] {
                let length = u32::from_le_bytes(*frame.first_chunk().unwrap()) as usize;
                wanted.add(&frame[..HEADER_BYTES + length]);
            }
            let found = digest_of_part(&log, begin, (position(first), position(last)));
            assert_eq!(found, Some(wanted.value()), "{first} to {last}");
        }
        let whole = (640, position(300));
        assert_eq!(digest_of_part(&log, begin, (640, whole.1 - 1)), None, "within a frame");
        assert_eq!(digest_of_part(&log, begin, (640, whole.1 + 64)), None, "behind the end");
        assert_eq!(digest_of_part(&log, begin, (576, whole.1)), None, "before the beginning");
        let mut other = frames.clone();
        *other[200].last_mut().unwrap() ^= 1;
        let is_padding = (HEADER_BYTES + 200 * 97 % 9000).is_multiple_of(SLOT_BYTES);
        assert!(!is_padding, "the last byte of that frame is padding");
        let same = digest_of_part(&log, begin, whole);
        assert_eq!(digest_of_part(&region(&other), begin, whole), same, "padding does not count");
        other[200][HEADER_BYTES] ^= 1;
        assert_ne!(digest_of_part(&region(&other), begin, whole), same);
        let mut swapped = frames.clone();
        swapped[299] = frame(100, 1);
        swapped[298] = frame(100, 2);
        let one = region(&swapped);
        swapped.swap(298, 299);
        let end = 640 + swapped.concat().len() as u64;
        let [one, other] =
            [one, region(&swapped)].map(|log| digest_of_part(&log, begin, (640, end)));
        assert!(one.is_some() && one != other);
    }
}
