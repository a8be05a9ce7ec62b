//! Leases on folders of checkpoint images: whose images lie in a folder, and when leftover images
//! are deleted.
//!
//! Next to the folder of a job (`JOB`) each agent of the job holds a lock on a lease file of its
//! own (`.JOB.NAME`) while the agent lives. The kernel releases the lock when the agent ends,
//! however the agent ends. A job folder with lease files of which none is locked is therefore a
//! leftover.
//!
//! Several hosts may share the folder, and not every file system shares locks between hosts (NFS
//! mounted with `local_lock`, Lustre with `localflock`) or has locks. So a lease file names the
//! running system that has written it, and a lock decides only about lease files of this system.
//! The agent renews its lease file every hour; a lease file of another system is valid until it has
//! not been renewed for 24 hours, by the clock of the file system itself. When a job has ended on
//! all nodes, an agent that knows this ignores the leases of the job.
//!
//! An agent that does not know whether its job is over (its launcher was killed, or the agent has
//! lost nodes that go on) unlocks its lease file and leaves the file, because without a lease file
//! no later agent would find the images. If no other agent holds a lease on the images, the agent
//! deletes the images at once; otherwise the last other holder deletes them.
//!
//! What may never happen: images of a running job are deleted, or anything that is not a folder of
//! images.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Attempts to make a lease: another agent that sweeps the folder may hold or remove the lease file
/// for a moment.
const ATTEMPTS: u32 = 100;
/// Hex digits of a job's name.
const NAME_LENGTH: usize = 32;
/// Interval at which an agent renews its lease file.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(3_600);
/// Time without renewal after which a lease file of another system is not valid any more.
const LEASE_TIME: Duration = Duration::from_secs(24 * 3_600);
/// File with an id of the running kernel: all processes with the same id see the same locks.
const SYSTEM: &str = "/proc/sys/kernel/random/boot_id";
/// Marker file in a folder that was made for images: the folder is removed with the last images in
/// it.
const MADE_MARKER: &str = ".made-for-checkpoints";

/// The lease of one agent; dropping it releases the lock. The module head has the rules.
#[derive(Debug)]
pub struct Lease {
    path: PathBuf,
    job: String,
    file: File,
    renewed: Instant,
    /// The thread that writes the last renewal.
    renewal: Option<JoinHandle<()>>,
    /// The lease file stays when the lease ends, because images may be left behind that are found
    /// by it.
    keeps_file: bool,
}

/// Which lease files a sweep treats as stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseFilter<'a> {
    All,
    /// Every lease of this job, because the job has ended on all nodes; leases of other jobs are
    /// left alone.
    OfEndedJob(&'a str),
}

impl Lease {
    /// Makes the folder and a lease in it, up to [`ATTEMPTS`] times, because the last agent of
    /// another job may remove the folder before it holds a lease.
    pub fn with_folder(root: &Path, job: &str, name: u32) -> Result<Lease> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match make(root).and_then(|()| Lease::new(root, job, name)) {
                Err(error) if attempts < ATTEMPTS && was_removed(&error) => (),
                outcome => return outcome,
            }
        }
    }

    fn new(root: &Path, job: &str, name: u32) -> Result<Lease> {
        let path = lease_path(root, job, name);
        for _ in 0..ATTEMPTS {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let opened = options.custom_flags(libc::O_NOFOLLOW).open(&path);
            let file = opened.with_context(|| format!("cannot make {}", path.display()))?;
            match flock(&file, FlockOperation::LockExclusive) {
                // A file system without locks: only the job's own end removes anything there.
                Ok(()) | Err(Errno::NOLCK | Errno::NOSYS | Errno::NOTSUP) => (),
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
            // An agent that sweeps the folder may have removed the file before this agent has
            // locked it.
            let is_it = fs::metadata(&path)
                .is_ok_and(|it| file.metadata().is_ok_and(|own| own.ino() == it.ino()));
            if is_it {
                let job = job.to_string();
                if let Err(error) = write(&file) {
                    // The disk is full. Without its text the file would be of nobody.
                    let _ = fs::remove_file(&path);
                    return Err(error).with_context(|| format!("cannot write {}", path.display()));
                }
                let (renewed, renewal) = (Instant::now(), None);
                return Ok(Lease { path, job, file, renewed, renewal, keeps_file: false });
            }
        }
        bail!("{} is removed again and again", path.display());
    }
}

