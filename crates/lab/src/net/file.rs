//! The lab file, which a user writes: parsed and checked into a `Plan`.
//!
//! ```toml
//! name = "two-sites"               # default: the file's name
//! seed = 7                         # seed of all random decisions; default 1
//! mtu = 1500                       # MTU of the WAN interfaces, 576 to 65535; default 1500
//!
//! [[site]]
//! name = "north"                   # letters, digits and dashes
//! hosts = 2                        # north-1, north-2; or a list of names: ["alpha", "beta"]
//! slots = 2                        # ranks per host by default; default 1
//! subnet = "10.1.0.0/24"           # private; two sites may use the same. Default: 10.N.0.0/24,
//!                                  # N = 1 for the first site
//! inbound = true                   # traffic that the gateway accepts from the WAN: true (any),
//!                                  # false (none), or TCP ports [7711]; default true
//! forward = false                  # true: the gateway routes between its hosts and the WAN
//! lan = { rate = "1 Gbit/s", delay = "40 us" }   # default: no emulation, at the kernel's speed.
//!                                  # Keys as in a link; the rate is the rate of each host's port,
//!                                  # the delay is the delay from host to host
//! rails = 2                        # networks inside the site; each machine has an interface on
//!                                  # each: lan0, lan1 …; default 1. Several are always emulated
//! rail.1 = { rate = "100 Mbit/s" } # keys of `lan` that differ on this rail
//!
//! [[link]]
//! between = ["north", "south"]
//! rate = "1 Gbit/s"                # bytes of IP packets; default unlimited
//! delay = "5 ms"                   # one way; default 0
//! jitter = "1 ms"                  # maximum additional delay, order kept
//! loss = "0.1 %"                   # share of packets; likewise duplicate, reorder, corrupt
//! reorder_by = "1 ms"              # additional delay of a reordered packet
//! repair_checksums = true          # corrupted packets keep valid checksums; default false
//! queue = "512 KiB"                # capacity of the queue; default: one round trip,
//!                                  # at least 512 KiB
//! mtu = 1280                       # larger IP packets are dropped silently; default: no limit
//! down = false
//! to.north = { rate = "100 Mbit/s" }   # values that differ in this direction only
//! ```
//!
//! The gateway of a site has the first address of its subnet and the name `SITE-gw`; the addresses
//! of hosts begin at the eleventh. Names of machines are unique in a lab. Every error names the
//! line.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::link::Shape;
use super::plan::{Host, Inbound, Plan, Rail, Site, Subnet, WanLink};
use super::units::{Rate, Share, Size, Span};

/// Sites of a lab at most: a larger mesh of links is hard to read; WAN addresses would suffice for
/// 254 sites.
const SITES_MAX: usize = 64;
/// Hosts of a site at most: a Linux bridge has 1,024 ports.
const HOSTS_PER_SITE_MAX: usize = 1000;
/// Rails of a site at most: real nodes have no more network interfaces. The subnets of rails follow
/// each other.
const RAILS_MAX: usize = 8;
/// Number of the first host in its subnet; smaller numbers are reserved for gateways.
const FIRST_HOST: u32 = 11;
/// Bytes of a machine's name at most; the kernel accepts 64 bytes as hostname.
const NAME_BYTES_MAX: usize = 60;
const MTU_DEFAULT: u32 = 1500;
/// IPv4's minimum and maximum MTU.
const MTU_RANGE: Range<u32> = 576..65_536;

/// Reads and checks a lab file.
pub fn load(path: &Path) -> anyhow::Result<Plan> {
    use anyhow::Context;
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the lab file {}", path.display()))?;
    parse(&text, &name_from(path)).map_err(|error| {
        anyhow::anyhow!("{}:{}: {}", path.display(), line_of(&text, error.at), error.message)
    })
}

/// The default name of a lab: the file's name, with dashes in place of characters that a name must
/// not have.
fn name_from(path: &Path) -> String {
    let stem = path.file_stem().map_or_else(|| "lab".into(), |stem| stem.to_string_lossy());
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = stem.chars().map(plain).take(NAME_BYTES_MAX).collect();
    name.trim_start_matches('-').to_owned()
}

/// Whether a lab, site or host may have this name.
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        && text.len() <= NAME_BYTES_MAX
}

/// An error in a lab file, and the offset of the byte where it is.
#[derive(Debug, PartialEq, Eq)]
pub struct FileError {
    pub at: usize,
    pub message: String,
}

