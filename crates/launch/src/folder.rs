//! Checks folders in which no other user can change or exchange anything.
//!
//! In: the path of a folder that the user has named. Out: nothing, or why another user could change
//! the folder's contents, and what to do about it. A user who may write a folder can exchange
//! everything below the folder, so the check covers each folder from the root of the file system
//! down, and each symbolic link in the path with the folders of its target.
//!
//! | a folder | may belong to |
//! |---|---|
//! | that the user named | this user or root |
//! | above the named folder | also the owner of `/`, who is root outside of a user namespace |
//!
//! Only the owner may have write permission, unless the sticky bit is set: then no user removes or
//! renames entries of other users. A group without any other member counts as the user. What may
//! never happen: a folder passes that another user owns or may write.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};

use crate::sys;

/// Symbolic links in one path at most; the kernel follows as many.
const LINKS_MAX: usize = 40;
const ROOT: u32 = 0;
const STICKY: u32 = 0o1000;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Checks that no user but this user and root can change anything in the folder at `path`. Parts of
/// the path that do not exist yet pass, because this user makes them.
///
/// # Errors
/// Names the folder that another user could change, its owner and mode, and says what to do.
pub fn check(path: &Path) -> Result<()> {
    let mut at = PathBuf::from("/");
    let root = look_at(&at)?;
    let trusted = [ROOT, sys::user(), root.uid()];
    let mut left: VecDeque<OsString> = names(path).collect();
    check_mode(&at, &root, &trusted[..if left.is_empty() { 2 } else { 3 }])?;
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        at.push(name);
        let about = match look_at(&at) {
            Err(error) if is_missing(&error) && left.iter().all(|name| name != "..") => {
                return Ok(());
            }
            about => about?,
        };
        if about.is_symlink() {
            links += 1;
            if links > LINKS_MAX {
                bail!("{} leads through too many symbolic links", path.display());
            }
            check_owner(&at, &about, &trusted)?;
            let to = std::fs::read_link(&at)
                .with_context(|| format!("cannot follow {}", at.display()))?;
            match to.is_absolute() {
                true => at = PathBuf::from("/"),
                false => _ = at.pop(),
            }
            let more: Vec<OsString> = names(&to).collect();
            more.into_iter().rev().for_each(|name| left.push_front(name));
            continue;
        }
        if !about.is_dir() {
            bail!("{} is no folder", at.display());
        }
        check_mode(&at, &about, &trusted[..if left.is_empty() { 2 } else { 3 }])?;
    }
    Ok(())
}

/// Opens a folder that belongs to this user alone, and keeps it open as long as this process lives.
/// Returns a path through the open descriptor (`/proc/PID/fd/N`) by which this process and its
/// children reach the folder even after a rename or replacement.
///
/// # Errors
/// Fails if `path` is no folder, or if other users have any permission: any user may create entries
/// in a folder whose sticky bit is set.
pub fn open_own(path: &Path) -> Result<PathBuf> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let folder = File::from(opened.with_context(|| format!("cannot open {}", path.display()))?);
    let about = folder.metadata()?;
    if about.uid() != sys::user() || about.mode() & 0o077 != 0 {
        bail!("{} is not a folder that only this user can open", path.display());
    }
    Ok(format!("/proc/{}/fd/{}", std::process::id(), folder.into_raw_fd()).into())
}

/// The names in a path that lead to another folder, without `.` and the root.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_os_string()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

fn look_at(path: &Path) -> Result<Metadata> {
    std::fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))
}

fn is_missing(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::NotFound)
}

fn check_mode(path: &Path, about: &Metadata, trusted: &[u32]) -> Result<()> {
    check_owner(path, about, trusted)?;
    let mode = about.mode();
    let who = match mode {
        _ if mode & STICKY != 0 => return Ok(()),
        _ if mode & OTHERS_WRITE != 0 => "everybody".to_string(),
        _ if mode & GROUP_WRITES != 0 && !is_alone_in(path, about.gid()) => {
            format!("group {}", name_of(GROUPS, about.gid()))
        }
        _ => return Ok(()),
    };
    bail!(
        "{} may be written by {who} (it belongs to {}, mode {:04o}), who could exchange what lies \
         below: chmod go-w or chmod +t it, or name another folder",
        path.display(),
        name_of(USERS, about.uid()),
        mode & 0o7777,
    );
}

