//! Calls of an endpoint apart from its data calls: opening, binding, enabling, options, closing.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::av::AddressVector;
use super::domain::Domain;
use super::ep::Endpoint;
use super::{
    atomic, cm, msg, nosys, object, ops, publish, reclaim, rma, share, status, status_long, tagged,
};
use crate::abi::*;
use crate::info::{INJECT_SIZE, MESSAGE_SIZE_MAX};

/// Reported free entries of queues, which have no fixed depth.
const SIZE_LEFT: isize = 1024;

static OPS: Ops = ops(close, bind, control);

static EP_OPS: OpsEp = OpsEp {
    size: size_of::<OpsEp>(),
    cancel,
    getopt,
    setopt,
    tx_ctx: nosys::tx_ctx,
    rx_ctx: nosys::rx_ctx,
    rx_size_left: size_left,
    tx_size_left: size_left,
};

/// # Safety
/// The contract of `fi_endpoint` holds.
pub unsafe fn open(
    domain: Arc<Domain>,
    info: &Info,
    target: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    let fid = FidEp {
        fid: super::fid(CLASS_EP, context, &OPS),
        ops: &EP_OPS,
        cm: &cm::CM_OPS,
        msg: &msg::MSG_OPS,
        rma: &rma::RMA_OPS,
        tagged: &tagged::TAGGED_OPS,
        atomic: &atomic::ATOMIC_OPS,
        collective: std::ptr::null(),
    };
    // SAFETY: by the contract the attributes are null or valid, and the addresses have the given
    // lengths.
    let made = unsafe { Endpoint::new(fid, domain, info) };
    publish(Arc::new(made), target);
    0
}

/// Closes an endpoint.
unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: the program closes the endpoint once.
    unsafe { reclaim::<Endpoint>(fid) }.close();
    0
}

unsafe extern "C" fn bind(fid: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    // SAFETY: `fid` is an endpoint, and `other` is another object of this provider, whose class
    // gives its type.
    unsafe {
        let endpoint = object::<Endpoint, _>(fid);
        if endpoint.is_enabled() {
            return Errno::EOPBADSTATE.negative();
        }
        status(match (*other).class {
            CLASS_AV => {
                endpoint.bind_av(&object::<AddressVector, _>(other).av);
                Ok(())
            }
            CLASS_CQ => endpoint.bind_queue(&share(other), flags),
            CLASS_CNTR => endpoint.bind_counter(&share(other), flags),
            CLASS_EQ => Ok(()),
            _ => Err(Errno::EINVAL),
        })
    }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    status(match command {
        ENABLE => endpoint.enable(),
        // SAFETY: the argument of this command is a 64-bit word of flags.
        GETOPSFLAG => unsafe { ops_flags(endpoint, argument.cast()) },
        // SAFETY: the argument of this command is a 64-bit word of flags.
        SETOPSFLAG => unsafe { set_ops_flags(endpoint, argument.cast()) },
        _ => Err(Errno::ENOSYS),
    })
}

/// # Safety
/// `word` points to flags with the direction (FI_TRANSMIT or FI_RECV).
unsafe fn ops_flags(endpoint: &Endpoint, word: *mut u64) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the word.
    unsafe { *word = endpoint.direction(*word)?.op_flags() };
    Ok(())
}

/// # Safety
/// `word` points to flags with the direction (FI_TRANSMIT or FI_RECV) and the new operation flags.
unsafe fn set_ops_flags(endpoint: &Endpoint, word: *const u64) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the word.
    let flags = unsafe { *word };
    endpoint.direction(flags)?.set(flags & !(SEND | RECV));
    Ok(())
}

unsafe extern "C" fn cancel(fid: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    status_long(endpoint.with(|engine| engine.cancel(context as usize)))
}

unsafe extern "C" fn getopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    let known = match name {
        _ if level != OPT_ENDPOINT => return Errno::ENOPROTOOPT.negative(),
        OPT_MIN_MULTI_RECV => endpoint.min_multi_recv(),
        OPT_CM_DATA_SIZE => 0,
        OPT_MAX_MSG_SIZE | OPT_MAX_TAGGED_SIZE | OPT_MAX_RMA_SIZE => MESSAGE_SIZE_MAX,
        OPT_MAX_ATOMIC_SIZE => crate::atomic::BYTES_MAX,
        OPT_INJECT_MSG_SIZE
        | OPT_INJECT_TAGGED_SIZE
        | OPT_INJECT_RMA_SIZE
        | OPT_INJECT_ATOMIC_SIZE => INJECT_SIZE,
        _ => return Errno::ENOPROTOOPT.negative(),
    };
    // SAFETY: `value` holds `*len` bytes.
    unsafe {
        let room = std::mem::replace(&mut *len, size_of::<usize>());
        if room < size_of::<usize>() {
            return Errno::ETOOSMALL.negative();
        }
        value.cast::<usize>().write_unaligned(known);
    }
    0
}

unsafe extern "C" fn setopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    match name {
        OPT_MIN_MULTI_RECV if level == OPT_ENDPOINT => {}
        _ => return Errno::ENOPROTOOPT.negative(),
    }
    if len != size_of::<usize>() {
        return Errno::EINVAL.negative();
    }
    // SAFETY: `value` holds `len` bytes.
    let bytes = unsafe { value.cast::<usize>().read_unaligned() };
    endpoint.set_min_multi_recv(bytes);
    0
}

unsafe extern "C" fn size_left(_: *mut FidEp) -> isize {
    SIZE_LEFT
}
