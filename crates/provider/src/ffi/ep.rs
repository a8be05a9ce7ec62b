//! Endpoints: binding, enabling, options, and the common path of data calls to the engine.

use std::ffi::{c_int, c_void};
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::av::AddressVector;
use super::cntr::CompletionCounter;
use super::cq::CompletionQueue;
use super::domain::Domain;
use super::{Head, Object, atomic, cm, msg, nosys, object, ops, publish, reclaim, rma, status};
use crate::abi::*;
use crate::av::Av;
use crate::engine::request::{CompletionLevel, Iov};
use crate::engine::{Engine, Setup, library_repeats_peeks};
use crate::info::{self, AddressFormat, INJECT_SIZE, IOV_MAX, MESSAGE_SIZE_MAX};
use crate::interposer::UnrecordedCalls;
use crate::log;
use crate::parking::SharedEngine;
use crate::sink::Sink;
use crate::stack::Stack;
use crate::sync::SpinLock;

/// A multi-receive buffer is released when fewer bytes than this are left, unless the program sets
/// another value (`FI_OPT_MIN_MULTI_RECV`).
const MIN_MULTI_RECV: usize = 64;
/// Reported free entries of queues, which have no fixed depth.
const SIZE_LEFT: isize = 1024;

#[repr(C)]
pub struct Endpoint {
    head: Head<FidEp>,
    domain: Arc<Domain>,
    /// The engine, from `fi_enable` on.
    port: OnceLock<Arc<SharedEngine>>,
    /// Operation flags of plain (not `*msg`) transmit calls.
    transmit: Defaults,
    /// Operation flags of plain (not `*msg`) receive calls.
    receive: Defaults,
    /// FI_DIRECTED_RECV is set; otherwise the source of a receive is ignored.
    directed: bool,
    /// The MPI library makes progress when a peek returns `EAGAIN`.
    repeats_peeks: bool,
    caps: u64,
    format: AddressFormat,
    bindings: SpinLock<Bindings>,
}

/// Objects and addresses that an endpoint collects before it is enabled.
struct Bindings {
    av: Option<Arc<Av>>,
    sink: Sink,
    bind: Option<SocketAddrV4>,
    min_multi_recv: usize,
}

/// The operation flags of one direction, in the form that data calls need. Only calls that the
/// program serialises with all others (bind, control) change them.
struct Defaults {
    op_flags: AtomicU64,
    selective: AtomicBool,
    notify: AtomicBool,
    level: AtomicU8,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for Endpoint {
    const CLASS: usize = CLASS_EP;
}

static OPS: Ops = ops(close, bind, control);

static EP_OPS: OpsEp = OpsEp {
    size: size_of::<OpsEp>(),
    cancel,
    getopt,
    setopt,
    tx_ctx: nosys::tx_ctx,
    rx_ctx: nosys::rx_ctx,
    rx_size_left: size_left,
    tx_size_left: size_left,
};

/// # Safety
/// The contract of `fi_endpoint` holds.
pub unsafe fn open(
    domain: Arc<Domain>,
    info: &Info,
    target: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the attributes are null or valid, and the addresses have the given lengths.
    let (transmit, receive, bind, av_type) = unsafe {
        (
            info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags),
            info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags),
            info::bind_address(info),
            info.domain_attr.cast::<DomainAttrBase>().as_ref().map_or(AV_UNSPEC, |it| it.av_type),
        )
    };
    let directed = info.caps & (DIRECTED_RECV | TAGGED_DIRECTED_RECV) != 0;
    let made = Endpoint {
        head: Head::new(FidEp {
            fid: super::fid(CLASS_EP, context, &OPS),
            ops: &EP_OPS,
            cm: &cm::CM_OPS,
            msg: &msg::MSG_OPS,
            rma: &rma::RMA_OPS,
            tagged: &super::tagged::TAGGED_OPS,
            atomic: &atomic::ATOMIC_OPS,
            collective: std::ptr::null(),
        }),
        domain,
        port: OnceLock::new(),
        transmit: Defaults::new(transmit),
        receive: Defaults::new(receive),
        directed,
        // MPICH requests a table. Intel MPI, which fails when a peek returns `EAGAIN`, does not.
        repeats_peeks: directed && av_type == AV_TABLE && library_repeats_peeks(),
        caps: info.caps,
        format: AddressFormat::of_code(info.addr_format),
        bindings: SpinLock::new(Bindings {
            av: None,
            sink: Sink::default(),
            bind,
            min_multi_recv: MIN_MULTI_RECV,
        }),
    };
    publish(Arc::new(made), target);
    0
}

impl Defaults {
    fn new(op_flags: u64) -> Defaults {
        let defaults = Defaults {
            op_flags: AtomicU64::new(op_flags),
            selective: AtomicBool::new(false),
            notify: AtomicBool::new(true),
            level: AtomicU8::new(0),
        };
        defaults.set(op_flags);
        defaults
    }

