//! What is done with arbitrary bytes, for the fuzzer and for the replay of its corpus. Nothing may
//! panic, and what is accepted must mean the same after a round trip.

mod channel;

use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::limit::KIND_HEADER_BYTES_MAX;
use landbridge_proto::relay::{FRAME_BYTES_MAX, Stop};
use landbridge_proto::setting::{SETTINGS, find, nearest};
use landbridge_proto::wire::datagram::{self, DatagramBody, PROBE_BYTES, PathProbe};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::framing_crc::framing_crc;
use landbridge_proto::wire::kind_header::KindHeader;
use landbridge_proto::wire::hello::{
    CLOSE_BYTES, Dialler, Introduction, Listener, OPEN_BYTES, REPLY_BYTES, Role, LogPosition,
};
use landbridge_proto::wire::name::{NAME_BYTES, Name};
use landbridge_testbed::relay::{emit, empty, frames, rank, read, relay};

/// A target by name.
pub type FuzzTarget = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [FuzzTarget; 9] = [
    ("frame", frame),
    ("head", head),
    ("datagram", datagram),
    ("hello", hello),
    ("name", name),
    ("stream", stream),
    ("config", config),
    ("channel", channel),
    ("setting", setting),
];

/// A frame's header.
pub fn frame(bytes: &[u8]) {
    let _ = Header::parse(bytes);
    let bytes = &guarded(bytes)[..];
    if let Ok(header) = Header::parse(bytes) {
        let mut again = [0; HEADER_BYTES];
        header.emit(&mut again);
        // The check is the driver's, which fills it in last.
        assert_eq!(again[..CHECKSUM_AT], bytes[..CHECKSUM_AT]);
        assert_eq!(Header::parse(&again), Ok(header));
    }
}

/// A datagram: token, and frame or probe.
pub fn datagram(bytes: &[u8]) {
    let Ok(inside) = datagram::parse(bytes) else { return };
    let Some(token) = datagram::token(bytes) else { unreachable!("a datagram without a token") };
    match inside {
        DatagramBody::Frame(rest) => frame(rest),
        DatagramBody::Probe(probe) => {
            assert_eq!(probe.emit(token, false)[..], bytes[..PROBE_BYTES]);
            assert_eq!(probe.size as usize, bytes.len());
        }
        DatagramBody::ProbeReply(probe) => assert_eq!(probe.emit(token, true)[..], *bytes),
    }
}

/// A frame's head. The first two bytes choose its kind and flags.
pub fn head(bytes: &[u8]) {
    let [kind, flags, rest @ ..] = bytes else { return };
    let kind = Kind::ALL[*kind as usize % Kind::ALL.len()];
    if let Ok(head) = KindHeader::parse(kind, *flags, rest) {
        let mut again = [0; KIND_HEADER_BYTES_MAX];
        let size = head.emit(&mut again);
        assert_eq!(size, KindHeader::size(kind, *flags));
        assert_eq!(KindHeader::parse(kind, *flags, &again[..size]), Ok(head));
    }
}

/// The three messages of a hello, each from an unknown peer. The first byte says which one.
pub fn hello(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let key = || JobKey([7; 32]);
    let own = introduction();
    let dialler = || Dialler::new(JOB, key(), own, [1; 32]);
    match choice % 3 {
        0 => {
            let open: [u8; OPEN_BYTES] = padded(rest);
            let _ = Listener::handle_open(JOB, &key(), &own, [2; 32], &open).map(drop);
        }
        1 => drop(dialler().handle_reply(&padded::<REPLY_BYTES>(rest))),
        _ => {
            let open = dialler().open();
            let started = Listener::handle_open(JOB, &key(), &own, [2; 32], &open);
            let Ok((listener, _)) = started else { unreachable!("our own hello is refused") };
            let _ = listener.handle_close(&padded::<CLOSE_BYTES>(rest));
        }
    }
}

/// The name of an endpoint.
pub fn name(bytes: &[u8]) {
    if let Ok(name) = Name::parse(bytes) {
        assert_eq!(Name::parse(&name.emit()), Ok(name));
        assert!(bytes.len() >= NAME_BYTES);
    }
}

/// What a relay reads from a rank and from another relay. The first byte chooses which, and how
/// the stream is cut.
pub fn stream(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let mut relay = relay(0, 4, 0);
    let Ok(rank) = relay.attach(rank(1), 0) else { unreachable!("a member") };
    let Some(peer) = relay.peer(ClusterId(1)) else { unreachable!("there are two clusters") };
    let Ok(new_stream) = relay.connect(peer, 1) else { unreachable!("the first of its streams") };
    let peer = new_stream.stream;
    let from = if choice & 1 == 0 { rank } else { peer };
    let step = 1 + (*choice as usize >> 1) * 8;

    let rest = guarded(rest);
    let mut buffer: Vec<u8> = Vec::new();
    for chunk in rest.chunks(step) {
        buffer.extend_from_slice(chunk);
        match read(&mut relay, from, &mut buffer).stop {
            Stop::Broken(_) => break,
            Stop::Partial => assert!(buffer.len() < FRAME_BYTES_MAX),
            Stop::Full => unreachable!("so few bytes fill no queue"),
        }
    }
    // Whatever is forwarded consists of whole frames.
    for output in [rank, peer] {
        let lengths: Vec<usize> = relay.frame_lengths(output).collect();
        let bytes: Vec<u8> = relay.slices(output, &[]).flatten().copied().collect();
        assert!(frames(&bytes).map(|(_, frame)| frame.len()).eq(lengths.iter().copied()));
        assert_eq!(bytes.len(), lengths.iter().sum());
    }
}

/// The configuration of a relay.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(error) = landbridge_relay::config::Config::parse(text) {
        assert!(!format!("{error:#}").is_empty());
    }
}

