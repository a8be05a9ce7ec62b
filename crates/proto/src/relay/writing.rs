//! The bytes that a relay's outputs write, and the inputs that may resume.

use super::*;

impl Relay {
    // ---- writing -----------------------------------------------------------------------

    /// The next output that has something new to write. `None`: all outputs have been returned.
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

    /// Whether the output is connected, so that it may write.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.ports.get(link.0 as usize).and_then(Option::as_ref).is_some_and(Port::is_up)
    }

    /// Number of links that write the frames waiting for `link`: the number of streams for the port
    /// of a peer relay, and 1 for any other link.
    pub fn writer_count(&self, link: LinkId) -> usize {
        match self.port(link).kind {
            PortKind::Peer(_) => self.port(link).streams.len(),
            _ => 1,
        }
    }

    /// The links that write the frames waiting for `link`, by `number` from 0. The streams of a
    /// peer relay take turns in being the first.
    pub fn writer(&self, link: LinkId, number: usize) -> Option<LinkId> {
        let port = self.port(link);
        match port.kind {
            PortKind::Peer(_) if port.streams.is_empty() => None,
            PortKind::Peer(_) => Some(port.streams[(port.turn + number) % port.streams.len()]),
            _ => Some(link),
        }
    }

    /// Whether anything waits that `link` can write.
    pub fn has_output(&self, link: LinkId) -> bool {
        let output = self.port(self.output_of(link));
        let waits = output.waiting_bytes() > 0 || output.is_direct;
        waits || !self.port(link).writer.rest.is_empty()
    }

    /// The port whose frames `link` writes. A retired stream writes only the rest of its own frame.
    #[inline]
    fn output_of(&self, link: LinkId) -> LinkId {
        let port = self.port(link);
        match port.kind {
            PortKind::Stream { peer, .. } if !port.is_retired => peer,
            _ => link,
        }
    }

    /// Whether frames wait whose time limit must be checked: call [`Relay::handle_time`] once a
    /// second.
    pub fn needs_time(&self) -> bool {
        self.disconnected_ports > 0
    }

    /// Whether there are streams to peer relays, which send keepalives regularly.
    pub fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// The bytes that `link` is to write, in order: the rest of a begun frame, then the queue, then
    /// the pieces of `buffer` (the buffer last given to `handle_input`; empty if its pieces have
    /// been kept), then the frames of direct replay, which may be far more than the link has
    /// capacity for.
    pub fn slices<'a>(&'a self, link: LinkId, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let output = self.port(self.output_of(link));
        let pieces = output.pieces.iter().map(|piece| &buffer[piece.at..piece.at + piece.length]);
        let direct = self.direct(output).map(|(_, frame)| frame);
        let own = output.queue.slices().chain(pieces);
        self.port(link).writer.rest.slices().chain(own).chain(direct)
    }

    /// Frames of direct replay, which the link writes straight out of the message log.
    fn direct(&self, output: &Port) -> impl Iterator<Item = (Header, &[u8])> {
        let log = match output.kind {
            PortKind::Endpoint(address) if output.is_direct => {
                self.logs.as_ref().and_then(|logs| logs.all.get(&address))
            }
            _ => None,
        };
        log.into_iter().flat_map(MessageLog::direct)
    }

    /// Lengths of the frames in [`Relay::slices`]; the first length is that of the rest of a begun
    /// frame.
    pub fn frame_lengths(&self, link: LinkId) -> impl Iterator<Item = usize> {
        let rest = Some(self.port(link).writer.rest.len()).filter(|length| *length > 0);
        let output = self.port(self.output_of(link));
        let direct = self.direct(output).map(|(_, frame)| frame.len());
        rest.into_iter().chain(output.frame_lengths()).chain(direct)
    }

    /// Accounts for the `bytes` bytes that `link` has written from the front of [`Relay::slices`].
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

    /// Lets the stream after `stream` write first next time.
    fn advance_turn(&mut self, stream: LinkId, peer: LinkId) {
        let port = self.port_mut(peer);
        if let Some(at) = port.streams.iter().position(|other| *other == stream) {
            port.turn = (at + 1) % port.streams.len();
        }
    }

    /// Sends a keepalive with the number of received bytes on a stream, unless more than a frame
    /// still waits there.
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

    /// Keeps what the output has not taken of `buffer`, so that the buffer may be used again: the
    /// frames are sent from the message log if the log holds them, and are copied into the queue
    /// otherwise.
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

    /// The next input that may resume: hand the rest of its buffer to `handle_input` again, or read
    /// more if there is no rest.
    pub fn poll_resume(&mut self) -> Option<LinkId> {
        self.turn = None;
        while let Some(input) = self.released.pop_front() {
            // The input may have disconnected, or wait for another output by now.
            let port = self.ports[input.0 as usize].as_ref();
            if port.is_some_and(|port| port.waits_for.is_none()) {
                return Some(input);
            }
        }
        while let Some(output) = self.resume.front().copied() {
            match self.next_waiting_input(output) {
                Some(input) => {
                    // Outputs take turns as well.
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

    /// The next input that waits for `output`, if the output has capacity. The output may have
    /// disconnected since it was put into the list.
    fn next_waiting_input(&mut self, output: LinkId) -> Option<LinkId> {
        self.ports[output.0 as usize].as_ref()?;
        let bound = self.bound(output);
        let port = self.port_mut(output);
        if port.waiting_bytes() < bound { port.waiting_inputs.pop_front() } else { None }
    }

    // ---- waiting inputs ----------------------------------------------------------------

    pub(super) fn enqueue_input(&mut self, from: LinkId, to: LinkId) {
        self.counters.pauses += 1;
        self.port_mut(from).waits_for = Some(to);
        self.port_mut(to).waiting_inputs.push_back(from);
        // The output may be idle already, and then nothing else would resume its waiting inputs.
        let bound = self.bound(to);
        let port = self.port_mut(to);
        if !port.in_resume && port.waiting_bytes() < bound {
            port.in_resume = true;
            self.resume.push_back(to);
        }
    }

    /// Removes `link` from all lists of waiting inputs.
    pub(super) fn dequeue_input(&mut self, link: LinkId) {
        self.stop_waiting_for_disk(link);
        if let Some(output) = self.port_mut(link).waits_for.take() {
            self.port_mut(output).waiting_inputs.retain(|waiter| *waiter != link);
        }
    }

    /// Lets the inputs that wait for `link` resume, if its state allows.
    pub(super) fn release_waiting_inputs(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if port.is_up() {
            if !port.waiting_inputs.is_empty() && !port.in_resume {
                port.in_resume = true;
                self.resume.push_back(link);
            }
            return;
        }
        // A disconnected port makes no input wait: the next frame of each input is queued, dropped
        // as lost, or reported as unreachable.
        for waiter in core::mem::take(&mut port.waiting_inputs) {
            self.port_mut(waiter).waits_for = None;
            self.released.push_back(waiter);
        }
    }
}
