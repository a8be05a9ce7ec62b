//! Logs between this process and processes of other nodes.
//!
//! The log to such a process lies in the file of this node, and a transport sends its frames
//! ([`landbridge_proto::log::transfer`]). The log of such a process to this one is appended here,
//! by this process, as its frames arrive. From there on it is read as the log of any process: also
//! by later incarnations, which ask no other node for anything.
//!
//! What may never happen: a frame is appended twice, or where one is missing.

use std::io;
use std::sync::atomic::Ordering;

use landbridge_proto::log::contact::{CONTACT_BYTES, Contact};
use landbridge_proto::log::layout::{
    CONTACTS_CHANGED_AT, LOGGED_PROCESSES_MAX, MAIL_BYTES_MAX, NOTHING_WAITS, REGION_BYTES,
    STABLE_AT, contact_at, discarded_at, release_at,
};
use landbridge_proto::log::memory_share::LogExtent;
use landbridge_proto::log::segment::{LogCursor, SEGMENT_BYTES_MAX, SLOT_BYTES, SegmentChain};
use landbridge_proto::wire::frame::HEADER_BYTES;
use rustix::net::{SendFlags, sendto};

use super::NodeLogs;
use super::disk_part::open_log;
use super::log_end::{FRAME_BYTES_MAX, LogWriter};
use super::mailbox::{mend_confirmed, note_arrived, note_confirmed};
use super::open_logs::{no_such_process, not_kept};
use super::pair_releases::{FileWords, PairReleases};
use super::window::foreign;

/// Most bytes of frames in one message to another node. A frame of the greatest length fits.
pub const TRANSFER_BYTES_MAX: usize = 128 << 10;

// A frame of the greatest length goes by a transport, by agents, and into a segment, with the word
// that announces what follows it.
const _: () = assert!(FRAME_BYTES_MAX <= TRANSFER_BYTES_MAX && FRAME_BYTES_MAX <= MAIL_BYTES_MAX);
const _: () = assert!(FRAME_BYTES_MAX + SLOT_BYTES <= SEGMENT_BYTES_MAX);

/// Both logs between this process and one of another node.
pub(super) struct RemoteLogs {
    /// Appends what arrives.
    pub arrivals: LogWriter,
    /// Up to where the other process has this process's log.
    pub confirmed: LogCursor,
    /// See [`ClosedRemote::began`].
    began: Option<u64>,
    /// The next frame to be sent.
    sending: LogCursor,
    /// The frame behind those that [`NodeLogs::next_frames`] has returned.
    ahead: LogCursor,
    /// The end of what earlier incarnations have sent.
    pub earlier_end: u64,
    /// Up to where frames may leave this node.
    pub may_leave: u64,
    /// Up to where they may once the ticket is answered that was drawn last.
    pub asked_end: u64,
}

impl RemoteLogs {
    pub fn open(
        mut arrivals: LogWriter,
        (confirmed, began): (LogCursor, Option<u64>),
        sent: &LogWriter,
    ) -> io::Result<RemoteLogs> {
        arrivals.skip_to_end()?;
        let earlier_end = sent.end(*sent.chain.cursor())?.position();
        Ok(RemoteLogs {
            arrivals,
            confirmed,
            began,
            sending: confirmed,
            ahead: confirmed,
            earlier_end,
            may_leave: 0,
            asked_end: 0,
        })
    }

    pub fn close(self) -> ClosedRemote {
        let RemoteLogs { arrivals, confirmed, began, .. } = self;
        ClosedRemote { arrivals: arrivals.chain, confirmed, began }
    }
}

/// The logs between a process that has not opened the agent's file and one of another node.
#[derive(Clone)]
pub(super) struct ClosedRemote {
    /// What has arrived.
    pub arrivals: SegmentChain,
    /// Up to where the other process has this process's log.
    pub confirmed: LogCursor,
    /// From where on this process sends its log again, if it has moved to this node. `None`: all of
    /// that was compared with what the other process has.
    pub began: Option<u64>,
}

