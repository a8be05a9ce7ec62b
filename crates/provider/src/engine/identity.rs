//! Identity of this process, from the environment that the launcher sets, or from
//! defaults.
//!
//! Without the Landbridge launcher a process belongs to the *user's job*: all processes of one user
//! share one key, kept in a file that only the user can read.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::limit;
use landbridge_proto::setting::Network;
use landbridge_proto::wire::name::FURTHER_MAX;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::path_settings::PathSettings;
use crate::interposer::UnrecordedCalls;
use crate::param;

/// What all endpoints of the process have in common.
pub struct Identity {
    pub job: JobId,
    pub key: JobKey,
    pub index: Option<u32>,
    /// Number of processes in the job; 1 if unknown.
    pub size: u32,
    pub cluster: ClusterId,
    pub node: u64,
    pub ip: IpAddr,
    pub relays: Vec<RelayAddress>,
    pub settings: PathSettings,
    pub node_sharing: NodeSharing,
    /// This node's addresses for direct paths.
    pub rails: Vec<IpAddr>,
    /// This process may be restarted after a failure: all frames go through the relay, and are
    /// recorded there.
    pub recovers: bool,
    /// Number of earlier starts of this process.
    pub incarnation: u32,
    /// The memory file with the logs of this node's processes, if these record messages themselves.
    node_logs: Option<Mutex<Vec<OwnedFd>>>,
}

/// How the processes of this node share its cores and carry their messages.
pub struct NodeSharing {
    /// Number of processes on this node, if known.
    pub processes: Option<u32>,
    /// The MPI library carries the messages to other processes of this node. The provider sees
    /// nothing of these messages, so polls without result say nothing about them.
    pub library_carries_local: bool,
    /// Number of the core to which a waiting thread moves that shares its core, modulo the number
    /// of cores: the rank, which other processes of this node do not have. None: threads stay.
    pub placement_index: Option<u32>,
}

/// An address of this cluster's relay.
#[derive(Clone, Debug)]
pub enum RelayAddress {
    /// Name of an abstract Unix socket, over which shared memory is set up.
    Unix(String),
    Tcp(SocketAddr),
}

/// A transport copies messages up to this many bytes for retransmission: a frame of the greatest
/// length is one. The peer would acknowledge each longer one by a packet of its own, which takes
/// longer than the copy.
const TRANSPORT_COPY_BYTES: u32 = 72 << 10;

static IDENTITY: OnceLock<Result<Identity, String>> = OnceLock::new();
static TRANSPORT: OnceLock<Result<Identity, String>> = OnceLock::new();
static ENDPOINTS: AtomicU32 = AtomicU32::new(0);

impl Identity {
    /// This process's identity, read from the environment once.
    pub fn current() -> Result<&'static Identity, &'static str> {
        let read = || Identity::read(param::RECOVER.is_on()?);
        IDENTITY.get_or_init(read).as_ref().map_err(String::as_str)
    }

    /// The identity of the transport of a recorded process: as of a process that is not recorded,
    /// without shared memory.
    pub fn of_transport() -> Result<&'static Identity, &'static str> {
        let read = || {
            let mut identity = Identity::read(false)?;
            identity.settings.kinds.shm = false;
            let copy_max = &mut identity.settings.copy_max;
            *copy_max = (*copy_max).max(TRANSPORT_COPY_BYTES);
            Ok(identity)
        };
        TRANSPORT.get_or_init(read).as_ref().map_err(String::as_str)
    }

