//! How processes end.

use serde::{Deserialize, Serialize};

/// How a process ended: its exit code, or the signal that killed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    Exited(i32),
    Killed(i32),
}
