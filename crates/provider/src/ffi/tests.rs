//! The face through its own C tables, as a libfabric host would call it.

use std::ffi::{CString, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::ptr;

use crate::abi::*;
use crate::info::{FORMAT_LANDBRIDGE, INJECT_SIZE, NAME};

const EINVAL: i32 = -libc::EINVAL;
const ENODATA: i32 = -libc::ENODATA;
const ENOSYS: i32 = -libc::ENOSYS;
const EAGAIN: isize = -(libc::EAGAIN as isize);
/// What MPICH asks for (dumped from the wheel).
const MPICH_MODE: u64 = 1 << 59 | 1 << 57 | 1 << 56 | 1 << 52;
const MPICH_ORDER: u64 =
    ORDER_SAS | ORDER_ATOMIC_RAR | ORDER_ATOMIC_RAW | ORDER_ATOMIC_WAR | ORDER_ATOMIC_WAW;

mod getinfo {
    use super::*;

    #[test]
    fn without_hints_everything_is_offered_once() {
        let info = Offer::get(0, None, None, 0, None).unwrap();
        assert!(info.next.is_null() && info.nic.is_null());
        assert_eq!(info.caps & (MSG | MULTI_RECV), MSG | MULTI_RECV, "MPICH's hard requirement");
        assert_eq!(info.caps & (HMEM | SOURCE), 0);
        assert_eq!(info.addr_format, FORMAT_LANDBRIDGE);
        assert_eq!((info.mode, info.domain().mr_mode), (0, 0));
        assert!(info.fabric().prov_name.is_null(), "the host writes it");
        assert_eq!(info.ep().mem_tag_format, 0xAAAA_AAAA_AAAA_AAAA);
        assert_eq!(info.domain().av_type, AV_UNSPEC, "numbers are no promise to who did not ask");
        assert_eq!((info.src_addrlen, info.dest_addrlen), (48, 0));
    }

    #[test]
    fn mpich_gets_what_it_asked_for() {
        let mut hints = Hints::new();
        hints.info.caps = Offer::get(0, None, None, 0, None).unwrap().caps;
        hints.info.mode = MPICH_MODE;
        hints.tx.op_flags = COMPLETION | DELIVERY_COMPLETE;
        hints.tx.msg_order = MPICH_ORDER;
        hints.rx.op_flags = COMPLETION;
        hints.rx.msg_order = ORDER_SAS;
        hints.ep.kind = EP_RDM;
        hints.domain.threading = THREAD_DOMAIN;
        hints.domain.control_progress = PROGRESS_MANUAL;
        hints.domain.data_progress = PROGRESS_MANUAL;
        hints.domain.resource_mgmt = RM_ENABLED;
        hints.domain.av_type = AV_TABLE;
        hints.domain.mr_mode = 1 << 9;
        hints.domain.cq_data_size = 4;
        let info = hints.ask().unwrap();
        assert_eq!(info.caps, hints.info.caps);
        assert_eq!(info.domain().threading, THREAD_DOMAIN, "echoed, or MPICH gives up");
        assert_eq!(info.domain().av_type, AV_TABLE);
        assert_eq!(info.domain().cq_data_size, 4);
        assert_eq!(info.tx().op_flags, COMPLETION | DELIVERY_COMPLETE);
        assert_eq!((info.tx().msg_order, info.rx().msg_order), (MPICH_ORDER, ORDER_SAS));
        assert_eq!(info.tx().inject_size, INJECT_SIZE);
    }

    #[test]
    fn capabilities_are_completed_not_inflated() {
        let mut hints = Hints::new();
        hints.info.caps = TAGGED;
        let info = hints.ask().unwrap();
        assert_eq!(info.caps & (MSG | RMA | ATOMIC | DIRECTED_RECV | MULTI_RECV), 0);
        assert_eq!(info.caps & (TAGGED | SEND | RECV), TAGGED | SEND | RECV);
        hints.info.caps = RMA | READ;
        assert_eq!(hints.ask().unwrap().caps & (READ | WRITE | REMOTE_READ), READ);
        hints.info.caps = MSG | SOURCE;
        assert_eq!(hints.ask().unwrap().caps & SOURCE, SOURCE, "given when asked for by name");
    }

    #[test]
    fn what_we_cannot_do_is_refused() {
        let refused = |change: fn(&mut Hints)| {
            let mut hints = Hints::new();
            change(&mut hints);
            assert_eq!(hints.ask().err(), Some(ENODATA));
        };
        refused(|h| h.info.caps = MSG | HMEM);
        refused(|h| h.info.caps = MSG | PEER);
        refused(|h| h.info.caps = 1 << 5);
        refused(|h| h.ep.kind = 1);
        refused(|h| h.ep.kind = 2);
        refused(|h| h.ep.protocol = 11);
        refused(|h| h.ep.tx_ctx_cnt = usize::MAX);
        refused(|h| h.tx.inject_size = INJECT_SIZE + 1);
        refused(|h| h.tx.msg_order = 1 << 6);
        refused(|h| h.rx.iov_limit = 9);
        refused(|h| h.domain.data_progress = PROGRESS_AUTO);
        refused(|h| h.domain.cq_data_size = 9);
        refused(|h| h.domain.max_ep_tx_ctx = 2);
        refused(|h| h.domain.mr_mode = MR_BASIC);
        refused(|h| h.info.addr_format = 3);
    }

    #[test]
    fn probes_of_utility_providers_are_refused() {
        assert_eq!(Offer::get(version(2, 5), None, None, 1 << 59, None).err(), Some(ENODATA));
    }

    #[test]
    fn names_must_be_ours() {
        let mut hints = Hints::new();
        let other = CString::new("eth0").unwrap();
        hints.domain.name = other.as_ptr().cast_mut();
        assert_eq!(hints.ask().err(), Some(ENODATA));
        hints.domain.name = NAME.as_ptr().cast_mut();
        assert!(hints.ask().is_ok());
        hints.fabric.name = other.as_ptr().cast_mut();
        assert_eq!(hints.ask().err(), Some(ENODATA));
    }

    #[test]
    fn strings_are_resolved_to_socket_addresses() {
        let server = Offer::get(version(1, 17), None, Some("9228"), SOURCE, None).unwrap();
        assert_eq!(server.addr_format, FORMAT_SOCKADDR_IN);
        assert_eq!((server.src_addrlen, server.dest_addrlen), (16, 0));
        let client = Offer::get(version(1, 17), Some("127.0.0.1"), Some("9228"), 0, None).unwrap();
        assert_eq!((client.src_addrlen, client.dest_addrlen), (16, 16));
        // SAFETY: the offer is whole.
        assert_eq!(unsafe { crate::info::bind_address(&client) }, None, "any place will do");
        // SAFETY: sixteen bytes, as just asserted.
        let target = unsafe { crate::resolve::read_sockaddr(client.dest_addr) };
        assert_eq!(target, Some("127.0.0.1:9228".parse().unwrap()));
        let nowhere = Offer::get(version(1, 17), Some("300.1.1.1"), None, NUMERICHOST, None);
        assert_eq!(nowhere.err(), Some(ENODATA));
    }

    #[test]
    fn old_callers_get_the_old_word_for_no_registration_mode() {
        let info = Offer::get(version(1, 4), None, None, 0, None).unwrap();
        assert_eq!(info.domain().mr_mode, MR_SCALABLE);
    }
}

mod objects {
    use super::*;

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
        // SAFETY: objects just opened.
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
        // SAFETY: each closed once, none used after; the parents go first.
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
        // SAFETY: objects just opened; values have the lengths given.
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
        // SAFETY: just registered.
        assert_eq!(unsafe { (*first).key }, 0x8000_0000_0000_01f0);
        assert_eq!(stack.register(0x8000_0000_0000_01f0, 8).err(), Some(-266));
        let whole = stack.register(1, usize::MAX).unwrap();
        for mr in [first, whole] {
            // SAFETY: closed once.
            unsafe { assert_eq!(((*(*mr).fid.ops).close)(mr.cast()), 0) };
        }
        let again = stack.register(0x8000_0000_0000_01f0, 8).unwrap();
        // SAFETY: closed once.
        unsafe { assert_eq!(((*(*again).fid.ops).close)(again.cast()), 0) };
    }

    #[test]
    fn atomics_are_answered_alike_by_endpoint_and_domain() {
        let stack = Stack::open(None);
        // SAFETY: objects just opened.
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
}

/// When success is told, and at which level: what `*msg` calls, plain calls and injects differ in.
mod terms {
    use super::super::ep::endpoint;
    use super::*;
    use crate::engine::request::Level;

    #[test]
    fn with_selective_completion_message_calls_count_their_own_flags_only() {
        let stack = bound(SEND | RECV | SELECTIVE_COMPLETION, COMPLETION | DELIVERY_COMPLETE);
        // SAFETY: an endpoint just opened.
        let ep = unsafe { endpoint(stack.ep) };
        let plain = ep.transmit_terms();
        assert_eq!((plain.notify, plain.level, plain.inject), (true, Level::Delivery, false));
        let silent = ep.message_terms(0, 0).unwrap();
        assert_eq!((silent.notify, silent.level), (false, Level::Transmit), "Open MPI's ssend ack");
        assert!(ep.message_terms(COMPLETION, 0).unwrap().notify);
        assert!(ep.receive_notify_for(COMPLETION) && !ep.receive_notify_for(0));
    }

    #[test]
    fn without_it_everything_but_injects_is_told() {
        let stack = bound(SEND | RECV, 0);
        // SAFETY: an endpoint just opened.
        let ep = unsafe { endpoint(stack.ep) };
        assert!(ep.transmit_terms().notify && ep.receive_notify() && ep.receive_notify_for(0));
        let inject = ep.inject_terms(INJECT_SIZE).unwrap();
        assert_eq!((inject.notify, inject.inject), (false, true));
        assert_eq!(ep.inject_terms(INJECT_SIZE + 1).err(), Some(Errno::EMSGSIZE));
        assert_eq!(ep.message_terms(INJECT, INJECT_SIZE + 1).err(), Some(Errno::EMSGSIZE));
        assert!(ep.message_terms(0, INJECT_SIZE + 1).is_ok());
    }

    #[test]
    fn levels_follow_the_flags() {
        let stack = bound(SEND | RECV, 0);
        // SAFETY: an endpoint just opened.
        let level = |flags| unsafe { endpoint(stack.ep) }.message_terms(flags, 0).unwrap().level;
        assert_eq!(level(0), Level::Transmit);
        assert_eq!(level(INJECT), Level::Inject);
        assert_eq!(level(INJECT_COMPLETE), Level::Inject);
        assert_eq!(level(INJECT | TRANSMIT_COMPLETE), Level::Transmit);
        assert_eq!(level(INJECT | DELIVERY_COMPLETE), Level::Delivery);
    }

    #[test]
    fn a_source_counts_only_where_it_was_asked_for() {
        let mut stack = Stack::open(None);
        // SAFETY: endpoints just opened.
        assert_eq!(unsafe { endpoint(stack.ep) }.source(3), 3);
        stack.reopen(|info| info.caps &= !DIRECTED_RECV);
        // SAFETY: as above.
        assert_eq!(unsafe { endpoint(stack.ep) }.source(3), ADDR_UNSPEC);
    }

    fn bound(flags: u64, transmit_flags: u64) -> Stack {
        let mut stack = Stack::open(None);
        // SAFETY: the offer's attributes are there.
        stack.reopen(|info| unsafe { (*info.tx_attr).op_flags = transmit_flags });
        // SAFETY: objects just opened.
        let bound =
            unsafe { ((*(*stack.ep).fid.ops).bind)(stack.ep.cast(), stack.cq.cast(), flags) };
        assert_eq!(bound, 0);
        stack
    }
}

mod queues {
    use super::*;

    #[test]
    fn an_idle_queue_says_again_at_once_and_after_its_time() {
        let stack = Stack::open(None);
        // SAFETY: objects just opened; the buffer holds one entry.
        unsafe {
            let ops = &*(*stack.cq).ops;
            let mut entry = MaybeUninit::<CqTaggedEntry>::uninit();
            let buffer: *mut c_void = entry.as_mut_ptr().cast();
            assert_eq!((ops.read)(stack.cq, buffer, 1), EAGAIN);
            let began = std::time::Instant::now();
            assert_eq!((ops.sread)(stack.cq, buffer, 1, ptr::null(), 20), EAGAIN);
            assert!(began.elapsed().as_millis() >= 20);
            (ops.signal)(stack.cq);
            assert_eq!((ops.sread)(stack.cq, buffer, 1, ptr::null(), -1), EAGAIN, "signaled");
            assert_eq!((ops.readerr)(stack.cq, ptr::null_mut(), 0), EAGAIN);
        }
    }

    #[test]
    fn a_counter_waits_for_its_threshold() {
        let stack = Stack::open(None);
        // SAFETY: objects just opened, closed once.
        unsafe {
            let mut cntr = ptr::null_mut();
            let open = (*(*stack.domain).ops).cntr_open;
            assert_eq!(open(stack.domain, ptr::null_mut(), &mut cntr, ptr::null_mut()), 0);
            let ops = &*(*cntr).ops;
            assert_eq!((ops.wait)(cntr, 1, 0), -libc::ETIMEDOUT);
            (ops.add)(cntr, 3);
            assert_eq!((ops.wait)(cntr, 3, 0), 0);
            (ops.adderr)(cntr, 2);
            assert_eq!(((ops.read)(cntr), (ops.readerr)(cntr)), (3, 2));
            (ops.set)(cntr, 9);
            (ops.seterr)(cntr, 0);
            assert_eq!(((ops.read)(cntr), (ops.readerr)(cntr)), (9, 0));
            assert_eq!(((*(*cntr).fid.ops).close)(cntr.cast()), 0);
        }
    }

    #[test]
    fn an_event_queue_gives_back_what_was_written() {
        let stack = Stack::open(None);
        let mut attr = EqAttr { size: 0, flags: WRITE, wait_obj: WAIT_FD, ..unsafe { zeroed() } };
        // SAFETY: objects just opened, closed once; buffers have the lengths given.
        unsafe {
            let mut eq = ptr::null_mut();
            let open = (*(*stack.fabric).ops).eq_open;
            assert_eq!(open(stack.fabric, &mut attr, &mut eq, ptr::null_mut()), 0);
            let ops = &*(*eq).ops;
            let mut fd = -1;
            let control = (*(*eq).fid.ops).control;
            assert_eq!(control(eq.cast(), GETWAIT, (&raw mut fd).cast()), 0);
            let (mut event, mut word) = (0, 0u64);
            let buffer: *mut c_void = (&raw mut word).cast();
            assert_eq!((ops.read)(eq, &mut event, buffer, 8, 0), EAGAIN);
            assert!(!is_readable(fd));
            assert_eq!((ops.write)(eq, 5, (&raw const fd).cast(), 4, 0), 4);
            assert!(is_readable(fd));
            assert_eq!((ops.read)(eq, &mut event, buffer, 3, 0), -257, "too small");
            assert_eq!((ops.read)(eq, &mut event, buffer, 8, PEEK), 4);
            assert_eq!((ops.sread)(eq, &mut event, buffer, 8, 1000, 0), 4);
            assert_eq!((event, word), (5, fd as u64));
            assert!(!is_readable(fd));
            assert_eq!((ops.sread)(eq, &mut event, buffer, 8, 10, 0), EAGAIN);
            assert_eq!(((*(*eq).fid.ops).close)(eq.cast()), 0);
        }
    }

    fn is_readable(fd: i32) -> bool {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry of ours.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }
}

mod vectors {
    use super::*;

    #[test]
    fn addresses_get_numbers_in_order_and_come_back() {
        let stack = Stack::open(None);
        let names: Vec<u8> = (1..=3u8).flat_map(|i| [i; 48]).collect();
        let mut numbers = [9; 3];
        // SAFETY: three addresses of 48 bytes, room for three numbers.
        unsafe {
            let ops = &*(*stack.av).ops;
            let none = ptr::null_mut();
            let done =
                (ops.insert)(stack.av, names.as_ptr().cast(), 3, numbers.as_mut_ptr(), 0, none);
            assert_eq!((done, numbers), (3, [0, 1, 2]));
            assert_eq!(
                (ops.insert)(stack.av, names.as_ptr().cast(), 1, ptr::null_mut(), 0, none),
                1
            );
            let (mut name, mut len) = ([0u8; 64], 64);
            assert_eq!((ops.lookup)(stack.av, 2, name.as_mut_ptr().cast(), &mut len), 0);
            assert_eq!((len, &name[..48]), (48, &[3u8; 48][..]));
            assert_eq!((ops.lookup)(stack.av, 3, name.as_mut_ptr().cast(), &mut len), EINVAL);
            let mut number = 2;
            assert_eq!((ops.remove)(stack.av, &mut number, 1, 0), 0);
            assert_eq!((ops.remove)(stack.av, &mut number, 1, 0), EINVAL);
        }
    }

    #[test]
    fn bad_socket_addresses_are_told_one_by_one() {
        let stack = Stack::open(Some("9228"));
        let good = crate::resolve::sockaddr_bytes("10.0.0.1:80".parse().unwrap());
        let portless = crate::resolve::sockaddr_bytes("10.0.0.1:0".parse().unwrap());
        let names = [good, [0xff; 16], portless, good].concat();
        let (mut numbers, mut errors) = ([9; 4], [9; 4]);
        // SAFETY: four addresses of 16 bytes, room for four numbers and errors.
        unsafe {
            let done = ((*(*stack.av).ops).insert)(
                stack.av,
                names.as_ptr().cast(),
                4,
                numbers.as_mut_ptr(),
                AV_SYNC_ERR,
                errors.as_mut_ptr().cast(),
            );
            assert_eq!(done, 2);
        }
        assert_eq!(numbers, [0, ADDR_NOTAVAIL, ADDR_NOTAVAIL, 0]);
        assert_eq!(errors, [0, libc::EINVAL, libc::EINVAL, 0]);
    }

    #[test]
    fn services_are_counted_up() {
        let stack = Stack::open(Some("9228"));
        let mut numbers = [9; 4];
        let (mut text, mut len, mut name) = ([0u8; 64], 64, [0u8; 16]);
        // SAFETY: room for two times two numbers; buffers have the lengths given.
        unsafe {
            let ops = &*(*stack.av).ops;
            let (node, service) = (c"127.0.0.1".as_ptr(), c"9000".as_ptr());
            let none = ptr::null_mut();
            let done =
                (ops.insertsym)(stack.av, node, 2, service, 2, numbers.as_mut_ptr(), 0, none);
            assert_eq!((done, numbers), (4, [0, 1, 2, 3]));
            assert_eq!((ops.insertsvc)(stack.av, node, service, numbers.as_mut_ptr(), 0, none), 1);
            assert_eq!(numbers[0], 0, "known already");
            let mut bytes = 16;
            assert_eq!((ops.lookup)(stack.av, 3, name.as_mut_ptr().cast(), &mut bytes), 0);
            (ops.straddr)(stack.av, name.as_ptr().cast(), text.as_mut_ptr().cast(), &mut len);
        }
        assert_eq!(&text[..len], b"fi_sockaddr_in://127.0.0.2:9001\0");
    }

    #[test]
    fn insertions_can_be_reported_as_events() {
        let stack = Stack::open(None);
        // SAFETY: objects just opened, closed once; buffers have the lengths given.
        unsafe {
            let mut attr = AvAttr { flags: EVENT, ..zeroed() };
            let (mut av, mut eq) = (ptr::null_mut(), ptr::null_mut());
            let none: *mut c_void = ptr::null_mut();
            let open = (*(*stack.domain).ops).av_open;
            assert_eq!(open(stack.domain, &mut attr, &mut av, none), 0);
            let name = [1u8; 48];
            let insert = (*(*av).ops).insert;
            let context: *mut c_void = ptr::without_provenance_mut(77);
            let unbound = insert(av, name.as_ptr().cast(), 1, ptr::null_mut(), 0, context);
            assert_eq!(unbound, Errno::ENOEQ.negative());

            let open = (*(*stack.fabric).ops).eq_open;
            assert_eq!(open(stack.fabric, ptr::null_mut(), &mut eq, none), 0);
            assert_eq!(((*(*av).fid.ops).bind)(av.cast(), eq.cast(), 0), 0);
            let mut number = 9;
            assert_eq!(insert(av, name.as_ptr().cast(), 1, &mut number, 0, context), 0);
            let (mut event, mut entry) = (0, MaybeUninit::<EqEntry>::uninit());
            let buffer = entry.as_mut_ptr().cast();
            assert_eq!(((*(*eq).ops).read)(eq, &mut event, buffer, 24, 0), 24);
            let entry = entry.assume_init();
            assert_eq!((event, entry.data, number), (EQ_AV_COMPLETE, 1, 0));
            assert_eq!((entry.context, entry.fid), (context, av.cast()));
            for fid in [av.cast::<Fid>(), eq.cast()] {
                assert_eq!(((*(*fid).ops).close)(fid), 0);
            }
        }
    }
}

/// An answer of `getinfo`, freed as the host would.
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
        // SAFETY: as a host calls it.
        let status = unsafe {
            let getinfo = (*crate::fi_prov_ini()).getinfo.unwrap();
            getinfo(version, pointer(&node), pointer(&service), flags, hints, &mut info)
        };
        if status == 0 { Ok(Offer(info)) } else { Err(status) }
    }

    fn tx(&self) -> &TxAttr {
        // SAFETY: every part of an offer is there.
        unsafe { &*self.tx_attr }
    }

    fn rx(&self) -> &RxAttr {
        // SAFETY: as above.
        unsafe { &*self.rx_attr }
    }

    fn ep(&self) -> &EpAttr {
        // SAFETY: as above.
        unsafe { &*self.ep_attr }
    }

    fn domain(&self) -> &DomainAttrBase {
        // SAFETY: as above.
        unsafe { &*self.domain_attr }
    }

    fn fabric(&self) -> &FabricAttr {
        // SAFETY: as above.
        unsafe { &*self.fabric_attr }
    }
}