    fn read(recovers: bool) -> Result<Identity, String> {
        let number = |knob: &param::Knob| knob.number();
        let (job, key) = job_and_key()?;
        let index = number(&param::INDEX)?.map(|index| index as u32);
        if index.is_some_and(|index| index > Address::INDEX_MAX) {
            return Err(format!("LANDBRIDGE_INDEX must be at most {}", Address::INDEX_MAX));
        }
        let of_other_launchers = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
        let size = number(&param::SIZE)?.or_else(|| number_in_any(&of_other_launchers));
        let relays = relays()?;
        Ok(Identity {
            job,
            key,
            index,
            size: size.unwrap_or(1).clamp(1, u32::MAX as u64) as u32,
            cluster: ClusterId(number(&param::CLUSTER)?.unwrap_or(0) as u16),
            // For a recorded process the node and the address are constants, because the next
            // incarnation may run elsewhere and must have the same name.
            node: if recovers { 0 } else { node() },
            ip: if recovers { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { own_ip(&relays)? },
            relays,
            settings: PathSettings::read(recovers)?,
            node_sharing: NodeSharing {
                processes: local_size()?,
                library_carries_local: library_carries_local()?,
                placement_index: placement_index(index)?,
            },
            rails: rails()?,
            recovers,
            incarnation: number(&param::INCARNATION)?.unwrap_or(0) as u32,
            node_logs: node_logs(recovers)?,
        })
    }

    /// Bytes of retained copies beyond which nothing more is copied. Logs of the node take each
    /// frame at once; the copies of the transport, which are counted as well, must not decide what
    /// is sent.
    pub fn retain(&self) -> u64 {
        if self.has_node_logs() { u64::MAX } else { self.settings.retain }
    }

    /// Whether the processes of this node record messages themselves, in logs of the node.
    pub fn has_node_logs(&self) -> bool {
        self.node_logs.is_some()
    }

    /// The files with these logs, once: the caller closes them, because an image of this process
    /// must not contain them.
    pub fn take_node_logs(&self) -> Vec<OwnedFd> {
        let files = self.node_logs.as_ref();
        let files = files.map(|files| files.lock().unwrap_or_else(PoisonError::into_inner));
        files.map(|mut files| std::mem::take(&mut *files)).unwrap_or_default()
    }

    /// The address and unique number of the next endpoint of this process.
    pub fn next_endpoint(&self) -> (Address, u64) {
        let number = ENDPOINTS.fetch_add(1, Ordering::Relaxed);
        match self.index {
            // The numbers are the same in every run, so that the data which MPI libraries exchange
            // is reproducible.
            Some(index) if number < 256 => self.endpoint(Address::new(index, number as u8)),
            _ => (Address::ANONYMOUS, u64::from_le_bytes(random())),
        }
    }

    /// An address of this process, with the unique number of an endpoint there.
    pub fn endpoint(&self, address: Address) -> (Address, u64) {
        (address, hash(&[&self.job.0, &address.0.to_le_bytes()]))
    }

    /// The node's further addresses besides [`Identity::ip`], at most [`FURTHER_MAX`]. A node that
    /// is known by its loopback address has none.
    pub fn further(&self) -> [[u8; 4]; FURTHER_MAX] {
        let mut further = [[0; 4]; FURTHER_MAX];
        let others = self.rails.iter().filter(|&&ip| ip != self.ip && !self.ip.is_loopback());
        for (place, ip) in further.iter_mut().zip(others) {
            if let IpAddr::V4(ip) = ip {
                *place = ip.octets();
            }
        }
        further
    }

    /// Whether `ip` may be a further address of another node: the address must be allowed, and must
    /// not be an address of this node as well (bridges of containers have the same address on every
    /// host).
    pub fn is_further_elsewhere(&self, ip: IpAddr) -> bool {
        self.settings.rail_networks.iter().any(|network| network.contains(ip))
            && ip != self.ip
            && !self.rails.contains(&ip)
    }

    /// Whether the relay is on this node.
    pub fn has_local_relay(&self) -> bool {
        self.relays.iter().any(|way| matches!(way, RelayAddress::Unix(_)))
    }

    /// Bytes of eager credit between any two endpoints of the job.
    pub fn eager_window(&self) -> u32 {
        limit::eager_window(self.size)
    }
}

/// Random bytes from the system.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let (rest, length) = (bytes[filled..].as_mut_ptr(), N - filled);
        // The C library's function may map memory at its first call (glibc 2.41), in the midst of
        // the program's mappings.
        // SAFETY: the rest of the array may be written.
        let got = unsafe { libc::syscall(libc::SYS_getrandom, rest, length, 0) };
        filled += usize::try_from(got).unwrap_or(0);
    }
    bytes
}

fn job_and_key() -> Result<(JobId, JobKey), String> {
    let (job, key) = (param::JOB.text(), param::KEY.text());
    if job.is_some() != key.is_some() {
        return Err("LANDBRIDGE_JOB and LANDBRIDGE_KEY belong together, and one is not set".into());
    }
    let (Some(job), Some(key)) = (job, key) else {
        // SAFETY: getuid cannot fail.
        let uid = unsafe { libc::getuid() };
        let mut job = *b"landbridge-user\0";
        job[12..16].copy_from_slice(&uid.to_le_bytes());
        return Ok((JobId(job), user_key(uid)?));
    };
    let job = JobId::from_hex(&job).ok_or("LANDBRIDGE_JOB must be 32 hexadecimal digits")?;
    let key = JobKey::from_hex(&key).ok_or("LANDBRIDGE_KEY must be 64 hexadecimal digits")?;
    Ok((job, key))
}

