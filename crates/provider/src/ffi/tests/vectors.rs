//! Tests of address vectors.

use std::mem::MaybeUninit;

use super::*;

#[test]
fn addresses_get_numbers_in_order_and_come_back() {
    let stack = Stack::open(None);
    let names: Vec<u8> = (1..=3u8).flat_map(|i| [i; 48]).collect();
    let mut numbers = [9; 3];
    // SAFETY: the buffers hold three addresses of 48 bytes and three numbers.
    unsafe {
        let ops = &*(*stack.av).ops;
        let none = ptr::null_mut();
        let done = (ops.insert)(stack.av, names.as_ptr().cast(), 3, numbers.as_mut_ptr(), 0, none);
        assert_eq!((done, numbers), (3, [0, 1, 2]));
        assert_eq!((ops.insert)(stack.av, names.as_ptr().cast(), 1, ptr::null_mut(), 0, none), 1);
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
fn bad_socket_addresses_are_reported_one_by_one() {
    let stack = Stack::open(Some("9228"));
    let good = crate::resolve::sockaddr_bytes("10.0.0.1:80".parse().unwrap());
    let portless = crate::resolve::sockaddr_bytes("10.0.0.1:0".parse().unwrap());
    let names = [good, [0xff; 16], portless, good].concat();
    let (mut numbers, mut errors) = ([9; 4], [9; 4]);
    // SAFETY: the buffers hold four addresses of 16 bytes, and four numbers and errors.
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
    // SAFETY: the buffer holds two times two numbers; buffers have the given lengths.
    unsafe {
        let ops = &*(*stack.av).ops;
        let (node, service) = (c"127.0.0.1".as_ptr(), c"9000".as_ptr());
        let none = ptr::null_mut();
        let done = (ops.insertsym)(stack.av, node, 2, service, 2, numbers.as_mut_ptr(), 0, none);
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
    // SAFETY: the objects are open, and are closed once; buffers have the given lengths.
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
