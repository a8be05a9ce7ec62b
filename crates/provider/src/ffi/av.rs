//! Address vectors.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

use super::domain::Domain;
use super::eq::EventQueue;
use super::{Head, Object, close, copy_name, nosys, object, ops, publish, share};
use crate::abi::*;
use crate::av::{Av, AvName, NAME_BYTES};
use crate::info::AddressFormat;
use crate::resolve::{self, ResolveHints, SOCKADDR_BYTES};
use crate::sync::SpinLock;

#[repr(C)]
pub struct AddressVector {
    head: Head<FidAv>,
    pub av: Arc<Av>,
    format: AddressFormat,
    /// FI_EVENT: the event queue reports insertions.
    reports: bool,
    events: SpinLock<Option<Arc<EventQueue>>>,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for AddressVector {
    const CLASS: usize = CLASS_AV;
}

static OPS: Ops = ops(close::<AddressVector>, bind, nosys::control);

static AV_OPS: OpsAv = OpsAv {
    size: size_of::<OpsAv>(),
    insert,
    insertsvc,
    insertsym,
    remove,
    lookup,
    straddr,
    av_set: nosys::av_set,
    insert_auth_key: nosys::insert_auth_key,
    lookup_auth_key: nosys::lookup_auth_key,
    set_user_id: nosys::set_user_id,
};

/// Opens an address vector. In tables and maps alike, the address is the index.
///
/// # Safety
/// The contract of `fi_av_open` holds.
pub unsafe fn open(
    domain: &Domain,
    attr: Option<&mut AvAttr>,
    target: *mut *mut FidAv,
    context: *mut c_void,
) -> c_int {
    let (mut capacity, mut reports) = (0, false);
    if let Some(attr) = attr {
        if attr.kind > AV_TABLE {
            return Errno::EINVAL.negative();
        }
        if !attr.name.is_null() || attr.flags & !EVENT != 0 {
            return Errno::ENOSYS.negative();
        }
        if attr.kind == AV_UNSPEC {
            attr.kind = AV_TABLE;
        }
        (capacity, reports) = (attr.count, attr.flags & EVENT != 0);
    }
    let made = AddressVector {
        head: Head::new(FidAv { fid: super::fid(CLASS_AV, context, &OPS), ops: &AV_OPS }),
        av: Arc::new(Av::with_capacity(capacity)),
        format: domain.format,
        reports,
        events: SpinLock::new(None),
    };
    publish(Arc::new(made), target);
    0
}

/// Arguments of an insertion besides the names.
struct Insertion {
    /// Destination of the numbers, or null.
    numbers: *mut FiAddr,
    /// FI_SYNC_ERR: destination of an error number per name, or null.
    errors: *mut c_int,
    context: *mut c_void,
}

impl AddressVector {
    fn bytes(&self) -> usize {
        self.format.bytes()
    }

    /// # Safety
    /// `address` points to an address of the vector's format.
    unsafe fn name_at(&self, address: *const c_void) -> Option<AvName> {
        let mut name = [0; NAME_BYTES];
        // SAFETY: the caller guarantees the address.
        let given = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), self.bytes()) };
        name[..given.len()].copy_from_slice(given);
        let valid = match self.format {
            AddressFormat::Landbridge => name.iter().any(|&byte| byte != 0),
            // SAFETY: a socket address has this many bytes.
            AddressFormat::Socket => unsafe { resolve::read_sockaddr(address) }
                .is_some_and(|a| a.port() != 0 && !a.ip().is_unspecified()),
        };
        valid.then(|| self.normal(name))
    }

    /// Clears the unused bytes: socket addresses compare by family, port and address only.
    fn normal(&self, mut name: AvName) -> AvName {
        const USED: usize = 8;
        if self.format == AddressFormat::Socket {
            name[USED..].fill(0);
        }
        name
    }

    /// Inserts names, and returns the number of inserted names. With FI_EVENT an event reports the
    /// number, and the result is 0.
    ///
    /// # Safety
    /// The insertion's pointers are null or hold one element per name.
    unsafe fn insert_all(
        &self,
        names: impl Iterator<Item = Option<AvName>>,
        insertion: Insertion,
    ) -> Result<usize, Errno> {
        let events = self.events.lock().clone();
        if self.reports && events.is_none() {
            return Err(Errno::ENOEQ);
        }
        let mut inserted = 0;
        for (index, name) in names.enumerate() {
            let number = name.map_or(ADDR_NOTAVAIL, |name| self.av.insert(name));
            let errno = if name.is_some() { 0 } else { Errno::EINVAL.0 };
            inserted += usize::from(name.is_some());
            // SAFETY: the caller guarantees one element per name.
            unsafe {
                if !insertion.numbers.is_null() {
                    *insertion.numbers.add(index) = number;
                }
                if !insertion.errors.is_null() {
                    *insertion.errors.add(index) = errno;
                }
            }
            if let (true, Some(events), None) = (self.reports, &events, name) {
                let fid = self.head.get().cast();
                events.report_error(fid, insertion.context, index as u64, Errno::EINVAL);
            }
        }
        match events {
            Some(events) if self.reports => {
                let (fid, context) = (self.head.get().cast(), insertion.context);
                events.report(EQ_AV_COMPLETE, EqEntry { fid, context, data: inserted as u64 });
                Ok(0)
            }
            _ => Ok(inserted),
        }
    }

    fn insertion(&self, numbers: *mut FiAddr, flags: u64, context: *mut c_void) -> Insertion {
        let synchronous = flags & AV_SYNC_ERR != 0;
        let errors = if synchronous { context.cast() } else { std::ptr::null_mut() };
        Insertion { numbers, errors, context }
    }
}

