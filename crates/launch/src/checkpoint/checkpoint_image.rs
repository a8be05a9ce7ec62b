//! Checkpoint images in a folder for each rank: an image in it is whole, or has no name.
//!
//! CRIU dumps an image into a folder with a temporary name, and then the image is *sealed*: every
//! file is compressed, and its length and SHA-256 go into a manifest. The manifest begins with a
//! tag that only an agent of this job can make ([`ManifestAuthenticator`]). All files are written
//! to the disk, and only then the folder gets its final name. So a folder with a final name was
//! whole once; whether its files are still unchanged is checked as the image is unpacked for use
//! ([`CheckpointImage::unpack`]).
//!
//! What may never happen: a process is restored from an image that is torn or was changed, or from
//! a file that no manifest of this job lists; a file is written that another process has mapped, or
//! that another user has put under the same name.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::criu::{DUMP_LOG, ExternalInodes, RESTORE_LOG};
use super::files;
use super::manifest_authenticator::ManifestAuthenticator;
use super::packed_file::PackedFile;
use crate::control::rank_state::CheckpointLocation;
use crate::output_log::Position;
use crate::pmi::server::Stage;

pub(super) const MANIFEST: &str = "manifest";
/// Folder of shared memory that a process maps from a file of the node, and that CRIU does not put
/// into the image.
const SHM_FOLDER: &str = "/dev/shm/";
/// Beginning of the name of MPICH's shared memory below [`SHM_FOLDER`]; a number of the job and the
/// rank's number follow.
const MPICH_PREFIX: &str = "mpich_shm_";

/// Replay position of a process at its image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayPosition {
    /// Determinants in the rank's log at the relay.
    pub determinants: u64,
    /// Frames that the rank has sent.
    pub sent: u64,
    /// Polls for messages.
    pub polls: u64,
    /// Requests to the process manager.
    pub asked: usize,
    pub stage: Stage,
    /// Positions in standard output and standard error.
    pub printed: [Position; 2],
    /// Bytes read of standard input.
    #[serde(default)]
    pub read: u64,
    /// Bytes of the nondeterminism record that the rank has replayed.
    #[serde(default)]
    pub recording_bytes: u64,
}

/// The description of an image in its manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageHeader {
    /// Number of the image, counted from 1 over all incarnations of the rank.
    pub number: u64,
    pub pid: u32,
    pub replay_position: ReplayPosition,
    pub inodes: ExternalInodes,
    /// Paths of files in `/dev/shm` that the process has mapped.
    pub shared: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    header: ImageHeader,
    files: Vec<PackedFile>,
}

/// A sealed image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointImage {
    pub folder: PathBuf,
    pub header: ImageHeader,
    /// Names of its stored files, and how many bytes each takes.
    pub files: Vec<(String, u64)>,
    pub manifest_bytes: u64,
    /// The tag with which the image's manifest begins.
    tag: String,
    authenticator: ManifestAuthenticator,
}

/// Makes the folder into which image `number` is dumped, below the folder of its rank.
pub fn begin(rank: &Path, number: u64) -> Result<PathBuf> {
    new_folder(rank.join(format!(".{number}")))
}

/// Makes an empty folder that only this user can open; deletes an older folder of that name.
pub(super) fn new_folder(folder: PathBuf) -> Result<PathBuf> {
    let _ = fs::remove_dir_all(&folder);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Copies the files that the process has mapped from `/dev/shm` into the image's folder, while the
/// process stands still; returns their paths.
///
/// # Errors If the process has more mapped from there than MPICH's file of this rank: memory that
/// other processes may have mapped too cannot be put back.
pub fn copy_shared(pid: u32, folder: &Path) -> Result<Vec<String>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).context("the process is gone")?;
    let paths = shared_paths(&maps)?;
    for (number, path) in paths.iter().enumerate() {
        fs::copy(path, folder.join(format!("shared-{number}")))
            .with_context(|| format!("cannot copy {path}"))?;
    }
    Ok(paths)
}

