//! The lab files that come with the repository.

use std::path::{Path, PathBuf};

use landbridge_lab::net::file;
use landbridge_lab::net::plan::{Inbound, Plan};
use landbridge_lab::net::units::{Rate, Share, Span};

#[test]
fn every_lab_file_is_valid() {
    let files = std::fs::read_dir(labs_dir()).unwrap().flatten().map(|entry| entry.path());
    let labs: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    assert!(labs.len() >= 3, "{labs:?}");
    for path in labs {
        if let Err(error) = file::load(&path) {
            panic!("{error:#}");
        }
    }
}

#[test]
fn grid5000_has_the_figures_of_the_paper() {
    let plan = lab("grid5000");
    assert_eq!(plan.sites.len(), 4);
    // The figures of the paper "Message relaying": 10 (Mbit/s) and 11 (ms, one way).
    for (a, b, mbit_per_s, delay_ms) in [
        ("sophia", "bordeaux", 68.054155, 5.14608),
        ("sophia", "orsay", 42.425423, 8.61752),
        ("sophia", "rennes", 40.150269, 9.06626),
        ("rennes", "bordeaux", 110.025962, 4.00316),
        ("rennes", "orsay", 95.376749, 4.70542),
        ("orsay", "bordeaux", 108.072588, 4.10875),
    ] {
        let is_it = |ends: [usize; 2]| {
            let names = ends.map(|end| plan.sites[end].name.as_str());
            names == [a, b] || names == [b, a]
        };
        let link = plan.links.iter().find(|link| is_it(link.ends)).unwrap();
        for shape in &link.shapes {
            let rate = Rate { bits_per_second: (mbit_per_s * 1e6_f64).round() as u64 };
            assert_eq!(shape.rate, Some(rate), "{a}-{b}");
            assert_eq!(shape.delay, Span { nanos: (delay_ms * 1e6_f64).round() as u64 }, "{a}-{b}");
        }
    }
}

#[test]
fn the_demo_needs_relays_and_one_of_them_only_dials_out() {
    let plan = lab("two-sites");
    assert!(plan.sites[0].subnet().overlaps(plan.sites[1].subnet()), "hosts could be routed");
    assert!(plan.sites[0].inbound.admits_relays());
    assert_eq!(plan.sites[1].inbound, Inbound::Nothing);
}

#[test]
fn the_soak_has_two_equal_rails_and_a_wide_area_link() {
    let plan = lab("two-rails");
    let near = &plan.sites[0];
    assert_eq!((near.hosts.len(), near.rails.len()), (2, 2));
    assert_eq!(near.rails[0].shape, near.rails[1].shape);
    assert!(!near.rails[0].subnet.overlaps(near.rails[1].subnet));
    assert_eq!(plan.links.len(), 1);
}

#[test]
fn the_bad_network_is_bad_but_for_its_last_rail() {
    let plan = lab("lossy-rails");
    let [first, second, last] = &plan.sites[0].rails[..] else { panic!("three rails") };
    for rail in [first, second] {
        let shape = rail.shape.as_ref().unwrap();
        let one_percent = Share { fraction: 0.01 };
        assert_eq!([shape.loss, shape.corrupt, shape.reorder], [one_percent; 3]);
        assert!(shape.repair_checksums);
    }
    let shape = last.shape.as_ref().unwrap();
    assert_eq!([shape.loss, shape.corrupt, shape.reorder], [Share::default(); 3]);
    assert_eq!(last.subnet.to_string(), "10.1.2.0/24", "as scripts/support/lab.py has it");
}

#[test]
fn the_long_line_loses_packets_and_lets_udp_through() {
    let plan = lab("long-line");
    assert_eq!(plan.sites[0].inbound, Inbound::Anything);
    for shape in &plan.links[0].shapes {
        assert_eq!(shape.delay, Span { nanos: 50_000_000 });
        assert!(shape.loss > Share::default());
    }
}

#[test]
fn what_only_prints_ends_without_a_word_when_nobody_reads_on() {
    use std::os::unix::process::ExitStatusExt;
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_landbridge-lab"));
    command.arg("check").arg(labs_dir().join("two-sites.toml")).stdout(writer);
    let output = command.output().unwrap();
    assert_eq!((&*output.stderr, output.status.signal()), (&[][..], Some(13)));
}

fn lab(name: &str) -> Plan {
    file::load(&labs_dir().join(format!("{name}.toml"))).unwrap()
}

fn labs_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs")
}
