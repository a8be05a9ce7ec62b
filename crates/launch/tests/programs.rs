//! `landbridge run` with command lines or environments that may not mean what the user intends:
//! several programs, variables that choose another transport, allocations of batch systems.

mod common;

use common::{Landbridge, assert_code, stderr, stdout};

/// The first request of an MPI program to its process manager.
const PMI_CLIENT: &str = r#"
say() { echo "$1" >&$PMI_FD; read -r answer <&$PMI_FD; }
say "cmd=init pmi_version=1 pmi_subversion=1"
"#;

/// A topology of two hosts, the first of which sets a variable as a ~/.bashrc does.
const BASHRC: &str = r#"[[cluster]]
name = "a"
spawn = "local"
[[cluster.host]]
name = "a1"
shell = ["env", "FI_PROVIDER=verbs"]
[[cluster.host]]
name = "a2"
"#;

/// Ranks are numbered across all programs; options in front of the first program hold for all
/// programs.
#[test]
fn several_programs_are_one_job() {
    let lb = Landbridge::new("mpmd");
    let directory = lb.directory.0.canonicalize().unwrap().display().to_string();
    let script = format!(
        "{PMI_CLIENT}
        say 'cmd=get_appnum'
        echo $PMI_RANK $PMI_SIZE ${{answer#*appnum=}} $0 $ONE $TWO $(pwd)"
    );
    let line = [
        ["run", "-x", "ONE=1", "-x", "TWO=2", "--wdir", "/"].as_slice(),
        &["-n", "1", "bash", "-c", &script, "first", ":"],
        &["-np", "2", "-x", "TWO=3", "--wdir", &directory, "bash", "-c", &script, "second", ":"],
        &["-n", "1", "bash", "-c", &script, "third"],
    ]
    .concat();
    for clusters in [None, Some(["--clusters", "2"])] {
        let mut line = line.clone();
        line.splice(1..1, clusters.into_iter().flatten());
        let output = lb.run(&line);
        assert_code(&output, 0);
        let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
        lines.sort();
        let expected = [
            "0 4 0 first 1 2 /".to_string(),
            format!("1 4 1 second 1 3 {directory}"),
            format!("2 4 1 second 1 3 {directory}"),
            "3 4 2 third 1 2 /".to_string(),
        ];
        assert_eq!(lines, expected);
    }
    lb.assert_nothing_left();
}

/// Module files and ~/.bashrc set such variables, on this host or another host.
#[test]
fn another_transport_in_the_environment_is_replaced_and_reported() {
    let lb = Landbridge::new("transport");
    lb.add_provider();
    let script = "echo $FI_PROVIDER $I_MPI_FABRICS $MPIR_CVAR_CH4_NETMOD";
    let mut command = lb.plain_command(&["run", "-n", "2", "sh", "-c", script]);
    command.env("FI_PROVIDER", "tcp").env("I_MPI_FABRICS", "shm:tcp");
    let output = common::Running::new(command).finish();
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "landbridge ofi ofi\n".repeat(2));
    let text = stderr(&output);
    assert!(
        text.contains("(FI_PROVIDER=tcp, I_MPI_FABRICS=shm:tcp): ranks get FI_PROVIDER=landbridge"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");

    let grid = lb.directory.write("grid.toml", BASHRC).display().to_string();
    let mut command = lb.plain_command(&["run", "--topology", &grid, "sh", "-c", script]);
    command.env_remove("FI_PROVIDER");
    let output = common::Running::new(command).finish();
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "landbridge ofi ofi\n".repeat(2));
    let text = stderr(&output);
    assert!(text.contains("on node a1: the environment chooses another transport"), "{text}");

    let arguments = ["run", "-n", "2", "-x", "FI_PROVIDER=tcp", "true"];
    let output = common::Running::new(lb.plain_command(&arguments)).finish();
    assert_code(&output, 1);
    assert!(stderr(&output).contains("-x FI_PROVIDER=tcp sends messages by another transport"));
    lb.assert_nothing_left();
}

#[test]
fn an_unused_allocation_of_several_nodes_is_reported() {
    let lb = Landbridge::new("slurm");
    let text_of = |arguments: &[&str]| {
        let mut command = lb.command(arguments);
        command.env("SLURM_JOB_ID", "77").env("SLURM_JOB_NUM_NODES", "4");
        let output = common::Running::new(command).finish();
        assert_code(&output, 0);
        stderr(&output)
    };
    let text = text_of(&["run", "-n", "1", "true"]);
    assert!(text.contains("Slurm job 77 with 4 nodes") && text.contains("--hosts"), "{text}");
    assert_eq!(text_of(&["run", "-n", "1", "--hosts", "localhost", "true"]), "");
}
