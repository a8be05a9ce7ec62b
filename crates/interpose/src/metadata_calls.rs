//! Calls that read names and attributes, and calls that change names.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record.
//! Open files follow a change of their name in the descriptor table.

use landbridge_proto::digest::digest;
use landbridge_proto::nondeterminism::{FileCall, PRECONDITION_WORDS};
use libc::{c_int, c_long};

use crate::change_times::mark_at;
use crate::compared_arguments::{directory_of, of_values};
use crate::descriptor_table::OPENS;
use crate::file_identity::{FileIdentity, FileKind, PATH_BYTES};
use crate::file_metadata::{
    directory_changed, identity_at, identity_behind, is_exempt_at, is_exempt_name, path_at,
    path_of_name,
};
use crate::file_status::status;
use crate::kernel_calls::{HERE, bytes, kernel, text};
use crate::path_changes::{NameEffect, PathAt, PathChange};
use crate::process_calls;
use crate::session::{CallDescription, EffectOutcome, Session, call_of};

/// Bytes of a recorded change of names before the two paths.
const CHANGE_BYTES: usize = 2 + 2;

impl Session {
    /// Handles a call that reads attributes of a path into `into`.
    ///
    /// # Safety
    /// The arguments are those of such a call: `path` is a C string, and `into` has `length` bytes.
    pub unsafe fn stat_path(
        &mut self,
        number: c_long,
        directory: u64,
        path: u64,
        into: u64,
        length: usize,
        arguments: [u64; 6],
    ) -> Option<i64> {
        // SAFETY: a path of the program's.
        let name = unsafe { text(path) };
        if name.is_empty() && length > 0 {
            // SAFETY: an empty path refers to the open directory or file.
            return unsafe { self.stat_open(number, directory, into, length, arguments) };
        }
        // SAFETY: the program's path.
        if unsafe { is_exempt_at((directory, path)) } {
            return None;
        }
        let call = call_of(number, [directory, 0, 0, 0, 0], name);
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, length) };
        Some(self.stat_into(
            call,
            CallDescription::Path("look at attributes", name),
            room,
            number,
            arguments,
        ))
    }

    /// Handles a call that reads attributes of an open file into `into`.
    ///
    /// # Safety
    /// `into` has `length` bytes.
    pub unsafe fn stat_open(
        &mut self,
        number: c_long,
        descriptor: u64,
        into: u64,
        length: usize,
        arguments: [u64; 6],
    ) -> Option<i64> {
        // The working directory has no descriptor.
        let is_here = descriptor as u32 == HERE as u32;
        if !is_here {
            self.table.get(descriptor)?;
        }
        let call = call_of(number, [descriptor, 0, 0, 0, 0], &[]);
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, length) };
        let path = if is_here { b"." } else { self.table.path_of(descriptor) };
        let about = CallDescription::Path("look at attributes", path);
        Some(self.stat_into(call, about, room, number, arguments))
    }

    fn stat_into(
        &mut self,
        call: FileCall,
        about: CallDescription<'_>,
        room: &mut [u8],
        number: c_long,
        arguments: [u64; 6],
    ) -> i64 {
        if !self.is_live() {
            return self.replay(call, about, &mut [room]);
        }
        // SAFETY: the arguments are those of the program's call.
        let result = unsafe { process_calls::perform(number, arguments) };
        let written = if result == 0 { &*room } else { &[] };
        self.note(call, result, &[written]);
        result
    }

    /// Handles a call that reads the target of a symbolic link.
    ///
    /// # Safety
    /// The arguments are those of `readlinkat`.
    pub unsafe fn read_link(
        &mut self,
        number: c_long,
        directory: u64,
        path: u64,
        into: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        let length = if number == libc::SYS_readlink { arguments[2] } else { arguments[3] };
        // SAFETY: the program's path and buffer.
        let (name, room) = unsafe { (text(path), bytes(into, length as usize)) };
        let call = call_of(number, [directory, length, 0, 0, 0], name);
        if !self.is_live() {
            return Some(self.replay(
                call,
                CallDescription::Path("look at a link", name),
                &mut [room],
            ));
        }
        // SAFETY: the caller's promise.
        let result = unsafe { process_calls::perform(number, arguments) };
        self.note(call, result, &[&room[..result.max(0) as usize]]);
        Some(result)
    }

    /// Handles a call that reads extended attributes of a path (xattr(7)).
    ///
    /// # Safety
    /// `path` and `attribute` are C strings or 0, and `into` has `length` bytes.
    pub unsafe fn read_attribute(
        &mut self,
        number: c_long,
        path: u64,
        attribute: u64,
        into: u64,
        length: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        // SAFETY: the program's paths and buffer.
        let (name, attribute, room) =
            unsafe { (text(path), text(attribute), bytes(into, length as usize)) };
        if is_exempt_name(name) {
            return None;
        }
        let words = [digest(attribute), length, 0, 0, 0];
        let call = call_of(number, words, name);
        Some(self.attribute(
            call,
            CallDescription::Path("look at attributes", name),
            room,
            number,
            arguments,
        ))
    }

    /// Handles a call that reads extended attributes of an open file (xattr(7)).
    ///
    /// # Safety
    /// `attribute` is a C string or 0, and `into` has `length` bytes.
    pub unsafe fn read_open_attribute(
        &mut self,
        number: c_long,
        descriptor: u64,
        attribute: u64,
        into: u64,
        length: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        self.table.get(descriptor)?;
        // SAFETY: the program's text and buffer.
        let (attribute, room) = unsafe { (text(attribute), bytes(into, length as usize)) };
        let call = call_of(number, [descriptor, length, 0, 0, 0], attribute);
        let about = CallDescription::Path("look at attributes", self.table.path_of(descriptor));
        Some(self.attribute(call, about, room, number, arguments))
    }

    fn attribute(
        &mut self,
        call: FileCall,
        about: CallDescription<'_>,
        room: &mut [u8],
        number: c_long,
        arguments: [u64; 6],
    ) -> i64 {
        if !self.is_live() {
            return self.replay(call, about, &mut [room]);
        }
        let result = kernel(number, arguments);
        let length = usize::try_from(result).unwrap_or(0).min(room.len());
        self.note(call, result, &[&room[..length]]);
        result
    }

    /// Handles a change of names.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn change(&mut self, path_change: &PathChange, arguments: [u64; 6]) -> Option<i64> {
        let places = [path_change.first, path_change.second];
        // SAFETY: the program's paths.
        let is_exempt = places.into_iter().flatten().any(|place| unsafe { is_exempt_at(place) });
        if is_exempt {
            return None;
        }
        // SAFETY: the program's paths.
        let [first, second] =
            places.map(|place| place.map_or(&[][..], |(_, path)| unsafe { text(path) }));
        // SAFETY: the caller's promise.
        let words = unsafe {
            let [first_directory, second_directory] = places.map(|place| directory_of(place));
            let values = of_values(path_change.number, arguments);
            [digest(first), first_directory, second_directory, values, 0]
        };
        let call = call_of(path_change.number, words, second);
        let about = CallDescription::Path(
            "change of a name",
            if first.is_empty() { second } else { first },
        );
        let mut change = RecordedChange::none();
        let is_first = !self.was_live();
        let result = if self.is_live_except_files() {
            if is_first {
                self.restore_others(path_change);
            }
            change.inspect(path_change);
            self.each_that_goes(path_change, &change, Session::hold);
            let precondition = |_| announced(path_change);
            let outcome = |before| match has_state(path_change, arguments) {
                true => EffectOutcome::NotPerformed,
                false => outcome_of(path_change, before),
            };
            let perform = || kernel(path_change.number, arguments);
            let result = self.effect(call, about, precondition, outcome, perform);
            change.inspect_after(path_change);
            let header = change.header();
            let (old, new) = change.paths();
            let pieces = [&header[..], old, new];
            self.note(call, result, &pieces);
            result
        } else {
            let mut header = [0; CHANGE_BYTES];
            let into = &mut [&mut header[..], &mut change.names[..]];
            let result = self.replay(call, about, into);
            change.take_header(&header);
            self.each_that_goes(path_change, &change, Session::hold_again);
            result
        };
        if result == 0 {
            self.follow(path_change, &change);
        }
        if is_first && self.was_live() {
            self.restore_files();
        }
        Some(result)
    }

    /// Restores the open files except those that the change concerns. The process becomes live at
    /// this call, which an earlier incarnation may have performed. Files under the changed names
    /// are restored after the call, because their names may have changed.
    fn restore_others(&mut self, path_change: &PathChange) {
        let places = [path_change.first, path_change.second];
        for (directory, _) in places.into_iter().flatten() {
            let index = self.table.index(directory);
            index.into_iter().for_each(|index| self.table.restore(index));
        }
        // SAFETY: paths of the program's.
        let is_relative = places.into_iter().flatten().any(|(directory, path)| unsafe {
            directory == HERE && text(path).first() != Some(&b'/')
        });
        if is_relative {
            self.table.working_directory.restore();
        }
        let mut names = [[0; PATH_BYTES]; 2];
        let mut lengths = [0; 2];
        for (at, place) in places.into_iter().enumerate() {
            if let Some(place) = place {
                // SAFETY: a path of the program's.
                lengths[at] = unsafe { path_of_name(place, &mut names[at]) };
            }
        }
        let is_unchanged = |path: &[u8]| {
            names.iter().zip(lengths).all(|(name, length)| {
                let name = &name[..length];
                name.is_empty() || path != name && !is_below(path, name)
            })
        };
        if !is_relative && is_unchanged(self.table.working_directory.open.path()) {
            self.table.working_directory.restore();
        }
        self.table.restore_those(|open| is_unchanged(open.path()));
    }

    /// Calls `hold` for open files that are about to lose their name, so that the agent has them.
    fn each_that_goes(
        &mut self,
        path_change: &PathChange,
        change: &RecordedChange,
        hold: impl Fn(&mut Session, usize),
    ) {
        let goes = match path_change.effect {
            NameEffect::Removed => change.paths().0,
            NameEffect::Moved => change.paths().1,
            _ => return,
        };
        for index in 0..OPENS {
            let open = self.table.by_index(index);
            let is_it = !goes.is_empty() && open.path() == goes && !open.is_removed;
            if is_it && self.table.uses(index) > 0 {
                hold(self, index);
            }
        }
    }

    /// Gives open files their new name in the table, or marks them as removed.
    fn follow(&mut self, path_change: &PathChange, change: &RecordedChange) {
        let (old, new) = change.paths();
        match path_change.effect {
            NameEffect::Removed if !old.is_empty() => self.table.changed_files.remove(old),
            NameEffect::Moved if !old.is_empty() && !new.is_empty() => {
                self.table.changed_files.rename(old, new)
            }
            NameEffect::Exchanged if !old.is_empty() && !new.is_empty() => {
                self.table.changed_files.exchange(old, new)
            }
            _ => (),
        }
        let folder = &mut self.table.working_directory;
        for open in self.table.opens.iter_mut().chain([&mut folder.open]) {
            let is_it = open.path() == old && !old.is_empty();
            let mut path = [0; PATH_BYTES];
            match path_change.effect {
                NameEffect::Removed if is_it => open.is_removed = true,
                NameEffect::Moved if open.path() == new && !new.is_empty() => {
                    open.is_removed = true
                }
                NameEffect::Moved | NameEffect::Exchanged => {
                    let moves_back = path_change.effect == NameEffect::Exchanged;
                    let moved = moved_path(open.path(), old, new, &mut path).or_else(|| {
                        moved_path(open.path(), new, old, &mut path).filter(|_| moves_back)
                    });
                    moved.into_iter().for_each(|length| open.rename(&path[..length]));
                }
                _ => (),
            }
        }
    }
}

