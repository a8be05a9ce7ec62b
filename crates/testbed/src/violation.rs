//! Events that must not happen, as values, so that a simulation can name its seed.

use landbridge_proto::wire::Malformed;

/// An event that must not happen, described for the developer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl From<Malformed> for Violation {
    fn from(bad: Malformed) -> Self {
        Self(bad.0.into())
    }
}

/// Fails the enclosing function with a [`Violation`] unless the condition holds.
#[macro_export]
macro_rules! require {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Violation(format!($($message)+)));
        }
    };
}
