//! The configuration that a relay reads when it starts: one TOML document.
//!
//! ```toml
//! job = "000102030405060708090a0b0c0d0e0f"    # 32 hexadecimal digits
//! key = "00…1f"                               # 64 hexadecimal digits
//! cluster = 0                                 # the relay's own cluster
//! listen = "0.0.0.0:0"                        # where ranks connect
//! unix = "@landbridge-relay-0"                # optional: where ranks of its node connect
//! wan_listen = "0.0.0.0:7711"                 # optional: where other relays connect
//! ca = "PEM"                                  # these three are needed to talk to other relays
//! certificate = "PEM"                         # for the DNS name relay-0.landbridge
//! private_key = "PEM"
//! ranks = [[0, 4], [4, 4]]                    # for each cluster: first process index, number
//! spawned = 65536                             # optional: indices each cluster owns after these,
//!                                             # in the order of the clusters for spawned processes
//! spin_micros = 0                             # optional: how long to spin before sleeping
//!
//! [[peer]]                                    # relays to connect to; the others connect to it
//! cluster = 1
//! address = "relay.example.org:7711"
//! ```

use std::io::{self, BufRead};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

use anyhow::{Context, Result, bail};
use landbridge_drive::engine::Peer;
use landbridge_drive::link::tls::Identity;
use landbridge_proto::id::{ClusterId, JobId, JobKey};
use landbridge_proto::route::routing_table::{ClusterRange, RoutingTable};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// The longest document in bytes: ten thousand clusters fit.
const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// The line that ends the document when more follows on standard input.
const END_OF_DOCUMENT: &str = "---";

/// The configuration of a relay: see the module documentation. Each field has been checked by
/// itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(deserialize_with = "job")]
    pub job: JobId,
    #[serde(deserialize_with = "key")]
    pub key: JobKey,
    pub cluster: u16,
    pub listen: SocketAddr,
    #[serde(default, deserialize_with = "unix_name")]
    pub unix: Option<String>,
    pub wan_listen: Option<SocketAddr>,
    ca: Option<String>,
    certificate: Option<String>,
    private_key: Option<String>,
    ranks: Vec<(u32, u32)>,
    #[serde(default)]
    spawned: u32,
    pub spin_micros: Option<u64>,
    #[serde(default)]
    peer: Vec<PeerEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerEntry {
    cluster: u16,
    #[serde(deserialize_with = "host_and_port")]
    address: String,
}

impl Config {
    /// Reads a document.
    ///
    /// # Errors
    /// The text names the line and the problem.
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() > DOCUMENT_BYTES_MAX {
            bail!("the configuration is longer than {DOCUMENT_BYTES_MAX} bytes");
        }
        let config: Config = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            anyhow::anyhow!("line {line}: {}", error.message())
        })?;
        config.check().with_context(|| format!("line {}", config.line_to_blame(text)))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        RoutingTable::new(ClusterId(self.cluster), self.clusters()).map_err(anyhow::Error::msg)?;
        for peer in &self.peer {
            if peer.cluster == self.cluster || peer.cluster as usize >= self.ranks.len() {
                bail!("there is no other cluster {} to connect to", peer.cluster);
            }
        }
        if (self.wan_listen.is_some() || !self.peer.is_empty()) && self.pems().is_none() {
            bail!("wan_listen and peer need ca, certificate and private_key");
        }
        Ok(())
    }

    /// The number of the line that decides what [`Self::check`] refuses.
    fn line_to_blame(&self, text: &str) -> usize {
        let is_bad = |peer: &PeerEntry| {
            peer.cluster == self.cluster || peer.cluster as usize >= self.ranks.len()
        };
        let word = match self.peer.iter().any(is_bad) {
            true => "[[peer]]",
            false if self.pems().is_none() && !self.peer.is_empty() => "[[peer]]",
            false if self.pems().is_none() && self.wan_listen.is_some() => "wan_listen",
            false => "ranks",
        };
        1 + text.lines().position(|line| line.trim_start().starts_with(word)).unwrap_or(0)
    }

    /// The processes of each cluster.
    pub fn clusters(&self) -> Vec<ClusterRange> {
        let spawned = self.spawned;
        self.ranks.iter().map(|&(first, count)| ClusterRange { first, count, spawned }).collect()
    }

    /// The TLS identity that this relay shows to other relays, if it has one.
    ///
    /// # Errors
    /// If a certificate or key cannot be used.
    pub fn identity(&self) -> Result<Option<Identity>> {
        let Some([ca, certificate, key]) = self.pems() else { return Ok(None) };
        Identity::new(ca, certificate, key).map(Some).map_err(anyhow::Error::msg)
    }

    fn pems(&self) -> Option<[&str; 3]> {
        Some([self.ca.as_deref()?, self.certificate.as_deref()?, self.private_key.as_deref()?])
    }

    /// The relays to connect to. Names are resolved once, here.
    ///
    /// # Errors
    /// If a name cannot be resolved.
    pub fn peers(&self) -> Result<Vec<Peer>> {
        let resolve = |peer: &PeerEntry| {
            let addresses: Vec<SocketAddr> = peer
                .address
                .to_socket_addrs()
                .with_context(|| format!("peer {}: {}", peer.cluster, peer.address))?
                .collect();
            Ok(Peer { cluster: ClusterId(peer.cluster), addresses })
        };
        self.peer.iter().map(resolve).collect()
    }
}

