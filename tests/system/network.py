#!/usr/bin/env python3
"""Unmodified programs in a lab with packet loss, corruption and reordering, and with failing links.

Links, interfaces and relays fail while a program runs. The lab is labs/two-rails.toml: two hosts
with two rails, and a second cluster behind a wide-area link. Each case is one job of one program
that checks every byte it receives (or its whole result). `--only REGEX` chooses cases, `--list`
names them. `landbridge lab soak` injects such faults at random.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import common
from support import lab, process

LAB_FILE = lab.LABS / "two-rails.toml"
# Inbound ports of the near cluster in one case: the port of its relay, TCP alone.
NO_UDP = ('name = "near"', 'name = "near"\ninbound = [7711]')
SUMS = common.ROOT / "crates" / "lab" / "src" / "soak" / "sums.py"
HEAT = common.ROOT / "examples" / "heat.py"
# Seconds for which the program exchanges messages, and seconds for which most faults last.
RUN_S, HEAL_S = 8.0, 6.5
# A program that always has a path to every peer ends this many seconds after RUN_S at the latest.
SLACK_S = 6.0
START_LIMIT_S = 30.0
# No undisturbed job takes a third of this time.
JOB_LIMIT_S = 75.0
POLL_S = 0.01

Events = list[tuple[float, str]]


def on_rails(change: str) -> Events:
    """A change of both rails, undone before the program ends."""
    rails = ("near-LAN0", "near-LAN1")
    return [(0, f"link . {rail} {change}") for rail in rails] + [
        (HEAL_S, f"link . {rail} --restore") for rail in rails
    ]


def down(host: str, device: str, start: float, end: float | None = None) -> Events:
    events = [(start, f"interface . {host} {device} down")]
    return events if end is None else [*events, (end, f"interface . {host} {device} up")]


# Seconds after all ranks have met, and the change of the lab at that time.
RAIL_FAULTS: dict[str, Events] = {
    "1 % loss": on_rails("--loss 1%"),
    "5 % loss": on_rails("--loss 5%"),
    "corruption": on_rails("--corrupt 1% --repair-checksums true"),
    "reordering": on_rails("--reorder 5% --reorder-by 1ms"),
    "duplication": on_rails("--duplicate 5%"),
    "interfaces down and up": [
        *down("near-1", "lan0", 1.0, 2.5),
        *down("near-2", "lan1", 3.0, 4.5),
        *down("near-2", "lan0", 5.0, 5.3),
        *down("near-1", "lan1", 5.6, 6.5),
    ],
    "first rail down for good": down("near-1", "lan0", 1.0),
    "second rail down for good": down("near-2", "lan1", 1.0),
    "one rail at a tenth": [(0, "link . near-LAN1 --rate 100Mbit/s")],
}
# Larger packets vanish without a notification. Of the remaining size, 28 bytes are headers of a
# datagram.
SMALL = 1280
SHRINKS: Events = [(2.0, f"link . near-LAN{rail} --mtu {SMALL}") for rail in (0, 1)]
SIZED = r"(?s)udp to \S+: datagrams of 12\d\d bytes.*^done: [1-9]"
RATE = 'delay = "50 us" }   # of each rail'
# The second host becomes unreachable.
CUT_OFF: Events = down("near-2", "lan0", 1.0) + down("near-2", "lan1", 1.0)
# The first host drops UDP packets from the second, and UDP works in the other direction; seconds
# after all ranks have met.
DEAF_S = 2.0
DEAF = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; " \
    "add rule inet deaf in ip saddr 10.1.0.0/23 meta l4proto udp drop"
# Faults that are also tested with `udp=on`.
OVER_UDP = ["5 % loss", "corruption", "reordering", "duplication", "interfaces down and up", "first rail down for good"]
WAN_FAULTS: dict[str, Events] = {
    "wide-area link cut for 20 s": [(1.0, "link . near-far --down"), (21.0, "link . near-far --up")],
    "relay stopped for 5 s": [(1.0, "relay . near stop"), (6.0, "relay . near continue")],
    "1 % loss on the wide-area link": [
        (0, "link . near-far --loss 1%"),
        (HEAL_S, "link . near-far --restore"),
    ],
}
# Faults that are also tested with `wan_udp=on`, and the job's message at the end.
WAN_OVER_UDP: dict[str, Events] = {
    "wide-area link cut for 8 s": [(1.0, "link . near-far --down"), (9.0, "link . near-far --up")],
    "1 % loss on the wide-area link": WAN_FAULTS["1 % loss on the wide-area link"],
    "relay stopped for 5 s": WAN_FAULTS["relay stopped for 5 s"],
}


@dataclass
class Case:
    name: str
    command: list[str]
    environment: dict[str, str]
    events: Events
    # What the program prints when its result is right.
    proof: str
    # Seconds between the meeting of all ranks and the end; None if all paths may be down for a
    # while.
    within_s: float | None = None
    # What the program prints when all ranks have met; None: faults begin before the program does.
    started: str | None = "started"
    # Whether the program must end with an error.
    fails: bool = False
    lab: Path = LAB_FILE


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    with tempfile.TemporaryDirectory() as folder:
        cases = every_case(options, Path(folder))
        if options.list:
            print("\n".join(case.name for case in cases))
            return 0
        why_not = no_lab(options)
        if why_not:
            return common.skipped(f"no lab can be built here: {why_not}")
        for case in cases:
            if checks.wants(case.name):
                try_case(checks, case)
    return checks.end()


def add_options(parser):
    parser.add_argument("--list", action="store_true", help="name the cases")


def every_case(options, folder: Path) -> list[Case]:
    cases = []
    for fault, events in RAIL_FAULTS.items():
        # Open MPI's own daemons use the second rail, and do not check what arrives.
        apart = [event for event in events if fault != "corruption" or "LAN1" not in event[1]]
        cases += [mpich(options, fault, events), open_mpi(options, fault, apart)]
    cases.append(heat(options, "1 % loss"))
    for fault in ("5 % loss", "corruption", "reordering", "interfaces down and up"):
        cases += [heat(options, fault), benchmark(options, fault)]
    cases += [mpich(options, fault, RAIL_FAULTS[fault], over_udp=True) for fault in OVER_UDP]
    cases.append(open_mpi(options, "5 % loss", RAIL_FAULTS["5 % loss"], over_udp=True))
    cases.append(benchmark(options, "5 % loss", over_udp=True))
    cases += [from_the_start(options), damaged_hellos(options), deaf(options), polls_seldom(options), *reads_late(options)]
    cases += [unchecked(options, over_udp) for over_udp in (False, True)]
    cases += [cut_off(options, over_udp) for over_udp in (False, True)]
    cases += [small_packets(options, folder, over_udp=False), small_packets(options, folder, over_udp=True)]
    cases += [smaller_packets(options)]
    for fault, events in WAN_FAULTS.items():
        cases += [mpich(options, fault, events, hosts=4)]
    for fault, events in WAN_OVER_UDP.items():
        cases += [wan_udp(options, fault, events)]
    cases += [wan_without_udp(options, folder)]
    return cases


def wan_udp(options, fault: str, events: Events) -> Case:
    """A case with relays that are connected over UDP; their log (-v) shows the protocol."""
    case = mpich(options, fault, events, hosts=4)
    case.name += " over UDP"
    case.command[2:2] = ["-v", "--set", "wan_udp=on"]
    case.proof = r"(?s)linked to the relay of cluster \d at \S+/udp.*^done: [1-9]"
    return case


def wan_without_udp(options, folder: Path) -> Case:
    """A case with a firewall that drops all UDP packets."""
    case = wan_udp(options, "UDP dropped by a firewall", [])
    case.name = case.name.removesuffix(" over UDP")
    case.lab = folder / "no-udp.toml"
    case.lab.write_text(LAB_FILE.read_text().replace(*NO_UDP))
    case.proof = r"(?s)over UDP: .*; TCP is tried.*linked to the relay of cluster \d at [\d.:]+$.*^done: [1-9]"
    return case


def words_of_run(options, hosts: int, *words: str) -> list[str]:
    """`landbridge run` with one rank on each of the first hosts; two of the hosts are the near
    cluster."""
    return common.landbridge_run(options, hosts, "--ranks-per-node", "1", *words)


def mpich(options, fault: str, events: Events, hosts: int = 2, over_udp: bool = False) -> Case:
    program = [common.python(options), str(SUMS), "--seconds", str(RUN_S)]
    name = f"MPICH, {'one cluster' if hosts == 2 else 'two clusters'}, {fault}"
    extra = ["--set", "udp=on"] if over_udp else []
    name += " over UDP" if over_udp else ""
    within = RUN_S + SLACK_S if hosts == 2 else None
    return Case(name, [*words_of_run(options, hosts, *extra), *program], {}, events, r"^done: [1-9]", within)


def from_the_start(options) -> Case:
    """The network of a host fails before its rank has reached any peer."""
    case = mpich(options, "an interface down as it begins", down("near-2", "lan0", 0.0, 4.0))
    case.started, case.within_s = None, None
    return case


def damaged_hellos(options) -> Case:
    """Most hellos between ranks and relays are corrupt, which looks like a wrong key."""
    rails = ("near-LAN0", "near-LAN1")
    events = [(0.0, f"link . {rail} --corrupt 10% --repair-checksums true") for rail in rails]
    events += [(4.0, f"link . {rail} --restore") for rail in rails]
    case = mpich(options, "bits flipped as it begins", events, hosts=4)
    case.started, case.within_s = None, None
    return case


def polls_seldom(options) -> Case:
    """A rail fails while the sending rank calls MPI ten times a second, and never for long."""
    program = [common.python(options), str(common.PROGRAMS / "polls_seldom.py"), "6"]
    events = [(1.0, "link . near-LAN0 --down")]
    return Case("MPICH, one cluster, a rail fails beside who calls MPI seldom", [*words_of_run(options, 2), *program], {}, events, r"^done: [1-9]")


def reads_late(options) -> list[Case]:
    """A rail fails while the windows of all connections are closed, because the receiver computes, or
    just as they open again."""
    program = [common.python(options), str(common.PROGRAMS / "reads_late.py"), "4"]
    cases = []
    for when, at_s in {"while its windows are closed": 2.0, "as its windows open": 4.0}.items():
        name = f"MPICH, one cluster, a rail fails {when}"
        events = [(at_s, "link . near-LAN0 --down")]
        cases.append(Case(name, [*words_of_run(options, 2), *program], {}, events, r"^done: [1-9]"))
    return cases


def deaf(options) -> Case:
    """UDP fails in one direction, which ranks notice in the middle of messages."""
    case = mpich(options, "UDP lost in one direction", [], over_udp=True)
    # Only a process in the lab can change a host's firewall.
    change = f"sleep {DEAF_S}; {options.bin / 'landbridge'} lab on near-1 -- nft '{DEAF}' && echo deaf"
    watch = f'while IFS= read -r line; do echo "$line"; case $line in started) {change};; esac; done'
    case.command = ["bash", "-o", "pipefail", "-c", f'"$@" | {watch}', "bash", *case.command]
    case.proof = r"^deaf\n(.*\n)*done: [1-9]"
    return case


def unchecked(options, over_udp: bool) -> Case:
    """Without checksums the corruption causes wrong data, or ends the job where it hits a header:
    this shows that the checksums prevent both."""
    case = mpich(options, "corruption without integrity", RAIL_FAULTS["corruption"], over_udp=over_udp)
    place = case.command.index("run") + 1
    case.command[place:place] = ["--set", "integrity=off"]
    case.proof, case.fails, case.within_s = r"^wrong: rank \d|Fatal error in ", True, None
    return case


def small_packets(options, folder: Path, over_udp: bool) -> Case:
    """Large packets vanish from the start: with TCP on one rail, over UDP on both."""
    where = "both rails" if over_udp else "one rail"
    case = mpich(options, f"only small packets get through on {where}", [], over_udp=over_udp)
    mtu = f"mtu = {SMALL}"
    shape = f'delay = "50 us", {mtu} }}' if over_udp else f'delay = "50 us" }}\nrail.1 = {{ {mtu} }}'
    case.lab = folder / f"small-{over_udp}.toml"
    case.lab.write_text(LAB_FILE.read_text().replace(RATE, shape))
    if over_udp:
        expect_size_report(case)
    return case


def smaller_packets(options) -> Case:
    """The largest packet that passes becomes smaller in the middle of messages, as when routes
    change."""
    case = mpich(options, "only small packets get through after a while", SHRINKS, over_udp=True)
    expect_size_report(case)
    return case


def expect_size_report(case: Case) -> None:
    place = case.command.index("run") + 1
    case.command[place:place] = ["--set", "log=info"]
    case.proof = SIZED


def cut_off(options, over_udp: bool) -> Case:
    """The other rank gives up, long before the launcher's connections do."""
    case = mpich(options, "a host cut off for good", CUT_OFF, over_udp=over_udp)
    place = case.command.index("run") + 1
    case.command[place:place] = ["--set", "peer_timeout=3s"]
    case.proof, case.fails = r"could not be reached for 3s: it counts as lost", True
    return case


