//! Prepares what a rank runs: the program's path, and the environment with which the program's MPI
//! library uses the provider. Settings of the user take precedence over the launcher's, except for
//! variables that would choose another transport ([`transport_variables`]).
//!
//! | module | does |
//! |---|---|
//! | `elf` | what an ELF file needs and defines |
//! | `detect` | which MPI library a program uses |
//! | `preload` | whether the interposer is loaded into a program |
//! | `transport_variables` | variables that choose another transport |

pub mod detect;
pub mod elf;
pub mod preload;
pub mod transport_variables;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use landbridge_proto::setting::{RECOVER_LOG, RECOVER_UNIT, Value};

use crate::control::Job;
use crate::control::spawn_order::Task;
use crate::local_transport::LocalTransport;
use crate::sibling;
use detect::{DetectedLibrary, Detector, Family};
use transport_variables::Replaced;

pub const PROVIDER: &str = "landbridge";

/// A program's environment variables, whose names and values need not be UTF-8 text.
pub type Environment = BTreeMap<OsString, OsString>;

/// The value of a variable, empty if the variable is not set.
pub fn variable<'a>(environment: &'a Environment, name: &str) -> &'a OsStr {
    environment.get(OsStr::new(name)).map_or(OsStr::new(""), OsString::as_os_str)
}

/// What every rank of a host runs.
pub struct ProgramPlan {
    pub program: PathBuf,
    /// The whole environment: a rank inherits no other variable.
    pub environment: Environment,
    /// Text for the user with `-v`.
    pub note: String,
    /// What may fail with this program, as a text for the user.
    pub warning: Option<String>,
    /// What the user has to know about the environment of this host.
    pub advice: Option<String>,
    /// The MPI library that was found; `None`: no MPI library was found.
    pub family: Option<Family>,
    /// The program itself uses an MPI library that speaks to this process manager, so the program
    /// is no wrapper of another program.
    pub is_direct: bool,
    /// The library carries the messages between ranks of a node.
    pub leaves_local_to_library: bool,
    /// All messages of the program go through the provider.
    pub is_ours: bool,
    /// Why the interposer is not loaded into the program, so that nothing of it can be recorded.
    pub unrecorded: Option<&'static str>,
}

/// Variables that differ between logins or hosts. Ranks that may move to another node do not
/// inherit them: the environment lies on the stack, and must have the same length on every node. A
/// name that ends with `*` stands for all names with this beginning.
const OF_A_LOGIN: [&str; 8] = [
    "HOSTNAME",
    "SSH_*",
    "XDG_SESSION_*",
    "DBUS_*",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "SHLVL",
    "_",
];

fn is_of_a_login(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    OF_A_LOGIN.iter().any(|pattern| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start.as_bytes()),
        None => name == pattern.as_bytes(),
    })
}

/// A component that no Open MPI has. An Open MPI program that is started by a wrapper would run as
/// a job of one process; with this variable it fails in MPI_Init.
const NO_OPEN_MPI: (&str, &str) = ("OMPI_MCA_pml", "none-under-landbridge-run");

