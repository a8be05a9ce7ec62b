//! Names in the file actions of `posix_spawn`: files that a program gets opened, and the directory
//! that it enters, before it begins and this library observes it (`observe`).
//!
//! In: the C library's functions that add such actions, and each `posix_spawn` that performs them.
//! Out: one report that the rank cannot be restarted, if the child would change a file, or if the
//! name may lead to something else in a later incarnation. What may never happen: a name that has
//! changed between the addition and the start is passed over.

use std::ffi::{c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libc::posix_spawn_file_actions_t;

use crate::changed_names::NameChange;
use crate::file_identity::PATH_BYTES;
use crate::kernel_calls::{HERE, text};
use crate::messages::Path;
use crate::watched::{
    self, CHANGED, CHANGED_COMPONENT, change_of, forbid_restart_of, is_opened_for_writing,
};
use crate::{dispatch, real_libc};

/// Largest number of names that wait for a start, in all actions that are not destroyed; a name
/// beyond this number forbids a restart.
const NAMES_MAX: usize = 64;

/// Names of actions that are not destroyed yet.
static NAMES: Mutex<[ActionName; NAMES_MAX]> = Mutex::new([ActionName::FREE; NAMES_MAX]);
/// Whether a child of this process may enter a directory before its program begins.
static HAS_DIRECTORY: AtomicBool = AtomicBool::new(false);

/// A name and what is done with it.
#[derive(Clone, Copy)]
struct ActionName {
    /// Address of the actions; 0: the place is free.
    actions: usize,
    action: Action,
    path: [u8; PATH_BYTES],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Opens a file with these flags of open(2).
    Open(c_int),
    /// Enters a directory.
    Enter,
}

impl ActionName {
    const FREE: ActionName =
        ActionName { actions: 0, action: Action::Enter, path: [0; PATH_BYTES] };
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawn_file_actions_addopen`.
pub unsafe extern "C" fn add_open(
    actions: *mut posix_spawn_file_actions_t,
    descriptor: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        note(actions, Action::Open(flags), path);
        real_libc::posix_spawn_file_actions_addopen(actions, descriptor, path, flags, mode)
    }
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawn_file_actions_addchdir_np`.
pub unsafe extern "C" fn add_directory(
    actions: *mut posix_spawn_file_actions_t,
    path: *const c_char,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        note(actions, Action::Enter, path);
        real_libc::posix_spawn_file_actions_addchdir_np(actions, path)
    }
}

/// Notes that a child may enter a directory. Which one the descriptor is, no name can change.
///
/// # Safety
/// The arguments are valid for the C library's `posix_spawn_file_actions_addfchdir_np`.
pub unsafe extern "C" fn add_open_directory(
    actions: *mut posix_spawn_file_actions_t,
    descriptor: c_int,
) -> c_int {
    HAS_DIRECTORY.store(true, Relaxed);
    // SAFETY: the caller's promise.
    unsafe { real_libc::posix_spawn_file_actions_addfchdir_np(actions, descriptor) }
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawn_file_actions_init`.
pub unsafe extern "C" fn init(actions: *mut posix_spawn_file_actions_t) -> c_int {
    forget(actions);
    // SAFETY: the caller's promise.
    unsafe { real_libc::posix_spawn_file_actions_init(actions) }
}

/// # Safety
/// The arguments are valid for the C library's `posix_spawn_file_actions_destroy`.
pub unsafe extern "C" fn destroy(actions: *mut posix_spawn_file_actions_t) -> c_int {
    forget(actions);
    // SAFETY: the caller's promise.
    unsafe { real_libc::posix_spawn_file_actions_destroy(actions) }
}

fn forget(actions: *mut posix_spawn_file_actions_t) {
    if let Ok(mut names) = NAMES.lock() {
        let of_these = names.iter_mut().filter(|name| name.actions == actions.addr());
        of_these.for_each(|name| name.actions = 0);
    }
}

/// Whether some action lets a child enter a directory, in which relative names begin then.
pub fn may_enter_directory() -> bool {
    HAS_DIRECTORY.load(Relaxed)
}

/// Reports names of these actions that have changed since they were added, before a child performs
/// the actions.
pub fn check(actions: *const posix_spawn_file_actions_t) {
    if !dispatch::is_installed() || !watched::is_watched() || actions.is_null() {
        return;
    }
    let Ok(names) = NAMES.lock() else { return };
    for name in names.iter().filter(|name| name.actions == actions.addr()) {
        // SAFETY: a C string, which ends within its room.
        unsafe { before(name.action, name.path.as_ptr().cast()) };
    }
}

/// Reports a name that a later child uses if it may lead to something else in a later incarnation,
/// and remembers it for the start of the child.
///
/// # Safety
/// The path is a C string, or null.
unsafe fn note(actions: *mut posix_spawn_file_actions_t, action: Action, path: *const c_char) {
    if !dispatch::is_installed() || !watched::is_watched() || path.is_null() {
        return;
    }
    HAS_DIRECTORY.fetch_or(action == Action::Enter, Relaxed);
    // SAFETY: the caller's promise.
    let (name, is_foreign) = unsafe {
        before(action, path);
        (text(path.addr() as u64), watched::is_foreign_at(HERE, path.addr() as u64))
    };
    if is_foreign {
        return;
    }
    let mut names = NAMES.lock().ok();
    let free = names.as_mut().and_then(|names| names.iter_mut().find(|it| it.actions == 0));
    match free.filter(|_| name.len() < PATH_BYTES) {
        Some(free) => {
            *free = ActionName { actions: actions.addr(), action, ..ActionName::FREE };
            free.path[..name.len()].copy_from_slice(name);
        }
        None => forbid_restart_of(format_args!(
            "it prepares the start of more programs than the interposer tracks (posix_spawn)"
        )),
    }
}

/// Reports what a child does before its program begins, if that changes a file, or if the name may
/// lead to something else in a later incarnation.
///
/// # Safety
/// The path is a C string.
unsafe fn before(action: Action, path: *const c_char) {
    let place = path.addr() as u64;
    // SAFETY: the caller's promise.
    let (name, change) = unsafe { (Path(text(place)), change_of(HERE, place)) };
    // SAFETY: the caller's promise.
    let is_absolute = unsafe { text(place) }.starts_with(b"/");
    let more = match change {
        Some(NameChange::Component) => CHANGED_COMPONENT,
        _ => CHANGED,
    };
    match action {
        // SAFETY: the caller's promise.
        Action::Open(flags) if unsafe { is_opened_for_writing(HERE, place, flags) } => {
            forbid_restart_of(format_args!("a program that it starts opens {name} for writing"));
        }
        Action::Open(_) if may_enter_directory() && !is_absolute => {
            forbid_restart_of(format_args!(
                "a program that it starts opens {name}, which begins in a directory that it enters \
                 first"
            ));
        }
        // The content of the file is compared when it is read (`observe`).
        Action::Open(_) if change.is_some_and(|change| change != NameChange::Target) => {
            forbid_restart_of(format_args!("a program that it starts opens {name}{more}"));
        }
        Action::Enter if change.is_some() => {
            forbid_restart_of(format_args!("a program that it starts enters {name}{more}"));
        }
        Action::Open(_) | Action::Enter => (),
    }
}
