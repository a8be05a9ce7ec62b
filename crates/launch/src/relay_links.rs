//! The links between relays, as the launcher knows them. The module is pure: reports of relays
//! about their links enter, texts for the user leave. The launcher starts ranks once every link is
//! up. A link that cannot be made within the job's `peer_timeout` ends the job, because ranks of
//! the two clusters could not reach each other.
//!
//! Only the relay that dials is asked about a link: for the dialling relay a link is up once an
//! answer has come back over the link, so both directions work.

use std::time::Duration;

use landbridge_proto::relay::PEER_RECONNECT_MILLIS_MAX;

use crate::ps::paths::counted;

/// Breaks of a link that the user reads about; later breaks are only in the relays' logs.
const BREAKS_REPORTED_MAX: u32 = 5;
/// Suffix that a relay appends to the address of a peer relay that it talks to over UDP.
const OVER_UDP: &str = "/udp";
/// Links that the error text names at most when a job ends because links are missing.
const NAMED_MAX: usize = 8;

/// One link between the relays of two clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPair {
    /// The cluster whose relay dials. `to` is the cluster whose relay accepts.
    pub from: usize,
    pub to: usize,
    /// The address that is dialled: `HOST:PORT`.
    pub address: String,
}

/// The relay of a cluster, as texts for the user name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayLocation {
    pub cluster: String,
    pub host: String,
    /// Address at which the relay listens for other relays.
    pub listens: String,
}

pub struct RelayLinks {
    links: Vec<RelayLink>,
    /// Time that a link may be missing as the job starts: the job's `peer_timeout`.
    patience: Duration,
    /// The job has asked for UDP between relays.
    wants_udp: bool,
}

struct RelayLink {
    pair: RelayPair,
    places: [RelayLocation; 2],
    is_up: bool,
    /// The last text about this link that the user has read says that the link is missing.
    is_missed: bool,
    breaks: u32,
    /// The user has read that the link is over TCP although the job has asked for UDP.
    is_tcp_reported: bool,
    /// Why the link is not up, with the address that was dialled.
    problem: Option<String>,
}

impl RelayLinks {
    pub fn new(patience: Duration) -> RelayLinks {
        RelayLinks { links: Vec::new(), patience, wants_udp: false }
    }

    /// Sets whether the job has asked for UDP between relays (`wan_udp`).
    pub fn over_udp(self, wants_udp: bool) -> RelayLinks {
        RelayLinks { wants_udp, ..self }
    }

    /// Time that the launcher waits for missing links as the job starts.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Time that relays keep messages for a link that has broken.
    fn message_patience(&self) -> Duration {
        self.patience.max(Duration::from_millis(PEER_RECONNECT_MILLIS_MAX))
    }

    /// Adds the links that a relay which is being started will dial. `place` gives the relay of a
    /// cluster.
    pub fn expect(&mut self, pairs: Vec<RelayPair>, place: impl Fn(usize) -> RelayLocation) {
        self.links.extend(pairs.into_iter().map(|pair| RelayLink {
            places: [place(pair.from), place(pair.to)],
            pair,
            is_up: false,
            is_missed: false,
            breaks: 0,
            is_tcp_reported: false,
            problem: None,
        }));
    }

    pub fn are_up(&self) -> bool {
        self.links.iter().all(|link| link.is_up)
    }

    /// Records what the relay of `from` reports about its link to `to`; `problem` is empty if the
    /// link is up. Returns the text that the user has to read, if there is one.
    pub fn handle(
        &mut self,
        from: usize,
        to: usize,
        address: &str,
        problem: &str,
    ) -> Option<String> {
        let patience = self.message_patience();
        let wanted = |link: &&mut RelayLink| (link.pair.from, link.pair.to) == (from, to);
        let link = self.links.iter_mut().find(wanted)?;
        let (address, is_udp) = match address.strip_suffix(OVER_UDP) {
            Some(address) => (address, true),
            None => (address, false),
        };
        match problem {
            "" => link.handle_up(is_udp, self.wants_udp),
            _ => link.handle_problem(address, problem, patience),
        }
    }

