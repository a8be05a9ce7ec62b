//! Log lines about refused connections: which connection, and why. For many refusals with the same
//! reason, there is no more than one line a second, so that a peer that connects a thousand times
//! does not fill the log.

/// How long no further line is written for a reason after a line about it, in milliseconds.
pub const QUIET_MILLIS: u64 = 1_000;
/// The most reasons that are distinguished within this time. There are fewer, except for reasons
/// that contain text of an unauthenticated peer.
const REASONS_MAX: usize = 32;

/// The refusals of the last second: see the module documentation.
#[derive(Default)]
pub struct Refusals {
    /// The last entry, if there are [`REASONS_MAX`], stands for all further reasons.
    reasons: Vec<Reason>,
}

struct Reason {
    why: String,
    quiet_until_millis: u64,
    suppressed: u64,
}

impl Refusals {
    /// Records a refusal. Returns false if a line with this reason was written a moment ago; the
    /// refusal is then counted.
    pub fn note(&mut self, why: &str, now_millis: u64) -> bool {
        let is_full = self.reasons.len() == REASONS_MAX;
        match self.reasons.iter_mut().find(|reason| reason.why == why) {
            Some(reason) => reason.suppressed += 1,
            None if is_full => {
                let last = &mut self.reasons[REASONS_MAX - 1];
                last.why = "various reasons".into();
                last.suppressed += 1;
            }
            None => {
                let quiet_until_millis = now_millis + QUIET_MILLIS;
                self.reasons.push(Reason { why: why.into(), quiet_until_millis, suppressed: 0 });
                return true;
            }
        }
        false
    }

    /// The number of refusals without a line, and their reason. The caller must call this function
    /// from time to time, until it returns `None`.
    pub fn poll(&mut self, now_millis: u64) -> Option<(u64, String)> {
        let is_over = |reason: &Reason| reason.quiet_until_millis <= now_millis;
        self.reasons.retain(|reason| !is_over(reason) || reason.suppressed > 0);
        let reason = self.reasons.iter_mut().find(|reason| is_over(reason))?;
        reason.quiet_until_millis = now_millis + QUIET_MILLIS;
        Some((std::mem::take(&mut reason.suppressed), reason.why.clone()))
    }

    /// Whether [`Self::poll`] may return something later.
    pub fn needs_clock(&self) -> bool {
        !self.reasons.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_named_and_the_others_are_counted_once_a_second() {
        let mut refusals = Refusals::default();
        let reported = (0..100).filter(|_| refusals.note("it smells", 0)).count();
        assert_eq!(reported, 1);
        assert!(refusals.note("it is late", 500), "another reason");
        assert_eq!(refusals.poll(999), None);
        assert_eq!(refusals.poll(1_000), Some((99, "it smells".into())));
        assert_eq!(refusals.poll(1_000), None);
        assert!(!refusals.note("it smells", 1_500), "a line has just said so");
        assert_eq!(refusals.poll(2_000), Some((1, "it smells".into())));
        assert_eq!(refusals.poll(3_000), None);
        assert!(!refusals.needs_clock() && refusals.note("it smells", 3_000));
    }

    #[test]
    fn reasons_without_number_have_one_line_together() {
        let mut refusals = Refusals::default();
        let reported = (0..1_000).filter(|n| refusals.note(&format!("version {n}"), 0)).count();
        assert_eq!(reported, REASONS_MAX);
        let suppressed = 1_000 - REASONS_MAX as u64;
        assert_eq!(refusals.poll(1_000), Some((suppressed, "various reasons".into())));
        assert_eq!(refusals.poll(1_000), None);
    }
}
