//! `fi_getinfo`: what the provider offers, and whether the offer meets the caller's hints.
//!
//! The result has at most one entry. The offer echoes what a caller may choose freely (threading,
//! progress, address vector type, operation flags). Hints beyond the provider's abilities get
//! `ENODATA`. The entry is libc memory, which the host frees.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::wire::name::Name;

use crate::abi::{self, *};
use crate::av::NAME_BYTES;
use crate::log;
use crate::resolve::{self, ResolveHints, SOCKADDR_BYTES};

pub const NAME: &CStr = c"landbridge";

/// Maximum number of bytes of an inject call: the bytes are sent or copied before the call returns.
/// The value is the least credit of a peer.
pub const INJECT_SIZE: usize = 16_384;
/// Maximum size of a message in bytes; the engine cuts long messages. The value is so large that
/// MPICH never cuts messages itself.
pub const MESSAGE_SIZE_MAX: usize = 1 << 62;
/// Maximum number of local pieces in a call. Arrays of this length live on the caller's stack.
pub const IOV_MAX: usize = 8;
/// Maximum number of remote pieces in a call. No MPI library uses several, and several pieces would
/// be several operations.
pub const RMA_IOV_MAX: usize = 1;
/// Number of operations in flight that a program may count on; more are accepted.
const QUEUE_DEPTH: usize = 1024;
/// Largest queue depth that a caller may request.
const QUEUE_DEPTH_MAX: usize = 1 << 20;
/// Maximum number of objects of one kind per domain; no table has this size.
const OBJECTS_MAX: usize = 65_536;
/// Bytes of remote CQ data that MPI libraries use; MPICH changes its protocol if 8 are offered.
const CQ_DATA_BYTES: usize = 4;
/// Largest number of bytes of remote CQ data that a caller may request.
const CQ_DATA_BYTES_MAX: usize = 8;
const MR_KEY_BYTES: usize = 8;
/// Maximum number of pieces per registration.
pub const MR_IOV_MAX: usize = 1;
/// Tag format: all 64 bits of a tag belong to the caller.
const TAG_FORMAT: u64 = 0xAAAA_AAAA_AAAA_AAAA;
/// Number of the protocol between Landbridge endpoints.
const PROTOCOL: u32 = 0x8000_1b01;
const PROTOCOL_VERSION: u32 = 1;
/// `fi_info.addr_format` of a Landbridge address; the top bit means provider specific.
pub const FORMAT_LANDBRIDGE: u32 = 0x8000_1b01;

const PRIMARY_CAPS: u64 = MSG | RMA | TAGGED | ATOMIC;
const MESSAGE_CAPS: u64 = SEND | RECV;
const REMOTE_CAPS: u64 = READ | WRITE | REMOTE_READ | REMOTE_WRITE;
/// Capabilities granted in any case, since they cost nothing.
const FREE_CAPS: u64 = MULTI_RECV | LOCAL_COMM | REMOTE_COMM;
/// Capabilities offered to a caller without hints.
const OFFERED_CAPS: u64 = PRIMARY_CAPS | MESSAGE_CAPS | REMOTE_CAPS | FREE_CAPS | DIRECTED_RECV;
/// Capabilities granted only on request: finding the sender's number costs a look-up per message.
const SPECIAL_CAPS: u64 = SOURCE | TAGGED_DIRECTED_RECV;
const DOMAIN_CAPS: u64 = LOCAL_COMM | REMOTE_COMM;
const TX_CAPS: u64 = PRIMARY_CAPS | READ | WRITE | SEND;
const RX_CAPS: u64 =
    PRIMARY_CAPS | RECV | REMOTE_READ | REMOTE_WRITE | MULTI_RECV | DIRECTED_RECV | SPECIAL_CAPS;

const TX_OP_FLAGS: u64 =
    COMPLETION | INJECT | INJECT_COMPLETE | TRANSMIT_COMPLETE | DELIVERY_COMPLETE | REMOTE_CQ_DATA;