/// Whether two names are those of one file, so that a change of the one to the other does nothing.
fn is_one_file(one: PathAt, other: PathAt) -> bool {
    let identity = |place| identity_at(place).map(|(_, found)| (found.device, found.inode));
    identity(one).is_some_and(|found| identity(other) == Some(found))
}

/// The path that something has after the change of a name: of the thing itself, or of a directory
/// above it. A path that becomes too long is empty. `None`: the path stays.
fn moved_path(path: &[u8], from: &[u8], to: &[u8], moved: &mut [u8; PATH_BYTES]) -> Option<usize> {
    if from.is_empty() || to.is_empty() || path != from && !is_below(path, from) {
        return None;
    }
    let rest = &path[from.len()..];
    let length = to.len() + rest.len();
    if length >= PATH_BYTES {
        return Some(0);
    }
    moved[..to.len()].copy_from_slice(to);
    moved[to.len()..length].copy_from_slice(rest);
    Some(length)
}

fn is_below(path: &[u8], directory: &[u8]) -> bool {
    !directory.is_empty()
        && path.strip_prefix(directory).is_some_and(|rest| rest.first() == Some(&b'/'))
}

/// A change of names, in canonical paths.
struct RecordedChange {
    lengths: (u16, u16),
    /// The two paths, one after the other.
    names: [u8; 2 * PATH_BYTES],
}

