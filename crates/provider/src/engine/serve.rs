//! Executes the protocol's actions: reports completions, moves bytes, accesses registered memory.

use landbridge_proto::endpoint::{Action, Peer};
use landbridge_proto::wire::kind_header::AdvertisedAddress;

use super::data_path::DataPath;
use super::memory::{Bytes, ReadableProcess, read_process};

impl DataPath {
    /// Executes all pending actions of the protocol.
    #[inline]
    pub(super) fn drain_actions(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Complete(done) => self.application.complete(&mut self.peers, &done),
                Action::CopyUnexpected { store, memory, at, length } => {
                    if let Some(bytes) = self.buffers.take_store(store) {
                        // SAFETY: the memory belongs to the receive, whose completion comes later.
                        unsafe { memory.fill(at, &bytes[..length as usize]) };
                    }
                }
                Action::DropUnexpected { store } => drop(self.buffers.take_store(store)),
                Action::Pull { peer, recv, address, memory, at, length } => {
                    let pulled = pull(self.peers[peer].readable, address, &memory, at, length);
                    self.core.messages_mut().handle_pulled(recv, pulled);
                }
                Action::Serve { peer, op, key, offset, length } => {
                    self.application.serve(&mut self.core, peer, op, key, offset, length);
                }
                Action::Atomic { peer, request } => {
                    let operands = &self.buffers.scratch;
                    self.application.perform(&mut self.core, operands, peer, &request);
                }
                Action::DiscardPayload { peer, path } => self.paths().discard_rest(peer, path),
                Action::AddressAdvertisement { peer, address } => {
                    self.handle_advertisement(peer, &address)
                }
                Action::Release { peer, frame } => drop(self.buffers.early.remove(&(peer, frame))),
            }
        }
    }

    /// Handles the advertisement of a further address of `peer`. A new address is dialled once the
    /// link that brought the advertisement is back in the table.
    #[cold]
    pub(super) fn handle_advertisement(&mut self, peer: Peer, advertisement: &AdvertisedAddress) {
        if advertisement.token.is_some() {
            if let Some(datagrams) = &mut self.datagrams {
                datagrams.note_advertisement(peer, advertisement);
            }
            return;
        }
        self.pending.has_new_rails |=
            self.peers.add_rail(peer, advertisement, self.identity, &self.own.name);
    }
}

/// Reads bytes of a message out of the memory of the sender, if that is allowed.
fn pull(
    sender: Option<ReadableProcess>,
    address: u64,
    memory: &Bytes,
    at: u64,
    length: u64,
) -> Result<(), ()> {
    let pid = sender.ok_or(())?.pid;
    // SAFETY: the memory belongs to the receive, whose completion comes later.
    unsafe { read_process(pid, address, memory.range(at, length).as_slice()) }.map_err(|_| ())
}
