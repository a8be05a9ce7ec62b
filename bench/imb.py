"""Runs one IMB-MPI1 benchmark over one peer and reads its table."""

import re
from dataclasses import dataclass

from peers import Peer
from support import paths, process

IMB = paths.venv("impi") / "bin" / "IMB-MPI1"
# Seconds: one run of one benchmark at all sizes takes 5 s over the slowest peer on an idle machine.
LIMIT_S = 180.0


@dataclass
class Table:
    """Rows of an IMB table by message size; the columns by their header names."""

    rows: dict[int, dict[str, float]]

    def latency_us(self, size: int) -> float:
        row = self.rows[size]
        return row[next(name for name in ("t[usec]", "t_avg[usec]") if name in row)]

    def bandwidth(self, size: int) -> float:
        """Megabytes (10^6 bytes) per second."""
        row = self.rows[size]
        return row["Mbytes/sec"]


class Failed(Exception):
    """The peer does not run here, or did not finish; the text is the end of its output."""


def run(peer: Peer, ranks: int, benchmark: str, sizes: list[int], *options: str) -> Table:
    """The table of `benchmark` for exactly `sizes`, with at most IMB's own number of
    repetitions."""
    lengths = paths.RESULTS / "imb-lengths"
    lengths.parent.mkdir(parents=True, exist_ok=True)
    lengths.write_text("\n".join(map(str, sizes)) + "\n")
    program = [str(IMB), benchmark, "-msglen", str(lengths), "-npmin", str(ranks), *options]
    finished = process.run(peer.command(ranks, program), LIMIT_S, peer.environment())
    table = parse(finished.output)
    if not finished.ok or not set(sizes) <= set(table.rows):
        raise Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return table


def parse(output: str) -> Table:
    """The last table in IMB's output: a header line that begins with #bytes, then numbers."""
    header, rows = [], {}
    for line in output.splitlines():
        words = line.split()
        if words and words[0] == "#bytes":
            header, rows = words, {}
        # A sample that took too long has words in its row.
        elif header and is_row(words):
            rows[int(words[0])] = dict(zip(header[1:], map(float, words[1:])))
    return Table(rows)


def is_row(words: list[str]) -> bool:
    return bool(words) and all(re.fullmatch(r"[\d.]+", word) for word in words)


def tables(output: str) -> dict[str, Table]:
    """All tables of one or several runs, by benchmark; tables of the same benchmark are one. The
    one-sided benchmarks print a table for each mode: here only that in which the origin completes
    each operation before the next (`NON-AGGREGATE`)."""
    found: dict[str, Table] = {}
    rows, header, is_skipped = {}, [], False
    for line in output.splitlines():
        words = line.split()
        if line.startswith("# Benchmarking "):
            rows, header, is_skipped = found.setdefault(words[2], Table({})).rows, [], False
        elif line.startswith("#    MODE:"):
            is_skipped = words[-1] != "NON-AGGREGATE"
        elif words and words[0] == "#bytes":
            header = words
        elif header and not is_skipped and is_row(words):
            rows[int(words[0])] = dict(zip(header[1:], map(float, words[1:])))
    return found
