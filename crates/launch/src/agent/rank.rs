//! One rank of this host: its process, its PMI socket and its three standard streams.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use landbridge_proto::digest::digest;
use landbridge_proto::setting::{NODE_LOGS, NODE_LOGS_DISK};
use rustix::event::PollFlags;
use rustix::io::Errno;

use super::checkpoint_scheduler::{CheckpointScheduler, QuiesceSocket};
use super::contact::Contact;
use super::input::Stdin;
use super::node_cut::NodeCut;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use super::pmi_replay::{PmiReplay, PollCounts};
use super::rank_recording::{RankRecording, same_length};
use super::statistics_page::StatisticsPage;
use crate::checkpoint::checkpoint_image::{CheckpointImage, ReplayPosition, UnpackedImage};
use crate::checkpoint::criu::{self, ExternalInodes, InheritedFds};
use crate::control::spawn_order::Task;
use crate::control::{Job, Message, Node, PIECE_BYTES_MAX, Stream};
use crate::control_stream::set_nonblocking;
use crate::ending::Ending;
use crate::mpi;
use crate::pmi::wire::{Input, LineReader, WireError};
use crate::sys;

/// Unsent bytes beyond which the agent reads no further requests of a rank that does not read the
/// answers.
const REPLY_BYTES_MAX: usize = 1024 * 1024;
/// Pieces read from a running rank's stream before other ranks get their turn.
const PIECES_PER_TURN: usize = 4;
/// Most pieces in a pipe (1 MiB is Linux's default limit for the size of a pipe): reading so many
/// empties the pipe of a rank that has ended.
const PIECES_OF_A_PIPE: usize = 1024 * 1024 / PIECE_BYTES_MAX;

/// Which rank to start, and with what.
pub struct LaunchSpec<'a> {
    /// The rank's process group; 0: the job's first processes.
    pub group: u32,
    /// The rank's process index in the job.
    pub index: u32,
    /// Rank in the group's MPI_COMM_WORLD; `size` is the number of ranks in it.
    pub rank: u32,
    pub size: u32,
    pub task: &'a Task,
    pub plan: &'a mpi::ProgramPlan,
    /// Processes of the job on this machine.
    pub machine_processes: u32,
    /// Processes of the group on this node, to which the MPI library may carry messages itself.
    pub node_processes: u32,
    /// Number of the incarnation ([`PmiReplay::incarnation`]); `None` for a rank that may not be
    /// restarted.
    pub incarnation: Option<u32>,
    /// The rank's recorded nondeterminism, if it is recorded.
    pub recording: Option<Rc<RankRecording>>,
    pub shared: SharedMemory,
    /// Checkpoint images of the rank are taken.
    pub has_images: bool,
    /// Process id that the rank gets if possible: that of its last incarnation, which programs may
    /// have passed on to other processes.
    pub pid: Option<u32>,
}

/// Memory files that a rank uses besides its record, the same for all its incarnations.
#[derive(Clone, Default)]
pub struct SharedMemory {
    /// The page on which the rank reports its paths.
    pub statistics_page: Option<Rc<StatisticsPage>>,
    /// The message logs of this node's ranks, if the senders keep messages.
    pub node_logs: Option<Rc<NodeLogs>>,
    /// The ranks of this node, of which another node must know all at once.
    pub node_cut: Option<Rc<NodeCut>>,
}

impl SharedMemory {
    /// The descriptors, in the order in which a rank gets them when it resumes.
    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let page = self.statistics_page.iter().map(|page| page.fd());
        page.chain(self.node_logs.iter().flat_map(|node_logs| node_logs.files().fds()))
    }
}

/// A rank cannot be started for a reason that lies with this node.
#[derive(Debug)]
pub struct NodeSpecificError(String);

impl NodeSpecificError {
    pub fn error(why: anyhow::Error) -> anyhow::Error {
        anyhow::Error::new(NodeSpecificError(format!("{why:#}")))
    }
}

impl std::error::Error for NodeSpecificError {}

impl std::fmt::Display for NodeSpecificError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

