//! A job over real ssh: an sshd that the test starts on a high port of the loopback interface.

mod common;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Landbridge, Running, Scratch, assert_code, stderr, stdout};

struct Sshd {
    child: Child,
    files: Scratch,
    port: u16,
}

impl Sshd {
    /// Starts an sshd; `None`, with a reason printed, where there is no sshd or it does not start.
    fn start() -> Option<Sshd> {
        let Some(program) = ["/usr/sbin/sshd", "/usr/bin/sshd", "/sbin/sshd"]
            .into_iter()
            .find(|path| Path::new(path).exists())
        else {
            println!("skipped: there is no sshd; `apt install openssh-server` brings it");
            return None;
        };
        let files = Scratch::new("sshd");
        for key in ["host", "user"] {
            let path = files.0.join(key);
            let status = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(path)
                .status();
            if !status.is_ok_and(|status| status.success()) {
                println!("skipped: ssh-keygen does not work");
                return None;
            }
        }
        std::fs::copy(files.0.join("user.pub"), files.0.join("authorized_keys")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = files.0.display();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\n\
             AuthorizedKeysFile {directory}/authorized_keys\nStrictModes no\nUsePAM no\n\
             PidFile none\nPasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
        );
        let config = files.write("config", &config);
        if rustix::process::geteuid().is_root() {
            // sshd, run as root, needs this directory of its package.
            std::fs::create_dir_all("/run/sshd").unwrap();
        }
        let mut child = Command::new(program)
            .args(["-D", "-e", "-f"])
            .arg(&config)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let ready = lines.by_ref().find(|line| line.contains("Server listening"));
        // The remaining log lines have to be read, or sshd would block.
        std::thread::spawn(move || lines.for_each(drop));
        let sshd = Sshd { child, files, port };
        if ready.is_none() {
            println!("skipped: sshd does not start here");
            return None;
        }
        Some(sshd)
    }

    fn ssh_command(&self) -> String {
        let directory = self.files.0.display();
        format!(
            "[\"ssh\", \"-F\", \"none\", \"-i\", \"{directory}/user\", \
             \"-o\", \"IdentitiesOnly=yes\", \"-o\", \"StrictHostKeyChecking=no\", \
             \"-o\", \"UserKnownHostsFile={directory}/known\", \"-o\", \"LogLevel=ERROR\"]"
        )
    }

