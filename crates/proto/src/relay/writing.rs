//! What a relay's outputs write, and which inputs may go on.

use super::*;

impl Relay {
    // ---- writing -----------------------------------------------------------------------

    /// The next output that has something new to write. Ends with `None` when all are dealt with.
    pub fn poll_flush(&mut self) -> Option<LinkId> {
        loop {
            if self.flush.is_empty() {
                self.queue_notices();
            }
            let link = self.flush.pop_front()?;
            if let Some(port) = &mut self.ports[link.0 as usize] {
                port.in_flush = false;
                return Some(link);
            }
        }
    }

    /// Whether the output may write: it is connected.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.ports.get(link.0 as usize).and_then(Option::as_ref).is_some_and(Port::is_up)
    }

    /// How many links write what waits for `link`: one, itself, unless it is that of a peer relay.
    pub fn writer_count(&self, link: LinkId) -> usize {
        match self.port(link).party {
            Party::Peer(_) => self.port(link).lanes.len(),
            _ => 1,
        }
    }

    /// The links that write what waits for `link`, each in turn the first.
    pub fn writer(&self, link: LinkId, number: usize) -> Option<LinkId> {
        let port = self.port(link);
        match port.party {
            Party::Peer(_) if port.lanes.is_empty() => None,
            Party::Peer(_) => Some(port.lanes[(port.turn + number) % port.lanes.len()]),
            _ => Some(link),
        }
    }

    /// Whether something waits that `link` can write.
    pub fn has_output(&self, link: LinkId) -> bool {
        let output = self.port(self.output_of(link));
        let waits = output.waiting_bytes() > 0 || output.is_direct;
        waits || !self.port(link).writer.rest.is_empty()
    }

    /// Where the frames wait that `link` writes: one that is retired writes none but its own rest.
    #[inline]
    fn output_of(&self, link: LinkId) -> LinkId {
        let port = self.port(link);
        match port.party {
            Party::Lane { peer, .. } if !port.is_retired => peer,
            _ => link,
        }
    }

    /// Whether frames are waiting whose time limit must be watched: call
    /// [`Relay::handle_time`] every second or so.
    pub fn needs_time(&self) -> bool {
        self.away > 0
    }

    /// Whether there are streams to other relays, which are to say regularly that they are alive.
    pub fn has_lanes(&self) -> bool {
        self.lanes > 0
    }

    /// What `link` is to write, in order: what it has begun, then the queue, then the pieces of
    /// `buffer` (the one last given to `handle_input`; empty if its pieces have been kept), then what it is told directly, of which
    /// there may be much more than it has room for.
    pub fn slices<'a>(&'a self, link: LinkId, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let output = self.port(self.output_of(link));
        let pieces = output.pieces.iter().map(|piece| &buffer[piece.at..piece.at + piece.length]);
        let direct = self.direct(output).map(|(_, frame)| frame);
        let own = output.queue.slices().chain(pieces);
        self.port(link).writer.rest.slices().chain(own).chain(direct)
    }

    /// Frames that an endpoint takes straight out of what is kept.
    fn direct(&self, output: &Port) -> impl Iterator<Item = (Header, &[u8])> {
        let history = match output.party {
            Party::Endpoint(address) if output.is_direct => {
                self.histories.as_ref().and_then(|histories| histories.all.get(&address))
            }
            _ => None,
        };
        history.into_iter().flat_map(History::direct)
    }

    /// Lengths of the frames in [`Relay::slices`]; of the first one, what is left.
    pub fn frame_lengths(&self, link: LinkId) -> impl Iterator<Item = usize> {
        let rest = Some(self.port(link).writer.rest.len()).filter(|length| *length > 0);
        let output = self.port(self.output_of(link));
        let direct = self.direct(output).map(|(_, frame)| frame.len());
        rest.into_iter().chain(output.frame_lengths()).chain(direct)
    }

    /// `link` has taken `bytes` bytes from the front of what it was to write.
    pub fn handle_sent(&mut self, link: LinkId, bytes: usize, buffer: &[u8]) {
        let output = self.output_of(link);
        let bound = self.bound(output);
        let mut writer = core::mem::take(&mut self.port_mut(link).writer);
        let begun = bytes.min(writer.rest.len());
        writer.rest.pop(&mut self.pool, begun);
        let Self { ports, pool, resume, owing, told, histories, .. } = self;
        let mut useless = None;
        if let Some(port) = &mut ports[output.0 as usize] {
            let own = (bytes - begun).min(port.own_bytes());
            port.send(pool, buffer, own, &mut writer);
            let direct = bytes - begun - own;
            if let (1.., Party::Endpoint(address), Some(histories)) =
                (direct, port.party, histories)
            {
                let what = histories.take_direct(address, direct, &mut writer, pool);
                port.note_told(what);
                useless = Some(address).filter(|_| what == Told::Useless);
            }
            if !port.line.is_empty() && !port.in_resume && port.waiting_bytes() <= bound / 2 {
                port.in_resume = true;
                resume.push_back(output);
            }
            if port.has_to_be_told() {
                port.in_told = true;
                told.push_back(output);
            }
            if !port.owed.is_empty() && !port.in_owing && port.waiting_bytes() <= bound {
                port.in_owing = true;
                owing.push_back(output);
            }
        }
        self.port_mut(link).writer = writer;
        self.advance_turn(link, output);
        if let Some(address) = useless {
            self.strand(output, address);
        }
    }

    /// Another lane writes first next time.
    fn advance_turn(&mut self, lane: LinkId, peer: LinkId) {
        let port = self.port_mut(peer);
        if let Some(at) = port.lanes.iter().position(|other| *other == lane) {
            port.turn = (at + 1) % port.lanes.len();
        }
    }

    /// Says over a lane how much has been taken in, unless its output is jammed.
    pub(super) fn give_sign(&mut self, lane: LinkId) {
        let now = self.now_millis;
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[lane.0 as usize] else { return };
        if port.writer.rest.len() > FRAME_BYTES_MAX {
            return;
        }
        let (source, target) = (Address::ANONYMOUS, Address::ANONYMOUS);
        let sign = Header { delivered: port.received, ..notice::empty(Kind::Ack, source, target) };
        let mut bytes = [0; HEADER_BYTES];
        sign.emit(&mut bytes);
        port.writer.rest.push(pool, &bytes);
        port.writer.record.skip(HEADER_BYTES);
        (port.told, port.told_at) = (port.received, now);
        self.touch(lane);
    }

    /// The output has not taken all of `buffer`, which may be used again afterwards: the rest is copied, or taken out of what is
    /// kept, if it is there.
    pub fn keep(&mut self, link: LinkId, buffer: &[u8]) {
        let Self { ports, pool, histories, .. } = self;
        let Some(port) = ports[link.0 as usize].as_mut().filter(|port| !port.pieces.is_empty())
        else {
            return;
        };
        if let (Some(histories), Party::Endpoint(address)) = (histories, port.party)
            && histories.fall_behind(address, port.pieces_bytes())
        {
            port.drop_pieces();
            port.note_told(Told::Direct);
            return;
        }
        port.keep(pool, buffer);
    }

    /// The next input whose turn it is: hand its rest to `handle_input` again, or read on if there
    /// is none.
    pub fn poll_resume(&mut self) -> Option<LinkId> {
        self.turn = None;
        while let Some(input) = self.released.pop_front() {
            // It may have left, or wait for another output by now.
            let port = self.ports[input.0 as usize].as_ref();
            if port.is_some_and(|port| port.waits_for.is_none()) {
                return Some(input);
            }
        }
        while let Some(output) = self.resume.front().copied() {
            match self.next_in_line(output) {
                Some(input) => {
                    // Outputs take turns too.
                    self.resume.rotate_left(1);
                    self.turn = Some((input, output));
                    self.port_mut(input).waits_for = None;
                    return Some(input);
                }
                None => {
                    self.resume.pop_front();
                    if let Some(port) = &mut self.ports[output.0 as usize] {
                        port.in_resume = false;
                    }
                }
            }
        }
        None
    }

    /// Who waits for `output`, if there is room. It may have left since it was said that there is.
    fn next_in_line(&mut self, output: LinkId) -> Option<LinkId> {
        self.ports[output.0 as usize].as_ref()?;
        let bound = self.bound(output);
        let port = self.port_mut(output);
        if port.waiting_bytes() < bound { port.line.pop_front() } else { None }
    }

    // ---- lines -------------------------------------------------------------------------

    pub(super) fn join_line(&mut self, from: LinkId, to: LinkId) {
        self.counters.pauses += 1;
        self.port_mut(from).waits_for = Some(to);
        self.port_mut(to).line.push_back(from);
        // The output may be idle already: then nobody else would move its line.
        let bound = self.bound(to);
        let port = self.port_mut(to);
        if !port.in_resume && port.waiting_bytes() < bound {
            port.in_resume = true;
            self.resume.push_back(to);
        }
    }

    /// `link` waits no longer.
    pub(super) fn leave_line(&mut self, link: LinkId) {
        self.leave_disk(link);
        if let Some(output) = self.port_mut(link).waits_for.take() {
            self.port_mut(output).line.retain(|waiter| *waiter != link);
        }
    }

    /// Whoever waits for `link` finds out what has become of it.
    pub(super) fn release_line(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if port.is_up() {
            if !port.line.is_empty() && !port.in_resume {
                port.in_resume = true;
                self.resume.push_back(link);
            }
            return;
        }
        // Each one's next frame will be turned back; a port without queue lets them all pass.
        for waiter in core::mem::take(&mut port.line) {
            self.port_mut(waiter).waits_for = None;
            self.released.push_back(waiter);
        }
    }
}
