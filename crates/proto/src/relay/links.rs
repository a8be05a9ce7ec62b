//! Links of a relay come and go, and time passes.

use super::*;
use port::OWED_MAX;

impl Relay {
    // ---- endpoints come and go -----------------------------------------------------------

    /// An endpoint of the own cluster has attached, or is back. Frames that waited for it are in its
    /// queue.
    ///
    /// # Errors
    /// If it does not belong here, is attached already ([`Relay::suspend`] or [`Relay::detach`] the
    /// older link first), or a later start of it has been here.
    pub fn attach(&mut self, address: Address, incarnation: u32) -> Result<LinkId, &'static str> {
        self.attach_at(address, incarnation, Standing::default())
    }

    /// As [`Relay::attach`], for one that stands somewhere in what was recorded. If that was too much to be kept, and it is not
    /// another start of it, it is recorded again from there on.
    ///
    /// # Errors
    /// As there, and if that is no place where it can stand.
    pub fn attach_at(
        &mut self,
        address: Address,
        incarnation: u32,
        standing: Standing,
    ) -> Result<LinkId, &'static str> {
        if address == Address::ANONYMOUS || self.cluster_of(address).is_none() {
            return Err("no process of the job has its address");
        }
        if self.cluster_of(address) != Some(self.table.own()) {
            return Err("its process belongs to another cluster");
        }
        let mut link = None;
        // Of one that has never been here nothing has been taken in.
        let is_image = standing != Standing::default();
        let mut may_begin_anew = incarnation == 0 && !is_image;
        if let Route::Link(known) = self.table.route(address) {
            let port = self.port(known);
            match port.incarnation {
                _ if port.is_up() => return Err("its address is attached already"),
                Some(last) if last > incarnation => return Err("it has been started anew since"),
                // What waits there is for an earlier start.
                Some(last) if last < incarnation && !self.is_recovering() => self.detach(known),
                last => {
                    link = Some(known);
                    may_begin_anew &= last.is_none();
                    // The same start comes again only from where it stood for its image, be that the beginning.
                    may_begin_anew |= last == Some(incarnation);
                }
            }
        }
        let (mut mark, mut is_anew) = (Mark::default(), false);
        if let Some(histories) = &mut self.histories {
            is_anew = may_begin_anew && histories.begin_anew(address, standing);
            let refusal = histories.refusal(address).filter(|_| incarnation > 0 || is_image);
            if let Some(why) = refusal {
                return Err(why);
            }
            mark = histories.mark_at(address, standing)?;
            histories.trim(address, standing.kept);
        }
        let since = self.now_millis;
        let link =
            link.unwrap_or_else(|| self.open_port(Party::Endpoint(address), State::Away { since }));
        self.table.set_endpoint(address, Some(link));
        self.port_mut(link).incarnation = Some(incarnation);
        self.replay(link, mark, is_anew);
        self.come_back(link);
        Ok(link)
    }

    /// Whether an endpoint whose link has ended may come back: it has not taken leave of anybody.
    pub fn may_return(&self, link: LinkId) -> bool {
        !self.port(link).has_said_goodbye
    }

    /// An endpoint's link has broken: frames wait for it to come back.
    pub fn suspend(&mut self, link: LinkId) {
        self.leave_line(link);
        self.stop_telling(link);
        let since = self.now_millis;
        self.set_state(link, State::Away { since });
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        port.writer.rest.pop(pool, port.writer.rest.len());
        let mut open = core::mem::take(&mut port.writer.record).open();
        port.is_heard_out = false;
        if self.is_recorded(link) {
            // Its next start is given all of it again, what was owed to it too; sources hear only if there is none.
            open.retain(|entry| entry.channel().is_some());
        }
        self.lose(link, open);
        self.release_line(link);
    }

    /// Whether all that the endpoint at `link` is given is kept for its next start.
    fn is_recorded(&self, link: LinkId) -> bool {
        let Party::Endpoint(address) = self.port(link).party else { return false };
        self.histories.as_ref().is_some_and(|all| all.refusal(address).is_none())
    }

    /// An endpoint is gone: what waits for it becomes unreachable, and, unless it has taken leave, so
    /// does what was written to it lately.
    pub fn detach(&mut self, link: LinkId) {
        let Party::Endpoint(address) = self.port(link).party else { return };
        self.leave_line(link);
        self.stop_telling(link);
        self.set_state(link, State::Lost);
        if self.may_return(link) {
            let open = core::mem::take(&mut self.port_mut(link).writer.record).open();
            self.lose(link, open);
        }
        self.give_up_queue(link);
        self.table.set_endpoint(address, None);
        self.release_line(link);
        self.ports[link.0 as usize] = None;
        self.free.push(link);
    }

    // ---- peer relays come and go ---------------------------------------------------------

    /// A stream to the peer relay of `peer` is up. `incarnation` differs for each start of it.
    ///
    /// # Errors
    /// If there are [`LANES_MAX`] streams, or streams to another start of it ([`Relay::disconnect`]
    /// them first).
    pub fn connect(&mut self, peer: LinkId, incarnation: u32) -> Result<Reunion, &'static str> {
        let port = self.port(peer);
        let Party::Peer(cluster) = port.party else { return Err("it is no relay") };
        let is_known = port.incarnation == Some(incarnation);
        if port.lanes.len() >= LANES_MAX {
            return Err("there are too many streams to it");
        }
        if port.is_up() && !is_known {
            return Err("there are streams to another start of it");
        }
        let lane = self.open_port(Party::Lane { peer, cluster }, State::Up);
        self.lanes += 1;
        self.port_mut(lane).told_at = self.now_millis;
        let port = self.port_mut(peer);
        port.lanes.push(lane);
        port.incarnation = Some(incarnation);
        let is_first = !port.is_up();
        let mut channels = 0;
        if is_first {
            // What an earlier start of it has taken in may have ended with it.
            if !is_known {
                port.lost.append(&mut port.history);
            }
            channels = port.lost.len();
            self.come_back(peer);
        }
        self.touch(peer);
        Ok(Reunion { lane, is_first, channels })
    }

    /// Another stream takes the place of `lane`, which is well: it finishes the frame that it has begun, and takes nothing
    /// new. What is under way to here still arrives by it.
    pub fn retire(&mut self, lane: LinkId) {
        let Party::Lane { peer, .. } = self.port(lane).party else { return };
        self.port_mut(lane).is_retired = true;
        self.port_mut(peer).lanes.retain(|other| *other != lane);
    }

    /// Whether all that `lane` was given has been taken in at its other end, as far as that has said so.
    pub fn is_settled(&self, lane: LinkId) -> bool {
        let writer = &self.port(lane).writer;
        writer.rest.is_empty() && writer.record.open_bytes() == 0
    }

    /// A stream to a peer relay is down. What was under way on it is lost; what waits goes by the
    /// others, or waits on for a while.
    pub fn disconnect(&mut self, lane: LinkId) {
        let Party::Lane { peer, .. } = self.port(lane).party else { return };
        self.leave_line(lane);
        let Some(mut gone) = self.ports[lane.0 as usize].take() else { return };
        gone.writer.rest.pop(&mut self.pool, gone.writer.rest.len());
        self.free.push(lane);
        self.lanes -= 1;
        self.counters.lost_bytes += gone.writer.record.open_bytes();
        let recent = gone.writer.record.recent().into_iter().filter_map(Entry::channel);
        let port = self.port_mut(peer);
        port.lanes.retain(|other| *other != lane);
        let room = OWED_MAX.saturating_sub(port.history.len());
        port.history.extend(recent.take(room));
        let is_last = port.lanes.is_empty();
        self.lose(peer, gone.writer.record.open());
        if is_last {
            let since = self.now_millis;
            self.set_state(peer, State::Away { since });
            self.release_line(peer);
        } else {
            self.tell_losses(peer);
        }
    }

    // ---- time --------------------------------------------------------------------------

    /// Tells the time, in milliseconds from any fixed start, and gives up what has waited too long.
    pub fn handle_time(&mut self, now_millis: u64) {
        self.now_millis = now_millis;
        if !self.needs_time() && !self.has_lanes() {
            return;
        }
        for number in 0..self.ports.len() {
            let link = LinkId(number as u32);
            let Some(port) = &self.ports[number] else { continue };
            if self.is_late(port) {
                self.give_up(link);
            } else if matches!(port.party, Party::Lane { .. })
                && now_millis.saturating_sub(port.told_at) >= SIGN_MILLIS
            {
                self.give_sign(link);
            }
        }
    }

    fn is_late(&self, port: &Port) -> bool {
        let State::Away { since } = port.state else { return false };
        let patience = match port.party {
            Party::Endpoint(_) if self.is_recovering() => {
                self.endpoint_away_millis.max(RETURN_MILLIS_MAX)
            }
            Party::Endpoint(_) if port.incarnation.is_none() => ATTACH_MILLIS_MAX,
            Party::Endpoint(_) => self.endpoint_away_millis,
            _ => self.endpoint_away_millis.max(PEER_AWAY_MILLIS_MAX),
        };
        self.now_millis.saturating_sub(since) > patience
    }

    fn give_up(&mut self, link: LinkId) {
        match self.port(link).party {
            Party::Endpoint(address) => {
                let has_been = self.port(link).incarnation.is_some();
                if let Some(histories) = self.histories.as_mut().filter(|_| has_been) {
                    histories.give_up(address, "it was away for too long, and has been given up");
                }
                self.detach(link);
            }
            _ => {
                self.set_state(link, State::Lost);
                self.give_up_queue(link);
                self.release_line(link);
            }
        }
    }

    // ---- ports -------------------------------------------------------------------------

    pub(super) fn open_port(&mut self, party: Party, state: State) -> LinkId {
        let port = Port::new(party, state);
        self.away += matches!(state, State::Away { .. }) as usize;
        if let Some(link) = self.free.pop() {
            self.ports[link.0 as usize] = Some(port);
            return link;
        }
        self.ports.push(Some(port));
        LinkId(self.ports.len() as u32 - 1)
    }

    pub(super) fn set_state(&mut self, link: LinkId, state: State) {
        let before = core::mem::replace(&mut self.port_mut(link).state, state);
        self.away -= matches!(before, State::Away { .. }) as usize;
        self.away += matches!(state, State::Away { .. }) as usize;
    }

    /// The other side is there again: it gets what waits for it, and sources hear what it will not get.
    fn come_back(&mut self, link: LinkId) {
        self.set_state(link, State::Up);
        self.tell_losses(link);
        self.touch(link);
        self.release_line(link);
    }
}
