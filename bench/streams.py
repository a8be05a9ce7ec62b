#!/usr/bin/env python3
"""How much of a long wide-area link parallel streams between two relays fill, and one stream over UDP.

    bench/streams.py                        1, 4, 16 and 64 streams, and UDP, with and without loss; five minutes
    bench/streams.py --streams 1,16 --loss 0 --pairs 4 --seconds 5
    bench/streams.py --udp --loss 0,0.1,1   one stream over TCP, and one over UDP with either congestion control

Two clusters of two hosts, joined by a link of 1 Gbit/s with a round trip of 100 ms. Pairs of ranks, one on either
side, send messages of 1 MiB one way, 64 of all pairs under way, as IMB's Uniband does; counted is what has come
whole in a span of time after a warm-up. (Messages under way share what there is and end together: were there more
of them, a slow line would bring none in some spans and too many in others.) IMB itself counts windows: one over a
single stream on a lossy link takes minutes.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import stall  # noqa: E402
import stamp  # noqa: E402
from support import paths  # noqa: E402

LINK_MB_S = 125.0
# So many streams over TCP, or one over UDP.
UDP = {"udp": "bbr", "udp-cubic": "cubic"}
STREAMS, LOSSES, PAIRS = (1, 4, 16, 64, "udp"), ("0 %", "0.1 %"), (1, 4)
TCP_AND_UDP = (1, *UDP)
ROUNDS = 1
SIZE, WINDOW = 1 << 20, 64
# TCP needs a dozen round trips to find the rate, and longer after its first loss.
WARM_UP_S, SECONDS = 4.0, 6.0
# From the start of a job to its first message: a single lossy stream takes a while for a window.
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
        # Half the world on either side: the flow's pairs are across the link.
        per_node = max(1, pairs // HOSTS)
        settings = {"wan_streams": str(streams)}
        if streams in UDP:
            settings = {"wan_udp": "on", "congestion": UDP[streams]}
        words = labs.job(2 * pairs, per_node, settings, program)
        words[words.index("--") : words.index("--")] = ["--ranks-per-cluster", str(pairs)]
        receivers = [notes / str(rank) for rank in range(pairs)]
        with labs.Background(file, labs.name("streams"), words) as job:
            have_begun = lambda: all(path.exists() and path.stat().st_size for path in receivers)  # noqa: E731
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
        "Two clusters joined by a link of 1 Gbit/s (125 MB/s with all headers) with a round trip of 100 ms; pairs of",
        f"ranks across it send messages of 1 MiB one way, {WINDOW} of all pairs under way. MB/s of all together over",
        f"{result['seconds']:g} s after a warm-up, {result['rounds']} rounds, medians.",
        *stamp.lines(result),
        "",
    ]
    found = {tuple(case): value for case, value in zip(result["cases"], result["medians"])}
    numbers = list(dict.fromkeys(number for _, _, number in found))
    lines += [f"| loss | pairs | {' | '.join(named(number) for number in numbers)} |"]
    lines.append("|---|--:|" + "--:|" * len(numbers))
    for loss, pairs in dict.fromkeys((loss, pairs) for loss, pairs, _ in found):
        cells = [f"{(value := found[loss, pairs, number]):.1f} ({value / LINK_MB_S:.0%})" for number in numbers]
        lines.append(f"| {loss} | {pairs} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def named(streams: int | str) -> str:
    if streams in UDP:
        return f"UDP, {UDP[streams].upper()}"
    return f"{streams} stream{'s' if streams != 1 else ''}"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
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
                measure(
                    max(options.rounds, 1),
                    TCP_AND_UDP if options.udp else streams_of(options.streams),
                    wanted,
                    numbers_of(options.pairs),
                    options.seconds,
                )
            )
        )
    )
