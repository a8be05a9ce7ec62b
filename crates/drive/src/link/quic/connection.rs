//! One QUIC connection with its one stream, between its hub and its link.
//!
//! What enters: the events of quinn-proto's state machine, and the link's reads and writes. What
//! leaves: events for the engine. What may never happen: the connection buffers more than its
//! [`WindowShare`] allows, or much more than can leave soon.

use std::io;
use std::time::Instant;

use quinn_proto::{
    Connection, ConnectionError, Dir, Event, ReadError, StreamEvent, StreamId, VarInt, WriteError,
};

use super::QuicEvents;
use super::window_share::{WINDOW_BYTES_MIN, WindowPool, WindowShare};
use crate::link::socket::{SocketRead, SocketWrite};

/// The bytes accepted beyond what may be in flight: more would only delay.
const UNSENT_BYTES: u64 = 256 << 10;

/// A QUIC connection: see the module documentation.
pub struct QuicConnection {
    pub connection: Connection,
    pub stream: Option<StreamId>,
    /// The token under which events are reported.
    pub token: Option<u64>,
    pub events: QuicEvents,
    pub is_connected: bool,
    /// The connection's share of the windows, once it is connected.
    share: Option<WindowShare>,
    pub is_touched: bool,
    /// A link holds the connection.
    pub is_held: bool,
    pub is_drained: bool,
    pub lost: Option<ConnectionError>,
    /// The other side reads nothing more.
    is_stopped: bool,
    pub timer: Option<Instant>,
}

impl QuicConnection {
    pub fn new(connection: Connection) -> Self {
        Self {
            connection,
            stream: None,
            token: None,
            events: QuicEvents::default(),
            is_connected: false,
            share: None,
            is_touched: false,
            is_held: true,
            is_drained: false,
            lost: None,
            is_stopped: false,
            timer: None,
        }
    }

    pub fn handle(&mut self, event: Event, pool: &WindowPool) {
        match event {
            Event::Connected => {
                self.is_connected = true;
                self.share = Some(WindowShare::new(pool));
                self.tune();
                if self.connection.side().is_client() {
                    // The peer gives credit for one stream from the beginning.
                    self.stream = self.connection.streams().open(Dir::Bi);
                }
                self.events.is_readable = true;
            }
            Event::Stream(StreamEvent::Opened { dir: Dir::Bi }) => {
                if self.stream.is_none() {
                    self.stream = self.connection.streams().accept(Dir::Bi);
                }
                self.events.is_readable = true;
            }
            Event::Stream(StreamEvent::Readable { .. }) => self.events.is_readable = true,
            Event::Stream(StreamEvent::Writable { .. }) => self.events.is_writable = true,
            Event::Stream(StreamEvent::Stopped { .. }) => {
                self.is_stopped = true;
                self.events.is_over = true;
            }
            Event::ConnectionLost { reason } => {
                self.lost = Some(reason);
                self.share = None;
                self.events.is_over = true;
            }
            _ => (),
        }
    }

    /// Sets the send window to what may be in flight and a little more, because nothing can
    /// overtake the bytes that wait here. Sets the receive window to the connection's share.
    pub fn tune(&mut self) {
        let under_way = self.connection.congestion_state().window();
        let window = under_way + under_way / 2 + UNSENT_BYTES;
        let window_max = self.share.as_ref().map_or(WINDOW_BYTES_MIN, WindowShare::sending);
        self.connection.set_send_window(window.min(window_max));
        if let Some(window) = self.share.as_mut().and_then(WindowShare::adjust) {
            self.connection.set_receive_window(VarInt::from_u32(window as u32));
        }
    }

    pub fn finish(&mut self) {
        if let Some(stream) = self.stream {
            let _ = self.connection.send_stream(stream).finish();
        }
    }

    /// Whether something that was written may still arrive.
    pub fn is_waiting(&mut self) -> bool {
        self.lost.is_none() && self.connection.streams().send_streams() > 0
    }

    pub fn end(&self) -> Option<io::Error> {
        let stopped = || self.is_stopped.then(|| io::ErrorKind::ConnectionReset.into());
        self.lost.as_ref().map(explain).or_else(stopped)
    }

    /// Reads what has arrived. Also returns whether the peer must receive a window update.
    pub fn read(&mut self, buffer: &mut [u8]) -> (io::Result<SocketRead>, bool) {
        let Some(stream) = self.stream else {
            return (Err(self.end().unwrap_or(io::ErrorKind::WouldBlock.into())), false);
        };
        let mut stream = self.connection.recv_stream(stream);
        let Ok(mut chunks) = stream.read(true) else {
            return (Ok(SocketRead { bytes: 0, more: false }), false);
        };
        let mut bytes = 0;
        let result = loop {
            if bytes == buffer.len() {
                break Ok(true);
            }
            match chunks.next(buffer.len() - bytes) {
                Ok(Some(chunk)) => {
                    buffer[bytes..bytes + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
                    bytes += chunk.bytes.len();
                }
                Ok(None) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        let credit = chunks.finalize().should_transmit();
        if let Some(share) = &mut self.share {
            share.note_read(bytes as u64);
        }
        let result = match result {
            Ok(more) => Ok(SocketRead { bytes, more: more || bytes > 0 }),
            Err(_) if bytes > 0 => Ok(SocketRead { bytes, more: self.lost.is_some() }),
            Err(ReadError::Blocked) => Err(self.end().unwrap_or(io::ErrorKind::WouldBlock.into())),
            Err(ReadError::Reset(_)) => Err(io::ErrorKind::ConnectionReset.into()),
        };
        (result, credit)
    }

    pub fn write<'a>(&mut self, slices: impl Iterator<Item = &'a [u8]>) -> io::Result<SocketWrite> {
        let stream = match (self.stream, &self.lost) {
            (Some(stream), None) => stream,
            _ => return Err(self.end().unwrap_or(io::ErrorKind::BrokenPipe.into())),
        };
        let mut stream = self.connection.send_stream(stream);
        let mut bytes = 0;
        for mut slice in slices {
            while !slice.is_empty() {
                match stream.write(slice) {
                    Ok(taken) => {
                        bytes += taken;
                        slice = &slice[taken..];
                    }
                    Err(WriteError::Blocked) => return Ok(SocketWrite { bytes, blocked: true }),
                    Err(_) => return Err(io::ErrorKind::BrokenPipe.into()),
                }
            }
        }
        Ok(SocketWrite { bytes, blocked: false })
    }
}

/// The error that explains why a connection has ended.
fn explain(reason: &ConnectionError) -> io::Error {
    let other = |text: String| io::Error::other(text);
    match reason {
        ConnectionError::ApplicationClosed(_) => io::ErrorKind::UnexpectedEof.into(),
        ConnectionError::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "nothing has arrived from it over UDP")
        }
        ConnectionError::Reset => {
            io::Error::new(io::ErrorKind::ConnectionReset, "it knows nothing of this connection")
        }
        ConnectionError::TransportError(error) => other(format!("QUIC: {error}")),
        ConnectionError::ConnectionClosed(close) => {
            // The peer may be unauthenticated, so its text is not shown.
            other(format!("QUIC: it says: {}", close.error_code))
        }
        error => other(format!("QUIC: {error}")),
    }
}
