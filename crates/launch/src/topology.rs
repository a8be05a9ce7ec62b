//! The topology file: clusters, their hosts, their relays, and which relay dials which.
//!
//! A text enters; a [`Topology`] whose names and addresses are consistent leaves, or an error with
//! the number of its line. The launcher reaches the relay's host (without a relay, the first host)
//! of each cluster, and that host reaches the other hosts of its cluster.
//!
//! Every key, with its default and its bounds, is a row of `docs/TOPOLOGY.md`, which is written for
//! users; the tests of documents compare the tables there with the entries below.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use crate::spawn::Spawn;
use crate::spawn::local::LocalSpawn;
use crate::spawn::ssh::Ssh;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    pub clusters: Vec<Cluster>,
    pub links: Vec<TopologyLink>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    pub name: String,
    pub relay: Option<Relay>,
    pub hosts: Vec<Host>,
    /// Path of `landbridge` on the hosts of the cluster; `None` stands for the path of the
    /// launcher.
    pub landbridge: Option<String>,
}

impl Cluster {
    /// Index of the host that the launcher reaches.
    pub fn top_host(&self) -> usize {
        self.relay.as_ref().map_or(0, |relay| relay.host)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relay {
    /// Index of the relay's host among the hosts of the cluster.
    pub host: usize,
    pub listen: String,
    pub wan_listen: Option<String>,
    pub public: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub login: Option<String>,
    pub address: Option<String>,
    /// Ranks that the host takes; `None` stands for an even share of the remaining ranks.
    pub slots: Option<u32>,
    /// The host has no ranks until another host is lost.
    pub is_spare: bool,
    pub access: HostAccess,
}

/// How an agent on a host is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAccess {
    Local(LocalSpawn),
    Ssh(Ssh),
}

impl Host {
    /// The command that starts an agent on this host.
    pub fn spawn_command(&self, agent: &[String]) -> Vec<String> {
        let destination = self.login.as_deref().unwrap_or(&self.name);
        match &self.access {
            HostAccess::Local(local) => local.command(destination, agent),
            HostAccess::Ssh(ssh) => ssh.command(destination, agent),
        }
    }
}

/// A link in the topology file: the relay of cluster `from` dials the relay of cluster `to`; both
/// are indices of clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyLink {
    pub from: usize,
    pub to: usize,
    pub address: Option<String>,
}

/// An error in a topology file, with the number of its line, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyError {
    pub line: usize,
    pub text: String,
}

impl std::fmt::Display for TopologyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

impl std::error::Error for TopologyError {}

impl Topology {
    pub fn parse(text: &str) -> Result<Topology, TopologyError> {
        let file: FileEntry = toml::from_str(text).map_err(|error| TopologyError {
            line: line_of(text, error.span().map_or(0, |span| span.start)),
            text: error.message().trim_end().to_string(),
        })?;
        TopologyReader { text }.topology(file)
    }
}

/// The number, counted from 1, of the line that holds the byte at `offset`.
pub fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    #[serde(default)]
    cluster: Vec<Spanned<ClusterEntry>>,
    #[serde(default)]
    link: Vec<Spanned<LinkEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterEntry {
    name: Spanned<String>,
    spawn: Option<Spanned<String>>,
    ssh: Option<Spanned<Vec<String>>>,
    user: Option<String>,
    port: Option<Spanned<u16>>,
    landbridge: Option<String>,
    relay: Option<RelayEntry>,
    #[serde(default)]
    host: Vec<HostEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RelayEntry {
    host: Spanned<String>,
    listen: Spanned<String>,
    wan_listen: Option<Spanned<String>>,
    public: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    name: Spanned<String>,
    login: Option<String>,
    address: Option<Spanned<String>>,
    slots: Option<u32>,
    #[serde(default)]
    spare: bool,
    shell: Option<Spanned<Vec<String>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    from: Spanned<String>,
    to: Spanned<String>,
    address: Option<Spanned<String>>,
}

/// Turns the entries of a file into a topology; the text of the file serves to find line numbers.
struct TopologyReader<'a> {
    text: &'a str,
}

type Checked<T> = Result<T, TopologyError>;

