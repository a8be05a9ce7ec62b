//! Endurance: unmodified MPI programs run over and over in a lab while its network fails by chance.
//!
//! In: a lab, a seed, a time, and which programs and kinds of faults. Out: a line per fault and per
//! program, a table, and whether every program ended right. `fault` knows what can fail and how that
//! is asked of a lab, `schedule` when and where it does (pure: a function of seed and plan), `network_faults`
//! makes it happen; `program` knows what is run and when it ended right, `run` does it, `tally`
//! counts, `command` is `landbridge lab soak`.
//!
//! `punish` is the same under `landbridge run --recover`, with `rank_killer` in place of `network_faults`.
//!
//! The soak runs in the lab that it troubles. What is left of it when it ends, however it ends, is
//! nothing, since nothing is left of a lab.

pub mod command;
pub mod fault;
pub mod network_faults;
pub mod program;
pub mod punish;
pub mod rank_killer;
pub mod run;
pub mod schedule;
pub mod tally;
