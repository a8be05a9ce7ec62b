//! The contact of ranks with this process manager: whether a rank speaks PMI, and whether it opens
//! the provider.
//!
//! A rank may be a wrapper that starts an MPI program without the variables of this process
//! manager: an Open MPI program, or a program that `sudo`, `env -i` or a container has separated
//! from its environment. Each such process runs as a job of one process, and ends with exit code 0.
//! So the agent scans the processes of a silent wrapper now and then: which MPI library a process
//! has loaded, and whether it has the variable that leads to the process manager.
//!
//! A rank may also pass MPI_Init with another transport, because a script in front of the program
//! has set a variable of the MPI library. Then the rank's statistics page shows that the rank has
//! opened no endpoint.
//!
//! What may never happen: a program without MPI is reported as an unmanaged MPI process; a long
//! scan keeps the agent from its other work.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::parent_agent::ParentAgent;
use super::statistics_page::StatisticsPage;
use crate::ending::Ending;
use crate::mpi::ProgramPlan;
use crate::mpi::detect::{self, Family};
use crate::pmi::server::Stage;

/// Time until the first scan of a wrapper, and shortest interval; MPI libraries need several times
/// as long to start.
const SCAN_MIN: Duration = Duration::from_millis(20);
/// Longest interval between scans, which otherwise is a tenth of the rank's age.
const SCAN_MAX: Duration = Duration::from_secs(5);
/// Age at which an unmanaged process is reported at once instead of at its end.
const UNMANAGED_REPORT_AFTER: Duration = Duration::from_secs(2);
/// Time after a rank's last PMI line at which the agent reports a rank that has not opened the
/// provider and waits in no barrier: the rank may wait for ever. An MPI library needs some
/// milliseconds from that line to the provider.
const BYPASS_REPORT_AFTER: Duration = Duration::from_secs(10);
/// Number of processes of one rank after which a scan stops.
const PROCESSES_MAX: usize = 64;

/// An MPI process that does not use this process manager.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UnmanagedProcess {
    library: PathBuf,
    family: Family,
    /// The process runs as a job of one process. An Open MPI process does not where it finds the
    /// variables of the launcher.
    is_alone: bool,
}

/// The contact of one rank with its process manager and with the provider.
#[derive(Debug, Default)]
pub struct Contact {
    begun: Option<Instant>,
    /// Time of the next scan of the rank's processes.
    next_scan: Option<Instant>,
    unmanaged: Option<(UnmanagedProcess, Instant)>,
    /// All messages of the rank are to go through the provider.
    is_ours: bool,
    /// Time of the rank's last line to its process manager.
    last_pmi_line: Option<Instant>,
    is_reported: bool,
}

impl Contact {
    /// `size`: ranks of the job. A single rank may rightly run as a job of one process.
    pub fn new(plan: &ProgramPlan, size: u32, now: Instant) -> Contact {
        if size < 2 {
            return Contact::default();
        }
        let next_scan = (!plan.is_direct).then_some(now + SCAN_MIN);
        Contact { begun: Some(now), next_scan, is_ours: plan.is_ours, ..Contact::default() }
    }

    /// Whether the rank, which has been silent so far, is due for a scan; sets the time of the next
    /// scan.
    fn is_due(&mut self, now: Instant) -> bool {
        let (Some(begun), Some(at)) = (self.begun, self.next_scan) else { return false };
        if now < at {
            return false;
        }
        let age = now.saturating_duration_since(begun);
        self.next_scan = Some(now + (age / 10).clamp(SCAN_MIN, SCAN_MAX));
        true
    }

    fn handle_scan(&mut self, unmanaged: Option<UnmanagedProcess>, now: Instant) {
        let Some(unmanaged) = unmanaged else { return };
        let since = self.unmanaged.as_ref().map_or(now, |(_, since)| *since);
        self.unmanaged = Some((unmanaged, since));
    }

    /// The unmanaged process, once it has run for [`UNMANAGED_REPORT_AFTER`]; returned only once.
    fn poll_unmanaged(&mut self, now: Instant) -> Option<UnmanagedProcess> {
        let (unmanaged, since) = self.unmanaged.as_ref()?;
        let is_long = now.saturating_duration_since(*since) >= UNMANAGED_REPORT_AFTER;
        let unmanaged = unmanaged.clone();
        (is_long && !std::mem::replace(&mut self.is_reported, true)).then_some(unmanaged)
    }

    fn handle_pmi_line(&mut self, now: Instant) {
        (self.last_pmi_line, self.next_scan, self.unmanaged) = (Some(now), None, None);
    }

    /// Time at which the provider must be open; `None` if that need not be checked.
    fn bypass_check_time(&self) -> Option<Instant> {
        let last_pmi_line = self.last_pmi_line.filter(|_| self.is_ours && !self.is_reported);
        last_pmi_line.map(|last_pmi_line| last_pmi_line + BYPASS_REPORT_AFTER)
    }

