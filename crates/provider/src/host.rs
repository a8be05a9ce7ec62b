//! The libfabric that has loaded this provider: found at run time, never linked.
//!
//! Its symbol versions differ between releases, and libfabric may be loaded privately (MPI under
//! Python). So the provider looks for libfabric by its SONAME among the loaded libraries, and every
//! symbol may be missing.
//!
//! This module also writes log lines: to libfabric's log, and to the node agent's pipe or to
//! standard error.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use landbridge_proto::id::{EXIT_LINE, LINE_TAG};

use crate::abi::{self, Provider};
use crate::param;

/// Level of a log message. Trace: one packet; debug or info: one state change; warn: something that
/// the user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    Warn,
    Info,
    Debug,
    Trace,
}

/// Writes to libfabric's log (`FI_LOG_LEVEL`) and, with `LANDBRIDGE_LOG`, to stderr. Example:
/// `log!(Info, "path to {}: {}", peer, path)`
#[macro_export]
macro_rules! log {
    ($level:ident, $($text:tt)+) => {
        if $crate::host::enabled($crate::host::LogLevel::$level) {
            $crate::host::write(
                $crate::host::LogLevel::$level,
                // SAFETY: the literal ends with the only NUL.
                unsafe {
                    ::std::ffi::CStr::from_bytes_with_nul_unchecked(
                        concat!(module_path!(), "\0").as_bytes(),
                    )
                },
                line!(),
                format_args!($($text)+),
            )
        }
    };
}

type Version = unsafe extern "C" fn() -> u32;
type LogEnabled = unsafe extern "C" fn(*const Provider, c_int, c_int) -> c_int;
type Log =
    unsafe extern "C" fn(*const Provider, c_int, c_int, *const c_char, c_int, *const c_char, ...);

struct Host {
    version: Option<Version>,
    log_enabled: Option<LogEnabled>,
    log: Option<Log>,
    /// Level for stderr, from `LANDBRIDGE_LOG`.
    stderr: Option<LogLevel>,
    /// This process may be restarted: its lines on stderr carry a tag.
    is_tagged: bool,
    /// Descriptor of the pipe that the node agent reads as standard error, for a process that may
    /// be restarted.
    agent_pipe: Option<c_int>,
}

static HOST: OnceLock<Host> = OnceLock::new();
/// The provider in the host's log, once registered.
static PROVIDER: AtomicPtr<Provider> = AtomicPtr::new(std::ptr::null_mut());

/// The host's version, or the version of the provider's layouts if the host cannot be found (a
/// test).
pub fn version() -> u32 {
    match host().version {
        // SAFETY: `fi_version` takes no arguments and only returns a constant.
        Some(version) => unsafe { version() },
        None => abi::LAYOUT_VERSION,
    }
}

/// Sends later messages to the host's log under this provider.
pub fn register(provider: *mut Provider) {
    PROVIDER.store(provider, Ordering::Release);
}

pub fn enabled(level: LogLevel) -> bool {
    host().stderr.is_some_and(|limit| level <= limit) || enabled_in_host(level).is_some()
}

#[cold]
pub fn write(level: LogLevel, module: &CStr, line: u32, text: fmt::Arguments<'_>) {
    let text = text.to_string();
    if host().stderr.is_some_and(|limit| level <= limit) {
        write_stderr(&format!("[{}]: {level:?}: {text}\n", std::process::id()));
    }
    if !is_stderr_free() {
        return;
    }
    let Some((log, provider)) = enabled_in_host(level) else { return };
    let Ok(text) = CString::new(text) else { return };
    // SAFETY: the format takes one string, and all strings live through the call.
    unsafe {
        log(
            provider,
            level.code(),
            abi::LOG_CORE,
            module.as_ptr(),
            line as c_int,
            c"%s\n".as_ptr(),
            text.as_ptr(),
        );
    }
}

/// Writes a line to stderr; `rest` follows the common beginning of the provider's lines.
fn write_stderr(rest: &str) {
    let name = if host().is_tagged { LINE_TAG } else { "landbridge" };
    let line = format!("{name}{rest}");
    // A single write keeps lines of several ranks apart.
    if let Some(mut pipe) = agent_pipe() {
        let _ = std::io::Write::write_all(&mut *pipe, line.as_bytes());
    } else if is_stderr_free() {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }
}

