"""The cost of a relay for each message and hop, against a bare forwarder that only reads and
writes.

The example `measure` of the relay's crate measures and prints a table; this module stores the table
with the ratios to which the target applies.
"""

import json
import subprocess

import prose
import stamp
from support import paths

TARGET = 1.3
RELAY_AND_PEER = (("one relay", "one forwarder"), ("two relays, TLS", "two forwarders"))


def measure(rounds: int) -> None:
    """Writes build/results/bench-hop-cost.json: the table as text."""
    print(f"hop-cost: {rounds} rounds")
    command = ["cargo", "run", "--release", "-q", "-p", "landbridge-relay", "--example", "measure"]
    finished = subprocess.run(
        [*command, "--", str(rounds)], cwd=paths.ROOT, capture_output=True, text=True, timeout=600
    )
    if finished.returncode != 0:
        print(f"  does not run: {finished.stderr[-400:]}")
        return
    document = {"table": finished.stdout, "stamp": stamp.now()}
    (paths.RESULTS / "bench-hop-cost.json").write_text(json.dumps(document))


def section(result: dict) -> str:
    lines = [
        "## A relay beside a bare forwarder",
        "",
        prose.wrapped(
            "Two clients exchange 24-byte frames over loopback, then a stream of the largest frames. The table shows the "
            "round trip, then processor time, voluntary context switches (wake-ups) and system calls of the processes in the "
            "middle, each for one message and hop. The calls of forwarders and of HAProxy are not counted (0.00): the "
            "forwarder waits, reads and writes, which are three."
        ),
        *stamp.lines(result),
        "",
        result["table"],
    ]
    rows = {}
    for line in result["table"].splitlines()[2:]:
        name, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = [float(number) for number in numbers]
    for relay, peer in RELAY_AND_PEER:
        if relay in rows and peer in rows:
            cpu, wakes = (rows[relay][i] / max(rows[peer][i], 0.01) for i in (1, 2))
            lines.append(f"- {relay} over {peer}: CPU {verdict(cpu)}, wake-ups {verdict(wakes)}.")
    return "\n".join(lines) + "\n"


def verdict(ratio: float) -> str:
    return f"{ratio:.2f}x" + ("" if ratio <= TARGET else f" (missed: {TARGET})")