    /// When to check the contact next.
    pub fn next_time(&self) -> Option<Instant> {
        self.next_scan.or_else(|| self.bypass_check_time())
    }
}

const BYPASS: &str = "ranks are in MPI and have not opened Landbridge: their messages go by \
another transport, past the relays. The program, or a script in front of it, sets FI_PROVIDER or a \
variable of its MPI library (MPIR_CVAR_CH4_NETMOD, I_MPI_FABRICS, I_MPI_OFI_PROVIDER), or brings a \
libfabric that loads no provider: take that out";

impl UnmanagedProcess {
    fn why(&self) -> &'static str {
        match self.family {
            Family::OpenMpi => {
                "Open MPI cannot be started by `landbridge run`: inside one cluster, use its own \
                 mpirun after `landbridge env --mpi openmpi`"
            }
            _ => {
                "whatever starts the program (sudo, env -i, ssh, a container) must hand on the \
                 variables that begin with PMI_, FI_, MPIR_, I_MPI_ and LANDBRIDGE_, and open files"
            }
        }
    }

    fn name(&self) -> String {
        format!("{} ({})", self.family.name(), self.library.display())
    }

    fn advice(&self) -> String {
        format!("a rank runs {} without its process manager: {}", self.name(), self.why())
    }
}

impl Contact {
    /// Notes a line that the rank has sent to its process manager. A rank that finalizes without
    /// having opened the provider is reported.
    pub fn handle_line(
        &mut self,
        line: &str,
        page: Option<&StatisticsPage>,
        parent: &mut ParentAgent,
    ) {
        self.handle_pmi_line(Instant::now());
        let is_last = Stage::Silent.after(line) == Stage::Finalized;
        if is_last && self.bypass_check_time().is_some() && !has_opened(page) {
            self.report_bypass(parent);
        }
    }

    fn report_bypass(&mut self, parent: &mut ParentAgent) {
        self.is_reported = true;
        parent.advise(BYPASS.to_string());
    }

    /// Checks the contact of the rank that runs as `pid`, if that is due. `is_waiting`: whether the
    /// rank waits in a barrier of its process manager.
    pub fn watch(
        &mut self,
        pid: u32,
        page: Option<&StatisticsPage>,
        libraries: &mut Libraries,
        is_waiting: impl FnOnce() -> bool,
        parent: &mut ParentAgent,
    ) {
        let now = Instant::now();
        if self.next_time().is_none_or(|at| now < at) {
            return;
        }
        if self.is_due(now) {
            let unmanaged = libraries.unmanaged(pid);
            self.handle_scan(unmanaged, now);
            if let Some(unmanaged) = self.poll_unmanaged(now) {
                parent.advise(unmanaged.advice());
            }
        } else if self.bypass_check_time().is_some_and(|at| now >= at) {
            match (has_opened(page), is_waiting()) {
                // The rank needs no further check, or only after its next PMI line.
                (true, _) | (false, true) => self.last_pmi_line = None,
                (false, false) => self.report_bypass(parent),
            }
        }
    }

    /// Checks a rank that has ended. A rank that was an MPI process and has never sent a PMI line
    /// has computed as another job than the one of the user.
    pub fn handle_end(&mut self, rank: u32, ending: Ending, parent: &mut ParentAgent) {
        let Some((unmanaged, _)) = self.unmanaged.take() else { return };
        let size = parent.assignment.as_ref().map_or(0, |own| own.job.size);
        match ending {
            Ending::Exited(0) if unmanaged.is_alone => parent.fail(format!(
                "rank {rank} has ended without a PMI request: it has used {} and \
                 was alone, not one of {size}; {}",
                unmanaged.name(),
                unmanaged.why()
            )),
            Ending::Exited(0) | Ending::Killed(_) => {}
            Ending::Exited(_) => parent.advise(unmanaged.advice()),
        }
    }
}

/// Whether the rank of this page has opened the provider; a rank without a page counts as one that
/// has.
fn has_opened(page: Option<&StatisticsPage>) -> bool {
    page.is_none_or(StatisticsPage::is_opened)
}

/// MPI libraries that processes were found with, by path; each file is read once.
#[derive(Debug, Default)]
pub struct Libraries(BTreeMap<PathBuf, Option<Family>>);

impl Libraries {
    /// An MPI process among `pid` and its descendants that does not use this process manager.
    fn unmanaged(&mut self, pid: u32) -> Option<UnmanagedProcess> {
        let found = family_tree(pid).into_iter().filter_map(|pid| self.unmanaged_at(pid));
        found.max_by_key(|unmanaged| unmanaged.is_alone)
    }

