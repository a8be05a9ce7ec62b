//! Layout of the memory file with the logs of the recorded processes of one node.
//!
//! The node's agent makes the file and keeps it, so it outlives the processes. The file holds in
//! this order:
//!
//! | part | written by | content |
//! |---|---|---|
//! | contacts, one a process | the process itself, or the agent | [`super::contact`] |
//! | control words, a page a process | the process and the agent | see the constants |
//! | pairs, a row a process | see the functions | up to where each of its logs is released |
//! | mailboxes, one a process | the agent | frames carried by agents ([`super::agent_transfer`]) |
//! | reports, one a process | the process, for an image | how far its logs have come |
//! | deliveries, a ring a process | the process | [`super::delivery`] |
//! | logs, one an ordered pair of processes | the sender | frames ([`super::segment`]) |
//!
//! The agent writes with pwrite(2), which need not write a word at once: it writes each position of
//! a release twice, one after the other ([`RELEASE_BYTES`]). A process that reads the second one
//! first, and then another value in the first one, keeps what it knew before.
//!
//! The file is sparse: memory is used only for what was written. It has parts for as many processes
//! as a job can have, spawned ones among them, because nobody knows at its start how many it will
//! have; nobody looks at the part of a process that is not there. Logs begin at multiples of
//! [`HUGE_PAGE`], so that what was never touched before can be had in pages of that size.
//!
//! Each node has a file of its own, of the same form. The log of a process on another node to one
//! of this node holds what has arrived.
//!
//! What enters: numbers of processes, which count from 0 in the job. What leaves: positions in the
//! file, in bytes. What may never happen: two parts overlap.

use super::contact::CONTACT_BYTES;

