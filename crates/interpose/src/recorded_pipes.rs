//! Reads of pipes: of standard input, which is a pipe from the node agent, and of the pipes and
//! pairs of sockets by which the program talks to programs that it has started.
//!
//! A later incarnation receives the same bytes from its agent, and should receive the same ones
//! from programs that it starts again. But they may arrive in other pieces, and a program may
//! depend on the pieces: Python reads a clock for each. So the length of each read is recorded with
//! a digest, and a replayed read waits until that many bytes have come.
//!
//! In: reads of the recorded thread, by whichever descriptor. Out: their results, noted in the
//! record or repeated. Where a started program answers otherwise than in an earlier incarnation (it
//! reads a clock, or looks at what has changed since), the replay ends.
//!
//! What may never happen: a replayed read returns other bytes than the recorded one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::c_long;

use crate::descriptor_table::DESCRIPTORS;
use crate::io_vectors::{IoVectorRoom, IoVectors};
use crate::kernel_calls::{bytes, error, kernel};
use crate::restart_refusals::abort_replay;
use crate::session::{CallDescription, Session, call_of};
use crate::signal_mask::interruptible;

/// Number of pipes that are remembered: standard input, and the last ones that the program made.
const PIPES: usize = 128;
/// Place of standard input in [`KNOWN`].
const INPUT: usize = 0;

/// Pipes whose reads are recorded. The recorded thread alone uses the table.
static KNOWN: [KnownPipe; PIPES] = [const { KnownPipe::none() }; PIPES];
/// Number of pipes that the program has made.
static MADE: AtomicUsize = AtomicUsize::new(0);
const NO_DESCRIPTOR: u64 = u64::MAX;

struct KnownPipe {
    device: AtomicU64,
    /// 0: the place is free.
    inode: AtomicU64,
    /// A descriptor of the pipe when the last checkpoint image was taken; [`NO_DESCRIPTOR`]: there
    /// was none.
    at_image: AtomicU64,
}

impl KnownPipe {
    const fn none() -> KnownPipe {
        KnownPipe {
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            at_image: AtomicU64::new(NO_DESCRIPTOR),
        }
    }

    /// Remembers the pipe behind a descriptor, or nothing if that is no pipe.
    fn note(&self, descriptor: u64) {
        let [device, inode] = pipe_at(descriptor).unwrap_or_default();
        self.device.store(device, Relaxed);
        self.inode.store(inode, Relaxed);
    }

    fn is(&self, pipe: [u64; 2]) -> bool {
        self.inode.load(Relaxed) != 0
            && [self.device.load(Relaxed), self.inode.load(Relaxed)] == pipe
    }
}

/// Notes the standard input with which this program begins.
pub fn note_begin() {
    KNOWN[INPUT].note(0);
}

/// Notes pipes that the program has made: a call of pipe(2) or socketpair(2) gives two descriptors.
pub fn note_made(descriptors: [u64; 2]) {
    for descriptor in descriptors {
        let next = MADE.fetch_add(1, Relaxed) % (PIPES - 1);
        KNOWN[1 + next].note(descriptor);
    }
}

/// Remembers where each pipe is open, before a checkpoint image is taken.
pub fn note_image() {
    KNOWN.iter().for_each(|known| known.at_image.store(NO_DESCRIPTOR, Relaxed));
    for descriptor in 0..DESCRIPTORS as u64 {
        let known = known_at(descriptor).map(|place| &KNOWN[place]);
        known.into_iter().for_each(|known| known.at_image.store(descriptor, Relaxed));
    }
}

/// Notes the pipes of a process that was restored from an image, which are other ones.
pub fn note_restore() {
    KNOWN.iter().for_each(|known| known.note(known.at_image.load(Relaxed)));
}

/// Whether there is a pipe whose reads are recorded.
pub fn knows_any() -> bool {
    KNOWN[INPUT].inode.load(Relaxed) != 0 || MADE.load(Relaxed) > 0
}

/// Whether reads of a descriptor are recorded here.
pub fn is_recorded(descriptor: u64) -> bool {
    known_at(descriptor).is_some()
}

/// Place in [`KNOWN`] of the pipe behind a descriptor.
fn known_at(descriptor: u64) -> Option<usize> {
    let pipe = knows_any().then(|| pipe_at(descriptor)).flatten()?;
    KNOWN.iter().position(|known| known.is(pipe))
}

/// Device and inode number of the pipe or socket behind a descriptor.
fn pipe_at(descriptor: u64) -> Option<[u64; 2]> {
    // SAFETY: a structure for which all zeros are a valid value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    let room = (&raw mut about).addr() as u64;
    let found = kernel(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]);
    let is_pipe = matches!(about.st_mode & libc::S_IFMT, libc::S_IFIFO | libc::S_IFSOCK);
    (found == 0 && is_pipe).then_some([about.st_dev, about.st_ino])
}

fn name_of(place: usize) -> &'static str {
    if place == INPUT { "standard input" } else { "a pipe" }
}

