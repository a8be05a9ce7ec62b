//! The libfabric provider `landbridge`: the face the MPI libraries see, and the engine behind it.
//!
//! `ffi` translates libfabric's calls into `engine` requests and is the only place with raw object
//! pointers; `engine` knows no `fid`. Between them lie the small shared parts: `av` (names by
//! number), `mr` (memory by key), `queue` and `counter` (finished operations), `sink` (which of
//! them an endpoint uses), `engine_set` (the engines a queue drives); and what a thread that waits does:
//! `poll_policy` (how long it polls) and `parking` (an engine behind its lock, and how a thread sleeps in it); `stack` is what
//! the engine of a process works on that may be restarted; `threads`: which threads call there.

pub mod abi;
pub mod arena;
pub mod atomic;
pub mod av;
pub mod counter;
pub mod cpu_placement;
pub mod engine;
pub mod engine_set;
pub mod ffi;
pub mod host;
pub mod info;
pub mod interposer;
pub mod mr;
pub mod param;
pub mod parking;
pub mod poll_policy;
pub mod queue;
pub mod resolve;
pub mod sink;
pub mod stack;
pub mod statistics_page;
pub mod sync;
pub mod threads;

use std::cell::UnsafeCell;
use std::ffi::c_void;

/// Our own version: of two providers of this name the host keeps the newer.
const PROVIDER_VERSION: u32 = abi::version(0, 1);

/// What the host gets. It writes to `context`, and to nothing else.
struct Exported(UnsafeCell<abi::Provider>);

// SAFETY: written by `fi_prov_ini`, which the host calls once under its lock, and then by the host
// alone.
unsafe impl Sync for Exported {}

static PROVIDER: Exported = Exported(UnsafeCell::new(abi::Provider {
    version: PROVIDER_VERSION,
    fi_version: abi::LAYOUT_VERSION,
    context: [std::ptr::null_mut::<c_void>(); 4],
    name: info::NAME.as_ptr(),
    getinfo: Some(info::getinfo),
    fabric: Some(ffi::fabric::open),
    cleanup: Some(cleanup),
}));

/// The entry point libfabric looks for in a file `*-fi.so`.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut abi::Provider {
    arena::reserve();
    interposer::init();
    let provider = PROVIDER.0.get();
    // SAFETY: see `Exported`. We follow whatever version has loaded us.
    unsafe { (*provider).fi_version = host::version() };
    host::register(provider);
    provider
}

/// The host is about to end. There is nothing to give back: engines end with their endpoints, and
/// the library stays mapped (`nodelete`).
extern "C" fn cleanup() {}
