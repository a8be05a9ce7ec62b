//! Tests of the offers of `getinfo`.

use super::*;
use crate::info::{FORMAT_LANDBRIDGE, INJECT_SIZE, NAME};

const ENODATA: i32 = -libc::ENODATA;
/// The mode bits that MPICH requests (dumped from the Python wheel).
const MPICH_MODE: u64 = 1 << 59 | 1 << 57 | 1 << 56 | 1 << 52;
const MPICH_ORDER: u64 =
    ORDER_SAS | ORDER_ATOMIC_RAR | ORDER_ATOMIC_RAW | ORDER_ATOMIC_WAR | ORDER_ATOMIC_WAW;

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
    refused(|h| h.tx.rma_iov_limit = 2);
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
    // SAFETY: the offer is complete.
    assert_eq!(unsafe { crate::info::bind_address(&client) }, None, "any place will do");
    // SAFETY: the address has sixteen bytes, as asserted above.
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
