//! Paths of datagrams: one UDP socket for each local address, for all peers.
//!
//! Over a TCP connection that has proven itself each endpoint tells the other its UDP port at that connection's own end,
//! with a token that only this peer knows ([`Door`]). From then on there is a *line* between the same two addresses: a link
//! like others, but one that is not used before it has been found to work, and is found again when it stops ([`flow`]). While
//! it works, the connection beside it is spare.
//!
//! | file | does |
//! |---|---|
//! | `flow` | judges one line: works, is silent, carries how much |
//! | `carry` | frames out and in |
//! | here | sockets, tokens, lines that come and go |
//!
//! What may never happen: a datagram is looked at whose token nobody was told; a socket that is full, or a notice that
//! anybody can forge, ends a path.

mod carry;
mod flow;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use landbridge_drive::link::datagram::{DATAGRAM_BYTES_MAX, DatagramLink, Notice, Trouble};
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{Path, Peer};
use landbridge_proto::limit::{CHECK_BYTES, HEAD_BYTES_MAX};
use landbridge_proto::path::congestion;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use landbridge_proto::wire::datagram::{Probe, TOKEN_BYTES};
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_proto::wire::head::Door;

use self::flow::{Flow, News, Verdict};
use super::Engine;
use super::handshake::Carrier;
use super::identity::random;
use super::links::Link;
use super::neighbours::Out;
use super::peers::{Token, free_slot, watch};
use super::rails::{address_of, door_at};
use crate::log;

/// The number under which frames are taken in from a line that is not open yet on this side: no path has it.
const UNOPENED: PathId = PathId(u8::MAX - 1);

/// First pause before a door is told again; doubled each time.
const TELL_NANOS_MIN: u64 = 50 * MILLISECOND;
/// And the last one: a peer that does not answer after a minute has no use for it.
const TELL_NANOS_MAX: u64 = 32 * SECOND;
/// So many large datagrams lost in a row are a reason to see whether their size still passes.
const SWALLOWED: u32 = 3;
/// Who has looked at nothing for so long has been elsewhere.
const ABSENCE: Duration = Duration::from_millis(50);
/// So much longer than a line its connection has brought something: the peer does not use the line.
const BYPASS_NANOS: u64 = 30 * MILLISECOND;

/// What an IPv4 and a UDP header take of a packet.
const PACKET_BYTES: usize = 28;

/// All lines of an engine.
pub struct Datagrams {
    congestion: congestion::Kind,
    sockets: Vec<Socket>,
    /// What peers put in front of what they send here.
    told: BTreeMap<u64, Told>,
    /// Doors that have been told, and are to be tried.
    doors: Vec<(Peer, Door)>,
    /// Lines that brought something in the receiving call under way.
    touched: Vec<(usize, bool)>,
    /// Answers to probes of that call.
    answers: Vec<(usize, Probe)>,
    /// The line of the last datagram.
    last: Option<(u64, SocketAddr, usize)>,
    /// Datagrams that were dropped: of no line, and spoilt.
    strange: u64,
    spoilt: u64,
}

/// A socket; without its link while that is in use.
struct Socket {
    ip: IpAddr,
    port: u16,
    link: Option<DatagramLink>,
    /// Peers that have frames for which it had no room.
    blocked: Vec<Peer>,
}

/// Whom a token was told, and for which socket.
struct Told {
    peer: Peer,
    socket: usize,
    lines: Vec<usize>,
    /// Something with it has come: the peer knows it.
    is_known: bool,
    /// Otherwise it is told again then, and after so long once more: a door may be lost, and may come before its connection.
    again: Time,
    pause: u64,
}

impl Told {
    fn new(peer: Peer, socket: usize) -> Self {
        let (lines, is_known, again) = (Vec::new(), false, Time(0));
        Self { peer, socket, lines, is_known, again, pause: TELL_NANOS_MIN }
    }