/// Number of the lease of a spare node, which has no ranks yet: no rank has a number with the
/// highest bit set. Two nodes with the same number count as one node.
pub fn spare_number(cluster: u32, node: &str) -> u32 {
    let name = format!("{cluster}/{node}");
    let hash = name
        .bytes()
        .fold(2_166_136_261, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    hash | 1 << 31
}

/// Path of the lease file of agent `name` of a job. An agent that sees the lease file of another
/// agent sees that agent's images as well.
pub fn lease_path(root: &Path, job: &str, name: u32) -> PathBuf {
    root.join(format!(".{job}.{name}"))
}

impl Lease {
    /// Renews the lease file if [`RENEWAL_INTERVAL`] is over; a failed renewal is repeated after
    /// the next interval. A thread writes the file, because the disk may not answer.
    pub fn renew(&mut self) {
        let is_busy = self.renewal.as_ref().is_some_and(|thread| !thread.is_finished());
        if is_busy || self.renewed.elapsed() < RENEWAL_INTERVAL {
            return;
        }
        self.renewed = Instant::now();
        let Ok(file) = self.file.try_clone() else { return };
        self.renewal = Builder::new().name("renew".into()).spawn(move || drop(write(&file))).ok();
    }

    /// Releases the lease, and deletes images without a valid lease. `is_over`: the job has ended
    /// on all nodes, so leases of the job do not count.
    pub fn end(mut self, is_over: bool) {
        // As long as there are images, later agents find them by the lease file.
        self.keeps_file = true;
        let (path, job) = (self.path.clone(), self.job.clone());
        drop(self);
        let Some(root) = path.parent() else { return };
        let root = root.to_path_buf();
        if is_over {
            sweep_where(&root, LeaseFilter::OfEndedJob(&job));
            // Another agent of the job may have held its own lease until now, and may have removed
            // the images since.
            if is_gone(&root.join(&job)) {
                let _ = fs::remove_file(path);
            }
        }
        sweep(&root);
        remove_if_empty(&root);
    }
}

fn write(file: &File) -> std::io::Result<()> {
    file.write_all_at(system().as_bytes(), 0)
}

/// Makes the folder for the folders of jobs, if its parent exists; a mistyped path is not made with
/// all its parents.
fn make(root: &Path) -> Result<()> {
    let mut builder = fs::DirBuilder::new();
    match builder.mode(0o700).create(root) {
        Ok(()) => {
            // Without this marker the folder stays after the last images.
            let _ = File::create_new(root.join(MADE_MARKER));
            Ok(())
        }
        Err(_) if root.is_dir() => Ok(()),
        Err(error) => Err(error).with_context(|| {
            format!("cannot make {} (the folder around it must be there)", root.display())
        }),
    }
}

/// Whether an error may come from a folder that another agent has removed meanwhile.
fn was_removed(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(ErrorKind::NotFound | ErrorKind::AlreadyExists))
}

/// Removes a folder that was made for images and holds no images any more.
fn remove_if_empty(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else { return };
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    if names.len() == 1 && names[0] == MADE_MARKER {
        let _ = fs::remove_file(root.join(MADE_MARKER));
        if fs::remove_dir(root).is_err() {
            // Another agent has made a lease in the folder meanwhile, and removes the folder later.
            let _ = File::create_new(root.join(MADE_MARKER));
        }
    }
}

/// Id of the running kernel; empty if unknown, and then all lease files are treated as those of
/// other systems.
fn system() -> String {
    fs::read_to_string(SYSTEM).unwrap_or_default().trim().to_string()
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.keeps_file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Deletes images in `root` of jobs without a valid lease. Files that cannot be removed stay.
pub fn sweep(root: &Path) {
    sweep_where(root, LeaseFilter::All);
}

fn sweep_where(root: &Path, filter: LeaseFilter) {
    let Ok(entries) = fs::read_dir(root) else { return };
    let mut leases: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let job = name.strip_prefix('.').and_then(|rest| rest.split_once('.'));
        if let Some((job, _)) =
            job.filter(|(job, number)| is_job(job) && number.parse::<u32>().is_ok())
        {
            leases.entry(job.to_string()).or_default().push(entry.path());
        }
    }
    let now = now(root);
    let is_wanted =
        |job: &str| matches!(filter, LeaseFilter::All) || filter == LeaseFilter::OfEndedJob(job);
    for (job, paths) in leases.into_iter().filter(|(job, _)| is_wanted(job)) {
        // The locks are held until the folder is removed.
        let held: Vec<File> = paths
            .iter()
            .filter_map(|path| try_lock(path).filter(|it| is_stale(it, filter, now)))
            .collect();
        if held.len() != paths.len() {
            continue;
        }
        let folder = root.join(job);
        let _ = fs::remove_dir_all(&folder);
        // The lease files of a folder that cannot be removed stay, so that a later sweep finds the
        // folder.
        if is_gone(&folder) {
            paths.iter().for_each(|path| drop(fs::remove_file(path)));
        }
    }
}

