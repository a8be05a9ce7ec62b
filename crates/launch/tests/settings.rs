//! Settings from flags, variables and files to ranks, relays and listings.

mod common;

use std::process::Output;

use common::{Landbridge, Running, Scratch, assert_code, stderr, stdout};

const SAY: &str = "echo $LANDBRIDGE_PEER_TIMEOUT/$LANDBRIDGE_PATHS/$LANDBRIDGE_RETAIN";

/// Names and texts of variables.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn run_with(lb: &Landbridge, variables: Variables, arguments: &[&str]) -> Output {
    let mut command = lb.command(arguments);
    command.envs(variables.iter().copied());
    Running::new(command).finish()
}

#[test]
fn ranks_get_what_was_said_as_variables() {
    let lb = Landbridge::new("settings-ranks");
    let scratch = Scratch::new("settings-ranks");
    let file =
        scratch.write("s.toml", "peer_timeout = \"3s\"\npaths = [\"shm\"]\nretain = 1048576\n");
    let file = file.display().to_string();
    let said = [("LANDBRIDGE_PATHS", "tcp"), ("LANDBRIDGE_SETTINGS", &*file)];
    let rows: [(&[&str], Variables, &str); 5] = [
        (&[], &[], "//\n"),
        (&["--set", "peer_timeout=9s"], &[], "9s//\n"),
        (&["--settings", &file], &[], "3s/shm/1048576\n"),
        (&["--set", "retain=2MiB"], &said, "3s/tcp/2MiB\n"),
        (&["-x", "LANDBRIDGE_PATHS=relay"], &said, "3s/relay/1048576\n"),
    ];
    for (options, variables, expected) in rows {
        let arguments = [&["run", "-n", "1"], options, &["sh", "-c", SAY]].concat();
        let output = run_with(&lb, variables, &arguments);
        assert_code(&output, 0);
        assert_eq!(stdout(&output), expected, "{options:?} {}", stderr(&output));
    }
    lb.assert_nothing_left();
}

#[test]
fn a_file_is_found_beside_the_topology_or_with_the_user() {
    let lb = Landbridge::new("settings-found");
    let config = lb.directory.0.join("config/landbridge");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::write(config.join("settings.toml"), "retain = \"4MiB\"\n").unwrap();
    let scratch = Scratch::new("settings-found");
    let topology =
        "[[cluster]]\nname = \"one\"\nspawn = \"local\"\n[[cluster.host]]\nname = \"n\"\n";
    let grid = scratch.write("grid.toml", topology).display().to_string();
    let said = |arguments: &[&str]| {
        let output = lb.run(&[arguments, &["sh", "-c", SAY]].concat());
        assert_code(&output, 0);
        stdout(&output)
    };
    let of_grid = ["run", "-n", "1", "--topology", &grid];
    assert_eq!(said(&["run", "-n", "1"]), "//4MiB\n");
    assert_eq!(said(&of_grid), "//4MiB\n", "none lies beside it yet");
    scratch.write("landbridge.toml", "peer_timeout = \"3s\"\n");
    assert_eq!(said(&of_grid), "3s//\n", "one file is read, not two");
    let output = run_with(&lb, &[("LANDBRIDGE_TOPOLOGY", &grid)], &["settings"]);
    let file = scratch.0.join("landbridge.toml");
    let found = format!("peer_timeout 3s {}, line 1", file.display());
    assert!(has_row(&stdout(&output), &found), "{}", stdout(&output));
}

#[test]
fn relays_get_what_they_read() {
    let lb = Landbridge::new("settings-relays");
    let options = ["--set", "wan_streams=4", "--set", "retain=2MiB"];
    let output =
        lb.run(&[&["run", "-n", "2", "--clusters", "2"], &options[..], &["true"]].concat());
    assert_code(&output, 0);
    let entries = std::fs::read_dir(&lb.directory.0).unwrap().flatten();
    let texts: Vec<String> = entries
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "env"))
        .map(|entry| std::fs::read_to_string(entry.path()).unwrap())
        .collect();
    assert_eq!(texts.len(), 2);
    for text in texts {
        assert!(text.contains("LANDBRIDGE_WAN_STREAMS=4\n"), "{text}");
        assert!(!text.contains("LANDBRIDGE_RETAIN"), "{text}");
    }
}

