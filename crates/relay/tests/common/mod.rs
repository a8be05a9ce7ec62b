//! Real relay processes, and clients that speak the protocol with them.
#![allow(dead_code)]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::hello::{Dialler, Introduction, LogPosition, REPLY_BYTES, Role};
use landbridge_testbed::relay::{emit, empty, goodbye, rank};

/// The longest wait. Nothing in these tests takes longer, except on a machine that has stopped.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub const JOB: JobId = JobId([7; 16]);
pub const KEY: JobKey = JobKey([9; 32]);
pub const RANKS_PER_CLUSTER: u32 = 4;

/// The certificate authority of one job.
pub struct Authority {
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        Self { issuer: rcgen::CertifiedIssuer::self_signed(parameters, key).unwrap() }
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues certificate and key of the relay of `cluster`.
    pub fn issue(&self, cluster: u16) -> (String, String) {
        let name = format!("relay-{cluster}.landbridge");
        let parameters = rcgen::CertificateParams::new(vec![name]).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

/// The configuration of a relay.
pub struct Plan {
    pub text: String,
}

impl Plan {
    pub fn new(cluster: u16, authority: &Authority) -> Self {
        let (certificate, key) = authority.issue(cluster);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let text = format!(
            "job = \"{}\"\nkey = \"{}\"\ncluster = {cluster}\nlisten = \"127.0.0.1:0\"\n\
             ca = \"\"\"{}\"\"\"\ncertificate = \"\"\"{certificate}\"\"\"\n\
             private_key = \"\"\"{key}\"\"\"\nranks = [[0, 4], [4, 4]]\n",
            hex(&JOB.0),
            hex(&KEY.0),
            authority.pem()
        );
        Self { text }
    }

    /// The configuration of a relay without other relays, with one cluster of `ranks` processes.
    pub fn alone(ranks: u32) -> Self {
        let mut plan = Self::new(0, &Authority::new());
        plan.text = plan.text.replace("[[0, 4], [4, 4]]", &format!("[[0, {ranks}]]"));
        plan
    }

    pub fn line(mut self, line: &str) -> Self {
        // The line goes before the first table.
        self.text.insert_str(0, &format!("{line}\n"));
        self
    }

    pub fn wan(self) -> Self {
        self.line("wan_listen = \"127.0.0.1:0\"")
    }

    pub fn peer(mut self, cluster: u16, address: SocketAddr) -> Self {
        write!(self.text, "[[peer]]\ncluster = {cluster}\naddress = \"{address}\"\n").unwrap();
        self
    }
}

/// A running relay. Dropping it kills the process.
pub struct RelayProcess {
    pub child: Child,
    pub ranks: SocketAddr,
    pub relays: Option<SocketAddr>,
    lifeline: Option<ChildStdin>,
    lines: Receiver<String>,
    events: Receiver<String>,
    pub log: Vec<String>,
}

impl RelayProcess {
    pub fn start(plan: &Plan) -> Self {
        Self::start_with(plan, command(&[]))
    }

    pub fn start_with(plan: &Plan, mut command: Command) -> Self {
        let mut child = command
            .args(["--config", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lifeline = child.stdin.take().unwrap();
        lifeline.write_all(format!("{}---\n", plan.text).as_bytes()).unwrap();
        let lines = read_lines(child.stderr.take().unwrap());
        let events = read_lines(child.stdout.take().unwrap());
        let ready = events.recv_timeout(PATIENCE).unwrap_or_default();
        let value = |name: &str| {
            let word = ready.split_whitespace().find_map(|word| word.strip_prefix(name));
            word.unwrap_or_else(|| panic!("not ready: {ready} {:?}", lines.recv_timeout(PATIENCE)))
        };
        let ranks = value("ranks=").parse().unwrap();
        let relays = value("relays=").parse().ok();
        Self { child, ranks, relays, lifeline: Some(lifeline), lines, events, log: Vec::new() }
    }

    /// Starts two linked relays, of clusters 0 and 1; the second dials.
    pub fn pair() -> (Self, Self) {
        Self::pair_with(&[])
    }

    /// Starts two linked relays, of clusters 0 and 1, with these environment variables set.
    pub fn pair_with(variables: &[(&str, &str)]) -> (Self, Self) {
        let authority = Authority::new();
        let start = |plan| Self::start_with(&plan, command(variables));
        let mut zero = start(Plan::new(0, &authority).wan());
        let mut one = start(Plan::new(1, &authority).peer(0, zero.relays.unwrap()));
        zero.wait_for("linked to the relay of cluster 1");
        one.wait_for("linked to the relay of cluster 0");
        (zero, one)
    }

    /// Waits for a line of the log that contains `text`, and returns the line.
    pub fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.log.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => {
                    // The counters show more than the missing line.
                    self.signal(libc::SIGUSR1);
                    self.log.extend(self.lines.recv_timeout(Duration::from_secs(1)));
                    panic!("no line with {text:?} in the log: {:#?}", self.log)
                }
            }
        }
    }

    /// The next lines that the relay prints on standard output.
    pub fn events(&mut self, count: usize) -> Vec<String> {
        (0..count).map(|_| self.events.recv_timeout(PATIENCE).unwrap()).collect()
    }

    /// Asks for the counters, and returns one of them.
    pub fn counter(&mut self, name: &str) -> u64 {
        self.signal(libc::SIGUSR1);
        let line = self.wait_for("frames=");
        let prefix = format!("{name}=");
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(&prefix));
        value.unwrap().parse().unwrap()
    }

