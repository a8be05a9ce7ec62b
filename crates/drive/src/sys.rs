//! What the operating system is asked for beside reading, writing and waiting.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// A link on which nothing is acknowledged for this long is broken, however idle it is.
const KEEPALIVE_TIME_MAX: Duration = Duration::from_secs(30);

/// Bytes that wait unsent in the kernel, beyond what the network has under way. More would only
/// delay whatever is written next.
const UNSENT_BYTES: libc::c_int = 256 << 10;

/// Milliseconds on a clock that never jumps.
pub fn now_millis() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000 + now.tv_nsec as u64 / 1_000_000
}

/// Bytes nobody can guess.
///
/// # Errors
/// If the system has none to give.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        done += rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Raises the number of open files to what the system allows; gives that number.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, wanted);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The system is to begin to write what has been written to this part of a file, and not to let it pile up.
pub fn begin_writeback(file: impl AsFd, at: u64, bytes: u64) {
    sync_range(file, at, bytes, libc::SYNC_FILE_RANGE_WRITE);
}

/// Returns when this part of a file is on its disk, and has the system let go of the memory that it has for that.
pub fn drop_written_pages(file: impl AsFd, at: u64, bytes: u64) {
    let whole = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_range(&file, at, bytes, whole);
    let _ = rustix::fs::fadvise(file, at, NonZeroU64::new(bytes), rustix::fs::Advice::DontNeed);
}

fn sync_range(file: impl AsFd, at: u64, bytes: u64, flags: libc::c_uint) {
    let (at, bytes) = (at as libc::off64_t, bytes as libc::off64_t);
    // SAFETY: the call takes numbers only. That it fails changes nothing but when the system writes.
    unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), at, bytes, flags) };
}

/// Small messages leave at once, and a vanished peer is noticed. No effect on Unix sockets.
pub fn tune_link(socket: impl AsFd) {
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, KEEPALIVE_TIME_MAX / 2);
    let _ = sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_TIME_MAX / 6);
    let _ = sockopt::set_tcp_keepcnt(&socket, 3);
}

/// For the link of a rank that is recorded, which must not break before `peer_timeout` has passed: each break costs a new start.
/// How long the rank takes nothing does not count.
pub fn tune_recorded_link(socket: impl AsFd, peer_timeout: Duration) {
    tune_link(&socket);
    let probe = KEEPALIVE_TIME_MAX / 6;
    let probes = (peer_timeout.as_secs() / probe.as_secs().max(1)).clamp(3, 127);
    let _ = sockopt::set_tcp_keepcnt(&socket, probes as u32);
}

/// For a link that many share: with a short queue. Whether it is alive its owner finds out
/// ([`tcp_info`]); the system's own limit would also count the time in which the other side takes
/// nothing because its ranks do not read.
pub fn tune_shared_link(socket: impl AsFd) {
    tune_link(&socket);
    let bytes = UNSENT_BYTES;
    // SAFETY: the option takes an int, and `bytes` outlives the call.
    unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
}

/// What the system knows of the other end of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// Since anything has come from it, be it only that it has got something. Its system answers,
    /// also for a process that is stopped.
    pub idle_millis: u64,
    /// Since it confirmed anything.
    pub unacked_millis: u64,
    /// Whether something is under way that it has not confirmed.
    pub has_unacked: bool,
    /// Whether something cannot leave although it has room for it.
    pub has_unsent: bool,
    /// Whether something cannot leave because it has no room for it.
    pub is_zero_window: bool,
    /// From a segment to its confirmation, smoothed.
    pub round_trip_micros: u32,
    /// How much that varies.
    pub variation_micros: u32,
    /// What it delivered when that was measured last; 0: it was not, or the kernel does not tell.
    pub bytes_per_second: u64,
}

/// Where fields of Linux' `struct tcp_info` stand (linux/tcp.h), of which the C library knows only the older ones. Kernels
/// before 5.4 do not tell the last one.
const UNACKED_AT: usize = 24;
const LAST_DATA_RECV_AT: usize = 52;
const LAST_ACK_RECV_AT: usize = 56;
const RTT_AT: usize = 68;
const RTT_VARIATION_AT: usize = 72;
const NOTSENT_AT: usize = 144;
const DELIVERY_RATE_AT: usize = 160;
const SND_WND_AT: usize = 228;
const TCP_INFO_WORDS: usize = 58;

