//! What can be set from outside: one row per knob, all read from the environment as
//! `LANDBRIDGE_<NAME>`. The launcher sets those that say who this process is.

use std::env;

pub struct Knob {
    pub name: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    pub unit: &'static str,
    pub sentence: &'static str,
}

pub const LOG: Knob = Knob {
    name: "LOG",
    default: "off",
    unit: "off, warn, info, debug or trace",
    sentence: "Writes the provider's messages to standard error, beside libfabric's own log.",
};
pub const PATHS: Knob = Knob {
    name: "PATHS",
    default: "shm,tcp,relay",
    unit: "comma list",
    sentence: "The ways to a peer that may be used.",
};
pub const JOB: Knob = Knob {
    name: "JOB",
    default: "derived from the user",
    unit: "32 hex digits",
    sentence: "The job this process belongs to.",
};
pub const KEY: Knob = Knob {
    name: "KEY",
    default: "from a key file of the user",
    unit: "64 hex digits",
    sentence: "The secret by which the processes of a job know each other.",
};
pub const INDEX: Knob = Knob {
    name: "INDEX",
    default: "none",
    unit: "number",
    sentence: "The process's index in the job (its MPI rank).",
};
pub const SIZE: Knob = Knob {
    name: "SIZE",
    default: "unknown",
    unit: "processes",
    sentence: "How many processes the job has.",
};
pub const CLUSTER: Knob = Knob {
    name: "CLUSTER",
    default: "0",
    unit: "number",
    sentence: "The cluster this process runs in.",
};
pub const NODE: Knob = Knob {
    name: "NODE",
    default: "the host's name",
    unit: "text",
    sentence: "The node this process runs on; equal names may share memory.",
};
pub const NODE_SIZE: Knob = Knob {
    name: "NODE_SIZE",
    default: "as other launchers say, or all processes of the job",
    unit: "processes",
    sentence: "How many processes share this node's processors.",
};
pub const ADDRESS: Knob = Knob {
    name: "ADDRESS",
    default: "picked from the interfaces",
    unit: "IP address",
    sentence: "Where this process accepts direct connections from its own cluster.",
};
pub const RELAY: Knob = Knob {
    name: "RELAY",
    default: "none",
    unit: "comma list of unix:@NAME and tcp:HOST:PORT",
    sentence: "Ways to this cluster's relay, best first.",
};

/// Every knob, for listings.
pub const KNOBS: &[Knob] =
    &[LOG, PATHS, JOB, KEY, INDEX, SIZE, CLUSTER, NODE, NODE_SIZE, ADDRESS, RELAY];

impl Knob {
    pub fn variable(&self) -> String {
        format!("LANDBRIDGE_{}", self.name)
    }

    /// The value, if it is set and not empty. Bytes that are not UTF-8 count as not set.
    pub fn text(&self) -> Option<String> {
        env::var(self.variable()).ok().filter(|value| !value.is_empty())
    }

    /// The value as a decimal number. `Err` says what to correct.
    pub fn number(&self) -> Result<Option<u64>, String> {
        let Some(text) = self.text() else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| {
            format!("{}={text}: give a decimal number ({})", self.variable(), self.unit)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_knob_has_a_full_row_and_a_name_of_its_own() {
        for (i, knob) in KNOBS.iter().enumerate() {
            assert!(!knob.default.is_empty() && !knob.unit.is_empty(), "{}", knob.name);
            assert!(knob.sentence.ends_with('.'), "{}", knob.name);
            assert!(KNOBS[i + 1..].iter().all(|other| other.name != knob.name), "{}", knob.name);
        }
    }

    #[test]
    fn an_unset_number_is_none() {
        let knob = Knob { name: "TEST_UNSET", default: "0", unit: "n", sentence: "None." };
        assert_eq!(knob.number(), Ok(None));
    }
}