    pub fn wait_for_counter(&mut self, name: &str, is_good: impl Fn(u64) -> bool) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.counter(name);
            if is_good(value) {
                return value;
            }
            assert!(Instant::now() < deadline, "{name} stays at {value}: {:#?}", self.log.last());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill has no memory effects here; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// The bytes of physical memory that the relay's own data takes.
    pub fn memory_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
    }

    pub fn cut_lifeline(&mut self) {
        self.lifeline = None;
    }

    /// Waits for the end of the relay. Returns the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the relay does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command that starts a relay with these environment variables set. Ranks of these tests send
/// frames without checksums, unless a test says otherwise.
pub fn command(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary());
    command.env("LANDBRIDGE_INTEGRITY", "off").envs(variables.iter().copied());
    command
}

/// The relay that was built with this test; examples look in the folder above their own.
pub fn binary() -> std::path::PathBuf {
    match option_env!("CARGO_BIN_EXE_landbridge-relay") {
        Some(path) => path.into(),
        None => {
            let own = std::env::current_exe().unwrap();
            own.ancestors().nth(2).unwrap().join("landbridge-relay")
        }
    }
}

fn read_lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// A rank, as the relay sees it.
pub struct Rank {
    pub address: Address,
    pub stream: TcpStream,
}

impl Rank {
    pub fn attach(relay: &RelayProcess, index: u32) -> Self {
        Self::attach_as(relay, introduction(index)).unwrap()
    }

    pub fn attach_as(relay: &RelayProcess, own: Introduction) -> std::io::Result<Self> {
        let mut stream = TcpStream::connect(relay.ranks)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let address = own.address;
        say_hello(&mut stream, own, KEY)?;
        Ok(Self { address, stream })
    }

    pub fn send(&mut self, target: u32, sequence: u64, body: &[u8]) {
        self.stream.write_all(&frame(self.address, rank(target), sequence, body)).unwrap();
    }

    /// Sends Goodbye to a peer.
    pub fn say_goodbye(&mut self, target: u32) {
        self.stream.write_all(&goodbye(self.address, rank(target))).unwrap();
    }

    /// The next frame that does not come from a relay.
    pub fn receive_frame(&mut self) -> (Header, Vec<u8>) {
        loop {
            let (header, body) = self.receive();
            if !header.kind.reports_undeliverable() {
                return (header, body);
            }
        }
    }

    pub fn receive(&mut self) -> (Header, Vec<u8>) {
        let mut bytes = [0; HEADER_BYTES];
        self.stream.read_exact(&mut bytes).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let mut body = vec![0; header.length as usize];
        self.stream.read_exact(&mut body).unwrap();
        (header, body)
    }
}

pub fn say_hello(
    stream: &mut (impl Read + Write),
    own: Introduction,
    key: JobKey,
) -> std::io::Result<Introduction> {
    let dialler = Dialler::new(JOB, key, own, [own.address.0 as u8; 32]);
    stream.write_all(&dialler.open())?;
    let mut reply = [0; REPLY_BYTES];
    stream.read_exact(&mut reply)?;
    let (close, listener) = dialler
        .handle_reply(&reply)
        .map_err(|refusal| std::io::Error::other(refusal.to_string()))?;
    stream.write_all(&close)?;
    Ok(listener)
}

pub fn introduction(index: u32) -> Introduction {
    Introduction {
        role: Role::Endpoint,
        address: Address::new(index, 0),
        incarnation: 1,
        cluster: ClusterId((index / RANKS_PER_CLUSTER) as u16),
        pid: std::process::id(),
        eager_window: 1 << 16,
        cookie_address: 0,
        cookie: 0,
        name: [0; 48],
        log_position: LogPosition::default(),
    }
}

/// A frame of a kind without a kind header, so the test determines the whole body.
pub fn frame(source: Address, target: Address, sequence: u64, body: &[u8]) -> Vec<u8> {
    emit(Header { sequence, ..empty(Kind::Ack, source, target) }, body)
}

/// Bytes that show their position.
pub fn pattern(sequence: u64, length: usize) -> Vec<u8> {
    (sequence..sequence + length as u64).map(|n| (n ^ (n >> 8)) as u8).collect()
}
