//! Tests with unauthenticated and invalid peers: each is refused with one line, counted, and
//! disturbs nobody.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::{
    Authority, JOB, KEY, PATIENCE, Plan, Rank, RelayProcess, command, frame, introduction,
    say_hello,
};
use landbridge_drive::checksum::Checksum;
use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::limit::HELLO_MILLIS_MAX;
use landbridge_proto::wire::frame::{CHECKSUM_AT, Kind, flag, pair_check};
use landbridge_proto::wire::framing_crc::framing_crc;
use landbridge_proto::wire::hello::{Dialler, OPEN_BYTES, Role};

/// A relay with two ranks that must not notice what else happens.
struct Scene {
    relay: RelayProcess,
    ranks: [Rank; 2],
    refused: u64,
}

impl Scene {
    fn new() -> Self {
        let relay = RelayProcess::start(&Plan::new(0, &Authority::new()).wan());
        let ranks = [Rank::attach(&relay, 1), Rank::attach(&relay, 2)];
        Self { relay, ranks, refused: 0 }
    }

    /// Expects one more refusal, with exactly one line that names the peer and the reason.
    fn expect_refusal(&mut self, dialler: Option<SocketAddr>, why: &str) {
        let line = self.relay.wait_for("refused");
        assert!(line.contains(why), "{line}");
        if let Some(address) = dialler {
            assert!(line.contains(&format!("refused {address}:")), "{line}");
        }
        self.refused += 1;
        let lines = self.relay.log.len();
        assert_eq!(self.relay.counter("refused"), self.refused);
        assert_eq!(self.relay.log.len(), lines + 1, "more than one line: {:#?}", self.relay.log);
        assert_eq!(self.relay.counter("links"), 2);
        self.still_works();
    }

    fn still_works(&mut self) {
        let [one, two] = &mut self.ranks;
        one.send(2, 0, b"still there?");
        assert_eq!(two.receive().1, b"still there?");
    }

    fn dial(&self) -> TcpStream {
        connect(self.relay.ranks)
    }
}

#[test]
fn unauthenticated_connections_are_refused_one_by_one() {
    let mut scene = Scene::new();

    // Garbage, of the kind that port scanners send.
    let mut stream = scene.dial();
    stream.write_all(&[b'G'; OPEN_BYTES]).unwrap();
    expect_end(&mut stream);
    scene.expect_refusal(
        Some(stream.local_addr().unwrap()),
        "does not speak the landbridge protocol",
    );

    // Another version of the protocol.
    let mut open = open_message(JOB);
    open[4] = 99;
    let mut stream = scene.dial();
    stream.write_all(&open).unwrap();
    expect_end(&mut stream);
    scene.expect_refusal(Some(stream.local_addr().unwrap()), "protocol version 99");

    // Another job.
    let mut stream = scene.dial();
    stream.write_all(&open_message(JobId([1; 16]))).unwrap();
    expect_end(&mut stream);
    scene.expect_refusal(Some(stream.local_addr().unwrap()), "another job");

    // The wrong key. The side that has the right key would notice first, so the dialler answers
    // with noise.
    let mut stream = scene.dial();
    stream.write_all(&open_message(JOB)).unwrap();
    let mut reply = [0; landbridge_proto::wire::hello::REPLY_BYTES];
    stream.read_exact(&mut reply).unwrap();
    stream.write_all(&[3; landbridge_proto::wire::hello::CLOSE_BYTES]).unwrap();
    expect_end(&mut stream);
    scene.expect_refusal(Some(stream.local_addr().unwrap()), "does not know the key");

    // The connection is closed in the middle of the hello.
    let mut stream = scene.dial();
    stream.write_all(&open_message(JOB)[..20]).unwrap();
    let address = stream.local_addr().unwrap();
    drop(stream);
    scene.expect_refusal(Some(address), "closed the connection before the end of the hello");

    // Members of the job that connect in the wrong place.
    for (index, cluster, role, why) in [
        (5, 1, Role::Endpoint, "belongs to cluster 1, this relay to cluster 0"),
        (5, 0, Role::Endpoint, "another cluster"),
        (77, 0, Role::Endpoint, "no process of the job has its address"),
        (1, 0, Role::Endpoint, "attached already"),
        (3, 1, Role::Relay, "a relay connected to the listener of the ranks"),
    ] {
        let mut stream = scene.dial();
        let mut own = introduction(index);
        (own.cluster, own.role) = (ClusterId(cluster), role);
        own.incarnation = 0;
        say_hello(&mut stream, own, KEY).unwrap();
        expect_end(&mut stream);
        scene.expect_refusal(Some(stream.local_addr().unwrap()), why);
    }
}

#[test]
fn a_dialler_with_another_key_refuses_the_relay() {
    let scene = Scene::new();
    let error = say_hello(&mut scene.dial(), introduction(3), JobKey([1; 32])).unwrap_err();
    assert!(error.to_string().contains("does not know the key"), "{error}");
}

