//! `landbridge ps` while jobs run, replay, end and are killed.

mod common;

use std::time::Instant;

use common::{DEADLINE, Landbridge, Running, signal_process, stderr, stdout};
use serde_json::Value;

const PROGRAM: &str = "echo $PMI_RANK $$; exec sleep 600";

/// The status of the job of this launcher.
fn job(lb: &Landbridge, running: &Running) -> Option<Value> {
    let output = lb.run(&["ps", "--json"]);
    common::assert_code(&output, 0);
    let jobs: Value = serde_json::from_slice(&output.stdout).unwrap();
    let is_it = |job: &&Value| job["launcher"] == running.child.id();
    jobs.as_array().unwrap().iter().find(is_it).cloned()
}

fn pids(running: &mut Running, count: usize) -> Vec<u32> {
    let mut lines = running.wait_for_lines(count);
    lines.sort();
    lines.iter().map(|line| line.split_once(' ').unwrap().1.parse().unwrap()).collect()
}

#[test]
fn every_rank_is_listed_until_the_job_ends() {
    let lb = Landbridge::new("ps");
    let mut running = lb.start(&["run", "-n", "2", "sh", "-c", PROGRAM]);
    let pids = pids(&mut running, 2);
    let found = job(&lb, &running).unwrap();
    assert_eq!(found["recover"], false);
    for rank in 0..2 {
        let line = &found["ranks"][rank];
        assert_eq!((&line["pid"], &line["state"]), (&pids[rank].into(), &"running".into()));
        assert_eq!((&line["rank"], &line["incarnation"]), (&rank.to_string().into(), &0.into()));
    }
    let name = &found["job"].as_str().unwrap()[..12];
    let table = stdout(&lb.run(&["ps", name]));
    assert!(table.contains("sh -c echo") && table.contains(&pids[1].to_string()), "{table}");
    let nobody = lb.run(&["ps", "no-such-job"]);
    common::assert_code(&nobody, 1);
    let nobody = lb.run(&["log", "--job", name, "show", "99"]);
    common::assert_code(&nobody, 1);
    let said = stderr(&nobody);
    assert!(said.contains("its ranks have no message logs (it runs without --recover)"), "{said}");
    running.signal("INT");
    let launcher = running.child.id();
    running.finish();
    let after = stdout(&lb.run(&["ps", "--json"]));
    assert!(!after.contains(&format!("\"launcher\": {launcher},")), "{after}");
    lb.assert_nothing_left();
}

#[test]
fn a_restarted_rank_keeps_its_process_id_where_that_is_possible() {
    let lb = Landbridge::new("ps-back");
    let options = ["--recover", "--set", "recover_clocks=off"];
    let line = [&["run", "-n", "2"], &options[..], &["sh", "-c", PROGRAM]].concat();
    let mut running = lb.start(&line);
    let pids = pids(&mut running, 2);
    signal_process(pids[1], "KILL");
    let deadline = Instant::now() + DEADLINE;
    let line = loop {
        let line = job(&lb, &running).unwrap()["ranks"][1].clone();
        if line["incarnation"] == 1 && line["state"] == "running" {
            break line;
        }
        assert!(Instant::now() < deadline, "{line}");
    };
    assert_eq!(line["pid"] == pids[1], may_choose_pids(), "{line}");
    let found = job(&lb, &running).unwrap();
    assert_eq!((&found["restarts"], &found["recover"]), (&1.into(), &true.into()));
    assert_eq!(found["ranks"][0]["pid"], pids[0]);
    running.signal("INT");
    running.finish();
    lb.assert_nothing_left();
}

/// Whether this user may restore checkpoints (capabilities(7)), which is also the privilege to
/// choose a process id.
fn may_choose_pids() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    const CHECKPOINT_RESTORE: u64 = 1 << 40;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let held = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = held.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    held & (SYS_ADMIN | CHECKPOINT_RESTORE) != 0
}

