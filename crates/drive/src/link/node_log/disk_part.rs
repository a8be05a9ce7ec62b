//! The part of the node's disk file in which a log goes on when memory for logs is full.
//!
//! The kernel writes the pages of the file to disk in the background, and takes their memory back
//! where memory is short; who reads them again gets them from disk. So the logs of a node may be
//! longer than its memory, and cost no system call for each frame.
//!
//! What enters: segments that a log needs, or needs no more. What leaves: disk space, or none, if
//! the limit is reached or the disk is full. What may never happen: a process writes to a page for
//! which the disk has no room, which would end it (SIGBUS).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::log::layout::{
    DISK_FULL_UNTIL_AT, DISK_MAX_AT, DISK_PARTS_AT, DISK_TAKEN_AT, LOG_BYTES, disk_part_at,
};
use landbridge_proto::log::segment::{LogSegment, SEGMENT_BYTES_MAX};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, pread, pwrite};

use super::window::{Mapped, Window};
use crate::sys::now_millis;

/// For how long a disk that had no room is not asked again: others may use it only for a while.
const FULL_DISK_MILLIS: u64 = 5_000;

/// Opens the log of one process to another: its region, and its part of the disk file, if there is
/// one.
///
/// # Errors
/// More logs are open than there are addresses for, or memory is short.
pub(super) fn open_log(
    window: &mut Window,
    head: &Mapped,
    pair: (usize, usize),
) -> io::Result<(Mapped, Option<DiskPart>)> {
    let mut log = window.log(pair)?;
    let part = window.disk().and_then(|(file, parts)| DiskPart::of(head, file, pair, parts));
    if let Some(part) = &part {
        window.map_disk(&mut log, &part.file, part.start)?;
    }
    Ok((log, part))
}

/// The part of one log.
pub(super) struct DiskPart {
    file: Arc<OwnedFd>,
    /// Where it begins in the file.
    start: u64,
}

impl DiskPart {
    /// The part of the log of one process to another, which is given to it now if it has none.
    /// `parts`: how many the file has. `None`: the file has no more.
    fn of(
        head: &Mapped,
        file: &Arc<OwnedFd>,
        (from, to): (usize, usize),
        parts: u64,
    ) -> Option<DiskPart> {
        let word = head.word(disk_part_at(from, to) as usize);
        let part = match word.load(Ordering::Acquire) {
            0 => give_part(head, word),
            part => part,
        };
        let start = (part - 1) * LOG_BYTES as u64;
        (part <= parts).then(|| DiskPart { file: Arc::clone(file), start })
    }

    /// Takes disk for a segment that has none; returns whether there was room.
    #[cold]
    pub fn take(&self, head: &Mapped, segment: LogSegment) -> bool {
        if self.holds(segment) {
            return true;
        }
        let bytes = bytes_of(segment);
        let max = head.word(DISK_MAX_AT as usize).load(Ordering::Relaxed);
        let taken = head.word(DISK_TAKEN_AT as usize);
        let more = |taken: u64| taken.checked_add(bytes).filter(|more| *more <= max);
        if is_full(head) || taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err()
        {
            return false;
        }
        let is_taken = self.allocate(segment);
        if !is_taken {
            taken.fetch_sub(bytes, Ordering::Relaxed);
            let until = now_millis() + FULL_DISK_MILLIS;
            head.word(DISK_FULL_UNTIL_AT as usize).store(until, Ordering::Relaxed);
        }
        is_taken
    }

    fn allocate(&self, segment: LogSegment) -> bool {
        let flags = FallocateFlags::empty();
        loop {
            match fallocate(&self.file, flags, self.at(segment), bytes_of(segment)) {
                Err(Errno::INTR) => (),
                outcome => return outcome.is_ok(),
            }
        }
    }

