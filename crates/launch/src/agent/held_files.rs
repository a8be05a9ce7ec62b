//! Holds open files of a rank that must outlive the rank's process: files that are locked, whose
//! name is removed, or to which the rank appends.
//!
//! A lock and an unnamed file live as long as some process has the same open file (open(2), "open
//! file description"). So the interposer sends such a descriptor here before the rank locks or
//! removes the file. The lock stays held while the rank is being restarted, and the next
//! incarnation takes the same open file back, with its position, locks and content.
//!
//! In: datagrams on a Unix socket, of two words of eight bytes each: the operation, and the number
//! that the rank has given to the file; a file to be held comes as a descriptor with the datagram.
//! Out: the descriptor, to the process that asks for the file. A thread serves the socket, so that
//! a rank never waits for the agent's loop.
//!
//! When the rank has ended for good, the agent closes all files of the rank, because other
//! processes may wait for a lock.
//!
//! A second socket, whose name ends with [`DURABLE_SUFFIX`], is served by the agent's loop
//! (`durable_effects`): there the rank asks that another node receive the rank's record.
//!
//! What may never happen: a process of another user receives a file or has one held; a file is held
//! for a rank that has ended.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use landbridge_proto::nondeterminism::{
    DURABLE_SUFFIX, HELD_CLEAR, HELD_DROP, HELD_END, HELD_GET, HELD_KEEP, HELD_MAKE_DURABLE,
    HELD_WORD_BYTES, held_name,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most held files of one rank: as many as the interposer tracks, and as many again while an image
/// is taken.
const FILES_MAX: usize = 2048;

/// The held files of one rank.
#[derive(Debug)]
pub struct HeldFiles {
    /// Random part of the socket's name ([`held_name`]), which makes the name unique.
    bits: [u64; 2],
    to_thread: OwnedFd,
    thread: Option<JoinHandle<()>>,
    effects: OwnedFd,
}

/// Address of a process that waits until another node has the rank's record.
#[derive(Debug)]
pub struct EffectRequest(SocketAddrUnix);

impl HeldFiles {
    pub fn new() -> Result<HeldFiles> {
        let socket = datagram_socket()?;
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        let bits = random_bits()?;
        let name = held_name(bits);
        bind(&socket, &name)?;
        let effects = datagram_socket()?;
        rustix::net::sockopt::set_socket_passcred(&effects, true)?;
        bind(&effects, &[&name, DURABLE_SUFFIX.as_bytes()].concat())?;
        let to_thread = datagram_socket()?;
        rustix::net::connect(&to_thread, &SocketAddrUnix::new_abstract_name(&name)?)?;
        let thread = std::thread::Builder::new()
            .name("held files".into())
            .spawn(move || serve(&socket))
            .context("no thread to hold files of ranks")?;
        Ok(HeldFiles { bits, to_thread, thread: Some(thread), effects })
    }

    /// The socket for requests to make the rank's record durable.
    pub fn effects(&self) -> BorrowedFd<'_> {
        self.effects.as_fd()
    }

    /// The next request on the socket of [`HeldFiles::effects`], if there is one.
    pub fn next_effect_request(&self) -> Option<EffectRequest> {
        loop {
            let got = receive(&self.effects, RecvFlags::DONTWAIT).ok()?;
            if let Some((HeldFileRequest { what: HELD_MAKE_DURABLE, .. }, Some(from))) = got {
                return Some(EffectRequest(from));
            }
        }
    }

    /// Answers that another node has everything that was recorded at the time of the request.
    pub fn answer(&self, to: &EffectRequest) {
        let bytes = word(HELD_MAKE_DURABLE, 0);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendto(&self.effects, &bytes, flags, &to.0);
    }

    /// Closes all held files, because the rank has ended and is not restarted.
    pub fn clear(&self) {
        let _ = rustix::net::send(&self.to_thread, &word(HELD_CLEAR, 0), SendFlags::NOSIGNAL);
    }

    /// Bits of the socket's name for the record's head, where the rank reads them ([`HELD_AT`]).
    ///
    /// [`HELD_AT`]: landbridge_proto::nondeterminism::HELD_AT
    pub fn bits(&self) -> [u64; 2] {
        self.bits
    }
}

