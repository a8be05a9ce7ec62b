//! The head: what follows a frame's header and precedes its payload, fixed for each kind.

use core::array;
use core::num::NonZeroU64;

use super::{Malformed, u32_at, u64_at};
use crate::limit::{FRAME_BODY_BYTES_MAX, KIND_HEADER_BYTES_MAX};
use crate::wire::frame::{Kind, flag};

/// The decoded fields of a head. Operation numbers belong to the sender or the receiver; the other
/// side only returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KindHeader {
    /// A whole message, or with `long` its first piece.
    Message {
        /// The tag; 0 for untagged messages.
        tag: u64,
        /// The remote completion data, valid with [`flag::CQ_DATA`].
        data: u64,
        /// The fields of a long message, present with [`flag::LONG`].
        long: Option<Long>,
    },
    /// Send operation `send` may go on up to byte `limit`; its pieces go to receive `recv`.
    Grant {
        /// The operation number of the message's sender.
        send: u32,
        /// The operation number of the message's receiver.
        recv: u32,
        /// The bytes of the message that may be sent so far.
        limit: u64,
    },
    /// Bytes `offset..` of the message for receive `recv`.
    Data {
        /// The operation number of the receiver.
        recv: u32,
        /// The offset of the payload in the message.
        offset: u64,
    },
    /// Bytes `offset..` of the message of send operation `send`, which its first piece announced.
    Ahead {
        /// The operation number of the message's sender.
        send: u32,
        /// The offset of the payload in the message.
        offset: u64,
    },
    /// The receiver has read the message, so the memory of send operation `send` is no longer
    /// needed.
    Pulled {
        /// The operation number of the message's sender.
        send: u32,
    },
    /// No head.
    Empty,
    /// The payload belongs at `offset..` of region `key`.
    Write {
        /// The operation number, which a refusal repeats.
        op: u32,
        /// The bytes of the whole write, for the target's completion (2^32 - 1: that many or more).
        total: u32,
        /// The key of the region.
        key: u64,
        /// The offset in the region.
        offset: u64,
        /// The remote completion data, valid with [`flag::CQ_DATA`].
        data: u64,
    },
    /// A request for `length` bytes at `offset` of region `key`.
    Read {
        /// The operation number, which the answer repeats.
        op: u32,
        /// The key of the region.
        key: u64,
        /// The offset in the region.
        offset: u64,
        /// The number of bytes wanted.
        length: u64,
    },
    /// Bytes `offset..` of the answer to read operation `op`.
    ReadData {
        /// The operation number of the reader.
        op: u32,
        /// The offset in the answer.
        offset: u64,
    },
    /// An atomic operation. The payload is the operand bytes, then, if bit 1 of `wants` is set, as
    /// many bytes to compare with.
    Atomic {
        /// The operation number, which the answer repeats.
        op: u32,
        /// The operation: a value of libfabric's `enum fi_op`.
        operation: u8,
        /// The type of the operands: a value of libfabric's `enum fi_datatype`.
        datatype: u8,
        /// Bit 0: the old values are wanted; bit 1: the second half of the payload holds the values
        /// to compare with.
        wants: u8,
        /// The bytes of the target on which the operation works.
        length: u32,
        /// The key of the region.
        key: u64,
        /// The offset in the region.
        offset: u64,
    },
    /// The payload is the old values for atomic operation `op`.
    AtomicReply {
        /// The operation number of the asking side.
        op: u32,
    },
    /// The payload is bytes `offset..` of a frame of `whole` bytes, head included.
    Fragment {
        /// The kind of the frame.
        kind: Kind,
        /// The flags of the frame.
        flags: u8,
        /// The offset in the frame of the fragment's first byte.
        offset: u32,
        /// The bytes of the frame.
        whole: u32,
    },
    /// The ranges of bytes that have arrived, beyond all bytes below the header's `delivered`; the
    /// range that grew last comes first. Empty ranges mean nothing.
    Sack {
        /// The first byte and the number of bytes of each range.
        ranges: [(u64, u32); SACK_RANGES],
    },
    /// The answer to status request `number`, with ranges as in [`KindHeader::Sack`].
    StatusReply {
        /// The number of the status request, from 1.
        number: u64,
        /// The first byte and the number of bytes of each range.
        ranges: [(u64, u32); SACK_RANGES],
    },
    /// A request for a report of the ranges that have arrived.
    StatusRequest {
        /// The number of the status request, which its answer repeats; from 1.
        number: u64,
    },
    /// Bytes `start..end` have arrived corrupt.
    Nack {
        /// The number of the first byte.
        start: u64,
        /// The number of the first byte after the range.
        end: u64,
    },
    /// Another address at which the sender can be reached: without a token in an
    /// AddressAdvertisement, with one in a UdpAdvertisement.
    AddressAdvertisement(AdvertisedAddress),
    /// No fields; the head of [`Kind::Goodbye`] still takes up bytes of the channel.
    Goodbye,
    /// Operation `op` was refused with the (positive) errno `error`.
    Refused {
        /// The operation number of the refused operation.
        op: u32,
        /// The errno.
        error: u32,
    },
}

