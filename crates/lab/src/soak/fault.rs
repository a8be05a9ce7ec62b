//! Faults of a lab, and the requests that begin and end them.
//!
//! Pure. A kind of fault is a row of the table in `FaultKind::row`; `FaultLocations` lists where in
//! a plan a fault can happen. Each fault has an end request of its own, so faults at different
//! locations are independent.

use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::net::build::lan_device;
use crate::net::plan::Plan;
use crate::net::units::Rate;

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FaultKind {
    Loss1,
    Loss5,
    Corrupt,
    Reorder,
    Duplicate,
    Interface,
    SlowRail,
    WanCut,
    RelayStop,
}

/// Properties of a kind of fault.
struct Row {
    name: &'static str,
    what: &'static str,
    /// Range of the duration in milliseconds.
    lasts_ms: RangeInclusive<u64>,
    /// Parameters of the fault on a rail and on a WAN link; empty where the kind does not apply.
    rail: &'static str,
    wan: &'static str,
}

/// Rate of a slow rail that has no rate limit of its own: a tenth of the rate of most networks.
const SLOW: Rate = Rate { bits_per_second: 100_000_000 };

/// Locations in a lab at which faults can happen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FaultLocations {
    /// Names of emulated rails, with their rates.
    pub rails: Vec<(String, Option<Rate>)>,
    pub wan_links: Vec<String>,
    /// Hosts with their interfaces on emulated rails.
    pub interfaces: Vec<(String, String)>,
    /// Names of sites with a relay.
    pub relays: Vec<String>,
}

/// A fault at a location, with its requests to the lab.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultSpec {
    pub kind: FaultKind,
    /// Name of the location; two faults of the same location may not overlap.
    pub location: String,
    pub begin: String,
    pub end: String,
}

impl FaultKind {
    pub const ALL: [FaultKind; 9] = [
        FaultKind::Loss1,
        FaultKind::Loss5,
        FaultKind::Corrupt,
        FaultKind::Reorder,
        FaultKind::Duplicate,
        FaultKind::Interface,
        FaultKind::SlowRail,
        FaultKind::WanCut,
        FaultKind::RelayStop,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Short description.
    pub fn what(self) -> &'static str {
        self.row().what
    }

    /// Range of the duration in milliseconds.
    pub fn lasts_ms(self) -> RangeInclusive<u64> {
        self.row().lasts_ms
    }

    /// Every fault of this kind that a lab with these locations can have.
    pub fn specs(self, places: &FaultLocations) -> Vec<FaultSpec> {
        let row = self.row();
        let spec = |place: &str, begin: String, end: String| FaultSpec {
            kind: self,
            location: place.to_owned(),
            begin,
            end,
        };
        let mut found = Vec::new();
        let rails = places.rails.iter().map(|(name, _)| (name, row.rail));
        let links = rails.chain(places.wan_links.iter().map(|name| (name, row.wan)));
        for (name, change) in links.filter(|(_, change)| !change.is_empty()) {
            let begin = format!("set {name} {change}");
            found.push(spec(name, begin, format!("set {name} restore")));
        }
        match self {
            FaultKind::SlowRail => found.extend(places.rails.iter().map(|(name, rate)| {
                let begin = format!("set {name} rate={}", tenth(*rate).bits_per_second);
                spec(name, begin, format!("set {name} restore"))
            })),
            FaultKind::Interface => found.extend(places.interfaces.iter().map(|(host, device)| {
                let request = format!("interface {host} {device}");
                let place = format!("{host} {device}");
                spec(&place, format!("{request} down"), format!("{request} up"))
            })),
            FaultKind::RelayStop => found.extend(places.relays.iter().map(|site| {
                let place = format!("relay of {site}");
                spec(&place, format!("relay {site} stop"), format!("relay {site} continue"))
            })),
            _ => {}
        }
        found
    }