    fn op_flags(&self) -> u64 {
        self.op_flags.load(Ordering::Relaxed)
    }

    fn set(&self, op_flags: u64) {
        self.op_flags.store(op_flags, Ordering::Relaxed);
        self.notify.store(self.notify_for(op_flags), Ordering::Relaxed);
        self.level.store(level_of(op_flags) as u8, Ordering::Relaxed);
    }

    fn set_selective(&self) {
        self.selective.store(true, Ordering::Relaxed);
        self.set(self.op_flags());
    }

    /// Whether success of an operation with these flags is written to the completion queue.
    fn notify_for(&self, flags: u64) -> bool {
        !self.selective.load(Ordering::Relaxed) || flags & COMPLETION != 0
    }
}

/// The completion level that the flags request; without a flag the level is transmit (fi_cq(3)).
fn level_of(flags: u64) -> CompletionLevel {
    if flags & DELIVERY_COMPLETE != 0 {
        CompletionLevel::Delivery
    } else if flags & (INJECT_COMPLETE | INJECT) != 0 && flags & TRANSMIT_COMPLETE == 0 {
        CompletionLevel::Inject
    } else {
        CompletionLevel::Transmit
    }
}

/// Options of a data call besides its arguments.
#[derive(Debug)]
pub struct OpOptions {
    pub notify: bool,
    pub level: CompletionLevel,
    pub inject: bool,
}

impl Endpoint {
    /// Locks the engine and calls `work`; `EOPBADSTATE` before `fi_enable`.
    #[inline(always)]
    pub fn with<R>(&self, work: impl FnOnce(&mut Engine) -> Result<R, Errno>) -> Result<R, Errno> {
        self.port.get().ok_or(Errno::EOPBADSTATE)?.with(work)
    }

    /// Options of a plain transmit call, from the endpoint's operation flags.
    #[inline]
    pub fn transmit_options(&self) -> OpOptions {
        let level = match self.transmit.level.load(Ordering::Relaxed) {
            0 => CompletionLevel::Inject,
            1 => CompletionLevel::Transmit,
            _ => CompletionLevel::Delivery,
        };
        OpOptions { notify: self.transmit.notify.load(Ordering::Relaxed), level, inject: false }
    }

    /// Options of an inject call: success is never reported, and the payload is copied at once.
    #[inline]
    pub fn inject_options(&self, len: usize) -> Result<OpOptions, Errno> {
        if len > INJECT_SIZE {
            return Err(Errno::EMSGSIZE);
        }
        // No completion is reported, so no confirmation is needed; remote memory operations are
        // always confirmed.
        Ok(OpOptions { notify: false, level: CompletionLevel::Inject, inject: true })
    }

    /// Options of a `*msg` call: only the flags of the call matter.
    #[inline]
    pub fn message_options(&self, flags: u64, len: usize) -> Result<OpOptions, Errno> {
        let inject = flags & INJECT != 0;
        if inject && len > INJECT_SIZE {
            return Err(Errno::EMSGSIZE);
        }
        Ok(OpOptions { notify: self.transmit.notify_for(flags), level: level_of(flags), inject })
    }

