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
/// Rounds thrown away, then counted.
const SMALL_ROUNDS: [u32; 2] = [100, 1000];
const LARGE_ROUNDS: [u32; 2] = [2, 20];

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
    let latency = mpi.measure(SMALL_BYTES, SMALL_ROUNDS)?;
    let transfer = mpi.measure(LARGE_BYTES, LARGE_ROUNDS)?;
    if rank == 0 {
        let bandwidth = LARGE_BYTES as f64 / transfer.as_secs_f64() / 1e6;
        println!("latency_us {:.1} bandwidth_mb_s {bandwidth:.0}", latency.as_secs_f64() * 1e6);
    }
    // SAFETY: initialised above.
    ensure!(unsafe { finalize() } == 0, "MPI_Finalize failed");
    Ok(())
}

impl Mpi {
    /// Time for one way of a message.
    fn measure(&self, bytes: usize, [thrown_away, counted]: [u32; 2]) -> Result<Duration> {
        let mut buffer = vec![self.rank as u8; bytes];
        for _ in 0..thrown_away {
            self.round(&mut buffer)?;
        }
        let begun = Instant::now();
        for _ in 0..counted {
            self.round(&mut buffer)?;
        }
        // What rank 1 sends back is what it got: rank 0's own.
        ensure!(buffer.iter().all(|&byte| byte == 0), "a message came with other bytes");
        Ok(begun.elapsed() / (2 * counted))
    }

    fn round(&self, buffer: &mut [u8]) -> Result<()> {
        if self.rank == 0 {
            self.send(buffer)?;
            return self.recv(buffer);
        }
        self.recv(buffer)?;
        self.send(buffer)
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