/// An address at which an endpoint accepts connections or datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvertisedAddress {
    /// An IPv6 address, or an IPv4 address mapped into IPv6.
    pub ip: [u8; 16],
    /// The TCP port, or with a token the UDP port.
    pub port: u16,
    /// The token with which every datagram to the port must begin if the receiver of this
    /// advertisement sends it; none for a TCP port.
    pub token: Option<NonZeroU64>,
}

impl AdvertisedAddress {
    /// The kind of the frame that advertises the address.
    pub fn kind(&self) -> Kind {
        match self.token {
            None => Kind::AddressAdvertisement,
            Some(_) => Kind::UdpAdvertisement,
        }
    }
}

/// The number of ranges in one report: as many as fit into the longest head.
pub const SACK_RANGES: usize = 3;

/// What the receiver of a long message must know to obtain the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Long {
    /// The bytes of the whole message.
    pub total: u64,
    /// The operation number of the sender, for [`KindHeader::Grant`] and [`KindHeader::Pulled`].
    pub send: u32,
    /// The address of the whole message in the sender's memory, if the message is contiguous and a
    /// process of the same node may read it; otherwise 0.
    pub memory: u64,
    /// The bytes behind the first piece that follow without a grant, in [`Kind::Ahead`] frames.
    pub ahead: u32,
}

impl KindHeader {
    /// The length in bytes of the head of a frame of `kind` with `flags`.
    #[inline]
    pub fn size(kind: Kind, flags: u8) -> usize {
        match kind {
            Kind::Message | Kind::Tagged if flags & flag::LONG != 0 => 40,
            Kind::Message | Kind::Tagged => 16,
            Kind::Grant | Kind::Data | Kind::Ahead | Kind::ReadData => 16,
            Kind::Fragment | Kind::Nack => 16,
            Kind::Pulled
            | Kind::AtomicReply
            | Kind::Refused
            | Kind::Goodbye
            | Kind::StatusRequest => 8,
            Kind::AddressAdvertisement => 24,
            Kind::UdpAdvertisement => 32,
            Kind::Ack
            | Kind::Unreachable
            | Kind::Lost
            | Kind::Determinant
            | Kind::Nondeterminism
            | Kind::ReplayStart
            | Kind::Divergence
            | Kind::NondeterminismTrim
            | Kind::NondeterminismState
            | Kind::Keepalive => 0,
            Kind::Sack => 40,
            Kind::StatusReply => 48,
            Kind::Write | Kind::Read | Kind::Atomic => 32,
        }
    }

