//! Every bound of the protocol, with the reason for its value. The names contain the units.

/// Protocol version in the hello. Peers of another version are refused.
pub const PROTOCOL_VERSION: u16 = 10;

/// Most bytes after the header of a frame (kind header and payload). Large enough that a header
/// costs nothing, and small enough that a relay may buffer one frame per link and that other
/// channels are not held up.
pub const FRAME_BODY_BYTES_MAX: usize = (1 << 20) + 128;

/// Bytes of the checksum of a frame's payload, between the kind header and the payload.
pub const CHECKSUM_BYTES: usize = 4;

/// Most bytes of a frame's kind header, over all kinds.
pub const KIND_HEADER_BYTES_MAX: usize = 48;

/// Most payload bytes of one frame through a relay: the unit in which channels share a link. At 1
/// Gbit/s such a frame takes 0.25 ms, which bounds how long an urgent small frame waits behind a
/// large one. With header and kind header the frame fits into an eighth of a shared-memory ring, so
/// a relay never has to split it.
pub const RELAY_PAYLOAD_BYTES_MAX: usize = (32 << 10) - 128;

/// Most bytes of a large message in flight through relays before the receiver, by receiving them,
/// allows further ones: the bandwidth-delay product of 1 Gbit/s and 32 ms.
pub const RELAY_WINDOW_BYTES: u64 = 4 << 20;

/// Bytes of memory that a process gives to unexpected eager payload, over all its peers. The size
/// is modest, because relays buffer as many bytes for a process that does not read.
pub const EAGER_TOTAL_BYTES: u64 = 64 << 20;

/// Least eager credit of one peer out of [`EAGER_TOTAL_BYTES`], in bytes.
pub const EAGER_WINDOW_BYTES_MIN: u32 = 16 << 10;
/// Most eager credit of one peer out of [`EAGER_TOTAL_BYTES`], in bytes.
pub const EAGER_WINDOW_BYTES_MAX: u32 = 2 << 20;

/// Most bytes of atomic operands, or of results, in one frame.
pub const ATOMIC_BYTES_MAX: usize = 8192;

/// Milliseconds after which a handshake is given up, so that a stalled or half-open peer holds no
/// resources for long.
pub const HELLO_MILLIS_MAX: u64 = 5_000;

/// Most relays between source and target. More relays mean a routing loop.
pub const HOPS_MAX: u8 = 16;

/// Eager credit of one peer in a job of `processes`, in bytes: an equal share of
/// [`EAGER_TOTAL_BYTES`]. Both ends compute the same value, so channels through relays need no
/// hello of their own.
pub const fn eager_window(processes: u32) -> u32 {
    let processes = if processes == 0 { 1 } else { processes };
    let share = EAGER_TOTAL_BYTES / processes as u64;
    if share > EAGER_WINDOW_BYTES_MAX as u64 {
        EAGER_WINDOW_BYTES_MAX
    } else if share < EAGER_WINDOW_BYTES_MIN as u64 {
        EAGER_WINDOW_BYTES_MIN
    } else {
        share as u32
    }
}

const _: () = {
    assert!(RELAY_PAYLOAD_BYTES_MAX + KIND_HEADER_BYTES_MAX <= FRAME_BODY_BYTES_MAX);
    assert!(2 * ATOMIC_BYTES_MAX + KIND_HEADER_BYTES_MAX <= FRAME_BODY_BYTES_MAX);
    assert!(2 * ATOMIC_BYTES_MAX <= RELAY_PAYLOAD_BYTES_MAX);
    // An injected message must always fit into the credit of one peer, or it could wait for ever.
    assert!(eager_window(u32::MAX) == EAGER_WINDOW_BYTES_MIN);
};