/// Prepares a program. The environment of the job takes precedence over the environment of this
/// host.
pub fn prepare(task: &Task, job: &Job) -> Result<ProgramPlan> {
    let settings = &job.environment;
    let recovers = recovers(settings);
    let mut environment: Environment = std::env::vars_os().collect();
    if recovers {
        environment.retain(|name, _| !is_of_a_login(name));
    }
    let said = settings.iter().chain(&task.environment);
    environment.extend(said.map(|(name, value)| (name.into(), value.into())));
    environment.retain(|name, _| {
        let name = name.as_encoded_bytes();
        !name.starts_with(b"PMI_") && !name.starts_with(b"PMIX_")
    });
    if !Path::new(&task.wdir).is_dir() {
        bail!("the directory {} does not exist there; choose one with --wdir", task.wdir);
    }
    let path = variable(&environment, "PATH");
    let path = match task.search.as_str() {
        "" => path.to_owned(),
        search => join_paths(OsStr::new(search), path),
    };
    let program = find_program(&task.program, &task.wdir, &path)?;
    let detector = Detector::new(&environment, &task.wdir);
    let found = detector.library(&program, &task.arguments);
    let is_direct = detector.library_of_program(&program, 0).is_some();
    check_family(found.as_ref(), &task.program)?;
    let family = found.as_ref().map(|found| found.family);
    let replaced = match job.provider {
        Some(_) => Replaced::default(),
        None => transport_variables::choose(&mut environment, family, &task.environment),
    };
    if recovers {
        check_recovery(found.as_ref(), &task.program)?;
        if found.is_some() {
            check_transport_variables(&environment)?;
        }
    }
    set_provider(&mut environment, job.provider.as_deref())?;
    let local = if job.provider.is_some() { LocalTransport::Own } else { job.local };
    set_library(&mut environment, found.as_ref(), local);
    let leaves_local_to_library = leaves_local_to_library(&environment);
    if job.size > 1 && !is_direct {
        let (name, value) = NO_OPEN_MPI;
        environment.insert(name.into(), value.into());
    }
    let is_ours = job.provider.is_none() && !transport_variables::is_wished(&task.environment);
    let note = library_note(&program, found.as_ref());
    let warning = (recovers && found.is_none()).then(|| {
        format!(
            "--recover works with MPICH alone, and which MPI library {} uses could not be found \
             out: the job runs, and killed ranks can be restarted if it is MPICH",
            task.program
        )
    });
    let advice = replaced.text();
    let unrecorded = if recovers { preload::obstacle(&program) } else { None };
    Ok(ProgramPlan {
        program,
        environment,
        note,
        warning,
        advice,
        family,
        is_direct,
        leaves_local_to_library,
        is_ours,
        unrecorded,
    })
}

/// Whether the variables of a library ([`set_library`]) leave the messages inside a node to it.
fn leaves_local_to_library(environment: &Environment) -> bool {
    let value = |name| variable(environment, name).to_string_lossy().to_ascii_lowercase();
    ["0", "no", "false", "off", "disable"].contains(&value("MPIR_CVAR_NOLOCAL").as_str())
        || value("I_MPI_FABRICS").starts_with("shm")
}

/// The line that says which MPI library `program` uses.
fn library_note(program: &Path, found: Option<&DetectedLibrary>) -> String {
    let program = program.display();
    match found {
        Some(found) => {
            let library = found.library.display();
            format!("{program} uses {} ({library})", found.family.name())
        }
        None => format!("{program} uses no MPI library that could be found"),
    }
}

/// Whether killed ranks are to be restarted. `settings`: the job's environment.
pub fn recovers(settings: &[(String, String)]) -> bool {
    settings.iter().any(|(name, value)| name == "LANDBRIDGE_RECOVER" && value == "on")
}

/// Whether the senders keep the messages of killed ranks, not relays. `settings`: the job's
/// environment.
pub fn senders_keep_logs(settings: &[(String, String)]) -> bool {
    let stated = settings.iter().find(|(name, _)| *name == RECOVER_LOG.variable());
    let is_sender = |text: &str| RECOVER_LOG.parse(text) == Ok(Value::Word("sender"));
    recovers(settings) && stated.is_some_and(|(_, text)| is_sender(text))
}

/// Whether the ranks of a node begin again together if one of them is killed. `settings`: the job's
/// environment.
pub fn begin_again_together(settings: &[(String, String)]) -> bool {
    let stated = settings.iter().find(|(name, _)| *name == RECOVER_UNIT.variable());
    let is_node = |text: &str| RECOVER_UNIT.parse(text) == Ok(Value::Word("node"));
    senders_keep_logs(settings) && stated.is_some_and(|(_, text)| is_node(text))
}

/// Refuses `--recover` with other MPI libraries than MPICH: only MPICH is known to replay, and
/// other libraries fail at the first kill.
fn check_recovery(found: Option<&DetectedLibrary>, program: &str) -> Result<()> {
    match found {
        Some(found) if found.family != Family::Mpich => bail!(
            "--recover works with MPICH alone, and {program} uses {} ({}): compile it with an \
             MPICH 5, such as that of `pip install mpich`, or start it without --recover; see \
             docs/RECOVERY.md",
            found.family.name(),
            found.library.display()
        ),
        _ => Ok(()),
    }
}

