//! Checkpoint images of processes: how they are taken and restored, and where they are stored.
//!
//! | file | does |
//! |---|---|
//! | `criu` | takes an image of a running process, and restores a process from an image |
//! | `files` | removes the sizes of files that a process writes from its image |
//! | `packed_file` | compresses files, and checks that they are unchanged |
//! | `manifest_authenticator` | authenticates manifests with the job's key |
//! | `checkpoint_image` | stores whole images in a folder |
//! | `object_store` | stores images in an object store as well |
//! | `lease` | records whose images lie in a folder, and deletes leftover images |
//!
//! The agent that has started a process decides when to take and restore images
//! (`agent/checkpoint_scheduler`).

pub mod checkpoint_image;
pub mod criu;
mod files;
pub mod lease;
pub mod manifest_authenticator;
pub mod object_store;
mod packed_file;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use landbridge_proto::setting::{
    CHECKPOINT, CHECKPOINT_DIR, CHECKPOINT_LEVEL, CHECKPOINT_OPEN, CHECKPOINT_SPACE, CRIU, Setting,
    Value,
};

use crate::control::Job;
use crate::control::rank_state::CheckpointLocation;
use crate::folder;
use crate::mpi;
use crate::ps::status_socket;
use checkpoint_image::CheckpointImage;
use lease::Lease;
use manifest_authenticator::ManifestAuthenticator;
use object_store::ObjectStore;

/// The user's settings for checkpoint images, and the job's folders and keys for them.
#[derive(Debug, Clone)]
pub struct CheckpointConfig {
    /// Interval at which an image of each rank is taken.
    pub every: Duration,
    pub tool: PathBuf,
    /// Zstandard level at which images are compressed; 0: not compressed.
    pub level: i32,
    /// Most bytes that the images of a node may take.
    pub space: u64,
    /// Folder with the image folders of all jobs of this user.
    pub folder: PathBuf,
    /// The job's folder in `folder`, as a path of the opened descriptor: later renames do not
    /// change which folder this is.
    pub job_folder: PathBuf,
    /// Authenticates the job's images; set once the job is known.
    pub authenticator: Option<ManifestAuthenticator>,
    /// URL of the object store that stores images as well, if there is one.
    pub object_store_url: Option<String>,
    /// Images may go to the object store over networks without encryption.
    pub allows_cleartext: bool,
    /// The object store, once the job is known.
    pub object_store: Option<ObjectStore>,
    pub job: String,
    /// Images of all ranks of a node are taken together (`recover_unit=node`).
    pub in_rounds: bool,
    /// Lease numbers of the living nodes that may take over ranks: their lease files are visible in
    /// `folder` if these nodes share the folder.
    pub spares: Vec<u32>,
}

impl PartialEq for CheckpointConfig {
    fn eq(&self, other: &CheckpointConfig) -> bool {
        let text = |config: &CheckpointConfig| format!("{config:?}");
        text(self) == text(other)
    }
}

impl CheckpointConfig {
    /// The spare nodes that do not see the files in the folder of images.
    pub fn unreachable_spares(&self) -> Vec<u32> {
        let is_unreachable =
            |&&spare: &&u32| !lease::lease_path(&self.folder, &self.job, spare).exists();
        self.spares.iter().filter(is_unreachable).copied().collect()
    }

    /// Finds the images that another node has taken, in a folder that this node sees as well or in
    /// the object store.
    pub fn locate(
        &self,
        locations: &[CheckpointLocation],
        deadline: Instant,
    ) -> Vec<Result<CheckpointImage>> {
        let object_store = self.object_store.as_ref().map(ObjectStore::fresh);
        let find = |one: &CheckpointLocation| {
            let authenticator = self.authenticator.as_ref().context("the job has no key")?;
            let folder: PathBuf = self.job_folder.join(&one.path);
            CheckpointImage::find(folder.clone(), &one.tag, authenticator).or_else(|error| {
                match &object_store {
                    Some(object_store) => {
                        object_store.find(folder, &one.tag, authenticator, deadline)
                    }
                    None => Err(error),
                }
            })
        };
        locations.iter().map(|one| find(one).with_context(|| one.path.clone())).collect()
    }