    /// Gives the disk of a segment back that nobody reads any more.
    ///
    /// The process may be restored from an image that was taken before: then its chain has the
    /// segment as one that takes disk. So the first word says that the segment takes none: it is 0,
    /// as in a hole of the file, and that of a segment that was left never is.
    #[cold]
    pub fn give_back(&self, head: &Mapped, segment: LogSegment) {
        if !self.holds(segment) || pwrite(&self.file, &[0; 8], self.at(segment)).is_err() {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A file system that cannot do that keeps the space, which is taken again as it is.
        let _ = fallocate(&self.file, flags, self.at(segment), bytes_of(segment));
        head.word(DISK_TAKEN_AT as usize).fetch_sub(bytes_of(segment), Ordering::Relaxed);
    }

    /// Whether a segment that was written to its end takes disk. Reading the word by the mapped
    /// memory might take disk for it.
    fn holds(&self, segment: LogSegment) -> bool {
        let mut word = [0; 8];
        pread(&self.file, &mut word, self.at(segment)).is_ok() && word != [0; 8]
    }

    /// Where a segment lies in the file.
    fn at(&self, segment: LogSegment) -> u64 {
        self.start + (segment.start() - LOG_BYTES) as u64
    }
}

/// Whether the disk has room for a segment.
pub(super) fn has_room(head: &Mapped) -> bool {
    let (taken, max) = taken_of(head);
    taken.saturating_add(SEGMENT_BYTES_MAX as u64) <= max && !is_full(head)
}

/// Whether less than half of what logs may take on disk is taken.
pub(super) fn has_much_room(head: &Mapped) -> bool {
    let (taken, max) = taken_of(head);
    taken < max / 2 && !is_full(head)
}

/// Whether the disk had no room a short time ago, though logs might take more.
fn is_full(head: &Mapped) -> bool {
    match head.word(DISK_FULL_UNTIL_AT as usize).load(Ordering::Relaxed) {
        0 => false,
        until => now_millis() < until,
    }
}

/// Bytes that logs take on disk, and that they may take.
fn taken_of(head: &Mapped) -> (u64, u64) {
    let word = |at: u64| head.word(at as usize).load(Ordering::Relaxed);
    (word(DISK_TAKEN_AT), word(DISK_MAX_AT))
}

fn bytes_of(segment: LogSegment) -> u64 {
    (segment.end() - segment.start()) as u64
}

/// Gives the next part to a log, which the other side may do at the same time.
#[cold]
fn give_part(head: &Mapped, word: &AtomicU64) -> u64 {
    let part = head.word(DISK_PARTS_AT as usize).fetch_add(1, Ordering::Relaxed) + 1;
    let given = word.compare_exchange(0, part, Ordering::AcqRel, Ordering::Acquire);
    given.map_or_else(|before| before, |_| part)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::{NO_IMAGES_AT, REGION_BYTES};
    use landbridge_proto::log::segment::SegmentChain;
    use rustix::fs::{Mode, OFlags, fstat, ftruncate};

    use super::super::NodeLogs;
    use super::super::tests::{Node, copy, exchange, mebibytes_of, receive, send};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A node of two processes, whose logs may take so much disk.
    fn node(name: &str, disk_max: u64) -> Node {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let disk = rustix::fs::open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).unwrap();
        ftruncate(&disk, 8 * LOG_BYTES as u64).unwrap();
        let mut node = Node::new(name, 2);
        node.disk = Some(disk);
        node.write(DISK_MAX_AT, disk_max);
        node
    }

    fn taken(node: &Node) -> u64 {
        node.read(DISK_TAKEN_AT)
    }

    /// Both processes begin again, and do the same.
    fn do_again(mut zero: NodeLogs, mut one: NodeLogs, messages: u32) {
        for number in 0..messages {
            send(&mut zero, 1, &[number as u8; 1000]).unwrap();
            assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
            assert_eq!(receive(&mut one).unwrap(), [number as u8; 1000]);
        }
        assert_eq!(one.next_delivery().unwrap(), None);
    }

