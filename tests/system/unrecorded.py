#!/usr/bin/env python3
"""Ranks are killed whose programs use unrecorded nondeterminism or threads, under `--recover`.

The job either has the result of an undisturbed run, or ends with a named difference and exit code
1. It never ends well with a wrong result.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import common
import network
import nodes
from recovery import after_output, check_divergence, job
from support import process

# Seconds between the first line of rank 1 and its kill.
LATER_S = 0.3
NAMED = re.compile(r'^landbridge: rank 1 does not repeat in incarnation 1 what was printed before: on standard output line '
                   r'\d+ is "(.*)", and was "(.*)"$', re.M)
OTHER_THREAD = "MPI is called by another thread than the one that begins the program"
SECOND_THREAD = "a second thread calls MPI"
OTHER_CLOCK = "a thread reads clocks or random numbers that are not recorded"


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    with tempfile.TemporaryDirectory() as folder:
        printed_then_sent(options, checks, Path(folder))
        sent_unprinted(options, checks, Path(folder))
        printed_continuously(options, checks, Path(folder))
        with_threads(options, checks, Path(folder))
    last_words(options, checks)
    logging(options, checks)
    refused(options, checks)
    return checks.end()


def compiled(options, name: str, folder: Path) -> str:
    """A compiled program of `programs/`; ends the driver if there is no compiler."""
    compiler, program = options.venvs / "mpich" / "bin" / "mpicxx", folder / name
    if not compiler.exists() or not shutil.which("g++"):
        print(f"skipped: {compiler} or g++ is not there")
        sys.exit(common.SKIPPED)
    source = common.PROGRAMS / f"{name}.cpp"
    built = common.run(options, [compiler, "-O1", "-fopenmp", "-o", program, source])
    if not built.ok:
        print(built.output)
        sys.exit(f"{source} does not compile")
    return str(program)


def said(words: str):
    return lambda output: words in output


def printed_then_sent(options, checks, folder) -> None:
    """Rank 1 prints a number that it sends later, and is killed in between."""
    names = {
        f"who prints a number from {what}{where}": (source, is_recorded, words)
        for source, what, is_recorded in (
            ("rdtsc", "the processor's counter", False),
            ("rdrand", "the processor's random numbers", False),
            ("urandom", "/dev/urandom", True),
            ("device", "std::random_device", True),
            ("getentropy", "getentropy", True),
            ("arc4random", "the arc4random functions", True),
        )
        for where, words in (("", []), (", two clusters", ["--clusters", "2"]))
        if source in ("rdtsc", "rdrand") or not words
    }
    names = {name: case for name, case in names.items() if checks.wants(name)}
    program = compiled(options, "unrecorded", folder) if names else ""
    for name, (source, is_recorded, words) in names.items():
        if why_not := absent(source):
            print(f"skip   {name}: {why_not}")
            continue
        kills = [(said("drew "), 1), (LATER_S, 1)] if is_recorded else [(said("drew "), 1)]
        code, lines, output = job(options, [program, source, "200"], kills, *words)
        printed = {word: [line.split()[1] for line in lines if line.startswith(word)] for word in ("drew", "heard")}
        is_right = code == 0 and printed["drew"] == printed["heard"] and len(printed["drew"]) == 1
        # The number before is the one that was shown.
        found = NAMED.search(output)
        is_found = found is not None and found[1] != found[2] and [found[2]] == [f"drew {number}" for number in printed["drew"]]
        is_named = code == 1 and is_found and not printed["heard"]
        is_ok = is_right if is_recorded else is_named
        outcome = "one history" if is_right else "a named difference" if is_named else f"other numbers: {printed}"
        checks.check(name, is_ok, f"exit code {code}, {outcome}", output)


def absent(source: str) -> str:
    """Why this machine does not have that source of numbers; empty if it has."""
    if source == "rdrand" and not re.search(r"^flags\b.*\brdrand\b", Path("/proc/cpuinfo").read_text(), re.M):
        return "this processor has no rdrand"
    version = [int(part) for part in re.findall(r"\d+", os.confstr("CS_GNU_LIBC_VERSION"))]
    return "this C library has no arc4random" if source == "arc4random" and version < [2, 36] else ""


def sent_unprinted(options, checks, folder) -> None:
    """Rank 1 sends a number that is not recorded, which only rank 0 prints, and is killed."""
    name = "who sends a number from the processor's random numbers"
    if not checks.wants(name):
        return
    if why_not := absent("rdrand"):
        print(f"skip   {name}: {why_not}")
        return
    program = compiled(options, "unrecorded", folder)
    code, lines, output = job(options, [program, "rdrand", "200", "first"], [(said("heard "), 1)])
    is_once = sum(line.startswith("heard ") for line in lines) == 1
    checks.check(f"{name}: once", is_once, f"exit code {code}, {'one number is' if is_once else 'other numbers are'} heard", output)
    check_divergence(checks, name, code, output, 1)


def printed_continuously(options, checks, folder) -> None:
    """A rank that draws and prints continuously is restored from a checkpoint, or restarted on
    another node, which knows the printed lines."""
    name, criu = "who prints from the processor's counter, from images", common.ROOT / "build/tools/criu/criu"
    if checks.wants(name):
        if criu.exists():
            program = [compiled(options, "unrecorded", folder), "rdtsc", "2000", "each"]
            images = ["--checkpoint", "1s", "--set", f"criu={criu}", "--verbose"]
            kills = [(drawing_since(r"^landbridge: checkpoint \d+ of rank 1: "), 1)]
            code, _, output = job(options, program, kills, *images)
            is_from_image = "rank 1 was killed by SIGKILL: restarted from checkpoint" in output
            is_named, turns = bool(NAMED.search(output)), re.findall(r"^turn (\d+): ", output, re.M)
            # The lines contain none of the second incarnation.
            is_once = turns == [str(turn) for turn in range(len(turns))]
            measured = f"exit code {code}, {'from' if is_from_image else 'not from'} an image, "
            measured += f"{'a named difference' if is_named else 'nothing is named'}, {len(turns)} lines"
            checks.check(name, code == 1 and is_from_image and is_named and is_once, measured, output)
        else:
            print(f"skip   {name}: {criu} is not there (make criu)")
    name = "who prints from the processor's counter, on a spare node"
    if checks.wants(name):
        if why_not := network.no_lab(options):
            print(f"skip   {name}: no lab can be built here: {why_not}")
            return
        program = [compiled(options, "unrecorded", folder), "rdtsc", "1500", "each"]
        code, _, output = nodes.lab_job(options, program, [(1.0, nodes.KILLED)], nodes.SPARE)
        is_named, is_moved = bool(NAMED.search(output)), "are restarted on north-2" in output
        measured = f"exit code {code}, {'moved' if is_moved else 'not moved'}, {'a named difference' if is_named else 'none'}"
        checks.check(name, code == 1 and is_named and is_moved, measured, output)


def drawing_since(image: str):
    """A condition: there are two such lines, and rank 1 has printed since. Killed directly after a
    checkpoint, the rank would have nothing to replay, and the test would show nothing."""
    turns_then: list[int] = []

    def is_due(output: str) -> bool:
        turns = output.count("\nturn ")
        if not turns_then and len(re.findall(image, output, re.M)) > 1:
            turns_then.append(turns)
        return bool(turns_then) and turns > turns_then[0] + 20

    return is_due


def with_threads(options, checks, folder) -> None:
    """Programs with OpenMP, and with further threads."""
    names = ("OpenMP", "OpenMP, sums in any order", "a thread that reads the clock", "a thread that draws random numbers", "two threads in MPI", "two threads in MPI, killed", "another thread in MPI")
    names = [name for name in names if checks.wants(name)]
    program = compiled(options, "threads", folder) if names else ""
    team = {"OMP_NUM_THREADS": "2"}
    for name, kind in (("OpenMP", "team"), ("a thread that reads the clock", "clock"), ("a thread that draws random numbers", "random")):
        if name not in names:
            continue
        undisturbed = job(options, [program, kind, "100"], [], environment=team)
        kills = [(said("sum 3 "), 1), (LATER_S, 0)]
        code, lines, output = job(options, [program, kind, "100"], kills, environment=team)
        # One warning in each process.
        printed = [text.count(OTHER_CLOCK) for text in (undisturbed[2], output)]
        wanted = [4, 4 + len(kills)] if kind != "team" else [0, 0]
        is_same = sorted(lines) == sorted(undisturbed[1]) and len(lines) > 100
        is_ok = code == 0 and is_same and output.count(": restarted") == len(kills) and printed == wanted
        checks.check(name, is_ok, f"exit code {code}, {'the same' if is_same else 'other'} output, said {printed} times", output)
    name = "OpenMP, sums in any order"
    if name in names:
        code, _, output = job(options, [program, "order", "60"], [(said("sum 20 "), 1)], environment=team)
        is_named = bool(NAMED.search(output)) or "sends as its frame" in output
        measured = f"exit code {code}, {'a named difference' if is_named else 'nothing is named'}"
        checks.check(name, code == 1 and is_named, measured, output)
    name = "two threads in MPI, killed"
    places = (("", []), (", two clusters", ["--clusters", "2"]), (", logs of relays", ["--set", "recover_log=relay"]))
    for place, words in places if name in names else ():
        # Its threads call in another order then.
        kills = [(after_output("both call", LATER_S), 1)]
        code, _, output = job(options, [program, "second", "400"], kills, *words)
        is_named = re.search(rf"this process cannot go on: its frame \d+, .*; {SECOND_THREAD}, and the order of calls", output)
        measured = f"exit code {code}, {'names' if is_named else 'does not name'} the second thread"
        is_other = "bytes that were never sent" in output
        checks.check(f"{name}{place}", code == 1 and bool(is_named) and not is_other, measured, output)
    for name, kind, text in (("two threads in MPI", "second", SECOND_THREAD), ("another thread in MPI", "other", OTHER_THREAD)):
        if name in names:
            code, _, output = job(options, [program, kind, "50"], [])
            printed = output.count(text)
            checks.check(name, code == 0 and printed == 4, f"exit code {code}, said {printed} times", output)


def last_words(options, checks) -> None:
    """Rank 1 ends with a traceback, once, and its next incarnation has none."""
    name = "who says an error that does not come again"
    if not checks.wants(name):
        return
    program = (
        "import os, sys, time\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "for turn in range(60):\n"
        "    print('turn', turn, file=sys.stderr, flush=True) if comm.rank == 1 else None\n"
        "    comm.barrier()\n"
        "    if turn == 20 and comm.rank == 1 and int(os.environ['LANDBRIDGE_INCARNATION']) == 0:\n"
        "        print('a passing fault', file=sys.stderr, flush=True)\n"
        "        os._exit(3)\n"
        "    time.sleep(0.01)\n"
    )
    code, _, output = job(options, [common.python(options), "-c", program], [])
    turns = [int(number) for number in re.findall(r"^turn (\d+)$", output, re.M)]
    is_whole = turns == list(range(60)) and output.count("a passing fault\n") == 1
    is_said = "bytes that it printed on standard error before it ended by an error" in output
    measured = f"exit code {code}, {'each line once' if is_whole else turns}, {'said' if is_said else 'not said'}"
    checks.check(name, code == 0 and is_whole and is_said, measured, output)


def logging(options, checks) -> None:
    """libfabric's log contains process ids and times, and is not part of the compared output."""
    name = "libfabric's log"
    if not checks.wants(name):
        return
    ring = [common.python(options), str(common.PROGRAMS / "ring.py"), "--aloud", "--rounds", "200"]
    log = {"FI_LOG_LEVEL": "info"}
    outcomes = [job(options, ring, kills, environment=log) for kills in ([], [(said("rank 1 turn 20:"), 1), (LATER_S, 1)])]
    aloud = [sorted(re.findall(r"^rank .*[\d.]$", output, re.M)) for _, _, output in outcomes]
    printed = [output.count("libfabric:") for _, _, output in outcomes]
    is_same = aloud[0] == aloud[1] and len(aloud[0]) > 8
    code, _, output = outcomes[1]
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, lines of the log: {printed}"
    checks.check(name, code == 0 and is_same and printed[1] > printed[0] > 0, measured, output)


def refused(options, checks) -> None:
    """A progress thread of MPICH's own."""
    name = "a progress thread"
    if not checks.wants(name):
        return
    program = [common.python(options), "-c", "from mpi4py import MPI"]
    text = "--recover needs MPIR_CVAR_ASYNC_PROGRESS=0, and it is 1"
    outcomes = [
        job(options, program, [], environment={"MPIR_CVAR_ASYNC_PROGRESS": "1"}),
        job(options, program, [], "-x", "MPIR_CVAR_ASYNC_PROGRESS=1"),
    ]
    codes = [code for code, _, _ in outcomes]
    is_said = all(text in output for _, _, output in outcomes)
    checks.check(name, codes == [1, 1] and is_said, f"exit codes {codes}, {'said' if is_said else 'not said'}", outcomes[0][2])


if __name__ == "__main__":
    sys.exit(main())
