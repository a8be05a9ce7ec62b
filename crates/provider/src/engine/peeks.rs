//! Peeks at unexpected messages, and the order between a peer's messages and those that the MPI
//! library delivers itself.
//!
//! MPICH hands what a process sends to itself to a queue of its own, also where its shared memory
//! is switched off. A probe for any source looks for such a message among those that MPICH has
//! taken from that queue, and peeks at ours only if there is none; but MPICH takes messages from
//! its queue only when it makes progress. So a probe could find a peer's message before an own one
//! that was sent earlier, and the receive that follows, which comes after some progress, would take
//! the own one: `MPI_Dist_graph_create` takes the length from the probe and the message from the
//! receive, and counts wrong.
//!
//! The engine cannot see that queue. It sees whether MPICH has emptied it: a peek for any source
//! that would find something is told to try again. MPICH then makes progress, at its own queue
//! first, and reads our completion queue only if its own was empty. If the completion queue was
//! read, the peek that is tried again is answered; if not, an own message is on its way to its
//! receiver, and the peek finds nothing: the next probe sees both.
//!
//! MPICH makes such progress before its first new try if [`RETRIES`] says so, which the launcher
//! and `landbridge env` set. Without it every peek is answered at once. Open MPI and Intel MPI send
//! to themselves through the provider, where such a message is delivered inside the call.

use landbridge_proto::endpoint::Peek;

use crate::abi::Errno;

use super::Engine;
use super::request::PeekRequest;

/// How often MPICH tries again what was refused with `EAGAIN`. Its count goes down before each try,
/// and it makes progress at all queues, its own ones first, when the count is a multiple of 256; at
/// other tries (since 4.3, and always by default) it only reads our completion queue.
const RETRIES: &str = "MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY";

/// Whether MPICH looks into its own queue before it repeats a peek.
pub fn library_repeats_peeks() -> bool {
    std::env::var(RETRIES).is_ok_and(|retries| looks_first(&retries))
}

/// Whether the first new try of so many is one before which MPICH looks into its own queue.
pub(super) fn looks_first(retries: &str) -> bool {
    retries.parse::<u32>().is_ok_and(|retries| retries > 1 && retries % 256 == 1)
}

/// The peek that was told to try again, if that was the last thing a peek was told.
#[derive(Default)]
pub(super) struct Peeks {
    pending: Option<Pending>,
}

struct Pending {
    context: usize,
    /// Reads of the completion queue when the peek was told so.
    reads: u64,
}

/// What is known of messages that the MPI library delivers itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SelfMessages {
    /// Nothing: it was not asked yet.
    Unknown,
    /// There are none.
    Delivered,
    /// The library has had some to deliver since it was asked.
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
    pub fn peek(&mut self, request: &PeekRequest) -> Result<(), Errno> {
        let look = Peek {
            source: self.source_of(request.source)?,
            tag: request.tag,
            ignore: request.ignore,
            context: request.context,
            claim: request.claim,
            discard: request.discard,
        };
        let reads = self.sink.receive.as_ref().map_or(0, |queue| queue.reads());
        match self.peeks.self_messages(request.context, reads) {
            SelfMessages::UnderWay => self.core.complete_empty_peek(&look),
            SelfMessages::Delivered => self.core.peek(look),
            SelfMessages::Unknown => {
                self.poll_to_peek();
                if request.repeats && self.core.would_match(&look) {
                    self.peeks.pending = Some(Pending { context: request.context, reads });
                    return Err(Errno::EAGAIN);
                }
                self.core.peek(look);
            }
        }
        self.run_actions();
        Ok(())
    }

    /// A program that peeks in a loop always has an answer in its completion queue, whose reading
    /// then looks at nothing else: the looking at the network must be done with the peek.
    fn poll_to_peek(&mut self) {
        if self.is_recorded() {
            self.poll_recorded();
        } else {
            self.poll();
        }
    }
}
