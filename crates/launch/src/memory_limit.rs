//! How much memory the processes of this host may use together: what the machine has, or less in a
//! control group (cgroups(7), version 1 or 2), as batch systems and containers make them.
//!
//! In: files of the kernel. Out: bytes. What may never happen: a file that is missing or unreadable
//! counts as a limit.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that processes of this host may use together; `None`: the kernel does not say.
pub fn memory_limit() -> Option<u64> {
    limit_under(Path::new("/"))
}

fn limit_under(root: &Path) -> Option<u64> {
    let machine = total_memory(&fs::read_to_string(root.join("proc/meminfo")).ok()?);
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().filter_map(group_files).flat_map(|(folder, group, file)| {
        let groups = Path::new(group.trim_start_matches('/')).ancestors().map(PathBuf::from);
        // In a namespace of control groups the path may lead out of what is mounted here.
        let files = groups.map(|group| root.join("sys/fs/cgroup").join(folder).join(group));
        files.filter_map(|folder| number(&folder.join(file))).collect::<Vec<_>>()
    });
    machine.into_iter().chain(limits).min()
}

/// The folder below `/sys/fs/cgroup`, the group, and the file with its limit, of a line of
/// `/proc/self/cgroup`.
fn group_files(line: &str) -> Option<(&'static str, &str, &'static str)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, group) = (parts.next()?, parts.next()?);
    match controllers {
        "" => Some(("", group, "memory.max")),
        _ if controllers.split(',').any(|controller| controller == "memory") => {
            Some(("memory", group, "memory.limit_in_bytes"))
        }
        _ => None,
    }
}

/// The number in a file; `None`: there is none, as in `max`.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// The limit on a machine of 16 GiB with these control groups. `name`: of the test.
    fn limit_with(name: &str, groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("landbridge-{name}-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
        write("proc/self/cgroup", groups);
        files.iter().for_each(|(path, text)| write(path, text));
        let limit = limit_under(&root);
        fs::remove_dir_all(&root).unwrap();
        limit
    }

    #[test]
    fn the_least_limit_of_all_groups_counts() {
        assert_eq!(limit_with("none", "0::/\n", &[]), Some(16 * GIB));
        let nested = [
            ("sys/fs/cgroup/batch/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/batch/job/memory.max", "max\n"),
        ];
        assert_eq!(limit_with("nested", "0::/batch/job\n", &nested), Some(4 * GIB));
        let first = "sys/fs/cgroup/memory/job/memory.limit_in_bytes";
        let groups = "4:cpu,memory:/job\n0::/\n";
        assert_eq!(limit_with("first", groups, &[(first, "2147483648\n")]), Some(2 * GIB));
        let unlimited = [(first, "9223372036854771712\n")];
        assert_eq!(limit_with("unlimited", groups, &unlimited), Some(16 * GIB));
    }

    #[test]
    fn what_cannot_be_read_is_no_limit() {
        let strange = [("sys/fs/cgroup/x/memory.max", "")];
        let limit = limit_with("strange", "nonsense\n1:memory\n0::/x\n", &strange);
        assert_eq!(limit, Some(16 * GIB));
        assert_eq!(limit_under(Path::new("/nowhere")), None);
    }
}