    /// The error text of a job that cannot start because links are missing.
    pub fn failure(&self) -> String {
        let missing: Vec<&RelayLink> = self.links.iter().filter(|link| !link.is_up).collect();
        let mut lines: Vec<String> =
            missing.iter().take(NAMED_MAX).map(|l| l.failure(self.patience)).collect();
        let more = missing.len().saturating_sub(NAMED_MAX);
        if more > 0 {
            let are = if more == 1 { "is" } else { "are" };
            lines.push(format!("and {} {are} missing", counted(more as u64, "more link")));
        }
        lines.push("no rank has been started".to_string());
        lines.join("\n  ")
    }
}

impl RelayLink {
    fn handle_up(&mut self, is_udp: bool, wants_udp: bool) -> Option<String> {
        self.is_up = true;
        self.problem = None;
        let was_missed = std::mem::take(&mut self.is_missed);
        let is_back = is_udp && std::mem::take(&mut self.is_tcp_reported);
        if wants_udp && !is_udp && !std::mem::replace(&mut self.is_tcp_reported, true) {
            return Some(self.no_udp_text());
        }
        let [from, to] = &self.places;
        let how = if is_udp { " (udp)" } else { "" };
        let text = format!("the relays of {} and {} are linked now{how}", from.cluster, to.cluster);
        (was_missed || is_back).then_some(text)
    }

    fn handle_problem(
        &mut self,
        address: &str,
        problem: &str,
        patience: Duration,
    ) -> Option<String> {
        let was_up = std::mem::take(&mut self.is_up);
        self.breaks += u32::from(was_up);
        self.problem = Some(format!("{}: {problem}", self.target(address)));
        if self.is_missed || self.breaks > BREAKS_REPORTED_MAX {
            return None;
        }
        self.is_missed = true;
        Some(if was_up { self.break_text(problem, patience) } else { self.unreachable_text() })
    }

    fn break_text(&self, problem: &str, patience: Duration) -> String {
        let [from, to] = &self.places;
        let (from, to) = (&from.cluster, &to.cluster);
        let last = match self.breaks {
            BREAKS_REPORTED_MAX => "; if it breaks again, only the relays' log says so (-v)",
            _ => "",
        };
        format!(
            "the link between the relays of {from} and {to} is down: {problem}; the relay of \
             {from} dials again, and messages wait for up to {patience:?}{last}"
        )
    }

    fn no_udp_text(&self) -> String {
        let [from, to] = &self.places;
        let (from, to, address) = (&from.cluster, &to.cluster, &self.pair.address);
        let port = address.rsplit_once(':').map_or("", |(_, port)| port);
        format!(
            "wan_udp is on, but UDP does not get through to {address}: the relays of {from} and \
             {to} are linked over TCP (a firewall must let UDP port {port} through, too)"
        )
    }

    fn unreachable_text(&self) -> String {
        let [from, to] = &self.places;
        let port = self.pair.address.rsplit_once(':').map_or("", |(_, port)| port);
        format!(
            "{}\n  It goes on trying. To check: the relay of {} listens at {} on {}, and {} must \
             lead there from {} (`wan_listen`, `public`, [[link]] in the topology);\n  a firewall \
             must let TCP port {port} through. To try on {}: landbridge doctor --relay {}",
            self.complaint("cannot reach"),
            to.cluster,
            to.listens,
            to.host,
            self.pair.address,
            from.host,
            from.host,
            self.pair.address,
        )
    }

    fn failure(&self, patience: Duration) -> String {
        format!("after {patience:?} {}", self.complaint("has not reached"))
    }

    fn complaint(&self, verb: &str) -> String {
        let [from, to] = &self.places;
        let silence = || format!("{}: it has not said why", self.pair.address);
        format!(
            "the relay of {} (on {}) {verb} the relay of {} (on {}) at {}",
            from.cluster,
            from.host,
            to.cluster,
            to.host,
            self.problem.clone().unwrap_or_else(silence)
        )
    }

