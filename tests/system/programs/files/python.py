"""Python's ways to use files, as rows like those of rows.h: `FOLDER STEPS ROW[,ROW...]`.

Without arguments the program prints the names of the rows. In each step every rank acts on a file
of its own, a barrier orders the action before the looks, and each rank looks at the file of the
next rank several times. The last rank paces the looks, so that ranks which look do not wait for a
killed one.
"""

import hashlib
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy
from mpi4py import MPI

LOOKS, PAUSE_S, WIDTH = 3, 0.09, 500
PACE = 77


class Row:
    """One way to use files. `paths[0]`: of this rank; `paths[1]`: of the next rank."""

    def __init__(self, folder: Path, rank: int, size: int):
        self.rank, self.size, self.next = rank, size, (rank + 1) % size
        self.folder = folder
        self.wrong = self.total = 0

    def name_of(self, rank: int, what: str = "of") -> Path:
        return self.folder / f"{type(self).__name__}.{what}.{rank}"

    def expect(self, is_right, what: str) -> None:
        self.total += 1
        if not is_right:
            self.wrong += 1
            if self.wrong <= 3:
                print(f"wrong: row {type(self).__name__} rank {self.rank}: {what}", file=sys.stderr, flush=True)

    def expect_same(self, got, want, what: str = "") -> None:
        self.expect(got == want, f"{what} is {str(got)[:120]}, and should be {str(want)[:120]}")

    def begin(self) -> None:
        pass

    def look(self, step: int) -> None:
        pass

    def end(self) -> None:
        pass


def value(rank: int, step: int) -> int:
    return zlib.crc32(f"{rank} {step}".encode())


def line(rank: int, step: int) -> str:
    return f"rank {rank} step {step} has {value(rank, step)}\n"


def lines(rank: int, step: int) -> str:
    return "".join(line(rank, s) for s in range(step + 1))


def numbers(rank: int, step: int):
    return numpy.arange(WIDTH, dtype=numpy.int64) * value(rank, step)


class text(Row):
    """A text file that stays open, and that is read from its beginning after each write."""

    def begin(self):
        self.file = open(self.name_of(self.rank), "w+")

    def act(self, step):
        self.file.write(line(self.rank, step))
        self.file.flush()
        self.file.seek(0)
        self.expect_same(self.file.read(), lines(self.rank, step), "own text")

    def look(self, step):
        self.expect_same(self.name_of(self.next).read_text(), lines(self.next, step), "text")

    def end(self):
        self.file.close()


class python_append(text):
    """One appended line in each step, by a file that is opened for it."""

    def begin(self):
        pass

    end = begin

    def act(self, step):
        with open(self.name_of(self.rank), "a") as file:
            file.write(line(self.rank, step))
            self.expect_same(file.tell(), len(lines(self.rank, step)), "place")


class binary(Row):
    """A number that is read, changed and written in place, buffered."""

    def act(self, step):
        with open(self.name_of(self.rank), "r+b" if step else "w+b") as file:
            before = int.from_bytes(file.read(8), "little")
            self.expect_same(before, sum(value(self.rank, s) for s in range(step)), "the sum")
            file.seek(0)
            file.write((before + value(self.rank, step)).to_bytes(8, "little"))

    def look(self, step):
        found = int.from_bytes(self.name_of(self.next).read_bytes(), "little")
        self.expect_same(found, sum(value(self.next, s) for s in range(step + 1)), "the sum")


class tofile(Row):
    """numpy's own writing, by the C library's streams on Python's descriptor."""

    def act(self, step):
        numbers(self.rank, step).tofile(self.name_of(self.rank))
        with open(self.name_of(self.rank, "grows"), "ab") as file:
            numbers(self.rank, step).tofile(file)

    def look(self, step):
        found = numpy.fromfile(self.name_of(self.next), numpy.int64)
        self.expect(numpy.array_equal(found, numbers(self.next, step)), f"not the numbers of step {step}")
        found = numpy.fromfile(self.name_of(self.next, "grows"), numpy.int64)
        wanted = numpy.concatenate([numbers(self.next, s) for s in range(step + 1)])
        self.expect(numpy.array_equal(found, wanted), f"{len(found)} numbers, {len(wanted)} wanted")


