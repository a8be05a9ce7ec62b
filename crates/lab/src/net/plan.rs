//! The plan of a lab: every name, address and link, decided before anything is made.
//!
//! The module holds pure data. `file` makes the plan, `build` carries it out, `topology` describes
//! it to the launcher, and `Display` prints it for users.

use std::fmt;
use std::net::Ipv4Addr;

use super::link::Shape;

/// Port on which a site's relay accepts ranks of its own site.
pub const RANK_PORT: u16 = 7710;
/// Port on which a site's relay accepts relays of other sites.
pub const RELAY_PORT: u16 = 7711;

/// Everything that is to be built.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub name: String,
    pub seed: u64,
    /// MTU in bytes of every WAN interface.
    pub mtu: u32,
    pub sites: Vec<Site>,
    pub links: Vec<WanLink>,
}

/// One cluster: hosts and a gateway on a LAN; the gateway also has an interface in the WAN.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    pub name: String,
    /// Networks inside the site, at least one. Every machine has an interface on each: `lan0` on
    /// the first, whose addresses identify the machines.
    pub rails: Vec<Rail>,
    pub hosts: Vec<Host>,
    pub gateway: Host,
    /// The gateway's address in the WAN.
    pub wan_address: Ipv4Addr,
    pub inbound: Inbound,
    /// Whether the gateway routes between its hosts and the WAN.
    pub forward: bool,
}

/// One network of a site.
#[derive(Clone, Debug, PartialEq)]
pub struct Rail {
    pub subnet: Subnet,
    /// Properties of an emulated rail; `None` for a bridge at the kernel's speed.
    pub shape: Option<Shape>,
}

/// One machine of a site.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub name: String,
    /// Address on the first rail.
    pub address: Ipv4Addr,
    /// Number of ranks that the host takes by default.
    pub slots: u32,
}

/// Traffic from the WAN that a site's firewall accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inbound {
    Anything,
    /// New connections to these TCP ports of the gateway.
    Ports(Vec<u16>),
    /// Only answers to requests from inside.
    Nothing,
}

/// A link between the gateways of two sites; the sites are numbered as in `Plan::sites`.
#[derive(Clone, Debug, PartialEq)]
pub struct WanLink {
    pub ends: [usize; 2],
    /// `shapes[0]` applies from `ends[0]` to `ends[1]`, and `shapes[1]` in the opposite direction.
    pub shapes: [Shape; 2],
}

/// An IPv4 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    pub base: Ipv4Addr,
    pub prefix: u8,
}

impl Plan {
    /// The host on which the lab's command runs: the first host of the first site.
    pub fn home(&self) -> &Host {
        // A plan has at least one site, and each site has at least one host; `file` refuses others.
        &self.sites[0].hosts[0]
    }

    /// All hosts and gateways.
    pub fn machines(&self) -> impl Iterator<Item = &Host> {
        self.sites.iter().flat_map(Site::machines)
    }

    /// Sites that have a link to `site`.
    pub fn neighbours(&self, site: usize) -> impl Iterator<Item = usize> {
        self.links.iter().filter_map(move |link| link.other_end(site))
    }

    /// The name of a link's direction, as the command line and logs show it.
    pub fn direction_name(&self, from: usize, to: usize) -> String {
        format!("{}>{}", self.sites[from].name, self.sites[to].name)
    }
}

impl Site {
    /// The hosts of the site, then its gateway.
    pub fn machines(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().chain([&self.gateway])
    }

    /// The network of the first rail.
    pub fn subnet(&self) -> Subnet {
        // A site has at least one rail; `file` makes no site without a rail.
        self.rails[0].subnet
    }

    /// A machine's address on one of the rails: the machine has the same number in all rails.
    pub fn address_on(&self, rail: usize, machine: &Host) -> Ipv4Addr {
        let number = u32::from(machine.address) - u32::from(self.subnet().base);
        Ipv4Addr::from(u32::from(self.rails[rail].subnet.base) + number)
    }

    /// The name of a rail within its site, from which names of directions are made: `LAN`, or
    /// `LAN0`, `LAN1` … if the site has several rails.
    pub fn lan_name(&self, rail: usize) -> String {
        if self.rails.len() == 1 { "LAN".to_owned() } else { format!("LAN{rail}") }
    }

    /// The name of all links of a rail together, such as `north-LAN1`.
    pub fn rail_name(&self, rail: usize) -> String {
        format!("{}-{}", self.name, self.lan_name(rail))
    }
}

impl Inbound {
    /// Whether another site's relay may connect to this site's relay.
    pub fn admits_relays(&self) -> bool {
        match self {
            Inbound::Anything => true,
            Inbound::Ports(ports) => ports.contains(&RELAY_PORT),
            Inbound::Nothing => false,
        }
    }
}

impl WanLink {
    fn other_end(&self, site: usize) -> Option<usize> {
        match self.ends {
            [a, b] if a == site => Some(b),
            [a, b] if b == site => Some(a),
            _ => None,
        }
    }
}

impl Subnet {
    /// Address number `number` of the network; `None` beyond its last usable address.
    pub fn address(self, number: u32) -> Option<Ipv4Addr> {
        let size = 1u64 << (32 - u32::from(self.prefix));
        let is_usable = number > 0 && u64::from(number) + 1 < size;
        is_usable.then(|| Ipv4Addr::from(u32::from(self.base) + number))
    }