/// The pipe that the node agent reads as this process's standard error, whatever the program does
/// with descriptor 2; `None` if the program has closed the pipe.
fn agent_pipe() -> Option<ManuallyDrop<File>> {
    let number = host().agent_pipe?;
    is_kind(number, libc::S_IFIFO)
        // SAFETY: the descriptor is open, and is not closed here.
        .then(|| ManuallyDrop::new(unsafe { File::from_raw_fd(number) }))
}

/// Whether a line on standard error does no harm. In a process that may be restarted, a line in a
/// file to which the program has redirected standard error would move the program's position in the
/// file, which is recorded without the line.
fn is_stderr_free() -> bool {
    host().agent_pipe.is_none() || !is_kind(libc::STDERR_FILENO, libc::S_IFREG)
}

fn is_kind(descriptor: c_int, kind: libc::mode_t) -> bool {
    // SAFETY: a structure for which all zeros are a valid value, and which the call fills in.
    let (found, about) = unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        (libc::fstat(descriptor, &mut about), about)
    };
    found == 0 && about.st_mode & libc::S_IFMT == kind
}

/// Reports to the rank supervisor that the provider ends this process, and that the exit code is
/// not the program's.
pub fn report_forced_exit() {
    if host().is_tagged {
        write_stderr(&format!("{EXIT_LINE}\n"));
    }
}

fn enabled_in_host(level: LogLevel) -> Option<(Log, *mut Provider)> {
    let provider = PROVIDER.load(Ordering::Acquire);
    let (enabled, log) = (host().log_enabled?, host().log?);
    // SAFETY: `provider` is the provider's static, which the host has registered.
    let yes = !provider.is_null() && unsafe { enabled(provider, level.code(), abi::LOG_CORE) } != 0;
    yes.then_some((log, provider))
}

impl LogLevel {
    fn code(self) -> c_int {
        match self {
            LogLevel::Warn => abi::LOG_WARN,
            LogLevel::Info => abi::LOG_INFO,
            LogLevel::Debug => abi::LOG_DEBUG,
            LogLevel::Trace => abi::LOG_TRACE,
        }
    }

    fn parse(text: &str) -> Option<LogLevel> {
        match text.to_ascii_lowercase().as_str() {
            "warn" => Some(LogLevel::Warn),
            "info" => Some(LogLevel::Info),
            "debug" => Some(LogLevel::Debug),
            "trace" => Some(LogLevel::Trace),
            _ => None,
        }
    }
}

fn host() -> &'static Host {
    HOST.get_or_init(find)
}

fn find() -> Host {
    // SAFETY: RTLD_NOLOAD only looks for the library; the call loads and runs nothing.
    let library =
        unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let library = if library.is_null() { libc::RTLD_DEFAULT } else { library };
    let is_tagged = param::INCARNATION.text().is_some();
    // A rank's reason for a forced exit must be visible, also where the host's log is off or goes
    // elsewhere.
    let level = match param::LOG.text() {
        Some(text) => LogLevel::parse(&text),
        None => is_tagged.then_some(LogLevel::Warn),
    };
    // SAFETY: the names are libfabric's, and the types are those of its headers.
    unsafe {
        Host {
            version: symbol(library, c"fi_version"),
            log_enabled: symbol(library, c"fi_log_enabled"),
            log: symbol(library, c"fi_log"),
            stderr: level,
            is_tagged,
            agent_pipe: std::env::var("LANDBRIDGE_STDERR").ok().and_then(|it| it.parse().ok()),
        }
    }
}

/// # Safety
/// `F` is the function pointer type of `name`.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: dlsym only looks up a symbol.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: the address is not null, has pointer size, and has the caller's type.
    (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_host_the_layouts_version_stands_in() {
        assert!(version() >= abi::version(1, 3));
    }

    #[test]
    fn levels_are_read_and_ordered() {
        assert_eq!(LogLevel::parse("INFO"), Some(LogLevel::Info));
        assert_eq!(LogLevel::parse("off"), None);
        assert!(LogLevel::Warn < LogLevel::Trace);
    }
}
