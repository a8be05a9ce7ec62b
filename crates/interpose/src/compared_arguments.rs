//! Digests of the arguments by which a call changes a file: lengths, modes, owners, times, flags,
//! extended attributes. A record entry has the digest, so an incarnation that would change the file
//! in another way ends.
//!
//! In: a system call that changes names or attributes. Out: a digest that is equal in every
//! incarnation, whatever the addresses of the arguments.

use landbridge_proto::digest::digest;
use libc::c_long;

use crate::kernel_calls::{bytes, text};
use crate::path_changes::PathAt;

/// Longest value of an extended attribute (xattr(7)); the kernel does not read a longer one.
const ATTRIBUTE_BYTES_MAX: u64 = 64 << 10;

/// Digest of all arguments of a change except its descriptor and its paths.
///
/// # Safety
/// The arguments are those of such a call.
pub unsafe fn of_values(number: c_long, arguments: [u64; 6]) -> u64 {
    let [a, b, c, d, e, _] = arguments;
    // The kernel ignores the upper half of registers with a mode, an owner or flags.
    let half = |register: u64| register as u32 as u64;
    // SAFETY: the caller's promise.
    let words = unsafe {
        match number {
            libc::SYS_truncate | libc::SYS_ftruncate => [b, 0, 0, 0],
            libc::SYS_fallocate => [half(b), c, d, 0],
            libc::SYS_chmod | libc::SYS_fchmod | libc::SYS_mkdir => [half(b), 0, 0, 0],
            libc::SYS_chown | libc::SYS_lchown | libc::SYS_fchown | libc::SYS_mknod => {
                [half(b), half(c), 0, 0]
            }
            libc::SYS_fchmodat | libc::SYS_mkdirat | libc::SYS_unlinkat => [half(c), 0, 0, 0],
            libc::SYS_mknodat => [half(c), half(d), 0, 0],
            libc::SYS_fchownat => [half(c), half(d), half(e), 0],
            libc::SYS_renameat2 | libc::SYS_linkat => [half(e), 0, 0, 0],
            libc::SYS_symlink | libc::SYS_symlinkat => [digest(text(a)), 0, 0, 0],
            libc::SYS_utime => [of_memory(b, 2 * size_of::<u64>()), 0, 0, 0],
            libc::SYS_utimes => [of_memory(b, 4 * size_of::<u64>()), 0, 0, 0],
            libc::SYS_futimesat => [of_memory(c, 4 * size_of::<u64>()), 0, 0, 0],
            libc::SYS_utimensat => [of_times(c), half(d), 0, 0],
            libc::SYS_setxattr | libc::SYS_lsetxattr | libc::SYS_fsetxattr => {
                let length = if d > ATTRIBUTE_BYTES_MAX { 0 } else { d as usize };
                [digest(text(b)), of_memory(c, length), d, half(e)]
            }
            libc::SYS_removexattr | libc::SYS_lremovexattr | libc::SYS_fremovexattr => {
                [digest(text(b)), 0, 0, 0]
            }
            _ => [0; 4],
        }
    };
    of_words(words)
}

/// The descriptor of the directory in which a call looks for a path; 0 if the path is absolute or
/// the call has no such path.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn directory_of(place: Option<PathAt>) -> u64 {
    // SAFETY: the caller's promise.
    place.map_or(0, |(directory, path)| match unsafe { text(path) }.first() {
        Some(b'/') => 0,
        _ => directory as u32 as u64,
    })
}

/// # Safety
/// The pointer is null, or that of two times (utimensat(2)).
unsafe fn of_times(pointer: u64) -> u64 {
    // SAFETY: the caller's promise.
    let Some(times) = (unsafe { (pointer as *const [libc::timespec; 2]).as_ref() }) else {
        return 0;
    };
    let [last_access, last_change] = times.map(|time| match time.tv_nsec {
        // The kernel ignores the seconds then.
        special @ (libc::UTIME_NOW | libc::UTIME_OMIT) => [0, special as u64],
        nanos => [time.tv_sec as u64, nanos as u64],
    });
    of_words([last_access[0], last_access[1], last_change[0], last_change[1]])
}

/// # Safety
/// The pointer is null, or that of so many bytes.
unsafe fn of_memory(pointer: u64, length: usize) -> u64 {
    // SAFETY: the caller's promise.
    if pointer == 0 { 0 } else { digest(unsafe { bytes(pointer, length) }) }
}

