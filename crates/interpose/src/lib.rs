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
//! The modules in order; each uses only those before it. Modules after `session` contain methods of
//! [`session::Session`].
//!
//! | module | does |
//! |---|---|
//! | `trampoline` | machine code by which this library and let-through calls reach the kernel |
//! | `kernel_calls` | system calls of this library, and the program's memory |
//! | `handler_frames` | signal handlers that the recorded thread is running |
//! | `used_descriptors` | descriptors that a system call uses |
//! | `path_changes` | system calls that change names and attributes |
//! | `messages` | lines for the user |
//! | `signal_mask` | calls that wait, with the program's signal mask |
//! | `caller` | whether a call comes from the program or from a network library |
//! | `origin` | node and kernel on which the record began |
//! | `record_head` | head of the record, and which thread is recorded |
//! | `program_random` | the random bytes that each program is given |
//! | `compared_arguments` | arguments that must be equal in every incarnation |
//! | `file_identity` | which file something is |
//! | `held_files` | open files that the node agent holds |
//! | `processes` | descent of processes, threads of this process |
//! | `real_libc` | the C library's own functions |
//! | `dispatch` | syscall user dispatch, on and off |
//! | `file_status` | stat(2) with fresh or cached attributes |
//! | `change_times` | whether a time of change shows each later change |
//! | `locked_ranges` | ranges of a file that are locked |
//! | `open_file` | one open file description |
//! | `restart_refusals` | reasons why this process must not be restarted |
//! | `aio` | asynchronous reads and writes, refused |
//! | `file_metadata` | what the kernel says of a file |
//! | `file_size_limit` | RLIMIT_FSIZE in a replay |
//! | `record_lock` | exclusive access to the record, for one call |
//! | `yield_call` | the call by which a waiting library lets others run |
//! | `changed_files`, `changed_names`, `mapped_files` | what the job has changed or mapped |
//! | `io_vectors` | buffers of a read or write |
//! | `file_content` | what parts of files hold |
//! | `written_bytes` | how much a thread has written |
//! | `working_directory` | the directory to which relative names refer |
//! | `descriptor_table` | open files of the recorded thread |
//! | `thread_gate` | other threads stand still while an image is taken |
//! | `watched` | threads, handlers and children that are observed |
//! | `spawn_actions`, `child_programs` | programs that the program starts |
//! | `process_calls`, `side_channels` | calls on other processes, sockets and queues |
//! | `session` | one recorded call: performed and noted, or answered from the record |
//! | `connections` | connections of sockets, recorded if they fail |
//! | `range_locks` | locks of the process, and which open file holds them |
//! | `appends`, `copies`, `open_file_changes` | recorded calls on open files, of one kind each |
//! | `directory_calls`, `mapping_calls`, `metadata_calls` | recorded calls of one kind each |
//! | `content` | reads and writes |
//! | `descriptor_calls` | opening, duplicating and closing |
//! | `lock_calls` | locks of flock(2) and fcntl(2) |
//! | `system_values` | random numbers, and the names of node and kernel |
//! | `recorded_pipes` | reads of standard input, and of pipes from started programs |
//! | `waits` | waits for these pipes and programs |
//! | `unsaved_attributes` | what a checkpoint image lacks |
//! | `restored_files` | open files when the process goes live, and around a checkpoint |
//! | `new_processes` | threads and processes that the program begins |
//! | `raw_channels` | sockets and queues used by raw system calls |
//! | `user_memory` | memory that a call of the program passes |
//! | `deadlines` | waits until a time that a replay has moved |
//! | `syscalls` | calls of the recorded thread, by number |
//! | `observe` | calls of other threads, handlers and children |
//! | `trap` | the handler of dispatched calls |
//! | `recording` | when this process is recorded: its begin, its checkpoints |
//! | `libc_wrappers`, `temporary`, `exports` | functions that replace those of the C library |
//!
//! What may never happen: a recorded call allocates memory; an effect on a file is performed twice;
//! an unrecorded process does more than read one word for each call.

// Tests do not preload this library, and no function may replace their own clocks.
#![cfg_attr(test, allow(dead_code))]

// The system calls and the trampoline's machine code are those of x86-64.
#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "the interposer is written for x86-64: leave it out (cargo build --workspace --exclude \
     landbridge-interpose), and use --recover with --set recover_clocks=off"
);

mod aio;
mod appends;
mod caller;
mod change_times;
mod changed_files;
mod changed_names;
mod child_programs;
mod compared_arguments;
mod connections;
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
mod io_vectors;
mod kernel_calls;
mod libc_wrappers;
mod lock_calls;
mod locked_ranges;
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
mod program_random;
mod range_locks;
mod raw_channels;
mod real_libc;
mod record_head;
mod record_lock;
mod recorded_pipes;
mod recording;
mod restart_refusals;
mod restored_files;
mod session;
mod side_channels;
mod signal_mask;
mod spawn_actions;
mod syscalls;
mod system_values;
mod temporary;
mod thread_gate;
mod trampoline;
mod trap;
mod unsaved_attributes;
mod used_descriptors;
mod user_memory;
mod waits;
mod watched;
mod working_directory;
mod written_bytes;
mod yield_call;
