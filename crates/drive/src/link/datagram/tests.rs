//! Tests with datagrams over the loopback interface, which loses none while the receiver has space
//! for them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The longest wait for whatever is in flight.
const PATIENCE: Duration = Duration::from_secs(5);

const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

#[test]
fn datagrams_of_all_sizes_arrive_whole_and_in_order() {
    for (mut a, mut b) in pairs() {
        let mut sizes: Vec<usize> = (1..200).collect();
        sizes.extend([1452, 1472, 1472, 1472, 8972, 8972, 600, 600, 9000, 65_000, 65_488, 1]);
        let sent: Vec<_> = sizes.iter().map(|&size| noise(size)).collect();
        // The datagrams are sent a few at a time, so that what waits fits into the smallest receive
        // buffer of any system.
        let mut seen = Vec::new();
        for few in sent.chunks(5) {
            few.iter().for_each(|datagram| push(&mut a, b.local_addr(), datagram));
            assert_eq!(a.flush().unwrap(), Sent::All);
            collect(&mut b, a.local_addr(), &mut seen, few.len());
        }
        assert!(seen == sent);
        assert_eq!(a.take_notices().count(), 0);
    }
}

#[test]
fn a_run_keeps_its_order_and_its_smaller_end() {
    for (mut a, mut b) in pairs() {
        let mut sent: Vec<_> = (0..30u8).map(|number| vec![number; 1200]).collect();
        sent.push(vec![30; 7]);
        sent.extend((31..40u8).map(|number| vec![number; 1300]));
        sent.iter().for_each(|datagram| push(&mut a, b.local_addr(), datagram));
        assert_eq!(a.flush().unwrap(), Sent::All);
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, sent.len());
        assert_eq!(seen, sent);
    }
}

#[test]
fn pieces_are_gathered_and_summed_on_their_way() {
    for sum in [Checksum::Crc32c, Checksum::Additive, Checksum::Off] {
        let (mut a, mut b) = pair(V4);
        let mut memory = [noise(1001), noise(5000), noise(2)];
        let pieces =
            memory.each_mut().map(|part| Piece { base: part.as_mut_ptr(), len: part.len() });
        assert!(a.begin(b.local_addr(), 7000));
        // SAFETY: `memory` outlives the call.
        assert!(unsafe { a.push_summed(sum, b"front", &pieces) });
        a.flush().unwrap();
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, 1);
        let payload = memory.concat();
        let check = sum.of(&payload).to_le_bytes();
        let check = if sum == Checksum::Off { &[][..] } else { &check[..] };
        assert!(seen[0] == [b"front", check, &payload].concat());
    }
}

#[test]
fn one_link_serves_many_peers_in_turn() {
    let (mut a, mut b) = pair(V4);
    let mut c = DatagramLink::bind((V4, 0).into()).unwrap();
    for number in 0..20u8 {
        push(&mut a, b.local_addr(), &[number; 100]);
        push(&mut a, c.local_addr(), &[number; 100]);
    }
    assert_eq!(a.flush().unwrap(), Sent::All);
    for link in [&mut b, &mut c] {
        let mut seen = Vec::new();
        collect(link, a.local_addr(), &mut seen, 20);
        assert!((0..20u8).all(|number| seen[usize::from(number)] == [number; 100]));
    }
}

#[test]
fn what_the_kernel_has_no_room_for_waits() {
    for (mut a, mut b) in pairs() {
        let sent: Vec<_> = (0..10u8).map(|number| vec![number; 3000]).collect();
        sent[..6].iter().for_each(|datagram| push(&mut a, b.local_addr(), datagram));
        a.refused = 2;
        assert_eq!(a.flush().unwrap(), Sent::Busy);
        assert!(a.is_holding());
        sent[6..].iter().for_each(|datagram| push(&mut a, b.local_addr(), datagram));
        assert_eq!(a.flush().unwrap(), Sent::Busy);
        assert_eq!(b.receive(|_, _| ()).unwrap(), Received { datagrams: 0, drained: true });
        assert_eq!(a.flush().unwrap(), Sent::All);
        assert!(!a.is_holding());
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, sent.len());
        assert_eq!(seen, sent);
    }
}