pub struct LocalRank {
    /// The process index, by which all processes outside the rank's group name it.
    pub rank: u32,
    pub group: u32,
    /// The rank in its group.
    pub group_rank: u32,
    pub pid: u32,
    pub ending: Option<Ending>,
    /// How the rank has ended, if the agent above knows it.
    pub reported: Option<Ending>,
    /// PMI replay of a rank that may be restarted.
    pub replay: Option<PmiReplay>,
    pub recording: Option<Rc<RankRecording>>,
    pub shared: SharedMemory,
    /// Checkpoint scheduler of a rank of which images are taken.
    pub scheduler: Option<CheckpointScheduler>,
    /// A restore is in progress, after the rank's process has ended: the next incarnation reads the
    /// standard input.
    pub is_restoring: bool,
    pub quiesce_socket: Option<QuiesceSocket>,
    /// Whether the rank has contacted its process manager, and which processes it runs until then.
    pub contact: Contact,
    pub pmi: Option<PmiSocket>,
    pub streams: StandardStreams,
}

/// The agent's ends of a rank's standard streams.
pub struct StandardStreams {
    /// Standard input of the rank, if it is rank 0.
    pub input: Stdin,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

/// Lets the process prepare itself before it executes the program: it keeps the descriptors
/// `inherited`, and, if it is to be repeated by a later incarnation, the addresses of its memory.
/// It gets the process id `wanted_pid`, if that is not 0 by then.
fn prepare_process(
    command: &mut Command,
    is_repeatable: bool,
    inherited: Vec<i32>,
    wanted_pid: &Arc<AtomicU32>,
) {
    let (parent, open_files) = (std::process::id(), sys::rank_open_files());
    let wanted_pid = wanted_pid.clone();
    // SAFETY: the closure makes only async-signal-safe calls.
    unsafe {
        command.pre_exec(move || {
            match wanted_pid.load(Relaxed) {
                0 => {}
                pid => sys::become_process(pid)?,
            }
            sys::prepare_child(parent, libc::SIGKILL)?;
            sys::own_session()?;
            if is_repeatable {
                sys::fix_addresses()?;
            }
            if let Some(limit) = open_files {
                rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?;
            }
            inherited.iter().copied().try_for_each(sys::keep_over_exec)
        });
    }
}

impl LocalRank {
    pub fn start(job: &Job, node: &Node, relay: &str, start: &LaunchSpec) -> Result<LocalRank> {
        let (ours, theirs) = socket_pair()?;
        let mut command = command(job, node, relay, start, sys::raw(&theirs));
        let quiesce_pair = if start.has_images { Some(quiesce_pair(&mut command)?) } else { None };
        let quiesce_fd = quiesce_pair.as_ref().map(|(_, theirs)| sys::raw(theirs));
        let record = start.recording.as_ref().map(|recording| sys::raw(&recording.fd()));
        let stdin = if start.index == 0 { Stdio::piped() } else { Stdio::null() };
        let (stderr, their_stderr) = pipe()?;
        command.stdin(stdin).stdout(Stdio::piped()).stderr(their_stderr.try_clone()?);
        // Lines of our libraries go there, also if the program redirects its standard error.
        let their_stderr = sys::out_of_the_way(their_stderr);
        let stderr_fd = start.incarnation.map(|_| sys::raw(&their_stderr));
        if let Some(number) = stderr_fd {
            command.env("LANDBRIDGE_STDERR", same_length(number));
        }
        let own = Some(sys::raw(&theirs));
        let shared = start.shared.fds().map(|fd| Some(sys::raw(&fd)));
        let inherited = [own, record, quiesce_fd, stderr_fd].into_iter().chain(shared);
        let inherited: Vec<i32> = inherited.flatten().collect();
        let wanted_pid = Arc::new(AtomicU32::new(0));
        prepare_process(&mut command, start.incarnation.is_some(), inherited, &wanted_pid);
        let (pid, mut child) =
            spawn(&mut command, start.pid, &wanted_pid).with_context(|| cannot_start(start))?;
        let quiesce_socket = quiesce_pair
            .map(|quiesce_pair| new_quiesce_socket(quiesce_pair, &theirs, &child, &stderr))
            .transpose()?;
        Ok(LocalRank {
            rank: start.index,
            group: start.group,
            group_rank: start.rank,
            pid,
            ending: None,
            reported: None,
            replay: start.incarnation.map(|_| PmiReplay::new(Instant::now())),
            recording: start.recording.clone(),
            shared: start.shared.clone(),
            scheduler: None,
            is_restoring: false,
            quiesce_socket,
            contact: Contact::new(start.plan, job.size, Instant::now()),
            pmi: Some(PmiSocket::new(ours.into())?),
            streams: StandardStreams {
                input: Stdin::new(
                    child.stdin.take().map(nonblocking).transpose()?,
                    start.incarnation.is_some(),
                ),
                stdout: child.stdout.take().map(nonblocking).transpose()?,
                stderr: Some(nonblocking(stderr)?),
            },
        })
    }