    /// Writes the head to the front of `bytes`. Returns its length in bytes.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`KIND_HEADER_BYTES_MAX`].
    #[inline(always)]
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        let mut pen = Pen { bytes: &mut bytes[..KIND_HEADER_BYTES_MAX], at: 0 };
        match *self {
            KindHeader::Message { tag, data, long } => {
                pen.u64(tag).u64(data);
                if let Some(long) = long {
                    pen.u64(long.total).u64(long.memory).u32(long.send).u32(long.ahead);
                }
            }
            KindHeader::Grant { send, recv, limit } => drop(pen.u32(send).u32(recv).u64(limit)),
            KindHeader::Data { recv: op, offset }
            | KindHeader::Ahead { send: op, offset }
            | KindHeader::ReadData { op, offset } => {
                pen.u32(op).u32(0).u64(offset);
            }
            KindHeader::Pulled { send: op } | KindHeader::AtomicReply { op } => {
                pen.u32(op).u32(0);
            }
            KindHeader::Empty => (),
            KindHeader::Goodbye => drop(pen.u64(0)),
            KindHeader::Fragment { kind, flags, offset, whole } => {
                let what = u32::from_le_bytes([kind as u8, flags, 0, 0]);
                pen.u32(what).u32(offset).u32(whole).u32(0);
            }
            KindHeader::Sack { ranges } => pen.ranges(ranges),
            KindHeader::StatusReply { number, ranges } => pen.u64(number).ranges(ranges),
            KindHeader::StatusRequest { number } => drop(pen.u64(number)),
            KindHeader::AddressAdvertisement(AdvertisedAddress { ip, port, token }) => {
                pen.bytes(&ip).u32(port as u32).u32(0);
                if let Some(token) = token {
                    pen.u64(token.get());
                }
            }
            KindHeader::Nack { start, end } => drop(pen.u64(start).u64(end)),
            KindHeader::Write { op, total, key, offset, data: last } => {
                pen.u32(op).u32(total).u64(key).u64(offset).u64(last);
            }
            KindHeader::Read { op, key, offset, length } => {
                pen.u32(op).u32(0).u64(key).u64(offset).u64(length);
            }
            KindHeader::Atomic { op, operation, datatype, wants, length, key, offset } => {
                let what = u32::from_le_bytes([operation, datatype, wants, 0]);
                pen.u32(op).u32(what).u64(key).u64(offset).u32(length).u32(0);
            }
            KindHeader::Refused { op, error } => drop(pen.u32(op).u32(error)),
        }
        pen.at
    }

    /// Reads the head of a frame of `kind` with `flags`.
    ///
    /// # Errors
    /// [`Malformed`] if `bytes` is shorter than [`KindHeader::size`], or if a field contradicts the
    /// frame.
    #[inline(always)]
    pub fn parse(kind: Kind, flags: u8, bytes: &[u8]) -> Result<KindHeader, Malformed> {
        if bytes.len() < KindHeader::size(kind, flags) {
            return Err(Malformed("a frame is shorter than its head"));
        }
        let op = || u32_at(bytes, 0);
        Ok(match kind {
            Kind::Message | Kind::Tagged => KindHeader::Message {
                tag: u64_at(bytes, 0),
                data: u64_at(bytes, 8),
                long: (flags & flag::LONG != 0).then(|| Long {
                    total: u64_at(bytes, 16),
                    memory: u64_at(bytes, 24),
                    send: u32_at(bytes, 32),
                    ahead: u32_at(bytes, 36),
                }),
            },
            Kind::Grant => {
                KindHeader::Grant { send: op(), recv: u32_at(bytes, 4), limit: u64_at(bytes, 8) }
            }
            Kind::Data => KindHeader::Data { recv: op(), offset: u64_at(bytes, 8) },
            Kind::Ahead => KindHeader::Ahead { send: op(), offset: u64_at(bytes, 8) },
            Kind::ReadData => KindHeader::ReadData { op: op(), offset: u64_at(bytes, 8) },
            Kind::Pulled => KindHeader::Pulled { send: op() },
            Kind::AtomicReply => KindHeader::AtomicReply { op: op() },
            Kind::Ack
            | Kind::Unreachable
            | Kind::Lost
            | Kind::Determinant
            | Kind::Nondeterminism
            | Kind::ReplayStart
            | Kind::Divergence
            | Kind::NondeterminismTrim
            | Kind::NondeterminismState
            | Kind::Keepalive => KindHeader::Empty,
            Kind::AddressAdvertisement => {
                KindHeader::AddressAdvertisement(parse_address(bytes, None))
            }
            Kind::UdpAdvertisement => {
                let token = NonZeroU64::new(u64_at(bytes, 24));
                let token = token.ok_or(Malformed("a UDP port without a token"))?;
                KindHeader::AddressAdvertisement(parse_address(bytes, Some(token)))
            }
            Kind::StatusRequest => KindHeader::StatusRequest { number: parse_number(bytes)? },
            Kind::Goodbye => KindHeader::Goodbye,
            Kind::Fragment => parse_fragment(bytes)?,
            Kind::Sack => KindHeader::Sack { ranges: parse_ranges(bytes) },
            Kind::StatusReply => KindHeader::StatusReply {
                number: parse_number(bytes)?,
                ranges: parse_ranges(&bytes[8..]),
            },
            Kind::Nack => KindHeader::Nack { start: u64_at(bytes, 0), end: u64_at(bytes, 8) },
            Kind::Write => KindHeader::Write {
                op: op(),
                total: u32_at(bytes, 4),
                key: u64_at(bytes, 8),
                offset: u64_at(bytes, 16),
                data: u64_at(bytes, 24),
            },
            Kind::Read => KindHeader::Read {
                op: op(),
                key: u64_at(bytes, 8),
                offset: u64_at(bytes, 16),
                length: u64_at(bytes, 24),
            },
            Kind::Atomic => parse_atomic(bytes)?,
            Kind::Refused => KindHeader::Refused { op: op(), error: u32_at(bytes, 4) },
        })
    }
}

