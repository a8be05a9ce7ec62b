"""Paragraphs of docs/BENCHMARKS.md, in lines as long as those of the other documents."""

import textwrap

WIDTH = 99


def wrapped(text: str) -> str:
    """The paragraph in lines; no word is divided."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
