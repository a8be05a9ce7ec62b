//! The driver: links that carry frames, and the relay's engine. Only this crate makes system calls
//! on the data path.
//!
//! | module | does |
//! |---|---|
//! | `sys` | requests to the operating system |
//! | `checksum` | checksums, computed while copying |
//! | `refusals` | log lines about refused connections |
//! | `link` | links that carry frames |
//! | `engine` | the engine of a relay |

pub mod checksum;
pub mod engine;
pub mod link;
pub mod refusals;
pub mod sys;
