//! Links to other relays over UDP: the sockets under them, and how their datagrams fit into the engine's round.
//!
//! A relay that listens for others has one socket at the same port as for TCP; one that dials has one for IPv4 and one
//! for IPv6, made when they are needed. What a hub has to tell becomes an event of the connection concerned, as if epoll
//! had said so. Whatever is wrong with UDP, TCP is left: nothing here fails.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landbridge_proto::id::ClusterId;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::pending_connection::{Origin, PendingConnection};
use super::transport::Transport;
use super::{EventLoop, Remote};
use crate::engine::{EngineHost, Setup};
use crate::link::quic::{Congestion, QuicEvents, QuicHub, WindowPool};
use crate::link::tls::Identity;

/// Tokens from here on are hubs.
pub const HUB_BASE: u64 = u64::MAX - 1_500;
/// How long a relay that ends waits until other relays have what it has passed on. TCP leaves that to the system.
const LINGER_TIME: Duration = Duration::from_millis(500);

/// See the module head.
pub struct UdpHubs {
    identity: Option<Identity>,
    /// `None`: no UDP.
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
    /// Opens the listening socket, if there is to be one.
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

    /// Whether there is to be UDP at all.
    pub fn is_wanted(&self) -> bool {
        self.congestion.is_some()
    }

    /// The hub to dial `to` with.
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

    /// How long the engine may sleep that would sleep for `most`.
    pub fn sleep_max(&self, most: Option<Duration>) -> Option<Duration> {
        let wake = self.hubs.iter().filter_map(|entry| entry.hub.next_wake()).min();
        let wake = wake.map(|at| at.saturating_duration_since(Instant::now()));
        most.into_iter().chain(wake).min()
    }

    /// Sends what the round has brought up.
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

    /// The relay ends.
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
    /// Takes in datagrams, looks at the clock, and tells the connections concerned.
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

    /// Starts a connection for a stream, which `takes_over` from an older one. False: there is no UDP here.
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
                self.report_udp_failure(cluster, stream, to, &why);
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