impl Session {
    /// Handles a call that makes a pipe or a pair of sockets.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn make_pipe(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let result = kernel(number, arguments);
        let made = if number == libc::SYS_socketpair { arguments[3] } else { arguments[0] };
        if result == 0 {
            // SAFETY: the kernel has written two descriptors there.
            let descriptors = unsafe { (made as *const [u32; 2]).read_unaligned() };
            note_made(descriptors.map(u64::from));
        }
        Some(result)
    }

    /// Handles a read of a pipe. `None`: the descriptor is that of something else.
    ///
    /// # Safety
    /// The arguments are those of a read, as `IoVectors::of` takes them.
    pub unsafe fn read_pipe(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, pointer, length, flags, address, _] = arguments;
        // These flags change nothing about the bytes.
        let plain = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let is_read = match number {
            libc::SYS_read | libc::SYS_readv => true,
            libc::SYS_recvfrom => flags & !(plain as u64) == 0 && address == 0,
            _ => false,
        };
        let place = known_at(descriptor)?;
        if !is_read {
            self.forbid_restart(format_args!(
                "it receives by a pair of sockets in a way that is not recorded (recvmsg)"
            ));
            return None;
        }
        let mut room = IoVectorRoom::new();
        // SAFETY: the caller's promise.
        let pieces = unsafe { IoVectors::of(&mut room, number, pointer, length) };
        let call = call_of(number, [descriptor, pieces.length() as u64, 0, 0, 0], &[]);
        let mut before = [0; 8];
        let is_live = self.is_live();
        let result = if is_live {
            let read = || kernel(number, arguments);
            self.guard.while_released(|| interruptible(read))
        } else {
            let about = CallDescription::Path("read", name_of(place).as_bytes());
            self.replay(call, about, &mut [&mut before])
        };
        let length = result.max(0) as usize;
        if !is_live {
            // SAFETY: the program's buffers, into which it reads.
            unsafe { self.receive(descriptor, &pieces, length, place) };
        }
        // SAFETY: the kernel has written this many bytes there.
        let digest = unsafe { pieces.digest(length) }.to_le_bytes();
        if is_live {
            self.note(call, result, &[&digest]);
        } else if digest != before {
            let name = name_of(place);
            abort_replay(format_args!(
                "its read of {length} bytes of {name} gave other bytes than before"
            ));
        } else if result == 0 && pieces.length() > 0 && self.next_byte(descriptor, &mut [0]) != 0 {
            let name = name_of(place);
            abort_replay(format_args!("{name} has more bytes than before"));
        }
        Some(result)
    }

    /// Handles the question how many bytes wait in a pipe (`FIONREAD` of ioctl(2)).
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn count_waiting(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, _, into, ..] = arguments;
        let place = known_at(descriptor)?;
        let call = call_of(libc::SYS_ioctl, [descriptor, 0, 0, 0, 0], &[]);
        // SAFETY: the caller's promise.
        let room = unsafe { bytes(into, size_of::<u32>()) };
        if self.is_live() {
            let result = kernel(libc::SYS_ioctl, arguments);
            self.note(call, result, &[room]);
            return Some(result);
        }
        let about = CallDescription::Path("look at", name_of(place).as_bytes());
        Some(self.replay(call, about, &mut [room]))
    }

    /// Reads as many bytes as the recorded read, which wait in the pipe or are still to come.
    unsafe fn receive(
        &mut self,
        descriptor: u64,
        pieces: &IoVectors<'_>,
        bytes: usize,
        place: usize,
    ) {
        // SAFETY: the caller's promise.
        for mut room in unsafe { pieces.first(bytes) } {
            while !room.is_empty() {
                match self.next_byte(descriptor, room) {
                    0 => {
                        let name = name_of(place);
                        abort_replay(format_args!(
                            "{name} has ended before a byte that it had read before"
                        ));
                    }
                    count => room = &mut room[count..],
                }
            }
        }
    }

    /// Waits for the next bytes of a pipe, at least one, and returns their number; 0: the pipe has
    /// ended.
    fn next_byte(&mut self, descriptor: u64, room: &mut [u8]) -> usize {
        loop {
            let place = room.as_mut_ptr().addr() as u64;
            let wanted = [descriptor, place, room.len() as u64, 0, 0, 0];
            let found = self.guard.while_released(|| {
                interruptible(|| match wait(descriptor) {
                    0.. => kernel(libc::SYS_read, wanted),
                    interrupted => interrupted,
                })
            });
            match usize::try_from(found) {
                Ok(count) => return count,
                Err(_) if [error(libc::EINTR), error(libc::EAGAIN)].contains(&found) => (),
                Err(_) => return 0,
            }
        }
    }
}

/// Waits until the pipe has bytes or has ended: the descriptor may be one that does not block.
fn wait(descriptor: u64) -> i64 {
    let mut wanted = libc::pollfd { fd: descriptor as i32, events: libc::POLLIN, revents: 0 };
    let wanted = (&raw mut wanted).addr() as u64;
    kernel(libc::SYS_poll, [wanted, 1, u64::from(u32::MAX), 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_pipe_is_known_by_each_of_its_descriptors_and_nothing_else_is_it() {
        let number = |file: &dyn AsRawFd| file.as_raw_fd() as u64;
        let (reader, writer) = std::io::pipe().unwrap();
        let other = std::io::pipe().unwrap();
        let twin = reader.try_clone().unwrap();
        assert!(!is_recorded(number(&reader)));
        note_made([number(&reader), number(&writer)]);
        assert!(is_recorded(number(&reader)) && is_recorded(number(&twin)));
        assert!(!is_recorded(number(&other.0)));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(!is_recorded(number(&file)) && !is_recorded(NO_DESCRIPTOR));
        let (here, there) = UnixStream::pair().unwrap();
        note_made([number(&here), number(&there)]);
        assert!(is_recorded(number(&here)) && is_recorded(number(&there)));
        // After an image each descriptor is that of another pipe.
        note_image();
        drop((other, there));
        note_restore();
        assert!(is_recorded(number(&reader)) && is_recorded(number(&here)));
        let input = &KNOWN[INPUT];
        input.note(number(&file));
        assert!(!is_recorded(number(&file)), "a file is recorded by its content");
    }
}