/// Checks the text of a lab file. `default_name` is the lab's name if the file gives none.
pub fn parse(text: &str, default_name: &str) -> Result<Plan, FileError> {
    let raw: RawLab = toml::from_str(text).map_err(|error| FileError {
        at: error.span().map_or(0, |span| span.start),
        message: error.message().to_owned(),
    })?;
    let name = match &raw.name {
        Some(name) => checked_name(name, "lab")?,
        None => default_name.to_owned(),
    };
    let sites = plan_sites(&raw)?;
    let links = plan_links(&raw, &sites)?;
    let mtu = raw.mtu.as_ref().map_or(Ok(MTU_DEFAULT), |mtu| {
        let is_sane = MTU_RANGE.contains(mtu.get_ref());
        if is_sane {
            Ok(*mtu.get_ref())
        } else {
            fail(mtu.span(), "mtu must be 576 to 65535 bytes")
        }
    })?;
    Ok(Plan { name, seed: raw.seed.unwrap_or(1), mtu, sites, links })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLab {
    name: Option<Spanned<String>>,
    seed: Option<u64>,
    mtu: Option<Spanned<u32>>,
    site: Vec<RawSite>,
    #[serde(default)]
    link: Vec<RawLink>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSite {
    name: Spanned<String>,
    hosts: Spanned<RawHosts>,
    slots: Option<u32>,
    subnet: Option<Spanned<String>>,
    inbound: Option<RawInbound>,
    #[serde(default)]
    forward: bool,
    lan: Option<RawShape>,
    rails: Option<Spanned<usize>>,
    rail: Option<Spanned<BTreeMap<String, RawShape>>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "hosts is a number or a list of names")]
enum RawHosts {
    Count(usize),
    Names(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "inbound is true, false or a list of TCP ports")]
enum RawInbound {
    Switch(bool),
    Ports(Vec<u16>),
}

/// The keys of a shape. serde cannot both flatten the keys into a link and refuse unknown keys, so
/// a macro repeats them.
macro_rules! raw_shapes {
    ($($name:ident { $($field:ident: $type:ty,)* })*) => { $(
        #[derive(Clone, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct $name {
            $($field: $type,)*
            rate: Option<Rate>,
            delay: Option<Span>,
            jitter: Option<Span>,
            loss: Option<Share>,
            duplicate: Option<Share>,
            reorder: Option<Share>,
            reorder_by: Option<Span>,
            corrupt: Option<Share>,
            repair_checksums: Option<bool>,
            queue: Option<Size>,
            mtu: Option<u32>,
            down: Option<bool>,
        }

        impl $name {
            /// `base`, with the values that this entry gives in place of those of `base`.
            fn over(&self, base: Shape) -> Shape {
                Shape {
                    rate: self.rate.or(base.rate),
                    delay: self.delay.unwrap_or(base.delay),
                    jitter: self.jitter.unwrap_or(base.jitter),
                    loss: self.loss.unwrap_or(base.loss),
                    duplicate: self.duplicate.unwrap_or(base.duplicate),
                    reorder: self.reorder.unwrap_or(base.reorder),
                    reorder_by: self.reorder_by.unwrap_or(base.reorder_by),
                    corrupt: self.corrupt.unwrap_or(base.corrupt),
                    repair_checksums: self.repair_checksums.unwrap_or(base.repair_checksums),
                    queue: self.queue.or(base.queue),
                    mtu: self.mtu.or(base.mtu),
                    down: self.down.unwrap_or(base.down),
                }
            }
        }
    )* };
}

raw_shapes! {
    RawShape {}
    RawLink {
        between: Spanned<[Spanned<String>; 2]>,
        to: Option<Spanned<BTreeMap<String, RawShape>>>,
    }
}

fn plan_sites(raw: &RawLab) -> Result<Vec<Site>, FileError> {
    if raw.site.is_empty() || raw.site.len() > SITES_MAX {
        return Err(error_at(0, format!("a lab has 1 to {SITES_MAX} [[site]] tables")));
    }
    let mut machines = BTreeMap::new();
    let mut sites: Vec<Site> = Vec::new();
    for (index, site) in raw.site.iter().enumerate() {
        let planned = plan_site(index, site)?;
        if sites.iter().any(|other| other.name == planned.name) {
            return fail(site.name.span(), format!("two sites are called `{}`", planned.name));
        }
        for machine in planned.machines() {
            if let Some(other) = machines.insert(machine.name.clone(), planned.name.clone()) {
                let message = format!("`{}` is already a machine of site `{other}`", machine.name);
                return fail(site.hosts.span(), message);
            }
        }
        sites.push(planned);
    }
    Ok(sites)
}

