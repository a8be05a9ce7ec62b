//! The relay of a cluster: ranks attach to it, other relays link to it, and it passes frames
//! between them. A relay reads a frame's header and nothing behind it.

mod admin;
mod log_query;

use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use landbridge_drive::engine::disk::Disk;
use landbridge_drive::engine::{Engine, Peer, RecoveryConfig, Setup, epoll::Epoll};
use landbridge_drive::link::tls::Identity;
use landbridge_drive::sys;
use landbridge_proto::id::ClusterId;
use landbridge_relay::config::{self, Config};
use landbridge_relay::settings::Settings;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use admin::Admin;

/// The exit code for an unusable configuration.
const EXIT_CONFIG: u8 = 2;
/// The most connections that wait to be accepted: a whole cluster may start at once. The system
/// reduces the value to its own limit.
const BACKLOG: i32 = 4096;

/// Passes messages between the clusters of a Landbridge job.
///
/// The launcher starts one relay on each cluster and sends its configuration. A relay rarely needs
/// to be started by hand.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  \
        landbridge-relay --config relay.toml\n  \
        (cat relay.toml; echo ---; cat) | landbridge-relay --config -\n\n\
        It prints one line when it is ready, and its log on standard error. SIGUSR1\n\
        logs its counters; SIGTERM and SIGINT end it, and so does the end of standard\n\
        input after --config -. Environment: LANDBRIDGE_PEER_TIMEOUT,\n\
        LANDBRIDGE_WAN_STREAMS, LANDBRIDGE_REDIAL_MAX, LANDBRIDGE_WAN_UDP,\n\
        LANDBRIDGE_CONGESTION, LANDBRIDGE_INTEGRITY, LANDBRIDGE_RECOVER,\n\
        LANDBRIDGE_RECOVER_MEMORY, LANDBRIDGE_RECOVER_DIR, LANDBRIDGE_RECOVER_DISK,\n\
        LANDBRIDGE_CHECKPOINT_LOG."
)]
struct Arguments {
    /// The TOML document that describes the relay; `-` reads the document from standard input, up
    /// to a line that is exactly `---`, and the relay then ends when standard input ends
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// The environment variable that the node agent on this host sets if ranks of other nodes may be
/// restarted on third nodes.
const STATE_TRANSFER: &str = "LANDBRIDGE_STATE_TRANSFER";

/// A usable configuration.
struct Prepared {
    config: Config,
    identity: Option<Identity>,
    peers: Vec<Peer>,
    settings: Settings,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let config = match read(&arguments.config) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("landbridge-relay: {}: {error:#}", arguments.config.display());
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    match prepare(&arguments.config, config).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("landbridge-relay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run((mut admin, setup, ready): (Admin, Setup, String)) -> Result<()> {
    // Nobody may read this line; the relay works all the same.
    let _ = writeln!(std::io::stdout(), "{ready}");
    let report = Epoll::run(setup, &mut admin)?;
    admin.summarize(&report);
    Ok(())
}

/// Reads and checks the configuration, with all errors that its contents can cause.
fn read(path: &Path) -> Result<Prepared> {
    let config = Config::parse(&config::read(path)?)?;
    let (identity, peers) = (config.identity()?, config.peers()?);
    let settings = Settings::from_environment()?;
    Ok(Prepared { config, identity, peers, settings })
}

/// Prepares the relay, with all errors that this machine can cause.
fn prepare(path: &Path, prepared: Prepared) -> Result<(Admin, Setup, String)> {
    let Prepared { config, identity, peers, settings } = prepared;
    sys::raise_open_files();
    let ranks = listen(config.listen).context("listen")?;
    let relays = config.wan_listen.map(listen).transpose().context("wan_listen")?;
    let unix = config.unix.as_deref().map(listen_unix).transpose().context("unix")?;
    let relays_at = match &relays {
        Some(listener) => listener.local_addr()?.to_string(),
        None => "-".into(),
    };
    let ready = format!("landbridge-relay: ready ranks={} relays={relays_at}", ranks.local_addr()?);
    let (admin, controls) = Admin::new(config.cluster, path == Path::new("-"))?;
    // The signals are blocked by now, so the disk's thread inherits the mask: a signal that this
    // thread received would end the relay.
    let recover = recover(&settings)?;
    let setup = Setup {
        own: ClusterId(config.cluster),
        clusters: config.clusters(),
        ranks,
        unix,
        relays,
        identity,
        peers,
        controls,
        peer_timeout: settings.peer_timeout,
        wan_streams: settings.wan_streams,
        redial_max: settings.redial_max,
        wan_udp: settings.wan_udp,
        recover,
        integrity: settings.integrity,
        spin: config.spin_micros.map(Duration::from_micros),
        job: config.job,
        key: config.key,
    };
    Ok((admin, setup, ready))
}

/// The settings of the message log for processes that may be restarted, if recovery is on.
fn recover(settings: &Settings) -> Result<Option<RecoveryConfig>> {
    let directory = settings.recover_dir.as_deref().filter(|_| settings.recover);
    let open = |path: &Path| {
        let disk = Disk::open(path, settings.recover_disk);
        disk.with_context(|| format!("recover_dir: no file can be made in {}", path.display()))
    };
    let disk = directory.map(open).transpose()?;
    // The value 0 of the setting means that no number of bytes makes a checkpoint due.
    let checkpoint_log_bytes =
        settings.checkpoint_log.checked_sub(1).map_or(u64::MAX, |bytes| bytes + 1);
    let memory = settings.recover_memory;
    let nondeterminism_file = nondeterminism_file();
    Ok(settings.recover.then_some(RecoveryConfig {
        memory,
        disk,
        checkpoint_log_bytes,
        nondeterminism_file,
    }))
}

/// The file for the recorded nondeterminism of fenced processes (clocks and random numbers), if the
/// parent process has passed a descriptor for it.
fn nondeterminism_file() -> Option<File> {
    let number: u32 = std::env::var(STATE_TRANSFER).ok()?.parse().ok()?;
    File::options().write(true).open(format!("/proc/self/fd/{number}")).ok()
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address).map_err(|error| cannot_listen(address, error))?;
    rustix::net::listen(&socket, BACKLOG).map_err(|error| cannot_listen(address, error))?;
    Ok(socket.into())
}

fn cannot_listen(address: SocketAddr, error: Errno) -> anyhow::Error {
    let why = match error {
        Errno::ADDRINUSE => "the port is in use; does a relay of another job run here?".to_string(),
        Errno::ADDRNOTAVAIL => "this host has no such address".to_string(),
        error => error.to_string(),
    };
    anyhow!("cannot listen at {address}: {why}")
}

fn listen_unix(name: &str) -> Result<UnixListener> {
    let address = UnixAddr::from_abstract_name(name)?;
    UnixListener::bind_addr(&address).with_context(|| format!("@{name}"))
}
