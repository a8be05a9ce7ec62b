//! Clusters of network namespaces.
//!
//! A lab file (`file`) becomes a plan (`plan`): names, addresses, links; the plan touches nothing.
//! `run` starts a process that is the init of a new PID namespace; `build` makes the namespaces,
//! devices and firewalls of the plan inside this PID namespace; `pump` carries packets between the
//! devices as `emulator` decides, which uses one `link` per direction of each link. `topology`
//! describes the lab to the launcher. `control` changes links while the lab runs, and `hosts`
//! changes interfaces and relays.
//!
//! Pure modules, without clock, socket or process: `units`, `file`, `plan`, `topology`, `link`,
//! `packet`, `emulator`. All other modules make system calls. Everything that a lab makes lives in
//! namespaces that only processes of the lab hold, so the kernel removes all of it when the lab's
//! init dies, for any reason.

pub mod build;
pub mod control;
pub mod emulator;
pub mod file;
pub mod hosts;
pub mod link;
pub mod namespace;
pub mod packet;
pub mod plan;
pub mod probe;
pub mod pump;
pub mod run;
pub mod signal;
pub mod topology;
pub mod tun;
pub mod units;
