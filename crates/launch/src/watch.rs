//! What ends a job, with which exit code, and what the user reads about it. Pure: reports of the
//! agents enter, a [`Verdict`] leaves.
//!
//! A job ends well when every rank has ended. It ends early for a [`Cause`]; but the end of one rank
//! brings about the end of others, who lose a peer, and reports of different nodes come in any
//! order. So whatever is reported within [`SETTLE`] is gathered, and [`culprit`] tells the cause
//! from its consequences. A rank that ends with an error after MPI_Finalize gives the others
//! [`EXIT_GRACE`] to end too: it has left the job properly, but they may wait for it for ever. So
//! does one that ends with exit code 0 without MPI_Finalize, from the moment when another rank says
//! that it has lost a peer; where ranks that are killed come back, from its own end, for there nobody
//! notices that it is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::control::Ending;
use crate::pmi::server::Stage;
use crate::sys::signal_name;

/// How long the launcher looks for a better explanation before it acts on one: longer than the
/// report of a culprit takes over a wide area network, or an interpreter between MPI_Finalize and
/// its exit.
pub const SETTLE: Duration = Duration::from_millis(250);
/// How long others may go on when a rank has ended with an error after MPI_Finalize: enough to
/// write down results, not so long that a job which hangs keeps its user waiting.
pub const EXIT_GRACE: Duration = Duration::from_secs(10);
/// The user is told of that grace after this long: most jobs have ended by then.
const EXIT_GRACE_NOTICE: Duration = Duration::from_secs(1);

/// Exit code of a job that ran out of time, as of timeout(1).
const TIMEOUT_CODE: i32 = 124;
/// Exit code of a job that could not go on for a reason of ours, or of an MPI library's.
pub const FAILED_CODE: i32 = 1;
/// A shell reports a death by signal N as this plus N.
const SIGNAL_BASE: i32 = 128;

/// Why a job ends early.
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
    /// Rank ended with a code other than 0 after MPI_Finalize, and others did not end with it.
    FailedAfterFinalize {
        rank: u32,
        code: i32,
    },
    /// Rank ended with exit code 0 without having finalized, will not come back, and others did not
    /// end with it.
    QuitWithoutFinalize {
        rank: u32,
        /// Nobody notices, for ranks that are killed come back.
        recovers: bool,
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
    /// Nobody reads our standard output or error any more.
    Unread,
    /// The launcher itself was told to end.
    Interrupted {
        signal: i32,
    },
}

/// How much speaks for a report being the cause of others; a greater one explains a lesser one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CausePriority {
    /// A rank left without a word: seen only by others waiting for it.
    Missed,
    /// An abort with an error of the MPI library: what it does when it has lost a peer.
    LibraryError,
    /// An end with exit code 0 without MPI_Finalize: the cause of every loss of a peer that nothing
    /// stronger explains.
    QuitWithoutFinalize,
    /// A crash, of the program, or of the library when it has lost a peer.
    Crash,
    /// An error after MPI_Finalize: who has lost a peer does not get through that.
    FailedAfterFinalize,
    /// The program's own doing: an exit code, MPI_Abort with a code of its choice, abort(3).
    ProgramFault,
    /// Nothing that happens to other ranks brings this about.
    External,
    /// No rank's doing, and it ends the job whatever ranks do.
    Job,
    Timeout,
    Unread,
    Interrupted,
}

impl Cause {
    fn priority(&self) -> CausePriority {
        match self {
            Cause::Stuck { .. } => CausePriority::Missed,
            Cause::Exited { .. } => CausePriority::ProgramFault,
            Cause::FailedAfterFinalize { .. } => CausePriority::FailedAfterFinalize,
            Cause::QuitWithoutFinalize { .. } => CausePriority::QuitWithoutFinalize,
            Cause::Aborted { code, .. } if is_library_code(*code) => CausePriority::LibraryError,
            Cause::Aborted { .. } => CausePriority::ProgramFault,
            Cause::Killed { signal, .. } => match *signal {
                libc::SIGSEGV | libc::SIGBUS | libc::SIGPIPE => CausePriority::Crash,
                libc::SIGABRT | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS => {
                    CausePriority::ProgramFault
                }
                _ => CausePriority::External,
            },
            Cause::Failed { .. } => CausePriority::Job,
            Cause::Timeout { .. } => CausePriority::Timeout,
            Cause::Unread => CausePriority::Unread,
            Cause::Interrupted { .. } => CausePriority::Interrupted,
        }
    }

    /// The rank it happened to.
    fn rank(&self) -> Option<u32> {
        match self {
            Cause::Stuck { rank }
            | Cause::Exited { rank, .. }
            | Cause::FailedAfterFinalize { rank, .. }
            | Cause::QuitWithoutFinalize { rank, .. }
            | Cause::Aborted { rank, .. }
            | Cause::Killed { rank, .. } => Some(*rank),
            Cause::Failed { .. }
            | Cause::Timeout { .. }
            | Cause::Unread
            | Cause::Interrupted { .. } => None,
        }
    }

