//! Labs with real namespaces. Where this machine does not allow namespaces, every test here prints
//! so and passes.
//!
//! Each test runs the program as a user does, with a shell script as the command in the lab. `$LAB`
//! is the program; `serve MACHINE` starts the probes' server on a machine and returns when the
//! server answers.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use landbridge_lab::net::{namespace, tun};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PROGRAM: &str = env!("CARGO_BIN_EXE_landbridge-lab");

/// Deadline of a lab; no test takes a third of this time on an idle machine.
const DEADLINE: Duration = Duration::from_secs(40);

#[test]
fn gateways_see_the_delay_of_their_link() {
    let Some(_lock) = lock_lab() else { return };
    let output = lab(
        "delay",
        &two_sites("delay = '5 ms'"),
        "serve b-gw; $LAB on a-gw -- $LAB probe delay b-wan",
    );
    let text = succeeded(&output);
    assert!(text.contains("answers=20/20"), "{text}");
    // Two times 5 ms of delay. The test takes the fastest answer, because hosts are slow on a busy
    // machine.
    assert!((10_000.0..11_000.0).contains(&number(&text, "min_us=")), "{text}");
}

#[test]
fn a_tcp_connection_gets_the_rate_of_its_link() {
    let Some(_lock) = lock_lab() else { return };
    let link = "rate = '100 Mbit/s'\ndelay = '2 ms'";
    let script = "serve b-gw; for try in 1 2 3; do
            $LAB on a-gw -- $LAB probe rate b-wan --seconds 1.5
        done";
    let text = succeeded(&lab("rate", &two_sites(link), script));
    assert_rate(&text, 100.0);
}

#[test]
fn an_emulated_lan_has_rate_and_delay() {
    let Some(_lock) = lock_lab() else { return };
    let site = "[[site]]\nname = 'a'\nhosts = 2\nlan = { rate = '50 Mbit/s', delay = '1 ms' }\n";
    let script = "serve a-2; $LAB probe delay a-2
        for try in 1 2 3; do $LAB probe rate a-2 --seconds 1; done";
    let text = succeeded(&lab("lan", site, script));
    assert!((2_000.0..3_000.0).contains(&number(&text, "min_us=")), "{text}");
    assert_rate(&text, 50.0);
}

#[test]
fn hosts_of_different_sites_meet_only_where_gateways_forward() {
    let Some(_lock) = lock_lab() else { return };
    let script = "serve b-1; $LAB probe connect b-1 && echo through";
    let closed = lab("closed", &two_sites(""), script);
    assert_eq!(closed.status.code(), Some(1), "{}", text_of(&closed));
    assert!(text_of(&closed).contains("refused"), "{}", text_of(&closed));

    let open = two_sites("").replace("hosts = 1", "hosts = 1\nforward = true");
    assert!(succeeded(&lab("open", &open, script)).contains("through"));
}

#[test]
fn a_site_may_accept_nothing_or_some_ports_only() {
    let Some(_lock) = lock_lab() else { return };
    let file = two_sites("").replacen("hosts = 1", "hosts = 1\ninbound = [7711]", 1);
    let file = file.replace("name = 'b'", "name = 'b'\ninbound = false");
    let script = "serve a-gw --port 7711; serve a-gw --port 7712; serve b-gw --port 7711
        for try in 'b-gw a-wan:7711' 'b-gw a-wan:7712' 'a-gw b-wan:7711'; do
            set -- $try
            $LAB on $1 -- $LAB probe connect $2 --seconds 0.5
        done; true";
    let text = succeeded(&lab("inbound", &file, script));
    let verdicts: Vec<&str> =
        text.lines().map(|line| line.split(':').next().unwrap_or("")).collect();
    assert_eq!(verdicts, ["connected", "refused", "refused"], "{text}");
}

#[test]
fn the_same_seed_loses_the_same_packets() {
    let Some(_lock) = lock_lab() else { return };
    let link = "delay = '1 ms'\nto.b = { loss = '20 %' }";
    let script = "serve b-gw; $LAB on a-gw -- $LAB probe loss b-wan --count 200";
    let run = |seed: u32| {
        let file = format!("seed = {seed}\n{}", two_sites(link));
        succeeded(&lab("seed", &file, script))
    };
    let first = run(7);
    let survivors = first.split_whitespace().count();
    assert!((130..190).contains(&survivors), "{survivors} of 200 with 20 % loss");
    assert_eq!(first, run(7));
    assert_ne!(first, run(8));
}

