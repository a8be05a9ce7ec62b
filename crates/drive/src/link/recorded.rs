//! A recorded link: whole frames over a byte stream, for a process whose every step is recorded.
//! What the process sees must not depend on how many bytes a socket holds at a certain time.
//!
//! So the calls are those of a ring ([`super::shm::ShmLink`]): a frame has arrived as a whole or
//! not at all, a frame is consumed when its turn has come, and a frame is sent when the call
//! returns, however long the call takes. All memory is allocated at the beginning, so that later
//! allocations have the same addresses in every run.
//!
//! **Timeout.** A peer that has acknowledged nothing of what is in flight for the peer timeout
//! counts as unreachable. The kernel's own limit (`TCP_USER_TIMEOUT`) would also count the time in
//! which a relay reads nothing, because its disk does not answer or because the receivers of its
//! frames do not read. This link waits for such a relay, however long it takes, as a link through
//! shared memory does.
//!
//! What may never happen: a part of a frame is shown; bytes of two frames mix; a relay that is slow
//! counts as unreachable.

use std::io::{self, IoSlice};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landbridge_proto::recent_determinants::UPLINK_BUFFER_BYTES_MAX;
use landbridge_proto::relay::FRAME_BYTES_MAX;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, sockopt};

use super::stream::PIECES_MAX;
use super::unconfirmed::Unconfirmed;
use crate::sys::{self, TcpInfo};

/// The bytes read ahead: as many as a ring holds.
const READ_BYTES: usize = 256 << 10;
/// How long one wait for a socket without space lasts.
const ROOM_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The time between two liveness checks.
const CHECK_GAP: Duration = Duration::from_millis(100);
/// How long a peer may keep its window closed. The kernel probes a closed window at longer and
/// longer intervals, up to two minutes, so this bound must exceed two minutes.
const ZERO_WINDOW_TIME_MAX: Duration = Duration::from_secs(300);

const _: () = assert!(READ_BYTES >= 2 * FRAME_BYTES_MAX);

/// The buffer for frames that precede the next frame, in bytes: enough for most that a program
/// reads of clocks between two frames.
const PREFIX_BYTES: usize = 4 << 10;

/// A recorded link: see the module documentation. The socket is non-blocking.
#[derive(Debug)]
pub struct RecordedLink {
    socket: OwnedFd,
    inbox: Box<[u8]>,
    /// The frames that leave with the next frame, in front of it.
    prefix: Box<[u8]>,
    prefix_end: usize,
    /// The range of `inbox` that has been read and not consumed.
    start: usize,
    end: usize,
    peer_timeout: Duration,
    last_check: Instant,
    /// What checks have seen in flight.
    unconfirmed: Unconfirmed,
    /// The other side has timed out. This is final.
    is_timed_out: bool,
}

impl RecordedLink {
    /// Creates a link over a socket that is connected to a relay. `peer_timeout` is how long the
    /// other side may acknowledge nothing.
    pub fn new(socket: OwnedFd, peer_timeout: Duration) -> Self {
        // Bytes in flight are lost if this process is killed, so the send buffer holds no more than
        // is retained for this case. The kernel doubles the requested size for its own overhead.
        let _ = sockopt::set_socket_send_buffer_size(&socket, UPLINK_BUFFER_BYTES_MAX / 2);
        sys::tune_recorded_link(&socket, peer_timeout);
        Self {
            socket,
            inbox: vec![0; READ_BYTES].into(),
            prefix: vec![0; PREFIX_BYTES].into(),
            prefix_end: 0,
            start: 0,
            end: 0,
            peer_timeout,
            last_check: Instant::now(),
            unconfirmed: Unconfirmed::default(),
            is_timed_out: false,
        }
    }

