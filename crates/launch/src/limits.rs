//! Explains limits of a machine that end processes without a message.
//!
//! In: how a rank has ended, or an error that the user is about to read. Out: a line that names the
//! limit and says what to do, once for each limit. A limit is named only where it is low, because
//! most programs fail for other reasons.

use std::collections::BTreeSet;

use rustix::process::{Resource, getrlimit};

use crate::ending::Ending;
use crate::ps::paths::bytes;

/// Bytes of `/dev/shm` that an MPI library may need for one rank.
const SHARED_MEMORY_MIN: u64 = 4 << 20;
/// Address space in bytes below which the limit may be the reason why a rank fails.
const ADDRESS_SPACE_MIN: u64 = 8 << 30;
/// Number of descriptors below which the limit may be the reason why a rank fails.
const OPEN_FILES_MIN: u64 = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    SharedMemory,
    AddressSpace,
    OpenFiles,
}

/// The limits of this node that the user has read about; each limit is reported once.
#[derive(Debug, Default)]
pub struct ResourceLimits {
    reported: BTreeSet<Limit>,
}

/// The limits that are in force on this machine.
#[derive(Debug, Clone, Copy)]
struct CurrentLimits {
    /// Bytes of `/dev/shm`: free, and in total.
    shared: Option<(u64, u64)>,
    address_space: Option<u64>,
    open_files: Option<u64>,
}

impl CurrentLimits {
    fn read() -> CurrentLimits {
        let shared = rustix::fs::statvfs("/dev/shm").ok();
        CurrentLimits {
            shared: shared.map(|it| (it.f_bavail * it.f_frsize, it.f_blocks * it.f_frsize)),
            address_space: getrlimit(Resource::As).current,
            open_files: getrlimit(Resource::Nofile).current,
        }
    }
}

impl ResourceLimits {
    /// Explains the end of a rank by limits that are low: lines for the user, without limits that
    /// were reported before.
    pub fn explain(&mut self, node: &str, ending: Ending) -> Vec<String> {
        let found = reasons(node, ending, CurrentLimits::read()).into_iter();
        found.filter(|(limit, _)| self.reported.insert(*limit)).map(|(_, text)| text).collect()
    }
}

fn reasons(node: &str, ending: Ending, present: CurrentLimits) -> Vec<(Limit, String)> {
    let mut found = Vec::new();
    if ending == Ending::Exited(0) {
        return found;
    }
    if let Some((free, all)) = present.shared
        && ending == Ending::Killed(libc::SIGBUS)
        && free < SHARED_MEMORY_MIN
    {
        let text = format!(
            "/dev/shm on node {node} is full: {} of {} are free. MPI libraries have shared memory \
             there, and a process that touches what does not fit is killed by SIGBUS: remove what \
             was left there, or make it larger (mount -o remount,size=1g /dev/shm; of a container: \
             --shm-size=1g)",
            bytes(free),
            bytes(all)
        );
        found.push((Limit::SharedMemory, text));
    }
    if let Some(limit) = present.address_space.filter(|limit| *limit < ADDRESS_SPACE_MIN) {
        let text = format!(
            "a process on node {node} may have {} of address space (ulimit -v): one that needs \
             more fails where it asks for memory or loads a library. Raise that limit",
            bytes(limit)
        );
        found.push((Limit::AddressSpace, text));
    }
    if let Some(limit) = present.open_files.filter(|limit| *limit < OPEN_FILES_MIN) {
        let text = format!(
            "a process on node {node} may have {limit} open files (ulimit -n), and a rank needs \
             one for each connection, file and library. Raise that limit"
        );
        found.push((Limit::OpenFiles, text));
    }
    found
}

/// Appends advice to an error of the system if a limit has caused the error.
pub fn advise(text: String) -> String {
    let is_about = |error: i32| text.contains(&format!("(os error {error})"));
    let limit =
        |resource| getrlimit(resource).current.map_or("no limit".into(), |it| it.to_string());
    let advice = if is_about(libc::EMFILE) {
        format!(
            "a process may have {} open files: raise that limit (ulimit -n)",
            limit(Resource::Nofile)
        )
    } else if is_about(libc::ENFILE) {
        "the system has no more open files: raise fs.file-max (sysctl)".to_string()
    } else if is_about(libc::EAGAIN) && text.contains("cannot") {
        format!(
            "a user may have {} processes here: raise that limit (ulimit -u)",
            limit(Resource::Nproc)
        )
    } else if is_about(libc::ENOMEM) {
        match getrlimit(Resource::As).current {
            Some(most) => {
                format!(
                    "a process may have {} of address space: raise that limit (ulimit -v)",
                    bytes(most)
                )
            }
            None => "there is no memory left on this machine".to_string(),
        }
    } else {
        return text;
    };
    format!("{text}; {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMPLE: CurrentLimits = CurrentLimits {
        shared: Some((1 << 30, 1 << 30)),
        address_space: None,
        open_files: Some(1024),
    };
    const BUS: Ending = Ending::Killed(libc::SIGBUS);

    fn found(ending: Ending, present: CurrentLimits) -> Vec<Limit> {
        reasons("n1", ending, present).into_iter().map(|(limit, _)| limit).collect()
    }

    #[test]
    fn a_rank_that_fails_where_a_limit_is_low_has_it_named() {
        assert_eq!(found(BUS, AMPLE), []);
        let full = CurrentLimits { shared: Some((4096, 1 << 20)), ..AMPLE };
        assert_eq!(found(BUS, full), [Limit::SharedMemory]);
        assert_eq!(found(Ending::Killed(libc::SIGSEGV), full), [], "only SIGBUS tells of it");
        let small = CurrentLimits { address_space: Some(300 << 20), open_files: Some(24), ..AMPLE };
        let both = [Limit::AddressSpace, Limit::OpenFiles];
        assert_eq!(found(Ending::Exited(143), small), both);
        assert_eq!(found(Ending::Exited(0), small), []);
        let text = &reasons("n1", BUS, full)[0].1;
        assert!(
            text.contains("/dev/shm on node n1 is full") && text.contains("--shm-size"),
            "{text}"
        );
    }

    #[test]
    fn a_limit_is_reported_once() {
        let mut limits = ResourceLimits::default();
        limits.reported.extend([Limit::SharedMemory, Limit::AddressSpace, Limit::OpenFiles]);
        assert!(limits.explain("n1", BUS).is_empty());
    }

    #[test]
    fn an_error_of_a_limit_says_what_to_do() {
        let error = |number| format!("cannot run x: {}", std::io::Error::from_raw_os_error(number));
        assert!(advise(error(libc::EMFILE)).contains("raise that limit (ulimit -n"));
        assert!(advise(error(libc::ENFILE)).contains("fs.file-max"));
        assert!(advise(error(libc::EAGAIN)).contains("(ulimit -u)"));
        assert!(advise(error(libc::ENOMEM)).contains("memory"));
        assert_eq!(advise(error(libc::ENOENT)), error(libc::ENOENT));
    }
}
