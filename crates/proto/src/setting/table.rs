//! The rows of all settings, in the order of `docs/SETTINGS.md`.

// The description of each row is its documentation.
#![allow(missing_docs)]

use super::{Reader, Scope, Setting, SettingKind};

const MS: u64 = 1_000;
const S: u64 = 1_000 * MS;
const H: u64 = 3600 * S;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

pub const LOG: Setting = Setting {
    name: "log",
    default: "off",
    unit: "off, warn, info, debug or trace",
    kind: SettingKind::Choice(&["off", "warn", "info", "debug", "trace"]),
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Level of the provider's messages on standard error, in addition to libfabric's \
               own log. `landbridge run` sets `warn` if neither this setting nor `FI_LOG_LEVEL` is \
               set.",
};
pub const PATHS: Setting = Setting {
    name: "paths",
    default: "shm,tcp,relay",
    unit: "list of shm, tcp, relay",
    kind: SettingKind::Choices(&["shm", "tcp", "relay"]),
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Kinds of paths to a peer that may be used. With `local=library` the MPI library \
               carries messages between ranks of one node, and this setting does not affect them.",
};
pub const LOCAL: Setting = Setting {
    name: "local",
    default: "auto",
    unit: "auto, own or library",
    kind: SettingKind::Choice(&["auto", "own", "library"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Launcher],
    description: "Transport between ranks of one node. `library`: the shared memory of the MPI \
               library. Ranks can then share windows (`MPI_Win_allocate_shared`), and a waiting \
               rank polls without sleeping, as under the library's own launcher. `own`: the \
               provider, which `--recover` needs. `auto`: the library, if every rank has a core of \
               its own and `paths` is not set.",
};
pub const UDP: Setting = Setting {
    name: "udp",
    default: "off",
    unit: "off or on",
    kind: SettingKind::Choice(&["off", "on"]),
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Whether direct paths between hosts use UDP where UDP packets arrive. TCP paths \
               remain, for hosts that UDP does not reach.",
};
pub const CONGESTION: Setting = Setting {
    name: "congestion",
    default: "bbr",
    unit: "cubic or bbr",
    kind: SettingKind::Choice(&["cubic", "bbr"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "Congestion control of UDP paths, also between relays. CUBIC treats every lost \
               packet as a sign of a full queue.",
};
pub const RAILS: Setting = Setting {
    name: "rails",
    default: "auto",
    unit: "auto, or list of addresses and prefixes",
    kind: SettingKind::Networks,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Local addresses that direct paths may use, such as `10.1.0.0/16,fd00::/8`. \
               `auto`: all on which the peer answers.",
};
pub const RAILS_EXCLUDE: Setting = Setting {
    name: "rails_exclude",
    default: "",
    unit: "list of addresses and prefixes",
    kind: SettingKind::Networks,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Local addresses that direct paths may not use, although `rails` allows them. \
               Interfaces that reach no peer need not be listed: no path is used before the peer \
               has answered on it.",
};
pub const PEER_TIMEOUT: Setting = Setting {
    name: "peer_timeout",
    default: "60s",
    unit: "time, 100ms to 24h",
    kind: SettingKind::Time { min_us: 100 * MS, max_us: 24 * H },
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "Longest time for which a process waits while no path to a peer works; then MPI \
               reports an error.",
};
pub const SUSPECT_AFTER: Setting = Setting {
    name: "suspect_after",
    default: "100ms",
    unit: "time, 1ms to 1min",
    kind: SettingKind::Time { min_us: MS, max_us: 60 * S },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "If a path has not acknowledged data for half of this time while another path to \
               the same peer works, other paths carry its data; after the whole time the path is \
               closed. Both limits allow for four round trips of the path.",
};
pub const REDIAL_MAX: Setting = Setting {
    name: "redial_max",
    default: "2s",
    unit: "time, 10ms to 1h",
    kind: SettingKind::Time { min_us: 10 * MS, max_us: H },
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "Longest pause between attempts to restore a broken path. The first pauses are \
               shorter; each is twice as long as the one before.",
};
pub const INTEGRITY: Setting = Setting {
    name: "integrity",
    default: "crc32c",
    unit: "crc32c, sum or off",
    kind: SettingKind::Choice(&["crc32c", "sum", "off"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "End-to-end checksum of payload on network paths, from memory to memory: CRC-32C, \
               a 32-bit sum, or none. With `recover`, `sum` means CRC-32C. Unless the value is \
               `off`, a relay disconnects a rank that sends a frame without a valid checksum.",
};
pub const INTEGRITY_SHM: Setting = Setting {
    name: "integrity_shm",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Whether frames between ranks through shared memory have checksums too.",
};
pub const OWN_CORE: Setting = Setting {
    name: "own_core",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Whether a waiting thread that shares its core, although the node has a core for \
               each rank, moves to a core of its own: the number of the rank modulo the cores of \
               its affinity mask. The mask stays as it was, so the kernel may move the thread \
               again.",
};
pub const RETAIN: Setting = Setting {
    name: "retain",
    default: "64MiB",
    unit: "size, 1MiB to 1024GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Memory of a process for copies of payload that peers have not acknowledged, over \
               all peers. Beyond this size nothing is copied, and sends complete when they are \
               acknowledged.",
};
pub const COPY_MAX: Setting = Setting {
    name: "copy_max",
    default: "16KiB",
    unit: "size, 0B to 1MiB",
    kind: SettingKind::Size { min: 0, max: MIB },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Messages up to this size are copied for retransmission, so the application may \
               reuse its buffer at once; larger messages stay in the application's memory until \
               the peer has acknowledged them.",
};
pub const WAN_STREAMS: Setting = Setting {
    name: "wan_streams",
    default: "1",
    unit: "number, 1 to 64",
    kind: SettingKind::Count { min: 1, max: 64 },
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "Number of parallel streams between two relays.",
};
pub const WAN_UDP: Setting = Setting {
    name: "wan_udp",
    default: "off",
    unit: "off or on",
    kind: SettingKind::Choice(&["off", "on"]),
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "Whether relays talk to each other over UDP (QUIC) where UDP packets arrive, at \
               the port of `wan_listen`; elsewhere they use TCP.",
};

pub const RECOVER: Setting = Setting {
    name: "recover",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay, Reader::Launcher],
    description: "Whether messages are logged, so that a killed process can be restarted.",
};
pub const RECOVER_CLOCKS: Setting = Setting {
    name: "recover_clocks",
    default: "on",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Launcher],
    description: "With `recover`: whether the clock readings and random numbers of a process are \
               recorded, so that its next incarnation reads the same values.",
};
pub const RECOVER_FILES: Setting = Setting {
    name: "recover_files",
    default: "on",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "With `recover_clocks`: whether calls on files are recorded, so that a restarted \
               process repeats none of them. `off` is safe only if nobody reads the program's \
               files while it runs.",
};
pub const CHECKPOINT: Setting = Setting {
    name: "checkpoint",
    default: "0s",
    unit: "time, at most 24h; 0s: never",
    kind: SettingKind::Time { min_us: 0, max_us: 24 * H },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "With `recover`: interval between two checkpoints of each rank. A killed rank \
               restarts from its newest checkpoint.",
};
pub const CHECKPOINT_DIR: Setting = Setting {
    name: "checkpoint_dir",
    default: "auto",
    unit: "absolute path, or s3://BUCKET/PREFIX",
    kind: SettingKind::Folder(&["auto", "s3://"]),
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Directory of the checkpoints on each node. `auto`: `checkpoints` in \
               `/tmp/landbridge-UID`. `s3://BUCKET/PREFIX`: the directory of `auto`, and this \
               object store in addition.",
};
pub const CHECKPOINT_OPEN: Setting = Setting {
    name: "checkpoint_open",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Whether the object store may have an `http://` endpoint on another machine. \
               Every machine between can then read the checkpoints, which contain the memory of \
               the ranks and the job's key.",
};
pub const CHECKPOINT_LOG: Setting = Setting {
    name: "checkpoint_log",
    default: "1GiB",
    unit: "size, 0B to 1024GiB",
    kind: SettingKind::Size { min: 0, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Launcher, Reader::Relay],
    description: "With `checkpoint` and `recover_log=relay`: if the log of a process has grown by \
               this size since its last checkpoint, the next checkpoint is taken early. `0B`: \
               never early. Logs of senders ask for checkpoints at half of their memory.",
};
pub const CHECKPOINT_SPACE: Setting = Setting {
    name: "checkpoint_space",
    default: "64GiB",
    unit: "size, 1MiB to 1048576GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Most space of all checkpoints on each node, including the one that is being \
               taken. A checkpoint that has no room is not taken.",
};
pub const CHECKPOINT_LEVEL: Setting = Setting {
    name: "checkpoint_level",
    default: "1",
    unit: "0 to 19",
    kind: SettingKind::Count { min: 0, max: 19 },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Compression level of checkpoints (Zstandard). A checkpoint is compressed after \
               the process has continued. 0: not compressed.",
};
pub const CRIU: Setting = Setting {
    name: "criu",
    default: "criu",
    unit: "file",
    kind: SettingKind::Text,
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "The program that takes checkpoints of processes: CRIU 4 or newer.",
};
pub const RECOVER_LOG: Setting = Setting {
    name: "recover_log",
    default: "auto",
    unit: "auto, sender or relay",
    kind: SettingKind::Choice(&["auto", "sender", "relay"]),
    scope: Scope::Job,
    readers: &[Reader::Launcher, Reader::Relay],
    description: "With `recover`: who logs messages for ranks that may be restarted. `sender`: \
               messages between ranks of one node stay in shared memory, where the receiver reads \
               them; messages to another node stay on both nodes, and take the paths of a job \
               without `recover`. It works with at most 1,024 processes of a job, spawned ones \
               among them, and with spare nodes only if clocks are recorded. `relay`: the relay of \
               the receiver, through which all messages go. `auto`: `sender` for at most 512 \
               ranks without a limit of address space or of files (`ulimit -v`, `ulimit -f`) \
               where the launcher runs, with spare nodes if clocks are recorded, else `relay`.",
};
pub const RECOVER_UNIT: Setting = Setting {
    name: "recover_unit",
    default: "process",
    unit: "process or node",
    kind: SettingKind::Choice(&["process", "node"]),
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "With `recover`: what begins again if a rank is killed. `process`: it alone. \
               `node`: all ranks of its node, also those that have ended; then messages inside of \
               a node are kept only until they are read, and memory for them stays small. Ranks \
               of other nodes see nothing of it in either case. `node` needs `recover_log=sender` \
               (which `auto` then chooses) and goes without spare nodes.",
};
pub const RECOVER_MEMORY: Setting = Setting {
    name: "recover_memory",
    default: "4GiB",
    unit: "size, 1MiB to 1024GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Relay, Reader::Process],
    description: "With `recover`: memory of each node for message logs, in equal shares for its \
               ranks; by default no more than a quarter of what the node has (its memory, or the \
               limit of a control group). With `recover_log=relay`: memory of each relay, with \
               `recover_dir` at least 8 MiB for each process of the relay.",
};
pub const RECOVER_DIR: Setting = Setting {
    name: "recover_dir",
    default: "off",
    unit: "absolute path",
    kind: SettingKind::Folder(&["off"]),
    scope: Scope::Job,
    readers: &[Reader::Launcher, Reader::Relay],
    description: "With `recover`: directory in which message logs go on beyond `recover_memory`, \
               in an unnamed file of each node, or of each relay, that vanishes with the job. \
               `off`: a process whose log is too large cannot be restarted before its next \
               checkpoint.",
};
pub const RECOVER_DISK: Setting = Setting {
    name: "recover_disk",
    default: "64GiB",
    unit: "size, 1MiB to 1048576GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Launcher, Reader::Relay],
    description: "With `recover_dir`: most space that the logs of each node, or each relay, use \
               there.",
};

// --- settings of the launcher

pub const TOPOLOGY: Setting = Setting {
    name: "topology",
    default: "none",
    unit: "file",
    kind: SettingKind::Text,
    scope: Scope::Launcher,
    readers: &[Reader::Launcher],
    description: "Clusters, hosts and relays of the job; the same as `landbridge run --topology`.",
};
pub const SETTINGS_FILE: Setting = Setting {
    name: "settings",
    default: "the first of the usual places",
    unit: "file",
    kind: SettingKind::Text,
    scope: Scope::Launcher,
    readers: &[Reader::Launcher],
    description: "The settings file; the same as `--settings`.",
};

// --- settings of each process

pub const JOB: Setting = Setting {
    name: "job",
    default: "derived from the user",
    unit: "32 hex digits",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The job this process belongs to.",
};
pub const KEY: Setting = Setting {
    name: "key",
    default: "from a key file of the user",
    unit: "64 hex digits",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The secret with which the processes of a job authenticate each other.",
};
pub const INDEX: Setting = Setting {
    name: "index",
    default: "none",
    unit: "number",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The process's index in the job (its MPI rank).",
};
pub const SIZE: Setting = Setting {
    name: "size",
    default: "from OMPI_COMM_WORLD_SIZE, PMI_SIZE or SLURM_STEP_NUM_TASKS, else 1",
    unit: "processes",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Number of processes of the job.",
};
pub const INCARNATION: Setting = Setting {
    name: "incarnation",
    default: "0",
    unit: "number",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Number of earlier starts of this process.",
};
pub const CLUSTER: Setting = Setting {
    name: "cluster",
    default: "0",
    unit: "number",
    kind: SettingKind::Count { min: 0, max: u16::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The cluster this process runs in.",
};
pub const NODE: Setting = Setting {
    name: "node",
    default: "empty",
    unit: "text",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Name of the node of this process. Processes may share memory only if their names \
               are equal.",
};
pub const NODE_SIZE: Setting = Setting {
    name: "node_size",
    default: "from MPI_LOCALNRANKS, OMPI_COMM_WORLD_LOCAL_SIZE or PMI_LOCAL_SIZE, else all \
               processes of the job",
    unit: "processes",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Number of processes that share this node's processors.",
};
pub const ADDRESS: Setting = Setting {
    name: "address",
    default: "picked from the interfaces",
    unit: "IP address",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Address at which this process accepts direct connections from its own cluster: \
               `address` of its host in the topology.",
};
pub const RELAY: Setting = Setting {
    name: "relay",
    default: "none",
    unit: "list of unix:@NAME and tcp:HOST:PORT",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Addresses of this cluster's relay, best first.",
};
pub const STATISTICS_PAGE: Setting = Setting {
    name: "statistics_page",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Shared memory into which this process writes the state of its paths for \
               `landbridge ps --paths`.",
};
pub const NODE_LOGS: Setting = Setting {
    name: "node_logs",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Memory file with the message logs of this node's processes, with \
               `recover_log=sender`.",
};
pub const NODE_LOGS_DISK: Setting = Setting {
    name: "node_logs_disk",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "File in `recover_dir` in which the message logs of this node's processes go on \
               when memory is full, with `recover_log=sender`.",
};
pub const QUIESCE_SOCKET: Setting = Setting {
    name: "quiesce_socket",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Socket by which this process reports that it is ready for a checkpoint, and \
               learns that it may continue.",
};

/// Every row, in the order of listings.
pub const SETTINGS: &[&Setting] = &[
    &LOG,
    &PATHS,
    &LOCAL,
    &UDP,
    &CONGESTION,
    &RAILS,
    &RAILS_EXCLUDE,
    &PEER_TIMEOUT,
    &SUSPECT_AFTER,
    &REDIAL_MAX,
    &INTEGRITY,
    &INTEGRITY_SHM,
    &OWN_CORE,
    &RETAIN,
    &COPY_MAX,
    &WAN_STREAMS,
    &WAN_UDP,
    &RECOVER,
    &RECOVER_CLOCKS,
    &RECOVER_FILES,
    &CHECKPOINT,
    &CHECKPOINT_DIR,
    &CHECKPOINT_OPEN,
    &CHECKPOINT_LOG,
    &CHECKPOINT_SPACE,
    &CHECKPOINT_LEVEL,
    &CRIU,
    &RECOVER_LOG,
    &RECOVER_UNIT,
    &RECOVER_MEMORY,
    &RECOVER_DIR,
    &RECOVER_DISK,
    &TOPOLOGY,
    &SETTINGS_FILE,
    &JOB,
    &KEY,
    &INDEX,
    &SIZE,
    &INCARNATION,
    &CLUSTER,
    &NODE,
    &NODE_SIZE,
    &ADDRESS,
    &RELAY,
    &STATISTICS_PAGE,
    &NODE_LOGS,
    &NODE_LOGS_DISK,
    &QUIESCE_SOCKET,
];
