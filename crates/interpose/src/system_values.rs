//! Recorded calls whose answer comes from the kernel itself and not from a file: random numbers
//! (getrandom(2)), and the names of the node and of its kernel (uname(2)), by which also
//! gethostname(3) is made.
//!
//! In: arguments of such a call. Out: the kernel's answer, noted in the record, or the answer from
//! the record. A process that goes on on another node gets the name of that node from the first
//! call on that no earlier incarnation has made.
//!
//! What may never happen: two incarnations get different answers to the same call.

use landbridge_proto::nondeterminism::RandomSource;

use crate::kernel_calls::{bytes, kernel};
use crate::record_lock;
use crate::session::{CallDescription, Session, call_of};

impl Session {
    /// Handles `getrandom`.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn random(&mut self, into: u64, length: u64, flags: u64) -> Option<i64> {
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, length as usize) };
        let draw = |room: &mut [u8]| {
            let (pointer, length) = (room.as_mut_ptr().addr() as u64, room.len() as u64);
            kernel(libc::SYS_getrandom, [pointer, length, flags, 0, 0, 0])
        };
        let drawn = self.guard.record().bytes(RandomSource::Random, room, draw);
        Some(record_lock::outcome_of(drawn))
    }

    /// Handles `uname`.
    ///
    /// # Safety
    /// The argument is that of the call.
    pub unsafe fn system_name(&mut self, into: u64) -> Option<i64> {
        // SAFETY: the program's structure.
        let room = unsafe { bytes(into, size_of::<libc::utsname>()) };
        let call = call_of(libc::SYS_uname, [0; 5], &[]);
        if !self.is_live() {
            let about = CallDescription::Path("uname", &[]);
            return Some(self.replay(call, about, &mut [room]));
        }
        let result = kernel(libc::SYS_uname, [into, 0, 0, 0, 0, 0]);
        self.note(call, result, &[room]);
        Some(result)
    }
}
