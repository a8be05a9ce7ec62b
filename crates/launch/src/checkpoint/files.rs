//! Removes the sizes of files that a process writes from the process's image.
//!
//! In: the image's list of files (`files.img`). Out: the same list without size and checksum for
//! files that are open for writing; CRIU then does not check the size. CRIU refuses to restore a
//! process if one of its files has another size by then. For a library this check is right. But a
//! file that the process writes has usually grown since, and the restored process writes the same
//! bytes again at the same positions.
//!
//! The list is a magic number and messages in the wire format of protocol buffers, each after its
//! length. This module parses the fields that it needs, and copies everything else unchanged.
//!
//! What may never happen: a list that this module cannot parse is changed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Magic numbers at the beginning of the list.
const MAGIC: [u32; 2] = [0x5456_4319, 0x5630_3138];
/// Field of an entry that describes a file in a file system.
const FILE: u64 = 3;
/// Fields of that description: open flags (`FLAGS`), size (`SIZE`), and a checksum of the content
/// with its parameters (`CHECKSUM`).
const FLAGS: u64 = 2;
const SIZE: u64 = 8;
const CHECKSUM: std::ops::RangeInclusive<u64> = 12..=14;

/// Removes the sizes in the image in this folder, which is not sealed yet.
pub fn forget_sizes(folder: &Path) -> Result<()> {
    let path = folder.join("files.img");
    let list = fs::read(&path).context("the checkpoint has no list of files")?;
    let changed =
        without_sizes(&list).context("the checkpoint's list of files is not understood")?;
    fs::write(&path, changed)?;
    Ok(())
}

fn without_sizes(list: &[u8]) -> Option<Vec<u8>> {
    let (magic, mut rest) = list.split_at_checked(8)?;
    if magic != MAGIC.map(u32::to_le_bytes).concat() {
        return None;
    }
    let mut changed = magic.to_vec();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk::<4>()?;
        let (entry, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let mut message = Vec::new();
        for field in fields(entry)? {
            match field.file() {
                Some(file) => put_message(&mut message, FILE, &without_size(file)?),
                None => message.extend_from_slice(field.whole),
            }
        }
        changed.extend_from_slice(&u32::try_from(message.len()).ok()?.to_le_bytes());
        changed.append(&mut message);
        rest = behind;
    }
    Some(changed)
}

fn without_size(file: &[u8]) -> Option<Vec<u8>> {
    let fields = fields(file)?;
    let flags = fields.iter().find(|field| field.number == FLAGS)?.value;
    let is_written = flags & libc::O_ACCMODE as u64 != libc::O_RDONLY as u64;
    let goes = |number: u64| is_written && (number == SIZE || CHECKSUM.contains(&number));
    let kept = fields.iter().filter(|field| !goes(field.number));
    Some(kept.flat_map(|field| field.whole).copied().collect())
}

struct Field<'a> {
    number: u64,
    /// Value of a varint field; 0 for other fields.
    value: u64,
    /// Bytes of a message or string field.
    body: Option<&'a [u8]>,
    /// All bytes of the field, with its key.
    whole: &'a [u8],
}

impl<'a> Field<'a> {
    fn file(&self) -> Option<&'a [u8]> {
        self.body.filter(|_| self.number == FILE)
    }
}

fn fields(message: &[u8]) -> Option<Vec<Field<'_>>> {
    let mut fields = Vec::new();
    let mut rest = message;
    while !rest.is_empty() {
        let start = rest;
        let key = take_number(&mut rest)?;
        let (mut value, mut body) = (0, None);
        match key & 7 {
            0 => value = take_number(&mut rest)?,
            1 => rest = rest.get(8..)?,
            2 => {
                let length = usize::try_from(take_number(&mut rest)?).ok()?;
                let (text, behind) = rest.split_at_checked(length)?;
                (body, rest) = (Some(text), behind);
            }
            5 => rest = rest.get(4..)?,
            _ => return None,
        }
        let whole = &start[..start.len() - rest.len()];
        fields.push(Field { number: key >> 3, value, body, whole });
    }
    Some(fields)
}

fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for place in 0..10 {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn put_message(to: &mut Vec<u8>, number: u64, body: &[u8]) {
    put_number(to, number << 3 | 2);
    put_number(to, body.len() as u64);
    to.extend_from_slice(body);
}

fn put_number(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(field: u64, value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_number(&mut bytes, field << 3);
        put_number(&mut bytes, value);
        bytes
    }

    fn message(field: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_message(&mut bytes, field, body);
        bytes
    }

    /// An entry of a file with these open flags; its name is long, so that lengths take two bytes.
    fn file(flags: i32, more: &[Vec<u8>]) -> Vec<u8> {
        let flags = number(FLAGS, flags as u64);
        let named = [number(1, 300), flags, number(3, 77), message(6, &[b'x'; 200])].concat();
        let body = [named, more.concat()].concat();
        [number(1, 1), number(2, 300), message(FILE, &body)].concat()
    }

    fn list(entries: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = MAGIC.map(u32::to_le_bytes).concat();
        for entry in entries {
            bytes.extend((entry.len() as u32).to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    #[test]
    fn what_is_written_may_grow_and_nothing_else_changes() {
        let both = [number(SIZE, 123_456), number(10, 0o100_644)];
        let mode = &both[1..];
        let other = [number(1, 17), number(2, 9), message(18, &[1, 2, 3]), vec![0x0d, 1, 2, 3, 4]];
        let before = list(&[
            file(libc::O_RDONLY, &both),
            other.concat(),
            file(libc::O_WRONLY | libc::O_APPEND, &both),
            file(libc::O_RDWR, &both),
        ]);
        let after = list(&[
            file(libc::O_RDONLY, &both),
            other.concat(),
            file(libc::O_WRONLY | libc::O_APPEND, mode),
            file(libc::O_RDWR, mode),
        ]);
        assert_eq!(without_sizes(&before), Some(after.clone()));
        assert_eq!(without_sizes(&after), Some(after));
    }

    #[test]
    fn what_is_not_such_a_list_is_left_alone() {
        let whole = list(&[file(libc::O_RDWR, &[number(SIZE, 5)])]);
        for length in 0..whole.len() {
            // A list without entries is valid.
            assert_eq!(without_sizes(&whole[..length]).is_some(), length == 8, "{length}");
        }
        let mut other = whole.clone();
        other[0] ^= 1;
        assert_eq!(without_sizes(&other), None);
        // A wire type that does not exist.
        assert_eq!(without_sizes(&list(&[vec![0x0b]])), None);
    }
}
