//! The plan in the launcher's format: a topology file in which every host has a command prefix that
//! runs programs on the host.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::plan::{Host, Plan, RANK_PORT, RELAY_PORT, Site};

/// Directory with the files of a machine's namespaces, as seen from inside the lab.
pub fn namespace_dir(lab_dir: &Path, machine: &str) -> PathBuf {
    lab_dir.join("ns").join(machine)
}

/// The topology file's text. `lab_dir` is the lab's directory as seen from inside.
pub fn render(plan: &Plan, lab_dir: &Path) -> String {
    let mut text = format!("# Made by `landbridge lab run` from the lab `{}`.\n", plan.name);
    for site in &plan.sites {
        render_site(&mut text, site, lab_dir);
    }
    text
}

fn render_site(text: &mut String, site: &Site, lab_dir: &Path) {
    let gateway = &site.gateway;
    // Writing into a String cannot fail.
    let _ = write!(text, "\n[[cluster]]\nname = {:?}\n", site.name);
    let _ = write!(text, "\n[cluster.relay]\nhost = {:?}\n", gateway.name);
    let _ = writeln!(text, "listen = \"{}:{RANK_PORT}\"", gateway.address);
    if site.inbound.admits_relays() {
        let _ = writeln!(text, "wan_listen = \"{}:{RELAY_PORT}\"", site.wan_address);
    }
    for host in site.machines() {
        render_host(text, host, lab_dir);
    }
}

fn render_host(text: &mut String, host: &Host, lab_dir: &Path) {
    let namespaces = namespace_dir(lab_dir, &host.name);
    let _ = write!(text, "\n[[cluster.host]]\nname = {:?}\n", host.name);
    let _ = writeln!(text, "address = \"{}\"\nslots = {}", host.address, host.slots);
    let _ = writeln!(
        text,
        "shell = [\"nsenter\", \"--net={0}/net\", \"--uts={0}/uts\", \"--\"]",
        namespaces.display()
    );
}

/// The text of an `/etc/hosts` with every machine; `SITE-wan` is a gateway's address in the WAN,
/// and `MACHINE-lan1` is a machine's address on the second rail.
pub fn render_hosts_file(plan: &Plan) -> String {
    let mut text = String::from("127.0.0.1 localhost\n");
    for machine in plan.machines() {
        let _ = writeln!(text, "{} {}", machine.address, machine.name);
    }
    for site in &plan.sites {
        let _ = writeln!(text, "{} {}-wan", site.wan_address, site.name);
        for rail in 1..site.rails.len() {
            for machine in site.machines() {
                let address = site.address_on(rail, machine);
                let _ = writeln!(text, "{address} {}-lan{rail}", machine.name);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn the_topology_says_what_the_launcher_needs() {
        let lab =
            "[[site]]\nname='a'\nhosts=1\nslots=3\n[[site]]\nname='b'\nhosts=2\ninbound=false\n";
        let plan = file::parse(lab, "x").unwrap();
        let text = render(&plan, Path::new("/lab"));
        let topology: toml::Table = toml::from_str(&text).unwrap();
        let clusters = topology["cluster"].as_array().unwrap();
        assert_eq!(clusters.len(), 2);
        let relay = |cluster: usize, key: &str| {
            clusters[cluster]["relay"].get(key).map(|value| value.as_str().unwrap().to_owned())
        };
        assert_eq!(relay(0, "wan_listen").as_deref(), Some("192.0.2.1:7711"));
        assert_eq!(relay(1, "wan_listen"), None, "accepts nothing from outside");
        assert_eq!(relay(1, "listen").as_deref(), Some("10.2.0.1:7710"));
        let host = &clusters[0]["host"][0];
        assert_eq!(host["name"].as_str(), Some("a-1"));
        assert_eq!(host["slots"].as_integer(), Some(3));
        assert_eq!(host["shell"][1].as_str(), Some("--net=/lab/ns/a-1/net"));
        assert_eq!(
            clusters[1]["host"][2]["slots"].as_integer(),
            Some(0),
            "a gateway takes no ranks"
        );
    }
}
