//! Resolves node and service strings, and converts socket addresses from and to C.

use std::ffi::{CStr, c_void};
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::abi::Errno;

/// Size of `struct sockaddr_in`.
pub const SOCKADDR_BYTES: usize = size_of::<libc::sockaddr_in>();

/// How strings are interpreted.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResolveHints {
    /// The result is for binding: without a node the result is the wildcard address, not this host.
    pub passive: bool,
    /// The node is a numeric address; no name service is used.
    pub numeric: bool,
}

/// The first IPv4 address of node and service. A missing service is port 0.
pub fn resolve(
    node: Option<&CStr>,
    service: Option<&CStr>,
    how: ResolveHints,
) -> Result<SocketAddrV4, Errno> {
    if node.is_none() && service.is_none() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: an all-zero addrinfo is valid (no flags, no pointers).
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_family = libc::AF_INET;
    hints.ai_socktype = libc::SOCK_STREAM;
    hints.ai_flags |= if how.passive { libc::AI_PASSIVE } else { 0 };
    hints.ai_flags |= if how.numeric { libc::AI_NUMERICHOST } else { 0 };
    let mut list = std::ptr::null_mut();
    // SAFETY: the strings end with NUL or are null, and `list` may be written.
    let status = unsafe { libc::getaddrinfo(pointer(node), pointer(service), &hints, &mut list) };
    if status != 0 || list.is_null() {
        return Err(Errno::ENODATA);
    }
    // SAFETY: a successful look-up returns a list whose first address has the requested family.
    let address = unsafe {
        let address = read_sockaddr((*list).ai_addr.cast());
        libc::freeaddrinfo(list);
        address
    };
    address.ok_or(Errno::ENODATA)
}

fn pointer(text: Option<&CStr>) -> *const libc::c_char {
    text.map_or(std::ptr::null(), CStr::as_ptr)
}

/// # Safety
/// `address` points to `SOCKADDR_BYTES` readable bytes.
pub unsafe fn read_sockaddr(address: *const c_void) -> Option<SocketAddrV4> {
    // SAFETY: the caller guarantees readable bytes; no alignment is assumed.
    let address: libc::sockaddr_in =
        unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
    let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
    (i32::from(address.sin_family) == libc::AF_INET)
        .then(|| SocketAddrV4::new(ip, u16::from_be(address.sin_port)))
}

/// The bytes of a `sockaddr_in`.
pub fn sockaddr_bytes(address: SocketAddrV4) -> [u8; SOCKADDR_BYTES] {
    let mut bytes = [0; SOCKADDR_BYTES];
    bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&address.ip().octets());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_become_addresses() {
        let to = resolve(Some(c"127.0.0.1"), Some(c"9228"), ResolveHints::default()).unwrap();
        assert_eq!(to, "127.0.0.1:9228".parse().unwrap());
        let from =
            resolve(None, Some(c"9228"), ResolveHints { passive: true, numeric: false }).unwrap();
        assert_eq!(from, "0.0.0.0:9228".parse().unwrap());
        let numeric = ResolveHints { passive: false, numeric: true };
        assert_eq!(resolve(Some(c"no.digits"), None, numeric), Err(Errno::ENODATA));
        assert_eq!(resolve(None, None, ResolveHints::default()), Err(Errno::EINVAL));
    }

    #[test]
    fn socket_addresses_survive_the_round_trip() {
        let address = "10.1.2.3:7710".parse().unwrap();
        let bytes = sockaddr_bytes(address);
        // SAFETY: the array has sixteen bytes, as required.
        assert_eq!(unsafe { read_sockaddr(bytes.as_ptr().cast()) }, Some(address));
        // SAFETY: the array has sixteen bytes, as required.
        assert_eq!(unsafe { read_sockaddr([0xffu8; 16].as_ptr().cast()) }, None);
    }
}
