//! `--hosts` and `--hostfile`: a topology of one cluster, without a relay unless a relay is wanted.
//! `--clusters`: this machine as several clusters with relays on the loopback interface. The module
//! is pure.

use anyhow::{Context, Result, bail};

use crate::spawn::local::LocalSpawn;
use crate::spawn::ssh::Ssh;
use crate::topology::{Cluster, Host, HostAccess, Relay, Topology};

/// Parses a list of `HOST` or `HOST:N`, and keeps its order. A host that is named twice appears
/// once, with the sum of both counts.
pub fn parse_list(words: &[String]) -> Result<Vec<(String, Option<u32>)>> {
    let mut hosts = Vec::new();
    for word in words {
        let (name, slots) = match word.rsplit_once(':') {
            Some((name, slots)) => (name, Some(parse_slots(slots, word)?)),
            None => (word.as_str(), None),
        };
        add(&mut hosts, name, slots)?;
    }
    Ok(hosts)
}

/// Parses a host file: `HOST`, `HOST:N` or `HOST slots=N` on each line; `#` begins a comment.
pub fn parse_file(text: &str) -> Result<Vec<(String, Option<u32>)>> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if !line.is_empty() {
            let result = parse_line(line, &mut hosts);
            result.with_context(|| format!("line {}", index + 1))?;
        }
    }
    if hosts.is_empty() {
        bail!("it names no host");
    }
    Ok(hosts)
}

fn parse_line(line: &str, hosts: &mut Vec<(String, Option<u32>)>) -> Result<()> {
    let mut words = line.split_ascii_whitespace();
    let host = words.next().unwrap_or("");
    let (mut name, mut slots) = (host, None);
    if let Some((before, count)) = host.rsplit_once(':') {
        (name, slots) = (before, Some(parse_slots(count, host)?));
    }
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) => slots = Some(parse_slots(count, word)?),
            // Host files of other launchers hold this key; here the slots are the limit.
            Some(("max_slots" | "max-slots", _)) => {}
            _ => bail!("{word:?} is not understood; write HOST, HOST:N or HOST slots=N"),
        }
    }
    add(hosts, name, slots)
}

fn parse_slots(text: &str, word: &str) -> Result<u32> {
    text.parse().with_context(|| format!("{word:?}: {text:?} is not a number of ranks"))
}

fn add(hosts: &mut Vec<(String, Option<u32>)>, name: &str, slots: Option<u32>) -> Result<()> {
    if name.is_empty() || name.starts_with('-') {
        bail!("{name:?} is not a host name");
    }
    match hosts.iter_mut().find(|(known, _)| known == name) {
        Some((_, known)) => {
            *known = Some(known.unwrap_or(1) + slots.unwrap_or(1));
        }
        None => hosts.push((name.to_string(), slots)),
    }
    Ok(())
}

/// A topology of one cluster with these hosts. `here` is the name of this machine, which needs no
/// ssh. The first host has a relay if `has_relay`.
pub fn topology(hosts: Vec<(String, Option<u32>)>, here: &str, has_relay: bool) -> Topology {
    let host = |(name, slots): (String, Option<u32>)| {
        let local = name == here || name == "localhost";
        let access = if local {
            HostAccess::Local(LocalSpawn::default())
        } else {
            HostAccess::Ssh(Ssh::default())
        };
        Host { name, login: None, address: None, slots, is_spare: false, access }
    };
    let hosts: Vec<Host> = hosts.into_iter().map(host).collect();
    // Other hosts reach the first host by the name by which this machine reaches it. A single host
    // needs no network.
    let listen = if hosts.len() > 1 { "0.0.0.0:0" } else { "127.0.0.1:0" }.to_string();
    let relay = Relay { host: 0, listen, wan_listen: None, public: None };
    let relay = Some(relay).filter(|_| has_relay);
    let cluster = Cluster { name: "hosts".into(), relay, hosts, landbridge: None };
    Topology { clusters: vec![cluster], links: Vec::new() }
}

/// This machine divided into clusters, with `ranks` slots as evenly as possible. With fewer ranks
/// than clusters each rank has one, and the others are left out: a script that tries one rank after
/// two need not ask for other clusters.
pub fn cut(here: &str, clusters: u32, ranks: u32) -> Result<Topology> {
    if clusters == 0 {
        bail!("{ranks} ranks cannot be cut into 0 clusters");
    }
    let clusters = clusters.min(ranks.max(1));
    let cluster = |number: u32| {
        let slots = ranks / clusters + u32::from(number < ranks % clusters);
        let loopback = "127.0.0.1:0".to_string();
        Cluster {
            name: format!("c{number}"),
            relay: Some(Relay {
                host: 0,
                listen: loopback.clone(),
                wan_listen: Some(loopback),
                public: None,
            }),
            hosts: vec![Host {
                name: here.to_string(),
                login: None,
                address: None,
                slots: Some(slots),
                is_spare: false,
                access: HostAccess::Local(LocalSpawn::default()),
            }],
            landbridge: None,
        }
    };
    Ok(Topology { clusters: (0..clusters).map(cluster).collect(), links: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    #[test]
    fn lists_are_read() {
        let hosts = parse_list(&words(&["a", "b:4", "a", "b:1"])).unwrap();
        assert_eq!(hosts, [("a".to_string(), Some(2)), ("b".to_string(), Some(5))]);
        assert!(parse_list(&words(&["b:x"])).unwrap_err().to_string().contains("\"x\""));
        assert!(parse_list(&words(&["-oProxyCommand=x"])).is_err());
    }

    #[test]
    fn files_are_read_with_line_numbers_in_errors() {
        let text = "# hosts\na slots=4 max_slots=8\n\nb:2\nc\n";
        let expected = [("a", Some(4)), ("b", Some(2)), ("c", None)];
        assert_eq!(parse_file(text).unwrap(), expected.map(|(n, s)| (n.to_string(), s)));
        let error = parse_file("a\nb cores=2\n").unwrap_err();
        assert_eq!(error.to_string(), "line 2");
        assert!(parse_file("# none\n").is_err());
    }

    #[test]
    fn own_machine_needs_no_ssh() {
        let hosts = ["here", "localhost", "far"].map(|name| (name.to_string(), None));
        let topology = topology(hosts.into(), "here", false);
        let local = |host: &Host| matches!(host.access, HostAccess::Local(_));
        let local: Vec<bool> = topology.clusters[0].hosts.iter().map(local).collect();
        assert_eq!(local, [true, true, false]);
    }

    #[test]
    fn a_machine_is_cut_evenly() {
        let topology = cut("here", 3, 8).unwrap();
        let slots: Vec<_> = topology.clusters.iter().map(|c| c.hosts[0].slots).collect();
        assert_eq!(slots, [Some(3), Some(3), Some(2)]);
        assert!(cut("here", 3, 2).is_err());
        assert!(cut("here", 0, 2).is_err());
    }
}
