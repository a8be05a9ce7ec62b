#!/usr/bin/env python3
"""What it costs to intercept calls: by a preloaded library, a seccomp filter, or syscall dispatch.

    bench/intercept.py              half a minute
    bench/intercept.py --quick      one round

Runs bench/intercept.c, without MPI and without Landbridge, with a file in memory (tmpfs). The ways
take turns. The last way measures the instructions that read the time stamp counter and CPUID, and
the same instructions trapped.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import files  # noqa: E402
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS, LIMIT_S = 9, 120.0
PARTS = ("calls", "counters")


@dataclass(frozen=True)
class Way:
    name: str
    method: str
    is_preloaded: bool = False


CALLS = [
    Way("nothing", "nothing"),
    Way("preloaded wrapper", "nothing", is_preloaded=True),
    Way("seccomp, `SECCOMP_RET_TRAP`", "seccomp"),
    Way("syscall user dispatch", "dispatch"),
]
COUNTERS = [Way("counters", "counters")]


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-intercept.json; parts that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-intercept.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        program, wrapper = build(Path(folder))
        if "calls" in parts:
            result["calls"] = in_turns("calls", rounds, CALLS, program, wrapper)
        if "counters" in parts:
            result["counters"] = in_turns("counters", rounds, COUNTERS, program, wrapper)
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def in_turns(part: str, rounds: int, ways: list[Way], program: Path, wrapper: Path) -> dict:
    """Medians and samples, and for each way the kinds of calls that it does not see."""
    unseen: dict[str, list[str]] = {}
    return files.in_turns(part, rounds, ways, lambda way: run(way, program, wrapper, unseen)) | {"unseen": unseen}


def build(folder: Path) -> tuple[Path, Path]:
    """Compiles the program and the library that is preloaded."""
    source = Path(__file__).with_name("intercept.c")
    program, wrapper = folder / "intercept", folder / "wrapper.so"
    subprocess.run(["gcc", "-O2", source, "-o", program], check=True)
    subprocess.run(["gcc", "-O2", "-DWRAPPER", "-shared", "-fPIC", source, "-o", wrapper], check=True)
    return program, wrapper


def run(way: Way, program: Path, wrapper: Path, unseen: dict[str, list[str]]) -> dict[str, float]:
    """Microseconds of one call of each kind. `unseen` gets the kinds that the way does not see."""
    environment = {"LD_PRELOAD": str(wrapper)} if way.is_preloaded else {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        finished = process.run([str(program), way.method, folder], LIMIT_S, environment)
    if not finished.ok:
        raise labs.Failed(f"{way.name}: {finished.why or finished.code}: {process.tail(finished.output, 4)}")
    found = re.findall(r"^(.+): ([\d.]+)( not seen)?$", finished.output, re.M)
    unseen[way.name] = [kind for kind, _, not_seen in found if not_seen]
    return {kind: float(value) for kind, value, _ in found}


# --- the document


def section(result: dict) -> str:
    lines = ["## Ways to intercept calls", "", f"{stamp.rounds(result['rounds'])} in turns, medians.", *stamp.lines(result)]
    if "calls" in result:
        what = (
            "**Calls**, microseconds of processor time for one call (`bench/intercept.c`, one process, a file in memory). Each way counts the calls "
            "and makes them, and records nothing. \"Unseen\": the way does not see such a call. In parentheses is the range of the "
            "rounds: other programs were running on the two processors all the time. The filter traps calls on files and clocks, "
            "dispatch traps all calls of the process. \"fwrite\" is a call of the C library, which makes one system call for 64 of "
            "them. The 1 MiB are one `pwrite` and one `pread`, as in IOR."
        )
        lines += ["", prose.wrapped(what), ""]
        lines += table(result["calls"])
    if "counters" in result:
        what = (
            "**Instructions**, microseconds of processor time for one. Trapped by `PR_SET_TSC`, `rdtsc` raises SIGSEGV, also in the clock functions "
            "of the vDSO; the handler answers with the kernel's clock."
        )
        lines += ["", prose.wrapped(f"{what} {cpuid(result['counters'])}"), "", "| | microseconds |", "|---|--:|"]
        lines += [f"| {kind} | {cell(result['counters'], 'counters', kind)} |" for kind in result["counters"]["medians"]["counters"]]
    return "\n".join(lines) + "\n"


def table(part: dict) -> list[str]:
    """A row for each kind of call, a column for each way."""
    names = [way.name for way in CALLS]
    lines = [f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for kind in part["medians"][names[0]]:
        lines.append(f"| {kind} | {' | '.join(cell(part, name, kind) for name in names)} |")
    return lines


def cell(part: dict, name: str, kind: str) -> str:
    samples = part["samples"][name][kind]
    is_unseen = kind in part["unseen"][name] and name not in ("nothing", "counters")
    text = f"{statistics.median(samples):.3g} ({min(samples):.3g} to {max(samples):.3g})"
    return f"{text}, unseen" if is_unseen else text


def cpuid(part: dict) -> str:
    if "cpuid, trapped" in part["medians"]["counters"]:
        return "`ARCH_SET_CPUID` traps `cpuid` in the same way."
    return "This processor, as the virtual machine shows it, has no CPUID faulting: `ARCH_SET_CPUID` fails with ENODEV."


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
