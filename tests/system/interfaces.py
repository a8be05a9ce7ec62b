#!/usr/bin/env python3
"""Hosts with interfaces that lead nowhere: a job is correct and starts without delay.

The interfaces are a bridge of containers, alike on every host; a VPN with the default route; a
first interface without a network. The lab is labs/two-rails.toml, with these interfaces on its
first two hosts. Times are medians of alternating runs with and without the interface, which may
cost SLACK_S.
"""

import re
import statistics
import sys
import tempfile
from pathlib import Path

import common
import network
from support import lab, process

HOSTS = ["near-1", "near-2"]
# A bridge as a container engine leaves it: the same address on every host, and a device on it, so
# that the bridge has a carrier.
BRIDGE = """
ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0
ip link add vethc type veth peer name vethp; ip link set vethp master docker0
ip link set vethc up; ip link set vethp up; ip link set docker0 up
"""
# Without ARP every packet is sent, and none is received.
VPN = """
ip link add tun0 type veth peer name tun1; ip link set tun0 arp off
ip address add 10.8.0.$((11 + $1))/24 dev tun0; ip link set tun1 up; ip link set tun0 up
ip route replace default dev tun0
"""
PLAIN, BRIDGES, VPNS, FIRST = "nothing", "a bridge alike on all hosts", "a VPN", "the first interface"
ADDED = {PLAIN: "", BRIDGES: BRIDGE, VPNS: VPN, FIRST: ""}
# A change of the lab file: the first rail is up, has addresses and the default route, and carries
# nothing.
DEAD_RAIL = ('delay = "50 us" }   # of each rail', 'delay = "50 us", down = true }\nrail.1 = { down = false }')
RUNS = 3
# Seconds: a dial to an address without a host lasts half a second, and Open MPI meets its peers
# with two endpoints, one after the other.
SLACK_S = 1.4
TURNS = ["--turns", "3", "--largest", "70000"]


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    process.adopt_orphans()
    if why_not := network.no_lab(options):
        return common.skipped(f"no lab can be built here: {why_not}")
    checks = common.Checks(options)
    with tempfile.TemporaryDirectory() as folder:
        dead_rail = Path(folder) / "dead-rail.toml"
        text = network.LAB_FILE.read_text()
        assert DEAD_RAIL[0] in text
        dead_rail.write_text(text.replace(*DEAD_RAIL))
        compare(checks, "MPICH, landbridge run", mpich, [PLAIN, BRIDGES, VPNS], dead_rail)
        compare(checks, "Open MPI, mpirun", open_mpi, [PLAIN, BRIDGES, VPNS, FIRST], dead_rail)
    return checks.end()


def compare(checks, name: str, program, places: list[str], dead_rail: Path) -> None:
    """Runs the same job at all places, in turns."""
    if not checks.wants(name):
        return
    seconds = {place: [] for place in places}
    for turn in range(RUNS):
        for place in places:
            file = dead_rail if place == FIRST else network.LAB_FILE
            done = run(checks.options, program(checks.options), ADDED[place], file)
            proved = done.ok and re.search(r"^done: [1-9]", done.output, re.M)
            if not proved:
                checks.check(f"{name}, leads nowhere: {place}", False, common.how(done), done.output)
                return
            began, ended = (float(common.values(done.output, word)[0]) for word in ("began", "ended"))
            seconds[place].append(ended - began)
    plain = statistics.median(seconds[PLAIN])
    for place in places:
        median = statistics.median(seconds[place])
        checks.check(f"{name}, leads nowhere: {place}", median <= plain + SLACK_S, f"{median:.2f} s (else {plain:.2f} s)")


def run(options, job, added: str, file: Path) -> process.Finished:
    """Runs a job in a lab of `file`, after the commands `added` on its hosts."""
    (command, environment) = job
    on = f"{options.bin / 'landbridge'} lab on"
    prepare = "".join(f"{on} {host} -- bash -ec '{added}' bash {number}\n" for number, host in enumerate(HOSTS))
    script = f'set -e\n{prepare if added else ""}echo "began: $EPOCHREALTIME"\n"$@"\necho "ended: $EPOCHREALTIME"'
    inside = ["bash", "-c", script, "bash", *command]
    with tempfile.TemporaryDirectory() as scratch:
        # Process ids are the same in every lab, and Open MPI names its sockets by them.
        words = [*network.lab_run(options, "interfaces", file), *inside]
        return common.run(options, words, environment | {"TMPDIR": scratch})


def mpich(options):
    program = [common.python(options), str(network.SUMS), *TURNS]
    return [*network.words_of_run(options, 2), *program], {}


def open_mpi(options):
    """A job under Open MPI's own launcher: ranks get no address advertisement from Landbridge's
    launcher."""
    root = ["--allow-run-as-root", "--bind-to", "none", *lab.daemons("lan1")]
    own = [str(options.venvs / "ompi" / "bin" / "mpirun"), *root, "--host", ",".join(HOSTS), "-n", "2"]
    environment = common.settings(options, "openmpi") | lab.agent_environment(options.bin / "landbridge")
    return [*own, common.python(options, "ompi"), str(network.SUMS), *TURNS], environment


if __name__ == "__main__":
    sys.exit(main())
