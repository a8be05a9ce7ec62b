//! Ways to carry frames between two processes.

pub mod shm;
pub mod stream;
