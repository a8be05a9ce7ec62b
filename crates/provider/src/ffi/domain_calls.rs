//! Calls of a domain, which open endpoints, queues, counters and address vectors.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::domain::Domain;
use super::{
    atomic, av, close, cntr, cq, ep_calls, mr, nosys, object, ops, pollset, publish, share,
};
use crate::abi::*;
use crate::info::AddressFormat;

static OPS: Ops = ops(close::<Domain>, bind, nosys::control);

static DOMAIN_OPS: OpsDomain = OpsDomain {
    size: size_of::<OpsDomain>(),
    av_open: open_av,
    cq_open: open_cq,
    endpoint: open_endpoint,
    scalable_ep: nosys::scalable_ep,
    cntr_open: open_cntr,
    poll_open: open_poll,
    stx_ctx: nosys::stx_ctx,
    srx_ctx: nosys::srx_ctx,
    query_atomic: atomic::query,
    query_collective: nosys::query_collective,
    endpoint2: open_endpoint2,
};

/// # Safety
/// The contract of `fi_domain` holds.
pub unsafe fn open(
    api_version: u32,
    info: *const Info,
    target: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the program passes an info that the provider has offered.
    let format = AddressFormat::of_code(unsafe { (*info).addr_format });
    let fid = FidDomain {
        fid: super::fid(CLASS_DOMAIN, context, &OPS),
        ops: &DOMAIN_OPS,
        mr: &mr::MR_OPS,
    };
    let made = Domain::new(fid, api_version, format);
    publish(Arc::new(made), target);
    0
}

/// Binds an event queue for asynchronous registration. The queue gets no events, since registration
/// always finishes within the call.
unsafe extern "C" fn bind(_: *mut Fid, other: *mut Fid, _: u64) -> c_int {
    // SAFETY: `other` is a fid of this provider.
    match unsafe { (*other).class } {
        CLASS_EQ => 0,
        _ => Errno::EINVAL.negative(),
    }
}

unsafe extern "C" fn open_av(
    domain: *mut FidDomain,
    attr: *mut AvAttr,
    target: *mut *mut FidAv,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is a domain of this provider; the attributes are valid during the call.
    unsafe { av::open(object(domain), attr.as_mut(), target, context) }
}

unsafe extern "C" fn open_cq(
    domain: *mut FidDomain,
    attr: *mut CqAttr,
    target: *mut *mut FidCq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is a domain of this provider; the attributes are valid during the call.
    unsafe {
        let domain = object::<Domain, _>(domain);
        cq::open(domain.api_version, attr.as_mut(), target, context)
    }
}

unsafe extern "C" fn open_cntr(
    _: *mut FidDomain,
    attr: *mut CntrAttr,
    target: *mut *mut FidCntr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the attributes are valid during the call.
    unsafe { cntr::open(attr.as_mut(), target, context) }
}

unsafe extern "C" fn open_poll(
    _: *mut FidDomain,
    attr: *mut PollAttr,
    target: *mut *mut FidPoll,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the attributes are null or valid during the call.
    unsafe { pollset::open(attr.as_ref(), target, context) }
}

unsafe extern "C" fn open_endpoint(
    domain: *mut FidDomain,
    info: *mut Info,
    target: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is a domain of this provider, and `info` was offered by the provider.
    unsafe { ep_calls::open(share(domain), &*info, target, context) }
}

unsafe extern "C" fn open_endpoint2(
    domain: *mut FidDomain,
    info: *mut Info,
    target: *mut *mut FidEp,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return Errno::EBADFLAGS.negative();
    }
    // SAFETY: `domain` is a domain of this provider, and `info` was offered by the provider.
    unsafe { open_endpoint(domain, info, target, context) }
}
