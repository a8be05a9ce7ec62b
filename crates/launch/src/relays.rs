//! The relays of a running job: the configuration of each relay, made once the addresses of the
//! relays that it dials are known, and the certificates by which relays identify each other.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use landbridge_proto::setting;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde::Serialize;

use crate::control::Job;
use crate::groups;
use crate::plan::{Plan, RelayPlan};
use crate::relay_links::{RelayLinks, RelayLocation, RelayPair};

pub struct Relays {
    job: String,
    key: String,
    plans: Vec<RelayPlan>,
    order: Vec<usize>,
    /// First rank and number of ranks of each cluster.
    ranks: Vec<[u32; 2]>,
    /// Number of indices for spawned processes of each cluster.
    spawned: u32,
    identities: Vec<Identity>,
    authority: String,
    /// For each cluster whose relay is ready: the addresses at which ranks and other relays reach
    /// the relay.
    ready: Vec<Option<(String, String)>>,
    /// Name and relay host of each cluster.
    names: Vec<(String, String)>,
    links: RelayLinks,
}

struct Identity {
    certificate: String,
    private_key: String,
}

/// The document that a relay reads when it starts.
#[derive(Serialize)]
struct Config<'a> {
    job: &'a str,
    key: &'a str,
    cluster: usize,
    listen: &'a str,
    unix: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    wan_listen: Option<&'a str>,
    ca: &'a str,
    certificate: &'a str,
    private_key: &'a str,
    ranks: &'a [[u32; 2]],
    spawned: u32,
    peer: Vec<Peer>,
}

#[derive(Serialize)]
struct Peer {
    cluster: usize,
    address: String,
}

/// Whether the job asks for UDP between relays.
fn wants_udp(job: &Job) -> bool {
    let name = setting::WAN_UDP.variable();
    let said = job.environment.iter().find(|(variable, _)| *variable == name);
    let value = said.and_then(|(_, text)| setting::WAN_UDP.parse(text).ok());
    value.and_then(|value| value.word()) == Some("on")
}

impl Relays {
    /// Makes the certificates and the state of a job whose relays have not started. `patience` is
    /// the time that links between relays may be missing.
    pub fn new(job: &Job, plan: &Plan, patience: Duration) -> Result<Relays> {
        let count = plan.relays.len();
        let (authority, identities) =
            identities(&job.id, count).context("cannot make the job's certificates")?;
        let ranks = plan.nodes.iter().map(|node| [node.lowest_rank(), node.total_ranks()]);
        Ok(Relays {
            job: job.id.clone(),
            key: job.key.clone(),
            plans: plan.relays.clone(),
            order: plan.relay_order.clone(),
            ranks: ranks.collect(),
            spawned: groups::reserve(
                plan.size,
                plan.nodes.len(),
                groups::indices(&job.environment),
            ),
            identities,
            authority,
            ready: vec![None; count],
            names: plan
                .nodes
                .iter()
                .map(|node| (node.cluster_name.clone(), node.name.clone()))
                .collect(),
            links: RelayLinks::new(patience).over_udp(wants_udp(job)),
        })
    }

    /// The cluster and the configuration of the relay at position `place` of the start order.
    pub fn config(&self, place: usize) -> Option<(usize, String)> {
        let &cluster = self.order.get(place)?;
        let plan = &self.plans[cluster];
        let peer = plan.dials.iter().map(|dial| Peer {
            cluster: dial.cluster,
            address: self.fill_port(&dial.address, dial.cluster),
        });
        let identity = &self.identities[cluster];
        let config = Config {
            job: &self.job,
            key: &self.key,
            cluster,
            listen: &plan.listen,
            unix: &plan.unix,
            wan_listen: plan.wan_listen.as_deref(),
            ca: &self.authority,
            certificate: &identity.certificate,
            private_key: &identity.private_key,
            ranks: &self.ranks,
            spawned: self.spawned,
            peer: peer.collect(),
        };
        // The configuration consists of text, numbers and lists, all of which TOML can represent.
        Some((cluster, toml::to_string(&config).expect("a configuration is a TOML document")))
    }

    /// Records the addresses at which ranks and other relays reach the relay of `cluster`.
    pub fn handle_ready(&mut self, cluster: usize, ranks: &str, relays: &str) -> Result<()> {
        if !ranks.contains(':') {
            bail!("the relay of cluster {cluster} listens on {ranks:?}, which is no address");
        }
        self.ready[cluster] = Some((ranks.to_string(), relays.to_string()));
        Ok(())
    }

    /// The links between relays. [`Relays::expect_links`] adds the links of a relay that is being
    /// started.
    pub fn links(&mut self) -> &mut RelayLinks {
        &mut self.links
    }

