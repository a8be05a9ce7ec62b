//! `liblandbridge_clocks.so`: stands in front of the C library's clocks and sources of chance in a process that may be
//! killed and started anew (`LD_PRELOAD`, set by the agent that starts it), and tells each new start what the first one was
//! told.
//!
//! In: calls of the program and its libraries. Out: what the system says, noted in the record ([`landbridge_proto::clocks`],
//! in a memory file that the agent holds), or what is noted there. The C library's functions are the only way here: who
//! makes the system call itself, or reads the processor's counter, is not seen.
//!
//! Recorded is one thread, the one that begins the program. Other threads, children, and the network's libraries, whose time
//! is not the program's, get what the system says.
//!
//! What may never happen: an allocation on the way of a read; anything at all in a process that is not recorded
//! beyond a look at one word.

// Tests are not preloaded, and nothing is to stand in front of their own clocks.
#![cfg_attr(test, allow(dead_code))]

mod aio;
mod answer;
mod caller;
mod calls;
mod content;
#[cfg(not(test))]
mod exports;
mod facts;
mod gate;
mod held;
mod looks;
mod names;
mod observe;
mod opens;
mod own;
mod session;
mod system;
mod table;
mod temporary;
mod trap;
