//! What ends a job, with which exit code, and what the user reads about it. Pure: reports of the
//! agents enter, a [`Verdict`] leaves.
//!
//! A job ends well when every rank has ended. It ends early for the first [`Cause`]; but reports
//! of one disaster come in any order (a crash, and the aborts of those who noticed it), so a
//! stronger cause that arrives within [`SETTLE`] replaces a weaker one.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::Ending;
use crate::pmi::server::Stage;
use crate::sys::signal_name;

/// How long the launcher looks for a better explanation before it acts on one.
pub const SETTLE: Duration = Duration::from_millis(100);

/// Exit code of a job that ran out of time, as of timeout(1).
const TIMEOUT_CODE: i32 = 124;
/// Exit code of a job that could not go on for a reason of ours.
pub const FAILED_CODE: i32 = 1;
/// A shell reports a death by signal N as this plus N.
const SIGNAL_BASE: i32 = 128;

/// Why a job ends early. Later ones explain earlier ones: a rank that was killed is why another
/// aborted, and both are why a third one left with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Rank ended well without having finalized while others wait for it.
    Stuck {
        rank: u32,
    },
    /// Rank ended with a code other than 0, not finalized.
    Exited {
        rank: u32,
        code: i32,
    },
    Aborted {
        rank: u32,
        code: i32,
        message: String,
    },
    Killed {
        rank: u32,
        signal: i32,
    },
    /// An agent could not do its work or is gone.
    Failed {
        text: String,
    },
    Timeout {
        seconds: u64,
    },
    /// The launcher itself was told to end.
    Interrupted {
        signal: i32,
    },
}

impl Cause {
    fn weight(&self) -> u32 {
        match self {
            Cause::Stuck { .. } => 0,
            Cause::Exited { .. } => 1,
            Cause::Aborted { .. } => 2,
            Cause::Killed { .. } => 3,
            Cause::Failed { .. } => 4,
            Cause::Timeout { .. } => 5,
            Cause::Interrupted { .. } => 6,
        }
    }

    /// The exit code of the job.
    pub fn code(&self) -> i32 {
        match self {
            Cause::Stuck { .. } | Cause::Failed { .. } => FAILED_CODE,
            Cause::Exited { code, .. } => *code,
            // MPI_Abort(comm, 256) must not look like success.
            Cause::Aborted { code, .. } => match code & 0xff {
                0 if *code != 0 => FAILED_CODE,
                low => low,
            },
            Cause::Killed { signal, .. } | Cause::Interrupted { signal } => SIGNAL_BASE + signal,
            Cause::Timeout { .. } => TIMEOUT_CODE,
        }
    }

