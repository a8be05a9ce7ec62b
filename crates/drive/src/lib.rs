//! The driver: links that carry frames, and the relay's engine. Only this crate makes system calls
//! on the data path.

pub mod checksum;
pub mod engine;
pub mod link;
pub mod refusals;
pub mod sys;
