//! Tests of objects: their tables, their life, their options.

use super::*;

const ENOSYS: i32 = -libc::ENOSYS;

#[test]
fn every_slot_of_every_table_is_filled() {
    let stack = Stack::open(None);
    // SAFETY: tables are arrays of words behind their size.
    unsafe {
        let ep = &*stack.ep;
        let tables: [*const usize; 12] = [
            (*stack.fabric).ops.cast(),
            (*stack.domain).ops.cast(),
            (*stack.domain).mr.cast(),
            ep.fid.ops.cast(),
            ep.ops.cast(),
            ep.cm.cast(),
            ep.msg.cast(),
            ep.rma.cast(),
            ep.tagged.cast(),
            ep.atomic.cast(),
            (*stack.cq).ops.cast(),
            (*stack.av).ops.cast(),
        ];
        for table in tables {
            let slots = *table / 8;
            assert!((1..slots).all(|slot| *table.add(slot) != 0) && slots > 3);
        }
    }
}

#[test]
fn an_endpoint_needs_its_vector_and_queues() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open.
    unsafe {
        let ops = &*(*stack.ep).fid.ops;
        let fid = stack.ep.cast();
        assert_eq!((ops.control)(fid, ENABLE, ptr::null_mut()), Errno::ENOCQ.negative());
        assert_eq!((ops.bind)(fid, stack.cq.cast(), 0), Errno::EBADFLAGS.negative());
        assert_eq!((ops.bind)(fid, stack.cq.cast(), SEND | RECV), 0);
        assert_eq!((ops.control)(fid, ENABLE, ptr::null_mut()), Errno::ENOAV.negative());
        assert_eq!((ops.bind)(fid, stack.fabric.cast(), 0), EINVAL);
        let send = (*(*stack.ep).tagged).send;
        let early = send(stack.ep, ptr::null(), 0, ptr::null_mut(), 0, 0, ptr::null_mut());
        assert_eq!(early, Errno::EOPBADSTATE.negative() as isize);
    }
}

#[test]
fn objects_may_be_closed_in_any_order() {
    let stack = Stack::open(None);
    let mr = stack.register(7, 64).unwrap();
    // SAFETY: each object is closed once and not used afterwards; the parents are closed first.
    unsafe {
        for fid in [stack.fabric.cast::<Fid>(), stack.domain.cast(), stack.cq.cast()] {
            assert_eq!(((*(*fid).ops).close)(fid), 0);
        }
        for fid in [stack.av.cast::<Fid>(), mr.cast(), stack.ep.cast()] {
            assert_eq!(((*(*fid).ops).close)(fid), 0);
        }
    }
    std::mem::forget(stack);
}

#[test]
fn options_and_flags() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open, and the values have the given lengths.
    unsafe {
        let ops = &*(*stack.ep).ops;
        let fid: *mut Fid = stack.ep.cast();
        let mut value = 16_384usize;
        let set = |name, value: &usize| {
            (ops.setopt)(fid, OPT_ENDPOINT, name, ptr::from_ref(value).cast(), 8)
        };
        assert_eq!(set(OPT_MIN_MULTI_RECV, &value), 0);
        assert_eq!(set(99, &value), Errno::ENOPROTOOPT.negative());
        value = 0;
        let mut len = 8;
        let read = (&raw mut value).cast();
        assert_eq!((ops.getopt)(fid, OPT_ENDPOINT, OPT_MIN_MULTI_RECV, read, &mut len), 0);
        assert_eq!((value, len), (16_384, 8));

        let control = (*(*stack.ep).fid.ops).control;
        let mut flags = SEND | DELIVERY_COMPLETE;
        assert_eq!(control(fid, SETOPSFLAG, (&raw mut flags).cast()), 0);
        flags = SEND;
        assert_eq!(control(fid, GETOPSFLAG, (&raw mut flags).cast()), 0);
        assert_eq!(flags, DELIVERY_COMPLETE);
        assert_eq!(control(fid, GETWAIT, ptr::null_mut()), ENOSYS);
    }
}

#[test]
fn memory_is_registered_under_the_callers_keys() {
    let stack = Stack::open(None);
    let first = stack.register(0x8000_0000_0000_01f0, 64).unwrap();
    // SAFETY: the region is registered.
    assert_eq!(unsafe { (*first).key }, 0x8000_0000_0000_01f0);
    assert_eq!(stack.register(0x8000_0000_0000_01f0, 8).err(), Some(-266));
    let whole = stack.register(1, usize::MAX).unwrap();
    for mr in [first, whole] {
        // SAFETY: the region is closed once.
        unsafe { assert_eq!(((*(*mr).fid.ops).close)(mr.cast()), 0) };
    }
    let again = stack.register(0x8000_0000_0000_01f0, 8).unwrap();
    // SAFETY: the region is closed once.
    unsafe { assert_eq!(((*(*again).fid.ops).close)(again.cast()), 0) };
}

#[test]
fn atomics_are_answered_alike_by_endpoint_and_domain() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open.
    unsafe {
        let (domain, ep) = (&*(*stack.domain).ops, &*(*stack.ep).atomic);
        for (datatype, op) in (0..14).flat_map(|d| (0..19).map(move |o| (d, o))) {
            for (flag, valid) in [
                (0, ep.writevalid),
                (FETCH_ATOMIC, ep.readwritevalid),
                (COMPARE_ATOMIC, ep.compwritevalid),
            ] {
                let (mut attr, mut count) = (AtomicAttr { count: 0, size: 0 }, 0);
                let said = valid(stack.ep, datatype, op, &mut count);
                let asked = (domain.query_atomic)(stack.domain, datatype, op, &mut attr, flag);
                assert_eq!(said, asked);
                assert_eq!(count, attr.count);
                assert_eq!(said == 0, count * attr.size == crate::atomic::BYTES_MAX);
            }
        }
    }
}
