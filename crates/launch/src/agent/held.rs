//! Open files of a rank that must outlive its process: files that are locked, or whose name is gone.
//!
//! A lock and an unnamed file live as long as somebody has the same open file (open(2), "open file description"). So the interposer
//! sends such a descriptor here before the rank locks or removes the file; the lock stays held while the rank is being restarted,
//! and the next incarnation takes the same open file back, position, locks and content.
//!
//! In: datagrams on a Unix socket, of two words of eight bytes: what is asked, and the number that the rank has given to the file;
//! with the descriptor, if it is to be held. Out: the descriptor, to whoever asks for it back. A thread does this, so that a
//! rank never waits for the agent's loop.
//!
//! What may never happen: somebody else than this user is given a file, or has one held.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use landbridge_proto::clocks::{HELD_DROP, HELD_END, HELD_GET, HELD_KEEP, HELD_WORD_BYTES};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most files of one rank: as many as the interposer looks after, and as many for the time of an image.
const FILES_MAX: usize = 2048;

/// What one rank has held here.
#[derive(Debug)]
pub struct Held {
    /// Name of the socket, in the abstract namespace (unix(7)).
    name: String,
    to_thread: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Held {
    pub fn new() -> Result<Held> {
        let socket = datagram_socket()?;
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        let name = bind_somewhere(&socket)?;
        let to_thread = datagram_socket()?;
        rustix::net::connect(&to_thread, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        let thread = std::thread::Builder::new()
            .name("held files".into())
            .spawn(move || hold(&socket))
            .context("no thread to hold files of ranks")?;
        Ok(Held { name, to_thread, thread: Some(thread) })
    }

    /// Of the socket; all names are of one length.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = rustix::net::send(&self.to_thread, &word(HELD_END, 0), SendFlags::NOSIGNAL);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn datagram_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
}

/// Binds the socket to a name that nobody has.
fn bind_somewhere(socket: &OwnedFd) -> Result<String> {
    const ATTEMPTS: usize = 16;
    for _ in 0..ATTEMPTS {
        let mut chance = [0; 12];
        rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
        let digits: String = chance.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("landbridge-held-{digits}");
        match rustix::net::bind(socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?) {
            Err(rustix::io::Errno::ADDRINUSE) => (),
            bound => return bound.map(|()| name).context("no socket to hold files of ranks"),
        }
    }
    anyhow::bail!("every name of a socket is taken")
}

fn word(what: u64, number: u64) -> [u8; HELD_WORD_BYTES] {
    let mut bytes = [0; HELD_WORD_BYTES];
    bytes[..8].copy_from_slice(&what.to_ne_bytes());
    bytes[8..].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// Until it is told to end.
fn hold(socket: &OwnedFd) {
    let own_user = rustix::process::getuid();
    let mut files = BTreeMap::<u64, OwnedFd>::new();
    loop {
        let mut bytes = [0; HELD_WORD_BYTES];
        let space = rustix::cmsg_space!(ScmRights(1), ScmCredentials(1));
        let mut space = vec![MaybeUninit::uninit(); space];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(socket, &mut room, &mut ancillary, flags) {
            Ok(got) => got,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let (mut file, mut is_ours) = (None, false);
        for message in ancillary.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(mut sent) => file = sent.next(),
                RecvAncillaryMessage::ScmCredentials(who) => is_ours = who.uid == own_user,
                _ => (),
            }
        }
        if !is_ours || got.bytes != HELD_WORD_BYTES {
            continue;
        }
        let number =
            |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let (what, number) = (number(0), number(8));
        match (what, file) {
            (HELD_KEEP, Some(file)) if files.len() < FILES_MAX => _ = files.insert(number, file),
            (HELD_DROP, _) => _ = files.remove(&number),
            (HELD_GET, _) => {
                let to = got.address.and_then(|address| SocketAddrUnix::try_from(address).ok());
                to.into_iter().for_each(|to| give(socket, &to, number, files.get(&number)));
            }
            (HELD_END, _) => return,
            _ => (),
        }
    }
}

/// The answer has no descriptor if there is none of that number.
fn give(socket: &OwnedFd, to: &SocketAddrUnix, number: u64, file: Option<&OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd> = file.iter().map(|file| file.as_fd()).collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let bytes = word(HELD_GET, number);
    let bytes = [IoSlice::new(&bytes)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = rustix::net::sendmsg_addr(socket, to, &bytes, &mut ancillary, flags);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    fn unnamed_file() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("landbridge-held-{}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    fn client(held: &Held) -> OwnedFd {
        let socket = datagram_socket().unwrap();
        bind_somewhere(&socket).unwrap();
        let to = SocketAddrUnix::new_abstract_name(held.name().as_bytes()).unwrap();
        rustix::net::connect(&socket, &to).unwrap();
        socket
    }

    fn send(socket: &OwnedFd, what: u64, number: u64, file: Option<BorrowedFd>) {
        let files: Vec<BorrowedFd> = file.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        let bytes = word(what, number);
        let bytes = [IoSlice::new(&bytes)];
        rustix::net::sendmsg(socket, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
    }

    fn get(socket: &OwnedFd, number: u64) -> Option<OwnedFd> {
        send(socket, HELD_GET, number, None);
        let mut bytes = [0; HELD_WORD_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(socket, &mut room, &mut ancillary, RecvFlags::empty()).unwrap();
        assert_eq!(bytes, word(HELD_GET, number));
        ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        })
    }

    #[test]
    fn a_file_without_a_name_outlives_who_had_it_open_with_its_lock() {
        let held = Held::new().unwrap();
        let rank = client(&held);
        let mut file = unnamed_file();
        file.write_all(b"scratch").unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let other = std::fs::File::open(path).unwrap();
        send(&rank, HELD_KEEP, 7, Some(file.as_fd()));
        assert!(get(&rank, 8).is_none());
        drop((file, rank));
        let busy = rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        assert_eq!(busy, Err(rustix::io::Errno::WOULDBLOCK), "the lock is still held");
        let rank = client(&held);
        let mut file = std::fs::File::from(get(&rank, 7).unwrap());
        assert_eq!(file.stream_position().unwrap(), 7);
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "scratch");
        drop(file);
        send(&rank, HELD_DROP, 7, None);
        assert!(get(&rank, 7).is_none());
        let free = rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        assert_eq!(free, Ok(()));
    }
}