/// The key that all processes of a user share, read from a file of the user. The first process
/// writes the file.
fn user_key(uid: u32) -> Result<JobKey, String> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
    let folder = match runtime {
        Some(runtime) => runtime.join("landbridge"),
        None => PathBuf::from(format!("/tmp/landbridge-{uid}")),
    };
    let file = folder.join("key");
    let explain = |error: io::Error| {
        let file = file.display();
        format!(
            "the key file {file} cannot be used ({error}); set LANDBRIDGE_JOB and LANDBRIDGE_KEY instead"
        )
    };
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(explain(error)),
        _ => check_private(&folder, uid).map_err(explain)?,
    }
    make_key(&folder, &file).map_err(explain)?;
    check_private(&file, uid).map_err(explain)?;
    let mut key = [0; 32];
    fs::File::open(&file).and_then(|mut file| file.read_exact(&mut key)).map_err(explain)?;
    Ok(JobKey(key))
}

/// Writes a new key file unless there is one. The key is written under another name first, so that
/// no process reads half a key.
fn make_key(folder: &std::path::Path, file: &std::path::Path) -> io::Result<()> {
    if file.exists() {
        return Ok(());
    }
    let draft = folder.join(format!("key.{}", std::process::id()));
    let mut out =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    out.write_all(&random::<32>())?;
    let linked = fs::hard_link(&draft, file);
    fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn check_private(path: &std::path::Path, uid: u32) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if meta.uid() != uid || meta.mode() & 0o077 != 0 || meta.file_type().is_symlink() {
        return Err(io::Error::other("others may reach it"));
    }
    Ok(())
}

/// Hash that is equal for processes that can share memory: one boot, one network namespace (where
/// abstract sockets live), one node name.
fn node() -> u64 {
    let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let net = fs::metadata("/proc/self/ns/net").map_or(0, |meta| meta.ino());
    let name = param::NODE.text().unwrap_or_default();
    hash(&[&boot, &net.to_le_bytes(), name.trim_end().as_bytes()])
}

/// FNV-1a with 64 bits: for names, not for secrets.
pub fn hash(parts: &[&[u8]]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    for byte in parts.iter().flat_map(|part| part.iter().chain(&[0xff])) {
        state = (state ^ *byte as u64).wrapping_mul(0x0000_0100_0000_01b3);
    }
    state
}

/// The address of this node that peers dial first: the configured address, else the local address
/// of the connection to the relay, else the address of the first interface that is up. Peers try
/// the further addresses when this address does not answer.
fn own_ip(relays: &[RelayAddress]) -> Result<IpAddr, String> {
    // The variable may be padded to a fixed length.
    let stated = param::ADDRESS.text().map(|text| text.trim_end().to_string());
    let Some(text) = stated.filter(|text| !text.is_empty()) else {
        let own = towards_relay(relays).or_else(|| first_ip(&interfaces()));
        return Ok(own.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    };
    text.parse().map_err(|_| format!("LANDBRIDGE_ADDRESS={text} is not an IP address"))
}

/// Addresses of interfaces that are up and allowed. Whether an address leads to a peer shows when
/// it is dialled.
fn rails() -> Result<Vec<IpAddr>, String> {
    let (wanted, excluded) = (param::RAILS.networks()?, param::RAILS_EXCLUDE.networks()?);
    let is_in = |list: &[Network], ip| list.iter().any(|network| network.contains(ip));
    let alive = libc::IFF_UP | libc::IFF_RUNNING;
    Ok(interfaces()
        .iter()
        .filter(|it| it.flags & (alive | libc::IFF_LOOPBACK) == alive)
        .map(|it| IpAddr::V4(it.ip))
        .filter(|&ip| is_in(&wanted, ip) && !is_in(&excluded, ip))
        .collect())
}

/// The local address towards the first relay to which the kernel has a route, unless that relay is
/// on this node. Nothing is sent.
fn towards_relay(relays: &[RelayAddress]) -> Option<IpAddr> {
    let reached = |relay: &RelayAddress| match relay {
        RelayAddress::Unix(_) => None,
        RelayAddress::Tcp(address) => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
            socket.connect(address).ok()?;
            let own = socket.local_addr().ok()?.ip();
            (!own.is_loopback() && own != address.ip()).then_some(own)
        }
    };
    relays.iter().find_map(reached)
}

