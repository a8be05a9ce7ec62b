//! Table entries that are not offered. The entries are not null, because libfabric calls most table
//! entries without a check.

use std::ffi::{c_char, c_int, c_void};

use crate::abi::*;

type Void = *mut c_void;

macro_rules! not_offered {
    ($($name:ident($($argument:ty),*);)*) => {
        $(
            pub unsafe extern "C" fn $name($(_: $argument),*) -> c_int {
                Errno::ENOSYS.negative()
            }
        )*
    };
}

not_offered! {
    ops_open(*mut Fid, *const c_char, u64, *mut Void, Void);
    tostr(*const Fid, *mut c_char, usize);
    ops_set(*mut Fid, *const c_char, u64, Void, Void);
    bind(*mut Fid, *mut Fid, u64);
    control(*mut Fid, c_int, Void);
    passive_ep(*mut FidFabric, *mut Info, *mut Void, Void);
    wait_open(*mut FidFabric, Void, *mut Void);
    scalable_ep(*mut FidDomain, *mut Info, *mut *mut FidEp, Void);
    stx_ctx(*mut FidDomain, *mut TxAttr, *mut Void, Void);
    srx_ctx(*mut FidDomain, *mut RxAttr, *mut *mut FidEp, Void);
    query_collective(*mut FidDomain, u32, Void, u64);
    tx_ctx(*mut FidEp, c_int, *mut TxAttr, *mut *mut FidEp, Void);
    rx_ctx(*mut FidEp, c_int, *mut RxAttr, *mut *mut FidEp, Void);
    getpeer(*mut FidEp, Void, *mut usize);
    connect(*mut FidEp, *const c_void, *const c_void, usize);
    listen(Void);
    accept(*mut FidEp, *const c_void, usize);
    reject(Void, *mut Fid, *const c_void, usize);
    shutdown(*mut FidEp, u64);
    join(*mut FidEp, *const c_void, u64, *mut Void, Void);
    av_set(*mut FidAv, Void, *mut Void, Void);
    insert_auth_key(*mut FidAv, *const c_void, usize, *mut FiAddr, u64);
    lookup_auth_key(*mut FidAv, FiAddr, Void, *mut usize);
    set_user_id(*mut FidAv, FiAddr, FiAddr, u64);
}
