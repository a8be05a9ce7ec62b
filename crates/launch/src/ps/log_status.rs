//! The message logs of a job's ranks: the reports of all relays that hold them, or of the agents of
//! all nodes, merged.
//!
//! The module is pure. JSON lines of relays or agents enter; the output of `landbridge log` leaves.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::paths::{bytes, counted, write_table};

/// What is said of a job without message logs.
pub const NOTHING_KEPT: &str = "its ranks have no message logs (it runs without --recover)";

/// The merged reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogStatus {
    pub processes: Vec<ProcessLogStatus>,
    /// Determinants of the process that the query names; `frames` holds the frames of the same
    /// process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub determinants: Vec<Determinant>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frames: Vec<LoggedFrame>,
    /// Relays that have not answered in time.
    pub relays_missing: u32,
    /// Hosts that have not answered in time, if the senders keep messages.
    #[serde(default)]
    pub hosts_missing: u32,
}

/// The message log of one endpoint of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessLogStatus {
    pub process: u32,
    pub endpoint: u32,
    /// Frames delivered to the endpoint that the relay holds, their bytes, and the part of the
    /// bytes that is on a disk. If the senders keep messages: frames that the endpoint has received
    /// and may receive again, and the bytes of the logs that it writes.
    pub frames: u64,
    pub bytes: u64,
    pub disk_bytes: u64,
    /// Frames that the endpoint has sent, and the bytes of their digests.
    pub sent: u64,
    #[serde(default)]
    pub sent_bytes: u64,
    /// Bytes of recorded nondeterminism (clocks and random numbers), if the process is on another
    /// node than the relay.
    #[serde(default)]
    pub nondeterminism_bytes: u64,
    /// Number of determinants, their bytes, and the number of frames that the determinants cover.
    pub determinants: u64,
    pub determinant_bytes: u64,
    pub delivered_frames: u64,
    pub polls: u64,
    /// Whether the endpoint replays.
    pub is_replaying: bool,
    /// Why the endpoint cannot be restarted; empty if it can.
    pub problem: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Determinant {
    pub determinant: u64,
    /// Poll at which the frames were delivered, counted from the start of the rank, and the
    /// endpoint's own time in microseconds.
    pub polls: u64,
    pub micros: u64,
    /// Number of frames, and the number of the first frame.
    pub count: u64,
    pub first_frame: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LoggedFrame {
    InMemory {
        frame: u64,
        kind: String,
        source: u32,
        sequence: u64,
        length: u64,
    },
    /// A range of frames that are on a disk.
    OnDisk {
        on_disk_from: u64,
        on_disk_to: u64,
    },
    /// Frames of one process in its log.
    OfSender {
        frame: u64,
        source: u32,
        frames: u64,
    },
}

/// One line of a relay's report.
#[derive(Deserialize)]
#[serde(untagged)]
enum LogStatusLine {
    ProcessLogStatus(ProcessLogStatus),
    Determinant(Determinant),
    LoggedFrame(LoggedFrame),
}

impl LogStatus {
    /// Adds the report of a relay. Lines that cannot be parsed come from another version and are
    /// left out.
    pub fn add_lines(&mut self, lines: &str) {
        for said in lines.lines().filter_map(|line| serde_json::from_str(line).ok()) {
            match said {
                LogStatusLine::ProcessLogStatus(process) => self.processes.push(process),
                LogStatusLine::Determinant(determinant) => self.determinants.push(determinant),
                LogStatusLine::LoggedFrame(frame) => self.frames.push(frame),
            }
        }
        self.processes.sort_by_key(|it| (it.process, it.endpoint));
    }

    /// The bytes that relays hold for a rank, digests and determinants included; `None` if no relay
    /// has reported the rank.
    pub fn logged_bytes_of(&self, process: u32) -> Option<u64> {
        let own: Vec<u64> = self
            .processes
            .iter()
            .filter(|it| it.process == process)
            .map(ProcessLogStatus::logged_bytes)
            .collect();
        (!own.is_empty()).then(|| own.iter().sum())
    }

    /// The bytes that relays hold for all ranks, and the part of the bytes that is on a disk.
    pub fn logged_bytes(&self) -> (u64, u64) {
        let on_disk = self.processes.iter().map(|it| it.disk_bytes);
        (self.processes.iter().map(ProcessLogStatus::logged_bytes).sum(), on_disk.sum())
    }

    /// A table of the message logs of all ranks, for users. `name` gives the name of a process.
    pub fn table(&self, name: impl Fn(u32) -> String) -> String {
        let mut text = String::new();
        let head = [
            "rank",
            "frames",
            "in memory",
            "on disk",
            "sent",
            "determinants",
            "bytes/frame",
            "nondeterminism",
            "polls",
            "state",
        ];
        let rows = self.processes.iter().map(|it| it.cells(&name));
        let rows: Vec<_> = std::iter::once(head.map(String::from)).chain(rows).collect();
        match self.processes.is_empty() {
            true => {
                let _ = writeln!(text, "  {NOTHING_KEPT}");
            }
            false => write_table(&mut text, &rows),
        }
        self.write_missing(&mut text);
        text
    }

    fn write_missing(&self, text: &mut String) {
        for (missing, what) in [(self.relays_missing, "relay"), (self.hosts_missing, "host")] {
            let has = if missing == 1 { "has" } else { "have" };
            if missing > 0 {
                let all = counted(u64::from(missing), what);
                let _ = writeln!(text, "  {all} {has} not answered in time");
            }
        }
    }

    /// The determinants and frames of one rank, for users.
    pub fn deliveries_text(&self, name: impl Fn(u32) -> String) -> String {
        let mut text = String::new();
        let mut frames = self.frames.iter().peekable();
        for determinant in &self.determinants {
            let Determinant { determinant: number, polls, micros, count, first_frame } =
                determinant;
            let _ =
                write!(text, "  determinant {number}: poll {polls}, {} s", *micros as f64 / 1e6);
            let _ = match count {
                0 => writeln!(text, ", something was due"),
                _ => {
                    writeln!(text, ", delivers frames {first_frame} to {}", first_frame + count - 1)
                }
            };
            while let Some(frame) = frames.next_if(|it| it.first() < first_frame + count) {
                frame.write(&mut text, &name);
            }
        }
        if frames.peek().is_some() {
            text.push_str("  not delivered yet:\n");
            frames.for_each(|frame| frame.write(&mut text, &name));
        }
        if text.is_empty() {
            text.push_str("  its message log has no entry from there on\n");
        }
        self.write_missing(&mut text);
        text
    }
}

impl ProcessLogStatus {
    fn logged_bytes(&self) -> u64 {
        self.bytes + self.determinant_bytes + self.sent_bytes + self.nondeterminism_bytes
    }

    fn cells(&self, name: impl Fn(u32) -> String) -> [String; 10] {
        // Determinant bytes per delivered frame, for the column that shows what each frame costs.
        let each = self.determinant_bytes as f64 / self.delivered_frames.max(1) as f64;
        let endpoint =
            if self.endpoint == 0 { String::new() } else { format!(".{}", self.endpoint) };
        let state = match (self.problem.as_str(), self.is_replaying) {
            ("", true) => "replaying",
            ("", false) => "logged",
            (problem, _) => problem,
        };
        [
            format!("{}{endpoint}", name(self.process)),
            self.frames.to_string(),
            bytes(self.bytes - self.disk_bytes.min(self.bytes)),
            bytes(self.disk_bytes),
            self.sent.to_string(),
            self.determinants.to_string(),
            format!("{each:.1}"),
            if self.nondeterminism_bytes > 0 {
                bytes(self.nondeterminism_bytes)
            } else {
                "-".into()
            },
            self.polls.to_string(),
            state.to_string(),
        ]
    }
}

impl LoggedFrame {
    fn first(&self) -> u64 {
        match self {
            LoggedFrame::InMemory { frame, .. } | LoggedFrame::OfSender { frame, .. } => *frame,
            LoggedFrame::OnDisk { on_disk_from, .. } => *on_disk_from,
        }
    }

    fn write(&self, text: &mut String, name: impl Fn(u32) -> String) {
        let _ = match self {
            LoggedFrame::InMemory { frame, kind, source, sequence, length } => {
                let from = name(*source);
                writeln!(text, "    frame {frame}: {kind} of {from}, {length} bytes at {sequence}")
            }
            LoggedFrame::OnDisk { on_disk_from, on_disk_to } => {
                writeln!(text, "    frames {on_disk_from} to {}: on disk", on_disk_to - 1)
            }
            LoggedFrame::OfSender { frame, source, frames: 1 } => {
                writeln!(text, "    frame {frame}: of {}", name(*source))
            }
            LoggedFrame::OfSender { frame, source, frames } => {
                let last = frame + frames.saturating_sub(1);
                writeln!(text, "    frames {frame} to {last}: of {}", name(*source))
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "{\"process\":1,\"endpoint\":0,\"frames\":30,\"bytes\":3000,\
        \"disk_bytes\":1000,\"sent\":4,\"sent_bytes\":48,\"determinants\":2,\
        \"determinant_bytes\":8,\"delivered_frames\":4,\"polls\":99,\"is_replaying\":false,\
        \"problem\":\"\"}\n\
        {\"determinant\":0,\"polls\":7,\"micros\":1500000,\"count\":2,\"first_frame\":0}\n\
        {\"determinant\":1,\"polls\":9,\"micros\":2500000,\"count\":0,\"first_frame\":2}\n\
        {\"frame\":0,\"source\":0,\"sequence\":64,\"length\":8,\"kind\":\"Message\"}\n\
        {\"on_disk_from\":1,\"on_disk_to\":2}\n\
        {\"frame\":2,\"source\":0,\"sequence\":72,\"length\":8,\"kind\":\"Message\"}\nnonsense\n";

    #[test]
    fn frames_in_the_logs_of_their_senders_are_shown_by_sender() {
        let mut record = LogStatus::default();
        record.add_lines(
            "{\"determinant\":3,\"polls\":7,\"micros\":1500000,\"count\":3,\"first_frame\":4}\n\
             {\"frame\":4,\"source\":2,\"frames\":2}\n{\"frame\":6,\"source\":0,\"frames\":1}\n",
        );
        record.hosts_missing = 1;
        let text = "  determinant 3: poll 7, 1.5 s, delivers frames 4 to 6\n    frames 4 to 5: of \
                    r2\n    frame 6: of r0\n  1 host has not answered in time\n";
        assert_eq!(record.deliveries_text(|process| format!("r{process}")), text);
    }

    #[test]
    fn log_status_of_relays_is_merged() {
        let mut record = LogStatus::default();
        record.add_lines(SAID);
        let name = |process| format!("r{process}");
        let table = "  rank  frames  in memory  on disk  sent  determinants  bytes/frame  \
                     nondeterminism  polls  state\n  r1    30      2.00 kB    1.00 kB  4     \
                     2             2.0          -               99     logged\n";
        assert_eq!(record.table(name), table);
        let deliveries_text = "  determinant 0: poll 7, 1.5 s, delivers frames 0 to 1\n    frame \
                     0: Message of r0, 8 bytes at 64\n    frames 1 to 1: on disk\n  determinant 1: \
                     poll 9, 2.5 s, something was due\n  not delivered yet:\n    frame 2: Message \
                     of r0, 8 bytes at 72\n";
        assert_eq!(record.deliveries_text(name), deliveries_text);
        assert_eq!((record.logged_bytes(), record.logged_bytes_of(1)), ((3056, 1000), Some(3056)));
        assert_eq!(record.logged_bytes_of(0), None);
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<LogStatus>(&json).unwrap(), record);
        assert!(LogStatus::default().table(name).contains("without --recover"));
    }
}