def open_mpi(options, fault: str, events: Events, over_udp: bool = False) -> Case:
    """A case under Open MPI's own launcher, which starts its daemons with a replacement of ssh."""
    # The daemons do not survive the loss of their own connection, so that connection uses the other
    # rail.
    device = "lan1" if fault.startswith("first rail") or fault == "corruption" else "lan0"
    root = ["--allow-run-as-root", "--bind-to", "none", *lab.daemons(device)]
    own = [str(options.venvs / "ompi" / "bin" / "mpirun"), *root, "--host", "near-1,near-2", "-n", "2"]
    program = [common.python(options, "ompi"), str(SUMS), "--seconds", str(RUN_S)]
    environment = common.settings(options, "openmpi") | lab.agent_environment(options.bin / "landbridge")
    environment |= {"LANDBRIDGE_UDP": "on"} if over_udp else {}
    name = f"Open MPI, one cluster, {fault}{' over UDP' if over_udp else ''}"
    return Case(name, [*own, *program], environment, events, r"^done: [1-9]", RUN_S + SLACK_S)


def heat(options, fault: str) -> Case:
    words = [common.python(options), str(HEAT), "--check", "--size", "512", "--steps", "2000"]
    name, command = f"heat equation, one cluster, {fault}", [*words_of_run(options, 2), *words]
    return Case(name, command, {}, RAIL_FAULTS[fault], "identical to the serial run", started=None)