    fn unmanaged_at(&mut self, pid: u32) -> Option<UnmanagedProcess> {
        let maps = std::fs::read(format!("/proc/{pid}/maps")).ok()?;
        let maps = String::from_utf8_lossy(&maps);
        let (library, family) = mapped_libraries(&maps).into_iter().find_map(|path| {
            let read = || detect::library_file(&seen_by(pid, &path)).map(|found| found.family);
            let family = *self.0.entry(path.clone()).or_insert_with(read);
            Some((path, family?))
        })?;
        let is_alone = !has_manager(pid)?;
        let is_unmanaged = is_alone || family == Family::OpenMpi;
        is_unmanaged.then_some(UnmanagedProcess { library, family, is_alone })
    }
}

/// Files in a list of mappings that may be MPI libraries, by name.
fn mapped_libraries(maps: &str) -> Vec<PathBuf> {
    let is_one = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libmpi") && name.contains(".so")
    };
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    let mut found: Vec<PathBuf> = paths.filter(is_one).map(PathBuf::from).collect();
    found.dedup();
    found
}

/// A path as another process sees it, which may have another root.
fn seen_by(pid: u32, path: &Path) -> PathBuf {
    let below = path.strip_prefix("/").unwrap_or(path);
    Path::new(&format!("/proc/{pid}/root")).join(below)
}

/// Whether a process has the variable that leads to the process manager; `None`: the process has
/// ended.
fn has_manager(pid: u32) -> Option<bool> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    Some(environment.split(|&byte| byte == 0).any(|entry| entry.starts_with(b"PMI_FD=")))
}

/// A process and its descendants; the search stops once it has found [`PROCESSES_MAX`].
fn family_tree(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        next += 1;
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        for thread in threads.flatten().take(PROCESSES_MAX) {
            let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(text.split_ascii_whitespace().flat_map(str::parse::<u32>));
        }
        if found.len() >= PROCESSES_MAX {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contact(now: Instant) -> Contact {
        let (next_scan, is_ours) = (Some(now + SCAN_MIN), true);
        Contact { begun: Some(now), next_scan, is_ours, ..Contact::default() }
    }

    #[test]
    fn a_wrapper_is_looked_at_less_and_less_often_until_it_speaks() {
        let begun = Instant::now();
        let mut contact = contact(begun);
        let mut looks = 0;
        let mut now = begun;
        while now < begun + Duration::from_secs(600) {
            now = contact.next_time().unwrap();
            assert!(contact.is_due(now) && !contact.is_due(now));
            looks += 1;
        }
        assert!((100..300).contains(&looks), "{looks}");
        contact.handle_pmi_line(now);
        assert_eq!(contact.next_time(), Some(now + BYPASS_REPORT_AFTER));
        assert!(!contact.is_due(now + SCAN_MAX));
    }

    #[test]
    fn an_unmanaged_process_is_reported_once() {
        let now = Instant::now();
        let mut contact = contact(now);
        let library = PathBuf::from("/opt/lib/libmpi.so.40");
        let unmanaged = UnmanagedProcess { library, family: Family::OpenMpi, is_alone: true };
        contact.handle_scan(Some(unmanaged.clone()), now);
        contact.handle_scan(None, now);
        assert_eq!(contact.poll_unmanaged(now), None);
        contact.handle_scan(Some(unmanaged.clone()), now + UNMANAGED_REPORT_AFTER);
        let later = now + UNMANAGED_REPORT_AFTER;
        assert_eq!(contact.poll_unmanaged(later), Some(unmanaged.clone()));
        assert_eq!(contact.poll_unmanaged(later), None);
        assert!(unmanaged.advice().contains("landbridge env --mpi openmpi"));
    }

    #[test]
    fn libraries_are_found_among_mappings() {
        let maps = "7f0-7f1 r--p 00000000 08:01 12 /opt/my lib/libmpi.so.40.40.7\n\
                    7f1-7f2 r-xp 00001000 08:01 12 /opt/my lib/libmpi.so.40.40.7\n\
                    7f2-7f3 rw-p 00000000 00:00 0 [heap]\n\
                    7f3-7f4 rw-p 00000000 00:00 0\n\
                    7f4-7f5 r--p 00000000 08:01 12 /usr/lib/libc.so.6\n";
        assert_eq!(mapped_libraries(maps), [PathBuf::from("/opt/my lib/libmpi.so.40.40.7")]);
    }

    #[test]
    fn processes_are_found_with_those_below_them() {
        let _alone = crate::sys::children();
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .env("PMI_FD", "7")
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while family_tree(child.id()).len() < 2 {
            assert!(Instant::now() < deadline);
        }
        assert_eq!(has_manager(child.id()), Some(true));
        for pid in family_tree(child.id()).into_iter().rev() {
            crate::sys::kill(pid, libc::SIGKILL);
        }
        child.wait().unwrap();
        assert_eq!(Libraries::default().unmanaged(child.id()), None);
    }
}