/// IPv4 address and flags of an interface.
struct Interface {
    ip: Ipv4Addr,
    flags: i32,
}

/// The first interface that is up, has a carrier and is not the loopback.
fn first_ip(interfaces: &[Interface]) -> Option<IpAddr> {
    const ALIVE: i32 = libc::IFF_UP | libc::IFF_RUNNING;
    let first = interfaces.iter().find(|it| it.flags & (ALIVE | libc::IFF_LOOPBACK) == ALIVE)?;
    Some(IpAddr::V4(first.ip))
}

/// The interfaces that have an IPv4 address (netdevice(7)). The C library's `getifaddrs` would keep
/// what it reads on the heap of the program, which other nodes and other times would then shape.
fn interfaces() -> Vec<Interface> {
    let _own = UnrecordedCalls::begin();
    let Ok(socket) =
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
    else {
        return Vec::new();
    };
    let mut requests = Vec::new();
    let mut entries = INTERFACES_USUAL;
    loop {
        // SAFETY: an all-zero ifreq is a valid one.
        requests.resize(entries, unsafe { std::mem::zeroed::<libc::ifreq>() });
        let bytes = entries * size_of::<libc::ifreq>();
        let ifcu_req = requests.as_mut_ptr();
        let ifc_ifcu = libc::__c_anonymous_ifc_ifcu { ifcu_req };
        let mut list = libc::ifconf { ifc_len: bytes as libc::c_int, ifc_ifcu };
        // SAFETY: the list has so many bytes.
        let is_read = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFCONF, &mut list) } == 0;
        let filled = list.ifc_len as usize / size_of::<libc::ifreq>();
        if is_read && filled == entries && entries < INTERFACES_MAX {
            // There may be more.
            entries *= 2;
            continue;
        }
        requests.truncate(if is_read { filled } else { 0 });
        return requests.into_iter().filter_map(|entry| interface(&socket, entry)).collect();
    }
}

/// Entries of the list of interfaces that are read at first, and at most.
const INTERFACES_USUAL: usize = 64;
const INTERFACES_MAX: usize = 16 << 10;

fn interface(socket: &OwnedFd, mut entry: libc::ifreq) -> Option<Interface> {
    // SAFETY: the kernel has filled in the address, a sockaddr_in if the family says so.
    let address = unsafe {
        let address = (&raw const entry.ifr_ifru.ifru_addr).cast::<libc::sockaddr_in>();
        if i32::from((*address).sin_family) != libc::AF_INET {
            return None;
        }
        (*address).sin_addr.s_addr
    };
    // SAFETY: the entry has the name of an interface, and is local.
    let is_read = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &mut entry) } == 0;
    // SAFETY: the kernel has filled in the flags.
    let flags = i32::from(unsafe { entry.ifr_ifru.ifru_flags });
    is_read.then(|| Interface { ip: Ipv4Addr::from(address.to_ne_bytes()), flags })
}

fn relays() -> Result<Vec<RelayAddress>, String> {
    let text = param::RELAY.text().unwrap_or_default();
    text.split(',').filter(|way| !way.is_empty()).map(parse_relay_address).collect()
}

fn parse_relay_address(text: &str) -> Result<RelayAddress, String> {
    if let Some(name) = text.strip_prefix("unix:@") {
        return Ok(RelayAddress::Unix(name.to_owned()));
    }
    let address =
        text.strip_prefix("tcp:").and_then(|address| address.to_socket_addrs().ok()?.next());
    address.map(RelayAddress::Tcp).ok_or_else(|| {
        format!("LANDBRIDGE_RELAY: {text} is neither unix:@NAME nor tcp:HOST:PORT of a known host")
    })
}

fn local_size() -> Result<Option<u32>, String> {
    let of_other_launchers = ["MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE"];
    let count = param::NODE_SIZE.number()?.or_else(|| number_in_any(&of_other_launchers));
    Ok(count.map(|count| count as u32))
}

