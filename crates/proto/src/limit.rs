//! Every bound of the protocol, with the reason for its value. Units are in the names.

/// Protocol version spoken in the hello. Peers of another version are refused.
pub const PROTOCOL_VERSION: u16 = 9;

/// Most bytes after a frame's header (head and payload). Large enough that a header costs nothing,
/// small enough that a relay may buffer one frame per link and that other channels are not held up.
pub const FRAME_BODY_BYTES_MAX: usize = (1 << 20) + 128;

/// Bytes of the check of a frame's payload, between its head and the payload.
pub const CHECKSUM_BYTES: usize = 4;

/// Most bytes of a frame's head, over all kinds.
pub const KIND_HEADER_BYTES_MAX: usize = 48;

/// Payload of one frame through a relay: the unit in which channels share a link. At 1 Gb/s it
/// takes 0.25 ms, which bounds how long an urgent small frame waits behind a large one. With header and head
/// such a frame fits into an eighth of a shared-memory ring, so a relay never has to cut it.
pub const RELAY_PAYLOAD_BYTES_MAX: usize = (32 << 10) - 128;

/// Bytes of a large message that may be under way through relays before the receiver, by taking
/// them in, lets more come: the bandwidth-delay product of 1 Gb/s at 32 ms.
pub const RELAY_WINDOW_BYTES: u64 = 4 << 20;

/// Memory a process gives to unexpected eager payload, over all its peers. Relays keep as much for a process that does
/// not read: so it must be modest.
pub const EAGER_TOTAL_BYTES: u64 = 64 << 20;

/// Least and most eager credit one peer is given out of it.
pub const EAGER_WINDOW_BYTES_MIN: u32 = 16 << 10;
/// See [`EAGER_WINDOW_BYTES_MIN`].
pub const EAGER_WINDOW_BYTES_MAX: u32 = 2 << 20;

/// Atomic operands (or results) in one frame.
pub const ATOMIC_BYTES_MAX: usize = 8192;

/// A handshake that takes longer is given up: a stalled or half-open peer holds nothing for long.
pub const HELLO_MILLIS_MAX: u64 = 5_000;

/// Relays between source and target. More means a loop.
pub const HOPS_MAX: u8 = 16;

/// Eager credit of one peer in a job of `processes`: an equal share of [`EAGER_TOTAL_BYTES`]. Both ends
/// compute it, so channels through relays need no hello of their own.
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
    // An inject must always fit the credit of one peer, or it could wait for ever.
    assert!(eager_window(u32::MAX) == EAGER_WINDOW_BYTES_MIN);
};
