//! The C library's own functions, which the functions of this library replace.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{clockid_t, size_t, ssize_t, time_t, timespec, timeval};

/// Array of C strings that ends with a null pointer.
type CStringList = *const *mut c_char;

/// The next function of this name in the search order after this library; looked up once.
pub struct NextSymbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl NextSymbol {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// # Safety
    /// `F` is the function pointer type of the name.
    #[inline]
    unsafe fn get<F: Copy>(&self) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let mut address = self.address.load(Relaxed);
        if address.is_null() {
            address = self.find();
        }
        // SAFETY: the address is not null, of pointer size, and of the caller's type.
        unsafe { std::mem::transmute_copy(&address) }
    }

    /// Address of the function.
    pub fn address(&self) -> usize {
        match self.address.load(Relaxed).addr() {
            0 => self.find().addr(),
            found => found,
        }
    }

    /// Whether this C library has the function.
    fn exists(&self) -> bool {
        !self.address.load(Relaxed).is_null() || !self.look_up().is_null()
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        // SAFETY: the name is a C string.
        unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let address = self.look_up();
        if address.is_null() {
            // The calling program was linked with the function, so only a broken C library lacks
            // it.
            crate::messages::warn(format_args!("the C library has no {:?}", self.name));
            // SAFETY: the call ends the process.
            unsafe { libc::_exit(1) }
        }
        self.address.store(address, Relaxed);
        address
    }
}

/// Functions with any number of arguments, and those that compilers call instead.
pub static SYSLOG: NextSymbol = NextSymbol::new(c"syslog");
pub static VSYSLOG: NextSymbol = NextSymbol::new(c"vsyslog");
pub static CHECKED_SYSLOG: NextSymbol = NextSymbol::new(c"__syslog_chk");
pub static CHECKED_VSYSLOG: NextSymbol = NextSymbol::new(c"__vsyslog_chk");

static ADD_OPEN_DIRECTORY: NextSymbol = NextSymbol::new(c"posix_spawn_file_actions_addfchdir_np");
static ADD_DIRECTORY: NextSymbol = NextSymbol::new(c"posix_spawn_file_actions_addchdir_np");

/// `posix_spawn_file_actions_addchdir_np` of glibc 2.29 and later; older ones get ENOSYS.
///
/// # Safety
/// The arguments are valid for that function.
pub unsafe fn posix_spawn_file_actions_addchdir_np(
    actions: *mut libc::posix_spawn_file_actions_t,
    path: *const c_char,
) -> c_int {
    type AddDirectory =
        unsafe extern "C" fn(*mut libc::posix_spawn_file_actions_t, *const c_char) -> c_int;
    // SAFETY: the type is that of the C library's header; the rest is the caller's promise.
    match ADD_DIRECTORY.exists() {
        true => unsafe { ADD_DIRECTORY.get::<AddDirectory>()(actions, path) },
        false => libc::ENOSYS,
    }
}

/// `posix_spawn_file_actions_addfchdir_np` of glibc 2.29 and later; older ones get ENOSYS.
///
/// # Safety
/// The arguments are valid for that function.
pub unsafe fn posix_spawn_file_actions_addfchdir_np(
    actions: *mut libc::posix_spawn_file_actions_t,
    descriptor: c_int,
) -> c_int {
    type AddOpenDirectory =
        unsafe extern "C" fn(*mut libc::posix_spawn_file_actions_t, c_int) -> c_int;
    // SAFETY: the type is that of the C library's header; the rest is the caller's promise.
    match ADD_OPEN_DIRECTORY.exists() {
        true => unsafe { ADD_OPEN_DIRECTORY.get::<AddOpenDirectory>()(actions, descriptor) },
        false => libc::ENOSYS,
    }
}

macro_rules! behind {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        /// # Safety
        /// The arguments are valid for the C library's function.
        #[inline]
        pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
            const NAME: &CStr = match CStr::from_bytes_with_nul(
                concat!(stringify!($name), "\0").as_bytes(),
            ) {
                Ok(name) => name,
                Err(_) => panic!(),
            };
            static NEXT_SYMBOL: NextSymbol = NextSymbol::new(NAME);
            // SAFETY: the type is that of the C library's header; the rest is the caller's promise.
            unsafe {
                NEXT_SYMBOL.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>()($($argument),*)
            }
        }
    )*};
}

