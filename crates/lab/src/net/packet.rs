//! A packet in the format of a TUN device: an offload header of ten bytes, followed by an IP
//! packet.
//!
//! With segmentation offload one read may return up to 64 KiB: many TCP segments under one header,
//! whose checksum the device has to fill in. Such a packet is passed on unchanged (the receiving
//! kernel accepts it whole), or cut into the segments that a wire would carry if a link treats
//! packets separately. The bytes come from programs in the lab: every access is bounds-checked,
//! packets in an unknown format are carried unchanged, and no input causes a panic.

use std::net::Ipv4Addr;

use etherparse::checksum::Sum16BitWords;
use etherparse::{
    IpNumber, Ipv4Header, Ipv4HeaderSlice, TcpHeader, TcpHeaderSlice, UdpHeaderSlice,
};

/// Size of `struct virtio_net_hdr`, which precedes every packet on a TUN device with
/// `IFF_VNET_HDR`.
pub const OFFLOAD_BYTES: usize = 10;

/// Bytes of the largest read: the largest IP packet of 65,535 bytes, and the offload header.
pub const PACKET_BYTES_MAX: usize = 65_535 + OFFLOAD_BYTES;

const NEEDS_CHECKSUM: u8 = 1;
const SEGMENT_TCP4: u8 = 1;
const SEGMENT_ECN: u8 = 0x80;

/// One packet, offload header included.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Packet {
    bytes: Vec<u8>,
}

/// Offsets of the parts of an IPv4 packet, relative to the IP header.
#[derive(Clone, Copy)]
struct Layout {
    transport: usize,
    payload: usize,
    protocol: IpNumber,
}

impl Packet {
    /// A packet from the bytes of a TUN device; `None` if the bytes are too short for an offload
    /// header.
    pub fn new(bytes: &[u8]) -> Option<Packet> {
        (bytes.len() > OFFLOAD_BYTES).then(|| Packet { bytes: bytes.to_vec() })
    }

    /// The bytes for a TUN device.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The destination address; `None` for packets other than IPv4.
    pub fn destination(&self) -> Option<Ipv4Addr> {
        Some(self.header()?.destination_addr())
    }

    /// Bytes of IP packets that a wire would carry for this packet: each segment with headers of
    /// its own.
    pub fn wire_bytes(&self) -> u64 {
        let headers = self.segmented().map_or(0, |(layout, _)| layout.payload);
        (self.ip().len() + (self.segment_count() - 1) * headers) as u64
    }

    /// Number of packets that a wire would carry for this packet, at least one.
    pub fn segment_count(&self) -> usize {
        self.segmented()
            .map_or(1, |(layout, size)| (self.ip().len() - layout.payload).div_ceil(size))
    }

    /// `count` segments of this packet, beginning with number `first`, joined in one packet. The
    /// range lies within `segment_count`.
    pub fn segments(&self, first: usize, count: usize) -> Packet {
        let Some((layout, size)) = self.segmented() else { return self.clone() };
        let start = layout.payload + first * size;
        let end = self.ip().len().min(start + count * size);
        let mut bytes = Vec::with_capacity(OFFLOAD_BYTES + layout.payload + end - start);
        bytes.extend_from_slice(&self.bytes[..OFFLOAD_BYTES + layout.payload]);
        bytes.extend_from_slice(&self.ip()[start..end]);
        let mut part = Packet { bytes };
        part.become_part(layout, first, size, end == self.ip().len());
        part
    }

    /// Flips one to three bits that `random` selects. With `repair` the bits lie in the payload of
    /// the transport protocol, and all checksums stay valid; without `repair` any bits of the
    /// packet are flipped after its checksums have been filled in, as on a faulty wire. The
    /// checksum of a fragmented datagram is in its first fragment: for fragments, `repair` flips
    /// two bits whose changes cancel out in the sum.
    pub fn corrupt(&mut self, random: u64, repair: bool) {
        if repair && self.is_fragment() {
            return self.corrupt_keeping_checksum(random);
        }
        let layout = self.layout();
        self.fill_in_checksum();
        let start = match (repair, layout) {
            (false, _) => OFFLOAD_BYTES,
            (true, Some(layout)) => OFFLOAD_BYTES + layout.payload,
            (true, None) => return,
        };
        let bits = (self.bytes.len() - start) as u64 * 8;
        if bits == 0 {
            return;
        }
        let mut place = random >> 2;
        for _ in 0..1 + random % 3 {
            let bit = (place % bits) as usize;
            self.bytes[start + bit / 8] ^= 1 << (bit % 8);
            // The step is odd, so that no bit is flipped back: three consecutive positions modulo
            // any size above three differ.
            place = place.wrapping_add(13);
        }
        if let (true, Some(layout)) = (repair, layout) {
            self.recompute_transport_checksum(layout);
        }
    }

