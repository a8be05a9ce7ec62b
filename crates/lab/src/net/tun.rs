//! A TUN device: a network interface whose packets a program reads and writes by a file descriptor.
//!
//! The device belongs to the network namespace of the thread that makes it and vanishes with its
//! descriptor. Reads never block. Offload is on: the kernel returns up to 64 KiB of one TCP
//! connection at a time, with incomplete checksums.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::packet::{OFFLOAD_BYTES, PACKET_BYTES_MAX, Packet};

const TUN_PATH: &str = "/dev/net/tun";

// Ioctl numbers from linux/if_tun.h; libc has the flags but not these requests on every target.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const OFFLOAD_CHECKSUM: libc::c_ulong = 0x01;
const OFFLOAD_TSO4: libc::c_ulong = 0x02;
const OFFLOAD_TSO_ECN: libc::c_ulong = 0x08;

/// The program's end of an interface.
pub struct Tun {
    file: File,
}

impl Tun {
    /// Makes the interface `name` in the calling thread's network namespace.
    pub fn create(name: &str) -> io::Result<Tun> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(TUN_PATH)?;
        let mut request = interface_request(name)?;
        let header_bytes = OFFLOAD_BYTES as libc::c_int;
        let offload = OFFLOAD_CHECKSUM | OFFLOAD_TSO4 | OFFLOAD_TSO_ECN;
        // SAFETY: the descriptor is open, and each request gets the argument that tun(4) defines:
        // an ifreq and a pointer to an int, both valid during the call, and a number.
        unsafe {
            check(libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request))?;
            check(libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ, &raw const header_bytes))?;
            check(libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, offload))?;
        }
        Ok(Tun { file })
    }

    /// The next packet; `None` if there is none now. `scratch` is `PACKET_BYTES_MAX` long.
    pub fn read(&self, scratch: &mut [u8]) -> io::Result<Option<Packet>> {
        debug_assert!(scratch.len() >= PACKET_BYTES_MAX);
        match (&self.file).read(scratch) {
            Ok(bytes) => Ok(Packet::new(&scratch[..bytes])),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Passes the packet to the kernel. An error concerns this packet only: the kernel found the
    /// packet malformed (corruption does that), or the interface is down.
    pub fn write(&self, packet: &Packet) -> io::Result<()> {
        (&self.file).write(packet.as_bytes()).map(drop)
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns an error with advice if the TUN device cannot be opened.
pub fn check_available() -> anyhow::Result<()> {
    let result = OpenOptions::new().read(true).write(true).open(TUN_PATH);
    result.map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => anyhow::anyhow!(
            "{TUN_PATH} is missing: load the kernel's module with `sudo modprobe tun` (in a \
             container, start it with `--device {TUN_PATH}`)"
        ),
        io::ErrorKind::PermissionDenied => anyhow::anyhow!(
            "{TUN_PATH} may not be opened by this user: `sudo chmod 666 {TUN_PATH}` allows it. \
             Most distributions do so by default; a TUN device is useless without rights over a \
             network namespace"
        ),
        _ => anyhow::anyhow!("cannot open {TUN_PATH}: {error}"),
    })
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    Ok(request)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
