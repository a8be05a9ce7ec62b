//! An installation of landbridge for tests: its own directory, a mark in the environment of all of
//! its processes, and a deadline for every wait.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Deadline of a wait; no step of a test takes as long on a loaded machine.
pub const DEADLINE: Duration = Duration::from_secs(60);
const MARK: &str = "LANDBRIDGE_TEST_MARK";

/// A directory that is removed when its owner is dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("landbridge-test-{name}-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn write_script(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.write(name, text);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A shell script that behaves like a relay towards the launcher: the script reads its
/// configuration, stores the configuration and its settings, reports that it is ready and linked to
/// the relays that it dials, and runs until its stdin ends.
const RELAY: &str = r#"#!/bin/sh
here=$(dirname "$0")
dialled= peer=
while read -r line && [ "$line" != "---" ]; do
    echo "$line"
    case $peer$line in
    "[[peer]]") peer=yes- ;;
    "yes-cluster = "*) dialled="$dialled ${line#cluster = }" ;;
    esac
done > "$here/config-$$"
env | grep "^LANDBRIDGE_" > "$here/relay-$$.env"
mv "$here/config-$$" "$here/relay-$$.toml"
echo "relay log line" >&2
echo "landbridge-relay: ready ranks=127.0.0.1:7$$ relays=127.0.0.1:8$$"
for cluster in $dialled; do
    if [ -e "$here/relay-is-cut-off" ]; then is="unreachable why=No route"; else is=up; fi
    echo "landbridge-relay: link cluster=$cluster at=192.0.2.1:7711 is=$is"
done
if [ -e "$here/relay-dies" ]; then echo "out of luck" >&2; exit 5; fi
while read -r line; do :; done
"#;

/// One installation of landbridge with its other binaries, and the mark that its processes inherit.
pub struct Landbridge {
    pub directory: Scratch,
    mark: String,
}

impl Landbridge {
    pub fn new(name: &str) -> Landbridge {
        let directory = Scratch::new(name);
        let binary = directory.0.join("landbridge");
        if std::fs::hard_link(env!("CARGO_BIN_EXE_landbridge"), &binary).is_err() {
            std::fs::copy(env!("CARGO_BIN_EXE_landbridge"), &binary).unwrap();
        }
        directory.write_script("landbridge-relay", RELAY);
        let mark = directory.0.display().to_string();
        Landbridge { directory, mark }
    }

    pub fn binary(&self) -> PathBuf {
        self.directory.0.join("landbridge")
    }

    /// A `landbridge` command with libfabric's own tcp provider, so that our provider need not
    /// exist.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let arguments = match arguments.split_first() {
            Some((&"run", rest)) => [&["run", "--provider", "tcp"], rest].concat(),
            _ => arguments.to_vec(),
        };
        self.plain_command(&arguments)
    }

    /// A `landbridge` command with our own provider.
    pub fn plain_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.binary());
        command.args(arguments).env(MARK, &self.mark);
        command.env_remove("LANDBRIDGE_TOPOLOGY").env_remove("LANDBRIDGE_SETTINGS");
        // The settings file of the user who runs the tests must not apply.
        command.env("XDG_CONFIG_HOME", self.directory.0.join("config"));
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.start(arguments).finish()
    }

    pub fn start(&self, arguments: &[&str]) -> Running {
        Running::new(self.command(arguments))
    }

    /// Puts an empty file in place of the provider, which is enough for programs that do not load
    /// the provider.
    pub fn add_provider(&self) {
        self.directory.write("liblandbridge-fi.so", "");
    }

    /// Processes that carry the mark and are not zombies.
    pub fn processes(&self) -> Vec<u32> {
        let wanted = format!("{MARK}={}", self.mark);
        let carries = |pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|entry| entry == wanted.as_bytes())
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(carries).collect()
    }

    /// Processes with the mark whose command line has the argument `word`.
    pub fn processes_with(&self, word: &str) -> Vec<u32> {
        let holds = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|&byte| byte == 0).any(|argument| argument == word.as_bytes())
        };
        self.processes().into_iter().filter(holds).collect()
    }

    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let deadline = Instant::now() + DEADLINE;
        while !self.processes().is_empty() {
            assert!(Instant::now() < deadline, "left behind: {:?}", self.describe());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn describe(&self) -> Vec<String> {
        let line = |pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        self.processes().into_iter().map(|pid| line(pid).unwrap_or_default()).collect()
    }
}

/// A running landbridge, which is killed when its owner is dropped.
pub struct Running {
    pub child: Child,
    pub stdout: BufReader<ChildStdout>,
    stderr: Option<ChildStderr>,
}

impl Running {
    pub fn new(mut command: Command) -> Running {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let stderr = child.stderr.take();
        Running { child, stdout, stderr }
    }

    /// Reads `count` lines of stdout.
    pub fn wait_for_lines(&mut self, count: usize) -> Vec<String> {
        let lines = self.stdout.by_ref().lines().take(count);
        let lines: Vec<String> = lines.map(Result::unwrap).collect();
        assert_eq!(lines.len(), count, "the program ended early: {lines:?}");
        lines
    }

    pub fn signal(&self, signal: &str) {
        signal_process(self.child.id(), signal);
    }

    pub fn write_stdin(&mut self, bytes: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Closes stdin, waits for the end, and returns everything printed since the last read.
    pub fn finish(mut self) -> Output {
        drop(self.child.stdin.take());
        let mut stderr_pipe = self.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = Vec::new();
            stderr_pipe.read_to_end(&mut text).unwrap();
            text
        });
        let mut stdout = Vec::new();
        self.stdout.read_to_end(&mut stdout).unwrap();
        let status = self.wait();
        Output { status, stdout, stderr: stderr.join().unwrap() }
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "landbridge did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn signal_process(pid: u32, signal: &str) {
    let kill = format!("kill -{signal} {pid}");
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub fn assert_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "stderr: {}", stderr(output));
}

/// The Python of a virtual environment with an MPI library and mpi4py, from the directory that
/// LANDBRIDGE_TEST_VENVS names; `None`, with a reason printed, if there is none.
pub fn python_of(library: &str) -> Option<String> {
    let Some(directory) = std::env::var_os("LANDBRIDGE_TEST_VENVS") else {
        println!("skipped: LANDBRIDGE_TEST_VENVS names no directory with {library}/");
        return None;
    };
    let python = Path::new(&directory).join(library).join("bin/python");
    if !python.exists() {
        println!("skipped: {} is missing", python.display());
        return None;
    }
    Some(python.display().to_string())
}
