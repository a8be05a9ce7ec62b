//! Names of endpoints. No connections are managed: an endpoint reaches every peer that it
//! addresses.

use std::ffi::{c_int, c_void};

use super::ep::Endpoint;
use super::{copy_name, nosys, object, status};
use crate::abi::*;
use crate::info::AddressFormat;
use crate::resolve::{SOCKADDR_BYTES, read_sockaddr};

pub static CM_OPS: OpsCm = OpsCm {
    size: size_of::<OpsCm>(),
    setname,
    getname,
    getpeer: nosys::getpeer,
    connect: nosys::connect,
    listen: nosys::listen,
    accept: nosys::accept,
    reject: nosys::reject,
    shutdown: nosys::shutdown,
    join: nosys::join,
};

/// Sets the address at which the endpoint accepts connections: only before the endpoint is enabled,
/// and only for socket addresses.
unsafe extern "C" fn setname(fid: *mut Fid, address: *mut c_void, len: usize) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    if endpoint.format() != AddressFormat::Socket {
        return Errno::EOPNOTSUPP.negative();
    }
    if len < SOCKADDR_BYTES {
        return Errno::EINVAL.negative();
    }
    // SAFETY: `address` holds `len` bytes.
    let address = unsafe { read_sockaddr(address) };
    status(address.ok_or(Errno::EINVAL).and_then(|address| endpoint.set_bind(address)))
}

/// Copies as much of the name as `target` holds, and always returns the length of the name.
/// `ETOOSMALL`: the name did not fit (libraries ask with length 0 first).
unsafe extern "C" fn getname(fid: *mut Fid, target: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    let named = endpoint.with(|engine| {
        let name = engine.name();
        let name = &name[..name.len().min(endpoint.format().bytes())];
        // SAFETY: `target` holds `*len` bytes.
        Ok(unsafe { copy_name(name, target, len) })
    });
    named.unwrap_or_else(Errno::negative)
}