const RX_OP_FLAGS: u64 = COMPLETION | abi::MULTI_RECV;
/// Messages match in the order in which they were sent; atomics on one target execute in order.
const MESSAGE_ORDER: u64 =
    ORDER_SAS | ORDER_ATOMIC_RAR | ORDER_ATOMIC_RAW | ORDER_ATOMIC_WAR | ORDER_ATOMIC_WAW;

/// The format of endpoint names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressFormat {
    /// A Landbridge name: 48 bytes with the process, the job and the addresses of the endpoint.
    Landbridge,
    /// `sockaddr_in`
    Socket,
}

impl AddressFormat {
    pub fn code(self) -> u32 {
        match self {
            AddressFormat::Landbridge => FORMAT_LANDBRIDGE,
            AddressFormat::Socket => FORMAT_SOCKADDR_IN,
        }
    }

    /// Length of an address in bytes.
    pub fn bytes(self) -> usize {
        match self {
            AddressFormat::Landbridge => NAME_BYTES,
            AddressFormat::Socket => SOCKADDR_BYTES,
        }
    }

    pub fn of_code(code: u32) -> AddressFormat {
        match code {
            FORMAT_SOCKADDR | FORMAT_SOCKADDR_IN | FORMAT_SOCKADDR_IP => AddressFormat::Socket,
            _ => AddressFormat::Landbridge,
        }
    }
}

/// The provider's `getinfo`.
///
/// # Safety
/// The contract of `fi_getinfo` holds: strings end with NUL or are null, hints are null or made by
/// this host.
pub unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    info: *mut *mut Info,
) -> c_int {
    // SAFETY: the caller upholds this function's safety contract.
    let request = unsafe { InfoRequest::read(version, node, service, flags, hints) };
    match offer(&request) {
        Ok(list) => {
            // SAFETY: `info` points to the caller's variable for the list.
            unsafe { *info = list };
            0
        }
        Err(refusal) => {
            log!(Debug, "not offered: {}", refusal.why);
            refusal.errno.negative()
        }
    }
}

struct HintsMismatch {
    errno: Errno,
    why: &'static str,
}

fn refuse<T>(why: &'static str) -> Result<T, HintsMismatch> {
    Err(HintsMismatch { errno: Errno::ENODATA, why })
}

fn require(met: bool, why: &'static str) -> Result<(), HintsMismatch> {
    if met { Ok(()) } else { refuse(why) }
}

/// The caller's request, as references. Absent parts request nothing.
struct InfoRequest<'a> {
    version: u32,
    node: Option<&'a CStr>,
    service: Option<&'a CStr>,
    flags: u64,
    hints: Option<&'a Info>,
    tx: Option<&'a TxAttr>,
    rx: Option<&'a RxAttr>,
    ep: Option<&'a EpAttr>,
    domain: Option<&'a DomainAttrBase>,
    fabric: Option<&'a FabricAttr>,
}

impl<'a> InfoRequest<'a> {
    /// # Safety
    /// The safety contract of `getinfo` holds.
    unsafe fn read(
        version: u32,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const Info,
    ) -> InfoRequest<'a> {
        // SAFETY: the pointers are null or valid by the caller's contract; the domain's attributes
        // are read only as far as the oldest host has them.
        unsafe {
            let hints = hints.as_ref();
            InfoRequest {
                version,
                node: text(node),
                service: text(service),
                flags,
                hints,
                tx: hints.and_then(|h| h.tx_attr.as_ref()),
                rx: hints.and_then(|h| h.rx_attr.as_ref()),
                ep: hints.and_then(|h| h.ep_attr.as_ref()),
                domain: hints.and_then(|h| h.domain_attr.as_ref()),
                fabric: hints.and_then(|h| h.fabric_attr.as_ref()),
            }
        }
    }

    fn caps(&self) -> u64 {
        self.hints.map_or(0, |h| h.caps)
    }
}

fn offer(request: &InfoRequest) -> Result<*mut Info, HintsMismatch> {
    require(
        request.flags & CORE_PROV_ONLY == 0,
        "a utility provider asks for something to sit on",
    )?;
    check_caps(request)?;
    check_endpoint(request)?;
    check_transfers(request)?;
    check_domain(request)?;
    let format = choose_format(request)?;
    let (source, target) = addresses(request, format)?;
    build(request, format, source, target)
        .ok_or(HintsMismatch { errno: Errno::ENOMEM, why: "no memory" })
}

