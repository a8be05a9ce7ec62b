//! Measures what a relay costs, compared with a bare forwarder that only reads and writes.
//!
//! `cargo run --release -p landbridge-relay --example measure [ROUNDS]`
//!
//! For each path between two clients, the example measures the round-trip time of small frames and,
//! per message and hop, the processor time, the system calls and the voluntary context switches of
//! the process in the middle. (The calls of the forwarder and of HAProxy are not counted: the
//! forwarder makes three.) Then it measures the bandwidth of a stream of the largest frames. The
//! output is a table of medians over several interleaved rounds.

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::Instant;

use common::{Authority, Plan, Rank, RelayProcess, frame, pattern};
use landbridge_proto::id::Address;
use landbridge_proto::limit::RELAY_PAYLOAD_BYTES_MAX;

const PINGS: u32 = 10_000;
const STREAM_BYTES: usize = 256 << 20;
const SMALL_BYTES: usize = 24;

fn main() {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("forward") => forward(arguments.next().unwrap().parse().unwrap()),
        rounds => compare(rounds.map_or(5, |rounds| rounds.parse().unwrap())),
    }
}

/// A path between two clients, and the processes in the middle.
struct TestPath {
    name: &'static str,
    ends: [TcpStream; 2],
    indices: [u32; 2],
    processes: Vec<u32>,
    guards: Guards,
}

#[derive(Default)]
struct Guards {
    relays: Vec<RelayProcess>,
    children: Vec<Child>,
}

impl Drop for Guards {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[derive(Default)]
struct Results {
    latency_micros: Vec<f64>,
    cpu_micros: Vec<f64>,
    switches: Vec<f64>,
    calls: Vec<f64>,
    bandwidth: Vec<f64>,
}

fn compare(rounds: usize) {
    let mut makers: Vec<fn() -> TestPath> =
        vec![direct, one_forwarder, one_relay, two_forwarders, two_relays];
    if Command::new("haproxy").arg("-v").output().is_ok() {
        makers.push(two_haproxies);
    }
    let mut table: Vec<(&str, Results)> = Vec::new();
    for _ in 0..rounds {
        for (n, make) in makers.iter().enumerate() {
            let mut path = make();
            if table.len() <= n {
                table.push((path.name, Results::default()));
            }
            measure(&mut path, &mut table[n].1);
        }
    }
    println!("| path | round trip, us | CPU, us | switches | calls | stream, MB/s |");
    println!("|---|--:|--:|--:|--:|--:|");
    for (name, mut results) in table {
        println!(
            "| {name} | {:.1} | {:.2} | {:.2} | {:.2} | {:.0} |",
            median(&mut results.latency_micros),
            median(&mut results.cpu_micros),
            median(&mut results.switches),
            median(&mut results.calls),
            median(&mut results.bandwidth),
        );
    }
}

fn measure(path: &mut TestPath, results: &mut Results) {
    let [one, two] = path.indices.map(|index| Address::new(index, 0));
    let ping = frame(one, two, 0, &pattern(0, SMALL_BYTES));
    let pong = frame(two, one, 0, &pattern(0, SMALL_BYTES));
    let mut echo = path.ends[1].try_clone().unwrap();
    let length = ping.len();
    let echoer = std::thread::spawn(move || {
        let mut buffer = vec![0; length];
        for _ in 0..PINGS {
            echo.read_exact(&mut buffer).unwrap();
            echo.write_all(&pong).unwrap();
        }
    });
    let before = usage(path);
    let start = Instant::now();
    let mut buffer = vec![0; length];
    for _ in 0..PINGS {
        path.ends[0].write_all(&ping).unwrap();
        path.ends[0].read_exact(&mut buffer).unwrap();
    }
    let elapsed = start.elapsed();
    echoer.join().unwrap();
    let after = usage(path);
    let messages = 2.0 * PINGS as f64 * path.processes.len().max(1) as f64;
    results.latency_micros.push(elapsed.as_secs_f64() * 1e6 / PINGS as f64);
    results.cpu_micros.push((after.cpu_nanos - before.cpu_nanos) / 1e3 / messages);
    results.switches.push((after.switches - before.switches) / messages);
    results.calls.push((after.calls - before.calls) / messages);
    results.bandwidth.push(stream(path, one, two));
}

/// The bandwidth in megabytes per second in one direction.
fn stream(path: &mut TestPath, one: Address, two: Address) -> f64 {
    let bytes = frame(one, two, 0, &pattern(0, RELAY_PAYLOAD_BYTES_MAX));
    let whole = STREAM_BYTES / bytes.len();
    let mut reader = path.ends[1].try_clone().unwrap();
    let total = whole * bytes.len();
    let start = Instant::now();
    let receiver = std::thread::spawn(move || {
        let mut buffer = vec![0; 256 << 10];
        let mut done = 0;
        while done < total {
            done += reader.read(&mut buffer).unwrap();
        }
    });
    for _ in 0..whole {
        path.ends[0].write_all(&bytes).unwrap();
    }
    receiver.join().unwrap();
    total as f64 / start.elapsed().as_secs_f64() / 1e6
}

// ---- paths -------------------------------------------------------------------------------

fn direct() -> TestPath {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let two = listener.accept().unwrap().0;
    for end in [&one, &two] {
        end.set_nodelay(true).unwrap();
    }
    TestPath {
        name: "direct TCP",
        ends: [one, two],
        indices: [0, 1],
        processes: vec![],
        guards: Guards::default(),
    }
}

fn one_forwarder() -> TestPath {
    forwarders("one forwarder", 1)
}

fn two_forwarders() -> TestPath {
    forwarders("two forwarders", 2)
}

/// A path through two HAProxies in TCP mode.
fn two_haproxies() -> TestPath {
    chain("two HAProxies", 2, |target| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap();
        drop(listener);
        let file = std::env::temp_dir().join(format!("landbridge-measure-{}.cfg", own.port()));
        let text = format!(
            "global\n nbthread 1\ndefaults\n mode tcp\n timeout connect 5s\n timeout client 60s\n \
             timeout server 60s\nlisten relay\n bind {own}\n server next {target}\n"
        );
        std::fs::write(&file, text).unwrap();
        let child = Command::new("haproxy").args(["-db", "-f"]).arg(&file).spawn().unwrap();
        let deadline = Instant::now() + common::PATIENCE;
        // HAProxy would forward a connection that only tests whether it listens, so the socket
        // table is read instead.
        let port = format!(":{:04X} ", own.port());
        while !std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&port) {
            assert!(Instant::now() < deadline, "HAProxy does not start");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let _ = std::fs::remove_file(file);
        (child, own)
    })
}

