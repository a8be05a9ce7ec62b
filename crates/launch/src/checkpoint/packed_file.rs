//! Compression and checksums of the files of a checkpoint image.
//!
//! In: a file, and the Zstandard level at which the file is compressed (0: not compressed). Out:
//! the [`PackedFile`] with length and SHA-256 of the original content, and the stored file, synced
//! to the disk. The file is read once for both.
//!
//! What may never happen: a file with changed content passes the check.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Ending of a compressed file's name.
const ENDING: &str = ".zst";
/// Bytes read with one call.
const PIECE_BYTES: usize = 1 << 18;

/// The description of a file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedFile {
    pub name: String,
    /// Length of the content before compression.
    bytes: u64,
    sha256: String,
    pub is_packed: bool,
    /// Bytes of the stored file.
    pub stored: u64,
}

impl PackedFile {
    /// Compresses a file at this level (0: not at all), and syncs it to the disk.
    pub fn pack(folder: &Path, name: String, level: i32) -> Result<PackedFile> {
        let path = folder.join(&name);
        let mut file = File::open(&path).with_context(|| format!("cannot read {name}"))?;
        if level == 0 {
            let (bytes, sha256) = digest(&mut file, |_| Ok(()))?;
            file.sync_all()?;
            return Ok(PackedFile { name, bytes, sha256, is_packed: false, stored: bytes });
        }
        let packed = folder.join(format!("{name}{ENDING}"));
        let mut to = zstd::Encoder::new(new_file(&packed)?, level)?;
        to.include_checksum(false)?;
        let (bytes, sha256) = digest(&mut file, |piece| to.write_all(piece))?;
        let to = to.finish()?;
        to.sync_all()?;
        let stored = to.metadata()?.len();
        fs::remove_file(path)?;
        Ok(PackedFile { name, bytes, sha256, is_packed: true, stored })
    }

    /// Name of the stored file in the image's folder.
    pub fn stored_name(&self) -> String {
        if self.is_packed { format!("{}{ENDING}", self.name) } else { self.name.clone() }
    }

    /// Checks that the content is unchanged; writes a compressed file's content to a file in the
    /// folder `to`.
    pub fn unpack(&self, folder: &Path, to: &Path) -> Result<()> {
        let damaged = || format!("{} is damaged", self.name);
        let file = File::open(folder.join(self.stored_name()));
        let mut file = file.with_context(|| format!("{} is gone", self.name))?;
        let (bytes, sha256) = if self.is_packed {
            let mut left = self.bytes;
            let mut whole = new_file(&to.join(&self.name))?;
            let mut from = zstd::Decoder::new(file)?;
            let found = digest(&mut from, |piece| {
                // A corrupt file may decompress to far more bytes.
                left = left.checked_sub(piece.len() as u64).ok_or(io::ErrorKind::InvalidData)?;
                whole.write_all(piece)
            });
            found.with_context(damaged)?
        } else {
            digest(&mut file, |_| Ok(()))?
        };
        if (bytes, &sha256) != (self.bytes, &self.sha256) {
            bail!(damaged());
        }
        Ok(())
    }
}

/// Path of the compressed file of `name`.
#[cfg(test)]
pub fn packed(folder: &Path, name: &str) -> std::path::PathBuf {
    folder.join(format!("{name}{ENDING}"))
}

/// Creates a file that only its user may read.
pub fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

fn digest(
    from: &mut impl Read,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<(u64, String)> {
    let (mut sum, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok((bytes, hex(&sum.finalize()))),
            count => {
                sum.update(&buffer[..count]);
                take(&buffer[..count])?;
                bytes += count as u64;
            }
        }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_as_it_was_or_refused() {
        let folder = std::env::temp_dir().join(format!("landbridge-pack-{}", std::process::id()));
        let to = folder.join("to");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&to).unwrap();
        let content: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7 * (at % 5)) as u8).collect();
        for level in [0, 1, 9] {
            fs::write(folder.join("a"), &content).unwrap();
            let entry = PackedFile::pack(&folder, "a".into(), level).unwrap();
            assert_eq!((entry.bytes, entry.is_packed), (3_000_000, level > 0));
            let stored = folder.join(entry.stored_name());
            assert_eq!(fs::metadata(&stored).unwrap().len(), entry.stored);
            assert!(level == 0 || (entry.stored < 2_000_000 && !folder.join("a").exists()));
            entry.unpack(&folder, &to).unwrap();
            if level > 0 {
                assert!(fs::read(to.join("a")).unwrap() == content);
            }
            let whole = fs::read(&stored).unwrap();
            for at in [5, whole.len() / 2, whole.len() - 1] {
                let mut bytes = whole.clone();
                bytes[at] ^= 0x40;
                fs::write(&stored, &bytes).unwrap();
                assert!(entry.unpack(&folder, &to).is_err(), "level {level}, byte {at}");
                fs::write(&stored, &whole[..at]).unwrap();
                assert!(entry.unpack(&folder, &to).is_err(), "level {level}, {at} bytes");
            }
            fs::remove_file(&stored).unwrap();
            let error = entry.unpack(&folder, &to).unwrap_err();
            assert!(format!("{error:#}").contains("a is gone"), "{error:#}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
