"""Random messages between all ranks, all of them checked. Prints `done: MESSAGES` on rank 0.

Usage: stress.py SEED ROUNDS

In each round the seed determines, alike on every rank, how many messages of which length and kind
each rank sends to each other rank, and by which kind of receive each rank receives them. Every
message contains its source, its target, and its number among the messages of that pair; the rest of
its bytes follow from these. So a message that is lost, duplicated, overtaken, cut or mixed with
another is noticed at once.
"""

import random
import sys
import time
import traceback

import numpy
from mpi4py import MPI

SEED, ROUNDS = int(sys.argv[1]), int(sys.argv[2])
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LONGEST = 4 << 20
HEADER = 16
# Bytes that one rank receives in one round: keeps rounds short.
VOLUME = 12 << 20
MESSAGES_PER_PAIR = 12
WAYS = ["wild", "directed", "probe", "improbe", "blocking", "mixed", "late"]
NOISE = numpy.random.default_rng(7).integers(0, 256, LONGEST + 70_000, numpy.uint8)
NO_TAG = 30_000
# Seconds in which the other ranks can send.
LATE_S = 0.005


class Message:
    def __init__(self, source, target, number, tag, size, kind):
        self.source, self.target, self.number = source, target, number
        self.tag, self.size, self.kind = tag, size, kind

    def bytes(self):
        """A header if it fits, then noise whose offset depends on source, target, number and
        tag."""
        place = (self.source * 31 + self.target * 17 + self.number * 101 + self.tag) % 65_521
        content = NOISE[place : place + self.size].copy()
        if self.size >= HEADER:
            head = [self.source, self.target, self.number, self.size]
            content[:HEADER] = numpy.array(head, numpy.uint32).view(numpy.uint8)
        return content


def plan(chance):
    """The messages of a round, and the kind of receive of each rank."""
    messages = []
    for target in range(SIZE):
        room = VOLUME
        for source in range(SIZE):
            for number in range(chance.randint(0, MESSAGES_PER_PAIR) if source != target else 0):
                size = min(length(chance), room)
                room -= size
                kind = chance.choice(["isend", "isend", "issend", "strided", "persistent"])
                messages.append(Message(source, target, number, chance.randint(0, 5), size, kind))
    return messages, [chance.choice(WAYS) for _ in range(SIZE)]


def length(chance):
    """A length: often short, sometimes long, often at a threshold."""
    border = chance.choice([0, 8, 64, 1024, 8192, 16384, 32768, 65536, 262144, 524288])
    return chance.choice(
        [
            chance.randint(0, 64),
            max(0, border + chance.randint(-1, 1)),
            int(2 ** chance.uniform(0, 22)),
            chance.choice([LONGEST, 0, 1]) if chance.random() < 0.2 else 100,
        ]
    )


def send(message):
    content = message.bytes()
    if message.kind == "strided" and message.size % 8 == 0 and message.size > 0:
        return send_strided(message, content)
    if message.kind == "persistent":
        request = WORLD.Send_init(content, message.target, message.tag)
        request.Start()
        return request, content
    how = WORLD.Issend if message.kind == "issend" else WORLD.Isend
    return how(content, message.target, message.tag), content


def send_strided(message, content):
    """Sends blocks of eight bytes with gaps of eight between them."""
    blocks = message.size // 8
    spread = numpy.full(blocks * 16, 0xEE, numpy.uint8)
    spread.reshape(blocks, 16)[:, :8] = content.reshape(blocks, 8)
    kind = MPI.BYTE.Create_vector(blocks, 8, 16).Commit()
    request = WORLD.Isend([spread, 1, kind], message.target, message.tag)
    kind.Free()
    return request, spread


class Inbox:
    """The messages of a round for this rank, by source, in the order in which they were sent."""

    def __init__(self, messages):
        self.expected = {source: [] for source in range(SIZE)}
        for message in messages:
            if message.target == RANK:
                self.expected[message.source].append(message)
        self.total = sum(map(len, self.expected.values()))
        self.largest = max((m.size for all in self.expected.values() for m in all), default=0)

    def take(self, status, room, tag_was_free=True):
        """Checks a received message: it must be the next one of its source, or the next one with
        its tag."""
        waiting = self.expected[status.Get_source()]
        tag, size = status.Get_tag(), status.Get_count(MPI.BYTE)
        of_tag = waiting if tag_was_free else [m for m in waiting if m.tag == tag]
        assert of_tag, f"a message from {status.Get_source()} too many, tag {tag}, {size} bytes"
        message = of_tag[0]
        waiting.remove(message)
        what = f"from {message.source} number {message.number}"
        assert (tag, size) == (message.tag, message.size), (
            f"{what}: tag {tag}, {size} bytes; expected tag {message.tag}, {message.size} bytes"
        )
        wrong = numpy.flatnonzero(room[:size] != message.bytes())
        assert not wrong.size, f"{what}: {wrong.size} of {size} bytes are wrong, first at {wrong[0]}"
        assert (room[size:] == 0x55).all(), f"{what}: bytes behind its end were written"
        self.total -= 1


def room(size):
    return numpy.full(size + 8, 0x55, numpy.uint8)


