//! Reads of standard input, which is a pipe from the node agent.
//!
//! A later incarnation receives the same bytes from its agent, but the pipe may deliver them in
//! other pieces, and a program may depend on the pieces: Python reads a clock for each. So the
//! length of each read is recorded, and a replayed read waits until that many bytes have come.
//!
//! In: reads of the recorded thread from the pipe that was its standard input when it began, by
//! whichever descriptor. Out: their results, noted in the record or repeated.
//!
//! What may never happen: a replayed read returns other bytes than the recorded one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use libc::c_long;

use crate::descriptor_table::DESCRIPTORS;
use crate::file_metadata::IoVectors;
use crate::kernel_calls::{error, kernel};
use crate::restart_refusals::abort_replay;
use crate::session::{CallDescription, Session, call_of};
use crate::signal_mask::interruptible;

/// Device and inode number of the pipe; 0: standard input is no pipe.
static PIPE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// A descriptor of the pipe when the last checkpoint image was taken; [`NO_DESCRIPTOR`]: there was
/// none.
static AT_IMAGE: AtomicU64 = AtomicU64::new(NO_DESCRIPTOR);
const NO_DESCRIPTOR: u64 = u64::MAX;

const ABOUT: CallDescription<'static> = CallDescription::Path("read", b"standard input");

/// Notes the standard input with which this program begins.
pub fn note_begin() {
    note(0);
}

/// Remembers where the pipe is open, before a checkpoint image is taken.
pub fn note_image() {
    let is_any = PIPE[1].load(Relaxed) != 0;
    let found = (0..DESCRIPTORS as u64).find(|descriptor| is_any && is_input(*descriptor));
    AT_IMAGE.store(found.unwrap_or(NO_DESCRIPTOR), Relaxed);
}

/// Notes the pipe of a process that was restored from an image, which is another one.
pub fn note_restore() {
    note(AT_IMAGE.load(Relaxed));
}

fn note(descriptor: u64) {
    let [device, inode] = pipe_at(descriptor).unwrap_or_default();
    PIPE[0].store(device, Relaxed);
    PIPE[1].store(inode, Relaxed);
}

/// Whether a descriptor is open on standard input.
fn is_input(descriptor: u64) -> bool {
    let [device, inode] = [PIPE[0].load(Relaxed), PIPE[1].load(Relaxed)];
    inode != 0 && pipe_at(descriptor) == Some([device, inode])
}

/// Device and inode number of the pipe behind a descriptor. `None`: it is no pipe.
fn pipe_at(descriptor: u64) -> Option<[u64; 2]> {
    // SAFETY: a structure for which all zeros are a valid value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    let room = (&raw mut about).addr() as u64;
    let found = kernel(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]);
    let is_pipe = found == 0 && about.st_mode & libc::S_IFMT == libc::S_IFIFO;
    is_pipe.then_some([about.st_dev, about.st_ino])
}

impl Session {
    /// Handles a read of standard input. `None`: the descriptor is that of something else.
    ///
    /// # Safety
    /// The arguments are those of a read, as `IoVectors::of` takes them.
    pub unsafe fn read_input(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, pointer, length, ..] = arguments;
        if !matches!(number, libc::SYS_read | libc::SYS_readv) || !is_input(descriptor) {
            return None;
        }
        // SAFETY: the caller's promise.
        let pieces = unsafe { IoVectors::of(number, pointer, length) };
        let call = call_of(number, [descriptor, pieces.length() as u64, 0, 0, 0], &[]);
        let read = || kernel(number, arguments);
        let mut before = [0; 8];
        let is_live = self.is_live();
        let result = if is_live {
            self.guard.while_released(|| interruptible(read))
        } else {
            self.replay(call, ABOUT, &mut [&mut before])
        };
        let bytes = result.max(0) as usize;
        if !is_live {
            // SAFETY: the program's buffers, into which it reads.
            unsafe { self.receive(descriptor, &pieces, bytes) };
        }
        // SAFETY: the kernel has written this many bytes there.
        let digest = unsafe { pieces.digest(bytes) }.to_le_bytes();
        if is_live {
            self.note(call, result, &[&digest]);
        } else if digest != before {
            abort_replay(format_args!(
                "its read of {bytes} bytes of standard input gave other bytes than before"
            ));
        }
        Some(result)
    }

    /// Reads as many bytes as the recorded read, which wait in the pipe or are still to come.
    unsafe fn receive(&mut self, descriptor: u64, pieces: &IoVectors, bytes: usize) {
        // SAFETY: the caller's promise.
        for mut room in unsafe { pieces.first(bytes) } {
            while !room.is_empty() {
                let place = room.as_mut_ptr().addr() as u64;
                let wanted = [descriptor, place, room.len() as u64, 0, 0, 0];
                let found = self.guard.while_released(|| {
                    interruptible(|| match wait(descriptor) {
                        0.. => kernel(libc::SYS_read, wanted),
                        interrupted => interrupted,
                    })
                });
                match usize::try_from(found) {
                    Ok(count @ 1..) => room = &mut room[count..],
                    Err(_) if [error(libc::EINTR), error(libc::EAGAIN)].contains(&found) => (),
                    _ => abort_replay(format_args!(
                        "standard input has ended before a byte that it had read before"
                    )),
                }
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

    use super::*;

    #[test]
    fn the_pipe_is_known_by_each_of_its_descriptors_and_nothing_else_is_it() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let other = std::io::pipe().unwrap();
        let number = |file: &dyn AsRawFd| file.as_raw_fd() as u64;
        let twin = reader.try_clone().unwrap();
        note(number(&reader));
        assert!(is_input(number(&reader)) && is_input(number(&twin)));
        assert!(!is_input(number(&other.0)));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(!is_input(number(&file)) && !is_input(NO_DESCRIPTOR));
        // A process whose standard input is closed at the image has none afterwards.
        note(NO_DESCRIPTOR);
        assert!(!is_input(number(&reader)));
        note(number(&file));
        assert!(!is_input(number(&file)), "a file is recorded by its content");
    }
}