impl RecordedChange {
    fn none() -> RecordedChange {
        RecordedChange { lengths: (0, 0), names: [0; 2 * PATH_BYTES] }
    }

    /// Notes identity and paths before the change is performed.
    fn inspect(&mut self, path_change: &PathChange) {
        let Some(first) =
            path_change.first.filter(|_| path_change.effect != NameEffect::Attributes)
        else {
            return;
        };
        let mut path = [0; PATH_BYTES];
        let mut length = path_at(first, &mut path);
        if length == 0 {
            // An earlier incarnation may have been killed after it had changed that name.
            // SAFETY: the program's path.
            length = unsafe { path_of_name(first, &mut path) };
        }
        if path_change.second.is_some_and(|second| is_one_file(first, second)) {
            // The kernel does nothing: both are names of one file.
            return;
        }
        self.names[..length].copy_from_slice(&path[..length]);
        self.lengths.0 = length as u16;
        // The file that has the second name is about to lose that name, also one that has lost it
        // already.
        self.inspect_after(path_change);
        if let Some(second) =
            path_change.second.filter(|_| self.lengths.1 == 0 && path_change.moves())
        {
            // SAFETY: the program's path.
            let length = unsafe { path_of_name(second, &mut path) };
            self.take_second(&path[..length]);
        }
    }

