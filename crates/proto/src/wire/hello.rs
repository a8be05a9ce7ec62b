//! The hello: both sides prove that they know the job's key before anything else is parsed.
//!
//! ```text
//! dialler                                   listener
//!   Open  {magic, version, job, nonce}  ──►  checks magic, version, job
//!   ◄──  Reply {magic, version, nonce, introduction, proof}      (of the listener)
//!   Close {introduction, proof}         ──►  checks the proof; the link is up on both sides
//! ```
//!
//! A proof is HMAC-SHA256 (RFC 2104) under the job's key over a label, both nonces and the
//! introduction, so nothing can be replayed, reflected or changed. Each of the three messages has a
//! fixed size. A listener holds at most [`OPEN_BYTES`] bytes of a pending connection before the
//! magic, the version and the job match. What may never happen: a field of an introduction is read
//! before its proof has been checked.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{Malformed, u16_at, u32_at, u64_at};
use crate::id::{Address, ClusterId, JobId, JobKey};
use crate::limit::PROTOCOL_VERSION;
use crate::wire::name::NAME_BYTES;

/// The length of the dialler's first message in bytes.
pub const OPEN_BYTES: usize = 56;
/// The length of the listener's answer in bytes.
pub const REPLY_BYTES: usize = 40 + INTRODUCTION_BYTES + PROOF_BYTES;
/// The length of the dialler's second message in bytes.
pub const CLOSE_BYTES: usize = INTRODUCTION_BYTES + PROOF_BYTES;

const MAGIC: [u8; 4] = *b"LBrg";
const INTRODUCTION_BYTES: usize = 120;
const LOG_POSITION_AT: usize = 40 + NAME_BYTES;
const PROOF_BYTES: usize = 32;

const _: () = assert!(LOG_POSITION_AT + 4 * 8 == INTRODUCTION_BYTES);

/// A random number that is used once.
pub type Nonce = [u8; 32];

/// What a side says about itself, protected by its proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// The role of this side.
    pub role: Role,
    /// The endpoint address ([`Address::ANONYMOUS`] for relays).
    pub address: Address,
    /// The incarnation: how often the process has been started.
    pub incarnation: u32,
    /// The cluster of this side.
    pub cluster: ClusterId,
    /// The process id on the node.
    pub pid: u32,
    /// The eager bytes that the other side may have in flight towards this side.
    pub eager_window: u32,
    /// The address of eight bytes in the process's memory that hold `cookie`. The other side reads
    /// them to find out whether it may read this memory.
    pub cookie_address: u64,
    /// The value at `cookie_address`.
    pub cookie: u64,
    /// The name that the MPI library hands out for the endpoint (zero for relays).
    pub name: [u8; NAME_BYTES],
    /// The log position of a recorded process.
    pub log_position: LogPosition,
}

/// The position of a process in the message log that its home relay keeps: at the process's
/// beginning, or where a checkpoint of it was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogPosition {
    /// The number of determinants that the process has sent to its relay.
    pub determinants: u64,
    /// The number of bytes of the frames that the process has delivered.
    pub taken: u64,
    /// The number of frames that the process has sent.
    pub sent: u64,
    /// No later incarnation of the process will start from a checkpoint before this number of
    /// determinants.
    pub kept: u64,
}

/// The kind of a side of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// An endpoint of a process, which sends only frames of its own.
    Endpoint = 1,
    /// A relay, which sends frames of a cluster.
    Relay = 2,
    /// A test process of `landbridge doctor`.
    Doctor = 3,
}

/// Why a hello was refused. The text becomes one log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The other side does not speak this protocol.
    Garbage,
    /// The other side speaks another version of this protocol.
    Version(u16),
    /// The other side belongs to another job.
    Job,
    /// The other side does not know the job's key.
    Proof,
    /// The other side proved the key and sent an invalid introduction.
    Introduction(&'static str),
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Refusal::Garbage => f.write_str("it does not speak the landbridge protocol"),
            Refusal::Version(version) => write!(
                f,
                "it speaks protocol version {version}, this side {PROTOCOL_VERSION}; install the same landbridge on both"
            ),
            Refusal::Job => f.write_str("it belongs to another job"),
            Refusal::Proof => f.write_str("it does not know the key of this job"),
            Refusal::Introduction(why) => f.write_str(why),
        }
    }
}

/// The dialler's side of a hello. Each step consumes the value, so no step can happen twice.
pub struct Dialler {
    key: JobKey,
    job: JobId,
    own: Introduction,
    nonce: Nonce,
}

impl Dialler {
    /// Starts a hello with a fresh random `nonce`.
    pub fn new(job: JobId, key: JobKey, own: Introduction, nonce: Nonce) -> Self {
        Self { key, job, own, nonce }
    }