/// Since when nothing has come over a TCP connection. `None`: it is none.
pub fn tcp_info(socket: impl AsFd) -> Option<TcpInfo> {
    let mut info = [0u32; TCP_INFO_WORDS];
    let mut size = size_of_val(&info) as libc::socklen_t;
    // SAFETY: `info` and `size` outlive the call, and `size` is that of `info`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    let word = |at: usize| info[at / 4];
    let has_room = size as usize <= SND_WND_AT || word(SND_WND_AT) > 0;
    (result == 0).then(|| TcpInfo {
        idle_millis: word(LAST_ACK_RECV_AT).min(word(LAST_DATA_RECV_AT)) as u64,
        unacked_millis: word(LAST_ACK_RECV_AT) as u64,
        has_unacked: word(UNACKED_AT) > 0,
        has_unsent: word(NOTSENT_AT) > 0 && has_room,
        is_zero_window: word(NOTSENT_AT) > 0 && !has_room,
        round_trip_micros: word(RTT_AT),
        variation_micros: word(RTT_VARIATION_AT),
        bytes_per_second: word(DELIVERY_RATE_AT) as u64 | (word(DELIVERY_RATE_AT + 4) as u64) << 32,
    })
}

/// The process at the other end of a Unix socket, as this process' namespace numbers it; 0: it is in none
/// that can be seen from here, or not known. (Asked of the system directly: rustix' type for it has no 0.)
pub fn peer_pid(socket: impl AsFd) -> i32 {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `who` and `size` outlive the call, and `size` is that of `who`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut size,
        )
    };
    if result == 0 { who.pid } else { 0 }
}

/// Turns signals into something to read: they no longer interrupt, and a read of 128 bytes gives
/// the number of one in its first four.
///
/// # Errors
/// If the system has no room for it.
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset before use; the new descriptor is ours alone.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        match libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_can_be_read() {
        let fd = signal_fd(&[libc::SIGUSR2]).unwrap();
        // SAFETY: raise has no requirements.
        unsafe { libc::raise(libc::SIGUSR2) };
        let mut bytes = [0; 128];
        assert_eq!(rustix::io::read(&fd, &mut bytes), Ok(128));
        assert_eq!(i32::from_ne_bytes(bytes[..4].try_into().unwrap()), libc::SIGUSR2);
    }

    #[test]
    fn a_connection_is_silent_until_something_comes() {
        use std::io::{Read, Write};
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let start = std::time::Instant::now();
        while tcp_info(&one).unwrap().idle_millis < 50 {
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", tcp_info(&one));
        }
        one.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        assert!(tcp_info(&other).unwrap().idle_millis < 50);
        // Its confirmation may be on the way.
        while tcp_info(&one).unwrap().has_unacked {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        assert_eq!(tcp_info(std::fs::File::open("/dev/null").unwrap()), None);
    }

    #[test]
    fn a_peer_outside_the_namespace_has_no_number() {
        use std::os::unix::net::UnixStream;
        let (one, other) = UnixStream::pair().unwrap();
        assert_eq!(peer_pid(&one), std::process::id() as i32);
        assert_eq!(peer_pid(std::fs::File::open("/dev/null").unwrap()), 0, "no socket");
        // The child's children live in a namespace of their own, from which this process cannot be seen.
        // SAFETY: the child calls nothing but system calls.
        let seen = unsafe { in_namespace_below(|| peer_pid(&other)) };
        assert!(seen == 0 || seen == CANNOT, "process {seen}");
    }

    /// What [`in_namespace_below`] gives where namespaces are not allowed.
    const CANNOT: i32 = 99;

    /// What `look` (at most 98) gives in a new process in a new namespace of process numbers.
    ///
    /// # Safety
    /// `look` does nothing that is forbidden after a fork.
    unsafe fn in_namespace_below(look: impl Fn() -> i32) -> i32 {
        // SAFETY: between fork and _exit there are system calls only.
        unsafe {
            let below = |is_in: &dyn Fn() -> i32| {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(is_in());
                }
                let mut status = 0;
                libc::waitpid(child, &mut status, 0);
                libc::WEXITSTATUS(status)
            };
            below(&|| match libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) {
                0 => below(&|| look().min(98)),
                _ => CANNOT,
            })
        }
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<32>().unwrap(), random::<32>().unwrap());
    }
}
