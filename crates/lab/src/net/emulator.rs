//! All links of a lab in one emulator: packets from devices enter, and packets for devices leave
//! when they are due.
//!
//! In: `handle_packet(now, device, packet)`. Out: `poll_output(now)` until `None`, and
//! `next_output()`, the time of the next output. The emulator does no I/O and has no clock. A
//! packet follows a link path: the links that it crosses and the device by which it leaves. A
//! packet without a link path from its device is counted and dropped. Packets from one device with
//! the same link path leave in the order in which the links deliver them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::Ipv4Addr;

use super::link::{Arrival, Counts, Fate, Link, Nanos, Shape, seed_of};
use super::packet::Packet;
use super::plan::{Plan, Subnet};

/// The position in the plan of a device of the emulator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// The WAN interface of a site's gateway.
    Wan { site: usize },
    /// The interface of a machine on an emulated rail; machines are numbered as in
    /// `Site::machines`.
    Lan { site: usize, rail: usize, machine: usize },
}

/// The links of a lab and all packets under way.
pub struct Emulator {
    links: Vec<NamedLink>,
    link_paths: Vec<LinkPath>,
    /// The routes of each device, by destination.
    routes: Vec<Routes>,
    in_flight: BinaryHeap<Reverse<ScheduledPacket>>,
    /// Number of packets scheduled so far, by which packets with equal times keep their order.
    scheduled: u64,
    unroutable: u64,
}

struct NamedLink {
    name: String,
    /// For a link of a rail: the name of the rail, and whether the link leads up to the rail's
    /// switch.
    rail: Option<(String, bool)>,
    link: Link,
    /// The shape that the lab file gives.
    original: Shape,
    /// Number of times that the link has been cut: packets of an earlier epoch are lost.
    epoch: u32,
}

struct LinkPath {
    links: Vec<usize>,
    exit: usize,
}

#[derive(Default)]
struct Routes {
    hosts: BTreeMap<Ipv4Addr, usize>,
    subnets: Vec<(Subnet, usize)>,
}

/// A packet between two links, or between the last link and the device.
struct ScheduledPacket {
    at: Nanos,
    order: u64,
    began: Nanos,
    /// The link that the packet leaves.
    step: Hop,
    epoch: u32,
    packet: Packet,
}

/// A position on a link path: the number of the path, and the index of the link in the path.
#[derive(Clone, Copy)]
struct Hop {
    link_path: usize,
    hop: usize,
}

/// Segments of one packet that arrive one after the other, beginning with number `first`.
struct SegmentRun {
    first: usize,
    /// Arrival of the last segment; `began` is that of the first segment.
    arrival: Arrival,
}

impl Emulator {
    /// The emulator of a plan, and the devices that it needs, in the order of their numbers.
    pub fn new(plan: &Plan) -> (Emulator, Vec<Port>) {
        let ports = ports_of(plan);
        let mut emulator = Emulator {
            links: Vec::new(),
            link_paths: Vec::new(),
            routes: ports.iter().map(|_| Routes::default()).collect(),
            in_flight: BinaryHeap::new(),
            scheduled: 0,
            unroutable: 0,
        };
        for link in &plan.links {
            let [a, b] = link.ends;
            emulator.add_wan_direction(plan, [a, b], &link.shapes[0]);
            emulator.add_wan_direction(plan, [b, a], &link.shapes[1]);
        }
        for site in 0..plan.sites.len() {
            for rail in 0..plan.sites[site].rails.len() {
                emulator.add_rail(plan, site, rail, &ports);
            }
        }
        (emulator, ports)
    }

    /// Handles a packet from a device.
    pub fn handle_packet(&mut self, now: Nanos, device: usize, packet: Packet) {
        let way = packet.destination().and_then(|to| self.routes[device].find(to));
        match way {
            Some(way) => self.send(now, now, Hop { link_path: way, hop: 0 }, packet),
            None => self.unroutable += 1,
        }
    }

    /// The next packet that is due by `now`, with its device.
    pub fn poll_output(&mut self, now: Nanos) -> Option<(usize, Packet)> {
        while self.next_output()? <= now {
            // `next_output` has checked that a packet is scheduled.
            let Reverse(scheduled_packet) = self.in_flight.pop()?;
            let Hop { link_path: number, hop } = scheduled_packet.step;
            let way = &self.link_paths[number];
            if self.links[way.links[hop]].epoch != scheduled_packet.epoch {
                continue;
            }
            if hop + 1 == way.links.len() {
                return Some((way.exit, scheduled_packet.packet));
            }
            // The next link gets `scheduled_packet.at`, not `now`, so that delays of the caller do
            // not add up over links.
            let next = Hop { link_path: number, hop: hop + 1 };
            self.send(scheduled_packet.at, scheduled_packet.began, next, scheduled_packet.packet);
        }
        None
    }

