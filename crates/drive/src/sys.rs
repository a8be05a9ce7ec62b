//! Requests to the operating system other than reading, writing and waiting.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// A link on which nothing is acknowledged for this long is broken, however idle it is.
const KEEPALIVE_TIME_MAX: Duration = Duration::from_secs(30);

/// The bytes that wait unsent in the kernel, beyond what the network has in flight. More would only
/// delay what is written next.
const UNSENT_BYTES: libc::c_int = 256 << 10;

/// Milliseconds on a clock that never jumps.
pub fn now_millis() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000 + now.tv_nsec as u64 / 1_000_000
}

/// Cryptographically secure random bytes.
///
/// # Errors
/// If the system provides none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        done += rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Raises the limit of open files to what the system allows. Returns the new limit.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, wanted);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Starts writeback of this part of a file, so that dirty pages do not pile up.
pub fn begin_writeback(file: impl AsFd, at: u64, bytes: u64) {
    sync_range(file, at, bytes, libc::SYNC_FILE_RANGE_WRITE);
}

/// Waits until this part of a file is on the disk, and drops its pages from the page cache.
pub fn drop_written_pages(file: impl AsFd, at: u64, bytes: u64) {
    let whole = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_range(&file, at, bytes, whole);
    let _ = rustix::fs::fadvise(file, at, NonZeroU64::new(bytes), rustix::fs::Advice::DontNeed);
}

fn sync_range(file: impl AsFd, at: u64, bytes: u64, flags: libc::c_uint) {
    let (at, bytes) = (at as libc::off64_t, bytes as libc::off64_t);
    // SAFETY: the call takes numbers only. A failure only changes the time at which the kernel
    // writes.
    unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), at, bytes, flags) };
}

/// Disables Nagle's algorithm, so that small messages leave at once, and enables keepalive, so that
/// a vanished peer is detected. No effect on Unix sockets.
pub fn tune_link(socket: impl AsFd) {
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, KEEPALIVE_TIME_MAX / 2);
    let _ = sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_TIME_MAX / 6);
    let _ = sockopt::set_tcp_keepcnt(&socket, 3);
}

/// Tunes the link of a recorded rank, which must not break before `peer_timeout` has passed,
/// because each break costs a restart. Time in which the rank reads nothing does not count.
pub fn tune_recorded_link(socket: impl AsFd, peer_timeout: Duration) {
    tune_link(&socket);
    let probe = KEEPALIVE_TIME_MAX / 6;
    let probes = (peer_timeout.as_secs() / probe.as_secs().max(1)).clamp(3, 127);
    let _ = sockopt::set_tcp_keepcnt(&socket, probes as u32);
}

/// Tunes a link that many endpoints share: the queue in the kernel is short. The owner checks the
/// link's liveness itself ([`tcp_info`]): the kernel's own limit would also count the time in which
/// the other side reads nothing because its ranks do not read.
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

/// The kernel's information about the other end of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// The time since anything has arrived, acknowledgements included. The other kernel answers
    /// also for a process that is stopped.
    pub idle_millis: u64,
    /// The time since the other end acknowledged anything.
    pub unacked_millis: u64,
    /// How many bytes the other end has acknowledged; 0 if the kernel does not report it.
    pub confirmed_bytes: u64,
    /// Whether bytes are in flight that the other end has not acknowledged.
    pub has_unacked: bool,
    /// Whether bytes cannot leave although the other end's window is open.
    pub has_unsent: bool,
    /// Whether bytes cannot leave because the other end's window is closed, or too small for a
    /// segment while nothing is in flight: the kernel then waits for a larger one (RFC 9293,
    /// section 3.8.6.2.1).
    pub is_zero_window: bool,
    /// How many probes of a closed window, the last ones, the other end has not answered.
    pub unanswered_probes: u8,
    /// The smoothed round trip.
    pub round_trip_micros: u32,
    /// The variation of the round trip.
    pub variation_micros: u32,
    /// The rate at the last measurement; 0 if there was none, or if the kernel does not report it.
    pub bytes_per_second: u64,
}

