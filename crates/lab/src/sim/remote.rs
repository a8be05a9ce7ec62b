//! Remote memory in the simulation: regions, and the expected effects of operations on regions.
//!
//! Every operation works on bytes of its own, so its effect can be checked exactly: a completed
//! operation has changed its bytes once; a refused operation has changed nothing.

use landbridge_proto::endpoint::{
    AtomicRequest, CompletionKind, Failure, Memory, OperationCompletion,
};
use landbridge_testbed::endpoint::{ByteStore, REFUSED};

use super::memory::{Arena, Piece, content};
use super::{EventCounts, Violation, require};

/// Bytes of each process's region.
pub const REGION_BYTES: u64 = 24 << 10;
/// Bytes of the longest write. A write that ends outside of the region may leave its first
/// fragments in these last bytes of the region, so no other operation uses these bytes.
pub const WRITE_BYTES_MAX: u64 = 3_000;
/// Bytes at the front of the region that are only read.
pub const CONSTANT_BYTES: u64 = 4 << 10;
/// Offsets count from this base, as virtual addresses do.
pub const REGION_BASE: u64 = 0x7f00_0000_0000;

/// Registered memory of one process.
pub struct Region {
    pub key: u64,
    pub piece: Piece,
    /// Next byte that no operation has used.
    pub fresh: u64,
}

/// An operation on remote memory.
pub struct RemoteOperation {
    pub node: usize,
    pub to: usize,
    /// Local memory of the operation.
    pub piece: Piece,
    pub result: Option<Piece>,
    /// Offset in the region, from 0.
    pub at: u64,
    pub is_refused: bool,
    pub what: RemoteKind,
}

/// The kind of a remote operation.
pub enum RemoteKind {
    /// A write, with the number of its completion data if it has any.
    Write(Option<usize>),
    Read,
    Atomic {
        request: AtomicRequest,
        operands: Vec<u8>,
    },
}

/// The state in which an operation completes.
#[derive(Clone, Copy)]
pub struct CompletionContext<'a> {
    /// The target region.
    pub target: Piece,
    pub is_lost: bool,
    pub writes_with_data: &'a [WriteWithData],
    pub arena: &'a Arena,
}

/// A write with completion data for its target.
pub struct WriteWithData {
    pub from: usize,
    pub to: usize,
    pub is_refused: bool,
    pub times: u32,
}

/// The number of the `fi_op` sum.
pub const SUM: u8 = 2;
/// The number of compare and swap.
pub const SWAP_IF_EQUAL: u8 = 10;
/// The number of an atomic read.
pub const READ: u8 = 7;

impl Region {
    pub fn new(node: usize, arena: &mut Arena) -> Self {
        let piece = arena.keep(content(pattern(node), REGION_BYTES), true);
        Self { key: 0x5000 + node as u64, piece, fresh: CONSTANT_BYTES }
    }

    /// Offset in the region of a request, if the whole range lies inside.
    pub fn resolve(&self, key: u64, offset: u64, length: u64) -> Option<u64> {
        let at = offset.checked_sub(REGION_BASE)?;
        let end = at.checked_add(length)?;
        (key == self.key && end <= REGION_BYTES).then_some(at)
    }

    /// Reserves bytes for one operation alone; `None` if the region has no free bytes.
    pub fn reserve(&mut self, length: u64) -> Option<u64> {
        let at = self.fresh;
        (at + length <= REGION_BYTES - WRITE_BYTES_MAX).then(|| {
            self.fresh += length;
            at
        })
    }
}

/// Number of the byte pattern in the region of `node`.
pub fn pattern(node: usize) -> usize {
    90_000 + node
}

/// Performs an atomic operation, and returns the old bytes.
pub fn perform(
    request: &AtomicRequest,
    operands: &[u8],
    region: Piece,
    at: u64,
    arena: &mut Arena,
) -> Result<Vec<u8>, Violation> {
    let length = request.length as u64;
    let old = arena.read(region, at, length)?.to_vec();
    let new = combine(request, operands, &old)?;
    arena.write(&region, at, &new)?;
    Ok(old)
}

fn combine(request: &AtomicRequest, operands: &[u8], old: &[u8]) -> Result<Vec<u8>, Violation> {
    let size = old.len();
    let parts = match request.operation {
        READ => 0,
        SWAP_IF_EQUAL => 2,
        _ => 1,
    };
    require!(operands.len() == parts * size, "an atomic operation lost operands");
    require!(request.compare == (parts == 2), "an atomic operation lost its kind");
    Ok(match request.operation {
        READ => old.to_vec(),
        SWAP_IF_EQUAL if operands[size..] == *old => operands[..size].to_vec(),
        SWAP_IF_EQUAL => old.to_vec(),
        _ => old.iter().zip(operands).map(|(old, operand)| old.wrapping_add(*operand)).collect(),
    })
}

impl RemoteOperation {
    /// Checks the effects of the operation.
    pub fn finish(
        &self,
        done: &OperationCompletion,
        id: usize,
        surroundings: &CompletionContext<'_>,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let CompletionContext { target, is_lost, writes_with_data, arena } = *surroundings;
        require!(done.kind == self.work(), "{done:?} is of another kind");
        match done.error {
            Some(Failure::Errno(errno)) if errno != REFUSED => {
                counts.count("remote operations failed");
                require!(is_lost, "{done:?} although the peer lives");
                return Ok(());
            }
            Some(error) => {
                counts.count("remote operations refused");
                let is_right = self.is_refused && error == Failure::Errno(REFUSED);
                require!(is_right, "{done:?} is refused");
                return Ok(());
            }
            None => require!(!self.is_refused, "{done:?} should have been refused"),
        }
        counts.count("remote operations done");
        let length = self.piece.size();
        match &self.what {
            RemoteKind::Write(data) => {
                let bytes = arena.read(target, self.at, length)?;
                require!(bytes == content(id, length), "write {id} is not in place");
                let times = data.map(|data| writes_with_data[data].times);
                require!(times.is_none_or(|times| times == 1), "write {id} is not announced");
            }
            RemoteKind::Read => {
                let right = &content(pattern(self.to), REGION_BYTES)[self.at as usize..];
                let bytes = arena.read(self.piece, 0, length)?;
                require!(bytes == &right[..length as usize], "read {id} brought wrong bytes");
            }
            RemoteKind::Atomic { request, operands } => {
                self.check_atomic(id, request, operands, target, arena)?
            }
        }
        Ok(())
    }

    fn check_atomic(
        &self,
        id: usize,
        request: &AtomicRequest,
        operands: &[u8],
        target: Piece,
        arena: &Arena,
    ) -> Result<(), Violation> {
        let (at, length) = (self.at as usize, request.length as usize);
        let old = &content(pattern(self.to), REGION_BYTES)[at..at + length];
        let new = combine(request, operands, old)?;
        let is_there = arena.read(target, self.at, length as u64)? == new;
        require!(is_there, "atomic operation {id} was not performed exactly once");
        if let Some(result) = self.result {
            let bytes = arena.read(result, 0, length as u64)?;
            require!(bytes == old, "atomic operation {id} brought wrong old values");
        }
        Ok(())
    }

    fn work(&self) -> CompletionKind {
        match &self.what {
            RemoteKind::Write(_) => CompletionKind::Write,
            RemoteKind::Read => CompletionKind::Read,
            RemoteKind::Atomic { request, .. } if request.fetch => CompletionKind::FetchAtomic,
            RemoteKind::Atomic { .. } => CompletionKind::Atomic,
        }
    }
}
