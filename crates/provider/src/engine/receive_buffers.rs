//! What an engine has received and cannot give to the application yet.

use std::collections::BTreeMap;

use landbridge_proto::endpoint::{PayloadDestination, Peer};
use landbridge_proto::wire::frame::{Header, Kind as FrameKind};

/// The bits of a protocol number that hold a slot (see `landbridge_proto::slab`).
const SLOT_MASK: u32 = 0x00ff_ffff;
/// Bytes read from a stream at once. All streams of the endpoint share the buffer.
const STAGE_BYTES: usize = 64 << 10;

pub struct ReceiveBuffers {
    /// Frames that arrived before their turn, by the number of their first byte: head and payload,
    /// as far as they have arrived.
    pub early: BTreeMap<(Peer, u64), Box<[u8]>>,
    /// Unexpected payloads, indexed by the number that the protocol gives each of them.
    stores: Vec<Option<Box<[u8]>>>,
    /// What a stream brings.
    pub stage: Vec<u8>,
    /// Operands of the current atomic operation.
    pub scratch: Vec<u8>,
    /// Bytes in retained copies beyond which nothing more is copied.
    pub retain: u64,
}

impl ReceiveBuffers {
    pub fn new(retain: u64) -> ReceiveBuffers {
        ReceiveBuffers {
            early: BTreeMap::new(),
            stores: Vec::new(),
            stage: vec![0; STAGE_BYTES],
            scratch: Vec::new(),
            retain,
        }
    }

    /// Keeps unexpected payload under the protocol's number for it; returns the address of the
    /// payload.
    pub fn keep_store(&mut self, store: u32, bytes: Box<[u8]>) -> *mut u8 {
        let place = (store & SLOT_MASK) as usize;
        if self.stores.len() <= place {
            self.stores.resize_with(place + 1, || None);
        }
        self.stores[place].insert(bytes).as_mut_ptr()
    }

    /// The address of byte `at` of the payload kept under `store`.
    fn stored_at(&mut self, store: u32, at: u64) -> *mut u8 {
        let kept = self.stores.get_mut((store & SLOT_MASK) as usize).and_then(Option::as_mut);
        // The protocol uses a store only between opening and dropping it, and no byte beyond its
        // size.
        let bytes = kept.expect("an open store");
        bytes[at as usize..].as_mut_ptr()
    }

    /// The destination of a payload in its store; makes the store if it is new.
    pub fn store_memory(&mut self, place: PayloadDestination) -> *mut u8 {
        match place {
            PayloadDestination::NewUnexpected { store, size } => {
                self.keep_store(store, vec![0; size as usize].into())
            }
            PayloadDestination::Unexpected { store, at } => self.stored_at(store, at),
            _ => unreachable!("only stores have store memory"),
        }
    }

    /// Keeps a frame, or a fragment of a frame, that arrived before its turn.
    #[cold]
    pub fn keep_early(
        &mut self,
        peer: Peer,
        (frame, whole, at): (u64, u32, u32),
        header: &Header,
        head: &[u8],
        payload: &[u8],
    ) {
        let bytes = self.early_bytes(peer, frame, whole, header, head);
        bytes[at as usize..at as usize + payload.len()].copy_from_slice(payload);
    }

    /// The buffer for a frame that arrived before its turn, with the frame's kind header if it has
    /// arrived.
    #[cold]
    pub fn early_bytes(
        &mut self,
        peer: Peer,
        frame: u64,
        whole: u32,
        header: &Header,
        head: &[u8],
    ) -> &mut [u8] {
        let early = self.early.entry((peer, frame));
        let bytes = early.or_insert_with(|| vec![0; whole as usize].into());
        if header.kind != FrameKind::Fragment {
            bytes[..head.len()].copy_from_slice(head);
        }
        bytes
    }

    pub fn take_store(&mut self, store: u32) -> Option<Box<[u8]>> {
        self.stores.get_mut((store & SLOT_MASK) as usize)?.take()
    }
}