    /// Begins to restore this rank, whose process has ended, from `image`. Returns the next
    /// incarnation and the process id of the running CRIU. Once CRIU has ended with exit code 0,
    /// the incarnation takes over ([`LocalRank::take_over`]).
    pub fn begin_restore(
        &mut self,
        image: &CheckpointImage,
        unpacked: &UnpackedImage,
    ) -> Result<(LocalRank, u32)> {
        let ReplayPosition { read, recording_bytes, .. } = image.header.replay_position;
        if !self.streams.input.has(read) {
            bail!("the standard input that it has read since is no longer kept");
        }
        self.recording.as_ref().map_or(Ok(()), |record| record.check_position(recording_bytes))?;
        let start = self.replay.as_ref().context("it cannot be restarted")?.incarnation();
        let scheduler = self.scheduler.as_mut().context("no checkpoints are taken of it")?;
        let (tool, kept) = (scheduler.config().tool.clone(), scheduler.images.trim_position());
        let inodes = image.header.inodes;
        let (ours, theirs) = UnixStream::pair().context("no socket pair")?;
        let (control, their_control) = UnixStream::pair().context("no socket pair")?;
        let (stdout, their_stdout) = pipe()?;
        let (stderr, their_stderr) = pipe()?;
        let stdin = inodes.stdin.map(|_| pipe()).transpose()?;
        let (their_stdin, stdin) = stdin.map_or((None, None), |(from, to)| (Some(from), Some(to)));
        let inherited = InheritedFds {
            stdin: their_stdin,
            stdout: their_stdout,
            stderr: their_stderr,
            pmi: theirs.into(),
            control: their_control.into(),
        };
        let rank = LocalRank {
            group: self.group,
            group_rank: self.group_rank,
            pid: image.header.pid,
            ending: None,
            // The inodes under which the next image will name these descriptors.
            quiesce_socket: Some(QuiesceSocket {
                socket: control.into(),
                inodes: inherited.inodes()?,
            }),
            pmi: Some(PmiSocket::new(ours.into())?),
            streams: StandardStreams {
                input: Stdin::new(stdin.map(nonblocking).transpose()?, true),
                stdout: Some(nonblocking(stdout)?),
                stderr: Some(nonblocking(stderr)?),
            },
            ..LocalRank::vacant(self.rank, self.recording.clone(), self.shared.clone())
        };
        rank.resume(image.header.number, start, kept)?;
        image.restore_shared_memory(unpacked)?;
        let criu = criu::restore(&tool, &unpacked.folder, &inodes, &inherited)?;
        Ok((rank, criu.id()))
    }

    /// Replaces `old` by this incarnation, which was restored from an image at this replay
    /// position.
    pub fn take_over(mut self, old: &mut LocalRank, replay_position: &ReplayPosition) -> LocalRank {
        self.replay = old.replay.take();
        if let Some(replay) = &mut self.replay {
            replay.begin_at(replay_position.asked, replay_position.stage, replay_position.printed);
        }
        self.scheduler = old.scheduler.take();
        self.inherit_input(old, replay_position.read);
        self
    }

    /// A rank of the job's first group without a process, before its first incarnation here or
    /// after an incarnation has ended.
    pub fn vacant(
        rank: u32,
        recording: Option<Rc<RankRecording>>,
        shared: SharedMemory,
    ) -> LocalRank {
        LocalRank {
            rank,
            group: 0,
            group_rank: rank,
            pid: 0,
            ending: Some(Ending::Killed(libc::SIGKILL)),
            reported: None,
            replay: None,
            recording,
            shared,
            scheduler: None,
            is_restoring: false,
            quiesce_socket: None,
            contact: Contact::default(),
            pmi: None,
            streams: StandardStreams { input: Stdin::new(None, true), stdout: None, stderr: None },
        }
    }