    /// Whether it is to be told now; it then counts as told.
    fn is_due(&mut self, now: Time) -> bool {
        let is_due = !self.is_known && now >= self.again && self.pause <= TELL_NANOS_MAX;
        if is_due {
            (self.again, self.pause) = (now.after(self.pause), self.pause * 2);
        }
        is_due
    }
}

/// One end of a path of datagrams.
pub struct Line {
    socket: usize,
    to: SocketAddr,
    /// The peer's token for us, and ours for it.
    token: u64,
    own_token: u64,
    congestion: congestion::Kind,
    /// It has been open.
    has_worked: bool,
    flow: Flow,
}

impl Datagrams {
    pub fn new(congestion: congestion::Kind) -> Self {
        Self {
            congestion,
            sockets: Vec::new(),
            told: BTreeMap::new(),
            doors: Vec::new(),
            touched: Vec::new(),
            answers: Vec::new(),
            last: None,
            strange: 0,
            spoilt: 0,
        }
    }

    /// Datagrams that were dropped: of no line, and spoilt.
    pub fn dropped(&self) -> (u64, u64) {
        (self.strange, self.spoilt)
    }

    /// Our token for `peer` at a socket; a new one if there is none.
    fn token_for(&mut self, peer: Peer, socket: usize) -> u64 {
        let mut all = self.told.iter();
        if let Some((&token, _)) = all.find(|(_, told)| (told.peer, told.socket) == (peer, socket))
        {
            return token;
        }
        loop {
            let token = u64::from_le_bytes(random());
            if token != 0 && !self.told.contains_key(&token) {
                self.told.insert(token, Told::new(peer, socket));
                return token;
            }
        }
    }
}

impl Line {
    pub fn is_open(&self) -> bool {
        self.flow.is_open()
    }

    pub fn socket(&self) -> usize {
        self.socket
    }

    pub fn is_doubted(&self) -> bool {
        self.flow.is_doubted()
    }

    /// What the path can do. Whole messages that fit into one datagram are copied; pieces of longer ones stay where they are.
    pub fn traits(&self, copy_max: u32) -> Path {
        let payload_max = self.payload_max();
        Path {
            payload_max,
            eager_max: payload_max,
            first_piece: payload_max,
            pull: false,
            window: u64::MAX,
            ahead: true,
            lossless: false,
            checked: true,
            copy_max: copy_max.min(payload_max - 1),
            spare: false,
            overtakes: true,
            silent: true,
            datagram: Some(self.congestion),
        }
    }

    /// Payload for which every datagram has room, whatever the frame's head.
    fn payload_max(&self) -> u32 {
        (self.flow.size() - TOKEN_BYTES - HEADER_BYTES - HEAD_BYTES_MAX - CHECK_BYTES) as u32
    }
}

impl Engine {
    fn datagrams(&mut self) -> &mut Datagrams {
        // Lines are made only while there is one.
        self.datagrams.as_mut().expect("datagrams are in use")
    }

    fn line(&mut self, id: usize) -> Option<(Peer, &mut Line)> {
        let link = self.links.get_mut(id)?.as_mut()?;
        let peer = link.peer?;
        match &mut link.carrier {
            Carrier::Datagram(line) => Some((peer, line)),
            _ => None,
        }
    }

    /// The lines of a peer.
    fn lines_of(&self, peer: Peer) -> Vec<usize> {
        let is_line =
            |link: &Link| link.peer == Some(peer) && matches!(link.carrier, Carrier::Datagram(_));
        let links = self.links.iter().enumerate();
        links.filter(|(_, link)| link.as_deref().is_some_and(is_line)).map(|(id, _)| id).collect()
    }

