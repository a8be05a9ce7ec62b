//! Links to other relays over UDP: their sockets, and the place of their datagrams in the engine's
//! round.
//!
//! A relay that listens for others has one UDP socket at the port of its TCP listener. A relay that
//! dials has one socket for IPv4 and one for IPv6, which are created when they are needed. The
//! events of a hub become events of its connections, as if epoll had reported them. If UDP fails in
//! any way, TCP remains: nothing here fails.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landbridge_proto::id::ClusterId;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::EventLoop;
use super::connection::Remote;
use super::pending_connection::{Origin, PendingConnection};
use super::transport::Transport;
use crate::engine::{EngineHost, Setup};
use crate::link::quic::{Congestion, QuicEvents, QuicHub, WindowPool};
use crate::link::tls::Identity;

/// The first epoll token of hubs.
pub const HUB_BASE: u64 = u64::MAX - 1_500;
/// How long an ending relay waits until other relays have received what it has passed on. For TCP,
/// the kernel does this.
const LINGER_TIME: Duration = Duration::from_millis(500);

/// The UDP hubs of a relay: see the module documentation.
pub struct UdpHubs {
    identity: Option<Identity>,
    /// The congestion control; `None` if UDP is not used.
    congestion: Option<Congestion>,
    pool: WindowPool,
    hubs: Vec<HubEntry>,
}

struct HubEntry {
    hub: QuicHub,
    role: HubRole,
    is_readable: bool,
    is_blocked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HubRole {
    Listens,
    DialsIpv4,
    DialsIpv6,
}

impl UdpHubs {
    /// Opens the listening socket, if the setup asks for one.
    pub fn open(epoll: &OwnedFd, setup: &Setup, host: &mut dyn EngineHost) -> Self {
        let identity = setup.identity.clone();
        let mut hubs = Self {
            identity,
            congestion: setup.wan_udp,
            pool: WindowPool::default(),
            hubs: Vec::new(),
        };
        let at = setup.relays.as_ref().and_then(|listener| listener.local_addr().ok());
        if let (Some(at), Some(_)) = (at, hubs.congestion)
            && let Err(why) = hubs.add(epoll, at, HubRole::Listens)
        {
            host.log(format_args!("cannot listen at {at} for UDP: {why}; other relays use TCP"));
        }
        hubs
    }

    fn add(&mut self, epoll: &OwnedFd, at: SocketAddr, role: HubRole) -> Result<usize, String> {
        let (Some(identity), Some(congestion)) = (&self.identity, self.congestion) else {
            return Err("UDP is off".into());
        };
        let hub = QuicHub::bind(at, identity, congestion, role == HubRole::Listens, &self.pool)
            .map_err(|error| error.to_string())?;
        let index = self.hubs.len();
        let entry = HubEntry { hub, role, is_readable: false, is_blocked: false };
        let data = EventData::new_u64(HUB_BASE + index as u64);
        epoll::add(epoll, entry.fd(), data, EventFlags::IN).map_err(|error| error.to_string())?;
        self.hubs.push(entry);
        Ok(index)
    }

    /// Whether UDP is used at all.
    pub fn is_wanted(&self) -> bool {
        self.congestion.is_some()
    }

    /// The hub that dials `to`.
    fn dialler(&mut self, epoll: &OwnedFd, to: SocketAddr) -> Result<&QuicHub, String> {
        let (role, any) = match to {
            SocketAddr::V4(_) => (HubRole::DialsIpv4, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            SocketAddr::V6(_) => (HubRole::DialsIpv6, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
        };
        let index = match self.hubs.iter().position(|entry| entry.role == role) {
            Some(index) => index,
            None => self.add(epoll, SocketAddr::new(any, 0), role)?,
        };
        Ok(&self.hubs[index].hub)
    }

    pub fn note_readable(&mut self, index: usize) {
        if let Some(entry) = self.hubs.get_mut(index) {
            entry.is_readable = true;
        }
    }

    /// Whether there is something to do at once.
    pub fn is_busy(&self) -> bool {
        self.hubs
            .iter()
            .any(|entry| entry.is_readable || entry.hub.is_busy() || entry.hub.has_events())
    }

    /// The time for which the engine may sleep, if it would otherwise sleep for `most`.
    pub fn sleep_max(&self, most: Option<Duration>) -> Option<Duration> {
        let wake = self.hubs.iter().filter_map(|entry| entry.hub.next_wake()).min();
        let wake = wake.map(|at| at.saturating_duration_since(Instant::now()));
        most.into_iter().chain(wake).min()
    }

    /// Sends the datagrams of this round.
    pub fn transmit(&mut self, epoll: &OwnedFd) {
        for (index, entry) in self.hubs.iter_mut().enumerate() {
            let is_blocked = entry.hub.transmit(Instant::now());
            if is_blocked != entry.is_blocked {
                entry.is_blocked = is_blocked;
                let room = if is_blocked { EventFlags::OUT } else { EventFlags::empty() };
                let data = EventData::new_u64(HUB_BASE + index as u64);
                let _ = epoll::modify(epoll, entry.fd(), data, EventFlags::IN | room);
            }
        }
    }

    /// Ends all connections of the hubs.
    pub fn shut_down(&mut self) {
        QuicHub::shut_down(self.hubs.iter().map(|entry| &entry.hub), LINGER_TIME);
    }
}

impl HubEntry {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the hub keeps its socket open as long as it lives, and the entry keeps the hub.
        unsafe { BorrowedFd::borrow_raw(self.hub.fd()) }
    }
}

impl EventLoop<'_> {
    /// Receives datagrams, processes the time, and applies events to their connections.
    pub(super) fn receive_udp(&mut self) {
        for index in 0..self.udp.hubs.len() {
            let entry = &mut self.udp.hubs[index];
            let now = Instant::now();
            if entry.is_readable {
                entry.is_readable = entry.hub.receive(now);
            }
            entry.hub.collect(now);
            let (accepted, events) = (entry.hub.take_accepted(), entry.hub.take_events());
            for (link, at) in accepted {
                self.add_pending(Ok(Transport::Quic(link)), Remote::Udp(at), Origin::Relays);
            }
            for (token, events) in events {
                self.handle_event(token, flags(events));
            }
        }
    }

    /// Starts a connection over UDP for a stream; with `takes_over`, the connection is to replace
    /// an older one. Returns false if UDP is not used here.
    pub(super) fn dial_over_udp(
        &mut self,
        (cluster, stream): (ClusterId, u32),
        to: SocketAddr,
        now_millis: u64,
        takes_over: bool,
    ) -> bool {
        if self.udp.congestion.is_none() {
            return false;
        }
        let hub = self.udp.dialler(&self.epoll, to);
        let link = match hub.and_then(|hub| hub.dial(cluster, to, Instant::now())) {
            Ok(link) => link,
            Err(why) => {
                let relay = &self.forwarder.relay;
                self.dials.report_udp_failure((cluster, stream), to, &why, relay, self.host);
                return false;
            }
        };
        let mut pending = PendingConnection::new(Origin::Dialled(cluster, stream), now_millis);
        pending.takes_over = takes_over;
        self.open(Transport::Quic(link), pending, Remote::Udp(to)).is_ok()
    }
}

fn flags(events: QuicEvents) -> EventFlags {
    let each = [
        (events.is_readable, EventFlags::IN),
        (events.is_writable, EventFlags::OUT),
        (events.is_over, EventFlags::HUP),
    ];
    each.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).collect()
}
