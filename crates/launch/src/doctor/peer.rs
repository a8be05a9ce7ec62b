//! `landbridge doctor-peer LIBMPI`: one of two test processes, started by `landbridge run` like
//! the ranks of any job. They load an MPI library of MPICH's binary interface (MPICH, Intel MPI),
//! send messages to and fro, and rank 0 prints what came out: `latency_us N bandwidth_mb_s N`.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::dynamic::Library;

// Numbers of the binary interface that MPICH and its relatives have in common.
const COMM_WORLD: c_int = 0x4400_0000;
const BYTE: c_int = 0x4c00_010d;
const STATUS_IGNORE: usize = 1;

const SMALL_BYTES: usize = 8;
const LARGE_BYTES: usize = 1 << 20;
/// Time spent on rounds that do not count, then on those that do; and how many at least.
const WARM_UP: Duration = Duration::from_millis(100);
const BUDGET: Duration = Duration::from_millis(500);
const ROUNDS_MIN: u32 = 3;

type Init = unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;
type CommRank = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, c_int, c_int, c_int, c_int, c_int) -> c_int;
type Recv =
    unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int, c_int, *mut c_void) -> c_int;

struct Mpi {
    send: Send,
    recv: Recv,
    rank: c_int,
}

pub fn run(path: &Path) -> Result<()> {
    let library = Library::open(path, libc::RTLD_GLOBAL)?;
    // SAFETY: these are the signatures of the MPI standard for these names.
    let (init, finalize, comm_rank, send, recv) = unsafe {
        (
            library.function::<Init>(c"MPI_Init")?,
            library.function::<Finalize>(c"MPI_Finalize")?,
            library.function::<CommRank>(c"MPI_Comm_rank")?,
            library.function::<Send>(c"MPI_Send")?,
            library.function::<Recv>(c"MPI_Recv")?,
        )
    };
    let mut rank = 0;
    // SAFETY: MPI_Init takes null for arguments; `rank` is a place for one int.
    unsafe {
        ensure!(init(std::ptr::null_mut(), std::ptr::null_mut()) == 0, "MPI_Init failed");
        ensure!(comm_rank(COMM_WORLD, &mut rank) == 0, "MPI_Comm_rank failed");
    }
    let mpi = Mpi { send, recv, rank };
    let latency = mpi.measure(SMALL_BYTES)?;
    let transfer = mpi.measure(LARGE_BYTES)?;
    if rank == 0 {
        let bandwidth = LARGE_BYTES as f64 / transfer.as_secs_f64() / 1e6;
        println!("latency_us {:.1} bandwidth_mb_s {bandwidth:.0}", latency.as_secs_f64() * 1e6);
    }
    // SAFETY: initialised above.
    ensure!(unsafe { finalize() } == 0, "MPI_Finalize failed");
    Ok(())
}

impl Mpi {
    /// Time for one way of a message. Rank 0 decides when it is enough and says so in the first
    /// byte, so that a slow path takes no longer than a fast one.
    fn measure(&self, bytes: usize) -> Result<Duration> {
        let mut buffer = vec![0; bytes];
        self.rounds(&mut buffer, WARM_UP)?;
        let (time, rounds) = self.rounds(&mut buffer, BUDGET)?;
        Ok(time / (2 * rounds))
    }

    fn rounds(&self, buffer: &mut [u8], budget: Duration) -> Result<(Duration, u32)> {
        let begun = Instant::now();
        let mut rounds = 0;
        loop {
            rounds += 1;
            let last = rounds >= ROUNDS_MIN && begun.elapsed() > budget;
            if self.rank == 0 {
                buffer[0] = u8::from(last);
                self.send(buffer)?;
            }
            self.recv(buffer)?;
            if self.rank == 1 {
                self.send(buffer)?;
            }
            ensure!(buffer[1..].iter().all(|&byte| byte == 0), "a message came with other bytes");
            if buffer[0] == 1 {
                return Ok((begun.elapsed(), rounds));
            }
        }
    }

    fn send(&self, buffer: &[u8]) -> Result<()> {
        let (count, peer) = (buffer.len() as c_int, 1 - self.rank);
        // SAFETY: the buffer is as long as it is said to be.
        let code = unsafe { (self.send)(buffer.as_ptr().cast(), count, BYTE, peer, 0, COMM_WORLD) };
        ensure!(code == 0, "MPI_Send failed");
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8]) -> Result<()> {
        let (count, peer) = (buffer.len() as c_int, 1 - self.rank);
        let status = std::ptr::without_provenance_mut(STATUS_IGNORE);
        let buffer = buffer.as_mut_ptr().cast();
        // SAFETY: as in `send`; the status is the interface's "not wanted".
        let code = unsafe { (self.recv)(buffer, count, BYTE, peer, 0, COMM_WORLD, status) };
        ensure!(code == 0, "MPI_Recv failed");
        Ok(())
    }
}
