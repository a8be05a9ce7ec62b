//! One endpoint of one process: messages, matching and remote memory over channels to its peers.
//!
//! What enters: the application's commands ([`Endpoint::send`], [`MessagesMut::recv`], …), frames
//! ([`Endpoint::handle_frame`], then [`Endpoint::handle_payload`]), and the driver's reports on
//! frames that it was given to send. What leaves: frames ([`Endpoint::poll_transmit`]) and actions
//! ([`Endpoint::poll_action`]), which are bytes to move, memory of the application to access, and
//! completed operations.
//!
//! The endpoint never sees a payload byte. It names where bytes lie and where they belong, in terms
//! of the caller's own [`Memory`]; the driver moves the bytes, once.
//!
//! A message travels as follows. Its first frame carries as much as the path and the receiver's
//! credit allow: all of a small message, nothing of a large message when the credit is used up. If
//! a rest remains, the receiver learns where the rest belongs when the message is matched. Then the
//! receiver either reads the rest out of the sender's memory ([`Action::Pull`], answered by
//! `Pulled`) or grants it, and the rest follows in `Data` frames. Where a round trip is expensive
//! ([`PathProperties::ahead`]), the first frame announces how many bytes follow on credit in
//! `Ahead` frames.
//!
//! What may never happen: a receive completes before all its bytes are in place; a completion is
//! lost or reported twice; unexpected payload exceeds the granted credit; a frame of one peer stops
//! the frames of another peer.
//!
//! Rule for drivers: after any call that takes `&mut self`, drain [`Endpoint::poll_action`] until
//! it returns `None` before the next such call.
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | `driver_interface` | what driver and endpoint exchange |
//! | `action_queue` | actions that the driver has not yet performed |
//! | `operation` | one operation of this endpoint, and its items in a queue |
//! | `datagram_flow` | datagrams in flight on one path, and how many may be |
//! | `path_state` | one path of a channel |
//! | `path_set` | paths of a channel, and which of them send |
//! | `control_frame` | control frames and repairs that a channel owes its peer |
//! | `acknowledgements` | acknowledgements of a channel, in both directions |
//! | `arrivals` | what is arriving from one peer |
//! | `timers` | timers of a channel |
//! | `schedule` | when the driver must look at which peer |
//! | `channel` | both directions between this endpoint and one peer |
//! | `channel_usage` | what a channel holds, for comparison with the bounds |
//! | `channel_mut` | a channel with the queues in which its changes appear |
//! | `repair` | losses and corrupt bytes of a channel |
//! | `reorder` | frames of a channel that arrive early, twice or in fragments |
//! | `paths` | paths of a channel that open, change, break and close |
//! | `remote` | remote memory, on both sides |
//! | `commands` | the driver's other commands to a channel |
//! | `plan` | the next frame for a path |
//! | `operation_table` | operations in flight |
//! | `transmit` | frames that leave |
//! | `channel_table` | channels to all peers |
//! | `receive_table` | receives of the application |
//! | `incoming` | messages that arrive, and messages that wait for a receive |
//! | `receive` | frames that arrive |

mod acknowledgements;
mod action_queue;
mod arrivals;
mod channel;
mod channel_mut;
mod channel_table;
mod channel_usage;
mod commands;
mod control_frame;
mod datagram_flow;
mod driver_interface;
mod incoming;
mod operation;
mod operation_table;
#[cfg(test)]
mod path_selection;
mod path_set;
mod path_state;
mod paths;
mod plan;
mod receive;
mod receive_table;
mod remote;
mod reorder;
mod repair;
mod schedule;
mod timers;
mod transmit;

use crate::channel::PathId;
use crate::id::Address;
use crate::path::time::Time;

