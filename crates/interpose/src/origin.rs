//! Whether this incarnation runs where the rank's record began: on the same node, and on the same
//! kernel.
//!
//! The first incarnation notes both in the record's head. On another node, files of the first node
//! may be missing ([`crate::changed_files`]). Another kernel gives the same file system another
//! device number (`st_dev` of stat(2)), so identities of files from before are compared without it.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::digest::digest;
use landbridge_proto::nondeterminism::RecordHead;

use crate::kernel_calls::{HERE, kernel_or_libc};

/// Random number of each start of a kernel (random(4)).
const BOOT_ID: &CStr = c"/proc/sys/kernel/random/boot_id";
const BOOT_ID_BYTES: usize = 36;

static IS_OTHER_NODE: AtomicBool = AtomicBool::new(false);
static IS_OTHER_KERNEL: AtomicBool = AtomicBool::new(false);

/// Whether the record began on another node.
pub fn is_other_node() -> bool {
    IS_OTHER_NODE.load(Relaxed)
}

/// Whether the record began on another kernel.
pub fn is_other_kernel() -> bool {
    IS_OTHER_KERNEL.load(Relaxed)
}

/// Notes node and kernel in the record's head, or compares them with those of the head. A process
/// that was restored from a checkpoint image compares again. Each node's agent has a socket name of
/// its own, which it writes into the head.
pub fn compare(head: &RecordHead) {
    let node = head.held_name().map_or(0, |name| digest(&name));
    let (is_other_node, is_other_kernel) = head.files.note_origin(node, kernel());
    IS_OTHER_NODE.store(is_other_node, Relaxed);
    IS_OTHER_KERNEL.store(is_other_kernel, Relaxed);
}

fn kernel() -> u64 {
    let mut text = [0; BOOT_ID_BYTES];
    let path = BOOT_ID.as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let descriptor = kernel_or_libc(libc::SYS_openat, [HERE, path, flags, 0, 0, 0]);
    let Ok(descriptor) = u64::try_from(descriptor) else { return 0 };
    let room = text.as_mut_ptr().addr() as u64;
    kernel_or_libc(libc::SYS_read, [descriptor, room, BOOT_ID_BYTES as u64, 0, 0, 0]);
    kernel_or_libc(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
    digest(&text)
}
