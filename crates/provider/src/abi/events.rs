//! Entries of completion and event queues, and the attributes with which objects are opened.

use std::ffi::{c_char, c_int, c_void};

use super::objects::Fid;

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

/// The longest completion format. An entry in any format is a prefix of this entry: 8 (context), 24
/// (msg), 40 (data) or 48 (tagged) bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CqTaggedEntry {
    pub op_context: usize,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut u8,
    pub data: u64,
    pub tag: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CqErrEntry {
    pub op_context: usize,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut u8,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    /// Present from 1.5 on.
    pub err_data_size: usize,
    /// Present from 1.20 on.
    pub src_addr: u64,
}

#[repr(C)]
pub struct CntrAttr {
    pub events: u32,
    pub wait_obj: u32,
    pub wait_set: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct EqAttr {
    pub size: usize,
    pub flags: u64,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_set: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EqEntry {
    pub fid: *mut Fid,
    pub context: *mut c_void,
    pub data: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EqErrEntry {
    pub fid: *mut Fid,
    pub context: *mut c_void,
    pub data: u64,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}

#[repr(C)]
pub struct PollAttr {
    pub flags: u64,
}

#[repr(C)]
pub struct AvAttr {
    pub kind: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

/// `fi_mr_attr` as of 1.17; newer fields are never read.
#[repr(C)]
pub struct MrAttr {
    pub mr_iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: u32,
    pub device: u64,
}

#[repr(C)]
pub struct AtomicAttr {
    pub count: usize,
    pub size: usize,
}
