"""The command line of a benchmark that has parts which can be measured alone."""

import argparse
from pathlib import Path

import labs
from support import paths, process


def main(document: str, rounds: int, parts: tuple[str, ...], measure, section) -> int:
    """Measures by `measure(rounds, parts, quick)`, and prints the result as `section` describes
    it."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bin", type=Path, metavar="DIR", help="the binaries; default: LANDBRIDGE_RELEASE, else target/release")
    parser.add_argument("parts", nargs="*", metavar="PART", default=parts)
    options = parser.parse_args()
    process.adopt_orphans()
    if set(options.parts) - set(parts):
        parser.error(f"parts are {', '.join(parts)}")
    if options.bin:
        paths.use_release(options.bin)
    try:
        print(section(measure(1 if options.quick else options.rounds, tuple(options.parts), options.quick)))
    except labs.Failed as failed:
        print(f"does not run: {failed}")
        return 1
    return 0