class memmap(Row):
    """numpy.memmap, which maps the file shared and writable."""

    def begin(self):
        self.sums = numpy.memmap(self.name_of(self.rank), numpy.int64, "w+", shape=WIDTH)

    def act(self, step):
        self.sums += numbers(self.rank, step)

    def look(self, step):
        wanted = sum(numbers(self.rank, s) for s in range(step + 1))
        self.expect(numpy.array_equal(self.sums, wanted), f"not the sums of step {step}")


class memmap_input(Row):
    """numpy.memmap of a file that nobody changes any more, for reading and copied on write."""

    def begin(self):
        numbers(self.rank, 0).tofile(self.name_of(self.rank))

    def act(self, step):
        if step == 0:
            self.read = numpy.memmap(self.name_of(self.next), numpy.int64, "r")
            self.copied = numpy.memmap(self.name_of(self.next), numpy.int64, "c")
        self.copied[step] += 1

    def look(self, step):
        wanted = numbers(self.next, 0)
        self.expect(numpy.array_equal(self.read, wanted), "not the numbers of the input")
        wanted[: step + 1] += 1
        self.expect(numpy.array_equal(self.copied, wanted), f"not the changed copy of step {step}")


class checkpoint(Row):
    """A restart file as programs write them: new, synchronized, renamed; the file before is kept
    under another name."""

    def act(self, step):
        path = self.name_of(self.rank)
        with tempfile.NamedTemporaryFile("wb", dir=self.folder, delete=False) as file:
            pickle.dump({"step": step, "data": numbers(self.rank, step)}, file)
            file.flush()
            os.fsync(file.fileno())
        if step:
            os.replace(path, self.name_of(self.rank, "before"))
        os.rename(file.name, path)

    def look(self, step):
        found = pickle.loads(self.name_of(self.next).read_bytes())
        self.expect_same(found["step"], step, "step")
        self.expect(numpy.array_equal(found["data"], numbers(self.next, step)), f"not the data of step {step}")
        if step:
            before = pickle.loads(self.name_of(self.next, "before").read_bytes())
            self.expect_same(before["step"], step - 1, "step before")


class document(Row):
    """A JSON document that is read, changed and written whole."""

    def act(self, step):
        path = self.name_of(self.rank)
        numbers = json.loads(path.read_text()) if path.exists() else []
        self.expect_same(numbers, list(range(step)), "document")
        path.write_text(json.dumps([*numbers, step]))

    def look(self, step):
        self.expect_same(json.loads(self.name_of(self.next).read_text()), list(range(step + 1)), "document")


class copies(Row):
    """Files are copied (by the kernel, where it can); folders are made, walked through and
    removed."""

    def act(self, step):
        whole, part = self.name_of(self.rank, f"tree{step}"), self.name_of(self.rank, f"tree{step - 1}")
        (whole / "a" / "b").mkdir(parents=True)
        (whole / "a" / "b" / "text").write_text(line(self.rank, step))
        shutil.copyfile(whole / "a" / "b" / "text", whole / "copy")
        shutil.copytree(whole / "a", whole / "c")
        if step:
            shutil.rmtree(part)

    def look(self, step):
        whole = self.name_of(self.next, f"tree{step}")
        found = sorted(str(path.relative_to(whole)) for path in whole.rglob("*"))
        self.expect_same(found, ["a", "a/b", "a/b/text", "c", "c/b", "c/b/text", "copy"], "tree")
        for name in ("a/b/text", "c/b/text", "copy"):
            self.expect_same((whole / name).read_text(), line(self.next, step), name)
        self.expect(not self.name_of(self.next, f"tree{step - 1}").exists(), "the tree before is there")


class started(Row):
    """Programs that get input and answer by two pipes; their exit code counts too."""

    def act(self, step):
        words = ["sh", "-c", f"read -r line; echo \"$line\"; echo {step} >&2; exit {step % 3}"]
        found = subprocess.run(words, input=line(self.rank, step), capture_output=True, text=True)
        self.expect_same(found.stdout.split(), line(self.rank, step).split(), "output")
        self.expect_same((found.stderr, found.returncode), (f"{step}\n", step % 3), "errors and exit code")


