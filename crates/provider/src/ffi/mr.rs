//! Memory registration.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use libc::iovec;

use super::domain::Domain;
use super::{Head, Object, nosys, ops, publish, reclaim, share, status};
use crate::abi::*;
use crate::mr::{Region, access_of};

#[repr(C)]
pub struct MemoryRegion {
    head: Head<FidMr>,
    key: u64,
    domain: Arc<Domain>,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for MemoryRegion {
    const CLASS: usize = CLASS_MR;
}

static OPS: Ops = ops(close, bind, control);

pub static MR_OPS: OpsMr = OpsMr { size: size_of::<OpsMr>(), reg, regv, regattr };

/// Arguments of a registration.
struct Registration {
    base: *const c_void,
    len: usize,
    access: u64,
    key: u64,
    context: *mut c_void,
}

/// # Safety
/// `fid` is a domain of this provider; `target` receives the result.
unsafe fn register(
    fid: *mut Fid,
    registration: Registration,
    target: *mut *mut FidMr,
) -> Result<(), Errno> {
    // SAFETY: the caller upholds this function's safety contract.
    let domain: Arc<Domain> = unsafe { share(fid) };
    let region = Region {
        base: registration.base.expose_provenance(),
        len: registration.len,
        access: access_of(registration.access),
    };
    domain.memory.insert(registration.key, region)?;
    let made = MemoryRegion {
        head: Head::new(FidMr {
            fid: super::fid(CLASS_MR, registration.context, &OPS),
            mem_desc: ptr::null_mut(),
            key: registration.key,
        }),
        key: registration.key,
        domain,
    };
    publish(Arc::new(made), target);
    Ok(())
}

unsafe extern "C" fn reg(
    fid: *mut Fid,
    base: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    key: u64,
    _: u64,
    target: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    if offset != 0 {
        return Errno::EINVAL.negative();
    }
    // SAFETY: the program upholds libfabric's contract for fi_mr_reg.
    status(unsafe { register(fid, Registration { base, len, access, key, context }, target) })
}

unsafe extern "C" fn regv(
    fid: *mut Fid,
    iov: *const iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    target: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    if count != 1 {
        return Errno::EINVAL.negative();
    }
    // SAFETY: the program upholds libfabric's contract for fi_mr_regv; `iov` holds one piece.
    unsafe {
        let piece = &*iov;
        reg(fid, piece.iov_base, piece.iov_len, access, offset, key, flags, target, context)
    }
}

unsafe extern "C" fn regattr(
    fid: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    target: *mut *mut FidMr,
) -> c_int {
    // SAFETY: the program upholds libfabric's contract for fi_mr_regattr; only fields of 1.17 are
    // read.
    unsafe {
        let attr = &*attr;
        if attr.iface != HMEM_SYSTEM {
            return Errno::ENOSYS.negative();
        }
        regv(
            fid,
            attr.mr_iov,
            attr.iov_count,
            attr.access,
            attr.offset,
            attr.requested_key,
            flags,
            target,
            attr.context,
        )
    }
}

/// Closes a region. After the return no engine of the domain touches the memory any more.
unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: the program closes the region once.
    let region = unsafe { reclaim::<MemoryRegion>(fid) };
    region.domain.memory.remove(region.key);
    region.domain.engines.fence();
    0
}

/// Accepts counters and endpoints, which have no effect (`mr_mode` is 0).
unsafe extern "C" fn bind(_: *mut Fid, other: *mut Fid, _: u64) -> c_int {
    // SAFETY: `other` is a fid of this provider.
    match unsafe { (*other).class } {
        CLASS_EP | CLASS_CNTR => 0,
        _ => Errno::EINVAL.negative(),
    }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    match command {
        ENABLE => 0,
        // SAFETY: `nosys::control` does not use its arguments.
        _ => unsafe { nosys::control(fid, command, argument) },
    }
}
