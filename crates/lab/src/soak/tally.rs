//! Counts of a soak, and the table that the soak prints at its end.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::program::Program;

/// A kind of fault: its name, and a short description.
pub type FaultLabel = (&'static str, &'static str);

/// Counts of a soak.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    programs: BTreeMap<Program, ProgramCounts>,
    faults: Vec<(FaultLabel, FaultCounts)>,
    failures: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ProgramCounts {
    right: u32,
    /// Runs that ended with a refusal, which a kill may cause.
    refused: u32,
    failed: u32,
    /// Longest run that ended right.
    longest: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct FaultCounts {
    count: u32,
    total: Duration,
}

impl Tally {
    /// A tally of these kinds of faults.
    pub fn new(kinds: impl IntoIterator<Item = FaultLabel>) -> Tally {
        let faults = kinds.into_iter().map(|kind| (kind, FaultCounts::default())).collect();
        Tally { faults, ..Tally::default() }
    }

    pub fn right(&mut self, program: Program, took: Duration) {
        let runs = self.programs.entry(program).or_default();
        runs.right += 1;
        runs.longest = runs.longest.max(took);
    }

    pub fn refused(&mut self, program: Program) {
        self.programs.entry(program).or_default().refused += 1;
    }

    pub fn failed(&mut self, program: Program, why: String) {
        self.programs.entry(program).or_default().failed += 1;
        self.failures.push(why);
    }

    /// Counts a fault. `kind` is the name of one of the kinds of [`Tally::new`].
    pub fn fault(&mut self, kind: &str, lasts: Duration) {
        if let Some((_, times)) = self.faults.iter_mut().find(|((name, _), _)| *name == kind) {
            times.count += 1;
            times.total += lasts;
        }
    }

    /// Whether a run failed, or more than one run of eight was refused (one refusal is allowed).
    pub fn has_failures(&self) -> bool {
        const RUNS_FOR_ONE_REFUSAL: u32 = 8;
        let sum = |count: fn(&ProgramCounts) -> u32| self.programs.values().map(count).sum::<u32>();
        let (runs, refused) = (sum(|it| it.right + it.refused + it.failed), sum(|it| it.refused));
        let is_rare = refused * RUNS_FOR_ONE_REFUSAL <= runs.max(RUNS_FOR_ONE_REFUSAL);
        !self.failures.is_empty() || !is_rare
    }

    /// Whether a run ended right, and none failed.
    pub fn is_all_right(&self) -> bool {
        !self.has_failures() && self.programs.values().any(|runs| runs.right > 0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:12} {:>6} {:>8} {:>7} {:>9}",
            "program", "right", "refused", "failed", "longest"
        )?;
        for (program, runs) in &self.programs {
            let (name, longest) = (program.name(), runs.longest.as_secs_f64());
            let ProgramCounts { right, refused, failed, .. } = runs;
            writeln!(f, "{name:12} {right:6} {refused:8} {failed:7} {longest:7.1} s")?;
        }
        writeln!(f, "\n{:12} {:>6} {:>9}  what", "fault", "times", "in all")?;
        for ((name, what), times) in &self.faults {
            let total = times.total.as_secs_f64();
            writeln!(f, "{name:12} {:6} {total:7.1} s  {what}", times.count)?;
        }
        for failure in &self.failures {
            writeln!(f, "\nfailed: {failure}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_run_is_not_all_right() {
        let mut tally = Tally::new([("loss5", "5 % of packets lost"), ("wan-cut", "a cut")]);
        assert!(!tally.is_all_right());
        tally.right(Program::Heat, Duration::from_secs(3));
        tally.fault("loss5", Duration::from_millis(2_500));
        assert!(tally.is_all_right());
        let text = tally.to_string();
        assert!(text.contains("heat              1        0       0     3.0 s"), "{text}");
        assert!(text.contains("loss5             1     2.5 s  5 % of packets lost"), "{text}");
        assert!(text.contains("wan-cut           0     0.0 s"), "{text}");
        tally.refused(Program::Files);
        assert!(tally.is_all_right(), "one is chance");
        tally.refused(Program::Files);
        assert!(!tally.is_all_right(), "two of three are not");
        tally.programs.clear();
        tally.failed(Program::Sums, "sums, run 4".to_owned());
        assert!(!tally.is_all_right());
        assert!(tally.to_string().contains("failed: sums, run 4"));
    }
}
