//! Tests with hubs that exchange datagrams over the loopback, in one thread.

use std::time::Duration;

use super::window_share::{WINDOW_BYTES, WINDOW_BYTES_MIN};
use super::*;

/// The longest wait. Nothing here takes longer, except on a machine that has stopped.
const PATIENCE: Duration = Duration::from_secs(30);

struct Authority(rcgen::CertifiedIssuer<'static, rcgen::KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        Self(rcgen::CertifiedIssuer::self_signed(parameters, key).unwrap())
    }

    /// The identity of the relay of `cluster`.
    fn identity(&self, cluster: u16) -> Identity {
        let name = relay_name(ClusterId(cluster));
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(vec![name]).unwrap();
        let certificate = parameters.signed_by(&key, &self.0).unwrap();
        Identity::new(&self.0.pem(), &certificate.pem(), &key.serialize_pem()).unwrap()
    }
}

fn hub(identity: &Identity, listens: bool, pool: &WindowPool) -> QuicHub {
    let any = "127.0.0.1:0".parse().unwrap();
    QuicHub::bind(any, identity, Congestion::Cubic, listens, pool).unwrap()
}

fn turn(hubs: &[&QuicHub], now: Instant) {
    for hub in hubs {
        while hub.receive(now) {}
        hub.collect(now);
        hub.take_events();
        hub.transmit(now);
    }
}

/// Runs the hubs until `is_over` returns true.
fn run(hubs: &[&QuicHub], mut is_over: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_over() {
        assert!(start.elapsed() < PATIENCE);
        turn(hubs, Instant::now());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Opens `count` links from one hub to another, with complete handshakes and a stream. Returns both
/// ends.
fn links(from: &QuicHub, to: &QuicHub, count: usize) -> Vec<(QuicLink, QuicLink)> {
    let (mut all, at) = (Vec::new(), to.local_addr().unwrap());
    for _ in 0..count {
        let near = from.dial(ClusterId(0), at, Instant::now()).unwrap();
        run(&[from, to], || near.is_ready());
        near.write(std::iter::once(&b"!"[..])).unwrap();
        let mut far = None;
        run(&[from, to], || {
            far = far.take().or_else(|| to.take_accepted().pop().map(|(link, _)| link));
            far.as_ref().is_some_and(|far| far.read(&mut [0]).is_ok())
        });
        all.push((near, far.unwrap()));
    }
    all
}

#[test]
fn unauthenticated_connections_that_have_gone_leave_nothing_behind_where_there_are_many() {
    const CROWD: usize = 3 * CONNECTIONS_UNVALIDATED_MAX;
    let (ours, foreign) = (Authority::new(), Authority::new());
    let pool = WindowPool::default();
    let listener = hub(&ours.identity(0), true, &pool);
    let crowd = hub(&foreign.identity(1), false, &pool);
    // The clock stands still, so no timer ends a connection.
    let now = Instant::now();
    let dial = |_| crowd.dial(ClusterId(0), listener.local_addr().unwrap(), now).unwrap();
    let others: Vec<_> = (0..CROWD).map(dial).collect();
    let (start, mut gone) = (Instant::now(), 0);
    while gone < CROWD {
        assert!(start.elapsed() < PATIENCE, "only {gone} have come");
        turn(&[&crowd, &listener], now);
        // The connections arrive, and are dropped.
        gone += listener.take_accepted().len();
        listener.transmit(now);
    }
    let kept = listener.0.borrow().connections_count;
    assert!(kept <= CONNECTIONS_UNVALIDATED_MAX, "{kept} connections are kept for {CROWD} others");
    assert_eq!(listener.0.borrow().connections.iter().flatten().count(), kept);
    drop(others);

    // An authenticated peer gets in, and its connection is not forgotten before the peer knows of
    // the end.
    let friend = hub(&ours.identity(1), false, &pool);
    let both = links(&friend, &listener, 1);
    drop(both);
    listener.transmit(Instant::now());
    assert_eq!(listener.0.borrow().connections_count, kept + 1);
}

#[test]
fn all_hubs_of_a_relay_are_wound_up_at_the_same_time() {
    const TIME: Duration = Duration::from_secs(1);
    let authority = Authority::new();
    let (own, pool) = (authority.identity(1), WindowPool::default());
    let far = hub(&authority.identity(0), true, &pool);
    let hubs = [hub(&own, false, &pool), hub(&own, false, &pool), hub(&own, false, &pool)];
    let both: Vec<_> = hubs.iter().map(|near| links(near, &far, 1)).collect();
    for (near, _) in both.iter().flatten() {
        // Nobody is going to acknowledge these bytes.
        near.write(std::iter::once(&b"is anybody there?"[..])).unwrap();
    }
    let start = Instant::now();
    QuicHub::shut_down(&hubs, TIME);
    let took = start.elapsed();
    assert!(took >= TIME && took < 2 * TIME, "{took:?}");
}

/// Writes until nothing more is taken, while nobody reads; then reads everything. Returns the bytes
/// that were buffered on the way.
fn fill(near: &QuicHub, far: &QuicHub, both: &[(QuicLink, QuicLink)]) -> u64 {
    let mut buffer = vec![7; 64 << 10];
    let (mut written, mut quiet) = (0, Instant::now());
    while quiet.elapsed() < Duration::from_millis(700) {
        turn(&[near, far], Instant::now());
        for (from, _) in both {
            let bytes = from.write(std::iter::once(&buffer[..])).unwrap().bytes;
            written += bytes;
            if bytes > 0 {
                quiet = Instant::now();
            }
        }
    }
    let mut read_all = || {
        let each = both.iter().map(|(_, to)| {
            std::iter::from_fn(|| to.read(&mut buffer).ok()).map(|read| read.bytes).sum::<usize>()
        });
        each.sum::<usize>()
    };
    let kept = read_all();
    let mut sum = kept;
    run(&[near, far], || {
        sum += read_all();
        sum == written
    });
    kept as u64
}

#[test]
fn what_a_relay_keeps_of_many_that_it_does_not_read_has_a_bound() {
    const COUNT: usize = 8;
    const POOL: u64 = 8 << 20;
    let authority = Authority::new();
    let pool = WindowPool::new(POOL);
    let far = hub(&authority.identity(0), true, &pool);
    // The other side has promised no window here.
    let near = hub(&authority.identity(1), false, &WindowPool::default());

    let one = links(&near, &far, 1);
    let kept = fill(&near, &far, &one);
    println!("one has {kept} bytes");
    assert!(kept > POOL && kept <= POOL + WINDOW_BYTES_MIN && kept <= WINDOW_BYTES);

    let mut all = one;
    all.extend(links(&near, &far, COUNT - 1));
    // In the first round, one connection may still send what was promised to it when it was alone.
    for _ in 0..2 {
        let kept = fill(&near, &far, &all);
        println!("{COUNT} have {kept} bytes");
        assert!(kept <= POOL + COUNT as u64 * WINDOW_BYTES_MIN, "{kept} bytes");
        assert!(kept > POOL, "{kept} bytes: more is to be had");
    }
}
