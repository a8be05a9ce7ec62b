//! `landbridge run` with programs that need no MPI library: the behaviour that users expect of any
//! mpirun.

mod common;

use common::{Landbridge, assert_code, signal_process, stderr, stdout};

#[test]
fn ranks_know_who_they_are() {
    let lb = Landbridge::new("identity");
    let script = "echo $PMI_RANK $PMI_SIZE $LANDBRIDGE_INDEX $LANDBRIDGE_SIZE $LANDBRIDGE_CLUSTER \
                  ${#LANDBRIDGE_JOB} ${#LANDBRIDGE_KEY} ${LANDBRIDGE_RELAY-none}";
    let output = lb.run(&["run", "-n", "3", "sh", "-c", script]);
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["0 3 0 3 0 32 64 none", "1 3 1 3 0 32 64 none", "2 3 2 3 0 32 64 none"]);
    lb.assert_nothing_left();
}

#[test]
fn the_exit_code_of_a_failing_rank_ends_the_job() {
    let lb = Landbridge::new("exit");
    let script = "[ $PMI_RANK = 1 ] && exit 42; exec sleep 600";
    let output = lb.run(&["run", "-n", "3", "sh", "-c", script]);
    assert_code(&output, 42);
    assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
    assert!(stderr(&output).contains("exit code 42"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// A rank may report the loss of a peer before the kernel reports the end of the peer's process.
#[test]
fn a_rank_that_says_it_lost_another_is_not_named() {
    let lb = Landbridge::new("lost");
    let script = "cd $(dirname $0)
        if [ $PMI_RANK = 0 ]; then
            until [ -e ready ]; do sleep 0.01; done
            echo 'landbridge[1]: Warn: the connection to rank 1 is lost: end of file' >&2
            echo > signalled
            exit 1
        fi
        echo > ready
        until [ -e signalled ]; do sleep 0.01; done
        exit 5";
    for clusters in ["1", "2"] {
        let scratch = common::Scratch::new("lost");
        let script = scratch.write("lost.sh", script).display().to_string();
        let output = lb.run(&["run", "-n", "2", "--clusters", clusters, "sh", &script]);
        assert_code(&output, 5);
        assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
    }
    lb.assert_nothing_left();
}

#[test]
fn a_job_nobody_reads_ends_quietly() {
    let lb = Landbridge::new("unread");
    let rows = [
        "\"$0\" run --provider tcp -n 1 yes | head -n 1",
        "\"$0\" run --provider tcp -n 1 sh -c 'while echo y; do :; done >&2' 2>&1 >/dev/null | \
         head -n 1",
    ];
    for line in rows {
        let mut command = std::process::Command::new("bash");
        let ours = lb.command(&[]);
        command.envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.args(["-o", "pipefail", "-c", line]).arg(lb.binary());
        let output = common::Running::new(command).finish();
        assert_code(&output, 141);
        assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("y\n", ""));
    }
    lb.assert_nothing_left();
}

#[test]
fn a_crash_is_named_with_its_rank_and_signal() {
    let lb = Landbridge::new("crash");
    let script = "[ $PMI_RANK = 2 ] && kill -SEGV $$; exec sleep 600";
    let output = lb.run(&["run", "-n", "3", "sh", "-c", script]);
    assert_code(&output, 139);
    let expected = "was killed by signal 11 (SIGSEGV); ending the job";
    assert!(stderr(&output).contains("rank 2 on node"), "{}", stderr(&output));
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    lb.assert_nothing_left();
}

#[test]
fn what_a_rank_said_before_it_crashed_is_printed() {
    let lb = Landbridge::new("last-words");
    let script = "echo before; echo trouble >&2; kill -ABRT $$";
    let output = lb.run(&["run", "-n", "1", "-l", "sh", "-c", script]);
    assert_code(&output, 134);
    assert_eq!(stdout(&output), "[0] before\n");
    let text = stderr(&output);
    let (said, ended) = (text.find("[0] trouble"), text.find("SIGABRT"));
    assert!(said.is_some() && said < ended, "{text}");
}

fn interrupted_by(signal: &str, code: i32) {
    let lb = Landbridge::new("interrupt");
    let mut running = lb.start(&["run", "-n", "3", "sh", "-c", "echo up; exec sleep 600"]);
    running.wait_for_lines(3);
    running.signal(signal);
    let output = running.finish();
    assert_code(&output, code);
    assert!(stderr(&output).contains(&format!("got SIG{signal}")), "{}", stderr(&output));
    lb.assert_nothing_left();
}

#[test]
fn ctrl_c_ends_everything() {
    interrupted_by("INT", 130);
}

#[test]
fn sigterm_ends_everything() {
    interrupted_by("TERM", 143);
}

/// The launcher and its agents get SIGHUP, as when a terminal is closed.
#[test]
fn a_job_under_nohup_outlives_its_terminal() {
    let lb = Landbridge::new("nohup");
    let script =
        "trap '' HUP; exec \"$0\" run --provider tcp -n 1 sh -c 'echo up; read -r line; echo on'";
    let mut command = std::process::Command::new("sh");
    let ours = lb.command(&[]);
    command.envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.args(["-c", script]).arg(lb.binary());
    let mut running = common::Running::new(command);
    running.wait_for_lines(1);
    running.signal("HUP");
    for agent in lb.processes_with("agent") {
        signal_process(agent, "HUP");
    }
    let output = running.finish();
    assert_code(&output, 0);
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("on\n", ""));
    lb.assert_nothing_left();
}

#[test]
fn sighup_ends_everything_without_nohup() {
    interrupted_by("HUP", 129);
}

#[test]
fn signals_that_are_of_no_use_end_nothing() {
    let lb = Landbridge::new("ctrl-z");
    for (signal, said) in [("TSTP", "a job cannot be stopped"), ("USR1", "without --checkpoint")] {
        let mut running = lb.start(&["run", "-n", "1", "sh", "-c", "echo up; sleep 1; echo on"]);
        running.wait_for_lines(1);
        running.signal(signal);
        let output = running.finish();
        assert_code(&output, 0);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
}

/// A program whose ranks ignore SIGTERM, and have children that have left for sessions of their
/// own.
const STUBBORN: &str = "trap '' TERM INT HUP; setsid sleep 600 & \
                        (setsid sh -c 'sleep 600 & wait' &) ; echo up; \
                        while :; do sleep 600; done";

#[test]
fn ctrl_c_ends_the_stubborn_and_the_orphaned() {
    let lb = Landbridge::new("stubborn");
    let mut running = lb.start(&["run", "-n", "2", "sh", "-c", STUBBORN]);
    running.wait_for_lines(2);
    running.signal("INT");
    assert_code(&running.finish(), 130);
    lb.assert_nothing_left();
}

#[test]
fn killing_the_launcher_leaves_nothing() {
    let lb = Landbridge::new("kill-launcher");
    let mut running = lb.start(&["run", "-n", "2", "--clusters", "2", "sh", "-c", STUBBORN]);
    running.wait_for_lines(2);
    running.signal("KILL");
    drop(running);
    lb.assert_nothing_left();
}

#[test]
fn a_killed_agent_ends_the_job() {
    let lb = Landbridge::new("kill-agent");
    let script = "echo up; exec sleep 600";
    let mut running = lb.start(&["run", "-n", "2", "--clusters", "2", "sh", "-c", script]);
    running.wait_for_lines(2);
    signal_process(lb.processes_with("agent")[0], "KILL");
    let output = running.finish();
    assert_code(&output, 1);
    assert!(stderr(&output).contains("lost node"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

#[test]
fn processes_a_rank_leaves_behind_end_with_a_good_job_too() {
    let lb = Landbridge::new("leftover");
    let script = "setsid sleep 600 >/dev/null 2>&1 & echo done";
    let output = lb.run(&["run", "-n", "2", "sh", "-c", script]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "done\ndone\n");
    lb.assert_nothing_left();
}

#[test]
fn what_the_launcher_has_inherited_is_not_given_to_ranks() {
    use std::os::unix::process::CommandExt;
    const NUMBER: i32 = 87;
    let lb = Landbridge::new("inherited");
    let script = format!("test -e /proc/self/fd/{NUMBER} && echo open || echo shut");
    let mut command = lb.command(&["run", "-n", "1", "sh", "-c", &script]);
    // SAFETY: the closure makes one async-signal-safe call.
    unsafe {
        command.pre_exec(|| match libc::dup2(0, NUMBER) {
            NUMBER => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let output = command.output().unwrap();
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "shut\n");
    lb.assert_nothing_left();
}

#[test]
fn stdin_goes_to_rank_0_alone() {
    let lb = Landbridge::new("stdin");
    let mut running = lb.start(&["run", "-n", "3", "cat"]);
    // The text is several times as large as pipes and windows together.
    let text: Vec<u8> = (0..200_000u32).flat_map(|i| format!("{i}\n").into_bytes()).collect();
    let mut stdin = running.child.stdin.take().unwrap();
    let sent = text.clone();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut stdin, &sent).unwrap());
    let output = running.finish();
    writer.join().unwrap();
    assert_code(&output, 0);
    assert!(output.stdout == text, "{} of {} bytes", output.stdout.len(), text.len());
}

#[test]
fn stdin_that_rank_0_does_not_read_stops_nothing() {
    let lb = Landbridge::new("no-stdin");
    let mut running = lb.start(&["run", "-n", "2", "sh", "-c", "exec <&-; echo up; sleep 0.1"]);
    running.wait_for_lines(2);
    // The launcher may have ended before all bytes are written, which is no fault.
    let _ = std::io::Write::write_all(running.child.stdin.as_mut().unwrap(), &[b'x'; 300_000]);
    assert_code(&running.finish(), 0);
}

#[test]
fn labelled_lines_stay_whole_under_load() {
    let lb = Landbridge::new("label");
    let script = "i=0; while [ $i -lt 5000 ]; do printf 'line %s ' $i; \
                  printf 'of rank %s\\n' $PMI_RANK; i=$((i+1)); done";
    let output = lb.run(&["run", "-n", "4", "-l", "sh", "-c", script]);
    assert_code(&output, 0);
    let mut next = [0; 4];
    for line in stdout(&output).lines() {
        let rank: usize = line[1..2].parse().unwrap();
        assert_eq!(line, format!("[{rank}] line {} of rank {rank}", next[rank]));
        next[rank] += 1;
    }
    assert_eq!(next, [5000; 4]);
}

#[test]
fn output_nobody_reads_is_not_gathered_in_memory() {
    let lb = Landbridge::new("back-pressure");
    let mut running = lb.start(&["run", "-n", "1", "sh", "-c", "yes | head -c 64000000"]);
    running.wait_for_lines(1);
    // All buffers between the rank and the test fill up; then the rank waits in its write call.
    let waits = |pid: &u32| {
        let path = format!("/proc/{pid}/wchan");
        std::fs::read_to_string(path).unwrap_or_default().contains("pipe_write")
            || std::fs::read_to_string(format!("/proc/{pid}/syscall"))
                .unwrap_or_default()
                .starts_with("1 0x1 ")
    };
    let deadline = std::time::Instant::now() + common::DEADLINE;
    while !lb.processes_with("head").iter().any(waits) {
        assert!(std::time::Instant::now() < deadline, "the rank never had to wait");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    for pid in [vec![running.child.id()], lb.processes_with("agent")].concat() {
        let memory = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
        let pages: u64 = memory.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(pages * 4096 < 32_000_000, "{} bytes", pages * 4096);
    }
    let output = running.finish();
    assert_code(&output, 0);
    assert!(output.stdout.len() > 63_000_000);
}

#[test]
fn a_job_out_of_time_ends_with_124() {
    let lb = Landbridge::new("timeout");
    let output = lb.run(&["run", "-n", "2", "--timeout", "1", "sleep", "600"]);
    assert_code(&output, 124);
    assert!(stderr(&output).contains("1 s, its timeout"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

#[test]
fn variables_and_directory_reach_the_ranks() {
    let lb = Landbridge::new("env");
    let directory = lb.directory.0.canonicalize().unwrap().display().to_string();
    let script = "echo $ONE $TWO; pwd";
    let arguments =
        ["run", "-n", "1", "-x", "ONE=1 1", "-x", "TWO", "--wdir", &directory, "sh", "-c", script];
    let mut command = lb.command(&arguments);
    command.env("TWO", "2");
    let output = common::Running::new(command).finish();
    assert_code(&output, 0);
    assert_eq!(stdout(&output), format!("1 1 2\n{directory}\n"));
}

/// Environments may hold any bytes, such as a Latin-1 path.
#[test]
fn variables_that_are_not_text_reach_the_ranks() {
    use std::os::unix::ffi::OsStrExt;
    let lb = Landbridge::new("env-bytes");
    let mut command = lb.command(&["run", "-n", "1", "sh", "-c", "printf %s \"$BYTES\""]);
    let bytes: &[u8] = b"/caf\xe9";
    let path = [std::env::var_os("PATH").unwrap().as_bytes(), b":", bytes].concat();
    command.env("BYTES", std::ffi::OsStr::from_bytes(bytes));
    command.env("PATH", std::ffi::OsStr::from_bytes(&path));
    let output = common::Running::new(command).finish();
    assert_code(&output, 0);
    assert_eq!(output.stdout, bytes);
}

#[test]
fn mistakes_are_reported_with_what_to_do() {
    let lb = Landbridge::new("mistakes");
    let rows: [(&[&str], &str); 8] = [
        (&["run", "--clusers", "2", "-n", "2", "true"], "no option --clusers"),
        (&["run", "-n", "2", "no-such-program"], "no program no-such-program in any of"),
        (&["run", "-n", "2", "./no-such-program"], "no-such-program does not exist"),
        (&["run", "-np", "2", "/etc/passwd"], "/etc/passwd is not executable"),
        (&["run", "-n", "2", "--wdir", "/no/such", "true"], "choose one with --wdir"),
        (&["run", "true"], "-n"),
        (&["run", "-n", "2", "--clusters", "3", "true"], "cannot be cut"),
        (&["run", "-n", "1", "-x", "NOT_SET_HERE", "true"], "NOT_SET_HERE=VALUE"),
    ];
    for (arguments, expected) in rows {
        let output = lb.run(arguments);
        assert_code(&output, 1);
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
    let command = lb.plain_command(&["run", "-n", "1", "true"]);
    let output = common::Running::new(command).finish();
    assert_code(&output, 1);
    assert!(stderr(&output).contains("make build"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

// --- the process manager, spoken to by a shell

const PMI_CLIENT: &str = r#"
say() { echo "$1" >&$PMI_FD; read -r answer <&$PMI_FD; }
say "cmd=init pmi_version=1 pmi_subversion=1"
"#;

#[test]
fn keys_cross_clusters_at_a_barrier() {
    let lb = Landbridge::new("pmi");
    let script = format!(
        "{PMI_CLIENT}
        say 'cmd=get_my_kvsname'; name=${{answer##*=}}
        say \"cmd=put kvsname=$name key=k$PMI_RANK value=v$PMI_RANK\"
        say 'cmd=barrier_in'
        for i in 0 1 2 3; do say \"cmd=get kvsname=$name key=k$i\"; echo ${{answer##*=}}; done
        say 'cmd=get key=PMI_process_mapping'; echo \"${{answer#*value=}}\"
        say 'cmd=finalize'"
    );
    let output = lb.run(&["run", "-n", "4", "--clusters", "2", "bash", "-c", &script]);
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    let values = ["(vector,(0,2,2))", "v0", "v1", "v2", "v3"];
    let expected: Vec<&str> = values.iter().flat_map(|value| [*value; 4]).collect();
    assert_eq!(lines, expected);
}

#[test]
fn published_names_cross_clusters() {
    let lb = Landbridge::new("names");
    let script = format!(
        "{PMI_CLIENT}
        if [ $PMI_RANK = 0 ]; then say 'cmd=publish_name service=s port=p0'; fi
        say 'cmd=barrier_in'
        say 'cmd=lookup_name service=s'; echo ${{answer##*=}}
        say 'cmd=finalize'"
    );
    let output = lb.run(&["run", "-n", "2", "--clusters", "2", "bash", "-c", &script]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "p0\np0\n");
}

#[test]
fn an_abort_ends_the_job_with_its_code() {
    let lb = Landbridge::new("abort");
    let script = format!(
        "{PMI_CLIENT}
        [ $PMI_RANK = 1 ] && echo 'cmd=abort exitcode=9 message=no more' >&$PMI_FD
        exec sleep 600"
    );
    let output = lb.run(&["run", "-n", "3", "bash", "-c", &script]);
    assert_code(&output, 9);
    assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
    assert!(stderr(&output).contains("with code 9: no more"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// MPI libraries return from MPI_Abort, and the launcher does not end the job at once; nevertheless
/// no rank's later output appears.
#[test]
fn who_has_aborted_and_those_beside_it_say_no_more() {
    let lb = Landbridge::new("silent");
    let scratch = common::Scratch::new("silent");
    let script = format!(
        "{PMI_CLIENT}
        cd $(dirname $0)
        if [ $PMI_RANK = 1 ]; then
            echo before
            echo 'cmd=abort exitcode=9 message=no more' >&$PMI_FD
            echo > aborted
        fi
        until [ -e aborted ]; do sleep 0.01; done
        sleep 0.15
        echo after
        exec sleep 600"
    );
    let script = scratch.write("silent.sh", &script).display().to_string();
    let output = lb.run(&["run", "-n", "3", "bash", &script]);
    assert_code(&output, 9);
    assert_eq!(stdout(&output), "before\n");
    assert!(stderr(&output).contains("with code 9: no more"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// The rank that ends is in the other cluster, on the same agent, or both.
#[test]
fn a_rank_that_leaves_others_in_a_barrier_ends_the_job() {
    let lb = Landbridge::new("stuck");
    let script = format!(
        "{PMI_CLIENT}
        [ $PMI_RANK = 1 ] && exit 0
        say 'cmd=barrier_in'"
    );
    for clusters in ["1", "2"] {
        let output = lb.run(&["run", "-n", "2", "--clusters", clusters, "bash", "-c", &script]);
        assert_code(&output, 1);
        assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
        assert!(stderr(&output).contains("without MPI_Finalize"), "{}", stderr(&output));
    }
    lb.assert_nothing_left();
}

/// Python does the same after an exception: MPI is finalized, then the process exits with code 1.
#[test]
fn an_error_after_finalize_ends_the_job_after_a_grace() {
    let lb = Landbridge::new("left");
    let script = |other: &str| {
        format!(
            "{PMI_CLIENT}
            [ $PMI_RANK = 0 ] && {other}
            say 'cmd=finalize'
            exit 3"
        )
    };
    let output = lb.run(&["run", "-n", "2", "bash", "-c", &script("exec sleep 600")]);
    assert_code(&output, 3);
    let text = stderr(&output);
    assert!(
        text.contains("ended with exit code 3 after MPI_Finalize; unless the others"),
        "{text}"
    );
    assert!(text.ends_with("ended with exit code 3; ending the job\n"), "{text}");
    let output = lb.run(&["run", "-n", "2", "bash", "-c", &script("exec true")]);
    assert_code(&output, 3);
    let text = stderr(&output);
    assert!(text.starts_with("landbridge: rank 1 on node "), "{text}");
    assert!(text.ends_with(" ended with exit code 3, after MPI_Finalize\n"), "{text}");
    lb.assert_nothing_left();
}

// --- relays

#[test]
fn clusters_get_relays_that_know_each_other() {
    let lb = Landbridge::new("clusters");
    let script = "echo $PMI_RANK $LANDBRIDGE_CLUSTER $LANDBRIDGE_RELAY";
    let log = lb.directory.0.join("relay.log").display().to_string();
    let arguments = ["run", "-n", "3", "--clusters", "2", "--relay-log", &log, "sh", "-c", script];
    let output = lb.run(&arguments);
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    for (line, cluster) in lines.iter().zip([0, 0, 1]) {
        let relay = line.split(' ').nth(2).unwrap();
        assert!(line.contains(&format!(" {cluster} unix:@landbridge-")), "{line}");
        assert!(relay.contains(&format!("-relay-{cluster},tcp:127.0.0.1:7")), "{line}");
    }
    assert!(std::fs::read_to_string(log).unwrap().contains("relay c1: relay log line"));
    let configs = std::fs::read_dir(&lb.directory.0).unwrap().flatten().map(|entry| entry.path());
    let configs = configs.filter(|path| path.extension().is_some_and(|e| e == "toml"));
    let configs: Vec<String> = configs.map(|p| std::fs::read_to_string(p).unwrap()).collect();
    assert_eq!(configs.len(), 2);
    let dialling: Vec<&String> = configs.iter().filter(|text| text.contains("[[peer]]")).collect();
    assert_eq!(dialling.len(), 1);
    assert!(dialling[0].contains("address = \"127.0.0.1:8"), "{}", dialling[0]);
    lb.assert_nothing_left();
}

#[test]
fn a_relay_that_dies_ends_the_job_with_its_last_words() {
    let lb = Landbridge::new("relay-dies");
    lb.directory.write("relay-dies", "");
    let output = lb.run(&["run", "-n", "2", "--clusters", "2", "sleep", "600"]);
    assert_code(&output, 1);
    let text = stderr(&output);
    assert!(text.contains("the relay of cluster c0 exited with code 5"), "{text}");
    assert!(text.contains("out of luck"), "{text}");
    lb.assert_nothing_left();
}

#[test]
fn clusters_that_cannot_be_linked_get_no_ranks() {
    let lb = Landbridge::new("no-link");
    lb.directory.write("relay-is-cut-off", "");
    let output = lb.run(&[
        "run",
        "-n",
        "2",
        "--clusters",
        "2",
        "--set",
        "peer_timeout=8s",
        "echo",
        "started",
    ]);
    assert_code(&output, 1);
    assert_eq!(stdout(&output), "");
    let text = stderr(&output);
    assert_eq!(text.matches("cannot reach the relay of c0").count(), 1, "{text}");
    assert!(text.contains("after 8s the relay of c1"), "{text}");
    assert!(text.contains("has not reached the relay of c0"), "{text}");
    assert!(text.contains("(192.0.2.1:7711): No route"), "{text}");
    lb.assert_nothing_left();
}

#[test]
fn a_topology_places_ranks_and_is_found_by_its_variable() {
    let lb = Landbridge::new("topology");
    let file = lb.directory.write("grid.toml", GRID);
    let mut command = lb.command(&["run", "sh", "-c", "echo $PMI_RANK $LANDBRIDGE_NODE $PREFIX"]);
    command.env("LANDBRIDGE_TOPOLOGY", &file);
    let output = common::Running::new(command).finish();
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["0 a1 yes", "1 a1 yes", "2 a2", "3 b1"]);
    let broken = lb.directory.write("broken.toml", &GRID.replace("slots = 2", "slot = 2"));
    let output = lb.run(&["run", "--topology", &broken.display().to_string(), "true"]);
    assert_code(&output, 1);
    assert!(stderr(&output).contains("broken.toml: line 12: unknown field"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

const GRID: &str = r#"[[cluster]]
name = "a"
spawn = "local"
[cluster.relay]
host = "gw"
listen = "127.0.0.1:0"
wan_listen = "127.0.0.1:0"
[[cluster.host]]
name = "a1"
address = "127.0.0.1"
shell = ["env", "PREFIX=yes"]
slots = 2
[[cluster.host]]
name = "a2"
[[cluster.host]]
name = "gw"
slots = 0

[[cluster]]
name = "b"
spawn = "local"
[cluster.relay]
host = "b1"
listen = "127.0.0.1:0"
[[cluster.host]]
name = "b1"
"#;

#[test]
fn a_host_that_does_not_answer_does_not_hold_up_the_end() {
    let lb = Landbridge::new("silent-host");
    let grid = "[[cluster]]\nname = \"a\"\nssh = [\"sh\", \"-c\", \"echo hello >&2; exec sleep \
                600\"]\n\
                [[cluster.host]]\nname = \"a1\"\n";
    let file = lb.directory.write("grid.toml", grid).display().to_string();
    let output = lb.run(&["run", "--topology", &file, "--timeout", "1", "true"]);
    assert_code(&output, 124);
    lb.assert_nothing_left();
}

#[test]
fn a_second_ctrl_c_ends_what_the_first_could_not() {
    let lb = Landbridge::new("twice");
    let script = "trap 'echo asked' TERM; echo up; while :; do sleep 600 & wait; done";
    let mut running = lb.start(&["run", "-n", "1", "sh", "-c", script]);
    running.wait_for_lines(1);
    running.signal("INT");
    running.wait_for_lines(1);
    running.signal("INT");
    assert_code(&running.finish(), 130);
    lb.assert_nothing_left();
}
