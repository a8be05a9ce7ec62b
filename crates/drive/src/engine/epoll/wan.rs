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

use super::stranger::{Door, Stranger};
use super::transport::Transport;
use super::{Loop, Remote};
use crate::engine::{Setup, Watch};
use crate::link::quic::{Congestion, News, Pool, QuicHub};
use crate::link::tls::Identity;

/// Tokens from here on are hubs.
pub const HUB_BASE: u64 = u64::MAX - 1_500;
/// How long a relay that ends waits until other relays have what it has passed on. TCP leaves that to the system.
const WIND_UP: Duration = Duration::from_millis(500);

/// See the module head.
pub struct Wan {
    identity: Option<Identity>,
    /// `None`: no UDP.
    congestion: Option<Congestion>,
    pool: Pool,
    hubs: Vec<Entry>,
}

struct Entry {
    hub: QuicHub,
    role: Role,
    is_readable: bool,
    is_blocked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Listens,
    DialsIpv4,
    DialsIpv6,
}

impl Wan {
    /// Opens the listening socket, if there is to be one.
    pub fn open(epoll: &OwnedFd, setup: &Setup, watch: &mut dyn Watch) -> Self {
        let identity = setup.identity.clone();
        let mut wan =
            Self { identity, congestion: setup.wan_udp, pool: Pool::default(), hubs: Vec::new() };
        let at = setup.relays.as_ref().and_then(|listener| listener.local_addr().ok());
        if let (Some(at), Some(_)) = (at, wan.congestion)
            && let Err(why) = wan.add(epoll, at, Role::Listens)
        {
            watch.log(format_args!("cannot listen at {at} for UDP: {why}; other relays use TCP"));
        }
        wan
    }

    fn add(&mut self, epoll: &OwnedFd, at: SocketAddr, role: Role) -> Result<usize, String> {
        let (Some(identity), Some(congestion)) = (&self.identity, self.congestion) else {
            return Err("UDP is off".into());
        };
        let hub = QuicHub::bind(at, identity, congestion, role == Role::Listens, &self.pool)
            .map_err(|error| error.to_string())?;
        let index = self.hubs.len();
        let entry = Entry { hub, role, is_readable: false, is_blocked: false };
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
            SocketAddr::V4(_) => (Role::DialsIpv4, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            SocketAddr::V6(_) => (Role::DialsIpv6, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
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
            .any(|entry| entry.is_readable || entry.hub.is_busy() || entry.hub.has_news())
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
    pub fn wind_up(&mut self) {
        QuicHub::wind_up(self.hubs.iter().map(|entry| &entry.hub), WIND_UP);
    }
}

impl Entry {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the hub keeps its socket open as long as it lives, and the entry keeps the hub.
        unsafe { BorrowedFd::borrow_raw(self.hub.fd()) }
    }
}

impl Loop<'_> {
    /// Takes in datagrams, looks at the clock, and tells the connections concerned.
    pub(super) fn take_in_wan(&mut self) {
        for index in 0..self.wan.hubs.len() {
            let entry = &mut self.wan.hubs[index];
            let now = Instant::now();
            if entry.is_readable {
                entry.is_readable = entry.hub.receive(now);
            }
            entry.hub.collect(now);
            let (arrivals, news) = (entry.hub.take_arrivals(), entry.hub.take_news());
            for (link, at) in arrivals {
                self.let_in(Ok(Transport::Quic(link)), Remote::Udp(at), Door::Relays);
            }
            for (token, news) in news {
                self.handle_event(token, flags(news));
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
        if self.wan.congestion.is_none() {
            return false;
        }
        let hub = self.wan.dialler(&self.epoll, to);
        let link = match hub.and_then(|hub| hub.dial(cluster, to, Instant::now())) {
            Ok(link) => link,
            Err(why) => {
                self.tell_of_udp_failure(cluster, stream, to, &why);
                return false;
            }
        };
        let mut stranger = Stranger::new(Door::Dialled(cluster, stream), now_millis);
        stranger.takes_over = takes_over;
        self.open(Transport::Quic(link), stranger, Remote::Udp(to)).is_ok()
    }
}

fn flags(news: News) -> EventFlags {
    let each = [
        (news.is_readable, EventFlags::IN),
        (news.is_writable, EventFlags::OUT),
        (news.is_over, EventFlags::HUP),
    ];
    each.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).collect()
}