behind! {
    clock_gettime(id: clockid_t, time: *mut timespec) -> c_int;
    gettimeofday(time: *mut timeval, zone: *mut c_void) -> c_int;
    timespec_get(time: *mut timespec, base: c_int) -> c_int;
    time(time: *mut time_t) -> time_t;
    clock() -> libc::clock_t;
    getrandom(buffer: *mut c_void, length: size_t, flags: libc::c_uint) -> ssize_t;
    getentropy(buffer: *mut c_void, length: size_t) -> c_int;
    arc4random() -> u32;
    arc4random_buf(buffer: *mut c_void, length: size_t);
    arc4random_uniform(bound: u32) -> u32;
    aio_read(request: *mut libc::aiocb) -> c_int;
    aio_write(request: *mut libc::aiocb) -> c_int;
    aio_fsync(operation: c_int, request: *mut libc::aiocb) -> c_int;
    lio_listio(
        mode: c_int,
        list: *const *mut libc::aiocb,
        count: c_int,
        event: *mut libc::sigevent
    ) -> c_int;
    posix_spawn(
        process: *mut libc::pid_t,
        path: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        words: CStringList,
        environment: CStringList
    ) -> c_int;
    posix_spawnp(
        process: *mut libc::pid_t,
        name: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        words: CStringList,
        environment: CStringList
    ) -> c_int;
    connect(socket: c_int, address: *const libc::sockaddr, length: libc::socklen_t) -> c_int;
    bind(socket: c_int, address: *const libc::sockaddr, length: libc::socklen_t) -> c_int;
    listen(socket: c_int, backlog: c_int) -> c_int;
    sendmsg(socket: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t;
    sendmmsg(
        socket: c_int,
        messages: *mut libc::mmsghdr,
        count: libc::c_uint,
        flags: c_int
    ) -> c_int;
    sendto(
        socket: c_int,
        bytes: *const c_void,
        length: size_t,
        flags: c_int,
        address: *const libc::sockaddr,
        address_length: libc::socklen_t
    ) -> ssize_t;
    shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void;
    semget(key: libc::key_t, count: c_int, flags: c_int) -> c_int;
    msgget(key: libc::key_t, flags: c_int) -> c_int;
    shmget(key: libc::key_t, bytes: size_t, flags: c_int) -> c_int;
    shmctl(id: c_int, command: c_int, about: *mut c_void) -> c_int;
    semop(id: c_int, operations: *mut c_void, count: size_t) -> c_int;
    semtimedop(
        id: c_int,
        operations: *mut c_void,
        count: size_t,
        time: *const c_void
    ) -> c_int;
    semctl(id: c_int, number: c_int, command: c_int, about: *mut c_void) -> c_int;
    msgsnd(id: c_int, message: *const c_void, bytes: size_t, flags: c_int) -> c_int;
    msgrcv(
        id: c_int,
        message: *mut c_void,
        bytes: size_t,
        kind: libc::c_long,
        flags: c_int
    ) -> ssize_t;
    msgctl(id: c_int, command: c_int, about: *mut c_void) -> c_int;
    mq_open(
        name: *const c_char,
        flags: c_int,
        mode: libc::mode_t,
        attributes: *mut c_void
    ) -> c_int;
    posix_spawn_file_actions_addopen(
        actions: *mut libc::posix_spawn_file_actions_t,
        descriptor: c_int,
        path: *const c_char,
        flags: c_int,
        mode: libc::mode_t
    ) -> c_int;
    posix_spawn_file_actions_init(actions: *mut libc::posix_spawn_file_actions_t) -> c_int;
    posix_spawn_file_actions_destroy(actions: *mut libc::posix_spawn_file_actions_t) -> c_int;
    mkstemp(template: *mut c_char) -> c_int;
    mkostemp(template: *mut c_char, flags: c_int) -> c_int;
    mkstemps(template: *mut c_char, suffix: c_int) -> c_int;
    mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int;
    mkdtemp(template: *mut c_char) -> *mut c_char;
    pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        begin: extern "C" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void
    ) -> c_int;
}

/// The time of a clock that every system has, in nanoseconds.
pub fn now(id: clockid_t) -> i64 {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one time.
    unsafe { clock_gettime(id, &mut time) };
    time.tv_sec * SECOND + time.tv_nsec
}

const SECOND: i64 = 1_000_000_000;