fn check_caps(request: &InfoRequest) -> Result<(), HintsMismatch> {
    let known = OFFERED_CAPS | SPECIAL_CAPS;
    require(request.caps() & !known == 0, "capabilities we do not have")?;
    require(request.tx.is_none_or(|tx| tx.caps & !known == 0), "transmit capabilities")?;
    require(request.rx.is_none_or(|rx| rx.caps & !known == 0), "receive capabilities")?;
    require(request.domain.is_none_or(|d| d.caps & !DOMAIN_CAPS == 0), "domain capabilities")
}

fn check_endpoint(request: &InfoRequest) -> Result<(), HintsMismatch> {
    let Some(ep) = request.ep else { return Ok(()) };
    require(matches!(ep.kind, EP_UNSPEC | EP_RDM), "an endpoint type other than RDM")?;
    require(matches!(ep.protocol, PROTO_UNSPEC | PROTOCOL), "another protocol")?;
    require(ep.protocol_version <= PROTOCOL_VERSION, "a newer protocol")?;
    require(ep.max_msg_size <= MESSAGE_SIZE_MAX, "longer messages")?;
    require(ep.tx_ctx_cnt <= 1 && ep.rx_ctx_cnt <= 1, "scalable or shared contexts")?;
    require(ep.auth_key_size == 0, "authorization keys")
}

fn check_transfers(request: &InfoRequest) -> Result<(), HintsMismatch> {
    if let Some(tx) = request.tx {
        require(tx.op_flags & !TX_OP_FLAGS == 0, "transmit flags")?;
        require(tx.msg_order & !MESSAGE_ORDER == 0, "transmit order")?;
        require(tx.comp_order == 0, "completion order")?;
        require(tx.inject_size <= INJECT_SIZE, "a larger inject size")?;
        require(tx.size <= QUEUE_DEPTH_MAX, "a deeper transmit queue")?;
        require(tx.iov_limit <= IOV_MAX, "more vectors")?;
        require(tx.rma_iov_limit <= RMA_IOV_MAX, "more remote vectors")?;
    }
    if let Some(rx) = request.rx {
        require(rx.op_flags & !RX_OP_FLAGS == 0, "receive flags")?;
        require(rx.msg_order & !MESSAGE_ORDER == 0, "receive order")?;
        require(rx.comp_order == 0, "completion order")?;
        require(rx.size <= QUEUE_DEPTH_MAX, "a deeper receive queue")?;
        require(rx.iov_limit <= IOV_MAX, "more vectors")?;
    }
    Ok(())
}

fn check_domain(request: &InfoRequest) -> Result<(), HintsMismatch> {
    if let Some(fabric) = request.fabric {
        // SAFETY: strings in hints end with NUL.
        require(unsafe { named_like_us(fabric.name) }, "another fabric")?;
    }
    let Some(domain) = request.domain else { return Ok(()) };
    // SAFETY: strings in hints end with NUL.
    require(unsafe { named_like_us(domain.name) }, "another domain")?;
    require(domain.threading <= THREAD_LAST, "an unknown threading model")?;
    require(domain.control_progress <= PROGRESS_CONTROL_UNIFIED, "an unknown control progress")?;
    require(
        matches!(domain.data_progress, PROGRESS_UNSPEC | PROGRESS_MANUAL),
        "progress of data without calls",
    )?;
    require(domain.resource_mgmt <= RM_ENABLED, "an unknown resource management")?;
    require(domain.av_type <= AV_TABLE, "an unknown address vector type")?;
    require(domain.mr_mode != MR_BASIC, "MR_BASIC registration")?;
    require(domain.mr_key_size <= MR_KEY_BYTES, "longer keys")?;
    require(domain.cq_data_size <= CQ_DATA_BYTES_MAX, "more CQ data")?;
    require(domain.mr_iov_limit <= MR_IOV_MAX, "vectored registration")?;
    require(domain.max_ep_tx_ctx <= 1 && domain.max_ep_rx_ctx <= 1, "scalable endpoints")?;
    require(domain.max_ep_stx_ctx == 0 && domain.max_ep_srx_ctx == 0, "shared contexts")?;
    let counts = [domain.cq_cnt, domain.ep_cnt, domain.tx_ctx_cnt, domain.rx_ctx_cnt];
    require(counts.iter().all(|&n| n <= OBJECTS_MAX), "more objects")?;
    require(domain.cntr_cnt <= OBJECTS_MAX && domain.mr_cnt <= OBJECTS_MAX, "more objects")?;
    require(domain.auth_key_size == 0, "authorization keys")
}