    /// The dialler's first message.
    pub fn open(&self) -> [u8; OPEN_BYTES] {
        let mut bytes = [0; OPEN_BYTES];
        emit_prefix(&mut bytes);
        bytes[8..24].copy_from_slice(&self.job.0);
        bytes[24..56].copy_from_slice(&self.nonce);
        bytes
    }

    /// Checks the listener's answer. Returns the dialler's second message and the listener's
    /// introduction.
    ///
    /// # Errors
    /// [`Refusal`] if the listener does not prove that it belongs to the job: the caller must drop
    /// the connection.
    pub fn handle_reply(
        self,
        reply: &[u8; REPLY_BYTES],
    ) -> Result<([u8; CLOSE_BYTES], Introduction), Refusal> {
        check_prefix(reply)?;
        let nonce: Nonce = array(&reply[8..40]);
        let nonces = Nonces { dialler: self.nonce, listener: nonce };
        let introduction = &reply[40..40 + INTRODUCTION_BYTES];
        verify(&self.key, LISTENER, &nonces, introduction, &reply[40 + INTRODUCTION_BYTES..])?;
        let listener = Introduction::parse(introduction)?;

        let mut close = [0; CLOSE_BYTES];
        let own = self.own.emit();
        close[..INTRODUCTION_BYTES].copy_from_slice(&own);
        close[INTRODUCTION_BYTES..].copy_from_slice(&prove(&self.key, DIALLER, &nonces, &own));
        Ok((close, listener))
    }
}

/// The listener's side of a hello, after a valid [`Dialler::open`].
pub struct Listener {
    key: JobKey,
    nonces: Nonces,
}

impl Listener {
    /// Checks the first message of a pending connection. Returns the answer to send.
    ///
    /// # Errors
    /// [`Refusal`] if the dialler does not belong to this job: the caller must drop the connection.
    pub fn handle_open(
        job: JobId,
        key: &JobKey,
        own: &Introduction,
        nonce: Nonce,
        open: &[u8; OPEN_BYTES],
    ) -> Result<(Self, [u8; REPLY_BYTES]), Refusal> {
        check_prefix(open)?;
        if open[8..24] != job.0 {
            return Err(Refusal::Job);
        }
        let nonces = Nonces { dialler: array(&open[24..56]), listener: nonce };
        let mut reply = [0; REPLY_BYTES];
        emit_prefix(&mut reply);
        reply[8..40].copy_from_slice(&nonce);
        let own = own.emit();
        reply[40..40 + INTRODUCTION_BYTES].copy_from_slice(&own);
        reply[40 + INTRODUCTION_BYTES..].copy_from_slice(&prove(key, LISTENER, &nonces, &own));
        Ok((Self { key: key.clone(), nonces }, reply))
    }

    /// Checks the dialler's second message. Returns the dialler's introduction.
    ///
    /// # Errors
    /// [`Refusal`] if the dialler does not know the key: the caller must drop the connection.
    pub fn handle_close(self, close: &[u8; CLOSE_BYTES]) -> Result<Introduction, Refusal> {
        let (introduction, proof) = close.split_at(INTRODUCTION_BYTES);
        verify(&self.key, DIALLER, &self.nonces, introduction, proof)?;
        Introduction::parse(introduction)
    }
}