class sqlite(Row):
    """A database: it locks, reads what it has written, and keeps a journal that it makes and
    removes."""

    def begin(self):
        self.base = sqlite3.connect(self.name_of(self.rank))
        self.base.execute("create table steps (step integer, what text)")
        self.base.commit()

    def act(self, step):
        self.base.execute("insert into steps values (?, ?)", (step, line(self.rank, step)))
        self.base.execute("update steps set what = what || '.' where step < ?", (step,))
        self.base.commit()

    def look(self, step):
        found = list(self.base.execute("select step, what from steps order by step"))
        self.expect_same(found, [(s, line(self.rank, s) + "." * (step - s)) for s in range(step + 1)], "table")

    def end(self):
        self.base.close()


class zipped(Row):
    """numpy's archives, which seek back into written data."""

    def act(self, step):
        with open(self.name_of(self.rank), "wb") as file:
            numpy.savez_compressed(file, one=numbers(self.rank, step), two=step)

    def look(self, step):
        with numpy.load(self.name_of(self.next)) as found:
            self.expect(numpy.array_equal(found["one"], numbers(self.next, step)), f"not the numbers of step {step}")
            self.expect_same(int(found["two"]), step, "step")


class mpi_all(Row):
    """mpi4py's MPI-IO: all ranks write one file together, each a part that has another owner in each
    step."""

    def begin(self):
        self.file = MPI.File.Open(MPI.COMM_WORLD, str(self.name_of(0)), MPI.MODE_CREATE | MPI.MODE_RDWR)

    def act(self, step):
        self.write((self.rank + step) % self.size * WIDTH * 8, numbers(self.rank, step))

    def write(self, at, data):
        self.file.Write_at_all(at, data)

    def look(self, step):
        found = numpy.fromfile(self.name_of(0), numpy.int64)
        wanted = numpy.concatenate([numbers((place - step) % self.size, step) for place in range(self.size)])
        self.expect(numpy.array_equal(found, wanted), f"not the numbers of step {step}")

    def end(self):
        self.file.Close()


class mpi_later(mpi_all):
    """The same by a write that is in progress while the rank computes."""

    def write(self, at, data):
        request = self.file.Iwrite_at(at, data)
        compute(3)
        request.Wait()


class mpi_shared(mpi_all):
    """Records at the pointer that all ranks share, in the order of the ranks."""

    def act(self, step):
        self.file.Write_ordered(numbers(self.rank, step))

    def look(self, step):
        found = numpy.fromfile(self.name_of(0), numpy.int64)
        wanted = numpy.concatenate([numbers(rank, s) for s in range(step + 1) for rank in range(self.size)])
        self.expect(numpy.array_equal(found, wanted), f"{len(found)} numbers, {len(wanted)} wanted")


ROWS = [text, python_append, binary, tofile, memmap, memmap_input, checkpoint, document, copies, started, sqlite, zipped, mpi_all, mpi_later, mpi_shared]


def compute(times: int) -> None:
    for _ in range(times):
        hashlib.sha256(b"x" * 200_000).digest()


def pace(world) -> None:
    if world.rank < world.size - 1:
        world.recv(source=world.size - 1, tag=PACE)
        return
    time.sleep(PAUSE_S)
    for other in range(world.size - 1):
        world.send(None, other, PACE)


def main() -> None:
    if len(sys.argv) < 4:
        print("\n".join(row.__name__ for row in ROWS))
        return
    world = MPI.COMM_WORLD
    folder, steps, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    rows = [row(folder, world.rank, world.size) for row in ROWS if row.__name__ in names]

    def say(what: str) -> None:
        if not world.rank:
            print(what, file=sys.stderr, flush=True)

    say("begun")
    [row.begin() for row in rows]
    world.Barrier()
    for step in range(steps):
        say(f"step {step}")
        for row in rows:
            compute(1 + 40 // len(rows))
            row.act(step)
        world.Barrier()
        for _ in range(LOOKS):
            pace(world)
            [row.look(step) for row in rows]
        world.Barrier()
    [row.end() for row in rows]
    for row in rows:
        what = f"wrong {row.wrong} of {row.total}, digest 0"
        print(f"row {type(row).__name__} rank {world.rank}: {what}", file=sys.stderr, flush=True)


main()
