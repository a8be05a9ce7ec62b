//! An endpoint and the state of its driver: payloads whose frames arrive, unexpected messages, and
//! frames that arrived early.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    Action, Config, Endpoint, Memory, PayloadDestination, Peer, REASSEMBLED,
};
use landbridge_proto::limit::FRAME_BODY_BYTES_MAX;
use landbridge_proto::wire::frame::Header;
use landbridge_proto::wire::kind_header::KindHeader;

use super::frame::Frame;
use super::memory::ByteStore;
use crate::{Violation, require};

/// The errno with which a driver refuses access to memory.
pub const REFUSED: i32 = 13;

/// The bytes that a corrupt payload leaves.
const CORRUPT: u8 = 0xee;

/// An endpoint and the state of its driver: see the module documentation of
/// [`super`](crate::endpoint).
pub struct DrivenEndpoint<M> {
    endpoint: Endpoint<M>,
    eager_window: u64,
    incoming: BTreeMap<(Peer, PathId), IncomingFrame<M>>,
    /// Payloads of unexpected messages and their senders, by number of the stored message.
    unexpected: BTreeMap<u32, (Peer, Vec<u8>)>,
    early: BTreeMap<Peer, EarlyFrames>,
    /// The operands of the last atomic operation of each peer.
    scratch: BTreeMap<Peer, Vec<u8>>,
    /// Actions that have been performed, as far as the driver can do this alone.
    actions: VecDeque<Action<M>>,
}

/// A frame whose payload is arriving.
pub struct IncomingFrame<M> {
    /// The header.
    pub header: Header,
    /// The destination of the payload.
    pub place: PayloadDestination,
    /// Bytes of the payload.
    pub size: u64,
    /// Bytes of the payload that have arrived.
    pub done: u64,
    /// The endpoint has discarded the payload, because the frame arrives by another path.
    pub is_discarded: bool,
    target: Target<M>,
}

/// The destination of a payload, in terms of the driver.
enum Target<M> {
    /// The first `take` bytes are written at offset `at` of the memory.
    Memory { memory: M, at: u64, take: u64 },
    /// The bytes belong to a stored message, from offset `at` on.
    Unexpected { store: u32, at: u64 },
    /// The bytes belong to a frame that arrived early, from offset `at` on.
    Early { frame: u64, at: u64 },
    /// The bytes are the operands of an atomic operation.
    Scratch(Vec<u8>),
    /// The bytes are dropped.
    Discard,
}

/// The frames of one peer that arrived early, by first byte, and their bytes.
#[derive(Default)]
struct EarlyFrames {
    frames: BTreeMap<u64, EarlyFrame>,
    bytes: usize,
}

/// A frame that arrived early: its header, as if it had arrived whole; its head and payload.
struct EarlyFrame {
    header: Header,
    bytes: Vec<u8>,
}

impl<M> Deref for DrivenEndpoint<M> {
    type Target = Endpoint<M>;

    fn deref(&self) -> &Endpoint<M> {
        &self.endpoint
    }
}

impl<M> DerefMut for DrivenEndpoint<M> {
    fn deref_mut(&mut self) -> &mut Endpoint<M> {
        &mut self.endpoint
    }
}

impl<M: Memory> DrivenEndpoint<M> {
    /// An endpoint without peers.
    pub fn new(config: Config) -> Self {
        Self {
            endpoint: Endpoint::new(config),
            eager_window: config.eager_window as u64,
            incoming: BTreeMap::new(),
            unexpected: BTreeMap::new(),
            early: BTreeMap::new(),
            scratch: BTreeMap::new(),
            actions: VecDeque::new(),
        }
    }

    // ---- whole frames ------------------------------------------------------------------------

