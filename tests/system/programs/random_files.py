"""Random file programs: the result of every call is known, because all ranks run a model.

All ranks run the same plan on the model. A plan is a sequence of epochs; a barrier, a ring of
messages or a sum over all ranks ends each epoch. In an epoch each rank makes some calls, in such a
way that no two ranks touch the same bytes, names or listings, unless all of them only read; or one
rank writes a file and sends a message, and another rank then reads that file. So all answers follow
from the seed. The model holds the names, the contents, and the position of each open file.

Each rank prints `wrong: ...` for an answer that differs, and at the end the number of calls, the
number of wrong answers, and a digest of all answers.
"""

import argparse
import ctypes
import errno
import os
import random
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from mpi4py import MPI

EPOCHS, CALLS, LONGEST, SHOWN = 7, 4, 6000, 5
NAMES = [f"{folder}n{number}" for folder in ("", "d0/", "d1/") for number in range(4)]
FOLDERS = ["d0", "d1"]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fopen.restype = ctypes.c_void_p
LIBC.fwrite.argtypes = LIBC.fread.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
LIBC.fwrite.restype = LIBC.fread.restype = ctypes.c_size_t
LIBC.fseek.argtypes, LIBC.fclose.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int], [ctypes.c_void_p]


@dataclass(eq=False)
class Open:
    """An open file description of the model; `numbers`: its descriptors in the rank that has it
    open."""

    content: bytearray
    is_append: bool
    can_read: bool
    can_write: bool
    at: int = 0
    numbers: list[int] = field(default_factory=list)

    def write(self, data: bytes) -> int:
        self.at = put(self.content, len(self.content) if self.is_append else self.at, data)
        return len(data)

    def read(self, count: int) -> bytes:
        data = bytes(self.content[self.at : self.at + count])
        self.at += len(data)
        return data


def put(content: bytearray, at: int, data: bytes) -> int:
    """Writes into a content of the model; returns the position after the written bytes."""
    if at > len(content) and data:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data
    return at + len(data)