impl ClosedRemote {
    /// Nothing was sent, and nothing has arrived.
    fn new() -> ClosedRemote {
        let arrivals = SegmentChain::new(REGION_BYTES);
        ClosedRemote { arrivals, confirmed: LogCursor::START, began: Some(0) }
    }
}

impl NodeLogs {
    /// Whether a process runs on this node.
    pub fn is_local(&self, process: usize) -> bool {
        process < LOGGED_PROCESSES_MAX && self.open.is_local(process)
    }

    /// The processes of other nodes to which, or from which, there are logs here, in the order in
    /// which they came.
    pub fn remote_processes(&self) -> impl Iterator<Item = usize> + '_ {
        self.remote.iter().map(|(process, _)| process)
    }

    /// Number of the processes that [`Self::remote_processes`] names.
    #[inline]
    pub fn remote_count(&self) -> usize {
        self.remote.len()
    }

    /// Opens the logs to and from a process, if it is of another node and they are not open.
    ///
    /// # Errors
    /// There can be no such process, or memory is short.
    pub fn open_other_node(&mut self, process: usize) -> io::Result<()> {
        match process {
            LOGGED_PROCESSES_MAX.. => Err(no_such_process(process)),
            _ if self.remote.contains(process) || self.open.is_local(process) => Ok(()),
            _ => self.open_remote(process, ClosedRemote::new()),
        }
    }

    /// Opens both logs of a process of another node.
    pub(super) fn open_remote(&mut self, process: usize, closed: ClosedRemote) -> io::Result<()> {
        let ClosedRemote { arrivals, confirmed, began } = closed;
        if !self.open.writers.contains(process) {
            self.open.open_writer(process, SegmentChain::new(REGION_BYTES))?;
        }
        let own = self.open.owner.process;
        self.open.check_kept(process, own, arrivals.cursor())?;
        // What the other process has confirmed since is looked for from there on.
        self.open.check_kept(own, process, &confirmed)?;
        let log = open_log(&mut self.open.window, &self.open.head, (process, own))?;
        let arrivals = LogWriter::new(log, arrivals);
        let Some(target) = self.open.writers.get(process) else { return Err(foreign()) };
        let mut remote = RemoteLogs::open(arrivals, (confirmed, began), &target.log)?;
        if self.open.head.release(STABLE_AT as usize, 0) == NOTHING_WAITS {
            remote.may_leave = u64::MAX;
        }
        self.open.announce(process, own);
        let known = Some(&confirmed).filter(|_| began.is_none());
        mend_confirmed(&self.open.head, own, process, known);
        let arrived = remote.arrivals.chain.cursor().position();
        note_arrived(&self.open.head, process, own, arrived);
        self.remote.insert(process, remote);
        Ok(())
    }

    /// Wakes the agent, which sends this process's contact to other nodes.
    pub fn ring_agent(&self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A full socket means that the bell has been rung often enough.
        let _ = sendto(&self.doorbell.socket, b"!", flags, &self.doorbell.agent);
    }

    /// A number that changes whenever the agent writes a contact.
    #[inline]
    pub fn contacts_changed(&self) -> u64 {
        self.open.head.word(CONTACTS_CHANGED_AT as usize).load(Ordering::Acquire)
    }

    /// The contact of a process, if it is known.
    pub fn contact(&self, process: usize) -> Option<Contact> {
        let mut bytes = [0; CONTACT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).enumerate() {
            let at = contact_at(process) as usize + 8 * place;
            word.copy_from_slice(&self.open.head.word(at).load(Ordering::Relaxed).to_ne_bytes());
        }
        Contact::parse(&bytes)
    }

    /// The generation of the newest contact of a process, also if its writer was killed within it.
    pub fn generation(&self, process: usize) -> u32 {
        self.open.head.word(contact_at(process) as usize).load(Ordering::Acquire) as u32
    }

    /// Writes this process's own contact.
    pub fn write_contact(&self, contact: &Contact) {
        for (place, word) in contact.emit().chunks_exact(8).enumerate() {
            let at = contact_at(self.open.owner.process) as usize + 8 * place;
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            self.open.head.word(at).store(word, Ordering::Release);
        }
    }

    /// Up to where this process has the log of a process of another node.
    ///
    /// # Errors
    /// The process is of this node.
    pub fn arrived(&self, from: usize) -> io::Result<u64> {
        Ok(self.remote(from)?.arrivals.chain.cursor().position())
    }

    /// Appends the frames of a message of a process of another node, each with its padding.
    ///
    /// # Errors
    /// The bytes are not whole frames, or the region of the log is full.
    pub fn append_arrived(&mut self, from: usize, mut bytes: &[u8]) -> io::Result<()> {
        let Some(remote) = self.remote.get_mut(from) else { return Err(foreign()) };
        let before = LogExtent::of(&remote.arrivals.chain);
        let own = self.open.owner.process;
        let releases = PairReleases {
            words: FileWords { head: &self.open.head, from, to: own, confirmed: None },
            is_in_unit: false,
            memory: self.memory,
            notice: &self.notice,
            own,
        };
        while !bytes.is_empty() {
            let frame = first_frame(bytes)?;
            remote.arrivals.append(frame, &[], &releases)?;
            let padded = frame.len().next_multiple_of(SLOT_BYTES);
            bytes = bytes.get(padded..).unwrap_or_default();
        }
        note_arrived(&self.open.head, from, own, remote.arrivals.chain.cursor().position());
        if self.memory.is_changed(before, LogExtent::of(&remote.arrivals.chain)) {
            self.check_memory();
        }
        Ok(())
    }

    /// The end of this process's log to another one: of what this incarnation or an earlier one has
    /// sent.
    ///
    /// # Errors
    /// The process is of this node.
    pub fn sent_end(&self, to: usize) -> io::Result<u64> {
        let written = self.writer(to)?.chain.cursor().position();
        Ok(self.remote(to)?.earlier_end.max(written))
    }

    /// Sends the log to a process of another node from this position on, which is up to where that
    /// process has it. It has less than before if it has moved to another node.
    ///
    /// # Errors
    /// No frame of the log ends there, or what is behind it is not kept.
    pub fn send_from(&mut self, to: usize, position: u64) -> io::Result<()> {
        if position < self.remote(to)?.confirmed.position() {
            let own = self.open.owner.process;
            let cursor = kept_cursor(self, (own, to), self.writer(to)?, position)?;
            let cursor = cursor.ok_or_else(not_kept)?;
            if let Some(remote) = self.remote.get_mut(to) {
                remote.confirmed = cursor;
            }
        }
        self.confirm(to, position)?;
        if let Some(remote) = self.remote.get_mut(to) {
            remote.sending = remote.confirmed;
        }
        self.has_unsent = true;
        Ok(())
    }

    /// Notes up to where a process of another node has the log to it.
    ///
    /// # Errors
    /// No frame of the log ends there.
    pub fn confirm(&mut self, to: usize, position: u64) -> io::Result<()> {
        let mut cursor = self.remote(to)?.confirmed;
        let log = self.writer(to)?;
        while cursor.position() < position {
            if log.pass(&mut cursor)? == 0 {
                return Err(foreign());
            }
        }
        let is_end_of_frame = cursor.position() == position;
        let Some(remote) = self.remote.get_mut(to).filter(|_| is_end_of_frame) else {
            return Err(foreign());
        };
        remote.confirmed = cursor;
        if remote.sending.position() < position {
            // The agents have carried what this process did not send.
            remote.sending = cursor;
        }
        note_confirmed(&self.open.head, self.open.owner.process, to, &cursor);
        Ok(())
    }

    /// Whether there may be frames to be sent to other nodes. Until [`Self::note_unsent`] or a new
    /// frame, the answer is then no.
    #[inline]
    pub fn take_unsent(&mut self) -> bool {
        std::mem::take(&mut self.has_unsent)
    }

    /// Notes that frames are still to be sent.
    pub fn note_unsent(&mut self) {
        self.has_unsent = true;
    }

    /// The next frames for a process of another node, each with its padding: at most
    /// [`TRANSFER_BYTES_MAX`] bytes, which lie there until they are released; and their position.
    /// Empty: there are none.
    ///
    /// # Errors
    /// The log holds what cannot be there.
    pub fn next_frames(&mut self, to: usize) -> io::Result<(u64, &[u8])> {
        let Some(remote) = self.remote.get_mut(to) else { return Err(foreign()) };
        let Some(target) = self.open.writers.get(to) else { return Err(foreign()) };
        remote.ahead = remote.sending;
        let limits = (TRANSFER_BYTES_MAX, remote.may_leave);
        let frames = target.log.pass_run(&mut remote.ahead, limits)?;
        Ok((remote.sending.position(), frames))
    }

    /// Notes that the frames that [`Self::next_frames`] has returned last were sent.
    pub fn note_frames_sent(&mut self, to: usize) {
        if let Some(remote) = self.remote.get_mut(to) {
            remote.sending = remote.ahead;
        }
    }

    /// Up to where a process of another node is known to have the log to it.
    ///
    /// # Errors
    /// The process is of this node.
    pub fn confirmed(&self, to: usize) -> io::Result<u64> {
        Ok(self.remote(to)?.confirmed.position())
    }

    fn remote(&self, process: usize) -> io::Result<&RemoteLogs> {
        self.remote.get(process).ok_or_else(foreign)
    }

    fn writer(&self, to: usize) -> io::Result<&LogWriter> {
        self.open.writers.get(to).map(|target| &target.log).ok_or_else(foreign)
    }
}