impl TopologyReader<'_> {
    fn error<T, U>(&self, at: &Spanned<U>, text: String) -> Checked<T> {
        Err(TopologyError { line: line_of(self.text, at.span().start), text })
    }

    fn topology(&self, file: FileEntry) -> Checked<Topology> {
        if file.cluster.is_empty() {
            let text = "no [[cluster]]: a topology needs at least one".to_string();
            return Err(TopologyError { line: 1, text });
        }
        let mut names = BTreeSet::new();
        let mut clusters = Vec::new();
        for entry in &file.cluster {
            let name = &entry.get_ref().name;
            self.check_name(name, "cluster")?;
            if !names.insert(name.get_ref().clone()) {
                return self.error(name, format!("a second cluster named {:?}", name.get_ref()));
            }
            clusters.push(self.cluster(entry)?);
        }
        let mut links: Vec<TopologyLink> = Vec::new();
        for entry in &file.link {
            let link = self.link(entry, &clusters)?;
            let joins = |other: &TopologyLink| {
                [(link.from, link.to), (link.to, link.from)].contains(&(other.from, other.to))
            };
            if links.iter().any(joins) {
                let [one, other] = [link.from, link.to].map(|at| &clusters[at].name);
                return self.error(entry, format!("a second [[link]] of {one} and {other}"));
            }
            links.push(link);
        }
        Ok(Topology { clusters, links })
    }

    fn cluster(&self, entry: &Spanned<ClusterEntry>) -> Checked<Cluster> {
        let cluster = entry.get_ref();
        if cluster.host.is_empty() {
            let name = cluster.name.get_ref();
            return self.error(entry, format!("cluster {name:?} has no [[cluster.host]]"));
        }
        let access = self.access(cluster)?;
        let mut names = BTreeSet::new();
        let mut hosts = Vec::new();
        for host in &cluster.host {
            if !names.insert(host.name.get_ref()) {
                let name = host.name.get_ref();
                return self.error(&host.name, format!("a second host named {name:?}"));
            }
            hosts.push(self.host(host, &access)?);
        }
        let relay = cluster.relay.as_ref().map(|relay| self.relay(relay, &hosts)).transpose()?;
        if let (Some(entry), Some(relay)) = (&cluster.relay, &relay)
            && hosts[relay.host].is_spare
        {
            let text = "the relay's host cannot be spare: it is needed from the start";
            return self.error(&entry.host, text.to_string());
        }
        let name = cluster.name.get_ref().clone();
        Ok(Cluster { name, relay, hosts, landbridge: cluster.landbridge.clone() })
    }

    fn access(&self, cluster: &ClusterEntry) -> Checked<HostAccess> {
        match cluster.spawn.as_ref().map(|spawn| (spawn, spawn.get_ref().as_str())) {
            Some((_, "local")) => Ok(HostAccess::Local(LocalSpawn::default())),
            None | Some((_, "ssh")) => {
                let command = match &cluster.ssh {
                    Some(command) if command.get_ref().is_empty() => {
                        let text = "`ssh` is empty: give a command such as [\"ssh\"]".to_string();
                        return self.error(command, text);
                    }
                    Some(command) => command.get_ref().clone(),
                    None => Ssh::default().command,
                };
                let port = match &cluster.port {
                    Some(port) if *port.get_ref() == 0 => {
                        let text = "port is a number from 1 to 65535, not 0".to_string();
                        return self.error(port, text);
                    }
                    port => port.as_ref().map(|port| *port.get_ref()),
                };
                Ok(HostAccess::Ssh(Ssh { command, user: cluster.user.clone(), port }))
            }
            Some((spawn, other)) => {
                self.error(spawn, format!("spawn is \"ssh\" or \"local\", not {other:?}"))
            }
        }
    }

    fn host(&self, entry: &HostEntry, access: &HostAccess) -> Checked<Host> {
        self.check_name(&entry.name, "host")?;
        if let Some(address) = &entry.address
            && address.get_ref().parse::<IpAddr>().is_err()
        {
            let text = format!("address is an IP address, not {:?}", address.get_ref());
            return self.error(address, text);
        }
        let access = match &entry.shell {
            Some(shell) if shell.get_ref().is_empty() => {
                return self.error(shell, "`shell` is empty: leave it out".to_string());
            }
            Some(shell) => HostAccess::Local(LocalSpawn { prefix: shell.get_ref().clone() }),
            None => access.clone(),
        };
        Ok(Host {
            name: entry.name.get_ref().clone(),
            login: entry.login.clone(),
            address: entry.address.as_ref().map(|address| address.get_ref().clone()),
            slots: Some(entry.slots.unwrap_or(1)),
            is_spare: entry.spare,
            access,
        })
    }

    fn relay(&self, entry: &RelayEntry, hosts: &[Host]) -> Checked<Relay> {
        let Some(host) = hosts.iter().position(|host| host.name == *entry.host.get_ref()) else {
            let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            let text = format!(
                "the relay's host {:?} is none of this cluster's hosts ({})",
                entry.host.get_ref(),
                known.join(", ")
            );
            return self.error(&entry.host, text);
        };
        self.check_socket_address(&entry.listen, "listen")?;
        if let Some(wan_listen) = &entry.wan_listen {
            let address = self.check_socket_address(wan_listen, "wan_listen")?;
            if address.ip().is_unspecified() && entry.public.is_none() {
                let text =
                    "wan_listen names no address others could dial: add public = \"HOST:PORT\"";
                return self.error(wan_listen, text.to_string());
            }
        }
        if let Some(public) = &entry.public {
            self.check_dial_address(public, "public")?;
            if entry.wan_listen.is_none() {
                let text = "public without wan_listen: nothing would be listening there";
                return self.error(public, text.to_string());
            }
        }
        Ok(Relay {
            host,
            listen: entry.listen.get_ref().clone(),
            wan_listen: entry.wan_listen.as_ref().map(|address| address.get_ref().clone()),
            public: entry.public.as_ref().map(|address| address.get_ref().clone()),
        })
    }

    fn link(&self, entry: &Spanned<LinkEntry>, clusters: &[Cluster]) -> Checked<TopologyLink> {
        let link = entry.get_ref();
        let from = self.known_cluster(&link.from, clusters)?;
        let to = self.known_cluster(&link.to, clusters)?;
        if from == to {
            return self.error(&link.to, "a link from a cluster to itself".to_string());
        }
        let accepts = clusters[to].relay.as_ref().is_some_and(|relay| relay.wan_listen.is_some());
        if !accepts {
            let name = link.to.get_ref();
            let text = format!("the relay of {name:?} has no wan_listen, so no one can dial it");
            return self.error(&link.to, text);
        }
        if let Some(address) = &link.address {
            self.check_dial_address(address, "address")?;
        }
        let address = link.address.as_ref().map(|address| address.get_ref().clone());
        Ok(TopologyLink { from, to, address })
    }

    fn known_cluster(&self, name: &Spanned<String>, clusters: &[Cluster]) -> Checked<usize> {
        match clusters.iter().position(|cluster| cluster.name == *name.get_ref()) {
            Some(index) => Ok(index),
            None => self.error(name, format!("no cluster is named {:?}", name.get_ref())),
        }
    }

    fn check_name(&self, name: &Spanned<String>, what: &str) -> Checked<()> {
        let text = name.get_ref();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        // ssh would take a leading '-' for an option.
        if text.is_empty() || text.starts_with('-') || !text.chars().all(plain) {
            let text = format!("a {what}'s name is made of letters, digits, '-', '_' and '.'");
            return self.error(name, text);
        }
        Ok(())
    }

    fn check_socket_address(&self, text: &Spanned<String>, key: &str) -> Checked<SocketAddr> {
        match text.get_ref().parse() {
            Ok(address) => Ok(address),
            Err(_) => {
                let found = text.get_ref();
                self.error(text, format!("{key} is IP:PORT, such as 10.0.0.1:7710, not {found:?}"))
            }
        }
    }

    fn check_dial_address(&self, text: &Spanned<String>, key: &str) -> Checked<()> {
        let parts = text.get_ref().rsplit_once(':');
        let good =
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !good {
            return self.error(text, format!("{key} is HOST:PORT, not {:?}", text.get_ref()));
        }
        Ok(())
    }
}