def resize(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


class Claims:
    """Which rank touches what in an epoch, and how. Ranks that read, or that change a listing, do
    not disturb each other."""

    def __init__(self):
        self.taken: dict[object, tuple[str, set[int]]] = {}
        self.kept: list[object] = []

    def take(self, rank: int, wanted) -> bool:
        """Claims things for a rank; False if another rank disturbs. `wanted`: pairs of a thing and
        `read`, `change` (a listing, by another name), or `write`."""
        for what, how in wanted:
            before, ranks = self.taken.get(what, (how, set()))
            if ranks - {rank} and (how == "write" or before != how):
                return False
        for what, how in wanted:
            before, ranks = self.taken.get(what, (how, set()))
            self.taken[what] = (before if before == how else "write", ranks | {rank})
        return True


class Plan:
    """The model, and the calls of this rank on the real files."""

    def __init__(self, number: int, seed: int, folder: Path, world):
        self.chance = random.Random(f"{seed} {number}")
        self.number, self.folder, self.world = number, folder, world
        self.names: dict[str, bytearray] = {}
        self.folders: set[str] = set()
        self.open: list[list[Open]] = [[] for _ in range(world.size)]
        # Files that a rank closes in this epoch: another rank's call of this epoch may come first.
        self.closed: list[list[Open]] = [[] for _ in range(world.size)]
        self.wrong = self.made = self.digest = 0
        self.epoch = -1

    def run(self) -> None:
        for self.epoch in range(EPOCHS):
            self.claims, self.closed = Claims(), [[] for _ in self.open]
            passed = self.choose_pass()
            # The first rank finds most things that no other rank touches.
            for rank in self.chance.sample(range(self.world.size), self.world.size):
                for _ in range(self.chance.randint(1, CALLS)):
                    self.call(rank)
            self.hand_over(*passed)
            self.synchronize()
        self.clean()

    # --- the required answer

    def real(self, rank: int, what: str, wanted, do) -> None:
        """Makes a call, if it belongs to this rank, and compares the answer with that of the model;
        -errno if the call fails."""
        if rank != self.world.rank:
            return
        try:
            got = do()
        except OSError as error:
            got = -error.errno
        self.made += 1
        self.digest = zlib.crc32(repr(got).encode(), self.digest)
        if got != wanted:
            self.wrong += 1
            if self.wrong <= SHOWN:
                place = f"plan {self.number} epoch {self.epoch} rank {rank}"
                print(f"wrong: {place}: {what} gave {shown(got)}, and should give {shown(wanted)}", flush=True)

    def path(self, name: str) -> Path:
        return self.folder / name

    # --- calls

    def call(self, rank: int) -> None:
        """Makes one call of this rank, if one of four attempts finds a call that disturbs no
        rank."""
        for _ in range(4):
            one = self.chance.choice(self.CALLS)
            if one(self, rank):
                return

    def claim(self, rank: int, *wanted) -> bool:
        # A content is identified by its address, so it must stay allocated while the claim stands.
        self.claims.kept += [what for what, _ in wanted]
        return self.claims.take(rank, [(id(what) if isinstance(what, bytearray) else what, how) for what, how in wanted])

    def some_name(self) -> str:
        """A name, usually one that exists."""
        there = self.chance.random() < 0.6 and list(self.names)
        return self.chance.choice(there or NAMES)

    def parent(self, name: str) -> str:
        return name.rpartition("/")[0]

    def name_claims(self, name: str, is_changed: bool):
        """Claims for the lookup or the change of a name."""
        folder = self.parent(name)
        wanted = [(f"name {name}", "write" if is_changed else "read"), (f"folder {folder}", "read")]
        return wanted + ([(f"list {folder}", "change")] if is_changed else [])

    def has_parent(self, name: str) -> bool:
        return not self.parent(name) or self.parent(name) in self.folders

    def open_one(self, rank: int) -> bool:
        name = self.chance.choice(NAMES)
        ways = (os.O_RDONLY, os.O_RDWR, os.O_WRONLY), (0, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL), (0, 0, os.O_TRUNC)
        access, create, cut = (self.chance.choice(way) for way in ways)
        append = self.chance.choice((0, 0, os.O_APPEND)) if access != os.O_RDONLY else 0
        cut = cut if access != os.O_RDONLY else 0
        if len(self.open[rank]) > 5:
            return False
        content = self.names.get(name)
        touched = [(content, "write")] if content is not None and cut else []
        if not self.claim(rank, *self.name_claims(name, bool(create) and content is None), *touched):
            return False
        failure = 0
        if not self.has_parent(name) or content is None and not create:
            failure = errno.ENOENT
        elif content is not None and create & os.O_EXCL:
            failure = errno.EEXIST
        else:
            if content is None:
                content = self.names[name] = bytearray()
                self.claim(rank, (content, "write"))
            elif cut:
                content.clear()
            one = Open(content, bool(append), access != os.O_WRONLY, access != os.O_RDONLY)
            self.open[rank].append(one)

        def do():
            number = os.open(self.path(name), access | create | cut | append, 0o644)
            if failure:
                os.close(number)
            else:
                one.numbers.append(number)
            return 0

        self.real(rank, f"open {name} {access | create | cut | append:#o}", -failure, do)
        return True

    def pick(self, rank: int, how: str) -> Open | None:
        """An open file of the rank that this call may touch."""
        able = [one for one in self.open[rank] if (one.can_write if how == "write" else one.can_read)]
        one = self.chance.choice(able) if able else None
        return one if one and self.claim(rank, (one.content, how)) else None

    def data(self) -> bytes:
        return self.chance.randbytes(self.chance.choice((1, 7, 64, 100, 1000, LONGEST)))

    def write(self, rank: int) -> bool:
        if not (one := self.pick(rank, "write")):
            return False
        data, is_vector = self.data(), self.chance.random() < 0.3
        wanted = one.write(data)
        half = len(data) // 2
        number = self.chance.randrange(8)
        if is_vector:
            self.real(rank, "writev", wanted, lambda: os.writev(pick(one, number), [data[:half], data[half:]]))
        else:
            self.real(rank, "write", wanted, lambda: os.write(pick(one, number), data))
        self.real(rank, "place after write", one.at, lambda: os.lseek(pick(one, number), 0, os.SEEK_CUR))
        return True

    def pwrite(self, rank: int) -> bool:
        one = self.pick(rank, "write")
        # Linux appends with pwrite as well if the file has O_APPEND; programs must not rely on
        # that.
        if not one or one.is_append:
            return False
        data, at = self.data(), self.chance.randrange(LONGEST)
        put(one.content, at, data)
        self.real(rank, "pwrite", len(data), lambda: os.pwrite(one.numbers[0], data, at))
        return True

    def read(self, rank: int) -> bool:
        if not (one := self.pick(rank, "read")):
            return False
        count, number = self.chance.randrange(1, LONGEST), self.chance.randrange(8)
        wanted = one.read(count)
        self.real(rank, "read", wanted, lambda: os.read(pick(one, number), count))
        return True

    def pread(self, rank: int) -> bool:
        if not (one := self.pick(rank, "read")):
            return False
        count, at = self.chance.randrange(1, LONGEST), self.chance.randrange(LONGEST)
        self.real(rank, "pread", bytes(one.content[at : at + count]), lambda: os.pread(one.numbers[0], count, at))
        return True

    def seek(self, rank: int) -> bool:
        if not self.open[rank]:
            return False
        one, whence, by = self.chance.choice(self.open[rank]), self.chance.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)), self.chance.randrange(LONGEST)
        if not self.claim(rank, (one.content, "read")):
            return False
        one.at = by + {os.SEEK_SET: 0, os.SEEK_CUR: one.at, os.SEEK_END: len(one.content)}[whence]
        self.real(rank, "seek", one.at, lambda: os.lseek(one.numbers[0], by, whence))
        return True

    def cut(self, rank: int) -> bool:
        if not (one := self.pick(rank, "write")):
            return False
        length = self.chance.randrange(LONGEST)
        resize(one.content, length)
        self.real(rank, "ftruncate", None, lambda: os.ftruncate(one.numbers[0], length))
        return True

    def cut_by_name(self, rank: int) -> bool:
        name, length = self.some_name(), self.chance.randrange(LONGEST)
        content = self.names.get(name)
        if not self.claim(rank, *self.name_claims(name, False), *([(content, "write")] if content is not None else [])):
            return False
        if content is not None:
            resize(content, length)
        self.real(rank, f"truncate {name}", -errno.ENOENT if content is None else None, lambda: os.truncate(self.path(name), length))
        return True

    def duplicate(self, rank: int) -> bool:
        if not self.open[rank]:
            return False
        one = self.chance.choice(self.open[rank])

        def do():
            one.numbers.append(os.dup(one.numbers[0]))

        self.real(rank, "dup", None, do)
        return True

    def close(self, rank: int) -> bool:
        if not self.open[rank]:
            return False
        one = self.open[rank].pop(self.chance.randrange(len(self.open[rank])))
        self.closed[rank].append(one)
        self.real(rank, "close", None, lambda: [os.close(number) for number in one.numbers] and None)
        return True

    def size(self, rank: int) -> bool:
        name = self.some_name()
        content = self.names.get(name)
        if not self.claim(rank, *self.name_claims(name, False), *([(content, "read")] if content is not None else [])):
            return False
        self.real(rank, f"stat {name}", -errno.ENOENT if content is None else len(content), lambda: os.stat(self.path(name)).st_size)
        return True

    def whole(self, rank: int) -> bool:
        """Reads a file whole, by Python or by the C library's streams."""
        name, is_stream = self.some_name(), self.chance.random() < 0.5
        content = self.names.get(name)
        if not self.claim(rank, *self.name_claims(name, False), *([(content, "read")] if content is not None else [])):
            return False
        wanted = -errno.ENOENT if content is None else bytes(content)
        do = (lambda: stream(self.path(name), "r", [])) if is_stream else (lambda: self.path(name).read_bytes())
        self.real(rank, f"read {name} whole", wanted, do)
        return True

    def rewrite(self, rank: int) -> bool:
        """Opens a file as a stream, writes at some positions, and closes it."""
        name, mode, is_stream = self.some_name(), self.chance.choice(("r+", "w", "a")), self.chance.random() < 0.5
        content = self.names.get(name)
        pieces = [(self.chance.randrange(LONGEST), self.data()) for _ in range(self.chance.randint(1, 4))]
        touched = [(content, "write")] if content is not None else []
        if not self.claim(rank, *self.name_claims(name, content is None and mode != "r+"), *touched):
            return False
        wanted = None
        if not self.has_parent(name) or content is None and mode == "r+":
            wanted = -errno.ENOENT
        else:
            if content is None:
                content = self.names[name] = bytearray()
                self.claim(rank, (content, "write"))
            if mode == "w":
                content.clear()
            for at, data in pieces:
                put(content, len(content) if mode == "a" else at, data)
        do = (lambda: stream(self.path(name), mode, pieces)) if is_stream else (lambda: buffered(self.path(name), mode, pieces))
        self.real(rank, f"rewrite {name} {mode}", wanted, do)
        return True

    def is_open_elsewhere(self, rank: int, *names: str) -> bool:
        """Whether another rank has the file open in this epoch. A job ends by a refusal if a rank is killed whose
        open file has lost its name (`docs/RECOVERY-INSIDE.md`, messages)."""
        contents = [self.names[name] for name in names if name in self.names]
        others = [one for number in range(self.world.size) if number != rank for one in self.open[number] + self.closed[number]]
        return any(one.content is content for one in others for content in contents)

    def rename(self, rank: int) -> bool:
        one, other = self.some_name(), self.chance.choice(NAMES)
        if one == other or self.is_open_elsewhere(rank, one, other) or not self.claim(rank, *self.name_claims(one, True), *self.name_claims(other, True)):
            return False
        is_right = one in self.names and self.has_parent(other)
        # A rename between two names of the same file changes nothing.
        if is_right and self.names[one] is not self.names.get(other):
            self.names[other] = self.names.pop(one)
        self.real(rank, f"rename {one} {other}", None if is_right else -errno.ENOENT, lambda: os.rename(self.path(one), self.path(other)))
        return True

    def link(self, rank: int) -> bool:
        one, other = self.some_name(), self.chance.choice(NAMES)
        if one == other or not self.claim(rank, *self.name_claims(one, False), *self.name_claims(other, True)):
            return False
        wanted = None
        if one not in self.names or not self.has_parent(other):
            wanted = -errno.ENOENT
        elif other in self.names:
            wanted = -errno.EEXIST
        else:
            self.names[other] = self.names[one]
        self.real(rank, f"link {one} {other}", wanted, lambda: os.link(self.path(one), self.path(other)))
        return True

    def unlink(self, rank: int) -> bool:
        name = self.some_name()
        if self.is_open_elsewhere(rank, name):
            return False
        if not self.claim(rank, *self.name_claims(name, True)):
            return False
        wanted = None if self.names.pop(name, None) is not None else -errno.ENOENT
        self.real(rank, f"unlink {name}", wanted, lambda: os.unlink(self.path(name)))
        return True

    def make_folder(self, rank: int) -> bool:
        name = self.chance.choice(FOLDERS)
        if not self.claim(rank, (f"folder {name}", "write"), ("list ", "change")):
            return False
        wanted = -errno.EEXIST if name in self.folders else None
        self.folders.add(name)
        self.real(rank, f"mkdir {name}", wanted, lambda: os.mkdir(self.path(name)))
        return True

    def remove_folder(self, rank: int) -> bool:
        name = self.chance.choice(FOLDERS)
        if not self.claim(rank, (f"folder {name}", "write"), ("list ", "change"), (f"list {name}", "write")):
            return False
        wanted = None if name in self.folders else -errno.ENOENT
        if any(self.parent(other) == name for other in self.names):
            wanted = -errno.ENOTEMPTY
        else:
            self.folders.discard(name)
        self.real(rank, f"rmdir {name}", wanted, lambda: os.rmdir(self.path(name)))
        return True

    def list(self, rank: int) -> bool:
        folder = self.chance.choice(["", *FOLDERS])
        if not self.claim(rank, (f"list {folder}", "read"), (f"folder {folder}", "read")):
            return False
        inside = [name.rpartition("/")[2] for name in self.names if self.parent(name) == folder]
        inside += [] if folder else self.folders
        wanted = sorted(inside) if not folder or folder in self.folders else -errno.ENOENT
        self.real(rank, f"list {folder}", wanted, lambda: sorted(os.listdir(self.path(folder))))
        return True

    CALLS = [open_one, open_one, open_one, write, write, write, pwrite, pwrite, read, read, pread, seek, cut, cut_by_name, duplicate, close]
    CALLS += [size, whole, whole, rewrite, rewrite, rename, link, unlink, make_folder, make_folder, remove_folder, list]

    # --- between ranks

    def choose_pass(self):
        """Chooses a file that one rank writes, and that another rank reads after a message from the
        first."""
        writer, reader = self.chance.sample(range(self.world.size), 2) if self.world.size > 1 else (0, 0)
        name, data = self.some_name(), self.data()
        content = self.names.get(name)
        # The claim belongs to no rank, so no other call of this epoch touches the file.
        is_chosen = writer != reader and content is not None and self.claim(-1, *self.name_claims(name, True), (content, "write"))
        return (writer, reader, name, content, data) if is_chosen else ()

    def hand_over(self, *passed) -> None:
        if not passed:
            return
        writer, reader, name, content, data = passed
        at = len(content)
        put(content, at, data)
        self.real(writer, f"add to {name}", None, lambda: buffered(self.path(name), "r+", [(at, data)]))
        if self.world.rank == writer:
            self.world.send(self.digest, reader, 1)
        if self.world.rank == reader:
            self.digest = zlib.crc32(str(self.world.recv(None, writer, 1)).encode(), self.digest)
        self.real(reader, f"read {name} after a message", bytes(content), lambda: self.path(name).read_bytes())

    def synchronize(self) -> None:
        """Ends an epoch, at times with an exchange of what ranks have read."""
        how = self.chance.randrange(3)
        if how == 0:
            self.world.Barrier()
        elif how == 1:
            self.digest = zlib.crc32(str(self.world.allreduce(self.digest)).encode(), self.digest)
        else:
            rank, size = self.world.rank, self.world.size
            for _ in range(2):
                token = 0 if rank == 0 else self.world.recv(None, rank - 1, 2)
                self.world.send(token + 1, (rank + 1) % size, 2)
                if rank == 0:
                    self.world.recv(None, size - 1, 2)

    def clean(self) -> None:
        for rank in range(self.world.size):
            while self.open[rank]:
                self.close(rank)
        self.world.Barrier()
        for name in sorted(self.names):
            self.real(0, f"unlink {name} in the end", None, lambda: os.unlink(self.path(name)))
        for name in sorted(self.folders):
            self.real(0, f"rmdir {name} in the end", None, lambda: os.rmdir(self.path(name)))
        self.real(0, "list in the end", [], lambda: os.listdir(self.folder))
        self.world.Barrier()


