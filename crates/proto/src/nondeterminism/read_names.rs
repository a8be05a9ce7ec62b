//! Names of recorded reads, for messages about a replay that differs. Records are made on x86-64
//! alone, so numbers of system calls are those of x86-64 (syscalls(2)).

use core::fmt;

use super::{Clock, FileCall, ReadRequest};

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids =
            ["REALTIME", "MONOTONIC", "PROCESS_CPUTIME_ID", "THREAD_CPUTIME_ID", "MONOTONIC_RAW"];
        let coarse = ["REALTIME_COARSE", "MONOTONIC_COARSE", "BOOTTIME"];
        match self {
            ReadRequest::Clock(Clock::TIME_OF_DAY) => write!(f, "gettimeofday"),
            ReadRequest::Clock(Clock::TIME) => write!(f, "time"),
            ReadRequest::Clock(Clock::TIMESPEC) => write!(f, "timespec_get"),
            ReadRequest::Clock(Clock::CLOCK) => write!(f, "clock"),
            ReadRequest::Clock(Clock(id)) => {
                let name = ids.iter().chain(&coarse).nth(*id as usize).unwrap_or(&"TAI");
                write!(f, "clock_gettime of CLOCK_{name}")
            }
            ReadRequest::Bytes(source, length) => {
                let name = ["getrandom", "getentropy", "arc4random"][*source as usize];
                write!(f, "{name} of {length} bytes")
            }
            ReadRequest::FileCall(FileCall { number, digest }) => {
                let name = name_of(*number);
                write!(f, "system call {number} ({name}) with arguments of digest {digest:08x}")
            }
            ReadRequest::End => write!(f, "the end of the program"),
            ReadRequest::Truncated => write!(f, "something of which not all is on record"),
            ReadRequest::Unknown => write!(f, "nothing that is known"),
        }
    }
}

/// Name of a system call; `?` for one that no record contains often.
fn name_of(number: u32) -> &'static str {
    match number {
        0 => "read",
        1 => "write",
        2 => "open",
        3 => "close",
        4 => "stat",
        5 => "fstat",
        6 => "lstat",
        7 => "poll",
        8 => "lseek",
        9 => "mmap",
        17 => "pread64",
        18 => "pwrite64",
        19 => "readv",
        20 => "writev",
        21 => "access",
        23 => "select",
        32 | 33 | 292 => "dup",
        40 => "sendfile",
        42 => "connect",
        61 => "wait4",
        63 => "uname",
        72 => "fcntl",
        73 => "flock",
        74 | 75 => "fsync",
        76 | 77 => "truncate",
        78 | 217 => "getdents",
        79 => "getcwd",
        80 | 81 => "chdir",
        82 | 264 | 316 => "rename",
        83 | 258 => "mkdir",
        84 => "rmdir",
        86 | 265 => "link",
        87 | 263 => "unlink",
        88 | 266 => "symlink",
        89 | 267 => "readlink",
        90 | 91 | 268 => "chmod",
        92 | 93 | 94 | 260 => "chown",
        232 | 281 => "epoll_wait",
        247 => "waitid",
        257 => "openat",
        262 => "newfstatat",
        269 | 439 => "faccessat",
        270 => "pselect6",
        271 => "ppoll",
        280 => "utimensat",
        285 => "fallocate",
        295 | 327 => "preadv",
        296 | 328 => "pwritev",
        318 => "getrandom",
        326 => "copy_file_range",
        332 => "statx",
        _ => "?",
    }
}