    /// Time of the next output of `poll_output`, if no further packet enters.
    pub fn next_output(&self) -> Option<Nanos> {
        self.in_flight.peek().map(|Reverse(scheduled_packet)| scheduled_packet.at)
    }

    /// Number of packets under way; the segments of one TCP burst count as one packet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Every direction of every link: name such as `north>south`, shape, and counters.
    pub fn links(&self) -> impl Iterator<Item = (&str, &Shape, Counts)> {
        self.links
            .iter()
            .map(|named| (named.name.as_str(), named.link.shape(), named.link.counts()))
    }

    /// The directions that `link` names: `a>b` for one direction, `a-b` for both directions,
    /// `north-LAN1` for all links of a rail. The flag of each direction says whether it leads up to
    /// a rail's switch: random faults and delay of a rail apply only on the links down from the
    /// switch.
    pub fn directions(&self, link: &str) -> Vec<(String, bool)> {
        let of_rail = |named: &NamedLink| match &named.rail {
            Some((rail, is_up)) if rail == link => Some(*is_up),
            _ => means(link, &named.name).then_some(false),
        };
        let found = self.links.iter().map(|named| Some((named.name.clone(), of_rail(named)?)));
        found.flatten().collect()
    }

    /// Names of all links: rails first, then each link by one name for both its directions.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (rail, _) in self.links.iter().filter_map(|named| named.rail.as_ref()) {
            if !names.contains(rail) {
                names.push(rail.clone());
            }
        }
        for named in &self.links {
            if !names.iter().any(|name| means(name, &named.name)) {
                names.push(named.name.replacen('>', "-", 1));
            }
        }
        names
    }

    /// A direction's shape in the lab file, by name.
    pub fn original(&self, direction: &str) -> Option<&Shape> {
        let named = self.links.iter().find(|named| named.name == direction)?;
        Some(&named.original)
    }

    /// Number of packets dropped because they had no link path.
    pub fn unroutable(&self) -> u64 {
        self.unroutable
    }

    /// Changes a direction by name; returns false if the direction does not exist. Taking a
    /// direction down loses the packets on it.
    pub fn reshape(&mut self, direction: &str, change: impl FnOnce(Shape) -> Shape) -> bool {
        let Some(named) = self.links.iter_mut().find(|named| named.name == direction) else {
            return false;
        };
        let shape = change(named.link.shape().clone());
        named.epoch += u32::from(shape.down && !named.link.shape().down);
        named.link.reshape(shape);
        true
    }

    /// Passes a packet to link `hop` of its path. If the link treats packets separately, each
    /// segment is offered separately; adjacent segments without faults stay together in one packet.
    fn send(&mut self, now: Nanos, began: Nanos, step: Hop, packet: Packet) {
        let link = &mut self.links[self.link_paths[step.link_path].links[step.hop]].link;
        let bytes = packet.wire_bytes();
        if !link.shape().is_per_packet() && link.has_room(now, bytes) {
            let fate = link.handle_packet(now, began, bytes);
            return self.deliver(fate, step, packet);
        }
        let mut run: Option<SegmentRun> = None;
        for index in 0..packet.segment_count() {
            let segment = packet.segments(index, 1);
            let link = &mut self.links[self.link_paths[step.link_path].links[step.hop]].link;
            let fate = link.handle_packet(now, began, segment.wire_bytes());
            match fate {
                Fate::Arrives(arrival) if arrival.is_plain() => {
                    run.get_or_insert(SegmentRun { first: index, arrival }).arrival.at = arrival.at;
                }
                _ => {
                    self.deliver_run(run.take(), index, step, &packet);
                    self.deliver(fate, step, segment);
                }
            }
        }
        self.deliver_run(run, packet.segment_count(), step, &packet);
    }

    fn deliver_run(&mut self, run: Option<SegmentRun>, end: usize, step: Hop, packet: &Packet) {
        if let Some(SegmentRun { first, arrival }) = run {
            self.deliver(Fate::Arrives(arrival), step, packet.segments(first, end - first));
        }
    }

    fn deliver(&mut self, fate: Fate, step: Hop, packet: Packet) {
        match fate {
            Fate::Arrives(arrival) => self.schedule(arrival, step, packet),
            Fate::ArrivesTwice(first, second) => {
                self.schedule(first, step, packet.clone());
                self.schedule(second, step, packet);
            }
            Fate::Lost | Fate::Overflowed | Fate::Oversized | Fate::Cut => {}
        }
    }

    fn schedule(&mut self, arrival: Arrival, step: Hop, mut packet: Packet) {
        let named = &self.links[self.link_paths[step.link_path].links[step.hop]];
        if let Some(random) = arrival.corruption {
            packet.corrupt(random, named.link.shape().repair_checksums);
        }
        self.scheduled += 1;
        let (order, epoch) = (self.scheduled, named.epoch);
        let Arrival { at, began, .. } = arrival;
        self.in_flight.push(Reverse(ScheduledPacket { at, order, began, step, epoch, packet }));
    }

    fn add_wan_direction(&mut self, plan: &Plan, [from, to]: [usize; 2], shape: &Shape) {
        let link = self.add_link(plan, plan.direction_name(from, to), shape.clone());
        // Devices of the WAN come first, in the order of sites.
        let way = self.add_link_path(vec![link], to);
        let routes = &mut self.routes[from];
        routes.hosts.insert(plan.sites[to].wan_address, way);
        routes.subnets.push((plan.sites[to].subnet(), way));
    }

    /// Adds an emulated LAN: from each machine a link up to the switch and a link down from it.
    fn add_rail(&mut self, plan: &Plan, site: usize, rail: usize, ports: &[Port]) {
        let home = &plan.sites[site];
        let Some(shape) = &home.rails[rail].shape else { return };
        let machines: Vec<_> = home.machines().collect();
        let first = ports.iter().position(|port| *port == Port::Lan { site, rail, machine: 0 });
        let Some(first) = first else { return };
        // The uplink only takes time for serialisation; delay and random faults apply once, on the
        // downlink.
        let (rate, queue, is_down) = (shape.rate, shape.queue, shape.down);
        let up_shape = Shape { rate, queue, down: is_down, ..Shape::default() };
        let lan = home.lan_name(rail);
        let mut up = Vec::new();
        let mut down = Vec::new();
        for machine in &machines {
            up.push(self.add_link(plan, format!("{}>{lan}", machine.name), up_shape.clone()));
            down.push(self.add_link(plan, format!("{lan}>{}", machine.name), shape.clone()));
            self.links[up[up.len() - 1]].rail = Some((home.rail_name(rail), true));
            self.links[down[down.len() - 1]].rail = Some((home.rail_name(rail), false));
        }
        for (source, &up) in up.iter().enumerate() {
            for (target, machine) in
                machines.iter().enumerate().filter(|&(target, _)| target != source)
            {
                let way = self.add_link_path(vec![up, down[target]], first + target);
                let address = home.address_on(rail, machine);
                self.routes[first + source].hosts.insert(address, way);
            }
            let gateway = machines.len() - 1;
            // Machines send packets for addresses outside of the LAN over the first rail.
            if source != gateway && rail == 0 {
                let way = self.add_link_path(vec![up, down[gateway]], first + gateway);
                let everything = Subnet { base: Ipv4Addr::UNSPECIFIED, prefix: 0 };
                self.routes[first + source].subnets.push((everything, way));
            }
        }
    }

    fn add_link(&mut self, plan: &Plan, name: String, shape: Shape) -> usize {
        let link = Link::new(shape.clone(), seed_of(plan.seed, &name));
        self.links.push(NamedLink { name, rail: None, link, original: shape, epoch: 0 });
        self.links.len() - 1
    }

    fn add_link_path(&mut self, links: Vec<usize>, exit: usize) -> usize {
        self.link_paths.push(LinkPath { links, exit });
        self.link_paths.len() - 1
    }
}