use action_queue::ActionQueue;
pub use channel::Channel;
pub use channel_mut::ChannelMut;
use channel_table::ChannelTable;
pub use channel_usage::ChannelUsage;
pub use datagram_flow::InFlightUsage;
pub use driver_interface::{
    Action, AtomicRequest, CompletionKind, CompletionLevel, Config, Failure, Fault, Full, Memory,
    Message, OperationCompletion, PayloadDestination, Peek, Peer, Posting, Ticket,
};
use incoming::IncomingMessages;
pub use incoming::MessagesMut;
use operation::Op;
use operation_table::OperationTable;
pub use path_state::{PathProperties, PathStatistics};
pub use plan::{InjectMessage, OutgoingFrame};
pub use receive::REASSEMBLED;
pub use remote::Remote;
pub use schedule::PeerSchedule;

/// One endpoint: see the module documentation. Commands to one peer are methods of
/// [`Self::channel_mut`], commands about messages to this endpoint are methods of
/// [`Self::messages_mut`]. The methods here concern several of the parts.
pub struct Endpoint<M> {
    config: Config,
    channels: ChannelTable<M>,
    operations: OperationTable<M>,
    messages: IncomingMessages<M>,
    actions: ActionQueue<M>,
}

impl<M: Memory> Endpoint<M> {
    /// Creates an endpoint without peers.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            channels: ChannelTable::new(),
            operations: OperationTable::new(config.operations_max),
            messages: IncomingMessages::new(config.min_multi_recv),
            actions: ActionQueue::new(),
        }
    }

    /// Sets the current time. The endpoint reads the time only if [`PeerSchedule::needs_time`] is
    /// true, so the driver need not call this function otherwise.
    #[inline]
    pub fn set_time(&mut self, now: Time) {
        self.channels.schedule.set_time(now);
    }

    /// Sets the bytes below which the remaining memory of a multi-receive is released to the
    /// application.
    pub fn set_min_multi_recv(&mut self, bytes: u64) {
        self.messages.receives.min_multi_recv = bytes;
    }

    /// Whether this endpoint has a channel to `address`.
    pub fn is_known(&self, address: Address) -> bool {
        self.channels.has(address)
    }

    /// Returns the number of the peer at `address`, and creates its channel if there is none. A
    /// peer with an index is found again by its address. The caller must remember the number of an
    /// anonymous peer.
    pub fn peer(&mut self, address: Address) -> Peer {
        self.channels.peer(address, self.config.eager_window)
    }

    /// The address of `peer`.
    pub fn address(&self, peer: Peer) -> Address {
        self.channels[peer].address
    }

    /// The channel to `peer`, to look at.
    #[inline]
    pub fn channel(&self, peer: Peer) -> &Channel<M> {
        &self.channels[peer]
    }

    /// The channel to `peer`, for the commands that concern no other peer and no operation.
    #[inline]
    pub fn channel_mut(&mut self, peer: Peer) -> ChannelMut<'_, M> {
        self.channels.on(peer, &mut self.actions)
    }

    /// The number of peers so far.
    pub fn peers(&self) -> usize {
        self.channels.len()
    }

    /// Sends a message, whose frames [`Self::poll_transmit`] returns. The returned operation number
    /// is an argument of [`Self::memory_mut`].
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    #[inline]
    pub fn send(&mut self, message: Message<M>) -> Result<u32, Full> {
        self.start(Op::message(message))
    }

    /// Writes `memory` to a peer's region. With `data`, the peer's application gets a completion
    /// that carries the data.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn write(
        &mut self,
        remote: Remote,
        memory: M,
        data: Option<u64>,
        ticket: Ticket,
    ) -> Result<u32, Full> {
        self.start(Op::write(remote, memory, data, ticket))
    }

    /// Reads a peer's region into `memory`.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn read(&mut self, remote: Remote, memory: M, ticket: Ticket) -> Result<u32, Full> {
        self.start(Op::read(remote, memory, ticket))
    }

    /// Performs an atomic operation on a peer's region. `operands` holds the operand bytes, then
    /// the bytes to compare with.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn atomic(
        &mut self,
        peer: Peer,
        request: AtomicRequest,
        operands: M,
        result: Option<M>,
        ticket: Ticket,
    ) -> Result<u32, Full> {
        self.start(Op::atomic((peer, request), operands, result, ticket))
    }

    #[inline]
    fn start(&mut self, op: Op<M>) -> Result<u32, Full> {
        let mut on = self.channels.on(op.peer, &mut self.actions);
        self.operations.start(&mut on, op)
    }

    /// The memory of operation `op`, if some of its bytes have not been sent. The caller may
    /// replace the memory by a copy, unless the memory has an address and the path has `pull`: the
    /// peer may already have permission to read the memory there. The replacement does not affect a
    /// frame that a path still holds.
    pub fn memory_mut(&mut self, op: u32) -> Option<&mut M> {
        self.operations.memory_mut(op)
    }

    /// The messages to this endpoint and its receives, for the application's commands.
    #[inline]
    pub fn messages_mut(&mut self) -> MessagesMut<'_, M> {
        let Self { messages, channels, actions, .. } = self;
        MessagesMut { messages, channels, actions }
    }

    /// The oldest action that the driver has not yet performed.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action<M>> {
        self.actions.pop()
    }

    /// The memory of a payload destination, the offset in it, and the payload bytes that it takes.
    #[inline]
    pub fn place_memory(&self, place: PayloadDestination) -> Option<(&M, u64, u64)> {
        match place {
            PayloadDestination::Receive { recv, at, take } => {
                let (memory, at) = self.messages.receives.memory(recv, at)?;
                Some((memory, at, take))
            }
            PayloadDestination::Reply { op, at } => {
                Some((self.operations.reply_memory(op)?, at, u64::MAX))
            }
            _ => None,
        }
    }

    /// Declares `peer` unreachable: every operation that waits for the peer fails with `errno`.
    pub fn fail(&mut self, peer: Peer, errno: i32) {
        let mut on = self.channels.on(peer, &mut self.actions);
        if on.channel.end.failed.is_none() {
            on.channel.fail(errno);
            self.operations.fail(&mut on, errno);
            self.messages.fail(&mut on, Failure::Errno(errno));
        }
    }

    /// Closes the broken path `number` to `peer`. What the path may have lost is sent by another
    /// path, if there is one, or by the next path that opens. The driver accesses no memory for the
    /// closed path any more.
    pub fn close_path(&mut self, peer: Peer, number: PathId) {
        let mut on = self.channels.on(peer, &mut self.actions);
        let sent = on.close_path(number);
        self.operations.apply(&mut on, sent);
    }

    /// The next frame for `path` of `peer`, if there is one.
    #[inline]
    pub fn poll_transmit(&mut self, peer: Peer, path: PathId) -> Option<OutgoingFrame<'_, M>> {
        let on = self.channels.on(peer, &mut self.actions);
        self.operations.poll_transmit(on, path, self.config.address)
    }

    /// Records that `path` has taken the frame that [`Self::poll_transmit`] returned last for this
    /// path. `flushed` says that the frame's bytes have left the caller's memory; otherwise the
    /// driver reports this later with [`Self::handle_flushed`]. `copy` is a copy of the payload, if
    /// one was wanted and memory for it was available. Without a copy, the payload stays with the
    /// application until the peer has it.
    #[inline]
    pub fn transmitted(&mut self, peer: Peer, path: PathId, flushed: bool, copy: Option<M>) {
        let mut on = self.channels.on(peer, &mut self.actions);
        self.operations.transmitted(&mut on, path, flushed, copy);
    }

    /// Records that the frame that `path` of `peer` held has left completely.
    pub fn handle_flushed(&mut self, peer: Peer, path: PathId) {
        let mut on = self.channels.on(peer, &mut self.actions);
        self.operations.handle_flushed(&mut on, path);
    }

    /// Prepares a message for immediate sending: the path takes the message's bytes during this
    /// call, and nobody waits for its completion. Returns the message's frame without its payload
    /// of `size` bytes. `None` means that the message must take the queue ([`Self::send`]).
    /// [`Self::injected`] makes the frame count as sent.
    #[inline(always)]
    pub fn inject(
        &mut self,
        passing: &InjectMessage,
        path: PathId,
    ) -> Option<OutgoingFrame<'static, M>> {
        self.channels[passing.peer].inject(passing, path, self.config.address)
    }

    /// Records that the path has taken the message whose frame [`Self::inject`] returned. `copy` is
    /// a copy of the message's bytes, if one was wanted.
    #[inline(always)]
    pub fn injected(&mut self, passing: &InjectMessage, path: PathId, copy: Option<M>) {
        self.channel_mut(passing.peer).injected(passing, path, copy);
    }

    /// Schedules the acknowledgements that waited for an answer of the application, which has had
    /// its chance to answer. The driver must call this function whenever it is asked for progress,
    /// before it polls for frames.
    #[inline]
    pub fn flush_deferred_acks(&mut self) {
        self.channels.flush_deferred_acks();
    }

    /// The next peer with frames to send. The queue names each peer once until
    /// [`ChannelMut::mark_busy`] names the peer again, so a driver whose path is full may drop the
    /// peer and call [`ChannelMut::mark_busy`] when the path accepts frames again.
    #[inline]
    pub fn next_busy(&mut self) -> Option<Peer> {
        self.channels.next_busy()
    }

    /// When the endpoint must be driven.
    #[inline]
    pub fn schedule(&self) -> &PeerSchedule {
        &self.channels.schedule
    }

    /// Sets the time to `now` and does what is due. Then the driver must drain [`Self::next_busy`]
    /// and [`Self::poll_action`], as after any call.
    #[inline]
    pub fn handle_time(&mut self, now: Time) {
        self.channels.schedule.set_time(now);
        if self.schedule().next_wake().is_some_and(|wake| wake <= now) {
            self.channels.handle_wakes();
        }
    }

    /// Peers that have sent Goodbye, once for each receive that accepts messages of that peer only.
    pub fn awaited_departed_peers(&self) -> impl Iterator<Item = Peer> {
        let sources = self.messages.receives.awaited_sources();
        sources.filter(|&peer| self.channels[peer].end.has_left)
    }

    /// Whether operations wait for `peer`. A receive that only a peer that has left could satisfy
    /// waits for nobody.
    pub fn has_work_for(&self, peer: Peer) -> bool {
        let has_left = self.channels[peer].end.has_left;
        self.operations.has_work_for(peer) || self.messages.receives.has_work_for(peer, has_left)
    }

    /// Whether the endpoint holds no operation, no receive and no unexpected message.
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.messages.is_empty()
    }

    /// Whether paths have taken everything. The parts of a message that wait for a grant count too,
    /// unless the receiver has left and will never send the grant.
    pub fn is_flushed(&self) -> bool {
        self.channels.iter().all(Channel::is_flushed)
            && self.operations.has_no_rest(|peer| self.channels[peer].end.has_left)
    }

    /// Whether paths have taken everything and whatever silent loss could affect has arrived.
    /// Nobody retransmits after this endpoint has closed. Goodbye frames ([`ChannelMut::goodbye`])
    /// do not count.
    pub fn is_safe(&self) -> bool {
        self.is_flushed() && self.channels.iter().all(Channel::is_safe)
    }

    /// Whether [`Self::is_safe`] holds and the Goodbye frames have arrived at every peer that waits
    /// for one.
    pub fn is_goodbye_acknowledged(&self) -> bool {
        self.is_flushed() && self.channels.iter().all(Channel::is_goodbye_acknowledged)
    }

    /// Whether every peer that still lives has delivered every byte sent to it.
    pub fn is_drained(&self) -> bool {
        self.channels.iter().all(|channel| channel.is_drained())
    }
}
