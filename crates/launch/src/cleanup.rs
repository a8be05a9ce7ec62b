//! Removes what MPI libraries leave in `/dev/shm` when they are killed.
//!
//! Only files that this user's processes made since the job began, under the names those
//! libraries use, and that no living process has open or mapped: another job's files stay.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const PREFIXES: [&str; 4] = ["mpich_shm_", "mpich_shar_tmp", "Intel_MPI_", "impi_shm_"];

pub fn remove_stale_shared_memory(job_started: SystemTime) {
    let candidates = candidates(Path::new("/dev/shm"), job_started);
    if candidates.is_empty() {
        return;
    }
    let in_use = files_in_use();
    for path in candidates.iter().filter(|path| !in_use.contains(*path)) {
        // Another agent of the same job may have been faster.
        let _ = std::fs::remove_file(path);
    }
}

fn candidates(directory: &Path, job_started: SystemTime) -> Vec<PathBuf> {
    let own_user = rustix::process::geteuid().as_raw();
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Ok(metadata) = entry.metadata() else { return false };
            let recent = metadata.modified().is_ok_and(|modified| modified >= job_started);
            PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                && metadata.uid() == own_user
                && recent
        })
        .map(|entry| entry.path())
        .collect()
}

/// Shared memory files that some process we may look at has open or mapped.
fn files_in_use() -> HashSet<PathBuf> {
    let mut files = HashSet::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return files };
    for entry in entries.flatten() {
        let process = entry.path();
        let maps = std::fs::read_to_string(process.join("maps")).unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.find("/dev/shm/").map(|at| &line[at..]));
        files.extend(mapped.map(PathBuf::from));
        let open = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        files.extend(open.filter_map(|fd| std::fs::read_link(fd.path()).ok()));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_recent_files_with_an_mpi_name_are_candidates() {
        let directory = std::env::temp_dir().join(format!("lb-cleanup-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let before = SystemTime::now() - Duration::from_secs(5);
        let ours = directory.join("mpich_shm_1");
        std::fs::write(&ours, "").unwrap();
        std::fs::write(directory.join("somebody_elses"), "").unwrap();
        assert_eq!(candidates(&directory, before), [ours]);
        let later = SystemTime::now() + Duration::from_secs(5);
        assert!(candidates(&directory, later).is_empty());
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
