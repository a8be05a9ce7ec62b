//! An image of this process is taken (a checkpoint), while it waits, between two polls of its program.
//!
//! An image has nothing of other processes in it: not the ring or the stream to the relay, nor memory that whoever has started this
//! process shares with it. So all that is let go of, a stream when the relay has taken all that was sent; the starter hears where the process stands, and then an image can be
//! taken. Whoever goes on from here hears so from the starter: the process itself, or one that was made of the image later and
//! is another start of it. Both are given the same descriptors, find their shared memory where it was, and attach to the relay
//! as one that stands there. Nothing of all this is seen by the program, nor by its peers.
//!
//! | word on the socket | bytes | what |
//! |---|---|---|
//! | to the starter | 32 | number of the image; intakes, frames sent, looks for messages |
//! | from the starter | 24, with descriptors | the same number, which start this is, intakes before which none will ever stand; the record of clocks, the board if there is one |
//!
//! What may never happen: the process goes on without its record; an image is taken of one that repeats what was before.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landbridge_proto::wire::hello::Standing;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use super::Engine;
use crate::{board, clocks, log, param};

/// What the starter says.
struct GoOn {
    number: u64,
    start: u32,
    kept: u64,
    files: Vec<OwnedFd>,
}

impl Engine {
    /// Waits while an image is taken, if this is a moment for it.
    #[cold]
    pub(super) fn make_way_for_image(&mut self) {
        let is_leaving = self.replay.as_ref().is_none_or(|replay| replay.is_leaving);
        if is_leaving || self.is_repeating() || self.hellos_open > 0 || !self.relay.is_up() {
            return;
        }
        let Some(socket) = starter() else { return };
        let (looks, number) = (clocks::polls(), clocks::images_wanted());
        let Some(standing) = self.replay.as_ref().map(|replay| replay.standing(0)) else { return };
        let Some(link) = self.relay.link() else { return };
        self.tell_reads_for_image();
        // The new link must have the number of this one.
        if self.links[..link].iter().any(Option::is_none) || !clocks::step_aside() {
            return;
        }
        let has_board = board::step_aside();
        // What the relay has sent and nobody has taken in is told again.
        self.finish_for_image();
        drop(self.close_link(link));
        self.relay.begin_anew();
        let go_on = match make_way(socket, [number, standing.intakes, standing.sent, looks]) {
            Ok(go_on) if go_on.number == number => go_on,
            Ok(_) => self.end_process("it is told of another image than the one that was taken"),
            Err(error) => self.end_process(&format!("nobody says that it may go on: {error}")),
        };
        self.come_back(go_on, standing, has_board);
    }

    fn come_back(&mut self, go_on: GoOn, standing: Standing, has_board: bool) {
        let GoOn { start, kept, files, .. } = go_on;
        let mut files = files.into_iter();
        let is_same = self.own.introduction.incarnation == start;
        if !files.next().is_some_and(|record| clocks::come_back(record, start, is_same)) {
            self.end_process("its record of clocks and chance is not the one that it had");
        }
        if has_board && !files.next().is_some_and(|file| board::come_back(file.as_fd())) {
            log!(Info, "there is no board any more: nobody hears how the paths are");
        }
        let own = &mut self.own.introduction;
        if !is_same {
            let real = self.idle.time();
            self.replay.iter_mut().for_each(|replay| replay.wake(real));
        }
        (own.incarnation, own.standing) = (start, Standing { kept, ..standing });
        self.attach();
    }
}

/// The socket to whoever has started this process, if images are taken of it.
fn starter() -> Option<BorrowedFd<'static>> {
    let number = param::ASIDE.number().ok().flatten()?;
    let number = i32::try_from(number).ok()?;
    // SAFETY: it is open for as long as this process lives; one that is not is refused by the kernel.
    Some(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Says that an image can be taken, and waits until it is said who goes on. An image is taken in here.
fn make_way(socket: BorrowedFd<'_>, numbers: [u64; 4]) -> io::Result<GoOn> {
    let mut word = [0; 32];
    for (place, number) in word.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    rustix::net::send(socket, &word, SendFlags::NOSIGNAL)?;
    let mut answer = [0; 24];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut files = Vec::new();
    let mut filled = 0;
    while filled < answer.len() {
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut answer[filled..])];
        let got = rustix::net::recvmsg(socket, &mut room, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        match got {
            Ok(got) if got.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => filled += got.bytes,
            Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
    }
    let number = |at: usize| {
        let bytes = answer[at..at + 8].try_into();
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    Ok(GoOn { number: number(0), start: number(8) as u32, kept: number(16), files })
}
