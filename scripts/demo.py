#!/usr/bin/env python3
"""Stock MPI programs as one job over two clusters (`make demo`).

Makes two clusters of two nodes with a wide-area link between them: network namespaces if this user
may make them, else two clusters on this machine. Runs Intel's MPI benchmarks and a heat equation in
Python, without relinking either, and prints a table and draws a picture. The exit code is 0 only if
everything ran and the result of the heat equation equals that of a serial run.
"""

import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import dots, paths, process  # noqa: E402

LAB = paths.ROOT / "labs" / "two-sites.toml"
# The same link without relays: hosts reach each other directly, as a yardstick for direct
# connections.
ROUTED = paths.ROOT / "labs" / "two-sites-routed.toml"
IMB = paths.venv("impi") / "bin" / "IMB-MPI1"
PICTURE = paths.BUILD / "demo.svg"
HEAT = paths.BUILD / "heat.png"
STEP_S = 120.0
SMALL, LARGE = 8, 1 << 20
# IMB comes with Intel MPI and loads MPICH through this variable; both have the same binary
# interface.
LIBRARY = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
PAIR = ["-n", "2"]
ONE_EACH = [*PAIR, "--ranks-per-cluster", "1"]
# Few cells: the heat reaches far into the plate in steps that each wait for the link.
PLATE = ["--size", "64", "--steps", "500"]
NEAR_ROUNDS = 5
PLACES = ("on a node", "in a cluster", "between clusters")


@dataclass(frozen=True)
class Link:
    """The emulated wide-area link, as described by its lab file."""

    rate_mb_s: float
    delay_us: float

    @property
    def best_mb_s(self) -> float:
        """The highest rate that messages of LARGE bytes can reach, each sent after the last has
        arrived."""
        return LARGE / (LARGE / self.rate_mb_s + self.delay_us)

    def __str__(self) -> str:
        return f"{self.rate_mb_s / 125:g} Gbit/s, {self.delay_us / 1000:g} ms one way"


@dataclass(frozen=True)
class Measured:
    place: str
    way: str
    ours: bool
    latency_us: float  # of SMALL bytes, one way
    bandwidth_mb_s: float  # of LARGE bytes


def main() -> int:
    process.adopt_orphans()
    started = time.monotonic()
    inside = lab_prefix()
    ok = all([run_hostname(inside), run_benchmarks(inside), run_heat(inside)])
    ways = ways_to_measure(inside)
    rows = [row for row in map(measure, ways) if row]
    link = emulated_link() if inside else None
    print_table(rows, link)
    draw(rows, link)
    ok &= len(rows) == len(ways)
    print(f"demo: {'all well' if ok else 'something failed'}, {time.monotonic() - started:.0f} s")
    print(f"demo: pictures to look at with a browser: {PICTURE} and {HEAT}")
    return 0 if ok else 1


def lab_prefix() -> list[str] | None:
    """The command prefix that runs a program inside the lab, or None if this user may make no
    lab."""
    prefix = in_lab(LAB)
    probe = process.run([*prefix, "true"], 30)
    if probe.ok:
        print(f"demo: two clusters of two nodes out of namespaces; between them {emulated_link()}")
        return prefix
    print("demo: no namespaces here; this machine is cut into two clusters instead")
    print(f"      ({process.tail(probe.output, 1)})")
    return None


def emulated_link() -> Link:
    text = LAB.read_text()
    rate = re.search(r'^rate = "([\d.]+) Gbit/s"', text, re.M)[1]
    delay = re.search(r'^delay = "([\d.]+) ms"', text, re.M)[1]
    return Link(float(rate) * 125, float(delay) * 1000)


def in_lab(file: Path) -> list[str]:
    return [str(paths.LANDBRIDGE), "lab", "run", str(file), "--"]


def command(inside, options: list[str], program: list[str]) -> list[str]:
    """`landbridge run` over the two clusters."""
    where = [] if inside else ["--clusters", "2"]
    return [*(inside or []), str(paths.LANDBRIDGE), "run", *where, *options, "--", *program]


def four(inside) -> list[str]:
    """Options for four ranks, one on each node. Ranks fill the hosts in order: without a limit all
    of them would fit into the first cluster."""
    return ["-n", "4", *(["--ranks-per-node", "1"] if inside else [])]


def run_hostname(inside) -> bool:
    """Whether ranks run in both clusters; prints their hosts."""
    done = process.run(command(inside, four(inside), ["hostname"]), STEP_S)
    names = sorted(done.output.split())
    print(f"demo: four ranks, on {', '.join(names)}: {verdict(done)}", flush=True)
    return done.ok and (not inside or len(set(names)) == 4)


def run_benchmarks(inside) -> bool:
    ok = True
    for benchmark in ("PingPong", "Sendrecv", "Allreduce", "Alltoall"):
        bounds = ["-npmin", "4", "-msglog", "0:20", "-iter", "100", "-time", "0.2"]
        program = [str(IMB), benchmark, *bounds]
        done = process.run(command(inside, four(inside), program), STEP_S, LIBRARY)
        print(f"demo: IMB {benchmark}, 4 ranks over both clusters: {verdict(done)}", flush=True)
        ok &= done.ok
    return ok


