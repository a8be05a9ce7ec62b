//! Variables with which an MPI library sends messages by another transport than Landbridge; module
//! files, `~/.bashrc` or users set them. In: a program's environment. Out: the environment with
//! which Landbridge is chosen, and what was replaced in it.
//!
//! A variable of this table that is set in the environment is replaced, and the user is notified. A
//! variable that `-x` sets is the user's explicit wish: the launcher refuses such a variable before
//! the job starts, unless the variable concerns only the ranks of one node.

use std::ffi::{OsStr, OsString};

use super::detect::Family;
use super::{Environment, PROVIDER};

/// A variable that chooses a transport.
pub struct TransportVariable {
    pub name: &'static str,
    /// The value with which Landbridge is the transport; `None`: the variable must not be set.
    needed: Option<&'static str>,
    /// The MPI library that reads the variable; `None`: every library reads it, through libfabric.
    family: Option<Family>,
    /// A value that concerns only the ranks of one node: with this value, messages between several
    /// clusters on one machine do not pass their relays.
    local: Option<&'static str>,
}

const CHOICES: [TransportVariable; 5] = [
    TransportVariable { name: "FI_PROVIDER", needed: Some(PROVIDER), family: None, local: None },
    TransportVariable {
        name: "MPIR_CVAR_CH4_NETMOD",
        needed: Some("ofi"),
        family: Some(Family::Mpich),
        local: None,
    },
    TransportVariable {
        name: "MPIR_CVAR_OFI_USE_PROVIDER",
        needed: None,
        family: Some(Family::Mpich),
        local: None,
    },
    TransportVariable {
        name: "I_MPI_FABRICS",
        needed: Some("ofi"),
        family: Some(Family::Intel),
        local: Some("shm:ofi"),
    },
    TransportVariable {
        name: "I_MPI_OFI_PROVIDER",
        needed: Some(PROVIDER),
        family: Some(Family::Intel),
        local: None,
    },
];

impl TransportVariable {
    /// Whether this value chooses another transport.
    fn is_other(&self, value: &OsStr) -> bool {
        let is_needed = |needed| value.eq_ignore_ascii_case(needed);
        !value.is_empty() && !self.needed.is_some_and(is_needed)
    }

    /// The assignment that a rank gets instead, as text.
    fn replacement(&self) -> String {
        match self.needed {
            Some(value) => format!("{}={value}", self.name),
            None => format!("no {}", self.name),
        }
    }
}

/// The variables that were replaced in an environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replaced {
    /// Each assignment `NAME=value` as it was, and its replacement.
    rows: Vec<(String, String)>,
}

impl Replaced {
    /// The text for the user; `None`: nothing was replaced.
    pub fn text(&self) -> Option<String> {
        if self.rows.is_empty() {
            return None;
        }
        let list = |part: fn(&(String, String)) -> &str| {
            self.rows.iter().map(part).collect::<Vec<_>>().join(", ")
        };
        Some(format!(
            "the environment chooses another transport than Landbridge ({}): ranks get {} instead",
            list(|row| &row.0),
            list(|row| &row.1)
        ))
    }
}

/// Replaces the variables of an environment that choose another transport, for a program of this
/// library or, without one, of any library. Variables named in `wished` stay unchanged.
pub fn choose(
    environment: &mut Environment,
    family: Option<Family>,
    wished: &[(String, String)],
) -> Replaced {
    let concerns = |choice: &&TransportVariable| match (choice.family, family) {
        (Some(of), Some(found)) => of == found,
        _ => true,
    };
    let is_wished =
        |choice: &&TransportVariable| wished.iter().any(|(name, _)| name == choice.name);
    let mut rows = Vec::new();
    for choice in CHOICES.iter().filter(concerns).filter(|choice| !is_wished(choice)) {
        let Some(value) = environment.get(OsStr::new(choice.name)) else { continue };
        if choice.is_other(value) {
            rows.push((format!("{}={}", choice.name, value.display()), choice.replacement()));
            environment.remove(OsStr::new(choice.name));
            let needed = choice.needed.map(|needed| (choice.name.into(), needed.into()));
            environment.extend(needed);
        }
    }
    Replaced { rows }
}

/// Why a variable that `-x` sets is refused, if it is. `clusters`: number of clusters of the job.
pub fn refusal(name: &str, value: &str, clusters: usize) -> Option<String> {
    let choice = CHOICES.iter().find(|choice| choice.name == name)?;
    let is_local = choice.local == Some(value);
    if !choice.is_other(OsStr::new(value)) || (is_local && clusters == 1) {
        return None;
    }
    let past = match is_local {
        true => "sends messages between clusters on one machine past their relays",
        false => "sends messages by another transport than Landbridge",
    };
    Some(format!("-x {name}={value} {past}: leave it out (ranks get {})", choice.replacement()))
}

/// Whether a variable that the user has set with `-x` chooses another transport for some messages.
pub fn is_wished(wished: &[(String, String)]) -> bool {
    let is_other = |(name, value): &(String, String)| {
        let choice = CHOICES.iter().find(|choice| choice.name == name);
        choice.is_some_and(|choice| choice.is_other(OsStr::new(value)))
    };
    wished.iter().any(is_other)
}

