//! Peeks at unexpected messages, and the order between a peer's messages and messages that the MPI
//! library delivers itself.
//!
//! MPICH puts a message that a process sends to itself into a queue of its own, also where MPICH's
//! shared memory is switched off. A probe for any source looks for such a message among those that
//! MPICH has taken from its queue, and peeks at the provider only if there is none. But MPICH takes
//! messages from its queue only when it makes progress. So a probe could find a peer's message
//! although an own message was sent earlier, and the following receive, which comes after some
//! progress, would get the own message. `MPI_Dist_graph_create` takes the length from the probe and
//! the message from the receive, and would count wrong.
//!
//! The engine cannot see MPICH's queue, but sees whether MPICH has emptied it: a peek for any
//! source that would find something returns `EAGAIN`. MPICH then makes progress, at its own queue
//! first, and reads the provider's completion queue only if its own queue was empty. If the
//! completion queue was read, the engine answers the repeated peek. If not, an own message is under
//! way to its receiver, and the peek finds nothing: the next probe sees both messages.
//!
//! MPICH makes such progress before its first retry if the variable in [`RETRIES`] says so, which
//! the launcher and `landbridge env` set. Without the variable every peek is answered at once. Open
//! MPI and Intel MPI send messages to the same process through the provider, which delivers such a
//! message inside the call.

use landbridge_proto::endpoint::Peek;

use crate::abi::Errno;

use super::Engine;
use super::request::PeekRequest;

/// Environment variable with the number of times that MPICH retries a call that returned `EAGAIN`.
/// MPICH counts down before each retry, and makes progress at all queues, its own queues first,
/// when the count is a multiple of 256. At other retries (since 4.3, and always by default) MPICH
/// only reads the provider's completion queue.
const RETRIES: &str = "MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY";

/// Whether MPICH reads its own queue before it repeats a peek.
pub fn library_repeats_peeks() -> bool {
    std::env::var(RETRIES).is_ok_and(|retries| looks_first(&retries))
}

/// Whether MPICH, with `retries` retries, reads its own queue before the first retry.
pub(super) fn looks_first(retries: &str) -> bool {
    retries.parse::<u32>().is_ok_and(|retries| retries > 1 && retries % 256 == 1)
}

/// The last peek that returned `EAGAIN`, unless another peek was answered since.
#[derive(Default)]
pub(super) struct Peeks {
    pending: Option<Pending>,
}

struct Pending {
    context: usize,
    /// Number of reads of the completion queue when the peek returned `EAGAIN`.
    reads: u64,
}

/// What is known of messages that the MPI library delivers itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SelfMessages {
    /// Nothing is known: the library was not asked yet.
    Unknown,
    /// The library has delivered all of them.
    Delivered,
    /// The library has had messages to deliver since it was asked.
    UnderWay,
}

impl Peeks {
    fn self_messages(&mut self, context: usize, reads: u64) -> SelfMessages {
        match self.pending.take() {
            Some(pending) if pending.context != context => SelfMessages::Unknown,
            Some(pending) if pending.reads != reads => SelfMessages::Delivered,
            Some(_) => SelfMessages::UnderWay,
            None => SelfMessages::Unknown,
        }
    }
}

impl Engine {
    /// Looks for a message. A context names one claimed message: if a second peek could claim under
    /// the same context, the first message would never be received, and its sender would wait.
    pub fn peek(&mut self, request: &PeekRequest) -> Result<(), Errno> {
        if request.claim && self.connections.data.core.messages_mut().is_claimed(request.context) {
            return Err(Errno::EINVAL);
        }
        let look = Peek {
            source: self.connections.data.source_of(request.source)?,
            tag: request.tag,
            ignore: request.ignore,
            context: request.context,
            claim: request.claim,
            discard: request.discard,
        };
        let reads = self
            .connections
            .data
            .application
            .sink
            .receive
            .as_ref()
            .map_or(0, |queue| queue.reads());
        match self.receives.peeks.self_messages(request.context, reads) {
            SelfMessages::UnderWay => {
                self.connections.data.core.messages_mut().complete_empty_peek(&look)
            }
            SelfMessages::Delivered => self.connections.data.core.messages_mut().peek(look),
            SelfMessages::Unknown => {
                self.poll_to_peek();
                if request.repeats && self.connections.data.core.messages_mut().would_match(&look) {
                    self.receives.peeks.pending = Some(Pending { context: request.context, reads });
                    return Err(Errno::EAGAIN);
                }
                self.connections.data.core.messages_mut().peek(look);
            }
        }
        self.connections.run_actions();
        Ok(())
    }

    /// Polls the network for a peek. A program that peeks in a loop always has an answer in its
    /// completion queue, and reading this queue then polls nothing else, so the peek itself must
    /// poll.
    fn poll_to_peek(&mut self) {
        if self.is_recorded() {
            self.poll_recorded();
        } else {
            self.poll();
        }
    }
}