    /// Adds the links of the relay of `cluster`, which is being started and will report on these
    /// links.
    pub fn expect_links(&mut self, cluster: usize) {
        let pair = |dial: &crate::plan::Dial| RelayPair {
            from: cluster,
            to: dial.cluster,
            address: self.fill_port(&dial.address, dial.cluster),
        };
        let pairs = self.plans[cluster].dials.iter().map(pair).collect();
        let place = |cluster: usize| {
            let (name, host) = self.names[cluster].clone();
            let listens = self.ready[cluster].as_ref().map(|(_, relays)| relays.clone());
            RelayLocation { cluster: name, host, listens: listens.unwrap_or_default() }
        };
        self.links.expect(pairs, place);
    }

    /// The address at which the ranks of a cluster reach their relay; empty for a cluster without a
    /// relay.
    pub fn rank_address(&self, cluster: usize) -> String {
        let Some(Some((ranks, _))) = self.ready.get(cluster) else { return String::new() };
        let unspecified = |address: std::net::SocketAddr| address.ip().is_unspecified();
        match ranks.rsplit_once(':') {
            Some((_, port)) if ranks.parse().is_ok_and(unspecified) => {
                format!("{}:{port}", self.plans[cluster].host_address)
            }
            _ => ranks.clone(),
        }
    }

    /// Replaces port 0 by the port that the relay of `cluster` has reported.
    fn fill_port(&self, address: &str, cluster: usize) -> String {
        let reported = self.ready[cluster].as_ref().and_then(|(_, relays)| relays.rsplit_once(':'));
        match (address.rsplit_once(':'), reported) {
            (Some((host, "0")), Some((_, port))) => format!("{host}:{port}"),
            _ => address.to_string(),
        }
    }
}

/// Makes a certificate authority for one job, whose key is dropped after signing, and one
/// certificate for each relay, with the name `relay-N.landbridge`.
fn identities(job: &str, count: usize) -> Result<(String, Vec<Identity>), rcgen::Error> {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, format!("landbridge job {job}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let identity = |cluster: usize| {
        let name = format!("relay-{cluster}.landbridge");
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name.clone()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &authority)?;
        Ok(Identity { certificate: certificate.pem(), private_key: key.serialize_pem() })
    };
    let identities = (0..count).map(identity).collect::<Result<_, rcgen::Error>>()?;
    Ok((authority.pem(), identities))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Dial;

    fn relay(dials: Vec<Dial>) -> RelayPlan {
        RelayPlan {
            listen: "0.0.0.0:0".into(),
            unix: "@x".into(),
            wan_listen: None,
            host_address: "10.0.0.9".into(),
            dials,
        }
    }

    fn relays() -> Relays {
        let (authority, identities) = identities("j", 2).unwrap();
        let dial = Dial { cluster: 1, address: "192.0.2.7:0".into() };
        Relays {
            job: "j".into(),
            key: "k".into(),
            plans: vec![relay(vec![dial]), relay(vec![])],
            order: vec![1, 0],
            ranks: vec![[0, 4], [4, 4]],
            spawned: 9,
            identities,
            authority,
            ready: vec![None, None],
            names: vec![("c0".into(), "n0".into()), ("c1".into(), "n1".into())],
            links: RelayLinks::new(Duration::ZERO),
        }
    }

    #[test]
    fn ports_are_filled_in_from_what_was_reported() {
        let mut relays = relays();
        assert_eq!(relays.config(0).unwrap().0, 1);
        relays.handle_ready(1, "0.0.0.0:41", "192.0.2.7:42").unwrap();
        let (cluster, config) = relays.config(1).unwrap();
        assert_eq!(cluster, 0);
        let config: toml::Table = config.parse().unwrap();
        assert_eq!(config["peer"][0]["address"].as_str(), Some("192.0.2.7:42"));
        assert_eq!(config["ranks"][1][0].as_integer(), Some(4));
        assert_eq!(config["spawned"].as_integer(), Some(9));
        assert!(config["ca"].as_str().unwrap().starts_with("-----BEGIN CERTIFICATE"));
        assert!(!config.contains_key("wan_listen"));
        assert_eq!(relays.config(2), None);
        assert!(relays.links().are_up(), "none is expected yet");
        relays.expect_links(0);
        assert!(!relays.links().are_up());
        let text = relays.links().handle(0, 1, "192.0.2.7:42", "refused").unwrap();
        assert!(text.contains("on n1) at 192.0.2.7:42: refused"), "{text}");
    }

    #[test]
    fn ranks_dial_an_address_they_can_reach() {
        let mut relays = relays();
        assert_eq!(relays.rank_address(1), "");
        relays.handle_ready(1, "0.0.0.0:41", "-").unwrap();
        assert_eq!(relays.rank_address(1), "10.0.0.9:41");
        relays.handle_ready(0, "10.0.0.1:7710", "-").unwrap();
        assert_eq!(relays.rank_address(0), "10.0.0.1:7710");
        assert!(relays.handle_ready(0, "nonsense", "-").is_err());
    }
}