#[test]
fn tcp_survives_every_kind_of_fault() {
    let Some(_lock) = lock_lab() else { return };
    let link =
        "rate = '50 Mbit/s'\ndelay = '1 ms'\njitter = '1 ms'\nloss = '0.2 %'\ncorrupt = '0.2 %'
        duplicate = '1 %'\nreorder = '1 %'";
    let script = "serve b-gw; $LAB on a-gw -- $LAB probe rate b-wan --seconds 2; $LAB link .";
    let text = succeeded(&lab("trouble", &two_sites(link), script));
    assert!(number(&text, "mbit_per_s=") > 1.0, "{text}");
    let forth = text.lines().find(|line| line.starts_with("a>b")).unwrap_or_default();
    for count in ["lost=", "duplicated=", "reordered=", "corrupted="] {
        assert!(number(forth, count) > 0.0, "{forth}");
    }
}

#[test]
fn what_is_larger_than_a_link_takes_vanishes() {
    let Some(_lock) = lock_lab() else { return };
    let came = |bytes: u32| {
        let script =
            format!("serve b-gw; $LAB on a-gw -- $LAB probe loss b-wan --count 20 --bytes {bytes}");
        let text = succeeded(&lab("small", &two_sites("to.b = { mtu = 1280 }"), &script));
        text.split_whitespace().count()
    };
    // 28 of the bytes are headers.
    assert_eq!((came(1252), came(1253)), (20, 0));
}

#[test]
fn corruption_is_hidden_from_checksums_only_on_request() {
    let Some(_lock) = lock_lab() else { return };
    let script = "serve b-gw; $LAB on a-gw -- $LAB probe loss b-wan --count 50 --bytes 1000";
    let run = |repair: bool| {
        let link = format!("to.b = {{ corrupt = '100 %', repair_checksums = {repair} }}");
        succeeded(&lab("damage", &two_sites(&link), script)).split_whitespace().count()
    };
    assert_eq!(run(false), 0, "a checksum missed damage");
    assert_eq!(run(true), 50);
}

#[test]
fn the_kernel_accepts_corruption_with_valid_checksums() {
    let Some(_lock) = lock_lab() else { return };
    let link = "to.b = { corrupt = '100 %', repair_checksums = true }";
    let script = "serve b-gw; $LAB on a-gw -- $LAB probe echoes b-wan
        $LAB on a-gw -- $LAB probe echoes b-wan --bytes 8000";
    let text = succeeded(&lab("behind", &two_sites(link), script));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "received=100/100 corrupted=100 duplicated=0 reordered=0");
    // Each datagram has six fragments, all of them corrupted, and is reassembled.
    assert!(number(lines[1], "received=") > 90.0, "{text}");
    assert_eq!(number(lines[1], "received="), number(lines[1], "corrupted="), "{text}");
}

#[test]
fn a_rail_loses_duplicates_and_reorders_datagrams_alone() {
    let Some(_lock) = lock_lab() else { return };
    let site = "[[site]]\nname = 'a'\nhosts = 2\nrails = 2\nrail.1 = { delay = '2 ms' }\n";
    let script = "serve a-2
        $LAB link . a-LAN1 --duplicate 20% --reorder 20% --reorder-by 5ms > /dev/null
        $LAB probe echoes a-2-lan1 --count 200; $LAB probe echoes a-2
        $LAB link . a-LAN1 --restore > /dev/null; $LAB probe echoes a-2-lan1
        $LAB probe delay a-2-lan1";
    let text = succeeded(&lab("mixed", site, script));
    let lines: Vec<&str> = text.lines().collect();
    assert!(number(lines[0], "received=") > 220.0, "{text}");
    assert!(number(lines[0], "duplicated=") > 20.0, "{text}");
    assert!(number(lines[0], "reordered=") > 20.0, "{text}");
    for quiet in [lines[1], lines[2]] {
        assert_eq!(quiet, "received=100/100 corrupted=0 duplicated=0 reordered=0", "{text}");
    }
    assert!((4_000.0..6_000.0).contains(&number(lines[3], "min_us=")), "{text}");
}