/// Chooses the Landbridge format, unless the caller uses socket addresses or node and service
/// strings.
fn choose_format(request: &InfoRequest) -> Result<AddressFormat, HintsMismatch> {
    let strings = request.node.is_some() || request.service.is_some();
    match request.hints.map_or(FORMAT_UNSPEC, |h| h.addr_format) {
        FORMAT_UNSPEC if strings => Ok(AddressFormat::Socket),
        FORMAT_UNSPEC => Ok(AddressFormat::Landbridge),
        FORMAT_SOCKADDR | FORMAT_SOCKADDR_IN | FORMAT_SOCKADDR_IP => Ok(AddressFormat::Socket),
        FORMAT_LANDBRIDGE if strings => refuse("a node string in our own address format"),
        FORMAT_LANDBRIDGE => Ok(AddressFormat::Landbridge),
        _ => refuse("another address format"),
    }
}

type Addresses = (Option<Vec<u8>>, Option<Vec<u8>>);

/// Source and destination address, from the strings or else from the hints.
fn addresses(request: &InfoRequest, format: AddressFormat) -> Result<Addresses, HintsMismatch> {
    let (mut source, mut target) = (None, None);
    if let Some(hints) = request.hints {
        // SAFETY: addresses in hints have the length that the hints give.
        unsafe {
            source = hinted(hints.src_addr, hints.src_addrlen, format)?;
            target = hinted(hints.dest_addr, hints.dest_addrlen, format)?;
        }
    }
    if request.node.is_some() || request.service.is_some() {
        let passive = request.flags & SOURCE != 0;
        let how = ResolveHints { passive, numeric: request.flags & NUMERICHOST != 0 };
        let Ok(found) = resolve::resolve(request.node, request.service, how) else {
            return refuse("the node or service is not known");
        };
        let bytes = Some(resolve::sockaddr_bytes(found).to_vec());
        if passive { source = bytes } else { target = bytes }
    }
    source.get_or_insert_with(|| anywhere(format));
    Ok((source, target))
}

/// The source address of an unbound endpoint: callers read the format from this address.
fn anywhere(format: AddressFormat) -> Vec<u8> {
    match format {
        AddressFormat::Socket => {
            let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
            resolve::sockaddr_bytes(any).to_vec()
        }
        AddressFormat::Landbridge => {
            let nobody = Name {
                address: Address::ANONYMOUS,
                unique: 0,
                cluster: ClusterId(0),
                node: 0,
                ip: Ipv6Addr::UNSPECIFIED.octets(),
                further: Default::default(),
                port: 0,
            };
            nobody.emit().to_vec()
        }
    }
}

/// # Safety
/// `address` is null or points to `len` bytes.
unsafe fn hinted(
    address: *const c_void,
    len: usize,
    format: AddressFormat,
) -> Result<Option<Vec<u8>>, HintsMismatch> {
    if address.is_null() || len == 0 {
        return Ok(None);
    }
    require(len >= format.bytes(), "an address too short for its format")?;
    // SAFETY: the address has at least `format.bytes()` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), format.bytes()) };
    if format == AddressFormat::Socket {
        // SAFETY: a socket address has this many bytes.
        let known = unsafe { resolve::read_sockaddr(address) };
        require(known.is_some(), "an address that is not IPv4")?;
    }
    Ok(Some(bytes.to_vec()))
}