fn plan_site(index: usize, raw: &RawSite) -> Result<Site, FileError> {
    let name = checked_name(&raw.name, "site")?;
    let subnet = match &raw.subnet {
        Some(text) => parse_subnet(text.get_ref()).map_err(|m| error_at(text.span().start, m))?,
        None => Subnet { base: Ipv4Addr::new(10, index as u8 + 1, 0, 0), prefix: 24 },
    };
    let names = host_names(&name, &raw.hosts)?;
    let gateway =
        subnet.address(1).map(|address| Host { name: format!("{name}-gw"), address, slots: 0 });
    let slots = raw.slots.unwrap_or(1);
    let hosts: Option<Vec<Host>> = (FIRST_HOST..)
        .zip(names)
        .map(|(number, name)| Some(Host { name, address: subnet.address(number)?, slots }))
        .collect();
    let (Some(gateway), Some(hosts)) = (gateway, hosts) else {
        return fail(raw.hosts.span(), format!("subnet {subnet} is too small for these hosts"));
    };
    Ok(Site {
        name,
        rails: plan_rails(subnet, raw)?,
        hosts,
        gateway,
        // SITES_MAX keeps this address within the block that RFC 5737 reserves for examples.
        wan_address: Ipv4Addr::new(192, 0, 2, index as u8 + 1),
        inbound: plan_inbound(raw.inbound.as_ref()),
        forward: raw.forward,
    })
}

fn plan_rails(first: Subnet, raw: &RawSite) -> Result<Vec<Rail>, FileError> {
    let count = raw.rails.as_ref().map_or(1, |rails| *rails.get_ref());
    let at = raw.rails.as_ref().map_or_else(|| raw.name.span(), Spanned::span);
    if !(1..=RAILS_MAX).contains(&count) {
        return fail(at, format!("a site has 1 to {RAILS_MAX} rails"));
    }
    let lan = raw.lan.as_ref().map(|lan| lan.over(Shape::default()));
    let is_emulated = count > 1 || lan.is_some() || raw.rail.is_some();
    let shape = is_emulated.then(|| lan.unwrap_or_default());
    let mut rails = Vec::new();
    for number in 0..count as u32 {
        let subnet = first.neighbour(number).filter(|subnet| number == 0 || !is_reserved(*subnet));
        let Some(subnet) = subnet else {
            return fail(at, format!("there are no {count} networks to be had from {first} on"));
        };
        rails.push(Rail { subnet, shape: shape.clone() });
    }
    if let Some(different) = &raw.rail {
        for (number, shape) in different.get_ref() {
            let rail = number.parse().ok().and_then(|number: usize| rails.get_mut(number));
            let Some(rail) = rail else {
                let message = format!("`rail.{number}`: rails are 0 to {}", count - 1);
                return fail(different.span(), message);
            };
            rail.shape = rail.shape.take().map(|base| shape.over(base));
        }
    }
    Ok(rails)
}

fn host_names(site: &str, raw: &Spanned<RawHosts>) -> Result<Vec<String>, FileError> {
    let names: Vec<String> = match raw.get_ref() {
        RawHosts::Count(count) if *count > HOSTS_PER_SITE_MAX => Vec::new(),
        RawHosts::Count(count) => (1..=*count).map(|number| format!("{site}-{number}")).collect(),
        RawHosts::Names(names) => names
            .iter()
            .map(|name| plain_name(name, raw.span(), "host"))
            .collect::<Result<_, _>>()?,
    };
    if names.is_empty() || names.len() > HOSTS_PER_SITE_MAX {
        return fail(raw.span(), format!("a site has 1 to {HOSTS_PER_SITE_MAX} hosts"));
    }
    Ok(names)
}

fn plan_inbound(raw: Option<&RawInbound>) -> Inbound {
    match raw {
        None | Some(RawInbound::Switch(true)) => Inbound::Anything,
        Some(RawInbound::Switch(false)) => Inbound::Nothing,
        Some(RawInbound::Ports(ports)) if ports.is_empty() => Inbound::Nothing,
        Some(RawInbound::Ports(ports)) => Inbound::Ports(ports.clone()),
    }
}

