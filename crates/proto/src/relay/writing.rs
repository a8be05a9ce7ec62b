//! What a relay's outputs write, and which inputs may go on.

use super::*;

impl Relay {
    // ---- writing -----------------------------------------------------------------------

    /// The next output that has something new to write. Ends with `None` when all are dealt with.
    pub fn poll_flush(&mut self) -> Option<LinkId> {
        loop {
            if self.flush.is_empty() {
                self.queue_reports();
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
        match self.port(link).kind {
            PortKind::Peer(_) => self.port(link).streams.len(),
            _ => 1,
        }
    }

    /// The links that write what waits for `link`, each in turn the first.
    pub fn writer(&self, link: LinkId, number: usize) -> Option<LinkId> {
        let port = self.port(link);
        match port.kind {
            PortKind::Peer(_) if port.streams.is_empty() => None,
            PortKind::Peer(_) => Some(port.streams[(port.turn + number) % port.streams.len()]),
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
        match port.kind {
            PortKind::Stream { peer, .. } if !port.is_retired => peer,
            _ => link,
        }
    }

    /// Whether frames are waiting whose time limit must be watched: call
    /// [`Relay::handle_time`] every second or so.
    pub fn needs_time(&self) -> bool {
        self.disconnected_ports > 0
    }

    /// Whether there are streams to other relays, which are to say regularly that they are alive.
    pub fn has_streams(&self) -> bool {
        self.streams > 0
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
        let log = match output.kind {
            PortKind::Endpoint(address) if output.is_direct => {
                self.logs.as_ref().and_then(|logs| logs.all.get(&address))
            }
            _ => None,
        };
        log.into_iter().flat_map(MessageLog::direct)
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
        let Self { ports, pool, resume, ports_with_reports, replaying, logs, .. } = self;
        let mut useless = None;
        if let Some(port) = &mut ports[output.0 as usize] {
            let own = (bytes - begun).min(port.own_bytes());
            port.send(pool, buffer, own, &mut writer);
            let direct = bytes - begun - own;
            if let (1.., PortKind::Endpoint(address), Some(logs)) = (direct, port.kind, logs) {
                let what = logs.consume_direct(address, direct, &mut writer, pool);
                port.set_replay_state(what);
                useless = Some(address).filter(|_| what == ReplayState::Unreadable);
            }
            if !port.waiting_inputs.is_empty()
                && !port.in_resume
                && port.waiting_bytes() <= bound / 2
            {
                port.in_resume = true;
                resume.push_back(output);
            }
            if port.needs_replay() {
                port.in_replay_queue = true;
                replaying.push_back(output);
            }
            if !port.pending_reports.is_empty()
                && !port.in_report_queue
                && port.waiting_bytes() <= bound
            {
                port.in_report_queue = true;
                ports_with_reports.push_back(output);
            }
        }
        self.port_mut(link).writer = writer;
        self.advance_turn(link, output);
        if let Some(address) = useless {
            self.fail_replay(output, address);
        }
    }

    /// Another stream writes first next time.
    fn advance_turn(&mut self, stream: LinkId, peer: LinkId) {
        let port = self.port_mut(peer);
        if let Some(at) = port.streams.iter().position(|other| *other == stream) {
            port.turn = (at + 1) % port.streams.len();
        }
    }

    /// Says over a stream how much has been taken in, unless its output is jammed.
    pub(super) fn send_keepalive(&mut self, stream: LinkId) {
        let now = self.now_millis;
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[stream.0 as usize] else { return };
        if port.writer.rest.len() > FRAME_BYTES_MAX {
            return;
        }
        let (source, target) = (Address::ANONYMOUS, Address::ANONYMOUS);
        let keepalive =
            Header { delivered: port.received, ..undeliverable::empty(Kind::Ack, source, target) };
        let mut bytes = [0; HEADER_BYTES];
        keepalive.emit(&mut bytes);
        port.writer.rest.push(pool, &bytes);
        port.writer.recent_channels.skip(HEADER_BYTES);
        (port.acknowledged, port.acknowledged_at) = (port.received, now);
        self.touch(stream);
    }

    /// The output has not taken all of `buffer`, which may be used again afterwards: the rest is copied, or taken out of what is
    /// kept, if it is there.
    pub fn keep(&mut self, link: LinkId, buffer: &[u8]) {
        let Self { ports, pool, logs, .. } = self;
        let Some(port) = ports[link.0 as usize].as_mut().filter(|port| !port.pieces.is_empty())
        else {
            return;
        };
        if let (Some(logs), PortKind::Endpoint(address)) = (logs, port.kind)
            && logs.begin_backlog(address, port.pieces_bytes())
        {
            port.drop_pieces();
            port.set_replay_state(ReplayState::Direct);
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
            match self.next_waiting_input(output) {
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
    fn next_waiting_input(&mut self, output: LinkId) -> Option<LinkId> {
        self.ports[output.0 as usize].as_ref()?;
        let bound = self.bound(output);
        let port = self.port_mut(output);
        if port.waiting_bytes() < bound { port.waiting_inputs.pop_front() } else { None }
    }

    // ---- lines -------------------------------------------------------------------------

    pub(super) fn enqueue_input(&mut self, from: LinkId, to: LinkId) {
        self.counters.pauses += 1;
        self.port_mut(from).waits_for = Some(to);
        self.port_mut(to).waiting_inputs.push_back(from);
        // The output may be idle already: then nobody else would move its line.
        let bound = self.bound(to);
        let port = self.port_mut(to);
        if !port.in_resume && port.waiting_bytes() < bound {
            port.in_resume = true;
            self.resume.push_back(to);
        }
    }

    /// `link` waits no longer.
    pub(super) fn dequeue_input(&mut self, link: LinkId) {
        self.stop_waiting_for_disk(link);
        if let Some(output) = self.port_mut(link).waits_for.take() {
            self.port_mut(output).waiting_inputs.retain(|waiter| *waiter != link);
        }
    }

    /// Whoever waits for `link` finds out what has become of it.
    pub(super) fn release_waiting_inputs(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if port.is_up() {
            if !port.waiting_inputs.is_empty() && !port.in_resume {
                port.in_resume = true;
                self.resume.push_back(link);
            }
            return;
        }
        // Each one's next frame will be turned back; a port without queue lets them all pass.
        for waiter in core::mem::take(&mut port.waiting_inputs) {
            self.port_mut(waiter).waits_for = None;
            self.released.push_back(waiter);
        }
    }
}
