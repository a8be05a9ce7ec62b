//! Decides what ends a job, with which exit code, and what the user reads about the end. The module
//! is pure: reports of the agents enter, a [`Verdict`] leaves.
//!
//! A job ends well when every rank has ended. A job ends early for a [`Cause`]. The end of one rank
//! makes other ranks end, because these lose a peer, and reports of different nodes arrive in any
//! order. So the launcher gathers all reports within [`SETTLE`], and [`culprit`] separates the
//! cause from its consequences. A rank that ends with an error after MPI_Finalize gives the other
//! ranks [`EXIT_GRACE`] to end too: the rank has left the job properly, but other ranks may wait
//! for the rank for ever. A rank that ends with exit code 0 without MPI_Finalize also grants
//! [`EXIT_GRACE`]. No other rank may notice its end: where killed ranks are restarted, or where the
//! MPI library carries the messages of a node by its own shared memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ending::Ending;
use crate::pmi::server::Stage;
use crate::sys::signal_name;

/// Time that the launcher waits for a better explanation before it acts on a cause. The time is
/// longer than the report of a culprit takes over a wide area network, and longer than an
/// interpreter takes from MPI_Finalize to its exit.
pub const SETTLE: Duration = Duration::from_millis(250);
/// Time that other ranks may go on after a rank has ended with an error after MPI_Finalize. The
/// time is enough to write results, and short enough that a job which hangs does not keep its user
/// waiting.
pub const EXIT_GRACE: Duration = Duration::from_secs(10);
/// Time after which the user reads that [`EXIT_GRACE`] runs; most jobs have ended by then.
const EXIT_GRACE_NOTICE: Duration = Duration::from_secs(1);

/// Exit code of a job that ran out of time; timeout(1) uses the same code.
const TIMEOUT_CODE: i32 = 124;
/// Exit code of a job that could not go on because of Landbridge or of an MPI library.
pub const FAILED_CODE: i32 = 1;
/// Base of the exit code for a death by signal N: a shell reports this base plus N.
const SIGNAL_BASE: i32 = 128;

/// Why a job ends early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The rank ended with code 0 without MPI_Finalize, and other ranks wait for it.
    Stuck {
        rank: u32,
    },
    /// The rank ended with a code other than 0 without MPI_Finalize.
    Exited {
        rank: u32,
        code: i32,
    },
    /// The rank ended with a code other than 0 after MPI_Finalize, and other ranks did not end.
    FailedAfterFinalize {
        rank: u32,
        code: i32,
    },
    /// The rank ended with exit code 0 without MPI_Finalize and is not restarted, and other ranks
    /// did not end.
    QuitWithoutFinalize {
        rank: u32,
        /// Whether killed ranks are restarted.
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
    /// An agent could not do its work, or the connection to the agent is lost.
    Failed {
        text: String,
    },
    Timeout {
        seconds: u64,
    },
    /// The reader of the launcher's standard output or error has closed the pipe.
    Unread,
    /// The launcher itself got a signal that ends it.
    Interrupted {
        signal: i32,
    },
}

