//! Endpoints: enabling, options, and the common path of data calls to the engine.

use std::ffi::c_void;
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::bound_objects::BoundObjects;
use super::cntr::CompletionCounter;
use super::cq::CompletionQueue;
use super::domain::Domain;
use super::{Head, Object, object};
use crate::abi::*;
use crate::av::Av;
use crate::engine::request::{CompletionLevel, Iov};
use crate::engine::{EndpointRole, Engine, Setup, library_repeats_peeks};
use crate::info::{self, AddressFormat, INJECT_SIZE, IOV_MAX};
use crate::log;
use crate::parking::SharedEngine;
use crate::sync::SpinLock;

/// A multi-receive buffer is released when fewer bytes than this are left, unless the program sets
/// another value (`FI_OPT_MIN_MULTI_RECV`).
const MIN_MULTI_RECV: usize = 64;

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
    objects: BoundObjects,
    bind: Option<SocketAddrV4>,
    min_multi_recv: usize,
}

/// The operation flags of one direction, in the form that data calls need. Only calls that the
/// program serialises with all others (bind, control) change them.
pub struct Defaults {
    op_flags: AtomicU64,
    selective: AtomicBool,
    notify: AtomicBool,
    level: AtomicU8,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for Endpoint {
    const CLASS: usize = CLASS_EP;
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

    pub fn op_flags(&self) -> u64 {
        self.op_flags.load(Ordering::Relaxed)
    }

    pub fn set(&self, op_flags: u64) {
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
    /// # Safety
    /// The pointers in `info` are null or valid, and its addresses have the given lengths.
    pub unsafe fn new(fid: FidEp, domain: Arc<Domain>, info: &Info) -> Endpoint {
        // SAFETY: the caller guarantees the attributes and the addresses.
        let (transmit, receive, bind, av_type) = unsafe {
            (
                info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags),
                info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags),
                info::bind_address(info),
                info.domain_attr
                    .cast::<DomainAttrBase>()
                    .as_ref()
                    .map_or(AV_UNSPEC, |it| it.av_type),
            )
        };
        let directed = info.caps & (DIRECTED_RECV | TAGGED_DIRECTED_RECV) != 0;
        Endpoint {
            head: Head::new(fid),
            domain,
            port: OnceLock::new(),
            transmit: Defaults::new(transmit),
            receive: Defaults::new(receive),
            directed,
            // MPICH requests a table. Intel MPI, which fails when a peek returns `EAGAIN`, does
            // not.
            repeats_peeks: directed && av_type == AV_TABLE && library_repeats_peeks(),
            caps: info.caps,
            format: AddressFormat::of_code(info.addr_format),
            bindings: SpinLock::new(Bindings {
                av: None,
                objects: BoundObjects::default(),
                bind,
                min_multi_recv: MIN_MULTI_RECV,
            }),
        }
    }

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
        if self.is_enabled() {
            return Err(Errno::EOPBADSTATE);
        }
        self.bindings.lock().bind = Some(address);
        Ok(())
    }

    pub fn is_enabled(&self) -> bool {
        self.port.get().is_some()
    }

    /// The operation flags of the direction that `flags` name (FI_TRANSMIT or FI_RECV).
    pub fn direction(&self, flags: u64) -> Result<&Defaults, Errno> {
        match flags & (SEND | RECV) {
            SEND => Ok(&self.transmit),
            RECV => Ok(&self.receive),
            _ => Err(Errno::EINVAL),
        }
    }

    pub fn min_multi_recv(&self) -> usize {
        self.bindings.lock().min_multi_recv
    }

    pub fn set_min_multi_recv(&self, bytes: usize) {
        self.bindings.lock().min_multi_recv = bytes;
        // An endpoint that is not enabled passes the value to the engine when it is enabled.
        let _ = self.with(|engine| {
            engine.set_min_multi_recv(bytes);
            Ok(())
        });
    }

    pub fn enable(&self) -> Result<(), Errno> {
        if self.is_enabled() {
            return Ok(());
        }
        let port = SharedEngine::open(self.setup()?)
            .inspect_err(|errno| log!(Warn, "the endpoint cannot be enabled: {errno}"))?;
        self.bound_objects().each_engine_set(|ports| ports.add(&port));
        self.domain.engines.add(&port);
        // The cell is empty: the program serialises enabling.
        let _ = self.port.set(port);
        Ok(())
    }

    fn setup(&self) -> Result<Setup, Errno> {
        let bindings = self.bindings.lock();
        let sink = bindings.objects.sink();
        if self.caps & SEND != 0 && sink.transmit.is_none() && sink.counters.send.is_none() {
            return Err(Errno::ENOCQ);
        }
        if self.caps & RECV != 0 && sink.receive.is_none() && sink.counters.recv.is_none() {
            return Err(Errno::ENOCQ);
        }
        Ok(Setup {
            role: EndpointRole::Program,
            domain_mr: Arc::clone(&self.domain.memory),
            av: Arc::clone(bindings.av.as_ref().ok_or(Errno::ENOAV)?),
            sink,
            own_format: self.format == AddressFormat::Landbridge,
            bind: bindings.bind,
            min_multi_recv: bindings.min_multi_recv,
            source_wanted: self.caps & SOURCE != 0,
        })
    }

    fn bound_objects(&self) -> BoundObjects {
        self.bindings.lock().objects.clone()
    }

    /// Closes the engine. The endpoint leaves the queues first, so that no thread drives the engine
    /// any more, and then drains.
    pub fn close(&self) {
        if let Some(port) = self.port.get() {
            self.bound_objects().each_engine_set(|ports| ports.remove(port));
            self.domain.engines.remove(port);
            port.close();
        }
    }

    pub fn bind_av(&self, av: &Arc<Av>) {
        self.bindings.lock().av = Some(Arc::clone(av));
    }

    pub fn bind_queue(&self, cq: &Arc<CompletionQueue>, flags: u64) -> Result<(), Errno> {
        const KNOWN: u64 = SEND | RECV | SELECTIVE_COMPLETION;
        if flags & !KNOWN != 0 || flags & (SEND | RECV) == 0 {
            return Err(Errno::EBADFLAGS);
        }
        let mut bindings = self.bindings.lock();
        let selective = flags & SELECTIVE_COMPLETION != 0;
        if flags & SEND != 0 {
            bindings.objects.transmit = Some(Arc::clone(cq));
            if selective {
                self.transmit.set_selective();
            }
        }
        if flags & RECV != 0 {
            if self.repeats_peeks {
                cq.queue.let_library_go_first();
            }
            bindings.objects.receive = Some(Arc::clone(cq));
            if selective {
                self.receive.set_selective();
            }
        }
        Ok(())
    }

    pub fn bind_counter(&self, cntr: &Arc<CompletionCounter>, flags: u64) -> Result<(), Errno> {
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
            cntr.set_counts_messages();
        }
        let objects = &mut self.bindings.lock().objects;
        for (flag, slot) in [
            (SEND, &mut objects.send_counter),
            (RECV, &mut objects.recv_counter),
            (READ, &mut objects.read_counter),
            (WRITE, &mut objects.write_counter),
            (REMOTE_WRITE, &mut objects.remote_write_counter),
        ] {
            if flags & flag != 0 {
                *slot = Some(Arc::clone(cntr));
            }
        }
        Ok(())
    }
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
