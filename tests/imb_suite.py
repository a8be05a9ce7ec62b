#!/usr/bin/env python3
"""Runs all of IMB-MPI1 (or IMB-RMA) from the Intel wheel, over a chosen MPI library and launcher.

What enters: the unmodified binary, which runs on MPICH's libmpi as well as on Intel MPI's. What
leaves: exit code 0 if it ended well and printed a table for every requested benchmark, and one line
with the count. Sizes and repetitions are bounded: this test shows that every pattern completes, and
`make bench` measures the speed. This binary does not check the bytes that it receives; the mpi4py
suite and the provider's own tests do.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from support import paths, process  # noqa: E402
from support.launch import LaunchConfig  # noqa: E402

BENCHMARKS = {
    "IMB-MPI1": (
        "PingPong PingPing Sendrecv Exchange Allreduce Reduce Reduce_local Reduce_scatter "
        "Reduce_scatter_block Allgather Allgatherv Scatter Scatterv Gather Gatherv Alltoall "
        "Alltoallv Bcast Barrier Uniband Biband PingPongSpecificSource PingPingSpecificSource "
        "PingPongAnySource PingPingAnySource"
    ).split(),
    "IMB-RMA": (
        "Unidir_put Unidir_get Bidir_put Bidir_get One_put_all One_get_all All_put_all All_get_all "
        "Put_local Put_all_local Exchange_put Exchange_get Accumulate Get_accumulate Fetch_and_op "
        "Compare_and_swap Get_local Get_all_local Truly_passive_put"
    ).split(),
}
# Up to 1 MiB: beyond every provider's change from eager to rendezvous.
LARGEST_LOG2 = 20
# Repetitions for each size; IMB lowers the number for large messages.
REPETITIONS = 20
# Largest number of seconds for each sample, so that a slow machine completes.
SAMPLE_S = 0.1
# Exit code by which scripts/test.py recognizes "cannot run here".
SKIPPED = 77


def main() -> int:
    options = arguments()
    way = LaunchConfig(options.mpi, options.provider, options.via, tuple(options.set))
    binary = paths.venv("impi") / "bin" / options.program
    absent = paths.missing([*way.needs(), binary])
    if absent:
        print(f"{options.program}: cannot run, missing: {', '.join(absent)} (make build wheels)")
        return 2
    if why_not := way.why_not():
        print(f"skipped: no lab can be built here: {why_not}")
        return SKIPPED
    names = options.benchmarks or BENCHMARKS[options.program]
    name = f"{options.program}-{way.name}-np{options.np}"
    finished = process.run(
        way.command(options.np, [str(binary), *names, *limits(options)]),
        options.limit,
        way.environment() | {"LD_LIBRARY_PATH": str(paths.venv(options.mpi) / "lib")},
        log=paths.RESULTS / f"{name}.log",
    )
    done = set(re.findall(r"^# Benchmarking (\w+)", finished.output, re.M))
    lost = [benchmark for benchmark in names if benchmark not in done]
    print(f"{name}: {len(names) - len(lost)} of {len(names)} benchmarks in {finished.seconds:.0f} s")
    if not finished.ok or lost:
        print(process.tail(finished.output))
        print(f"  {finished.why or f'exit code {finished.code}'}; no table for: {' '.join(lost)}")
        return 1
    return 0


def limits(options) -> list[str]:
    sizes = ["-msglog", f"0:{LARGEST_LOG2}"]
    effort = ["-iter", str(REPETITIONS), "-time", str(SAMPLE_S)]
    return [*sizes, *effort, "-npmin", str(options.np)]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=["mpich", "impi"], default="mpich")
    parser.add_argument("--provider", default="landbridge")
    parser.add_argument("--via", choices=["own", "run", "clusters", "lossy"], default="run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of our provider")
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--program", choices=list(BENCHMARKS), default="IMB-MPI1")
    parser.add_argument("--limit", type=float, default=400, help="seconds")
    parser.add_argument("benchmarks", nargs="*", help="only these (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
