//! Images of processes (checkpoints): how they are taken and brought to life, and where they are kept.
//!
//! | file | does |
//! |---|---|
//! | `criu` | takes an image of a living process, and makes a process of one |
//! | `files` | lets files grow that a process writes |
//! | `store` | keeps images in a folder: whole ones, or none |
//!
//! Both are used by the agent that has started the process (`agent/keeper`), which knows when.

pub mod criu;
mod files;
pub mod store;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use landbridge_proto::setting::{CHECKPOINT, CHECKPOINT_DIR, CRIU, Setting, Value};

use crate::ps::desk;

/// What the user wants of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// How often one of each rank is taken.
    pub every: Duration,
    pub tool: PathBuf,
    /// Where all jobs of this user keep theirs.
    pub folder: PathBuf,
}

impl Wish {
    /// Makes the folder of a job, which only this user can open: images are memory of its processes.
    pub fn prepare(&self, job: &str) -> Result<()> {
        if self.folder.starts_with(desk::directory()) {
            desk::make(&desk::directory())?;
        }
        let folder = self.folder.join(job);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        desk::check(&folder)
    }

    /// From a job's environment; `None`: no images.
    pub fn find(environment: &[(String, String)]) -> Option<Wish> {
        let text = |row: &Setting| {
            let variable = row.variable();
            let said = environment.iter().find(|(name, _)| *name == variable);
            said.map_or(row.default, |(_, text)| text).to_string()
        };
        let Ok(Value::Time(every)) = CHECKPOINT.parse(&text(&CHECKPOINT)) else { return None };
        let folder = match text(&CHECKPOINT_DIR) {
            own if own == CHECKPOINT_DIR.default => default_folder(),
            named => named.into(),
        };
        (!every.is_zero()).then(|| Wish { every, tool: text(&CRIU).into(), folder })
    }
}

/// The program that takes images, as far as this process's own environment says.
pub fn tool() -> PathBuf {
    let said = std::env::var_os(CRIU.variable()).filter(|file| !file.is_empty());
    said.map_or_else(|| CRIU.default.into(), PathBuf::from)
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
        assert_eq!((wish.every, wish.tool), (Duration::from_secs(30), "criu".into()));
        assert!(wish.folder.ends_with("checkpoints"));
        environment.push(set("LANDBRIDGE_CHECKPOINT_DIR", "/data/images"));
        assert_eq!(Wish::find(&environment).unwrap().folder, PathBuf::from("/data/images"));
    }
}