/// Two endpoints under a list of operations.
pub fn channel(bytes: &[u8]) {
    channel::run(bytes);
}

/// The text of a setting; the first byte says of which. The rest is also taken for a name.
pub fn setting(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    let row = SETTINGS[*choice as usize % SETTINGS.len()];
    match row.parse(text) {
        Ok(value) => {
            assert_eq!(row.parse(&format!("  {text}\t")), Ok(value.clone()));
            if let Some(networks) = value.networks() {
                networks.iter().for_each(|network| assert!(network.contains(network.address)));
            }
        }
        Err(advice) => assert!(!advice.is_empty()),
    }
    if let Some(row) = find(text) {
        assert_eq!(nearest(text), Some(row));
    }
}

/// Where in a header the check stands.
const CHECKSUM_AT: usize = HEADER_BYTES - 4;
/// And the framing CRC.
const FRAMING_CRC_AT: usize = 7;

const JOB: JobId = JobId([5; 16]);

fn introduction() -> Introduction {
    Introduction {
        role: Role::Relay,
        address: Address::ANONYMOUS,
        incarnation: 1,
        cluster: ClusterId(0),
        pid: 1,
        eager_window: 0,
        cookie_address: 0,
        cookie: 0,
        name: [0; NAME_BYTES],
        log_position: LogPosition::default(),
    }
}

/// The same frames with right guards, so that what is behind them is reached.
fn guarded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut rest = &mut bytes[..];
    while let Some((header, body)) = rest.split_first_chunk_mut::<HEADER_BYTES>() {
        header[FRAMING_CRC_AT] = framing_crc(header);
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        rest = body.get_mut(length..).unwrap_or_default();
    }
    bytes
}

/// The first `N` bytes, or what there is and zeroes.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let size = bytes.len().min(N);
    out[..size].copy_from_slice(&bytes[..size]);
    out
}

/// Good input for each target, from which a fuzzer starts: (target, file name, bytes).
pub fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut add = |target, name: String, bytes: &[u8]| seeds.push((target, name, bytes.to_vec()));
    for (n, kind) in Kind::ALL.into_iter().enumerate() {
        for flags in [0, 2, 15] {
            let body = vec![n as u8; KindHeader::size(kind, flags) + n];
            let header = Header {
                flags,
                hops: n as u8,
                sequence: 1 << n,
                delivered: n as u64,
                credit: 3,
                ..empty(kind, rank(1), rank(n as u32))
            };
            let frame = emit(header, &body);
            add("frame", format!("{kind:?}-{flags}"), &frame[..HEADER_BYTES]);
            add("head", format!("{kind:?}-{flags}"), &[&[n as u8, flags], &body[..]].concat());
            add("stream", format!("rank-{kind:?}-{flags}"), &[&[18], &frame[..], &frame].concat());
            let frame = emit(Header { source: rank(5), target: rank(1), ..header }, &body);
            add("stream", format!("relay-{kind:?}-{flags}"), &[&[19], &frame[..], &frame].concat());
        }
    }
    let dialler = || Dialler::new(JOB, JobKey([7; 32]), introduction(), [1; 32]);
    let open = dialler().open();
    add("hello", "open".into(), &[&[0], &open[..]].concat());
    let key = JobKey([7; 32]);
    if let Ok((_, reply)) = Listener::handle_open(JOB, &key, &introduction(), [2; 32], &open) {
        add("hello", "reply".into(), &[&[1], &reply[..]].concat());
        if let Ok((close, _)) = dialler().handle_reply(&reply) {
            add("hello", "close".into(), &[&[2], &close[..]].concat());
        }
    }
    let address = Address::new(5, 1);
    let (cluster, further) = (ClusterId(3), [[0; 4]; 4]);
    let name = Name { address, unique: 77, cluster, node: 9, ip: [9; 16], further, port: 7711 };
    add("name", "good".into(), &name.emit());
    let ip = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 11];
    let further = [[10, 8, 0, 1], [172, 17, 0, 1], [0; 4], [0; 4]];
    add("name", "further".into(), &Name { ip, further, ..name }.emit());
    add("name", "short".into(), &name.emit()[..40]);
    let probe = PathProbe { size: 40, number: 3 };
    add("datagram", "probe".into(), &[&probe.emit(1, false)[..], &[0; 16]].concat());
    add("datagram", "answer".into(), &probe.emit(1, true));
    let advertisement = empty(Kind::UdpAdvertisement, rank(1), rank(1));
    let advertisement = Header { sequence: 5, delivered: 6, credit: 7, ..advertisement };
    add("datagram", "frame".into(), &[&[9; 8][..], &emit(advertisement, &[1; 32])].concat());
    add("config", "good".into(), CONFIG.as_bytes());
    add("config", "peers".into(), format!("{CONFIG}{PEER}").as_bytes());
    add("config", "ranges".into(), CONFIG.replace("[4, 4]", "[3, 4]").as_bytes());
    for (n, row) in SETTINGS.iter().enumerate() {
        add("setting", row.name.into(), &[&[n as u8], row.default.as_bytes()].concat());
    }
    for (name, operations) in channel::seeds() {
        add("channel", name, &operations);
    }
    seeds
}

const CONFIG: &str = "job = \"000102030405060708090a0b0c0d0e0f\"\n\
    key = \"0000000000000000000000000000000000000000000000000000000000000001\"\n\
    cluster = 0\nlisten = \"127.0.0.1:0\"\nunix = \"@relay\"\nwan_listen = \"[::]:7711\"\n\
    ca = \"\"\ncertificate = \"\"\nprivate_key = \"\"\nranks = [[0, 4], [4, 4]]\n";
const PEER: &str = "[[peer]]\ncluster = 1\naddress = \"relay.example.org:7711\"\n";