    /// A direct connection to `peer` is up: it is told where datagrams are taken at this end of it.
    pub(super) fn tell_datagram_door(&mut self, peer: Peer, link: usize) {
        if self.datagrams.is_none() {
            return;
        }
        let Some((own, _)) = self.links[link].as_ref().and_then(|link| link.ends) else {
            return;
        };
        match self.socket_at(own) {
            Ok(socket) => {
                let datagrams = self.datagrams();
                let token = datagrams.token_for(peer, socket);
                if let Some(told) = datagrams.told.get_mut(&token) {
                    (told.is_known, told.again, told.pause) = (false, Time(0), TELL_NANOS_MIN);
                }
                self.tell_doors_again();
            }
            Err(error) => log!(Warn, "no UDP at {own}: {error}"),
        }
    }

    /// Tells peers of our doors that they do not know, as far as we can see.
    fn tell_doors_again(&mut self) {
        let now = self.idle.time();
        let datagrams = self.datagrams.as_mut().expect("datagrams are in use");
        for (&token, told) in &mut datagrams.told {
            if told.is_due(now) {
                let Socket { ip, port, .. } = datagrams.sockets[told.socket];
                self.core.tell_door(told.peer, door_at(ip, port, token));
            }
        }
    }

    /// The number of the socket at a local address, which is opened if there is none.
    fn socket_at(&mut self, ip: IpAddr) -> io::Result<usize> {
        let datagrams = self.datagrams();
        if let Some(known) = datagrams.sockets.iter().position(|socket| socket.ip == ip) {
            return Ok(known);
        }
        let link = DatagramLink::bind(SocketAddr::new(ip, 0))?;
        let index = datagrams.sockets.len();
        let port = link.local_addr().port();
        watch(&self.epoll, link.fd(), Token::Datagrams(index), EventFlags::IN)?;
        let socket = Socket { ip, port, link: Some(link), blocked: Vec::new() };
        self.datagrams().sockets.push(socket);
        Ok(index)
    }

