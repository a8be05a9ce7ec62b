//! Endurance tests: unmodified MPI programs run repeatedly in a lab while random faults disturb its
//! network.
//!
//! In: a lab, a seed, a time, and the programs and kinds of faults. Out: a line for each fault and
//! each program, a table, and whether every program ended right. `fault` defines what can fail and
//! the requests to the lab, `schedule` when and where faults happen (pure: a function of seed and
//! plan), and `network_faults` makes them happen. `program` defines what runs and when a run is
//! right, `run` runs the programs, `tally` counts, and `command` is `landbridge lab soak`.
//!
//! `punish` runs programs under `landbridge run --recover`, with `rank_killer` in place of
//! `network_faults`.
//!
//! The soak runs in the lab that it disturbs. However a soak ends, no process and no network device
//! of the lab remains.

pub mod command;
pub mod fault;
pub mod network_faults;
pub mod program;
pub mod punish;
pub mod rank_killer;
pub mod run;
pub mod schedule;
pub mod tally;
