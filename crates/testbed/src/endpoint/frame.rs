//! A frame on its way from one endpoint to another.

use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;

/// A frame on its way.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The header.
    pub header: Header,
    /// The kind header.
    pub head: Vec<u8>,
    /// The payload, as far as it has left its sender. Memory without bytes adds nothing.
    pub payload: Vec<u8>,
    /// Bytes of the whole payload.
    pub size: u64,
}

impl Frame {
    /// The frame that begins with `front`, without the part of its payload that lies in memory.
    ///
    /// # Panics
    /// Panics if an endpoint could not have written `front`.
    pub fn new(front: &[u8]) -> Self {
        let header = Header::parse(front).expect("a header");
        let head = KindHeader::size(header.kind, header.flags);
        let (size, check) = header.payload(head).expect("a payload");
        let (head, payload) = front[HEADER_BYTES..].split_at(head);
        // Between kind header and payload lies the checksum.
        Self { header, head: head.to_vec(), payload: payload[check..].to_vec(), size }
    }

    /// Writes the frame behind `bytes`, as a stream carries it.
    ///
    /// # Panics
    /// Panics if the frame has a checksum, or if a part of its payload has not left its sender.
    pub fn emit(&self, bytes: &mut Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.header.emit(&mut header);
        let before = bytes.len();
        bytes.extend(header);
        bytes.extend(&self.head);
        bytes.extend(&self.payload);
        assert_eq!(bytes.len() - before, HEADER_BYTES + self.header.length as usize);
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.header.kind
    }

    /// The kind header.
    ///
    /// # Panics
    /// Panics if an endpoint could not have written the frame.
    pub fn kind_header(&self) -> KindHeader {
        KindHeader::parse(self.header.kind, self.header.flags, &self.head).expect("a kind header")
    }
}
