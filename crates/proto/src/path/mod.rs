//! What one way to a peer can carry: how long a byte takes, how many may be under way, how fast
//! they may leave, and how large a datagram may be.
//!
//! Everything here is arithmetic on what the owner of a path tells: what it sent, what was
//! acknowledged, what it holds for lost, and when. Nothing keeps a list of packets, sets a timer or
//! sends; whoever does asks here first. Time may stand still, jump forwards or jump back: estimates
//! may then be wrong for a while, but no sum overflows, nothing is divided by zero and no answer is
//! "never".
//!
//! | module | answers |
//! |---|---|
//! | [`time`] | what time is, and how bytes, rates and spans go together |
//! | [`rtt`] | how long is a round trip, and when is an answer late |
//! | [`congestion`] | how many bytes may be under way, and how fast may they leave |
//! | [`cubic`], [`bbr`] | the two ways to answer that |
//! | [`pacer`] | may this batch leave now |
//! | [`rate`] | when would so many bytes have arrived on this path |
//! | [`mtu`] | how large may a datagram be |

pub mod bbr;
pub mod congestion;
pub mod cubic;
pub mod mtu;
pub mod pacer;
pub mod rate;
pub mod rtt;
pub mod time;

#[cfg(test)]
mod model;