/// Position of the word that changes with every entry that the agent writes into the contacts.
pub const CONTACTS_CHANGED_AT: u64 = 0;
/// Position of a word that is written before all others: the file can have huge pages (1), or not
/// (0).
pub const HUGE_PAGES_AT: u64 = 8;
/// Position of a word that is written before processes start: a random number, which is in the name
/// of the agent's bell ([`super::contact::agent_bell`]), and which no file of another node has.
pub const AGENT_BELL_AT: u64 = 16;
/// Position of a word of the agent: [`NO_CUTS`], [`IS_CUTTING`] or [`CUT_IS_OVER`].
pub const CUT_AT: u64 = 24;
/// The agent never reads how far all processes have come together.
pub const NO_CUTS: u64 = 0;
/// The agent reads how far all processes have come, and none of them delivers anything meanwhile.
pub const IS_CUTTING: u64 = 1;
/// The agent does so sometimes, and not now.
pub const CUT_IS_OVER: u64 = 2;
/// Position of a word that processes count up: tickets for frames that are to leave the node.
pub const STABLE_WANTED_AT: u64 = 32;
/// Position of the words by which the agent says, twice ([`RELEASE_BYTES`]), up to which ticket
/// frames may leave the node. [`NOTHING_WAITS`]: all may.
pub const STABLE_AT: u64 = 40;
/// See [`STABLE_AT`].
pub const NOTHING_WAITS: u64 = u64::MAX;
/// Position of a word that is written before processes start: bytes that the logs and deliveries
/// of each process may take at most, whatever the setting says. 0: the setting counts.
pub const MEMORY_MAX_AT: u64 = 56;
/// Position of a word of the agent: images of the node's recovery unit are being taken, so logs
/// inside of it are kept as others (1), or not (0).
pub const UNIT_KEEPS_AT: u64 = 64;
/// Position of a word of the agent, written before processes start: how often the processes of the
/// node's recovery unit have begun again together.
pub const ROLLBACKS_AT: u64 = 72;
/// Position of a word of the agent, written before processes start: bytes that the logs of this
/// node may take on disk; 0: there is no disk file. The file has a part of [`LOG_BYTES`] for each
/// log, one behind the other, in the order in which logs are opened ([`disk_part_at`]).
pub const DISK_MAX_AT: u64 = 80;
/// Position of a word of all processes: bytes that logs take on disk.
pub const DISK_TAKEN_AT: u64 = 88;
/// Position of a word of all processes: parts of the disk file that were given to logs.
pub const DISK_PARTS_AT: u64 = 96;
/// Position of a word that is written before processes start: no images of processes are taken (1),
/// or they may be (0). Without images, a log of which something was discarded is of no use.
pub const NO_IMAGES_AT: u64 = 104;
/// Position of a word of all processes: the disk had no room for a segment, and is not asked again
/// before this time, in milliseconds since the start of the machine (CLOCK_MONOTONIC). 0: it had.
pub const DISK_FULL_UNTIL_AT: u64 = 112;
/// Bytes before the first contact.
const CONTACTS_HEAD: usize = 128;
/// Bytes of the control words of one process: a page.
pub const CONTROL_BYTES: usize = 4096;
/// Control word: the process sleeps until its doorbell rings (1), or not (0).
pub const PARKED_AT: usize = 0;
/// Control word: the number in the name of the process's doorbell. Each time the process opens its
/// logs it takes another one, because a child of it may still hold the socket of the last one.
pub const BELL_AT: usize = 8;
/// Control word: how often a bit of [`SOURCES_AT`] was set.
pub const SOURCES_CHANGED_AT: usize = 64;
/// Control word: bytes of deliveries that the process has written.
pub const DELIVERIES_END_AT: usize = 128;
/// Control words: what the process has sent and delivered ([`super::counts`]).
pub const COUNTS_AT: usize = DELIVERIES_END_AT + 8;
/// Control word: frames that the process has sent to others of its recovery unit, counted before
/// they are appended, in the incarnation that got furthest.
pub const UNIT_SENT_AT: usize = COUNTS_AT + 48;
/// Control words: up to which byte the deliveries are released, because no incarnation will replay
/// what is before.
pub const DELIVERIES_RELEASED_AT: usize = 192;
/// Control word: up to which byte the process has discarded deliveries that an incarnation may
/// need.
pub const DELIVERIES_DISCARDED_AT: usize = 320;
/// Control word: the agent gives back pages of deliveries (1), or not (0). Those before what the
/// process has discarded the process gives back itself, and may be using again.
pub const DELIVERIES_PUNCHED_AT: usize = 448;
/// Control word: the process wants images of itself and, if it is not 1, of the process with this
/// number less 2, so that the agent can release logs.
pub const IMAGES_WANTED_AT: usize = 384;
/// Control word: the last ticket that the process has drawn ([`STABLE_WANTED_AT`]).
pub const STABLE_ASKED_AT: usize = IMAGES_WANTED_AT + 8;
/// Control word, written before the process starts: the process runs on this node ([`IS_LOCAL`],
/// [`IN_UNIT`]), or not (0).
pub const LOCAL_AT: usize = 256;
/// See [`LOCAL_AT`]. The process begins again alone.
pub const IS_LOCAL: u64 = 1;
/// See [`LOCAL_AT`]. The process is of the node's recovery unit ([`super::unit`]).
pub const IN_UNIT: u64 = 2;
/// Control word, written before the process starts: how often the process has moved to another
/// node. Beyond 0, the file of this node has of its logs what images hold.
pub const MOVED_AT: usize = LOCAL_AT + 8;
/// Control words: a bit for each process that has a log to this one in the file. A bit is set
/// before the log is written.
pub const SOURCES_AT: usize = 512;
/// Control words: a bit for each process to which this one has a log.
pub const TARGETS_AT: usize = SOURCES_AT + SET_BYTES;
/// Bytes of a set of processes.
pub const SET_BYTES: usize = LOGGED_PROCESSES_MAX / 8;
/// Bytes of a release: its position, twice.
pub const RELEASE_BYTES: usize = 16;
/// Bytes of what is said of a log: its release; up to where its reader has it in this incarnation;
/// up to where its writer has discarded it, because memory was full, although an incarnation may
/// need it; for a log to another node, a cursor ([`confirmed_at`]); for a log from another node, up
/// to where it has arrived; where the log begins in this file; its part of the disk file.
const PAIR_BYTES: usize = RELEASE_BYTES + 16 + CONFIRMED_BYTES + 8 + 8 + 8;
/// Bytes of a cursor up to where another node has a log.
const CONFIRMED_BYTES: usize = 24;
/// The first word of a cursor that is being written ([`confirmed_at`]).
pub const IS_BEING_WRITTEN: u64 = u64::MAX;
/// Word of a mailbox: the number of the frames in it, twice ([`RELEASE_BYTES`]).
pub const MAIL_NUMBER_AT: u64 = 0;
/// Word of a mailbox: the process that has sent the frames.
pub const MAIL_FROM_AT: u64 = 16;
/// Word of a mailbox: the position of the first frame in its log.
pub const MAIL_POSITION_AT: u64 = 24;
/// Word of a mailbox: the bytes of the frames.
pub const MAIL_BYTES_AT: u64 = 32;
/// Word of a mailbox: how often the process had moved to another node that has sent the frames.
pub const MAIL_MOVES_AT: u64 = 40;
/// Word of a mailbox, written by the process: the number of the frames that it has taken last.
pub const MAIL_TAKEN_AT: u64 = 64;
/// Most bytes of frames, with their padding, that agents carry at once. A frame of the greatest
/// length fits.
pub const MAIL_BYTES_MAX: usize = 64 << 10;
/// Where the frames lie in a mailbox.
pub const MAIL_FRAMES_AT: u64 = 4096;
/// Bytes of a mailbox.
const MAILBOX_BYTES: usize = MAIL_FRAMES_AT as usize + MAIL_BYTES_MAX;
/// Bytes of a huge page of the processor.
pub const HUGE_PAGE: usize = 2 << 20;
/// Bytes of the ring of deliveries of one process: a power of two.
pub const DELIVERIES_BYTES: usize = 1 << 30;
/// Bytes of the part of a log's region that lies in the memory file.
pub const LOG_BYTES: usize = 4 << 30;
/// Bytes of the region of one log: the second half lies in the disk file.
pub const REGION_BYTES: usize = 2 * LOG_BYTES;
/// Most processes of a job that keeps logs, spawned ones among them.
pub const LOGGED_PROCESSES_MAX: usize = 1024;