def benchmark(options, fault: str, over_udp: bool = False) -> Case:
    names = ["PingPong", "Sendrecv", "Exchange", "Bcast", "Allreduce", "Alltoall"]
    bounds = ["-npmin", "2", "-msglog", "0:22", "-iter", "50", "-time", "0.1"]
    words = [str(options.venvs / "impi" / "bin" / "IMB-MPI1"), *names, *bounds]
    environment = {"LD_LIBRARY_PATH": str(options.venvs / "mpich" / "lib")}
    name = f"IMB-MPI1, one cluster, {fault}{' over UDP' if over_udp else ''}"
    command = [*words_of_run(options, 2, *(["--set", "udp=on"] if over_udp else [])), *words]
    proof = r"^# All processes entering MPI_Finalize"
    return Case(name, command, environment, RAIL_FAULTS[fault], proof, started=None)


def endure(verb: str, options, words: list[str], slack_s: float) -> int:
    """The exit code of a driver that runs `landbridge lab soak` or `punish` for
    `options.minutes`."""
    common.quiet_environment()
    process.adopt_orphans()
    why_not = no_lab(options)
    if why_not:
        return common.skipped(f"no lab can be built here: {why_not}")
    done = endured(verb, options, words, slack_s)
    print(done.output)
    print(f"{verb} with seed {options.seed}: {'every program ended right' if done.ok else done.why or done.code}")
    return 0 if done.ok else 1