#[test]
fn a_full_batch_takes_no_more_until_it_is_sent() {
    let (mut a, b) = pair(V4);
    let mut count = 0;
    assert!(a.begin(b.local_addr(), 1000));
    // SAFETY: no payload.
    while unsafe { a.push(&[1; 1000], &[]) } {
        count += 1;
    }
    assert_eq!(count, (256 << 10) / 1000);
    assert!(!a.begin(b.local_addr(), 1000) && a.is_holding());
    a.flush().unwrap();
    assert!(a.begin(b.local_addr(), 1000));
    // Runs are bounded as well as bytes: here each datagram is a run, since the next one is larger.
    let mut count = 0;
    // SAFETY: no payload.
    while unsafe { a.push(&[1; 1000][..=count], &[]) } {
        count += 1;
    }
    assert_eq!(count, 256);
    assert_eq!(a.flush().unwrap(), Sent::All);
}

#[test]
fn what_is_too_large_is_reported_and_dropped_and_the_rest_goes_on() {
    // The largest IPv4 datagram is never too large for the loopback interface.
    for (&ip, offload) in families()[1..].iter().flat_map(|ip| [(ip, true), (ip, false)]) {
        let (mut a, mut b) = pair(ip);
        if !offload {
            a.forbid_offload().unwrap();
        }
        // The loopback interface takes 65,536 bytes, headers included, and without fragments no
        // more.
        for datagram in [&[1; 65_489][..], &[2; 100], &[3; 65_488], &[4; 65_500]] {
            push(&mut a, b.local_addr(), datagram);
            assert_eq!(a.flush().unwrap(), Sent::All);
        }
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, 2);
        assert!(seen == [vec![2; 100], vec![3; 65_488]]);
        let notices: Vec<_> = a.take_notices().collect();
        let too_large = |size| DestinationError::TooLarge { size, mtu: Some(65_536) };
        let expected = [65_489, 65_500].map(too_large);
        assert_eq!(
            notices,
            expected.map(|trouble| DestinationNotice { to: b.local_addr(), error: trouble })
        );
    }
}

#[test]
fn a_run_of_too_large_datagrams_takes_its_smaller_end_not_along() {
    for (&ip, offload) in families()[1..].iter().flat_map(|ip| [(ip, true), (ip, false)]) {
        let (mut a, mut b) = pair(ip);
        if !offload {
            a.forbid_offload().unwrap();
        }
        // The socket's own limit stands for the limit of a network.
        destination_notice::set_option(&a.socket, libc::IPPROTO_IPV6, libc::IPV6_MTU, 3000)
            .unwrap();
        (0..3).for_each(|_| push(&mut a, b.local_addr(), &[1; 4000]));
        push(&mut a, b.local_addr(), &[2; 100]);
        (0..3).for_each(|_| push(&mut a, b.local_addr(), &[3; 2900]));
        assert_eq!(a.flush().unwrap(), Sent::All);
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, 4);
        assert!(seen == [vec![2; 100], vec![3; 2900], vec![3; 2900], vec![3; 2900]]);
        let notices: Vec<_> = a.take_notices().collect();
        assert_eq!(notices.len(), 1);
        assert!(
            matches!(notices[0].error, DestinationError::TooLarge { size: 4000, .. }),
            "{notices:?}"
        );
        assert_eq!(a.has_offload(), offload);
    }
}

#[test]
fn a_port_where_nobody_listens_is_suspect_and_others_are_not() {
    for ip in families() {
        let (mut a, mut b) = pair(ip);
        let nobody = DatagramLink::bind((ip, 0).into()).unwrap().local_addr();
        push(&mut a, nobody, b"anybody there?");
        assert_eq!(a.flush().unwrap(), Sent::All);
        wait(&a, PollFlags::ERR);
        // The error is reported to the next call, which may concern another destination.
        push(&mut a, b.local_addr(), b"hello");
        assert_eq!(a.flush().unwrap(), Sent::All);
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, 1);
        assert_eq!(seen, [b"hello"]);
        let refused = DestinationError::Unreachable { code: libc::ECONNREFUSED };
        assert_eq!(
            a.take_notices().collect::<Vec<_>>(),
            [DestinationNotice { to: nobody, error: refused }]
        );
        // An error is reported to a receiving call in the same way.
        push(&mut a, nobody, b"anybody there now?");
        a.flush().unwrap();
        wait(&a, PollFlags::ERR);
        push(&mut b, a.local_addr(), b"here I am");
        b.flush().unwrap();
        let mut seen = Vec::new();
        collect(&mut a, b.local_addr(), &mut seen, 1);
        assert_eq!(seen, [b"here I am"]);
        assert_eq!(
            a.take_notices().collect::<Vec<_>>(),
            [DestinationNotice { to: nobody, error: refused }]
        );
    }
}