const PAGE: usize = 4096;

/// Bytes of all contacts, with the word before them.
const CONTACTS_BYTES: usize =
    (CONTACTS_HEAD + LOGGED_PROCESSES_MAX * CONTACT_BYTES).next_multiple_of(PAGE);
/// Bytes of what is said of the logs of one process to each.
const RELEASES_BYTES: usize = (LOGGED_PROCESSES_MAX * PAIR_BYTES).next_multiple_of(PAGE);
/// Words of a report before the cursors: two, and three for each process.
pub const REPORT_WORDS: usize = 2 + 3 * LOGGED_PROCESSES_MAX;
/// Bytes of the report of one process: positions, and the cursors of the logs inside its recovery
/// unit, which are a word and seven for each process.
pub const REPORT_BYTES: usize =
    ((REPORT_WORDS + 1 + 7 * LOGGED_PROCESSES_MAX) * 8).next_multiple_of(PAGE);

/// Bytes of the memory file.
pub const FILE_BYTES: u64 = log_at(LOGGED_PROCESSES_MAX, 0);
/// Bytes of all parts before the deliveries, which the agent uses as well.
pub const HEAD_BYTES: usize = deliveries_at(0) as usize;

/// Position of the contact of a process.
pub const fn contact_at(process: usize) -> u64 {
    (CONTACTS_HEAD + process * CONTACT_BYTES) as u64
}

/// Position of the control words of a process.
pub const fn control_at(process: usize) -> u64 {
    (CONTACTS_BYTES + process * CONTROL_BYTES) as u64
}

/// Position of the release of the log of one process to another: up to which byte it is released.
pub const fn release_at(from: usize, to: usize) -> u64 {
    control_at(LOGGED_PROCESSES_MAX) + (from * RELEASES_BYTES + to * PAIR_BYTES) as u64
}

/// Position of the word of the reader of a log: up to where it has the log in this incarnation.
pub const fn consumed_at(from: usize, to: usize) -> u64 {
    release_at(from, to) + RELEASE_BYTES as u64
}

/// Position of the word of the writer of a log: up to where it has discarded what an incarnation
/// may need.
pub const fn discarded_at(from: usize, to: usize) -> u64 {
    consumed_at(from, to) + 8
}

