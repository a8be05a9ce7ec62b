//! System calls that change names: which arguments are paths, and what becomes of the names.

use libc::c_long;

use crate::kernel_calls::HERE;

/// What a change of names does with the files behind them, and so with open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameEffect {
    /// The call changes attributes or the size; the names stay.
    Attributes,
    /// The first name goes.
    Removed,
    /// The second name becomes that of the file of the first.
    Moved,
    /// Each name becomes that of the file of the other one.
    Exchanged,
    /// The second name is new.
    Created,
}

/// Descriptor of a directory, and address of a path relative to it.
pub type PathAt = (u64, u64);

/// A system call that changes names, or attributes of a named file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathChange {
    pub number: c_long,
    /// The name that the call changes.
    pub first: Option<PathAt>,
    /// The name that the call creates.
    pub second: Option<PathAt>,
    pub effect: NameEffect,
}

impl PathChange {
    /// The name change of a system call. `None`: the call changes no name.
    pub fn of(number: c_long, arguments: [u64; 6]) -> Option<PathChange> {
        use NameEffect::*;
        let [a, b, c, d, e, _] = arguments;
        let directory = |register: u64| register as u32 as u64;
        let (here_a, at_ab) = (Some((HERE, a)), Some((a, b)));
        let (first, second, effect) = match number {
            libc::SYS_rename => (here_a, Some((HERE, b)), Moved),
            libc::SYS_renameat2 if e & u64::from(libc::RENAME_EXCHANGE) != 0 => {
                (at_ab, Some((directory(c), d)), Exchanged)
            }
            libc::SYS_renameat | libc::SYS_renameat2 => (at_ab, Some((directory(c), d)), Moved),
            libc::SYS_unlink | libc::SYS_rmdir => (here_a, None, Removed),
            libc::SYS_unlinkat => (at_ab, None, Removed),
            libc::SYS_link => (here_a, Some((HERE, b)), Created),
            libc::SYS_linkat => (at_ab, Some((directory(c), d)), Created),
            // The first argument is the text of the link, which need not be a name.
            libc::SYS_symlink => (None, Some((HERE, b)), Created),
            libc::SYS_symlinkat => (None, Some((directory(b), c)), Created),
            libc::SYS_mkdir | libc::SYS_mknod => (None, here_a, Created),
            libc::SYS_mkdirat | libc::SYS_mknodat => (None, at_ab, Created),
            libc::SYS_truncate
            | libc::SYS_chmod
            | libc::SYS_chown
            | libc::SYS_lchown
            | libc::SYS_utime
            | libc::SYS_utimes
            | libc::SYS_setxattr
            | libc::SYS_lsetxattr
            | libc::SYS_removexattr
            | libc::SYS_lremovexattr => (here_a, None, NameEffect::Attributes),
            libc::SYS_fchmodat | libc::SYS_fchownat | libc::SYS_futimesat | libc::SYS_utimensat => {
                (at_ab, None, NameEffect::Attributes)
            }
            _ => return None,
        };
        Some(PathChange { number, first, second, effect })
    }

    /// Whether the call gives the second name to what has the first name.
    pub fn moves(&self) -> bool {
        matches!(self.effect, NameEffect::Moved | NameEffect::Exchanged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_says_which_names_it_is_about() {
        let arguments = [1, 2, 3, 4, 5, 6];
        let path_change = |number| PathChange::of(number, arguments);
        let rename = path_change(libc::SYS_renameat2).unwrap();
        assert_eq!((rename.first, rename.second), (Some((1, 2)), Some((3, 4))));
        assert!(rename.moves());
        let mkdir = path_change(libc::SYS_mkdir).unwrap();
        assert_eq!(
            (mkdir.first, mkdir.second, mkdir.effect),
            (None, Some((HERE, 1)), NameEffect::Created)
        );
        assert_eq!(path_change(libc::SYS_unlinkat).unwrap().first, Some((1, 2)));
        assert_eq!(path_change(libc::SYS_getpid), None);
    }
}
