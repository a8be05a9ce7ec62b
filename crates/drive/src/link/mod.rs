//! The links that carry frames between two processes.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `stream` | frames over a byte stream |
//! | `datagram` | frames in datagrams |
//! | `socket` | a relay's end of a stream socket |
//! | `tls` | TLS between two relays |
//! | `quic` | QUIC between two relays |
//! | `unconfirmed` | for how long bytes of a TCP connection have not been confirmed |
//! | `recorded` | a link whose bytes are part of the log |
//! | `shm` | frames through shared memory |
//! | `relay_shm` | a relay's end of shared memory |
//! | `node_log` | frames between recorded processes of one node |

pub mod datagram;
pub mod node_log;
pub mod quic;
pub mod recorded;
pub mod relay_shm;
pub mod shm;
pub mod socket;
pub mod stream;
pub mod tls;
pub mod unconfirmed;