#[test]
fn an_address_that_cannot_be_is_suspect_and_costs_no_offload() {
    let (mut a, mut b) = pair(V4);
    let had_offload = a.has_offload();
    let impossible = [SocketAddr::from((V4, 0)), (V6, 9).into(), ([255, 255, 255, 255], 9).into()];
    for to in impossible {
        for _ in 0..3 {
            push(&mut a, to, &[0; 100]);
        }
        push(&mut a, b.local_addr(), &[1; 100]);
        push(&mut a, b.local_addr(), &[2; 100]);
        assert_eq!(a.flush().unwrap(), Sent::All);
        let mut seen = Vec::new();
        collect(&mut b, a.local_addr(), &mut seen, 2);
        let notices: Vec<_> = a.take_notices().collect();
        let [DestinationNotice { to: at, error: DestinationError::Unreachable { .. } }] =
            notices[..]
        else {
            panic!("{to}: {notices:?}")
        };
        assert_eq!(at, to, "{notices:?}");
        assert_eq!(a.has_offload(), had_offload, "{to}");
    }
}

#[test]
fn nothing_is_lost_while_there_is_room() {
    const ROUNDS: usize = 300;
    for (mut a, mut b) in pairs() {
        let (mut sent, mut seen) = (0u32, 0u32);
        for round in 0..ROUNDS {
            // At most 64 KiB are in flight: the smallest receive buffer of any system holds them
            // with its bookkeeping.
            let size = 40 + round * 7 % 1432;
            for _ in 0..a.max_batch(size).max(8) {
                push(&mut a, b.local_addr(), &numbered(sent, size));
                sent += 1;
            }
            assert_eq!(a.flush().unwrap(), Sent::All);
            while seen < sent {
                wait(&b, PollFlags::IN);
                b.receive(|_, datagram| {
                    assert!(datagram == numbered(seen, size));
                    seen += 1;
                })
                .unwrap();
            }
        }
        assert!(sent >= ROUNDS as u32 * 8);
        assert_eq!(b.receive(|_, _| ()).unwrap(), Received { datagrams: 0, drained: true });
    }
}

#[test]
fn receiving_ends_after_a_bounded_number_of_calls() {
    let (mut a, mut b) = pair(V4);
    b.forbid_offload().unwrap();
    let count = CALLS_MAX * SLOTS + 3;
    for number in 0..count {
        push(&mut a, b.local_addr(), &[number as u8; 50]);
    }
    a.flush().unwrap();
    let mut seen = 0;
    let mut each = |_, datagram: &[u8]| {
        assert_eq!(datagram, [seen; 50]);
        seen += 1;
    };
    let bound = CALLS_MAX * SLOTS;
    wait(&b, PollFlags::IN);
    assert_eq!(b.receive(&mut each).unwrap(), Received { datagrams: bound, drained: false });
    assert_eq!(b.receive(&mut each).unwrap(), Received { datagrams: 3, drained: true });
}

#[test]
fn an_empty_datagram_is_nothing() {
    let (a, mut b) = pair(V4);
    a.socket.send_to(b"", b.local_addr()).unwrap();
    a.socket.send_to(b"x", b.local_addr()).unwrap();
    wait(&b, PollFlags::IN);
    let mut seen = Vec::new();
    collect(&mut b, a.local_addr(), &mut seen, 1);
    assert_eq!(seen, [b"x"]);
}

