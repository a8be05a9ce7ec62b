//! The engine behind one libfabric endpoint (interface first; the body follows).

pub mod request;

use std::net::SocketAddrV4;
use std::sync::Arc;

use crate::abi::Errno;
use crate::av::Av;
use crate::mr;
use crate::sink::Sink;

use request::{AtomicRequest, ClaimRequest, PeekRequest, RecvRequest, RmaRequest, SendRequest};

/// What an endpoint is opened with.
pub struct Setup {
    pub domain_mr: Arc<mr::Table>,
    pub av: Arc<Av>,
    pub sink: Sink,
    /// The endpoint's name is a Landbridge address; otherwise a `sockaddr_in`.
    pub own_format: bool,
    /// Where to accept connections, if the program has said so.
    pub bind: Option<SocketAddrV4>,
    pub min_multi_recv: usize,
    /// FI_SOURCE: completions of receives carry the sender's number.
    pub source_wanted: bool,
}

pub struct Engine {}

impl Engine {
    pub fn open(_setup: Setup) -> Result<Engine, Errno> {
        Err(Errno::ENOSYS)
    }

    /// The endpoint's address: 48 bytes, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        &[]
    }

    pub fn send(&mut self, _request: &SendRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn recv(&mut self, _request: &RecvRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn peek(&mut self, _request: &PeekRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn claim(&mut self, _request: &ClaimRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn rma(&mut self, _request: &RmaRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn atomic(&mut self, _request: &AtomicRequest) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn cancel(&mut self, _context: usize) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    pub fn set_min_multi_recv(&mut self, _bytes: usize) {}

    /// Does what can be done without waiting; the number of events handled.
    pub fn progress(&mut self) -> usize {
        0
    }

    /// Parks until something arrives, at most `deadline_ms`.
    pub fn wait(&mut self, _deadline_ms: i32) {}

    /// Drains what is still on its way, within a bound.
    pub fn close(&mut self) {}
}