    /// The dialled address as the user wrote it; a name is shown together with the address that it
    /// resolves to.
    fn target(&self, address: &str) -> String {
        let ours = &self.pair.address;
        if ours == address { ours.clone() } else { format!("{ours} ({address})") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: &str = "Connection refused (os error 111)";

    fn links() -> RelayLinks {
        let mut links = RelayLinks::new(Duration::from_secs(20));
        let names = ["nancy", "rennes"];
        let place = |cluster: usize| RelayLocation {
            cluster: names[cluster].to_string(),
            host: format!("gw-{}", names[cluster]),
            listens: "10.0.0.1:7711".to_string(),
        };
        links.expect(vec![RelayPair { from: 1, to: 0, address: "gw:7799".to_string() }], place);
        links
    }

    #[test]
    fn an_unreachable_relay_is_reported_once_and_again_when_it_is_reached() {
        let mut links = links();
        assert!(!links.are_up());
        let text = links.handle(1, 0, "192.0.2.1:7799", REFUSED).unwrap();
        let expected = "the relay of rennes (on gw-rennes) cannot reach the relay of nancy (on \
                        gw-nancy) at gw:7799 (192.0.2.1:7799): Connection refused (os error 111)\n";
        assert!(text.starts_with(expected), "{text}");
        for piece in ["TCP port 7799", "10.0.0.1:7711", "`public`", "doctor --relay gw:7799"] {
            assert!(text.contains(piece), "{piece} in {text}");
        }
        assert_eq!(links.handle(1, 0, "192.0.2.1:7799", "it said nothing within 5 s"), None);
        let failure = links.failure();
        assert!(failure.contains("after 20s the relay of rennes"), "{failure}");
        assert!(failure.contains("(192.0.2.1:7799): it said nothing within 5 s"), "{failure}");
        assert!(failure.ends_with("no rank has been started"), "{failure}");
        let text = links.handle(1, 0, "192.0.2.1:7799", "");
        assert_eq!(text.as_deref(), Some("the relays of rennes and nancy are linked now"));
        assert!(links.are_up());
        let text = links.handle(1, 0, "192.0.2.1:7799/udp", "it has closed the connection");
        assert!(
            text.is_some_and(|text| !text.contains("udp")),
            "an address is what can be dialled"
        );
        let text = links.handle(1, 0, "192.0.2.1:7799/udp", "");
        assert_eq!(text.as_deref(), Some("the relays of rennes and nancy are linked now (udp)"));
    }

    #[test]
    fn a_link_that_is_made_at_once_is_not_worth_a_word() {
        let mut links = links();
        assert_eq!(links.handle(1, 0, "192.0.2.1:7799", ""), None);
        assert_eq!(links.handle(0, 1, "192.0.2.2:40000", "down"), None, "the other end of it");
        assert!(links.are_up());
        assert!(RelayLinks::new(Duration::ZERO).are_up());
    }

    #[test]
    fn a_link_over_tcp_where_udp_was_asked_for_is_reported_once() {
        let mut links = links().over_udp(true);
        let text = links.handle(1, 0, "192.0.2.1:7799", "").unwrap();
        for piece in ["UDP does not get through to gw:7799", "linked over TCP", "UDP port 7799"] {
            assert!(text.contains(piece), "{piece} in {text}");
        }
        links.handle(1, 0, "192.0.2.1:7799", "it has closed the connection");
        let text = links.handle(1, 0, "192.0.2.1:7799", "");
        assert_eq!(text.as_deref(), Some("the relays of rennes and nancy are linked now"));
        // UDP gets through in the end.
        let text = links.handle(1, 0, "192.0.2.1:7799/udp", "");
        assert_eq!(text.as_deref(), Some("the relays of rennes and nancy are linked now (udp)"));
        assert_eq!(links.handle(1, 0, "192.0.2.1:7799/udp", ""), None);
        let mut links = self::links().over_udp(true);
        assert_eq!(links.handle(1, 0, "192.0.2.1:7799/udp", ""), None);
    }

    #[test]
    fn breaks_are_reported_a_few_times() {
        let mut links = links();
        let mut reported = 0;
        for _ in 0..10 {
            links.handle(1, 0, "a:1", "");
            let text = links.handle(1, 0, "a:1", "it has closed the connection");
            assert!(
                text.as_ref().is_none_or(|text| text.contains("messages wait for up to 60s")),
                "relays keep messages for 60 s, though peer_timeout is 20 s: {text:?}"
            );
            reported += u32::from(text.is_some());
        }
        assert_eq!(reported, BREAKS_REPORTED_MAX);
    }

    #[test]
    fn messages_wait_longer_than_a_minute_if_the_user_says_so() {
        let mut links = links();
        links.patience = Duration::from_secs(600);
        links.handle(1, 0, "a:1", "");
        let text = links.handle(1, 0, "a:1", "it has closed the connection").unwrap();
        assert!(text.contains("messages wait for up to 600s"), "{text}");
    }
}