/// A program whose rank 0 writes its statistics page as a provider does; rank 1 does not use MPI.
const ANSWERS: &str = r#"echo $PMI_RANK $$
if [ $PMI_RANK = 1 ]; then exec sleep 600; fi
board=/proc/self/fd/$LANDBRIDGE_STATISTICS_PAGE
put() { dd of=$board bs=1 seek=$1 conv=notrunc 2>/dev/null; }
text="sum tcp 2 1 1500 20 1 2
row 1 tcp suspected 10.0.0.1 10.0.0.2 1500 20 1 2 1000000 120000
"
printf %s "$text" | put 4128
printf "\\$(printf %o ${#text})\\0\\0\\0\\0\\0\\0\\0" | put 4120
printf '\1' | put 4096
while :; do dd if=$board bs=1 skip=16 count=8 2>/dev/null | put 4112; sleep 0.02; done"#;

#[test]
fn ranks_are_asked_for_their_paths() {
    let lb = Landbridge::new("ps-paths");
    let mut running = lb.start(&["run", "-n", "2", "sh", "-c", ANSWERS]);
    pids(&mut running, 2);
    let name = job(&lb, &running).unwrap()["job"].as_str().unwrap().to_string();
    let deadline = Instant::now() + DEADLINE;
    let paths = loop {
        let output = lb.run(&["ps", "--paths", "--json", &name]);
        common::assert_code(&output, 0);
        let jobs: Value = serde_json::from_slice(&output.stdout).unwrap();
        if jobs[0]["paths"]["ranks"] == 1 {
            break jobs[0]["paths"].clone();
        }
        assert!(Instant::now() < deadline, "{jobs}");
    };
    assert_eq!(paths["unanswered"], serde_json::json!([1]));
    assert_eq!((&paths["sums"]["tcp"]["paths"], &paths["left_out"]), (&2.into(), &1.into()));
    let row = &paths["rows"][0];
    assert_eq!((&row["process"], &row["peer"], &row["corrupt"]), (&0.into(), &1.into(), &1.into()));
    assert_eq!((&row["state"], &row["is_old"]), (&"suspected".into(), &false.into()));
    let table = stdout(&lb.run(&["ps", "--paths", &name]));
    for words in
        ["2 paths of 1 rank,", "120 us", "10.0.0.1 to 10.0.0.2", "nothing new of 1 rank: 1"]
    {
        assert!(table.contains(words), "{words} in {table}");
    }
    running.signal("INT");
    running.finish();
    lb.assert_nothing_left();
}

#[test]
fn a_stopped_launcher_is_reported_and_not_forgotten() {
    let lb = Landbridge::new("ps-stopped");
    let mut running = lb.start(&["run", "-n", "1", "sh", "-c", PROGRAM]);
    pids(&mut running, 1);
    let name = job(&lb, &running).unwrap()["job"].as_str().unwrap().to_string();
    running.signal("STOP");
    let output = lb.run(&["ps", &name]);
    running.signal("CONT");
    common::assert_code(&output, 1);
    let said = stderr(&output);
    let expected = format!("process {} is stopped", running.child.id());
    assert!(said.contains(&expected) && !said.contains("no job"), "{said}");
    assert!(job(&lb, &running).is_some());
    running.signal("INT");
    running.finish();
    lb.assert_nothing_left();
}

#[test]
fn a_launcher_that_was_killed_is_forgotten() {
    let lb = Landbridge::new("ps-killed");
    let mut running = lb.start(&["run", "-n", "1", "sh", "-c", PROGRAM]);
    pids(&mut running, 1);
    let name = job(&lb, &running).unwrap()["job"].as_str().unwrap().to_string();
    running.signal("KILL");
    running.finish();
    let file = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().path();
    let is_left = || {
        let tmp = std::fs::read_dir("/tmp").unwrap().map(file);
        let own = tmp.filter(|path| path.to_string_lossy().starts_with("/tmp/landbridge-"));
        own.map(|directory| directory.join(&name)).any(|path| path.exists())
    };
    // A parallel test that runs `ps` may have removed the file already; the tests of `ps` itself
    // check the removal.
    assert!(job_names(&lb).iter().all(|other| *other != name));
    assert!(!is_left());
    lb.assert_nothing_left();
}

fn job_names(lb: &Landbridge) -> Vec<String> {
    let jobs: Value = serde_json::from_slice(&lb.run(&["ps", "--json"]).stdout).unwrap();
    jobs.as_array().unwrap().iter().map(|job| job["job"].as_str().unwrap().to_string()).collect()
}
