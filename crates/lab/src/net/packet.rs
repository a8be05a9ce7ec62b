//! A packet in the format of a TUN device: an offload header of ten bytes, followed by an IP
//! packet.
//!
//! With segmentation offload one read may return up to 64 KiB: many TCP segments under one header,
//! whose checksum the device has to fill in. Such a packet is passed on unchanged (the receiving
//! kernel accepts it whole), or cut into the segments that a wire would carry if a link treats
//! packets separately. The bytes come from programs in the lab: every access is bounds-checked,
//! packets in an unknown format are carried unchanged, and no input causes a panic.

use std::net::Ipv4Addr;

/// Size of `struct virtio_net_hdr`, which precedes every packet on a TUN device with
/// `IFF_VNET_HDR`.
pub const OFFLOAD_BYTES: usize = 10;

/// Bytes of the largest read: the largest IP packet of 65,535 bytes, and the offload header.
pub const PACKET_BYTES_MAX: usize = 65_535 + OFFLOAD_BYTES;

const NEEDS_CHECKSUM: u8 = 1;
const SEGMENT_TCP4: u8 = 1;
const SEGMENT_ECN: u8 = 0x80;
const TCP: u8 = 6;
const UDP: u8 = 17;
const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;

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
    protocol: u8,
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
        let ip = self.ip();
        if ip.len() < 20 || ip[0] >> 4 != 4 {
            return None;
        }
        Some(Ipv4Addr::new(ip[16], ip[17], ip[18], ip[19]))
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
        let header = usize::from(self.ip()[0] & 15) * 4;
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
        const MORE_AND_OFFSET: u16 = 0x3fff;
        self.destination().is_some() && be_u16(self.ip(), 6) & MORE_AND_OFFSET != 0
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
        let layout = self.layout().filter(|layout| is_tcp4 && layout.protocol == TCP)?;
        let payload = self.ip().len() - layout.payload;
        (segment > 0 && payload > segment).then_some((layout, segment))
    }

    /// The layout of an IPv4 packet with complete TCP or UDP headers; `None` for other packets and
    /// for later fragments.
    fn layout(&self) -> Option<Layout> {
        let ip = self.ip();
        self.destination()?;
        let transport = usize::from(ip[0] & 15) * 4;
        let is_later_fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x1fff != 0;
        let header = match ip[9] {
            TCP => usize::from(*ip.get(transport + 12)? >> 4) * 4,
            UDP => 8,
            _ => return None,
        };
        let least = if ip[9] == TCP { 20 } else { 8 };
        let payload = transport + header;
        let is_whole = transport >= 20 && header >= least && payload <= ip.len();
        (is_whole && !is_later_fragment).then_some(Layout { transport, payload, protocol: ip[9] })
    }

    /// Changes the headers, which are still those of the whole packet, into those of a part that
    /// begins with segment `first` of `size` bytes.
    fn become_part(&mut self, layout: Layout, first: usize, size: usize, is_last: bool) {
        if self.ip().len() - layout.payload <= size {
            self.bytes[1] = 0;
            self.bytes[4..6].fill(0);
        }
        let ip = self.ip_mut();
        // A read never exceeds 65,535 bytes, so lengths fit; the identification may wrap.
        put_u16(ip, 2, ip.len() as u16);
        put_u16(ip, 4, be_u16(ip, 4).wrapping_add(first as u16));
        put_ip_checksum(&mut ip[..layout.transport]);
        let tcp = &mut ip[layout.transport..];
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        tcp[4..8].copy_from_slice(&sequence.wrapping_add((first * size) as u32).to_be_bytes());
        if !is_last {
            tcp[13] &= !TCP_FIN_PSH;
        }
        if first > 0 {
            tcp[13] &= !TCP_CWR;
        }
        self.leave_checksum_to_receiver(layout);
    }

    /// Sets the TCP checksum to that of the pseudo-header, and marks the checksum as incomplete.
    fn leave_checksum_to_receiver(&mut self, layout: Layout) {
        let pseudo = fold(pseudo_header_sum(self.ip(), layout));
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
        let checksum = !fold(sum(&ip[start..]));
        put_u16(ip, field, if checksum == 0 { 0xffff } else { checksum });
    }

    fn recompute_transport_checksum(&mut self, layout: Layout) {
        let field = layout.transport + if layout.protocol == TCP { 16 } else { 6 };
        let ip = self.ip_mut();
        // A UDP datagram may have no checksum.
        if layout.protocol == UDP && be_u16(ip, field) == 0 {
            return;
        }
        put_u16(ip, field, 0);
        let total = pseudo_header_sum(ip, layout) + sum(&ip[layout.transport..]);
        let checksum = !fold(total);
        put_u16(ip, field, if checksum == 0 { 0xffff } else { checksum });
    }
}

fn pseudo_header_sum(ip: &[u8], layout: Layout) -> u64 {
    sum(&ip[12..20]) + u64::from(layout.protocol) + (ip.len() - layout.transport) as u64
}

fn put_ip_checksum(header: &mut [u8]) {
    put_u16(header, 10, 0);
    let checksum = !fold(sum(header));
    put_u16(header, 10, checksum);
}

/// The unfolded sum of the Internet checksum; 64 KiB of bytes cannot overflow it.
fn sum(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks_exact(2);
    let odd = pairs.remainder().first().map_or(0, |&byte| u64::from(byte) << 8);
    pairs.map(|pair| u64::from(be_u16(pair, 0))).sum::<u64>() + odd
}

fn fold(mut total: u64) -> u16 {
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

fn be_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
pub(super) mod tests {
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
            let ip = segment.ip();
            assert_eq!(fold(sum(&ip[..20])), 0xffff, "IP checksum");
            assert_eq!(
                u32::from_be_bytes(ip[24..28].try_into().unwrap()),
                1000 + 1448 * index as u32
            );
            assert_eq!(ip[33] & TCP_FIN_PSH != 0, index == 2, "PSH on the last only");
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
            let headers_hold = fold(sum(&packet.ip()[..20])) == 0xffff;
            assert!(!headers_hold || !transport_checksum_holds(&packet), "{random}");
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
                assert_eq!(fold(sum(&packet.ip()[20..])), fold(sum(&intact.ip()[20..])));
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

    fn transport_checksum_holds(packet: &Packet) -> bool {
        let layout = Layout { transport: 20, payload: 40, protocol: TCP };
        fold(pseudo_header_sum(packet.ip(), layout) + sum(&packet.ip()[20..])) == 0xffff
    }

    /// A TCP packet to 192.0.2.2 with PSH whose checksum is left to the device, in the format of
    /// the kernel.
    pub fn tcp_packet(payload: usize, segment: u16) -> Packet {
        let mut bytes = vec![0; OFFLOAD_BYTES + 40];
        bytes[0] = NEEDS_CHECKSUM;
        bytes[1] = if segment > 0 { SEGMENT_TCP4 } else { 0 };
        bytes[4..6].copy_from_slice(&segment.to_ne_bytes());
        bytes.extend((0..payload).map(|i| (i % 251) as u8));
        let mut packet = Packet { bytes };
        let ip = packet.ip_mut();
        let total = ip.len() as u16;
        ip[0] = 0x45;
        ip[9] = TCP;
        ip[12..20].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
        put_u16(ip, 2, total);
        ip[24..28].copy_from_slice(&1000u32.to_be_bytes());
        ip[32] = 5 << 4;
        ip[33] = 0x18;
        put_ip_checksum(&mut ip[..20]);
        packet.leave_checksum_to_receiver(Layout { transport: 20, payload: 40, protocol: TCP });
        packet
    }
}