/// The offsets of fields in Linux' `struct tcp_info` (linux/tcp.h), of which the C library knows
/// only the older ones. Kernels before 4.1 do not report the bytes that are acknowledged, and those
/// before 5.4 not the last field.
const PROBES_AT: usize = 3;
const SND_MSS_AT: usize = 16;
const UNACKED_AT: usize = 24;
const LAST_DATA_RECV_AT: usize = 52;
const LAST_ACK_RECV_AT: usize = 56;
const RTT_AT: usize = 68;
const RTT_VARIATION_AT: usize = 72;
const BYTES_ACKED_AT: usize = 120;
const NOTSENT_AT: usize = 144;
const DELIVERY_RATE_AT: usize = 160;
const SND_WND_AT: usize = 228;
const TCP_INFO_WORDS: usize = 58;

/// The state of a TCP connection; `None` if the socket is no TCP connection.
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
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    // With bytes in flight, an acknowledgement may open the window.
    let needed = if word(UNACKED_AT) > 0 { 1 } else { word(SND_MSS_AT) };
    let has_room = size as usize <= SND_WND_AT || word(SND_WND_AT) >= needed;
    (result == 0).then(|| TcpInfo {
        idle_millis: word(LAST_ACK_RECV_AT).min(word(LAST_DATA_RECV_AT)) as u64,
        unacked_millis: word(LAST_ACK_RECV_AT) as u64,
        confirmed_bytes: long(BYTES_ACKED_AT),
        has_unacked: word(UNACKED_AT) > 0,
        has_unsent: word(NOTSENT_AT) > 0 && has_room,
        is_zero_window: word(NOTSENT_AT) > 0 && !has_room,
        unanswered_probes: word(0).to_ne_bytes()[PROBES_AT],
        round_trip_micros: word(RTT_AT),
        variation_micros: word(RTT_VARIATION_AT),
        bytes_per_second: long(DELIVERY_RATE_AT),
    })
}

/// The process id of the other end of a Unix socket, in this process's PID namespace; 0 if the
/// other process is not visible in this namespace, or not known. (The system call is made directly,
/// because rustix' type for a process id has no 0.)
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

/// Creates a signalfd: the signals no longer interrupt, and a read of 128 bytes returns the number
/// of one signal in its first four bytes.
///
/// # Errors
/// If the system has no resources for it.
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset before use; only this function has the new
    // descriptor.
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

    /// A receiver leaves a window that is too small for a segment before it closes the window.
    #[test]
    fn what_waits_for_a_larger_window_is_not_taken_for_silence() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        use std::time::{Duration, Instant};
        for writes_slowly in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let _other = listener.accept().unwrap().0;
            one.set_nonblocking(true).unwrap();
            while one.write(&[0; 777]).is_ok() {
                if writes_slowly {
                    std::thread::sleep(Duration::from_micros(30));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(400) {
                let info = tcp_info(&one).unwrap();
                assert!(info.has_unacked || !info.has_unsent, "{info:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
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
        let before = tcp_info(&other).unwrap().confirmed_bytes;
        other.write_all(b"abc").unwrap();
        // The acknowledgement may be in flight.
        while tcp_info(&one).unwrap().has_unacked || tcp_info(&other).unwrap().has_unacked {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        assert_eq!(tcp_info(&other).unwrap().confirmed_bytes, before + 3);
        assert_eq!(tcp_info(std::fs::File::open("/dev/null").unwrap()), None);
    }

    #[test]
    fn a_peer_outside_the_namespace_has_no_number() {
        use std::os::unix::net::UnixStream;
        let (one, other) = UnixStream::pair().unwrap();
        assert_eq!(peer_pid(&one), std::process::id() as i32);
        assert_eq!(peer_pid(std::fs::File::open("/dev/null").unwrap()), 0, "no socket");
        // The child's children live in a PID namespace of their own, from which this process is not
        // visible.
        let seen = unsafe { in_namespace_below(|| peer_pid(&other)) };
        assert!(seen == 0 || seen == CANNOT, "process {seen}");
    }

    /// What [`in_namespace_below`] returns where namespaces are not allowed.
    const CANNOT: i32 = 99;

    /// The result of `look` (at most 98) in a new process in a new PID namespace.
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
