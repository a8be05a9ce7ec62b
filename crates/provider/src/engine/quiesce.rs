//! Quiesces this process for a checkpoint, between two polls of its program.
//!
//! A checkpoint image contains nothing of other processes: neither the ring or stream to the relay,
//! nor memory that the rank supervisor shares with this process. So the process releases both, a
//! stream only after the relay has read everything. The process then reports its position to the
//! supervisor, and the supervisor takes the image. The supervisor also says which process continues
//! from here: this process, or a process that was restored from the image later, as another
//! incarnation. Both receive the same descriptors, map their shared memory at its old addresses,
//! and attach to the relay at the reported position. Neither the program nor its peers notice the
//! checkpoint.
//!
//! | message on the socket | bytes | content |
//! |---|---|---|
//! | to the supervisor | 32 | number of the checkpoint; determinants, frames sent, polls |
//! | from the supervisor | 24 | number of the checkpoint, incarnation, base determinant |
//!
//! The base determinant is the number of determinants before which no incarnation will ever begin.
//! The supervisor's message carries the descriptors of the nondeterminism record, of the statistics
//! page if there is one, and of the node's logs if there are any.
//!
//! What may never happen: the process continues without its record; a checkpoint is taken during
//! replay.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landbridge_drive::link::node_log::ClosedLogs;
use landbridge_proto::wire::hello::LogPosition;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use super::Engine;
use super::carrier::Carrier;
use super::recorded_uplink::{REPLAY_TIME_MAX, end_process};
use crate::{interposer, log, param, statistics_page};

/// The supervisor's message that lets this process continue.
struct ResumeMessage {
    number: u64,
    incarnation: u32,
    kept: u64,
    files: Vec<OwnedFd>,
}

impl Engine {
    /// Quiesces, and waits while the checkpoint is taken, unless the process closes, replays, has a
    /// hello under way or has no relay.
    #[cold]
    pub(super) fn quiesce_for_checkpoint(&mut self) {
        let Some(replay) = &self.connections.data.recording else { return };
        if replay.is_closing
            || replay.is_replaying()
            || self.connections.connector.is_busy()
            || !self.connections.uplink.is_up()
        {
            return;
        }
        let Some(socket) = supervisor_socket() else { return };
        let (polls, number) = (interposer::polls(), interposer::checkpoints_wanted());
        let standing = replay.standing(0);
        let Some(link) = self.connections.uplink.link() else { return };
        let Some(mut recorded) = self.connections.recorded_uplink() else { return };
        recorded.send_nondeterminism();
        // The new link to the relay must get the number of this link.
        if self.connections.data.links[..link].iter().any(Option::is_none) || !interposer::quiesce()
        {
            return;
        }
        let has_page = statistics_page::quiesce();
        // The relay sends again the frames that this process has not read.
        let time_max = REPLAY_TIME_MAX.max(self.connections.data.identity.settings.peer_timeout);
        if let Some(mut recorded) = self.connections.recorded_uplink() {
            recorded.finish_for_checkpoint(time_max);
        }
        self.other_nodes.close();
        let logs = self.connections.data.close_link(link).and_then(|link| match link.carrier {
            Carrier::Logs(logs) => Some(logs.close()),
            _ => None,
        });
        self.connections.uplink.reset();
        let message =
            match await_checkpoint(socket, [number, standing.determinants, standing.sent, polls]) {
                Ok(message) if message.number == number => message,
                Ok(_) => end_process("it is to resume from another checkpoint than was taken"),
                Err(error) => {
                    end_process(&format!("no agent has answered that it may continue: {error}"))
                }
            };
        self.resume(message, standing, has_page, logs);
    }

    fn resume(
        &mut self,
        message: ResumeMessage,
        standing: LogPosition,
        has_page: bool,
        mut logs: Option<ClosedLogs>,
    ) {
        let ResumeMessage { incarnation, kept, files, .. } = message;
        let mut files = files.into_iter();
        let is_same = self.connections.data.own.introduction.incarnation == incarnation;
        // Other threads go on as soon as the record is there.
        match logs.as_mut().map(ClosedLogs::take_addresses) {
            // No code of this process has mapped anything meanwhile, but CRIU has.
            Some(Err(error)) if is_same => begin_again(&error),
            Some(Err(error)) => {
                end_process(&format!("the logs of its node cannot be opened: {error}"));
            }
            _ => {}
        }
        if !files.next().is_some_and(|record| interposer::resume(record, incarnation, is_same)) {
            end_process("its nondeterminism record is not the one that it had");
        }
        if has_page && !files.next().is_some_and(|file| statistics_page::resume(file.as_fd())) {
            log!(
                Info,
                "there is no statistics page any more: the state of the paths is not reported"
            );
        }
        let own = &mut self.connections.data.own.introduction;
        if !is_same {
            let real = self.poll_state.time();
            self.connections.data.recording.iter_mut().for_each(|replay| replay.resume_clock(real));
        }
        (own.incarnation, own.log_position) = (incarnation, LogPosition { kept, ..standing });
        match logs {
            // Whether or not this process uses the page before them.
            Some(logs) => {
                self.connections.attach_to_logs(logs, files.as_slice());
                self.other_nodes.open(&mut self.connections);
            }
            None => self.attach(),
        }
    }
}

/// Kills this process, in which a CRIU that was killed itself has left memory: the supervisor
/// restarts the rank as after any kill.
fn begin_again(why: &io::Error) -> ! {
    log!(Warn, "CRIU was killed and has left memory in this process, which begins again: {why}");
    // SAFETY: kills this process; the call has no other effect.
    unsafe { libc::raise(libc::SIGKILL) };
    std::process::abort()
}

/// The socket to the rank supervisor, if checkpoints are taken of this process.
fn supervisor_socket() -> Option<BorrowedFd<'static>> {
    let number = param::QUIESCE_SOCKET.number().ok().flatten()?;
    let number = i32::try_from(number).ok()?;
    // SAFETY: the socket is open for as long as this process lives; the kernel refuses a closed
    // descriptor.
    Some(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Reports that a checkpoint can be taken, and waits for the message that says which process
/// continues. The supervisor takes the image during this call.
fn await_checkpoint(socket: BorrowedFd<'_>, numbers: [u64; 4]) -> io::Result<ResumeMessage> {
    let mut word = [0; 32];
    for (place, number) in word.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    rustix::net::send(socket, &word, SendFlags::NOSIGNAL)?;
    let mut answer = [0; 24];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
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
    Ok(ResumeMessage { number: number(0), incarnation: number(8) as u32, kept: number(16), files })
}
