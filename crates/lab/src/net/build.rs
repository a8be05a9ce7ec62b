//! Builds a plan: machines, LANs, WAN interfaces, routes, firewalls.
//!
//! In: a plan, inside a lab's own namespaces. Out: the machines, and the TUN devices for the
//! emulator in the order that the emulator requested. Nothing is made outside of the lab's
//! namespaces, so nothing has to be undone.
//!
//! A LAN without emulation is a bridge in the lab's root namespace, which has no addresses and
//! routes nothing; each machine's LAN interface is one end of a veth pair whose other end is a port
//! of its site's bridge. Interfaces are called `wan0` on every gateway and `lan0`, `lan1` … on
//! every machine, one for each rail.

use std::fmt::Write;

use anyhow::Context;

use super::emulator::Port;
use super::namespace::{LAB_DIR, Machine, run_tool};
use super::plan::{Host, Inbound, Plan, Rail, Site, Subnet};
use super::topology::namespace_dir;
use super::tun::Tun;

/// Name of a gateway's interface in the WAN.
pub const WAN_DEVICE: &str = "wan0";

/// The machines of each site, in the order of `Site::machines`.
pub type Machines = Vec<Vec<Machine>>;

/// Builds everything; the returned devices are those of `ports`.
pub fn build(plan: &Plan, ports: &[Port]) -> anyhow::Result<(Machines, Vec<Tun>)> {
    let machines = plan
        .sites
        .iter()
        .map(|site| site.machines().map(|machine| Machine::create(&machine.name)).collect())
        .collect::<anyhow::Result<Machines>>()?;
    for (number, site) in plan.sites.iter().enumerate() {
        if site.rails[0].shape.is_none() {
            build_bridge(number, site)?;
        }
    }
    let devices = ports
        .iter()
        .map(|port| create_device(&machines, port))
        .collect::<anyhow::Result<Vec<Tun>>>()?;
    for (number, site) in plan.sites.iter().enumerate() {
        for (machine, host) in machines[number].iter().zip(site.machines()) {
            configure(plan, number, host, machine)
                .with_context(|| format!("cannot set up `{}`", host.name))?;
        }
    }
    Ok((machines, devices))
}

fn build_bridge(number: usize, site: &Site) -> anyhow::Result<()> {
    let bridge = format!("lan{number}");
    let mut batch =
        format!("link add {bridge} type bridge mcast_snooping 0\nlink set {bridge} up\n");
    for (index, machine) in site.machines().enumerate() {
        let port = format!("s{number}p{index}");
        let net = namespace_dir(LAB_DIR.as_ref(), &machine.name).join("net");
        // Writing into a String cannot fail; the same holds for all such writes in this file.
        let _ = writeln!(
            batch,
            "link add {port} type veth peer name lan0 netns {}\nlink set {port} master {bridge} up",
            net.display()
        );
    }
    run_tool("ip", &["-batch", "-"], &batch).with_context(|| format!("the LAN of `{}`", site.name))
}

fn create_device(machines: &Machines, port: &Port) -> anyhow::Result<Tun> {
    let (machine, name) = match *port {
        Port::Wan { site } => (machines[site].last(), WAN_DEVICE.to_owned()),
        Port::Lan { site, rail, machine } => (machines[site].get(machine), lan_device(rail)),
    };
    // Every site has a gateway, which is the last of its machines; the emulator numbers machines as
    // the plan does.
    let machine = machine.context("a port of a machine that is not in the plan")?;
    machine.run(|| Tun::create(&name).with_context(|| format!("cannot make TUN device {name}")))
}

fn configure(plan: &Plan, site: usize, host: &Host, machine: &Machine) -> anyhow::Result<()> {
    let is_gateway = host.name == plan.sites[site].gateway.name;
    let batch = address_commands(plan, site, host, is_gateway);
    machine.run(|| {
        // Without this setting the kernel sends neighbour and router messages of its own, which
        // would use up random draws of links.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
        run_tool("ip", &["-batch", "-"], &batch)?;
        if is_gateway {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot route")?;
            run_tool("nft", &["-f", "-"], &firewall(&plan.sites[site]))?;
        }
        Ok(())
    })
}