/// The number of a status request. The requests of a channel are numbered from 1.
fn parse_number(bytes: &[u8]) -> Result<u64, Malformed> {
    match u64_at(bytes, 0) {
        0 => Err(Malformed("a status request without a number")),
        number => Ok(number),
    }
}

fn parse_ranges(bytes: &[u8]) -> [(u64, u32); SACK_RANGES] {
    array::from_fn(|n| (u64_at(bytes, 12 * n), u32_at(bytes, 12 * n + 8)))
}

fn parse_address(bytes: &[u8], token: Option<NonZeroU64>) -> AdvertisedAddress {
    let ip = array::from_fn(|n| bytes[n]);
    AdvertisedAddress { ip, port: u32_at(bytes, 16) as u16, token }
}

fn parse_fragment(bytes: &[u8]) -> Result<KindHeader, Malformed> {
    let kind = Kind::from_number(bytes[0]).filter(|kind| kind.is_numbered());
    let kind = kind.filter(|&kind| kind != Kind::Fragment);
    let kind = kind.ok_or(Malformed("a fragment of no frame"))?;
    let (offset, whole) = (u32_at(bytes, 4), u32_at(bytes, 8));
    if offset >= whole || whole as usize > FRAME_BODY_BYTES_MAX {
        return Err(Malformed("a fragment of a frame that cannot be"));
    }
    Ok(KindHeader::Fragment { kind, flags: bytes[1] & flag::ALL, offset, whole })
}

fn parse_atomic(bytes: &[u8]) -> Result<KindHeader, Malformed> {
    let length = u32_at(bytes, 24);
    if length as usize > crate::limit::ATOMIC_BYTES_MAX {
        return Err(Malformed("an atomic operation is longer than they may be"));
    }
    Ok(KindHeader::Atomic {
        op: u32_at(bytes, 0),
        operation: bytes[4],
        datatype: bytes[5],
        wants: bytes[6],
        key: u64_at(bytes, 8),
        offset: u64_at(bytes, 16),
        length,
    })
}