/// Refuses variables with which messages bypass the provider, because no log records such messages.
fn check_transport_variables(environment: &Environment) -> Result<()> {
    let needed =
        [("FI_PROVIDER", PROVIDER), ("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_NOLOCAL", "1")];
    for (name, value) in needed {
        let other = variable(environment, name);
        if !other.is_empty() && other != value {
            bail!(
                "--recover needs {name}={value}, and it is {}: unset it, or start without \
                 --recover",
                other.display()
            );
        }
    }
    check_progress_thread(environment)
}

/// Names under which MPICH looks for its setting of a progress thread.
const PROGRESS_THREAD: [&str; 3] =
    ["MPIR_CVAR_ASYNC_PROGRESS", "MPIR_PARAM_ASYNC_PROGRESS", "MPICH_ASYNC_PROGRESS"];

/// A progress thread polls for messages at moments of its own choice, which no determinant records.
fn check_progress_thread(environment: &Environment) -> Result<()> {
    for name in PROGRESS_THREAD {
        let value = variable(environment, name);
        let text = value.to_string_lossy().to_ascii_lowercase();
        if !["", "0", "no", "false", "off", "disable"].contains(&text.as_str()) {
            bail!(
                "--recover needs {name}=0, and it is {}: unset it, or start without --recover",
                value.display()
            );
        }
    }
    Ok(())
}

fn check_family(found: Option<&DetectedLibrary>, program: &str) -> Result<()> {
    let Some(found) = found else { return Ok(()) };
    let library = found.library.display();
    match found.family {
        Family::Mpich | Family::Intel => Ok(()),
        Family::OpenMpi => bail!(
            "{program} uses Open MPI ({library}), which speaks PMIx and cannot be started by \
             `landbridge run`, whose process manager speaks PMI-1. Inside one cluster, start it \
             with its own launcher:\n  eval \"$(landbridge env --mpi openmpi)\"\n  \
             mpirun -n N {program} …\nOver several clusters, use MPICH or Intel MPI."
        ),
        Family::MpichWithoutOfi => bail!(
            "{program} uses an MPICH ({library}) that was built for UCX without libfabric, so it \
             can load no provider. Use an MPICH with ch4:ofi, such as the one of `pip install \
             mpich`."
        ),
    }
}

/// How often MPICH retries an operation that the provider refuses with EAGAIN: practically without
/// end, as by default. With this number MPICH checks what a process has sent to itself before its
/// first retry: see `engine/peeks.rs` of the provider.
pub const MPICH_RETRIES: (&str, &str) = ("MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY", "2147483393");

/// Sets the variables that the MPI library needs. If no library was found (the program may load one
/// later), the function sets the variables of all libraries: each library ignores the variables of
/// the others.
pub fn set_library(
    environment: &mut Environment,
    found: Option<&DetectedLibrary>,
    local: LocalTransport,
) {
    let family = found.map(|found| found.family);
    if family != Some(Family::Intel) {
        set_default(environment, "MPIR_CVAR_CH4_NETMOD", "ofi");
        let only_network = if Family::Mpich.carries_local_messages(local) { "0" } else { "1" };
        set_default(environment, "MPIR_CVAR_NOLOCAL", only_network);
        set_default(environment, MPICH_RETRIES.0, MPICH_RETRIES.1);
    }
    if family != Some(Family::Mpich) {
        let is_left = Family::Intel.carries_local_messages(local);
        set_default(environment, "I_MPI_FABRICS", if is_left { "shm:ofi" } else { "ofi" });
        let provider = environment.get(OsStr::new("FI_PROVIDER")).cloned();
        set_default(environment, "I_MPI_OFI_PROVIDER", provider.unwrap_or_else(|| PROVIDER.into()));
    }
    let Some(found) = found else { return };
    let Some(directory) = found.library.parent() else { return };
    let own_libfabric = match found.family {
        Family::Intel => own_libfabric(&found.library),
        _ => None,
    };
    if found.needs_path {
        // The directory that is prepended last is searched first.
        for place in [own_libfabric.as_deref().and_then(Path::parent), Some(directory)] {
            let Some(place) = place else { continue };
            let path = join_paths(place.as_os_str(), variable(environment, "LD_LIBRARY_PATH"));
            environment.insert("LD_LIBRARY_PATH".into(), path);
        }
    }
    if found.family == Family::Intel && own_libfabric.is_none() {
        set_default(environment, "I_MPI_OFI_LIBRARY_INTERNAL", "0");
    }
}