    /// Whether success of a plain receive is written to the completion queue.
    #[inline]
    pub fn receive_notify(&self) -> bool {
        self.receive.notify.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn receive_notify_for(&self, flags: u64) -> bool {
        self.receive.notify_for(flags)
    }

    /// Whether plain receives are multi-receives (operation flag FI_MULTI_RECV).
    pub fn receives_multi(&self) -> bool {
        self.receive.op_flags() & MULTI_RECV != 0
    }

    /// The source of a receive, which has an effect only with FI_DIRECTED_RECV.
    #[inline]
    pub fn source(&self, given: FiAddr) -> FiAddr {
        if self.directed { given } else { ADDR_UNSPEC }
    }

    /// Whether a peek for any source may return `EAGAIN`.
    pub fn repeats_peeks(&self) -> bool {
        self.repeats_peeks
    }

    pub fn format(&self) -> AddressFormat {
        self.format
    }

    /// Sets the address at which the endpoint accepts connections from `fi_enable` on.
    pub fn set_bind(&self, address: SocketAddrV4) -> Result<(), Errno> {
        if self.port.get().is_some() {
            return Err(Errno::EOPBADSTATE);
        }
        self.bindings.lock().bind = Some(address);
        Ok(())
    }

    fn enable(&self) -> Result<(), Errno> {
        if self.port.get().is_some() {
            return Ok(());
        }
        let setup = self.setup()?;
        let sink = setup.sink.clone();
        let mut stack = Stack::new();
        // SAFETY: the stack is local, so nothing else uses it.
        let opened = unsafe {
            let _own = UnrecordedCalls::begin();
            stack.top().run(|| Engine::open(setup))
        };
        let engine =
            opened.inspect_err(|errno| log!(Warn, "the endpoint cannot be enabled: {errno}"))?;
        let stack = engine.is_recorded().then_some(stack);
        let port = SharedEngine::new(engine, stack);
        sink.each_engine_set(|ports| ports.add(&port));
        self.domain.engines.add(&port);
        // The cell is empty: the program serialises enabling.
        let _ = self.port.set(port);
        Ok(())
    }

    fn setup(&self) -> Result<Setup, Errno> {
        let bindings = self.bindings.lock();
        let sink = bindings.sink.clone();
        if self.caps & SEND != 0 && sink.transmit.is_none() && sink.counters.send.is_none() {
            return Err(Errno::ENOCQ);
        }
        if self.caps & RECV != 0 && sink.receive.is_none() && sink.counters.recv.is_none() {
            return Err(Errno::ENOCQ);
        }
        Ok(Setup {
            domain_mr: Arc::clone(&self.domain.memory),
            av: Arc::clone(bindings.av.as_ref().ok_or(Errno::ENOAV)?),
            sink,
            own_format: self.format == AddressFormat::Landbridge,
            bind: bindings.bind,
            min_multi_recv: bindings.min_multi_recv,
            source_wanted: self.caps & SOURCE != 0,
        })
    }

    fn bind_queue(&self, cq: &CompletionQueue, flags: u64) -> Result<(), Errno> {
        const KNOWN: u64 = SEND | RECV | SELECTIVE_COMPLETION;
        if flags & !KNOWN != 0 || flags & (SEND | RECV) == 0 {
            return Err(Errno::EBADFLAGS);
        }
        let mut bindings = self.bindings.lock();
        let selective = flags & SELECTIVE_COMPLETION != 0;
        if flags & SEND != 0 {
            bindings.sink.transmit = Some(Arc::clone(&cq.queue));
            if selective {
                self.transmit.set_selective();
            }
        }
        if flags & RECV != 0 {
            if self.repeats_peeks {
                cq.queue.let_library_go_first();
            }
            bindings.sink.receive = Some(Arc::clone(&cq.queue));
            if selective {
                self.receive.set_selective();
            }
        }
        Ok(())
    }

    fn bind_counter(&self, cntr: &CompletionCounter, flags: u64) -> Result<(), Errno> {
        const KNOWN: u64 = SEND | RECV | READ | WRITE | REMOTE_WRITE;
        if flags & REMOTE_READ != 0 {
            // FI_REMOTE_READ needs FI_RMA_EVENT, which is not offered; the program would wait for a
            // counter that never counts.
            return Err(Errno::ENOSYS);
        }
        if flags & !KNOWN != 0 || flags == 0 {
            return Err(Errno::EBADFLAGS);
        }
        if flags & !(READ | WRITE) != 0 {
            cntr.counter.set_counts_messages();
        }
        let counters = &mut self.bindings.lock().sink.counters;
        for (flag, slot) in [
            (SEND, &mut counters.send),
            (RECV, &mut counters.recv),
            (READ, &mut counters.read),
            (WRITE, &mut counters.write),
            (REMOTE_WRITE, &mut counters.remote_write),
        ] {
            if flags & flag != 0 {
                *slot = Some(Arc::clone(&cntr.counter));
            }
        }
        Ok(())
    }
}

/// Closes an endpoint. The endpoint leaves the queues first, so that no thread drives it any more,
/// and then drains.
unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: the program closes the endpoint once.
    let endpoint = unsafe { reclaim::<Endpoint>(fid) };
    if let Some(port) = endpoint.port.get() {
        let sink = endpoint.bindings.lock().sink.clone();
        sink.each_engine_set(|ports| ports.remove(port));
        endpoint.domain.engines.remove(port);
        port.close();
    }
    0
}

unsafe extern "C" fn bind(fid: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    // SAFETY: `fid` is an endpoint, and `other` is another object of this provider, whose class
    // gives its type.
    unsafe {
        let endpoint = object::<Endpoint, _>(fid);
        if endpoint.port.get().is_some() {
            return Errno::EOPBADSTATE.negative();
        }
        status(match (*other).class {
            CLASS_AV => {
                let av = Arc::clone(&object::<AddressVector, _>(other).av);
                endpoint.bindings.lock().av = Some(av);
                Ok(())
            }
            CLASS_CQ => endpoint.bind_queue(object(other), flags),
            CLASS_CNTR => endpoint.bind_counter(object(other), flags),
            CLASS_EQ => Ok(()),
            _ => Err(Errno::EINVAL),
        })
    }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    status(match command {
        ENABLE => endpoint.enable(),
        // SAFETY: the argument of this command is a 64-bit word of flags.
        GETOPSFLAG => unsafe { ops_flags(endpoint, argument.cast()) },
        // SAFETY: the argument of this command is a 64-bit word of flags.
        SETOPSFLAG => unsafe { set_ops_flags(endpoint, argument.cast()) },
        _ => Err(Errno::ENOSYS),
    })
}