#[test]
fn a_batch_is_what_one_call_takes() {
    let (mut a, _) = pair(V4);
    if a.has_offload() {
        assert_eq!([40, 1472, 8972, 65_000].map(|size| a.max_batch(size)), [64, 44, 7, 1]);
    }
    a.forbid_offload().unwrap();
    assert_eq!(a.max_batch(40), 1);
    assert!(a.receive_buffer_bytes() > 0);
}

/// Run in a network namespace: `unshare -n cargo test -p landbridge-drive datagram::tests::a_real
/// -- --ignored`
#[test]
#[ignore = "makes network interfaces, which needs privileges"]
fn a_real_kernel_without_room_makes_us_wait() {
    let commands = "ip link set lo up && ip link add lb0 type veth peer name lb1 && ip link set \
                    lb0 up && ip link set lb1 up && ip addr add 192.0.2.1/24 dev lb0";
    let done = std::process::Command::new("sh").args(["-c", commands]).status().unwrap();
    assert!(done.success(), "is this a network of its own?");
    let mut a = DatagramLink::bind(([192, 0, 2, 1], 0).into()).unwrap();
    sockopt::set_socket_send_buffer_size(&a.socket, 20_000).unwrap();
    // Nobody answers for the address, so packets wait in the kernel, charged to the socket.
    let mut count = 0;
    let outcome = loop {
        push(&mut a, ([192, 0, 2, 2], 9).into(), &[1; 1400]);
        count += 1;
        match a.flush().unwrap() {
            Sent::All if count < 1000 => (),
            other => break other,
        }
    };
    assert_eq!(outcome, Sent::Busy);
    assert!(a.is_holding());
    assert_eq!(a.flush().unwrap(), Sent::Busy);
    // After some seconds the kernel gives the address up; then the socket has space again.
    wait(&a, PollFlags::OUT);
    assert_eq!(a.flush().unwrap(), Sent::All);
    let to = ([192, 0, 2, 2], 9).into();
    let unreachable = DestinationError::Unreachable { code: libc::EHOSTUNREACH };
    let mut notices: Vec<_> = a.take_notices().collect();
    if notices.is_empty() {
        wait(&a, PollFlags::ERR);
        a.receive(|_, _| ()).unwrap();
        notices = a.take_notices().collect();
    }
    assert!(notices.contains(&DestinationNotice { to, error: unreachable }), "{notices:?}");
}

/// Run in a network namespace, like `a_real_kernel_without_room_makes_us_wait`.
#[test]
#[ignore = "sets filters, which needs privileges"]
fn a_filter_makes_a_destination_suspect() {
    let commands = "ip link set lo up && nft 'add table ip t; add chain ip t o { type filter hook \
                    output priority 0; }; add rule ip t o udp dport 9 drop; add rule ip t o udp \
                    dport 11 reject'";
    let done = std::process::Command::new("sh").args(["-c", commands]).status().unwrap();
    assert!(done.success(), "is this a network of its own?");
    let (mut a, mut b) = pair(V4);
    push(&mut a, (V4, 9).into(), b"dropped");
    push(&mut a, (V4, 11).into(), b"rejected");
    push(&mut a, b.local_addr(), b"allowed");
    assert_eq!(a.flush().unwrap(), Sent::All);
    let mut seen = Vec::new();
    collect(&mut b, a.local_addr(), &mut seen, 1);
    a.receive(|_, _| ()).unwrap();
    let notices: Vec<_> = a.take_notices().collect();
    // A rejected datagram is refused twice: at once, and by the message that the filter generates.
    let suspect = |port, code| DestinationNotice {
        to: (V4, port).into(),
        error: DestinationError::Unreachable { code },
    };
    let expected =
        [suspect(9, libc::EPERM), suspect(11, libc::ECONNREFUSED), suspect(11, libc::EPERM)];
    assert_eq!(notices, expected);
}

/// Pairs of both families, with offload (where the system has it) and without.
fn pairs() -> Vec<(DatagramLink, DatagramLink)> {
    let mut all: Vec<_> = families().into_iter().map(pair).collect();
    for ip in families() {
        let (mut a, mut b) = pair(ip);
        a.forbid_offload().unwrap();
        b.forbid_offload().unwrap();
        all.push((a, b));
    }
    all
}