    /// A topology of two clusters of two nodes each, every node behind ssh; each cluster's second
    /// node is reached from its first.
    fn grid(&self) -> String {
        let mut text = String::new();
        for cluster in ["nancy", "rennes"] {
            text.push_str(&format!(
                "[[cluster]]\nname = \"{cluster}\"\nssh = {}\nport = {}\n\
                 [cluster.relay]\nhost = \"{cluster}1\"\nlisten = \"127.0.0.1:0\"\n\
                 wan_listen = \"127.0.0.1:0\"\n",
                self.ssh_command(),
                self.port
            ));
            for node in 1..=2 {
                text.push_str(&format!(
                    "[[cluster.host]]\nname = \"{cluster}{node}\"\nlogin = \"127.0.0.1\"\n"
                ));
            }
        }
        text
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn setup(name: &str) -> Option<(Sshd, Landbridge, String)> {
    let sshd = Sshd::start()?;
    let lb = Landbridge::new(name);
    let file = lb.directory.write("grid.toml", &sshd.grid()).display().to_string();
    Some((sshd, lb, file))
}

/// The number of running agents. Ranks behind ssh inherit the mark like any other variable; agents
/// do not, so they are found by the path of their binary.
fn agents(lb: &Landbridge) -> usize {
    let binary = lb.binary().display().to_string();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let is_agent = |entry: &std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.starts_with(format!("{binary}\0agent\0").as_bytes())
    };
    entries.filter(is_agent).count()
}

#[track_caller]
fn assert_nothing_left(lb: &Landbridge) {
    let deadline = std::time::Instant::now() + common::DEADLINE;
    while agents(lb) > 0 {
        assert!(std::time::Instant::now() < deadline, "agents left behind");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    lb.assert_nothing_left();
}

#[test]
fn a_job_runs_over_ssh() {
    let Some((_sshd, lb, file)) = setup("ssh-run") else { return };
    let script = "read -r x; echo $PMI_RANK $LANDBRIDGE_CLUSTER $LANDBRIDGE_NODE $VALUE $x";
    let arguments = ["run", "--topology", &file, "-x", "VALUE=two words", "-v", "sh", "-c", script];
    let mut running = lb.start(&arguments);
    running.write_stdin(b"in\n");
    let output = running.finish();
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    let expected = [
        "0 0 nancy1 two words in",
        "1 0 nancy2 two words",
        "2 1 rennes1 two words",
        "3 1 rennes2 two words",
    ];
    assert_eq!(lines, expected);
    assert_nothing_left(&lb);
}

#[test]
fn a_crash_behind_ssh_is_named_with_node_and_cluster() {
    let Some((_sshd, lb, file)) = setup("ssh-crash") else { return };
    let script = "[ $PMI_RANK = 3 ] && kill -SEGV $$; exec sleep 600";
    let output = lb.run(&["run", "--topology", &file, "sh", "-c", script]);
    assert_code(&output, 139);
    let expected = "rank 3 on node rennes2 (cluster rennes) was killed by signal 11 (SIGSEGV)";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    assert_nothing_left(&lb);
}

#[test]
fn the_end_of_the_launcher_reaches_behind_ssh() {
    let Some((_sshd, lb, file)) = setup("ssh-end") else { return };
    let script = "trap '' TERM HUP; setsid sleep 600 & echo up; while :; do sleep 600; done";
    for (signal, code) in [("INT", Some(130)), ("KILL", None)] {
        let mut running = lb.start(&["run", "--topology", &file, "sh", "-c", script]);
        running.wait_for_lines(4);
        running.signal(signal);
        assert_eq!(running.finish().status.code(), code);
        assert_nothing_left(&lb);
    }
}

#[test]
fn a_dropped_connection_ends_both_sides() {
    let Some((_sshd, lb, file)) = setup("ssh-drop") else { return };
    let mut running = lb.start(&["run", "--topology", &file, "sh", "-c", "echo up; sleep 600"]);
    running.wait_for_lines(4);
    // Killing the ssh client has the effect of a failed network.
    let client = children(running.child.id());
    common::signal_process(client[0], "KILL");
    let output = running.finish();
    assert_code(&output, 1);
    assert!(stderr(&output).contains("lost node"), "{}", stderr(&output));
    assert_nothing_left(&lb);
}

fn children(parent: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn a_host_without_landbridge_is_reported() {
    let Some((sshd, lb, _)) = setup("ssh-missing") else { return };
    let grid = sshd.grid().replacen("[cluster.relay]", "landbridge = \"/no/such\"\n$&", 1);
    let grid = grid.replace("$&", "[cluster.relay]");
    let file = lb.directory.write("missing.toml", &grid).display().to_string();
    let output = Running::new(lb.command(&["run", "--topology", &file, "true"])).finish();
    assert_code(&output, 1);
    let text = stderr(&output);
    let start = "landbridge: cannot start the agent on node nancy1 (cluster nancy): ";
    assert!(text.starts_with(start) && text.contains("/no/such"), "{text}");
    assert!(text.contains("landbridge = \"PATH\""), "{text}");
    assert_nothing_left(&lb);
}

#[test]
fn a_missing_key_is_reported_for_each_host_with_what_to_do() {
    let Some((sshd, lb, file)) = setup("ssh-key") else { return };
    std::fs::remove_file(sshd.files.0.join("authorized_keys")).unwrap();
    let output = lb.run(&["run", "--topology", &file, "true"]);
    assert_code(&output, 1);
    let text = stderr(&output);
    for cluster in ["nancy", "rennes"] {
        let line = format!("cannot start the agent on node {cluster}1 (cluster {cluster}): ");
        assert_eq!(text.matches(&line).count(), 1, "{text}");
    }
    assert!(text.contains("Permission denied (publickey") && !text.contains("lost"), "{text}");
    assert!(text.contains("Try by hand on this machine, it must not ask anything: ssh"), "{text}");
    assert_nothing_left(&lb);
}

#[test]
fn a_host_behind_a_gateway_is_tried_by_hand_from_there() {
    let Some((sshd, lb, _)) = setup("ssh-behind") else { return };
    let name = "name = \"rennes2\"\nlogin = \"127.0.0.1\"";
    let grid = sshd.grid().replace(name, &name.replace("127.0.0.1", "no.such.host.invalid"));
    let file = lb.directory.write("behind.toml", &grid).display().to_string();
    let output = lb.run(&["run", "--topology", &file, "true"]);
    assert_code(&output, 1);
    let text = stderr(&output);
    assert!(
        text.contains("cannot start the agent on node rennes2 (cluster rennes): ssh: "),
        "{text}"
    );
    assert!(text.contains("Try by hand on rennes1, it must not ask anything: ssh"), "{text}");
    assert_nothing_left(&lb);
}
