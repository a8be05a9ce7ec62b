//! Remote memory on the same node that is read and written without its process.
//!
//! In: reads and writes of registered memory of a peer. Out: their completions, at once, or word
//! that the peer must be asked by a message. The kernel copies from one process to the other
//! (process_vm_readv(2), process_vm_writev(2)), where it allows that and the peer publishes the
//! region ([`crate::mr::PublishedTable`]): the peer may compute or sleep meanwhile.
//!
//! The provider promises no order of such accesses against messages or each other (`info`), so an
//! access may overtake what was posted before. Atomic operations always are messages.
//!
//! What may never happen: memory outside of a region is touched, or memory of a process that is not
//! the peer; an access is reported that the kernel did only in part.

use std::sync::atomic::{Ordering, fence};

use landbridge_drive::checksum::Checksum;
use landbridge_proto::endpoint::Peer;

use super::application::NO_DIRECT_ACCESS;
use super::carrier::Carrier;
use super::data_path::DataPath;
use super::known_regions::{KnownRegions, WantedRange};
use super::peer_state::SendState;
use super::request::{Iov, RmaKind, RmaRequest};
use crate::abi;
use crate::completion::{Completion, OperationKind};

/// Local pieces of one access at most.
const PIECES_MAX: usize = 8;

impl DataPath {
    /// Executes the request and reports its completion, if that is possible without the peer.
    #[inline]
    pub(super) fn access_directly(&mut self, peer: Peer, request: &RmaRequest) -> bool {
        let Some((pid, address)) = self.place_of(peer, request) else { return false };
        let (kind, is_done) = match request.kind {
            // SAFETY: the local memory is valid during the call, by the contract of the request.
            RmaKind::Write => (OperationKind::Write, unsafe { write(pid, request.local, address) }),
            // SAFETY: as above.
            RmaKind::Read => (OperationKind::Read, unsafe { read(pid, request.local, address) }),
        };
        if is_done {
            // Whoever hears of the access by a message finds its bytes there.
            fence(Ordering::SeqCst);
            let done = Completion::quiet(kind, request.context);
            self.application.sink.complete(Completion { notify: request.notify, ..done });
        }
        is_done
    }

    /// The process and the address of the requested memory, if it may be accessed directly.
    #[inline]
    fn place_of(&mut self, peer: Peer, request: &RmaRequest) -> Option<(i32, u64)> {
        let peer_state = &mut self.peers[peer];
        let (SendState::Up(id), Some(process)) = (peer_state.send_state, peer_state.readable)
        else {
            return None;
        };
        let link = self.links[id].as_ref()?;
        let Carrier::Shm(ring) = &link.carrier else { return None };
        // The target counts, or gets a completion; or the user wants checksums.
        let removals = ring.notice();
        let must_ask = request.data.is_some() || matches!(removals, 0 | NO_DIRECT_ACCESS);
        let len = request.local.iter().map(|piece| piece.len as u64).sum();
        if must_ask || link.sum != Checksum::Off || request.local.len() > PIECES_MAX || len == 0 {
            return None;
        }
        if peer_state.regions.is_none() {
            // Without it each access is a message; the next one tries again.
            peer_state.regions = KnownRegions::new(process).ok().map(Box::new);
        }
        let regions = peer_state.regions.as_mut()?;
        let access = match request.kind {
            RmaKind::Read => abi::REMOTE_READ,
            RmaKind::Write => abi::REMOTE_WRITE,
        };
        let (key, offset) = (request.remote.key, request.remote.offset);
        let address = regions.address(removals, &WantedRange { key, offset, len, access })?;
        Some((regions.pid(self.clock.nanos() / 1_000)?, address))
    }
}

/// Writes the pieces into another process's memory. False: not all of it was possible.
///
/// # Safety
/// The pieces are valid memory of this process.
unsafe fn write(pid: i32, pieces: &[Iov], address: u64) -> bool {
    let (local, bytes) = vector(pieces);
    let remote = piece_at(address, bytes);
    // SAFETY: the caller's promise; the kernel checks the other process's addresses.
    let done =
        unsafe { libc::process_vm_writev(pid, local.as_ptr(), pieces.len() as u64, &remote, 1, 0) };
    done == bytes as isize
}

/// Reads another process's memory into the pieces. False: not all of it was possible.
///
/// # Safety
/// The pieces are valid memory of this process that nothing else uses.
unsafe fn read(pid: i32, pieces: &[Iov], address: u64) -> bool {
    let (local, bytes) = vector(pieces);
    let remote = piece_at(address, bytes);
    // SAFETY: the caller's promise; the kernel checks the other process's addresses.
    let done =
        unsafe { libc::process_vm_readv(pid, local.as_ptr(), pieces.len() as u64, &remote, 1, 0) };
    done == bytes as isize
}

/// The pieces as the kernel takes them, and their bytes together.
fn vector(pieces: &[Iov]) -> ([libc::iovec; PIECES_MAX], usize) {
    let mut vector = [piece_at(0, 0); PIECES_MAX];
    for (place, piece) in vector.iter_mut().zip(pieces) {
        *place = libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len };
    }
    (vector, pieces.iter().map(|piece| piece.len).sum())
}

fn piece_at(address: u64, iov_len: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address as usize), iov_len }
}

impl super::Engine {
    /// Tells peers of the node that registered regions were removed.
    pub fn note_removed_regions(&mut self) {
        let data = &mut self.connections.data;
        let notice = data.application.regions_notice();
        for id in 0..data.links.len() {
            if let Some(link) = data.links[id].as_ref()
                && let Carrier::Shm(ring) = &link.carrier
            {
                ring.set_notice(notice);
            }
        }
    }
}
