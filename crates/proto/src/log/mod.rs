//! Logs of the senders: what a process has sent to another one of its node stays in shared memory
//! until no incarnation of either process can need it.
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | [`layout`] | positions in the memory file of a node |
//! | [`segment`] | where in a log's region the next frame lies |
//! | [`delivery`] | encoding of what a poll has delivered |
//! | [`release`] | up to where a log is needed no more |

pub mod delivery;
pub mod layout;
pub mod release;
pub mod segment;
