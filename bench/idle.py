"""Memory of idle peers: in a relay for each attached rank, in the provider for each silent peer.

Both are slopes: the same job at two sizes, with ranks that start, connect and then sleep. The
memory of a process is what it has written: anonymous pages, and its share of shared memory (Pss
without files, whose share falls as more processes map them).
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import stamp
from support import paths, process

SMALL, LARGE = 4, 20
# Long enough for the ranks of the larger job to start on two cores.
START_S = 60.0
RANK = """
import sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 0:
    open(sys.argv[1], "w").close()
time.sleep(3600)
"""


def measure() -> None:
    """Writes build/results/bench-idle.json: bytes for each rank in the relay and for each peer in a
    rank."""
    marks = {ranks: one_size(ranks) for ranks in (SMALL, LARGE)}
    if not all(marks.values()):
        print("idle: the job did not start; not measured")
        return
    relay = 1024 * (marks[LARGE]["relay"] - marks[SMALL]["relay"]) / ((LARGE - SMALL) / 2)
    rank = 1024 * (marks[LARGE]["rank"] - marks[SMALL]["rank"]) / (LARGE - SMALL)
    document = {"relay_bytes_per_rank": round(relay), "rank_bytes_per_peer": round(rank)}
    document["stamp"] = stamp.now()
    (paths.RESULTS / "bench-idle.json").write_text(json.dumps(document))
    print(f"idle: relay {relay / 1024:.1f} KiB per rank, provider {rank / 1024:.1f} KiB per peer")


def one_size(ranks: int) -> dict[str, float] | None:
    """Kilobytes of the relays (mean) and of a rank (mean) in an idle job over two clusters."""
    ready = paths.RESULTS / f"idle-{os.getpid()}"
    ready.unlink(missing_ok=True)
    program = [paths.python("mpich"), "-c", RANK, str(ready)]
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), "--clusters", "2", "--", *program]
    with open(os.devnull, "wb") as nowhere:
        job = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if time.monotonic() > deadline or job.poll() is not None:
                return None
            time.sleep(0.1)
        below = process.descendants()
        relays = [pid for pid in below if "landbridge-relay" in name_of(pid)]
        # The launcher has the program among its arguments, too.
        running = [pid for pid in below if RANK in command_of(pid)]
        members = [pid for pid in running if "landbridge" not in Path(name_of(pid)).name]
        if len(members) != ranks:
            sys.exit(f"idle: {len(members)} ranks found of {ranks}")
        return {"relay": mean(map(pss_kib, relays)), "rank": mean(map(pss_kib, members))}
    finally:
        process.end_descendants()
        job.wait()
        ready.unlink(missing_ok=True)


def pss_kib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(float, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup, re.M)))


def name_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def mean(values) -> float:
    values = list(values)
    if not values:
        sys.exit("idle: no process of the job was found")
    return sum(values) / len(values)
