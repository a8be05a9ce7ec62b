//! Limits of the machine with real programs: each failure has a line that names the limit and says
//! what to do.

mod common;

use std::process::Output;

use common::{Landbridge, Running, assert_code, python_of, stderr};

const HELLO: &str = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)";

/// Runs a job from a shell after the command `first`, such as `ulimit -n 16`.
fn run_behind(lb: &Landbridge, first: &str, arguments: &[&str]) -> Output {
    let ours = lb.command(arguments);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("{first} && exec \"$@\""), "sh"]);
    command.arg(ours.get_program()).args(ours.get_args());
    for (name, value) in ours.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Running::new(command).finish()
}

#[test]
fn too_few_descriptors_are_named_with_the_limit() {
    let lb = Landbridge::new("limit-files");
    for limit in [8, 16] {
        let output = run_behind(&lb, &format!("ulimit -n {limit}"), &["run", "-n", "8", "true"]);
        assert_code(&output, 1);
        let advice = format!("a process may have {limit} open files: raise that limit (ulimit -n");
        assert!(stderr(&output).contains(&advice), "{}", stderr(&output));
        lb.assert_nothing_left();
    }
}

#[test]
fn little_address_space_is_named_where_a_program_fails() {
    let lb = Landbridge::new("limit-memory");
    let mut words = vec!["run", "-n", "2", "sh", "-c", "exit 3"];
    let output = run_behind(&lb, "ulimit -v 1000000", &words);
    assert_code(&output, 3);
    let lines = stderr(&output);
    assert_eq!(lines.matches("of address space (ulimit -v)").count(), 1, "{lines}");
    // A program that does not fail gets no text about limits.
    *words.last_mut().unwrap() = "exit 0";
    let output = run_behind(&lb, "ulimit -v 1000000", &words);
    assert_code(&output, 0);
    assert_eq!(stderr(&output), "");
    lb.assert_nothing_left();
}

/// The test runs in its own mount namespace, whose `/dev/shm` has no free space.
#[test]
fn a_full_dev_shm_is_named_where_a_rank_is_killed_by_it() {
    let Some(python) = python_of("mpich") else { return };
    let unshare = |program: &str| {
        let mut command = std::process::Command::new("unshare");
        command.args(["-m", program]);
        command
    };
    if !unshare("true").status().is_ok_and(|status| status.success()) {
        return println!("skipped: no mount namespaces here");
    }
    let lb = Landbridge::new("limit-shm");
    let small = "exec unshare -m sh -c 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\"' \
                 sh \"$@\"; true";
    let output = run_behind(&lb, small, &["run", "-n", "2", &python, "-c", HELLO]);
    assert_code(&output, 128 + libc::SIGBUS);
    let lines = stderr(&output);
    assert!(lines.contains("/dev/shm on node") && lines.contains("is full"), "{lines}");
    lb.assert_nothing_left();
}
