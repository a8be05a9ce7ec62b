//! Reading and writing a peer's registered memory.

use std::ffi::c_void;

use libc::iovec;

use super::ep::{Terms, endpoint, piece, pieces, total};
use super::status_long;
use crate::abi::*;
use crate::engine::request::{Iov, RemoteIov, RmaKind, RmaRequest};
use crate::info::RMA_IOV_MAX;

type Void = *mut c_void;
type Desc = *mut *mut c_void;

pub static RMA_OPS: OpsRma = OpsRma {
    size: size_of::<OpsRma>(),
    read,
    readv,
    readmsg,
    write,
    writev,
    writemsg,
    inject,
    writedata,
    injectdata,
};

/// Local memory, and the peer's.
struct Transfer<'a> {
    kind: RmaKind,
    target: FiAddr,
    local: &'a [Iov],
    remote: &'a [RemoteIov],
    data: Option<u64>,
}

/// # Safety
/// `ep` is an endpoint of ours; the local memory is valid until the completion.
#[inline(always)]
unsafe fn post(
    ep: *mut FidEp,
    transfer: Transfer,
    context: Void,
    terms: Terms,
) -> Result<(), Errno> {
    let Transfer { kind, target, local, remote, data } = transfer;
    let Terms { notify, level, inject } = terms;
    let context = context as usize;
    let request = RmaRequest { kind, target, local, remote, data, context, inject, notify, level };
    // SAFETY: the caller's promise.
    unsafe { endpoint(ep) }.engine()?.rma(&request)
}

/// Where a plain call reaches at the peer: as many bytes as there are locally.
#[inline(always)]
fn remote(offset: u64, key: u64, local: &[Iov]) -> [RemoteIov; 1] {
    [RemoteIov { offset, len: total(local), key }]
}

unsafe extern "C" fn read(
    ep: *mut FidEp,
    buf: Void,
    len: usize,
    _: Void,
    target: FiAddr,
    offset: u64,
    key: u64,
    context: Void,
) -> isize {
    let local = piece(buf, len);
    let remote = remote(offset, key, &local);
    let kind = RmaKind::Read;
    let transfer = Transfer { kind, target, local: &local, remote: &remote, data: None };
    // SAFETY: libfabric's contract for fi_read.
    unsafe { status_long(post(ep, transfer, context, endpoint(ep).transmit_terms())) }
}

unsafe extern "C" fn readv(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    context: Void,
) -> isize {
    // SAFETY: libfabric's contract for fi_readv.
    status_long(unsafe { vector(ep, RmaKind::Read, (iov, count), target, (offset, key), context) })
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    // SAFETY: libfabric's contract for fi_readmsg.
    status_long(unsafe { message(ep, RmaKind::Read, &*msg, flags) })
}

unsafe extern "C" fn write(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    _: Void,
    target: FiAddr,
    offset: u64,
    key: u64,
    context: Void,
) -> isize {
    let local = piece(buf, len);
    let remote = remote(offset, key, &local);
    let kind = RmaKind::Write;
    let transfer = Transfer { kind, target, local: &local, remote: &remote, data: None };
    // SAFETY: libfabric's contract for fi_write.
    unsafe { status_long(post(ep, transfer, context, endpoint(ep).transmit_terms())) }
}

unsafe extern "C" fn writev(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    context: Void,
) -> isize {
    // SAFETY: libfabric's contract for fi_writev.
    status_long(unsafe { vector(ep, RmaKind::Write, (iov, count), target, (offset, key), context) })
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    // SAFETY: libfabric's contract for fi_writemsg.
    status_long(unsafe { message(ep, RmaKind::Write, &*msg, flags) })
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
) -> isize {
    // SAFETY: libfabric's contract for fi_inject_write.
    status_long(unsafe { inject_write(ep, &piece(buf, len), target, (offset, key), None) })
}

unsafe extern "C" fn writedata(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    _: Void,
    data: u64,
    target: FiAddr,
    offset: u64,
    key: u64,
    context: Void,
) -> isize {
    let local = piece(buf, len);
    let remote = remote(offset, key, &local);
    let kind = RmaKind::Write;
    let transfer = Transfer { kind, target, local: &local, remote: &remote, data: Some(data) };
    // SAFETY: libfabric's contract for fi_writedata.
    unsafe { status_long(post(ep, transfer, context, endpoint(ep).transmit_terms())) }
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    data: u64,
    target: FiAddr,
    offset: u64,
    key: u64,
) -> isize {
    // SAFETY: libfabric's contract for fi_inject_writedata.
    status_long(unsafe { inject_write(ep, &piece(buf, len), target, (offset, key), Some(data)) })
}

/// # Safety
/// As for `post`.
unsafe fn inject_write(
    ep: *mut FidEp,
    local: &[Iov],
    target: FiAddr,
    (offset, key): (u64, u64),
    data: Option<u64>,
) -> Result<(), Errno> {
    let remote = remote(offset, key, local);
    let transfer = Transfer { kind: RmaKind::Write, target, local, remote: &remote, data };
    // SAFETY: the caller's promise.
    unsafe {
        let terms = endpoint(ep).inject_terms(total(local))?;
        post(ep, transfer, std::ptr::null_mut(), terms)
    }
}

/// # Safety
/// As for `post`; the vector is valid during the call.
unsafe fn vector(
    ep: *mut FidEp,
    kind: RmaKind,
    (iov, count): (*const iovec, usize),
    target: FiAddr,
    (offset, key): (u64, u64),
    context: Void,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe {
        let local = pieces(iov, count)?;
        let remote = remote(offset, key, local);
        let transfer = Transfer { kind, target, local, remote: &remote, data: None };
        post(ep, transfer, context, endpoint(ep).transmit_terms())
    }
}

/// # Safety
/// As for `post`; the message is valid during the call.
unsafe fn message(ep: *mut FidEp, kind: RmaKind, msg: &MsgRma, flags: u64) -> Result<(), Errno> {
    let mut remote = [RemoteIov { offset: 0, len: 0, key: 0 }; RMA_IOV_MAX];
    let remote = remote.get_mut(..msg.rma_iov_count).ok_or(Errno::EINVAL)?;
    for (index, piece) in remote.iter_mut().enumerate() {
        // SAFETY: `rma_iov_count` pieces are there.
        let given = unsafe { &*msg.rma_iov.add(index) };
        *piece = RemoteIov { offset: given.addr, len: given.len, key: given.key };
    }
    // SAFETY: the caller's promise.
    unsafe {
        let local = pieces(msg.iov, msg.iov_count)?;
        let bytes = total(local);
        if remote.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.len)) != bytes {
            return Err(Errno::EINVAL);
        }
        let data = (flags & REMOTE_CQ_DATA != 0).then_some(msg.data);
        let transfer = Transfer { kind, target: msg.addr, local, remote, data };
        let terms = endpoint(ep).message_terms(flags, bytes)?;
        post(ep, transfer, msg.context, terms)
    }
}
