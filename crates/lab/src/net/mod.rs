//! Clusters of network namespaces.
//!
//! A lab file becomes a plan, which touches nothing. `run` starts a process that is the init of a
//! new PID namespace, and carries the plan out. Pure modules have no clock, socket or process; all
//! other modules make system calls. Everything that a lab makes lives in namespaces that only
//! processes of the lab hold, so the kernel removes all of it when the lab's init dies, for any
//! reason.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `units` | quantities as users write them; pure |
//! | `link` | one direction of one link; pure |
//! | `packet` | a packet in the format of a TUN device; pure |
//! | `plan` | names, addresses and links of a lab; pure |
//! | `file` | the lab file; pure |
//! | `emulator` | all links of a lab; pure |
//! | `topology` | the plan in the launcher's format; pure |
//! | `namespace` | namespaces: made, bound to files, entered |
//! | `tun` | a TUN device |
//! | `build` | makes the namespaces, devices and firewalls of a plan |
//! | `hosts` | interfaces and relays of a running lab |
//! | `pump` | carries packets between devices, as the emulator decides |
//! | `control` | shows and changes a running lab |
//! | `probe` | small measurements of the network |
//! | `signal` | signals that a program reads from a descriptor |
//! | `run` | the life of a lab |

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