    /// `peer` takes datagrams at an address. Nothing is done yet: the connection that has said so is being read.
    pub(super) fn handle_datagram_door(&mut self, peer: Peer, door: &Door) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.doors.push((peer, *door));
        }
    }

    /// Makes lines to the doors that peers have told.
    #[inline]
    pub(super) fn open_lines(&mut self) {
        if self.datagrams.as_ref().is_some_and(|datagrams| !datagrams.doors.is_empty()) {
            for (peer, door) in std::mem::take(&mut self.datagrams().doors) {
                self.open_lines_to(peer, &door);
            }
        }
    }

    /// There is a line to a door from every address of ours that has a connection there.
    #[cold]
    fn open_lines_to(&mut self, peer: Peer, door: &Door) {
        let to = address_of(door);
        let routes = self.neighbours[peer.0 as usize].routes.clone();
        let ends = routes.iter().filter_map(|route| self.links[route.link].as_ref()?.ends);
        let mut locals: Vec<IpAddr> =
            ends.filter(|&(_, theirs)| theirs == to.ip()).map(|(own, _)| own).collect();
        locals.sort_unstable();
        locals.dedup();
        for own in locals {
            if let Err(error) = self.open_line(peer, own, to, door.token) {
                log!(Info, "{}: udp from {own} to {to}: {error}", self.core.address(peer));
            }
        }
    }

    fn open_line(&mut self, peer: Peer, own: IpAddr, to: SocketAddr, token: u64) -> io::Result<()> {
        let socket = self.socket_at(own)?;
        let now = self.idle.time();
        for id in self.lines_of(peer) {
            if let Some((_, line)) = self.line(id)
                && (line.socket, line.to.ip()) == (socket, to.ip())
            {
                (line.to, line.token) = (to, token);
                line.flow.shake(now);
                self.send_probes(id);
                return Ok(());
            }
        }
        let own_token = self.datagrams().token_for(peer, socket);
        let flow = Flow::new(now, DATAGRAM_BYTES_MAX);
        let congestion = self.datagrams().congestion;
        let has_worked = false;
        let line = Line { socket, to, token, own_token, congestion, has_worked, flow };
        let mut link = Link::new(Carrier::Datagram(Box::new(line)), Some(peer));
        (link.sum, link.ends, link.path) =
            (self.identity.integrity, Some((own, to.ip())), UNOPENED);
        let id = free_slot(&mut self.links);
        self.links[id] = Some(Box::new(link));
        if let Some(told) = self.datagrams().told.get_mut(&own_token) {
            told.lines.push(id);
        }
        self.send_probes(id);
        Ok(())
    }

    /// Whether link `id` may carry frames though it is not certain that they get through. Not a line that is doubted: there
    /// may be a better way.
    pub(super) fn may_carry(&self, id: usize) -> bool {
        let link = self.links[id].as_ref();
        link.is_none_or(|link| link.socket().is_none() || link.works())
    }

    /// No connection to `peer` shows whether it is still there: its lines are asked.
    pub(super) fn question_lines(&mut self, peer: Peer) {
        if self.datagrams.is_none() {
            return;
        }
        let now = self.idle.time();
        for id in self.lines_of(peer) {
            if let Some((_, line)) = self.line(id) {
                line.flow.question(now);
            }
        }
    }

    /// Line `id` is no more: its peer is gone.
    pub(super) fn forget_line(&mut self, id: usize, line: &Line) {
        let own_token = line.own_token;
        let datagrams = self.datagrams();
        datagrams.last = None;
        datagrams.touched.retain(|(touched, _)| *touched != id);
        datagrams.answers.retain(|&(line, _)| line != id);
        if let Some(told) = datagrams.told.get_mut(&own_token) {
            told.lines.retain(|&line| line != id);
        }
    }

    /// `peer` is gone: nothing is taken from it any more.
    pub(super) fn forget_tokens(&mut self, peer: Peer) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.told.retain(|_, told| told.peer != peer);
        }
    }

    /// Whether frames between these addresses go in datagrams: by a line that works, or has worked as long as another does.
    /// (What has silenced a line has probably silenced its connection, too, and that takes longer to be noticed.)
    pub(super) fn is_covered(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> bool {
        if self.datagrams.is_none() {
            return false;
        }
        let theirs = self.links.iter().flatten().filter(|link| link.peer == Some(peer));
        let lines = theirs.filter_map(|link| match &link.carrier {
            Carrier::Datagram(line) => Some((line, link.ends)),
            _ => None,
        });
        let (mut is_beside, mut some_work) = (false, false);
        for (line, between) in lines {
            is_beside |= between == ends && line.has_worked;
            some_work |= line.is_open() && !line.is_doubted();
        }
        is_beside && some_work
    }

    /// The core has something to do when its time has come.
    #[inline]
    pub(super) fn handle_time(&mut self) {
        let now = self.idle.time();
        self.core.set_time(now);
        self.do_what_is_due(now);
    }

    /// What the protocol has been waiting for, now that it is `now`.
    #[inline]
    pub(super) fn do_what_is_due(&mut self, now: Time) {
        if self.core.next_wake().is_some_and(|at| at <= now) {
            self.core.handle_time(now);
            self.drain_actions();
        }
    }

    /// Sends the probes of line `id` that are due.
    fn send_probes(&mut self, id: usize) {
        let (now, pause_max) = (self.idle.time(), self.identity.redial_max.as_nanos() as u64);
        while let Some((_, line)) = self.line(id) {
            let (socket, to, token) = (line.socket, line.to, line.token);
            let Some(probe) = line.flow.due_probe(now, pause_max) else {
                return;
            };
            self.send_probe(socket, to, probe, token, false);
        }
    }

    fn send_probe(
        &mut self,
        socket: usize,
        to: SocketAddr,
        probe: Probe,
        token: u64,
        is_answer: bool,
    ) {
        let front = probe.emit(token, is_answer);
        let size = if is_answer { front.len() } else { probe.size as usize };
        let Some(mut link) = self.datagrams().sockets[socket].link.take() else {
            return;
        };
        carry::push_probe(&mut link, to, &front, size);
        self.datagrams().sockets[socket].link = Some(link);
        self.handle_notices(socket);
    }

    /// An answer, or time, has changed what line `id` can do.
    fn handle_news(&mut self, id: usize, news: News) {
        let Some((peer, line)) = self.line(id) else {
            return;
        };
        let (to, size) = (line.to, line.flow.size());
        match news {
            News::Nothing => return,
            News::Opened => {
                if !self.open_route(peer, id) {
                    if let Some((_, line)) = self.line(id) {
                        line.flow.close(Time(u64::MAX));
                    }
                    return;
                }
                if let Some((_, line)) = self.line(id) {
                    line.has_worked = true;
                }
                log!(Info, "{}: udp to {to}", self.core.address(peer));
                if self.neighbours[peer.0 as usize].out != Out::Gone {
                    // Whatever is being dialled is dialled all the same: a line is no connection.
                    self.set_out(peer, Out::Up(id));
                }
            }
            News::Resized => {
                log!(Info, "{}: udp to {to}: datagrams of {size} bytes", self.core.address(peer));
            }
        }
        self.share_work(peer);
        self.drain_actions();
    }

    /// Line `id` works no more: what it carried goes by others, and it is tried anew.
    fn close_line(&mut self, id: usize, why: &'static str) {
        let Some((peer, _)) = self.line(id) else {
            return;
        };
        let ends = self.links[id].as_ref().and_then(|link| link.ends);
        let why = io::Error::new(io::ErrorKind::TimedOut, why);
        self.lose_route(peer, id, ends, &why);
        if let Some(link) = self.links[id].as_mut() {
            link.path = UNOPENED;
        }
    }

    /// Looks after all lines: probes that are due, silence. To be called every few milliseconds.
    #[cold]
    pub(super) fn check_datagrams(&mut self, gap: Duration) {
        self.open_lines();
        self.tell_doors_again();
        let (now, patience) = (self.idle.time(), self.identity.suspect_after.as_nanos() as u64);
        for id in 0..self.links.len() {
            let Some((peer, line)) = self.line(id) else {
                continue;
            };
            if gap > ABSENCE {
                line.flow.handle_absence(now);
            }
            let news = line.flow.expire(now);
            self.handle_news(id, news);
            self.look_for_swallowed(peer, id);
            let elsewhere = self.heard_elsewhere(peer, id);
            let is_bypassed = self.is_bypassed(peer, id, now);
            let Some((_, line)) = self.line(id) else {
                continue;
            };
            if is_bypassed && line.flow.doubt(now) {
                self.share_work(peer);
            }
            let Some((_, line)) = self.line(id) else {
                continue;
            };
            match line.flow.judge(now, patience, elsewhere) {
                Verdict::Fine => (),
                Verdict::Doubt => {
                    log!(Debug, "{}: udp is silent", self.core.address(peer));
                    self.share_work(peer);
                }
                Verdict::Lost => self.close_line(id, "nothing is heard any more"),
            }
            self.send_probes(id);
        }
    }

    /// Several of a line's largest datagrams in a row are lost: perhaps their size does not pass any more.
    fn look_for_swallowed(&mut self, peer: Peer, id: usize) {
        let Some(path) = self.links[id].as_ref().map(|link| link.path) else {
            return;
        };
        let lost = self.core.path_use(peer, path).map_or(0, |done| done.large_lost);
        if let Some((_, line)) = self.line(id).filter(|_| lost >= SWALLOWED) {
            line.flow.shake_size();
        }
    }

    /// Whether the peer sends over the connection beside line `id` and not by it: it does not trust the line.
    fn is_bypassed(&self, peer: Peer, id: usize, now: Time) -> bool {
        let Some(link) = self.links[id].as_ref() else {
            return false;
        };
        let is_beside =
            |it: &&Link| (it.peer, it.ends) == (Some(peer), link.ends) && it.is_stream();
        let links = self.links.iter().filter_map(Option::as_deref);
        let beside = links.filter(is_beside).map(|beside| beside.heard).max();
        beside.is_some_and(|heard| {
            let is_recent = now.nanos_since(heard) < 2 * BYPASS_NANOS;
            is_recent && heard.nanos_since(link.heard) > BYPASS_NANOS
        })
    }

    /// When something from `peer` came last by another link than `id`.
    fn heard_elsewhere(&self, peer: Peer, id: usize) -> Time {
        let links = self.links.iter().enumerate().filter(|&(other, _)| other != id);
        let theirs = links.filter_map(|(_, link)| link.as_ref()).filter(|l| l.peer == Some(peer));
        theirs.map(|link| link.heard).max().unwrap_or(Time(0))
    }

    /// What the kernel says about destinations. None of it is believed: the line is looked at.
    pub(super) fn handle_notices(&mut self, socket: usize) {
        let Some(link) = &mut self.datagrams().sockets[socket].link else {
            return;
        };
        let notices: Vec<Notice> = link.take_notices().collect();
        let now = self.idle.time();
        for notice in notices {
            for id in 0..self.links.len() {
                let Some((_, line)) = self.line(id) else {
                    continue;
                };
                if (line.socket, line.to) != (socket, notice.to) {
                    continue;
                }
                let news = match notice.trouble {
                    Trouble::TooLarge { size: 0, mtu } => {
                        let fits = mtu.unwrap_or(0) as usize;
                        let size = line.flow.size();
                        if fits < size + PACKET_BYTES {
                            line.flow.handle_too_large(now, size)
                        } else {
                            News::Nothing
                        }
                    }
                    Trouble::TooLarge { size, .. } => line.flow.handle_too_large(now, size),
                    Trouble::Suspect { .. } | Trouble::Crowded => News::Nothing,
                };
                self.handle_news(id, news);
            }
        }
    }

    /// Whether what this endpoint has sent may be lost when it ends.
    pub(super) fn has_lines(&self) -> bool {
        let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
        self.links.iter().flatten().any(|link| is_open(link))
    }
}

