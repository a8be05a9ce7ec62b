//! The links that carry frames between two processes.

pub mod datagram;
pub mod quic;
pub mod recorded;
pub mod relay_shm;
pub mod shm;
pub mod socket;
pub mod stream;
pub mod tls;
