#!/usr/bin/env python3
"""Stock MPI programs as one job over two clusters (`make demo`).

Brings up two clusters of two nodes with a wide-area link between them: network namespaces where
this user may make them, else this machine cut in two. Runs Intel's MPI benchmarks and a heat equation
in Python, none of which was ever relinked, and ends with a table and a picture. The exit code is 0
only if everything ran and the heat equation's answer is that of a serial run.
"""

import math
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths, process, svg  # noqa: E402

LAB = paths.ROOT / "labs" / "two-sites.toml"
# The same link, but hosts reach each other without relays: what direct connections would do.
ROUTED = paths.ROOT / "labs" / "two-sites-routed.toml"
IMB = paths.venv("impi") / "bin" / "IMB-MPI1"
PICTURE = paths.BUILD / "demo.svg"
STEP_S = 120.0
SMALL, LARGE = 8, 1 << 20
LIBRARY = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
PAIR = ["-n", "2"]
ONE_EACH = [*PAIR, "--ranks-per-cluster", "1"]


def main() -> int:
    process.adopt_orphans()
    started = time.monotonic()
    inside = lab_prefix()
    ok = all([run_benchmarks(inside), run_heat(inside)])
    rows = measure(inside)
    print_table(rows)
    draw(rows)
    print(f"demo: {'all well' if ok and len(rows) >= 5 else 'something failed'}, "
          f"{time.monotonic() - started:.0f} s; picture: {PICTURE}")
    return 0 if ok and len(rows) >= 5 else 1


def lab_prefix() -> list[str] | None:
    """The command that runs another one inside the lab, or None if this user may make none."""
    prefix = in_lab(LAB)
    probe = process.run([*prefix, "true"], 30)
    if probe.ok:
        print("demo: two clusters of two nodes out of namespaces, 1 Gbit/s between them")
        return prefix
    print("demo: no namespaces here; this machine is cut into two clusters instead")
    print(f"      ({process.tail(probe.output, 1)})")
    return None


def in_lab(file: Path) -> list[str]:
    return [str(paths.LANDBRIDGE), "lab", "run", str(file), "--"]


def command(inside, options: list[str], program: list[str]) -> list[str]:
    """`landbridge run` over the two clusters."""
    where = [] if inside else ["--clusters", "2"]
    return [*(inside or []), str(paths.LANDBRIDGE), "run", *where, *options, "--", *program]


def run_benchmarks(inside) -> bool:
    ok = True
    for benchmark in ("PingPong", "Sendrecv", "Allreduce", "Alltoall"):
        bounds = ["-npmin", "4", "-msglog", "0:20", "-iter", "100", "-time", "0.5"]
        program = [str(IMB), benchmark, *bounds]
        done = process.run(command(inside, ["-n", "4"], program), STEP_S, LIBRARY)
        print(f"demo: IMB {benchmark}, 4 ranks over both clusters: {verdict(done)}", flush=True)
        ok &= done.ok
    return ok


def run_heat(inside) -> bool:
    program = [paths.python("mpich"), str(paths.ROOT / "examples" / "heat.py"), "--check"]
    picture = ["--picture", str(paths.BUILD / "heat.pgm")]
    done = process.run(command(inside, ["-n", "4"], [*program, *picture]), STEP_S)
    print(process.tail(done.output, 4))
    print(f"demo: heat equation, 4 ranks over both clusters: {verdict(done)}", flush=True)
    return done.ok


def measure(inside) -> dict[str, tuple[float, float]]:
    """Way -> (latency of 8 bytes in us, bandwidth of 1 MiB messages in MB/s)."""
    program = [str(IMB), "PingPong", "-msglen", str(lengths_file()), "-time", "2"]
    here = [str(paths.LANDBRIDGE), "run", *PAIR, "--", *program]
    over_tcp = {"FI_PROVIDER": "tcp"}
    ways = {
        "on a node, shared memory": (here, {"LANDBRIDGE_PATHS": "shm"}),
        "  direct: libfabric shm": (here, {"FI_PROVIDER": "shm"}),
        "in a cluster, TCP": (here, {"LANDBRIDGE_PATHS": "tcp"}),
        "  direct: libfabric tcp": (here, over_tcp),
        "between clusters, two relays": (command(inside, ONE_EACH, program), {}),
    }
    if inside:
        routed = command(in_lab(ROUTED), ONE_EACH, program)
        ways["  direct: libfabric tcp, routed"] = (routed, over_tcp)
    rows = {}
    for way, (line, env) in ways.items():
        done = process.run(line, STEP_S, LIBRARY | env)
        numbers = {int(a): (float(b), float(c)) for a, b, c in ROW.findall(done.output)}
        if {SMALL, LARGE} <= numbers.keys():
            rows[way] = (numbers[SMALL][0], numbers[LARGE][1])
        print(f"demo: ping-pong {way.strip()}: {verdict(done)}", flush=True)
    return rows


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


def print_table(rows) -> None:
    print(f"\n{'ping-pong':32} {'8 B latency':>14} {'1 MiB bandwidth':>18}")
    for place, (latency, bandwidth) in rows.items():
        print(f"{place:32} {latency:11.1f} us {bandwidth:13.0f} MB/s")
    print()


def draw(rows) -> None:
    latency = {place.strip(): values[0] for place, values in rows.items()}
    bandwidth = {place.strip(): values[1] for place, values in rows.items()}
    top = [max(chart.values(), default=1.0) for chart in (latency, bandwidth)]
    # Latencies span four powers of ten: their logarithms are drawn.
    groups = [
        (f"8 B latency, log (highest: {top[0]:.0f} us)", scaled(latency)),
        (f"1 MiB (highest: {top[1]:.0f} MB/s)", {p: v / top[1] for p, v in bandwidth.items()}),
    ]
    PICTURE.write_text(svg.bars("Landbridge: near and far", groups))


def scaled(latency) -> dict[str, float]:
    """Logarithms of latencies above 0.1 us, as shares of the highest."""
    logs = {way: math.log10(max(value, 0.2) * 10) for way, value in latency.items()}
    highest = max(logs.values(), default=1.0)
    return {way: value / highest for way, value in logs.items()}


if __name__ == "__main__":
    sys.exit(main())
