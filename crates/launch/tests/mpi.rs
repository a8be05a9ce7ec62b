//! `landbridge run` with real MPI libraries, over libfabric's own tcp provider.

mod common;

use std::path::Path;

use common::{Landbridge, assert_code, python_of, signal_process, stderr, stdout};

const HELLO: &str = "from mpi4py import MPI; c = MPI.COMM_WORLD; \
                     print(c.rank, c.size, c.allreduce(c.rank), flush=True)";

/// A program that prints the shared memory files of its process, and waits.
const SHOW_FILES: &str = "from mpi4py import MPI; import time; MPI.COMM_WORLD.barrier()
files = {line.split()[-1] for line in open('/proc/self/maps') if ' /dev/shm/' in line}
print(*files, flush=True); time.sleep(600)";

fn hello(library: &str, ranks: usize) {
    let Some(python) = python_of(library) else { return };
    let lb = Landbridge::new(library);
    let output = lb.run(&["run", "-n", &ranks.to_string(), &python, "-c", HELLO]);
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    let sum = ranks * (ranks - 1) / 2;
    let expected: Vec<String> = (0..ranks).map(|rank| format!("{rank} {ranks} {sum}")).collect();
    assert_eq!(lines, expected);
    lb.assert_nothing_left();
}

#[test]
fn mpich_says_hello() {
    hello("mpich", 4);
}

#[test]
fn intel_mpi_says_hello() {
    hello("impi", 3);
}

#[test]
fn open_mpi_is_sent_to_its_own_launcher() {
    let Some(python) = python_of("ompi") else { return };
    let output = Landbridge::new("ompi").run(&["run", "-n", "2", &python, "-c", HELLO]);
    assert_code(&output, 1);
    assert!(stderr(&output).contains("landbridge env --mpi openmpi"), "{}", stderr(&output));
}

#[test]
fn an_mpi_abort_ends_the_job_with_its_code() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-abort");
    let script = "from mpi4py import MPI; c = MPI.COMM_WORLD\n\
                  if c.rank == 1: c.Abort(7)\n\
                  c.barrier()";
    let output = lb.run(&["run", "-n", "3", &python, "-c", script]);
    assert_code(&output, 7);
    assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// The library's own shared memory is on; its files stay when the library is killed.
#[test]
fn a_killed_job_leaves_no_shared_memory() {
    for library in ["mpich", "impi"] {
        let Some(python) = python_of(library) else { continue };
        let lb = Landbridge::new("mpi-shm");
        for (signal, code) in [("INT", Some(130)), ("KILL", None)] {
            let mut command = lb.command(&["run", "-n", "2", &python, "-c", SHOW_FILES]);
            command.env("MPIR_CVAR_NOLOCAL", "0").env("I_MPI_FABRICS", "shm:ofi");
            let mut running = common::Running::new(command);
            let lines = running.wait_for_lines(2).join(" ");
            let is_file = |name: &&str| name.starts_with("/dev/shm/");
            let files: Vec<&Path> =
                lines.split_whitespace().filter(is_file).map(Path::new).collect();
            assert!(library != "mpich" || files.iter().any(|file| file.exists()), "{lines}");
            running.signal(signal);
            assert_eq!(running.finish().status.code(), code);
            lb.assert_nothing_left();
            assert_eq!(files.iter().find(|file| file.exists()), None);
        }
    }
}

#[test]
fn a_crashed_rank_is_named_and_the_aborts_it_causes_are_not() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-crash");
    let script = "from mpi4py import MPI; import os, signal; c = MPI.COMM_WORLD; c.barrier()\n\
                  if c.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n\
                  while True: c.barrier()";
    let output = lb.run(&["run", "-n", "3", &python, "-c", script]);
    assert_code(&output, 139);
    assert!(stderr(&output).contains("rank 1 on node"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// A program that spawns `sys.argv[1]` copies of itself, which print their view of their group.
const SPAWN: &str = "from mpi4py import MPI; import os, sys; c = MPI.COMM_WORLD
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    arguments = [sys.argv[0], 'a b', 'c=d', '']
    parent = c.Spawn(sys.executable, arguments, int(sys.argv[1]))
else:
    appnum = c.Get_attr(MPI.APPNUM)
    print('child', c.rank, c.size, c.allreduce(c.rank), appnum, sys.argv[1:], flush=True)
parent.Barrier(); parent.Disconnect()
";

#[test]
fn spawned_processes_are_a_world_of_their_own() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-spawn");
    let script = lb.directory.write("spawn.py", SPAWN).display().to_string();
    let output = lb.run(&["run", "-n", "2", "-l", &python, &script, "3"]);
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    let line = |rank| format!("[1:{rank}] child {rank} 3 3 0 ['a b', 'c=d', '']");
    assert_eq!(lines, [0, 1, 2].map(line));
    lb.assert_nothing_left();
}

#[test]
fn a_program_that_cannot_be_started_is_an_mpi_error_and_the_job_goes_on() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-spawn-error");
    let script = "from mpi4py import MPI
def fails(program, count, **info):
    try: MPI.COMM_WORLD.Spawn(program, [], count, MPI.Info.Create(info))
    except MPI.Exception: return True
print(fails('/no/such/program', 2), fails('true', 70000), fails('true', 1, host='nowhere'),
      fails('true', 1, wdir='/no/such'), flush=True)";
    let output = lb.run(&["run", "-n", "2", &python, "-c", script]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "True True True True\n".repeat(2));
    for reason in ["/no/such/program does not exist", "1 to 65536", "no such host", "/no/such "] {
        assert!(stderr(&output).contains(reason), "{reason}: {}", stderr(&output));
    }
    lb.assert_nothing_left();
}

