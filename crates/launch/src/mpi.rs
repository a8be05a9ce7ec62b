//! Prepares what a rank runs: the program's path, and the environment with which its MPI library
//! uses our provider.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::control::Job;
use crate::sibling;

/// What every rank of a host runs.
pub struct Plan {
    pub program: PathBuf,
    /// All of it: a rank inherits nothing else.
    pub environment: BTreeMap<String, String>,
    /// For `-v`.
    pub note: String,
}

pub fn prepare(job: &Job) -> Result<Plan> {
    let mut environment: BTreeMap<String, String> = std::env::vars().collect();
    environment.extend(job.environment.iter().cloned());
    environment.retain(|name, _| !name.starts_with("PMI_") && !name.starts_with("PMIX_"));
    if !Path::new(&job.wdir).is_dir() {
        bail!("the directory {} does not exist there; choose one with --wdir", job.wdir);
    }
    let path = environment.get("PATH").cloned().unwrap_or_default();
    let program = find_program(&job.program, &job.wdir, &path)?;
    set_provider(&mut environment)?;
    set_default(&mut environment, "MPIR_CVAR_CH4_NETMOD", "ofi");
    set_default(&mut environment, "MPIR_CVAR_NOLOCAL", "1");
    set_default(&mut environment, "I_MPI_FABRICS", "ofi");
    let note = format!("running {}", program.display());
    Ok(Plan { program, environment, note })
}

/// The user's own setting wins.
fn set_default(environment: &mut BTreeMap<String, String>, name: &str, value: &str) {
    environment.entry(name.to_string()).or_insert_with(|| value.to_string());
}

fn set_provider(environment: &mut BTreeMap<String, String>) -> Result<()> {
    set_default(environment, "FI_PROVIDER", "landbridge");
    if environment["FI_PROVIDER"] != "landbridge" {
        return Ok(());
    }
    let ours = sibling::provider_directory()?.display().to_string();
    // A setting that is there (Intel's mpivars makes one) still serves the library's own providers.
    let path = match environment.get("FI_PROVIDER_PATH") {
        Some(theirs) if !theirs.is_empty() && *theirs != ours => format!("{ours}:{theirs}"),
        _ => ours,
    };
    environment.insert("FI_PROVIDER_PATH".to_string(), path);
    Ok(())
}

/// As a shell finds it: names with a slash from `wdir`, others along `search`.
fn find_program(name: &str, wdir: &str, search: &str) -> Result<PathBuf> {
    if name.contains('/') {
        let path = Path::new(wdir).join(name);
        if is_executable(&path) {
            return Ok(path);
        }
        bail!("{} does not exist or is not executable", path.display());
    }
    let candidates = search.split(':').map(|directory| Path::new(directory).join(name));
    match candidates.into_iter().find(|path| is_executable(path)) {
        Some(path) => Ok(path),
        None => bail!("no program {name} along PATH ({search}); give its path, such as ./{name}"),
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
