//! `landbridge doctor-peer LIBMPI`: one of two test processes, which `landbridge run` starts like
//! the ranks of any job. The processes load an MPI library with MPICH's binary interface (MPICH,
//! Intel MPI) and exchange messages, and rank 0 prints the result: `latency_us N bandwidth_mb_s N`.
//!
//! With `--pairs` there is one process on each host. Each process prints its location (`host RANK
//! NODE CLUSTER`); then one pair after the other measures for a shorter time and prints `pair RANK
//! RANK latency_us N bandwidth_mb_s N`. After `done` all processes stay inside MPI until rank 0
//! reads a line or end-of-file from standard input; the parent sends the line once it has queried
//! the paths.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::dynamic::DynamicLibrary;

// Constants of the binary interface that MPICH and its derivatives share.
const COMM_WORLD: c_int = 0x4400_0000;
const BYTE: c_int = 0x4c00_010d;
const STATUS_IGNORE: usize = 1;

const SMALL_BYTES: usize = 8;
const LARGE_BYTES: usize = 1 << 20;
/// Time for rounds before the measurement.
const WARM_UP: Duration = Duration::from_millis(100);
/// Time for measured rounds.
const BUDGET: Duration = Duration::from_millis(500);
/// Measured rounds at least.
const ROUNDS_MIN: u32 = 3;

type Init = unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;
type CommRank = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
type Barrier = unsafe extern "C" fn(c_int) -> c_int;
type Bcast = unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int) -> c_int;
type Iprobe = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_int, *mut c_void) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, c_int, c_int, c_int, c_int, c_int) -> c_int;
type Recv =
    unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int, c_int, *mut c_void) -> c_int;

/// Time for rounds before the measurement of one pair of hosts.
const PAIR_WARM_UP: Duration = Duration::from_millis(20);
/// Time for measured rounds of one pair of hosts.
const PAIR_BUDGET: Duration = Duration::from_millis(100);
const MIDDLE_BYTES: usize = 64 << 10;
/// Time for [`MIDDLE_BYTES`] above which a path is not measured with larger messages.
const MIDDLE_TIME_MAX: Duration = Duration::from_millis(10);
/// Pairs that are measured at most, spread evenly over all pairs.
const PAIRS_MAX: usize = 120;
/// Time after which no further pair is measured.
const PAIRS_TIME_MAX: Duration = Duration::from_secs(45);

struct Mpi {
    send: Send,
    recv: Recv,
    /// Whether this process is the first of the two. `peer` is the rank of the other process.
    is_first: bool,
    peer: c_int,
}

/// The communicator of all processes, and the functions that only `--pairs` needs.
struct World {
    barrier: Barrier,
    bcast: Bcast,
    iprobe: Iprobe,
    rank: c_int,
    size: c_int,
}

pub fn run(path: &Path, is_for_pairs: bool) -> Result<()> {
    let library = DynamicLibrary::open(path, libc::RTLD_GLOBAL)?;
    // SAFETY: these are the signatures of the MPI standard for these names.
    let (init, finalize, comm_rank, comm_size, send, recv) = unsafe {
        (
            library.function::<Init>(c"MPI_Init")?,
            library.function::<Finalize>(c"MPI_Finalize")?,
            library.function::<CommRank>(c"MPI_Comm_rank")?,
            library.function::<CommRank>(c"MPI_Comm_size")?,
            library.function::<Send>(c"MPI_Send")?,
            library.function::<Recv>(c"MPI_Recv")?,
        )
    };
    let (mut rank, mut size) = (0, 0);
    // SAFETY: MPI_Init takes null for arguments; `rank` and `size` are places for one int each.
    unsafe {
        ensure!(init(std::ptr::null_mut(), std::ptr::null_mut()) == 0, "MPI_Init failed");
        ensure!(comm_rank(COMM_WORLD, &mut rank) == 0, "MPI_Comm_rank failed");
        ensure!(comm_size(COMM_WORLD, &mut size) == 0, "MPI_Comm_size failed");
    }
    if is_for_pairs {
        // SAFETY: these are the signatures of the MPI standard for these names.
        let (barrier, bcast, iprobe) = unsafe {
            (
                library.function::<Barrier>(c"MPI_Barrier")?,
                library.function::<Bcast>(c"MPI_Bcast")?,
                library.function::<Iprobe>(c"MPI_Iprobe")?,
            )
        };
        let world = World { barrier, bcast, iprobe, rank, size };
        world.try_pairs(|is_first, peer| Mpi { send, recv, is_first, peer })?;
    } else {
        Mpi { send, recv, is_first: rank == 0, peer: 1 - rank }.try_one()?;
    }
    // SAFETY: MPI is initialised.
    ensure!(unsafe { finalize() } == 0, "MPI_Finalize failed");
    Ok(())
}