fn of_words(words: [u64; 4]) -> u64 {
    let mut bytes = [0; 4 * size_of::<u64>()];
    for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    digest(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place<T>(what: &T) -> u64 {
        (&raw const *what).addr() as u64
    }

    fn of(number: c_long, arguments: [u64; 5]) -> u64 {
        let [a, b, c, d, e] = arguments;
        // SAFETY: the tests pass pointers to their own structures.
        unsafe { of_values(number, [a, b, c, d, e, 0]) }
    }

    #[test]
    fn each_value_that_reaches_a_file_is_compared() {
        // The register of each value, by call.
        for (number, values) in [
            (libc::SYS_truncate, &[1][..]),
            (libc::SYS_ftruncate, &[1]),
            (libc::SYS_fallocate, &[1, 2, 3]),
            (libc::SYS_chmod, &[1]),
            (libc::SYS_fchmod, &[1]),
            (libc::SYS_fchmodat, &[2]),
            (libc::SYS_chown, &[1, 2]),
            (libc::SYS_lchown, &[1, 2]),
            (libc::SYS_fchown, &[1, 2]),
            (libc::SYS_fchownat, &[2, 3, 4]),
            (libc::SYS_mkdir, &[1]),
            (libc::SYS_mkdirat, &[2]),
            (libc::SYS_mknod, &[1, 2]),
            (libc::SYS_mknodat, &[2, 3]),
            (libc::SYS_unlinkat, &[2]),
            (libc::SYS_renameat2, &[4]),
            (libc::SYS_linkat, &[4]),
        ] {
            let plain = of(number, [0; 5]);
            for at in 0..5 {
                let mut arguments = [0; 5];
                arguments[at] = 7;
                let differs = of(number, arguments) != plain;
                assert_eq!(differs, values.contains(&at), "call {number}, argument {at}");
            }
        }
    }

    #[test]
    fn upper_halves_of_modes_and_flags_are_no_difference() {
        let garbage = 0xabcd_0000_0000;
        let chmod = |mode| of(libc::SYS_chmod, [0, mode, 0, 0, 0]);
        assert_eq!(chmod(0o644), chmod(0o644 | garbage));
        let truncate = |length| of(libc::SYS_truncate, [0, length, 0, 0, 0]);
        assert_ne!(truncate(5), truncate(5 | garbage), "a length has 64 bits");
    }

    #[test]
    fn texts_and_attributes_are_compared_by_content() {
        let (one, same, other) = (*b"user.a\0", *b"user.a\0", *b"user.b\0");
        let (value, longer) = (*b"12\0", *b"123");
        for number in [libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr] {
            let set = |name: &[u8; 7], value: &[u8; 3], length, flags| {
                of(number, [0, place(name), place(value), length, flags])
            };
            let plain = set(&one, &value, 2, 0);
            assert_eq!(plain, set(&same, &longer, 2, 0));
            let others = [
                set(&other, &value, 2, 0),
                set(&one, &longer, 3, 0),
                set(&one, b"13\0", 2, 0),
                set(&one, &value, 2, 1),
            ];
            assert!(others.iter().all(|one| *one != plain));
        }
        for number in [libc::SYS_removexattr, libc::SYS_fremovexattr] {
            let remove = |name: &[u8; 7]| of(number, [0, place(name), 0, 0, 0]);
            assert_eq!(remove(&one), remove(&same));
            assert_ne!(remove(&one), remove(&other));
        }
        let link = |target: &[u8; 7]| of(libc::SYS_symlink, [place(target), 0, 0, 0, 0]);
        assert_eq!(link(&one), link(&same));
        assert_ne!(link(&one), link(&other));
    }

    #[test]
    fn times_are_compared_where_the_kernel_uses_them() {
        let times = |first: [i64; 2]| {
            let [tv_sec, tv_nsec] = first;
            [libc::timespec { tv_sec, tv_nsec }, libc::timespec { tv_sec: 5, tv_nsec: 6 }]
        };
        let set = |first| of(libc::SYS_utimensat, [0, 0, place(&times(first)), 0, 0]);
        assert_ne!(set([1, 2]), set([1, 3]));
        assert_eq!(set([1, libc::UTIME_NOW]), set([2, libc::UTIME_NOW]));
        assert_ne!(set([1, libc::UTIME_NOW]), set([1, libc::UTIME_OMIT]));
        let now = of(libc::SYS_utimensat, [0; 5]);
        assert_ne!(set([0, 0]), now);
        for (number, at) in [(libc::SYS_utime, 1), (libc::SYS_utimes, 1), (libc::SYS_futimesat, 2)]
        {
            let set = |first| {
                let (times, mut arguments) = (times(first), [0; 5]);
                arguments[at] = place(&times);
                of(number, arguments)
            };
            assert_eq!(set([1, 2]), set([1, 2]));
            assert_ne!(set([1, 2]), set([1, 3]));
        }
    }

    #[test]
    fn a_directory_counts_where_the_path_is_relative_to_it() {
        let (relative, absolute, empty) = (*b"a/b\0", *b"/a\0", *b"\0");
        // SAFETY: C strings of this test.
        unsafe {
            assert_eq!(directory_of(Some((7, relative.as_ptr().addr() as u64))), 7);
            assert_eq!(directory_of(Some((7, absolute.as_ptr().addr() as u64))), 0);
            assert_eq!(directory_of(Some((7, empty.as_ptr().addr() as u64))), 7);
            assert_eq!(directory_of(Some((7, 0))), 7, "futimens");
            assert_eq!(directory_of(None), 0);
        }
    }
}