    /// Flips the same bit of two 16-bit words, from 0 to 1 in one word and from 1 to 0 in the
    /// other: the Internet checksum over both words stays unchanged. The function does nothing if
    /// it finds no such words.
    fn corrupt_keeping_checksum(&mut self, random: u64) {
        const TRIES: u64 = 64;
        let header = self.header().map_or(0, |header| header.slice().len());
        let start = self.layout().map_or(header, |layout| layout.payload);
        let ip = self.ip_mut();
        let words = (ip.len().saturating_sub(start) / 2) as u64;
        for random in (0..TRIES).map(|turn| random.wrapping_add(turn.wrapping_mul(0x1_0001_0003))) {
            if words < 2 {
                return;
            }
            let [a, b] =
                [random >> 8, random >> 32].map(|place| start + 2 * (place % words) as usize);
            let bit = 1u16 << (random % 16);
            let (one, other) = (be_u16(ip, a), be_u16(ip, b));
            if (one ^ other) & bit != 0 {
                put_u16(ip, a, one ^ bit);
                put_u16(ip, b, other ^ bit);
                return;
            }
        }
    }

    /// Whether the packet is a fragment of an IPv4 packet.
    fn is_fragment(&self) -> bool {
        self.header().is_some_and(|header| header.is_fragmenting_payload())
    }

    /// The IP header of an IPv4 packet.
    fn header(&self) -> Option<Ipv4HeaderSlice<'_>> {
        Ipv4HeaderSlice::from_slice(self.ip()).ok()
    }

    fn ip(&self) -> &[u8] {
        &self.bytes[OFFLOAD_BYTES..]
    }

    fn ip_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[OFFLOAD_BYTES..]
    }

    fn offload_u16(&self, at: usize) -> usize {
        usize::from(u16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]))
    }

    /// Layout and segment size if the packet consists of several TCP segments.
    fn segmented(&self) -> Option<(Layout, usize)> {
        let segment = self.offload_u16(4);
        let is_tcp4 = self.bytes[1] & !SEGMENT_ECN == SEGMENT_TCP4;
        let layout = self.layout().filter(|layout| is_tcp4 && layout.protocol == IpNumber::TCP)?;
        let payload = self.ip().len() - layout.payload;
        (segment > 0 && payload > segment).then_some((layout, segment))
    }

    /// The layout of an IPv4 packet with complete TCP or UDP headers; `None` for other packets and
    /// for later fragments.
    fn layout(&self) -> Option<Layout> {
        let header = self.header()?;
        let transport = header.slice().len();
        let rest = &self.ip()[transport..];
        let length = match header.protocol() {
            IpNumber::TCP => TcpHeaderSlice::from_slice(rest).ok()?.slice().len(),
            IpNumber::UDP => UdpHeaderSlice::from_slice(rest).ok()?.slice().len(),
            _ => return None,
        };
        let (payload, protocol) = (transport + length, header.protocol());
        let is_later_fragment = header.fragments_offset().value() != 0;
        (!is_later_fragment).then_some(Layout { transport, payload, protocol })
    }

    /// Changes the headers, which are still those of the whole packet, into those of a part that
    /// begins with segment `first` of `size` bytes.
    fn become_part(&mut self, layout: Layout, first: usize, size: usize, is_last: bool) {
        if self.ip().len() - layout.payload <= size {
            self.bytes[1] = 0;
            self.bytes[4..6].fill(0);
        }
        let ip = self.ip_mut();
        let headers = (Ipv4Header::from_slice(ip), TcpHeader::from_slice(&ip[layout.transport..]));
        let (Ok((mut header, _)), Ok((mut tcp, _))) = headers else { return };
        // A read never exceeds 65,535 bytes, so lengths fit; the identification may wrap.
        header.total_len = ip.len() as u16;
        header.identification = header.identification.wrapping_add(first as u16);
        header.header_checksum = header.calc_header_checksum();
        tcp.sequence_number = tcp.sequence_number.wrapping_add((first * size) as u32);
        tcp.fin &= is_last;
        tcp.psh &= is_last;
        tcp.cwr &= first == 0;
        ip[..layout.transport].copy_from_slice(&header.to_bytes());
        ip[layout.transport..layout.payload].copy_from_slice(&tcp.to_bytes());
        self.leave_checksum_to_receiver(layout);
    }

    /// Sets the TCP checksum to that of the pseudo-header, and marks the checksum as incomplete.
    fn leave_checksum_to_receiver(&mut self, layout: Layout) {
        let pseudo = !pseudo_header_sum(self.ip(), layout).ones_complement().to_be();
        put_u16(self.ip_mut(), layout.transport + 16, pseudo);
        self.bytes[0] = NEEDS_CHECKSUM;
        self.bytes[6..8].copy_from_slice(&(layout.transport as u16).to_ne_bytes());
        self.bytes[8..10].copy_from_slice(&16u16.to_ne_bytes());
    }

    /// Completes a checksum that the sending kernel has left to the device.
    fn fill_in_checksum(&mut self) {
        if self.bytes[0] & NEEDS_CHECKSUM == 0 {
            return;
        }
        let (start, field) = (self.offload_u16(6), self.offload_u16(6) + self.offload_u16(8));
        self.bytes[0] &= !NEEDS_CHECKSUM;
        let ip = self.ip_mut();
        if field + 2 > ip.len() {
            return;
        }
        let sum = Sum16BitWords::new().add_slice(&ip[start..]);
        put_u16(ip, field, sum.to_ones_complement_with_no_zero().to_be());
    }

    fn recompute_transport_checksum(&mut self, layout: Layout) {
        let field = layout.transport + if layout.protocol == IpNumber::TCP { 16 } else { 6 };
        let ip = self.ip_mut();
        // A UDP datagram may have no checksum.
        if layout.protocol == IpNumber::UDP && be_u16(ip, field) == 0 {
            return;
        }
        put_u16(ip, field, 0);
        let sum = pseudo_header_sum(ip, layout).add_slice(&ip[layout.transport..]);
        put_u16(ip, field, sum.to_ones_complement_with_no_zero().to_be());
    }
}