impl Drop for HeldFiles {
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

/// Binds the socket to this name in the abstract namespace.
fn bind(socket: &OwnedFd, name: &[u8]) -> Result<()> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    rustix::net::bind(socket, &address).context("no socket to hold files of ranks")
}

fn random_bits() -> Result<[u64; 2]> {
    let mut bits = [[0; 8]; 2];
    rustix::rand::getrandom(bits.as_flattened_mut(), rustix::rand::GetRandomFlags::empty())?;
    Ok(bits.map(u64::from_ne_bytes))
}

fn word(what: u64, number: u64) -> [u8; HELD_WORD_BYTES] {
    let mut bytes = [0; HELD_WORD_BYTES];
    bytes[..8].copy_from_slice(&what.to_ne_bytes());
    bytes[8..].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// An operation that a process of this user has sent.
struct HeldFileRequest {
    what: u64,
    number: u64,
    file: Option<OwnedFd>,
}

/// The next datagram, with the address for an answer; `None`: the datagram has another length or
/// comes from another user.
fn receive(
    socket: &OwnedFd,
    flags: RecvFlags,
) -> rustix::io::Result<Option<(HeldFileRequest, Option<SocketAddrUnix>)>> {
    let mut bytes = [0; HELD_WORD_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(&mut bytes)];
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut room, &mut ancillary, flags)?;
    let (mut file, mut is_ours) = (None, false);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(mut sent) => file = sent.next(),
            RecvAncillaryMessage::ScmCredentials(who) => {
                is_ours = who.uid == rustix::process::getuid();
            }
            _ => (),
        }
    }
    if !is_ours || got.bytes != HELD_WORD_BYTES {
        return Ok(None);
    }
    let number = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
    let from = got.address.and_then(|address| SocketAddrUnix::try_from(address).ok());
    Ok(Some((HeldFileRequest { what: number(0), number: number(8), file }, from)))
}

/// Serves the socket until `HELD_END` arrives.
fn serve(socket: &OwnedFd) {
    let mut files = BTreeMap::<u64, OwnedFd>::new();
    loop {
        let (message, from) = match receive(socket, RecvFlags::empty()) {
            Ok(Some(got)) => got,
            Ok(None) | Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let HeldFileRequest { what, number, file } = message;
        match (what, file) {
            (HELD_KEEP, Some(file)) if files.len() < FILES_MAX => _ = files.insert(number, file),
            (HELD_DROP, _) => _ = files.remove(&number),
            (HELD_CLEAR, _) => files.clear(),
            (HELD_GET, _) => {
                from.into_iter().for_each(|to| give(socket, &to, number, files.get(&number)));
            }
            (HELD_END, _) => return,
            _ => (),
        }
    }
}

/// Sends a held file back; the answer has no descriptor if no file of that number is held.
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
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn unnamed_file() -> std::fs::File {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("landbridge-held-{process}-{number}"));
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    fn client(held: &HeldFiles) -> OwnedFd {
        let socket = datagram_socket().unwrap();
        bind(&socket, &held_name(random_bits().unwrap())).unwrap();
        let to = SocketAddrUnix::new_abstract_name(&held_name(held.bits())).unwrap();
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
        let held = HeldFiles::new().unwrap();
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

    #[test]
    fn locks_of_a_rank_that_has_ended_for_good_are_free() {
        let held = HeldFiles::new().unwrap();
        let rank = client(&held);
        let files = [unnamed_file(), unnamed_file()];
        let others = files.each_ref().map(|file| {
            rustix::fs::flock(file, rustix::fs::FlockOperation::LockExclusive).unwrap();
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
            std::fs::File::open(path).unwrap()
        });
        (1..).zip(&files).for_each(|(at, file)| send(&rank, HELD_KEEP, at, Some(file.as_fd())));
        drop(files);
        let lock =
            |file| rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        assert!(get(&rank, 2).is_some());
        assert_eq!(lock(&others[0]), Err(rustix::io::Errno::WOULDBLOCK));
        held.clear();
        // The answer to `get` comes after the files are closed.
        assert!(get(&rank, 1).is_none() && get(&rank, 2).is_none());
        others.iter().for_each(|file| assert_eq!(lock(file), Ok(())));
    }
}