    /// Notes the second path after the change.
    fn inspect_after(&mut self, path_change: &PathChange) {
        let moves = path_change.moves() && self.lengths.0 != 0;
        let Some(second) = path_change.second.filter(|_| moves) else { return };
        let mut path = [0; PATH_BYTES];
        let length = path_at(second, &mut path);
        if length != 0 {
            self.take_second(&path[..length]);
        }
    }

    fn take_second(&mut self, path: &[u8]) {
        let length = path.len();
        let start = usize::from(self.lengths.0);
        self.names[start..start + length].copy_from_slice(path);
        self.lengths.1 = length as u16;
    }

    fn paths(&self) -> (&[u8], &[u8]) {
        let (first, second) = (usize::from(self.lengths.0), usize::from(self.lengths.1));
        let names = &self.names[..(first + second).min(2 * PATH_BYTES)];
        names.split_at(first.min(names.len()))
    }

    fn header(&self) -> [u8; CHANGE_BYTES] {
        let mut bytes = [0; CHANGE_BYTES];
        bytes[..2].copy_from_slice(&self.lengths.0.to_le_bytes());
        bytes[2..].copy_from_slice(&self.lengths.1.to_le_bytes());
        bytes
    }

    fn take_header(&mut self, bytes: &[u8; CHANGE_BYTES]) {
        let length = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        self.lengths = (length(0), length(2));
    }
}

/// State of both names before a change: of each the inode (0: nothing has that name), the device,
/// and the time of the last status change; then the time of the last status change of each
/// directory. Every change of a name changes this time of its directory.
fn state_of(path_change: &PathChange) -> [u64; PRECONDITION_WORDS] {
    state_with(path_change, |_, _, file| file.changed as u64)
}

/// The state of both names for an announcement, with marks for the times.
fn announced(path_change: &PathChange) -> [u64; PRECONDITION_WORDS] {
    state_with(path_change, mark_at)
}

fn state_with(
    path_change: &PathChange,
    changed: impl Fn(PathAt, c_int, &FileIdentity) -> u64,
) -> [u64; PRECONDITION_WORDS] {
    let words = |place: PathAt, flags, found: Option<(FileKind, FileIdentity)>| {
        found.map_or([0; 3], |(_, now)| [now.inode, now.device, changed(place, flags, &now)])
    };
    let at = |place: PathAt| words(place, libc::O_NOFOLLOW, identity_at(place));
    let behind = |place: PathAt| words(place, 0, identity_behind(place));
    // SAFETY: the program's paths.
    let above = |place| unsafe { directory_changed(place, |place, it| changed(place, 0, it)) };
    let [a, b, c] = path_change.first.map_or([0; 3], at);
    let [d, e, f] = match path_change.effect {
        // The call changes a link or what the link leads to.
        NameEffect::Attributes => path_change.first.map_or([0; 3], behind),
        _ => path_change.second.map_or([0; 3], at),
    };
    let [g, h] = [path_change.first, path_change.second].map(|place| place.map_or(0, above));
    [a, b, c, d, e, f, g, h]
}

