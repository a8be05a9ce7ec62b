"""Memory of idle peers: in a relay for each attached rank, in the provider for each silent peer; under
`--recover` also in the message logs of the node.

All are slopes: the same job at two sizes, with ranks that start, connect and then sleep. The memory of
a process is what it has written: anonymous pages, and its share of shared memory (Pss without files,
whose share falls as more processes map them).

Under `--recover` the ranks are on one node, and the senders keep the logs. Then the file with the logs
counts apart: the memory of a process is without it, and with the page tables of the process. The job
runs once with ranks that meet in a barrier alone, and once with ranks of which each has sent a message
to each other one before all sleep; and without `--recover`, on the same transport.
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
# A part of what a process takes differs from run to run, and is divided by the number of peers.
RECOVER_SMALL, RECOVER_LARGE = 8, 40
CLUSTERS = ("--clusters", "2")
NODE = ("--set", "local=own")
RECOVER = (*NODE, "--recover", "--set", "recover_log=sender")
# Name: options of the job, and whether each rank has sent to each other one.
RECOVER_WAYS = {
    "without --recover": (NODE, False),
    "without --recover, each has spoken once": (NODE, True),
    "--recover": (RECOVER, False),
    "--recover, each has spoken once": (RECOVER, True),
}
LOG_FILE = "landbridge-logs"
# Long enough for the ranks of the larger job to start on two cores.
START_S = 60.0
RANK = """
import sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
mine, its = bytearray(8), bytearray(8)
for step in range(1, world.size if sys.argv[2] == "all" else 0):
    world.Sendrecv(mine, (world.rank + step) % world.size, 0, its, (world.rank - step) % world.size, 0)
world.Barrier()
if world.rank == 0:
    open(sys.argv[1], "w").close()
time.sleep(3600)
"""


def measure() -> None:
    """Writes build/results/bench-idle.json: bytes for each rank in the relay and for each peer in a
    rank, and those of `RECOVER_WAYS`."""
    marks = {ranks: one_size(ranks, CLUSTERS) for ranks in (SMALL, LARGE)}
    if not all(marks.values()):
        print("idle: the job did not start; not measured")
        return
    relay = 1024 * (marks[LARGE]["relay"] - marks[SMALL]["relay"]) / ((LARGE - SMALL) / 2)
    rank = 1024 * (marks[LARGE]["rank"] - marks[SMALL]["rank"]) / (LARGE - SMALL)
    document = {"relay_bytes_per_rank": round(relay), "rank_bytes_per_peer": round(rank)}
    document["recover"] = {name: recovered(name, words, speaks) for name, (words, speaks) in RECOVER_WAYS.items()}
    document["stamp"] = stamp.now()
    (paths.RESULTS / "bench-idle.json").write_text(json.dumps(document))
    print(f"idle: relay {relay / 1024:.1f} KiB per rank, provider {rank / 1024:.1f} KiB per peer")


def recovered(name: str, words: tuple[str, ...], speaks: bool) -> dict[str, int] | None:
    """Bytes for each peer in a rank and in its page tables, and for each ordered pair of ranks in the
    file with the logs. What the file takes for each rank grows with the number of its peers."""
    small, large = (one_size(ranks, words, speaks) for ranks in (RECOVER_SMALL, RECOVER_LARGE))
    if not small or not large:
        print(f"idle: {name}: the job did not start; not measured")
        return None
    more = RECOVER_LARGE - RECOVER_SMALL
    found = {key: round(1024 * (large[key] - small[key]) / more) for key in ("process", "tables")}
    found["logs"] = round(1024 * (large["logs"] / RECOVER_LARGE - small["logs"] / RECOVER_SMALL) / more)
    said = ", ".join(f"{key} {value / 1024:.2f}" for key, value in found.items())
    print(f"idle: {name}: KiB per peer: {said}, together {sum(found.values()) / 1024:.2f}")
    return found


def one_size(ranks: int, words: tuple[str, ...], speaks: bool = False) -> dict[str, float] | None:
    """Kilobytes in an idle job: means of its relays and of its ranks, and the file with the logs.
    `speaks`: each rank has sent a message to each other one."""
    ready = paths.RESULTS / f"idle-{os.getpid()}"
    ready.unlink(missing_ok=True)
    program = [paths.python("mpich"), "-c", RANK, str(ready), "all" if speaks else "none"]
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *words, "--", *program]
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
        return {
            "relay": mean(map(pss_kib, relays)) if relays else 0.0,
            "rank": mean(map(pss_kib, members)),
            "process": mean(map(own_kib, members)),
            "tables": mean(map(tables_kib, members)),
            "logs": max(map(log_file_kib, below)),
        }
    finally:
        process.end_descendants()
        job.wait()
        ready.unlink(missing_ok=True)


def pss_kib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(float, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup, re.M)))


def own_kib(pid: int) -> float:
    """As `pss_kib`, without the file with the logs."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.M)
    logs = "".join(mapping for mapping in mappings if LOG_FILE in mapping.partition("\n")[0])
    return pss_kib(pid) - sum(map(float, re.findall(r"^Pss:\s+(\d+) kB", logs, re.M)))


def tables_kib(pid: int) -> float:
    return float(re.search(r"^VmPTE:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def log_file_kib(pid: int) -> float:
    """What the file with the logs takes, if this process has it open."""
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if LOG_FILE in os.readlink(file):
                return os.stat(file).st_blocks / 2
        except OSError:
            continue
    return 0.0


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
