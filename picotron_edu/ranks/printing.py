"""What the ranks printed, printed once, grouped by rank: the same text in every run."""

from __future__ import annotations

import sys


def print_by_rank(texts: list[list[tuple[str, str]]], skip: int | None = None) -> None:
    """texts: of each rank its (stream, text) pieces; skip: a rank that has been shown already."""
    lines = []
    for rank, pieces in enumerate(texts):
        text = "".join(piece for _, piece in pieces)
        if rank != skip and text:
            lines += [f"rank {rank} │ {line}" for line in plain(text).splitlines()]
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def plain(text: str) -> str:
    """As a terminal would leave it: of a line drawn over and over with \\r, only the last state."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