def pick(one: Open, number: int) -> int:
    """One of the descriptors of an open file."""
    return one.numbers[number % len(one.numbers)]


def stream(path: Path, mode: str, pieces) -> bytes | None:
    """Writes these pieces, or reads the file whole, by the C library's streams."""
    file = LIBC.fopen(os.fsencode(path), mode.encode())
    if not file:
        raise OSError(ctypes.get_errno(), "fopen")
    try:
        for at, data in pieces:
            LIBC.fseek(file, at, os.SEEK_SET)
            LIBC.fwrite(data, 1, len(data), file)
        if mode != "r":
            return None
        found = b""
        room = ctypes.create_string_buffer(LONGEST)
        while count := LIBC.fread(room, 1, LONGEST, file):
            found += room.raw[:count]
        return found
    finally:
        LIBC.fclose(file)


def buffered(path: Path, mode: str, pieces) -> None:
    """Writes these pieces by Python's buffered files."""
    with open(path, mode + "b") as file:
        for at, data in pieces:
            file.seek(at)
            file.write(data)


def shown(answer) -> str:
    text = repr(answer)
    return text if len(text) < 60 else f"{text[:40]}... ({zlib.crc32(text.encode()):#x}, {len(answer)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="which is there, and empty")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first plan")
    parser.add_argument("--plans", type=int, default=100)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    made = wrong = digest = 0
    for number in range(options.first, options.first + options.plans):
        plan = Plan(number, options.seed, options.folder, world)
        plan.run()
        made, wrong, digest = made + plan.made, wrong + plan.wrong, zlib.crc32(str(plan.digest).encode(), digest)
        if not world.rank and number % 50 == 49:
            print(f"plans until {number}", file=sys.stderr, flush=True)
    print(f"rank {world.rank}: {options.plans} plans, {made} calls, wrong {wrong}, digest {digest:08x}", flush=True)


if __name__ == "__main__":
    main()