/// From where on a process that has moved to this node sends its log to one of another node again;
/// `None`: all of that was compared with what the other process has.
///
/// # Errors
/// The process is of this node.
pub fn began(logs: &NodeLogs, to: usize) -> io::Result<Option<u64>> {
    Ok(logs.remote(to)?.began)
}

/// Notes that what this process has sent again was compared with what the other process has.
pub fn note_compared(logs: &mut NodeLogs, to: usize) {
    if let Some(remote) = logs.remote.get_mut(to) {
        remote.began = None;
    }
}

/// The digest of the frames of a process of another node from this position on, up to where they
/// have arrived; 0: there are none, or they are not all kept.
///
/// # Errors
/// The log holds what cannot be there.
pub fn digest_of_arrived(logs: &NodeLogs, from: usize, began: u64) -> io::Result<u64> {
    let log = &logs.remote(from)?.arrivals;
    let end = log.chain.cursor().position();
    digest_of(logs, (from, logs.open.owner.process), log, (began, end))
}

/// The digest of the frames to a process of another node that this process has sent again, up to
/// this position; 0: there are none, or they are not all kept.
///
/// # Errors
/// No frame ends there, or the log holds what cannot be there.
pub fn digest_of_sent(logs: &NodeLogs, to: usize, position: u64) -> io::Result<u64> {
    let began = began(logs, to)?.unwrap_or(position);
    digest_of(logs, (logs.open.owner.process, to), logs.writer(to)?, (began, position))
}

