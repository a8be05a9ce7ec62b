//! Connections that others make: who is let in to say hello, and what the log says of those who are refused.
//!
//! Anybody on the network may connect to the port of an endpoint. A stranger holds one of [`PENDING_CONNECTIONS_MAX`] places for as
//! long as a hello may take, and a descriptor. Refusals for the same reason share one log line a second, so that nobody
//! fills the log by connecting again and again.

use std::io;
use std::net::SocketAddr;

use landbridge_drive::sys::now_millis;

use super::Engine;
use super::dialling::{Hello, HelloPurpose};
use crate::log;

/// Strangers whose hello is under way; more wait in the listening queue. Our own dials do not count: everybody may be
/// dialling everybody, and somebody has to answer.
const PENDING_CONNECTIONS_MAX: usize = 256;

impl Engine {
    /// Accepts whoever waits at a door.
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

    /// Nobody can be let in for now, and those who knock must not keep us busy: the door is looked at again when a stranger
    /// has gone or become a peer, or with the next check.
    fn pause_listener(&mut self, is_unix: bool) {
        let is_paused = &mut self.hellos.paused_listeners[is_unix as usize];
        if !*is_paused && self.own.set_watched(&self.epoll, is_unix, false).is_ok() {
            *is_paused = true;
            self.hellos_open += 1;
        }
    }

    pub(super) fn resume_listeners(&mut self) {
        for is_unix in [false, true] {
            let is_paused = &mut self.hellos.paused_listeners[is_unix as usize];
            if *is_paused && self.own.set_watched(&self.epoll, is_unix, true).is_ok() {
                *is_paused = false;
                self.hellos_open -= 1;
            }
        }
    }

    /// Drops a stranger whose hello has taken long, to make room for another; false if there is none.
    fn evict_pending(&mut self) -> bool {
        let is_idle = |hello: &Hello| {
            matches!(hello.purpose, HelloPurpose::Accepted) && hello.handshake.is_slow()
        };
        let mut slots = self.hellos.slots.iter();
        let Some(id) = slots.position(|slot| slot.as_ref().is_some_and(is_idle)) else {
            return false;
        };
        // What we waited for may be there by now, unread.
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

    /// Logs who is refused and why, or counts that if a line has just given the same reason.
    #[cold]
    pub(super) fn refuse_connection(&mut self, remote: Option<SocketAddr>, error: &io::Error) {
        if self.hellos.refusals.note(&error.to_string(), now_millis()) {
            let remote = remote.map_or("a process of this node".into(), |at| at.to_string());
            log!(Warn, "a connection of {remote} was refused: {error}");
        }
    }

    /// Whether the log owes a count of refusals.
    pub(super) fn has_unlogged_refusals(&self) -> bool {
        self.hellos.refusals.needs_clock()
    }

    /// Logs how many connections were refused since the last line for the same reason.
    #[cold]
    pub(super) fn log_refusals(&mut self, now_millis: u64) {
        while let Some((count, why)) = self.hellos.refusals.poll(now_millis) {
            log!(Warn, "{count} more connections were refused: {why}");
        }
    }
}