#[test]
fn interfaces_go_down_and_come_back_with_their_routes() {
    let Some(_lock) = lock_lab() else { return };
    let sites = two_sites("").replacen("hosts = 1", "hosts = 2\nrails = 2", 1);
    let script = "serve a-2; serve b-gw
        try() { $LAB on $1 -- $LAB probe connect $2 --seconds 0.3 | cut -d: -f1; }
        turn() { $LAB interface $* > /dev/null; }
        turn . a-1 lan1 down; try a-1 a-2-lan1; try a-1 a-2
        turn going a-1 lan1 up; try a-1 a-2-lan1
        turn . a-1 lan0 down; try a-1 a-2; try a-1 a-2-lan1; ip route show default
        turn . a-1 lan0 up; try a-1 a-2; ip route show default
        turn . b-gw wan0 down; try a-gw b-wan
        turn . b-gw wan0 up; try a-gw b-wan
        ip link set lan1 down; try a-1 a-2-lan1; ip link set lan1 up; try a-1 a-2-lan1";
    let text = succeeded(&lab("going", &sites, script));
    let said: Vec<&str> = text.lines().map(str::trim_end).collect();
    let [yes, no] = ["connected", "refused"];
    let route = "default via 10.1.0.1 dev lan0 onlink";
    assert_eq!(said, [no, yes, yes, no, yes, yes, route, no, yes, no, yes], "{text}");
}

#[test]
fn a_relay_stops_and_goes_on() {
    let Some(_lock) = lock_lab() else { return };
    // Any program of this name counts as a relay; a program of the same name on another machine is
    // not stopped.
    let script = "cp $(command -v sleep) /dev/shm/landbridge-relay
        $LAB relay . a stop; $LAB on b-gw -- /dev/shm/landbridge-relay 60 & other=$!
        $LAB on a-gw -- /dev/shm/landbridge-relay 60 & relay=$!
        until $LAB relay . a stop 2> /dev/null; do sleep 0.05; done
        state() { sed 's/.*) \\(.\\).*/\\1/' /proc/$1/stat; }
        await() { until [ $(state $1) = $2 ]; do sleep 0.01; done; echo $2; }
        await $relay T; await $other S
        $LAB relay . a continue; await $relay S; kill $relay $other";
    let output = lab("stopping", &two_sites(""), script);
    let text = succeeded(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines, ["relay of a stopped", "T", "S", "relay of a goes on", "S"]);
    assert!(text_of(&output).contains("no relay is running on `a-gw`"), "{}", text_of(&output));
}

#[test]
fn links_change_while_the_lab_runs() {
    let Some(_lock) = lock_lab() else { return };
    let script = "serve b-gw
        $LAB on a-gw -- $LAB probe connect b-wan
        $LAB link changing a-b --down > /dev/null
        $LAB on a-gw -- $LAB probe connect b-wan --seconds 0.3
        $LAB link . a-b --up --delay '20 ms' > /dev/null
        $LAB on a-gw -- $LAB probe delay b-wan";
    let text = succeeded(&lab("changing", &two_sites(""), script));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0] == "connected" && lines[1].starts_with("refused"), "{text}");
    assert!((40_000.0..42_000.0).contains(&number(lines[2], "min_us=")), "{text}");
}

/// The test needs no lab: a schedule is only computed.
#[test]
fn a_soak_says_beforehand_what_will_fail() {
    let soak = |words: &str| {
        let words = words.split(' ').chain(["--schedule"]);
        Command::new(PROGRAM).arg("soak").args(words).output().unwrap()
    };
    let text = succeeded(&soak("--seed 7 --minutes 1"));
    assert!(text.lines().count() > 10, "{text}");
    assert_eq!(text, succeeded(&soak("--seed 7 --minutes 1")));
    assert_ne!(text, succeeded(&soak("--seed 8 --minutes 1")));
    let only = succeeded(&soak("--seed 7 --minutes 1 --faults wan-cut"));
    assert!(only.lines().skip(1).all(|line| line.contains("nothing passes")), "{only}");
    let wrong = soak("--faults frost");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text_of(&wrong).contains("there are loss1, loss5"), "{}", text_of(&wrong));
}