/// The granted capabilities: the completed request, or everything for an empty request.
fn granted_caps(asked: u64) -> u64 {
    if asked == 0 {
        return OFFERED_CAPS;
    }
    let mut caps = asked | FREE_CAPS;
    if caps & (MSG | TAGGED) != 0 && caps & MESSAGE_CAPS == 0 {
        caps |= MESSAGE_CAPS;
    }
    if caps & (RMA | ATOMIC) != 0 && caps & REMOTE_CAPS == 0 {
        caps |= REMOTE_CAPS;
    }
    if caps & MSG == 0 {
        caps &= !(MULTI_RECV & !asked);
    }
    caps
}

fn build(
    request: &InfoRequest,
    format: AddressFormat,
    source: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
) -> Option<*mut Info> {
    let caps = granted_caps(request.caps());
    let (src_addr, src_addrlen) = c_bytes(source)?;
    let (dest_addr, dest_addrlen) = c_bytes(target)?;
    c_box(Info {
        next: std::ptr::null_mut(),
        caps,
        mode: 0,
        addr_format: format.code(),
        src_addrlen,
        dest_addrlen,
        src_addr,
        dest_addr,
        handle: std::ptr::null_mut(),
        tx_attr: c_box(tx_attr(request.tx, caps))?,
        rx_attr: c_box(rx_attr(request.rx, caps))?,
        ep_attr: c_box(ep_attr())?,
        domain_attr: c_box(domain_attr(request)?)?.cast(),
        fabric_attr: c_box(fabric_attr(request)?)?,
        nic: std::ptr::null_mut(),
    })
}

fn tx_attr(hints: Option<&TxAttr>, caps: u64) -> TxAttr {
    TxAttr {
        caps: caps & TX_CAPS,
        mode: 0,
        op_flags: hints.map_or(0, |h| h.op_flags),
        msg_order: hint_or(hints.map(|h| h.msg_order), MESSAGE_ORDER),
        comp_order: 0,
        inject_size: INJECT_SIZE,
        size: hints.map_or(0, |h| h.size).max(QUEUE_DEPTH),
        iov_limit: IOV_MAX,
        rma_iov_limit: RMA_IOV_MAX,
        tclass: 0,
    }
}

fn rx_attr(hints: Option<&RxAttr>, caps: u64) -> RxAttr {
    RxAttr {
        caps: caps & RX_CAPS,
        mode: 0,
        op_flags: hints.map_or(0, |h| h.op_flags),
        msg_order: hint_or(hints.map(|h| h.msg_order), MESSAGE_ORDER),
        comp_order: 0,
        total_buffered_recv: 0,
        size: hints.map_or(0, |h| h.size).max(QUEUE_DEPTH),
        iov_limit: IOV_MAX,
    }
}

fn ep_attr() -> EpAttr {
    EpAttr {
        kind: EP_RDM,
        protocol: PROTOCOL,
        protocol_version: PROTOCOL_VERSION,
        max_msg_size: MESSAGE_SIZE_MAX,
        msg_prefix_size: 0,
        max_order_raw_size: MESSAGE_SIZE_MAX,
        max_order_war_size: MESSAGE_SIZE_MAX,
        max_order_waw_size: MESSAGE_SIZE_MAX,
        mem_tag_format: TAG_FORMAT,
        tx_ctx_cnt: 1,
        rx_ctx_cnt: 1,
        auth_key_size: 0,
        auth_key: std::ptr::null_mut(),
    }
}

fn domain_attr(request: &InfoRequest) -> Option<DomainAttr> {
    let hints = request.domain;
    let data = hints.map_or(0, |h| h.cq_data_size);
    Some(DomainAttr {
        base: DomainAttrBase {
            domain: hints.map_or(std::ptr::null_mut(), |h| h.domain),
            name: c_text(NAME)?,
            threading: hint_or(hints.map(|h| h.threading), THREAD_SAFE),
            control_progress: hint_or(hints.map(|h| h.control_progress), PROGRESS_MANUAL),
            data_progress: PROGRESS_MANUAL,
            resource_mgmt: hint_or(hints.map(|h| h.resource_mgmt), RM_ENABLED),
            av_type: hints.map_or(AV_UNSPEC, |h| h.av_type),
            mr_mode: granted_mr_mode(request),
            mr_key_size: MR_KEY_BYTES,
            cq_data_size: if data > CQ_DATA_BYTES { CQ_DATA_BYTES_MAX } else { CQ_DATA_BYTES },
            cq_cnt: OBJECTS_MAX,
            ep_cnt: OBJECTS_MAX,
            tx_ctx_cnt: OBJECTS_MAX,
            rx_ctx_cnt: OBJECTS_MAX,
            max_ep_tx_ctx: 1,
            max_ep_rx_ctx: 1,
            max_ep_stx_ctx: 0,
            max_ep_srx_ctx: 0,
            cntr_cnt: OBJECTS_MAX,
            mr_iov_limit: MR_IOV_MAX,
            caps: DOMAIN_CAPS,
            mode: 0,
            auth_key: std::ptr::null_mut(),
            auth_key_size: 0,
            max_err_data: 0,
            mr_cnt: OBJECTS_MAX,
            tclass: 0,
        },
        max_ep_auth_key: 0,
        max_group_id: 0,
        max_cntr_value: u64::MAX,
        max_err_cntr_value: u64::MAX,
    })
}

