//! Whose images lie in a folder, and that they go if nobody lives who could use them.
//!
//! Beside the folder of a job (`JOB`) each of its agents holds a lock on a file of its own (`.JOB.NAME`) for as long as it lives:
//! the kernel lets go of it, however the agent ends. So a folder of whose agents none holds its lock is a leftover. Several hosts
//! may have the same folder, if its file system hands on locks; numbers of processes would say nothing there.
//!
//! What may never happen: images of a job that runs are removed, or anything that is not a folder of images.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

/// Somebody who cleans up may hold it for a moment.
const ATTEMPTS: u32 = 100;
/// Letters of a job's name.
const NAME_LENGTH: usize = 32;

/// See the module head. It ends with this.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    _file: File,
}

impl Claim {
    pub fn new(root: &Path, job: &str, name: u32) -> Result<Claim> {
        let path = place(root, job, name);
        for _ in 0..ATTEMPTS {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            let opened = options.custom_flags(libc::O_NOFOLLOW).open(&path);
            let file = opened.with_context(|| format!("cannot make {}", path.display()))?;
            flock(&file, FlockOperation::LockExclusive)
                .with_context(|| format!("cannot lock {}", path.display()))?;
            // Whoever cleans up may have removed it before it was locked.
            let is_it = fs::metadata(&path)
                .is_ok_and(|it| file.metadata().is_ok_and(|own| own.ino() == it.ino()));
            if is_it {
                return Ok(Claim { path, _file: file });
            }
        }
        bail!("{} is removed again and again", path.display());
    }
}

/// The claim of a spare node, which has no ranks yet: a number that is no rank's. (Two nodes with the same one count as one.)
pub fn of_spare(cluster: u32, node: &str) -> u32 {
    let name = format!("{cluster}/{node}");
    let hash = name
        .bytes()
        .fold(2_166_136_261, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    hash | 1 << 31
}

/// Where the claim of another agent of this job is seen, if it has the same folder: so it finds there what others put there.
pub fn place(root: &Path, job: &str, name: u32) -> PathBuf {
    root.join(format!(".{job}.{name}"))
}

impl Claim {
    /// Lets go of it, and takes away what nobody claims any more: that of this job too, if it was the last.
    pub fn end(self) {
        let root = self.path.parent().map(Path::to_path_buf);
        drop(self);
        root.iter().for_each(|root| sweep(root));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes what is left in `root` of jobs that nobody claims any more. What cannot be removed stays.
pub fn sweep(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else { return };
    let mut claims: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let job = name.strip_prefix('.').and_then(|rest| rest.split_once('.'));
        if let Some((job, _)) =
            job.filter(|(job, number)| is_job(job) && number.parse::<u32>().is_ok())
        {
            claims.entry(job.to_string()).or_default().push(entry.path());
        }
    }
    for (job, paths) in claims {
        // Held until the folder is gone.
        let held: Vec<File> = paths.iter().filter_map(|path| seize(path)).collect();
        if held.len() == paths.len() {
            let _ = fs::remove_dir_all(root.join(job));
            paths.iter().for_each(|path| drop(fs::remove_file(path)));
        }
    }
}

/// The file, locked, if nobody else has done that.
fn seize(path: &Path) -> Option<File> {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
}

fn is_job(name: &str) -> bool {
    name.len() == NAME_LENGTH && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_claims_any_more_is_removed_and_nothing_else() {
        let root = std::env::temp_dir().join(format!("landbridge-claim-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let [gone, lives, half] = ["a", "b", "c"].map(|letter| letter.repeat(NAME_LENGTH));
        for name in [&gone, &lives, &half, "mine", &"d".repeat(NAME_LENGTH)] {
            fs::create_dir_all(root.join(name).join("rank-0/1")).unwrap();
        }
        let ours = Claim::new(&root, &lives, 0).unwrap();
        let _one_of_two = Claim::new(&root, &half, 0).unwrap();
        for (job, name) in [(&gone, 0), (&gone, 4), (&half, 2)] {
            // As its agent leaves it when it is killed.
            fs::write(root.join(format!(".{job}.{name}")), "").unwrap();
        }
        sweep(&root);
        let left = |name: &str| root.join(name).exists();
        assert!(!left(&gone) && !left(&format!(".{gone}.0")) && !left(&format!(".{gone}.4")));
        assert!(left(&lives) && left(&half) && left("mine"));
        assert!(left(&"d".repeat(NAME_LENGTH)), "it may be anybody's");
        assert!(
            place(&root, &lives, 0).exists() && !place(&root, &lives, of_spare(0, "n2")).exists()
        );
        drop(ours);
        assert!(!left(&format!(".{lives}.0")), "it ended well");
        fs::remove_dir_all(&root).unwrap();
    }
}
