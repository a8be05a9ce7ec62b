//! The parts of the relay daemon that tests and fuzzers use as well.
//!
//! | module | does |
//! |---|---|
//! | `settings` | the user's settings, from the environment |
//! | `config` | the configuration, read at the start |
//! | `log_query` | queries about message logs |
//! | `admin` | signals, commands and the relay's own log |

pub mod config;
pub mod settings;
