//! Remote atomics.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::ep::{OpOptions, endpoint, total};
use super::{status, status_long};
use crate::abi::*;
use crate::atomic::{AtomicKind, BYTES_MAX, element_bytes, supports};
use crate::engine::request::{AtomicRequest, Iov, RemoteIov};
use crate::info::{IOV_MAX, RMA_IOV_MAX};

type Void = *mut c_void;
type Desc = *mut *mut c_void;

pub static ATOMIC_OPS: OpsAtomic = OpsAtomic {
    size: size_of::<OpsAtomic>(),
    write,
    writev,
    writemsg,
    inject,
    readwrite,
    readwritev,
    readwritemsg,
    compwrite,
    compwritev,
    compwritemsg,
    writevalid,
    readwritevalid,
    compwritevalid,
};

/// An atomic call: kind, operation, type, target and context.
#[derive(Clone, Copy)]
struct AtomicCall {
    kind: AtomicKind,
    op: u32,
    datatype: u32,
    target: FiAddr,
    context: Void,
}

/// Local memory, counted in elements.
type Elements = (*const Ioc, usize);
const NOTHING: Elements = (ptr::null(), 0);

/// Local memory, counted in bytes, on the stack.
struct ElementPieces {
    list: [Iov; IOV_MAX],
    used: usize,
}

impl ElementPieces {
    /// # Safety
    /// `list` holds `count` elements.
    unsafe fn of((list, count): Elements, size: usize) -> Result<ElementPieces, Errno> {
        let none = Iov { base: ptr::null_mut(), len: 0 };
        let mut pieces = ElementPieces { list: [none; IOV_MAX], used: count };
        for (index, piece) in
            pieces.list.get_mut(..count).ok_or(Errno::EINVAL)?.iter_mut().enumerate()
        {
            // SAFETY: the caller upholds this function's safety contract.
            let given = unsafe { &*list.add(index) };
            let len = given.count.checked_mul(size).ok_or(Errno::EINVAL)?;
            *piece = Iov { base: given.addr.cast(), len };
        }
        Ok(pieces)
    }

    fn get(&self) -> &[Iov] {
        &self.list[..self.used]
    }
}