impl std::ops::Deref for Offer {
    type Target = Info;
    fn deref(&self) -> &Info {
        // SAFETY: what `getinfo` gave.
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
        // SAFETY: all of it is libc memory, or null.
        parts.into_iter().for_each(|part| unsafe { libc::free(part) });
    }
}

/// Hints with all their parts. The domain's are as short as 1.17 has them, so that a read beyond
/// them would be a read of something else.
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

/// A fabric, a domain, and in it a queue, a vector and an endpoint, nothing bound.
struct Stack {
    fabric: *mut FidFabric,
    domain: *mut FidDomain,
    cq: *mut FidCq,
    av: *mut FidAv,
    ep: *mut FidEp,
}

impl Stack {
    /// With a service, addresses are socket addresses.
    fn open(service: Option<&str>) -> Stack {
        let info = Offer::get(version(1, 17), None, service, SOURCE, None).unwrap();
        let none: *mut c_void = ptr::null_mut();
        let (mut fabric, mut domain, mut cq, mut av, mut ep) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: as a host calls it.
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

    /// Another endpoint in place of the first, from a changed offer.
    fn reopen(&mut self, change: impl FnOnce(&mut Info)) {
        let info = Offer::get(version(1, 17), None, None, 0, None).unwrap();
        // SAFETY: the offer is ours alone; the first endpoint is closed once.
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
        // SAFETY: nobody reaches the region.
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
            // SAFETY: each closed once.
            unsafe { assert_eq!(((*(*fid).ops).close)(fid), 0) };
        }
    }
}
