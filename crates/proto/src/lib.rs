//! The protocol of Landbridge: every frame and every state machine, and nothing else.
//!
//! This crate performs no I/O, reads no clock, starts no thread and draws no random number. Events
//! enter through `handle_*`, the application's commands are plain verbs, effects leave through
//! `poll_*`, and time arrives as an argument. The same code therefore runs in the provider, in
//! every relay engine and in a simulator that injects faults under a random seed.
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | [`limit`] | every bound, with the reason for its value |
//! | [`setting`] | every setting: its row, and how its text is parsed |
//! | [`id`] | identities of jobs, processes, endpoints and clusters |
//! | [`nondeterminism`] | record of the clocks and random numbers that a program reads |
//! | [`statistics_page`] | shared memory in which a process publishes the statistics of its paths |
//! | [`range`] | sets of sequence numbers |
//! | [`digest`] | digests that distinguish byte sequences |
//! | [`wire`] | wire formats: frames, their kind headers, the hello |
//! | [`log`] | logs of the senders: segments, deliveries, releases |
//! | [`recent_determinants`] | the last determinants of a process whose relay is on another node |
//! | [`path`] | one path to a peer: delay, rate, congestion, pacing, size of datagrams |
//! | [`replay`] | what a recorded process repeats after a restart |
//! | [`channel`] | frames that were sent and not acknowledged, or received and not delivered |
//! | [`slab`] | numbered slots for operations in flight |
//! | [`credit`] | tokens for eager bytes |
//! | [`matching`] | matching receives with arrivals |
//! | [`route`] | next hop of a frame, and queues of frames |
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
pub mod log;
pub mod matching;
pub mod nondeterminism;
pub mod path;
pub mod range;
pub mod recent_determinants;
pub mod relay;
pub mod replay;
pub mod route;
pub mod setting;
pub mod slab;
pub mod statistics_page;
pub mod wire;
