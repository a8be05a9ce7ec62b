//! Removes files that killed processes of MPI libraries leave in `/dev/shm`.
//!
//! MPICH names its files after the job's key-value space, which is new for every job, so the files
//! of a job are identified exactly. If an agent and the launcher are killed at the same time, no
//! process of the job removes the files. The next job then removes old files of MPICH of this user
//! that no living process has open or mapped, because no process is about to map a file of that
//! age. The names of Intel MPI's files say nothing about the job: this module removes only the
//! files that processes of this user have made since the job began and that no living process has
//! open or mapped.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const DIRECTORY: &str = "/dev/shm";
const INTEL_PREFIX: &str = "Intel_MPI_";
/// Age from which an unused file of MPICH is orphaned: every process that was to map the file has
/// done so by then.
const ORPHANED_AFTER: Duration = Duration::from_secs(600);

/// Removes the files of MPICH of all ranks for which `wanted` returns true.
pub fn remove_mpich_files(kvsname: &str, wanted: impl Fn(u32) -> bool) {
    let prefixes = mpich_prefixes(kvsname);
    for path in entries(Path::new(DIRECTORY)) {
        let name = file_name(&path);
        let rank = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
        let rank = rank.and_then(|rank| rank.parse().ok());
        if rank.is_some_and(&wanted) {
            // Another agent of this job may have removed the file already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes files of MPICH of jobs that have no processes any more.
pub fn remove_orphaned_mpich_files() {
    let now = SystemTime::now();
    remove_unused(entries(Path::new(DIRECTORY)).filter(|path| is_orphaned(path, now)).collect());
}

/// Whether the file at `path` belongs to this user, is older than [`ORPHANED_AFTER`], and has a
/// name as MPICH gives it.
fn is_orphaned(path: &Path, now: SystemTime) -> bool {
    let name = file_name(path);
    let rest = name.strip_prefix("mpich_shm_").or_else(|| name.strip_prefix("mpich_vci_"));
    let is_named = rest.and_then(|rest| rest.split_once('_')).is_some_and(|(job, rank)| {
        u32::from_str_radix(job, 16).is_ok() && rank.parse::<u32>().is_ok()
    });
    let own_user = rustix::process::geteuid().as_raw();
    let about = path.symlink_metadata().ok().filter(|about| is_named && about.is_file());
    about.is_some_and(|about| {
        let age = about.modified().ok().and_then(|then| now.duration_since(then).ok());
        about.uid() == own_user && age.is_some_and(|age| age > ORPHANED_AFTER)
    })
}

/// Removes files of Intel MPI that no process uses any more.
pub fn remove_stale_intel_files(job_started: SystemTime) {
    remove_unused(intel_candidates(Path::new(DIRECTORY), job_started));
}

fn remove_unused(candidates: Vec<PathBuf>) {
    if candidates.is_empty() {
        return;
    }
    let in_use = files_in_use();
    for path in candidates.iter().filter(|path| !in_use.contains(*path)) {
        // Another agent of this job may have removed the file already.
        let _ = std::fs::remove_file(path);
    }
}

/// Prefixes of MPICH's file names in front of the rank: `mpich_shm_HASH_`, and `mpich_vci_HASH_`
/// for jobs with several interfaces (`MPIR_CVAR_CH4_NUM_VCIS`).
fn mpich_prefixes(kvsname: &str) -> [String; 2] {
    let hash = fnv1a(kvsname.as_bytes());
    ["shm", "vci"].map(|kind| format!("mpich_{kind}_{hash:x}_"))
}

/// The 32-bit FNV-1a hash, with which MPICH shortens the name of the key-value space.
fn fnv1a(bytes: &[u8]) -> u32 {
    const OFFSET: u32 = 2_166_136_261;
    const PRIME: u32 = 16_777_619;
    bytes.iter().fold(OFFSET, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(PRIME))
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn intel_candidates(directory: &Path, job_started: SystemTime) -> Vec<PathBuf> {
    let own_user = rustix::process::geteuid().as_raw();
    let candidate = |path: &PathBuf| {
        let Ok(metadata) = path.metadata() else { return false };
        let recent = metadata.modified().is_ok_and(|modified| modified >= job_started);
        file_name(path).starts_with(INTEL_PREFIX) && metadata.uid() == own_user && recent
    };
    entries(directory).filter(candidate).collect()
}

/// Shared memory files that a process has open or mapped, among the processes that this user may
/// inspect.
fn files_in_use() -> HashSet<PathBuf> {
    let mut files = HashSet::new();
    for process in entries(Path::new("/proc")) {
        let maps = std::fs::read_to_string(process.join("maps")).unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.find(DIRECTORY).map(|at| &line[at..]));
        files.extend(mapped.map(PathBuf::from));
        files.extend(entries(&process.join("fd")).filter_map(|fd| std::fs::read_link(fd).ok()));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_hash_is_fnv_1a() {
        // The values are the published test vectors of the algorithm.
        assert_eq!(fnv1a(b""), 0x811c_9dc5);
        assert_eq!(fnv1a(b"a"), 0xe40c_292c);
        assert_eq!(fnv1a(b"foobar"), 0xbf9c_f968);
    }

    #[test]
    fn files_of_the_ranks_asked_for_go_and_no_others() {
        let kvsname = format!("kvs_cleanup_test_{}", std::process::id());
        let [shm, vci] = mpich_prefixes(&kvsname);
        assert!(shm.starts_with("mpich_shm_") && vci.starts_with("mpich_vci_"));
        for prefix in [&shm, &vci] {
            let path = |rank: u32| Path::new(DIRECTORY).join(format!("{prefix}{rank}"));
            (0..3).for_each(|rank| std::fs::write(path(rank), "").unwrap());
            remove_mpich_files(&kvsname, |rank| rank < 2);
            assert_eq!([0, 1, 2].map(|rank| path(rank).exists()), [false, false, true]);
            remove_mpich_files(&kvsname, |_| true);
            assert!(!path(2).exists());
        }
    }

    #[test]
    fn old_files_of_mpich_that_nobody_uses_go_and_no_others() {
        let kind = format!("{:x}", std::process::id());
        let file = |name: String, age: u64| {
            let path = Path::new(DIRECTORY).join(name);
            let file = std::fs::File::create(&path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
            (path, file)
        };
        let (old, _) = file(format!("mpich_shm_{kind}_900001"), 3_600);
        let (young, _) = file(format!("mpich_shm_{kind}_900002"), 5);
        let (used, in_use) = file(format!("mpich_vci_{kind}_900003"), 3_600);
        let (other, _) = file(format!("mpich_shm_{kind}_x"), 3_600);
        remove_orphaned_mpich_files();
        assert_eq!(
            [&old, &young, &used, &other].map(|path| path.exists()),
            [false, true, true, true]
        );
        drop(in_use);
        remove_orphaned_mpich_files();
        assert!(!used.exists());
        [young, other].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }

    #[test]
    fn only_recent_files_with_intels_name_are_candidates() {
        let directory = std::env::temp_dir().join(format!("lb-cleanup-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let before = SystemTime::now() - Duration::from_secs(5);
        let ours = directory.join("Intel_MPI_1");
        std::fs::write(&ours, "").unwrap();
        std::fs::write(directory.join("somebody_elses"), "").unwrap();
        assert_eq!(intel_candidates(&directory, before), [ours]);
        let later = SystemTime::now() + Duration::from_secs(5);
        assert!(intel_candidates(&directory, later).is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn an_open_file_is_in_use() {
        let path = std::env::temp_dir().join(format!("lb-in-use-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        assert!(files_in_use().contains(&path));
        drop(file);
        std::fs::remove_file(&path).unwrap();
    }
}