    fn row(self) -> Row {
        let (name, what, lasts_ms, rail, wan) = match self {
            FaultKind::Loss1 => {
                ("loss1", "1 % of packets lost", 2_000..=10_000, "loss=1%", "loss=1%")
            }
            FaultKind::Loss5 => {
                ("loss5", "5 % of packets lost", 2_000..=10_000, "loss=5%", "loss=5%")
            }
            // On a WAN link one corrupt packet ends a TLS connection, so fewer packets are
            // corrupted and some connections survive.
            FaultKind::Corrupt => (
                "corrupt",
                "bits flipped behind valid checksums",
                2_000..=10_000,
                "corrupt=1% repair_checksums=true",
                "corrupt=0.02% repair_checksums=true",
            ),
            FaultKind::Reorder => (
                "reorder",
                "5 % of packets overtaken by others",
                2_000..=10_000,
                "reorder=5% reorder_by=1ms",
                "reorder=5% reorder_by=5ms",
            ),
            FaultKind::Duplicate => (
                "duplicate",
                "5 % of packets twice",
                2_000..=10_000,
                "duplicate=5%",
                "duplicate=5%",
            ),
            FaultKind::Interface => ("interface", "an interface is down", 200..=5_000, "", ""),
            FaultKind::SlowRail => {
                ("slow", "a rail at a tenth of its rate", 2_000..=10_000, "", "")
            }
            FaultKind::WanCut => {
                ("wan-cut", "nothing passes between sites", 1_000..=20_000, "", "down")
            }
            FaultKind::RelayStop => {
                ("relay-stop", "a relay is stopped (SIGSTOP)", 5_000..=5_000, "", "")
            }
        };
        Row { name, what, lasts_ms, rail, wan }
    }
}

impl FromStr for FaultKind {
    type Err = String;
    fn from_str(text: &str) -> Result<FaultKind, String> {
        let names = FaultKind::ALL.map(FaultKind::name).join(", ");
        let found = FaultKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("there is no fault `{text}`; there are {names}"))
    }
}

impl FaultLocations {
    pub fn of(plan: &Plan) -> FaultLocations {
        let mut places = FaultLocations::default();
        for site in &plan.sites {
            for (number, rail) in site.rails.iter().enumerate() {
                let Some(shape) = &rail.shape else { continue };
                places.rails.push((site.rail_name(number), shape.rate));
                let hosts = site.hosts.iter().map(|host| (host.name.clone(), lan_device(number)));
                places.interfaces.extend(hosts);
            }
        }
        for link in &plan.links {
            let [a, b] = link.ends.map(|end| plan.sites[end].name.as_str());
            places.wan_links.push(format!("{a}-{b}"));
        }
        if plan.sites.len() > 1 {
            places.relays = plan.sites.iter().map(|site| site.name.clone()).collect();
        }
        places
    }
}

fn tenth(rate: Option<Rate>) -> Rate {
    rate.map_or(SLOW, |rate| Rate { bits_per_second: (rate.bits_per_second / 10).max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::file;

    #[test]
    fn every_kind_can_be_named() {
        for kind in FaultKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert!(!kind.lasts_ms().is_empty());
        }
        assert!("los".parse::<FaultKind>().unwrap_err().contains("loss1, loss5"));
    }

    #[test]
    fn places_are_those_of_the_plan() {
        let lab = "[[site]]\nname='a'\nhosts=2\nrails=2\nrail.1={rate='1 Gbit/s'}\n\
                   [[site]]\nname='b'\nhosts=1\n[[link]]\nbetween=['a','b']\n";
        let places = FaultLocations::of(&file::parse(lab, "x").unwrap());
        let count = |kind: FaultKind| kind.specs(&places).len();
        assert_eq!(count(FaultKind::Loss1), 3, "two rails and the WAN");
        assert_eq!(count(FaultKind::Interface), 4);
        assert_eq!(
            (count(FaultKind::SlowRail), count(FaultKind::WanCut), count(FaultKind::RelayStop)),
            (2, 1, 2)
        );
        let slow = FaultKind::SlowRail.specs(&places);
        assert_eq!(slow[0].begin, "set a-LAN0 rate=100000000");
        assert_eq!(slow[1].begin, "set a-LAN1 rate=100000000");
        let down = &FaultKind::Interface.specs(&places)[3];
        let [begin, end] = ["interface a-2 lan1 down", "interface a-2 lan1 up"];
        assert_eq!((down.begin.as_str(), down.end.as_str()), (begin, end));
        let alone = file::parse("[[site]]\nname='a'\nhosts=2\n", "x").unwrap();
        let none = FaultLocations::of(&alone);
        assert!(FaultKind::ALL.iter().all(|kind| kind.specs(&none).is_empty()));
    }
}
