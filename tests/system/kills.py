#!/usr/bin/env python3
"""Programs of every kind whose ranks are killed at random moments: the output must be unaffected.

Ranks restart from the start of the program and from checkpoints, in one cluster and in two, and
while the network between clusters loses, corrupts and reorders packets and is cut. Victims and
moments are a function of `--seed`. A storm has all kinds of kills. `--all`: each pattern of the
benchmark separately, more kinds of networks, and each kind of kills separately in each place, with
one program that differs from place to place. Each benchmark of IMB-MPI1 and IMB-RMA has one kill,
after a row of its table. `--list` names the cases. Checkpoints need CRIU,
networks a lab; without them the cases are skipped with a message.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import common
import network
import recovery
from support import paths, process

RANKS = recovery.RANKS
SOAK = common.ROOT / "crates" / "lab" / "src" / "soak"
PATTERNS = ["Sendrecv", "Allreduce", "Alltoall"]
# The number of repetitions must not depend on the clock.
BENCHMARK_BOUNDS = ["-msglog", "0:7", "-iter_policy", "off", "-time", "1000"]
# Some seconds each on one machine, longer than a storm; over a lossy link with 5 ms far fewer
# repetitions.
MESSAGES, STEPS, REPEATS = 1000, 12_000, 1800
# Sendrecv alone is several times as fast as the other patterns, and would end before its last kill.
REPEATS_ALONE = {"Sendrecv": 4 * REPEATS}
# All benchmarks, each with one kill, and so many repetitions for each length.
ALL_PATTERNS = {
    "IMB-MPI1": "Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Biband Exchange Gather Gatherv PingPing"
    " PingPingAnySource PingPingSpecificSource PingPong PingPongAnySource PingPongSpecificSource Reduce Reduce_local"
    " Reduce_scatter Reduce_scatter_block Scatter Scatterv Sendrecv Uniband",
    "IMB-RMA": "Accumulate All_get_all All_put_all Bidir_get Bidir_put Compare_and_swap Exchange_get Exchange_put Fetch_and_op"
    " Get_accumulate Get_all_local Get_local One_get_all One_put_all Put_all_local Put_local Truly_passive_put Unidir_get Unidir_put",
}
# With a row for each number of processes, or for each mode, and none for a length.
LENGTHLESS = ("Barrier", "Compare_and_swap", "Fetch_and_op")
ONE_KILL, REPEATS_ONE_KILL = "one kill", 2000
STORM = "a storm"
# Programs with `--all`.
PROGRAMS = 2 + len(PATTERNS)
# Benchmarks of which a repetition takes a small part of the time of others.
QUICK, TIMES_QUICK = ("Ping", "Unidir", "Bidir", "Reduce_local", "Put_", "Get_local", "Get_all_local", "Compare", "Fetch", "Barrier"), 8
# Largest number of seconds of a run with kills. A checkpoint every second is a heavy load: beside two
# other drivers on a slow machine such a job takes two minutes.
LIMIT_S = 300.0
# The same over a bad network, where every corrupt packet breaks a TLS stream: IMB over TCP takes a minute on a quiet machine.
BAD_NETWORK_LIMIT_S = 300.0
# Both directions of the wide-area link, and the lab file that has the link: its gateways let UDP
# in.
LINK, LAB = "near-far", common.ROOT / "labs" / "two-rails.toml"
BAD = ["--loss 1%", "--corrupt 1%", "--repair-checksums true", "--reorder 5%", "--reorder-by 1ms"]
PLACES = {"one cluster": [], "two clusters": recovery.TWO_CLUSTERS}
# Elsewhere the senders log messages.
RELAYS = {"logs of relays": recovery.RELAY, "logs of relays, two clusters": [*recovery.TWO_CLUSTERS, *recovery.RELAY]}
# All ranks of a node begin again if one is killed.
TOGETHER = ["--set", "recover_unit=node"]
UNITS = {"ranks of a node together": TOGETHER, "ranks of a node together, two clusters": [*recovery.TWO_CLUSTERS, *TOGETHER]}
# Programs run that many times as fast with logs of the senders on one node; between nodes they run
# as through a relay.
FASTER = {"one cluster": 4, "ranks of a node together": 4}
CUT_S = 3.0
# Largest number of seconds until a killed rank is killed again.
BACK_S = 10.0
# A process is restored from a checkpoint in less time.
IMAGE_EVERY_S = checkpoint.EVERY_S


@dataclass
class Program:
    """A program. `expected` extracts from the output and the folder what must equal that of an
    undisturbed run, and returns it with a description of any error."""

    name: str
    words: list[str]
    expected: object
    environment: dict[str, str]


@dataclass
class Case:
    name: str
    program: Program
    kind: str
    words: list[str]
    has_images: bool
    # Kind of network; None: the case needs no lab.
    network: str | None = None


def main() -> int:
    def add(parser):
        parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills, and of whom they meet")
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")
        parser.add_argument("--all", action="store_true", help="the whole matrix")
        parser.add_argument("--list", action="store_true", help="name the cases")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        cases = every_case(options)
        if options.list:
            print("\n".join(case.name for case in cases))
            return 0
        checks = common.Checks(options)
        undisturbed = {}
        for case in possible(options, [case for case in cases if checks.wants(case.name)]):
            key = tuple(case.program.words)
            if key not in undisturbed:
                undisturbed[key] = alone(options, case.program)
            check(checks, options, case, undisturbed[key])
    return checks.end()


def every_case(options) -> list[Case]:
    # With logs of relays for all, the cases that have them anyhow would be the same jobs again.
    by_relays = "recover_log=relay" in common.SETTINGS
    places, lines = (UNITS, MORE_LINES) if by_relays else (PLACES | RELAYS | UNITS, LINES)
    cases = []
    for has_images in (False, True):
        start = "from images" if has_images else "from the start"
        for place, (clusters, words) in enumerate(places.items()):
            for number, program in enumerate(programs(options, 1 if by_relays else FASTER.get(clusters, 1))):
                for kind in kinds_of(options, number, place + 3 * has_images, clusters):
                    cases.append(Case(f"{program.name}, {clusters}, {start}, {kind}", program, kind, words, has_images))
    cases += [
        Case(f"{binary} {pattern}, {ONE_KILL}", benchmark(options, [pattern], repeats_of(pattern), binary, 2), ONE_KILL, [], False)
        for binary, patterns in ALL_PATTERNS.items()
        for pattern in patterns.split()
        if (options.venvs / "impi" / "bin" / binary).exists()
    ]
    bad = [heat(options, STEPS // 24), wildcards(options, MESSAGES // 3), benchmark(options, PATTERNS, REPEATS // 20)]
    for number, program in enumerate(bad):
        for place, (line, words) in enumerate(lines.items()):
            for has_images in (False, True):
                # One case of each other kind.
                if options.all or (number, place, has_images) in ((0, 1, True), (1, 0, False)):
                    start = "from images" if has_images else "from the start"
                    name = f"{program.name}, a bad network{line}, {start}"
                    cases.append(Case(name, program, STORM, words, has_images, line))
    return cases


def kinds_of(options, program: int, turn: int, clusters: str) -> list[str]:
    """The kinds of kills that a program meets in a place: a storm, and with `--all` one kind alone,
    which is another one in each turn."""
    alone = [kind for kind in KINDS if kind != STORM]
    # What can happen to one rank is the same on one node.
    if not options.all or clusters not in ("one cluster", "two clusters", "logs of relays"):
        return [STORM]
    return [kind for number, kind in enumerate(alone) if (number + turn) % PROGRAMS == program] + [STORM]


def repeats_of(pattern: str) -> int:
    return REPEATS_ONE_KILL * (TIMES_QUICK if pattern.startswith(QUICK) else 1)


def programs(options, times: int) -> list[Program]:
    """The programs, `times` as long as they are when messages go through a relay."""
    found = [heat(options, STEPS * times), wildcards(options, MESSAGES * times)]
    if not options.all:
        return [*found, benchmark(options, PATTERNS, REPEATS * times)]
    return found + [benchmark(options, [one], REPEATS_ALONE.get(one, REPEATS) * times) for one in PATTERNS]


MORE_LINES = {" over UDP": ["--set", "wan_udp=on"], " in three streams": ["--set", "wan_streams=3"]}
LINES = {"": [], **MORE_LINES, ", logs of relays": recovery.RELAY}


def possible(options, cases: list[Case]) -> list[Case]:
    """The cases that this machine can run; prints the reason for the others."""
    reasons = {
        (True, False): lambda: checkpoint.no_criu(options.criu),
        (False, True): lambda: network.no_lab(options),
    }
    for place, (needs, why_not) in enumerate(reasons.items()):
        met = [case for case in cases if (case.has_images, case.network is not None)[place]]
        if met and (reason := why_not()):
            print(f"skipped: {len(met)} cases with {('images', 'a lab')[place]}: {reason}")
            cases = [case for case in cases if case not in met]
        del needs
    return cases


# --- programs


def heat(options, steps: int = STEPS) -> Program:
    """The picture contains the result bit for bit; the program also computes it without MPI and
    compares."""
    picture = options.folder / "heat.png"
    words = [common.python(options), str(common.ROOT / "examples" / "heat.py"), "--check", "--picture", str(picture)]
    words += ["--size", "192", "--steps", str(steps)]

    def expected(lines):
        drawn = picture.read_bytes() if picture.exists() else b""
        picture.unlink(missing_ok=True)
        timeless = [re.sub(r"[\d.]+ s, \d+ steps/s, ", "", line) for line in lines]
        is_right = any("identical to the serial run" in line for line in lines) and drawn
        return (drawn, timeless), "" if is_right else "not the answer of a serial run"

    return Program("heat", words, expected, {"OPENBLAS_NUM_THREADS": "1"})


def wildcards(options, messages: int = MESSAGES) -> Program:
    """Wildcards, probes, Waitany: the order is random, and all ranks must report the same one."""
    words = [common.python(options), str(SOAK / "wildcards.py"), "--rounds", str(messages)]

    def expected(lines):
        heard = placed(lines, "heard")
        is_one = heard == placed(lines, "place") and [place for place, _ in heard] == list(range(messages * (RANKS - 1)))
        # The set of messages does not depend on the order.
        return sorted(what for _, what in heard), "" if is_one else "not one history"

    return Program("wildcards and probes", words, expected, {})


def placed(lines, word: str) -> list[tuple[int, str]]:
    found = (re.fullmatch(rf"{word} (\d+): (.*)", line) for line in lines)
    return sorted((int(one[1]), one[2]) for one in found if one)


def benchmark(options, patterns: list[str], repeats: int = REPEATS, binary: str = "IMB-MPI1", least: int = RANKS) -> Program:
    """IMB on MPICH, which has the same binary interface. Its times differ; lengths and
    repetitions may not. It runs with `least` ranks, and twice as many up to all."""
    words = [str(options.venvs / "impi" / "bin" / binary), *patterns, "-npmin", str(least), *BENCHMARK_BOUNDS]
    words += ["-iter", str(repeats // len(patterns))]

    def expected(lines):
        rows = [re.match(r"(# Benchmarking \w+|\s+\d+\s+\d+)\s", line) for line in lines]
        kept = [row[1] for row in rows if row]
        is_over = any("All processes entering MPI_Finalize" in line for line in lines)
        # A pattern without a length has one row, which begins otherwise.
        rows_min = sum(1 if pattern in LENGTHLESS else 6 for pattern in patterns)
        return kept, "" if is_over and len(kept) >= rows_min else "not at its end"

    library = {"LD_LIBRARY_PATH": str(options.venvs / "mpich" / "lib"), **common.FILLED}
    return Program(f"{binary} {' '.join(patterns)}", words, expected, library)


def alone(options, program: Program):
    """The expected values of an undisturbed run."""
    more = {"environment": program.environment, "limit_s": LIMIT_S}
    code, lines, output = recovery.job(options, program.words, [], **more)
    shown, wrong = program.expected(lines)
    if code or wrong:
        print(f"undisturbed, {program.name} ends with {code}: {wrong}\n{process.tail(output)}")
    return shown


# --- kills: (seconds after the one before, rank)


def one_by_one(chance) -> list[tuple[float, int]]:
    return [(chance.uniform(0.1, 0.9), chance.randrange(RANKS)) for _ in range(4)]


def several(chance) -> list[tuple[float, int]]:
    kills = []
    for count in (2, RANKS - 1, RANKS):
        who = chance.sample(range(RANKS), count)
        kills += [(chance.uniform(0.3, 1.0), who[0]), *((0.0, rank) for rank in who[1:])]
    return kills


def again(chance) -> list[tuple[float, int]]:
    kills = []
    for _ in range(2):
        rank = chance.randrange(RANKS)
        kills += [(chance.uniform(0.3, 0.9), rank), *((chance.uniform(0.15, 0.5), rank) for _ in range(2))]
    return kills


def storm(chance) -> list[tuple[float, int]]:
    """All kinds of kills in one case."""
    first, second, *others = chance.sample(range(RANKS), RANKS)
    return [
        (chance.uniform(0.0, 0.8), first),
        (chance.uniform(0.1, 0.8), second),
        (chance.uniform(0.15, 0.5), second),
        (chance.uniform(0.1, 0.8), others[0]),
        *((0.0, rank) for rank in others[1:]),
        (chance.uniform(0.0, 0.3), first),
    ]


def after_a_row(chance):
    """One kill a moment after some rows of the first table of a benchmark."""
    rows, delay_s, began = chance.randrange(1, 4), chance.uniform(0.0, 0.02), []

    def is_due(output: str) -> bool:
        _, title, table = output.partition("# Benchmarking ")
        wanted = 1 if table.startswith(LENGTHLESS) else rows
        if not began and title and len(re.findall(r"^\s+\d+\s+\d", table, re.M)) >= wanted:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] >= delay_s

    return [(is_due, chance.randrange(RANKS))]


KINDS = {"one by one": one_by_one, "several at once": several, "again while they come back": again, STORM: storm}


def check(checks, options, case: Case, undisturbed) -> None:
    # The seed includes the name, so a case is the same one with `--only`.
    chance = random.Random(f"{options.seed} {case.name}")
    kills = after_a_row(chance) if case.kind == ONE_KILL else KINDS[case.kind](chance)
    if case.kind != ONE_KILL:
        first = checkpoint.FIRST_S if case.has_images else recovery.START_S
        kills[0] = (first + kills[0][0], kills[0][1])
    words = list(case.words)
    if case.has_images:
        words += ["--checkpoint", f"{IMAGE_EVERY_S:.0f}s", "--set", f"criu={options.criu}"]
    if case.network is None:
        more = {"environment": case.program.environment, "limit_s": LIMIT_S}
        code, lines, output = recovery.job(options, case.program.words, kills, *words, **more)
    else:
        code, lines, output = in_a_bad_network(options, case, kills, words)
    shown, wrong = case.program.expected(lines)
    starts, images = output.count(": restarted"), checkpoint.restores(output)
    is_same = shown == undisturbed and not wrong
    measured = f"exit code {code}, {'the same' if is_same else wrong or 'not the same'}, {starts} restarts"
    measured += f", {images} from images" if case.has_images else ""
    # A kill may hit the process that CRIU is restoring: then the restore is repeated, and the
    # output has only one line about the restart.
    within = checkpoint.kills_within_restores(output)
    measured += f", {within} kills within a restore" if within else ""
    # On a busy machine the first kill may come before that rank has a checkpoint, and the first kills
    # of a unit before all of its ranks have one.
    images_min = 1 if "recover_unit=node" in words else len(kills) - 2
    is_met = common.fits(starts + within, len(kills), words) and (images >= images_min if case.has_images else not images)
    checks.check(case.name, code == 0 and is_same and is_met, measured, output)


def in_a_bad_network(options, case: Case, kills, words):
    """Runs `recovery.job` on the gateways of a lab whose wide-area link is bad all the time and is
    cut from the second kill on."""
    lab = f"kills-{os.getpid()}"
    running = [*common.landbridge_run(options, RANKS, "--recover", "--timeout", f"{BAD_NETWORK_LIMIT_S:.0f}", *words), *case.program.words]
    command = [*network.lab_run(options, lab, LAB), sys.executable, str(common.PROGRAMS / "on_gateways.py"), *running]
    link = [str(options.bin / "landbridge"), "lab", "link", lab, LINK]
    moments, now = [], 0.0
    for seconds, rank in kills:
        now += seconds
        moments.append((now, rank))
    cut = moments[1][0] - 0.05
    events = sorted([*moments, (0.0, BAD), (cut, ["--down"]), (cut + CUT_S, ["--up"])], key=lambda event: event[0])
    started = network.Job(command, case.program.environment)
    try:
        deadline = time.monotonic() + BAD_NETWORK_LIMIT_S
        while time.monotonic() < deadline and not all(recovery.pids_of(rank) for rank in range(RANKS)):
            if not started.sleep_until(time.monotonic() + 0.05):
                break
        began = time.monotonic()
        for at, what in events:
            if not started.sleep_until(began + at):
                break
            if isinstance(what, int):
                # Bounded: a rank may have ended, and the link must be up again in any case.
                patience = time.monotonic() + BACK_S
                while not (pids := recovery.pids_of(what)) and time.monotonic() < patience:
                    if not started.sleep_until(time.monotonic() + 0.02):
                        break
                [os.kill(pid, signal.SIGKILL) for pid in pids]
            else:
                changed = network.change([*link, *" ".join(what).split()], 0)
                # A job that ends meanwhile takes its lab with it.
                if changed.returncode and started.sleep_until(time.monotonic() + 2.0):
                    changed.check_returncode()
        seconds = started.wait(BAD_NETWORK_LIMIT_S)
    finally:
        started.end()
    output = started.output.decode(errors="replace")
    code = started.process.returncode if seconds is not None else f"none within {BAD_NETWORK_LIMIT_S:.0f} s"
    return code, [line for line in output.splitlines() if not line.startswith("landbridge")], output


if __name__ == "__main__":
    sys.exit(main())