def endured(verb: str, options, words: list[str], slack_s: float) -> process.Finished:
    words = [*words, "--minutes", str(options.minutes), "--seed", str(options.seed), "--venvs", str(options.venvs)]
    command = [str(options.bin / "landbridge"), "lab", verb, *words]
    return process.run(command, options.minutes * 60 + slack_s)


def no_lab(options) -> str:
    """Why this machine or user can have no lab; empty if a lab is possible."""
    return lab.why_not(options.bin / "landbridge", LAB_FILE)


def lab_run(options, name: str, file: Path = LAB_FILE) -> list[str]:
    return lab.run(options.bin / "landbridge", file, name)


def try_case(checks, case: Case) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # Process ids are the same in every lab, and Open MPI names its sockets by them.
        run_case(checks, case, {"TMPDIR": scratch} | case.environment)


def run_case(checks, case: Case, environment: dict[str, str]) -> None:
    name = f"network-{os.getpid()}"
    job = Job([*lab_run(checks.options, name, case.lab), *case.command], environment)
    try:
        trouble = disturb(checks.options, job, case, name)
        seconds = job.wait(min(checks.options.limit, JOB_LIMIT_S)) if not trouble else None
    finally:
        job.end()
    output = job.output.decode(errors="replace")
    if trouble:
        checks.check(case.name, False, trouble, output)
        return
    is_proved = re.search(case.proof, output, re.M) is not None
    in_time = seconds is not None and (case.within_s is None or seconds <= case.within_s)
    measured = "still runs at the limit" if seconds is None else f"{seconds:.1f} s"
    measured += f", exit code {job.process.returncode}" if seconds is not None else ""
    if is_proved and not in_time:
        measured += f": stood still (at most {case.within_s} s)"
    is_expected = (job.process.returncode != 0) == case.fails
    checks.check(case.name, is_expected and is_proved and in_time, measured, output)