fn plan_links(raw: &RawLab, sites: &[Site]) -> Result<Vec<WanLink>, FileError> {
    let mut links: Vec<WanLink> = Vec::new();
    for link in &raw.link {
        let planned = plan_link(link, sites)?;
        let is_twice = links.iter().any(|other| {
            other.ends == planned.ends || other.ends == [planned.ends[1], planned.ends[0]]
        });
        if is_twice {
            return fail(link.between.span(), "these two sites have a link already");
        }
        links.push(planned);
    }
    Ok(links)
}

fn plan_link(raw: &RawLink, sites: &[Site]) -> Result<WanLink, FileError> {
    let [a, b] = raw.between.get_ref();
    let ends = [site_named(a, sites)?, site_named(b, sites)?];
    if ends[0] == ends[1] {
        return fail(raw.between.span(), "a link joins two different sites");
    }
    let both = raw.over(Shape::default());
    let mut shapes = [both.clone(), both];
    if let Some(directions) = &raw.to {
        for (target, shape) in directions.get_ref() {
            let Some(direction) = [b, a].iter().position(|end| end.get_ref() == target) else {
                let message = format!(
                    "`to.{target}`: the link ends at `{}` and `{}`",
                    a.get_ref(),
                    b.get_ref()
                );
                return fail(directions.span(), message);
            };
            shapes[direction] = shape.over(shapes[direction].clone());
        }
    }
    Ok(WanLink { ends, shapes })
}

fn site_named(name: &Spanned<String>, sites: &[Site]) -> Result<usize, FileError> {
    sites.iter().position(|site| site.name == *name.get_ref()).map_or_else(
        || fail(name.span(), format!("there is no site called `{}`", name.get_ref())),
        Ok,
    )
}

fn checked_name(name: &Spanned<String>, what: &str) -> Result<String, FileError> {
    plain_name(name.get_ref(), name.span(), what)
}

fn plain_name(text: &str, span: Range<usize>, what: &str) -> Result<String, FileError> {
    if is_name(text) {
        return Ok(text.to_owned());
    }
    let rule = format!("1 to {NAME_BYTES_MAX} letters, digits and dashes");
    fail(span, format!("the name of a {what} is {rule}, not `{text}`"))
}

fn parse_subnet(text: &str) -> Result<Subnet, String> {
    let parsed = text.split_once('/').and_then(|(base, prefix)| {
        let subnet = Subnet { base: base.parse().ok()?, prefix: prefix.parse().ok()? };
        (8..=30).contains(&subnet.prefix).then_some(subnet)
    });
    let Some(subnet) = parsed else {
        return Err(format!("`{text}` is not a subnet such as \"10.1.0.0/24\" (prefix 8 to 30)"));
    };
    if u64::from(u32::from(subnet.base)) % (1 << (32 - u32::from(subnet.prefix))) != 0 {
        return Err(format!("`{text}` has bits set beyond its prefix"));
    }
    if is_reserved(subnet) {
        return Err(format!("`{text}` is needed for the WAN (192.0.2.0/24) or the loopback"));
    }
    Ok(subnet)
}

/// Whether a network contains addresses of the WAN or the loopback.
fn is_reserved(subnet: Subnet) -> bool {
    subnet.overlaps(Subnet { base: Ipv4Addr::new(192, 0, 2, 0), prefix: 24 })
        || subnet.overlaps(Subnet { base: Ipv4Addr::LOCALHOST, prefix: 8 })
}

fn fail<T>(span: Range<usize>, message: impl Into<String>) -> Result<T, FileError> {
    Err(error_at(span.start, message.into()))
}

