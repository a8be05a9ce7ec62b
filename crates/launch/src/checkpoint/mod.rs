//! Images of processes (checkpoints): how they are taken and brought to life, and where they are kept.
//!
//! | file | does |
//! |---|---|
//! | `criu` | takes an image of a living process, and makes a process of one |
//! | `files` | lets files grow that a process writes |
//! | `pack` | makes files small, and sees whether they are what they were |
//! | `proof` | proves that an agent of this job has written a manifest |
//! | `store` | keeps images in a folder: whole ones, or none |
//! | `remote` | puts them into an object store as well |
//! | `claim` | says whose folder of images that is, and takes away those of jobs that are gone |
//!
//! Both are used by the agent that has started the process (`agent/keeper`), which knows when.

pub mod claim;
pub mod criu;
mod files;
mod pack;
pub mod proof;
pub mod remote;
pub mod store;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use landbridge_proto::setting::{
    CHECKPOINT, CHECKPOINT_DIR, CHECKPOINT_LEVEL, CHECKPOINT_OPEN, CHECKPOINT_SPACE, CRIU, Setting,
    Value,
};

use crate::control::Job;
use crate::folder;
use crate::ps::desk;
use claim::Claim;
use proof::Prover;
use remote::Remote;

/// What the user wants of images.
#[derive(Debug, Clone)]
pub struct Wish {
    /// How often one of each rank is taken.
    pub every: Duration,
    pub tool: PathBuf,
    /// At which they are compressed.
    pub level: i32,
    /// Bytes that those of a node may take.
    pub space: u64,
    /// Where all jobs of this user keep theirs.
    pub folder: PathBuf,
    /// The folder of the job in that, by the descriptor with which it was opened: whatever is renamed later, it stays the same.
    pub place: PathBuf,
    /// Proves whose images are; known with the job.
    pub prover: Option<Prover>,
    /// The object store that has them too, by its name, and once it is known how it is reached.
    pub store: Option<String>,
    /// Over networks too on which others may read what goes there.
    pub may_be_open: bool,
    pub remote: Option<Remote>,
    pub job: String,
    /// The claims of the nodes that may take over ranks, as far as these live: they are seen in `folder` if those have the same one.
    pub spares: Vec<u32>,
}

impl PartialEq for Wish {
    fn eq(&self, other: &Wish) -> bool {
        let text = |wish: &Wish| format!("{wish:?}");
        text(self) == text(other)
    }
}

impl Wish {
    /// Those of the nodes that may take over ranks that do not see what lies in the folder.
    pub fn blind(&self) -> Vec<u32> {
        let is_blind = |&&spare: &&u32| !claim::place(&self.folder, &self.job, spare).exists();
        self.spares.iter().filter(is_blind).copied().collect()
    }

    /// Makes the folder of a job, which only this user can open: images are memory of its processes. What jobs have left whose
    /// agents were killed goes. `name`: of this agent among those of the job; `spares`: the names of those that may take over its
    /// ranks.
    pub fn prepare(&mut self, job: &Job, name: u32, spares: &[u32]) -> Result<Claim> {
        if let Some(store) = &self.store {
            let said = |name: &str| job.environment.iter().find(|(known, _)| known == name);
            let variable = |name: &str| match said(name) {
                Some((_, text)) => Some(text.clone()),
                None => std::env::var(name).ok().filter(|text| !text.is_empty()),
            };
            let remote = Remote::new(store, self.may_be_open, variable);
            self.remote = Some(remote.context("checkpoint_dir")?.of_job(&job.id));
        }
        if self.folder.starts_with(desk::directory()) {
            desk::make(&desk::directory())?;
        }
        folder::check(&self.folder).context("checkpoint_dir")?;
        claim::sweep(&self.folder);
        let claim = Claim::with_folder(&self.folder, &job.id, name)?;
        (self.job, self.spares) = (job.id.clone(), spares.to_vec());
        self.prover = Some(Prover::new(&job.key)?);
        let folder = self.folder_of_job();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        self.place = folder::open_own(&folder)?;
        Ok(claim)
    }

    /// The folder of the job by its name, under which others find it too.
    pub fn folder_of_job(&self) -> PathBuf {
        self.folder.join(&self.job)
    }

    /// From a job's environment; `None`: no images.
    pub fn find(environment: &[(String, String)]) -> Option<Wish> {
        let text = |row: &Setting| {
            let variable = row.variable();
            let said = environment.iter().find(|(name, _)| *name == variable);
            said.map_or(row.default, |(_, text)| text).to_string()
        };
        let Ok(Value::Time(every)) = CHECKPOINT.parse(&text(&CHECKPOINT)) else { return None };
        let place = text(&CHECKPOINT_DIR);
        let store = remote::is_store(&place).then(|| place.clone());
        let folder = match place {
            own if own == CHECKPOINT_DIR.default || store.is_some() => default_folder(),
            named => named.into(),
        };
        let number = |row: &Setting| row.parse(&text(row)).ok().and_then(|value| value.number());
        let level = number(&CHECKPOINT_LEVEL).unwrap_or_default() as i32;
        let space = number(&CHECKPOINT_SPACE).unwrap_or(u64::MAX);
        let may_be_open = CHECKPOINT_OPEN.parse(&text(&CHECKPOINT_OPEN)) == Ok(Value::Switch(true));
        let (tool, remote) = (text(&CRIU).into(), None);
        let wish = Wish {
            every,
            tool,
            level,
            space,
            folder,
            place: PathBuf::new(),
            prover: None,
            store,
            may_be_open,
            remote,
            job: String::new(),
            spares: Vec::new(),
        };
        (!every.is_zero()).then_some(wish)
    }

    /// An image in so many seconds, in this folder.
    #[cfg(test)]
    pub fn sample(seconds: u64, folder: &std::path::Path) -> Wish {
        let often = ("LANDBRIDGE_CHECKPOINT".to_string(), format!("{seconds}s"));
        let wish = Wish::find(&[often]).expect("it says how often");
        let (folder, place, job) = (folder.to_path_buf(), folder.join("job"), "job".into());
        Wish {
            tool: "criu".into(),
            level: 0,
            folder,
            place,
            prover: Some(Prover::sample(1)),
            job,
            ..wish
        }
    }
}

/// Beside the sockets of launchers; only this user can look into it.
fn default_folder() -> PathBuf {
    desk::directory().join("checkpoints")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_taken_where_somebody_says_how_often() {
        let set = |name: &str, text: &str| (name.to_string(), text.to_string());
        assert_eq!(Wish::find(&[]), None);
        let mut environment = vec![set("LANDBRIDGE_CHECKPOINT", "30s")];
        let wish = Wish::find(&environment).unwrap();
        assert_eq!((wish.every, &wish.tool), (Duration::from_secs(30), &"criu".into()));
        assert!(wish.folder.ends_with("checkpoints"));
        environment.push(set("LANDBRIDGE_CHECKPOINT_DIR", "/data/images"));
        assert_eq!(Wish::find(&environment).unwrap().folder, PathBuf::from("/data/images"));
        environment[1].1 = "s3://bucket/x".into();
        let wish = Wish::find(&environment).unwrap();
        assert!(
            wish.folder.ends_with("checkpoints") && wish.store.as_deref() == Some("s3://bucket/x")
        );
    }
}