#[cfg(test)]
impl Engine {
    /// Where the first socket is, and a token that somebody was told for it.
    pub(super) fn door_for_tests(&mut self) -> (SocketAddr, u64) {
        let datagrams = self.datagrams();
        let (&token, told) = datagrams.told.first_key_value().expect("somebody was told");
        let socket = &datagrams.sockets[told.socket];
        (SocketAddr::new(socket.ip, socket.port), token)
    }

    /// The first line is found not to work, and is tried anew.
    pub(super) fn close_line_for_tests(&mut self) {
        let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
        let links = self.links.iter();
        let first = links.map(Option::as_deref).position(|link| link.is_some_and(is_open));
        let id = first.expect("a line");
        if let Some((_, line)) = self.line(id) {
            let now = Time(0);
            line.flow.close(now);
        }
        self.close_line(id, "a test");
    }

    /// Sends these bytes behind the right token by the first line; false if there is no line.
    pub(super) fn send_junk_for_tests(&mut self, bytes: &[u8]) -> bool {
        let lines = self.links.iter().filter_map(|link| match &link.as_ref()?.carrier {
            Carrier::Datagram(line) => Some((line.socket, line.to, line.token)),
            _ => None,
        });
        let Some((socket, to, token)) = lines.into_iter().next() else {
            return false;
        };
        let datagram = [&token.to_le_bytes()[..], bytes].concat();
        let link = self.datagrams().sockets[socket].link.as_mut().expect("a socket at rest");
        assert!(link.begin(to, datagram.len()));
        // SAFETY: no payload.
        unsafe { link.push(&datagram, &[]) && link.flush().is_ok() }
    }
}
