#!/usr/bin/env python3
"""How much of a long wide-area link parallel streams between two relays fill, and one UDP stream.

    bench/streams.py                        1, 4, 16, 64 streams, and UDP, with and without loss; 5 min
    bench/streams.py --quick                1, 16 and 64 streams, four pairs; 1.5 min
    bench/streams.py --streams 1,16 --loss 0 --pairs 4 --seconds 5
    bench/streams.py --udp --loss 0,0.1,1   one stream over TCP, and over UDP with BBR and CUBIC

Two clusters of two hosts, joined by a link of 1 Gbit/s with a round trip of 100 ms. Pairs of ranks,
one on either side, send messages of 1 MiB one way, 64 of all pairs in flight, as IMB's Uniband
does; the messages that arrive whole within a span after a warm-up are counted. (Messages in flight
share the bandwidth and end together: with more of them, a slow link would deliver none in some
spans and too many in others.) IMB itself counts windows: a window over a single stream on a lossy
link takes minutes.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import prose  # noqa: E402
import stall  # noqa: E402
import stamp  # noqa: E402
from support import paths, svg  # noqa: E402

LINK_MB_S = 125.0
# Number of streams over TCP, or one over UDP.
UDP = {"udp": "bbr", "udp-cubic": "cubic"}
STREAMS, LOSSES, PAIRS = (1, 4, 16, 64, "udp"), ("0 %", "0.1 %"), (1, 4)
TCP_AND_UDP = (1, *UDP)
QUICK_STREAMS, QUICK_PAIRS = (1, 16, 64), (4,)
# Target as a multiple of one stream; bounded by the rate of the link.
TARGET = 12.0
ROUNDS = 1
SIZE, WINDOW = 1 << 20, 64
# Seconds: TCP needs a dozen round trips to find the rate, and longer after its first loss.
WARM_UP_S, SECONDS = 4.0, 6.0
# Seconds from the start of a job to its first message: a single lossy stream needs a while for a
# window.
FIRST_LIMIT_S = 30.0
HOSTS = 2
LAB = """name = "streams"
[[site]]
name = "north"
hosts = {hosts}
slots = 32
subnet = "10.1.0.0/24"
[[site]]
name = "south"
hosts = {hosts}
slots = 32
subnet = "10.2.0.0/24"
[[link]]
between = ["north", "south"]
rate = "1 Gbit/s"
delay = "50 ms"
loss = "{loss}"
"""


def measure(
    rounds: int = ROUNDS, streams=STREAMS, losses=LOSSES, pairs=PAIRS, seconds: float = SECONDS
) -> dict:
    """Writes build/results/bench-streams.json: MB/s for each case and round."""
    cases = [(loss, count, number) for loss in losses for count in pairs for number in streams]
    rates: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds):
        for case, found in zip(cases, rates):
            loss, count, number = case
            what = f"{loss} loss, {count} pairs, {named(number)}"
            print(f"streams: round {turn + 1} of {rounds}: {what}: ", end="", flush=True)
            found.append(one_run(loss, count, number, seconds))
            print(f"{found[-1]:.1f} MB/s", flush=True)
    result = {
        "cases": cases,
        "samples": rates,
        "medians": [statistics.median(found) for found in rates],
        "rounds": rounds,
        "seconds": seconds,
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-streams.json").write_text(json.dumps(result, indent=1))
    return result


def one_run(loss: str, pairs: int, streams: int | str, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file, notes = Path(folder) / "lab.toml", Path(folder) / "notes"
        file.write_text(LAB.format(hosts=HOSTS, loss=loss))
        notes.mkdir()
        program = [paths.python("mpich"), stall.FLOW, "--size", SIZE, "--depth", max(1, WINDOW // pairs), "--notes", notes]
        # Half of the ranks are on either side: the pairs are across the link.
        per_node = max(1, pairs // HOSTS)
        settings = {"wan_streams": str(streams)}
        if streams in UDP:
            settings = {"wan_udp": "on", "congestion": UDP[streams]}
        words = labs.job(2 * pairs, per_node, settings, program)
        words[words.index("--") : words.index("--")] = ["--ranks-per-cluster", str(pairs)]
        receivers = [notes / str(rank) for rank in range(pairs)]
        with labs.Background(file, labs.name("streams"), words) as job:
            # noqa: E731
            have_begun = lambda: all(path.exists() and path.stat().st_size for path in receivers)
            if not job.until(have_begun, FIRST_LIMIT_S):
                return 0.0
            job.sleep(WARM_UP_S + seconds)
        return sum(rate(stall.read(path), seconds) for path in receivers)


def rate(came, seconds: float) -> float:
    """MB/s in the span after the warm-up, which begins with a receiver's first message."""
    begin = came[0] + WARM_UP_S * 1e9
    return SIZE * sum(begin < at <= begin + seconds * 1e9 for at in came) / seconds / 1e6