/// As the launcher says. Under the libraries' own launchers, the variables of MPICH and Intel MPI
/// decide as they decide for the library; Open MPI sends everything through the provider.
fn library_carries_local() -> Result<bool, String> {
    let word = param::LOCAL.word()?;
    if word != "auto" {
        return Ok(word == "library");
    }
    let is_hydra = number_in_any(&["MPI_LOCALNRANKS"]).is_some_and(|count| count > 1);
    Ok(is_hydra && leaves_local_to_library(|name| std::env::var(name).ok()))
}

/// Whether the variables of MPICH and of Intel MPI leave the messages inside a node to the library,
/// as both libraries do by default.
fn leaves_local_to_library(variable: impl Fn(&str) -> Option<String>) -> bool {
    let is_off = |text: String| {
        ["0", "no", "false", "off", "disable"].contains(&text.to_ascii_lowercase().as_str())
    };
    let has_shm = |text: String| text.to_ascii_lowercase().starts_with("shm");
    variable("MPIR_CVAR_NOLOCAL").is_none_or(is_off)
        && variable("I_MPI_FABRICS").is_none_or(has_shm)
}

fn placement_index(index: Option<u32>) -> Result<Option<u32>, String> {
    let of_launcher =
        || number_in_any(&["PMI_RANK", "PMIX_RANK", "SLURM_PROCID"]).map(|rank| rank as u32);
    Ok(if param::OWN_CORE.is_on()? { index.or_else(of_launcher) } else { None })
}

fn number_in_any(names: &[&str]) -> Option<u64> {
    names.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// The tests of parsing and address selection.
/// The files with the logs of this node: the one in memory first.
fn node_logs(recovers: bool) -> Result<Option<Mutex<Vec<OwnedFd>>>, String> {
    let all = [param::NODE_LOGS.number()?, param::NODE_LOGS_DISK.number()?];
    if !recovers || all[0].is_none() {
        return Ok(None);
    }
    // SAFETY: the agent has opened the descriptors for this process, and nothing else closes them.
    let files = all.into_iter().flatten().map(|file| unsafe { OwnedFd::from_raw_fd(file as i32) });
    Ok(Some(Mutex::new(files.collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_ways_are_parsed_or_explained() {
        assert!(
            matches!(parse_relay_address("unix:@x-1"), Ok(RelayAddress::Unix(name)) if name == "x-1")
        );
        assert!(matches!(parse_relay_address("tcp:127.0.0.1:7711"), Ok(RelayAddress::Tcp(_))));
        assert!(parse_relay_address("udp:1").unwrap_err().contains("udp:1"));
    }

    #[test]
    fn variables_of_the_libraries_say_who_carries_what_stays_on_a_node() {
        let is_left = |set: &[(&str, &str)]| {
            leaves_local_to_library(|name| {
                set.iter().find(|(of, _)| *of == name).map(|(_, value)| value.to_string())
            })
        };
        assert!(is_left(&[]));
        assert!(is_left(&[("MPIR_CVAR_NOLOCAL", "0")]) && !is_left(&[("MPIR_CVAR_NOLOCAL", "1")]));
        assert!(is_left(&[("I_MPI_FABRICS", "shm:ofi")]) && !is_left(&[("I_MPI_FABRICS", "ofi")]));
    }

    #[test]
    fn the_first_address_is_that_of_an_interface_that_is_up() {
        const ALIVE: i32 = libc::IFF_UP | libc::IFF_RUNNING;
        let interface = |last, flags| Interface { ip: Ipv4Addr::new(10, 0, 0, last), flags };
        let chosen = |list: &[Interface]| match first_ip(list) {
            Some(IpAddr::V4(ip)) => ip.octets()[3],
            _ => 0,
        };
        let lo = || interface(1, ALIVE | libc::IFF_LOOPBACK);
        let dead = || interface(2, libc::IFF_UP);
        assert_eq!(chosen(&[lo(), dead(), interface(3, ALIVE), interface(4, ALIVE)]), 3);
        assert_eq!(chosen(&[lo(), dead()]), 0);
    }

    #[test]
    fn the_way_to_a_relay_tells_our_address_unless_it_is_here() {
        let here = |text: &str| RelayAddress::Tcp(text.parse().unwrap());
        assert_eq!(towards_relay(&[RelayAddress::Unix("x".into()), here("127.0.0.1:7711")]), None);
    }

    #[test]
    fn hashes_tell_parts_apart() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_ne!(random::<8>(), random::<8>());
    }
}