/// Position of the cursor of the writer of a log: up to where a process of another node is known to
/// have the log. Three words: the position, the place, and the announcement of its segment. All 0:
/// the beginning. The writer writes [`IS_BEING_WRITTEN`] first, and the position last.
pub const fn confirmed_at(from: usize, to: usize) -> u64 {
    discarded_at(from, to) + 8
}

/// Position of the word of the reader of a log from another node: up to where it has arrived.
pub const fn arrived_at(from: usize, to: usize) -> u64 {
    confirmed_at(from, to) + CONFIRMED_BYTES as u64
}

/// Position of a word of the agent, written before the processes of the log start here: the
/// position at which the log begins in this file. What was before lay in the file of a node that is
/// lost, and no image needs it.
pub const fn begins_at(from: usize, to: usize) -> u64 {
    arrived_at(from, to) + 8
}

/// Position of the word of a log: the number of its part of the disk file, counted from 1. 0: it
/// has none yet.
pub const fn disk_part_at(from: usize, to: usize) -> u64 {
    begins_at(from, to) + 8
}

/// Position of the mailbox of a process.
pub const fn mailbox_at(process: usize) -> u64 {
    release_at(LOGGED_PROCESSES_MAX, 0) + (process * MAILBOX_BYTES) as u64
}

/// Position of the report of a process: how far its logs have come before an image of it.
pub const fn report_at(process: usize) -> u64 {
    mailbox_at(LOGGED_PROCESSES_MAX) + (process * REPORT_BYTES) as u64
}

/// Position of the deliveries of a process.
pub const fn deliveries_at(process: usize) -> u64 {
    let head = report_at(LOGGED_PROCESSES_MAX).next_multiple_of(HUGE_PAGE as u64);
    head + (process * DELIVERIES_BYTES) as u64
}

/// Position of the log of one process to another.
pub const fn log_at(from: usize, to: usize) -> u64 {
    let place = from * LOGGED_PROCESSES_MAX + to;
    deliveries_at(LOGGED_PROCESSES_MAX) + (place * LOG_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: usize = LOGGED_PROCESSES_MAX - 1;

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(contact_at(1), contact_at(0) + CONTACT_BYTES as u64);
        assert!(contact_at(LAST + 1) <= control_at(0));
        const { assert!(AGENT_BELL_AT + 8 <= CUT_AT) };
        const { assert!(STABLE_AT + RELEASE_BYTES as u64 <= MEMORY_MAX_AT) };
        assert!(DISK_PARTS_AT + 8 <= contact_at(0));
        const { assert!(UNIT_SENT_AT + 8 <= DELIVERIES_RELEASED_AT) };
        assert_eq!(control_at(1), control_at(0) + CONTROL_BYTES as u64);
        const { assert!(TARGETS_AT + SET_BYTES <= CONTROL_BYTES) };
        assert_eq!(release_at(0, 0), control_at(LAST) + CONTROL_BYTES as u64);
        assert!(release_at(0, LAST + 1) <= release_at(1, 0));
        assert!(mailbox_at(0) >= disk_part_at(LAST, LAST) + 8);
        assert_eq!(disk_part_at(0, 0) + 8, release_at(0, 1));
        assert_eq!(report_at(0), mailbox_at(LAST) + MAILBOX_BYTES as u64);
        assert!(deliveries_at(0) >= report_at(LAST) + REPORT_BYTES as u64);
        assert_eq!(log_at(0, 0), deliveries_at(LAST) + DELIVERIES_BYTES as u64);
        assert_eq!(log_at(1, 0), log_at(0, LAST) + LOG_BYTES as u64);
        assert_eq!(FILE_BYTES, log_at(LAST, LAST) + LOG_BYTES as u64);
        assert!(log_at(5, 3).is_multiple_of(HUGE_PAGE as u64));
        const { assert!(FILE_BYTES < i64::MAX as u64) };
        for part in [release_at(3, 0), report_at(3), deliveries_at(3), log_at(3, 2)] {
            assert!(part.is_multiple_of(PAGE as u64), "{part} can be mapped");
        }
    }
}