def disturb(options, job, case: Case, name: str) -> str:
    """Waits for the ranks to meet and injects the faults; returns the problem, or an empty text."""
    wanted = case.started or ""
    if not job.wait_for(wanted, START_LIMIT_S):
        return "the ranks did not meet"
    job.started = time.monotonic()
    for at, words in case.events:
        if not job.sleep_until(job.started + at):
            return ""
        verb, _, rest = words.partition(" . ")
        command = [str(options.bin / "landbridge"), "lab", verb, name, *rest.split()]
        done = change(command, START_LIMIT_S if case.started is None and at == 0 else 0)
        if done.returncode:
            return f"`{' '.join(command[1:])}`: {done.stderr.strip()}"
    return ""


def change(command: list[str], patience_s: float):
    """Sends a change to the lab; repeats it until the lab has been built, for `patience_s` at
    most."""
    deadline = time.monotonic() + patience_s
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if not done.returncode or time.monotonic() >= deadline:
            return done
        time.sleep(POLL_S)


class Job:
    """A program in the background."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.output = bytearray()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
            start_new_session=True,
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def wait_for(self, words: str, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while words.encode() not in self.output:
            if not self.sleep_until(min(deadline, time.monotonic() + POLL_S)) or time.monotonic() >= deadline:
                return words.encode() in self.output
        return True

    def sleep_until(self, when: float) -> bool:
        """Sleeps; False if the program has ended before."""
        while time.monotonic() < when:
            ended = self.process.poll() is not None
            self.output += self.process.stdout.read() or b""
            if ended:
                return False
            time.sleep(max(0.0, min(POLL_S, when - time.monotonic())))
        return True

    def wait(self, limit_s: float) -> float | None:
        """Seconds from the start until the program ended; None if it does not end."""
        return None if self.sleep_until(self.started + limit_s) else time.monotonic() - self.started

    def end(self) -> None:
        process.end_descendants()
        self.process.wait()
        self.output += self.process.stdout.read() or b""
        self.process.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