    /// What the user reads. `place` tells where a rank runs: `rank 3 on node n2 (cluster nancy)`.
    pub fn text(&self, place: impl Fn(u32) -> String) -> String {
        match self {
            Cause::Stuck { rank } => format!(
                "{} has ended without MPI_Finalize while others wait for it; ending the job",
                place(*rank)
            ),
            Cause::Exited { rank, code } => {
                format!("{} ended with exit code {code}; ending the job", place(*rank))
            }
            Cause::Aborted { rank, code, message } => {
                let place = place(*rank);
                let colon = if message.is_empty() { "" } else { ": " };
                format!("{place} aborted the job with code {code}{colon}{message}")
            }
            Cause::Killed { rank, signal } => format!(
                "{} was killed by signal {signal} ({}); ending the job",
                place(*rank),
                signal_name(*signal)
            ),
            Cause::Failed { text } => text.clone(),
            Cause::Timeout { seconds } => {
                format!("the job has run for {seconds} s, its timeout; ending it")
            }
            Cause::Interrupted { signal } => {
                format!("got {}; ending the job", signal_name(*signal))
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    GoOn,
    /// Every rank has ended; the job's exit code.
    Finished {
        code: i32,
    },
    /// End what still runs.
    End(Cause),
}

pub struct Watch {
    /// Processes of the job, spawned ones too.
    size: u32,
    endings: BTreeMap<u32, Ending>,
    cause: Option<Cause>,
    /// First code other than 0 of a rank that had finalized.
    late_code: Option<i32>,
}

impl Watch {
    pub fn new(size: u32) -> Watch {
        Watch { size, endings: BTreeMap::new(), cause: None, late_code: None }
    }

    /// More processes are being started.
    pub fn handle_spawn(&mut self, count: u32) {
        self.size += count;
    }

    /// These do not count after all: not all of their group could be started.
    pub fn handle_revoke(&mut self, ranks: impl Iterator<Item = u32>) {
        for rank in ranks {
            self.endings.remove(&rank);
            self.size -= 1;
        }
    }

    pub fn handle_exit(&mut self, rank: u32, ending: Ending, stage: Stage) {
        self.endings.insert(rank, ending);
        match ending {
            Ending::Killed(signal) => self.handle_cause(Cause::Killed { rank, signal }),
            Ending::Exited(0) => {}
            // It has left the job properly: its code counts, but stops no one.
            Ending::Exited(code) if stage == Stage::Finalized => {
                self.late_code.get_or_insert(code);
            }
            Ending::Exited(code) => self.handle_cause(Cause::Exited { rank, code }),
        }
    }

    pub fn handle_cause(&mut self, cause: Cause) {
        match &self.cause {
            Some(known) if known.weight() >= cause.weight() => {}
            _ => self.cause = Some(cause),
        }
    }

    pub fn all_ended(&self) -> bool {
        self.endings.len() == self.size as usize
    }

    pub fn verdict(&self) -> Verdict {
        match &self.cause {
            Some(cause) => Verdict::End(cause.clone()),
            None if self.all_ended() => Verdict::Finished { code: self.late_code.unwrap_or(0) },
            None => Verdict::GoOn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(reports: &[(u32, Ending, Stage)], causes: &[Cause]) -> Verdict {
        let mut watch = Watch::new(2);
        for &(rank, ending, stage) in reports {
            watch.handle_exit(rank, ending, stage);
        }
        causes.iter().for_each(|cause| watch.handle_cause(cause.clone()));
        watch.verdict()
    }

    #[test]
    fn the_whole_table_of_two_ranks() {
        use Ending::{Exited, Killed};
        use Stage::{Finalized, Joined, Silent};
        let abort = || Cause::Aborted { rank: 1, code: 9, message: String::new() };
        let killed = Cause::Killed { rank: 0, signal: 11 };
        let one = [(0, Exited(0), Finalized)];
        let both = [(0, Exited(0), Silent), (1, Exited(0), Silent)];
        let late = [(0, Exited(0), Finalized), (1, Exited(3), Finalized)];
        let error = [(1, Exited(3), Joined)];
        let silent_error = [(1, Exited(3), Silent)];
        let crash = [(0, Killed(11), Joined)];
        let late_crash = [(0, Killed(11), Finalized)];
        let stuck = Cause::Stuck { rank: 0 };
        let exited = Cause::Exited { rank: 1, code: 3 };
        assert_eq!(verdict(&[], &[]), Verdict::GoOn);
        assert_eq!(verdict(&one, &[]), Verdict::GoOn);
        assert_eq!(verdict(&both, &[]), Verdict::Finished { code: 0 });
        assert_eq!(verdict(&late, &[]), Verdict::Finished { code: 3 });
        assert_eq!(verdict(&error, &[]), Verdict::End(exited.clone()));
        assert_eq!(verdict(&silent_error, &[]), Verdict::End(exited.clone()));
        assert_eq!(verdict(&crash, &[]), Verdict::End(killed.clone()));
        assert_eq!(verdict(&late_crash, &[]), Verdict::End(killed.clone()));
        assert_eq!(verdict(&crash, &[abort()]), Verdict::End(killed));
        assert_eq!(verdict(&error, &[abort()]), Verdict::End(abort()));
        assert_eq!(verdict(&error, std::slice::from_ref(&stuck)), Verdict::End(exited));
        assert_eq!(verdict(&one, std::slice::from_ref(&stuck)), Verdict::End(stuck));
    }

    #[test]
    fn spawned_ranks_are_waited_for_unless_revoked() {
        let mut watch = Watch::new(1);
        watch.handle_spawn(2);
        watch.handle_exit(0, Ending::Exited(0), Stage::Finalized);
        assert_eq!(watch.verdict(), Verdict::GoOn);
        watch.handle_exit(70, Ending::Exited(0), Stage::Silent);
        assert_eq!(watch.verdict(), Verdict::GoOn);
        watch.handle_revoke(70..72);
        assert_eq!(watch.verdict(), Verdict::Finished { code: 0 });
    }

    #[test]
    fn codes_are_those_of_a_shell() {
        let code = |cause: Cause| cause.code();
        let abort = |code| Cause::Aborted { rank: 0, code, message: String::new() };
        assert_eq!(code(Cause::Killed { rank: 0, signal: 9 }), 137);
        assert_eq!(code(Cause::Interrupted { signal: 2 }), 130);
        assert_eq!(code(Cause::Timeout { seconds: 1 }), 124);
        assert_eq!(code(Cause::Exited { rank: 0, code: 42 }), 42);
        assert_eq!(code(abort(7)), 7);
        assert_eq!(code(abort(0)), 0);
        assert_eq!(code(abort(256)), 1);
    }

    #[test]
    fn the_message_names_rank_node_cluster_and_signal() {
        let cause = Cause::Killed { rank: 3, signal: 11 };
        assert_eq!(
            cause.text(|rank| format!("rank {rank} on node n2 (cluster nancy)")),
            "rank 3 on node n2 (cluster nancy) was killed by signal 11 (SIGSEGV); ending the job"
        );
    }
}
