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
    description: "What the provider writes to standard error, beside libfabric's own log. \
               `landbridge run` takes `warn` where nothing is said and `FI_LOG_LEVEL` is not set.",
};
pub const PATHS: Setting = Setting {
    name: "paths",
    default: "shm,tcp,relay",
    unit: "list of shm, tcp, relay",
    kind: SettingKind::Choices(&["shm", "tcp", "relay"]),
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "The ways to a peer that may be used. With `local=library` the setting does not \
               hold between ranks of one node, whose messages the MPI library carries.",
};
pub const LOCAL: Setting = Setting {
    name: "local",
    default: "auto",
    unit: "auto, own or library",
    kind: SettingKind::Choice(&["auto", "own", "library"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Launcher],
    description: "Who carries messages between ranks of one node. `library`: the shared memory of \
               the MPI library; only with it do these ranks share windows \
               (`MPI_Win_allocate_shared`). Ranks that wait then look without sleeping, as under \
               the library's own launcher. `own`: the provider, which `--recover` needs. `auto`: \
               the library, if every rank has a core of its own and `paths` is not set.",
};
pub const UDP: Setting = Setting {
    name: "udp",
    default: "off",
    unit: "off or on",
    kind: SettingKind::Choice(&["off", "on"]),
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Whether direct paths between hosts go over UDP where that gets through. TCP stays beside \
               it, for where it does not.",
};
pub const CONGESTION: Setting = Setting {
    name: "congestion",
    default: "bbr",
    unit: "cubic or bbr",
    kind: SettingKind::Choice(&["cubic", "bbr"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "What decides how fast a UDP path sends. CUBIC takes every lost packet for a full queue.",
};
pub const RAILS: Setting = Setting {
    name: "rails",
    default: "auto",
    unit: "auto, or list of addresses and prefixes",
    kind: SettingKind::Networks,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "The local addresses that direct paths may use, such as `10.1.0.0/16,fd00::/8`. \
               `auto`: all on which the peer answers.",
};
pub const RAILS_EXCLUDE: Setting = Setting {
    name: "rails_exclude",
    default: "",
    unit: "list of addresses and prefixes",
    kind: SettingKind::Networks,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Local addresses that direct paths may not use even so. Interfaces that lead nowhere \
               need not be named: paths are found by trying.",
};
pub const PEER_TIMEOUT: Setting = Setting {
    name: "peer_timeout",
    default: "60s",
    unit: "time, 100ms to 24h",
    kind: SettingKind::Time { min_us: 100 * MS, max_us: 24 * H },
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "How long a process waits while every path to a peer is down, before MPI fails.",
};
pub const SUSPECT_AFTER: Setting = Setting {
    name: "suspect_after",
    default: "100ms",
    unit: "time, 1ms to 1min",
    kind: SettingKind::Time { min_us: MS, max_us: 60 * S },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "A path that confirms nothing for this long, while others go on, is taken for broken \
               and its bytes go elsewhere. Never less than a few of its own round trips.",
};
pub const REDIAL_MAX: Setting = Setting {
    name: "redial_max",
    default: "2s",
    unit: "time, 10ms to 1h",
    kind: SettingKind::Time { min_us: 10 * MS, max_us: H },
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "The longest pause between attempts to bring a broken path back. The first pauses \
               are shorter.",
};
pub const INTEGRITY: Setting = Setting {
    name: "integrity",
    default: "crc32c",
    unit: "crc32c, sum or off",
    kind: SettingKind::Choice(&["crc32c", "sum", "off"]),
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay],
    description: "The end-to-end check of payload on network paths, from memory to memory: CRC-32C, a \
               32-bit sum, or none. With `recover` a sum is CRC-32C as well. Relays refuse frames of \
               ranks without it.",
};
pub const INTEGRITY_SHM: Setting = Setting {
    name: "integrity_shm",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Whether frames through shared memory are checked too.",
};
pub const RETAIN: Setting = Setting {
    name: "retain",
    default: "64MiB",
    unit: "size, 1MiB to 1024GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Memory that a process keeps for copies its peers have not confirmed, over all peers. Beyond it nothing is copied: sends end when they are confirmed.",
};
pub const COPY_MAX: Setting = Setting {
    name: "copy_max",
    default: "16KiB",
    unit: "size, 0B to 1MiB",
    kind: SettingKind::Size { min: 0, max: MIB },
    scope: Scope::Job,
    readers: &[Reader::Process],
    description: "Messages up to this size are copied to be sent again; larger ones stay in the \
               application's memory until they are confirmed.",
};
pub const WAN_STREAMS: Setting = Setting {
    name: "wan_streams",
    default: "1",
    unit: "number, 1 to 64",
    kind: SettingKind::Count { min: 1, max: 64 },
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "Parallel streams between two relays.",
};
pub const WAN_UDP: Setting = Setting {
    name: "wan_udp",
    default: "off",
    unit: "off or on",
    kind: SettingKind::Choice(&["off", "on"]),
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "Whether relays talk to each other over UDP (QUIC) where that gets through, at the port of `wan_listen`. \
               Where it does not they use TCP.",
};

pub const RECOVER: Setting = Setting {
    name: "recover",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Relay, Reader::Launcher],
    description: "Whether relays keep what a killed process needs to come back.",
};
pub const RECOVER_CLOCKS: Setting = Setting {
    name: "recover_clocks",
    default: "on",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Process, Reader::Launcher],
    description: "With `recover`: whether what a process reads of clocks and chance is recorded, so that a new start of it \
               reads the same.",
};
pub const RECOVER_FILES: Setting = Setting {
    name: "recover_files",
    default: "on",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "With `recover_clocks`: whether what a process does with files is recorded, so that a restarted process does \
               none of it twice. Off is right only for a program whose files nobody reads while it runs.",
};
pub const CHECKPOINT: Setting = Setting {
    name: "checkpoint",
    default: "0s",
    unit: "time; 0s: never",
    kind: SettingKind::Time { min_us: 0, max_us: 24 * H },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "With `recover`: how often a checkpoint of each rank is taken, from which the rank goes on if it is killed.",
};
pub const CHECKPOINT_DIR: Setting = Setting {
    name: "checkpoint_dir",
    default: "auto",
    unit: "absolute path, or store",
    kind: SettingKind::Folder(&["auto", "s3://"]),
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Where these checkpoints are kept, on each node, or `s3://BUCKET/PREFIX`: in that object store as well. `auto`: \
               `checkpoints` in `/tmp/landbridge-UID`.",
};
pub const CHECKPOINT_OPEN: Setting = Setting {
    name: "checkpoint_open",
    default: "off",
    unit: "on or off",
    kind: SettingKind::Switch,
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Whether a store may have an `http://` endpoint that is not on this machine: all machines on the way can then read the checkpoints, which are memory of the ranks and hold the job's key.",
};
pub const CHECKPOINT_LOG: Setting = Setting {
    name: "checkpoint_log",
    default: "1GiB",
    unit: "size, 0B to 1024GiB",
    kind: SettingKind::Size { min: 0, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Launcher, Reader::Relay],
    description: "With `checkpoint`: a process to which so much was given since its last checkpoint gets another one before its time; `0B`: however much it is, none does.",
};
pub const CHECKPOINT_SPACE: Setting = Setting {
    name: "checkpoint_space",
    default: "64GiB",
    unit: "size, 1MiB to 1048576GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "Most that these checkpoints take on each node, with the one that is being taken. One that has no room is not taken.",
};
pub const CHECKPOINT_LEVEL: Setting = Setting {
    name: "checkpoint_level",
    default: "1",
    unit: "0 to 19",
    kind: SettingKind::Count { min: 0, max: 19 },
    scope: Scope::Job,
    readers: &[Reader::Launcher],
    description: "How much these checkpoints are compressed (Zstandard), after the process has gone on. 0: not at all.",
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
pub const RECOVER_MEMORY: Setting = Setting {
    name: "recover_memory",
    default: "4GiB",
    unit: "size, 1MiB to 1024GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "With `recover`: memory that each relay takes for what it keeps. With `recover_dir` it is 8 MiB for each of its \
               processes at least.",
};
pub const RECOVER_DIR: Setting = Setting {
    name: "recover_dir",
    default: "off",
    unit: "absolute path",
    kind: SettingKind::Folder(&["off"]),
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "With `recover`: where each relay lays what is more than `recover_memory`, in a file without a name that is gone \
               when the relay is. Without it a process that needs more can come back no longer.",
};
pub const RECOVER_DISK: Setting = Setting {
    name: "recover_disk",
    default: "64GiB",
    unit: "size, 1MiB to 1048576GiB",
    kind: SettingKind::Size { min: MIB, max: 1024 * 1024 * GIB },
    scope: Scope::Job,
    readers: &[Reader::Relay],
    description: "With `recover_dir`: most that each relay lays there.",
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
    description: "The secret by which the processes of a job know each other.",
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
    default: "as other launchers say",
    unit: "processes",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "How many processes the job has.",
};
pub const INCARNATION: Setting = Setting {
    name: "incarnation",
    default: "0",
    unit: "number",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "How often this process has been started before.",
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
    description: "The node this process runs on; equal names may share memory.",
};
pub const NODE_SIZE: Setting = Setting {
    name: "node_size",
    default: "as other launchers say, or all processes of the job",
    unit: "processes",
    kind: SettingKind::Count { min: 0, max: u32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "How many processes share this node's processors.",
};
pub const ADDRESS: Setting = Setting {
    name: "address",
    default: "picked from the interfaces",
    unit: "IP address",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Where this process accepts direct connections from its own cluster: `address` of \
               its host in the topology.",
};
pub const RELAY: Setting = Setting {
    name: "relay",
    default: "none",
    unit: "list of unix:@NAME and tcp:HOST:PORT",
    kind: SettingKind::Text,
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "Ways to this cluster's relay, best first.",
};
pub const STATISTICS_PAGE: Setting = Setting {
    name: "statistics_page",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The shared memory on which this process says how its paths are when `landbridge ps --paths` asks.",
};
pub const QUIESCE_SOCKET: Setting = Setting {
    name: "quiesce_socket",
    default: "none",
    unit: "descriptor",
    kind: SettingKind::Count { min: 3, max: i32::MAX as u64 },
    scope: Scope::Process,
    readers: &[Reader::Process],
    description: "The socket over which this process says that a checkpoint of it can be taken, and hears that it may go on.",
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
    &QUIESCE_SOCKET,
];
