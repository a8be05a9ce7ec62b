//! Operation tables and the argument structures of the `*msg` calls.
//!
//! libfabric calls these entries without a check for null pointers, so no entry is optional here.

use std::ffi::{c_char, c_int, c_void};

use libc::iovec;

use super::FiAddr;
use super::events::*;
use super::objects::*;

type Void = *mut c_void;
type Desc = *mut *mut c_void;

#[repr(C)]
pub struct Msg {
    pub iov: *const iovec,
    pub desc: Desc,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub context: Void,
    pub data: u64,
}

#[repr(C)]
pub struct MsgTagged {
    pub iov: *const iovec,
    pub desc: Desc,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub tag: u64,
    pub ignore: u64,
    pub context: Void,
    pub data: u64,
}

#[repr(C)]
pub struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
pub struct MsgRma {
    pub iov: *const iovec,
    pub desc: Desc,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: Void,
    pub data: u64,
}

/// Local memory of an atomic operation, counted in elements.
#[repr(C)]
pub struct Ioc {
    pub addr: Void,
    pub count: usize,
}

/// Remote memory of an atomic operation, counted in elements.
#[repr(C)]
pub struct RmaIoc {
    pub addr: u64,
    pub count: usize,
    pub key: u64,
}

#[repr(C)]
pub struct MsgAtomic {
    pub iov: *const Ioc,
    pub desc: Desc,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub rma_iov: *const RmaIoc,
    pub rma_iov_count: usize,
    pub datatype: u32,
    pub op: u32,
    pub context: Void,
    pub data: u64,
}

#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, Void) -> c_int,
    pub ops_open:
        unsafe extern "C" fn(*mut Fid, *const c_char, u64, *mut *mut c_void, Void) -> c_int,
    pub tostr: unsafe extern "C" fn(*const Fid, *mut c_char, usize) -> c_int,
    pub ops_set: unsafe extern "C" fn(*mut Fid, *const c_char, u64, Void, Void) -> c_int,
}

#[repr(C)]
pub struct OpsFabric {
    pub size: usize,
    pub domain: unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, Void) -> c_int,
    pub passive_ep: unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut Void, Void) -> c_int,
    pub eq_open: unsafe extern "C" fn(*mut FidFabric, *mut EqAttr, *mut *mut FidEq, Void) -> c_int,
    pub wait_open: unsafe extern "C" fn(*mut FidFabric, Void, *mut Void) -> c_int,
    pub trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
    pub domain2:
        unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, u64, Void) -> c_int,
}

#[repr(C)]
pub struct OpsDomain {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, Void) -> c_int,
    pub cq_open: unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, Void) -> c_int,
    pub endpoint: unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, Void) -> c_int,
    pub scalable_ep:
        unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, Void) -> c_int,
    pub cntr_open:
        unsafe extern "C" fn(*mut FidDomain, *mut CntrAttr, *mut *mut FidCntr, Void) -> c_int,
    pub poll_open:
        unsafe extern "C" fn(*mut FidDomain, *mut PollAttr, *mut *mut FidPoll, Void) -> c_int,
    pub stx_ctx: unsafe extern "C" fn(*mut FidDomain, *mut TxAttr, *mut Void, Void) -> c_int,
    pub srx_ctx: unsafe extern "C" fn(*mut FidDomain, *mut RxAttr, *mut *mut FidEp, Void) -> c_int,
    pub query_atomic: unsafe extern "C" fn(*mut FidDomain, u32, u32, *mut AtomicAttr, u64) -> c_int,
    pub query_collective: unsafe extern "C" fn(*mut FidDomain, u32, Void, u64) -> c_int,
    pub endpoint2:
        unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, u64, Void) -> c_int,
}

#[repr(C)]
pub struct OpsMr {
    pub size: usize,
    pub reg: unsafe extern "C" fn(
        *mut Fid,
        *const c_void,
        usize,
        u64,
        u64,
        u64,
        u64,
        *mut *mut FidMr,
        Void,
    ) -> c_int,
    pub regv: unsafe extern "C" fn(
        *mut Fid,
        *const iovec,
        usize,
        u64,
        u64,
        u64,
        u64,
        *mut *mut FidMr,
        Void,
    ) -> c_int,
    pub regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int,
}