/// # Safety
/// `word` points to flags with the direction (FI_TRANSMIT or FI_RECV).
unsafe fn ops_flags(endpoint: &Endpoint, word: *mut u64) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the word.
    unsafe { *word = direction(endpoint, *word)?.op_flags() };
    Ok(())
}

/// # Safety
/// `word` points to flags with the direction (FI_TRANSMIT or FI_RECV) and the new operation flags.
unsafe fn set_ops_flags(endpoint: &Endpoint, word: *const u64) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the word.
    let flags = unsafe { *word };
    direction(endpoint, flags)?.set(flags & !(SEND | RECV));
    Ok(())
}

fn direction(endpoint: &Endpoint, flags: u64) -> Result<&Defaults, Errno> {
    match flags & (SEND | RECV) {
        SEND => Ok(&endpoint.transmit),
        RECV => Ok(&endpoint.receive),
        _ => Err(Errno::EINVAL),
    }
}

unsafe extern "C" fn cancel(fid: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    super::status_long(endpoint.with(|engine| engine.cancel(context as usize)))
}

unsafe extern "C" fn getopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    let known = match name {
        _ if level != OPT_ENDPOINT => return Errno::ENOPROTOOPT.negative(),
        OPT_MIN_MULTI_RECV => endpoint.bindings.lock().min_multi_recv,
        OPT_CM_DATA_SIZE => 0,
        OPT_MAX_MSG_SIZE | OPT_MAX_TAGGED_SIZE | OPT_MAX_RMA_SIZE => MESSAGE_SIZE_MAX,
        OPT_MAX_ATOMIC_SIZE => crate::atomic::BYTES_MAX,
        OPT_INJECT_MSG_SIZE
        | OPT_INJECT_TAGGED_SIZE
        | OPT_INJECT_RMA_SIZE
        | OPT_INJECT_ATOMIC_SIZE => INJECT_SIZE,
        _ => return Errno::ENOPROTOOPT.negative(),
    };
    // SAFETY: `value` holds `*len` bytes.
    unsafe {
        let room = std::mem::replace(&mut *len, size_of::<usize>());
        if room < size_of::<usize>() {
            return Errno::ETOOSMALL.negative();
        }
        value.cast::<usize>().write_unaligned(known);
    }
    0
}

unsafe extern "C" fn setopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: `fid` is an endpoint of this provider.
    let endpoint = unsafe { object::<Endpoint, _>(fid) };
    match name {
        OPT_MIN_MULTI_RECV if level == OPT_ENDPOINT => {}
        _ => return Errno::ENOPROTOOPT.negative(),
    }
    if len != size_of::<usize>() {
        return Errno::EINVAL.negative();
    }
    // SAFETY: `value` holds `len` bytes.
    let bytes = unsafe { value.cast::<usize>().read_unaligned() };
    endpoint.bindings.lock().min_multi_recv = bytes;
    // An endpoint that is not enabled passes the value to the engine when it is enabled.
    let _ = endpoint.with(|engine| {
        engine.set_min_multi_recv(bytes);
        Ok(())
    });
    0
}

unsafe extern "C" fn size_left(_: *mut FidEp) -> isize {
    SIZE_LEFT
}

/// The endpoint of a data call.
///
/// # Safety
/// `ep` is an endpoint of this provider.
#[inline(always)]
pub unsafe fn endpoint<'a>(ep: *mut FidEp) -> &'a Endpoint {
    // SAFETY: the caller guarantees the endpoint.
    unsafe { object(ep) }
}

/// A vector with one piece of memory.
#[inline(always)]
pub fn piece(base: *const c_void, len: usize) -> [Iov; 1] {
    [Iov { base: base.cast_mut().cast(), len }]
}

/// A caller's vector as engine vectors: both types have the same layout.
///
/// # Safety
/// `iov` points to `count` vectors (or `count` is 0), which are valid during the call.
#[inline(always)]
pub unsafe fn pieces<'a>(iov: *const libc::iovec, count: usize) -> Result<&'a [Iov], Errno> {
    const { assert!(size_of::<Iov>() == size_of::<libc::iovec>()) };
    match count {
        0 => Ok(&[]),
        // SAFETY: the caller guarantees the vectors; both types are a pointer and a length.
        1..=IOV_MAX => Ok(unsafe { std::slice::from_raw_parts(iov.cast(), count) }),
        _ => Err(Errno::EINVAL),
    }
}

pub fn total(pieces: &[Iov]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len))
}