    /// How often the rank has polled for messages, if polls are counted.
    pub fn poll_counts(&self) -> Option<PollCounts> {
        self.recording.as_ref().map(|recording| recording.poll_counts())
    }

    /// Whether the rank runs and replays.
    pub fn is_replaying(&self) -> bool {
        self.ending.is_none() && self.replay.as_ref().is_some_and(PmiReplay::is_replaying)
    }

    /// Sends the new part of the rank's record to the agent above, ahead of everything that follows
    /// from it. The caller has read the rank's pipes and PMI requests before.
    pub fn send_recording_updates(&self, parent: &mut ParentAgent) {
        if !parent.is_replicated_for_spare() {
            return;
        }
        if let Some(cut) = &self.shared.node_cut {
            return cut.send(0, parent);
        }
        let recording = self.recording.as_ref().filter(|_| self.replay.is_some());
        let updates = recording
            .map_or(Vec::new(), |recording| recording.updates(self.rank, |_| Default::default()));
        for update in updates {
            parent.send(&Message::RecordingUpdate(Box::new(update)));
        }
    }

    /// Lets the rank's process resume, with the descriptors of its record and of the memory that it
    /// shares.
    pub fn resume(&self, number: u64, incarnation: u32, kept: u64) -> Result<()> {
        let (Some(quiesce_socket), Some(recording)) = (&self.quiesce_socket, &self.recording)
        else {
            return Ok(());
        };
        let files: Vec<BorrowedFd> =
            [recording.fd()].into_iter().chain(self.shared.fds()).collect();
        quiesce_socket.resume(number, incarnation, kept, &files)
    }

    /// Takes over the standard input of the last incarnation; the rank reads from byte `at` on.
    pub fn inherit_input(&mut self, old: &mut LocalRank, at: u64) {
        let pipe =
            std::mem::replace(&mut self.streams.input, std::mem::take(&mut old.streams.input));
        self.streams.input.begin(at, pipe);
    }
}

impl StandardStreams {
    pub fn outputs(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.stdout.iter().chain(&self.stderr).map(AsFd::as_fd)
    }

    /// Closes the output pipes; what they still hold is dropped.
    pub fn close_output(&mut self) {
        (self.stdout, self.stderr) = (None, None);
    }

    /// Reads what the rank has printed: a few pieces, or `everything` that the pipes hold.
    pub fn read_output(&mut self, everything: bool, mut take: impl FnMut(Stream, Vec<u8>)) {
        let pieces = if everything { PIECES_OF_A_PIPE } else { PIECES_PER_TURN };
        let streams = [(Stream::Stdout, &mut self.stdout), (Stream::Stderr, &mut self.stderr)];
        for (stream, slot) in streams {
            read_pieces(slot, pieces, |bytes| take(stream, bytes));
        }
    }
}

/// The two ends of the quiesce socket, for the agent and for the rank.
fn quiesce_pair(command: &mut Command) -> Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = socket_pair()?;
    command.env("LANDBRIDGE_QUIESCE_SOCKET", same_length(sys::raw(&theirs)));
    Ok((ours, theirs))
}

/// A pair of sockets, for the agent and for the rank.
fn socket_pair() -> Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair().context("no socket pair")?;
    Ok((ours, sys::out_of_the_way(theirs.into()).into()))
}

/// The quiesce socket of a process that was just started, with the inodes that an image of the
/// process names.
fn new_quiesce_socket(
    quiesce_pair: (UnixStream, UnixStream),
    pmi: &UnixStream,
    child: &Child,
    stderr: &OwnedFd,
) -> Result<QuiesceSocket> {
    let (socket, theirs) = quiesce_pair;
    let missing = || "a rank without standard output";
    let inodes = ExternalInodes {
        stdin: child.stdin.as_ref().map(criu::inode).transpose()?,
        stdout: criu::inode(child.stdout.as_ref().with_context(missing)?)?,
        stderr: criu::inode(stderr)?,
        pmi: criu::inode(pmi)?,
        control: criu::inode(&theirs)?,
    };
    Ok(QuiesceSocket { socket: socket.into(), inodes })
}

/// A pipe: its read end and its write end.
fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("no pipe")
}