fn digest_of(
    logs: &NodeLogs,
    pair: (usize, usize),
    log: &LogWriter,
    (began, end): (u64, u64),
) -> io::Result<u64> {
    if began >= end {
        return Ok(0);
    }
    let cursor = kept_cursor(logs, pair, log, began)?;
    cursor.map_or(Ok(0), |cursor| log.digest(cursor, end))
}

/// The place of a log at this position. `None`: what is there is not kept.
fn kept_cursor(
    logs: &NodeLogs,
    (from, to): (usize, usize),
    log: &LogWriter,
    position: u64,
) -> io::Result<Option<LogCursor>> {
    let head = &logs.open.head;
    let released = head.release(release_at(from, to) as usize, 0);
    let discarded = head.word(discarded_at(from, to) as usize).load(Ordering::Acquire);
    if released.max(discarded) > position { Ok(None) } else { log.cursor_at(position) }
}

/// The first frame of a message.
fn first_frame(bytes: &[u8]) -> io::Result<&[u8]> {
    let length = bytes.get(..4).map(|length| [length[0], length[1], length[2], length[3]]);
    let length = length.map_or(usize::MAX, |length| u32::from_le_bytes(length) as usize);
    let frame = length.checked_add(HEADER_BYTES).and_then(|length| bytes.get(..length));
    // The kind says that it is no jump.
    let is_frame = |frame: &&[u8]| frame.len() <= FRAME_BYTES_MAX && frame[4] != u8::MAX;
    frame.filter(is_frame).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "another node has sent what is no frame")
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use landbridge_proto::log::layout::{IS_BEING_WRITTEN, confirmed_at};

    use super::super::stability::clear_frames;
    use super::super::tests::{Node, copy, receive, send};
    use super::*;

    /// Process 0 on one node, process 1 on another: each node has a file of its own.
    fn two_nodes(name: &str) -> [Node; 2] {
        let nodes = [Node::new(&format!("{name}-0"), 2), Node::new(&format!("{name}-1"), 2)];
        nodes[0].set_local(&[0]);
        nodes[1].set_local(&[1]);
        nodes
    }

    /// Carries all frames that process 0 has not sent yet to process 1.
    fn carry(zero: &mut NodeLogs, one: &mut NodeLogs) {
        one.open_other_node(0).unwrap();
        loop {
            let (position, frames) = zero.next_frames(1).unwrap();
            let frames = frames.to_vec();
            if frames.is_empty() {
                return;
            }
            assert_eq!(position, one.arrived(0).unwrap());
            one.append_arrived(0, &frames).unwrap();
            zero.note_frames_sent(1);
        }
    }

    #[test]
    fn frames_cross_over_and_stay_for_the_next_incarnation() {
        let nodes = two_nodes("cross");
        let (mut zero, mut one) = (nodes[0].begin(0, 1 << 30), nodes[1].begin(1, 1 << 30));
        assert_eq!(zero.remote_count(), 0, "nothing was sent");
        let payload = |number: usize| vec![number as u8; number * 37 % 9000];
        for number in 0..200 {
            send(&mut zero, 1, &payload(number)).unwrap();
            if number % 3 == 0 {
                carry(&mut zero, &mut one);
            }
        }
        carry(&mut zero, &mut one);
        assert_eq!(zero.remote_processes().collect::<Vec<_>>(), [1]);
        assert_eq!(one.arrived(0).unwrap(), zero.sent_end(1).unwrap());
        for number in 0..150 {
            assert_eq!(receive(&mut one).unwrap(), payload(number));
            one.note_delivery(1, 0);
        }
        drop(one);
        let mut one = nodes[1].begin(1, 1 << 30);
        assert_eq!(one.arrived(0).unwrap(), zero.sent_end(1).unwrap());
        for number in 0..150 {
            assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
            assert_eq!(receive(&mut one).unwrap(), payload(number));
        }
        for number in 150..200 {
            assert_eq!(receive(&mut one).unwrap(), payload(number));
        }
        assert_eq!(receive(&mut one), None);
    }

    #[test]
    fn the_next_incarnation_of_the_sender_sends_what_is_missing() {
        let nodes = two_nodes("missing");
        let (mut zero, mut one) = (nodes[0].begin(0, 1 << 30), nodes[1].begin(1, 1 << 30));
        for number in 0..10 {
            send(&mut zero, 1, &[number; 3000]).unwrap();
        }
        let first = zero.next_frames(1).unwrap().1.to_vec();
        one.open_other_node(0).unwrap();
        one.append_arrived(0, &first).unwrap();
        zero.note_frames_sent(1);
        drop(zero);
        // Before it has done anything again.
        let mut zero = nodes[0].begin(0, 1 << 30);
        assert_eq!(zero.sent_end(1).unwrap(), 10 * 3072);
        zero.send_from(1, one.arrived(0).unwrap()).unwrap();
        carry(&mut zero, &mut one);
        for number in 0..10 {
            send(&mut zero, 1, &[number; 3000]).unwrap();
            assert_eq!(receive(&mut one).unwrap(), [number; 3000]);
        }
        send(&mut zero, 1, b"more").unwrap();
        carry(&mut zero, &mut one);
        assert_eq!(receive(&mut one).unwrap(), b"more");
        assert!(zero.send_from(1, 100).is_err(), "no frame ends there");
    }

    /// A process is killed between two stores to the words from which its agent carries its frames.
    #[test]
    fn the_next_incarnation_finishes_what_agents_wait_for() {
        let nodes = two_nodes("half-written");
        let at = confirmed_at(0, 1);
        let words = || [at, at + 8, at + 16].map(|at| nodes[0].read(at));
        let (mut zero, mut one) = (nodes[0].begin(0, 1 << 30), nodes[1].begin(1, 1 << 30));
        send(&mut zero, 1, &[1; 3000]).unwrap();
        carry(&mut zero, &mut one);
        zero.confirm(1, 3072).unwrap();
        let [position, place, segment] = words();
        assert_eq!(position, 3072);
        nodes[0].write(at, IS_BEING_WRITTEN);
        drop(zero);
        let mut zero = nodes[0].begin(0, 1 << 30);
        zero.open_other_node(1).unwrap();
        assert_eq!(words(), [0; 3], "nothing is known");
        zero.confirm(1, 3072).unwrap();
        assert_eq!(words(), [position, place, segment]);
    }

    #[test]
    fn frames_leave_once_the_agent_has_answered_for_them() {
        let nodes = two_nodes("stable");
        nodes[0].answer_tickets(0);
        let (mut zero, mut one) = (nodes[0].begin(0, 1 << 30), nodes[1].begin(1, 1 << 30));
        send(&mut zero, 1, b"first").unwrap();
        carry(&mut zero, &mut one);
        assert_eq!(receive(&mut one), None, "nobody else knows what it depends on");
        assert!(clear_frames(&mut zero), "it waits");
        send(&mut zero, 1, b"second").unwrap();
        assert!(clear_frames(&mut zero));
        nodes[0].answer_tickets(1);
        assert!(clear_frames(&mut zero), "the second one waits");
        carry(&mut zero, &mut one);
        assert_eq!((receive(&mut one).unwrap(), receive(&mut one)), (b"first".to_vec(), None));
        // The next incarnation asks for what the last one has sent.
        drop(zero);
        let mut zero = nodes[0].begin(0, 1 << 30);
        zero.send_from(1, one.arrived(0).unwrap()).unwrap();
        assert!(clear_frames(&mut zero));
        nodes[0].answer_tickets(3);
        assert!(!clear_frames(&mut zero));
        carry(&mut zero, &mut one);
        assert_eq!(receive(&mut one).unwrap(), b"second");
        nodes[0].answer_tickets(NOTHING_WAITS);
        send(&mut zero, 1, b"first").unwrap();
        send(&mut zero, 1, b"second").unwrap();
        send(&mut zero, 1, b"third").unwrap();
        assert!(!clear_frames(&mut zero));
        carry(&mut zero, &mut one);
        assert_eq!(receive(&mut one).unwrap(), b"third");
    }

    #[test]
    fn who_has_moved_gets_all_again_and_sends_the_same() {
        let nodes = two_nodes("moved");
        let (mut zero, mut one) = (nodes[0].begin(0, 1 << 30), nodes[1].begin(1, 1 << 30));
        for number in 0..20 {
            send(&mut zero, 1, &[number; 3000]).unwrap();
            carry(&mut zero, &mut one);
        }
        zero.confirm(1, one.arrived(0).unwrap()).unwrap();
        drop(one);
        let spare = Node::new("moved-2", 2);
        spare.set_local(&[1]);
        let mut moved = spare.begin(1, 1 << 30);
        moved.open_other_node(0).unwrap();
        zero.send_from(1, moved.arrived(0).unwrap()).unwrap();
        carry(&mut zero, &mut moved);
        for number in 0..20 {
            assert_eq!(receive(&mut moved).unwrap(), [number; 3000]);
        }
        let there = digest_of_arrived(&moved, 0, 0).unwrap();
        let end = zero.sent_end(1).unwrap();
        assert_eq!(digest_of_sent(&zero, 1, end).unwrap(), there);
        assert_ne!(digest_of_sent(&zero, 1, end - 3072).unwrap(), there);
        assert!(digest_of_sent(&zero, 1, end - 64).is_err(), "no frame ends there");
        nodes[0].release(0, 1, 3072);
        assert_eq!(digest_of_sent(&zero, 1, end).unwrap(), 0, "not all is kept");
        zero.confirm(1, end).unwrap();
        assert!(zero.send_from(1, 0).is_err());
    }

    /// Both sides begin again from images at any moment; what the images cover is released.
    #[test]
    fn images_release_on_both_nodes() {
        let nodes = two_nodes("released");
        let (mut zero, mut one) = (nodes[0].begin(0, 8 << 20), nodes[1].begin(1, 8 << 20));
        let payload = |number: u32| vec![number as u8; 1000 + number as usize % 5000];
        for number in 0..8000 {
            send(&mut zero, 1, &payload(number)).unwrap();
            carry(&mut zero, &mut one);
            assert_eq!(receive(&mut one).unwrap(), payload(number));
            one.note_delivery(1, 0);
            if number % 100 != 99 {
                continue;
            }
            zero.confirm(1, one.arrived(0).unwrap()).unwrap();
            let (closed, also_closed) = (zero.close(), one.close());
            nodes[0].release(0, 1, nodes[0].report(0).pairs[&1].sent);
            nodes[1].release(0, 1, nodes[1].report(1).pairs[&0].received);
            let (image, other) = (copy(&closed), copy(&also_closed));
            let kept = match number % 200 < 100 {
                true => [image, other],
                false => [closed, also_closed],
            };
            let opened = kept
                .iter()
                .zip(&nodes)
                .map(|(logs, node)| copy(logs).open(node.file.as_fd()).unwrap());
            let [first, second] = opened.collect::<Vec<_>>().try_into().unwrap();
            (zero, one) = (first, second);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let nodes = two_nodes("refused");
        let mut one = nodes[1].begin(1, 1 << 30);
        one.open_other_node(0).unwrap();
        let header = |length: u32, kind: u8| {
            let mut bytes = vec![0; HEADER_BYTES + 100];
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            bytes[4] = kind;
            bytes
        };
        for bytes in [
            header(101, 7),
            header(u32::MAX, 7),
            header(0, u8::MAX),
            vec![1; 3],
            [header(24, 7), vec![0; 10]].concat(),
        ] {
            assert!(one.append_arrived(0, &bytes).is_err(), "{:?}", &bytes[..3]);
        }
        one.open_other_node(1).unwrap();
        assert!(one.append_arrived(1, &header(100, 7)).is_err(), "of this node");
        assert!(one.open_other_node(LOGGED_PROCESSES_MAX).is_err());
    }
}
