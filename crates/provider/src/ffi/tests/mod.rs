//! Tests of the provider through its C tables, as a libfabric host calls it.

use std::ffi::{CString, c_void};
use std::mem::zeroed;
use std::ptr;

use crate::abi::*;

mod getinfo;
mod objects;
mod options;
mod queues;
mod vectors;

const EINVAL: i32 = -libc::EINVAL;

/// An answer of `getinfo`, which is freed as the host would free it.
struct Offer(*mut Info);

impl Offer {
    fn get(
        version: u32,
        node: Option<&str>,
        service: Option<&str>,
        flags: u64,
        hints: Option<&Info>,
    ) -> Result<Offer, i32> {
        let text = |text: Option<&str>| text.map(|text| CString::new(text).unwrap());
        let (node, service) = (text(node), text(service));
        let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |t| t.as_ptr());
        let mut info = ptr::null_mut();
        let hints = hints.map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the call has the arguments of a host.
        let status = unsafe {
            let getinfo = (*crate::fi_prov_ini()).getinfo.unwrap();
            getinfo(version, pointer(&node), pointer(&service), flags, hints, &mut info)
        };
        if status == 0 { Ok(Offer(info)) } else { Err(status) }
    }

    fn tx(&self) -> &TxAttr {
        // SAFETY: every part of an offer is present.
        unsafe { &*self.tx_attr }
    }

    fn rx(&self) -> &RxAttr {
        // SAFETY: every part of an offer is present.
        unsafe { &*self.rx_attr }
    }

    fn ep(&self) -> &EpAttr {
        // SAFETY: every part of an offer is present.
        unsafe { &*self.ep_attr }
    }

    fn domain(&self) -> &DomainAttrBase {
        // SAFETY: every part of an offer is present.
        unsafe { &*self.domain_attr }
    }

    fn fabric(&self) -> &FabricAttr {
        // SAFETY: every part of an offer is present.
        unsafe { &*self.fabric_attr }
    }
}

impl std::ops::Deref for Offer {
    type Target = Info;
    fn deref(&self) -> &Info {
        // SAFETY: `getinfo` has returned the pointer.
        unsafe { &*self.0 }
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an offer with caps {:#x}", self.caps)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let parts: [*mut c_void; 10] = [
            self.domain().name.cast(),
            self.fabric().name.cast(),
            self.src_addr,
            self.dest_addr,
            self.tx_attr.cast(),
            self.rx_attr.cast(),
            self.ep_attr.cast(),
            self.domain_attr.cast(),
            self.fabric_attr.cast(),
            self.0.cast(),
        ];
        // SAFETY: the parts are libc memory, or null.
        parts.into_iter().for_each(|part| unsafe { libc::free(part) });
    }
}

/// Hints with all their parts. The domain's attributes are as short as in 1.17, so that a read
/// beyond them would read other memory.
struct Hints {
    info: Box<Info>,
    tx: Box<TxAttr>,
    rx: Box<RxAttr>,
    ep: Box<EpAttr>,
    domain: Box<DomainAttrBase>,
    fabric: Box<FabricAttr>,
}

impl Hints {
    fn new() -> Hints {
        // SAFETY: zeros are null pointers and unspecified values.
        unsafe {
            Hints {
                info: Box::new(zeroed()),
                tx: Box::new(zeroed()),
                rx: Box::new(zeroed()),
                ep: Box::new(zeroed()),
                domain: Box::new(zeroed()),
                fabric: Box::new(zeroed()),
            }
        }
    }

    fn ask(&mut self) -> Result<Offer, i32> {
        self.info.tx_attr = &mut *self.tx;
        self.info.rx_attr = &mut *self.rx;
        self.info.ep_attr = &mut *self.ep;
        self.info.domain_attr = &mut *self.domain;
        self.info.fabric_attr = &mut *self.fabric;
        Offer::get(version(1, 17), None, None, 0, Some(&self.info))
    }
}

/// A fabric and a domain with a queue, a vector and an endpoint, which are not bound.
struct Stack {
    fabric: *mut FidFabric,
    domain: *mut FidDomain,
    cq: *mut FidCq,
    av: *mut FidAv,
    ep: *mut FidEp,
}

impl Stack {
    /// Opens the objects. With a service, addresses are socket addresses.
    fn open(service: Option<&str>) -> Stack {
        let info = Offer::get(version(1, 17), None, service, SOURCE, None).unwrap();
        let none: *mut c_void = ptr::null_mut();
        let (mut fabric, mut domain, mut cq, mut av, mut ep) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the calls have the arguments of a host.
        unsafe {
            let open = (*crate::fi_prov_ini()).fabric.unwrap();
            assert_eq!(open(info.fabric_attr, &mut fabric, none), 0);
            (*fabric).api_version = version(1, 17);
            assert_eq!(((*(*fabric).ops).domain)(fabric, info.0, &mut domain, none), 0);
            let ops = &*(*domain).ops;
            let mut attr = CqAttr { format: CQ_FORMAT_TAGGED, ..zeroed() };
            assert_eq!((ops.cq_open)(domain, &mut attr, &mut cq, none), 0);
            let mut attr = AvAttr { kind: AV_TABLE, count: 2, ..zeroed() };
            assert_eq!((ops.av_open)(domain, &mut attr, &mut av, none), 0);
            assert_eq!((ops.endpoint)(domain, info.0, &mut ep, none), 0);
        }
        Stack { fabric, domain, cq, av, ep }
    }

    /// Replaces the endpoint by an endpoint from a changed offer.
    fn reopen(&mut self, change: impl FnOnce(&mut Info)) {
        let info = Offer::get(version(1, 17), None, None, 0, None).unwrap();
        // SAFETY: the offer belongs to this test; the first endpoint is closed once.
        unsafe {
            change(&mut *info.0);
            assert_eq!(((*(*self.ep).fid.ops).close)(self.ep.cast()), 0);
            let open = (*(*self.domain).ops).endpoint;
            assert_eq!(open(self.domain, info.0, &mut self.ep, ptr::null_mut()), 0);
        }
    }

    fn register(&self, key: u64, len: usize) -> Result<*mut FidMr, i32> {
        let mut mr = ptr::null_mut();
        let (none, access) = (ptr::null_mut(), REMOTE_READ | REMOTE_WRITE);
        // SAFETY: no peer accesses the region.
        let status = unsafe {
            let reg = (*(*self.domain).mr).reg;
            reg(self.domain.cast(), ptr::null(), len, access, 0, key, 0, &mut mr, none)
        };
        if status == 0 { Ok(mr) } else { Err(status) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let fids: [*mut Fid; 5] = [
            self.ep.cast(),
            self.cq.cast(),
            self.av.cast(),
            self.domain.cast(),
            self.fabric.cast(),
        ];
        for fid in fids {
            // SAFETY: each object is closed once.
            unsafe { assert_eq!(((*(*fid).ops).close)(fid), 0) };
        }
    }
}