    /// Network number `number` of the same size from this network on, which has number 0; `None`
    /// beyond the last IPv4 address.
    pub fn neighbour(self, number: u32) -> Option<Subnet> {
        let size = 1u64 << (32 - u32::from(self.prefix));
        let base = u64::from(u32::from(self.base)) + size * u64::from(number);
        Some(Subnet { base: Ipv4Addr::from(u32::try_from(base).ok()?), prefix: self.prefix })
    }

    pub fn overlaps(self, other: Subnet) -> bool {
        let prefix = self.prefix.min(other.prefix);
        mask(self.base, prefix) == mask(other.base, prefix)
    }

    pub fn contains(self, address: Ipv4Addr) -> bool {
        mask(address, self.prefix) == mask(self.base, self.prefix)
    }
}

fn mask(address: Ipv4Addr, prefix: u8) -> u32 {
    u32::from(address).checked_shr(32 - u32::from(prefix)).unwrap_or(0)
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

impl fmt::Display for Inbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Inbound::Anything => f.write_str("accepts anything at its gateway"),
            Inbound::Ports(ports) => write!(f, "accepts TCP ports {ports:?} at its gateway"),
            Inbound::Nothing => f.write_str("accepts nothing from outside"),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "lab {}: {} sites, seed {}", self.name, self.sites.len(), self.seed)?;
        for site in &self.sites {
            write_site(f, site)?;
        }
        for link in &self.links {
            let [a, b] = link.ends;
            if link.shapes[0] == link.shapes[1] {
                let (a, b) = (&self.sites[a].name, &self.sites[b].name);
                writeln!(f, "link {a}-{b}: {}", describe(&link.shapes[0]))?;
            } else {
                writeln!(f, "link {}: {}", self.direction_name(a, b), describe(&link.shapes[0]))?;
                writeln!(f, "link {}: {}", self.direction_name(b, a), describe(&link.shapes[1]))?;
            }
        }
        Ok(())
    }
}

fn write_site(f: &mut fmt::Formatter<'_>, site: &Site) -> fmt::Result {
    let forward = if site.forward { ", routes for its hosts" } else { "" };
    writeln!(f, "site {}: LAN {}, {}{forward}", site.name, site.subnet(), site.inbound)?;
    for (number, rail) in site.rails.iter().enumerate() {
        let name = site.lan_name(number);
        let subnet = if number > 0 { format!("{}, ", rail.subnet) } else { String::new() };
        match &rail.shape {
            Some(shape) => writeln!(f, "  {name}: {subnet}{}", describe(shape))?,
            None => writeln!(f, "  {name}: {subnet}bridge at kernel speed")?,
        }
    }
    let gateway = &site.gateway;
    writeln!(f, "  {:<20} {:<15} WAN {}", gateway.name, gateway.address, site.wan_address)?;
    for host in &site.hosts {
        writeln!(f, "  {:<20} {:<15} {} slots", host.name, host.address, host.slots)?;
    }
    Ok(())
}

/// A shape in words: only the properties that differ from a perfect link.
pub fn describe(shape: &Shape) -> String {
    let mut words = vec![match shape.rate {
        Some(rate) => format!("{rate}, queue {} KiB", shape.queue_or_default() / 1024),
        None => "unlimited rate".to_owned(),
    }];
    words.push(format!("delay {}", shape.delay));
    if shape.jitter.nanos > 0 {
        words.push(format!("jitter {}", shape.jitter));
    }
    for (name, share) in [
        ("loss", shape.loss),
        ("duplicate", shape.duplicate),
        ("reorder", shape.reorder),
        ("corrupt", shape.corrupt),
    ] {
        if share.fraction > 0.0 {
            words.push(format!("{name} {share}"));
        }
    }
    if let Some(mtu) = shape.mtu {
        words.push(format!("larger than {mtu} bytes vanish"));
    }
    if shape.repair_checksums {
        words.push("checksums repaired".to_owned());
    }
    if shape.down {
        words.push("DOWN".to_owned());
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_know_their_addresses() {
        let subnet = Subnet { base: Ipv4Addr::new(10, 1, 0, 0), prefix: 30 };
        assert_eq!(subnet.address(0), None);
        assert_eq!(subnet.address(2), Some(Ipv4Addr::new(10, 1, 0, 2)));
        assert_eq!(subnet.address(3), None, "broadcast");
        assert!(subnet.contains(Ipv4Addr::new(10, 1, 0, 3)));
        assert!(!subnet.contains(Ipv4Addr::new(10, 1, 0, 4)));
        let wide = Subnet { base: Ipv4Addr::new(10, 0, 0, 0), prefix: 8 };
        assert!(wide.overlaps(subnet) && subnet.overlaps(wide));
        let next = Subnet { base: Ipv4Addr::new(10, 1, 0, 8), prefix: 30 };
        assert_eq!(subnet.neighbour(2), Some(next));
        let last = Subnet { base: Ipv4Addr::new(255, 255, 255, 0), prefix: 24 };
        assert_eq!(last.neighbour(1), None);
    }
}