impl Routes {
    fn find(&self, to: Ipv4Addr) -> Option<usize> {
        self.hosts.get(&to).copied().or_else(|| {
            self.subnets.iter().find(|(subnet, _)| subnet.contains(to)).map(|&(_, way)| way)
        })
    }
}

/// Whether `link` (`a-b`, `b-a` or `a>b`) names the direction `a>b`.
fn means(link: &str, direction: &str) -> bool {
    let ends = direction.split_once('>');
    link == direction
        || ends.is_some_and(|(a, b)| link == format!("{a}-{b}") || link == format!("{b}-{a}"))
}

/// All devices: the WAN interfaces of all sites, then the machines of each emulated rail.
fn ports_of(plan: &Plan) -> Vec<Port> {
    let mut ports: Vec<Port> = (0..plan.sites.len()).map(|site| Port::Wan { site }).collect();
    for (site, home) in plan.sites.iter().enumerate() {
        for (rail, _) in home.rails.iter().enumerate().filter(|(_, rail)| rail.shape.is_some()) {
            let machines = 0..home.machines().count();
            ports.extend(machines.map(|machine| Port::Lan { site, rail, machine }));
        }
    }
    ports
}

impl Ord for ScheduledPacket {
    fn cmp(&self, other: &ScheduledPacket) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl PartialOrd for ScheduledPacket {
    fn partial_cmp(&self, other: &ScheduledPacket) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ScheduledPacket {
    fn eq(&self, other: &ScheduledPacket) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for ScheduledPacket {}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::super::packet::tests::tcp_packet;
    use super::super::units::{Share, Size};
    use super::*;

    const LAB: &str = r#"
        [[site]]
        name = "a"
        hosts = 2
        lan = { rate = "1 Gbit/s", delay = "40 us" }
        [[site]]
        name = "b"
        hosts = 1
        [[site]]
        name = "c"
        hosts = 1
        [[link]]
        between = ["a", "b"]
        rate = "8 Mbit/s"
        delay = "1 ms"
    "#;

    #[test]
    fn wan_packets_reach_the_other_gateway_in_time() {
        let (mut emulator, ports) = emulator();
        assert_eq!(ports[1], Port::Wan { site: 1 });
        emulator.handle_packet(0, 0, packet_to([192, 0, 2, 2], 1000));
        // 1000 bytes at 8 Mbit/s take 1 ms, followed by the delay.
        assert_eq!(emulator.next_output(), Some(2_000_000));
        assert!(emulator.poll_output(1_999_999).is_none());
        assert_eq!(emulator.poll_output(2_000_000), Some((1, packet_to([192, 0, 2, 2], 1000))));
        assert_eq!(emulator.next_output(), None);
    }

    #[test]
    fn sites_without_a_link_do_not_meet() {
        let (mut emulator, _) = emulator();
        emulator.handle_packet(0, 0, packet_to([192, 0, 2, 3], 100));
        emulator.handle_packet(0, 2, packet_to([192, 0, 2, 1], 100));
        assert_eq!(emulator.next_output(), None);
        assert_eq!(emulator.unroutable(), 2);
    }

    #[test]
    fn a_lan_takes_the_wire_time_once() {
        let (mut emulator, ports) = emulator();
        let rail = [0, 1, 2].map(|machine| Port::Lan { site: 0, rail: 0, machine });
        assert_eq!(ports[3..], rail);
        emulator.handle_packet(0, 3, packet_to([10, 1, 0, 12], 1250));
        // 10 us of serialisation on the uplink, the downlink at the same time, and 40 us of delay.
        assert_eq!(emulator.poll_output(10_000), None);
        assert_eq!(emulator.next_output(), Some(50_000));
        assert_eq!(emulator.poll_output(50_000).map(|(device, _)| device), Some(4));
    }

    #[test]
    fn each_rail_carries_its_own_addresses_only() {
        let lab = "[[site]]\nname = 'a'\nhosts = 2\nrails = 2\nrail.1 = { delay = '1 ms' }\n";
        let (mut emulator, ports) = Emulator::new(&file::parse(lab, "test").unwrap());
        // Device 0 is the WAN; three machines on each rail follow.
        assert_eq!(ports[4], Port::Lan { site: 0, rail: 1, machine: 0 });
        emulator.handle_packet(0, 4, packet_to([10, 1, 1, 12], 100));
        assert_eq!(emulator.poll_output(0), None);
        assert_eq!(emulator.next_output(), Some(1_000_000));
        assert_eq!(emulator.poll_output(1_000_000).map(|(device, _)| device), Some(5));
        emulator.handle_packet(0, 4, packet_to([10, 1, 0, 12], 100));
        emulator.handle_packet(0, 4, packet_to([10, 7, 0, 12], 100));
        assert_eq!(emulator.unroutable(), 2);
        emulator.handle_packet(0, 1, packet_to([10, 1, 0, 12], 100));
        assert_eq!(emulator.poll_output(0).map(|(device, _)| device), Some(2));
        let directions = emulator.directions("a-LAN1");
        assert_eq!(directions.len(), 6, "{directions:?}");
        assert!(directions.contains(&("a-1>LAN1".to_owned(), true)));
        assert!(directions.contains(&("LAN1>a-gw".to_owned(), false)));
        assert_eq!(emulator.directions("a-2-LAN0").len(), 2);
    }

    #[test]
    fn what_is_outside_the_lan_goes_to_the_gateway() {
        let (mut emulator, _) = emulator();
        emulator.handle_packet(0, 3, packet_to([10, 2, 0, 11], 100));
        assert_eq!(emulator.poll_output(10_000), None);
        assert_eq!(emulator.poll_output(1_000_000).map(|(device, _)| device), Some(5));
    }

    #[test]
    fn cutting_a_link_loses_what_is_on_it() {
        let (mut emulator, _) = emulator();
        emulator.handle_packet(0, 0, packet_to([192, 0, 2, 2], 1000));
        assert!(emulator.reshape("a>b", |shape| Shape { down: true, ..shape }));
        assert!(emulator.reshape("a>b", |shape| Shape { down: false, ..shape }));
        assert!(emulator.poll_output(u64::MAX).is_none());
        emulator.handle_packet(0, 0, packet_to([192, 0, 2, 2], 1000));
        assert!(emulator.poll_output(u64::MAX).is_some());
        assert!(!emulator.reshape("a>c", |shape| shape));
    }

    #[test]
    fn duplicated_packets_arrive_twice() {
        let (mut emulator, _) = emulator();
        emulator.reshape("a>b", |shape| Shape { duplicate: Share { fraction: 1.0 }, ..shape });
        emulator.handle_packet(0, 0, packet_to([192, 0, 2, 2], 1000));
        assert!(emulator.poll_output(u64::MAX).is_some());
        assert!(emulator.poll_output(u64::MAX).is_some());
        assert!(emulator.poll_output(u64::MAX).is_none());
    }

    #[test]
    fn segments_are_lost_one_by_one_and_the_others_stay_together() {
        let (mut emulator, _) = emulator();
        emulator.reshape("a>b", |shape| Shape { loss: Share { fraction: 0.1 }, ..shape });
        let packet = tcp_packet(60_000, 1000);
        assert_eq!(packet.segment_count(), 60);
        emulator.handle_packet(0, 0, packet);
        let lost = emulator.links().map(|(_, _, counts)| counts.lost).sum::<u64>() as usize;
        assert!((1..20).contains(&lost), "{lost}");
        let mut arrived = Vec::new();
        while let Some((_, packet)) = emulator.poll_output(u64::MAX) {
            arrived.push(packet.segment_count());
        }
        assert_eq!(arrived.iter().sum::<usize>(), 60 - lost);
        assert!(arrived.len() <= lost + 1, "{arrived:?}");
    }

    #[test]
    fn a_burst_is_as_large_as_its_segments() {
        let (mut emulator, _) = emulator();
        for (mtu, arrived) in [(1040, vec![60]), (1039, vec![])] {
            emulator.reshape("a>b", |shape| Shape { mtu: Some(mtu), ..shape });
            emulator.handle_packet(0, 0, tcp_packet(60_000, 1000));
            let found = std::iter::from_fn(|| emulator.poll_output(u64::MAX));
            assert_eq!(
                found.map(|(_, packet)| packet.segment_count()).collect::<Vec<_>>(),
                arrived
            );
        }
    }

    #[test]
    fn a_full_queue_takes_the_segments_that_fit() {
        let (mut emulator, _) = emulator();
        let queue = Some(Size { bytes: 100_000 });
        emulator.reshape("a>b", |shape| Shape { queue, ..shape });
        emulator.handle_packet(0, 0, tcp_packet(60_000, 1000));
        emulator.handle_packet(0, 0, tcp_packet(60_000, 1000));
        let arrived = std::iter::from_fn(|| emulator.poll_output(u64::MAX));
        // 62,400 bytes of the first packet, and 36 segments of 1,040 bytes of the second.
        assert_eq!(arrived.map(|(_, packet)| packet.segment_count()).collect::<Vec<_>>(), [60, 36]);
    }

    fn emulator() -> (Emulator, Vec<Port>) {
        Emulator::new(&file::parse(LAB, "test").unwrap())
    }

    fn packet_to(destination: [u8; 4], size: usize) -> Packet {
        let mut bytes = vec![0; 10 + size];
        bytes[10] = 0x45;
        bytes[26..30].copy_from_slice(&destination);
        Packet::new(&bytes).unwrap()
    }
}
