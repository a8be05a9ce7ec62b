//! The world: links that carry frames. The only system calls on the data path are here.

pub mod checksum;
pub mod engine;
pub mod link;
pub mod refusals;
pub mod sys;
