//! Connections of sockets (connect(2)): one that is made forbids a restart, one that fails is
//! recorded.
//!
//! In: calls of the C library's `connect` by the program, not by the libraries of the network.
//! Out: the outcome. Whether and why a connection fails depends on other processes, so a replay of
//! the recorded thread gets the recorded error and does not ask again. Calls of other threads,
//! handlers and children are not recorded: one that fails forbids a restart where the error may
//! differ in a later incarnation. A connection to the kernel (netlink(7)) is made again.
//!
//! What may never happen: a replay gets another error than the program got before.

use std::ffi::c_int;

use libc::{sockaddr, socklen_t};

use crate::kernel_calls::HERE;
use crate::record_lock::lock_for_call;
use crate::session::{CallDescription, Session, call_of};
use crate::side_channels::{self, CONNECTS, is_end, is_of_others};
use crate::{dispatch, real_libc, watched};

/// Performs a connection, or takes the recorded error.
///
/// # Safety
/// The arguments are valid for the C library's `connect`.
pub unsafe extern "C" fn connect(
    socket: c_int,
    address: *const sockaddr,
    length: socklen_t,
    from: usize,
) -> c_int {
    let is_of_program = dispatch::is_installed() && side_channels::is_of_program(from);
    let session = || is_of_program.then(lock_for_call).flatten().map(Session::new);
    let call = call_of(libc::SYS_connect, [length.into(), 0, 0, 0, 0], b"");
    let mut replayed = None;
    if let Some(mut session) = session()
        && !session.is_live()
    {
        let about = CallDescription::Path("connection", b"a socket");
        let outcome = session.replay(call, about, &mut []);
        if outcome < 0 {
            set_error(-outcome as c_int);
            return -1;
        }
        replayed = Some(outcome);
    }
    // SAFETY: the caller's promise.
    let outcome = unsafe { real_libc::connect(socket, address, length) };
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    let is_made = outcome == 0 || is_under_way(error);
    // SAFETY: the kernel has read the address.
    let mut forbids_restart = is_made && unsafe { !is_end(address) && is_of_others(address) };
    if !forbids_restart && replayed.is_none() {
        if let Some(mut session) = session() {
            session.note(call, if is_made { 0 } else { -i64::from(error) }, &[]);
        } else if is_of_program && watched::is_watched() && !is_made {
            // SAFETY: the caller's promise.
            forbids_restart = unsafe { may_differ(error, address, length) };
        }
    }
    if forbids_restart {
        side_channels::forbid_restart(from, CONNECTS);
    }
    set_error(error);
    outcome
}

fn set_error(error: c_int) {
    // SAFETY: the C library's own place, for this thread.
    unsafe { *libc::__errno_location() = error };
}

/// Whether the kernel goes on with a connection after this error.
fn is_under_way(error: c_int) -> bool {
    matches!(error, libc::EINPROGRESS | libc::EINTR | libc::EALREADY)
}

/// Whether a later incarnation may get another error: it depends on whether somebody listens, and
/// for a file of a local socket (unix(7)) on whether the file is there. Libraries look for services
/// that are absent (libuuid for its daemon), so a file counts only if it, or its directory, has
/// changed since the job began.
///
/// # Safety
/// The pointer is that of an address of `length` bytes, if the error says something about it.
unsafe fn may_differ(error: c_int, address: *const sockaddr, length: socklen_t) -> bool {
    const NAME_AT: usize = std::mem::offset_of!(libc::sockaddr_un, sun_path);
    const NAME_BYTES: usize = size_of::<libc::sockaddr_un>() - NAME_AT;
    let depends_on_others = matches!(
        error,
        libc::ECONNREFUSED
            | libc::ENOENT
            | libc::ENOTDIR
            | libc::EACCES
            | libc::EAGAIN
            | libc::ETIMEDOUT
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::ECONNRESET
    );
    // SAFETY: the kernel has read the address, so it is one that begins with its family.
    if !depends_on_others || unsafe { !is_of_others(address) } {
        return false;
    }
    let bytes = (length as usize).saturating_sub(NAME_AT).min(NAME_BYTES);
    // One byte more, because the name may fill its room.
    let mut name = [0_u8; NAME_BYTES + 1];
    // SAFETY: the address has these bytes.
    let family = unsafe {
        name[..bytes]
            .copy_from_slice(std::slice::from_raw_parts(address.cast::<u8>().add(NAME_AT), bytes));
        c_int::from(*address.cast::<libc::sa_family_t>())
    };
    let is_file = family == libc::AF_UNIX && name[0] != 0;
    // SAFETY: a C string.
    !is_file || unsafe { watched::change_of(HERE, name.as_ptr().addr() as u64) }.is_some()
}