/// The remote memory of a message, in bytes.
///
/// # Safety
/// The message's remote vector is valid.
unsafe fn remote_memory(msg: &MsgAtomic, size: usize) -> Result<RemoteIov, Errno> {
    const { assert!(RMA_IOV_MAX == 1) };
    if msg.rma_iov_count != RMA_IOV_MAX {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller upholds this function's safety contract.
    let given = unsafe { &*msg.rma_iov };
    let len = given.count.checked_mul(size).ok_or(Errno::EINVAL)?;
    Ok(RemoteIov { offset: given.addr, len, key: given.key })
}

/// The three local vectors of an atomic operation.
#[derive(Clone, Copy)]
struct Local {
    operand: Elements,
    compare: Elements,
    result: Elements,
}

fn element_size(call: &AtomicCall) -> Result<usize, Errno> {
    if !supports(call.kind, call.datatype, call.op) {
        return Err(Errno::EOPNOTSUPP);
    }
    element_bytes(call.datatype).ok_or(Errno::EOPNOTSUPP)
}

/// Verifies that all vectors have the same length, and posts the operation. FI_ATOMIC_READ has no
/// operand.
///
/// # Safety
/// `ep` is an endpoint of this provider; all vectors are valid during the call, the memory until
/// completion.
unsafe fn post(
    ep: *mut FidEp,
    call: AtomicCall,
    local: Local,
    remote: RemoteIov,
    options: OpOptions,
) -> Result<(), Errno> {
    let size = element_size(&call)?;
    // SAFETY: the caller upholds this function's safety contract.
    let (operand, compare, result) = unsafe {
        let operand = if call.op == OP_READ { NOTHING } else { local.operand };
        (
            ElementPieces::of(operand, size)?,
            ElementPieces::of(local.compare, size)?,
            ElementPieces::of(local.result, size)?,
        )
    };
    let bytes = remote.len;
    if bytes > BYTES_MAX {
        return Err(Errno::EMSGSIZE);
    }
    let agrees = |pieces: &ElementPieces, wanted: bool| !wanted || total(pieces.get()) == bytes;
    if !agrees(&operand, call.op != OP_READ)
        || !agrees(&compare, call.kind == AtomicKind::Compare)
        || !agrees(&result, call.kind != AtomicKind::Update)
    {
        return Err(Errno::EINVAL);
    }
    let request = AtomicRequest {
        kind: call.kind,
        target: call.target,
        op: call.op,
        datatype: call.datatype,
        operand: operand.get(),
        compare: compare.get(),
        result: result.get(),
        remote,
        context: call.context as usize,
        inject: options.inject,
        notify: options.notify,
    };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe { endpoint(ep) }.with(|engine| engine.atomic(&request))
}

/// Posts a call with one remote address and the endpoint's completion flags.
///
/// # Safety
/// The safety contract of `post` holds.
unsafe fn plain(
    ep: *mut FidEp,
    call: AtomicCall,
    local: Local,
    (offset, key): (u64, u64),
) -> Result<(), Errno> {
    let counted = if call.kind == AtomicKind::Update { local.operand } else { local.result };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe {
        let len = total(ElementPieces::of(counted, element_size(&call)?)?.get());
        let options = endpoint(ep).transmit_options();
        post(ep, call, local, RemoteIov { offset, key, len }, options)
    }
}

/// Posts a `*msg` call.
///
/// # Safety
/// The safety contract of `post` holds; the message is valid during the call.
unsafe fn message(
    ep: *mut FidEp,
    kind: AtomicKind,
    msg: &MsgAtomic,
    compare: Elements,
    result: Elements,
    flags: u64,
) -> Result<(), Errno> {
    let call = AtomicCall {
        kind,
        op: msg.op,
        datatype: msg.datatype,
        target: msg.addr,
        context: msg.context,
    };
    let local = Local { operand: (msg.iov, msg.iov_count), compare, result };
    // SAFETY: the caller upholds this function's safety contract.
    unsafe {
        let remote = remote_memory(msg, element_size(&call)?)?;
        let options = endpoint(ep).message_options(flags, remote.len)?;
        post(ep, call, local, remote, options)
    }
}

fn one(addr: *const c_void, count: usize) -> Ioc {
    Ioc { addr: addr.cast_mut(), count }
}

unsafe extern "C" fn write(
    ep: *mut FidEp,
    buf: *const c_void,
    count: usize,
    _: Void,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let operand = one(buf, count);
    let call = AtomicCall { kind: AtomicKind::Update, op, datatype, target, context };
    let local = Local { operand: (&operand, 1), compare: NOTHING, result: NOTHING };
    // SAFETY: the program upholds libfabric's contract for fi_atomic.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn writev(
    ep: *mut FidEp,
    iov: *const Ioc,
    _: Desc,
    count: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let call = AtomicCall { kind: AtomicKind::Update, op, datatype, target, context };
    let local = Local { operand: (iov, count), compare: NOTHING, result: NOTHING };
    // SAFETY: the program upholds libfabric's contract for fi_atomicv.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, msg: *const MsgAtomic, flags: u64) -> isize {
    // SAFETY: the program upholds libfabric's contract for fi_atomicmsg.
    status_long(unsafe { message(ep, AtomicKind::Update, &*msg, NOTHING, NOTHING, flags) })
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buf: *const c_void,
    count: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
) -> isize {
    let operand = one(buf, count);
    let context = ptr::null_mut();
    let call = AtomicCall { kind: AtomicKind::Update, op, datatype, target, context };
    let local = Local { operand: (&operand, 1), compare: NOTHING, result: NOTHING };
    let posted = element_size(&call).and_then(|size| {
        let len = count.checked_mul(size).ok_or(Errno::EINVAL)?;
        // SAFETY: the program upholds libfabric's contract for fi_inject_atomic.
        unsafe {
            let options = endpoint(ep).inject_options(len)?;
            post(ep, call, local, RemoteIov { offset, key, len }, options)
        }
    });
    status_long(posted)
}

unsafe extern "C" fn readwrite(
    ep: *mut FidEp,
    buf: *const c_void,
    count: usize,
    _: Void,
    result: Void,
    _: Void,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let (operand, result) = (one(buf, count), one(result, count));
    let call = AtomicCall { kind: AtomicKind::Fetch, op, datatype, target, context };
    let local = Local { operand: (&operand, 1), compare: NOTHING, result: (&result, 1) };
    // SAFETY: the program upholds libfabric's contract for fi_fetch_atomic.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn readwritev(
    ep: *mut FidEp,
    iov: *const Ioc,
    _: Desc,
    count: usize,
    result: *mut Ioc,
    _: Desc,
    results: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let call = AtomicCall { kind: AtomicKind::Fetch, op, datatype, target, context };
    let local = Local { operand: (iov, count), compare: NOTHING, result: (result, results) };
    // SAFETY: the program upholds libfabric's contract for fi_fetch_atomicv.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn readwritemsg(
    ep: *mut FidEp,
    msg: *const MsgAtomic,
    result: *mut Ioc,
    _: Desc,
    results: usize,
    flags: u64,
) -> isize {
    let result = (result.cast_const(), results);
    // SAFETY: the program upholds libfabric's contract for fi_fetch_atomicmsg.
    status_long(unsafe { message(ep, AtomicKind::Fetch, &*msg, NOTHING, result, flags) })
}

unsafe extern "C" fn compwrite(
    ep: *mut FidEp,
    buf: *const c_void,
    count: usize,
    _: Void,
    compare: *const c_void,
    _: Void,
    result: Void,
    _: Void,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let (operand, compare, result) = (one(buf, count), one(compare, count), one(result, count));
    let call = AtomicCall { kind: AtomicKind::Compare, op, datatype, target, context };
    let local = Local { operand: (&operand, 1), compare: (&compare, 1), result: (&result, 1) };
    // SAFETY: the program upholds libfabric's contract for fi_compare_atomic.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn compwritev(
    ep: *mut FidEp,
    iov: *const Ioc,
    _: Desc,
    count: usize,
    compare: *const Ioc,
    _: Desc,
    compares: usize,
    result: *mut Ioc,
    _: Desc,
    results: usize,
    target: FiAddr,
    offset: u64,
    key: u64,
    datatype: u32,
    op: u32,
    context: Void,
) -> isize {
    let call = AtomicCall { kind: AtomicKind::Compare, op, datatype, target, context };
    let local =
        Local { operand: (iov, count), compare: (compare, compares), result: (result, results) };
    // SAFETY: the program upholds libfabric's contract for fi_compare_atomicv.
    status_long(unsafe { plain(ep, call, local, (offset, key)) })
}

unsafe extern "C" fn compwritemsg(
    ep: *mut FidEp,
    msg: *const MsgAtomic,
    compare: *const Ioc,
    _: Desc,
    compares: usize,
    result: *mut Ioc,
    _: Desc,
    results: usize,
    flags: u64,
) -> isize {
    let (compare, result) = ((compare, compares), (result.cast_const(), results));
    // SAFETY: the program upholds libfabric's contract for fi_compare_atomicmsg.
    status_long(unsafe { message(ep, AtomicKind::Compare, &*msg, compare, result, flags) })
}

/// The maximum number of elements of a call, and the size of an element.
fn valid(kind: AtomicKind, datatype: u32, op: u32) -> Result<(usize, usize), Errno> {
    match element_bytes(datatype) {
        Some(size) if supports(kind, datatype, op) => Ok((BYTES_MAX / size, size)),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

/// # Safety
/// `count` is null or writable.
unsafe fn answer(kind: AtomicKind, datatype: u32, op: u32, count: *mut usize) -> c_int {
    status(valid(kind, datatype, op).map(|(elements, _)| {
        if !count.is_null() {
            // SAFETY: the caller upholds this function's safety contract.
            unsafe { *count = elements };
        }
    }))
}

unsafe extern "C" fn writevalid(_: *mut FidEp, datatype: u32, op: u32, count: *mut usize) -> c_int {
    // SAFETY: the program upholds libfabric's contract for fi_atomicvalid.
    unsafe { answer(AtomicKind::Update, datatype, op, count) }
}

unsafe extern "C" fn readwritevalid(
    _: *mut FidEp,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: the program upholds libfabric's contract for fi_fetch_atomicvalid.
    unsafe { answer(AtomicKind::Fetch, datatype, op, count) }
}

unsafe extern "C" fn compwritevalid(
    _: *mut FidEp,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: the program upholds libfabric's contract for fi_compare_atomicvalid.
    unsafe { answer(AtomicKind::Compare, datatype, op, count) }
}

/// `fi_query_atomic` of the domain.
pub unsafe extern "C" fn query(
    _: *mut FidDomain,
    datatype: u32,
    op: u32,
    attr: *mut AtomicAttr,
    flags: u64,
) -> c_int {
    let kind = match flags & (FETCH_ATOMIC | COMPARE_ATOMIC) {
        0 => AtomicKind::Update,
        FETCH_ATOMIC => AtomicKind::Fetch,
        COMPARE_ATOMIC => AtomicKind::Compare,
        _ => return Errno::EBADFLAGS.negative(),
    };
    status(valid(kind, datatype, op).map(|(count, size)| {
        // SAFETY: the program upholds libfabric's contract for fi_query_atomic.
        unsafe { *attr = AtomicAttr { count, size } };
    }))
}
