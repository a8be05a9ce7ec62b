//! Accepts connections of other processes for a hello, and logs refused connections.
//!
//! Any process on the network may connect to the port of an endpoint. A pending connection holds
//! one of [`PENDING_CONNECTIONS_MAX`] slots and a descriptor, for as long as a hello may take.
//! Refusals for the same reason share one log line a second, so that repeated connections cannot
//! fill the log.

use std::io;
use std::net::SocketAddr;

use landbridge_drive::sys::now_millis;

use super::Engine;
use super::dialling::{Hello, HelloPurpose};
use crate::log;

/// Maximum number of accepted connections whose hello is under way; further connections wait in the
/// listening queue. Dials of this process do not count: all processes may dial each other at once,
/// and some of them have to answer.
const PENDING_CONNECTIONS_MAX: usize = 256;

impl Engine {
    /// Accepts all connections that wait at a listener.
    pub(super) fn accept_pending(&mut self, is_unix: bool) {
        while self.hellos.pending < PENDING_CONNECTIONS_MAX || self.evict_pending() {
            let socket = match self.own.accept(is_unix) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    if !std::mem::replace(&mut self.hellos.has_warned, true) {
                        log!(
                            Warn,
                            "peers that connect have to wait: {error}; raise the limit of open \
                             files (ulimit -n)"
                        );
                    }
                    break;
                }
            };
            if let Err(error) = self.start_handshake(socket, is_unix, HelloPurpose::Accepted) {
                self.refuse_connection(None, &error);
            }
        }
        self.pause_listener(is_unix);
    }

    /// Stops watching a listener while no connection can be accepted, so that waiting connections
    /// cause no load. The listener is watched again when a pending connection ends, or at the next
    /// regular check.
    fn pause_listener(&mut self, is_unix: bool) {
        let is_paused = &mut self.hellos.paused_listeners[is_unix as usize];
        if !*is_paused && self.own.set_watched(is_unix, false).is_ok() {
            *is_paused = true;
            self.hellos.open += 1;
        }
    }

    pub(super) fn resume_listeners(&mut self) {
        for is_unix in [false, true] {
            let is_paused = &mut self.hellos.paused_listeners[is_unix as usize];
            if *is_paused && self.own.set_watched(is_unix, true).is_ok() {
                *is_paused = false;
                self.hellos.open -= 1;
            }
        }
    }

    /// Closes the first pending connection whose hello takes longer than `is_slow` allows, to free
    /// its slot. Returns false if there is none.
    fn evict_pending(&mut self) -> bool {
        let is_idle = |hello: &Hello| {
            matches!(hello.purpose, HelloPurpose::Accepted) && hello.handshake.is_slow()
        };
        let mut slots = self.hellos.slots.iter();
        let Some(id) = slots.position(|slot| slot.as_ref().is_some_and(is_idle)) else {
            return false;
        };
        // The expected bytes may have arrived, unread.
        self.handle_hello(id);
        if let Some(hello) = self.hellos.slots[id].take() {
            let remote = hello.handshake.remote();
            drop(hello);
            self.hello_closed(HelloPurpose::Accepted);
            let why = "too many others wait for their hello";
            self.refuse_connection(remote, &io::Error::other(why));
        }
        true
    }

    /// Logs a refused connection with the reason, or counts the refusal if a recent log line has
    /// given the same reason.
    #[cold]
    pub(super) fn refuse_connection(&mut self, remote: Option<SocketAddr>, error: &io::Error) {
        if self.hellos.refusals.note(&error.to_string(), now_millis()) {
            let remote = remote.map_or("a process of this node".into(), |at| at.to_string());
            log!(Warn, "a connection of {remote} was refused: {error}");
        }
    }

    /// Whether counted refusals have not been logged yet.
    pub(super) fn has_unlogged_refusals(&self) -> bool {
        self.hellos.refusals.needs_clock()
    }

    /// Logs how many connections were refused since the last log line for the same reason.
    #[cold]
    pub(super) fn log_refusals(&mut self, now_millis: u64) {
        while let Some((count, why)) = self.hellos.refusals.poll(now_millis) {
            log!(Warn, "{count} more connections were refused: {why}");
        }
    }
}