#[test]
fn a_spawned_rank_that_crashes_ends_the_job_and_is_named() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-spawn-crash");
    let child = "from mpi4py import MPI; import os; c = MPI.COMM_WORLD; c.barrier()
if c.rank == 1: os.kill(os.getpid(), 11)
while True: c.barrier()";
    let child = lb.directory.write("child.py", child).display().to_string();
    let script = "from mpi4py import MPI; import sys\n\
                  MPI.COMM_SELF.Spawn(sys.executable, sys.argv[1:], 2).Barrier()";
    let output = lb.run(&["run", "-n", "1", &python, "-c", script, &child]);
    assert_code(&output, 139);
    let expected = "rank 1 of spawned group 1 on node";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    lb.assert_nothing_left();
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-kill");
    let script = "from mpi4py import MPI; import os, time; c = MPI.COMM_WORLD\n\
                  print(os.getpid(), flush=True); time.sleep(600)";
    let mut running = lb.start(&["run", "-n", "2", &python, "-c", script]);
    let pids = running.wait_for_lines(2);
    signal_process(pids[0].parse().unwrap(), "KILL");
    assert_code(&running.finish(), 137);
    lb.assert_nothing_left();
}

/// A program that prints rank and size as each rank sees them.
const WHO: &str =
    "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.rank, 'of', c.size, flush=True)";

/// A wrapper execs an Open MPI program, which does not support PMI-1.
#[test]
fn an_open_mpi_program_behind_a_wrapper_is_named() {
    let Some(python) = python_of("ompi") else { return };
    let lb = Landbridge::new("ompi-wrapper");
    let script = format!("#!/bin/sh\nexec {python} -c \"{WHO}\"\n");
    let script = lb.directory.write_script("wrapper", &script).display().to_string();
    let mut command = lb.command(&["run", "-n", "2", &script]);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    let output = common::Running::new(command).finish();
    assert_ne!(output.status.code(), Some(0));
    assert_eq!(stdout(&output), "");
    assert!(stderr(&output).contains("landbridge env --mpi openmpi"), "{}", stderr(&output));
    lb.assert_nothing_left();
}

/// Without the check each process would be a job of one rank, and the job would end with exit code
/// 0.
#[test]
fn a_program_that_lost_its_process_manager_is_named() {
    for library in ["mpich", "ompi"] {
        let Some(python) = python_of(library) else { continue };
        let lb = Landbridge::new("alone");
        let script = format!(
            "#!/bin/sh\nexec env -i HOME=/ OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_MCA_btl=self {python} \
             -c \"{WHO}\"\n"
        );
        let script = lb.directory.write_script("wrapper", &script).display().to_string();
        let output = lb.run(&["run", "-n", "2", &script]);
        assert_code(&output, 1);
        let text = stderr(&output);
        assert!(text.contains("without a PMI request"), "{text}");
        assert!(text.contains("was alone, not one of 2"), "{text}");
        lb.assert_nothing_left();
    }
}

#[test]
fn several_programs_know_their_number() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("mpi-mpmd");
    let script = "from mpi4py import MPI; import sys; c = MPI.COMM_WORLD\n\
                  print(c.rank, c.size, c.Get_attr(MPI.APPNUM), c.allreduce(1), sys.argv[1], \
                  flush=True)";
    let words = ["run", "-n", "1", &python, "-c", script, "a", ":", "-n", "2", &python, "-c"];
    let output = lb.run(&[&words[..], &[script, "b"]].concat());
    assert_code(&output, 0);
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["0 3 0 3 a", "1 3 1 3 b", "2 3 1 3 b"]);
    lb.assert_nothing_left();
}

/// The program uses tcp, though ranks get FI_PROVIDER=landbridge: only the empty statistics page
/// shows the difference.
#[test]
fn a_script_that_chooses_another_transport_is_reported() {
    let Some(python) = python_of("mpich") else { return };
    let lb = Landbridge::new("past");
    lb.add_provider();
    let script = format!("#!/bin/sh\nFI_PROVIDER=tcp exec {python} -c \"{WHO}\"\n");
    let script = lb.directory.write_script("wrapper", &script).display().to_string();
    let arguments = ["run", "-n", "2", &script];
    let output = common::Running::new(lb.plain_command(&arguments)).finish();
    assert_code(&output, 0);
    let text = stderr(&output);
    assert!(text.contains("have not opened Landbridge"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    lb.assert_nothing_left();
}
