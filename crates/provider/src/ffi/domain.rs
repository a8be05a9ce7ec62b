//! A domain: what its endpoints, queues, counters and address vectors share.

use std::sync::Arc;

use super::{Head, Object};
use crate::abi::{CLASS_DOMAIN, FidDomain};
use crate::engine_set::EngineSet;
use crate::info::AddressFormat;
use crate::mr::MrTable;

#[repr(C)]
pub struct Domain {
    head: Head<FidDomain>,
    pub api_version: u32,
    /// Format of names in the domain's address vectors.
    pub format: AddressFormat,
    pub memory: Arc<MrTable>,
    /// The engines of the domain's enabled endpoints.
    pub engines: EngineSet,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for Domain {
    const CLASS: usize = CLASS_DOMAIN;
}

impl Domain {
    pub fn new(fid: FidDomain, api_version: u32, format: AddressFormat) -> Domain {
        Domain {
            head: Head::new(fid),
            api_version,
            format,
            memory: Arc::new(MrTable::default()),
            engines: EngineSet::new(),
        }
    }
}