#[test]
fn recover_is_the_same_as_a_flag_and_as_a_setting() {
    let lb = Landbridge::new("settings-recover");
    let scratch = Scratch::new("settings-recover");
    let file = scratch.write("s.toml", "recover = true\n").display().to_string();
    let rows: [(&[&str], Variables); 6] = [
        (&["--recover"], &[]),
        (&["--set", "recover=on"], &[]),
        (&["--set", "recover=1"], &[]),
        (&["-x", "LANDBRIDGE_RECOVER=yes"], &[]),
        (&["--settings", &file], &[]),
        (&[], &[("LANDBRIDGE_RECOVER", "ON")]),
    ];
    for (options, variables) in rows {
        // The interposer that records clocks is not built for these tests.
        let run = ["run", "-n", "2", "--set", "recover_clocks=off"];
        let line = [&run, options, &["sh", "-c", "echo $LANDBRIDGE_RECOVER"]].concat();
        let output = run_with(&lb, variables, &line);
        assert_code(&output, 0);
        assert_eq!(stdout(&output), "on\non\n", "{options:?} {variables:?}");
        // The launcher cannot know which program a shell will start.
        assert!(
            stderr(&output).contains("--recover works with MPICH alone"),
            "{}",
            stderr(&output)
        );
    }
    let no_relay = "[[cluster]]\nname = \"a\"\n[[cluster.host]]\nname = \"localhost\"\n";
    let file = scratch.write("t.toml", no_relay).display().to_string();
    let line = ["run", "--topology", &file, "true"];
    let output = run_with(&lb, &[("LANDBRIDGE_RECOVER", "1")], &line);
    assert_code(&output, 1);
    assert!(stderr(&output).contains("--recover needs a relay"), "{}", stderr(&output));
    let within = ["--max-restarts-within", "1h"];
    for (words, said) in [
        (&["--max-restarts", "5"][..], "--max-restarts goes with --recover"),
        (&within, "leave --max-restarts-within out"),
        (&["--checkpoint", "30s"], "--checkpoint goes with --recover"),
        (&["--checkpoint", "0", "--recover"], "--checkpoint: \"0\" has no unit"),
    ] {
        let output = run_with(&lb, &[], &[&["run", "-n", "1"], words, &["true"]].concat());
        assert_code(&output, 1);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    let asked = ["run", "-n", "1", "--max-restarts", "5", "--set", "recover_clocks=off", "true"];
    assert_code(&run_with(&lb, &[("LANDBRIDGE_RECOVER", "on")], &asked), 0);
    for (words, said) in
        [(&["--recover"][..], "no host can be kept free"), (&[], "--spares goes with")]
    {
        let line =
            [&["run", "-n", "2", "--spares", "1", "--clusters", "2"], words, &["true"]].concat();
        let output = run_with(&lb, &[], &line);
        assert_code(&output, 1);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    let output =
        run_with(&lb, &[], &["run", "-n", "2", "--recover=node", "--clusters", "2", "true"]);
    assert_code(&output, 1);
    let said = stderr(&output);
    assert!(said.contains("--recover=node: no host can be kept free"), "{said}");
}

#[test]
fn nothing_starts_with_a_setting_that_is_wrong() {
    let lb = Landbridge::new("settings-wrong");
    let scratch = Scratch::new("settings-wrong");
    let file = scratch.write("s.toml", "\npeer_timout = \"3s\"\n").display().to_string();
    let rows: [(&[&str], Variables, &str); 4] = [
        (&["--set", "peer_timeout=60"], &[], "has no unit: write 60s or 60ms"),
        (&["--settings", &file], &[], "s.toml: line 2: there is no setting \"peer_timout\""),
        (&[], &[("LANDBRIDGE_PATHS", "tpc")], "LANDBRIDGE_PATHS: \"tpc\" is none of shm, tcp"),
        (&["--settings", "/no/such"], &[], "cannot read the settings file /no/such"),
    ];
    for (options, variables, expected) in rows {
        let output = run_with(
            &lb,
            variables,
            &[&["run", "-n", "1"], options, &["echo", "started"]].concat(),
        );
        assert_code(&output, 1);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn a_misspelt_variable_is_reported_and_the_job_runs() {
    let lb = Landbridge::new("settings-misspelt");
    let misspelt = [("LANDBRIDGE_PEER_TIMOUT", "5s")];
    let output = run_with(&lb, &misspelt, &["run", "-n", "1", "true"]);
    assert_code(&output, 0);
    let expected =
        "LANDBRIDGE_PEER_TIMOUT is no setting and is not heeded; LANDBRIDGE_PEER_TIMEOUT";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    let output = run_with(&lb, &misspelt, &["doctor"]);
    assert!(stdout(&output).contains("--  LANDBRIDGE_PEER_TIMOUT is set"), "{}", stdout(&output));
}

#[test]
fn doctor_shows_what_is_not_as_by_default() {
    let lb = Landbridge::new("settings-doctor");
    // Test runs set another value; an empty value stands for a user who sets nothing.
    let local = ("LANDBRIDGE_LOCAL", "");
    let text = stdout(&run_with(&lb, &[local], &["doctor"]));
    assert!(text.contains("Settings\n  ok  all as by default"), "{text}");
    let said = [("LANDBRIDGE_RETAIN", "1GiB"), ("LANDBRIDGE_PEER_TIMEOUT", "1min"), local];
    let text = stdout(&run_with(&lb, &said, &["doctor"]));
    assert!(
        text.contains("Settings\n  ok  retain = 1GiB (environment; default: 64MiB)\n"),
        "{text}"
    );
    assert!(!text.contains("peer_timeout"), "{text}");
    let options = ["doctor", "--set", "criu=/no/criu", "--set", "recover_dir=/var/tmp"];
    let text = stdout(&run_with(&lb, &said, &options));
    for expected in [
        "ok  criu = /no/criu (--set; default: criu)",
        "ok  recover_dir = /var/tmp (--set; default: off)",
        "ok  retain = 1GiB (environment",
        "no checkpoints: CRIU cannot be run as /no/criu",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    let output = run_with(&lb, &[("LANDBRIDGE_UDP", "maybe")], &["doctor"]);
    assert_code(&output, 1);
    assert!(stdout(&output).contains("!!  LANDBRIDGE_UDP: \"maybe\" is none of off, on"));
}

#[test]
fn settings_lists_every_row_and_no_secret() {
    let lb = Landbridge::new("settings-list");
    let said = [("LANDBRIDGE_KEY", "5ec4e7"), ("LANDBRIDGE_LOG", "")];
    let output = run_with(&lb, &said, &["settings", "--set", "udp=on"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    for row in landbridge_proto::setting::SETTINGS {
        assert!(text.contains(row.name) || text.contains(&row.variable()), "{}: {text}", row.name);
        assert!(text.contains(row.description), "{}: {text}", row.name);
    }
    for row in ["udp on --set", "rails_exclude none default"] {
        assert!(has_row(&text, row), "{row:?} in {text}");
    }
    let json = stdout(&run_with(&lb, &said, &["settings", "--json"]));
    let objects = json.lines().filter(|line| line.starts_with("  {\"name\": \"")).count();
    assert_eq!(objects, landbridge_proto::setting::SETTINGS.len());
    assert!(json.contains("\"value\": \"64MiB\", \"source\": \"default\""), "{json}");
    assert!(!text.contains("5ec4e7") && !json.contains("5ec4e7"));
}

#[test]
fn env_exports_what_the_file_says() {
    let lb = Landbridge::new("settings-env");
    lb.directory.write("liblandbridge-fi.so", "");
    let file = lb.directory.write("s.toml", "peer_timeout = \"3 s\"\nwan_streams = 4\n");
    let file = file.display().to_string();
    let arguments = ["env", "--mpi", "mpich", "--settings", &file, "--set", "log=info"];
    let text = stdout(&run_with(&lb, &[("LANDBRIDGE_RETAIN", "2MiB")], &arguments));
    assert!(text.contains("export LANDBRIDGE_PEER_TIMEOUT='3 s'\n"), "{text}");
    assert!(text.ends_with("export LANDBRIDGE_PEER_TIMEOUT='3 s'\n"), "{text}");
    let log = text.rfind("export LANDBRIDGE_LOG=info\n");
    assert!(log > text.find("export LANDBRIDGE_LOG=\"${LANDBRIDGE_LOG-warn}\"\n"), "{text}");
    assert!(!text.contains("RETAIN") && !text.contains("WAN_STREAMS"), "{text}");
}

/// Whether a line of a table consists of these words, for any width of the columns.
fn has_row(table: &str, wanted: &str) -> bool {
    table.lines().any(|line| line.split_whitespace().eq(wanted.split_whitespace()))
}