    /// The next frame for a path, which takes the whole frame at once.
    ///
    /// # Errors
    /// A violation, as of [`Self::perform`].
    pub fn transmit(
        &mut self,
        (peer, path): (Peer, PathId),
        store: &mut impl ByteStore<M>,
    ) -> Result<Option<Frame>, Violation> {
        let Some(outgoing) = self.endpoint.poll_transmit(peer, path) else { return Ok(None) };
        let mut frame = Frame::new(outgoing.front());
        let mut copy = None;
        if let Some((memory, at, length)) = outgoing.payload {
            frame.payload.extend(store.read(memory, at, length)?);
            if outgoing.wants_copy {
                copy = Some(store.copy(memory, at, length)?);
            }
        }
        self.endpoint.transmitted(peer, path, true, copy);
        self.keep_actions(store)?;
        Ok(Some(frame))
    }

    /// A whole frame arrives by a path, and with it the turn of early frames may come. No region
    /// accepts a payload.
    ///
    /// # Errors
    /// A violation, as of [`Self::begin`], or because the endpoint blames its peer.
    pub fn deliver(
        &mut self,
        (peer, path): (Peer, PathId),
        frame: &Frame,
        store: &mut impl ByteStore<M>,
    ) -> Result<PayloadDestination, Violation> {
        let place = self.place(peer, path, frame)?;
        self.finish((peer, path), frame, place, store)?;
        while let Some((early, place)) = self.next_early(peer)? {
            self.finish((peer, REASSEMBLED), &early, place, store)?;
        }
        Ok(place)
    }

    /// Header and head of a frame arrive by a path.
    ///
    /// # Errors
    /// A violation if the endpoint blames its peer.
    pub fn place(
        &mut self,
        peer: Peer,
        path: PathId,
        frame: &Frame,
    ) -> Result<PayloadDestination, Violation> {
        let place = self.endpoint.handle_frame(peer, path, &frame.header, &frame.head);
        place.map_err(|fault| Violation(format!("{}: {:?}", fault.0, frame.header)))
    }

    fn finish(
        &mut self,
        by: (Peer, PathId),
        frame: &Frame,
        place: PayloadDestination,
        store: &mut impl ByteStore<M>,
    ) -> Result<(), Violation> {
        self.keep_actions(store)?;
        self.begin(by, frame, place, None)?;
        self.receive(by, &frame.payload, store)?;
        self.end(by)?;
        self.keep_actions(store)
    }

    // ---- frames piece by piece ---------------------------------------------------------------

    /// The region that a payload belongs to, with the offset there. Refuses the operation if `find`
    /// knows no region for its key and offset.
    pub fn region(
        &mut self,
        peer: Peer,
        place: PayloadDestination,
        find: impl FnOnce(u64, u64) -> Option<(M, u64)>,
    ) -> Option<(M, u64)> {
        let PayloadDestination::Region { op, key, offset } = place else { return None };
        let found = find(key, offset);
        if found.is_none() {
            self.endpoint.channel_mut(peer).refuse(op, REFUSED);
        }
        found
    }

    /// Prepares the destination of a payload that arrives by a path. Without a region, a payload
    /// that belongs to one is dropped.
    ///
    /// # Errors
    /// A violation if the destination is not there, is too small, or exceeds a bound.
    pub fn begin(
        &mut self,
        (peer, path): (Peer, PathId),
        frame: &Frame,
        place: PayloadDestination,
        region: Option<(M, u64)>,
    ) -> Result<(), Violation> {
        let Frame { header, size, .. } = *frame;
        let target = match place {
            PayloadDestination::Discard => Target::Discard,
            PayloadDestination::Receive { .. } | PayloadDestination::Reply { .. } => {
                let Some((memory, at, take)) = self.endpoint.place_memory(place) else {
                    return Err(Violation(format!("{place:?} has no memory")));
                };
                let take = take.min(size);
                let end = at.checked_add(take);
                require!(end.is_some_and(|end| end <= memory.size()), "{place:?} is outside");
                Target::Memory { memory: memory.clone(), at, take }
            }
            PayloadDestination::NewUnexpected { store, size: whole } => {
                require!(size <= whole, "{size} bytes into stored message {store} of {whole}");
                self.open_unexpected(peer, store, whole)?;
                Target::Unexpected { store, at: 0 }
            }
            PayloadDestination::Unexpected { store, at } => {
                let whole = self.unexpected.get(&store).map(|(_, bytes)| bytes.len() as u64);
                let fits = whole.is_some_and(|whole| at + size <= whole);
                require!(fits, "stored message {store} of {whole:?} does not hold {at}+{size}");
                Target::Unexpected { store, at }
            }
            PayloadDestination::Region { .. } => match region {
                Some((memory, at)) => Target::Memory { memory, at, take: size },
                None => Target::Discard,
            },
            PayloadDestination::Scratch => Target::Scratch(Vec::new()),
            PayloadDestination::OutOfOrder { frame: start, whole, at } => {
                self.open_early((peer, start), frame, whole, at)?;
                Target::Early { frame: start, at: at as u64 }
            }
        };
        let frame = IncomingFrame { header, place, size, done: 0, is_discarded: false, target };
        let before = self.incoming.insert((peer, path), frame);
        require!(before.is_none(), "two frames arrive by {path:?} at a time");
        Ok(())
    }