/// Strength of a report as the cause of other reports; a greater priority explains a lesser one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CausePriority {
    /// A rank ended without an error report; only other ranks that wait for the rank notice its
    /// end.
    Missed,
    /// An abort with an error code of the MPI library, which is what the library does after it has
    /// lost a peer.
    LibraryError,
    /// An end with exit code 0 without MPI_Finalize, which is the cause of every loss of a peer
    /// that no stronger report explains.
    QuitWithoutFinalize,
    /// A crash of the program, or of the MPI library after the library has lost a peer.
    Crash,
    /// An error after MPI_Finalize: a rank that has lost a peer does not complete MPI_Finalize.
    FailedAfterFinalize,
    /// A fault of the program: an exit code, MPI_Abort with a code of its choice, or abort(3).
    ProgramFault,
    /// An event that no event of another rank can bring about.
    External,
    /// An event of the whole job that ends the job whatever its ranks do.
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

    /// The rank that the cause happened to; `None` for causes of the whole job.
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

    /// Whether the other ranks have [`EXIT_GRACE`] to end too.
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

    /// The text that the user reads about the cause; `None` if no one reads the output any more.
    /// `place` gives the text that says where a rank runs: `rank 3 on node n2 (cluster nancy)`.
    pub fn text(&self, place: impl Fn(u32) -> String) -> Option<String> {
        let text = match self {
            Cause::Stuck { rank } => format!(
                "{} has ended without MPI_Finalize while others wait for it; ending the job",
                place(*rank)
            ),
            Cause::QuitWithoutFinalize { rank, recovers: true } => format!(
                "{} has ended with exit code 0 without MPI_Finalize: under --recover it counts as \
                 lost; ending the job",
                place(*rank)
            ),
            Cause::QuitWithoutFinalize { rank, recovers: false } => format!(
                "{} has ended with exit code 0 without MPI_Finalize, and others go on; ending the \
                 job",
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

/// Whether an abort code comes from the MPI library. Codes with which a library aborts after an
/// error of its own are large numbers that have no meaning outside of the library. The codes that
/// programs pass to MPI_Abort fit into an exit code, or are small negative numbers.
pub fn is_library_code(code: i32) -> bool {
    !(-255..=255).contains(&code)
}

/// Exit code for an abort code. The low byte of a library's code could be anything, even the exit
/// code of a signal, so a library's code becomes 1.
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

/// An event that ends a job, and the node where the event happened; the node is empty for an event
/// of the whole job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct JobEndReport {
    node: String,
    cause: Cause,
}

/// Finds the report that is the cause of the other reports. `reports` is in order of arrival: for
/// one node this is the order in which ranks ended there; for different nodes the order says
/// little.
///
/// - An event that no loss of a rank can bring about is the cause, whenever the event is reported.
/// - A rank that has reported the loss of another rank (`lost_peer_ranks`) is not the cause if any
///   other report can be the cause.
/// - A culprit ends before the other ranks on its node that end because of it: of all other reports
///   of a node, only the first can be the cause. A rank that has completed MPI_Finalize has left
///   the job already and exits some time later, so its report counts at any position in the order.
///   A report of an end without MPI_Finalize counts at any position, too.
/// - Among the remaining reports, the report with the highest priority is the cause; among equals,
///   the first.
///
/// The second rule exists because the third does not always hold: the kernel closes the connections
/// of a process before it reports the end of the process, and on a busy node other ranks may notice
/// the closed connections, and end, before the agent sees the end of the first process.
fn culprit<'a>(reports: &'a [JobEndReport], lost_peer_ranks: &BTreeSet<u32>) -> Option<&'a Cause> {
    let lost_another =
        |cause: &Cause| cause.rank().is_some_and(|rank| lost_peer_ranks.contains(&rank));
    let others = reports.iter().filter(|report| {
        report.cause.priority() >= CausePriority::External || !lost_another(&report.cause)
    });
    strongest(others).or_else(|| strongest(reports.iter()))
}

/// The cause of the highest priority among the reports that can be a cause by their position in the
/// order.
fn strongest<'a>(reports: impl Iterator<Item = &'a JobEndReport>) -> Option<&'a Cause> {
    let mut nodes = BTreeSet::new();
    let mut found: Option<&Cause> = None;
    for JobEndReport { node, cause } in reports {
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
    /// Every rank has ended; `code` is the job's exit code.
    Finished {
        code: i32,
    },
    /// The launcher has to end the ranks that still run.
    End(Cause),
}

pub struct Watch {
    /// Processes of the job, spawned processes included.
    size: u32,
    endings: BTreeMap<u32, Ending>,
    reports: Vec<JobEndReport>,
    /// Ranks that have reported the loss of another rank.
    lost_peer_ranks: BTreeSet<u32>,
    /// Whether killed ranks are restarted.
    recovers: bool,
    grace: Option<ExitGrace>,
}

/// The grace that began with the first rank that ended with an error after MPI_Finalize, or that
/// ended without MPI_Finalize and is missed.
#[derive(Debug, Clone, Copy)]
struct ExitGrace {
    rank: u32,
    code: i32,
    /// Whether the rank ended after MPI_Finalize.
    is_finalized: bool,
    at: Instant,
    is_notified: bool,
}

impl ExitGrace {
    /// The grace that begins with a cause at this time, if it grants one.
    fn of(cause: &Cause, at: Instant) -> Option<ExitGrace> {
        let (rank, code, is_finalized) = match *cause {
            Cause::QuitWithoutFinalize { rank, .. } => (rank, 0, false),
            Cause::FailedAfterFinalize { rank, code } => (rank, code, true),
            _ => return None,
        };
        Some(ExitGrace { rank, code, is_finalized, at, is_notified: false })
    }
}

impl Watch {
    pub fn new(size: u32, recovers: bool) -> Watch {
        Watch {
            size,
            endings: BTreeMap::new(),
            reports: Vec::new(),
            lost_peer_ranks: BTreeSet::new(),
            recovers,
            grace: None,
        }
    }