/// Variables of this process that choose another transport: each assignment, and what ranks get
/// instead.
pub fn found_here(variable: impl Fn(&str) -> Option<OsString>) -> Vec<(String, String)> {
    let found = CHOICES.iter().filter_map(|choice| {
        let value = variable(choice.name).filter(|value| choice.is_other(value))?;
        Some((format!("{}={}", choice.name, value.display()), choice.replacement()))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    #[test]
    fn another_transport_is_replaced_and_reported() {
        let set = [
            ("FI_PROVIDER", "verbs;ofi_rxm"),
            ("I_MPI_FABRICS", "shm:tcp"),
            ("MPIR_CVAR_CH4_NETMOD", "ucx"),
            ("MPIR_CVAR_OFI_USE_PROVIDER", "tcp"),
            ("MPIR_CVAR_NOLOCAL", "0"),
        ];
        let mut mpich = environment(&set);
        let replaced = choose(&mut mpich, Some(Family::Mpich), &[]);
        let expected = [
            ("FI_PROVIDER", "landbridge"),
            ("I_MPI_FABRICS", "shm:tcp"),
            ("MPIR_CVAR_CH4_NETMOD", "ofi"),
            ("MPIR_CVAR_NOLOCAL", "0"),
        ];
        assert_eq!(mpich, environment(&expected));
        let text = replaced.text().unwrap();
        for piece in [
            "(FI_PROVIDER=verbs;ofi_rxm, MPIR_CVAR_CH4_NETMOD=ucx, MPIR_CVAR_OFI_USE_PROVIDER=tcp)",
            "ranks get FI_PROVIDER=landbridge, MPIR_CVAR_CH4_NETMOD=ofi, no MPIR_CVAR_OFI_USE",
        ] {
            assert!(text.contains(piece), "{piece} in {text}");
        }
        let mut intel = environment(&[&set[..], &[("I_MPI_OFI_PROVIDER", "tcp")]].concat());
        let replaced = choose(&mut intel, Some(Family::Intel), &[]);
        let expected = [
            ("FI_PROVIDER", "landbridge"),
            ("I_MPI_FABRICS", "ofi"),
            ("I_MPI_OFI_PROVIDER", "landbridge"),
            ("MPIR_CVAR_CH4_NETMOD", "ucx"),
            ("MPIR_CVAR_OFI_USE_PROVIDER", "tcp"),
            ("MPIR_CVAR_NOLOCAL", "0"),
        ];
        assert_eq!(intel, environment(&expected));
        let text = replaced.text().unwrap();
        for piece in [
            "(FI_PROVIDER=verbs;ofi_rxm, I_MPI_FABRICS=shm:tcp, I_MPI_OFI_PROVIDER=tcp)",
            "get FI_PROVIDER=landbridge, I_MPI_FABRICS=ofi, I_MPI_OFI_PROVIDER=landbridge instead",
        ] {
            assert!(text.contains(piece), "{piece} in {text}");
        }
        let mut unknown = environment(&set);
        assert_eq!(choose(&mut unknown, None, &[]).rows.len(), 4);
        assert_eq!(choose(&mut unknown, None, &[]).text(), None, "all of it is as it should be");
    }

    #[test]
    fn a_wish_stays_and_what_chooses_landbridge_is_no_news() {
        let wished = [("I_MPI_FABRICS".to_string(), "shm:ofi".to_string())];
        let set = [("I_MPI_FABRICS", "shm:ofi"), ("FI_PROVIDER", "Landbridge")];
        let mut intel = environment(&set);
        assert_eq!(choose(&mut intel, Some(Family::Intel), &wished), Replaced::default());
        assert!(is_wished(&wished) && !is_wished(&[]));
        assert_eq!(intel, environment(&set));
    }

    #[test]
    fn a_wish_for_another_transport_is_refused() {
        let refused = |name, value, clusters| refusal(name, value, clusters).unwrap_or_default();
        assert!(refused("FI_PROVIDER", "tcp", 1).contains("ranks get FI_PROVIDER=landbridge"));
        assert!(refused("I_MPI_FABRICS", "shm", 1).contains("another transport"));
        assert!(refused("I_MPI_FABRICS", "shm:ofi", 2).contains("past their relays"));
        assert_eq!(refused("I_MPI_FABRICS", "shm:ofi", 1), "");
        assert_eq!(refused("FI_PROVIDER", "landbridge", 2), "");
        assert_eq!(refused("MPIR_CVAR_NOLOCAL", "0", 2), "");
    }

    #[test]
    fn what_is_set_here_is_found() {
        let variable = |name: &str| (name == "FI_PROVIDER").then(|| OsString::from("tcp"));
        let row = ("FI_PROVIDER=tcp".to_string(), "FI_PROVIDER=landbridge".to_string());
        assert_eq!(found_here(variable), [row]);
        assert_eq!(found_here(|_| None), []);
    }
}