    /// The descriptor to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next frame, if all of it has arrived.
    ///
    /// # Errors
    /// If the stream has ended or is broken, or carries something else than frames.
    #[inline]
    pub fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        if self.frame_length()?.is_none() {
            self.read()?;
        }
        let length = self.frame_length()?;
        Ok(length.map(|length| &self.inbox[self.start..self.start + length]))
    }

    /// Removes the frame that [`Self::peek`] returned.
    #[inline]
    pub fn consume(&mut self) {
        if let Ok(Some(length)) = self.frame_length() {
            self.start += length;
        }
    }

    /// Whether a frame has arrived, without a read from the socket.
    pub fn has_frame(&self) -> bool {
        !matches!(self.frame_length(), Ok(None))
    }

    /// The length of the first frame, if all of it has arrived.
    #[inline]
    fn frame_length(&self) -> io::Result<Option<usize>> {
        let bytes = &self.inbox[self.start..self.end];
        if bytes.len() < HEADER_BYTES {
            return Ok(None);
        }
        let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let header = Header::parse(bytes).map_err(|malformed| bad(malformed.0))?;
        let length = HEADER_BYTES + header.length as usize;
        if length > FRAME_BYTES_MAX {
            return Err(bad("a relay sends a frame that is longer than it may be"));
        }
        Ok((bytes.len() >= length).then_some(length))
    }

    fn read(&mut self) -> io::Result<()> {
        if self.start > 0 {
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        loop {
            let room = &mut self.inbox[self.end..];
            match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, bytes)) => {
                    self.end += bytes;
                    return Ok(());
                }
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => return self.check_liveness(),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Checks, at most once per [`CHECK_GAP`], whether the other side has timed out.
    fn check_liveness(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if !self.is_timed_out && now - self.last_check >= CHECK_GAP {
            self.last_check = now;
            self.check_timeout(sys::tcp_info(&self.socket), now);
        }
        // The error repeats: a caller may ask first only whether there is a frame, and ask again
        // for the reason.
        if self.is_timed_out { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    fn check_timeout(&mut self, tcp_info: Option<TcpInfo>, now: Instant) {
        match tcp_info.filter(is_awaiting_peer) {
            None => self.unconfirmed.clear(),
            Some(tcp_info) => {
                let unacked = self.unconfirmed.note(tcp_info.confirmed_bytes, now);
                self.is_timed_out = is_timed_out(&tcp_info, unacked, self.peer_timeout);
            }
        }
    }

    /// Queues a frame that must arrive before the next one that is sent, and need not arrive
    /// sooner. The frame costs no system call of its own, unless it exceeds the buffer.
    ///
    /// # Errors
    /// If the stream is broken.
    pub fn prepend(&mut self, front: &[u8], rest: &[u8]) -> io::Result<()> {
        let length = front.len() + rest.len();
        if self.prefix.len() - self.prefix_end < length {
            return self.send(front, &[IoSlice::new(rest)]);
        }
        for piece in [front, rest] {
            self.prefix[self.prefix_end..][..piece.len()].copy_from_slice(piece);
            self.prefix_end += piece.len();
        }
        Ok(())
    }

    /// Sends a frame, and waits for space as long as it takes.
    ///
    /// # Errors
    /// If the stream is broken, or the other side has timed out.
    ///
    /// # Panics
    /// If there are more than [`PIECES_MAX`] pieces.
    pub fn send(&mut self, front: &[u8], payload: &[IoSlice<'_>]) -> io::Result<()> {
        let prefix = mem::take(&mut self.prefix);
        let sent = self.send_with_prefix(&prefix[..self.prefix_end], front, payload);
        (self.prefix, self.prefix_end) = (prefix, 0);
        sent
    }

    fn send_with_prefix(
        &mut self,
        prefix: &[u8],
        front: &[u8],
        payload: &[IoSlice<'_>],
    ) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); PIECES_MAX + 2];
        slices[0] = IoSlice::new(prefix);
        slices[1] = IoSlice::new(front);
        slices[2..2 + payload.len()].copy_from_slice(payload);
        let mut left = &mut slices[..2 + payload.len()];
        // Empty slices at the end would never be consumed.
        while left.iter().any(|slice| !slice.is_empty()) {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(
                &self.socket,
                left,
                &mut SendAncillaryBuffer::default(),
                flags,
            ) {
                Ok(bytes) => IoSlice::advance_slices(&mut left, bytes),
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => self.await_room()?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    #[cold]
    fn await_room(&mut self) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
        // An error of the socket is reported by the next attempt to send.
        let _ = poll(&mut fds, Some(&ROOM_WAIT));
        self.check_liveness()
    }

    /// Shuts down the sending direction, and waits until the other side has read everything and
    /// closes, at most `at_most`. Frames that still arrive are passed to `on_frame`. (A socket that
    /// is closed while unread bytes are in it drops what it was to send.)
    ///
    /// # Errors
    /// If the other side has not read everything, or if this is unknown: the reason.
    pub fn finish(&mut self, at_most: Duration, mut on_frame: impl FnMut(&[u8])) -> io::Result<()> {
        let deadline = Instant::now() + at_most;
        let sent = self.send(&[], &[]).and_then(|()| {
            rustix::net::shutdown(&self.socket, Shutdown::Write).map_err(io::Error::from)
        });
        // A relay that refuses what it was sent has reported the reason before it closed its end.
        let mut problem = sent.err();
        loop {
            // The other side may have more to send than there is time for.
            if Instant::now() > deadline {
                return Err(problem.unwrap_or_else(|| io::ErrorKind::TimedOut.into()));
            }
            match self.peek() {
                Ok(Some(frame)) => {
                    on_frame(frame);
                    self.consume();
                }
                Ok(None) => match problem.take() {
                    Some(problem) => return Err(problem),
                    None => {
                        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                        let _ = poll(&mut fds, Some(&ROOM_WAIT));
                    }
                },
                Err(end) => {
                    return match problem {
                        Some(problem) => Err(problem),
                        None if end.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
                        None => Err(end),
                    };
                }
            }
        }
    }
}

/// Whether the other kernel owes an acknowledgement or a window update.
fn is_awaiting_peer(tcp_info: &TcpInfo) -> bool {
    tcp_info.has_unacked || tcp_info.has_unsent || tcp_info.is_zero_window
}

/// Whether the other side has timed out. Something has been in flight for `unacked`; the last
/// acknowledgement may be much older.
fn is_timed_out(tcp_info: &TcpInfo, unacked: Duration, peer_timeout: Duration) -> bool {
    let silent = unacked.min(Duration::from_millis(tcp_info.idle_millis));
    let is_zero_window = tcp_info.is_zero_window && !tcp_info.has_unacked;
    silent > if is_zero_window { peer_timeout.max(ZERO_WINDOW_TIME_MAX) } else { peer_timeout }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use landbridge_proto::id::Address;
    use landbridge_proto::wire::frame::Kind;

    use super::*;

    fn pair() -> (RecordedLink, TcpStream) {
        pair_of(Duration::from_secs(60))
    }

    fn pair_of(peer_timeout: Duration) -> (RecordedLink, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ours.set_nonblocking(true).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        (RecordedLink::new(ours.into(), peer_timeout), theirs)
    }

    fn frame(length: u32) -> Vec<u8> {
        let address = Address::new(1, 0);
        let header = Header {
            length,
            kind: Kind::Data,
            flags: 0,
            hops: 0,
            source: address,
            target: address,
            sequence: 5,
            delivered: 0,
            credit: 0,
        };
        let mut bytes = vec![7; HEADER_BYTES + length as usize];
        header.emit(&mut bytes);
        bytes
    }

    /// Bytes are in flight, and nothing has come for so long.
    fn in_flight(idle_millis: u64) -> TcpInfo {
        TcpInfo {
            confirmed_bytes: 0,
            idle_millis,
            unacked_millis: idle_millis,
            has_unacked: true,
            has_unsent: false,
            is_zero_window: false,
            unanswered_probes: 0,
            round_trip_micros: 50,
            variation_micros: 5,
            bytes_per_second: 0,
        }
    }

    fn wait_for(link: &mut RecordedLink) -> Vec<u8> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(frame) = link.peek().unwrap() {
                let frame = frame.to_vec();
                link.consume();
                return frame;
            }
            assert!(Instant::now() < deadline, "nothing has come");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_frame_is_shown_when_all_of_it_has_arrived() {
        let (mut link, mut relay) = pair();
        assert_eq!(link.peek().unwrap(), None);
        let (one, two) = (frame(100), frame(0));
        relay.write_all(&one[..60]).unwrap();
        while link.end < 60 {
            assert_eq!(link.peek().unwrap(), None);
        }
        relay.write_all(&one[60..]).unwrap();
        relay.write_all(&two).unwrap();
        assert_eq!(wait_for(&mut link), one);
        assert_eq!(wait_for(&mut link), two);
        drop(relay);
        let deadline = Instant::now() + Duration::from_secs(20);
        let end = loop {
            match link.peek() {
                Err(error) => break error,
                Ok(it) => assert!(it.is_none() && Instant::now() < deadline),
            }
        };
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_sent_is_sent_whole_however_little_room_there_is() {
        let (mut link, mut relay) = pair();
        let sent = frame(30_000);
        let (copy, times) = (sent.clone(), 300);
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let mut bytes = Vec::new();
            relay.read_to_end(&mut bytes).unwrap();
            bytes
        });
        for _ in 0..times {
            let (front, rest) = copy.split_at(HEADER_BYTES);
            let (one, two) = rest.split_at(1000);
            link.send(front, &[IoSlice::new(one), IoSlice::new(two), IoSlice::new(&[])]).unwrap();
        }
        link.finish(Duration::from_secs(20), |_| ()).unwrap();
        assert_eq!(reader.join().unwrap(), sent.repeat(times));
    }

    #[test]
    fn a_relay_that_never_ends_is_not_waited_for() {
        for is_busy in [false, true] {
            let (mut link, mut relay) = pair();
            let piece = frame(30_000);
            let sender = std::thread::spawn(move || {
                while is_busy && relay.write_all(&piece).is_ok() {}
                relay
            });
            let began = Instant::now();
            let error = link.finish(Duration::from_millis(50), |_| ()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(began.elapsed() < Duration::from_secs(20));
            drop(link);
            sender.join().unwrap();
        }
    }

    #[test]
    fn what_a_relay_says_before_it_ends_is_heard() {
        let (mut link, mut relay) = pair();
        let (one, two) = (frame(100), frame(30_000));
        relay.write_all(&[&one[..], &two, &two[..50]].concat()).unwrap();
        drop(relay);
        let mut heard = Vec::new();
        let _ = link.finish(Duration::from_secs(20), |frame| heard.push(frame.to_vec()));
        assert_eq!(heard, [one, two]);
    }

    #[test]
    fn a_relay_that_reads_nothing_for_longer_than_the_patience_is_waited_for() {
        let (mut link, mut relay) = pair_of(Duration::from_millis(200));
        let (sent, times) = (frame(30_000), 300);
        let copy = sent.clone();
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(3));
            let mut bytes = Vec::new();
            relay.read_to_end(&mut bytes).unwrap();
            bytes
        });
        for _ in 0..times {
            link.send(&copy, &[]).unwrap();
        }
        link.finish(Duration::from_secs(20), |_| ()).unwrap();
        assert_eq!(reader.join().unwrap(), sent.repeat(times));
    }

    #[test]
    fn who_should_have_answered_and_has_not_is_gone() {
        let peer_timeout = Duration::from_secs(60);
        let tcp_info = |has_unacked, is_zero_window, seconds: u64| TcpInfo {
            has_unacked,
            is_zero_window,
            ..in_flight(seconds * 1_000)
        };
        let rows = [
            // Bytes in flight; a closed window; silent time in seconds; time in flight in seconds;
            // whether the other side has timed out.
            (true, false, 59, 1_000, false),
            (true, false, 61, 1_000, true),
            (true, false, 61, 59, false),
            (true, true, 61, 61, true),
            (false, true, 61, 1_000, false),
            (false, true, 301, 1_000, true),
        ];
        for (has_unacked, is_zero_window, seconds, unacked, gone) in rows {
            let tcp_info = tcp_info(has_unacked, is_zero_window, seconds);
            let unacked = Duration::from_secs(unacked);
            assert_eq!(
                is_timed_out(&tcp_info, unacked, peer_timeout),
                gone,
                "{tcp_info:?} {unacked:?}"
            );
        }
    }

    #[test]
    fn who_counts_as_gone_is_gone_for_everybody_who_asks() {
        let (mut link, _relay) = pair_of(Duration::from_secs(2));
        let began = Instant::now();
        link.check_timeout(Some(in_flight(100)), began);
        assert_eq!(link.peek().unwrap(), None);
        link.check_timeout(Some(in_flight(2_100)), began + Duration::from_millis(2_100));
        // The first call asks whether there is a frame, the second one for the reason.
        for _ in 0..2 {
            assert_eq!(link.peek().unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
    }

    #[test]
    fn who_computes_between_two_checks_finds_other_bytes_in_flight() {
        let (mut link, _relay) = pair_of(Duration::from_secs(2));
        let tcp_info = |confirmed_bytes| TcpInfo { confirmed_bytes, ..in_flight(3_000) };
        let began = Instant::now();
        link.check_timeout(Some(tcp_info(100)), began);
        link.check_timeout(Some(tcp_info(200)), began + Duration::from_secs(3));
        assert!(!link.is_timed_out, "those of the first check have arrived");
        link.check_timeout(Some(tcp_info(200)), began + Duration::from_secs(6));
        assert!(link.is_timed_out);
    }

    #[test]
    fn what_goes_ahead_goes_with_the_next_frame_or_at_once_if_it_is_long() {
        let (mut link, mut relay) = pair();
        let parts = |bytes: &[u8]| (bytes[..HEADER_BYTES].to_vec(), bytes[HEADER_BYTES..].to_vec());
        let mut sent = Vec::new();
        for length in [0, 10, PREFIX_BYTES as u32, 20, PREFIX_BYTES as u32 - 200, 300] {
            let frame = frame(length);
            let (front, rest) = parts(&frame);
            link.prepend(&front, &rest).unwrap();
            sent.extend(frame);
        }
        let last = frame(5);
        let (front, rest) = parts(&last);
        for _ in 0..2 {
            link.send(&front, &[IoSlice::new(&rest)]).unwrap();
            sent.extend(&last);
        }
        drop(link);
        let mut bytes = Vec::new();
        relay.read_to_end(&mut bytes).unwrap();
        assert!(bytes == sent);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let (mut link, mut relay) = pair();
        relay.write_all(&[0; HEADER_BYTES]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while link.peek().is_ok() {
            assert!(Instant::now() < deadline);
        }
        assert!(link.has_frame(), "there is something to be looked at");
    }
}
