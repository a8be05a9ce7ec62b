//! The domain, in which endpoints, queues, counters and address vectors are opened.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::fabric::Fabric;
use super::{
    Head, Object, atomic, av, close, cntr, cq, ep, mr, nosys, object, ops, pollset, publish, share,
};
use crate::abi::*;
use crate::engine_set::EngineSet;
use crate::info::AddressFormat;
use crate::mr::MrTable;

#[repr(C)]
pub struct Domain {
    head: Head<FidDomain>,
    pub api_version: u32,
    /// Format of names in the domain's address vectors.
    pub format: AddressFormat,
    pub memory: Arc<MrTable>,
    /// The engines of the domain's enabled endpoints.
    pub engines: EngineSet,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for Domain {
    const CLASS: usize = CLASS_DOMAIN;
}

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
    fabric: &Fabric,
    info: *const Info,
    target: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the program passes an info that the provider has offered.
    let format = AddressFormat::of_code(unsafe { (*info).addr_format });
    let made = Domain {
        head: Head::new(FidDomain {
            fid: super::fid(CLASS_DOMAIN, context, &OPS),
            ops: &DOMAIN_OPS,
            mr: &mr::MR_OPS,
        }),
        api_version: fabric.api_version(),
        format,
        memory: Arc::new(MrTable::default()),
        engines: EngineSet::new(),
    };
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
    unsafe { cq::open(object(domain), attr.as_mut(), target, context) }
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
    unsafe { ep::open(share(domain), &*info, target, context) }
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