    /// Whether the others have [`EXIT_GRACE`] to end too.
    fn grants_grace(&self) -> bool {
        matches!(self, Cause::FailedAfterFinalize { .. } | Cause::QuitWithoutFinalize { .. })
    }

    /// The exit code of the job.
    pub fn code(&self) -> i32 {
        match self {
            Cause::Stuck { .. } | Cause::QuitWithoutFinalize { .. } | Cause::Failed { .. } => {
                FAILED_CODE
            }
            Cause::Exited { code, .. } | Cause::FailedAfterFinalize { code, .. } => *code,
            Cause::Aborted { code, .. } => abort_code(*code),
            Cause::Killed { signal, .. } | Cause::Interrupted { signal } => SIGNAL_BASE + signal,
            Cause::Timeout { .. } => TIMEOUT_CODE,
            Cause::Unread => SIGNAL_BASE + libc::SIGPIPE,
        }
    }

    /// What the user reads; `None` where nobody does. `place` tells where a rank runs: `rank 3 on
    /// node n2 (cluster nancy)`.
    pub fn text(&self, place: impl Fn(u32) -> String) -> Option<String> {
        let text = match self {
            Cause::Stuck { rank } => format!(
                "{} has ended without MPI_Finalize while others wait for it; ending the job",
                place(*rank)
            ),
            Cause::QuitWithoutFinalize { rank, recovers: true } => format!(
                "{} has ended with exit code 0 without MPI_Finalize, and the others go on; ending the job",
                place(*rank)
            ),
            Cause::QuitWithoutFinalize { rank, recovers: false } => format!(
                "{} has ended with exit code 0 without MPI_Finalize, and others have lost it; ending the job",
                place(*rank)
            ),
            Cause::Exited { rank, code } | Cause::FailedAfterFinalize { rank, code } => {
                format!("{} ended with exit code {code}; ending the job", place(*rank))
            }
            Cause::Aborted { rank, code, message } => abort_text(&place(*rank), *code, message),
            Cause::Killed { rank, signal } => format!(
                "{} was killed by signal {signal} ({}); ending the job",
                place(*rank),
                signal_name(*signal)
            ),
            Cause::Failed { text } => text.clone(),
            Cause::Timeout { seconds } => {
                format!("the job has run for {seconds} s, its timeout; ending it")
            }
            Cause::Unread => return None,
            Cause::Interrupted { signal } => {
                format!("got {}; ending the job", signal_name(*signal))
            }
        };
        Some(text)
    }
}

/// Codes with which a library aborts after an error of its own are large numbers that mean nothing
/// outside of it; what programs pass to MPI_Abort fits into an exit code, or is a small negative.
pub fn is_library_code(code: i32) -> bool {
    !(-255..=255).contains(&code)
}

/// The low byte of such a number could be anything, the code of a signal too: it becomes 1.
fn abort_code(code: i32) -> i32 {
    if is_library_code(code) { FAILED_CODE } else { code & 0xff }
}

fn abort_text(place: &str, code: i32, message: &str) -> String {
    let exit_code = match abort_code(code) {
        same if same == code => String::new(),
        other => format!(" (exit code {other})"),
    };
    let colon = if message.is_empty() { "" } else { ": " };
    format!("{place} aborted the job with code {code}{exit_code}{colon}{message}")
}

/// Something that ends a job, and the node it happened on; empty for what happened to the job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Report {
    node: String,
    cause: Cause,
}

/// Which of several reports is the cause of the others. They are in the order in which they came:
/// for one node this is the order in which ranks ended there; for different nodes it says little.
///
/// - What no loss of a rank can bring about is the cause, whenever it is reported.
/// - A rank that has said that it lost another one (`lost_peer_ranks`) is not, if any other can be.
/// - On its node, a culprit ends before those it takes along: of what else a node reports, only
///   the first can be the cause. But a rank has left the others at MPI_Finalize already, and exits
///   some time after it: that counts wherever it stands. So does an end without MPI_Finalize.
/// - Between what is left, the strongest; the first that came among equals.
///
/// The second rule is there because the third does not always hold: the kernel closes the
/// connections of a process before it calls it ended, and on a busy node others may notice the
/// one, and end, before the other.
fn culprit<'a>(reports: &'a [Report], lost_peer_ranks: &BTreeSet<u32>) -> Option<&'a Cause> {
    let lost_another =
        |cause: &Cause| cause.rank().is_some_and(|rank| lost_peer_ranks.contains(&rank));
    let others = reports.iter().filter(|report| {
        report.cause.priority() >= CausePriority::External || !lost_another(&report.cause)
    });
    strongest(others).or_else(|| strongest(reports.iter()))
}

/// The strongest of what can be a cause by its place in the order.
fn strongest<'a>(reports: impl Iterator<Item = &'a Report>) -> Option<&'a Cause> {
    let mut nodes = BTreeSet::new();
    let mut found: Option<&Cause> = None;
    for Report { node, cause } in reports {
        let priority = cause.priority();
        let has_left = cause.grants_grace();
        let is_first = !has_left && nodes.insert(node);
        let can_be = is_first || has_left || priority >= CausePriority::External;
        if can_be && found.is_none_or(|found| found.priority() < priority) {
            found = Some(cause);
        }
    }
    found
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
    reports: Vec<Report>,
    /// Ranks that have said that they lost another one.
    lost_peer_ranks: BTreeSet<u32>,
    /// The first rank that has ended with exit code 0 without MPI_Finalize.
    quit: Option<u32>,
    /// Ranks that are killed come back.
    recovers: bool,
    grace: Option<ExitGrace>,
}

