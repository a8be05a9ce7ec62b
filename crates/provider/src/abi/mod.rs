//! libfabric's binary interface as a provider sees it, written from the facts of the public headers
//! (newest layout: 2.5). The module contains no behaviour; `layout` asserts every size.
//!
//! One binary works with every libfabric from 1.17 on. Structures have grown at their ends only:
//!
//! | structure | newer fields | rule |
//! |---|---|---|
//! | `DomainAttr` | from `max_ep_auth_key` | newest size written; hints read as `DomainAttrBase` |
//! | `CqErrEntry` | `src_addr` (1.20) | copied out by the caller's version |
//! | `OpsAv` | the auth-key calls | guarded by `size` |
//! | `MrAttr` | from `hmem_data` | never read |
//!
//! Objects, their operation tables and the attributes point to each other in circles, as in the
//! headers, so these modules have no order.

mod errno;
mod events;
mod flags;
#[cfg(test)]
mod layout;
mod objects;
mod tables;

pub use errno::Errno;
pub use events::*;
pub use flags::*;
pub use objects::*;
pub use tables::*;

/// An index in an address vector (`fi_addr_t`).
pub type FiAddr = u64;

/// A receive accepts messages from any peer.
pub const ADDR_UNSPEC: FiAddr = u64::MAX;
/// The sender is not in the address vector.
pub const ADDR_NOTAVAIL: FiAddr = u64::MAX;

/// `FI_VERSION(major, minor)`
pub const fn version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

/// The libfabric version whose layouts this module contains.
pub const LAYOUT_VERSION: u32 = version(2, 5);