/// The program of a rank, with its arguments and environment.
fn command(job: &Job, node: &Node, relay: &str, start: &LaunchSpec, pmi: RawFd) -> Command {
    let &LaunchSpec { task, plan, .. } = start;
    let mut command = Command::new(&plan.program);
    command.args(&task.arguments).current_dir(&task.wdir).env_clear().envs(&plan.environment);
    command.envs(contract_variables(job, node, relay, start));
    command
        .env("PMI_FD", descriptor(start, pmi))
        .env("PMI_RANK", start.rank.to_string())
        .env("PMI_SIZE", start.size.to_string());
    if start.group > 0 {
        command.env("PMI_SPAWNED", "1");
    }
    if let Some(recording) = &start.recording {
        command.envs(recording.variables(&plan.environment));
    }
    if let Some(statistics_page) = &start.shared.statistics_page {
        command
            .env("LANDBRIDGE_STATISTICS_PAGE", descriptor(start, sys::raw(&statistics_page.fd())));
    }
    if let Some(node_logs) = &start.shared.node_logs {
        let files = node_logs.files();
        command.env(NODE_LOGS.variable(), descriptor(start, sys::raw(&files.memory)));
        if let Some(disk) = &files.disk {
            command.env(NODE_LOGS_DISK.variable(), descriptor(start, sys::raw(disk)));
        }
    }
    command
}

/// Process id that a rank gets on each node, if it may move to a spare node: programs pass their
/// ids on, as MPICH's library for files does. `None`: the rank does not move.
pub fn usual_pid(job: &Job, rank: u32) -> Option<u32> {
    let highest = std::fs::read_to_string("/proc/sys/kernel/pid_max");
    let highest = highest.ok().filter(|_| job.has_spares)?.trim().parse::<u32>().ok()?;
    Some(pid_of(&job.id, rank, highest))
}

/// The kernel gives ids in ascending order, so in the upper half few are taken. Jobs begin at
/// different places there.
fn pid_of(job: &str, rank: u32, highest: u32) -> u32 {
    let half = (highest / 2).max(1);
    let begin = (digest(job.as_bytes()) % u64::from(half)) as u32;
    half + (begin + rank % half) % half
}

/// Starts a process, with this process id if the system allows that and the id is free.
/// `wanted_pid`: the wanted id, which the child reads before it executes the program.
fn spawn(
    command: &mut Command,
    pid: Option<u32>,
    wanted_pid: &AtomicU32,
) -> io::Result<(u32, Child)> {
    if let Some(pid) = pid {
        wanted_pid.store(pid, Relaxed);
        if let Ok(between) = command.spawn() {
            // The first child has ended as soon as the second child had the wanted id.
            sys::bury(between.id());
            return Ok((pid, between));
        }
        // A second child that had the id and could not execute the program has ended as well.
        let _ = sys::reap(pid);
    }
    wanted_pid.store(0, Relaxed);
    command.spawn().map(|child| (child.id(), child))
}

fn cannot_start(start: &LaunchSpec) -> String {
    format!("cannot start {} in {}", start.plan.program.display(), start.task.wdir)
}

fn nonblocking(fd: impl Into<OwnedFd>) -> std::io::Result<OwnedFd> {
    let fd = fd.into();
    set_nonblocking(&fd)?;
    Ok(fd)
}

