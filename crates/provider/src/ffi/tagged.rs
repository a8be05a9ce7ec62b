//! Tagged messages, with peek, claim and discard.

use std::ffi::c_void;

use libc::iovec;

use super::ep::{Endpoint, OpOptions, endpoint, piece, pieces, total};
use super::status_long;
use crate::abi::*;
use crate::engine::request::{ClaimRequest, Iov, PeekRequest, RecvRequest, SendRequest};

type Void = *mut c_void;
type Desc = *mut *mut c_void;

pub static TAGGED_OPS: OpsTagged = OpsTagged {
    size: size_of::<OpsTagged>(),
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

/// Target, tag and remote CQ data of a message.
struct TaggedTarget {
    target: FiAddr,
    tag: u64,
    data: Option<u64>,
}

/// # Safety
/// `ep` is an endpoint of this provider; the payload is valid until the completion.
#[inline(always)]
unsafe fn post_send(
    ep: *mut FidEp,
    payload: &[Iov],
    tagged: TaggedTarget,
    context: Void,
    options: OpOptions,
) -> Result<(), Errno> {
    let request = SendRequest {
        target: tagged.target,
        payload,
        tag: Some(tagged.tag),
        data: tagged.data,
        context: context as usize,
        inject: options.inject,
        notify: options.notify,
        level: options.level,
    };
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
    tag: (u64, u64),
    context: Void,
    notify: bool,
) -> Result<(), Errno> {
    // SAFETY: the caller upholds this function's safety contract.
    let endpoint = unsafe { endpoint(ep) };
    let request = RecvRequest {
        source: endpoint.source(source),
        payload,
        tag: Some(tag),
        context: context as usize,
        notify,
        multi: false,
    };
    endpoint.with(|engine| engine.recv(&request))
}

unsafe extern "C" fn recv(
    ep: *mut FidEp,
    buf: Void,
    len: usize,
    _: Void,
    source: FiAddr,
    tag: u64,
    ignore: u64,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_trecv.
    unsafe {
        let notify = endpoint(ep).receive_notify();
        status_long(post_recv(ep, &piece(buf, len), source, (tag, ignore), context, notify))
    }
}

unsafe extern "C" fn recvv(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    source: FiAddr,
    tag: u64,
    ignore: u64,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_trecvv.
    unsafe {
        let notify = endpoint(ep).receive_notify();
        let posted = pieces(iov, count)
            .and_then(|payload| post_recv(ep, payload, source, (tag, ignore), context, notify));
        status_long(posted)
    }
}

unsafe extern "C" fn recvmsg(ep: *mut FidEp, msg: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_trecvmsg.
    let (endpoint, msg) = unsafe { (endpoint(ep), &*msg) };
    if flags & PEEK != 0 {
        return status_long(peek(endpoint, msg, flags));
    }
    let notify = endpoint.receive_notify_for(flags);
    // SAFETY: the program upholds libfabric's contract for fi_trecvmsg.
    let posted = unsafe {
        pieces(msg.iov, msg.iov_count).and_then(|payload| match flags & (CLAIM | DISCARD) {
            0 => {
                let tag = (msg.tag, msg.ignore);
                post_recv(ep, payload, msg.addr, tag, msg.context, notify)
            }
            _ => claim(endpoint, msg, payload, flags),
        })
    };
    status_long(posted)
}

/// Posts a peek, which a completion or `EAGAIN` answers: see `engine::peeks`.
fn peek(endpoint: &Endpoint, msg: &MsgTagged, flags: u64) -> Result<(), Errno> {
    let request = PeekRequest {
        source: endpoint.source(msg.addr),
        tag: msg.tag,
        ignore: msg.ignore,
        context: msg.context as usize,
        claim: flags & CLAIM != 0,
        discard: flags & DISCARD != 0,
        repeats: msg.addr == ADDR_UNSPEC && endpoint.repeats_peeks(),
    };
    endpoint.with(|engine| engine.peek(&request))
}

/// Receives or drops a claimed message. The context identifies the message, not address or tag.
fn claim(endpoint: &Endpoint, msg: &MsgTagged, payload: &[Iov], flags: u64) -> Result<(), Errno> {
    if flags & CLAIM == 0 {
        return Err(Errno::EBADFLAGS);
    }
    let request = ClaimRequest {
        payload,
        context: msg.context as usize,
        notify: endpoint.receive_notify_for(flags),
        discard: flags & DISCARD != 0,
    };
    endpoint.with(|engine| engine.claim(&request))
}

unsafe extern "C" fn send(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    _: Void,
    target: FiAddr,
    tag: u64,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tsend.
    unsafe {
        let options = endpoint(ep).transmit_options();
        let tagged = TaggedTarget { target, tag, data: None };
        status_long(post_send(ep, &piece(buf, len), tagged, context, options))
    }
}

unsafe extern "C" fn sendv(
    ep: *mut FidEp,
    iov: *const iovec,
    _: Desc,
    count: usize,
    target: FiAddr,
    tag: u64,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tsendv.
    unsafe {
        let options = endpoint(ep).transmit_options();
        let tagged = TaggedTarget { target, tag, data: None };
        let posted =
            pieces(iov, count).and_then(|payload| post_send(ep, payload, tagged, context, options));
        status_long(posted)
    }
}

unsafe extern "C" fn sendmsg(ep: *mut FidEp, msg: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tsendmsg.
    unsafe {
        let msg = &*msg;
        let data = (flags & REMOTE_CQ_DATA != 0).then_some(msg.data);
        let tagged = TaggedTarget { target: msg.addr, tag: msg.tag, data };
        let posted = pieces(msg.iov, msg.iov_count).and_then(|payload| {
            let options = endpoint(ep).message_options(flags, total(payload))?;
            post_send(ep, payload, tagged, msg.context, options)
        });
        status_long(posted)
    }
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    target: FiAddr,
    tag: u64,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tinject.
    unsafe {
        let tagged = TaggedTarget { target, tag, data: None };
        let posted = endpoint(ep).inject_options(len).and_then(|options| {
            post_send(ep, &piece(buf, len), tagged, std::ptr::null_mut(), options)
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
    tag: u64,
    context: Void,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tsenddata.
    unsafe {
        let options = endpoint(ep).transmit_options();
        let tagged = TaggedTarget { target, tag, data: Some(data) };
        status_long(post_send(ep, &piece(buf, len), tagged, context, options))
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    buf: *const c_void,
    len: usize,
    data: u64,
    target: FiAddr,
    tag: u64,
) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_tinjectdata.
    unsafe {
        let tagged = TaggedTarget { target, tag, data: Some(data) };
        let posted = endpoint(ep).inject_options(len).and_then(|options| {
            post_send(ep, &piece(buf, len), tagged, std::ptr::null_mut(), options)
        });
        status_long(posted)
    }
}