/// Whether a folder certainly does not exist; false on any error but `NotFound`.
fn is_gone(folder: &Path) -> bool {
    matches!(fs::symlink_metadata(folder), Err(error) if error.kind() == ErrorKind::NotFound)
}

/// Opens and locks a lease file, unless another process holds the lock.
fn try_lock(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
}

/// Whether a lease file that this process could lock is not valid any more.
fn is_stale(mut file: &File, filter: LeaseFilter, now: Option<SystemTime>) -> bool {
    let (mut of, own) = (String::new(), system());
    let is_own = file.read_to_string(&mut of).is_ok() && of == own && !own.is_empty();
    let modified = file.metadata().and_then(|about| about.modified());
    let age = now.zip(modified.ok()).and_then(|(now, then)| now.duration_since(then).ok());
    is_own
        || matches!(filter, LeaseFilter::OfEndedJob(_))
        || age.is_some_and(|age| age > LEASE_TIME)
}

/// The present time by the clock of the file system that holds this folder.
fn now(root: &Path) -> Option<SystemTime> {
    let path = root.join(format!(".now.{}", std::process::id()));
    let modified = File::create_new(&path).and_then(|file| file.metadata()?.modified());
    let _ = fs::remove_file(path);
    modified.ok()
}

fn is_job(name: &str) -> bool {
    name.len() == NAME_LENGTH && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_without_a_lease_are_removed_and_nothing_else() {
        let root = std::env::temp_dir().join(format!("landbridge-claim-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let [gone, lives, half] = ["a", "b", "c"].map(|letter| letter.repeat(NAME_LENGTH));
        for name in [&gone, &lives, &half, "mine", &"d".repeat(NAME_LENGTH)] {
            fs::create_dir_all(root.join(name).join("rank-0/1")).unwrap();
        }
        let ours = Lease::new(&root, &lives, 0).unwrap();
        let _one_of_two = Lease::new(&root, &half, 0).unwrap();
        for (job, name) in [(&gone, 0), (&gone, 4), (&half, 2)] {
            // The lease file as a killed agent leaves it.
            fs::write(root.join(format!(".{job}.{name}")), system()).unwrap();
        }
        sweep(&root);
        let left = |name: &str| root.join(name).exists();
        assert!(!left(&gone) && !left(&format!(".{gone}.0")) && !left(&format!(".{gone}.4")));
        assert!(left(&lives) && left(&half) && left("mine"));
        assert!(left(&"d".repeat(NAME_LENGTH)), "it may be anybody's");
        assert!(
            lease_path(&root, &lives, 0).exists()
                && !lease_path(&root, &lives, spare_number(0, "n2")).exists()
        );
        drop(ours);
        assert!(!left(&format!(".{lives}.0")), "it ended well");
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_lease_of_another_system_expires_after_a_day_without_renewal() {
        let root = std::env::temp_dir().join(format!("landbridge-claims-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let [young, old, mine] = ["a", "b", "c"].map(|letter| letter.repeat(NAME_LENGTH));
        for job in [&young, &old, &mine] {
            fs::create_dir_all(root.join(job).join("rank-0/1")).unwrap();
        }
        let other = |job: &str, age: Duration| {
            // A lease file of another system, whose lock this system does not see.
            let path = lease_path(&root, job, 7);
            fs::write(&path, "another").unwrap();
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        };
        other(&young, LEASE_TIME - RENEWAL_INTERVAL);
        other(&old, LEASE_TIME + RENEWAL_INTERVAL);
        other(&mine, Duration::ZERO);
        let lease = Lease::new(&root, &mine, 0).unwrap();
        sweep(&root);
        let left = |job: &str| root.join(job).exists();
        assert!(left(&young) && !left(&old) && left(&mine));
        // An agent that has lost contact with other nodes does not know whether these have ended.
        lease.end(false);
        assert!(left(&mine));
        Lease::new(&root, &mine, 0).unwrap().end(true);
        assert!(left(&young) && !left(&mine) && !lease_path(&root, &mine, 7).exists());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_lease_is_renewed_when_its_interval_is_over() {
        let root = std::env::temp_dir().join(format!("landbridge-renew-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let job = "a".repeat(NAME_LENGTH);
        let mut lease = Lease::with_folder(&root, &job, 0).unwrap();
        let text = || fs::read_to_string(lease_path(&root, &job, 0)).unwrap();
        fs::write(lease_path(&root, &job, 0), "").unwrap();
        lease.renew();
        assert!(lease.renewal.is_none());
        let Some(then) = Instant::now().checked_sub(RENEWAL_INTERVAL) else { return };
        lease.renewed = then;
        lease.renew();
        lease.renewal.take().unwrap().join().unwrap();
        assert_eq!(text(), system());
        lease.end(true);
        assert!(!root.exists());
    }

    #[test]
    fn a_folder_is_made_in_one_that_is_there_and_goes_with_its_last_images() {
        let base = std::env::temp_dir().join(format!("landbridge-made-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        let root = base.join("images");
        assert!(make(&root).unwrap_err().to_string().contains("must be there"));
        assert!(!base.exists());
        fs::create_dir(&base).unwrap();
        make(&root).unwrap();
        let leases = ["a", "b"].map(|letter| {
            let job = letter.repeat(NAME_LENGTH);
            make(&root).unwrap();
            Lease::new(&root, &job, 0).unwrap()
        });
        let [one, two] = leases;
        one.end(true);
        assert!(root.exists());
        two.end(true);
        assert!(base.exists() && !root.exists());
        // A folder that was not made for images stays.
        Lease::new(&base, &"c".repeat(NAME_LENGTH), 0).unwrap().end(true);
        assert!(base.exists());
        fs::remove_dir(&base).unwrap();
    }

    #[test]
    fn an_orphaned_agent_leaves_its_lease_and_the_last_holder_removes_the_images() {
        let root = std::env::temp_dir().join(format!("landbridge-cut-off-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let job = "a".repeat(NAME_LENGTH);
        let [one, two] = [0, 4].map(|name| Lease::with_folder(&root, &job, name).unwrap());
        fs::create_dir_all(root.join(&job).join("rank-0/1")).unwrap();
        one.end(false);
        // The other agent may have taken over the ranks of this one.
        assert!(root.join(&job).join("rank-0/1").exists() && lease_path(&root, &job, 0).exists());
        two.end(false);
        assert!(!root.exists(), "nobody is left");
        // This system does not know that the agent of the other system has ended.
        let one = Lease::with_folder(&root, &job, 0).unwrap();
        fs::create_dir_all(root.join(&job).join("rank-0/1")).unwrap();
        fs::write(lease_path(&root, &job, 7), "another").unwrap();
        one.end(false);
        assert!(root.join(&job).exists());
        let later = SystemTime::now() - LEASE_TIME - RENEWAL_INTERVAL;
        let other = OpenOptions::new().write(true).open(lease_path(&root, &job, 7)).unwrap();
        other.set_modified(later).unwrap();
        Lease::with_folder(&root, &"b".repeat(NAME_LENGTH), 0).unwrap().end(true);
        assert!(!root.exists(), "a day later the next job removes it");
    }

    #[test]
    fn what_could_not_be_removed_is_found_again() {
        let root = std::env::temp_dir().join(format!("landbridge-stays-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let [gone, own] = ["a", "b"].map(|letter| letter.repeat(NAME_LENGTH));
        let lease = Lease::with_folder(&root, &own, 4).unwrap();
        fs::write(lease_path(&root, &gone, 0), system()).unwrap();
        // A file in place of the folder, which the sweep cannot remove as a folder.
        for job in [&gone, &own] {
            fs::write(root.join(job), "").unwrap();
        }
        sweep(&root);
        assert!(lease_path(&root, &gone, 0).exists());
        lease.end(true);
        assert!(lease_path(&root, &own, 4).exists(), "its own job's neither");
        for job in [&gone, &own] {
            fs::remove_file(root.join(job)).unwrap();
            fs::create_dir_all(root.join(job).join("rank-0/1")).unwrap();
        }
        Lease::with_folder(&root, &"c".repeat(NAME_LENGTH), 0).unwrap().end(true);
        assert!(!root.exists(), "the next job removes them");
    }

    #[test]
    fn a_folder_that_another_job_removes_meanwhile_is_made_again() {
        let root = std::env::temp_dir().join(format!("landbridge-again-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        std::thread::scope(|scope| {
            for letter in ["a", "b", "c"] {
                let (root, job) = (&root, letter.repeat(NAME_LENGTH));
                scope.spawn(move || {
                    for _ in 0..300 {
                        Lease::with_folder(root, &job, 0).unwrap().end(true);
                    }
                });
            }
        });
        Lease::with_folder(&root, &"d".repeat(NAME_LENGTH), 0).unwrap().end(true);
        assert!(!root.exists(), "it is known to have been made");
    }
}
