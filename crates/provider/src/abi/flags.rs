//! Constants of the interface, by the names of its manual without `FI_`.

// Capabilities and operation flags (one 64-bit name space).
pub const MSG: u64 = 1 << 1;
pub const RMA: u64 = 1 << 2;
pub const TAGGED: u64 = 1 << 3;
pub const ATOMIC: u64 = 1 << 4;
pub const READ: u64 = 1 << 8;
pub const WRITE: u64 = 1 << 9;
pub const RECV: u64 = 1 << 10;
/// The flag is also FI_TRANSMIT.
pub const SEND: u64 = 1 << 11;
pub const REMOTE_READ: u64 = 1 << 12;
pub const REMOTE_WRITE: u64 = 1 << 13;
pub const MULTI_RECV: u64 = 1 << 16;
pub const REMOTE_CQ_DATA: u64 = 1 << 17;
pub const MORE: u64 = 1 << 18;
pub const PEEK: u64 = 1 << 19;
pub const FENCE: u64 = 1 << 21;
pub const COMPLETION: u64 = 1 << 24;
pub const EVENT: u64 = COMPLETION;
pub const INJECT: u64 = 1 << 25;
pub const INJECT_COMPLETE: u64 = 1 << 26;
pub const TRANSMIT_COMPLETE: u64 = 1 << 27;
pub const DELIVERY_COMPLETE: u64 = 1 << 28;
pub const PEER: u64 = 1 << 43;
/// Defined from 2.x on; the bit had no meaning before.
pub const TAGGED_DIRECTED_RECV: u64 = 1 << 45;
pub const HMEM: u64 = 1 << 47;
pub const LOCAL_COMM: u64 = 1 << 51;
pub const REMOTE_COMM: u64 = 1 << 52;
pub const NUMERICHOST: u64 = 1 << 55;
pub const SOURCE: u64 = 1 << 57;
pub const DIRECTED_RECV: u64 = 1 << 59;

// Flags of single calls.
pub const CLAIM: u64 = 1 << 59;
pub const DISCARD: u64 = 1 << 58;
pub const FETCH_ATOMIC: u64 = 1 << 58;
pub const COMPARE_ATOMIC: u64 = 1 << 59;
pub const SELECTIVE_COMPLETION: u64 = 1 << 59;
pub const AV_SYNC_ERR: u64 = 1 << 58;
pub const AV_SYMMETRIC: u64 = 1 << 59;
/// Internal flag of libfabric: only a provider that is not layered over others may answer. Set when
/// a utility provider looks for a provider below it.
pub const CORE_PROV_ONLY: u64 = 1 << 59;

// Ordering.
pub const ORDER_RAR: u64 = 1 << 0;
pub const ORDER_RAW: u64 = 1 << 1;
pub const ORDER_WAR: u64 = 1 << 3;
pub const ORDER_WAW: u64 = 1 << 4;
pub const ORDER_SAS: u64 = 1 << 8;
pub const ORDER_ATOMIC_RAR: u64 = 1 << 36;
pub const ORDER_ATOMIC_RAW: u64 = 1 << 37;
pub const ORDER_ATOMIC_WAR: u64 = 1 << 38;
pub const ORDER_ATOMIC_WAW: u64 = 1 << 39;

// Address formats.
pub const FORMAT_UNSPEC: u32 = 0;
pub const FORMAT_SOCKADDR: u32 = 1;
pub const FORMAT_SOCKADDR_IN: u32 = 2;
/// SOCKADDR_IN or SOCKADDR_IN6, defined from 2.x on.
pub const FORMAT_SOCKADDR_IP: u32 = 17;

// Enumerations of fi_info.
pub const EP_UNSPEC: u32 = 0;
pub const EP_RDM: u32 = 3;
pub const AV_UNSPEC: u32 = 0;
pub const AV_MAP: u32 = 1;
pub const AV_TABLE: u32 = 2;
pub const PROGRESS_UNSPEC: u32 = 0;
pub const PROGRESS_AUTO: u32 = 1;
pub const PROGRESS_MANUAL: u32 = 2;
pub const PROGRESS_CONTROL_UNIFIED: u32 = 3;
pub const THREAD_UNSPEC: u32 = 0;
pub const THREAD_SAFE: u32 = 1;
pub const THREAD_DOMAIN: u32 = 3;
pub const THREAD_LAST: u32 = 5;
pub const RM_UNSPEC: u32 = 0;
pub const RM_ENABLED: u32 = 2;
pub const PROTO_UNSPEC: u32 = 0;
pub const MR_BASIC: i32 = 1 << 0;
pub const MR_SCALABLE: i32 = 1 << 1;

