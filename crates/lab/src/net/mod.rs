//! Clusters out of network namespaces.
//!
//! A lab file (`file`) becomes a plan (`plan`): names, addresses, links; nothing has been touched
//! yet. `run` starts a process that is the init of a new PID namespace, `build` makes the
//! namespaces, devices and firewalls of the plan inside it, and `pump` carries packets between the
//! devices as `emulator` decides, which asks one `link` per direction of each link. `topology`
//! tells the launcher what there is. `control` changes links while the lab runs, `hosts` what is on
//! its machines.
//!
//! Pure, without clock, socket or process: `units`, `file`, `plan`, `topology`, `link`, `packet`,
//! `emulator`. Everything else talks to the kernel. Whatever is made lives in namespaces that only
//! processes of the lab hold, so the kernel removes all of it when the lab's init dies, however it
//! dies.

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