/// Input of `ip -batch` that gives a machine its addresses and routes.
fn address_commands(plan: &Plan, site: usize, host: &Host, is_gateway: bool) -> String {
    let home = &plan.sites[site];
    let mut batch = "link set lo up\n".to_owned();
    for (rail, Rail { subnet, .. }) in home.rails.iter().enumerate() {
        let (address, device) = (home.address_on(rail, host), lan_device(rail));
        let _ = writeln!(batch, "addr add {address}/{} dev {device}", subnet.prefix);
        let _ = writeln!(batch, "link set {device} up");
    }
    if is_gateway {
        let _ = writeln!(batch, "addr add {}/32 dev {WAN_DEVICE}", home.wan_address);
        let _ = writeln!(batch, "link set {WAN_DEVICE} mtu {} up", plan.mtu);
    }
    batch + &routes(plan, site, host, &lan_device(0)) + &routes(plan, site, host, WAN_DEVICE)
}

/// Input of `ip -batch` that makes the routes of one interface, except the route to the interface's
/// own network, which the kernel makes. The routes vanish when the interface goes down.
pub fn routes(plan: &Plan, site: usize, host: &Host, device: &str) -> String {
    let home = &plan.sites[site];
    let is_gateway = host.name == home.gateway.name;
    if !is_gateway && device == lan_device(0) {
        return format!("route replace default via {} dev {device} onlink\n", home.gateway.address);
    }
    let mut batch = String::new();
    if is_gateway && device == WAN_DEVICE {
        let own = home.wan_address;
        for neighbour in plan.neighbours(site).map(|neighbour| &plan.sites[neighbour]) {
            let to = neighbour.wan_address;
            let _ = writeln!(batch, "route replace {to}/32 dev {device} src {own}");
        }
        for subnet in reachable_subnets(plan, site) {
            // The routes exist even if no gateway forwards: the firewalls refuse the packets.
            let _ = writeln!(batch, "route replace {subnet} dev {device} src {own}");
        }
    }
    batch
}

/// Name of every machine's interface on a rail.
pub fn lan_device(rail: usize) -> String {
    format!("lan{rail}")
}

/// LANs of neighbours whose addresses are unambiguous: neither this site nor another neighbour uses
/// the same addresses.
fn reachable_subnets(plan: &Plan, site: usize) -> Vec<Subnet> {
    let neighbours: Vec<usize> = plan.neighbours(site).collect();
    let is_unique = |candidate: usize| {
        let subnet = plan.sites[candidate].subnet();
        let is_own = plan.sites[site].rails.iter().any(|rail| rail.subnet.overlaps(subnet));
        let mut others = neighbours.iter().copied().filter(|&other| other != candidate);
        !is_own && others.all(|other| !plan.sites[other].subnet().overlaps(subnet))
    };
    let unique = neighbours.iter().copied().filter(|&neighbour| is_unique(neighbour));
    unique.map(|neighbour| plan.sites[neighbour].subnet()).collect()
}

/// The gateway's rules: traffic that is accepted from the WAN, and whether LAN and WAN can reach
/// each other.
fn firewall(site: &Site) -> String {
    let answers = "ct state established,related accept";
    let input = match &site.inbound {
        Inbound::Anything => String::new(),
        Inbound::Nothing => "iifname wan0 drop".to_owned(),
        Inbound::Ports(ports) => {
            let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
            format!("iifname wan0 tcp dport {{ {} }} accept\niifname wan0 drop", ports.join(", "))
        }
    };
    let forward = match (site.forward, &site.inbound) {
        (false, _) => "",
        (true, Inbound::Nothing) => "iifname lan0 oifname wan0 accept",
        (true, _) => "accept",
    };
    format!(
        "table inet lab {{
            chain input {{
                type filter hook input priority 0; policy accept;
                iifname wan0 {answers}
                {input}
            }}
            chain forward {{
                type filter hook forward priority 0; policy drop;
                {forward}
                {answers}
                iifname lan0 reject with icmpx admin-prohibited
            }}
        }}\n"
    )
}
