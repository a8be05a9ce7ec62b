//! Events that must not happen, as values, so that a simulation can name its seed.

/// An event that must not happen, described for the developer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// Fails the enclosing function with a [`Violation`] unless the condition holds.
#[macro_export]
macro_rules! require {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Violation(format!($($message)+)));
        }
    };
}
