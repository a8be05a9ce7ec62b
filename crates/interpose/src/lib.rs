//! `liblandbridge_interpose.so`, the interposer: records the nondeterministic input of a program
//! that may be killed and restarted (clocks, random numbers, files) and the program's effects on
//! files, and gives each later incarnation the same answers. The node agent that starts a rank sets
//! `LD_PRELOAD`.
//!
//! In: calls of C library functions that this library replaces (`exports`), and all system calls
//! (`trap`). Out: the system's answer, which is noted in the record
//! ([`landbridge_proto::nondeterminism`], in a memory file that the agent holds), or the answer
//! from the record. Reads of the processor's time stamp counter are not recorded.
//!
//! One thread is recorded: the thread that begins the program. Other threads and children get the
//! system's answers, and are observed for effects on files (`observe`). The network's libraries are
//! not recorded, because their time does not reach the program.
//!
//! What may never happen: a recorded call allocates memory; an effect on a file is performed twice;
//! an unrecorded process does more than read one word for each call.

// Tests do not preload this library, and no function may replace their own clocks.
#![cfg_attr(test, allow(dead_code))]

// The system calls and the trampoline's machine code are those of x86-64.
#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "the interposer is written for x86-64: leave it out (cargo build --workspace --exclude landbridge-interpose), and use \
     --recover with --set recover_clocks=off"
);

mod aio;
mod appends;
mod caller;
mod changed_files;
mod changed_names;
mod child_programs;
mod compared_arguments;
mod content;
mod copies;
mod deadlines;
mod descriptor_calls;
mod descriptor_table;
mod directory_calls;
mod dispatch;
#[cfg(not(test))]
mod exports;
mod file_content;
mod file_identity;
mod file_metadata;
mod file_size_limit;
mod file_status;
mod handler_frames;
mod held_files;
mod kernel_calls;
mod libc_wrappers;
mod mapped_files;
mod mapping_calls;
mod messages;
mod metadata_calls;
mod new_processes;
mod observe;
mod open_file;
mod open_file_changes;
mod origin;
mod path_changes;
mod process_calls;
mod processes;
mod range_locks;
mod raw_channels;
mod real_libc;
mod record_head;
mod record_lock;
mod recording;
mod restart_refusals;
mod restored_files;
mod session;
mod side_channels;
mod signal_mask;
mod syscalls;
mod temporary;
mod trampoline;
mod trap;
mod used_descriptors;
mod user_memory;
mod watched;
mod working_directory;