    /// Writes the next bytes of the payload that arrives by a path to their destination. Returns
    /// whether the payload is whole.
    ///
    /// # Errors
    /// A violation if the destination is not there any more, or too small.
    pub fn receive(
        &mut self,
        by: (Peer, PathId),
        bytes: &[u8],
        store: &mut impl ByteStore<M>,
    ) -> Result<bool, Violation> {
        let mut incoming = self.take_incoming(by)?;
        self.put(by.0, &mut incoming, bytes, store)?;
        let is_whole = incoming.done == incoming.size;
        self.incoming.insert(by, incoming);
        Ok(is_whole)
    }

    /// The payload that arrives by a path is at its destination.
    ///
    /// # Errors
    /// A violation if no payload arrives by the path.
    pub fn end(&mut self, (peer, path): (Peer, PathId)) -> Result<(), Violation> {
        if let Target::Scratch(operands) = self.take_incoming((peer, path))?.target {
            self.scratch.insert(peer, operands);
        }
        self.endpoint.handle_payload(peer, path);
        Ok(())
    }

    /// The payload that arrives by a path turns out to be corrupt, with other bytes at its
    /// destination. Returns false if the path must be closed.
    ///
    /// # Errors
    /// A violation, as of [`Self::receive`].
    pub fn corrupt(
        &mut self,
        (peer, path): (Peer, PathId),
        store: &mut impl ByteStore<M>,
    ) -> Result<bool, Violation> {
        let mut incoming = self.take_incoming((peer, path))?;
        incoming.done = 0;
        let bytes = vec![CORRUPT; incoming.size as usize];
        self.put(peer, &mut incoming, &bytes, store)?;
        Ok(self.endpoint.channel_mut(peer).handle_corrupt(path))
    }

    /// The early frame of `peer` whose turn has come, and where its payload belongs. It arrives by
    /// the path [`REASSEMBLED`].
    ///
    /// # Errors
    /// A violation if the frame is not kept, or if the endpoint blames its peer.
    pub fn next_early(
        &mut self,
        peer: Peer,
    ) -> Result<Option<(Frame, PayloadDestination)>, Violation> {
        let Some(start) = self.endpoint.channel(peer).next_reassembled() else { return Ok(None) };
        let Some(EarlyFrame { header, bytes: mut head }) = self.take_early(peer, start) else {
            return Err(Violation(format!("early frame {start} is not kept")));
        };
        let placed = self.endpoint.handle_reassembled(peer, &head);
        let (place, head_size) =
            placed.map_err(|fault| Violation(format!("an early frame: {}", fault.0)))?;
        let payload = head.split_off(head_size);
        Ok(Some((Frame { header, head, size: payload.len() as u64, payload }, place)))
    }