#[repr(C)]
pub struct OpsEp {
    pub size: usize,
    pub cancel: unsafe extern "C" fn(*mut Fid, Void) -> isize,
    pub getopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, Void, *mut usize) -> c_int,
    pub setopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int,
    pub tx_ctx:
        unsafe extern "C" fn(*mut FidEp, c_int, *mut TxAttr, *mut *mut FidEp, Void) -> c_int,
    pub rx_ctx:
        unsafe extern "C" fn(*mut FidEp, c_int, *mut RxAttr, *mut *mut FidEp, Void) -> c_int,
    pub rx_size_left: unsafe extern "C" fn(*mut FidEp) -> isize,
    pub tx_size_left: unsafe extern "C" fn(*mut FidEp) -> isize,
}

#[repr(C)]
pub struct OpsCm {
    pub size: usize,
    pub setname: unsafe extern "C" fn(*mut Fid, Void, usize) -> c_int,
    pub getname: unsafe extern "C" fn(*mut Fid, Void, *mut usize) -> c_int,
    pub getpeer: unsafe extern "C" fn(*mut FidEp, Void, *mut usize) -> c_int,
    pub connect: unsafe extern "C" fn(*mut FidEp, *const c_void, *const c_void, usize) -> c_int,
    pub listen: unsafe extern "C" fn(Void) -> c_int,
    pub accept: unsafe extern "C" fn(*mut FidEp, *const c_void, usize) -> c_int,
    pub reject: unsafe extern "C" fn(Void, *mut Fid, *const c_void, usize) -> c_int,
    pub shutdown: unsafe extern "C" fn(*mut FidEp, u64) -> c_int,
    pub join: unsafe extern "C" fn(*mut FidEp, *const c_void, u64, *mut Void, Void) -> c_int,
}

#[repr(C)]
pub struct OpsMsg {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut FidEp, Void, usize, Void, FiAddr, Void) -> isize,
    pub recvv: unsafe extern "C" fn(*mut FidEp, *const iovec, Desc, usize, FiAddr, Void) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, u64) -> isize,
    pub send: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, Void, FiAddr, Void) -> isize,
    pub sendv: unsafe extern "C" fn(*mut FidEp, *const iovec, Desc, usize, FiAddr, Void) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr) -> isize,
    pub senddata:
        unsafe extern "C" fn(*mut FidEp, *const c_void, usize, Void, u64, FiAddr, Void) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, FiAddr) -> isize,
}

#[repr(C)]
pub struct OpsTagged {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut FidEp, Void, usize, Void, FiAddr, u64, u64, Void) -> isize,
    pub recvv: unsafe extern "C" fn(
        *mut FidEp,
        *const iovec,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        Void,
    ) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, u64) -> isize,
    pub send:
        unsafe extern "C" fn(*mut FidEp, *const c_void, usize, Void, FiAddr, u64, Void) -> isize,
    pub sendv:
        unsafe extern "C" fn(*mut FidEp, *const iovec, Desc, usize, FiAddr, u64, Void) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr, u64) -> isize,
    pub senddata: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        u64,
        FiAddr,
        u64,
        Void,
    ) -> isize,
    pub injectdata:
        unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, FiAddr, u64) -> isize,
}

#[repr(C)]
pub struct OpsRma {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidEp, Void, usize, Void, FiAddr, u64, u64, Void) -> isize,
    pub readv: unsafe extern "C" fn(
        *mut FidEp,
        *const iovec,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        Void,
    ) -> isize,
    pub readmsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub write: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        FiAddr,
        u64,
        u64,
        Void,
    ) -> isize,
    pub writev: unsafe extern "C" fn(
        *mut FidEp,
        *const iovec,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        Void,
    ) -> isize,
    pub writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr, u64, u64) -> isize,
    pub writedata: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        u64,
        FiAddr,
        u64,
        u64,
        Void,
    ) -> isize,
    pub injectdata:
        unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, FiAddr, u64, u64) -> isize,
}

