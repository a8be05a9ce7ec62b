//! Ways to carry frames between two processes.

pub mod datagram;
pub mod near;
pub mod quic;
pub mod shm;
pub mod socket;
pub mod stream;
pub mod tls;
pub mod whole;