/// The registration mode: the provider needs no mode bit. Before 1.5 "none" was MR_SCALABLE, which
/// some callers still use.
fn granted_mr_mode(request: &InfoRequest) -> i32 {
    let asked = request.domain.map_or(0, |d| d.mr_mode);
    let old = request.version != 0 && request.version < abi::version(1, 5);
    if old || asked == MR_SCALABLE { MR_SCALABLE } else { 0 }
}

fn fabric_attr(request: &InfoRequest) -> Option<FabricAttr> {
    Some(FabricAttr {
        fabric: request.fabric.map_or(std::ptr::null_mut(), |h| h.fabric),
        name: c_text(NAME)?,
        // The host writes both fields.
        prov_name: std::ptr::null_mut(),
        prov_version: 0,
        api_version: 0,
    })
}

/// The hint if it is set, else `otherwise` (0 means "unspecified" in every enumeration here).
fn hint_or<T: Default + PartialEq>(asked: Option<T>, otherwise: T) -> T {
    asked.filter(|asked| *asked != T::default()).unwrap_or(otherwise)
}

/// # Safety
/// `name` is null or ends with NUL.
unsafe fn named_like_us(name: *const c_char) -> bool {
    // SAFETY: the caller upholds this function's safety contract.
    unsafe { text(name) }.is_none_or(|name| name == NAME)
}

/// # Safety
/// `text` is null or ends with NUL, and lives for `'a`.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the pointer is not null, and the caller guarantees the NUL.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// Moves a value into libc memory. `None`: no memory is left.
fn c_box<T>(value: T) -> Option<*mut T> {
    // SAFETY: memory of malloc is aligned for every libfabric type, and is written before it is
    // returned.
    unsafe {
        let target = libc::malloc(size_of::<T>()).cast::<T>();
        (!target.is_null()).then(|| {
            target.write(value);
            target
        })
    }
}

fn c_text(text: &CStr) -> Option<*mut c_char> {
    // SAFETY: `text` ends with NUL.
    let copy = unsafe { libc::strdup(text.as_ptr()) };
    (!copy.is_null()).then_some(copy)
}

fn c_bytes(bytes: Option<Vec<u8>>) -> Option<(*mut c_void, usize)> {
    let Some(bytes) = bytes else { return Some((std::ptr::null_mut(), 0)) };
    // SAFETY: the copy has the length of the original.
    unsafe {
        let copy = libc::malloc(bytes.len());
        (!copy.is_null()).then(|| {
            copy.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            (copy, bytes.len())
        })
    }
}

/// The address at which an endpoint of this info accepts connections, if the source address is not
/// a wildcard.
///
/// # Safety
/// `info`'s source address has the length that `info` gives.
pub unsafe fn bind_address(info: &Info) -> Option<SocketAddrV4> {
    let usable = AddressFormat::of_code(info.addr_format) == AddressFormat::Socket
        && !info.src_addr.is_null()
        && info.src_addrlen >= SOCKADDR_BYTES;
    // SAFETY: the condition above has verified the length.
    let address = usable.then(|| unsafe { resolve::read_sockaddr(info.src_addr) }).flatten();
    address.filter(|address| address.port() != 0 || !address.ip().is_unspecified())
}
