//! Untagged messages.

use std::ffi::c_void;

use libc::iovec;

use super::ep::{OpOptions, endpoint, piece, pieces, total};
use super::status_long;
use crate::abi::*;
use crate::engine::request::{Iov, RecvRequest, SendRequest};

type Void = *mut c_void;
type Desc = *mut *mut c_void;

pub static MSG_OPS: OpsMsg = OpsMsg {
    size: size_of::<OpsMsg>(),
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
};

/// # Safety
/// `ep` is an endpoint of this provider; the payload is valid until the completion.
#[inline(always)]
unsafe fn post_send(
    ep: *mut FidEp,
    payload: &[Iov],
    target: FiAddr,
    data: Option<u64>,
    context: Void,
    options: OpOptions,
) -> Result<(), Errno> {
    let OpOptions { notify, level, inject } = options;
    let context = context as usize;
    let request = SendRequest { target, payload, tag: None, data, context, inject, notify, level };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe { endpoint(ep) }.with(|engine| engine.send(&request))
}

/// # Safety
/// The safety contract of `post_send` holds.
#[inline(always)]
unsafe fn post_recv(
    ep: *mut FidEp,
    payload: &[Iov],
    source: FiAddr,
    context: Void,
    notify: bool,
    multi: bool,
) -> Result<(), Errno> {
    if multi && payload.len() != 1 {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller upholds this function's safety contract.
    let endpoint = unsafe { endpoint(ep) };
    let source = endpoint.source(source);
    let context = context as usize;
    let request = RecvRequest { source, payload, tag: None, context, notify, multi };
    endpoint.with(|engine| engine.recv(&request))
}

unsafe extern "C" fn recv(
    ep: *mut FidEp,
    buf: Void,
    len: usize,
    _: Void,
    source: FiAddr,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_recv.
    unsafe {
        let (notify, multi) = (endpoint(ep).receive_notify(), endpoint(ep).receives_multi());
        status_long(post_recv(ep, &piece(buf, len), source, context, notify, multi))
    }
}

unsafe extern "C" fn recvv(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    source: FiAddr,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_recvv.
    unsafe {
        let (notify, multi) = (endpoint(ep).receive_notify(), endpoint(ep).receives_multi());
        let posted = pieces(iov, count)
            .and_then(|payload| post_recv(ep, payload, source, context, notify, multi));
        status_long(posted)
    }
}

unsafe extern "C" fn recvmsg(ep: *mut FidEp, msg: *const Msg, flags: u64) -> isize {
    if flags & (PEEK | CLAIM | DISCARD) != 0 {
        return Errno::EOPNOTSUPP.negative() as isize;
    }
    // SAFETY: the program upholds libfabric's contract for fi_recvmsg.
    unsafe {
        let msg = &*msg;
        let notify = endpoint(ep).receive_notify_for(flags);
        let multi = flags & MULTI_RECV != 0;
        let posted = pieces(msg.iov, msg.iov_count)
            .and_then(|payload| post_recv(ep, payload, msg.addr, msg.context, notify, multi));
        status_long(posted)
    }
}

unsafe extern "C" fn send(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    _: Void,
    target: FiAddr,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_send.
    unsafe {
        let options = endpoint(ep).transmit_options();
        status_long(post_send(ep, &piece(buf, len), target, None, context, options))
    }
}

unsafe extern "C" fn sendv(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    target: FiAddr,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_sendv.
    unsafe {
        let options = endpoint(ep).transmit_options();
        let posted = pieces(iov, count)
            .and_then(|payload| post_send(ep, payload, target, None, context, options));
        status_long(posted)
    }
}

unsafe extern "C" fn sendmsg(ep: *mut FidEp, msg: *const Msg, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_sendmsg.
    unsafe {
        let msg = &*msg;
        let data = (flags & REMOTE_CQ_DATA != 0).then_some(msg.data);
        let posted = pieces(msg.iov, msg.iov_count).and_then(|payload| {
            let options = endpoint(ep).message_options(flags, total(payload))?;
            post_send(ep, payload, msg.addr, data, msg.context, options)
        });
        status_long(posted)
    }
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    target: FiAddr,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_inject.
    unsafe {
        let posted = endpoint(ep).inject_options(len).and_then(|options| {
            post_send(ep, &piece(buf, len), target, None, std::ptr::null_mut(), options)
        });
        status_long(posted)
    }
}

unsafe extern "C" fn senddata(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    _: Void,
    data: u64,
    target: FiAddr,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_senddata.
    unsafe {
        let options = endpoint(ep).transmit_options();
        status_long(post_send(ep, &piece(buf, len), target, Some(data), context, options))
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    data: u64,
    target: FiAddr,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_injectdata.
    unsafe {
        let posted = endpoint(ep).inject_options(len).and_then(|options| {
            post_send(ep, &piece(buf, len), target, Some(data), std::ptr::null_mut(), options)
        });
        status_long(posted)
    }
}