fn counted(result: Result<usize, Errno>) -> c_int {
    match result {
        Ok(count) => c_int::try_from(count).unwrap_or(c_int::MAX),
        Err(errno) => errno.negative(),
    }
}

unsafe extern "C" fn bind(fid: *mut Fid, other: *mut Fid, _: u64) -> c_int {
    // SAFETY: `fid` is an address vector, and `other` is another object of this provider.
    unsafe {
        if (*other).class != CLASS_EQ {
            return Errno::EINVAL.negative();
        }
        *object::<AddressVector, _>(fid).events.lock() = Some(share(other));
    }
    0
}

unsafe extern "C" fn insert(
    av: *mut FidAv,
    addresses: *const c_void,
    count: usize,
    numbers: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `av` is an address vector of this provider; `addresses` holds `count` addresses of
    // its format, and `numbers` (and `context`, with FI_SYNC_ERR) as many elements.
    unsafe {
        let av = object::<AddressVector, _>(av);
        let names = (0..count).map(|i| av.name_at(addresses.byte_add(i * av.bytes())));
        counted(av.insert_all(names, av.insertion(numbers, flags, context)))
    }
}

unsafe extern "C" fn insertsvc(
    av: *mut FidAv,
    node: *const c_char,
    service: *const c_char,
    numbers: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `av` is an address vector of this provider; strings end with NUL.
    unsafe {
        let av = object::<AddressVector, _>(av);
        if av.format != AddressFormat::Socket {
            return Errno::ENOSYS.negative();
        }
        if node.is_null() || service.is_null() {
            return Errno::EINVAL.negative();
        }
        let name = socket_name(CStr::from_ptr(node), CStr::from_ptr(service));
        counted(av.insert_all(std::iter::once(name), av.insertion(numbers, flags, context)))
    }
}

/// Inserts the nodes `node`, `node + 1`, ... each with the services `service`, `service + 1`, ...
unsafe extern "C" fn insertsym(
    av: *mut FidAv,
    node: *const c_char,
    nodes: usize,
    service: *const c_char,
    services: usize,
    numbers: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `av` is an address vector of this provider; strings end with NUL; `numbers` holds an
    // element for each node and service.
    unsafe {
        let av = object::<AddressVector, _>(av);
        if av.format != AddressFormat::Socket {
            return Errno::ENOSYS.negative();
        }
        if node.is_null() || service.is_null() {
            return Errno::EINVAL.negative();
        }
        let (node, service) = (CStr::from_ptr(node), CStr::from_ptr(service));
        let names = (0..nodes)
            .flat_map(|n| (0..services).map(move |s| (n, s)))
            .map(|(n, s)| socket_name(&counted_up(node, n)?, &counted_up(service, s)?));
        counted(av.insert_all(names, av.insertion(numbers, flags, context)))
    }
}

fn socket_name(node: &CStr, service: &CStr) -> Option<AvName> {
    let address = resolve::resolve(Some(node), Some(service), ResolveHints::default()).ok()?;
    let mut name = [0; NAME_BYTES];
    name[..SOCKADDR_BYTES].copy_from_slice(&resolve::sockaddr_bytes(address));
    (address.port() != 0).then_some(name)
}

/// `text` with `steps` added to the number at its end ("node07" and 5: "node12").
fn counted_up(text: &CStr, steps: usize) -> Option<CString> {
    let text = text.to_str().ok()?;
    let stem = text.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &text[stem.len()..];
    if steps == 0 {
        return CString::new(text).ok();
    }
    let number = digits.parse::<u64>().ok()?.checked_add(steps as u64)?;
    CString::new(format!("{stem}{number:0width$}", width = digits.len())).ok()
}

unsafe extern "C" fn remove(av: *mut FidAv, numbers: *mut FiAddr, count: usize, _: u64) -> c_int {
    // SAFETY: `av` is an address vector of this provider; `numbers` holds `count` numbers.
    let (av, numbers) =
        unsafe { (object::<AddressVector, _>(av), std::slice::from_raw_parts(numbers, count)) };
    let failed = numbers.iter().filter_map(|&number| av.av.remove(number).err()).last();
    failed.map_or(0, Errno::negative)
}

unsafe extern "C" fn lookup(
    av: *mut FidAv,
    number: FiAddr,
    target: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: `av` is an address vector of this provider.
    let av = unsafe { object::<AddressVector, _>(av) };
    let Some(name) = av.av.name_of(number) else {
        return Errno::EINVAL.negative();
    };
    // SAFETY: the target holds `*len` bytes. Unlike a cut name, a cut address is no error.
    let copied = unsafe { copy_name(&name[..av.bytes()], target, len) };
    if copied == Errno::ETOOSMALL.negative() { 0 } else { copied }
}

unsafe extern "C" fn straddr(
    av: *mut FidAv,
    address: *const c_void,
    buffer: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    // SAFETY: `av` is an address vector of this provider, and `address` has its format.
    let text = unsafe {
        let av = object::<AddressVector, _>(av);
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), av.bytes());
        address_text(av.format, bytes)
    };
    // SAFETY: the buffer holds `*len` bytes, including the NUL.
    unsafe {
        let room = std::mem::replace(&mut *len, text.len() + 1);
        if room > 0 {
            let copied = text.len().min(room - 1);
            buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), copied);
            *buffer.add(copied) = 0;
        }
    }
    buffer
}

fn address_text(format: AddressFormat, bytes: &[u8]) -> String {
    if format == AddressFormat::Landbridge {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        return format!("fi_addr_landbridge://{digits}");
    }
    // SAFETY: an address of this format has this many bytes.
    match unsafe { resolve::read_sockaddr(bytes.as_ptr().cast()) } {
        Some(address) => format!("fi_sockaddr_in://{address}"),
        None => "fi_sockaddr_in://invalid".into(),
    }
}