/// Whether a change has happened during which the last incarnation was killed.
///
/// If nothing has changed since the announcement, the change has not happened. If something has,
/// nothing shows whether this process or another one has changed it: another rank may have removed
/// the same file as its claim of a task, or may have removed again what this call had made.
fn outcome_of(path_change: &PathChange, before: [u64; PRECONDITION_WORDS]) -> EffectOutcome {
    let now = without_devices(state_of(path_change));
    if now == without_devices(before) {
        EffectOutcome::NotPerformed
    } else {
        EffectOutcome::Unknown
    }
}

/// Whether a file has the size or the mode that a call would give it: a repetition changes nothing,
/// whether or not the call has happened.
fn has_state(path_change: &PathChange, arguments: [u64; 6]) -> bool {
    let now = || path_change.first.and_then(|place| status(place, 0));
    let has_mode = |mode: u64| now().is_some_and(|it| u64::from(it.mode & 0o7777) == mode & 0o7777);
    match path_change.number {
        libc::SYS_truncate => now().is_some_and(|it| it.identity.size as u64 == arguments[1]),
        libc::SYS_chmod => has_mode(arguments[1]),
        libc::SYS_fchmodat => has_mode(arguments[2]),
        _ => false,
    }
}

/// On another kernel than that of the first incarnation, device numbers say nothing.
fn without_devices(mut words: [u64; PRECONDITION_WORDS]) -> [u64; PRECONDITION_WORDS] {
    if crate::origin::is_other_kernel() {
        (words[1], words[4]) = (0, 0);
    }
    words
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::path::Path;

    use super::*;

    const HERE: u64 = crate::kernel_calls::HERE;

    fn is_not_performed(outcome: &EffectOutcome) -> bool {
        matches!(outcome, EffectOutcome::NotPerformed)
    }

    /// Whether a change in `folder` counts as not performed, or as unknown, after `meanwhile`.
    fn judged(
        effect: NameEffect,
        names: [Option<&str>; 2],
        folder: &Path,
        meanwhile: impl FnOnce(&Path),
    ) -> bool {
        let paths = names.map(|name| {
            let path = folder.join(name?).into_os_string().into_encoded_bytes();
            CString::new(path).ok()
        });
        let [first, second] =
            paths.each_ref().map(|path| Some((HERE, path.as_ref()?.as_ptr().addr() as u64)));
        let change = PathChange { number: 0, first, second, effect };
        let before = state_of(&change);
        meanwhile(folder);
        is_not_performed(&outcome_of(&change, before))
    }

    #[test]
    fn a_change_counts_as_not_performed_only_if_nothing_has_changed() {
        use NameEffect::*;
        let folder = std::env::temp_dir().join(format!("lb-changes-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("a"), "").unwrap();
        let (unlink, claim) = ([Some("a"), None], [Some("a"), Some("b")]);
        let (make, mode) = ([None, Some("b")], [Some("a"), None]);
        let write = |name: &'static str| move |at: &Path| fs::write(at.join(name), "").unwrap();
        let remove = |name: &'static str| move |at: &Path| fs::remove_file(at.join(name)).unwrap();
        for (effect, names) in
            [(Removed, unlink), (Moved, claim), (Created, make), (Attributes, mode)]
        {
            assert!(judged(effect, names, &folder, |_| ()), "{effect:?}");
        }
        // By this process or by another one.
        assert!(!judged(Removed, unlink, &folder, remove("a")));
        write("a")(&folder);
        let rename = |at: &Path| fs::rename(at.join("a"), at.join("b")).unwrap();
        assert!(!judged(Moved, claim, &folder, rename));
        let back = |at: &Path| fs::rename(at.join("b"), at.join("a")).unwrap();
        back(&folder);
        assert!(!judged(Moved, claim, &folder, |at| (rename(at), back(at)).0));
        // Created, and removed again by another process.
        assert!(!judged(Created, make, &folder, |at| (write("b")(at), remove("b")(at)).0));
        let readable = |at: &Path| {
            let mut permissions = fs::metadata(at.join("a")).unwrap().permissions();
            permissions.set_readonly(!permissions.readonly());
            fs::set_permissions(at.join("a"), permissions).unwrap();
        };
        assert!(!judged(Attributes, mode, &folder, |at| (readable(at), readable(at)).0));
        fs::remove_dir_all(&folder).unwrap();
    }
}