fn check_owner(path: &Path, about: &Metadata, trusted: &[u32]) -> Result<()> {
    if trusted.contains(&about.uid()) {
        return Ok(());
    }
    bail!(
        "{} belongs to {} (mode {:04o}), who could change what lies there: name a folder of your \
         own, below folders that are yours or root's",
        path.display(),
        name_of(USERS, about.uid()),
        about.mode() & 0o7777,
    );
}

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// The name of a user or a group by number, from a file of lines `NAME:x:NUMBER:…`.
fn name_of(file: &str, number: u32) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let row = rows(&text).find(|row| row.get(2) == Some(&number.to_string().as_str()));
    row.map_or(format!("number {number}"), |row| format!("{} ({number})", row[0]))
}

/// Whether a group has no known member but this user, and the folder has no access control list
/// that lets further users write.
fn is_alone_in(path: &Path, group: u32) -> bool {
    let has_list =
        rustix::fs::lgetxattr(path, "system.posix_acl_access", &mut [0_u8; 0][..]).is_ok();
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    !has_list && is_private(&read(USERS), &read(GROUPS), sys::user(), group)
}

fn is_private(users: &str, groups: &str, user: u32, group: u32) -> bool {
    let (user, group) = (user.to_string(), group.to_string());
    let Some(own) = rows(users).find(|row| row.get(2) == Some(&user.as_str())) else {
        return false;
    };
    let mut primary = rows(users).filter(|row| row.get(3) == Some(&group.as_str()));
    let mut named = rows(groups).filter(|row| row.get(2) == Some(&group.as_str()));
    let (Some(entry), None) = (named.next(), named.next()) else { return false };
    let members = entry.get(3).copied().unwrap_or_default();
    primary.all(|row| row.get(2) == Some(&user.as_str()))
        && members.split(',').all(|member| member.is_empty() || member == own[0])
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, DirBuilder, Permissions};
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
    use std::process::Command;

    use super::*;

    /// A folder of this user, below a folder that every user may write and whose sticky bit is set.
    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new(name: &str) -> TestFolder {
            let path = PathBuf::from(format!("/tmp/landbridge-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            TestFolder(path)
        }

        fn folder(&self, name: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn why(path: &Path) -> String {
        check(path).map_or_else(|error| format!("{error:#}"), |()| String::new())
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused_wherever_it_is_on_the_way() {
        let place = TestFolder::new("writable");
        let open = place.folder("open", 0o777);
        let below = place.folder("open/mine", 0o700);
        let deep = below.join("not/there/yet");
        for path in [&open, &below, &deep] {
            let why = why(path);
            let name = format!("{} may be written by everybody", open.display());
            assert!(why.contains(&name) && why.contains("mode 0777"), "{why}");
            assert!(why.contains("chmod +t"), "{why}");
        }
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        assert_eq!([why(&open), why(&below), why(&deep)], [""; 3], "nobody renames another's");
        fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
        assert_eq!([why(&open), why(&deep)], [""; 2]);
        fs::write(place.0.join("file"), "").unwrap();
        assert!(why(&place.0.join("file")).contains("is no folder"));
    }

    #[test]
    fn a_symbolic_link_is_as_good_as_the_folders_through_which_it_leads() {
        let place = TestFolder::new("links");
        place.folder("open", 0o777);
        place.folder("open/mine", 0o700);
        place.folder("good", 0o700);
        for (name, to) in [("far", "open/mine"), ("round", "good/../open/mine"), ("near", "good")] {
            symlink(to, place.0.join(name)).unwrap();
        }
        symlink(place.0.join("far"), place.0.join("twice")).unwrap();
        for name in ["far", "round", "twice", "near/../far", "far/x"] {
            let why = why(&place.0.join(name));
            assert!(why.contains("open may be written by everybody"), "{name}: {why}");
        }
        assert_eq!(why(&place.0.join("near")), "");
        symlink("loop", place.0.join("loop")).unwrap();
        assert!(why(&place.0.join("loop")).contains("too many symbolic links"));
    }

    /// Only root can change the owner of folders.
    #[test]
    fn what_another_user_owns_is_refused_also_above_and_also_a_link() {
        if sys::user() != ROOT {
            return;
        }
        let place = TestFolder::new("owners");
        let theirs = place.folder("theirs", 0o755);
        let below = place.folder("theirs/mine", 0o700);
        let sticky = place.folder("sticky", 0o1777);
        place.folder("good", 0o700);
        let link = sticky.join("link");
        symlink("../good", &link).unwrap();
        assert_eq!(why(&link), "");
        rustix::fs::chownat(
            rustix::fs::CWD,
            &link,
            Some(rustix::fs::Uid::from_raw(4711)),
            None,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
        chown(&theirs, Some(4711), None).unwrap();
        for (path, culprit) in [(&theirs, &theirs), (&below, &theirs), (&link, &link)] {
            let why = why(path);
            let name = format!("{} belongs to number 4711", culprit.display());
            assert!(why.contains(&name) && why.contains("name a folder of your own"), "{why}");
        }
    }

    #[test]
    fn an_opened_folder_is_reached_though_another_folder_has_its_name() {
        let place = TestFolder::new("opened");
        let own = place.folder("own", 0o700);
        fs::write(own.join("whose"), "own").unwrap();
        let opened = open_own(&own).unwrap();
        fs::rename(&own, place.0.join("moved")).unwrap();
        place.folder("own", 0o700);
        fs::write(own.join("whose"), "another").unwrap();
        assert_eq!(fs::read_to_string(opened.join("whose")).unwrap(), "own");
        fs::write(opened.join("later"), "").unwrap();
        assert!(place.0.join("moved/later").exists() && !own.join("later").exists());
        // Relays and agents are children of the process that has opened the folder.
        let output = Command::new("cat").arg(opened.join("whose")).output().unwrap();
        assert_eq!(output.stdout, b"own", "{output:?}");
    }

    #[test]
    fn a_folder_that_others_can_open_is_not_opened() {
        let place = TestFolder::new("not-opened");
        let own = place.folder("own", 0o700);
        let why = |path: &Path| open_own(path).unwrap_err().to_string();
        for mode in [0o710, 0o740, 0o701, 0o704, 0o755, 0o777, 0o1777, 0o2770] {
            fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
            let why = why(&own);
            assert!(why.contains("not a folder that only this user can open"), "{mode:o}: {why}");
        }
        fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        open_own(&own).unwrap();
        symlink(&own, place.0.join("link")).unwrap();
        fs::write(place.0.join("file"), "").unwrap();
        for name in ["link", "file", "missing"] {
            assert!(why(&place.0.join(name)).contains("cannot open"), "{name}");
        }
        if sys::user() == ROOT {
            chown(&own, Some(4711), None).unwrap();
            assert!(why(&own).contains("not a folder that only this user can open"));
        }
    }

    #[test]
    fn a_group_without_other_members_is_the_user() {
        let users = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/:/bin/sh\nbob:x:1001:1001::/:x\n";
        let groups = "root:x:0:\nann:x:1000:\nbob:x:1001:bob,ann\nlab:x:50:ann\n";
        let is = |user, group| is_private(users, groups, user, group);
        assert!(is(0, 0) && is(1000, 1000) && is(1000, 50));
        assert!(!is(1001, 1001), "ann is in it");
        assert!(!is(1001, 50) && !is(1000, 0), "others are in it");
        assert!(!is(1000, 77) && !is(4711, 50), "nobody can say");
    }
}