    /// The frame whose payload is arriving by a path.
    pub fn incoming(&self, peer: Peer, path: PathId) -> Option<&IncomingFrame<M>> {
        self.incoming.get(&(peer, path))
    }

    /// Closes a path, and drops what has arrived of its last frame.
    pub fn close_path(&mut self, peer: Peer, path: PathId) {
        self.incoming.remove(&(peer, path));
        self.endpoint.close_path(peer, path);
    }

    /// Declares a peer unreachable, and drops what has arrived of its frames.
    pub fn fail(&mut self, peer: Peer, errno: i32) {
        self.incoming.retain(|(from, _), _| *from != peer);
        self.early.remove(&peer);
        self.endpoint.fail(peer, errno);
    }

    // ---- actions -----------------------------------------------------------------------------

    /// The oldest action, performed as far as the driver can do this alone.
    ///
    /// # Errors
    /// A violation, as of [`Self::perform`].
    pub fn next_action(
        &mut self,
        store: &mut impl ByteStore<M>,
    ) -> Result<Option<Action<M>>, Violation> {
        self.keep_actions(store)?;
        Ok(self.actions.pop_front())
    }

    /// Performs an action that [`Endpoint::poll_action`] has returned, if the driver can do this
    /// alone: if the action concerns stored messages and frames that arrive.
    ///
    /// # Errors
    /// A violation if the action names something that is not there.
    pub fn perform(
        &mut self,
        action: &Action<M>,
        store: &mut impl ByteStore<M>,
    ) -> Result<(), Violation> {
        match action {
            Action::CopyUnexpected { store: number, memory, at, length } => {
                let Some((_, bytes)) = self.unexpected.remove(number) else {
                    return Err(Violation(format!("stored message {number} is used twice")));
                };
                let Some(bytes) = bytes.get(..*length as usize) else {
                    return Err(Violation(format!("{length} bytes of stored message {number}")));
                };
                store.write(memory, *at, bytes)?;
            }
            Action::DropUnexpected { store: number } => {
                let dropped = self.unexpected.remove(number);
                require!(dropped.is_some(), "stored message {number} is dropped twice");
            }
            Action::DiscardPayload { peer, path } => {
                let Some(incoming) = self.incoming.get_mut(&(*peer, *path)) else {
                    return Err(Violation(format!("{path:?} has nothing to discard")));
                };
                incoming.target = Target::Discard;
                incoming.is_discarded = true;
            }
            Action::Release { peer, frame } => drop(self.take_early(*peer, *frame)),
            _ => (),
        }
        Ok(())
    }

    /// Takes the operands of the last atomic operation of `peer`.
    pub fn take_operands(&mut self, peer: Peer) -> Vec<u8> {
        self.scratch.remove(&peer).unwrap_or_default()
    }

    /// Checks that the driver keeps neither unexpected messages nor early frames.
    ///
    /// # Errors
    /// A violation if it does.
    pub fn check_empty(&self) -> Result<(), Violation> {
        let early: usize = self.early.values().map(|early| early.frames.len()).sum();
        let unexpected = self.unexpected.len();
        require!(early == 0, "{early} early frames are kept");
        require!(unexpected == 0, "{unexpected} unexpected messages are stored");
        Ok(())
    }

    /// Performs all actions as far as the driver can do this alone, and keeps them for
    /// [`Self::next_action`].
    ///
    /// # Errors
    /// A violation, as of [`Self::perform`].
    pub fn keep_actions(&mut self, store: &mut impl ByteStore<M>) -> Result<(), Violation> {
        while let Some(action) = self.endpoint.poll_action() {
            self.perform(&action, store)?;
            self.actions.push_back(action);
        }
        Ok(())
    }

    // ---- destinations of payloads ------------------------------------------------------------

    fn open_unexpected(&mut self, from: Peer, store: u32, size: u64) -> Result<(), Violation> {
        if size == 0 {
            return Ok(());
        }
        let before = self.unexpected.insert(store, (from, vec![0; size as usize]));
        require!(before.is_none(), "stored message {store} is in use");
        let mine = self.unexpected.values().filter(|(of, _)| *of == from);
        let stored: u64 = mine.map(|(_, bytes)| bytes.len() as u64).sum();
        require!(stored <= self.eager_window, "{stored} unexpected bytes of {from:?} are stored");
        Ok(())
    }

