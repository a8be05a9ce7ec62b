//! Tests of when success is reported, and at which level: differences of `*msg` calls, plain calls
//! and injects.

use super::*;
use crate::engine::request::CompletionLevel;
use crate::ffi::ep::endpoint;
use crate::info::INJECT_SIZE;

#[test]
fn with_selective_completion_message_calls_count_their_own_flags_only() {
    let stack = bound(SEND | RECV | SELECTIVE_COMPLETION, COMPLETION | DELIVERY_COMPLETE);
    // SAFETY: the endpoint is open.
    let ep = unsafe { endpoint(stack.ep) };
    let plain = ep.transmit_options();
    assert_eq!((plain.notify, plain.level, plain.inject), (true, CompletionLevel::Delivery, false));
    let silent = ep.message_options(0, 0).unwrap();
    assert_eq!(
        (silent.notify, silent.level),
        (false, CompletionLevel::Transmit),
        "Open MPI's ssend ack"
    );
    assert!(ep.message_options(COMPLETION, 0).unwrap().notify);
    assert!(ep.receive_notify_for(COMPLETION) && !ep.receive_notify_for(0));
}

#[test]
fn without_it_everything_but_injects_is_reported() {
    let stack = bound(SEND | RECV, 0);
    // SAFETY: the endpoint is open.
    let ep = unsafe { endpoint(stack.ep) };
    assert!(ep.transmit_options().notify && ep.receive_notify() && ep.receive_notify_for(0));
    let inject = ep.inject_options(INJECT_SIZE).unwrap();
    assert_eq!((inject.notify, inject.inject), (false, true));
    assert_eq!(ep.inject_options(INJECT_SIZE + 1).err(), Some(Errno::EMSGSIZE));
    assert_eq!(ep.message_options(INJECT, INJECT_SIZE + 1).err(), Some(Errno::EMSGSIZE));
    assert!(ep.message_options(0, INJECT_SIZE + 1).is_ok());
}

#[test]
fn levels_follow_the_flags() {
    let stack = bound(SEND | RECV, 0);
    // SAFETY: the endpoint is open.
    let level = |flags| unsafe { endpoint(stack.ep) }.message_options(flags, 0).unwrap().level;
    assert_eq!(level(0), CompletionLevel::Transmit);
    assert_eq!(level(INJECT), CompletionLevel::Inject);
    assert_eq!(level(INJECT_COMPLETE), CompletionLevel::Inject);
    assert_eq!(level(INJECT | TRANSMIT_COMPLETE), CompletionLevel::Transmit);
    assert_eq!(level(INJECT | DELIVERY_COMPLETE), CompletionLevel::Delivery);
}

#[test]
fn a_source_counts_only_where_it_was_asked_for() {
    let mut stack = Stack::open(None);
    // SAFETY: the endpoint is open.
    assert_eq!(unsafe { endpoint(stack.ep) }.source(3), 3);
    stack.reopen(|info| info.caps &= !DIRECTED_RECV);
    // SAFETY: the endpoint is open.
    assert_eq!(unsafe { endpoint(stack.ep) }.source(3), ADDR_UNSPEC);
}

fn bound(flags: u64, transmit_flags: u64) -> Stack {
    let mut stack = Stack::open(None);
    // SAFETY: the offer's attributes are present.
    stack.reopen(|info| unsafe { (*info.tx_attr).op_flags = transmit_flags });
    // SAFETY: the objects are open.
    let bound = unsafe { ((*(*stack.ep).fid.ops).bind)(stack.ep.cast(), stack.cq.cast(), flags) };
    assert_eq!(bound, 0);
    stack
}
