//! The files that are installed in the directory of this program: the other binaries and the
//! provider.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

pub const PROVIDER_FILE: &str = "liblandbridge-fi.so";
/// The provider's file name as cargo builds it. libfabric loads any file that ends in `fi.so`, so
/// this file works, too.
const PROVIDER_FILE_OF_CARGO: &str = "liblandbridge_fi.so";

pub fn directory() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find out where landbridge itself is")?;
    program.parent().map(PathBuf::from).context("landbridge has no directory")
}

/// The checkout that this program was built in: the directory that holds `target/release` or
/// `target/debug` with this program. `None` for an installed program.
pub fn checkout() -> Option<PathBuf> {
    let directory = directory().ok()?;
    let target = directory.parent().filter(|path| path.ends_with("target"))?;
    target.parent().map(PathBuf::from)
}

/// The path of another Landbridge binary in the directory of this program.
pub fn path(name: &str) -> Result<PathBuf> {
    let path = directory()?.join(name);
    if !path.is_file() {
        bail!("{} is missing; build it with `make build`", path.display());
    }
    Ok(path)
}

/// The directory that holds the provider.
pub fn provider_directory() -> Result<PathBuf> {
    let directory = directory()?;
    let names = [PROVIDER_FILE, PROVIDER_FILE_OF_CARGO];
    if !names.iter().any(|name| directory.join(name).is_file()) {
        bail!("{PROVIDER_FILE} is missing in {}; build it with `make build`", directory.display());
    }
    Ok(directory)
}