/// Paths in `/dev/shm` among the shared mappings that proc_pid_maps(5) lists.
fn shared_paths(maps: &str) -> Result<Vec<String>> {
    let mut paths: Vec<String> = Vec::new();
    for line in maps.lines() {
        // The fields are addresses, rights, offset, device and inode; the rest is a path, which
        // begins after blanks.
        let mut fields = line.splitn(6, ' ');
        let is_shared = fields.nth(1).is_some_and(|rights| rights.ends_with('s'));
        let path = fields.nth(3).unwrap_or_default().trim_start();
        let Some(name) = path.strip_prefix(SHM_FOLDER).filter(|_| is_shared) else { continue };
        // No other process can open a file without a name, and CRIU puts its content into the
        // image.
        if name.ends_with(" (deleted)") {
            continue;
        }
        if !is_of_mpich(name) {
            bail!("it has {path} mapped, shared memory that is not MPICH's");
        }
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_string());
        }
    }
    Ok(paths)
}

fn is_of_mpich(name: &str) -> bool {
    let parts = name.strip_prefix(MPICH_PREFIX).and_then(|rest| rest.split_once('_'));
    parts.is_some_and(|(job, rank)| {
        u32::from_str_radix(job, 16).is_ok() && rank.parse::<u32>().is_ok()
    })
}

/// Makes an image of the files in `folder`, compressed at this Zstandard level (0: not compressed).
/// On failure the folder is deleted.
pub fn seal(
    folder: &Path,
    header: ImageHeader,
    level: i32,
    authenticator: &ManifestAuthenticator,
) -> Result<CheckpointImage> {
    let sealed = files::forget_sizes(folder)
        .and_then(|()| seal_as_it_is(folder, header, level, authenticator));
    if sealed.is_err() {
        let _ = fs::remove_dir_all(folder);
    }
    sealed
}

pub fn seal_as_it_is(
    folder: &Path,
    header: ImageHeader,
    level: i32,
    authenticator: &ManifestAuthenticator,
) -> Result<CheckpointImage> {
    let names = names(folder)?.into_iter();
    let files =
        names.map(|name| PackedFile::pack(folder, name, level)).collect::<Result<Vec<_>>>()?;
    let listed = files.iter().map(|entry| (entry.stored_name(), entry.stored)).collect();
    let text = serde_json::to_string(&Manifest { header: header.clone(), files })?;
    let (tag, authenticator) = (authenticator.tag(&text), authenticator.clone());
    let mut manifest = File::create(folder.join(MANIFEST))?;
    writeln!(manifest, "{tag}\n{text}")?;
    manifest.sync_all()?;
    let manifest_bytes = manifest.metadata()?.len();
    File::open(folder)?.sync_all()?;
    let rank = folder.parent().context("a checkpoint has a folder around it")?;
    let sealed = rank.join(header.number.to_string());
    let _ = fs::remove_dir_all(&sealed);
    fs::rename(folder, &sealed)?;
    File::open(rank)?.sync_all()?;
    Ok(CheckpointImage {
        folder: sealed,
        header,
        files: listed,
        manifest_bytes,
        tag,
        authenticator,
    })
}

/// An image as CRIU needs it, which may be a copy in a folder of its own; dropping it deletes the
/// copy.
#[derive(Debug)]
pub struct UnpackedImage {
    pub folder: PathBuf,
    is_copy: bool,
}

