//! The memory file with the message logs of this node's ranks ([`landbridge_proto::node_log`]).
//!
//! In: a job whose senders keep messages (`recover_log=sender`). Out: one file for all ranks of the
//! node and all their incarnations. What may never happen: the file ends before the agent.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use landbridge_proto::node_log::file_bytes;
use landbridge_proto::setting::{RECOVER_LOG, Value};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::control::Job;
use crate::sys;

/// The message logs of one node.
pub struct NodeLogs(OwnedFd);

impl NodeLogs {
    /// The logs of this node; `None` if relays keep the messages of this job.
    pub fn new(job: &Job) -> Result<Option<Rc<NodeLogs>>> {
        let variable = RECOVER_LOG.variable();
        let stated = job.environment.iter().find(|(name, _)| *name == variable);
        let is_wanted =
            stated.is_some_and(|(_, text)| RECOVER_LOG.parse(text) == Ok(Value::Word("sender")));
        if !is_wanted {
            return Ok(None);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("landbridge-logs", flags)?;
        rustix::fs::ftruncate(&file, file_bytes(job.size as usize))
            .context("no memory file for message logs")?;
        // A rank that shrinks the file would kill others with SIGBUS.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Some(Rc::new(NodeLogs(sys::out_of_the_way(file)))))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