fn forwarders(name: &'static str, count: usize) -> TestPath {
    chain(name, count, |target| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["forward", &target.to_string()])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        (child, line.trim().parse().unwrap())
    })
}

/// A chain of processes, each of which connects to the next; `start` starts a process that leads to
/// an address.
fn chain(
    name: &'static str,
    count: usize,
    start: impl Fn(SocketAddr) -> (Child, SocketAddr),
) -> TestPath {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut target = listener.local_addr().unwrap();
    let mut guards = Guards::default();
    for _ in 0..count {
        let (child, address) = start(target);
        target = address;
        guards.children.push(child);
    }
    let one = TcpStream::connect(target).unwrap();
    let two = listener.accept().unwrap().0;
    for end in [&one, &two] {
        end.set_nodelay(true).unwrap();
    }
    let processes = guards.children.iter().map(Child::id).collect();
    TestPath { name, ends: [one, two], indices: [0, 1], processes, guards }
}

fn one_relay() -> TestPath {
    let relay = RelayProcess::start(&Plan::alone(4));
    let ends = [Rank::attach(&relay, 0).stream, Rank::attach(&relay, 1).stream];
    let processes = vec![relay.child.id()];
    let guards = Guards { relays: vec![relay], children: vec![] };
    TestPath { name: "one relay", ends, indices: [0, 1], processes, guards }
}

fn two_relays() -> TestPath {
    let authority = Authority::new();
    let zero = RelayProcess::start(&Plan::new(0, &authority).wan());
    let one = RelayProcess::start(&Plan::new(1, &authority).peer(0, zero.relays.unwrap()));
    let ends = [Rank::attach(&zero, 0).stream, Rank::attach(&one, 4).stream];
    let processes = vec![zero.child.id(), one.child.id()];
    let guards = Guards { relays: vec![zero, one], children: vec![] };
    TestPath { name: "two relays, TLS", ends, indices: [0, 4], processes, guards }
}

// ---- the bare forwarder ------------------------------------------------------------------

/// Accepts one connection, opens one to `target`, and copies between them: wait, read, write.
fn forward(target: SocketAddr) {
    use rustix::event::epoll::{self, EventData, EventFlags};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let ends = [listener.accept().unwrap().0, TcpStream::connect(target).unwrap()];
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for (n, end) in ends.iter().enumerate() {
        end.set_nodelay(true).unwrap();
        epoll::add(&set, end, EventData::new_u64(n as u64), EventFlags::IN).unwrap();
    }
    let mut events = Vec::with_capacity(2);
    let mut buffer = vec![0; 256 << 10];
    loop {
        events.clear();
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        for event in &events {
            let from = event.data.u64() as usize;
            let bytes = (&ends[from]).read(&mut buffer).unwrap_or(0);
            if bytes == 0 || (&ends[1 - from]).write_all(&buffer[..bytes]).is_err() {
                return;
            }
        }
    }
}

// ---- what a process has used -------------------------------------------------------------

#[derive(Default)]
struct Usage {
    cpu_nanos: f64,
    switches: f64,
    calls: f64,
}

fn usage(path: &mut TestPath) -> Usage {
    let mut sum = Usage::default();
    for process in &path.processes {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).unwrap();
        let schedule = read("schedstat");
        sum.cpu_nanos += schedule.split_whitespace().next().unwrap().parse::<f64>().unwrap();
        let status = read("status");
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum.switches += line.unwrap().trim().parse::<f64>().unwrap();
    }
    for relay in &mut path.guards.relays {
        // One line of the log has all counters; asking for it costs only a few calls.
        for name in ["waits", "reads", "writes"] {
            sum.calls += relay.counter(name) as f64;
        }
    }
    sum
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
