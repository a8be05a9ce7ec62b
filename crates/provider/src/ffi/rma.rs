//! Reads and writes of a peer's registered memory.

use std::ffi::c_void;

use libc::iovec;

use super::ep::{OpOptions, endpoint, piece, pieces, total};
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

/// Local memory and remote memory of a transfer.
struct Transfer<'a> {
    kind: RmaKind,
    target: FiAddr,
    local: &'a [Iov],
    remote: RemoteIov,
    data: Option<u64>,
}

/// # Safety
/// `ep` is an endpoint of this provider; the local memory is valid until the completion.
#[inline(always)]
unsafe fn post(
    ep: *mut FidEp,
    transfer: Transfer,
    context: Void,
    options: OpOptions,
) -> Result<(), Errno> {
    let Transfer { kind, target, local, remote, data } = transfer;
    let OpOptions { notify, inject, .. } = options;
    let context = context as usize;
    let request = RmaRequest { kind, target, local, remote, data, context, inject, notify };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe { endpoint(ep) }.with(|engine| engine.rma(&request))
}

/// The remote address of a call without remote vectors.
struct RemoteTarget {
    target: FiAddr,
    offset: u64,
    key: u64,
}

impl RemoteTarget {
    /// The remote memory, which has the size of the local memory.
    #[inline(always)]
    fn memory(&self, local: &[Iov]) -> RemoteIov {
        RemoteIov { offset: self.offset, len: total(local), key: self.key }
    }
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_read.
    status_long(unsafe { plain(ep, RmaKind::Read, &piece(buf, len), peer, None, context) })
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_readv.
    let posted = unsafe {
        pieces(iov, count).and_then(|local| plain(ep, RmaKind::Read, local, peer, None, context))
    };
    status_long(posted)
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_readmsg.
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_write.
    status_long(unsafe { plain(ep, RmaKind::Write, &piece(buf, len), peer, None, context) })
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_writev.
    let posted = unsafe {
        pieces(iov, count).and_then(|local| plain(ep, RmaKind::Write, local, peer, None, context))
    };
    status_long(posted)
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_writemsg.
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_inject_write.
    status_long(unsafe { inject_write(ep, &piece(buf, len), peer, None) })
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_writedata.
    status_long(unsafe { plain(ep, RmaKind::Write, &piece(buf, len), peer, Some(data), context) })
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
    let peer = RemoteTarget { target, offset, key };
    // SAFETY: the program upholds libfabric's contract for fi_inject_writedata.
    status_long(unsafe { inject_write(ep, &piece(buf, len), peer, Some(data)) })
}

/// Posts a call with the endpoint's operation flags.
///
/// # Safety
/// The safety contract of `post` holds.
#[inline(always)]
unsafe fn plain(
    ep: *mut FidEp,
    kind: RmaKind,
    local: &[Iov],
    peer: RemoteTarget,
    data: Option<u64>,
    context: Void,
) -> Result<(), Errno> {
    let remote = peer.memory(local);
    let transfer = Transfer { kind, target: peer.target, local, remote, data };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe { post(ep, transfer, context, endpoint(ep).transmit_options()) }
}

/// # Safety
/// The safety contract of `post` holds.
unsafe fn inject_write(
    ep: *mut FidEp,
    local: &[Iov],
    peer: RemoteTarget,
    data: Option<u64>,
) -> Result<(), Errno> {
    let (kind, remote) = (RmaKind::Write, peer.memory(local));
    let transfer = Transfer { kind, target: peer.target, local, remote, data };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe {
        let options = endpoint(ep).inject_options(total(local))?;
        post(ep, transfer, std::ptr::null_mut(), options)
    }
}

/// # Safety
/// The safety contract of `post` holds; the message is valid during the call.
unsafe fn message(ep: *mut FidEp, kind: RmaKind, msg: &MsgRma, flags: u64) -> Result<(), Errno> {
    const { assert!(RMA_IOV_MAX == 1) };
    if msg.rma_iov_count != RMA_IOV_MAX {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller upholds this function's safety contract.
    unsafe {
        let given = &*msg.rma_iov;
        let remote = RemoteIov { offset: given.addr, len: given.len, key: given.key };
        let local = pieces(msg.iov, msg.iov_count)?;
        let bytes = total(local);
        if remote.len != bytes {
            return Err(Errno::EINVAL);
        }
        let data = (flags & REMOTE_CQ_DATA != 0).then_some(msg.data);
        let transfer = Transfer { kind, target: msg.addr, local, remote, data };
        let options = endpoint(ep).message_options(flags, bytes)?;
        post(ep, transfer, msg.context, options)
    }
}
