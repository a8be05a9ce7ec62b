//! The libfabric provider `landbridge`: the functions that MPI libraries call, and the engine
//! behind them.
//!
//! `ffi` translates libfabric's calls into `engine` requests and is the only module with raw object
//! pointers; `engine` knows no `fid`. Progress goes down and completions come back as data: a call
//! that reads a queue or counter drives the engines of the object's `engine_set`, and the engines
//! put completions into the queues and counters of their `sink`, which know no engine.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `abi` | libfabric's binary interface |
//! | `sync` | the provider's lock, and how its holders sleep |
//! | `arena` | all memory of the provider: one range of addresses |
//! | `param` | settings of this process |
//! | `host` | the libfabric that has loaded the provider; its log |
//! | `interposer` | calls into the interposer |
//! | `stack` | the stack of an engine of a recorded process |
//! | `statistics_page` | the statistics page of this process |
//! | `resolve` | node and service strings, socket addresses |
//! | `av` | address vectors: names by number |
//! | `info` | what the provider offers |
//! | `mr` | registered memory by key |
//! | `atomic` | atomic operations on registered memory |
//! | `completion` | completions of operations |
//! | `queue` | completion queues |
//! | `counter` | completion counters |
//! | `sink` | the queues and counters of an endpoint |
//! | `tick_clock` | a clock for the polls of a waiting loop |
//! | `cpu_placement` | on which processor a waiting thread runs |
//! | `streak` | whether polls without result form a waiting loop |
//! | `poll_policy` | what a thread does after polls without result |
//! | `threads` | which threads of a recorded process call MPI |
//! | `engine` | the engine of one endpoint |
//! | `parking` | an engine behind its lock, and how a thread sleeps in it |
//! | `engine_set` | the engines that a read of a queue or counter drives |
//! | `ffi` | libfabric's objects and calls |

pub mod abi;
pub mod arena;
pub mod atomic;
pub mod av;
pub mod completion;
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
pub mod streak;
pub mod sync;
pub mod threads;
pub mod tick_clock;

use std::cell::UnsafeCell;
use std::ffi::c_void;

/// The provider's version: of two providers with this name the host keeps the newer.
const PROVIDER_VERSION: u32 = abi::version(0, 1);

/// The structure that the host receives. The host writes to `context`, and to nothing else.
struct Exported(UnsafeCell<abi::Provider>);

// SAFETY: `fi_prov_ini`, which the host calls once under its lock, writes the structure; afterwards
// only the host writes to it.
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

/// The entry point that libfabric looks for in a file `*-fi.so`.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut abi::Provider {
    arena::reserve();
    interposer::init();
    let provider = PROVIDER.0.get();
    // SAFETY: only `fi_prov_ini` writes, once. The provider adopts the version of the libfabric
    // that has loaded it.
    unsafe { (*provider).fi_version = host::version() };
    host::register(provider);
    provider
}

/// Called when the host ends. Nothing has to be released: engines end with their endpoints, and the
/// library stays mapped (`nodelete`).
extern "C" fn cleanup() {}