/// Reads the document from a file, or with `-` from standard input up to a line `---`.
///
/// # Errors
/// If the document cannot be read, or is too long.
pub fn read(path: &Path) -> Result<String> {
    if path != Path::new("-") {
        return std::fs::read_to_string(path).with_context(|| path.display().to_string());
    }
    read_document(io::stdin().lock()).context("standard input")
}

fn read_document(mut input: impl BufRead) -> Result<String> {
    let mut text = String::new();
    loop {
        let start = text.len();
        let bytes = input.read_line(&mut text)?;
        if bytes == 0 || text[start..].trim_end() == END_OF_DOCUMENT {
            text.truncate(start);
            return Ok(text);
        }
        if text.len() > DOCUMENT_BYTES_MAX {
            bail!("the configuration is longer than {DOCUMENT_BYTES_MAX} bytes");
        }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text[..at.min(text.len())].matches('\n').count()
}

fn job<'de, D: Deserializer<'de>>(input: D) -> Result<JobId, D::Error> {
    let text = String::deserialize(input)?;
    JobId::from_hex(&text).ok_or_else(|| D::Error::custom("job must be 32 hexadecimal digits"))
}

fn key<'de, D: Deserializer<'de>>(input: D) -> Result<JobKey, D::Error> {
    let text = String::deserialize(input)?;
    JobKey::from_hex(&text).ok_or_else(|| D::Error::custom("key must be 64 hexadecimal digits"))
}

fn unix_name<'de, D: Deserializer<'de>>(input: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(input)?;
    match text.strip_prefix('@') {
        // The address of a Unix socket has space for a name of 107 bytes.
        Some(name) if !name.is_empty() && name.len() <= 107 => Ok(Some(name.into())),
        _ => Err(D::Error::custom("unix must be @ and a name of at most 107 bytes")),
    }
}

fn host_and_port<'de, D: Deserializer<'de>>(input: D) -> Result<String, D::Error> {
    let text = String::deserialize(input)?;
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text),
        _ => Err(D::Error::custom("an address must be host:port")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "job = \"000102030405060708090a0b0c0d0e0f\"\n\
        key = \"0000000000000000000000000000000000000000000000000000000000000001\"\n\
        cluster = 0\n\
        listen = \"127.0.0.1:0\"\n\
        ranks = [[0, 4], [4, 4]]\n";

    #[test]
    fn a_relay_without_peers_needs_no_certificate() {
        let config = Config::parse(GOOD).unwrap();
        assert_eq!(config.clusters()[1], ClusterRange { first: 4, count: 4, spawned: 0 });
        assert!(config.identity().unwrap().is_none() && config.peers().unwrap().is_empty());
        assert!(config.unix.is_none());
    }

    #[test]
    fn errors_name_the_line() {
        for (from, to, line) in [
            ("000102", "0001", 1),
            ("cluster = 0", "cluster = -1", 3),
            ("cluster = 0", "cluster = 2", 5),
            ("127.0.0.1:0", "somewhere", 4),
            ("[4, 4]", "[3, 4]", 5),
            ("[4, 4]", "[4]", 5),
            ("ranks", "wan_listen = \"0.0.0.0:1\"\nranks", 5),
            ("ranks", "speed = 3\nranks", 5),
            ("ranks", "spawned = 65537\nranks", 6),
            ("ranks", "spawned = -1\nranks", 5),
            ("ranks", "unix = \"name\"\nranks", 5),
        ] {
            let error = Config::parse(&GOOD.replace(from, to)).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(&format!("line {line}:")), "{from} → {to}: {text}");
        }
        let peer = |text: &str| Config::parse(&format!("{GOOD}{text}")).map(|_| ()).unwrap_err();
        for text in
            ["[[peer]]\ncluster = 0\naddress = \"a:1\"", "[[peer]]\ncluster = 1\naddress = \"a:1\""]
        {
            assert!(format!("{:#}", peer(text)).contains("line 6:"));
        }
        assert!(
            format!("{:#}", peer("[[peer]]\ncluster = 1\naddress = \"a\"")).contains("line 8:")
        );
    }

    #[test]
    fn the_document_ends_at_its_mark() {
        let text = |input: &str| read_document(input.as_bytes()).unwrap();
        assert_eq!(text("a = 1\n---\nb = 2\n"), "a = 1\n");
        assert_eq!(text("a = 1"), "a = 1");
        let endless = "x".repeat(DOCUMENT_BYTES_MAX + 1);
        assert!(read_document(endless.as_bytes()).is_err());
    }
}