/// The libfabric that came with this Intel MPI. Intel MPI 2021.19 of PyPI has none, and then the
/// system's libfabric is used.
pub fn own_libfabric(library: &Path) -> Option<PathBuf> {
    const PLACES: [&str; 5] = [
        "",
        "../opt/mpi/libfabric/lib",
        "../libfabric/lib",
        "../../opt/mpi/libfabric/lib",
        "../../libfabric/lib",
    ];
    let directory = library.parent()?;
    PLACES
        .iter()
        .map(|place| directory.join(place).join("libfabric.so.1"))
        .find(|path| path.is_file())
}

/// Makes libfabric load the project's provider, or `other`, which the user wants to compare with.
pub fn set_provider(environment: &mut Environment, other: Option<&str>) -> Result<()> {
    environment.insert("FI_PROVIDER".into(), other.unwrap_or(PROVIDER).into());
    if other.is_some() {
        return Ok(());
    }
    let ours = sibling::provider_directory()?;
    // An existing FI_PROVIDER_PATH (Intel's mpivars sets one) still serves the library's own
    // providers.
    let path = join_paths(ours.as_os_str(), variable(environment, "FI_PROVIDER_PATH"));
    environment.insert("FI_PROVIDER_PATH".into(), path);
    set_log(environment);
    Ok(())
}

/// Makes the provider log on stderr why a peer is unreachable or lost, because an MPI library only
/// reports that a call has failed. With FI_LOG_LEVEL set, libfabric's log holds the same text.
fn set_log(environment: &mut Environment) {
    if variable(environment, "FI_LOG_LEVEL").is_empty() {
        set_default(environment, "LANDBRIDGE_LOG", "warn");
    }
}

fn join_paths(first: &OsStr, rest: &OsStr) -> OsString {
    if rest.is_empty() {
        return first.to_owned();
    }
    if std::env::split_paths(rest).next().is_some_and(|path| path == first) {
        return rest.to_owned();
    }
    let mut joined = first.to_owned();
    joined.push(":");
    joined.push(rest);
    joined
}

fn set_default(environment: &mut Environment, name: &str, value: impl Into<OsString>) {
    environment.entry(name.into()).or_insert_with(|| value.into());
}

/// Finds a program as a shell does: names with a slash from `wdir`, other names along `search`.
pub fn find_program(name: &str, wdir: &str, search: &OsStr) -> Result<PathBuf> {
    if name.contains('/') {
        // The path is normalized without a leading `./`.
        let path = Path::new(wdir).join(name).components().collect::<PathBuf>();
        if is_executable(&path) {
            return Ok(path);
        }
        bail!("{}", why_not(&path));
    }
    let mut candidates = std::env::split_paths(search).map(|directory| directory.join(name));
    match candidates.find(|path| is_executable(path)) {
        Some(path) => Ok(path),
        None => bail!(
            "no program {name} in any of the {} directories of PATH; give its path, such as \
             ./{name}",
            std::env::split_paths(search).count()
        ),
    }
}