#[repr(C)]
pub struct OpsAtomic {
    pub size: usize,
    pub write: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub writev: unsafe extern "C" fn(
        *mut FidEp,
        *const Ioc,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgAtomic, u64) -> isize,
    pub inject:
        unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr, u64, u64, u32, u32) -> isize,
    pub readwrite: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        Void,
        Void,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub readwritev: unsafe extern "C" fn(
        *mut FidEp,
        *const Ioc,
        Desc,
        usize,
        *mut Ioc,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub readwritemsg:
        unsafe extern "C" fn(*mut FidEp, *const MsgAtomic, *mut Ioc, Desc, usize, u64) -> isize,
    pub compwrite: unsafe extern "C" fn(
        *mut FidEp,
        *const c_void,
        usize,
        Void,
        *const c_void,
        Void,
        Void,
        Void,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub compwritev: unsafe extern "C" fn(
        *mut FidEp,
        *const Ioc,
        Desc,
        usize,
        *const Ioc,
        Desc,
        usize,
        *mut Ioc,
        Desc,
        usize,
        FiAddr,
        u64,
        u64,
        u32,
        u32,
        Void,
    ) -> isize,
    pub compwritemsg: unsafe extern "C" fn(
        *mut FidEp,
        *const MsgAtomic,
        *const Ioc,
        Desc,
        usize,
        *mut Ioc,
        Desc,
        usize,
        u64,
    ) -> isize,
    pub writevalid: unsafe extern "C" fn(*mut FidEp, u32, u32, *mut usize) -> c_int,
    pub readwritevalid: unsafe extern "C" fn(*mut FidEp, u32, u32, *mut usize) -> c_int,
    pub compwritevalid: unsafe extern "C" fn(*mut FidEp, u32, u32, *mut usize) -> c_int,
}

#[repr(C)]
pub struct OpsCq {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidCq, Void, usize) -> isize,
    pub readfrom: unsafe extern "C" fn(*mut FidCq, Void, usize, *mut FiAddr) -> isize,
    pub readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, u64) -> isize,
    pub sread: unsafe extern "C" fn(*mut FidCq, Void, usize, *const c_void, c_int) -> isize,
    pub sreadfrom:
        unsafe extern "C" fn(*mut FidCq, Void, usize, *mut FiAddr, *const c_void, c_int) -> isize,
    pub signal: unsafe extern "C" fn(*mut FidCq) -> c_int,
    pub strerror:
        unsafe extern "C" fn(*mut FidCq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

#[repr(C)]
pub struct OpsCntr {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidCntr) -> u64,
    pub readerr: unsafe extern "C" fn(*mut FidCntr) -> u64,
    pub add: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub set: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub wait: unsafe extern "C" fn(*mut FidCntr, u64, c_int) -> c_int,
    pub adderr: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub seterr: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
}

#[repr(C)]
pub struct OpsPoll {
    pub size: usize,
    pub poll: unsafe extern "C" fn(*mut FidPoll, *mut Void, c_int) -> c_int,
    pub add: unsafe extern "C" fn(*mut FidPoll, *mut Fid, u64) -> c_int,
    pub del: unsafe extern "C" fn(*mut FidPoll, *mut Fid, u64) -> c_int,
}

#[repr(C)]
pub struct OpsEq {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidEq, *mut u32, Void, usize, u64) -> isize,
    pub readerr: unsafe extern "C" fn(*mut FidEq, *mut EqErrEntry, u64) -> isize,
    pub write: unsafe extern "C" fn(*mut FidEq, u32, *const c_void, usize, u64) -> isize,
    pub sread: unsafe extern "C" fn(*mut FidEq, *mut u32, Void, usize, c_int, u64) -> isize,
    pub strerror:
        unsafe extern "C" fn(*mut FidEq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

#[repr(C)]
pub struct OpsAv {
    pub size: usize,
    pub insert:
        unsafe extern "C" fn(*mut FidAv, *const c_void, usize, *mut FiAddr, u64, Void) -> c_int,
    pub insertsvc: unsafe extern "C" fn(
        *mut FidAv,
        *const c_char,
        *const c_char,
        *mut FiAddr,
        u64,
        Void,
    ) -> c_int,
    pub insertsym: unsafe extern "C" fn(
        *mut FidAv,
        *const c_char,
        usize,
        *const c_char,
        usize,
        *mut FiAddr,
        u64,
        Void,
    ) -> c_int,
    pub remove: unsafe extern "C" fn(*mut FidAv, *mut FiAddr, usize, u64) -> c_int,
    pub lookup: unsafe extern "C" fn(*mut FidAv, FiAddr, Void, *mut usize) -> c_int,
    pub straddr:
        unsafe extern "C" fn(*mut FidAv, *const c_void, *mut c_char, *mut usize) -> *const c_char,
    pub av_set: unsafe extern "C" fn(*mut FidAv, Void, *mut Void, Void) -> c_int,
    pub insert_auth_key:
        unsafe extern "C" fn(*mut FidAv, *const c_void, usize, *mut FiAddr, u64) -> c_int,
    pub lookup_auth_key: unsafe extern "C" fn(*mut FidAv, FiAddr, Void, *mut usize) -> c_int,
    pub set_user_id: unsafe extern "C" fn(*mut FidAv, FiAddr, FiAddr, u64) -> c_int,
}