#[test]
fn links_change_from_outside_too() {
    let Some(_lock) = lock_lab() else { return };
    let mut running = start("outside", &two_sites(""), "echo up; sleep 1000");
    read_until(&mut running, "up");
    let link = |arguments: &[&str]| {
        let output = Command::new(PROGRAM).args(["link", "outside"]).args(arguments).output();
        succeeded(&output.unwrap())
    };
    link(&["a>b", "--loss", "5 %"]);
    let text = link(&[]);
    assert!(text.contains("a>b: unlimited rate, delay 0 ns, loss 5 %;"), "{text}");
    assert!(text.contains("b>a: unlimited rate, delay 0 ns;"), "{text}");
    let second = lab("outside", &two_sites(""), "true");
    assert!(text_of(&second).contains("running already"), "{}", text_of(&second));
    kill(&running, "-TERM");
    assert_eq!(end_of(running).status.code(), Some(143));
    let gone = Command::new(PROGRAM).args(["link", "outside"]).output().unwrap();
    assert!(text_of(&gone).contains("no lab called `outside`"), "{}", text_of(&gone));
    assert!(text_of(&gone).contains("lab run FILE"), "{}", text_of(&gone));
    assert!(!text_of(&gone).contains("os error"), "{}", text_of(&gone));
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    let Some(_lock) = lock_lab() else { return };
    for (script, code) in
        [("true", 0), ("exit 3", 3), ("kill -9 $$", 137), ("exec /no/such/program", 127)]
    {
        assert_eq!(lab("code", &two_sites(""), script).status.code(), Some(code), "{script}");
    }
    let wrong = lab("wrong", "[[site]]\nname = 'a'\nhosts = 0\n", "true");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text_of(&wrong).contains("wrong.toml:3: "), "{}", text_of(&wrong));
}

#[test]
fn a_signal_reaches_the_command_and_ends_the_lab() {
    let Some(_lock) = lock_lab() else { return };
    let mut running = start(
        "signal",
        &two_sites(""),
        "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done",
    );
    read_until(&mut running, "up");
    let before = Traces::of("signal", &running);
    kill(&running, "-TERM");
    assert_eq!(end_of(running).status.code(), Some(7));
    before.assert_gone();
}

#[test]
fn nothing_is_left_after_a_kill() {
    let Some(_lock) = lock_lab() else { return };
    let interfaces = names_in("/sys/class/net");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    // The script has a command that ignores signals, a daemon in its own session, and a process in
    // another namespace.
    let script =
        "trap '' TERM HUP INT; setsid sleep 1000 & $LAB on b-1 -- sleep 1000 & echo up; sleep 1000";
    let mut running = start("killed", &two_sites(""), script);
    read_until(&mut running, "up");
    let before = Traces::of("killed", &running);
    assert!(before.processes() >= 4, "{before:?}");
    kill(&running, "-KILL");
    end_of(running);
    before.assert_gone();
    assert_eq!(names_in("/sys/class/net"), interfaces);
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts);
}

/// The traces of a running lab that are visible from outside.
#[derive(Debug)]
struct Traces {
    /// The kernel's name of the lab's PID namespace.
    pid_namespace: String,
    socket: String,
}

impl Traces {
    fn of(name: &str, monitor: &Child) -> Traces {
        let children = format!("/proc/{0}/task/{0}/children", monitor.id());
        let init = fs::read_to_string(children).unwrap();
        let link = fs::read_link(format!("/proc/{}/ns/pid", init.trim())).unwrap();
        let traces = Traces {
            pid_namespace: link.to_string_lossy().into_owned(),
            socket: format!("/{name}"),
        };
        assert!(traces.has_socket(), "not listening");
        traces
    }

    /// Number of processes in the lab. Only these processes and their mounts hold the lab's network
    /// namespaces.
    fn processes(&self) -> usize {
        let is_inside = |path: &Path| {
            fs::read_link(path.join("ns/pid"))
                .is_ok_and(|link| link.to_string_lossy() == self.pid_namespace)
        };
        fs::read_dir("/proc").unwrap().flatten().filter(|entry| is_inside(&entry.path())).count()
    }