def section(result: dict) -> str:
    lines = [
        "## Parallel streams over a long wide-area link",
        "",
        prose.wrapped(
            "A link of 1 Gbit/s (125 MB/s with all headers) with a round trip of 100 ms joins two clusters. Pairs of ranks "
            f"across the link send messages of 1 MiB one way, {WINDOW} under way over all pairs. MB/s of all pairs together "
            f"over {result['seconds']:g} s after a warm-up, {stamp.rounds(result['rounds'])}, medians."
        ),
        *stamp.lines(result),
        "",
    ]
    found = {tuple(case): value for case, value in zip(result["cases"], result["medians"])}
    numbers = list(dict.fromkeys(number for _, _, number in found))
    lines += [f"| loss | pairs | {' | '.join(named(number) for number in numbers)} | {named(most(numbers))} / 1 |"]
    lines.append("|---|--:|" + "--:|" * (len(numbers) + 1))
    for loss, pairs in dict.fromkeys((loss, pairs) for loss, pairs, _ in found):
        rates = [found[loss, pairs, number] for number in numbers]
        cells = [f"{rate:.1f} ({rate / LINK_MB_S:.0%})" for rate in rates]
        lines.append(f"| {loss} | {pairs} | {' | '.join(cells)} | {verdict(rates, numbers)} |")
    return "\n".join(lines) + "\n"


def most(numbers) -> int:
    """The largest number of streams over TCP."""
    return max(number for number in numbers if number not in UDP)


def verdict(rates: list[float], numbers: list) -> str:
    """The ratio of the most streams to one, the best number of streams if it is another, and the
    part of the target that the link can carry."""
    over_tcp = {number: rate for number, rate in zip(numbers, rates) if number not in UDP}
    one, last = over_tcp.get(1), over_tcp[most(numbers)]
    if not one:
        return "–"
    notes = []
    if last < TARGET * one:
        room = LINK_MB_S / one
        notes.append(f"missed: {TARGET:g}x" + (f", the link has room for {room:.1f}x" if room < TARGET else ""))
    best = max(over_tcp, key=over_tcp.get)
    if over_tcp[best] > last:
        notes.append(f"{named(best)}: {over_tcp[best] / one:.1f}x")
    return f"{last / one:.1f}x" + (f" ({'; '.join(notes)})" if notes else "")


def picture(result: dict) -> str:
    found = {tuple(case): value for case, value in zip(result["cases"], result["medians"])}
    groups = []
    for loss, pairs in dict.fromkeys((loss, pairs) for loss, pairs, _ in found):
        bars = {named(number): rate for (a, b, number), rate in found.items() if (a, b) == (loss, pairs)}
        groups.append((f"{loss}, {pairs} pair{'s' if pairs != 1 else ''}", bars))
    title = "Parallel streams, round trip 100 ms, by loss and pairs of ranks"
    return svg.bars(title, groups, "MB/s", [(LINK_MB_S, "the link")])


def named(streams: int | str) -> str:
    if streams in UDP:
        return f"UDP, {UDP[streams].upper()}"
    return f"{streams} stream{'s' if streams != 1 else ''}"


def quick() -> dict:
    return measure(1, QUICK_STREAMS, pairs=QUICK_PAIRS)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--streams", default=",".join(map(str, STREAMS)), help="1 to 64, udp, udp-cubic; with commas"
    )
    parser.add_argument("--udp", action="store_true", help=f"the same as --streams {','.join(map(str, TCP_AND_UDP))}")
    parser.add_argument("--loss", default="0,0.1", help="per cent, with commas")
    parser.add_argument("--pairs", default=",".join(map(str, PAIRS)), help="with commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that are counted, after the warm-up")
    return parser.parse_args()


def numbers_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def streams_of(text: str) -> tuple[int | str, ...]:
    return tuple(word if word in UDP else int(word) for word in text.split(","))


if __name__ == "__main__":
    options = arguments()
    wanted = [f"{share} %" for share in options.loss.split(",")]
    sys.exit(
        labs.main(
            lambda: section(
                quick()
                if options.quick
                else measure(
                    max(options.rounds, 1),
                    TCP_AND_UDP if options.udp else streams_of(options.streams),
                    wanted,
                    numbers_of(options.pairs),
                    options.seconds,
                )
            )
        )
    )
