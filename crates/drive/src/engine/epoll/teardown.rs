//! How connections end, and which parts of the relay are notified.

use super::connection::{Connection, InputState, Phase, RelayStream, Remote};
use super::*;

impl EventLoop<'_> {
    /// Closes the scheduled connections, and resumes the inputs that have waited for them.
    pub(super) fn close_scheduled(&mut self) {
        while let Some((slot, why)) = self.forwarder.connections.next_to_close() {
            self.close(slot, &why);
        }
        self.forwarder.resume();
    }

    /// Ends a connection of any kind.
    pub(super) fn close(&mut self, slot: usize, why: &str) {
        let connection = &self.forwarder.connections[slot];
        let is_gone = match (&connection.phase, &connection.transport) {
            // In shared memory, the end of the link is the end of the process.
            (Phase::Endpoint { .. }, Some(Transport::Shm(_)))
                if !self.forwarder.relay.is_recovery_enabled() =>
            {
                true
            }
            (Phase::Endpoint { link, .. }, _) if self.forwarder.relay.is_recovery_enabled() => {
                !self.forwarder.relay.ports().may_reconnect(*link)
            }
            (Phase::Endpoint { link, .. }, _) => {
                connection.input == InputState::Ended
                    && !self.forwarder.relay.ports().may_reconnect(*link)
            }
            _ => false,
        };
        self.end(slot, why, is_gone);
    }

    /// Ends the connection of an endpoint that still lives.
    pub(super) fn suspend(&mut self, slot: usize, why: &str) {
        self.end(slot, why, false);
    }

    pub(super) fn end(&mut self, slot: usize, why: &str, is_gone: bool) {
        let connection = &mut self.forwarder.connections[slot];
        let generation = connection.generation.wrapping_add(1);
        let unparsed = connection.unparsed.len();
        let free = Connection { generation, is_queued: connection.is_queued, ..Connection::free() };
        let Connection { phase, remote, retired_millis, .. } = std::mem::replace(connection, free);
        self.forwarder.drop_unparsed(unparsed);
        self.forwarder.waiter.forget(slot);
        match phase {
            Phase::Free => return,
            Phase::Doctor => (),
            Phase::Pending(pending) => self.handle_refusal(pending.origin, &remote, why),
            Phase::Endpoint { link, address } => {
                self.forwarder.connections.unbind(link);
                if is_gone {
                    self.forwarder.relay.detach(link);
                    self.host.log(format_args!("{address} at {remote} has left: {why}"));
                } else {
                    self.forwarder.relay.suspend(link);
                    self.host.log(format_args!(
                        "{address} at {remote} is away: {why}; frames for it wait until it is back"
                    ));
                }
            }
            Phase::Peer { link, cluster, stream } if retired_millis.is_some() => {
                self.forwarder.connections.unbind(link);
                self.forwarder.relay.disconnect(link);
                self.host.log(format_args!(
                    "stream {} to the relay of cluster {} at {remote} was replaced: {why}",
                    stream.number, cluster.0
                ));
            }
            Phase::Peer { link, cluster, stream } => {
                self.forwarder.connections.unbind(link);
                self.forwarder.relay.disconnect(link);
                self.report.breaks += 1;
                self.handle_break(cluster, stream, &remote, why);
            }
        }
        self.forwarder.connections.release(slot);
        self.forwarder.drain(&[]);
    }

    /// Records that a stream to another relay is down.
    pub(super) fn handle_break(
        &mut self,
        cluster: ClusterId,
        stream: RelayStream,
        remote: &Remote,
        why: &str,
    ) {
        let number = cluster.0;
        if self
            .forwarder
            .relay
            .peer(cluster)
            .is_some_and(|peer| self.forwarder.relay.ports().is_up(peer))
        {
            self.host.log(format_args!(
                "stream {} to the relay of cluster {number} at {remote} is down: {why}; others go \
                 on",
                stream.number
            ));
        } else {
            self.host.log(format_args!(
                "the link to the relay of cluster {number} at {remote} is down: {why}; frames for \
                 it wait until it is back"
            ));
            self.host.handle_link(cluster, remote, LinkState::Down(why));
        }
        if stream.is_dialled {
            self.dials.note_break(cluster, stream.number, why == CLOSED, self.host);
            self.dials.schedule(cluster, stream.number);
        }
    }

    pub(super) fn handle_refusal(&mut self, origin: Origin, remote: &Remote, why: &str) {
        self.pending.count -= 1;
        match origin {
            Origin::Dialled(cluster, stream) => {
                self.report.refused += 1;
                match remote {
                    Remote::Udp(at) => self.handle_udp_failure(cluster, stream, *at, why),
                    _ => self.handle_dial_failure(cluster, stream, remote, why),
                }
            }
            _ => self.refuse(remote, why),
        }
    }

    pub(super) fn refuse(&mut self, remote: &Remote, why: &str) {
        self.report.refused += 1;
        if self.refusals.note(why, sys::now_millis()) {
            self.host.log(format_args!("refused {remote}: {why}"));
        }
    }

    pub(super) fn report_refusals(&mut self, now_millis: u64) {
        while let Some((count, why)) = self.refusals.poll(now_millis) {
            self.host.log(format_args!("refused {count} more: {why}"));
        }
    }
}

pub(super) fn text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => CLOSED.into(),
        // A program that ends without reading everything causes this error.
        io::ErrorKind::ConnectionReset => {
            format!("it has ended, or closed the connection, without reading to the end ({error})")
        }
        _ => error.to_string(),
    }
}