impl Introduction {
    fn emit(&self) -> [u8; INTRODUCTION_BYTES] {
        let mut bytes = [0; INTRODUCTION_BYTES];
        bytes[0] = self.role as u8;
        bytes[2..4].copy_from_slice(&self.cluster.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.address.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.pid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.eager_window.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.cookie_address.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.cookie.to_le_bytes());
        bytes[40..40 + NAME_BYTES].copy_from_slice(&self.name);
        let LogPosition { determinants, taken, sent, kept } = self.log_position;
        let numbers = [determinants, taken, sent, kept];
        for (place, number) in bytes[LOG_POSITION_AT..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let role = match bytes[0] {
            1 => Role::Endpoint,
            2 => Role::Relay,
            3 => Role::Doctor,
            _ => return Err(Refusal::Introduction("it has an unknown role")),
        };
        Ok(Self {
            role,
            cluster: ClusterId(u16_at(bytes, 2)),
            address: Address(u32_at(bytes, 4)),
            incarnation: u32_at(bytes, 8),
            pid: u32_at(bytes, 12),
            eager_window: u32_at(bytes, 16),
            cookie_address: u64_at(bytes, 24),
            cookie: u64_at(bytes, 32),
            name: array(&bytes[40..40 + NAME_BYTES]),
            log_position: LogPosition {
                determinants: u64_at(bytes, LOG_POSITION_AT),
                taken: u64_at(bytes, LOG_POSITION_AT + 8),
                sent: u64_at(bytes, LOG_POSITION_AT + 16),
                kept: u64_at(bytes, LOG_POSITION_AT + 24),
            },
        })
    }
}

#[derive(Clone, Copy)]
struct Nonces {
    dialler: Nonce,
    listener: Nonce,
}

const DIALLER: &[u8] = b"landbridge hello dialler";
const LISTENER: &[u8] = b"landbridge hello listener";

fn emit_prefix(bytes: &mut [u8]) {
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
}

fn check_prefix(bytes: &[u8]) -> Result<(), Refusal> {
    if bytes[0..4] != MAGIC || u16_at(bytes, 6) != 0 {
        return Err(Refusal::Garbage);
    }
    match u16_at(bytes, 4) {
        PROTOCOL_VERSION => Ok(()),
        other => Err(Refusal::Version(other)),
    }
}

fn prove(key: &JobKey, label: &[u8], nonces: &Nonces, introduction: &[u8]) -> [u8; PROOF_BYTES] {
    mac(key, label, nonces, introduction).finalize().into_bytes().into()
}

fn verify(
    key: &JobKey,
    label: &[u8],
    nonces: &Nonces,
    introduction: &[u8],
    proof: &[u8],
) -> Result<(), Refusal> {
    // The comparison takes constant time.
    mac(key, label, nonces, introduction).verify_slice(proof).map_err(|_| Refusal::Proof)
}

fn mac(key: &JobKey, label: &[u8], nonces: &Nonces, introduction: &[u8]) -> Hmac<Sha256> {
    // HMAC takes keys of any length, so this cannot fail.
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).expect("HMAC takes any key");
    mac.update(label);
    mac.update(&PROTOCOL_VERSION.to_le_bytes());
    mac.update(&nonces.dialler);
    mac.update(&nonces.listener);
    mac.update(introduction);
    mac
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Self {
        Refusal::Introduction(malformed.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_holders_of_the_key_meet() {
        let (close, listener, server) = run_to_close(key(1), key(1)).unwrap();
        assert_eq!(server, introduction(Role::Relay));
        assert_eq!(listener.handle_close(&close), Ok(introduction(Role::Endpoint)));
    }

    #[test]
    fn a_wrong_key_is_refused_by_the_one_that_sees_it_first() {
        assert_eq!(run_to_close(key(1), key(2)).err(), Some(Refusal::Proof));
    }

    #[test]
    fn another_version_job_or_language_is_refused_at_once() {
        let good = dialler(key(1)).open();
        let next = PROTOCOL_VERSION + 1;
        for (at, value, refusal) in [
            (0, b'G', Refusal::Garbage),
            (4, next as u8, Refusal::Version(next)),
            (6, 1, Refusal::Garbage),
            (8, 0xee, Refusal::Job),
        ] {
            let mut open = good;
            open[at] = value;
            assert_eq!(listen(&open).err(), Some(refusal));
        }
    }

    #[test]
    fn every_changed_bit_of_the_second_message_is_noticed() {
        for bit in 0..CLOSE_BYTES * 8 {
            let (mut close, listener, _) = run_to_close(key(1), key(1)).unwrap();
            close[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(listener.handle_close(&close), Err(Refusal::Proof), "bit {bit}");
        }
    }

    #[test]
    fn the_dialler_cannot_be_fed_its_own_proof() {
        let (close, _, _) = run_to_close(key(1), key(1)).unwrap();
        let mut reply = [0; REPLY_BYTES];
        emit_prefix(&mut reply);
        reply[8..40].copy_from_slice(&[2; 32]);
        reply[40..].copy_from_slice(&close);
        assert_eq!(dialler(key(1)).handle_reply(&reply).err(), Some(Refusal::Proof));
    }

    fn run_to_close(
        ours: JobKey,
        theirs: JobKey,
    ) -> Result<([u8; CLOSE_BYTES], Listener, Introduction), Refusal> {
        let dialler = dialler(ours);
        let own = introduction(Role::Relay);
        let (listener, reply) =
            Listener::handle_open(JobId([5; 16]), &theirs, &own, [2; 32], &dialler.open())?;
        let (close, server) = dialler.handle_reply(&reply)?;
        Ok((close, listener, server))
    }

    fn listen(open: &[u8; OPEN_BYTES]) -> Result<(), Refusal> {
        let own = introduction(Role::Relay);
        Listener::handle_open(JobId([5; 16]), &key(1), &own, [2; 32], open).map(|_| ())
    }

    fn dialler(key: JobKey) -> Dialler {
        Dialler::new(JobId([5; 16]), key, introduction(Role::Endpoint), [1; 32])
    }

    fn key(byte: u8) -> JobKey {
        JobKey([byte; 32])
    }

    fn introduction(role: Role) -> Introduction {
        Introduction {
            role,
            address: Address::new(3, 0),
            incarnation: 1,
            cluster: ClusterId(1),
            pid: 4711,
            eager_window: 1 << 16,
            cookie_address: 0x1234_5678_9abc,
            cookie: 42,
            name: [7; NAME_BYTES],
            log_position: LogPosition { determinants: 1, taken: 2, sent: 3, kept: 4 },
        }
    }
}