fn read_pieces(slot: &mut Option<OwnedFd>, pieces: usize, mut take: impl FnMut(Vec<u8>)) {
    let mut buffer = [0; PIECE_BYTES_MAX];
    for _ in 0..pieces {
        let Some(fd) = slot else { return };
        match rustix::io::read(fd, &mut buffer) {
            Ok(0) => *slot = None,
            Ok(count) => take(buffer[..count].to_vec()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return,
            Err(_) => *slot = None,
        }
    }
}

/// The number of a descriptor, for the environment of a rank. For a rank that may be restarted the
/// text has the same length every time: the environment lies on the stack, and another length would
/// move everything after it.
fn descriptor(start: &LaunchSpec, number: RawFd) -> String {
    match start.incarnation {
        Some(_) => same_length(number),
        None => number.to_string(),
    }
}

/// Bytes to which names of nodes and addresses are padded in the environment of a rank that may
/// move to another node. Longer names are not cut.
const NAME_BYTES: usize = 64;

/// Variables for the provider inside the rank. `LANDBRIDGE_SIZE` is the number of the job's first
/// processes for all ranks, because both ends of a channel through relays compute their window from
/// this number.
fn contract_variables(
    job: &Job,
    node: &Node,
    relay: &str,
    start: &LaunchSpec,
) -> Vec<(String, String)> {
    let mut variables = vec![
        ("LANDBRIDGE_JOB", job.id.clone()),
        ("LANDBRIDGE_KEY", job.key.clone()),
        ("LANDBRIDGE_INDEX", start.index.to_string()),
        ("LANDBRIDGE_SIZE", job.size.to_string()),
        ("LANDBRIDGE_CLUSTER", node.cluster.to_string()),
    ];
    match start.incarnation {
        // The names have the same length on every node; readers trim them.
        Some(_) => {
            let address = node.address.as_deref().unwrap_or_default();
            variables.push(("LANDBRIDGE_NODE", format!("{:NAME_BYTES$}", node.name)));
            variables.push(("LANDBRIDGE_ADDRESS", format!("{address:NAME_BYTES$}")));
        }
        None => {
            variables.push(("LANDBRIDGE_NODE", node.name.clone()));
            let address = node.address.iter().cloned();
            variables.extend(address.map(|address| ("LANDBRIDGE_ADDRESS", address)));
        }
    }
    let is_left = start.plan.leaves_local_to_library && start.node_processes > 1;
    variables.push(("LANDBRIDGE_LOCAL", if is_left { "library" } else { "own" }.into()));
    match start.incarnation {
        Some(incarnation) => {
            variables.push(("LANDBRIDGE_INCARNATION", same_length(incarnation)));
            variables.push(("LANDBRIDGE_NODE_SIZE", same_length(start.machine_processes)));
        }
        None => variables.push(("LANDBRIDGE_NODE_SIZE", start.machine_processes.to_string())),
    }
    if !relay.is_empty() {
        let unix = node.relay_unix.iter().map(|name| format!("unix:{name}"));
        let ways: Vec<String> = unix.chain([format!("tcp:{relay}")]).collect();
        variables.push(("LANDBRIDGE_RELAY", ways.join(",")));
    }
    variables.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// The agent's end of a rank's `PMI_FD`.
pub struct PmiSocket {
    fd: OwnedFd,
    reader: LineReader,
    unsent: VecDeque<u8>,
    at_end: bool,
}

impl PmiSocket {
    fn new(fd: OwnedFd) -> Result<PmiSocket> {
        set_nonblocking(&fd)?;
        Ok(PmiSocket { fd, reader: LineReader::default(), unsent: VecDeque::new(), at_end: false })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn interest(&self) -> PollFlags {
        match self.unsent.len() {
            0 => PollFlags::IN,
            bytes if bytes < REPLY_BYTES_MAX => PollFlags::IN | PollFlags::OUT,
            _ => PollFlags::OUT,
        }
    }

    pub fn at_end(&self) -> bool {
        self.at_end
    }

    /// Reads the complete lines and blocks that have arrived.
    pub fn read(&mut self) -> Result<Vec<Input>, WireError> {
        let mut lines = Vec::new();
        let mut buffer = [0; PIECE_BYTES_MAX];
        while self.unsent.len() < REPLY_BYTES_MAX && !self.at_end {
            match rustix::io::read(&self.fd, &mut buffer) {
                Ok(0) => self.at_end = true,
                Ok(count) => lines.extend(self.reader.handle_bytes(&buffer[..count])?),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.at_end = true,
            }
        }
        Ok(lines)
    }

    /// Sends a line, as much as the socket takes at once: PMI-1 is a request-reply protocol.
    pub fn send(&mut self, line: &str) {
        self.unsent.extend(line.as_bytes());
        self.flush();
    }

    pub fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match rustix::io::write(&self.fd, self.unsent.as_slices().0) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The rank has ended or has closed its end; the agent handles the end of its
                // process elsewhere.
                Err(_) => return self.unsent.clear(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_rank_of_a_job_has_a_process_id_of_its_own_in_the_upper_half() {
        let of = |job: &str| (0..1000).map(|rank| pid_of(job, rank, 4096)).collect::<BTreeSet<_>>();
        assert_eq!(of("one").len(), 1000);
        assert!(of("one").iter().chain(&of("another")).all(|pid| (2048..4096).contains(pid)));
        assert_ne!(of("one"), of("another"));
    }
}