    /// Opens a buffer for a frame that arrived early, unless a part of the frame has one already.
    fn open_early(
        &mut self,
        (peer, start): (Peer, u64),
        Frame { header, head, size, .. }: &Frame,
        whole: u32,
        at: u32,
    ) -> Result<(), Violation> {
        let kind_header = KindHeader::parse(header.kind, header.flags, head)?;
        let early = self.early.entry(peer).or_default();
        let buffer = early.frames.entry(start).or_insert_with(|| {
            let header = match kind_header {
                KindHeader::Fragment { kind, flags, .. } => {
                    Header { kind, flags, length: whole, sequence: start, ..*header }
                }
                _ => *header,
            };
            early.bytes += whole as usize;
            EarlyFrame { header, bytes: vec![0; whole as usize] }
        });
        let fits = buffer.bytes.len() as u64 >= at as u64 + size;
        require!(fits, "early frame {start} does not hold {at}+{size}");
        if !matches!(kind_header, KindHeader::Fragment { .. }) {
            buffer.bytes[..at as usize].copy_from_slice(&head[..at as usize]);
        }
        let (frames, bytes) = (early.frames.len(), early.bytes);
        let most = REORDER_WINDOW_BYTES_MAX as usize + FRAME_BODY_BYTES_MAX;
        require!(bytes <= most, "{bytes} early bytes of {peer:?}");
        require!(frames <= REORDER_WINDOW_FRAMES_MAX, "{frames} early frames of {peer:?}");
        Ok(())
    }

    fn take_early(&mut self, peer: Peer, start: u64) -> Option<EarlyFrame> {
        let early = self.early.get_mut(&peer)?;
        let frame = early.frames.remove(&start)?;
        early.bytes -= frame.bytes.len();
        Some(frame)
    }

    fn take_incoming(&mut self, by: (Peer, PathId)) -> Result<IncomingFrame<M>, Violation> {
        let incoming = self.incoming.remove(&by);
        incoming.ok_or_else(|| Violation(format!("no payload arrives by {:?}", by.1)))
    }

    fn put(
        &mut self,
        peer: Peer,
        incoming: &mut IncomingFrame<M>,
        bytes: &[u8],
        store: &mut impl ByteStore<M>,
    ) -> Result<(), Violation> {
        let done = incoming.done;
        let into = |buffer: Option<&mut Vec<u8>>, at: u64| {
            let start = (at + done) as usize;
            let range = buffer.and_then(|buffer| buffer.get_mut(start..start + bytes.len()));
            let Some(range) = range else {
                return Err(Violation(format!("{} bytes at {start} of nothing", bytes.len())));
            };
            range.copy_from_slice(bytes);
            Ok(())
        };
        match &mut incoming.target {
            Target::Memory { memory, at, take } => {
                let left = take.saturating_sub(done).min(bytes.len() as u64);
                if left > 0 {
                    store.write(memory, *at + done, &bytes[..left as usize])?;
                }
            }
            // A message of no bytes has no buffer.
            Target::Unexpected { .. } if bytes.is_empty() => (),
            Target::Unexpected { store, at } => {
                into(self.unexpected.get_mut(store).map(|(_, buffer)| buffer), *at)?;
            }
            Target::Early { frame, at } => {
                let early = self.early.get_mut(&peer);
                let frame = early.and_then(|early| early.frames.get_mut(frame));
                into(frame.map(|frame| &mut frame.bytes), *at)?;
            }
            Target::Scratch(operands) => {
                operands.truncate(done as usize);
                operands.extend_from_slice(bytes);
            }
            Target::Discard => (),
        }
        incoming.done += bytes.len() as u64;
        Ok(())
    }
}