fn pseudo_header_sum(ip: &[u8], layout: Layout) -> Sum16BitWords {
    let length = (ip.len() - layout.transport) as u16;
    let sum = Sum16BitWords::new().add_slice(&ip[12..20]);
    sum.add_2bytes([0, layout.protocol.0]).add_2bytes(length.to_be_bytes())
}

fn be_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
pub(super) mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_plain_packet_is_its_own_segment() {
        let packet = tcp_packet(100, 0);
        assert_eq!(packet.wire_bytes(), 140);
        assert_eq!(packet.segment_count(), 1);
        assert_eq!(packet.segments(0, 1), packet);
    }

    #[test]
    fn segments_are_what_a_wire_would_have_seen() {
        let packet = tcp_packet(3000, 1448);
        assert_eq!(packet.destination(), Some(Ipv4Addr::new(192, 0, 2, 2)));
        assert_eq!(packet.wire_bytes(), 3000 + 3 * 40);
        let segments = cut(&packet);
        let sizes: Vec<usize> = segments.iter().map(|s| s.ip().len() - 40).collect();
        assert_eq!(sizes, [1448, 1448, 104]);
        let payload: Vec<u8> = segments.iter().flat_map(|s| s.ip()[40..].to_vec()).collect();
        assert_eq!(payload, &packet.ip()[40..]);
        for (index, mut segment) in segments.into_iter().enumerate() {
            assert!(ip_checksum_holds(&segment), "IP checksum");
            let tcp = TcpHeaderSlice::from_slice(&segment.ip()[20..]).unwrap();
            assert_eq!(tcp.sequence_number(), 1000 + 1448 * index as u32);
            assert_eq!(tcp.psh(), index == 2, "PSH on the last only");
            segment.fill_in_checksum();
            assert!(transport_checksum_holds(&segment));
        }
    }

    #[test]
    fn a_part_of_several_segments_is_cut_like_the_whole() {
        let packet = tcp_packet(5000, 1000);
        let part = packet.segments(1, 3);
        assert_eq!(part.wire_bytes(), 3 * 1040);
        assert_eq!(cut(&part), cut(&packet)[1..4]);
    }

    #[test]
    fn corruption_on_the_wire_breaks_a_checksum() {
        for random in 0..200 {
            let mut packet = tcp_packet(500, 0);
            packet.corrupt(random * 7919, false);
            assert!(!ip_checksum_holds(&packet) || !transport_checksum_holds(&packet), "{random}");
        }
    }

    #[test]
    fn repaired_corruption_keeps_checksums_and_headers() {
        for random in 0..200 {
            let mut intact = tcp_packet(500, 0);
            let mut packet = intact.clone();
            packet.corrupt(random * 7919, true);
            intact.fill_in_checksum();
            assert!(transport_checksum_holds(&packet));
            assert_eq!(packet.ip()[..36], intact.ip()[..36]);
            assert_ne!(packet.ip()[40..], intact.ip()[40..]);
        }
    }

    #[test]
    fn repaired_corruption_of_a_fragment_keeps_its_share_of_the_checksum() {
        for offset_and_more in [0x2000u16, 0x2064, 0x0064] {
            for random in 0..200u64 {
                let mut intact = tcp_packet(500, 0);
                intact.fill_in_checksum();
                put_u16(intact.ip_mut(), 6, offset_and_more);
                let mut packet = intact.clone();
                packet.corrupt(random.wrapping_mul(0x9E37_79B9_7F4A_7C15), true);
                assert_eq!(packet.ip()[..20], intact.ip()[..20]);
                assert_eq!(checksum(&packet.ip()[20..]), checksum(&intact.ip()[20..]));
                assert_ne!(packet.ip()[20..], intact.ip()[20..], "{random}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            bytes in prop::collection::vec(any::<u8>(), 11..200),
            random: u64,
            repair: bool,
        ) {
            let mut packet = Packet::new(&bytes).unwrap();
            prop_assert!(packet.wire_bytes() >= (bytes.len() - OFFLOAD_BYTES) as u64);
            packet.destination();
            cut(&packet);
            packet.corrupt(random, repair);
        }

        #[test]
        fn nearly_sane_packets_do_not_panic_either(
            at in 0usize..60,
            value: u8,
            payload in 0usize..5000,
            segment in 0u16..3000,
            random: u64,
            repair: bool,
        ) {
            let mut packet = tcp_packet(payload, segment);
            let at = at.min(packet.bytes.len() - 1);
            packet.bytes[at] = value;
            let wire: u64 = packet.wire_bytes();
            let segments = cut(&packet);
            prop_assert_eq!(segments.iter().map(|s| s.ip().len() as u64).sum::<u64>(), wire);
            packet.corrupt(random, repair);
        }
    }

    fn cut(packet: &Packet) -> Vec<Packet> {
        (0..packet.segment_count()).map(|index| packet.segments(index, 1)).collect()
    }

    fn checksum(bytes: &[u8]) -> u16 {
        Sum16BitWords::new().add_slice(bytes).ones_complement()
    }

    fn ip_checksum_holds(packet: &Packet) -> bool {
        checksum(&packet.ip()[..20]) == 0
    }

    fn transport_checksum_holds(packet: &Packet) -> bool {
        let layout = Layout { transport: 20, payload: 40, protocol: IpNumber::TCP };
        pseudo_header_sum(packet.ip(), layout).add_slice(&packet.ip()[20..]).ones_complement() == 0
    }

    /// A TCP packet to 192.0.2.2 with PSH whose checksum is left to the device, in the format of
    /// the kernel.
    pub fn tcp_packet(payload: usize, segment: u16) -> Packet {
        let mut bytes = vec![0; OFFLOAD_BYTES];
        bytes[1] = if segment > 0 { SEGMENT_TCP4 } else { 0 };
        bytes[4..6].copy_from_slice(&segment.to_ne_bytes());
        let payload: Vec<u8> = (0..payload).map(|i| (i % 251) as u8).collect();
        PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64)
            .tcp(1, 2, 1000, 8192)
            .psh()
            .ack(1)
            .write(&mut bytes, &payload)
            .unwrap();
        let mut packet = Packet { bytes };
        let layout = Layout { transport: 20, payload: 40, protocol: IpNumber::TCP };
        packet.leave_checksum_to_receiver(layout);
        packet
    }
}
