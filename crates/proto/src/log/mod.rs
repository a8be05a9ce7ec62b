//! Logs of the senders: what a process has sent to another one stays in shared memory of its node
//! until no incarnation of either process can need it.
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | [`contact`] | where a process can be reached |
//! | [`layout`] | positions in the memory file of a node |
//! | [`counts`] | what a process has sent and delivered, for reports |
//! | [`segment`] | where in a log's region the next frame lies |
//! | [`memory_share`] | how much memory the logs of a process take |
//! | [`next_segment`] | where a log goes on when its segment is full |
//! | [`delivery`] | encoding of what a poll has delivered |
//! | [`release`] | up to where a log is needed no more |
//! | [`walk`] | going through a log that is not mapped |
//! | [`image_logs`] | what images hold of logs, for incarnations on another node |
//! | [`frames_digest`] | whether two processes have the same frames |
//! | [`unit`] | processes of a node that begin again together |
//! | [`transfer`] | how a log's frames reach a process of another node |
//! | [`agent_transfer`] | how they do while their sender does nothing |

pub mod agent_transfer;
pub mod contact;
pub mod counts;
pub mod delivery;
pub mod frames_digest;
pub mod image_logs;
pub mod layout;
pub mod memory_share;
pub mod next_segment;
pub mod release;
pub mod segment;
pub mod transfer;
pub mod unit;
pub mod walk;
