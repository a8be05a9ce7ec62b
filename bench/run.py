#!/usr/bin/env python3
"""The comparisons of `make bench`, each against its peers in the same run.

    bench/run.py                    all comparisons, then docs/BENCHMARKS.md
    bench/run.py node tcp           only these; in the document only their sections are replaced
    bench/run.py --list             the names
    bench/run.py --quick rails      a trial: the fewest rounds, the most important cases
    bench/run.py --rounds 7         more rounds (default 5)
    bench/run.py --report [NAME]    only write the document, from the last results
    bench/run.py --bin DIR recovery the binaries in DIR (default: LANDBRIDGE_RELEASE, else target/release)

The peers take turns (A B C, A B C, ...), so that a change of the machine's load affects all of
them; the reported value is the median of the rounds. A peer that does not run here is named with
its error. What leaves: build/results/bench-NAME.json and the document. Exit codes: 1 if a
comparison does not run at all, 130 if interrupted; the document then contains what was measured
before.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "scripts"), str(HERE)]
import second_path  # noqa: E402
import checkpoint  # noqa: E402
import datagrams  # noqa: E402
import fairness  # noqa: E402
import files  # noqa: E402
import hop_cost  # noqa: E402
import hops  # noqa: E402
import hotspots  # noqa: E402
import idle  # noqa: E402
import imb  # noqa: E402
import integrity  # noqa: E402
import intercept  # noqa: E402
import labs  # noqa: E402
import own_core  # noqa: E402
import payload_log  # noqa: E402
import peers  # noqa: E402
import rails  # noqa: E402
import recovery  # noqa: E402
import report  # noqa: E402
import stall  # noqa: E402
import stamp  # noqa: E402
import streams  # noqa: E402
import sweep  # noqa: E402
import wan  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Comparison:
    """One IMB benchmark over several peers. `columns`: (message size, "us" or "MB/s")."""

    name: str
    title: str
    benchmark: str
    ranks: int
    columns: tuple[tuple[int, str], ...]
    peers: tuple
    target: float  # latency relative to the best peer, at most; for bandwidth the inverse, at least
    target_bandwidth: float = 1.0
    options: tuple[str, ...] = ()


PINGPONG = ((8, "us"), (KIB, "us"), (64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
STREAM = ((64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
COLLECTIVE = ((8, "us"), (KIB, "us"), (64 * KIB, "us"))
# A bound for each sample: without one, 16 spinning ranks on two cores need minutes.
FEW = ("-iter", "60", "-time", "2")


def comparisons() -> list[Comparison]:
    node, tcp, crowd = tuple(peers.NODE), tuple(peers.TCP), tuple(peers.CROWD)
    two_hops = tuple(hops.peers())
    return [
        Comparison("node", "Same node, ping-pong", "PingPong", 2, PINGPONG, node, 1.0),
        Comparison("tcp", "TCP, ping-pong", "PingPong", 2, PINGPONG, tcp, 0.9, 1.1),
        Comparison("node-pairs", "Same node, two pairs", "Uniband", 4, STREAM, node, 1.0, 1.0, FEW),
        Comparison("tcp-pairs", "TCP, two pairs", "Uniband", 4, STREAM, tcp, 0.9, 1.1, FEW),
        Comparison("relays", "Two hops, ping-pong", "PingPong", 2, PINGPONG, two_hops, 1.0),
        Comparison("allreduce", "16 ranks, Allreduce", "Allreduce", 16, COLLECTIVE, crowd, 1.0, 1.0, FEW),
        Comparison("alltoall", "16 ranks, Alltoall", "Alltoall", 16, COLLECTIVE, crowd, 1.0, 1.0, FEW),
    ]


def profiled() -> list:
    """The profiled cases: one of each kind."""
    shm, tcp = peers.NODE[0], peers.TCP[0]
    return [
        ("node, ping-pong of 8 B", shm, "PingPong", 2, 8),
        ("node, ping-pong of 1 MiB", shm, "PingPong", 2, MIB),
        ("TCP, ping-pong of 8 B", tcp, "PingPong", 2, 8),
        ("TCP, ping-pong of 64 KiB", tcp, "PingPong", 2, 64 * KIB),
        ("16 ranks on a node, Allreduce of 8 B", shm, "Allreduce", 16, 8),
        ("--recover, node, ping-pong of 8 B", peers.RECOVER, "PingPong", 2, 8),
        ("--recover, node, ping-pong of 1 MiB", peers.RECOVER, "PingPong", 2, MIB),
    ]


def main() -> int:
    options = arguments()
    if options.bin:
        paths.use_release(options.bin)
    known = jobs(options)
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := set(options.names) - set(known):
        print(f"no such comparison: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return 2
    wanted = [name for name in known if not options.names or name in options.names]
    if options.report:
        report.write(options.names or None)
        return 0
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    process.adopt_orphans()
    done, code = [], 0
    for name in wanted:
        try:
            known[name]()
            done.append(name)
        except labs.Failed as failed:
            print(f"  {name} does not run: {failed}")
            code = 1
        except KeyboardInterrupt:
            process.end_descendants()
            print("interrupted", file=sys.stderr)
            code = 130
            break
    if done:
        report.write(done)
    return code


def jobs(options) -> dict:
    """The measurements by name, in the order in which they run."""
    rounds = 1 if options.quick else options.rounds
    few = min(rounds, 3)
    found = {it.name: lambda it=it: measure(it, rounds) for it in comparisons()}
    found["sweep"] = lambda: sweep.measure(rounds, quick=options.quick)
    found["wan"] = lambda: wan.measure(few)
    found["hop-cost"] = lambda: hop_cost.measure(rounds)
    found["idle"] = idle.measure
    found["profile"] = lambda: hotspots.measure(profiled())
    # Measurements of several paths, of faults and of their cost.
    found["integrity"] = lambda: integrity.measure(rounds, before=options.before)
    found["second-path"] = lambda: second_path.measure(rounds)
    found["rails"] = lambda: rails.measure(few, rails.QUICK_SIZES if options.quick else rails.SIZES)
    found["datagrams"] = datagrams.quick if options.quick else datagrams.measure
    found["fairness"] = fairness.quick if options.quick else fairness.measure
    found["stall"] = lambda: stall.measure(stall.QUICK_CUTS if options.quick else stall.CUTS)
    found["own-core"] = lambda: own_core.measure(own_core.QUICK_ROUNDS if options.quick else own_core.ROUNDS)
    found["recovery"] = lambda: recovery.measure(rounds, quick=options.quick)
    found["payload-log"] = lambda: payload_log.measure(few, quick=options.quick)
    found["checkpoint"] = lambda: checkpoint.measure(rounds, quick=options.quick)
    found["files"] = lambda: files.measure(rounds, quick=options.quick)
    found["intercept"] = lambda: intercept.measure(rounds)
    found["streams"] = streams.quick if options.quick else streams.measure
    return found


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--bin", type=Path, metavar="DIR", help="the binaries that are measured")
    parser.add_argument("--before", type=Path, metavar="DIR", help="for integrity: a provider without reliability")
    parser.add_argument("names", nargs="*", metavar="NAME")
    return parser.parse_args()


def measure(comparison: Comparison, rounds: int) -> None:
    samples: dict[str, list[list[float]]] = {peer.name: [] for peer in comparison.peers}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for peer in comparison.peers:
            if peer.name in errors:
                continue
            print(f"{comparison.name}: round {number + 1} of {rounds}: {peer.name}", flush=True)
            try:
                samples[peer.name].append(one_run(comparison, peer))
            except (imb.Failed, OSError, subprocess.CalledProcessError) as error:
                errors[peer.name] = str(error)
                print(f"  does not run: {error}")
    medians = {n: list(map(statistics.median, zip(*rows))) for n, rows in samples.items() if rows}
    document = {
        "title": comparison.title,
        "benchmark": f"IMB-MPI1 {comparison.benchmark}, {comparison.ranks} ranks",
        "columns": comparison.columns,
        "medians": medians,
        "samples": samples,
        "errors": errors,
        "ours": [peer.name for peer in comparison.peers if peer.ours],
        "yardsticks": [peer.name for peer in comparison.peers if peer.is_yardstick],
        "targets": {"us": comparison.target, "MB/s": comparison.target_bandwidth},
        "rounds": rounds,
        "stamp": stamp.now(),
    }
    file = paths.RESULTS / f"bench-{comparison.name}.json"
    file.write_text(json.dumps(document, indent=1))


def one_run(comparison: Comparison, peer) -> list[float]:
    sizes = [size for size, _ in comparison.columns]
    with peer.place():
        table = imb.run(peer, comparison.ranks, comparison.benchmark, sizes, *comparison.options)
    return [
        table.latency_us(size) if unit == "us" else table.bandwidth(size)
        for size, unit in comparison.columns
    ]


if __name__ == "__main__":
    sys.exit(main())
