//! Tests of a message log for restartable processes that exceeds the relay's memory.

mod common;

use std::path::{Path, PathBuf};

use common::{Plan, Rank, RelayProcess, command, introduction, pattern};
use landbridge_proto::limit::RELAY_PAYLOAD_BYTES_MAX;
use landbridge_proto::wire::frame::{Header, Kind};
use landbridge_proto::wire::hello::Introduction;

/// Three times what two processes may have in memory in any case, in frames.
const FRAMES: u64 = (48 << 20) / RELAY_PAYLOAD_BYTES_MAX as u64;

/// A temporary directory, which is removed when this value is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("landbridge-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn names(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn relay(directory: &Path, disk: &str) -> RelayProcess {
    let variables = [
        ("LANDBRIDGE_RECOVER", "on"),
        ("LANDBRIDGE_RECOVER_MEMORY", "1MiB"),
        ("LANDBRIDGE_RECOVER_DIR", directory.to_str().unwrap()),
        ("LANDBRIDGE_RECOVER_DISK", disk),
    ];
    RelayProcess::start_with(&Plan::alone(4), command(&variables))
}

/// Attaches an incarnation of a process, which first receives the number of frames that it has sent
/// before.
fn start(relay: &RelayProcess, index: u32, incarnation: u32) -> Rank {
    let own = Introduction { incarnation, ..introduction(index) };
    let mut rank = Rank::attach_as(relay, own).unwrap();
    let (opening, _) = rank.receive();
    assert_eq!((opening.kind, opening.sequence, opening.delivered), (Kind::ReplayStart, 0, 0));
    rank
}

/// `sender` sends all frames to process 1, which reads them.
fn flood(sender: Rank, reader: &mut Rank) -> Rank {
    let flood = std::thread::spawn(move || {
        let mut sender = sender;
        for number in 0..FRAMES {
            sender.send(1, sequence(number), &body(number));
        }
        sender
    });
    read_all(reader);
    flood.join().unwrap()
}

fn sequence(number: u64) -> u64 {
    number * RELAY_PAYLOAD_BYTES_MAX as u64
}

fn body(number: u64) -> Vec<u8> {
    pattern(number * 77, RELAY_PAYLOAD_BYTES_MAX)
}

fn read_all(reader: &mut Rank) {
    for number in 0..FRAMES {
        let (Header { kind, sequence: at, .. }, bytes) = reader.receive();
        assert_eq!((kind, at), (Kind::Ack, sequence(number)));
        assert!(bytes == body(number), "frame {number}");
    }
}

#[test]
fn a_process_comes_back_from_a_record_that_is_mostly_on_disk() {
    let directory = Directory::new("record");
    let mut relay = relay(&directory.0, "1GiB");
    let (sender, mut reader) = (start(&relay, 0, 0), start(&relay, 1, 0));
    let sender = flood(sender, &mut reader);
    let disk = relay.wait_for_counter("disk_bytes", |bytes| bytes > 24 << 20);
    let memory = relay.counter("log_bytes");
    assert!(memory <= 16 << 20 && memory + disk > 47 << 20, "{memory} {disk}");
    assert_eq!(directory.names(), 0, "the file has no name");
    for incarnation in 1..3 {
        drop(reader);
        relay.wait_for("is away");
        reader = start(&relay, 1, incarnation);
        read_all(&mut reader);
        assert!(relay.counter("read_back_bytes") >= u64::from(incarnation) * (24 << 20));
    }
    // The process now is one like any other.
    let mut sender = sender;
    sender.send(1, 1 << 40, b"on");
    assert_eq!(reader.receive().1, b"on");
    // What is replayed is not kept in memory.
    assert!(relay.memory_bytes() < 64 << 20, "{} MiB", relay.memory_bytes() >> 20);
}

#[test]
fn a_disk_that_may_take_no_more_is_reported_and_the_job_goes_on() {
    let directory = Directory::new("full-record");
    let mut relay = relay(&directory.0, "8MiB");
    let (sender, mut reader) = (start(&relay, 0, 0), start(&relay, 1, 0));
    flood(sender, &mut reader);
    relay.wait_for("have filled recover_disk");
    relay.wait_for("cannot be restarted");
    let events = relay.events(2).join("\n");
    assert!(events.contains("warns: ") && events.contains("recover_disk"), "{events}");
    drop(reader);
    relay.wait_for("is away");
    let own = Introduction { incarnation: 1, ..introduction(1) };
    // The process is refused after the hello.
    let again = Rank::attach_as(&relay, own);
    let said = again.and_then(|mut rank| std::io::Read::read(&mut rank.stream, &mut [0]));
    assert!(!matches!(said, Ok(1)), "it cannot be restarted");
}

#[test]
fn a_directory_that_is_not_there_is_reported_at_once() {
    let variables =
        [("LANDBRIDGE_RECOVER", "on"), ("LANDBRIDGE_RECOVER_DIR", "/nonexistent/landbridge")];
    let mut command = command(&variables);
    command.args(["--config", "-"]).stdin(std::process::Stdio::piped());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, format!("{}---\n", Plan::alone(2).text).as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("recover_dir: no file can be made in"),
        "{text}"
    );
}