/// The address families of this system; some systems have no IPv6.
fn families() -> Vec<IpAddr> {
    let has_v6 = UdpSocket::bind((V6, 0)).is_ok();
    if has_v6 { vec![V4, V6] } else { vec![V4] }
}

fn pair(ip: IpAddr) -> (DatagramLink, DatagramLink) {
    let bind = || DatagramLink::bind((ip, 0).into()).unwrap();
    (bind(), bind())
}

fn push(link: &mut DatagramLink, to: SocketAddr, datagram: &[u8]) {
    assert!(link.begin(to, datagram.len()));
    let (front, payload) = datagram.split_at(datagram.len().min(40));
    let piece = Piece { base: payload.as_ptr().cast_mut(), len: payload.len() };
    // SAFETY: `datagram` outlives the call.
    assert!(unsafe { link.push(front, &[piece]) });
}

/// Receives until `seen` has `more` more datagrams.
fn collect(link: &mut DatagramLink, from: SocketAddr, seen: &mut Vec<Vec<u8>>, more: usize) {
    let wanted = seen.len() + more;
    while seen.len() < wanted {
        wait(link, PollFlags::IN);
        link.receive(|address, datagram| {
            assert_eq!(address, from);
            seen.push(datagram.to_vec());
        })
        .unwrap();
    }
    assert_eq!(seen.len(), wanted);
}

fn wait(link: &DatagramLink, wanted: PollFlags) {
    let deadline = Instant::now() + PATIENCE;
    let fd = link.fd();
    let mut polled = [PollFd::new(&fd, wanted)];
    let patience = Timespec::try_from(PATIENCE).unwrap();
    while !polled[0].revents().intersects(wanted) {
        assert!(Instant::now() < deadline, "nothing came");
        poll(&mut polled, Some(&patience)).unwrap();
    }
}

fn noise(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + size + at / 251) as u8).collect()
}

fn numbered(number: u32, size: usize) -> Vec<u8> {
    let mut datagram = vec![number as u8; size];
    datagram[..4].copy_from_slice(&number.to_le_bytes());
    datagram
}

/// Run with `cargo test --release -p landbridge-drive datagram::tests::measure -- --ignored
/// --nocapture`
#[test]
#[ignore = "a measurement"]
fn measure() {
    for size in [1472, 8972, 65_000] {
        for (offload, sum) in [
            (true, Checksum::Off),
            (true, Checksum::Crc32c),
            (false, Checksum::Off),
            (false, Checksum::Crc32c),
        ] {
            let mut rates: Vec<f64> = (0..9).map(|_| rate(size, offload, sum)).collect();
            rates.sort_by(f64::total_cmp);
            let name = if offload { "with" } else { "without" };
            println!(
                "{size:6} bytes {name:8} offload, {sum:?}: {:.1} Gb/s ({:.1} to {:.1})",
                rates[4], rates[0], rates[8]
            );
        }
    }
}

/// The Gbit/s of one thread that sends and receives in turn.
fn rate(size: usize, offload: bool, sum: Checksum) -> f64 {
    const BYTES: usize = 256 << 20;
    let (mut a, mut b) = pair(V4);
    if !offload {
        a.forbid_offload().unwrap();
        b.forbid_offload().unwrap();
    }
    let mut memory = noise(1 << 20);
    let begun = Instant::now();
    let (mut received, mut rounds) = (0, 0);
    let front = [7u8; 40];
    let payload = size - front.len() - if sum == Checksum::Off { 0 } else { 4 };
    let count = DATAGRAM_BYTES_MAX / size;
    while received < BYTES {
        assert!(a.begin(b.local_addr(), size));
        for number in 0..count {
            let at = (rounds * count + number) * 4096 % (memory.len() - payload);
            let piece = Piece { base: memory[at..].as_mut_ptr(), len: payload };
            // SAFETY: `memory` outlives the call.
            assert!(unsafe { a.push_summed(sum, &front, &[piece]) });
        }
        a.flush().unwrap();
        rounds += 1;
        while received < rounds * count * size {
            b.receive(|_, datagram| received += datagram.len()).unwrap();
        }
    }
    received as f64 * 8.0 / begun.elapsed().as_nanos() as f64
}