def take_wild(inbox, chance):
    """Posts all receives at once, with wildcards: each source's messages fill them in order."""
    rooms = [room(inbox.largest) for _ in range(inbox.total)]
    requests = [WORLD.Irecv(into, MPI.ANY_SOURCE, MPI.ANY_TAG) for into in rooms]
    statuses = [MPI.Status() for _ in requests]
    MPI.Request.Waitall(requests, statuses)
    for status, into in zip(statuses, rooms):
        inbox.take(status, into)


def take_directed(inbox, chance):
    """Posts receives for source and tag, in a random order; they complete in any order."""
    wanted = [m for all in inbox.expected.values() for m in all]
    order = list(range(len(wanted)))
    chance.shuffle(order)
    # Receives of one source and tag stay in order.
    ways = [(wanted[i].source, wanted[i].tag) for i in order]
    queues = {}
    for message in wanted:
        queues.setdefault((message.source, message.tag), []).append(message)
    posted = [queues[way].pop(0) for way in ways]
    rooms = [room(m.size) for m in posted]
    requests = [WORLD.Irecv(into[: m.size], m.source, m.tag) for m, into in zip(posted, rooms)]
    statuses = [MPI.Status() for _ in requests]
    MPI.Request.Waitall(requests, statuses)
    for status, into in zip(statuses, rooms):
        inbox.take(status, into, tag_was_free=False)


def take_probe(inbox, chance):
    status = MPI.Status()
    while inbox.total:
        WORLD.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        into = room(status.Get_count(MPI.BYTE))
        WORLD.Recv(into, status.Get_source(), status.Get_tag(), status)
        inbox.take(status, into)


def take_improbe(inbox, chance):
    """Matches several messages before the first of them is received."""
    status = MPI.Status()
    while inbox.total:
        held = []
        for _ in range(chance.randint(1, 4)):
            message = WORLD.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message:
                held.append((message, room(status.Get_count(MPI.BYTE))))
        done = []
        for message, into in held:
            state = MPI.Status()
            message.Recv(into, state)
            done.append((state, into))
        for state, into in done:
            inbox.take(state, into)


def take_blocking(inbox, chance):
    status, into = MPI.Status(), room(inbox.largest)
    while inbox.total:
        into.fill(0x55)
        WORLD.Recv(into, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        inbox.take(status, into)


def take_mixed(inbox, chance):
    """Receives from the sources in turn, with any tag; some receives use persistent requests."""
    status, into = MPI.Status(), room(inbox.largest)
    sources = [source for source, all in inbox.expected.items() if all]
    while sources:
        source = chance.choice(sources)
        into.fill(0x55)
        if chance.random() < 0.5:
            request = WORLD.Recv_init(into, source, MPI.ANY_TAG)
            request.Start()
            request.Wait(status)
            request.Free()
        else:
            WORLD.Recv(into, source, MPI.ANY_TAG, status)
        inbox.take(status, into)
        sources = [source for source, all in inbox.expected.items() if all]


def take_late(inbox, chance):
    """Probes for a message that never comes until all other ranks have sent: every message is
    unexpected."""
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        WORLD.Iprobe(MPI.ANY_SOURCE, NO_TAG)
    take_wild(inbox, chance)


TAKE = {way: globals()[f"take_{way}"] for way in WAYS}


def cancelled():
    """A receive without a matching message can be cancelled; a receive that has its message
    cannot."""
    into = room(64)
    request = WORLD.Irecv(into, MPI.ANY_SOURCE, NO_TAG)
    request.Cancel()
    status = MPI.Status()
    request.Wait(status)
    assert status.Is_cancelled() and (into == 0x55).all(), "a receive was not cancelled"


def truncated(chance):
    """A message longer than its receive buffer is an error for the receiver, and disturbs no other
    message."""
    sizes = [chance.choice([100, 20_000, 300_000, 3_000_000]) for _ in range(3)]
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    contents = [Message(RANK, right, 0, 9, size, "").bytes() for size in sizes]
    requests = [WORLD.Isend(content, right, 9) for content in contents]
    for size in sizes:
        short = size // 2
        into = room(short)
        try:
            WORLD.Recv(into[:short], left, 9)
            raise AssertionError(f"{size} bytes fitted into {short}")
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_TRUNCATE, error
        assert (into[short:] == 0x55).all(), "a truncated message went on behind its room"
    MPI.Request.Waitall(requests)


def main():
    WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    alike = random.Random(SEED)
    sent = 0
    for number in range(ROUNDS):
        messages, ways = plan(alike)
        sizes = random.Random(SEED * 1000 + number)
        chance = random.Random(SEED * 1000 + number * SIZE + RANK)
        outgoing = [m for m in messages if m.source == RANK]
        flights = [send(message) for message in outgoing]
        inbox = Inbox(messages)
        TAKE[ways[RANK]](inbox, chance)
        assert inbox.total == 0
        for request, _ in flights:
            request.Wait()
            if request != MPI.REQUEST_NULL:
                request.Free()
        cancelled()
        if SIZE > 1:
            WORLD.Barrier()
            truncated(sizes)
        sent += len(messages)
        WORLD.Barrier()
        assert not WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), "a message too many"
        # The next round begins after this barrier.
        WORLD.Barrier()
    if RANK == 0:
        print(f"done: {sent}", flush=True)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    WORLD.Abort(1)
