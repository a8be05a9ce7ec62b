"""What bench/recovery.py compares: variants, sizes with their repetitions, and targets.

What enters: nothing. What leaves: constants for the measurement and for its section in the document.
"""

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(1 << power for power in range(23))
# Messages up to this size are judged by their time, longer ones by their bandwidth.
SHORT_MAX = 32 * KIB
# Parts, in the order in which they run.
PARTS = (
    *("new", "again", "beyond", "stream-new", "stream-again", "stream-beyond", "pairs", "one-sided", "ranks"),
    *("nodes", "spares", "link", "applications", "disk", "counts", "back"),
)


@dataclass(frozen=True)
class Variant:
    name: str
    options: tuple[str, ...]

    @property
    def logs(self) -> bool:
        return "--recover" in self.options


SENDERS = Variant("logs of the senders", ("--recover", "--set", "recover_log=sender"))
UNIT = Variant("logs of the senders, recover_unit=node", (*SENDERS.options, "--set", "recover_unit=node"))
RELAY = Variant("log of the relay", ("--recover", "--set", "recover_log=relay"))
SAME = Variant("without --recover, same provider", ("--set", "local=own"))
PLAIN = Variant("without --recover", ())
SPARES = Variant("logs of the senders, --spares 1", (*SENDERS.options, "--spares", "1"))

# New memory, so much that nothing is given up. Memory that is used again: what does not fit is given
# up, newest first, so it stays in the processor's caches. Memory that is used in turn, as released
# memory of a job with checkpoints is: a checkpoint is never due, and `false` takes none.
MEMORY = {
    "new": ("--set", "recover_memory=8GiB"),
    "again": ("--set", "recover_memory=64MiB"),
    "beyond": ("--set", "recover_memory=512MiB", "--checkpoint", "24h", "--set", "criu=/bin/false"),
}
# Bytes that each rank sends before the first size, so that memory which is used again is full.
FILL_BYTES = {"new": 0, "again": 40 * MIB, "beyond": 288 * MIB}


@dataclass(frozen=True)
class Group:
    """Sizes that one job measures, with the same number of repetitions."""

    sizes: tuple[int, ...]
    times: int


def groups(*ends: tuple[int, int]) -> tuple[Group, ...]:
    """Groups by their largest size and their repetitions."""
    found, first = [], 0
    for last, times in ends:
        found.append(Group(tuple(size for size in SIZES if first < size <= last), times))
        first = last
    return tuple(found)


# Each size takes 0.05 to 0.3 s by the faster variants; all sizes together send less than 1.6 GiB in
# each direction, and a job less than 1 GiB.
PINGPONG = groups((4 * KIB, 30_000), (64 * KIB, 4_000), (512 * KIB, 640), (4 * MIB, 80))
# Of Uniband, a repetition is `WINDOW` messages.
WINDOW = 16
UNIBAND = groups((KIB, 10_000), (8 * KIB, 2_000), (64 * KIB, 250), (512 * KIB, 32), (4 * MIB, 8))
PAIRS = groups((KIB, 4_000), (8 * KIB, 1_000), (64 * KIB, 128), (512 * KIB, 16), (4 * MIB, 4))
ONE_SIDED = groups((4 * KIB, 4_000), (64 * KIB, 800), (512 * KIB, 120), (4 * MIB, 20))
TCP_PINGPONG = groups((4 * KIB, 6_000), (64 * KIB, 1_500), (512 * KIB, 300), (4 * MIB, 50))
TCP_UNIBAND = groups((KIB, 4_000), (8 * KIB, 1_000), (64 * KIB, 160), (512 * KIB, 24), (4 * MIB, 6))
# Over the link: enough for congestion control to find the rate.
LINK_PINGPONG = (Group((8, 512, 4 * KIB, 32 * KIB), 100), Group((256 * KIB,), 60), Group((4 * MIB,), 16))
# The relay's log is an order of magnitude slower, so it repeats less often.
RELAY_SHARE = 8
# Of `--quick`: few sizes, few repetitions.
QUICK_SIZES, QUICK_SHARE = (8, KIB, 64 * KIB, MIB), 20


def fewer(all_groups: tuple[Group, ...], quick: bool, way: Variant) -> tuple[Group, ...]:
    """The groups of a variant, with its repetitions."""
    share = (RELAY_SHARE if way == RELAY else 1) * (QUICK_SHARE if quick else 1)
    kept = [(tuple(size for size in it.sizes if not quick or size in QUICK_SIZES), it.times) for it in all_groups]
    return tuple(Group(sizes, max(times // share, 2)) for sizes, times in kept if sizes)


RMA_BENCHMARKS = ("Unidir_put", "Unidir_get", "Accumulate")
# One-sided benchmarks of one integer.
ATOMIC = ("Fetch_and_op", "Compare_and_swap")
CROWDS = (2, 4, 8, 16, 32, 64)
APPLICATIONS = ("heat", "gradient", "transpose")


@dataclass(frozen=True)
class Target:
    """What logs of the senders may cost, beside the same provider without `--recover`."""

    latency: float
    bandwidth: float


TARGETS = {"new": Target(1.2, 0.08), "again": Target(1.2, 0.5), "beyond": Target(1.2, 0.25)}
TARGETS |= {f"stream-{name}": target for name, target in TARGETS.items()}
TARGETS |= {"pairs": Target(1.2, 0.5), "one-sided": Target(1.2, 0.5)}
TARGETS |= {"nodes": Target(1.05, 0.95), "link": Target(1.05, 0.95), "spares": Target(1.05, 0.9)}
TARGET_UNIT, TARGET_APPLICATION, TARGET_DISK = 1.1, 1.03, 0.9
TARGET_LIVE_S, TARGET_REPLAY, TARGET_DETERMINANT = 0.5, 5.0, 8.0
# Round trips to the keeper that a message to another node may wait, with spare nodes.
TARGET_ROUND_TRIPS = 1.0