    #[test]
    fn a_log_goes_on_on_disk_and_is_read_again_from_there() {
        let node = node("disk", 64 * MIB);
        let begin = || (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        let (mut zero, mut one) = begin();
        for number in 0..40_000 {
            exchange(&mut zero, &mut one, number);
        }
        assert_eq!(zero.take_discard_notice(), None);
        assert!(mebibytes_of(&node.file) < 8, "{} MiB", mebibytes_of(&node.file));
        assert!((36 * MIB..64 * MIB).contains(&taken(&node)), "{} bytes", taken(&node));
        drop((zero, one));
        let (mut zero, one) = begin();
        assert!(send(&mut zero, 1, &[1; 1000]).is_err(), "something else than before");
        drop(zero);
        do_again(node.begin(0, 2 << 20), one, 40_000);
    }

    #[test]
    fn what_is_released_is_given_back_to_the_disk() {
        let node = node("disk-back", 64 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..20_000 {
            exchange(&mut zero, &mut one, number);
        }
        let before = taken(&node);
        assert!(before >= 16 * MIB, "{before} bytes");
        let closed = zero.close();
        node.release(0, 1, node.report(0).pairs[&1].sent);
        let mut zero = copy(&closed).open(node.files()).unwrap();
        for number in 20_000..25_000 {
            exchange(&mut zero, &mut one, number);
        }
        assert!(taken(&node) < 8 * MIB, "{} of {before} bytes", taken(&node));
        let on_disk = mebibytes_of(node.disk.as_ref().unwrap());
        assert!(on_disk < 8, "{on_disk} MiB");
        assert_eq!(zero.take_discard_notice(), None);
    }

    /// An image holds segments that were given back since it was taken: its incarnation neither
    /// gives them back once more, nor writes where no disk is.
    #[test]
    fn an_incarnation_takes_disk_again_that_was_given_back_since_its_image() {
        let node = node("disk-since", 64 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..20_000 {
            exchange(&mut zero, &mut one, number);
        }
        let image = zero.close();
        node.release(0, 1, node.report(0).pairs[&1].sent);
        let mut sent = 20_000;
        for _ in 0..4 {
            let mut zero = copy(&image).open(node.files()).unwrap();
            for number in 20_000..sent {
                send(&mut zero, 1, &[number as u8; 1000]).unwrap();
            }
            for number in sent..sent + 5_000 {
                exchange(&mut zero, &mut one, number);
            }
            sent += 5_000;
            let on_disk = mebibytes_of(node.disk.as_ref().unwrap()) as u64 * MIB;
            let counted = taken(&node);
            assert!(counted.abs_diff(on_disk) <= MIB, "{counted} counted, {on_disk} on disk");
        }
    }

    /// Changes a byte in the middle of the file.
    fn damage(node: &Node) {
        let disk = node.disk.as_ref().unwrap();
        let mut byte = [0];
        rustix::io::pread(disk, &mut byte, 9 * MIB + 500).unwrap();
        rustix::io::pwrite(disk, &[byte[0] ^ 4], 9 * MIB + 500).unwrap();
    }

    #[test]
    fn what_the_disk_has_changed_is_found_before_it_is_received() {
        let node = node("disk-damaged", 64 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..20_000 {
            exchange(&mut zero, &mut one, number);
        }
        drop(one);
        damage(&node);
        let mut one = node.begin(1, 1 << 30);
        let mut received = 0_u32;
        let error = loop {
            assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
            match one.peek().map(|frame| frame.map(<[u8]>::to_vec)) {
                Ok(Some(frame)) => assert!(frame.ends_with(&[received as u8; 1000])),
                Ok(None) => panic!("it is there"),
                Err(error) => break error,
            }
            one.consume();
            received += 1;
        };
        assert!(error.to_string().contains("corrupt from the disk"), "{error}");
        assert!((5_000..12_000).contains(&received), "{received} messages");
        // A caller that asks only whether there is a frame has passed nothing.
        assert!(!one.prepare_park() && one.peek().is_err());
    }

    /// The reader has kept up, and has used frames before their segment had a digest.
    #[test]
    fn what_the_disk_has_changed_in_a_segment_that_was_entered_early_is_found_at_its_end() {
        let node = node("disk-damaged-late", 64 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        let mut number = 0;
        let mut until = u32::MAX;
        while number < until {
            exchange(&mut zero, &mut one, number);
            number += 1;
            // In the segment that begins at 8 MiB, behind the byte that is changed.
            if until == u32::MAX && taken(&node) == 10 * MIB {
                until = number + 1_500;
            }
        }
        let more = number..number + 1_000;
        more.clone().for_each(|number| send(&mut zero, 1, &[number as u8; 1000]).unwrap());
        damage(&node);
        let read = more.take_while(|number| {
            one.peek().is_ok() && receive(&mut one).unwrap() == [*number as u8; 1000]
        });
        let read = read.count();
        assert!((100..900).contains(&read), "{read} more messages");
        let error = one.peek().unwrap_err();
        assert!(error.to_string().contains("corrupt from the disk"), "{error}");
    }

    #[test]
    fn a_full_disk_costs_restarts_and_nothing_else() {
        let node = node("disk-full", 8 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..40_000 {
            exchange(&mut zero, &mut one, number);
        }
        assert_eq!(zero.take_discard_notice(), Some(1));
        assert_eq!(taken(&node), 8 * MIB);
        assert!(
            fstat(node.disk.as_ref().unwrap()).unwrap().st_blocks <= (8 * MIB / 512) as i64 + 64
        );
    }

    #[test]
    fn a_disk_that_has_less_room_than_logs_may_take_is_the_bound_for_a_while() {
        let node = node("disk-less", 64 * MIB);
        let zero = node.begin(0, 2 << 20);
        let head = &zero.open.head;
        node.write(DISK_TAKEN_AT, 5 * MIB);
        // No disk can be taken for a file that is open for reading alone.
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let part = DiskPart { file: Arc::new(file.into()), start: 1 << 40 };
        let (segment, _) = SegmentChain::new(REGION_BYTES).segment_on_disk(1000, 0).unwrap();
        assert!(has_room(head) && has_much_room(head));
        assert!(!part.take(head, segment) && !has_room(head) && !has_much_room(head));
        assert_eq!(taken(&node), 5 * MIB);
        // Nobody else uses the disk any more.
        let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let part = DiskPart { file: Arc::new(file), start: 0 };
        assert!(!part.take(head, segment), "not yet");
        node.write(DISK_FULL_UNTIL_AT, now_millis());
        assert!(has_room(head) && part.take(head, segment));
        assert_eq!(taken(&node), 5 * MIB + bytes_of(segment));
    }

    /// Without images, too, a log goes on on disk.
    #[test]
    fn nothing_is_discarded_while_the_disk_has_room() {
        let node = node("disk-no-images", 64 * MIB);
        node.write(NO_IMAGES_AT, 1);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..40_000 {
            exchange(&mut zero, &mut one, number);
        }
        assert_eq!(zero.take_discard_notice(), None);
    }

    /// The oldest part of the log lies on disk, and is used again there.
    #[test]
    fn a_full_disk_is_used_again_although_the_reader_is_behind() {
        let node = node("disk-behind", 8 * MIB);
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..40_000_u32 {
            send(&mut zero, 1, &[number as u8; 1000]).unwrap();
            if number >= 12_000 {
                assert_eq!(receive(&mut one).unwrap(), [(number - 12_000) as u8; 1000]);
            }
        }
        assert!(mebibytes_of(&node.file) < 12, "{} MiB", mebibytes_of(&node.file));
    }

    #[test]
    fn a_file_without_parts_is_no_disk() {
        let node = node("disk-small", 64 * MIB);
        ftruncate(node.disk.as_ref().unwrap(), 100).unwrap();
        let (mut zero, mut one) = (node.begin(0, 2 << 20), node.begin(1, 1 << 30));
        for number in 0..10_000 {
            exchange(&mut zero, &mut one, number);
        }
        assert_eq!((zero.take_discard_notice(), taken(&node)), (Some(1), 0));
    }
}