#[test]
fn the_silent_and_the_slow_lose_their_place_in_time() {
    let mut scene = Scene::new();
    let start = Instant::now();
    let silent = scene.dial();
    let mut slow = scene.dial();
    slow.write_all(b"LB").unwrap();
    let relays = connect(scene.relay.relays.unwrap());
    scene.still_works();
    let mut lines = Vec::new();
    for _ in 0..3 {
        lines.push(scene.relay.wait_for("refused"));
    }
    assert!(start.elapsed().as_millis() as u64 >= HELLO_MILLIS_MAX - 100);
    for (stream, why) in [
        (&silent, "it said nothing within 5 s"),
        (&slow, "it stopped in the middle of the hello within 5 s"),
        (&relays, "it did not finish connecting within 5 s"),
    ] {
        let who = format!("refused {}: {why}", stream.local_addr().unwrap());
        assert!(lines.iter().any(|line| line.ends_with(&who)), "{who} not in {lines:#?}");
    }
    assert_eq!(scene.relay.counter("pending"), 0);
    scene.still_works();
}

#[test]
fn members_that_break_the_protocol_lose_their_link_only() {
    let mut scene = Scene::new();
    let good = |target| frame(Address::new(3, 0), Address::new(target, 0), 0, b"x");
    let mut absurd = good(1);
    absurd[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut long = good(1);
    long[..4].copy_from_slice(&(1u32 << 20).to_le_bytes());
    let mut unreachable = good(1);
    unreachable[4] = Kind::Unreachable as u8;
    let mut lost = good(1);
    lost[4] = Kind::Lost as u8;
    for bytes in [&mut unreachable, &mut lost] {
        bytes[16..24]
            .copy_from_slice(&pair_check(Address::new(3, 0), Address::new(1, 0)).to_le_bytes());
    }
    let mut travelled = good(1);
    travelled[6] = 16;
    let mut headless = good(1);
    headless[4] = Kind::Tagged as u8;
    for bytes in [&mut absurd, &mut long, &mut unreachable, &mut lost, &mut headless] {
        bytes[7] = framing_crc(bytes);
    }
    for (bytes, why) in [
        (absurd, "longer than frames may be"),
        (long, "longer than relays take"),
        (vec![0; 40], "arrived corrupt"),
        (frame(Address::new(2, 0), Address::new(1, 0), 0, b"x"), "not come from the endpoint"),
        (unreachable, "only relays send"),
        (lost, "only relays send"),
        (travelled, "has passed relays already"),
        (headless, "shorter than its head"),
    ] {
        let mut rank = Rank::attach(&scene.relay, 3);
        rank.stream.write_all(&bytes).unwrap();
        expect_end(&mut rank.stream);
        let line = scene.relay.wait_for("rank 3 at");
        assert!(line.contains(why), "{line}");
        scene.still_works();
    }
    assert_eq!(scene.relay.counter("malformed"), 8);
}

/// Each of these frames would have ended the connection of its receiver.
#[test]
fn a_frame_without_its_check_ends_the_connection_of_its_sender_alone() {
    let plan = Plan::new(0, &Authority::new());
    let checks = Checksum::of_job("crc32c", false);
    let mut relay = RelayProcess::start_with(&plan, command(&[("LANDBRIDGE_INTEGRITY", "crc32c")]));
    let mut victim = Rank::attach(&relay, 1);
    let (from, to) = (Address::new(3, 0), Address::new(1, 0));
    let checked = || {
        let mut bytes = frame(from, to, 0, b"");
        bytes[5] = flag::CHECKED;
        bytes[7] = framing_crc(&bytes);
        let check = checks.of(&bytes);
        bytes[CHECKSUM_AT..].copy_from_slice(&check.to_le_bytes());
        bytes
    };
    let mut changed = checked();
    changed[16] ^= 1;
    for (bytes, why) in [(frame(from, to, 0, b""), "without a check"), (changed, "arrived corrupt")]
    {
        let mut rank = Rank::attach(&relay, 3);
        rank.stream.write_all(&bytes).unwrap();
        expect_end(&mut rank.stream);
        let line = relay.wait_for("rank 3 at");
        assert!(line.contains(why), "{line}");
        let mut next = Rank::attach(&relay, 3);
        next.stream.write_all(&checked()).unwrap();
        assert_eq!(victim.receive_frame().0.source, from);
        drop(next);
        relay.wait_for("rank 3 at");
    }
    assert_eq!(relay.counter("malformed"), 2);
    // Without a bound, the rank could connect, be disconnected, and connect again for ever.
    for _ in 0..16 {
        let mut rank = Rank::attach(&relay, 3);
        rank.stream.write_all(&frame(from, to, 0, b"")).unwrap();
        expect_end(&mut rank.stream);
        relay.wait_for("rank 3 at");
    }
    let warning = relay.events(1).remove(0);
    assert!(warning.contains("warns: rank 3 breaks the protocol"), "{warning}");
    let mut refused = Rank::attach(&relay, 3);
    expect_end(&mut refused.stream);
    relay.wait_for("rank 3 has broken the protocol, and is refused from now on");
}

#[test]
fn relays_accept_only_certificates_of_the_job() {
    let authority = Authority::new();
    let mut relay = RelayProcess::start(&Plan::new(0, &authority).wan());
    let relay_addr = relay.relays.unwrap();

    // A connection without TLS.
    let mut stream = connect(relay_addr);
    stream.write_all(&[b'G'; 400]).unwrap();
    expect_end(&mut stream);
    relay.wait_for("TLS: ");

    // Certificates: none; of another authority; of a relay that speaks for another cluster.
    let foreign = Authority::new();
    let mut claims_zero = tls(relay_addr, &authority, Some(authority.issue(0)));
    let _ = claims_zero.write_all(&open_message(JOB));
    relay.wait_for("its certificate is that of no other cluster");
    let mut unnamed = tls(relay_addr, &authority, Some(authority.issue(7)));
    let _ = unnamed.write_all(&open_message(JOB));
    relay.wait_for("its certificate is that of no relay of this job");
    let mut strange = tls(relay_addr, &authority, Some(foreign.issue(1)));
    let _ = strange.write_all(&open_message(JOB));
    relay.wait_for("TLS: invalid peer certificate");
    let mut naked = tls(relay_addr, &authority, None);
    let _ = naked.write_all(&open_message(JOB));
    relay.wait_for("TLS: ");

    // A valid certificate, and a hello that does not fit the certificate.
    for (cluster, role, key, why) in [
        (2, Role::Relay, KEY, "but its certificate is for cluster 1"),
        (1, Role::Endpoint, KEY, "a rank connected to the listener of the relays"),
    ] {
        let mut stream = tls(relay_addr, &authority, Some(authority.issue(1)));
        let mut own = introduction(4);
        (own.cluster, own.role, own.address) = (ClusterId(cluster), role, Address::ANONYMOUS);
        say_hello(&mut stream, own, key).unwrap();
        let _ = stream.flush();
        relay.wait_for(why);
    }
    assert_eq!(relay.counter("refused"), 7);
    let mut other = RelayProcess::start(&Plan::new(1, &authority).peer(0, relay_addr));
    other.wait_for("linked to the relay of cluster 0");
}

#[test]
fn a_crowd_of_pending_connections_does_not_keep_ranks_out() {
    let mut relay = RelayProcess::start(&Plan::alone(4));
    let crowd: Vec<TcpStream> = (0..1_500).map(|_| connect(relay.ranks)).collect();
    let (mut one, mut two) = (Rank::attach(&relay, 1), Rank::attach(&relay, 2));
    one.send(2, 0, b"through");
    assert_eq!(two.receive().1, b"through");
    assert!(relay.counter("pending") <= 1024);
    relay.wait_for_counter("refused", |refused| refused >= 400);
    drop(crowd);
}

#[test]
fn a_relay_without_descriptors_refuses_and_recovers() {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 40; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_landbridge-relay"),
    ]);
    command.env("LANDBRIDGE_INTEGRITY", "off");
    let mut relay = RelayProcess::start_with(&Plan::alone(4), command);
    let (mut one, mut two) = (Rank::attach(&relay, 1), Rank::attach(&relay, 2));
    let crowd: Vec<TcpStream> = (0..60).map(|_| connect(relay.ranks)).collect();
    relay.wait_for("raise the limit of open files");
    one.send(2, 0, b"still there?");
    assert_eq!(two.receive().1, b"still there?");
    drop(crowd);
    let mut three = Rank::attach(&relay, 3);
    three.send(1, 0, b"in");
    assert_eq!(one.receive().1, b"in");
}

#[test]
fn a_process_of_this_node_that_shares_no_memory_is_refused() {
    let name = format!("landbridge-hostile-{}", std::process::id());
    let mut relay = RelayProcess::start(&Plan::alone(4).line(&format!("unix = \"@{name}\"")));
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    say_hello(&mut stream, introduction(1), KEY).unwrap();
    stream.write_all(b"M").unwrap();
    let line = relay.wait_for("refused");
    assert!(line.contains("does not share memory"), "{line}");
    assert!(line.contains(&format!("process {}", std::process::id())), "{line}");
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn open_message(job: JobId) -> [u8; OPEN_BYTES] {
    Dialler::new(job, KEY, introduction(3), [5; 32]).open()
}

/// Expects the relay to close the connection, in whatever way.
fn expect_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => (),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

type Tls = rustls::StreamOwned<rustls::ClientConnection, TcpStream>;

/// A TLS client that trusts `authority` and shows the certificate `mine`.
fn tls(relay_addr: SocketAddr, authority: &Authority, mine: Option<(String, String)>) -> Tls {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let config = match mine {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let name = "relay-0.landbridge".try_into().unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    rustls::StreamOwned::new(connection, connect(relay_addr))
}