/// Why the file at `path` cannot be started.
fn why_not(path: &Path) -> String {
    let shown = path.display();
    match path.metadata() {
        Ok(found) if found.is_dir() => format!("{shown} is a directory, not a program"),
        Ok(_) => format!("{shown} is not executable; if it is a program: chmod +x {shown}"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            format!("{shown} does not exist")
        }
        Err(error) => format!("{shown} cannot be looked at: {error}"),
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(family: Family) -> DetectedLibrary {
        DetectedLibrary { family, library: "/opt/mpi/lib/libmpi.so.12".into(), needs_path: true }
    }

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    #[test]
    fn each_library_gets_what_it_needs() {
        let mut mpich = environment(&[("LD_LIBRARY_PATH", "/x")]);
        set_library(&mut mpich, Some(&found(Family::Mpich)), LocalTransport::Own);
        let expected = [
            ("LD_LIBRARY_PATH", "/opt/mpi/lib:/x"),
            ("MPIR_CVAR_CH4_NETMOD", "ofi"),
            ("MPIR_CVAR_NOLOCAL", "1"),
            MPICH_RETRIES,
        ];
        assert_eq!(mpich, environment(&expected));
        let mut intel = environment(&[("FI_PROVIDER", "tcp")]);
        set_library(&mut intel, Some(&found(Family::Intel)), LocalTransport::Own);
        assert_eq!(variable(&intel, "I_MPI_FABRICS"), "ofi");
        assert_eq!(variable(&intel, "I_MPI_OFI_PROVIDER"), "tcp");
        assert!(variable(&intel, "MPIR_CVAR_NOLOCAL").is_empty());
        assert!(variable(&intel, MPICH_RETRIES.0).is_empty());
        let mut unknown = Environment::new();
        set_library(&mut unknown, None, LocalTransport::Own);
        for name in ["I_MPI_FABRICS", "MPIR_CVAR_NOLOCAL"] {
            assert!(!variable(&unknown, name).is_empty(), "{name}");
        }
    }

    #[test]
    fn what_stays_on_a_node_is_left_to_the_library_where_that_is_said() {
        for (family, local, name, value) in [
            (Family::Mpich, LocalTransport::Library, "MPIR_CVAR_NOLOCAL", "0"),
            (Family::Mpich, LocalTransport::LibraryByPlan, "MPIR_CVAR_NOLOCAL", "0"),
            (Family::Intel, LocalTransport::Library, "I_MPI_FABRICS", "shm:ofi"),
            (Family::Intel, LocalTransport::LibraryByPlan, "I_MPI_FABRICS", "ofi"),
        ] {
            let mut environment = Environment::new();
            set_library(&mut environment, Some(&found(family)), local);
            assert_eq!(variable(&environment, name), value, "{family:?}, {local:?}");
            let is_left = family.carries_local_messages(local);
            assert_eq!(leaves_local_to_library(&environment), is_left, "{family:?}, {local:?}");
        }
    }

    #[test]
    fn what_would_pass_us_by_is_refused_with_recover() {
        assert!(check_transport_variables(&environment(&[("MPIR_CVAR_NOLOCAL", "1")])).is_ok());
        for (name, value) in
            [("FI_PROVIDER", "tcp"), ("MPIR_CVAR_CH4_NETMOD", "ucx"), ("MPIR_CVAR_NOLOCAL", "0")]
        {
            let why =
                check_transport_variables(&environment(&[(name, value)])).unwrap_err().to_string();
            assert!(why.contains(&format!("--recover needs {name}=")), "{why}");
        }
    }

    #[test]
    fn a_progress_thread_is_refused_with_recover_under_each_of_its_names() {
        for name in PROGRESS_THREAD {
            for value in ["1", "yes", "TRUE", "on", "2"] {
                let why = check_transport_variables(&environment(&[(name, value)]))
                    .unwrap_err()
                    .to_string();
                assert!(why.contains(&format!("needs {name}=0, and it is {value}")), "{why}");
            }
            for value in ["", "0", "no", "False", "OFF"] {
                assert!(
                    check_transport_variables(&environment(&[(name, value)])).is_ok(),
                    "{value}"
                );
            }
        }
    }

    #[test]
    fn what_differs_from_login_to_login_is_known_by_name() {
        for (name, is_one) in [
            ("SSH_CONNECTION", true),
            ("_", true),
            ("HOSTNAME", true),
            ("_X", false),
            ("HOSTNAMES", false),
            ("PATH", false),
            ("XDG_RUNTIME_DIR", false),
        ] {
            assert_eq!(is_of_a_login(OsStr::new(name)), is_one, "{name}");
        }
    }

    #[test]
    fn the_users_own_setting_wins() {
        let mut mpich = environment(&[("MPIR_CVAR_NOLOCAL", "0")]);
        set_library(&mut mpich, Some(&found(Family::Mpich)), LocalTransport::Own);
        assert_eq!(variable(&mpich, "MPIR_CVAR_NOLOCAL"), "0");
        let mut other = environment(&[("FI_PROVIDER", "verbs")]);
        set_provider(&mut other, Some("tcp")).unwrap();
        assert_eq!(other, environment(&[("FI_PROVIDER", "tcp")]));
    }

    #[test]
    fn the_provider_logs_its_troubles_unless_set_otherwise() {
        let log = |pairs: &[(&str, &str)]| {
            let mut settings = environment(pairs);
            set_log(&mut settings);
            variable(&settings, "LANDBRIDGE_LOG").to_owned()
        };
        assert_eq!(log(&[]), "warn");
        assert_eq!(log(&[("LANDBRIDGE_LOG", "off")]), "off");
        assert_eq!(log(&[("LANDBRIDGE_LOG", "")]), "");
        assert_eq!(log(&[("FI_LOG_LEVEL", "info")]), "");
    }

    #[test]
    fn open_mpi_is_refused_with_the_way_out() {
        let error = check_family(Some(&found(Family::OpenMpi)), "./a.out").unwrap_err();
        assert!(error.to_string().contains("landbridge env --mpi openmpi"));
        assert!(check_family(Some(&found(Family::MpichWithoutOfi)), "./a.out").is_err());
        assert!(check_family(None, "./a.out").is_ok());
    }

    #[test]
    fn ranks_come_back_under_mpich_alone() {
        let check = |family| check_recovery(Some(&found(family)), "./a.out");
        assert!(check(Family::Mpich).is_ok() && check_recovery(None, "./a.out").is_ok());
        let error = check(Family::Intel).unwrap_err().to_string();
        assert!(error.contains("./a.out uses Intel MPI (/opt/mpi/lib/libmpi.so.12)"), "{error}");
    }

    #[test]
    fn a_library_that_is_named_finds_the_libfabric_it_came_with() {
        let root = std::env::temp_dir().join(format!("lb-libfabric-{}", std::process::id()));
        let (lib, own) = (root.join("lib"), root.join("lib/../opt/mpi/libfabric/lib"));
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::create_dir_all(&own).unwrap();
        let found = DetectedLibrary {
            family: Family::Intel,
            library: lib.join("libmpi.so.12"),
            needs_path: true,
        };
        let path = || {
            let mut settings = Environment::new();
            set_library(&mut settings, Some(&found), LocalTransport::Own);
            let system = variable(&settings, "I_MPI_OFI_LIBRARY_INTERNAL") == "0";
            (variable(&settings, "LD_LIBRARY_PATH").to_owned(), system)
        };
        assert_eq!(path(), (lib.clone().into(), true));
        std::fs::write(own.join("libfabric.so.1"), "").unwrap();
        let expected = format!("{}:{}", lib.display(), own.display());
        assert_eq!(path(), (expected.into(), false));
        std::fs::write(lib.join("libfabric.so.1"), "").unwrap();
        assert_eq!(std::env::split_paths(&path().0).next(), Some(lib.clone()));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn programs_are_found_as_a_shell_does() {
        let find = |name, wdir, search: &str| find_program(name, wdir, OsStr::new(search));
        assert_eq!(find("sh", "/", "/nowhere:/bin").unwrap(), Path::new("/bin/sh"));
        assert_eq!(find("./sh", "/bin", "").unwrap(), Path::new("/bin/sh"));
        assert!(find("passwd", "/etc", "").is_err());
        let why = |name, wdir, search| find(name, wdir, search).unwrap_err().to_string();
        assert!(why("./passwd", "/etc", "").starts_with("/etc/passwd is not executable"));
        assert_eq!(why("./no-such", "/etc", ""), "/etc/no-such does not exist");
        assert!(why("./", "/etc", "").starts_with("/etc is a directory"));
        assert!(why("no-such", "/", "/a:/b").contains("any of the 2 directories of PATH"));
    }

    #[test]
    fn paths_are_joined_once() {
        let join = |first: &str, rest: &str| join_paths(OsStr::new(first), OsStr::new(rest));
        assert_eq!(join("/a", ""), "/a");
        assert_eq!(join("/a", "/b"), "/a:/b");
        assert_eq!(join("/a", "/a:/b"), "/a:/b");
    }
}