    /// Makes the folder of a job, which only this user can open, because images hold the memory of
    /// processes; deletes leftover images of other jobs. `name`: lease number of this agent;
    /// `spares`: lease numbers of the nodes that may take over its ranks.
    pub fn prepare(&mut self, job: &Job, name: u32, spares: &[u32]) -> Result<Lease> {
        if let Some(object_store_url) = &self.object_store_url {
            let said = |name: &str| job.environment.iter().find(|(known, _)| known == name);
            let variable = |name: &str| match said(name) {
                Some((_, text)) => Some(text.clone()),
                None => std::env::var(name).ok().filter(|text| !text.is_empty()),
            };
            let object_store = ObjectStore::new(object_store_url, self.allows_cleartext, variable);
            self.object_store = Some(object_store.context("checkpoint_dir")?.of_job(&job.id));
        }
        if self.folder.starts_with(status_socket::directory()) {
            status_socket::make(&status_socket::directory())?;
        }
        folder::check(&self.folder).context("checkpoint_dir")?;
        lease::sweep(&self.folder);
        let lease = Lease::with_folder(&self.folder, &job.id, name)?;
        (self.job, self.spares) = (job.id.clone(), spares.to_vec());
        self.authenticator = Some(ManifestAuthenticator::new(&job.key)?);
        let folder = self.job_folder_path();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        self.job_folder = folder::open_own(&folder)?;
        Ok(lease)
    }

    /// Path of the job's folder by its name, under which other nodes find it.
    pub fn job_folder_path(&self) -> PathBuf {
        self.folder.join(&self.job)
    }

    /// The configuration from a job's environment; `None`: no images are to be taken.
    pub fn find(environment: &[(String, String)]) -> Option<CheckpointConfig> {
        let text = |row: &Setting| {
            let variable = row.variable();
            let said = environment.iter().find(|(name, _)| *name == variable);
            said.map_or(row.default, |(_, text)| text).to_string()
        };
        let Ok(Value::Time(every)) = CHECKPOINT.parse(&text(&CHECKPOINT)) else { return None };
        let place = text(&CHECKPOINT_DIR);
        let object_store_url = object_store::is_object_store(&place).then(|| place.clone());
        let folder = match place {
            own if own == CHECKPOINT_DIR.default || object_store_url.is_some() => default_folder(),
            named => named.into(),
        };
        let number = |row: &Setting| row.parse(&text(row)).ok().and_then(|value| value.number());
        let level = number(&CHECKPOINT_LEVEL).unwrap_or_default() as i32;
        let space = number(&CHECKPOINT_SPACE).unwrap_or(u64::MAX);
        let allows_cleartext =
            CHECKPOINT_OPEN.parse(&text(&CHECKPOINT_OPEN)) == Ok(Value::Switch(true));
        let (tool, object_store) = (text(&CRIU).into(), None);
        let config = CheckpointConfig {
            every,
            tool,
            level,
            space,
            folder,
            job_folder: PathBuf::new(),
            authenticator: None,
            object_store_url,
            allows_cleartext,
            object_store,
            job: String::new(),
            in_rounds: mpi::begin_again_together(environment),
            spares: Vec::new(),
        };
        (!every.is_zero()).then_some(config)
    }

    /// A configuration with an image every so many seconds, in this folder.
    #[cfg(test)]
    pub fn sample(seconds: u64, folder: &std::path::Path) -> CheckpointConfig {
        let often = ("LANDBRIDGE_CHECKPOINT".to_string(), format!("{seconds}s"));
        let config = CheckpointConfig::find(&[often]).expect("it says how often");
        let (folder, job_folder, job) = (folder.to_path_buf(), folder.join("job"), "job".into());
        CheckpointConfig {
            tool: "criu".into(),
            level: 0,
            folder,
            job_folder,
            authenticator: Some(ManifestAuthenticator::sample(1)),
            job,
            ..config
        }
    }
}

/// The default folder of images, next to the launchers' status sockets; only this user can open it.
fn default_folder() -> PathBuf {
    status_socket::directory().join("checkpoints")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_taken_where_somebody_says_how_often() {
        let set = |name: &str, text: &str| (name.to_string(), text.to_string());
        assert_eq!(CheckpointConfig::find(&[]), None);
        let mut environment = vec![set("LANDBRIDGE_CHECKPOINT", "30s")];
        let config = CheckpointConfig::find(&environment).unwrap();
        assert_eq!((config.every, &config.tool), (Duration::from_secs(30), &"criu".into()));
        assert!(config.folder.ends_with("checkpoints"));
        environment.push(set("LANDBRIDGE_CHECKPOINT_DIR", "/data/images"));
        assert_eq!(
            CheckpointConfig::find(&environment).unwrap().folder,
            PathBuf::from("/data/images")
        );
        environment[1].1 = "s3://bucket/x".into();
        let config = CheckpointConfig::find(&environment).unwrap();
        assert!(
            config.folder.ends_with("checkpoints")
                && config.object_store_url.as_deref() == Some("s3://bucket/x")
        );
    }
}