    fn has_socket(&self) -> bool {
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        sockets
            .lines()
            .any(|line| line.contains("@landbridge-lab/") && line.ends_with(&self.socket))
    }

    /// Waits until no trace is left; the kernel ends killed processes within moments.
    fn assert_gone(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.processes() > 0 || self.has_socket() {
            assert!(Instant::now() < deadline, "{} processes left, {self:?}", self.processes());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Locks the lab, because tests that measure time on few cores run one at a time; `None` where labs
/// cannot be built.
fn lock_lab() -> Option<MutexGuard<'static, ()>> {
    static LOCK: Mutex<()> = Mutex::new(());
    match why_not() {
        None => Some(LOCK.lock().unwrap_or_else(PoisonError::into_inner)),
        Some(reason) => {
            // The line bypasses the capture of a passing test's output, so that a skipped test is
            // visible.
            let _ = writeln!(std::io::stderr(), "skipped: {reason}");
            None
        }
    }
}

/// The reason why this machine cannot run labs; namespaces are tested without the code under test.
fn why_not() -> Option<String> {
    if let Err(error) = namespace::check_tools().and_then(|()| tun::check_available()) {
        return Some(error.to_string());
    }
    let may = |flags: &str| {
        let mut unshare = Command::new("unshare");
        unshare.args([flags, "--fork", "mount", "-t", "tmpfs", "none", "/dev/shm"]);
        unshare.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let is_possible = may("-nmp") || may("-rnmp");
    (!is_possible).then(|| namespace::NAMESPACES_REFUSED.to_owned())
}

/// Checks the rate of TCP over a link: TCP carries 1,448 of each 1,500 bytes, and never more than
/// the link's rate. Only the best of several tries must come near the rate, because a busy machine
/// slows down TCP and not the link.
fn assert_rate(text: &str, link_mbit_per_s: f64) {
    let possible = link_mbit_per_s * 1448.0 / 1500.0;
    let shares =
        text.match_indices("mbit_per_s=").map(|(at, key)| number(&text[at..], key) / possible);
    let best = shares.fold(0.0, f64::max);
    assert!((0.95..1.02).contains(&best), "{text}");
}

fn two_sites(link: &str) -> String {
    format!(
        "[[site]]\nname = 'a'\nhosts = 1\n[[site]]\nname = 'b'\nhosts = 1\n\
         [[link]]\nbetween = ['a', 'b']\n{link}\n"
    )
}

fn lab(name: &str, file: &str, script: &str) -> Output {
    end_of(start(name, file, script))
}

fn start(name: &str, file: &str, script: &str) -> Child {
    const PRELUDE: &str = "serve() {
        machine=$1; shift
        mkfifo /dev/shm/ready
        $LAB on $machine -- $LAB probe serve $* > /dev/shm/ready &
        read answer < /dev/shm/ready
        rm /dev/shm/ready
    }\n";
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("{name}.toml"));
    fs::write(&path, file).unwrap();
    Command::new(PROGRAM)
        .args(["run", "--name", name])
        .arg(&path)
        .args(["--", "sh", "-c", &format!("{PRELUDE}{script}")])
        .env("LAB", PROGRAM)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a lab, kills the lab at the deadline, and collects its output.
fn end_of(mut child: Child) -> Output {
    let deadline = Instant::now() + DEADLINE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("still running after {DEADLINE:?}: {}", text_of(&output));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn read_until(child: &mut Child, word: &str) {
    let deadline = Instant::now() + DEADLINE;
    let mut seen = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    while !seen.contains(word) {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&*stdout, PollFlags::IN)], Some(&timeout)).unwrap();
        assert_eq!(ready, 1, "silent after `{seen}`");
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "ended after `{seen}`");
        seen.push(char::from(byte[0]));
    }
}

fn kill(child: &Child, signal: &str) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{:?}: {}", output.status, text_of(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The number after `key`.
fn number(text: &str, key: &str) -> f64 {
    let rest = text.split_once(key).unwrap_or_else(|| panic!("no {key} in {text}")).1;
    let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
    rest[..end].parse().unwrap()
}

fn names_in(dir: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