/// The first rank that has ended with an error after MPI_Finalize, or without it and will be missed.
#[derive(Debug, Clone, Copy)]
struct ExitGrace {
    rank: u32,
    code: i32,
    /// After MPI_Finalize, or instead of it.
    is_finalized: bool,
    at: Instant,
    is_notified: bool,
}

impl Watch {
    pub fn new(size: u32, recovers: bool) -> Watch {
        Watch {
            size,
            endings: BTreeMap::new(),
            reports: Vec::new(),
            lost_peer_ranks: BTreeSet::new(),
            quit: None,
            recovers,
            grace: None,
        }
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

    /// `node`: any name for where the rank ran, the same for all ranks of the node.
    pub fn handle_exit(
        &mut self,
        node: &str,
        rank: u32,
        ending: Ending,
        stage: Stage,
        now: Instant,
    ) {
        self.endings.insert(rank, ending);
        match ending {
            Ending::Killed(signal) => self.handle_cause(node, Cause::Killed { rank, signal }),
            Ending::Exited(0) if stage == Stage::Joined => {
                self.quit.get_or_insert(rank);
                self.handle_cause(
                    node,
                    Cause::QuitWithoutFinalize { rank, recovers: self.recovers },
                );
                self.check_quit(now);
            }
            Ending::Exited(0) => {}
            Ending::Exited(code) if stage == Stage::Finalized => {
                let is_finalized = true;
                self.grace.get_or_insert(ExitGrace {
                    rank,
                    code,
                    is_finalized,
                    at: now,
                    is_notified: false,
                });
                self.handle_cause(node, Cause::FailedAfterFinalize { rank, code });
            }
            Ending::Exited(code) => self.handle_cause(node, Cause::Exited { rank, code }),
        }
    }

    /// `node`: where it happened, empty for what happened to the job as a whole.
    pub fn handle_cause(&mut self, node: &str, cause: Cause) {
        self.reports.push(Report { node: node.to_string(), cause });
    }

    /// This rank has said that it lost another one.
    pub fn handle_peer_loss(&mut self, rank: u32, now: Instant) {
        self.lost_peer_ranks.insert(rank);
        self.check_quit(now);
    }

    /// Begins the grace of the others, once a rank that has ended without MPI_Finalize is missed.
    fn check_quit(&mut self, now: Instant) {
        let Some(rank) = self.quit else { return };
        if self.recovers || !self.lost_peer_ranks.is_empty() {
            let is_finalized = false;
            self.grace.get_or_insert(ExitGrace {
                rank,
                code: 0,
                is_finalized,
                at: now,
                is_notified: false,
            });
        }
    }

    pub fn all_ended(&self) -> bool {
        self.endings.len() == self.size as usize
    }

    pub fn verdict(&self, now: Instant) -> Verdict {
        let is_over = |grace: ExitGrace| now >= grace.at + EXIT_GRACE;
        let only_left = self.reports.iter().all(|report| report.cause.grants_grace());
        if only_left && self.all_ended() {
            return Verdict::Finished { code: self.left_code() };
        }
        if only_left && !self.grace.is_some_and(is_over) {
            return Verdict::GoOn;
        }
        culprit(&self.reports, &self.lost_peer_ranks)
            .map_or(Verdict::GoOn, |cause| Verdict::End(cause.clone()))
    }

    /// Of the first rank that left with an error.
    fn left_code(&self) -> i32 {
        let code = |report: &Report| match report.cause {
            Cause::FailedAfterFinalize { code, .. } => Some(code),
            _ => None,
        };
        self.reports.iter().find_map(code).unwrap_or(0)
    }

    /// When [`Watch::poll_notice`] or [`Watch::verdict`] will have something new to say.
    pub fn next_time(&self) -> Option<Instant> {
        self.grace
            .map(|grace| grace.at + if grace.is_notified { EXIT_GRACE } else { EXIT_GRACE_NOTICE })
    }

    /// What the user should know while the job still runs; said once.
    pub fn poll_notice(&mut self, now: Instant, place: impl Fn(u32) -> String) -> Option<String> {
        let grace = self
            .grace
            .as_mut()
            .filter(|grace| !grace.is_notified && now >= grace.at + EXIT_GRACE_NOTICE)?;
        grace.is_notified = true;
        Some(format!(
            "{} ended with exit code {} {} MPI_Finalize; unless the others end too, the job is \
             ended in {} s",
            place(grace.rank),
            grace.code,
            if grace.is_finalized { "after" } else { "without" },
            (EXIT_GRACE - EXIT_GRACE_NOTICE).as_secs()
        ))
    }
}

#[cfg(test)]
mod tests;