def run_heat(inside) -> bool:
    program = [paths.python("mpich"), str(paths.ROOT / "examples" / "heat.py"), "--check"]
    options = [*PLATE, "--picture", str(HEAT)]
    done = process.run(command(inside, four(inside), [*program, *options]), STEP_S)
    print(process.tail(done.output, 4))
    print(f"demo: heat equation, 4 ranks over both clusters: {verdict(done)}", flush=True)
    return done.ok


def ways_to_measure(inside) -> list[tuple]:
    """(place, variant, whether it uses Landbridge, command, environment) of each ping-pong."""
    program = [str(IMB), "PingPong", "-msglen", str(lengths_file()), "-time", "2"]
    run = [str(paths.LANDBRIDGE), "run", *PAIR]
    here = [*run, "--", *program]
    far = command(inside, ONE_EACH, program)
    over_shm, over_tcp = ["--provider", "shm"], ["--provider", "tcp"]
    node, cluster, between = PLACES
    ways = [
        (node, "Landbridge, shared memory", True, here, {"LANDBRIDGE_PATHS": "shm"}),
        (node, "direct: libfabric shm", False, [*run, *over_shm, "--", *program], {}),
        (cluster, "Landbridge, TCP", True, here, {"LANDBRIDGE_PATHS": "tcp"}),
        (cluster, "direct: libfabric tcp", False, [*run, *over_tcp, "--", *program], {}),
        (between, "Landbridge, two relays", True, far, {}),
    ]
    if inside:
        routed = command(in_lab(ROUTED), [*ONE_EACH, *over_tcp], program)
        ways.append((between, "direct: libfabric tcp, routed", False, routed, {}))
    return ways


def measure(way: tuple) -> Measured | None:
    """The medians of some runs. Short runs on one node or in one cluster show other load of the
    machine, so they are repeated."""
    place, name, ours, line, env = way
    rounds = 1 if place == PLACES[-1] else NEAR_ROUNDS
    runs = [process.run(line, STEP_S, LIBRARY | env) for _ in range(rounds)]
    worst = next((done for done in runs if not done.ok), runs[-1])
    print(f"demo: ping-pong {place}, {name}: {verdict(worst)}", flush=True)
    tables = [{int(a): (float(b), float(c)) for a, b, c in ROW.findall(r.output)} for r in runs]
    if not worst.ok or not all({SMALL, LARGE} <= table.keys() for table in tables):
        return None
    latency = statistics.median(table[SMALL][0] for table in tables)
    return Measured(place, name, ours, latency, statistics.median(t[LARGE][1] for t in tables))


ROW = re.compile(r"^\s+(\d+)\s+\d+\s+([\d.]+)\s+([\d.]+)\s*$", re.M)


def lengths_file() -> Path:
    file = paths.RESULTS / "demo-lengths"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{SMALL}\n{LARGE}\n")
    return file


def verdict(done: process.Finished) -> str:
    if done.ok:
        return f"ok, {done.seconds:.1f} s"
    return f"FAILED ({done.why or done.code})\n{process.tail(done.output)}"


def print_table(rows: list[Measured], link: Link | None) -> None:
    head = "ping-pong of two ranks"
    print(f"\n{head:34} {'8 B latency, one way':>20} {'1 MiB bandwidth':>17}")
    for place in PLACES:
        print(place)
        for row in (row for row in rows if row.place == place):
            print(f"  {row.way:32} {row.latency_us:17.1f} us {row.bandwidth_mb_s:12.0f} MB/s")
    print("\n" + "\n".join(notes(link)) + "\n")


def notes(link: Link | None) -> list[str]:
    """Notes for reading the figures."""
    lines = ["direct: the same program over a provider of libfabric itself, without Landbridge."]
    if not link:
        return [*lines, "Both clusters are this machine: there is no link with a rate or a delay."]
    return [
        *lines,
        "routed: over the same link, but gateways let everybody through, as real ones do not.",
        f"The link between the clusters is emulated: {link} ({link.rate_mb_s:.0f} MB/s).",
        f"A ping-pong of 1 MiB messages cannot pass {link.best_mb_s:.0f} MB/s on it: "
        f"each waits for the one before.",
    ]


def draw(rows: list[Measured], link: Link | None) -> None:
    about = f"Intel's IMB-MPI1 PingPong on MPICH 5, {os.cpu_count()} cores. Axes are logarithmic."
    panels = [
        dots.Panel("8 B latency, one way (lower is better)", "µs"),
        dots.Panel("1 MiB bandwidth (higher is better)", "MB/s"),
    ]
    groups = [group(place, rows, link) for place in PLACES]
    title = "Two MPI ranks, near and far: Landbridge beside direct paths"
    PICTURE.write_text(dots.chart(title, [about, *notes(link)], panels, groups))


def group(place: str, rows: list[Measured], link: Link | None) -> dots.Group:
    found = [row for row in rows if row.place == place]
    drawn = [dots.Row(r.way, [r.latency_us, r.bandwidth_mb_s], r.ours) for r in found]
    if place != PLACES[-1] or not link:
        return dots.Group(place, drawn)
    delay, rate = f"link: {link.delay_us / 1000:g} ms", f"link: {link.rate_mb_s / 125:g} Gbit/s"
    return dots.Group(place, drawn, [(link.delay_us, delay), (link.rate_mb_s, rate)])


if __name__ == "__main__":
    sys.exit(main())
