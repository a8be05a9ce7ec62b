//! Changes to the machines of a running lab: interfaces go down and up, and the relay of a site is
//! stopped and continued.
//!
//! In: the words of a request, and the plan. Out: a text about the change, or an error. The lab's
//! init calls this module on threads that serve clients; the threads that this module starts are
//! inside the machine that a request names, and all other threads are not.
//!
//! The init reaps every child of the lab, so a tool that this module starts may have been reaped
//! before this module waits for it: the output of the tool shows whether it succeeded.

use std::fs;
use std::io::{Read, Write};
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::build::{WAN_DEVICE, lan_device, routes};
use super::namespace::Machine;
use super::plan::{Host, Plan};

/// Name of the relay's process, as the kernel shortens it.
const RELAY_NAME: &str = "landbridge-rela";

/// Handles `interface HOST DEVICE up|down`; `words` are the words after the first.
pub fn set_interface(plan: &Plan, words: &[&str]) -> anyhow::Result<String> {
    let [name, device, state @ ("up" | "down")] = *words else {
        bail!("a request is `interface HOST DEVICE up|down`");
    };
    let (site, host) = find(plan, name)?;
    let devices = devices_of(plan, site, host);
    if !devices.iter().any(|found| found == device) {
        bail!("`{name}` has no interface `{device}`; it has {}", devices.join(", "));
    }
    let mut batch = format!("link set {device} {state}\n");
    if state == "up" {
        batch += &routes(plan, site, host, device);
    }
    Machine::open(name)?.run(|| run_ip(&batch))?;
    Ok(format!("{name} {device} {state}\n"))
}

/// Handles `relay SITE stop|continue`; `words` are the words after the first.
pub fn signal_relay(plan: &Plan, words: &[&str]) -> anyhow::Result<String> {
    let (name, signal, done) = match *words {
        [name, "stop"] => (name, Signal::STOP, "stopped"),
        [name, "continue"] => (name, Signal::CONT, "goes on"),
        _ => bail!("a request is `relay SITE stop|continue`"),
    };
    let Some(site) = plan.sites.iter().find(|site| site.name == name) else {
        let names: Vec<&str> = plan.sites.iter().map(|site| site.name.as_str()).collect();
        bail!("there is no site `{name}`; there are {}", names.join(", "));
    };
    let relays = relays_on(&site.gateway.name)?;
    if relays.is_empty() {
        bail!("no relay is running on `{}`", site.gateway.name);
    }
    for &relay in &relays {
        kill_process(relay, signal).context("the relay has just ended")?;
    }
    Ok(format!("relay of {name} {done}\n"))
}

fn find<'a>(plan: &'a Plan, name: &str) -> anyhow::Result<(usize, &'a Host)> {
    for (number, site) in plan.sites.iter().enumerate() {
        if let Some(host) = site.machines().find(|host| host.name == name) {
            return Ok((number, host));
        }
    }
    let names: Vec<&str> = plan.machines().map(|host| host.name.as_str()).collect();
    bail!("there is no machine `{name}`; there are {}", names.join(", "))
}

fn devices_of(plan: &Plan, site: usize, host: &Host) -> Vec<String> {
    let home = &plan.sites[site];
    let mut devices: Vec<String> = (0..home.rails.len()).map(lan_device).collect();
    if host.name == home.gateway.name {
        devices.push(WAN_DEVICE.to_owned());
    }
    devices
}

/// Runs `ip -batch` in the calling thread's network namespace.
fn run_ip(batch: &str) -> anyhow::Result<()> {
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start `ip`")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(batch.as_bytes())?;
    }
    let mut complaint = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut complaint)?;
    }
    match child.wait() {
        Err(error) if error.raw_os_error() != Some(libc::ECHILD) => return Err(error.into()),
        _ => {}
    }
    if !complaint.is_empty() {
        bail!("`ip` failed: {}", complaint.trim());
    }
    Ok(())
}

/// The relay processes in a machine's network namespace.
fn relays_on(machine: &str) -> anyhow::Result<Vec<Pid>> {
    let own = fs::read_link("/proc/self").context("cannot read /proc")?;
    let is_ours = own.to_string_lossy().parse() == Ok(std::process::id());
    if !is_ours {
        bail!("this container shows /proc of another PID namespace: relays cannot be found");
    }
    let network = Machine::open(machine)?.network_id()?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        if is_relay(&entry.path(), network) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Whether the process is a relay in this network namespace; false for a process that has ended
/// meanwhile.
fn is_relay(process: &Path, network: (u64, u64)) -> bool {
    let is_called =
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim_end() == RELAY_NAME);
    let is_there = || {
        let found = fs::metadata(process.join("ns/net"));
        found.is_ok_and(|found| (found.st_dev(), found.st_ino()) == network)
    };
    is_called && is_there()
}

/// The text of an error for a client: the whole chain in one line.
pub fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn wrong_requests_say_what_is_right() {
        let lab = "[[site]]\nname='a'\nhosts=1\nrails=2\n[[site]]\nname='b'\nhosts=1\n";
        let plan = file::parse(lab, "x").unwrap();
        for (words, said) in [
            (&["a-1", "lan0"][..], "interface HOST DEVICE up|down"),
            (&["a-1", "lan0", "sideways"], "interface HOST DEVICE up|down"),
            (&["c-1", "lan0", "down"], "there are a-1, a-gw, b-1, b-gw"),
            (&["a-1", "lan2", "down"], "it has lan0, lan1"),
            (&["b-gw", "eth0", "down"], "it has lan0, wan0"),
        ] {
            let error = one_line(&set_interface(&plan, words).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
        for (words, said) in [
            (&["a"][..], "relay SITE stop|continue"),
            (&["a", "pause"], "relay SITE stop|continue"),
            (&["c", "stop"], "there are a, b"),
        ] {
            let error = one_line(&signal_relay(&plan, words).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
    }
}