fn error_at(at: usize, message: String) -> FileError {
    FileError { at, message }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_lab_gets_names_and_addresses() {
        let plan = parse(TWO_SITES, "small").unwrap();
        assert_eq!(plan.name, "small");
        assert_eq!(plan.home().name, "north-1");
        assert_eq!(plan.home().address, Ipv4Addr::new(10, 9, 0, 11));
        assert_eq!(plan.sites[1].hosts[1].name, "beta");
        assert_eq!(plan.sites[1].gateway.address, Ipv4Addr::new(10, 9, 0, 1));
        assert_eq!(plan.sites[1].wan_address, Ipv4Addr::new(192, 0, 2, 2));
        assert_eq!(plan.sites[1].inbound, Inbound::Nothing);
        assert_eq!(plan.links[0].shapes[0].rate, Some(Rate { bits_per_second: 1_000_000_000 }));
        assert_eq!(plan.links[0].shapes[1].rate, Some(Rate { bits_per_second: 1_000_000 }));
        assert_eq!(plan.links[0].shapes[1].delay, Span { nanos: 5_000_000 });
        assert_eq!(plan.neighbours(1).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn rails_have_networks_and_shapes_of_their_own() {
        let rails = "slots = 2\nrails = 2\nlan = { delay = '1 ms', rate = '1 Gbit/s' }\n\
                     rail.1 = { rate = '100 Mbit/s' }\n";
        let plan = parse(&TWO_SITES.replacen("slots = 2\n", rails, 1), "x").unwrap();
        let north = &plan.sites[0];
        assert_eq!(north.rails.len(), 2);
        assert_eq!(north.address_on(0, &north.hosts[1]), Ipv4Addr::new(10, 9, 0, 12));
        assert_eq!(north.address_on(1, &north.hosts[1]), Ipv4Addr::new(10, 9, 1, 12));
        let rate = |rail: usize| north.rails[rail].shape.as_ref().and_then(|shape| shape.rate);
        assert_eq!(rate(0), Some(Rate { bits_per_second: 1_000_000_000 }));
        assert_eq!(rate(1), Some(Rate { bits_per_second: 100_000_000 }));
        let delay = north.rails[1].shape.as_ref().map(|shape| shape.delay.nanos);
        assert_eq!(delay, Some(1_000_000));
        assert_eq!(north.rail_name(1), "north-LAN1");
        assert_eq!(plan.sites[1].rails.len(), 1);
        assert_eq!(plan.sites[1].rails[0].shape, None, "a bridge");
        let bare = parse(&TWO_SITES.replacen("slots = 2", "rails = 3", 1), "x").unwrap();
        assert!(bare.sites[0].rails.iter().all(|rail| rail.shape.is_some()), "emulated");
    }

    #[test]
    fn errors_name_the_line() {
        for (from, to, line, words) in [
            ("hosts = 2", "hosts = 0", 4, "1 to 1000 hosts"),
            ("hosts = 2", "hosts = \"many\"", 4, "number or a list"),
            ("\"beta\"", "\"north-1\"", 9, "already a machine of site `north`"),
            ("\"beta\"", "\"be ta\"", 9, "letters, digits and dashes"),
            ("name = \"south\"", "name = \"north\"", 8, "two sites are called `north`"),
            ("[\"north\", \"south\"]", "[\"north\", \"east\"]", 14, "no site called `east`"),
            ("[\"north\", \"south\"]", "[\"north\", \"north\"]", 14, "two different sites"),
            ("5 ms", "5 parsecs", 16, "is not a time"),
            ("1 Gbit/s", "fast", 15, "is not a rate"),
            ("to.north", "to.east", 17, "ends at"),
            ("10.9.0.0/24", "10.9.0.1/24", 5, "beyond its prefix"),
            ("10.9.0.0/24", "192.0.2.0/25", 5, "needed for the WAN"),
            ("10.9.0.0/24", "10.9.0.0/30", 4, "too small"),
            ("slots", "slot", 6, "unknown field `slot`"),
            ("slots = 2", "rails = 9", 6, "1 to 8 rails"),
            ("slots = 2", "rail.1 = { loss = '1 %' }", 6, "rails are 0 to 0"),
        ] {
            let text = TWO_SITES.replacen(from, to, 1);
            assert_ne!(text, TWO_SITES, "{from}");
            let error = parse(&text, "x").unwrap_err();
            assert_eq!(line_of(&text, error.at), line, "{}", error.message);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }

    #[test]
    fn every_cut_of_a_file_is_an_error_or_a_plan() {
        for end in 0..TWO_SITES.len() {
            let _ = parse(&TWO_SITES[..end], "x");
        }
    }

    const TWO_SITES: &str = r#"seed = 3
[[site]]
name = "north"
hosts = 2
subnet = "10.9.0.0/24"
slots = 2
[[site]]
name = "south"
hosts = ["alpha", "beta"]
subnet = "10.9.0.0/24"
inbound = false

[[link]]
between = ["north", "south"]
rate = "1 Gbit/s"
delay = "5 ms"
to.north = { rate = "1 Mbit/s" }
"#;
}