// Object classes.
pub const CLASS_FABRIC: usize = 1;
pub const CLASS_DOMAIN: usize = 2;
pub const CLASS_EP: usize = 3;
pub const CLASS_AV: usize = 11;
pub const CLASS_MR: usize = 12;
pub const CLASS_EQ: usize = 13;
pub const CLASS_CQ: usize = 14;
pub const CLASS_CNTR: usize = 15;
pub const CLASS_POLL: usize = 17;

// Commands of fi_control.
pub const GETOPSFLAG: i32 = 2;
pub const SETOPSFLAG: i32 = 3;
pub const GETWAIT: i32 = 5;
pub const ENABLE: i32 = 6;
pub const GETWAITOBJ: i32 = 16;

// Endpoint options.
pub const OPT_ENDPOINT: i32 = 0;
pub const OPT_MIN_MULTI_RECV: i32 = 0;
pub const OPT_CM_DATA_SIZE: i32 = 1;
pub const OPT_TX_SIZE: i32 = 6;
pub const OPT_RX_SIZE: i32 = 7;
pub const OPT_MAX_MSG_SIZE: i32 = 12;
pub const OPT_MAX_TAGGED_SIZE: i32 = 13;
pub const OPT_MAX_RMA_SIZE: i32 = 14;
pub const OPT_MAX_ATOMIC_SIZE: i32 = 15;
pub const OPT_INJECT_MSG_SIZE: i32 = 16;
pub const OPT_INJECT_TAGGED_SIZE: i32 = 17;
pub const OPT_INJECT_RMA_SIZE: i32 = 18;
pub const OPT_INJECT_ATOMIC_SIZE: i32 = 19;

// Wait objects.
pub const WAIT_NONE: u32 = 0;
pub const WAIT_UNSPEC: u32 = 1;
pub const WAIT_FD: u32 = 3;
pub const WAIT_YIELD: u32 = 5;

// Completion formats.
pub const CQ_FORMAT_UNSPEC: u32 = 0;
pub const CQ_FORMAT_CONTEXT: u32 = 1;
pub const CQ_FORMAT_MSG: u32 = 2;
pub const CQ_FORMAT_DATA: u32 = 3;
pub const CQ_FORMAT_TAGGED: u32 = 4;

pub const CNTR_EVENTS_COMP: u32 = 0;

// Events of an event queue.
pub const EQ_AV_COMPLETE: u32 = 5;

/// `fi_mr_attr.iface` of ordinary memory.
pub const HMEM_SYSTEM: u32 = 0;

// Log levels and subsystems.
pub const LOG_WARN: i32 = 0;
pub const LOG_TRACE: i32 = 1;
pub const LOG_INFO: i32 = 2;
pub const LOG_DEBUG: i32 = 3;
pub const LOG_CORE: i32 = 0;

// Datatypes and operations of atomics.
pub const INT8: u32 = 0;
pub const UINT8: u32 = 1;
pub const INT16: u32 = 2;
pub const UINT16: u32 = 3;
pub const INT32: u32 = 4;
pub const UINT32: u32 = 5;
pub const INT64: u32 = 6;
pub const UINT64: u32 = 7;
pub const FLOAT: u32 = 8;
pub const DOUBLE: u32 = 9;
pub const FLOAT_COMPLEX: u32 = 10;
pub const DOUBLE_COMPLEX: u32 = 11;
pub const LONG_DOUBLE: u32 = 12;
pub const LONG_DOUBLE_COMPLEX: u32 = 13;
pub const INT128: u32 = 14;
pub const UINT128: u32 = 15;

pub const OP_MIN: u32 = 0;
pub const OP_MAX: u32 = 1;
pub const OP_SUM: u32 = 2;
pub const OP_PROD: u32 = 3;
pub const OP_LOR: u32 = 4;
pub const OP_LAND: u32 = 5;
pub const OP_BOR: u32 = 6;
pub const OP_BAND: u32 = 7;
pub const OP_LXOR: u32 = 8;
pub const OP_BXOR: u32 = 9;
pub const OP_READ: u32 = 10;
pub const OP_WRITE: u32 = 11;
pub const OP_CSWAP: u32 = 12;
pub const OP_CSWAP_NE: u32 = 13;
pub const OP_CSWAP_LE: u32 = 14;
pub const OP_CSWAP_LT: u32 = 15;
pub const OP_CSWAP_GE: u32 = 16;
pub const OP_CSWAP_GT: u32 = 17;
pub const OP_MSWAP: u32 = 18;
