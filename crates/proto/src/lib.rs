//! The protocol of Landbridge: every frame and every state machine, and nothing else.
//!
//! This crate performs no I/O, reads no clock, starts no thread and draws no random number. The
//! world speaks in through `handle_*`, the state machines speak out through `poll_*`, the
//! application's commands are plain verbs, and time arrives as an argument. The same code
//! therefore runs in the provider, in every relay engine and in a simulator that breaks
//! everything under a seed.
//!
//! Modules, each using only those before it:
//!
//! | module | holds |
//! |---|---|
//! | [`limit`] | every bound, with the reason for its value |
//! | [`setting`] | every knob: its row, and how its text is read |
//! | [`id`] | who is who: jobs, processes, endpoints, clusters |
//! | [`nondeterminism`] | what a program reads of clocks and chance, and how it is told it again |
//! | [`statistics_page`] | shared memory in which a process publishes the statistics of its paths |
//! | [`range`] | sets of sequence numbers |
//! | [`digest`] | tells bytes from others |
//! | [`wire`] | bytes: frames, their heads, the hello |
//! | [`recent_determinants`] | the last determinants of a process whose relay is on another node |
//! | [`path`] | one way to a peer: delay, rate, congestion, pacing, size of datagrams |
//! | [`channel`] | what has been sent and not confirmed, what has arrived and not been taken in |
//! | [`slab`] | numbered places for operations in flight |
//! | [`credit`] | tokens for eager bytes |
//! | [`matching`] | matching receives with arrivals |
//! | [`route`] | where a frame goes next, and where it waits |
//! | [`relay`] | one relay: links, queues, back-pressure |
//! | [`endpoint`] | one process: channels, messages, remote memory |
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod channel;
pub mod credit;
pub mod digest;
pub mod endpoint;
pub mod id;
pub mod limit;
pub mod matching;
pub mod nondeterminism;
pub mod path;
pub mod range;
pub mod recent_determinants;
pub mod relay;
pub mod route;
pub mod setting;
pub mod slab;
pub mod statistics_page;
pub mod wire;
