#!/usr/bin/env python3
"""The cost of recovery of killed ranks, and the time that a recovery takes.

    bench/recovery.py                   all parts, 5 rounds; `--rounds 3` takes at most about an hour
    bench/recovery.py --quick           one round, few sizes, few repetitions: a trial of the program
    bench/recovery.py new nodes         only these parts; the results of the others stay
    bench/recovery.py --bin DIR         the binaries in DIR

Variants take turns within each round and each group of sizes: logs of the senders (the default of
`--recover`), the same where the ranks of a node begin again together (`recover_unit=node`), the log
of the relay, without `--recover` by the same provider (`local=own`), and without `--recover` and
other settings (inside a node MPICH's own shared memory). Sizes are all powers of two from 1 B to
4 MiB; the repetitions of each are in recovery_ways.py, so that a size takes 0.05 to 0.3 s by the
faster variants; the log of the relay is repeated an eighth as often.

Parts:
new, again, beyond: IMB PingPong of 2 ranks on a node. In `new` all memory of the logs is new. In
    `again` the logs use 64 MiB again, without checkpoints: what does not fit is given up, and the
    memory that was read last is used first. In `beyond` they use 512 MiB in turn, as the released
    memory of a job with checkpoints is used; no checkpoint is taken meanwhile.
stream-new, stream-again, stream-beyond: IMB Uniband of 2 ranks, 16 messages at a time, in such memory.
pairs: Uniband of two pairs on a node, in memory that is used again.
one-sided: IMB-RMA of 2 ranks on a node, in memory that is used again.
ranks: 2 to 64 ranks on a node: Uniband (half of the ranks send to the other half) and Allreduce.
nodes: PingPong and Uniband between two nodes over TCP (a lab), in memory that is used again.
spares: the same with a spare node, so that each message to the other node waits for a keeper.
link: PingPong over the link of labs/two-sites.toml (1 Gbit/s, 5 ms one way).
applications: examples/heat.py, gradient.c and transpose.c on 2 ranks: elapsed seconds.
disk: Uniband beyond the memory bound of the logs, with `recover_dir`, against Uniband within the
    bound; logs of the senders, and the log of the relay.
counts: bytes of log, and determinants, for each message, by size. Counted once.
back: a rank of a program that only communicates is killed, alone or with the ranks of its node.
    Measured are the time until the launcher notices, until the next incarnation runs, and until the
    replay is complete; the speed of the replay relative to the first run; and the bytes of
    determinants for each delivered frame.

What leaves: build/results/bench-recovery.json, in which each part has the time, the commit and a
digest of the binaries of its measurement. Checkpoints: bench/checkpoint.py.

Before each job as much memory is touched and released as the job can use, and the machine does not
give free memory back to its host meanwhile, if it can be said (warm.py).
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compiled  # noqa: E402
import imb  # noqa: E402
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import recovery_section  # noqa: E402
import recovery_ways as ways  # noqa: E402
import stamp  # noqa: E402
import warm  # noqa: E402
from recovery_ways import KIB, MIB, PARTS, PLAIN, RELAY, SAME, SENDERS, SPARES, UNIT, Group, Variant  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
LAB = paths.ROOT / "labs" / "two-sites.toml"
LIMIT_S = 240.0
# No further round begins once a part has taken this many seconds for each of its rounds, so that all
# parts take little more than an hour at 3 rounds.
ROUND_S = 80.0
# Seconds that a rank has run before it is killed.
FIRST_S = 3.0
# What a job of these parts can use, and one of the others.
WARM_BYTES = {"new": 3 << 30, "stream-new": 3 << 30, "ranks": 2 << 30, "applications": 2 << 30, "disk": 4 << 30}
WARM_FEW_BYTES = 1 << 29
# Of all pairs together.
CROWD_BYTES, CROWD_TIMES = 64 * KIB, 640
ALLREDUCE_TIMES = 200
# Messages of each size that are counted: up to this size so few that the first 2 MiB of a log hold
# them, of longer ones so many that 2 MiB are little.
COUNTED_SHORT_MAX, COUNTED_TIMES, COUNTED_BYTES = 256, 2000, 32 * MIB
# Longer than the launcher answers from what it was said before (AGE_MAX of run/log_query.rs).
STATUS_AGE_S = 0.6

# Values by their names, such as `PingPong/8`.
Row = dict[str, float]
section, picture = recovery_section.section, recovery_section.picture


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-recovery.json; parts that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-recovery.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    # Results of earlier versions of this program have no stamp for each part.
    result = {part: kept[part] for part in PARTS if "stamp" in kept.get(part, {})}
    for part in parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, warm.kept() as is_kept:
            made = Bench(part, 1 if part == "counts" else rounds, quick, Path(folder)).measured()
        result[part] = made | {"is_kept": is_kept, "is_trial": quick, "seconds": round(time.monotonic() - began), "stamp": stamp.of_binaries()}
        print(f"{part}: {result[part]['seconds']} s", flush=True)
        file.write_text(json.dumps(result, indent=1))
    return result


@dataclass(frozen=True)
class Job:
    """IMB with the sizes of a group, on one node, or with one rank on each node of a lab."""

    group: Group
    ranks: int = 2
    program: str = "IMB-MPI1"
    benchmarks: tuple[str, ...] = ("PingPong",)
    fill_bytes: int = 0


@dataclass
class Bench:
    """The measurement of one part."""

    part: str
    rounds: int
    quick: bool
    folder: Path

    def measured(self) -> dict:
        node, few = [SENDERS, UNIT, RELAY, SAME, PLAIN], [SENDERS, UNIT, RELAY, SAME]
        between = [SENDERS, RELAY, SAME]
        both = ("PingPong", ways.TCP_PINGPONG), ("Uniband", ways.TCP_UNIBAND)
        match self.part:
            case "new" | "again":
                return self.in_turns(node, self.groups(ways.PINGPONG, self.part, Job(ways.PINGPONG[0])))
            case "beyond":
                return self.in_turns([SENDERS, UNIT, SAME], self.groups(ways.PINGPONG, self.part, Job(ways.PINGPONG[0])))
            case "stream-new" | "stream-again" | "stream-beyond":
                memory = self.part.removeprefix("stream-")
                compared = [SENDERS, UNIT, SAME] if memory == "beyond" else node
                return self.in_turns(compared, self.groups(ways.UNIBAND, memory, Job(ways.UNIBAND[0], benchmarks=("Uniband",))))
            case "pairs":
                return self.in_turns(few, self.groups(ways.PAIRS, "again", Job(ways.PAIRS[0], 4, benchmarks=("Uniband",))))
            case "one-sided":
                return self.in_turns(few, self.groups(ways.ONE_SIDED, "again", Job(ways.ONE_SIDED[0], 2, "IMB-RMA")))
            case "ranks":
                crowds = (2, 16) if self.quick else ways.CROWDS
                return self.in_turns(few, [lambda way, ranks=ranks: self.crowded(way, ranks) for ranks in crowds])
            case "nodes":
                return self.in_turns(between, [lambda way: self.between_nodes(way, both, LAB)])
            case "spares":
                return self.in_turns([SPARES, SENDERS, SAME], [lambda way: self.between_nodes(way, both, self.lab_with_spare())])
            case "link":
                placed = [sys.executable, str(paths.ROOT / "tests" / "system" / "programs" / "on_gateways.py")]
                sizes = (("PingPong", ways.LINK_PINGPONG),)
                return self.in_turns(between, [lambda way: self.between_nodes(way, sizes, LAB, placed)])
            case "applications":
                return self.in_turns(few, [lambda way, name=name: self.application(way, name) for name in ways.APPLICATIONS])
            case "disk":
                return self.in_turns([SENDERS, RELAY], [lambda way, memory=memory: self.spilling(way, memory) for memory in ("within", "beyond")])
            case "counts":
                return self.in_turns([SENDERS, UNIT, RELAY], [self.counted])
            case "back":
                return self.in_turns([SENDERS, UNIT], [recovery_time])
        raise ValueError(self.part)

    def in_turns(self, compared: list[Variant], steps: list[Callable[[Variant], Row]]) -> dict:
        """The values of all rounds, by variant and name. A variant that fails takes no further
        part, and its error is kept. On a slow machine there are fewer rounds, which the result
        says."""
        samples: dict[str, dict[str, list[float]]] = {way.name: {} for way in compared}
        errors: dict[str, str] = {}
        began, done = time.monotonic(), 0
        while done < self.rounds and (done == 0 or time.monotonic() - began < self.rounds * ROUND_S):
            number, done = done, done + 1
            for step in steps:
                # The order rotates, so that the predecessor of a variant has no influence.
                turn = number % len(compared)
                for way in compared[turn:] + compared[:turn]:
                    if way.name in errors:
                        continue
                    print(f"{self.part}: round {number + 1} of {self.rounds}: {way.name}: ", end="", flush=True)
                    warm.memory(WARM_BYTES.get(self.part, WARM_FEW_BYTES) if not self.quick else WARM_FEW_BYTES)
                    try:
                        row = step(way)
                    except (labs.Failed, OSError, subprocess.SubprocessError) as error:
                        errors[way.name] = str(error)
                        print(f"does not run: {error}", flush=True)
                        continue
                    print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
                    for name, value in row.items():
                        samples[way.name].setdefault(name, []).append(value)
        return {"samples": samples, "errors": errors, "rounds": done}

    def groups(self, of_sizes: tuple[Group, ...], memory: str, job: Job) -> list[Callable[[Variant], Row]]:
        """A step for each group of sizes on a node, with logs in such memory."""

        def one(way: Variant, number: int) -> Row:
            groups = ways.fewer(of_sizes, self.quick, way)
            benchmarks = job.benchmarks
            if self.part == "one-sided":
                benchmarks = ways.RMA_BENCHMARKS + (ways.ATOMIC if number == 0 else ())
            options = (*way.options, *ways.MEMORY[memory]) if way.logs else way.options
            asked = replace(job, group=groups[number], benchmarks=benchmarks, fill_bytes=ways.FILL_BYTES[memory])
            return self.on_a_node(replace(way, options=options), asked)

        count = len(ways.fewer(of_sizes, self.quick, SAME))
        return [lambda way, number=number: one(way, number) for number in range(count)]

    def crowded(self, way: Variant, ranks: int) -> Row:
        """MB/s of all pairs together, and microseconds of an Allreduce."""
        share = ways.RELAY_SHARE if way == RELAY else 1
        jobs = [Job(Group((CROWD_BYTES,), max(CROWD_TIMES // ranks // share, 2)), ranks, benchmarks=("Uniband",))]
        jobs += [Job(Group((8,), max(ALLREDUCE_TIMES // share, 2)), ranks, benchmarks=("Allreduce",))]
        rows = [self.on_a_node(way, job) for job in jobs]
        return {f"{name.partition('/')[0]}/{ranks}": value for row in rows for name, value in row.items()}

    def on_a_node(self, way: Variant, job: Job) -> Row:
        command = [str(paths.LANDBRIDGE), "run", "-n", str(job.ranks), *way.options, "--", *self.imb_words(job)]
        environment = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
        return values(finished(command, environment), [job])

    def between_nodes(self, way: Variant, benchmarks, lab: Path, placed: list[str] | None = None) -> Row:
        """All sizes in one lab."""
        options = (*way.options, *ways.MEMORY["again"]) if way.logs else way.options
        jobs = [
            Job(group, benchmarks=(benchmark,), fill_bytes=0 if placed else ways.FILL_BYTES["again"])
            for benchmark, of_sizes in benchmarks
            for group in ways.fewer(of_sizes, self.quick, way)
        ]
        launch = [*(placed or []), str(paths.LANDBRIDGE), "run", "-n", "2", "--ranks-per-node", "1", *options, "--"]
        commands = labs.in_turn([[*launch, *self.imb_words(job)] for job in jobs])
        return values(finished(labs.command(lab, labs.name("recovery"), commands), labs.environment()), jobs)

    def lab_with_spare(self) -> Path:
        """The lab with a third host in the first cluster, for `--spares 1`."""
        file = self.folder / "spare.toml"
        file.write_text(LAB.read_text().replace("hosts = 2 ", "hosts = 3 ", 1))
        return file

    def imb_words(self, job: Job) -> list[str]:
        per_time = job.group.times * (ways.WINDOW if "Uniband" in job.benchmarks else 1)
        # The first size is not counted: it fills the memory that is used again. No other job in the
        # same output has this size.
        first = min(job.fill_bytes // per_time + 11, 4 * MIB - 1)
        first += first in ways.SIZES
        lengths = self.folder / f"lengths-{first}-{job.group.sizes[0]}-{job.group.times}"
        lengths.write_text("".join(f"{size}\n" for size in (first, *job.group.sizes)))
        window = ["-window_size", str(ways.WINDOW)] if "Uniband" in job.benchmarks else []
        bounds = ["-iter", str(job.group.times), "-iter_policy", "off", "-time", f"{LIMIT_S:.0f}"]
        return [str(imb.IMB.with_name(job.program)), *job.benchmarks, "-npmin", str(job.ranks), "-msglen", str(lengths), *bounds, *window]

    def application(self, way: Variant, name: str) -> Row:
        """Seconds, as the program measures them, without its start and end."""
        short = 20 if self.quick else 1
        heat = [paths.python("mpich"), str(paths.ROOT / "examples" / "heat.py"), "--size", "512", "--steps", str(2400 // short)]
        words = {"heat": lambda: heat}
        words["gradient"] = lambda: [compiled.program("gradient", self.folder), "96", str(250 if self.quick else 1000)]
        words["transpose"] = lambda: [compiled.program("transpose", self.folder), "512", str(160 // short)]
        said = finished([str(paths.LANDBRIDGE), "run", "-n", "2", *way.options, "--", *words[name]()], {})
        return {name: compiled.elapsed_s(said)}

    def spilling(self, way: Variant, memory: str) -> Row:
        """MB/s of long messages: with a log in memory, or of 256 MiB in memory and the rest on a
        disk."""
        with tempfile.TemporaryDirectory(dir=os.environ.get("LANDBRIDGE_BENCH_DIR", "/var/tmp")) as directory:
            size = "12GiB" if memory == "within" else "256MiB"
            bounds = (*way.options, "--set", f"recover_memory={size}", "--set", f"recover_dir={directory}")
            times = recovery_section.DISK_TIMES // (8 if self.quick else 1)
            row = self.on_a_node(replace(way, options=bounds), Job(Group((MIB,), times), benchmarks=("Uniband",)))
        return {memory: row[f"Uniband/{MIB}"]}

    def counted(self, way: Variant) -> Row:
        """Bytes of log, determinants and their bytes, for each message. Each size has a job of its
        own, since the first 2 MiB of a log grow by small pages, and all behind by 2 MiB."""
        row: Row = {}
        for size in ways.QUICK_SIZES if self.quick else ways.SIZES:
            times = COUNTED_TIMES if size <= COUNTED_SHORT_MAX else COUNTED_BYTES // size
            program = [paths.python("mpich"), str(Path(__file__).with_name("counted.py")), str(size), str(times)]
            with Running([str(paths.LANDBRIDGE), "run", "-n", "2", *way.options, *ways.MEMORY["new"], "--", *program], {}) as job:
                job.wait_for(lambda said: "counted 0" in said)
                before = job.logged()
                job.go_on()
                job.wait_for(lambda said: f"counted {times}\n" in said)
                after = job.logged()
                job.go_on()
            for what, field in (("log", "bytes"), ("determinants", "determinants"), ("determinant bytes", "determinant_bytes")):
                row[f"{what}/{size}"] = (after[field] - before[field]) / (2 * times)
        return row


def finished(command: list[str], environment: dict[str, str]) -> str:
    """The output of a job that ended well."""
    done = process.run(command, LIMIT_S, environment)
    if not done.ok:
        raise labs.Failed(f"{done.why or done.code}: {process.tail(done.output, 4)}")
    return done.output


def values(output: str, jobs: list[Job]) -> Row:
    """MB/s of Uniband, and microseconds of other benchmarks, by benchmark and size."""
    tables = imb.tables(output)
    row: Row = {}
    for job in jobs:
        for benchmark in job.benchmarks:
            table = tables.get(benchmark, imb.Table({}))
            # Accumulate works on whole integers, and the atomic operations on one.
            is_one = benchmark in ways.ATOMIC
            sizes = [size for size in table.rows if is_one or size in job.group.sizes]
            if not sizes or (job.program == "IMB-MPI1" and len(sizes) < len(job.group.sizes)):
                raise labs.Failed(f"{benchmark} has no rows: {process.tail(output, 4)}")
            for size in sizes:
                row[f"{benchmark}/{size}"] = table.bandwidth(size) if benchmark == "Uniband" else table.latency_us(size)
    return row


# --- jobs that are observed while they run


class Running:
    """A job in the background; use it in `with`."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.said = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": self.said, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, **pipes, env=os.environ | environment, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A job that is done ends by itself.
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
        self.process.stdin.close()
        self.said.close()
        process.end_descendants()

    def go_on(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def text(self) -> str:
        self.said.seek(0)
        return self.said.read()

    def wait_for(self, is_there: Callable[[str], object]) -> float:
        """The time of a message in the output, with a resolution of 2 ms."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if is_there(self.text()):
                return time.monotonic()
            time.sleep(0.002)
        raise labs.Failed(f"ended, or said nothing for {LIMIT_S:.0f} s: {process.tail(self.text(), 4)}")

    def logged(self) -> dict[str, int]:
        """What the message logs of all ranks hold, once nothing is under way."""
        time.sleep(STATUS_AGE_S)
        processes = self.asked("log", "log_status", "processes")
        if not processes:
            raise labs.Failed("`landbridge log` says nothing of the job")
        return {name: sum(it[name] for it in processes) for name in ("bytes", "determinants", "determinant_bytes", "delivered_frames")}

    def pid_of(self, rank: int) -> int | None:
        return next((row["pid"] for row in self.asked("ps", "ranks") or [] if row["rank"] == str(rank)), None)

    def asked(self, command: str, *names: str):
        """What `landbridge ps` or `landbridge log` says of this job."""
        answer = subprocess.run([str(paths.LANDBRIDGE), command, "--json"], capture_output=True, text=True, timeout=10)
        jobs = json.loads(answer.stdout) if answer.returncode == 0 else []
        found = next((job for job in jobs if job["launcher"] == self.process.pid), None)
        for name in names:
            found = (found or {}).get(name)
        return found


# --- from a kill to the end of the replay

STARTED = re.compile(r"restarted: (\d+) polls")
LIVE = re.compile(r"the replay is over after (\d+) frames")


def recovery_time(way: Variant) -> Row:
    """Seconds: from the kill until the launcher notices, from then until the replay begins, and
    from then until the rank is live; and the duration of the first run."""
    with tempfile.NamedTemporaryFile("w") as lengths:
        lengths.write("1024\n")
        lengths.flush()
        program = [str(imb.IMB), "Sendrecv", "-npmin", "4", "-msglen", lengths.name, "-iter", "10000000", "-iter_policy", "off", "-time", "600"]
        command = [str(paths.LANDBRIDGE), "run", "-n", "4", *way.options, "--set", "log=info", "--", *program]
        with Running(command, {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}) as job:
            job.wait_for(lambda _: job.pid_of(1))
            began = time.monotonic()
            time.sleep(FIRST_S)
            processes = job.asked("log", "log_status", "processes")
            each = sum(it["determinant_bytes"] for it in processes) / max(sum(it["delivered_frames"] for it in processes), 1)
            victim = job.pid_of(1)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            noticed = job.wait_for(lambda said: ": restarted" in said)
            replay_begun = job.wait_for(STARTED.search)
            live = job.wait_for(LIVE.search)
            text = job.text()
    row = {"first": killed - began, "noticed": noticed - killed, "restart": replay_begun - noticed, "replay": live - replay_begun}
    return row | {"determinant": each, "polls": int(STARTED.search(text)[1]), "frames": int(LIVE.search(text)[1])}


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