/// The topology file of a job that names no other hosts: the file on the command line, or the file
/// that LANDBRIDGE_TOPOLOGY names.
pub fn topology_file(named: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os("LANDBRIDGE_TOPOLOGY").filter(|file| !file.is_empty());
    named.map(PathBuf::from).or_else(|| variable().map(Into::into))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: &str = r#"
[[cluster]]
name = "nancy"
user = "ann"
port = 2222
[cluster.relay]
host = "gw"
listen = "10.1.0.1:7710"
wan_listen = "192.0.2.1:7711"
[[cluster.host]]
name = "n1"
address = "10.1.0.11"
slots = 2
[[cluster.host]]
name = "gw"
slots = 0
shell = ["nsenter", "--net=/run/gw", "--"]

[[cluster]]
name = "rennes"
spawn = "local"
[cluster.relay]
host = "r1"
listen = "127.0.0.1:0"
[[cluster.host]]
name = "r1"

[[link]]
from = "rennes"
to = "nancy"
address = "nat.example.org:7711"
"#;

    #[test]
    fn a_whole_file_is_read() {
        let topology = Topology::parse(GRID).unwrap();
        let nancy = &topology.clusters[0];
        assert_eq!(nancy.top_host(), 1);
        assert_eq!(nancy.hosts[0].slots, Some(2));
        let agent = ["lb".to_string(), "agent".to_string()];
        let command = nancy.hosts[0].spawn_command(&agent);
        assert_eq!(command[0], "ssh");
        assert!(command.contains(&"2222".to_string()) && command.contains(&"ann".to_string()));
        assert_eq!(command.last().unwrap(), "lb agent");
        let gateway = nancy.hosts[1].spawn_command(&agent);
        assert_eq!(gateway, ["nsenter", "--net=/run/gw", "--", "lb", "agent"]);
        let rennes = &topology.clusters[1];
        assert_eq!(rennes.hosts[0].spawn_command(&agent), agent);
        assert_eq!(rennes.hosts[0].slots, Some(1));
        let address = Some("nat.example.org:7711".to_string());
        assert_eq!(topology.links, [TopologyLink { from: 1, to: 0, address }]);
    }

    /// Each row: a line of the valid file, its replacement, and a part of the expected error.
    const MISTAKES: [(&str, &str, &str); 15] = [
        ("name = \"rennes\"", "name = \"nancy\"", "second cluster"),
        ("name = \"n1\"", "name = \"gw\"", "second host"),
        ("name = \"n1\"", "name = \"-oProxyCommand\"", "name is made of"),
        ("host = \"gw\"", "host = \"gv\"", "none of this cluster's hosts (n1, gw)"),
        ("listen = \"10.1.0.1:7710\"", "listen = \"10.1.0.1\"", "listen is IP:PORT"),
        ("wan_listen = \"192.0.2.1:7711\"", "wan_listen = \"0.0.0.0:7711\"", "add public"),
        ("wan_listen = \"192.0.2.1:7711\"", "public = \"a:1\"", "without wan_listen"),
        ("address = \"10.1.0.11\"", "address = \"n1\"", "IP address"),
        ("spawn = \"local\"", "spawn = \"rsh\"", "\"ssh\" or \"local\""),
        ("slots = 2", "slots = -2", "invalid"),
        ("slots = 2", "slot = 2", "unknown field"),
        ("port = 2222", "port = 222222", "invalid"),
        ("port = 2222", "port = 0", "port is a number from 1 to 65535, not 0"),
        ("from = \"rennes\"", "from = \"renes\"", "no cluster is named"),
        ("to = \"nancy\"", "to = \"rennes\"", "itself"),
    ];

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        for (good, bad, piece) in MISTAKES {
            let line = 1 + GRID.lines().position(|line| line == good).expect(good);
            let error = Topology::parse(&GRID.replacen(good, bad, 1)).expect_err(bad);
            assert!(error.text.contains(piece), "{bad}: {error}");
            // A duplicate is reported at the line of the second entry.
            let duplicate = piece.starts_with("second host");
            let expected = if duplicate { line + 4 } else { line };
            let expected = if duplicate { line_of_second_host() } else { expected };
            assert_eq!(error.line, expected, "{bad}: {error}");
        }
    }

    #[test]
    fn a_second_link_of_two_clusters_is_reported() {
        let second = "\n[[link]]\nfrom = \"rennes\"\nto = \"nancy\"\n";
        let error = Topology::parse(&format!("{GRID}{second}")).unwrap_err();
        assert_eq!(error.text, "a second [[link]] of rennes and nancy");
        assert_eq!(error.line, GRID.lines().count() + 2);
    }

    fn line_of_second_host() -> usize {
        1 + GRID.lines().position(|line| line == "name = \"gw\"").unwrap()
    }

    #[test]
    fn broken_toml_and_missing_parts_are_reported_with_their_line() {
        assert_eq!(Topology::parse("[[cluster]]\nname = \n").unwrap_err().line, 2);
        assert_eq!(Topology::parse("\n\n[[cluster]]\nname = \"a\"\n").unwrap_err().line, 3);
        assert!(Topology::parse("").unwrap_err().text.contains("no [[cluster]]"));
        let outbound_only = GRID.replace("to = \"nancy\"", "to = \"rennes\"");
        let outbound_only = outbound_only.replace("from = \"rennes\"", "from = \"nancy\"");
        assert!(Topology::parse(&outbound_only).unwrap_err().text.contains("no wan_listen"));
    }
}
