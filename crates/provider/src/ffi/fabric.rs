//! The fabric object, which opens domains and event queues.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::{Head, Object, close, domain_calls, eq, nosys, object, ops, publish, share};
use crate::abi::*;
use crate::info;

#[repr(C)]
pub struct Fabric {
    head: Head<FidFabric>,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for Fabric {
    const CLASS: usize = CLASS_FABRIC;
}

impl Fabric {
    /// The interface version of the program, which the host writes after the fabric is opened.
    pub fn api_version(&self) -> u32 {
        // SAFETY: the host writes the field once, before any other call on the fabric.
        unsafe { (*self.head.get()).api_version }
    }
}

static OPS: Ops = ops(close::<Fabric>, nosys::bind, nosys::control);

static FABRIC_OPS: OpsFabric = OpsFabric {
    size: size_of::<OpsFabric>(),
    domain: open_domain,
    passive_ep: nosys::passive_ep,
    eq_open: open_eq,
    wait_open: nosys::wait_open,
    trywait,
    domain2: open_domain2,
};

/// The provider's `fabric`.
///
/// # Safety
/// The contract of `fi_fabric` holds.
pub unsafe extern "C" fn open(
    attr: *mut FabricAttr,
    fabric: *mut *mut FidFabric,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the host passes the attributes of an info of this provider; the name ends with NUL.
    let (known, api_version) = unsafe {
        let name = (*attr).name;
        let known = name.is_null() || std::ffi::CStr::from_ptr(name) == info::NAME;
        (known, (*attr).api_version)
    };
    if !known {
        return Errno::ENODATA.negative();
    }
    let made = Fabric {
        head: Head::new(FidFabric {
            fid: super::fid(CLASS_FABRIC, context, &OPS),
            ops: &FABRIC_OPS,
            api_version,
        }),
    };
    publish(Arc::new(made), fabric);
    0
}

unsafe extern "C" fn open_domain(
    fabric: *mut FidFabric,
    info: *mut Info,
    target: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `fabric` is a fabric of this provider, and the host made `info` from an info of this
    // provider.
    unsafe {
        let fabric = object::<Fabric, _>(fabric);
        domain_calls::open(fabric.api_version(), info, target, context)
    }
}

unsafe extern "C" fn open_domain2(
    fabric: *mut FidFabric,
    info: *mut Info,
    target: *mut *mut FidDomain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return Errno::EBADFLAGS.negative();
    }
    // SAFETY: `fabric` is a fabric of this provider, and the host made `info` from an info of this
    // provider.
    unsafe { open_domain(fabric, info, target, context) }
}

unsafe extern "C" fn open_eq(
    fabric: *mut FidFabric,
    attr: *mut EqAttr,
    target: *mut *mut FidEq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `fabric` is a fabric of this provider; the attributes are null or valid.
    unsafe {
        let _: Arc<Fabric> = share(fabric);
        eq::open(attr.as_ref(), target, context)
    }
}

/// Whether the program may sleep on the wait objects of these fids: 0 if no event waits in them.
unsafe extern "C" fn trywait(_: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int {
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: by the contract `fids` holds `count` fids of this provider, whose classes give
        // their types.
        let idle = unsafe {
            let fid = *fids.add(index);
            match (*fid).class {
                CLASS_EQ => object::<eq::EventQueue, _>(fid).is_idle(),
                CLASS_CQ => object::<super::cq::CompletionQueue, _>(fid).is_idle(),
                CLASS_CNTR => true,
                _ => return Errno::EINVAL.negative(),
            }
        };
        if !idle {
            return Errno::EAGAIN.negative();
        }
    }
    0
}