impl Drop for UnpackedImage {
    fn drop(&mut self) {
        if self.is_copy {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Parses a manifest and verifies its tag, which must be `wanted`.
fn parse(text: &str, wanted: &str, authenticator: &ManifestAuthenticator) -> Result<Manifest> {
    let (tag, rest) = text.split_once('\n').unwrap_or_default();
    let rest = rest.trim_end_matches('\n');
    if !authenticator.verify(rest, tag) {
        bail!("its manifest is damaged, or no agent of this job has written it");
    }
    if tag != wanted {
        bail!("it is another checkpoint");
    }
    Ok(serde_json::from_str(rest)?)
}

impl CheckpointImage {
    /// An image that another agent has sealed, from the text of its manifest. `folder` need not
    /// exist.
    pub fn of(
        folder: PathBuf,
        text: &str,
        tag: &str,
        authenticator: &ManifestAuthenticator,
    ) -> Result<CheckpointImage> {
        let Manifest { header, files } = parse(text, tag, authenticator)?;
        let files = files.iter().map(|entry| (entry.stored_name(), entry.stored)).collect();
        let (manifest_bytes, tag) = (text.len() as u64, tag.to_string());
        Ok(CheckpointImage {
            folder,
            header,
            files,
            manifest_bytes,
            tag,
            authenticator: authenticator.clone(),
        })
    }

    /// An image that another agent has sealed and that lies in this folder.
    pub fn find(
        folder: PathBuf,
        tag: &str,
        authenticator: &ManifestAuthenticator,
    ) -> Result<CheckpointImage> {
        let text = fs::read_to_string(folder.join(MANIFEST)).context("it is not here")?;
        CheckpointImage::of(folder, &text, tag, authenticator)
    }

    /// Where other nodes find this image, and the tag that identifies the image.
    pub fn location(&self) -> CheckpointLocation {
        let names: Vec<_> = self.folder.iter().map(|part| part.to_string_lossy()).collect();
        let path = names[names.len().saturating_sub(2)..].join("/");
        CheckpointLocation { path, tag: self.tag.clone() }
    }

    /// Unpacks the image as it was dumped, after a check that every file is as it was sealed.
    pub fn unpack(&self) -> Result<UnpackedImage> {
        let text = fs::read_to_string(self.folder.join(MANIFEST)).context("it has no manifest")?;
        let manifest = parse(&text, &self.tag, &self.authenticator)?;
        let is_copy = manifest.files.iter().any(|entry| entry.is_packed);
        let is_listed = |name: &String| manifest.files.iter().any(|entry| entry.name == *name);
        // CRIU reads every file with a name that CRIU knows, so an unlisted file must not be there.
        if !is_copy && let Some(name) = names(&self.folder)?.iter().find(|name| !is_listed(name)) {
            bail!("{name} is none of its files");
        }
        let folder = if is_copy {
            let name = format!(".{}.out", self.header.number);
            new_folder(self.folder.with_file_name(name))?
        } else {
            self.folder.clone()
        };
        let unpacked = UnpackedImage { folder, is_copy };
        for entry in &manifest.files {
            entry.unpack(&self.folder, &unpacked.folder)?;
        }
        Ok(unpacked)
    }

    /// Reads one of its files, after a check that it is as it was sealed.
    pub fn read_file(&self, name: &str) -> Result<Vec<u8>> {
        let text = fs::read_to_string(self.folder.join(MANIFEST)).context("it has no manifest")?;
        let manifest = parse(&text, &self.tag, &self.authenticator)?;
        let entry = manifest.files.iter().find(|entry| entry.name == name);
        let entry = entry.with_context(|| format!("it has no file {name}"))?;
        if !entry.is_packed {
            entry.unpack(&self.folder, &self.folder)?;
            return Ok(fs::read(self.folder.join(name))?);
        }
        let folder = format!(".{}.{name}", self.header.number);
        let folder = new_folder(self.folder.with_file_name(folder))?;
        let bytes =
            entry.unpack(&self.folder, &folder).and_then(|()| Ok(fs::read(folder.join(name))?));
        let _ = fs::remove_dir_all(folder);
        bytes
    }

    /// Puts back the files that the process had mapped from `/dev/shm`.
    pub fn restore_shared_memory(&self, unpacked: &UnpackedImage) -> Result<()> {
        for (number, path) in self.header.shared.iter().enumerate() {
            let mut copy = File::open(unpacked.folder.join(format!("shared-{number}")))?;
            let written = write_new(path, &mut copy);
            written.with_context(|| format!("cannot write {path}"))?;
        }
        Ok(())
    }

    /// Bytes of the stored files and the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum::<u64>() + self.manifest_bytes
    }

    pub fn remove(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
impl Default for CheckpointImage {
    fn default() -> CheckpointImage {
        let (folder, header, files) = Default::default();
        let authenticator = ManifestAuthenticator::sample(1);
        CheckpointImage {
            folder,
            header,
            files,
            manifest_bytes: 0,
            tag: String::new(),
            authenticator,
        }
    }
}

/// Writes a new file in place of whatever has this name: another user may have put a link there.
fn write_new(path: &str, from: &mut File) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => (),
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    io::copy(from, &mut file).map(drop)
}

/// Sorted names of the files of an image, without the manifest and CRIU's logs.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if ![MANIFEST, DUMP_LOG, RESTORE_LOG].contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::super::packed_file::packed;
    use super::*;

    fn rank(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("landbridge-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn sealed(rank: &Path, number: u64, level: i32) -> CheckpointImage {
        let folder = begin(rank, number).unwrap();
        fs::write(folder.join("pages-1.img"), vec![7; 200_000]).unwrap();
        fs::write(folder.join("core-1.img"), b"core").unwrap();
        fs::write(folder.join(DUMP_LOG), b"log").unwrap();
        let header = ImageHeader { number, pid: 42, ..ImageHeader::default() };
        seal_as_it_is(&folder, header, level, &ManifestAuthenticator::sample(1)).unwrap()
    }

    #[test]
    fn an_image_is_as_it_was_sealed_or_it_is_refused() {
        let rank = rank("images");
        let image = sealed(&rank, 1, 0);
        image.unpack().unwrap();
        // Logs may change after the image was sealed.
        fs::write(image.folder.join(RESTORE_LOG), b"more").unwrap();
        image.unpack().unwrap();
        // Another image with the same number, which is whole.
        let folder = begin(&rank, 1).unwrap();
        fs::write(folder.join("core-1.img"), b"other").unwrap();
        let other =
            seal_as_it_is(&folder, image.header.clone(), 0, &ManifestAuthenticator::sample(1))
                .unwrap();
        other.unpack().unwrap();
        assert!(image.unpack().is_err());
        fs::write(image.folder.join("creds-1.img"), b"put there").unwrap();
        let error = other.unpack().unwrap_err();
        assert!(error.to_string().contains("creds-1.img is none of its files"), "{error}");
        type Damage = (&'static str, fn(&Path));
        let damage: [Damage; 4] = [
            ("a bit", |file| {
                let mut bytes = fs::read(file).unwrap();
                bytes[0] ^= 1;
                fs::write(file, bytes).unwrap();
            }),
            ("the end", |file| {
                let bytes = fs::read(file).unwrap();
                fs::write(file, &bytes[..bytes.len() - 2]).unwrap();
            }),
            ("more", |file| {
                let mut bytes = fs::read(file).unwrap();
                bytes.extend(b"{}");
                fs::write(file, bytes).unwrap();
            }),
            ("all", |file| fs::remove_file(file).unwrap()),
        ];
        for ((name, spoil), level) in damage.into_iter().flat_map(|it| [(it, 0), (it, 1)]) {
            for file in ["pages-1.img", "core-1.img", MANIFEST] {
                let image = sealed(&rank, 2, level);
                let unpacked = image.unpack().unwrap();
                assert_eq!(fs::read(unpacked.folder.join("core-1.img")).unwrap(), b"core");
                let is_packed = level > 0 && file != MANIFEST;
                let path =
                    if is_packed { packed(&image.folder, file) } else { image.folder.join(file) };
                spoil(&path);
                assert!(image.unpack().is_err(), "{name} of {file}, level {level}");
            }
        }
        let left: Vec<_> = fs::read_dir(&rank).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        fs::remove_dir_all(&rank).unwrap();
    }

    #[test]
    fn another_agent_finds_an_image_by_its_sum() {
        let rank = rank("found");
        let image = sealed(&rank, 3, 1);
        let CheckpointLocation { path, tag } = image.location();
        let ours = ManifestAuthenticator::sample(1);
        let found = CheckpointImage::find(rank.with_file_name(path), &tag, &ours).unwrap();
        assert_eq!(found, image);
        found.unpack().unwrap();
        assert!(CheckpointImage::find(image.folder.clone(), &"0".repeat(64), &ours).is_err());
        assert!(CheckpointImage::find(rank.join("4"), &tag, &ours).is_err());
        fs::remove_dir_all(&rank).unwrap();
    }

    /// The image is whole, and its tag is valid for another key.
    #[test]
    fn an_image_of_which_somebody_else_has_written_the_manifest_is_refused() {
        let rank = rank("forged");
        let folder = begin(&rank, 1).unwrap();
        fs::write(folder.join("core-1.img"), b"core").unwrap();
        let header = ImageHeader { number: 1, ..ImageHeader::default() };
        let forged = seal_as_it_is(&folder, header, 0, &ManifestAuthenticator::sample(2)).unwrap();
        forged.unpack().unwrap();
        let (folder, tag) = (forged.folder.clone(), forged.location().tag);
        let error =
            CheckpointImage::find(folder, &tag, &ManifestAuthenticator::sample(1)).unwrap_err();
        assert!(error.to_string().contains("no agent of this job has written it"), "{error}");
        let taken = CheckpointImage { authenticator: ManifestAuthenticator::sample(1), ..forged };
        assert!(taken.unpack().is_err());
        fs::remove_dir_all(&rank).unwrap();
    }

    #[test]
    fn shared_memory_of_others_is_in_no_image() {
        let row = |rights: &str, path: &str| {
            format!("7f0000000000-7f0000001000 {rights} 00000000 00:1a 7       {path}\n")
        };
        let own = "/dev/shm/mpich_shm_8f3b2a1c_12";
        let maps = row("rw-s", own) + &row("r--s", own) + &row("rw-p", "/dev/shm/private");
        let maps = maps + &row("rw-s", "/dev/shm/gone (deleted)");
        let maps = maps + &row("rw-s", "/x/dev/shm/y") + "7f00-7f01 rw-p 00000000 00:00 0 \n";
        assert_eq!(shared_paths(&maps).unwrap(), [own]);
        for other in ["psm_1", "mpich_shm_8f3b2a1c_", "mpich_shm_x_1", "mpich_shm_1"] {
            let maps = row("rw-s", &format!("/dev/shm/{other}"));
            assert!(shared_paths(&maps).is_err(), "{other}");
        }
    }

    #[test]
    fn a_link_in_the_way_is_not_followed() {
        let rank = rank("links");
        let folder = begin(&rank, 4).unwrap();
        let (victim, place) = (folder.join("victim"), folder.join("place"));
        fs::write(&victim, b"theirs").unwrap();
        std::os::unix::fs::symlink(&victim, &place).unwrap();
        fs::write(folder.join("ours"), b"ours").unwrap();
        let mut ours = File::open(folder.join("ours")).unwrap();
        write_new(place.to_str().unwrap(), &mut ours).unwrap();
        assert_eq!(
            (fs::read(&victim).unwrap(), fs::read(&place).unwrap()),
            (b"theirs".into(), b"ours".into())
        );
        fs::remove_dir_all(&rank).unwrap();
    }

    #[test]
    fn what_was_not_sealed_has_no_name() {
        let rank = rank("unsealed");
        let folder = begin(&rank, 3).unwrap();
        fs::write(folder.join("core-1.img"), b"core").unwrap();
        assert!(!rank.join("3").exists());
        // Another attempt begins with an empty folder.
        assert!(fs::read_dir(begin(&rank, 3).unwrap()).unwrap().next().is_none());
        fs::remove_dir_all(&rank).unwrap();
    }
}