    /// Adds `count` spawned processes to the size of the job.
    pub fn handle_spawn(&mut self, count: u32) {
        self.size += count;
    }

    /// Removes the ranks of a spawned group that could not be started completely.
    pub fn handle_revoke(&mut self, ranks: impl Iterator<Item = u32>) {
        for rank in ranks {
            self.endings.remove(&rank);
            self.size -= 1;
        }
    }

    /// These ranks had ended, and are executed again: what grants a grace is known once more when
    /// they end again.
    pub fn handle_again(&mut self, ranks: &[u32]) {
        self.endings.retain(|rank, _| !ranks.contains(rank));
        let left = self.grace.take_if(|grace| ranks.contains(&grace.rank));
        let is_again = |cause: &Cause| cause.rank().is_some_and(|rank| ranks.contains(&rank));
        self.reports.retain(|report| !(report.cause.grants_grace() && is_again(&report.cause)));
        if let Some(left) = left {
            let mut causes = self.reports.iter().map(|report| &report.cause);
            self.grace = causes.find_map(|cause| ExitGrace::of(cause, left.at));
        }
    }

    /// Records the end of a rank. `node` is any name for where the rank ran, the same for all ranks
    /// of the node.
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
                let recovers = self.recovers;
                self.begin_grace(node, Cause::QuitWithoutFinalize { rank, recovers }, now);
            }
            Ending::Exited(0) => {}
            Ending::Exited(code) if stage == Stage::Finalized => {
                self.begin_grace(node, Cause::FailedAfterFinalize { rank, code }, now);
            }
            Ending::Exited(code) => self.handle_cause(node, Cause::Exited { rank, code }),
        }
    }

    fn begin_grace(&mut self, node: &str, cause: Cause, now: Instant) {
        self.grace = self.grace.or_else(|| ExitGrace::of(&cause, now));
        self.handle_cause(node, cause);
    }

    /// Records a cause. `node` names where the cause happened; `node` is empty for a cause of the
    /// whole job.
    pub fn handle_cause(&mut self, node: &str, cause: Cause) {
        self.reports.push(JobEndReport { node: node.to_string(), cause });
    }

    /// Records that these ranks have reported the loss of another rank.
    pub fn handle_peer_losses(&mut self, ranks: impl IntoIterator<Item = u32>) {
        self.lost_peer_ranks.extend(ranks);
    }

    pub fn all_ended(&self) -> bool {
        self.endings.len() == self.size as usize
    }

    pub fn verdict(&self, now: Instant) -> Verdict {
        let is_over = |grace: ExitGrace| now >= grace.at + EXIT_GRACE;
        let only_left = self.reports.iter().all(|report| report.cause.grants_grace());
        if only_left && self.all_ended() && !self.has_lost_part() {
            return Verdict::Finished { code: self.left_code() };
        }
        if only_left && !self.all_ended() && !self.grace.is_some_and(is_over) {
            return Verdict::GoOn;
        }
        culprit(&self.reports, &self.lost_peer_ranks)
            .map_or(Verdict::GoOn, |cause| Verdict::End(cause.clone()))
    }

    /// Whether a rank of a job that recovers has ended without MPI_Finalize: a script can hide that
    /// the program within was killed.
    fn has_lost_part(&self) -> bool {
        let is_lost = |report: &JobEndReport| {
            matches!(report.cause, Cause::QuitWithoutFinalize { recovers: true, .. })
        };
        self.reports.iter().any(is_lost)
    }

    /// Exit code of the first rank that ended with an error after MPI_Finalize; 0 if there is none.
    fn left_code(&self) -> i32 {
        self.failed_after_finalize().map_or(0, |(_, code)| code)
    }

    /// The first rank that ended with an error after MPI_Finalize, and its exit code.
    pub fn failed_after_finalize(&self) -> Option<(u32, i32)> {
        self.reports.iter().find_map(|report| match report.cause {
            Cause::FailedAfterFinalize { rank, code } => Some((rank, code)),
            _ => None,
        })
    }

    /// The next time at which [`Watch::poll_notice`] or [`Watch::verdict`] may have a new result.
    pub fn next_time(&self) -> Option<Instant> {
        self.grace
            .map(|grace| grace.at + if grace.is_notified { EXIT_GRACE } else { EXIT_GRACE_NOTICE })
    }

    /// The notice that a grace is running, for the user while the job still runs; each job gives at
    /// most one notice.
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
