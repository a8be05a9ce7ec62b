//! The parts of the relay daemon that tests and fuzzers reach, too.

pub mod config;
pub mod settings;
