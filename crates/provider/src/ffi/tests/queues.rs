//! Tests of completion queues, counters and event queues.

use std::mem::MaybeUninit;

use super::*;

const EAGAIN: isize = -(libc::EAGAIN as isize);

#[test]
fn an_idle_queue_says_again_at_once_and_after_its_time() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open; the buffer holds one entry.
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
    // SAFETY: the objects are open, and are closed once.
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
fn a_counter_that_would_never_count_is_refused() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open, and are closed once.
    unsafe {
        let mut cntr = ptr::null_mut();
        let open = (*(*stack.domain).ops).cntr_open;
        assert_eq!(open(stack.domain, ptr::null_mut(), &mut cntr, ptr::null_mut()), 0);
        let bind = (*(*stack.ep).fid.ops).bind;
        assert_eq!(bind(stack.ep.cast(), cntr.cast(), READ | REMOTE_READ), -libc::ENOSYS);
        assert_eq!(bind(stack.ep.cast(), cntr.cast(), READ | WRITE), 0);
        assert_eq!(((*(*cntr).fid.ops).close)(cntr.cast()), 0);
    }
}

#[test]
fn a_poll_set_names_those_with_news() {
    let stack = Stack::open(None);
    // SAFETY: the objects are open, and are closed once; the buffer holds two contexts.
    unsafe {
        let (mut set, mut cntr, none) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let ops = &*(*stack.domain).ops;
        let mut attr = PollAttr { flags: 0 };
        assert_eq!((ops.poll_open)(stack.domain, &mut attr, &mut set, none), 0);
        let context: *mut c_void = ptr::without_provenance_mut(77);
        assert_eq!((ops.cntr_open)(stack.domain, ptr::null_mut(), &mut cntr, context), 0);
        let (ops, mut reported) = (&*(*set).ops, [none; 2]);
        assert_eq!((ops.add)(set, stack.cq.cast(), 0), 0);
        assert_eq!((ops.add)(set, cntr.cast(), 0), 0);
        assert_eq!((ops.add)(set, stack.av.cast(), 0), EINVAL);
        assert_eq!((ops.poll)(set, reported.as_mut_ptr(), 2), 0);
        ((*(*cntr).ops).add)(cntr, 1);
        assert_eq!((ops.poll)(set, reported.as_mut_ptr(), 0), 0, "no space, nothing reported");
        assert_eq!(((ops.poll)(set, reported.as_mut_ptr(), 2), reported[0]), (1, context));
        assert_eq!((ops.poll)(set, reported.as_mut_ptr(), 2), 0, "reported once");
        assert_eq!((ops.del)(set, cntr.cast(), 0), 0);
        ((*(*cntr).ops).add)(cntr, 1);
        assert_eq!((ops.poll)(set, reported.as_mut_ptr(), 2), 0);
        for fid in [cntr.cast::<Fid>(), set.cast()] {
            assert_eq!(((*(*fid).ops).close)(fid), 0);
        }
    }
}

#[test]
fn an_event_queue_gives_back_what_was_written() {
    let stack = Stack::open(None);
    let mut attr = EqAttr { size: 0, flags: WRITE, wait_obj: WAIT_FD, ..unsafe { zeroed() } };
    // SAFETY: the objects are open, and are closed once; buffers have the given lengths.
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
    // SAFETY: `poll` is one local entry.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}
