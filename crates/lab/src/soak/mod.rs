//! Endurance tests: unmodified MPI programs run repeatedly in a lab while random faults disturb its
//! network.
//!
//! In: a lab, a seed, a time, and the programs and kinds of faults. Out: a line for each fault and
//! each program, a table, and whether every program ended right.
//!
//! The soak runs in the lab that it disturbs. However a soak ends, no process and no network device
//! of the lab remains.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `fault` | what can fail, and the requests to the lab |
//! | `program` | what runs, and when a run is right |
//! | `tally` | counts, and the table at the end |
//! | `run` | one program at a time, with faults |
//! | `schedule` | when and where faults happen; pure |
//! | `network_faults` | network faults, according to the schedule |
//! | `command` | `landbridge lab soak` |
//! | `rank_killer` | ranks that are killed at random times |
//! | `punish` | `landbridge lab punish`: programs under `--recover` with `rank_killer` |

pub mod command;
pub mod fault;
pub mod network_faults;
pub mod program;
pub mod punish;
pub mod rank_killer;
pub mod run;
pub mod schedule;
pub mod tally;
