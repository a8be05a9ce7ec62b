//! What one path to a peer can carry: how long a byte takes, how many bytes may be in flight, how
//! fast they may leave, and how large a datagram may be.
//!
//! Everything here is arithmetic on the reports of the path's owner: what was sent, what was
//! acknowledged, what counts as lost, and when. Nothing here keeps a list of packets, sets a timer
//! or sends; the owner does this, and asks here first. Time may stand still, jump forwards or jump
//! back. Estimates may then be wrong for a while, but no sum overflows, nothing is divided by zero
//! and no answer is "never".
//!
//! The modules in order; each uses only those before it:
//!
//! | module | answers |
//! |---|---|
//! | [`time`] | what time is, and how bytes, rates and spans are converted |
//! | [`rtt`] | how long a round trip takes, and when an answer is late |
//! | [`pacer`] | whether this batch may leave now |
//! | [`window`] | what both congestion control algorithms share |
//! | [`cubic`] | the algorithm CUBIC |
//! | [`bbr`] | the algorithm BBR |
//! | [`congestion`] | how many bytes may be in flight, and how fast they may leave |
//! | [`rate`] | when a number of bytes would have arrived on this path |
//! | [`mtu`] | how large a datagram may be |

pub mod bbr;
pub mod congestion;
pub mod cubic;
pub mod mtu;
pub mod pacer;
pub mod rate;
pub mod rtt;
pub mod time;
pub mod window;

#[cfg(test)]
mod model;
