//! Copies from a file to a pipe within the kernel.
//!
//! In: arguments of `sendfile` or `copy_file_range` whose target is not a recorded file. Out: the
//! result, noted in the record with a digest of the copied bytes. Replay copies the same bytes
//! again, for the reader of the pipe, which is a child of this process or its node agent.

use libc::c_long;

use crate::content::content_of;
use crate::descriptor_table::FileKind;
use crate::file_metadata::identity_of;
use crate::session::{CallDescription, Path, Session, abort_replay, call_of, error, kernel};
use crate::signal_mask::interruptible;

/// Number of the argument that is the length of a copy.
pub fn length_at(number: c_long) -> usize {
    if number == libc::SYS_sendfile { 3 } else { 4 }
}

impl Session {
    /// Position of a copy in the file at a descriptor: the number behind the pointer `offset`, or
    /// the position of the open file.
    ///
    /// # Safety
    /// `offset` is 0 or a pointer of the program's.
    pub unsafe fn copy_position(&mut self, descriptor: u64, offset: u64) -> i64 {
        // SAFETY: the caller's promise.
        let given = unsafe { (offset as *const i64).as_ref() }.copied();
        given.unwrap_or_else(|| self.table.get(descriptor).map_or(0, |open| open.offset))
    }

    /// Handles a copy from a file to a pipe or a socket.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn copy_out(
        &mut self,
        number: c_long,
        from: u64,
        from_offset: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        let index = self.table.index(from)?;
        if self.table.by_index(index).kind != FileKind::File {
            let path = Path(self.table.by_index(index).path());
            crate::restart_refusals::forbid_restart(format_args!(
                "it copies {path} within the kernel"
            ));
            return None;
        }
        // SAFETY: the caller's promise.
        let at = unsafe { self.copy_position(from, from_offset) };
        let length = arguments[length_at(number)];
        let call = call_of(number, [from, at as u64, length, 0, 0], &[]);
        let result = if self.is_live() {
            self.perform_copy_out(call, from, at, number, arguments)
        } else {
            let mut before = [0; 8];
            let about = CallDescription::Path("copy", self.path_of(from));
            let result = self.replay(call, about, &mut [&mut before]);
            if result > 0 {
                self.reopen_file(index);
                check_content(from, at, result, u64::from_le_bytes(before), about);
                repeat_copy(from, at, result, number, arguments);
            }
            result
        };
        if from_offset == 0 {
            self.table.by_index(index).offset += result.max(0);
        }
        Some(result)
    }

    fn perform_copy_out(
        &mut self,
        call: landbridge_proto::nondeterminism::FileCall,
        from: u64,
        at: i64,
        number: c_long,
        arguments: [u64; 6],
    ) -> i64 {
        let before = identity_of(from);
        let result = self.guard.while_released(|| interruptible(|| kernel(number, arguments)));
        let (_, digest) = content_of(from, at as u64, result.max(0) as usize);
        if identity_of(from) != before {
            let path = Path(self.path_of(from));
            crate::restart_refusals::forbid_restart(format_args!(
                "it copies {path} within the kernel, which is changed meanwhile"
            ));
        }
        self.note(call, result, &[&digest.to_le_bytes()]);
        result
    }
}

/// Ends the process if the file does not have the bytes that an earlier incarnation copied.
fn check_content(from: u64, at: i64, result: i64, before: u64, about: CallDescription<'_>) {
    let (found, now) = content_of(from, at as u64, result as usize);
    if now != before {
        abort_replay(format_args!(
            "{about} gave {found} bytes of digest {now:016x}, and before {result} of \
             {before:016x}: the file has changed"
        ));
    }
}

/// Copies the bytes that an earlier incarnation copied, however often the kernel stops in between.
fn repeat_copy(from: u64, at: i64, result: i64, number: c_long, mut arguments: [u64; 6]) {
    kernel(libc::SYS_lseek, [from, at as u64, libc::SEEK_SET as u64, 0, 0, 0]);
    let to = if number == libc::SYS_sendfile { arguments[0] } else { arguments[2] };
    let mut left = result;
    while left > 0 {
        arguments[length_at(number)] = left as u64;
        match kernel(number, arguments) {
            copied @ 1.. => left -= copied,
            full if full == error(libc::EAGAIN) => wait_for_room(to),
            problem => abort_replay(format_args!(
                "a copy of {result} bytes within the kernel, which it made before, fails now \
                 ({problem})"
            )),
        }
    }
}

/// Waits until the reader of a pipe has made room.
fn wait_for_room(pipe: u64) {
    let mut what = libc::pollfd { fd: pipe as i32, events: libc::POLLOUT, revents: 0 };
    kernel(libc::SYS_poll, [(&raw mut what).addr() as u64, 1, -1_i64 as u64, 0, 0, 0]);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_copy_is_repeated_whole_although_the_pipe_is_full() {
        let mut file = std::fs::File::from(memory_file());
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let to = writer.as_raw_fd();
        // SAFETY: the descriptor is that of the pipe.
        assert_eq!(unsafe { libc::fcntl(to, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let reading = std::thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).map(|_| all).unwrap()
        });
        let from = file.as_raw_fd() as u64;
        repeat_copy(from, 7, 250_000, libc::SYS_sendfile, [to as u64, from, 0, 9, 0, 0]);
        drop(writer);
        assert!(reading.join().unwrap() == bytes[7..250_007]);
    }

    fn memory_file() -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: a name, and a new descriptor that nothing else owns.
        unsafe {
            let found = libc::memfd_create(c"copies".as_ptr(), 0);
            assert!(found >= 0);
            std::os::fd::OwnedFd::from_raw_fd(found)
        }
    }
}
