//! `liblandbridge_interpose.so`, the interposer: records what a program that may be killed and restarted learns from outside (clocks, random
//! numbers, files), and what it does to files, and gives each later incarnation the same answers (`LD_PRELOAD`, set by the agent
//! that starts it).
//!
//! In: calls of C library functions that stand here instead (`exports`), and system calls, wherever they are made (`trap`). Out:
//! what the system says, noted in the record ([`landbridge_proto::nondeterminism`], in a memory file that the agent holds), or what is
//! noted there. Who reads the processor's counter is not seen.
//!
//! Recorded is one thread, the one that begins the program. Other threads and children get what the system says, and are
//! watched for effects on files (`observe`). The network's libraries, whose time is not the program's, are not recorded.
//!
//! What may never happen: an allocation on the way of a call; an effect on a file that is done twice; anything at all in a
//! process that is not recorded beyond a look at one word.

// Tests are not preloaded, and nothing is to stand in front of their own clocks.
#![cfg_attr(test, allow(dead_code))]

// Its system calls and its gate are those of one processor.
#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "the interposer is written for x86-64: leave it out (cargo build --workspace --exclude landbridge-interpose), and use \
     --recover with --set recover_clocks=off"
);

mod aio;
mod caller;
mod child_programs;
mod content;
mod descriptor_calls;
mod descriptor_table;
#[cfg(not(test))]
mod exports;
mod file_metadata;
mod held_files;
mod libc_wrappers;
mod metadata_calls;
mod observe;
mod path_changes;
mod real_libc;
mod recording;
mod session;
mod side_channels;
mod syscalls;
mod temporary;
mod trampoline;
mod trap;
mod working_directory;