/// The pairs of `size` ranks that are measured: all pairs, or an even selection of at most
/// [`PAIRS_MAX`].
fn pairs(size: c_int) -> Vec<(c_int, c_int)> {
    let all: Vec<_> = (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b))).collect();
    let step = all.len().div_ceil(PAIRS_MAX).max(1);
    all.into_iter().step_by(step).collect()
}

impl World {
    fn try_pairs(&self, between: impl Fn(bool, c_int) -> Mpi) -> Result<()> {
        let own = |name| std::env::var(name).unwrap_or_default();
        println!("host {} {} {}", self.rank, own("LANDBRIDGE_NODE"), own("LANDBRIDGE_CLUSTER"));
        let begun = Instant::now();
        for (a, b) in pairs(self.size) {
            self.meet()?;
            if !self.agree(begun.elapsed() < PAIRS_TIME_MAX)? {
                break;
            }
            if self.rank == a || self.rank == b {
                let (is_first, peer) = (self.rank == a, if self.rank == a { b } else { a });
                let (latency, bandwidth) = between(is_first, peer).try_pair()?;
                if is_first {
                    let micros = latency.as_secs_f64() * 1e6;
                    println!("pair {a} {b} latency_us {micros:.1} bandwidth_mb_s {bandwidth:.1}");
                }
            }
        }
        self.meet()?;
        if self.rank == 0 {
            println!("done");
            self.stay()?;
        }
        self.meet()
    }

    fn meet(&self) -> Result<()> {
        // SAFETY: MPI is initialised.
        ensure!(unsafe { (self.barrier)(COMM_WORLD) } == 0, "MPI_Barrier failed");
        Ok(())
    }

    /// Broadcasts the decision `yes` of rank 0 to all ranks, and returns it.
    fn agree(&self, yes: bool) -> Result<bool> {
        let mut byte = [u8::from(yes)];
        // SAFETY: `byte` is a local array of one byte.
        let code = unsafe { (self.bcast)(byte.as_mut_ptr().cast(), 1, BYTE, 0, COMM_WORLD) };
        ensure!(code == 0, "MPI_Bcast failed");
        Ok(byte[0] != 0)
    }

    /// Polls MPI until standard input has a line or end-of-file.
    fn stay(&self) -> Result<()> {
        loop {
            let mut stdin = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
            // SAFETY: `stdin` is one local pollfd.
            if unsafe { libc::poll(&mut stdin, 1, 1) } != 0 {
                return Ok(());
            }
            let mut is_there = 0;
            let status = std::ptr::without_provenance_mut(STATUS_IGNORE);
            // SAFETY: `is_there` is a place for one int; the status is MPI_STATUS_IGNORE of the
            // interface.
            let code = unsafe { (self.iprobe)(0, 0, COMM_WORLD, &mut is_there, status) };
            ensure!(code == 0, "MPI_Iprobe failed");
        }
    }
}