struct Pen<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Pen<'_> {
    #[inline]
    fn ranges(&mut self, ranges: [(u64, u32); SACK_RANGES]) {
        for (start, bytes) in ranges {
            self.u64(start).u32(bytes);
        }
        self.u32(0);
    }

    #[inline]
    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes[self.at..self.at + 4].copy_from_slice(&value.to_le_bytes());
        self.at += 4;
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    #[inline]
    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes[self.at..self.at + 8].copy_from_slice(&value.to_le_bytes());
        self.at += 8;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_emitted_is_parsed_and_has_the_size_of_its_kind() {
        for (kind, flags, head) in samples() {
            let mut bytes = [0; KIND_HEADER_BYTES_MAX];
            let size = head.emit(&mut bytes);
            assert_eq!(size, KindHeader::size(kind, flags), "{kind:?}");
            assert_eq!(KindHeader::parse(kind, flags, &bytes[..size]), Ok(head));
            if size > 0 {
                assert!(KindHeader::parse(kind, flags, &bytes[..size - 1]).is_err());
            }
        }
    }

    #[test]
    fn a_udp_port_without_a_token_is_refused() {
        assert!(KindHeader::parse(Kind::UdpAdvertisement, 0, &[0; 32]).is_err());
        assert!(KindHeader::parse(Kind::AddressAdvertisement, 0, &[0; 24]).is_ok());
    }

    #[test]
    fn a_status_request_or_its_answer_without_a_number_is_refused() {
        for (kind, size) in [(Kind::StatusRequest, 8), (Kind::StatusReply, 48)] {
            let mut bytes = [0; 48];
            assert!(KindHeader::parse(kind, 0, &bytes[..size]).is_err(), "{kind:?}");
            bytes[7] = 1;
            assert!(KindHeader::parse(kind, 0, &bytes[..size]).is_ok(), "{kind:?}");
        }
    }

    fn samples() -> [(Kind, u8, KindHeader); 22] {
        let long = Some(Long { total: 1 << 40, send: 9, memory: 0x7fff_0000_0000, ahead: 7 });
        let atomic = KindHeader::Atomic {
            op: 1,
            operation: 18,
            datatype: 13,
            wants: 3,
            length: 4096,
            key: u64::MAX,
            offset: 3,
        };
        [
            (Kind::Message, 0, KindHeader::Message { tag: 0, data: 2, long: None }),
            (Kind::Tagged, flag::LONG, KindHeader::Message { tag: 1, data: 2, long }),
            (Kind::Grant, 0, KindHeader::Grant { send: 1, recv: 2, limit: 3 }),
            (Kind::Data, 0, KindHeader::Data { recv: 1, offset: 2 }),
            (Kind::Ahead, 0, KindHeader::Ahead { send: 1, offset: 2 }),
            (Kind::Pulled, 0, KindHeader::Pulled { send: 1 }),
            (Kind::Ack, 0, KindHeader::Empty),
            (Kind::Write, 0, KindHeader::Write { op: 1, total: 9, key: 2, offset: 3, data: 4 }),
            (Kind::Read, 0, KindHeader::Read { op: 1, key: 2, offset: 3, length: 4 }),
            (Kind::ReadData, 0, KindHeader::ReadData { op: 1, offset: 2 }),
            (Kind::Atomic, 0, atomic),
            (Kind::AtomicReply, 0, KindHeader::AtomicReply { op: 1 }),
            (Kind::Refused, 0, KindHeader::Refused { op: 1, error: 14 }),
            (Kind::Goodbye, 0, KindHeader::Goodbye),
            (
                Kind::Fragment,
                0,
                KindHeader::Fragment {
                    kind: Kind::Tagged,
                    flags: flag::LONG,
                    offset: 5,
                    whole: 50,
                },
            ),
            (Kind::Sack, 0, KindHeader::Sack { ranges: [(1, 2), (u64::MAX, 9), (0, 0)] }),
            (
                Kind::StatusReply,
                0,
                KindHeader::StatusReply { number: 3, ranges: [(1, 2), (u64::MAX, 9), (0, 0)] },
            ),
            (Kind::StatusRequest, 0, KindHeader::StatusRequest { number: 4 }),
            (Kind::Nack, 0, KindHeader::Nack { start: 7, end: 9 }),
            (
                Kind::AddressAdvertisement,
                0,
                KindHeader::AddressAdvertisement(AdvertisedAddress {
                    ip: [9; 16],
                    port: 7711,
                    token: None,
                }),
            ),
            (
                Kind::UdpAdvertisement,
                0,
                KindHeader::AddressAdvertisement(AdvertisedAddress {
                    ip: [9; 16],
                    port: 7711,
                    token: NonZeroU64::new(1 << 63),
                }),
            ),
            (Kind::Lost, 0, KindHeader::Empty),
        ]
    }
}
