//! The parts of the relay daemon that tests and fuzzers use as well.

pub mod config;
pub mod settings;