impl Mpi {
    /// Measures latency and bandwidth to the peer; rank 0 prints the result.
    fn try_one(&self) -> Result<()> {
        let latency = self.measure(SMALL_BYTES, WARM_UP, BUDGET)?;
        let transfer = self.measure(LARGE_BYTES, WARM_UP, BUDGET)?;
        if self.is_first {
            let bandwidth = LARGE_BYTES as f64 / transfer.as_secs_f64() / 1e6;
            println!("latency_us {:.1} bandwidth_mb_s {bandwidth:.0}", latency.as_secs_f64() * 1e6);
        }
        Ok(())
    }

    /// The one-way time of a small message, and the bandwidth in MB/s of a larger message; the
    /// larger size is used only if the path is fast enough.
    fn try_pair(&self) -> Result<(Duration, f64)> {
        let latency = self.measure(SMALL_BYTES, PAIR_WARM_UP, PAIR_BUDGET)?;
        let middle = self.measure(MIDDLE_BYTES, Duration::ZERO, PAIR_BUDGET)?;
        let mut goes_on = [u8::from(middle < MIDDLE_TIME_MAX)];
        if self.is_first {
            self.send(&goes_on)?;
        } else {
            self.recv(&mut goes_on)?;
        }
        let (bytes, time) = match goes_on[0] {
            0 => (MIDDLE_BYTES, middle),
            _ => (LARGE_BYTES, self.measure(LARGE_BYTES, Duration::ZERO, PAIR_BUDGET)?),
        };
        Ok((latency, bytes as f64 / time.as_secs_f64() / 1e6))
    }

    /// One-way time of a message of `bytes` bytes. The first of the two processes decides when the
    /// time is over and sends the decision in the first byte, so that a slow path takes no longer
    /// than a fast one.
    fn measure(&self, bytes: usize, warm_up: Duration, budget: Duration) -> Result<Duration> {
        let mut buffer = vec![0; bytes];
        self.rounds(&mut buffer, warm_up)?;
        let (time, rounds) = self.rounds(&mut buffer, budget)?;
        Ok(time / (2 * rounds))
    }

    fn rounds(&self, buffer: &mut [u8], budget: Duration) -> Result<(Duration, u32)> {
        let begun = Instant::now();
        let mut rounds = 0;
        loop {
            rounds += 1;
            let last = rounds >= ROUNDS_MIN && begun.elapsed() > budget;
            if self.is_first {
                buffer[0] = u8::from(last);
                self.send(buffer)?;
            }
            self.recv(buffer)?;
            if !self.is_first {
                self.send(buffer)?;
            }
            ensure!(buffer[1..].iter().all(|&byte| byte == 0), "a message came with other bytes");
            if buffer[0] == 1 {
                return Ok((begun.elapsed(), rounds));
            }
        }
    }

    fn send(&self, buffer: &[u8]) -> Result<()> {
        let (count, peer) = (buffer.len() as c_int, self.peer);
        // SAFETY: `buffer` holds `count` bytes.
        let code = unsafe { (self.send)(buffer.as_ptr().cast(), count, BYTE, peer, 0, COMM_WORLD) };
        ensure!(code == 0, "MPI_Send failed");
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8]) -> Result<()> {
        let (count, peer) = (buffer.len() as c_int, self.peer);
        let status = std::ptr::without_provenance_mut(STATUS_IGNORE);
        let buffer = buffer.as_mut_ptr().cast();
        // SAFETY: `buffer` holds `count` bytes; the status is MPI_STATUS_IGNORE of the interface.
        let code = unsafe { (self.recv)(buffer, count, BYTE, peer, 0, COMM_WORLD, status) };
        ensure!(code == 0, "MPI_Recv failed");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_all_there_are_or_some_of_them() {
        assert_eq!(pairs(3), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!(pairs(1), []);
        for size in [15, 16, 17, 100, 1000] {
            let tried = pairs(size).len();
            assert!((PAIRS_MAX / 2..=PAIRS_MAX).contains(&tried), "{tried} pairs of {size}");
        }
    }
}
